"""Arrays of every library in host memory, and numbers, which the core looks at as at NumPy's."""

from __future__ import annotations

from typing import Any

import pytest

ON_BOTH = pytest.mark.parametrize(
    "ranks", [2, (2, ("--transport", "tcp"))], indirect=True, scope="module", ids=["shm", "tcp"]
)
SPLIT = ("reduce_scatter", "all_to_all", "scatter")
"""Calls that take a row for every rank, and so no array of one dimension alone."""

KINDS = ["memoryview", "array", pytest.param("torch", marks=pytest.mark.libraries)]


def made(kind: str, array: Any) -> Any:
    """Return a new array of a kind with the elements of a NumPy array; None: it has no such."""
    import array as stdlib_array

    import numpy as np

    if kind == "numpy":
        return np.array(array)
    if kind == "memoryview":
        return memoryview(np.array(array))
    if kind == "array":
        if array.ndim != 1 or array.dtype.char not in "bBhHiIlLfd":
            return None
        return stdlib_array.array(array.dtype.char, array.tobytes())
    import torch

    return torch.from_numpy(np.array(array))


def same(got: Any, want: Any, kind: str) -> None:
    """Assert that `got` has these values, and is of the kind, or NumPy's if that has no such."""
    import numpy as np

    as_kind = made(kind, want)
    assert type(got) is (np.ndarray if as_kind is None else type(as_kind)), (type(got), kind)
    if kind == "memoryview":
        assert got.format == as_kind.format
    assert np.asarray(got).dtype == want.dtype
    assert np.asarray(got).shape == want.shape
    np.testing.assert_array_equal(np.asarray(got), want)


def cases(comm: Any, dtype: Any) -> dict[str, tuple[Any, Any, dict[str, Any]]]:
    """This rank's value, what the call returns, and its other arguments; by its name."""
    import numpy as np

    rank, size = comm.rank, comm.size
    each = [(np.arange(2 * size) % 2 + peer).astype(dtype) for peer in range(size)]
    tables = [np.stack([each[peer]] * size) + np.array(1, dtype) for peer in range(size)]
    mine, table, root = each[rank], tables[rank], size - 1
    total = np.array(each).sum(axis=0, dtype=dtype)  # of bools it is "or"
    scanned = np.array(each[: rank + 1]).sum(axis=0, dtype=dtype)
    before = np.array(each[:rank]).sum(axis=0, dtype=dtype) if rank else None
    at_root, top = rank == root, np.maximum.reduce(each) if dtype not in "FD" else None
    found = {
        "all_reduce": (mine, total, {}),
        "reduce": (mine, total if at_root else None, {"root": root}),
        "all_gather": (mine, np.stack(each), {}),
        "gather": (mine, np.stack(each) if at_root else None, {"root": root}),
        "scan": (mine, scanned, {}),
        "exscan": (mine, before, {}),
        "reduce_scatter": (table, sum_of([other[rank] for other in tables]), {}),
        "all_to_all": (table, np.stack([other[rank] for other in tables]), {}),
        "scatter": (table if at_root else None, tables[root][rank], {"root": root}),
        "broadcast": (mine, each[root], {"root": root}),
    }
    if top is not None:
        found["all_reduce, max"] = (mine, top, {"op": "max"})
    return found


def sum_of(arrays: list[Any]) -> Any:
    import numpy as np

    return np.array(arrays).sum(axis=0, dtype=arrays[0].dtype)


