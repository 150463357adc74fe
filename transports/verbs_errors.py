"""How calls and work requests of RDMA verbs fail: `VerbsError`, and statuses of completions."""

from __future__ import annotations

import contextlib
import os
from typing import Any

SUCCESS, RETRIES_EXCEEDED, FLUSHED = 0, 12, 5
"""Statuses of completions: done; the peer did not answer; the queue pair was in error before."""

_TEXTS = {
    1: "a message was longer than the receive that it met",
    2: "an operation that the queue pair does not allow",
    4: "memory that is not registered, or not any more (local protection)",
    5: "the connection had failed before",
    6: "memory window binding failed",
    7: "a bad response",
    8: "a local access error",
    9: "the peer found the request invalid",
    10: "the peer does not allow access to that memory (it is not registered there any more)",
    11: "the peer could not complete the operation",
    12: "it does not answer (its process is dead, or the link, a switch or the address is wrong)",
    13: "it had no receive posted, again and again",
    21: "the device has failed",
}


def explain(status: int) -> str:
    """Return what an unsuccessful status of a completion means, for people."""
    return f"{_TEXTS.get(status, 'the operation failed')} (work completion status {status})"


class VerbsError(Exception):
    """Something that the device refused.

    Attributes:
        code: the errno, 0 if there is none.
    """

    def __init__(self, what: str, cause: BaseException) -> None:
        code = getattr(cause, "error_code", 0)
        self.code = code if isinstance(code, int) and code > 0 else 0
        reason = os.strerror(self.code) if self.code else str(cause)
        super().__init__(f"{what}: {reason}")


@contextlib.contextmanager
def telling(what: str) -> Any:
    """Turn what pyverbs raises into a VerbsError."""
    try:
        yield
    except VerbsError:
        raise
    except Exception as exc:  # pyverbs is imported late, so its class has no name here
        raise VerbsError(what, exc) from exc
