"""Calls that offer arrays, and fail: nothing is written later, no memory of others stays open."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import fake_cuda
import fakegpu
import gpu_jobs
import numpy as np
import pytest
from cuda_ipc_jobs import CUDA_IPC, NBYTES, case, error_of, fresh, meet, on_gpu
from gpu_jobs import ON_GPU, WAYS, Comm, Ranks, call, equal, jobs, now, slow_array, tidy
from tiers import few

import pycoll
from pycoll._cuda import copies, cuda

ranks, gpu_job = gpu_jobs.ranks, gpu_jobs.gpu_job


@pytest.mark.parametrize("why", few(["late", "x"], ["out"]))
@jobs("3 by TCP", more=["2"])
def test_after_a_call_that_gave_up_nothing_is_written_nor_open(ranks: Ranks, why: str) -> None:
    """A rank is late, or its array is still in use."""

    @tidy
    def program(comm: Comm, why: str, seed: int) -> None:
        meet(comm)
        for method, late in itertools.product(CUDA_IPC, (0, comm.size - 1)):
            mine = comm.dup()
            x, wanted, kwargs = case(comm, method, 0)
            there, out, kernel = on_gpu(x), None, None
            if wanted is not None and (method != "broadcast" or x is None):
                out = fakegpu.array(np.full_like(wanted, 3))
            if comm.rank == late and why == "x" and x is not None:
                there, kernel = slow_array(x)
            if comm.rank == late and why == "out" and out is not None:
                out, kernel = slow_array(np.full_like(wanted, 3))
            if method == "broadcast":
                there = out if x is None else there
            elif out is not None:
                kwargs = {**kwargs, "out": out}
            where = method, late, why
            fake_cuda.run_all()
            if why == "late" and comm.rank == late:
                comm.barrier()
            failed = error_of(getattr(mine, method), there, timeout=0.1, **kwargs)
            held = None if out is None else now(out)
            if kernel is None:
                del there  # freed
            if why != "late" or comm.rank != late:
                comm.barrier()
            outcomes = comm.all_gather((failed is not None, kernel is not None))
            if why == "late" or any(waits for _, waits in outcomes):
                assert any(has_failed for has_failed, _ in outcomes), where
            if kernel is not None:
                assert failed is not None, where
                kernel.release()
            fake_cuda.run_all()
            comm.barrier()
            if out is not None:
                assert (now(out) == (held if kernel is None or why == "x" else 3)).all(), where
            assert fake_cuda.stats()["ipc_opened"] == 0, where
            mine.close()

    ranks(program, why, 12)


@jobs("2", more=["2 by TCP"])
def test_a_call_that_gave_up_waits_for_its_copies_that_are_under_way(ranks: Ranks) -> None:
    """They read what others have offered, and write into `out`."""

    @tidy
    def program(comm: Comm, seed: int) -> None:
        meet(comm)
        for method in CUDA_IPC:
            mine = comm.dup()
            x, wanted, kwargs = case(comm, method, 0)
            there, out = on_gpu(x), None
            if wanted is not None and (method != "broadcast" or x is None):
                out = fakegpu.array(np.full_like(wanted, 3))
            if method == "broadcast":
                there = out if x is None else there
            elif out is not None:
                kwargs = {**kwargs, "out": out}
            fake_cuda.run_all()
            with copies.streams_of(cuda.device(0)).pushes.pick() as side_stream, fakegpu.context(0):
                kernel = fake_cuda.hold(side_stream.handle)  # the next copy's
            timer = threading.Timer(0.3, fake_cuda.release, [kernel])
            timer.start()
            failed = error_of(getattr(mine, method), there, timeout=0.1, **kwargs)
            held = None if out is None else now(out)
            del there
            timer.join()
            fake_cuda.run_all()
            assert any(comm.all_gather(failed is not None)), method
            if out is not None:
                assert (now(out) == held).all(), method
            stats = fake_cuda.stats()
            assert stats["ipc_opened"] == stats["illegal_accesses"] == 0, method
            mine.close()

    ranks(program, 17)


@jobs("3 by TCP", more=["2"])
def test_a_request_whose_wait_gave_up_goes_on(ranks: Ranks) -> None:
    @tidy
    def program(comm: Comm, seed: int) -> None:
        meet(comm)
        for method in CUDA_IPC:
            x, wanted, kwargs = case(comm, method, 0)
            there, kernel = (None, None) if x is None else slow_array(x)
            request = getattr(comm, f"i{method}")(there, **kwargs)
            if kernel is not None:
                with pytest.raises(pycoll.OperationTimeout):
                    request.wait(0.05)
                kernel.release()
            equal(request.wait(), wanted, method)

    ranks(program, 13)


DIFFERENT: dict[str, tuple[Callable[..., Any], str, Callable[..., Any], str]] = {
    "collectives": (
        lambda comm, x: comm.gather(x), "gather(uint8[2, 1048576]",
        lambda comm, x: comm.all_gather(x), "all_gather(uint8[2, 1048576]",
    ),
    "lengths, both long": (
        lambda comm, x: comm.all_gather(x), "all_gather(uint8[2, 1048576]",
        lambda comm, x: comm.all_gather(x[1:]), "all_gather(uint8[1, 1048576]",
    ),
    "lengths, one short": (
        lambda comm, x: comm.all_gather(x), "all_gather(uint8[2, 1048576]",
        lambda comm, x: comm.all_gather(x[0, :9]), "all_gather(uint8[9]",
    ),
    "roots": (
        lambda comm, x: comm.gather(x, root=0), "root=0",
        lambda comm, x: comm.gather(x, root=1), "root=1",
    ),
    "roots of a broadcast": (
        lambda comm, x: comm.broadcast(x, root=0), "root=0",
        lambda comm, x: comm.broadcast(x, root=1), "root=1",
    ),
    "announced ones": (
        lambda comm, x: comm.broadcast(x, root=0), "broadcast(root=0",
        lambda comm, x: comm.scatter(None, root=0), "scatter(root=0",
    ),
    "a reduction": (
        lambda comm, x: comm.all_reduce(x), "all_reduce(uint8[2, 1048576]",
        lambda comm, x: comm.all_to_all(x), "all_to_all(",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", DIFFERENT)
@jobs("2", more=["2 by TCP"])
def test_ranks_that_make_different_calls_are_shown_both(ranks: Ranks, what: str) -> None:
    @tidy
    def program(comm: Comm, what: str, seed: int) -> None:
        meet(comm)
        first, one, second, other = DIFFERENT[what]
        x = np.zeros((2, NBYTES), np.uint8)
        for on in ([1, 1], [1, 0], [0, 1]):  # on a GPU, or on the host
            mine = comm.dup()
            there = fakegpu.array(x) if on[comm.rank] else x
            error = error_of(second if comm.rank else first, mine, there)
            if error is None:  # it had left
                error = error_of(mine.barrier)
            assert isinstance(error, pycoll.MismatchError), (on, error)
            assert one in str(error), (on, error)
            assert other in str(error), (on, error)
            mine.close()
            del there
            comm.barrier()
            assert fake_cuda.stats()["ipc_opened"] == 0, on

    ranks(program, what, 15)


@pytest.mark.parametrize("transport", few(["shm"], ["tcp"]))
@pytest.mark.parametrize("method", few(CUDA_IPC[1:2], [CUDA_IPC[0], *CUDA_IPC[2:]]))
def test_a_rank_that_dies_in_a_call_is_found_out(gpu_job: Any, transport: str, method: str) -> None:
    text = f"""
