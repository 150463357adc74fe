"""`Communicator.counters`: the bytes and messages that went between ranks, exactly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tiers import few

import pycoll

Array = Any
Comm = Any

WAYS: list[Any] = [(4, ()), (4, ("--transport", "tcp")), (2, ("--transport", "zmq"))]
MORE = [(5, ("--emulate-hosts", "2")), (3, ("--transport", "zmq")), (8, ("--transport", "tcp"))]
pytestmark = pytest.mark.parametrize(
    "ranks",
    few(WAYS, MORE),
    indirect=True,
    scope="module",
    ids=[f"{n}-{way[-1] if way else 'shm'}" for n, way in WAYS + MORE],
)


def expected(comm: Comm, sent: dict[int, list[int]], received: dict[int, list[int]]) -> list[Array]:
    """The four counts, of the lengths of messages to and from each rank."""
    rows = [np.zeros(comm.size, np.int64) for _ in range(4)]
    for bytes_row, messages_row, lengths in ((0, 1, sent), (2, 3, received)):
        for rank, each in lengths.items():
            rows[bytes_row][rank] += sum(each)
            rows[messages_row][rank] += len(each)
    return rows


def rise(comm: Comm, call: Any) -> list[Array]:
    """How the counts have risen on this rank while `call()` ran."""
    before = comm.counters()
    call()
    return [now - then for now, then in zip(comm.counters(), before, strict=True)]


def equal(got: list[Array], wanted: list[Array], what: object) -> None:
    for name, mine, right in zip(pycoll.Counters._fields, got, wanted, strict=True):
        assert mine.tolist() == right.tolist(), (what, name)


def test_a_ring_all_reduce_sends_its_textbook_bytes_to_the_right_alone(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        size, right, left = comm.size, (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        add = pycoll.Op(np.add, elementwise=True)  # done in Python
        x = np.arange(120 * size, dtype=np.float64)
        out, piece = np.empty_like(x), x.nbytes // size
        persistent = comm.persistent.all_reduce(x, out=out, algorithm="ring")
        ways: dict[str, Any] = {
            "blocking": lambda: comm.all_reduce(x, algorithm="ring"),
            "deadline": lambda: comm.all_reduce(x, algorithm="ring", timeout=60.0),
            "twin": lambda: comm.iall_reduce(x, algorithm="ring").wait(),
            "in Python": lambda: comm.all_reduce(x, add, algorithm="ring"),
            "persistent": lambda: (persistent.start(), persistent.wait()),
            "as a list": lambda: comm.all_reduce_many([x[:7], x[7:]], algorithm="ring"),
        }
        for name, call in ways.items():
            lengths = [piece] * 2 * (size - 1)
            equal(rise(comm, call), expected(comm, {right: lengths}, {left: lengths}), name)
        large = np.ones(size << 18, np.float64)  # in segments: more messages, no more bytes
        got = rise(comm, lambda: comm.all_reduce(large, algorithm="ring"))
        for row, peer in ((0, right), (2, left)):
            assert got[row][peer] == got[row].sum() == 2 * large.nbytes * (size - 1) // size
        assert got[1][right] == got[1].sum() >= 2 * (size - 1)

    ranks(program)


def test_every_message_counts_once_on_both_sides_when_it_is_done(ranks: Any) -> None:
    def program(comm: Comm) -> list[Array]:
        me, size = comm.rank, comm.size
        to, source = (me + 1) % size, (me - 1) % size
        small, large = np.ones(3, np.int32), np.ones(300_000, np.uint8)
        ones = [12, 300_000]  # lengths

        def both(rank: int, other: int, lengths: list[int]) -> list[Array]:
            return expected(comm, {rank: lengths}, {other: lengths})

        def blocking() -> None:
            for x in (small, large):
                if me % 2 == 0:
                    comm.send(x, to)
                comm.recv(source, out=np.empty_like(x))
                if me % 2:
                    comm.send(x, to)

        def one_way() -> None:
            for _ in range(100):  # some have come when they are received
                if me % 2 == 0:
                    comm.send(small, me + 1)
                else:
                    comm.recv(me - 1, out=small)

        def requests() -> None:
            receives = [comm.irecv(source), comm.irecv(source, out=np.empty_like(large))]
            pycoll.wait_all([comm.isend(small, to), comm.isend(large, to), *receives])

        def in_python() -> None:  # with a deadline, by memory that is no array of NumPy
            receive = comm.irecv(source)
            comm.send(memoryview(bytes(5)), to, timeout=60.0)
            receive.wait()

        def probed() -> None:
            request = comm.isend(large, to)
            comm.probe(source)
            assert comm.iprobe(source) is not None
            comm.mprobe(source).recv()
            request.wait()

        def to_myself() -> None:
            comm.send(small, me)
            comm.recv(me)

        many = {(me ^ 1) % size: [12] * 100}
        for name, call, wanted in (
            ("one way", one_way, expected(comm, *((many, {}) if me % 2 == 0 else ({}, many)))),
            ("blocking", blocking, both(to, source, ones)),
            ("requests", requests, both(to, source, ones)),
            ("sendrecv", lambda: comm.sendrecv(large, to, source), both(to, source, ones[1:])),
            ("in Python", in_python, both(to, source, [5])),
            ("probed", probed, both(to, source, ones[1:])),
            ("to myself", to_myself, both(me, me, ones[:1])),
            ("to nobody", lambda: comm.send(small, pycoll.PROC_NULL), both(me, me, [])),
        ):
            if name in ("one way", "blocking") and size % 2:
                continue
            comm.barrier()  # which sends messages of its own
            equal(rise(comm, call), wanted, name)
        objects = rise(comm, lambda: comm.sendrecv("abc" * 100, to, source))
        assert objects[0][to] == objects[2][source] > 300
        return list(comm.counters())

    rows = np.array(ranks(program))  # rank, count, peer
    assert (rows[:, 0] == rows[:, 2].T).all()
    assert (rows[:, 1] == rows[:, 3].T).all()


def test_what_is_under_way_or_taken_back_or_not_asked_for_is_not_counted(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        large, small = np.ones(3_000_000, np.uint8), np.ones(8, np.uint8)
        quiet = comm.sub([0, comm.size - 1])
        if quiet is None:
            return
        if quiet.rank == 0:
            with pytest.raises(pycoll.OperationTimeout):
                quiet.ssend(small, 1, timeout=0.05)
            comm.send(None, comm.size - 1)
            request = quiet.issend(large, 1)
            equal(list(quiet.counters()), expected(quiet, {}, {}), "under way")
            quiet.recv(1)
            request.wait()
            equal(list(quiet.counters()), expected(quiet, {1: [large.nbytes]}, {1: [8]}), "done")
        else:
            comm.recv(0)
            quiet.probe(0)
            equal(list(quiet.counters()), expected(quiet, {}, {}), "has come")
            quiet.send(small, 0)
            quiet.recv(0)
            equal(list(quiet.counters()), expected(quiet, {0: [8]}, {0: [large.nbytes]}), "done")

    ranks(program)


def test_a_broadcast_by_a_tree_sends_its_value_once_along_each_edge(ranks: Any) -> None:
    def program(comm: Comm) -> list[list[int]]:
        x = np.ones(100_001, np.uint8) if comm.rank == 1 else None
        return [row.tolist() for row in rise(comm, lambda: comm.broadcast(x, 1, algorithm="tree"))]

    from pycoll.schedules.trees import binomial_children, position, rank_at

    size = ranks.size
    for rank, (sent, messages, _, _) in enumerate(ranks(program)):
        branches = binomial_children(position(rank, size, 1), size)
        children = [rank_at(child, size, 1) for child in branches]
        # twice: the announcement, of a few bytes, takes the same edges
        assert messages == [2 * (peer in children) for peer in range(size)]
        assert {sent[child] - 100_001 for child in children} <= set(range(1, 200))


def test_each_communicator_counts_for_itself_by_its_own_ranks(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        before = comm.counters()
        with comm.split(0, -comm.rank) as backwards:
            first, last = backwards.size - 1, 0
            comm_rises = [now - then for now, then in zip(comm.counters(), before, strict=True)]
            assert backwards.counters().sent_messages.sum() == 0
            if comm.rank == 0:
                backwards.send(np.ones(7, np.uint8), last)
            if comm.rank == comm.size - 1:
                backwards.recv(first)
            got = backwards.counters()
            to, source = (
                {last: [7]} if comm.rank == 0 else {},
                {first: [7]} if comm.rank == comm.size - 1 else {},
            )
            equal(list(got), expected(backwards, to, source), "backwards")
            again = [now - then for now, then in zip(comm.counters(), before, strict=True)]
            equal(again, comm_rises, "the communicator that was split")
        with pytest.raises(pycoll.Error, match="closed"):
            backwards.counters()

    ranks(program)


def test_collectives_in_shared_memory_count_nothing_and_the_arrays_are_the_callers(
    ranks: Any,
) -> None:
    def program(comm: Comm) -> None:
        if "shared_memory" in comm.explain("all_reduce", 800).algorithm:
            got = rise(comm, lambda: (comm.all_reduce(np.ones(100)), comm.barrier()))
            equal(got, expected(comm, {}, {}), "shared memory")
        counters = comm.counters()
        for counted in counters:
            assert counted.dtype == np.int64
            assert counted.shape == (comm.size,)
            counted += 1
        assert (comm.counters().sent_bytes < counters.sent_bytes).all()

    ranks(program)
