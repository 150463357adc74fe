"""Worlds in processes that pycoll has not started: `join`.

Rank 0 starts the meeting of the world, as it does under another launcher (`exchange`); what the
launcher has there for its ranks, the caller gives here. A process may be in several worlds: each
has an engine, connections, shared memory and a meeting of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from pycoll._calls.arguments import check_int, check_timeout
from pycoll._calls.subgroups import check_name
from pycoll._communicator.communicator import Communicator
from pycoll._support.public_edge import edge, is_users, mark_users
from pycoll._support.wording import a_kind
from pycoll._world import session
from pycoll._world.placement import JobPlacement, read_place
from pycoll.errors import BootstrapError

CLOSED = "this process has left the world of this communicator: it was closed"


class JoinedCommunicator(Communicator, shown_as="Communicator"):
    """The communicator of all ranks of a world of `join`; closing it is leaving that world."""

    def close(self) -> None:
        """Leave the world: the communicators made from this one end, too."""
        if not self._closed:
            self._shut()
            error = session.leave_joined(self._group.engine, CLOSED)
            if error is not None:
                raise error

    def __exit__(self, *exc_info: object) -> None:
        """Leave the world; who still needs this rank hears of the exception."""
        engine = self._group.engine
        if isinstance(exc_info[1], BaseException) and engine.closed is None:
            with engine.locked():
                engine.note(exc_info[1])
        super().__exit__(*exc_info)


@edge
def join(
    rank: int,
    size: int,
    share: Callable[[str | None], str | bytes],
    *,
    timeout: float = 300.0,
    op_timeout: float | None = None,
    transport: str | None = None,
    name: str = "world",
) -> Communicator:
    """Come into a world of ranks that pycoll has not started; return its communicator.

    The ranks are processes on one or several hosts; no process is two of them. On rank 0 `share`
    is called with a text, on the others with None, and there it returns rank 0's text: by a store,
    a file, MPI, whatever they have. The text has the addresses of rank 0's host and the world's
    key: who reads it can come in. With a store, of which each world has a key of its own:

        def share(text):
            if text is not None:
                store.set("world 1", text)
            return store.get("world 1")

    A process may be in several worlds, at once and one after another, each with ranks of its own.
    They are independent of each other and of that of `pycoll.init`. `close()` of the communicator,
    or the end of its ``with`` block, leaves the world. It is not collective; what was accepted for
    sending is delivered, for at most 5 s. `pycoll.finalize` and the end of the interpreter leave
    all.

    Args:
        rank: this process's rank, 0 to size - 1.
        size: number of ranks.
        share: called once; not if there is one rank. It may block, also as long as other ranks
            have not come. The text is ASCII, at most 1024 characters without spaces. The result
            is a str or bytes; that of rank 0 is not looked at. What it raises is raised here.
        timeout: seconds for all ranks to meet, the time of `share` included.
        op_timeout: default deadline of every operation, seconds; None: none.
        transport: as of `pycoll.init`.
        name: what messages call the world.

    Raises:
        BootstrapError: the ranks did not meet: who is missing, or why.
        TransportError: the transport cannot be used: which, why, what to do.
        TypeError, ValueError: an argument, or what `share` returns, cannot be what it is called.
    """
    rank, size = check_int(rank, "rank"), check_int(size, "size")
    if size < 1:
        raise ValueError(f"a world has at least one rank, not {size}")
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} is none of a world of {size}: they are 0 to {size - 1}")
    if not callable(share):
        raise TypeError(f"share is a function that hands on rank 0's text, not {a_kind(share)}")
    session.check_options(timeout, op_timeout, transport)
    name = check_name(name) or "world"
    deadline = float("inf") if op_timeout is None else check_timeout(op_timeout, "op_timeout")
    chosen = session.check_transport(transport)
    began = time.monotonic()
    place = JobPlacement()
    if size > 1:
        place = _place(rank, size, share, timeout)
    timeout = max(0.0, timeout - (time.monotonic() - began))
    world = session.open_world(place, timeout, chosen, deadline)
    session.joined[world.engine] = None
    return JoinedCommunicator(world, session.open_group(world, size, name))


def _place(
    rank: int, size: int, share: Callable[[str | None], str | bytes], timeout: float
) -> JobPlacement:
    from pycoll._launcher import exchange

    def ask(text: str | None) -> str:
        try:
            shared: Any = share(text)
        except BaseException as exc:
            mark_users(exc, f"raised by share(), which rank {rank} of {size} has called to join")
            raise
        if text is not None:
            return text
        if isinstance(shared, bytes | bytearray):
            return shared.decode("ascii", "replace")
        if not isinstance(shared, str):
            raise TypeError(f"share(None) returns the text of rank 0, not {a_kind(shared)}")
        return shared

    try:
        found = exchange.join_by(ask, rank, size, timeout, until_left=True)
    except OSError as exc:
        if is_users(exc):
            raise
        raise BootstrapError(f"rank {rank} of {size} cannot join its world: {exc}") from exc
    return read_place(found)._replace(is_adopted=True)
