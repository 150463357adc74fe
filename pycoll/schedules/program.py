"""A program: the schedules of all ranks, checked one by one and joined where messages meet."""

from __future__ import annotations

from collections.abc import Sequence

from pycoll.errors import ProofError
from pycoll.schedule import Copy, Recv, Reduce, Schedule, Send, Step, compile_schedule
from pycoll.schedules import ROOTED, Algorithm, steps_of


class Program:
    """The schedules of all ranks as one list of steps, each Send joined to its Recv.

    A step's index is `base[rank]` plus its position in that rank's schedule; `partner` is the
    index of the other half of a message, -1 if there is none. `fault` then says so: a proof raises
    it, a drawing shows what happens nevertheless.
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
        self.fault: ProofError | None = None
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
                self._fail(f"{lonely}: rank {receiver} has no Recv for this message")
            for index, other in zip(out, into, strict=False):
                if len(self.named[index]) == len(self.named[other]):
                    partner[index], partner[other] = other, index
                else:
                    self._fail(
                        f"{self.where(index)}: step {other - self.base[receiver]} of rank "
                        f"{receiver}, {self.steps[other]}, expects another number of chunks"
                    )
        for (sender, receiver), into in receives.items():
            out = sends.get((sender, receiver), [])
            if len(into) > len(out):
                lonely = self.where(into[len(out)])
                self._fail(f"{lonely}: rank {sender} has no Send for this message")
        return partner

    def _fail(self, what: str) -> None:
        """Keep the first reason why a message has no other half."""
        self.fault = self.fault or self.error(what)
