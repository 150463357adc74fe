"""Words and numbers of messages."""

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


def ranks_text(ranks: Iterable[int]) -> str:
    """Rank numbers in short: "rank 3", "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"rank {text}" if text.isdigit() else f"ranks {text}"


SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}


def seconds_text(seconds: float) -> str:
    """Write a time in the unit in which it is a handy number."""
    units = (unit for unit, of_a_second in SECONDS.items() if seconds < 999.5 * of_a_second)
    unit = next(units, "s")
    return f"{seconds / SECONDS[unit]:.3g} {unit}"


def size_text(nbytes: int) -> str:
    """Write bytes in the largest unit of which they are eighths."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes >= 1 << power and nbytes % (1 << power - 3) == 0:
            return f"{nbytes / (1 << power):g} {unit}"
    return f"{nbytes} B"


def whole_text(whole: str, collective: str, root: int) -> str:
    """Return what is known of a call of which a part is seen in the core.

    Args:
        whole: one of the core's PARTS.
        collective: the part.
        root: of that, if it has one.
    """
    if whole == "uneven":
        if collective == "all_gather":
            return "gatherv or all_gatherv"
        if collective == "scatter":
            return f"scatterv(root={root})"
        return "all_to_allv" if collective == "all_to_all" else "reduce_scatterv"
    if whole == "objects":
        named = "gather or all_gather" if collective == "all_gather" else collective
        return f"{named} of objects"
    return {
        "many": "all_reduce_many",
        "group": "dup, split or another call that makes communicators",
        "operator": "a reduction with an operator of the program's own",
        "ints": "a reduction of Python ints",
    }.get(whole, "another collective")
