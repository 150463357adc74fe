"""Collectives of scripts/fuzz_programs: how one is called, and what it should give."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy_oracle as oracle
from programs_steps import Pending, Step, timeout
from programs_values import (
    Array,
    Random,
    agree,
    copied,
    fill,
    overlapping,
    scribble,
    somewhere,
    tiled,
    untouched,
)

if TYPE_CHECKING:
    from programs_steps import Rank

TRAITS: dict[str, set[str]] = {
    "barrier": set(),
    "broadcast": {"root", "objects"},
    "reduce": {"root", "op", "objects", "numbers", "out"},
    "all_reduce": {"op", "objects", "numbers", "out"},
    "gather": {"root", "objects", "out", "grows"},
    "all_gather": {"objects", "out", "grows"},
    "scatter": {"root", "objects", "out", "rows"},
    "reduce_scatter": {"op", "out", "rows"},
    "all_to_all": {"objects", "out", "rows", "grows"},
    "scan": {"op", "objects", "numbers", "out"},
    "exscan": {"op", "objects", "numbers", "out"},
    "gatherv": {"root", "one each", "out"},
    "all_gatherv": {"one each", "out"},
    "scatterv": {"root", "one each", "out"},
    "all_to_allv": {"pairs", "out"},
    "reduce_scatterv": {"op", "out"},
    "all_reduce_many": {"op", "many"},
}
"""Of each collective: what it takes (root, op, objects, numbers, out), whether x has a rank axis
("rows"), whether the result has one more than a block ("grows"), and how many arrays there are:
"one each" of the ranks, of their "pairs", or "many" on each; else all have one shape."""

NO_ARRAYS = ("object", "number", "scalar")
"""Dtypes of what is no array: a scalar is one of NumPy's."""

SCALARS = ("int16", "uint8", "float32", "float64")


def rows_of(x: Array) -> list[Array]:
    """Return the rows of an array, as arrays."""
    return [x[index, ...] for index in range(len(x))]


def join(a: list[Any], b: list[Any]) -> list[Any]:
    """A reduction of objects that loses neither order nor anything else."""
    return a + b


