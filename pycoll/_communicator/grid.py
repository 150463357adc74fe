"""A grid of ranks: who sits where, who are the neighbors, and a communicator for each line.

Ranks are in row-major order: in a grid of shape (2, 4) rank 5 has the coordinates (1, 1).
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from pycoll._calls import arguments, subgroups
from pycoll._calls.group import Group
from pycoll._communicator.communicator import Communicator, World
from pycoll._runtime.envelope import PROC_NULL
from pycoll._support.foreign_names import OF_GRIDS
from pycoll._support.public_edge import edge, edges, public
from pycoll._support.wording import a_kind


@edge
def compute_dims(n: int, ndims: int) -> list[int]:
    """Return the lengths of a grid of `n` ranks whose axes are as equal as can be, longest first.

    ``comm.grid(pycoll.compute_dims(comm.size, 2))`` is a grid of all ranks.

    Args:
        n: number of ranks, 1 or more.
        ndims: number of axes, 1 or more.
    """
    n, ndims = arguments.check_int(n, "n"), _check_ndims(ndims)
    if n < 1 or ndims < 1:
        raise ValueError(f"n and ndims are 1 or more, not {n} and {ndims}")
    dims = _divide(n, ndims, n)
    assert dims is not None  # n and ones, if there is nothing better
    return dims


def _check_ndims(ndims: Any) -> int:
    if isinstance(ndims, list | tuple):
        instead = f"write {len(ndims)}"
        if any(ndims):
            instead = "divide n by the lengths that are given, and pass how many axes are left"
        raise TypeError(f"ndims is the number of axes, not {a_kind(ndims)}: {instead}")
    return arguments.check_int(ndims, "ndims")


def _divide(n: int, ndims: int, longest: int) -> list[int] | None:
    """The factors of n, none above `longest`, of which the largest is smallest, then the next."""
    if ndims == 1:
        return [n] if n <= longest else None
    for length in range(1, longest + 1):
        if length**ndims >= n and n % length == 0:
            rest = _divide(n // length, ndims - 1, length)
            if rest is not None:
                return [length, *rest]
    return None


class Layout(NamedTuple):
    """Where the ranks of a grid are: arithmetic only.

    Attributes:
        shape: ranks along each axis.
        names: of the axes; empty: they have none.
        periodic: for each axis, whether its last rank and its first are neighbors.
    """

    shape: tuple[int, ...]
    names: tuple[str, ...]
    periodic: tuple[bool, ...]

    def __str__(self) -> str:
        names = f"names={self.names}, " if self.names else ""
        return f"{self.shape}, {names}periodic={self.periodic}"

    def coords_of(self, rank: int) -> tuple[int, ...]:
        """Return the coordinates of a rank."""
        coords = []
        for length in reversed(self.shape):
            rank, coord = divmod(rank, length)
            coords.append(coord)
        return tuple(reversed(coords))

    def rank_at(self, coords: Sequence[int]) -> int:
        """Return the rank at coordinates that are in the grid."""
        rank = 0
        for coord, length in zip(coords, self.shape, strict=True):
            rank = rank * length + coord
        return rank

    def neighbor(self, rank: int, axis: int, n: int) -> int:
        """Return the rank `n` steps up an axis, PROC_NULL beyond an open edge."""
        coords = list(self.coords_of(rank))
        coords[axis] += n
        if self.periodic[axis]:
            coords[axis] %= self.shape[axis]
        return self.rank_at(coords) if 0 <= coords[axis] < self.shape[axis] else PROC_NULL

    def line(self, rank: int, axes: Sequence[int]) -> list[int]:
        """Return the ranks that differ from `rank` in these axes only."""
        here = self.coords_of(rank)
        others = [axis for axis in range(len(self.shape)) if axis not in axes]
        return [
            other
            for other in range(math.prod(self.shape))
            if all(self.coords_of(other)[axis] == here[axis] for axis in others)
        ]

    def of_axes(self, axes: Sequence[int]) -> Layout:
        """Return the layout of a line along these axes."""
        return Layout(
            tuple(self.shape[axis] for axis in axes),
            tuple(self.names[axis] for axis in axes) if self.names else (),
            tuple(self.periodic[axis] for axis in axes),
        )

    def axis(self, name: str | int) -> int:
        """Return the index of an axis.

        Raises:
            TypeError: it is neither a name nor an index.
            ValueError: there is no such axis.
        """
        if isinstance(name, str):
            if name not in self.names:
                raise ValueError(f"the grid has no axis {name!r}; it has {self._axes()}")
            return self.names.index(name)
        index, count = arguments.check_int(name, "an axis without a name"), len(self.shape)
        if not -count <= index < count:
            raise ValueError(f"the grid has no axis {index}; it has {self._axes()}")
        return index % count

    def _axes(self) -> str:
        names = ", ".join(map(repr, self.names))
        return names or f"{len(self.shape)}, without names, counted from 0"


@public
@edges
class Grid(Communicator, foreign=OF_GRIDS):
    """A communicator whose ranks form a grid, in row-major order; `Communicator.grid` makes it.

    Attributes:
        shape: ranks along each axis.
        names: names of the axes; empty if they have none.
        periodic: for each axis, whether it wraps around.
        coords: this rank's coordinates.
    """

    def __init__(self, world: World, group: Group, layout: Layout) -> None:
        super().__init__(world, group)
        self._layout = layout
        self._lines: dict[tuple[int, ...], Grid] = {}
        self._lines_lock = threading.Lock()
        self.shape, self.names, self.periodic = layout
        self.coords = layout.coords_of(group.rank)

    def __repr__(self) -> str:
        names = f", names={self.names}" if self.names else ""
        state = ", closed" if self._closed else ""
        return (
            f"<pycoll.Grid shape={self.shape}{names}, coords={self.coords}, "
            f"rank {self.rank} of {self.size}{state}>"
        )

    def __enter__(self) -> Grid:
        return self

    def coords_of(self, rank: int) -> tuple[int, ...]:
        """Return the coordinates of a rank of this grid.

        Args:
            rank: 0 to size - 1.

        Raises:
            ValueError: there is no such rank.
        """
        rank = arguments.check_int(rank, "rank")
        if not 0 <= rank < self.size:
            raise ValueError(f"rank is {rank}, but the ranks are 0 to {self.size - 1}")
        return self._layout.coords_of(rank)

    def rank_at(self, coords: Sequence[int]) -> int:
        """Return the rank at these coordinates, which wrap around on periodic axes.

        Args:
            coords: one for each axis.

        Raises:
            ValueError: there are not as many as axes, or one is outside of an axis that is open.
        """
        coords = _listed(coords, "coords")
        if len(coords) != len(self.shape):
            raise ValueError(f"coords has {len(coords)} numbers, the grid {len(self.shape)} axes")
        inside = []
        for axis, coord in enumerate(coords):
            coord, length = arguments.check_int(coord, "a coordinate"), self.shape[axis]
            if self.periodic[axis]:
                coord %= length
            elif not 0 <= coord < length:
                name = repr(self.names[axis]) if self.names else axis
                raise ValueError(f"on axis {name} coordinates are 0 to {length - 1}, not {coord}")
            inside.append(coord)
        return self._layout.rank_at(inside)

    def shift(self, axis: str | int, n: int = 1) -> tuple[int, int]:
        """Return (source, dest): from whom and to whom data moves `n` steps up an axis.

        They are ranks of this grid, or `pycoll.PROC_NULL` beyond an edge that is open; so
        ``grid.sendrecv(x, dest, source)`` is right everywhere.

        Args:
            axis: name or index.
            n: steps; negative: down.
        """
        index, n = self._layout.axis(axis), arguments.check_int(n, "n")
        source, dest = (self._layout.neighbor(self.rank, index, steps) for steps in (-n, n))
        return source, dest

    def axis(self, *axes: str | int) -> Grid:
        """Return the communicator of the ranks that differ from this one in these axes only.

        It is itself a grid, of these axes in their order here, and has their names. No message is
        needed, and it is made once: later calls return the same object, also after it was closed.
        Closing this grid closes it.

        Args:
            axes: names or indices.
        """
        if any(isinstance(axis, list | tuple) for axis in axes):
            raise TypeError(
                "axis takes the numbers or names of the axes that vary, not a list: "
                'grid.axis(0), grid.axis("dp", "tp")'
            )
        indices = tuple(sorted(self._layout.axis(axis) for axis in axes))
        if len(set(indices)) < len(indices):
            raise ValueError(f"axis{axes} names an axis twice")
        self._check_open()
        with self._lines_lock:
            if indices not in self._lines:
                with self._group.engine.locked():
                    ranks = self._layout.line(self.rank, indices)
                    group = subgroups.child(
                        self._group, f"axis {indices}", ranks, self._line_name(indices)
                    )
                self._lines[indices] = Grid(self._world, group, self._layout.of_axes(indices))
            return self._lines[indices]

    def _line_name(self, indices: Sequence[int]) -> str:
        if self.names:
            return ", ".join(self.names[index] for index in indices)
        axes = ", ".join(map(str, indices))
        return f"{'axis' if len(indices) == 1 else 'axes'} {axes} of {self.name}"

    def dup(self, *, name: str | None = None, timeout: float | None = None) -> Grid:
        """Return a new grid of the same ranks, axes and edges; a collective call.

        Args:
            name: what messages call it.
            timeout: seconds for all ranks to come.
        """
        name = subgroups.check_name(name) or f"dup of {self.name}"
        names = self.names or None
        return self.grid(self.shape, names, self.periodic, name=name, timeout=timeout)

    def close(self) -> None:
        """Give this grid and the communicators of its axes up. Not collective."""
        with contextlib.ExitStack() as closing:  # all of them, whatever one of them finds
            closing.callback(super().close)
            for line in list(self._lines.values()):
                closing.callback(line.close)


def check_layout(shape: Any, names: Any, periodic: Any, size: int) -> Layout:
    """Check what a grid of `size` ranks shall look like."""
    lengths = tuple(arguments.check_int(n, "each of shape") for n in _listed(shape, "shape"))
    if any(n < 1 for n in lengths) or math.prod(lengths) != size:
        raise ValueError(
            f"a grid of shape {lengths} has {math.prod(lengths)} ranks, "
            f"the communicator {size}: they must agree, and no axis is empty"
        )
    return Layout(lengths, _check_names(names, len(lengths)), _check_edges(periodic, len(lengths)))


def _check_names(names: Any, count: int) -> tuple[str, ...]:
    if names is None:
        return ()
    listed = _listed(names, "names")
    for name in listed:
        if not isinstance(name, str):
            instead = ": write periodic=" if _is_flag(name) else ""
            raise TypeError(f"the name of an axis is a str, not {a_kind(name)}{instead}")
    if len(set(listed)) != len(listed) or len(listed) != count:
        raise ValueError(f"names is {listed}: it takes {count} names, each another one")
    return listed


def _check_edges(periodic: Any, count: int) -> tuple[bool, ...]:
    edges = (periodic,) * count if _is_flag(periodic) else _listed(periodic, "periodic")
    for axis in edges:
        if not _is_flag(axis):
            raise TypeError(f"periodic is a bool, or one for each axis, not {axis!r}")
    if len(edges) != count:
        raise ValueError(f"periodic has {len(edges)} bools, the grid {count} axes")
    return tuple(bool(edge) for edge in edges)


def _is_flag(value: Any) -> bool:
    return type(value).__name__ in ("bool", "bool_")  # Python's, NumPy 2's, NumPy 1's


def _listed(value: Any, what: str) -> tuple[Any, ...]:
    if isinstance(value, str) or not hasattr(value, "__iter__"):
        raise TypeError(f"{what} is a list or tuple, not {value!r}")
    return tuple(value)
