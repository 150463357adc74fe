"""Compressed all_reduce against one process that does the same arithmetic, value by value."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compressor_cases import KINDS
from tiers import sizes

import pycoll
from pycoll.parallel import compression as c

Array = Any
Comm = Any

SHAPES = ((), (0,), (1,), (5,), (4, 3), (1000,), (3, 7, 11))


def drawn(seed: int, rank: int, shape: tuple[int, ...], dtype: str = "f8") -> Array:
    """A gradient of one rank, of which some values are zero, and some blocks are."""
    random = np.random.default_rng((seed, rank))
    x = random.standard_normal(shape) * 10.0 ** random.integers(-3, 3)
    x = np.where(random.random(shape) < 0.2, 0.0, x)
    return x.astype(dtype) if random.random() < 0.9 else np.zeros(shape, dtype)


def shapes(seed: int) -> list[tuple[int, ...]]:
    """Those above, and some at random."""
    random = np.random.default_rng(seed)
    drawn_shapes = [tuple(random.integers(0, 30, random.integers(1, 4))) for _ in range(4)]
    return [*SHAPES, *(tuple(map(int, shape)) for shape in drawn_shapes)]


# ------------------------------------------------------------------ one process, value by value


def int8(values: Array, block: int) -> Array:
    """What is left of them in 8 bits."""
    left = np.zeros_like(values)
    for start in range(0, len(values), block):
        part = values[start : start + block]
        scale = max((abs(v) for v in part), default=0.0) / values.dtype.type(127)
        for i, v in enumerate(part):
            left[start + i] = scale * min(127.0, max(-127.0, np.rint(v / scale))) if scale else 0.0
    return left


def one_bit(values: Array, block: int) -> Array:
    """What is left of them in their signs and two means a block."""
    left = np.zeros_like(values)
    for start in range(0, len(values), block):
        part = values[start : start + block]
        for chosen in (part >= 0, part < 0):
            if chosen.any():
                left[start : start + block][chosen] = part[chosen].mean()
    return left


def striped(code: Callable[[Array, int], Array], xs: list[Array], most: int) -> Array:
    """Blocks of at most so many values, equally many for each rank, and equally long."""
    size = len(xs)
    blocks = math.ceil(xs[0].size / (size * most))
    block = math.ceil(xs[0].size / (size * (blocks or 1)))
    total = np.zeros(size * blocks * block, xs[0].dtype)
    for start in range(0, len(total), block or 1):
        summed = np.zeros(block, xs[0].dtype)
        for x in xs:
            padded = np.zeros(len(total), x.dtype)
            padded[: x.size] = x.ravel()
            summed += code(padded[start : start + block], block)
        total[start : start + block] = code(summed, block)
    return total[: xs[0].size].reshape(xs[0].shape)


def top_k(xs: list[Array], fraction: float) -> Array:
    total = np.zeros(xs[0].size, xs[0].dtype)
    for x in xs:
        flat = x.ravel()
        k = min(flat.size, max(1, round(fraction * flat.size)))
        for i in sorted(range(flat.size), key=lambda i: -abs(flat[i]))[:k]:
            total[i] += flat[i]
    return total.reshape(xs[0].shape)


def expected(kind: str, xs: list[Array]) -> Array:
    if kind == "topk":
        return top_k(xs, 0.1)
    if kind in ("int8", "onebit"):
        return striped(int8 if kind == "int8" else one_bit, xs, 16)
    return sum(xs, np.zeros_like(xs[0]))


# ----------------------------------------------------------------------------------- the tests


def reduced(comm: Comm, kind: str, seed: int) -> list[Array]:
    results = []
    for shape in shapes(seed):
        for dtype in ("f4", "f8"):
            x = drawn(seed, comm.rank, shape, dtype)
            before = x.copy()
            results.append(c.all_reduce(comm, x, KINDS[kind]()))
            np.testing.assert_array_equal(x, before, strict=True)
    return results


@sizes(3, more=(1, 2, 4, 5))
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "powersgd"])
def test_the_sum_is_that_of_one_process_and_has_the_same_bits_on_every_rank(
    ranks: Any, kind: str
) -> None:
    if kind == "bfloat16":
        pytest.importorskip("ml_dtypes")
    for seed in range(3):
        results = ranks(reduced, kind, seed)
        for others in results[1:]:
            assert [r.tobytes() for r in others] == [r.tobytes() for r in results[0]]
        cases = [(shape, dtype) for shape in shapes(seed) for dtype in ("f4", "f8")]
        for (shape, dtype), got in zip(cases, results[0], strict=True):
            xs = [drawn(seed, rank, shape, dtype) for rank in range(ranks.size)]
            eps = {"float16": 2**-11, "bfloat16": 2**-8}.get(kind, np.finfo(dtype).eps)
            bound = 4 * ranks.size * eps * max(1e-3, sum(np.abs(x).max(initial=0.0) for x in xs))
            want = expected(kind, xs)
            assert (got.dtype, got.shape) == (want.dtype, want.shape)
            np.testing.assert_allclose(got, want, rtol=0, atol=bound)


def total_and_mine(comm: Comm, compressor: c.Compressor, x: Array) -> tuple[Array, Array]:
    """What `CompressedRequest` does, with the contribution of this rank."""
    steps, result = compressor.reduce(comm, np.atleast_1d(x)), None
    try:
        while True:
            result = steps.send(result).wait()
    except StopIteration as end:
        total, mine = end.value
        return total.reshape(x.shape), mine.reshape(x.shape)


def fed_back(comm: Comm, kind: str, steps: int) -> list[tuple[float, float, float]]:
    """For several shapes: how far contributions and residual are from what was given, and sums."""
    found = []
    for shape in SHAPES:
        if 0 in shape:
            continue
        feedback = c.ErrorFeedback(KINDS[kind]())
        given, totals, mine = (np.zeros(shape) for _ in range(3))
        for step in range(steps):
            x = drawn(step, comm.rank, shape)
            total, my_share = total_and_mine(comm, feedback, x)
            given, totals, mine = given + x, totals + total, mine + my_share
        residual = feedback.residual
        assert residual is not None
        size = comm.all_reduce(np.abs(given).max(initial=1.0), "max")
        alone = np.abs(mine + residual.reshape(shape) - given).max()
        together = np.abs(
            totals + comm.all_reduce(residual.reshape(shape)) - comm.all_reduce(given)
        )
        kept = np.abs(residual).max()
        found.append((alone / size, together.max() / size, kept / size))
    return found


@sizes(3, more=(1, 2, 5))
def test_with_error_feedback_nothing_is_lost(ranks: Any) -> None:
    """What was sent and what is kept make the sum of all gradients, on each rank and over all."""
    for kind in KINDS:
        if kind == "bfloat16":
            pytest.importorskip("ml_dtypes")
        for found in ranks(fed_back, kind, 6):
            for alone, together, kept in found:
                assert alone < 1e-12
                # A collective of 16-bit values rounds its partial sums, too.
                assert together < (0.05 if "float16" in kind else 1e-12)
                assert kept < 20
            assert (max(kept for _, _, kept in found) > 0) == (kind != "uncompressed")


def low_rank(comm: Comm, seed: int) -> list[tuple[Array, Array]]:
    """PowerSGD of matrices whose sum over the ranks has rank 0, 1, 2, 1 again and 3."""
    found = []
    for rows, columns in ((6, 9), (9, 6), (1, 5), (5, 1), (2, 2)):
        compressor = c.PowerSGD(3, seed)
        for step, rank in enumerate((0, 1, 2, 1, 3)):
            common = np.random.default_rng((seed, step))
            left, right = common.random((rows, rank)), common.random((rank, columns))
            noise = common.random((comm.size, rows, columns))
            noise -= noise.mean(axis=0)
            matrix = left @ right + noise[comm.rank]
            want = comm.size * (left @ right)
            found.append((c.all_reduce(comm, matrix, compressor), want))
    return found


@sizes(3, more=(1, 2, 4))
def test_powersgd_is_exact_where_the_sum_has_no_higher_rank(ranks: Any) -> None:
    for seed in range(5):
        results = ranks(low_rank, seed)
        for others in results[1:]:
            assert [r.tobytes() for r, _ in others] == [r.tobytes() for r, _ in results[0]]
        for got, want in results[0]:
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-9)


def power_steps(comm: Comm, shape: tuple[int, int], dtype: str) -> list[Array]:
    compressor = c.PowerSGD(2, seed=7)
    return [
        c.all_reduce(comm, drawn(step, comm.rank, shape, dtype), compressor) for step in range(4)
    ]


@sizes(3, more=(1, 2, 5))
def test_powersgd_makes_the_steps_of_its_paper(ranks: Any) -> None:
    """A projection on the image of the last step's directions; by QR here."""
    for dtype, near in (("f8", 1e-9), ("f4", 2e-4)):
        for shape in ((7, 12), (12, 7)):
            *_, got = results = ranks(power_steps, shape, dtype)
            assert all([a.tobytes() for a in r] == [a.tobytes() for a in got] for r in results)
            right = np.random.default_rng((7, 0)).standard_normal((shape[1], 2)).astype(dtype)
            for step in range(4):
                total = sum(drawn(step, rank, shape, dtype) for rank in range(ranks.size))
                if not np.any(total):
                    break  # from here on the directions are others
                left = np.linalg.qr(total @ right)[0]
                right = total.T @ left
                want = left @ right.T
                np.testing.assert_allclose(got[step], want, atol=near * np.abs(total).max())


