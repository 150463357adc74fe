"""Gradients made small before they travel: all_reduce of 16, 8 or 1 bit, of few values, of factors.

A compressor has `reduce(comm, x)`, which gives the sum over the ranks of what each of them
contributed, with the same bits on every rank, and this rank's own contribution. What it has left
out, `ErrorFeedback` keeps and adds to the next gradient. Three ways carry the messages:

    all_reduce               messages that can be added as they are: `Float16`, `BFloat16`, and the
                             factors of `PowerSGD`
    all_gather               `TopK`: every rank adds all messages, in the order of the ranks
    all_to_all, all_gather   `Int8`, `OneBit`: each rank adds one stripe of all, and compresses that
                             sum again
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt

from pycoll._support.public_edge import edge

if TYPE_CHECKING:
    from pycoll import Communicator

Array = npt.NDArray[Any]


class Reduced(NamedTuple):
    """What a compressor makes of an array.

    Attributes:
        total: the sum over the ranks of their `mine`, within rounding; the same bits on all.
        mine: what of this rank's array is in `total`.
    """

    total: Array
    mine: Array


class Compressor(Protocol):
    """What `all_reduce` takes. One that has state, such as `PowerSGD`, is for one bucket only."""

    def reduce(self, comm: Communicator, x: Array) -> Reduced:
        """Add up the ranks' `x`, C-contiguous and of float32 or float64, in few bytes."""


@edge
def all_reduce(comm: Communicator, x: Any, compressor: Compressor, out: Any = None) -> Any:
    """Add up the arrays of all ranks, each compressed. Collective; equal arguments on all ranks.

    Args:
        comm: the communicator.
        x: a NumPy array or a PyTorch tensor in host memory, float32 or float64, of the same shape
            and dtype on all ranks. It may be changed when the call returns.
        compressor: for instance ``ErrorFeedback(TopK(0.01))``; one for each bucket.
        out: filled with the sum and returned; of x's kind, shape and dtype; may be `x` itself.

    Returns:
        The sum, of x's kind, with the same bits on all ranks; new memory if `out` is None.

    Raises:
        TypeError: of another dtype, or not in host memory.
        ValueError: `out` does not fit.
        MismatchError, PeerFailed, OperationTimeout: as in `Communicator.all_reduce`. The state of
            `compressor` is then that before the call.
    """
    array = _in_host_memory(x)
    target = None if out is None else _in_host_memory(out)
    if target is not None and (target.shape, target.dtype) != (array.shape, array.dtype):
        raise ValueError(
            f"out is {target.dtype}{list(target.shape)}, x is {array.dtype}{list(array.shape)}"
        )
    if target is not None and not target.flags.writeable:
        raise ValueError("out is read-only")
    with np.errstate(all="ignore"):  # what is not finite is for the caller to see, in the sum
        total = compressor.reduce(comm, np.ascontiguousarray(array).reshape(array.shape)).total
    if target is not None:
        target[...] = total
        return out
    return total if isinstance(x, np.ndarray) else sys.modules["torch"].from_numpy(total)


class ErrorFeedback:
    """Adds to each array what the compressor has left out of those before. One for each bucket.

    So nothing is lost, only late: at any time the contributions and `residual` make the sum of all
    arrays, within rounding. If the learning rate changes, compress the gradient times the rate:
    what is kept was meant for the rate of its step.

    Source: S. P. Karimireddy et al., Error Feedback Fixes SignSGD, ICML 2019, algorithm 2.

    Attributes:
        residual: what has been left out; None before the first call. Set it to None where a
            gradient that is not finite was skipped.
    """

    def __init__(self, compressor: Compressor) -> None:
        self.compressor = compressor
        self.residual: Array | None = None

    def reduce(self, comm: Communicator, x: Array) -> Reduced:
        """See `Compressor`."""
        if self.residual is not None:
            if self.residual.shape != x.shape:
                raise ValueError(
                    f"an ErrorFeedback that has seen arrays of the shape {self.residual.shape} got"
                    f" one of {x.shape}: make one for each bucket"
                )
            x = x + self.residual
        reduced = self.compressor.reduce(comm, x)
        self.residual = x - reduced.mine
        return reduced


class Uncompressed:
    """The array as it is, by `Communicator.all_reduce`: what the others are measured against."""

    def reduce(self, comm: Communicator, x: Array) -> Reduced:
        """See `Compressor`."""
        return Reduced(comm.all_reduce(x), x)


class Float16:
    """Each value rounded to 16 bits, range 65504: 2 bytes. Sums beyond that become infinite.

    The collective rounds each partial sum, too; that error is not in any rank's residual.
    """

    def compress(self, x: Array) -> Array:
        """The values in 16 bits."""
        return x.astype(np.float16)

    def reduce(self, comm: Communicator, x: Array) -> Reduced:
        """See `Compressor`."""
        message = self.compress(x)
        return Reduced(comm.all_reduce(message).astype(x.dtype), message.astype(x.dtype))


