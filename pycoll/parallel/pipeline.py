"""Pipeline parallelism: schedules as data.

A network is cut into stages of equal cost. A rank has one of them, or `chunks` of them: chunk c of
rank r is stage ``c * ranks + r``. A batch is cut into micro-batches. A schedule is a short pure
function that yields what one rank computes, in which order:

    action   computes                             receives             sends
    F        forward of a micro-batch             activations          activations
    B        backward, for the input              gradient of output   gradient of input
    W        backward, for the weights

In a schedule without W, B computes both. No action names a peer: F receives from the stage before
and sends to the stage after, if there is one, and B the other way round. What runs, proves, times
or draws a schedule works on the same list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple


class Action(NamedTuple):
    """One computation of a rank.

    Attributes:
        kind: ``"F"``, ``"B"`` or ``"W"``.
        micro_batch, chunk: their numbers, from 0.
    """

    kind: str
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}" + (f".{self.chunk}" if self.chunk else "")


def gpipe(rank: int, ranks: int, micro_batches: int, chunks: int = 1) -> Iterator[Action]:
    """All forwards, then all backwards.

    Cost: bubble (p - 1) / m; activations of m micro-batches.
    Source: Huang et al., GPipe, 2019, figure 2c.
    """
    for i in range(micro_batches):
        yield Action("F", i)
    for i in reversed(range(micro_batches)):
        yield Action("B", i)


def one_f_one_b(rank: int, ranks: int, micro_batches: int, chunks: int = 1) -> Iterator[Action]:
    """One forward, one backward, in turn, after as many forwards as there are ranks behind.

    Cost: bubble (p - 1) / m; activations of p - rank micro-batches.
    Source: Narayanan et al., PipeDream, SOSP 2019; with a flush after each batch, as here:
    Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training, 2020 (PipeDream-Flush).
    """
    warm_up = min(ranks - 1 - rank, micro_batches)
    for i in range(warm_up):
        yield Action("F", i)
    for i in range(micro_batches):
        if warm_up + i < micro_batches:
            yield Action("F", warm_up + i)
        yield Action("B", i)


def interleaved(rank: int, ranks: int, micro_batches: int, chunks: int = 1) -> Iterator[Action]:
    """1F1B with several chunks on each rank, which take turns after every p micro-batches.

    Before its first backward a rank computes two forwards more than the rank behind it (1F1B: one).
    So in the steady state a message may travel for as long as a forward takes before a rank waits
    for it; the price is memory.

    Cost: bubble (p - 1) / (m v); activations of 2 (p - rank - 1) + (v - 1) p + 1 chunks.
    Source: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM, 2021, section 2.2.2.
    """
    if micro_batches % ranks:
        raise ValueError(
            f"interleaved: {micro_batches} micro-batches are no multiple of {ranks} ranks"
        )
    first = range(0, micro_batches, ranks)
    order = [(i + j, c) for i in first for c in range(chunks) for j in range(ranks)]
    warm_up = min(2 * (ranks - 1 - rank) + (chunks - 1) * ranks, len(order))
    for i, chunk in order[:warm_up]:
        yield Action("F", i, chunk)
    for k, (i, chunk) in enumerate(order):
        if warm_up + k < len(order):
            yield Action("F", *order[warm_up + k])
        yield Action("B", i, chunks - 1 - chunk)


def zero_bubble(
    rank: int, ranks: int, micro_batches: int, chunks: int = 1, depth: int = 1
) -> Iterator[Action]:
    """1F1B whose gradients of weights are computed later, on rank r by r micro-batches (ZB-H1).

    The rank before does not wait for them, and they fill the time in which the pipeline drains. At
    the depth d = 2 it is as if there were a rank between any two: twice as many first forwards,
    twice the delay. Then nobody waits at all (ZB-H2).

    Cost: bubble (p - 1) (F + B - d W) / (m (F + B + W)) for m >= d (p - 1) + 1; activations of so
    many micro-batches.
    Source: Qi et al., Zero Bubble Pipeline Parallelism, 2023, section 2.
    """
    delay = depth * rank
    for action in one_f_one_b(delay, depth * (ranks - 1) + 1, micro_batches):
        yield action
        if action.kind == "B" and action.micro_batch >= delay:
            yield Action("W", action.micro_batch - delay)
    for i in range(max(0, micro_batches - delay), micro_batches):
        yield Action("W", i)


class PipelineSchedule(NamedTuple):
    """A schedule, and what it promises.

    Attributes:
        name: for messages.
        actions: called with rank, ranks, micro-batches and chunks; yields the rank's actions.
        held: called with the same; the most activations (of a micro-batch in a chunk) that the
            rank holds at a time, from their F to their B, or W. None: promises nothing.
        bubble: called with ranks, micro-batches and chunks; how long a rank is idle between its
            first action and its last, per time that it computes, if F, B and W take equally long.
        many_chunks: whether a rank may have more chunks than one.
    """

    name: str
    actions: Callable[[int, int, int, int], Iterable[Action]]
    held: Callable[[int, int, int, int], int] | None = None
    bubble: Callable[[int, int, int], float] | None = None
    many_chunks: bool = True


_ROWS = (
    PipelineSchedule("gpipe", gpipe, lambda r, p, m, v: m, lambda p, m, v: (p - 1) / m, False),
    PipelineSchedule(
        "1f1b", one_f_one_b, lambda r, p, m, v: min(m, p - r), lambda p, m, v: (p - 1) / m, False
    ),
    PipelineSchedule(
        "interleaved",
        interleaved,
        lambda r, p, m, v: min(m * v, 2 * (p - r - 1) + (v - 1) * p + 1),
        lambda p, m, v: (p - 1) / (m * v),
    ),
    PipelineSchedule(
        "zb-h1",
        zero_bubble,
        lambda r, p, m, v: min(m, p),
        lambda p, m, v: (p - 1 + max(0, p - m)) / (3 * m),  # with few micro-batches more
        False,
    ),
    PipelineSchedule(
        "zb-h2",
        partial(zero_bubble, depth=2),
        lambda r, p, m, v: min(m, 2 * p - 1),
        lambda p, m, v: max(0, 2 * p - 1 - m) / (3 * m),
        False,
    ),
)
PIPELINE_SCHEDULES = {row.name: row for row in _ROWS}
"""The schedules of this module by name."""


class PipelineMessage(NamedTuple):
    """What one stage hands to another, for an action of the rank `dest`, which may be `source`."""

    source: int
    dest: int
    action: Action

    def tag(self, chunks: int) -> int:
        """Return a tag that no other message between these ranks has."""
        kind, i, chunk = self.action
        return 2 * (i * chunks + chunk) + (kind == "B")


def messages(
    action: Action, rank: int, ranks: int, chunks: int
) -> tuple[PipelineMessage | None, PipelineMessage | None]:
    """Return the message that an action of a rank waits for, and the one that has its result."""
    if action.kind == "W":
        return None, None
    stage = action.chunk * ranks + rank
    before, after = (stage - 1, stage + 1) if action.kind == "F" else (stage + 1, stage - 1)
    stages = range(ranks * chunks)
    meant_for = action._replace(chunk=after // ranks)
    into = PipelineMessage(before % ranks, rank, action) if before in stages else None
    out = PipelineMessage(rank, after % ranks, meant_for) if after in stages else None
    return into, out
