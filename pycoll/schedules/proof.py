"""One proof: all ranks of one collective run together on symbolic values.

A chunk holds an expression, not numbers: which rank's piece it is, or which two expressions were
combined, and in which order. The ranks run as the core runs them, under its hardest terms:

    - every step whose hazards are met is posted, in whatever order;
    - a Send completes only when its Recv has been posted, for nothing is buffered;
    - receives into scratch are posted in program order and at most `window` of them are open, from
      their posting until their Reduce has run; Reduce and Copy run at once.

One run stands for all orders. Posting or completing a step never takes back what another may do,
so whether all steps complete does not depend on the order; and hazards order every two steps that
touch a chunk if one of them writes, so values do not depend on it either. For the same reason a
run with a small window stands for all with larger ones, which only let more be posted. And the run
of one root stands for those of others if their schedules are the same ones, all ranks turned.

What is proved, for one (size, root, window): every message has its other half and none is left
over; all steps complete; no chunk is read before it has a value, lands in the chunk of another
number, or overwrites what the caller passed in where nothing is reduced; no contribution is
combined twice (but in a barrier); each rank ends with what `pycoll.schedules` promises; after
all_reduce all ranks hold the same expression tree, so the same bits; if the algorithm claims rank
order, operands are 0 to size - 1 from left to right; and the cost is the one it states.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from pycoll.schedule import Copy, Recv, Reduce, Send
from pycoll.schedules import REDUCING, Cost, cost_of
from pycoll.schedules.program import Program
from pycoll.schedules.symbols import Expression, Expressions, contributors, given, promised


class Proof(NamedTuple):
    """What was proved, and what it cost (see `pycoll.schedules.Cost`)."""

    collective: str
    name: str
    size: int
    root: int
    window: int
    cost: Cost


class Execution:
    """One execution of a program under one window; `values` may be shared with other runs."""

    def __init__(self, program: Program, window: int, values: Expressions | None = None) -> None:
        self.program = program
        self.window = window
        self.values = values or Expressions()
        self.reduces = program.algorithm.collective in (REDUCING | {"barrier"})
        self.same_chunk = program.algorithm.collective not in ("all_to_all", "exscan")
        self.holds = given(program, self.values)
        self.given = [frozenset() if self.reduces else frozenset(held) for held in self.holds]
        self.waits = list(program.waits)
        self.posted = [False] * len(program.steps)
        self.done = [False] * len(program.steps)
        self.depth = [0] * len(program.steps)  # messages in the longest chain up to this step
        self.path = [0] * len(program.steps)  # chunks in the heaviest chain up to this step
        self.arrived: dict[int, list[Expression]] = {}  # Recv into scratch -> values
        self.opened = [0] * program.size  # how many receives into scratch were posted so far
        self.ready: list[int] = []

    def prove(self) -> Proof:
        """Run all ranks to their end and look at what they hold."""
        program, algorithm = self.program, self.program.algorithm
        if program.fault is not None:
            raise program.fault
        self._execute()
        if not all(self.done):
            raise program.error(f"deadlock with window {self.window}\n{self._cycle()}")
        self._check_results()
        cost = self._cost()
        claimed = cost_of(algorithm, program.size, program.root, program.hosts)
        if claimed is not None and cost != claimed:
            raise program.error(f"states {claimed}, but takes {cost}")
        return Proof(
            algorithm.collective, algorithm.name, program.size, program.root, self.window, cost
        )

    def _execute(self) -> None:
        """Post and complete steps until nothing moves."""
        program, ready = self.program, self.ready
        steps, partner, posted = program.steps, program.partner, self.posted
        for index, waits in enumerate(self.waits):
            step = steps[index]
            if waits == 0 and not (isinstance(step, Recv) and step.scratch):
                ready.append(index)
        for rank in range(program.size):
            for _ in range(self.window):
                self._open_scratch(rank)
        while ready:
            index = ready.pop()
            posted[index] = True
            step = steps[index]
            if isinstance(step, Reduce):
                self._reduce(index, step)
            elif isinstance(step, Copy):
                self._store(index, self._load(index, (step.source,)))
                self._complete(index)
            elif posted[partner[index]]:
                if isinstance(step, Send):
                    self._deliver(index, partner[index])
                else:
                    self._deliver(partner[index], index)

    def _open_scratch(self, rank: int) -> None:
        """Post the next receive into scratch of a rank, if it has one more."""
        receives = self.program.scratch[rank]
        if self.opened[rank] < len(receives):
            self.ready.append(receives[self.opened[rank]])
            self.opened[rank] += 1

    def _deliver(self, send: int, receive: int) -> None:
        values = self._load(send, self.program.named[send])
        into = self.program.steps[receive]
        assert isinstance(into, Recv)
        if into.scratch:
            self.arrived[receive] = values
        else:
            self._store(receive, values)
        depth, path = self.depth, self.path
        depth[send] = depth[receive] = 1 + max(depth[send], depth[receive])
        path[send] = path[receive] = len(values) + max(path[send], path[receive])
        self._complete(send)
        self._complete(receive)

    def _reduce(self, index: int, step: Reduce) -> None:
        if not self.reduces:
            raise self.program.error(
                f"{self.program.where(index)}: nothing is combined in this collective"
            )
        chunks = self.program.named[index]
        own = self._load(index, chunks)
        incoming = self.arrived.pop(index - 1)
        sides = (incoming, own) if step.incoming_first else (own, incoming)
        held, known = self.holds[self.program.owner[index]], self.values.pairs
        for chunk, pair in zip(chunks, zip(*sides, strict=True), strict=True):
            held[chunk] = known.get(pair) or self._combine(index, step, *pair)
        self._complete(index)
        self._open_scratch(self.program.owner[index])

    def _combine(self, index: int, step: Reduce, left: Expression, right: Expression) -> Expression:
        """Combine two values for the first time, if they may be."""
        program = self.program
        own, incoming = (right, left) if step.incoming_first else (left, right)
        sender = program.owner[program.partner[index - 1]]
        if own.chunk != incoming.chunk:
            raise program.error(
                f"{program.where(index)}: combines {own} with {incoming} from rank {sender}"
            )
        twice = own.mask & incoming.mask
        if twice and program.algorithm.collective != "barrier":
            raise program.error(
                f"{program.where(index)}: combines {_ranks(twice)} twice: has {own}, gets "
                f"{incoming} from rank {sender}"
            )
        return self.values.combine(left, right)

    def _load(self, index: int, chunks: Iterable[int]) -> list[Expression]:
        held = self.holds[self.program.owner[index]]
        try:
            return [held[chunk] for chunk in chunks]
        except KeyError as exc:
            raise self.program.error(
                f"{self.program.where(index)}: reads chunk {exc.args[0]} before it has a value"
            ) from None

    def _store(self, index: int, values: Iterable[Expression]) -> None:
        """Put values into the chunks that a step names."""
        program, rank = self.program, self.program.owner[index]
        held, given = self.holds[rank], self.given[rank]
        for chunk, value in zip(program.named[index], values, strict=True):
            if chunk in given:
                raise program.error(
                    f"{program.where(index)}: overwrites chunk {chunk}, which was passed in"
                )
            if value.chunk != chunk and self.same_chunk:
                raise program.error(f"{program.where(index)}: puts {value} in chunk {chunk}")
            held[chunk] = value

    def _complete(self, index: int) -> None:
        self.done[index] = True
        depth, path, waits = self.depth, self.path, self.waits
        for later in self.program.successors[index]:
            if depth[index] > depth[later]:
                depth[later] = depth[index]
            if path[index] > path[later]:
                path[later] = path[index]
            waits[later] -= 1
            if waits[later] == 0:
                self.ready.append(later)

    def _check_results(self) -> None:
        program, values = self.program, self.values
        if program.algorithm.collective == "barrier":
            self._check_heard()
            return
        agreed: dict[int, Expression] = {}
        for rank, chunk, want in promised(program, values):
            have = self.holds[rank].get(chunk)
            if have is None:
                raise program.error(f"rank {rank} ends without chunk {chunk}")
            if want is not None:
                if have != want:
                    raise program.error(
                        f"rank {rank} ends with {have} in chunk {chunk} instead of {want}"
                    )
                continue
            first, last = contributors(program, rank)
            wanted = (1 << (last + 1)) - (1 << first)
            if have.mask & ~wanted:
                surplus = _ranks(have.mask & ~wanted)
                raise program.error(f"rank {rank} ends with {have}: {surplus} must not contribute")
            if have.mask != wanted:
                missing = _ranks(wanted & ~have.mask)
                raise program.error(
                    f"rank {rank} ends with {have}, without the contribution of {missing}"
                )
            if program.algorithm.rank_order and have.span != (first, last):
                raise program.error(f"claims rank order, but rank {rank} ends with {have}")
            if (
                program.algorithm.collective == "all_reduce"
                and agreed.setdefault(chunk, have) != have
            ):
                raise program.error(
                    f"ranks may differ in their bits: rank {rank} ends with {have}, "
                    f"rank 0 with {agreed[chunk]}"
                )

    def _check_heard(self) -> None:
        """Show that every rank has heard of every other, whatever the chunk."""
        for rank, held in enumerate(self.holds):
            heard = 0
            for value in held.values():
                heard |= value.mask
            missing = (1 << self.program.size) - 1 & ~heard
            if missing:
                raise self.program.error(f"rank {rank} ends without a word of {_ranks(missing)}")

    def _cost(self) -> Cost:
        program = self.program
        sent, received = [0] * program.size, [0] * program.size
        messages = 0
        for step, named, rank in zip(program.steps, program.named, program.owner, strict=True):
            if isinstance(step, Send):
                messages += 1
                sent[rank] += len(named)
                received[step.peer] += len(named)
        return Cost(
            steps=max(self.depth, default=0),
            path=max(self.path, default=0),
            messages=messages,
            volume=sum(sent),
            load=max(sent + received),
        )

    def _cycle(self) -> str:
        """Follow what a stuck step waits for until it comes round."""
        program = self.program
        index = self.done.index(False)
        seen: dict[int, int] = {}
        lines: list[str] = []
        while index not in seen:
            seen[index] = len(lines)
            why, index = self._obstacle(index)
            lines.append(why)
        last = f"    {program.where(index)}: so it waits for itself"
        return "\n".join([*(f"    {line}" for line in lines[seen[index] :]), last])

    def _obstacle(self, index: int) -> tuple[str, int]:
        """Say what a stuck step waits for, and which step that is."""
        program = self.program
        rank, step = program.owner[index], program.steps[index]
        here = program.where(index)
        if self.posted[index]:
            other = program.partner[index]
            peer = program.owner[other]
            theirs = other - program.base[peer]
            return f"{here}: posted, waits for step {theirs} of rank {peer} to be posted", other
        if isinstance(step, Recv) and step.scratch:
            oldest = next(r for r in program.scratch[rank] if not self.done[r + 1])
            position = oldest + 1 - program.base[rank]
            return f"{here}: waits for a free scratch, so for step {position} to run", oldest + 1
        earlier = next(
            e
            for e in range(program.base[rank], index)
            if not self.done[e] and index in program.successors[e]
        )
        position, blocker = earlier - program.base[rank], program.steps[earlier]
        shared = set(program.named[index]) & set(program.named[earlier])
        # Of a Copy it may be the chunk that it reads, which is not among those it names.
        chunk = min(shared, default=blocker.source if isinstance(blocker, Copy) else 0)
        if isinstance(blocker, Recv) and blocker.scratch:
            does = "brings"
        else:
            does = "reads" if isinstance(blocker, Send) or not shared else "writes"
        return f"{here}: waits for step {position}, which {does} chunk {chunk}", earlier


def _ranks(mask: int) -> str:
    ranks = [str(rank) for rank in range(mask.bit_length()) if mask >> rank & 1]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"
