"""Jobs of ranks that have GPUs, on a driver that is nasty, and what their programs have in common.

Every rank has two GPUs of `fake_cuda`, and a library of arrays, `fakegpu`, that waits for nothing.
What a call returns is looked at as it lies in the memory, before anything else can run. A module
of tests takes the fixtures by name: ``ranks = gpu_jobs.ranks``.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import fake_cuda
import ml_dtypes
import numpy as np
import pytest
from patience import PATIENCE
from ranks_pool import Pools
from tiers import few

if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
    pytest.skip("cuda-bindings is not installed", allow_module_level=True)

import fakegpu

Comm = Any
Ranks = Any

HELPERS = Path(__file__).parent
PADDING = 77
KERNEL_S = 5.0 * PATIENCE
LARGE = 100_000
"""Elements of a value that goes in several segments, and waits for its receiver."""

JOBS: dict[str, tuple[Any, ...]] = {
    "2": (2, ()),
    "3": (3, ()),
    "2 by TCP": (2, ("--transport", "tcp")),
    "4 on 2 hosts": (4, ("--emulate-hosts", "2")),
}
EVERY = few(["2"], ["3", "2 by TCP", "4 on 2 hosts"])
JOBS |= {
    "4": (4, ()),
    "3 by TCP": (3, ("--transport", "tcp")),
    "2 that offer nothing": (2, (), {"PYCOLL_CUDA_IPC": "0"}),
    "3 by other algorithms": (
        3,
        ("--transport", "tcp"),
        {
            "PYCOLL_ALGORITHM": "all_gather:ring;broadcast:chain;gather:tree;all_to_all:bruck",
            "PYCOLL_SEGMENT": "256K",
        },
    ),
}
"""Number of ranks, options of pycoll-run, and variables; who names none runs on EVERY."""

REDUCING = [
    *(
        [
            "bool",
            "int8",
            "int16",
            "int32",
            "int64",
            "uint8",
            "uint16",
            "uint32",
            "uint64",
            "float16",
            "float32",
            "float64",
        ]
    ),
    *("complex64", "complex128", "bfloat16"),
]
MOVING = ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"]

COMBINING = ["all_reduce", "reduce", "reduce_scatter", "scan", "exscan"]
COMBINING += ["all_reduce_many", "reduce_scatterv"]
CARRYING = ["broadcast", "gather", "all_gather", "scatter", "all_to_all", "sendrecv"]
CARRYING += ["gatherv", "all_gatherv", "scatterv", "all_to_allv"]
METHODS = COMBINING + CARRYING
WAYS = ["blocking", "request", "persistent"]
TAKING_OUT = ["all_reduce", "reduce", "gather", "all_gather", "scatter", "reduce_scatter"]
TAKING_OUT += ["all_to_all", "sendrecv", "scan", "exscan", "scatterv", "reduce_scatterv"]


def environment(library: Path, **options: Any) -> dict[str, str]:
    """The variables of ranks that find the fake driver, and the modules of the tests."""
    paths = [str(HELPERS), *filter(None, [os.environ.get("PYTHONPATH")])]
    options = {"devices": 2, **options}
    return fake_cuda.environment(library, **options) | {"PYTHONPATH": os.pathsep.join(paths)}


@pytest.fixture(scope="module", params=EVERY)
def ranks(request: pytest.FixtureRequest, fake_driver: Path, pools: Pools) -> Any:
    """Runs a program on all ranks of a job; see conftest."""
    size, options, *variables = JOBS[request.param]
    return pools(size, options, {**environment(fake_driver), **dict(*variables)})


@pytest.fixture
def gpu_job(job: Any, fake_driver: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a script on ranks that have GPUs; see script_jobs."""
    for name, value in environment(fake_driver).items():
        monkeypatch.setenv(name, value)
    return job


def jobs(*names: str, more: Sequence[str] = ()) -> pytest.MarkDecorator:
    """Run a test on these jobs alone, and on those in `more` in the exhaustive tier."""
    return pytest.mark.parametrize("ranks", few(names, more), indirect=True, scope="module")


# --- what programs on ranks use ----------------------------------------------------------------


