"""Gradients made small before they travel: all_reduce of 16, 8 or 1 bit, of few values, of factors.

A compressor adds up what it keeps of the ranks' arrays. What it leaves out is kept by
`ErrorFeedback`, and added to the next gradient. Three ways carry the messages:

    all_reduce               messages that can be added as they are: `Float16`, `BFloat16`, and the
                             factors of `PowerSGD`
    all_gather               `TopK`: every rank adds all messages, in the order of the ranks
    all_to_all, all_gather   `Int8`, `OneBit`: each rank adds one stripe of all, and compresses that
                             sum again
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pycoll._support.checks import check_at_least, check_comm
from pycoll._support.public_edge import edge, edges

if TYPE_CHECKING:
    from pycoll import Communicator, Request

Array = npt.NDArray[Any]
Steps = Generator["Request[Any]", Any, tuple[Array, Array]]


class Compressor:
    """Adds up the ranks' arrays in few bytes. Make one for each bucket: some have a state."""

    def reduce(self, comm: Communicator, x: Array) -> Steps:
        """Yield requests on `comm`, whose results come back; return ``(total, mine)``.

        `total` is the sum over the ranks of their `mine`, with the same bits on all of them; `mine`
        is what of x is in it. x is not empty, contiguous, and of float32 or float64.
        """
        raise NotImplementedError


@edge
def all_reduce(comm: Communicator, x: Any, compressor: Compressor, out: Any = None) -> Any:
    """Return the sum of all ranks' arrays, each compressed, with the same bits on all. Collective.

    Args:
        comm: the communicator.
        x: a NumPy array or a PyTorch tensor in host memory, of one shape and dtype on all ranks:
            float32, float64, float16 or bfloat16. The last two are compressed as float32.
        compressor: for instance ``ErrorFeedback(TopK(0.01))``.
        out: of x's shape and dtype, gets the sum; may be `x` itself. None: new memory.

    Raises:
        TypeError, ValueError: an argument does not fit; nothing was sent.
        MismatchError, PeerFailed, OperationTimeout: as in `Communicator.all_reduce`. The state of
            `compressor` is then that before the call.
    """
    return iall_reduce(comm, x, compressor, out).wait()


@edge
def iall_reduce(
    comm: Communicator, x: Any, compressor: Compressor, out: Any = None
) -> CompressedRequest:
    """Start an `all_reduce`: compress, and send while the caller computes.

    All ranks start their sums, and wait for them, in the same order. `x` and `out` belong to the
    request until it has been waited for.
    """
    check_comm(comm)
    array = _as_numpy(x)
    if out is None:
        out = np.empty(x.shape, x.dtype) if isinstance(x, np.ndarray) else x.new_empty(x.shape)
    target = _as_numpy(out)
    if (target.shape, target.dtype) != (array.shape, array.dtype):
        given, wanted = (f"{each.dtype}{list(each.shape)}" for each in (target, array))
        raise ValueError(f"out is {given}, x is {wanted}")
    if not target.flags.writeable:
        raise ValueError("out is read-only")
    compressor = _checked(compressor) if array.size else Uncompressed()
    array = np.ascontiguousarray(array, np.float64 if array.itemsize == 8 else np.float32)
    return CompressedRequest(compressor.reduce(comm, array), target, out)


@edges
class CompressedRequest:
    """A sum that `iall_reduce` has started.

    `PowerSGD`, `Int8` and `OneBit` send twice, the second time in `wait`. So start the next
    bucket's sum before you wait for this one.
    """

    def __init__(self, steps: Steps, target: Array, out: Any) -> None:
        self._target, self._out = target, out
        self._steps: Any = steps
        self._request: Request[Any] | None = None
        self._go_on(None)

    def wait(self, timeout: float | None = None) -> Any:
        """Return the sum. After an OperationTimeout of `timeout` seconds one can wait again."""
        while self._request is not None:
            result = self._request.wait(timeout)
            if self._steps.gi_frame is None:
                raise ValueError("this sum has failed: what it raised says why")
            self._go_on(result)
        return self._out

    def _go_on(self, result: Any) -> None:
        try:
            with np.errstate(all="ignore"):  # what is not finite is for the caller to see
                self._request = self._steps.send(result)
        except StopIteration as end:
            self._request, (total, _) = None, end.value
            self._target[...] = total.reshape(self._target.shape)


