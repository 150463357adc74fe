"""ZeRO's optimizer: the steps and the state of one that is not sharded."""

from __future__ import annotations

from typing import Any

import pytest
from tiers import sizes

torch = pytest.importorskip("torch")

from pycoll.parallel.zero import ShardedOptimizer  # noqa: E402

pytestmark = pytest.mark.parallel

Comm = Any
SHAPES = [[(3, 4), (5,)], [(1,)], [(2, 3, 2), (1, 1), (7,)]]  # of groups of parameters


def adam(tensors: Any) -> Any:
    return torch.optim.Adam(tensors, lr=0.1)


def draw(seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return [
        [torch.randn(s, generator=generator, dtype=torch.float64) for s in group]
        for group in SHAPES
    ]


def gradients_into(groups: Any, step: int, rank: int) -> None:
    """Add to each gradient what that rank finds in that step."""
    for group, drawn in zip(groups, draw(1000 * step + rank), strict=True):
        for parameter, gradient in zip(group, drawn, strict=True):
            parameter.grad += gradient


def alone(steps: int, size: int) -> Any:
    """The parameters and the optimizer after training on one rank with all ranks' gradients."""
    groups = draw(0)
    optimizer = adam([p for group in groups for p in group])
    for step in range(steps):
        for group in groups:
            for parameter in group:
                parameter.grad = torch.zeros_like(parameter)
        for rank in range(size):
            gradients_into(groups, step, rank)
        optimizer.step()
    return groups, optimizer


def check(groups: Any, expected: Any) -> None:
    torch.testing.assert_close(groups, expected, rtol=1e-12, atol=1e-12)


@sizes(1, 2, 3)
@pytest.mark.parametrize("sharded", [False, True])
def test_sharded_steps_are_those_of_one_rank(ranks: Any, sharded: bool) -> None:
    def program(comm: Comm, sharded: bool) -> None:
        groups = draw(0)
        optimizer = ShardedOptimizer(groups, comm, adam, sharded=sharded)
        for step in range(4):
            optimizer.zero_grad()
            gradients_into(groups, step, comm.rank)
            if step % 2:
                optimizer.reduce(2)  # early: behind the rest of the backward pass
            optimizer.step()
            for group in range(len(groups)):
                optimizer.ready(group)
        expected, of_one = alone(4, comm.size)
        check(groups, expected)
        states = optimizer.whole_state()
        for group, state in zip(expected, states, strict=True):
            check(state, [of_one.state[parameter] for parameter in group])
        held = sum(v.numel() for s in optimizer.optimizer.state.values() for v in s.values())
        shares = comm.size if sharded else 1
        # Two numbers for each parameter; a group's array is filled up to a multiple of the shares,
        # and has its own count of steps.
        per_rank = sum(-(-sum(p.numel() for p in group) // shares) for group in groups)
        assert held == 2 * per_rank + len(groups)

    ranks(program, sharded)


@sizes(2, 3)
@pytest.mark.parametrize("sharded", [False, True])
def test_a_step_sends_the_bytes_of_an_all_reduce(ranks: Any, sharded: bool) -> None:
    """ZeRO, too: 2 (N - 1) / N of the parameters, which are 60 here, by each rank."""

    def program(comm: Comm, sharded: bool) -> None:
        groups = [[torch.zeros(6, 4)], [torch.zeros(6), torch.zeros(30)]]
        optimizer = ShardedOptimizer(groups, comm, adam, sharded=sharded)
        before = comm.counters().sent_bytes.sum()
        optimizer.step()
        optimizer.ready()
        sent = comm.counters().sent_bytes.sum() - before
        assert comm.all_reduce(sent) == 2 * (comm.size - 1) * 60 * 4

    ranks(program, sharded)


@sizes(3)
def test_a_state_goes_on_with_another_number_of_ranks(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        def train(group: Comm, groups: Any, steps: range, state: Any = None) -> Any:
            optimizer = ShardedOptimizer(groups, group, adam)
            if state:
                optimizer.load_whole_state(state)
            for step in steps:
                optimizer.zero_grad()
                for rank in range(group.rank, 6, group.size):
                    gradients_into(groups, step, rank)
                optimizer.step()
                optimizer.ready()
            return optimizer.whole_state()

        groups = draw(0)
        state = train(comm, groups, range(2))
        copies = [[p.clone() for p in group] for group in groups]
        pair = comm.split(0 if comm.rank < 2 else 1)
        train(pair, copies, range(2, 4), state)
        check(copies, alone(4, 6)[0])

    ranks(program)
