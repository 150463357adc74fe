"""The command `pycoll simulate`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiers import smoke

from pycoll import schedules
from pycoll._selection.costs import shipped
from pycoll._support.wording import seconds_text
from pycoll._tools import show, units
from pycoll._tools.cli import main
from pycoll._tools.simulate import MOST_SEGMENTS

Run = Callable[..., tuple[dict[tuple[int, int, str], dict[str, Any]], str]]
LINKS = ["--latency", "1us", "--bandwidth", "10GB/s"]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command; returns its times, by (ranks, bytes, algorithm), and what it printed."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("PYCOLL_COSTS", raising=False)

    def simulated(*words: str) -> tuple[dict[tuple[int, int, str], dict[str, Any]], str]:
        written = tmp_path / "out.json"
        assert main(["simulate", *words, "--json", str(written)]) == 0
        times = json.loads(written.read_text())["times"]
        found = {(case["ranks"], case["nbytes"], case["algorithm"]): case for case in times}
        return found, capsys.readouterr().out

    return simulated


@smoke
def test_the_times_are_those_of_the_formulas_on_the_network_that_was_said(run: Run) -> None:
    found, printed = run(
        "all_reduce", "ring", "tree", "--ranks", "4,16", "--sizes", "1K,1M", *LINKS
    )
    assert len(found) == 8
    for (ranks, nbytes, name), case in found.items():
        if name == "ring":
            step = 1e-6 + nbytes / ranks / 1e10
            assert case["seconds"] == pytest.approx(2 * (ranks - 1) * step)
            assert case["replayed"] == 1
    assert "inside hosts: 1 us, 10 GB/s\n" in printed
    rows = [line.split() for line in printed.splitlines() if line.split()[:1] in (["4"], ["16"])]
    assert [row[:4] for row in rows] == [
        ["4", "1", "KiB", "us"],
        ["4", "1", "MiB", "us"],
        ["16", "1", "KiB", "us"],
        ["16", "1", "MiB", "us"],
    ]
    assert rows[0][4:] == ["6.15", "4.41*"]
    assert [row[-2].endswith("*") for row in rows] == [False, True, False, True]


def test_hosts_and_racks_have_links_of_their_own(run: Run) -> None:
    where = ["-n", "8", "--ranks-per-node", "2", "--hosts-per-rack", "2", "--sizes", "8"]
    far = ["--between-latency", "10us", "--rack-latency", "1ms", "--between-bandwidth", "1Gbit/s"]
    found, printed = run("broadcast", "chain", *where, *LINKS, *far, "--rack-overhead", "2us")
    expected = 4 * (1e-6 + 8 / 1e10) + 2 * (1e-5 + 8 / 1.25e8) + 1e-3 + 8 / 1.25e8
    assert found[8, 8, "chain"]["seconds"] == pytest.approx(expected)
    assert "between hosts of 2 ranks: 10 us, 125 MB/s\n" in printed
    text = "between racks of 2 hosts: 1 ms, 125 MB/s, of which a rank is busy for 2 us\n"
    assert text in printed


def test_what_ranks_of_a_host_share_makes_it_slower(run: Run) -> None:
    case = ["all_reduce", "ring", "-n", "8", "--ranks-per-node", "4", "--sizes", "1M", *LINKS]
    free = run(*case)[0][8, 1 << 20, "ring"]["seconds"]
    for option in ["--memory-bandwidth", "1GB/s"], ["--reduce-bandwidth", "1GB/s"]:
        assert run(*case, *option)[0][8, 1 << 20, "ring"]["seconds"] > 1.5 * free
    exchange = ["all_to_all", "pairwise", *case[2:]]
    assert (
        run(*exchange)[0][8, 1 << 20, "pairwise"]["seconds"]
        > 2 * run(*exchange, "--adapters", "4")[0][8, 1 << 20, "pairwise"]["seconds"]
    )


def test_without_numbers_the_network_is_that_of_the_table_of_costs(
    run: Run, tmp_path: Path
) -> None:
    case = ["all_reduce", "ring", "-n", "4", "--sizes", "64K"]
    own, printed = run(*case)
    assert f"by the table of costs of {shipped().origin}" in printed
    links = dict(shipped().links)
    links["shm"] = links["shm"]._replace(step=1.0)
    links["net"] = links["net"]._replace(step=3.0)
    mine = tmp_path / "mine.json"
    table = shipped()._replace(links=links, origin="mine", factors={})
    mine.write_text(table.as_json())
    found, printed = run(*case, "--costs", str(mine))
    assert found[4, 65536, "ring"]["seconds"] == pytest.approx(6.0, rel=1e-3)
    assert own[4, 65536, "ring"]["seconds"] < 1e-3
    assert f"by the table of costs of {mine}" in printed
    found, _ = run(*case, "--costs", str(mine), "--ranks-per-node", "2")
    assert found[4, 65536, "ring"]["seconds"] == pytest.approx(3 * 1.0 + 3 * 3.0, rel=1e-3)
    slow, quick = (run(*case, "--transport", name)[0] for name in ("tcp", "shm"))
    assert slow[4, 65536, "ring"]["seconds"] > 2 * quick[4, 65536, "ring"]["seconds"]


def test_a_size_that_was_slower_than_the_tables_constants_say_is_so_for_all_on_one_host(
    run: Run, tmp_path: Path
) -> None:
    def times(*factors: float, words: tuple[str, ...] = ()) -> list[float]:
        row = {2: (*factors, *[1.0] * (len(shipped().sizes) - len(factors)))}
        rows = {("shm", "all_reduce", name, "whole"): row for name in ("ring", "tree", "linear")}
        table = tmp_path / "mine.json"
        table.write_text(shipped()._replace(factors=rows).as_json())
        case = ["all_reduce", "ring", "central", "-n", "4", "--sizes", "8", "--costs", str(table)]
        return [each["seconds"] for each in run(*case, *words)[0].values()]

    assert times(3.0) == pytest.approx([3 * time for time in times(1.0)])
    spread = ("--ranks-per-node", "2")
    assert times(3.0, words=spread) == times(1.0, words=spread)


def test_values_are_cut_where_that_pays_as_far_as_it_can_be_replayed(run: Run) -> None:
    case = ["broadcast", "chain", "-n", "8", "--sizes", "4K,16M,4G", *LINKS]
    found, printed = run(*case)
    segments = {nbytes: found[8, nbytes, "chain"]["segments"] for nbytes in (4096, 1 << 24)}
    assert segments[4096] == 1
    assert 16 <= segments[1 << 24] <= MOST_SEGMENTS
    assert found[8, 1 << 32, "chain"]["segments"] == MOST_SEGMENTS
    assert "/N each chunk is cut into N segments" in printed
    whole, _ = run(*case, "--segments", "1")
    assert whole[8, 1 << 24, "chain"]["seconds"] > 4 * found[8, 1 << 24, "chain"]["seconds"]
    assert not found[8, 1 << 32, "chain"]["held"]
    held, printed = run(*case, "--most-messages", "100")
    assert held[8, 1 << 32, "chain"]["segments"] == 8  # of seven messages
    assert held[8, 1 << 32, "chain"]["held"]
    assert "/N+ more segments should be quicker" in printed


def test_what_would_take_too_long_is_left_out_and_named(run: Run) -> None:
    found, printed = run(
        "all_reduce", "ring", "linear", "-n", "64", "--sizes", "8", "--most-messages", "500", *LINKS
    )
    assert found[64, 8, "linear"]["seconds"] is None
    assert found[64, 8, "ring"]["seconds"] is not None
    assert "- more than 500 messages; --most-messages replays more" in printed


def test_a_picture_is_drawn(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    over_sizes, over_ranks = tmp_path / "sizes.svg", tmp_path / "ranks.svg"
    run("all_reduce", "ring", "tree", "--sizes", "1K,1M", "--plot", str(over_sizes), *LINKS)
    over = ["-n", "2:32", "--sizes", "1M", "--plot", str(over_ranks)]
    run("all_reduce", "ring", "tree", *over, *LINKS)
    for path in (over_sizes, over_ranks):
        assert "<svg" in path.read_text(encoding="utf-8")


def test_an_algorithm_of_a_file_is_simulated(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedules, "TABLE", {c: dict(n) for c, n in schedules.TABLE.items()})
    monkeypatch.setattr(show, "_FILES", {})
    path = tmp_path / "mine.py"
    path.write_text(
        "import pycoll\n"
        "from pycoll.schedule import Recv, Send\n"
        '@pycoll.register_algorithm("broadcast", "mine")\n'
        "def mine(rank, size, root):\n"
        "    for peer in range(size):\n"
        "        if rank == root != peer:\n"
        "            yield Send(peer, 0)\n"
        "        if peer == rank != root:\n"
        "            yield Recv(root, 0)\n"
    )
    found, _ = run("broadcast", f"{path}:mine", "linear", "--sizes", "1K", *LINKS)
    assert found[4, 1024, "mine"]["seconds"] == found[4, 1024, "linear"]["seconds"]


def test_a_barrier_has_no_sizes(run: Run) -> None:
    found, _ = run("barrier", "-n", "5", *LINKS)
    assert found[5, 0, "dissemination"]["seconds"] == pytest.approx(3e-6)
    assert (5, 0, "hierarchical") not in found
    spread, _ = run("barrier", "-n", "4", "--ranks-per-node", "2", *LINKS)
    assert (4, 0, "hierarchical") in spread


SPREAD = ["all_reduce", "--ranks-per-node", "2"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["all_reduce", "rign"], "did you mean ring?"),
        (["reduce_all"], "write all_reduce"),
        (["all_reduce", "-n", "0"], "-n has '0' in it: write 4096, 8,64,512, 64:4096"),
        (["all_reduce", "-n", "8,2x"], "-n has '2x' in it: write"),
        (["all_reduce", "-n", "8:4"], "ends before it begins"),
        (["all_reduce", "--overhead", "21us"], "--overhead is 21 us, but it is a part of the"),
        (
            [*SPREAD, "--overhead", "2us", "--between-latency", "1us"],
            "say --between-latency, or less",
        ),
        (["all_reduce", "--latency", "5"], "--latency is '5', which is no time: write 500ns"),
        (["all_reduce", "--bandwidth", "10"], "which is no bandwidth: write 10GB/s"),
        ([*SPREAD, "--between-bandwidth", "0GB/s"], "--between-bandwidth is '0GB/s'"),
        (["all_reduce", "--between-bandwidth", "1GB/s"], "Say --ranks-per-node, too"),
        (
            [*SPREAD, "--rack-latency", "1us"],
            "all ranks are in one rack. Say --hosts-per-rack, too",
        ),
        (["all_reduce", "--adapters", "2"], "--adapters has no effect"),
        (["all_reduce", "--latency", "1us", "--transport", "tcp"], "is not used beside --latency"),
        (["all_reduce", "--hosts", "2"], "--hosts: say how many ranks each host has"),
        ([], "name a collective, as in: pycoll simulate all_reduce"),
        (["all_reduce", "--segments", "few"], "--segments is 'few': auto, or a number"),
        (["all_reduce", "--segments", "0"], "--segments is '0': auto, or a number"),
        (["all_reduce", "--most-messages", "0"], "--most-messages is 0; it must be 1 or more"),
        (["all_reduce", "--cores", "0"], "--cores is 0; it must be 1 or more"),
        ([*SPREAD, "--adapters", "0"], "--adapters is 0; it must be 1 or more"),
        (["all_reduce", "--ranks-per-node", "0"], "--ranks-per-node is 0"),
        (["broadcast", "--root", "4"], "--root is 4, but the ranks are 0 to 3"),
        (["all_reduce", "--costs", "nowhere.json"], "nowhere.json cannot be read"),
        (["all_reduce", "--costs", "x", "--latency", "1us"], "leave out --latency"),
        (["all_reduce", "--json", "/nowhere/x.json"], "there is no folder /nowhere"),
        (["all_reduce", "--sizes", "1Q"], "a size is '1Q'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_makes_no_sense_is_said_in_a_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["simulate", *words])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "used", "said"),
    [
        (
            ["simlate", "all_reduce"],
            "pycoll ",
            "there is no command simlate; did you mean simulate?",
        ),
        (
            ["simulate", "all_reduce", "--szes", "1K"],
            "pycoll simulate ",
            "--szes 1K; did you mean --sizes?",
        ),
        (["simulate", "--szes=1K"], "pycoll simulate ", "--szes=1K; did you mean --sizes?"),
        (["show", "all_reduce", "ring", "--sgv", "x"], "pycoll show ", "; did you mean --svg?"),
        (["check", "--quick"], "pycoll check ", "unrecognized arguments: --quick"),
    ],
)
def test_a_misspelt_word_is_met_with_the_one_that_is_like_it(
    words: list[str], used: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"usage: {used}")
    assert printed.endswith(f"{said}\n")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10GB/s", 1e10),
        ("1.5 MB/s", 1.5e6),
        ("1GiB/s", 2.0**30),
        ("200Mbit/s", 2.5e7),
        ("100Gbps", 1.25e10),
        ("100Gb/s", 1.25e10),
        ("8kbit/s", 1e3),
    ],
)
def test_bandwidths_are_read_as_users_write_them(text: str, expected: float) -> None:
    assert units.parse_bandwidth(text, "--bandwidth") == pytest.approx(expected)


def test_times_are_read_and_written_as_users_write_them() -> None:
    for text, seconds in ("500ns", 5e-7), ("5 us", 5e-6), ("1.5ms", 1.5e-3), ("2s", 2), ("0", 0):
        assert units.parse_seconds(text, "--latency") == pytest.approx(seconds)
    assert [seconds_text(s) for s in (5e-7, 9.996e-4, 0.25, 12)] == [
        "500 ns",
        "1 ms",
        "250 ms",
        "12 s",
    ]
    assert [units.bandwidth_text(b) for b in (12.5e9, 2e3, 5.0)] == ["12.5 GB/s", "2 kB/s", "5 B/s"]


def test_neither_a_rank_nor_the_launcher_loads_the_simulator() -> None:
    program = (
        "import sys, pycoll, pycoll._launcher.cli, pycoll._tools.cli\n"
        "pycoll.init().all_reduce(1)\n"
        "print([name for name in sys.modules if name.startswith('pycoll.simulate')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "[]\n"
