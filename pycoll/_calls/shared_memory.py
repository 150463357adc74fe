"""The algorithm `shared_memory`: collectives of ranks on one host, run by the core in C.

A `ShmComm` is a communicator's part of it. Its calls block, and hold no lock of the engine's while
they wait: the core spins and yields for some milliseconds, then calls `_sleep` here, where the
engine sleeps on everything that can wake this rank, and looks at deadlines, failures and Ctrl-C.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from pycoll._arrays import conversion, operators
from pycoll._calls import packings
from pycoll._runtime.communicators import raise_error
from pycoll._runtime.context import Context
from pycoll._runtime.engine import Engine, SharedMemory, left_without
from pycoll._runtime.envelope import different_calls
from pycoll._runtime.task import Call, caller, caller_or_thread
from pycoll._runtime.waits import EVERYBODY, Options, needed
from pycoll._selection.agreed import SHARED_MEMORY
from pycoll._support.lazy_import import LazyModule
from pycoll._support.weak import weakly
from pycoll._support.wording import whole_text
from pycoll._transports._core import KINDS, METHODS, OPS, PARTS, UNEVEN
from pycoll.errors import Error, MismatchError

if TYPE_CHECKING:
    from pycoll import _dtypes as dtypes
    from pycoll import schedules
    from pycoll._cuda.copies import GpuCopy
else:
    dtypes = LazyModule("pycoll._dtypes")
    schedules = LazyModule("pycoll.schedules")

R = TypeVar("R")

BY_MESSAGES = object()
"""What a call in the core returns instead of a result: take the way over messages."""

COMPARISON_S = 1.0
"""Seconds that a mismatch waits for the other rank to show its call."""

MANY_COUNTS = 16
"""A call's text shows so many counts; of more, their checksum."""

SLEEP_S = 0.1
"""Longest sleep between two looks at what a wait is for."""


