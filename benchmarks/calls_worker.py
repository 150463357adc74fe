"""A rank of a job of benchmarks/calls: times calls of pycoll, or the same of MPI through mpi4py.

    python calls_worker.py TIMER LIBRARY SIZES RESULT

TIMER is the path of pycoll's bench_worker.py, from which the time-keeping is; peers run this in
environments without pycoll. SIZES are bytes, with commas. Rank 0 writes RESULT.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Call = Callable[[], object]
OF_OBJECTS = "broadcast", "gather", "all_gather", "all_to_all", "scatter"
NO_SIZE = frozenset(
    {"send of an object", *(f"{name} of objects" for name in OF_OBJECTS), "split, close"}
)


def turns(rank: int, send: Callable[[int], object], receive: Callable[[int], object]) -> Call:
    """From rank 0 to rank 1 and back; the other ranks look on."""
    if rank == 0:
        return lambda: (send(1), receive(1))
    return (lambda: (receive(0), send(0))) if rank == 1 else lambda: None


def objects_moved(
    methods: Sequence[Callable[..., Any]], rank: int, size: int, value: Any
) -> Iterator[tuple[str, Call]]:
    """Collectives of a dict; `methods` in the order of `OF_OBJECTS`."""
    at_root = value if rank == 0 else None
    each = [value] * size
    given = [at_root, value, value, each, each if rank == 0 else None]
    for name, method, x in zip(OF_OBJECTS, methods, given, strict=True):
        yield f"{name} of objects", functools.partial(method, x)


def pycoll_calls(comm: Any, x: Any, rows: Any) -> Iterator[tuple[str, Call]]:
    """Each call with what it is named: `x` is this rank's value, `rows` one for every rank."""
    import pycoll

    rank, size = comm.rank, comm.size
    right, left = (rank + 1) % size, (rank - 1) % size
    out, status = np.empty_like(x), pycoll.Status()
    table = np.empty(rows.size)  # blocks one after the other
    value, small = {"step": 7, "name": "layer", "data": x}, {"step": 7, "name": "layer"}
    reduction = comm.persistent.all_reduce(x, out=out)
    exchange = comm.persistent.sendrecv(x, right, left, out=out)
    yield "persistent all_reduce", lambda: (reduction.start(), reduction.wait())
    comes, goes = comm.persistent.recv(left, out=out), comm.persistent.send(x, right)
    yield (
        "persistent recv and send",
        lambda: (comes.start(), goes.start(), pycoll.wait_all([comes, goes])),
    )
    yield "persistent sendrecv", lambda: (exchange.start(), exchange.wait())
    yield "isendrecv and wait", lambda: comm.isendrecv(x, right, left, out=out).wait()

    def each_in_turn() -> None:
        requests = [comm.irecv(left, out=out), comm.isend(x, right)]
        for _ in requests:
            pycoll.wait_any(requests)

    yield "irecv, isend, wait_any twice", each_in_turn
    yield "send of an object", turns(rank, lambda to: comm.send(small, to), comm.recv)
    yield "the same with an array", turns(rank, lambda to: comm.send(value, to), comm.recv)
    yield from objects_moved(
        [comm.broadcast, comm.gather, comm.all_gather, comm.all_to_all, comm.scatter],
        *(rank, size, small),
    )
    yield (
        "recv, any, status",
        turns(rank, lambda to: comm.send(x, to, 3), lambda _: comm.recv(out=out, status=status)),
    )

    def to_oneself() -> None:
        request = comm.irecv(rank, out=out)
        comm.send(x, rank)
        request.wait()

    yield "to oneself", to_oneself
    yield "gatherv", lambda: comm.gatherv(x, out=table if rank == 0 else None)
    yield "scatterv", lambda: comm.scatterv(list(rows) if rank == 0 else None, out=out)
    yield "all_gatherv", lambda: comm.all_gatherv(x, out=table)
    yield "all_to_allv", lambda: comm.all_to_allv(list(rows), out=table)
    counts = [len(x)] * size
    yield (
        "reduce_scatterv",
        lambda: comm.reduce_scatterv(rows.reshape(-1), counts, out=out),
    )
    yield "all_reduce", lambda: comm.all_reduce(x, out=out)
    yield "all_reduce, timeout=5", lambda: comm.all_reduce(x, out=out, timeout=5)
    yield "scan", lambda: comm.scan(x, out=out)
    yield "exscan", lambda: comm.exscan(x, out=out)
    yield "split, close", lambda: comm.split(rank % 2).close()


