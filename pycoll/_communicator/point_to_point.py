"""The blocking messages of a communicator, and probes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pycoll._calls import message_steps
from pycoll._calls.call_plan import CallPlan
from pycoll._communicator.running import Running
from pycoll._requests.matched import Message
from pycoll._runtime.envelope import ANY_SOURCE, ANY_TAG, Status
from pycoll._runtime.task import CallSteps
from pycoll._support.public_edge import part_of
from pycoll.errors import Error

if TYPE_CHECKING:
    from pycoll._requests.core_requests import CoreRequest


@part_of("Communicator")
class PointToPoint(Running):
    """Blocking sends, receives and probes; a part of `Communicator`."""

    def send(self, x: Any, dest: int, tag: int = 0, *, timeout: float | None = None) -> None:
        """Send `x` to rank `dest`; returns when `x` may be changed.

        Values of at most 64 KiB are buffered (up to 1 MiB for each receiver); larger ones wait for
        their receive. A send to oneself is always buffered.

        Args:
            x: array or object.
            dest: receiving rank, or `pycoll.PROC_NULL`: nothing is done.
            tag: 0 to 2**31 - 1.
            timeout: seconds; when they have passed the message is withdrawn.
        """
        self._send_within(self._calls.send(x, dest, tag), timeout)

    def ssend(self, x: Any, dest: int, tag: int = 0, *, timeout: float | None = None) -> None:
        """Send `x` to rank `dest`; returns when it is received there, however short it is.

        On arrival it is a message like any other. Sent to oneself, it waits for a receive in
        another thread or in a request.

        Args:
            x: array or object.
            dest: receiving rank, or `pycoll.PROC_NULL`: nothing is done.
            tag: 0 to 2**31 - 1.
            timeout: seconds; when they have passed the message is withdrawn.
        """
        self._run(self._calls.ssend(x, dest, tag), timeout)

    def bsend(self, x: Any, dest: int, tag: int = 0, *, timeout: float | None = None) -> None:
        """Send a copy of `x` to rank `dest`; returns without waiting for it, however long it is.

        The copy takes memory until it is received, also after this communicator was closed here. A
        rank that leaves waits for that, too, for at most 5 s; then one of more than 64 KiB is lost.
        Nobody is told if it is never received: where an error shall be heard of, use `isend`. The
        twin `ibsend` is done when `x` has been copied: at once, but for an array on a GPU, which
        must not be changed before.

        Args:
            x: array or object.
            dest: receiving rank, or `pycoll.PROC_NULL`: nothing is done.
            tag: 0 to 2**31 - 1.
            timeout: seconds, for copying from a GPU.
        """
        self._run(self._calls.bsend(x, dest, tag), timeout)

    def _send_within(self, plan: CallPlan[Any], timeout: float | None) -> Any:
        """Run a call that sends a message, which says whether it has a deadline."""
        seconds = self._seconds(timeout)
        if plan.outgoing is not None:
            plan.outgoing.may_be_withdrawn = seconds != math.inf
        return self._run(plan, seconds)

    def _finish_in_core(self, request: CoreRequest, seconds: float) -> Any:
        """Return the result of what the core's engine has begun and that takes long."""
        task = request._task
        text = task.call.text.removeprefix("i")
        self._finish_begun(text, message_steps.finish_send(task), (request,), seconds)
        return request.result

    def _finish_both_in_core(
        self, received: CoreRequest, sent: CoreRequest | tuple[int, int], seconds: float
    ) -> Any:
        """The same for a receive and a send at the same time; (dest, tag): that has left."""
        source = received._description[2]
        if isinstance(sent, tuple):
            dest, tag = sent
            begun: tuple[CoreRequest, ...] = (received,)
            steps = message_steps.finish_send(received._task)
        else:
            _, _, dest, tag, _ = sent._description
            begun = received, sent
            steps = message_steps.finish_both(received._task, sent._task)
        text = f"sendrecv(dest={dest}, source={source if source >= 0 else 'ANY'}, tag={tag})"
        self._finish_begun(text, steps, begun, seconds)
        return received.result

    def _finish_begun(
        self, text: str, steps: CallSteps, begun: Sequence[CoreRequest], seconds: float
    ) -> None:
        try:
            plan = CallPlan[Any](self._group, text, lambda _: steps, is_collective=False)
            self._run(plan, seconds)
        except BaseException as exc:
            with self._group.engine.locked():
                for request in begun:
                    request._task.cancel()  # also if the call did not even begin
                is_well = all([request.is_well for request in begun])
            if is_well and isinstance(exc, Error):
                return  # it was done before the error was heard of
            raise

    def recv(
        self,
        source: int = ANY_SOURCE,
        tag: int = ANY_TAG,
        out: Any = None,
        status: Status | None = None,
        *,
        timeout: float | None = None,
    ) -> Any:
        """Receive a message and return its value.

        Args:
            source: rank, or `pycoll.ANY_SOURCE`; from `pycoll.PROC_NULL` comes None at once.
            tag: or `pycoll.ANY_TAG`.
            out: writable array to fill; a shorter message fills the front of it.
            status: filled in with source, tag and length.
            timeout: seconds; when they have passed the receive is withdrawn.

        Raises:
            MismatchError: the message is of another dtype than `out`, or an object.
            TruncationError: it is larger than `out`. Both leave it first in the queue.
        """
        return self._run(self._calls.recv(source, tag, out, status), timeout)

    def sendrecv(
        self,
        x: Any,
        dest: int,
        source: int = ANY_SOURCE,
        sendtag: int = 0,
        recvtag: int = ANY_TAG,
        out: Any = None,
        status: Status | None = None,
        *,
        timeout: float | None = None,
    ) -> Any:
        """Send `x` to `dest` and receive from `source` at the same time; returns what came.

        Args:
            x: array or object.
            dest, source: ranks, or `pycoll.PROC_NULL`; source also `pycoll.ANY_SOURCE`.
            sendtag, recvtag: tags, as of `send` and `recv`.
            out: writable array to fill, as in `recv`; may be `x` itself.
            status: filled in as by `recv`.
            timeout: seconds; when they have passed both are withdrawn.
        """
        plan = self._calls.sendrecv(x, dest, source, sendtag, recvtag, out, status)
        return self._send_within(plan, timeout)

    def probe(
        self, source: int = ANY_SOURCE, tag: int = ANY_TAG, *, timeout: float | None = None
    ) -> Status:
        """Wait for a message and return its `Status`; the message stays in the queue.

        Args:
            source, tag: as of `recv`.
            timeout: seconds.
        """
        status: Status = self._run(self._calls.probe(source, tag), timeout)
        return status

    def iprobe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Status | None:
        """Return the `Status` of a message that is here, or None; never waits.

        Args:
            source, tag: as of `recv`.
        """
        status: Status | None = self._run(self._calls.iprobe(source, tag), math.inf)
        return status

    def mprobe(
        self, source: int = ANY_SOURCE, tag: int = ANY_TAG, *, timeout: float | None = None
    ) -> Message:
        """Wait for a message and take it out of the queue: only the `Message` returned receives it.

        Args:
            source, tag: as of `recv`.
            timeout: seconds.
        """
        return Message(self, *self._run(self._calls.mprobe(source, tag), timeout))

    def improbe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Message | None:
        """Return the `Message` that `mprobe` would, if one is here, or None; never waits.

        Args:
            source, tag: as of `recv`.
        """
        found = self._run(self._calls.improbe(source, tag), math.inf)
        return Message(self, *found) if found is not None else None
