"""Ranks that communicate by RDMA: every collective, messages of all kinds, against NumPy.

Each rank draws the arrays of all ranks from one seed, so each knows what must come out. The jobs
stay up from test to test: where these run in emulation, a start takes many seconds.
"""

from __future__ import annotations

import functools
import os
import select
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from rdma_ranks import FOUR, TWO, Array, Comm, check, jobs, pattern

import pycoll
from pycoll._transports.base import CREDIT, EAGER_LIMIT
from pycoll._transports.rdma_lane import FRAGMENT
from pycoll._transports.rdma_queues import SLOT
from pycoll._transports.verbs import INLINE

# Two hosts of two ranks: shared memory inside, RDMA between them.
MIXED = (4, ("--emulate-hosts", "2"))


everywhere = jobs(TWO, FOUR, MIXED)


def draw(seed: int, size: int, count: int) -> list[Array]:
    """The arrays of all ranks: (size, count // size) small whole numbers, added exactly."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 99, (size, count // size)).astype("float64") for _ in range(size)]


def link_names(comm: Comm) -> list[str]:
    """By rank, what carries messages to it."""
    transport = comm._group.engine.transport
    return [transport.link_name(rank) for rank in range(comm.size)]


def calls(comm: Comm, xs: list[Array]) -> Iterator[tuple[str, tuple[Any, ...], Any]]:
    """Yield collective, arguments, and what must come out, from the arrays of all ranks."""
    me, size, x = comm.rank, comm.size, xs[comm.rank]
    root = x.size % size
    total, stack = functools.reduce(np.add, xs), np.stack(xs)
    yield "all_reduce", (x,), total
    yield "reduce", (x, "sum", root), total if me == root else None
    yield "reduce_scatter", (x,), total[me]
    yield "scan", (x,), functools.reduce(np.add, xs[: me + 1])
    yield "exscan", (x,), functools.reduce(np.add, xs[:me]) if me else None
    yield "broadcast", (x if me == root else None, root), xs[root]
    yield "gather", (x, root), stack if me == root else None
    yield "all_gather", (x,), stack
    yield "scatter", (x if me == root else None, root), xs[root][me]
    yield "all_to_all", (x,), stack[:, me]
    yield "barrier", (), None


@everywhere
@pytest.mark.parametrize("nbytes", [0, 256, 100_000, 1_500_000])
def test_every_algorithm_of_every_collective(ranks: Any, nbytes: int) -> None:
    def program(comm: Comm) -> int:
        count = 0
        total = 2 * nbytes // comm.size  # what travels grows with the ranks
        for name, arguments, want in calls(comm, draw(nbytes, comm.size, total // 8)):
            for algorithm in pycoll.algorithms(name):
                if algorithm != "shared_memory":
                    got = getattr(comm, name)(*arguments, algorithm=algorithm)
                    check(got, want, name, algorithm)
                    count += 1
        return count

    assert min(ranks(program)) > 50


@everywhere
@pytest.mark.parametrize("nbytes", [256, 300_000])
def test_all_of_them_at_once(ranks: Any, nbytes: int) -> None:
    """Non-blocking, completed in another order."""

    def program(comm: Comm) -> None:
        started = []
        for name, arguments, want in calls(comm, draw(nbytes + 1, comm.size, nbytes // 8)):
            for algorithm in pycoll.algorithms(name):
                if algorithm != "shared_memory":
                    request = getattr(comm, f"i{name}")(*arguments, algorithm=algorithm)
                    started.append((request, want, name, algorithm))
        for request, want, *where in reversed(started):
            check(request.wait(), want, *where)

    ranks(program)


@everywhere
def test_values_of_other_kinds(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        me, size = comm.rank, comm.size
        # Of different lengths, some of them large.
        lengths = [0, 7, 100_000, 20_000]
        blocks = [np.full(lengths[(r + 1) % 4], r, "int32") for r in range(size)]
        for got, want in zip(comm.all_gatherv(blocks[me]), blocks, strict=True):
            check(got, want)
        table = [
            [np.full(lengths[(r + c) % 4], 10 * r + c) for c in range(size)] for r in range(size)
        ]
        for got, row in zip(comm.all_to_allv(table[me]), table, strict=True):
            check(got, row[me])
        check(comm.scatterv(table[1] if me == 1 else None, root=1), table[1][me])
        counts = lengths[:size]
        whole = np.arange(sum(counts)) + me
        begin = sum(counts[:me])
        want = (size * np.arange(sum(counts)) + sum(range(size)))[begin : begin + counts[me]]
        check(comm.reduce_scatterv(whole, counts), want)
        # Many at once.
        many = [np.full(n, me + 1.0) for n in (0, 1, 1000, 300_000, 10, 50_000)]
        for got, x in zip(comm.all_reduce_many(many), many, strict=True):
            check(got, np.full(x.size, sum(range(size + 1)), "float64"))
        # In place, and not contiguous.
        x = np.full((400, 600), me + 1.0)
        comm.all_reduce(x[:, ::2], out=x[:, 1::2])
        assert (x[:, 1::2] == sum(range(size + 1))).all()
        assert (x[:, ::2] == me + 1).all()
        comm.all_reduce(x, "max", out=x)
        assert x[:, 0].max() == size
        # Objects, with large buffers in them.
        mine = {"rank": me, "arrays": [pattern(me + i, 90_000 * i) for i in range(4)]}
        for rank, theirs in enumerate(comm.all_gather(mine)):
            assert theirs["rank"] == rank
            for i, array in enumerate(theirs["arrays"]):
                check(array, pattern(rank + i, 90_000 * i))
        assert comm.all_reduce({me}, lambda a, b: a | b) == set(range(size))
        assert comm.broadcast("x" * 200_000 if me == 1 else None, root=1) == "x" * 200_000

    ranks(program)


@everywhere
def test_a_persistent_request_starts_again_and_again(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        x, out = np.empty(60_000), np.empty(60_000)
        request = comm.persistent.all_reduce(x, out=out)
        for i in range(20):
            x[:] = comm.rank + i
            assert request.start().wait() is out
            assert (out == sum(range(comm.size)) + i * comm.size).all()

    ranks(program)


@jobs(MIXED)
def test_ranks_of_one_host_share_memory_and_hosts_use_rdma(ranks: Any) -> None:
    def program(comm: Comm) -> list[str]:
        return link_names(comm)

    assert ranks(program) == [
        ["self", "shm", "rdma", "rdma"],
        ["shm", "self", "rdma", "rdma"],
        ["rdma", "rdma", "self", "shm"],
        ["rdma", "rdma", "shm", "self"],
    ]


@jobs(TWO, FOUR)
def test_rdma_that_was_asked_for_connects_all(ranks: Any) -> None:
    def program(comm: Comm) -> set[str]:
        names = link_names(comm)
        assert names.pop(comm.rank) == "self"
        return set(names)

    assert ranks(program) == [{"rdma"}] * ranks.size


@jobs(TWO, MIXED)
def test_messages_of_all_lengths_go_round(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        sizes = [0, 1, 2, 7, 8, 9, 63, 64, 65, 1000, 4095, 4096, 4097, 3 * FRAGMENT + 5]
        # Around what is sent inline and what fits into a frame, with all that goes ahead of it.
        sizes += [*range(INLINE - 100, INLINE + 2, 3), *range(SLOT - 130, SLOT + 2, 3)]
        for limit in (2 * SLOT, 64 * 1024, EAGER_LIMIT, FRAGMENT, 2 * FRAGMENT):
            sizes += [limit - 1, limit, limit + 1]
        for nbytes in sizes:
            got = comm.sendrecv(pattern(nbytes + comm.rank, nbytes), right, left)
            check(got, pattern(nbytes + left, nbytes), nbytes)

    ranks(program)


@jobs(TWO)
def test_lengths_are_kept_apart_one_behind_the_other(ranks: Any) -> None:
    """Many under way at once, both ways, received in another order by tags."""

    def program(comm: Comm) -> None:
        other, rng = 1 - comm.rank, np.random.default_rng(5)
        sizes = [int(10 ** rng.uniform(0, 6.3)) for _ in range(60)]
        sends = [
            comm.isend(pattern(tag + 100 * comm.rank, nbytes), other, tag)
            for tag, nbytes in enumerate(sizes)
        ]
        for tag in rng.permutation(len(sizes)).tolist():
            check(comm.recv(other, tag), pattern(tag + 100 * other, sizes[tag]), tag)
        pycoll.wait_all(sends)

    ranks(program)


@jobs(FOUR)
def test_many_small_messages_keep_their_order(ranks: Any) -> None:
    def program(comm: Comm, count: int) -> None:
        if comm.rank == 0:
            seen = dict.fromkeys(range(1, comm.size), 0)
            status = pycoll.Status(0, 0, 0)
            for _ in range(count * len(seen)):
                got = comm.recv(status=status)
                assert got == seen[status.source], (got, status)
                assert status.tag == got % 7
                seen[status.source] += 1
            assert set(seen.values()) == {count}
        else:
            for number in range(count):
                comm.send(number, 0, tag=number % 7)

    ranks(program, 5000 // (ranks.size - 1))


@jobs(TWO)
def test_large_messages_both_ways_at_once(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        other, nbytes = 1 - comm.rank, 8 * FRAGMENT + 3
        into = [np.zeros(nbytes, np.uint8) for _ in range(3)]
        receives = [comm.irecv(other, tag, out=out) for tag, out in enumerate(into)]
        sends = [comm.isend(pattern(tag, nbytes), other, tag) for tag in range(3)]
        pycoll.wait_all([*sends, *receives])
        for tag, out in enumerate(into):
            check(out, pattern(tag, nbytes))

    ranks(program)


@jobs(TWO)
def test_memory_of_every_kind_is_sent_and_received(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        other = 1 - comm.rank
        data = pattern(1, 400_000)
        frozen = data.copy()
        frozen.flags.writeable = False
        lattice = np.arange(600_000, dtype="int32").reshape(1000, 600)
        arrays = (frozen, data[1:-7], memoryview(data)[100:], lattice[::2, ::3], lattice.T)
        for x in arrays:
            check(comm.sendrecv(x, other, other), np.asarray(x))
        for text in (data.tobytes(), bytearray(data), "é" * 200_000):
            assert comm.sendrecv(text, other, other) == text
        buffers = [pattern(i, 70_000 + i) for i in range(40)] + [pattern(i, i) for i in range(40)]
        for got, want in zip(comm.sendrecv(buffers, other, other), buffers, strict=True):
            check(got, want)
            assert got.flags.writeable
        whole = np.zeros((1000, 600), "int32")
        comm.sendrecv(lattice[:, ::2], other, other, out=whole[:, 1::2])
        check(whole[:, 1::2], lattice[:, ::2])
        assert not whole[:, ::2].any()

    ranks(program)


@jobs(TWO)
def test_who_sends_ahead_is_bounded_and_nothing_is_lost(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        size, count = 50_000, 3 * CREDIT // 50_000
        if comm.rank == 0:
            requests = [comm.isend(pattern(i, size), 1, tag=i) for i in range(count)]
            comm.send(None, 1, tag=count)
            assert not all([request.test() for request in requests])
            pycoll.wait_all(requests)
        else:
            comm.recv(0, tag=count)  # the last: it passes all the others
            for tag in reversed(range(count)):
                check(comm.recv(0, tag), pattern(tag, size))

    ranks(program)


@jobs(TWO)
def test_what_was_sent_arrives_while_its_sender_calls_nothing(ranks: Any) -> None:
    def program(comm: Comm, folder: str) -> None:
        sent, received = f"{folder}/sent", f"{folder}/received"
        if comm.rank == 0:
            for number in range(60):
                comm.send(number, 1)
            # From here on nothing of pycoll's is called: until the receiver has all of them.
            descriptor = os.open(received, os.O_RDONLY | os.O_NONBLOCK)
            with open(sent, "w") as file:
                file.write("all are sent")
            assert select.select([descriptor], [], [], 20.0)[0], "they have not arrived"
            os.close(descriptor)
        else:
            with open(sent) as file:
                assert file.read() == "all are sent"
            assert [comm.recv(0) for _ in range(60)] == [*range(60)]
            with open(received, "w") as file:
                file.write("all are here")

    with tempfile.TemporaryDirectory() as folder:
        for name in "sent", "received":
            os.mkfifo(f"{folder}/{name}")
        ranks(program, folder)
