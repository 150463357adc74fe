"""pycoll.mpi4py_like: the methods that libraries call on a communicator of mpi4py's."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import pycoll

Comm = Any


def call_every_method(comm: Comm) -> list[Any]:
    """Two ranks send, rank 0 probes and receives; then all meet."""
    from pycoll import mpi4py_like

    like = mpi4py_like.Comm(comm)
    assert (like.Get_rank(), like.Get_size()) == (like.rank, like.size) == (comm.rank, 3)
    seen: list[Any] = []
    if comm.rank == 0:
        assert not like.Iprobe(source=1, tag=9)
        status = mpi4py_like.Status()
        assert like.Probe(mpi4py_like.ANY_SOURCE, 7, status) is like.probe(tag=7) is True
        seen.append((status.source, status.Get_tag()))
        assert like.Iprobe(source=1, tag=7, status=status) is like.iprobe(1) is True
        seen.append(like.recv(source=1, tag=mpi4py_like.ANY_TAG, status=status))
        seen.append((status.Get_source(), status.tag, status.count(np.uint8)))
        like.send(None, 2, tag=5)
        seen.append(like.recv(source=2))  # of a message that pycoll's own communicator has sent
        seen.append(like.recv(source=pycoll.PROC_NULL, status=status))
        seen.append((status.source, status.tag))
    elif comm.rank == 1:
        like.ssend(np.arange(3.0), 0, 7)
    else:
        assert like.recv(source=0, tag=5) is None
        comm.send("as comm", 0)
    like.Barrier()
    like.barrier()
    whatever = np.zeros(2)  # off root it would be filled by broadcast
    seen.append(like.bcast({"from": 1} if comm.rank == 1 else whatever, root=1))
    assert not whatever.any()
    return seen


@pytest.mark.parametrize("ranks", [3], indirect=True)
def test_a_communicator_like_mpi4pys_has_the_methods_that_libraries_call(ranks: Any) -> None:
    first, *others = ranks(call_every_method)
    array = first.pop(1)
    assert (array == [0, 1, 2]).all()
    nobody = (pycoll.PROC_NULL, pycoll.ANY_TAG)
    assert first == [(1, 7), (1, 7, 24), "as comm", None, nobody, {"from": 1}]
    assert others == [[{"from": 1}]] * 2


def refused(call: Callable[[], Any]) -> str:
    """What is said of a wrong call, whose traceback ends in this file."""
    try:
        call()
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        assert {frame.filename for frame in frames} == {__file__}, frames
        return f"{type(error).__name__}: {error}"
    raise AssertionError("it was taken")


def use_it_wrongly(comm: Comm) -> list[str]:
    import pycoll.mpi4py_like

    mpi4py_like: Any = pycoll.mpi4py_like
    like = mpi4py_like.Comm(comm)
    assert not hasattr(like, "Allreduce")
    said = [
        refused(lambda: like.Allreduce),
        refused(lambda: like.all_reduce),
        refused(lambda: like.recv(0)),
        refused(lambda: like.send(1, 99)),
        refused(lambda: like.recv(source=0, tag="a")),
        refused(lambda: mpi4py_like.Comm(like)),
        refused(lambda: mpi4py_like.Wtime),
    ]
    comm.barrier()
    return said


def stand_in_for_mpi4py(comm: Comm) -> list[str]:
    import importlib.util

    from pycoll import mpi4py_like

    mpi4py_like.stand_in()
    mpi4py_like.stand_in()
    try:
        from mpi4py import MPI

        assert MPI is mpi4py_like
        assert importlib.util.find_spec("mpi4py")
        sys.modules["mpi4py"] = sys  # as if it were another module's
        return [MPI.COMM_WORLD.Get_size(), refused(mpi4py_like.stand_in)]
    finally:
        del sys.modules["mpi4py"]


@pytest.mark.parametrize("ranks", [3], indirect=True)
def test_what_it_has_not_is_told_and_where_pycoll_has_it(ranks: Any) -> None:
    said = ranks(use_it_wrongly)[0]
    expected = [
        "AttributeError: pycoll.mpi4py_like.Comm has no 'Allreduce': .* use comm.all_reduce",
        "AttributeError: .* has no 'all_reduce': pycoll's own communicator has, comm.all_reduce",
        "TypeError: recv takes no buffer: pass source by name, as in recv.source=0.",
        "ValueError: dest .*99",
        "TypeError: tag .*",
        "TypeError: comm is a pycoll.Communicator, such as pycoll.init.., not Comm",
        "AttributeError: pycoll.mpi4py_like has no 'Wtime': use time.perf_counter",
    ]
    for text, pattern in zip(said, expected, strict=True):
        assert re.match(pattern, text), text


@pytest.mark.parametrize("ranks", [3], indirect=True)
def test_libraries_that_import_mpi4py_get_the_stand_in(ranks: Any) -> None:
    for size, said in ranks(stand_in_for_mpi4py):
        assert size == 3
        assert said.startswith("Error: mpi4py is imported already: call stand_in() before")
