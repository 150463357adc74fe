"""`pycoll top`: what the ranks of a job do each second, and which of them is waited for."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pycoll._tools import jobs
from pycoll._tools.jobs import JobEndedError, RunningJob
from pycoll.errors import Error

_EXAMPLES = """\
examples:
  pycoll top                    of the job that runs, until Ctrl-C or its end
  pycoll top 4711 --interval 5  of the job whose pycoll-run is process 4711
  pycoll top --once --json      of one second, for programs

"calls" are collectives, "messages" what was sent otherwise or between hosts; MB are a million bytes
of both. "waiting" is the share of the time for which a rank waited for others in pycoll, longer
than some microseconds at a time. Which rank the others wait for is said below, if that costs them
more than 20 % of their time. The ranks go on meanwhile, and do nothing for it.
"""

_HEAD = ("rank", "host", "process", "state", "calls/s", "messages/s", "MB/s", "waiting")
_LEFT = {"host", "state"}
_MAX_STATE = 28
_LINES_BESIDE = 5  # of a screen: title, heads, sum, who is waited for, and the prompt

Fields = dict[str, Any]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EXAMPLES
    add = parser.add_argument
    add("job", nargs="?", metavar="JOB", help="the beginning of its id, or pycoll-run's process")
    add("--interval", type=_seconds, default=1.0, metavar="S", help="seconds between rows (1)")
    add("--once", action="store_true", help="show one interval, and end")
    add("--json", action="store_true", help="print JSON, a line for each interval")


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0.05 <= number <= 3600:
        raise argparse.ArgumentTypeError(f"must be a number from 0.05 to 3600, not {text!r}")
    return number


def main(arguments: argparse.Namespace) -> int:
    """Show a job until it ends, or Ctrl-C; returns the exit status."""
    try:
        job = jobs.find(arguments.job)
        _show(job, arguments)
    except JobEndedError as exc:
        print(f"pycoll top: {exc}", file=sys.stderr)
        return 1 if arguments.once else 0
    except Error as exc:
        print(f"pycoll top: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _show(job: RunningJob, arguments: argparse.Namespace) -> None:
    is_live = sys.stdout.isatty() and not (arguments.once or arguments.json)
    before, shown = job.ask("tallies"), 0
    while True:
        time.sleep(arguments.interval)
        after = job.ask("tallies")
        rates = between(before, after)
        said = straggler(rates, after.pop("awaited", None))
        if arguments.json:
            print(json.dumps(_as_json(after, rates, said)), flush=True)
        else:
            job.about = after
            room = shutil.get_terminal_size().lines - _LINES_BESIDE if is_live else 0
            lines = [job.title(), *table(rates, room), *filter(None, [said])]
            if is_live:
                width = shutil.get_terminal_size().columns
                lines = [line[: width - 1] for line in lines]
                # Back to the first line that was shown, and away with all from there.
                print(f"\x1b[{shown}A\r\x1b[J" if shown else "", end="")
                shown = len(lines)
            print("\n".join(lines), flush=True)
        if arguments.once:
            return
        before = after


class Rates(NamedTuple):
    """What a rank does each second.

    Attributes:
        rank, host, process, state: which, where, and what the kernel says of it.
        calls, messages, nbytes: a second; nan: not known.
        waiting: the share of the time for which it waits; nan: not known.
    """

    rank: int
    host: str
    process: int
    state: str
    calls: float
    messages: float
    nbytes: float
    waiting: float


def between(before: Fields, after: Fields) -> list[Rates]:
    """Return what each rank does each second, of two answers of a job."""
    seconds = max(after["time"] - before["time"], 1e-9)
    earlier = {each["rank"]: each for each in before["ranks"]}
    found = []
    for each in after["ranks"]:
        old = earlier.get(each["rank"], {})
        calls, messages, nbytes, waiting = (
            (each[name] - old[name]) / seconds if name in each and name in old else math.nan
            for name in ("calls", "messages", "nbytes", "waited_s")
        )
        waiting = min(max(waiting, 0.0), 1.0) if waiting == waiting else waiting
        where = each["rank"], each["host"], each["process"], each["state"]
        found.append(Rates(*where, calls, messages, nbytes, waiting))
    return found


def straggler(rates: Sequence[Rates], awaited: list[Any] | None) -> str:
    """Say which rank the others wait for, if that costs them much; "": none.

    Args:
        rates: what the ranks do.
        awaited: for whom they have waited, packed; None: it is not known.
    """
    from pycoll._launcher import stragglers
    from pycoll._launcher.awaited import Awaited

    shares = {r.rank: r.waiting for r in rates if r.waiting == r.waiting}
    found = stragglers.find(shares, Awaited.unpacked(awaited) if awaited is not None else None)
    if found is None or found.cost <= stragglers.COSTLY:
        return ""
    return found.text()


def table(rates: Sequence[Rates], room: int = 0) -> list[str]:
    """Return the lines of a table; `room`: at most so many ranks, those that wait least; 0: all."""
    shown = list(rates)
    if 0 < room < len(shown):
        least = sorted(shown, key=lambda r: (math.isnan(r.waiting), r.waiting))[: max(1, room - 1)]
        shown = sorted(least, key=lambda r: r.rank)
    rows = [_row(each) for each in shown]
    if len(rates) > 1:
        columns = zip(*(each[4:7] for each in rates), strict=True)
        sums = [sum(value for value in column if value == value) for column in columns]
        rows.append(("all", "", "", "", *_numbers(*sums), ""))
    heads = [head for head in _HEAD if head != "host" or any(r.host for r in rates)]
    cells = [heads, *([row[_HEAD.index(head)] for head in heads] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(heads))]
    lines = [
        "  ".join(
            f"{cell:<{width}}" if head in _LEFT else f"{cell:>{width}}"
            for head, cell, width in zip(heads, row, widths, strict=True)
        ).rstrip()
        for row in cells
    ]
    if len(shown) < len(rates):
        lines.append(f"and {len(rates) - len(shown)} more ranks, which wait longer")
    return lines


def _row(rates: Rates) -> tuple[str, ...]:
    state = rates.state
    if len(state) > _MAX_STATE:
        state = f"{state[: _MAX_STATE - 3]}..."
    waiting = f"{rates.waiting:.0%}".replace("%", " %") if rates.waiting == rates.waiting else "?"
    process = str(rates.process) if rates.process else "-"
    numbers = _numbers(rates.calls, rates.messages, rates.nbytes)
    return (str(rates.rank), rates.host, process, state, *numbers, waiting)


def _numbers(calls: float, messages: float, nbytes: float) -> tuple[str, str, str]:
    def text(number: float, digits: int) -> str:
        return f"{number:.{digits}f}" if number == number else "?"

    return text(calls, 0), text(messages, 0), text(nbytes / 1e6, 1)


def _as_json(after: Fields, rates: Sequence[Rates], said: str) -> Mapping[str, Any]:
    ranks = [
        {name: None if value != value else value for name, value in each._asdict().items()}
        for each in rates
    ]
    return {**after, "ranks": ranks, "straggler": said}
