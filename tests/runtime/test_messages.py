"""Which receive gets which message, seen by programs: given up, put back, early, late, cancelled.

Only the public interface is used, over shared memory and over tcp, so that this holds for any
engine.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from p2p_cases import LARGE, SMALL, Comm, check, numbered, on
from tiers import few

import pycoll
from pycoll import ANY_SOURCE, ANY_TAG, Status


class Queues:
    """What a rank's messages and receives are: matching by searching lists.

    A message is its number; so is a receive.

    Attributes:
        sent: source and tag of every message.
        here: messages that no receive has taken, in the order in which they came.
        posted: source and tag of every receive.
        waiting: receives that have no message, in the order in which they were posted.
    """

    def __init__(self) -> None:
        self.sent: list[tuple[int, int]] = []
        self.here: list[int] = []
        self.posted: list[tuple[int, int]] = []
        self.waiting: list[int] = []

    def find(self, source: int, tag: int) -> int | None:
        """The message that a receive of this pattern would get now."""
        return next((m for m in self.here if fits((source, tag), self.sent[m])), None)

    def taker(self, source: int, tag: int) -> int | None:
        """The receive that would get a message of this source and tag now."""
        return next((r for r in self.waiting if fits(self.posted[r], (source, tag))), None)


def fits(pattern: tuple[int, int], sent: tuple[int, int]) -> bool:
    anything = ANY_SOURCE, ANY_TAG
    return all(p in (a, is_) for p, a, is_ in zip(pattern, anything, sent, strict=True))


def follow(comm: Comm, orders: Comm) -> None:
    """Be a sender: do what rank 0 orders, and tell it when it has been done."""
    requests = []
    while (order := orders.recv(0)) is not None:
        number, tag, nbytes, withdrawn = order
        if withdrawn:
            with pytest.raises(pycoll.OperationTimeout):
                comm.send(numbered(number, nbytes), 0, tag, timeout=0.01)
        else:
            requests.append(comm.isend(numbered(number, nbytes), 0, tag))
        orders.send("done", 0)
    pycoll.wait_all(requests)


class Receiver:
    """Rank 0 and the model, doing the same. The length of a message says which one it is."""

    def __init__(self, comm: Comm, orders: Comm) -> None:
        self.comm, self.orders, self.model = comm, orders, Queues()
        self.lengths: list[int] = []
        self.requests: list[Any] = []

    def send(self, source: int, tag: int, nbytes: int) -> None:
        """Have a message sent and wait until it has come."""
        model, number = self.model, len(self.lengths)
        nbytes += number
        self.lengths.append(nbytes)
        model.sent.append((source, tag))
        taker = model.taker(source, tag)
        if source == 0:
            self.comm.isend(numbered(number, nbytes), 0, tag)
        else:
            self.orders.send((number, tag, nbytes, False), source)
            assert self.orders.recv(source) == "done"
        if taker is None:
            model.here.append(number)
        else:
            model.waiting.remove(taker)
            check(self.requests[taker].wait(), number, nbytes)
            assert not self.requests[taker].cancel()

    def send_and_withdraw(self, source: int, tag: int) -> None:
        """Have a message sent that its sender takes back: nobody has asked for it until then."""
        if source != 0 and self.model.taker(source, tag) is None:
            self.orders.send((250, tag, LARGE, True), source)
            assert self.orders.recv(source) == "done"

    def post(self, source: int, tag: int) -> None:
        """Start a receive."""
        model = self.model
        model.posted.append((source, tag))
        self.requests.append(self.comm.irecv(source, tag))
        number = model.find(source, tag)
        if number is None:
            model.waiting.append(len(model.posted) - 1)
            assert not self.requests[-1].test()
        else:
            model.here.remove(number)
            check(self.requests[-1].wait(), number, self.lengths[number])

    def cancel(self, pick: int) -> None:
        """Cancel one of the receives that wait."""
        if self.model.waiting:
            request = self.requests[self.model.waiting.pop(pick % len(self.model.waiting))]
            assert request.cancel()
            assert request.cancelled

    def receive_too_little(self, source: int, tag: int) -> None:
        """Receive into an array that is too short, or of another dtype: that changes nothing."""
        number = self.model.find(source, tag)
        for out, kind in (
            (np.zeros(1, "u1"), pycoll.TruncationError),
            (np.zeros(2 * LARGE, "i1"), pycoll.MismatchError),
        ):
            with pytest.raises(pycoll.OperationTimeout if number is None else kind):
                self.comm.recv(source, tag, out=out, timeout=0 if number is None else None)
            assert not out.any()

    def receive_at_once(self, source: int, tag: int) -> None:
        """Receive what is here at once; a large message may take longer, and then stays."""
        number = self.model.find(source, tag)
        try:
            got = self.comm.recv(source, tag, timeout=0)
        except pycoll.OperationTimeout:
            assert number is None or self.lengths[number] >= LARGE
        else:
            assert number is not None
            check(got, number, self.lengths[number])
            self.model.here.remove(number)

    def compare(self) -> None:
        """What the communicator shows is what the model has."""
        for source in (ANY_SOURCE, *range(self.comm.size)):
            for tag in (ANY_TAG, 0, 1, 2):
                number = self.model.find(source, tag)
                wanted = None if number is None else self.shown(number)
                assert self.comm.iprobe(source, tag) == wanted
        assert not any(self.requests[receive].test() for receive in self.model.waiting)

    def shown(self, number: int) -> Status:
        """The status of a message."""
        return Status(*self.model.sent[number], self.lengths[number])

    def finish(self) -> None:
        """Take all that is left, in order."""
        while self.model.waiting:
            self.cancel(0)
        status = Status()
        for number in self.model.here:
            got = self.comm.recv(status=status)
            assert status == self.shown(number)
            check(got, number, self.lengths[number])
        assert self.comm.iprobe() is None
        for source in range(1, self.comm.size):
            self.orders.send(None, source)


@pytest.mark.parametrize("seed", few(range(2), range(2, 20)))
@on(3)
def test_every_receive_gets_the_message_that_a_search_would_find(ranks: Any, seed: int) -> None:
    def program(comm: Comm) -> None:
        with comm.dup() as orders:
            if comm.rank != 0:
                follow(comm, orders)
                return
            random, receiver = np.random.default_rng(seed), Receiver(comm, orders)
            for _ in range(150):
                source, tag = (int(number) for number in random.integers(0, 3, 2))
                pattern = source, tag
                pattern = (pattern, pattern, (ANY_SOURCE, tag), (source, ANY_TAG))[
                    random.integers(4)
                ]
                match random.choice(
                    ["send", "post", "cancel", "too little", "at once", "withdraw"],
                    p=[0.35, 0.3, 0.1, 0.1, 0.1, 0.05],
                ):
                    case "send":
                        receiver.send(source, tag, (10, SMALL, LARGE)[random.integers(3)])
                    case "post":
                        receiver.post(*pattern)
                    case "cancel":
                        receiver.cancel(int(random.integers(100)))
                    case "too little":
                        receiver.receive_too_little(*pattern)
                    case "at once":
                        receiver.receive_at_once(*pattern)
                    case "withdraw":
                        receiver.send_and_withdraw(source, tag)
                receiver.compare()
            receiver.finish()

    ranks(program)
