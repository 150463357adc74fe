"""Programs in C that tests build of the core's sources, with GCC's sanitizers or without."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest
from patience import PATIENCE

TESTS = Path(__file__).resolve().parents[1] / "core"
CORE = TESTS.parents[1] / "transports" / "_core"
LISTED = tomllib.loads((TESTS.parent / "planted_faults.toml").read_text(encoding="utf-8"))

ENGINE = (
    "engine/engine.c",
    "engine/message.c",
    "engine/context.c",
    "engine/calls.c",
    "engine/address.c",
    "engine/match.c",
    "engine/scratch.c",
    "base/chains.c",
)
"""The message engine's sources, without links and runs."""

COMPILER = ("gcc", "-std=c11", "-Wall", "-Wextra", "-Werror", "-g", "-fno-strict-aliasing")

THREAD = ("-O2", "-fsanitize=thread", "-Wno-tsan")
# Compiled in half the time that -O1 takes, and runs as fast.
ADDRESS = ("-Og", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
PLAIN = ("-O2",)

OPTIONS = {
    "TSAN_OPTIONS": "halt_on_error=1",
    # Looking for leaks takes ptrace, which containers may forbid.
    "ASAN_OPTIONS": "detect_leaks=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}

# Far more than a run takes: a machine may be busy.
LIMIT_S = 100 * PATIENCE

needs_gcc = pytest.mark.skipif(
    shutil.which("gcc") is None or not CORE.is_dir(),
    reason="needs gcc and a checkout's sources of the core",
)


def call(command: Sequence[str | Path], cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **OPTIONS},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        errors="replace",
        text=True,
        timeout=LIMIT_S,
    )


def build(
    folder: Path,
    program: str,
    sources: Sequence[str],
    flags: Sequence[str],
    *options: str | Path,
    core: Path = CORE,
) -> Path:
    """Build a program of this folder with sources in `core`, which may be a copy with a fault."""
    files = [TESTS / f"{program}.c", *(core / name for name in sources)]
    command = [*COMPILER, *flags, "-I", TESTS, "-I", core, *options, *files, "-pthread"]
    made = call([*command, "-o", program], folder)
    assert made.returncode == 0, made.stdout
    return folder / program


def faults_for(test: str) -> list[dict[str, str]]:
    """The planted faults that a test of this folder finds; it is named as pytest does."""
    return [fault for fault in LISTED["fault"] if fault["test"].startswith(test)]


def plant(fault: dict[str, str], folder: Path) -> None:
    """Plant a fault in a copy of the core's folder."""
    file = folder / fault["file"].partition("/_core/")[2]
    text = file.read_text()
    assert text.count(fault["right"]) == 1, f"{file.name} has changed: plant the fault elsewhere"
    file.write_text(text.replace(fault["right"], fault["wrong"]))


def counted(command: Sequence[str | Path], cwd: Path) -> dict[str, int]:
    """Run a program that must end well; return what it says that it has done: how often of each."""
    run = call(command, cwd)
    assert run.returncode == 0, run.stdout
    parts = (part.strip().rpartition(" ") for part in run.stdout.split(","))
    return {name: int(number) for name, _, number in parts}


def prefix_of(flags: tuple[str, ...]) -> list[str]:
    """Return what to put before a program built with these flags; skip if none runs here."""
    prefix = [] if flags == PLAIN else _find_prefix(flags)
    if isinstance(prefix, str):
        pytest.skip(prefix)
    return prefix


@functools.cache
def _find_prefix(flags: tuple[str, ...]) -> list[str] | str:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "probe.c").write_text("int main(void) { return 0; }\n")
        made = call(["gcc", *flags, "probe.c", "-o", "probe"], folder)
        if made.returncode != 0:
            return f"gcc {' '.join(flags)} cannot link: {made.stdout.strip()[-200:]}"
        # Where the kernel places memory too much at random, ThreadSanitizer does not start.
        text = ""
        for prefix in ([], ["setarch", "-R"]):
            if prefix and shutil.which(prefix[0]) is None:
                continue
            run = call([*prefix, folder / "probe"], folder)
            if run.returncode == 0:
                return prefix
            text = run.stdout
    return f"a program built with {' '.join(flags)} does not start: {text.strip()[-200:]}"
