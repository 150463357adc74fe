"""Joining a job and leaving it: `init`, `finalize`, and what the environment says."""

from __future__ import annotations

import atexit
import contextlib
import errno
import math
import os
import sys
import threading
import time

# Not when an exception is shown: this import evaluates a string, after which Python forgets that
# it must end with the status of an interrupt.
import traceback
import warnings
from collections.abc import Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from pycoll import _transports as transports
from pycoll._calls.arguments import check_timeout
from pycoll._calls.group import Group
from pycoll._communicator.communicator import Communicator, World
from pycoll._rendezvous.client import Client
from pycoll._rendezvous.wire import already_joined
from pycoll._runtime.engine import Engine
from pycoll._runtime.membership import NoVerdict
from pycoll._selection import agreed
from pycoll._support.environment import encrypts
from pycoll._support.public_edge import edge
from pycoll._transports import network
from pycoll._transports.base import Transport
from pycoll._transports.shm import open_host
from pycoll.errors import BootstrapError, Error, PeerFailed, TransportError

if TYPE_CHECKING:
    from pycoll._runtime.host_memory import SharedMemory
    from pycoll._transports.core import CoreTransport

WORLD_IDENT = 1
CLOSE_TIMEOUT_S = 5.0
FINALIZED = "pycoll.finalize() was called: this process cannot communicate any more"
LEFT_THE_BLOCK = (
    "the `with pycoll.init()` block has ended: this process cannot communicate any more. Put all "
    "that does into one block, or write comm = pycoll.init()"
)
FORKED = (
    "this process was forked from a rank of a pycoll job and cannot communicate: "
    "let the parent communicate, or start the process with the spawn method"
)


class JobPlacement(NamedTuple):
    """This process's place in its job, from the environment."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node: int = 0
    rendezvous: str = ""
    key: bytes = b""
    local_ranks: tuple[int, ...] = (0,)
    addresses: Mapping[int, str] = MappingProxyType({})
    link: str = ""
    memory: str = ""


class _Session:
    """The one job a process can be in."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.engine: Engine | None = None
        self.comm: Communicator | None = None
        self.options: tuple[object, ...] = ()
        self.ended = ""
        self.raised = False  # an exception ends the process
        self.last_words: Client | None = None  # to the launcher, after an exception ended a `with`


_session = _Session()


class WorldCommunicator(Communicator):
    """The communicator of all ranks; closing it is leaving the job."""

    def close(self) -> None:
        """Leave the job: the same as `pycoll.finalize()`."""
        if not self._closed:
            self._shut()
            finalize()

    def __exit__(self, *exc_info: object) -> None:
        """Leave the job; of an exception that nobody catches the others still hear."""
        self._shut()
        raised = exc_info[0] is not None
        _leave(LEFT_THE_BLOCK, compare=not raised, keep_control=raised)


@edge
def init(
    timeout: float = 300.0, op_timeout: float | None = None, transport: str | None = None
) -> Communicator:
    """Join the job this process was started in and return its world communicator.

    A process that no launcher started is a job of its own, of size 1. A second call returns the
    same communicator.

    Args:
        timeout: seconds for the whole job to meet; after 10 it prints who is missing.
        op_timeout: default deadline of every operation, seconds; None: that of `pycoll-run`,
            or none.
        transport: "auto", "shm", "rdma", "tcp" or "zmq"; None: that of `pycoll-run`. Automatic is
            shared memory between ranks on one host and RDMA between hosts, where they can be used,
            else tcp; in an encrypted job (`pycoll-run --encrypt`) zmq.

    Raises:
        BootstrapError: the job could not meet, or the launcher's variables make no sense.
        TransportError: the transport cannot be used: which, why, what to do.
        ValueError: called again with other options.
        Error: called after `finalize`, or in a forked process.
    """
    options = (timeout, op_timeout, transport)
    with _session.lock:
        if _session.ended:
            raise Error(_session.ended)
        if _session.comm is not None:
            default = (300.0, None, None)
            if options not in (default, _session.options):
                raise ValueError(
                    f"pycoll.init was called before with {_describe(_session.options)}; "
                    f"a second call cannot change that to {_describe(options)}"
                )
            return _session.comm
        check_timeout(timeout, "timeout")
        deadline = _op_timeout(op_timeout)
        chosen = transport or os.environ.get("PYCOLL_TRANSPORT") or "auto"
        if chosen != "auto":
            if encrypts(os.environ) and (reason := network.why_not_encrypted(chosen)):
                raise TransportError(reason)
            transports.check(chosen)
        began = time.monotonic()
        environ = _environment(timeout)
        place = read_place(environ)
        timeout = max(0.0, timeout - (time.monotonic() - began))
        _share_arrays(environ)
        try:
            engine = _join(place, timeout, chosen, deadline)
        except OSError as exc:
            raise _cannot_join(place.rank, exc) from exc
        world = World(engine, place.local_rank, place.local_size, place.node, deadline)
        with engine.locked():
            group = Group(engine, WORLD_IDENT, range(place.size))
        _session.engine = engine
        _session.options = options
        _session.comm = WorldCommunicator(world, group)
        if (entering := sys.modules.get("pycoll._launcher.entering")) is not None:
            entering.outlast()  # registered first, it comes last
        _install_hooks()
        engine.interrupts.install()
        return _session.comm


