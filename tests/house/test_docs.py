"""The documents agree with the program and with each other."""

from __future__ import annotations

import re
import subprocess
import sysconfig
from pathlib import Path

from pycoll import errors
from pycoll._support.environment import VARIABLES

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (
    "",
    "docs",
    "docs/learn",
    "docs/parallel",
    "launcher",
    "transports",
    "transports/_core",
    "pycoll/_gpu",
)
DOCUMENTS = sorted(path for folder in FOLDERS for path in (ROOT / folder).glob("*.md"))
LAUNCHING = (ROOT / "docs/launching.md").read_text(encoding="utf-8")


def section(text: str, heading: str) -> str:
    return text.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]


def flags(text: str) -> list[str]:
    """The options that a line begins with: what stands after the first double blank explains."""
    return re.findall(r"(?<![\w-])--?[a-z][a-z-]*", text.split("  ")[0])


def test_every_option_of_pycoll_run_is_documented_and_no_other() -> None:
    command = Path(sysconfig.get_path("scripts")) / "pycoll-run"
    printed = subprocess.run([command, "--help-all"], capture_output=True, text=True, check=True)
    starts = re.findall(r"^  (-.*)", printed.stdout, re.M)
    named = {name for start in starts for name in flags(start)}
    first_cells = re.findall(r"^\| *(`-[^|]*)", section(LAUNCHING, "Options"), re.M)
    assert {name for cell in first_cells for name in flags(cell)} == named


def test_every_environment_variable_is_documented_and_no_other() -> None:
    documented = set(
        re.findall(r"`([A-Z][A-Z_]+)`", section(LAUNCHING, "The environment of a rank"))
    )
    assert documented == {variable.name for group in VARIABLES.values() for variable in group}


def test_the_tree_of_errors_in_the_documents_is_that_in_the_source() -> None:
    tree = re.compile(r"( *(?:├──|└──) .*)")
    documented = tree.findall((ROOT / "docs/errors.md").read_text(encoding="utf-8"))
    assert documented == tree.findall(errors.__doc__ or "")
    assert {line.split()[1] for line in documented} == {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.Error) and name != "Error"
    }


def test_nobody_is_told_to_install_pycoll_from_an_index() -> None:
    sources = [
        path
        for folder in ("pycoll", "launcher", "transports", "examples", "build_backend")
        for path in (ROOT / folder).rglob("*.py")
    ]
    for path in (*DOCUMENTS, *sources):
        for command in re.findall(r"pip3? install [^\n]*", path.read_text(encoding="utf-8")):
            by_name = re.search(r"[\s'\"]pycoll(ective)?(?![-\w])", command.split("#")[0])
            assert not by_name, f"{path.relative_to(ROOT)}: {command}"


def leads(document: Path, target: str) -> bool:
    path, _, anchor = target.partition("#")
    if "://" in target:
        return path.startswith("https://")
    file = (document.parent / path).resolve() if path else document
    if not file.exists() or not anchor:
        return file.exists()
    headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.M)
    return anchor in [re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings]


def test_every_program_of_parallel_training_has_its_page() -> None:
    pages = "".join(p.read_text(encoding="utf-8") for p in (ROOT / "docs/parallel").glob("*.md"))
    programs = [path.name for path in (ROOT / "examples/parallel").glob("*.py")]
    assert [name for name in programs if f"(../../examples/parallel/{name})" not in pages] == []


def test_what_stands_beside_names_of_other_libraries_exists_in_parallel_training() -> None:
    """In the second column of the tables "In Megatron-LM's words" and the like."""
    folders = (ROOT / "pycoll/parallel", ROOT / "examples/parallel")
    sources = "".join(p.read_text(encoding="utf-8") for at in folders for p in at.glob("*.py"))
    known, named = set(re.findall(r"\w+", sources)), []
    for page in (ROOT / "docs/parallel").glob("*.md"):
        for part in page.read_text(encoding="utf-8").split("\n## "):
            if re.match("In .*words|Where a name", part):
                cells = [row.split(" | ")[1] for row in part.splitlines() if row.startswith("| ")]
                codes = [code for cell in cells for code in re.findall("`([^`]+)`", cell)]
                words = " ".join(c.removeprefix("--").replace("-", "_") for c in codes)
                named += [(page.name, word) for word in re.findall(r"\w+", words)]
    assert len(named) > 40
    assert [(page, word) for page, word in named if word not in known] == []


def test_every_page_is_reached_from_the_readme_and_the_lists_of_pages() -> None:
    lists = ("README.md", "docs/index.md", "docs/learn/index.md", "docs/parallel/index.md")
    reached = {
        (ROOT / page).parent.joinpath(target).resolve()
        for page in lists
        for target in re.findall(
            r"\]\(([^)\s#]+)[^)]*\)", (ROOT / page).read_text(encoding="utf-8")
        )
    }
    pages = set((ROOT / "docs").rglob("*.md"))
    assert len(pages) > 20
    assert not pages - reached


def test_links_between_documents_lead_somewhere() -> None:
    links = [
        (document, target)
        for document in DOCUMENTS
        for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text(encoding="utf-8"))
    ]
    lost = [f"{file.relative_to(ROOT)}: {to}" for file, to in links if not leads(file, to)]
    assert len(links) > 100
    assert not lost, "\n".join(lost)
