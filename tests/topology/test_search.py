"""Rings and trees over hosts, against all that there are; and how far from the best they can be."""

from __future__ import annotations

import itertools
import random
import time
from typing import Any

import numpy as np
import pytest
from tiers import smoke

from pycoll._topology.search import best_ring, best_tree

Rows = list[list[int]]


def draw(seed: int, count: int, most: int) -> tuple[Rows, Rows]:
    """Links of all kinds; few different values, so that many rings are alike in something."""
    rng = random.Random(seed)
    return tuple(  # type: ignore[return-value]
        [[rng.randrange(1, most + 1) for _ in range(count)] for _ in range(count)] for _ in range(2)
    )


def every_ring(width: Rows, latency: Rows) -> tuple[int, int, tuple[int, ...]]:
    """The best, as (minus its width, latency, order), of all."""
    found = []
    for rest in itertools.permutations(range(1, len(width))):
        order = (0, *rest)
        links = list(zip(order, (*rest, 0), strict=True))
        found.append(
            (-min(width[a][b] for a, b in links), sum(latency[a][b] for a, b in links), order)
        )
    return min(found)


@smoke
@pytest.mark.parametrize("most", [2, 6, 10**9])
@pytest.mark.parametrize("count", range(2, 9))
def test_a_ring_is_the_best_of_all_there_are(count: int, most: int) -> None:
    for seed in range(3 if count == 8 else 20):
        width, latency = draw(seed, count, most)
        wide, late, order = every_ring(width, latency)
        assert best_ring(width, latency) == (order, -wide, late, -wide)


def every_tree(count: int) -> Any:
    """All trees, by Pruefer's sequences: (tree, link, 2) hosts, the lower first."""
    sequences = np.array(list(itertools.product(range(count), repeat=count - 2)), int)
    rows = np.arange(len(sequences))
    degree = 1 + (sequences[:, :, None] == np.arange(count)).sum(axis=1)
    links = []
    for column in sequences.T:
        leaf = (degree == 1).argmax(axis=1)
        links.append(np.stack([leaf, column], 1))
        degree[rows, leaf] -= 1
        degree[rows, column] -= 1
    links.append(np.argsort(degree, axis=1, kind="stable")[:, -2:])
    return np.sort(np.stack(links, 1), axis=2)


@pytest.mark.parametrize("count", range(2, 9))
def test_a_tree_is_the_best_of_all_there_are(count: int) -> None:
    trees = every_tree(count)
    assert len({tree.tobytes() for tree in trees}) == max(1, count ** (count - 2))
    for seed, most in itertools.product(range(2 if count == 8 else 10), (2, 6, 10**9)):
        width, latency = map(np.array, draw(seed, count, most))
        a, b = trees[..., 0], trees[..., 1]
        narrowest = np.minimum(width[a, b], width[b, a]).min(axis=1)
        late = (latency[a, b] + latency[b, a]).sum(axis=1)
        able = narrowest == narrowest.max()
        able &= late == late[able].min()

        def quickest_first(tree: Any, latency: Any = latency) -> list[Any]:
            return sorted((int(latency[a, b] + latency[b, a]), int(a), int(b)) for a, b in tree)

        links = min(map(quickest_first, trees[able]))
        found = best_tree(width.tolist(), latency.tolist())
        assert found.links == tuple(sorted((a, b) for _, a, b in links))
        assert (found.width, found.latency) == (narrowest.max(), late[able].min())


def racks(count: int) -> Rows:
    """Racks of 8 hosts, of which a host reaches its counterpart in the racks beside it quickly."""

    def wide(a: int, b: int) -> int:
        if a // 8 == b // 8:
            return 1000
        return 500 if abs(a // 8 - b // 8) == 1 and a % 8 == b % 8 else 10

    return [[wide(a, b) for b in range(count)] for a in range(count)]


def circle(count: int) -> Rows:
    """Hosts whose links are wide to two neighbors each, whose numbers tell nothing."""
    order = random.Random(count).sample(range(count), count)
    place = {host: place for place, host in enumerate(order)}
    return [
        [1000 if (place[a] - place[b]) % count in (1, count - 1) else 10 for b in range(count)]
        for a in range(count)
    ]


@pytest.mark.parametrize(("make", "width"), [(racks, 500), (circle, 1000)])
def test_of_64_hosts_the_widest_ring_of_usual_networks_is_found(make: Any, width: int) -> None:
    ring = best_ring(make(64), [[1] * 64] * 64)
    assert sorted(ring.order) == list(range(64))
    assert (ring.width, ring.bound, ring.latency) == (width, width, 64)


def test_of_64_hosts_a_ring_is_found_in_bounded_time_and_says_what_it_may_miss() -> None:
    width, latency = draw(64, 64, 10**9)
    began = time.process_time()
    ring = best_ring(width, latency)
    assert time.process_time() - began < 20  # 0.6 s on a machine of 2025
    links = list(zip(ring.order, (*ring.order[1:], 0), strict=True))
    assert sorted(ring.order) == list(range(64))
    assert ring.width == min(width[a][b] for a, b in links)
    assert ring.latency == sum(latency[a][b] for a, b in links)
    assert 0.9 * ring.bound < ring.width <= ring.bound
    assert best_ring(width, latency) == ring


def test_a_search_that_is_not_exact_loses_little() -> None:
    for seed in range(10):
        width, latency = draw(seed, 9, 10**6)
        exact = best_ring(width, latency)
        found = best_ring(width, latency, exact=3)
        assert found.width == exact.width <= found.bound
        assert exact.latency <= found.latency <= 2 * exact.latency


def test_one_host_is_a_ring_and_a_tree() -> None:
    assert best_ring([[0]], [[0]]).order == (0,)
    assert best_tree([[0]], [[0]]).links == ()
