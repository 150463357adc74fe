"""Operators that users write: what is refused, what they get, and what an exception breaks."""

from __future__ import annotations

import array
import enum
import functools
import importlib.util
import operator
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pycoll
from pycoll import Communicator as Comm

SOURCES = str(Path(pycoll.__file__).parent.resolve())

sizes = pytest.mark.parametrize("ranks", [3], indirect=True, scope="module")
both_transports = pytest.mark.parametrize(
    "ranks", [3, (3, ("--transport", "tcp"))], indirect=True, scope="module", ids=["shm", "tcp"]
)
needs_torch = pytest.mark.skipif(
    not importlib.util.find_spec("torch"), reason="PyTorch is not installed"
)
needs_jax = pytest.mark.skipif(not importlib.util.find_spec("jax"), reason="JAX is not installed")


class ReduceOp(enum.Enum):
    """As PyTorch's: its members can be called, to make another operator."""

    SUM = 0
    PRODUCT = 1
    PREMUL_SUM = 2

    def __call__(self, *factors: float) -> ReduceOp:
        return self


class Pair:
    """An operator that is an object."""

    def __call__(self, a: Any, b: Any) -> Any:
        return a + b


def one(a: Any) -> Any:
    return a


def three(a: Any, b: Any, c: Any) -> Any:
    return a


def keyword(a: Any, b: Any, *, c: Any) -> Any:
    return a


def refused() -> tuple[tuple[Any, str], ...]:
    """What is no function of two values, and what is said of it."""
    return (
        (ReduceOp.SUM, r'op is ReduceOp\.SUM: write op="sum"'),
        (ReduceOp.PRODUCT, 'write op="prod"'),
        (ReduceOp.PREMUL_SUM, "Pass one of sum, prod"),
        (one, r"a function of two values, but .*one has the parameters \(a: 'Any'\)"),
        (three, "a function of two values, but .*three has the parameters"),
        (keyword, "a function of two values, but .*keyword has the parameters"),
        (functools.partial(three, c=1, b=2), "a function of two values, but partial"),
        (functools.lru_cache(one), "a function of two values, but .*one has the parameters"),
        (one.__call__.__self__.__get__(5), "a function of two values"),
        (np.negative, "numpy.negative has 1 inputs and 1 outputs"),
        (np.divmod, "numpy.divmod has 2 inputs and 2 outputs"),
        (int.bit_length, "a function of two values"),
        (slice, "returned a value of type slice"),
        (vars, "does not take two values of the kind that was passed: vars expected at most 1"),
    )


