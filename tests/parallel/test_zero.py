"""ZeRO's optimizer: in every stage the steps and the state of one that is not sharded."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from patience import PATIENCE
from tiers import sizes

torch = pytest.importorskip("torch")
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402

import pycoll  # noqa: E402
from pycoll.parallel.zero import ShardedOptimizer  # noqa: E402

pytestmark = pytest.mark.parallel

Comm = Any
WIDTHS = [3, 5, 1, 4]  # of layers, which are the groups
SHARDED_BY = [0, 1, 2, 3]


def adam(tensors: Any) -> Any:
    return torch.optim.Adam(tensors, lr=0.1)


def draw(seed: int, *shape: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def network() -> list[list[Any]]:
    """A weight, a bias and a number for each layer."""
    shapes = [[(b, a), (b,), ()] for a, b in pairwise(WIDTHS)]
    return [
        [draw(10 * i + j, *shape).requires_grad_() for j, shape in enumerate(group)]
        for i, group in enumerate(shapes)
    ]


def layer(x: Any, weight: Any, bias: Any, scale: Any) -> Any:
    return (x @ weight.T + bias).tanh() * scale


def batch(step: int, rank: int, number: int = 0) -> Any:
    return draw(10000 * number + 100 * step + rank, 2, WIDTHS[0])


def step(optimizer: Any, groups: Any, batches: Any) -> None:
    """One step, a backward pass for each batch."""
    for x in batches:
        for number, group in enumerate(groups):
            x = optimizer.run(number, layer, x, *group)
        x.sin().sum().backward()
    optimizer.step()


def alone(steps: Any, ranks: Any, backwards: int = 1) -> Any:
    """The parameters and the optimizer after training on one rank with all ranks' batches."""
    groups = network()
    optimizer = adam([p for group in groups for p in group])
    for i in steps:
        optimizer.zero_grad()
        for rank in ranks:
            for number in range(backwards):
                x = batch(i, rank, number)
                for group in groups:
                    x = layer(x, *group)
                x.sin().sum().backward()
        optimizer.step()
    return groups, optimizer


def check(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)


def check_state(optimizer: Any, groups: Any, of_one: Any) -> None:
    for state, group in zip(optimizer.whole_state(), groups, strict=True):
        check(state["value"], [p.detach() for p in group])
        for name in ("exp_avg", "exp_avg_sq"):
            check(state[name], [of_one.state[p][name] for p in group])
        assert state["step"] == of_one.state[group[0]]["step"]


@sizes(1, 2, 3)
@pytest.mark.parametrize("stage", SHARDED_BY)
@pytest.mark.parametrize("backwards", [1, 3])
def test_steps_are_those_of_one_rank(ranks: Any, stage: int, backwards: int) -> None:
    def program(comm: Comm, stage: int, backwards: int) -> None:
        groups = network()
        optimizer = ShardedOptimizer(groups, comm, adam, stage=stage, backwards=backwards)
        for i in range(4):
            step(optimizer, groups, [batch(i, comm.rank, n) for n in range(backwards)])
        optimizer.ready()
        expected, of_one = alone(range(4), range(comm.size), backwards)
        if stage < 3:
            check(groups, expected)
        check_state(optimizer, expected, of_one)

    ranks(program, stage, backwards)