class ErrorFeedback(Compressor):
    """Adds to each array what the compressor has left out of those before. One for each bucket.

    So nothing is lost, only late: at any time the contributions and `residual` make the sum of all
    arrays. If the learning rate changes, compress the gradient times the rate: what is kept was
    meant for the rate of its step.

    Source: S. P. Karimireddy et al., Error Feedback Fixes SignSGD, ICML 2019, algorithm 2.

    Attributes:
        residual: what has been left out; None before the first call. Set it to None where a
            gradient that is not finite was skipped.
    """

    @edge
    def __init__(self, compressor: Compressor) -> None:
        self.compressor = _checked(compressor)
        self.residual: Array | None = None

    def reduce(self, comm: Communicator, x: Array) -> Steps:
        before = np.zeros_like(x) if self.residual is None else self.residual
        if before.shape != x.shape:
            raise ValueError(f"{x.shape} after arrays of {before.shape}: make one for each bucket")
        self.residual, x = before, x + before
        total, mine = yield from self.compressor.reduce(comm, x)
        left = x - mine.reshape(x.shape)
        # If another sum has ended since, both have sent what was left before.
        self.residual = left if self.residual is before else self.residual + left - before
        return total, mine


class Uncompressed(Compressor):
    """The array as it is: what the others are measured against."""

    def reduce(self, comm: Communicator, x: Array) -> Steps:
        return (yield comm.iall_reduce(x)), x


class Float16(Compressor):
    """Each value rounded to 16 bits, range 65504: 2 bytes. Sums beyond that become infinite.

    The collective rounds each partial sum, too; that error is not in any rank's residual.
    """

    dtype: Any = np.float16

    def reduce(self, comm: Communicator, x: Array) -> Steps:
        message = x.astype(self.dtype)
        total = yield comm.iall_reduce(message)
        return total.astype(x.dtype), message.astype(x.dtype)


class BFloat16(Float16):
    """As `Float16`, but with 8 bits of precision and the range of float32. Needs ml_dtypes."""

    def __init__(self) -> None:
        import ml_dtypes

        self.dtype = ml_dtypes.bfloat16


class TopK(Compressor):
    """The values that are largest, and where they stand: 4 bytes and a value for each.

    By all_gather, so the bytes grow with the ranks: it pays while `fraction` is less than 1/size.
    Without `ErrorFeedback` the small values are lost for ever.

    Source: A. F. Aji, K. Heafield, Sparse Communication for Distributed Gradient Descent, EMNLP
    2017; S. Stich et al., Sparsified SGD with Memory, NeurIPS 2018.

    Args:
        fraction: of the values that are sent, above 0, at most 1; one value at least.
    """

    @edge
    def __init__(self, fraction: float) -> None:
        if not isinstance(fraction, int | float):
            raise TypeError(f"fraction is {fraction!r}: not a number")
        if not 0 < fraction <= 1:
            raise ValueError(f"fraction is {fraction}: it is above 0, and at most 1")
        self.fraction = fraction

    def reduce(self, comm: Communicator, x: Array) -> Steps:
        x = x.reshape(-1)
        k = max(1, round(self.fraction * x.size))
        message = np.empty(k, [("place", np.uint32), ("value", x.dtype)])
        message["place"] = np.argpartition(np.abs(x), -k)[-k:]  # NaN counts as the largest
        message["value"] = x[message["place"]]
        total, mine = np.zeros_like(x), np.zeros_like(x)
        mine[message["place"]] = message["value"]
        for each in (yield comm.iall_gather(_named(message, x))).view(message.dtype):
            total[each["place"]] += each["value"]
        return total, mine


def _named(message: Array, x: Array) -> Array:
    """The same bytes, of a dtype that says of what: so ranks with another x get MismatchError."""
    return message.view([(f"of {x.dtype}{list(x.shape)}", message.dtype)])


