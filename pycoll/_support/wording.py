"""Words of messages."""

from __future__ import annotations


def a_kind(value: object) -> str:
    """Return the type of a value with its article: "an int", "a str"."""
    return with_article(type(value).__name__)


def with_article(name: str) -> str:
    """Return a noun, or the name of a type, with its article."""
    if name == "NoneType":
        return "None"
    return f"{'an' if name[0] in 'aeiouAEIOU' or name == 'ndarray' else 'a'} {name}"
