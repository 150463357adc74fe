"""What tests on GPUs share: what comes out of every method, for arrays of any library.

Jobs are of two ranks, which share a GPU, or have one each where there are several.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

Array = Any
Comm = Any

RANKS = 2
TCP = ("--transport", "tcp")

# Else JAX takes most of the GPU's memory for the first rank.
VARIABLES = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


@functools.cache
def no_gpu() -> str | None:
    """Why no test can use a GPU here. Asks another process: in this one no driver is loaded."""
    program = "from pycoll._cuda import cuda; assert cuda.count(), 'there is no GPU'"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    return done.stderr.strip().splitlines()[-1] if done.returncode else None


def jobs(*options: tuple[str, ...], **variables: str) -> pytest.MarkDecorator:
    """Run a test on such jobs: each with options of pycoll-run, all with variables of the ranks."""
    worlds = [(RANKS, option, VARIABLES | variables) for option in options]
    names = [option[-1] if option else "auto" for option in options]
    return pytest.mark.parametrize("ranks", worlds, indirect=True, scope="module", ids=names)


class Library(NamedTuple):
    """How tests make and read arrays of a library.

    Attributes:
        put: from NumPy to the GPU.
        get: to NumPy; fails for what is no array of this library on a GPU.
    """

    put: Callable[[Array], Array]
    get: Callable[[Array], Array]


def draw(size: int, count: int) -> list[Array]:
    """The arrays of all ranks: rows of small whole numbers, which every dtype adds exactly."""
    rng = np.random.default_rng(count)
    return [rng.integers(0, 9, (size, count)).astype("float64") for _ in range(size)]


def calls(comm: Comm, xs: list[Array]) -> Iterator[tuple[str, tuple[Any, ...], Any]]:
    """Yield method, arguments, and what must come out, from the arrays of all ranks."""
    me, size, x = comm.rank, comm.size, xs[comm.rank]
    last = size - 1
    total, stack = functools.reduce(np.add, xs), np.stack(xs)
    uneven = [np.ravel(a)[: 1 + a.size // (r + 2)] for r, a in enumerate(xs)]
    yield "all_reduce", (x,), total
    yield "reduce", (x, "sum", last), total if me == last else None
    yield "reduce_scatter", (x,), total[me]
    yield "scan", (x,), functools.reduce(np.add, xs[: me + 1])
    yield "exscan", (x,), functools.reduce(np.add, xs[:me]) if me else None
    yield "broadcast", (x if me == last else None, last), xs[last]
    yield "gather", (x, last), stack if me == last else None
    yield "all_gather", (x,), stack
    yield "scatter", (x if me == last else None, last), xs[last][me]
    yield "all_to_all", (x,), stack[:, me]
    yield "gatherv", (uneven[me],), uneven if me == 0 else None
    yield "all_gatherv", (uneven[me],), uneven
    yield "scatterv", (uneven if me == 0 else None,), uneven[me]
    yield "all_to_allv", ([uneven[me]] * size,), uneven
    yield "reduce_scatterv", (x, [1] * size), total[me : me + 1]
    yield (
        "all_reduce_many",
        ([x, uneven[0], x[0]],),
        [total, uneven[0] * size, sum(a[0] for a in xs)],
    )
    yield "sendrecv", (x, (me + 1) % size, (me - 1) % size), xs[(me - 1) % size]


def deep(change: Callable[[Array], Array], x: Any) -> Any:
    """Change an array, or the arrays in a tuple or list; leave anything else as it is."""
    if isinstance(x, tuple | list):
        return type(x)(deep(change, part) for part in x)
    return change(x) if isinstance(x, np.ndarray) else x


def every_method(comm: Comm, library: Library, count: int) -> int:
    """Check all methods, blocking, not blocking and persistent; returns how many calls it made."""
    made = 0
    for name, arguments, want in calls(comm, draw(comm.size, count)):
        on_gpu = deep(library.put, arguments)
        again = getattr(comm.persistent, name)(*on_gpu)
        ways = {
            "blocking": lambda name=name, on_gpu=on_gpu: getattr(comm, name)(*on_gpu),
            "i": lambda name=name, on_gpu=on_gpu: getattr(comm, f"i{name}")(*on_gpu).wait(),
            "persistent": lambda again=again: again.start().wait(),
            "once more": lambda again=again: again.start().wait(),
        }
        for way, call in ways.items():
            check(library, call(), want, name, way)
            made += 1
    return made


def check(library: Library, got: Any, want: Any, *where: str) -> None:
    """Compare what came with what must, after a way through the library's dtype."""
    if want is None:
        assert got is None, where
    elif isinstance(want, list):
        assert len(got) == len(want), where
        for one, other in zip(got, want, strict=True):
            check(library, one, other, *where)
    else:
        expected = library.get(library.put(want))
        found = library.get(got)
        assert found.dtype == expected.dtype, where
        np.testing.assert_array_equal(found, expected, str(where))


def resident_nbytes() -> int:
    """Of this process, in main memory."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
