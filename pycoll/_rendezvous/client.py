"""A rank's end of the meeting; the launcher's is `rendezvous_server`, where the protocol is.

Every rank imports this file before its program can begin, so what takes long to import is not
imported here: ZeroMQ only where there is no other way, typing and its like not at all.
"""

from __future__ import annotations

import os
import time

from pycoll._rendezvous import wire as wire
from pycoll._rendezvous.local import LocalLink, adopt
from pycoll.errors import BootstrapError

TYPE_CHECKING = False  # as in `wire`
if TYPE_CHECKING:
    from typing import Any

    from pycoll._rendezvous.connection import Connection

__all__ = ["Client", "Event"]

_EVENTS = frozenset({"failed", "left", "returned", "ended", "broken", "told", "look", "agreed"})
_STATES = frozenset({"waiting", "running"})
# What all ranks do before each gets this answer.
_WORDS = {
    "met": ("join the job", "joined"),
    "exchanged": ("exchange addresses", "exchanged addresses"),
}


class Event:
    """What became of another rank, of a communicator, or of the connection.

    "failed" {rank, reason, detail}   it died, raised (detail: its traceback) or aborted
    "left"   {rank, links, calls,     it finalized; links: the ranks it has sent to; calls: of each
              error}                  communicator the last call, as `context.LastCall`; error: the
                                      first that it met, ""
    "returned" {rank, calls}          it has done what this run of a pool is; its last calls
    "ended"  {rank, reason}           its process ended with status 0
    "broken" {context, error, rank,   a communicator is broken, by what and by whom
              reason, message}
    "look"   {round, contexts}        say ("seen") what this rank waits in
    "agreed" {context, number, flag,  what the living members of a communicator have agreed on
              ranks, different}
    "lost"   {}                       the connection to the launcher is gone
    """

    __slots__ = ("fields", "kind")

    def __init__(self, kind: str, fields: dict[str, Any]) -> None:
        self.kind, self.fields = kind, fields

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Event) and (self.kind, self.fields) == (other.kind, other.fields)

    def __repr__(self) -> str:
        return f"Event({self.kind!r}, {self.fields!r})"


def _by_zmq(*args: Any) -> Connection:
    from pycoll._rendezvous.connection import Connection

    return Connection(*args)


