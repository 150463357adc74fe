"""The documentation as a site: what can be said of it without Sphinx; the tier `docs` builds it."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

import pycoll

ROOT = Path(__file__).resolve().parents[2]
SPHINX = ROOT / "docs" / "sphinx"


def module(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SPHINX)
    return __import__(name)


def test_every_public_name_is_in_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    assert module("api", monkeypatch).named() == set(pycoll.__all__)


def test_every_method_of_a_communicator_is_on_its_page(monkeypatch: pytest.MonkeyPatch) -> None:
    page = module("api", monkeypatch).communicator()
    names = [name for name in dir(pycoll.Communicator) if not name.startswith("_")]
    assert [name for name in names if f":: pycoll.Communicator.{name}\n" not in page] == []


def test_links_of_pages_lead_to_pages_of_the_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "pages"
    module("pages", monkeypatch).lay_out(ROOT, site, ["api/errors"])
    texts = {path: path.read_text(encoding="utf-8") for path in site.rglob("*.md")}
    links = [
        (path, target)
        for path, text in texts.items()
        for target in re.findall(
            r"\]\(([^)#\s]+)", re.sub("^`{3,}.*?^`{3,}", "", text, flags=re.M | re.S)
        )
        if "://" not in target
    ]
    assert len(links) > 300
    assert [(path, target) for path, target in links if not (path.parent / target).is_file()] == []
    orphans = {str(p.relative_to(site)) for p, text in texts.items() if "orphan: true" in text}
    assert [name for name in orphans if not name.startswith("repository/")] == []
    assert "learn/index.md" in texts[site / "index.md"].split("How it works")[-1]


def test_what_is_wrong_with_links_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other.html").write_text('<h1 id="here">x</h1>')
    (tmp_path / "index.html").write_text(
        '<a href="other.html#here">x</a> <a href="other.html#there">x</a> <a href="none.html">x</a>'
        '<a href="https://example.org/x.js">x</a> <a href="http://example.org">x</a>'
        '<script src="https://example.org/y.js"></script> <a href="#nowhere">x</a>'
    )
    assert module("links", monkeypatch).lost(tmp_path) == [
        "index.html: other.html#there: no such anchor",
        "index.html: none.html: no such file",
        "index.html: http://example.org: not by https",
        "index.html: https://example.org/y.js: comes from elsewhere",
        "index.html: #nowhere: no such anchor",
    ]
