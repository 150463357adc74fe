"""Arrays on GPUs between ranks: point to point, and many calls at a time."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import fake_cuda
import fakegpu
import gpu_jobs
import numpy as np
import pytest
from gpu_jobs import (
    LARGE,
    LAYOUTS,
    METHODS,
    Comm,
    Kernel,
    Ranks,
    arguments,
    convert,
    equal,
    jobs,
    laid_out,
    numbers,
    slow_array,
    tidy,
)
from tiers import few

import pycoll

ranks = gpu_jobs.ranks


# --- point to point ----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", few([0], [1]))
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


def test_a_copy_of_what_is_on_a_gpu_is_sent_in_order(ranks: Ranks) -> None:
    @tidy
    def program(comm: Comm) -> None:
        me, size = comm.rank, comm.size
        right, left = (me + 1) % size, (me - 1) % size
        for count in (10, LARGE // 4, 4 * LARGE):
            x, kernel = slow_array(numbers(me, (count,), "int32"))
            requests = [comm.isend(x, right), comm.ibsend(x, right), comm.ibsend("text", right)]
            kernel.release_soon()
            requests[1].wait()
            comm.bsend(fakegpu.array(numbers(me, (count,), "int32")), right)
            wanted = numbers(left, (count,), "int32")
            for _ in range(2):
                equal(comm.recv(left), wanted, count)
            assert comm.recv(left) == "text"
            equal(comm.recv(left), wanted, count)
            pycoll.wait_all(requests)

    ranks(program)


def test_a_handle_receives_a_message_from_and_to_a_gpu(ranks: Ranks) -> None:
    @tidy
    def program(comm: Comm) -> None:
        me, size = comm.rank, comm.size
        right, left = (me + 1) % size, (me - 1) % size
        for count in (10, LARGE // 4, 4 * LARGE):
            x = numbers(me, (count,), "int32")
            wanted = numbers(left, (count,), "int32")
            requests = [comm.isend(fakegpu.array(x), right, tag=tag) for tag in range(3)]
            first, second, third = [comm.mprobe(left, tag) for tag in range(3)]
            assert {m.status.nbytes for m in (first, second, third)} == {4 * count}
            with pytest.raises(pycoll.TruncationError):
                third.recv(fakegpu.array(x[1:]))
            out, there = np.zeros(count, "int32"), fakegpu.array(np.zeros(count, "int32"))
            equal(third.recv(there), wanted, count)
            equal(second.irecv(out).wait(), wanted, count)
            equal(first.recv(), wanted, count)
            pycoll.wait_all(requests)
            comm.barrier()

    ranks(program)


@pytest.mark.parametrize("seed", few([0], [1]))
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


@pytest.mark.parametrize("seed", few([0], [1]))
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


@pytest.mark.parametrize("seed", few([0], [1]))
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


@jobs("2", more=["2 by TCP"])
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


@pytest.mark.parametrize("seed", few([0], [1]))
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


@pytest.mark.parametrize("seed", few([0], [1]))
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


@pytest.mark.parametrize("seed", few([0], [1]))
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


@pytest.mark.parametrize("times", few([450], [9000]))
@jobs("2", more=["2 by TCP"])
def test_many_calls_leave_nothing_behind(ranks: Ranks, times: int) -> None:
    @tidy
    def program(comm: Comm, times: int, seed: int) -> None:
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

        before, rss_before, files_before = some(times // 9)
        after, rss, files = some(times)
        for name in ("allocations", "allocated_bytes", "registered", "streams", "events"):
            assert after[name] <= before[name] + 2, (name, before, after)
        assert files <= files_before
        assert rss < rss_before + (8 << 20), f"grew by {rss - rss_before} bytes"

    ranks(program, times, 20)
