"""The folders of the C core: which includes which, as their README says, and never in a circle."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CORE = Path(__file__).resolve().parents[2] / "transports" / "_core"
INCLUDED = re.compile(r'^\s*#\s*include ["<]([^">]+)[">]', re.M)

if not CORE.is_dir():
    pytest.skip("needs a checkout", allow_module_level=True)

SOURCES = [path for path in sorted(CORE.rglob("*")) if path.suffix in (".c", ".h", ".inc")]


def folder_of(path: Path) -> str:
    return path.parent.relative_to(CORE).as_posix()


def included() -> dict[str, set[str]]:
    """The other folders that the files of each folder include."""
    found: dict[str, set[str]] = {}
    for path in SOURCES:
        folders = found.setdefault(folder_of(path), set())
        for name in INCLUDED.findall(path.read_text(encoding="utf-8")):
            beside, below = path.parent / name, CORE / name
            assert beside == below or not (beside.exists() and below.exists()), f"{path}: {name}"
            if not beside.exists() and below.exists():
                folders.add(folder_of(below))
    return found


def table() -> dict[str, set[str]]:
    """What the README says that the files of each folder include."""
    text = (CORE / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z/]+)` \| .* \| (.*?) *\|$", text, re.M)
    return {folder: set(re.findall(r"`([a-z/]+)`", cell)) for folder, cell in rows}


def test_a_folder_includes_what_its_row_says_and_only_rows_above_it() -> None:
    found, said = included(), table()
    assert len(said) > 10
    assert [path.name for path in SOURCES if path.parent == CORE] == ["module.c"]
    del found["."]  # it names all types
    assert found == said
    rows = list(said)
    for folder, others in said.items():
        assert others <= set(rows[: rows.index(folder)]), f"{folder} includes a row below it"


def test_only_files_below_python_know_python() -> None:
    knowing = [
        path.relative_to(CORE).as_posix()
        for path in SOURCES
        if re.search(r'include (<Python.h>|"python/)|\bPy_?[A-Z]\w+\(', path.read_text("utf-8"))
    ]
    assert len(knowing) > 20
    assert [name for name in knowing if not name.startswith(("python/", "module.c"))] == []


def test_a_name_of_a_file_is_there_once() -> None:
    names = [path.name for path in SOURCES]
    assert len(set(names)) == len(names) > 130