def _share_arrays(environ: Mapping[str, str]) -> None:
    text = environ.get("PYCOLL_SHARE_ARRAYS", "")
    if text not in ("", "0"):
        from pycoll._runtime import shared_arrays  # imports NumPy

        try:
            shared_arrays.from_environment(text)
        except ValueError as exc:
            raise BootstrapError(str(exc)) from None


def finalize() -> None:
    """Leave the job. Not collective; may be called again.

    What was accepted for sending is delivered, for at most 5 s. The end of the interpreter does
    the same.

    Raises:
        MismatchError: another rank has made another call than this one, as can be seen by now, and
            no call after it has told so.
    """
    _leave(FINALIZED, compare=True)


def _leave(why: str, compare: bool, keep_control: bool = False) -> None:
    """Leave the job.

    Args:
        why: what later calls say.
        compare: raise that other ranks have made other calls.
        keep_control: the launcher may still hear of the exception because of which this leaves.
    """
    with _session.lock:
        engine, _session.engine = _session.engine, None
        _session.ended = _session.ended or why
        last_words, _session.last_words = _session.last_words, None
        if engine is not None and keep_control:
            _session.last_words = engine.control
    if last_words is not None:
        last_words.close(1.0)
    if engine is not None:
        if engine.control is not None and (text := _without_place()):
            engine.control.post("note", text=text)
        error = engine.close(why, CLOSE_TIMEOUT_S, keep_control)
        engine.interrupts.uninstall()
        if error is not None and compare:
            _session.last_words = engine.control
            raise error
        if error is not None and not keep_control and engine.control is not None:
            engine.control.close(1.0)


def _without_place() -> str:
    """Say which arrays could not lie in shared memory; "": none."""
    try:
        from pycoll._transports._core import shared_use
    except ImportError:
        return ""
    *_, arrays, nbytes = shared_use()
    if not arrays:
        return ""
    text = f"{arrays} arrays, {nbytes} bytes in all, found no place in shared memory"
    return f"{text} and were in ordinary memory"


_NEEDED = ("PYCOLL_RANK", "PYCOLL_SIZE", "PYCOLL_RENDEZVOUS", "PYCOLL_KEY")


def _environment(timeout: float) -> Mapping[str, str]:
    """The environment, with what pycoll-run would have set if something else started this process.

    Raises:
        BootstrapError: the variables of who did make no sense, or the job could not meet.
    """
    environ: Mapping[str, str] = os.environ
    if environ.get("PYCOLL_JOB"):  # a rank of pycoll-run
        return environ
    if parent := environ.get("PYCOLL_PARENT"):
        rank, pid = map(int, parent.split(":"))
        raise BootstrapError(already_joined(rank, pid, os.getpid()))
    from pycoll._launcher import exchange

    found: dict[str, str] = {}
    given = [name for name in _NEEDED if environ.get(name)]
    if len(given) == len(_NEEDED):
        place, key = read_place(environ), environ["PYCOLL_KEY"]
        found = exchange.join_at(place.rendezvous, key, place.rank, place.size, timeout)
    elif given in ([], ["PYCOLL_KEY"]):
        launched = exchange.find(environ)
        if launched is not None:
            found = exchange.join(environ, launched, timeout)
    ours = {name: value for name, value in found.items() if name.startswith("PYCOLL_")}
    return {**environ, **ours}


