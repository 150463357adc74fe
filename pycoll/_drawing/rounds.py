"""What happens in which round: the schedules of all ranks, run on symbols one message at a time.

A round is what a picture calls a step: in it each rank sends at most one message and receives at
most one. A message travels as soon as both its ends may be posted; of several that wait for the
same rank first the one that has waited longest, then the one that its sender names first. A
reduction and a copy take no time. So a ring of P ranks takes 2 (P - 1) rounds, and a binomial
broadcast ceil(lg P), as in every text about them.

Unlike the proof (`pycoll.schedules.proof`), this goes on where an algorithm is wrong, so that one
can see what comes of it: a value is the number of times that each contribution is in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from pycoll.errors import ProofError
from pycoll.schedule import Copy, Recv, Reduce, Send
from pycoll.schedules import REDUCING, Algorithm
from pycoll.schedules.program import Program
from pycoll.schedules.proof import Execution
from pycoll.schedules.symbols import Expressions, contributors, given, promised

READABLE = 16
"""Ranks; of more only the messages are told, not the chunks."""

Part = tuple[int, int]
"""What one rank contributes to one chunk: (rank, chunk)."""

Value = dict[Part, int]
"""What a chunk holds: how many times each part is in it. Never changed once made."""

Holds = tuple[dict[int, Value], ...]
"""By rank: chunk -> value."""


class Delivery(NamedTuple):
    """A message that travels in a round.

    Attributes:
        sender, receiver: ranks.
        chunks: of the sender, that travel; `into`: where they go at the receiver.
        combines: they are combined with what is there, and do not replace it.
    """

    sender: int
    receiver: int
    chunks: tuple[int, ...]
    into: tuple[int, ...]
    combines: bool


class Flaw(NamedTuple):
    """A place where an algorithm is wrong.

    Attributes:
        round: 0: before the first; that of the last: at the end.
        rank, chunk: where.
        what: in words.
    """

    round: int
    rank: int
    chunk: int
    what: str


class Replay:
    """One execution of an algorithm.

    Attributes:
        program: the schedules; `collective`, of its algorithm.
        reduces: chunks hold contributions of several ranks.
        rounds: the messages of each, in order of sender.
        states: what the ranks hold before the first round, and after each; nothing if they are more
            than `READABLE`.
        stuck: messages that never travel, of which a half is not posted: `chunks` or `into` is ().
        fault: why the algorithm is wrong, by the proof; None: it is right for this case.
        flaws: where that shows.
    """

    def __init__(
        self, algorithm: Algorithm, size: int, root: int, hosts: Sequence[int] | None
    ) -> None:
        self.program = Program(algorithm, size, root, hosts)
        self.fault: ProofError | None = None
        try:
            Execution(self.program, window=1).prove()
        except ProofError as exc:
            self.fault = exc
        self.collective = algorithm.collective
        self.reduces = algorithm.collective in REDUCING | {"barrier"}
        self._expressions = Expressions()
        self._holds: list[dict[int, Value]] = [
            {chunk: {(leaf.mask.bit_length() - 1, leaf.chunk): 1} for chunk, leaf in held.items()}
            for held in given(self.program, self._expressions)
        ]
        self._tells = size <= READABLE
        if not self._tells:
            self._holds = []
        self.states: list[Holds] = [tuple(map(dict, self._holds))]
        self.rounds: list[tuple[Delivery, ...]] = []
        self.flaws: list[Flaw] = []
        self._waits = list(self.program.waits)
        self._done = [False] * len(self.program.steps)
        self._arrived: dict[int, list[Value]] = {}
        self._ready: dict[int, int] = {}  # a Send whose ends may be posted -> since which round
        self._run()
        self.stuck = tuple(self._find_stuck())
        if self.fault is not None and not self.stuck and self._tells:
            self._find_flaws_at_the_end()
        self.flaws.sort()

    def changed(self, number: int) -> set[tuple[int, int]]:
        """(rank, chunk) of the chunks that got another value in a round; none before the first."""
        return {
            (rank, chunk)
            for rank, held in enumerate(self.states[number] if number else ())
            for chunk, value in held.items()
            if self.states[number - 1][rank].get(chunk) != value
        }

    def rows(self) -> list[str]:
        """What each chunk is, in a word or two."""
        size, chunks = self.program.size, self.program.chunks
        match self.collective:
            case "all_to_all":
                ways = [f"transit {chunk}" for chunk in range(2 * size, chunks)]
                ends = [f"{word} {rank}" for word in ("to", "from") for rank in range(size)]
                return ends + ways
            case "exscan":
                return ["mine", "before me"]
            case _:
                return [f"chunk {chunk}" for chunk in range(chunks)]

    def owner(self, part: Part) -> int:
        """The number that a part is shown by: the rank that it comes from; a piece of the root's
        value, or the rank that it is for, where all come from the root.
        """
        rooted = self.collective in ("broadcast", "scatter")
        return part[1] if rooted else part[0]

    # --- the run ---------------------------------------------------------------------------

    def _run(self) -> None:
        program = self.program
        self._finish([i for i, n in enumerate(program.waits) if n == 0 and self._begin(i)])
        while chosen := self._choose():
            # What is sent is what was held when the round began.
            sent = [self._load(send, program.named[send]) for send in chosen]
            self.rounds.append(tuple(map(self._delivery, sorted(chosen))))
            for send, values in zip(chosen, sent, strict=True):
                receive = program.partner[send]
                if self._is_scratch(receive):
                    self._arrived[receive] = values
                else:
                    self._store(receive, values)
            for send in chosen:
                del self._ready[send]
                self._finish([send, program.partner[send]])
            self.states.append(tuple(map(dict, self._holds)))

    def _choose(self) -> list[int]:
        """The Sends of the next round."""
        program = self.program
        senders: set[int] = set()
        receivers: set[int] = set()
        chosen: list[int] = []

        def order(send: int) -> tuple[bool, int, int, int]:
            receive, sender = program.partner[send], program.owner[send]
            # Rather one that is combined at once than one that must wait in scratch.
            late = self._is_scratch(receive) and self._waits[receive + 1] > 2
            return late, self._ready[send], send - program.base[sender], sender

        for send in sorted(self._ready, key=order):
            sender, receiver = program.owner[send], program.owner[program.partner[send]]
            if sender not in senders and receiver not in receivers:
                senders.add(sender)
                receivers.add(receiver)
                chosen.append(send)
        return chosen

    def _begin(self, index: int) -> bool:
        """Begin a step that waits for nothing more; returns whether that was all.

        A message is ready when both its ends are.
        """
        program, step = self.program, self.program.steps[index]
        if isinstance(step, Reduce):
            self._reduce(index)
        elif isinstance(step, Copy):
            self._store(index, self._load(index, (step.source,)))
        else:
            other = program.partner[index]
            if other >= 0 and self._waits[other] == 0:
                send = index if isinstance(step, Send) else other
                self._ready.setdefault(send, len(self.rounds))
            return False
        return True

    def _finish(self, done: list[int]) -> None:
        """Note that steps are done, and begin those that waited for them."""
        while done:
            index = done.pop()
            self._done[index] = True
            for later in self.program.successors[index]:
                self._waits[later] -= 1
                if self._waits[later] == 0 and self._begin(later):
                    done.append(later)

    def _load(self, index: int, chunks: Iterable[int]) -> list[Value]:
        if not self._tells:
            return []
        rank = self.program.owner[index]
        held = self._holds[rank]
        for chunk in chunks:
            if chunk not in held:
                # A message is loaded before its round is counted.
                number = len(self.rounds) + isinstance(self.program.steps[index], Send)
                self.flaws.append(Flaw(number, rank, chunk, "read before it has a value"))
        return [held.get(chunk, {}) for chunk in chunks]

    def _store(self, index: int, values: Iterable[Value]) -> None:
        if self._tells:
            held = self._holds[self.program.owner[index]]
            held.update(zip(self.program.named[index], values, strict=True))

    def _reduce(self, index: int) -> None:
        if not self._tells:
            return
        rank, chunks = self.program.owner[index], self.program.named[index]
        results = []
        for chunk, own, incoming in zip(
            chunks, self._load(index, chunks), self._arrived.pop(index - 1), strict=True
        ):
            results.append(
                {part: own.get(part, 0) + incoming.get(part, 0) for part in own | incoming}
            )
            twice = own.keys() & incoming.keys()
            if twice and self.collective != "barrier":
                what = f"has {_ranks(twice)} twice"
                self.flaws.append(Flaw(len(self.rounds), rank, chunk, what))
        self._store(index, results)

    # --- what is told ------------------------------------------------------------------------

    def _find_flaws_at_the_end(self) -> None:
        """Note what the ranks hold and should not, and what they should hold and do not."""
        for rank, chunk, have, wanted in self._ends():
            for parts, what in ((wanted - have, "lacks"), (have - wanted, "must not have")):
                if parts:
                    said = f"{what} {_ranks(parts)}"
                    self.flaws.append(Flaw(len(self.rounds), rank, chunk, said))

    def _ends(self) -> Iterator[tuple[int, int, set[Part], set[Part]]]:
        """Rank, chunk, what it holds at the end, and what was promised."""
        ranks = range(self.program.size)
        if self.collective == "barrier":
            for rank, held in enumerate(self._holds):
                heard = {(sender, 0) for value in held.values() for sender, _ in value}
                yield rank, 0, heard, {(sender, 0) for sender in ranks}
            return
        for rank, chunk, want in promised(self.program, self._expressions):
            first, last = contributors(self.program, rank)
            piece = 0 if self.collective == "exscan" else chunk
            wanted = {(sender, piece) for sender in ranks[first : last + 1]}
            if want is not None:
                wanted = {(want.mask.bit_length() - 1, want.chunk)}
            yield rank, chunk, set(self._holds[rank].get(chunk, {})), wanted

    def _find_stuck(self) -> Iterator[Delivery]:
        """The messages of which one half is posted and the other never is."""
        program = self.program
        for index, step in enumerate(program.steps):
            if self._done[index] or self._waits[index]:
                continue
            if isinstance(step, Send):
                yield self._delivery(index)._replace(into=())
            elif isinstance(step, Recv):
                named = program.named[index]
                yield Delivery(step.peer, program.owner[index], (), named, step.scratch)

    def _delivery(self, send: int) -> Delivery:
        program, step = self.program, self.program.steps[send]
        assert isinstance(step, Send)
        other = program.partner[send]
        into = program.named[other] if other >= 0 else ()
        combines = other >= 0 and self._is_scratch(other)
        return Delivery(program.owner[send], step.peer, program.named[send], into, combines)

    def _is_scratch(self, index: int) -> bool:
        step = self.program.steps[index]
        return isinstance(step, Recv) and step.scratch


def _ranks(parts: Iterable[Part]) -> str:
    ranks = sorted({rank for rank, _ in parts})
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
