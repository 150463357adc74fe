"""`pycoll simulate`: how long collectives would take on machines that you do not have."""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pycoll._support.wording import seconds_text
from pycoll._tools.units import parse_bandwidth, parse_seconds

if TYPE_CHECKING:
    from pycoll.schedules import Algorithm
    from pycoll.simulate import Link, Network

_EXAMPLES = """\
examples:
  pycoll simulate all_reduce -n 4096 --ranks-per-node 8 --sizes 1K:1G --plot out.png
  pycoll simulate all_reduce ring double_tree -n 64:65536 --ranks-per-node 8 --sizes 8 \\
      --latency 1us --bandwidth 100GB/s --between-latency 5us --between-bandwidth 25GB/s
  pycoll simulate broadcast -n 16 --transport tcp --costs mine.json

ranks:   -n 8,64,512 is a list; 64:4096 is 64, 256, 1024, 4096, and 64:4096:2 doubles.
sizes:   bytes of one rank's value in broadcast, reduce, all_reduce, scan and exscan; of one block,
         which one rank has for or from one other, elsewhere. 1K:1G is 1K, 4K, 16K, ... and 1G.
         The third number of 1K:1G:16 is the factor. K, M and G are powers of 1024.
network: without --latency, --bandwidth and the like it is that of a table of costs, as with
         pycoll explain: PYCOLL_COSTS, what pycoll tune has written, or pycoll's own. As soon as
         you say one of them the table is not used: inside hosts, what you leave out is 20 us and
         5 GB/s, and combining takes no time. Times are written as 500ns, 5us or 1ms, bandwidths as
         10GB/s (10**9 bytes) or 200Mbit/s.
"""

AUTO = "auto"

MOST_MESSAGES = 500_000
"""Messages that are replayed for one time without being asked for: half a minute."""

CUT_MESSAGES = 100_000
"""The same where `--segments auto` cuts a value, which it does in many sizes."""

MOST_SEGMENTS = 256
"""As in `pycoll._selection.select`."""

MIN_SEGMENT_NBYTES = 64 << 10

Slower = Callable[[str, int, int], float]
"""By collective, ranks and bytes: by what computed times are multiplied."""

_LINK_OPTIONS = ("latency", "bandwidth", "overhead")


class SimulatedTime(NamedTuple):
    """What came of one algorithm in one size.

    Attributes:
        ranks, nbytes: the case.
        algorithm: its name.
        segments: into how many each chunk was cut.
        held: more segments should be quicker, but were too much to replay.
        seconds: that it takes; None: it was too much to replay.
        replayed: ranks whose steps were replayed, for all.
    """

    ranks: int
    nbytes: int
    algorithm: str
    segments: int
    held: bool
    seconds: float | None
    replayed: int


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EXAMPLES
    parser.usage = "pycoll simulate COLLECTIVE [ALGORITHM ...] [-n N] [options]"
    parser.allow_abbrev = False  # --hosts is no short form of --hosts-per-rack
    add = parser.add_argument
    add("collective", nargs="?", metavar="COLLECTIVE", help="for example all_reduce")
    add(
        "algorithms",
        nargs="*",
        metavar="ALGORITHM",
        help="for example ring; or FILE.py:NAME, what that file registers (default: all)",
    )
    add("-n", "--ranks", default="4", metavar="N", help="numbers of ranks (default: 4)")
    add(
        "--ranks-per-node",
        type=int,
        metavar="K",
        help="ranks on each host (default: all are on one)",
    )
    add("--hosts", help=argparse.SUPPRESS)
    add(
        "--hosts-per-rack",
        type=int,
        default=0,
        metavar="H",
        help="hosts in each rack (default: all are in one)",
    )
    add("--sizes", default="1K:1G", metavar="S", help="bytes, see below (default: 1K:1G)")
    add(
        "--segments",
        default=AUTO,
        metavar="K",
        help="into how many each chunk is cut (default: auto, what should be quickest)",
    )
    add("--root", type=int, default=0, metavar="R", help="the root (default: 0)")
    table = parser.add_argument_group("the network by a table of costs")
    table.add_argument("--costs", metavar="F", help="the table, as pycoll tune writes it")
    table.add_argument(
        "--transport", choices=("auto", "shm", "tcp", "rdma"), default="auto", help="inside hosts"
    )
    table.add_argument(
        "--network", choices=("tcp", "rdma"), default="tcp", help="between hosts (default: tcp)"
    )
    made_up = parser.add_argument_group("the network by numbers")
    for prefix, where in (
        ("", "inside hosts"),
        ("between-", "between hosts (default: as inside)"),
        ("rack-", "between racks (default: as between hosts)"),
    ):
        made_up.add_argument(f"--{prefix}latency", metavar="T", help=f"of a message {where}")
        made_up.add_argument(f"--{prefix}bandwidth", metavar="B", help="of a link there")
        made_up.add_argument(
            f"--{prefix}overhead",
            metavar="T",
            help="the part of the latency in which the sender is busy (default: all of it)",
        )
    shared = parser.add_argument_group("what the ranks of a host share")
    shared.add_argument(
        "--adapters", type=int, default=1, metavar="A", help="network adapters of a host (1)"
    )
    shared.add_argument(
        "--cores", type=int, metavar="C", help="cores of a host (default: one for each rank)"
    )
    shared.add_argument(
        "--memory-bandwidth", metavar="B", help="of a host's memory (default: no limit)"
    )
    shared.add_argument(
        "--reduce-bandwidth",
        metavar="B",
        help="bytes a second that a rank adds up (default: the table's, or no limit)",
    )
    add("--plot", type=Path, metavar="F", help="draw the times: .png, .svg or .pdf")
    add("--json", type=Path, metavar="F", help="write all times, in seconds")
    add(
        "--most-messages",
        type=int,
        metavar="M",
        help=f"leave a time out that takes more messages to replay (default: {MOST_MESSAGES}; "
        f"for more segments {CUT_MESSAGES})",
    )


