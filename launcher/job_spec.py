"""How a job runs, and what its hosts are to run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from pycoll._launcher.host import NamedHost
from pycoll._support.environment import GRACE_S

if TYPE_CHECKING:
    from pycoll._launcher.agent_listener import AgentCalls


class Options(NamedTuple):
    """How a job runs: the options of `pycoll-run`, checked already.

    Attributes:
        size: number of ranks.
        transport: name of the transport, or "auto".
        encrypt: what travels outside shared memory is encrypted.
        op_timeout_s: default deadline of every operation (None: none).
        timeout_s: longest time for the whole job (None: unlimited).
        grace_s: how long ranks may go on before SIGTERM, and then before SIGKILL.
        tag_output: put the rank before each line of output (None: on a terminal).
        log_dir: folder for one file a rank with what it prints.
        bind: "core" keeps each rank on a core of its own, "none" on none.
        emulate_hosts: number of hosts to pretend (None: the one this is).
        hosts: the job's hosts, and how their agents are started; none: this one.
        nodes: by rank the index of its host in `hosts`.
        calls: how the agents call that nothing here starts; None: there are none.
        interface: other hosts use only the addresses of this interface ("": all).
        address: they reach this host at this one ("": those that they find).
        checks: no ranks are started, but the ways between the hosts are measured.
        survive: a rank that is lost does not end the job, once all have met.
        passes_on: SIGUSR1 and SIGUSR2 that come here are for the ranks.
        ends_deadlocks: end the job when ranks wait for each other for ever, as is certain.
        verbose: tell on standard error what happens.
        attempt: how often it was begun before.
        trace_records: how many calls of each rank are recorded; 0: none.
        exports: variables for the ranks' environment.
    """

    size: int
    transport: str = "auto"
    encrypt: bool = False
    op_timeout_s: float | None = None
    timeout_s: float | None = None
    grace_s: float = GRACE_S
    tag_output: bool | None = None
    log_dir: str | None = None
    bind: str = "none"
    emulate_hosts: int | None = None
    hosts: Sequence[NamedHost] = ()
    nodes: Sequence[int] = ()
    calls: AgentCalls | None = None
    interface: str = ""
    address: str = ""
    checks: bool = False
    survive: bool = False
    passes_on: bool = False
    ends_deadlocks: bool = False
    verbose: bool = False
    attempt: int = 0
    trace_records: int = 0
    exports: Mapping[str, str] = MappingProxyType({})


class JobSpec(NamedTuple):
    """What the hosts of a job are to run.

    Attributes:
        job: the job's id.
        key: its secret.
        options: how it runs.
        argv: the program of every rank and its arguments.
        pass_fds, stdin: see `host.RankProgram`.
        socket: path of the job's own (`job_socket`); "": it has none.
    """

    job: str
    key: bytes
    options: Options
    argv: Sequence[str]
    pass_fds: Sequence[int]
    stdin: int | IO[Any] | None
    socket: str = ""
