"""For scripts that install pycoll: copies of the checkout, environments, commands."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def say(text: str) -> None:
    print(f"{Path(sys.argv[0]).name}: {text}", flush=True)


def fail(text: str) -> None:
    raise SystemExit(f"{Path(sys.argv[0]).name}: FAILED: {text}")


def call(*command: str | Path, cwd: Path, passing: tuple[int, ...] = (0,), **variables: str) -> str:
    """Run a command outside this process's environment of Python; its output, or the end."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PYCOLL_", "MYPY"))}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**env, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode not in passing:
        fail(f"{' '.join(map(str, command))}: status {done.returncode}\n{done.stdout}")
    return done.stdout


def copy_checkout(target: Path) -> None:
    """Copy what git tracks or would track, links as links."""
    listed = call("git", "ls-files", "-z", "-co", "--exclude-standard", cwd=ROOT)
    for name in filter(None, listed.split("\0")):
        if os.path.lexists(ROOT / name):  # it may have been deleted, and that not committed
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)


def make_environment(python: str, place: Path, *requirements: str | Path, **variables: str) -> Path:
    """Make a virtual environment, and return its interpreter."""
    call(python, "-m", "venv", place, cwd=place.parent)
    call(place / "bin/pip", "install", "--quiet", *requirements, cwd=place.parent, **variables)
    return place / "bin/python"
