"""Programs for any number of ranks, of grids and their lines."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

import pycoll
from pycoll import PROC_NULL

Comm = Any


def shapes_of(size: int) -> list[tuple[int, ...]]:
    """All shapes of up to three axes that hold so many ranks."""
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    triples = itertools.product(divisors, divisors, divisors)
    shapes = {triple[:count] for triple in triples for count in (1, 2, 3)}
    return sorted(shape for shape in shapes if math.prod(shape) == size)


def grid_places_ranks_in_row_major_order(comm: Comm) -> None:
    for shape in shapes_of(comm.size):
        places = np.arange(comm.size).reshape(shape)
        with comm.grid(shape, periodic=True) as grid:
            assert isinstance(grid, pycoll.Communicator)
            assert (grid.rank, grid.size) == (comm.rank, comm.size)
            assert (grid.shape, grid.names) == (shape, ())
            assert grid.periodic == (True,) * len(shape)
            assert places[grid.coords] == comm.rank
            for rank in range(comm.size):
                coords = grid.coords_of(rank)
                assert places[coords] == rank == grid.rank_at(coords)
                around = [c - 3 * length for c, length in zip(coords, shape, strict=True)]
                assert grid.rank_at(around) == rank
            assert grid.all_gather(grid.coords) == list(np.ndindex(*shape))


def lines_of_a_grid_differ_in_their_axes_only(comm: Comm) -> None:
    for shape in shapes_of(comm.size):
        names = ("dp", "pp", "tp")[: len(shape)]
        places = np.arange(comm.size).reshape(shape)
        grid = comm.grid(shape, names=names, periodic=[True, False, True][: len(shape)])
        subsets = [
            axes
            for count in range(len(shape) + 1)
            for axes in itertools.combinations(range(len(shape)), count)
        ]
        # In another order on each rank: no message is needed.
        for i in np.random.default_rng(comm.rank).permutation(len(subsets)):
            axes = subsets[i]
            line = grid.axis(*axes)
            assert grid.axis(*reversed([names[axis] for axis in axes])) is line
            assert grid.axis(*[axis - len(shape) for axis in axes]) is line
        for axes in subsets:
            line = grid.axis(*axes)
            index = tuple(slice(None) if a in axes else c for a, c in enumerate(grid.coords))
            assert line.all_gather(comm.rank) == places[index].ravel().tolist()
            assert line.shape == tuple(shape[axis] for axis in axes)
            assert line.names == tuple(names[axis] for axis in axes)
            assert line.periodic == tuple(grid.periodic[axis] for axis in axes)
            assert line.coords == tuple(grid.coords[axis] for axis in axes)
            if axes:
                assert line.axis(names[axes[0]]).all_reduce(1) == shape[axes[0]]
        lines = [grid.axis(*axes) for axes in subsets]
        grid.close()
        for line in lines:
            with pytest.raises(pycoll.Error, match="closed"):
                line.barrier()
            with pytest.raises(pycoll.Error, match="closed"):
                grid.axis(0)


def neighbors_of_a_grid_exchange_what_shift_says(comm: Comm) -> None:
    size = comm.size
    for periodic in False, True:
        with comm.grid([size], names=["x"], periodic=periodic) as grid:
            for n in range(-size - 2, size + 3):
                source, dest = grid.shift("x", n)
                got = grid.sendrecv(comm.rank, dest, source)
                expected = comm.rank - n
                if periodic:
                    assert got == expected % size
                elif 0 <= expected < size:
                    assert got == expected
                else:
                    assert (source, got) == (PROC_NULL, None)


def a_dup_of_a_grid_is_a_grid_like_it(comm: Comm) -> None:
    with comm.grid((1, comm.size), ("a", "b"), (True, False)) as grid, grid.dup() as twin:
        assert type(twin) is type(grid)
        assert (twin.shape, twin.names, twin.periodic, twin.coords) == (
            grid.shape,
            grid.names,
            grid.periodic,
            grid.coords,
        )
        twin.send("on the twin", twin.rank)
        assert grid.iprobe() is None
        assert twin.recv() == "on the twin"
        assert twin.axis("b") is not grid.axis("b")
        assert twin.axis("b").all_reduce(1) == comm.size


def a_grid_says_where_one_is(comm: Comm) -> None:
    grid = comm.grid((comm.size, 1), names=("dp", "tp"))
    assert repr(grid) == (
        f"<pycoll.Grid shape=({comm.size}, 1), names=('dp', 'tp'), coords=({comm.rank}, 0), "
        f"rank {comm.rank} of {comm.size}>"
    )
    grid.close()
    assert "closed" in repr(grid)
    assert "names" not in repr(comm.grid([comm.size]))


def grid_refuses_what_does_not_fit_and_the_call_does_not_count(comm: Comm) -> None:
    size = comm.size
    for shape in (size + 1,), (size, 2), (0,), (-1, -size), (size, 0):
        with pytest.raises(ValueError, match=rf"{math.prod(shape)} ranks.* {size}: "):
            comm.grid(shape)
    for kwargs, message in (
        ({"names": ["a"]}, r"\('a',\).* 2 names"),
        ({"names": ["a", "a"]}, r"\('a', 'a'\).* another"),
        ({"periodic": [True]}, "1 bools.* 2 axes"),
    ):
        with pytest.raises(ValueError, match=message):
            comm.grid((size, 1), **kwargs)
    for args in (size,), ("1",), ((size, 1.0),), ((size, 1), "ab"), ((size, 1), (0, 1)):
        with pytest.raises(TypeError):
            comm.grid(*args)
    for periodic in "no", None, [False, "no"], [0, 1]:
        with pytest.raises(TypeError, match="periodic is a"):
            comm.grid((size, 1), periodic=periodic)
    with comm.grid((size, 1), names=("dp", "tp")) as grid:
        for call in grid.axis, grid.shift:
            with pytest.raises(ValueError, match="no axis 'pp'; it has 'dp', 'tp'"):
                call("pp")
            for index in 2, -3:
                with pytest.raises(ValueError, match=f"no axis {index}; it has 'dp', 'tp'"):
                    call(index)
            with pytest.raises(TypeError, match="an axis"):
                call(None)
        with pytest.raises(ValueError, match="twice"):
            grid.axis("dp", 0)
        with pytest.raises(TypeError, match="n is an int"):
            grid.shift("dp", 0.5)
        for coords in (0,), (0, 0, 0), (0, 1), (size, 0), (-1, 0):
            with pytest.raises(ValueError, match=r"2 axes|coordinates are 0 to"):
                grid.rank_at(coords)
        for rank in -1, size:
            with pytest.raises(ValueError, match=f"0 to {size - 1}"):
                grid.coords_of(rank)
        assert grid.all_reduce(1) == size
    with comm.grid([size]) as grid, pytest.raises(ValueError, match="1, without names"):
        grid.axis("dp")
