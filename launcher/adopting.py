"""The agent of a host whose ranks another launcher has started: they come to it (`agent_socket`).

`python -m pycoll._launcher.adopting FD SIZE DEADLINE`, which a rank starts (`entering`): FD listens
for the ranks' connections, standard input has the ticket. It goes on in the background, and ends
when its ranks have. Beside what an agent says (`agent`):

    the meeting says               this answers, or does
    start {environment}            hands the ranks their links and the host's memory; started
    missing ranks                  tells the ranks that wait here which have not come
    turn_away number, why          tells that rank that it may not join; -1: all that wait

    this says
    came number, rank, size, pid   a rank has connected
    went number                    it has gone before it was let in
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from pycoll._launcher import agent_socket
from pycoll._launcher.agent import Agent
from pycoll._launcher.host import Events, OwnHost, RankProgram
from pycoll._launcher.line import Hear, Line
from pycoll._launcher.network_line import LinkLine, reach
from pycoll._launcher.process import doing as process_doing
from pycoll._launcher.signals import caught_signals, outlive_signals
from pycoll._support.environment import HostPlacement, rank_environment, usable_cores
from pycoll.errors import BootstrapError

UNKNOWN = 256
"""The status of a process that has ended, if only its parent can know it."""

_GONE = frozenset({errno.EPIPE, errno.ECONNRESET, errno.EBADF})
_FIRST_S = 10.0  # for the first rank to come to the door
# For one more to come who is told that there will be no meeting, and for all. Most wait there
# already; a job of the same key that is started next must not hear it.
_REFUSE_S, _REFUSE_MAX_S = 0.1, 10.0


class _Joiner:
    """A rank that has connected and waits to be let in."""

    def __init__(self, number: int, connection: socket.socket, pid: int) -> None:
        self.number, self.connection, self.pid = number, connection, pid
        self.reader = agent_socket.Reader(connection)
        self.rank = -1


class AdoptedHost(OwnHost):
    """The ranks of this host: let in, watched, told. Others start and end them.

    Args:
        places, selector, events, stack: see `OwnHost`.
        joiners: its connections with the ranks, which wait to be let in, by rank.
        open_link: makes a link for a rank; returns the descriptor that it gets.
    """

    def __init__(
        self,
        places: Mapping[int, HostPlacement],
        joiners: Mapping[int, _Joiner],
        selector: selectors.BaseSelector,
        events: Events,
        open_link: Callable[[], int],
        stack: contextlib.ExitStack,
    ) -> None:
        super().__init__(places, selector, events, stack)
        self._joiners, self._open_link = joiners, open_link
        self._pidfds: dict[int, int] = {}
        self._joined: dict[int, int] = {}
        stack.callback(self._unwatch_all)

    def start(self, program: RankProgram) -> None:
        """Let all ranks in."""
        cores = usable_cores()
        for rank, joiner in self._joiners.items():
            self._watch(rank, joiner.pid, self._pidfds, partial(self._see_end, rank))
            memory = self._memory[rank]
            link = self._open_link()
            own = rank_environment(rank, self._places)
            message = {
                "environment": {**program.environment, **own},
                "memory": "" if memory.descriptors else memory.variable,
                "count": 1 + len(memory.descriptors),
                "cores": cores,
            }
            try:
                agent_socket.send(joiner.connection, message, [link, *memory.descriptors])
            except OSError as exc:
                if exc.errno not in _GONE:  # that it has ended is seen
                    raise
            finally:
                os.close(link)

    def watch_joined(self, rank: int, pid: int) -> None:
        if pid != self._joiners[rank].pid and rank not in self._joined:
            self._watch(rank, pid, self._joined, partial(self._see_lost, rank))

    def state(self, rank: int, pid: int) -> str:
        return process_doing(pid)

    def ask(self, rank: int, heard: Callable[[int, bytes], object]) -> None:
        """See `host.Host`: nobody asks for the ranks of another launcher."""

    def signal(self, signum: int) -> None:
        """Send a signal to the ranks, not to what they have started."""
        for rank in list(self._pidfds):
            self.signal_rank(rank, signum)

    def signal_rank(self, rank: int, signum: int) -> None:
        """Send a signal to a rank, not to what it has started."""
        with contextlib.suppress(OSError, KeyError):
            signal.pidfd_send_signal(self._pidfds[rank], signum)

    def sweep(self) -> None:
        """See `host.Host`: what ranks leave behind is for who has started them."""

    def _watch(
        self, rank: int, pid: int, where: dict[int, int], callback: Callable[[], None]
    ) -> None:
        try:
            pidfd = where[rank] = os.pidfd_open(pid)
        except ProcessLookupError:
            return callback()
        except (AttributeError, OSError):  # an old kernel, or a sandbox: its end is not seen
            return
        self._selector.register(pidfd, selectors.EVENT_READ, callback)

    def _see_end(self, rank: int) -> None:
        self._unwatch(self._pidfds.pop(rank, None))
        if rank not in self._joined:
            self._memory[rank].note_end(rank)
        self._events.ended(rank, UNKNOWN)

    def _see_lost(self, rank: int) -> None:
        self._unwatch(self._joined.pop(rank, None))
        self._memory[rank].note_end(rank)
        self._events.lost(rank)

    def _unwatch_all(self) -> None:
        for pidfd in (*self._pidfds.values(), *self._joined.values()):
            self._unwatch(pidfd)


class AdoptingAgent(Agent):
    """The agent.

    Args:
        selector, open_line: see `Agent`.
        door: listens; it becomes its own.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        open_line: Callable[[Hear, Callable[[str], None]], Line],
        door: socket.socket,
    ) -> None:
        super().__init__(selector, open_line, "rank")
        self._door = door
        self._joiners: dict[int, _Joiner] = {}
        self._num_joiners = 0
        self._have_entered = False
        self._empty_since = time.monotonic()
        door.setblocking(False)
        selector.register(door, selectors.EVENT_READ, self._open_door)
        self._stack.callback(self._close_door)

    def _hear(self, kind: str, fields: list[Any]) -> None:
        if kind == "missing":
            for joiner in self._joiners.values():
                with contextlib.suppress(OSError):
                    agent_socket.send_if_ready(joiner.connection, {"missing": fields[0]})
        elif kind == "turn_away":
            number, why = fields
            found = [v for v in self._joiners.values() if number in (-1, v.number)]
            self._tell(found, {"refused": why})
            for joiner in found:
                self._forget(joiner)
        else:
            super()._hear(kind, fields)

    def _lose(self, why: str) -> None:
        text = "the meeting process of rank 0 has ended, by which the ranks of this job meet"
        self._tell(self._joiners.values(), {"refused": text})

    def _is_alone(self) -> bool:
        if self._have_entered or self._joiners:
            return False
        if time.monotonic() <= self._empty_since + (0 if self._num_joiners else _FIRST_S):
            return False
        self._line.send("over")
        return True

    def _make_host(
        self, job: str, places: Mapping[int, HostPlacement], open_link: Callable[[], int]
    ) -> OwnHost:
        # Of two that say they are one rank, the first was let in.
        ranks = {joiner.rank: joiner for joiner in reversed(self._joiners.values())}
        mine = {rank: ranks[rank] for rank in places if rank in ranks}
        return AdoptedHost(places, mine, self._selector, self, open_link, self._stack)

    def _program(self, argv: Sequence[str], environment: dict[str, str], bind: bool) -> RankProgram:
        return RankProgram(argv, environment)

    def _start(self, **fields: Any) -> None:
        self._have_entered = True
        super()._start(**fields)
        for joiner in list(self._joiners.values()):
            self._forget(joiner)

    # The door.

    def _open_door(self) -> None:
        try:
            connection = self._door.accept()[0]
        except OSError:
            return
        try:
            pid = agent_socket.peer_of(connection)
        except OSError:
            return connection.close()
        if self._have_entered:
            why = "its job has met; a process that a rank has started cannot join it"
            with connection, contextlib.suppress(OSError):
                agent_socket.send(connection, {"refused": why})
            return
        joiner = _Joiner(self._num_joiners, connection, pid)
        self._num_joiners += 1
        self._joiners[joiner.number] = joiner
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._listen(joiner))

    def _listen(self, joiner: _Joiner) -> None:
        try:
            message = joiner.reader.read()
            if message is not None:
                joiner.rank = message["rank"]
                size = message["size"]
                self._line.send("came", joiner.number, joiner.rank, size, joiner.pid)
        except (EOFError, KeyError, TypeError):
            self._forget(joiner)
            self._line.send("went", joiner.number)

    def _tell(self, joiners: Iterable[_Joiner], message: dict[str, Any]) -> None:
        for joiner in joiners:
            with contextlib.suppress(OSError):
                agent_socket.send(joiner.connection, message)

    def _forget(self, joiner: _Joiner) -> None:
        if self._joiners.pop(joiner.number, None) is not None:
            self._selector.unregister(joiner.connection)
            joiner.connection.close()
            self._empty_since = time.monotonic()

    def _close_door(self) -> None:
        for joiner in list(self._joiners.values()):
            self._forget(joiner)
        self._selector.unregister(self._door)
        self._door.close()


