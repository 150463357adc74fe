"""What PyTorch trains on torch.distributed comes, on pycoll, to what one process comes to."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch_groups import process_group

torch = pytest.importorskip("torch")
import torch_training as training  # noqa: E402
from torch import nn  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.parametrize("ranks", [2, 3], indirect=True, scope="module"),
]

Comm = Any
Dist = Any


def mesh_of(*shape: int, names: tuple[str, ...] | None = None) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def ddp(model: Any, **options: Any) -> Any:
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model, **options)


def with_ddp(dist: Dist, rank: int, size: int, hook: Any = None, **options: Any) -> None:
    model = ddp(training.network(), **options)
    if hook is not None:
        hook(model)
    training.train(model, lambda step: training.own(step, rank, size))
    training.check(model, training.alone(size))


def with_unused_parameters(dist: Dist, rank: int, size: int) -> None:
    def forward(model: Any, x: Any, step: int) -> Any:
        return model(x, step == 1)

    model = ddp(training.network(), find_unused_parameters=True)
    training.train(model, lambda step: training.own(step, rank, size), forward=forward)
    training.check(model, training.alone(size, forward))


def all_reduce_hook(model: Any) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    model.register_comm_hook(None, default_hooks.allreduce_hook)


def builtin_hook(model: Any) -> None:
    model._register_builtin_comm_hook(torch._C._distributed_c10d.BuiltinCommHookType.ALLREDUCE)


def with_lossy_hooks(dist: Dist, rank: int, size: int) -> None:
    """Gradients as float16 and as products of two matrices: near what is exact."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    expected = training.alone(size)
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=16, start_powerSGD_iter=2, min_compression_rate=0.01
    )
    for hook, its_state in (
        (default_hooks.fp16_compress_hook, None),
        (powerSGD_hook.powerSGD_hook, state),
    ):
        model = ddp(training.network())  # in one bucket: PowerSGD's callbacks call collectives
        model.register_comm_hook(its_state, hook)
        training.train(model, lambda step: training.own(step, rank, size))
        for name, value in model.module.state_dict().items():
            torch.testing.assert_close(value, expected[name], rtol=0.1, atol=0.02)


def with_gradients_that_travel_meanwhile(dist: Dist, rank: int, size: int) -> None:
    """The first gradients arrive while backward() has the last still to compute."""
    futures: list[Any] = []
    arrived: list[Any] = []

    def hook(_: None, bucket: Any) -> Any:
        futures.append(dist.all_reduce(bucket.buffer(), async_op=True).get_future())
        return futures[-1].then(lambda done: done.value()[0].div_(size))

    def wait(grad: Any) -> None:
        if futures:  # the first step has one bucket
            arrived.append(futures[-1].wait())

    model = ddp(training.network(), bucket_cap_mb=0.0005)
    hook.__annotations__.clear()  # PyTorch wants its own classes there
    model.register_comm_hook(None, hook)
    model.module.first.register_forward_hook(lambda layer, x, y: y.register_hook(wait) and None)
    training.train(model, lambda step: training.own(step, rank, size))
    assert len(arrived) == training.STEPS - 1
    training.check(model, training.alone(size))


def without_sync(dist: Dist, rank: int, size: int) -> None:
    model = ddp(training.network())
    optimizer = training.sgd(model.parameters())
    for step in range(training.STEPS):
        x, target = training.own(step, rank, size)
        optimizer.zero_grad()
        with model.no_sync():
            nn.functional.mse_loss(model(x[:3]), target[:3]).div(2).backward()
        nn.functional.mse_loss(model(x[3:]), target[3:]).div(2).backward()
        optimizer.step()
    training.check(model, training.alone(size))


def with_join(dist: Dist, rank: int, size: int) -> None:
    """Ranks have different numbers of batches; those that have none left follow the others."""
    model = ddp(training.network())
    optimizer = training.sgd(model.parameters())
    with model.join():
        for step in range(2 + rank):
            x, target = training.own(step, rank, size)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), target).backward()
            optimizer.step()
    expected = training.network()
    optimizer = training.sgd(expected.parameters())
    for step in range(1 + size):
        optimizer.zero_grad()
        active = [r for r in range(size) if step < 2 + r]
        for r in active:  # gradients are divided by the number of ranks at the beginning
            x, target = training.own(step, r, size)
            nn.functional.mse_loss(expected(x), target).div(size).backward()
        optimizer.step()
    training.check(model, dict(expected.state_dict()))


