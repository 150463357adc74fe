"""The blocking collectives of a communicator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Unpack, overload

from pycoll._communicator.running import Running
from pycoll._support.public_edge import part_of

if TYPE_CHECKING:
    import numpy as np

    from pycoll._arrays.types import A, D, How, MaybeNone, Reducer, T


@part_of("Communicator")
class Collectives(Running):
    """The blocking collectives; a part of `Communicator`."""

    @overload
    def broadcast(self, x: None, root: int = 0, **how: Unpack[How]) -> Any: ...
    @overload
    def broadcast(self, x: T | None, root: int = 0, **how: Unpack[How]) -> T: ...
    def broadcast(
        self, x: Any, root: int = 0, *, algorithm: str | None = None, timeout: float | None = None
    ) -> Any:
        """Return the root's `x` on every rank.

        Args:
            x: on the root the value: an array or an object. Elsewhere None, or a writable array of
                the same dtype and shape, which is filled and returned.
            root: rank whose value it is.
            algorithm: see `pycoll.algorithms("broadcast")`.
            timeout: seconds.

        Raises:
            MismatchError: an array passed off root does not look like the root's value.
        """
        return self._run(self._calls.broadcast(x, root, algorithm=algorithm), timeout)

    def reduce(
        self,
        x: T,
        op: Reducer = "sum",
        root: int = 0,
        out: Any = None,
        *,
        algorithm: str | None = None,
        timeout: float | None = None,
    ) -> T | MaybeNone:
        """Combine all ranks' `x`; the result is on the root, None elsewhere.

        Args:
            x: array or number, the same dtype and shape on all ranks; with a Python function as
                `op` also any object.
            op: "sum", "prod", "min", "max", "avg", "band", "bor", "bxor", "land", "lor", "lxor",
                "minloc", "maxloc", a `pycoll.Op`, or a function (a, b) -> c, applied in rank order.
            root: rank that gets the result.
            out: on the root, array of x's dtype and shape for the result (may be `x` itself);
                ignored elsewhere.
            algorithm: see `pycoll.algorithms("reduce")`.
            timeout: seconds.

        Raises:
            OverflowError: on every rank, if `x` is a Python int and one does not fit into 64 bits;
                the result may be any int.
        """
        return self._run(self._calls.reduce(x, op, root, out, algorithm=algorithm), timeout)

    def all_reduce(
        self,
        x: T,
        op: Reducer = "sum",
        out: Any = None,
        *,
        algorithm: str | None = None,
        timeout: float | None = None,
    ) -> T:
        """Combine all ranks' `x`; the result, the same bits, is on every rank.

        Args:
            x: array or number, the same dtype and shape on all ranks; with a Python function as
                `op` also any object.
            op: as in `reduce`.
            out: array of x's dtype and shape for the result; may be `x` itself.
            algorithm: see `pycoll.algorithms("all_reduce")`.
            timeout: seconds.

        Raises:
            OverflowError: as of `reduce`.
        """
        result: T = self._run(self._calls.all_reduce(x, op, out, algorithm=algorithm), timeout)
        return result

    allreduce = all_reduce

    def all_reduce_many(
        self,
        xs: Sequence[T],
        op: Reducer = "sum",
        out: Sequence[Any] | None = None,
        *,
        algorithm: str | None = None,
        timeout: float | None = None,
    ) -> list[T]:
        """Combine all ranks' arrays, each as `all_reduce` would, in few large messages.

        Args:
            xs: arrays or numbers, on all ranks as many, of the same dtypes and shapes.
            op: as in `reduce`.
            out: for each of `xs` an array for its result, or None: a new one. ``out=xs`` is in
                place.
            algorithm: see `pycoll.algorithms("all_reduce")`.
            timeout: seconds.

        Returns:
            The results, in the order of `xs`.

        Raises:
            OverflowError: as of `reduce`.
        """
        result: list[T] = self._run(
            self._calls.all_reduce_many(xs, op, out, algorithm=algorithm), timeout
        )
        return result

    @overload
    def gather(
        self, x: np.ndarray[Any, D], root: int = 0, out: Any = None, **how: Unpack[How]
    ) -> np.ndarray[Any, D] | MaybeNone: ...
    @overload
    def gather(self, x: A, root: int = 0, out: Any = None, **how: Unpack[How]) -> A | MaybeNone: ...
    @overload
    def gather(
        self, x: T, root: int = 0, out: Any = None, **how: Unpack[How]
    ) -> list[T] | MaybeNone: ...
    def gather(
        self,
        x: Any,
        root: int = 0,
        out: Any = None,
        *,
        algorithm: str | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Collect all ranks' `x` on the root, as an array ``(size, *x.shape)``, or a list.

        Args:
            x: array, the same dtype and shape on all ranks; or an object.
            root: rank that gets the result; None elsewhere.
            out: on the root, array of shape ``(size, *x.shape)`` for the result, or a list of one
                array of x's shape for each rank, which is returned; ignored elsewhere.
            algorithm: see `pycoll.algorithms("gather")`.
            timeout: seconds.
        """
        return self._run(self._calls.gather(x, root, out, algorithm=algorithm), timeout)

    @overload
    def all_gather(  # type: ignore[overload-overlap]
        self, x: np.ndarray[Any, D], out: Any = None, **how: Unpack[How]
    ) -> np.ndarray[Any, D]: ...
    @overload
    def all_gather(  # type: ignore[overload-overlap]
        self, x: A, out: Any = None, **how: Unpack[How]
    ) -> A: ...
    @overload
    def all_gather(self, x: T, out: Any = None, **how: Unpack[How]) -> list[T]: ...
    def all_gather(
        self,
        x: Any,
        out: Any = None,
        *,
        algorithm: str | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Collect all ranks' `x` on every rank, as an array ``(size, *x.shape)``, or a list.

        Args:
            x: array, the same dtype and shape on all ranks; or an object.
            out: array of shape ``(size, *x.shape)`` for the result, or a list of one array of x's
                shape for each rank, which is returned; `x` may be ``out[rank]``.
            algorithm: see `pycoll.algorithms("all_gather")`.
            timeout: seconds.
        """
        return self._run(self._calls.all_gather(x, out, algorithm=algorithm), timeout)

    @overload
    def scatter(self, x: None, root: int = 0, out: Any = None, **how: Unpack[How]) -> Any: ...
    @overload
    def scatter(
        self, x: np.ndarray[Any, D] | None, root: int = 0, out: Any = None, **how: Unpack[How]
    ) -> np.ndarray[Any, D]: ...
    @overload
    def scatter(self, x: A | None, root: int = 0, out: Any = None, **how: Unpack[How]) -> A: ...
    @overload
    def scatter(
        self, x: Sequence[T] | None, root: int = 0, out: Any = None, **how: Unpack[How]
    ) -> T: ...
    def scatter(
        self,
        x: Any,
        root: int = 0,
        out: Any = None,
        *,
        algorithm: str | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Return row `rank` of the root's `x`.

        Args:
            x: on the root an array (size, ...), or a list or tuple of size equal arrays, or of
                size objects; None elsewhere.
            root: rank whose value it is.
            out: array of the dtype and shape of a row for the result.
            algorithm: see `pycoll.algorithms("scatter")`.
            timeout: seconds.

        Raises:
            ValueError: off root also when `out` turns out not to look like a row; the scatter has
                taken place then, and the communicator stays usable.
        """
        return self._run(self._calls.scatter(x, root, out, algorithm=algorithm), timeout)

    @overload
    def reduce_scatter(
        self, x: np.ndarray[Any, D], op: Reducer = "sum", out: Any = None, **how: Unpack[How]
    ) -> np.ndarray[Any, D]: ...
    @overload
    def reduce_scatter(
        self, x: A, op: Reducer = "sum", out: Any = None, **how: Unpack[How]
    ) -> A: ...
    def reduce_scatter(
        self,
        x: Any,
        op: Reducer = "sum",
        out: Any = None,
        *,
        algorithm: str | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Combine all ranks' ``x[rank]``: each rank gets one row of the reduction.

        Args:
            x: array (size, ...), or a list or tuple of size equal arrays in host memory; the same
                dtype and shape on all ranks.
            op: as in `reduce`; a function gets rows of x.
            out: array of a row's dtype and shape; may be ``x[rank]``.
            algorithm: see `pycoll.algorithms("reduce_scatter")`.
            timeout: seconds.
        """
        return self._run(self._calls.reduce_scatter(x, op, out, algorithm=algorithm), timeout)

    @overload
    def all_to_all(  # type: ignore[overload-overlap]
        self, x: A, out: Any = None, **how: Unpack[How]
    ) -> A: ...
    @overload
    def all_to_all(self, x: Sequence[T], out: Any = None, **how: Unpack[How]) -> list[T]: ...
    def all_to_all(
        self,
        x: Any,
        out: Any = None,
        *,
        algorithm: str | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Exchange rows: row i of the result is rank i's ``x[rank]``.

        Args:
            x: array (size, ...), the same dtype and shape on all ranks; or a list or tuple of
                size objects.
            out: array of x's dtype and shape for the result; may be `x` itself.
            algorithm: see `pycoll.algorithms("all_to_all")`.
            timeout: seconds.
        """
        return self._run(self._calls.all_to_all(x, out, algorithm=algorithm), timeout)

    def scan(
        self,
        x: T,
        op: Reducer = "sum",
        out: Any = None,
        *,
        algorithm: str | None = None,
        timeout: float | None = None,
    ) -> T:
        """Combine the `x` of the ranks 0 to this one, in rank order.

        Args:
            x: array or number, the same dtype and shape on all ranks; with a Python function as
                `op` also any object.
            op: as in `reduce`.
            out: array of x's dtype and shape for the result.
            algorithm: "shared_memory", or "linear": everything to everybody, combined there.
            timeout: seconds.

        Raises:
            OverflowError: as of `reduce`.
        """
        result: T = self._run(self._calls.scan(x, op, out, algorithm=algorithm), timeout)
        return result

    def exscan(
        self,
        x: T,
        op: Reducer = "sum",
        out: Any = None,
        *,
        algorithm: str | None = None,
        timeout: float | None = None,
    ) -> T | MaybeNone:
        """Combine the `x` of the ranks before this one, as `scan`.

        On rank 0 the result is None, and `out` stays as it is.
        """
        return self._run(self._calls.exscan(x, op, out, algorithm=algorithm), timeout)

    def barrier(self, *, algorithm: str | None = None, timeout: float | None = None) -> None:
        """Return when every rank has called it.

        Args:
            algorithm: see `pycoll.algorithms("barrier")`.
            timeout: seconds.
        """
        self._run(self._calls.barrier(algorithm=algorithm), timeout)

    # --- blocks that differ in shape or length ---------------------------------------------

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