def tidy(program: Callable[..., Any]) -> Callable[..., Any]:
    """Have a program leave nothing on the GPUs, nor of others open, and no errors.

    Its last argument, a seed, chooses the order in which the GPUs work.
    """

    @wraps(program)
    def checked(comm: Comm, *args: Any) -> Any:
        import faulthandler

        faulthandler.dump_traceback_later(int(os.environ.get("DUMP_AFTER", "70")))
        fake_cuda.reset()
        fake_cuda.seed(args[-1] * 100 + comm.rank if args and isinstance(args[-1], int) else 1)
        try:
            result = program(comm, *args)
        finally:
            fake_cuda.fail("")
            fakegpu.use_stream(fakegpu.LEGACY, 0)
            fakegpu.use_stream(fakegpu.LEGACY, 1)
            faulthandler.cancel_dump_traceback_later()
        peer_memory = sys.modules.get("pycoll._gpu.peer_memory")
        if peer_memory is not None:  # what is kept for later calls
            peer_memory.mappings.close_all()
        deadline = time.monotonic() + 3 * PATIENCE
        while (fakegpu.exported or allocations()) and time.monotonic() < deadline:
            gc.collect()
            fake_cuda.run_all()  # what was given up may still be under way
            time.sleep(0.001)
        stats = fake_cuda.stats()
        assert stats["illegal_accesses"] == 0, stats
        assert not fakegpu.exported, f"{len(fakegpu.exported)} arrays were not given back"
        assert not allocations(), stats
        return result

    return checked


def allocations() -> int:
    """How many there are on GPUs, but for those that pycoll keeps for other ranks to try."""
    cuda_ipc = sys.modules.get("pycoll._gpu.cuda_ipc")
    return fake_cuda.stats()["allocations"] - (len(cuda_ipc._trials) if cuda_ipc else 0)


def now(x: Any) -> np.ndarray[Any, Any]:
    """The elements of an array as they are in the GPU's memory, whatever is still enqueued."""
    if isinstance(x, fakegpu.InterfaceArray):
        x = x.array
    if isinstance(x, np.ndarray):
        return x
    assert isinstance(x, fakegpu.Array), f"a result of type {type(x)}"
    if not x.size:
        return np.empty(x.shape, x.dtype)
    spans = [(n - 1) * step for n, step in zip(x.shape, x.strides, strict=True)]
    before, after = -sum(s for s in spans if s < 0), sum(s for s in spans if s > 0)
    data = fake_cuda.peek(x.pointer - before, before + after + x.dtype.itemsize)
    return np.ndarray(x.shape, x.dtype, data, before, x.strides).copy()


def equal(got: Any, wanted: Any, what: Any, kind: type | None = None) -> None:
    """Check a result against NumPy's: bit by bit, and what it is."""
    if isinstance(wanted, list):
        assert isinstance(got, list), what
        assert len(got) == len(wanted), what
        for index, (one, other) in enumerate(zip(got, wanted, strict=True)):
            equal(one, other, (what, index), kind)
        return
    if wanted is None:
        assert got is None, what
        return
    if kind is not None:
        assert isinstance(got, kind), (what, type(got))
    array = now(got)
    assert (array.dtype, array.shape) == (wanted.dtype, wanted.shape), what
    assert array.tobytes() == wanted.tobytes(), (what, array, wanted)


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))


def numbers(rank: int, shape: Sequence[int], dtype: Any = "float32") -> np.ndarray[Any, Any]:
    """Small whole numbers, which every dtype holds, and sums of a few."""
    count = int(np.prod(shape))
    values = (np.arange(count).reshape(shape) * 7 + rank * 3) % 11 % (8 if count else 1) // 2
    dtype = dtype_of(dtype) if isinstance(dtype, str) else np.dtype(dtype)
    if dtype.name == "float8_e8m0fnu":
        values = 2.0**values
    return np.asarray(values).astype(dtype)


LAYOUTS = ["C", "F", "steps", "back", "columns"]


def laid_out(values: np.ndarray[Any, Any], layout: str, device: int = 0) -> tuple[Any, Any]:
    """An array on the GPU with these elements, and the one into which it is a view."""
    if layout == "C" or values.ndim == 0:
        whole = fakegpu.array(values, device)
        return whole, whole
    if layout == "F":
        whole = fakegpu.array(values.T, device)
        return whole.T, whole
    if layout == "back":
        whole = fakegpu.array(values[::-1], device)
        return whole[::-1], whole
    padding = np.array(PADDING).astype(values.dtype)
    if layout == "steps":
        wide = np.full([2 * n for n in values.shape], padding)
        index: Any = tuple([slice(None, None, 2)] * values.ndim)
    else:
        wide = np.full([*values.shape[:-1], values.shape[-1] + 3], padding)
        index = (..., slice(1, 1 + values.shape[-1]))
    wide[index] = values
    whole = fakegpu.array(wide, device)
    return whole[index], whole


