"""What the launcher's end of the rendezvous knows about one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pycoll._launcher.rendezvous_carriers import Peer


class RankRecord:
    """One rank.

    Attributes:
        peer: its connection; None until it has joined.
        pid, info, since: its process, what it told about itself, and when it joined.
        left: it has finalized.
        noted, raised, aborted: it has sent a message of this kind, which counts once.
        trouble: why it failed or is about to end, while its process lives.
        cause: of a rank that raised PeerFailed, its message: the failure of which it ends.
        failed: the others were told that it has failed.
        ended: what became of its process; None: it lives.
    """

    def __init__(self) -> None:
        self.peer: Peer | None = None
        self.pid = 0
        self.info = b""
        self.since = 0.0
        self.left = False
        self.noted = False
        self.raised = False
        self.aborted = False
        self.trouble = ""
        self.cause = ""
        self.failed = False
        self.ended: str | None = None

    @property
    def is_there(self) -> bool:
        """Whether it has joined and lives."""
        return self.peer is not None and self.ended is None

    @property
    def takes_part(self) -> bool:
        """Whether others can count on it: it lives, and has neither left nor failed."""
        return self.is_there and not (self.left or self.failed)

    def for_want_of(self) -> str:
        """Return why it failed if that is another rank's failure, else ""."""
        return f"{self.trouble}: {self.cause}" if self.cause else ""

    def state(self) -> tuple[str, int]:
        """Return what is known of it beside its waits, "" if it is there, and its process."""
        if self.ended is not None:
            return f"has ended ({self.ended})", 0
        if self.trouble:
            return self.trouble, 0
        return ("has finalized" if self.left else ""), self.pid

    def doing(self) -> str:
        """Return what it is doing as far as it does not run, "" if it may run or wait."""
        if self.ended is not None:
            return f"ended ({self.ended})"
        if self.peer is None:
            return "has not joined"
        return self.trouble or ("has finalized" if self.left else "")
