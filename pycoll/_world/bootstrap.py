"""How a rank meets the others, and opens what it reaches them by."""

from __future__ import annotations

import contextlib
import errno
import os
import time

# Not when an exception is shown: this import evaluates a string, after which Python forgets that
# it must end with the status of an interrupt.
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pycoll._rendezvous.client import Client
from pycoll._runtime.engine import Engine
from pycoll._selection import agreed
from pycoll._support.environment import encrypts
from pycoll._support.ports import endpoint
from pycoll._transports import network
from pycoll._transports._core import with_default_floats
from pycoll._transports.base import Transport
from pycoll._transports.shm import give_back, open_host, tally_place
from pycoll.errors import BootstrapError, TransportError

if TYPE_CHECKING:
    from pycoll._runtime.engine import SharedMemory
    from pycoll._transports.core import CoreTransport
from pycoll._world.placement import JobPlacement


def join(place: JobPlacement, timeout: float, chosen: str, op_timeout: float) -> Engine:
    """Meet the others and return the engine that talks to them."""
    if not place.rendezvous:
        engine = _alone(place.rank, op_timeout)
        engine.agreed = agreed.agree([{"node": place.node, **agreed.said(os.environ, place.rank)}])
        return engine
    control = Client(place.rendezvous, place.key, place.rank, place.size, link=place.link)
    opened: list[Transport] = []
    try:
        try:
            bootstrap = Bootstrap(place, chosen, control, timeout, opened)
        except TransportError:
            control.raise_if_late(timeout)  # it may be a rank's child: say that first
            raise
        shared_memory = bootstrap.shared_memory or bootstrap.no_shared_memory
        engine = Engine(bootstrap.core, place.size, control, op_timeout, shared_memory)
        counted = tally_place(place.memory, place.local_rank, place.local_size)
        if counted is not None:
            with contextlib.suppress(OSError, ValueError):  # nobody counts, then
                bootstrap.core.core.count_in(*counted)
    except BaseException:
        for transport in opened:
            transport.close(0.0)
        control.close(1.0)
        raise
    finally:
        if place.is_adopted:
            give_back(place.memory)
    engine.hosts, engine.agreed = bootstrap.hosts, bootstrap.agreed
    engine.under_another_launcher = place.is_adopted
    bootstrap.start(engine)
    return engine


def _alone(rank: int, op_timeout: float) -> Engine:
    """Return the engine of a job of one rank, whom no launcher has started."""
    from pycoll._transports.core import CoreTransport

    core = CoreTransport(rank, 1)
    engine = Engine(core, 1, None, op_timeout)
    core.start([{}], engine)
    return engine


def cannot_join(rank: int, exc: OSError) -> BootstrapError:
    """Return the error for what the system does not give this process."""
    text = f"rank {rank} cannot join the job: {exc.strerror or exc}"
    if exc.errno in (errno.EMFILE, errno.ENFILE):
        text += ": close what is not needed, or allow more (ulimit -n)"
    return BootstrapError(text)


