"""Python objects -> bytes and back."""

from __future__ import annotations

import collections
import copyreg
import mmap
import pickle
import struct
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from script_jobs import Jobs, all_well

from pycoll._arrays import conversion, objects
from pycoll._transports import _core


def stored(obj: object) -> memoryview:
    return memoryview(bytearray(b"".join(objects.dump(obj))))


def sent(obj: object) -> Any:
    return objects.load(stored(obj))


def offset_in(buffer: memoryview, x: np.ndarray[Any, Any]) -> int:
    start: int = np.frombuffer(buffer, np.uint8).ctypes.data
    return int(x.ctypes.data) - start


class Marked:
    """An object with something in it that cannot be pickled."""

    def __init__(self, inside: object) -> None:
        self.inside = inside


class Refusing:
    """An object whose own pickling raises."""

    def __reduce__(self) -> Any:
        raise KeyError("mine")


leaves = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
)
trees = st.recursive(
    leaves, lambda x: st.lists(x) | st.dictionaries(st.text(), x) | st.tuples(x, x), max_leaves=20
)


@given(trees)
def test_plain_objects_round_trip(obj: object) -> None:
    assert sent(obj) == obj


def nested(depth: int) -> list[Any]:
    obj: list[Any] = []
    for _ in range(depth - 1):
        obj = [obj]
    return obj


def containing_itself() -> list[Any]:
    obj: list[Any] = []
    obj.append(obj)
    return obj


Pair = collections.namedtuple("Pair", "first second")


class Text(str):
    """Text that is more than text."""


PLAIN = [
    *(None, True, -1, 2**100, 1.5, "text", "\udc80", b"bytes", (), [], {}),
    {"step": 7, ("a", 1): [1.5, None, {"x": b"y"}], "loss": np.float32(0.5), "n": np.int64(3)},
    nested(16),
    ["x" * 1000] * 16,
]
NOT_PLAIN = [
    *(
        1j,
        {1},
        range(3),
        Pair(1, 2),
        Text("t"),
        collections.OrderedDict(a=1),
        np.datetime64(1, "s"),
    ),
    *({"a": [1, {"b": np.ones(2)}]}, {Text("key"): 1}, [Pair], nested(17), containing_itself()),
    *("x" * 20_000, b"x" * 20_000, ["x" * 1000] * 17, [0] * 1024),
]


@pytest.mark.parametrize("obj", PLAIN)
def test_small_plain_values_are_pickled_without_a_pickler_of_ours(obj: object) -> None:
    conversion.wrap(np.ones(1))  # by which the core knows NumPy
    assert _core.plain_object(obj) == with_header(pickle.dumps(obj, 5)).tobytes()
    assert sent(obj) == obj


@pytest.mark.parametrize("obj", NOT_PLAIN, ids=lambda obj: type(obj).__name__)
def test_other_values_are_not_taken_for_plain(obj: object) -> None:
    assert _core.plain_object(obj) is None
    assert repr(sent(obj)) == repr(obj)
    assert type(sent(obj)) is type(obj)


@pytest.mark.parametrize("char", "?bhilqBHILQefdFD")
def test_a_plain_array_inside_an_object_is_quick_to_load(char: str) -> None:
    """It does not name NumPy's function, whose Python code takes longer than all else."""
    x = np.ones((2, 3), char)
    stored_x = stored({"x": x})
    assert b"frombuffer" not in stored_x.tobytes()
    result = objects.load(stored_x)["x"]
    assert (result.dtype, result.tolist()) == (x.dtype, x.tolist())
    assert result.flags.writeable
    assert result.flags.aligned


@given(st.lists(st.integers(0, 200), max_size=8), st.integers(0, 300_000))
def test_arrays_come_back_writable_and_aligned(sizes: list[int], large: int) -> None:
    arrays = [np.arange(size, dtype=np.int16) for size in [*sizes, large]]
    buffer = stored({"arrays": arrays})
    result = objects.load(buffer)["arrays"]
    for x, y in zip(arrays, result, strict=True):
        assert np.array_equal(x, y)
        assert y.flags.writeable
        if y.size:
            assert offset_in(buffer, y) % 64 == 0
            assert 0 <= offset_in(buffer, y) < buffer.nbytes


