"""Point to point on real ranks: order, tags, probing, sizes, deadlines, threads."""

from __future__ import annotations

import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from p2p_cases import LARGE, SMALL, Comm, MiB, check, numbered
from tiers import few, sizes

import pycoll
from pycoll import Status


def values() -> Iterator[Any]:
    """Values of every kind."""
    rng = np.random.default_rng(0)
    for dtype in ("?", "i1", "u2", "i4", "u8", "f2", "f4", "f8", "c8", "c16", ml_dtypes.bfloat16):
        yield rng.integers(0, 2, (3, 5)).astype(dtype)
    for shape in ((), (0,), (2, 0, 3), (1,), (100, 101), (17, 9001)):
        yield rng.random(shape)
    yield np.arange(24).reshape(2, 3, 4).T
    yield np.arange(100)[::-3]
    yield np.array([(1, 2.0)], [("a", "i4"), ("b", "f8")])
    yield np.array(["2020-01-01", "1999-12-31"], "M8[s]")
    yield np.array([None, {}], object)
    yield from (None, True, 7, 2.5, "text", b"bytes", bytearray(b"x"), {"a": [1, (2,)]}, [1, 2])
    yield from (np.float32(1.5), "long" * 50_000, {"array": np.arange(200_000)})


@sizes(2)
def test_values_of_every_kind_arrive_as_they_were(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        other = 1 - comm.rank
        for x in values():
            if comm.rank == 0:
                comm.send(x, 1)
                got = comm.recv(1)
            else:
                got = comm.recv(0)
                comm.send(got, other)
            assert type(got) is type(x)
            np.testing.assert_equal(got, x)
            if isinstance(x, np.ndarray):
                assert got.dtype == x.dtype
                assert got.shape == x.shape
                assert got.flags.writeable
        for x in (array.array("h", [1, 2]), memoryview(array.array("d", [0.5]))):
            got = comm.sendrecv(x, other, other)
            assert type(got) is type(x)
            assert got.tolist() == x.tolist()

    ranks(program)


@sizes(2)
def test_tags_pick_messages_and_each_tag_keeps_its_order(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        tags = [5, 0, 2**31 - 1, 5, 0, 7]
        if comm.rank == 0:
            for i, tag in enumerate(tags):
                comm.send(i, 1, tag)
            assert comm.recv(1) == "got them"
        else:
            for tag in (7, 0, 2**31 - 1, 5):
                for i in [i for i, other in enumerate(tags) if other == tag]:
                    assert comm.recv(0, tag) == i
            assert comm.iprobe() is None
            comm.send("got them", 0)

    ranks(program)


@sizes(3, 4)
def test_any_source_takes_the_messages_of_all_ranks_each_in_order(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        me, size = comm.rank, comm.size
        lengths = [SMALL] * 20 + [LARGE] + [0] * 5
        if me:
            for i, length in enumerate(lengths):
                comm.send(numbered(i, length), 0, tag=me)
        else:
            received = [0] * size
            status = Status()
            for _ in range(len(lengths) * (size - 1)):
                got = comm.recv(status=status)
                assert status.tag == status.source
                check(got, received[status.source], lengths[received[status.source]])
                received[status.source] += 1
            assert received == [0] + [len(lengths)] * (size - 1)

    ranks(program)


@sizes(2)
def test_what_was_sent_may_be_changed_when_send_returns(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        for nbytes in (10, SMALL, 65_536, LARGE, 5 * MiB):
            for i in range(3):
                if comm.rank == 0:
                    x = numbered(i, nbytes)
                    comm.send(x, 1)
                    x[:] = 255
                else:
                    check(comm.recv(0), i, nbytes)

    ranks(program)


@sizes(2, more=(3,))
@pytest.mark.parametrize("mib", few([8], [32]))
def test_many_mib_go_both_ways_at_once(ranks: Any, mib: int) -> None:
    def program(comm: Comm, mib: int) -> None:
        me, size = comm.rank, comm.size
        x = np.arange(mib * MiB // 8) + me
        right, left = (me + 1) % size, (me - 1) % size
        got = comm.sendrecv(x, right, left, sendtag=me, recvtag=left)
        np.testing.assert_array_equal(got, np.arange(mib * MiB // 8) + left)
        out = np.zeros_like(x)
        assert comm.sendrecv(x, left, right, out=out) is out
        np.testing.assert_array_equal(out, np.arange(mib * MiB // 8) + right)

    ranks(program, mib)


@sizes(1, more=(2,))
def test_a_send_to_oneself_is_always_buffered(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        me = comm.rank
        for i, nbytes in enumerate((0, SMALL, LARGE, 8 * MiB)):
            x = numbered(i, nbytes)
            comm.send(x, me, tag=i)
            x[:] = 255
        comm.send({"an": "object"}, me, tag=9)
        assert comm.recv(me, 9) == {"an": "object"}
        for i, nbytes in reversed(list(enumerate((0, SMALL, LARGE, 8 * MiB)))):
            assert comm.iprobe(me, i) == Status(me, i, nbytes)
            check(comm.recv(tag=i, timeout=0), i, nbytes)
        check(comm.sendrecv(numbered(3, LARGE), me, me), 3, LARGE)
        for i in range(3000):
            comm.send(i, me)
        assert [comm.recv(me) for _ in range(3000)] == list(range(3000))

    ranks(program)


@pytest.mark.parametrize("nbytes", [500, 20_000])
@sizes(3)
def test_a_flood_to_a_rank_that_does_not_receive_stays_bounded_in_memory(
    ranks: Any, nbytes: int
) -> None:
    def program(comm: Comm, nbytes: int) -> None:
        me, count = comm.rank, 0
        before = resident()
        if me == 0:
            with pytest.raises(pycoll.OperationTimeout):  # noqa: PT012  which send waits is open
                while count < 100_000:
                    comm.send(numbered(count % 251, nbytes), 1, timeout=0.3)
                    count += 1
            assert 0 < count * nbytes < 4 * MiB
            comm.send(count, 2)
            comm.send("behind the flood", 1, tag=1, timeout=30)
        elif me == 2:
            count = comm.recv(0)
            comm.send(count, 1)
        else:
            count = comm.recv(2)  # waits in pycoll while the flood comes
            for i in range(count):
                check(comm.recv(0, tag=0), i % 251, nbytes)
            # The one that timed out was taken back; what was sent after it is here.
            assert comm.recv(0) == "behind the flood"
        assert resident() - before < 40 * MiB

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    ranks(program, nbytes)
