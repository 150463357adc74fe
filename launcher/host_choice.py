"""Which hosts a job has, those that the user names or those of Slurm, and how each is reached.

The launcher talks to an agent on the standard input and output of the command that starts it, so
such a command has to pass on bytes, both ways, and may hold back what does not end a line.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Collection, Mapping

from pycoll._launcher import slurm
from pycoll._launcher.host import NamedHost
from pycoll._launcher.hostlist import is_here, lay_out, parse_hosts, read_hostfile, spread
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


def named_host(name: str, environ: Mapping[str, str], allocated: Collection[str]) -> NamedHost:
    """Find out how a host is reached.

    Args:
        name: the host.
        environ: the launcher's environment.
        allocated: the hosts of an allocation of Slurm that this process is in.
    """
    if name in allocated:
        own = slurm.is_here(name, environ)
        return NamedHost(name, () if own else slurm.srun_command(name, _agent("srun")))
    return NamedHost(name, () if is_here(name) else _ssh_command(name, environ))


def _agent(starter: str) -> list[str]:
    return [sys.executable, "-P", "-m", "pycoll._launcher.agent", starter]


def _ssh_command(name: str, environ: Mapping[str, str]) -> list[str]:
    """The command that starts an agent on a host by ssh: same folder, same interpreter.

    PYTHONPATH is the only variable on it: without, the agent might not be found. Nothing secret is.
    """
    words = _agent("ssh")
    if path := environ.get("PYTHONPATH"):
        words = ["env", f"PYTHONPATH={path}", *words]
    remote = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(words)}"
    # By these ssh ends, too, where the other host is gone, even if nobody is left to end it.
    alive = ("ServerAliveInterval=4", "ServerAliveCountMax=2")  # after 12 s, later than LOST_S
    options = ("BatchMode=yes", "ConnectTimeout=10", *alive)
    return ["ssh", "-T", *(f"-o{option}" for option in options), "--", name, remote]
