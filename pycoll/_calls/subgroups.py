"""Communicators of ranks of another one: who is in them, and the number they know each other by.

A communicator is a list of ranks and a number, the same on all of them and no other
communicator's. Nobody hands the numbers out: each rank computes them, from what the ranks have told
each other (split) or from what all of them know without a word (sub).
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from pycoll._calls import arguments
from pycoll._calls.call_plan import CallPlan, Route
from pycoll._calls.group import Group, Numbered
from pycoll._calls.shared_memory import ShmComm, part_of
from pycoll._runtime import binding
from pycoll._runtime.task import CallSteps
from pycoll._support.wording import a_kind, ranks_text
from pycoll._transports._core import KINDS

if TYPE_CHECKING:
    from pycoll._transports.base import Parts

_ROW = struct.Struct("<?7xqqQ")
"""What a rank says in a split: whether it takes part, its color, its key, its number for it."""


class Makings:
    """What has been made of one communicator, as far as numbers must not be used twice."""

    def __init__(self) -> None:
        self._splits = 0
        self._subs: dict[tuple[tuple[int, ...], int | None], int] = {}

    def row(self, color: int | None, key: int) -> bytes:
        """Return what this rank says in its next split; `color` None: it takes no part."""
        self._splits += 1
        return _ROW.pack(color is not None, color or 0, key, self._splits)

    def sub(
        self, group: Group, ranks: tuple[int, ...], key: int | None, name: str | None
    ) -> Group | None:
        """Return the group of `ranks` of `group`, or None if this rank is not one of them.

        Calls for the same ranks are numbered, for each key on its own.
        """
        if group.rank not in ranks:
            return None
        with group.engine.locked():
            made = self._subs[ranks, key] = self._subs.get((ranks, key), 0) + 1
            in_order = ranks == tuple(sorted(ranks))
            members = ranks_text(ranks) if in_order else f"ranks {', '.join(map(str, ranks))}"
            name = name or f"{members} of {group.name}"
            keyed = "" if key is None else f" with key {key}"
            return child(group, f"sub {made}{keyed}", ranks, name)


def exchange(group: Group, text: str, row: bytes) -> CallPlan[bytearray]:
    """Prepare what makes communicators: every rank tells all its row, of a length that all have.

    Returns, when it is run, the rows, one after the other.
    """

    def in_shared_memory(shm: ShmComm) -> bytearray:
        """Gather the rows in shared memory; no call of another text must meet this one."""
        rows = bytearray(shm.size * len(row))
        kind, salt = KINDS.index("all_gather"), part_of("group", text)
        shm.core.run(kind, 0, 0, 0, (), salt, row, rows, len(row))
        return rows

    route = Route.MESSAGES if group.shm is None else Route.SHARED_MEMORY
    steps = functools.partial(_exchange, group, row)
    return CallPlan(group, text, steps, route, in_shared_memory)


def _exchange(group: Group, row: bytes, call: Numbered) -> CallSteps:
    size, length = group.size, len(row)
    rows = bytearray(size * length)
    source: list[Parts | None] = [None] * size
    source[group.rank] = (memoryview(row),)
    view = memoryview(rows)
    target: list[memoryview | None] = [view[i * length :][:length] for i in range(size)]
    chosen = group.choose("all_gather", length, None, shm=False)
    where = binding.Binding([length] * size, source, target)
    yield from group.run(call, 0, ("all_gather", chosen), where)
    return rows


def split(group: Group, rows: bytearray, name: str | None) -> Group | None:
    """Return the group of the ranks with this one's color, None without a color."""
    said = list(_ROW.iter_unpack(rows))
    takes_part, color, _, _ = said[group.rank]
    if not takes_part:
        return None
    chosen = sorted((row[2], rank) for rank, row in enumerate(said) if row[:2] == (True, color))
    with group.engine.locked():
        # A rank may have given up a split that others did not; what one rank says is one number.
        name = name or f"split of {group.name}, color {color}"
        return child(group, f"split {said[0][3]}", [rank for _, rank in chosen], name)


def shrunk(group: Group, number: int, living: Collection[int], name: str | None) -> Group:
    """Return the group of the world ranks `living` of `group`, as agreement `number` has found."""
    living = set(living)
    gone = [world for world in group.members if world not in living]
    name = name or (f"{group.name} without {ranks_text(gone)}" if gone else f"dup of {group.name}")
    ranks = [rank for rank, world in enumerate(group.members) if world in living]
    with group.engine.locked():
        return child(group, f"shrink {number}", ranks, name)


def child(group: Group, how: str, ranks: Sequence[int], name: str) -> Group:
    """Return a group of these ranks of `group`, made in a way that is so described; with the lock.

    Every rank computes its number without asking; 61 bits of a hash do not meet twice. The name
    has no part in that.
    """
    import hashlib  # late: it brings OpenSSL

    members = [group.members[rank] for rank in ranks]
    seed = f"{group.context.ident}:{how}:{','.join(map(str, members))}"
    digest = hashlib.blake2b(seed.encode(), digest_size=8).digest()
    ident = int.from_bytes(digest, "little") >> 2 | 1 << 61
    made = Group(group.engine, ident, members, name)
    made.op_timeout = group.op_timeout
    return made


# --- arguments -------------------------------------------------------------------------------


def check_color(color: int | None) -> int | None:
    return None if color is None else _check_int64(color, "color")


def check_key(key: int | None, rank: int) -> int:
    """Check the key of a split; None: the rank."""
    return rank if key is None else _check_int64(key, "key")


def check_sub_key(key: int | None) -> int | None:
    """Check the key that calls of `sub` for the same ranks have in common."""
    return None if key is None else _check_int64(key, "key")


def check_name(name: str | None) -> str | None:
    """Check the name of a communicator; None or empty: it gets one."""
    if not isinstance(name, str | None):
        raise TypeError(f"the name of a communicator is a str, not {a_kind(name)}")
    return name


def check_ranks(ranks: Iterable[int], size: int) -> tuple[int, ...]:
    """Check the ranks of a sub-communicator.

    Raises:
        TypeError: they are no ints.
        ValueError: there is none, one is not a rank, or is there twice.
    """
    if not isinstance(ranks, Iterable):
        raise TypeError(f"ranks is a list of ints, not {a_kind(ranks)}")
    checked = tuple(arguments.check_int(rank, "each of ranks") for rank in ranks)
    if not checked:
        raise ValueError("ranks is empty: a communicator has at least one rank")
    for rank in checked:
        if not 0 <= rank < size:
            raise ValueError(f"ranks has {rank}, but the ranks are 0 to {size - 1}")
    if len(set(checked)) < len(checked):
        twice = next(rank for rank in checked if checked.count(rank) > 1)
        raise ValueError(f"ranks has {twice} {checked.count(twice)} times: once is enough")
    return checked


def _check_int64(value: int, what: str) -> int:
    value = arguments.check_int(value, what)
    if not -(1 << 63) <= value < 1 << 63:
        raise ValueError(f"{what} is {value}, but it must fit into 64 bits: -2**63 to 2**63 - 1")
    return value
