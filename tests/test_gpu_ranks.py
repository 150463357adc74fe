"""Arrays on GPUs between ranks: what works with NumPy's works with them, on a driver that is nasty.

Every rank has two GPUs of `fake_cuda`, and a library of arrays, `fakegpu`, that waits for nothing.
What a call returns is looked at as it lies in the memory, before anything else can run.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import fake_cuda
import ml_dtypes
import numpy as np
import pytest

import pycoll

if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
    pytest.skip("cuda-bindings is not installed", allow_module_level=True)

import fakegpu

Comm = Any
Ranks = Any

TESTS = Path(__file__).parent
PADDING = 77
KERNEL_S = 5.0
LARGE = 100_000
"""Elements of a value that goes in several segments, and waits for its receiver."""

JOBS = {
    "2": (2, ()),
    "3": (3, ()),
    "2 by TCP": (2, ("--transport", "tcp")),
    "4 on 2 hosts": (4, ("--emulate-hosts", "2")),
}

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


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return fake_cuda.build(tmp_path_factory.mktemp("cuda"))
    except RuntimeError as exc:
        if "needs gcc" not in str(exc):
            raise
        pytest.skip(str(exc))


def environment(library: Path, **options: Any) -> dict[str, str]:
    """The variables of ranks that find the fake driver, and the modules of the tests."""
    paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    options = {"devices": 2, **options}
    return fake_cuda.environment(library, **options) | {"PYTHONPATH": os.pathsep.join(paths)}


@pytest.fixture(scope="module", params=JOBS)
def ranks(request: pytest.FixtureRequest, library: Path) -> Iterator[Any]:
    """Runs a program on all ranks of a job; see conftest."""
    from ranks_pool import Pool

    size, options = JOBS[request.param]
    pool = Pool(size, options, environment(library))
    yield pool
    pool.close()


@pytest.fixture
def gpu_job(job: Any, library: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a script on ranks that have GPUs; see script_jobs."""
    for name, value in environment(library).items():
        monkeypatch.setenv(name, value)
    return job


def jobs(*names: str) -> pytest.MarkDecorator:
    """Run a test on these jobs alone."""
    return pytest.mark.parametrize("ranks", names, indirect=True, scope="module")


# --- what programs on ranks use ----------------------------------------------------------------


def tidy(program: Callable[..., Any]) -> Callable[..., Any]:
    """Have a program leave nothing on the GPUs, nor borrowed, and no errors.

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
        deadline = time.monotonic() + 3
        while (fakegpu.lent or fake_cuda.stats()["allocations"]) and time.monotonic() < deadline:
            gc.collect()
            fake_cuda.run_all()  # what was given up may still be under way
            time.sleep(0.001)
        stats = fake_cuda.stats()
        assert stats["illegal_accesses"] == 0, stats
        assert not fakegpu.lent, f"{len(fakegpu.lent)} arrays were not given back"
        assert stats["allocations"] == 0, stats
        return result

    return checked


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


# --- values ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("way", WAYS)
def test_every_method_gives_what_it_gives_for_numpy_whatever_the_strides(
    ranks: Ranks, way: str, seed: int
) -> None:
    @tidy
    def program(comm: Comm, way: str, seed: int) -> None:
        for method, layout in itertools.product(METHODS, LAYOUTS):
            both_ways(
                comm, way, method, (4, 3), "float32", lambda x, as_=layout: laid_out(x, as_)[0],
                fakegpu.Array,
            )  # fmt: skip

    ranks(program, way, seed)


@pytest.mark.parametrize("seed", range(2))
def test_large_values_too(ranks: Ranks, seed: int) -> None:
    @tidy
    def program(comm: Comm, seed: int) -> None:
        for method, way in itertools.product(METHODS, WAYS):
            both_ways(comm, way, method, (LARGE,), "int32", fakegpu.array, fakegpu.Array)
        for method in METHODS:
            columns = lambda x: laid_out(x, "columns")[0]  # noqa: E731
            both_ways(comm, "request", method, (200, 500), "int32", columns, fakegpu.Array)

    ranks(program, seed)


@pytest.mark.parametrize("way", WAYS)
def test_every_dtype_in_every_method(ranks: Ranks, way: str) -> None:
    @tidy
    def program(comm: Comm, way: str, seed: int) -> None:
        for dtype in REDUCING:
            for method in METHODS:
                both_ways(comm, way, method, (5,), dtype, fakegpu.array, fakegpu.Array)
        for dtype, method in itertools.product(MOVING, CARRYING):
            both_ways(comm, way, method, (5,), dtype, fakegpu.array, fakegpu.Array)

    ranks(program, way, 5)


@pytest.mark.parametrize("way", WAYS)
def test_arrays_without_axes_and_without_elements(ranks: Ranks, way: str) -> None:
    @tidy
    def program(comm: Comm, way: str, seed: int) -> None:
        shapes: list[tuple[int, ...]] = [(), (0,), (1,), (3, 0), (0, 3), (1, 1)]
        for method, shape in itertools.product(METHODS, shapes):
            both_ways(comm, way, method, shape, "float32", fakegpu.array, fakegpu.Array)

    ranks(program, way, 6)


def test_every_algorithm_takes_arrays_on_a_gpu(ranks: Ranks) -> None:
    @tidy
    def program(comm: Comm, seed: int) -> None:
        for method in (*COMBINING[:5], *CARRYING[:5]):
            args, kwargs = arguments(method, comm.rank, comm.size, (1001,), "int64")
            wanted = getattr(comm, method)(*args, **kwargs)
            for algorithm in pycoll.algorithms(method):
                for way in ("blocking", "request"):
                    here = kwargs | {"algorithm": algorithm}
                    try:
                        got = call(comm, way, method, convert(args[0], fakegpu.array), **here)
                    except ValueError:  # not in this job, or not as a request
                        continue
                    equal(got, wanted, (method, algorithm, way))

    ranks(program, 7)


def test_operators_see_the_elements(ranks: Ranks) -> None:
    @tidy
    def program(comm: Comm, seed: int) -> None:
        x = numbers(comm.rank, (4, 3))
        for op in ("prod", "min", "max", "avg", "land", pycoll.Op(lambda a, b: a - b, False)):
            for method, way in itertools.product(COMBINING, WAYS[:2]):
                args, kwargs = arguments(method, comm.rank, comm.size, (4, 3), "float32")
                wanted = call(comm, way, method, *args, op=op, **kwargs)
                there = convert(args[0], fakegpu.array)
                got = call(comm, way, method, there, *args[1:], op=op, **kwargs)
                equal(got, wanted, (op, method, way), fakegpu.Array)
        del x

    ranks(program, 8)


def test_an_array_that_may_not_be_written_can_be_sent(ranks: Ranks) -> None:
    def read_only(x: Any) -> Any:
        made = fakegpu.array(x)
        made.readonly = True
        return made

    @tidy
    def program(comm: Comm, seed: int) -> None:
        for method in METHODS:
            both_ways(comm, "blocking", method, (4, 3), "float32", read_only, fakegpu.Array)
        wide = fakegpu.array(numbers(comm.rank, (1, 3))).broadcast_to((4, 3))
        x = np.broadcast_to(numbers(comm.rank, (1, 3)), (4, 3))
        equal(comm.all_reduce(wide), comm.all_reduce(x), "stride 0", fakegpu.Array)

    ranks(program, 9)


def test_the_cuda_array_interface_is_enough(ranks: Ranks) -> None:
    @tidy
    def program(comm: Comm, seed: int) -> None:
        for method, layout, way in itertools.product(METHODS, LAYOUTS, ["blocking", "request"]):
            put = lambda x, as_=layout: fakegpu.InterfaceArray(laid_out(x, as_)[0])  # noqa: E731
            both_ways(comm, way, method, (4, 3), "complex64", put, fakegpu.Array)
        out = fakegpu.InterfaceArray(fakegpu.array(np.zeros((4, 3), np.float32)))
        x = numbers(comm.rank, (4, 3))
        assert comm.all_reduce(fakegpu.InterfaceArray(fakegpu.array(x)), out=out) is out
        equal(out, comm.all_reduce(x), "out")
        empty = fakegpu.InterfaceArray(fakegpu.array(np.zeros((0, 3), np.float32)))
        assert now(comm.all_reduce(empty)).shape == (0, 3)

    ranks(program, 10)


class Records:
    """An array of records on a GPU, of a library that makes no arrays of others'."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array
        self.bytes = fakegpu.array(array.view(np.uint8))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "shape": self.array.shape,
            "typestr": self.array.dtype.str,
            "data": (self.bytes.pointer, False),
            "strides": None,
            "stream": self.bytes.stream,
        }