def convert(argument: Any, put: Callable[[Any], Any]) -> Any:
    if isinstance(argument, np.ndarray):
        return put(argument)
    if isinstance(argument, list) and argument and isinstance(argument[0], np.ndarray):
        return [put(one) for one in argument]
    return argument


def arguments(
    method: str, me: int, size: int, shape: tuple[int, ...], dtype: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a method, with NumPy arrays."""
    own = numbers(me, shape, dtype)
    rows = numbers(me, (size, *shape), dtype)
    root = size - 1

    def uneven(number: int) -> np.ndarray[Any, Any]:
        return numbers(number, (number + 1, *shape), dtype)

    match method:
        case "broadcast":
            return (own if me == root else None,), {"root": root}
        case "reduce" | "gather":
            return (own,), {"root": root}
        case "scatter":
            return (rows if me == root else None,), {"root": root}
        case "reduce_scatter" | "all_to_all":
            return (rows,), {}
        case "all_reduce_many":
            return ([own, rows, numbers(me, (3,), dtype)],), {}
        case "gatherv":
            return (uneven(me),), {"root": root}
        case "all_gatherv":
            return (uneven(me),), {}
        case "scatterv":
            return ([uneven(rank) for rank in range(size)] if me == root else None,), {"root": root}
        case "all_to_allv":
            return ([uneven((me + rank) % size) for rank in range(size)],), {}
        case "reduce_scatterv":
            counts = [*range(size)]
            return (numbers(me, (sum(counts), *shape), dtype), counts), {}
        case "sendrecv":
            return (own, (me + 1) % size, (me - 1) % size), {}
    return (own,), {}


def call(comm: Comm, way: str, method: str, *args: Any, **kwargs: Any) -> Any:
    if way == "blocking":
        return getattr(comm, method)(*args, **kwargs)
    if way == "request":
        return getattr(comm, f"i{method}")(*args, **kwargs).wait()
    request = getattr(comm.persistent, method)(*args, **kwargs)
    request.start().wait()
    return request.start().wait()


def both_ways(
    comm: Comm,
    way: str,
    method: str,
    shape: tuple[int, ...],
    dtype: Any,
    put: Callable[[Any], Any],
    kind: type | None = None,
) -> None:
    """Compare a call of arrays on a GPU with the same of NumPy's."""
    args, kwargs = arguments(method, comm.rank, comm.size, shape, dtype)
    wanted = call(comm, way, method, *args, **kwargs)
    there = convert(args[0], put)
    got = call(comm, way, method, there, *args[1:], **kwargs)
    equal(got, wanted, (method, way, shape, dtype), None if got is there else kind)
    if args[0] is not None:
        equal(there, args[0], f"what was passed to {method}")


class Kernel:
    """A long kernel at the end of a stream's queue; it ends by itself only where a test fails."""

    def __init__(self, stream: int, device: int = 0) -> None:
        with fakegpu.context(device):
            self._number = fake_cuda.hold(stream)
        self._timer = threading.Timer(KERNEL_S, self._end)
        self._timer.daemon = True
        self._timer.start()
        self._overdue = False

    def _end(self) -> None:
        self._overdue = True
        fake_cuda.release(self._number)

    def release(self) -> None:
        """Let it end; nobody may have waited for it."""
        self._timer.cancel()
        assert not self._overdue, "a call has waited for the GPU"
        fake_cuda.release(self._number)

    def release_soon(self) -> None:
        """Let it end while this thread does something else."""
        self._timer.cancel()
        threading.Timer(0.02, fake_cuda.release, [self._number]).start()


def slow_array(values: np.ndarray[Any, Any], device: int = 0) -> tuple[Any, Kernel]:
    """An array that a long kernel is still computing, and that kernel."""
    before = fakegpu.use_stream(fakegpu.new_stream(device), device)
    kernel = Kernel(fakegpu.current_stream(device), device)
    x = fakegpu.array(values, device)
    fakegpu.use_stream(before, device)
    return x, kernel


ON_GPU = """
import fake_cuda, fakegpu, gc

def computing(values):
    "An array that a kernel is computing, and the kernel."
    fakegpu.use_stream(fakegpu.new_stream())
    with fakegpu.context(0):
        kernel = fake_cuda.hold(fakegpu.current_stream())
    made = fakegpu.array(values)
    fakegpu.use_stream(fakegpu.LEGACY)
    return made, kernel

def held(values):
    "An array that a kernel is computing which never ends."
    return computing(values)[0]
"""
"""What scripts begin with."""
