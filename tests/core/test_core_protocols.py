"""The flag protocols of the native collectives: the core's code with ranks as threads, and models.

The programs and models lie in tests/core. Each proof comes with faults that it must find, planted
in a copy of the sources or by a macro of the model: a proof that finds none would prove nothing.
They are listed in planted_faults.toml.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from core_programs import (
    ADDRESS,
    COMPILER,
    CORE,
    LISTED,
    PLAIN,
    TESTS,
    THREAD,
    call,
    faults_for,
    needs_gcc,
    plant,
    prefix_of,
)
from tiers import exhaustive

# The files whose protocols these are.
SOURCES = (
    "host/host.c",
    "host/wait.c",
    "python/exchange/exchange.c",
    "python/exchange/all_reduce.c",
    "base/copy.c",
    "python/exchange/direct.c",
    "python/exchange/together.c",
    "python/exchange/choice.c",
    "base/processor.c",
    "host/region.c",
)
PROGRAM = ("native_tsan.c", "native_sleep.c", "native_python.c")

pytestmark = needs_gcc


def build(tmp_path: Path, core: Path, flags: tuple[str, ...]) -> Path:
    """Build the program with the sources in `core`, which may be a copy with a fault."""
    common: list[str | Path] = [*COMPILER, *flags, "-I", TESTS / "stub", "-I", TESTS, "-I", core]
    common += ["-ffunction-sections"]
    hooks: list[str | Path] = ["-include", TESTS / "native_hooks.h"]
    made = call([*common, *hooks, "-c", *(core / name for name in SOURCES)], tmp_path)
    assert made.returncode == 0, made.stdout
    # Of host.c only what waits is used: what lays the memory out asks files that are not here.
    linking = ["-no-pie", "-pthread", "-Wl,--wrap=pc_wait_long", "-Wl,--gc-sections"]
    objects = [Path(name).with_suffix(".o").name for name in SOURCES]
    program = tmp_path / "native"
    sources = [TESTS / name for name in PROGRAM]
    made = call([*common, *sources, *objects, "-o", program, *linking], tmp_path)
    assert made.returncode == 0, made.stdout
    return program


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("plain"), CORE, PLAIN)


@pytest.mark.parametrize(
    ("flags", "operations"),
    [
        pytest.param(THREAD, 100_000, marks=exhaustive, id="thread"),
        pytest.param(ADDRESS, 100_000, marks=exhaustive, id="address"),
        pytest.param(PLAIN, 200_000, marks=exhaustive, id="plain"),
        pytest.param(PLAIN, 10_000, id="few"),
    ],
)
def test_random_calls_of_ranks_as_threads_are_right_and_nobody_sleeps_on(
    tmp_path: Path,
    plain: Path,
    flags: tuple[str, ...],
    operations: int,
) -> None:
    prefix = prefix_of(flags)
    program = plain if flags == PLAIN else build(tmp_path, CORE, flags)
    run = call([*prefix, program, str(operations), "1"], tmp_path)
    assert run.returncode == 0, run.stdout
    done, sleeps, _, given_up = (int(word) for word in run.stdout.split() if word.isdigit())
    assert done >= operations
    assert given_up > 0
    assert sleeps > operations / 100  # or it would say nothing about sleeping


def test_a_short_all_reduce_of_many_reads_twice_its_length_where_ranks_have_cores(
    tmp_path: Path, plain: Path
) -> None:
    def counts(nbytes: int, spins: int) -> set[tuple[float, ...]]:
        """Flags waited for, bytes copied and bytes reduced by each rank in a call."""
        run = call([plain, "counts", "3", str(nbytes), str(spins), "0"], tmp_path)
        assert run.returncode == 0, run.stdout
        ranks = [line.split()[1:] for line in run.stdout.splitlines()]
        assert len(ranks) == 5
        return {tuple(map(float, words[:3])) for words in ranks}

    # Ranks that share cores wait for each other once, and read all that the others give.
    assert counts(5120, 0) == {(4, 5120, 5 * 5120)}
    # With cores of their own twice; they read a part of each, and copy the parts of the result.
    assert counts(5120, 30) == {(8, 5120 * 9 / 5, 5120)}
    # If there is little to read, once.
    assert counts(2560, 30) == {(4, 2560, 5 * 2560)}


FAULTS = faults_for("tests/core/test_core_protocols.py::test_random_calls_of_ranks_as_threads")


@exhaustive
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault["what"])
def test_a_fault_planted_in_the_core_is_found(tmp_path: Path, fault: dict[str, str]) -> None:
    prefix = prefix_of(THREAD)
    core = tmp_path / "core"
    shutil.copytree(CORE, core)
    plant(fault, core)
    program = build(tmp_path, core, THREAD)
    for seed in ("1", "2", "3", "4", "5"):  # the calls are the same each time, what meets is not
        run = call([*prefix, program, "100000", seed], tmp_path)
        if run.returncode != 0:
            break
    assert run.returncode in (3, 66), run.stdout  # the program's word, and ThreadSanitizer's


# Each with what it must find: nothing, or its message.
MODELS = [
    ("sleep", "-DPUBLISHERS=1", ""),
    ("sleep", "-DPUBLISHERS=2", ""),
    ("slots", "-DRANKS=2 -DSLOTS=4", ""),
    ("slots", "-DRANKS=3 -DSLOTS=2 -DCALLS=4", ""),
    ("stream", "-DRANKS=2 -DCALLS=3", ""),
    ("stream", "-DRANKS=2 -DBIG_SLOTS=4 -DCALLS=2 -DMOST_CHUNKS=6", ""),
    ("stream", "-DRANKS=3 -DCALLS=2 -DMOST_CHUNKS=2", ""),
    ("stream", "-DRANKS=3 -DCALLS=1 -DMOST_CHUNKS=4", ""),
    ("stream", "-DMIXED -DRANKS=2 -DCALLS=3", ""),
    ("stream", "-DMIXED -DRANKS=3 -DCALLS=1", ""),
    ("stream", "-DSLEEP -DMIXED -DRANKS=2 -DCALLS=2", ""),
    ("stream", "-DSLEEP -DRANKS=3 -DCALLS=1", ""),
    ("lock", "-DTHREADS=2", ""),
    ("lock", "-DTHREADS=3", ""),
    ("drive", "-DWAITERS=2", ""),
    ("drive", "-DWAITERS=3", ""),
    ("channel", "", ""),
    ("block", "-DMESSAGES=3", ""),
    *((model["model"], model["macros"], model["finds"]) for model in LISTED["model"]),
]


@exhaustive
@pytest.mark.skipif(shutil.which("spin") is None, reason="needs spin")
@pytest.mark.parametrize(("model", "macros", "fault"), MODELS)
def test_a_model_has_no_fault_but_the_planted_one(
    tmp_path: Path, model: str, macros: str, fault: str
) -> None:
    made = call(["spin", "-a", *macros.split(), TESTS / f"{model}.pml"], tmp_path)
    assert made.returncode == 0, made.stdout
    # Safety alone: every assertion, and no state in which all wait.
    made = call(["gcc", "-O2", "-w", "-DSAFETY", "-DMEMLIM=2000", "pan.c", "-o", "pan"], tmp_path)
    assert made.returncode == 0, made.stdout
    run = call([tmp_path / "pan", "-m100000"], tmp_path)
    # An exhausted search and a stopped one look alike but for these words.
    assert fault or "Search not completed" not in run.stdout, run.stdout
    assert "max search depth too small" not in run.stdout, run.stdout
    assert f"errors: {1 if fault else 0}" in run.stdout, run.stdout
    assert fault in run.stdout, run.stdout
