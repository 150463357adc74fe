"""`pycoll tune`: from times to a table that says them again, and the command that measures them."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from typing import Any

import pytest
from patience import PATIENCE
from tiers import exhaustive, smoke

from pycoll._selection import costs, flows
from pycoll._selection.costs import CORE, CUT, NET, RDMA, SHM, TCP, WHOLE, LinkCosts
from pycoll._tools import cli
from pycoll._tools.tune import CallSample, Tuning, add_factors, fit, make_table
from pycoll.schedules import TABLE

TRUE = LinkCosts(call=2e-5, step=3e-5, path=2e-10, message=1e-5, byte=1e-10, combine=5e-11)


def times(link: str, constants: LinkCosts, noise: float = 1.0) -> list[CallSample]:
    """What would be measured on a machine with these constants and 4 cores."""
    found = []
    flip = itertools.cycle((noise, 1 / noise))
    for size, collective in itertools.product((2, 4, 8), ("broadcast", "all_reduce", "all_gather")):
        for name, algorithm in TABLE[collective].items():
            if algorithm.hosts:
                continue
            for nbytes in (8, 4096, 1 << 20):
                sample = CallSample(link, size, collective, name, 1, nbytes)
                exact = costs.shipped()._replace(links={link: constants})
                seconds = exact.seconds((link, sample.work(4.0))) * next(flip)
                found.append(sample._replace(seconds=seconds))
    return found


@smoke
def test_constants_are_found_from_times() -> None:
    assert fit(times(TCP, TRUE), 4.0) == pytest.approx(TRUE, rel=0.02)


def test_constants_are_found_from_times_that_are_not_exact_and_none_is_negative() -> None:
    found = fit(times(TCP, TRUE, noise=1.3), 4.0)
    assert all(value >= 0 for value in found)
    assert found.message == pytest.approx(TRUE.message, rel=0.3)


def test_a_table_says_again_what_was_measured() -> None:
    samples = times(TCP, TRUE, noise=3.0)
    table = make_table(costs.shipped(), samples, "a test", 4)
    for sample in samples:
        said = table.seconds((TCP, sample.work(4.0)))
        said *= table.factor(sample.row, sample.size, sample.nbytes, sample.size > 4)
        assert said == pytest.approx(sample.seconds)


@pytest.mark.parametrize("seconds", [1e-20, 1e9])
def test_what_a_machine_that_is_too_busy_measures_is_a_table_too(seconds: float) -> None:
    (sample, *_) = times(TCP, TRUE)
    table = add_factors(costs.shipped(), [sample._replace(seconds=seconds)])
    assert costs.parse(table.as_json(), "it") == table


def test_what_was_not_measured_stays_and_hosts_go_by_tcp() -> None:
    base = costs.shipped()
    table = make_table(base, times(TCP, TRUE), "a test", 4)
    assert table.links[SHM] == base.links[SHM]
    assert table.links[CORE] == base.links[CORE]
    assert table.links[RDMA] == base.links[RDMA]
    assert table.links[NET].step > table.links[TCP].step
    assert table.links[NET].path > table.links[TCP].path
    assert costs.parse(table.as_json(), "it").factors.keys() == table.factors.keys()


def test_the_estimate_of_rdma_goes_by_shared_memory() -> None:
    table = make_table(costs.shipped(), times(SHM, TRUE), "a test", 4)
    assert table.links[RDMA] == costs.estimated_rdma(table.links[SHM])
    assert table.links[NET] == costs.shipped().links[NET]


def test_factors_of_other_machines_are_dropped() -> None:
    row = (SHM, "reduce", "tree", WHOLE)
    base = costs.shipped()._replace(factors={row: {2: (3.0,)}}, cores=4, sizes=(8, 4096, 1 << 20))
    samples = times(TCP, TRUE)
    assert row in make_table(base, samples, "a test", 4).factors
    assert row not in make_table(base, samples, "a test", 8).factors
    assert row not in make_table(base, times(SHM, TRUE)[:1], "a test", 4).factors


def test_sizes_that_were_not_measured_have_the_factor_of_the_nearest() -> None:
    whole = times(TCP, TRUE)
    table = make_table(costs.shipped(), whole, "a test", 4)
    cut = [s._replace(segments=4, seconds=9.0) for s in whole if s.nbytes > 8 and s.size == 8]
    first = cut[0]
    table = add_factors(table, [s for s in cut if s.row == first.row])
    low, middle, high = table.factors[first.row[0], first.row[1], first.row[2], CUT][8]
    assert low == middle != high


def test_blocks_of_a_rank_have_no_more_bytes_than_a_value() -> None:
    tuning = Tuning((TCP,), (8,), (8, 8 << 20, 64 << 20), 1)
    assert tuning.lengths("reduce", 8) == (8, 8 << 20, 64 << 20)
    assert tuning.lengths("all_to_all", 8) == (8, 8 << 20)
    assert tuning.lengths("barrier", 8) == (0,)


def test_the_core_has_work_for_every_collective() -> None:
    for collective in TABLE:
        work = flows.core_work(collective, 1024, 4, 4.0)
        assert work.ends > 0
        assert (work.end_nbytes > 0) == (collective != "barrier")


def tune(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pycoll._tools.cli", "tune", *words]
    return subprocess.run(
        command,
        env=os.environ | environ,
        capture_output=True,
        text=True,
        timeout=100 * PATIENCE,
        check=False,
    )


def test_the_command_writes_a_table_that_jobs_go_by(tmp_path: Any) -> None:
    output = tmp_path / "new" / "costs.json"
    words = ["--ranks", "2", "--sizes", "8", "--rounds", "1", "--transport", "shm"]
    done = tune(*words, "--output", str(output))
    assert done.returncode == 0, done.stderr
    assert f"wrote {output}" in done.stdout
    assert f"PYCOLL_COSTS={output}" in done.stdout
    table = costs.parse(costs.read(str(output)), "it")
    assert "2 ranks" in table.origin
    measured = {row[:3] for row in table.factors if row[0] == SHM}
    assert measured == {
        (SHM, collective, a.name)
        for collective, algorithms in TABLE.items()
        for a in algorithms.values()
        if not a.hosts
    }
    assert (CORE, "all_reduce", "shared_memory", WHOLE) in table.factors
    assert [path.name for path in output.parent.iterdir()] == ["costs.json"]


@exhaustive
def test_a_table_of_another_version_is_no_obstacle_to_measuring_a_new_one(tmp_path: Any) -> None:
    old = tmp_path / "pycoll" / "costs.json"
    old.parent.mkdir()
    old.write_text('{"version": 0}')
    words = ["--ranks", "2", "--sizes", "8", "--rounds", "1", "--transport", "tcp"]
    settings = {"XDG_CONFIG_HOME": str(tmp_path), "PYCOLL_COSTS": "", "PYCOLL_SEGMENT": "wrong"}
    done = tune(*words, **settings)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"wrote {old}\n"
    # One round of one size does not tell a call's time from that of its steps.
    assert sum(costs.parse(costs.read(str(old)), "it").links[TCP][:2]) > 0


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--transport", "pigeon"], "no transport 'pigeon' to tune; there are shm, tcp"),
        (["--ranks", "1"], "at least 2"),
        (["--ranks", "two"], "no list of numbers"),
        (["--sizes", "7"], "not a multiple"),
        (["--rounds", "-1"], "at least 1"),
    ],
)
def test_wrong_arguments_are_named(
    words: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["tune", *words])
    assert ended.value.code == 2
    assert why in capsys.readouterr().err
