"""Whatever is passed to a public function, what it says of that shows no frame of pycoll.

Each parameter of each function gets each of many values that make no sense, the others what does. A
value may be accepted, as any object is that can be sent; then nothing is said.
"""

from __future__ import annotations

import functools
import importlib.util
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pycoll
from pycoll import PROC_NULL, schedules, simulate

SOURCES = tuple(
    str(Path(pycoll.__file__).parent.joinpath(*f).resolve()) for f in ((), ("_launcher",))
)


class Odd:
    """Nothing that pycoll knows."""


WRONG: tuple[Any, ...] = (
    *(Odd(), Odd, "1M", "all_reduce", b"x", -1, -1.5, None, True, 1j, float("nan"), 10**30, 2**63),
    *([], {}, (), [1, "a"], [None], {1: 2}, np.float64(2.5), np.ones(3), np.array(["a"])),
    lambda: 1,
)

X, ROWS = np.ones(3), np.ones((1, 3))
SUM = {"op": "sum", "out": None, "algorithm": None}
MOVE = {"out": None, "algorithm": None}

# Of each method what is right; also of its twin and its persistent form, if it has those.
METHODS: dict[str, dict[str, Any]] = {
    "broadcast": {"x": X, "root": 0, "algorithm": None},
    "reduce": {"x": X, "root": 0, **SUM},
    "all_reduce": {"x": X, **SUM},
    "all_reduce_many": {"xs": [X], **SUM},
    "gather": {"x": X, "root": 0, **MOVE},
    "all_gather": {"x": X, **MOVE},
    "scatter": {"x": ROWS, "root": 0, **MOVE},
    "reduce_scatter": {"x": ROWS, **SUM},
    "all_to_all": {"x": ROWS, **MOVE},
    "scan": {"x": X, **SUM},
    "exscan": {"x": X, **SUM},
    "barrier": {"algorithm": None},
    "gatherv": {"x": X, "root": 0, "out": None},
    "all_gatherv": {"x": X, "out": None},
    "scatterv": {"xs": [X], "root": 0, "out": None},
    "all_to_allv": {"xs": [X], "out": None},
    "reduce_scatterv": {"x": X, "counts": [3], **SUM},
    "send": {"x": X, "dest": 0, "tag": 0},
    "ssend": {"x": X, "dest": PROC_NULL, "tag": 0},
    "bsend": {"x": X, "dest": 0, "tag": 0},
    "recv": {"source": PROC_NULL, "tag": 0, "out": None, "status": None},
    "sendrecv": {"x": X, "dest": 0, "source": 0, "sendtag": 0, "recvtag": 0, "out": None},
}

# Numbers of these are work to be done: large ones are no mistake.
WORK = {"size", "max_size", "n", "ndims", "segments", "window", "minimum", "shape"}


