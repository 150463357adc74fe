"""The launcher's part on another host: has the ranks there started, watched and ended.

`python -m pycoll._launcher.agent ssh` (or `srun`), on whose standard input and output it talks to
the launcher (`connection`; the launcher's end is `remote`). When that is gone, or has said nothing
for a while, it ends the ranks.

    the launcher says             the agent answers, or does
    open {job, key, node,         opened port: where others may try to reach it; or refused
      places}                     {errno, text, file}
    reach targets, measures       reached: see `reach.reach_all`
    start {argv, environment,     started; or refused. `environment` is all that the ranks have,
      bind, has_input,            beside what is the host's own (HOME and its like)
      trace_records}
    input bytes                   for rank 0's standard input; none: that was all
    link number, frame            for the rank at the other end of that link
    links numbers, frame          for several of them
    joined rank, pid              watches that process, too
    signal number                 to every process of the job here; SIGUSR1, SIGUSR2: to the ranks
    signal_rank rank, number      to the processes of a rank
    failure                       wakes the ranks: one of the job has failed
    calls                         calls pieces: what the ranks have called last, of each host that
                                  this is (`kept_calls.HostCalls.packed`)
    ask rank                      answer rank, packed: what its threads do, as `inspected` packs it
    taken rank, stream, nbytes    so much of its output has been written
    clock                         clock, with its time: nanoseconds of CLOCK_MONOTONIC
    end                           ends what is left; over, when everything has been said
    beat                          nothing

    the agent says
    hello {...}                   first: who it is, see `_hello`
    link number, frame            from a rank
    ended rank, status            its process has ended: exit status, or minus the signal
    lost rank                     the process that joined as this rank has ended
    output rank, stream, data     what it has written; nothing: that was all
    drank nbytes                  so much of its input rank 0 has got; -1: it wants no more
    trace rank, piece             what it has recorded (`tracing`), before over
    said text                     what happens, for `--verbose`
    signalled signal              it has got that (SIGUSR1, SIGUSR2), for all ranks
    ending signal                 it was told to end; it does when the launcher says so, whose ranks
                                  have time to save what they have
    leaving signal                it ends because of it, now
    beat states                   of each rank the call it waits in, what its process does, and
                                  what it has done (`host_memory.Tally`)
"""

from __future__ import annotations

import contextlib
import os
import platform
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from pycoll._launcher.host import LocalHost, OwnHost, RankProgram, reserve_descriptors
from pycoll._launcher.host_memory import Tally
from pycoll._launcher.input import Feed
from pycoll._launcher.line import LOST_S, DescriptorLine, Hear, Line
from pycoll._launcher.outcome import signal_name
from pycoll._launcher.reach import Doorman, HostAddresses, Reachability, Trial, own_addresses
from pycoll._launcher.rendezvous_pairs import Pairs
from pycoll._launcher.signals import caught_signals
from pycoll._rendezvous.wire import WIRE_VERSION
from pycoll._support.environment import HostPlacement, free_port, personal, usable_cores, version
from pycoll._support.machine import place

if TYPE_CHECKING:
    from pycoll._launcher.awaited import WaitSums

WINDOW_NBYTES = 256 << 10
"""Bytes of one stream of a rank's output that may be on the way."""

_READ_NBYTES = 64 << 10
_LAST_READS = 32
_FLUSH_S = 5.0  # for the last words


def versions() -> dict[str, str]:
    """What must be the same on all hosts of a job."""
    return {
        "pycoll": version(),
        "protocol": str(WIRE_VERSION),
        "Python": ".".join(platform.python_version_tuple()[:2]),
    }


class _Output:
    """What a rank writes to standard output (1) or standard error (2)."""

    def __init__(self, fd: int, rank: int, number: int, line: Line) -> None:
        os.set_blocking(fd, False)
        self.fd, self.rank, self.number = fd, rank, number
        self.window = WINDOW_NBYTES
        self._line = line

    def read(self) -> bool:
        """Pass on what is there; returns False when nothing more can come."""
        try:
            data = os.read(self.fd, _READ_NBYTES)
        except BlockingIOError:
            return True
        except OSError:
            data = b""
        self.window -= len(data)
        self._line.send("output", self.rank, self.number, data)
        return bool(data)


