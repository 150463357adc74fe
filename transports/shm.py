"""Shared memory: the transport between the processes of one host.

All of them map one memory file, which the launcher has made. For each ordered pair of ranks it
holds a ring of small messages, and for each rank a heap for payloads that do not fit into rings.
Large payloads are copied once, from the sender's memory to the receiver's, where the kernel lets
one process read another's (process_vm_readv); both sides copy, in pieces. Where it does not, they
go through the heap in segments. All this is in the compiled core, `_core/channel.h`; here it
becomes a `Transport`.

A rank that is about to sleep says so in the memory; who has something for it then rings its
doorbell, an eventfd. Ranks that are awake find what comes without any system call.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from pycoll.errors import PeerFailed
from pycoll.transports.base import (
    CREDIT,
    EAGER_LIMIT,
    MESSAGE_COST,
    Arrival,
    Handler,
    Operation,
    Parts,
    Transfer,
    Transport,
    Withdrawn,
)

if TYPE_CHECKING:
    from pycoll.transports._core import Channel, Host

_WITHDRAWN, _LEFT = -1, -2


def missing_core() -> str | None:
    """Return why the compiled core cannot be used, or None if it can."""
    try:
        from pycoll.transports._core import Channel  # noqa: F401
    except ImportError as exc:
        package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        source = os.path.dirname(package)
        if os.path.exists(os.path.join(source, "pyproject.toml")):
            return (
                f"the compiled core is missing: this Python imports pycoll from its source folder, "
                f"{source}; start in another folder, or install there (pip install -e .)"
            )
        return f"the compiled core is missing: {exc}; `pip install -v .` says what its build lacks"
    return None


def open_host(
    environ: Mapping[str, str], local_rank: int, local_size: int
) -> tuple[Host, int] | str:
    """Map the memory of this host that the launcher hands on, once in a process.

    Args:
        environ: its variable PYCOLL_SHM is
            `<memory file>:<its inode>:<doorbells, by commas>:<cores>`, or `-:<reason>`.
        local_rank: this process's rank on the host.
        local_size: number of ranks there.

    Returns:
        The memory and the descriptor of this rank's doorbell, or the reason why there is none.
    """
    reason = missing_core()
    if reason is not None:
        return reason
    from pycoll.transports._core import Host

    handed = _handed_on(environ, local_rank, local_size)
    if isinstance(handed, str):
        return handed
    try:
        for descriptor in (handed.descriptor, *handed.doorbells):
            os.set_inheritable(descriptor, False)
        host = Host(handed.descriptor, local_rank, handed.doorbells, handed.cores)
        return host, handed.doorbells[local_rank]
    except OSError as exc:
        return f"the memory shared with the other ranks cannot be used: {exc}"


class Handed(NamedTuple):
    """The memory of this host, as the launcher hands it on.

    Attributes:
        descriptor: of the memory file.
        rank, size: this process's rank on the host, and their number.
        doorbells: a descriptor for each rank.
        cores: how many cores they may use together.
    """

    descriptor: int
    rank: int
    size: int
    doorbells: list[int]
    cores: int


def handed_on(environ: Mapping[str, str]) -> Handed | None:
    """Return what pycoll-run has handed on to a rank, before it joins; None: nothing."""
    try:
        place = int(environ["PYCOLL_LOCAL_RANK"]), int(environ["PYCOLL_LOCAL_SIZE"])
    except (KeyError, ValueError):
        return None
    handed = _handed_on(environ, *place)
    return handed if isinstance(handed, Handed) else None


def _handed_on(environ: Mapping[str, str], local_rank: int, local_size: int) -> Handed | str:
    text = environ.get("PYCOLL_SHM", "")
    if not text:
        return "there is no memory shared with the other ranks (PYCOLL_SHM is not set)"
    first, _, rest = text.partition(":")
    if first == "-":
        return rest
    try:
        inode, numbers, cores = rest.split(":")
        memory, doorbells = int(first), [int(number) for number in numbers.split(",")]
        handed = Handed(memory, local_rank, local_size, doorbells, int(cores))
    except ValueError:
        return f"PYCOLL_SHM is {text!r}, which makes no sense"
    if len(doorbells) != local_size or not 0 <= local_rank < local_size:
        return (
            f"PYCOLL_SHM has doorbells for {len(doorbells)} ranks, but this is rank "
            f"{local_rank} of {local_size} on its host"
        )
    if not _is_there(memory, inode, doorbells):
        return (
            "the descriptors of the memory shared with the other ranks (PYCOLL_SHM) were "
            "closed on the way from pycoll-run; what runs between them must leave them open"
        )
    return handed


def _is_there(memory: int, inode: str, doorbells: list[int]) -> bool:
    """Whether the descriptors are open, and the memory is the launcher's."""
    try:
        for descriptor in doorbells:
            os.fstat(descriptor)
        return str(os.fstat(memory).st_ino) == inode
    except OSError:
        return False


