"""Communicators made of others: split, split_by_host, dup, sub and grid.

`PROGRAMS` hold on every number of ranks, and wherever these are: they run in shared memory, over
tcp, and between emulated hosts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import grid_programs as grids
import group_programs as groups
import numpy as np
import pytest
from tiers import TCP, THREE_HOSTS, TWO_HOSTS, sizes

import pycoll

Comm = Any

PROGRAMS = [
    groups.split_makes_groups_of_one_color_in_the_order_of_keys_then_ranks,
    groups.split_refuses_what_is_no_64_bit_int_and_the_call_does_not_count,
    groups.split_by_host_makes_a_group_of_the_ranks_of_each_host,
    groups.sub_has_the_ranks_given_in_the_order_given_and_others_get_none,
    groups.sub_refuses_what_is_no_list_of_ranks,
    groups.sub_needs_no_message,
    groups.sub_of_other_order_or_made_again_is_another_communicator,
    groups.communicators_are_made_of_those_that_were_made,
    grids.grid_places_ranks_in_row_major_order,
    grids.lines_of_a_grid_differ_in_their_axes_only,
    grids.neighbors_of_a_grid_exchange_what_shift_says,
    grids.a_dup_of_a_grid_is_a_grid_like_it,
    grids.a_grid_says_where_one_is,
    grids.grid_refuses_what_does_not_fit_and_the_call_does_not_count,
    groups.messages_of_one_are_never_received_on_another,
    groups.collectives_of_overlapping_groups_run_in_threads_at_once,
    groups.disjoint_groups_make_different_calls_in_different_numbers,
    groups.what_was_made_outlives_what_it_was_made_of,
    groups.a_closed_one_says_so_and_may_be_closed_again,
    groups.closing_loses_nothing_that_was_sent_and_keeps_nothing_that_was_not_received,
    groups.a_sender_that_waits_goes_on_when_its_receiver_closes,
    groups.what_is_pending_on_a_closed_one_ends,
    groups.a_sub_works_where_its_parent_is_broken,
]


@sizes(1, 6, (4, TWO_HOSTS), more=(2, (2, TCP), (4, TCP), (5, THREE_HOSTS)))
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_wherever_ranks_are(ranks: Any, program: Callable[[Comm], None]) -> None:
    ranks(program)


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
