"""mprobe and improbe: a message that they have found is received by its handle and nobody else."""

from __future__ import annotations

import gc
import math
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tiers import alone, on_every_way

import pycoll
from pycoll import ANY_SOURCE, ANY_TAG, PROC_NULL, Status

Comm = Any

LARGE = 300_000
"""Bytes of a message that waits for its receive."""

HUGE = 24 * 2**20
"""Bytes of a message that takes so long that a receive can be given up half-way."""

VALUES = [np.arange(5.0), {"an": "object"}, np.ones((300, 300)), "text " * 40_000, np.empty(0), 7]


def found(comm: Comm, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Any:
    """What improbe finds; it must come without a call that waits for it."""
    while (message := comm.improbe(source, tag)) is None:
        comm.iprobe(PROC_NULL)
    return message


# --- what a handle receives --------------------------------------------------------------------


def receive_everything_by_handles(comm: Comm) -> None:
    other = comm.size - 1 - comm.rank
    probes: list[Callable[..., Any]] = [comm.mprobe, lambda *which: found(comm, *which)]
    receives: list[Callable[..., Any]] = [
        lambda message: message.recv(),
        lambda message: message.irecv().wait(),
    ]
    for probe in probes:
        for receive in receives:
            sent = [comm.isend(value, other, tag) for tag, value in enumerate(VALUES)]
            handles = [probe(other, tag) for tag in range(len(VALUES))]
            assert comm.iprobe() is comm.improbe() is None
            comm.barrier()  # before that nobody sends the next messages
            for tag, message in reversed(list(enumerate(handles))):
                status = message.status
                assert (status.source, status.tag) == (other, tag)
                value = receive(message)
                np.testing.assert_equal(value, VALUES[tag])
                if isinstance(value, np.ndarray):
                    assert status.nbytes == value.nbytes
            pycoll.wait_all(sent)


@on_every_way
def test_a_handle_receives_its_message_in_any_order(ranks: Any) -> None:
    ranks(receive_everything_by_handles)


@alone
def test_a_rank_receives_messages_to_itself_by_their_handles(ranks: Any) -> None:
    ranks(receive_everything_by_handles)


@on_every_way
def test_no_other_receive_gets_the_message(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        if comm.rank == 0:
            for x in (np.zeros(9), np.zeros(LARGE)):
                requests = [comm.isend(x + i, 1, tag=5) for i in range(3)]
                comm.send("all are sent", 1, tag=6)
                pycoll.wait_all(requests)
                comm.recv(1)
        else:
            for _ in range(2):
                comm.recv(0, tag=6)
                first, second = comm.mprobe(0, 5), comm.improbe()
                assert comm.probe().tag == 5
                assert comm.recv(0)[0] == 2
                assert comm.iprobe() is None
                assert second.recv()[0] == 1
                assert first.recv()[0] == 0
                comm.send("next", 0)

    ranks(program)


@on_every_way
def test_messages_after_a_held_one_keep_their_order(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        count = 50
        for large in (False, True):
            x = np.zeros(LARGE if large else 10, "u1")
            if comm.rank == 0:
                requests = [comm.isend(x + i, 1) for i in range(count)]
                pycoll.wait_all(requests)
            else:
                held = comm.mprobe(0)
                assert [comm.recv(0)[0] for _ in range(count - 1)] == list(range(1, count))
                assert held.recv()[0] == 0

    ranks(program)


@on_every_way
def test_a_synchronous_send_is_done_when_the_handle_receives(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        if comm.rank == 0:
            request = comm.issend("a", 1, tag=1)
            comm.recv(1)
            assert not request.test()  # it was found, and not received
            comm.send("go on", 1)
            request.wait()
        else:
            message = comm.mprobe(0, 1)
            comm.sendrecv("found", 0, 0)
            assert message.recv() == "a"

    ranks(program)


@on_every_way
def test_a_handle_fills_an_array_and_a_status(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        for nbytes in (800, LARGE):
            x, status = np.arange(nbytes // 8), Status()
            if comm.rank == 0:
                comm.send(x, 1, tag=3)
                comm.send(x, 1, tag=4)
            else:
                out = np.zeros(len(x) + 2, x.dtype)
                message = comm.mprobe(tag=3)
                assert message.recv(out, status) is out
                np.testing.assert_array_equal(out[:-2], x)
                assert status == message.status == Status(0, 3, x.nbytes)
                strided = np.zeros(2 * len(x), x.dtype)[::2]
                assert comm.mprobe(tag=4).irecv(out=strided, status=status).wait() is strided
                np.testing.assert_array_equal(strided, x)
                assert status.tag == 4

    ranks(program)


@on_every_way
def test_a_handle_keeps_the_message_that_does_not_fit(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        for nbytes in (800, LARGE):
            x = np.arange(nbytes // 8)
            if comm.rank == 0:
                comm.send(x, 1)
                comm.recv(1)
            else:
                message = comm.mprobe(0)
                with pytest.raises(pycoll.TruncationError, match="still here"):
                    message.recv(x[:-1].copy())
                with pytest.raises(pycoll.MismatchError):
                    message.irecv(x.astype("f4")).wait()
                with pytest.raises(TypeError, match="out is not an array"):
                    message.recv("text")
                with pytest.raises(TypeError, match="status"):
                    message.recv(status=3)
                assert comm.iprobe() is None
                np.testing.assert_array_equal(message.recv(), x)
                comm.send("next", 0)
        if comm.rank == 0:
            comm.send("an object", 1)
        else:
            message = comm.mprobe(0)
            with pytest.raises(pycoll.MismatchError):
                message.recv(np.zeros(3))
            assert message.recv() == "an object"

    ranks(program)


@on_every_way
def test_a_message_is_received_once(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        if comm.rank == 0:
            comm.send("once", 1)
        else:
            message = comm.mprobe(0)
            assert message.recv() == "once"
            for again in (message.recv, lambda: message.irecv().wait()):
                with pytest.raises(pycoll.Error, match="this message was received already"):
                    again()
            assert "received already" in repr(message)

    ranks(program)


@on_every_way
def test_a_message_is_not_received_by_two_requests(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        x = np.zeros(HUGE, "u1")
        if comm.rank == 0:
            comm.send(x, 1)
        else:
            message = comm.mprobe(0)
            first, second = message.irecv(), message.irecv()
            with pytest.raises(pycoll.Error, match=r"this message (is being|was) received"):
                second.wait()
            assert len(first.wait()) == HUGE

    ranks(program)


@on_every_way
def test_a_receive_of_a_handle_that_is_given_up_can_be_repeated(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        x = np.arange(HUGE, dtype="u1")
        if comm.rank == 0:
            comm.send(x, 1)
        else:
            message, given_up = comm.mprobe(0), 0
            out = np.zeros_like(x)
            while True:
                try:
                    message.recv(out, timeout=0.0 if given_up < 5 else math.inf)
                    break
                except pycoll.OperationTimeout:
                    given_up += 1
                    assert comm.iprobe() is None
            np.testing.assert_array_equal(out, x)

    ranks(program)


# --- probes ------------------------------------------------------------------------------------


@on_every_way
def test_each_of_two_threads_finds_another_message(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        count = 40
        if comm.rank == 0:
            for i in range(2 * count):
                comm.send(np.full(LARGE if i % 5 == 0 else 9, i), 1)
        else:
            got: list[int] = []

            def take() -> None:
                for _ in range(count):
                    message = comm.mprobe(0)
                    out = np.empty(message.status.count(int), int)
                    got.append(int(message.recv(out)[-1]))

            threads = [threading.Thread(target=take) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert sorted(got) == list(range(2 * count))

    ranks(program)


@on_every_way
def test_mprobe_is_withdrawn_when_its_time_has_passed(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        if comm.rank == 1:
            with pytest.raises(pycoll.OperationTimeout, match="mprobe"):
                comm.mprobe(0, timeout=0)
        comm.barrier()
        if comm.rank == 0:
            comm.send("now", 1)
        else:
            assert comm.recv(0) == "now"

    ranks(program)


@alone
def test_improbe_of_nothing_is_none_and_waits_for_nothing(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        assert comm.improbe() is None
        comm.send("later", 0)
        assert comm.recv() == "later"

    ranks(program)


@alone
def test_the_message_of_nobody_is_received_at_once(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        out = np.zeros(3)
        for message in (comm.mprobe(PROC_NULL), comm.improbe(PROC_NULL, 7)):
            assert message.status == Status(PROC_NULL, ANY_TAG, 0)
            for _ in range(2):
                status = Status(3, 3, 3)
                assert message.recv(status=status) is None
                assert status == message.status
                assert message.irecv(out).wait() is out

    ranks(program)


@alone
def test_wrong_arguments_are_refused(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        for probe in (comm.mprobe, comm.improbe):
            with pytest.raises(ValueError, match="source is 1"):
                probe(1)
            with pytest.raises(TypeError, match="tag is an int"):
                probe(0, "tag")

    ranks(program)


# --- what becomes of a message that was found ----------------------------------------------------


@on_every_way
def test_a_message_that_its_sender_takes_back_is_gone(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        if comm.rank == 0:
            sending = threading.Thread(target=give_up, args=(comm,))
            sending.start()
            comm.recv(1)
            sending.join()
            comm.send("taken back", 1, tag=1)
        else:
            message = comm.mprobe(0)
            comm.send("found", 0)
            comm.recv(0, tag=1)
            for _ in range(2):
                with pytest.raises(pycoll.Error, match="was taken back by its sender"):
                    message.recv()

    def give_up(comm: Comm) -> None:
        with pytest.raises(pycoll.OperationTimeout):
            comm.send(np.zeros(HUGE, "u1"), 1, timeout=0.2)

    ranks(program)


@on_every_way
def test_a_message_goes_with_its_communicator(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        for x in (np.zeros(3), np.zeros(LARGE)):
            mine = comm.dup()
            if comm.rank == 0:
                request = mine.isend(x, 1)
                comm.recv(1)
                request.wait()  # the receiver has dropped it
                mine.close()
            else:
                message = mine.mprobe(0)
                mine.close()
                comm.send("closed", 0)
                with pytest.raises(pycoll.Error, match="communicator is closed"):
                    message.recv()
                with pytest.raises(pycoll.Error, match="communicator is closed"):
                    message.irecv()

    ranks(program)


@on_every_way
def test_a_message_on_a_broken_communicator_names_the_cause(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        mine = comm.dup()
        if comm.rank == 0:
            mine.send("before", 1)
        else:
            message = mine.mprobe(0)
        with pytest.raises(pycoll.MismatchError):
            mine.ibarrier().wait() if comm.rank == 0 else mine.iall_reduce(1).wait()
        if comm.rank == 1:
            with pytest.raises(pycoll.MismatchError):
                message.recv()

    ranks(program)


@on_every_way
def test_who_drops_a_message_is_warned_and_others_are_received(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        mine = comm.dup()
        if comm.rank == 0:
            mine.send("dropped", 1)
            mine.send("received", 1)
        else:
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                mine.mprobe(0)
                gc.collect()
            assert [warning.category for warning in seen] == [ResourceWarning]
            assert "source=0, tag=0" in str(seen[0].message)
            assert mine.recv(0) == "received"

    ranks(program)


@alone
def test_a_handle_cannot_be_pickled(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        comm.send("x", 0)
        message = comm.mprobe()
        with pytest.raises(TypeError, match="Message cannot be pickled"):
            comm.send(message, 0)
        message.recv()

    ranks(program)
