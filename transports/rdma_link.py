"""The link of two ranks by RDMA: how a message becomes frames and writes.

Two ranks make their link when they first talk: each sends the other a note with the number of its
queue pair, by way of the launcher, and a second one when it is connected. What is sent meanwhile
waits. Small messages are copied into frames. Of larger ones READY goes ahead; when the receiver has
accepted, it registers its memory and says GO, and the sender writes from its registered memory to
the receiver's, over a lane; the last write carries the message's id and so tells the receiver. What
cannot be registered goes in pieces through frames. A lane can be thrown away (`rdma_renewal`): so
nothing is written to memory that the user has got back.

    EAGER   header, payload
    READY   number = payload bytes; the header of a message that waits to be accepted
    GO      id was accepted; number = epoch of the lane, 0: in pieces; body = address, remote key
    PIECE   number = offset; body = a part of id's payload
    DROP    id was dropped by the receiver
    CANCEL  id was taken back by the sender
    CREDIT  number = buffered bytes consumed
    LANE    id = epoch of a new lane, number = last writes received so far; body = its queue pair
    USE     id = epoch: that lane's other end is connected, and all that still waits has said GO
    BYE     nothing more will come; body = ids that were accepted and are not here
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from pycoll._transports.base import (
    CREDIT,
    EAGER_LIMIT,
    MESSAGE_COST,
    Elsewhere,
    Parts,
    Reach,
    Transfer,
    Withdrawn,
    nbytes_of,
)
from pycoll._transports.rdma_frames import FramedMessage, Frames
from pycoll._transports.rdma_lane import Lane, Write, is_worth_writing
from pycoll._transports.rdma_messages import Pieces, RdmaArrival, RdmaReceive, RdmaSend
from pycoll._transports.rdma_renewal import Lanes
from pycoll._transports.verbs import RECEIVED_WRITE
from pycoll._transports.verbs_errors import VerbsError
from pycoll._transports.verbs_queue_pair import RemoteQueuePair
from pycoll.errors import PeerFailed, TransportError

if TYPE_CHECKING:
    from pycoll._transports.rdma import RdmaTransport

_EAGER, _READY, _GO, _PIECE, _DROP, _CANCEL, _CREDIT, _LANE, _USE, _BYE = range(10)

_TARGET = struct.Struct("<QI")

_PAIR = struct.Struct("<II")

_NOTE = struct.Struct("<BII")

_HELLO, _CONNECTED = range(2)


class RdmaLink:
    """One rank's end of the link to another: what is on its way between them.

    Args:
        transport: this rank's.
        peer: the other rank.
        address: of its transport.

    Attributes:
        peer: the other rank.
        frames: to and from it.
        lanes: for what is large.
        failure: why the link is lost, or "".
        has_ended: whether the peer has said that nothing more will come.
    """

    def __init__(self, transport: RdmaTransport, peer: int, address: Mapping[str, Any]) -> None:
        self.peer = peer
        self.failure = ""
        self.has_ended = False
        self._transport = transport
        self._endpoint = transport.endpoint
        self._address = address
        self.frames = Frames(self._endpoint, self)
        self.lanes = Lanes(self._endpoint, self)
        self._next_id = 0
        self._sends: dict[int, RdmaSend] = {}
        self._receives: dict[int, RdmaReceive] = {}
        self._waiting: dict[int, RdmaArrival] = {}
        self._in_pieces: deque[RdmaSend] = deque()
        self._owed = self._unrepaid = 0

    def hello(self) -> bytes:
        """Return the note with the number of this end's queue pair."""
        pair = self.frames.queue.pair
        return _NOTE.pack(_HELLO, pair.number, pair.psn)

    def hear(self, note: bytes) -> bytes | None:
        """Take in a note of the peer's; returns the answer, if it needs one.

        Raises:
            VerbsError: there is no way to the peer.
        """
        kind, number, psn = _NOTE.unpack(note)
        if kind == _HELLO:
            self.frames.connect(self._remote(number, psn))
            return _NOTE.pack(_CONNECTED, 0, 0)
        self.frames.is_open = True
        return None

    def _remote(self, number: int, psn: int) -> RemoteQueuePair:
        address = self._address
        return RemoteQueuePair(address["gid"], address["lid"], address["mtu"], number, psn)

    # --- sending ---------------------------------------------------------------------------

    def send(self, header: bytes, parts: Parts, may_buffer: bool = True) -> Transfer:
        """Start sending a message."""
        nbytes = nbytes_of(parts)
        cost = nbytes + MESSAGE_COST
        has_room = nbytes <= EAGER_LIMIT and self._owed + cost <= CREDIT
        if may_buffer and has_room and not self.failure:
            self._owed += cost
            self.frames.put(_EAGER, header=header, parts=parts)
            transfer = Transfer()
            transfer.done = True
            return transfer
        self._next_id = (self._next_id + 1) & 0xFFFFFFFF
        send = self._sends[self._next_id] = RdmaSend(self, self._next_id, parts)
        if self.failure:
            return send  # it waits until it is known what became of the peer
        self.frames.put(_READY, send.id, nbytes, header)
        if nbytes > EAGER_LIMIT and self.lanes.lane is None:
            self.lanes.open()  # the receiver will need it
        return send

    def take_back(self, send: RdmaSend) -> None:
        """Give up a send; nothing is read from its memory any more."""
        if self._sends.pop(send.id, None) is None or self.failure:
            return
        if send.write is not None:
            if send.write.under_way:
                self.lanes.renew()
            else:
                self._discard(send.write)
            send.write.close()
        elif send.pieces is not None:
            self._in_pieces.remove(send)
        self.frames.put(_CANCEL, send.id)

    def _discard(self, write: Write) -> None:
        lane = self.lanes.lane
        assert lane is not None
        lane.discard(write)

    def _go(self, message: FramedMessage) -> None:
        """The receiver has accepted: write, or send in pieces."""
        send = self._sends.get(message.id)
        if send is None or send.pieces is not None:
            return
        lane, epoch = self.lanes.lane, message.number
        if epoch and (lane is None or epoch != lane.epoch):
            return  # it will hear that this lane is gone, and say so again
        if lane is not None and epoch and is_worth_writing(send.parts):
            into, remote_key = _TARGET.unpack(message.body)
            try:
                send.write = Write(self._endpoint, send.id, send.parts, into, remote_key)
            except VerbsError as exc:
                self._transport.warn(exc)
            else:
                send.is_written = True
                lane.add(send.write)
                return
        try:
            self._bring(send.parts)
        except TransportError as exc:
            del self._sends[send.id]
            self.frames.put(_CANCEL, send.id)
            self._transport.finish_soon(send, exc)
            return
        send.is_written = False
        send.pieces = Pieces(send.parts)
        self._in_pieces.append(send)

    def _bring(self, parts: Parts) -> None:
        """Have in host memory what the processor will read there."""
        for part in parts:
            direct = self._endpoint.registrations.find(part)
            if direct is not None:
                direct.elsewhere.read(part)

    def written(self, number: int) -> None:
        """The peer has all of a payload."""
        send = self._sends.pop(number, None)
        if send is not None:
            assert send.write is not None
            send.write.close()
            send.finish()

    def _send_pieces(self) -> None:
        while self._in_pieces and self.frames.has_room:
            send = self._in_pieces[0]
            assert send.pieces is not None
            offset, views = send.pieces.next()
            self.frames.put(_PIECE, send.id, offset, parts=views)
            if not send.pieces.left:
                self._in_pieces.popleft()
                del self._sends[send.id]
                send.finish()

    # --- receiving -------------------------------------------------------------------------

    def accept(self, arrival: RdmaArrival, into: memoryview) -> Transfer:
        """Let the sender of `arrival` go on, into `into`."""
        receive = RdmaReceive(self, arrival.id, arrival.nbytes, into)
        reason = self._transport.why_forgotten(self.peer)
        if reason is not None:
            receive.finish(PeerFailed(self.peer, reason))
        elif self._waiting.pop(arrival.id, None) is None:
            receive.finish(Withdrawn())
        else:
            self._receives[arrival.id] = receive
            if not self.failure:
                self._say_go(receive)
        return receive

    def reach(self, into: memoryview, elsewhere: Elsewhere) -> Reach | None:
        """Have what will be accepted into a staging buffer written where its bytes really are."""
        return self._transport.reaches.reach(into, elsewhere)

    def drop(self, arrival: RdmaArrival) -> None:
        """Tell the sender that nobody wants its message."""
        if self._waiting.pop(arrival.id, None) is not None and not self.failure:
            self.frames.put(_DROP, arrival.id)

    def consumed(self, cost: int) -> None:
        """Count buffered bytes of the peer as used, and tell it before its credit runs out."""
        self._unrepaid += cost
        if self._unrepaid >= CREDIT // 4 and not self.failure:
            self.frames.put(_CREDIT, number=self._unrepaid)
            self._unrepaid = 0

    def give_up(self, receive: RdmaReceive) -> None:
        """Give up a receive; nothing is written to its memory any more."""
        if self._receives.pop(receive.id, None) is None:
            return
        if not self.failure:
            lane = self.lanes.lane
            if receive.epoch and lane is not None and lane.is_connected:
                self.lanes.renew()  # else the peer cannot have begun, and hears this first
            self.frames.put(_DROP, receive.id)
        receive.release()

    def redirect(self, receive: RdmaReceive, into: memoryview) -> None:
        """Let a receive go on into `into`; nothing is written to its old memory any more."""
        old, receive.into = receive.into, into
        is_written = bool(receive.epoch) and not receive.is_complete and not self.failure
        if is_written:
            self.lanes.close()
        receive.release()
        filled = receive.nbytes if receive.is_complete else receive.filled
        direct = self._endpoint.registrations.find(old)
        if direct is None or direct.is_in_buffer:
            into[:filled] = old[:filled]
        elif filled:
            direct.elsewhere.read(into[:filled])
        if is_written:
            self.lanes.open()

    def _say_go(self, receive: RdmaReceive) -> None:
        """Tell the sender to write, or to send in pieces."""
        receive.epoch = 0
        if receive.nbytes > EAGER_LIMIT:
            if self.lanes.lane is None:
                self.lanes.open()  # and that says it
                return
            try:
                if receive.lease is None:
                    view = receive.into[: receive.nbytes]
                    receive.lease = self._endpoint.registrations.lease(view, into=True)
            except VerbsError as exc:
                self._transport.warn(exc)
            else:
                receive.epoch = self.lanes.epoch
                target = _TARGET.pack(receive.lease.address, receive.lease.remote_key)
                self.frames.put(_GO, receive.id, receive.epoch, parts=(target,))
                return
        self.frames.put(_GO, receive.id)

    def _store(self, message: FramedMessage) -> None:
        receive = self._receives.get(message.id)
        if receive is None:
            return  # given up here; the sender will hear it
        if not receive.filled:
            direct = self._endpoint.registrations.find(receive.into)
            if direct is not None:
                direct.is_in_buffer = True
        end = message.number + len(message.body)
        receive.into[message.number : end] = message.body
        receive.filled = end
        if end >= receive.nbytes:
            self._complete(receive)

    def _complete(self, receive: RdmaReceive) -> None:
        del self._receives[receive.id]
        receive.is_complete = True
        receive.release()
        self._transport.finish_soon(receive, None)

    # --- what comes ------------------------------------------------------------------------

    def received(self, completion: Any, frame: memoryview) -> None:
        """Take in a receive that was used up, by a frame or by the last write of a payload."""
        if completion.opcode == RECEIVED_WRITE:
            self.frames.used()
            self.lanes.last_writes_received += 1
            receive = self._receives.get(completion.imm_data)
            if receive is not None:
                self._complete(receive)
            return
        for message in self.frames.take(frame):
            self._handle(message)

    def _handle(self, message: FramedMessage) -> None:
        handler, kind, number = self._transport.handler, message.kind, message.id
        if self._transport.is_closing and kind in (_EAGER, _READY):
            return  # it comes too late
        if kind == _EAGER:
            # The frame goes back at once, and the payload may be wanted for long: so out of it.
            body = message.body
            payload = body if isinstance(body.obj, bytearray) else memoryview(bytes(body))
            handler.arrived(RdmaArrival(self, bytes(message.header), len(payload), payload, number))
        elif kind == _READY:
            arrival = RdmaArrival(self, bytes(message.header), message.number, None, number)
            self._waiting[number] = arrival
            handler.arrived(arrival)
        elif kind == _GO:
            self._go(message)
        elif kind == _PIECE:
            self._store(message)
        elif kind == _DROP:
            self._dropped(number)
        elif kind == _CANCEL:
            self._cancelled(number)
        elif kind == _CREDIT:
            self._owed -= message.number
        elif kind == _LANE:
            pair = self._remote(*_PAIR.unpack(message.body))
            self.lanes.meet(number, message.number, pair)
        elif kind == _USE:
            self.lanes.use(number)
        elif kind == _BYE:
            self.has_ended = True
            missing = {number for (number,) in struct.iter_unpack("<I", message.body)}
            self.finish_written(missing)
            handler.finished(self.peer)
        else:
            raise ValueError(f"a message of kind {kind}")

    def _dropped(self, number: int) -> None:
        send = self._sends.pop(number, None)
        if send is not None:
            if send.pieces is not None:
                self._in_pieces.remove(send)
            elif send.write is not None:  # nothing of it is under way: no lane was ready since
                self._discard(send.write)
                send.write.close()
            send.finish()

    def _cancelled(self, number: int) -> None:
        arrival = self._waiting.pop(number, None)
        if arrival is not None:
            self._transport.handler.withdrawn(arrival)
        receive = self._receives.pop(number, None)
        if receive is not None:
            receive.release()
            self._transport.finish_soon(receive, Withdrawn())

    # --- the lane --------------------------------------------------------------------------

    def announce(self, lane: Lane) -> None:
        """Have the peer make its end of a new lane; say what we wait for on it."""
        pair = lane.queue.pair
        body = _PAIR.pack(pair.number, pair.psn)
        self.frames.put(_LANE, lane.epoch, self.lanes.last_writes_received, parts=(body,))
        for receive in list(self._receives.values()):
            if receive.nbytes > EAGER_LIMIT:
                self._say_go(receive)

    def say_connected(self, epoch: int) -> None:
        """Tell the peer that it may use a lane."""
        self.frames.put(_USE, epoch)

    def end_writes(self) -> None:
        """End what was under way over a lane that is gone; the receivers will say GO again."""
        for send in self._sends.values():
            if send.write is not None:
                send.write.close()
                send.write = None

    def finish_written(self, missing: Collection[int]) -> None:
        """Finish what the peer had before the last lane ended: it has said what it still waits for.

        Args:
            missing: ids that it waits for and has not said GO for again.
        """
        for send in [send for send in self._sends.values() if send.is_written and not send.write]:
            # The end of one may cancel others.
            if send.id not in missing and self._sends.pop(send.id, None) is not None:
                send.finish()

    # --- going on and ending ---------------------------------------------------------------

    def pump(self) -> None:
        """Send what there is room for."""
        self.frames.pump()
        self._send_pieces()
        lane = self.lanes.lane
        if lane is not None:
            try:
                lane.pump(self.frames)
            except VerbsError as exc:
                self.fail(str(exc))

    def say_goodbye(self) -> None:
        """Send BYE, the last message.

        It says what this rank still waits for: its peer may not know yet that it has the rest.
        """
        self.frames.is_last = True
        missing = struct.pack(f"<{len(self._receives)}I", *self._receives)
        self.frames.put(_BYE, parts=(missing,))

    def fail(self, why: str) -> None:
        """Give the link up; the peer is lost."""
        self._transport.fail(self, why)

    def close(self, reason: str) -> None:
        """Destroy the queue pairs: nothing moves on this link any more."""
        if not self.failure:
            self.failure = reason
            self.lanes.close()
            self.frames.close()

    def forget(self, reason: str) -> None:
        """Fail all that is under way, after `close`."""
        transfers: list[RdmaSend | RdmaReceive] = [*self._sends.values(), *self._receives.values()]
        self._sends.clear()
        self._receives.clear()
        self._in_pieces.clear()
        self._waiting.clear()
        for transfer in transfers:  # the end of one may cancel others
            if isinstance(transfer, RdmaReceive):
                transfer.release()
            transfer.finish(PeerFailed(self.peer, reason))