def with_batch_norm(dist: Dist, rank: int, size: int) -> None:
    torch.manual_seed(1)
    body = nn.Sequential(nn.Linear(training.WIDTH, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    model = ddp(body)
    training.train(model, lambda step: training.own(step, rank, size))
    model.eval()
    model(training.own(0, rank, size)[0])  # has everybody take rank 0's buffers
    for value in model.state_dict().values():
        values = [torch.empty_like(value) for _ in range(size)]
        dist.all_gather(values, value)
        assert all(torch.equal(values[0], other) for other in values)


def with_sparse_gradients(dist: Dist, rank: int, size: int) -> None:
    def model() -> Any:
        torch.manual_seed(3)
        return nn.Sequential(nn.EmbeddingBag(10, 4, sparse=True, mode="sum"), nn.Linear(4, 3))

    def data(r: int) -> Any:
        return torch.tensor([[r, r + 1], [2, 9 - r]]), torch.full((2, 3), float(r))

    def step(of: Any, x: Any, target: Any) -> None:
        optimizer = torch.optim.SGD(of.parameters(), lr=0.1)
        nn.functional.mse_loss(of(x), target).backward()
        optimizer.step()

    ours, single = ddp(model()), model()
    step(ours, *data(rank))
    every = [data(r) for r in range(size)]
    step(single, *(torch.cat(parts) for parts in zip(*every, strict=True)))
    training.check(ours, dict(single.state_dict()))


def with_zero_redundancy(dist: Dist, rank: int, size: int) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = ddp(training.network())
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.SGD, lr=0.1, momentum=0.9
    )
    training.train(model, lambda step: training.own(step, rank, size), optimizer)
    training.check(model, training.alone(size))
    optimizer.consolidate_state_dict(to=0)
    assert rank or len(optimizer.state_dict()["state"]) == 6


def with_fsdp2(dist: Dist, rank: int, size: int) -> None:
    from torch.distributed.fsdp import fully_shard

    model: Any = training.network()
    mesh = mesh_of(size)
    for layer in (model.first, model.second, model.last):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    training.train(model, lambda step: training.own(step, rank, size))
    whole = {name: value.full_tensor() for name, value in model.state_dict().items()}
    training.check(whole, training.alone(size))


def with_fsdp1(dist: Dist, rank: int, size: int, strategy: str) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    model = FullyShardedDataParallel(
        training.network(),
        sharding_strategy=ShardingStrategy[strategy],
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    training.train(model, lambda step: training.own(step, rank, size))
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        training.check(dict(model.named_parameters()), training.alone(size))


def with_meshes_and_tensors(dist: Dist, rank: int, size: int) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = mesh_of(1, size, names=("a", "b"))
    assert mesh.get_group("b").size() == size
    assert mesh["a"].size() == 1
    row = mesh_of(size)
    torch.manual_seed(0)
    a, b = torch.randn(6, 5), torch.randn(5, 6)
    left = distribute_tensor(a, row, [Shard(0)])
    right = distribute_tensor(b, row, [Replicate()])
    torch.testing.assert_close((left @ right).full_tensor(), a @ b)
    inner = distribute_tensor(a, row, [Shard(1)]) @ distribute_tensor(b, row, [Shard(0)])
    assert inner.placements[0].is_partial()
    torch.testing.assert_close(inner.redistribute(row, [Shard(0)]).full_tensor(), a @ b)
    torch.testing.assert_close(left.redistribute(row, [Shard(1)]).full_tensor(), a)


def with_tensor_parallelism(dist: Dist, rank: int, size: int) -> None:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    def model() -> Any:
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4))

    mesh = mesh_of(size)
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    ours, single = parallelize_module(model(), mesh, plan), model()
    x = training.batches(0, 1)[0]
    for each in (ours, single):
        each(x).square().sum().backward()
    for mine, expected in zip(ours.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), expected.grad)


def with_checkpoints(dist: Dist, rank: int, size: int) -> None:
    from torch.distributed import checkpoint
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    names = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(names)
    expected = training.alone(1)
    model: Any = training.network()
    model.load_state_dict(expected)
    fully_shard(model, mesh=mesh_of(size))
    checkpoint.save({"model": model.state_dict()}, checkpoint_id=names[0])
    other: Any = training.network()
    fully_shard(other, mesh=mesh_of(size))
    state = {"model": other.state_dict()}
    checkpoint.load(state, checkpoint_id=names[0])
    whole = {name: value.full_tensor() for name, value in state["model"].items()}
    training.check(whole, expected)
    # The same on one rank less.
    fewer = DeviceMesh("cpu", list(range(size - 1)))
    if rank < size - 1:
        other = training.network()
        fully_shard(other, mesh=fewer)
        state = {"model": other.state_dict()}
        checkpoint.load(state, checkpoint_id=names[0], process_group=fewer.get_group())
        whole = {name: value.full_tensor() for name, value in state["model"].items()}
        training.check(whole, expected)
    dist.barrier()
    if rank == 0:
        for file in sorted(Path(names[0]).rglob("*"), reverse=True):
            file.rmdir() if file.is_dir() else file.unlink()
        Path(names[0]).rmdir()