class ShmComm:
    """The shared memory of one communicator, as the C core uses it for collectives.

    Args:
        engine: this rank's; waits sleep in it.
        context: of the communicator; all its ranks are on this host.
        memory: of this host.

    Attributes:
        core: the compiled object; its methods are the fast path for NumPy arrays.
    """

    def __init__(self, engine: Engine, context: Context, memory: SharedMemory) -> None:
        from pycoll._transports._core import Comm

        self._engine = engine
        self._context = context
        self._host = memory.host
        self._single_copy = memory.single_copy
        self._call: Call | None = None
        self._reported = 0
        self._seen = -1
        self.core = Comm(
            memory.host,
            context.ident,
            context.members.index(engine.rank),
            [memory.ranks.index(rank) for rank in context.members],
            weakly(self._sleep),
            weakly(self._mismatch),
            weakly(self._give_up),
        )

    @property
    def rank(self) -> int:
        """This process's rank in the communicator."""
        return self._context.members.index(self._engine.rank)

    @property
    def engine(self) -> Engine:
        """The engine under whose lock copies end, and in which this rank sleeps."""
        return self._engine

    @property
    def size(self) -> int:
        """Number of its ranks."""
        return len(self._context.members)

    @property
    def number(self) -> int:
        """Number of calls made by the communicator's user."""
        return self.core.number - self.core.internal

    def run(self, call: Call, timeout: float, steps: Callable[[ShmComm], R]) -> R:
        """Run a call to its end: `steps`, given this, calls the core."""
        if self._call is not None or not self.core.claim(timeout):
            raise Error(
                f"{call.text}: another thread is in a collective of this communicator; "
                "collectives of one communicator come from one thread at a time"
            )
        try:
            return self._run(call, partial(steps, self))
        finally:
            self.core.release()

    def _run(self, call: Call, steps: Callable[[], R]) -> R:
        engine, context = self._engine, self._context
        if not self.core.ready:
            try:
                engine.look(context)
            except Error:
                raise  # the call was not made
            except BaseException as exc:
                engine.give_up(call, exc)
                raise
        try:
            self._call = call
            while not self.core.attached:
                self._attach()
            result = steps()
        except BaseException as exc:
            engine.give_up(call, exc)
            raise
        finally:
            self._call = None
        self.core.allow(context.broken is None)
        return result

    def _attach(self) -> None:
        """Meet the other ranks in shared memory, unless that must be tried again."""
        try:
            self.core.attach(self._single_copy)
        except BlockingIOError:  # a rank has failed: with the lock that this needs, or not
            self._engine.nap(self._await_verdict)

    def _await_verdict(self) -> float:
        self._host.see_failure()
        self._engine.check(self._context)
        return time.monotonic() + SLEEP_S

    def wait(self, copy: GpuCopy) -> None:
        """Wait, in a call, until a copy is done.

        Raises:
            Error: it has failed, or the call may take no longer.
        """
        copy.watch()
        while not copy.done:
            self._engine.nap(lambda: self._await_copy(copy))
        if copy.error is not None:
            raise copy.error

    def _await_copy(self, copy: GpuCopy) -> float:
        self._host.see_failure()
        now = time.monotonic()
        self._engine.check(self._context)
        deadline = self.core.deadline
        if now >= deadline and not copy.done and self._call is not None:
            raise self._engine.timeout(self._call)
        return 0.0 if copy.done else min(now + SLEEP_S, deadline)

    def barrier(self, salt: int = 0) -> None:
        """Return when every rank has entered; `salt` as of `part_of`."""
        self.core.run(KINDS.index("barrier"), 0, 0, 0, (), salt, None, None, 0)

    def tell(self, mine: bytes) -> list[bytes]:
        """Tell all ranks some bytes, in a call; returns those of all, by rank."""
        length, rows = len(mine), bytearray(len(mine) * self.size)
        code = dtypes.UINT8.code
        kind = KINDS.index("all_gather")
        self.core.run(kind, code, 0, 0, (length,), 0, mine, rows, length)
        return [bytes(rows[i * length : (i + 1) * length]) for i in range(self.size)]

    def refuse(self) -> None:
        """Make every later call look at the engine first."""
        self.core.allow(False)

    def differing(self) -> MismatchError | None:
        """Return how a call of another rank differs from this one's, as far as can be seen now."""
        found = self.core.differing()
        if found is None:
            return None
        peer, number, mine, theirs = found
        return self._different_calls(number, _call_text(*mine), peer, _call_text(*theirs))

    @property
    def taken_nbytes(self) -> int:
        """Bytes of memory that it takes, of all ranks together."""
        return self.core.taken_nbytes

    def close(self) -> None:
        """Give the shared memory back, unless a call is under way."""
        self.core.close()

    # --- what the core calls ---------------------------------------------------------------

    def _give_up(self, described: tuple[Any, ...], error: BaseException) -> None:
        """Break the communicator, whose call ends with `error`."""
        self._engine.give_up(self._call or self._described(described), error)

    def _sleep(self, described: tuple[Any, ...], peer: int, waited_s: float, last: int) -> bool:
        """Sleep until something has happened, or a while has passed.

        Returns whether the rank waited for has ended: then what it did last must be here. With
        `peer` -1 the wait is over.
        """
        if peer < 0:
            self._seen = -1
            self._end_report()
            return False
        try:
            seen = self._engine.nap(lambda: self._look(described, peer, waited_s, last), self._seen)
        except BaseException as exc:
            self._seen = -1
            try:
                self._engine.give_up(self._call or self._described(described), exc)
            finally:
                self._end_report()
            raise
        self._seen = -1 if seen is None else seen
        return seen is None

    def _look(
        self, described: tuple[Any, ...], peer: int, waited_s: float, last: int
    ) -> float | None:
        """Raise what ends the wait; return until when to sleep, None: `peer` has ended."""
        self._host.see_failure()
        context, now = self._context, time.monotonic()
        kind, number = described[1], described[5]
        call = self._call
        if context.has_left:
            call = call or self._described(described)
            context.compare_all_left(call.number + 1, call.text)
        self._engine.check(context)
        for world, error in context.gone.items():
            rank = context.members.index(world)
            if rank != peer and KINDS[kind] not in EVERYBODY:
                continue
            if self.core.entered(rank) < number:
                raise_error(left_without(error, call or self._described(described)))
            if last:
                raise_error(error)
            if rank == peer:
                return None
        call, deadline = call or self._described(described), self.core.deadline
        if now >= deadline:
            self._report(call, waited_s, number, peer)
            raise self._engine.timeout(call)
        until = min(now + SLEEP_S, deadline)
        report_after_s = self._engine.waits.report_after_s
        if waited_s < report_after_s:
            until = min(until, now + report_after_s - waited_s)
            if waited_s < SLEEP_S:  # the first sleep of this wait
                self._host.set_status(f"{call} at {caller_or_thread()}, since {now - waited_s:.3f}")
        else:
            self._report(call, waited_s, number, peer)
        return until

    def _report(self, call: Call, waited_s: float, number: int = 0, peer: int = -1) -> None:
        """Tell the launcher, once, that this rank waits for `peer` in the core's call `number`."""
        if self._reported:
            return

        def options() -> Options:
            context = self._context
            mine = context.members.index(self._engine.rank)
            late = {context.members[rank] for rank in needed(call, mine)}
            late.add(context.members[peer])
            if self.core.attached:
                members = enumerate(context.members)
                late -= {world for rank, world in members if self.core.entered(rank) >= number}
            return [[(context.ident, call.number, sorted(late))]] if late else []

        ends = self.core.deadline != math.inf
        self._reported = self._engine.waits.begin(call, waited_s, ends, options)

    def _end_report(self) -> None:
        wait, self._reported = self._reported, 0
        if wait:
            self._engine.running(wait)

    def _mismatch(
        self,
        described: tuple[Any, ...],
        peer: int,
        number: int,
        mine: tuple[int, tuple[int, ...]],
        theirs: tuple[int, tuple[int, ...]],
    ) -> None:
        """Raise the error for a call that differs from that of `peer`.

        Args:
            described: this call.
            peer: the rank here.
            number: of the calls that differ: this one, or an earlier one, which it has left.
            mine, theirs: their signatures and shapes.
        """
        engine, context = self._engine, self._context
        call = self._call or self._described(described)
        shown = f"{call.text} at {caller()}" if number == described[5] else _call_text(*mine)
        error = self._different_calls(number, shown, peer, _call_text(*theirs))
        if number == described[5]:
            # The other rank shows its call, with the line, if it is still in it: the launcher
            # compares the two, and tells all.
            until = time.monotonic() + COMPARISON_S
            try:
                engine.nap(lambda: self._show(call))
                while time.monotonic() < until and context.broken is None:
                    engine.nap(lambda: until if context.broken is None else 0.0)
            except BaseException as exc:
                engine.give_up(call, exc)
                raise
            finally:
                self._end_report()
        engine.give_up(call, error)
        engine.check(context)

    def _different_calls(self, number: int, mine: str, peer: int, theirs: str) -> MismatchError:
        order = self._context.next_number + number - self.core.internal - 1
        members = self._context.members
        name = self._context.name
        return different_calls(name, order, self._engine.rank, mine, members[peer], theirs)

    def _show(self, call: Call) -> float:
        self._report(call, 0.0)
        return 0.0

    def _described(self, described: tuple[Any, ...]) -> Call:
        """Return a call of the fast path, from what the core kept of it."""
        method, _, x, op, root, number, counts = described
        collective = METHODS[method]
        order = self._context.next_number + max(0, number - self.core.internal - 1)
        if collective == "all_reduce_many":
            return Call(x, order, self._context)
        words = []
        value = conversion.wrap(x) if x is not None else None
        if value is not None and collective not in ("broadcast", "scatter", "scatterv"):
            shape = "" if collective in UNEVEN else list(value.array.shape)
            words.append(f"{value.dtype}{shape}")
        if value is None and collective in ("gather", "all_gather", "all_to_all"):
            words.append("object")
        packing = packings.packing_of(x) if collective in schedules.REDUCING else None
        if packing is not None:
            words.append(packing.text)
        if counts is not None:
            words.append(counts_text(counts))
        if op is not None and not isinstance(op, str):
            op = operators.resolve(op).signature
        return Call(_text(collective, words, op or "sum", root), order, self._context)


