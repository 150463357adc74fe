"""How the agents of a job are started: on each host, a command that runs one there.

The launcher talks to the agent on the command's standard input and output, so a starter has to pass
on bytes, both ways, and may hold back what does not end a line.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Collection, Mapping

from pycoll._launcher import slurm
from pycoll._launcher.host import NamedHost
from pycoll._launcher.hostlist import is_here


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