def test_arrays_of_no_bytes_travel() -> None:
    result = sent([np.empty((0, 3)), b"", "", np.empty(0, np.int8), {}])
    assert result[0].shape == (0, 3)
    assert result[1:3] == [b"", ""]


@pytest.mark.parametrize(
    "x",
    [
        np.arange(12.0).reshape(3, 4)[::-1, ::2],
        np.broadcast_to(np.int32(3), (2, 3)),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array(5),
        np.frombuffer(bytes(range(8)), np.uint16),
        np.zeros(3, "M8[s]"),
        np.zeros(2, [("a", "f4"), ("b", "S3")]),
        np.array(["text", None], object),
    ],
    ids=["strided", "broadcast", "fortran", "0-d", "read-only", "dates", "structured", "objects"],
)
def test_any_array_inside_an_object_comes_back_writable(x: np.ndarray[Any, Any]) -> None:
    result = sent({"x": x})["x"]
    assert np.array_equal(result, x)
    assert (result.dtype, result.shape) == (x.dtype, x.shape)
    assert result.flags.writeable


def test_one_array_in_two_places_stays_one_array() -> None:
    for x in (np.arange(3), np.broadcast_to(np.int8(1), (3,))):
        first, second = sent((x, x))
        assert first is second


def test_a_large_array_is_sent_from_where_it_lies() -> None:
    x = np.zeros(100_000)
    parts = objects.dump({"x": x, "y": x[:50_000]})
    large = [part for part in parts if part.nbytes in (800_000, 400_000)]
    assert [np.shares_memory(np.frombuffer(part), x) for part in large] == [True, True]


def test_many_small_arrays_are_few_parts() -> None:
    arrays = [np.arange(size % 50) for size in range(2000)]
    parts = objects.dump(arrays)
    assert len(parts) <= 2
    assert all(np.array_equal(x, y) for x, y in zip(arrays, sent(arrays), strict=True))


def test_a_few_hundred_kilobytes_of_everything_round_trip() -> None:
    obj = {
        "bytes": bytes(range(256)) * 1000,
        "bytearray": bytearray(300_000),
        "text": "é" * 100_000,
        "arrays": [np.arange(50_000), np.ones((3, 40_000), np.float32)],
        "list": list(range(30_000)),
    }
    result = sent(obj)
    assert result.keys() == obj.keys()
    for key in ("bytes", "bytearray", "text", "list"):
        assert result[key] == obj[key]
    for x, y in zip(obj["arrays"], result["arrays"], strict=True):
        assert np.array_equal(x, y)  # type: ignore[arg-type]


def test_the_loaded_arrays_are_views_of_the_buffer() -> None:
    buffer = stored([np.zeros(1000, np.uint8)])
    (x,) = objects.load(buffer)
    x[:] = 7
    assert bytes(buffer).count(7) >= 1000


def test_a_read_only_array_that_views_another_does_not_change_the_other() -> None:
    x = np.arange(5)
    view = x.view()
    view.flags.writeable = False
    assert sent([view])[0].flags.writeable
    assert not view.flags.writeable


@pytest.mark.parametrize("dtype", ["f8", "M8[s]"])
def test_an_array_that_warns_when_it_is_written_to_arrives_writable(dtype: str) -> None:
    x = np.broadcast_arrays(np.arange(3).astype(dtype), np.zeros((1, 1)))[0]
    (got,) = sent([x])
    assert got.flags.writeable
    assert (got == x).all()


