"""Steps of scripts/fuzz_programs, and the rank that goes through them."""

from __future__ import annotations

import asyncio
import functools
import itertools
import math
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from programs_values import Array, Random, agree, digest, size_of

import pycoll

Comm = Any

OP_TIMEOUT_S = 60.0
"""After so long an operation hangs; the error then says what each rank does."""

KEPT = 64 << 20
"""Bytes of results that a rank keeps; those that go are compared once more."""


def raises(
    error: type[Exception] | tuple[type[Exception], ...], call: Callable[[], object]
) -> None:
    """Check that a call raises."""
    try:
        result = call()
    except error:
        return
    raise AssertionError(f"gave {result!r}, and no {error}")


def timeout(rng: Random) -> dict[str, float | None]:
    """Return the argument timeout of a blocking call, of each rank another, or none."""
    seconds = None, 2 * OP_TIMEOUT_S, int(OP_TIMEOUT_S) + 1, math.inf
    return {"timeout": seconds[rng.integers(4)]} if rng.random() < 0.4 else {}


def patiently(call: Callable[..., Any], timeout: float = 0.0003) -> Any:
    """Make a call again and again, until its time suffices: it has no effect when it does not."""
    while timeout < OP_TIMEOUT_S:
        try:
            return call(timeout=timeout)
        except pycoll.OperationTimeout:
            timeout *= 3
    raise AssertionError("hangs")


class Team(NamedTuple):
    """A communicator of the program.

    Attributes:
        number: names it; 0 is the world.
        members: their ranks in the world, in order.
        shared: shared memory can serve its collectives.
        any_tag: its messages may be received with ANY_TAG; where they are not, those of several
            ranks may be received with ANY_SOURCE. With both it would not be sure what comes.
        grid: number of the grid that has it as an axis.
    """

    number: int
    members: tuple[int, ...]
    shared: bool
    any_tag: bool
    grid: int | None = None


@dataclass(eq=False)
class Step:
    """Something that some ranks do."""

    number: int
    team: Team

    @property
    def ranks(self) -> Iterable[int]:
        """The world ranks that take part."""
        return self.team.members

    def run(self, rank: Rank) -> None:
        """Do the part of one rank."""
        raise NotImplementedError


@dataclass(eq=False)
class OfOne(Step):
    """Something that one rank does."""

    rank: int

    @property
    def ranks(self) -> Iterable[int]:
        return (self.rank,)


class Pending(NamedTuple):
    """An operation that was started, and what its result must pass."""

    request: Any
    check: Callable[[Any], None]


class Rank:
    """One rank, or one thread of it, on its way through a program.

    Attributes:
        me: its rank in the world.
        comms: the communicators that are open, by number.
        pending: what was started, by step.
        persistent: request, x and out of persistent requests, by the step that made them.
    """

    def __init__(self, world: Comm, seed: tuple[int, ...], fault: int) -> None:
        self.me = world.rank
        self.comms: dict[int, Comm] = {0: world}
        self.pending: dict[int, Pending] = {}
        self.persistent: dict[int, tuple[Any, Any, Array | None]] = {}
        self._seed = seed
        self._fault = fault if self.me == 0 else 0
        self._kept: list[tuple[str, Any, int]] = []
        self._kept_nbytes = 0

    def run(self, program: list[Step]) -> None:
        """Go through the program.

        Raises:
            Exception: what went wrong, with the step in its notes.
        """
        for step in program:
            if self.me in step.ranks:
                try:
                    step.run(self)
                except BaseException as exc:
                    exc.add_note(f"in step {step.number} on rank {self.me}: {step}")
                    raise
        assert not self.pending, f"still pending: {list(self.pending)}"
        assert list(self.comms) == [0], f"still open: {list(self.comms)}"
        assert self.comms[0].iprobe() is None, "a message is left over"
        self.comms[0].barrier()  # a rank that has ended is no longer asked for messages
        self._check_kept()

    def open(self, team: Team, comm: Comm) -> None:
        """Take a new communicator."""
        place = team.members.index(self.me), len(team.members)
        assert (comm.rank, comm.size) == place, f"{comm}, but {place} was expected"
        self.comms[team.number] = comm

    def complete(self, number: int, result: Any) -> None:
        """Check the result of a request."""
        request, check = self.pending.pop(number)
        assert request.done is True, f"step {number} has a result and is not done"
        assert request.test() is True, f"step {number} has a result, but test() is false"
        agree(request.result, result, f"step {number}: the result, asked again")
        check(result)

    def keep(self, what: str, result: Any) -> None:
        """Keep a result, to see much later whether it is still the same."""
        self._kept.append((what, result, digest(result)))
        self._kept_nbytes += size_of(result)
        if self._kept_nbytes > KEPT:
            self._check_kept()

    def _check_kept(self) -> None:
        for what, value, checksum in self._kept:
            assert digest(value) == checksum, f"{what}: the result has changed later"
        self._kept.clear()
        self._kept_nbytes = 0

    def perturbed(self, result: Any) -> Any:
        """Return the result; with --fault a wrong one, once, to see that it is found."""
        if not self._fault or not isinstance(result, np.ndarray) or not result.nbytes:
            return result
        self._fault -= 1
        if self._fault:
            return result
        wrong = result.tobytes()
        return np.frombuffer(bytes([wrong[0] ^ 1]) + wrong[1:], result.dtype).reshape(result.shape)

    def random(self, *numbers: int) -> Random:
        """Return random numbers of one step."""
        return np.random.default_rng([*self._seed, *numbers])


