"""How long a collective takes on a network that is made up: the schedules of all ranks, timed.

The ranks run as the core runs them: a step is posted as soon as its hazards are met, receives
into scratch `SCRATCH` at a time, a schedule once for each segment with so many of them under way.
What differs is that nothing is buffered:

    message      starts when it is posted on both ends, the one before it from the one rank to the
                 other has left, and its ports are free; takes the latency of its link, and its
                 bytes over the bandwidth
    port         each rank has one out and one in. For its overhead (`Link.overhead_s`) a message
                 keeps others from starting there; then its bytes share the ports with those of
                 others, of which each gets an equal part of the port where most are
    host         its network adapters are such ports, too; its memory and its cores carry one thing
                 at a time (`Network`)
    reduction    takes time by the byte; a rank combines one thing at a time
    copy         takes no time

Jobs that wait for a port start in the order in which they could have started, those of one moment
by segment, then by their place in the schedule. At most 64 messages share a port; others wait, too.
A chunk is its share of the bytes, fractions included.

Where the schedules of all ranks are one, which is proved each time and not taken from the name,
those of a few are replayed for all (`pycoll.simulate.steps`): a ring of 24,576 ranks takes seconds.

Nothing is sent and nothing measured: the same arguments give the same times anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pycoll._support.checks import check_int, check_nbytes
from pycoll._support.public_edge import edge
from pycoll._support.wording import a_kind
from pycoll.schedules import find
from pycoll.simulate.network import ONE_HOST, Link, Network
from pycoll.simulate.replay import SCRATCH, WINDOW, Timing, replay
from pycoll.simulate.steps import PIECES, ReplayedSteps

__all__ = [
    "ONE_HOST",
    "PIECES",
    "SCRATCH",
    "WINDOW",
    "Link",
    "Network",
    "ReplayedSteps",
    "Timing",
    "replay",
    "simulate",
]


@edge
def simulate(
    collective: str,
    name: str,
    size: int,
    nbytes: float,
    *,
    segments: int = 1,
    root: int = 0,
    hosts: Sequence[int] | None = None,
    network: Network = ONE_HOST,
    window: int = WINDOW,
    every_rank: bool = False,
) -> Timing:
    """Time one algorithm.

    Args:
        collective: for example ``"all_reduce"``.
        name: for example ``"ring"``.
        size: number of ranks.
        nbytes: of one rank's value in broadcast, reduce, all_reduce, scan and exscan, of one block
            (what one rank has for one other, or for all others) elsewhere.
        segments: into how many segments each chunk is cut.
        root: the root, for collectives that have one.
        hosts: by rank the number of its host; None: all are on one.
        network: the machines.
        window: how many segments a rank has under way at a time.
        every_rank: replay every rank, also where a few stand for all; the times are the same.

    Raises:
        TypeError: a number or the network is none.
        ValueError: there is no such algorithm, or a number makes no sense.
        pycoll.Error: the algorithm deadlocks, or a message has no other half (`pycoll.prove` says
            where); pycoll's own do not.
    """
    find(collective, name)
    if not isinstance(network, Network):
        raise TypeError(
            f"network is a pycoll.simulate.Network, as Network(latency_s=20e-6, bandwidth=5e9), "
            f"not {a_kind(network)}"
        )
    for value, what in (size, "size"), (segments, "segments"), (window, "window"), (root, "root"):
        check_int(value, what)
    check_nbytes(nbytes)
    if min(size, segments, window) < 1:
        raise ValueError(f"size {size}, segments {segments} and window {window} must be 1 or more")
    if not 0 <= root < size:
        raise ValueError(f"root is {root}, but the ranks are 0 to {size - 1}")
    if why := network.why_not():
        raise ValueError(why)
    given: object = hosts if hosts is not None else (0,) * size
    if not isinstance(given, Iterable):
        raise TypeError(f"hosts is a list of hosts' numbers, not {a_kind(given)}")
    placed = tuple(given)
    for host in placed:
        check_int(host, "a host")
    if len(placed) != size:
        raise ValueError(f"hosts must name a host for each of {size} ranks, not for {len(placed)}")
    table = ReplayedSteps(collective, name, size, root, placed, network, every_rank)
    return replay(table, nbytes, segments, window)