class Bootstrap:
    """The ranks tell each other how they can be reached, and all decide alike.

    Args:
        place: this rank's.
        chosen: the transport that the user wants, "auto" for the best.
        control: not joined yet.
        timeout: seconds for the job to meet.
        opened: gets every transport that is opened here.

    Attributes:
        shared_memory: this host's; None: `no_shared_memory` says why not.
        core: moves all messages.
        hosts: by rank the number of its host.
        agreed: what all go by.
    """

    def __init__(
        self,
        place: JobPlacement,
        chosen: str,
        control: Client,
        timeout: float,
        opened: list[Transport],
    ) -> None:
        self.shared_memory: SharedMemory | None = None
        self.no_shared_memory = "there is one rank"
        doorbell = -1
        self._chosen = chosen
        self._rank = place.rank
        self._rdma: Transport | None = None
        self._net: Transport | None = None
        self._net_addresses: list[dict[str, Any]] = []
        encrypt = encrypts(os.environ)
        own: dict[str, Any] = {"node": place.node, **agreed.said(os.environ, place.rank)}
        if place.size > 1:
            own |= network.said(chosen)
            memory = _open_shared_memory(place, chosen)
            if isinstance(memory, str):
                self.no_shared_memory = memory
            else:
                self.shared_memory, doorbell = memory
                own["shm"] = {}
            if not encrypt:
                self._rdma = _open_rdma(place, chosen)
            if self._rdma is not None:
                opened.append(self._rdma)
                own["rdma"] = self._rdma.address()
        deadline = time.monotonic() + timeout
        self._infos: Sequence[dict[str, Any]] = control.join(own, timeout)
        self.agreed = with_default_floats(agreed.agree, self._infos)
        self.hosts = nodes = tuple(info["node"] for info in self._infos)
        sharing = ["shm" in info for info in self._infos]
        needs_network = self._needs_network(all(sharing))
        self._settle_shared_memory(place, sharing)
        name = network.choose(self._infos, encrypt) if needs_network else ""
        if needs_network and name == network.ZMQ:
            self._net = network.open_zmq(place.rank, place.key, place.addresses, encrypt)
            opened.append(self._net)
        self.core = self._open_core(place, needs_network and name == network.TCP, doorbell)
        if needs_network and self._net is None:
            self._net = self.core
        opened.append(self.core)
        if self._net is not None:
            left = max(0.0, deadline - time.monotonic())
            said = control.exchange(self._net.address(), left)
            self._net_addresses = [
                _seen_from_here(address, place.addresses.get(node))
                for address, node in zip(said, nodes, strict=True)
            ]
            # zmq encrypts between real hosts also when nobody has asked for that.
            if place.rank == 0 and place.addresses and name != network.ZMQ:
                self._tell_unencrypted(place, control)

    def _settle_shared_memory(self, place: JobPlacement, sharing: Sequence[bool]) -> None:
        """Give up this host's memory if not all its ranks use it, or there is one only."""
        if self.shared_memory is None:
            return
        peers = [rank for rank, node in enumerate(self.hosts) if node == place.node]
        without = next((rank for rank in peers if not sharing[rank]), None)
        if without is not None:
            self.no_shared_memory = f"rank {without} cannot use it"
            self.shared_memory = None
        elif len(peers) == 1:
            self.no_shared_memory = "there is one rank on this host"
            self.shared_memory = None

    def _open_core(self, place: JobPlacement, listens: bool, doorbell: int) -> CoreTransport:
        """Open the core's engine.

        Args:
            place: this rank's.
            listens: the core is to reach others by tcp.
            doorbell: this rank's.
        """
        from pycoll._transports.core import CoreTransport, LinkMemory

        memory, net, shared = None, None, self.shared_memory
        if shared is not None:
            memory = LinkMemory(shared.host, doorbell, shared.ranks, shared.single_copy)
        if listens:
            from pycoll._transports.core_tcp import TcpNetwork

            table = self.agreed.table
            lanes = network.lanes(os.environ, 1 if table is None else table.lanes)
            net = TcpNetwork(place.key, network.listening_at(place.addresses), lanes)
        outside = {}
        for rank in range(place.size):
            transport = self._outside(rank)
            if transport is not None:
                outside[rank] = transport
        return CoreTransport(place.rank, place.size, memory, net, outside)

    def _outside(self, rank: int) -> Transport | None:
        """Return the transport to a rank that the core does not reach by itself."""
        shared = self.shared_memory
        if rank == self._rank or (shared is not None and rank in shared.ranks):
            return None
        return self._network_to(rank)

    def _tell_unencrypted(self, place: JobPlacement, control: Client) -> None:
        """Have the launcher tell the user, if the network connects hosts."""
        if not place.is_adopted and self._is_between_hosts():
            control.post("unencrypted")

    def _is_between_hosts(self) -> bool:
        """Whether the network connects ranks of different hosts, since RDMA does not."""
        networks = {self._network(rank) for rank in range(len(self._infos))}
        return len(set(self.hosts)) > 1 and (None in networks or len(networks) > 1)

    def _needs_network(self, all_share: bool) -> bool:
        """Whether there are two ranks in the job that neither shared memory nor RDMA connects.

        Raises:
            TransportError: the user wants RDMA alone.
        """
        networks = [self._network(rank) for rank in range(len(self._infos))]
        if self._chosen == "rdma" and len(networks) > 1:
            if None in networks or len(set(networks)) > 1:
                raise TransportError(_apart(networks))
            return False
        return self._is_between_hosts() or (not all_share and len(networks) > 1)

    def _network(self, rank: int) -> str | None:
        """Return in which network a rank can be reached by RDMA."""
        network: str | None = self._infos[rank].get("rdma", {}).get("network")
        return network

    def _network_to(self, rank: int) -> Transport | None:
        """Return the transport to a rank that shares no memory with this one."""
        elsewhere = self._chosen == "rdma" or self.hosts[rank] != self.hosts[self._rank]
        if self._rdma is not None and elsewhere:
            own = self._network(self._rank)
            if own == self._network(rank):
                return self._rdma
        return self._net

    def start(self, engine: Engine) -> None:
        """Start what was opened."""
        self.core.start(self._net_addresses, engine)
        outside = self.core.outside
        if self._rdma is not None:
            outside.start(self._rdma, [info.get("rdma", {}) for info in self._infos], engine)
        if self._net is not None and self._net is not self.core:
            outside.start(self._net, self._net_addresses, engine)
        engine.admit()


