"""A rank of a benchmark job: times calls of pycoll, of MPI, or of gloo.

    python bench_worker.py PLAN RESULT

PLAN is a JSON file; rank 0 writes RESULT. One program measures everybody, so that no side is timed
in another way than the others. Peers run this file by its path, in environments without pycoll: it
imports nothing but NumPy and the library it measures.
"""

from __future__ import annotations

import functools
import importlib.metadata
import itertools
import json
import math
import platform
import resource
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

Array = np.ndarray[Any, Any]
Call = Callable[[], object]

# A timed loop takes about this long: short enough for many rounds, long enough for the clock and
# for what the scheduler does now and then.
LOOP_S = 0.04
# Before it every page, cache and connection, and the clock of the processor, shall be as in it.
WARM_S = 0.02
WARM_LOOPS = 3
# A call that takes longer than the loop should is still not judged by one sample.
MIN_CALLS = 3

PAGE = 4096

# Collectives whose argument has a row for every rank.
SPLITTING = frozenset({"scatter", "reduce_scatter", "all_to_all"})
# Collectives whose result has a row of every rank.
STACKING = frozenset({"gather", "all_gather", "all_to_all", "iall_gather"})
# Those that only wait: without values and results.
BARRIERS = frozenset({"barrier", "ibarrier"})
# Non-blocking collectives: each is started and waited for at once.
NON_BLOCKING = frozenset({"ibarrier", "iall_reduce", "iall_gather"})


class Library(ABC):
    """A library under test, in one rank of its job.

    Attributes:
        rank, size: this process, and the number of processes.
        in_place: the collectives that leave the result in the array they are given.
    """

    rank: int
    size: int
    in_place: frozenset[str]

    @abstractmethod
    def call(self, collective: str, source: Array, target: Array) -> Call:
        """What is timed; the root is rank 0.

        Args:
            collective: its name in pycoll; "send": there and back between ranks 0 and 1; "halo":
                non-blocking messages to both neighbors on a ring, and from them.
            source: what this rank contributes.
            target: where the result goes; `source` itself if the collective is in `in_place`.
        """

    @abstractmethod
    def barrier(self) -> None:
        """Wait for all ranks."""

    @abstractmethod
    def largest(self, value: float) -> float:
        """The largest of all ranks' values, the same on every rank."""

    @abstractmethod
    def close(self) -> None:
        """Leave the job."""

    @abstractmethod
    def versions(self) -> dict[str, str]:
        """What is measured."""

    def neighbors(self) -> tuple[int, int]:
        """The ranks on the left and on the right of this one, on a ring."""
        return (self.rank - 1) % self.size, (self.rank + 1) % self.size

    def turn(self, first: Call, second: Call) -> Call:
        """The call of rank 0, of rank 1, or, elsewhere, nothing."""
        return (first, second)[self.rank] if self.rank < 2 else lambda: None


class Pycoll(Library):
    """pycoll, every call with an array for its result."""

    in_place = frozenset({"broadcast"})

    def __init__(self, algorithm: str | None) -> None:
        import pycoll

        self.comm = pycoll.init()
        self.algorithm = algorithm
        self.rank, self.size = self.comm.rank, self.comm.size

    def call(self, collective: str, source: Array, target: Array) -> Call:
        if collective == "send":
            send, recv = self.comm.send, self.comm.recv
            return self.turn(
                lambda: (send(source, 1), recv(1, out=target)),
                lambda: (recv(0, out=target), send(source, 0)),
            )
        if collective == "halo":
            return self._halo(source, target)
        method = getattr(self.comm, collective)
        if self.algorithm is not None:
            method = functools.partial(method, algorithm=self.algorithm)
        if collective == "ibarrier":
            return lambda: method().wait()
        if collective in NON_BLOCKING:
            return lambda: method(source, out=target).wait()
        if collective == "barrier":
            return lambda: method()
        if collective == "broadcast":
            return lambda: method(source)
        if collective == "scatter" and self.rank != 0:
            return lambda: method(None, out=target)
        return lambda: method(source, out=target)

    def _halo(self, source: Array, target: Array) -> Call:
        from pycoll import wait_all

        isend, irecv, (left, right) = self.comm.isend, self.comm.irecv, self.neighbors()
        first, second = target
        return lambda: wait_all(
            [
                irecv(left, 0, out=first),
                irecv(right, 1, out=second),
                isend(source, right, 0),
                isend(source, left, 1),
            ]
        )

    def barrier(self) -> None:
        self.comm.barrier()

    def largest(self, value: float) -> float:
        return float(self.comm.all_reduce(value, "max"))

    def close(self) -> None:
        import pycoll

        pycoll.finalize()

    def versions(self) -> dict[str, str]:
        import pycoll

        return {"pycoll": pycoll.__version__}


