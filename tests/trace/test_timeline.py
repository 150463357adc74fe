"""What is found in the records of several ranks, where it is not plain to see."""

from __future__ import annotations

import mmap
import os
from typing import Any

import pytest

from pycoll._trace import records
from pycoll._trace.records import ABSENT, DONE, FAILED, OPEN, RankRecords, Record
from pycoll._trace.timeline import Clock, RankTrace, Timeline

WORLD = "1\0world\0" + "0,1,2"


def call(ordinal: int, what: str, begin: int, end: int, **more: Any) -> Record:
    """A call on the world, from and to so many nanoseconds."""
    fields: dict[str, Any] = dict.fromkeys(("peer", "source", "tag", "receive_tag"), ABSENT)
    fields |= dict.fromkeys(("place", "algorithm"), "")
    fields |= {"thread": "Main", "state": DONE, "number": -1, "nbytes": 8, "done": 0}
    fields |= {"communicator": WORLD, "waited_by": -1}
    return Record(
        **(fields | {"ordinal": ordinal, "what": what, "begin": begin, "end": end} | more)
    )


def timeline(*calls: list[Record], lost: int = 0) -> Timeline:
    """The timeline of ranks that have made these calls."""
    return Timeline(
        [
            RankTrace(rank, "host", Clock(), RankRecords(1, made, lost, len(made)))
            for rank, made in enumerate(calls)
        ]
    )


def waits(found: Timeline) -> set[tuple[int, int, int]]:
    """Who has waited, for whom, how long."""
    return {
        (each.operation.rank, each.rank, each.duration) for each in found.waits(found.messages())
    }


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("barrier", {(0, 2, 200), (1, 2, 100)}),
        ("broadcast", {(0, 1, 100)}),
        ("reduce", {(1, 2, 100)}),
        ("scan", set()),
        ("exscan", set()),
    ],
)
def test_a_rank_waits_for_those_without_whom_its_call_cannot_end(
    what: str, expected: set[tuple[int, int, int]]
) -> None:
    root = {"peer": 1} if what in ("broadcast", "reduce") else {}
    calls = [[call(0, what, 100 * (rank + 1), 900, number=0, **root)] for rank in range(3)]
    assert waits(timeline(*calls)) == expected
    if what.endswith("scan"):  # the ranks before are late: the last one waits for the first
        late = [[call(0, what, 300 - 100 * rank, 900, number=0)] for rank in range(3)]
        assert waits(timeline(*late)) == {(1, 0, 100), (2, 0, 200)}


def test_a_rank_that_has_never_come_is_waited_for_to_the_end() -> None:
    state = {"number": 4, "state": FAILED}
    there = [[call(0, "barrier", 100, 700, **state)], [], [call(0, "barrier", 200, 700, **state)]]
    assert waits(timeline(*there)) == {(0, 1, 600), (2, 1, 500)}
    receive = call(0, "recv", 100, 0, source=2, state=OPEN)
    found = timeline([receive], [call(0, "wait", 1, 800, communicator="")], [])
    assert waits(found) == {(0, 2, 700)}


def test_who_has_started_a_collective_waits_where_it_waits_for_that() -> None:
    started = call(0, "iall_reduce", 100, 110, number=0, done=600, waited_by=1)
    wait = call(1, "wait", 300, 600, communicator="")
    late = call(0, "all_reduce", 500, 600, number=0)
    assert waits(timeline([started, wait], [late], [late])) == {(0, 1, 200)}


def test_messages_of_two_threads_at_the_same_time_have_no_arrows_from_there_on() -> None:
    to = {"peer": 1, "tag": 3}
    sends = [
        call(0, "send", 100, 110, **to),
        call(1, "send", 200, 260, **to),
        call(2, "send", 250, 270, thread="Other", **to),
        call(3, "send", 300, 310, **to),
    ]
    receives = [call(n, "recv", 400 + n, 410 + n, source=0, receive_tag=3) for n in range(4)]
    found = timeline(sends, receives, []).messages()
    assert [each.send.record.ordinal for each in found] == [0, 1]


def test_a_receive_that_failed_has_got_no_message() -> None:
    to = {"peer": 1, "tag": 3}
    sends = [call(0, "send", 100, 110, **to), call(1, "send", 200, 210, **to)]
    got = {"source": 0, "receive_tag": 3}
    receives = [
        call(0, "recv", 100, 110, state=FAILED, **got),
        call(1, "recv", 120, 130, **got),
        call(2, "irecv", 140, 150, **got),
    ]
    found = timeline(sends, receives, []).messages()
    pairs = [(each.send.record.ordinal, each.receive.record.ordinal) for each in found]
    assert pairs == [(0, 1), (1, 2)]


def test_a_clock_that_drifts_is_put_right_in_between() -> None:
    clock = Clock([(1000, 500, 3), (3000, 700, 8)])
    assert [clock.here(there) for there in (1000, 2000, 3000)] == [500, 1400, 2300]
    assert clock.bound == 8
    assert Clock().here(7) == 7


def test_what_the_child_of_a_fork_does_is_not_in_the_records() -> None:
    descriptor = records.make(8)
    image = mmap.mmap(descriptor, 0)
    recorder = records.adopt(records.variable(descriptor))
    assert recorder is not None
    ordinal = recorder.begin(recorder.number_of("send"))
    if (child := os.fork()) == 0:
        try:
            recorder.end(ordinal)
            recorder.begin(recorder.number_of("recv"))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    found = records.read(image)
    assert [(each.what, each.state) for each in found.records] == [("send", OPEN)]
    assert found.process == os.getpid()


def test_a_late_end_does_not_change_the_record_that_has_taken_its_place() -> None:
    descriptor = records.make(4)
    image = mmap.mmap(descriptor, 0)
    recorder = records.adopt(records.variable(descriptor))
    assert recorder is not None
    numbers = [recorder.begin(recorder.number_of("send"), number=n) for n in range(6)]
    recorder.end(numbers[2])  # in its place is the fifth
    recorder.end(numbers[0])
    found = records.read(image)
    kept = [(each.number, each.state) for each in found.records]
    assert kept == [(0, DONE), (1, OPEN), (4, OPEN), (5, OPEN)]
    assert (found.lost, found.lost_from) == (2, 2)


def test_a_descriptor_that_is_something_else_by_now_is_not_written_to() -> None:
    with open(os.devnull) as other:
        inode = os.fstat(other.fileno()).st_ino
        for text in ("", "x", "5", f"{other.fileno()}:{inode}", f"{other.fileno()}:1", "9999:3"):
            assert records.adopt(text) is None