def read_place(environ: Mapping[str, str]) -> JobPlacement:
    """Return what the launcher's variables say; without any, a job of size 1.

    Raises:
        BootstrapError: they are incomplete or make no sense.
    """
    given = [name for name in _NEEDED if environ.get(name)]
    if not given:
        return JobPlacement()
    missing = [name for name in _NEEDED if name not in given]
    if missing:
        raise BootstrapError(
            f"{', '.join(given)} set, but not {', '.join(missing)}: "
            "start this program with pycoll-run, or unset them to run it alone"
        )
    rank, size = _number(environ, "PYCOLL_RANK"), _number(environ, "PYCOLL_SIZE")
    local_rank = _number(environ, "PYCOLL_LOCAL_RANK", rank)
    local_size = _number(environ, "PYCOLL_LOCAL_SIZE", size)
    node = _number(environ, "PYCOLL_NODE", 0)
    if not 0 <= rank < size:
        raise BootstrapError(f"PYCOLL_RANK is {rank}, but PYCOLL_SIZE is {size}")
    if not 0 <= local_rank < local_size <= size:
        raise BootstrapError(
            f"PYCOLL_LOCAL_RANK is {local_rank}, PYCOLL_LOCAL_SIZE {local_size}, "
            f"PYCOLL_SIZE {size}: these do not go together"
        )
    try:
        key = bytes.fromhex(environ["PYCOLL_KEY"])
    except ValueError:
        raise BootstrapError("PYCOLL_KEY is not a hexadecimal key") from None
    first = rank - local_rank
    local_ranks = _local_ranks(environ) or tuple(range(first, first + local_size))
    if len(local_ranks) != local_size or local_ranks[local_rank] != rank:
        raise BootstrapError(
            f"PYCOLL_LOCAL_RANKS is {environ['PYCOLL_LOCAL_RANKS']!r}, PYCOLL_RANK {rank}, "
            f"PYCOLL_LOCAL_RANK {local_rank}, PYCOLL_LOCAL_SIZE {local_size}: "
            "these do not go together"
        )
    rendezvous = environ["PYCOLL_RENDEZVOUS"]
    addresses = _addresses(environ)
    return JobPlacement(
        rank,
        size,
        local_rank,
        local_size,
        node,
        rendezvous,
        key,
        local_ranks,
        addresses,
        link=environ.get("PYCOLL_LINK", ""),
        memory=environ.get("PYCOLL_SHM", ""),
    )


def _addresses(environ: Mapping[str, str]) -> dict[int, str]:
    text = environ.get("PYCOLL_ADDRESSES", "")
    try:
        pairs = (pair.split("=") for pair in text.split(",") if pair)
        return {int(node): address for node, address in pairs}
    except ValueError:
        raise BootstrapError(f"PYCOLL_ADDRESSES is {text!r}, not as 0=10.0.0.1,1=...") from None


def _local_ranks(environ: Mapping[str, str]) -> tuple[int, ...]:
    text = environ.get("PYCOLL_LOCAL_RANKS", "")
    try:
        return tuple(map(int, text.split(","))) if text else ()
    except ValueError:
        raise BootstrapError(f"PYCOLL_LOCAL_RANKS is {text!r}, not ranks, as 0,1,2") from None


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name, "")
    if not text and default is not None:
        return default
    try:
        number = int(text)
    except ValueError:
        number = -1
    if number < 0:
        raise BootstrapError(f"{name} is {text!r}, which is not a number from 0 up")
    return number


def _op_timeout(op_timeout: float | None) -> float:
    if op_timeout is not None:
        return check_timeout(op_timeout, "op_timeout")
    text = os.environ.get("PYCOLL_OP_TIMEOUT")
    if not text:
        return math.inf
    try:
        return check_timeout(float(text), "PYCOLL_OP_TIMEOUT")
    except ValueError as exc:
        raise BootstrapError(f"PYCOLL_OP_TIMEOUT is {text!r}: {exc}") from exc