class Mpi(Library):
    """Any MPI through mpi4py: the upper-case methods, with the datatype given."""

    in_place = frozenset({"broadcast"})
    _METHODS: ClassVar = {
        "broadcast": "Bcast",
        "reduce": "Reduce",
        "all_reduce": "Allreduce",
        "gather": "Gather",
        "all_gather": "Allgather",
        "scatter": "Scatter",
        "reduce_scatter": "Reduce_scatter_block",
        "all_to_all": "Alltoall",
        "barrier": "Barrier",
        "iall_reduce": "Iallreduce",
        "iall_gather": "Iallgather",
        "ibarrier": "Ibarrier",
    }
    _TYPES: ClassVar = {
        "float32": "FLOAT",
        "float64": "DOUBLE",
        "int8": "INT8_T",
        "int32": "INT32_T",
        "int64": "INT64_T",
        "uint8": "UINT8_T",
    }

    def __init__(self) -> None:
        from mpi4py import MPI  # type: ignore[import-not-found, unused-ignore]

        self.mpi: Any = MPI
        self.comm: Any = MPI.COMM_WORLD
        self.rank, self.size = self.comm.rank, self.comm.size

    def call(self, collective: str, source: Array, target: Array) -> Call:
        comm, datatype = self.comm, getattr(self.mpi, self._TYPES[source.dtype.name])
        here, there = [source, datatype], [target, datatype]
        if collective == "send":
            send, recv = comm.Send, comm.Recv
            return self.turn(
                lambda: (send(here, 1), recv(there, 1)), lambda: (recv(there, 0), send(here, 0))
            )
        if collective == "halo":
            return self._halo(here, [[row, datatype] for row in target])
        method = getattr(comm, self._METHODS[collective])
        if collective == "ibarrier":
            return lambda: method().Wait()
        if collective in NON_BLOCKING:
            return lambda: method(here, there).Wait()
        if collective == "barrier":
            return lambda: method()
        if collective == "broadcast":
            return lambda: method(here)
        if collective == "scatter" and self.rank != 0:
            return lambda: method(None, there)
        if collective in ("reduce", "gather") and self.rank != 0:
            return lambda: method(here, None)
        return lambda: method(here, there)

    def _halo(self, here: Any, rows: list[Any]) -> Call:
        isend, irecv, wait_all = self.comm.Isend, self.comm.Irecv, self.mpi.Request.Waitall
        left, right = self.neighbors()
        first, second = rows
        return lambda: wait_all(
            [
                irecv(first, left, 0),
                irecv(second, right, 1),
                isend(here, right, 0),
                isend(here, left, 1),
            ]
        )

    def barrier(self) -> None:
        self.comm.Barrier()

    def largest(self, value: float) -> float:
        return float(self.comm.allreduce(value, self.mpi.MAX))

    def close(self) -> None:
        self.mpi.Finalize()

    def versions(self) -> dict[str, str]:
        # "Open MPI v5.0.8, package: ..." or "MPICH Version:      4.3.1\nMPICH Release date: ...".
        text = self.mpi.Get_library_version().split(",")[0].splitlines()[0]
        return {"MPI": " ".join(text.split()), "mpi4py": importlib.metadata.version("mpi4py")}


