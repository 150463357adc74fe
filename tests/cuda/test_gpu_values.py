"""Arrays on GPUs give what NumPy's give: elements, dtypes, layouts, operators, out."""

from __future__ import annotations

import itertools
from typing import Any

import fake_cuda
import fakegpu
import gpu_jobs
import numpy as np
import pytest
from gpu_jobs import (
    CARRYING,
    COMBINING,
    LARGE,
    LAYOUTS,
    METHODS,
    MOVING,
    PADDING,
    REDUCING,
    TAKING_OUT,
    WAYS,
    Comm,
    Ranks,
    arguments,
    both_ways,
    call,
    convert,
    equal,
    jobs,
    laid_out,
    now,
    numbers,
    tidy,
)
from tiers import few

import pycoll

ranks = gpu_jobs.ranks


# --- values ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", few([0], [1]))
@pytest.mark.parametrize("way", few(["blocking", "request"], ["persistent"]))
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


@pytest.mark.parametrize("seed", few([0], [1]))
def test_large_values_too(ranks: Ranks, seed: int) -> None:
    @tidy
    def program(comm: Comm, seed: int) -> None:
        for method, way in itertools.product(METHODS, WAYS):
            both_ways(comm, way, method, (LARGE,), "int32", fakegpu.array, fakegpu.Array)
        for method in METHODS:
            columns = lambda x: laid_out(x, "columns")[0]  # noqa: E731
            both_ways(comm, "request", method, (200, 500), "int32", columns, fakegpu.Array)

    ranks(program, seed)


@pytest.mark.parametrize("way", few(["request"], ["blocking", "persistent"]))
def test_every_dtype_in_every_method(ranks: Ranks, way: str) -> None:
    @tidy
    def program(comm: Comm, way: str, seed: int) -> None:
        for dtype in REDUCING:
            for method in METHODS:
                both_ways(comm, way, method, (5,), dtype, fakegpu.array, fakegpu.Array)
        for dtype, method in itertools.product(MOVING, CARRYING):
            both_ways(comm, way, method, (5,), dtype, fakegpu.array, fakegpu.Array)

    ranks(program, way, 5)


@pytest.mark.parametrize("way", few(["blocking"], ["request", "persistent"]))
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
        difference = pycoll.Op(lambda a, b: a - b, False)
        ops = [(op, "float32") for op in ("prod", "min", "max", "avg", "land", difference)]
        for op, dtype in [*ops, ("avg", "float16")]:
            for method, way in itertools.product(COMBINING, WAYS[:2]):
                args, kwargs = arguments(method, comm.rank, comm.size, (4, 3), dtype)
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


class LikeCuPy(fakegpu.Array):
    """Its strides are divided as numbers without a sign, https://github.com/cupy/cupy/issues/10172."""

    def __dlpack__(self, **options: Any) -> object:
        capsule = super().__dlpack__(**options)
        _, _, steps, *_ = list(fakegpu.exported.values())[-1]
        for axis, stride in enumerate(self.strides):
            steps[axis] = stride % (1 << 64) // self.dtype.itemsize
        return capsule


def test_strides_that_lost_their_sign_get_it_back(ranks: Ranks) -> None:
    @tidy
    def program(comm: Comm, seed: int) -> None:
        for dtype, index in itertools.product(
            ["int8", "float32", "complex128"], [np.s_[::-1], np.s_[::3, ::-2]]
        ):
            x = numbers(comm.rank, (9, 5)).astype(dtype)
            there = fakegpu.array(x)[index]
            there.__class__ = LikeCuPy
            out = fakegpu.array(np.zeros(there.shape, dtype))
            equal(comm.all_reduce(there, out=out), comm.all_reduce(x[index]), index)

    ranks(program, 12)


class LikeJax:
    """Old capsules only, which cannot say who may write, and no interface for some dtypes."""

    def __init__(self, array: fakegpu.Array) -> None:
        self.array = array

    def __dlpack__(self, *, stream: int | None = None) -> object:
        return self.array.__dlpack__(stream=stream)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        raise AttributeError("__cuda_array_interface__ is not supported for this dtype")


def test_an_array_without_its_interface_can_be_sent(ranks: Ranks) -> None:
    @tidy
    def program(comm: Comm, seed: int) -> None:
        x = numbers(comm.rank, (4, 3))
        there = LikeJax(fakegpu.array(x))
        out = fakegpu.array(np.zeros((4, 3), np.float32))
        equal(comm.all_reduce(there, out=out), comm.all_reduce(x), "sent")
        with pytest.raises(ValueError, match="read-only"):
            comm.all_reduce(x, out=there)

    ranks(program, 13)


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


@pytest.mark.parametrize("way", few(["blocking", "request"], ["persistent"]))
def test_blocks_of_different_lengths_come_into_arrays_on_gpus(ranks: Ranks, way: str) -> None:
    @tidy
    def program(comm: Comm, way: str) -> None:
        for method in ("gatherv", "all_gatherv", "all_to_allv"):
            for shape in ((4,), (40_000,)):
                args, kwargs = arguments(method, comm.rank, comm.size, shape, "int32")
                wanted = call(comm, way, method, *args, **kwargs)
                there = convert(args[0], fakegpu.array)
                for layout in LAYOUTS:
                    blank = [laid_out(np.zeros_like(x), layout)[0] for x in wanted or ()]
                    got = call(comm, way, method, there, *args[1:], out=blank, **kwargs)
                    equal(got, wanted, (method, layout))
                    assert wanted is None or all(x is y for x, y in zip(got, blank, strict=True))
                whole = fakegpu.array(np.zeros_like(np.concatenate(wanted or [[0]])))
                got = call(comm, way, method, there, *args[1:], out=whole, **kwargs)
                equal(got, wanted, (method, "whole"), fakegpu.Array)
                if wanted is not None:
                    equal(whole, np.concatenate(wanted), method)
                    host = np.zeros_like(np.concatenate(wanted))
                    call(comm, way, method, there, *args[1:], out=host, **kwargs)
                    equal(host, np.concatenate(wanted), method)
                else:
                    call(comm, way, method, there, *args[1:], **kwargs)

    ranks(program, way)


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


@jobs("2", more=["2 by TCP"])
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