def calls(comm: pycoll.Communicator) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Every public function with what is right for it."""
    within = {"timeout": 20.0}
    found: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {}
    for name, right in METHODS.items():
        found[name] = getattr(comm, name), right | within
        for label, on, twin in (
            ("", comm, f"i{name}"),
            ("persistent.", comm.persistent, name),
        ):
            if hasattr(on, twin):
                found[label + twin] = getattr(on, twin), right
    grid = comm.grid((1, 1), names=("dp", "tp"))
    done = comm.ibarrier()
    done.wait()
    ring = schedules.find("all_reduce", "ring")
    any_message = {"source": PROC_NULL, "tag": 0}
    named = {"name": None}

    def register(collective: Any, name: Any, **more: Any) -> None:
        pycoll.register_algorithm(collective, name, **more)(lambda rank, size: ())
        del schedules.TABLE[collective][name]

    def take(message: Any) -> None:
        if message is not None:
            message.recv()

    found |= {
        "probe": (comm.probe, any_message | within),
        "iprobe": (comm.iprobe, any_message),
        "mprobe": (lambda **given: take(comm.mprobe(**given)), any_message | within),
        "improbe": (lambda **given: take(comm.improbe(**given)), any_message),
        "split": (comm.split, {"color": 0, "key": 0} | named | within),
        "split_by_host": (comm.split_by_host, within),
        "dup": (comm.dup, named | within),
        "agree": (comm.agree, {"flag": True} | within),
        "shrink": (comm.shrink, named | within),
        "sub": (comm.sub, {"ranks": [0], "key": None} | named),
        "grid": (comm.grid, {"shape": (1,), "names": None, "periodic": False} | named | within),
        "share": (comm.share, {"x": X} | within),
        "explain": (
            comm.explain,
            {"collective": "all_reduce", "nbytes": 8, "op": "sum", "blocking": True, "dtype": None},
        ),
        "grid.axis": (lambda axis: grid.axis(axis), {"axis": "dp"}),
        "grid.shift": (grid.shift, {"axis": "dp", "n": 1}),
        "grid.rank_at": (grid.rank_at, {"coords": (0, 0)}),
        "grid.coords_of": (grid.coords_of, {"rank": 0}),
        "wait": (lambda timeout: comm.ibarrier().wait(timeout), within),
        "cancel": (lambda more: comm.ibarrier().cancel(more), {"more": 1}),
        "wait_all": (pycoll.wait_all, {"requests": [done]} | within),
        "wait_any": (pycoll.wait_any, {"requests": [comm.ibarrier()]} | within),
        "wait_some": (pycoll.wait_some, {"requests": [comm.ibarrier()]} | within),
        "test_all": (pycoll.test_all, {"requests": [done]}),
        "init": (pycoll.init, {"timeout": 300.0, "op_timeout": None, "transport": None}),
        "join": (
            lambda **given: pycoll.join(**given).close(),
            {"rank": 0, "size": 1, "share": print, "timeout": 300.0}
            | {"op_timeout": None, "transport": None, "name": "world"},
        ),
        "Op": (pycoll.Op, {"fn": max, "commutative": True, "elementwise": False}),
        "algorithms": (pycoll.algorithms, {"collective": "all_reduce"}),
        "prove": (pycoll.prove, {"collective": "all_reduce", "name": "ring", "max_size": 2}),
        "register_algorithm": (
            register,
            {"collective": "gather", "name": "x1", "chunks": None, "rank_order": False},
        ),
        "compute_dims": (pycoll.compute_dims, {"n": 4, "ndims": 2}),
        "empty": (pycoll.empty, {"shape": 3, "dtype": float}),
        "zeros": (pycoll.zeros, {"shape": 3, "dtype": float}),
        "empty_like": (pycoll.empty_like, {"prototype": X, "dtype": None}),
        "share_arrays": (pycoll.share_arrays, {"minimum": 65536}),
        "Status.count": (pycoll.Status(nbytes=8).count, {"dtype": "f8"}),
        "run": (pycoll.run, {"fn": max, "n": 0, "timeout": 1.0, "transport": "tcp"}),
        "simulate": (
            simulate.simulate,
            {"collective": "all_reduce", "name": "ring", "size": 2, "nbytes": 8, "segments": 1}
            | {"root": 0, "hosts": None, "network": simulate.ONE_HOST, "window": 16},
        ),
        "schedules.names": (schedules.names, {"collective": "all_reduce"}),
        "schedules.find": (schedules.find, {"collective": "all_reduce", "name": "ring"}),
        "schedules.schedule": (
            schedules.schedule,
            {"collective": "broadcast", "name": "chain", "rank": 0, "size": 2, "root": 0},
        ),
        "schedules.cost_of": (schedules.cost_of, {"algorithm": ring, "size": 4, "root": 0}),
        "schedules.steps_of": (
            schedules.steps_of,
            {"algorithm": ring, "rank": 0, "size": 4, "root": 0},
        ),
    }
    return found


EXPECTED = (TypeError, ValueError, OverflowError, AttributeError, MemoryError, pycoll.Error)


def said_of(call: Callable[..., Any], arguments: dict[str, Any], *more: Any) -> str | None:
    """What is wrong with what is said of the arguments; None: nothing, or they are accepted."""
    try:
        call(*more, **arguments)
    except EXPECTED as exc:
        text = "".join(traceback.format_exception(exc))
        return text if any(source in text for source in SOURCES) else None
    except Exception as exc:
        return "".join(traceback.format_exception(exc))
    return None


def check(name: str, call: Callable[..., Any], right: dict[str, Any]) -> None:
    """Pass what is wrong for each parameter, and other parameters."""
    for parameter in right:
        for wrong in WRONG:
            if parameter in WORK and isinstance(wrong, int) and wrong > 1:
                continue
            text = said_of(call, right | {parameter: wrong})
            assert text is None, f"{name}({parameter}={wrong!r}):\n{text}"
    for text in (
        said_of(call, right | {"colour": 1}),
        said_of(call, {}, *range(12)),
        said_of(call, {"x": X, "y": 1}),
    ):
        assert text is None, f"{name}, other parameters:\n{text}"


def test_what_is_said_of_a_wrong_argument_shows_no_frame_of_pycoll() -> None:
    with pycoll.init().dup() as comm:
        for name, (call, right) in calls(comm).items():
            check(name, call, right)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda comm: comm.explain("all_reduce", 8, dtype="float33"), "not 'float33'"),
        (lambda comm: comm.explain("all_reduce", 8, algorithm="ring"), "PYCOLL_ALGORITHM"),
        (lambda comm: comm.explain("all_reduce", "1M"), "1 MiB is 1 << 20"),
        (lambda comm: simulate.simulate("all_reduce", "ring", 4, "1M"), "1 MiB is 1 << 20"),
        (lambda comm: simulate.simulate("all_reduce", "ring", 4, 8, network="fast"), "Network"),
        (lambda comm: schedules.cost_of("all_reduce", 4), "pycoll.schedules.find"),
        (lambda comm: pycoll.init("gloo"), "No backend is chosen here: .* transport="),
        (lambda comm: comm.all_reduce_many([X, None]), "item 1 is None: a parameter without"),
        (lambda comm: comm.all_reduce_many([X, "x"]), "item 1: cannot reduce a value of type str"),
        (lambda comm: comm.all_reduce(X, np.maximum), r'numpy\.maximum: write op="max"\.$'),
        (lambda comm: comm.all_reduce(1, "avg"), r"on an int: .* or bools .* as float\(x\) or"),
        (lambda comm: comm.iall_reduce(1, "avg"), r"on an int: .* or bools .* as float\(x\) or"),
        (lambda comm: comm.scan(True, "avg"), r"on a bool: .* or bools .* as float\(x\) or"),
        (lambda comm: comm.reduce(1.5, "band"), "on a float: bitwise operators need integers"),
        (lambda comm: comm.reduce(1j, "max"), "on a complex: complex numbers have no order"),
        (lambda comm: comm.all_reduce((1, 2)), r"a tuple by \"sum\"\. .* pass numpy\.array\(x\)"),
        (lambda comm: comm.exscan((1.0, 2), "max"), r"a tuple by \"max\"\. .* numpy\.array\(x\)"),
        (lambda comm: comm.reduce_scatter([1]), r"not a list\. .* pass numpy\.array\(x\)"),
        (lambda comm: comm.reduce_scatter(1), r"not an int\. For a number .* comm\.all_reduce"),
        (lambda comm: comm.reduce_scatterv(1, [1]), r"not an int\. For a number .*all_reduce"),
        (lambda comm: comm.reduce_scatter(None), r"\(size, \.\.\.\), not None\.$"),
        (lambda comm: comm.send((i for i in "ab"), 0), r"cannot pickle .*\. Send list\(x\)\.$"),
        (lambda comm: comm.all_reduce_many(x for x in [X]), r"a generator\. Write list\(xs\)\."),
        (lambda comm: comm.all_reduce_many({"w": X}), r"Write list\(xs\.values\(\)\)\."),
        (lambda comm: comm.all_reduce_many(X), "For one array use all_reduce"),
        (lambda comm: comm.all_gather([X], X), r"all_gather\(t\) returns them all"),
    ],
)
def test_a_wrong_argument_names_what_to_write(call: Callable[[Any], Any], text: str) -> None:
    with pytest.raises(TypeError, match=text) as caught:
        call(pycoll.init())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["DistributedDataParallel", "DDP", "FSDP"])
def test_words_of_pytorchs_training_are_answered(name: str) -> None:
    with pytest.raises(
        AttributeError, match=r"use PyTorch's, after .*init_process_group\('pycoll'\)"
    ):
        getattr(pycoll, name)
    with pytest.raises(ImportError, match=r"comm\.all_reduce_many"):
        exec(f"from pycoll import {name}")


@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="PyTorch is not installed")
def test_torch_vmap_is_named_where_a_tensor_stands_for_many() -> None:
    import torch

    comm = pycoll.init()
    with pytest.raises(TypeError, match=r"inside torch\.vmap cannot be sent: it stands for many"):
        torch.vmap(comm.all_reduce)(torch.ones(3))


@pytest.mark.skipif(not importlib.util.find_spec("jax"), reason="JAX is not installed")
@pytest.mark.filterwarnings("ignore")
def test_jax_is_called_back_inside_jit_and_refused_else() -> None:
    import jax
    from jax.experimental import io_callback

    comm = pycoll.init()
    x = jax.numpy.ones(3)
    for transform in (jax.jit, jax.vmap, jax.grad):
        with pytest.raises(TypeError, match="inside jit, vmap or grad a JAX array has no value"):
            transform(comm.all_reduce)(x[0] if transform is jax.grad else x)
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    for call in (jax.pure_callback, functools.partial(io_callback, ordered=True)):
        total = jax.jit(lambda x, call=call: call(comm.all_reduce, like, x) + 1)(x)
        assert total.tolist() == [2, 2, 2]
