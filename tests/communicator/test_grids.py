"""The arithmetic of grids; what their ranks do is in grid_programs.py, run by test_groups.py."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from pycoll import PROC_NULL
from pycoll._communicator.grid import Layout, check_layout


@pytest.mark.parametrize("periodic", list(itertools.product([False, True], repeat=3)))
def test_shift_moves_as_roll_does_and_stops_at_open_edges(periodic: tuple[bool, ...]) -> None:
    shape = (2, 3, 4)
    layout = check_layout(shape, None, periodic, 24)
    places = np.arange(24).reshape(shape)
    for axis, n in itertools.product(range(3), range(-9, 10)):
        rolled = np.roll(places, n, axis)  # at each place the rank whose data comes there
        for coords in np.ndindex(*shape):
            rank, source = int(places[coords]), layout.neighbor(int(places[coords]), axis, -n)
            assert layout.coords_of(rank) == coords
            if periodic[axis] or 0 <= coords[axis] - n < shape[axis]:
                assert source == rolled[coords]
                assert layout.neighbor(source, axis, n) == rank
            else:
                assert source == PROC_NULL


def test_a_grid_may_be_large_or_have_no_axes() -> None:
    layout = check_layout((16, 16, 16), ("x", "y", "z"), True, 4096)
    assert layout.coords_of(4095) == (15, 15, 15)
    assert layout.line(17, [1]) == [1 + 16 * y for y in range(16)]
    assert layout.of_axes([0, 2]) == Layout((16, 16), ("x", "z"), (True, True))
    point = check_layout((), None, False, 1)
    assert (point.coords_of(0), point.rank_at(()), point.line(0, [])) == ((), 0, [0])
