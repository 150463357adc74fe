"""Messages of scripts/fuzz_programs: sent, received, and both at once."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy_oracle as oracle
from programs_steps import Pending, Rank, Step, patiently, raises, timeout
from programs_values import (
    Array,
    Random,
    agree,
    copied,
    fill,
    scribble,
    somewhere,
    tiled,
    untouched,
)

import pycoll

UNIQUE = 1000
"""Tags from here on are used once: `UNIQUE` and the number of a step."""


def value(rank: Rank, step: Send | Exchange, sender: int) -> Any:
    """Return what a message carries."""
    rng = rank.random(step.number, sender)
    if step.dtype == "object":
        return oracle.some_object(rng)
    return tiled(rng, step.dtype, step.shape)


def blocking(rng: Random, call: Callable[..., Any], *args: Any) -> Any:
    """Send or receive, with a deadline or without; one that passes has withdrawn the message."""
    if rng.random() < 0.15:
        return patiently(functools.partial(call, *args))
    return call(*args, **timeout(rng))


@dataclass(eq=False)
class Exchange(Step):
    """sendrecv round a ring.

    Attributes:
        how: "block", "start" or "persist".
        by: how many ranks further a message goes.
        first: the step that made this persistent request; else this step.
    """

    how: str
    by: int
    dtype: str
    shape: tuple[int, ...]
    first: int

    def run(self, rank: Rank) -> None:
        """Do the part of one rank."""
        comm, size = rank.comms[self.team.number], len(self.team.members)
        me = self.team.members.index(rank.me)
        rng, tag = rank.random(self.number, me, 1), UNIQUE + self.first
        source, dest = (me - self.by) % size, (me + self.by) % size
        request, out, x = None, None, value(rank, self, me)
        if self.first != self.number:
            values = x
            request, x, out = rank.persistent[self.first]
            fill(x, values)
        elif self.dtype != "object":
            x = copied(x) if self.how == "persist" else oracle.laid_out(rng, x)
            out = somewhere(rng, self.dtype, self.shape)
        check = functools.partial(self._check, rank, me, source, x, copied(x), out)
        args = x, dest, source, tag, tag, out
        if self.how == "block":
            check(comm.sendrecv(*args, **timeout(rng)))
            return
        if self.how == "start":
            request = comm.isendrecv(*args)
        else:
            if request is None:
                request = comm.persistent.sendrecv(*args)
                rank.persistent[self.number] = request, x, out
            assert request.start() is request, "start() returns the request"
        rank.pending[self.number] = Pending(request, check)

    def _check(
        self, rank: Rank, me: int, source: int, x: Any, before: Any, out: Array | None, result: Any
    ) -> None:
        what = f"step {self.number}: sendrecv ({self.how}) on rank {me} from rank {source}"
        agree(rank.perturbed(result), value(rank, self, source), what)
        assert out is None or result is out, f"{what}: not its out"
        untouched(out)
        agree(x, before, f"{what}: its input afterwards")
        scribble(x)
        if self.how != "persist":
            rank.keep(what, result)


@dataclass(eq=False)
class Send(Step):
    """One rank sends to another: send or isend."""

    how: str
    source: int
    dest: int
    tag: int
    dtype: str
    shape: tuple[int, ...]
    matched: bool = False

    @property
    def ranks(self) -> Iterable[int]:
        return (self.team.members[self.source],)

    def run(self, rank: Rank) -> None:
        rng, x = rank.random(self.number, 0, 1), value(rank, self, 0)
        if self.dtype != "object":
            x = oracle.laid_out(rng, x)
        before = copied(x)

        def check(result: Any) -> None:
            assert result is None, f"step {self.number}: {self.how} gave {result!r}"
            agree(x, before, f"step {self.number}: what was sent, afterwards")
            scribble(x)

        comm = rank.comms[self.team.number]
        if self.how == "send":
            check(blocking(rng, comm.send, x, self.dest, self.tag))
        else:
            rank.pending[self.number] = Pending(comm.isend(x, self.dest, self.tag), check)


@dataclass(eq=False)
class Receive(Step):
    """One rank receives from another: recv or irecv.

    Attributes:
        source: as it is passed, a rank or ANY_SOURCE.
        origin: the rank it can only come from; None: nothing comes, the receive is cancelled.
        room: elements of `out`, and their dtype.
        message: what is received, known when the program has been drawn.
        several: messages of different ranks that this receive may get.
    """

    how: str
    source: int
    origin: int | None
    dest: int
    tag: int
    room: tuple[int, str] | None
    probe: bool = False
    message: Send | None = None
    several: list[Send] = field(default_factory=list, repr=False)

    @property
    def ranks(self) -> Iterable[int]:
        return (self.team.members[self.dest],)

    @property
    def matched(self) -> bool:
        """Whether what it gets is on its way."""
        return self.message is not None or bool(self.several)

    def takes(self, message: Send) -> bool:
        """Whether it fits a message of its team."""
        return (self.origin, self.dest) == (message.source, message.dest) and self.tag in (
            message.tag,
            pycoll.ANY_TAG,
        )

    def run(self, rank: Rank) -> None:
        comm, rng = rank.comms[self.team.number], rank.random(self.number, 0, 2)
        status, out = pycoll.Status(), None
        if self.room is not None:
            count, dtype = self.room
            out = somewhere(rng, dtype, (count,), always=True)
        before = copied(out)
        if self.probe:
            seen = comm.iprobe(self.source, self.tag)
            for found in (seen, comm.probe(self.source, self.tag)):
                assert found is None or self._is_from(found, self.message), f"probe gave {found}"
        check = functools.partial(self._check, rank, status, out, before)
        args = self.source, self.tag, out, status
        if self.how == "recv":
            self._refuse(rng, comm)
            check(blocking(rng, comm.recv, *args))
        else:
            rank.pending[self.number] = Pending(comm.irecv(*args), check)

    def _refuse(self, rng: Random, comm: pycoll.Communicator) -> None:
        """Now and then offer an `out` that does not fit: the message stays where it is."""
        dtype = self.message.dtype if self.message is not None else "object"
        if rng.random() < 0.1 and dtype in oracle.ALL and math.prod(self.message.shape) > 1:
            other = "int8" if dtype != "int8" else "int16"
            small, wrong = np.zeros(1, oracle.dtype_of(dtype)), np.zeros(1 << 22, other)
            raises(pycoll.TruncationError, lambda: comm.recv(self.source, self.tag, small))
            raises(pycoll.MismatchError, lambda: comm.recv(self.source, self.tag, wrong))

    def _is_from(self, status: pycoll.Status, message: Send | None) -> bool:
        return message is not None and (status.source, status.tag) == (message.source, message.tag)

    def _check(
        self, rank: Rank, status: pycoll.Status, out: Array | None, before: Array, result: Any
    ) -> None:
        message = self.message
        if self.several:
            message = next((m for m in self.several if m.source == status.source), None)
            assert message is not None, f"step {self.number}: twice from rank {status.source}"
            self.several.remove(message)
        assert message is not None
        what = f"step {self.number}: message of step {message.number} from rank {message.source}"
        assert self._is_from(status, message), f"{what}: {status}"
        expected = value(rank, message, 0)
        if isinstance(expected, np.ndarray):
            assert status.nbytes == expected.nbytes, f"{what}: {status}"
        if out is not None:
            assert result is out, f"{what}: not its out"
            untouched(out)
            before[: expected.size] = expected.ravel()
            expected = before
        agree(rank.perturbed(result), expected, what)
        rank.keep(what, result)


@dataclass(eq=False)
class Vain(Step):
    """One rank receives, and looks for, what nobody sends."""

    dest: int
    source: int
    tag: int

    @property
    def ranks(self) -> Iterable[int]:
        return (self.team.members[self.dest],)

    def run(self, rank: Rank) -> None:
        comm = rank.comms[self.team.number]
        assert comm.iprobe(self.source, self.tag) is None, "iprobe found what was not sent"
        late = pycoll.OperationTimeout
        raises(late, lambda: comm.recv(self.source, self.tag, timeout=0.002))
        raises(late, lambda: comm.probe(self.source, self.tag, timeout=0.002))
