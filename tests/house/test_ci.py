"""`.ci/run` starts however it is started, and its tiers name what exists."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from tiers import exhaustive

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(
    not (ROOT / ".ci" / "run").exists(), reason="a source distribution has no .ci"
)


def listed() -> list[dict[str, Any]]:
    table = tomllib.loads((ROOT / ".ci" / "tiers.toml").read_text(encoding="utf-8"))
    return [table["default"] | {"name": "default"}, *table["tier"]]


def copy_ci(to: Path) -> None:
    shutil.copytree(ROOT / ".ci", to / ".ci")
    (to / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "processes.py", to / "scripts")


@pytest.mark.parametrize("by", [[], ["sh"], ["bash"]], ids=["itself", "sh", "bash"])
def test_it_starts_by_itself_and_by_a_shell(
    by: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by and shutil.which(by[0]) is None:
        pytest.skip(f"{by[0]} is not installed")
    monkeypatch.setenv("PYTHON", sys.executable)
    words = [*by, str(ROOT / ".ci" / "run"), "--list"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == [
        tier["name"] for tier in listed()
    ]


def test_every_path_of_a_tier_is_there() -> None:
    for tier in listed():
        for path in tier.get("paths", []):
            assert list(ROOT.glob(path)), f"tier {tier['name']}: nothing is {path}"


def test_the_tiers_and_their_minutes_are_those_that_contributors_read_of() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([a-z0-9., ]+) \| .* \| (\d+) \|$", text, re.MULTILINE)
    told = {name: int(minutes) for names, minutes in rows for name in names.split(", ")}
    assert told == {tier["name"]: tier["minutes"] for tier in listed()}
    (minutes,) = re.findall(r"further tiers while (\d+) minutes last", text)
    program = (ROOT / ".ci" / "tiers.py").read_text(encoding="utf-8")
    assert f"further tiers while {minutes} minutes last" in program
    assert f"\nMINUTES = {minutes}\n" in program


def test_a_change_is_tested_first_by_the_folders_of_its_files() -> None:
    program = """
import sys; sys.path.insert(0, sys.argv[1])
import tiers
files = ["pycoll/_calls/group.py", "launcher/cli.py", "transports/_core/reduce/reduce.c"]
print(*tiers.folders_of([*files, "README.md", "transports/shm.py", "tests/tools/test_info.py"]))
"""
    words = [sys.executable, "-B", "-c", program, str(ROOT / ".ci")]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["calls", "core", "house", "launcher", "tools", "transports"]


@exhaustive
def test_a_run_of_all_tests_has_few_of_a_device_and_a_named_folder_has_all() -> None:
    def collected(*words: str | Path) -> int:
        collect = [sys.executable, "-P", "-m", "pytest", "-n", "0", "--collect-only", "-q", *words]
        done = subprocess.run(collect, cwd=ROOT, capture_output=True, text=True, check=True)
        return sum("test_cuda.py::" in line for line in done.stdout.splitlines())

    others = [path for path in (ROOT / "tests").iterdir() if path.name not in ("gpu", "helpers")]
    all_tests = ["tests", *(f"--ignore={path}" for path in others if path.is_dir())]
    everything = collected("tests/gpu")
    assert 0 < collected(*all_tests) < everything / 4
    assert collected(*all_tests, "-m", "gpu") == everything


def test_on_a_slow_machine_tiers_are_expected_to_take_longer() -> None:
    program = """
import sys; sys.path.insert(0, sys.argv[1])
from pathlib import Path
from tiers import Row, Run, tiers
run, known = Run(Path(sys.argv[2])), tiers()
for took in (0.0, 0.5, 3.0):
    run.rows = [Row("default", took * known["default"].minutes, "passed"), Row("roce", 0.0, "not")]
    print(run.slowness(known))
