"""Messages and probes, prepared: arguments are checked, and nothing is sent yet.

This is the way through Python. A NumPy array or an object of a common type takes none of these: its
method is the C core's (`messages_type.c`), which calls Python for all else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pycoll._arrays import conversion
from pycoll._calls import arguments, message_steps
from pycoll._calls.call_plan import CallPlan
from pycoll._calls.preparing import Preparing
from pycoll._runtime.envelope import ANY_SOURCE, ANY_TAG, PROC_NULL, Held, Status

if TYPE_CHECKING:
    from pycoll._arrays.value import Value
    from pycoll._calls.group import Numbered
    from pycoll._runtime.task import CallSteps


Matched = tuple[Status, Held | None]
"""What a matched probe has found; None: the message of PROC_NULL."""

Receive = Callable[["Value | None", "int | None"], "CallSteps"]
"""Receives into an array, or new memory, on that GPU if on one."""


class PointToPointCalls(Preparing):
    """Prepares messages and probes; a part of `Calls`."""

    def send(self, x: Any, dest: int, tag: int = 0) -> CallPlan[None]:
        return self._send("send", x, dest, tag)

    def ssend(self, x: Any, dest: int, tag: int = 0) -> CallPlan[None]:
        """Prepare a send that is done when it is received."""
        return self._send("ssend", x, dest, tag)

    def bsend(self, x: Any, dest: int, tag: int = 0) -> CallPlan[None]:
        """Prepare a send that copies its value."""
        return self._send("bsend", x, dest, tag)

    def _send(self, name: str, x: Any, dest: int, tag: int) -> CallPlan[None]:
        group = self._group
        dest, tag = arguments.check_peer(dest, "dest", group.size), arguments.check_tag(tag)
        outgoing = message_steps.Outgoing(x, is_synchronous=name == "ssend")
        if name == "bsend":
            outgoing.detach()
        text = f"{self._prefix}{name}({outgoing.text}, dest={_name(dest)}, tag={tag})"

        def steps(_: Numbered) -> CallSteps:
            if dest == PROC_NULL:
                return _nothing()
            if name == "bsend":
                return message_steps.buffered_send(group, outgoing, dest, tag, text)
            return message_steps.send(group, outgoing, dest, tag)

        return CallPlan(group, text, steps, is_collective=False, outgoing=outgoing)

    def recv(
        self,
        source: int = ANY_SOURCE,
        tag: int = ANY_TAG,
        out: Any = None,
        status: Status | None = None,
    ) -> CallPlan[Any]:
        group = self._group
        source = arguments.check_source(source, group.size)
        tag = arguments.check_tag(tag, wildcard=True)
        text = f"{self._prefix}recv(source={_name(source)}, tag={_name(tag)})"

        def receive(target: Value | None, gpu: int | None) -> CallSteps:
            return message_steps.receive(group, source, tag, target, status, gpu)

        _, steps = _filling(source != PROC_NULL, out, status, receive)
        return CallPlan(group, text, lambda _: steps(), is_collective=False, receives=True)

    def sendrecv(
        self,
        x: Any,
        dest: int,
        source: int = ANY_SOURCE,
        sendtag: int = 0,
        recvtag: int = ANY_TAG,
        out: Any = None,
        status: Status | None = None,
    ) -> CallPlan[Any]:
        """Prepare both at the same time; in place, if `out` is `x`."""
        group = self._group
        dest = arguments.check_peer(dest, "dest", group.size)
        source = arguments.check_source(source, group.size)
        sendtag, recvtag = arguments.check_tag(sendtag), arguments.check_tag(recvtag, wildcard=True)
        places = f"dest={_name(dest)}, source={_name(source)}, tag={_name(sendtag)}"
        text = f"{self._prefix}sendrecv({places})"

        def receive(target: Value | None, gpu: int | None) -> CallSteps:
            return message_steps.receive(group, source, recvtag, target, status, gpu)

        target, receiving = _filling(source != PROC_NULL, out, status, receive)
        if out is not x:
            arguments.check_apart(x, target)
        outgoing = None if dest == PROC_NULL else message_steps.Outgoing(x)
        if out is x and outgoing is not None:
            outgoing.detach()
            if target is not None and outgoing.value is not None:
                target.follow(outgoing.value)

        def steps(_: Numbered) -> CallSteps:
            return message_steps.send_receive(group, outgoing, (dest, sendtag), receiving())

        return CallPlan(group, text, steps, is_collective=False, outgoing=outgoing)

    def probe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> CallPlan[Status]:
        return self._probe("probe", source, tag)

    def iprobe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> CallPlan[Status | None]:
        return self._probe("iprobe", source, tag)

    def mprobe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> CallPlan[Matched]:
        return self._probe("mprobe", source, tag)

    def improbe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> CallPlan[Matched | None]:
        return self._probe("improbe", source, tag)

    def _probe(self, name: str, source: int, tag: int) -> CallPlan[Any]:
        group = self._group
        source = arguments.check_source(source, group.size)
        tag = arguments.check_tag(tag, wildcard=True)
        text = f"{name}(source={_name(source)}, tag={_name(tag)})"

        def steps(_: Numbered) -> CallSteps:
            if source == PROC_NULL:
                return _nothing((Status(), None) if name.endswith("mprobe") else Status())
            return message_steps.PROBES[name](group, source, tag)

        return CallPlan(group, text, steps, is_collective=False)

    def receive_held(
        self, found: Status, held: Held | None, out: Any, status: Status | None
    ) -> CallPlan[Any]:
        """Prepare the receive of a message that a matched probe has found; None: there is none."""
        which = f"source={_name(found.source)}, tag={_name(found.tag)}"
        text = f"{self._prefix}recv(the message of {which})"
        group = self._group

        def receive(target: Value | None, gpu: int | None) -> CallSteps:
            assert held is not None
            return message_steps.receive_held(group, held, target, status, gpu)

        _, steps = _filling(held is not None, out, status, receive)
        return CallPlan(group, text, lambda _: steps(), is_collective=False, receives=True)


def _filling(
    comes: bool, out: Any, status: Status | None, receive: Receive
) -> tuple[Value | None, Callable[[], CallSteps]]:
    """Return `out`, checked, and what fills it or makes a value; nothing, if no message comes."""
    arguments.check_status(status)
    target = arguments.fillable_out(out)
    gpu = conversion.here() if target is None else None

    def steps() -> CallSteps:
        if comes:
            return receive(target, gpu)
        if status is not None:
            status.source, status.tag, status.nbytes = PROC_NULL, ANY_TAG, 0
        return _nothing(out)

    return target, steps


def _nothing(result: Any = None) -> CallSteps:
    """A call that is done at once."""
    yield from ()
    return result


def _name(rank: int) -> str:
    if rank >= 0:
        return str(rank)
    return "PROC_NULL" if rank == PROC_NULL else "ANY"
