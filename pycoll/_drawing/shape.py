"""The shape of an algorithm, which a picture shows beside its rounds: trees, a ring, and phases.

All is found in the messages, so it holds for a user's own algorithm, too.
"""

from __future__ import annotations

from typing import NamedTuple

from pycoll._drawing.rounds import Replay


class Tree(NamedTuple):
    """A tree over ranks, by which these chunks travel.

    Attributes:
        parents: rank -> who is above; the root has none and is not there.
        root: the rank at the top.
        chunks: that go through it; none: all.
    """

    parents: dict[int, int]
    root: int
    chunks: tuple[int, ...]

    def children(self, rank: int) -> list[int]:
        """Who is below, in order."""
        return sorted(child for child, parent in self.parents.items() if parent == rank)

    def places(self) -> dict[int, tuple[float, int]]:
        """Where each rank is drawn: across, in widths of a leaf, and its level from the top."""
        found: dict[int, tuple[float, int]] = {}
        leaves = 0

        def place(rank: int, level: int) -> float:
            nonlocal leaves
            below = [place(child, level + 1) for child in self.children(rank)]
            if not below:
                below = [float(leaves)]
                leaves += 1
            found[rank] = (below[0] + below[-1]) / 2, level
            return found[rank][0]

        place(self.root, 0)
        return found


class Ring(NamedTuple):
    """A ring: each rank sends to the next one in `ranks` alone, and the last to the first."""

    ranks: tuple[int, ...]


def shape(replay: Replay) -> list[Tree] | Ring | None:
    """Find the tree, the two trees or the ring that the messages of an algorithm make; or none."""
    uses = _uses(replay)
    ring = _ring({pair for pair, _ in uses}, replay.program.size)
    if ring is not None or replay.program.size < 3:
        return ring
    whole = _tree(replay, uses)
    if whole is not None:
        return [whole]
    trees: list[Tree] = []
    for chunk in range(replay.program.chunks):
        tree = _tree(replay, [use for use in uses if chunk in use[1].chunks], chunk)
        if tree is None:
            return None
        trees.append(tree)
    alike: dict[frozenset[tuple[int, int]], Tree] = {}
    for tree in trees:
        same = alike.setdefault(frozenset(tree.parents.items()), tree._replace(chunks=()))
        alike[frozenset(tree.parents.items())] = same._replace(chunks=same.chunks + tree.chunks)
    return list(alike.values()) if len(alike) <= 2 else None


def phases(replay: Replay) -> tuple[tuple[int, str], ...]:
    """The phases: (first round, counted from 1, and name) each; none if they are not apart.

    First all messages are combined, then none, and in between each chunk is complete at one rank.
    If that is one for all chunks, or the root of its tree, they are a reduce and a broadcast; else
    a reduce_scatter and an all_gather.
    """
    size = replay.program.size
    kinds = [{message.combines for message in each.messages} for each in replay.rounds]
    first = next((i for i, kind in enumerate(kinds) if kind != {True}), len(kinds))
    if not 0 < first < len(kinds) or any(kind != {False} for kind in kinds[first:]):
        return ()
    having = [
        [rank for rank, held in enumerate(holds) if len(held.get(chunk, ())) == size]
        for holds in [replay.rounds[first - 1].holds]
        for chunk in range(replay.program.chunks)
    ]
    if any(len(ranks) != 1 for ranks in having):
        return ()
    collective = replay.program.algorithm.collective
    if having.count(having[0]) == len(having):
        names = ("reduce", "scatter" if collective == "reduce_scatter" else "broadcast")
    elif isinstance(shape(replay), list):
        names = ("reduce", "broadcast")
    elif collective in ("all_reduce", "reduce"):
        names = ("reduce_scatter", "gather" if collective == "reduce" else "all_gather")
    else:
        return ()
    return (1, names[0]), (first + 1, names[1])


Use = tuple[tuple[int, int], "_Sent"]
"""(sender, receiver), and what was sent."""


class _Sent(NamedTuple):
    chunks: tuple[int, ...]
    combines: bool


def _uses(replay: Replay) -> list[Use]:
    """All messages in the order of rounds."""
    return [
        ((message.sender, message.receiver), _Sent(message.chunks, message.combines))
        for each in replay.rounds
        for message in each.messages
    ]


def _ring(pairs: set[tuple[int, int]], size: int) -> Ring | None:
    following = dict(pairs)
    if size < 3 or len(pairs) != size or len(following) != size:
        return None
    ranks = [0]
    while (after := following[ranks[-1]]) != 0:
        if after in ranks:
            return None
        ranks.append(after)
    return Ring(tuple(ranks)) if len(ranks) == size else None


def _tree(replay: Replay, uses: list[Use], chunk: int | None = None) -> Tree | None:
    """The tree that these messages make, if each line of it leads up or down."""
    parents: dict[int, int] = {}
    seen: set[frozenset[int]] = set()
    both = {pair for pair, _ in uses}
    gathers = replay.program.algorithm.collective == "gather"
    for (sender, receiver), sent in uses:
        line = frozenset((sender, receiver))
        if line in seen:
            continue
        seen.add(line)
        # What goes both ways goes up first.
        up = sent.combines or gathers or (receiver, sender) in both
        child, parent = (sender, receiver) if up else (receiver, sender)
        if child in parents:
            return None
        parents[child] = parent
    size = replay.program.size
    roots = [rank for rank in range(size) if rank not in parents]
    if len(parents) != size - 1 or len(roots) != 1:
        return None
    tree = Tree(parents, roots[0], () if chunk is None else (chunk,))
    try:
        levels = [level for _, level in tree.places().values()]
    except RecursionError:  # a circle, or a chain of a thousand ranks
        return None
    # A chain is drawn well enough by the columns of ranks.
    return tree if len(levels) == size and max(levels) < size - 1 else None