class _Striped(Compressor):
    """Compressors whose messages cannot be added: each rank adds a stripe, and compresses that.

    Its rank counts the error of that as one of its own contribution, so that one `ErrorFeedback`
    makes up for both.

    Args:
        block: so many values at most have a scale of their own.
    """

    @edge
    def __init__(self, block: int = 256) -> None:
        self.block = check_at_least(1, block, "block")

    def compress(self, x: Array) -> Array:
        """Make an element of a structured array of each block, which is the last axis of x."""
        raise NotImplementedError

    def decompress(self, message: Array, length: int) -> Array:
        raise NotImplementedError

    def reduce(self, comm: Communicator, x: Array) -> Steps:
        blocks = -(-x.size // (comm.size * self.block))  # of a stripe
        length = -(-x.size // (comm.size * blocks))  # of a block; the last ones are filled up
        stripes = np.zeros((comm.size, blocks, length), x.dtype)
        stripes.reshape(-1)[: x.size] = x.reshape(-1)
        messages = self.compress(stripes)
        mine = self.decompress(messages, length)
        parts = (yield comm.iall_to_all(_named(messages, x))).view(messages.dtype)
        stripe = self.decompress(parts, length).sum(axis=0)
        total = self.decompress((yield comm.iall_gather(self.compress(stripe))), length)
        mine[comm.rank] += total[comm.rank] - stripe
        return total.reshape(-1)[: x.size], mine.reshape(-1)[: x.size]


class Int8(_Striped):
    """Each value as a number from -127 to 127 times its block's scale: 1 byte, and the scales."""

    def compress(self, x: Array) -> Array:
        message = np.empty(x.shape[:-1], [("scale", x.dtype), ("numbers", np.int8, x.shape[-1])])
        message["scale"] = np.abs(x).max(axis=-1) / 127
        scale = message["scale"][..., None]  # that of zeros is 0
        ratios = np.divide(x, scale, out=np.zeros_like(x), where=scale != 0)
        message["numbers"] = np.clip(np.rint(ratios), -127, 127)
        return message

    def decompress(self, message: Array, length: int) -> Array:
        values: Array = message["scale"][..., None] * message["numbers"]
        return values


class OneBit(_Striped):
    """Each value's sign; for each block the mean of those that are negative, and of the others.

    Source: F. Seide et al., 1-Bit Stochastic Gradient Descent, Interspeech 2014. Only of use with
    `ErrorFeedback`, which that paper introduced.
    """

    def compress(self, x: Array) -> Array:
        positive = x >= 0
        signs = np.packbits(positive, axis=-1)
        fields = [("means", x.dtype, 2), ("signs", np.uint8, signs.shape[-1])]
        message = np.empty(x.shape[:-1], fields)
        message["signs"] = signs
        for i, chosen in enumerate((~positive, positive)):
            total, count = np.where(chosen, x, 0).sum(axis=-1), chosen.sum(axis=-1)
            message["means"][..., i] = total / np.maximum(count, 1)
        return message

    def decompress(self, message: Array, length: int) -> Array:
        signs = np.unpackbits(message["signs"], axis=-1, count=length)
        return np.take_along_axis(message["means"], signs, axis=-1)


class PowerSGD(Compressor):
    """A matrix as the product of two thin ones, by a step of the power method: for one matrix.

    The sum of the ranks' matrices, m x n, is projected on `rank` directions: r (m + n) values
    travel. It is exact if that sum has no higher rank. The next step starts with the directions of
    this one. Further axes count as columns; vectors travel uncompressed. Use it with
    `ErrorFeedback`, and for each layer's matrix: a bucket of several says little as one.

    Source: T. Vogels, S. P. Karimireddy, M. Jaggi, PowerSGD, NeurIPS 2019, algorithm 1.

    Args:
        rank: of the product, 1 or more.
        seed: of the first directions; the same on all ranks.
    """

    @edge
    def __init__(self, rank: int = 2, seed: int = 0) -> None:
        self.rank, self._step = check_at_least(1, rank, "rank"), 0
        self._seed = check_at_least(0, seed, "seed")
        self._right = np.empty((0, 0))

    def reduce(self, comm: Communicator, x: Array) -> Steps:
        if x.ndim < 2:
            return (yield from Uncompressed().reduce(comm, x))
        matrix = x.reshape(len(x), -1)
        left = _orthonormal((yield comm.iall_reduce(matrix @ self._directions(matrix))))
        my_right = matrix.T @ left
        self._right = right = yield comm.iall_reduce(my_right)
        self._step += 1
        return _product(left, right), _product(left, my_right)

    def _directions(self, matrix: Array) -> Array:
        """Those of the last step. New ones for those that vanished, or they would stay zero."""
        random = np.random.default_rng((self._seed, self._step))
        new = random.standard_normal((matrix.shape[1], min(self.rank, *matrix.shape)))
        old = self._right if self._right.shape == new.shape else np.zeros_like(new)
        good = np.isfinite(old).all(axis=0) & old.any(axis=0)
        return np.where(good, old, new).astype(matrix.dtype)


def _orthonormal(matrix: Array) -> Array:
    """The columns made orthonormal (Gram-Schmidt), those that are zero left as they are.

    In elementwise operations and sums only, so with the same bits on every processor. Three times:
    a column that depends on those before leaves noise at first, which becomes a direction.
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
    return sum(map(np.multiply.outer, left.T, right.T), np.zeros((), left.dtype))


def _checked(compressor: Any) -> Compressor:
    if not isinstance(compressor, Compressor):
        raise TypeError(f"compressor is {compressor!r}: pass one, such as TopK(0.01)")
    return compressor


def _as_numpy(x: Any) -> Array:
    """See an array or a tensor as NumPy's, without a copy."""
    dtype, device = str(getattr(x, "dtype", type(x))), str(getattr(x, "device", "cpu"))
    if dtype == "torch.bfloat16" and device == "cpu":
        import ml_dtypes

        x = x.detach().view(sys.modules["torch"].int16).numpy().view(ml_dtypes.bfloat16)
    elif dtype.startswith("torch.") and device == "cpu":
        x = x.detach().numpy()
    is_plain = type(x) in (np.ndarray, np.memmap)  # no masks, no units
    if not (is_plain and x.dtype.name in ("float16", "bfloat16", "float32", "float64")):
        raise TypeError(
            "all_reduce with compression takes NumPy arrays and PyTorch tensors in host memory,"
            f" float16, bfloat16, float32 or float64, not {dtype} on {device}"
        )
    return x  # type: ignore[no-any-return]
