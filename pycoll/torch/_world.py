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
    """A world from which communicators of groups are made; so many groups have one."""

    rank: int
    size: int
    comm: Any  # None: the job of pycoll-run, which was not joined yet
    is_job: bool = False  # that job is never closed here
    groups: int = 0


_worlds: dict[str, SharedWorld] = {}
"""By a name that is the same on all their ranks; the newest last."""

_changing = threading.Lock()


class GroupSeat:
    """One rank's communicator in a process group, `comm`, called `name`; made on all its ranks.

    They meet by a store of their own, within so many seconds; else it is a BootstrapError.
    """

    def __init__(self, store: Any, rank: int, size: int, seconds: float, name: str) -> None:
        self._store, self._rank, self._size, self._name = store, rank, size, name
        self._deadline = time.monotonic() + seconds
        plan = self._plan()
        self._world = self._enter(plan["world"], plan["is_new"])
        self.comm = self._world.comm.sub(plan["ranks"], plan["key"], name=name)

    def leave(self) -> None:
        """Close the communicator; its world stays, for groups to come."""
        with _changing:
            self._world.groups -= 1
        self.comm.close()

    def _plan(self) -> Any:
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
        return json.loads(self._get("plan"))

    def _enter(self, name: str, is_new: bool) -> SharedWorld:
        """Return the world of that name; join it, if this process has not."""
        if is_new:
            made = pycoll.join(self._rank, self._size, self._share, timeout=self._left())
            with _changing:
                for unused in [n for n, w in _worlds.items() if not w.groups and not w.is_job]:
                    if comm := _worlds.pop(unused).comm:
                        comm.close()
                _worlds[name] = SharedWorld(self._rank, self._size, made)
        with _changing:
            world = _worlds[name]
            world.groups += 1
        world.comm = world.comm or pycoll.init()
        return world

    def _share(self, text: str | None) -> Any:
        if text is not None:
            self._store.set("ticket", text)
        return self._get("ticket")

    def _left(self) -> float:
        return max(0.001, self._deadline - time.monotonic())

    def _get(self, key: str) -> Any:
        """Wait for what a rank has put into the store."""
        try:
            self._store.wait([key], timedelta(seconds=self._left()))
            return self._store.get(key)
        except RuntimeError as exc:
            late = [r for r in range(self._size) if not self._store.check([f"worlds/{r}"])]
            here = f"ranks {late} of {self._size} have not come" if late else "rank 0 has failed"
            raise BootstrapError(f"{self._name} could not meet: {here} ({exc})") from exc


def _choose(known: list[dict[str, Any]]) -> dict[str, Any]:
    """Choose a world of all ranks, by what each knows (`_known`)."""
    key, size = secrets.randbits(62), len(known)
    for name in reversed(known[0]):
        if all(name in of_one for of_one in known):
            ranks, sizes, joined = zip(*(of_one[name] for of_one in known), strict=True)
            if all(joined) or sizes[0] == size:
                return {"world": name, "is_new": False, "ranks": ranks, "key": key}
    return {"world": secrets.token_hex(8), "is_new": True, "ranks": [*range(size)], "key": key}


def _known() -> dict[str, tuple[int, int, bool]]:
    """The worlds of this process by name: its rank, their size, whether it has joined."""
    with _changing:
        environ = os.environ
        is_child = multiprocessing.parent_process() or "TORCHELASTIC_RUN_ID" in environ
        if "PYCOLL_JOB" in environ and not is_child:  # it is a rank of pycoll-run
            rank, size = int(environ["PYCOLL_RANK"]), int(environ["PYCOLL_SIZE"])
            _worlds.setdefault(environ["PYCOLL_JOB"], SharedWorld(rank, size, None, is_job=True))
        known = {}
        for name, world in _worlds.items():
            with contextlib.suppress(Error):  # the program has left it, or this process was forked
                is_joined = world.comm is not None and world.comm.counters() is not None
                known[name] = (world.rank, world.size, is_joined)
        return known