@sizes(2, 3)
def test_what_a_stage_cuts_is_not_held(ranks: Any) -> None:
    """Parameters only while a layer computes, though autograd needs them for its backward."""

    def program(comm: Comm, stage: int) -> None:
        groups, held = network(), []
        optimizer = ShardedOptimizer(groups, comm, adam, stage=stage)

        def watched(x: Any, *group: Any) -> Any:
            held.append(StorageWeakRef(group[0].untyped_storage()))
            return layer(x, *group)

        x = batch(0, comm.rank)
        for number, group in enumerate(groups):
            x = optimizer.run(number, watched, x, *group)
            assert [ref.expired() for ref in held] == [stage == 3] * len(held)
        x.sum().backward()
        # Those of the first layer are being summed.
        assert [group[0].grad is not None for group in groups] == [True, stage < 2, stage < 2]
        optimizer.step()
        shards = optimizer.optimizer.param_groups[0]["params"]
        parts = comm.size if stage else 1
        counts = [sum(p.numel() for p in group) for group in groups]
        assert [shard.numel() for shard in shards] == [-(-count // parts) for count in counts]

    for stage in SHARDED_BY:
        ranks(program, stage)


class Counted:
    """A communicator that knows how many sums have begun."""

    def __init__(self, comm: Comm) -> None:
        self.comm, self.sums = comm, 0

    def __getattr__(self, name: str) -> Any:
        self.sums += name in ("iall_reduce", "ireduce_scatter")
        return getattr(self.comm, name)


@sizes(2)
def test_gradients_are_summed_while_the_backward_pass_goes_on(ranks: Any) -> None:
    def program(comm: Comm, stage: int) -> None:
        groups, counted, begun = network(), Counted(comm), []
        optimizer = ShardedOptimizer(groups, counted, adam, stage=stage)  # type: ignore[arg-type]
        x = batch(0, comm.rank)
        counted.sums = 0
        for number, group in enumerate(groups):
            x = optimizer.run(number, layer, x, *group)
            x.register_hook(lambda _: begun.append(counted.sums))
        x.sum().backward()
        assert begun == [0, 1, 2]  # when each layer's backward begins, the last layer's first

    for stage in SHARDED_BY:
        ranks(program, stage)


RING = {"PYCOLL_ALGORITHM": "all_reduce:ring;all_gather:ring;reduce_scatter:ring"}
in_rings = pytest.mark.parametrize(
    "ranks", [(2, (), RING), (3, (), RING)], ids=["2", "3"], indirect=True, scope="module"
)


@in_rings
def test_the_bytes_are_those_of_the_paper(ranks: Any) -> None:
    """2 Psi (N - 1) / N; 3 Psi with parameters; of each pass, where gradients are cut."""

    def program(comm: Comm, stage: int, backwards: int) -> None:
        size = comm.size
        groups = [[torch.ones(4 * size, dtype=torch.float64, requires_grad=True)] for _ in range(3)]
        optimizer = ShardedOptimizer(groups, comm, adam, stage=stage, backwards=backwards)
        sent = []
        for _ in range(3):
            for _ in range(backwards):
                x = torch.ones((), dtype=torch.float64)
                for number, group in enumerate(groups):
                    x = optimizer.run(number, lambda x, p: (x * p).sum(), x, *group)
                x.backward()
            optimizer.step()
            optimizer.ready()
            sent.append(int(comm.counters().sent_bytes.sum()))
        psi = 3 * 4 * size * 8
        times = {0: 2, 1: 2, 2: backwards + 1, 3: 3 * backwards}[stage]
        assert sent[2] - sent[1] == times * psi * (size - 1) // size

    for stage in SHARDED_BY:
        for backwards in (1, 2):
            ranks(program, stage, backwards)


@sizes(4)
@pytest.mark.parametrize(("before", "after"), [(0, 3), (1, 2), (3, 1)])
def test_another_stage_and_size_goes_on_with_the_state(ranks: Any, before: int, after: int) -> None:
    def program(comm: Comm, before: int, after: int) -> None:
        groups = network()
        optimizer = ShardedOptimizer(groups, comm, adam, stage=before)
        for i in range(2):
            step(optimizer, groups, [batch(i, comm.rank)])
        states = optimizer.whole_state()
        with comm.split(0 if comm.rank < 3 else 1) as few:
            groups = network()
            optimizer = ShardedOptimizer(groups, few, adam, stage=after)
            optimizer.load_whole_state(states)
            for i in (2, 3):
                step(
                    optimizer, groups, [batch(i, rank) for rank in range(few.rank, 4, few.size)][:1]
                )
            states = optimizer.whole_state()
        expected, of_one = alone(range(2), range(4))
        more = [p for group in expected for p in group]
        for i in (2, 3):
            of_one.zero_grad()
            for rank in range(few.size):
                x = batch(i, rank)
                for group in expected:
                    x = layer(x, *group)
                x.sin().sum().backward()
            of_one.step()
        check([p for state in states for p in state["value"]], [p.detach() for p in more])

    ranks(program, before, after)


@sizes(2)
def test_wrong_arguments_are_refused_at_the_callers_line(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        p, q = (torch.ones(3, requires_grad=True) for _ in range(2))
        cases: list[tuple[type[Exception], str, Any, dict[str, Any]]] = [
            (ValueError, "stage=4", [[p]], {"stage": 4}),
            (ValueError, "backwards=0", [[p]], {"backwards": 0}),
            (ValueError, "each parameter one group", [[p], [q, p]], {}),
            (ValueError, "each group has a parameter", [[p], []], {}),
            (TypeError, "require a gradient", [[torch.ones(3)]], {}),
            (TypeError, "require a gradient", [[p * 2.0]], {}),
            (TypeError, "require a gradient", [[1.0]], {}),
            (TypeError, "one dtype", [[p, q.detach().double().requires_grad_()]], {}),
        ]
        for kind, text, groups, options in cases:
            with pytest.raises(kind, match=text) as raised:
                ShardedOptimizer(groups, comm, adam, **options)
            assert raised.traceback[-1].path.name == "test_zero.py", text
        with pytest.raises(TypeError, match="comm is a communicator, not int"):
            ShardedOptimizer([[p]], 2, adam)  # type: ignore[arg-type]
        optimizer = ShardedOptimizer([[p], [q]], comm, adam)
        with pytest.raises(ValueError, match="there is no group 2 of 2") as raised:
            optimizer.run(2, layer)
        assert raised.traceback[-1].path.name == "test_zero.py"
        optimizer.run(0, torch.mul, p, 2.0).sum().backward()
        with pytest.raises(ValueError, match="group 1: a parameter has got no gradient") as raised:
            optimizer.step()
        with pytest.raises(ValueError, match=r"group 1 was not computed by run\(\)"):
            q.sum().backward()

    ranks(program)


@sizes(2)
def test_ranks_that_disagree_get_an_error(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        other = "the ranks have different stages, parameters, or values of them"
        for shape, value, stage in (
            (3 + comm.rank, 1.0, 1),
            (3, comm.rank, 1),
            (3, 1.0, comm.rank),
        ):
            p = torch.full((shape,), float(value), requires_grad=True)
            with pytest.raises(ValueError, match=other):
                ShardedOptimizer([[p]], comm, adam, stage=stage)
        groups = [[torch.ones(3, requires_grad=True)] for _ in range(2)]
        optimizer = ShardedOptimizer(groups, comm, adam)
        for number in (comm.rank, 1 - comm.rank):  # each rank another first
            optimizer.run(number, torch.mul, *groups[number], 2.0).sum().backward()
        with pytest.raises(ValueError, match="groups in different orders"):
            optimizer.step()

    ranks(program)


def test_a_killed_rank_fails_the_others() -> None:
    def program(comm: Comm, stage: int) -> None:
        import os
        import signal

        groups = network()
        optimizer = ShardedOptimizer(groups, comm, adam, stage=stage)
        step(optimizer, groups, [batch(0, comm.rank)])
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        for i in range(3):
            step(optimizer, groups, [batch(i, comm.rank)])

    with pytest.raises(pycoll.PeerFailed, match="SIGKILL") as raised:
        pycoll.run(program, 3, 3, timeout=50 * PATIENCE)
    assert raised.value.rank == 1
