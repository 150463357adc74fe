"""The file that PYCOLL_TOPOLOGY names, and that all ranks of a job go by the same."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pycoll._selection.agreed import agree, said
from pycoll.errors import BootstrapError


def file_of(folder: Path, text: str, name: str = "ring.toml") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def rank(number: int, node: int, file: str, host: str) -> dict[str, Any]:
    environ = {"PYCOLL_TOPOLOGY": file, "PYCOLL_HOST": host, "XDG_CONFIG_HOME": "/none"}
    return {"node": node} | said(environ, number)


def test_hosts_stand_in_the_order_of_the_file_and_ranks_of_a_host_together(tmp_path: Path) -> None:
    file = file_of(tmp_path, 'ring = ["c", "a", "d", "b"]')
    ranks = [rank(n, node, file, "abc"[node]) for n, node in enumerate((0, 1, 2, 0, 1))]
    found = agree(ranks)
    assert found.ring == (2, 0, 1)
    assert found.order((0, 1, 2, 0, 1)) == (2, 0, 3, 1, 4)
    assert found.order((0, 0, 1)) == ()  # as they stand by their numbers
    assert found.order((1, 1)) == ()
    assert found.topology == file


def test_a_long_name_of_a_host_is_found_by_its_short_one(tmp_path: Path) -> None:
    file = file_of(tmp_path, 'ring = ["b", "a"]')
    ranks = [rank(n, n, file, f"{'ab'[n]}.example.org") for n in range(2)]
    assert agree(ranks).ring == (1, 0)


def test_pretended_hosts_are_named_by_their_numbers(tmp_path: Path) -> None:
    file = file_of(tmp_path, 'ring = ["1", "2", "0"]')
    assert agree([rank(n, n, file, "here") for n in range(3)]).ring == (1, 2, 0)


def test_ranks_of_one_host_need_no_order(tmp_path: Path) -> None:
    file = file_of(tmp_path, 'ring = ["b", "a"]')
    assert agree([rank(n, 0, file, "elsewhere") for n in range(2)]).ring == ()


def test_the_file_may_be_missing_where_rank_0_is_not(tmp_path: Path) -> None:
    file = file_of(tmp_path, 'ring = ["b", "a"]')
    assert agree([rank(0, 0, file, "a"), rank(1, 1, "/none/there", "b")]).ring == (1, 0)


def refused(*ranks: dict[str, Any]) -> str:
    with pytest.raises(BootstrapError) as caught:
        agree(ranks)
    return str(caught.value)


def test_a_rank_that_goes_by_something_else_is_refused(tmp_path: Path) -> None:
    file = file_of(tmp_path, 'ring = ["b", "a"]')
    other = file_of(tmp_path, 'ring = ["a", "b"]', "other.toml")
    first, second = rank(0, 0, file, "a"), rank(1, 1, other, "b")
    assert refused(first, second) == (
        f"PYCOLL_TOPOLOGY: {other} of rank 1, on b, differs from {file} of rank 0, on a; give "
        "both ranks the same file"
    )
    bare = {"node": 1} | said({"XDG_CONFIG_HOME": "/none"}, 1)
    assert refused(first, bare) == (
        "PYCOLL_TOPOLOGY is set for rank 0, but not for rank 1; set it for all ranks or for none"
    )
    assert "is set for rank 1, but not for rank 0" in refused(bare, second)
    assert "host c of this job is not in" in refused(first, rank(1, 1, file, "c"))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("ring = [", "is no TOML: "),
        ('ring = "a"', "ring is a list of names of hosts, as .*, not a str"),
        ("ring = [1]", "not something else in it"),
        ('ring = ["a", "a"]', "ring has a twice; name each host once"),
        ('ring = ["a"]\nhosts = ["a", "b"]', "b is in hosts, but not in ring"),
        ('ring = ["a", "b"]\nhosts = ["a"]', "b is in ring, but not in hosts"),
        ('hosts = ["a", "b"]', r"has no order of hosts, .*; .* `pycoll topology \S+ -o \S+` finds"),
    ],
)
def test_a_file_that_makes_no_sense_is_named(tmp_path: Path, text: str, why: str) -> None:
    file = file_of(tmp_path, text)
    with pytest.raises(BootstrapError, match=f"^PYCOLL_TOPOLOGY: {re.escape(file)}:? .*{why}"):
        rank(0, 0, file, "a")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    names = [f'"{number * 7919**3 % 10**12}"' for number in range(9000)]
    file = file_of(tmp_path, f"ring = [{', '.join(names)}]")
    with pytest.raises(BootstrapError, match="has too many hosts to tell all ranks"):
        rank(0, 0, file, "a")
    (tmp_path / "ring.toml").write_bytes(b"\xff")
    with pytest.raises(BootstrapError, match="cannot be read: it is no text"):
        rank(1, 1, file, "b")
    with pytest.raises(BootstrapError, match="/none cannot be read: No such file or directory"):
        rank(0, 0, "/none", "a")
    with pytest.raises(BootstrapError, match="cannot be read: Is a directory"):
        rank(1, 1, str(tmp_path), "b")