def main(descriptor: str, size: str, deadline: str) -> int:
    """Be the agent, in the background."""
    ticket = agent_socket.Ticket.read(sys.stdin.readline())
    door = socket.socket(fileno=int(descriptor))
    starter = os.pidfd_open(os.getppid())
    if os.fork():
        os._exit(0)  # who has started this need not wait for it
    outlive_signals()
    # Descriptors on their way to ranks count, too.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with selectors.DefaultSelector() as selector, caught_signals(selector) as signals:
        try:
            link = reach(ticket, "rank 0", int(size), float(deadline), [starter], signals)
        except BootstrapError as exc:
            return _refuse_all(door, str(exc))
        finally:
            os.close(starter)
        _close_errors()
        return AdoptingAgent(selector, partial(LinkLine, link, selector), door).run(signals)


def _close_errors() -> None:
    """Or the rank's standard error would stay open when it has ended, for who reads it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)


def _refuse_all(door: socket.socket, why: str) -> int:
    """Tell who has come why there will be no meeting."""
    _close_errors()
    door.settimeout(_REFUSE_S)
    deadline = time.monotonic() + _REFUSE_MAX_S
    with door, contextlib.suppress(TimeoutError):
        while time.monotonic() < deadline:
            connection = door.accept()[0]
            with connection, contextlib.suppress(OSError):
                agent_socket.peer_of(connection)
                agent_socket.send(connection, {"refused": why})
    return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
