"""`pycoll topology`: what this machine is made of, and how wide the links between hosts are."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path

from pycoll._support.checks import check_ending
from pycoll._topology import links
from pycoll._topology.links import HostLinks

_EXAMPLES = """\
examples:
  pycoll topology --svg machine.svg
  pycoll topology --measure -H a:1,b:1,c:1 -o cluster.toml
  PYCOLL_TOPOLOGY=cluster.toml pycoll-run -H a:4,b:4,c:4 train.py

Without --measure and FILE it shows this machine: sockets, NUMA nodes, caches that cores share, GPUs
and network devices. --measure runs a job in which one rank of each host measures its links to the
others; its options are those of pycoll-run. Of these links, or those in FILE, it shows the ring and
the tree whose narrowest link is widest. With PYCOLL_TOPOLOGY=FILE a job puts its hosts into the
order of the ring in FILE. docs/topology.md says more.
"""

_OF_RUN = ("hosts", "hostfile", "size", "emulate_hosts", "transport", "interface", "address")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EXAMPLES
    add = parser.add_argument
    add("file", nargs="?", metavar="FILE", help="show the links between hosts in this file")
    add("--measure", action="store_true", help="measure the links between the hosts of a job")
    add("-o", "--output", type=Path, metavar="F", help="write the links, and the best ring, to F")
    add("--json", action="store_true", help="print JSON")
    add("--svg", type=Path, metavar="F", help="draw this machine")
    add("--sysfs", metavar="DIR", help="show the machine of a copy of its /sys")
    add = parser.add_argument_group("for --measure, as of pycoll-run").add_argument
    add("-H", "--hosts", metavar="a:1,b:1", help="the hosts")
    add("--hostfile", metavar="F", help="a file with a host a line")
    add("-n", dest="size", metavar="N", help="number of ranks, of which one of each host measures")
    add("--emulate-hosts", metavar="K", help="pretend K hosts")
    add("--transport", metavar="NAME", help="how bytes move")
    add("--interface", metavar="NAME", help="the network interface that hosts use for each other")
    add("--address", metavar="IP", help="where other hosts reach this one")
    add("--encrypt", action="store_true", help="encrypt what travels")


def main(arguments: argparse.Namespace) -> int:
    """Show this machine or links between hosts.

    Raises:
        ValueError: an option makes no sense, or a file.
    """
    about_links = arguments.measure or arguments.file is not None
    _check(arguments, about_links)
    if not about_links:
        return _show_machine(arguments)
    if arguments.measure:
        from pycoll._topology.measure import MeasuringError, measure

        try:
            found = measure(_job_options(arguments))
        except MeasuringError as exc:
            print(f"pycoll topology: {exc}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("pycoll topology: nothing was measured: interrupted", file=sys.stderr)
            return 128 + signal.SIGINT
    else:
        found = links.read(arguments.file)
    if arguments.measure or arguments.output:
        if not found.widths:
            raise ValueError(f"{arguments.file} has no {links.WIDTHS}, by which to find a ring")
        found = found.with_ring()
    print(json.dumps(_json(found), indent=1) if arguments.json else links.text_of(found))
    if arguments.output:
        _write(arguments.output, found.as_toml())
        print(f"wrote {arguments.output}; jobs go by it with PYCOLL_TOPOLOGY={arguments.output}")
    return 0


def _check(arguments: argparse.Namespace, about_links: bool) -> None:
    given = [name for name in _OF_RUN if getattr(arguments, name) is not None]
    given += ["encrypt"] * arguments.encrypt
    if given and not arguments.measure:
        option = {"size": "-n", "hosts": "-H"}.get(given[0], f"--{given[0].replace('_', '-')}")
        raise ValueError(f"{option} is for --measure")
    if arguments.measure and arguments.file is not None:
        raise ValueError(f"--measure does not read {arguments.file}; -o F writes to F")
    if about_links and (arguments.svg or arguments.sysfs):
        raise ValueError(f"{'--svg' if arguments.svg else '--sysfs'} is for this machine alone")
    if arguments.svg:
        check_ending(arguments.svg, "--svg", ".svg")
    if arguments.output and not about_links:
        raise ValueError("-o is for links between hosts, with --measure or FILE")
    if arguments.output and arguments.json:
        raise ValueError("-o does not go together with --json")


def _job_options(arguments: argparse.Namespace) -> list[str]:
    """Return the options for pycoll-run."""
    options = ["--encrypt"] * arguments.encrypt
    if arguments.emulate_hosts is not None and arguments.size is None:
        options += ["-n", arguments.emulate_hosts]
    for name in _OF_RUN:
        if (value := getattr(arguments, name)) is not None:
            options += ["-n" if name == "size" else f"--{name.replace('_', '-')}", value]
    return options


def _show_machine(arguments: argparse.Namespace) -> int:
    from pycoll._topology import machine, picture  # no other command needs what they need

    found = machine.perceive(arguments.sysfs or "/sys")
    if arguments.svg:
        _write(arguments.svg, picture.svg(found))
        print(f"wrote {arguments.svg}")
    elif arguments.json:
        print(json.dumps(found.as_json(), indent=1))
    else:
        print(picture.text(found))
    return 0


def _json(found: HostLinks) -> dict[str, object]:
    """Return links as JSON has them, with the ring and the tree that are best."""
    said: dict[str, object] = {"hosts": found.hosts, "ring": found.ring}
    if found.widths:
        tree = found.best_tree()
        said["tree"] = [(found.hosts[a], found.hosts[b]) for a, b in tree.links]
    return said | {links.WIDTHS: found.widths, links.LATENCIES: found.latencies}


def _write(path: Path, text: str) -> None:
    """Write a file at once: who reads it meanwhile sees the old one or the new one.

    Raises:
        ValueError: it cannot be written.
    """
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(path)
    except OSError as exc:
        raise ValueError(f"{path} cannot be written: {exc.strerror}") from None