@dataclass(eq=False)
class Call(Step):
    """A collective.

    Attributes:
        how: "block", "start" or "persist".
        shapes: one, or for some collectives one for each rank, pair of ranks, or array.
        dtypes: one, or one for each array; also those of `NO_ARRAYS`.
        op: a name, or an index into `oracle.USER_OPS`.
        counts: of reduce_scatterv.
        first: the step that made this persistent request; else this step.
    """

    name: str
    how: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    op: str | int | None
    root: int
    algorithm: str | None
    counts: tuple[int, ...]
    first: int

    @property
    def kind(self) -> str:
        """The dtype, or what is no array; of several arrays the first's."""
        return self.dtypes[0] if self.dtypes else ""

    @property
    def traits(self) -> set[str]:
        """Those of the collective."""
        return TRAITS[self.name]

    def run(self, rank: Rank) -> None:
        """Do the part of one rank."""
        comm, me = rank.comms[self.team.number], self.team.members.index(rank.me)
        request = None
        if self.first != self.number:
            request, x, out = rank.persistent[self.first]
            fill(x, self._operand(rank, me))
        else:
            x, out = self._arrays(rank, me)
        check = functools.partial(self._check, rank, me, x, out, copied(x), copied(out))
        args, options = () if self.name == "barrier" else (x,), self._options(out)
        if self.how == "block":
            options |= timeout(rank.random(self.number, me, 2))
            check(getattr(comm, self.name)(*args, **options))
            return
        if self.how == "start":
            request = getattr(comm, f"i{self.name}")(*args, **options)
        else:
            if request is None:
                request = getattr(comm.persistent, self.name)(*args, **options)
                rank.persistent[self.number] = request, x, out
            assert request.start() is request, "start() returns the request"
        rank.pending[self.number] = Pending(request, check)

    def _options(self, out: Any) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if "op" in self.traits:
            options["op"] = self.op
            if isinstance(self.op, int):
                options["op"] = oracle.USER_OPS[self.op][0]
            elif self.kind == "object":
                options["op"] = join
        if "root" in self.traits:
            options["root"] = self.root
        if self.counts:
            options["counts"] = list(self.counts)
        if out is not None:
            options["out"] = out
        if self.algorithm is not None:
            options["algorithm"] = self.algorithm
        return options

    def _arrays(self, rank: Rank, me: int) -> tuple[Any, Any]:
        """Return x in some layout and some `out`, or none."""
        rng, name = rank.random(self.number, me, 1), self.name
        are_arrays = self.kind not in NO_ARRAYS
        if name == "broadcast" and me != self.root:
            return (somewhere(rng, self.kind, self.shapes[0]) if are_arrays else None), None
        has_none = name in ("scatter", "scatterv") and me != self.root
        x = None if has_none else self._operand(rank, me)
        if not are_arrays or self.name == "barrier":
            return x, None
        if self.how == "persist" or x is None:
            x = copied(x)
        elif isinstance(x, list):
            x = [oracle.laid_out(rng, item) for item in x]
        elif name in ("scatter", "reduce_scatter") and rng.random() < 0.2:
            x = [oracle.laid_out(rng, row) for row in rows_of(x)]
        else:
            x = oracle.laid_out(rng, x)
        if "out" not in self.traits:
            return x, None
        if isinstance(x, np.ndarray) and rng.random() < 0.25:
            return self._in_place(rng, me, x)
        return x, self._out(rng, me)

    def _in_place(self, rng: Random, me: int, x: Array) -> tuple[Array, Any]:
        """Return an x and an `out` that share memory, if the collective allows that."""
        name, shape = self.name, self._out_shape(me)
        draw = functools.partial(somewhere, rng, self.kind, always=True)
        if name in ("all_reduce", "all_to_all") or (name, me) == ("reduce", self.root):
            out = draw(x.shape)
            out[...] = x
            return out, out
        if name == "all_gather":
            rows = rng.random() < 0.3
            out = [draw(x.shape) for _ in self.team.members] if rows else draw(shape)
            mine = out[me] if rows else out[me, ...]
            mine[...] = x
            return mine, out
        if name in ("reduce_scatter", "reduce_scatterv"):
            whole = draw(x.shape)
            whole[...] = x
            start = sum(self.counts[:me])
            return whole, whole[start : start + self.counts[me]] if self.counts else whole[me, ...]
        return x, self._out(rng, me)

    def _out_shape(self, me: int) -> tuple[int, ...]:
        """Of one array, which takes the result."""
        shape = self.shapes[me if self.name == "scatterv" else 0]
        if self.counts:
            return (self.counts[me], *shape[1:])
        return (len(self.team.members), *shape) if "grows" in self.traits else shape

    def _out(self, rng: Random, me: int) -> Any:
        """Return an array, or a list of arrays, in some layouts; or none."""
        size = len(self.team.members)
        if self.name in ("gatherv", "all_gatherv", "all_to_allv"):
            shapes = self.shapes[me::size] if self.name == "all_to_allv" else self.shapes
            if all(len(shape) == 1 for shape in shapes) and rng.random() < 0.3:
                return somewhere(rng, self.kind, (sum(math.prod(shape) for shape in shapes),))
            if rng.random() < 0.5:
                return None
            return [somewhere(rng, self.kind, shape) for shape in shapes]
        if self.name in ("gather", "all_gather") and rng.random() < 0.2:
            return [somewhere(rng, self.kind, self.shapes[0], always=True) for _ in range(size)]
        return somewhere(rng, self.kind, self._out_shape(me))

    def _check(
        self,
        rank: Rank,
        me: int,
        x: Any,
        out: Any,
        x_before: Any,
        out_before: Any,
        result: Any,
    ) -> None:
        what = f"step {self.number}: {self.name} on rank {me} of {len(self.team.members)}"
        expected = self._expected(rank, me)
        rows = isinstance(out, list) and "grows" in self.traits
        if rows and expected is not None:
            expected = rows_of(expected)
        agree(rank.perturbed(result), expected, what)
        filled = self.name == "broadcast" and isinstance(x, np.ndarray) and me != self.root
        if filled:
            assert result is x, f"{what}: not the array that was passed"
        elif out is not None and expected is not None:
            self._check_filled(out, rows, expected, result, what)
        elif out is not None:
            agree(out, out_before, f"{what}: out off root")
        if not filled and not overlapping(x, out):
            agree(x, x_before, f"{what}: its input afterwards")
            if result is not x:
                scribble(x)
        if self.how != "persist" and result is not x:
            rank.keep(what, result)

    def _check_filled(self, out: Any, rows: bool, expected: Any, result: Any, what: str) -> None:
        """Check that the result is what was passed as `out`."""
        untouched(out)
        if not isinstance(expected, list) or rows:
            assert result is out, f"{what}: not its out"
        elif isinstance(out, list):
            for given, got in zip(out, result, strict=True):
                assert given is None or given is got, f"{what}: not its out"
        else:
            for part in expected:
                agree(out[: len(part)], part, f"{what}: its out")
                out = out[len(part) :]

    # --- what it should give ---

    def _operand(self, rank: Rank, sender: int) -> Any:
        """Return what a rank of the team passes."""
        rng, size = rank.random(self.number, sender), len(self.team.members)
        if self.name == "barrier":
            return None
        if self.kind == "object":
            value = oracle.some_object(rng)
            if "op" in self.traits:
                return [value]
            return [(value, to) for to in range(size)] if "rows" in self.traits else value
        if self.kind == "number":
            return int(rng.integers(-9, 10))
        if self.kind == "scalar":
            dtype = SCALARS[self.number % (2 if self.op == "bxor" else len(SCALARS))]
            return tiled(rng, dtype, (), op="prod" if self.op == "prod" else "sum")[()]
        draw = functools.partial(tiled, rng, op=self.op)
        if "many" in self.traits:
            return list(map(draw, self.dtypes, self.shapes))
        if self.name == "scatterv":
            return [draw(self.kind, shape) for shape in self.shapes]
        if self.name == "all_to_allv":
            return [draw(self.kind, shape) for shape in self.shapes[sender * size :][:size]]
        shape = self.shapes[sender if "one each" in self.traits else 0]
        return draw(self.kind, (size, *shape) if "rows" in self.traits else shape)

    def _expected(self, rank: Rank, me: int) -> Any:
        """Return what rank `me` of the team gets."""
        name, size = self.name, len(self.team.members)
        if name in ("broadcast", "scatter", "scatterv"):
            x = self._operand(rank, self.root)
            return x if name == "broadcast" else x[me] if isinstance(x, list) else x[me, ...]
        count = {"scan": me + 1, "exscan": me}.get(name, size)
        if name == "barrier" or count == 0 or ("root" in self.traits and me != self.root):
            return None
        all_x = [self._operand(rank, sender) for sender in range(count)]
        if "many" in self.traits:
            return [self._reduced(list(column)) for column in zip(*all_x, strict=True)]
        if name == "reduce_scatter":
            return self._reduced(all_x)[me, ...]
        if name == "reduce_scatterv":
            start = sum(self.counts[:me])
            return self._reduced(all_x)[start : start + self.counts[me]]
        if "op" in self.traits:
            return self._reduced(all_x)
        if name == "all_to_allv" or (name == "all_to_all" and self.kind == "object"):
            return [x[me] for x in all_x]
        if self.kind == "object" or "grows" not in self.traits:
            return all_x
        stacked = np.array(all_x, all_x[0].dtype)  # np.stack would change the order of bytes
        return stacked[:, me] if name == "all_to_all" else stacked

    def _reduced(self, operands: list[Any]) -> Any:
        if self.kind == "object":
            return functools.reduce(join, operands)
        if self.kind == "number":
            return int(oracle.reduced(self.op, list(map(np.array, operands))))
        if self.kind == "scalar":
            return oracle.reduced(self.op, list(map(np.asarray, operands)))[()]
        combine = oracle.USER_OPS[self.op][1] if isinstance(self.op, int) else self.op
        return np.asarray(oracle.reduced(combine, operands))
