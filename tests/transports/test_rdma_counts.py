"""What the rdma transport costs: work requests, registrations and bytes, counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tiers import smoke
from transport_world import World

from pycoll._transports.base import CREDIT, EAGER_LIMIT, MESSAGE_COST
from pycoll._transports.rdma_frames import PIECE, RECEIVES
from pycoll._transports.rdma_lane import FRAGMENT
from pycoll._transports.rdma_queues import SLOT
from pycoll._transports.verbs import INLINE

HEADER = b"h" * 30  # about what the engine's take
MOST_INLINE = INLINE - (SLOT - PIECE) - len(HEADER)
LARGE = 3 * FRAGMENT


@pytest.fixture
def world() -> Iterator[World]:
    """Two ranks that have a link."""
    made = World("rdma, simulated", 2)
    transfer(made, np.zeros(1, np.uint8))
    yield made
    made.close()


def settle(world: World) -> None:
    """Let everything happen that can."""
    while True:
        world.fabric.run()
        worked = any([node.transport.progress() for node in world.nodes])
        if not worked and not world.fabric.busy:
            return


def transfer(world: World, data: np.ndarray, into: np.ndarray | None = None) -> Counter[str]:
    """Move an array from rank 0 to rank 1; returns what that took, at both ends."""
    before = world.fabric.counts.copy()
    world.send(0, 1, HEADER, data.data)
    (arrival,) = world.arrivals(1, 1)
    world.nodes[1].arrivals.clear()
    into = np.empty_like(data) if into is None else into
    received = arrival.accept(into.data)
    settle(world)
    assert received.done
    assert received.error is None
    assert np.array_equal(into, data)
    return +(world.fabric.counts - before)


@pytest.mark.parametrize("nbytes", [0, 8, MOST_INLINE])
def test_a_small_message_is_one_inline_send(world: World, nbytes: int) -> None:
    counts = transfer(world, np.ones(nbytes, np.uint8))
    assert counts["send"] == counts["inline"] == 1
    assert counts["write"] == counts["register"] == 0


@pytest.mark.parametrize("nbytes", [MOST_INLINE + 1, PIECE - len(HEADER)])
def test_a_message_that_fits_into_a_frame_is_one_send(world: World, nbytes: int) -> None:
    counts = transfer(world, np.ones(nbytes, np.uint8))
    assert counts["send"] == 1
    assert counts["inline"] == counts["write"] == counts["register"] == 0


def test_a_buffered_message_takes_as_many_frames_as_it_fills(world: World) -> None:
    counts = transfer(world, np.ones(EAGER_LIMIT, np.uint8))
    assert counts["send"] == -(-EAGER_LIMIT // PIECE)
    assert counts["write"] == counts["register"] == 0


@smoke
def test_a_large_array_is_written_from_memory_to_memory(world: World) -> None:
    data, into = np.ones(LARGE, np.uint8), np.zeros(LARGE, np.uint8)
    first = transfer(world, data, into)
    assert first["register"] == 2  # one at each end
    assert first["write"] == 3
    assert first["bytes_written"] == LARGE
    assert first["send"] == 6  # READY, GO, and once from each end LANE and USE
    again = transfer(world, data, into)
    assert again["register"] == 0
    assert again["write"] == 3
    assert again["bytes_written"] == LARGE
    assert again["send"] == again["inline"] == 2  # READY and GO
    assert again["bytes_sent"] <= 2 * INLINE  # nothing of the payload among them


def test_pieces_of_an_array_need_no_registration_of_their_own(world: World) -> None:
    data, into = np.ones(4 * LARGE, np.uint8), np.zeros(4 * LARGE, np.uint8)
    transfer(world, data, into)
    for begin in range(0, 4 * LARGE, LARGE):
        part = slice(begin, begin + LARGE)
        assert transfer(world, data[part], into[part])["register"] == 0


def test_small_parts_of_a_large_payload_are_not_registered(world: World) -> None:
    data = np.ones(LARGE, np.uint8)
    transfer(world, data)
    before = world.fabric.counts.copy()
    world.send(0, 1, HEADER, b"begin", data.data, b"end")
    into = np.zeros(LARGE + 8, np.uint8)
    world.arrivals(1, 1)[0].accept(into.data)
    settle(world)
    assert into.tobytes() == b"begin" + data.tobytes() + b"end"
    counts = world.fabric.counts - before
    assert counts["register"] == 1  # where it goes
    assert counts["write"] == 5


def test_a_payload_of_many_small_parts_is_packed_into_frames(world: World) -> None:
    parts = [b"%07d " % number for number in range(20_000)]
    before = world.fabric.counts.copy()
    world.send(0, 1, HEADER, *parts)
    into = bytearray(8 * len(parts))
    world.arrivals(1, 1)[0].accept(memoryview(into))
    settle(world)
    assert into == b"".join(parts)
    counts = world.fabric.counts - before
    assert counts["send"] <= 2 * len(into) // PIECE + 10


def test_traffic_one_way_is_given_back_in_every_eighth_frame_at_most(world: World) -> None:
    number = 100 * RECEIVES
    before = world.fabric.counts["send"]
    for _ in range(number):
        world.send(0, 1, HEADER, b"")
        world.nodes[1].transport.progress()
        while world.nodes[1].arrivals:
            world.nodes[1].arrivals.pop().release()
        world.nodes[0].transport.progress()
    settle(world)
    back = -(-number // (RECEIVES // 2)) + number * (MESSAGE_COST) // (CREDIT // 4) + 1
    assert world.fabric.counts["send"] - before <= number + back


def test_traffic_both_ways_gives_back_without_frames_of_its_own(world: World) -> None:
    number = 100 * RECEIVES
    before = world.fabric.counts["send"]
    for _ in range(number):
        for source, dest in ((0, 1), (1, 0)):
            world.send(source, dest, HEADER, b"")
            world.run(lambda dest=dest: bool(world.nodes[dest].arrivals))
            world.nodes[dest].arrivals.pop().release()
    repaid = 2 * (number * MESSAGE_COST // (CREDIT // 4) + 1)
    assert world.fabric.counts["send"] - before <= 2 * number + repaid


def test_a_write_is_no_longer_than_the_device_takes() -> None:
    class Small(World):  # type: ignore[misc,valid-type]
        def make(self, kind: str, size: int) -> list[Any]:
            transports: list[Any] = super().make(kind, size)
            for transport in transports:
                transport.endpoint.device.max_message = FRAGMENT // 4
            return transports

    world = Small("rdma, simulated", 2)
    assert transfer(world, np.ones(LARGE, np.uint8))["write"] == 12
    world.close()
