"""`pycoll-run` called once on every node of a job, by whatever starts things there.

For Kubernetes, batch systems and people with a terminal for each host. Variables say which node
this is, and where node 0 is: that is the launcher, and the others are agents that call it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from pycoll._launcher.host import NamedHost
from pycoll._launcher.outcome import CannotStartError
from pycoll.errors import BootstrapError, Error

if TYPE_CHECKING:
    from pycoll._launcher.agent_listener import AgentCalls
    from pycoll._launcher.agent_socket import Ticket

WAIT_S = 600.0
"""How long nodes wait for each other: an image may have to be fetched first."""

_NEEDED = ("PYCOLL_NODE", "PYCOLL_NODES", "PYCOLL_RENDEZVOUS", "PYCOLL_KEY")


class Node(NamedTuple):
    """This node of a job.

    Attributes:
        number: from 0.
        nodes: how many there are.
        ticket: where node 0 is, and what lets others in.
    """

    number: int
    nodes: int
    ticket: Ticket

    def hosts(self, size: int) -> tuple[list[NamedHost], list[int]]:
        """The hosts of a job of so many ranks, this one first, and by rank the index of its host.

        Raises:
            Error: some would have none.
        """
        if size < self.nodes:
            raise Error(f"-n {size} is too little: there are {self.nodes} nodes (PYCOLL_NODES)")
        # Node 1 is called so until it has called.
        others = [NamedHost(f"node {number}", calls=True) for number in range(1, self.nodes)]
        by_rank = [rank * self.nodes // size for rank in range(size)]
        return [NamedHost(socket.gethostname()), *others], by_rank

    def calls(self) -> AgentCalls:
        """Listen for the other nodes.

        Raises:
            CannotStartError: the port is taken.
        """
        from pycoll._launcher.agent_listener import AgentCalls
        from pycoll._launcher.reach import listen_everywhere

        try:
            listener = listen_everywhere(self.ticket.port)
        except OSError as exc:
            raise CannotStartError(
                f"node 0 cannot listen at port {self.ticket.port} (PYCOLL_RENDEZVOUS): "
                f"{os.strerror(exc.errno) if exc.errno else exc}"
            ) from exc
        return AgentCalls(listener, self.ticket.key, WAIT_S)

    def serve(self) -> int:
        """Be the agent of this node until the job is over; returns 0 if node 0 has said so, else 1.

        Raises:
            CannotStartError: node 0 was not reached, or has no place for this one.
        """
        from pycoll._launcher import agent_caller

        try:
            whom = f"node 0 ({_NEEDED[2]})"
            return agent_caller.serve(self.ticket, whom, self.number, WAIT_S)
        except BootstrapError as exc:
            raise CannotStartError(str(exc)) from exc


def find_node(environ: Mapping[str, str]) -> Node | None:
    """Find out whether this is one of several nodes; None: it is not.

    Raises:
        Error: the variables make no sense.
    """
    # A rank has these, too.
    if "PYCOLL_JOB" in environ or "PYCOLL_RANK" in environ or not environ.get("PYCOLL_NODES"):
        return None
    if missing := [name for name in _NEEDED if not environ.get(name)]:
        raise Error(
            f"PYCOLL_NODES is set, but not {', '.join(missing)}: a job on several nodes, on each "
            f"of which pycoll-run is called, needs {', '.join(_NEEDED)}"
        )
    number, count = environ["PYCOLL_NODE"], environ["PYCOLL_NODES"]
    if not (number.isdecimal() and count.isdecimal() and int(number) < int(count)):
        raise Error(f"PYCOLL_NODE is {number}, of {count} nodes (PYCOLL_NODES): it counts from 0")
    if count == "1":
        return None
    from pycoll._launcher.agent_socket import Ticket
    from pycoll._launcher.exchange import read_address
    from pycoll._rendezvous.wire import read_key

    host, port = read_address(environ["PYCOLL_RENDEZVOUS"])
    return Node(int(number), int(count), Ticket(read_key(environ["PYCOLL_KEY"]), port, [host]))
