"""Words of mpi4py, torch.distributed and NumPy get an error that names ours."""

from __future__ import annotations

import builtins
import pydoc
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import pycoll
from pycoll._requests import nonblocking
from pycoll._support import foreign_names
from pycoll._support.foreign_names import advice

ATTRIBUTES = {
    "bcast": "comm.broadcast",
    "Bcast": "comm.broadcast",
    "Get_rank": "comm.rank",
    "Get_size": "comm.size",
    "Barrier": "comm.barrier",
    "allgather": "comm.all_gather",
    "Allgatherv": "comm.all_gatherv",
    "Allreduce": "comm.all_reduce",
    "alltoall": "comm.all_to_all",
    "Reduce_scatter": "comm.reduce_scatter",
    "Isend": "comm.isend",
    "Iallreduce": "comm.iall_reduce",
    "Mprobe": "comm.mprobe",
    "Bsend": "comm.bsend",
    "Ibsend": "comm.ibsend",
    "Bsend_init": "comm.persistent.bsend",
    "Improbe": "comm.improbe",
    "Send_init": "comm.persistent.send",
    "Allreduce_init": "comm.persistent.all_reduce",
    "Sendrecv": "comm.sendrecv",
    "Split": "comm.split",
    "Create_cart": "comm.grid",
    "get_world_size": "comm.size",
    "all_gather_into_tensor": "comm.all_gather",
    "new_group": "comm.sub",
}

KEYWORDS: list[tuple[str, Callable[[Any], Any]]] = [
    ("'src': use source", lambda comm: comm.recv(src=0)),
    ("'src': use root", lambda comm: comm.broadcast(1, src=0)),
    ("'dst': use dest", lambda comm: comm.isend(1, dst=0)),
    ("'dst': use root", lambda comm: comm.reduce(1, dst=0)),
    ("'sendobj': use x", lambda comm: comm.gather(sendobj=1)),
    ("'sendbuf': use x", lambda comm: comm.all_reduce(sendbuf=1)),
    ("'recvbuf': use out", lambda comm: comm.all_reduce(1, recvbuf=1)),
    ("use comm.iall_reduce, which returns", lambda comm: comm.all_reduce(1, async_op=True)),
    ("which comm.split or comm.sub made", lambda comm: comm.all_reduce(1, group=None)),
    ("'algoritm': use algorithm", lambda comm: comm.persistent.reduce(1, algoritm="ring")),
    ("'quick': there are x, root", lambda comm: comm.broadcast(1, quick=True)),
]


class ReduceOp:
    """As torch's: an object that shows itself as ``RedOpType.SUM``."""

    def __str__(self) -> str:
        return "RedOpType.AVG"


class MpiOp:
    """As mpi4py's: an object with a name that can be called."""

    __module__ = "mpi4py.MPI"
    name = "MPI_LXOR"

    def __call__(self, a: Any, b: Any) -> Any:
        return a


OPERATORS: list[tuple[str, Any]] = [
    ("avg", "mean"),
    ("sum", "SUM"),
    ("sum", "smu"),
    ("maxloc", "argmax"),
    ("minloc", "argmin"),
    ("prod", "product"),
    ("sum", sum),
    ("lor", any),
    ("max", max),
    ("sum", np.add),
    ("max", np.maximum),
    ("band", np.bitwise_and),
    ("avg", ReduceOp()),
    ("lxor", MpiOp()),
]


@pytest.fixture
def comm() -> Any:
    return pycoll.init()


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_another_librarys_method_names_ours(comm: Any, name: str) -> None:
    with pytest.raises(AttributeError) as raised:
        getattr(comm, name)
    assert str(raised.value).endswith(f"no attribute '{name}': use {ATTRIBUTES[name]}")
    assert not hasattr(comm, name)
    assert name not in dir(comm)


def test_mpi4pys_methods_of_a_message_name_ours(comm: Any) -> None:
    message = comm.mprobe(pycoll.PROC_NULL)
    for name, ours in {"Recv": "message.recv", "Irecv": "message.irecv"}.items():
        with pytest.raises(AttributeError, match=f"no attribute '{name}': use {ours}$"):
            getattr(message, name)


