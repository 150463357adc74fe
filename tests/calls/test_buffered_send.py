"""bsend and ibsend: a copy is sent, and nobody waits for its receive."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tiers import alone, on_every_way, sizes

import pycoll

Comm = Any


COUNTS = (0, 3, 8000, 300_000)


def exchange_before_any_receive(comm: Comm) -> None:
    """Every rank sends everything, changes it, and waits; only then it receives."""
    other = comm.size - 1 - comm.rank
    again = comm.persistent
    for count in COUNTS:
        x = np.arange(count) + comm.rank
        comm.bsend(x, other, tag=1)
        x += 1
        request = comm.ibsend({"inside": x}, other, tag=2)
        x += 1
        assert request.wait() is None
        persistent = again.bsend(x[::-1], other, tag=3)
        persistent.start().wait()
        x += 1
        persistent.start().wait()
        x[:] = -1
        first = np.arange(count) + other
        np.testing.assert_array_equal(comm.recv(other, 1), first)
        np.testing.assert_array_equal(comm.recv(other, 2)["inside"], first + 1)
        np.testing.assert_array_equal(comm.recv(other, 3), (first + 2)[::-1])
        np.testing.assert_array_equal(comm.recv(other, 3), (first + 3)[::-1])


@on_every_way
def test_ranks_send_to_each_other_before_they_receive(ranks: Any) -> None:
    ranks(exchange_before_any_receive)


@alone
def test_a_rank_sends_copies_to_itself(ranks: Any) -> None:
    ranks(exchange_before_any_receive)


@sizes(2)
def test_what_leaves_at_once_goes_through_no_python(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        def never(*args: Any, **kwargs: Any) -> None:
            raise AssertionError("it went through Python")

        comm.bsend(np.arange(3), 1 - comm.rank)  # a rank's first array shows NumPy to the core
        comm.recv(1 - comm.rank)
        values = np.arange(5), {"a": [1, 2]}, np.arange(12).reshape(3, 4)[:, ::2], 7
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pycoll.Communicator, "bsend", never)
            for x in values:
                comm.bsend(x, 1 - comm.rank, tag=3, timeout=9)
                if isinstance(x, np.ndarray):
                    x += 1
            with pytest.raises(AssertionError, match="it went through Python"):
                comm.bsend(np.zeros(100_000), 1 - comm.rank)
        for x in values:
            got = comm.recv(1 - comm.rank, 3)
            assert np.array_equal(got, x - 1) if isinstance(x, np.ndarray) else got == x

    ranks(program)


@on_every_way
def test_copies_are_received_in_the_order_of_the_calls(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        count = 30
        if comm.rank == 0:
            requests = []
            for i in range(count):
                x = np.full(COUNTS[1 + i % 3], i)
                if i % 3:
                    comm.bsend(x, 1)
                else:
                    requests.append(comm.isend(x, 1))
            pycoll.wait_all(requests)
        else:
            assert [comm.recv(0)[0] for _ in range(count)] == list(range(count))

    ranks(program)


@on_every_way
def test_the_memory_of_a_copy_is_free_when_it_was_received(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        import gc

        from pycoll._calls.message_steps import Outgoing

        if comm.rank == 0:
            comm.bsend(np.zeros(1_000_000), 1)
            comm.recv(1)
            comm.barrier()
            gc.collect()
            assert not any(isinstance(each, Outgoing) for each in gc.get_objects())
        else:
            comm.recv(0)
            comm.send("received", 0)
            comm.barrier()

    ranks(program)


@alone
def test_a_copy_is_not_taken_back(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        request = comm.ibsend("x", 0)
        with pytest.raises(TypeError, match="only a receive can be cancelled"):
            request.cancel()
        assert comm.recv() == "x"

    ranks(program)


@alone
def test_nothing_is_sent_to_nobody_and_arguments_are_checked(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        comm.bsend(1, pycoll.PROC_NULL)
        assert comm.ibsend(np.zeros(9), pycoll.PROC_NULL).wait() is None
        for send in (comm.bsend, comm.ibsend):
            with pytest.raises(ValueError, match="dest is 1"):
                send(1, 1)
            with pytest.raises(ValueError, match="tag is -1"):
                send(1, 0, -1)
        assert comm.iprobe() is None

    ranks(program)


@on_every_way
def test_a_copy_is_received_when_its_senders_communicator_is_closed(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        mine = comm.dup()
        if comm.rank == 0:
            mine.bsend(np.arange(1_000_000), 1)
            mine.close()
        comm.barrier()
        if comm.rank == 1:
            assert mine.recv(0)[-1] == 999_999
        comm.barrier()

    ranks(program)


@on_every_way
def test_a_copy_that_nobody_receives_goes_with_its_communicator(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        mine = comm.dup()
        if comm.rank == 0:
            mine.bsend(np.zeros(1_000_000), 1)
        mine.close()
        assert comm.all_reduce(1) == 2

    ranks(program)
