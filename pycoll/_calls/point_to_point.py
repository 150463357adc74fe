"""Messages and probes, prepared: arguments are checked, and nothing is sent yet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pycoll._calls.prepared import Prepared
from pycoll._calls.preparing import Preparing
from pycoll._runtime.envelope import ANY_SOURCE, ANY_TAG, PROC_NULL, Held, Status
from pycoll._runtime.task import CallSteps
from pycoll._support.lazy_import import LazyModule

if TYPE_CHECKING:
    from pycoll._arrays import conversion
    from pycoll._calls import arguments, p2p
else:  # a program that only calls barrier() imports no NumPy
    arguments = LazyModule("pycoll._calls.arguments")
    conversion = LazyModule("pycoll._arrays.conversion")
    p2p = LazyModule("pycoll._calls.p2p")


Matched = tuple[Status, Held | None]
"""What a matched probe has found; None: the message of PROC_NULL."""


class PointToPoint(Preparing):
    """Prepares messages and probes; a part of `Calls`."""

    def send(self, x: Any, dest: int, tag: int = 0) -> Prepared[None]:
        """Prepare a send."""
        return self._send("send", x, dest, tag)

    def ssend(self, x: Any, dest: int, tag: int = 0) -> Prepared[None]:
        """Prepare a send that is done when it is received."""
        return self._send("ssend", x, dest, tag)

    def bsend(self, x: Any, dest: int, tag: int = 0) -> Prepared[None]:
        """Prepare a send that copies its value."""
        group = self._group
        dest, tag = arguments.check_peer(dest, "dest", group.size), arguments.check_tag(tag)
        outgoing = p2p.Outgoing(x)
        outgoing.detach()
        text = f"{self._prefix}bsend({outgoing.text}, dest={_name(dest)}, tag={tag})"

        def steps(_: bytes) -> CallSteps:
            if dest == PROC_NULL:
                return _nothing()
            return p2p.buffered_send(group, outgoing, dest, tag, text)

        return Prepared(text, steps, collective=False)

    def _send(self, name: str, x: Any, dest: int, tag: int) -> Prepared[None]:
        group = self._group
        dest, tag = arguments.check_peer(dest, "dest", group.size), arguments.check_tag(tag)
        outgoing = p2p.Outgoing(x, is_synchronous=name == "ssend")
        return Prepared(
            f"{self._prefix}{name}({outgoing.text}, dest={_name(dest)}, tag={tag})",
            lambda _: _nothing() if dest == PROC_NULL else p2p.send(group, outgoing, dest, tag),
            collective=False,
        )

    def recv(
        self,
        source: int = ANY_SOURCE,
        tag: int = ANY_TAG,
        out: Any = None,
        status: Status | None = None,
    ) -> Prepared[Any]:
        """Prepare a recv."""
        group = self._group
        source = arguments.check_source(source, group.size)
        tag = arguments.check_tag(tag, wildcard=True)
        arguments.check_status(status)
        target = arguments.fillable_out(out)
        gpu = conversion.here() if target is None else None

        def steps(_: bytes) -> CallSteps:
            if source != PROC_NULL:
                return p2p.receive(group, source, tag, target, status, gpu)
            _fill_null(status)
            return _nothing(out)

        text = f"{self._prefix}recv(source={_name(source)}, tag={_name(tag)})"
        return Prepared(text, steps, collective=False, receives=True)

    def sendrecv(
        self,
        x: Any,
        dest: int,
        source: int = ANY_SOURCE,
        sendtag: int = 0,
        recvtag: int = ANY_TAG,
        out: Any = None,
        status: Status | None = None,
    ) -> Prepared[Any]:
        """Prepare a sendrecv."""
        group = self._group
        dest = arguments.check_peer(dest, "dest", group.size)
        source = arguments.check_source(source, group.size)
        sendtag, recvtag = arguments.check_tag(sendtag), arguments.check_tag(recvtag, wildcard=True)
        arguments.check_status(status)
        target = arguments.fillable_out(out)
        if out is not x:
            arguments.check_apart(x, target)
        outgoing = None if dest == PROC_NULL else p2p.Outgoing(x)
        if out is x and outgoing is not None:
            outgoing.detach()
            if target is not None and outgoing.value is not None:
                target.follow(outgoing.value)
        gpu = conversion.here() if target is None else None

        def steps(_: bytes) -> CallSteps:
            if source == PROC_NULL:
                _fill_null(status)
                receiving = _nothing(out)
            else:
                receiving = p2p.receive(group, source, recvtag, target, status, gpu)
            return p2p.send_receive(group, outgoing, (dest, sendtag), receiving)

        places = f"dest={_name(dest)}, source={_name(source)}, tag={_name(sendtag)}"
        return Prepared(f"{self._prefix}sendrecv({places})", steps, collective=False)

    def probe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Prepared[Status]:
        """Prepare a probe."""
        return self._probe("probe", source, tag)

    def iprobe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Prepared[Status | None]:
        """Prepare an iprobe."""
        return self._probe("iprobe", source, tag)

    def mprobe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Prepared[Matched]:
        """Prepare an mprobe."""
        return self._probe("mprobe", source, tag)

    def improbe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Prepared[Matched | None]:
        """Prepare an improbe."""
        return self._probe("improbe", source, tag)

    def _probe(self, name: str, source: int, tag: int) -> Prepared[Any]:
        group = self._group
        source = arguments.check_source(source, group.size)
        tag = arguments.check_tag(tag, wildcard=True)

        def steps(_: bytes) -> CallSteps:
            if source == PROC_NULL:
                return _nothing((Status(), None) if name.endswith("mprobe") else Status())
            return p2p.PROBES[name](group, source, tag)

        text = f"{name}(source={_name(source)}, tag={_name(tag)})"
        return Prepared(text, steps, collective=False)

    def receive_held(
        self, found: Status, held: Held | None, out: Any, status: Status | None
    ) -> Prepared[Any]:
        """Prepare the receive of a message that a matched probe has found; None: there is none."""
        group = self._group
        arguments.check_status(status)
        target = arguments.fillable_out(out)
        gpu = conversion.here() if target is None else None

        def steps(_: bytes) -> CallSteps:
            if held is not None:
                return p2p.receive_held(group, held, target, status, gpu)
            _fill_null(status)
            return _nothing(out)

        which = f"source={_name(found.source)}, tag={_name(found.tag)}"
        text = f"{self._prefix}recv(the message of {which})"
        return Prepared(text, steps, collective=False, receives=True)


def _nothing(result: Any = None) -> CallSteps:
    """A call that is done at once."""
    yield from ()
    return result


def _name(rank: int) -> str:
    if rank >= 0:
        return str(rank)
    return "PROC_NULL" if rank == PROC_NULL else "ANY"


def _fill_null(status: Status | None) -> None:
    if status is not None:
        status.source, status.tag, status.nbytes = PROC_NULL, ANY_TAG, 0