import cuda_ipc_jobs as t
t.meet(comm)
x, wanted, kwargs = t.case(comm, "{method}", 0)
there = t.on_gpu(x)
if rank == 1:
    fake_cuda.run_all()
    request = comm.i{method}(held(x) if x is not None else None, **kwargs)
    comm.send("ready", 0)
    comm.recv(0)
    os.kill(os.getpid(), signal.SIGKILL)
if rank == 0:
    comm.recv(1)
    comm.send("go", 1)
def going_on():
    while True:
        comm.i{method}(there, **kwargs).wait()
peer_failed(1, SIGKILL, going_on)
peer_failed(1, SIGKILL, comm.{method}, there, **kwargs)
del there
gc.collect()
fake_cuda.run_all()
stats = fake_cuda.stats()
assert stats["illegal_accesses"] == stats["ipc_opened"] == 0, stats
ok()
"""
    done = gpu_job(3, ON_GPU + text, "--transport", transport)
    assert done.content == [0, 2], done.stderr


@pytest.mark.parametrize("method", few(CUDA_IPC[:1], CUDA_IPC[1:]))
def test_ctrl_c_ends_a_call_that_waits_for_the_gpu(gpu_job: Any, method: str) -> None:
    text = f"""
import cuda_ipc_jobs as t
t.meet(comm)
other = comm.dup()
x, wanted, kwargs = t.case(comm, "{method}", 0)
there = held(x) if x is not None else None
threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT]).start()
error = error_of(comm.{method}, there, **kwargs)
assert isinstance(error, (KeyboardInterrupt, pycoll.Error)), repr(error)
if isinstance(error, pycoll.Error):
    # Its own is still to come; one long sleep does not see it, if it comes right before.
    error_of(lambda: [time.sleep(0.01) for _ in range(1000)])
