"""`pycoll bench`: times collectives, beside MPI and gloo on the same machine.

Every side runs in jobs of its own, strictly in turn, round by round, so that all sides see the same
machine: what changes in the course of minutes changes for all. In each job each size is verified,
warmed up, and timed in one loop of about 40 ms between barriers; a time is that of the slowest
rank. What is reported is the median over the rounds, with the smallest and the largest.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pycoll
from pycoll._selection.agreed import parse_bytes
from pycoll._support import foreign_names
from pycoll._tools import bench_machine as machine
from pycoll._tools import bench_report as report
from pycoll._tools.bench_report import JobSample
from pycoll._tools.bench_sides import PEERS, BenchError, Side
from pycoll._transports.network import ZMQ

COLLECTIVES = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
    "barrier",
    "send",
)
# What is started and waited for at once; halo: messages to and from both neighbors on a ring.
REQUESTS = ("halo", "iall_reduce", "iall_gather", "ibarrier")
TRANSPORTS = ("auto", "shm", "tcp", "zmq", "rdma", "hosts")
# Bytes of an element.
DTYPES = {"float32": 4, "float64": 8, "int8": 1, "int32": 4, "int64": 8, "uint8": 1}
# All that every dtype's items divide.
_SMALLEST = 8
_PAGE = 4096
_DEFAULT_SIZES = "8,1K,16K,256K,1M,4M,16M,64M"
# From one size of a range to the next.
_DEFAULT_FACTOR = 4
# More than this much of a core gone to others while a job ran shows in its figures.
_DISTURBED_CORES = 0.2

_EPILOG = """\
sizes:   bytes of one rank's value in all_reduce, broadcast, reduce, send and halo; of one block,
         which one rank has for or from one other, in all_gather, gather, scatter, reduce_scatter
         and all_to_all. 8:64M is 8, 32, 128, ... and 64M; 8:64M:2 doubles; 8,1K,64M is a list.
time:    of a call on the slowest rank; of send: from rank 0 to rank 1, half of there and back.
         Arrays for the results exist (`out=`); broadcast fills the same array again and again.
         iall_reduce, iall_gather and ibarrier are started and waited for at once. halo starts
         messages from and to both neighbors on a ring of ranks, and waits for all four.
hosts:   --transport hosts emulates two hosts: tcp between them, shared memory on each.
alias:   arrays begin with a page. --alias 0,16,32 measures each size also where the array of the
         result lies so many bytes behind the source's, modulo 4096: 1 to 31 is slow on many
         processors, and where arrays that are allocated one after the other often lie.
