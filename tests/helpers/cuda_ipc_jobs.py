"""What tests of arrays offered between ranks share: values, places, and what is copied.

Values are bytes of which no two blocks have the same, and are compared bit by bit. What must not
pass through the host is counted by the driver.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import fake_cuda
import fakegpu
import numpy as np
from gpu_jobs import WAYS, Comm, call, dtype_of, equal, laid_out

import pycoll

NBYTES = 1 << 20
"""A block of so many bytes is offered, a shorter one is not."""

CUDA_IPC = ["broadcast", "scatter", "gather", "all_gather", "all_to_all"]
ANNOUNCED = CUDA_IPC[:2]
"""Only the root passes a value."""

"""Jobs whose ranks all share their GPUs."""

TURNS = 50
"""So many calls are enough for ranks to find out about each other."""


@functools.lru_cache(maxsize=64)
def block(source: int, dest: int, shape: tuple[int, ...], dtype: str) -> np.ndarray[Any, Any]:
    """What `source` has for `dest`; do not write it."""
    nbytes = math.prod(shape) * dtype_of(dtype).itemsize
    data = np.random.default_rng([source, dest]).bytes(nbytes)
    return np.frombuffer(data, dtype_of(dtype)).reshape(shape)


def case(
    comm: Comm, method: str, root: int, *shape: int, dtype: str = "uint8"
) -> tuple[np.ndarray[Any, Any] | None, np.ndarray[Any, Any] | None, dict[str, Any]]:
    """What this rank passes, what it gets, and the root."""
    me, everybody = comm.rank, range(comm.size)
    of = functools.partial(block, shape=shape or (NBYTES,), dtype=dtype)
    match method:
        case "broadcast":
            return of(root, 0) if me == root else None, of(root, 0), {"root": root}
        case "scatter":
            rows = np.stack([of(root, dest) for dest in everybody]) if me == root else None
            return rows, of(root, me), {"root": root}
        case "gather":
            rows = np.stack([of(rank, 0) for rank in everybody]) if me == root else None
            return of(me, 0), rows, {"root": root}
        case "all_gather":
            return of(me, 0), np.stack([of(rank, 0) for rank in everybody]), {}
    mine, others = ([of(me, rank) for rank in everybody], [of(rank, me) for rank in everybody])
    return np.stack(mine), np.stack(others), {}


def on_gpu(x: np.ndarray[Any, Any] | None, device: int = 0) -> Any:
    return None if x is None else fakegpu.array(x, device)


def fresh(like: np.ndarray[Any, Any] | None, device: int = 0) -> Any:
    return None if like is None else fakegpu.empty(like.shape, like.dtype, device)


def copied(comm: Comm, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function; return what it has returned, and bytes: to the host, from it, on the GPU."""
    comm.barrier()
    fake_cuda.run_all()
    before = fake_cuda.stats()
    got = function(*args, **kwargs)
    fake_cuda.run_all()
    after = fake_cuda.stats()
    return got, [after[name] - before[name] for name in ("d2h_bytes", "h2d_bytes", "d2d_bytes")]


def meet(comm: Comm, device: int = 0) -> None:
    """Have every two ranks, which are on one host, know that they reach each other's memory."""
    x, _, _ = case(comm, "all_to_all", 0)
    assert x is not None
    there, out = fakegpu.array(x, device), fakegpu.empty(x.shape, x.dtype, device)
    for _ in range(TURNS):
        _, (down, up, _) = copied(comm, comm.all_to_all, there, out=out)
        if not sum(comm.all_gather(down + up)):
            return
    raise AssertionError("the ranks do not offer")


def directly(method: str, way: str) -> dict[str, str]:
    """What a call names so that nobody passes on what is not for it; else the size chooses."""
    return {"algorithm": "linear"} if way != "blocking" and "gather" in method else {}


def moved(comm: Comm, method: str, root: int, nbytes: int = NBYTES) -> int:
    """Bytes that one call writes on this rank's GPU."""
    if method == "broadcast":
        return nbytes * (comm.rank != root)
    if method == "gather":
        return nbytes * comm.size * (comm.rank == root)
    return nbytes * (1 if method == "scatter" else comm.size)


