"""Where the ranks meet that another launcher has started: pycoll-run's part, but it starts nothing.

`python -m pycoll._launcher.meeting SIZE PORT DEADLINE UNTIL_LEFT`, which rank 0 starts
(`entering`). It waits until the deadline, of time.monotonic(), for a port that is taken. Standard
input has the key; that it ends before all ranks have come means that rank 0 has given up. This
process says where it listens, goes on in the background until all ranks have ended, and closes its
standard output when all but rank 0 have. UNTIL_LEFT is 1 in a world of `pycoll.join`: there a rank
that leaves counts as one that has ended, because its process may go on for long. Agents come to it
(`adopting`), and it does with them what `hosts` does with those that `pycoll-run` has started.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pycoll._launcher import host_routes
from pycoll._launcher.adopting import UNKNOWN
from pycoll._launcher.host import RankProgram
from pycoll._launcher.network_line import CallerLine
from pycoll._launcher.outcome import end_text
from pycoll._launcher.reach import Reachability, listen_everywhere, own_addresses
from pycoll._launcher.remote import RemoteHost
from pycoll._launcher.rendezvous_router import Caller, Router
from pycoll._launcher.rendezvous_server import Notice, Server
from pycoll._launcher.signals import caught_signals, outlive_signals
from pycoll._launcher.watch import Watch
from pycoll._rendezvous.wire import MAX_FRAME_NBYTES
from pycoll._support.environment import places, warn_after
from pycoll._support.wording import ranks_text
from pycoll.errors import Error

if TYPE_CHECKING:
    from pycoll._launcher.recorder import CallRecorder

_ABORT_S = 1.0  # for a rank that has called abort to end
_KILL_S = 2.0  # then from SIGTERM to SIGKILL for the others
_SWEEP_S = 8.0  # for agents to say that they are done
_MAX_ADDRESSES = 16  # a ticket has at most 1024 characters, or PMI would not take it
_LISTEN_S, _PAUSE_S = 3.0, 0.05  # for a port that is taken, and between trials
_TELL_MISSING_S = 0.5  # at least, between telling ranks who is missing


class Meeting:
    """The job, as far as it is known here; `remote.RemoteEvents` of its agents.

    Args:
        size: number of ranks.
        key: the job's.
        listener: where agents come; it becomes its own.
        until_left: a rank that has left counts as one that has ended.
    """

    def __init__(
        self, size: int, key: bytes, listener: socket.socket, until_left: bool = False
    ) -> None:
        self._size, self._key, self._until_left = size, key, until_left
        self._job = os.urandom(16).hex()
        self._stack = contextlib.ExitStack()
        self._selector = self._stack.enter_context(selectors.DefaultSelector())
        self._stack.callback(listener.close)
        self._router = Router(listener.fileno(), key, 2 * MAX_FRAME_NBYTES)
        self._stack.callback(self._router.close)
        self._server = Server(
            size,
            key,
            before_failure=lambda rank: self._keep_calls(f"rank {rank} had failed"),
            on_failure=self._tell_failure,
            doing=lambda r: self._of[r].doing(r),
        )
        self._stack.callback(self._server.close)
        self._watch = Watch(
            self._server,
            size,
            warn_after(os.environ),
            lambda lines, is_certain: self._tell_of_waits(lines),
            lambda rank, pid: self._of[rank].state(rank, pid),
        )
        self._agents: dict[Caller, tuple[RemoteHost, CallerLine]] = {}
        self._of: dict[int, RemoteHost] = {}  # by rank, who has come
        self._joiners: dict[tuple[RemoteHost, int], int] = {}  # host and number there: rank
        self._hosts: list[RemoteHost] = []  # in the order of their numbers, once all have come
        self._ways: host_routes.HostRoutes | None = None
        self._num_opened = 0
        self._have_started = False  # ranks are being let in
        self._left: set[int] = set()  # ranks that have finalized
        self._ended: set[int] = set()
        self._told_missing: list[int] = []
        self._tell_missing_at = 0.0
        self._keeps_rank_0 = True
        self._aborter = -1  # the rank that has called abort
        self._plan: dict[int, float] = {}  # signals for the ranks, and when to send them
        self._why = ""  # there will be no meeting
        self._recorder: CallRecorder | None = None

    def run(self, parent_fd: int) -> int:
        """Serve until all ranks have ended, or there will be no meeting.

        Args:
            parent_fd: a pipe from rank 0, which has started this: it can be read when rank 0 has
                come in or is gone.
        """
        with self._stack:
            signals = self._stack.enter_context(caught_signals(self._selector))
            self._selector.register(
                parent_fd, selectors.EVENT_READ, lambda: self._detach_from_parent(parent_fd)
            )
            self._selector.register(self._router.fileno(), selectors.EVENT_READ, self._hear)
            self._selector.register(self._server.fileno(), selectors.EVENT_READ, _nothing)
            self._dismiss()  # where it is alone
            while len(self._over) < self._size and not self._why and not signals:
                wake = self._act(time.monotonic())
                if self._listen():
                    continue
                for key, _ in self._selector.select(max(0.0, wake - time.monotonic())):
                    key.data()
            self._sweep()
        return 1 if self._why else 0

    @property
    def _over(self) -> set[int]:
        """The ranks for which nothing is to be done any more."""
        return self._ended | self._left if self._until_left else self._ended

    def _act(self, now: float) -> float:
        wake = [now + 1.0, self._watch.update(now)]
        wake += [host.update(now) for host, _ in self._agents.values()]
        if not self._hosts:
            missing = [rank for rank in range(self._size) if rank not in self._of]
            if missing != self._told_missing and now >= self._tell_missing_at:
                self._told_missing, self._tell_missing_at = missing, now + _TELL_MISSING_S
                for _, line in self._agents.values():
                    line.send("missing", missing)
        for signum, due in list(self._plan.items()):
            if now >= due:
                del self._plan[signum]
                for host in self._hosts:
                    host.signal(signum)
        wake.extend(self._plan.values())
        return min(wake)

    def _hear(self) -> None:
        for caller, frame in self._router.receive():
            if caller not in self._agents:
                self._welcome(caller)
            self._agents[caller][1].came(frame)

    def _listen(self) -> bool:
        """Handle what ranks have said; returns whether there was anything."""
        heard = False
        while notices := self._server.progress():
            heard = True
            for notice in notices:
                self._note(notice)
        return heard

    def _note(self, notice: Notice) -> None:
        rank = notice.rank
        if rank == 0 and notice.kind in ("raised", "abort"):
            self._release()  # or its launcher would not see that it has failed
        if notice.kind == "joined":
            self._of[rank].watch_joined(rank, int(notice.fields["pid"]))
        elif notice.kind == "left":
            self._left.add(rank)
            self._dismiss()
        elif notice.kind == "abort":
            # It ends by itself, with its own status: the signal is for the others.
            self._aborter = rank
            self._abort(time.monotonic() + _ABORT_S)

    def _detach_from_parent(self, parent_fd: int) -> None:
        """Rank 0 has come in, or given up."""
        self._selector.unregister(parent_fd)
        if not self._hosts:
            self._give_up(0)

    def _welcome(self, caller: Caller) -> None:
        host = RemoteHost("a host", self, None, self._server.hear)
        line = CallerLine(caller, lambda kind, fields: self._said(host, kind, fields), host.lose)
        host.line = line
        self._agents[caller] = host, line

    def _said(self, host: RemoteHost, kind: str, fields: list[object]) -> None:
        if kind == "came":
            self._admit(host, *fields)  # type: ignore[arg-type]  # as adopting says
        elif kind == "went":
            self._go(host, *fields)  # type: ignore[arg-type]
        else:
            host.hear(kind, fields)

    def _admit(self, host: RemoteHost, number: int, rank: int, size: int, pid: int) -> None:
        why = ""
        if size != self._size:
            why = f"it says that the job has {size} ranks, rank 0 says {self._size}"
        elif not 0 <= rank < size:
            why = f"its rank is {rank}, the job has {size}"
        elif rank in self._of:
            there = self._of[rank].name
            why = f"another process, on {there}, is rank {rank} already; this is process {pid}"
        if why:
            return host.line.send("turn_away", number, why)
        self._of[rank] = host
        self._joiners[host, number] = rank
        if len(self._of) == self._size:
            self._open()

    def _go(self, host: RemoteHost, number: int) -> None:
        rank = self._joiners.get((host, number))
        if rank is not None and not self._have_started:
            self._give_up(rank)

    def _give_up(self, rank: int) -> None:
        missing = [other for other in range(self._size) if other not in self._of]
        text = f"rank {rank} has given up, or ended"
        if missing:
            text += f": {ranks_text(missing)} of {self._size} had not joined"
        self._refuse(text)

    def _refuse(self, why: str) -> None:
        """There will be no meeting: tell all who wait."""
        if not self._why:
            self._why = why
            for _, line in self._agents.values():
                line.send("turn_away", -1, why)

    def _open(self) -> None:
        """All have come: find out where each is, and have everything made."""
        self._hosts = list(dict.fromkeys(self._of[rank] for rank in range(self._size)))
        nodes = [self._hosts.index(self._of[rank]) for rank in range(self._size)]
        where = dict(enumerate(places(nodes)))
        for node, host in enumerate(self._hosts):
            host.places = {rank: place for rank, place in where.items() if place.node == node}
            host.open(self._job, self._key, node)

    def _start(self) -> None:
        self._have_started = True
        for host in self._hosts:
            environment = {
                "PYCOLL_SIZE": str(self._size),
                "PYCOLL_KEY": self._key.hex(),
                "PYCOLL_RENDEZVOUS": self._server.endpoint,
                "PYCOLL_JOB": self._job,
            }
            if self._ways is not None:
                addresses = [
                    f"{n}={self._ways.address(host, o)}" for n, o in enumerate(self._hosts)
                ]
                environment["PYCOLL_ADDRESSES"] = ",".join(addresses)
            host.start(RankProgram((), environment))

    def _tell_of_waits(self, lines: Sequence[str]) -> None:
        self._keep_calls(lines[0])
        self.tell(lines)

    def _keep_calls(self, why: str) -> None:
        """Have what ranks have called last written, if the user wants it; the first reason counts.

        The folder is one of rank 0's host.
        """
        folder = os.environ.get("PYCOLL_LOG_DIR", "")
        if not folder or self._recorder is not None or not self._have_started:
            return
        from pycoll._launcher.recorder import CallRecorder

        with contextlib.suppress(OSError):  # who writes there says so
            os.makedirs(folder, exist_ok=True)
        self._recorder = CallRecorder(folder, why, lambda text: self.tell([text]))
        self._recorder.ask(self._of)

    def _tell_failure(self) -> None:
        for host in self._hosts:
            host.tell_failure()

    def _abort(self, now: float) -> None:
        self._plan = {signal.SIGTERM: now, signal.SIGKILL: now + _KILL_S}

    def _sweep(self) -> None:
        """Let the agents go."""
        agents = [host for host, _ in self._agents.values()]
        for host in agents:
            host.sweep()
        deadline = time.monotonic() + _SWEEP_S
        while (now := time.monotonic()) < deadline and not all(host.is_over for host in agents):
            wake = min([deadline, *(host.update(now) for host in agents)])
            for key, _ in self._selector.select(max(0.0, wake - now)):
                key.data()
            self._listen()
        if self._recorder is not None:
            self._recorder.finish()

    # What agents tell: `remote.RemoteEvents`.

    def ended(self, rank: int, status: int) -> None:
        """Called when the process of a rank has ended."""
        self._listen()
        if rank in self._ended:
            return
        self._ended.add(rank)
        clean = status == 0 or (status == UNKNOWN and rank in self._left)
        text = end_text(status) if status != UNKNOWN else "its process ended"
        if status == UNKNOWN and not clean:
            text += " without pycoll.finalize()"
        self._server.rank_ended(rank, text, clean)
        self._dismiss()
        if rank == self._aborter:
            self._abort(time.monotonic())

    def _dismiss(self) -> None:
        """When all others have ended, let rank 0 end, which waits for that (`entering`)."""
        if len(self._over - {0}) == self._size - 1:
            self._release()

    def _release(self) -> None:
        if self._keeps_rank_0:
            self._keeps_rank_0 = False
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            os.close(nowhere)

    def lost(self, rank: int) -> None:
        """Called when the process that joined as a rank has ended; its parent lives on."""
        self.ended(rank, UNKNOWN)

    def say(self, text: str) -> None:
        """Nobody has asked."""

    def tell(self, lines: Sequence[str]) -> None:
        """Show the user what no rank has written."""
        with contextlib.suppress(OSError):
            print(
                "".join(f"pycoll: {line}\n" for line in lines), end="", file=sys.stderr, flush=True
            )

    def signalled(self, signum: int) -> None:
        """Whoever has started the ranks signals them, too."""

    def here(self, host: RemoteHost) -> None:
        """Called when an agent is there."""
        host.name = host.hello["host"]
        self._told_missing = []

    def opened(self, host: RemoteHost) -> None:
        """Called when a host has everything but its ranks; when all have, ways are tried."""
        self._num_opened += 1
        if self._num_opened < len(self._hosts):
            return
        if len(self._hosts) == 1:
            return self._start()
        names = [each.name for each in self._hosts]
        self._ways = host_routes.HostRoutes(
            self._key, self._hosts, names, self._selector, self._see_ways, self._stack
        )

    def _see_ways(self) -> None:
        assert self._ways is not None
        if lost := self._ways.failures():
            self._refuse("; ".join(lost))
        else:
            self._start()

    def reached(self, host: RemoteHost, found: Sequence[Reachability]) -> None:
        """Called when it is known how other hosts are reached from one."""
        assert self._ways is not None
        self._ways.told(host, found)

    def started(self, host: RemoteHost) -> None:
        """Called when the ranks of a host have come in: nothing waits for it."""

    def refused(self, host: RemoteHost, error: OSError) -> None:
        """Called when a host cannot have what its ranks need."""
        self._refuse(f"{host.name}: {error.strerror}")

    def gone(self, host: RemoteHost, why: str, is_ending: bool = False) -> None:
        """Called when a host is lost, with its ranks."""
        if not self._have_started:
            return self._refuse(f"{host.name}: {why}")
        reason = f"lost with its host {host.name}: {why}"
        self._listen()
        for rank in host.ranks:
            if rank not in self._ended:
                self._ended.add(rank)
                # A container ends, with its agent, when its first process does.
                self._server.rank_ended(rank, reason, rank in self._left)
        self._dismiss()


def _nothing() -> None:
    """What is readable is read by the loop."""


def main(size: str, port: str, deadline: str, until_left: str) -> int:
    """Listen, say where, and serve the job in the background."""
    key = bytes.fromhex(sys.stdin.readline())
    if os.fork():
        os._exit(0)  # rank 0 waits for what this says, and no longer
    outlive_signals()
    try:
        listener = _listen(int(port), float(deadline))
        meeting = Meeting(int(size), key, listener, until_left == "1")
    except OSError as exc:
        print(f"cannot listen at port {port}: {exc.strerror or exc}", flush=True)
        return 1
    except Error as exc:
        print(exc, flush=True)
        return 1
    addresses = ",".join(one.address for one in own_addresses()[:_MAX_ADDRESSES])
    print("port", listener.getsockname()[1], addresses, flush=True)
    try:
        return meeting.run(0)
    except Error as exc:
        print(f"pycoll: {exc}", file=sys.stderr, flush=True)
        return 1


def _listen(port: int, deadline: float) -> socket.socket:
    """Listen at a port; the meeting of the job before, of the same variables, may still leave."""
    deadline = min(deadline, time.monotonic() + _LISTEN_S)
    while True:
        try:
            return listen_everywhere(port)
        except OSError as exc:
            if exc.errno != errno.EADDRINUSE or time.monotonic() >= deadline:
                raise
        time.sleep(_PAUSE_S)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
