"""Messages that do not fit, receives that are given up, and communicators that come late."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from p2p_cases import LARGE, SMALL, Comm, check, numbered, on

import pycoll
from pycoll import ANY_SOURCE, ANY_TAG, PROC_NULL, Status

HUGE = 24 * 2**20
"""Bytes of a message that takes so long that a receive can be given up half-way."""


def hurried(comm: Comm, shown: Status) -> Any:
    """Receive a message that is here, with no time for it; None if that was given up half-way."""
    try:
        return comm.recv(shown.source, shown.tag, timeout=0)
    except pycoll.OperationTimeout:
        assert comm.iprobe(shown.source, shown.tag) == shown  # it stays where it is
        return None


def until_given_up(ranks: Any, program: Callable[[Comm], int]) -> None:
    """Run a program until rank 1 has given up a receive: one put aside for long finds all done."""
    for _ in range(10):
        if ranks(program)[1]:
            return
    raise AssertionError("no receive was given up")


WAYS: dict[str, Callable[[Comm, int], Any]] = {
    "recv": lambda comm, n: comm.recv(0, 1),
    "recv, out": lambda comm, n: comm.recv(0, 1, out=np.zeros(n, "u1")),
    "recv, from any": lambda comm, n: comm.recv(tag=1),
    "recv, any tag": lambda comm, n: comm.recv(0),
    "irecv": lambda comm, n: comm.irecv(0, 1).wait(),
    "irecv, out": lambda comm, n: comm.irecv(out=np.zeros(n, "u1")).wait(),
    "sendrecv": lambda comm, n: comm.sendrecv(None, PROC_NULL, 0, 0, 1),
    "persistent": lambda comm, n: comm.persistent.recv(0, 1).start().wait(),
}


@on(2)
def test_a_message_whose_receive_was_given_up_is_taken_by_any_other(ranks: Any) -> None:
    def program(comm: Comm) -> int:
        given_up = 0
        for i, (way, receive) in enumerate(WAYS.items()):
            shown = Status(0, 1, HUGE + i)
            if comm.rank == 0:
                pycoll.wait_all([comm.isend(numbered(i, HUGE + i), 1, 1), comm.isend(way, 1, 2)])
                continue
            comm.probe(0, 2)
            got = hurried(comm, shown)
            if got is None:
                given_up += 1
                got = receive(comm, shown.nbytes)
            check(got, i, shown.nbytes)
            assert comm.recv(0, 2) == way
        comm.barrier()
        assert comm.iprobe() is None
        return given_up

    until_given_up(ranks, program)


@on(2)
def test_closing_drops_one_that_was_given_up_and_its_sender_goes_on(ranks: Any) -> None:
    def program(comm: Comm) -> int:
        given_up = False
        with comm.dup() as made:
            if comm.rank == 0:
                made.send(numbered(1, HUGE), 1)
            else:
                made.probe(0)
                given_up = hurried(made, Status(0, 0, HUGE)) is None
        assert comm.all_reduce(1) == 2
        return int(given_up)

    until_given_up(ranks, program)


@on(2)
def test_receives_that_timed_out_get_nothing_and_the_others_keep_their_order(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        for nbytes in (SMALL, LARGE):
            if comm.rank == 1:
                receives = []
                for i in range(6):
                    with pytest.raises(pycoll.OperationTimeout):
                        comm.recv((0, ANY_SOURCE)[i % 2], 3, timeout=0)
                    receives.append(comm.irecv(0, (3, ANY_TAG)[i % 2]))
                    with pytest.raises(pycoll.OperationTimeout):
                        receives[-1].wait(0)  # this one stays
                comm.send("posted", 0)
                for i, got in enumerate(pycoll.wait_all(receives)):
                    check(got, i, nbytes)
            else:
                comm.recv(1)
                for i in range(6):
                    comm.send(numbered(i, nbytes), 1, 3)

    ranks(program)


@on(2)
def test_a_message_that_does_not_fit_a_pending_receive_goes_to_the_next(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        for nbytes in (SMALL, LARGE):
            if comm.rank == 0:
                comm.recv(1)
                for i in range(3):
                    comm.send(numbered(i, nbytes), 1, 5)
                continue
            short = comm.irecv(0, 5, out=np.zeros(nbytes - 1, "u1"))
            other = comm.irecv(tag=5, out=np.zeros(nbytes, "i1"))
            first = comm.irecv(0)
            second = comm.irecv(0, 5, out=np.zeros(nbytes, "u1"))
            comm.send("posted", 0)
            with pytest.raises(pycoll.TruncationError, match=f"{nbytes} bytes"):
                short.wait()
            with pytest.raises(pycoll.MismatchError, match="rank 0 sent"):
                other.wait()
            check(first.wait(), 0, nbytes)
            check(second.wait(), 1, nbytes)
            check(comm.recv(), 2, nbytes)

    ranks(program)


@on(2)
def test_a_receive_is_cancelled_at_any_moment_and_nothing_is_lost(ranks: Any) -> None:
    def program(comm: Comm) -> tuple[int, int]:
        cancelled = 0
        count = 300
        for i in range(count):
            nbytes = (0, 10, LARGE)[i % 3]
            if comm.rank == 0:
                comm.recv(1, tag=1)
                comm.send(numbered(i, nbytes), 1)
                continue
            request = comm.irecv(0, 0, out=np.zeros(nbytes, "u1") if i % 2 else None)
            is_early, is_late = i % 11 == 0, i % 7 == 0
            was_early = is_early and request.cancel()
            comm.send("now", 0, tag=1)
            for _ in range(i % 40):  # meanwhile the message comes, or not
                request.test()
            while is_late and not is_early and not request.test():
                pass
            if was_early or request.cancel():
                cancelled += 1
                assert request.cancelled
                with pytest.raises(pycoll.Error, match="was cancelled"):
                    request.wait()
                check(comm.recv(0, 0), i, nbytes)
            else:
                assert not is_early
                assert not request.cancelled
                check(request.wait(), i, nbytes)
        comm.barrier()
        assert comm.iprobe() is None
        return cancelled, count

    cancelled, count = ranks(program)[1]
    assert 0 < cancelled < count


@on(2)
def test_another_thread_cancels_what_one_waits_for(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        request = comm.irecv(1 - comm.rank)
        errors: list[BaseException] = []

        def wait() -> None:
            try:
                request.wait()
            except pycoll.Error as exc:
                errors.append(exc)

        thread = threading.Thread(target=wait)
        thread.start()
        assert request.cancel()
        thread.join()
        assert "was cancelled" in str(errors[0])
        comm.barrier()
        assert comm.sendrecv(comm.rank, 1 - comm.rank, 1 - comm.rank) == 1 - comm.rank

    ranks(program)


@on(2)
def test_messages_wait_for_a_communicator_that_their_receiver_makes_later(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        lengths = [10, LARGE, 0, SMALL, LARGE + 1]
        if comm.rank == 0:
            with comm.sub([0, 1]) as made:  # no message: rank 1 does not know of it
                sends = [made.isend(numbered(i, n), 1, i % 2) for i, n in enumerate(lengths)]
                with pytest.raises(pycoll.OperationTimeout):
                    made.send(numbered(9, LARGE), 1, timeout=0.01)
                early = [made.iall_reduce(np.full(n, 1)) for n in (1, LARGE)]
                comm.send("on their way", 1)
                pycoll.wait_all(sends)
                assert [total[-1] for total in pycoll.wait_all(early)] == [3, 3]
        else:
            assert comm.recv(0) == "on their way"
            assert comm.iprobe() is None
            with comm.sub([0, 1]) as made:
                late = [made.iall_reduce(np.full(n, 2)) for n in (1, LARGE)]
                assert made.iprobe(0, 1) == Status(0, 1, LARGE)
                for i, n in enumerate(lengths):
                    status = Status()
                    check(made.recv(status=status), i, n)
                    assert status == Status(0, i % 2, n)
                assert made.iprobe() is None
                assert [total[-1] for total in pycoll.wait_all(late)] == [3, 3]

    ranks(program)


@on(2)
def test_a_communicator_that_one_rank_has_made_and_closed_still_delivers(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        if comm.rank == 0:
            with comm.sub([0, 1]) as made:
                for i in range(5):
                    made.send(numbered(i, SMALL), 1)
            comm.send("closed", 1)
        else:
            assert comm.recv(0) == "closed"
            with comm.sub([0, 1]) as made:
                for i in range(5):
                    check(made.recv(0), i, SMALL)
        assert comm.all_reduce(1) == 2

    ranks(program)


@on(2)
def test_messages_for_a_closed_communicator_keep_nobody_waiting(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        made = comm.sub([0, 1])
        if comm.rank == 1:
            made.close()
        comm.barrier()
        if comm.rank == 0:
            for _ in range(3):
                made.send(numbered(1, SMALL), 1)
                made.send(numbered(1, LARGE), 1)
                made.isend(numbered(1, LARGE), 1).wait()
                made.ssend(numbered(1, 10), 1)
                made.send({"an": "object"}, 1)
            made.close()
        assert comm.iprobe() is None
        with comm.sub([0, 1]) as again:  # of the same ranks; it has messages of its own
            other = 1 - comm.rank
            assert again.sendrecv(comm.rank, other, other, 9, 9) == other
            assert again.iprobe() is None
        assert comm.all_reduce(1) == 2

    ranks(program)


@on(3)
def test_one_rank_is_ahead_by_many_collectives_and_messages_between_them(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        count = 40
        if comm.rank == 0:
            requests = []
            for i in range(count):
                requests.append(comm.ibroadcast(np.array([i])))
                for other in (1, 2):
                    comm.send(-i, other, tag=i)
            pycoll.wait_all(requests)
        else:
            for i in reversed(range(count)):
                assert comm.recv(0, i) == -i
            requests = [comm.ibroadcast(None) for _ in range(count)]
            for i in reversed(range(count)):
                assert requests[i].wait().tolist() == [i]
        assert comm.all_reduce(1) == 3

    ranks(program)


@on(2)
def test_calls_started_early_are_compared_when_the_other_rank_makes_them(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        with comm.dup() as made:
            if comm.rank == 0:
                requests = [made.iall_reduce(i) for i in range(3)]
                comm.send("started", 1)
            else:
                comm.recv(0)
                requests = [made.iall_reduce(i) for i in range(2)]
                assert pycoll.wait_all(requests) == [0, 2]
                requests = [made.iall_gather(5)]
            with pytest.raises(pycoll.MismatchError) as found:
                pycoll.wait_all(requests)
            assert all(name in str(found.value) for name in ("iall_reduce", "iall_gather"))
        assert comm.all_reduce(1) == 2

    ranks(program)
