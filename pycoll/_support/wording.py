"""Words of messages."""

from __future__ import annotations


def a_kind(value: object) -> str:
    """Return the type of a value with its article: "an int", "a str"."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
