"""The launcher's end of another host: a program that runs there, the agent, and what it tells.

How the agent is started is a command (`host_choice`), on whose standard input and output the two
talk; see `agent`.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from pycoll._launcher import agent
from pycoll._launcher.host import Events, RankProgram
from pycoll._launcher.host_memory import Tally
from pycoll._launcher.input import Input
from pycoll._launcher.line import LOST_S, DescriptorLine, Line
from pycoll._launcher.outcome import end_text
from pycoll._launcher.output import Relay
from pycoll._launcher.reach import HostAddresses, Reachability
from pycoll._launcher.rendezvous_carriers import Peer, Relayed
from pycoll._support.environment import HostPlacement

if TYPE_CHECKING:
    from pycoll._launcher.awaited import WaitSums
    from pycoll._launcher.kept_calls import HostCalls
    from pycoll._launcher.tracing import RemoteTrace

START_S = 60.0
"""For an agent to say who it is."""

_MESSAGE_LINES = 6  # of what the starter writes to standard error, in an error
_NOT_INSTALLED = re.compile(rb"No module named '?pycoll\b")
_SSH_FAILED = 255  # ssh's own status, and that of a command there which a signal has ended
_MAX_MESSAGE_NBYTES = 64 << 10
_GOODBYE_S = 1.0  # for a starter to end when its agent has


class RemoteEvents(Events, Protocol):
    """What a host with an agent tells the launcher, too."""

    def here(self, host: RemoteHost) -> None:
        """Called when the agent is there, and of the same versions."""

    def opened(self, host: RemoteHost) -> None:
        """Called when everything is there but the ranks."""

    def reached(self, host: RemoteHost, found: Sequence[Reachability]) -> None:
        """Called when it is known how other hosts are reached from this one."""

    def started(self, host: RemoteHost) -> None:
        """Called when the ranks have been started."""

    def refused(self, host: RemoteHost, error: OSError) -> None:
        """Called when the ranks cannot be started."""

    def gone(self, host: RemoteHost, why: str, is_ending: bool = False) -> None:
        """Called when nothing can come from this host any more, or soon (`is_ending`)."""

    def tell(self, lines: Sequence[str]) -> None:
        """Show the user what is not a rank's."""

    def signalled(self, signum: int) -> None:
        """Called when the agent was sent a signal that is for the ranks: of all hosts."""


