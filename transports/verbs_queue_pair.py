"""A queue pair, one end of a reliable connection, and what its other end must know of it."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, NamedTuple

from pycoll._transports.verbs_errors import VerbsError, telling

if TYPE_CHECKING:
    from pycoll._transports.verbs import DevicePort


class RemoteQueuePair(NamedTuple):
    """Where a queue pair of another process is.

    Attributes:
        gid: global identifier of its port.
        lid: local identifier, 0 on Ethernet.
        mtu: its largest packet, in the code of the standard (5 is 4096 bytes).
        number: of the queue pair.
        psn: number of the first packet that it sends.
    """

    gid: str
    lid: int
    mtu: int
    number: int
    psn: int


class QueuePair:
    """One end of a reliable connection; its receives are the device's shared ones.

    Attributes:
        number: of the queue pair.
        psn: number of the first packet that it sends.
        inline: bytes that it takes inline.
    """

    def __init__(self, device: DevicePort) -> None:
        self._device = device
        verbs = device.verbs
        self._qp, self.inline = device.make_queue_pair()
        self.number: int = self._qp.qp_num
        self.psn = secrets.randbelow(1 << 24)
        self._wr, self._sge = verbs.wr.SendWR, verbs.wr.SGE
        enums = verbs.enums
        self._op_send, self._op_write = enums.IBV_WR_SEND, enums.IBV_WR_RDMA_WRITE
        self._op_write_imm = enums.IBV_WR_RDMA_WRITE_WITH_IMM
        self._signaled, self._inline = enums.IBV_SEND_SIGNALED, enums.IBV_SEND_INLINE

    def connect(self, peer: RemoteQueuePair) -> None:
        """Make the connection, when the peer's end exists; it may send when ours has done so.

        Raises:
            VerbsError: there is no way to the peer.
        """
        with telling(f"no connection to {peer.gid}"):
            self._device.connect(self._qp, peer, self.psn)

    def send(
        self, work: int, address: int, nbytes: int, key: int, inline: bool, signaled: bool
    ) -> None:
        """Send a message, which uses up one of the peer's receives.

        Args:
            work: number of the work request, in its completion.
            address: of the first byte.
            nbytes: at most what a receive of the peer takes.
            key: of the region; of no meaning if `inline`.
            inline: the memory is free when this returns.
            signaled: whether there will be a completion (there always is one of a failure).
        """
        flags = (self._signaled if signaled else 0) | (self._inline if inline else 0)
        piece = self._sge(address, nbytes, key)
        request = self._wr(
            wr_id=work, opcode=self._op_send, num_sge=1, sg=[piece], send_flags=flags
        )
        try:
            self._qp.post_send(request)
        except Exception as exc:
            raise VerbsError("cannot send", exc) from exc

    def write(
        self,
        work: int,
        address: int,
        nbytes: int,
        key: int,
        into: int,
        remote_key: int,
        immediate: int | None,
    ) -> None:
        """Write into the peer's memory; with a completion.

        Args:
            work: number of the work request, in its completion.
            address: of the first byte here.
            nbytes: how many, at most the device's `max_message`.
            key: of the region here.
            into: address of the first byte there.
            remote_key: of the region there.
            immediate: 32 bits to tell the peer, which uses up one of its receives; or None.
        """
        opcode = self._op_write if immediate is None else self._op_write_imm
        request = self._wr(
            wr_id=work,
            opcode=opcode,
            num_sge=1,
            imm_data=immediate or 0,
            sg=[self._sge(address, nbytes, key)],
            send_flags=self._signaled,
        )
        request.set_wr_rdma(remote_key, into)
        try:
            self._qp.post_send(request)
        except Exception as exc:
            raise VerbsError("cannot write", exc) from exc

    def fail(self) -> None:
        """Put it into error: what is under way ends, with a completion each."""
        with telling("cannot stop a queue pair"):
            self._device.put_into_error(self._qp)

    def close(self) -> None:
        """Destroy it: when this returns no peer can write through it any more."""
        qp, self._qp = self._qp, None
        if qp is not None:
            self._device.drop(qp)