"""
    words = [sys.executable, "-c", program, str(ROOT / ".ci"), "/tmp"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1.0", "1.0", "3.0"]


def test_without_another_base_the_change_is_that_of_half_a_day(tmp_path: Path) -> None:
    """In a repository with three commits, the first of which is older."""

    def git(*words: str, at: int = 0) -> None:
        date = f"@{1_700_000_000 + at} +0000"
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        dates = {"GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date}
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, env={**os.environ, **dates})

    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    git("init", "--quiet")
    copy_ci(tmp_path)
    for name, hours in (("old", 0), ("new", 13), ("last", 14)):
        (tmp_path / name).touch()
        git("add", name)
        git("commit", "--quiet", "-m", name, at=hours * 3600)
    script = "import sys; sys.path.insert(0, '.ci'); import tiers; print(tiers.changed())"
    done = subprocess.run(
        [sys.executable, "-B", "-c", script],
        cwd=tmp_path, capture_output=True, text=True, check=True,
        env={name: value for name, value in os.environ.items() if name != "CI_BASE"},
    )  # fmt: skip
    assert done.stdout == "['last', 'new']\n"


FAILS_ONCE = """
import pathlib, pytest
@pytest.mark.parametrize("number", range({tests}))
def test_it(number):
    mark = pathlib.Path(f"mark{{number}}")
    if not mark.exists() or not {passes}:
        mark.touch()
        raise AssertionError
def test_other(): pass
"""


@exhaustive
@pytest.mark.parametrize(
    ("tests", "passes", "says"),
    [
        pytest.param(1, True, "1 passed|unsteady ['test_a.py::test_it[0]']", id="unsteady"),
        pytest.param(1, False, "status 1: pytest -n 0 --last-failed", id="fails again"),
        pytest.param(4, True, "status 1: true && pytest -q", id="too many"),
    ],
)
def test_few_tests_that_failed_run_once_more(
    tests: int, passes: bool, says: str, tmp_path: Path
) -> None:
    copy_ci(tmp_path)
    (tmp_path / "test_a.py").write_text(FAILS_ONCE.format(tests=tests, passes=passes))
    script = """if True:
        import pathlib, sys
        sys.path.insert(0, ".ci")
        import tiers
        run = tiers.Run(pathlib.Path("folder"))
        # To find and to load all plugins that are installed takes 0.7 s each time.
        run.variables |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin"}
        try:
            run.tests("true && pytest -q", pathlib.Path(sys.prefix))
            print("unsteady", run.unsteady)
        except tiers.Failed as failure:
            print(failure.args[0])
    """
    done = subprocess.run(
        [sys.executable, "-B", "-c", script],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    at = 0
    for part in says.split("|"):
        at = done.stdout.index(part, at)


def test_a_step_that_hangs_is_ended_and_what_it_leaves_running(tmp_path: Path) -> None:
    copy_ci(tmp_path)
    script = """if True:
        import pathlib, sys
        sys.path.insert(0, ".ci")
        import tiers
        tiers.adopt_orphans()
        run = tiers.Run(pathlib.Path("folder"))
        run.step("sleep 1000 & echo $! > left")
        run.limit = run.minutes() + 0.005
        try:
            run.step("sleep 1000")
        except tiers.Failed as failure:
            print(failure.args[0])
    """
    done = subprocess.run(
        [sys.executable, "-B", "-c", script],
        cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert "no end: sleep 1000" in done.stdout
    assert not Path(f"/proc/{(tmp_path / 'left').read_text().strip()}").exists()


def test_a_signal_that_ends_it_leaves_no_process_and_no_folder(tmp_path: Path) -> None:
    copy_ci(tmp_path)
    (tmp_path / "temporary").mkdir()
    script = """if True:
        import sys
        sys.path.insert(0, ".ci")
        import tiers
        step = "echo $$ > left; ls temporary > made; kill -TERM $PPID; sleep 1000"
        tiers.Run.tier = lambda run, tier, default: run.step(step)
        sys.argv = [".ci/run", "default"]
        sys.exit(tiers.main())
    """
    done = subprocess.run(
        [sys.executable, "-B", "-c", script],
        cwd=tmp_path, timeout=60, env={**os.environ, "TMPDIR": str(tmp_path / "temporary")},
    )  # fmt: skip
    assert done.returncode == 128 + signal.SIGTERM
    assert (tmp_path / "made").read_text().startswith("pycoll-ci.")
    assert list((tmp_path / "temporary").iterdir()) == []
    assert not Path(f"/proc/{(tmp_path / 'left').read_text().strip()}").exists()


def test_the_processes_of_a_whole_run_leave_out_folders_that_are_ignored() -> None:
    folders = [path.name for path in (ROOT / "tests").iterdir() if path.is_dir()]
    ignored = [f"--ignore=tests/{name}" for name in folders if name != "drawing"]
    two = "what_known_algorithms_take or no_frame_of_pycoll"  # of drawing, of support
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-n", "1", "-k", two, *ignored],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "= 1 passed in" in done.stdout
