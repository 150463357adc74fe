"""Messages and probes, prepared: arguments are checked, and nothing is sent yet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pycoll._calls import arguments, message_plans, message_steps
from pycoll._calls.preparing import Preparing
from pycoll._runtime.envelope import ANY_SOURCE, ANY_TAG, PROC_NULL, Held, Status

if TYPE_CHECKING:
    from pycoll._calls.call_plan import CallPlan


Matched = tuple[Status, Held | None]
"""What a matched probe has found; None: the message of PROC_NULL."""


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
        is_buffered = name == "bsend"
        return message_plans.SendPlan(group, text, outgoing, dest, tag, is_buffered)

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
        return message_plans.ReceivePlan(group, text, source, tag, out, status)

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
        group = self._group
        dest = arguments.check_peer(dest, "dest", group.size)
        source = arguments.check_source(source, group.size)
        sendtag, recvtag = arguments.check_tag(sendtag), arguments.check_tag(recvtag, wildcard=True)
        places = f"dest={_name(dest)}, source={_name(source)}, tag={_name(sendtag)}"
        text = f"{self._prefix}sendrecv({places})"
        return message_plans.SendReceivePlan(
            group, text, x, dest, source, sendtag, recvtag, out, status
        )

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
        return message_plans.ProbePlan(group, text, name, source, tag)

    def receive_held(
        self, found: Status, held: Held | None, out: Any, status: Status | None
    ) -> CallPlan[Any]:
        """Prepare the receive of a message that a matched probe has found; None: there is none."""
        which = f"source={_name(found.source)}, tag={_name(found.tag)}"
        text = f"{self._prefix}recv(the message of {which})"
        return message_plans.ReceiveHeldPlan(self._group, text, held, out, status)


def _name(rank: int) -> str:
    if rank >= 0:
        return str(rank)
    return "PROC_NULL" if rank == PROC_NULL else "ANY"
