"""A call whose arguments were checked: everything that is needed to run it, now or later."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from pycoll._calls.shared_memory import Native
from pycoll._runtime.engine import Engine
from pycoll._runtime.task import CallSteps
from pycoll._support.lazy_import import LazyModule
from pycoll._transports.base import Operation

if TYPE_CHECKING:
    from pycoll._arrays.value import Value
    from pycoll._calls.group import Bound
    from pycoll._cuda import copies
else:  # for arrays on a GPU alone
    copies = LazyModule("pycoll._cuda.copies")


R = TypeVar("R", covariant=True)


class Prepared(NamedTuple, Generic[R]):
    """A call whose arguments were checked, whose caller gets a value of type R.

    Attributes:
        text: what must be the same on all ranks, for example ``"barrier(algorithm=tree)"``.
        steps: the call over messages, given its signature: the text, and where it was made.
        native: the call in the compiled core, or None; it may return `native.BY_MESSAGES`.
        by_two_levels: the call in two levels, given its signature and a timeout in seconds, or
            None.
        finish: what the caller gets, of what the call has returned; None: that itself.
        collective: False: point to point, not numbered.
        receives: a receive, which can be cancelled.
        reads: values that must be in host memory before the call runs in the core, or in levels.
        bound: the one schedule that the call over messages runs, with its memory; None: it is more.
    """

    text: str
    steps: Callable[[bytes], CallSteps]
    native: Callable[[Native], Any] | None = None
    finish: Callable[[Any], Any] | None = None
    by_two_levels: Callable[[bytes, float], Any] | None = None
    collective: bool = True
    receives: bool = False
    reads: Sequence[Value] = ()
    bound: Callable[[], Bound] | None = None

    def conclude(self, engine: Engine, result: Any) -> tuple[Any, Sequence[Operation]]:
        """Return what the caller gets, and what must be done before."""
        finish = self.finish
        if finish is None:
            return result, ()
        if "pycoll._cuda.copies" not in sys.modules:
            return finish(result), ()
        return copies.conclude(engine, lambda: finish(result))