def test_every_foreign_word_leads_to_something_that_there_is(comm: Any) -> None:
    grid, request = comm.grid((1,)), comm.persistent.barrier()
    status = pycoll.Status()
    tables = {
        comm: foreign_names.OF_COMMUNICATORS,
        grid: foreign_names.OF_GRIDS,
        request: foreign_names.OF_REQUESTS,
    }
    for known, table in tables.items():
        for name, ours in table.items():
            target = pycoll if ours.startswith("pycoll.") else known
            assert getattr(target, ours.removeprefix("pycoll.").split(".")[0]) is not None
            assert not hasattr(known, name), name
    assert not any(hasattr(status, name) for name in foreign_names.OF_STATUSES)
    assert not any(hasattr(pycoll, name) for name in foreign_names.OF_PYCOLL)


def test_methods_named_on_the_module_lead_to_the_communicator(comm: Any) -> None:
    methods = {name.removeprefix("i") for name in vars(nonblocking.Persistent) if name[0] != "_"}
    assert methods <= set(foreign_names.METHODS)
    for name in foreign_names.METHODS:
        assert hasattr(comm, name)
        with pytest.raises(AttributeError, match=rf"use comm\.{name}, where comm = pycoll.init"):
            getattr(pycoll, name)
    with pytest.raises(AttributeError, match=r"use comm\.size, where"):
        _ = pycoll.get_world_size
    with pytest.raises(AttributeError, match=r"no attribute 'nonsense'$"):
        _ = pycoll.nonsense


def test_help_and_completion_do_not_show_foreign_words(comm: Any) -> None:
    text = pydoc.plain(pydoc.render_doc(pycoll.Communicator))
    assert "all_reduce" in text
    assert "Allreduce" not in text
    assert "bcast" not in dir(pycoll.Communicator)


@pytest.mark.parametrize(("text", "call"), KEYWORDS, ids=[text for text, _ in KEYWORDS])
def test_another_librarys_keyword_names_ours(comm: Any, text: str, call: Any) -> None:
    with pytest.raises(TypeError) as raised:
        call(comm)
    assert text in str(raised.value)


@pytest.mark.parametrize(("ours", "op"), OPERATORS, ids=lambda value: str(value)[:30])
def test_another_librarys_operator_names_ours(comm: Any, ours: str, op: Any) -> None:
    for reduce in (comm.all_reduce, comm.ireduce, comm.persistent.scan):
        with pytest.raises((TypeError, ValueError), match=f'write op="{ours}"'):
            reduce(np.ones(3), op)


def test_functions_that_can_be_operators_are(comm: Any) -> None:
    assert comm.all_reduce("text", builtins.max) == "text"
    assert comm.all_reduce(np.ones(3), pycoll.Op(np.add, elementwise=True)).tolist() == [1, 1, 1]
    assert comm.all_reduce(2, max) == 2


def test_arrays_of_python_objects_say_what_they_are(comm: Any) -> None:
    x = np.array([None, "text"])
    for reduce in (comm.all_reduce, comm.reduce, comm.scan):
        with pytest.raises(TypeError, match=r"an array of object.*as a Python object.*astype"):
            reduce(x)
    with pytest.raises(TypeError, match="ndarray of Python objects"):
        comm.reduce_scatter(x)
    with pytest.raises(TypeError, match="ndarray of Python objects"):
        comm.all_reduce(np.ones(2), out=x)
    assert [list(row) for row in comm.all_gather(x)] == [[None, "text"]]


def test_blocks_that_cannot_be_split_evenly_name_the_call_for_uneven_ones(comm: Any) -> None:
    for name in ("scatter", "reduce_scatter", "all_to_all"):
        with pytest.raises(ValueError, match=rf"rank axis.*comm\.{name}v\("):
            getattr(comm, name)(np.arange(10))


WAYS = pytest.mark.parametrize(
    "ranks",
    [2, (2, ("--transport", "tcp")), (2, ("--emulate-hosts", "2"))],
    indirect=True,
    scope="module",
)


