"""External steps: where they stand in a schedule, and how a run does them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pycoll._calls.core_runs import CoreRun, table_of
from pycoll._calls.group import Group
from pycoll._runtime.binding import Binding
from pycoll._runtime.engine import Engine
from pycoll._runtime.external import Chunks, Draft, External, ExternalSchedule
from pycoll._transports.base import Operation
from pycoll._transports.core import CoreTransport
from pycoll.schedule import Copy, Recv, Reduce, Send, compile_schedule, recv_reduce, users_of


def nothing(_run: Any) -> None:
    """What is done at once."""


class Job(Operation):
    """Something that is under way until the test ends it; knows what became of it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_asked = self.is_cancelled = False

    def then(self, callback: Callable[[Operation], None]) -> None:
        self.is_asked = True
        super().then(callback)

    def cancel(self) -> None:
        super().cancel()
        self.is_cancelled = True


class Alone:
    """A job of one rank, whose runs have no messages and chunks of one byte."""

    def __init__(self) -> None:
        transport = CoreTransport(0, 1)
        self.engine = Engine(transport, 1, None)
        transport.start([{}], self.engine)
        with self.engine.locked():
            self.group = Group(self.engine, 1, [0])

    def run_of(self, table: ExternalSchedule, *values: bytes) -> CoreRun:
        """Make a run."""
        binding = Binding(
            nbytes=[1] * len(values),
            source=[(memoryview(value),) for value in values],
            target=[memoryview(bytearray(1)) for _ in values],
        )
        call = self.group.context.begin(b"call")
        compiled = table_of(table, 1, len(values))
        return CoreRun(self.group, b"call", (call, 0), compiled, table, binding, 1, 1)

    def start(self, run: CoreRun) -> None:
        """Start a run, and do what it asks for."""
        with self.engine.locked():
            run.start()
        self.go_on()

    def go_on(self) -> None:
        """Hear what the core has to tell."""
        with self.engine.locked():
            while self.engine._progress():
                pass

    def end(self, job: Job, error: BaseException | None = None) -> None:
        """End something that is under way."""
        with self.engine.locked():
            job.finish(error)
        self.go_on()


@pytest.fixture
def alone() -> Iterator[Alone]:
    made = Alone()
    yield made
    made.engine.close("the test has ended", 1.0)


# --- the steps -----------------------------------------------------------------------------------


def test_a_draft_without_changes_is_the_schedule() -> None:
    schedule = compile_schedule([Send(1, 0), *recv_reduce(2, 0), Send(3, (0, 1)), Copy(0, 1)])
    assert Draft(schedule).table() == ExternalSchedule(*schedule)


def test_what_is_added_comes_first_and_hazards_move_along() -> None:
    schedule = compile_schedule([*recv_reduce(1, 0), Send(1, 0)])
    draft = Draft(schedule)
    before, after = External(nothing), External(nothing, at_end=True)
    first = draft.add(before, before=[1, 2])
    draft.add(after, after=[2, first])
    table = draft.table()
    assert table.steps == (before, after, Recv(1, 0, True), Reduce(0, False), Send(1, 0))
    assert table.chunks == ((), (), (0,), (0,), (0,))
    assert table.successors == ((1, 3, 4), (), (3,), (4,), (1,))
    assert table.waits == (0, 2, 0, 2, 2)


def test_messages_keep_their_numbers() -> None:
    schedule = compile_schedule([Send(1, 0), Send(1, 1), Send(2, 0), Send(1, 2)])
    draft = Draft(schedule)
    draft.add(External(nothing))
    draft.replace(0, External(nothing))
    assert draft.table().number == (0, 0, 1, 0, 2)


def test_what_replaces_a_step_has_its_hazards() -> None:
    schedule = compile_schedule([Recv(1, 0), Send(2, 0), Recv(1, 0)])
    draft = Draft(schedule)
    draft.replace(1, External(nothing))
    table = draft.table()
    assert table.steps[1] == External(nothing)
    assert (table.waits, table.successors) == (schedule.waits, schedule.successors)


def test_the_users_of_a_chunk_are_known_in_the_order_of_first_use() -> None:
    """Without receives into scratch: who made them wait would change the order of the window."""
    schedule = compile_schedule([Send(1, 2), Copy(1, 2), *recv_reduce(1, (1, 0))])
    assert list(users_of(schedule, 4).items()) == [(2, [0, 1]), (1, [1, 3]), (0, [3]), (3, [])]


