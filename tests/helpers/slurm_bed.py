"""Slurm on pretended hosts (`hosts_bed`): slurmctld on the first, a slurmd on each."""

from __future__ import annotations

import os
import shutil
import time
from subprocess import CompletedProcess, Popen

from hosts_bed import Bed

CPUS = 4  # that each host pretends to have

_NEEDED = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "salloc", "scontrol")

_CONF = """\
ClusterName=pretended
SlurmctldHost={first}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
StateSaveLocation=/run/slurmctld
SlurmdSpoolDir=/run/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%h.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1
ReturnToService=2
MpiDefault=none
KillWait=5
InactiveLimit=0
SlurmdTimeout=30
NodeName={nodes} CPUs={cpus} State=UNKNOWN
PartitionName=test Nodes={nodes} Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str:
    """Why there can be no Slurm here; "" if there can."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    missing = [name for name in _NEEDED if shutil.which(name, path=path) is None]
    return f"Slurm needs {', '.join(missing)} (munge, slurmctld, slurmd)" if missing else ""


class Slurm:
    """Slurm on the hosts of a bed; it ends with them.

    Attributes:
        bed: the hosts.
        conf: the value of SLURM_CONF.
    """

    def __init__(self, bed: Bed) -> None:
        self.bed = bed
        self.conf = bed.folder / "slurm.conf"

    def start(self) -> None:
        """Start it, and wait until all nodes are idle."""
        bed, folder = self.bed, self.bed.folder
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        nodes = ",".join(bed.names)
        self.conf.write_text(
            _CONF.format(first=bed.names[0], folder=folder, nodes=nodes, cpus=CPUS)
        )
        munged = (
            "mkdir -p -m 755 /run/munge /run/slurmd /run/slurmctld && "
            f"munged --force --num-threads=2 --key-file={key} --pid-file=/run/munged.pid "
            "--seed-file=/run/munged.seed --log-file=/run/munged.log"
        )
        for host in bed.names:
            self._do(host, "sh", "-c", munged)
        self._do(bed.names[0], "slurmctld", "-c")
        for host in bed.names:
            self._do(host, "slurmd")
        deadline = time.monotonic() + 30
        while self.run("sinfo", "-h", "-t", "idle", "-o", "%D").stdout.split() != [
            str(len(bed.names))
        ]:
            assert time.monotonic() < deadline, "not all nodes of Slurm are idle"
            time.sleep(0.1)

    def run(self, *command: str, at: str = "", **options: object) -> CompletedProcess[str]:
        """Run a command on a host (the first), as a user of Slurm."""
        return self.bed.run(at or self.bed.names[0], *self._as_user(command), **options)

    def popen(self, *command: str, **options: object) -> Popen[str]:
        """Start a command on the first host, as a user of Slurm."""
        return self.bed.popen(self.bed.names[0], *self._as_user(command), **options)

    def _as_user(self, command: tuple[str, ...]) -> tuple[str, ...]:
        return ("env", f"SLURM_CONF={self.conf}", *command)

    def _do(self, host: str, *command: str) -> None:
        done = self.bed.run(host, *self._as_user(command))
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
