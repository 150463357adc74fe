"""An agent that calls the launcher, because no starter carries what the two say.

`python -m pycoll._launcher.agent_caller NODE FDS PROGRAM [ARGUMENTS]`: standard input has the
ticket (`agent_socket.Ticket`) in a line, and when it ends, this does. FDS are descriptors that the
ranks inherit, as 3,4; the program is theirs, whatever the launcher says. Beside what an agent hears
(`agent`):

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
from functools import partial
from typing import Any

from pycoll._launcher.agent import Agent
from pycoll._launcher.agent_socket import Ticket
from pycoll._launcher.host import RankProgram
from pycoll._launcher.line import Hear, Line
from pycoll._launcher.network_line import LinkLine, reach
from pycoll._launcher.signals import caught_signals
from pycoll.errors import BootstrapError

_MAX_RANKS = 1 << 14  # bounds a frame; who calls does not know how many there are


class CallingAgent(Agent):
    """The agent.

    Args:
        selector, open_line: see `Agent`.
        node: the number of this host.
        inherited: descriptors that the ranks inherit.
        command: their program and its arguments; (): the launcher says it.
        for_ranks: see `Agent`.

    Attributes:
        refusal: why it was turned away; "": it was not.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        open_line: Callable[[Hear, Callable[[str], None]], Line],
        node: int,
        inherited: Sequence[int],
        command: Sequence[str],
        for_ranks: list[int],
    ) -> None:
        super().__init__(selector, open_line, "call", for_ranks)
        self._node, self._inherited, self._command = node, inherited, command
        self.refusal = ""

    def _hear(self, kind: str, fields: list[Any]) -> None:
        if kind == "turn_away":
            self.refusal = fields[0]
            self._is_over = True
        else:
            super()._hear(kind, fields)

    def _hello(self) -> dict[str, Any]:
        return {**super()._hello(), "node": self._node}

    def _program(self, argv: Sequence[str], environment: dict[str, str], bind: bool) -> RankProgram:
        # Whoever has started this has given it an environment, with its GPUs for example.
        own = {**os.environ, **environment}
        command = self._command or argv
        return RankProgram(command, own, self._inherited, bind, subprocess.DEVNULL)


def serve(
    ticket: Ticket,
    whom: str,
    node: int,
    wait_s: float,
    parent_fd: int = -1,
    inherited: Sequence[int] = (),
    command: Sequence[str] = (),
) -> int:
    """Be the agent of this host until the job is over.

    Args:
        ticket: where the launcher is; it may not be there yet.
        whom: what to call it in errors.
        node: the number of this host.
        wait_s: how long to try to reach it.
        parent_fd: a pipe from the process that started this: when it can be read, that process is
            gone, and this ends; -1: none.
        inherited, command: see `CallingAgent`.

    Returns:
        The exit status: 0 if the launcher said that the job is over.

    Raises:
        BootstrapError: the launcher was not reached, or has no place for this host.
    """
    watched = [] if parent_fd < 0 else [parent_fd]
    for_ranks: list[int] = []
    with selectors.DefaultSelector() as selector, caught_signals(selector, for_ranks) as signals:
        deadline = time.monotonic() + wait_s
        link = reach(ticket, whom, _MAX_RANKS, deadline, watched, signals)
        open_line = partial(LinkLine, link, selector)
        agent = CallingAgent(selector, open_line, node, inherited, command, for_ranks)
        for each in watched:
            selector.register(each, selectors.EVENT_READ, lambda: signals.append(signal.SIGHUP))
        status = agent.run(signals)
    if agent.refusal:
        raise BootstrapError(agent.refusal)
    return status


def main(node: str, descriptors: str, *command: str) -> int:
    """Be the agent of whoever holds the other end of standard input."""
    ticket = Ticket.read(sys.stdin.readline())
    inherited = [int(number) for number in descriptors.split(",")]
    for number in inherited:
        os.set_inheritable(number, False)
    parent_fd = sys.stdin.fileno()
    try:
        return serve(ticket, "the launcher", int(node), WAIT_S, parent_fd, inherited, command)
    except BootstrapError as exc:
        with contextlib.suppress(OSError):
            print(f"pycoll: node {node}: {exc}", file=sys.stderr, flush=True)
        return 1


WAIT_S = 5.0
"""How long a worker tries to reach the launcher that has started it, which was there before."""


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