peers:   run in environments of their own: make them with benchmarks/peers."""


class Conditions(NamedTuple):
    """What all sides have in common.

    Attributes:
        sizes: bytes; see `report.OF_A_VALUE`.
        algorithm: of pycoll, where the side names none; None: its own choice.
        aliases: where the array of a result begins behind a page; what is sent begins with one.
        timeout_s: after which a job is ended.
        usage: measure processor time and bytes on the loopback interface, too.
    """

    ranks: int
    sizes: tuple[int, ...]
    dtype: str = "float32"
    rounds: int = 5
    algorithm: str | None = None
    aliases: tuple[int, ...] = (0,)
    timeout_s: float = 300.0
    usage: bool = False


def parse_sizes(text: str) -> tuple[int, ...]:
    """Sizes in bytes, from ``"8:64M"``, ``"8:64M:2"`` or ``"8,1K,64M"``, ascending.

    Raises:
        ValueError: the text is none of these, or a size is not a multiple of 8.
    """
    return parse_numbers(text, _bytes)


def parse_numbers(text: str, read: Callable[[str], int]) -> tuple[int, ...]:
    """Numbers above 0, from a list, from FROM:TO, or from FROM:TO:FACTOR, ascending.

    Args:
        text: where they are.
        read: reads one; raises a ValueError if it is none.

    Raises:
        ValueError: the text is none of these.
    """
    numbers: set[int] = set()
    for part in text.split(","):
        ends = part.split(":")
        if len(ends) > 3:
            raise ValueError(f"{part!r} has more than FROM:TO:FACTOR")
        number, last = read(ends[0]), read(ends[1] if len(ends) > 1 else ends[0])
        factor = int(ends[2]) if len(ends) > 2 and ends[2].isdecimal() else _DEFAULT_FACTOR
        if factor < 2 or (len(ends) > 2 and not ends[2].isdecimal()):
            raise ValueError(f"the factor of {part!r} must be a whole number of at least 2")
        if number > last:
            raise ValueError(f"{part!r} ends before it begins")
        while number < last:
            numbers.add(number)
            number *= factor
        numbers.add(last)
    return tuple(sorted(numbers))


def parse_aliases(text: str, itemsize: int) -> tuple[int, ...]:
    """Distances in bytes, from ``"0,16,32"``.

    Raises:
        ValueError: one is not in 0..4095, or no multiple of `itemsize`.
    """
    aliases = []
    for part in text.split(","):
        if not part.strip().isdecimal() or int(part) >= _PAGE:
            raise ValueError(f"--alias {part}: not between 0 and {_PAGE - 1}")
        if int(part) % itemsize:
            raise ValueError(
                f"--alias {part}: elements of {itemsize} bytes cannot lie there; use --dtype uint8"
            )
        aliases.append(int(part))
    return tuple(dict.fromkeys(aliases))


def _bytes(text: str) -> int:
    nbytes = parse_bytes(text, "a size", f"all are multiples of {_SMALLEST}")
    if nbytes == 0 or nbytes % _SMALLEST:
        raise ValueError(f"{text!r} is not a multiple of {_SMALLEST} bytes")
    return nbytes


def measure(
    sizes: Mapping[str, Sequence[int]],
    sides: Sequence[Side],
    conditions: Conditions,
    progress: Callable[[str], None] = lambda text: None,
) -> list[JobSample]:
    """Run the rounds of some collectives: in each, one job of every side, in turn.

    Args:
        sizes: bytes, by collective; they are measured instead of those of the conditions.
        progress: called with a line of text before each job.

    Raises:
        BenchError: a job failed, took too long, or got wrong values.
    """
    samples = []
    plan = {
        "sizes": dict(sizes),
        "dtype": conditions.dtype,
        "algorithm": conditions.algorithm,
        "aliases": conditions.aliases,
        "usage": conditions.usage,
    }
    for number in range(1, conditions.rounds + 1):
        for side in sides:
            names = ", ".join(sizes)
            progress(f"{names}, round {number} of {conditions.rounds}: {side.name}")
            clock = machine.CpuClock()
            job = plan | {"copy": not side.is_peer}
            job |= {"algorithm": side.algorithm} if side.algorithm else {}
            result = side.run(conditions.ranks, job, conditions.timeout_s)
            others = clock.others()
            for name in sizes:
                figures = [f for f in result["figures"] if f["collective"] == name]
                about = name, conditions.ranks, number, side.name, others
                samples.append(JobSample(*about, figures, result["versions"]))
    return samples


def as_dict(
    samples: Sequence[JobSample], conditions: Conditions, command: Sequence[str]
) -> dict[str, Any]:
    """All that was found, for JSON: where, with what, every round's figures, and the summary."""
    versions = {sample.side: sample.versions for sample in samples}
    return {
        "command": shlex.join(command),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine.describe()._asdict(),
        "versions": versions,
        "dtype": conditions.dtype,
        "algorithm": conditions.algorithm,
        "results": [report.as_dict(row) for row in report.rows(samples)],
        "rounds": [
            {key: value for key, value in sample._asdict().items() if key != "versions"}
            for sample in samples
        ],
    }


def warn_if_busy() -> None:
    """Say on stderr if others use this machine now."""
    if why := machine.busy(machine.describe().cores):
        say(f"warning: this machine is busy ({why}): do not trust the figures")


def warn_if_disturbed(samples: Sequence[JobSample]) -> None:
    """Say on stderr if others used this machine while it was measured."""
    disturbed = [s.others_cores for s in samples if s.others_cores > _DISTURBED_CORES]
    if disturbed:
        say(
            f"warning: in {len(disturbed)} of {len(samples)} measurements other processes used "
            f"up to {max(disturbed):.1f} cores: do not trust the figures"
        )


def say(text: str) -> None:
    """Tell the user something that is no result."""
    print(f"pycoll bench: {text}", file=sys.stderr, flush=True)