class Gloo(Library):
    """torch.distributed with the gloo backend, on tensors; its reductions are in place."""

    in_place = frozenset({"broadcast", "reduce", "all_reduce", "iall_reduce"})

    def __init__(self) -> None:
        import torch
        import torch.distributed

        self.torch: Any = torch
        self.dist: Any = torch.distributed
        self.dist.init_process_group("gloo")
        self.rank, self.size = self.dist.get_rank(), self.dist.get_world_size()

    def call(self, collective: str, source: Array, target: Array) -> Call:
        dist, root = self.dist, self.rank == 0
        here, there = self.torch.from_numpy(source), self.torch.from_numpy(target)
        if collective == "send":
            send, recv = dist.send, dist.recv
            return self.turn(
                lambda: (send(here, 1), recv(there, 1)), lambda: (recv(there, 0), send(here, 0))
            )
        if collective == "gather":
            rows = list(there) if root else None
            return lambda: dist.gather(here, rows, 0)
        if collective == "scatter":
            rows = list(here) if root else None
            return lambda: dist.scatter(there, rows, 0)
        if collective == "halo":
            return self._halo(here, list(there))
        whole, result = here.view(-1), there.view(-1)  # these want no axis of ranks
        calls: dict[str, Call] = {
            "broadcast": lambda: dist.broadcast(here, 0),
            "reduce": lambda: dist.reduce(here, 0),
            "all_reduce": lambda: dist.all_reduce(here),
            "all_gather": lambda: dist.all_gather_into_tensor(result, whole),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(result, whole),
            "all_to_all": lambda: dist.all_to_all_single(result, whole),
            "barrier": lambda: dist.barrier(),
            "iall_reduce": lambda: dist.all_reduce(here, async_op=True).wait(),
            "iall_gather": lambda: dist.all_gather_into_tensor(result, whole, async_op=True).wait(),
            "ibarrier": lambda: dist.barrier(async_op=True).wait(),
        }
        return calls[collective]

    def _halo(self, here: Any, rows: list[Any]) -> Call:
        isend, irecv, (left, right) = self.dist.isend, self.dist.irecv, self.neighbors()
        first, second = rows

        def exchange() -> None:
            requests = [
                irecv(first, left, tag=0),
                irecv(second, right, tag=1),
                isend(here, right, tag=0),
                isend(here, left, tag=1),
            ]
            for request in requests:
                request.wait()

        return exchange

    def barrier(self) -> None:
        self.dist.barrier()

    def largest(self, value: float) -> float:
        tensor = self.torch.tensor(value, dtype=self.torch.float64)
        self.dist.all_reduce(tensor, op=self.dist.ReduceOp.MAX)
        return float(tensor)

    def close(self) -> None:
        self.dist.destroy_process_group()

    def versions(self) -> dict[str, str]:
        return {"torch": str(self.torch.__version__)}


class Case:
    """One collective of one size on one rank: its arrays, what is timed, and whether it is right.

    Args:
        count: elements of one rank's value, or of one row where the collective splits or stacks.
        alias: bytes from the source, on the root, to the result, modulo the size of a page.
    """

    def __init__(
        self, side: Library, collective: str, count: int, dtype: np.dtype[Any], alias: int = 0
    ) -> None:
        self._rank, self._size, self._collective = side.rank, side.size, collective
        self._cycle = np.tile(np.arange(61, dtype=dtype), count // 61 + 1)[:count]
        in_place = collective in side.in_place
        behind = alias if in_place and side.rank != 0 else 0
        source = self._array(side.size if collective in SPLITTING else None, behind)
        for index, row in enumerate(source.reshape(-1, max(1, count))):  # 0: a barrier
            row[...] = self._row(side.rank, index)
        if in_place:
            self._target = source
            if collective == "broadcast" and side.rank != 0:
                source.fill(dtype.type(0))
        else:
            stacked = side.size if collective in STACKING else None
            self._target = self._array(2 if collective == "halo" else stacked, alias)
            self._target.fill(dtype.type(0))
        # What is reduced in place over and over would run into infinity.
        self._exhausts = in_place and collective != "broadcast"
        self.call = side.call(collective, source, self._target)

    def _array(self, rows: int | None, behind: int) -> Array:
        """An array, of rows or without, that begins so many bytes behind that of a page."""
        shape = (rows, len(self._cycle)) if rows is not None else (len(self._cycle),)
        nbytes = math.prod(shape) * self._cycle.itemsize
        memory = np.empty(nbytes + 2 * PAGE, np.uint8)
        begin = -memory.ctypes.data % PAGE + behind
        return memory[begin : begin + nbytes].view(self._cycle.dtype).reshape(shape)

    def _row(self, rank: int, index: int) -> Array:
        """Row `index` of what `rank` contributes: no two are equal, none is all zeros."""
        row: Array = self._cycle + self._cycle.dtype.type(1 + 3 * rank + 5 * index)
        return row

    def _expected(self) -> Iterable[Array]:
        """The rows of the result on this rank."""
        collective, rank, row, ranks = self._collective, self._rank, self._row, range(self._size)
        if collective in BARRIERS or (collective in ("reduce", "gather") and rank != 0):
            return []
        if collective == "halo":
            return [row((rank + step) % self._size, 0) for step in (-1, 1)]
        if collective == "send":
            return [row(1 - rank, 0)] if rank < 2 else []
        if collective in ("broadcast", "scatter"):
            return [row(0, rank if collective == "scatter" else 0)]
        mine = rank if collective in SPLITTING else 0
        contributed = (row(other, mine) for other in ranks)
        return contributed if collective in STACKING else [functools.reduce(np.add, contributed)]

    def check(self) -> bool:
        """Make the call once; true if this rank's result is right."""
        self.call()
        rows = self._target.reshape(-1, max(1, len(self._cycle)))
        right = all(map(np.array_equal, self._expected(), rows))
        if self._exhausts:
            self._target.fill(0)
        return right


def loop(call: Call, calls: int) -> float:
    """Seconds that this many calls take."""
    start = time.perf_counter()
    for _ in repeat(None, calls):
        call()
    return time.perf_counter() - start


def joint_loop(side: Library, call: Call, calls: int) -> float:
    """Seconds until the slowest rank has made this many calls, all having started together."""
    side.barrier()
    return side.largest(loop(call, calls))


def measure(run: Callable[[int], float]) -> tuple[float, int]:
    """Warm up, then time one loop; returns seconds a call, and how many calls the loop made.

    Args:
        run: makes a number of calls and returns the seconds. All ranks get the same answer from
            it, so all make the same number of calls without asking each other.
    """
    best, spent, loops = math.inf, 0.0, 0
    while spent < WARM_S or loops < WARM_LOOPS:
        calls = 1 if loops == 0 else math.ceil(WARM_S / 4 / best)
        elapsed = run(calls)
        # The smallest: one that was disturbed, or the first, would make the timed loop too short.
        best = min(best, max(elapsed, 1e-7) / calls)
        spent += elapsed
        loops += 1
    calls = max(MIN_CALLS, round(LOOP_S / best))
    return run(calls) / calls, calls


def copy_pass(side: Library, count: int, dtype: np.dtype[Any]) -> float:
    """Seconds that NumPy takes on rank 0 to copy one value, while the others wait in a barrier."""
    seconds = 0.0
    if side.rank == 0:
        here, there = np.ones(count, dtype), np.zeros(count, dtype)
        seconds, _ = measure(functools.partial(loop, lambda: np.copyto(there, here)))
    side.barrier()
    return seconds


def loopback_bytes() -> int:
    """What this machine, or its network namespace, has sent to itself by TCP/IP, in bytes."""
    for line in Path("/proc/net/dev").read_text(encoding="ascii").splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[8])
    return 0


