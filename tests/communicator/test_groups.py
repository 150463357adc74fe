"""Communicators made of others: split, split_by_host, dup, sub and grid.

`PROGRAMS` hold on every number of ranks, and wherever these are: they run in shared memory, over
tcp, and between emulated hosts.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
from tiers import exhaustive, sizes

import pycoll
from pycoll import ANY_SOURCE, ANY_TAG, PROC_NULL
from pycoll._communicator.grid import Layout, check_layout
from pycoll._support import pickling

Comm = Any
LEAST, MOST = -(2**63), 2**63 - 1


def in_threads(*functions: Callable[[], object]) -> None:
    """Run them at once; raise what the first of them raised."""
    errors: list[BaseException] = []

    def run(function: Callable[[], object]) -> None:
        try:
            function()
        except BaseException as exc:
            errors.append(exc)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def shapes_of(size: int) -> list[tuple[int, ...]]:
    """All shapes of up to three axes that hold so many ranks."""
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    triples = itertools.product(divisors, divisors, divisors)
    shapes = {triple[:count] for triple in triples for count in (1, 2, 3)}
    return sorted(shape for shape in shapes if math.prod(shape) == size)


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


# --- grids -------------------------------------------------------------------------------------


def grid_places_ranks_in_row_major_order(comm: Comm) -> None:
    for shape in shapes_of(comm.size):
        places = np.arange(comm.size).reshape(shape)
        with comm.grid(shape, periodic=True) as grid:
            assert isinstance(grid, pycoll.Communicator)
            assert (grid.rank, grid.size) == (comm.rank, comm.size)
            assert (grid.shape, grid.names) == (shape, ())
            assert grid.periodic == (True,) * len(shape)
            assert places[grid.coords] == comm.rank
            for rank in range(comm.size):
                coords = grid.coords_of(rank)
                assert places[coords] == rank == grid.rank_at(coords)
                around = [c - 3 * length for c, length in zip(coords, shape, strict=True)]
                assert grid.rank_at(around) == rank
            assert grid.all_gather(grid.coords) == list(np.ndindex(*shape))


def lines_of_a_grid_differ_in_their_axes_only(comm: Comm) -> None:
    for shape in shapes_of(comm.size):
        names = ("dp", "pp", "tp")[: len(shape)]
        places = np.arange(comm.size).reshape(shape)
        grid = comm.grid(shape, names=names, periodic=[True, False, True][: len(shape)])
        subsets = [
            axes
            for count in range(len(shape) + 1)
            for axes in itertools.combinations(range(len(shape)), count)
        ]
        # In another order on each rank: no message is needed.
        for i in np.random.default_rng(comm.rank).permutation(len(subsets)):
            axes = subsets[i]
            line = grid.axis(*axes)
            assert grid.axis(*reversed([names[axis] for axis in axes])) is line
            assert grid.axis(*[axis - len(shape) for axis in axes]) is line
        for axes in subsets:
            line = grid.axis(*axes)
            index = tuple(slice(None) if a in axes else c for a, c in enumerate(grid.coords))
            assert line.all_gather(comm.rank) == places[index].ravel().tolist()
            assert line.shape == tuple(shape[axis] for axis in axes)
            assert line.names == tuple(names[axis] for axis in axes)
            assert line.periodic == tuple(grid.periodic[axis] for axis in axes)
            assert line.coords == tuple(grid.coords[axis] for axis in axes)
            if axes:
                assert line.axis(names[axes[0]]).all_reduce(1) == shape[axes[0]]
        lines = [grid.axis(*axes) for axes in subsets]
        grid.close()
        for line in lines:
            with pytest.raises(pycoll.Error, match="closed"):
                line.barrier()
            with pytest.raises(pycoll.Error, match="closed"):
                grid.axis(0)


def neighbors_of_a_grid_exchange_what_shift_says(comm: Comm) -> None:
    size = comm.size
    for periodic in False, True:
        with comm.grid([size], names=["x"], periodic=periodic) as grid:
            for n in range(-size - 2, size + 3):
                source, dest = grid.shift("x", n)
                got = grid.sendrecv(comm.rank, dest, source)
                expected = comm.rank - n
                if periodic:
                    assert got == expected % size
                elif 0 <= expected < size:
                    assert got == expected
                else:
                    assert (source, got) == (PROC_NULL, None)


def a_dup_of_a_grid_is_a_grid_like_it(comm: Comm) -> None:
    with comm.grid((1, comm.size), ("a", "b"), (True, False)) as grid, grid.dup() as twin:
        assert type(twin) is type(grid)
        assert (twin.shape, twin.names, twin.periodic, twin.coords) == (
            grid.shape,
            grid.names,
            grid.periodic,
            grid.coords,
        )
        twin.send("on the twin", twin.rank)
        assert grid.iprobe() is None
        assert twin.recv() == "on the twin"
        assert twin.axis("b") is not grid.axis("b")
        assert twin.axis("b").all_reduce(1) == comm.size


def a_grid_says_where_one_is(comm: Comm) -> None:
    grid = comm.grid((comm.size, 1), names=("dp", "tp"))
    assert repr(grid) == (
        f"<pycoll.Grid shape=({comm.size}, 1), names=('dp', 'tp'), coords=({comm.rank}, 0), "
        f"rank {comm.rank} of {comm.size}>"
    )
    grid.close()
    assert "closed" in repr(grid)
    assert "names" not in repr(comm.grid([comm.size]))


def grid_refuses_what_does_not_fit_and_the_call_does_not_count(comm: Comm) -> None:
    size = comm.size
    for shape in (size + 1,), (size, 2), (0,), (-1, -size), (size, 0):
        with pytest.raises(ValueError, match=rf"{math.prod(shape)} ranks.* {size}: "):
            comm.grid(shape)
    for kwargs, message in (
        ({"names": ["a"]}, r"\('a',\).* 2 names"),
        ({"names": ["a", "a"]}, r"\('a', 'a'\).* another"),
        ({"periodic": [True]}, "1 bools.* 2 axes"),
    ):
        with pytest.raises(ValueError, match=message):
            comm.grid((size, 1), **kwargs)
    for args in (size,), ("1",), ((size, 1.0),), ((size, 1), "ab"), ((size, 1), (0, 1)):
        with pytest.raises(TypeError):
            comm.grid(*args)
    for periodic in "no", None, [False, "no"], [0, 1]:
        with pytest.raises(TypeError, match="periodic is a"):
            comm.grid((size, 1), periodic=periodic)
    with comm.grid((size, 1), names=("dp", "tp")) as grid:
        for call in grid.axis, grid.shift:
            with pytest.raises(ValueError, match="no axis 'pp'; it has 'dp', 'tp'"):
                call("pp")
            for index in 2, -3:
                with pytest.raises(ValueError, match=f"no axis {index}; it has 'dp', 'tp'"):
                    call(index)
            with pytest.raises(TypeError, match="an axis"):
                call(None)
        with pytest.raises(ValueError, match="twice"):
            grid.axis("dp", 0)
        with pytest.raises(TypeError, match="n is an int"):
            grid.shift("dp", 0.5)
        for coords in (0,), (0, 0, 0), (0, 1), (size, 0), (-1, 0):
            with pytest.raises(ValueError, match=r"2 axes|coordinates are 0 to"):
                grid.rank_at(coords)
        for rank in -1, size:
            with pytest.raises(ValueError, match=f"0 to {size - 1}"):
                grid.coords_of(rank)
        assert grid.all_reduce(1) == size
    with comm.grid([size]) as grid, pytest.raises(ValueError, match="1, without names"):
        grid.axis("dp")


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


PROGRAMS = [
    split_makes_groups_of_one_color_in_the_order_of_keys_then_ranks,
    split_refuses_what_is_no_64_bit_int_and_the_call_does_not_count,
    split_by_host_makes_a_group_of_the_ranks_of_each_host,
    sub_has_the_ranks_given_in_the_order_given_and_others_get_none,
    sub_refuses_what_is_no_list_of_ranks,
    sub_needs_no_message,
    sub_of_other_order_or_made_again_is_another_communicator,
    communicators_are_made_of_those_that_were_made,
    grid_places_ranks_in_row_major_order,
    lines_of_a_grid_differ_in_their_axes_only,
    neighbors_of_a_grid_exchange_what_shift_says,
    a_dup_of_a_grid_is_a_grid_like_it,
    a_grid_says_where_one_is,
    grid_refuses_what_does_not_fit_and_the_call_does_not_count,
    messages_of_one_are_never_received_on_another,
    collectives_of_overlapping_groups_run_in_threads_at_once,
    disjoint_groups_make_different_calls_in_different_numbers,
    what_was_made_outlives_what_it_was_made_of,
    a_closed_one_says_so_and_may_be_closed_again,
    closing_loses_nothing_that_was_sent_and_keeps_nothing_that_was_not_received,
    a_sender_that_waits_goes_on_when_its_receiver_closes,
    what_is_pending_on_a_closed_one_ends,
    a_sub_works_where_its_parent_is_broken,
]


@sizes(1, 2, 6)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_on_one_host(ranks: Any, program: Callable[[Comm], None]) -> None:
    ranks(program)


def run_all(job: Any, n: int, programs: list[Callable[[Comm], None]], *options: str) -> Any:
    """Run programs in one job, each with a communicator of its own."""
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)  # its name means nothing to the ranks
    try:
        (job.folder / "programs").write_bytes(pickling.dumps(programs))
    finally:
        cloudpickle.unregister_pickle_by_value(module)
    return job(
        n,
        """
