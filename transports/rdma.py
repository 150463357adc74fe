"""RDMA: one rank's device writes into another rank's memory, by verbs (pyverbs).

verbs             pyverbs: devices, regions of memory
verbs_queue_pair  one end of a connection, by pyverbs
verbs_errors      how calls of pyverbs and work requests fail
registrations     memory that is registered with the device, kept for the next time
rdma_queues       what all links share: memory for frames, completions
rdma_frames       an ordered stream of messages to a peer, of sends
rdma_lane         writes into a peer's memory
rdma_elsewhere    memory of GPUs, which the device reaches itself
rdma_renewal      when a lane is thrown away, and the next is made
rdma_link         what travels between two ranks, and when memory is whose
this file         the transport contract, out of these
"""

from __future__ import annotations

import errno
import os
import select
import struct
import time
import warnings
from collections import deque
from collections.abc import Sequence
from ipaddress import IPv6Address
from typing import Any, ClassVar

from pycoll._transports.base import Elsewhere, Handler, Parts, Reach, Transfer, Transport
from pycoll._transports.rdma_devices import INFINIBAND, ChosenDevice
from pycoll._transports.rdma_elsewhere import Reaches
from pycoll._transports.rdma_frames import RECEIVES, SPARE_RECEIVES
from pycoll._transports.rdma_lane import MOST_WRITES
from pycoll._transports.rdma_link import RdmaLink
from pycoll._transports.rdma_queues import Endpoint
from pycoll._transports.registrations import locked_limit
from pycoll._transports.verbs import MAX_SENDS, DevicePort, probe
from pycoll._transports.verbs_errors import SUCCESS, VerbsError, explain
from pycoll.errors import PeerFailed, TransportError

COMPLETIONS = RECEIVES + SPARE_RECEIVES + MAX_SENDS + MOST_WRITES
"""Of one link that may wait to be polled."""


