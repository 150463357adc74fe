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


def test_what_is_packed_is_unpacked() -> None:
    random = np.random.default_rng(1)
    arrays = [random.random(shape) for shape in ((3, 5), (), (0, 2), (7,))]
    buckets, got = Buckets(arrays, nbytes=100), [np.empty_like(array) for array in arrays]
    buckets.pack([arrays[0], *buckets.views[1:3], arrays[3]])
    buckets.views[1][...] = arrays[1]
    buckets.unpack(got)
    for array, back in zip(arrays, got, strict=True):
        np.testing.assert_array_equal(back, array, strict=True)


def test_what_does_not_fit_is_refused_before_anything_is_copied() -> None:
    buckets = Buckets(of_shapes((2,), (3,)))
    with pytest.raises(ValueError, match=r"array 1 has the shape \(1,\), that of the bucket \(3,"):
        buckets.pack([np.ones(2), np.ones(1)])
    with pytest.raises(ValueError, match="1 arrays for buckets of 2"):
        buckets.unpack([np.ones(2)])
    assert not buckets.flats[0].any()
    with pytest.raises(ValueError, match="at least 0"):
        Buckets([], nbytes=-1)
    with pytest.raises(TypeError, match="not tuple"):
        Buckets([(2, 3)])


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
