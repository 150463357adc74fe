"""`pycoll tune`: measures every algorithm on this machine, and writes the table of costs.

For each transport and number of ranks a job times every algorithm of every collective in all sizes,
in turn. From the medians follow the constants of each kind of link, by least squares, and
for each algorithm the factors between what was measured and what they say. Then it times the
algorithms that gain by it in as many segments as the new table gives them, and adds their factors.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import os
import signal
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pycoll
from pycoll._selection import costs, flows
from pycoll._selection.agreed import SHARED_MEMORY, Agreed, home_file
from pycoll._selection.costs import (
    CORE,
    CUT,
    MAX_FACTOR,
    MIN_FACTOR,
    NET,
    RDMA,
    SHM,
    TCP,
    WHOLE,
    CostTable,
    LinkCosts,
    Work,
)
from pycoll._selection.select import BLOCKS, Query, Selector
from pycoll._tools import bench, tune_worker
from pycoll._tools import bench_machine as machine
from pycoll._tools.tune_worker import Comparison, Variant
from pycoll.schedules import TABLE, cost_of, find

SIZES = "8,512,4K,32K,256K,2M,16M,64M"
QUICK_SIZES = "8,4K,256K,4M"

LARGEST_NBYTES = 64 << 20
"""Blocks of one rank have at most so many bytes together."""

LANES = 1, 2, 4
"""Connections by tcp that are tried."""

LANES_CALLS = 9
LANES_MUST_GAIN = 0.1

JOB_TIMEOUT_S = 900.0

# Between hosts nothing is measured: what the network adds to TCP inside a host is an estimate, one
# of Ethernet with 10 Gbit/s. RDMA is one of `costs`, for tables that say nothing of it.
NET_STEP_S = 30e-6
NET_BYTE_S = 0.9e-9

FIT_ROUNDS = 2000
"""Enough for six constants of which some go together."""

MIN_SECONDS = 1e-9
"""No call is said to take less: a factor is a quotient."""


class CallSample(NamedTuple):
    """What was measured of one way to run one call.

    Attributes:
        link: kind of link that its messages took.
        size: number of ranks.
        segments: 1 if chunks were not cut.
        seconds: median of all calls, of the slowest rank.
    """

    link: str
    size: int
    collective: str
    algorithm: str
    segments: int
    nbytes: int
    seconds: float = 0.0

    @property
    def row(self) -> tuple[str, str, str, str]:
        """Where its factor stands in a table."""
        return self.link, self.collective, self.algorithm, WHOLE if self.segments == 1 else CUT

    @property
    def chunk(self) -> float:
        """Bytes of a chunk."""
        if self.collective in BLOCKS:
            return self.nbytes
        return self.nbytes / find(self.collective, self.algorithm).chunks(self.size)

    @property
    def variant(self) -> Variant:
        """How to run it: in shared memory as users do, who do not ask for it."""
        if self.link == CORE:
            return Variant()
        return Variant(
            self.algorithm, -(-int(self.chunk) // self.segments) if self.segments > 1 else 0
        )

    def work(self, cores: float) -> Work:
        """Return what it had to do."""
        if self.link == CORE:
            return flows.core_work(self.collective, self.nbytes, self.size, cores)
        algorithm = find(self.collective, self.algorithm)
        cost = cost_of(algorithm, self.size)
        assert cost is not None
        return flows.one_host_work(algorithm, cost, self.chunk, self.segments, self.size, cores)


class Tuning(NamedTuple):
    """What to measure: on which transports, with how many ranks, in which sizes, how often."""

    transports: tuple[str, ...]
    ranks: tuple[int, ...]
    sizes: tuple[int, ...]
    rounds: int

    def lengths(self, collective: str, size: int) -> tuple[int, ...]:
        """Return the lengths in which a collective is measured."""
        if collective == "barrier":
            return (0,)
        most = LARGEST_NBYTES // size if collective in BLOCKS else LARGEST_NBYTES
        return tuple(nbytes for nbytes in self.sizes if nbytes <= most)

    def measure(self, cut: CostTable | None, show: Callable[[str], None]) -> list[CallSample]:
        """Time every algorithm that one host can run.

        Args:
            cut: None: each chunk in one message. A table: what gains by segments, in as many as
                the formula of this table gives it.
            show: called with a line of text before each collective is timed.
        """
        jobs: dict[tuple[str, int], list[list[CallSample]]] = {}
        for transport, size in itertools.product(self.transports, self.ranks):
            found = (list(self._samples(transport, size, each, cut)) for each in TABLE)
            if alike := [samples for samples in found if samples]:
                jobs[transport, size] = alike
        count, done = self.rounds * sum(map(len, jobs.values())), 0
        seconds: dict[CallSample, list[float]] = {}
        for _ in range(self.rounds):
            for (transport, size), alike in jobs.items():
                with pycoll.Pool(size, transport=transport, timeout=JOB_TIMEOUT_S) as pool:
                    for samples in alike:
                        done += 1
                        show(
                            f"[{done}/{count}] {samples[0].collective}, {size} ranks, "
                            f"{transport}{', in segments' if cut else ''}"
                        )
                        for sample, calls in zip(samples, _time(pool, samples), strict=True):
                            seconds.setdefault(sample, []).extend(calls)
        return [s._replace(seconds=statistics.median(calls)) for s, calls in seconds.items()]

    def _samples(
        self, transport: str, size: int, collective: str, cut: CostTable | None
    ) -> Iterator[CallSample]:
        selector = None
        if cut is not None:
            sharing = frozenset({0} if transport == SHM else ())
            agreed = Agreed(cut, sharing=sharing, cores={0: cut.cores})
            selector = Selector(agreed, (0,) * size, shm=False)
        for nbytes in self.lengths(collective, size):
            for algorithm in TABLE[collective].values():
                if algorithm.cost is not None and not algorithm.hosts:
                    name, segments = algorithm.name, 1
                    if selector is not None:
                        segments = selector.several_segments(name, Query(collective, nbytes))
                    if selector is None or segments > 1:
                        yield CallSample(transport, size, collective, name, segments, nbytes)
            if selector is None and transport == SHM:
                yield CallSample(CORE, size, collective, SHARED_MEMORY, 1, nbytes)


def count_lanes(rounds: int, show: Callable[[str], None]) -> int:
    """Return with how many connections between two ranks large messages by tcp are quickest.

    More than one must gain a tenth: each takes memory, and descriptors of both ranks. The quickest
    messages are compared: of two jobs on a shared machine one may be disturbed throughout.
    """
    seconds: dict[int, list[float]] = {lanes: [] for lanes in LANES}
    for _ in range(rounds):
        for lanes, found in seconds.items():
            show(f"send, 2 ranks, tcp, {lanes} connections")
            os.environ["PYCOLL_TCP_LINKS"] = str(lanes)
            try:
                answers = pycoll.run(
                    tune_worker.measure_send,
                    2,
                    LARGEST_NBYTES,
                    LANES_CALLS,
                    timeout=JOB_TIMEOUT_S,
                    transport=TCP,
                )
            finally:
                del os.environ["PYCOLL_TCP_LINKS"]
            found += answers[0]
    least = {lanes: min(found) for lanes, found in seconds.items()}
    best = min(least, key=least.__getitem__)
    return best if least[best] < (1 - LANES_MUST_GAIN) * least[1] else 1


def _time(pool: pycoll.Pool, samples: Sequence[CallSample]) -> list[list[float]]:
    """Time one collective; return for each sample the seconds of each of its calls."""
    lengths = sorted({sample.nbytes for sample in samples})
    by_length = [[sample for sample in samples if sample.nbytes == n] for n in lengths]
    comparisons = [
        Comparison(alike[0].collective, alike[0].nbytes, tuple(sample.variant for sample in alike))
        for alike in by_length
    ]
    found = pool.run(tune_worker.measure, comparisons)[0]
    seconds = {
        sample: calls
        for alike, variants in zip(by_length, found, strict=True)
        for sample, calls in zip(alike, variants, strict=True)
    }
    return [seconds[sample] for sample in samples]


# --- from measured times to a table ----------------------------------------------------------


def fit(samples: Sequence[CallSample], cores: float) -> LinkCosts:
    """Return the constants, none below 0, by which these times are met best, by ratio."""
    # Each row says: work, divided by the time that was measured, times constants is one.
    rows = [[amount / s.seconds for amount in s.work(cores)] for s in samples]
    count = len(LinkCosts._fields)
    products = [[sum(row[i] * row[j] for row in rows) for j in range(count)] for i in range(count)]
    sums = [sum(row[i] for row in rows) for i in range(count)]
    found = [0.0] * count
    for _ in range(FIT_ROUNDS):  # one constant after the other, given the rest
        for i in range(count):
            rest = sum(products[i][j] * found[j] for j in range(count) if j != i)
            found[i] = max(0.0, (sums[i] - rest) / products[i][i]) if products[i][i] else 0.0
    return LinkCosts(*found)


def make_table(
    base: CostTable, samples: Sequence[CallSample], origin: str, cores: int
) -> CostTable:
    """Return a table of what was measured; what was not is as in `base`.

    Factors hold for the constants they were found with, and for as many cores: so of a kind of link
    whose constants are new, or from a machine with another number, the old ones are dropped.
    """
    measured = dict.fromkeys(sample.link for sample in samples)
    links = dict(base.links)
    for link in measured:
        whole = [s for s in samples if s.link == link and s.segments == 1]
        links[link] = fit(whole, cores)
    if TCP in measured:
        tcp = links[TCP]
        links[NET] = tcp._replace(step=tcp.step + NET_STEP_S, path=tcp.path + NET_BYTE_S)
    if SHM in measured:
        links[RDMA] = costs.estimated_rdma(links[SHM])
    sizes = tuple(sorted({s.nbytes for s in samples} - {0}))
    table = CostTable(origin, cores, links, sizes, {}, base.lanes)
    if base.cores == cores and base.sizes == table.sizes:
        kept = {row: rows for row, rows in base.factors.items() if row[0] not in measured}
        table = table._replace(factors=kept)
    return add_factors(table, samples)


def add_factors(table: CostTable, samples: Sequence[CallSample]) -> CostTable:
    """Return the table with the factors of what was measured."""
    found: dict[tuple[str, str, str, str], dict[int, dict[int, float]]] = {}
    for sample in samples:
        said = table.seconds((sample.link, sample.work(table.cores)))
        # A noisy machine gives constants that say next to nothing of a call.
        factor = min(max(sample.seconds / max(said, MIN_SECONDS), MIN_FACTOR), MAX_FACTOR)
        found.setdefault(sample.row, {}).setdefault(sample.size, {})[sample.nbytes] = factor
    factors = dict(table.factors)
    for row, by_size in found.items():
        factors[row] = {
            size: _filled(table.sizes, by_length) for size, by_length in by_size.items()
        }
    return table._replace(factors=factors)


def _filled(sizes: Sequence[int], factors: dict[int, float]) -> tuple[float, ...]:
    """Return a factor for each size; one that was not measured is that of the nearest which was."""
    if len(factors) == 1:
        return tuple(factors.values())
    measured = sorted(factors)
    return tuple(
        factors[min(measured, key=lambda n: max(n / nbytes, nbytes / n))] for nbytes in sizes
    )


# --- the command -----------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """Define the command line."""
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("-n", "--ranks", default="2,4,8", metavar="N", help="numbers of ranks (default: 2,4,8)")
    add("--transport", default="shm,tcp", metavar="T", help="default: shm,tcp")
    add("--sizes", metavar="S", help=f"bytes (default: {SIZES})")
    add("--rounds", type=int, metavar="R", help="default: 3")
    add("--quick", action="store_true", help=f"one round, 2 and 4 ranks, sizes {QUICK_SIZES}")
    add("--output", type=Path, metavar="F", help="default: where jobs look for it")


def main(arguments: argparse.Namespace) -> int:
    """Run the command; returns the exit status.

    Raises:
        ValueError: the arguments make no sense.
    """
    tuning = _understand(arguments)
    output = arguments.output or _default_output()
    # What is measured is for jobs without settings; and a table may be measured because the one in
    # the home folder is of another version.
    for name in ("PYCOLL_ALGORITHM", "PYCOLL_SEGMENT", "PYCOLL_TCP_LINKS"):
        os.environ.pop(name, None)
    os.environ["PYCOLL_COSTS"] = costs.SHIPPED
    here = machine.describe()
    origin = (
        f"{here.cpu}, {here.cores} cores, {', '.join(map(str, tuning.ranks))} ranks, "
        f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}, pycoll {pycoll.__version__}"
    )
    try:
        with machine.alone(_say):
            if why := machine.busy(here.cores):
                _say(f"warning: this machine is busy ({why}): do not trust the table")
            samples = tuning.measure(None, _show)
            table = make_table(costs.shipped(), samples, origin, here.cores)
            table = add_factors(table, tuning.measure(table, _show))
            if TCP in tuning.transports:
                table = table._replace(lanes=count_lanes(tuning.rounds, _show))
    except (pycoll.Error, KeyboardInterrupt) as exc:
        bench.progress_line("")
        _say(f"nothing was written: {str(exc) or 'interrupted'}")
        return 1 if isinstance(exc, pycoll.Error) else 128 + signal.SIGINT
    bench.progress_line("")
    output.parent.mkdir(parents=True, exist_ok=True)
    scratch = output.with_name(f".{output.name}.{os.getpid()}")
    scratch.write_text(table.as_json(), encoding="utf-8")
    scratch.replace(output)  # at once: a job that starts now sees the old one or the new one
    print(f"wrote {output}")
    if output != Path(home_file(os.environ)):
        print(f"jobs go by it with PYCOLL_COSTS={output}")
    return 0


def _default_output() -> Path:
    return Path(os.environ.get("PYCOLL_COSTS") or home_file(os.environ))


def _understand(arguments: argparse.Namespace) -> Tuning:
    transports = tuple(arguments.transport.split(","))
    for transport in transports:
        if transport not in (SHM, TCP):
            raise ValueError(f"no transport {transport!r} to tune; there are {SHM}, {TCP}")
    try:
        ranks = tuple(sorted({int(n) for n in arguments.ranks.split(",")}))
    except ValueError:
        raise ValueError(f"--ranks {arguments.ranks} is no list of numbers, as 2,4,8") from None
    if arguments.quick:
        ranks = tuple(n for n in ranks if n <= 4) or ranks[:1]
    if ranks[0] < 2:
        raise ValueError(f"--ranks {arguments.ranks}: communication takes at least 2")
    sizes = bench.parse_sizes(arguments.sizes or (QUICK_SIZES if arguments.quick else SIZES))
    rounds = arguments.rounds or (1 if arguments.quick else 3)
    if rounds < 1:
        raise ValueError(f"--rounds {rounds}: at least 1")
    return Tuning(transports, ranks, sizes, rounds)


def _say(text: str) -> None:
    print(f"pycoll tune: {text}", file=sys.stderr, flush=True)


def _show(text: str) -> None:
    """Say what is measured now: in a line that changes, where somebody looks."""
    if sys.stderr.isatty():
        bench.progress_line(text)
    else:
        _say(text)
