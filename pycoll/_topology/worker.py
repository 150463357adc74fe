"""What the ranks of `pycoll topology --measure` run: one of each host measures its links.

Hosts are in pairs, all at a time, and after each round in others, until each has been with each (a
tournament, round robin). So a link is measured while no other link of its two hosts is in use.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

import pycoll
from pycoll._communicator.communicator import Communicator
from pycoll._selection.topology import host_name, names_of

MARK = "links of hosts: "
"""What the line of rank 0 with the result begins with."""

PINGS, PINGS_S = 30, 0.5
"""So many small messages go to and fro, for so long at most."""

FIRST_NBYTES, MOST_NBYTES = 64 << 10, 64 << 20
"""A message becomes longer, up to that, until it takes `LONG_S`; then it is sent `TIMES` times."""

LONG_S = 0.15
TIMES = 3


def rounds(count: int) -> Iterator[list[tuple[int, int]]]:
    """Give the pairs of each round, the lower number first, in which each meets each once."""
    places = [*range(count), *([-1] * (count % 2))]  # with -1 one is idle
    for _ in range(len(places) - 1):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        yield [(min(pair), max(pair)) for pair in pairs if -1 not in pair]
        places = [places[0], places[-1], *places[1:-1]]


def measure(comm: Communicator) -> list[tuple[int, int, float, float]]:
    """Measure the links from each rank to each other.

    Returns:
        On rank 0 a row for each: sender, receiver, seconds of latency, bytes a second.
    """
    own = []
    for pairs in rounds(comm.size):
        comm.barrier()
        for low, high in pairs:
            if comm.rank == low:
                latency = _ping(comm, high)
                own.append((low, high, latency, _send(comm, high, latency)))
                _receive(comm, high)
            elif comm.rank == high:
                latency = _ping_back(comm, low)
                _receive(comm, low)
                own.append((high, low, latency, _send(comm, low, latency)))
    return [row for rows in comm.gather(own) or () for row in rows]


def _ping(comm: Communicator, peer: int) -> float:
    """Return the seconds of half the way to a rank and back; both ranks get the same."""
    answer = np.zeros(1)
    seconds: list[float] = []
    ends_at = time.monotonic() + PINGS_S
    while len(seconds) <= PINGS and (len(seconds) < 2 or time.monotonic() < ends_at):
        began = time.perf_counter()
        comm.send(np.zeros(1), peer)
        comm.recv(peer, out=answer)
        seconds.append(time.perf_counter() - began)
    latency = min(seconds[1:]) / 2  # the first connects; what disturbs only makes it longer
    comm.send(np.array([latency]), peer)
    return latency


def _ping_back(comm: Communicator, peer: int) -> float:
    said = np.zeros(1)
    while not comm.recv(peer, out=said)[0]:
        comm.send(said, peer)
    return float(said[0])


def _send(comm: Communicator, peer: int, latency: float) -> float:
    """Return how many bytes a second reach a rank that is in `_receive`."""

    def take(nbytes: int) -> float:
        x = np.zeros(nbytes, np.uint8)
        comm.send(np.array([nbytes]), peer)
        began = time.perf_counter()
        comm.send(x, peer)
        comm.recv(peer, out=np.zeros(1))
        took = time.perf_counter() - began
        return max(took - 2 * latency, took / 2)

    nbytes = FIRST_NBYTES
    while (seconds := take(nbytes)) < LONG_S and nbytes < MOST_NBYTES:
        growth = min(8.0, max(2.0, 1.2 * LONG_S / seconds))
        nbytes = min(MOST_NBYTES, int(nbytes * growth))
    seconds = statistics.median(take(nbytes) for _ in range(TIMES))
    comm.send(np.array([0]), peer)
    return nbytes / seconds


def _receive(comm: Communicator, peer: int) -> None:
    length = np.zeros(1, int)
    while nbytes := int(comm.recv(peer, out=length)[0]):
        comm.recv(peer, out=np.empty(nbytes, np.uint8))
        comm.send(np.zeros(1), peer)


def main() -> None:
    """Measure; rank 0 prints the result."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # who interrupts wants no tracebacks
    comm = pycoll.init()
    leads = comm.split_by_host().rank == 0
    leaders = comm.split(0 if leads else None)
    if leaders is None:
        return
    names = leaders.gather(host_name(os.environ))
    found = measure(leaders)
    if leaders.rank == 0:
        assert names is not None
        hosts = list(names_of(dict(enumerate(names))).values())
        said: dict[str, Any] = {"hosts": hosts, "links": found}
        print(MARK + json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