class _Send(Transfer):
    """A message that was offered."""

    __slots__ = ("id", "peer", "transport")

    def __init__(self, transport: ShmTransport, peer: int, number: int) -> None:
        super().__init__()
        self.transport = transport
        self.peer = peer
        self.id = number

    @property
    def committed(self) -> bool:
        return not self.done and not self.transport.channel.stop(self.id)

    def awaited(self) -> Collection[int]:
        return (self.peer,)

    def cancel(self) -> None:
        super().cancel()
        self.transport.take_back(self.id)


class _Receive(Transfer):
    """A message that was accepted and is not here yet."""

    __slots__ = ("handle", "peer", "transport")

    def __init__(self, transport: ShmTransport, peer: int, handle: int) -> None:
        super().__init__()
        self.transport = transport
        self.peer = peer
        self.handle = handle

    def cancel(self) -> None:
        super().cancel()
        self.transport.give_up(self.handle)

    def redirect(self, into: memoryview) -> None:
        if self.handle:
            self.transport.channel.redirect(self.handle, into)


class _Buffered(Arrival):
    """A message whose payload is here: in memory of ours, or in a block of the sender's heap."""

    __slots__ = ("_block", "_transport")

    def __init__(
        self,
        transport: ShmTransport,
        peer: int,
        header: bytes,
        payload: memoryview,
        block: tuple[int, int],
    ) -> None:
        super().__init__(peer, header, len(payload), payload)
        self._transport = transport
        self._block = block

    def accept(self, into: memoryview) -> Transfer:
        return self.copy(into)

    def release(self) -> None:
        if self.payload is not None:
            self.payload = None
            self._transport.use(self.peer, self.nbytes, self._block)


class _Offered(Arrival):
    """A message whose payload waits at its sender."""

    __slots__ = ("id", "offer", "transport")

    def __init__(
        self,
        transport: ShmTransport,
        peer: int,
        header: bytes,
        nbytes: int,
        offer: tuple[int, int, int, int],
    ) -> None:
        super().__init__(peer, header, nbytes, None)
        self.transport = transport
        self.id = offer[0]
        self.offer = offer

    def accept(self, into: memoryview) -> Transfer:
        return self.transport.accept(self, into)

    def release(self) -> None:
        self.transport.drop(self)


