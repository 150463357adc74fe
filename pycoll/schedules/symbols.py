"""Symbolic values, and which of them each collective begins and must end with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pycoll.schedules.program import Program


# Not frozen, though never changed: that would make making one, which the proof mostly does, slow.
@dataclass(slots=True, eq=False)
class Expression:
    """An expression: what one rank contributes to a chunk, or two expressions combined.

    Attributes:
        mask: bit r is set if rank r contributes.
        chunk: the chunk that this is a value of.
        span: the first and the last rank if the operands are neighbors in rank order.
        parts: left and right operand; None for what one rank contributes.
    """

    mask: int
    chunk: int
    span: tuple[int, int] | None
    parts: tuple[Expression, Expression] | None = None

    def __str__(self) -> str:
        return f"{self.tree()} of chunk {self.chunk}"

    def tree(self) -> str:
        """Draw the expression, for example ``((0 1) (2 3))``."""
        if self.parts is None:
            return str(self.mask.bit_length() - 1)
        return f"({self.parts[0].tree()} {self.parts[1].tree()})"


class Expressions:
    """Makes each expression once, so that equal trees are the same object.

    Attributes:
        pairs: what was made of which two operands.
    """

    def __init__(self) -> None:
        self._leaves: dict[tuple[int, int], Expression] = {}
        self.pairs: dict[tuple[Expression, Expression], Expression] = {}

    def leaf(self, rank: int, chunk: int) -> Expression:
        """What `rank` contributes to `chunk`."""
        value = self._leaves.get((rank, chunk))
        if value is None:
            value = self._leaves[rank, chunk] = Expression(1 << rank, chunk, (rank, rank))
        return value

    def combine(self, left: Expression, right: Expression) -> Expression:
        """Make the value of ``left op right``, of the same chunk; not yet among `pairs`."""
        span = None
        if left.span and right.span and left.span[1] + 1 == right.span[0]:
            span = (left.span[0], right.span[1])
        value = Expression(left.mask | right.mask, left.chunk, span, (left, right))
        self.pairs[left, right] = value
        return value


def contributors(program: Program, rank: int) -> tuple[int, int]:
    """The first and the last rank that contribute to what `rank` ends with."""
    match program.algorithm.collective:
        case "scan":
            return 0, rank
        case "exscan":
            return 0, rank - 1
        case _:
            return 0, program.size - 1


def given(program: Program, values: Expressions) -> list[dict[int, Expression]]:
    """What each rank holds at the start: chunk -> value."""
    collective, size, chunks = program.algorithm.collective, program.size, range(program.chunks)
    if collective in ("broadcast", "scatter"):
        held = {chunk: values.leaf(program.root, chunk) for chunk in chunks}
        return [held if rank == program.root else {} for rank in range(size)]
    if collective in ("gather", "all_gather"):
        return [{rank: values.leaf(rank, rank)} for rank in range(size)]
    if collective == "all_to_all":
        chunks = range(size)
    if collective == "exscan":
        chunks = range(1)
    return [{chunk: values.leaf(rank, chunk) for chunk in chunks} for rank in range(size)]


def promised(program: Program, values: Expressions) -> Iterator[tuple[int, int, Expression | None]]:
    """What must be held at the end: rank, chunk, value; None for what is combined."""
    size, chunks = program.size, range(program.chunks)
    ranks = range(size)
    match program.algorithm.collective:
        case "broadcast":
            yield from ((r, c, values.leaf(program.root, c)) for r in ranks for c in chunks)
        case "reduce":
            yield from ((program.root, c, None) for c in chunks)
        case "all_reduce":
            yield from ((r, c, None) for r in ranks for c in chunks)
        case "gather":
            yield from ((program.root, i, values.leaf(i, i)) for i in ranks)
        case "all_gather":
            yield from ((r, i, values.leaf(i, i)) for r in ranks for i in ranks)
        case "scatter":
            yield from ((r, r, values.leaf(program.root, r)) for r in ranks)
        case "reduce_scatter":
            yield from ((r, r, None) for r in ranks)
        case "scan":
            yield from ((r, c, None) for r in ranks for c in chunks)
        case "exscan":
            yield from ((r, 1, None) for r in ranks[1:])
        case "all_to_all":
            yield from ((r, size + i, values.leaf(i, r)) for r in ranks for i in ranks)
        case other:
            raise ValueError(f"nothing is known of what {other} promises")
