"""Many communicators: one after the other, or open at once."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiers import TCP, TWO_HOSTS, exhaustive, sizes

Comm = Any


def mapped_regions() -> set[str]:
    """Where in the host's memory the parts lie that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[2] for line in lines if "memfd:" in line}


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
        before = mapped_regions()
        with comm.dup() as made:
            made.barrier()
            self.regions = mapped_regions() - before

    def check(self, before: Usage) -> None:
        """Nothing has grown since by as much as a few communicators take."""
        assert self.contexts == before.contexts
        assert self.regions == before.regions  # a new one gets the first that is free
        assert self.descriptors <= before.descriptors
        assert self.mappings <= before.mappings + 5  # of malloc's
        assert self.memory <= before.memory + (2 << 20)
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


def hundreds_come_and_go_and_nothing_grows(comm: Comm) -> None:
    comm.all_to_all(np.ones((comm.size, 1)))  # all links that there may be
    make_some(comm, 21)
    before = Usage(comm)
    make_some(comm, 85)
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


@sizes(2, more=(4, (3, TCP), (3, TWO_HOSTS)))
@pytest.mark.parametrize(
    "program",
    [hundreds_come_and_go_and_nothing_grows, three_hundred_are_open_at_once],
    ids=lambda program: program.__name__,
)
def test_wherever_ranks_are(ranks: Any, program: Callable[[Comm], None]) -> None:
    ranks(program)


@exhaustive
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
