"""Links of a site: each must lead to a file that is there, and to an anchor in it.

What a page is made of (scripts, styles, pictures) must be there, too, and not come from elsewhere:
the site is read without a network.
"""

from __future__ import annotations

from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """What a page links to, and the anchors that it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.parts: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note the links and the anchor of a tag."""
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.append(value)
                if tag != "a":
                    self.parts.append(value)
            elif name in ("id", "name") and value:
                self.anchors.add(value)


@cache
def page(path: Path) -> Page:
    """A page, read once."""
    return Page(path.read_text(encoding="utf-8"))


def fault(path: Path, link: str) -> str:
    """What is wrong with a link of a page; "" if nothing."""
    parts = urlsplit(link)
    if parts.netloc and link in page(path).parts:
        return "comes from elsewhere"
    if parts.scheme or parts.netloc:
        return "" if parts.scheme in ("https", "mailto", "data") else "not by https"
    file = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if not file.is_file():
        return "no such file"
    anchor = unquote(parts.fragment)
    if anchor and file.suffix == ".html" and anchor not in page(file).anchors:
        return "no such anchor"
    return ""


def lost(site: Path) -> list[str]:
    """The links of a site that lead nowhere, each with its page and the reason."""
    found = [
        (path.relative_to(site), link, fault(path, link))
        for path in sorted(site.resolve().rglob("*.html"))
        for link in dict.fromkeys(page(path).links)
    ]
    return [f"{path}: {link}: {why}" for path, link, why in found if why]
