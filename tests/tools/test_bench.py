"""`pycoll bench` measures what it says, checks results, and stops cleanly."""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import signal
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from patience import PATIENCE
from tiers import exhaustive, smoke

import pycoll
from pycoll._tools import bench, bench_machine, bench_report, bench_sides, bench_worker, cli
from pycoll._tools.bench_report import JobSample, Row, Spread
from pycoll._tools.bench_sides import BenchError

ROOT = Path(__file__).resolve().parents[2]
KIB, MIB = 2**10, 2**20
COMMAND = [sys.executable, "-m", "pycoll._tools.cli", "bench"]


def run_bench(*arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        env=os.environ | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60 * PATIENCE,
        check=False,
    )


# ---------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("8", (8,)),
        ("64M", (64 * MIB,)),
        ("8:64", (8, 32, 64)),
        ("8:64:2", (8, 16, 32, 64)),
        ("1K,8,16kib", (8, KIB, 16 * KIB)),
        ("8:32,16", (8, 16, 32)),
        ("1g:1G", (2**30,)),
    ],
)
def test_sizes_are_read_as_documented(text: str, sizes: tuple[int, ...]) -> None:
    assert bench.parse_sizes(text) == sizes


@pytest.mark.parametrize("text", ["", "8:", "0", "12", "-8", "8T", "64:8", "8:64:1", "8:64:2:2"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"size|multiple|factor|ends before|more than"):
        bench.parse_sizes(text)


# ---------------------------------------------------------------- the loop


@pytest.mark.parametrize(("first_s", "call_s"), [(0.0, 1e-6), (0.5, 1e-6), (0.0, 3e-3)])
def test_the_timed_loop_takes_about_its_time_also_after_a_slow_start(
    first_s: float, call_s: float
) -> None:
    loops: list[int] = []

    def run(calls: int) -> float:
        loops.append(calls)
        return calls * call_s + (first_s if len(loops) == 1 else 0.0)

    seconds, calls = bench_worker.measure(run)
    assert seconds == pytest.approx(call_s)
    assert calls == loops[-1] == pytest.approx(bench_worker.LOOP_S / call_s, rel=0.1)


def test_a_call_slower_than_the_loop_is_timed_more_than_once() -> None:
    assert bench_worker.measure(lambda calls: calls * 1.0)[1] == bench_worker.MIN_CALLS


def verdicts(comm: pycoll.Communicator, names: list[str], idle: bool) -> list[bool]:
    """Whether each collective's result is found right on this rank."""
    side = bench_worker.Pycoll(None)
    if idle:  # a library whose calls do nothing
        side.call = lambda collective, source, target: lambda: None  # type: ignore[method-assign]
    dtypes = [np.dtype(name) for name in bench.DTYPES]
    return [
        all([bench_worker.Case(side, name, 100, dtype).check() for dtype in dtypes])
        for name in names
    ]


def test_results_of_pycoll_are_found_right() -> None:
    names = [*bench.COLLECTIVES, *bench.REQUESTS]
    assert pycoll.run(verdicts, 3, names, False) == [[True] * len(names)] * 3


def test_results_of_a_library_that_does_nothing_are_found_wrong() -> None:
    every = {*bench.COLLECTIVES, *bench.REQUESTS}
    names = sorted(every - bench_worker.BARRIERS)
    wrong = np.logical_not(pycoll.run(verdicts, 3, names, True))
    somewhere = wrong.any(axis=0)
    assert dict(zip(names, somewhere, strict=True)) == dict.fromkeys(names, True)


def test_the_worker_needs_only_numpy_and_the_library_it_measures() -> None:
    tree = ast.parse(Path(bench_worker.__file__).read_text(encoding="utf-8"))
    top = {
        (node.module or "") if isinstance(node, ast.ImportFrom) else alias.name
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert {name.partition(".")[0] for name in top} - sys.stdlib_module_names == {"numpy"}


# ---------------------------------------------------------------- the report


def sample(number: int, side: str, seconds: float, **more: float) -> JobSample:
    figure = {"nbytes": 64 * KIB, "alias": 0, "seconds": seconds, "calls": 5, **more}
    return JobSample("all_reduce", 2, number, side, 0.0, [figure], {})


SAMPLES = [
    sample(1, "pycoll shm", 10e-6, copy_seconds=4e-6),
    sample(1, "openmpi", 30e-6),
    sample(1, "gloo", 900e-6),
    sample(2, "pycoll shm", 30e-6, copy_seconds=6e-6),
    sample(2, "openmpi", 50e-6),
    sample(2, "gloo", 900e-6),
    sample(3, "pycoll shm", 20e-6, copy_seconds=5e-6),
    sample(3, "openmpi", 40e-6),
    sample(3, "gloo", 900e-6),
]


@smoke
def test_a_row_has_medians_spreads_and_ratios() -> None:
    [row] = bench_report.rows(SAMPLES)
    assert row.sides["pycoll shm"] == Spread(20e-6, 10e-6, 30e-6)
    assert row.best_peer == "openmpi"
    assert row.ratio("pycoll shm") == pytest.approx(2.0)
    assert row.copies("pycoll shm") == pytest.approx(4.0)


def test_a_row_without_peers_has_no_ratio_to_them() -> None:
    [row] = bench_report.rows([SAMPLES[0]])
    assert (row.best_peer, row.ratio("pycoll shm")) == (None, None)
    assert row.copies("pycoll shm") == pytest.approx(2.5)


def test_the_plain_table_shows_everything_in_columns() -> None:
    table = bench_report.table(bench_report.rows(SAMPLES))
    title, heads, line, _ = bench_report.plain(table).split("\n")
    assert title == "all_reduce, 2 ranks; size: one rank's value"
    columns = ["size", "pycoll shm", "openmpi", "gloo", "best peer/ours", "ours/copy"]
    assert re.split(r"  +", heads.strip()) == columns
    cells = ["64 KiB", "us", "20.0 (10.0-30.0)", "40.0 (30.0-50.0)", "900", "2.00", "4.00"]
    assert re.split(r"  +", line.strip()) == cells
    assert heads.index("gloo") + len("gloo") == line.index("900") + len("900")


def test_two_transports_have_a_ratio_each() -> None:
    rows = bench_report.rows([*SAMPLES[:2], sample(1, "pycoll tcp", 60e-6, copy_seconds=6e-6)])
    table = bench_report.table(rows)
    assert table.heads[-4:] == ["best peer/shm", "shm/copy", "best peer/tcp", "tcp/copy"]
    assert table.cells[0][-4:] == ["3.00", "2.00", "0.500", "12.0"]


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (0.00123, "0.00123"), (9.994, "9.99"), (99.96, "100")]
)
def test_numbers_have_three_digits(value: float | None, text: str) -> None:
    assert bench_report.number(value) == text