def test_elements_that_only_the_array_interface_has_arrive(ranks: Ranks) -> None:
    @tidy
    def program(comm: Comm, seed: int) -> None:
        x = np.arange(20, dtype=np.uint8).view("V4")
        made = Records(x)
        left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        got = comm.sendrecv(made, right, left)
        interface = got.__cuda_array_interface__
        assert (interface["typestr"], interface["shape"]) == ("|V4", (5,))
        assert fake_cuda.peek(interface["data"][0], 20) == x.tobytes()

    ranks(program, 11)


# --- out ---------------------------------------------------------------------------------------

TAKING_OUT = ["all_reduce", "reduce", "gather", "all_gather", "scatter", "reduce_scatter"]
TAKING_OUT += ["all_to_all", "sendrecv"]


@pytest.mark.parametrize("way", WAYS)
def test_out_is_filled_and_nothing_beside_it(ranks: Ranks, way: str) -> None:
    @tidy
    def program(comm: Comm, way: str, seed: int) -> None:
        for method, layout in itertools.product(TAKING_OUT, LAYOUTS):
            args, kwargs = arguments(method, comm.rank, comm.size, (4, 3), "float64")
            wanted = call(comm, way, method, *args, **kwargs)
            there = convert(args[0], fakegpu.array)
            if wanted is None:
                assert call(comm, way, method, there, *args[1:], **kwargs) is None
                continue
            out, whole = laid_out(np.full(wanted.shape, 5.0), layout)
            got = call(comm, way, method, there, *args[1:], out=out, **kwargs)
            assert got is out
            equal(out, wanted, (method, layout))
            if layout in ("steps", "columns"):
                everything = now(whole)
                assert (everything == PADDING).sum() >= everything.size - wanted.size
                same = laid_out(wanted, layout)[1]
                equal(whole, same.get(), (method, layout, "beside"))

    ranks(program, way, 12)


@pytest.mark.parametrize("seed", range(2))
def test_in_place(ranks: Ranks, seed: int) -> None:
    @tidy
    def program(comm: Comm, seed: int) -> None:
        me, size = comm.rank, comm.size
        for count, way in itertools.product((3, LARGE), WAYS[:2]):
            rows = numbers(me, (size, count), "int64")
            for method in ("all_reduce", "all_to_all"):
                x = fakegpu.array(rows)
                assert call(comm, way, method, x, out=x) is x
                equal(x, getattr(comm, method)(rows), (method, way))
            x = fakegpu.array(rows)
            assert call(comm, way, "reduce", x, root=0, out=x) is (x if me == 0 else None)
            wanted = comm.reduce(rows, root=0)
            equal(x, wanted if me == 0 else rows, ("reduce", way))
            x = fakegpu.array(rows)
            call(comm, way, "all_gather", x[me], out=x)
            equal(x, comm.all_gather(rows[me]), ("all_gather", way))
            x = fakegpu.array(rows)
            call(comm, way, "reduce_scatter", x, out=x[me])
            wanted = rows.copy()
            wanted[me] = comm.reduce_scatter(rows)
            equal(x, wanted, ("reduce_scatter", way))
            x = fakegpu.array(rows)
            right, left = (me + 1) % size, (me - 1) % size
            assert call(comm, way, "sendrecv", x, right, left, out=x) is x
            equal(x, numbers(left, (size, count), "int64"), ("sendrecv", way))
            some = rows[:, :300]
            x = fakegpu.array(some).T
            call(comm, way, "all_reduce", x, out=x)
            equal(x, comm.all_reduce(some).T, ("transposed", way))

    ranks(program, seed)


