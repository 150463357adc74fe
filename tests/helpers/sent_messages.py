"""Counts what a rank sends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pycoll import Communicator


@contextmanager
def sent_messages(comm: Communicator) -> Iterator[list[int]]:
    """Give a list that holds, at the end, how many messages were sent, and the bytes in them."""
    before, sent = comm.counters(), [0, 0]
    yield sent
    after = comm.counters()
    sent[:] = [
        int((after.sent_messages - before.sent_messages).sum()),
        int((after.sent_bytes - before.sent_bytes).sum()),
    ]