def whole_numbers(comm: Comm) -> list[Array]:
    x = np.random.default_rng(comm.rank).integers(-99, 99, (5, 40)).astype("f4")
    many = c.TopK(1.0)
    return [c.all_reduce(comm, x, many), comm.all_reduce(x)]


@sizes(3)
def test_top_k_of_everything_is_all_reduce(ranks: Any) -> None:
    for got, want in ranks(whole_numbers):
        np.testing.assert_array_equal(got, want, strict=True)


def not_finite(comm: Comm, kind: str, value: float) -> Array:
    x = np.ones((8, 8))
    if comm.rank == 1:
        x[3, 3] = value
    compressor = KINDS[kind]()
    first = c.all_reduce(comm, x, compressor)
    return first, c.all_reduce(comm, np.ones((8, 8)), compressor)


@sizes(3)
def test_what_is_not_finite_on_one_rank_is_seen_on_all_and_forgotten_after(ranks: Any) -> None:
    for kind in ("float16", "topk", "int8", "onebit", "powersgd"):
        for value in (np.nan, np.inf):
            for first, after in ranks(not_finite, kind, value):
                assert not np.isfinite(first).all()
                assert np.isfinite(after).all()


def extremes(comm: Comm) -> None:
    smallest, largest = np.finfo("f8").smallest_subnormal, np.finfo("f8").max / (4 * comm.size)
    for value in (smallest, 190 * smallest, largest):
        x = np.array([value, -value, value / 3, 0.0] * 5)
        for kind in ("topk", "int8", "onebit", "uncompressed"):
            feedback = c.ErrorFeedback(KINDS[kind]())
            _, mine = total_and_mine(comm, feedback, x)
            assert np.abs(mine + feedback.residual - x).max() <= 4e-16 * value
            if kind == "int8":  # a subnormal scale is rounded to less than a 127th of the largest
                assert np.abs(feedback.residual).max() <= value
    x = np.full((4, 4), 1e-200)
    np.testing.assert_allclose(c.all_reduce(comm, x, c.PowerSGD(2)), comm.size * x, rtol=1e-12)