@dataclass(eq=False)
class Make(Step):
    """Make communicators of one: split, dup, sub, split_by_host."""

    how: str
    arguments: dict[int, tuple[Any, ...]]
    teams: list[Team]

    @property
    def ranks(self) -> Iterable[int]:
        return self.arguments

    def run(self, rank: Rank) -> None:
        made = getattr(rank.comms[self.team.number], self.how)(*self.arguments[rank.me])
        team = next((team for team in self.teams if rank.me in team.members), None)
        if team is None:
            assert made is None, f"{self.how} gave {made}, not None"
        else:
            rank.open(team, made)


@dataclass(eq=False)
class MakeGrid(Step):
    """Make a grid and communicators of some of its axes."""

    made: Team
    shape: tuple[int, ...]
    names: tuple[str, ...] | None
    periodic: tuple[bool, ...]
    axes: dict[tuple[int, ...], list[Team]]

    def run(self, rank: Rank) -> None:
        grid = rank.comms[self.team.number].grid(
            self.shape, names=self.names, periodic=self.periodic
        )
        rank.open(self.made, grid)
        coords = list(map(int, np.unravel_index(grid.rank, self.shape)))
        assert list(grid.coords) == coords, f"coords are {grid.coords}, not {coords}"
        for axis, step in itertools.product(range(len(self.shape)), (1, -1, 3)):
            shift = grid.shift(self._keys((axis,))[0], step)
            expected = tuple(self._neighbour(coords, axis, by) for by in (-step, step))
            assert shift == expected, f"shift({axis}, {step}) is {shift}, not {expected}"
        for axes, teams in self.axes.items():
            line = grid.axis(*self._keys(axes))
            assert grid.axis(*self._keys(axes)) is line, "another object for the same axes"
            rank.open(next(team for team in teams if rank.me in team.members), line)

    def _keys(self, axes: tuple[int, ...]) -> tuple[Any, ...]:
        return axes if self.names is None else tuple(self.names[axis] for axis in axes)

    def _neighbour(self, coords: list[int], axis: int, by: int) -> int:
        there = coords.copy()
        there[axis] += by
        if self.periodic[axis]:
            there[axis] %= self.shape[axis]
        elif not 0 <= there[axis] < self.shape[axis]:
            return pycoll.PROC_NULL
        return int(np.ravel_multi_index(there, self.shape))


@dataclass(eq=False)
class Close(OfOne):
    """One rank closes a communicator, with a grid those of its axes: `parts` are all of them.

    What it waits for there in vain, the `doomed` receives, ends.
    """

    parts: list[int]
    doomed: list[int]

    def run(self, rank: Rank) -> None:
        for number in self.parts:
            assert rank.comms[number].iprobe() is None, "a message is left over"
        comm = rank.comms[self.team.number]
        for number in self.parts:
            del rank.comms[number]
        comm.close()
        comm.close()
        raises(pycoll.Error, lambda: comm.send(1, 0))
        raises(pycoll.Error, lambda: comm.isend(1, 0))
        for receive in [rank.pending.pop(number).request for number in self.doomed]:
            assert receive.test() is True, "a receive goes on, but its communicator is closed"
            raises(pycoll.Error, functools.partial(receive.wait, timeout=1.0))


@dataclass(eq=False)
class Wait(OfOne):
    """One rank waits for requests of some steps, in some form."""

    requests: list[int]
    form: str

    def run(self, rank: Rank) -> None:
        requests = [rank.pending[number].request for number in self.requests]
        for index, result in getattr(self, f"_{self.form}")(requests):
            rank.complete(self.requests[index], result)
        left = [number for number in self.requests if number in rank.pending]
        assert not left, f"{self.form} did not give the results of steps {left}"

    def _wait(self, requests: list[Any]) -> Iterable[tuple[int, Any]]:
        return ((index, request.wait()) for index, request in enumerate(requests))

    def _wait_all(self, requests: list[Any]) -> Iterable[tuple[int, Any]]:
        return enumerate(pycoll.wait_all(requests))

    def _wait_any(self, requests: list[Any]) -> Iterable[tuple[int, Any]]:
        for _ in requests:
            yield pycoll.wait_any(requests)
        raises(ValueError, lambda: pycoll.wait_any(requests))

    def _wait_some(self, requests: list[Any]) -> Iterable[tuple[int, Any]]:
        given = 0
        while given < len(requests):
            indices, results = pycoll.wait_some(requests)
            assert indices, "wait_some gave nothing"
            given += len(indices)
            yield from zip(indices, results, strict=True)
        raises(ValueError, lambda: pycoll.wait_some(requests))

    def _test(self, requests: list[Any]) -> Iterable[tuple[int, Any]]:
        waiting = dict(enumerate(requests))
        deadline = time.monotonic() + OP_TIMEOUT_S
        while waiting:
            assert time.monotonic() < deadline, f"test() is false for {OP_TIMEOUT_S} s"
            for index in [index for index, request in waiting.items() if request.test()]:
                yield index, waiting.pop(index).result
            os.sched_yield()

    def _await(self, requests: list[Any]) -> Iterable[tuple[int, Any]]:
        async def one(request: Any) -> Any:
            return await request

        async def every() -> list[Any]:
            return await asyncio.gather(*map(one, requests))

        return enumerate(asyncio.run(every()))

    def _await_late(self, requests: list[Any]) -> Iterable[tuple[int, Any]]:
        """An await that is cancelled leaves the request as it was, too."""

        async def one(request: Any) -> Any:
            return await request

        async def every() -> None:
            tasks = [asyncio.ensure_future(one(request)) for request in requests]
            await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run(every())
        return self._await(requests)

    def _threads(self, requests: list[Any]) -> Iterable[tuple[int, Any]]:
        """Wait in several threads at once."""
        with ThreadPoolExecutor(4) as pool:
            return list(enumerate(pool.map(lambda request: request.wait(), requests)))

    def _timeout(self, requests: list[Any]) -> Iterable[tuple[int, Any]]:
        """A wait that times out leaves the request as it was."""
        for index, request in enumerate(requests):
            yield index, patiently(request.wait)


