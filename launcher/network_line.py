"""A line of frames through the network: ZeroMQ, encrypted by CURVE with the job's key.

For agents that no launcher has started, and who so have to find it: the agent has a `LinkLine`, the
other end is a `CallerLine` on a `Router`.
"""

from __future__ import annotations

import selectors
from collections.abc import Callable

from pycoll.launcher.connection import Hear, Line
from pycoll.launcher.rendezvous_link import Link
from pycoll.launcher.rendezvous_router import Caller

_LINGER_S = 1.0  # for the last frames


class LinkLine(Line):
    """The agent's end.

    Args:
        link: connected; it becomes its own.
        selector: the owner's loop; the data of a key is a function to call when it is ready.
        hear, lost: see `Line`.
    """

    def __init__(
        self,
        link: Link,
        selector: selectors.BaseSelector,
        hear: Hear,
        lost: Callable[[str], None],
    ) -> None:
        super().__init__(hear, lost)
        self._link, self._selector = link, selector
        self._is_closed = False
        selector.register(link.fileno(), selectors.EVENT_READ, self._pump)

    def close(self) -> None:
        """Disconnect, when what was sent has gone out; may be called again."""
        super().close()
        if not self._is_closed:
            self._is_closed = True
            self._selector.unregister(self._link.fileno())
            self._link.close(_LINGER_S)

    def flush(self, deadline: float) -> None:
        """See `Line`: `close` does it."""

    def _put(self, frame: bytes) -> None:
        self._link.send(frame)

    def _pump(self) -> None:
        for frame in self._link.pump():
            if self.is_open and not self._came(frame):
                return self._give_up("it sends what makes no sense")
        if self.is_open and not self._link.is_open:
            self._give_up("")

    def _give_up(self, why: str) -> None:
        """Say so first: to close the link may take long, and ranks wait to hear it."""
        self.is_open = False
        self._lost(why)


class CallerLine(Line):
    """The other end; it cannot know that the agent's process has ended, but for its silence.

    Args:
        caller: where the agent's frames come from, which the owner gives to `came`.
        hear, lost: see `Line`.
    """

    def __init__(self, caller: Caller, hear: Hear, lost: Callable[[str], None]) -> None:
        super().__init__(hear, lost)
        self._caller = caller

    def came(self, frame: bytes) -> None:
        """Hear a frame that has come from there."""
        if self.is_open and not self._came(frame):
            self._end("it sends what makes no sense")

    def _put(self, frame: bytes) -> None:
        self._caller.send(frame)