@sizes
def test_what_is_no_function_of_two_values_is_refused_before_anything_is_sent(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        x = np.ones(2)
        calls: tuple[Callable[[Any], Any], ...] = (
            lambda op: comm.all_reduce(x, op),
            lambda op: comm.iall_reduce(x, op=op),
            lambda op: comm.persistent.all_reduce(x, op),
            lambda op: comm.all_reduce_many([x], op),
            lambda op: comm.reduce_scatterv(np.ones(3), [1, 1, 1], op),
            lambda op: comm.scan(x, op),
        )
        for op, text in refused():
            for call in calls if op in (ReduceOp.SUM, vars) else calls[:1]:
                with pytest.raises(TypeError, match=text) as caught:
                    call(op)
                shown = "".join(traceback.format_exception(caught.value))
                assert SOURCES not in shown, shown
        if comm.rank == 0:  # and so nobody has to have made the same mistake
            with pytest.raises(TypeError, match="function of two values"):
                comm.all_reduce(x, op=one)
        with pytest.raises(TypeError, match=r'not of ReduceOp\.SUM: write op="sum"'):
            pycoll.Op(ReduceOp.SUM)
        with pytest.raises(TypeError, match="compares whole arrays"):
            comm.all_reduce_many([x], max)
        assert comm.all_reduce(1) == 3

    ranks(program)


@sizes
def test_what_can_be_called_with_two_values_is_an_operator(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        x = np.arange(3.0) + comm.rank
        for op in (
            lambda a, b: a + b,
            lambda *both: both[0] + both[1],
            lambda a, b, c=0.0: a + b + c,
            Pair(),
            Pair().__call__,
            functools.partial(lambda a, b, c: a + b + c, c=0.0),
            operator.add,
            pycoll.Op(np.add),
            pycoll.Op(np.ndarray.__add__),
        ):
            assert comm.all_reduce(x, op).tolist() == [3, 6, 9]
        assert comm.all_reduce(comm.rank, max) == 2
        assert comm.all_reduce(np.array(comm.rank), max) == 2
        assert comm.all_reduce("abc"[comm.rank], functools.lru_cache(Pair())) == "abc"
        assert comm.all_reduce("abc"[comm.rank], slice) == slice(slice("a", "b"), "c")

    ranks(program)


@sizes
def test_scans_by_a_function_may_be_repeated(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        alone = comm.split(comm.rank)
        x = np.arange(3.0) + comm.rank
        below = [np.arange(3.0) + rank for rank in range(comm.rank)]
        for _ in range(3):
            assert comm.scan(x, operator.add).tolist() == sum(below, x).tolist()
            got = comm.exscan(x, operator.add)
            assert got is None if comm.rank == 0 else got.tolist() == sum(below).tolist()
            assert alone.scan(x, operator.add).tolist() == x.tolist()
            assert alone.exscan(x, operator.add) is None

    ranks(program)


def ways(comm: Comm) -> dict[str, Callable[..., Any]]:
    """Calls that reduce one value like x on every rank to its result on all, with an operator."""

    def persistent(x: Any, op: Any) -> Any:
        return comm.persistent.all_reduce(x, op).start().wait()

    def exscan(x: Any, op: Any) -> Any:
        before = comm.broadcast(comm.exscan(x, op), root=comm.size - 1)
        assert np.all(np.asarray(before) == 3)
        return before + 2

    def rows(x: Any) -> Any:
        stacked = np.stack([np.asarray(x)] * comm.size)
        return stacked if isinstance(x, np.ndarray) else x.new_tensor(stacked)

    def pieces(algorithm: str) -> Callable[[Any, Any], Any]:
        return lambda x, op: comm.all_reduce(
            x, pycoll.Op(op, elementwise=True), algorithm=algorithm
        )

    return {
        "all_reduce": comm.all_reduce,
        "tree": lambda x, op: comm.all_reduce(x, op, algorithm="tree"),
        "ring": pieces("ring"),
        "recursive halving": pieces("recursive_halving"),
        "iall_reduce": lambda x, op: comm.iall_reduce(x, op).wait(),
        "persistent": persistent,
        "reduce": lambda x, op: comm.broadcast(comm.reduce(x, op, root=1), root=1),
        "scan": lambda x, op: comm.broadcast(comm.scan(x, op), root=comm.size - 1),
        "exscan": exscan,
        "reduce_scatter": lambda x, op: comm.reduce_scatter(rows(x), op),
        "reduce_scatterv": lambda x, op: comm.reduce_scatterv(rows(x), [1] * comm.size, op)[0],
        "all_reduce_many": lambda x, op: comm.all_reduce_many([x, x], op)[1],
        "many, elementwise": lambda x, op: comm.all_reduce_many(
            [x, x], pycoll.Op(op, elementwise=True)
        )[1],
        "many, ring": lambda x, op: comm.all_reduce_many(
            [x, x], pycoll.Op(op, elementwise=True), algorithm="ring"
        )[0],
    }


def check_kind(
    comm: Comm, x: Any, kind: type, combine: Callable[[Any, Any], Any], names: Any = None
) -> None:
    """Reduce with an operator that notes what it gets, by all ways or those of these names."""
    seen: set[type] = set()

    def op(a: Any, b: Any) -> Any:
        seen.update((type(a), type(b)))
        return combine(a, b)

    expected = np.asarray(x, dtype=object if np.ndim(x) == 0 else None) * 0 + 5
    for name, call in ways(comm).items():
        if names is None or name in names:
            got = call(x, op)
            assert np.array_equal(np.asarray(got), expected), (name, got)
            assert seen <= {kind}, (name, seen)
    heard = comm.all_gather(seen)
    assert set().union(*heard) == {kind}


@both_transports
def test_a_function_gets_the_kind_of_value_that_was_passed(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        mine = 2 * comm.rank + 1  # the largest is 5

        def larger(a: Any, b: Any) -> Any:
            assert not a.flags.writeable
            return np.where(a > b, a, b)

        check_kind(comm, np.full((2, 3), mine, np.float32), np.ndarray, larger)
        check_kind(comm, np.full((5,), mine, np.int16), np.ndarray, larger)
        # What has no arithmetic comes as NumPy arrays.
        reductions = ("all_reduce", "tree", "iall_reduce", "persistent", "all_reduce_many")
        for x in (array.array("d", [mine] * 4), memoryview(np.full(4, mine, np.uint8))):
            check_kind(comm, x, np.ndarray, larger, reductions)
        for number in (int(mine), float(mine), complex(mine)):
            by_size = functools.partial(max, key=abs)
            names = ("all_reduce", "iall_reduce", "persistent", "all_reduce_many", "scan", "exscan")
            check_kind(comm, number, type(number), by_size, names)
        check_kind(comm, np.float32(mine), np.float32, max, names)
        elementwise = pycoll.Op(lambda a, b: max(a, b), elementwise=True)
        assert comm.all_reduce_many([mine, 1.5], elementwise) == [5, 1.5]

    ranks(program)


@needs_torch
@both_transports
def test_a_function_gets_tensors_for_tensors(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        import sys

        import torch

        mine = 2 * comm.rank + 1
        for dtype in (torch.float32, torch.int64, torch.bfloat16, torch.float16):
            x = torch.full((2, 3), mine, dtype=dtype)
            without = dtype is torch.bfloat16
            library = sys.modules.pop("ml_dtypes", None)
            if without:
                sys.modules["ml_dtypes"] = None  # type: ignore[assignment]
            try:
                got = comm.all_reduce(x, torch.maximum)
                assert got.dtype == dtype
                assert got.tolist() == [[5] * 3] * 2
                pieces = pycoll.Op(torch.maximum, elementwise=True)
                assert comm.all_reduce(x, pieces, algorithm="ring").tolist() == got.tolist()
                assert comm.all_reduce_many([x, x], torch.maximum)[1].tolist() == got.tolist()
            finally:
                if without:
                    del sys.modules["ml_dtypes"]
                if library is not None:
                    sys.modules["ml_dtypes"] = library
        x = torch.full((2, 3), float(mine))
        check_kind(comm, x, torch.Tensor, torch.maximum)
        # It may change what it gets, and return another kind.
        assert comm.all_reduce(x, lambda a, b: a.add_(b)).tolist() == [[9.0] * 3] * 2
        assert x.tolist() == [[mine] * 3] * 2
        assert comm.all_reduce(x, lambda a, b: (a + b).numpy()).tolist() == [[9.0] * 3] * 2
        total = comm.all_reduce(x.clone().requires_grad_(), lambda a, b: a * b)
        assert total.tolist() == [[15.0] * 3] * 2
        for op, text in (
            (lambda a, b: (a + b).double(), "returned float64 for float32"),
            (lambda a, b: (a + b)[0], r"returned the shape \(3,\) for \(2, 3\)"),
            (lambda a, b: None, "returned a value of type NoneType"),
        ):
            with comm.dup() as group, pytest.raises((TypeError, pycoll.PeerFailed), match=text):
                group.all_reduce(x, op)
        from torch.distributed import ReduceOp

        for wrong in (ReduceOp.SUM, ReduceOp, torch.neg, torch.outer):
            with pytest.raises(TypeError):
                comm.all_reduce(x[0], wrong)
        with pytest.raises(TypeError, match=r'op is RedOpType\.SUM: write op="sum"'):
            comm.all_reduce(x, ReduceOp.SUM)
        assert comm.all_reduce(1) == 3

    ranks(program)


@needs_jax
@sizes
def test_a_function_gets_jax_arrays_for_jax_arrays(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import jax
            import jax.numpy as jnp

            seen = set()

            def larger(a: Any, b: Any) -> Any:
                seen.update((isinstance(a, jax.Array), isinstance(b, jax.Array)))
                return jnp.maximum(a, b)

            for dtype in (jnp.float32, jnp.bfloat16, jnp.int32):
                x = jnp.full((2, 3), 2 * comm.rank + 1, dtype)
                for op in (larger, jax.jit(larger), jnp.maximum):
                    got = comm.all_reduce(x, op)
                    assert isinstance(got, jax.Array)
                    assert got.dtype == dtype
                    assert got.tolist() == [[5] * 3] * 2
            with pytest.raises(TypeError, match="two values"):
                comm.all_reduce(x, jax.jit(lambda a: a))
            assert False not in seen

    ranks(program)


def users_frames(exc: BaseException) -> list[str]:
    """The functions of an exception's traceback; none of them may be pycoll's."""
    text = "".join(traceback.format_exception(exc))
    assert SOURCES not in text, text
    return [frame.name for frame in traceback.extract_tb(exc.__traceback__)]


@both_transports
def test_what_an_operator_raises_shows_its_own_frames_and_none_of_pycoll(ranks: Any) -> None:
    def deep(a: Any, b: Any) -> Any:
        raise ZeroDivisionError(f"of the user, on {type(a).__name__}")

    def bad(a: Any, b: Any) -> Any:
        return deep(a, b)

    def program(comm: Comm) -> None:
        x = np.ones(3)
        for call in (
            lambda c: c.all_reduce(x, bad),
            lambda c: c.iall_reduce(x, bad).wait(),
            lambda c: c.persistent.all_reduce(x, bad).start().wait(),
            lambda c: c.all_reduce_many([x, x], bad),
            lambda c: c.iall_reduce_many([x, x], bad).wait(),
            lambda c: c.reduce_scatter(np.ones((3, 2)), bad),
            lambda c: c.reduce_scatterv(x, [1, 1, 1], bad),
            lambda c: c.all_reduce({}, bad),
            lambda c: c.iall_reduce({}, bad).wait(),
        ):
            group = comm.dup()
            with pytest.raises((ZeroDivisionError, pycoll.PeerFailed), match="of the us") as caught:
                call(group)
            group.close()
            frames = users_frames(caught.value)
            assert frames[:2] == ["program", "<lambda>"]
            if isinstance(caught.value, ZeroDivisionError):
                assert frames[2:] == ["bad", "deep"]
                assert any("raised by the operator" in note for note in caught.value.__notes__)
        assert comm.all_reduce(1) == 3

    ranks(program)


@both_transports
def test_an_operator_that_raises_when_all_values_are_there_breaks_nothing(ranks: Any) -> None:
    def bad(a: Any, b: Any) -> Any:
        raise ZeroDivisionError("of the user")

    def program(comm: Comm) -> None:
        calls = [
            lambda: comm.all_reduce("x", bad),
            lambda: comm.all_reduce(1, bad),
            lambda: comm.iall_reduce({1}, bad).wait(),
            lambda: bad(comm.scan("x", bad), 0),  # on rank 0 nothing is combined
            lambda: bad(comm.reduce("x", bad), 0),  # nor off the root
        ]
        if comm._group.shm is not None:
            x, many = np.ones(3), np.ones((3, 2))
            calls += [
                lambda: comm.all_reduce(x, bad, algorithm="shared_memory"),
                lambda: comm.reduce_scatter(many, bad, algorithm="shared_memory"),
            ]
        for call in calls:
            with pytest.raises(ZeroDivisionError, match="of the user"):
                call()
            assert comm.all_reduce(1) == 3
            assert comm.all_reduce(np.ones(2)).tolist() == [3, 3]

    ranks(program)


@both_transports
def test_later_calls_name_the_collective_that_was_given_up(ranks: Any) -> None:
    def bad(a: Any, b: Any) -> Any:
        raise ZeroDivisionError("of the user")

    def wait(request: Any) -> None:
        request.wait()

    def program(comm: Comm) -> None:
        for start in (False, True):
            group = comm.dup(name="dp")
            group.barrier()
            name = "iall_reduce" if start else "all_reduce"
            with pytest.raises((ZeroDivisionError, pycoll.PeerFailed)):
                wait(getattr(group, name)(np.ones(3), bad, algorithm="tree"))
            said = f"gave up {name} #1 on dp (ZeroDivisionError: of the user)"
            for call, *args in ((group.barrier,), (group.all_reduce, 1), (group.send, 1, 0)):
                with pytest.raises(pycoll.PeerFailed) as later:
                    call(*args)
                assert later.value.reason == said
                assert said in str(later.value)
            group.close()
        assert comm.all_reduce(1) == 3

    ranks(program)
