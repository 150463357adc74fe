"""Which hosts a job has: those that the user names, or those of an allocation of Slurm."""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection

from pycoll._launcher import slurm
from pycoll._launcher.host import NamedHost
from pycoll._launcher.hostlist import lay_out, parse_hosts, read_hostfile, spread
from pycoll._launcher.starters import named_host
from pycoll.errors import Error


def choose_hosts(
    args: argparse.Namespace, lost: Collection[str] = ()
) -> tuple[list[NamedHost], list[int]]:
    """The hosts of the job, and by rank the index of its host; no hosts: this one.

    Args:
        args: the options of `pycoll-run`.
        lost: names of hosts that are left out. If the others have too few places for as many ranks
            as there would be, there are as many as they have places.

    Raises:
        Error: the options make no sense, or no host is left.
    """
    environ, size = os.environ, args.size
    allocated = slurm.allocation(environ) if slurm.is_allocation(environ) else []
    if args.hosts is not None and args.hostfile is not None:
        raise Error("--hostfile does not go together with -H")
    if args.hosts is not None:
        option, slots = "-H", parse_hosts(args.hosts)
    elif args.hostfile is not None:
        option, slots = "--hostfile", read_hostfile(args.hostfile)
    elif allocated and args.emulate_hosts is None:
        option, slots = "", allocated
    else:
        return [], []
    if args.emulate_hosts:
        raise Error(f"--emulate-hosts does not go together with {option}")
    if not option and size is not None:
        slots = spread(slots, size)
    if lost:
        size = size or sum(each.ranks for each in slots)
        slots = [each for each in slots if each.host not in lost]
        if not slots:
            raise Error("no host is left")
        size = min(size, sum(each.ranks for each in slots))
    names, nodes = lay_out(slots, size)
    theirs = {each.host for each in allocated}
    hosts = [named_host(name, environ, theirs) for name in names]
    if len(hosts) == 1 and not hosts[0].command:
        return [], nodes
    return hosts, nodes
