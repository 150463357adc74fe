"""Messages that a matched probe has found: nobody but their handle receives them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from pycoll._requests.request import Request
from pycoll._runtime.envelope import Held, Status
from pycoll._support.foreign_names import OF_MESSAGES, Hinting
from pycoll._support.public_edge import edges, public

if TYPE_CHECKING:
    from pycoll._calls.call_plan import CallPlan
    from pycoll._calls.calls import Calls
    from pycoll._calls.group import Group


class MessageOwner(Protocol):
    """The communicator on which a message has come."""

    _group: Group
    _calls: Calls
    _nonblocking_calls: Calls

    def _check_open(self) -> None: ...

    @property
    def _run(self) -> Callable[[CallPlan[Any], float | None], Any]: ...


@public
@edges
class Message(Hinting, foreign=OF_MESSAGES, prefix="message."):
    """A message that is here, or on its way, and that only this handle receives, once.

    Returned by `Communicator.mprobe` and `improbe`. No other receive or probe finds the message any
    more, so several threads can each look at one, and receive it as its length and tag demand.

    It must be received. A message whose handle is dropped is received by nobody (and Python gives a
    ResourceWarning); a sender that waits for its receive waits until the communicator is closed.
    When the communicator is closed or breaks, the message is gone.
    """

    def __init__(self, owner: MessageOwner, status: Status, held: Held | None) -> None:
        self._owner = owner
        self._held = held
        self._status = status

    @property
    def status(self) -> Status:
        """Who sent it, with which tag, and how long it is (source `PROC_NULL`: there is none)."""
        return Status(self._status.source, self._status.tag, self._status.nbytes)

    def recv(
        self, out: Any = None, status: Status | None = None, *, timeout: float | None = None
    ) -> Any:
        """Receive this message and return its value; None, or `out`, if it is of `PROC_NULL`.

        Args:
            out: writable array to fill; a shorter message fills the front of it.
            status: filled in with source, tag and length.
            timeout: seconds; when they have passed the message can be received again.

        Raises:
            MismatchError: the message is of another dtype than `out`, or an object.
            TruncationError: it is larger than `out`. It can be received again after both.
            Error: it was received already, is being received by another thread or request, or its
                sender has taken it back.
        """
        owner = self._owner
        return owner._run(owner._calls.receive_held(self._status, self._held, out, status), timeout)

    def irecv(self, out: Any = None, status: Status | None = None) -> Request[Any]:
        """Start `recv`; returns a `Request`. The arguments are those of `recv`, without timeout."""
        owner = self._owner
        owner._check_open()
        plan = owner._nonblocking_calls.receive_held(self._status, self._held, out, status)
        return Request(plan)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Message cannot be pickled: receive it, and send its value")

    def __repr__(self) -> str:
        status = self._status
        text = f"source={status.source}, tag={status.tag}, nbytes={status.nbytes}"
        held = self._held
        state = f", {held.why}" if held is not None and held.message is None else ""
        return f"<pycoll.Message {text}{state}>"

    def __del__(self) -> None:
        held = getattr(self, "_held", None)
        if held is not None and held.message is not None:
            warnings.warn(f"{self!r} was never received", ResourceWarning, 2, self)
