"""PyTorch's tensors on a GPU: every method, and when memory is read and written."""

from __future__ import annotations

import gc
import mmap
import threading
from typing import Any

import numpy as np
import pytest
import torch
from gpu_world import TCP, Library, every_method, jobs, resident_nbytes

import pycoll
from pycoll._cuda import cuda

Comm = Any
Tensor = torch.Tensor

everywhere = jobs((), TCP)
auto = jobs(())

CYCLES = 1_000_000_000
"""A kernel of about half a second: calls are made and return long before its end."""


def gpu(comm: Comm) -> torch.device:
    """This rank's GPU, made the current one."""
    device = torch.device("cuda", comm.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def library(comm: Comm, dtype: torch.dtype = torch.float32) -> Library:
    device = gpu(comm)

    def get(x: Tensor) -> Any:
        assert (type(x), x.dtype, x.device) == (Tensor, dtype, device)
        bits = x.view(torch.int16) if dtype == torch.bfloat16 else x
        return bits.cpu().numpy()

    return Library(lambda x: torch.from_numpy(x).to(device, dtype), get)


def numbers(comm: Comm, count: int, first: float = 0.0) -> Tensor:
    """The same on every rank, for another rank's sake too."""
    return torch.arange(count, dtype=torch.float32, device=gpu(comm)) % 1000 + first


def late(stream: torch.cuda.Stream, x: Tensor, value: float, kernels: int = 1) -> None:
    """Fill `x` after so many kernels of half a second."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(kernels):
            torch.cuda._sleep(CYCLES)
        x.fill_(value)


# --- what comes out ----------------------------------------------------------------------------


@everywhere
@pytest.mark.parametrize("count", [0, 5, 300_000])
def test_every_method(ranks: Any, count: int) -> None:
    assert ranks(lambda comm: every_method(comm, library(comm), count)) == [4 * 17] * 2


@auto
@pytest.mark.parametrize(
    "dtype", ["bool", "uint8", "int16", "int64", "float16", "bfloat16", "float64", "complex64"]
)
def test_every_dtype(ranks: Any, dtype: str) -> None:
    ranks(lambda comm: every_method(comm, library(comm, getattr(torch, dtype)), 1000))


@auto
def test_a_tensor_of_no_dimension_and_one_without_elements(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        one = comm.all_reduce(torch.tensor(2.5, device=gpu(comm)))
        assert (one.shape, one.device.type, one.item()) == ((), "cuda", 2.5 * comm.size)
        none = comm.all_gather(torch.empty(0, 3, device=gpu(comm)))
        assert (none.shape, none.device.type) == ((comm.size, 0, 3), "cuda")

    ranks(program)


@auto
@pytest.mark.parametrize(
    "view", ["x.T", "x[:, 1:3]", "x[::3]", "x[:, 2]", "x[None].expand(2, -1, -1)"]
)
def test_views_are_read_and_filled(ranks: Any, view: str) -> None:
    def program(comm: Comm) -> None:
        x = numbers(comm, 4000).reshape(1000, 4)
        seen = eval(view, {"x": x})
        total = comm.all_reduce(seen)
        assert torch.equal(total, seen * comm.size)
        if "expand" in view:  # its elements overlap each other
            with pytest.raises(ValueError, match="overlaps itself"):
                comm.all_reduce(seen, out=seen)
            return
        before = x.clone()
        assert comm.all_reduce(seen, out=seen) is seen
        eval(view, {"x": before}).copy_(total)
        assert torch.equal(x, before)  # what is not in the view is as it was

    ranks(program)


@auto
def test_a_gradient_is_not_traced(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        x = torch.full((3,), comm.rank + 1.0, device=gpu(comm), requires_grad=True)
        total = comm.all_reduce(x)
        assert (total.tolist(), total.requires_grad) == ([3.0] * 3, False)
        with torch.no_grad():
            assert comm.broadcast(x) is x
        assert (x.tolist(), x.requires_grad, x.is_leaf) == ([1.0] * 3, True, True)

    ranks(program)


@auto
def test_the_callers_out_is_filled(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        x = numbers(comm, 100_000, comm.rank)
        out = torch.empty_like(x)
        assert comm.all_reduce(x, out=out) is out
        assert torch.equal(out, 2 * numbers(comm, 100_000) + 1)
        with pytest.raises(ValueError, match="dtype"):
            comm.all_reduce(x, out=out.double())
        with pytest.raises(ValueError, match="overlap"):
            comm.all_reduce(x[1:], out=x[:-1])
        rows = torch.zeros(comm.size, 100_000, device=x.device)
        rows[comm.rank] = x
        comm.all_gather(rows[comm.rank], out=rows)  # in place
        assert torch.equal(rows[1] - rows[0], torch.ones_like(x))

    ranks(program)


@everywhere
def test_some_ranks_may_be_on_the_host(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        on_gpu = comm.rank == 0
        x = numbers(comm, 50_000) if on_gpu else np.arange(50_000, dtype=np.float32) % 1000
        total = comm.all_reduce(x)
        assert isinstance(total, Tensor if on_gpu else np.ndarray)
        assert float(total[1234]) == 2 * 234.0
        if on_gpu:
            comm.send(x, 1)
            out = torch.empty_like(x)
            comm.recv(1, out=out)
            assert torch.equal(out, x)
        else:
            out = np.empty_like(x)
            comm.recv(0, out=out)
            comm.send(x, 0)
            np.testing.assert_array_equal(out, x)

    ranks(program)


@everywhere
def test_messages_keep_their_order(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        peer = 1 - comm.rank
        sizes = [1, 100_000, 10, 3_000_000, 20_000]
        requests = [comm.isend(numbers(comm, n, first=n), peer) for n in sizes]
        for n in sizes:
            assert torch.equal(comm.recv(peer), numbers(comm, n, first=n))
        pycoll.wait_all(requests)

    ranks(program)


# --- when memory is read and written -----------------------------------------------------------


@everywhere
@pytest.mark.parametrize("count", [10, 5_000_000])
def test_what_the_current_stream_is_about_to_write_is_waited_for(ranks: Any, count: int) -> None:
    def program(comm: Comm) -> None:
        x = torch.zeros(count, device=gpu(comm))
        side = torch.cuda.Stream(x.device)
        late(side, x, comm.rank + 1.0)
        with torch.cuda.stream(side):
            total = comm.all_reduce(x)
        other = torch.cuda.Stream()  # which waits for nobody
        with torch.cuda.stream(other):
            assert bool((total == 3.0).all())

    ranks(program)


@everywhere
def test_a_request_does_not_wait_and_neither_do_other_calls(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        device, side = gpu(comm), torch.cuda.Stream()
        for is_warm in (False, True):  # CUDA waits when it loads a kernel
            x = torch.zeros(1_000_000, device=device)
            # Processes take turns on a GPU: nothing of the other rank is left to do when this
            # one's kernels begin.
            torch.cuda.synchronize()
            comm.barrier()
            late(side, x, comm.rank + 1.0, kernels=4)
            with torch.cuda.stream(side):
                request = comm.iall_reduce(x)
            quick = comm.all_reduce(numbers(comm, 1000))  # on a stream that has nothing to do
            assert comm.all_reduce(1) == comm.size
            if is_warm:
                assert not side.query()
                assert not request.test()
            assert torch.equal(quick, 2 * numbers(comm, 1000))
            assert bool((request.wait() == 3.0).all())

    ranks(program)


def test_the_driver_makes_what_a_call_needs_while_the_gpu_computes() -> None:
    """So the first call of a size does not wait; see docs/gpu.md, "Memory"."""
    device, side = cuda.device(0), torch.cuda.Stream()
    block = mmap.mmap(-1, 4 << 20)
    address = np.frombuffer(block, np.uint8).__array_interface__["data"][0]
    torch.cuda._sleep(1)  # loads the kernel
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(CYCLES)
    device.mark(device.stream())
    device.pin(address, 4 << 20)
    allocated = device.allocate(4 << 20)
    assert not side.query()
    device.unpin(address)
    device.free(allocated)


@auto
def test_a_deadline_passes_while_the_gpu_computes(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        device, side = gpu(comm), torch.cuda.Stream()
        x = torch.zeros(1000, device=device)
        late(side, x, 1.0)
        comm.all_reduce(x)
        side.synchronize()
        late(side, x, 1.0)
        with torch.cuda.stream(side), pytest.raises(pycoll.OperationTimeout):
            comm.all_reduce(x, timeout=0.01)
        assert not side.query()
        side.synchronize()

    ranks(program)


@everywhere
def test_an_input_that_was_read_may_be_overwritten_on_any_stream(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        for _ in range(20):
            x = torch.full((500_000,), comm.rank + 1.0, device=gpu(comm))
            request = comm.isend(x, 1 - comm.rank)
            got = comm.recv(1 - comm.rank)
            request.wait()
            with torch.cuda.stream(torch.cuda.Stream()):
                x.fill_(-1.0)
            assert bool((got == 2.0 - comm.rank).all())

    ranks(program)


@everywhere
def test_a_tensor_may_be_dropped_while_it_is_sent(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        requests = []
        for i in range(20):
            x = torch.full((500_000,), float(i), device=gpu(comm))
            requests.append(comm.isend(x, 1 - comm.rank))
            del x
            torch.full((500_000,), -1.0, device=gpu(comm))  # takes its place, were it free
        for i in range(20):
            assert bool((comm.recv(1 - comm.rank) == float(i)).all())
        pycoll.wait_all(requests)

    ranks(program)


@auto
def test_threads_send_and_receive_at_once(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        wrong: list[object] = []

        def talk(tag: int) -> None:
            device = gpu(comm)  # each thread has a current GPU of its own
            for i in range(50):
                x = torch.full((20_000,), float(tag + i), device=device)
                got = comm.sendrecv(x, 1 - comm.rank, 1 - comm.rank, tag, tag)
                if not torch.equal(got, x):
                    wrong.append((tag, i))

        threads = [threading.Thread(target=talk, args=(100 * t,)) for t in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []

    ranks(program)


# --- memory ------------------------------------------------------------------------------------


@everywhere
def test_ten_thousand_calls_leave_nothing(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        x = numbers(comm, 1000)

        def many(count: int) -> tuple[int, int, int]:
            for _ in range(count):
                comm.all_reduce(x)
                comm.iall_reduce(x).wait()
                comm.sendrecv(x, 1 - comm.rank, 1 - comm.rank)
            comm.barrier()  # nobody measures while the other allocates
            free, _ = torch.cuda.mem_get_info()
            return torch.cuda.memory_allocated(), free, resident_nbytes()

        gc.collect()  # what the tests before have left
        many(100)
        taken = []
        for _ in range(5):  # others use this GPU, too; what we leave would show each time
            comm.barrier()
            allocated, free, resident = many(1)
            then_allocated, then_free, then_resident = many(3333)
            assert then_allocated == allocated
            assert then_resident - resident < 16 << 20
            taken.append(free - then_free)
            if comm.all_reduce(int(taken[-1] >= 16 << 20)) == 0:
                return
        raise AssertionError(f"memory of the GPU: {taken} bytes less after 9999 calls each")

    ranks(program)


@auto
def test_large_tensors(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        x = numbers(comm, 64 << 20)
        assert torch.equal(comm.all_reduce(x), 2 * x)
        assert torch.equal(comm.sendrecv(x, 1 - comm.rank, 1 - comm.rank), x)

    ranks(program)


# What the first two allocate cannot be opened by another process as other memory can.
expandable = jobs((), PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
pooled = jobs((), PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync")

staged = jobs((), PYCOLL_CUDA_IPC="0")


def check_messages(comm: Comm) -> None:
    for count in (10, 3_000_000):
        x = numbers(comm, count, comm.rank)
        assert torch.equal(
            comm.sendrecv(x, 1 - comm.rank, 1 - comm.rank) - x, x * 0 + 1 - 2 * comm.rank
        )
        assert torch.equal(comm.all_reduce(x), 2 * numbers(comm, count) + 1)
        both = torch.stack([numbers(comm, count, rank) for rank in range(2)])
        for _ in range(3):  # the second time what only moves goes by CUDA IPC, where it can
            assert torch.equal(comm.all_gather(x), both)
            assert torch.equal(comm.iall_gather(x).wait(), both)
            assert torch.equal(comm.broadcast(x.clone(), root=1), both[1])
            other = comm.all_to_all(both + comm.rank)[1 - comm.rank]
            assert torch.equal(other, both[comm.rank] + 1 - comm.rank)
            assert torch.equal(comm.scatter(both if comm.rank == 0 else None, root=0), x)
            gathered = comm.gather(x, root=1)
            assert gathered is None if comm.rank == 0 else torch.equal(gathered, both)


@auto
def test_what_only_moves_does_not_touch_the_host(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        from pycoll._cuda import cuda

        check_messages(comm)
        x = numbers(comm, 3_000_000, comm.rank).to("cuda:0")
        torch.cuda.set_device(0)  # on all ranks, for what is received
        for _ in range(3):
            comm.all_gather(x)
        copied: list[Any] = []
        copy, cuda.Device.copy = cuda.Device.copy, lambda *args: copied.append(args)
        try:
            got = comm.all_gather(x)
            comm.sendrecv(x, 1 - comm.rank, 1 - comm.rank)
        finally:
            cuda.Device.copy = copy
        assert not copied
        assert torch.equal(got[1 - comm.rank] - x, x * 0 + 1 - 2 * comm.rank)

    ranks(program)


@expandable
def test_memory_of_expandable_segments(ranks: Any) -> None:
    ranks(check_messages)


@pooled
def test_memory_of_cudas_own_pool(ranks: Any) -> None:
    ranks(check_messages)


@staged
def test_messages_that_are_not_offered(ranks: Any) -> None:
    ranks(check_messages)