def usage(side: Library, call: Call) -> dict[str, float]:
    """What a call uses besides time: processor time of all ranks, and bytes on the loopback."""
    side.barrier()
    wire, before = loopback_bytes(), resource.getrusage(resource.RUSAGE_SELF)
    loop(call, MIN_CALLS)
    after = resource.getrusage(resource.RUSAGE_SELF)
    wire = loopback_bytes() - wire
    mine = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    seconds = [side.largest(mine if side.rank == rank else 0.0) for rank in range(side.size)]
    return {"cpu_seconds": sum(seconds) / MIN_CALLS, "wire_bytes": wire / MIN_CALLS}


def figures(side: Library, plan: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """Time the plan's collectives, each in its sizes.

    Raises:
        RuntimeError: a result was wrong; on all ranks.
    """
    for collective, sizes in plan["sizes"].items():
        yield from figures_of(side, collective, sizes, plan)


def figures_of(
    side: Library, collective: str, sizes: Sequence[int], plan: dict[str, Any]
) -> Iterable[dict[str, Any]]:
    """Time one collective in some sizes."""
    dtype = np.dtype(plan["dtype"])
    cases = itertools.product(sizes, plan["aliases"])
    for nbytes, alias in [(0, 0)] if collective in BARRIERS else cases:
        count = nbytes // dtype.itemsize
        case = Case(side, collective, count, dtype, alias)
        wrong = side.largest(-1.0 if case.check() else float(side.rank))
        if wrong >= 0:
            raise RuntimeError(f"{collective} of {nbytes} bytes: rank {wrong:.0f} got wrong values")
        seconds, calls = measure(functools.partial(joint_loop, side, case.call))
        figure = {"collective": collective, "nbytes": nbytes, "alias": alias}
        figure |= {"seconds": seconds, "calls": calls}
        if collective == "send":
            figure["seconds"] = seconds / 2  # there and back
        if plan["usage"]:
            figure |= usage(side, case.call)
        if plan["copy"]:
            figure["copy_seconds"] = copy_pass(side, count, dtype)
        yield figure


def main(plan_path: str, result_path: str) -> None:
    """Be one rank of the job that the plan describes."""
    plan = json.loads(Path(plan_path).read_text(encoding="utf-8"))
    sides: dict[str, Callable[[], Library]] = {
        "pycoll": functools.partial(Pycoll, plan["algorithm"]),
        "mpi": Mpi,
        "gloo": Gloo,
    }
    side = sides[plan["library"]]()
    result: dict[str, Any] = {"figures": list(figures(side, plan))}
    if side.rank == 0:
        common = {"numpy": np.__version__, "python": platform.python_version()}
        result["versions"] = side.versions() | common
        Path(result_path).write_text(json.dumps(result), encoding="utf-8")
    side.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
