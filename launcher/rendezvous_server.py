"""The launcher's end of the rendezvous: where ranks meet, and what is known about each of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from pycoll._launcher.agreement import Agreements
from pycoll._launcher.outcome import ended_in_need
from pycoll._launcher.rank_record import RankRecord
from pycoll._launcher.rendezvous_calls import RankWaits
from pycoll._launcher.rendezvous_carriers import Carriers, Peer, send_all
from pycoll._rendezvous import wire
from pycoll.errors import BootstrapError

_MAX_PID = (1 << 31) - 1


class Notice(NamedTuple):
    """What the launcher must know: `kind` is one of those below.

    The fields are those that the rank sent: joined {pid}, others as `wire.parse_post` says. A rank
    makes each kind at most once, but may join again after it gave up, and says "cut" of each link;
    "unencrypted" comes once. Shrunk {left_out} follows from what all living members of a
    communicator have sent: they go on without these ranks.
    """

    kind: str
    rank: int
    fields: dict[str, Any]


class Server:
    """Lets the ranks of one job meet, and passes on what becomes of them.

    It runs in its owner's loop: sleep until `fileno()` is readable, call `progress()`. Only one
    thread may use it. Importing and running it needs neither NumPy nor a communicator.

    Ranks on this host come by sockets that they inherit (`open_link`), others, and those that have
    lost theirs, by ZeroMQ: a ROUTER here, a DEALER in each rank, CURVE with keys derived from the
    job's key on both sides; `rendezvous_carriers` has both. Once the job has met, nobody can join
    any more, and unless a rank has come by ZeroMQ the port is closed to it: who asks there with
    `wire.late_question` is told {pids} of the ranks in a frame "late", and is cut off.

    `wire` says what ranks send, and what they are sent.
    Nothing but "join" and "bye" is heard from a connection that has not joined, nothing about
    communicators before the job has met, and what does not follow the schema is dropped.

    Args:
        size: number of ranks in the job.
        key: the job's secret, at least 16 random bytes.
        host: the address to listen on; a free port is chosen.
        before_failure: called with a rank that has failed, before the others are told.
        on_failure: called when the ranks have been told that one has failed.
        doing: returns what a rank does without having told us, "" if that is not known.
        beside: returns what the process of a rank does that does not wait in pycoll.

    Attributes:
        size: number of ranks.
        met_at: when they had all joined, of time.monotonic(); 0: they have not.
        calls: what ranks wait in.
        on_seen: called with what a rank answers to `look`.

    Raises:
        ValueError: `size` is less than 1, or the key is too short.
        BootstrapError: cannot listen on `host`.
    """

    def __init__(
        self,
        size: int,
        key: bytes,
        host: str = "127.0.0.1",
        *,
        before_failure: Callable[[int], object] = lambda rank: None,
        on_failure: Callable[[], object] = lambda: None,
        doing: Callable[[int], str] = lambda rank: "",
        beside: Callable[[int, int], str] = lambda rank, pid: "",
    ) -> None:
        if size < 1:
            raise ValueError(f"a job has at least one rank, not {size}")
        wire.check_key(key)
        self.size = size
        self.met_at = 0.0
        self._ranks = [RankRecord() for _ in range(size)]
        self._by_peer: dict[Peer, int] = {}
        self._num_missing = size
        self._met = False
        self._over: str | None = None  # why the job cannot meet any more
        # The exchange under way: its number, what each rank has given; why there is none any more.
        self._round, self._given, self._gone = 0, dict[int, bytes](), ""
        self.calls = RankWaits()
        self._agreements = Agreements(lambda rank: self._ranks[rank].takes_part)
        self.on_seen: Callable[[int, dict[str, Any]], object] = lambda rank, fields: None
        self._notices: list[Notice] = []
        self._told_unencrypted = False
        self._before_failure, self._on_failure = before_failure, on_failure
        self._waits_natively, self._beside = doing, beside
        self._closed = False
        self._carriers = Carriers(key, host)
        self.endpoint = self._carriers.endpoint

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        """Return a descriptor that is readable when `progress()` may have work to do."""
        return self._carriers.fileno()

    def open_link(self) -> int:
        """Make a link for one rank on this host.

        Returns:
            The descriptor for the rank to inherit; the caller closes it. With `link_variable` of it
            the rank knows which one it is.

        Raises:
            OSError: too many files are open.
        """
        return self._carriers.pairs.open()

    def progress(self) -> list[Notice]:
        """Handle the requests that came, without waiting; return what the launcher must know."""
        if self._closed:
            return []
        if self._carriers.is_somebody_at_port():
            self._let_in()
        for peer, frame in self._carriers.receive():
            self._handle(peer, frame)
        notices, self._notices = self._notices, []
        return notices

    def hear(self, peer: Peer, frame: bytes) -> None:
        """Handle a request that has come by another way than the carriers here."""
        if not self._closed:
            self._handle(peer, frame)

    def rank_ended(self, rank: int, reason: str, clean: bool) -> None:
        """Tell all ranks that the process of `rank` is gone; only the first call for it counts.

        Call `progress()` before, so that what the rank said last is heard first.

        Args:
            rank: the rank.
            reason: what became of it, for example "exit status 0".
            clean: it ended with status 0.
        """
        entry = self._ranks[rank]
        if self._closed or entry.ended is not None:
            return
        entry.ended = reason
        self.calls.stop(rank)
        if not self._met:
            joined = "before all ranks had joined" if entry.peer else "before it joined"
            self._end_meeting(f"rank {rank} ended {joined} the job: {reason}")
        elif not clean:
            self.fail(rank, entry.for_want_of() or reason)
        elif not entry.failed:
            self.push_others(rank, "ended", {"rank": rank, "reason": reason})
            self._lose(f"rank {rank} has ended: {reason}")

    @property
    def has_met(self) -> bool:
        """Whether all ranks have joined."""
        return self._met

    def missing(self) -> list[int]:
        """Return the ranks that have not joined, in order."""
        return [rank for rank, entry in enumerate(self._ranks) if entry.peer is None]

    def table(self) -> list[str]:
        """Return one line a rank: what it is doing, since when."""
        now = time.monotonic()
        return [f"rank {rank}: {self._doing(rank, now)}" for rank in range(len(self._ranks))]

    def look(self, ranks: Iterable[int], number: int, contexts: Sequence[wire.Context]) -> None:
        """Ask ranks what they wait in, and how far they are on some communicators.

        Those that wait in pycoll answer: `on_seen` is called with the rank and the fields of its
        post "seen", `number` among them.
        """
        frame = wire.pack("look", {"round": number, "contexts": list(contexts)})
        for rank in ranks:
            self._push(self._ranks[rank], frame)

    def state(self, rank: int) -> tuple[str, int]:
        """Return what is known of a rank beside its waits, "" if it is there, and its process."""
        return self._ranks[rank].state()

    def is_anyone_waiting(self) -> bool:
        """Return whether a rank waits for others, so that `table` is of interest."""
        now = time.monotonic()
        return any(
            entry.is_there and self._waiting(rank, now) for rank, entry in enumerate(self._ranks)
        )

    def close(self) -> None:
        """Stop listening; ranks notice that the connection is lost. May be called again."""
        if not self._closed:
            self._closed = True
            self._carriers.close()

    def close_port(self) -> None:
        """Let nobody new in; who has come stays. May be called again."""
        if not self._closed:
            self._carriers.close_port(self._by_peer)

    def _let_in(self) -> None:
        """Have who has come to the port served, or turned away after the job has met."""
        if self._met:
            return self._carriers.turn_away([entry.pid for entry in self._ranks])
        try:
            self._carriers.open_router()
        except BootstrapError as exc:
            self._end_meeting(str(exc))

    # Requests.

    def _handle(self, peer: Peer, frame: bytes) -> None:
        rank = self._by_peer.get(peer)
        try:
            kind, fields = wire.unpack(frame, max(len(self._ranks), 16))
            if rank is not None:
                self._answer(rank, peer, kind, fields)
            elif kind == "join":
                self._join(peer, fields)
            elif kind == "bye":  # a rank that was refused, or gave up
                self._send(peer, "bye", {})
        except wire.MalformedError as exc:
            # A client checks before it sends, so this is not one of ours, or one gone mad.
            if rank is None:
                self._send(peer, "refused", {"message": f"not understood: {exc}"})

    def _join(self, peer: Peer, fields: dict[str, Any]) -> None:
        # The version comes first: of another version nothing else can be judged.
        version = fields.get("version")
        if version != wire.WIRE_VERSION:
            return self._refuse(
                peer,
                f"this process speaks version {version!r:.20} of pycoll's wire protocol, the "
                f"launcher version {wire.WIRE_VERSION}: both must use the same pycoll",
            )
        size = len(self._ranks)
        claimed = wire.integer(fields.get("size"), 1, 1 << 31)
        rank = wire.integer(fields.get("rank"), 0, claimed - 1)
        pid = wire.integer(fields.get("pid"), 1, _MAX_PID)
        info = _info(fields)
        if claimed != size:
            return self._refuse(
                peer,
                f"process {pid} is rank {rank} of {claimed}, but this job has {size} ranks",
            )
        entry = self._ranks[rank]
        if entry.peer is not None:
            return self._refuse(peer, wire.already_joined(rank, entry.pid, pid))
        if entry.ended is not None:
            return self._refuse(peer, f"rank {rank} has already ended: {entry.ended}")
        entry.peer, entry.pid, entry.info = peer, pid, info
        entry.since = time.monotonic()
        self._by_peer[peer] = rank
        self._num_missing -= 1
        self._notices.append(Notice("joined", rank, {"pid": pid}))
        if self._over is not None:
            self._refuse(peer, self._over)
        elif self._num_missing == 0:
            self._meet()

    def _meet(self) -> None:
        self._met = True
        self.met_at = time.monotonic()
        infos = [entry.info for entry in self._ranks]
        frame = wire.pack("met", {"infos": infos})
        for entry in self._ranks:
            entry.info = b""
        self._push_all(self._ranks, frame)
        self._carriers.end_joining(entry.peer for entry in self._ranks)

    def _answer(self, rank: int, peer: Peer, kind: str, fields: dict[str, Any]) -> None:
        match kind:
            case "bye":
                self._send(peer, "bye", {})
            case "who":
                missing = self.missing()
                if self._met:
                    missing = [r for r in range(len(self._ranks)) if r not in self._given]
                absent = {*missing, *(r for r, e in enumerate(self._ranks) if e.ended is not None)}
                lowest = min({*range(len(self._ranks))} - absent, default=rank)
                self._send(peer, "who", {"missing": missing, "lowest": lowest})
            case "exchange" if self._met:
                self._take(rank, peer, fields)
            case "table":
                number = wire.integer(fields.get("id"), 0, 1 << 62)
                self._send(peer, "table", {"id": number, "lines": self.table()})
            case "withdraw":
                self._withdraw(rank, peer)
            case "join":
                self._refuse(peer, f"rank {rank} has already joined on this connection")
            case _:
                self._post(rank, kind, wire.parse_post(kind, fields, len(self._ranks)))

    def _withdraw(self, rank: int, peer: Peer) -> None:
        if self._met:
            # It gave up at the moment the job met: the others count on a rank that is not there.
            return self.fail(rank, "gave up waiting for the job to meet")
        if self._ranks[rank].ended is None:
            del self._by_peer[peer]
            self._num_missing += 1
            self._ranks[rank] = RankRecord()

    def _take(self, rank: int, peer: Peer, fields: dict[str, Any]) -> None:
        """A rank gives something to the exchange under way."""
        number, info = wire.integer(fields.get("round"), 0, 1 << 62), _info(fields)
        if number != self._round:
            return  # it gave up, and asks again for what was sent to it meanwhile
        if self._gone:
            return self._refuse(peer, self._gone)
        self._given[rank] = info
        if len(self._given) == len(self._ranks):
            infos = [self._given[each] for each in range(len(self._ranks))]
            self._round, self._given = number + 1, {}
            self._push_all(self._ranks, wire.pack("exchanged", {"round": number, "infos": infos}))

    def _lose(self, message: str) -> None:
        """A rank is gone: end the exchange under way, and all that would follow; agree without."""
        self._gone = self._gone or message
        waiting, self._given = [self._ranks[rank] for rank in sorted(self._given)], {}
        self._push_all(waiting, wire.pack("refused", {"message": message}))
        self._tell_agreed()

    def _needs(
        self, rank: int, need: tuple[wire.Context, int, list[int]]
    ) -> list[tuple[wire.Context, int, list[int]]]:
        """What a rank waits for; of an agreement, each rank that is late is a need of its own."""
        context, number, _ = need
        if number != wire.AGREES:
            return [need]
        return [(context, -1, [late]) for late in self._agreements.awaited(rank, context)]

    def _tell_agreed(self) -> None:
        """Tell what living ranks have agreed on by now; they have heard of all that failed."""
        for fields, ranks, left_out in self._agreements.decided():
            self._push_all((self._ranks[rank] for rank in ranks), wire.pack("agreed", fields))
            if left_out:
                self._notices.append(Notice("shrunk", ranks[0], {"left_out": left_out}))

    def _post(self, rank: int, kind: str, fields: dict[str, Any]) -> None:
        entry = self._ranks[rank]
        match kind:
            case "raised" if not entry.raised:
                entry.raised = True
                self._notices.append(Notice(kind, rank, fields))
                entry.trouble = f"raised {fields['error']}"
                entry.cause = fields["why"]
                if not fields["peer_failed"]:
                    self.fail(rank, entry.trouble, fields["text"])
                elif fields["needed"] not in (-1, rank):
                    self._fail_in_need(rank, fields["needed"])
            case "abort" if not entry.aborted:
                entry.aborted = True
                self._notices.append(Notice(kind, rank, fields))
                entry.trouble = f"called abort({fields['code']})"
                self.fail(rank, entry.trouble)
            case "note" if not entry.noted:
                entry.noted = True
                self._notices.append(Notice(kind, rank, fields))
            case "unencrypted" if not self._told_unencrypted:
                self._told_unencrypted = True
                self._notices.append(Notice(kind, rank, fields))
            case "left" if not entry.left:
                entry.left = True
                self.calls.stop(rank)
                self._notices.append(Notice(kind, rank, fields))
                if self._met:
                    self.push_others(rank, "left", {"rank": rank, **fields})
                    self._lose(f"rank {rank} has left the job")
                else:
                    self._end_meeting(f"rank {rank} left before all ranks had joined the job")
            case "broken" if self._met:
                self.break_communicator(fields)
            case "waiting" if self._met:
                mismatch = self.calls.start(rank, fields)
                if mismatch is not None:
                    self.break_communicator(mismatch)
            case "running":
                self.calls.stop(rank)
            case "seen":
                options = [
                    [each for need in option for each in self._needs(rank, need)]
                    for option in fields["options"]
                ]
                self.on_seen(rank, {**fields, "options": options})
            case "agree" if self._met:
                self._agreements.give(rank, fields)
                self._tell_agreed()
            case "cut":
                self._notices.append(Notice(kind, rank, fields))
            case "tell" if self._met:
                told = wire.pack("told", {"rank": rank, "note": fields["note"]})
                self._push(self._ranks[fields["rank"]], told)

    # Telling the ranks.

    def break_communicator(self, fields: dict[str, Any]) -> None:
        """Tell the members that a communicator is broken; only the first cause counts."""
        members = fields.pop("members")
        if self.calls.note_broken(fields["context"]):
            self._push_all((self._ranks[rank] for rank in members), wire.pack("broken", fields))

    def _end_meeting(self, message: str) -> None:
        if self._over is None:
            self._over = message
            self._push_all(self._ranks, wire.pack("refused", {"message": message}))

    def fail(self, rank: int, reason: str, detail: str = "") -> None:
        """Tell all ranks that `rank` has failed; only the first call for it counts.

        Args:
            rank: the rank.
            reason: what became of it, or why it is given up.
            detail: its traceback.
        """
        entry = self._ranks[rank]
        if not self._met:
            text = f"rank {rank} failed before all ranks had joined the job: {reason}"
            self._end_meeting(f"{text}\n{detail}" if detail else text)
        elif not entry.failed:
            entry.failed = True
            self._before_failure(rank)
            self.push_others(rank, "failed", {"rank": rank, "reason": reason, "detail": detail})
            self._lose(f"rank {rank} failed: {reason}")
            self._on_failure()

    def _fail_in_need(self, rank: int, needed: int) -> None:
        """A rank fails for want of one that has ended well: the others hear the first cause."""
        ended, left = self._ranks[needed].ended, self._ranks[needed].left
        if ended is not None and not left:
            self.fail(needed, ended_in_need(ended, rank))
        elif left:
            self.fail(rank, self._ranks[rank].for_want_of())

    def push_others(self, rank: int, kind: str, fields: dict[str, Any]) -> None:
        others = (entry for other, entry in enumerate(self._ranks) if other != rank)
        self._push_all(others, wire.pack(kind, fields))

    def _push_all(self, entries: Iterable[RankRecord], frame: bytes) -> None:
        there = (entry.peer for entry in entries if entry.ended is None)
        send_all((peer for peer in there if peer is not None), frame)

    def _push(self, entry: RankRecord, frame: bytes) -> None:
        if entry.peer is not None and entry.ended is None:
            entry.peer.send(frame)

    def _refuse(self, peer: Peer, message: str) -> None:
        self._send(peer, "refused", {"message": message})

    def _send(self, peer: Peer, kind: str, fields: dict[str, Any]) -> None:
        peer.send(wire.pack(kind, fields))

    def _doing(self, rank: int, now: float) -> str:
        doing = self._ranks[rank].doing() or self._waiting(rank, now)
        if doing:
            return doing
        last = self.calls.last_of(rank)
        before = f"; until {now - last[1]:.1f} s ago in {last[0]}" if last else ""
        process = self._beside(rank, self._ranks[rank].pid)
        process = f"; {process}" if process else ""
        return f"not waiting in pycoll, or for less than 0.2 s{before}{process}"

    def _waiting(self, rank: int, now: float) -> str:
        """What a rank that is there waits in, and for how long; "" if it does not wait."""
        if not self._met:
            since = self._ranks[rank].since
            return f"in init(), waiting for the other ranks, for {now - since:.1f} s"
        wait = self.calls.wait_of(rank)
        return f"{wait}, for {now - wait.since:.1f} s" if wait else self._waits_natively(rank)


def _info(fields: dict[str, Any]) -> bytes:
    info = fields.get("info")
    if not isinstance(info, bytes) or len(info) > wire.MAX_INFO_NBYTES:
        raise wire.MalformedError("a rank's info is wrong")
    return info
