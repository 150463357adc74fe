"""The protocol of the rdma transport, on devices that do what hardware may do.

Random programs of a few ranks in one process: their memory is watched while they send, accept,
redirect and give up, and their devices fail them. Longer: RDMA_SEEDS=10000.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import random
import struct
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pycoll.errors import PeerFailed, TransportError
from pycoll.transports.base import CREDIT, EAGER_LIMIT, MESSAGE_COST, Arrival, Transfer, Withdrawn
from pycoll.transports.rdma import RdmaTransport, completions_for, receives_for
from pycoll.transports.rdma_frames import PACKED_RECEIVES, PIECE, RECEIVES
from pycoll.transports.rdma_lane import SEGMENT
from pycoll.transports.rdma_link import MOST_FAILURES, Link
from pycoll.transports.rdma_queues import DRAIN_S, SEND_SLOTS, SLOT
from pycoll.transports.verbs import RETRIES_EXCEEDED, VerbsError, explain

# A file of this folder, which is on no path.
_spec = importlib.util.spec_from_file_location(
    "transport_world", Path(__file__).with_name("transport_world.py")
)
assert _spec is not None
assert _spec.loader is not None
transport_world: Any = sys.modules.setdefault(
    "transport_world", importlib.util.module_from_spec(_spec)
)
if not hasattr(transport_world, "World"):
    _spec.loader.exec_module(transport_world)

SEEDS = int(os.environ.get("RDMA_SEEDS", "60"))
STEPS = 150  # of a random program
ROUNDS = 20_000  # in which all ranks progress; what then is not done never will be
LARGE = 3 * SEGMENT
NUMBER = struct.Struct("<I")
GUARD = 64  # bytes after the memory of a receive, which are nobody's
BEFORE, AFTER = 0xA5, 0x5A  # what memory holds before it is the transport's, and after

SIZES = [0, 1, 100, 300, PIECE - 8, PIECE, PIECE + 1, SLOT, EAGER_LIMIT - 1, EAGER_LIMIT]
LARGE_SIZES = [EAGER_LIMIT + 1, 100_000, SEGMENT - 1, SEGMENT, SEGMENT + 1, LARGE + 5]


class World(transport_world.World):  # type: ignore[misc,name-defined]
    """Some ranks with simulated devices, which can be chosen."""

    def __init__(
        self, size: int, seed: int = 0, device: dict[str, int] | None = None, **fabric: Any
    ) -> None:
        self._made = transport_world.simulated_device.Fabric(seed, **fabric)
        self._device = device or {}
        super().__init__("rdma, simulated", size)
        self.at_start = [self.device(rank).live_regions for rank in range(size)]

    def make(self, kind: str, size: int) -> list[Any]:
        self.fabric = self._made
        limits = {
            "receives": receives_for(size - 1),
            "completions": completions_for(size - 1),
            **self._device,
        }
        devices = [self.fabric.device(**limits) for _ in range(size)]
        return [RdmaTransport(rank, device, kind) for rank, device in enumerate(devices)]

    def transport(self, rank: int) -> RdmaTransport:
        transport = self.nodes[rank].transport
        assert isinstance(transport, RdmaTransport)
        return transport

    def device(self, rank: int) -> Any:
        return self.transport(rank).endpoint.device

    def link(self, rank: int, peer: int) -> Link:
        return self.transport(rank)._links[peer]

    def settle(self, ranks: Iterable[int] | None = None) -> None:
        """Let everything happen that can, at the given ranks (all of them)."""
        nodes = self.nodes if ranks is None else [self.nodes[rank] for rank in ranks]
        for _ in range(ROUNDS):
            self.fabric.run()
            worked = any([node.transport.progress() for node in nodes])
            if not worked and not self.fabric.busy and all(n.transport.is_idle() for n in nodes):
                return
        raise AssertionError("it does not come to rest")

    def connect(self) -> None:
        """Make the link of ranks 0 and 1."""
        self.send(0, 1, b"first")
        (arrival,) = self.arrivals(1, 1)
        arrival.release()
        self.nodes[1].arrivals.clear()
        self.settle()

    def started(self, nbytes: int = LARGE, data: bytes | None = None) -> Started:
        """Rank 0 sends to rank 1, which has accepted; the lane is ready, and nothing is written."""
        data = data or b"\x01" * nbytes
        sending = self.send(0, 1, b"", data)
        (arrival,) = self.arrivals(1, 1)
        into = bytearray(nbytes)
        receiving = arrival.accept(memoryview(into))
        return Started(sending, receiving, into, data)

    def under_way(self, nbytes: int = LARGE) -> Started:
        """The same, and something is written already."""
        started = self.started(nbytes)
        self.run(lambda: started.into[0] == 1)
        assert not started.receiving.done
        return started


class Started:
    """A message of which the receive has begun."""

    def __init__(
        self, sending: Transfer, receiving: Transfer, into: bytearray, data: bytes
    ) -> None:
        self.sending, self.receiving, self.into, self.data = sending, receiving, into, data

    @property
    def done(self) -> bool:
        return self.sending.done and self.receiving.done

    def check(self) -> None:
        assert self.done
        assert self.sending.error is None
        assert self.receiving.error is None
        assert self.into == self.data


def check_at_rest(world: World) -> None:
    """Check that nothing is left of what was under way, at no rank."""
    world.fabric.check()
    for rank, node in enumerate(world.nodes):
        transport = world.transport(rank)
        endpoint = transport.endpoint
        assert sorted(endpoint.free) == list(range(SEND_SLOTS))
        entries = list(endpoint.registrations._entries.values())
        assert not any(entry.uses for entry in entries)
        links = transport._links
        assert world.device(rank).live_regions == world.at_start[rank] + len(links) + len(entries)
        assert not node.lost_peers
        lanes = sum(link._lane is not None for link in links.values())
        assert len(world.device(rank).pairs) == len(endpoint.owners) == len(links) + lanes
        for peer, link in links.items():
            other = world.link(peer, rank)
            assert not any((link._sends, link._receives, link._waiting, link._in_pieces))
            assert not link.frames._backlog
            assert not link.frames._begun
            assert link.frames.credits + other.frames._unreturned == RECEIVES
            assert (link._lane is None) == (other._lane is None)
            posted = link._last_writes
            if link._lane is not None:
                assert link._epoch == other._epoch
                assert link._lane.is_ready
                assert not link._lane._writes
                assert not len(link._lane.queue)
                posted += link._lane.last_writes
            assert posted - link._last_writes_lost == other._last_writes_received
            assert link._owed == other._unrepaid
    receives = [len(device.posted) for device in world.fabric.devices]
    assert receives == [18 * len(node.transport.links()) for node in world.nodes]


# --- random programs -------------------------------------------------------------------------


class Message:
    """One message of a random program: what both its ends know of it."""

    def __init__(self, number: int, source: int, dest: int, parts: list[Any]) -> None:
        self.number, self.source, self.dest = number, source, dest
        self.parts = parts
        self.data = b"".join(bytes(part) for part in parts)
        self.sending: Transfer | None = None
        self.arrival: Arrival | None = None
        self.receiving: Transfer | None = None
        self.into = np.zeros(0, np.uint8)
        self.is_cancelled = self.was_committed = False  # by its sender
        self.is_given_up = self.is_released = self.is_withdrawn = False  # at the receiver

    @property
    def is_open(self) -> bool:
        """Whether both ends still want it."""
        return not (self.is_cancelled or self.is_given_up or self.is_released)


class Program:
    """A random program; the seed alone decides what it does.

    Args:
        seed: of everything.
        dies: whether the process of the last rank ends at some moment.
    """

    def __init__(self, seed: int, dies: bool = False) -> None:
        self.random = chance = random.Random(seed)
        self.bytes = np.random.default_rng(seed)
        self.size = chance.choice([3, 4] if dies else [2, 2, 3, 4])
        self.death = chance.randrange(STEPS) if dies else STEPS + 1
        self.dead: int | None = None
        device = {"max_message": chance.choice([1 << 30, 1 << 16, 4096 * 5 + 1])}
        if chance.random() < 0.2:
            device["inline"] = 0
        pace, forgets = chance.choice([1, 4, 8, 30]), chance.random() < 0.5
        self.world = World(self.size, seed, device, pace=pace, forgets=forgets)
        self.messages: list[Message] = []
        self.expected = {(s, d): list[int]() for s in range(self.size) for d in range(self.size)}
        self.paused: set[int] = set()
        self.returned: list[tuple[np.ndarray, bytes]] = []  # memory that is ours again
        self.refuses = chance.choice([0.0, 0.0, 0.3])  # registrations
        self.depth = 0
        self.losses: list[tuple[int, int]] = []
        for rank, node in enumerate(self.world.nodes):
            node.arrived = partial(self.arrived, rank)
            node.withdrawn = self.withdrawn
            node.lost = partial(self.lost, rank)
        self.world.fabric.refuse_registration(
            lambda _, __, nbytes: nbytes % SLOT != 0 and chance.random() < self.refuses
        )

    def run(self) -> None:
        for number in range(STEPS):
            self.step()
            if number == self.death:
                self.die()
            for rank in self.alive:
                if rank not in self.paused and self.random.random() < 0.6:
                    self.world.nodes[rank].transport.progress()
        self.finish()
        self.check()
        self.close()

    @property
    def alive(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.dead]

    def is_alive(self, message: Message) -> bool:
        return self.dead not in (message.source, message.dest)

    def die(self) -> None:
        self.dead = self.size - 1
        self.world.fabric.kill(self.world.device(self.dead))

    def step(self) -> None:
        """Do one thing, as a user might at any moment; also within a callback."""
        chance = self.random
        what = chance.choices(
            [self.send, self.accept, self.cancel, self.give_up, self.redirect, self.release,
             self.pause], [8, 8, 1.5, 1.5, 1.5, 0.5, 1.5])[0]  # fmt: skip
        what()

    # --- what it does ----------------------------------------------------------------------

    def some(self, side: str, condition: Callable[[Message], object]) -> Message | None:
        found = [m for m in self.messages if getattr(m, side) != self.dead and condition(m)]
        return self.random.choice(found) if found else None

    def send(self) -> None:
        source = self.random.choice(self.alive)
        dest = self.random.choice([rank for rank in range(self.size) if rank != source])
        self.send_to(source, dest)

    def send_to(self, source: int, dest: int) -> None:
        message = Message(len(self.messages), source, dest, self.payload())
        self.messages.append(message)
        self.expected[source, dest].append(message.number)
        views = [memoryview(part).cast("B") for part in message.parts]
        transport = self.world.nodes[source].transport
        message.sending = transport.send(dest, NUMBER.pack(message.number), views)
        message.sending.then(lambda _: self.sent(message))

    def payload(self) -> list[Any]:
        chance = self.random
        nbytes = chance.choice(SIZES if chance.random() < 0.6 else LARGE_SIZES)
        count = chance.choice([1, 1, 1, 2, 3, 20])
        cuts = sorted(chance.randint(0, nbytes) for _ in range(count - 1))
        return [
            self.part(end - begin) for begin, end in zip([0, *cuts], [*cuts, nbytes], strict=True)
        ]

    def part(self, nbytes: int) -> Any:
        data, kind = self.bytes.bytes(nbytes), self.random.randrange(5)
        if kind == 0:
            return data
        if kind == 1:
            return bytearray(data)
        whole = np.empty(nbytes + 20, np.uint8)
        begin = 0 if kind == 2 else 13
        array = whole[begin : begin + nbytes]
        array[:] = np.frombuffer(data, np.uint8)
        array.flags.writeable = kind != 4
        return array

    def accept(self) -> None:
        message = self.some(
            "dest",
            lambda m: m.arrival and not m.receiving and not m.is_released and not m.is_withdrawn,
        )
        if message is not None:
            self.accept_one(message)

    def accept_one(self, message: Message) -> None:
        assert message.arrival is not None
        message.into = self.memory(len(message.data))
        into = message.into[: len(message.into) - GUARD]
        message.receiving = message.arrival.accept(into.data)
        message.receiving.then(lambda _: self.received(message))

    def memory(self, nbytes: int) -> np.ndarray:
        return np.full(nbytes + self.random.choice([0, 0, 1000]) + GUARD, BEFORE, np.uint8)

    def release(self) -> None:
        message = self.some("dest", lambda m: m.arrival and not m.receiving and not m.is_released)
        if message is not None:
            assert message.arrival is not None
            message.is_released = True
            message.arrival.release()

    def cancel(self) -> None:
        message = self.some(
            "source", lambda m: m.sending and not m.sending.done and not m.is_cancelled
        )
        if message is not None:
            assert message.sending is not None
            message.was_committed = message.sending.committed
            message.is_cancelled = True
            message.sending.cancel()
            self.overwrite(message)

    def give_up(self) -> None:
        message = self.some(
            "dest", lambda m: m.receiving and not m.receiving.done and not m.is_given_up
        )
        if message is not None:
            assert message.receiving is not None
            message.is_given_up = True
            message.receiving.cancel()
            self.take_back(message.into)

    def redirect(self) -> None:
        message = self.some(
            "dest", lambda m: m.receiving and not m.receiving.done and not m.is_given_up
        )
        if message is not None:
            assert message.receiving is not None
            old, message.into = message.into, self.memory(len(message.data))
            message.receiving.redirect(message.into[: len(message.into) - GUARD].data)
            self.take_back(old)

    def pause(self) -> None:
        rank = self.random.randrange(self.size)
        self.paused.symmetric_difference_update({rank})

    # --- what happens to it ----------------------------------------------------------------

    def arrived(self, rank: int, arrival: Arrival) -> None:
        (number,) = NUMBER.unpack(arrival.header)
        message = self.messages[number]
        assert message.dest == rank
        assert arrival.peer == message.source
        assert arrival.nbytes == len(message.data)
        assert self.expected[message.source, rank].pop(0) == number
        message.arrival = arrival
        if arrival.payload is not None:
            assert arrival.payload == message.data
        if self.random.random() < 0.3:
            self.accept_one(message)
        self.within()

    def withdrawn(self, arrival: Arrival) -> None:
        message = next(m for m in self.messages if m.arrival is arrival)
        assert message.is_cancelled
        assert not message.receiving
        message.is_withdrawn = True
        if self.random.random() < 0.5:
            into = self.memory(len(message.data))
            receiving = arrival.accept(into.data)
            assert isinstance(receiving.error, Withdrawn)
            self.take_back(into)

    def sent(self, message: Message) -> None:
        assert not message.is_cancelled
        assert message.sending is not None
        if message.sending.error is not None:
            self.check_failed(message, message.sending.error)
        self.overwrite(message)
        self.within()

    def received(self, message: Message) -> None:
        assert not message.is_given_up
        assert message.receiving is not None
        error = message.receiving.error
        if isinstance(error, Withdrawn):
            assert message.is_cancelled
        elif error is not None:
            self.check_failed(message, error)
        else:
            # Who asks, is told no, and cancels can send it again.
            assert not message.is_cancelled or message.was_committed
            nbytes = len(message.data)
            assert message.into[:nbytes].tobytes() == message.data
            assert set(message.into[nbytes:].tolist()) == {BEFORE}
        self.take_back(message.into)
        self.within()

    def check_failed(self, message: Message, error: BaseException) -> None:
        assert isinstance(error, PeerFailed)
        assert error.rank == self.dead
        assert not self.is_alive(message)

    def lost(self, rank: int, peer: int, reason: str) -> None:
        assert peer == self.dead
        assert reason
        self.losses.append((rank, peer))

    def within(self) -> None:
        """Do something in a callback, at times."""
        if self.depth < 2 and self.random.random() < 0.2:
            self.depth += 1
            self.step()
            self.depth -= 1

    def overwrite(self, message: Message) -> None:
        """Use the memory of a message that is sent, or was given up, for something else."""
        for part in message.parts:
            if isinstance(part, bytearray) or (
                isinstance(part, np.ndarray) and part.flags.writeable
            ):
                np.frombuffer(part, np.uint8)[:] = AFTER
        message.parts = []

    def take_back(self, memory: np.ndarray) -> None:
        """Memory of a receive is ours again: nobody else writes to it."""
        memory[::3] = AFTER
        self.returned.append((memory, memory.tobytes()))

    # --- its end ---------------------------------------------------------------------------

    def finish(self) -> None:
        """Let all that is still wanted happen."""
        self.depth = 9
        self.paused.clear()
        self.settle()
        if self.dead is not None:
            for rank in self.alive:
                self.send_to(rank, self.dead)
            self.settle()
            # Who has never heard of it does not lose it.
            linked = [
                rank for rank in self.alive
                if self.world.link(rank, self.dead).failure
            ]  # fmt: skip
            assert sorted(self.losses) == [(rank, self.dead) for rank in linked]
            for rank in self.alive:
                self.world.nodes[rank].transport.forget(self.dead, "it was killed")
        for message in self.messages:
            if message.arrival and not (
                message.receiving or message.is_released or message.is_withdrawn
            ):
                self.accept_one(message)
        self.settle()

    def settle(self) -> None:
        self.world.settle(self.alive)

    def close(self) -> None:
        for rank in self.alive:
            self.world.nodes[rank].lost = lambda *_: None  # who closes later finds others gone
            started = time.monotonic()
            self.world.nodes[rank].transport.close(5.0)
            assert self.dead is None or time.monotonic() - started < 2
        self.world.fabric.check()

    def check(self) -> None:
        for message in self.messages:
            assert message.sending is not None
            if not self.is_alive(message):
                at_survivor = message.receiving if message.source == self.dead else message.sending
                assert at_survivor is None or at_survivor.done or not message.is_open
                continue
            assert message.number not in self.expected[message.source, message.dest]
            if message.is_open:
                assert message.sending.done
                assert message.receiving is not None
                assert message.receiving.done
            elif not message.is_cancelled:
                assert message.sending.done
        for memory, content in self.returned:
            assert memory.tobytes() == content
        self.returned.clear()
        if self.dead is None:
            check_at_rest(self.world)
        self.world.fabric.check()


@pytest.mark.filterwarnings("ignore:rdma. rank .* cannot register:RuntimeWarning")
@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_random_program_moves_what_it_shall_and_touches_nothing_else(seed: int) -> None:
    Program(seed).run()


@pytest.mark.filterwarnings("ignore:rdma. rank .* cannot register:RuntimeWarning")
@pytest.mark.parametrize("seed", range(SEEDS // 2))
def test_a_random_program_survives_the_death_of_a_rank(seed: int) -> None:
    Program(seed, dies=True).run()


# --- giving up, at the worst moments ----------------------------------------------------------


@pytest.fixture
def world() -> Iterator[World]:
    """Two ranks whose large messages need many writes."""
    made = World(2, device={"max_message": 1 << 14})
    yield made
    made.close()


def test_a_receive_given_up_before_there_is_a_lane_is_never_written(world: World) -> None:
    source, into = np.full(LARGE, 1, np.uint8), np.zeros(LARGE, np.uint8)
    world.nodes[1].arrived = lambda arrival: arrival.accept(into.data).cancel()
    sending = world.send(0, 1, b"", source.data)
    world.run(lambda: sending.done)
    source[:] = 2
    world.settle()
    assert not into.any()
    check_at_rest(world)


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_giving_up_half_way_gives_everything_back(world: World, side: str) -> None:
    started = world.under_way()
    transfer = started.sending if side == "sender" else started.receiving
    transfer.cancel()
    before = bytes(started.into)
    world.settle()
    assert started.into == before
    check_at_rest(world)


def test_what_both_ends_give_up_at_once_leaves_nothing(world: World) -> None:
    started, back = world.under_way(), world.send(1, 0, b"", bytes(LARGE))
    (arrival,) = world.arrivals(0, 1)
    receiving = arrival.accept(memoryview(bytearray(LARGE)))
    for transfer in (started.sending, started.receiving, back, receiving):
        transfer.cancel()
    world.settle()
    check_at_rest(world)
    world.send(0, 1, b"", bytes(LARGE))
    assert world.receive(world.arrivals(1, 2)[-1]) == bytes(LARGE)


def test_many_renewals_before_the_peer_hears_of_one_are_one_to_it(world: World) -> None:
    started = world.under_way()
    for _ in range(5):
        elsewhere = bytearray(LARGE)
        started.receiving.redirect(memoryview(elsewhere))
    started.into = elsewhere
    world.run(lambda: started.done)
    started.check()
    world.settle()
    check_at_rest(world)


def test_a_message_that_is_written_goes_on_when_another_is_given_up(world: World) -> None:
    sent = [world.send(0, 1, b"", bytes([i]) * LARGE) for i in range(3)]
    arrivals = world.arrivals(1, 3)
    into = [bytearray(LARGE) for _ in range(3)]
    received = [arrivals[i].accept(memoryview(into[i])) for i in range(3)]
    world.run(lambda: into[1][0] == 1)
    received[1].cancel()
    world.run(lambda: all(transfer.done for transfer in sent))
    assert received[2].done
    assert into[0] == bytes(LARGE)
    assert into[2] == b"\x02" * LARGE
    world.settle()
    check_at_rest(world)


def not_known_to_be_here() -> tuple[World, list[Transfer]]:
    """Two or more sends that have arrived, over a lane that fails before rank 0 learns of them."""
    nbytes = EAGER_LIMIT + 1
    for seed in range(50):  # the first in which it comes to that
        world = World(2, seed, pace=2)
        sent = [world.send(0, 1, b"", bytes(nbytes)) for _ in range(8)]
        received = [
            arrival.accept(memoryview(bytearray(nbytes))) for arrival in world.arrivals(1, 8)
        ]
        world.run(lambda sent=sent: all(transfer.done or transfer.committed for transfer in sent))
        world.run(lambda received=received: all(r.done for r in received), ranks=[1])
        link = world.link(0, 1)
        epoch = link._epoch
        world.fabric.fail_next(world.device(0), RETRIES_EXCEEDED)
        while link._epoch == epoch and not all(transfer.done for transfer in sent):
            world.nodes[0].transport.progress()
        unknown = [transfer for transfer in sent if not transfer.done]
        if len(unknown) >= 2:
            return world, unknown
        world.close()
    raise AssertionError("all was known each time")


def test_who_asks_before_giving_up_is_told_of_what_came_over_a_lane_that_is_gone() -> None:
    world, unknown = not_known_to_be_here()
    assert all(sending.committed for sending in unknown)
    world.run(lambda: all(sending.done for sending in unknown))
    world.close()


def test_the_end_of_one_that_had_arrived_may_give_up_another() -> None:
    world, (first, second, *_) = not_known_to_be_here()
    first.then(lambda _: second.cancel())
    second.then(lambda _: first.cancel())
    world.settle()
    assert first.done != second.done
    check_at_rest(world)
    world.close()


@pytest.mark.filterwarnings("ignore:rdma. rank .* cannot register:RuntimeWarning")
@pytest.mark.parametrize("number", range(5, 20))
def test_who_asks_before_giving_up_is_told_that_all_pieces_are_sent(number: int) -> None:
    world = World(2)
    world.fabric.refuse_registration(lambda _, __, nbytes: nbytes % SLOT != 0)
    nbytes = number * PIECE
    sending = world.send(0, 1, b"", bytes(nbytes))
    (arrival,) = world.arrivals(1, 1)
    receiving = arrival.accept(memoryview(bytearray(nbytes)))
    while not receiving.done:
        for rank in (0, 1):  # what rank 1 has to say to that comes later
            world.fabric.run()
            world.nodes[rank].transport.progress()
            if receiving.done:
                assert sending.done or sending.committed
    world.close()


def test_a_send_in_pieces_is_not_begun_twice_when_the_lane_is_renewed(world: World) -> None:
    parts = [bytes([i % 256]) * 1000 for i in range(1000)]
    sending = world.send(0, 1, b"", *parts)
    (arrival,) = world.arrivals(1, 1)
    into = bytearray(arrival.nbytes)
    receiving = arrival.accept(memoryview(into))
    world.run(lambda: into[1000] == 1)
    assert not receiving.done
    elsewhere = bytearray(arrival.nbytes)
    receiving.redirect(memoryview(elsewhere))
    world.link(0, 1)._renew_lane()
    world.run(lambda: receiving.done and sending.done)
    assert elsewhere == b"".join(parts)
    world.settle()
    check_at_rest(world)


# --- failures of the device ------------------------------------------------------------------


def is_writing(world: World, nth: int) -> bool:
    """Whether rank 0 is at work on its lane number `nth`, and on nothing else."""
    link = world.link(0, 1)
    lane, frames = link._lane, link.frames.queue.pair
    return (
        lane is not None
        and link._epoch == nth
        and len(lane.queue) > 0
        and not (frames.queue or frames.arrived)
    )


@pytest.mark.parametrize("status", [1, 2, 4, 5, 8, 9, 10, 11, 12, 13, 21])
def test_a_write_that_fails_is_tried_again_at_once(world: World, status: int) -> None:
    started = world.started()
    began = time.monotonic()
    for epoch in range(1, MOST_FAILURES + 1):
        world.run(lambda epoch=epoch: is_writing(world, epoch))
        world.fabric.fail_next(world.device(0), status)
    world.run(lambda: started.done)
    started.check()
    assert world.link(0, 1)._epoch == MOST_FAILURES + 1
    assert time.monotonic() - began < DRAIN_S
    world.settle()
    check_at_rest(world)


@pytest.mark.parametrize("status", [1, 4, 10, 21])
def test_a_lane_that_fails_time_and_again_is_the_end_of_the_link(world: World, status: int) -> None:
    started = world.started()
    for epoch in range(1, MOST_FAILURES + 2):
        world.run(lambda epoch=epoch: is_writing(world, epoch))
        world.fabric.fail_next(world.device(0), status)
    world.run(lambda: bool(world.nodes[0].lost_peers))
    assert world.nodes[0].lost_peers == {1: explain(status)}
    assert not started.sending.done
    world.nodes[0].transport.forget(1, "it is lost")
    assert isinstance(started.sending.error, PeerFailed)


def test_a_slow_sender_is_not_lost_when_receives_are_given_up_again_and_again() -> None:
    world = World(2, device={"max_message": 1 << 14})
    for number in range(2 * MOST_FAILURES):
        sending = world.send(0, 1, b"", b"\x01" * LARGE)
        into = bytearray(LARGE)
        receiving = world.arrivals(1, number + 1)[-1].accept(memoryview(into))
        world.run(lambda into=into: into[0] == 1)
        # Rank 0 computes meanwhile: what it writes meets nothing, and LANE waits for a credit.
        for _ in range(RECEIVES):
            world.send(1, 0, b"", b"")
        receiving.cancel()
        world.fabric.run()
        world.run(lambda sending=sending: sending.done or bool(world.nodes[0].lost_peers))
        assert world.nodes[0].lost_peers == {}
    world.close()


@pytest.mark.parametrize("status", [1, 5, 9, 11, 12, 13, 21])
def test_a_frame_that_fails_is_the_end_of_the_link(world: World, status: int) -> None:
    world.connect()
    world.fabric.fail_next(world.device(0), status)
    for _ in range(9):  # not every small one is looked after
        world.send(0, 1, b"second", b"")
    world.run(lambda: bool(world.nodes[0].lost_peers))
    assert world.nodes[0].lost_peers == {1: explain(status)}
    waiting = world.send(0, 1, b"third", b"")
    assert not waiting.done
    world.nodes[0].transport.forget(1, "it is lost")
    assert isinstance(waiting.error, PeerFailed)


@pytest.mark.parametrize("refused", [[0], [1], [0, 1]])
def test_what_cannot_be_registered_is_copied_and_that_is_said_once(
    world: World, refused: list[int]
) -> None:
    world.connect()
    devices = [world.device(rank) for rank in refused]
    world.fabric.refuse_registration(lambda device, *_: device in devices)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for number in range(2):
            sending = world.send(0, 1, b"", bytes([number]) * LARGE)
            assert world.receive(world.arrivals(1, 1 + number)[-1]) == bytes([number]) * LARGE
            world.run(lambda sending=sending: sending.done)
    told = [str(warning.message) for warning in warned]
    assert len(told) == 1
    assert f"rdma: rank {refused[-1]} cannot register {LARGE} bytes: " in told[0]
    assert os.strerror(errno.ENOMEM) in told[0]
    assert world.fabric.counts["write"] == 0
    world.settle()
    check_at_rest(world)


def test_memory_that_can_be_registered_again_is_written_again(world: World) -> None:
    refused = [True, False]
    world.fabric.refuse_registration(lambda _, __, nbytes: nbytes == LARGE and refused[0])
    for number in range(2):
        world.send(0, 1, b"", bytes(LARGE))
        (arrival,) = world.arrivals(1, 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            assert world.receive(arrival) == bytes(LARGE)
        assert world.fabric.counts["bytes_written"] == number * LARGE
        world.nodes[1].arrivals.clear()
        refused.pop(0)


@pytest.mark.parametrize(
    "device",
    [{"receives": receives_for(2) - 1}, {"completions": completions_for(2) - 1}],
    ids=["receives", "completions"],
)
def test_a_device_that_is_too_small_says_what_to_do(device: dict[str, int]) -> None:
    world = World(3, device=device)
    world.send(0, 1, b"")
    with pytest.raises(TransportError, match="rank 0 needs more; use --transport tcp"):
        world.send(0, 2, b"")
    world.send(2, 1, b"")  # of which rank 1 hears when it has a link already
    world.run(lambda: 2 in world.nodes[1].lost_peers)
    assert "--transport tcp" in world.nodes[1].lost_peers[2]
    assert world.arrivals(1, 1)[0].peer == 0
    world.nodes[1].transport.forget(2, "no link")
    world.nodes[2].transport.forget(1, "no link")
    world.close()


def test_a_link_that_cannot_be_made_leaves_nothing(world: World) -> None:
    world.fabric.refuse_registration(lambda *_: True)
    with pytest.raises(TransportError, match=r"no link to rank 1: .*; use --transport tcp"):
        world.send(0, 1, b"")
    assert not world.device(0).pairs
    assert not world.transport(0).endpoint.owners
    assert world.device(0).live_regions == world.at_start[0]


def test_a_word_that_cannot_be_posted_is_the_end_of_the_link(world: World) -> None:
    world.connect()
    world.send(0, 1, b"", bytes(LARGE))
    (arrival,) = world.arrivals(1, 1)
    world.settle()
    world.link(1, 0).frames.queue.pair.send = refuse
    receiving = arrival.accept(memoryview(bytearray(LARGE)))
    world.settle()
    assert world.nodes[1].lost_peers == {0: str(GONE)}
    world.nodes[1].transport.forget(0, "it is lost")
    assert isinstance(receiving.error, PeerFailed)


@pytest.mark.parametrize("verb", ["poll", "receive_again"])
def test_a_device_that_fails_loses_every_peer(world: World, verb: str) -> None:
    world.connect()
    for _ in range(9):
        world.send(1, 0, b"", b"")
    world.fabric.run()
    setattr(world.device(0), verb, refuse)
    world.nodes[0].transport.progress()
    world.nodes[0].transport.progress()
    assert world.nodes[0].lost_peers == {1: str(GONE)}
    assert world.nodes[0].transport.is_idle()


GONE = VerbsError("it cannot", OSError("the device is gone"))


def refuse(*_: object) -> None:
    raise GONE


@pytest.mark.parametrize("answers", [0, 1, 40])
@pytest.mark.parametrize("pace", [1, 30])
def test_frames_get_memory_in_time_however_many_peers_there_are(pace: int, answers: int) -> None:
    number = 40
    world = World(8, pace=pace)
    peers = range(1, 8)
    for peer in peers:
        world.send(0, peer, b"first")
    world.run(lambda: all(node.arrivals for node in world.nodes[1:]))
    for peer in peers:
        for _ in range(number):
            world.send(0, peer, b"", bytes(PIECE))
        for _ in range(answers):
            world.send(peer, 0, b"", bytes(PIECE))
    assert not world.transport(0).endpoint.free
    world.settle()
    assert [len(node.arrivals) for node in world.nodes] == [7 * answers] + [number + 1] * 7
    for node in world.nodes:
        for arrival in node.arrivals:
            arrival.release()
    world.settle()
    check_at_rest(world)
    world.close()


# --- beginning and ending --------------------------------------------------------------------


def test_both_may_begin_at_once(world: World) -> None:
    world.send(0, 1, b"there", bytes(LARGE))
    world.send(1, 0, b"back", bytes(LARGE))
    assert world.receive(world.arrivals(1, 1)[0]) == bytes(LARGE)
    assert world.receive(world.arrivals(0, 1)[0]) == bytes(LARGE)
    assert [len(device.pairs) for device in world.fabric.devices] == [2, 2]
    world.settle()
    check_at_rest(world)


def test_numbers_of_messages_begin_anew_after_the_last(world: World) -> None:
    world.connect()
    world.link(0, 1)._next_id = 0xFFFFFFFF - 2
    for number in range(5):
        sending = world.send(0, 1, b"", bytes([number]) * LARGE)
        assert world.receive(world.arrivals(1, number + 1)[-1]) == bytes([number]) * LARGE
        world.run(lambda sending=sending: sending.done)
    world.settle()
    check_at_rest(world)


def test_close_does_not_wait_longer_than_it_may_for_one_that_is_silent(world: World) -> None:
    world.connect()
    for _ in range(2 * RECEIVES):
        world.send(0, 1, b"", bytes(10_000))
    began = time.monotonic()
    world.nodes[0].transport.close(0.2)
    assert 0.2 <= time.monotonic() - began < 1.0
    world.run(lambda: bool(world.nodes[1].arrivals), ranks=[1])
    for _ in range(9):
        world.send(1, 0, b"")
    world.run(lambda: bool(world.nodes[1].lost_peers), ranks=[1])
    assert world.nodes[1].ended == []


def test_who_closes_in_the_middle_of_a_transfer_leaves_no_memory_in_use(world: World) -> None:
    started = world.under_way()
    world.leave(1)
    before = bytes(started.into)
    world.run(lambda: world.nodes[0].ended == [1], ranks=[0])
    world.nodes[0].transport.forget(1, "it has left")
    assert started.into == before
    assert isinstance(started.sending.error, PeerFailed)


def test_buffered_bytes_are_owed_until_they_are_consumed(world: World) -> None:
    number = CREDIT // (EAGER_LIMIT + MESSAGE_COST)
    sent = [world.send(0, 1, b"", bytes(EAGER_LIMIT)) for _ in range(number + 1)]
    assert [transfer.done for transfer in sent] == [True] * number + [False]
    for arrival in world.arrivals(1, number + 1):
        arrival.release()
    world.settle()
    assert sent[-1].done
    check_at_rest(world)


def test_what_is_sent_to_one_that_computes_is_packed_into_the_last_frames(world: World) -> None:
    world.send(0, 1, b"", b"a link")
    world.arrivals(1, 1)
    world.quiet(0, 1)
    number = 500
    for i in range(number):
        world.send(0, 1, b"%d" % i, bytes([i % 256]) * 50)
    fabric = world.fabric
    sent = fabric.counts["send"]
    world.nodes[0].transport.close(5.0)  # rank 1 does nothing meanwhile: its device takes them
    assert fabric.counts["send"] - sent <= PACKED_RECEIVES + 1
    world.run(lambda: world.nodes[1].ended == [0], ranks=[1])
    arrivals = world.nodes[1].arrivals[1:]
    assert [arrival.header for arrival in arrivals] == [b"%d" % i for i in range(number)]
    assert [bytes(arrival.payload or b"")[:1] for arrival in arrivals] == [
        bytes([i % 256]) for i in range(number)
    ]
