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

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pycoll.errors import ProofError
from pycoll.schedule import Copy, Recv, Reduce, Send
from pycoll.schedules import REDUCING, Algorithm
from pycoll.schedules.program import Program
from pycoll.schedules.proof import Execution
from pycoll.schedules.symbols import Expressions, contributors, given, promised

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


class Round(NamedTuple):
    """The messages of a round, and what the ranks hold after it.

    Attributes:
        messages: in order of sender.
        holds: by rank, chunk -> value.
        changed: (rank, chunk) of the chunks that got another value.
    """

    messages: tuple[Delivery, ...]
    holds: Holds
    changed: frozenset[tuple[int, int]]


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
        program: the schedules.
        start: what the ranks hold before the first round.
        rounds: in order.
        stuck: messages that never travel: a half has no other half, or what it waits for never
            comes. An `into` of () or `chunks` of () is a half that is missing.
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
        self._values = Expressions()
        self._holds: list[dict[int, Value]] = [
            {chunk: {(leaf.mask.bit_length() - 1, leaf.chunk): 1} for chunk, leaf in held.items()}
            for held in given(self.program, self._values)
        ]
        self.start = self._snapshot()
        self.rounds: list[Round] = []
        self.flaws: list[Flaw] = []
        self._waits = list(self.program.waits)
        self._done = [False] * len(self.program.steps)
        self._arrived: dict[int, list[Value]] = {}
        self._changed: set[tuple[int, int]] = set()
        self._ready: dict[int, int] = {}  # a Send whose ends may be posted -> since which round
        self._now = 0
        self._run()
        self.stuck = self._find_stuck()
        if self.fault is not None and not self.stuck:
            self._find_flaws_at_the_end()
        self.flaws.sort()

    @property
    def reduces(self) -> bool:
        """Whether chunks hold contributions of several ranks."""
        return self.program.algorithm.collective in REDUCING | {"barrier"}

    @property
    def num_messages(self) -> int:
        """How many messages have travelled."""
        return sum(len(each.messages) for each in self.rounds)

    def load(self) -> int:
        """Chunks that the busiest rank sends, or receives if that is more."""
        loads = [0] * (2 * self.program.size)
        for each in self.rounds:
            for message in each.messages:
                loads[2 * message.sender] += len(message.chunks)
                loads[2 * message.receiver + 1] += len(message.chunks)
        return max(loads)

    def rows(self) -> list[str]:
        """What each chunk is, in a word or two."""
        size, chunks = self.program.size, self.program.chunks
        match self.program.algorithm.collective:
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
        rooted = self.program.algorithm.collective in ("broadcast", "scatter")
        return part[1] if rooted else part[0]

    # --- the run ---------------------------------------------------------------------------

    def _run(self) -> None:
        steps = self.program.steps
        self._finish([i for i, n in enumerate(self._waits) if n == 0 and self._is_local(steps[i])])
        for index, step in enumerate(steps):
            if isinstance(step, Send):
                self._look(index)
        while chosen := self._choose():
            self._now += 1
            for send in chosen:
                del self._ready[send]
            # What is sent is what was held when the round began.
            sent = [self._load(send, self.program.named[send]) for send in chosen]
            done: list[int] = []
            for send, values in zip(chosen, sent, strict=True):
                receive = self.program.partner[send]
                into = steps[receive]
                if isinstance(into, Recv) and into.scratch:
                    self._arrived[receive] = values
                else:
                    self._store(receive, self.program.named[receive], values)
                done += [send, receive]
            self._finish(done)
            messages = tuple(self._message(send) for send in sorted(chosen))
            self.rounds.append(Round(messages, self._snapshot(), frozenset(self._changed)))
            self._changed.clear()

    def _choose(self) -> list[int]:
        """The Sends of the next round."""
        program, base = self.program, self.program.base
        senders: set[int] = set()
        receivers: set[int] = set()
        chosen: list[int] = []

        def order(send: int) -> tuple[bool, int, int, int]:
            receive, sender = program.partner[send], program.owner[send]
            # Rather one that is combined at once than one that must wait in scratch.
            combines = isinstance(program.steps[receive], Recv) and self._is_scratch(receive)
            late = combines and self._waits[receive + 1] > 2
            return late, self._ready[send], send - base[sender], sender

        for send in sorted(self._ready, key=order):
            sender, receiver = program.owner[send], program.owner[program.partner[send]]
            if sender not in senders and receiver not in receivers:
                senders.add(sender)
                receivers.add(receiver)
                chosen.append(send)
        return chosen

    def _finish(self, done: list[int]) -> None:
        """Note that steps are done, and do all that needs no message and may run now."""
        steps = self.program.steps
        while done:
            index = done.pop()
            step = steps[index]
            if isinstance(step, Reduce):
                self._reduce(index, step)
            elif isinstance(step, Copy):
                self._store(index, self.program.named[index], self._load(index, (step.source,)))
            self._done[index] = True
            for later in self.program.successors[index]:
                self._waits[later] -= 1
                if self._waits[later] == 0:
                    if self._is_local(steps[later]):
                        done.append(later)
                    else:
                        self._look(later)

    def _look(self, index: int) -> None:
        """Put a message among those that may travel, if both its ends may be posted."""
        other = self.program.partner[index]
        if other >= 0 and self._waits[index] == 0 and self._waits[other] == 0:
            send = index if isinstance(self.program.steps[index], Send) else other
            self._ready.setdefault(send, len(self.rounds))

    def _load(self, index: int, chunks: Iterable[int]) -> list[Value]:
        held, rank = self._holds[self.program.owner[index]], self.program.owner[index]
        for chunk in chunks:
            if chunk not in held:
                self._note(rank, chunk, "read before it has a value")
        return [held.get(chunk, {}) for chunk in chunks]

    def _store(self, index: int, chunks: Iterable[int], values: Iterable[Value]) -> None:
        rank = self.program.owner[index]
        for chunk, value in zip(chunks, values, strict=True):
            if self._holds[rank].get(chunk) != value:
                self._changed.add((rank, chunk))
            self._holds[rank][chunk] = value

    def _reduce(self, index: int, step: Reduce) -> None:
        rank, chunks = self.program.owner[index], self.program.named[index]
        results = []
        for chunk, own, incoming in zip(
            chunks, self._load(index, chunks), self._arrived.pop(index - 1), strict=True
        ):
            result = dict(own)
            for part, times in incoming.items():
                result[part] = result.get(part, 0) + times
            twice = [part for part in incoming if part in own]
            if twice and self.program.algorithm.collective != "barrier":
                self._note(rank, chunk, f"has {_ranks(rank for rank, _ in twice)} twice")
            results.append(result)
        self._store(index, chunks, results)

    # --- what is told ------------------------------------------------------------------------

    def _note(self, rank: int, chunk: int, what: str) -> None:
        self.flaws.append(Flaw(self._now, rank, chunk, what))

    def _find_flaws_at_the_end(self) -> None:
        """Flaw what the ranks hold at the end and should not, or do not hold and should."""
        last, program = len(self.rounds), self.program
        if program.algorithm.collective == "barrier":
            for rank, held in enumerate(self._holds):
                heard = {sender for value in held.values() for sender, _ in value}
                if silent := set(range(program.size)) - heard:
                    self.flaws.append(Flaw(last, rank, 0, f"lacks {_ranks(silent)}"))
            return
        for rank, chunk, want in promised(program, self._values):
            have = self._holds[rank].get(chunk, {})
            if want is not None:
                wanted = {(want.mask.bit_length() - 1, want.chunk)}
            else:
                first, end = contributors(program, rank)
                piece = 0 if program.algorithm.collective == "exscan" else chunk
                wanted = {(sender, piece) for sender in range(first, end + 1)}
            if missing := wanted - set(have):
                what = f"lacks {_ranks(sender for sender, _ in missing)}"
                self.flaws.append(Flaw(last, rank, chunk, what))
            if surplus := set(have) - wanted:
                what = f"must not have {_ranks(sender for sender, _ in surplus)}"
                self.flaws.append(Flaw(last, rank, chunk, what))

    def _find_stuck(self) -> tuple[Delivery, ...]:
        """The messages of which a half is posted, or nothing but its other half is missing."""
        stuck = []
        for index, step in enumerate(self.program.steps):
            if self._done[index] or self._waits[index] or self._is_local(step):
                continue
            other = self.program.partner[index]
            if isinstance(step, Send):
                stuck.append(self._message(index))
            elif other < 0 or self._waits[other]:
                rank = self.program.owner[index]
                assert isinstance(step, Recv)
                combines = step.scratch
                named = self.program.named[index]
                stuck.append(Delivery(step.peer, rank, (), named, combines))
        return tuple(stuck)

    def _message(self, send: int) -> Delivery:
        program, other = self.program, self.program.partner[send]
        step = program.steps[send]
        assert isinstance(step, Send)
        into = program.named[other] if other >= 0 and not self._waits[other] else ()
        combines = other >= 0 and self._is_scratch(other)
        return Delivery(program.owner[send], step.peer, program.named[send], into, combines)

    def _is_scratch(self, index: int) -> bool:
        step = self.program.steps[index]
        return isinstance(step, Recv) and step.scratch

    @staticmethod
    def _is_local(step: object) -> bool:
        return isinstance(step, Reduce | Copy)

    def _snapshot(self) -> Holds:
        return tuple(dict(held) for held in self._holds)


def _ranks(ranks: Iterable[int]) -> str:
    listed = sorted(set(ranks))
    return f"rank{'s' if len(listed) > 1 else ''} {', '.join(map(str, listed))}"
