"""Commands in the folder of pycoll's sources use what is installed, or say what is wrong."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import pycoll
from pycoll._tools import cli

LIMIT_S = 60


def python(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Run Python there. A benchmark waits for no other that is on this machine."""
    return subprocess.run(
        [sys.executable, *args], env={**os.environ, "TMPDIR": str(folder)},
        cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip


def test_bench_does_not_measure_what_lies_in_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "pycoll").mkdir()
    (tmp_path / "pycoll" / "__init__.py").write_text("raise SystemExit('not the installed one')")
    done = python(tmp_path, "-P", "-m", "pycoll", "bench", "barrier", "-n", "1", "--rounds", "1")
    assert done.returncode == 0, done.stderr


def test_sources_without_the_compiled_core_say_so(tmp_path: Path) -> None:
    (package,) = pycoll.__path__
    shutil.copytree(
        package, tmp_path / "pycoll", ignore=shutil.ignore_patterns("*.so", "*.c", "__pycache__")
    )
    (tmp_path / "pyproject.toml").touch()
    script = "from pycoll._transports import reasons; print(reasons()['shm'])"
    said = python(tmp_path, "-c", script).stdout
    assert f"imports pycoll from its source folder, {tmp_path};" in said
    assert "pip install -e ." in said
    done = python(tmp_path, "-c", "import pycoll; pycoll.init()")
    assert "BootstrapError: the compiled core is missing: this Python imports" in done.stderr


def test_the_package_is_the_command(tmp_path: Path) -> None:
    done = python(tmp_path, "-m", "pycoll", "--version")
    assert (done.stdout, done.stderr) == (f"pycoll {pycoll.__version__}\n", "")


@pytest.mark.parametrize("option", ["-n", "--ranks"])
@pytest.mark.parametrize(("command", "reason"), [("bench", "too few"), ("tune", "at least 2")])
def test_bench_and_tune_name_ranks_alike(
    command: str, reason: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main([command, option, "0"])
    assert reason in capsys.readouterr().err