import pickle
for program in pickle.loads(open(sys.argv[1] + "/programs", "rb").read()):
    with comm.dup() as own:
        program(own)
ok()
""",
        *options,
    )


@pytest.mark.parametrize(
    ("n", "options"),
    [
        pytest.param(2, ("--transport", "tcp"), marks=exhaustive),
        pytest.param(4, ("--transport", "tcp"), marks=exhaustive),
        pytest.param(4, ("--emulate-hosts", "2"), marks=exhaustive),
        (5, ("--emulate-hosts", "3")),
    ],
    ids=lambda value: "_".join(value).strip("-") if isinstance(value, tuple) else str(value),
)
def test_elsewhere(job: Any, n: int, options: tuple[str, ...]) -> None:
    done = run_all(job, n, PROGRAMS, *options, "--op-timeout", "20")
    assert (done.status, done.content) == (0, list(range(n))), done.stderr


# --- arithmetic --------------------------------------------------------------------------------


@pytest.mark.parametrize("periodic", list(itertools.product([False, True], repeat=3)))
def test_shift_moves_as_roll_does_and_stops_at_open_edges(periodic: tuple[bool, ...]) -> None:
    shape = (2, 3, 4)
    layout = check_layout(shape, None, periodic, 24)
    places = np.arange(24).reshape(shape)
    for axis, n in itertools.product(range(3), range(-9, 10)):
        rolled = np.roll(places, n, axis)  # at each place the rank whose data comes there
        for coords in np.ndindex(*shape):
            rank, source = int(places[coords]), layout.neighbor(int(places[coords]), axis, -n)
            assert layout.coords_of(rank) == coords
            if periodic[axis] or 0 <= coords[axis] - n < shape[axis]:
                assert source == rolled[coords]
                assert layout.neighbor(source, axis, n) == rank
            else:
                assert source == PROC_NULL


def test_a_grid_may_be_large_or_have_no_axes() -> None:
    layout = check_layout((16, 16, 16), ("x", "y", "z"), True, 4096)
    assert layout.coords_of(4095) == (15, 15, 15)
    assert layout.line(17, [1]) == [1 + 16 * y for y in range(16)]
    assert layout.of_axes([0, 2]) == Layout((16, 16), ("x", "z"), (True, True))
    point = check_layout((), None, False, 1)
    assert (point.coords_of(0), point.rank_at(()), point.line(0, [])) == ((), 0, [0])


# --- ranks that disagree, or fail --------------------------------------------------------------


@sizes(2, 4)
def test_ranks_that_make_different_communicators_hear_of_both_calls(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        size = comm.size
        for first, other in (
            (lambda c: c.grid((size, 1)), lambda c: c.grid((1, size))),
            (lambda c: c.grid([size], ["a"]), lambda c: c.grid([size], ["b"])),
            (lambda c: c.grid([size]), lambda c: c.grid([size], periodic=True)),
            (lambda c: c.grid([size]), lambda c: c.dup()),
            (lambda c: c.split(0), lambda c: c.split_by_host()),
            (lambda c: c.dup(), lambda c: c.all_gather(np.zeros(32, "u1"))),
        ):
            with comm.dup() as broken:
                with pytest.raises(pycoll.MismatchError, match="different calls") as caught:
                    (first if broken.rank == 0 else other)(broken)
                with pytest.raises(pycoll.MismatchError):
                    broken.dup()
                text = str(caught.value)
                assert "rank 0: " in text
                assert comm.all_reduce(1) == size

    ranks(program)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_rank_that_fails_fails_what_it_is_in_and_nothing_else(job: Any, transport: str) -> None:
    done = job(
        4,
        """
