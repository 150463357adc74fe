"""torch.distributed on pycoll: what each call fills, on three ranks."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from torch_groups import process_group

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.torch,
    pytest.mark.parametrize("ranks", [3], indirect=True, scope="module"),
]

Comm = Any
Dist = Any
SIZE = 3

DTYPES = (
    *("uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"),
    *("complex64", "complex128", "float8_e4m3fn", "float8_e5m2"),
)


def plain(tensor: Any) -> Any:
    """The same values in a dtype that can be compared."""
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.float() if tensor.dtype.itemsize == 1 else tensor.double()


def equal(tensor: Any, values: Any) -> None:
    expected = torch.as_tensor(values).to(tensor.dtype)
    assert tensor.shape == expected.shape, (tensor, expected)
    assert (plain(tensor) == plain(expected)).all(), (tensor, expected)


def of_rank(rank: int, dtype: str = "float32") -> Any:
    """Four elements that say whose they are."""
    return (torch.arange(4.0) + 4 * rank).to(getattr(torch, dtype))


def all_reduce_adds_up_every_dtype(dist: Dist, rank: int) -> None:
    for dtype in DTYPES:
        x = of_rank(rank, dtype)
        dist.all_reduce(x)
        equal(x, sum(plain(of_rank(r, dtype)) for r in range(SIZE)).to(x.dtype))
    x = torch.tensor([rank == 1, False, True])
    dist.all_reduce(x)
    equal(x, [True, False, True])


def elements_meet_by_their_index_however_they_lie(dist: Dist, rank: int) -> None:
    matrix = torch.arange(6.0).reshape(2, 3)
    lies = [matrix.clone(), matrix.t().contiguous().t(), torch.zeros(2, 6)[:, ::2]]
    lies[2].copy_(matrix)
    x = lies[rank]
    dist.all_reduce(x)
    equal(x, SIZE * matrix)
    x = lies[rank - 1]
    dist.reduce(x, 1)
    equal(x, SIZE * matrix if rank == 1 else matrix)
    x = lies[rank - 2]
    x.mul_(rank == 0)
    dist.broadcast(x, src=0)
    equal(x, matrix)


def all_reduce_knows_every_operator(dist: Dist, rank: int) -> None:
    op = dist.ReduceOp
    whole = {
        op.SUM: [12, 15], op.PRODUCT: [0, 45], op.MIN: [0, 1], op.MAX: [8, 9], op.AVG: [4, 5],
        op.BAND: [0, 1], op.BOR: [12, 13], op.BXOR: [12, 13],
    }  # fmt: skip
    for by, expected in whole.items():
        x = of_rank(rank, "int64")[:2].clone()
        dist.all_reduce(x, by)
        equal(x, expected)
    for by in (op.SUM, op.PRODUCT, op.MIN, op.MAX, op.AVG):
        for dtype in ("float32", "bfloat16", "float8_e4m3fn"):  # 45 and 13 are rounded once
            x = of_rank(rank, dtype)[:2].clone()
            dist.all_reduce(x, by)
            equal(x, torch.tensor(whole[by]).to(x.dtype))
    x = of_rank(rank)
    dist.all_reduce(x, dist._make_nccl_premul_sum(0.5))
    equal(x, [6.0, 7.5, 9, 10.5])
    x = torch.tensor([-7, 1])
    dist.all_reduce(x if rank else x - 1, op.AVG)
    equal(x, [-7, 1] if rank == 0 else [-7, 0])  # rounded towards zero


def tensors_of_every_layout_are_filled_in_place(dist: Dist, rank: int) -> None:
    base = torch.zeros(4, 6)
    for view in (base.t(), base[:, ::2], base[1:3], base[0, 0], base[:0], base[::2, 1]):
        view.fill_(rank + 1)
        dist.all_reduce(view)
        equal(view, torch.full(view.shape, 6.0))
        view.fill_(rank)
        dist.broadcast(view, src=2)
        equal(view, torch.full(view.shape, 2.0))
    pictures = torch.full((2, 3, 4, 5), float(rank)).to(memory_format=torch.channels_last)
    dist.all_reduce(pictures)
    equal(pictures, torch.full((2, 3, 4, 5), 3.0))


def gradients_do_not_take_a_collective_for_a_change(dist: Dist, rank: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.nn.Parameter(torch.ones(3, dtype=dtype))
        y = weight * 2
        z = y * y  # keeps y for its gradient
        dist.all_reduce(y.detach())
        z.sum().backward()
        equal(weight.grad, [24.0, 24, 24])
        dist.broadcast(weight, src=0)  # a leaf that requires a gradient
        with torch.inference_mode():
            x = torch.ones(2, dtype=dtype)
            dist.all_reduce(x)
            work = dist.all_reduce(x, async_op=True)
            work.wait()
            equal(x, [9.0, 9.0])


def calls_that_go_on_run_in_order(dist: Dist, rank: int) -> None:
    x, y = torch.ones(5), torch.full((100_000,), float(rank))
    works = [dist.all_reduce(x, async_op=True) for _ in range(4)]
    works.append(dist.broadcast(y, src=1, async_op=True))
    dist.all_reduce(x)  # behind them
    assert all(work.is_completed() for work in works)
    equal(x, [243.0] * 5)
    equal(y[:2], [1.0, 1.0])
    works = [dist.all_reduce(x, async_op=True), dist.all_reduce(x, async_op=True)]
    works[1].wait()
    assert works[0].is_success()
    assert works[1].exception() is None
    equal(works[1].result()[0], [2187.0] * 5)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)  # the thread of the group cannot run between the two
    try:
        first = dist.all_reduce(x, async_op=True)
        dist.all_reduce(y)
        assert first.is_completed()
    finally:
        sys.setswitchinterval(interval)


def one_rank_waits_and_another_does_not(dist: Dist, rank: int) -> None:
    for number in range(20):
        x = torch.full((1 << number % 16,), float(rank))
        work = dist.all_reduce(x, async_op=number % SIZE == rank)
        if work is not None:
            work.wait()
        equal(x, torch.full(x.shape, 3.0))


def futures_have_the_tensors(dist: Dist, rank: int) -> None:
    x = torch.ones(3)
    future = dist.all_reduce(x, async_op=True).get_future()
    doubled = future.then(lambda done: done.value()[0] * 2)
    equal(doubled.wait(), [6.0, 6, 6])
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    assert work.get_future() is not None
    equal(work.get_future().wait()[0], [9.0, 9, 9])

    def reduce_again(done: Any) -> Any:
        (y,) = done.value()
        dist.all_reduce(y, async_op=True).wait()  # as PowerSGD's does
        return y

    chain = [dist.all_reduce(torch.ones(3), async_op=True).get_future() for _ in range(1)]
    equal(chain[0].then(reduce_again).wait(), [9.0, 9, 9])
    to = (rank + 1) % SIZE
    y = torch.zeros(2)
    received = dist.irecv(y, (rank - 1) % SIZE).get_future()
    dist.isend(torch.full((2,), 7.0), to).get_future().wait()
    equal(received.wait()[0], [7.0, 7.0])


def callbacks_may_wait_for_the_next_call(dist: Dist, rank: int) -> None:
    go = torch.zeros(1)
    if rank > 0:  # the callback is there before the first call can end
        dist.recv(go, 0)
    calls = [dist.all_reduce(torch.ones(1), async_op=True).get_future() for _ in range(2)]
    next_has_ended = threading.Event()
    calls[1].then(lambda _: next_has_ended.set())
    has_waited = calls[0].then(lambda _: next_has_ended.wait(20))
    if rank == 0:
        for other in range(1, SIZE):
            dist.send(go, other)
    assert has_waited.wait()


def broadcast_moves_every_dtype(dist: Dist, rank: int) -> None:
    for dtype in (*DTYPES, "bool", "uint16", "uint32", "uint64", "complex32"):
        for root in range(SIZE):
            x = of_rank(rank).to(getattr(torch, dtype))
            dist.broadcast(x, src=root)
            equal(x, of_rank(root))


def gathers_fill_lists_and_tensors(dist: Dist, rank: int) -> None:
    all_of = torch.stack([of_rank(r) for r in range(SIZE)])
    for dtype in ("float32", "bfloat16", "bool", "float8_e4m3fn"):
        x, expected = of_rank(rank, dtype), all_of.to(getattr(torch, dtype))
        outs = [torch.empty_like(x) for _ in range(SIZE)]
        dist.all_gather(outs, x)
        equal(torch.stack([out.float() for out in outs]), expected.float())
        out = torch.empty(SIZE, 4, dtype=x.dtype)
        dist.all_gather_into_tensor(out, x)
        equal(out.float(), expected.float())
    out = torch.zeros(4 * SIZE)
    mine = out[4 * rank : 4 * rank + 4].copy_(of_rank(rank))
    dist.all_gather_into_tensor(out, mine)  # in place
    equal(out, all_of.flatten())
    columns = torch.zeros(4, SIZE)
    dist.all_gather([columns[:, r] for r in range(SIZE)], of_rank(rank))
    equal(columns.t(), all_of)
    uneven = [torch.zeros(r + 1) for r in range(SIZE)]
    dist.all_gather(uneven, torch.full((rank + 1,), float(rank)))  # of different lengths
    equal(torch.cat(uneven), [float(r) for r in range(SIZE) for _ in range(r + 1)])
    outs = [torch.zeros(4) for _ in range(SIZE)] if rank == 1 else None
    dist.gather(of_rank(rank), outs, dst=1)
    if outs is not None:
        equal(torch.stack(outs), all_of)


def scatters_and_reductions_to_one_rank(dist: Dist, rank: int) -> None:
    x = torch.zeros(2, 2)
    parts = [torch.full((2, 2), float(r)) for r in range(SIZE)] if rank == 2 else None
    dist.scatter(x, parts, src=2)
    equal(x, torch.full((2, 2), float(rank)))
    x = of_rank(rank)
    dist.reduce(x, dst=1)
    equal(x, [12.0, 15, 18, 21] if rank == 1 else of_rank(rank))
    out = torch.zeros(2)
    dist.reduce_scatter(out, [torch.tensor([r, rank]) * 1.0 for r in range(SIZE)])
    equal(out, [3.0 * rank, 3.0])
    for dtype in ("float32", "int64", "bfloat16", "float8_e5m2"):
        table = torch.arange(6).reshape(SIZE, 2).to(getattr(torch, dtype))
        mine = torch.zeros(2, dtype=table.dtype)
        dist.reduce_scatter_tensor(mine, table, dist.ReduceOp.AVG)
        equal(mine, [2.0 * rank, 2.0 * rank + 1])
        equal(table, torch.arange(6).reshape(SIZE, 2))  # unchanged
    flat = torch.arange(6.0)
    dist.reduce_scatter_tensor(flat[2 * rank : 2 * rank + 2], flat)  # in place
    equal(flat[2 * rank : 2 * rank + 2], [6.0 * rank, 6.0 * rank + 3])


def all_to_all_exchanges_parts(dist: Dist, rank: int) -> None:
    ins = [torch.tensor([[10 * rank + to]]) for to in range(SIZE)]
    outs = [torch.zeros(1, 1, dtype=torch.int64) for _ in range(SIZE)]
    dist.all_to_all(outs, ins)
    equal(torch.cat(outs).flatten(), [10 * of + rank for of in range(SIZE)])
    x, y = torch.arange(6.0).reshape(3, 2) + 10 * rank, torch.zeros(3, 2)
    dist.all_to_all_single(y, x)
    expected = torch.stack([torch.arange(2.0) + 2 * rank + 10 * of for of in range(SIZE)])
    equal(y, expected)
    y.zero_()
    lengths = [1, 1, 1] if rank else None  # one rank says what is so anyhow
    dist.all_to_all_single(y, x, lengths, lengths)
    equal(y, expected)
    # Rank r sends r + to rows to rank `to`.
    sent, got = [rank + to for to in range(SIZE)], [of + rank for of in range(SIZE)]
    x, y = torch.full((sum(sent), 2), float(rank)), torch.zeros(sum(got), 2)
    dist.all_to_all_single(y, x, got, sent)
    equal(y[:, 1], [float(of) for of in range(SIZE) for _ in range(of + rank)])


def messages_keep_their_order_and_tags(dist: Dist, rank: int) -> None:
    if rank == 0:
        got = {dist.recv(torch.zeros(3), tag=9) for _ in range(2)}
        assert got == {1, 2}
        x, y = torch.zeros(2), torch.zeros(2)
        later = dist.irecv(y, src=1, tag=2)
        dist.recv(x, src=1, tag=1)
        later.wait()
        equal(torch.stack([x, y]), [[1.0, 1.0], [2.0, 2.0]])
        columns = torch.zeros(4, 2)
        dist.recv(columns[:, 1], src=2)
        equal(columns, [[0.0, 5.0]] * 4)
        for number in range(5):
            dist.recv(x[:1], src=2)
            equal(x[0], float(number))
    else:
        dist.send(torch.full((3,), float(rank)), dst=0, tag=9)
        if rank == 1:
            dist.send(torch.full((2,), 2.0), dst=0, tag=2)
            dist.send(torch.full((2,), 1.0), dst=0, tag=1)
        else:
            dist.send(torch.full((4,), 5.0), dst=0)
            for number in range(5):
                dist.send(torch.tensor([float(number)]), dst=0)
    large, into = torch.full((1 << 18,), float(rank)), torch.zeros(1 << 18)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, large, (rank + 1) % SIZE),
            dist.P2POp(dist.irecv, into, (rank - 1) % SIZE),
        ]
    )
    for work in works:
        work.wait()
    equal(into[-2:], [float((rank - 1) % SIZE)] * 2)
    for dtype in ("bfloat16", "float8_e4m3fn", "complex32", "bool"):
        x = of_rank(rank).to(getattr(torch, dtype))
        y = torch.zeros_like(x)
        works = [dist.isend(x, (rank + 1) % SIZE), dist.irecv(y, (rank - 1) % SIZE)]
        for work in works:
            work.wait()
        equal(y, of_rank((rank - 1) % SIZE))


def barriers_and_objects(dist: Dist, rank: int) -> None:
    dist.barrier()
    work = dist.barrier(async_op=True)
    work.wait()
    objects: list[Any] = [None] * SIZE
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": r} for r in range(SIZE)]
    some = [f"of {rank}", rank]
    dist.broadcast_object_list(some, src=1)
    assert some == ["of 1", 1]
    gathered = [None] * SIZE if rank == 0 else None
    dist.gather_object(rank, gathered, dst=0)
    assert gathered == ([0, 1, 2] if rank == 0 else None)
    one: list[Any] = [None]
    dist.scatter_object_list(one, ["a", ["b"], 3] if rank == 0 else None, src=0)
    assert one == [["a", ["b"], 3][rank]]
    if rank == 0:
        dist.send_object_list([{"a": 1}, "b"], dst=1)
    elif rank == 1:
        two: list[Any] = [None, None]
        dist.recv_object_list(two, src=0)
        assert two == [{"a": 1}, "b"]


def several_calls_may_be_made_as_one(dist: Dist, rank: int) -> None:
    xs = [of_rank(rank), torch.full((2, 2), 1.0)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for x in xs:
            dist.all_reduce(x)
    manager.wait()
    equal(xs[0], [12.0, 15, 18, 21])
    equal(xs[1], [[3.0, 3], [3, 3]])
    outs, ins = [torch.zeros(3), torch.zeros(6)], [torch.ones(1) * rank, torch.ones(2)]
    with dist._coalescing_manager():
        for out, x in zip(outs, ins, strict=True):
            dist.all_gather_into_tensor(out, x)
    equal(outs[0], [0.0, 1, 2])
    with dist._coalescing_manager(device=torch.device("cpu")):
        for x, out in zip(ins, outs, strict=True):
            dist.reduce_scatter_tensor(x, out)
    equal(ins[0], [3.0 * rank])
    equal(ins[1], [3.0, 3])
    sparse = torch.sparse_coo_tensor([[rank, 2]], [1.0, 2.0], (4,))
    dist.all_reduce(sparse)
    equal(sparse.to_dense(), [1.0, 1.0, 7.0, 0.0])


def functional_collectives_return_new_tensors(dist: Dist, rank: int) -> None:
    import torch.distributed._functional_collectives as functional

    group = dist.group.WORLD
    x = of_rank(rank)
    equal(functional.all_reduce(x, "sum", group) + 0, [12.0, 15, 18, 21])
    equal(x, of_rank(rank))
    everything = torch.cat([of_rank(r) for r in range(SIZE)])
    equal(functional.all_gather_tensor(x, 0, group) + 0, everything)
    equal(functional.reduce_scatter_tensor(everything, "avg", 0, group) + 0, of_rank(rank))
    equal(functional.broadcast(x, 1, group) + 0, of_rank(1))
    got = functional.all_to_all_single(torch.arange(3.0) + 3 * rank, None, None, group)
    equal(got + 0, [float(rank), rank + 3, rank + 6])
    both = functional.all_reduce_coalesced([x, x * 2], "max", group)
    equal(both[1] + 0, [16.0, 18, 20, 22])


CHECKS = (
    all_reduce_adds_up_every_dtype,
    all_reduce_knows_every_operator,
    elements_meet_by_their_index_however_they_lie,
    tensors_of_every_layout_are_filled_in_place,
    gradients_do_not_take_a_collective_for_a_change,
    calls_that_go_on_run_in_order,
    one_rank_waits_and_another_does_not,
    futures_have_the_tensors,
    callbacks_may_wait_for_the_next_call,
    broadcast_moves_every_dtype,
    gathers_fill_lists_and_tensors,
    scatters_and_reductions_to_one_rank,
    all_to_all_exchanges_parts,
    messages_keep_their_order_and_tags,
    barriers_and_objects,
    several_calls_may_be_made_as_one,
    functional_collectives_return_new_tensors,
)


def in_group(comm: Comm, check: Callable[[Dist, int], None]) -> None:
    with process_group(comm) as dist:
        check(dist, comm.rank)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_that(ranks: Any, check: Callable[[Dist, int], None]) -> None:
    ranks(in_group, check)