class RemoteHost:
    """A host with an agent: `host.Host`. The agent comes by `line`, which whoever makes this sets.

    Args:
        name: as the user calls it.
        events: hears what happens.
        relay: gets what the ranks write; None: they write for themselves.
        meeting: gets what the ranks say to the launcher, and from whom.
        start_s: how long the agent may take to come.

    Attributes:
        hello: what the agent has said of itself; see `agent`.
        heard_at: when that was, of time.time().
        port: where others may try to reach it; 0: not open yet.
        places: where its ranks are, by rank; whoever decides that sets it.
        is_over: nothing more will come: it has ended, or is lost.
        is_swept: nothing of the job is left there.
        input: what its rank 0 reads, if that is passed on; whoever reads it sets this.
        is_traced: its ranks will record what they do; whoever decides that sets it.
        trace: what is known for that; None: they do not, or it is not there.
    """

    line: Line
    input: Input | None = None
    is_traced = is_swept = False
    trace: RemoteTrace | None = None

    def __init__(
        self,
        name: str,
        events: RemoteEvents,
        relay: Relay | None,
        meeting: Callable[[Peer, bytes], object],
        start_s: float = START_S,
    ) -> None:
        self.name = name
        self.places: Mapping[int, HostPlacement] = {}
        self._events, self._relay = events, relay
        self._meeting = meeting
        self.hello: dict[str, Any] = {}
        self.port = 0
        self.heard_at = 0.0
        self.is_over = False
        self._states: dict[int, tuple[str, str]] = {}
        self._owed: dict[tuple[int, int], int] = {}  # output that was taken, and not told so
        self._links: dict[int, Relayed] = {}
        self._tallies: dict[int, Tally | None] = {}
        self._heard: Callable[[int, bytes], object] | None = None
        self._heard_calls: Callable[[list[HostCalls]], object] | None = None
        self._heard_waits: Callable[[Mapping[int, WaitSums]], object] | None = None
        self._start_s = start_s
        self._give_up_at = time.monotonic() + start_s
        self._is_ending = False

    @property
    def ranks(self) -> list[int]:
        return list(self.places)

    @property
    def message(self) -> list[str]:
        """What is known beside why it is lost: lines."""
        return []

    # What the launcher wants.

    def open(self, job: str, key: bytes, node: int) -> None:
        """Have everything but the ranks made; this is host number `node`."""
        places = {str(rank): list(place) for rank, place in self.places.items()}
        fields = {"job": job, "key": key, "node": node, "places": places}
        self.line.send("open", fields)
        if self._relay is not None:
            for rank in self.ranks:
                self._relay.add(rank)

    def reach(self, targets: Sequence[HostAddresses], measures: bool) -> None:
        """Have it find out how other hosts are reached from there; see `reach.reach_all`."""
        self.line.send("reach", [list(target) for target in targets], measures)

    def start(self, program: RankProgram) -> None:
        fields = {
            "argv": list(program.argv),
            "environment": dict(program.environment),
            "bind": program.bind,
            "has_input": self.input is not None,
            "trace_records": program.trace_records,
        }
        self.line.send("start", fields)

    def watch_joined(self, rank: int, pid: int) -> None:
        self.line.send("joined", rank, pid)

    def doing(self, rank: int) -> str:
        """See `host.Host`: as of the last beat."""
        return self._states.get(rank, ("", ""))[0]

    def state(self, rank: int, pid: int) -> str:
        """See `host.Host`: as of the last beat."""
        return self._states.get(rank, ("", "running"))[1]

    def ask(self, rank: int, heard: Callable[[int, bytes], object]) -> None:
        self._heard = heard
        self.line.send("ask", rank)

    def tally(self, rank: int) -> Tally | None:
        """See `host.Host`: as of the last beat, or the last answer to `read_waits`."""
        return self._tallies.get(rank)

    def read_calls(self, heard: Callable[[list[HostCalls]], object]) -> None:
        """See `host.Host`: when the agent has answered; never, if it is lost."""
        self._heard_calls = heard
        self.line.send("calls")

    def read_waits(
        self, size: int, most: int, heard: Callable[[Mapping[int, WaitSums]], object]
    ) -> None:
        """See `host.Host`: when the agent has answered, which is before it is `over`."""
        self._heard_waits = heard
        self.line.send("waits", size, most)

    def tell_failure(self) -> None:
        self.line.send("failure")

    def signal(self, signum: int) -> None:
        self.line.send("signal", signum)

    def signal_rank(self, rank: int, signum: int) -> None:
        self.line.send("signal_rank", rank, signum)

    def sweep(self) -> None:
        """See `host.Host`: it is done when `is_over`."""
        if not self._is_ending:
            self._is_ending = True
            if self.trace is not None:
                self.trace.compare_clocks(lambda: self.line.send("end"))
            elif self.hello:
                self.line.send("end")
            else:
                self._finish()

    def update(self, now: float) -> float:
        """Do what is due; returns when to call this again."""
        if self.is_over:
            return float("inf")
        for (rank, number), nbytes in list(self._owed.items()):
            if self._relay is not None and not self._relay.is_full(rank, number):
                del self._owed[rank, number]
                self.line.send("taken", rank, number, nbytes)
        if not self.hello:
            if now >= self._give_up_at:
                self._fail(f"nothing has come from it for {self._start_s:g} s")
            return self._give_up_at
        if self.line.is_silent(now):
            self._fail(f"no sign of life for {LOST_S:g} s")
            return now
        if now >= self.line.beat_at():
            self.line.send("beat")
        return min(self.line.beat_at(), self.line.silent_at())

    # What the agent says.

    def hear(self, kind: str, fields: list[Any]) -> None:
        """Handle a frame."""
        if kind == "hello":
            self._meet(fields[0])
        elif kind == "link":
            number, frame = fields
            link = self._links.setdefault(number, Relayed(self.line, number))
            self._meeting(link, frame)
        elif kind == "output" and self._relay is not None:
            rank, number, data = fields
            self._relay.feed(rank, number, data)
            if data:
                self._owed[rank, number] = self._owed.get((rank, number), 0) + len(data)
        elif kind == "beat":
            self._states = {rank: (doing, state) for rank, doing, state, _ in fields[0]}
            for rank, _, _, tally in fields[0]:
                self._tallies[rank] = Tally(*tally) if tally is not None else None
        elif kind == "ended":
            self._events.ended(*fields)
        elif kind == "lost":
            self._events.lost(*fields)
        elif kind == "said":
            self._events.say(f"{self.name}: {fields[0]}")
        elif kind == "opened":
            self.port = fields[0]
            if self.is_traced:
                from pycoll._launcher.tracing import RemoteTrace  # not sooner: few jobs are traced

                self.trace = RemoteTrace(lambda: self.line.send("clock"))
                self.trace.compare_clocks(lambda: self._events.opened(self))
            else:
                self._events.opened(self)
        elif kind == "answer" and self._heard is not None:
            self._heard(*fields)
        elif kind == "calls" and self._heard_calls is not None:
            from pycoll._launcher.kept_calls import HostCalls  # not sooner: few jobs need it

            self._heard_calls([HostCalls.unpacked(piece) for piece in fields[0]])
        elif kind == "waits" and self._heard_waits is not None:
            from pycoll._launcher.awaited import WaitSums  # not sooner: few jobs need it

            for rank, tally, _ in fields[0]:
                self._tallies[rank] = Tally(*tally) if tally is not None else None
            self._heard_waits({rank: WaitSums.unpacked(packed) for rank, _, packed in fields[0]})
        elif kind == "clock" and self.trace is not None:
            self.trace.told_time(fields[0])
        elif kind == "trace" and self.trace is not None:
            self.trace.feed(*fields)
        elif kind == "reached":
            self._events.reached(self, [Reachability(*found) for found in fields[0]])
        elif kind == "started":
            self._events.started(self)
        elif kind == "refused":
            number, text, file = fields
            self._events.refused(self, OSError(number, text, file))
        elif kind == "drank" and self.input is not None:
            self.input.taken(fields[0])
        elif kind == "signalled":
            self._events.signalled(fields[0])
        elif kind == "ending":
            self._events.gone(self, f"pycoll was ended there by {fields[0]}", is_ending=True)
        elif kind == "leaving":
            self.lose(f"pycoll was ended there by {fields[0]}")
        elif kind == "over":
            self.is_swept = True
            self._finish()

    def _meet(self, hello: dict[str, Any]) -> None:
        for what, here in agent.versions().items():
            there = hello["versions"].get(what)
            if there != here:
                return self._fail(
                    f"its {what} is {there}, that of the launcher's host {here}: "
                    "install the same on all hosts"
                )
        self.hello, self.heard_at = hello, time.time()
        self._events.here(self)

    def lose(self, why: str) -> None:
        """Called when nothing can come from there, or will: why, "" if it is just gone."""
        if not self._is_ending:
            self._fail(why or "pycoll has ended there")
        self.is_over = True

    def _fail(self, why: str) -> None:
        """Nothing can come from this host any more, which nobody has wanted."""
        if self.is_over:
            return
        self.is_over = True
        self.line.close()
        self._events.gone(self, why)

    def _finish(self) -> None:
        self.is_over = True
        self.line.close()


