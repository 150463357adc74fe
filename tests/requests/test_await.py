"""Requests in asyncio programs: awaited while the event loop goes on."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import Any

import numpy as np
import pytest
from pool_scripts import Scripts
from script_jobs import all_well
from tiers import sizes

import pycoll

Comm = Any

LARGE = 300_000
"""Elements of a value that waits for its receiver."""


@sizes(2, 3)
def test_requests_are_awaited_while_the_event_loop_goes_on(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        me, size = comm.rank, comm.size

        async def main() -> None:
            ticks = 0

            async def tick() -> None:
                nonlocal ticks
                while True:
                    ticks += 1
                    await asyncio.sleep(0)

            ticker = asyncio.create_task(tick())
            receive = comm.irecv((me - 1) % size)
            total, everyone, _ = await asyncio.gather(
                comm.iall_reduce(np.full(LARGE, me)), comm.iall_gather(f"r{me}"), comm.ibarrier()
            )
            assert total[-1] == sum(range(size))
            assert everyone == [f"r{rank}" for rank in range(size)]
            await comm.isend(np.full(LARGE, me), (me + 1) % size)
            assert (await receive)[0] == (me - 1) % size
            assert (await receive)[0] == (me - 1) % size  # again: at once
            assert ticks > 1
            ticker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await ticker

        asyncio.run(main())

    ranks(program)


@sizes(2)
def test_an_await_that_is_given_up_leaves_the_request(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        other = 1 - comm.rank

        async def main() -> None:
            request = comm.irecv(other)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.02):
                    await request
            assert not request.done
            await comm.ibarrier()
            both = asyncio.gather(request, request)
            await comm.isend("at last", other)
            assert await both == ["at last"] * 2
            short = comm.irecv(other, out=np.empty(1))
            await comm.isend(np.ones(3), other)
            with pytest.raises(pycoll.TruncationError):
                await short
            assert (await comm.irecv(other)).shape == (3,)

        before = sorted(os.listdir("/proc/self/fd"))
        for _ in range(3):
            asyncio.run(main())
        assert sorted(os.listdir("/proc/self/fd")) == before

    ranks(program)


def test_the_default_deadline_holds_for_an_await(job: Any) -> None:
    done = job(
        2,
        """
import asyncio

async def main():
    request = comm.irecv(1 - rank)
    try:
        await request
    except pycoll.OperationTimeout as error:
        assert "irecv" in str(error), error
    else:
        raise AssertionError
    await comm.ibarrier()
    comm.send(5, 1 - rank)
    assert await request == 5

asyncio.run(main())
ok()
""",
        "--op-timeout",
        "1",
    )
    all_well(done, 2)


@sizes(2)
def test_a_thousand_are_awaited_on_one_descriptor(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        other = 1 - comm.rank

        async def main() -> None:
            never = comm.irecv(other, tag=2000)  # so that the background thread is there
            before = len(os.listdir("/proc/self/fd"))
            waiting = [asyncio.ensure_future(wait(comm.irecv(other, tag=i))) for i in range(1000)]
            await asyncio.sleep(0)
            assert len(os.listdir("/proc/self/fd")) == before + 1
            await comm.ibarrier()
            for i in reversed(range(1000)):
                comm.isend(i, other, tag=i)
            assert await asyncio.gather(*waiting) == list(range(1000))
            assert never.cancel()

        async def wait(request: Any) -> Any:
            return await request

        asyncio.run(main())

    ranks(program)


def test_several_event_loops_wait_in_their_own_threads(scripts: Scripts) -> None:
    scripts(
        2,
        """
import asyncio
groups = [comm.dup() for _ in range(4)]
async def main(group):
    for i in range(50):
        rows = np.full(1000 * i, rank)
        a, b = await asyncio.gather(group.iall_reduce(i), group.iall_gather(rows))
        assert a == 2 * i and b.shape == (2, 1000 * i)
errors = []
def work(group):
    try:
        asyncio.run(main(group))
    except BaseException as exc:
        errors.append(exc)
threads = [threading.Thread(target=work, args=(group,)) for group in groups]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert not errors, errors
ok()
""",
    )


def test_an_await_without_asyncios_loop_says_how_to_wait_and_leaves_the_request() -> None:
    comm = pycoll.init()
    request = comm.irecv(0)

    async def program() -> None:
        await request

    coroutine = program()  # run by hand, as trio would
    with pytest.raises(
        RuntimeError, match=r"asyncio, .*trio\.to_thread\.run_sync\(request\.wait\)"
    ):
        coroutine.send(None)
    comm.send("here", 0)
    with pytest.raises(StopIteration):
        program().send(None)  # it is done: nobody waits
    assert request.result == "here"
