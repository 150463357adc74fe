"""pycoll.run: a function on several ranks, its results, and what it raises."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_cases import LIMIT_S, ROOT, rank_plus
from tiers import smoke

import pycoll


class Point:
    """A class that ranks know only by value, unless this module can be imported."""

    def __init__(self, x: int) -> None:
        self.x = x


def run_script(folder: Path, text: str, **options: Any) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(text)
    return subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        **options,
    )


@smoke
@pytest.mark.parametrize("n", [1, 3])
def test_results_come_back_by_rank_of_a_communicator_of_all(n: int) -> None:
    found = pycoll.run(lambda comm, x: (comm.rank + x, comm.size, comm.all_reduce(1)), n, 10)
    assert found == [(10 + rank, n, n) for rank in range(n)]


def test_output_can_begin_with_its_rank(capfd: pytest.CaptureFixture[str]) -> None:
    pycoll.run(lambda comm: print("here"), 2, tag_output=True)
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0] here", "[1] here"]


def test_each_rank_is_a_fresh_interpreter_with_a_copy_of_the_arguments_and_no_input() -> None:
    def change(comm: Any, numbers: list[int]) -> tuple[int, list[int], str]:
        numbers.append(comm.rank)
        return os.getpid(), numbers, sys.stdin.read()

    numbers = [7]
    pids, changed, read = zip(*pycoll.run(change, 2, numbers), strict=True)
    assert len({os.getpid(), *pids}) == 3
    assert changed == ([7, 0], [7, 1])
    assert numbers == [7]
    assert read == ("", "")


def test_closures_travel_and_instances_of_local_classes_come_back_as_the_same_class() -> None:
    base = [1, 2, 3]
    points = pycoll.run(lambda comm: Point(base[comm.rank]), 2)
    assert [type(point) for point in points] == [Point, Point]
    assert [point.x for point in points] == [1, 2]


@smoke
def test_arrays_are_writable_there_and_here_and_larger_than_any_pipe() -> None:
    def double(comm: Any, x: np.ndarray[Any, Any]) -> Any:
        x *= 2
        return x + comm.rank, {"small": np.zeros(3)}

    big = np.arange(3_000_000, dtype=np.float64)
    for rank, (array, rest) in enumerate(pycoll.run(double, 2, big)):
        assert array.dtype == big.dtype
        assert array[-1] == 2 * big[-1] + rank
        array += 1
        rest["small"] += 1
    assert big[-1] == big.size - 1


def test_sys_exit_in_good_order_returns_none() -> None:
    assert pycoll.run(lambda comm: sys.exit(None if comm.rank else 0), 2) == [None, None]


def test_a_rank_can_run_ranks_of_its_own() -> None:
    def outer(comm: Any) -> list[int]:
        return pycoll.run(lambda inner: 10 * comm_rank + int(inner.rank), 2) if comm.rank else []

    comm_rank = 4
    assert pycoll.run(outer, 2) == [[], [40, 41]]


def test_several_runs_at_once_in_threads_do_not_disturb_each_other() -> None:
    results: dict[int, Any] = {}

    def work(number: int) -> None:
        results[number] = pycoll.run(rank_plus, 2, number)

    threads = [threading.Thread(target=work, args=(100 * i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert results == {0: [0, 1], 100: [100, 101], 200: [200, 201]}


def test_ranks_have_the_working_folder_path_and_arguments_of_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("/no/such/folder")
    monkeypatch.setattr(sys, "argv", ["program", "--option", "\udc80"])
    look = lambda comm: (os.getcwd(), sys.path, sys.argv)  # noqa: E731
    assert pycoll.run(look, 2) == [(str(tmp_path), sys.path, sys.argv)] * 2


def test_functions_of_modules_are_imported_by_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "importable_for_run.py").write_text(
        "import sys\nhad_numpy = 'numpy' in sys.modules\nvalue = 'fresh'\n"
        "def look(comm): return value, had_numpy, __name__\n"
    )
    module = __import__("importable_for_run")
    monkeypatch.setitem(sys.modules, "importable_for_run", module)
    vars(module)["value"] = "changed here"
    # Nor has NumPy been imported before: what a module sets for it in the environment counts.
    assert pycoll.run(module.look, 2) == [("fresh", False, "importable_for_run")] * 2


def test_a_module_that_only_this_process_can_import_goes_by_value(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "hidden_from_ranks.py"
    file.write_text("def helper(x): return x + 1\ndef work(comm): return helper(comm.rank)\n")
    module = type(sys)("hidden_from_ranks")
    module.__file__ = str(file)
    exec(compile(file.read_text(), file, "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, "hidden_from_ranks", module)
    assert pycoll.run(module.work, 2) == [1, 2]


def test_a_script_is_not_run_again_by_its_ranks(tmp_path: Path) -> None:
    text = """
import pycoll
print("once")
class Pair:
    def __init__(self, a, b): self.a, self.b = a, b
class OddError(Exception): pass
def odd(comm):
    if comm.rank % 2: raise OddError(comm.rank)
    return comm.barrier()
def pair(comm, b): return Pair(comm.rank, b)
for p in pycoll.run(pair, 2, "x"):
    assert type(p) is Pair
    print(p.a, p.b)
try:
    pycoll.run(odd, 2)
except OddError as error:
    print("odd", error)
"""
    done = run_script(tmp_path, text)
    assert (done.stdout, done.stderr) == ("once\n0 x\n1 x\nodd 1\n", "")


def test_a_pycoll_found_only_through_sys_path_is_found_by_the_ranks(tmp_path: Path) -> None:
    text = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import pycoll
print(pycoll.run(lambda comm: pycoll.__file__, 2) == [pycoll.__file__] * 2)
"""
    script = tmp_path / "script.py"
    script.write_text(text)
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, timeout=LIMIT_S, text=True
    )
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_interpreter_options_hold_for_the_ranks(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, pycoll\n"
        "print(pycoll.run(lambda comm: (sys.flags.optimize, sys.flags.dev_mode), 1))"
    )
    done = subprocess.run(
        [sys.executable, "-O", "-X", "dev", script],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        timeout=LIMIT_S,
        text=True,
    )
    assert (done.stdout, done.stderr) == ("[(1, True)]\n", "")


def test_output_goes_to_the_objects_sys_stdout_and_sys_stderr_in_whole_lines() -> None:
    def speak(comm: Any) -> None:
        for i in range(20):
            sys.stdout.write(f"{comm.rank}")
            sys.stdout.write(f" says {i}\n")
        print(f"{comm.rank} complains", file=sys.stderr)

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        pycoll.run(speak, 2)
    lines = out.getvalue().splitlines()
    assert sorted(lines) == sorted(f"{rank} says {i}" for rank in range(2) for i in range(20))
    assert sorted(err.getvalue().splitlines()) == ["0 complains", "1 complains"]


@pytest.mark.parametrize("fixture", ["capsys", "capfd"])
def test_pytest_captures_what_ranks_print(fixture: str, request: pytest.FixtureRequest) -> None:
    capture = request.getfixturevalue(fixture)
    pycoll.run(lambda comm: print("hello"), 1)
    assert capture.readouterr() == ("hello\n", "")
