"""Words of mpi4py, torch.distributed and NumPy get an error that names ours."""

from __future__ import annotations

import builtins
import importlib.util
import pydoc
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import pycoll
from pycoll._requests import nonblocking
from pycoll._support import foreign_names
from pycoll._support.differing_calls import advice

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
    "reduce_all": "comm.all_reduce",
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


def test_another_librarys_method_names_ours(comm: Any) -> None:
    for name, ours in ATTRIBUTES.items():
        with pytest.raises(AttributeError) as raised:
            getattr(comm, name)
        assert str(raised.value) == f"'Communicator' object has no attribute '{name}': use {ours}"
        assert not hasattr(comm, name)
        assert name not in dir(comm)


COMM_HAS_NOT = {
    "Ishrink": "comm.agree() and comm.shrink() return when all living ranks have come",
    "Shrink": "use comm.shrink",
    "Win_create": "pycoll has no windows (one-sided access)",
    "Spawn": "the ranks of a job are there from its start; pycoll.Pool starts ranks for a script",
    "Neighbor_alltoall": "use comm.isend and comm.irecv, for neighbors in a grid with grid.shift",
    "py2f": "there is no MPI underneath",
    "Set_errhandler": "errors are always raised, as exceptions of Python",
    "Get_name": "use comm.name",
    "Idup": "use comm.dup",
}
PYCOLL_HAS_NOT = {
    "waitall": "use pycoll.wait_all",
    "waitany": "use pycoll.wait_any",
    "SUM": 'use op="sum"',
    "BXOR": 'use op="bxor"',
    "MINLOC": 'use op="minloc"',
    "UNDEFINED": "use color=None",
    "DOUBLE": "an array is sent with its dtype, whatever its strides are",
    "Win": "pycoll has no windows (one-sided access)",
    "Cartcomm": "use pycoll.Grid",
    "explain": "use comm.explain, where comm = pycoll.init()",
}


def test_what_pycoll_has_not_is_said_in_a_line(comm: Any) -> None:
    request, grid = comm.isend(1, 0), comm.grid((1,))
    there_are_not: list[tuple[Any, str, dict[str, str]]] = [
        (comm, "'Communicator' object", COMM_HAS_NOT),
        (pycoll, "module 'pycoll'", PYCOLL_HAS_NOT),
        (request, "'Request' object", {"Get_status": "use test"}),
        (
            grid,
            "'Grid' object",
            {"dims": "use shape", "periods": "use periodic", "Sub": "use axis"},
        ),
        (pycoll.Op, "'Op' object", {"Create": "use pycoll.Op(f, commutative=True)"}),
        (comm.persistent, "'Persistent' object", {"Send": "use comm.persistent.send"}),
        (comm.persistent.recv(0), "'PersistentRequest' object", {"Start": "use start"}),
    ]
    for on, named, said in there_are_not:
        for name, text in said.items():
            with pytest.raises(AttributeError) as raised:
                getattr(on, name)
            assert str(raised.value) == f"{named} has no attribute '{name}': {text}"
            assert not hasattr(on, name)
    for on, named in ((comm, "Communicator"), (request, "Request")):
        with pytest.raises(AttributeError, match=f"^'{named}' object has no attribute 'nonsense'$"):
            _ = on.nonsense
    comm.recv(0)


def test_a_public_module_that_is_not_imported_is_named() -> None:
    for name in foreign_names.SUBMODULES:
        assert importlib.util.find_spec(f"pycoll.{name}") is not None
        assert foreign_names.of_module(name) == f"write import pycoll.{name}"


def test_mpi4pys_methods_of_a_message_name_ours(comm: Any) -> None:
    message = comm.mprobe(pycoll.PROC_NULL)
    for name, ours in {"Recv": "message.recv", "Irecv": "message.irecv"}.items():
        with pytest.raises(AttributeError, match=f"no attribute '{name}': use {ours}$"):
            getattr(message, name)


def test_every_foreign_word_leads_to_something_that_there_is(comm: Any) -> None:
    grid, request = comm.grid((1,)), comm.persistent.barrier()
    status = pycoll.Status()
    absent = {
        comm: foreign_names.ABSENT_FROM_COMMUNICATORS,
        request: foreign_names.ABSENT_FROM_REQUESTS,
        pycoll: foreign_names.ABSENT_FROM_PYCOLL,
    }
    for there, names in absent.items():
        assert [name for name in names if hasattr(there, name)] == []
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
    persistent = dir(nonblocking.Persistent)  # without foreign words
    methods = {name.removeprefix("i") for name in persistent if name[0] != "_"}
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


def test_another_librarys_keyword_names_ours(comm: Any) -> None:
    for text, call in KEYWORDS:
        with pytest.raises(TypeError) as raised:
            call(comm)
        assert text in str(raised.value)


class InPlaceType(int):
    """As mpi4py's."""


class Datatype:
    """As mpi4py's, which can be pickled."""

    __module__ = "mpi4py.MPI"


Y, IN_PLACE, STATUS = np.ones(4), InPlaceType(-1), pycoll.Status()
FILLED = "is an array. The array to fill is called out: "
IN_PLACE_TEXT = "in place, x and out are the same array: "

