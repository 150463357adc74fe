"""Point to point on real ranks: probes, deadlines, threads."""

from __future__ import annotations

import array
import contextlib
import math
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


@sizes(2)
def test_a_longer_message_is_a_truncation_error_and_stays_first(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        for nbytes in (SMALL, LARGE):
            if comm.rank == 0:
                comm.send(numbered(1, nbytes), 1)
                comm.send(numbered(2, 8), 1)
                continue
            short = np.zeros(nbytes - 1, "u1")
            for receive in (comm.recv, lambda **how: comm.sendrecv(None, PROC_NULL, **how)):
                with pytest.raises(pycoll.TruncationError, match=f"{nbytes} bytes"):
                    receive(out=short)
            assert not short.any()
            assert comm.probe() == Status(0, 0, nbytes)
            check(comm.recv(out=np.zeros(nbytes, "u1")), 1, nbytes)
            check(comm.recv(), 2, 8)

    ranks(program)


@sizes(2)
def test_a_message_that_did_not_fit_keeps_its_place_among_the_others(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        if comm.rank == 0:
            for i in range(6):
                comm.send(numbered(i, 20), 1, tag=i)
        else:
            comm.probe(0, tag=5)
            for tag in (3, 5, 1):
                with pytest.raises(pycoll.TruncationError):
                    comm.recv(0, tag, out=np.zeros(3, "u1"))
                with pytest.raises(pycoll.MismatchError):
                    comm.recv(0, tag, out=np.zeros(30, "i1"))
            for i in range(6):
                check(comm.recv(0), i, 20)

    ranks(program)


@sizes(2)
def test_another_dtype_than_that_of_out_is_a_mismatch_and_stays_first(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        sent = [np.arange(8), np.arange(8.0), "an object", np.arange(LARGE)]
        if comm.rank == 0:
            for x in sent:
                comm.send(x, 1)
        else:
            for x in sent:
                with pytest.raises(pycoll.MismatchError, match="rank 0 sent"):
                    comm.recv(0, out=np.zeros(8, "f4"))
                np.testing.assert_equal(comm.recv(0), x)
        assert comm.all_reduce(1) == 2

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
def test_a_receive_that_times_out_is_withdrawn_and_takes_nothing(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        if comm.rank == 1:
            for timeout in (0, 0.05):
                with pytest.raises(pycoll.OperationTimeout, match=r"recv\(source=0, tag=3\)"):
                    comm.recv(0, 3, timeout=timeout)
            with pytest.raises(TimeoutError):
                comm.recv(timeout=0.01)
        comm.barrier()
        for nbytes in (SMALL, LARGE):
            if comm.rank == 0:
                comm.send(numbered(1, nbytes), 1, 3)
            else:
                check(comm.recv(0, 3, timeout=math.inf), 1, nbytes)

    ranks(program)


@sizes(2)
def test_a_send_that_times_out_is_withdrawn_and_never_received(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        said = r"send\(uint8\[300000\], dest=1"
        if comm.rank == 0:
            for timeout in (0, 0.05):
                with pytest.raises(pycoll.OperationTimeout, match=said):
                    comm.send(numbered(1, LARGE), 1, timeout=timeout)
            comm.send("now", 1, tag=1)
            comm.send(numbered(2, LARGE), 1)
        else:
            assert comm.recv(0, tag=1) == "now"
            check(comm.recv(0), 2, LARGE)
            assert comm.iprobe() is None
        assert comm.all_reduce(1) == 2

    ranks(program)


@sizes(2)
def test_transfers_that_time_out_half_way_lose_and_double_nothing(ranks: Any) -> None:
    def program(comm: Comm, impatient: int) -> int:
        attempts = 0
        for i in range(4):
            # Shared memory moves this in 2 ms.
            nbytes, timeout, done = 24 * MiB + i, 0.0002 * 1.5**i, False
            while not done:
                attempts += 1
                how = {"timeout": timeout if comm.rank == impatient else None}
                timeout *= 1.5
                try:
                    if comm.rank == 0:
                        comm.send(numbered(i, nbytes), 1, **how)
                    else:
                        check(comm.recv(0, **how), i, nbytes)
                    done = True
                except pycoll.OperationTimeout:
                    assert comm.rank == impatient
                    assert attempts < 100
        comm.barrier()
        assert comm.iprobe() is None
        return attempts

    for impatient in (0, 1):
        number = 0
        for _ in range(10):  # who is put aside for long finds that all has been done in time
            attempts = ranks(program, impatient)
            assert attempts[1 - impatient] == 4
            number = max(number, attempts[impatient])
            if number > 4:
                break
        assert number > 4


@sizes(2)
def test_a_send_that_times_out_as_it_is_received_is_received_once_or_never(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        rng = np.random.default_rng(1)
        filling = 0
        if comm.rank == 0:
            # Buffer as much as is allowed, so that short and empty messages wait for receives, too.
            for nbytes in (60_000, 0):
                with contextlib.suppress(pycoll.OperationTimeout):
                    while True:
                        comm.send(numbered(0, nbytes), 1, tag=1, timeout=0.02)
                        filling += 1
        for i in range(200):
            nbytes = (0, 10, LARGE)[i % 3]
            if comm.rank == 1:
                check(comm.recv(0, tag=0), i, nbytes)
                continue
            for _ in range(1000):
                try:
                    comm.send(numbered(i, nbytes), 1, timeout=rng.random() * 0.001)
                    break
                except pycoll.OperationTimeout:
                    continue
        for _ in range(comm.broadcast(filling)):
            assert comm.rank == 0 or not comm.recv(0, tag=1).any()
        comm.barrier()
        assert comm.iprobe() is None

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


@sizes(2, 3)
def test_threads_use_their_own_communicators_at_once(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        me, size = comm.rank, comm.size
        comms = [comm, comm.dup(), comm.dup()]

        def work(which: int) -> None:
            mine = comms[which]
            for i in range(40):
                x = np.full((10, 100_000)[i % 8 == 7], i + which)
                assert (mine.all_reduce(x) == size * (i + which)).all()
                got = mine.sendrecv((which, i, me), (me + 1) % size, (me - 1) % size)
                assert got == (which, i, (me - 1) % size)

        in_threads(*[lambda which=which: work(which) for which in range(3)])

    ranks(program)


@sizes(2)
def test_messages_and_collectives_of_one_communicator_do_not_meet(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        other = 1 - comm.rank
        for i in range(30):
            comm.send(("message", i), other)
            assert comm.all_reduce(i) == 2 * i
            assert comm.broadcast(("broadcast", i) if comm.rank else None, 1) == ("broadcast", i)
        assert [comm.recv(other) for _ in range(30)] == [("message", i) for i in range(30)]

    ranks(program)