def with_a_pipeline(dist: Dist, rank: int, size: int, schedule: str) -> None:
    from torch.distributed import pipelining

    def stages() -> list[Any]:
        torch.manual_seed(11)
        return [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(size)]

    device = torch.device("cpu")
    stage = pipelining.PipelineStage(stages()[rank], rank, size, device)
    loss = nn.functional.mse_loss
    run = getattr(pipelining, schedule)(stage, n_microbatches=4, loss_fn=loss)
    torch.manual_seed(12)
    x, target = torch.randn(8, 8), torch.randn(8, 8)
    got = run.step(*([x] if rank == 0 else []), **({"target": target} if rank == size - 1 else {}))
    whole = stages()
    y = nn.Sequential(*whole)(x)
    loss(y, target).backward()
    if rank == size - 1:
        torch.testing.assert_close(got, y)
    for mine, expected in zip(stage.submod.parameters(), whole[rank].parameters(), strict=True):
        torch.testing.assert_close(mine.grad, expected.grad, rtol=1e-4, atol=1e-6)


def with_an_interleaved_pipeline(dist: Dist, rank: int, size: int) -> None:
    """Each rank has two stages, as far from each other as there are ranks."""
    from torch.distributed import pipelining

    def stages() -> list[Any]:
        torch.manual_seed(11)
        return [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2 * size)]

    device, loss, mine = torch.device("cpu"), nn.functional.mse_loss, (rank, rank + size)
    models = stages()
    parts = [pipelining.PipelineStage(models[i], i, 2 * size, device) for i in mine]
    run = pipelining.ScheduleInterleaved1F1B(parts, n_microbatches=2 * size, loss_fn=loss)
    torch.manual_seed(12)
    x, target = torch.randn(4 * size, 8), torch.randn(4 * size, 8)
    run.step(*([x] if rank == 0 else []), **({"target": target} if rank == size - 1 else {}))
    whole = stages()
    loss(nn.Sequential(*whole)(x), target).backward()
    for part, i in zip(parts, mine, strict=True):
        for own, expected in zip(part.submod.parameters(), whole[i].parameters(), strict=True):
            torch.testing.assert_close(own.grad, expected.grad, rtol=1e-4, atol=1e-6)


CHECKS: dict[str, Callable[[Dist, int, int], None]] = {
    "ddp": with_ddp,
    "bucket views": partial(with_ddp, gradient_as_bucket_view=True),
    "tiny buckets": partial(with_ddp, bucket_cap_mb=0.0005),
    "unused parameters": with_unused_parameters,
    "static graph": partial(with_ddp, static_graph=True),
    "all_reduce hook": partial(with_ddp, hook=all_reduce_hook),
    "built-in hook": partial(with_ddp, hook=builtin_hook),
    "lossy hooks": with_lossy_hooks,
    "overlap": with_gradients_that_travel_meanwhile,
    "no_sync": without_sync,
    "join": with_join,
    "batch norm": with_batch_norm,
    "sparse gradients": with_sparse_gradients,
    "zero": with_zero_redundancy,
    "fsdp2": with_fsdp2,
    "full shard": partial(with_fsdp1, strategy="FULL_SHARD"),
    "shard grad op": partial(with_fsdp1, strategy="SHARD_GRAD_OP"),
    "no shard": partial(with_fsdp1, strategy="NO_SHARD"),
    "meshes": with_meshes_and_tensors,
    "tensor parallelism": with_tensor_parallelism,
    "checkpoints": with_checkpoints,
    "gpipe": partial(with_a_pipeline, schedule="ScheduleGPipe"),
    "1f1b": partial(with_a_pipeline, schedule="Schedule1F1B"),
    "interleaved": with_an_interleaved_pipeline,
}


def in_group(comm: Comm, name: str) -> None:
    with process_group(comm) as dist:
        CHECKS[name](dist, comm.rank, comm.size)


@pytest.mark.parametrize("name", CHECKS)
def test_it_comes_to_what_one_process_comes_to(ranks: Any, name: str) -> None:
    ranks(in_group, name)
