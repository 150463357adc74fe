"""RDMA verbs as far as pycoll needs them, through pyverbs, which only this file imports.

A `DevicePort` is one port of one device, opened: a protection domain, one completion queue for
everything, one shared queue of receives. A `QueuePair` (`verbs_queue_pair`) is one end of a
reliable connection, a `Region` memory that the device may reach. Whoever uses them counts what is
under way: nothing here refuses a work request because a queue is full.

Failures are `VerbsError` (`verbs_errors`); pyverbs is imported by the first `DevicePort`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib
import logging
import os
import select
import time
import weakref
from typing import Any

from pycoll._transports.verbs_errors import SUCCESS, VerbsError, explain, telling
from pycoll._transports.verbs_queue_pair import QueuePair, RemoteQueuePair

RECEIVED_WRITE = 129
"""`opcode` of the completion of a receive that a write with immediate data has used up
(IBV_WC_RECV_RDMA_WITH_IMM)."""

INLINE = 256
"""Bytes that are asked for as inline: sent out of the work request, without a fetch of memory."""

MAX_SENDS = 64
"""Work requests that one queue pair may have under way."""

TIMEOUT = 15
"""Until a packet is repeated: 4.096 us * 2 ** TIMEOUT, 0.13 s."""

RETRIES = 6
"""Repetitions before the peer counts as lost: after 1 s. 7 would be for ever in soft-RoCE."""

PROBE_S = 5.0


class _Verbs:
    """The names of pyverbs, which are in many modules."""

    def __init__(self) -> None:
        # pyverbs calls logging.basicConfig, which would silence the application's own call.
        root = logging.getLogger()
        handlers, level = root.handlers[:], root.level
        try:
            for module in ("enums", "addr", "cq", "device", "mr", "pd", "pyverbs_error"):
                setattr(self, module, importlib.import_module(f"pyverbs.{module}"))
            for module in ("qp", "srq", "wr"):
                setattr(self, module, importlib.import_module(f"pyverbs.{module}"))
            # Before Linux 5.12 registered pages must not be in forks, which would get the device's.
            # Where it is not needed it is not harmless: children then lack parts of their heap.
            with contextlib.suppress(ImportError, self.pyverbs_error.PyverbsError):
                fork = importlib.import_module("pyverbs.fork")
                if fork.is_fork_initialized() == 0:  # IBV_FORK_DISABLED
                    fork.fork_init()
        finally:
            root.handlers[:] = handlers
            root.setLevel(level)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


class Region:
    """Memory that the device may reach; whoever made it keeps the memory until `close`.

    Attributes:
        local_key: names it in work requests of this process.
        remote_key: names it in writes of peers; it allows them nothing if it was registered to be
            read here only.
    """

    __slots__ = ("_device", "_memory", "local_key", "remote_key")

    def __init__(self, device: DevicePort, memory: Any) -> None:
        self._device = device
        self._memory = memory
        self.local_key: int = memory.lkey
        self.remote_key: int = memory.rkey

    def close(self) -> None:
        """Take it back from the device. May be called again, and by any thread."""
        memory, self._memory = self._memory, None
        if memory is not None:
            self._device.drop(memory)


class DevicePort:
    """One port of one device, opened.

    Args:
        name: of the device.
        port: number of the port, from 1.
        gid_index: of the port's identifier to use.
        receives: how many may be posted at once.
        completions: how many may wait to be polled.

    Attributes:
        gid: global identifier of the port.
        lid: its local identifier.
        mtu: its largest packet, in the code of the standard.
        max_message: bytes of one work request.
        receives: as asked for, or fewer if the device has not as many.
        completions: likewise.

    Raises:
        VerbsError: what could not be opened, and why.
    """

    def __init__(
        self, name: str, port: int, gid_index: int, receives: int, completions: int
    ) -> None:
        self.verbs = verbs = _Verbs()
        self._name, self._port, self._gid_index = name, port, gid_index
        self._pid = os.getpid()
        self._held: set[Any] = set()  # what must not be destroyed by a fork's end
        with telling(f"{name} cannot be opened"):
            self._context = verbs.device.Context(name=name)
            limits = self._context.query_device()
            attributes = self._context.query_port(port)
            self.gid: str = self._context.query_gid(port, gid_index).gid
        self.lid: int = attributes.lid
        self.mtu: int = attributes.active_mtu
        self.max_message: int = attributes.max_msg_sz
        self.receives: int = min(receives, limits.max_srq_wr)
        self.completions: int = min(completions, limits.max_cqe)
        with telling(f"{name} has no protection domain left"):
            self._pd = verbs.pd.PD(self._context)
        with telling(f"{name} has no completion queue left"):
            self._channel, self._descriptor = self._open_channel()
            self._cq = verbs.cq.CQ(self._context, self.completions, None, self._channel, 0)
        with telling(f"{name} has no shared receive queue"):
            attr = verbs.srq.SrqAttr(max_wr=self.receives, max_sge=1)
            self._srq = verbs.srq.SRQ(self._pd, verbs.srq.SrqInitAttr(attr))
        self._held |= {self._context, self._pd, self._channel, self._cq, self._srq}
        self._recv_wr, self._sge = verbs.wr.RecvWR, verbs.wr.SGE
        self._poller = select.poll()
        self._poller.register(self._descriptor, select.POLLIN)
        self._is_open = True
        _open_devices.add(self)

    def _open_channel(self) -> tuple[Any, int]:
        before = _descriptors()
        channel = self.verbs.cq.CompChannel(self._context)
        # Older versions of pyverbs do not tell the descriptor.
        descriptor = getattr(channel, "fd", -1)
        if descriptor < 0:
            descriptor = next(iter(_descriptors() - before))
        os.set_blocking(descriptor, False)
        return channel, descriptor

    # --- queue pairs and memory ------------------------------------------------------------

    def peer(self, pair: QueuePair) -> RemoteQueuePair:
        """Return what another process must know to connect to a queue pair."""
        return RemoteQueuePair(self.gid, self.lid, self.mtu, pair.number, pair.psn)

    def queue_pair(self) -> QueuePair:
        """Make one end of a connection.

        Raises:
            VerbsError: the device has none left.
        """
        with telling("no queue pair left"):
            return QueuePair(self)

    def make_queue_pair(self) -> tuple[Any, int]:
        """Return a queue pair that takes no part in anything yet, and how much it takes inline."""
        verbs, inline = self.verbs, INLINE
        while True:
            caps = verbs.qp.QPCap(max_send_wr=MAX_SENDS, max_recv_wr=0, max_inline_data=inline)
            init = verbs.qp.QPInitAttr(
                qp_type=verbs.enums.IBV_QPT_RC,
                scq=self._cq,
                rcq=self._cq,
                srq=self._srq,
                cap=caps,
                sq_sig_all=0,
            )
            try:
                qp = verbs.qp.QP(self._pd, init)
                break
            except verbs.pyverbs_error.PyverbsError:
                if not inline:
                    raise
                inline //= 2 if inline > 32 else inline
        self._held.add(qp)
        attributes = verbs.qp.QPAttr(port_num=self._port)
        attributes.qp_access_flags = (
            verbs.enums.IBV_ACCESS_LOCAL_WRITE | verbs.enums.IBV_ACCESS_REMOTE_WRITE
        )
        qp.to_init(attributes)
        return qp, inline

    def connect(self, qp: Any, peer: RemoteQueuePair, psn: int) -> None:
        """Let a queue pair send to `peer` and receive from it."""
        verbs = self.verbs
        route = verbs.addr.GlobalRoute(
            dgid=verbs.addr.GID(peer.gid), sgid_index=self._gid_index, hop_limit=64
        )
        attributes = verbs.qp.QPAttr(port_num=self._port)
        attributes.qp_access_flags = (
            verbs.enums.IBV_ACCESS_LOCAL_WRITE | verbs.enums.IBV_ACCESS_REMOTE_WRITE
        )
        attributes.ah_attr = verbs.addr.AHAttr(
            port_num=self._port, is_global=1, gr=route, dlid=peer.lid
        )
        attributes.path_mtu = min(self.mtu, peer.mtu)
        attributes.dest_qp_num = peer.number
        attributes.rq_psn = peer.psn
        attributes.max_dest_rd_atomic = 1
        attributes.min_rnr_timer = 12
        qp.to_rtr(attributes)
        attributes.sq_psn = psn
        attributes.timeout = TIMEOUT
        attributes.retry_cnt = RETRIES
        attributes.rnr_retry = 7  # for ever: credits see to it that there is a receive
        attributes.max_rd_atomic = 1
        qp.to_rts(attributes)

    def put_into_error(self, qp: Any) -> None:
        """Stop a queue pair."""
        attributes = self.verbs.qp.QPAttr()
        attributes.qp_state = self.verbs.enums.IBV_QPS_ERR
        qp.modify(attributes, self.verbs.enums.IBV_QP_STATE)

    def register(self, address: int, nbytes: int, writable: bool) -> Region:
        """Let the device reach memory, and peers write to it if it is writable.

        Raises:
            VerbsError: its code is ENOMEM where the limit of locked memory is reached.
        """
        enums = self.verbs.enums
        access = enums.IBV_ACCESS_LOCAL_WRITE | enums.IBV_ACCESS_REMOTE_WRITE if writable else 0
        with telling(f"cannot register {nbytes} bytes"):
            memory = self.verbs.mr.MR(self._pd, nbytes, access, address=address)
        self._held.add(memory)
        return Region(self, memory)

    def register_dmabuf(self, descriptor: int, offset: int, nbytes: int) -> Region:
        """Let the device reach memory of another device, a GPU's, that is exported as a dma-buf.

        Not run on any hardware yet. In work requests the region begins at address `offset`.

        Args:
            descriptor: of the dma-buf.
            offset: of the first byte in it.
            nbytes: how many.

        Raises:
            VerbsError: `can_register_dmabuf` is False, or the device cannot reach this memory.
        """
        enums = self.verbs.enums
        access = enums.IBV_ACCESS_LOCAL_WRITE | enums.IBV_ACCESS_REMOTE_WRITE
        with telling(f"cannot register {nbytes} bytes of a dma-buf"):
            memory = self.verbs.mr.DmaBufMR(
                self._pd, nbytes, access, dmabuf=descriptor, offset=offset
            )
        self._held.add(memory)
        return Region(self, memory)

    def can_register_dmabuf(self) -> bool:
        """Whether pyverbs, the kernel and the device know dma-bufs: asked with a wrong one."""
        if not hasattr(self.verbs.mr, "DmaBufMR"):
            return False
        try:
            self.register_dmabuf(-1, 0, 4096).close()
        except VerbsError as exc:
            return exc.code == errno.EBADF  # it was the descriptor that was wrong, nothing else
        return False

    def drop(self, thing: Any) -> None:
        """Destroy a queue pair or a registration; in a fork of the process: leave the parent's."""
        self._held.discard(thing)
        if os.getpid() == self._pid:
            with telling("cannot be destroyed"):
                thing.close()
        else:
            _keep_for_ever(thing)

    # --- receives and completions ----------------------------------------------------------

    def receive(self, work: int, address: int, nbytes: int, key: int) -> Any:
        """Post a receive; returns the work request, for `receive_again`."""
        request = self._recv_wr(wr_id=work, num_sge=1, sg=[self._sge(address, nbytes, key)])
        self.receive_again(request)
        return request

    def receive_again(self, request: Any) -> None:
        """Post a receive again that was used up."""
        try:
            self._srq.post_recv(request)
        except Exception as exc:
            raise VerbsError("cannot post a receive", exc) from exc

    def poll(self, most: int) -> list[Any]:
        """Return completions: at most so many, in the order in which they came.

        Each has `wr_id` (the number of the work request), `status`, and if that is SUCCESS of a
        receive: `opcode`, `byte_len`, `qp_num` of the queue pair, `imm_data`. After `close` there
        are none.
        """
        if not self._is_open:
            return []
        try:
            completions: list[Any] = self._cq.poll(most)[1]
        except Exception as exc:
            raise VerbsError("the completion queue has failed", exc) from exc
        return completions

    def fileno(self) -> int:
        """Return the descriptor that is readable when a completion has come since `arm`."""
        return self._descriptor

    def arm(self) -> None:
        """Have the next completion make the descriptor readable."""
        with telling("the completion queue has failed"):
            if self._is_open:
                self._cq.req_notify()

    def disarm(self) -> None:
        """Make the descriptor unreadable again; after `close` there is none, and this does nothing.

        A thread that slept on it may come to it when another one has closed the device.
        """
        if not self._is_open:
            return
        events = 0
        while self._poller.poll(0):
            with contextlib.suppress(self.verbs.pyverbs_error.PyverbsError):
                self._channel.get_cq_event(self._cq)
                events += 1
        if events:
            self._cq.ack_events(events)

    def close(self) -> None:
        """Give everything back. May be called again; not in a fork."""
        if os.getpid() != self._pid or not self._is_open:
            return
        self._is_open = False
        _open_devices.discard(self)
        held = [self._srq, self._cq, self._channel, self._pd, self._context]
        for thing in (*(self._held - set(held)), *held):
            with contextlib.suppress(self.verbs.pyverbs_error.PyverbsError):
                thing.close()
        self._held.clear()


