"""The message for ranks that have made different calls: both calls, and what to do."""

from __future__ import annotations

import re
from collections.abc import Mapping

from pycoll._support.foreign_names import OF_UNEVEN_BLOCKS


def different_calls(name: str, number: int, calls: Mapping[int, str]) -> str:
    """Return that ranks have made different calls.

    Args:
        name: of the communicator.
        number: which collective call on it.
        calls: of two ranks, as text.
    """
    ranks = sorted(calls)
    one, other = as_shown(*(calls[rank] for rank in ranks))
    return (
        f"ranks made different calls as collective number {number} of {name}:\n"
        f"    rank {ranks[0]}: {one}\n"
        f"    rank {ranks[1]}: {other}\n"
        f"{advice(one, other)}"
    )


def as_shown(*calls: str) -> tuple[str, ...]:
    """Return calls that differ without their checksums of what is passed, if these tell nothing."""
    plain = tuple(re.sub(r" checksum [0-9a-f]{8},", "", call) for call in calls)
    return plain if len({call.partition(" at ")[0] for call in plain}) > 1 else calls


def advice(mine: str, theirs: str) -> str:
    """Return what to do about two ranks' calls, as text, that differ."""
    form = r"(i?)(\w+)\((?:([^\[(),=]*)(\[[^\]]*\])?(?=[,)]))?,? ?(.*?)\)(?: at [^)]*)?"
    one, other = (re.fullmatch(form, call) for call in (mine, theirs))
    if one is None or other is None or one[2] != other[2]:
        return "Make the same calls in the same order on all ranks."
    (kind, name, dtype, shape, more), (other_kind, _, other_dtype, other_shape, rest) = (
        one.groups(),
        other.groups(),
    )
    if name == "all_reduce_many" and (kind, more.rpartition("op=")[2]) == (
        other_kind,
        rest.rpartition("op=")[2],
    ):
        return (
            "Pass as many arrays, of the same dtypes and shapes in the same order, on all ranks; "
            "zeros where a gradient is missing."
        )
    if kind != other_kind:
        return (
            f"A nonblocking call belongs to nonblocking ones: call {name} on all ranks, or i{name} "
            "on all."
        )
    same_value = (dtype, shape) == (other_dtype, other_shape)
    if more != rest:
        differs = _the_one_that_differs(more, rest) if same_value else ""
        same = f"Pass the same {differs} on all ranks, in" if differs else "Make"
        return f"{same} the same calls in the same order{'' if differs else ' on all ranks'}."
    if same_value:
        return "What they pass differs in dtype or shape: pass the same of both on all ranks."
    if "object" in (dtype, other_dtype):
        return "Pass an array or a number on all ranks, or another Python object on all."
    if dtype != other_dtype:
        is_number = {dtype == "int" or shape == "[]", other_dtype == "int" or other_shape == "[]"}
        if len(is_number) == 2:
            return "One passes a number, the other an array: pass the same kind on all ranks."
        example = _one_dtype(dtype, other_dtype, is_number == {True})
        return f"The dtypes differ: pass one dtype on all ranks{example}."
    if name in OF_UNEVEN_BLOCKS:
        return f"Arrays whose shapes differ from rank to rank: {OF_UNEVEN_BLOCKS[name]}."
    return "The shapes differ: pass arrays of one shape on all ranks."


def _one_dtype(one: str, other: str, are_numbers: bool) -> str:
    """Return by what two dtypes become one, as a clause; "": not known.

    Args:
        one, other: their names; "int" is Python's.
        are_numbers: they are those of single numbers, and not of arrays.
    """
    both = {re.match(r"[a-z]*", each)[0] for each in (one, other)}  # type: ignore[index]
    for kind, dtype in (("complex", "complex128"), ("float", "float64"), ("int", "int64")):
        if both <= {"bool", "uint", "int", "float", "complex"} and kind in both:
            converted = f"{kind}(x)" if are_numbers else f'x.astype("{dtype}")'
            return f", for example {converted}"
    return ""


def _the_one_that_differs(mine: str, theirs: str) -> str:
    """Return which argument alone differs between two lists like "op=sum, root=0"; "": none."""
    one, other = ([part.partition("=") for part in text.split(", ")] for text in (mine, theirs))
    if [part[:2] for part in one] != [part[:2] for part in other]:
        return ""
    names = [part[0] for part, its in zip(one, other, strict=True) if part != its]
    return names[0] if len(names) == 1 else ""
