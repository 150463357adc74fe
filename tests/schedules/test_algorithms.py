"""The algorithms on real arrays, in random order, and the table they stand in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import accumulate
from random import Random
from typing import Any

import numpy as np
import pytest

from pycoll.schedule import Copy, Recv, Reduce, Send
from pycoll.schedules import (
    REDUCING,
    ROOTED,
    TABLE,
    Algorithm,
    find,
    names,
    ring_2d,
    schedule,
    trees,
)
from pycoll.schedules.folding import fold_of
from pycoll.schedules.relabel import relabel

ROWS = [algorithm for row in TABLE.values() for algorithm in row.values()]
IN_RANK_ORDER = [algorithm for algorithm in ROWS if algorithm.rank_order]
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 11)

Chunks = dict[int, Any]


def _title(algorithm: Algorithm) -> str:
    return f"{algorithm.collective}-{algorithm.name}"


def _roots(algorithm: Algorithm, size: int) -> range:
    return range(size if algorithm.collective in ROOTED else 1)


def _run(algorithm: Algorithm, root: int, ranks: list[Chunks], seed: int, window: int) -> None:
    """Run all ranks in a random order: a message moves when both halves may be posted."""
    size, random = len(ranks), Random(seed)
    plans = [
        schedule(algorithm.collective, algorithm.name, r, size, root=root) for r in range(size)
    ]
    waits = [list(plan.waits) for plan in plans]
    done = [[False] * len(plan.steps) for plan in plans]
    scratch: dict[tuple[int, int], Any] = {}

    def may_run(rank: int) -> list[int]:
        steps = plans[rank].steps
        into_scratch = [i for i, s in enumerate(steps) if isinstance(s, Recv) and s.scratch]
        opened = [i for i in into_scratch if not done[rank][i + 1]][:window]
        return [
            i
            for i in range(len(steps))
            if not done[rank][i] and waits[rank][i] == 0 and (i not in into_scratch or i in opened)
        ]

    def complete(rank: int, i: int) -> None:
        done[rank][i] = True
        for later in plans[rank].successors[i]:
            waits[rank][later] -= 1

    def events() -> list[Callable[[], None]]:
        found: list[Callable[[], None]] = []
        sends: dict[tuple[int, int, int], int] = {}
        receives: dict[tuple[int, int, int], int] = {}
        for rank in range(size):
            for i in may_run(rank):
                step, number = plans[rank].steps[i], plans[rank].number[i]
                if isinstance(step, Send):
                    sends[rank, step.peer, number] = i
                elif isinstance(step, Recv):
                    receives[step.peer, rank, number] = i
                else:
                    found.append(lambda rank=rank, i=i: local(rank, i))  # type: ignore[misc]
        for key in sends.keys() & receives.keys():
            found.append(
                lambda k=key, s=sends, r=receives: deliver(k[0], s[k], k[1], r[k])  # type: ignore[misc]
            )
        return found

    def local(rank: int, i: int) -> None:
        step, held = plans[rank].steps[i], ranks[rank]
        if isinstance(step, Copy):
            held[step.chunk] = held[step.source].copy()
        elif isinstance(step, Reduce):
            arrived = scratch.pop((rank, i - 1))
            for chunk, incoming in zip(plans[rank].chunks[i], arrived, strict=True):
                own = held[chunk]
                held[chunk] = incoming + own if step.incoming_first else own + incoming
        complete(rank, i)

    def deliver(source: int, i: int, dest: int, j: int) -> None:
        into = plans[dest].steps[j]
        assert isinstance(into, Recv)
        data = [ranks[source][chunk].copy() for chunk in plans[source].chunks[i]]
        if into.scratch:
            scratch[dest, j] = data
        else:
            ranks[dest].update(zip(plans[dest].chunks[j], data, strict=True))
        complete(source, i)
        complete(dest, j)

    while possible := events():
        random.choice(possible)()
    assert all(all(steps) for steps in done)


def _inputs(
    algorithm: Algorithm, size: int, root: int, value: Callable[[int], Any]
) -> list[Chunks]:
    """What each rank holds at the start, cut from `value(rank)`."""
    chunks = algorithm.chunks(size)
    match algorithm.collective:
        case "broadcast" | "scatter":
            whole = dict(enumerate(np.array_split(value(root), chunks)))
            return [whole if rank == root else {} for rank in range(size)]
        case "gather" | "all_gather":
            return [{rank: value(rank)} for rank in range(size)]
        case "all_to_all":
            chunks = size
        case "exscan":
            chunks = 1
    return [dict(enumerate(np.array_split(value(rank), chunks))) for rank in range(size)]


def _whole(held: Chunks) -> Any:
    return np.concatenate([held[chunk] for chunk in sorted(held)])


def _result(algorithm: Algorithm, rank: int, size: int, held: Chunks) -> Any:
    """What a rank has at the end, as one array."""
    match algorithm.collective:
        case "scatter" | "reduce_scatter":
            return held[rank]
        case "all_to_all":
            return _whole({chunk: held[chunk] for chunk in range(size, 2 * size)})
        case "exscan":
            return held[1]
    return _whole(held)


def _wanted(algorithm: Algorithm, size: int, root: int, value: Callable[[int], Any]) -> list[Any]:
    """What each rank should hold at the end, as one array; None where it does not matter."""
    values = [value(rank) for rank in range(size)]
    prefixes = list(accumulate(values))
    total = prefixes[-1]
    gathered = np.concatenate(values)
    match algorithm.collective:
        case "broadcast":
            return [values[root]] * size
        case "reduce":
            return [total if rank == root else None for rank in range(size)]
        case "gather":
            return [gathered if rank == root else None for rank in range(size)]
        case "all_gather":
            return [gathered] * size
        case "scatter":
            return np.array_split(values[root], size)
        case "reduce_scatter":
            return np.array_split(total, size)
        case "all_to_all":
            blocks = [np.array_split(v, size) for v in values]
            return [np.concatenate([blocks[i][rank] for i in range(size)]) for rank in range(size)]
        case "scan":
            return prefixes
        case "exscan":
            return [None, *prefixes[:-1]]
    return [total] * size


def _check(algorithm: Algorithm, size: int, root: int, value: Callable[[int], Any]) -> None:
    ranks = _inputs(algorithm, size, root, value)
    _run(algorithm, root, ranks, seed=size * 100 + root, window=1 + root % 3)
    for rank, wanted in enumerate(_wanted(algorithm, size, root, value)):
        if wanted is not None:
            np.testing.assert_array_equal(_result(algorithm, rank, size, ranks[rank]), wanted)


# A barrier moves no bytes, and its ranks may hear of one another more than once.
@pytest.mark.parametrize("algorithm", [a for a in ROWS if a.collective != "barrier"], ids=_title)
def test_every_algorithm_gives_the_right_arrays_for_every_root(algorithm: Algorithm) -> None:
    for size in SIZES:
        for root in _roots(algorithm, size):
            _check(algorithm, size, root, lambda rank: np.arange(9) + 100 * rank)


@pytest.mark.parametrize("algorithm", IN_RANK_ORDER, ids=_title)
def test_rank_order_keeps_the_order_of_strings(algorithm: Algorithm) -> None:
    for size in SIZES:
        for root in _roots(algorithm, size):
            _check(
                algorithm, size, root, lambda rank: np.array([f"{rank}{i} " for i in "abc"], object)
            )


@pytest.mark.parametrize("name", names("all_reduce"))
def test_all_reduce_gives_the_same_bits_on_every_rank_in_every_run(name: str) -> None:
    algorithm, size = find("all_reduce", name), 7
    results = set()
    for seed in range(5):
        ranks = _inputs(
            algorithm,
            size,
            0,
            lambda rank: np.random.default_rng(rank).standard_normal(50).astype(np.float32),
        )
        _run(algorithm, 0, ranks, seed, window=2)
        results |= {_whole(held).tobytes() for held in ranks}
    assert len(results) == 1


@pytest.mark.parametrize("algorithm", ROWS, ids=_title)
def test_one_rank_alone_sends_nothing(algorithm: Algorithm) -> None:
    plan = schedule(algorithm.collective, algorithm.name, 0, 1)
    assert not [step for step in plan.steps if not isinstance(step, Copy)]


@pytest.mark.parametrize("algorithm", ROWS, ids=_title)
def test_every_algorithm_states_its_cost_and_its_source(algorithm: Algorithm) -> None:
    text = algorithm.steps.__doc__ or ""
    cost = text[text.index("Cost: ") : text.index("Source: ")]
    assert "Cost: as `" in cost or ("Cost: steps " in cost and "bytes " in cost)
    assert "Source: " in text


@pytest.mark.parametrize("collective", sorted(REDUCING))
def test_every_reducing_collective_has_an_algorithm_in_rank_order(collective: str) -> None:
    assert any(algorithm.rank_order for algorithm in TABLE[collective].values())


@pytest.mark.parametrize("collective", ["reduce", "all_reduce"])
def test_operators_of_whole_values_that_do_not_commute_can_be_reduced(collective: str) -> None:
    rows = TABLE[collective].values()
    assert any(a.rank_order and {a.chunks(size) for size in range(1, 65)} == {1} for a in rows)


def test_names_and_find_agree_with_the_table() -> None:
    assert names("scatter") == ["tree", "linear"]
    for collective in TABLE:
        for name in names(collective):
            algorithm = find(collective, name)
            assert (algorithm.collective, algorithm.name) == (collective, name)


def test_an_unknown_algorithm_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ValueError, match=r"broadcast has no algorithm 'ring'; it has tree, linear"):
        find("broadcast", "ring")


def test_an_unknown_collective_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ValueError, match=r"no collective 'bcast'; write broadcast"):
        schedule("bcast", "tree", 0, 2)


def test_the_root_does_not_matter_where_there_is_none() -> None:
    assert schedule("barrier", "tree", 1, 4, root=3) == schedule("barrier", "tree", 1, 4)


def test_the_binomial_tree_of_eight_is_the_one_drawn() -> None:
    assert [trees.binomial_children(place, 8) for place in range(8)] == [
        [1, 2, 4], [], [3], [], [5, 6], [], [7], [],
    ]  # fmt: skip


@pytest.mark.parametrize("size", [*range(1, 34), 100, 255, 256, 257])
def test_binomial_trees_span_all_positions_in_runs(size: int) -> None:
    for place in range(size):
        branch = [place]
        for child in trees.binomial_children(place, size):
            assert trees.binomial_parent(child) == place
            branch += trees.binomial_branch(child, size)
        assert branch == list(trees.binomial_branch(place, size))
    assert trees.binomial_branch(0, size) == range(size)
    assert len(trees.binomial_children(0, size)) == (size - 1).bit_length()


def test_the_complete_binary_tree_of_eight_is_the_one_drawn() -> None:
    assert [list(trees.binary_children(place, 8)) for place in range(8)] == [
        [1, 2], [3, 4], [5, 6], [7], [], [], [], [],
    ]  # fmt: skip


@pytest.mark.parametrize("size", [*range(1, 34), 100, 1023])
def test_complete_binary_trees_span_all_positions(size: int) -> None:
    children = [(child, place) for place in range(size) for child in _binary(place, size)]
    assert children == [(child, trees.binary_parent(child)) for child in range(1, size)]


def _binary(place: int, size: int) -> range:
    return trees.binary_children(place, size)


def test_the_double_tree_of_eight_is_the_one_drawn() -> None:
    first, second = zip(*(trees.double_tree(place, 8) for place in range(8)), strict=True)
    assert [list(node.children) for node in first] == [
        [4], [], [1, 3], [], [2, 6], [], [5, 7], [],
    ]  # fmt: skip
    assert [sorted(node.children) for node in second] == [
        [], [0, 2], [], [1, 5], [], [4, 6], [], [3],
    ]  # fmt: skip
    assert trees.double_tree_roots(8) == (0, 7)


@pytest.mark.parametrize("size", [*range(2, 130), 255, 256, 257, 1000, 1023, 1024])
def test_both_double_trees_span_all_positions_and_share_no_inner_one(size: int) -> None:
    nodes = [trees.double_tree(place, size) for place in range(size)]
    inner: Counter[int] = Counter()
    for tree, root in enumerate(trees.double_tree_roots(size)):
        level, depth, seen = [root], 0, {root}
        assert nodes[root][tree].parent is None
        while below := [child for place in level for child in nodes[place][tree].children]:
            assert all(nodes[c][tree].parent == p for p in level for c in nodes[p][tree].children)
            assert not seen & set(below)
            seen.update(below)
            level, depth = below, depth + 1
        assert seen == set(range(size))
        assert depth == (size - 1).bit_length()
        inner.update(place for place in range(size) if nodes[place][tree].children)
    # Of two ranks each is the root of one tree; the only inner position of both is 0, if n is odd.
    assert [place for place, trees_ in inner.items() if trees_ == 2] == ([0] if size % 2 else [])


@pytest.mark.parametrize("size", [1, 2, 3, 5, 6, 7, 8, 12, 15, 16])
def test_a_fold_leaves_a_power_of_two_and_the_rank_it_must_keep(size: int) -> None:
    for keep in range(size):
        fold = fold_of(size, keep)
        assert fold.core == 1 << (size.bit_length() - 1)
        behind = [fold.ranks(place) for place in range(fold.core)]
        assert [rank for ranks in behind for rank in ranks] == list(range(size))
        assert all(fold.place(rank) == p for p, ranks in enumerate(behind) for rank in ranks)
        assert fold.stays(keep)
        assert sum(fold.stays(rank) for rank in range(size)) == fold.core
        assert {len(ranks) for ranks in behind} <= {1, 2}
        if fold.pairs:
            assert fold.other(keep) is not None


@pytest.mark.parametrize(
    ("size", "shape"), [(1, (1, 1)), (7, (1, 7)), (12, (3, 4)), (16, (4, 4)), (26, (2, 13))]
)
def test_rows_and_columns_are_as_square_as_they_can_be(size: int, shape: tuple[int, int]) -> None:
    assert ring_2d.shape(size) == shape


def test_relabelled_steps_have_other_ranks_and_chunks() -> None:
    steps = [Copy(0, 1), Send(1, (0, 1)), Recv(0, 1, True), Reduce(1, True)]
    assert list(relabel(steps, [7, 8], [4, 5])) == [
        Copy(4, 5),
        Send(8, (4, 5)),
        Recv(7, 5, True),
        Reduce(5, True),
    ]
    assert list(relabel([Send(0, 1), Send(1, range(2))], [0, 1], [(0, 1), (2, 3)])) == [
        Send(0, (2, 3)),
        Send(1, (0, 1, 2, 3)),
    ]


def test_a_broadcast_by_scatter_sends_nobody_what_it_has() -> None:
    for size in SIZES:
        for rank in range(size):
            plan = schedule("broadcast", "scatter_all_gather", rank, size, root=2 % size)
            received = [
                chunk
                for step, chunks in zip(plan.steps, plan.chunks, strict=True)
                if isinstance(step, Recv)
                for chunk in chunks
            ]
            assert sorted(received) == ([] if rank == 2 % size else list(range(size)))


def test_the_largest_messages_of_pat_go_to_the_nearest_rank() -> None:
    plan = schedule("all_gather", "pat", 0, 8)
    sends = [(step.peer, step.chunk) for step in plan.steps if isinstance(step, Send)]
    assert sends == [(4, (0,)), (2, (0, 4)), (1, (0, 6, 4, 2))]


def test_positions_count_from_the_root() -> None:
    assert [trees.position(rank, 5, 3) for rank in range(5)] == [2, 3, 4, 0, 1]
    assert all(trees.rank_at(trees.position(r, 5, 3), 5, 3) == r for r in range(5))
