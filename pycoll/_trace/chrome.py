"""Writes a timeline in the trace event format, which Perfetto and chrome://tracing open.

Ranks are processes, threads are threads. Calls are complete events ("X"), what they have started
asynchronous ones ("b", "e"), messages arrows ("s", "f"). Where a rank waits for another, a slice in
the call says so.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from typing import IO, Any

from pycoll._trace.records import DONE, OPEN
from pycoll._trace.timeline import Timeline, TracedCall, TracedMessage, TracedWait

Event = dict[str, Any]

_FORMAT = "pycoll trace 1"
_HEAD_NBYTES = 4096  # of a file, in which its format stands
_THREADS = 1000  # numbers of threads are those of a process, this often a rank
_SHOWN_NS = 1000  # shorter waits have no slice
_WAITING = "terrible"  # a color that chrome://tracing has a name for: red
_RECEIVED_BY_ROOT = frozenset({"broadcast", "reduce", "gather", "gatherv", "scatter", "scatterv"})


def write(
    file: IO[bytes],
    timeline: Timeline,
    messages: Sequence[TracedMessage],
    waits: Sequence[TracedWait],
    *,
    compress: bool,
) -> None:
    """Write everything.

    Args:
        file: where to.
        timeline, messages, waits: what to write.
        compress: by gzip.

    Raises:
        OSError: it cannot be written.
    """
    out: Any = gzip.GzipFile(fileobj=file, mode="wb", compresslevel=5) if compress else file
    head = json.dumps({"displayTimeUnit": "ns", "otherData": about(timeline)}, indent=1)
    out.write(head[: head.rindex("}")].rstrip().encode() + b',\n"traceEvents": [')
    separator = b"\n"
    for event in events(timeline, messages, waits):
        out.write(separator + json.dumps(event, separators=(",", ":")).encode())
        separator = b",\n"
    out.write(b"\n]}\n")
    if compress:
        out.close()


def is_trace(path: str) -> bool:
    """Whether a file is a trace, or empty, and so may be replaced by one.

    Raises:
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        head = file.read(_HEAD_NBYTES)
    if head[:2] == b"\x1f\x8b":
        with contextlib.suppress(zlib.error):
            head = zlib.decompressobj(wbits=31).decompress(head, _HEAD_NBYTES)
    return not head or _FORMAT.encode() in head


def about(timeline: Timeline) -> dict[str, Any]:
    """Return what is known of the trace itself."""
    clocks = {trace.host: trace.clock.bound for trace in timeline.traces}
    return {
        "format": _FORMAT,
        "clock": "CLOCK_MONOTONIC of pycoll-run's host; ts 0 is the first call",
        "times of a host may be wrong by this, ns": clocks,
        "calls that are not here": {
            f"rank {trace.rank}": trace.recorded.lost
            for trace in timeline.traces
            if trace.recorded.lost
        },
        "ranks that have recorded nothing": [
            trace.rank for trace in timeline.traces if not trace.recorded.process
        ],
    }


def events(
    timeline: Timeline, messages: Sequence[TracedMessage], waits: Sequence[TracedWait]
) -> Iterator[Event]:
    """Yield all events of a trace."""
    threads = _Threads(timeline)
    yield from threads.names(waits)
    by_call = {(w.operation.rank, w.operation.record.ordinal): w for w in waits}
    for operations in timeline.operations.values():
        for operation in operations:
            wait = by_call.get((operation.rank, operation.record.ordinal))
            yield from _call(timeline, threads, operation, wait)
    for number, message in enumerate(messages):
        yield from _arrow(timeline, threads, number, message)
    for trace in timeline.traces:
        if trace.recorded.lost:
            yield _gap(timeline, threads, trace.rank)