def main(arguments: argparse.Namespace) -> int:
    """Simulate, and print a table.

    Raises:
        ValueError: an option makes no sense.
    """
    from pycoll._tools import simulate_report
    from pycoll._tools.bench import parse_numbers, parse_sizes, progress_line
    from pycoll._tools.bench_report import check_files, show

    _check(arguments)
    chosen = _chosen(arguments)
    collective = chosen[0].collective
    ranks = parse_numbers(arguments.ranks, _rank_count)
    sizes = (0,) if collective == "barrier" else parse_sizes(arguments.sizes)
    network, origin, slower = _network(arguments)
    if arguments.segments != AUTO and not _is_count(arguments.segments):
        raise ValueError(f"--segments is {arguments.segments!r}: auto, or a number")
    check_files(arguments.plot, arguments.json)
    found: list[SimulatedTime] = []
    count = len(ranks) * len(chosen) * len(sizes)
    for size, algorithm in itertools.product(ranks, chosen):
        for case in _cases(arguments, algorithm, size, sizes, network, slower):
            found.append(case)
            progress_line(f"{len(found)} of {count}: {algorithm.name}, {size} ranks")
    progress_line("")
    lines = simulate_report.describe(network, origin, ranks, arguments.ranks_per_node)
    print("\n".join(lines))
    show(simulate_report.table(collective, found))
    for line in simulate_report.legend(found, arguments.most_messages or MOST_MESSAGES):
        print(line)
    if arguments.json is not None:
        written = {
            "command": shlex.join(["pycoll", *sys.argv[1:]]),
            "collective": collective,
            "network": network._asdict(),
            "times": [case._asdict() for case in found],
        }
        arguments.json.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    if arguments.plot is not None:
        simulate_report.plot(collective, found, arguments.plot)
    return 0


def _cases(
    arguments: argparse.Namespace,
    algorithm: Algorithm,
    size: int,
    sizes: Sequence[int],
    network: Network,
    slower: Slower,
) -> Iterator[SimulatedTime]:
    from pycoll.simulate import WINDOW, ReplayedSteps, replay

    hosts = _hosts(size, arguments.ranks_per_node)
    if not 0 <= arguments.root < size:
        raise ValueError(f"--root is {arguments.root}, but the ranks are 0 to {size - 1}")
    table, messages = None, _messages(algorithm, size, hosts, network)
    most = arguments.most_messages
    for nbytes in sizes:
        best, held = int(arguments.segments) if arguments.segments != AUTO else 1, False
        if arguments.segments == AUTO:
            best = able = _segments(algorithm, size, nbytes, hosts, network)
            while best > 1 and best * messages > (most or CUT_MESSAGES):
                best //= 2
            held = best < able
        if messages * best > (most or MOST_MESSAGES):
            yield SimulatedTime(size, nbytes, algorithm.name, best, held, None, size)
            continue
        if table is None:
            where = size, arguments.root, hosts, network
            table = ReplayedSteps(algorithm.collective, algorithm.name, *where)
        took = replay(table, nbytes, best, WINDOW).seconds
        took *= slower(algorithm.collective, size, nbytes)
        yield SimulatedTime(size, nbytes, algorithm.name, best, held, took, len(table.ranks))