@sizes(3)
def test_the_smallest_and_the_largest_values_are_compressed_as_others(ranks: Any) -> None:
    ranks(extremes)


def in_place_and_wrong(comm: Comm) -> None:
    x = np.full((6, 4), comm.rank + 1.0)[:, ::2]  # not contiguous
    want = np.full((6, 2), comm.size * (comm.size + 1) / 2)
    assert c.all_reduce(comm, x, c.Int8(), out=x) is x
    np.testing.assert_allclose(x, want)
    read_only = np.zeros(3)
    read_only.flags.writeable = False
    feedback = c.ErrorFeedback(c.OneBit())
    c.all_reduce(comm, np.ones(4), feedback)
    ones = np.ones(3)
    wrong: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (ValueError, "out is float64", lambda: c.all_reduce(comm, ones, c.Int8(), np.zeros(4))),
        (ValueError, "read-only", lambda: c.all_reduce(comm, ones, c.Int8(), read_only)),
        (TypeError, "not .*list.* on cpu", lambda: c.all_reduce(comm, ones, c.Int8(), [1.0])),
        (ValueError, "make one for each bucket", lambda: c.all_reduce(comm, ones, feedback)),
        (TypeError, "not int64 on cpu", lambda: c.all_reduce(comm, np.arange(3), c.Int8())),
        (TypeError, "not .*list.* on cpu", lambda: c.iall_reduce(comm, [1.0], c.Int8())),
        (TypeError, "in host memory", lambda: c.all_reduce(comm, np.ma.ones(3), c.Int8())),
        (TypeError, "comm is a communicator", lambda: c.iall_reduce(None, ones, c.Int8())),
        (TypeError, r"such as TopK\(0.01\)", lambda: c.all_reduce(comm, ones, c.Int8)),
        (TypeError, r"such as TopK\(0.01\)", lambda: c.ErrorFeedback(None)),
        (TypeError, "missing 1 required", lambda: c.all_reduce(comm, ones)),
        (TypeError, "not a number", lambda: c.TopK("1 %")),
        (ValueError, "above 0", lambda: c.TopK(0.0)),
        (ValueError, "rank is 0: at least 1", lambda: c.PowerSGD(0)),
        (ValueError, "seed is -1: at least 0", lambda: c.PowerSGD(seed=-1)),
        (ValueError, "block is 0: at least 1", lambda: c.OneBit(block=0)),
        (TypeError, "block is an int", lambda: c.Int8(block=1.5)),
    ]
    for error, words, call in wrong:
        with pytest.raises(error, match=words) as raised:
            call()
        assert not any("pycoll/" in str(entry.path) for entry in raised.traceback[2:])
    assert comm.all_reduce(1) == comm.size


