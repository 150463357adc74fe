"""How the ranks of a process group come to a communicator of pycoll's.

It is made from a *world* that they have in common (`pycoll.join`), by `sub`, which takes no
message: so groups can be given up and made again as often as a program likes. The first group makes
a world, and so does one with a rank that shares none with all others. Under pycoll-run its job is a
world, too. Ranks tell each other their worlds by the store of the group; rank 0 chooses.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import secrets
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore

import pycoll
from pycoll.errors import BootstrapError, Error


@dataclass
class SharedWorld:
    """A world from which communicators of groups are made."""

    rank: int
    size: int
    comm: pycoll.Communicator | None  # None: the job of pycoll-run, which was not joined yet
    is_job: bool = False  # that job is never closed here
    groups: int = 0  # that have a communicator of it


_worlds: dict[str, SharedWorld] = {}
"""By a name that is the same on all their ranks; the newest last."""

_changing = threading.Lock()


class GroupSeat:
    """One rank's communicator in a process group, `comm`; made on all its ranks.

    Args:
        store: of the group alone.
        rank, size: this rank in the group, and how many there are.
        seconds: for all to come; else BootstrapError.
        name: what messages call the group.
    """

    def __init__(self, store: Any, rank: int, size: int, seconds: float, name: str) -> None:
        self._store, self._rank, self._size, self._name = store, rank, size, name
        self._deadline = time.monotonic() + seconds
        plan = self._plan()
        self._world = self._enter(plan["world"], plan["is_new"])
        assert self._world.comm is not None
        made = self._world.comm.sub(plan["ranks"], plan["key"], name=name)
        assert made is not None
        self.comm = made

    def leave(self) -> None:
        """Close the communicator; its world stays, for groups to come."""
        with _changing:
            self._world.groups -= 1
        self.comm.close()

    def _plan(self) -> dict[str, Any]:
        """Return what rank 0 has chosen: a world, the group's ranks in it, the communicator's key.

        A world is one that all have joined, or, all being here, can join now.
        """
        mine = _known()
        if self._size == 1:
            return _choose([{name: world for name, world in mine.items() if world[2]}])
        # A store may be used again by the next group of that name; as often by each rank.
        number = self._store.add(f"uses/{self._rank}", 1)
        self._store = PrefixStore(f"use {number}", self._store)
        self._store.set(f"worlds/{self._rank}", json.dumps(mine))
        if self._rank == 0:
            chosen = _choose([json.loads(self._get(f"worlds/{r}")) for r in range(self._size)])
            self._store.set("plan", json.dumps(chosen))
        plan: dict[str, Any] = json.loads(self._get("plan"))
        return plan

    def _enter(self, name: str, is_new: bool) -> SharedWorld:
        """Return the world of that name; join it, if this process has not."""
        if is_new:
            made = pycoll.join(self._rank, self._size, self._share, timeout=self._left())
            with _changing:
                unused = [n for n, w in _worlds.items() if not w.groups and not w.is_job]
                given_up = [_worlds.pop(n).comm for n in unused]
                _worlds[name] = SharedWorld(self._rank, self._size, made)
            for comm in given_up:
                if comm is not None:
                    comm.close()
        with _changing:
            world = _worlds[name]
            world.groups += 1
        if world.comm is None:
            world.comm = pycoll.init()
        return world

    def _share(self, text: str | None) -> bytes:
        if text is not None:
            self._store.set("ticket", text)
        return self._get("ticket")

    def _left(self) -> float:
        return max(0.001, self._deadline - time.monotonic())

    def _get(self, key: str) -> bytes:
        """Wait for what a rank has put into the store."""
        try:
            self._store.wait([key], timedelta(seconds=self._left()))
            text: bytes = self._store.get(key)
        except RuntimeError as exc:
            late = [r for r in range(self._size) if not self._store.check([f"worlds/{r}"])]
            here = f"ranks {late} of {self._size} have not come" if late else "rank 0 has failed"
            raise BootstrapError(f"{self._name} could not meet: {here} ({exc})") from exc
        return text


def _choose(known: list[dict[str, Any]]) -> dict[str, Any]:
    """Choose a world of all ranks, by what each knows (`_known`)."""
    key, size = secrets.randbits(62), len(known)
    for name in reversed(known[0]):
        if all(name in of_one for of_one in known):
            ranks, sizes, joined = zip(*(of_one[name] for of_one in known), strict=True)
            if all(joined) or sizes[0] == size:
                return {"world": name, "is_new": False, "ranks": ranks, "key": key}
    name = secrets.token_hex(8)
    return {"world": name, "is_new": True, "ranks": [*range(size)], "key": key}


def _known() -> dict[str, tuple[int, int, bool]]:
    """The worlds of this process by name: its rank, their size, whether it has joined."""
    with _changing:
        _note_job()
        known = [(name, world) for name, world in _worlds.items() if _is_open(world.comm)]
        return {name: (of.rank, of.size, of.comm is not None) for name, of in known}


def _is_open(comm: pycoll.Communicator | None) -> bool:
    with contextlib.suppress(Error):  # the program has left it, or this process was forked
        return comm is None or comm.counters() is not None
    return False


def _note_job() -> None:
    """Know the job of pycoll-run, if this process is a rank of it, and not the child of one."""
    environ = os.environ
    is_child = multiprocessing.parent_process() or "TORCHELASTIC_RUN_ID" in environ
    if "PYCOLL_JOB" in environ and not is_child:
        rank, size = int(environ["PYCOLL_RANK"]), int(environ["PYCOLL_SIZE"])
        _worlds.setdefault(environ["PYCOLL_JOB"], SharedWorld(rank, size, None, is_job=True))
