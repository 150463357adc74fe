"""Two levels: what crosses between hosts does so once, split over all ranks of a host.

Between ranks of a host a message is a copy in memory, between hosts it goes through the network.
So values are combined inside the host before they leave it, and spread inside it after they have
come. A single leader a host would do all of its host's traffic, with one core and one connection,
while the others wait. Here every rank leads a part of the value. Two hosts of four ranks:

    host 0      0       1       2       3         columns: the l-th ranks of all hosts, who
               part 0  part 1  part 2  part 3     exchange part l
                │       │       │       │
    host 1      4       5       6       7         rows: the ranks of a host

Inside a row everyone exchanges with everyone: as many bytes as around a ring, in one step, and a
step between processes costs a wake-up. Columns follow the numbers of the hosts, which are neighbors
in the network if they are neighbors in the list of hosts. Levels overlap by segments: the core
runs the schedule on several at a time.

Any placement will do. There are as many parts as the smallest host has ranks. A larger host
stands in several rows of that length, the last perhaps shorter: a row exchanges, and part l goes
along the chain of those who lead it in their rows. Here rank 4, alone in its row, leads both parts:

    host 0   0 ─── 1     two parts, so rows of two: 0 and 1 lead to the other hosts,
             │     │     part 0 goes from 4 to 2 to 0, part 1 from 4 to 3 to 1
             2 ─── 3
             └─ 4 ─┘                         host 1   5 ─── 6

The value is cut into P chunks, of which each part has a run, so that there are chunks enough to
cut a part again into as many pieces as there are hosts. Reductions are the mirror image in time of
what they undo (see `_mirrored`), which has the same cost. In docstrings: H hosts, n ranks on each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from pycoll.schedule import Chunks, Recv, Send, Step, recv_reduce
from pycoll.schedules import binomial, dissemination, double_tree, ring, trees
from pycoll.schedules.costs import Cost
from pycoll.schedules.relabel import relabel


def broadcast(rank: int, size: int, root: int, hosts: Sequence[int]) -> Iterator[Step]:
    """Scatter the parts in the root's host, pass them from host to host, spread them in each.

    The root leads part 0 in its host. Between hosts each part goes through a double tree, half of
    it in each. Every byte enters each other host once.

        root 0     0 ──> 1, 2, 3
        columns    0 ──> 4    1 ──> 5    2 ──> 6    3 ──> 7
        rows       0 1 2 3 exchange, of which 0 only sends, and so do 4 5 6 7

    Cost: steps ceil(lg (H - 1)) + 3; bytes S in at each rank; out at the root 2 (n - 1) / n S to
    its host and S / n to others. With one host or one rank on each those levels fall away.
    Source: Graham et al., Cheetah: A framework for scalable hierarchical collective operations,
    2011; Open MPI, ompi/mca/coll/han (levels that overlap by segments).
    """
    members = _members(hosts, first=root)
    here, start = _host_of(rank, members), _host_of(root, members)
    parts = _parts(size, members)
    mates = members[here]
    place = mates.index(rank)
    if rank == root:
        for leader, part in zip(mates[1:], parts[1:], strict=False):
            yield Send(leader, part)
    elif here == start and place < len(parts):
        yield Recv(root, parts[place])
    if place < len(parts):
        column = [ranks[place] for ranks in members]
        halves = double_tree.broadcast(here, len(members), start)
        yield from relabel(halves, column, _cut(parts[place], 2))
    yield from _spread(rank, mates, parts, root)


def reduce(rank: int, size: int, root: int, hosts: Sequence[int]) -> Iterator[Step]:
    """Combine each part inside the hosts, then between them to the root's host, then at the root.

    Cost: as `broadcast`, in and out exchanged.
    Source: the mirror image of `broadcast`.
    """
    return _mirrored(broadcast(rank, size, root, hosts))


def all_reduce(rank: int, size: int, hosts: Sequence[int]) -> Iterator[Step]:
    """Combine part l at the l-th rank of each host, around the ring of those ranks, then spread it.

        rows       part l of a host's values at its rank l, combined
        columns    part l in a ring over the hosts: a piece for each, combined, then all around
        rows       part l from rank l to the others

    A ring and no tree between hosts: it moves the fewest bytes, and only between neighbors.
    Cost: steps 2 H; bytes 2 (P - 1) / P S a rank, out of each host 2 (H - 1) / H S.
    Source: Bayatpour et al., Scalable reduction collectives with data partitioning-based
    multi-leader design, 2017; Open MPI, ompi/mca/coll/han.
    """
    members = _members(hosts)
    here = _host_of(rank, members)
    parts = _parts(size, members)
    mates = members[here]
    place = mates.index(rank)
    yield from _mirrored(_spread(rank, mates, parts))
    if place < len(parts):
        column = [ranks[place] for ranks in members]
        pieces = _cut(parts[place], len(members))
        yield from relabel(ring.all_reduce(here, len(members)), column, pieces)
    yield from _spread(rank, mates, parts)


def all_gather(rank: int, size: int, hosts: Sequence[int]) -> Iterator[Step]:
    """Pass each block around the hosts, to one rank of each, then exchange inside the hosts.

        columns    0 <──> 4    1 <──> 5    2 <──> 6    3 <──> 7
        rows       0 has blocks 0 and 4 for 1, 2 and 3, who have 1 and 5, 2 and 6, 3 and 7

    The block at position q, counted host by host, is carried by rank q mod n of another host, so
    that on uneven hosts, too, all ranks carry about as many.

    Cost: steps H; bytes (P - 1) / P S a rank, S all blocks together; each block enters each other
    host once.
    Source: Kandalla et al., Designing multi-leader-based allgather algorithms for multi-core
    clusters, 2009.
    """
    members = _members(hosts)
    here, count = _host_of(rank, members), len(members)
    left, right = (here - 1) % count, (here + 1) % count
    carriers, before, after = (_carriers(members, host) for host in (here, left, right))
    for i in range(1, count):
        for block in members[(here - i + 1) % count]:
            if carriers[block] == rank:
                yield Send(after[block], block)
        for block in members[(here - i) % count]:
            if carriers[block] == rank:
                yield Recv(before[block], block)
    mates = members[here]
    columns = [[_column(mate, carriers)] for mate in mates]
    yield from _exchange(mates.index(rank), mates, columns)


def reduce_scatter(rank: int, size: int, hosts: Sequence[int]) -> Iterator[Step]:
    """Combine each chunk inside the hosts, then on its way around the hosts to its rank.

    Cost: steps H; bytes (P - 1) / P S a rank; each chunk leaves each other host once.
    Source: the mirror image of `all_gather`.
    """
    return _mirrored(all_gather(rank, size, hosts))


def barrier(rank: int, size: int, hosts: Sequence[int]) -> Iterator[Step]:
    """Hear from the ranks of the host, then the first rank from the other hosts, and tell them.

    Cost: steps 2 floor(lg n) + ceil(lg H); bytes 0.
    Source: Open MPI, ompi/mca/coll/han/coll_han_barrier.c; inside a tree, between hosts
    dissemination.
    """
    members = _members(hosts)
    here = _host_of(rank, members)
    mates = members[here]
    place = mates.index(rank)
    yield from relabel(binomial.reduce(place, len(mates), 0), mates, [0])
    if place == 0:
        leaders = [ranks[0] for ranks in members]
        yield from relabel(dissemination.barrier(here, len(members)), leaders, [0])
    yield from relabel(binomial.broadcast(place, len(mates), 0), mates, [0])


def _members(hosts: Sequence[int], first: int | None = None) -> list[list[int]]:
    """List the ranks of each host, by number of host and rank; `first` before its neighbors."""
    members: dict[int, list[int]] = {host: [] for host in sorted(set(hosts))}
    for rank, host in enumerate(hosts):
        members[host].append(rank)
    if first is not None:
        mates = members[hosts[first]]
        place = mates.index(first)
        mates[:] = mates[place:] + mates[:place]
    return list(members.values())


def _host_of(rank: int, members: Sequence[Sequence[int]]) -> int:
    return next(host for host, ranks in enumerate(members) if rank in ranks)


def _cut(chunks: range, count: int) -> list[range]:
    """Cut a run of chunks into `count` runs of nearly equal length."""
    ends = [len(chunks) * i // count for i in range(count + 1)]
    return [chunks[ends[i] : ends[i + 1]] for i in range(count)]


def _parts(size: int, members: Sequence[Sequence[int]]) -> list[range]:
    """The part of each leader: as many as every host has ranks to lead."""
    return _cut(range(size), min(len(ranks) for ranks in members))


def _spread(
    rank: int, mates: Sequence[int], parts: Sequence[range], root: int | None = None
) -> Iterator[Step]:
    """Give all ranks of a host all parts, of which the l-th rank has part l; `root` has all."""
    width = len(parts)
    row, place = divmod(mates.index(rank), width)
    rows = [mates[first : first + width] for first in range(0, len(mates), width)]
    mine = rows[row]
    leads = [parts[i :: len(mine)] for i in range(len(mine))]
    for part in range(place, width, len(mine)):
        if row > 0:
            yield Recv(rows[row - 1][part], parts[part])
        if row + 1 < len(rows):
            below = rows[row + 1]
            yield Send(below[part % len(below)], parts[part])
    yield from _exchange(place, mine, leads, root)


def _exchange(
    place: int,
    ranks: Sequence[int],
    pieces: Sequence[Iterable[Chunks]],
    root: int | None = None,
) -> Iterator[Step]:
    """Send my pieces to each of these ranks and receive theirs; `root` has all and gets none."""
    for i in range(1, len(ranks)):
        dest, source = (place + i) % len(ranks), (place - i) % len(ranks)
        if ranks[dest] != root:
            for piece in pieces[place]:
                yield Send(ranks[dest], piece)
        if ranks[place] != root:
            for piece in pieces[source]:
                yield Recv(ranks[source], piece)


def _carriers(members: Sequence[Sequence[int]], host: int) -> dict[int, int]:
    """By block: the rank of this host that passes it on; at home its owner."""
    order = [rank for ranks in members for rank in ranks]
    ranks = members[host]
    carriers = {block: ranks[place % len(ranks)] for place, block in enumerate(order)}
    return carriers | {rank: rank for rank in ranks}


def _column(rank: int, carriers: dict[int, int]) -> tuple[int, ...]:
    """The blocks that a rank has for the others of its host."""
    return tuple(block for block, carrier in carriers.items() if carrier == rank)


def _mirrored(steps: Iterable[Step]) -> Iterator[Step]:
    """Run a distribution backwards: whoever received a chunk sends its own, to be combined.

    If each rank gets each chunk once, on whatever way from where it was, then backwards each
    rank's contribution goes that way back once.
    """
    for step in reversed(list(steps)):
        match step:
            case Send(peer, chunks):
                yield from recv_reduce(peer, chunks)
            case Recv(peer, chunks):
                yield Send(peer, chunks)


# What it takes, exactly and for every placement. A mirror image takes the same.


def broadcast_cost(size: int, hosts: Sequence[int], root: int = 0) -> Cost:
    """Cost of broadcast and reduce: a part goes to its leader, through the trees, and in."""
    members = _members(hosts, first=root)
    count, start = len(members), _host_of(root, members)
    parts = _parts(size, members)
    weights = [len(part) for part in parts]
    steps = path = load = 0
    for host, mates in enumerate(members):
        branches = _branches((host - start) % count, count)
        inside = _depth(len(mates), len(parts))
        for leader, part in enumerate(parts):
            # Beside the root, which needs nothing, the leader in a row of two has nobody to tell.
            idle = host == start and leader > 0 and len(mates) == 2
            ends = min(leader, 1) + (0 if idle else inside)
            for half, (hops, _) in zip(_cut(part, 2), branches, strict=True):
                steps = max(steps, ends + hops)
                path = max(path, ends * len(part) + hops * len(half))
        for place, rank in enumerate(mates):
            sent = _sent(place, len(mates), weights, beside_root=host == start and rank != root)
            if place < len(parts):
                halves = zip(_cut(parts[place], 2), branches, strict=True)
                sent += sum(len(half) * children for half, (_, children) in halves)
            if rank == root:
                sent += size - weights[0]
            load = max(load, sent, size if rank != root else 0)
    messages = len(parts) * (size + count - 2)
    return Cost(steps, path, messages, size * (size - 1), load)


def all_reduce_cost(size: int, hosts: Sequence[int]) -> Cost:
    """Cost of all_reduce: a piece of a part goes from any host to its own and on to any."""
    members = _members(hosts)
    count = len(members)
    parts = _parts(size, members)
    weights = [len(part) for part in parts]
    depths = [_depth(len(mates), len(parts)) for mates in members]
    ways: dict[tuple[int, int], list[int]] = {}

    def there_and_back(home: int, part: int, piece: int) -> int:
        if (part, piece) not in ways:
            there = _farthest(depths, part, piece)
            back = reversed(_farthest(depths[::-1], part, piece))
            ways[part, piece] = [sum(both) for both in zip(there, back, strict=True)]
        return ways[part, piece][home]

    path = load = 0
    for leader, part in enumerate(parts):
        pieces = [len(piece) for piece in _cut(part, count)]
        for host, mates in enumerate(members):
            path = max(path, there_and_back(host, len(part), pieces[host]))
            beside = min(pieces[host - 1], pieces[(host + 1) % count])
            around = 2 * len(part) - pieces[host] - beside
            inside = size - len(part) + _sent(leader, len(mates), weights)
            load = max(load, inside + around)
    for mates in members:
        for place in range(len(parts), len(mates)):
            load = max(load, size + _sent(place, len(mates), weights))
    steps = max(there_and_back(host, 1, 1) for host in range(count))
    messages = 2 * len(parts) * (size - count + count * (count - 1))
    return Cost(steps, path, messages, 2 * size * (size - 1), load)


def all_gather_cost(size: int, hosts: Sequence[int]) -> Cost:
    """Cost of all_gather and reduce_scatter: a block goes around the hosts, then inside."""
    members = _members(hosts)
    count = len(members)
    host_of = {rank: host for host, ranks in enumerate(members) for rank in ranks}
    steps = path = load = 0
    alike = len({len(mates) for mates in members}) == 1
    for here, mates in enumerate(members[:1] if alike else members):
        hops: dict[int, list[int]] = {rank: [] for rank in mates}
        for block, rank in _carriers(members, here).items():
            hops[rank].append((here - host_of[block]) % count)
        shared = len(mates) > 1
        for column in hops.values():
            steps = max(steps, max(column) + shared)
            path = max(path, max(column) + shared * len(column))
            passed_on = sum(hop < count - 1 for hop in column)
            load = max(load, passed_on + (len(mates) - 1) * len(column))
    messages = size * (count - 1) + sum(len(mates) * (len(mates) - 1) for mates in members)
    return Cost(steps, path, messages, size * (size - 1), max(load, size - 1))


def barrier_cost(size: int, hosts: Sequence[int]) -> Cost:
    """Cost of barrier: the deepest host's tree up, the rounds between hosts, and down again."""
    members = _members(hosts)
    count, most = len(members), max(len(mates) for mates in members)
    rounds = (count - 1).bit_length()
    steps = 2 * (most.bit_length() - 1) + rounds
    messages = 2 * (size - count) + count * rounds
    return Cost(steps, steps, messages, messages, (most - 1).bit_length() + rounds)