class StartedHost(RemoteHost):
    """A host whose agent is started by a command, on whose standard input and output it talks.

    Args:
        command: starts the agent there.
        selector: the launcher's.
        stack: ends the command.
        name, events, relay, meeting: see `RemoteHost`.

    Raises:
        OSError: the command cannot be run.
    """

    def __init__(
        self,
        command: Sequence[str],
        selector: selectors.BaseSelector,
        stack: contextlib.ExitStack,
        name: str,
        events: RemoteEvents,
        relay: Relay,
        meeting: Callable[[Peer, bytes], object],
    ) -> None:
        super().__init__(name, events, relay, meeting)
        self._selector = selector
        self._starter = os.path.basename(command[0])
        self._message, self._hint = b"", ""
        ours, theirs = socket.socketpair()
        errors, their_errors = os.pipe()
        try:
            # In a session of its own: a Ctrl-C is ours to handle.
            self._process: subprocess.Popen[bytes] = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=their_errors,
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            os.close(errors)
            raise
        finally:
            theirs.close()
            os.close(their_errors)
        stack.callback(self._end_process)
        os.set_blocking(errors, False)
        self._errors = errors
        stack.callback(os.close, errors)
        selector.register(errors, selectors.EVENT_READ, self._read_errors)
        stack.callback(self._forget_errors)
        end = ours.detach()
        self.line = DescriptorLine(end, end, selector, self.hear, self._lose, skips=True)
        stack.callback(self.line.close)

    def _lose(self, why: str) -> None:
        self._read_errors()
        if not self._is_ending:
            status = self._wait(_GOODBYE_S)
            ended = f" ({self._starter}: {end_text(status)})" if status else ""
            if self.hello:
                why = f"pycoll has ended there{ended}" + (f": {why}" if why else "")
            elif _NOT_INSTALLED.search(self._message):
                why = f"pycoll is not installed there, for {sys.executable}"
            else:
                why = why or f"pycoll could not be started there{ended}"
                if self._starter == "ssh" and status == _SSH_FAILED:
                    self._hint = f"try: ssh -o BatchMode=yes {self.name} true"
            self._fail(why)
        self.is_over = True

    @property
    def message(self) -> list[str]:
        """What the starter has written to standard error, in short, and what to try."""
        text = self._message.decode(errors="replace")
        lines = [line for line in text.splitlines() if line.strip()]
        if len(lines) > _MESSAGE_LINES:  # of a traceback the last line says most
            lines[_MESSAGE_LINES - 1 : -1] = []
        return lines + [self._hint] * bool(self._hint)

    def _read_errors(self) -> None:
        try:
            data = os.read(self._errors, _MAX_MESSAGE_NBYTES)
        except BlockingIOError:
            return
        if not data:
            return self._forget_errors()
        if not self.hello:
            self._message = (self._message + data)[:_MAX_MESSAGE_NBYTES]
        else:
            text = data.decode(errors="replace")
            self._events.tell([f"{self.name}: {line}" for line in text.splitlines()])

    def _forget_errors(self) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(self._errors)

    def _wait(self, limit_s: float) -> int | None:
        try:
            return self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None

    def _end_process(self) -> None:
        if self._wait(_GOODBYE_S if self.is_over else 0.0) is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