class RdmaTransport(Transport):
    """The rdma transport of one rank; see the module's text.

    Args:
        rank: this rank's number in the job.
        device: opened with `receives_for` and `completions_for` the other ranks; it is closed with
            this.
        network: name of the network that its port is in.
    """

    name: ClassVar[str] = "rdma"

    def __init__(self, rank: int, device: DevicePort, network: str) -> None:
        self.endpoint = Endpoint(device)
        self.reaches = Reaches(rank, self.endpoint)
        self._network = network
        self._rank = rank
        self._device = device
        self._addresses: Sequence[dict[str, Any]] = ()
        self._handler: Handler | None = None
        self._links: dict[int, RdmaLink] = {}
        self._most_links = most_links(device)
        self._forgotten: dict[int, str] = {}
        self._notes: deque[tuple[int, bytes]] = deque()
        self._finished: deque[tuple[Transfer, BaseException | None]] = deque()
        self._failed: deque[RdmaLink] = deque()
        self._has_warned = False
        self._is_broken = False
        self._pid = os.getpid()
        self._closed = False

    @property
    def is_closing(self) -> bool:
        """Whether what comes now comes too late."""
        return self._closed

    @property
    def handler(self) -> Handler:
        """Who is told what comes."""
        assert self._handler is not None
        return self._handler

    def address(self) -> dict[str, Any]:
        device = self._device
        return {"network": self._network, "gid": device.gid, "lid": device.lid, "mtu": device.mtu}

    def start(self, addresses: Sequence[dict[str, Any]], handler: Handler) -> None:
        self._addresses = addresses
        self._handler = handler

    def send(self, peer: int, header: bytes, parts: Parts) -> Transfer:
        return self._start(peer, header, parts, may_buffer=True)

    def offer(self, peer: int, header: bytes, parts: Parts) -> Transfer:
        return self._start(peer, header, parts, may_buffer=False)

    def _start(self, peer: int, header: bytes, parts: Parts, may_buffer: bool) -> Transfer:
        reason = self._forgotten.get(peer)
        if reason is not None:
            transfer = Transfer()
            transfer.finish(PeerFailed(peer, reason))
            return transfer
        link = self._links.get(peer) or self._open_link(peer)
        return link.send(header, parts, may_buffer)

    def reach(self, part: memoryview, elsewhere: Elsewhere) -> Reach | None:
        return self.reaches.reach(part, elsewhere)

    def _open_link(self, peer: int) -> RdmaLink:
        if len(self._links) >= self._most_links:
            raise TransportError(
                f"rdma: the device has queues for {self._most_links} peers of a rank, and rank "
                f"{self._rank} needs more; use --transport tcp"
            )
        try:
            link = RdmaLink(self, peer, self._addresses[peer])
        except VerbsError as exc:
            raise TransportError(
                f"rdma: no link to rank {peer}: {exc}; use --transport tcp"
            ) from exc
        self._links[peer] = link
        self.handler.tell(peer, link.hello())
        return link

    def hear(self, peer: int, note: bytes) -> None:
        self._notes.append((peer, note))

    def why_forgotten(self, peer: int) -> str | None:
        """Return why a peer was forgotten, None if it was not."""
        return self._forgotten.get(peer)

    # --- progress --------------------------------------------------------------------------

    def progress(self) -> bool:
        worked = self._read_letters()
        endpoint = self.endpoint
        if not endpoint.arrived:
            endpoint.poll()
        links: dict[RdmaLink, None] = {}
        # A handler may let this transport progress, too: then first with what came before.
        while endpoint.arrived:
            link = self._take(endpoint.arrived.popleft())
            if link is not None:
                links[link] = None
            worked = True
        if worked:
            if endpoint.is_short and endpoint.free:
                endpoint.is_short = False
                links = dict.fromkeys(self._links.values())
            for link in links:
                if not link.failure:
                    link.pump()
        while self._finished:
            transfer, error = self._finished.popleft()
            transfer.finish(error)
            worked = True
        self._give_up()
        while self._failed:
            link = self._failed.popleft()
            self.handler.lost(link.peer, link.failure)
            worked = True
        return worked

    def _give_up(self) -> None:
        """Give up the links that do not work any more."""
        endpoint = self.endpoint
        while endpoint.failing:
            self.fail(*endpoint.failing.popleft())
        if endpoint.failure and not self._is_broken:
            self._is_broken = True
            for link in self._links.values():
                self.fail(link, endpoint.failure)

    def _take(self, completion: Any) -> RdmaLink | None:
        """Take in a completion; returns the link that it belongs to."""
        endpoint = self.endpoint
        if endpoint.is_receive(completion):
            link: RdmaLink | None = None
            if completion.status == SUCCESS:
                link = endpoint.owners.get(completion.qp_num)
            try:
                if link is not None:
                    link.received(completion, endpoint.frame(completion))
            except (ValueError, struct.error) as exc:
                assert link is not None
                self.fail(link, f"what it sent makes no sense ({exc})")
            finally:
                endpoint.receive_again(completion)
            return link
        queue = endpoint.queue_of(completion)
        if queue is None:
            return None  # of a queue pair that is gone
        link = queue.owner
        if completion.status == SUCCESS:
            queue.complete(completion)
        elif link.lanes.is_present(queue):
            queue.fail(completion)
            link.lanes.failed(completion.status)
        else:
            self.fail(link, explain(completion.status))
        return link

    def _read_letters(self) -> bool:
        worked = False
        while self._notes:
            peer, note = self._notes.popleft()
            worked = True
            if peer in self._forgotten or (self._closed and peer not in self._links):
                continue
            try:
                link = self._links.get(peer) or self._open_link(peer)
            except TransportError as exc:
                self.handler.lost(peer, str(exc))
                continue
            if link.failure:
                continue
            try:
                answer = link.hear(note)
            except VerbsError as exc:
                self.fail(link, str(exc))
                continue
            if answer is not None:
                self.handler.tell(peer, answer)
            link.pump()
        return worked

    def finish_soon(self, transfer: Transfer, error: BaseException | None) -> None:
        """Finish a transfer at the end of `progress`, where its callback may do anything."""
        self._finished.append((transfer, error))

    def fail(self, link: RdmaLink, reason: str) -> None:
        """Give up a link; its peer is lost."""
        if not link.failure:
            link.close(reason)
            self._failed.append(link)

    def warn(self, error: VerbsError) -> None:
        """Say once that data is copied because memory cannot be registered."""
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"rdma: rank {self._rank} {error}{memory_hint()}. What it sends and receives is "
                "copied through small buffers, which is slower.",
                RuntimeWarning,
                stacklevel=2,
            )

    # --- waiting ---------------------------------------------------------------------------

    @property
    def is_behind(self) -> bool:
        return bool(self.endpoint.behind)

    def fileno(self) -> int:
        return self._device.fileno()

    def sleep(self) -> bool:
        self.endpoint.arm()
        return self.is_idle()

    def is_idle(self) -> bool:
        endpoint = self.endpoint
        if self._notes or self._finished or self._failed or endpoint.failing:
            return False
        if endpoint.arrived or endpoint.poll():
            return False
        return self._is_broken or not endpoint.failure

    def awake(self) -> None:
        self._device.disarm()

    # --- links -----------------------------------------------------------------------------

    def forget(self, peer: int, reason: str) -> None:
        if peer in self._forgotten:
            return
        self._forgotten[peer] = reason
        link = self._links.get(peer)
        if link is not None:
            link.close(reason)
            link.forget(reason)

    def links(self) -> list[int]:
        return sorted(self._links)

    def close(self, timeout_s: float) -> None:
        if self._closed:
            return
        self._closed = True
        if os.getpid() != self._pid:
            return  # after a fork: all is the parent's
        deadline = time.monotonic() + timeout_s
        for link in self._links.values():
            if not link.failure:
                link.say_goodbye()
        self._deliver(deadline)
        for link in self._links.values():
            link.close("its transport is closed")
        self.endpoint.close()
        self._device.close()

    def _deliver(self, deadline: float) -> None:
        """Wait until all frames are where they shall go, or until the deadline."""
        poller = select.poll()
        poller.register(self.fileno(), select.POLLIN)
        while True:
            worked = self.progress()
            waiting = [
                link
                for link in self._links.values()
                if not (link.failure or link.has_ended or link.frames.is_empty)
            ]
            remaining_s = deadline - time.monotonic()
            if not waiting or remaining_s <= 0:
                return
            if any(not link.frames.is_open for link in waiting):
                for peer in self.handler.listen(min(remaining_s, 0.01)):
                    if peer in self._links and not self._links[peer].frames.is_open:
                        self._links[peer].close("it has ended")
            elif not worked:
                if self.sleep():
                    poller.poll(min(remaining_s, 0.1) * 1000)
                self.awake()