def _branches(place: int, count: int) -> list[tuple[int, int]]:
    """Of each tree: messages from the root to the host at this place, and how many it sends to."""
    if place == 0:
        return [(0, min(1, count - 1))] * 2
    branches = []
    for tree, node in enumerate(trees.double_tree(place - 1, count - 1)):
        hops, parent = 1, node.parent
        while parent is not None:
            hops, parent = hops + 1, trees.double_tree(parent, count - 1)[tree].parent
        branches.append((hops, len(node.children)))
    return branches


def _depth(count: int, width: int) -> int:
    """Messages until all `count` ranks of a host have a part: along the rows, then in a row."""
    rows = -(-count // width)
    return rows - 1 + (count - (rows - 1) * width > 1)


def _farthest(depths: Sequence[int], part: int, piece: int) -> list[int]:
    """By host: the heaviest way there, a part inside any host and then a piece around the ring."""
    count = len(depths)
    starts = [depth * part - host * piece for host, depth in enumerate(depths)]
    before = list(accumulate(starts, max))
    # From the hosts after this one the way leads once past the end.
    after = [*accumulate(reversed(starts[1:]), max)][::-1]
    ways = [before[host] + host * piece for host in range(count)]
    beyond = [start + (host + count) * piece for host, start in enumerate(after)]
    return [max(pair) for pair in zip(ways, [*beyond, 0], strict=True)]


def _sent(place: int, count: int, weights: Sequence[int], beside_root: bool = False) -> int:
    """Chunks that a rank sends in `_spread`; `beside_root`: the first of its host needs nothing."""
    row, column = divmod(place, len(weights))
    length = min(len(weights), count - row * len(weights))
    others = length - 1 - (beside_root and row == 0)
    below = count > (row + 1) * len(weights)
    return sum(weights[column::length]) * (others + below)
