"""What a user reads has words that the documents explain."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OUR_OWN = {
    r"\bagents?\b": "pycoll's launcher on this host",
    r"\bguardian\b": "a second process",
    r"\b(at|by) the door\b": "at the socket of this job",
}
"""Nouns of the source alone, and how a message says them."""

NOT_READ = {"\n\0pycoll agent\0\n"}
"""What only the other end reads."""


def texts(path: Path) -> Iterator[str]:
    """The texts of a module that are no documentation, as written; if one may have such a word."""
    source = path.read_text(encoding="utf-8")
    if not any(re.search(word, source) for word in OUR_OWN):
        return
    tree = ast.parse(source)
    documentation = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)
    }  # of modules, classes, functions and names
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in documentation:
            value = node.value.decode("latin-1") if isinstance(node.value, bytes) else node.value
            if isinstance(value, str):
                yield value


def test_messages_speak_of_nothing_that_only_the_source_knows() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {text!r} (say: {instead})"
        for folder in ("pycoll", "transports", "launcher")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not path.is_symlink()
        for text in texts(path)
        if " " in text and text not in NOT_READ
        for word, instead in OUR_OWN.items()
        if re.search(word, text)
    ]
    assert found == []