class _Threads:
    """The threads of all ranks, as the format numbers them."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._numbers: dict[tuple[int, str], int] = {}
        for rank, operations in timeline.operations.items():
            names = dict.fromkeys(each.record.thread for each in operations)
            for index, name in enumerate(names):
                self._numbers[rank, name] = (rank + 1) * _THREADS + index

    def place(self, rank: int, thread: str) -> Event:
        """Return the part of an event that says whose it is."""
        number = self._numbers.get((rank, thread), (rank + 1) * _THREADS + _THREADS - 1)
        return {"pid": rank + 1, "tid": number}

    def of(self, operation: TracedCall) -> Event:
        """Return the part of an event that says whose it is."""
        return self.place(operation.rank, operation.record.thread)

    def names(self, waits: Sequence[TracedWait]) -> Iterator[Event]:
        """Yield what the ranks and threads are called, and what is to be known of a rank."""
        hosts = {trace.host for trace in self._timeline.traces}
        waited: dict[int, int] = {}
        for wait in waits:
            waited[wait.rank] = waited.get(wait.rank, 0) + wait.duration
        for trace in self._timeline.traces:
            name = f"rank {trace.rank}" + (f" ({trace.host})" if len(hosts) > 1 else "")
            labels = [] if trace.recorded.process else ["has recorded nothing"]
            if waited.get(trace.rank, 0) >= 1_000_000:
                labels.append(f"the others waited {seconds(waited[trace.rank])} for it")
            labels += [trace.end] * bool(trace.end)
            if labels:
                name += ": " + ", ".join(labels)
            about = {
                "process_name": {"name": name},
                "process_sort_index": {"sort_index": trace.rank},
            }
            for what, args in about.items():
                yield {"ph": "M", "name": what, "args": args, **self.place(trace.rank, "")}
        for (rank, thread), _ in self._numbers.items():
            name = thread.partition("\0")[0]
            yield {
                "ph": "M",
                "name": "thread_name",
                "args": {"name": name},
                **self.place(rank, thread),
            }


def _call(
    timeline: Timeline, threads: _Threads, operation: TracedCall, wait: TracedWait | None
) -> Iterator[Event]:
    record, place = operation.record, threads.of(operation)
    args = _args(timeline, operation)
    if wait is not None:
        args["waited"] = f"for rank {wait.rank}: {seconds(wait.duration)}"
    category = (
        "wait" if not operation.communicator else "p2p" if record.number < 0 else "collective"
    )
    yield {
        "ph": "X",
        "name": record.what + " (not finished)" * (record.state == OPEN),
        "cat": category,
        "ts": _us(operation.begin - timeline.begin),
        "dur": _us(operation.end - operation.begin),
        **place,
        "args": args,
    }
    if wait is not None and wait.duration >= _SHOWN_NS:
        yield {
            "ph": "X",
            "name": f"waiting for rank {wait.rank}",
            "cat": "waiting",
            "cname": _WAITING,
            "ts": _us(operation.begin - timeline.begin),
            "dur": _us(wait.duration),
            **place,
            "args": {"for": f"{wait.what.record.what}{number_of(wait.what)}"},
        }
    if _starts(operation):
        common = {"cat": "request", "id": f"{operation.rank}:{record.ordinal}", **place}
        end = operation.done or timeline.end
        name = record.what + " (not finished)" * (not operation.done)
        begin = _us(operation.begin - timeline.begin)
        yield {"ph": "b", "name": name, "ts": begin, **common, "args": args}
        yield {"ph": "e", "name": name, "ts": _us(end - timeline.begin), **common}


def _starts(operation: TracedCall) -> bool:
    """Whether a call has started what goes on after it."""
    what = operation.record.what
    return operation.record.state == DONE and what not in (operation.base, "allreduce")


def _args(timeline: Timeline, operation: TracedCall) -> Event:
    record = operation.record
    args: Event = {}
    if operation.communicator:
        args["communicator"] = timeline.communicators[operation.communicator].name
    if record.number >= 0:
        args["number"] = record.number
    if record.nbytes >= 0:
        args["bytes"] = record.nbytes
    if record.algorithm:
        args["algorithm"] = record.algorithm
    peer = "root" if operation.base in _RECEIVED_BY_ROOT else "dest"
    fields = {
        peer: record.peer,
        "tag": record.tag,
        "source": record.source,
        "received tag": record.receive_tag,
    }
    for name, value in fields.items():
        if value >= 0:
            args[name] = value
        elif value == -1:
            args[name] = "any"
    args["caller"] = record.place
    args["of this rank"] = record.ordinal
    if record.state != DONE:
        args["state"] = "not finished" if record.state == OPEN else "failed"
    return args


def _arrow(
    timeline: Timeline, threads: _Threads, number: int, message: TracedMessage
) -> Iterator[Event]:
    """Yield an arrow from where a message is sent to where its receiver has it."""
    send, receive = message
    at: TracedCall | None = receive
    if receive.record.what in ("irecv", "isendrecv"):
        at = timeline.waiting_for(receive)
    if at is None:
        return
    common = {"cat": "message", "name": "message", "id": number}
    begin, end = send.begin - timeline.begin, max(at.begin, at.end - 1) - timeline.begin
    yield {"ph": "s", "ts": _us(begin), **common, **threads.of(send)}
    yield {"ph": "f", "bp": "e", "ts": _us(end), **common, **threads.of(at)}


def _gap(timeline: Timeline, threads: _Threads, rank: int) -> Event:
    """Return what says where calls are missing."""
    recorded = timeline.traces[rank].recorded
    operations = timeline.operations[rank]
    before, after = operations[recorded.lost_from - 1], operations[recorded.lost_from]
    return {
        "ph": "X",
        "name": f"{recorded.lost} calls are not here",
        "cat": "lost",
        "ts": _us(before.begin - timeline.begin),
        "dur": _us(max(0, after.begin - before.begin)),
        **threads.place(rank, "not recorded"),
        "args": {"calls": recorded.lost},
    }


def number_of(operation: TracedCall) -> str:
    """Return the number of a collective call, as messages show it; "" of others."""
    return f" #{operation.record.number}" if operation.record.number >= 0 else ""


def seconds(nanoseconds: int) -> str:
    """Return a time with a unit."""
    for limit, unit in ((1e9, "s"), (1e6, "ms"), (1e3, "us")):
        if nanoseconds >= limit:
            value = nanoseconds / limit
            return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"
    return f"{nanoseconds} ns"


def _us(nanoseconds: int) -> float:
    return nanoseconds / 1000
