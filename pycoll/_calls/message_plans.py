"""The plans of messages and probes: none is collective.

This is the way through Python. A NumPy array or an object of a common type takes none of these: its
method is the C core's (`messages_type.c`), which calls Python for all else.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pycoll._arrays import conversion
from pycoll._arrays.value import Value
from pycoll._calls import arguments, message_steps
from pycoll._calls.call_plan import CallPlan
from pycoll._calls.group import Group
from pycoll._calls.message_steps import Outgoing
from pycoll._runtime.envelope import ANY_TAG, PROC_NULL, Held, Status
from pycoll._runtime.task import CallSteps


class MessagePlan(CallPlan[Any]):
    """A call that is not collective, and goes by messages."""

    __slots__ = ()
    is_collective: ClassVar[bool] = False


class BegunPlan(MessagePlan):
    """The rest of a call that was begun elsewhere.

    Args:
        group, text: as of `CallPlan`.
        rest: what is left to do, once.
    """

    __slots__ = ("_rest",)

    def __init__(self, group: Group, text: str, rest: CallSteps) -> None:
        super().__init__(group, text)
        self._rest = rest

    def steps(self, signature: bytes) -> CallSteps:
        return self._rest


class SendPlan(MessagePlan):
    """A send or an ssend; a bsend, if its value was detached.

    Args:
        group, text: as of `CallPlan`.
        outgoing: the value.
        dest, tag: where it goes.
        is_buffered: it is done when the value was copied, whoever receives it.
    """

    __slots__ = ("dest", "is_buffered", "outgoing", "tag")

    def __init__(
        self,
        group: Group,
        text: str,
        outgoing: Outgoing,
        dest: int,
        tag: int,
        is_buffered: bool = False,
    ) -> None:
        super().__init__(group, text)
        self.outgoing = outgoing
        self.dest = dest
        self.tag = tag
        self.is_buffered = is_buffered

    def steps(self, signature: bytes) -> CallSteps:
        if self.dest == PROC_NULL:
            return _nothing()
        if self.is_buffered:
            return message_steps.buffered_send(
                self.group, self.outgoing, self.dest, self.tag, self.text
            )
        return message_steps.send(self.group, self.outgoing, self.dest, self.tag)


class _FillingPlan(MessagePlan):
    """What fills an array, or makes one.

    Args:
        group, text: as of `CallPlan`.
        out: the caller's array, or None.
        status: to be filled in, or None.
    """

    __slots__ = ("gpu", "out", "status", "target")

    def __init__(self, group: Group, text: str, out: Any, status: Status | None) -> None:
        super().__init__(group, text)
        arguments.check_status(status)
        self.out = out
        self.status = status
        self.target: Value | None = arguments.fillable_out(out)
        self.gpu = conversion.here() if self.target is None else None

    def _from_nobody(self) -> CallSteps:
        if self.status is not None:
            self.status.source, self.status.tag, self.status.nbytes = PROC_NULL, ANY_TAG, 0
        return _nothing(self.out)


class ReceivePlan(_FillingPlan):
    """A recv.

    Args:
        group, text, out, status: as of `_FillingPlan`.
        source, tag: what it takes.
    """

    __slots__ = ("source", "tag")
    receives: ClassVar[bool] = True

    def __init__(
        self, group: Group, text: str, source: int, tag: int, out: Any, status: Status | None
    ) -> None:
        super().__init__(group, text, out, status)
        self.source = source
        self.tag = tag

    def steps(self, signature: bytes) -> CallSteps:
        if self.source == PROC_NULL:
            return self._from_nobody()
        return message_steps.receive(
            self.group, self.source, self.tag, self.target, self.status, self.gpu
        )


class ReceiveHeldPlan(_FillingPlan):
    """The recv of a message that a matched probe has found.

    Args:
        group, text, out, status: as of `_FillingPlan`.
        held: the message; None: that of PROC_NULL.
    """

    __slots__ = ("held",)
    receives: ClassVar[bool] = True

    def __init__(
        self, group: Group, text: str, held: Held | None, out: Any, status: Status | None
    ) -> None:
        super().__init__(group, text, out, status)
        self.held = held

    def steps(self, signature: bytes) -> CallSteps:
        if self.held is None:
            return self._from_nobody()
        return message_steps.receive_held(self.group, self.held, self.target, self.status, self.gpu)


class SendReceivePlan(ReceivePlan):
    """A sendrecv: both at the same time. In place, if `out` is `x`.

    Args:
        group, text, source, out, status: as of `ReceivePlan`.
        x: the value.
        dest, sendtag: where it goes.
        recvtag: what is received.
    """

    __slots__ = ("dest", "outgoing", "sendtag")
    receives: ClassVar[bool] = False

    def __init__(
        self,
        group: Group,
        text: str,
        x: Any,
        dest: int,
        source: int,
        sendtag: int,
        recvtag: int,
        out: Any,
        status: Status | None,
    ) -> None:
        super().__init__(group, text, source, recvtag, out, status)
        self.dest = dest
        self.sendtag = sendtag
        if out is not x:
            arguments.check_apart(x, self.target)
        self.outgoing = None if dest == PROC_NULL else Outgoing(x)
        if out is x and self.outgoing is not None:
            self.outgoing.detach()
            if self.target is not None and self.outgoing.value is not None:
                self.target.follow(self.outgoing.value)

    def steps(self, signature: bytes) -> CallSteps:
        receiving = super().steps(signature)
        return message_steps.send_receive(
            self.group, self.outgoing, (self.dest, self.sendtag), receiving
        )


class ProbePlan(MessagePlan):
    """A probe, iprobe, mprobe or improbe.

    Args:
        group, text: as of `CallPlan`.
        name: which.
        source, tag: what it looks for.
    """

    __slots__ = ("name", "source", "tag")

    def __init__(self, group: Group, text: str, name: str, source: int, tag: int) -> None:
        super().__init__(group, text)
        self.name = name
        self.source = source
        self.tag = tag

    def steps(self, signature: bytes) -> CallSteps:
        if self.source == PROC_NULL:
            return _nothing((Status(), None) if self.name.endswith("mprobe") else Status())
        return message_steps.PROBES[self.name](self.group, self.source, self.tag)


def _nothing(result: Any = None) -> CallSteps:
    """A call that is done at once."""
    yield from ()
    return result
