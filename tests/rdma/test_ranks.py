"""Ranks that communicate by RDMA: every collective, messages of all kinds, against NumPy.

Each rank draws the arrays of all ranks from one seed, so each knows what must come out. The jobs
stay up from test to test: where these run in emulation, a start takes many seconds.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import pycoll
from pycoll._transports.base import CREDIT, EAGER_LIMIT
from pycoll._transports.rdma_lane import SEGMENT
from pycoll._transports.rdma_queues import SLOT
from pycoll._transports.verbs import INLINE

Array = Any
Comm = Any

RDMA = ("--transport", "rdma")
TWO, FOUR = (2, RDMA), (4, RDMA)
# Two hosts of two ranks: shared memory inside, RDMA between them.
MIXED = (4, ("--emulate-hosts", "2"))


def jobs(*worlds: tuple[int, tuple[str, str]]) -> pytest.MarkDecorator:
    """Run a test on such jobs."""
    return pytest.mark.parametrize(
        "ranks", worlds, indirect=True, scope="module", ids=[f"{n}-{way[-1]}" for n, way in worlds]
    )


everywhere = jobs(TWO, FOUR, MIXED)


def draw(seed: int, size: int, count: int) -> list[Array]:
    """The arrays of all ranks: (size, count // size) small whole numbers, added exactly."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 99, (size, count // size)).astype("float64") for _ in range(size)]


def pattern(seed: int, nbytes: int) -> Array:
    """Bytes that differ from place to place and from seed to seed."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def device_of(comm: Comm) -> Any:
    """This rank's RDMA transport."""
    outside = comm._group.engine.transport.outside.peers.values()
    return next(transport for transport in outside if transport.name == "rdma")


def link_names(comm: Comm) -> list[str]:
    """By rank, what carries messages to it."""
    transport = comm._group.engine.transport
    return [transport.link_name(rank) for rank in range(comm.size)]


# --- collectives -------------------------------------------------------------------------------


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


def check(got: Any, want: Any, *where: object) -> None:
    if want is None:
        assert got is None, where
    else:
        np.testing.assert_array_equal(got, want, str(where))


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


# --- messages ----------------------------------------------------------------------------------


@jobs(TWO, MIXED)
def test_messages_of_all_lengths_go_round(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        sizes = [0, 1, 2, 7, 8, 9, 63, 64, 65, 1000, 4095, 4096, 4097, 3 * SEGMENT + 5]
        # Around what is sent inline and what fits into a frame, with all that goes ahead of it.
        sizes += [*range(INLINE - 100, INLINE + 2, 3), *range(SLOT - 130, SLOT + 2, 3)]
        for limit in (2 * SLOT, 64 * 1024, EAGER_LIMIT, SEGMENT, 2 * SEGMENT):
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
        other, nbytes = 1 - comm.rank, 8 * SEGMENT + 3
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


# --- giving up ---------------------------------------------------------------------------------


LONG = 40 * SEGMENT
"""Bytes of a message of which a sender that is stopped at the first has not posted all."""


def give_up_half_way(out: Array, sender: int, call: Callable[..., Any], *args: Any) -> Array:
    """Stop the sender when the first bytes are in `out`; `call`, which fills it, must time out.

    Returns places of `out`, one of each write and more, which must not change any more.
    """

    def stop() -> None:
        while not out[0]:
            pass
        os.kill(sender, signal.SIGSTOP)

    watching = threading.Thread(target=stop)
    watching.start()
    with pytest.raises(pycoll.OperationTimeout):
        call(*args, timeout=3.0)
    before = out[:: SEGMENT // 4].copy()
    watching.join()
    assert before[0]
    assert not before[-1]
    os.kill(sender, signal.SIGCONT)
    return before


@jobs(TWO)
def test_a_receive_that_gives_up_half_way_leaves_its_memory_alone(ranks: Any) -> None:
    """And the message is there for the next."""

    def program(comm: Comm) -> None:
        if comm.rank == 0:
            comm.send(os.getpid(), 1)
            x = np.full(LONG, 7, np.uint8)
            for _ in range(2):
                comm.send(x, 1, tag=1)
                assert comm.recv(1) == "go on"
            return
        sender = comm.recv(0)
        for _ in range(2):
            out = np.zeros(LONG, np.uint8)
            before = give_up_half_way(out, sender, comm.recv, 0, 1, out)
            again = comm.recv(0, tag=1)
            assert again.nbytes == LONG
            assert (again == 7).all()
            check(out[:: SEGMENT // 4], before)
            comm.send("go on", 0)

    ranks(program)


@jobs(TWO)
def test_a_collective_that_gives_up_half_way_leaves_its_memory_alone(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        broken, out = comm.dup(), np.zeros(LONG, np.uint8)
        before = np.empty(0)
        if comm.rank == 0:
            comm.send(os.getpid(), 1)
            with contextlib.suppress(pycoll.Error):  # its part may be done before it hears of that
                broken.broadcast(np.full(LONG, 7, np.uint8), 0)
            with pytest.raises(pycoll.Error):
                broken.barrier()
        else:
            before = give_up_half_way(out, comm.recv(0), broken.broadcast, out, 0)
        large = pattern(comm.rank, 3 * SEGMENT)
        check(comm.sendrecv(large, 1 - comm.rank), pattern(1 - comm.rank, 3 * SEGMENT))
        check(out[:: SEGMENT // 4][: before.size], before)

    ranks(program)


@jobs(TWO)
def test_timeouts_before_anything_moves_leave_the_link_in_order(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        other, large = 1 - comm.rank, pattern(3, 2 * SEGMENT)
        for _ in range(5):
            if comm.rank == 0:
                with pytest.raises(pycoll.OperationTimeout):
                    comm.send(large, 1, tag=1, timeout=0.1)  # nobody receives it
                comm.send("over", 1, tag=2)
            else:
                with pytest.raises(pycoll.OperationTimeout):
                    comm.recv(0, tag=9, timeout=0.1)
                assert comm.recv(0, tag=2) == "over"
                assert comm.iprobe(0, tag=1) is None
            check(comm.sendrecv(large, other, other), large)

    ranks(program)


# --- registered memory -------------------------------------------------------------------------


def regions_of_this_process() -> int:
    """How many the kernel knows."""
    said = subprocess.run(
        ["rdma", "-j", "resource", "show", "mr"], check=True, capture_output=True, text=True
    ).stdout
    return sum(region.get("pid") == os.getpid() for region in json.loads(said or "[]"))


def resident_nbytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@jobs(TWO)
def test_an_array_that_is_sent_again_is_registered_once(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        registrations = device_of(comm).endpoint.registrations
        x, out = np.full(40_000, comm.rank), np.empty(40_000, int)
        regions = set()
        for _ in range(100):
            if comm.rank == 0:
                comm.send(x, 1)
                regions.add(registrations._entries[id(x)].region)
            else:
                comm.recv(0, out=out)
        assert len(regions) == (comm.rank == 0)
        assert comm.rank == 0 or not out.any()

    ranks(program)


@jobs(TWO)
def test_an_array_that_is_received_into_again_is_registered_once(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        registrations, made = device_of(comm).endpoint.registrations, []
        x, out = np.full(40_000, comm.rank), np.empty(40_000, int)
        rows = np.empty((2, 40_000), int)
        register = registrations._register

        def counted(*args: Any) -> Any:
            made.append(args)
            return register(*args)

        for number in range(100):
            if number == 5:
                registrations._register = counted
            if comm.rank == 0:
                comm.send(x, 1)
            else:
                comm.recv(0, out=out)
            comm.all_gather(x, out=rows, algorithm="linear")
            assert (rows[0] == 0).all()
            assert (rows[1] == 1).all()
        assert not made, len(made)
        registrations._register = register

    ranks(program)


@jobs(TWO)
def test_an_array_that_is_reduced_again_is_registered_once(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        registrations = device_of(comm).endpoint.registrations
        x, out = np.ones(40_000), np.empty(40_000)
        comm.all_reduce(x, out=out)
        region, register, made = registrations._entries[id(x)].region, registrations._register, []

        def counted(*args: Any) -> Any:
            made.append(args)
            return register(*args)

        registrations._register = counted
        try:
            for _ in range(300):
                comm.all_reduce(x, out=out)
        finally:
            registrations._register = register
        assert (out == comm.size).all()
        assert not made
        assert registrations._entries[id(x)].region is region

    ranks(program)


@jobs(TWO)
def test_arrays_that_are_gone_leave_no_registration_behind(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        other, registrations = 1 - comm.rank, device_of(comm).endpoint.registrations
        # Some of them in places where others were before, some in fresh pages.
        sizes = (70_000, 100_000, 300_000)

        def exchange(count: int) -> None:
            for i in range(count):
                x = np.full(sizes[i % 3], i % 251, np.uint8)
                got = comm.sendrecv(x, other, other)
                assert got.size == x.size
                assert (got == i % 251).all(), i

        exchange(600)  # malloc's memory grows for a while
        before = len(registrations), regions_of_this_process(), resident_nbytes()
        assert before[1] > 0
        exchange(600)
        after = len(registrations), regions_of_this_process(), resident_nbytes()
        # Fewer, if something of an earlier program of these ranks was let go meanwhile.
        assert after[0] <= before[0], (before, after)
        assert after[1] <= before[1], (before, after)
        assert after[2] < before[2] + (8 << 20)

    ranks(program)
