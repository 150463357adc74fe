"""The hosts of a job: this one, of which several may be pretended, or several that are real.

Ranks are started when all hosts are there, and each has found how it reaches every other. The
launcher's own host needs no agent; see `host`.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from pycoll._launcher.host import Host, LocalHost, NamedHost, RankProgram
from pycoll._launcher.job_spec import JobSpec
from pycoll._launcher.output import Relay
from pycoll._launcher.rendezvous_server import Server
from pycoll._support.environment import (
    HostPlacement,
    blocks,
    free_port,
    personal,
    places,
    sent,
    shared_environment,
)
from pycoll._support.machine import place

if TYPE_CHECKING:
    from pycoll._launcher.agent_listener import Lobby
    from pycoll._launcher.host_routes import HostRoute, HostRoutes
    from pycoll._launcher.input import Input
    from pycoll._launcher.outcome import RankState
    from pycoll._launcher.reach import Reachability
    from pycoll._launcher.remote import RemoteHost
    from pycoll._launcher.spawn import Job
    from pycoll._trace.timeline import RankTrace

_LOOPBACK = "127.0.0.1"
_HERE = NamedHost("this host")
_QUICK_S, _PROGRESS_S = 2.0, 5.0  # before, and between, words on who is not there yet
# For other hosts when one is lost already, so that all that are lost are told at once: as long as
# ssh tries to connect, and a little for the agent.
_OTHERS_S = 15.0
_LOOK_S = 0.25  # between questions to an engine
_SWEEP_S = 8.0  # for other hosts to end what is left there, and to pass on what was printed


class Hosts:
    """All hosts of a job.

    The user names hosts, and may do so twice: what has several names is one host, with the ranks of
    all of them. That is known when the agents have said where they are.

    Args:
        spec: what they run.
        selector: the owner's loop; the data of a key is a function to call when it is ready.
        job: hears what happens.
        server: where the ranks meet.
        relay: gets what they write.
        stack: what is opened is undone by it.

    Attributes:
        have_started: the ranks have been started, on all hosts.
        names: of the hosts, when they are known.
        same: of names that mean a host which has another: that other.
        lost_hosts: hosts that are lost, and why: lines.
        absent: why hosts are not there whose job is only to check the others: lines.
        ways: how they reach each other, if that is all that is wanted.

    Raises:
        OSError: something cannot be opened.
    """

    def __init__(
        self,
        spec: JobSpec,
        selector: selectors.BaseSelector,
        job: Job,
        server: Server,
        relay: Relay,
        stack: contextlib.ExitStack,
    ) -> None:
        self._spec, self._selector, self._job = spec, selector, job
        # What hosts with an agent tell that is for the job as it is.
        self.ended, self.lost, self.say = job.ended, job.lost, job.say
        self.tell, self.signalled = job.tell, job.signalled
        self._options = spec.options
        self._server, self._relay, self._stack = server, relay, stack
        self.have_started = False
        self.names: list[str] = []
        self.same: dict[str, str] = {}
        self.absent: list[str] = []
        self.ways: Sequence[HostRoute] = ()
        self._here: LocalHost | None = None
        self._remotes: list[RemoteHost] = []  # those with an agent
        self._all: list[Host] = []  # in the order of their numbers, when they are known
        self._of_rank: list[Host] = []
        self._nodes: Sequence[int] = ()  # the host of each rank
        self.lost_hosts: dict[RemoteHost, list[str]] = {}
        self._started_at = time.monotonic()
        self._go_on_at = float("inf")  # without those that have not come
        self._ways: HostRoutes | None = None
        self._input: Input | None = None
        self._num_opened = self._num_started = 0
        self._progress_at = time.monotonic() + _QUICK_S
        self._lobby: Lobby | None = None
        self._look_at = 0.0
        named = spec.options.hosts or [_HERE]
        self._named = [self._make(number, host) for number, host in enumerate(named)]

    def _make(self, number: int, host: NamedHost) -> RemoteHost | None:
        """A host as it is named; None: it is this one."""
        options, name, command = self._options, host.name, host.command
        if not command and not host.calls:
            return None
        from pycoll._launcher.remote import RemoteHost, StartedHost  # most jobs have none

        remote: RemoteHost
        if host.calls:
            from pycoll._launcher.agent_listener import Lobby

            assert options.calls is not None
            if self._lobby is None:
                self._lobby = Lobby(options.calls, self._selector, self._stack)
            remote = RemoteHost(name, self, self._relay, self._server.hear, options.calls.wait_s)
            self._lobby.expect(number, remote)
        else:
            self.say(f"{name}: its launcher is started by {command[0]}")
            remote = StartedHost(
                command, self._selector, self._stack, name, self, self._relay, self._server.hear
            )
        self._remotes.append(remote)
        return remote

    def start(self) -> None:
        """Start the ranks, now or when all hosts are there.

        Raises:
            OSError: one cannot be started on this host.
        """
        if not self._remotes:
            self._settle()

    def _arrive(self, is_late: bool = False) -> None:
        """Go on when every host is there or lost, or it is too late for the others."""
        calls = self._options.calls is not None  # who calls may have to be made first
        absent = [each for each in self._remotes if not each.hello and each not in self.lost_hosts]
        if absent and not is_late and not (calls and self.lost_hosts):
            return
        if not calls:
            waited_s = time.monotonic() - self._started_at
            for each in absent:
                self.lost_hosts[each] = [f"{each.name}: it has not answered in {waited_s:.0f} s"]
        lines = [line for each in self._remotes for line in self.lost_hosts.get(each, ())]
        if lines and not (self._options.checks and len(self.lost_hosts) < len(self._named)):
            return self._job.unreachable(lines)
        self.absent = lines
        try:
            self._settle()
        except OSError as exc:
            self._job.refused("", exc)

    def _settle(self) -> None:
        """All are there that will be: put the ranks on hosts, and have everything made for them.

        Raises:
            OSError: it cannot be made on this host.
        """
        options = self._options
        present = [n for n, host in enumerate(self._named) if host not in self.lost_hosts]
        numbers: dict[object, int] = {}
        number_of = {n: numbers.setdefault(self._place(n), len(numbers)) for n in present}
        kept: dict[int, RemoteHost | None] = {}
        for n in present:
            host, number, name = self._named[n], number_of[n], self._name(n)
            if number not in kept:
                kept[number] = host
                self.names.append(name)
                continue
            if host is None:  # which needs no agent
                kept[number] = None
            self.same[name] = self.names[number]
            self.say(f"{name} is {self.names[number]}")
        for each in self._remotes:
            if each not in kept.values():
                each.sweep()
        self._remotes = [each for each in kept.values() if each is not None]
        if options.hosts:
            nodes = [number_of[n] for n in options.nodes if n in number_of]
        else:
            nodes = blocks(options.size, options.emulate_hosts or 1)
        self._nodes = nodes
        where = dict(enumerate(places(nodes)))
        for number, host in kept.items():
            mine = {r: at for r, at in where.items() if not options.hosts or at.node == number}
            self._all.append(self._open(number, host, mine))
        self._of_rank = [self._all[at.node if options.hosts else 0] for at in where.values()]
        self._stack.callback(self._server.close_port)
        if not self._remotes:
            self._go_on()

    def _place(self, number: int) -> object:
        """What is the same for two names of one host."""
        host = self._named[number]
        if len(self._named) == 1 or self._options.calls is not None:  # who calls has its own ranks
            return number
        return place() if host is None else host.hello["place"]

    def _name(self, number: int) -> str:
        host = self._named[number]
        if host is not None:
            return host.name
        return self._options.hosts[number].name if self._options.hosts else _HERE.name

    def _open(
        self, number: int, host: RemoteHost | None, places: Mapping[int, HostPlacement]
    ) -> Host:
        """Have everything but the ranks made on a host."""
        if host is not None:
            host.places = places
            host.is_traced = self._options.trace_records > 0
            host.open(self._job_of(number), self._spec.key, number)
            return host
        self._here = LocalHost(
            self._job_of(number),
            places,
            self._selector,
            self._job,
            self._server.open_link,
            self._relay.add,
            self._stack,
        )
        self._here.guard_file(self._spec.socket)
        return self._here

    def _go_on(self) -> None:
        """Everything is there but the ranks: start them, or first find out how hosts are reached.

        Raises:
            OSError: it does not work on this host.
        """
        if self._options.checks or len(self._all) > 1:
            self._try_ways()
        else:
            self._start_ranks()

    def of(self, rank: int) -> Host:
        """Return the host of a rank."""
        return self._of_rank[rank]

    def update(self, now: float) -> float:
        """Do what is due; returns when to call this again."""
        wake = [host.update(now) for host in self._remotes]
        if not self._all and now >= self._go_on_at:
            self._go_on_at = float("inf")
            self._arrive(is_late=True)
        wake.append(self._go_on_at)
        if not self.have_started and self._remotes:
            wake.append(self._show_progress(now))
            wake.append(self._look_for_failures(now))
        if self._here is not None:
            wake.append(now + self._here.poll())
        if self._input is not None:
            wake.append(self._input.update(now))
        return min(wake)

    def traces(self, states: Sequence[RankState]) -> list[RankTrace]:
        """Return what the ranks have recorded, in order; what is known of each: `states`."""
        from pycoll._launcher.tracing import of_rank
        from pycoll._trace.timeline import Clock

        own = self._here.trace.read() if self._here and self._here.trace else {}
        known = {rank: (Clock(), own) for rank in own}
        for host in self._remotes:
            if host.trace is not None:
                found = host.trace.clock(), host.trace.read()
                known |= dict.fromkeys(host.ranks, found)
        traces = []
        for state in states:
            name = self.name_of(state.rank)
            traces.append(of_rank(state, name, *known.get(state.rank, (Clock(), {}))))
        return traces

    def name_of(self, rank: int) -> str:
        number = self._nodes[rank]
        name = self.names[number] if number < len(self.names) > 1 else ""
        if not name or self.names.count(name) > 1:  # nodes of one machine have one name
            name = f"{name} host {number}".strip()
        return name

    def clocks(self) -> dict[str, float]:
        """By how many seconds the clocks of other hosts are ahead, to about a tenth."""
        return {host.name: host.hello["time"] - host.heard_at for host in self._remotes}

    def tell_failure(self) -> None:
        """Wake all ranks that wait natively: one has failed."""
        for host in self._all:
            host.tell_failure()

    def signal(self, signum: int) -> None:
        """Send a signal to every process of the job."""
        self._server.close_port()  # whoever comes there cannot have the descriptors
        for host in self._all:
            host.signal(signum)

    def pass_on(self, signum: int) -> None:
        """Send a signal to the ranks alone, which go on."""
        for host in self._all:
            host.signal(signum)

    def sweep(self, hear: Callable[[], object]) -> None:
        """Kill whatever is left of the job; pass on what other hosts still have to say.

        Args:
            hear: called when something may have come for the server.
        """
        self._server.close_port()
        for host in (*self._all, *self._remotes):
            host.sweep()
        deadline = time.monotonic() + _SWEEP_S
        while not all(host.is_over for host in self._remotes):
            heard = (h.trace.heard_at for h in self._remotes if h.trace is not None)
            deadline = max(deadline, max(heard, default=0.0) + _SWEEP_S)
            if (now := time.monotonic()) >= deadline:
                break
            wake = min(host.update(now) for host in self._remotes)
            for key, _ in self._selector.select(max(0.0, min(wake, deadline) - now)):
                key.data()
            hear()

    def _show_progress(self, now: float) -> float:
        if now >= self._progress_at:
            self._progress_at = now + _PROGRESS_S
            absent = [host.name for host in self._remotes if not host.hello]
            if absent:
                count = len(self._named)
                there = f"{count - len(absent)} of {count} hosts are there"
                self._job.progress(f"{there}, not {', '.join(absent[:8])}")
        return self._progress_at

    def _look_for_failures(self, now: float) -> float:
        """Ask whoever starts the agents that call whether one will not."""
        calls = self._options.calls
        if calls is None:
            return float("inf")
        if now >= self._look_at:
            self._look_at = now + _LOOK_S
            if failure := calls.failure():
                self._job.unreachable([failure])
        return self._look_at

    def _start_ranks(self) -> None:
        spec, options = self._spec, self._options
        bind = options.bind == "core"
        first = self.of(0)
        port = free_port() if first is self._here else self._remote(first).hello["port"]
        if self._remotes and options.calls is None:
            names = " ".join(sorted({*sent(os.environ), *options.exports}))
            self.say(f"all ranks have of this environment: {names}")
        for node, host in enumerate(self._all):
            environment = shared_environment(
                self._base(host),
                options.size,
                job=self._job_of(node),
                key=spec.key,
                rendezvous=self._server.endpoint,
                transport=options.transport,
                encrypt=options.encrypt,
                op_timeout_s=options.op_timeout_s,
                attempt=options.attempt,
                exports=options.exports,
                master=(self._address(host, first), port),
            )
            if len(self._all) > 1:
                seen = [f"{node}={self._address(host, o)}" for node, o in enumerate(self._all)]
                environment["PYCOLL_ADDRESSES"] = ",".join(seen)
                if options.calls is None:  # else the name is one of our own making
                    environment["PYCOLL_HOST"] = self.names[node]
            if host is first and host is not self._here and spec.stdin is None:
                self._read_input(self._remote(first))
            traced = options.trace_records
            host.start(RankProgram(spec.argv, environment, spec.pass_fds, bind, spec.stdin, traced))
        self.have_started = not self._remotes

    def _job_of(self, node: int) -> str:
        """The id of the part on a host: two may be one machine, and have a guardian each."""
        return f"{self._spec.job}.{node}" if len(self.names) > 1 else self._spec.job

    def _read_input(self, host: RemoteHost) -> None:
        """Pass standard input on to rank 0, which is there."""
        from pycoll._launcher.input import Input

        host.input = self._input = Input(0, self._selector, host.line)
        self._stack.callback(self._input.close)

    def _base(self, host: Host) -> Mapping[str, str]:
        """The environment of the ranks of a host, but for what makes them ranks."""
        if not self._remotes:
            return os.environ
        if self._options.calls is not None:  # who starts something on each host says what is there
            if host is self._here:
                return os.environ
            return {name: os.environ[name] for name in os.environ if name.startswith("PYCOLL_")}
        return {**(personal(os.environ) if host is self._here else {}), **sent(os.environ)}

    def _remote(self, host: Host) -> RemoteHost:
        return next(remote for remote in self._remotes if remote is host)

    def _address(self, by: Host, host: Host) -> str:
        """The address at which one host reaches another, or itself."""
        if self._ways is None or len(self._all) == 1:
            return _LOOPBACK
        return self._ways.address(by, host)

    def _try_ways(self) -> None:
        """Have all hosts try to reach the others."""
        from pycoll._launcher import host_routes

        options = self._options
        wanted = options.interface
        if wanted and (lines := host_routes.without_interface(wanted, self._all, self.names)):
            return self._job.unreachable(lines)
        self._ways = host_routes.HostRoutes(
            self._spec.key,
            self._all,
            self.names,
            self._selector,
            self._see_ways,
            self._stack,
            wanted,
            options.address,
            options.checks,
        )

    def _see_ways(self) -> None:
        ways = self._ways
        assert ways is not None
        for way in ways.found:
            self.say(f"{way.by} reaches {way.to} at {way.reach.address or 'no address'}")
        if self._options.checks:
            self.ways = ways.found
            self._job.checked()
        elif lost := ways.failures():
            self._job.unreachable(lost)
        else:
            try:
                self._start_ranks()
            except OSError as exc:
                self._job.refused("", exc)

    # What hosts with an agent tell: `remote.RemoteEvents`.

    def here(self, host: RemoteHost) -> None:
        """Called when an agent is there."""
        self.say(f"{host.name}: its launcher is process {host.hello['pid']}")
        self._arrive()

    def opened(self, host: RemoteHost) -> None:
        """Called when a host has everything but the ranks; when all have, it goes on."""
        self._num_opened += 1
        if self._num_opened == len(self._remotes):
            try:
                self._go_on()
            except OSError as exc:
                self._job.refused("", exc)

    def reached(self, host: RemoteHost, found: Sequence[Reachability]) -> None:
        """Called when it is known how other hosts are reached from one."""
        assert self._ways is not None
        self._ways.told(host, found)

    def started(self, host: RemoteHost) -> None:
        """Called when the ranks of a host have been started."""
        self._num_started += 1
        self.have_started = self._num_started == len(self._remotes)

    def refused(self, host: RemoteHost, error: OSError) -> None:
        """Called when the ranks of a host cannot be started."""
        self._job.refused(host.name, error)

    def gone(self, host: RemoteHost, why: str, is_ending: bool = False) -> None:
        """Called when a host is lost, or will be soon."""
        self.lost_hosts[host] = [f"{host.name}: {why}", *(f"    {line}" for line in host.message)]
        if self._all:
            return self._job.gone(host.ranks, host.name, why, host.message, is_ending)
        self._go_on_at = min(self._go_on_at, time.monotonic() + _OTHERS_S)
        self._arrive()