@pytest.mark.parametrize(
    ("nbytes", "text"), [(8, "8 B"), (1536, "1.5 KiB"), (64 * MIB, "64 MiB"), (2**41, "2048 GiB")]
)
def test_sizes_are_shown_in_their_unit(nbytes: int, text: str) -> None:
    assert bench_report.size_text(nbytes) == text


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    barrier = Row("barrier", 2, 0, {"pycoll shm": Spread(2e-6, 1e-6, 3e-6)}, None)
    bench_report.plot([*bench_report.rows(SAMPLES), barrier], tmp_path / "plot.svg")
    drawn = (tmp_path / "plot.svg").read_text(encoding="utf-8")
    assert "<!-- openmpi -->" in drawn
    assert "<!-- barrier, 2 ranks -->" in drawn


# ---------------------------------------------------------------- jobs


def test_a_job_that_fails_is_named_with_the_end_of_its_output() -> None:
    script = "print('why it failed'); raise SystemExit(3)"
    with pytest.raises(BenchError, match=r"mpich: exit status 3\n +why it failed"):
        bench_sides.run([sys.executable, "-c", script], dict(os.environ), 30.0, "mpich")


def test_a_job_that_does_not_end_is_ended() -> None:
    # That it has ended is checked at the end of this module.
    with pytest.raises(BenchError, match=r"mpich: not over after 0\.1 s"):
        bench_sides.run(["sleep", "3600"], dict(os.environ), 0.1, "mpich")