def part_of(whole: str, text: str) -> int:
    """Return the salt of a call in the core which is a part of another one.

    Args:
        whole: one of PARTS.
        text: must be the same on all ranks.
    """
    return PARTS.index(whole) << 32 | zlib.crc32(text.encode())


def counts_text(counts: Sequence[int]) -> str:
    """Return the counts of a reduce_scatterv as its text shows them."""
    if len(counts) <= MANY_COUNTS:
        return f"counts={list(counts)}"
    return f"counts={len(counts)} with checksum {zlib.crc32(str(counts).encode()):08x}"


def _call_text(signature: int, shape: tuple[int, ...]) -> str:
    """Return what is known of a call whose rank has left it."""
    kind, op, code = signature & 15, signature >> 4 & 15, signature >> 8 & 31
    if kind >= len(KINDS):
        return "another collective"
    collective, root = KINDS[kind], signature >> 13 & 0xFFFF
    part = signature >> 29 & 7
    if part:
        return whole_text(PARTS[part] if part < len(PARTS) else "", collective, root)
    dtype = next((dtype for dtype in dtypes.TABLE if dtype.code == code), None)
    words = [f"{dtype}{list(shape)}"] if dtype is not None else []
    if dtype is None and collective in ("gather", "all_gather", "all_to_all"):
        words = [f"another dtype{list(shape)}"]
    return _text(collective, words, OPS[op] if op < len(OPS) else "?", root)


def _text(collective: str, words: list[str], op: str, root: int) -> str:
    """Return a call as the communicator shows it; `words`: the type of the array."""
    reduces = collective in schedules.REDUCING or collective == "reduce_scatterv"
    if reduces:
        words.append(f"op={op}, algorithm={SHARED_MEMORY}")
    if collective in schedules.ROOTED or collective in ("gatherv", "scatterv"):
        words.append(f"root={root}")
    is_said = reduces or "object" in words or collective in ("broadcast", "scatter", *UNEVEN)
    if not is_said:
        words.append(f"algorithm={SHARED_MEMORY}")
    return f"{collective}({', '.join(words)})"
