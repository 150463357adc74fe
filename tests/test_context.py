"""Matching: which message a receive gets, and that thousands of either do not slow it down."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from random import Random
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import exhaustive

from pycoll.context import (
    ANY,
    COLLECTIVE,
    HISTORY,
    KIND_COLLECTIVE,
    KIND_P2P,
    P2P,
    Context,
    Match,
)
from pycoll.errors import Error, MismatchError, PeerFailed
from pycoll.matching import Queues
from pycoll.transports.base import Arrival, Transfer

IDENT = 7
ME = 0
RANKS = (0, 1, 2)
TAGS = (0, 1, 2)


class Came(Arrival):
    """A message that is buffered, and empty.

    To compare two costs bytecodes, also where compiled code does it: `work` counts these.
    """

    __slots__ = ("released",)

    def __init__(self, peer: int, header: bytes) -> None:
        super().__init__(peer, header, 0, memoryview(b""))
        self.released = False

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def accept(self, into: memoryview) -> Transfer:
        raise AssertionError("matching does not look into messages")

    def release(self) -> None:
        assert not self.released
        self.released = True


def message(source: int, tag: int) -> Came:
    return Came(source, P2P.pack(KIND_P2P, IDENT, tag, False))


def part(number: int, call: bytes = b"barrier()") -> Came:
    """A message of a collective."""
    return Came(1, COLLECTIVE.pack(KIND_COLLECTIVE, IDENT, number, 0, 0) + call)


class Short:
    """The compiled core's short way, which is told how many wait."""

    usable = True
    queued = 0


def made() -> Context:
    return Context(IDENT, RANKS, ME)


# ---------------------------------------------------------------- which message a receive gets


class Model:
    """Matching by searching lists.

    Messages and receives are known by their numbers, in the order in which they were made.

    Attributes:
        outcome: of each receive: the message it got, "gone", or None: it waits or was cancelled.
        held: messages that a receive has taken.
    """

    def __init__(self) -> None:
        self.came: list[tuple[int, int]] = []
        self.queue: list[int] = []
        self.held: list[int] = []
        self.posted: list[tuple[int, int, bool]] = []
        self.waiting: list[int] = []
        self.outcome: list[int | str | None] = []
        self.gone: set[int] = set()

    def find(self, source: int, tag: int) -> int | None:
        fitting = (m for m in self.queue if fits((source, tag), self.came[m]))
        return next(fitting, None)

    def arrive(self, source: int, tag: int) -> None:
        self.came.append((source, tag))
        self.place(len(self.came) - 1)

    def place(self, number: int) -> None:
        for receive in list(self.waiting):
            source, tag, peek = self.posted[receive]
            if fits((source, tag), self.came[number]):
                self.waiting.remove(receive)
                self.outcome[receive] = number
                if not peek:
                    self.held.append(number)
                    return
        self.queue = sorted([*self.queue, number])

    def match(self, source: int, tag: int, peek: bool) -> None:
        self.posted.append((source, tag, peek))
        self.outcome.append(self.find(source, tag))
        number = self.outcome[-1]
        if isinstance(number, int):
            if not peek:
                self.queue.remove(number)
                self.held.append(number)
        elif self.is_hopeless(source):
            self.outcome[-1] = "gone"
        else:
            self.waiting.append(len(self.posted) - 1)

    def is_hopeless(self, source: int) -> bool:
        return source in self.gone or (source == ANY and {ME, *self.gone} == set(RANKS))

    def lose(self, rank: int) -> None:
        self.gone.add(rank)
        for receive in list(self.waiting):
            if self.is_hopeless(self.posted[receive][0]):
                self.waiting.remove(receive)
                self.outcome[receive] = "gone"


def fits(pattern: tuple[int, int], came: tuple[int, int]) -> bool:
    return all(asked in (ANY, is_) for asked, is_ in zip(pattern, came, strict=True))


