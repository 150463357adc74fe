"""The proof of algorithms: for every size, every root, and many placements of ranks on hosts.

`pycoll.schedules.proof` says what one proof is. The smallest window stands for the larger ones, one
root for others where the ranks are only turned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from pycoll.schedule import Recv, Send, Step
from pycoll.schedules import ROOTED, Algorithm, find, steps_of
from pycoll.schedules.program import Program
from pycoll.schedules.proof import Execution, Proof
from pycoll.schedules.relabel import relabel
from pycoll.schedules.symbols import Expressions

WINDOWS = (1, 2, 4)

EVERY_ROOT = 16
"""Up to this size every placement is proved with every root; beyond it the roots are dealt out to
the placements, differently at each size, so that every root and every placement is proved once."""


class Summary(NamedTuple):
    """All proofs of one algorithm: every size from 1 to `max_size`, every root, each window.

    For algorithms that ask where the ranks are also all `placements` (see `EVERY_ROOT`).
    """

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
    hosts: Sequence[int] | None = None,
) -> Proof:
    """Prove one algorithm for one size, root and window.

    Args:
        collective: for example ``"all_reduce"``.
        name: for example ``"ring"``.
        size: number of ranks.
        root: the root, for collectives that have one.
        window: how many receives into scratch may be open on a rank at a time.
        steps: prove these instead, against all that the named algorithm promises.
        hosts: by rank the number of its host, for algorithms that ask for it; None: all on one.

    Raises:
        ProofError: the algorithm is wrong.
        ValueError: there is no such algorithm.
    """
    algorithm = find(collective, name)
    if steps is not None:
        algorithm = algorithm._replace(steps=steps)
    return Execution(Program(algorithm, size, root, hosts), window).prove()


def placements(size: int) -> list[tuple[int, ...]]:
    """List the placements that are proved: by rank the number of the host, each placement once.

    All ranks on one host, each alone, blocks of 2, 3, 4 and 8 (the last may be shorter), round
    robin over 2 and over 3 hosts, and, mixed, hosts of half of the ranks, a quarter and so on.
    """
    ranks = range(size)
    ways = [tuple(rank // length for rank in ranks) for length in (size, 1, 2, 3, 4, 8)]
    ways += [tuple(rank % count for rank in ranks) for count in (2, 3)]
    ways.append(tuple((~rank & (rank + 1)).bit_length() for rank in ranks))
    return list(dict.fromkeys(ways))


def _cases(algorithm: Algorithm, size: int) -> Iterator[tuple[int, tuple[int, ...] | None]]:
    """Every root and placement to be proved at one size."""
    roots = range(size if algorithm.collective in ROOTED else 1)
    ways = placements(size) if algorithm.hosts else [None]
    for i, hosts in enumerate(ways):
        dealt = roots[(i + size) % len(ways) :: len(ways)] or roots
        yield from ((root, hosts) for root in (roots if size <= EVERY_ROOT else dealt))


def prove_algorithm(
    algorithm: Algorithm, max_size: int = 32, windows: Iterable[int] = WINDOWS
) -> Summary:
    """Prove one algorithm for every size to `max_size`, every root and every window.

    Raises:
        ProofError: the algorithm is wrong.
    """
    proofs = 0
    rooted = algorithm.collective in ROOTED
    window = min(windows)
    for size in range(1, max_size + 1):
        first: Program | None = None
        values = Expressions()
        for root, hosts in _cases(algorithm, size):
            if first is None or not _turned(first, root):
                program = Program(algorithm, size, root, hosts)
                Execution(program, window, values).prove()
                first = first or program
            proofs += 1
    return Summary(algorithm.collective, algorithm.name, max_size, rooted, proofs)


def _turned(first: Program, root: int) -> bool:
    """Whether the schedules for `root` are those of `first`, for root 0, with all ranks turned.

    Then its proof is theirs. Not where rank order is claimed: that does not turn with the ranks.
    """
    algorithm, size = first.algorithm, first.size
    if algorithm.rank_order or algorithm.hosts:
        return False
    ranks = [(rank + root) % size for rank in range(size)]
    chunks = ranks if algorithm.collective in ("gather", "scatter") else None
    for rank, begin in enumerate(first.base):
        end = first.base[rank + 1] if rank + 1 < size else len(first.steps)
        wanted = [_turn(step, ranks, chunks) for step in first.steps[begin:end]]
        steps = list(steps_of(algorithm, ranks[rank], size, root))
        if steps != wanted or list(map(type, steps)) != list(map(type, wanted)):
            return False
    return True


def _turn(step: Step, ranks: Sequence[int], chunks: Sequence[int] | None) -> Step:
    """The step with other ranks for peers and, if `chunks` is given, other chunks."""
    if chunks is not None:
        (turned,) = relabel((step,), ranks, chunks)
        return turned
    match step:
        case Send(peer, chunk):
            return Send(ranks[peer], chunk)
        case Recv(peer, chunk, scratch):
            return Recv(ranks[peer], chunk, scratch)
        case _:
            return step
