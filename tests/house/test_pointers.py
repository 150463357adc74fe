"""What comments, docstrings and the READMEs of the source name in backticks is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("pycoll", "transports", "launcher")
OF_OTHERS = {"CU_POINTER_ATTRIBUTE_BUFFER_ID", "__builtin_cpu_supports", "docker0"}
"""Names of CUDA, compilers and networks that are only spoken of."""

SAID = r'"""[\s\S]*?"""|#[^\n]*'
TEXT = r'"(?:\\.|[^"\\\n])*"' r"|'(?:\\.|[^'\\\n])*'"
IN_PYTHON = re.compile(f"({SAID})|{TEXT}")
"""A docstring or comment; or a text, in which # begins none."""

IN_C = re.compile(r"/\*.*?\*/", re.DOTALL)
WORD = re.compile(r"\w+")
POINTER = re.compile(r"(?<!`)`([A-Za-z_][\w.]*)(?:\(\))?`(?!`)")


def of_python(text: str) -> tuple[set[str], str]:
    """Return the names in a program, and what is said about it."""
    said = []

    def rest(found: re.Match[str]) -> str:
        if found[1] is None:
            return found[0]
        said.append(found[0])
        return " "

    names = set(WORD.findall(IN_PYTHON.sub(rest, text)))
    return names, "\n".join(said)


def of_c(text: str) -> tuple[set[str], str]:
    return set(WORD.findall(IN_C.sub(" ", text))), "\n".join(IN_C.findall(text))


def test_what_is_pointed_to_is_there() -> None:
    names: set[str] = set(OF_OTHERS)
    said: dict[Path, str] = {}
    for path in (path for folder in SOURCES for path in sorted((ROOT / folder).rglob("*"))):
        if path.is_dir() or path.is_symlink() or "__pycache__" in path.parts:
            continue
        names.update(path.relative_to(ROOT).parts, path.name.split("."))
        if path.suffix in (".py", ".pyi"):
            found, said[path] = of_python(path.read_text(encoding="utf-8"))
        elif path.suffix in (".c", ".h", ".inc"):
            found, said[path] = of_c(path.read_text(encoding="utf-8"))
        elif path.suffix == ".md":
            found, said[path] = set(), path.read_text(encoding="utf-8")
        else:
            continue
        names |= found
    names.update(word for path in ROOT.iterdir() for word in path.name.split("."))
    assert len(said) > 300, "the source is elsewhere"
    wrong = [
        f"{path.relative_to(ROOT)}: {pointer}"
        for path, text in said.items()
        for pointer in POINTER.findall(text)
        if not names.issuperset(pointer.strip(".").split("."))
    ]
    assert wrong == []
