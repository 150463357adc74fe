"""Callbacks of requests: called once, in threads that may wait for whatever they like."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
from patience import PATIENCE

import pycoll

Comm = pycoll.Communicator

SOON_S = 20 * PATIENCE

LARGE = 300_000
"""Elements of a value that waits for its receiver."""

on_both = pytest.mark.parametrize(
    "ranks", [2, (2, ("--transport", "tcp"))], indirect=True, scope="module", ids=["shm", "tcp"]
)


class Calls:
    """What a callback was called with, and in which threads."""

    def __init__(self) -> None:
        self.threads: set[int] = set()
        self._queue: SimpleQueue[Any] = SimpleQueue()

    def __call__(self, request: Any) -> None:
        self.threads.add(threading.get_ident())
        self._queue.put(request)

    def next(self) -> Any:
        return self._queue.get(timeout=SOON_S)

    def are_over(self) -> bool:
        return self._queue.empty()


@on_both
def test_every_kind_of_request_calls_its_callback_once_with_itself(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        peer, x = 1 - comm.rank, np.full(LARGE, float(comm.rank))
        begin: list[Callable[[], Any]] = [
            lambda: comm.iall_reduce(x),
            lambda: comm.iall_gather("object"),
            lambda: comm.ibarrier(),
            lambda: comm.ibroadcast(x if comm.rank == 0 else None),
            lambda: comm.isendrecv(x, peer, peer),
            lambda: comm.isend(x, peer, tag=1),
            lambda: comm.irecv(peer, tag=1),
            lambda: comm.isend({"an": "object"}, peer, tag=2),
            lambda: comm.irecv(peer, tag=2),
            lambda: comm.persistent.all_reduce(x[:3]).start(),
            lambda: comm.persistent.sendrecv(x, peer, peer).start(),
            lambda: comm.iall_gatherv(x[: comm.rank + 2]),
        ]
        for wait_first in (False, True):
            calls, requests = Calls(), [each() for each in begin]
            for request in requests:
                if wait_first:
                    request.wait(SOON_S)
                request.add_done_callback(calls)
            found = [calls.next() for _ in requests]
            assert {*map(id, found)} == {*map(id, requests)}
            for request in requests:
                assert request.done
                request.result  # noqa: B018 - it is there
            assert threading.get_ident() not in calls.threads
            assert calls.are_over()

    ranks(program)


@on_both
def test_a_callback_may_wait_for_calls_whose_callbacks_wait(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        depth = 12
        others = [comm.dup() for _ in range(depth)]
        ended: SimpleQueue[int] = SimpleQueue()
        last = threading.Event()

        def begin(level: int) -> None:
            def callback(request: Any) -> None:
                assert request.result[0] == 1
                if level + 1 < depth:
                    begin(level + 1)
                    # That of the last level lets all others go on, and comes to it.
                    assert last.wait(SOON_S)
                    total = others[level].iall_reduce(np.ones(LARGE)).wait(SOON_S)
                    ended.put(int(total[0]))
                else:
                    last.set()

            x = np.full(3, comm.rank)
            others[level].iall_reduce(x).add_done_callback(callback)

        begin(0)
        assert [ended.get(timeout=SOON_S) for _ in range(depth - 1)] == [2] * (depth - 1)
        for other in others:
            other.close()

    ranks(program)


@on_both
def test_callbacks_of_many_requests_run_at_the_same_time(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        count = 10
        meeting, met = threading.Barrier(count), SimpleQueue[int]()

        def callback(request: Any) -> None:
            meeting.wait(SOON_S)
            met.put(request.result)

        for tag in range(count):
            comm.irecv(1 - comm.rank, tag).add_done_callback(callback)
        comm.barrier()
        for tag in range(count):
            comm.send(tag, 1 - comm.rank, tag)
        assert sorted(met.get(timeout=SOON_S) for _ in range(count)) == list(range(count))

    ranks(program)


@on_both
def test_callbacks_of_one_request_come_in_order_and_one_by_one(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        order: list[int] = []
        done = threading.Event()

        def numbered(number: int) -> Callable[[Any], None]:
            def callback(request: Any) -> None:
                order.append(number)
                if number == 2:  # one that is added late, from within
                    request.add_done_callback(numbered(5))
                order.append(number)
                if number == 5:
                    done.set()

            return callback

        request = comm.irecv(1 - comm.rank)
        for number in range(5):
            request.add_done_callback(numbered(number))
        del request  # nobody keeps it
        gc.collect()
        comm.send(np.ones(LARGE), 1 - comm.rank)
        assert done.wait(SOON_S)
        assert order == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]

    ranks(program)


@on_both
def test_callbacks_hear_of_requests_that_fail(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        calls = Calls()
        other = comm.dup()
        receive, stays = other.irecv(1 - comm.rank), other.irecv(1 - comm.rank)
        # Which rank 1 never calls.
        started = other.iall_reduce(np.ones(2)) if comm.rank == 0 else other.irecv(0, 1)
        for request in (started, receive, stays):
            request.add_done_callback(calls)
        assert receive.cancel()
        other.close()
        found = {calls.next() for _ in range(3)}
        assert found == {started, receive, stays}
        for request in found:
            with pytest.raises(pycoll.Error, match=r"cancelled|closed|left"):
                request.result  # noqa: B018
        with pytest.raises(TypeError, match="a callback is a function, not an int"):
            receive.add_done_callback(3)
        with pytest.raises(pycoll.Error, match="not started"):
            comm.persistent.barrier().add_done_callback(calls)

    ranks(program)


@on_both
def test_what_a_callback_raises_is_the_threads_and_stops_no_other(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        calls, raised = Calls(), SimpleQueue[Any]()
        before = threading.excepthook
        threading.excepthook = lambda args: raised.put((args.exc_type, str(args.exc_value)))
        try:
            request = comm.ibarrier()
            request.add_done_callback(lambda request: [][1])
            request.add_done_callback(calls)
            assert raised.get(timeout=SOON_S) == (IndexError, "list index out of range")
            assert calls.next() is request
        finally:
            threading.excepthook = before

    ranks(program)
