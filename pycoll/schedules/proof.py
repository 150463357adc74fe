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

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pycoll.errors import ProofError
from pycoll.schedule import Copy, Recv, Reduce, Schedule, Send, Step, compile_schedule
from pycoll.schedules import REDUCING, ROOTED, Algorithm, Cost, cost_of, steps_of


class Proof(NamedTuple):
    """What was proved, and what it cost (see `pycoll.schedules.Cost`)."""

    collective: str
    name: str
    size: int
    root: int
    window: int
    cost: Cost


class Program:
    """The schedules of all ranks as one list of steps, each Send joined to its Recv.

    A step's index is `base[rank]` plus its position in that rank's schedule; `partner` is the
    index of the other half of a message.
    """

    def __init__(
        self, algorithm: Algorithm, size: int, root: int, hosts: Sequence[int] | None = None
    ) -> None:
        self.algorithm = algorithm
        self.size = size
        self.root = root
        self.hosts = tuple(hosts) if hosts is not None else (0,) * size
        if size < 1 or len(self.hosts) != size:
            raise ValueError(f"{size} ranks with hosts {self.hosts}: one for each of at least one")
        self.chunks = algorithm.chunks(size)
        self.steps: list[Step] = []
        self.named: list[tuple[int, ...]] = []
        self.owner: list[int] = []
        self.base: list[int] = []
        self.waits: list[int] = []
        self.successors: list[tuple[int, ...]] = []
        self.scratch: list[list[int]] = []
        for rank in range(size):
            schedule = self._compile(rank)
            first = len(self.steps)
            self.base.append(first)
            self.steps += schedule.steps
            self.named += schedule.chunks
            self.owner += [rank] * len(schedule.steps)
            self.waits += schedule.waits
            for later in schedule.successors:
                self.successors.append(tuple([first + position for position in later]))
            self.scratch.append([])
            self._validate(rank)
        self.partner = self._join()

    def where(self, index: int) -> str:
        """Name a step for a message."""
        rank = self.owner[index]
        return f"rank {rank}, step {index - self.base[rank]}, {self.steps[index]}"

    def error(self, what: str) -> ProofError:
        """Make the error that has the algorithm and the case in front of `what`."""
        algorithm = self.algorithm
        at_root = f", root {self.root}" if algorithm.collective in ROOTED else ""
        on_hosts = f", hosts {self.hosts}" if algorithm.hosts else ""
        return ProofError(
            f"{algorithm.collective} {algorithm.name}, size {self.size}{at_root}{on_hosts}: {what}"
        )

    def _compile(self, rank: int) -> Schedule:
        try:
            steps = steps_of(self.algorithm, rank, self.size, self.root, self.hosts)
            return compile_schedule(steps)
        except ValueError as exc:
            raise self.error(f"rank {rank}, {exc}") from exc

    def _validate(self, rank: int) -> None:
        """Check peers and chunks of one rank, and list its receives into scratch."""
        size, chunks, steps = self.size, self.chunks, self.steps
        for index in range(self.base[rank], len(steps)):
            step = steps[index]
            named = self.named[index]
            if isinstance(step, Copy):
                named = (*named, step.source)
            elif not isinstance(step, Reduce):
                if not 0 <= step.peer < size:
                    raise self.error(f"{self.where(index)}: there are only ranks 0 to {size - 1}")
                if step.peer == rank:
                    raise self.error(f"{self.where(index)}: the peer is the rank itself")
                if isinstance(step, Recv) and step.scratch:
                    self.scratch[rank].append(index)
                    if index + 1 == len(steps) or not isinstance(steps[index + 1], Reduce):
                        raise self.error(
                            f"{self.where(index)}: no Reduce follows to use what comes"
                        )
            if min(named) < 0 or max(named) >= chunks:
                raise self.error(f"{self.where(index)}: there are only chunks 0 to {chunks - 1}")

    def _join(self) -> list[int]:
        """Find the other half of every message: by sender and receiver, the k-th meets the k-th."""
        sends: dict[tuple[int, int], list[int]] = {}
        receives: dict[tuple[int, int], list[int]] = {}
        for index, (step, rank) in enumerate(zip(self.steps, self.owner, strict=True)):
            if isinstance(step, Send):
                sends.setdefault((rank, step.peer), []).append(index)
            elif isinstance(step, Recv):
                receives.setdefault((step.peer, rank), []).append(index)
        partner = [-1] * len(self.steps)
        for (sender, receiver), out in sends.items():
            into = receives.get((sender, receiver), [])
            if len(out) > len(into):
                lonely = self.where(out[len(into)])
                raise self.error(f"{lonely}: rank {receiver} has no Recv for this message")
            for index, other in zip(out, into, strict=False):
                partner[index], partner[other] = other, index
                if len(self.named[index]) != len(self.named[other]):
                    raise self.error(
                        f"{self.where(index)}: step {other - self.base[receiver]} of rank "
                        f"{receiver}, {self.steps[other]}, expects another number of chunks"
                    )
        for (sender, receiver), into in receives.items():
            out = sends.get((sender, receiver), [])
            if len(into) > len(out):
                lonely = self.where(into[len(out)])
                raise self.error(f"{lonely}: rank {sender} has no Send for this message")
        return partner


# Not frozen, though never changed: that would make making one, which the proof mostly does, slow.
@dataclass(slots=True, eq=False)
class _Value:
    """An expression: what one rank contributes to a chunk, or two expressions combined.

    Attributes:
        mask: bit r is set if rank r contributes.
        chunk: the chunk that this is a value of.
        span: the first and the last rank if the operands are neighbors in rank order.
        parts: left and right operand; None for what one rank contributes.
    """

    mask: int
    chunk: int
    span: tuple[int, int] | None
    parts: tuple[_Value, _Value] | None = None

    def __str__(self) -> str:
        return f"{self.tree()} of chunk {self.chunk}"

    def tree(self) -> str:
        """Draw the expression, for example ``((0 1) (2 3))``."""
        if self.parts is None:
            return str(self.mask.bit_length() - 1)
        return f"({self.parts[0].tree()} {self.parts[1].tree()})"


