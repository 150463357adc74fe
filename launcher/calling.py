"""An agent that calls the launcher, because no starter carries what the two say: see `lobby`.

`python -m pycoll.launcher.calling NODE [TASK]`: standard input has the ticket (`doors.Ticket`) in a
line, and when it ends, this does. TASK are descriptors that the ranks inherit, with what they do
(`call.Ticket`); without, the launcher says what they run. Beside what an agent hears (`agent`):

    turn_away why                  there is no place for it in the job
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from pycoll.errors import BootstrapError
from pycoll.launcher import call
from pycoll.launcher.agent import Agent
from pycoll.launcher.connection import Hear, Line
from pycoll.launcher.doors import Ticket
from pycoll.launcher.host import Program
from pycoll.launcher.network_line import LinkLine, reach
from pycoll.launcher.signals import caught_signals

_MAX_RANKS = 1 << 14  # bounds a frame; who calls does not know how many there are


class CallingAgent(Agent):
    """The agent.

    Args:
        selector, open_line: see `Agent`.
        node: the number of this host.
        task: what the ranks inherit, with what they do; None: the launcher says it.

    Attributes:
        refusal: why it was turned away; "": it was not.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        open_line: Callable[[Hear, Callable[[str], None]], Line],
        node: int,
        task: call.Ticket | None,
    ) -> None:
        super().__init__(selector, open_line, "call")
        self._node, self._task = node, task
        self.refusal = ""

    def _hear(self, kind: str, fields: list[Any]) -> None:
        if kind == "turn_away":
            self.refusal = fields[0]
            self._is_over = True
        elif kind == "end" and self._host is None:
            self._line.send("over")
            self._is_over = True
        else:
            super()._hear(kind, fields)

    def _hello(self) -> dict[str, Any]:
        return {**super()._hello(), "node": self._node}

    def _program(self, argv: Sequence[str], environment: dict[str, str], bind: bool) -> Program:
        # Whoever has started this has given it an environment, with its GPUs for example.
        own = {**os.environ, **environment}
        if self._task is None:
            return Program(argv, own, bind=bind, stdin=None)
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        command = [sys.executable, *flags, call.__file__, str(self._task)]
        inherited = (self._task.task, *self._task.reports)
        return Program(command, own, inherited, bind, subprocess.DEVNULL)


def serve(
    ticket: Ticket,
    whom: str,
    node: int,
    wait_s: float,
    leash: int = -1,
    task: call.Ticket | None = None,
) -> int:
    """Be the agent of this host until the job is over.

    Args:
        ticket: where the launcher is; it may not be there yet.
        whom: what to call it in errors.
        node: the number of this host.
        wait_s: how long to try to reach it.
        leash: a descriptor: when it can be read, this ends; -1: none.
        task: see `CallingAgent`.

    Returns:
        The exit status: 0 if the launcher said that the job is over.

    Raises:
        BootstrapError: the launcher was not reached, or has no place for this host.
    """
    leashes = [] if leash < 0 else [leash]
    with selectors.DefaultSelector() as selector, caught_signals(selector) as signals:
        deadline = time.monotonic() + wait_s
        link = reach(ticket, whom, _MAX_RANKS, deadline, leashes, signals)

        def open_line(hear: Hear, lost: Callable[[str], None]) -> Line:
            return LinkLine(link, selector, hear, lost)

        agent = CallingAgent(selector, open_line, node, task)
        for each in leashes:
            selector.register(each, selectors.EVENT_READ, lambda: signals.append(signal.SIGHUP))
        status = agent.run(signals)
    if agent.refusal:
        raise BootstrapError(agent.refusal)
    return status


def main(node: str, task: str = "") -> int:
    """Be the agent of whoever holds the other end of standard input."""
    ticket = Ticket.read(sys.stdin.readline())
    inherited = None
    if task:
        inherited = call.Ticket.read(task)
        for descriptor in (inherited.task, *inherited.reports):
            os.set_inheritable(descriptor, False)
    try:
        return serve(ticket, "the launcher", int(node), WAIT_S, sys.stdin.fileno(), inherited)
    except BootstrapError as exc:
        with contextlib.suppress(OSError):
            print(f"pycoll: node {node}: {exc}", file=sys.stderr, flush=True)
        return 1


WAIT_S = 5.0
"""How long a worker tries to reach the launcher that has started it, which was there before."""


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
