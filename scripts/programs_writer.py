"""Draws the programs of scripts/fuzz_programs, such that they cannot hang."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import numpy_oracle as oracle
from programs_calls import NO_ARRAYS, TRAITS, Call
from programs_messages import UNIQUE, Exchange, Receive, Send, Vain
from programs_steps import Close, Compute, Drop, Step, Team, Touch, Wait, Wrong
from programs_teams import Teams

import pycoll
from pycoll._arrays import operators
from pycoll._selection import select

MIB = 1 << 20
LARGEST = 2 * MIB
"""Bytes of one rank's value at most."""

WEIGHTS = {
    "block": 6.0,  # a blocking collective
    "start": 9.0,  # a non-blocking one
    "persist": 2.0,
    "send": 7.0,
    "receive": 7.0,
    "pair": 2.0,  # a blocking send and its blocking recv
    "burst": 0.5,
    "anyone": 1.0,  # messages of several ranks, received with ANY_SOURCE
    "exchange": 2.0,  # sendrecv round a ring
    "doom": 0.7,  # a receive that is cancelled later
    "vain": 0.5,  # a blocking receive of what was not sent
    "wait": 16.0,
    "touch": 3.0,
    "drop": 0.5,  # forget a request
    "compute": 1.0,
    "wrong": 0.5,  # a call that is refused
    "mismatch": 0.2,  # ranks make different calls
    "split": 0.6,
    "dup": 0.3,
    "sub": 0.5,
    "grid": 0.4,
    "split_by_host": 0.2,
    "close": 1.2,
}
"""How often which kind of step is drawn, about."""

FORMS = (
    "wait",
    "wait_all",
    "wait_any",
    "wait_some",
    "test",
    "await",
    "await_late",
    "timeout",
    "threads",
)


