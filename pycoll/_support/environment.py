"""What a rank finds in its environment, and the table of all variables that pycoll knows."""

from __future__ import annotations

import contextlib
import math
import os
import socket
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pycoll.errors import BootstrapError, Error


class Variable(NamedTuple):
    """One environment variable: its name, and what it means."""

    name: str
    meaning: str


# What pycoll-run sets for every rank, whatever it was before, and pycoll.init() reads.
IDENTITY = (
    Variable("PYCOLL_RANK", "this process's number in the job, from 0"),
    Variable("PYCOLL_SIZE", "number of ranks in the job"),
    Variable("PYCOLL_LOCAL_RANK", "its number among the ranks on its host, from 0"),
    Variable("PYCOLL_LOCAL_SIZE", "number of ranks on its host"),
    Variable("PYCOLL_LOCAL_RANKS", "the ranks on its host, in order: 0,1,2"),
    Variable("PYCOLL_NODE", "its host's number in the job, from 0"),
    Variable("PYCOLL_NODES", "number of hosts in the job"),
    Variable("PYCOLL_ADDRESSES", "of several hosts: how its host reaches each: 0=10.0.0.1,1=..."),
    Variable("PYCOLL_HOST", "of several hosts: the name of its host, as -H or --hostfile has it"),
    Variable("PYCOLL_RENDEZVOUS", "where the ranks meet: tcp://HOST:PORT"),
    Variable("PYCOLL_KEY", "the job's secret key, 64 hexadecimal digits; init() takes it away"),
    Variable("PYCOLL_JOB", "the job's id; what carries it is ended with the job"),
    Variable("PYCOLL_LINK", "its socket to pycoll-run, an inherited descriptor: NUMBER:INODE"),
    Variable("PYCOLL_SHM", "its host's shared memory: inherited descriptors, or why there is none"),
    Variable("PYCOLL_ASKED", "where pycoll status asks it, an inherited descriptor: NUMBER:INODE"),
    Variable("PYCOLL_TRACE", "with --trace: memory for what it does, inherited: NUMBER:INODE"),
    Variable("PYCOLL_TRANSPORT", "name of the transport, or auto (option --transport)"),
    Variable("PYCOLL_ATTEMPT", "how often the job was begun before (option --restarts), from 0"),
    Variable("PYCOLL_ENCRYPT", "1: what travels between ranks is encrypted (option --encrypt)"),
)
# The same for programs written for torch.distributed.
TORCH = (
    Variable("RANK", "as PYCOLL_RANK"),
    Variable("WORLD_SIZE", "as PYCOLL_SIZE"),
    Variable("LOCAL_RANK", "as PYCOLL_LOCAL_RANK"),
    Variable("LOCAL_WORLD_SIZE", "as PYCOLL_LOCAL_SIZE"),
    Variable("MASTER_ADDR", "rank 0's address, for torch.distributed"),
    Variable("MASTER_PORT", "a port that was free at the start, for torch.distributed"),
)
# What the user may set; pycoll-run sets these for the ranks only as said here.
SETTINGS = (
    Variable("PYCOLL_OP_TIMEOUT", "seconds an operation may take (option --op-timeout)"),
    Variable("PYCOLL_SHARE_ARRAYS", "1: as --share-arrays; or from how many bytes on, as 64K"),
    Variable("PYCOLL_ALGORITHM", "algorithms to use or (^) not to: all_reduce:ring;reduce:^tree"),
    Variable("PYCOLL_SEGMENT", "bytes of a segment of a large message, as 256K; 0: never cut"),
    Variable("PYCOLL_COSTS", "file with costs, by which algorithms are chosen (pycoll tune)"),
    Variable("PYCOLL_TOPOLOGY", "file with the order in which hosts stand (pycoll topology)"),
    Variable(
        "PYCOLL_TCP_LINKS", "connections of tcp between two ranks (1); more for fast networks"
    ),
    Variable("PYCOLL_RDMA_DEVICE", "RDMA device to use, or one port of it: mlx5_0 or mlx5_0:1"),
    Variable("PYCOLL_RDMA_GID", "index of the RDMA port's address to use (pycoll info lists them)"),
    Variable("PYCOLL_SINGLE_COPY", "0: ranks of a host do not read each other's memory"),
    Variable("PYCOLL_CUDA_IPC", "0: ranks that share a GPU do not read each other's memory there"),
    Variable("PYCOLL_GPUDIRECT", "0: RDMA devices do not reach GPUs' memory"),
    Variable("PYTHONUNBUFFERED", "set to 1 for the ranks unless it is set"),
    Variable("OMP_NUM_THREADS", "set to a rank's share of the cores, unless it is set"),
)
LAUNCHER = (
    Variable("PYCOLL_TRANSPORT", "default of --transport"),
    Variable("PYCOLL_ENCRYPT", "1: as --encrypt; 0: no, and that is not pointed out"),
    Variable("PYCOLL_GRACE", "default of --grace, also for pycoll.run and pycoll.Pool (2)"),
    Variable("PYCOLL_WARN_AFTER", "seconds after which it says who waits for whom (30; 0: never)"),
    Variable("PYCOLL_LOG_DIR", "under mpirun, srun, torchrun: as --log-dir, for calls.txt alone"),
    Variable("PYCOLL_TRACE_RECORDS", "how many calls of each rank --trace keeps"),
    Variable("NO_COLOR", "if not empty, pycoll-run writes no colors"),
)
CHILDREN = (Variable("PYCOLL_PARENT", "the rank that has started this process: RANK:PROCESS"),)
FOREIGN = (
    Variable("TORCHELASTIC_RUN_ID", "with RANK, WORLD_SIZE: a process of torchrun"),
    Variable("TORCHELASTIC_RESTART_COUNT", "which start of that job it is"),
    Variable("TORCHELASTIC_USE_AGENT_STORE", "True: torchrun's store is there, as a rule"),
    Variable("OMPI_COMM_WORLD_SIZE", "with OMPI_COMM_WORLD_RANK: a process of Open MPI's mpirun"),
    Variable("OMPI_COMM_WORLD_RANK", "its rank"),
    Variable("PMIX_NAMESPACE", "it has PMIx; PMIX_PREFIX, OPAL_PREFIX, PRTE_PREFIX: where that is"),
    Variable("PMI_SIZE", "with PMI_RANK: a process of MPICH's mpiexec, or srun --mpi=pmi2"),
    Variable("PMI_RANK", "its rank"),
    Variable("PMI_FD", "it has PMI-1, over this descriptor"),
    Variable("SLURM_STEP_NUM_TASKS", "with SLURM_PROCID: a task of srun"),
    Variable("SLURM_PROCID", "its rank"),
    Variable("SLURM_STEP_NODELIST", "the hosts of its step; rank 0 is on the first"),
    Variable("SLURM_JOB_ID", "with SLURM_STEP_ID: which step, for munge"),
    Variable("SLURM_STEP_ID", "which step"),
)
NODES = (
    Variable("PYCOLL_NODES", "number of nodes, on each of which pycoll-run is called"),
    Variable("PYCOLL_NODE", "which of them this is, from 0"),
    Variable("PYCOLL_RENDEZVOUS", "where the others reach node 0: tcp://HOST:PORT"),
    Variable("PYCOLL_KEY", "64 random hexadecimal digits, of this job only"),
)
SLURM = (
    Variable("SLURM_JOB_NODELIST", "the hosts of the allocation, which the job gets"),
    Variable("SLURM_TASKS_PER_NODE", "how many ranks each of them has, without -n"),
    Variable("SLURM_DISTRIBUTION", "cyclic: ranks go to the hosts in turn"),
    Variable("SLURM_STEP_NUM_TASKS", "in one of several tasks, the job is of that task alone"),
    Variable("SLURMD_NODENAME", "the host of the allocation that pycoll-run is on"),
)
# Every variable, in groups with a heading: printed by `pycoll-run --help-all`.
VARIABLES: dict[str, tuple[Variable, ...]] = {
    "set by pycoll-run for every rank, read by pycoll.init()": IDENTITY,
    "set by pycoll-run for every rank, for torch.distributed": TORCH,
    "passed on to every rank": SETTINGS,
    "read by pycoll-run": LAUNCHER,
    "read by pycoll-run where it is called on every node": NODES,
    "of Slurm, read by pycoll-run": SLURM,
    "of other launchers, read by pycoll.init()": FOREIGN,
    "set by pycoll.init() for what a rank starts": CHILDREN,
}


