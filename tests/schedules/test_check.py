"""The proof holds for every algorithm, and finds the faults planted here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from proof_cases import Steps, _edited
from tiers import few

from pycoll.errors import ProofError
from pycoll.schedule import Recv, Send, Step, chunks_of, recv_reduce
from pycoll.schedules import (
    ROOTED,
    TABLE,
    Algorithm,
    find,
    linear,
    steps_of,
)
from pycoll.schedules.check import prove, prove_algorithm

ROWS = [algorithm for row in TABLE.values() for algorithm in row.values()]


def _title(algorithm: Algorithm) -> str:
    return f"{algorithm.collective}-{algorithm.name}"


@pytest.mark.parametrize("most", few([10], [24]))
@pytest.mark.parametrize("algorithm", ROWS, ids=_title)
def test_every_size_and_every_root_is_proved(algorithm: Algorithm, most: int) -> None:
    summary = prove_algorithm(algorithm, max_size=most)
    assert summary.rooted == (algorithm.collective in ROOTED)
    assert summary.proofs >= (most * (most + 1) // 2 if summary.rooted else most)


@pytest.mark.parametrize("algorithm", ROWS, ids=_title)
def test_a_small_window_proves_what_larger_ones_do(algorithm: Algorithm) -> None:
    for size in (3, 6, 8):
        costs = {prove(algorithm.collective, algorithm.name, size, 0, w).cost for w in (1, 2, 4, 9)}
        assert len(costs) == 1


@pytest.mark.parametrize("collective", sorted(ROOTED))
def test_the_proof_of_one_root_stands_only_for_the_same_schedules_turned(collective: str) -> None:
    for algorithm in TABLE[collective].values():

        def steps(rank: int, size: int, root: int, right: Algorithm = algorithm) -> Steps:
            mine = list(steps_of(right, rank, size, root, (0,) * size))
            if (rank, size, root) == (1, 4, 2):
                mine.append(Send(0, 0))
            return mine

        wrong = algorithm._replace(steps=steps, hosts=False, cost=None)
        with pytest.raises(ProofError, match=r"size 4, root 2: rank 1, step \d, .* no Recv for"):
            prove_algorithm(wrong, max_size=4)


@pytest.mark.parametrize(
    ("collective", "name", "size", "cost"),
    [
        # (steps, path, messages, volume, load)
        ("broadcast", "tree", 8, (3, 3, 7, 7, 3)),
        ("broadcast", "tree", 6, (2, 2, 5, 5, 3)),
        ("broadcast", "chain", 8, (7, 7, 7, 7, 1)),
        ("broadcast", "binary_tree", 8, (3, 3, 7, 7, 2)),
        ("broadcast", "double_tree", 9, (4, 4, 16, 16, 2)),
        ("broadcast", "scatter_all_gather", 8, (7, 7, 51, 56, 14)),
        ("reduce", "recursive_halving", 8, (6, 14, 31, 68, 14)),
        ("all_reduce", "ring", 8, (14, 14, 112, 112, 14)),
        ("all_reduce", "ring_2d", 12, (10, 22, 120, 264, 22)),
        ("all_reduce", "recursive_doubling", 8, (3, 3, 24, 24, 3)),
        ("all_reduce", "recursive_doubling", 7, (4, 4, 14, 14, 3)),
        ("all_reduce", "recursive_halving", 8, (6, 14, 48, 112, 14)),
        ("all_reduce", "recursive_halving", 7, (6, 14, 22, 48, 10)),
        ("all_reduce", "double_tree", 8, (6, 6, 28, 28, 4)),
        ("all_reduce", "linear", 4, (2, 2, 24, 24, 6)),
        ("gather", "tree", 8, (3, 7, 7, 12, 7)),
        ("all_gather", "ring", 8, (7, 7, 56, 56, 7)),
        ("all_gather", "recursive_doubling", 8, (3, 7, 24, 56, 7)),
        ("all_gather", "bruck", 7, (3, 6, 21, 42, 6)),
        ("all_gather", "pat", 8, (3, 7, 24, 56, 7)),
        ("all_gather", "central", 8, (2, 8, 14, 56, 49)),
        ("reduce_scatter", "recursive_halving", 8, (3, 7, 24, 56, 7)),
        ("reduce_scatter", "pat", 7, (3, 6, 21, 42, 6)),
        ("all_to_all", "pairwise", 8, (1, 1, 56, 56, 7)),
        ("all_to_all", "bruck", 8, (3, 12, 24, 96, 12)),
        ("scan", "recursive_doubling", 8, (3, 3, 17, 17, 3)),
        ("exscan", "linear", 5, (4, 4, 7, 7, 2)),
        ("barrier", "dissemination", 6, (3, 3, 18, 18, 3)),
    ],
)
def test_costs_are_those_of_the_textbook(
    collective: str, name: str, size: int, cost: tuple[int, ...]
) -> None:
    assert prove(collective, name, size).cost == cost


def test_a_proof_says_what_was_proved() -> None:
    proof = prove("reduce", "linear", 5, root=3, window=2)
    assert proof[:5] == ("reduce", "linear", 5, 3, 2)


@given(data=st.data())
def test_any_step_left_out_is_found(data: st.DataObject) -> None:
    algorithm = data.draw(st.sampled_from(ROWS))
    size = data.draw(st.integers(2, 6))
    root = data.draw(st.integers(0, size - 1))
    rank = data.draw(st.integers(0, size - 1))
    count = len(list(steps_of(algorithm, rank, size, root)))
    assume(count)
    position = data.draw(st.integers(0, count - 1))
    steps = _edited(algorithm, rank, lambda mine: mine.pop(position))
    with pytest.raises(ProofError):
        prove(algorithm.collective, algorithm.name, size, root, steps=steps)


@given(data=st.data())
def test_any_step_with_a_wrong_chunk_or_peer_is_found(data: st.DataObject) -> None:
    algorithm = data.draw(st.sampled_from(ROWS))
    size = data.draw(st.integers(2, 6))
    root = data.draw(st.integers(0, size - 1))
    rank = data.draw(st.integers(0, size - 1))
    right = list(steps_of(algorithm, rank, size, root))
    position = data.draw(st.integers(0, len(right) - 1))
    step = right[position]
    field = data.draw(
        st.sampled_from([f for f in step._fields if f in ("peer", "chunk", "source")])
    )
    limit = size if field == "peer" else algorithm.chunks(size)
    old = getattr(step, field)
    # A message of several chunks goes wrong in one of them, or is cut to one.
    wrong: Any = data.draw(st.integers(-1, limit).filter(lambda value: value != old))
    if field == "chunk" and not isinstance(old, int):
        index = data.draw(st.integers(0, len(old) - 1))
        wrong = (*old[:index], wrong, *old[index + 1 :])
        assume(wrong != chunks_of(step))

    def spoil(mine: Steps) -> None:
        fields: dict[str, Any] = {**step._asdict(), field: wrong}
        mine[position] = type(step)(**fields)

    steps = _edited(algorithm, rank, spoil)
    with pytest.raises(ProofError):
        prove(algorithm.collective, algorithm.name, size, root, steps=steps)


def test_a_missing_send_is_named_by_the_receive_that_lacks_it() -> None:
    steps = _edited(find("all_gather", "ring"), 1, lambda mine: mine.pop(4))
    with pytest.raises(ProofError) as caught:
        prove("all_gather", "ring", 4, steps=steps)
    assert str(caught.value) == (
        "all_gather ring, size 4: rank 2, step 5, Recv(peer=1, chunk=3, scratch=False): "
        "rank 1 has no Send for this message"
    )


def test_a_message_left_over_is_found() -> None:
    steps = _edited(find("reduce", "tree"), 3, lambda mine: mine.append(Send(0, 0)))
    with pytest.raises(ProofError, match=r"rank 3, step 1, .*: rank 0 has no Recv for this"):
        prove("reduce", "tree", 4, steps=steps)


def test_a_wrong_peer_is_found() -> None:
    def spoil(mine: Steps) -> None:
        mine[0] = Send(3, 0)

    steps = _edited(find("broadcast", "linear"), 0, spoil)
    with pytest.raises(ProofError, match=r"rank 0, step 2, .*: rank 3 has no Recv"):
        prove("broadcast", "linear", 4, steps=steps)


def test_a_wrong_chunk_is_found_where_it_is_combined() -> None:
    def spoil(mine: Steps) -> None:
        mine[0] = Send(2, 2)

    steps = _edited(find("reduce_scatter", "ring"), 1, spoil)
    with pytest.raises(ProofError, match=r"rank 2, step 2, .*: combines 2 of chunk 0 with 1 of c"):
        prove("reduce_scatter", "ring", 4, steps=steps)


def test_a_wrong_block_is_found_at_the_end_of_all_to_all() -> None:
    def spoil(mine: Steps) -> None:
        assert mine[2::2] == [Recv(1, 4), Recv(2, 5)]
        mine[2::2] = [Recv(1, 5), Recv(2, 4)]

    steps = _edited(find("all_to_all", "linear"), 0, spoil)
    with pytest.raises(ProofError, match="rank 0 ends with 2 of chunk 0 in chunk 4 instead of 1"):
        prove("all_to_all", "linear", 3, steps=steps)


def test_a_contribution_combined_twice_is_found() -> None:
    def steps(rank: int, size: int, root: int) -> Iterator[Step]:
        yield from linear.reduce(rank, size, root)
        if rank == 2:
            yield Send(0, 0)
        if rank == 0:
            yield from recv_reduce(2, 0)

    with pytest.raises(ProofError) as caught:
        prove("reduce", "linear", 3, steps=steps)
    assert str(caught.value) == (
        "reduce linear, size 3, root 0: rank 0, step 5, Reduce(chunk=0, incoming_first=False): "
        "combines rank 2 twice: has ((0 1) 2) of chunk 0, gets 2 of chunk 0 from rank 2"
    )
