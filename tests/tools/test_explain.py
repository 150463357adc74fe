"""The command `pycoll explain`; tests/calls/test_explain.py compares it with `comm.explain`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pycoll._tools.cli import main


def test_ranks_networks_and_cores_that_are_not_here_are_explained(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def said(*words: str) -> str:
        assert main(["explain", "all_reduce", "--ranks", "64", "--bytes", "1M", *words]) == 0
        return capsys.readouterr().out

    def seconds(text: str) -> float:
        found = re.match(r".* about ([\d.]+) (us|ms|s)\n", text)
        assert found is not None
        return float(found[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[found[2]]

    tcp, rdma = said("--hosts", "8"), said("--hosts", "8", "--network", "rdma")
    assert "TCP between machines" in tcp
    assert "(RDMA, an estimate)" in rdma
    assert seconds(rdma) < seconds(tcp)
    assert seconds(said("--cores", "64")) < seconds(said("--cores", "2"))
    assert "shared_memory, about" in said()
    assert "hierarchical" in said("--hosts", "8").split("not considered")[0]
    assert "TCP on one machine" in said("--emulate-hosts", "8")


def test_without_bytes_there_is_a_line_for_each_length(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "allreduce", "-n", "8", "--transport", "tcp"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "all_reduce on 8 ranks"
    assert [" ".join(line.split()[:2]) for line in lines[1:-1]] == [
        *("8 B", "64 B", "512 B", "4 KiB", "32 KiB", "256 KiB", "2 MiB", "16 MiB", "128 MiB"),
    ]
    assert main(["explain", "barrier", "-n", "2"]) == 0
    assert capsys.readouterr().out.startswith("barrier of 0 B on 2 ranks: shared_memory, about")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["allreduc"], "no collective 'allreduc'; .*; did you mean all_reduce?"),
        (["reduce", "--bytes", "x"], "--bytes is 'x', which is no length"),
        (["reduce", "--op", "plus"], "there is no operator 'plus'"),
        (["reduce", "--op", "band", "--dtype", "float32"], "does not work on float32"),
        (["reduce", "-n", "0"], "-n is 0; there is at least 1 rank"),
        (["reduce", "--cores", "0"], "--cores is 0; a host has at least 1"),
        (["reduce", "--hosts", "2", "--transport", "shm"], "which share no memory"),
        (["reduce", "--emulate-hosts", "0"], "is '0': a number of hosts"),
    ],
)
def test_what_makes_no_sense_is_said_in_a_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["explain", *words])
    assert ended.value.code == 2
    assert re.search(said, capsys.readouterr().err)


def test_a_setting_that_makes_no_sense_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYCOLL_ALGORITHM", "all_reduce:rng")
    with pytest.raises(SystemExit):
        main(["explain", "all_reduce"])
    assert "PYCOLL_ALGORITHM: 'all_reduce:rng'" in capsys.readouterr().err


def test_hosts_of_a_file_of_topology_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ring.toml"
    file.write_text('hosts = ["a", "b", "c"]\nring = ["b", "a", "c"]')
    monkeypatch.setenv("PYCOLL_TOPOLOGY", str(file))
    words = ["explain", "all_gather", "-n", "6", "--bytes", "1M"]
    assert main([*words, "--hosts", "3"]) == 0
    assert f"order that PYCOLL_TOPOLOGY={file} says" in capsys.readouterr().out
    assert main([*words, "--hosts", "1"]) == 0
    assert "PYCOLL_TOPOLOGY" not in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*words, "--hosts", "6"])
    assert "host 3 of this job is not in" in capsys.readouterr().err