@ON_BOTH
@pytest.mark.parametrize("kind", KINDS)
def test_every_dtype_and_call_gives_numpys_values_as_the_kind_that_was_passed(
    ranks: Any, kind: str
) -> None:
    if kind == "torch":
        pytest.importorskip("torch", reason="PyTorch is not installed")

    def program(comm: Any) -> None:
        import math

        import numpy as np

        tested = 0
        for dtype in "?bhilBHILefdFD":
            for name, (x, want, options) in cases(comm, dtype).items():
                call = getattr(comm, name.partition(",")[0])
                if kind == "array" and (name in SPLIT or dtype in "?eFD"):
                    continue
                fills = "broadcast" not in name
                for turn in range(3):  # what is found out at the first is used by the others
                    given = made(kind, x) if x is not None else None
                    deadline = {"timeout": 60.0} if turn == 2 else {}
                    out = made(kind, np.zeros_like(want)) if want is not None and fills else None
                    if turn == 0 or out is None:
                        got = call(given, **options, **deadline)
                    else:
                        got = call(given, **options, out=out, **deadline)
                        assert got is out, name
                    if want is None:
                        assert got is None, name
                        continue
                    assert name != "broadcast" or got is given
                    same(got, want, kind)
                    tested += 1
        assert tested >= (150 if kind == "array" else 300)
        assert comm.all_reduce(1.0, timeout=math.inf) == comm.size

    ranks(program)


@ON_BOTH
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_may_pass_different_kinds_of_arrays(ranks: Any, kind: str) -> None:
    if kind == "torch":
        pytest.importorskip("torch", reason="PyTorch is not installed")

    def program(comm: Any) -> None:
        import numpy as np

        for length in (1, 3000, 300_000):
            for turn in range(4):
                plain = np.arange(length, dtype="d") + comm.rank
                x = made(kind, plain) if (comm.rank + turn) % 2 else plain
                want = 2 * np.arange(length, dtype="d") + 1
                got = comm.all_reduce(x, timeout=60.0 if turn == 3 else None)
                assert type(got) is type(x)
                np.testing.assert_array_equal(np.asarray(got), want)
                comm.broadcast(x, root=turn % 2)
                np.testing.assert_array_equal(np.asarray(x), np.arange(length) + turn % 2)

    ranks(program)


@ON_BOTH
@pytest.mark.parametrize("kind", KINDS)
def test_messages_come_back_as_what_was_sent_and_fill_what_is_passed(ranks: Any, kind: str) -> None:
    if kind == "torch":
        pytest.importorskip("torch", reason="PyTorch is not installed")

    def program(comm: Any) -> None:
        import numpy as np

        import pycoll

        other = 1 - comm.rank
        for dtype in "?bhilBHILefdFD":
            for length in (0, 1, 3000, 100_000):
                want = (np.arange(length) % 2 + other).astype(dtype)
                x = made(kind, (np.arange(length) % 2 + comm.rank).astype(dtype))
                if x is None:
                    continue
                for _ in range(2):
                    same(comm.sendrecv(x, other, other), want, kind)
                    request = comm.isend(x, other)
                    same(comm.recv(other), want, kind)
                    request.wait()
                    request = comm.irecv(other)
                    comm.send(x, other, timeout=60)
                    same(request.wait(), want, kind)
                    outs = [made(kind, np.zeros_like(want)) for _ in range(3)]
                    status = pycoll.Status()
                    request = comm.irecv(other, out=outs[0])
                    comm.send(x, other)
                    assert request.wait() is outs[0]
                    assert comm.sendrecv(x, other, other, out=outs[1]) is outs[1]
                    request = comm.isend(x, other, 5)
                    assert comm.recv(other, 5, outs[2], status) is outs[2]
                    request.wait()
                    assert status.nbytes == want.nbytes
                    for out in outs:
                        same(out, want, kind)

    ranks(program)