def progress_line(text: str) -> None:
    """Show what is measured now, where somebody looks: each text replaces the last."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


# ---------------------------------------------------------------- the command


def add_options(parser: argparse.ArgumentParser) -> None:
    """Define the command line."""
    parser.description = __doc__
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add(
        "collectives",
        nargs="*",
        metavar="COLLECTIVE",
        help=f"{', '.join((*COLLECTIVES, *REQUESTS))} (default: all_reduce)",
    )
    add("-n", "--ranks", type=int, default=2, metavar="N", help="ranks (default: 2)")
    add("--sizes", default=_DEFAULT_SIZES, metavar="S", help=f"default: {_DEFAULT_SIZES}")
    add(
        "--transport",
        default="auto",
        metavar="T",
        help="one or more of shm,tcp,zmq,rdma,auto,hosts",
    )
    add("--against", metavar="P", help=f"one or more of {','.join(PEERS)}")
    add("--dtype", choices=DTYPES, default="float32", metavar="D", help=f"{', '.join(DTYPES)}")
    add("--alias", default="0", metavar="D", help="bytes from source to result, modulo 4096 (0)")
    add("--rounds", type=int, default=5, metavar="R", help="default: 5")
    add("--share", action="store_true", help="measure arrays that the ranks have mapped, too")
    add("--encrypt", action="store_true", help="measure zmq with pycoll-run --encrypt, too")
    add("--algorithm", metavar="A", help="force one or more of pycoll's algorithms: ring,tree")
    add("--timeout", type=float, default=300.0, metavar="S", help="seconds for a job (300)")
    add("--plot", type=Path, metavar="F", help="draw the times: .png, .svg or .pdf")
    add("--json", type=Path, metavar="F", help="write everything that was measured")


def main(arguments: argparse.Namespace) -> int:
    """Run the command; returns the exit status: 1 if something could not be measured.

    What was measured until then, or until Ctrl-C, is written all the same.

    Raises:
        ValueError: the arguments make no sense.
    """
    conditions, collectives, sides = _understand(arguments)
    samples: list[JobSample] = []
    try:
        _check_before(arguments, sides)
        # `timeout` and batch systems end programs so; a job that is running is ended on the way.
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        with machine.alone(say):
            warn_if_busy()
            for collective in collectives:
                found = measure({collective: conditions.sizes}, sides, conditions, progress_line)
                progress_line("")
                report.show(report.table(report.rows(found)))
                samples += found
    except BenchError as exc:
        progress_line("")
        say(str(exc))
        status = 1
    except KeyboardInterrupt:
        progress_line("")
        status = 128 + signal.SIGINT
    else:
        status = 0
    warn_if_disturbed(samples)
    if samples and arguments.json is not None:
        text = json.dumps(as_dict(samples, conditions, sys.argv), indent=1)
        arguments.json.write_text(text + "\n", encoding="utf-8")
    if samples and arguments.plot is not None:
        report.plot(report.rows(samples), arguments.plot)
    return status


def _understand(arguments: argparse.Namespace) -> tuple[Conditions, list[str], list[Side]]:
    collectives = arguments.collectives or ["all_reduce"]
    _known("collective", collectives, (*COLLECTIVES, *REQUESTS))
    transports = arguments.transport.split(",")
    _known("transport", transports, TRANSPORTS)
    peers = arguments.against.split(",") if arguments.against else []
    _known("peer", peers, PEERS)
    if arguments.ranks < (2 if "send" in collectives else 1):
        raise ValueError(f"-n {arguments.ranks}: too few ranks")
    if arguments.rounds < 1:
        raise ValueError(f"--rounds {arguments.rounds}: at least 1")
    algorithms = [] if arguments.algorithm is None else arguments.algorithm.split(",")
    for collective in collectives if algorithms else ():
        of_messages = collective in ("send", "halo")
        known = [] if of_messages else pycoll.algorithms(collective.removeprefix("i"))
        _known(f"algorithm of {collective}", algorithms, known)
    conditions = Conditions(
        ranks=arguments.ranks,
        sizes=parse_sizes(arguments.sizes),
        dtype=arguments.dtype,
        rounds=arguments.rounds,
        algorithm=algorithms[0] if len(algorithms) == 1 else None,
        aliases=parse_aliases(arguments.alias, DTYPES[arguments.dtype]),
        timeout_s=arguments.timeout,
    )
    ours = [f"pycoll {name}" for name in transports]
    if arguments.encrypt:
        if ZMQ not in transports:
            raise ValueError("--encrypt: only zmq encrypts on one machine; add it to --transport")
        ours.insert(ours.index(f"pycoll {ZMQ}") + 1, f"pycoll {ZMQ}, encrypted")
    if arguments.share:
        ours = [name for plain in ours for name in (f"{plain}, shared", plain)]
    if len(algorithms) > 1:
        ours = [f"{name}, {algorithm}" for name in ours for algorithm in algorithms]
    names = [*ours, *peers]
    return conditions, collectives, [Side(name) for name in dict.fromkeys(names)]


def _known(what: str, names: Sequence[str], known: Sequence[str] | dict[str, Any]) -> None:
    for name in names:
        if name not in known:
            meant = foreign_names.of_collective(name, known) if what == "collective" else ""
            instead = f"write {meant}" if meant else f"there are {', '.join(known) or 'none'}"
            raise ValueError(f"no {what} {name!r}; {instead}")


def _check_before(arguments: argparse.Namespace, sides: Sequence[Side]) -> None:
    """Find out now what would fail after minutes of measuring.

    Raises:
        BenchError: with what to do.
        ValueError: a file cannot be written.
    """
    if missing := [text for side in sides if (text := side.missing())]:
        raise BenchError("\n".join(missing))
    for side in sides:
        if warning := side.warning():
            say(f"warning: {warning}")
    report.check_files(arguments.plot, arguments.json)
