"""The list of planted faults fits the sources and the tests; scripts/planted_faults plants them."""

from __future__ import annotations

import ast
import functools
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIST = tomllib.loads((ROOT / "tests" / "planted_faults.toml").read_text(encoding="utf-8"))
FAULTS: list[dict[str, str]] = LIST["fault"]


@functools.cache
def functions_of(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault["what"])
def test_what_is_listed_is_there(fault: dict[str, Any]) -> None:
    assert fault.keys() == {"what", "file", "right", "wrong", "test", "tier"}
    assert fault["tier"] in ("default", "exhaustive", "gpu", "rdma")
    text = (ROOT / fault["file"]).read_text(encoding="utf-8")
    assert text.count(fault["right"]) == 1, f"{fault['file']} has changed: plant it elsewhere"
    planted = text.replace(fault["right"], fault["wrong"])
    assert planted != text
    if fault["file"].endswith(".py"):
        ast.parse(planted)
    file, _, function = fault["test"].partition("::")
    assert function.partition("[")[0] in functions_of(file)


def test_nothing_is_listed_twice() -> None:
    places = [(fault["file"], fault["right"], fault["wrong"]) for fault in FAULTS]
    names = [(fault["what"], fault["file"]) for fault in FAULTS]
    assert len(set(places)) == len(set(names)) == len(FAULTS)
