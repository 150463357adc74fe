"""Memory that calls use one after the other (pycoll/scratch.py)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pycoll.scratch import KEPT_NBYTES, SPARE, WORTH_NBYTES, Scratch


def test_what_was_given_back_is_taken_again() -> None:
    scratch = Scratch()
    memory = scratch.take(WORTH_NBYTES)
    scratch.give_back(memory)
    assert scratch.take(WORTH_NBYTES - 1) is memory
    assert scratch.take(WORTH_NBYTES - 1) is not memory


def test_memory_is_not_taken_for_what_is_larger_or_much_smaller() -> None:
    scratch = Scratch()
    memory = scratch.take(SPARE * WORTH_NBYTES)
    scratch.give_back(memory)
    for nbytes in (SPARE * WORTH_NBYTES + 1, WORTH_NBYTES - 1):
        taken = scratch.take(nbytes)
        assert len(taken) >= nbytes
        assert taken is not memory
    assert scratch.take(WORTH_NBYTES) is memory


def test_only_so_much_is_kept_and_small_pieces_are_not() -> None:
    scratch = Scratch()
    pieces = [scratch.take(KEPT_NBYTES // 4) for _ in range(6)]
    for piece in pieces:
        scratch.give_back(piece)
    again = [scratch.take(KEPT_NBYTES // 4) for _ in range(6)]
    assert sum(any(piece is other for other in pieces) for piece in again) == 4
    small = scratch.take(WORTH_NBYTES - 1)
    scratch.give_back(small)
    assert scratch.take(WORTH_NBYTES - 1) is not small


@pytest.mark.parametrize(
    "ranks",
    [(2, ("--transport", "tcp"), {"PYCOLL_ENGINE": "python"})],
    indirect=True,
    scope="module",
)
def test_calls_take_the_memory_of_the_call_before(ranks: Any) -> None:
    def program(comm: Any) -> None:
        x, out = np.ones(1 << 20), np.empty(1 << 20)
        kept = comm._group.engine.scratch._kept
        comm.all_reduce(x, out=out, algorithm="ring")
        first = {id(memory) for memory in kept}
        assert first
        for _ in range(3):
            comm.all_reduce(x, out=out, algorithm="ring")
            assert (out == 2).all()
        assert {id(memory) for memory in kept} == first

    ranks(program)
