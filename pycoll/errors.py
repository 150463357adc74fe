"""The exceptions pycoll raises, all of them derived from `Error`.

    Error
    ├── BootstrapError      the job could not meet
    ├── PeerFailed          another rank ended while this one needed it
    ├── Revoked             a rank has called comm.revoke()
    ├── OperationTimeout    a deadline passed (also a TimeoutError)
    ├── MismatchError       ranks made different calls
    ├── TruncationError     a message is larger than the array it should fill
    ├── TransportError      a transport cannot be used, and why
    └── ProofError          an algorithm is wrong: which rank, which step, and what (`pycoll.prove`)

Wrong arguments raise the built-in TypeError and ValueError before anything is sent.
"""

from __future__ import annotations


class Error(Exception):
    """Base of every error that pycoll itself raises."""


class BootstrapError(Error):
    """The job could not meet: the message says which ranks are missing and how long it waited."""


class PeerFailed(Error):
    """A rank exited, died, raised, or its link was cut.

    Attributes:
        rank: the rank, numbered in the whole job (the world), that ended.
        reason: what became of it, for example ``"killed by signal 9 (SIGKILL)"``.
    """

    def __init__(self, rank: int, reason: str, message: str | None = None) -> None:
        super().__init__(rank, reason, message)
        self.rank = rank
        self.reason = reason
        self.message = message or f"rank {rank} failed: {reason}"

    def __str__(self) -> str:
        return self.message


class Revoked(Error):
    """A rank has called `revoke()` on this communicator: no rank can use it any more.

    Attributes:
        rank: the rank, numbered in the whole job (the world), that called it.
    """

    def __init__(self, rank: int, message: str | None = None) -> None:
        super().__init__(rank, message)
        self.rank = rank
        self.message = message or f"rank {rank} has revoked this communicator"

    def __str__(self) -> str:
        return self.message


class OperationTimeout(Error, TimeoutError):
    """A deadline passed: the message names the operation and says what each other rank does."""


class MismatchError(Error):
    """Ranks made different calls; the message shows two of them side by side."""


class TruncationError(Error):
    """A message is larger than the array it was to fill; it stays first in the queue."""


class TransportError(Error):
    """A transport cannot be used: which one, why, and what to do about it."""


class ProofError(Error):
    """A schedule does not do what it should: the message says which rank, which step and what."""