class Client:
    """One rank's connection to the launcher. Not thread-safe: its owner has the lock.

    Make it after fork. The owner sleeps on `fileno()` and calls `progress()` when that is
    readable; every method leaves the descriptor readable while there is something to return.

    Args:
        endpoint: the server's, ``tcp://host:port``.
        key: the job's secret, at least 16 bytes.
        rank: this rank.
        size: number of ranks in the job.
        link: the value of PYCOLL_LINK: the socket to the launcher that this process may have
            inherited. If it has not, or somebody else uses it, the endpoint is reached by ZeroMQ.
        notice_s: seconds after which, and between which, `join` prints who is missing.

    Attributes:
        num_received: frames that have come from the launcher.

    Raises:
        ValueError: the key is too short.
        BootstrapError: ZeroMQ is needed, and cannot be used.
        OSError: too many files are open.
    """

    def __init__(
        self,
        endpoint: str,
        key: bytes,
        rank: int,
        size: int,
        *,
        link: str = "",
        notice_s: float = 10.0,
    ) -> None:
        self._endpoint, self._rank, self._size = endpoint, rank, size
        self._notice_s = notice_s
        self._pid = os.getpid()
        max_nbytes = wire.MAX_FRAME_NBYTES + size * wire.MAX_INFO_NBYTES
        local = adopt(link, key, max_nbytes)
        self._link: LocalLink | Connection = local or _by_zmq(endpoint, key, max_nbytes, rank, size)
        self._events: list[Event] = []
        self._answers: dict[str, dict[str, Any]] = {}  # the latest of each kind
        self._has_posted = False
        self._has_tried = self._has_met = False
        self._num_asked = 0
        self.num_received = 0
        self._round = 0  # of exchange
        self._is_closed = False

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close(0.0)

    def join(self, info: dict[str, Any], timeout_s: float) -> list[dict[str, Any]]:
        """Wait until all ranks have joined; return what each has said about itself, by rank.

        While it waits the lowest rank present prints, every `notice_s`, who is missing. A client
        joins once; whoever wants to try again after an error closes it and makes another.

        Args:
            info: what the others must know of this rank: msgpack-able, at most 64 KiB.
            timeout_s: how long to wait, in seconds; math.inf: for ever.

        Raises:
            BootstrapError: the deadline passed (who is missing, how long it waited); a rank ended
                before all had joined; this rank was refused (its number is taken, another size or
                version); the launcher cannot be reached, or its key is another.
            ValueError: `info` is too large.
            RuntimeError: it has tried to join before, or is closed.
        """
        if self._has_tried or self._is_closed:
            raise RuntimeError("a client joins once")
        start, packed = time.monotonic(), wire.pack_info(info)
        self._has_tried = True
        self._link.connect(timeout_s)
        self._send(
            "join",
            {
                "version": wire.WIRE_VERSION,
                "rank": self._rank,
                "size": self._size,
                "pid": self._pid,
                "info": packed,
            },
        )
        infos = self._meet("met", start, timeout_s)
        self._has_met = True
        return infos

    def exchange(self, info: dict[str, Any], timeout_s: float) -> list[dict[str, Any]]:
        """Meet again: wait until all ranks have come with the same call; return what each said.

        After `join`, any number of times; the k-th call of one rank meets the k-th of the others
        (one that failed does not count). Events that come meanwhile are kept for `progress()`.

        Args:
            info: what the others must know of this rank: msgpack-able, at most 64 KiB.
            timeout_s: how long to wait, in seconds; math.inf: for ever.

        Raises:
            BootstrapError: the deadline passed (who is missing, how long it waited); a rank failed,
                left or ended; the connection to the launcher is lost.
            ValueError: `info` is too large.
            RuntimeError: it has not joined, or is closed.
        """
        if not self._has_met or self._is_closed:
            raise RuntimeError("only a client that has joined can exchange")
        start, packed = time.monotonic(), wire.pack_info(info)
        self._answers.pop("who", None)  # one that came too late for the last meeting
        self._send("exchange", {"round": self._round, "info": packed})
        infos = self._meet("exchanged", start, timeout_s)
        self._round += 1
        return infos

    def raise_if_late(self, timeout_s: float) -> None:
        """Ask whether another process is this rank already: this one may be its child.

        Args:
            timeout_s: seconds to wait for the answer; a second at most.

        Raises:
            BootstrapError: it is; which process that is.
        """
        self._link.raise_if_late(time.monotonic() + timeout_s)

    def fileno(self) -> int:
        """Return a descriptor that is readable when `progress()` may have work to do."""
        return self._link.fileno()

    def progress(self) -> list[Event]:
        """Send what waits to be sent, and return what has come; never blocks."""
        self._pump()
        events, self._events = self._events, []
        return events

    def post(self, kind: str, **fields: Any) -> None:
        """Tell the server; never blocks, and does nothing without a connection.

        The kinds and their fields (contexts are int, str or bytes):
            "raised" {error, text, peer_failed, needed, why}: of PeerFailed, which rank it names and
            its first line; "abort" {code}, "left" {links, calls, error},
            "note" {text}, for `--verbose`,
            "unencrypted" {}: what travels between hosts is not encrypted,
            "broken" {context, error, rank, reason, message, members},
            "waiting" {context, number, call, where, made, members, waited_s, name,
                serial},
            "running" {},
            "seen" {round, serial, call, options, started, quiet, threads, ends}, to "look",
            "tell" {rank, note},
            "cut" {rank, reason}: the link to a rank is lost, which has not ended,
            "agree" {context, number, name, call, where, members, flag}.

        Raises:
            ValueError: no such kind, or its fields are wrong.
        """
        self._send(kind, wire.parse_post(kind, fields, self._size))
        self._has_posted = True

    def call(self) -> None:
        """Have the launcher send something, whatever it is; never blocks."""
        self._send("who", {})

    def ask_table(self, timeout_s: float) -> list[str]:
        """Return what each rank is doing, one line a rank; empty if no answer came in time."""
        deadline = time.monotonic() + timeout_s
        self._num_asked += 1
        self._send("table", {"id": self._num_asked})
        try:
            while (answer := self._await({"table"}, deadline)) is not None:
                fields = answer[1]
                if fields["id"] == self._num_asked:  # else it comes too late, for an earlier one
                    return list(fields["lines"])
            return []
        finally:
            self._announce_events()

    def close(self, linger_s: float) -> None:
        """Deliver what was posted, waiting at most `linger_s`, and disconnect.

        It returns once the server has handled what was posted, or it is too late for that. May
        be called again. After a fork it does nothing in the child, which must call nothing else.
        """
        if self._is_closed or os.getpid() != self._pid:
            return
        deadline = time.monotonic() + linger_s
        try:
            self.settle(linger_s)
        finally:
            self._is_closed = True
            # Interrupted: what was accepted for sending may still go out.
            self._link.close(max(0.0, deadline - time.monotonic()) if self._has_posted else 0.0)

    def settle(self, timeout_s: float) -> list[Event]:
        """Wait until the server has handled what was posted; return what has come by then."""
        if self._has_posted and timeout_s > 0:
            self._send("bye", {})
            if self._await({"bye"}, time.monotonic() + timeout_s) is not None:
                self._has_posted = False
        return self.progress()

    # The meeting.

    def _meet(self, answer: str, start: float, timeout_s: float) -> list[dict[str, Any]]:
        """Wait for the answer that all ranks get when they have all come."""
        try:
            return self._wait_for_all(answer, start, timeout_s)
        finally:
            self._announce_events()

    def _wait_for_all(self, answer: str, start: float, timeout_s: float) -> list[dict[str, Any]]:
        join, joined = _WORDS[answer]
        deadline = start + timeout_s
        # One last look at who is missing, early enough for its answer.
        last_look = deadline - min(1.0, 0.2 * timeout_s)
        look = min(start + self._notice_s, last_look)
        missing: list[int] = []
        while True:
            came = self._await({answer, "refused", "who"}, look)
            if came is None:
                now = time.monotonic()
                if not self._link.is_open:
                    self._link.raise_if_late(deadline)
                    raise BootstrapError(
                        f"rank {self._rank}: the connection to the launcher at {self._endpoint} "
                        f"was lost before all ranks had {joined}"
                    )
                if now >= deadline:
                    if answer == "met":
                        self._send("withdraw", {})
                        self._has_posted = True
                    launcher = f"the launcher at {self._endpoint}"
                    who = self._rank, self._size
                    raise BootstrapError(wire.too_late(*who, start, missing, joined, launcher))
                self._send("who", {})
                look = min(now + self._notice_s, last_look) if now < last_look else deadline
                continue
            kind, fields = came
            if kind == answer:
                return [self._read_info(*item) for item in enumerate(fields["infos"])]
            if kind == "refused":
                raise BootstrapError(f"rank {self._rank} cannot {join}: {fields['message']}")
            missing = list(fields["missing"])
            is_due = time.monotonic() - start >= self._notice_s
            if missing and fields["lowest"] == self._rank and is_due:
                wire.print_missing(self._rank, self._size, start, missing, join)

    def _read_info(self, rank: int, info: bytes) -> dict[str, Any]:
        try:
            return wire.unpack_info(info)
        except wire.MalformedError as exc:
            raise BootstrapError(f"rank {self._rank} cannot read what rank {rank} sent") from exc

    # Moving messages.

    def _send(self, kind: str, fields: dict[str, Any]) -> None:
        self._link.send(wire.pack(kind, fields), is_state=kind in _STATES)

    def _announce_events(self) -> None:
        """Say on `fileno()` that events have come which nobody has seen yet."""
        if self._events:
            self._link.wake()

    def _await(self, kinds: set[str], deadline: float) -> tuple[str, dict[str, Any]] | None:
        """Wait for an answer of one of these kinds; None: it is too late, or no connection."""
        while True:
            self._pump()
            for kind in kinds & self._answers.keys():
                return kind, self._answers.pop(kind)
            remaining = deadline - time.monotonic()
            if remaining <= 0 or not self._link.is_open:
                return None
            self._link.wait(remaining)

    def _pump(self) -> None:
        was_open = self._link.is_open
        for frame in self._link.pump():
            self.num_received += 1
            try:
                kind, fields = wire.unpack(frame, max(self._size, 64))
            except wire.MalformedError:
                continue  # it comes from the launcher, but it is nothing that we can wait for
            if kind in _EVENTS:
                self._events.append(Event(kind, fields))
            else:
                self._answers[kind] = fields
        if was_open and not self._link.is_open:
            self._events.append(Event("lost", {}))