@ON_BOTH
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_different_shapes_come_as_the_kinds_that_were_passed(
    ranks: Any, kind: str
) -> None:
    if kind == "torch":
        pytest.importorskip("torch", reason="PyTorch is not installed")

    def program(comm: Any) -> None:
        import numpy as np

        rank, size = comm.rank, comm.size

        for length in (0, 3, 3000, 100_000):

            def block(sender: int, receiver: int, least: int = length) -> Any:
                return np.arange(least + sender + 2 * receiver, dtype="d") + sender

            for turn in range(4):
                mixed = "numpy" if turn == 3 and rank else kind
                kinds = [kind, "numpy" if turn == 3 else kind]
                make = (lambda x: x) if mixed == "numpy" else (lambda x: made(kind, x))
                row = [make(block(rank, peer)) for peer in range(size)]
                column = [block(peer, rank) for peer in range(size)]
                first = [block(peer, 0) for peer in range(size)]
                out = make(np.zeros(sum(map(len, column)))) if turn % 2 else None
                got = comm.all_to_allv(row, out=out)
                of = [mixed] * size if turn % 2 else kinds
                for each, want, each_kind in zip(got, column, of, strict=True):
                    same(each, want, each_kind)
                assert out is None or (np.asarray(out) == np.concatenate(column)).all()
                for each, want, each_kind in zip(
                    comm.all_gatherv(row[0]), first, kinds, strict=True
                ):
                    same(each, want, each_kind)
                at_root = comm.gatherv(row[0], root=1, timeout=60.0)
                assert (at_root is None) == (rank == 0)
                for each, want in zip(at_root or (), first, strict=rank == 1):
                    np.testing.assert_array_equal(np.asarray(each), want)
                out = make(np.zeros(len(block(0, rank)))) if turn % 2 else None
                mine = comm.scatterv(row if rank == 0 else None, out=out)
                assert out is None or mine is out
                same(mine, block(0, rank), kind if out is None else mixed)

    ranks(program)


@ON_BOTH
def test_floats_bools_and_complex_numbers_are_reduced_to_their_own_type(ranks: Any) -> None:
    def program(comm: Any) -> None:
        import math

        import numpy as np

        import pycoll

        rank = comm.rank
        for _ in range(2):
            for x, ops in {
                1.5 + rank: {"sum": 4.0, "prod": 3.75, "min": 1.5, "max": 2.5, "avg": 2.0},
                rank == 1: {"sum": True, "prod": False, "lxor": True, "land": False, "band": False},
                complex(rank, 2): {"sum": 1 + 4j, "prod": -4 + 2j, "avg": 0.5 + 2j},
            }.items():
                for op, want in ops.items():
                    for timeout in (None, 60.0):
                        got = comm.all_reduce(x, op, timeout=timeout)
                        assert type(got) is type(x)
                        assert got == want, (x, op)
                    waited = comm.iall_reduce(x, op).wait()
                    assert (type(waited), waited) == (type(x), want)
                    rooted = comm.reduce(x, op, root=1)
                    assert (type(rooted), rooted) == (
                        (type(x), want) if rank else (type(None), None)
                    )
                    out = np.zeros((), type(x))
                    assert comm.all_reduce(x, op, out=out) is out
                    assert out[()] == want
                before = comm.exscan(x)
                first = comm.broadcast(x, root=0)
                assert before == (first if rank else None)
                assert type(comm.scan(x)) is type(x)
            again = comm.persistent.all_reduce(0.5)
            assert [again.start().wait() for _ in range(3)] == [1.0] * 3
            assert math.isnan(comm.all_reduce(math.nan if rank else 1.0, "max"))
            assert math.copysign(1, comm.all_reduce(-0.0)) == -1
            assert comm.all_gather(1.5) == [1.5, 1.5]  # moved as objects
            with pytest.raises(TypeError, match="bitwise"):
                comm.all_reduce(1.0, "band")
            with pytest.raises(TypeError, match="complex"):
                comm.all_reduce(1j, "max")
        with comm.dup() as apart, pytest.raises(pycoll.MismatchError, match="float64"):
            apart.all_reduce(1.5) if rank else apart.all_reduce(True)

    ranks(program)


