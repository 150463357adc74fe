#!/usr/bin/env python3
"""A job of four ranks on two machines, over RDMA.

    tests/rdma/two_machines.py 0 ADDRESS    on the machine that has ADDRESS, and
    tests/rdma/two_machines.py 1 ADDRESS    on the other, at about the same time

Machine 0 lets the ranks meet; the other learns from it where. Ranks 0 and 1 are here, 2 and 3
there. Rank 3 is killed at the end. Prints a line for each thing that was right, and ends with
status 0 on both machines if all was.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

PORT = 7471
"""Where machine 0 tells the other how to join."""

SIZE, HERE = 4, 2
VICTIM = 3

LIMIT_S = 240.0
MEETING_S = 60.0
FAILURE_S = 20.0
"""Within this everybody knows of a failure: 5 s, but a virtual machine is a slow one."""


# --- the machines ------------------------------------------------------------------------------


class Ranks:
    """The processes of one machine's ranks."""

    def __init__(self, node: int, rendezvous: str, key: str) -> None:
        self.statuses: dict[int, int] = {}
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        for local_rank in range(HERE):
            rank = node * HERE + local_rank
            place = {
                "PYCOLL_RANK": rank,
                "PYCOLL_SIZE": SIZE,
                "PYCOLL_LOCAL_RANK": local_rank,
                "PYCOLL_LOCAL_SIZE": HERE,
                "PYCOLL_NODE": node,
                "PYCOLL_RENDEZVOUS": rendezvous,
                "PYCOLL_KEY": key,
                "PYCOLL_TRANSPORT": "rdma",
                "PYCOLL_OP_TIMEOUT": MEETING_S,
            }
            environment = os.environ | {name: str(value) for name, value in place.items()}
            command = [sys.executable, __file__, "rank"]
            self.processes[rank] = subprocess.Popen(command, env=environment)

    def watch(self, selector: selectors.BaseSelector, ended: Callable[[int, int], None]) -> None:
        """Have `ended(rank, status)` called by whoever selects."""
        for rank, process in self.processes.items():
            descriptor = os.pidfd_open(process.pid)
            reap = functools.partial(self._reap, rank, descriptor, selector, ended)
            selector.register(descriptor, selectors.EVENT_READ, reap)

    def _reap(
        self,
        rank: int,
        descriptor: int,
        selector: selectors.BaseSelector,
        ended: Callable[[int, int], None],
    ) -> None:
        selector.unregister(descriptor)
        os.close(descriptor)
        self.statuses[rank] = self.processes[rank].wait()
        ended(rank, self.statuses[rank])

    @property
    def have_ended(self) -> bool:
        return len(self.statuses) == len(self.processes)

    @property
    def were_right(self) -> bool:
        """Whether each ended as it should."""
        return self.statuses == {
            rank: -signal.SIGKILL if rank == VICTIM else 0 for rank in self.processes
        }

    def kill(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


def drive(selector: selectors.BaseSelector, until: Callable[[], bool]) -> None:
    """Call what is ready until the condition holds."""
    deadline = time.monotonic() + LIMIT_S
    while not until():
        ready = selector.select(max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"not over after {LIMIT_S:g} s")
        for key, _ in ready:
            key.data()


def first_machine(address: str) -> bool:
    """Be the machine where the ranks meet; returns whether all was right here."""
    from pycoll.launcher.rendezvous_server import Server

    key = secrets.token_bytes(32)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(Server(SIZE, key, host=address))
        listener = stack.enter_context(socket.create_server((address, PORT)))
        listener.settimeout(MEETING_S)
        other = stack.enter_context(listener.accept()[0])
        other.sendall(f"{server.endpoint} {key.hex()}\n".encode())
        reports = other.makefile("r")  # "RANK STATUS" of each rank that has ended there
        open_reports = {reports}

        def ended(rank: int, status: int) -> None:
            server.progress()  # what it said last
            reason = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
            server.rank_ended(rank, reason, clean=status == 0)

        def read_report() -> None:
            words = reports.readline().split()
            if words:
                ended(int(words[0]), int(words[1]))
            else:
                selector.unregister(other)
                open_reports.clear()

        ranks = Ranks(0, server.endpoint, key.hex())
        stack.callback(ranks.kill)
        selector = stack.enter_context(selectors.DefaultSelector())
        selector.register(server, selectors.EVENT_READ, server.progress)
        selector.register(other, selectors.EVENT_READ, read_report)
        ranks.watch(selector, ended)
        drive(selector, lambda: ranks.have_ended and not open_reports)
        return ranks.were_right


def second_machine(address: str) -> bool:
    """Be the other one; returns whether all was right here."""
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(_connected(address))
        rendezvous, key = first.makefile("r").readline().split()
        ranks = Ranks(1, rendezvous, key)
        stack.callback(ranks.kill)

        def ended(rank: int, status: int) -> None:
            first.sendall(f"{rank} {status}\n".encode())

        selector = stack.enter_context(selectors.DefaultSelector())
        ranks.watch(selector, ended)
        drive(selector, lambda: ranks.have_ended)
        return ranks.were_right


def _connected(address: str) -> socket.socket:
    """A connection to the first machine, which may not be ready yet."""
    deadline = time.monotonic() + MEETING_S
    while True:
        try:
            return socket.create_connection((address, PORT), MEETING_S)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


# --- a rank ------------------------------------------------------------------------------------


def rank_program() -> None:
    import numpy as np

    import pycoll

    comm = pycoll.init()
    me, size = comm.rank, comm.size
    across = (me + HERE) % size

    def right(what: str) -> None:
        comm.barrier()
        if comm.local_rank == 0:
            print(f"machine {comm.node}: right: {what}", flush=True)

    def equal(got: Any, want: Any, *where: object) -> None:
        np.testing.assert_array_equal(got, want, str(where))

    names = [transport.name for transport in comm._group.engine.transports]
    assert [name for rank, name in enumerate(names) if rank != me] == ["rdma"] * (size - 1), names
    right("all talk by RDMA")

    for count in (0, size, 100 * size, 20_000 * size):
        whole = np.arange(count, dtype="int64")
        blocks = whole.reshape(size, -1)
        for name in pycoll.algorithms("all_reduce")[1:]:
            equal(comm.all_reduce(whole + me, algorithm=name), size * whole + 6, name, count)
        for name in pycoll.algorithms("broadcast")[1:]:
            got = comm.broadcast(whole if me == 2 else None, root=2, algorithm=name)
            equal(got, whole, name, count)
        for name in pycoll.algorithms("all_gather")[1:]:
            equal(comm.all_gather(blocks[me], algorithm=name), blocks, name, count)
        for name in pycoll.algorithms("reduce_scatter")[1:]:
            equal(comm.reduce_scatter(blocks, algorithm=name), size * blocks[me], name, count)
        for name in pycoll.algorithms("all_to_all")[1:]:
            got = comm.all_to_all(blocks + me, algorithm=name)
            equal(got, blocks[me] + np.arange(size).reshape(size, 1), name, count)
    right("collectives, by every algorithm")

    for nbytes in (0, 1, 200, 300, 16_300, 16_400, 65 << 10, (65 << 10) + 1, 3 << 20):
        x = np.full(nbytes, me, np.uint8)
        equal(comm.sendrecv(x, across, across), np.full(nbytes, across), nbytes)
    value = {"of": me, "arrays": [np.arange(50_000) + me] * 3}
    got = comm.sendrecv(value, across, across)
    assert got["of"] == across
    equal(got["arrays"][2], np.arange(50_000) + across)
    right("messages of all lengths between the machines")

    requests = [comm.isend(number, across, tag=number % 5) for number in range(500)]
    for number in range(500):
        assert comm.recv(across) == number
    pycoll.wait_all(requests)
    right("many small messages, in order")

    survivors = comm.split(None if me == VICTIM else 0)
    large = np.full(4 << 20, me + 1, np.uint8)
    if me == VICTIM:
        comm.irecv(1, out=np.empty_like(large))
        kill = threading.Event()
        threading.Thread(
            target=lambda: kill.wait() and os.kill(os.getpid(), signal.SIGKILL)
        ).start()
        while True:
            comm.send(large, 0, timeout=MEETING_S)
            kill.set()
    error, start = None, time.monotonic()
    while error is None:
        try:
            if me == 0:
                comm.recv(VICTIM, out=np.empty_like(large))
            elif me == 1:
                comm.send(large, VICTIM)
            else:
                comm.recv(VICTIM)
            start = time.monotonic()
        except pycoll.PeerFailed as caught:
            error = caught
    assert (error.rank, error.reason) == (VICTIM, "killed by signal 9"), repr(error)
    assert time.monotonic() - start < FAILURE_S
    # The others still reach each other.
    got = survivors.all_gather(large[: 1 << 20])
    equal(got[:, -1], [1, 2, 3])
    print(
        f"machine {comm.node}: right: rank {me} was told of the death of rank {VICTIM}", flush=True
    )
    pycoll.finalize()


def main() -> int:
    if sys.argv[1:] == ["rank"]:
        rank_program()
        return 0
    number, address = sys.argv[1:]
    was_right = second_machine(address) if int(number) else first_machine(address)
    print(f"machine {number}: {'all was right' if was_right else 'WRONG'}", flush=True)
    return 0 if was_right else 1


if __name__ == "__main__":
    sys.exit(main())
