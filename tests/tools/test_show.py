"""The command `pycoll show`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from pycoll import schedules
from pycoll._tools import show
from pycoll._tools.cli import main

MINE = """
import pycoll
from pycoll.schedule import Recv, Send, recv_reduce

@pycoll.register_algorithm("all_reduce", "my_ring", chunks=lambda size: size)
def ring_of_mine(rank, size):
    right, left = (rank + 1) % size, (rank - 1) % size
    for i in range(size - 1):
        yield Send(right, chunk=(rank - i) % size)
        yield from recv_reduce(left, chunk=(rank - i - 1) % size)
    for i in range(size - 1):
        yield Send(right, chunk=(rank - i + 1) % size)
        yield Recv(left, chunk=(rank - i) % size)

@pycoll.register_algorithm("all_reduce", "halves", chunks=2)
def halves(rank, size):
    if rank ^ 1 < size:
        other, mine = rank ^ 1, rank % 2
        yield Send(other, 1 - mine)
        yield from recv_reduce(other, mine, incoming_first=other < rank)
        yield Send(other, mine)
        yield Recv(other, 1 - mine)

@pycoll.register_algorithm("broadcast", "broken")
def broken(rank, size, root):
    yield Send(1 // rank, 0)
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file with algorithms of a user's, which are forgotten after the test."""
    monkeypatch.setattr(schedules, "TABLE", {c: dict(n) for c, n in schedules.TABLE.items()})
    monkeypatch.setattr(show, "_FILES", {})
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return str(path)


def test_text_is_printed_and_files_are_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["show", "all_reduce", "tree", "--ranks", "3", "--hosts", "2,1"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("all_reduce tree on 3 ranks, 2 hosts\n")
    assert "host 0: ranks 0-1\nhost 1: ranks 2\n" in printed
    picture, page = tmp_path / "ring.svg", tmp_path / "ring.html"
    files = ["--svg", str(picture), "--html", str(page)]
    assert main(["show", "reduce", "chain", "-n", "4", "--root", "2", *files]) == 0
    assert capsys.readouterr().out == f"wrote {picture}\nwrote {page}\n"
    assert "reduce chain on 4 ranks, root 2" in picture.read_text(encoding="utf-8")
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_an_algorithm_of_the_users_is_drawn_by_its_name_or_its_functions(
    mine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", "all_reduce", "ring"]) == 0
    ours = capsys.readouterr().out
    for name in ([f"{mine}:my_ring"], ["all_reduce", f"{mine}:ring_of_mine"]):
        assert main(["show", *name]) == 0
        theirs = capsys.readouterr().out
        # It differs from pycoll's in the chunk with which a rank begins.
        assert theirs.splitlines()[1] == ours.splitlines()[1]
        assert "my_ring on 4 ranks" in theirs


def test_a_wrong_algorithm_is_drawn_and_the_status_is_1(
    mine: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["show", f"{mine}:halves", "-n", "3"]) == 1
    printed = capsys.readouterr()
    assert "WRONG: all_reduce halves, size 3: rank 0 ends with (0 1) of chunk 0" in printed.out
    assert "\n  round 2, rank 1, chunk 0: lacks rank 2\n" in printed.out
    assert printed.err == ""
    picture = tmp_path / "wrong.svg"
    assert main(["show", f"{mine}:halves", "-n", "3", "--svg", str(picture)]) == 1
    assert "without the contribution of rank 2" in capsys.readouterr().err
    # Two chunks of each rank are framed, and a cross is in each place that lacks a rank.
    crosses = re.findall(r'<path class="x" d="([^"]*)"', picture.read_text(encoding="utf-8"))
    assert [path.count("z") for path in crosses] == [6]
    assert [path.count("l") for path in crosses] == [2 * (2 + 2 + 4)]
    assert main(["show", f"{mine}:halves", "-n", "2"]) == 0


def test_what_a_users_function_raises_is_shown_without_frames_of_pycoll(
    mine: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["show", f"{mine}:broken", "-n", "3"]) == 1
    said = capsys.readouterr().err
    assert "ZeroDivisionError" in said
    assert "yield Send(1 // rank, 0)" in said
    assert "rounds.py" not in said
    assert "in the algorithm broadcast 'broken'" in said
    (tmp_path / "bad.py").write_text("import nothing_of_that_name\n")
    with pytest.raises(SystemExit) as ended:
        main(["show", f"{tmp_path}/bad.py:x"])
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert "nothing_of_that_name" in said
    assert "runpy" not in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["all_reduce", "rng"], "has no algorithm 'rng'; it has ring, .*; did you mean ring?"),
        (["all_reduce"], "write a collective and one algorithm.*; all_reduce has ring, "),
        (["ring"], "no collective 'ring'; there are broadcast"),
        (["all_reduce", "ring", "-n", "0"], "-n is 0; there is at least 1 rank"),
        (["all_reduce", "ring", "--hosts", "8"], "4 ranks cannot be on more than 4 hosts"),
        (["all_reduce", "ring", "--hosts", "2,3"], "that makes 5 ranks, but -n is 4"),
        (["all_reduce", "ring", "--hosts", "a"], "--hosts is 'a': a number of hosts"),
        (["reduce", "tree", "--root", "4"], "root is 4, but the ranks are 0 to 3"),
        (["all_reduce", "shared_memory"], "sends no messages"),
        (["nowhere.py:ring"], "there is no file 'nowhere.py'"),
        (["all_reduce", "ring", "--svg", "a.png"], "--svg a.png: it writes SVG; name it .svg"),
        (["all_reduce", "ring", "--html", "a.svg"], "--html a.svg: it writes HTML; name it .html"),
        (["all_reduce", "ring", "--svg", "/nowhere/a.svg"], "/nowhere/a.svg: No such file"),
    ],
)
def test_what_makes_no_sense_is_said_in_a_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["show", *words])
    assert ended.value.code == 2
    assert re.search(said, capsys.readouterr().err)


def test_a_name_that_a_file_does_not_register_is_refused(
    mine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["show", f"{mine}:my_tree"])
    assert "registers no 'my_tree'; it registers broadcast broken, all_reduce my_ring, " in (
        capsys.readouterr().err
    )


def test_many_ranks_are_drawn_with_a_word_about_what_is_readable(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "many.svg"
    assert main(["show", "barrier", "dissemination", "-n", "40", "--svg", str(picture)]) == 0
    printed = capsys.readouterr()
    assert printed.err == (
        "pycoll show: up to 16 ranks are readable; of 40 only the messages are drawn, not the "
        "chunks\n"
    )
    assert picture.read_text(encoding="utf-8").count("data-from") == 40 * 6
    assert main(["show", "barrier", "dissemination", "-n", "40"]) == 0
    text = capsys.readouterr().out
    assert "\nround 6\n  0>32 +; 1>33 +; " in text
    assert "chunk 0" not in text


def test_who_reads_the_beginning_only_sees_no_traceback() -> None:
    command = [sys.executable, "-m", "pycoll._tools.cli", "show", "all_reduce", "ring", "-n", "16"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as shown:
        assert shown.stdout is not None
        assert shown.stderr is not None
        assert shown.stdout.readline() == b"all_reduce ring on 16 ranks\n"
        shown.stdout.close()
        assert shown.stderr.read() == b""
        assert shown.wait(60) == 128 + 13
