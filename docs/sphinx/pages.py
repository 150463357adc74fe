"""The pages of the site as Sphinx reads them: those of docs/, and whatever they link to.

The pages are written for a git viewer, where a link may lead to any file. On the site a document
outside docs/ becomes a page as it is, a program a page that shows it, and a folder a list of its
files, all under repository/. docs/index.md has the order: each of its sections is a part of the
table of contents.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

ROW = re.compile(r"^\| \[([^]]*)\]\(([^)#\s]+\.md)\)", re.M)
LINK = re.compile(r"\]\(([^)\s#]+)(#[^)\s]*)?\)")
LANGUAGES = {".py": "python", ".pyi": "python", ".c": "c", ".h": "c", ".sh": "sh"}
ORPHAN = "---\norphan: true\n---\n\n"


def place(path: Path) -> Path:
    """Where a file or a folder of the repository is among the sources of the site."""
    if path.parts[0] == "docs":
        return Path(*path.parts[1:])
    return "repository" / path


def page_of(root: Path, path: Path) -> Path:
    """The page that shows a file or a folder."""
    if (root / path).is_dir():
        return place(path) / "index.md"
    return place(path) if path.suffix in (".md", ".png", ".svg") else Path(f"{place(path)}.md")


def targets(root: Path, document: Path) -> Iterator[tuple[str, Path]]:
    """The links of a document that lead to files, each with the file, from the root."""
    for target, _ in LINK.findall((root / document).read_text(encoding="utf-8")):
        if "://" not in target:
            yield target, Path(os.path.normpath(document.parent / target))


def relinked(root: Path, document: Path) -> str:
    """The text of a document, whose links lead to pages of the site."""
    files = dict(targets(root, document))
    here = page_of(root, document).parent

    def link(match: re.Match[str]) -> str:
        target, anchor = match[1], match[2] or ""
        if target not in files or not (root / files[target]).exists():
            return match[0]  # Sphinx complains of what is not there
        return f"]({os.path.relpath(page_of(root, files[target]), here)}{anchor})"

    return LINK.sub(link, (root / document).read_text(encoding="utf-8"))


def names_in(folder: Path) -> list[str]:
    """The files of a folder that one reads; none if it is a file."""
    if not folder.is_dir():
        return []
    return sorted(file.name for file in folder.iterdir() if file.suffix in (*LANGUAGES, ".md"))


def shown(root: Path, path: Path) -> str:
    """A page that shows a program, or lists the files of a folder."""
    if not (root / path).is_dir():
        text = (root / path).read_text(encoding="utf-8")
        language = LANGUAGES.get(path.suffix, "python" if "python" in text[:30] else "text")
        return f"# {path}\n\n``````{language}\n{text}\n``````\n"
    pages = [(name, page_of(root, path / name).name) for name in names_in(root / path)]
    return "\n".join([f"# {path}/\n", *(f"- [{name}]({page})" for name, page in pages), ""])


def listed(text: str) -> dict[str, str]:
    """The documents that the first cells of a page's tables lead to, and what stands there."""
    return {target: words for words, target in ROW.findall(text)}


def is_file_name(words: str) -> bool:
    """Whether a link has no words of its own. On the site it has the title of the page."""
    return words.endswith((".md", "/"))


def contents(document: Path, text: str, reference: list[str]) -> str:
    """The table of contents at the end of a page that lists others; it shows beside all pages."""
    parts = [("", listed(text))]
    if document == Path("docs/index.md"):
        sections = (part.partition("\n") for part in text.split("\n## ")[1:])
        parts = [(f":caption: {title}", listed(body)) for title, _, body in sections]
        parts.append((":caption: Reference", dict.fromkeys(reference, "/")))
    made = ""
    for caption, pages in parts:
        entries = [p if is_file_name(words) else f"{words} <{p}>" for p, words in pages.items()]
        if entries:
            made += "\n".join(["", "```{toctree}", ":hidden:", caption, "", *entries, "```", ""])
    return made


def lay_out(root: Path, to: Path, reference: list[str]) -> None:
    """Write the pages, and copy the pictures, to a folder.

    Args:
        root: the repository.
        to: the folder, which has the pages of the reference already.
        reference: the names of these.
    """
    no_pages = shutil.ignore_patterns("sphinx", "*.py", "*.md")
    shutil.copytree(root / "docs", to, ignore=no_pages, dirs_exist_ok=True)
    todo = [path.relative_to(root) for path in sorted((root / "docs").rglob("*.md"))]
    made: dict[Path, str] = {}
    in_contents = {Path("index.md")}
    while todo:
        path = todo.pop()
        page = page_of(root, path)
        if page in made or page.suffix != ".md" or not (root / path).exists():
            continue
        if path.suffix == ".md":
            made[page] = relinked(root, path)
            todo += [file for _, file in targets(root, path)]
        else:
            made[page] = shown(root, path)
            todo += [path / name for name in names_in(root / path)]
        if path.name == "index.md":
            made[page] += contents(path, made[page], reference)
            pages = listed(made[page])
            in_contents |= {Path(os.path.normpath(page.parent / other)) for other in pages}
            made[page] = ROW.sub(
                lambda row: f"| []({row[2]})" if is_file_name(row[1]) else row[0], made[page]
            )
    for page, text in made.items():
        (to / page).parent.mkdir(parents=True, exist_ok=True)
        text = text if page in in_contents else ORPHAN + text
        (to / page).write_text(text, encoding="utf-8")
