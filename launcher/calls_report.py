"""What ranks have called last, as text: the first operation in which they differ, and the rest."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import groupby

from pycoll._launcher.kept_calls import JobCalls, Made, first_difference
from pycoll._support.wording import ranks_text

_SHOWN = 20


def difference(calls: JobCalls) -> str:
    """Return the first collective in which ranks differ, in lines; "": none is known.

    Args:
        calls: of all ranks. A communicator with a name is shown before one without, and of those
            the one with most ranks.
    """
    found = []
    for (ident, _), ranks in calls.kept.items():
        number, made = first_difference(ranks)
        if number:
            found.append((ident in calls.names, len(ranks), _name(calls, ident), made))
    if not found:
        return ""
    *_, name, made = max(found, key=lambda each: each[:2])
    head = f"the first call in which ranks differ, on {name}:"
    return "\n    ".join([head, *_groups(made)])


def lines(calls: JobCalls, why: str, missing: str = "") -> Iterator[str]:
    """Yield a report.

    Args:
        calls: of all ranks.
        why: what has happened.
        missing: of whom nothing is known, and why not.
    """
    yield f"Calls when {why}, counted from 1 on each communicator; times are back from then."
    if missing:
        yield missing
    under_way = [
        f"    rank {rank}: {message.text(_name(calls, message.ident))}"
        for rank, messages in sorted(calls.messages.items())
        for message in messages
        if message.is_under_way
    ]
    if under_way:
        yield from ("", "point to point, not finished:", *under_way)
    for (ident, way), ranks in calls.kept.items():
        if not any(of_rank.number for of_rank in ranks.values()):
            continue
        yield ""
        yield f"{way} on {_name(calls, ident)}, {ranks_text(ranks)}:"
        number, made = first_difference(ranks)
        if not number:
            yield f"    all have made the same, up to call {max(c.number for c in ranks.values())}"
        else:
            yield f"    the first in which they differ is call {number}:"
            yield from (f"        {line}" for line in _groups(made))
        for rank, of_rank in sorted(ranks.items()):
            yield f"    the last calls of rank {rank}:"
            shown = of_rank.last[-_SHOWN:]
            for index, call in enumerate(shown, of_rank.number - len(shown) + 1):
                yield f"        {index}  {call}"
    for rank, messages in sorted(calls.messages.items()):
        if messages:
            yield from ("", f"point to point, the last of rank {rank}:")
            for message in messages[-_SHOWN:]:
                yield f"    {message.number}  {message.text(_name(calls, message.ident))}"


def write(folder: str, calls: JobCalls, why: str, missing: str = "") -> str:
    """Write a report to calls.txt in a folder; returns why that was not possible.

    Where no rank has called anything there is none.
    """
    path = os.path.join(folder, "calls.txt")
    is_any = any(of_rank.number for ranks in calls.kept.values() for of_rank in ranks.values())
    if not is_any and not any(calls.messages.values()):
        return ""
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines(calls, why, missing))
    except OSError as exc:
        return f"{path} cannot be written: {exc.strerror or exc}"
    return ""


def _name(calls: JobCalls, ident: int) -> str:
    return calls.names.get(ident, f"communicator {ident}")


def _groups(made: Made) -> Iterator[str]:
    """Ranks that have called the same, a line each; those that have not made it come last."""
    calls = {rank: call for rank, call in made.items() if call is not None}
    order = sorted(calls, key=lambda rank: (calls[rank].signature, rank))
    for _, group in groupby(order, key=lambda rank: calls[rank].signature):
        ranks = list(group)
        text = max((calls[rank].text for rank in ranks), key=len)  # of one who has said most
        places = " and ".join(sorted({calls[rank].place for rank in ranks} - {""}))
        yield f"{ranks_text(ranks)}: {text}{f' at {places}' if places else ''}"
    if len(calls) < len(made):
        missing = made.keys() - calls
        yield f"{ranks_text(missing)}: {'has' if len(missing) == 1 else 'have'} not made it"