def mpi_calls(mpi: Any, x: Any, rows: Any) -> Iterator[tuple[str, Call]]:
    """The same, as somebody would write it who wants it quick."""
    comm = mpi.COMM_WORLD
    rank, size = comm.rank, comm.size
    right, left = (rank + 1) % size, (rank - 1) % size
    out, table, status = np.empty_like(x), np.empty_like(rows), mpi.Status()
    value, small = {"step": 7, "name": "layer", "data": x}, {"step": 7, "name": "layer"}
    double = mpi.DOUBLE
    here, there = [x, double], [out, double]
    counts = [len(x)] * size
    places = [len(x) * peer for peer in range(size)]
    parts, gathered = [rows, counts, places, double], [table, counts, places, double]
    reduction = comm.Allreduce_init(here, there)
    requests = [comm.Recv_init(there, left), comm.Send_init(here, right)]
    yield "persistent all_reduce", lambda: (reduction.Start(), reduction.Wait())

    def exchange() -> None:
        mpi.Prequest.Startall(requests)
        mpi.Request.Waitall(requests)

    yield "persistent recv and send", exchange
    yield "persistent sendrecv", exchange  # which MPI has not
    yield "isendrecv and wait", lambda: comm.Isendrecv(here, right, 0, there, left, 0).Wait()

    def each_in_turn() -> None:
        begun = [comm.Irecv(there, left), comm.Isend(here, right)]
        for _ in begun:
            mpi.Request.Waitany(begun)

    yield "irecv, isend, wait_any twice", each_in_turn
    receive = functools.partial(comm.recv, None)
    yield "send of an object", turns(rank, lambda to: comm.send(small, to), receive)
    yield "the same with an array", turns(rank, lambda to: comm.send(value, to), receive)
    yield from objects_moved(
        [comm.bcast, comm.gather, comm.allgather, comm.alltoall, comm.scatter], rank, size, small
    )
    yield (
        "recv, any, status",
        turns(
            rank,
            lambda to: comm.Send(here, to, 3),
            lambda _: comm.Recv(there, mpi.ANY_SOURCE, mpi.ANY_TAG, status),
        ),
    )

    def to_oneself() -> None:
        request = comm.Irecv(there, rank)
        comm.Send(here, rank)
        request.Wait()

    yield "to oneself", to_oneself
    yield "gatherv", lambda: comm.Gatherv(here, gathered if rank == 0 else None)
    yield "scatterv", lambda: comm.Scatterv(parts if rank == 0 else None, there)
    yield "all_gatherv", lambda: comm.Allgatherv(here, gathered)
    yield "all_to_allv", lambda: comm.Alltoallv(parts, gathered)
    yield "reduce_scatterv", lambda: comm.Reduce_scatter([rows, double], there, counts)
    yield "all_reduce", lambda: comm.Allreduce(here, there)
    yield "all_reduce, timeout=5", lambda: comm.Allreduce(here, there)  # MPI has no deadlines
    yield "scan", lambda: comm.Scan(here, there)
    yield "exscan", lambda: comm.Exscan(here, there)
    yield "split, close", lambda: comm.Split(rank % 2).Free()


def main(timer_path: str, library: str, sizes: str, result: str) -> None:
    """Be one rank."""
    spec = importlib.util.spec_from_file_location("timer", timer_path)
    assert spec is not None
    assert spec.loader is not None
    timer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(timer)
    side = timer.Pycoll(None) if library == "pycoll" else timer.Mpi()
    figures: list[tuple[str, int, float]] = []
    for nbytes in map(int, sizes.split(",")):
        x = np.full(nbytes // 8, side.rank + 1.0)
        rows = np.full((side.size, nbytes // 8), side.rank + 1.0)
        made = pycoll_calls(side.comm, x, rows)
        for name, call in made if library == "pycoll" else mpi_calls(side.mpi, x, rows):
            if name in NO_SIZE and figures and any(name == known for known, _, _ in figures):
                continue
            seconds, _ = timer.measure(functools.partial(timer.joint_loop, side, call))
            figures.append((name, 0 if name in NO_SIZE else nbytes, seconds))
    if side.rank == 0:
        Path(result).write_text(json.dumps(figures), encoding="utf-8")
    side.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