def _open_shared_memory(place: JobPlacement, chosen: str) -> tuple[SharedMemory, int] | str:
    """Open the shared memory of this host; returns it and this rank's doorbell, or why not.

    Raises:
        TransportError: the user wants nothing else.
    """
    if chosen in (*network.NETWORKS, "rdma"):
        return f"the transport is {chosen}"
    found = open_host(
        {"PYCOLL_SHM": place.memory}, place.local_rank, place.local_size, place.is_adopted
    )
    if chosen == "shm":
        if isinstance(found, str):
            raise TransportError(f"shm: {found}; use --transport auto")
        if place.local_size < place.size:
            others = place.size - place.local_size
            raise TransportError(
                f"shm: {others} rank{'s are' if others > 1 else ' is'} on other hosts; "
                "use --transport auto, which uses the network between hosts"
            )
    if isinstance(found, str):
        return found
    from pycoll._runtime.engine import SharedMemory

    ranks = place.local_ranks
    host, doorbell = found
    single_copy = os.environ.get("PYCOLL_SINGLE_COPY") != "0"
    return SharedMemory(host, ranks, single_copy), doorbell


def _seen_from_here(said: dict[str, Any], host: str | None) -> dict[str, Any]:
    """Where a rank listens that has said so, when this host reaches its host at `host`."""
    if host is None:
        return said
    port = said["endpoint"].rpartition(":")[2]
    return {**said, "endpoint": endpoint(host, port)}


def _open_rdma(place: JobPlacement, chosen: str) -> Transport | None:
    """Open the RDMA device of this host, where it may be of use.

    Raises:
        TransportError: the user wants nothing else.
    """
    if chosen != "rdma" and (chosen != "auto" or place.local_size == place.size):
        return None
    from pycoll._transports.rdma_devices import find, ports

    if chosen == "auto" and not ports():
        return None
    found = find(os.environ)
    if not isinstance(found, str):
        from pycoll._transports.rdma import open_rdma

        opened = open_rdma(place.rank, place.size, found)
        if not isinstance(opened, str):
            return opened
        found = opened
    if chosen == "rdma":
        raise TransportError(f"rdma: {found}; use --transport auto")
    if place.local_rank == 0:
        text = f"rdma: {found}. The hosts of this job communicate by TCP."
        warnings.warn(text, RuntimeWarning, stacklevel=5)
    return None


def _apart(networks: Sequence[str | None]) -> str:
    """Return why RDMA does not connect all ranks."""
    other = next(rank for rank, network in enumerate(networks) if network != networks[0])
    return (
        f"rdma: rank 0 is in the network {networks[0]}, but rank {other} is in {networks[other]}; "
        "use --transport auto, or name other devices in PYCOLL_RDMA_DEVICE"
    )
