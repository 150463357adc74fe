"""The list of planted faults fits the sources and the tests; scripts/planted_faults plants them."""

from __future__ import annotations

import ast
import functools
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LIST = tomllib.loads((ROOT / "tests" / "planted_faults.toml").read_text(encoding="utf-8"))
FAULTS: list[dict[str, str]] = LIST["fault"]


@functools.cache
def text_of(file: str) -> str:
    path = ROOT / file
    return path.read_text(encoding="utf-8") if path.exists() else ""


TIERS = (
    *("default", "exhaustive", "gpu", "rdma", "launchers", "tools", "core"),
    *("parallel", "torch", "hosts"),
)


@functools.cache
def functions_of(file: str) -> set[str]:
    tree = ast.parse(text_of(file))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def what_is_wrong_with(fault: dict[str, Any]) -> str:
    if fault.keys() != {"what", "file", "right", "wrong", "test", "tier"}:
        return f"has {', '.join(fault)}"
    if fault["tier"] not in TIERS:
        return f"has the tier {fault['tier']}"
    text = text_of(fault["file"])
    planted = text.replace(fault["right"], fault["wrong"])
    if text.count(fault["right"]) != 1 or planted == text:
        return f"{fault['file']} has changed: plant it elsewhere"
    if fault["file"].endswith(".py"):
        compile(planted, fault["file"], "exec", dont_inherit=True)  # quicker than ast.parse
    file, _, function = fault["test"].partition("::")
    if function.partition("[")[0] not in functions_of(file):
        return f"there is no test {fault['test']}"
    return ""


def test_what_is_listed_is_there() -> None:
    wrong = [
        (fault.get("what"), reason) for fault in FAULTS if (reason := what_is_wrong_with(fault))
    ]
    assert len(FAULTS) > 100
    assert not wrong, "\n".join(f"{what} {reason}" for what, reason in wrong)


def test_nothing_is_listed_twice() -> None:
    places = [(fault["file"], fault["right"], fault["wrong"]) for fault in FAULTS]
    names = [(fault["what"], fault["file"]) for fault in FAULTS]
    assert len(set(places)) == len(set(names)) == len(FAULTS)