class Both:
    """A context and the model, doing the same."""

    def __init__(self) -> None:
        self.context = made()
        self.short = self.context.short = Short()
        self.model = Model()
        self.arrivals: list[Came] = []
        self.number: dict[Arrival, int] = {}
        self.matches: list[Match] = []

    def do(self, step: tuple[Any, ...]) -> None:
        context, model = self.context, self.model
        match step:
            case "arrive", source, tag:
                self.arrivals.append(message(source, tag))
                self.number[self.arrivals[-1]] = len(self.arrivals) - 1
                context.arrived(self.arrivals[-1])
                model.arrive(source, tag)
            case "match", source, tag, peek:
                self.matches.append(context.match(source, tag, peek))
                model.match(source, tag, peek)
            case "cancel", pick if model.waiting:
                self.matches[model.waiting.pop(pick % len(model.waiting))].cancel()
            case "withdraw", pick if self.arrivals:
                number = pick % len(self.arrivals)
                is_here = number in model.queue
                assert context.withdrawn(self.arrivals[number]) == is_here
                if is_here:
                    model.queue.remove(number)
            case ("put back" | "park") as how, pick if model.held:
                number = model.held.pop(pick % len(model.held))
                taken = self.matches[model.outcome.index(number)].message
                assert taken is not None
                if how == "park":  # it goes on under another arrival
                    self.arrivals[number] = message(taken.source, taken.tag)
                    self.number[self.arrivals[number]] = number
                context.put_back(taken._replace(arrival=self.arrivals[number]))
                model.place(number)
            case "lose", rank:
                context.peer_gone(rank, PeerFailed(rank, "ended"))
                model.lose(rank)

    def compare(self) -> None:
        for match, outcome in zip(self.matches, self.model.outcome, strict=True):
            assert match.done == (outcome is not None)
            assert isinstance(match.error, PeerFailed) == (outcome == "gone")
            if isinstance(outcome, int):
                assert match.message is not None
                assert self.number[match.message.arrival] == outcome
        for source in (ANY, *RANKS):
            for tag in (ANY, *TAGS):
                found = self.context.find(source, tag)
                number = None if found is None else self.number[found.arrival]
                assert number == self.model.find(source, tag)
        assert self.short.queued == len(self.model.queue) + len(self.model.waiting)


sources, tags = st.sampled_from(RANKS), st.sampled_from(TAGS)
arriving = st.tuples(st.just("arrive"), sources, tags)
matching = st.tuples(
    st.just("match"), st.sampled_from((ANY, *RANKS)), st.sampled_from((ANY, *TAGS)), st.booleans()
)
changing = st.tuples(
    st.sampled_from(["cancel", "withdraw", "put back", "park"]), st.integers(0, 1000)
)
losing = st.tuples(st.just("lose"), st.sampled_from([1, 2]))


@settings(deadline=None, max_examples=300)
@given(st.lists(arriving | matching | changing | losing, max_size=80))
def test_receives_get_the_messages_that_a_search_would_find(steps: list[tuple[Any, ...]]) -> None:
    both = Both()
    for step in steps:
        both.do(step)
        both.compare()
    broken = Error("broken")
    both.context.fail(broken)
    for receive in both.model.waiting:
        assert both.matches[receive].error is broken
    queued = {both.arrivals[number] for number in both.model.queue}
    assert {arrival for arrival in both.number if arrival.released} == queued


@pytest.mark.parametrize("seed", range(5))
def test_so_they_do_where_many_messages_and_receives_wait(seed: int) -> None:
    # Far more than the queues keep of what was removed from them.
    random = Random(seed)
    both = Both()
    for count in range(1000):
        change = random.choice(["cancel", "withdraw", "put back", "park"])
        step: tuple[Any, ...] = (change, random.randrange(1000))
        if random.random() < 0.8:
            side = "arrive" if random.random() < 0.5 else "match"
            # Patterns that seldom fit: both sides pile up.
            source, tag = random.choice(RANKS), random.randrange(40)
            step = (side, source, tag)
            if side == "match":
                source = random.choice([ANY, source, source, source])
                step = (side, source, ANY if random.random() < 0.02 else tag, random.random() < 0.2)
        both.do(step)
        if count % 10 == 0:
            both.compare()


