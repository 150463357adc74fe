"""What editors complete and what type checkers know of the public interface."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import jedi
import pytest
from tiers import exhaustive

import pycoll
from pycoll._arrays import operators

FILE = """
from typing import Any, assert_type

import numpy as np
import numpy.typing as npt

import pycoll
from pycoll import Request

class Tensor:
    def __dlpack__(self, stream: int | None = None) -> Any:
        raise NotImplementedError

Array = npt.NDArray[np.float64]

def right(comm: pycoll.Communicator, x: Array, t: Tensor, anything: Any) -> None:
    assert_type(comm.all_reduce(x), Array)
    assert_type(comm.all_reduce(t, "max"), Tensor)
    assert_type(comm.all_reduce(1.5, out=None), float)
    assert_type(comm.all_reduce(True, lambda a, b: a), bool)
    assert_type(comm.all_reduce(anything, pycoll.Op(max)), Any)
    assert_type(comm.broadcast(x if comm.rank == 0 else None), Array)
    assert_type(comm.broadcast(None), Any)
    assert_type(comm.all_gather(x), np.ndarray[Any, np.dtype[np.float64]])
    assert_type(comm.all_gather(t), Tensor)
    assert_type(comm.all_gather("text"), list[str])
    assert_type(comm.all_gather(comm.rank), list[int])
    assert_type(comm.scatter(["a", "b"] if comm.rank == 0 else None), str)
    assert_type(comm.scatter(t), Tensor)
    assert_type(comm.reduce_scatter(t), Tensor)
    assert_type(comm.all_to_all([1, 2]), list[int])
    assert_type(comm.all_to_all(x), Array)
    assert_type(comm.all_reduce_many([x, x]), list[Array])
    assert_type(comm.all_gatherv(t), list[Tensor])
    assert_type(comm.iall_reduce(x), Request[Array])
    assert_type(comm.iall_reduce(t).wait(), Tensor)
    assert_type(comm.isend(x, dest=1), Request[None])
    assert_type(comm.ibsend(x, 1), Request[None])
    assert_type(comm.mprobe(0), pycoll.Message)
    assert_type(comm.improbe(), pycoll.Message | None)
    assert_type(comm.mprobe().irecv(), Request[Any])
    assert_type(comm.persistent.all_reduce(1).start().wait(), int)
    assert_type(pycoll.wait_all([comm.iscan(x), comm.iscan(x)]), list[Array])
    if comm.rank == 0:
        comm.reduce(x).sum(), comm.gather(t).__dlpack__()

async def awaited(comm: pycoll.Communicator, x: Array) -> None:
    assert_type(await comm.iall_reduce(x), Array)

def wrong(comm: pycoll.Communicator, x: Array) -> None:
    comm.all_reduce(x, "smu")  # arg-type
    comm.ireduce(x, "mean")  # arg-type
    comm.all_reduce(x, async_op=True)  # call-arg
    comm.recv(src=1)  # call-arg
    comm.send(x, dest="1")  # arg-type
    comm.bcast(x)  # attr-defined
    comm.reduce(x).summ()  # union-attr
    comm.all_gatherv(5)  # type-var
    pycoll.all_reduce(x)  # attr-defined
"""


ROOT = Path(__file__).resolve().parents[2]


@exhaustive  # .ci/run has it beside mypy itself
def test_type_checkers_know_what_comes_back_and_what_is_wrong(tmp_path: Path) -> None:
    mypy = pytest.importorskip("mypy.api")
    file = tmp_path / "typed.py"
    file.write_text(FILE)
    options = ["--config-file", ROOT / "pyproject.toml", "--cache-dir", ROOT / ".mypy_cache"]
    said, trouble, _ = mypy.run([*map(str, options), "--hide-error-context", str(file)])
    assert not trouble
    errors = re.findall(r"typed\.py:(\d+): error: .*\[([\w-]+)\]", said)
    expected = re.findall(r"^.*# ([\w-]+)$", FILE, re.M)
    lines = [n for n, line in enumerate(FILE.splitlines(), 1) if re.search("# [a-z-]+$", line)]
    assert errors == [(str(n), code) for n, code in zip(lines, expected, strict=True)], said


def test_the_names_of_operators_are_those_that_there_are() -> None:
    from pycoll._arrays import types as hints

    assert get_args(hints.Operator) == operators.NAMES


COMPLETE = """
import json, sys, jedi
here = jedi.InterpreterEnvironment()  # no further process
texts = json.loads(sys.argv[1])
print(json.dumps([[c.name for c in jedi.Script(t, environment=here).complete()] for t in texts]))
"""


def completed(*texts: str) -> list[set[str]]:
    """What an editor offers at the end of each program; not in pytest, where jedi finds less."""
    command = [sys.executable, "-c", COMPLETE, json.dumps(texts)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [set(names) for names in json.loads(done.stdout)]


@exhaustive
def test_editors_complete_the_module_and_the_communicator() -> None:
    start = "import pycoll\ncomm = pycoll.init()\ncomm"
    makers = ("", ".dup()", ".split(0)", ".grid((2,))", ".split_by_host()")
    module, request, *comms = completed(
        "import pycoll\npycoll.",
        f"{start}.iall_reduce(1).",
        *(f"{start}{maker}." for maker in makers),
    )
    assert set(pycoll.__all__) <= module
    assert {"wait", "test", "result", "cancel"} <= request
    methods = {name for name in dir(pycoll.Communicator) if not name.startswith("_")}
    for maker, offered in zip(makers, comms, strict=True):
        assert methods <= offered, maker
        assert "bcast" not in offered
    assert {"shift", "axis", "coords"} <= comms[makers.index(".grid((2,))")]


def test_notebooks_offer_what_is_public_and_no_module() -> None:
    offered = {name.name for name in jedi.Interpreter("pycoll.", [{"pycoll": pycoll}]).complete()}
    assert {name for name in offered if not name.startswith("_")} == set(pycoll.__all__)


def test_importing_pycoll_imports_little() -> None:
    text = "import sys; old = set(sys.modules); import pycoll; print(*(set(sys.modules) - old))"
    got = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, check=True
    ).stdout.split()
    assert {name for name in got if name.startswith("pycoll")} == {"pycoll", "pycoll.errors"}
    assert not {"numpy", "typing", "inspect", "re"} & set(got)
