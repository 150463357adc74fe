"""Arrays on GPUs between ranks: which GPU they are on, and what their streams have under way."""

from __future__ import annotations

import itertools
from typing import Any

import fake_cuda
import fakegpu
import gpu_jobs
import numpy as np
import pytest
from gpu_jobs import (
    LARGE,
    METHODS,
    TAKING_OUT,
    WAYS,
    Comm,
    Kernel,
    Ranks,
    arguments,
    call,
    convert,
    equal,
    jobs,
    numbers,
    slow_array,
    tidy,
)
from tiers import few

import pycoll

ranks = gpu_jobs.ranks


# --- which GPU ---------------------------------------------------------------------------------


@pytest.mark.parametrize("way", few(["request"], ["blocking", "persistent"]))
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
            for kernel in kernels:
                kernel.release()
            del there  # to free memory waits for the GPU, unless a copy from it is under way
            # What was left under way runs at random, together with this:
            for number in range(5):
                x = numbers(number, (count,), "int32")
                request = comm.isend(fakegpu.array(x), comm.rank)
                equal(comm.recv(comm.rank), x, method)
                request.wait()
        fake_cuda.run_all()

    ranks(program, 16)


@pytest.mark.parametrize("method", ["all_reduce", "sendrecv", "scatter"])
@jobs("2", more=["2 by TCP"])
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
            out, in_use = slow_array(np.zeros_like(wanted))
            kwargs["out"] = out
            kernel = in_use if wanted.size else None  # nothing is written to it: nobody waits
        request = getattr(comm, f"i{method}")(*args, **kwargs)
        for _ in range(5):
            other.all_reduce(numbers(comm.rank, (100,)))
        if kernel is not None:
            assert not request.test()
            kernel.release()
        equal(request.wait(), wanted, method)

    ranks(program, method, 18)
