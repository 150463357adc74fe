"""Proof of schedules: all ranks of one collective run together on symbolic values.

A chunk holds an expression, not numbers: which rank's piece it is, or which two expressions were
combined, and in which order. The ranks run as the executor runs them, under its hardest terms:

    - every step whose hazards are met is posted, in whatever order;
    - a Send completes only when its Recv has been posted, for nothing is buffered;
    - receives into scratch are posted in program order and at most `window` of them are open, from
      their posting until their Reduce has run; Reduce and Copy run at once.

One run stands for all orders. Posting or completing a step never takes back what another may do,
so whether all steps complete does not depend on the order; and hazards order every two steps that
touch a chunk if one of them writes, so values do not depend on it either.

What is proved, for one (size, root, window): every message has its other half and none is left
over; all steps complete; no chunk is read before it has a value, lands in the chunk of another
number, or overwrites what the caller passed in where nothing is reduced; no contribution is
combined twice (but in a barrier); each rank ends with what `pycoll.schedules` promises; after
all_reduce all ranks hold the same expression tree, so the same bits; if the algorithm claims rank
order, operands are 0 to size - 1 from left to right; and the cost is the one it states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pycoll.errors import Error
from pycoll.schedule import Copy, Recv, Reduce, Schedule, Send, Step, compile_schedule
from pycoll.schedules import REDUCING, ROOTED, TABLE, Algorithm, Cost, find, names, steps_of

WINDOWS = (1, 2, 4)


class ProofError(Error):
    """A schedule does not do what it should: the message says which rank, which step and what."""


class Proof(NamedTuple):
    """What was proved, and what it cost (see `pycoll.schedules.Cost`)."""

    collective: str
    name: str
    size: int
    root: int
    window: int
    cost: Cost


class Summary(NamedTuple):
    """All proofs of one algorithm: every size from 1 to `max_size`, every root, each window."""

    collective: str
    name: str
    max_size: int
    rooted: bool
    proofs: int


def prove(
    collective: str,
    name: str,
    size: int,
    root: int = 0,
    window: int = 4,
    steps: Callable[..., Iterable[Step]] | None = None,
) -> Proof:
    """Prove one algorithm for one size, root and window.

    Args:
        collective: for example ``"all_reduce"``.
        name: for example ``"ring"``.
        size: number of ranks.
        root: the root, for collectives that have one.
        window: how many receives into scratch may be open on a rank at a time.
        steps: prove these instead, against all that the named algorithm promises.

    Raises:
        ProofError: the algorithm is wrong.
        ValueError: there is no such algorithm.
    """
    algorithm = find(collective, name)
    if steps is not None:
        algorithm = algorithm._replace(steps=steps)
    return _Run(_Program(algorithm, size, root), window).prove()


def prove_algorithm(
    algorithm: Algorithm, max_size: int = 32, windows: Iterable[int] = WINDOWS
) -> Summary:
    """Prove one algorithm for every size to `max_size`, every root and every window.

    Raises:
        ProofError: the algorithm is wrong.
    """
    proofs = 0
    rooted = algorithm.collective in ROOTED
    for size in range(1, max_size + 1):
        for root in range(size if rooted else 1):
            program = _Program(algorithm, size, root)
            # A window that holds all receives into scratch of a rank is as good as any larger one.
            most = max(1, *(len(receives) for receives in program.scratch))
            for window in sorted({min(window, most) for window in windows}):
                _Run(program, window).prove()
                proofs += 1
    return Summary(algorithm.collective, algorithm.name, max_size, rooted, proofs)


def prove_all(
    max_size: int = 32, collectives: Iterable[str] = (), windows: Iterable[int] = WINDOWS
) -> list[Summary]:
    """Prove all algorithms of some collectives, or of all.

    Raises:
        ProofError: an algorithm is wrong.
        ValueError: there is no such collective.
    """
    chosen = [(c, name) for c in (tuple(collectives) or TABLE) for name in names(c)]
    return [prove_algorithm(find(c, name), max_size, tuple(windows)) for c, name in chosen]


class _Program:
    """The schedules of all ranks as one list of steps, each Send joined to its Recv.

    A step's index is `base[rank]` plus its position in that rank's schedule; `partner` is the
    index of the other half of a message.
    """

    def __init__(self, algorithm: Algorithm, size: int, root: int) -> None:
        self.algorithm = algorithm
        self.size = size
        self.root = root
        self.chunks = algorithm.chunks(size)
        self.steps: list[Step] = []
        self.owner: list[int] = []
        self.base: list[int] = []
        self.waits: list[int] = []
        self.successors: list[tuple[int, ...]] = []
        self.scratch: list[list[int]] = []
        number: list[int] = []
        for rank in range(size):
            schedule = self._compile(rank)
            first = len(self.steps)
            self.base.append(first)
            self.steps += schedule.steps
            self.owner += [rank] * len(schedule.steps)
            self.waits += schedule.waits
            number += schedule.number
            for later in schedule.successors:
                self.successors.append(tuple([first + position for position in later]))
            self.scratch.append([])
            self._validate(rank)
        self.partner = self._join(number)

    def where(self, index: int) -> str:
        """Name a step for a message."""
        rank = self.owner[index]
        return f"rank {rank}, step {index - self.base[rank]}, {self.steps[index]}"

    def error(self, what: str) -> ProofError:
        """Make the error that has the algorithm and the case in front of `what`."""
        algorithm = self.algorithm
        at_root = f", root {self.root}" if algorithm.collective in ROOTED else ""
        return ProofError(
            f"{algorithm.collective} {algorithm.name}, size {self.size}{at_root}: {what}"
        )

    def _compile(self, rank: int) -> Schedule:
        try:
            return compile_schedule(steps_of(self.algorithm, rank, self.size, self.root))
        except ValueError as exc:
            raise self.error(f"rank {rank}, {exc}") from exc

    def _validate(self, rank: int) -> None:
        """Check peers and chunks of one rank, and list its receives into scratch."""
        size, chunks, steps = self.size, self.chunks, self.steps
        for index in range(self.base[rank], len(steps)):
            step = steps[index]
            if not 0 <= step.chunk < chunks:
                raise self.error(f"{self.where(index)}: there are only chunks 0 to {chunks - 1}")
            if isinstance(step, Copy):
                if not 0 <= step.source < chunks:
                    raise self.error(
                        f"{self.where(index)}: there are only chunks 0 to {chunks - 1}"
                    )
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

    def _join(self, number: list[int]) -> list[int]:
        """Find the other half of every message."""
        sends: dict[tuple[int, int, int], int] = {}
        receives: dict[tuple[int, int, int], int] = {}
        for index, step in enumerate(self.steps):
            if isinstance(step, Send):
                sends[self.owner[index], step.peer, number[index]] = index
            elif isinstance(step, Recv):
                receives[step.peer, self.owner[index], number[index]] = index
        partner = [-1] * len(self.steps)
        for key, index in sends.items():
            if key not in receives:
                raise self.error(f"{self.where(index)}: rank {key[1]} has no Recv for this message")
            partner[index] = receives[key]
            partner[receives[key]] = index
        for key, index in receives.items():
            if key not in sends:
                raise self.error(f"{self.where(index)}: rank {key[0]} has no Send for this message")
        return partner


@dataclass(frozen=True, slots=True, eq=False)
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


class _Values:
    """Makes each expression once, so that equal trees are the same object."""

    def __init__(self) -> None:
        self._leaves: dict[tuple[int, int], _Value] = {}
        self._pairs: dict[tuple[_Value, _Value], _Value] = {}

    def leaf(self, rank: int, chunk: int) -> _Value:
        """What `rank` contributes to `chunk`."""
        value = self._leaves.get((rank, chunk))
        if value is None:
            value = self._leaves[rank, chunk] = _Value(1 << rank, chunk, (rank, rank))
        return value

    def combine(self, left: _Value, right: _Value) -> _Value:
        """Value of ``left op right``, of the same chunk."""
        value = self._pairs.get((left, right))
        if value is None:
            span = None
            if left.span and right.span and left.span[1] + 1 == right.span[0]:
                span = (left.span[0], right.span[1])
            value = _Value(left.mask | right.mask, left.chunk, span, (left, right))
            self._pairs[left, right] = value
        return value


class _Run:
    """One execution of a program under one window."""

    def __init__(self, program: _Program, window: int) -> None:
        self.program = program
        self.window = window
        self.values = _Values()
        self.reduces = program.algorithm.collective in (REDUCING | {"barrier"})
        self.holds = _given(program, self.values)
        self.given = [frozenset() if self.reduces else frozenset(held) for held in self.holds]
        self.waits = list(program.waits)
        self.posted = [False] * len(program.steps)
        self.done = [False] * len(program.steps)
        self.depth = [0] * len(program.steps)  # messages in the longest chain up to this step
        self.arrived: dict[int, _Value] = {}  # Recv into scratch -> value
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
        claimed = algorithm.cost(program.size)
        if cost != claimed:
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
                self._store(index, step.chunk, self._load(index, step.source))
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
        steps = self.program.steps
        value = self._load(send, steps[send].chunk)
        into = steps[receive]
        assert isinstance(into, Recv)
        if into.scratch:
            self.arrived[receive] = value
        else:
            self._store(receive, into.chunk, value)
        self.depth[send] = self.depth[receive] = 1 + max(self.depth[send], self.depth[receive])
        self._complete(send)
        self._complete(receive)

    def _reduce(self, index: int, step: Reduce) -> None:
        program, values = self.program, self.values
        own, incoming = self._load(index, step.chunk), self.arrived.pop(index - 1)
        sender = program.owner[program.partner[index - 1]]
        if not self.reduces:
            raise program.error(f"{program.where(index)}: nothing is combined in this collective")
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
        pair = (incoming, own) if step.incoming_first else (own, incoming)
        self._store(index, step.chunk, values.combine(*pair))
        self._complete(index)
        self._open_scratch(program.owner[index])

    def _load(self, index: int, chunk: int) -> _Value:
        value = self.holds[self.program.owner[index]].get(chunk)
        if value is None:
            raise self.program.error(
                f"{self.program.where(index)}: reads chunk {chunk} before it has a value"
            )
        return value

    def _store(self, index: int, chunk: int, value: _Value) -> None:
        program, rank = self.program, self.program.owner[index]
        if chunk in self.given[rank]:
            raise program.error(
                f"{program.where(index)}: overwrites chunk {chunk}, which was passed in"
            )
        if value.chunk != chunk and program.algorithm.collective != "all_to_all":
            raise program.error(f"{program.where(index)}: puts {value} in chunk {chunk}")
        self.holds[rank][chunk] = value

    def _complete(self, index: int) -> None:
        self.done[index] = True
        depth, waits = self.depth, self.waits
        for later in self.program.successors[index]:
            if depth[index] > depth[later]:
                depth[later] = depth[index]
            waits[later] -= 1
            if waits[later] == 0:
                self.ready.append(later)

    def _check_results(self) -> None:
        program, values = self.program, self.values
        everyone = (1 << program.size) - 1
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
            if have.mask != everyone:
                missing = _ranks(everyone & ~have.mask)
                raise program.error(
                    f"rank {rank} ends with {have}, without the contribution of {missing}"
                )
            if program.algorithm.rank_order and have.span != (0, program.size - 1):
                raise program.error(f"claims rank order, but rank {rank} ends with {have}")
            if (
                program.algorithm.collective == "all_reduce"
                and agreed.setdefault(chunk, have) != have
            ):
                raise program.error(
                    f"ranks may differ in their bits: rank {rank} ends with {have}, "
                    f"rank 0 with {agreed[chunk]}"
                )

    def _cost(self) -> Cost:
        program = self.program
        sent, received = [0] * program.size, [0] * program.size
        for step, rank in zip(program.steps, program.owner, strict=True):
            if isinstance(step, Send):
                sent[rank] += 1
                received[step.peer] += 1
        return Cost(max(self.depth, default=0), sum(sent), max(sent + received))

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
        return f"{here}: waits for step {earlier - program.base[rank]}", earlier


def _ranks(mask: int) -> str:
    ranks = [str(rank) for rank in range(mask.bit_length()) if mask >> rank & 1]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"


def _given(program: _Program, values: _Values) -> list[dict[int, _Value]]:
    """What each rank holds at the start: chunk -> value."""
    collective, size, chunks = program.algorithm.collective, program.size, range(program.chunks)
    if collective in ("broadcast", "scatter"):
        held = {chunk: values.leaf(program.root, chunk) for chunk in chunks}
        return [held if rank == program.root else {} for rank in range(size)]
    if collective in ("gather", "all_gather"):
        return [{rank: values.leaf(rank, rank)} for rank in range(size)]
    if collective == "all_to_all":
        chunks = range(size)
    return [{chunk: values.leaf(rank, chunk) for chunk in chunks} for rank in range(size)]


def _promised(program: _Program, values: _Values) -> Iterator[tuple[int, int, _Value | None]]:
    """What must be held at the end: rank, chunk, value; None for the contributions of all."""
    size, chunks = program.size, range(program.chunks)
    ranks = range(size)
    match program.algorithm.collective:
        case "broadcast":
            yield from ((r, c, values.leaf(program.root, c)) for r in ranks for c in chunks)
        case "reduce":
            yield from ((program.root, c, None) for c in chunks)
        case "all_reduce" | "barrier":
            yield from ((r, c, None) for r in ranks for c in chunks)
        case "gather":
            yield from ((program.root, i, values.leaf(i, i)) for i in ranks)
        case "all_gather":
            yield from ((r, i, values.leaf(i, i)) for r in ranks for i in ranks)
        case "scatter":
            yield from ((r, r, values.leaf(program.root, r)) for r in ranks)
        case "reduce_scatter":
            yield from ((r, r, None) for r in ranks)
        case "all_to_all":
            yield from ((r, size + i, values.leaf(i, r)) for r in ranks for i in ranks)
        case other:
            raise ValueError(f"nothing is known of what {other} promises")