x, wanted, kwargs = t.case(other, "{method}", 0)
t.equal(other.{method}(t.on_gpu(x), **kwargs), wanted, "another communicator")
assert fake_cuda.stats()["ipc_opened"] == 0
ok()
"""
    done = gpu_job(2, ON_GPU + text, "--timeout", "20")
    assert done.content == [0, 1], done.stderr
    assert done.status == 0


@jobs("3 by TCP", more=["2"])
def test_requests_end_with_their_communicator(ranks: Ranks) -> None:
    @tidy
    def program(comm: Comm, seed: int) -> None:
        meet(comm)
        mine, kernels, requests, outs = comm.dup(), [], [], []
        for method in CUDA_IPC:
            x, wanted, kwargs = case(comm, method, 0)
            there, out = None, None
            if x is not None:
                there, kernel = slow_array(x)
                kernels.append(kernel)
            if wanted is not None and method != "broadcast":
                out = fakegpu.array(np.full_like(wanted, 3))
                kwargs = {**kwargs, "out": out}
                outs.append(out)
            requests.append(getattr(mine, f"i{method}")(there, **kwargs))
        comm.barrier()
        mine.close()
        for request in requests:
            assert error_of(request.wait, 5) is not None
        comm.barrier()
        for kernel in kernels:
            kernel.release()
        fake_cuda.run_all()
        comm.barrier()
        for out in outs:
            assert (now(out) == 3).all()
        assert fake_cuda.stats()["ipc_opened"] == 0

    ranks(program, 16)


# What CUDA IPC calls, but not what takes something back.
FALLIBLE = ["cuIpcGetMemHandle", "cuMemGetAddressRange", "cuIpcOpenMemHandle", "cuMemcpyDtoDAsync"]
FALLIBLE += ["cuEventRecord", "cuEventQuery", "cuEventSynchronize", "cuCtxPushCurrent"]
HARMLESS = FALLIBLE[:2]
"""What fails there cannot be offered, and is staged."""


@pytest.mark.parametrize("name", few(FALLIBLE[::8], sorted({*FALLIBLE} - {*FALLIBLE[::8]})))
@jobs("2", more=["2 by TCP"])
def test_an_error_of_cuda_is_told_and_nobody_hangs(ranks: Ranks, name: str) -> None:
    """Rank 0's n-th call of a function fails, for each n that a method gets to."""

    @tidy
    def program(comm: Comm, name: str, seed: int) -> int:
        meet(comm)
        seen, opened = 0, fake_cuda.stats()["ipc_opened"]  # of another test with these ranks
        for method, (way, root) in itertools.product(CUDA_IPC, zip(WAYS[:2], (1, 0), strict=True)):
            without = 0
            for nth in itertools.count(1):
                mine = comm.dup()
                x, wanted, kwargs = case(comm, method, root)
                there, where = on_gpu(x), (method, way, root, name, nth)
                if method == "broadcast":  # no result is made, or freed, by the call itself
                    there = fresh(wanted) if x is None else there
                elif wanted is not None:
                    kwargs = {**kwargs, "out": fresh(wanted)}
                fake_cuda.run_all()
                start = time.monotonic()
                if comm.rank == 0:
                    fake_cuda.fail(f"{name}:{nth}:719")
                try:
                    got, error = call(mine, way, method, there, **kwargs), None
                except (pycoll.Error, TypeError, RuntimeError) as exc:  # the last: fakegpu's own
                    got, error = None, exc
                finally:
                    fake_cuda.fail("")
                if error is None:
                    equal(got, wanted, where)
                elif comm.rank == 0:
                    assert "LAUNCH_FAILED" in str(error), (where, error)
                    seen += 1
                error_of(mine.barrier, timeout=4)  # the other may still wait for a failed call
                assert time.monotonic() - start < 4, (where, error)
                stats = fake_cuda.stats()
                assert stats["illegal_accesses"] == 0, where
                opened += stats["ipc_opened"] - opened if name == "cuCtxPushCurrent" else 0
                assert stats["ipc_opened"] == opened, where  # it may be that it cannot be closed
                mine.close()
                without = 0 if comm.broadcast(error is not None) else without + 1
                del there, got, error, kwargs
                if without == 3:  # it was not called so often; some failures do not matter
                    break
        return seen

    seen = ranks(program, name, 14)[0]
    if name in HARMLESS:
        assert not seen
    elif name != "cuEventQuery":  # that is asked often where the answer does not matter
        assert seen