def _messages(algorithm: Algorithm, size: int, hosts: Sequence[int], network: Network) -> int:
    """Return how many messages are replayed, or 0 where the algorithm does not state its cost."""
    from pycoll.schedules import cost_of
    from pycoll.simulate.network import Placement
    from pycoll.simulate.symmetry import symmetry_of

    cost = cost_of(algorithm, size, hosts=hosts)
    if cost is None:
        return 0
    period = Placement(hosts, network).period
    if period < size and symmetry_of(algorithm, size):
        return cost.messages // size * period
    return cost.messages


def _segments(
    algorithm: Algorithm, size: int, nbytes: int, hosts: Sequence[int], network: Network
) -> int:
    """Return into how many segments to cut: those that are quickest by the algorithm's cost."""
    from pycoll.schedules import cost_of
    from pycoll.simulate import PIECES

    cost = cost_of(algorithm, size, hosts=hosts)
    if cost is None or cost.path <= cost.load or not cost.volume:
        return 1  # only what waits for others can be overlapped
    chunk = nbytes / (algorithm.chunks(size) if algorithm.collective in PIECES else 1)
    link = network.link(len(set(hosts)) == 1)
    busiest = cost.load * cost.messages / cost.volume
    segments, best = 1, (float("inf"), 1)
    while segments <= MOST_SEGMENTS and (segments == 1 or chunk >= segments * MIN_SEGMENT_NBYTES):
        follow = segments - 1
        starts = cost.steps * link.latency_s + follow * busiest * link.hold_s
        moved = (cost.path + follow * cost.load) * chunk / segments
        best = min(best, (starts + moved / link.bandwidth, segments))
        segments *= 2
    return best[1]


# ---------------------------------------------------------------- what was asked for


def _check(arguments: argparse.Namespace) -> None:
    """Refuse what is missing, and what would have no effect."""
    if arguments.collective is None:
        raise ValueError("name a collective, as in: pycoll simulate all_reduce")
    if arguments.hosts is not None:
        raise ValueError("--hosts: say how many ranks each host has, by --ranks-per-node")
    said = [name for name, value in vars(arguments).items() if value is not None]
    for prefix, needed in (("between_", "ranks_per_node"), ("rack_", "hosts_per_rack")):
        useless = next((name for name in said if name.startswith(prefix)), None)
        if useless is not None and not getattr(arguments, needed):
            where = "on one host" if prefix == "between_" else "in one rack"
            raise ValueError(
                f"--{useless.replace('_', '-')} has no effect: all ranks are {where}. "
                f"Say --{needed.replace('_', '-')}, too"
            )
    if arguments.adapters != 1 and not arguments.ranks_per_node:
        raise ValueError("--adapters has no effect: all ranks are on one host")


def _chosen(arguments: argparse.Namespace) -> list[Algorithm]:
    from pycoll._tools.show import named
    from pycoll.schedules import find, names

    collective = arguments.collective
    listed = [
        named([collective, word])[1] if ":" in word else word for word in arguments.algorithms
    ]
    chosen = [find(collective, name) for name in listed or names(collective)]
    spread = arguments.ranks_per_node is not None
    return chosen if listed else [each for each in chosen if spread or not each.hosts]


def _is_count(text: str) -> bool:
    return text.isdecimal() and int(text) > 0


def _rank_count(text: str) -> int:
    if not _is_count(text):
        raise ValueError(f"-n has {text!r} in it: write 4096, 8,64,512, 64:4096 or 64:4096:2")
    return int(text)


