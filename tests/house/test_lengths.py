"""Files can be read in one sitting, and lines on one screen. (Ruff sees to the lines of Python.)"""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("pycoll", "transports", "launcher", "tests", "examples", "benchmarks", "scripts", ".ci")
LONGEST, LONGEST_OF_C = 500, 900
WIDEST = 100
ALONE = "pycoll/_tools/bench_worker.py"
"""Peers run it by its path, where pycoll is not installed: it stays one file."""

if not (ROOT / "transports").is_dir():
    pytest.skip("needs a checkout", allow_module_level=True)


def is_source(path: Path) -> bool:
    if path.suffix in (".py", ".c", ".h"):
        return True
    return not path.suffix and path.read_bytes().startswith(b"#!")


SOURCES = [
    path
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*"))
    if path.is_file() and "__pycache__" not in path.parts and is_source(path)
]


def test_files_are_shorter_than_500_lines_and_of_c_than_900() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for path in SOURCES
    }
    assert len(lengths) > 600
    most = {name: LONGEST_OF_C if name.endswith((".c", ".h")) else LONGEST for name in lengths}
    assert [name for name, length in lengths.items() if length >= most[name]] == [ALONE]


def test_lines_of_c_are_at_most_100_columns_wide() -> None:
    files = [path for path in SOURCES if path.suffix in (".c", ".h")]
    assert len(files) > 150
    wide = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in files
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > WIDEST
    ]
    assert wide == []
