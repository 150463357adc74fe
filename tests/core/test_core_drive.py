"""Waiting in the message engine: the core's code in a program of its own, and a model.

`tests/core/drive_random.c` has threads that begin, end, cancel and wait for ops at random. It is
built with `PC_DRIVE_CHECKED`, so that every sleep which came to its end by itself is looked at: was
there something to do? `tests/core/drive.pml` and `lock.pml` are models of sleeping, waking and
handing over, which test_core_protocols.py runs.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from core_programs import (
    ADDRESS,
    CORE,
    PLAIN,
    THREAD,
    build,
    call,
    counted,
    faults_for,
    needs_gcc,
    plant,
    prefix_of,
)
from tiers import exhaustive

SOURCES = ("engine/lock.c", "engine/drive.c", "engine/background.c")
CHECKED = "-DPC_DRIVE_CHECKED"

pytestmark = needs_gcc


@pytest.mark.parametrize(
    ("flags", "worlds"),
    [
        pytest.param(THREAD, 20, id="few"),
        pytest.param(THREAD, 1_000, marks=exhaustive, id="thread"),
        pytest.param(ADDRESS, 1_000, marks=exhaustive, id="address"),
        pytest.param(PLAIN, 1_000, marks=exhaustive, id="plain"),
    ],
)
def test_random_threads_wait_for_their_ops_and_none_sleeps_on(
    tmp_path: Path, flags: tuple[str, ...], worlds: int
) -> None:
    prefix = prefix_of(flags)
    program = build(tmp_path, "drive_random", SOURCES, flags, CHECKED)
    counts = counted([*prefix, program, str(worlds), "1"], tmp_path)
    assert counts["overslept"] == 0
    assert counts["done"] + counts["cancelled"] >= 50 * worlds
    # Each of these must have happened often enough to say something.
    for name in ("deadlines", "bells", "sleeps", "rests", "inherited", "looks", "by_background"):
        assert counts[name] >= worlds / 4, counts
    if worlds > 100:  # the rare ones
        assert counts["stolen"] >= worlds / 100, counts
        assert counts["let_in"] >= worlds / 10, counts


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> list[str | Path]:
    """The program with AddressSanitizer, and what to put before it."""
    folder = tmp_path_factory.mktemp("drive")
    return [*prefix_of(ADDRESS), build(folder, "drive_random", SOURCES, ADDRESS, CHECKED)]


def test_work_for_the_caller_ends_its_wait_for_the_moment(
    tmp_path: Path, program: list[str | Path]
) -> None:
    run = call([*program, "work"], tmp_path)
    assert run.returncode == 0, run.stdout


def test_the_child_of_a_fork_waits_for_nothing_and_its_parent_goes_on(
    tmp_path: Path, program: list[str | Path]
) -> None:
    run = call([*program, "fork"], tmp_path)
    assert run.returncode == 0, run.stdout


FAULTS = faults_for("tests/core/test_core_drive.py::test_random_threads")


@exhaustive
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault["what"])
def test_a_fault_planted_in_the_waiting_is_found(tmp_path: Path, fault: dict[str, str]) -> None:
    prefix = prefix_of(THREAD)
    core = tmp_path / "core"
    shutil.copytree(CORE, core)
    plant(fault, core)
    program = build(tmp_path, "drive_random", SOURCES, THREAD, CHECKED, core=core)
    for seed in ("1", "1001", "2001"):  # the calls are the same each time, what meets is not
        run = call([*prefix, program, "100", seed], tmp_path)
        if run.returncode != 0:
            break
    assert run.returncode in (3, 66), run.stdout  # the program's word, and ThreadSanitizer's
