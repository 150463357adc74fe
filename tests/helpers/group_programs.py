"""Programs for any number of ranks, of communicators made by split, split_by_host, dup and sub."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from p2p_cases import in_threads

import pycoll
from pycoll import ANY_SOURCE, ANY_TAG

Comm = Any
LEAST, MOST = -(2**63), 2**63 - 1

# --- who is in it ------------------------------------------------------------------------------


def split_makes_groups_of_one_color_in_the_order_of_keys_then_ranks(comm: Comm) -> None:
    rng = np.random.default_rng(5)
    for _ in range(30):
        colors = rng.choice([None, 0, -1, 7, LEAST, MOST], comm.size).tolist()
        keys = rng.choice([None, 0, 1, -5, LEAST, MOST], comm.size).tolist()
        made = comm.split(colors[comm.rank], keys[comm.rank])
        if colors[comm.rank] is None:
            assert made is None
            continue
        ours = [rank for rank in range(comm.size) if colors[rank] == colors[comm.rank]]
        ours.sort(key=lambda rank: (rank if keys[rank] is None else keys[rank], rank))
        assert type(made) is pycoll.Communicator
        assert (made.rank, made.size) == (ours.index(comm.rank), len(ours))
        assert made.all_gather(comm.rank) == ours
        made.close()


def split_refuses_what_is_no_64_bit_int_and_the_call_does_not_count(comm: Comm) -> None:
    for args in (MOST + 1,), (LEAST - 1,), (0, MOST + 1), (0, LEAST - 1):
        with pytest.raises(ValueError, match="64 bits"):
            comm.split(*args)
    for args in ("red",), (1.0,), (True,), (0, "first"), (0, 1.5):
        with pytest.raises(TypeError, match=r"(color|key) is an int"):
            comm.split(*args)
    # Only one rank has to try twice.
    if comm.rank == 0:
        with pytest.raises(ValueError, match="64 bits"):
            comm.split(1 << 64)
    with comm.split(np.int32(3), np.uint8(0)) as made:
        assert made.all_reduce(1) == comm.size


def split_by_host_makes_a_group_of_the_ranks_of_each_host(comm: Comm) -> None:
    nodes = comm.all_gather(comm.node)
    with comm.split_by_host() as host:
        assert [host.rank, host.size] == [comm.local_rank, comm.local_size]
        neighbors = [rank for rank, node in enumerate(nodes) if node == comm.node]
        assert host.all_gather(comm.rank) == neighbors
        assert set(host.all_gather(comm.node)) == {comm.node}


def sub_has_the_ranks_given_in_the_order_given_and_others_get_none(comm: Comm) -> None:
    rng = np.random.default_rng(6)
    for count in range(1, comm.size + 1):
        listed = rng.permutation(comm.size)[:count]
        for ranks in listed, listed.tolist(), tuple(listed), iter(listed):
            made = comm.sub(ranks)
            if comm.rank not in listed:
                assert made is None
                continue
            assert type(made) is pycoll.Communicator
            assert made.all_gather(comm.rank) == listed.tolist()
            made.close()
        # Those who are not in it need not call.
        if comm.rank in listed:
            assert comm.sub(listed).all_reduce(1) == count


def sub_refuses_what_is_no_list_of_ranks(comm: Comm) -> None:
    size = comm.size
    for ranks, message in (
        ([], "empty"),
        ([size], f"0 to {size - 1}"),
        ([0, -1], f"0 to {size - 1}"),
        ([0, 0], "0 2 times"),
    ):
        with pytest.raises(ValueError, match=message):
            comm.sub(ranks)
    for ranks in 0, None, "0", [0.0], [None], [True]:
        with pytest.raises(TypeError, match=r"ranks is a list|an int, not"):
            comm.sub(ranks)


def sub_needs_no_message(comm: Comm) -> None:
    # The first has made it, used it and given it up before the last begins to make it.
    ends = [0, comm.size - 1] if comm.size > 1 else [0]
    for i in range(3):
        if comm.rank == 0:
            with comm.sub(ends) as made:
                made.send(("early", i), made.size - 1)
                comm.send("go", ends[-1], tag=i)
                if made.size == 1:
                    assert made.recv() == ("early", i)
        if comm.rank == ends[-1]:
            assert comm.recv(0, tag=i) == "go"
            if comm.size > 1:
                with comm.sub(ends) as made:
                    assert made.recv() == ("early", i)


def sub_of_other_order_or_made_again_is_another_communicator(comm: Comm) -> None:
    forward, backward = list(range(comm.size)), list(reversed(range(comm.size)))
    made = [comm.sub(forward), comm.sub(backward), comm.sub(forward), comm.dup()]
    idents = [each._group.context.ident for each in made]
    assert len(set(idents)) == len(idents)
    assert comm.all_gather(idents) == [idents] * comm.size
    for i, each in enumerate(made):
        each.send(i, each.rank, tag=1)
    for i, each in reversed(list(enumerate(made))):
        assert each.recv(ANY_SOURCE, ANY_TAG) == i
        assert each.iprobe() is None


def communicators_are_made_of_those_that_were_made(comm: Comm) -> None:
    halves = comm.split(comm.rank % 2, -comm.rank)
    ours = [rank for rank in reversed(range(comm.size)) if rank % 2 == comm.rank % 2]
    assert halves.all_gather(comm.rank) == ours
    again = halves.dup().sub(range(halves.size)).grid((halves.size,)).axis(0).split(3)
    assert again.all_gather(comm.rank) == ours
    assert again.broadcast(comm.rank if again.rank == 0 else None) == ours[0]


# --- their messages never meet -----------------------------------------------------------------


def messages_of_one_are_never_received_on_another(comm: Comm) -> None:
    me, size = comm.rank, comm.size
    grid = comm.grid((size, 1))
    everybody = range(size)
    comms = [comm, comm.dup(), comm.split(0), comm.sub(everybody), comm.sub(everybody), grid]
    comms += [grid.axis(0), grid.axis(0, 1), comm.split_by_host()]
    # All of it is under way at once, and sent and received in different orders.
    for which in np.random.default_rng(me).permutation(len(comms)):
        c = comms[which]
        for i in range(3):
            c.send((which, i), (c.rank + 1) % c.size, tag=i)
    for which in np.random.default_rng(size + me).permutation(len(comms)):
        c = comms[which]
        got = [c.recv(ANY_SOURCE, ANY_TAG) for _ in range(3)]
        assert got == [(which, i) for i in range(3)]
        assert c.iprobe() is None


def collectives_of_overlapping_groups_run_in_threads_at_once(comm: Comm) -> None:
    me, size = comm.rank, comm.size
    groups = [
        comm.sub(range(size)),
        comm.sub(range(max(1, size - 1))),
        comm.sub(range(size // 2, size)),
        comm.split(me % 2),
        comm.grid((size, 1)).axis(0),
    ]

    def work(which: int) -> None:
        c = groups[which]
        if c is None:
            return
        for i in range(25):
            x = np.full((3, 60_000)[i % 8 == 7], float(i + which))
            assert (c.all_reduce(x) == c.size * (i + which)).all()
            assert c.all_gather((which, i)) == [(which, i)] * c.size
            got = c.sendrecv((which, i), (c.rank + 1) % c.size, ANY_SOURCE, 5, ANY_TAG)
            assert got == (which, i)

    # Each thread has every second group, and goes through them in its own order.
    order = np.random.default_rng(me).permutation(len(groups)).tolist()
    in_threads(*[lambda which=which: work(which) for which in order])


def disjoint_groups_make_different_calls_in_different_numbers(comm: Comm) -> None:
    half = comm.split(comm.rank % 2)
    if comm.rank % 2:
        for i in range(10):
            assert half.all_gather(i) == [i] * half.size
    else:
        for _ in range(25):
            half.barrier()
        assert half.all_reduce(2.5) == 2.5 * half.size
    assert comm.all_reduce(1) == comm.size


# --- closing -----------------------------------------------------------------------------------


def what_was_made_outlives_what_it_was_made_of(comm: Comm) -> None:
    first = comm.dup()
    second = first.sub(range(first.size))
    grid = second.grid((comm.size,))
    first.close()
    second.close()
    line = grid.axis(0)
    for c in grid, line, line.dup():
        assert c.all_reduce(1) == comm.size
        assert c.sendrecv(c.rank, (c.rank + 1) % c.size, ANY_SOURCE) == (c.rank - 1) % c.size


def a_closed_one_says_so_and_may_be_closed_again(comm: Comm) -> None:
    grid = comm.grid((comm.size,), ["x"])
    made = [comm.dup(), comm.split(0), comm.sub([comm.rank]), comm.split_by_host(), grid]
    made += [grid.axis("x"), grid.dup()]
    for c in made:
        c.close()
        c.close()
        with c:
            pass
        for call in (
            c.barrier,
            c.dup,
            lambda c=c: c.split(0),
            lambda c=c: c.split_by_host(),
            lambda c=c: c.sub([0]),
            lambda c=c: c.grid([c.size]),
            lambda c=c: c.send(1, 0),
            lambda c=c: c.recv(0),
            lambda c=c: c.all_reduce(np.ones(3)),
        ):
            with pytest.raises(pycoll.Error, match="closed"):
                call()
    with pytest.raises(pycoll.Error, match="closed"):
        grid.axis("x")
    assert comm.all_reduce(1) == comm.size


def closing_loses_nothing_that_was_sent_and_keeps_nothing_that_was_not_received(
    comm: Comm,
) -> None:
    me, size = comm.rank, comm.size
    right, left = (me + 1) % size, (me - 1) % size
    for i in range(20):
        # One end closes as soon as it has sent.
        one = comm.dup()
        one.send(np.full(5000, i), right, tag=2)
        if me % 2:
            assert (one.recv(left, tag=2) == i).all()
        one.close() if me % 2 else None
        comm.barrier()
        if me % 2 == 0:
            assert (one.recv(left, tag=2) == i).all()
            one.close()
        # Nobody ever asks for this.
        two = comm.dup()
        two.send(np.full(5000, i), right)
        two.close()
    assert comm.all_reduce(1) == size


def a_sender_that_waits_goes_on_when_its_receiver_closes(comm: Comm) -> None:
    made, large = comm.dup(), np.ones(300_000)
    if comm.size > 1:
        if comm.rank == 0:
            made.send(large, 1)
        elif comm.rank == 1:
            assert made.probe(0).nbytes == large.nbytes
    made.close()
    assert comm.all_reduce(1) == comm.size


def what_is_pending_on_a_closed_one_ends(comm: Comm) -> None:
    made = comm.grid([comm.size])
    line = made.axis(0)
    requests = [made.irecv(tag=1), line.irecv(tag=1), made.persistent.recv(tag=2).start()]
    if comm.size > 1 and comm.rank == 0:
        requests.append(line.iall_reduce(np.ones(100_000)))  # the others never join in
        requests.append(made.isend(np.ones(1 << 20), 1))
    assert not any(request.test() for request in requests)
    if comm.rank == 0:
        made.close()
    comm.barrier()  # the others later: a sender goes on when its receiver closes
    made.close()
    for request in requests:
        for _ in range(2):
            with pytest.raises(pycoll.Error, match="closed"):
                request.wait()
    assert comm.all_reduce(1) == comm.size


def a_sub_works_where_its_parent_is_broken(comm: Comm) -> None:
    with comm.dup() as broken, comm.dup() as other:
        if comm.size > 1:
            with pytest.raises(pycoll.Error):
                broken.barrier() if comm.rank == 0 else broken.all_gather(1)
            with pytest.raises(pycoll.Error):
                broken.split(0)
        with broken.sub(range(comm.size)) as made:
            assert made.all_reduce(1) == comm.size
        assert other.all_reduce(1) == comm.size
