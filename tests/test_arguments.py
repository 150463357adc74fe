"""Wrong arguments: one clear error before anything is sent, and the communicator still works."""

from __future__ import annotations

import numpy as np
import pytest


def sizes(*sizes: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("ranks", sizes, indirect=True, scope="module")


def add(comm, k):
    return int(comm.all_reduce(k))

@sizes(1, 3)
def test_a(ranks):
    assert ranks(add, 3) == [3*ranks.size]*ranks.size

@sizes(1, 3)
def test_b(ranks):
    def program(comm):
        x = comm.rank
        assert x != 1, f"rank {x}"
        return comm.all_reduce(2)
    ranks(program)