@pytest.mark.parametrize("writeable", [True, False])
def test_a_reducer_of_the_program_is_used(writeable: bool) -> None:
    x = np.arange(3)
    x.flags.writeable = writeable
    copyreg.pickle(np.ndarray, lambda array: (list, (array.tolist(),)))
    try:
        assert sent([x]) == [[0, 1, 2]]
    finally:
        del copyreg.dispatch_table[np.ndarray]


def sparse(nbytes: int) -> mmap.mmap:
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)  # named since Python 3.13
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | no_reserve)


def test_an_array_beyond_32_bits_is_one_part_and_comes_back() -> None:
    nbytes = 2**32 + 64
    with sparse(nbytes) as pages, sparse(nbytes + 4096) as room:
        x = np.frombuffer(pages, np.uint8)
        head, middle, end = objects.dump([x, np.arange(3)])
        assert middle.nbytes == nbytes
        room[: head.nbytes] = head
        last = head.nbytes + nbytes
        room[last : last + end.nbytes] = end
        del x, middle
        x, y = objects.load(memoryview(room)[: last + end.nbytes])
        assert (x.nbytes, y.tolist()) == (nbytes, [0, 1, 2])
        del x, y


def with_header(pickled: bytes, *lengths: int) -> memoryview:
    """An object's bytes with a header that says so; without its buffers."""
    header = struct.pack(f"<{2 + len(lengths)}Q", len(lengths), len(pickled), *lengths)
    return memoryview(bytearray(header + pickled))


@pytest.mark.parametrize("length", [1, 2**32, 2**63, 2**64 - 64, 2**64 - 1])
def test_a_buffer_that_is_longer_than_what_came_is_a_value_error(length: int) -> None:
    with pytest.raises(ValueError, match="longer"):
        objects.load(with_header(pickle.dumps(1), length))
    with pytest.raises(ValueError, match="longer"):
        objects.load(with_header(pickle.dumps(1), 0, length))
    with pytest.raises(ValueError, match="longer"):
        objects.load(memoryview(bytearray(struct.pack("<QQ", 0, length))))


@pytest.mark.parametrize(
    ("obj", "text"),
    [
        ((i for i in ""), r"type generator cannot be sent"),
        (Marked(threading.Lock()), r"Marked cannot be sent: .*lock"),
        ({"key": open}, None),
        ({"key": (i for i in "")}, r"type dict cannot be sent: .*generator"),
    ],
)
def test_what_cannot_be_pickled_is_a_type_error_naming_the_type(obj: Any, text: str | None) -> None:
    if text is None:
        assert sent(obj) == obj
        return
    with pytest.raises(TypeError, match=text + r".*\. Send "):
        objects.dump(obj)


def test_an_error_of_the_users_own_pickling_passes_unchanged() -> None:
    with pytest.raises(KeyError, match="mine"):
        objects.dump(Refusing())


def test_a_value_nested_too_deeply_is_a_value_error() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    try:
        with pytest.raises(ValueError, match="nested too deeply"):
            objects.dump(deep)
    finally:
        while deep:  # taking it apart at once would recurse as deeply
            deep = deep.pop()


def test_every_truncation_is_a_value_error() -> None:
    whole = stored({"a": np.arange(20), "b": "text"})
    for end in range(whole.nbytes):
        with pytest.raises(ValueError, match=r"bytes|object"):
            objects.load(whole[:end])


def test_too_many_bytes_are_a_value_error() -> None:
    with pytest.raises(ValueError, match="bytes"):
        objects.load(memoryview(bytearray(bytes(stored(1)) + b"\0")))


def test_other_buffers_than_the_pickle_needs_are_a_value_error() -> None:
    pickled = pickle.dumps(np.arange(3), protocol=5, buffer_callback=lambda buffer: None)
    with pytest.raises(ValueError, match="damaged"):
        objects.load(with_header(pickled))
    plain = pickle.dumps(1)
    surplus = with_header(plain, 0).tobytes()
    surplus += bytes(-len(surplus) % 64)
    with pytest.raises(ValueError, match="more buffers"):
        objects.load(memoryview(bytearray(surplus)))


