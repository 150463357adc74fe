"""A pipeline computes what one process does, whatever the schedule, and never waits for nothing."""

from __future__ import annotations

import signal
import traceback
from typing import Any, NamedTuple

import numpy as np
import pytest

import pycoll
from pycoll.parallel import PIPELINE_SCHEDULES, Action, PipelineSchedule, run_pipeline

parallel = pytest.mark.parallel
on_four_ranks = pytest.mark.parametrize("ranks", [4], indirect=True, scope="module")


class Case(NamedTuple):
    """A network, and how it is run. Stage s maps widths[s] to widths[s + 1]."""

    seed: int
    name: str
    ranks: int
    micro_batches: int
    chunks: int
    ahead: int
    behind: int
    rows: tuple[int, ...]  # by micro-batch
    widths: tuple[int, ...]


def random_case(seed: int) -> Case:
    random = np.random.default_rng(seed)
    name = list(PIPELINE_SCHEDULES)[seed % len(PIPELINE_SCHEDULES)]
    p, m = int(random.integers(1, 5)), int(random.integers(1, 10))
    v = int(random.integers(1, 4)) if name == "interleaved" else 1
    if name == "interleaved":
        m = p * int(random.integers(1, 4))
    ahead, behind = (int(n) for n in random.integers(1, 4, 2))
    # The largest message has 240 KB: more than what is buffered.
    largest = int(random.choice([5, 5, 200]))
    rows = tuple(int(n) for n in random.integers(1, 1 + largest, m))
    widths = tuple(int(n) for n in random.integers(1, 1 + max(5, largest * 3 // 4), p * v + 1))
    return Case(seed, name, p, m, v, ahead, behind, rows, widths)


class Net:
    """All stages, y = tanh(x w); as the loss of a micro-batch the sum of cos(y)."""

    def __init__(self, case: Case) -> None:
        random = np.random.default_rng(case.seed)
        shapes = zip(case.widths, case.widths[1:], strict=False)
        self.weights = [random.normal(0.0, a**-0.5, (a, b)) for a, b in shapes]
        self.inputs = [random.normal(size=(rows, case.widths[0])) for rows in case.rows]
        self.gradients = [np.zeros_like(w) for w in self.weights]

    def alone(self) -> list[float]:
        """Compute all gradients in one process; return the losses."""
        losses = []
        for x in self.inputs:
            seen = [x]
            for w in self.weights:
                seen.append(np.tanh(seen[-1] @ w))
            losses.append(float(np.cos(seen[-1]).sum()))
            dy = -np.sin(seen[-1])
            for s in reversed(range(len(self.weights))):
                dz = dy * (1.0 - seen[s + 1] ** 2)
                self.gradients[s] += seen[s].T @ dz
                dy = dz @ self.weights[s].T
        return losses


def run_case(comm: Any, case: Case, net: Net) -> tuple[list[float], dict[int, Any], list[Any]]:
    """Run a batch; return the losses, the gradients of this rank's stages, and the actions."""
    last = len(net.weights) - 1

    def forward(action: Action, x: Any) -> tuple[Any, Any]:
        stage = action.chunk * comm.size + comm.rank
        assert (x is None) is (stage == 0)
        x = net.inputs[action.micro_batch] if x is None else x
        y = np.tanh(x @ net.weights[stage])
        return (float(np.cos(y).sum()) if stage == last else y), {"x": x, "y": y}

    def backward(action: Action, saved: Any, dy: Any) -> Any:
        stage = action.chunk * comm.size + comm.rank
        assert (dy is None) is (stage == last)
        dy = -np.sin(saved["y"]) if dy is None else dy
        saved["dz"] = dy * (1.0 - saved["y"] ** 2)
        return saved["dz"] @ net.weights[stage].T

    def weights(action: Action, saved: Any, dy: Any) -> None:
        stage = action.chunk * comm.size + comm.rank
        assert (dy is None) is (stage == last)
        net.gradients[stage] += saved["x"].T @ saved["dz"]

    run = run_pipeline(
        *(comm, case.name, case.micro_batches, forward, backward, weights),
        **dict(chunks=case.chunks, ahead=case.ahead, behind=case.behind),
    )
    mine = range(comm.rank, len(net.weights), comm.size)
    return run.outputs, {stage: net.gradients[stage] for stage in mine}, run.times


@pytest.mark.parametrize(
    "ranks",
    [4, pytest.param((4, ("--transport", "tcp")), marks=parallel)],
    ids=["shm", "tcp"],
    indirect=True,
    scope="module",
)
@pytest.mark.parametrize(
    "seeds", [range(20), pytest.param(range(20, 220), marks=parallel)], ids=["few", "many"]
)
def test_random_networks_have_the_gradients_of_one_process(ranks: Any, seeds: range) -> None:
    def program(comm: Any, cases: list[Case]) -> list[Any]:
        results = []
        for case in cases:
            line = comm.sub(range(case.ranks)) if comm.rank < case.ranks else None
            results.append(run_case(line, case, Net(case)) if line else ([], {}, []))
        return results

    cases = [random_case(seed) for seed in seeds]
    by_rank = ranks(program, cases)
    assert {case.name for case in cases if case.ranks > 2} == set(PIPELINE_SCHEDULES)
    for number, case in enumerate(cases):
        net = Net(case)
        losses = net.alone()
        gradients: dict[int, Any] = {}
        for rank in range(case.ranks):
            outputs, of_stages, times = by_rank[rank][number]
            gradients |= of_stages
            assert outputs == pytest.approx(losses if rank == case.ranks - 1 else [], rel=1e-12)
            moments = [moment for _, *span in times for moment in span]
            assert moments == sorted(moments), case
        for stage, gradient in enumerate(net.gradients):
            error = np.abs(gradients[stage] - gradient).max() / np.abs(gradient).max()
            assert error < 1e-12, f"{case}: stage {stage}: {error}"


@on_four_ranks
def test_a_message_arrives_while_the_rank_computes_and_another_leaves(ranks: Any) -> None:
    """Rank 1 computes F0 until rank 0 is in F3, which takes that rank 1 receives meanwhile."""

    def program(comm: Any) -> list[float]:
        def forward(action: Action, x: Any) -> tuple[Any, Any]:
            if comm.rank == 0 and action.micro_batch == 3:
                comm.send("here", 1, tag=1000)
            if comm.rank == 1 and action.micro_batch == 0:
                comm.recv(0, tag=1000)
            return np.full(1 << 17, action.micro_batch + 1.0), None  # 1 MB: is not buffered

        def backward(action: Action, saved: Any, dy: Any) -> Any:
            return np.full(1 << 17, action.micro_batch + 1.0)

        if comm.rank > 1:
            return []
        pair = comm.sub([0, 1])
        run = run_pipeline(pair, "gpipe", 4, forward, backward, ahead=1, behind=1)
        return [float(y.mean()) for y in run.outputs]

    # F3 on rank 0 means that at most one message has not left: so that of F1 has, in F0 of rank 1.
    assert ranks(program)[:2] == [[], [1.0, 2.0, 3.0, 4.0]]


@on_four_ranks
def test_objects_and_other_schedules_travel_as_well(ranks: Any) -> None:
    """Backwards in the order of forwards on one rank and the other way round on the next."""

    def mixed(rank: int, size: int, micro_batches: int, chunks: int) -> list[Action]:
        backwards = [Action("B", i) for i in range(micro_batches)][:: 1 if rank % 2 else -1]
        return [Action("F", i) for i in range(micro_batches)] + backwards

    def program(comm: Any) -> Any:
        schedule = PipelineSchedule("mixed", mixed)
        back = []

        def forward(action: Action, x: Any) -> tuple[Any, Any]:
            return {"way": [*(x or {"way": []})["way"], comm.rank], "of": action[1]}, None

        def backward(action: Action, saved: Any, dy: Any) -> Any:
            back.append((action.micro_batch, dy))
            return f"{action.micro_batch} from {comm.rank}"

        refused = ""
        try:
            run_pipeline(comm, schedule, 3, forward, backward)
        except pycoll.errors.ProofError as error:  # and the communicator is as before
            refused = str(error)
        run = run_pipeline(comm, schedule, 3, forward, backward, ahead=3, behind=3)
        return refused, run.outputs, back

    results = ranks(program)
    assert all("mixed, 4 ranks, 3 micro-batches: deadlock (ahead=2" in r[0] for r in results)
    assert results[3][1] == [{"way": [0, 1, 2, 3], "of": i} for i in range(3)]
    assert results[3][2] == [(i, None) for i in range(3)]
    for rank in range(3):
        order = range(3) if rank % 2 else reversed(range(3))
        assert results[rank][2] == [(i, f"{i} from {rank + 1}") for i in order]


@on_four_ranks
def test_what_a_function_raises_says_which_action_it_was(ranks: Any) -> None:
    def program(comm: Any) -> Any:
        def forward(action: Action, x: Any) -> tuple[Any, Any]:
            return 1.0 / (1 - action.micro_batch), None

        with comm.sub([comm.rank]) as alone, pytest.raises(ZeroDivisionError) as caught:
            run_pipeline(alone, "gpipe", 2, forward, lambda action, saved, dy: None)
        files = [frame.filename for frame in traceback.extract_tb(caught.tb)]
        for name, function, error in (
            ("zb-h1", forward, "this schedule computes .* pass weights="),
            ("gpipe", lambda action, x: np.zeros((2, 5)), "forward returned a ndarray, not"),
        ):
            refusal = pytest.raises((TypeError, ValueError), match=error)
            with comm.sub([comm.rank]) as alone, refusal as refused:
                run_pipeline(alone, name, 2, function, lambda action, saved, dy: None)
            files += [frame.filename for frame in traceback.extract_tb(refused.tb)]
        for call, error in (
            (lambda: run_pipeline(None, "gpipe", 2, forward, forward), "comm is a communicator"),
            (lambda: run_pipeline(comm, "gpipe", 2, None, forward), "None cannot be called"),
            (lambda: run_pipeline(comm, "gpipe", 2, forward, 3), "3 cannot be called"),
            (lambda: run_pipeline(comm, "gpipe", 2, forward, forward, 3), "3 cannot be called"),
            (lambda: run_pipeline(comm, "gpipe", 2.0, forward, forward), "micro_batches is an int"),
            (lambda: run_pipeline(comm, "gpipe", 0, forward, forward), "micro_batches is 0"),
            (lambda: run_pipeline(comm, "1f1b", 2, forward, forward, ahead=0), "ahead is 0"),
        ):
            with pytest.raises((TypeError, ValueError), match=error) as refused:
                call()
            files += [frame.filename for frame in traceback.extract_tb(refused.tb)]
        return caught.value.__notes__, files

    for notes, files in ranks(program):
        assert notes == ["rank 0 computed F1 of the pipeline"]
        assert not [file for file in files if "pycoll/parallel" in file], files


def test_a_killed_rank_fails_the_pipelines_of_the_others(job: Any) -> None:
    done = job(
        4,
        """
from pycoll.parallel import run_pipeline

def forward(action, x):
    return np.full(50_000, 1.0), None

def backward(action, saved, dy):
    if rank == 2 and action.micro_batch == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return np.full(50_000, 1.0)

peer_failed(2, SIGKILL, run_pipeline, comm, "interleaved", 8, forward, backward, chunks=2)
ok()
""",
    )
    assert (done.status, done.content) == (128 + signal.SIGKILL, [0, 1, 3]), done.stderr


@parallel
@on_four_ranks
@pytest.mark.parametrize("name", PIPELINE_SCHEDULES)
def test_modules_of_pytorch_have_the_gradients_of_one_process(ranks: Any, name: str) -> None:
    pytest.importorskip("torch")

    def program(comm: Any, name: str) -> float:
        import torch
        from torch import nn

        torch.set_num_threads(1)
        v, m = (2 if name == "interleaved" else 1), 8
        torch.manual_seed(5)
        stages = [nn.Sequential(nn.Linear(7, 7), nn.Tanh()).double() for _ in range(comm.size * v)]
        batch = torch.randn(m, 3, 7, dtype=torch.float64)
        nn.Sequential(*stages)(batch).square().sum().backward()
        expected = [[w.grad.clone() for w in stage.parameters()] for stage in stages]
        for stage in stages:
            stage.zero_grad()

        def forward(action: Action, x: Any) -> tuple[Any, Any]:
            x = batch[action.micro_batch] if x is None else x.requires_grad_()
            stage = action.chunk * comm.size + comm.rank
            y = stages[stage](x)
            y = y.square().sum() if stage == len(stages) - 1 else y
            return y.detach(), (x, y)

        def backward(action: Action, saved: Any, dy: Any) -> Any:
            x, y = saved
            if x.requires_grad:
                return torch.autograd.grad(y, x, dy, retain_graph=True)[0]
            return None

        def weights(action: Action, saved: Any, dy: Any) -> None:
            parameters = list(stages[action.chunk * comm.size + comm.rank].parameters())
            for w, gradient in zip(
                parameters, torch.autograd.grad(saved[1], parameters, dy), strict=True
            ):
                w.grad = gradient if w.grad is None else w.grad + gradient

        run = run_pipeline(comm, name, m, forward, backward, weights, chunks=v)
        assert all(isinstance(y, torch.Tensor) for y in run.outputs)
        return max(
            float((w.grad - e).abs().max() / e.abs().max())
            for stage in range(comm.rank, len(stages), comm.size)
            for w, e in zip(stages[stage].parameters(), expected[stage], strict=True)
        )

    assert max(ranks(program, name)) < 1e-12
