"""How the hosts of a job reach each other: every one tries every other, before ranks start."""

from __future__ import annotations

import contextlib
import selectors
import socket
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pycoll._launcher.host import Host
from pycoll._launcher.reach import Doorman, HostAddresses, Reachability, Trial, own_addresses
from pycoll._launcher.remote import RemoteHost


class HostRoute(NamedTuple):
    """How one host reaches another: their names, and what was found out."""

    by: str
    to: str
    reach: Reachability


class HostRoutes:
    """The ways between all hosts.

    Args:
        key: the job's.
        hosts: all of them, in the order of their numbers; what is no `RemoteHost` is the launcher's
            own. Those that are have told their ports.
        names: theirs.
        selector: the owner's loop; the data of a key is a function to call when it is ready.
        done: called when every host has tried all others.
        stack: what is opened is undone by it.
        interface: only addresses of this interface are used ("": of all).
        address: the launcher's host is reached at this one ("": at those that it finds).
        measures: latency and bandwidth are measured, too.

    Attributes:
        found: what was found out, one after the other.

    Raises:
        OSError: this host cannot listen.
    """

    def __init__(
        self,
        key: bytes,
        hosts: Sequence[Host],
        names: Sequence[str],
        selector: selectors.BaseSelector,
        done: Callable[[], None],
        stack: contextlib.ExitStack,
        interface: str = "",
        address: str = "",
        measures: bool = False,
    ) -> None:
        self._key, self._hosts, self._names = key, hosts, names
        self._interface, self._own_address, self._measures = interface, address, measures
        self._selector, self._done = selector, done
        self.found: list[HostRoute] = []
        self._addresses: dict[tuple[int, int], str] = {}  # by the numbers: who reaches whom
        self._untried = list(range(len(hosts)))  # hosts that have not tried the others
        self._doorman: Doorman | None = None
        for number, host in enumerate(hosts):
            if not isinstance(host, RemoteHost):
                self._doorman = Doorman(key, number)
                stack.callback(self._doorman.close)
        if measures:  # one after the other: they would disturb each other
            self._try(0)
        else:
            for number in self._untried.copy():
                self._try(number)

    def address(self, by: Host, host: Host) -> str:
        """The address at which one host reaches another, or itself."""
        if by is host:  # anybody's will do
            by = next(other for other in self._hosts if other is not host)
        return self._addresses[self._hosts.index(by), self._hosts.index(host)]

    def told(self, host: Host, found: Sequence[Reachability]) -> None:
        """Called when it is known how a host reaches the others."""
        by = self._hosts.index(host)
        for reach in found:
            self._addresses[by, reach.node] = reach.address
            self.found.append(HostRoute(self._names[by], self._names[reach.node], reach))
        self._untried.remove(by)
        if self._measures and self._untried:
            self._try(self._untried[0])
        if not self._untried:
            if self._doorman is not None:
                self._doorman.close()
            self._done()

    def failures(self) -> list[str]:
        """Return who cannot reach whom, and why: a line each."""
        lost = [way for way in self.found if not way.reach.address]
        return [f"{way.by} cannot reach {way.to}: {'; '.join(way.reach.failures)}" for way in lost]

    def _try(self, number: int) -> None:
        by = self._hosts[number]
        targets = []
        for node, host in enumerate(self._hosts):
            if host is by:
                continue
            if isinstance(host, RemoteHost):
                port = host.port
            else:
                assert self._doorman is not None
                port = self._doorman.port
            targets.append(HostAddresses(node, port, self._candidates(by, host)))
        if isinstance(by, RemoteHost):
            by.reach(targets, self._measures)
            return

        def hear(found: Sequence[Reachability]) -> None:
            self.told(by, found)

        Trial(self._selector, hear, targets, self._key, measures=self._measures)

    def _candidates(self, by: Host, host: Host) -> list[str]:
        """Addresses at which one host may reach another, those that its starter has used first."""
        if isinstance(host, RemoteHost):
            told, every = host.hello["reached"], host.hello["addresses"]
        elif self._own_address:
            return [self._own_address]
        else:
            told = by.hello["launcher"] if isinstance(by, RemoteHost) else ""
            every = own_addresses()
        if wanted := self._interface:
            return [address for interface, address in every if interface == wanted]
        return list(dict.fromkeys([*filter(None, [told]), *(address for _, address in every)]))


def without_interface(wanted: str, hosts: Sequence[Host], names: Sequence[str]) -> list[str]:
    """Say which hosts have no address on an interface, and what they have: a line each."""
    lines = []
    for host, name in zip(hosts, names, strict=True):
        if isinstance(host, RemoteHost):
            every, addresses = host.hello["interfaces"], host.hello["addresses"]
        else:
            every, addresses = [one for _, one in socket.if_nameindex()], own_addresses()
        usable = list(dict.fromkeys(interface for interface, _ in addresses))
        if wanted not in every:
            lines.append(f"{name} has no interface {wanted}; it has {', '.join(every)}")
        elif wanted not in usable:
            others = ", ".join(usable) or "no other"
            lines.append(
                f"{name} has no address on {wanted} that others could reach; {others} has one"
            )
    return lines
