"""Wrong arguments: one clear error before anything is sent, and the communicator still works."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from pool_scripts import Scripts
from tiers import sizes

import pycoll
from pycoll import ANY_SOURCE, ANY_TAG, PROC_NULL

Comm = Any
Wrong = tuple[type[Exception] | tuple[type[Exception], ...], str, Callable[[Comm], Any]]

COLLECTIVES = (
    "broadcast",
    "reduce",
    "all_reduce",
    "gather",
    "all_gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
)
ROOTED = ("broadcast", "reduce", "gather", "scatter")


def square(comm: Comm, dtype: Any = "f8") -> Any:
    """An input that every collective takes."""
    return np.ones((comm.size, 3), dtype)


def refuse(comm: Comm, cases: Iterator[Wrong]) -> None:
    """Make each wrong call on one rank, while the others go on; then the right ones on all."""
    for number, (kind, text, call) in enumerate(cases):
        if comm.rank == number % comm.size:
            try:
                with pytest.raises(kind, match=text) as raised:
                    call(comm)
                assert not isinstance(raised.value, pycoll.Error)
                assert len(str(raised.value)) < 500
            except BaseException as exc:
                exc.add_note(f"wrong call number {number}: {kind}, {text!r}")
                raise
        # Had the wrong call sent anything, or counted, these would not match.
        assert comm.all_reduce(number) == comm.size * number
        got = comm.sendrecv(number, (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size)
        assert got == number


# --- roots, algorithms, timeouts -------------------------------------------------------------


@sizes(1, 3)
def test_wrong_roots_are_refused(ranks: Any) -> None:
    def cases(comm: Comm) -> Iterator[Wrong]:
        for name in ROOTED:
            for root in (comm.size, -1, 2**40):
                yield ValueError, r"root.*0 to", lambda c, n=name, r=root: call(c, n, root=r)
            for root in (0.0, "0", None, True):
                yield TypeError, "root.*int", lambda c, n=name, r=root: call(c, n, root=r)

    def call(comm: Comm, name: str, **how: Any) -> None:
        getattr(comm, name)(square(comm), **how)

    ranks(lambda comm: refuse(comm, cases(comm)))


@sizes(1, 3)
def test_algorithms_that_do_not_exist_are_refused_and_the_existing_named(ranks: Any) -> None:
    def cases() -> Iterator[Wrong]:
        for name in COLLECTIVES:
            existing = ", ".join(pycoll.algorithms(name))
            yield ValueError, existing, lambda c, n=name: call(c, n, "quick")
            yield ValueError, existing, lambda c, n=name: call(c, n, "")
            yield (TypeError, ValueError), "algorithm", lambda c, n=name: call(c, n, 5)
        yield ValueError, "dissemination", lambda c: c.barrier(algorithm="ring")
        yield TypeError, "algorithm is a name", lambda c: c.barrier(algorithm=["linear"])
        yield ValueError, "algorithm", lambda c: c.all_reduce("x", max, algorithm="ring")

    def call(comm: Comm, name: str, algorithm: Any) -> None:
        getattr(comm, name)(square(comm), algorithm=algorithm)

    ranks(lambda comm: refuse(comm, cases()))


@sizes(2)
def test_algorithms_that_cannot_serve_an_operator_are_refused(ranks: Any) -> None:
    def left(a: Any, b: Any) -> Any:
        return a

    def cases() -> Iterator[Wrong]:
        ordered = pycoll.Op(left, commutative=False, elementwise=True)
        whole = pycoll.Op(left, commutative=True, elementwise=False)
        for name in ("all_reduce", "reduce_scatter"):
            message = "ring.*rank order"
            yield ValueError, message, lambda c, n=name: call(c, n, ordered, "ring")
        yield (
            ValueError,
            "pairwise.*rank order",
            lambda c: call(c, "reduce_scatter", ordered, "pairwise"),
        )
        yield ValueError, "tree.*rank order", lambda c: call(c, "reduce", left, "tree")
        yield ValueError, "ring.*pieces", lambda c: call(c, "all_reduce", whole, "ring")

    def call(comm: Comm, name: str, op: Any, algorithm: str) -> None:
        getattr(comm, name)(square(comm), op, algorithm=algorithm)

    ranks(lambda comm: refuse(comm, cases()))


@sizes(2)
def test_wrong_timeouts_are_refused(ranks: Any) -> None:
    def cases() -> Iterator[Wrong]:
        for timeout, kind in ((-1, ValueError), (math.nan, ValueError), ("5", TypeError)):
            for name in COLLECTIVES:
                yield kind, "timeout.*seconds", lambda c, n=name, t=timeout: call(c, n, t)
            for wrong in (
                lambda c, t=timeout: c.barrier(timeout=t),
                lambda c, t=timeout: c.send(1, 0, timeout=t),
                lambda c, t=timeout: c.recv(timeout=t),
                lambda c, t=timeout: c.sendrecv(1, 0, timeout=t),
                lambda c, t=timeout: c.probe(timeout=t),
                lambda c, t=timeout: c.dup(timeout=t),
                lambda c, t=timeout: c.split(0, timeout=t),
            ):
                yield kind, "timeout.*seconds", wrong

    def call(comm: Comm, name: str, timeout: Any) -> None:
        getattr(comm, name)(square(comm), timeout=timeout)

    ranks(lambda comm: refuse(comm, cases()))


# --- operators and values --------------------------------------------------------------------


@sizes(1, 2)
def test_operators_that_do_not_take_a_dtype_are_refused(ranks: Any) -> None:
    wrong = [
        ("avg", "i4", "avg"),
        ("avg", "?", "avg"),
        ("band", "f4", "band"),
        ("bxor", "c8", "bxor"),
        ("min", "c16", "min"),
        ("max", "c8", "max"),
        ("minloc", "f8", "index"),
        ("sum", [("value", "f8"), ("index", "i4")], "structured"),
        ("sum", "M8[s]", "times"),
        ("max", "m8[s]", "times"),
        ("sum", "U3", "text"),
        ("sum", "longdouble", "extended"),
        ("sum", np.dtype("i4").newbyteorder(), "order"),
    ]

    def cases() -> Iterator[Wrong]:
        for op, dtype, text in wrong:
            for name in ("reduce", "all_reduce", "reduce_scatter"):
                yield (
                    TypeError,
                    text,
                    lambda c, n=name, d=dtype, o=op: getattr(c, n)(np.zeros((c.size, 3), d), o),
                )
        for name in ("reduce", "all_reduce", "reduce_scatter"):
            for op in (5, None, b"sum", ["sum"]):
                yield TypeError, "op", lambda c, n=name, o=op: getattr(c, n)(square(c), o)
            for op in ("mean", "", "SUM"):
                yield ValueError, "sum, prod", lambda c, n=name, o=op: getattr(c, n)(square(c), o)
        yield TypeError, "function", lambda c: c.all_reduce(1, pycoll.Op(5))

    ranks(lambda comm: refuse(comm, cases()))


@sizes(1, 2)
def test_values_that_cannot_be_reduced_or_split_are_refused(ranks: Any) -> None:
    def cases(comm: Comm) -> Iterator[Wrong]:
        for name in ("reduce", "all_reduce"):
            for x in ("text", None, [1.0, 2.0], {}, b"bytes", np.array([None])):
                yield TypeError, "reduce", lambda c, n=name, x=x: getattr(c, n)(x)
            yield ValueError, "int64", lambda c, n=name: getattr(c, n)((2**63, 0), "minloc")
        for x in ("text", None, [1.0] * comm.size, 5):
            yield TypeError, "reduce_scatter", lambda c, x=x: c.reduce_scatter(x)
        for name in ("scatter", "reduce_scatter", "all_to_all"):
            for shape in ((), (0,), (comm.size + 1,), (comm.size + 1, comm.size)):
                message = r"rank axis.*\("
                yield ValueError, message, lambda c, n=name, s=shape: split(c, n, np.zeros(s))
        for name in ("scatter", "all_to_all"):
            for x in (5, None, {0: 1}, {1, 2}, "ab"):
                yield TypeError, name, lambda c, n=name, x=x: split(c, n, x)
            for count in (0, comm.size + 1):
                yield (
                    ValueError,
                    f"{name}.*{comm.size} objects",
                    lambda c, n=name, k=count: split(c, n, [None] * k),
                )
        masked = np.ma.masked_array([1.0, 2.0], [True, False])
        for name in ("reduce", "all_reduce", "scan", "reduce_scatter"):
            yield TypeError, "mask would be lost", lambda c, n=name: getattr(c, n)(masked)

    def root(comm: Comm, name: str) -> dict[str, int]:
        return {"root": comm.rank} if name in ROOTED else {}

    def split(comm: Comm, name: str, x: Any) -> None:
        getattr(comm, name)(x, **root(comm, name))

    ranks(lambda comm: refuse(comm, cases(comm)))


@sizes(2)
def test_objects_that_cannot_be_pickled_are_refused(ranks: Any) -> None:
    def cases() -> Iterator[Wrong]:
        for make in (lambda: (i for i in ()), threading.Lock, lambda: [{"in": threading.Lock()}]):
            for wrong in (
                lambda c, m=make: c.broadcast(m(), root=c.rank),
                lambda c, m=make: c.gather(m()),
                lambda c, m=make: c.all_gather(m()),
                lambda c, m=make: c.scatter([m()] * c.size, root=c.rank),
                lambda c, m=make: c.all_to_all([m()] * c.size),
                lambda c, m=make: c.all_reduce(m(), max),
                lambda c, m=make: c.send(m(), 0),
                lambda c, m=make: c.sendrecv(m(), 0),
            ):
                yield TypeError, "cannot be sent", wrong

    ranks(lambda comm: refuse(comm, cases()))


# --- out -------------------------------------------------------------------------------------


def result_shape(comm: Comm, name: str) -> tuple[int, ...]:
    rows, columns = comm.size, 3
    if name in ("scatter", "reduce_scatter"):
        return (columns,)
    return (comm.size, rows, columns) if name in ("gather", "all_gather") else (rows, columns)


@sizes(1, 3)
def test_an_out_that_does_not_fit_is_refused_and_stays_as_it_was(ranks: Any) -> None:
    def cases(comm: Comm) -> Iterator[Wrong]:
        for name in COLLECTIVES[1:]:
            shape = result_shape(comm, name)
            for dtype in ("f4", "i8", "c16", ">f8"):
                yield ValueError, "dtype", with_out(name, np.zeros(shape, dtype))
            for wrong in ((*shape, 1), shape[:-1], (*shape[:-1], 4), (math.prod(shape),) * 2):
                yield ValueError, "shape", with_out(name, np.zeros(wrong))
            fixed = np.zeros(shape)
            fixed.flags.writeable = False
            yield ValueError, "read-only", with_out(name, fixed)
            yield ValueError, "read-only", with_out(name, memoryview(fixed))
            stretched = np.lib.stride_tricks.as_strided(np.zeros(3), shape, (0,) * len(shape))
            yield ValueError, "overlaps itself", with_out(name, stretched)
            for no_array in ("out", 5, np.float64(0), np.zeros(shape, object)):
                yield TypeError, "out is", with_out(name, no_array)
            # gathers take a list of arrays
            yield TypeError, r"out(\[0\])? is", with_out(name, [0.0] * comm.size)

    def with_out(name: str, out: Any) -> Callable[[Comm], None]:
        def call(comm: Comm) -> None:
            how = {"root": comm.rank} if name in ROOTED else {}
            before = np.array(out)
            with pytest.raises((TypeError, ValueError)) as raised:
                getattr(comm, name)(square(comm), out=out, **how)
            np.testing.assert_array_equal(np.array(out), before)
            raise raised.value

        return call

    ranks(lambda comm: refuse(comm, cases(comm)))


@sizes(1, 3)
def test_an_out_that_overlaps_the_input_is_refused_but_in_place(ranks: Any) -> None:
    def cases(comm: Comm) -> Iterator[Wrong]:
        me, message = comm.rank, "overlaps x"
        line, many = np.zeros(9), np.zeros((comm.size + 1, comm.size, 3))
        rows, flat = many[0], many[0].ravel()
        yield ValueError, message, lambda c: c.all_reduce(line[1:], out=line[:-1])
        yield ValueError, message, lambda c: c.all_reduce(line, out=line[::-1])
        yield ValueError, message, lambda c: c.reduce(line[1:], root=me, out=line[:-1])
        yield ValueError, message, lambda c: c.gather(rows, root=me, out=many[:-1])
        yield ValueError, message, lambda c: c.all_gather(many[me + 1, :, ::-1], out=many[1:])
        yield ValueError, message, lambda c: c.reduce_scatter(rows, out=rows[me, ::-1])
        yield ValueError, message, lambda c: c.all_to_all(rows, out=rows[:, ::-1])
        yield ValueError, message, lambda c: c.scatter(rows, root=me, out=rows[me])
        if comm.size > 1:
            other = (me + 1) % comm.size
            yield ValueError, message, lambda c: c.all_gather(many[other], out=many[:-1])
            yield ValueError, message, lambda c: c.reduce_scatter(rows, out=rows[other])
            yield ValueError, message, lambda c: c.reduce_scatter(rows, out=flat[1:4])

    ranks(lambda comm: refuse(comm, cases(comm)))


@sizes(1, 3)
def test_out_is_the_input_wherever_their_shapes_are_the_same(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        me, size = comm.rank, comm.size
        for make in (np.array, np.asfortranarray, lambda x: np.repeat(x, 2, -1)[..., ::2]):
            x = make(np.full((size, 3), me + 1.0))
            assert comm.all_reduce(x, out=x) is x
            assert (x == size * (size + 1) / 2).all()
            x[...] = me + 1
            got = comm.reduce(x, "max", root=size - 1, out=x)
            assert got is (x if me == size - 1 else None)
            assert (x == (size if me == size - 1 else me + 1)).all()
            x[...] = np.arange(size)[:, None] + 10 * me
            assert comm.all_to_all(x, out=x) is x
            assert (x == 10 * np.arange(size)[:, None] + me).all()

    ranks(program)


@sizes(2)
def test_out_is_refused_for_objects_and_ignored_off_root(ranks: Any) -> None:
    def cases() -> Iterator[Wrong]:
        out = np.zeros(3)
        yield ValueError, "out", lambda c: c.all_gather("object", out=out)
        yield ValueError, "out", lambda c: c.gather("object", root=c.rank, out=out)
        yield ValueError, "out", lambda c: c.all_to_all([None] * c.size, out=out)
        yield ValueError, "out", lambda c: c.scatter([None] * c.size, root=c.rank, out=out)
        yield ValueError, "out", lambda c: c.all_reduce("object", max, out=out)
        yield ValueError, "out", lambda c: c.reduce("object", max, root=c.rank, out=out)

    def program(comm: Comm) -> None:
        refuse(comm, cases())
        other = np.zeros(7, "i2")  # fits nothing
        for root in range(comm.size):
            out = other if comm.rank != root else None
            for call in (comm.reduce, comm.gather):
                got = call(np.ones(3), root=root, out=out)
                assert (got is None) == (comm.rank != root)
        assert not other.any()

    ranks(program)


@sizes(2)
def test_a_scatter_whose_out_does_not_fit_off_root_has_taken_place(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        for out in (np.zeros(3, "f4"), np.zeros(4)):
            if comm.rank == 0:
                assert comm.scatter(square(comm)).tolist() == [1, 1, 1]
            else:
                with pytest.raises(ValueError, match="out has"):
                    comm.scatter(None, out=out)
                assert not out.any()
            assert comm.all_reduce(1) == comm.size
        for out in (np.zeros(3), None):  # objects need none, and have taken place, too
            if comm.rank == 0:
                assert comm.scatter(["a", "b"]) == "a"
            elif out is None:
                assert comm.scatter(None) == "b"
            else:
                with pytest.raises(ValueError, match="out"):
                    comm.scatter(None, out=out)
            assert comm.all_reduce(1) == comm.size

    ranks(program)


# --- point to point, communicators -----------------------------------------------------------


@sizes(1, 3)
def test_wrong_peers_and_tags_are_refused(ranks: Any) -> None:
    def cases(comm: Comm) -> Iterator[Wrong]:
        x, size = np.ones(3), comm.size
        for dest in (size, ANY_SOURCE, -3, 2**40):
            yield ValueError, "dest.*0 to", lambda c, d=dest: c.send(x, d)
            yield ValueError, "dest.*0 to", lambda c, d=dest: c.sendrecv(x, d)
        for dest in (0.0, "0", None, True):
            yield TypeError, "dest.*int", lambda c, d=dest: c.send(x, d)
            yield TypeError, "dest.*int", lambda c, d=dest: c.sendrecv(x, d)
        for source in (size, -3, 0.5, ""):
            kind = ValueError if isinstance(source, int) else TypeError
            yield kind, "source", lambda c, s=source: c.recv(s)
            yield kind, "source", lambda c, s=source: c.sendrecv(x, 0, s)
            yield kind, "source", lambda c, s=source: c.probe(s)
            yield kind, "source", lambda c, s=source: c.iprobe(s)
        for tag in (-2, 2**31, 1.5, None):
            kind = ValueError if isinstance(tag, int) else TypeError
            yield kind, "tag", lambda c, t=tag: c.send(x, 0, t)
            yield kind, "tag", lambda c, t=tag: c.send(x, PROC_NULL, t)
            yield kind, "tag", lambda c, t=tag: c.recv(0, t)
            yield kind, "tag", lambda c, t=tag: c.sendrecv(x, 0, sendtag=t)
            yield kind, "tag", lambda c, t=tag: c.sendrecv(x, 0, recvtag=t)
            yield kind, "tag", lambda c, t=tag: c.probe(tag=t)
            yield kind, "tag", lambda c, t=tag: c.iprobe(tag=t)
        yield ValueError, "tag", lambda c: c.send(x, 0, ANY_TAG)
        yield ValueError, "tag", lambda c: c.sendrecv(x, 0, sendtag=ANY_TAG)

    ranks(lambda comm: refuse(comm, cases(comm)))


@sizes(1, 2)
def test_an_out_that_cannot_be_received_into_is_refused(ranks: Any) -> None:
    def cases() -> Iterator[Wrong]:
        fixed = np.zeros(3)
        fixed.flags.writeable = False
        for receive in (
            lambda c, out: c.recv(out=out),
            lambda c, out: c.sendrecv(1, 0, out=out),
            lambda c, out: c.recv(PROC_NULL, out=out),
        ):
            yield ValueError, "read-only", lambda c, r=receive: r(c, fixed)
            yield TypeError, "out is", lambda c, r=receive: r(c, [0.0])
            yield TypeError, "out is", lambda c, r=receive: r(c, bytearray(8))
            yield (
                ValueError,
                "overlaps itself",
                lambda c, r=receive: r(c, np.lib.stride_tricks.as_strided(np.zeros(1), (3,), (0,))),
            )

    ranks(lambda comm: refuse(comm, cases()))


@sizes(2)
def test_wrong_colors_keys_and_codes_are_refused(ranks: Any) -> None:
    def cases() -> Iterator[Wrong]:
        for color in ("red", 1.0, True, [1]):
            yield TypeError, "color.*int", lambda c, x=color: c.split(x)
        for key in ("first", 0.5, False):
            yield TypeError, "key.*int", lambda c, x=key: c.split(0, x)
        yield TypeError, "code.*int", lambda c: c.abort("now")
        yield TypeError, "unexpected", lambda c: c.all_reduce(1, typo=1)

    ranks(lambda comm: refuse(comm, cases()))


def test_algorithms_of_an_unknown_collective_are_refused() -> None:
    with pytest.raises(ValueError, match="all_reduce"):
        pycoll.algorithms("all_reduction")
    for name in (*COLLECTIVES, "barrier"):
        assert "linear" in pycoll.algorithms(name)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_what_is_moved_is_named_on_every_rank(scripts: Scripts, transport: str) -> None:
    text = """
comm.barrier()
x = list(np.arange(2.0 * size).reshape(size, 2))
for name in ("broadcast", "scatter", "scatterv", "ibroadcast", "iscatter", "iscatterv"):
    call = getattr(comm, name)
    error_like(TypeError, "missing 1 required positional argument: 'xs?'", call)
    got = call(x if rank == 0 else None)
    got = got.wait() if name[0] == "i" else got
    assert len(got) == 2
ok()
"""
    scripts(2, text, transport)
