"""Rounds: what a picture says that ranks send and hold is what the schedules do."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest

import pycoll
from pycoll._drawing.rounds import Replay
from pycoll._drawing.shape import Ring, phases, shape
from pycoll.schedule import Recv, Send, Step, chunks_of, recv_reduce
from pycoll.schedules import TABLE, Algorithm, find, steps_of
from pycoll.schedules.trees import double_tree

ALL = [algorithm for named in TABLE.values() for algorithm in named.values()]


def on(name: str, size: int, collective: str = "all_reduce", root: int = 0) -> Replay:
    return Replay(find(collective, name), size, root, None)


def own(collective: str, chunks: int, steps: object) -> Algorithm:
    """An algorithm of a test's."""
    return Algorithm(collective, "tried", steps, lambda size: chunks, None)  # type: ignore[arg-type]


# --- random schedules, and what must come of them ------------------------------------------------

Event = tuple[int, int, tuple[int, ...], bool]
"""Sender, receiver, chunks, whether they are combined."""


def random_events(rng: random.Random, size: int, chunks: int) -> list[Event]:
    """Messages in an order in which they could happen one after the other."""
    events = []
    for _ in range(rng.randint(1, 4 * size)):
        sender, receiver = rng.sample(range(size), 2)
        named = tuple(rng.sample(range(chunks), rng.randint(1, chunks)))
        events.append((sender, receiver, named, rng.random() < 0.6))
    return events


def steps_for(events: list[Event], rank: int) -> Iterator[Step]:
    for sender, receiver, chunks, combines in events:
        if rank == sender:
            yield Send(receiver, chunks)
        elif rank == receiver and combines:
            yield from recv_reduce(sender, chunks)
        elif rank == receiver:
            yield Recv(sender, chunks)


def sequential(events: list[Event], size: int, chunks: int) -> list[dict[int, list[Counter[int]]]]:
    """By rank and chunk its values, one after the other, if one event happens at a time."""
    values = [{c: [Counter([rank])] for c in range(chunks)} for rank in range(size)]
    for sender, receiver, named, combines in events:
        for chunk in named:
            value = values[sender][chunk][-1]
            had = values[receiver][chunk][-1]
            values[receiver][chunk].append(had + value if combines else Counter(value))
    return values


def applied(events: list[Event], rank: int, gone: set[int]) -> Counter[int]:
    """How many of the writes of each chunk of a rank have happened when these events are gone.

    A write happens when its message is there, and all that the rank does before with its chunks.
    """
    writes: Counter[int] = Counter()
    blocked: set[int] = set()
    for number, (sender, receiver, named, _) in enumerate(events):
        if rank not in (sender, receiver):
            continue
        if rank == receiver and number in gone and not blocked & set(named):
            writes.update(named)
        elif rank == receiver or number not in gone:
            blocked |= set(named)
    return writes


def test_ranks_hold_what_a_sequential_run_gives_them_and_each_message_travels_once() -> None:
    for seed in range(100):
        compare(seed)


def compare(seed: int) -> None:
    rng = random.Random(seed)
    size, chunks = rng.randint(2, 6), rng.randint(1, 3)
    events = random_events(rng, size, chunks)
    algorithm = own("all_reduce", chunks, lambda rank, size: steps_for(events, rank))
    replay = Replay(algorithm, size, 0, None)
    assert replay.stuck == ()
    values = sequential(events, size, chunks)
    waiting = set(range(len(events)))
    for each, holds in zip(replay.rounds, replay.states[1:], strict=True):
        for ends in ([m.sender for m in each], [m.receiver for m in each]):
            assert len(set(ends)) == len(ends) > 0
        gone = set(range(len(events))) - waiting
        for message in each:
            assert message.chunks == message.into
            event = (message.sender, message.receiver, message.chunks, message.combines)
            # Of two alike in a row either may be the first: they carry the same.
            number = min(number for number in waiting if events[number] == event)
            waiting.remove(number)
            earlier = applied(events[:number], message.sender, set(range(number)))
            sent = applied(events, message.sender, gone)
            assert [sent[chunk] for chunk in message.chunks] == [
                earlier[chunk] for chunk in message.chunks
            ]
        gone = set(range(len(events))) - waiting
        for rank, held in enumerate(holds):
            writes = applied(events, rank, gone)
            for chunk, value in held.items():
                wanted = values[rank][chunk][writes[chunk]]
                assert value == {(sender, chunk): n for sender, n in wanted.items()}
    assert waiting == set()


# --- those of pycoll --------------------------------------------------------------------------


def test_what_known_algorithms_take() -> None:
    assert [len(on("ring", size).rounds) for size in range(1, 6)] == [0, 2, 4, 6, 8]
    assert [len(on("tree", size, "broadcast").rounds) for size in (2, 4, 5, 8)] == [1, 2, 3, 3]
    assert [len(on("recursive_doubling", size).rounds) for size in (2, 4, 8)] == [1, 2, 3]
    assert [len(on("pairwise", size, "all_to_all").rounds) for size in (2, 5, 8)] == [1, 4, 7]