@ON_BOTH
@pytest.mark.parametrize("kind", KINDS)
def test_no_python_runs_in_calls_of_any_kind_of_array(ranks: Any, kind: str) -> None:
    if kind == "torch":
        pytest.importorskip("torch", reason="PyTorch is not installed")

    def program(comm: Any) -> None:
        import sys

        import numpy as np

        rank, rows = comm.rank, np.ones((2, 2))
        other = 1 - rank
        x, out = made(kind, np.ones(2)), made(kind, np.zeros(2))
        table, tables = made(kind, rows), made(kind, np.zeros((2, 2)))
        calls = {
            "all_reduce": lambda: comm.all_reduce(x, out=out),
            "in place": lambda: comm.all_reduce(out, out=out, op="max"),
            "new": lambda: comm.all_reduce(x),
            "timeout": lambda: comm.all_reduce(x, out=out, timeout=60),
            "number": lambda: comm.all_reduce(1.5),
            "broadcast": lambda: comm.broadcast(x),
            "reduce": lambda: comm.reduce(x, out=out if rank == 0 else None),
            "scan": lambda: comm.scan(x, out=out),
            "sendrecv": lambda: comm.sendrecv(x, other, other, out=out),
            "sendrecv, new": lambda: comm.sendrecv(x, other, other),
        }
        if table is not None:
            calls |= {
                "all_gather": lambda: comm.all_gather(x, out=tables),
                "gather": lambda: comm.gather(x),
                "all_to_all": lambda: comm.all_to_all(table, out=tables),
                "reduce_scatter": lambda: comm.reduce_scatter(table, out=out),
                "scatter": lambda: comm.scatter(table if rank == 0 else None, out=out),
            }
        if table is not None and comm._group.shm is not None:
            calls |= {
                "gatherv": lambda: comm.gatherv(x),
                "all_gatherv": lambda: comm.all_gatherv(table),
                "all_to_allv": lambda: comm.all_to_allv([x, out], timeout=60),
                "scatterv": lambda: comm.scatterv([x, x] if rank == 0 else None, out=out),
            }
        seen: list[str] = []

        def note(frame: Any, event: str, arg: object) -> None:
            if event == "call" and "pycoll" in frame.f_code.co_filename:
                seen.append(frame.f_code.co_name)

        for name, call in calls.items():
            quiet = 0
            for _ in range(50):
                seen.clear()
                sys.setprofile(note)
                call()
                sys.setprofile(None)
                quiet += not seen
            assert quiet, (name, seen)  # in some of them no rank waited so long that it slept

    ranks(program)


@ON_BOTH
@pytest.mark.parametrize("kind", KINDS)
def test_arrays_that_cannot_be_results_are_refused_before_anything_is_sent(
    ranks: Any, kind: str
) -> None:
    if kind == "torch":
        pytest.importorskip("torch", reason="PyTorch is not installed")

    def program(comm: Any) -> None:
        import numpy as np

        x = made(kind, np.ones(4))
        wrong = [made(kind, np.ones(5)), made(kind, np.ones(4, "f")), x[1:], x[::2]]
        if kind == "memoryview":
            wrong.append(x.toreadonly())
        for out in wrong:
            for _ in range(2):
                for call in (comm.all_reduce, comm.iall_reduce, comm.scan):
                    with pytest.raises(ValueError, match="out"):
                        call(x, out=out)
        if kind == "memoryview":
            with pytest.raises(ValueError, match="read-only"):
                comm.recv(0, out=wrong[-1])
        np.testing.assert_array_equal(np.asarray(comm.all_reduce(x, out=x)), np.full(4, 2.0))
        assert comm.all_reduce(1.0) == 2.0

    ranks(program)


@ON_BOTH
def test_buffers_cannot_change_their_size_while_a_call_uses_them_and_can_afterwards(
    ranks: Any,
) -> None:
    def program(comm: Any) -> None:
        import array
        import sys

        import pycoll

        other = 1 - comm.rank
        x, out = array.array("d", [1.0] * 4), array.array("d", [0.0] * 4)
        view = memoryview(array.array("d", [1.0] * 4))
        counts = [sys.getrefcount(each) for each in (x, out, view)]
        for _ in range(3):
            comm.all_reduce(x, out=out)
            comm.all_reduce(view, out=out)
            comm.sendrecv(x, other, other, out=out)
            comm.broadcast(out)
            comm.iall_reduce(x, out=out).wait()
            for wrong in (memoryview(b"123"), view[::2], out[:3]):
                with pytest.raises(ValueError, match="out"):
                    comm.all_reduce(x, out=wrong)
        request = comm.irecv(other, out=out)
        with pytest.raises(BufferError):
            out.append(1.0)
        comm.send(x, other)
        request.wait()
        del request
        comm.barrier()
        pycoll.wait_all([comm.ibarrier()])
        out.append(1.0)
        x.append(1.0)
        view.release()
        assert [sys.getrefcount(each) for each in (x, out, view)] == counts

    ranks(program)