def test_a_receive_posted_when_a_probe_is_told_gets_the_message() -> None:
    context = made()
    received: list[Match] = []
    probe = context.match(ANY, ANY, peek=True)
    probe.then(lambda done: received.append(context.match(1, 5)))
    context.arrived(message(1, 5))
    assert received[0].message is probe.message is not None
    assert context.find(ANY, ANY) is None


def test_a_receive_posted_when_a_probe_is_told_stands_behind_the_others() -> None:
    context = made()
    later: list[Match] = []
    probe = context.match(ANY, ANY, peek=True)
    probe.then(lambda done: later.append(context.match(1, 5)))
    earlier = context.match(1, ANY)
    context.arrived(message(1, 5))
    assert earlier.message is probe.message is not None
    assert not later[0].done


def test_a_receive_given_up_while_another_is_told_can_put_the_message_back() -> None:
    context = made()
    probe = context.match(ANY, ANY, peek=True)
    receive = context.match(1, ANY)

    def give_up(done: object) -> None:
        receive.cancel()
        assert receive.message is not None
        context.put_back(receive.message)

    probe.then(give_up)
    context.arrived(message(1, 5))
    assert context.match(ANY, 5).message is probe.message is not None


def test_a_message_put_back_after_the_failure_is_dropped() -> None:
    context = made()
    arrival = message(1, 5)
    context.arrived(arrival)
    taken = context.match(1, 5).message
    assert taken is not None
    context.fail(Error("broken"))
    assert not arrival.released
    context.put_back(taken)
    assert arrival.released


@pytest.mark.parametrize("closing", [True, False])
def test_a_sender_that_waits_is_let_go_by_closing_and_not_by_a_failure(closing: bool) -> None:
    context = made()
    before, later = message(1, 5), message(1, 6)
    for arrival in before, later:
        arrival.payload = None  # it waits at its sender
    context.arrived(before)
    if closing:
        context.close()
    else:
        context.fail(Error("broken"))
    context.arrived(later)
    assert (before.released, later.released) == (closing, closing)


# ---------------------------------------------------------------- collectives


def test_of_calls_that_end_in_any_order_the_last_to_end_are_named() -> None:
    context = made()
    errors: list[MismatchError] = []
    context.on_mismatch = lambda context, error: errors.append(error)
    calls = [context.begin(b"all_reduce(%d)" % index) for index in range(10 * HISTORY)]
    for number in reversed(calls):
        context.end(number)
    context.arrived(part(HISTORY - 1))
    context.arrived(part(HISTORY))
    assert [f"all_reduce({HISTORY - 1})" in str(error) for error in errors] == [True, False]
    assert "another collective" in str(errors[1])


def test_a_part_of_a_collective_that_was_taken_back_is_forgotten_unless_it_was_used() -> None:
    context = made()
    got: list[object] = []
    kept, used, never_came = part(0), part(1), part(2)
    for arrival in (kept, used):
        context.arrived(arrival)
    context.collect((1, 0, 1, 0), lambda arrival, error: got.append(arrival))
    assert [context.withdrawn(arrival) for arrival in (kept, used, never_came)] == [
        True,
        False,
        False,
    ]
    context.collect((0, 0, 1, 0), lambda arrival, error: got.append(arrival))
    assert got == [used]


# ---------------------------------------------------------------- how it grows


class Counted(int):
    """A number whose comparisons cost bytecodes, also where compiled code makes them."""

    def __eq__(self, other: object) -> bool:
        return int.__eq__(self, other)  # type: ignore[arg-type]

    def __lt__(self, other: int) -> bool:
        return int.__lt__(self, other)

    def __hash__(self) -> int:
        return int.__hash__(self)


def work(action: Callable[[], object]) -> int:
    """Return how many bytecodes `action` takes."""
    bytecodes = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal bytecodes
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        bytecodes += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return bytecodes


def shuffled(count: int) -> list[int]:
    numbers = list(range(count))
    Random(1).shuffle(numbers)
    return numbers