class BFloat16(Float16):
    """As `Float16`, but with 8 bits of precision and the range of float32. Needs ml_dtypes."""

    def compress(self, x: Array) -> Array:
        """The values in 16 bits."""
        try:
            import ml_dtypes
        except ImportError as exc:
            raise ImportError("BFloat16 needs ml_dtypes: pip install ml_dtypes") from exc
        return x.astype(ml_dtypes.bfloat16)


class TopK:
    """The values that are largest, and where they stand: 4 bytes and a value for each.

    By all_gather, so the bytes grow with the ranks: it pays while `fraction` is less than 1/size.
    Without `ErrorFeedback` the small values are lost for ever.

    Source: D. Alistarh et al., The Convergence of Sparsified Gradient Methods, NeurIPS 2018.

    Args:
        fraction: of the values that are sent, above 0, at most 1; one value at least.
    """

    @edge
    def __init__(self, fraction: float) -> None:
        if not 0 < fraction <= 1:
            raise ValueError(f"TopK({fraction}): the fraction is above 0, and at most 1")
        self.fraction = fraction

    def compress(self, x: Array) -> Array:
        """Indices (uint32) and values of those with the largest magnitudes, as bytes."""
        k = min(x.size, max(1, round(self.fraction * x.size)))
        places = np.arange(x.size)
        if k < x.size:
            places = np.sort(np.argpartition(np.abs(x), x.size - k)[x.size - k :])  # NaN: largest
        return _joined(places.astype(np.uint32), x[places])

    def reduce(self, comm: Communicator, x: Array) -> Reduced:
        """See `Compressor`."""
        message = self.compress(x.reshape(-1))
        k = len(message) // (4 + x.itemsize)
        total, mine = np.zeros(x.size, x.dtype), np.zeros(x.size, x.dtype)
        for rank, each in enumerate(comm.all_gather(message)):
            places, values = _parted(each, 4 * k, np.uint32)
            total[places] += values.copy().view(x.dtype)
            if rank == comm.rank:
                mine[places] = values.copy().view(x.dtype)
        return Reduced(total.reshape(x.shape), mine.reshape(x.shape))


