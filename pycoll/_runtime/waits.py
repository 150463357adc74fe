"""What the threads of this rank wait in, for the launcher: it compares calls, and tells who waits.

A wait is told when it has lasted a moment. The launcher may then ask for more ("look"): for which
other ranks it waits, and whether anything else in this process could still help them. Of that it
concludes whether ranks wait for each other for ever (`launcher.deadlock`).
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

from pycoll._rendezvous.client import Client as Control
from pycoll._rendezvous.wire import AGREES
from pycoll._runtime.agreement import Agreement
from pycoll._runtime.task import Call, Several, caller, caller_or_thread
from pycoll._support.environment import warn_after
from pycoll._transports.base import Operation

Need = tuple[int, int, list[int]]
"""A communicator, the number of a collective call on it, -1 or AGREES, and ranks: see
`deadlock.Need`."""

Options = list[list[Need]]
"""What a wait needs: all of one of these. Empty: that is not known."""

_REPORT_AFTER_S = 0.2
"""A wait that lasts this long is told to the launcher."""

_OF_PYZMQ = "GarbageCollectorThread"
"""The class of a thread that only frees what was sent."""

_MAX_NEEDS = 16
"""Of a wait for more requests than that, the launcher is not told what each needs."""

EVERYBODY = frozenset(
    {
        *("barrier", "all_reduce", "all_reduce_many", "all_gather", "all_gatherv"),
        *("reduce_scatter", "all_to_all", "all_to_allv"),
        *("dup", "split", "split_by_host", "grid", "share"),
    }
)
"""Collectives in which every rank needs every other. In a reduce_scatterv a rank whose count is 0
does not."""

_FROM_ROOT = frozenset({"broadcast", "scatter", "scatterv"})
_TO_ROOT = frozenset({"reduce", "gather", "gatherv"})
_FROM_BELOW = frozenset({"scan", "exscan"})


class Wait(NamedTuple):
    """A wait of one thread that was told to the launcher.

    Attributes:
        serial: counts the waits of this process.
        thread: which waits.
        post: what was told.
        since: of time.monotonic().
        options: returns what it needs now.
        ends: it has a deadline.
    """

    serial: int
    thread: int
    post: dict[str, Any]
    since: float
    options: Callable[[], Options]
    ends: bool


class Waits:
    """The waits of one rank; its owner, the engine, has the lock.

    Args:
        control: the connection to the launcher; None: this process is alone, and says itself when
            it has waited long.
        num_started: returns of a communicator how many collective calls this rank has started.
        is_quiet: returns whether nothing is on its way from or to this rank, as far as it knows.
        own_thread: returns the core's own thread, by its number.

    Attributes:
        report_after_s: a wait that has lasted this long is to be told by `begin`.
    """

    def __init__(
        self,
        control: Control | None,
        num_started: Callable[[int], int],
        is_quiet: Callable[[], bool],
        own_thread: Callable[[], int],
    ) -> None:
        self._control, self._num_started, self._is_quiet = control, num_started, is_quiet
        self._own_thread = own_thread
        self.report_after_s = _REPORT_AFTER_S if control else warn_after(os.environ) or math.inf
        self._serials = itertools.count(1)
        self._waits: dict[int, Wait] = {}

    def begin(self, call: Call, waited_s: float, ends: bool, options: Callable[[], Options]) -> int:
        """Tell the launcher what a thread waits in; returns a number for `end`."""
        serial = next(self._serials)
        if self._control is None:
            if waited_s >= self.report_after_s and sys.stderr is not None:
                with contextlib.suppress(OSError, ValueError):  # standard error is closed
                    print(
                        f"pycoll: {call} at {caller()} has waited for {waited_s:.0f} s, but this "
                        "process is alone: nobody sends to it, or receives from it",
                        file=sys.stderr,
                        flush=True,
                    )
            return serial
        post = {
            "context": call.context.ident,
            "number": call.number,
            "call": call.text,
            "where": caller_or_thread(),
            "made": call.context.place_of(call.text, call.number),
            "members": list(call.context.members),
            "name": call.context.name,
            "serial": serial,
        }
        since = time.monotonic() - waited_s
        self._waits[serial] = Wait(serial, threading.get_ident(), post, since, options, ends)
        self._control.post("waiting", waited_s=waited_s, **post)
        return serial

    def end(self, serial: int) -> None:
        """Tell the launcher that this wait is over, and which other one goes on."""
        if self._control is None or self._waits.pop(serial, None) is None:
            return
        last = next(reversed(self._waits.values()), None)
        if last is None:
            self._control.post("running")
        else:
            self._control.post("waiting", waited_s=time.monotonic() - last.since, **last.post)

    def answer(self, number: int, asked: Iterable[int]) -> None:
        """Tell the launcher more of what this rank waits in, for its look number `number`.

        Args:
            number: of the look.
            asked: communicators of which it wants to know how many collectives have started.
        """
        wait = next(reversed(self._waits.values()), None)
        if self._control is None or wait is None:
            return
        options = [_once(option) for option in wait.options()]
        if len(options) > _MAX_NEEDS or any(len(option) > _MAX_NEEDS for option in options):
            options = []
        self._control.post(
            "seen",
            round=number,
            serial=wait.serial,
            call=(wait.post["context"], wait.post["number"]),
            options=options,
            started=[(ident, self._num_started(ident)) for ident in asked],
            quiet=len(self._waits) == 1 and self._is_quiet(),
            threads=self._num_other_threads(wait),
            ends=wait.ends or _has_alarm(),
        )

    def _num_other_threads(self, wait: Wait) -> int:
        """Threads that may communicate, beside the one that waits.

        Python knows the core's thread, too, once something that runs there has asked which thread
        it is, such as an operator that logs.
        """
        known = {wait.thread, self._own_thread()}
        return sum(
            not thread.name.startswith("pycoll") and type(thread).__name__ != _OF_PYZMQ
            for thread in threading.enumerate()
            if thread.ident not in known
        )


def _has_alarm() -> bool:
    """Whether a signal will come whose handler may raise, which ends any wait."""
    return signal.getitimer(signal.ITIMER_REAL)[0] > 0


def needed(call: Call, rank: int) -> Collection[int]:
    """Return the ranks of its communicator that must start a collective before `rank` can end it.

    Those that are certain; the text of the call tells.
    """
    name, _, arguments = call.text.partition("(")
    size = len(call.context.members)
    name = name.removeprefix("i")
    others = [other for other in range(size) if other != rank]
    if name in EVERYBODY:
        return others
    if name in _FROM_BELOW:
        return range(rank)
    if name in _FROM_ROOT or name in _TO_ROOT:
        root = int(arguments.rpartition("root=")[2].partition(",")[0].rstrip(")"))
        if name in _TO_ROOT:
            return others if rank == root else ()
        return [root] if rank != root else ()
    return ()


def options_of(operation: Operation, call: Call) -> Options:
    """Return what must happen elsewhere before an operation, which `call` waits for, is done."""
    if isinstance(operation, Several):
        each = [_needs(call, awaited) for call, awaited in operation.calls()]
        if operation.needed < len(each):
            return each if all(each) else []
        return [[need for needs in each for need in needs]]
    if isinstance(operation, Agreement):
        return [[(call.context.ident, AGREES, sorted(operation.awaited()))]]
    needs = _needs(call, operation.awaited())
    return [needs] if needs else []


def _once(needs: list[Need]) -> list[Need]:
    """Leave out what is needed twice, as by two receives from one rank."""
    different = {(ident, number, *ranks): (ident, number, ranks) for ident, number, ranks in needs}
    return list(different.values())


def _needs(call: Call, awaited: Collection[int]) -> list[Need]:
    context, ranks = call.context, set(awaited)
    if call.number >= 0:
        rank = context.members.index(context.me)
        ranks |= {context.members[other] for other in needed(call, rank)}
    return [(context.ident, call.number, sorted(ranks))] if ranks else []
