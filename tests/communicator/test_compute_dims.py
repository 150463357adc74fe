"""compute_dims: lengths of a grid that are as equal as can be."""

from __future__ import annotations

import itertools
import math

import pytest

from pycoll import compute_dims


def test_the_lengths_are_descending_and_as_equal_as_can_be() -> None:
    assert compute_dims(8, 2) == [4, 2]
    assert compute_dims(36, 2) == [6, 6]
    assert compute_dims(72, 3) == [6, 4, 3]
    assert compute_dims(7, 3) == [7, 1, 1]
    assert compute_dims(1, 2) == [1, 1]
    assert compute_dims(999_983, 2) == [999_983, 1]
    for n, ndims in itertools.product(range(1, 25), (1, 2, 3)):
        every = itertools.combinations_with_replacement(range(n, 0, -1), ndims)
        best = min(dims for dims in every if math.prod(dims) == n)
        assert compute_dims(n, ndims) == list(best), (n, ndims)


def test_wrong_arguments_are_refused() -> None:
    for wrong in ((0, 1), (4, 0), (-4, 2)):
        with pytest.raises(ValueError, match="1 or more"):
            compute_dims(*wrong)
    with pytest.raises(TypeError):
        compute_dims(4.0, 2)  # type: ignore[arg-type]