def _join(place: JobPlacement, timeout: float, chosen: str, op_timeout: float) -> Engine:
    """Meet the others and return the engine that talks to them."""
    if not place.rendezvous:
        agreed.settle(agreed.agree([{"node": place.node, **agreed.said(os.environ, place.rank)}]))
        return _alone(place.rank, op_timeout)
    try:
        control = Client(
            place.rendezvous,
            place.key,
            place.rank,
            place.size,
            link=place.link,
        )
    except ValueError as exc:
        raise BootstrapError(f"PYCOLL_KEY cannot be the key of a job: {exc}") from exc
    opened: list[Transport] = []
    try:
        meeting = _Meeting(place, chosen, control, timeout, opened)
        shared_memory = meeting.shared_memory or meeting.no_shared_memory
        engine = Engine(meeting.core, place.size, control, op_timeout, shared_memory)
    except BaseException:
        for transport in opened:
            transport.close(0.0)
        control.close(1.0)
        raise
    engine.hosts = meeting.hosts
    engine.has_helpers = "PYCOLL_JOB" not in os.environ
    if engine.has_helpers:  # processes that this one starts have what its launcher has set, too
        os.environ["PYCOLL_PARENT"] = f"{place.rank}:{os.getpid()}"
    meeting.start(engine)
    return engine


def _alone(rank: int, op_timeout: float) -> Engine:
    """Return the engine of a job of one rank, whom no launcher has started."""
    from pycoll._transports.core import CoreTransport

    core = CoreTransport(rank, 1)
    engine = Engine(core, 1, None, op_timeout)
    core.start([{}], engine)
    return engine


def _cannot_join(rank: int, exc: OSError) -> BootstrapError:
    """Return the error for what the system does not give this process."""
    text = f"rank {rank} cannot join the job: {exc.strerror or exc}"
    if exc.errno in (errno.EMFILE, errno.ENFILE):
        text += ": close what is not needed, or allow more (ulimit -n)"
    return BootstrapError(text)


