"""The calls of scripts/soak_shared_memory, with the bytes that each must return."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy_oracle import ALL, FLOATS, UFUNCS, Array, dtype_of, reduced, values

Comm = Any
Version = tuple[Callable[[], Any], bytes | None]  # a call; the bytes of what it returns, or None
Case = tuple[str, list[Version]]

VERSIONS = 3
KIB = 1024
KINDS: dict[str, tuple[int, float, int, int]] = {
    "short": (70, 0.96, 0, 4 * KIB),
    "small": (20, 0.02, 0, 8 * KIB),
    "medium": (8, 0.004, 4 * KIB, 256 * KIB),
    "large": (3, 0.0004, 256 * KIB, 4096 * KIB),
    "made": (2, 0.0004, 0, 16 * KIB),
}
"""Kind of case: how many of it are drawn, its share of the calls, limits of a value's bytes.

"short" are calls that the core makes without Python. Messages, objects and other algorithms are
for scripts/fuzz_programs."""

# --- cases: each the same on all ranks -------------------------------------------------------


class Draw:
    """The random numbers of one set of cases, the same on all ranks."""

    def __init__(self, comm: Comm, kind: str, *seed: int) -> None:
        self.comm = comm
        self.kind = kind
        self.rng = np.random.default_rng(seed)

    def below(self, limit: int) -> int:
        return int(self.rng.integers(limit))

    def one_of(self, options: Any) -> Any:
        return options[self.below(len(options))]

    def form(self) -> str:
        """How the arrays of a call are passed."""
        forms = ("out", "out", "new", "in_place", "strided", "number")
        return str(self.one_of(forms[:4] if self.kind == "short" else forms))

    def shape(self, dtype: str, pieces: int = 1) -> tuple[int, ...]:
        """Of a value whose bytes are within the limits of the kind; most are near the lower."""
        _, _, low, high = KINDS[self.kind]
        nbytes = low + (high - low + 1) ** self.rng.random() - 1
        count = int(nbytes) // dtype_of(dtype).itemsize // pieces
        if count == 1 and self.below(2):
            return ()
        if count % 2 == 0 and self.below(4) == 0:
            return (2, count // 2)
        return (count,)

    def of_all(self, dtype: str, shape: tuple[int, ...]) -> list[Array]:
        return [values(self.rng, dtype, shape, None, exact=False) for _ in range(self.comm.size)]


def strided(x: Array) -> Array:
    """The same values in every second place of memory."""
    wide = np.zeros((*x.shape, 2), x.dtype)
    wide[..., 0] = x
    return wide[..., 0]


def one_way(call: Callable[..., Any], form: str, x: Array, args: list[Any], out: Array) -> Any:
    """Return a call without arguments; `out` None: it has none on this rank, or takes none."""
    if form == "new" or out is None:
        return functools.partial(call, x, *args)
    if form == "out":
        return functools.partial(call, x, *args, out=out)
    if form == "strided":
        return functools.partial(call, strided(x), *args, out=strided(out))
    assert form == "in_place"

    def in_place() -> Any:
        out[...] = x
        return call(out, *args, out=out)

    return in_place


def reduction(draw: Draw) -> Case:
    comm, name = draw.comm, draw.one_of(("all_reduce", "all_reduce", "reduce", "reduce_scatter"))
    op, root = draw.one_of(sorted(UFUNCS)), draw.below(comm.size)
    dtype = draw.one_of(UFUNCS[op][1])
    form = draw.form()
    split = name == "reduce_scatter"
    shape = draw.shape(dtype, comm.size if split else 1)
    if form == "number" and not split:
        shape = ()
    elif form == "number":
        form = "out"
    args = [op, root] if name == "reduce" else [op]
    call, has_result = getattr(comm, name), name != "reduce" or comm.rank == root
    versions: list[Version] = []
    out = np.zeros(shape, dtype_of(dtype)) if has_result else None
    for _ in range(VERSIONS):
        full = (comm.size, *shape) if split else shape
        operands = draw.of_all(dtype, full)
        if op in ("min", "max") and dtype in FLOATS and draw.below(4) == 0:
            for x in operands:
                x[draw.rng.random(full) < 0.1] = np.nan
        total, x = reduced(op, operands), operands[comm.rank]
        if split:
            total = total[comm.rank]
        want = total.tobytes() if has_result else None
        if form == "number":
            versions.append((functools.partial(call, x[()], *args), want))
        elif split and form == "in_place":
            versions.append((in_place_rows(call, x, args, comm.rank), want))
        else:
            versions.append((one_way(call, form, x, args, out), want))
    return f"{name}({dtype}{list(shape)}, {op}, root={root}, {form})", versions


def in_place_rows(call: Callable[..., Any], x: Array, args: list[Any], row: int) -> Any:
    """reduce_scatter into ``x[rank]``."""
    work = np.empty_like(x)

    def run() -> Any:
        work[...] = x
        return call(work, *args, out=work[row, ...])

    return run


def movement(draw: Draw) -> Case:
    comm = draw.comm
    name = draw.one_of(("broadcast", "gather", "all_gather", "scatter", "all_to_all"))
    dtype, root, me = draw.one_of(ALL), draw.below(comm.size), comm.rank
    form = draw.form()
    if form == "number" or (form == "in_place" and name not in ("all_gather", "all_to_all")):
        form = "out"
    split = name in ("scatter", "all_to_all")
    shape = draw.shape(dtype, comm.size)
    args = [root] if name in ("gather", "scatter") else []
    has_result = name != "gather" or me == root
    call = getattr(comm, name)
    stacks = name in ("gather", "all_gather", "all_to_all")
    out = None
    if has_result:
        out = np.zeros((comm.size, *shape) if stacks else shape, dtype_of(dtype))
    versions: list[Version] = []
    for _ in range(VERSIONS):
        operands = draw.of_all(dtype, (comm.size, *shape) if split else shape)
        x = operands[me]
        want = {
            "broadcast": lambda all_x: all_x[root],
            "gather": np.array,
            "all_gather": np.array,
            "scatter": lambda all_x: all_x[root][me],
            "all_to_all": lambda all_x: np.array([block[me] for block in all_x]),
        }[name](operands)
        given: Any = None
        if name == "broadcast":
            given = functools.partial(broadcast, call, x if me == root else None, out, form, root)
        elif name == "scatter" and me != root:
            given = functools.partial(call, None, *args, out=out if form == "out" else None)
        elif form == "in_place" and name in ("all_gather", "all_to_all"):
            given = in_place_blocks(call, x, out, me if name == "all_gather" else None)
        else:
            given = one_way(call, "out" if form == "in_place" else form, x, args, out)
        versions.append((given, np.asarray(want).tobytes() if has_result else None))
    return f"{name}({dtype}{list(shape)}, root={root}, {form})", versions


def broadcast(call: Callable[..., Any], x: Array, out: Array, form: str, root: int) -> Any:
    if x is not None:
        return call(x if form != "strided" else strided(x), root)
    return call(None if form == "new" else out, root)


def in_place_blocks(call: Callable[..., Any], x: Array, out: Array, row: int | None) -> Any:
    """all_gather of ``out[rank]``, or all_to_all of all of `out`."""

    def run() -> Any:
        if row is None:
            out[...] = x
            return call(out, out=out)
        out[...] = 0
        out[row, ...] = x
        return call(out[row, ...], out=out)

    return run


def on_a_new_communicator(draw: Draw) -> Case:
    """dup or split, a few calls there, close."""
    comm, me, cuts = draw.comm, draw.comm.rank, bool(draw.below(2))
    colors = [draw.below(2) if cuts else 0 for _ in range(comm.size)]
    members = [rank for rank, color in enumerate(colors) if color == colors[me]]
    shape = draw.shape("float32")
    versions: list[Version] = []
    for _ in range(VERSIONS):
        operands = draw.of_all("float32", shape)
        want = reduced("sum", [operands[rank] for rank in members]).tobytes()

        def run(x: Array = operands[me], want: bytes = want) -> None:
            with comm.split(colors[me]) as part:
                for _ in range(3):
                    assert part.all_reduce(x).tobytes() == want, "wrong bits"
                first = part.broadcast(np.array([me]))
                assert first[0] == members[0], "wrong root"

        versions.append((run, None))
    return f"all_reduce(float32{list(shape)}) on new communicators {colors}", versions


def barrier(draw: Draw) -> Case:
    return "barrier()", [(draw.comm.barrier, None)] * VERSIONS


MAKERS: dict[str, tuple[Callable[[Draw], Case], ...]] = {
    "short": (*[reduction] * 5, *[movement] * 5, barrier),
    "small": (reduction, movement),
    "medium": (reduction, movement),
    "large": (reduction, movement),
    "made": (on_a_new_communicator,),
}