# --- the run -------------------------------------------------------------------------------------


def test_a_step_waits_for_an_external_one_and_that_for_another(alone: Alone) -> None:
    draft = Draft(compile_schedule([Copy(0, 1)]))
    job, order = Job(), []

    def late(run: Chunks) -> None:
        order.append(bytes(run.values((1,))[0]))

    draft.add(External(lambda _: job), before=[0])
    draft.add(External(late), after=[0])
    run = alone.run_of(draft.table(), b"a", b"b")
    alone.start(run)
    assert not order
    assert not run.done
    alone.end(job)
    assert order == [b"a"]
    assert run.done
    assert run.error is None


def test_all_that_can_begin_has_begun_before_somebody_asks_for_an_end(alone: Alone) -> None:
    draft = Draft(compile_schedule([]))
    jobs: list[Job] = []

    def begin(_run: Chunks) -> Job:
        assert not any(job.is_asked for job in jobs)
        jobs.append(Job())
        return jobs[-1]

    last = draft.add(External(nothing))
    for _ in range(3):
        draft.add(External(begin), before=[last])
    run = alone.run_of(draft.table())
    alone.start(run)
    assert [job.is_asked for job in jobs] == [True] * 3
    assert not run.done


def test_what_may_end_last_is_asked_when_all_else_is_done(alone: Alone) -> None:
    draft = Draft(compile_schedule([]))
    last, other = [Job(), Job()], Job()
    for job in last:
        draft.add(External(lambda _, job=job: job, at_end=True))
    draft.add(External(lambda _: other))
    run = alone.run_of(draft.table())
    alone.start(run)
    assert (other.is_asked, last[0].is_asked) == (True, False)
    alone.end(other)
    assert [job.is_asked for job in last] == [True, False]
    alone.end(last[1])
    alone.end(last[0])
    assert run.done
    assert run.error is None


@pytest.mark.parametrize("at_end", [False, True])
def test_a_run_that_is_given_up_gives_up_what_has_begun(alone: Alone, at_end: bool) -> None:
    draft = Draft(compile_schedule([Copy(0, 1)]))
    jobs, later = [Job(), Job()], []
    draft.add(External(lambda _: jobs[0]), before=[0])
    draft.add(External(lambda _: jobs[1], at_end=at_end))
    draft.add(External(later.append), after=[0])
    run = alone.run_of(draft.table(), b"a", b"b")
    alone.start(run)
    with alone.engine.locked():
        run.cancel()
    assert [job.is_cancelled for job in jobs] == [True, True]
    alone.end(jobs[0])
    assert not later


def test_an_error_ends_the_run_and_cancels_the_rest(alone: Alone) -> None:
    draft = Draft(compile_schedule([]))
    bad, other, last = Job(), Job(), Job()
    draft.add(External(lambda _: bad))
    draft.add(External(lambda _: other))
    draft.add(External(lambda _: last, at_end=True))
    run = alone.run_of(draft.table())
    alone.start(run)
    alone.end(bad, RuntimeError("the copy failed"))
    assert str(run.error) == "the copy failed"
    assert (other.is_cancelled, last.is_cancelled) == (True, True)


def test_what_is_found_to_have_failed_while_the_run_is_given_up_changes_nothing(
    alone: Alone,
) -> None:
    class Telling(Job):
        def cancel(self) -> None:
            super().cancel()
            other.finish(RuntimeError("too late"))

    draft = Draft(compile_schedule([]))
    bad, telling, other, ended = Job(), Telling(), Job(), []
    for job in (bad, telling, other):
        draft.add(External(lambda _, job=job: job))
    run = alone.run_of(draft.table())
    run.then(ended.append)
    alone.start(run)
    alone.end(bad, RuntimeError("the first"))
    assert ended == [run]
    assert str(run.error) == "the first"


def test_what_cannot_begin_ends_the_run(alone: Alone) -> None:
    draft = Draft(compile_schedule([]))
    first, ended = Job(), []

    def fail(_run: Chunks) -> None:
        raise RuntimeError("no copy can begin")

    draft.add(External(lambda _: first))
    draft.add(External(fail))
    run = alone.run_of(draft.table())
    run.then(ended.append)
    alone.start(run)
    assert ended == [run]
    assert str(run.error) == "no copy can begin"
    assert first.is_cancelled
