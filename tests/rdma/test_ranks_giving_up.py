"""Ranks over a real RDMA device: giving up, and registered memory."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from rdma_ranks import TWO, Array, Comm, check, jobs, pattern

import pycoll
from pycoll._transports.rdma_lane import FRAGMENT


def device_of(comm: Comm) -> Any:
    """This rank's RDMA transport."""
    outside = comm._group.engine.transport.outside.peers.values()
    return next(transport for transport in outside if transport.name == "rdma")


LONG = 40 * FRAGMENT
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
    before = out[:: FRAGMENT // 4].copy()
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
            check(out[:: FRAGMENT // 4], before)
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
        large = pattern(comm.rank, 3 * FRAGMENT)
        check(comm.sendrecv(large, 1 - comm.rank), pattern(1 - comm.rank, 3 * FRAGMENT))
        check(out[:: FRAGMENT // 4][: before.size], before)

    ranks(program)


@jobs(TWO)
def test_timeouts_before_anything_moves_leave_the_link_in_order(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        other, large = 1 - comm.rank, pattern(3, 2 * FRAGMENT)
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
