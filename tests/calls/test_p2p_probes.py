"""Point to point on real ranks: probes, deadlines, threads."""

from __future__ import annotations

import array
import contextlib
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from p2p_cases import LARGE, SMALL, Comm, MiB, check, in_threads, numbered
from tiers import sizes

import pycoll
from pycoll import ANY_SOURCE, ANY_TAG, PROC_NULL, Status


@sizes(2, 3)
def test_probe_shows_a_message_and_leaves_it_where_it_is(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        me, size = comm.rank, comm.size
        if me == 0:
            assert comm.iprobe() is None
            comm.barrier()
            for source in range(1, size):
                for nbytes in (SMALL, LARGE):
                    status = comm.probe(source)
                    assert status == comm.probe(source, 7) == Status(source, 7, nbytes)
                    assert comm.iprobe(ANY_SOURCE, 8) is None
                    assert comm.iprobe(source, ANY_TAG) == status
                    check(comm.recv(status.source, status.tag), source, nbytes)
                status = comm.probe(source)
                assert status.nbytes > 0
                assert comm.recv(source) == "an object"
            assert comm.iprobe() is None
            with pytest.raises(pycoll.OperationTimeout):
                comm.probe(timeout=0.01)
        else:
            comm.barrier()
            for nbytes in (SMALL, LARGE):
                comm.send(numbered(me, nbytes), 0, tag=7)
            comm.send("an object", 0)

    ranks(program)


@sizes(1, 2)
def test_nothing_happens_with_proc_null(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        comm.send(np.zeros(LARGE), PROC_NULL)
        status = Status(0, 0, 1)
        assert comm.recv(PROC_NULL, status=status) is None
        assert status == Status(PROC_NULL, ANY_TAG, 0)
        out = np.ones(3)
        assert comm.recv(PROC_NULL, out=out) is out
        assert comm.probe(PROC_NULL) == comm.iprobe(PROC_NULL) == status
        assert comm.sendrecv(1, PROC_NULL, PROC_NULL, out=out) is out
        # A line of ranks without ends: each gets its left neighbor's value.
        me, size = comm.rank, comm.size
        left, right = me - 1 if me else PROC_NULL, me + 1 if me + 1 < size else PROC_NULL
        status = Status(5, 5, 5)
        got = comm.sendrecv(me, right, left, status=status)
        assert got == (me - 1 if me else None)
        assert status.source == left
        assert comm.sendrecv(me, left, right) == (me + 1 if me + 1 < size else None)
        assert out.tolist() == [1, 1, 1]

    ranks(program)


@sizes(2)
def test_a_shorter_message_fills_the_front_of_out(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        for count in (0, 5, 30, 60_000):
            if comm.rank == 0:
                comm.send(np.arange(count, dtype="f4"), 1)
                comm.send(np.arange(count, dtype="f4"), 1)
                continue
            status = Status()
            out = np.full((10, 6001), -1, "f4")
            assert comm.recv(0, out=out, status=status) is out
            assert status == Status(0, 0, 4 * count)
            expected = np.full(out.size, -1, "f4")
            expected[:count] = np.arange(count)
            np.testing.assert_array_equal(out.ravel(), expected)
            out = np.full((6001, 10), -1, "f4").T
            assert comm.recv(0, out=out) is out
            np.testing.assert_array_equal(out.ravel(), expected)

    ranks(program)


@sizes(2)
def test_arrays_of_every_kind_and_layout_can_be_received_into(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        outs = [
            array.array("d", [0.0] * 4),
            memoryview(array.array("d", [0.0] * 4)),
            np.zeros((2, 2)),
            np.zeros((2, 2), order="F"),
            np.zeros(8)[::2],
            np.zeros(4)[::-1],
            np.zeros((1, 4, 1)),
        ]
        for out in outs:
            if comm.rank == 0:
                comm.send(np.arange(4.0), 1)
            else:
                assert comm.recv(0, out=out) is out
                assert np.asarray(out).ravel().tolist() == [0, 1, 2, 3]
        scalar = np.zeros(())
        if comm.rank == 0:
            comm.send(np.array(5.0), 1)
        else:
            assert comm.recv(0, out=scalar) is scalar
            assert scalar == 5

    ranks(program)


@sizes(1, 3)
def test_sendrecv_in_place_replaces_what_is_sent(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        for nbytes in (SMALL, LARGE):
            x = numbered(comm.rank, nbytes)
            assert comm.sendrecv(x, right, left, out=x) is x
            check(x, left, nbytes)
            assert comm.isendrecv(x, right, left, out=x).wait() is x
            check(x, (comm.rank - 2) % comm.size, nbytes)
            with pytest.raises(ValueError, match="overlaps"):
                comm.sendrecv(x, right, left, out=x[:])

    ranks(program)


@sizes(1, 2)
def test_a_wait_costs_no_cpu_after_messages_to_oneself(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        for call in (comm.sendrecv, lambda *args: comm.isendrecv(*args).wait()):
            assert call(1, comm.rank, comm.rank) == 1
            before = time.process_time()
            with pytest.raises(pycoll.OperationTimeout):
                comm.recv(comm.rank, timeout=0.5)
            assert time.process_time() - before < 0.25

    ranks(program)


@sizes(2)
def test_what_both_sides_have_given_up_is_not_there_any_more(ranks: Any, tmp_path: Path) -> None:
    def program(comm: Comm, fifo: str) -> None:
        if comm.rank == 0:
            num_sent = 0
            for _ in range(2):
                with contextlib.suppress(pycoll.OperationTimeout):
                    comm.send(numbered(1, 32 * MiB), 1, timeout=0.2)
                    num_sent += 1
            with open(fifo, "w"):
                comm.send(num_sent, 1, tag=1)
        else:
            comm.probe(0, tag=0)
            # Both sides copy: all of it may be here before anybody looks at the time, or when the
            # receive has just been given up. Then it was sent.
            num_received = 0
            with contextlib.suppress(pycoll.OperationTimeout):
                check(comm.recv(0, tag=0, timeout=0), 1, 32 * MiB)
                num_received += 1
            with open(fifo):  # waits outside of pycoll, where nothing goes on
                num_sent = comm.recv(0, tag=1)
            for _ in range(num_sent - num_received):
                check(comm.recv(0, tag=0), 1, 32 * MiB)
            assert comm.iprobe() is None

    os.mkfifo(tmp_path / "fifo")
    ranks(program, str(tmp_path / "fifo"))


@sizes(2)
def test_a_sendrecv_of_what_is_buffered_sends_also_if_what_comes_does_not_fit(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        other = 1 - comm.rank
        for out, kind in (
            (np.zeros(8, "u1"), pycoll.TruncationError),
            (np.zeros(SMALL, "i2"), pycoll.MismatchError),
        ):
            with pytest.raises(kind, match=f"rank {other} "):
                comm.sendrecv(numbered(comm.rank, SMALL), other, other, out=out)
            check(comm.recv(other), other, SMALL)
        assert comm.iprobe() is None

    ranks(program)


@sizes(2)
def test_threads_share_a_communicator(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        other = 1 - comm.rank

        def talk(tag: int) -> None:
            for i in range(60):
                nbytes = (SMALL, LARGE)[i % 5 == 4]
                if comm.rank == 0:
                    comm.send(numbered(i, nbytes), other, tag)
                    check(comm.recv(other, tag), i + 1, 10)
                else:
                    check(comm.recv(other, tag), i, nbytes)
                    comm.send(numbered(i + 1, 10), other, tag)

        in_threads(*[lambda tag=tag: talk(tag) for tag in range(4)])

    ranks(program)


@sizes(1)
def test_a_thread_that_waits_does_not_keep_another_from_sending_to_it(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        got: list[Any] = []
        for i in range(50):
            in_threads(lambda: got.append(comm.recv(0)), lambda i=i: comm.send(i, 0))
        assert got == list(range(50))

    ranks(program)


@sizes(2)
def test_closing_a_communicator_ends_what_other_threads_wait_for_on_it(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        twin = comm.dup()
        comm.send("waiting", comm.rank)

        def wait() -> None:
            with pytest.raises(pycoll.Error, match="closed"):
                twin.recv(tag=1, timeout=10)

        def close() -> None:
            while twin.rank == comm.rank and comm.iprobe(comm.rank) is None:
                pass
            twin.close()

        in_threads(wait, close)
        assert comm.recv(comm.rank) == "waiting"
        assert comm.all_reduce(1) == comm.size

    ranks(program)
