"""Links between hosts: measured, written, read, and shown with the best ring."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE
from tiers import smoke

from pycoll._selection.agreed import said
from pycoll._tools.cli import main
from pycoll._topology import links
from pycoll._topology.links import HostLinks
from pycoll._topology.worker import rounds

NARROW = """\
hosts = ["a", "b", "c", "d"]
bandwidth_MBps = [[0, 25, 100, 100], [25, 0, 100, 100], [100, 100, 0, 100], [100, 100, 100, 0]]
"""


def written(folder: Path, text: str) -> str:
    (folder / "links.toml").write_text(text)
    return str(folder / "links.toml")


@smoke
def test_a_ring_avoids_the_narrow_link_and_a_job_takes_it_from_the_file(
    tmp_path: Path, capsys: Any
) -> None:
    file = written(tmp_path, NARROW)
    assert main(["topology", file, "-o", file]) == 0
    out = capsys.readouterr().out
    assert "from a      -   25  100  100\nfrom b     25    -  100  100\n" in out
    assert "best ring: a -> c -> b -> d\n  its narrowest link has 100 MB/s, no ring has a" in out
    assert "best tree: a - c, a - d, b - c\n" in out
    assert links.read(file).ring == ("a", "c", "b", "d")
    told = said({"PYCOLL_TOPOLOGY": file, "XDG_CONFIG_HOME": "/none"}, 0)
    assert told["topology"]["ring"]
    assert main(["topology", file, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tree"] == [["a", "c"], ["a", "d"], ["b", "c"]]


def test_a_file_reads_as_it_was_written(tmp_path: Path) -> None:
    made = HostLinks(
        hosts=("a", 'q"\\uote', "süd"),
        widths=[[0.0, 1.25, 1234.0], [0.001, 0.0, 3.0], [4.0, 5.0, 0.0]],
        latencies=[[0.0, 30.5, 2e4], [1.0, 0.0, 3.0], [4.0, 5.0, 0.0]],
        origin="by hand",
    ).with_ring()
    file = written(tmp_path, made.as_toml())
    read = links.read(file)
    assert read._replace(widths=made.widths, latencies=made.latencies) == made
    assert (read.widths, read.latencies) == (made.widths, made.latencies)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "has no hosts: write hosts ="),
        ('hosts = ["a", "b"]\nbandwidth_MBps = [[0, 1]]', "bandwidth_MBps is 2 rows of 2 numbers"),
        ('hosts = ["a", "b"]\nlatency_us = [[0, -1], [1, 0]]', "has -1, which is no number"),
        ('hosts = ["a", "b"]\nlatency_us = [[0, true], [1, 0]]', "has True, which is no number"),
        ('hosts = ["a", "b"]\nlatency_us = [[0, nan], [1, 0]]', "has nan, which is no number"),
        ('hosts = ["a", "b"]\nbandwidth_MBps = [[0, 0], [1, 0]]', "has a 0 between two hosts"),
    ],
)
def test_a_file_that_makes_no_sense_is_named(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(ValueError, match=r"links\.toml:? ") as caught:
        links.read(written(tmp_path, text))
    assert why in str(caught.value)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["-H", "a:1"], "-H is for --measure"),
        (["-n", "2"], "-n is for --measure"),
        (["-o", "x"], "-o is for links between hosts"),
        (["--measure", "x"], "--measure does not read x"),
        (["x", "--svg", "y"], "--svg is for this machine alone"),
        (["/none"], "/none cannot be read: No such file"),
        (["x", "-o", "y", "--json"], "-o does not go together with --json"),
        (["--svg", "y.png"], "--svg y.png: it writes SVG; name it .svg"),
        (["--svg", "/none/y"], "/none/y cannot be written: No such file"),
        (["--measure", "-n", "2", "--transport", "shm"], "there is one host, and no link"),
    ],
)
def test_options_that_make_no_sense_are_refused(words: list[str], why: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["topology", *words])
    assert ended.value.code == 2
    assert why in capsys.readouterr().err


def test_a_file_without_widths_has_nothing_to_find_a_ring_by(tmp_path: Path, capsys: Any) -> None:
    file = written(tmp_path, 'ring = ["b", "a"]')
    assert main(["topology", file]) == 0
    assert capsys.readouterr().out == "ring of the file: b -> a\n"
    with pytest.raises(SystemExit):
        main(["topology", file, "-o", file])
    assert "has no bandwidth_MBps, by which to find a ring" in capsys.readouterr().err


@pytest.mark.parametrize("count", range(2, 10))
def test_each_host_meets_each_once_and_no_two_at_a_time(count: int) -> None:
    met = []
    for pairs in rounds(count):
        busy = [host for pair in pairs for host in pair]
        assert len(busy) == len(set(busy)) == count - count % 2
        met += pairs
    assert sorted(met) == [(a, b) for a in range(count) for b in range(a + 1, count)]


def test_links_of_pretended_hosts_are_measured_and_written(tmp_path: Path, capfd: Any) -> None:
    file = tmp_path / "cluster.toml"
    words = ["--measure", "-n", "5", "--emulate-hosts", "3", "-o", str(file)]
    assert main(["topology", *words]) == 0
    assert "best ring: 0 -> " in capfd.readouterr().out
    found = links.read(str(file))
    assert found.hosts == ("0", "1", "2")
    assert found.ring == links.read(str(file)).with_ring().ring
    for rows in (found.widths, found.latencies):
        for a, row in enumerate(rows):
            assert [value > 0 for value in row] == [b != a for b in range(3)]
    assert found.latencies[0][1] == found.latencies[1][0]


def test_an_interrupt_ends_the_job_and_is_said_in_a_line(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    words = ["--measure", "-n", "6", "--emulate-hosts", "6", "-o", str(file)]
    command = [sys.executable, "-P", "-m", "pycoll", "topology", *words]
    job = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)

    def children(pid: str) -> list[str]:
        return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()

    deadline = time.monotonic() + 60 * PATIENCE
    while not any(map(children, children(str(job.pid)))):  # ranks, of pycoll-run
        assert time.monotonic() < deadline
        time.sleep(0.01)
    job.send_signal(signal.SIGINT)
    _, told = job.communicate(timeout=60 * PATIENCE)
    assert told.endswith("pycoll topology: nothing was measured: interrupted\n")
    assert job.returncode == 128 + signal.SIGINT
    assert not file.exists()


def test_a_job_that_cannot_start_writes_nothing(tmp_path: Path, capfd: Any) -> None:
    file = tmp_path / "cluster.toml"
    words = ["--measure", "-n", "2", "--emulate-hosts", "3", "-o", str(file)]
    assert main(["topology", *words]) == 1
    told = capfd.readouterr().err
    assert "--emulate-hosts 3 needs as many ranks, there are 2" in told
    assert "pycoll topology: nothing was measured: pycoll-run ended with 2" in told
    assert not file.exists()