def every_method_offers(comm: Comm, way: str) -> None:
    """Check what is copied, of calls that run in the compiled core, or by algorithms that offer."""
    meet(comm)
    times = 2 if way == "persistent" else 1
    for method, root in itertools.product(CUDA_IPC, (0, comm.size - 1)):
        x, wanted, kwargs = case(comm, method, root)
        for out in (None, fresh(wanted)):
            there, where = on_gpu(x), (method, way, root, out is None)
            if method == "broadcast":
                there, more = (out if x is None else there), {}
            else:
                more = {} if out is None else {"out": out}
            more |= directly(method, way)
            got, counts = copied(comm, call, comm, way, method, there, **kwargs, **more)
            assert counts == [0, 0, times * moved(comm, method, root)], where
            equal(got, wanted, where, fakegpu.Array if got is not None else None)
            assert out is None or got is out or method == "broadcast", where
            if x is not None:
                equal(there, x, where)


class Pooled(fakegpu.Memory):
    """Memory of a pool, which cannot be offered."""

    def give_back(self) -> None:
        from cuda.bindings import driver

        driver.cuMemFreeAsync(driver.CUdeviceptr(self.pointer), driver.CUstream(fakegpu.LEGACY))


def pooled(values: np.ndarray[Any, Any], device: int = 0) -> Any:
    from cuda.bindings import driver

    made = fakegpu.array(values, device)
    with fakegpu.context(device):
        stream = driver.CUstream(fakegpu.LEGACY)
        error, pointer = driver.cuMemAllocAsync(max(1, made.nbytes), stream)
        assert not error
    layout = np.asarray(fakegpu._Layout(int(pointer), made.shape, None, made.dtype.itemsize))
    copy = fakegpu.Array(Pooled(device, int(pointer)), made.dtype, layout)
    copy.copy_from(made)
    return copy


def inside(values: np.ndarray[Any, Any], device: int = 0) -> Any:
    """An array that begins within an allocation, at an odd address where elements are bytes."""
    wide = np.concatenate([values.reshape(-1)[:3], values.reshape(-1), values.reshape(-1)[:5]])
    flat = fakegpu.array(wide, device)[3:-5]
    layout = np.asarray(fakegpu._Layout(flat.pointer, values.shape, None, values.dtype.itemsize))
    return flat._view(layout)


def read_only(values: np.ndarray[Any, Any], device: int = 0) -> Any:
    made = fakegpu.array(values, device)
    made.readonly = True
    return made


def interface(values: np.ndarray[Any, Any], device: int = 0) -> Any:
    return fakegpu.InterfaceArray(fakegpu.array(values, device))


PLACES: list[Callable[[Any], Any]] = [
    fakegpu.array,
    fakegpu.array,
    inside,
    pooled,
    np.array,
    lambda values: fakegpu.array(values, 1),
    lambda values: laid_out(values, "columns")[0],
    lambda values: laid_out(values, "back")[0],
]


def anywhere(comm: Comm, seed: int, turns: int, ways: Sequence[str] = WAYS[:2]) -> None:
    """Calls with x and out anywhere, by any algorithm; the driver chooses what comes first."""
    common, own = random.Random(seed), random.Random(seed * 100 + comm.rank)
    for _ in range(turns):
        method, root = common.choice(CUDA_IPC), common.randrange(comm.size)
        way, more = common.choice(ways), common.choice([-1, 0, 0, 1, 500])
        algorithm = common.choice([None, None, *pycoll.algorithms(method)])
        x, wanted, kwargs = case(comm, method, root, 256, 4096 + more)
        there = None if x is None else own.choice(PLACES)(x)
        if method == "broadcast" and x is None and own.random() < 0.5:
            assert wanted is not None
            there = own.choice(PLACES)(np.zeros_like(wanted))
        elif wanted is not None and method != "broadcast" and own.random() < 0.5:
            kwargs = {**kwargs, "out": own.choice(PLACES)(np.zeros_like(wanted))}
        where = method, way, algorithm, more, there, kwargs
        try:
            got = call(comm, way, method, there, **kwargs, algorithm=algorithm)
        except ValueError:  # this algorithm not in this job, or not as a request: on all ranks
            assert algorithm is not None, where
            continue
        equal(got, wanted, where)
        if "out" in kwargs:
            assert got is kwargs["out"], where
        elif isinstance(there, fakegpu.Array) and method not in ANNOUNCED and got is not None:
            assert (type(got), got.device) == (fakegpu.Array, there.device), where
        if x is not None:
            equal(there, x, where)


def error_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> pycoll.Error | None:
    try:
        function(*args, **kwargs)
    except pycoll.Error as exc:
        return exc
    return None
