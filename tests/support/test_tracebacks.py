"""The traceback of a wrong argument ends at the caller's line; that of a fault shows everything."""

from __future__ import annotations

import functools
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pycoll
from pycoll._support import public_edge

SOURCES = tuple(
    str(Path(pycoll.__file__).parent.joinpath(*f).resolve()) for f in ((), ("_launcher",))
)

WAITS: dict[str, Callable[[Any], Any]] = {
    "recv": lambda comm: comm.recv(0),
    "recv with a deadline": lambda comm: comm.recv(0, timeout=50),
    "recv into an array": lambda comm: comm.recv(0, out=np.empty(3)),
    "probe": lambda comm: comm.probe(0),
    "ssend": lambda comm: comm.ssend(np.ones(3), 0),
}

# Arguments that are wrong in each method with a twin, by name.
WRONG: dict[str, dict[str, Any]] = {
    "barrier": {"algorithm": "quick"},
    "broadcast": {"x": 1, "root": -1},
    "reduce": {"x": 1, "op": "smu"},
    "all_reduce": {"x": None},
    "allreduce": {"x": 1, "out": [0]},
    "all_reduce_many": {"xs": 5},
    "gather": {"x": np.ones(3), "root": 1.5},
    "all_gather": {"x": np.ones(3), "out": np.ones(3)},
    "scatter": {"x": None, "root": 99},
    "reduce_scatter": {"x": np.ones(7)},
    "all_to_all": {"x": 5},
    "scan": {"x": 1, "op": 5},
    "exscan": {"x": 1, "op": sum},
    "gatherv": {"x": "text"},
    "all_gatherv": {"x": None},
    "scatterv": {"xs": None, "root": 99},
    "all_to_allv": {"xs": [1]},
    "reduce_scatterv": {"x": np.ones(3), "counts": 5},
    "send": {"x": 1, "dest": 99},
    "recv": {"source": "0"},
    "sendrecv": {"x": 1, "dest": 0, "recvtag": -7},
}

OTHERS: dict[str, Callable[[Any], Any]] = {
    "split": lambda comm: comm.split("red"),
    "sub": lambda comm: comm.sub([99]),
    "grid": lambda comm: comm.grid((comm.size, 7)),
    "axes of a grid": lambda comm: comm.grid((comm.size,)).axis("row"),
    "coordinates": lambda comm: comm.grid((comm.size,)).rank_at(5),
    "dup": lambda comm: comm.dup(timeout=-1),
    "probe": lambda comm: comm.probe(tag=-7),
    "iprobe": lambda comm: comm.iprobe(99),
    "explain": lambda comm: comm.explain("all_reduction"),
    "abort": lambda comm: comm.abort("now"),
    "what cannot be pickled": lambda comm: comm.gather(i for i in ()),
    "timeout": lambda comm: comm.all_reduce(1, timeout="soon"),
    "too many": lambda comm: comm.send(1, 2, 3, 4),
    "unknown keyword": lambda comm: comm.recv(src=0),
    "wait": lambda comm: comm.ibarrier().wait("soon"),
    "cancel": lambda comm: comm.ibarrier().cancel(1),
    "wait_all": lambda comm: pycoll.wait_all([1]),
    "wait_some": lambda comm: pycoll.wait_some([]),
    "init": lambda comm: pycoll.init(timeout=1.0),
    "an Op": lambda comm: pycoll.Op(5),
    "an Op of nothing": lambda comm: pycoll.Op(),
    "run": lambda comm: pycoll.run(5, 2),
    "algorithms": lambda comm: pycoll.algorithms("x"),
    "prove": lambda comm: pycoll.prove("all_reduce", "x"),
    "register_algorithm": lambda comm: pycoll.register_algorithm("x", "y"),
    "an attribute": lambda comm: comm.bcast(1),
    "an attribute of the module": lambda comm: pycoll.all_reduce(1),
    "scatter": lambda comm: comm.scatter(np.ones(7), root=comm.rank),
    "scatter, out": lambda comm: comm.scatter(np.ones((2, 3)), comm.rank, out=np.ones(4)),
}


def shown_frames(call: Callable[[], Any]) -> tuple[list[str], str]:
    """The functions in the printed traceback of a call that fails, pycoll's files marked."""
    try:
        call()
    except (TypeError, ValueError, AttributeError) as exc:
        text = "".join(traceback.format_exception(exc))
        frames = traceback.extract_tb(exc.__traceback__)[1:]
        return [frame.name for frame in frames], text
    raise AssertionError("the call was accepted")


@pytest.mark.parametrize(
    "ranks", [2, (2, ("--transport", "tcp"))], indirect=True, scope="module", ids=["shm", "tcp"]
)
def test_a_wrong_argument_shows_no_frame_of_pycoll(ranks: Any) -> None:
    def program(comm: Any) -> None:
        calls = {
            f"{on} {prefix}{name}": functools.partial(getattr(on, prefix + name), **wrong)
            for name, wrong in WRONG.items()
            for on, prefix in ((comm, ""), (comm, "i"), (comm.persistent, ""))
        }
        calls |= {name: lambda call=call: call(comm) for name, call in OTHERS.items()}
        for name, call in calls.items():
            try:
                frames, text = shown_frames(call)
                assert set(frames) <= {"<lambda>", "<genexpr>"}
                assert not any(source in text for source in SOURCES), text
            except BaseException as exc:
                exc.add_note(f"of {name}")
                raise
        assert comm.all_reduce(1) == comm.size

    ranks(program)


def test_an_exception_of_the_users_own_function_keeps_its_frames() -> None:
    class Unwilling:
        def __reduce__(self) -> Any:
            raise ValueError("not me")

    comm = pycoll.init()
    frames, text = shown_frames(lambda: comm.send(Unwilling(), 0))
    assert frames[-1] == "__reduce__"
    assert "not me" in text


def test_a_fault_of_pycoll_keeps_its_frames() -> None:
    fault = {"__name__": "pycoll.made_up"}
    exec("def fault(x): return int(x)\ndef refusal(x): raise ValueError('x is wrong')", fault)
    frames, _ = shown_frames(lambda: public_edge.edge(fault["fault"])("no number"))
    assert frames == ["<lambda>", "call", "fault"]
    frames, _ = shown_frames(lambda: public_edge.edge(fault["refusal"])(1))
    assert frames == ["<lambda>"]


class Late(Exception):
    """Raised by a signal handler."""


def on_alarm(signum: int, frame: object) -> None:
    raise Late


def on_any(*args: object) -> None:
    raise Late


@pytest.mark.parametrize("handler", [on_alarm, on_any])
@pytest.mark.parametrize("name", WAITS)
def test_what_a_signal_handler_raises_shows_the_call_and_the_handler(
    name: str, handler: Callable[..., None]
) -> None:
    before = signal.signal(signal.SIGALRM, handler)
    try:
        comm = pycoll.init().dup()
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Late) as caught:
            WAITS[name](comm)
        if name.startswith(("recv", "probe")):  # it waits no more
            comm.send(1, 0)
            assert comm.recv(0) == 1
        comm.close()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert {frame.filename for frame in frames} == {__file__}
    assert [frame.name for frame in frames][-2:] == ["<lambda>", handler.__name__]