class _Striped:
    """Compressors whose messages cannot be added: each rank adds a stripe, and compresses that.

    The second compression makes an error, too. The stripe's rank counts it as one of its own
    contribution, so that one `ErrorFeedback` makes up for both.

    Args:
        block: so many values have a scale of their own.
    """

    @edge
    def __init__(self, block: int = 256) -> None:
        if block < 1:
            raise ValueError(f"{type(self).__name__}(block={block}): a block has a value at least")
        self.block = block

    def compress(self, x: Array) -> Array:
        raise NotImplementedError

    def decompress(self, message: Array, width: int, dtype: Any) -> Array:
        raise NotImplementedError

    def reduce(self, comm: Communicator, x: Array) -> Reduced:
        width = -(-x.size // comm.size)
        stripes = np.zeros((comm.size, width), x.dtype)  # one for each rank; the last may be padded
        stripes.reshape(-1)[: x.size] = x.reshape(-1)
        messages = self.compress(stripes)
        mine = self.decompress(messages, width, x.dtype)
        of_all = self.decompress(comm.all_to_all(messages), width, x.dtype)
        stripe = of_all.sum(axis=0, keepdims=True)
        message = self.compress(stripe)
        total = self.decompress(comm.all_gather(message[0]), width, x.dtype)
        mine[comm.rank] += total[comm.rank] - stripe[0]
        return Reduced(*(each.reshape(-1)[: x.size].reshape(x.shape) for each in (total, mine)))

    def _by_block(self, combine: np.ufunc, x: Array) -> Array:
        """Each block's values combined to one."""
        return combine.reduceat(x, np.arange(0, x.shape[-1], self.block), axis=-1)

    def _spread(self, scales: Array, width: int) -> Array:
        """Each block's scale, for each of its values."""
        return np.repeat(scales, self.block, axis=-1)[..., :width]


class Int8(_Striped):
    """Each value as a number from -127 to 127 times its block's scale: 1 byte, and the scales."""

    def compress(self, x: Array) -> Array:
        """Each row as bytes: the scales, in x's dtype, and the numbers."""
        scales = self._by_block(np.maximum, np.abs(x)) / x.dtype.type(127)
        each = self._spread(scales, x.shape[-1])
        # A block of zeros has the scale 0. What is not finite makes its whole block NaN.
        ratios = np.divide(x, each, out=np.zeros_like(x), where=each != 0)
        numbers = np.clip(np.rint(ratios), -127, 127).astype(np.int8)
        return _joined(scales, numbers)

    def decompress(self, message: Array, width: int, dtype: Any) -> Array:
        """The rows, `width` values each."""
        scales, numbers = _parted(message, message.shape[-1] - width, dtype)
        return self._spread(scales, width) * numbers.view(np.int8)


class OneBit(_Striped):
    """Each value's sign; for each block the mean of those that are negative, and of the others.

    Source: F. Seide et al., 1-Bit Stochastic Gradient Descent, Interspeech 2014. Only of use with
    `ErrorFeedback`, which that paper introduced.
    """

    def compress(self, x: Array) -> Array:
        """Each row as bytes: the means, in x's dtype, and the signs, eight a byte."""
        means, positive = [], x >= 0
        for chosen in (positive, ~positive):
            total = self._by_block(np.add, np.where(chosen, x, 0))
            means.append(total / np.maximum(self._by_block(np.add, chosen.astype(x.dtype)), 1))
        return _joined(*means, np.packbits(positive, axis=-1))

    def decompress(self, message: Array, width: int, dtype: Any) -> Array:
        """The rows, `width` values each."""
        means, bits = _parted(message, message.shape[-1] - -(-width // 8), dtype)
        above, below = (self._spread(part, width) for part in np.split(means, 2, axis=-1))
        return np.where(np.unpackbits(bits, axis=-1, count=width), above, below)


class PowerSGD:
    """A matrix as the product of two thin ones, by a step of the power method: for one matrix.

    The sum of the ranks' matrices, m x n, is projected on `rank` directions: r (m + n) values
    travel. It is exact if that sum has no higher rank. The directions of a step are where the next
    one starts, so they get better while gradients change slowly. More than two axes count as a
    matrix whose first axis is the first; vectors travel uncompressed. Use it with `ErrorFeedback`,
    and for each layer's matrix: a bucket of several says little as one.

    Source: T. Vogels, S. P. Karimireddy, M. Jaggi, PowerSGD, NeurIPS 2019, algorithm 1.

    Args:
        rank: of the product, 1 or more.
        seed: of the first directions; the same on all ranks.
    """

    @edge
    def __init__(self, rank: int = 2, seed: int = 0) -> None:
        if rank < 1:
            raise ValueError(f"PowerSGD(rank={rank}): the rank is at least 1")
        self.rank = rank
        self._seed, self._step = seed, 0
        self._right: Array | None = None

    def reduce(self, comm: Communicator, x: Array) -> Reduced:
        """See `Compressor`."""
        if x.ndim < 2 or not x.size:
            return Uncompressed().reduce(comm, x)
        matrix = x.reshape(len(x), -1)
        left = _orthonormal(comm.all_reduce(matrix @ self._directions(matrix)))
        my_right = matrix.T @ left
        right = comm.all_reduce(my_right)
        self._right, self._step = right, self._step + 1
        return Reduced(*(_product(left, each).reshape(x.shape) for each in (right, my_right)))

    def _directions(self, matrix: Array) -> Array:
        """Those of the last step. New ones for those that vanished, or they would stay zero."""
        random = np.random.default_rng((self._seed, self._step))
        fresh = random.standard_normal((matrix.shape[1], min(self.rank, *matrix.shape)))
        fresh, old = fresh.astype(matrix.dtype), self._right
        if old is None:
            return fresh
        if old.shape != fresh.shape:
            raise ValueError(
                f"PowerSGD got a matrix of another shape, {matrix.shape}: make one each"
            )
        return np.where(np.isfinite(old).all(axis=0) & old.any(axis=0), old, fresh)


def _orthonormal(matrix: Array) -> Array:
    """The columns made orthonormal (Gram-Schmidt), those that are zero left as they are.

    In elementwise operations and sums only, unlike LAPACK, so ranks on different processors get the
    same bits. Three times: a column that depends on those before leaves noise at first, which
    becomes a direction of its own.
    """
    rows = matrix.T.copy()
    for i, row in enumerate(rows):
        for _ in range(3):
            for before in rows[:i]:
                row -= (row * before).sum() * before
            largest = np.abs(row).max()
            if largest > 0:
                row /= largest  # or the squares of small values would vanish
                row /= np.sqrt((row * row).sum())
    return rows.T.copy()


def _product(left: Array, right: Array) -> Array:
    """``left @ right.T``, with the same bits on every processor."""
    total = np.multiply.outer(left[:, 0], right[:, 0])
    for i in range(1, left.shape[1]):
        total += np.multiply.outer(left[:, i], right[:, i])
    return total


def _in_host_memory(x: Any) -> Array:
    """See an array or a tensor as NumPy's, without a copy."""
    dtype, device = str(getattr(x, "dtype", type(x).__name__)), str(getattr(x, "device", "cpu"))
    if dtype in ("torch.float32", "torch.float64") and device == "cpu":
        x = x.detach().numpy()
    if type(x) not in (np.ndarray, np.memmap) or x.dtype.char not in "fd":  # no masks, no units
        raise TypeError(
            "all_reduce with compression takes NumPy arrays and PyTorch tensors, float32 or"
            f" float64, in host memory, not {dtype} on {device}"
        )
    return cast("Array", x)


def _joined(*parts: Array) -> Array:
    """The bytes of the arrays, one after the other along the last axis."""
    return np.concatenate([np.ascontiguousarray(p).view(np.uint8) for p in parts], axis=-1)


def _parted(message: Array, nbytes: int, dtype: Any) -> tuple[Array, Array]:
    """The first `nbytes` of each row as `dtype`, and the rest."""
    return np.ascontiguousarray(message[..., :nbytes]).view(dtype), message[..., nbytes:]
