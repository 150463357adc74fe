"""Random programs of a few ranks with simulated RDMA devices.

Their memory is watched while they send, accept, redirect and give up, and their devices fail them.
Longer: RDMA_SEEDS=10000 pytest -m "".
"""

from __future__ import annotations

import os
import random
import struct
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from rdma_world import LARGE, World, check_at_rest

from pycoll._transports.base import EAGER_LIMIT, Arrival, Transfer, Withdrawn
from pycoll._transports.rdma_frames import PIECE
from pycoll._transports.rdma_lane import FRAGMENT
from pycoll._transports.rdma_queues import SLOT
from pycoll.errors import PeerFailed

SEEDS = int(os.environ.get("RDMA_SEEDS", "60"))
STEPS = 150  # of a random program
NUMBER = struct.Struct("<I")
GUARD = 64  # bytes after the memory of a receive, which are nobody's
BEFORE, AFTER = 0xA5, 0x5A  # what memory holds before it is the transport's, and after
SIZES = [0, 1, 100, 300, PIECE - 8, PIECE, PIECE + 1, SLOT, EAGER_LIMIT - 1, EAGER_LIMIT]
LARGE_SIZES = [EAGER_LIMIT + 1, 100_000, FRAGMENT - 1, FRAGMENT, FRAGMENT + 1, LARGE + 5]


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
