"""Ranks with simulated RDMA devices, and what must be left of them when they are at rest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import transport_world
from simulated_device import Fabric

from pycoll._transports.base import Transfer
from pycoll._transports.rdma import RdmaTransport, completions_for, receives_for
from pycoll._transports.rdma_frames import RECEIVES
from pycoll._transports.rdma_lane import FRAGMENT
from pycoll._transports.rdma_link import RdmaLink
from pycoll._transports.rdma_queues import SEND_SLOTS

ROUNDS = 20_000  # in which all ranks progress; what then is not done never will be
LARGE = 3 * FRAGMENT


class World(transport_world.World):  # type: ignore[misc,name-defined]
    """Some ranks with simulated devices, which can be chosen."""

    def __init__(
        self, size: int, seed: int = 0, device: dict[str, int] | None = None, **fabric: Any
    ) -> None:
        self._made = Fabric(seed, **fabric)
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

    def link(self, rank: int, peer: int) -> RdmaLink:
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
        lanes = sum(link.lanes.lane is not None for link in links.values())
        assert len(world.device(rank).pairs) == len(endpoint.owners) == len(links) + lanes
        for peer, link in links.items():
            other = world.link(peer, rank)
            assert not any((link._sends, link._receives, link._waiting, link._in_pieces))
            assert not link.frames._backlog
            assert not link.frames._begun
            assert link.frames.credits + other.frames._unreturned == RECEIVES
            assert (link.lanes.lane is None) == (other.lanes.lane is None)
            posted = link.lanes._last_writes
            if link.lanes.lane is not None:
                assert link.lanes.epoch == other.lanes.epoch
                assert link.lanes.lane.is_ready
                assert not link.lanes.lane._writes
                assert not len(link.lanes.lane.queue)
                posted += link.lanes.lane.last_writes
            assert posted - link.lanes._last_writes_lost == other.lanes.last_writes_received
            assert link._owed == other._unrepaid
    receives = [len(device.posted) for device in world.fabric.devices]
    assert receives == [18 * len(node.transport.links()) for node in world.nodes]
