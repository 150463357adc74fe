"""Buckets: flat arrays, and views of them for many arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pycoll.parallel import Buckets


def of_shapes(*shapes: tuple[int, ...], dtype: str = "f8") -> list[Any]:
    return [np.zeros(shape, dtype) for shape in shapes]


def test_a_bucket_has_arrays_up_to_its_limit_and_one_at_least() -> None:
    buckets = Buckets(of_shapes((2, 2), (3,), (1,), (100,), (), (0,)), nbytes=64)
    assert buckets.bucket_of == [0, 0, 0, 1, 2, 2]
    assert [len(flat) for flat in buckets.flats] == [8, 100, 1]
    assert Buckets(of_shapes((2,), (3,)), nbytes=0).bucket_of == [0, 1]
    assert Buckets([]).flats == []


def test_another_dtype_begins_another_bucket() -> None:
    arrays = [*of_shapes((2,)), *of_shapes((2,), dtype="f4"), *of_shapes((2,))]
    assert [flat.dtype for flat in Buckets(arrays).flats] == ["f8", "f4", "f8"]


def test_views_lie_in_their_bucket_in_order_and_without_gaps() -> None:
    buckets = Buckets(of_shapes((2, 3), (), (4,)))
    (flat,) = buckets.flats
    for number, view in enumerate(buckets.views, 1):
        view[...] = number
    assert flat.tolist() == [1] * 6 + [2] + [3] * 4
    assert [view.shape for view in buckets.views] == [(2, 3), (), (4,)]


def test_what_does_not_fit_is_refused_at_the_callers_line() -> None:
    wrong: list[tuple[type[Exception], str, Any, Any]] = [
        (ValueError, "cannot be below 0", [], -1),
        (TypeError, "nbytes is a number of bytes, not a str", [], "25M"),
        (TypeError, "not a tuple", [(2, 3)], 0),
        (TypeError, "not a list", [np.zeros(3), [1.0]], 0),
        (TypeError, "several arrays, not None", None, 0),
    ]
    for error, words, arrays, nbytes in wrong:
        with pytest.raises(error, match=words) as raised:
            Buckets(arrays, nbytes)
        assert not [entry.path for entry in raised.traceback if "pycoll/" in str(entry.path)]


def test_every_dtype_has_its_views_also_of_16_bits() -> None:
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    for dtype in ("f2", bfloat16, "f4", "i8", "c16"):
        buckets = Buckets([np.zeros((3, 2), dtype)[:, ::2], np.zeros(5, dtype)])
        buckets.views[0][...] = 2
        assert (buckets.flats[0].dtype, len(buckets.flats)) == (np.dtype(dtype), 1)
        assert buckets.flats[0].tolist() == [2] * 3 + [0] * 5


@pytest.mark.parallel
def test_gradients_of_tensors_can_be_written_into_the_buckets() -> None:
    torch = pytest.importorskip("torch")
    layer = torch.nn.Linear(3, 2)
    buckets = Buckets(layer.parameters())
    for parameter, view in zip(layer.parameters(), buckets.views, strict=True):
        parameter.grad = view
    layer(torch.ones(5, 3)).sum().backward()
    assert buckets.flats[0].tolist() == [5.0] * 8
    wide = Buckets([torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2)])
    assert [flat.dtype for flat in wide.flats] == [torch.bfloat16, torch.float32]
