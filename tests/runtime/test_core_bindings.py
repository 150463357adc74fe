"""Where Python meets the core's engine: memory, references and threads when something fails."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pool_scripts import Scripts
from script_jobs import Jobs, all_well
from tiers import few
from transport_world import DEADLINE_S, World

from pycoll._runtime.context import Context
from pycoll._runtime.envelope import KIND_P2P, P2P, Incoming
from pycoll._transports._core import (
    RECEIVE_ENDED,
    RECEIVE_HELD,
    RECEIVE_POSTED,
    STATUS_TAKEN_BACK,
    WAY_BUFFER,
    WAY_OFFER,
)
from pycoll._transports.base import Transfer

pytest.importorskip("pycoll._transports._core", exc_type=ImportError)

TRANSPORTS = few(["shm", "tcp"], ["zmq"])

# First uses import modules, and are done in Python.
WARM = """
peer = 1 - rank
comm.recv(comm.isend(np.zeros(1), rank) and rank)
comm.sendrecv(np.zeros(1), peer)
"""


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_message_for_which_there_is_no_memory_stays(scripts: Scripts, transport: str) -> None:
    text = f"""{WARM}
import resource

x = np.full(1 << 27, 7, np.uint8)  # the C library keeps up to 64 MiB of what was freed before
request = comm.isend(x, peer, 3)
comm.send(np.zeros(1), peer, 4)
comm.recv(peer, 4)
with open("/proc/self/statm") as statm:
    taken = int(statm.read().split()[0]) * resource.getpagesize()
before = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (taken + (1 << 26), before[1]))
error = error_of(comm.recv, peer, 3)
resource.setrlimit(resource.RLIMIT_AS, before)
assert isinstance(error, MemoryError), repr(error)
assert comm.recv(peer, 3).sum() == 7 << 27
request.wait()
ok()
"""
    scripts(2, text, transport)


IDENT = 7


@pytest.fixture(params=["shm in fragments", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[World]:
    """Two ranks of one process, each with an engine of the core's."""
    made = World(request.param, 2)
    yield made
    made.close()


def context_of(world: World, rank: int) -> Context:
    transport: Any = world.nodes[rank].transport
    return Context(IDENT, tuple(range(len(world.nodes))), rank, transport)


def sent(world: World, source: int, dest: int, tag: int, payload: bytes) -> Transfer:
    return world.send(source, dest, P2P.pack(KIND_P2P, IDENT, tag, 0), payload)


def matched(world: World, context: Context, source: int, tag: int) -> Incoming:
    match = context.match(source, tag)
    world.run(lambda: match.done)
    assert match.message is not None
    return match.message


def drive(world: World, until: Callable[[], bool]) -> None:
    """Have the engines of all ranks progress, of which Python does not hear."""
    deadline = time.monotonic() + DEADLINE_S
    while not until():
        for node in world.nodes:
            node.transport.core.progress()  # type: ignore[attr-defined]
        assert time.monotonic() < deadline


def test_a_receive_given_up_when_its_message_is_there_gives_it_to_the_next_one(pair: World) -> None:
    context = context_of(pair, 1)
    payload = bytes(range(256)) * 4000
    sent(pair, 0, 1, 5, payload)
    message = matched(pair, context, 0, 5)
    into = bytearray(len(payload))
    transfer: Any = message.arrival.accept(memoryview(into))
    drive(pair, lambda: transfer.handle.state == RECEIVE_ENDED)  # which Python has not heard of yet
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


def test_a_message_that_comes_while_its_receive_is_posted_is_told_once(pair: World) -> None:
    context = context_of(pair, 1)
    sent(pair, 0, 1, 4, b"makes the link")
    matched(pair, context, 0, 4).arrival.release()
    match: Any = context.match(0, 5)
    sent(pair, 0, 1, 5, b"payload")
    drive(pair, lambda: match.handle.state == RECEIVE_HELD)  # its event stands in the queue
    context.settle(match)  # as if it had come before `match` has looked
    assert match.done
    pair.nodes[1].transport.progress()
    into = bytearray(7)
    transfer = match.message.arrival.accept(memoryview(into))
    pair.run(lambda: transfer.done)
    assert into == b"payload"


