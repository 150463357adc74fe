"""`pycoll show`: draw an algorithm, one of pycoll's or a user's own."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pycoll._support.checks import check_ending

if TYPE_CHECKING:
    from pycoll.schedules import Algorithm

_EXAMPLES = """\
examples:
  pycoll show all_reduce ring -n 4
  pycoll show all_reduce double_tree -n 8 --svg double_tree.svg
  pycoll show all_reduce hierarchical -n 8 --hosts 2 --html hierarchical.html
  pycoll show my.py:my_ring -n 4        an algorithm that my.py registers

The html is one file, for any browser: arrow keys, slider, play. The exit status is 1 if the
algorithm is wrong on so many ranks; it is drawn nevertheless.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EXAMPLES
    add = parser.add_argument
    add(
        "names",
        nargs="+",
        metavar="NAME",
        help="a collective and an algorithm, as all_reduce ring; or FILE.py:NAME, what that file "
        "registers",
    )
    add_ranks(parser)
    add("--root", type=int, default=0, metavar="R", help="the root (default: 0)")
    add_hosts(parser)
    add("--svg", metavar="F", help="write a picture of all rounds")
    add("--html", metavar="F", help="write a page that one steps through")


def add_ranks(parser: argparse.ArgumentParser) -> None:
    """Declare the option that says how many ranks there are."""
    says = "number of ranks (default: 4)"
    parser.add_argument("-n", "--ranks", dest="size", type=int, default=4, metavar="N", help=says)


def add_hosts(parser: argparse.ArgumentParser) -> None:
    """Declare the option that says where ranks are."""
    parser.add_argument(
        "--hosts",
        default="1",
        metavar="K",
        help="ranks are on K hosts, as with pycoll-run --emulate-hosts; or, as 4,2, so many on "
        "each (default: 1)",
    )


def hosts_of(text: str, size: int) -> list[int]:
    """Return by rank the number of its host, as `--hosts` says.

    Raises:
        ValueError: it makes no sense.
    """
    counts = [int(word) if word.isdecimal() else 0 for word in text.split(",")]
    if min(counts) < 1:
        raise ValueError(f"--hosts is {text!r}: a number of hosts, or of ranks on each, as 4,2")
    if size < 1:
        raise ValueError(f"-n is {size}; there is at least 1 rank")
    if len(counts) == 1:
        if counts[0] > size:
            raise ValueError(f"--hosts {text}: {size} ranks cannot be on more than {size} hosts")
        return [rank // -(-size // counts[0]) for rank in range(size)]
    if sum(counts) != size:
        raise ValueError(f"--hosts {text}: that makes {sum(counts)} ranks, but -n is {size}")
    return [host for host, count in enumerate(counts) for _ in range(count)]


def main(arguments: argparse.Namespace) -> int:
    """Draw, or write the files.

    Raises:
        ValueError: an option makes no sense.
    """
    from pycoll._drawing.rounds import READABLE
    from pycoll._drawing.show import show
    from pycoll.errors import ProofError

    hosts = hosts_of(arguments.hosts, arguments.size)
    if arguments.svg:
        check_ending(arguments.svg, "--svg", ".svg")
    if arguments.html:
        check_ending(arguments.html, "--html", ".html", ".htm")
    try:
        collective, name = named(arguments.names)
        drawing = show(collective, name, arguments.size, root=arguments.root, hosts=hosts)
    except ProofError as exc:
        print(f"pycoll show: {exc}", file=sys.stderr)
        return 1
    except Exception as exc:
        if not _print_users(exc):
            raise
        return 1
    if arguments.size > READABLE:
        print(
            f"pycoll show: up to {READABLE} ranks are readable; of {arguments.size} only the "
            "messages are drawn, not the chunks",
            file=sys.stderr,
        )
    for path, drawn in ((arguments.svg, "svg"), (arguments.html, "html")):
        if path:
            try:
                with open(path, "w", encoding="utf-8") as file:
                    file.write(getattr(drawing, drawn))
            except OSError as exc:
                raise ValueError(f"{path}: {exc.strerror}") from None
            print(f"wrote {path}")
    if not (arguments.svg or arguments.html):
        print(drawing)
    elif drawing.fault is not None:
        print(f"pycoll show: {drawing.fault}", file=sys.stderr)
    return 0 if drawing.fault is None else 1


def named(words: Sequence[str]) -> tuple[str, str]:
    """Return collective and name of the algorithm that is meant.

    Raises:
        ValueError: there is none.
    """
    from pycoll.schedules import names

    *before, last = words
    path, colon, name = last.rpartition(":")
    if len(before) > 1 or (not before and not colon):
        listed = ", ".join(names(last)) if len(words) == 1 else ""
        raise ValueError(
            f"write a collective and one algorithm, as all_reduce ring"
            f"{f'; {last} has {listed}' if listed else ''}"
        )
    if not colon:
        return before[0], last
    found = [
        algorithm
        for algorithm in _registered_by(path)
        if not before or algorithm.collective == before[0]
        if name in (algorithm.name, getattr(algorithm.steps, "__name__", ""))
    ]
    if len(found) == 1:
        return found[0].collective, found[0].name
    if found:
        several = ", ".join(algorithm.collective for algorithm in found)
        raise ValueError(f"{path} registers {name!r} for {several}: write one of these before it")
    theirs = [f"{each.collective} {each.name}" for each in _registered_by(path)]
    raise ValueError(
        f"{path} registers no {name!r}"
        + (f"; it registers {', '.join(theirs)}" if theirs else "")
        + f': write @pycoll.register_algorithm("all_reduce", "{name}") above the function'
    )


def _print_users(exc: Exception) -> bool:
    """Show what a user's file has raised, from its frames on; False: no file of the user's has."""
    trace = exc.__traceback__
    files = {os.path.abspath(path) for path in _FILES}
    while trace is not None and os.path.abspath(trace.tb_frame.f_code.co_filename) not in files:
        trace = trace.tb_next
    users = trace is not None or isinstance(exc, SyntaxError)
    if users:
        traceback.print_exception(exc.with_traceback(trace))
    return users


_FILES: dict[str, list[Algorithm]] = {}


def _registered_by(path: str) -> list[Algorithm]:
    """Run a user's file, once, and return the algorithms that it registers.

    Raises:
        ValueError: there is no such file.
        SystemExit: it has raised something, which was shown.
    """
    from pycoll.schedules import TABLE

    if path in _FILES:
        return _FILES[path]
    if not os.path.isfile(path):
        raise ValueError(f"there is no file {path!r}; write FILE.py:NAME")
    _FILES[path] = []
    before = {id(algorithm) for named in TABLE.values() for algorithm in named.values()}
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    try:
        runpy.run_path(path, run_name="pycoll_show")
    except Exception as exc:
        if not _print_users(exc):
            raise
        raise SystemExit(1) from None
    finally:
        sys.path.pop(0)
    _FILES[path] = [
        algorithm
        for named in TABLE.values()
        for algorithm in named.values()
        if id(algorithm) not in before
    ]
    return _FILES[path]
