"""Pipeline schedules keep what they promise, and the proof finds those that do not."""

from __future__ import annotations

import random
import runpy
import traceback
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from example_runs import EXAMPLES

import pycoll
from pycoll.parallel import PIPELINE_SCHEDULES, Action, PipelineSchedule, prove_pipeline
from pycoll.parallel.pipeline import gpipe, messages, one_f_one_b

diagrams = SimpleNamespace(**runpy.run_path(str(EXAMPLES / "parallel/pipeline_diagrams.py")))
F, B, W = "F", "B", "W"


def cases(name: str) -> Iterator[tuple[int, int, int]]:
    """Up to 8 ranks, 16 micro-batches and, where there may be several, 4 chunks."""
    interleaved = name == "interleaved"
    for p in range(1, 9):
        for m in range(1, 17):
            for v in range(1, 5 if interleaved else 2):
                if not (interleaved and m % p):
                    yield p, m, v


@pytest.mark.parametrize("name", PIPELINE_SCHEDULES)
def test_every_size_is_proved_and_holds_as_much_as_the_paper_says(name: str) -> None:
    papers: dict[str, Callable[[int, int, int, int], int]] = {
        "gpipe": lambda r, p, m, v: m,
        "1f1b": lambda r, p, m, v: min(m, p - r),
        "interleaved": lambda r, p, m, v: min(m * v, 2 * (p - r - 1) + (v - 1) * p + 1),
        "zb-h1": lambda r, p, m, v: min(m, p),
        "zb-h2": lambda r, p, m, v: min(m, 2 * p - 1),
    }
    number = 0
    for p, m, v in cases(name):
        held = prove_pipeline(name, p, m, v).held
        assert held == tuple(papers[name](rank, p, m, v) for rank in range(p)), (p, m, v)
        number += 1
    assert number == {"interleaved": 4 * sum(16 // p for p in range(1, 9))}.get(name, 128)


@pytest.mark.parametrize("name", PIPELINE_SCHEDULES)
def test_the_bubble_is_that_of_the_formula(name: str) -> None:
    for p, m, v in cases(name):
        times = diagrams.time_pipeline(name, p, m, v)
        work = 3 * m * v
        idle = {
            "gpipe": 3 * (p - 1),
            "1f1b": 3 * (p - 1),
            "interleaved": 3 * (p - 1),  # of chunks: v of them take what one stage does above
            "zb-h1": p - 1 + max(0, p - m),
            "zb-h2": max(0, 2 * p - 1 - m),
        }[name]
        took = [line[-1].end - line[0].start for line in times]
        assert max(took) == work + idle, (p, m, v)
        formula = PIPELINE_SCHEDULES[name].bubble
        assert formula is not None
        for bubble in (formula(p, m, v), diagrams.bubble(times), diagrams.bubble(times, work)):
            assert bubble == pytest.approx(idle / work, rel=1e-12)


def test_zero_bubble_has_the_papers_bubble_for_other_costs() -> None:
    for f, b, w in ((2, 2, 1), (3, 4, 3), (1, 1, 1)):
        for depth in (1, 2):
            costs = {F: f, B: b, W: w}
            times = diagrams.time_pipeline(f"zb-h{depth}", 4, 12, costs=costs)
            took = max(line[-1].end - line[0].start for line in times)
            assert took == 12 * (f + b + w) + 3 * (f + b - depth * w)


@pytest.mark.parametrize("name", PIPELINE_SCHEDULES)
def test_a_micro_batch_goes_through_the_stages_and_back(name: str) -> None:
    p, m, v = 4, 8, 3 if name == "interleaved" else 1
    start, end = {}, {}
    for rank, line in enumerate(diagrams.time_pipeline(name, p, m, v, message=0.25)):
        for (kind, i, chunk), began, ended in line:
            start[kind, i, chunk * p + rank] = began
            end[kind, i, chunk * p + rank] = ended
    for i in range(m):
        for stage in range(1, p * v):
            assert start[F, i, stage] >= end[F, i, stage - 1] + 0.25
            assert start[B, i, stage - 1] >= end[B, i, stage] + 0.25
        assert start[B, i, p * v - 1] >= end[F, i, p * v - 1]


def test_the_longer_warm_up_of_interleaved_hides_messages() -> None:
    """Of 1F1B each message of the steady state is waited for; here none: see the page."""
    spans = {
        name: [
            diagrams.makespan(diagrams.time_pipeline(name, 4, 16, message=each))
            for each in (0.0, 0.2)
        ]
        for name in ("1f1b", "interleaved")
    }
    assert spans["1f1b"] == pytest.approx([57.0, 62.6])
    assert spans["interleaved"] == pytest.approx([57.0, 58.2])


# ------------------------------------------------------------------ wrong schedules are refuted


def changed(change: Callable[[list[Action]], Any], rank: int = 1, of: str = "zb-h1") -> Any:
    """A schedule of which one rank's list is changed."""
    right = PIPELINE_SCHEDULES[of]

    def actions(r: int, p: int, m: int, v: int) -> list[Action]:
        program = list(right.actions(r, p, m, v))
        if r == rank:
            change(program)
        return program

    return right._replace(name="changed", actions=actions)


def move(program: list[Action], action: Action, to: int) -> None:
    program.remove(action)
    program.insert(to, action)


@pytest.mark.parametrize(
    ("schedule", "counterexample"),
    [
        (changed(lambda a: a.remove(Action(F, 5))), "rank 1: B5 comes before F5"),
        (changed(lambda a: a.remove(Action(B, 7))), "rank 1: W7 comes before B7"),
        (changed(lambda a: a.remove(Action(W, 7))), "rank 1: W7 is missing"),
        (changed(lambda a: a.append(Action(W, 3))), "rank 1: W3 is there twice"),
        (changed(lambda a: move(a, Action(B, 2), 0)), "rank 1: B2 comes before F2"),
        (changed(lambda a: move(a, Action(W, 2), 3)), "rank 1: W2 comes before B2"),
        (changed(lambda a: a.append(Action(W, 8))), "chunk=0): 8 micro-batches, 1 chunks, F/B/W"),
        (
            changed(lambda a: a.append(Action(F, 0, 1))),
            "chunk=1): 8 micro-batches, 1 chunks, F/B/W",
        ),
        (changed(lambda a: a.append(Action("FB", 1))), "kind='FB'"),
        (changed(lambda a: a.append(Action("", 1))), "kind=''"),
        (changed(lambda a: a.append(Action(W, 0)), of="gpipe"), "rank 0: W0 is missing"),
        (
            changed(lambda a: move(a, Action(F, 4), 3)),
            "rank 1: holds activations of 5 at F3, promised are 4",
        ),
        (
            PIPELINE_SCHEDULES["1f1b"]._replace(actions=gpipe),
            "rank 0: holds activations of 5 at F4, promised are 4",
        ),
    ],
)
def test_a_wrong_list_is_refuted_by_its_first_wrong_action(
    schedule: PipelineSchedule, counterexample: str
) -> None:
    with pytest.raises(pycoll.errors.ProofError) as caught:
        prove_pipeline(schedule, 4, 8)
    assert counterexample in str(caught.value)
    assert f"{schedule.name}, 4 ranks, 8 micro-batches: " in str(caught.value)


def crossed(r: int, p: int, m: int, v: int) -> list[Action]:
    one_by_one = [Action(kind, i) for i in range(m) for kind in (F, B)]
    return one_by_one if r == 0 else list(gpipe(r, p, m))


def turned(r: int, p: int, m: int, v: int) -> list[Action]:
    return list(gpipe(r, p, m) if r == 0 else one_f_one_b(1, 2, m))


def test_a_deadlock_is_shown_as_a_circle_of_ranks() -> None:
    with pytest.raises(pycoll.errors.ProofError) as caught:
        prove_pipeline(PipelineSchedule("crossed", crossed), 2, 3, ahead=9, behind=9)
    assert str(caught.value).splitlines() == [
        "crossed, 2 ranks, 3 micro-batches: deadlock (ahead=9, behind=9)",
        "    rank 0, B0: waits for its message from rank 1",
        "    rank 1, F1: waits for its message from rank 0",
    ]


def test_a_schedule_that_needs_room_for_messages_is_refuted_without_it() -> None:
    schedule = PipelineSchedule("turned", turned)
    with pytest.raises(pycoll.errors.ProofError) as caught:
        prove_pipeline(schedule, 2, 2)
    assert str(caught.value).splitlines()[1:] == [
        "    rank 0, B1: waits for its message from rank 1",
        "    rank 1, after B1: waits until rank 0 receives for B0",
    ]
    assert prove_pipeline(schedule, 2, 2, ahead=2).held == (2, 1)
    assert prove_pipeline(schedule, 2, 2, behind=2).held == (2, 1)


def shuffled(generator: random.Random, m: int, v: int) -> tuple[Action, ...]:
    """Every F and B once, in an order that is right on this rank alone."""
    ready = [Action(F, i, c) for i in range(m) for c in range(v)]
    program = []
    while ready:
        action = ready.pop(generator.randrange(min(3, len(ready))))
        program.append(action)
        if action.kind == F:
            ready.insert(generator.randrange(len(ready) + 1), action._replace(kind=B))
    return tuple(program)


def has_circle(programs: list[tuple[Action, ...]], v: int, ahead: int, behind: int) -> bool:
    """The same question as one of a graph, whose nodes are ("start" or "sent", rank, position)."""
    p = len(programs)
    after: dict[Any, set[Any]] = {}
    posted, sent = {}, {}
    for rank, program in enumerate(programs):
        receiving: list[int] = []
        for position, action in enumerate(program):
            into, out = messages(action, rank, p, v)
            if into:  # is posted when an earlier message was taken
                earlier = receiving[-ahead] if len(receiving) >= ahead else None
                posted[into] = set() if earlier is None else {("start", rank, earlier)}
                receiving.append(position)
            sent[out] = ("sent", rank, position)
    for rank, program in enumerate(programs):
        leaving = []
        for position, action in enumerate(program):
            into, out = messages(action, rank, p, v)
            start = after.setdefault(("start", rank, position), set())
            end = after.setdefault(("sent", rank, position), {("start", rank, position)})
            if position:
                start.add(("sent", rank, position - 1))
            if into:
                start.add(sent[into])
            if out:
                if len(leaving) >= behind:
                    end |= posted[leaving[-behind]]
                leaving.append(out)
    try:
        TopologicalSorter(after).prepare()
    except CycleError:
        return True
    return False


def test_deadlocks_are_found_where_a_graph_has_a_circle_and_nowhere_else() -> None:
    verdicts = {True: 0, False: 0}
    for seed in range(400):
        generator = random.Random(seed)
        p, m, v = generator.randint(1, 3), generator.randint(1, 3), generator.randint(1, 2)
        ahead, behind = generator.choice([1, 2, 9]), generator.choice([1, 2, 9])
        programs = [shuffled(generator, m, v) for _ in range(p)]
        expected = has_circle(programs, v, ahead, behind)
        schedule = PipelineSchedule(f"seed {seed}", lambda r, p, m, v, of=programs: of[r])
        refuted = ""
        try:
            prove_pipeline(schedule, p, m, v, ahead=ahead, behind=behind)
        except pycoll.errors.ProofError as error:
            refuted = str(error)
        assert bool(refuted) is expected, refuted or seed
        verdicts[expected] += 1
    assert min(verdicts.values()) > 50, verdicts


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("2f2b", 4, 8), "no schedule '2f2b': there are gpipe, 1f1b, interleaved, zb-h1, zb-h2"),
        (("gpipe", 0, 8), "ranks is 0: at least 1"),
        (("gpipe", 4, 0), "micro_batches is 0: at least 1"),
        (("gpipe", 4, 8.0), "micro_batches is an int, not a float"),
        ((gpipe, 4, 8), "schedule is <function gpipe .*>: a name or a PipelineSchedule"),
        (("1f1b", 4, 8, 2), "1f1b has one chunk on each rank, not 2"),
        (("interleaved", 4, 6, 2), "interleaved: 6 micro-batches are no multiple of 4 ranks"),
    ],
)
def test_arguments_for_which_there_is_no_schedule_are_named(arguments: Any, says: str) -> None:
    with pytest.raises((TypeError, ValueError), match=says) as caught:
        prove_pipeline(*arguments)
    frames = traceback.extract_tb(caught.tb)
    assert [Path(frame.filename).name for frame in frames] == [Path(__file__).name]


# --------------------------------------------------------------------------------- drawings


def test_the_diagram_as_text() -> None:
    assert diagrams.draw_text(diagrams.time_pipeline("1f1b", 2, 3)).splitlines() == [
        "rank 0 F0 F1 .  .  B0 -- F2 B1 -- .  B2 --",
        "rank 1 .  F0 B0 -- F1 B1 -- F2 B2 -- .  .",
    ]
    in_seconds = [
        [t._replace(start=t.start * 0.03 + 7.0, end=t.end * 0.03 + 7.0) for t in line]
        for line in diagrams.time_pipeline("interleaved", 1, 1, 2)
    ]
    assert diagrams.draw_text(in_seconds, unit=0.03) == "rank 0 F0   F0.1 B0.1 ---- B0   ----"


def test_the_diagram_as_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "diagram.png"
    times = {name: diagrams.time_pipeline(name, 2, 4) for name in ("1f1b", "zb-h1")}
    diagrams.plot(times, str(path))
    assert path.read_bytes().startswith(b"\x89PNG")