def test_a_second_benchmark_waits_for_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    program = (
        "from pycoll._tools.bench_machine import alone\n"
        "with alone(lambda text: print(text, flush=True)):\n"
        "    print('mine', flush=True)\n"
    )
    second = [sys.executable, "-c", program]
    with bench_machine.alone(pytest.fail):
        process = subprocess.Popen(second, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert re.match("another benchmark is running .*: waiting", process.stdout.readline())
    with process:
        assert process.stdout.readline() == "mine\n"


# ---------------------------------------------------------------- the command


def test_the_command_measures_prints_and_writes(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    done = run_bench(
        *("all_reduce", "barrier", "-n", "2", "--sizes", "8,64K", "--transport", "tcp"),
        *("--rounds", "1", "--json", file),
        TMPDIR=str(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    assert "all_reduce, 2 ranks; size: one rank's value" in done.stdout
    assert "barrier, 2 ranks" in done.stdout
    found = json.loads(file.read_text(encoding="utf-8"))
    about = {"command", "date", "machine", "versions", "dtype", "algorithm"}
    assert set(found) == about | {"results", "rounds"}
    assert set(found["machine"]) == set(bench_machine.Machine._fields)
    assert found["versions"]["pycoll tcp"]["pycoll"] == pycoll.__version__
    measured = [(row["collective"], row["nbytes"]) for row in found["results"]]
    assert measured == [("all_reduce", 8), ("all_reduce", 64 * KIB), ("barrier", 0)]
    for row in found["results"]:
        times = row["seconds"]["pycoll tcp"]
        assert 0 < times["low"] == times["median"] == times["high"] < 10
    figures = [figure for job in found["rounds"] for figure in job["figures"]]
    assert all(figure["calls"] >= bench_worker.MIN_CALLS for figure in figures)
    assert 0 < figures[0]["copy_seconds"] < figures[1]["copy_seconds"]


@exhaustive
def test_the_price_of_encryption_is_measured_beside_what_it_costs_without(tmp_path: Path) -> None:
    done = run_bench(
        *("send", "-n", "2", "--sizes", "64K", "--transport", "zmq", "--encrypt"),
        *("--rounds", "1"),
        TMPDIR=str(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"pycoll zmq +pycoll zmq, encrypted", done.stdout), done.stdout


@smoke
def test_a_peer_that_is_not_there_is_named_with_what_to_run(tmp_path: Path) -> None:
    done = run_bench("--against", "mpich", PYCOLL_BENCH_PEERS=str(tmp_path))
    assert done.returncode == 1
    where = tmp_path / "mpich"
    what = "run benchmarks/peers mpich in a checkout of pycoll"
    assert done.stderr == f"pycoll bench: mpich is not in {where}: {what}\n"


def test_each_algorithm_that_is_named_is_a_side_whose_job_is_told_of_it() -> None:
    told = []

    class Noting(bench_sides.Side):
        def run(self, ranks: int, plan: dict[str, Any], timeout_s: float) -> dict[str, Any]:
            told.append((self.name, plan["algorithm"]))
            return {"figures": [], "versions": {}}

    for given in ([], ["ring"], ["ring", "tree"]):
        parser = argparse.ArgumentParser()
        bench.add_options(parser)
        options = ["--algorithm", ",".join(given)] if given else []
        arguments = parser.parse_args(["--transport", "tcp", "--rounds", "1", *options])
        conditions, _, sides = bench._understand(arguments)
        bench.measure(
            {"all_reduce": conditions.sizes}, [Noting(side.name) for side in sides], conditions
        )
    several = [("pycoll tcp, ring", "ring"), ("pycoll tcp, tree", "tree")]
    assert told == [("pycoll tcp", None), ("pycoll tcp", "ring"), *several]


@pytest.mark.parametrize(
    "arguments",
    [
        ["all_redice"],
        ["allreduce"],
        ["--algorithm", "ring,treee"],
        ["--plot", "times.txt"],
        ["--against", "openmpy"],
        ["--transport", "udp"],
        ["--transport", "tcp", "--encrypt"],
        ["--sizes", "12"],
        ["--rounds", "0"],
        ["send", "-n", "1"],
        ["barrier", "--algorithm", "ring"],
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    if "--plot" in arguments:
        pytest.importorskip("matplotlib")
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", *arguments])
    assert ended.value.code == 2
    assert re.search(r"pycoll bench: error: .*\w", capsys.readouterr().err)


def test_a_benchmark_that_is_ended_ends_its_job(tmp_path: Path) -> None:
    started = tmp_path / "started"
    os.mkfifo(started)
    environment = tmp_path / "mpich" / "bin"
    environment.mkdir(parents=True)
    # Stands where MPICH would be; it says when it runs, and would never end.
    mpiexec = environment / "mpiexec"
    mpiexec.write_text(f"#!/bin/sh\necho $$ >'{started}'\nexec sleep 3600\n")
    mpiexec.chmod(0o700)
    (environment / "python").touch()
    arguments = ["barrier", "--transport", "tcp", "--against", "mpich"]
    variables = os.environ | {"PYCOLL_BENCH_PEERS": str(tmp_path), "TMPDIR": str(tmp_path)}
    with subprocess.Popen([*COMMAND, *arguments], env=variables) as process:
        descriptor = os.pidfd_open(int(started.read_text()))
        process.send_signal(signal.SIGTERM)
        assert process.wait(20 * PATIENCE) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        signal.pidfd_send_signal(descriptor, 0)
    os.close(descriptor)


# ---------------------------------------------------------------- messages


def run_messages(*arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "benchmarks/messages", *map(str, arguments)],
        env=os.environ | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60 * PATIENCE,
        check=False,
    )


@exhaustive  # a program of benchmarks/
def test_messages_are_timed_beside_the_peers_that_are_there(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    done = run_messages(
        *("halo", "iall_gather", "ibarrier", "--transport", "tcp,hosts", "--ranks", "2,3"),
        *("--rounds", "1", "--json", file),
        PYCOLL_BENCH_PEERS=str(tmp_path),
        TMPDIR=str(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    for peer in ("openmpi", "openmpi-tcp", "gloo"):
        assert f"left out: {peer} is not in {tmp_path}" in done.stderr
    titles = [line for line in done.stdout.splitlines() if line.startswith("pycoll ")]
    assert titles == [
        f"pycoll {transport}, {ranks} ranks; us"
        for ranks in (2, 3)
        for transport in ("tcp", "hosts")
    ]
    rows = [line.split()[:3] for line in done.stdout.splitlines() if "halo" in line]
    assert rows == [["halo", "8", "B"], ["halo", "1", "MiB"]] * 4
    found = json.loads(file.read_text(encoding="utf-8"))["results"]
    measured = [(row["ranks"], row["collective"], row["nbytes"]) for row in found]
    calls = [("halo", 8), ("halo", MIB), ("iall_gather", 8), ("iall_gather", 64 * KIB)]
    assert measured == [(ranks, *call) for ranks in (2, 3) for call in [*calls, ("ibarrier", 0)]]
    for row in found:
        for times in row["seconds"].values():
            assert 0 < times["low"] <= times["median"] < 10


@exhaustive  # a program of benchmarks/
def test_what_a_large_message_uses_is_counted_and_a_missing_tool_is_named(tmp_path: Path) -> None:
    done = run_messages(
        *("--counts", "--transport", "tcp", "--ranks", "2", "--rounds", "1", "--against", ""),
        PATH=str(tmp_path),
        TMPDIR=str(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    assert "benchmarks/instructions: skipped: no valgrind on this machine" in done.stdout
    [line] = [line for line in done.stdout.splitlines() if line.split()[:2] == ["pycoll", "tcp"]]
    microseconds, ratio = map(float, line.split()[2:])
    assert microseconds > 0
    assert 1 <= ratio < 3  # other programs may use the loopback interface, too


@exhaustive  # a program of benchmarks/
def test_other_calls_are_timed(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, ROOT / "benchmarks/calls", "--against", ""),
            *("--rounds", "1", "--sizes", "8,64K"),
        ],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120 * PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[2:]]
    for name in ("gatherv", "scatterv", "all_gatherv", "all_to_allv", "reduce_scatterv", "scan"):
        times = [float(row[3]) for row in rows if row[:1] == [name]]
        assert len(times) == 2, done.stdout
        assert all(0 < time < 1e6 for time in times)


def test_what_messages_does_not_know_is_refused() -> None:
    for arguments in (["send", "--transport", "udp"], ["--against", "mvapich"], ["sendd"]):
        done = run_messages(*arguments)
        assert done.returncode == 2
        assert re.search(r"error: .*(udp|mvapich|sendd)", done.stderr)


# ---------------------------------------------------------------- the targets


@pytest.fixture(scope="module")
def table() -> ModuleType:
    """The script benchmarks/table."""
    loader = SourceFileLoader("benchmarks_table", str(ROOT / "benchmarks/table"))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("collective", "nbytes", "ours", "verdict"),
    [
        ("all_reduce", KIB, 5.0, ("2", "met")),
        ("all_reduce", KIB, 5.1, ("2", "MISS")),
        ("all_reduce", 2 * KIB, 6.6, ("1.5", "met")),
        ("all_reduce", 64 * MIB, 3.3, ("3, 1.7 copies", "met")),
        ("all_reduce", 64 * MIB, 3.5, ("3, 1.7 copies", "MISS")),
        ("broadcast", MIB, 9.0, ("1.1", "met")),
        ("broadcast", MIB, 9.5, ("1.1", "MISS")),
        ("broadcast", 128 * MIB, 1.0, ("-", "-")),
    ],
)
def test_targets_are_judged(
    table: ModuleType, collective: str, nbytes: int, ours: float, verdict: tuple[str, str]
) -> None:
    sides = {"pycoll shm": Spread(ours, ours, ours), "mpich": Spread(10.0, 10.0, 10.0)}
    row = Row(collective, 2, nbytes, sides, copy=Spread(2.0, 2.0, 2.0))
    assert table.judge(row, "shm") == verdict


@pytest.mark.parametrize(
    ("nbytes", "verdict"), [(8, ("1 (gloo)", "met")), (64 * KIB, ("1", "MISS"))]
)
def test_over_tcp_small_messages_are_compared_with_gloo_alone(
    table: ModuleType, nbytes: int, verdict: tuple[str, str]
) -> None:
    times = {"pycoll tcp": 10.0, "openmpi-tcp": 5.0, "gloo": 20.0}
    row = Row("send", 2, nbytes, {side: Spread(t, t, t) for side, t in times.items()}, None)
    assert table.judge(row, "tcp") == verdict
