"""The proof of a pipeline schedule: all ranks execute their actions, on the hardest terms.

A message has left only when its receive has been posted, for nothing is buffered. A rank posts
`ahead` receives, in the order of its actions. It starts no other message while `behind` of them
have not left. Larger windows, and buffers, only let ranks go on earlier, and each message has a tag
of its own, so none can take another's place: the proof of 1 and 1 stands for all.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from pycoll._support.checks import check_at_least
from pycoll._support.public_edge import edge
from pycoll.errors import ProofError
from pycoll.parallel.pipeline import (
    PIPELINE_SCHEDULES,
    Action,
    PipelineMessage,
    PipelineSchedule,
    messages,
)

Program = tuple[Action, ...]


class PipelineProof(NamedTuple):
    """By rank its actions, and the most activations (of a micro-batch in a chunk) it holds."""

    programs: tuple[tuple[Action, ...], ...]
    held: tuple[int, ...]


@edge
def prove_pipeline(
    schedule: str | PipelineSchedule,
    ranks: int,
    micro_batches: int,
    chunks: int = 1,
    *,
    ahead: int = 1,
    behind: int = 1,
) -> PipelineProof:
    """Prove that a schedule is complete, in order, without deadlock, and holds what it promises.

    Every stage has F, B and (if there are any) W of every micro-batch once, in this order.

    Args:
        schedule: a name in `PIPELINE_SCHEDULES`, or one of your own.
        ranks, micro_batches, chunks: how many there are: p; m in a batch; v stages on each rank.
        ahead, behind: how many receives a rank has posted ahead; how many of its messages may not
            have left while it goes on.

    Raises:
        ProofError: the schedule is wrong; the message is a counterexample.
        TypeError, ValueError: there is no such schedule, or none for these numbers.
    """
    numbers = dict(ranks=ranks, micro_batches=micro_batches, chunks=chunks)
    for name, number in (numbers | dict(ahead=ahead, behind=behind)).items():
        check_at_least(1, number, name)
    if isinstance(schedule, str):
        if schedule not in PIPELINE_SCHEDULES:
            raise ValueError(f"no schedule {schedule!r}: there are {', '.join(PIPELINE_SCHEDULES)}")
        schedule = PIPELINE_SCHEDULES[schedule]
    if not isinstance(schedule, PipelineSchedule):
        raise TypeError(f"schedule is {schedule!r}: a name or a PipelineSchedule is needed")
    if chunks > 1 and not schedule.many_chunks:
        raise ValueError(f"{schedule.name} has one chunk on each rank, not {chunks}")
    return _proof(schedule, ranks, micro_batches, chunks, ahead, behind)


@functools.lru_cache(maxsize=64)
def _proof(
    schedule: PipelineSchedule, p: int, m: int, v: int, ahead: int, behind: int
) -> PipelineProof:
    case = f"{schedule.name}, {p} ranks, {m} micro-batches" + (f", {v} chunks" if v > 1 else "")
    programs = tuple(
        tuple(Action(*action) for action in schedule.actions(rank, p, m, v)) for rank in range(p)
    )
    split = any(action.kind == "W" for program in programs for action in program)
    kinds = ("F", "B", "W") if split else ("F", "B")
    held = []
    for rank, program in enumerate(programs):
        bound = schedule.held(rank, p, m, v) if schedule.held else m * v
        try:
            held.append(_check(program, kinds, m, v, bound))
        except ValueError as exc:
            raise ProofError(f"{case}: rank {rank}: {exc}") from None
    if circle := _deadlock(programs, v, ahead, behind):
        raise ProofError(f"{case}: deadlock (ahead={ahead}, behind={behind})\n{circle}")
    return PipelineProof(programs, tuple(held))


def _check(program: Program, kinds: tuple[str, ...], m: int, v: int, bound: int) -> int:
    """Show that a rank does everything once and in order; return how much it holds at most."""
    done: set[Action] = set()
    held = most = 0
    for action in program:
        kind, i, chunk = action
        if kind not in kinds or not (0 <= i < m and 0 <= chunk < v):
            raise ValueError(f"{action!r}: {m} micro-batches, {v} chunks, {'/'.join(kinds)}")
        before = action._replace(kind=kinds[kinds.index(kind) - 1])
        if action in done:
            raise ValueError(f"{action} is there twice")
        if kind != "F" and before not in done:
            raise ValueError(f"{action} comes before {before}")
        done.add(action)
        held += (kind == "F") - (kind == kinds[-1])
        most = max(most, held)
        if most > bound:
            raise ValueError(f"holds activations of {held} at {action}, promised are {bound}")
    for action in (Action(k, i, c) for k in kinds for i in range(m) for c in range(v)):
        if action not in done:
            raise ValueError(f"{action} is missing")
    return most


def _deadlock(programs: tuple[Program, ...], chunks: int, ahead: int, behind: int) -> str:
    """Execute all ranks; return the circle in which they wait for each other, "" if none does."""
    posted: set[PipelineMessage] = set()
    sent: set[PipelineMessage] = set()

    def execute(rank: int) -> Iterator[tuple[str, int]]:
        """Go as far as possible; yield what the rank waits for and whom, again and again."""
        steps = [(a, *messages(a, rank, len(programs), chunks)) for a in programs[rank]]
        coming = deque(into for _, into, _ in steps if into)
        leaving: deque[PipelineMessage] = deque()
        posted.update(coming.popleft() for _ in range(min(ahead, len(coming))))
        for action, into, out in steps:
            while into and into not in sent:
                yield f"{action}: waits for its message from rank {into.source}", into.source
            if into and coming:
                posted.add(coming.popleft())
            while out and len(leaving) >= behind:
                peer, meant_for = leaving[0].dest, leaving[0].action
                if leaving[0] in posted:
                    leaving.popleft()
                else:
                    yield f"after {action}: waits until rank {peer} receives for {meant_for}", peer
            if out:
                sent.add(out)
                leaving.append(out)

    ranks = [execute(rank) for rank in range(len(programs))]
    waits, moved = {}, -1
    while moved < len(posted) + len(sent):  # who waits, waits for one of these to grow
        moved = len(posted) + len(sent)
        waits = {rank: next(execution, None) for rank, execution in enumerate(ranks)}
    lines: dict[int, str] = {}
    rank = next((rank for rank, wait in waits.items() if wait), -1)
    while (wait := waits.get(rank)) and rank not in lines:
        lines[rank] = f"    rank {rank}, {wait[0]}"
        rank = wait[1]
    first = list(lines).index(rank) if lines else 0
    return "\n".join(list(lines.values())[first:])