class HostPlacement(NamedTuple):
    """A rank's host and the number of hosts, and its number among the ranks of that host."""

    node: int
    nodes: int
    local_rank: int
    local_size: int


def blocks(size: int, hosts: int) -> list[int]:
    """The host of each rank when `size` ranks share `hosts` hosts (or fewer) in equal blocks."""
    block = -(-size // hosts)
    return [rank // block for rank in range(size)]


def places(nodes: Sequence[int]) -> list[HostPlacement]:
    """Where each rank is, when its host is that of `nodes`; ranks of a host count upwards."""
    sizes = Counter(nodes)
    seen: Counter[int] = Counter()
    found = []
    for node in nodes:
        found.append(HostPlacement(node, len(sizes), seen[node], sizes[node]))
        seen[node] += 1
    return found


def shared_environment(
    environ: Mapping[str, str],
    size: int,
    *,
    job: str,
    key: bytes,
    rendezvous: str,
    transport: str,
    encrypt: bool,
    op_timeout_s: float | None,
    attempt: int,
    exports: Mapping[str, str],
    master: tuple[str, int],
) -> dict[str, str]:
    """The environment of all ranks: `environ`, `exports`, and what names the job."""
    environment = dict(environ)
    if "PYCOLL_JOB" in environment:  # inside a rank of another job, whose options are not ours
        environment.pop("PYCOLL_OP_TIMEOUT", None)
        environment.pop("PYCOLL_SHARE_ARRAYS", None)
    for name in (*IDENTITY, *TORCH, *CHILDREN):
        environment.pop(name.name, None)
    environment.setdefault("PYTHONUNBUFFERED", "1")
    environment["MASTER_ADDR"], environment["MASTER_PORT"] = master[0], str(master[1])
    if op_timeout_s is not None:
        environment["PYCOLL_OP_TIMEOUT"] = str(op_timeout_s)
    environment.update(exports)
    environment["PYCOLL_RENDEZVOUS"] = rendezvous
    environment["PYCOLL_KEY"] = key.hex()
    environment["PYCOLL_JOB"] = job
    environment["PYCOLL_TRANSPORT"] = transport
    environment["PYCOLL_ENCRYPT"] = "1" if encrypt else "0"
    environment["PYCOLL_ATTEMPT"] = str(attempt)
    environment["PYCOLL_SIZE"] = environment["WORLD_SIZE"] = str(size)
    return environment


def rank_environment(rank: int, places: Mapping[int, HostPlacement]) -> dict[str, str]:
    """The variables in which a rank's environment differs from the others'.

    Args:
        rank: the rank.
        places: those of all ranks on its host at least, by rank.
    """
    where = places[rank]
    locals_ = [other for other, place in places.items() if place.node == where.node]
    return {
        "PYCOLL_RANK": str(rank),
        "RANK": str(rank),
        "PYCOLL_NODE": str(where.node),
        "PYCOLL_NODES": str(where.nodes),
        "PYCOLL_LOCAL_RANK": str(where.local_rank),
        "LOCAL_RANK": str(where.local_rank),
        "PYCOLL_LOCAL_SIZE": str(where.local_size),
        "LOCAL_WORLD_SIZE": str(where.local_size),
        "PYCOLL_LOCAL_RANKS": ",".join(map(str, locals_)),
    }


# What a process has of its own host and user. Of a job with several hosts the ranks have this, and
# else only what the launcher names, so that they have the same on all hosts.
_PERSONAL = ("HOME", "USER", "LOGNAME", "SHELL", "TMPDIR")
# In an allocation of Slurm also what that has on this host, and which allocation it is.
_ALLOCATED = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
_ALLOCATED_PREFIXES = ("SLURM_JOB_", "SLURM_SUBMIT_", "SLURM_CLUSTER_")
_SENT = ("PATH", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "LANG", "TZ", "PYTHONUNBUFFERED")
_SENT_PREFIXES = ("LC_", "OMP_", "PYCOLL_")


def personal(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that each host has for itself."""
    import pwd  # only for jobs of several hosts

    found = {}
    with contextlib.suppress(KeyError):  # a user whom the system does not know
        user = pwd.getpwuid(os.getuid())
        found = {
            "HOME": user.pw_dir,
            "USER": user.pw_name,
            "LOGNAME": user.pw_name,
            "SHELL": user.pw_shell,
        }
    names = set(_PERSONAL)
    if "SLURM_JOB_ID" in environ:
        names.update(_ALLOCATED, (n for n in environ if n.startswith(_ALLOCATED_PREFIXES)))
    return found | {name: environ[name] for name in names if name in environ}


def sent(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that ranks on all hosts are given as they are here."""
    return {
        name: value
        for name, value in environ.items()
        if name in _SENT or name.startswith(_SENT_PREFIXES)
    }


def encrypts(environ: Mapping[str, str]) -> bool:
    """Whether PYCOLL_ENCRYPT asks for encryption.

    Raises:
        BootstrapError: it is neither 1 nor 0.
    """
    text = environ.get("PYCOLL_ENCRYPT", "")
    if text not in ("", "0", "1"):
        raise BootstrapError(f"PYCOLL_ENCRYPT is {text!r}, but must be 1 or 0")
    return text == "1"


UNENCRYPTED = (
    "connections between hosts are authenticated, not encrypted; --encrypt (or PYCOLL_ENCRYPT=1) "
    "encrypts them, PYCOLL_ENCRYPT=0 says that you know"
)


def knows_unencrypted(environ: Mapping[str, str]) -> bool:
    """Whether the user has said that nothing is encrypted; not where it is said for a rank."""
    return environ.get("PYCOLL_ENCRYPT") == "0" and "PYCOLL_JOB" not in environ


def warn_after(environ: Mapping[str, str]) -> float:
    """Seconds after which the launcher says who waits for whom; 0: never.

    Raises:
        Error: PYCOLL_WARN_AFTER is no number of seconds.
    """
    seconds = _seconds(environ, "PYCOLL_WARN_AFTER", 30.0, "seconds (0: never)")
    return 0.0 if seconds == math.inf else seconds


GRACE_S = 2.0
"""How long ranks have to end by themselves, and after SIGTERM, unless something else is said."""


def grace(environ: Mapping[str, str]) -> float:
    """Seconds that ranks have to end by themselves, and after SIGTERM; infinity: any time.

    Raises:
        Error: PYCOLL_GRACE is no number of seconds.
    """
    return _seconds(environ, "PYCOLL_GRACE", GRACE_S, "seconds from 0 up")


def default_op_timeout(environ: Mapping[str, str]) -> float:
    """Seconds that an operation may take which says nothing else; infinity: any time.

    Raises:
        Error: PYCOLL_OP_TIMEOUT is no number of seconds.
    """
    return _seconds(environ, "PYCOLL_OP_TIMEOUT", math.inf, "seconds from 0 up")


def _seconds(environ: Mapping[str, str], name: str, default: float, what: str) -> float:
    text = environ.get(name)
    if not text:
        return default
    with contextlib.suppress(ValueError):
        if (seconds := float(text)) >= 0:
            return seconds
    raise Error(f"{name} is {text!r}, but must be {what}")


def usable_cores() -> int:
    """Return how many cores this process may use: of its affinity and its cgroup's quota the less.

    At least 1; 2.5 cores of a quota count as 2.
    """
    return max(1, int(min(len(os.sched_getaffinity(0)), _cgroup_quota())))


def _cgroup_quota() -> float:
    quota = float("inf")
    for line in _text("/proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            root = "/sys/fs/cgroup"
        elif "cpu" in controllers.split(","):
            root = "/sys/fs/cgroup/cpu"
        else:
            continue
        # A group's quota binds those below it too. In a container the path may not exist: there the
        # root is the container's own group.
        folder = os.path.join(root, path.strip("/"))
        while folder.startswith(root):
            # Version 2: "QUOTA PERIOD" in one file, version 1: in two; "max" or -1 is no quota.
            limit = _text(f"{folder}/cpu.max").split()
            if not limit:
                limit = [_text(f"{folder}/cpu.cfs_{what}_us") for what in ("quota", "period")]
            with contextlib.suppress(ValueError, ZeroDivisionError):
                cores = float(limit[0]) / float(limit[1])
                if cores > 0:
                    quota = min(quota, cores)
            folder = os.path.dirname(folder)
    return quota


def cpus_of_cores() -> list[set[int]]:
    """The CPUs this process may use, those of one core (its hyperthreads) together."""
    cores = defaultdict(set)
    for cpu in sorted(os.sched_getaffinity(0)):
        siblings = _text(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores[siblings or str(cpu)].add(cpu)
    return list(cores.values())


def _text(path: str) -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""


def free_port() -> int:
    """Return a port at which nobody listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def version() -> str:
    """The version of the package that is installed."""
    from importlib import metadata  # not at the top: it would take a quarter of the start-up

    try:
        return metadata.version("pycollective")
    except metadata.PackageNotFoundError:
        return "0+unknown"