@pytest.mark.parametrize("count", [1, 2**32, 2**64 - 1])
def test_a_count_that_cannot_be_is_a_value_error(count: int) -> None:
    with pytest.raises(ValueError, match="cannot be in"):
        objects.load(memoryview(bytearray(struct.pack("<QQ", count, 0))))


def test_a_class_that_is_missing_here_is_named_with_advice() -> None:
    pickled = b"cno_such_module_here\nname\n."
    with pytest.raises(ImportError, match="no_such_module_here") as info:
        objects.load(with_header(pickled))
    assert "every rank can import" in info.value.__notes__[0]


def test_tensors_inside_objects_round_trip() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    state = {"weight": torch.arange(6.0).reshape(2, 3).t(), "bias": torch.ones(2).bfloat16()}
    result = sent(state)
    assert all(torch.equal(result[key], state[key]) for key in state)


class Drained:
    """What pickling empties."""

    def __init__(self, items: list[int]) -> None:
        self.items = items

    def __reduce__(self) -> tuple[Any, ...]:
        items, self.items = self.items, []
        return Drained, (items,)


def test_what_pickling_changes_is_pickled_once() -> None:
    read_only = np.ones(3)
    read_only.flags.writeable = False
    drained, _ = sent([Drained([1, 2, 3]), read_only])
    assert drained.items == [1, 2, 3]


@pytest.mark.parametrize("dtype", [">i4", ">f8", "<i4"])
def test_a_strided_array_keeps_its_byte_order(dtype: str) -> None:
    array = np.arange(8, dtype=dtype)[::2]
    got = sent({"array": array})["array"]
    assert got.dtype == array.dtype
    assert (got == array).all()


def test_programs_without_arrays_import_no_numpy(job: Jobs) -> None:
    """It takes a rank longer to import than all else that it does to join."""
    text = """
others = [peer for peer in range(size) if peer != rank]
for _ in comm, comm.dup(), comm.split(0):
    requests = [comm.isend({"from": rank}, peer) for peer in others]
    assert [comm.recv(peer)["from"] for peer in others] == others
    pycoll.wait_all(requests)
    assert comm.broadcast(("x", 1) if rank == 1 else None, root=1) == ("x", 1)
    assert comm.scatter([str(peer) for peer in range(size)] if rank == 0 else None) == str(rank)
    assert comm.all_gather({rank}) == [{peer} for peer in range(size)]
    assert comm.gather(rank) == (list(range(size)) if rank == 0 else None)
    assert comm.all_to_all([(rank, peer) for peer in range(size)])[0] == (0, rank)
    assert comm.sendrecv(rank, (rank + 1) % size, (rank - 1) % size) == (rank - 1) % size
    comm.barrier()
    comm.ibarrier().wait()
for group in comm, comm.split_by_host(), comm.sub([rank]):  # the second has shared memory
    n, place = group.size, group.rank
    for one, op in (1, "sum"), (1.0, "sum"), (1 + 0j, "sum"), (True, "land"):
        total = n * one if op == "sum" else True
        named = group.all_reduce(one, op, algorithm="hierarchical")
        for result in named, group.all_reduce(one, op), group.iall_reduce(one, op).wait():
            assert (result, type(result)) == (total, type(total))
        assert group.reduce(one, op, n - 1) == (total if place == n - 1 else None)
        assert group.scan(one, op) == (place + 1 if op == "sum" else True)
        assert group.exscan(one, op) == (None if place == 0 else place if op == "sum" else True)
    assert group.all_reduce(3, "prod") == 3**n and group.all_reduce(3.0, "avg") == 3.0
error_like(pycoll.OperationTimeout, "recv", comm.recv, others[0], timeout=0.01)
assert not {"numpy", "dataclasses", "inspect", "statistics", "random"} & {*sys.modules}
ok()
"""
    # One pair shares memory, the others have TCP.
    all_well(job(3, text, "--emulate-hosts", "2"), 3)
