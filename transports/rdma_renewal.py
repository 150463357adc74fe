"""The lanes of a link by RDMA: when one is thrown away, and how both ends make the next.

Nothing is written to memory that the user has got back: who gives up a message that may be under
way destroys the queue pair of the lane first. Then both ends make a new lane, the receivers that
still wait say GO again, and what was under way starts again. LANE tells how many writes that use up
a receive have come, so that credits of those that were lost are not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pycoll._transports.rdma_lane import Lane
from pycoll._transports.rdma_queues import Endpoint
from pycoll._transports.verbs_errors import RETRIES_EXCEEDED, VerbsError, explain
from pycoll._transports.verbs_queue_pair import RemoteQueuePair

if TYPE_CHECKING:
    from pycoll._transports.rdma_link import RdmaLink

MOST_FAILURES = 3
"""Lanes that may fail one after the other, without a payload arriving, until the link is lost."""


class Lanes:
    """The lanes of a link, of which there is one at a time.

    Args:
        endpoint: of this rank.
        link: that they belong to.

    Attributes:
        lane: the present one; None: nothing large was to be sent yet, or the link is closed.
        epoch: number of the newest, 0 if there was none.
        last_writes_received: writes that used up a receive here, over all lanes.
    """

    def __init__(self, endpoint: Endpoint, link: RdmaLink) -> None:
        self.lane: Lane | None = None
        self.epoch = 0
        self.last_writes_received = 0
        self._endpoint = endpoint
        self._link = link
        self._failures = 0
        self._last_writes = self._last_writes_lost = 0

    def open(self) -> None:
        """Make a lane, and have the peer do so; say what we wait for on it."""
        self._open(self.epoch + 1)

    def _open(self, epoch: int) -> None:
        self.epoch = epoch
        try:
            self.lane = lane = Lane(self._endpoint, self._link, epoch, self._written)
        except VerbsError as exc:
            self._link.fail(str(exc))
            return
        self._link.announce(lane)

    def _written(self, number: int) -> None:
        self._failures = 0
        self._link.written(number)

    def renew(self) -> None:
        """Throw the lane away, and make another."""
        self.close()
        self.open()

    def close(self) -> None:
        """Destroy the lane: when this returns nothing is read or written through it any more."""
        lane, self.lane = self.lane, None
        if lane is None:
            return
        lane.queue.drain()
        for completion in self._endpoint.take_out(lane.queue.pair.number):
            self._link.received(completion, memoryview(b""))
            self._endpoint.receive_again(completion)
        self._last_writes += lane.last_writes
        lane.queue.close()
        self._link.end_writes()

    def meet(self, epoch: int, received: int, peer: RemoteQueuePair) -> None:
        """The peer has made its end of a lane.

        Args:
            epoch: number of the lane.
            received: the peer's `last_writes_received` before it.
            peer: its queue pair.
        """
        if epoch < self.epoch:
            return  # ours is newer, and it will hear of it
        if epoch > self.epoch:
            self.close()
            self._open(epoch)
        lane = self.lane
        if lane is None:
            return
        lost = self._last_writes - received - self._last_writes_lost
        self._last_writes_lost += lost
        self._link.frames.credits += lost
        try:
            lane.queue.pair.connect(peer)
        except VerbsError as exc:
            self._link.fail(str(exc))
            return
        lane.is_connected = True
        self._link.say_connected(epoch)

    def use(self, epoch: int) -> None:
        """The peer has connected its end, and has said for what it still waits."""
        if self.lane is None or epoch != self.epoch:
            return
        self.lane.is_ready = True
        self._link.finish_written(())

    def failed(self, status: int) -> None:
        """A write has failed: try again on a new lane, unless that fails time and again.

        No answer does not count: the peer may have destroyed its end, and we were too busy to hear
        of it. One that is gone does not answer on the other queue pair either.
        """
        if status != RETRIES_EXCEEDED:
            self._failures += 1
        if self._failures > MOST_FAILURES:
            self._link.fail(explain(status))
        else:
            self.renew()

    def is_present(self, queue: object) -> bool:
        """Whether a queue is that of the present lane."""
        return self.lane is not None and self.lane.queue is queue