class Values:
    """Makes each expression once, so that equal trees are the same object.

    Attributes:
        pairs: what was made of which two operands.
    """

    def __init__(self) -> None:
        self._leaves: dict[tuple[int, int], _Value] = {}
        self.pairs: dict[tuple[_Value, _Value], _Value] = {}

    def leaf(self, rank: int, chunk: int) -> _Value:
        """What `rank` contributes to `chunk`."""
        value = self._leaves.get((rank, chunk))
        if value is None:
            value = self._leaves[rank, chunk] = _Value(1 << rank, chunk, (rank, rank))
        return value

    def combine(self, left: _Value, right: _Value) -> _Value:
        """Make the value of ``left op right``, of the same chunk; not yet among `pairs`."""
        span = None
        if left.span and right.span and left.span[1] + 1 == right.span[0]:
            span = (left.span[0], right.span[1])
        value = _Value(left.mask | right.mask, left.chunk, span, (left, right))
        self.pairs[left, right] = value
        return value


class Execution:
    """One execution of a program under one window; `values` may be shared with other runs."""

    def __init__(self, program: Program, window: int, values: Values | None = None) -> None:
        self.program = program
        self.window = window
        self.values = values or Values()
        self.reduces = program.algorithm.collective in (REDUCING | {"barrier"})
        self.same_chunk = program.algorithm.collective not in ("all_to_all", "exscan")
        self.holds = _given(program, self.values)
        self.given = [frozenset() if self.reduces else frozenset(held) for held in self.holds]
        self.waits = list(program.waits)
        self.posted = [False] * len(program.steps)
        self.done = [False] * len(program.steps)
        self.depth = [0] * len(program.steps)  # messages in the longest chain up to this step
        self.path = [0] * len(program.steps)  # chunks in the heaviest chain up to this step
        self.arrived: dict[int, list[_Value]] = {}  # Recv into scratch -> values
        self.opened = [0] * program.size  # how many receives into scratch were posted so far
        self.ready: list[int] = []

    def prove(self) -> Proof:
        """Run all ranks to their end and look at what they hold."""
        program, algorithm = self.program, self.program.algorithm
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

    def _combine(self, index: int, step: Reduce, left: _Value, right: _Value) -> _Value:
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

    def _load(self, index: int, chunks: Iterable[int]) -> list[_Value]:
        held = self.holds[self.program.owner[index]]
        try:
            return [held[chunk] for chunk in chunks]
        except KeyError as exc:
            raise self.program.error(
                f"{self.program.where(index)}: reads chunk {exc.args[0]} before it has a value"
            ) from None

    def _store(self, index: int, values: Iterable[_Value]) -> None:
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
        agreed: dict[int, _Value] = {}
        for rank, chunk, want in _promised(program, values):
            have = self.holds[rank].get(chunk)
            if have is None:
                raise program.error(f"rank {rank} ends without chunk {chunk}")
            if want is not None:
                if have != want:
                    raise program.error(
                        f"rank {rank} ends with {have} in chunk {chunk} instead of {want}"
                    )
                continue
            first, last = _contributors(program, rank)
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


def _contributors(program: Program, rank: int) -> tuple[int, int]:
    """The first and the last rank that contribute to what `rank` ends with."""
    match program.algorithm.collective:
        case "scan":
            return 0, rank
        case "exscan":
            return 0, rank - 1
        case _:
            return 0, program.size - 1


def _given(program: Program, values: Values) -> list[dict[int, _Value]]:
    """What each rank holds at the start: chunk -> value."""
    collective, size, chunks = program.algorithm.collective, program.size, range(program.chunks)
    if collective in ("broadcast", "scatter"):
        held = {chunk: values.leaf(program.root, chunk) for chunk in chunks}
        return [held if rank == program.root else {} for rank in range(size)]
    if collective in ("gather", "all_gather"):
        return [{rank: values.leaf(rank, rank)} for rank in range(size)]
    if collective == "all_to_all":
        chunks = range(size)
    if collective == "exscan":
        chunks = range(1)
    return [{chunk: values.leaf(rank, chunk) for chunk in chunks} for rank in range(size)]


def _promised(program: Program, values: Values) -> Iterator[tuple[int, int, _Value | None]]:
    """What must be held at the end: rank, chunk, value; None for what is combined."""
    size, chunks = program.size, range(program.chunks)
    ranks = range(size)
    match program.algorithm.collective:
        case "broadcast":
            yield from ((r, c, values.leaf(program.root, c)) for r in ranks for c in chunks)
        case "reduce":
            yield from ((program.root, c, None) for c in chunks)
        case "all_reduce":
            yield from ((r, c, None) for r in ranks for c in chunks)
        case "gather":
            yield from ((program.root, i, values.leaf(i, i)) for i in ranks)
        case "all_gather":
            yield from ((r, i, values.leaf(i, i)) for r in ranks for i in ranks)
        case "scatter":
            yield from ((r, r, values.leaf(program.root, r)) for r in ranks)
        case "reduce_scatter":
            yield from ((r, r, None) for r in ranks)
        case "scan":
            yield from ((r, c, None) for r in ranks for c in chunks)
        case "exscan":
            yield from ((r, 1, None) for r in ranks[1:])
        case "all_to_all":
            yield from ((r, size + i, values.leaf(i, r)) for r in ranks for i in ranks)
        case other:
            raise ValueError(f"nothing is known of what {other} promises")