@jobs("2", "2 by TCP")
def test_what_out_may_not_be(ranks: Ranks) -> None:
    @tidy
    def program(comm: Comm, seed: int) -> None:
        values = np.zeros((2, 4), np.float32)
        x = fakegpu.array(values)

        def refused(message: str, method: str, *args: Any, out: Any) -> None:
            for name in (method, f"i{method}"):
                with pytest.raises(ValueError, match=message):
                    getattr(comm, name)(*args, out=out)

        fixed = fakegpu.array(values)
        fixed.readonly = True
        for method in ("all_reduce", "all_to_all"):
            refused("read-only", method, x, out=fixed)
            refused("read-only", method, x, out=fakegpu.InterfaceArray(fixed))
            refused("dtype", method, x, out=fakegpu.empty((2, 4), np.float64))
            refused("shape", method, x, out=fakegpu.empty((4, 2)))
            lapping = fakegpu.empty((1, 4)).broadcast_to((2, 4))
        lapping.readonly = False
        refused("overlap", method, x, out=lapping)
        twice = fakegpu.array(np.zeros((3, 4), np.float32))
        refused("overlap", "all_reduce", twice[:2], out=twice[1:])
        refused("overlap", "reduce_scatter", x, out=x[1 - comm.rank])
        refused("overlap", "all_gather", x[1 - comm.rank], out=x)
        refused("overlap", "sendrecv", twice[:2], 1 - comm.rank, out=twice[1:])
        square = fakegpu.array(np.zeros((2, 2), np.float32))
        refused("overlap", "all_reduce", square, out=square.T)
        with pytest.raises(ValueError, match="read-only"):
            comm.recv(out=fixed)
        assert (now(fixed) == 0).all() or now(fixed).tobytes() == b"\xdb" * fixed.nbytes
        equal(comm.all_reduce(x), values, "none of these calls counts")

    ranks(program, 13)


@pytest.mark.parametrize("seed", range(2))
def test_a_broadcast_fills_what_is_passed_off_root(ranks: Ranks, seed: int) -> None:
    @tidy
    def program(comm: Comm, seed: int) -> None:
        for layout, count in itertools.product(LAYOUTS, (3, 500)):
            wanted = numbers(1, (100, count))
            x, whole = laid_out(numbers(comm.rank, (100, count)), layout)
            for name in ("broadcast", "ibroadcast"):
                got = getattr(comm, name)(x, root=1)
                assert (got.wait() if name == "ibroadcast" else got) is x
                equal(x, wanted, layout)
            del whole
        on_host = numbers(comm.rank, (4,))
        x = fakegpu.array(on_host) if comm.rank == 1 else on_host
        assert comm.broadcast(x, root=1) is x
        equal(x, numbers(1, (4,)), "to the host")
        x = on_host if comm.rank == 1 else fakegpu.array(on_host)
        assert comm.broadcast(x, root=1) is x
        equal(x, numbers(1, (4,)), "from the host")

    ranks(program, seed)