@dataclass(eq=False)
class Touch(OfOne):
    """One rank tests a request, or looks at one that cannot be done yet; or cancels that one."""

    request: int
    how: str

    def run(self, rank: Rank) -> None:
        request = rank.pending[self.request].request
        if self.how == "test":
            assert request.test() in (True, False), repr(request)
            return
        assert request.test() is False, "nothing was sent, but test() is true"
        raises(pycoll.Error, lambda: request.result)
        if self.how == "pending":
            raises(pycoll.OperationTimeout, lambda: request.wait(timeout=0.002))
        else:
            assert request.cancel() is True, "nothing was sent, but cancel() is false"
            raises(pycoll.Error, lambda: request.wait(timeout=1.0))
            raises(pycoll.Error, lambda: request.result)
            del rank.pending[self.request]


@dataclass(eq=False)
class Drop(OfOne):
    """One rank forgets a request, which goes on all the same."""

    request: int

    def run(self, rank: Rank) -> None:
        del rank.pending[self.request]


@dataclass(eq=False)
class Wrong(OfOne):
    """One rank makes a wrong call: it is refused, and does not count."""

    def run(self, rank: Rank) -> None:
        comm, x = rank.comms[self.team.number], np.ones((len(self.team.members) + 1, 2))
        wrong: tuple[Callable[[], object], ...] = (
            lambda: comm.iall_reduce(x, "mean"),
            lambda: comm.iall_reduce(x, out=x[1:]),
            lambda: comm.ibroadcast(x, root=comm.size),
            lambda: comm.ireduce_scatter(x),
            lambda: comm.iall_to_allv([x]) if comm.size > 1 else comm.iall_to_allv([x, x]),
            lambda: comm.reduce_scatterv(x, [1] * comm.size),
            lambda: comm.isend(x, comm.size),
            lambda: comm.irecv(0, -7),
            lambda: comm.persistent.all_gather(x, algorithm="quick"),
            lambda: pycoll.wait_any([]),
            lambda: comm.all_gather(x, out=x),
            lambda: comm.send(os.scandir(), 0),
            lambda: comm.barrier(timeout=-1.0),
        )
        call = wrong[int(rank.random(self.number).integers(len(wrong)))]
        raises((TypeError, ValueError), call)


@dataclass(eq=False)
class Mismatch(Step):
    """One rank makes another call than the others, on a communicator made for that."""

    odd: int

    def run(self, rank: Rank) -> None:
        calls: tuple[Callable[[Comm], object], ...] = (
            lambda c: c.barrier(),
            lambda c: c.all_reduce(1.0),
            lambda c: c.all_reduce(1.0, "max"),
            lambda c: c.all_gather(np.ones(3)),
            lambda c: c.all_gather("object"),
            lambda c: c.broadcast(1, root=c.size - 1),
            lambda c: c.gather(np.ones(2), root=0),
            lambda c: c.reduce(np.ones(100_000), root=c.size - 1),
        )
        first, second = rank.random(self.number).choice(len(calls), 2, replace=False)
        error = None
        with rank.comms[self.team.number].dup() as broken:
            try:
                calls[first if rank.me == self.odd else second](broken)
                broken.barrier()
            except pycoll.MismatchError as exc:
                error = exc
        assert f"rank {self.odd}: " in str(error), f"calls {first} and {second} gave {error}"


@dataclass(eq=False)
class Compute(OfOne):
    """One rank is busy with something else."""

    how: str
    times: int

    def run(self, rank: Rank) -> None:
        square = np.ones((120, 120))
        for _ in range(self.times):  # a millisecond or two each
            if self.how == "numpy":
                for _ in range(20):
                    square = square @ square / 120
            else:
                sum(number * number for number in range(30_000))
