"""Subclasses of NumPy's array: plain numbers, or numbers that mean more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from array_cases import Methodical, Metres, Slotted, wrapped

import pycoll
from pycoll._arrays import conversion, objects


def test_numpys_own_subclasses_are_plain_numbers(tmp_path: Path) -> None:
    mapped: Any = np.memmap(tmp_path / "numbers", float, "w+", shape=(2, 2))
    with pytest.warns(PendingDeprecationWarning):
        matrix = np.matrix([[1.0, 2.0], [3.0, 4.0]])
    assert matrix[0, 1] == 2.0  # which leaves an attribute behind
    records = np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")])
    named = type("Named", (np.memmap,), {"name": "a subclass of one"})
    for x in (mapped, matrix, records, mapped.view(named), np.ones(2).view(Methodical)):
        value = wrapped(x)
        assert type(value.array) is np.ndarray
        assert np.shares_memory(value.array, x)
        assert value.original is x


def with_attribute() -> Any:
    x: Any = np.ones(2).view(Methodical)
    x.origin = "a file"
    return x


def slotted() -> Any:
    x = np.ones(2).view(Slotted)
    x.name = "a name"
    return x


class Deceptive(np.ndarray[Any, Any]):
    """An array whose view is never a plain one."""

    def __array_finalize__(self, x: object) -> None:
        pass

    def view(self, *args: Any, **kwargs: Any) -> Any:
        return self


MEANING = {
    "a unit": lambda: Metres([1, 2]),
    "an attribute": with_attribute,
    "a slot": slotted,
    "a mask": lambda: np.ma.masked_array([1.0, 2.0], [True, False]),
    "a view of its own": lambda: np.ndarray.view(np.ones(2), Deceptive),
}


@pytest.mark.parametrize("make", MEANING.values(), ids=MEANING)
def test_what_means_more_travels_as_an_object_and_is_no_operand(make: Any) -> None:
    x = make()
    assert conversion.wrap(x) is None
    with pytest.raises(TypeError, match="would be lost: pass") as refused:
        conversion.wrap_operand(x)
    advice = "x.filled(0)" if "filled" in str(refused.value) else "numpy.asarray(x)"
    assert advice.replace("0", "value") in str(refused.value)
    plain = eval(advice, {"x": x, "numpy": np})  # what the error says
    assert type(conversion.wrap_operand(plain).array) is np.ndarray
    with pytest.raises(TypeError, match=r"numpy\.asarray\(out\)"):
        conversion.wrap_target(x)
    assert conversion.wrap_target(np.asarray(x)).array is not None


@pytest.mark.parametrize("make", MEANING.values(), ids=MEANING)
def test_an_object_keeps_what_its_class_forgets_to_pickle(make: Any) -> None:
    x = make()
    again = objects.load(memoryview(bytearray(b"".join(objects.dump([x])))))[0]
    assert type(again) is type(x)
    assert np.array_equal(np.asarray(again), np.asarray(x))
    assert again.flags.writeable
    for name in ("unit", "origin", "name", "mask"):
        assert np.array_equal(getattr(again, name, None), getattr(x, name, None)), name


@pytest.mark.parametrize("ranks", [2, (2, ("--transport", "tcp"))], indirect=True, scope="module")
def test_units_are_neither_mixed_nor_lost(ranks: Any) -> None:
    def program(comm: Any) -> None:
        x = Metres([1, 2], "km" if comm.rank else "m")
        other = 1 - comm.rank
        for refused in (
            comm.all_reduce,
            comm.iall_reduce,
            comm.persistent.all_reduce,
            comm.reduce,
            comm.scan,
            comm.exscan,
            comm.reduce_scatter,
            lambda x: comm.all_reduce_many([np.ones(2), x]),
            lambda x: comm.reduce_scatterv(x, [1, 1]),
            lambda x: comm.all_reduce(x, out=x),
        ):
            with pytest.raises(TypeError, match=r"would be lost: pass numpy\.asarray\(x\)"):
                refused(x)
        with pytest.raises(TypeError, match="has more to it"):
            comm.all_reduce(np.ones(2), out=x)
        with pytest.raises(TypeError, match=r"list\(x\)"):
            comm.all_to_all(x)

        def add(a: Metres, b: Metres) -> Metres:
            return Metres(a.in_metres() + b.in_metres())

        for op in (add, pycoll.Op(add)):
            total = comm.all_reduce(x, op=op)
            assert repr(total) == "[1001.0, 2002.0] m"
        metres, kilometres = "[1.0, 2.0] m", "[1.0, 2.0] km"
        assert repr(comm.broadcast(x)) == metres
        assert repr(comm.ibroadcast(x, root=1).wait()) == kilometres
        assert repr(comm.all_gather(x)) == f"[{metres}, {kilometres}]"
        assert repr(comm.iall_gather(x).wait()) == f"[{metres}, {kilometres}]"
        assert repr(comm.gather(x)) == (f"[{metres}, {kilometres}]" if comm.rank == 0 else "None")
        assert repr(comm.sendrecv(x, dest=other, source=other)) == (metres, kilometres)[other]
        request = comm.isend(x, dest=other)
        assert repr(comm.recv(other)) == (metres, kilometres)[other]
        request.wait()
        rows = comm.scatter(list(x.reshape(2, 1)) if comm.rank == 1 else None, root=1)
        assert repr(rows) == f"[{comm.rank + 1.0}] km"
        assert repr(x) == (kilometres if comm.rank else metres)  # nothing has changed it

    ranks(program)
