"""Where Python meets the core's engine: memory, references and threads when something fails."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from script_jobs import Jobs, all_well
from transport_world import DEADLINE_S, World

from pycoll.context import KIND_P2P, P2P, Incoming
from pycoll.core_context import CoreContext
from pycoll.transports.base import Transfer
from pycoll.transports.core import OVER

pytest.importorskip("pycoll.transports._core", exc_type=ImportError)

TRANSPORTS = ["shm", "tcp"]

# First uses import modules, and are done in Python.
WARM = """
peer = 1 - rank
comm.recv(comm.isend(np.zeros(1), rank) and rank)
comm.sendrecv(np.zeros(1), peer)
"""


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Jobs:
    """Runs scripts over the core's engine."""
    monkeypatch.setenv("PYCOLL_ENGINE", "core")
    return Jobs(tmp_path)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_message_for_which_there_is_no_memory_stays(jobs: Jobs, transport: str) -> None:
    text = f"""{WARM}
import resource

x = np.full(1 << 26, 7, np.uint8)
request = comm.isend(x, peer, 3)
comm.send(np.zeros(1), peer, 4)
comm.recv(peer, 4)
with open("/proc/self/statm") as statm:
    taken = int(statm.read().split()[0]) * resource.getpagesize()
before = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (taken + (1 << 25), before[1]))
error = error_of(comm.recv, peer, 3)
resource.setrlimit(resource.RLIMIT_AS, before)
assert isinstance(error, MemoryError), repr(error)
assert comm.recv(peer, 3).sum() == 7 << 26
request.wait()
ok()
"""
    all_well(jobs(2, text, "--transport", transport), 2)


IDENT = 7


@pytest.fixture(params=["core over shm, in segments", "core over tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[World]:
    """Two ranks of one process, each with an engine of the core's."""
    made = World(request.param, 2)
    yield made
    made.close()


def context_of(world: World, rank: int) -> CoreContext:
    transport: Any = world.nodes[rank].transport
    return CoreContext(IDENT, tuple(range(len(world.nodes))), rank, transport)


def sent(world: World, source: int, dest: int, tag: int, payload: bytes) -> Transfer:
    return world.send(source, dest, P2P.pack(KIND_P2P, IDENT, tag, 0), payload)


def matched(world: World, context: CoreContext, source: int, tag: int) -> Incoming:
    match = context.match(source, tag)
    world.run(lambda: match.done)
    assert match.message is not None
    return match.message


def test_a_receive_given_up_when_its_message_is_there_gives_it_to_the_next_one(pair: World) -> None:
    context = context_of(pair, 1)
    payload = bytes(range(256)) * 4000
    sent(pair, 0, 1, 5, payload)
    message = matched(pair, context, 0, 5)
    into = bytearray(len(payload))
    transfer: Any = message.arrival.accept(memoryview(into))
    cores = [node.transport.core for node in pair.nodes]  # type: ignore[attr-defined]
    deadline = time.monotonic() + DEADLINE_S
    while transfer.face.state != OVER:  # which Python has not heard of yet
        for core in cores:
            core.progress()
        assert time.monotonic() < deadline
    assert not transfer.done
    context.park(message, transfer)
    into[:] = bytes(len(into))  # it is its owner's again
    again = matched(pair, context, 0, 5)
    second = bytearray(len(payload))
    last = again.arrival.accept(memoryview(second))
    context.park(again, last)  # given up once more
    second[:] = bytes(len(second))
    third = bytearray(len(payload))
    last = matched(pair, context, 0, 5).arrival.accept(memoryview(third))
    pair.run(lambda: last.done)
    assert last.error is None
    assert third == payload