HALF_PORTED: list[tuple[Callable[[Any], Any], str]] = [
    (lambda c: c.recv(Y), f"source {FILLED}comm.recv(source, tag, out=y)"),
    (lambda c: c.recv(Y, 0), f"source {FILLED}comm.recv(source, tag, out=y)"),
    (lambda c: c.recv(Y, source=0), f"source {FILLED}comm.recv(source, tag, out=y)"),
    (lambda c: c.irecv(Y, source=0), f"source {FILLED}comm.irecv(source, tag, out=y)"),
    (lambda c: c.persistent.recv([Y, 4, "d"], 0), "comm.persistent.recv(source, tag, out=y)"),
    (lambda c: c.sendrecv(Y, 0, 0, Y), f"sendtag {FILLED}comm.sendrecv(x, dest, source, out=y)"),
    (lambda c: c.all_reduce(Y, Y), f"op {FILLED}comm.all_reduce(x, op, out=y)"),
    (lambda c: c.all_reduce(Y, Y, "sum"), f"op {FILLED}comm.all_reduce(x, op, out=y)"),
    (lambda c: c.iall_reduce(Y, Y, op="sum"), f"op {FILLED}comm.iall_reduce(x, op, out=y)"),
    (lambda c: c.all_reduce(memoryview(Y), memoryview(Y)), f"op {FILLED}comm.all_reduce(x"),
    (lambda c: c.reduce(Y, Y, "sum", 0), f"op {FILLED}comm.reduce(x, op, root, out=y)"),
    (lambda c: c.scatter(Y, Y), f"root {FILLED}comm.scatter(x, root, out=y)"),
    (lambda c: c.gather(Y, Y, root=0), f"root {FILLED}comm.gather(x, root, out=y)"),
    (lambda c: c.gatherv(Y, [Y, [4]]), f"root {FILLED}comm.gatherv(x, root, out=y)"),
    (lambda c: c.all_reduce(IN_PLACE, Y), f"{IN_PLACE_TEXT}comm.all_reduce(y, op, out=y)"),
    (lambda c: c.all_gather(IN_PLACE, Y), f"{IN_PLACE_TEXT}comm.all_gather(y[comm.rank], out=y)"),
    (lambda c: c.probe(0, 0, STATUS), "probe returns a Status, as in status = comm.probe(source"),
    (lambda c: c.iprobe(status=STATUS), "iprobe returns a Status, as in status = comm.iprobe("),
    (lambda c: c.mprobe(0, 0, STATUS), "mprobe returns a Message, whose Status is message.status"),
    (
        lambda c: c.recv(0, 0, STATUS),
        "a Status is passed by its name: comm.recv(..., status=status)",
    ),
    (lambda c: c.recv(None, 0, 0, STATUS), "source is None. The array to fill is called out: comm"),
    (lambda c: pycoll.compute_dims(4, [0, 0]), "not a list: write 2"),
    (lambda c: pycoll.compute_dims(4, [2, 0]), "divide n by the lengths that are given"),
    (lambda c: pycoll.wait_all(c.ibarrier()), "not a Request. For one: request.wait()"),
    (lambda c: pycoll.test_all(c.iall_reduce(Y)), "not a Request. For one: request.test()"),
    (lambda c: c.grid((1,)).shift(direction=0, disp=1), "'direction': use axis"),
    (lambda c: c.grid((1,)).shift(0, disp=1), "'disp': use n"),
    (lambda c: c.grid((1,)).axis([True]), "not a list: grid.axis(0)"),
    (lambda c: c.grid((1,), [True]), "not a bool: write periodic="),
    (lambda c: c.grid((1,), reorder=True), "leave it out: ranks keep their numbers"),
    (lambda c: c.all_reduce([Y, Datatype()]), "For one array pass the array itself"),
]


def test_calls_in_mpi4pys_order_say_how_they_are_written(comm: Any) -> None:
    for number, (call, text) in enumerate(HALF_PORTED):
        with pytest.raises((TypeError, ValueError)) as raised:
            call(comm)
        assert text in str(raised.value), (number, str(raised.value))
        assert "\n" not in str(raised.value)


def test_mpi4pys_list_of_array_count_and_type_is_refused_before_it_is_sent(comm: Any) -> None:
    comm = comm.dup()  # without what other tests have sent
    for form in ([Y, 4, "d"], [Y, (4, 0), "f8"], [Y, None, np.float64(0), "d"], [Y, Datatype()]):
        for send in (comm.send, comm.isend, comm.broadcast, comm.gather, comm.persistent.send):
            with pytest.raises(TypeError, match=r"this list is mpi4py's \[array, count, type\]: p"):
                send(form, 0)
    assert comm.iprobe() is None
    for other in ([Y, "d"], [Y, 4, "i"], [Y, 4, "a label"], (Y, 4, "d"), [Y, Y, 4, 5, "d"]):
        assert len(comm.broadcast(other)) == len(other)


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
    ("all_reduce(int, op=sum)", "all_reduce(float64[], op=sum)", "example float(x)."),
    ("all_reduce(bool[], op=sum)", "all_reduce(int, op=sum)", "example int(x)."),
    ("all_reduce(int, op=sum)", "all_reduce(float64[2], op=sum)", "a number, the other an array:"),
    ("all_gatherv(int32) at a.py:1", "all_gatherv(int8) at a.py:1", 'x.astype("int64").'),
    ("scan(complex64[3], op=sum)", "scan(float64[3], op=sum)", 'x.astype("complex128").'),
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