# --- which GPU ---------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_ranks_may_differ_in_where_their_arrays_are(ranks: Ranks, way: str) -> None:
    @tidy
    def program(comm: Comm, way: str, seed: int) -> None:
        here = comm.rank % 3  # on GPU 0, in the host's memory, on GPU 1

        def put(x: Any) -> Any:
            return x if here == 1 else fakegpu.array(x, device=here // 2)

        for method, shape in itertools.product(METHODS, [(5,), (), (0,), (LARGE,)]):
            args, kwargs = arguments(method, comm.rank, comm.size, shape, "int32")
            wanted = call(comm, way, method, *args, **kwargs)
            got = call(comm, way, method, convert(args[0], put), *args[1:], **kwargs)
            announced = method in ("broadcast", "scatter", "scatterv", "sendrecv", "gatherv")
            announced |= method in ("all_gatherv", "all_to_allv")
            equal(got, wanted, (method, shape))
            if not announced:  # the caller's own kind, and place
                results = got if isinstance(got, list) else [got]
                for result in results:
                    assert isinstance(result, (np.ndarray if here == 1 else fakegpu.Array) | None)
                    if isinstance(result, fakegpu.Array):
                        assert result.device == here // 2, method

    ranks(program, way, 14)


@pytest.mark.parametrize("seed", range(2))
def test_one_call_may_have_arrays_of_two_gpus_and_of_the_host(ranks: Ranks, seed: int) -> None:
    @tidy
    def program(comm: Comm, seed: int) -> None:
        me, size = comm.rank, comm.size
        for count, way in itertools.product((7, LARGE), WAYS):
            values = numbers(me, (count,), "int32")
            total = comm.all_reduce(values)
            for out in (fakegpu.empty((count,), "int32", 1), np.empty(count, np.int32)):
                assert call(comm, way, "all_reduce", fakegpu.array(values), out=out) is out
                equal(out, total, way)
            out = fakegpu.empty((count,), "int32", 1)
            assert call(comm, way, "all_reduce", values, out=out) is out
            equal(out, total, way)
            xs = [fakegpu.array(values), fakegpu.array(values, 1), values]
            got = call(comm, way, "all_reduce_many", xs)
            equal(got, [total, total, total], way)
            assert (got[0].device, got[1].device, type(got[2])) == (0, 1, np.ndarray)
            xs = [
                [fakegpu.array(values), fakegpu.array(values, 1), values][i % 3]
                for i in range(size)
            ]
            equal(
                call(comm, way, "all_to_allv", xs),
                [numbers(rank, (count,), "int32") for rank in range(size)],
                way,
            )
            right, left = (me + 1) % size, (me - 1) % size
            out = fakegpu.empty((count,), "int32", 1)
            assert call(comm, way, "sendrecv", fakegpu.array(values), right, left, out=out) is out
            equal(out, numbers(left, (count,), "int32"), way)

    ranks(program, seed)


def test_what_comes_is_on_the_gpu_on_which_the_receiver_works(ranks: Ranks) -> None:
    @tidy
    def program(comm: Comm, seed: int) -> None:
        me, size = comm.rank, comm.size
        right, left = (me + 1) % size, (me - 1) % size
        x = numbers(me, (1000,))
        for device, count in itertools.product((0, 1), (10, LARGE)):
            x = numbers(me, (count,))
            with fakegpu.context(device):
                got = comm.sendrecv(fakegpu.array(x), right, left)
                assert got.device == device
                request = comm.irecv(left)
            comm.send(fakegpu.array(x), right)
            got = request.wait()
            equal(got, numbers(left, (count,)), "irecv")
            assert got.device == device, f"irecv of {count} elements"

    ranks(program, 15)


# --- streams -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
def test_what_its_library_has_under_way_on_an_array_comes_first(ranks: Ranks, seed: int) -> None:
    @tidy
    def program(comm: Comm, seed: int) -> None:
        me, size = comm.rank, comm.size
        right, left = (me + 1) % size, (me - 1) % size
        for count, way in itertools.product((5, LARGE), WAYS[:2]):
            fakegpu.use_stream(fakegpu.new_stream())
            x = fakegpu.array(numbers(me, (count,), "uint8"))
            x.fill(1)
            fakegpu.use_stream(fakegpu.new_stream())
            x.fill(2)
            out = fakegpu.empty((count,), "uint8")
            out.fill(9)
            call(comm, way, "all_reduce", x, out=out)
            equal(out, np.full(count, 2 * size, np.uint8), way)
            got = call(comm, way, "sendrecv", x, right, left)
            x.fill(3)  # it was read
            equal(got, np.full(count, 2, np.uint8), way)
            x = fakegpu.array(numbers(me, (count,), "uint8"))
            x.fill(4)
            total = call(comm, way, "all_reduce", x, out=x)
            equal(total, np.full(count, 4 * size, np.uint8), way)

    ranks(program, seed)


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


@pytest.mark.parametrize("seed", range(2))
def test_a_request_does_not_wait_for_the_gpu_nor_does_anything_else(
    ranks: Ranks, seed: int
) -> None:
    @tidy
    def program(comm: Comm, seed: int) -> None:
        other = comm.dup()
        me, size = comm.rank, comm.size
        for method, count in itertools.product(METHODS, (4, 3000)):
            args, kwargs = arguments(method, me, size, (count,), "int32")
            wanted = getattr(comm, method)(*args, **kwargs)
            kernels: list[Kernel] = []

            def put(x: Any, kernels: list[Kernel] = kernels) -> Any:
                array, kernel = slow_array(x)
                kernels.append(kernel)
                return array

            there = convert(args[0], put)
            request = getattr(comm, f"i{method}")(there, *args[1:], **kwargs)
            total = sum(numbers(rank, (9,)) for rank in range(size))
            equal(other.all_reduce(numbers(me, (9,))), total, "meanwhile")
            equal(other.all_reduce(fakegpu.array(numbers(me, (9,)))), total, "on the GPU")
            equal(comm.all_reduce(fakegpu.array(numbers(me, (9,)))), total, "after it")
            if kernels:
                assert not request.test(), method
            for kernel in kernels:
                kernel.release()
            equal(request.wait(), wanted, method, fakegpu.Array)

    ranks(program, seed)


def test_a_call_that_gives_up_waiting_for_the_gpu_leaves_memory_alone(ranks: Ranks) -> None:
    @tidy
    def program(comm: Comm, seed: int) -> None:
        for method, count in itertools.product(METHODS, (4, 3000)):
            mine = comm.dup()
            args, kwargs = arguments(method, comm.rank, comm.size, (count,), "int32")
            kernels: list[Kernel] = []

            def put(x: Any, kernels: list[Kernel] = kernels) -> Any:
                array, kernel = slow_array(x)
                kernels.append(kernel)
                return array

            there = convert(args[0], put)
            with pytest.raises(pycoll.Error):  # OperationTimeout, or another rank's
                getattr(mine, method)(there, *args[1:], timeout=0.1, **kwargs)
            mine.close()
            del there
            for kernel in kernels:
                kernel.release()
            # What was left under way runs at random, together with this:
            for number in range(5):
                x = numbers(number, (count,), "int32")
                request = comm.isend(fakegpu.array(x), comm.rank)
                equal(comm.recv(comm.rank), x, method)
                request.wait()
        fake_cuda.run_all()

    ranks(program, 16)


@pytest.mark.parametrize("method", ["all_reduce", "sendrecv", "scatter"])
@jobs("2", "2 by TCP")
def test_a_call_whose_out_is_in_use_gives_up_in_time(ranks: Ranks, method: str) -> None:
    @tidy
    def program(comm: Comm, method: str, seed: int) -> None:
        args, kwargs = arguments(method, comm.rank, comm.size, (100,), "float32")
        wanted = getattr(comm, method)(*args, **kwargs)
        out, kernel = slow_array(np.zeros_like(wanted))
        with pytest.raises(pycoll.Error):  # OperationTimeout, or the other's
            getattr(comm, method)(*args, out=out, timeout=0.2, **kwargs)
        kernel.release()

    ranks(program, method, 17)


@pytest.mark.parametrize("method", TAKING_OUT)
def test_a_request_whose_out_is_in_use_holds_nobody_up(ranks: Ranks, method: str) -> None:
    @tidy
    def program(comm: Comm, method: str, seed: int) -> None:
        other = comm.dup()
        args, kwargs = arguments(method, comm.rank, comm.size, (100,), "float32")
        wanted = getattr(comm, method)(*args, **kwargs)
        kernel = None
        if wanted is not None:
            out, kernel = slow_array(np.zeros_like(wanted))
            kwargs["out"] = out
        request = getattr(comm, f"i{method}")(*args, **kwargs)
        for _ in range(5):
            other.all_reduce(numbers(comm.rank, (100,)))
        if kernel is not None:
            assert not request.test()
            kernel.release()
        equal(request.wait(), wanted, method)

    ranks(program, method, 18)


# --- point to point ----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
def test_messages_to_one_rank_arrive_in_the_order_of_the_calls(ranks: Ranks, seed: int) -> None:
    @tidy
    def program(comm: Comm, seed: int) -> None:
        import random

        me, size = comm.rank, comm.size
        right, left = (me + 1) % size, (me - 1) % size
        choose = random.Random(seed)
        kinds = [choose.choice(["gpu", "slow", "host", "object"]) for _ in range(30)]
        lengths = [choose.choice([1, 100, 30_000]) for _ in range(30)]
        requests: list[Any] = []
        kernels: list[Kernel] = []
        for number, (kind, count) in enumerate(zip(kinds, lengths, strict=True)):
            values = numbers(number, (count,), "int32")
            if kind == "slow":
                x, kernel = slow_array(values)
                kernels.append(kernel)
            else:
                x = {"gpu": fakegpu.array, "host": np.array, "object": lambda v: {"x": v}}[kind](
                    values
                )
            requests.append(comm.isend(x, right, tag=number % 3))
        choose.shuffle(kernels)
        for kernel in kernels:
            kernel.release_soon()
        for number, (kind, count) in enumerate(zip(kinds, lengths, strict=True)):
            status = pycoll.Status()
            got = comm.recv(left, status=status)
            assert status.tag == number % 3
            wanted = numbers(number, (count,), "int32")
            if kind == "object":
                equal(got["x"], wanted, number)
            else:
                equal(got, wanted, number, np.ndarray if kind == "host" else fakegpu.Array)
        pycoll.wait_all(requests)

    ranks(program, seed)


@pytest.mark.parametrize("seed", range(2))
def test_a_blocking_send_comes_after_what_was_sent_before(ranks: Ranks, seed: int) -> None:
    @tidy
    def program(comm: Comm, seed: int) -> None:
        if comm.rank == 0:
            for value in (np.arange(3), "text", fakegpu.array(np.arange(3))):
                x, kernel = slow_array(numbers(0, (5,)))
                first = comm.isend(x, 1)
                kernel.release_soon()
                comm.send(value, 1)
                first.wait()
        if comm.rank == 1:
            for _ in range(3):
                equal(comm.recv(0), numbers(0, (5,)), "first")
                comm.recv(0)

    ranks(program, seed)


@pytest.mark.parametrize("count", [4, LARGE])
def test_the_receive_of_a_sendrecv_does_not_wait_for_its_send(ranks: Ranks, count: int) -> None:
    @tidy
    def program(comm: Comm, count: int, seed: int) -> None:
        me, size = comm.rank, comm.size
        right, left = (me + 1) % size, (me - 1) % size
        x, kernel = slow_array(numbers(me, (count,)))
        first = comm.isendrecv(x, right, left)
        second = comm.irecv(left)
        kernel.release()
        comm.send(numbers(me + 1, (3,)), right)
        equal(first.wait(), numbers(left, (count,)), "the first message")
        equal(second.wait(), numbers(left + 1, (3,)), "the second")

    ranks(program, count, 22)


@pytest.mark.parametrize("seed", range(2))
def test_an_array_may_die_while_it_is_sent(ranks: Ranks, seed: int) -> None:
    @tidy
    def program(comm: Comm, seed: int) -> None:
        me, size = comm.rank, comm.size
        right, left = (me + 1) % size, (me - 1) % size
        for count in (1, 1000, LARGE):
            requests = []
            for number in range(6):
                x = fakegpu.array(numbers(number, (count,), "int32"))
                y = fakegpu.InterfaceArray(x) if number % 2 else x[::-1][::-1]
                requests.append(comm.isend(y, right))
                del x, y
                gc.collect()
                again = fakegpu.empty((count,), "int32")
                again.fill(0xEE)
                del again
            for number in range(6):
                equal(comm.recv(left), numbers(number, (count,), "int32"), (count, number))
            pycoll.wait_all(requests)
            reduction = comm.iall_reduce(fakegpu.array(numbers(me, (count,), "int32")))
            gc.collect()
            equal(
                reduction.wait(),
                sum(numbers(rank, (count,), "int32") for rank in range(size)),
                "iall_reduce",
            )

    ranks(program, seed)


@pytest.mark.parametrize("seed", range(2))
def test_a_receive_fills_the_front_of_out_and_leaves_what_does_not_fit(
    ranks: Ranks, seed: int
) -> None:
    @tidy
    def program(comm: Comm, seed: int) -> None:
        me, size = comm.rank, comm.size
        right, left = (me + 1) % size, (me - 1) % size
        x = numbers(me, (6,), "int32")
        for layout in LAYOUTS:
            out, _whole = laid_out(np.full((4, 3), -1, np.int32), layout)
            status = pycoll.Status()
            request = comm.isend(fakegpu.array(x), right)
            assert comm.recv(left, out=out, status=status) is out
            request.wait()
            wanted = np.full((4, 3), -1, np.int32)
            wanted.reshape(-1)[:6] = numbers(left, (6,), "int32")
            equal(out, wanted, layout)
            assert status.nbytes == 24
        request = comm.isend(fakegpu.array(x), right)
        small = fakegpu.array(np.full(5, -1, np.int32))
        with pytest.raises(pycoll.TruncationError):
            comm.recv(left, out=small)
        with pytest.raises(pycoll.MismatchError):
            comm.recv(left, out=fakegpu.empty((9,), "float32"))
        assert (small.get() == -1).all()
        status = comm.probe(left)
        assert status.nbytes == 24
        equal(comm.recv(left), numbers(left, (6,), "int32"), "it stays", fakegpu.Array)
        request.wait()

    ranks(program, seed)


@jobs("2", "2 by TCP")
def test_a_receive_may_be_given_up(ranks: Ranks) -> None:
    @tidy
    def program(comm: Comm, seed: int) -> None:
        out = fakegpu.array(np.full(LARGE, 3, np.int32))
        with pytest.raises(pycoll.OperationTimeout):
            comm.recv(1 - comm.rank, out=out, timeout=0.05)
        request = comm.irecv(1 - comm.rank, out=out)
        assert request.cancel()
        comm.barrier()
        request = comm.isend(fakegpu.array(numbers(comm.rank, (LARGE,), "int32")), 1 - comm.rank)
        got = comm.recv(1 - comm.rank)
        equal(got, numbers(1 - comm.rank, (LARGE,), "int32"), "another's")
        request.wait()
        assert (out.get() == 3).all()

    ranks(program, 19)


# --- many at a time ----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
def test_requests_are_done_in_any_order(ranks: Ranks, seed: int) -> None:
    @tidy
    def program(comm: Comm, seed: int) -> None:
        import random

        me, size = comm.rank, comm.size
        other = comm.dup()
        choose = random.Random(seed)  # the same calls on all ranks
        releasing = random.Random(seed * 10 + me)
        pending: list[tuple[Any, Any]] = []
        kernels: list[Kernel] = []
        for _ in range(24):
            method = choose.choice(METHODS[:-1])
            shape = choose.choice([(3,), (300, 2), (LARGE // 4,)])
            args, kwargs = arguments(method, me, size, shape, "int32")
            wanted = getattr(other, method)(*args, **kwargs)

            def put(x: Any) -> Any:
                if releasing.random() < 0.3:
                    array, kernel = slow_array(x, releasing.randrange(2))
                    kernels.append(kernel)
                    return array
                return fakegpu.array(x, releasing.randrange(2))

            there = convert(args[0], put)
            pending.append((getattr(comm, f"i{method}")(there, *args[1:], **kwargs), wanted))
            del there
            if kernels and releasing.random() < 0.4:
                kernels.pop(releasing.randrange(len(kernels))).release_soon()
        for kernel in kernels:
            kernel.release_soon()
        requests = [request for request, _ in pending]
        for _ in range(len(requests)):
            index, result = pycoll.wait_any(requests)
            equal(result, pending[index][1], index)

    ranks(program, seed)


@pytest.mark.parametrize("seed", range(2))
def test_many_threads_send_and_reduce(ranks: Ranks, seed: int) -> None:
    @tidy
    def program(comm: Comm, seed: int) -> None:
        me, size = comm.rank, comm.size
        right, left = (me + 1) % size, (me - 1) % size
        errors: list[BaseException] = []

        def work(number: int, mine: Comm) -> None:
            try:
                for turn in range(12):
                    count = (3, 2000, LARGE // 4)[turn % 3]
                    x = fakegpu.array(numbers(me + turn, (count,), "int32"), number % 2)
                    wanted = sum(numbers(rank + turn, (count,), "int32") for rank in range(size))
                    equal(mine.all_reduce(x), wanted, (number, turn))
                    request = comm.isend(x, right, tag=number)
                    got = comm.recv(left, tag=number)
                    equal(got, numbers(left + turn, (count,), "int32"), (number, turn))
                    request.wait()
                    equal(mine.iall_reduce(x).wait(), wanted, (number, turn))
            except BaseException as exc:
                errors.append(exc)

        comms = [comm.dup() for _ in range(4)]
        threads = [threading.Thread(target=work, args=pair) for pair in enumerate(comms)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        for mine in comms:
            mine.close()

    ranks(program, seed)


@pytest.mark.parametrize("seed", range(2))
def test_requests_are_awaited(ranks: Ranks, seed: int) -> None:
    @tidy
    def program(comm: Comm, seed: int) -> None:
        import asyncio

        async def main() -> None:
            x, kernel = slow_array(numbers(comm.rank, (1000,)))
            request = comm.iall_reduce(x)
            asyncio.get_running_loop().call_later(0.02, kernel.release)
            got = await request
            equal(got, sum(numbers(rank, (1000,)) for rank in range(comm.size)), "awaited")

        asyncio.run(main())

    ranks(program, seed)


@jobs("2", "2 by TCP")
def test_ten_thousand_calls_leave_nothing_behind(ranks: Ranks) -> None:
    @tidy
    def program(comm: Comm, seed: int) -> None:
        import resource

        x = fakegpu.array(numbers(comm.rank, (100,)))
        out = fakegpu.empty((100,))
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size

        def some(n: int) -> tuple[dict[str, int], int, int]:
            for _ in range(n // 5):
                comm.all_reduce(x)
                comm.iall_reduce(x, out=out).wait()
                comm.all_reduce(x, out=out)
                comm.sendrecv(x, right, left)
                comm.broadcast(x if comm.rank == 0 else None)
            gc.collect()
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            files = len(list(Path("/dev/shm").iterdir()))
            return fake_cuda.stats(), pages * resource.getpagesize(), files

        before, rss_before, files_before = some(1000)
        after, rss, files = some(9000)
        for name in ("allocations", "allocated_bytes", "registered", "streams", "events"):
            assert after[name] <= before[name] + 2, (name, before, after)
        assert files <= files_before
        assert rss < rss_before + (8 << 20), f"grew by {rss - rss_before} bytes"

    ranks(program, 20)


# --- errors ------------------------------------------------------------------------------------

ALONE_S = 0.5
"""A rank whose neighbor has failed before anything was sent waits so long for it."""

# Not what takes something back: what such a call fails to do stays undone.
FALLIBLE = ["cuCtxPushCurrent", "cuStreamCreate", "cuEventCreate", "cuEventRecord"]
FALLIBLE += ["cuStreamWaitEvent", "cuMemHostRegister", "cuMemAlloc", "cuMemcpyDtoHAsync"]
FALLIBLE += ["cuMemcpyHtoDAsync", "cuMemcpy2DAsync", "cuEventQuery", "cuEventSynchronize"]
FALLIBLE += ["cuIpcGetMemHandle", "cuMemGetAddressRange", "cuIpcOpenMemHandle"]
FALLIBLE += ["cuMemcpyDtoDAsync", "cuPointerGetAttribute"]


@pytest.mark.parametrize("name", FALLIBLE)
@jobs("2")
def test_an_error_of_cuda_is_told_and_nobody_hangs(ranks: Ranks, name: str) -> None:
    """Rank 0's n-th call of a function fails, for each n that a method gets to."""

    @tidy
    def program(comm: Comm, name: str, seed: int) -> list[str]:
        seen = []
        cases = [("all_reduce", 10), ("all_reduce", LARGE), ("iall_reduce", 10)]
        cases += [("iall_reduce", LARGE), ("sendrecv", 10), ("sendrecv", LARGE), ("ibroadcast", 10)]
        cases += [
            ("all_to_all", 3000),
            ("all_reduce_many", 10),
            ("all_gatherv", 10),
            ("isend", LARGE),
        ]
        layout = "columns" if name == "cuMemcpy2DAsync" else "C"
        for method, count in cases:
            for nth in range(1, 40):
                mine = comm.dup()
                base = method.removeprefix("i")
                if base == "send":
                    args: Any = (numbers(comm.rank, (2, count)), 1 - comm.rank)
                    kwargs: Any = {}
                else:
                    args, kwargs = arguments(base, comm.rank, comm.size, (2, count), "float32")
                there = convert(args[0], lambda x, as_=layout: laid_out(x, as_)[0])
                fake_cuda.run_all()
                if comm.rank == 0:
                    fake_cuda.fail(f"{name}:{nth}:719")
                error = None
                start = time.monotonic()
                try:
                    if base == "send":
                        request = mine.isend(there, *args[1:])
                        mine.recv(1 - comm.rank, timeout=ALONE_S)
                        request.wait(ALONE_S)
                    elif base != method:
                        getattr(mine, method)(there, *args[1:], **kwargs).wait(4)
                    else:
                        limit = ALONE_S if base == "sendrecv" else 4
                        getattr(mine, method)(there, *args[1:], **kwargs, timeout=limit)
                except (pycoll.Error, TypeError, RuntimeError) as exc:  # the last: fakegpu's own
                    error = exc
                finally:
                    fake_cuda.fail("")
                case = f"{method} {count} {layout} {name}:{nth}"
                assert not fake_cuda.stats()["illegal_accesses"], case
                if error is not None and comm.rank == 0:
                    assert "LAUNCH_FAILED" in str(error), (case, error)
                # A collective that failed breaks the communicator, or one rank alone has no
                # result: then all go on. Whatever it is, ranks find out without a deadline.
                if error is not None and comm.rank == 0:
                    seen.append(f"{case}: {error!r}")
                if base in ("send", "sendrecv"):
                    if error is not None and comm.rank == 0:
                        mine.revoke() if hasattr(mine, "revoke") else None
                else:
                    assert not isinstance(error, pycoll.OperationTimeout), (case, error)
                    with contextlib.suppress(pycoll.Error):
                        mine.barrier(timeout=4)
                took = time.monotonic() - start
                if base not in ("send", "sendrecv"):
                    assert took < 4, (case, took, error)
                mine.close()
                del there, args
                error = None
                failed = comm.broadcast(bool(seen) and seen[-1].startswith(case + ":"), root=0)
                if not failed:
                    break
        return seen

    ranks(program, name, 21)


# --- the end of a rank, or of a call -------------------------------------------------------------

ON_GPU = """
import fake_cuda, fakegpu, gc

def held(values):
    "An array that a kernel is computing which never ends."
    fakegpu.use_stream(fakegpu.new_stream())
    with fakegpu.context(0):
        fake_cuda.hold(fakegpu.current_stream())
    made = fakegpu.array(values)
    fakegpu.use_stream(fakegpu.LEGACY)
    return made
"""
LARGE_ARRAY = f"np.arange({LARGE}, dtype=np.int32)"


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("dies", ["the sender", "the receiver"])
def test_a_rank_that_dies_in_a_transfer_is_found_out(
    gpu_job: Any, transport: str, dies: str
) -> None:
    text = f"""{ON_GPU}
x = fakegpu.array({LARGE_ARRAY})
if rank == {int(dies == "the receiver")}:
    request = comm.isend(held({LARGE_ARRAY}), 1 - rank) if rank == 0 else comm.irecv(0, 0)
    if rank:
        comm.send("ready", 0, tag=5)
        comm.recv(0, tag=6)  # else it might be lost with this rank
    os.kill(os.getpid(), signal.SIGKILL)
if rank == 0:
    comm.recv(1, tag=5)
    comm.send("go", 1, tag=6)
    def sending():
        while True:
            comm.send(x, 1)
    peer_failed(1, SIGKILL, sending)
else:
    out = fakegpu.array({LARGE_ARRAY})
    peer_failed(0, SIGKILL, comm.recv, 0, out=out)
    assert (out.get() == {LARGE_ARRAY}).all()
peer_failed(1 - rank, SIGKILL, comm.all_reduce, x)
ok()
"""
    done = gpu_job(2, text, "--transport", transport)
    assert done.content == [int(dies == "the sender")], done.stderr
    assert done.status == 128 + signal.SIGKILL


def test_a_rank_that_dies_in_a_collective_is_found_out(gpu_job: Any) -> None:
    text = f"""{ON_GPU}
x = fakegpu.array({LARGE_ARRAY})
for _ in range(3):
    comm.all_reduce(x, out=x)
if rank == 1:
    request = comm.iall_reduce(x)
    os.kill(os.getpid(), signal.SIGKILL)
def reducing():
    while True:
        comm.iall_reduce(x).wait()
peer_failed(1, SIGKILL, reducing)
fake_cuda.run_all()
assert fake_cuda.stats()["illegal_accesses"] == 0
ok()
"""
    done = gpu_job(3, text)
    assert done.content == [0, 2], done.stderr


@pytest.mark.parametrize("call", ["all_reduce(x)", "send(x, 1 - rank)", "iall_reduce(x).wait()"])
@pytest.mark.parametrize("what", ["x", "out"])
def test_ctrl_c_ends_a_call_that_waits_for_the_gpu(gpu_job: Any, call: str, what: str) -> None:
    if what == "out":
        call = {
            "all_reduce(x)": "all_reduce(np.ones(100), out=x)",
            "send(x, 1 - rank)": "sendrecv(np.ones(100), 1 - rank, out=x)",
            "iall_reduce(x).wait()": "iall_reduce(np.ones(100), out=x).wait()",
        }[call]
    text = f"""{ON_GPU}
other = comm.dup()
x = held(np.ones(100))
threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT]).start()
error = error_of(lambda: comm.{call})
assert isinstance(error, (KeyboardInterrupt, pycoll.Error)), repr(error)
if isinstance(error, pycoll.Error):
    error_of(time.sleep, 10)  # its own is still to come
y = fakegpu.array(np.ones(3))
assert (other.all_reduce(y).get() == 2).all()
ok()
"""
    done = gpu_job(2, text, "--timeout", "20")
    assert done.content == [0, 1], done.stderr
    assert done.status == 0


def test_a_child_of_fork_is_told_that_it_has_no_gpu(gpu_job: Any) -> None:
    text = f"""{ON_GPU}
x = fakegpu.array(np.arange(5))
result = comm.all_reduce(x)
pid = os.fork()
if pid == 0:
    try:
        comm.all_reduce(x)
    except pycoll.Error:
        del result, x
        gc.collect()
        os._exit(0)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert (result.get() == 2 * np.arange(5)).all()
assert (comm.all_reduce(x).get() == 2 * np.arange(5)).all()
assert fake_cuda.stats()["illegal_accesses"] == 0
ok()
"""
    done = gpu_job(2, text)
    assert done.content == [0, 1], done.stderr


def test_finalize_and_close_do_not_wait_for_the_gpu(gpu_job: Any) -> None:
    text = f"""{ON_GPU}
mine = comm.dup()
requests = [mine.iall_reduce(held(np.ones(10))), mine.isend(held(np.ones(10)), 1 - rank)]
requests += [mine.irecv(1 - rank, out=held(np.ones(10)))]
start = time.monotonic()
mine.close()
assert time.monotonic() - start < 2
requests += [comm.iall_reduce(held(np.ones({LARGE}))), comm.isend(held(np.ones(10)), 1 - rank)]
requests += [comm.iall_reduce(fakegpu.array(np.ones(10)))]
assert (requests[-1].wait().get() == 2).all()
pycoll.finalize()
assert time.monotonic() - start < 8
for request in requests[3:5]:
    error_like(pycoll.Error, "finalize", request.wait)
ok()
"""
    done = gpu_job(2, text)
    assert done.content == [0, 1], done.stderr
    assert done.status == 0


def test_what_was_accepted_for_sending_is_delivered_by_finalize(gpu_job: Any) -> None:
    text = f"""{ON_GPU}
if rank == 0:
    for number in range(5):
        comm.isend(fakegpu.array(np.full(100, number)), 1)
    pycoll.finalize()
else:
    for number in range(5):
        assert (comm.recv(0).get() == number).all()
ok()
"""
    done = gpu_job(2, text)
    assert done.content == [0, 1], done.stderr


def test_a_program_may_end_without_a_word(gpu_job: Any) -> None:
    text = f"""{ON_GPU}
x = fakegpu.array(np.ones({LARGE}))
keep = [comm.all_reduce(x), comm.iall_reduce(x).wait(), comm.persistent.all_reduce(x)]
keep.append(keep)
ok()
"""
    done = gpu_job(2, text)
    assert (done.content, done.stderr, done.status) == ([0, 1], "", 0)


@pytest.mark.parametrize("fail", ["cuInit:*:100", "cuDevicePrimaryCtxRetain:*:2"])
def test_a_gpu_that_cannot_be_used_is_named_with_advice(
    gpu_job: Any, fail: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that cannot use its GPU gets what others send in the host's memory."""
    text = """
class Cuda:
    __cuda_array_interface__ = dict(
        version=3, shape=(3,), typestr="<f4", data=(4096, False), strides=None
    )
error = error_like(TypeError, "Move it to the CPU", comm.all_reduce, Cuda())
assert "CUDA_ERROR" in str(error), error
assert (comm.all_reduce(np.ones(3)) == 2).all()
ok()
"""
    monkeypatch.setenv("FAKE_CUDA_FAIL", fail)
    done = gpu_job(2, text)
    assert done.content == [0, 1], done.stderr


def test_a_receiver_without_a_gpu_gets_a_numpy_array(
    gpu_job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    init = """
if os.environ["PYCOLL_RANK"] == "1":
    os.environ["FAKE_CUDA_FAIL"] = "cuInit:*:100"  # read when the library is loaded
import fakegpu
comm = pycoll.init()
rank, size = comm.rank, comm.size
"""
    text = f"""
values = {LARGE_ARRAY}
x = fakegpu.array(values) if rank == 0 else None
for got in (comm.broadcast(x), comm.ibroadcast(x).wait()):
    assert type(got) is (fakegpu.Array if rank == 0 else np.ndarray), type(got)
    if rank:
        assert (got == values).all()
if rank == 0:
    comm.send(x, 1)
    assert (comm.all_reduce(x).get() == 2 * values).all()
else:
    got = comm.recv(0)
    assert type(got) is np.ndarray
    assert (got == values).all()
    assert (comm.all_reduce(got) == 2 * values).all()
ok()
"""
    done = gpu_job(2, text, init=init)
    assert done.content == [0, 1], done.stderr