def probe(device: DevicePort) -> str | None:
    """Send a message from the device to itself; returns why that does not work, or None.

    A device that opens need not be able to talk: that shows only when a queue pair does.
    """
    memory = bytearray(64)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    things: list[Region | QueuePair] = []
    try:
        region = device.register(address, len(memory), writable=True)
        things.append(region)
        pairs = [device.queue_pair(), device.queue_pair()]
        things = [*pairs, region]
        for pair, other in (pairs, pairs[::-1]):
            pair.connect(device.peer(other))
        device.receive(0, address, 32, region.local_key)
        pairs[0].send(1, address + 32, 32, region.local_key, inline=False, signaled=True)
        deadline, left = time.monotonic() + PROBE_S, {0, 1}
        while left:
            for completion in device.poll(2):
                if completion.status != SUCCESS:
                    return f"a message to itself failed: {explain(completion.status)}"
                left.discard(completion.wr_id)
            if time.monotonic() > deadline:
                return f"a message to itself did not arrive within {PROBE_S:g} s"
    except VerbsError as exc:
        return str(exc)
    finally:
        for thing in things:
            thing.close()
    return None


def _descriptors() -> set[int]:
    """Return the open descriptors that tell of completions."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[infinibandevent]":
                found.add(int(name))
    return found


# --- forks -----------------------------------------------------------------------------------
# A fork has all objects, and the descriptor through which the kernel would destroy the parent's.

_open_devices: weakref.WeakSet[DevicePort] = weakref.WeakSet()


def _keep_for_ever(thing: Any) -> None:
    """Never let Python destroy `thing`."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _after_fork() -> None:
    for device in list(_open_devices):
        for thing in device._held:
            _keep_for_ever(thing)


os.register_at_fork(after_in_child=_after_fork)
