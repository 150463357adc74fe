"""Where agents come that this launcher has not started: they call, with a key given beforehand.

For engines that start a process on each host, but carry nothing from it to here: pods, workers of
Ray and Dask. The other end is `agent_caller`.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
from collections.abc import Callable
from typing import Any, NamedTuple

from pycoll._launcher.line import Line
from pycoll._launcher.network_line import CallerLine
from pycoll._launcher.remote import RemoteHost
from pycoll._launcher.rendezvous_router import Caller, Router
from pycoll._rendezvous.wire import MAX_FRAME_NBYTES


class AgentCalls(NamedTuple):
    """How agents call.

    Attributes:
        listener: where; it stays the owner's.
        key: what they need to be let in.
        wait_s: how long to wait for them.
        failure: asked now and then: why one will not call, "" if it may.
    """

    listener: socket.socket
    key: bytes
    wait_s: float
    failure: Callable[[], str] = str


class Lobby:
    """Lets agents in, each as the host whose number it says.

    Args:
        calls: how they call.
        selector: the owner's loop; the data of a key is a function to call when it is ready.
        stack: what is opened is undone by it.
    """

    def __init__(
        self, calls: AgentCalls, selector: selectors.BaseSelector, stack: contextlib.ExitStack
    ) -> None:
        self._router = Router(calls.listener.fileno(), calls.key, 2 * MAX_FRAME_NBYTES)
        stack.callback(self._router.close)
        selector.register(self._router.fileno(), selectors.EVENT_READ, self._hear)
        self._hosts: dict[int, RemoteHost] = {}
        self._lines: dict[Caller, CallerLine] = {}
        self._guests: dict[Caller, RemoteHost] = {}

    def expect(self, node: int, host: RemoteHost) -> None:
        """Let the agent of this number be that of a host."""
        self._hosts[node] = host
        host.line = Line(host.hear, host.lose)
        host.line.close()  # nobody is there yet

    def _hear(self) -> None:
        for caller, frame in self._router.receive():
            if caller not in self._lines:
                self._lines[caller] = self._open(caller)
            self._lines[caller].came(frame)

    def _open(self, caller: Caller) -> CallerLine:
        def hear(kind: str, fields: list[Any]) -> None:
            host = self._guests.get(caller)
            if host is not None:
                host.hear(kind, fields)
            elif kind == "hello":
                self._admit(caller, fields[0])

        def lost(why: str) -> None:
            if caller in self._guests:
                self._guests[caller].lose(why)

        return CallerLine(caller, hear, lost)

    def _admit(self, caller: Caller, hello: dict[str, Any]) -> None:
        node = hello.get("node", -1)
        host = self._hosts.get(node)
        why = ""
        if host is None:
            why = f"the job has no node {node}"
        elif host in self._guests.values():
            why = f"{host.name} is node {node} already"
        if host is None or why:
            return self._lines[caller].send("turn_away", why)
        self._guests[caller] = host
        host.line, host.name = self._lines[caller], hello["host"]
        host.hear("hello", [hello])