class Writer(Teams):
    """Draws a program: keeps in mind what is pending, and which message meets which receive.

    Messages of one rank to another meet receives in the order of both, as far as they fit, so it
    does not matter which came first: it can be followed here step by step.
    """

    def __init__(
        self, seed: tuple[int, ...], size: int, hosts: int, shared: bool, without: list[str]
    ) -> None:
        super().__init__(seed, size, hosts, shared)
        self._without = without
        self._kinds = [kind for kind in WEIGHTS if kind not in without]
        # Programs differ: in what they do most, how much they leave pending, how large values are.
        weights = np.array([WEIGHTS[kind] for kind in self._kinds])
        weights *= 4 ** self._rng.uniform(-1, 1, len(weights))
        self._chances = weights / weights.sum()
        self._many_pending = self._one_of((5, 20, 60, 200))
        self._large = self._one_of((0.02, 0.08, 0.25))
        self.world = self._team(range(size))
        self._teams.append(self.world)
        self._closing: list[tuple[int, Team, list[Team]]] = []
        self._pending: list[dict[int, Step]] = [{} for _ in range(size)]
        self._sent: list[Send] = []  # without a receive yet
        self._posted: list[Receive] = []  # without a message yet
        self._doomed: list[Receive] = []
        self._persistent: list[Call | Exchange] = []

    def write(self, count: int) -> list[Step]:
        """Draw `count` steps or a few more, and those that bring everything to an end."""
        while len(self.steps) < count:
            kind = str(self._rng.choice(self._kinds, p=self._chances))
            getattr(self, f"_{kind}")()
            for rank, pending in enumerate(self._pending):
                if len(pending) > self._many_pending:
                    self._wait_on(rank)
        self._flush(self.world)
        for team in [team for team in self._teams if team.number and team.grid is None]:
            self._retire(team)
        for rank in self._shuffled(list(range(self._size)) * 4):
            self._wait_on(rank)
        for closing in self._shuffled(self._closing):
            self._finish(*closing)
        for rank in range(self._size):
            self._wait_for(rank, list(self._pending[rank]))
        return self.steps

    def _shape(self, dtype: str, limit: int = LARGEST) -> tuple[int, ...]:
        """Draw a shape of at most `limit` bytes; most are small."""
        size = 16 if dtype in NO_ARRAYS else oracle.dtype_of(dtype).itemsize
        chance = self._rng.random()
        highest = 21 if chance > 1 - self._large else 17 if chance > 1 - 3 * self._large else 12
        count = min(int(2 ** self._rng.uniform(0, highest)) - 1, limit // size)
        if chance < 0.1:
            count = 1
        form = self._below(5)
        if form == 0 and count == 1:
            return ()
        if form == 1 and count:
            return (self._below(3) + 1, -(-count // 7), self._below(3) + 1)
        if form == 2 and not count:
            return (3, 0)
        return (count,)

    # --- closing communicators ---

    def _close(self) -> None:
        """Let one rank close what nobody uses any more, or choose that."""
        if self._closing and self._chance(0.8):
            self._finish(*self._closing.pop(self._below(len(self._closing))))
            return
        usable = [team for team in self._teams if team.number and team.grid is None]
        if not usable:
            return
        self._retire(self._one_of(usable))

    def _retire(self, team: Team) -> None:
        """Do no more with a communicator; each of its ranks closes it some time."""
        parts = [part for part in self._teams if team.number in (part.number, part.grid)]
        for part in parts:
            self._flush(part)
            self._teams.remove(part)
        self._persistent = [call for call in self._persistent if call.team not in parts]
        self._closing += [(rank, team, parts) for rank in team.members]

    def _finish(self, rank: int, team: Team, parts: list[Team]) -> None:
        """Let one rank close a communicator, when what it has pending there is done."""
        pending = self._pending[rank].items()
        self._wait_for(rank, [number for number, step in pending if step.team in parts])
        mine = [part.number for part in parts if rank in part.members]
        doomed = [r for r in self._doomed if r.team in parts and rank in r.ranks]
        self._doomed = [receive for receive in self._doomed if receive not in doomed]
        self._add(Close, team, rank, mine, [receive.number for receive in doomed])

    def _flush(self, team: Team) -> None:
        """Give every message its receive, and every receive its message or its end."""
        while send := next((send for send in self._sent if send.team is team), None):
            how = "recv" if self._chance(0.3) else "irecv"
            self._add_receive(how, team, send.source, send.dest, send.tag)
        while receive := next((r for r in self._posted if r.team is team), None):
            tag = 3 if receive.tag == pycoll.ANY_TAG else receive.tag
            assert receive.origin is not None
            self._add_send("isend", team, receive.origin, receive.dest, tag)
        for receive in [receive for receive in self._doomed if receive.team is team]:
            if team is self.world or self._chance(0.5):  # else closing ends it
                self._cancel(receive)

    # --- collectives ---

    def _block(self) -> None:
        self._collective("block")

    def _start(self) -> None:
        self._collective("start")

    def _persist(self) -> None:
        busy = {
            getattr(step, "first", None) for pending in self._pending for step in pending.values()
        }
        idle = [step for step in self._persistent if step.first not in busy]
        if not idle or self._chance(0.2):
            self._persistent.append(self._collective("persist"))
            return
        again = replace(self._one_of(idle), number=len(self.steps))
        if isinstance(again, Call) or not self._any_tag_posted(again.team):
            self.steps.append(again)
            self._await_all(again)

    def _collective(self, how: str) -> Call:
        team = self._one_of(self._teams)
        size = len(team.members)
        name = self._one_of([name for name in TRAITS if name not in self._without])
        traits = TRAITS[name]
        op, options = self._operation(traits, how != "persist")
        limit = LARGEST // size if traits & {"rows", "grows", "one each", "pairs"} else LARGEST
        count = self._below(12) if "many" in traits else 1
        dtypes = tuple(self._one_of(options) for _ in range(count))
        if "one each" in traits or "pairs" in traits:
            count = size if "one each" in traits else size * size
            shapes = [self._shape(dtypes[0], limit) for _ in range(count)]
        else:
            shapes = [self._shape(dtype, limit) for dtype in dtypes]
        counts: tuple[int, ...] = ()
        if name == "reduce_scatterv":
            rest = self._one_of(((), (3,), (2, 2)))
            most = 2 * math.prod(shapes[0]) // math.prod(rest) // size
            counts = tuple(self._below(most + 1) for _ in range(size))
            shapes = [(sum(counts), *rest)]
        algorithm = None if dtypes[:1] == ("object",) else self._algorithm(name, how, team, op)
        call = self._add(
            Call, team, name, how, tuple(shapes), dtypes, op, self._below(size), algorithm, counts,
            len(self.steps),
        )  # fmt: skip
        if how != "block":
            self._await_all(call)
        return call

    def _operation(
        self, traits: set[str], others: bool
    ) -> tuple[str | int | None, tuple[str, ...]]:
        """Draw an operator; with the dtypes that arrays may have then, or what is no array."""
        if others and "objects" in traits and self._chance(0.15):
            return None, ("object",)
        if "op" not in traits:
            return None, (*oracle.ALL, *oracle.MOVING)
        if others and "numbers" in traits and self._chance(0.1):
            return self._one_of(("sum", "prod", "min", "max", "bxor")), ("number", "scalar")
        if self._chance(0.25):
            op = self._below(len(oracle.USER_OPS))
            return op, oracle.USER_OPS[op][2]
        no_avg = traits == TRAITS["scan"]
        name = self._one_of([op for op in sorted(oracle.UFUNCS) if op != "avg" or not no_avg])
        return name, oracle.UFUNCS[name][1]

    def _algorithm(self, name: str, how: str, team: Team, op: str | int | None) -> str | None:
        """Draw one to force, or none."""
        like = {"reduce_scatterv": "reduce_scatter", "all_reduce_many": "all_reduce"}.get(
            name, name
        )
        if self._chance(0.4) or TRAITS[name] & {"one each", "pairs"}:
            return None
        known = pycoll.algorithms(like)
        if how != "block" or not team.shared:
            known.remove("shared_memory")
        if isinstance(op, int) and name not in ("scan", "exscan"):
            operator = operators.resolve(oracle.USER_OPS[op][0])
            order, whole = not operator.commutative, not operator.elementwise
            known = [
                other for other in known
                if other == "shared_memory"
                or select.usable(like, other, rank_order=order, whole=whole) is None
            ]  # fmt: skip
        return self._one_of(known)

    def _await_all(self, step: Step) -> None:
        for rank in step.team.members:
            self._pending[rank][step.number] = step

    # --- messages ---

    def _ends(self) -> tuple[Team, int, int]:
        team = self._one_of(self._teams)
        return team, self._below(len(team.members)), self._below(len(team.members))

    def _tag(self) -> int:
        return UNIQUE + len(self.steps)

    def _send(self) -> None:
        """Send something, often what is already waited for; blocking if that is sure to end."""
        posted = [receive for receive in self._posted if receive.team in self._teams]
        if posted and self._chance(0.7):
            receive = self._one_of(posted)
            team, dest, tag = receive.team, receive.dest, receive.tag
            assert receive.origin is not None
            source = receive.origin
            if tag == pycoll.ANY_TAG:
                tag = self._below(4)
        else:
            team, source, dest = self._ends()
            tag = self._below(4)
        waited_for = self._receive_for(team, source, dest, tag) is not None
        blocking = (waited_for or source == dest) and self._chance(0.4)
        self._add_send("send" if blocking else "isend", team, source, dest, tag)

    def _receive(self) -> None:
        """Receive something, often what was already sent; blocking if it was."""
        sent = [send for send in self._sent if send.team in self._teams]
        if sent and self._chance(0.7):
            send = self._one_of(sent)
            team, source, dest, tag = send.team, send.source, send.dest, send.tag
            if team.any_tag and tag < UNIQUE and self._chance(0.3):
                tag = pycoll.ANY_TAG
            blocking = self._chance(0.4)
            self._add_receive("recv" if blocking else "irecv", team, source, dest, tag)
            return
        team, source, dest = self._ends()
        if self._chance(0.2):  # its message will be the only one with this tag
            tag = self._tag()
            self._add_receive("irecv", team, source, dest, tag, pycoll.ANY_SOURCE)
            return
        tag = pycoll.ANY_TAG if team.any_tag and self._chance(0.3) else self._below(4)
        blocking = self._message_for(team, source, dest, tag) is not None and self._chance(0.4)
        self._add_receive("recv" if blocking else "irecv", team, source, dest, tag)

    def _pair(self) -> None:
        team, source, dest = self._ends()
        if source == dest or self._any_tag_posted(team):
            return
        tag = self._tag()
        if self._chance(0.5):
            self._add_send("send", team, source, dest, tag)
            self._add_receive("recv", team, source, dest, tag)
        else:
            anyone = pycoll.ANY_SOURCE if self._chance(0.3) else None
            self._add_receive("recv", team, source, dest, tag, anyone)
            self._add_send("send", team, source, dest, tag)

    def _burst(self) -> None:
        """Draw many messages of one rank to another, often large ones."""
        team, source, dest = self._ends()
        usual, self._large = self._large, self._one_of((self._large, 0.5))
        if self._chance(0.5):
            for _ in range(int(self._rng.integers(10, 40))):
                if self._chance(0.5):
                    self._add_send("isend", team, source, dest, self._below(4))
                else:
                    self._add_receive("irecv", team, source, dest, self._below(4))
        else:
            count, tag = 2 + self._below(8), self._below(4)
            for _ in range(count):
                self._add_receive("irecv", team, source, dest, tag)
            for _ in range(count):
                waited_for = self._receive_for(team, source, dest, tag) is not None
                self._add_send("send" if waited_for else "isend", team, source, dest, tag)
        self._large = usual

    def _anyone(self) -> None:
        team, _, dest = self._ends()
        if team.any_tag:
            return
        tag, several = self._tag(), []
        sources = self._shuffled(range(len(team.members)))[: 1 + self._below(len(team.members))]
        receives = []
        for source in self._shuffled([*sources, *[None] * len(sources)]):
            if source is None:
                receive = self._add(
                    Receive, team, "irecv", pycoll.ANY_SOURCE, None, dest, tag, None,
                    several=several,
                )  # fmt: skip
                receives.append(receive)
            else:
                dtype, shape = self._payload(None)
                send = self._add(Send, team, "isend", source, dest, tag, dtype, shape, True)
                several.append(send)
        for step in [*several, *receives]:
            rank = next(iter(step.ranks))
            self._pending[rank][step.number] = step

    def _exchange(self) -> None:
        team = self._one_of(self._teams)
        ways = [how for how in ("block", "start", "persist") if how in self._kinds]
        if not ways or self._any_tag_posted(team):
            return
        how = self._one_of(ways)
        dtype, shape = self._payload(None, objects=how != "persist")
        by, number = int(self._rng.integers(-2, 3)), len(self.steps)
        step = self._add(Exchange, team, how, by, dtype, shape, number)
        if how != "block":
            self._await_all(step)
        if how == "persist":
            self._persistent.append(step)

    def _doom(self) -> None:
        if self._doomed and self._chance(0.5):
            self._cancel(self._one_of(self._doomed))
            return
        team, source, dest = self._ends()
        source = pycoll.ANY_SOURCE if self._chance(0.4) else source
        room = (10, "float32") if self._chance(0.5) else None
        step = self._add(Receive, team, "irecv", source, None, dest, self._tag(), room)
        self._doomed.append(step)

    def _vain(self) -> None:
        team, source, dest = self._ends()
        source = pycoll.ANY_SOURCE if self._chance(0.4) else source
        self._add(Vain, team, dest, source, self._tag())

    def _cancel(self, receive: Receive) -> None:
        self._doomed.remove(receive)
        self._add(Touch, receive.team, receive.team.members[receive.dest], receive.number, "cancel")

    def _any_tag_posted(self, team: Team) -> bool:
        return any(r.team is team and r.tag == pycoll.ANY_TAG for r in self._posted)

    def _payload(
        self, room: tuple[int, str] | None, objects: bool = True
    ) -> tuple[str, tuple[int, ...]]:
        if room is not None:
            return room[1], (room[0] if self._chance(0.5) else self._below(room[0] + 1),)
        is_object = objects and self._chance(0.15)
        dtype = "object" if is_object else self._one_of((*oracle.ALL, *oracle.MOVING))
        return dtype, self._shape(dtype)

    def _receive_for(self, team: Team, source: int, dest: int, tag: int) -> Receive | None:
        message = Send(-1, team, "isend", source, dest, tag, "", ())
        return next((r for r in self._posted if r.team is team and r.takes(message)), None)

    def _message_for(self, team: Team, source: int, dest: int, tag: int) -> Send | None:
        receive = Receive(-1, team, "irecv", source, source, dest, tag, None)
        return next((s for s in self._sent if s.team is team and receive.takes(s)), None)

    def _add_send(self, how: str, team: Team, source: int, dest: int, tag: int) -> None:
        receive = self._receive_for(team, source, dest, tag)
        payload = self._payload(receive.room if receive is not None else None)
        send = self._add(Send, team, how, source, dest, tag, *payload)
        if how == "isend":
            self._pending[team.members[source]][send.number] = send
        if receive is not None:
            self._posted.remove(receive)
            receive.message, send.matched = send, True
        else:
            self._sent.append(send)

    def _add_receive(
        self, how: str, team: Team, source: int, dest: int, tag: int, anyone: int | None = None
    ) -> None:
        send = self._message_for(team, source, dest, tag)
        room = None
        if send is None and how == "irecv" and self._chance(0.4):
            dtype = self._one_of(oracle.ALL)
            room = math.prod(self._shape(dtype)), dtype
        elif send is not None and send.dtype != "object" and self._chance(0.5):
            room = math.prod(send.shape) + self._one_of((0, 0, 5)), send.dtype
        passed = source if anyone is None else anyone
        receive = self._add(Receive, team, how, passed, source, dest, tag, room)
        if how == "irecv":
            self._pending[team.members[dest]][receive.number] = receive
        if send is not None:
            self._sent.remove(send)
            receive.message, send.matched = send, True
            receive.probe = how == "recv" and self._chance(0.4)
        else:
            self._posted.append(receive)

    # --- waiting ---

    def _wait(self) -> None:
        self._wait_on(self._below(self._size))

    def _wait_on(self, rank: int) -> None:
        """Wait for one or more of what is sure to be done some time."""
        ready = [n for n, step in self._pending[rank].items() if getattr(step, "matched", True)]
        if ready:
            count = 1 + int(len(ready) * self._rng.random() ** 2)
            self._wait_for(rank, self._shuffled(ready)[:count])

    def _wait_for(self, rank: int, requests: list[int]) -> None:
        if not requests:
            return
        for number in requests:
            del self._pending[rank][number]
        forms = [form for form in FORMS if form not in self._without]
        self._add(Wait, self.world, rank, requests, self._one_of(forms))

    def _touch(self) -> None:
        if self._doomed and self._chance(0.4):
            receive = self._one_of(self._doomed)
            rank = receive.team.members[receive.dest]
            self._add(Touch, receive.team, rank, receive.number, "pending")
            return
        rank = self._below(self._size)
        if self._pending[rank]:
            number = self._one_of(list(self._pending[rank]))
            self._add(Touch, self.world, rank, number, "test")

    def _drop(self) -> None:
        """Forget a request of the world, which is not closed before everything is done."""
        rank = self._below(self._size)
        ours = [n for n, step in self._pending[rank].items() if step.team is self.world]
        if ours:
            number = self._one_of(ours)
            if getattr(self._pending[rank][number], "how", "") != "persist":
                del self._pending[rank][number]
                self._add(Drop, self.world, rank, number)

    def _wrong(self) -> None:
        team = self._one_of(self._teams)
        self._add(Wrong, team, self._one_of(team.members))

    def _compute(self) -> None:
        how, times = self._one_of(("numpy", "python")), self._one_of((1, 1, 5, 20))
        self._add(Compute, self.world, self._below(self._size), how, times)