class _Meeting:
    """The ranks tell each other how they can be reached, and all decide alike.

    Args:
        place: this rank's.
        chosen: the transport that the user wants, "auto" for the best.
        control: not joined yet.
        timeout: seconds for the job to meet.
        opened: gets every transport that is opened here.

    Attributes:
        shared_memory: this host's; None: `no_shared_memory` says why not.
        core: moves all messages.
        hosts: by rank the number of its host.
    """

    def __init__(
        self,
        place: JobPlacement,
        chosen: str,
        control: Client,
        timeout: float,
        opened: list[Transport],
    ) -> None:
        self.shared_memory: SharedMemory | None = None
        self.no_shared_memory = "there is one rank"
        doorbell = -1
        self._chosen = chosen
        self._rank = place.rank
        self._rdma: Transport | None = None
        self._net: Transport | None = None
        self._net_addresses: list[dict[str, Any]] = []
        encrypt = encrypts(os.environ)
        own: dict[str, Any] = {"node": place.node, **agreed.said(os.environ, place.rank)}
        if place.size > 1:
            own |= network.said(chosen)
            memory = _open_shared_memory(place, chosen)
            if isinstance(memory, str):
                self.no_shared_memory = memory
            else:
                self.shared_memory, doorbell = memory
                own["shm"] = {}
            if not encrypt:
                self._rdma = _open_rdma(place, chosen)
            if self._rdma is not None:
                opened.append(self._rdma)
                own["rdma"] = self._rdma.address()
        self._infos: Sequence[dict[str, Any]] = control.join(own, timeout)
        agreed.settle(agreed.agree(self._infos))
        self.hosts = nodes = tuple(info["node"] for info in self._infos)
        sharing = ["shm" in info for info in self._infos]
        needs_network = self._needs_network(all(sharing))
        self._settle_shared_memory(place, sharing)
        name = network.choose(self._infos, encrypt) if needs_network else ""
        if needs_network and name == network.ZMQ:
            self._net = network.open_zmq(place.rank, place.key, place.addresses, encrypt)
            opened.append(self._net)
        self.core = self._open_core(place, needs_network and name == network.TCP, doorbell)
        if needs_network and self._net is None:
            self._net = self.core
        opened.append(self.core)
        if self._net is not None:
            said = control.exchange(self._net.address(), timeout)
            self._net_addresses = [
                _seen_from_here(address, place.addresses.get(node))
                for address, node in zip(said, nodes, strict=True)
            ]
            # zmq encrypts between real hosts also when nobody has asked for that.
            if place.rank == 0 and place.addresses and name != network.ZMQ:
                self._tell_unencrypted(control)

    def _settle_shared_memory(self, place: JobPlacement, sharing: Sequence[bool]) -> None:
        """Give up this host's memory if not all its ranks use it, or there is one only."""
        if self.shared_memory is None:
            return
        peers = [rank for rank, node in enumerate(self.hosts) if node == place.node]
        without = next((rank for rank in peers if not sharing[rank]), None)
        if without is not None:
            self.no_shared_memory = f"rank {without} cannot use it"
            self.shared_memory = None
        elif len(peers) == 1:
            self.no_shared_memory = "there is one rank on this host"
            self.shared_memory = None

    def _open_core(self, place: JobPlacement, listens: bool, doorbell: int) -> CoreTransport:
        """Open the core's engine.

        Args:
            place: this rank's.
            listens: the core is to reach others by tcp.
            doorbell: this rank's.
        """
        from pycoll._transports.core import CoreTransport, Memory, Network

        memory, net, shared = None, None, self.shared_memory
        if shared is not None:
            memory = Memory(shared.host, doorbell, shared.ranks, shared.single_copy)
        if listens:
            net = Network(place.key, network.listening_at(place.addresses), _lanes())
        outside = {}
        for rank in range(place.size):
            transport = self._outside(rank)
            if transport is not None:
                outside[rank] = transport
        return CoreTransport(place.rank, place.size, memory, net, outside)

    def _outside(self, rank: int) -> Transport | None:
        """Return the transport to a rank that the core does not reach by itself."""
        shared = self.shared_memory
        if rank == self._rank or (shared is not None and rank in shared.ranks):
            return None
        return self._network_to(rank)

    def _tell_unencrypted(self, control: Client) -> None:
        """Have the launcher tell the user, if the network connects hosts."""
        if "PYCOLL_JOB" in os.environ and self._is_between_hosts():
            control.post("unencrypted")

    def _is_between_hosts(self) -> bool:
        """Whether the network connects ranks of different hosts, since RDMA does not."""
        networks = {self._network(rank) for rank in range(len(self._infos))}
        return len(set(self.hosts)) > 1 and (None in networks or len(networks) > 1)

    def _needs_network(self, all_share: bool) -> bool:
        """Whether there are two ranks in the job that neither shared memory nor RDMA connects.

        Raises:
            TransportError: the user wants RDMA alone.
        """
        networks = [self._network(rank) for rank in range(len(self._infos))]
        if self._chosen == "rdma" and len(networks) > 1:
            if None in networks or len(set(networks)) > 1:
                raise TransportError(_apart(networks))
            return False
        return self._is_between_hosts() or (not all_share and len(networks) > 1)

    def _network(self, rank: int) -> str | None:
        """Return in which network a rank can be reached by RDMA."""
        network: str | None = self._infos[rank].get("rdma", {}).get("network")
        return network

    def _network_to(self, rank: int) -> Transport | None:
        """Return the transport to a rank that shares no memory with this one."""
        elsewhere = self._chosen == "rdma" or self.hosts[rank] != self.hosts[self._rank]
        if self._rdma is not None and elsewhere:
            own = self._network(self._rank)
            if own == self._network(rank):
                return self._rdma
        return self._net

    def start(self, engine: Engine) -> None:
        """Start what was opened."""
        self.core.start(self._net_addresses, engine)
        outside = self.core.outside
        if self._rdma is not None:
            outside.start(self._rdma, [info.get("rdma", {}) for info in self._infos], engine)
        if self._net is not None and self._net is not self.core:
            outside.start(self._net, self._net_addresses, engine)
        engine.admit()


def _lanes() -> int:
    table = agreed.current().table
    return network.lanes(os.environ, 1 if table is None else table.lanes)


def _open_shared_memory(place: JobPlacement, chosen: str) -> tuple[SharedMemory, int] | str:
    """Open the shared memory of this host; returns it and this rank's doorbell, or why not.

    Raises:
        TransportError: the user wants nothing else.
    """
    if chosen in (*network.NETWORKS, "rdma"):
        return f"the transport is {chosen}"
    found = open_host({"PYCOLL_SHM": place.memory}, place.local_rank, place.local_size)
    if chosen == "shm":
        if isinstance(found, str):
            raise TransportError(f"shm: {found}; use --transport auto")
        if place.local_size < place.size:
            raise TransportError(
                f"shm: {place.size - place.local_size} ranks are on other hosts; "
                "use --transport auto, which uses the network between hosts"
            )
    if isinstance(found, str):
        return found
    from pycoll._runtime.host_memory import SharedMemory

    ranks = place.local_ranks
    host, doorbell = found
    single_copy = os.environ.get("PYCOLL_SINGLE_COPY") != "0"
    return SharedMemory(host, ranks, single_copy), doorbell


