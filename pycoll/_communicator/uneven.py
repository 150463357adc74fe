"""The blocking collectives of a communicator whose blocks differ in shape or length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

from pycoll._communicator.running import Running
from pycoll._support.public_edge import part_of

if TYPE_CHECKING:
    from pycoll._arrays.types import A, MaybeNone, Reducer


@part_of("Communicator")
class UnevenCollectives(Running):
    """The blocking collectives of uneven blocks; a part of `Communicator`."""

    def gatherv(
        self, x: A, root: int = 0, out: Any = None, *, timeout: float | None = None
    ) -> list[A] | MaybeNone:
        """Collect all ranks' `x`, of whatever shapes, on the root: a list of arrays by rank.

        Args:
            x: array of any shape, of the same dtype on all ranks.
            root: rank that gets the result; None elsewhere.
            out: on the root, places for the arrays: a list of arrays of their dtype and shapes (or
                None, where a new one is wanted); or one array, in which they stand one after the
                other along its leading axis: the list then has views of it. Ignored elsewhere.
            timeout: seconds.

        Raises:
            ValueError: also when `out` turns out not to fit; the call has taken place then, the
                communicator stays usable, and what is in `out` is not defined.
        """
        result: list[A] | None = self._run(self._calls.gatherv(x, root, out), timeout)
        return result

    def all_gatherv(self, x: A, out: Any = None, *, timeout: float | None = None) -> list[A]:
        """Collect all ranks' `x`, of whatever shapes, on every rank: a list of arrays by rank.

        Args:
            x: array of any shape, of the same dtype on all ranks.
            out: places for the arrays, on this rank alone: as in `gatherv`.
            timeout: seconds.
        """
        result: list[A] = self._run(self._calls.all_gatherv(x, out), timeout)
        return result

    @overload
    def scatterv(
        self, xs: None, root: int = 0, out: Any = None, *, timeout: float | None = None
    ) -> Any: ...
    @overload
    def scatterv(
        self,
        xs: Sequence[A] | None,
        root: int = 0,
        out: Any = None,
        *,
        timeout: float | None = None,
    ) -> A: ...
    def scatterv(
        self,
        xs: Sequence[Any] | None,
        root: int = 0,
        out: Any = None,
        *,
        timeout: float | None = None,
    ) -> Any:
        """Return array number `rank` of the root's list.

        Args:
            xs: on the root one array for each rank, of any shapes and one dtype; None elsewhere.
            root: rank whose list it is.
            out: array of the dtype and shape of the result.
            timeout: seconds.

        Raises:
            ValueError: off root also when `out` turns out not to fit, as in `scatter`.
        """
        return self._run(self._calls.scatterv(xs, root, out), timeout)

    def all_to_allv(
        self, xs: Sequence[A], out: Any = None, *, timeout: float | None = None
    ) -> list[A]:
        """Exchange arrays of any shapes: item i of the result is rank i's ``xs[rank]``.

        Args:
            xs: one array for each rank; all of the same dtype, on all ranks.
            out: places for the arrays that come, on this rank alone: as in `gatherv`.
            timeout: seconds.
        """
        result: list[A] = self._run(self._calls.all_to_allv(xs, out), timeout)
        return result

    def reduce_scatterv(
        self,
        x: A,
        counts: Sequence[int],
        op: Reducer = "sum",
        out: Any = None,
        *,
        algorithm: str | None = None,
        timeout: float | None = None,
    ) -> A:
        """Combine all ranks' `x`: each rank gets its part, of ``counts[rank]`` rows.

        Args:
            x: array whose leading axis is ``sum(counts)`` long, the same on all ranks.
            counts: rows for each rank, the same on all ranks; may be 0.
            op: as in `reduce`; a function gets the rows of one rank.
            out: array for the result; may be this rank's rows of `x`.
            algorithm: see `pycoll.algorithms("reduce_scatter")`.
            timeout: seconds.
        """
        result: A = self._run(
            self._calls.reduce_scatterv(x, counts, op, out, algorithm=algorithm), timeout
        )
        return result
