"""The launcher's end of the socket by which it asks a rank what its threads do."""

from __future__ import annotations

import contextlib
import selectors
import socket
from collections.abc import Callable

_MAX_ANSWER_NBYTES = 1 << 20


class AskedRank:
    """One rank, which `pycoll._runtime.inspected` answers for.

    Args:
        rank: which.
        selector: the owner's loop; the data of a key is a function to call when it is ready.

    Raises:
        OSError: too many files are open.
    """

    def __init__(self, rank: int, selector: selectors.BaseSelector) -> None:
        self._rank, self._selector = rank, selector
        self._end, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._end.setblocking(False)
        self._heard: Callable[[int, bytes], object] | None = None
        self._is_due = False  # a question was not answered yet

    def take_end(self) -> int:
        """Return the descriptor for the rank to inherit, which becomes the caller's."""
        return self._theirs.detach()

    def ask(self, heard: Callable[[int, bytes], object]) -> None:
        """Ask what its threads do; `heard` is called with the rank and the answer, if one comes."""
        if self._heard is None:
            self._selector.register(self._end, selectors.EVENT_READ, self._hear)
        self._heard = heard
        if not self._is_due:  # what a stopped rank was asked before, it answers when it goes on
            with contextlib.suppress(OSError):
                self._is_due = self._end.send(b"stacks", socket.MSG_NOSIGNAL) > 0

    def close(self) -> None:
        """Ask no more; may be called again."""
        self._forget()
        self._end.close()
        self._theirs.close()

    def _hear(self) -> None:
        try:
            answer = self._end.recv(_MAX_ANSWER_NBYTES)
        except BlockingIOError:
            return
        except OSError:
            answer = b""
        heard = self._heard
        if not answer:  # the process has ended
            return self._forget()
        self._is_due = False
        if heard is not None:
            heard(self._rank, answer)

    def _forget(self) -> None:
        if self._heard is not None:
            self._heard = None
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(self._end)
