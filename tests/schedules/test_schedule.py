"""What compile_schedule infers: hazards and message numbers."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pycoll.schedule import Copy, Recv, Reduce, Schedule, Send, Step, compile_schedule, recv_reduce


def test_a_send_waits_for_the_last_writer_of_its_chunk() -> None:
    schedule = compile_schedule([Recv(1, 0), Recv(2, 0), Send(3, 0)])
    assert schedule.successors == ((1,), (2,), ())
    assert schedule.waits == (0, 1, 1)


def test_a_writer_waits_for_the_readers_since_the_last_writer() -> None:
    schedule = compile_schedule([Send(1, 0), Send(2, 0), Recv(3, 0), Send(1, 0), Recv(3, 0)])
    assert schedule.successors == ((2,), (2,), (3, 4), (4,), ())


def test_readers_of_one_chunk_do_not_wait_for_each_other() -> None:
    assert compile_schedule([Send(1, 0), Copy(0, 1), Send(2, 0)]).waits == (0, 0, 0)


def test_steps_on_different_chunks_do_not_wait_for_each_other() -> None:
    assert compile_schedule([Recv(1, 0), Send(1, 1), *recv_reduce(1, 2)]).waits == (0, 0, 0, 1)


def test_a_receive_into_scratch_waits_for_nothing_and_its_reduction_for_the_chunk() -> None:
    schedule = compile_schedule([Send(1, 0), *recv_reduce(1, 0), *recv_reduce(1, 0)])
    assert schedule.waits == (0, 0, 2, 0, 2)
    assert schedule.successors == ((2,), (2,), (4,), (4,), ())


def test_a_copy_onto_itself_does_not_wait_for_itself() -> None:
    assert compile_schedule([Copy(0, 0), Copy(0, 0)]).waits == (0, 1)


def test_a_message_of_several_chunks_waits_for_the_writers_of_all() -> None:
    steps = [Recv(1, 0), Recv(1, 2), Recv(1, 3), Send(2, (0, 2)), Send(2, range(2, 4))]
    schedule = compile_schedule(steps)
    assert schedule.successors == ((3,), (3, 4), (4,), (), ())
    assert schedule.chunks == ((0,), (2,), (3,), (0, 2), (2, 3))


def test_a_receive_into_several_chunks_waits_for_the_readers_of_all() -> None:
    schedule = compile_schedule([Send(1, 0), Send(1, range(1, 3)), Send(1, 3), Recv(1, (2, 0))])
    assert schedule.successors == ((3,), (3,), (), ())
    assert schedule.number == (0, 1, 2, 0)


def test_several_chunks_are_reduced_once_all_of_them_have_come() -> None:
    schedule = compile_schedule([Send(1, 0), *recv_reduce(1, (0, 1)), Send(1, 1)])
    assert schedule.successors == ((2,), (2,), (3,), ())
    assert schedule.waits == (0, 0, 2, 1)


@pytest.mark.parametrize("chunks", [(), range(0), (0, 1, 0)])
def test_a_step_that_names_no_chunk_or_one_twice_is_refused(chunks: Any) -> None:
    with pytest.raises(ValueError, match=r"step 1: .* names no chunk, or one twice"):
        compile_schedule([Recv(1, 0), Send(1, chunks)])


def test_messages_are_numbered_for_each_peer_and_direction() -> None:
    steps = [Send(1, 0), Send(2, 0), Recv(1, 1), Send(1, 1), *recv_reduce(1, 0), Copy(0, 1)]
    assert compile_schedule(steps).number == (0, 0, 0, 1, 1, 0, 0)


@pytest.mark.parametrize(
    "steps",
    [
        [Reduce(0, False)],
        [Recv(1, 0), Reduce(0, False)],
        [Recv(1, 1, scratch=True), Reduce(0, False)],
        [Recv(1, 0, scratch=True), Send(1, 1), Reduce(0, False)],
        [*recv_reduce(1, 0), Reduce(0, False)],
        [Recv(1, (0, 1), scratch=True), Reduce((1, 0), False)],
        [Recv(1, (0, 1), scratch=True), Reduce(0, False)],
    ],
)
def test_a_reduce_that_does_not_follow_its_own_receive_is_refused(steps: list[Step]) -> None:
    with pytest.raises(ValueError, match="does not follow its own Recv"):
        compile_schedule(steps)


def _data(schedule: Schedule, order: list[int]) -> tuple[dict[int, Any], dict[Any, Any]]:
    """Run the steps of one rank in an order: what it holds at the end and what it sent."""
    holds: dict[int, Any] = {chunk: ("own", chunk) for chunk in range(4)}
    scratch: dict[int, Any] = {}
    sent: dict[Any, Any] = {}
    for position in order:
        chunks, number = schedule.chunks[position], schedule.number[position]
        match schedule.steps[position]:
            case Send(peer):
                sent[peer, number] = [holds[chunk] for chunk in chunks]
            case Recv(peer, _, into_scratch):
                message = {chunk: ("from", peer, number, i) for i, chunk in enumerate(chunks)}
                if into_scratch:
                    scratch[position] = message
                else:
                    holds.update(message)
            case Reduce(_, incoming_first):
                for chunk, incoming in scratch.pop(position - 1).items():
                    pair = (holds[chunk], incoming)
                    holds[chunk] = pair[::-1] if incoming_first else pair
            case Copy(source, chunk):
                holds[chunk] = holds[source]
    return holds, sent


def _allowed_order(schedule: Schedule, random: Random) -> list[int]:
    waits = list(schedule.waits)
    ready = [position for position, count in enumerate(waits) if count == 0]
    order = []
    while ready:
        position = ready.pop(random.randrange(len(ready)))
        order.append(position)
        for later in schedule.successors[position]:
            waits[later] -= 1
            if waits[later] == 0:
                ready.append(later)
    return order


_peers = st.integers(0, 2)
_chunk = st.integers(0, 3)
_chunks = st.one_of(
    _chunk,
    st.sampled_from([range(2), range(1, 4)]),
    st.lists(_chunk, min_size=1, unique=True).map(tuple),
)
_blocks = st.one_of(
    st.builds(lambda peer, chunk: [Send(peer, chunk)], _peers, _chunks),
    st.builds(lambda peer, chunk: [Recv(peer, chunk)], _peers, _chunks),
    st.builds(lambda source, chunk: [Copy(source, chunk)], _chunk, _chunk),
    st.builds(lambda p, c, first: list(recv_reduce(p, c, first)), _peers, _chunks, st.booleans()),
)


@given(blocks=st.lists(_blocks, max_size=14), random=st.randoms(use_true_random=False))
def test_every_allowed_order_gives_the_data_of_the_program_order(
    blocks: list[list[Step]], random: Random
) -> None:
    schedule = compile_schedule(step for block in blocks for step in block)
    order = _allowed_order(schedule, random)
    assert sorted(order) == list(range(len(schedule.steps)))
    assert _data(schedule, order) == _data(schedule, list(range(len(schedule.steps))))
