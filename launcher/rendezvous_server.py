"""The launcher's end of the rendezvous: where ranks meet, and what is known about each of them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import zmq
from zmq.utils import z85

from pycoll.errors import BootstrapError
from pycoll.launcher import rendezvous_wire as wire
from pycoll.launcher.rendezvous_calls import Calls
from pycoll.zap import Authenticator, guard

_ZAP_DOMAIN = "pycoll.rendezvous"

# Requests handled in one progress(), so that a rank that floods cannot hold the launcher's loop.
_BATCH = 1000

# Messages kept for a rank that does not read (it is stopped); what comes on top is dropped.
_SEND_QUEUE = 100_000

# The kernel lowers it to net.core.somaxconn. libzmq's 100 makes the 101st rank of a burst wait
# for a repeated SYN, a second later.
_BACKLOG = 4096

_CLOSE_LINGER_MS = 200
_MAX_PID = (1 << 31) - 1


class Notice(NamedTuple):
    """What the launcher must know: `kind` is "joined", "raised", "abort" or "left".

    The fields are those that the rank sent: joined {pid}, raised {error, text, peer_failed},
    abort {code}, left {links}. A rank makes each kind at most once, but may join again after it
    gave up waiting.
    """

    kind: str
    rank: int
    fields: dict[str, Any]


@dataclass(slots=True)
class _Rank:
    """What is known about one rank."""

    identity: bytes | None = None  # its connection; None until it joined
    pid: int = 0
    info: bytes = b""
    since: float = 0.0
    left: bool = False
    raised: bool = False
    aborted: bool = False
    trouble: str = ""  # why it failed or is about to end, while its process lives
    failed: bool = False  # the others were told
    ended: str | None = None  # what became of its process


class Server:
    """Lets the ranks of one job meet, and passes on what becomes of them.

    It runs in its owner's loop: sleep until `fileno()` is readable, call `progress()`. Only one
    thread may use it. Importing and running it needs neither NumPy nor a communicator.

    Protocol, version `WIRE_VERSION`: a ZeroMQ ROUTER here, a DEALER in each rank, CURVE with keys
    derived from the job's key on both sides. A message is one frame, msgpack of [kind, fields].

        a rank sends            answer or effect
        join {version, rank,    once all ranks have joined: met {infos}, to all of them.
          size, pid, info}      refused {message} if this one may not join, or if the job cannot
                                meet any more. `info` is opaque bytes.
        who {}                  who {missing, lowest}: who has not joined; the lowest rank present
        withdraw {}             it gave up waiting; its rank may join again
        table {id}              table {id, lines}: see `table()`
        bye {}                  bye {}: everything it sent before has been handled
        raised, abort, left,    see `rendezvous_wire.parse_post` for the fields. waiting and
          broken, waiting,      running are remembered, the others become a notice or an event
          running

        pushed to ranks         when
        failed {rank, reason,   a rank raised (but not PeerFailed), aborted, or its process ended
          detail}               and not with status 0; once a rank, to all others
        left {rank, links}      a rank finalized; to all others
        ended {rank, reason}    a rank's process ended with status 0; to all others
        broken {context, error, a rank said so, or two ranks wait in the same (context, number)
          rank, reason,         in different calls; to the members, the first for a context only
          message}

    Nothing but "join" and "bye" is heard from a connection that has not joined, nothing about
    communicators before the job has met, and what does not follow the schema is dropped.

    Args:
        size: number of ranks in the job.
        key: the job's secret, at least 16 random bytes.
        host: the address to listen on; a free port is chosen.

    Raises:
        ValueError: `size` is less than 1, or the key is too short.
        BootstrapError: cannot listen on `host`.
    """

    def __init__(self, size: int, key: bytes, host: str = "127.0.0.1") -> None:
        if size < 1:
            raise ValueError(f"a job has at least one rank, not {size}")
        keys = wire.derive_keys(key)
        self._ranks = [_Rank() for _ in range(size)]
        self._by_identity: dict[bytes, int] = {}
        self._num_missing = size
        self._met = False
        self._over: str | None = None  # why the job cannot meet any more
        self._calls = Calls()
        self._notices: list[Notice] = []
        self._closed = False
        self._context = zmq.Context()
        self._authenticator = Authenticator(self._context)
        self._socket = self._context.socket(zmq.ROUTER)
        self._wakeup = wire.Wakeup()
        try:
            self._authenticator.allow_curve(_ZAP_DOMAIN, z85.decode(keys.client_public))
            self.endpoint = self._listen(keys, host)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def fileno(self) -> int:
        """Return a descriptor that is readable when `progress()` may have work to do."""
        return self._wakeup.fileno()

    def progress(self) -> list[Notice]:
        """Handle the requests that came, without waiting; return what the launcher must know."""
        if self._closed:
            return []
        self._wakeup.clear()
        for _ in range(_BATCH):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            if len(frames) == 2:
                self._handle(frames[0], frames[1])
        else:
            self._wakeup.set()
        notices, self._notices = self._notices, []
        return notices

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
        self._calls.stop(rank)
        if not self._met:
            joined = "before all ranks had joined" if entry.identity else "before it joined"
            self._end_meeting(f"rank {rank} ended {joined} the job: {reason}")
        elif not clean:
            self._fail(rank, reason, "")
        elif not entry.failed:
            self._push_others(rank, "ended", {"rank": rank, "reason": reason})
        self._wakeup.restore(self._socket)

    def missing(self) -> list[int]:
        """Return the ranks that have not joined, in order."""
        return [rank for rank, entry in enumerate(self._ranks) if entry.identity is None]

    def table(self) -> list[str]:
        """Return one line a rank: what it is doing, since when."""
        now = time.monotonic()
        return [f"rank {rank}: {self._doing(rank, now)}" for rank in range(len(self._ranks))]

    def close(self) -> None:
        """Stop listening; ranks notice that the connection is lost. May be called again."""
        if self._closed:
            return
        self._closed = True
        self._wakeup.close()
        self._socket.close(_CLOSE_LINGER_MS)
        self._authenticator.close()
        self._context.term()

    def _listen(self, keys: wire.Keys, host: str) -> str:
        socket = self._socket
        socket.curve_server = True
        socket.curve_publickey = keys.server_public
        socket.curve_secretkey = keys.server_secret
        guard(socket, _ZAP_DOMAIN)
        socket.maxmsgsize = wire.MAX_FRAME_NBYTES
        # A rank stopped in the middle of the handshake is slow, not lost.
        socket.handshake_ivl = 0
        socket.backlog = _BACKLOG
        socket.sndhwm = _SEND_QUEUE
        address = f"tcp://{host}:*"
        if ":" in host:
            socket.ipv6 = True
            address = f"tcp://[{host}]:*"
        try:
            socket.bind(address)
        except zmq.ZMQError as exc:
            raise BootstrapError(f"the launcher cannot listen on {address}: {exc}") from exc
        self._wakeup.add(socket)
        endpoint = socket.get(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        return endpoint.rstrip(b"\0").decode()

    # Requests.

    def _handle(self, identity: bytes, frame: bytes) -> None:
        rank = self._by_identity.get(identity)
        try:
            kind, fields = wire.unpack(frame, max(len(self._ranks), 16))
            if rank is not None:
                self._answer(rank, identity, kind, fields)
            elif kind == "join":
                self._join(identity, fields)
            elif kind == "bye":  # a rank that was refused, or gave up
                self._send(identity, "bye", {})
        except wire.MalformedError as exc:
            # A client checks before it sends, so this is not one of ours, or one gone mad.
            if rank is None:
                self._send(identity, "refused", {"message": f"not understood: {exc}"})

    def _join(self, identity: bytes, fields: dict[str, Any]) -> None:
        # The version comes first: of another version nothing else can be judged.
        version = fields.get("version")
        if version != wire.WIRE_VERSION:
            return self._refuse(
                identity,
                f"this process speaks version {version!r:.20} of pycoll's wire protocol, the "
                f"launcher version {wire.WIRE_VERSION}: both must use the same pycoll",
            )
        size = len(self._ranks)
        claimed = wire.integer(fields.get("size"), 1, 1 << 31)
        rank = wire.integer(fields.get("rank"), 0, claimed - 1)
        pid = wire.integer(fields.get("pid"), 1, _MAX_PID)
        info = fields.get("info")
        if not isinstance(info, bytes) or len(info) > wire.MAX_INFO_NBYTES:
            raise wire.MalformedError("a rank's info is wrong")
        if claimed != size:
            return self._refuse(
                identity,
                f"process {pid} is rank {rank} of {claimed}, but this job has {size} ranks",
            )
        entry = self._ranks[rank]
        if entry.identity is not None:
            return self._refuse(
                identity,
                f"rank {rank} is already process {entry.pid}; this is process {pid}. Each rank "
                "joins once: a process started by a rank must not call init()",
            )
        if entry.ended is not None:
            return self._refuse(identity, f"rank {rank} has already ended: {entry.ended}")
        entry.identity, entry.pid, entry.info = identity, pid, info
        entry.since = time.monotonic()
        self._by_identity[identity] = rank
        self._num_missing -= 1
        self._notices.append(Notice("joined", rank, {"pid": pid}))
        if self._over is not None:
            self._refuse(identity, self._over)
        elif self._num_missing == 0:
            self._meet()

    def _meet(self) -> None:
        self._met = True
        infos = [entry.info for entry in self._ranks]
        frame = wire.pack("met", {"infos": infos})
        for entry in self._ranks:
            entry.info = b""
            self._push(entry, frame)

    def _answer(self, rank: int, identity: bytes, kind: str, fields: dict[str, Any]) -> None:
        match kind:
            case "bye":
                self._send(identity, "bye", {})
            case "who":
                present = (r for r, e in enumerate(self._ranks) if e.identity and e.ended is None)
                lowest = min(present, default=rank)
                self._send(identity, "who", {"missing": self.missing(), "lowest": lowest})
            case "table":
                number = wire.integer(fields.get("id"), 0, 1 << 62)
                self._send(identity, "table", {"id": number, "lines": self.table()})
            case "withdraw":
                self._withdraw(rank, identity)
            case "join":
                self._refuse(identity, f"rank {rank} has already joined on this connection")
            case _:
                self._post(rank, kind, wire.parse_post(kind, fields, len(self._ranks)))

    def _withdraw(self, rank: int, identity: bytes) -> None:
        if self._met:
            # It gave up at the moment the job met: the others count on a rank that is not there.
            return self._fail(rank, "gave up waiting for the job to meet", "")
        if self._ranks[rank].ended is None:
            del self._by_identity[identity]
            self._num_missing += 1
            self._ranks[rank] = _Rank()

    def _post(self, rank: int, kind: str, fields: dict[str, Any]) -> None:
        entry = self._ranks[rank]
        match kind:
            case "raised" if not entry.raised:
                entry.raised = True
                self._notices.append(Notice(kind, rank, fields))
                entry.trouble = f"raised {fields['error']}"
                if not fields["peer_failed"]:
                    self._fail(rank, entry.trouble, fields["text"])
            case "abort" if not entry.aborted:
                entry.aborted = True
                self._notices.append(Notice(kind, rank, fields))
                entry.trouble = f"called abort({fields['code']})"
                self._fail(rank, entry.trouble, "")
            case "left" if not entry.left:
                entry.left = True
                self._calls.stop(rank)
                self._notices.append(Notice(kind, rank, fields))
                if self._met:
                    self._push_others(rank, "left", {"rank": rank, **fields})
                else:
                    self._end_meeting(f"rank {rank} left before all ranks had joined the job")
            case "broken" if self._met:
                self._break(fields)
            case "waiting" if self._met:
                mismatch = self._calls.start(rank, fields)
                if mismatch is not None:
                    self._break(mismatch)
            case "running":
                self._calls.stop(rank)

    # Telling the ranks.

    def _break(self, fields: dict[str, Any]) -> None:
        """Tell the members that a communicator is broken; only the first cause counts."""
        members = fields.pop("members")
        if self._calls.note_broken(fields["context"]):
            frame = wire.pack("broken", fields)
            for rank in members:
                self._push(self._ranks[rank], frame)

    def _end_meeting(self, message: str) -> None:
        if self._over is None:
            self._over = message
            frame = wire.pack("refused", {"message": message})
            for entry in self._ranks:
                self._push(entry, frame)

    def _fail(self, rank: int, reason: str, detail: str) -> None:
        entry = self._ranks[rank]
        if not self._met:
            text = f"rank {rank} failed before all ranks had joined the job: {reason}"
            self._end_meeting(f"{text}\n{detail}" if detail else text)
        elif not entry.failed:
            entry.failed = True
            self._push_others(rank, "failed", {"rank": rank, "reason": reason, "detail": detail})

    def _push_others(self, rank: int, kind: str, fields: dict[str, Any]) -> None:
        frame = wire.pack(kind, fields)
        for other, entry in enumerate(self._ranks):
            if other != rank:
                self._push(entry, frame)

    def _push(self, entry: _Rank, frame: bytes) -> None:
        if entry.identity is not None and entry.ended is None:
            self._socket.send_multipart([entry.identity, frame], zmq.NOBLOCK)

    def _refuse(self, identity: bytes, message: str) -> None:
        self._send(identity, "refused", {"message": message})

    def _send(self, identity: bytes, kind: str, fields: dict[str, Any]) -> None:
        # A ROUTER drops what is for a connection that is gone, and never blocks.
        self._socket.send_multipart([identity, wire.pack(kind, fields)], zmq.NOBLOCK)

    def _doing(self, rank: int, now: float) -> str:
        entry, wait = self._ranks[rank], self._calls.wait_of(rank)
        if entry.ended is not None:
            return f"ended ({entry.ended})"
        if entry.identity is None:
            return "has not joined"
        if entry.trouble:
            return entry.trouble
        if entry.left:
            return "has finalized"
        if not self._met:
            return f"in init(), waiting for the other ranks, for {now - entry.since:.1f} s"
        if wait is None:
            return "not waiting in pycoll (or only just)"
        return f"{wait}, for {now - wait.since:.1f} s"