@sizes(3)
def test_wrong_arguments_are_refused_at_the_callers_line_before_anything_is_sent(
    ranks: Any,
) -> None:
    ranks(in_place_and_wrong)


def halves(comm: Comm, dtype: Any, kinds: list[str]) -> None:
    for shape in ((), (0,), (300,), (12, 10)):
        for kind in kinds:
            x = drawn(1, comm.rank, shape, "f4").astype(dtype)
            want = c.all_reduce(comm, x.astype("f4"), KINDS[kind]()).astype(dtype)
            got = c.all_reduce(comm, x, KINDS[kind]())
            np.testing.assert_array_equal(got, want, strict=True)
            assert c.all_reduce(comm, x, KINDS[kind](), out=x) is x
            np.testing.assert_array_equal(x, want, strict=True)


@sizes(3)
def test_16_bits_are_compressed_as_32_and_the_sum_is_rounded(ranks: Any) -> None:
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    for dtype in (np.float16, bfloat16):
        ranks(halves, dtype, list(KINDS))


def lose_one(comm: Comm, folder: Path) -> None:
    feedback = c.ErrorFeedback(c.TopK(0.25))
    for step in range(1000):
        if step == 3 and comm.rank == 1:
            for rank in (0, 2):
                comm.recv(rank)
            os.kill(os.getpid(), signal.SIGKILL)
        elif step == 3:
            comm.send("has done step 2", 1)
        kept = feedback.residual
        try:
            c.all_reduce(comm, drawn(step, comm.rank, (64,)), feedback)
        except pycoll.PeerFailed as exc:
            same = feedback.residual is kept
            (folder / str(comm.rank)).write_text(f"rank {exc.rank} in step {step}, kept: {same}")
            raise


@pytest.mark.parallel
def test_a_rank_that_is_killed_ends_the_others_and_leaves_their_residuals(tmp_path: Path) -> None:
    with pytest.raises(pycoll.PeerFailed, match="rank 1"):
        pycoll.run(lose_one, 3, tmp_path, timeout=60)
    for rank in (0, 2):
        assert (tmp_path / str(rank)).read_text() == "rank 1 in step 3, kept: True"


def of_tensors(comm: Comm, kind: str) -> None:
    import torch

    for dtype in ("f4", "f8"):
        x = drawn(3, comm.rank, (12, 10), dtype)
        want = c.all_reduce(comm, x, KINDS[kind]())
        tensor = torch.from_numpy(x.copy()).requires_grad_()
        got = c.all_reduce(comm, tensor, KINDS[kind]())
        assert isinstance(got, torch.Tensor)
        np.testing.assert_array_equal(got.numpy(), want, strict=True)
        with torch.no_grad():
            assert c.all_reduce(comm, tensor, KINDS[kind](), out=tensor) is tensor
        np.testing.assert_array_equal(tensor.detach().numpy(), want, strict=True)
    for dtype in (torch.float16, torch.bfloat16):
        tensor = torch.from_numpy(drawn(3, comm.rank, (12, 10), "f4")).to(dtype)[:, ::2]
        want = c.all_reduce(comm, tensor.float(), KINDS[kind]()).to(dtype)
        assert torch.equal(c.all_reduce(comm, tensor, KINDS[kind]()), want)
        assert c.all_reduce(comm, tensor, KINDS[kind](), out=tensor) is tensor
        assert torch.equal(tensor, want)
    with pytest.raises(TypeError, match=r"not torch\.int8 on cpu"):
        c.all_reduce(comm, torch.zeros(3, dtype=torch.int8), c.Int8())


@pytest.mark.parallel
@sizes(3)
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_are_summed_as_arrays_are(ranks: Any, kind: str) -> None:
    pytest.importorskip("torch")
    ranks(of_tensors, kind)