class ShmTransport(Transport):
    """The shared-memory transport of one rank; see the module's text.

    Args:
        host: the memory, as this rank has mapped it.
        doorbell: this rank's eventfd, not blocking; it stays the caller's.
        rank: this rank's number in the job.
        ranks: the ranks of this host, in the order of their local ranks.
        single_copy: try to copy from memory to memory; else large payloads go in segments.

    Attributes:
        channel: the compiled half of this transport.
    """

    name: ClassVar[str] = "shm"

    def __init__(
        self,
        host: Host,
        doorbell: int,
        rank: int,
        ranks: Sequence[int],
        single_copy: bool,
    ) -> None:
        from pycoll.transports._core import Channel

        self.channel: Channel = Channel(host, EAGER_LIMIT, CREDIT, MESSAGE_COST, single_copy)
        self._host = host
        self._doorbell = doorbell
        self._rank = rank
        self._ranks = tuple(ranks)
        self._local = {world: local for local, world in enumerate(self._ranks)}
        self._heaps = memoryview(self.channel)
        self._handler: Handler | None = None
        self._forgotten: dict[int, str] = {}
        self._sends: dict[int, _Send] = {}
        self._receives: dict[int, _Receive] = {}
        self._never: dict[int, list[_Receive]] = {}
        self._waiting: dict[tuple[int, int], _Offered] = {}
        self._unhandled: deque[tuple[Any, ...]] = deque()
        self._pid = os.getpid()
        self._closed = False
        # By the number of the event.
        self._events = (
            self._eager,
            self._in_block,
            self._offered,
            self._sent,
            self._cancelled,
            self._received,
            self._withdrawn,
            self._bye,
            self._lost,
        )

    def address(self) -> dict[str, Any]:
        return {}

    def start(self, addresses: Sequence[dict[str, Any]], handler: Handler) -> None:
        self._handler = handler

    # --- sending ---------------------------------------------------------------------------

    def send(self, peer: int, header: bytes, parts: Parts) -> Transfer:
        return self._start(self.channel.send, peer, header, parts)

    def offer(self, peer: int, header: bytes, parts: Parts) -> Transfer:
        return self._start(self.channel.offer, peer, header, parts)

    def _start(
        self, start: Callable[[int, bytes, Parts], int], peer: int, header: bytes, parts: Parts
    ) -> Transfer:
        if peer in self._forgotten:
            transfer = Transfer()
            transfer.finish(PeerFailed(peer, self._forgotten[peer]))
            return transfer
        number = start(self._local[peer], header, parts)
        if number:
            return self.adopt(peer, number)
        transfer = Transfer()
        transfer.finish()
        return transfer

    def adopt(self, peer: int, number: int) -> Transfer:
        """Return the transfer of an offer to `peer` that the compiled core has made itself."""
        send = self._sends[number] = _Send(self, peer, number)
        if not self.channel.holds(number):  # another thread was told of its end
            del self._sends[number]
            reason = self._forgotten.get(peer)
            send.finish(PeerFailed(peer, reason) if reason is not None else None)
        return send

    def take_back(self, number: int) -> None:
        """Give up an offer."""
        if self._sends.pop(number, None) is not None:
            self.channel.take_back(number)

    # --- receiving -------------------------------------------------------------------------

    def accept(self, arrival: _Offered, into: memoryview) -> Transfer:
        """Have an offered payload written to `into`."""
        peer = arrival.peer
        receive = _Receive(self, peer, 0)
        if peer in self._forgotten:
            receive.finish(PeerFailed(peer, self._forgotten[peer]))
            return receive
        if self._waiting.pop((peer, arrival.id), None) is None:
            receive.finish(Withdrawn())
            return receive
        handle = self.channel.accept(self._local[peer], arrival.nbytes, *arrival.offer, into)
        if handle > 0:
            receive.handle = handle
            self._receives[handle] = receive
        elif handle == _LEFT:
            self._never.setdefault(peer, []).append(receive)  # until it is known why it has left
        else:
            receive.finish(Withdrawn() if handle == _WITHDRAWN else None)
        return receive

    def drop(self, arrival: _Offered) -> None:
        """Tell the sender that nobody wants its message."""
        if self._waiting.pop((arrival.peer, arrival.id), None) is not None and not self._closed:
            self.channel.drop(self._local[arrival.peer], arrival.id)

    def give_up(self, handle: int) -> None:
        """Give up a receive."""
        if self._receives.pop(handle, None) is not None:
            self.channel.give_up(handle)

    def use(self, peer: int, nbytes: int, block: tuple[int, int]) -> None:
        """Count a buffered payload of `peer` as used, and give its block back."""
        self.channel.use(self._local[peer], nbytes, *block)

    # --- progress --------------------------------------------------------------------------

    def progress(self) -> bool:
        # A handler may let this transport progress, too: then first with what came before.
        events = self.channel.progress()
        if events is None and not self._unhandled:
            return False
        self._unhandled.extend(events or ())
        while self._unhandled:
            kind, *event = self._unhandled.popleft()
            self._events[kind](*event)
        return True

    def _eager(self, local: int, header: bytes, payload: bytes) -> None:
        assert self._handler is not None
        view = memoryview(payload)
        self._handler.arrived(_Buffered(self, self._ranks[local], header, view, (0, 0)))

    def _in_block(
        self, local: int, header: bytes, start: int, nbytes: int, unit: int, number: int
    ) -> None:
        assert self._handler is not None
        view = self._heaps[start : start + nbytes]
        self._handler.arrived(_Buffered(self, self._ranks[local], header, view, (unit, number)))

    def _offered(self, local: int, header: bytes, nbytes: int, *offer: int) -> None:
        assert self._handler is not None
        peer = self._ranks[local]
        number, address, num_parts, transfer = offer
        arrival = _Offered(self, peer, header, nbytes, (number, address, num_parts, transfer))
        self._waiting[peer, number] = arrival
        self._handler.arrived(arrival)

    def _sent(self, number: int) -> None:
        send = self._sends.pop(number, None)
        if send is not None:
            send.finish()

    def _cancelled(self, local: int, number: int) -> None:
        assert self._handler is not None
        arrival = self._waiting.pop((self._ranks[local], number), None)
        if arrival is not None:
            self._handler.withdrawn(arrival)

    def _received(self, handle: int) -> None:
        receive = self._receives.pop(handle, None)
        if receive is not None:
            receive.finish()

    def _withdrawn(self, handle: int) -> None:
        receive = self._receives.pop(handle, None)
        if receive is not None:
            receive.finish(Withdrawn())

    def _bye(self, local: int) -> None:
        assert self._handler is not None
        self._handler.finished(self._ranks[local])

    def _lost(self, local: int) -> None:
        assert self._handler is not None
        self._handler.lost(self._ranks[local], "what it wrote into shared memory makes no sense")

    @property
    def is_receiving(self) -> bool:
        return bool(self._receives)

    # --- waiting ---------------------------------------------------------------------------

    def fileno(self) -> int:
        return self._doorbell

    def sleep(self) -> bool:
        self._host.sleep()
        return self.is_idle()

    def is_idle(self) -> bool:
        return not self._unhandled and not self.channel.ready()

    def awake(self) -> None:
        self._host.awake()
        with contextlib.suppress(BlockingIOError):  # it was something else that ended the sleep
            os.eventfd_read(self._doorbell)

    # --- links -----------------------------------------------------------------------------

    def forget(self, peer: int, reason: str) -> None:
        if peer in self._forgotten:
            return
        self._forgotten[peer] = reason
        self.channel.forget(self._local[peer])
        transfers: list[Operation] = [s for s in self._sends.values() if s.peer == peer]
        transfers += [r for r in self._receives.values() if r.peer == peer]
        transfers += self._never.pop(peer, [])
        self._sends = {n: send for n, send in self._sends.items() if send.peer != peer}
        self._receives = {n: r for n, r in self._receives.items() if r.peer != peer}
        for transfer in transfers:  # the end of one may cancel others
            transfer.finish(PeerFailed(peer, reason))

    def links(self) -> list[int]:
        return sorted(self._ranks[local] for local in self.channel.links())

    def close(self, timeout_s: float) -> None:
        if self._closed:
            return
        self._closed = True
        if os.getpid() != self._pid:
            return  # after a fork: the memory is the parent's
        self.channel.say_goodbye()
        self._deliver(time.monotonic() + timeout_s)
        self.channel.close()

    def _deliver(self, deadline: float) -> None:
        """Wait until rings have taken what waits for room in them, or until the deadline."""
        poller = select.poll()
        poller.register(self._doorbell, select.POLLIN)
        while self.channel.flush():
            # Others may wait for room in our rings, and we for them. What they send comes too late.
            if self.channel.progress() is not None:
                continue
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                return
            if self.sleep():
                poller.poll(remaining_s * 1000)
            self.awake()