def open_rdma(rank: int, size: int, choice: ChosenDevice) -> RdmaTransport | str:
    """Open the transport of one rank of `size`; returns why it cannot be used if it cannot.

    To find out, a message is sent over two queue pairs: a device that opens need not be able to.
    """
    name, port, gid = choice.device, choice.port, choice.gid.table_index
    device: DevicePort | None = None
    try:
        device = DevicePort(name, port, gid, receives_for(size - 1), completions_for(size - 1))
        reason = probe(device)
        if reason is None:
            return RdmaTransport(rank, device, _network(choice))
        reason = f"{choice}: {reason}"
    except VerbsError as exc:
        reason = f"{name}: {exc}{memory_hint() if exc.code == errno.ENOMEM else ''}"
    if device is not None:
        device.close()
    return reason


def _network(choice: ChosenDevice) -> str:
    """Return what two ports have in common that may reach each other."""
    if choice.link_layer != INFINIBAND:
        return choice.link_layer
    prefix = ":".join(IPv6Address(choice.gid.address).exploded.split(":")[:4])
    return f"{choice.link_layer} subnet {prefix}"


def receives_for(peers: int) -> int:
    """Return how many receives a device must have for links to so many peers."""
    return peers * (RECEIVES + SPARE_RECEIVES)


def completions_for(peers: int) -> int:
    """Return how many completions may have to wait there."""
    return peers * COMPLETIONS


def most_links(device: DevicePort) -> int:
    """Return to how many peers a device can have links."""
    return min(device.receives // (RECEIVES + SPARE_RECEIVES), device.completions // COMPLETIONS)


def memory_hint() -> str:
    """Return what to do about the limit of locked memory, "" if there is none."""
    limit = locked_limit()
    if limit is None:
        return ""
    return (
        f"; this process may lock {limit // 1024} KiB: raise `ulimit -l` "
        "(memlock in /etc/security/limits.conf, LimitMEMLOCK= of a service, --ulimit memlock=-1 "
        "of a container)"
    )
