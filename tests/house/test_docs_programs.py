"""The programs in pages of docs/ run, and print what the pages show: in the tier `docs`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from tiers import exhaustive

import pycoll
from pycoll._requests.core_requests import PersistentRequest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *sorted(DOCS.rglob("*.md")),
]

MARK = "--- the next block ---"

QUIET = {
    "DASK_LOGGING__DISTRIBUTED": "critical",
    "DASK_TEMPORARY_DIRECTORY": ".",
}
"""Dask's log and files are not looked at."""


def blocks(page: str) -> list[tuple[str, str]]:
    """The fenced blocks of a page: language and text."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(r"^```(\w+)\n(.*?)^```$", text, re.M | re.S)


NEEDS = {
    "sample.py": ("emcee", "schwimmbad"),
    "cluster.py": ("dask_mpi",),
    "average.py": ("torch",),
    "ddp.py": ("torch",),
}
"""Libraries that programs of the pages need, and only the tier `engines` has."""


def commands(page: str) -> list[Any]:
    """The commands of a page, each with what it prints."""
    found = []
    for text in [text for language, text in blocks(page) if language == "console"]:
        first = text.split("\n", 1)[0]
        marks = pytest.mark.engines if first.split()[-1] in NEEDS else exhaustive
        found.append(pytest.param(text, page, id=first, marks=marks))
    return found


PAGES = (
    *("index.md", "tutorial.md", "pool_of_ranks.md", "from_torch_distributed.md", "trace.md"),
    "going_on.md",
    "torch.md",
)
COMMANDS = [command for page in PAGES for command in commands(page)]


@pytest.fixture(scope="module")
def tour(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of the pages, each page's in a folder of its name."""
    place = tmp_path_factory.mktemp("tour")
    for page in PAGES:
        (place / page).mkdir()
        for language, text in blocks(page):
            if language == "python":
                (place / page / text.split("\n", 1)[0].removeprefix("# ")).write_text(text)
    return place


@pytest.mark.parametrize(("shown", "page"), COMMANDS)
def test_a_page_prints_what_it_shows(shown: str, page: str, tour: Path) -> None:
    """A line of dots stands for any number of lines; without one ranks may print in any order."""
    command, _, expected = shown.removeprefix("$ ").partition("\n")
    for library in NEEDS.get(command.split()[-1], ()):
        pytest.importorskip(library)
    path = f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}"
    done = subprocess.run(
        command.split(),
        cwd=tour / page,
        env={**os.environ, "PATH": path, **QUIET},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )
    lines = expected.splitlines()
    if "..." in lines:
        varies = r"\d+\\\.\d+|\d+(?=\\ %)"  # times, shares
        escaped = [re.sub(varies, r"[\\d.]+", re.escape(line)) for line in lines]
        pattern = "".join(r"(.*\n)*" if line == r"\.\.\." else f"{line}\n" for line in escaped)
        assert re.fullmatch(pattern, done.stdout), done.stdout
    else:
        assert done.returncode == 0, done.stdout
        assert sorted(done.stdout.splitlines()) == sorted(lines)


@exhaustive
def test_collectives_do_what_their_page_shows(tmp_path: Path) -> None:
    """All blocks are one program of four ranks; what each of them prints stands below its block."""
    program, shown = "", []
    for language, text in blocks("collectives.md"):
        if language == "python":
            program += f"{text}\nprint({MARK!r})\n"
            shown.append("")
        else:
            shown[-1] += text
    (tmp_path / "program.py").write_text(program)
    command = [sys.executable, "-m", "pycoll._launcher", "-n", "4", "--log-dir", ".", "program.py"]
    done = subprocess.run(
        command, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    logs = [(tmp_path / f"rank.{rank}.log").read_text() for rank in range(4)]
    printed = zip(*(log.split(f"{MARK}\n")[:-1] for log in logs), strict=True)
    assert ["".join(of_ranks) for of_ranks in printed] == shown


def test_what_the_tables_of_other_libraries_name_exists() -> None:
    """The second column of the tables of mpi4py and torch.distributed."""
    owners = {
        "comm": pycoll.Communicator,
        "grid": pycoll.init().grid((1,)),
        "request": PersistentRequest,
        "status": pycoll.Status(0, 0, 0),
        "pycoll": pycoll,
    }
    pages = [DOCS / f"from_{name}.md" for name in ("mpi4py", "torch_distributed")]
    lines = [line for page in pages for line in page.read_text(encoding="utf-8").splitlines()]
    ours = [line.split(" | ")[1] for line in lines if line.startswith("| `")]
    named = [name for cell in ours for name in re.findall(rf"({'|'.join(owners)})\.(\w+)", cell)]
    assert len(named) > 50
    missing = [f"{owner}.{name}" for owner, name in named if not hasattr(owners[owner], name)]
    assert not missing


@exhaustive
def test_the_pictures_show_what_the_collectives_do() -> None:
    command = [sys.executable, str(DOCS / "draw_collectives.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_lines_are_at_most_100_columns_wide() -> None:
    """But for tables, which cannot be wrapped, what programs print, and long words."""
    wide = []
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        text = re.sub(r"^```(?!python$|sh$).*?^```$", "", text, flags=re.M | re.S)
        for line in text.splitlines():
            if len(line) > 100 and not line.startswith("|") and " " in line.strip():
                wide.append(f"{document.name}: {line}")
    assert not wide, "\n".join(wide)