grid = comm.grid((2, 2), names=("y", "x"))
mine, others = grid.axis("x"), comm.sub([2, 0])
pairs = comm.split(rank % 2)
if rank == 3:
    await_table((0, "split"), (1, "split"), (2, "split"))
    os.kill(os.getpid(), signal.SIGKILL)
peer_failed(3, SIGKILL, comm.split, 0, within=60)
for call, *args in (
    (comm.split, 0), (comm.dup,), (comm.split_by_host,), (comm.grid, [4]), (grid.barrier,),
):
    peer_failed(3, SIGKILL, call, *args)
# Made of a broken one: it works without the lost rank, and says so with it.
peer_failed(3, SIGKILL, comm.sub([3, rank]).barrier)
peer_failed(3, SIGKILL, grid.axis("y", "x").barrier)
living = comm.sub([2, 1, 0])
assert living.all_gather(rank) == [2, 1, 0]
if rank < 2:
    assert mine.all_reduce(1) == 2
else:
    peer_failed(3, SIGKILL, mine.all_reduce, 1)
if rank in (0, 2):
    assert others.all_reduce(1) == pairs.all_reduce(1) == 2
else:
    assert others is None
    peer_failed(3, SIGKILL, pairs.all_reduce, 1)
assert living.split(rank % 2).all_reduce(1) == (1 if rank == 1 else 2)
living.barrier()
ok()
""",
        "--transport",
        transport,
    )
    assert done.status == 137
    assert done.content == [0, 1, 2], done.stderr


# --- a thousand of them ------------------------------------------------------------------------


class Usage:
    """What this process holds, and the memory that its host shares."""

    def __init__(self, comm: Comm) -> None:
        status = Path("/proc/self/status").read_text()
        self.memory = int(status.split("RssAnon:")[1].split()[0]) * 1024
        self.descriptors = len(os.listdir("/proc/self/fd"))
        self.mappings = len(Path("/proc/self/maps").read_text().splitlines())
        self.contexts = len(comm._group.engine.contexts)
        self.shared = 0
        for descriptor in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # that of the listing
                if "memfd:" in os.readlink(f"/proc/self/fd/{descriptor}"):
                    self.shared += os.stat(f"/proc/self/fd/{descriptor}").st_blocks * 512

    def check(self, before: Usage) -> None:
        """Nothing has grown since by as much as a few communicators take."""
        assert self.contexts == before.contexts
        assert self.descriptors <= before.descriptors
        assert self.mappings <= before.mappings + 5  # of malloc's
        assert self.memory <= before.memory + (4 << 20)
        assert self.shared <= before.shared + (8 << 20)  # rings fill up as they go round


def make_some(comm: Comm, count: int) -> None:
    """Make `count` times six communicators of all ranks, use them, and give them up."""
    everybody, left, right = range(comm.size), comm.rank - 1, comm.rank + 1
    for i in range(count):
        with (
            comm.split(0) as a,
            comm.dup() as b,
            comm.sub(everybody) as c,
            comm.split_by_host() as d,
            comm.grid((comm.size, 1)) as grid,
        ):
            for made in a, b, c, d, grid, grid.axis(0):
                x = made.all_reduce(np.ones(4))
                assert (x == made.size).all()
                got = made.sendrecv(x, right % made.size, left % made.size)
                assert (got == x).all()
            if i % 20 == 0:  # takes long: the ranks try ways to do it
                assert grid.all_reduce(np.ones(5000))[0] == comm.size
            b.send("never received", b.rank)
    comm.barrier()


def a_thousand_come_and_go_and_nothing_grows(comm: Comm) -> None:
    comm.all_to_all(np.ones((comm.size, 1)))  # all links that there may be
    make_some(comm, 21)
    before = Usage(comm)
    make_some(comm, 170)
    Usage(comm).check(before)


def three_hundred_are_open_at_once(comm: Comm) -> None:
    comm.barrier()  # it may need communicators of its own
    before = Usage(comm)
    made = [
        make()
        for _ in range(75)
        for make in (
            comm.dup,
            lambda: comm.split(0),
            lambda: comm.sub(range(comm.size)),
            lambda: comm.grid([comm.size]),
        )
    ]
    for c in made:
        c.send(id(c), c.rank)
    for c in reversed(made):
        assert c.all_reduce(1) == comm.size
    for c in made:
        assert c.recv() == id(c)
        assert c.iprobe() is None
    for c in made:
        c.close()
    comm.barrier()
    after = Usage(comm)
    assert after.contexts == before.contexts
    assert after.descriptors <= before.descriptors


@sizes(2, more=(4,))
@pytest.mark.parametrize(
    "program",
    [a_thousand_come_and_go_and_nothing_grows, three_hundred_are_open_at_once],
    ids=lambda program: program.__name__,
)
def test_many_on_one_host(ranks: Any, program: Callable[[Comm], None]) -> None:
    ranks(program)


@exhaustive
@pytest.mark.parametrize("options", [("--transport", "tcp"), ("--emulate-hosts", "2")])
def test_many_elsewhere(job: Any, options: tuple[str, ...]) -> None:
    programs = [a_thousand_come_and_go_and_nothing_grows, three_hundred_are_open_at_once]
    done = run_all(job, 3, programs, *options, "--op-timeout", "30")
    assert (done.status, done.content) == (0, [0, 1, 2]), done.stderr


@sizes(2)
def test_the_core_has_room_for_new_ones_after_any_number_of_closed_ones(ranks: Any) -> None:
    # It has a table of 4096 communicators that use shared memory.
    def program(comm: Comm) -> None:
        for _ in range(4200):
            with comm.sub(range(comm.size)) as made:
                made.barrier()
        with comm.dup() as made:
            assert made.all_reduce(1) == comm.size

    ranks(program)


# --- members, and keys of sub --------------------------------------------------------------------


@sizes(1, 4)
def test_members_are_ranks_of_the_world_in_order(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        size = comm.size
        assert comm.members == tuple(range(size))
        back = comm.sub(range(size)[::-1])
        assert back.members == tuple(range(size)[::-1])
        assert back.members[back.rank] == comm.rank
        half = back.split(comm.rank % 2)
        assert half.members == tuple(r for r in range(size)[::-1] if r % 2 == comm.rank % 2)
        assert half.sub([half.rank]).members == (comm.rank,)
        with pytest.raises(AttributeError):
            comm.members = ()

    ranks(program)


@sizes(1, 4)
def test_threads_make_communicators_of_the_same_ranks_by_keys(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        everyone, count = range(comm.size), 6
        made: dict[int, Any] = {}

        def make(key: int) -> None:
            made[key] = comm.sub(everyone, key)

        # Each rank in another order: without keys their calls would meet as they come.
        threads = [
            threading.Thread(target=make, args=((i + comm.rank) % count,)) for i in range(count)
        ]
        for thread in threads:
            thread.start()
            thread.join()
        for key in range(count):
            assert made[key].all_gather(key) == [key] * comm.size

    ranks(program)


@sizes(2)
def test_calls_of_sub_with_one_key_are_told_apart_by_their_order(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        other = 1 - comm.rank
        keys: list[int | None] = [None, 5, 0, 5, None, -(2**63)]
        made = [comm.sub([0, 1], key) for key in keys]
        for number, each in enumerate(made):
            each.send(number, other)
        for number, each in reversed(list(enumerate(made))):
            assert each.recv(other) == number

    ranks(program)


@sizes(1)
def test_the_key_of_sub_is_an_int_of_64_bits(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        with pytest.raises(TypeError, match="key is an int"):
            comm.sub([0], "a")
        with pytest.raises(ValueError, match="64 bits"):
            comm.sub([0], 2**63)

    ranks(program)