@pytest.mark.parametrize("algorithm", ALL, ids=lambda a: f"{a.collective}-{a.name}")
def test_a_right_algorithm_has_no_flaw_and_sends_all_its_messages(algorithm: Algorithm) -> None:
    for size in range(1, 10):
        hosts = [rank // 3 for rank in range(size)]
        root = size // 2 if algorithm.collective in ("broadcast", "gather") else 0
        replay = Replay(algorithm, size, root, hosts)
        assert (replay.fault, replay.flaws, replay.stuck) == (None, [], ())
        sends = [
            (rank, step.peer, chunks_of(step))
            for rank in range(size)
            for step in steps_of(algorithm, rank, size, root, hosts)
            if isinstance(step, Send)
        ]
        drawn = [(m.sender, m.receiver, m.chunks) for each in replay.rounds for m in each]
        assert sorted(drawn) == sorted(sends)


def test_the_phases_of_a_ring_and_of_a_tree_are_named() -> None:
    assert phases(on("ring", 4)) == ((1, "reduce_scatter"), (4, "all_gather"))
    assert phases(on("recursive_halving", 8)) == ((1, "reduce_scatter"), (4, "all_gather"))
    assert phases(on("tree", 8)) == ((1, "reduce"), (4, "broadcast"))
    assert phases(on("recursive_doubling", 8)) == ()
    assert phases(on("ring", 4, "all_gather")) == ()


def test_trees_and_rings_are_recognized() -> None:
    for size in range(4, 20):
        trees = shape(on("double_tree", size))
        assert isinstance(trees, list)
        nodes = [double_tree(rank, size) for rank in range(size)]
        for which in (0, 1):
            wanted = {
                r: n[which].parent for r, n in enumerate(nodes) if n[which].parent is not None
            }
            assert trees[which].parents == wanted
    for name in ("tree", "binary_tree", "linear"):
        assert [tree.root for tree in shape(on(name, 9, "broadcast", 4)) or ()] == [4]
        assert [tree.root for tree in shape(on(name, 9, "reduce", 4)) or ()] == [4]
    assert shape(on("ring", 5)) == Ring((0, 1, 2, 3, 4))
    assert shape(on("recursive_doubling", 8)) is None


# --- wrong ones ----------------------------------------------------------------------------


def flaws(replay: Replay) -> list[tuple[int, int, int, str]]:
    assert replay.fault is not None
    return [tuple(flaw) for flaw in replay.flaws]  # type: ignore[misc]


def test_what_arrives_twice_is_marked_where_it_does() -> None:
    def too_long(rank: int, size: int) -> Iterator[Step]:
        for i in range(size):
            yield Send((rank + 1) % size, (rank - i) % size)
            yield from recv_reduce((rank - 1) % size, (rank - i - 1) % size)

    replay = Replay(own("all_reduce", 3, too_long), 3, 0, None)
    twice = [(3, rank, rank, f"has rank {rank} twice") for rank in range(3)]
    assert [flaw for flaw in flaws(replay) if "twice" in flaw[3]] == twice


def test_what_never_arrives_is_marked_at_the_end() -> None:
    def pairs(rank: int, size: int) -> Iterator[Step]:
        if rank ^ 1 < size:
            yield Send(rank ^ 1, 0)
            yield from recv_reduce(rank ^ 1, 0, incoming_first=rank % 2 == 1)

    assert flaws(Replay(own("all_reduce", 1, pairs), 3, 0, None)) == [
        (1, 0, 0, "lacks rank 2"),
        (1, 1, 0, "lacks rank 2"),
        (1, 2, 0, "lacks ranks 0, 1"),
    ]


def test_what_is_read_too_early_is_marked() -> None:
    def early(rank: int, size: int, root: int) -> Iterator[Step]:
        if rank == root + 1:
            yield Send(root, 0)
        elif rank == root:
            yield Recv(rank + 1, 0)

    assert (1, 1, 0, "read before it has a value") in flaws(
        Replay(own("broadcast", 1, early), 2, 0, None)
    )


def test_messages_that_never_travel_are_stuck() -> None:
    def deadlock(rank: int, size: int) -> Iterator[Step]:
        yield Recv(1 - rank, 0)
        yield Send(1 - rank, 0)

    replay = Replay(own("all_reduce", 1, deadlock), 2, 0, None)
    assert "deadlock" in str(replay.fault)
    assert sorted((m.sender, m.receiver, m.chunks, m.into) for m in replay.stuck) == [
        (0, 1, (), (0,)),
        (1, 0, (), (0,)),
    ]

    def unheard(rank: int, size: int, root: int) -> Iterator[Step]:
        for peer in range(1, size) if rank == 0 else ():
            yield Send(peer, 0)
        if rank == 1:
            yield Recv(0, 0)

    replay = Replay(own("broadcast", 1, unheard), 3, 0, None)
    assert "rank 2 has no Recv" in str(replay.fault)
    assert [tuple(message) for message in replay.stuck] == [(0, 2, (0,), (), False)]
    assert [len(each) for each in replay.rounds] == [1]


def test_a_step_that_names_no_rank_cannot_be_drawn() -> None:
    def outside(rank: int, size: int) -> Iterator[Step]:
        yield Send(rank + 1, 0)

    with pytest.raises(pycoll.ProofError, match="only ranks 0 to 1"):
        Replay(own("all_reduce", 1, outside), 2, 0, None)
