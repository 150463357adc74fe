"""Why a call runs as it does: what was chosen, what else could serve, and what could not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pycoll import _dtypes as dtypes
from pycoll import schedules
from pycoll._arrays import operators
from pycoll._calls import folding, gathered_reductions, shared_memory_calls
from pycoll._calls.rooted import INLINE_NBYTES
from pycoll._selection import costs
from pycoll._selection.agreed import SHARED_MEMORY
from pycoll._selection.select import UNKNOWN_S, Candidate, Query
from pycoll._support.checks import check_int, check_name, check_nbytes
from pycoll._support.wording import a_kind, seconds_text, size_text
from pycoll._transports._core import with_default_floats

if TYPE_CHECKING:
    from pycoll._arrays.operators import Op
    from pycoll._arrays.types import Reducer
    from pycoll._dtypes import DType
    from pycoll._selection.select import Selector

_OF_BITS = frozenset({"band", "bor", "bxor"})
"""Operators of integers and bool only."""


class Explanation(NamedTuple):
    """How a call would run, and why; its text is meant to be read.

    Attributes:
        collective: for example ``"all_reduce"``.
        nbytes: of one rank's value or block.
        size: number of ranks.
        algorithm: the one that would run; `segments`: into how many each chunk is cut.
        seconds: that it is expected to take; math.inf: nobody knows.
        why: in words.
        runners_up: what else can serve, (algorithm, segments, seconds) each, quickest first.
        refused: what cannot serve or must not, by name, and why.
        table: where the times come from.
        topology: the file by whose order of hosts the ranks stand; "": by their numbers.
    """

    collective: str
    nbytes: int
    size: int
    algorithm: str
    segments: int
    seconds: float
    why: str
    runners_up: tuple[tuple[str, int, float], ...]
    refused: dict[str, str]
    table: str
    topology: str = ""

    def __str__(self) -> str:
        names = [self.algorithm, *(name for name, _, _ in self.runners_up), *self.refused]
        width = max(map(len, names)) + 2
        cut = f", in {self.segments} segments" if self.segments > 1 else ""
        lines = [
            f"{self.collective} of {size_text(self.nbytes)} on {self.size} "
            f"{'rank' if self.size == 1 else 'ranks'}: {self.algorithm}"
            f"{cut}, about {time_text(self.seconds)}",
            f"  because {self.why}",
        ]
        if self.topology:
            lines.append(f"  hosts stand in the order that PYCOLL_TOPOLOGY={self.topology} says")
        if self.size == 1:
            return "\n".join(lines)
        if self.runners_up:
            lines.append("  others that can serve:")
            for name, segments, seconds in self.runners_up:
                cut = f"  {segments} segments" if segments > 1 else ""
                lines.append(f"    {name:<{width}}{time_text(seconds):>9}{cut}")
        if self.refused:
            lines.append("  not considered:")
            lines += [f"    {name:<{width}}{why}" for name, why in self.refused.items()]
        lines.append(f"  times by {self.table}")
        return "\n".join(lines)


_ALONE = (
    "one rank has nothing to exchange, and all algorithms are alike. Ask on several: "
    "pycoll-run -n 4 script.py"
)

_ALIASES = {"allreduce": "all_reduce"}


def explain(
    selector: Selector,
    collective: str,
    nbytes: int = 0,
    op: Reducer = "sum",
    blocking: bool = True,
    dtype: Any = None,
) -> Explanation:
    """Explain how a call would run; sends nothing.

    Args:
        selector: of the communicator, or of one that is made up.
        collective: for example ``"all_reduce"``.
        nbytes: of one rank's value, or of one block (see `Query`); a barrier has none.
        op: the operator, where something is reduced.
        blocking: False: as a request, which does not go through shared memory.
        dtype: of the elements, where something is reduced: a name, or what NumPy takes for one;
            None: floats, or integers if the operator takes nothing else.

    Raises:
        ValueError: there is no such collective or operator, or `nbytes` is below 0.
        TypeError: `nbytes` is no whole number, or the operator does not work on `dtype`.
    """
    nbytes = check_int(check_nbytes(nbytes), "nbytes")
    if not isinstance(blocking, bool):
        raise TypeError(f"blocking is True or False, not {a_kind(blocking)}")
    check_name(collective, "a collective", "all_reduce")
    collective = _ALIASES.get(collective, collective)
    request = Query(collective, 0 if collective == "barrier" else nbytes, shm=blocking)
    schedules.names(collective)  # or it does not exist
    gathered = ""
    if collective in schedules.REDUCING:
        resolved = operators.resolve(op)
        element = _element(dtype, resolved)
        serves = shared_memory_calls.serves(resolved, element)
        request = request._replace(
            rank_order=not resolved.commutative,
            whole=not resolved.elementwise,
            shm=blocking and serves,
        )
        of_call = selector.agreed, selector.size, collective, nbytes
        if blocking and not serves and gathered_reductions.are_short(*of_call):
            request = Query(folding.moves_for(collective), nbytes)
            gathered = f"so short values go by {request.collective}, and are combined then; there "
    able, refused = with_default_floats(selector.ranking, request)
    chosen = able[0]
    return Explanation(
        collective=collective,
        nbytes=request.nbytes,
        size=selector.size,
        algorithm=chosen.choice.name,
        segments=chosen.choice.segments,
        seconds=chosen.seconds,
        why=_ALONE if selector.size == 1 else gathered + _why(selector, request, able),
        runners_up=tuple((*found.choice, found.seconds) for found in able[1:]),
        refused=dict(refused),
        table=f"{selector.agreed.costs.origin} ({costs.LINKS[selector.link]})",
        topology=selector.ordered_by(request.collective, chosen.choice.name),
    )


def _element(dtype: Any, op: Op) -> DType:
    """Return the type of the elements that a call is explained for."""
    if dtype is None:
        return dtypes.INT64 if op.name in _OF_BITS else dtypes.FLOAT32
    name = dtype if isinstance(dtype, str) else str(dtype).removeprefix("torch.")
    element = dtypes.of_name(name)
    if element is None:
        try:
            element = dtypes.of_numpy(np.dtype(dtype))
        except (TypeError, ValueError):
            raise TypeError(
                f"dtype is a name, as 'float32', or what NumPy takes for one, not {dtype!r}"
            ) from None
    operators.check(op, element)
    return element


def _why(selector: Selector, request: Query, able: list[Candidate]) -> str:
    collective, nbytes = request.collective, request.nbytes
    rule = selector.agreed.rules.get(collective)
    name = able[0].choice.name
    if rule is not None:
        said = f"PYCOLL_ALGORITHM says {collective}:{rule}"
        if not rule.allows(name):
            return f"{said}, but none of that can serve here; of the others it is the quickest"
        return said if len(able) == 1 else f"{said}, and of these it is the quickest"
    if collective == "broadcast" and nbytes <= INLINE_NBYTES and name != SHARED_MEMORY:
        return "so small a value travels with its announcement, down the binomial tree, anyway"
    if name == SHARED_MEMORY:
        return "all ranks share memory, and there shared_memory is used whenever it can serve"
    if len(able) == 1:
        return "it is the only one that can serve"
    return "by the table it takes least time"


def time_text(seconds: float) -> str:
    return "unknown" if seconds == UNKNOWN_S else seconds_text(seconds)