class Agent:
    """The agent; `host.Events` of its host.

    Args:
        selector: its loop.
        open_line: opens the line to the launcher, when given what hears frames, and of its end.
        starter: what has started this process: "ssh", "srun", "rank", "call".
        for_ranks: signals that have come, and mean the ranks of the job.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        open_line: Callable[[Hear, Callable[[str], None]], Line],
        starter: str,
        for_ranks: list[int] | None = None,
    ) -> None:
        self._selector, self._starter = selector, starter
        self._for_ranks = [] if for_ranks is None else for_ranks
        self._stack = contextlib.ExitStack()
        self._line = open_line(self._hear, self._lose)
        self._host: OwnHost | None = None
        self._pairs: Pairs | None = None
        self._outputs: dict[tuple[int, int], _Output] = {}
        self._pids: dict[int, int] = {}  # that have joined, by rank
        self._feed: Feed | None = None
        self._has_started = self._is_ending = False
        self._is_over = False

    def run(self, signals: list[int]) -> int:
        """Serve the launcher until the job is over; returns the exit status.

        A signal that ends processes ends the ranks of all hosts, as it would at the launcher, so
        that they have time; the second one, or one that comes before there are ranks, ends this.
        """
        self._line.send("hello", self._hello())
        with self._stack:
            while self._line.is_open and not self._is_over and not self._is_alone():
                now = time.monotonic()
                if len(signals) > self._has_started or self._line.is_silent(now):
                    break
                if signals and not self._is_ending:
                    self._is_ending = True
                    self._line.send("ending", signal_name(signals[0]))
                while self._for_ranks:
                    self._line.send("signalled", self._for_ranks.pop(0))
                if now >= self._line.beat_at():
                    self._line.send("beat", self._states())
                wake = min(self._line.beat_at(), self._line.silent_at())
                poll_s = self._host.poll() if self._host is not None else float("inf")
                ready = self._selector.select(max(0.0, min(wake - now, poll_s)))
                self._carry()  # what a rank said last comes before its end
                for key, _ in ready:
                    key.data()
            if signals and not self._is_over:
                self._line.send("leaving", signal_name(signals[0]))
            if self._host is not None:
                self._host.sweep()
        self._line.flush(time.monotonic() + _FLUSH_S)
        self._line.close()
        if signals:
            return 128 + signals[0]
        return 0 if self._is_over else 1

    # What the host tells.

    def ended(self, rank: int, status: int) -> None:
        """Pass it on; `host.Events`."""
        self._carry()
        self._line.send("ended", rank, status)

    def lost(self, rank: int) -> None:
        """Pass it on; `host.Events`."""
        self._line.send("lost", rank)

    def say(self, text: str) -> None:
        """Pass it on; `host.Events`."""
        self._line.send("said", text)

    # What the launcher says.

    def _hear(self, kind: str, fields: list[Any]) -> None:
        host = self._host
        if kind == "open":
            self._try(lambda: self._open(**fields[0]))
        elif kind == "end":
            self._end()
        elif kind == "clock":
            self._line.send("clock", time.monotonic_ns())
        elif host is None:
            pass
        elif kind == "start":
            self._try(lambda: self._start(**fields[0]))
        elif kind == "reach":
            self._reach(*fields)
        elif kind in ("link", "links"):
            assert self._pairs is not None
            for number in [fields[0]] if kind == "link" else fields[0]:
                pair = self._pairs.find(number)
                if pair is not None:
                    pair.send(fields[1])
        elif kind == "joined":
            self._pids[fields[0]] = fields[1]
            host.watch_joined(*fields)
        elif kind == "signal":
            host.signal(*fields)
        elif kind == "signal_rank":
            host.signal_rank(*fields)
        elif kind == "failure":
            host.tell_failure()
        elif kind == "calls":
            host.read_calls(lambda hosts: self._line.send("calls", [h.packed() for h in hosts]))
        elif kind == "waits":
            size, most = fields
            host.read_waits(size, most, partial(self._tell_waits, host))
        elif kind == "ask":
            host.ask(fields[0], lambda rank, packed: self._line.send("answer", rank, packed))
        elif kind == "taken":
            self._taken(*fields)
        elif kind == "input" and self._feed is not None:
            self._feed.put(fields[0])

    def _tell_waits(self, host: OwnHost, waits: Mapping[int, WaitSums]) -> None:
        of_ranks = [(rank, host.tally(rank), each.packed()) for rank, each in waits.items()]
        self._line.send("waits", of_ranks)

    def _lose(self, why: str) -> None:
        """The launcher is gone: `run` ends, and with it the ranks."""

    def _is_alone(self) -> bool:
        """Whether nobody is left for whom this could do something."""
        return False

    def _try(self, step: Callable[[], None]) -> None:
        try:
            step()
        except OSError as exc:
            self._line.send("refused", exc.errno, exc.strerror or str(exc), exc.filename)

    def _open(self, job: str, key: bytes, node: int, places: Mapping[str, list[int]]) -> None:
        where = {int(rank): HostPlacement(*place) for rank, place in places.items()}
        reserve_descriptors(len(where))
        self._pairs = Pairs(key)
        self._stack.callback(self._pairs.close)
        self._selector.register(self._pairs.fileno(), selectors.EVENT_READ, self._carry)
        self._host = self._make_host(job, where, self._pairs.open)
        self._key = key
        self._doorman = Doorman(key, node)
        self._stack.callback(self._doorman.close)
        self._line.send("opened", self._doorman.port)

    def _make_host(
        self, job: str, places: Mapping[int, HostPlacement], open_link: Callable[[], int]
    ) -> OwnHost:
        return LocalHost(
            job, places, self._selector, self, open_link, self._add_output, self._stack, LOST_S
        )

    def _reach(self, targets: list[list[Any]], measures: bool) -> None:
        def tell(found: list[Reachability]) -> None:
            self._line.send("reached", found)

        wanted = [HostAddresses(*target) for target in targets]
        Trial(self._selector, tell, wanted, self._key, measures=measures)

    def _start(
        self,
        *,
        argv: Sequence[str],
        environment: dict[str, str],
        bind: bool,
        has_input: bool = False,
        trace_records: int = 0,
    ) -> None:
        assert self._host is not None
        self._doorman.close()
        program = self._program(argv, environment, bind)._replace(trace_records=trace_records)
        if has_input:
            self._feed = Feed(self._selector, lambda nbytes: self._line.send("drank", nbytes))
            self._stack.callback(self._feed.close)
            program = program._replace(stdin=self._feed.reading)
        try:
            self._host.start(program)
        finally:
            if self._feed is not None:
                os.close(self._feed.reading)
        self._has_started = True
        self._line.send("started")

    def _program(self, argv: Sequence[str], environment: dict[str, str], bind: bool) -> RankProgram:
        own = {**personal(os.environ), **environment}
        return RankProgram(argv, own, bind=bind, stdin=subprocess.DEVNULL)

    def _taken(self, rank: int, number: int, nbytes: int) -> None:
        output = self._outputs.get((rank, number))
        if output is not None:
            if output.window <= 0 < output.window + nbytes:
                self._watch(output)
            output.window += nbytes

    def _end(self) -> None:
        if self._host is not None:
            self._host.sweep()
        self._carry()
        for output in list(self._outputs.values()):
            for _ in range(_LAST_READS):
                if (output.rank, output.number) not in self._outputs or not self._read(output):
                    break
        if isinstance(self._host, LocalHost) and self._host.trace is not None:
            for rank, piece in self._host.trace.packed():
                self._line.send("trace", rank, piece)
                self._line.flush(time.monotonic() + _FLUSH_S)
        self._line.send("over")
        self._is_over = True

    # Carrying.

    def _carry(self) -> None:
        """Pass on what ranks say."""
        if self._pairs is not None:
            for pair, frame in self._pairs.receive():
                self._line.send("link", pair.number, frame)

    def _add_output(self, rank: int, stdout: int, stderr: int) -> None:
        for number, fd in ((1, stdout), (2, stderr)):
            output = self._outputs[rank, number] = _Output(fd, rank, number, self._line)
            self._stack.callback(os.close, fd)
            self._watch(output)

    def _watch(self, output: _Output) -> None:
        def read() -> None:
            more = self._read(output)
            if more and output.window <= 0:
                self._selector.unregister(output.fd)

        self._selector.register(output.fd, selectors.EVENT_READ, read)

    def _read(self, output: _Output) -> bool:
        """Pass on what is there; returns whether more may come."""
        more = output.read()
        if not more:
            del self._outputs[output.rank, output.number]
            with contextlib.suppress(KeyError):
                self._selector.unregister(output.fd)
        return more

    def _states(self) -> list[tuple[int, str, str, Tally | None]]:
        host = self._host
        if host is None:
            return []
        return [
            (r, host.doing(r), host.state(r, pid), host.tally(r)) for r, pid in self._pids.items()
        ]

    def _hello(self) -> dict[str, Any]:
        reached, launcher = _seen_by(self._starter, os.environ)
        return {
            "versions": versions(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "cores": usable_cores(),
            "reached": reached,
            "launcher": launcher,
            "addresses": own_addresses(),
            "interfaces": [name for _, name in socket.if_nameindex()],
            "place": place(),
            "time": time.time(),
            "port": free_port(),
        }


def _seen_by(starter: str, environ: Mapping[str, str]) -> tuple[str, str]:
    """At which address the starter has reached this host, and where it is itself; "": unknown."""
    if starter == "ssh":
        words = environ.get("SSH_CONNECTION", "").split()
        return (words[2], words[0]) if len(words) == 4 else ("", "")
    return "", environ.get("SLURM_LAUNCH_NODE_IPADDR", "") if starter == "srun" else ""


def main(starter: str) -> int:
    """Be an agent on standard input and output."""
    reading, writing = os.dup(0), os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.dup2(2, 1)  # what is printed by mistake is no frame
    os.close(nowhere)
    for_ranks: list[int] = []
    with selectors.DefaultSelector() as selector, caught_signals(selector, for_ranks) as signals:

        def open_line(hear: Hear, lost: Callable[[str], None]) -> Line:
            line = DescriptorLine(reading, writing, selector, hear, lost)
            line.mark()
            return line

        return Agent(selector, open_line, starter, for_ranks).run(signals)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