def _hosts(size: int, per_node: int | None) -> list[int]:
    if per_node is None:
        return [0] * size
    if per_node < 1:
        raise ValueError(f"--ranks-per-node is {per_node}; a host has at least 1")
    return [rank // per_node for rank in range(size)]


def _network(arguments: argparse.Namespace) -> tuple[Network, str, Slower]:
    """Return the network, where its numbers come from, and what they do not say of a size."""
    from pycoll.simulate import ONE_HOST

    said = {
        name: getattr(arguments, name)
        for prefix in ("", "between_", "rack_")
        for name in (f"{prefix}{word}" for word in _LINK_OPTIONS)
        if getattr(arguments, name) is not None
    }
    slower: Slower = _as_computed
    if said:
        if arguments.costs is not None:
            raise ValueError(
                "--costs: the table of costs has these times, too; leave out "
                f"--{next(iter(said)).replace('_', '-')}"
            )
        if arguments.transport != AUTO:
            raise ValueError(
                "--transport chooses in the table of costs, which is not used beside "
                f"--{next(iter(said)).replace('_', '-')}"
            )
        inside = _link(said, "", (ONE_HOST.latency_s, ONE_HOST.bandwidth, None))
        between = _link(said, "between_", inside)
        far = _link(said, "rack_", between)
        network = ONE_HOST._replace(latency_s=inside[0], bandwidth=inside[1], overhead_s=inside[2])
        network = network._replace(between=_as_link(between), racks=_as_link(far))
        origin = ""
    else:
        network, origin, slower = _of_table(arguments)
    if arguments.reduce_bandwidth is not None:
        speed = parse_bandwidth(arguments.reduce_bandwidth, "--reduce-bandwidth")
        network = network._replace(reduce_s_per_byte=1 / speed)
    if arguments.memory_bandwidth is not None:
        speed = parse_bandwidth(arguments.memory_bandwidth, "--memory-bandwidth")
        network = network._replace(memory_bandwidth=speed)
    network = network._replace(
        shared_ports=True,
        adapters=arguments.adapters,
        cores=arguments.cores or 0,
        hosts_per_rack=arguments.hosts_per_rack,
    )
    for option, value, least in (
        ("--adapters", arguments.adapters, 1),
        ("--cores", arguments.cores, 1),
        ("--most-messages", arguments.most_messages, 1),
        ("--hosts-per-rack", arguments.hosts_per_rack, 0),
    ):
        if value is not None and value < least:
            raise ValueError(f"{option} is {value}; it must be {least} or more")
    return network, origin, slower


def _link(
    said: dict[str, str], prefix: str, default: tuple[float, float, float | None]
) -> tuple[float, float, float | None]:
    latency, bandwidth, overhead = (said.get(f"{prefix}{word}") for word in _LINK_OPTIONS)
    option = f"--{prefix.replace('_', '-')}"
    found = (
        default[0] if latency is None else parse_seconds(latency, f"{option}latency"),
        default[1] if bandwidth is None else parse_bandwidth(bandwidth, f"{option}bandwidth"),
        default[2] if overhead is None else parse_seconds(overhead, f"{option}overhead"),
    )
    if found[2] is not None and found[2] > found[0]:
        raise ValueError(
            f"{option}overhead is {seconds_text(found[2])}, but it is a part of the latency there, "
            f"{seconds_text(found[0])}: say {option}latency, or less"
        )
    return found


def _as_link(values: tuple[float, float, float | None]) -> Link:
    from pycoll.simulate import Link

    return Link(*values)


def _as_computed(collective: str, ranks: int, nbytes: int) -> float:
    return 1.0


def _of_table(arguments: argparse.Namespace) -> tuple[Network, str, Slower]:
    from pycoll._selection import costs
    from pycoll._tools.explain import made_up
    from pycoll._tools.simulate_network import from_costs, trend
    from pycoll.errors import BootstrapError

    environ = dict(os.environ)
    if arguments.costs is not None:
        environ["PYCOLL_COSTS"] = arguments.costs
    try:
        table = made_up([0], "auto", "tcp", None, environ=environ).agreed.costs
    except BootstrapError as exc:
        raise ValueError(str(exc)) from None
    kinds = {"auto": costs.SHM, "shm": costs.SHM, "tcp": costs.TCP, "rdma": costs.RDMA}
    between = costs.RDMA if "rdma" in (arguments.network, arguments.transport) else costs.NET
    inside = kinds[arguments.transport]
    several = arguments.ranks_per_node is not None  # then what is between them counts most
    slower = _as_computed if several else functools.partial(trend, table, inside)
    return from_costs(table, inside, between), table.origin, slower
