"""Links over TCP, the core's code in programs of their own: random calls, and bytes of a stranger.

`tests/core/tcp_random.c` has ranks that do everything at random and checks what they are told and
given. `tests/core/tcp_many.c` has very many messages wait. `tests/core/tcp_fuzz.c` feeds a rank
with bytes that a fuzzer has found, kept in `tests/core/corpus`. It looks for more so, with the
program that the second test builds:

    tcp_fuzz --fuzz SECONDS SEED FOLDER
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from core_programs import (
    ADDRESS,
    COMPILER,
    CORE,
    PLAIN,
    TESTS,
    call,
    counted,
    faults_for,
    needs_gcc,
    plant,
    prefix_of,
)
from tiers import exhaustive, smoke

SOURCES = ("tcp/tcp.c", "tcp/tcp_read.c", "tcp/tcp_write.c", "base/table.c")
CORPUS = sorted((TESTS / "corpus").iterdir())

pytestmark = needs_gcc


def build(tmp_path: Path, program: str, core: Path, flags: tuple[str, ...], *of_core: str) -> Path:
    """Build a program with the sources in `core`, which may be a copy with a fault."""
    common: list[str | Path] = [*COMPILER, *flags, "-I", TESTS, "-I", core]
    hooks: list[str | Path] = ["-include", TESTS / "tcp_hooks.h", *of_core]
    made = call([*common, *hooks, "-c", *(core / name for name in SOURCES)], tmp_path)
    assert made.returncode == 0, made.stdout
    objects = [Path(name).with_suffix(".o").name for name in SOURCES]
    # Without PIE the places in the code, by which coverage is counted, are the same each time.
    linking = ["-no-pie", "-o", program]
    made = call([*common, TESTS / f"{program}.c", *objects, *linking], tmp_path)
    assert made.returncode == 0, made.stdout
    return tmp_path / program


@pytest.mark.parametrize(
    ("flags", "worlds"),
    [
        pytest.param(ADDRESS, 200, id="few"),
        pytest.param(ADDRESS, 5_000, marks=exhaustive, id="address"),
        pytest.param(PLAIN, 5_000, marks=exhaustive, id="plain"),
    ],
)
@smoke
def test_random_calls_of_linked_ranks_deliver_every_byte_and_touch_no_other(
    tmp_path: Path, flags: tuple[str, ...], worlds: int
) -> None:
    prefix = prefix_of(flags)
    program = build(tmp_path, "tcp_random", CORE, flags)
    counts = counted([*prefix, program, str(worlds), "1"], tmp_path)
    assert counts["messages"] >= 30 * worlds
    # Each of these must have happened often enough to say something.
    assert all(count >= worlds / 10 for count in counts.values()), counts


def test_what_waits_of_very_many_messages_costs_the_same_for_each(tmp_path: Path) -> None:
    program = build(tmp_path, "tcp_many", CORE, PLAIN)
    run = call([*prefix_of(PLAIN), program, "300000"], tmp_path)
    assert run.returncode == 0, run.stdout


COVERAGE = "-fsanitize-coverage=trace-pc"


def test_no_input_of_the_corpus_does_harm(tmp_path: Path) -> None:
    prefix = prefix_of(ADDRESS)
    program = build(tmp_path, "tcp_fuzz", CORE, ADDRESS, COVERAGE)
    run = call([*prefix, program, *CORPUS], tmp_path)
    assert run.returncode == 0, run.stdout
    words = run.stdout.splitlines()[-1].replace(",", "").split()
    assert int(words[1]) == len(CORPUS) >= 30
    assert int(words[3]) > 600  # or the corpus is of another format, and worth nothing


@exhaustive
def test_a_minute_of_fuzzing_finds_no_input_that_does_harm(tmp_path: Path) -> None:
    prefix = prefix_of(ADDRESS)
    program = build(tmp_path, "tcp_fuzz", CORE, ADDRESS, COVERAGE)
    folder = tmp_path / "corpus"
    shutil.copytree(TESTS / "corpus", folder)
    run = call([*prefix, program, "--fuzz", "60", "1", folder], tmp_path)
    harm = folder / "harm"
    assert run.returncode == 0, f"{run.stdout}\n{harm.read_bytes().hex() if harm.exists() else ''}"


FAULTS = faults_for("tests/core/test_core_tcp.py::test_random_calls_of_linked_ranks")


@exhaustive
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault["what"])
def test_a_fault_planted_in_the_links_is_found(tmp_path: Path, fault: dict[str, str]) -> None:
    prefix = prefix_of(ADDRESS)
    core = tmp_path / "core"
    shutil.copytree(CORE, core)
    plant(fault, core)
    program = build(tmp_path, "tcp_random", core, ADDRESS)
    run = call([*prefix, program, "10000", "1"], tmp_path)  # some show themselves rarely
    assert run.returncode in (1, 3), run.stdout  # AddressSanitizer's word, and the program's