def _seen_from_here(said: dict[str, Any], host: str | None) -> dict[str, Any]:
    """Where a rank listens that has said so, when this host reaches its host at `host`."""
    if host is None:
        return said
    port = said["endpoint"].rpartition(":")[2]
    return {**said, "endpoint": f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"}


def _open_rdma(place: JobPlacement, chosen: str) -> Transport | None:
    """Open the RDMA device of this host, where it may be of use.

    Raises:
        TransportError: the user wants nothing else.
    """
    if chosen != "rdma" and (chosen != "auto" or place.local_size == place.size):
        return None
    from pycoll._transports.rdma_devices import find, ports

    if chosen == "auto" and not ports():
        return None
    found = find(os.environ)
    if not isinstance(found, str):
        from pycoll._transports.rdma import open_rdma

        opened = open_rdma(place.rank, place.size, found)
        if not isinstance(opened, str):
            return opened
        found = opened
    if chosen == "rdma":
        raise TransportError(f"rdma: {found}; use --transport auto")
    if place.local_rank == 0:
        text = f"rdma: {found}. The hosts of this job communicate by TCP."
        warnings.warn(text, RuntimeWarning, stacklevel=5)
    return None


def _apart(networks: Sequence[str | None]) -> str:
    """Return why RDMA does not connect all ranks."""
    other = next(rank for rank, network in enumerate(networks) if network != networks[0])
    return (
        f"rdma: rank 0 is in the network {networks[0]}, but rank {other} is in {networks[other]}; "
        "use --transport auto, or name other devices in PYCOLL_RDMA_DEVICE"
    )


def _describe(options: tuple[object, ...]) -> str:
    timeout, op_timeout, transport = options
    return f"timeout={timeout}, op_timeout={op_timeout}, transport={transport!r}"


# --- the end of the process ------------------------------------------------------------------


def _install_hooks() -> None:
    atexit.register(_at_exit, os.getpid())
    os.register_at_fork(after_in_child=_after_fork)
    previous = sys.excepthook

    def excepthook(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        text = format_error(error)
        _session.raised = True
        _report_exception(error, text)
        if previous is not sys.__excepthook__:
            previous(kind, error, trace)
        elif sys.stderr is not None:
            sys.stderr.write(text)  # at once, so that those of several ranks do not mix
            sys.stderr.flush()

    sys.excepthook = excepthook


def format_error(error: BaseException) -> str:
    """Return the traceback to print: for errors of pycoll's, without pycoll's own frames.

    Of PeerFailed only the first line is shown: the rest is the traceback of another rank, which
    prints it itself.
    """
    formatted = traceback.TracebackException.from_exception(error)
    if isinstance(error, Error | KeyboardInterrupt):
        outside = [f for f in formatted.stack if not f.filename.startswith(_HERE)]
        if outside:
            formatted.stack = traceback.StackSummary.from_list(outside)
    text = "".join(formatted.format())
    if isinstance(error, PeerFailed):
        head, _, rest = text.partition(str(error))
        first = str(error).partition("\n")[0]
        text = head + first + rest
    return text


_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep


def _at_exit(pid: int) -> None:
    if os.getpid() != pid:
        return
    try:
        _leave(FINALIZED, compare=not _session.raised)
    except Error as error:
        # Python's status is settled by now: the launcher is told, and makes it the job's.
        sys.excepthook(type(error), error.with_traceback(None), None)
        finalize()  # when these were the last words


def _after_fork() -> None:
    _session.lock = threading.Lock()
    _session.ended = FORKED
    if _session.engine is not None:
        _session.engine.closed = FORKED  # the compiled core has found out by itself


def _report_exception(error: BaseException, text: str) -> None:
    """Tell the launcher, and so the other ranks, that this one raised."""
    engine, control = _session.engine, _session.last_words
    if engine is not None and engine.closed is None:
        control = engine.control
    if control is None:
        return
    with contextlib.suppress(Exception), engine.locked() if engine else contextlib.nullcontext():
        control.post(
            "raised",
            error=type(error).__name__,
            text=text,
            peer_failed=isinstance(error, PeerFailed | NoVerdict),
        )