def receives_first(count: int, tag: Callable[[int], int]) -> None:
    context = made()
    matches = [context.match(1, tag(i)) for i in range(count)]
    for i in shuffled(count):
        context.arrived(message(1, i))
    assert all(match.done for match in matches)


def messages_first(count: int, tag: Callable[[int], int]) -> None:
    context = made()
    for i in range(count):
        context.arrived(message(1, i))
    assert all(context.match(ANY, tag(i)).done for i in shuffled(count))


def probes_and_receives(count: int) -> None:
    context = made()
    for i in shuffled(count):
        context.arrived(message(1, i))
    for i in range(count):
        assert context.match(1, i, peek=True).done
        assert context.match(1, i).done


def receives_given_up(count: int) -> None:
    context = made()
    matches = [context.match(1, i) for i in range(count)]
    for i in shuffled(count):
        matches[i].cancel()


def messages_taken_back(count: int) -> None:
    context = made()
    arrivals = [message(1, i) for i in range(count)]
    for arrival in arrivals:
        context.arrived(arrival)
    for i in shuffled(count):
        assert context.withdrawn(arrivals[i])


def messages_put_back(count: int) -> None:
    context = made()
    for i in range(count):
        context.arrived(message(1, i % 2))
    taken = [context.match(1, i % 2).message for i in range(count)]
    for i in shuffled(count):
        put_back = taken[i]
        assert put_back is not None
        context.put_back(put_back)
    orders = [context.match(ANY, ANY).message for _ in range(count)]
    assert [m.order for m in orders if m is not None] == list(range(count))


def collectives(count: int) -> None:
    context = made()
    got: list[object] = []
    for number in range(count):
        context.begin(b"barrier()")
        if number % 2:
            context.collect((number, 0, 1, 0), lambda arrival, error: got.append(arrival))
    for number in shuffled(count):
        context.arrived(part(number))
    for number in shuffled(count):
        if number % 2 == 0:
            context.collect((number, 0, 1, 0), lambda arrival, error: got.append(arrival))
        context.end(number)
    assert len(got) == count


def parts_taken_back(count: int) -> None:
    context = made()
    parts = [part(number) for number in range(count)]
    for arrival in parts:
        context.arrived(arrival)
    for number in shuffled(count):
        assert context.withdrawn(parts[number])


def queues_of_many(count: int) -> None:
    """What the heaps compare, and what is looked at when leftovers are dropped."""
    queues: Queues[int] = Queues()
    numbers = [Counted(i) for i in range(count)]
    for number in numbers:
        queues.add(number, -number, "all", ("one", number % 7))
    for i in shuffled(count):
        assert queues.remove(numbers[i])
        queues.first("all")


@exhaustive
@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(lambda n: receives_first(n, lambda i: i), id="receives first"),
        pytest.param(lambda n: receives_first(n, lambda i: ANY), id="any receives first"),
        pytest.param(lambda n: messages_first(n, lambda i: i), id="messages first"),
        pytest.param(lambda n: messages_first(n, lambda i: ANY), id="messages first, for any"),
        probes_and_receives,
        receives_given_up,
        messages_taken_back,
        messages_put_back,
        collectives,
        parts_taken_back,
        queues_of_many,
    ],
)
def test_four_times_as_many_take_about_four_times_the_work(
    scenario: Callable[[int], None],
) -> None:
    few, many = (work(lambda count=count: scenario(count)) for count in (250, 1000))
    # Sixteen times if each looked at all the others; the logarithm in Queues is 1.25 times as long.
    assert many < 6 * few


def test_what_was_removed_takes_no_memory() -> None:
    context = made()
    context.match(2, 0)
    context.arrived(message(1, 0))

    def cycle(tag: int) -> None:
        context.match(1, tag).cancel()
        context.arrived(message(1, tag))
        context.match(1, tag)

    cycle(1)
    tracemalloc.start()
    try:
        for tag in range(2, 3000):
            cycle(tag)
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used < 100_000  # 33 bytes of each
