"""What a trace shows at first sight, in a few lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pycoll._trace.chrome import number_of, seconds
from pycoll._trace.records import OPEN
from pycoll._trace.timeline import Timeline, TracedCall, TracedWait

_MOST = 4  # ranks that are named one by one


def summary(timeline: Timeline, waits: Sequence[TracedWait], path: str) -> list[str]:
    """Return lines that say who was waited for, and what the trace lacks.

    Args:
        timeline: the trace.
        waits: of it.
        path: where it was written.
    """
    traces = timeline.traces
    count = sum(len(operations) for operations in timeline.operations.values())
    lasted = timeline.end - timeline.begin
    lines = [
        f"trace: {count} calls of {len(traces)} {'rank' if len(traces) == 1 else 'ranks'} "
        f"in {seconds(lasted)}: {path} (ui.perfetto.dev opens it)"
    ]
    if waits:
        lines += _straggler(timeline, waits)
    unfinished = _unfinished(timeline)
    if unfinished:
        lines.append(f"trace: not finished: {_some(unfinished)}")
    lost = [
        f"{trace.recorded.lost} of rank {trace.rank}" for trace in traces if trace.recorded.lost
    ]
    if lost:
        lines.append(
            f"trace: these calls, after the first ones, are not in it: {_some(lost)} "
            "(raise PYCOLL_TRACE_RECORDS)"
        )
    silent = [f"rank {trace.rank}" for trace in traces if not trace.recorded.process]
    if silent:
        lines.append(f"trace: no call of pycoll.init() was recorded of {_some(silent)}")
    return lines


def _straggler(timeline: Timeline, waits: Sequence[TracedWait]) -> list[str]:
    """Return which rank was waited for longest, and where."""
    by_rank: Counter[int] = Counter()
    for wait in waits:
        by_rank[wait.rank] += wait.duration
    ((rank, longest),) = by_rank.most_common(1)
    calls: Counter[tuple[str, str]] = Counter()
    for wait in waits:
        if wait.rank == rank:
            calls[wait.what.record.what, wait.what.record.place] += wait.duration
    (((what, place), _),) = calls.most_common(1)
    share = round(100 * longest / (sum(by_rank.values()) or 1))
    ranks = len(timeline.traces)
    spent = round(100 * sum(by_rank.values()) / (ranks * (timeline.end - timeline.begin) or 1))
    return [
        f"trace: rank {rank} was waited for most: {seconds(longest)}, {share} % of all waiting,",
        f"    most in {what} at {_short(place)}; waiting was {spent} % of the ranks' time",
    ]


def _unfinished(timeline: Timeline) -> list[str]:
    """Return the calls that were under way at the end."""
    found = []
    for operations in timeline.operations.values():
        for each in operations:
            if each.record.state == OPEN:
                found.append(f"rank {each.rank} in {_text(each)} at {_short(each.record.place)}")
    return found


def _text(operation: TracedCall) -> str:
    record = operation.record
    tag = max(record.tag, record.receive_tag)
    named = {"dest": record.peer, "source": record.source, "tag": tag}
    if record.number >= 0:
        return f"{record.what}{number_of(operation)}"
    said = ", ".join(f"{name}={value}" for name, value in named.items() if value >= 0)
    return f"{record.what}({said})" if said else record.what


def _short(place: str) -> str:
    return place.rpartition("/")[2]


def _some(texts: Sequence[str]) -> str:
    shown = ", ".join(texts[:_MOST])
    return shown if len(texts) <= _MOST else f"{shown} and {len(texts) - _MOST} more"
