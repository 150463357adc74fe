"""Words of messages."""

from __future__ import annotations

from collections.abc import Iterable


def a_kind(value: object) -> str:
    """Return the type of a value with its article: "an int", "a str"."""
    return with_article(type(value).__name__)


def with_article(name: str) -> str:
    """Return a noun, or the name of a type, with its article."""
    if name == "NoneType":
        return "None"
    return f"{'an' if name[0] in 'aeiouAEIOU' or name == 'ndarray' else 'a'} {name}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Ask, at the end of a message, whether the name that is most alike was meant; "": none is."""
    import difflib  # not sooner: for an error

    near = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {near[0]}?" if near else ""
