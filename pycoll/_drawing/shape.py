"""The shape of an algorithm, which a picture shows beside its rounds: trees, a ring, and phases.

All is found in the messages, so it holds for a user's own algorithm, too.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from pycoll._drawing.rounds import Delivery, Replay


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

    def places(self) -> dict[int, tuple[float, int]]:
        """Where each rank is drawn: across, in widths of a leaf, and its level from the top."""
        found: dict[int, tuple[float, int]] = {}
        children: dict[int, list[int]] = defaultdict(list)
        for child in sorted(self.parents):
            children[self.parents[child]].append(child)
        leaves = 0

        def place(rank: int, level: int) -> float:
            nonlocal leaves
            below = [place(child, level + 1) for child in children[rank]]
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
    sent = [message for each in replay.rounds for message in each]
    ring = _ring({(message.sender, message.receiver) for message in sent}, replay.program.size)
    if ring is not None or replay.program.size < 3:
        return ring
    whole = _tree(replay, sent)
    if whole is not None:
        return [whole]
    trees: list[Tree] = []
    for chunk in range(replay.program.chunks):
        tree = _tree(replay, [message for message in sent if chunk in message.chunks], chunk)
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
    kinds = [{message.combines for message in each} for each in replay.rounds]
    first = next((i for i, kind in enumerate(kinds) if kind != {True}), len(kinds))
    if not 0 < first < len(kinds) or any(kind != {False} for kind in kinds[first:]):
        return ()
    having = [
        [rank for rank, held in enumerate(replay.states[first]) if len(held.get(chunk, ())) == size]
        for chunk in range(replay.program.chunks)
    ]
    if any(len(ranks) != 1 for ranks in having):
        return ()
    collective = replay.collective
    if having.count(having[0]) == len(having):
        names = ("reduce", "scatter" if collective == "reduce_scatter" else "broadcast")
    elif isinstance(shape(replay), list):
        names = ("reduce", "broadcast")
    elif collective in ("all_reduce", "reduce"):
        names = ("reduce_scatter", "gather" if collective == "reduce" else "all_gather")
    else:
        return ()
    return (1, names[0]), (first + 1, names[1])


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


def _tree(replay: Replay, sent: list[Delivery], chunk: int | None = None) -> Tree | None:
    """The tree that these messages make, if each line of it leads up or down."""
    parents: dict[int, int] = {}
    pairs = {(message.sender, message.receiver) for message in sent}
    for message in sent:
        sender, receiver = message.sender, message.receiver
        # What goes both ways goes up first; what goes one way goes up to be combined or gathered.
        up = message.combines or replay.collective == "gather" or (receiver, sender) in pairs
        child, parent = (sender, receiver) if up else (receiver, sender)
        if parents.get(parent) == child:
            continue  # down again
        if parents.setdefault(child, parent) != parent:
            return None
    size = replay.program.size
    roots = [rank for rank in range(size) if rank not in parents]
    if len(parents) != size - 1 or len(roots) != 1:
        return None
    if len(set(parents.values())) == len(parents):
        return None  # a chain is drawn well enough by the columns of ranks
    tree = Tree(parents, roots[0], () if chunk is None else (chunk,))
    return tree if len(tree.places()) == size else None