def test_a_message_that_is_taken_back_leaves_its_receive_where_it_was(pair: World) -> None:
    context = context_of(pair, 1)
    sent(pair, 0, 1, 4, b"makes the link")
    matched(pair, context, 0, 4).arrival.release()
    first, second = context.core.post(0, 5), context.core.post(0, 5)
    sender: Any = pair.nodes[0].transport
    taken_back = sender.core.send(1, P2P.pack(KIND_P2P, IDENT, 5, 0), (bytes(1 << 20),), WAY_OFFER)
    drive(pair, lambda: first.state == RECEIVE_HELD)
    taken_back.take_back()
    assert sender.core.send(1, P2P.pack(KIND_P2P, IDENT, 5, 0), (b"next",), WAY_BUFFER) is None
    drive(pair, lambda: first.state == RECEIVE_ENDED)
    assert first.status == STATUS_TAKEN_BACK
    again = context.core.post(0, 5, False, first.number)
    drive(pair, lambda: RECEIVE_HELD in (again.state, second.state))
    assert (again.state, again.nbytes, second.state) == (RECEIVE_HELD, 4, RECEIVE_POSTED)


def test_why_a_link_is_lost_may_be_cut_within_a_character() -> None:
    world = World("tcp", 2)
    transport: Any = world.nodes[0].transport
    transport.core.lose(1, "\u00e9" * 100)
    world.run(lambda: bool(world.nodes[0].lost_peers))
    world.close()
    assert world.nodes[0].lost_peers[1].startswith("\u00e9\u00e9")


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_a_closed_engine_is_freed(kind: str) -> None:
    world = World(kind, 2)
    sent(world, 0, 1, 5, b"payload")
    matched(world, context_of(world, 1), 0, 5)
    engines = [weakref.ref(node.transport) for node in world.nodes]
    world.close()
    del world
    gc.collect()
    assert [engine() for engine in engines] == [None, None]


def test_what_failed_keeps_no_array(job: Jobs) -> None:
    text = f"""{WARM}
import gc, weakref

def made(nbytes=8):
    x = np.zeros(nbytes, np.uint8)
    arrays.append(weakref.ref(x))
    return x

arrays = []
other = comm.dup()
comm.send(np.ones(64, np.uint8), peer, 5)
refused = comm.irecv(peer, 5, made())
error_like(pycoll.TruncationError, "", refused.wait)
cancelled = comm.irecv(peer, 6, made())
cancelled.cancel()
late = other.irecv(peer, 7, made())
error_like(pycoll.OperationTimeout, "", late.wait, 0.01)
sending = other.isend(made(1 << 20), peer, 8)
error_like(pycoll.OperationTimeout, "", sending.wait, 0.01)
error_like(pycoll.OperationTimeout, "", other.send, made(1 << 20), peer, 9, timeout=0.01)
error_like(pycoll.OperationTimeout, "", other.recv, peer, 11, made(), timeout=0.01)
comm.barrier()  # who closes drops what the other sends
other.close()
error_like(pycoll.Error, "closed", late.wait)
while not sending.done:  # the peer, who closes too, drops it, if it was not taken back before
    sending.test()
comm.recv(peer, 5)
comm.barrier()
del refused, cancelled, late, sending
gc.collect()
assert [x() for x in arrays] == [None] * len(arrays), arrays
pending = comm.irecv(peer, 10, made())
error_like(pycoll.OperationTimeout, "", pending.wait, 0.01)
comm.barrier()
pycoll.finalize()
del pending
gc.collect()
assert arrays[-1]() is None
ok()
"""
    all_well(job(2, text), 2)
