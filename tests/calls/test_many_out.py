"""all_reduce_many with arrays for its results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

Comm = Any

on_every_way = pytest.mark.parametrize(
    "ranks",
    [2, (2, ("--transport", "tcp"))],
    indirect=True,
    scope="module",
    ids=["shared memory", "tcp"],
)


def lists(comm: Comm) -> list[Any]:
    """Small arrays, which travel together, and large ones."""
    lengths = 3, 0, 200_000, 5, 200_000
    return [np.arange(n, dtype="f8") + comm.rank for n in lengths] + [np.float32([1, 2])]


@on_every_way
def test_results_come_where_they_are_wanted(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        xs = lists(comm)
        before = [x.copy() for x in xs]
        expected = [comm.all_reduce(x) for x in xs]
        outs: list[Any] = [np.empty_like(x) for x in xs]
        outs[0] = outs[4] = None
        outs[3], outs[2] = np.empty(10)[::2], np.empty(400_000)[::2]
        for start in (
            lambda: comm.all_reduce_many(xs, out=outs),
            lambda: comm.iall_reduce_many(xs, out=outs).wait(),
            lambda: comm.persistent.all_reduce_many(xs, out=outs).start().wait(),
        ):
            for out in outs:
                if out is not None:
                    out[...] = -1
            results = start()
            for result, out, one in zip(results, outs, expected, strict=True):
                assert out is None or result is out
                np.testing.assert_array_equal(result, one)
        np.testing.assert_equal(xs, before)
        for result, x, one in zip(comm.all_reduce_many(xs, "sum", xs), xs, expected, strict=True):
            assert result is x
            np.testing.assert_array_equal(x, one)

    ranks(program)


@on_every_way
def test_a_wrong_out_is_refused_before_anything_is_sent(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        xs = lists(comm)
        for error, text, out in (
            (TypeError, "list of arrays", np.ones(3)),
            (ValueError, "2 items, xs has 6", [None, None]),
            (ValueError, "out", [np.empty(4), *[None] * 5]),
            (ValueError, "out", [np.empty(3, "f4"), *[None] * 5]),
            (ValueError, r"out\[2\] overlaps xs\[4\]", [None, None, xs[4], None, None, None]),
            (ValueError, "overlaps", [xs[0][::-1], *[None] * 5]),
        ):
            with pytest.raises(error, match=text):
                comm.all_reduce_many(xs, out=out)
        assert comm.all_reduce(1) == comm.size

    ranks(program)