@WAYS
def test_gathering_different_shapes_names_the_call_that_can(ranks: Any) -> None:
    def program(comm: Any) -> None:
        for name in ("gather", "all_gather"):
            for algorithm in (None, "linear"):
                with comm.dup() as broken:
                    with pytest.raises(pycoll.MismatchError) as raised:  # noqa: PT012
                        getattr(broken, name)(np.ones(2 + comm.rank), algorithm=algorithm)
                        broken.barrier()
                    assert f"comm.{name}v(x)" in str(raised.value), str(raised.value)
        with comm.dup() as broken, pytest.raises(pycoll.MismatchError, match="dtypes"):
            broken.all_gather(np.ones(3, "f4" if comm.rank else "f8"))

    ranks(program)


ADVICE = [
    ("all_reduce(float64[], op=sum)", "all_reduce(int64[], op=sum)", "example float(x)."),
    ("reduce(float64[3], root=0)", "reduce(float32[3], root=0)", 'x.astype("float64").'),
    ("gather(<U1[1], root=0) at a.py:3", "gather(<U2[1], root=0)", "dtype on all ranks."),
    ("gather(float64[], root=0)", "gather(object, root=0)", "Pass an array or a number on all"),
    ("scan(float64[3], op=sum)", "scan(float64[4], op=sum)", "arrays of one shape"),
    ("iall_gather(int8[3]) at a.py:1", "iall_gather(int8[4]) at b.py:2", "comm.all_gatherv(x)"),
    ("gather(root=0) at a.py:3", "gather(root=0) at a.py:3", "differs in dtype or shape"),
    ("gather(int8[3], root=0)", "gather(int8[3], root=1)", "same root on all ranks, in the same"),
    ("scatter(root=0) at a.py:3", "scatter(root=1)", "same root on all ranks"),
    ("all_reduce(int8[3], op=sum)", "all_reduce(int8[3], op=max)", "same op on all ranks"),
    ("scan(int8[3], op=sum)", "scan(int8[4], op=max)", "the same calls in the same order on"),
    ("iscan(int8[3], op=sum)", "scan(int8[3], op=sum) at a.py:2", "iscan on all"),
    ("barrier()", "gather(int8[3], root=1)", "same order"),
    ("barrier()", "another collective", "same order"),
]


@pytest.mark.parametrize(("mine", "theirs", "text"), ADVICE)
def test_different_calls_are_told_what_to_change(mine: str, theirs: str, text: str) -> None:
    assert text in advice(mine, theirs)
    assert text in advice(theirs, mine)


@WAYS
def test_texts_of_different_lengths_do_not_look_alike(ranks: Any) -> None:
    def program(comm: Any) -> None:
        x = np.array(["ab"] if comm.rank else ["c", "d"])
        for name in ("gather", "all_gather"):
            differ = pytest.raises(pycoll.MismatchError, match="The dtypes differ")
            with comm.dup() as broken, differ:
                getattr(broken, name)(x)
                broken.barrier()

    ranks(program)


def test_what_is_imported_by_a_foreign_word_is_told_ours() -> None:
    for name, ours in (("MPI", "pycoll.init()"), ("all_reduce", "comm.all_reduce")):
        with pytest.raises(ImportError, match=re.escape(ours)):
            exec(f"from pycoll import {name}")
        assert not hasattr(pycoll, name)
    with pytest.raises(ImportError, match="cannot import name 'nonsense' from 'pycoll'"):
        exec("from pycoll import nonsense")


def test_run_says_where_arguments_stand() -> None:
    run: Any = pycoll.run
    for keyword in ("args", "k"):
        with pytest.raises(TypeError, match=r"pycoll.run\(fn, n, x, y\)"):
            run(print, 2, **{keyword: 3})
    with pytest.raises(TypeError, match="'nprocs': use n"):
        run(print, nprocs=2)


@WAYS
def test_a_communicator_that_is_sent_is_named(ranks: Any) -> None:
    def program(comm: Any) -> None:
        with pytest.raises(TypeError, match=r"a communicator cannot be pickled: .* comm\.rank"):
            comm.gather(lambda x: x + comm.rank)

    ranks(program)
