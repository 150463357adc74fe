"""torch.distributed on pycoll: groups are made, given up and made again, and calls that fail."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
from patience import PATIENCE
from torch_groups import process_group

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.torch,
    pytest.mark.parametrize("ranks", [3], indirect=True, scope="module"),
]

Comm = Any


def total(dist: Any, value: float, group: Any = None) -> float:
    x = torch.tensor([value])
    dist.all_reduce(x, group=group)
    return float(x)


def make_groups(comm: Comm) -> None:
    with process_group(comm) as dist:
        rank = comm.rank
        assert (dist.get_backend(), dist.get_rank(), dist.get_world_size()) == ("pycoll", rank, 3)
        pairs = {pair: dist.new_group(list(pair)) for pair in ((0, 1), (2, 0), (1, 2))}
        for pair, group in pairs.items():
            if rank in pair:
                assert total(dist, 2.0**rank, group) == sum(2.0**r for r in pair)
                # PyTorch numbers the ranks of a group in their order; roots are global ranks.
                x = torch.tensor([rank])
                dist.broadcast(x, src=max(pair), group=group)
                assert int(x) == max(pair)
        mine, alone = dist.new_subgroups(1)
        assert total(dist, 5.0, mine) == 5.0
        assert len(alone) == 3
        named = dist.new_group([2, 1], timeout=timedelta(seconds=60), group_desc="two")
        if rank:
            assert named.group_desc == "two"
            assert dist.get_process_group_ranks(named) == [1, 2]
            dist.destroy_process_group(named)
        assert total(dist, 1.0) == 3.0


def test_groups_of_some_ranks_are_independent(ranks: Any) -> None:
    ranks(make_groups)


def make_groups_again(comm: Comm) -> None:
    for number in range(4):
        with process_group(comm) as dist:
            assert total(dist, comm.rank + number) == 3.0 + 3 * number
    with comm.sub([2, 0, 1]) as turned, process_group(turned) as dist:
        assert dist.get_rank() == (comm.rank + 1) % 3
        objects = [None] * 3
        dist.all_gather_object(objects, comm.rank)
        assert objects == [2, 0, 1]
    store = None
    for number in range(3):
        dist = torch.distributed
        if store is None:  # one store for all: what is left of a group says nothing of the next
            made = dist.TCPStore("127.0.0.1", 0, is_master=True) if comm.rank == 0 else None
            port = comm.broadcast(made.port if made is not None else None)
            store = made or dist.TCPStore("127.0.0.1", port)
        dist.init_process_group("pycoll", store=store, rank=comm.rank, world_size=3)
        assert total(dist, number) == 3.0 * number
        dist.destroy_process_group()
    comm.barrier()  # rank 0 has the store
    part = comm.sub([0, 1])
    if part is not None:
        with part, process_group(part) as dist:
            assert total(dist, 1.0) == 2.0
    with process_group(comm, "gloo") as dist:
        few = dist.new_group([1, 2], backend="pycoll")
        if comm.rank:
            assert total(dist, 1.0, few) == 2.0
        everybody = dist.new_group(backend="pycoll")
        assert total(dist, 1.0, everybody) == 3.0
        assert total(dist, 1.0) == 3.0


def test_groups_are_given_up_and_made_again_of_other_ranks(ranks: Any) -> None:
    ranks(make_groups_again)


def wait_too_long(comm: Comm) -> None:
    with process_group(comm) as dist:
        short = timedelta(seconds=0.3)
        group = dist.new_group(timeout=short)
        if comm.rank == 1:
            began = time.monotonic()
            with pytest.raises(dist.DistBackendError, match=r"(?s) Timed out .*barrier.*rank 0: "):
                dist.barrier(group)
            assert 0.25 < time.monotonic() - began < 3.0 * PATIENCE
            with pytest.raises(dist.DistBackendError, match="Timed out"):
                dist.all_reduce(torch.ones(1), group=group)  # the first cause is told again
        group = dist.new_group(timeout=short)
        if comm.rank == 1:
            with pytest.raises(dist.DistBackendError, match=r" Timed out .*recv.*group"):
                dist.recv(torch.ones(1), src=0, group=group)
            message = dist.irecv(x := torch.ones(1), src=2)
            with pytest.raises(dist.DistBackendError, match=" Timed out "):
                message.wait(short)
            dist.barrier()
            message.wait()  # it has not been withdrawn
            assert float(x) == 7.0
        else:
            dist.barrier()
            if comm.rank == 2:
                dist.send(torch.tensor([7.0]), dst=1)
        work = None
        if comm.rank:
            work = dist.all_reduce(torch.ones(1), async_op=True)
            with pytest.raises(dist.DistBackendError, match=r" Timed out .*goes on"):
                work.wait(short)
        comm.barrier()
        if comm.rank == 0:
            dist.all_reduce(torch.ones(1))
        else:
            assert work is not None
            work.wait()
        again = dist.new_group(timeout=short)
        assert total(dist, 1.0, again) == 3.0


def test_a_deadline_is_that_of_the_group_and_says_who_is_missing(ranks: Any) -> None:
    ranks(wait_too_long)


def make_other_calls(comm: Comm) -> None:
    with process_group(comm) as dist:
        x, here = torch.ones(1 + (comm.rank == 2)), r" at test_process_groups.py:\d+\n"
        both = rf"(?s)float32\[1\], op=sum.*{here}.*float32\[2\], op=sum.*{here}"
        with pytest.raises(dist.DistBackendError, match=both):
            dist.all_reduce(x, group=dist.new_group())
        with pytest.raises(dist.DistBackendError, match=both):  # though a thread makes it
            dist.all_reduce(x, group=dist.new_group(), async_op=True).wait(timedelta(seconds=60))
        group = dist.new_group()
        x = torch.ones(3, dtype=torch.float64 if comm.rank else torch.float32)
        work = dist.broadcast(x, src=1, group=group, async_op=True)
        if comm.rank == 0:
            with pytest.raises(RuntimeError, match=r"DistBackendError: .*float64.*float32"):
                work.get_future().wait()
            assert isinstance(work.exception(), dist.DistBackendError)
            assert not work.is_success()
        group = dist.new_group()
        with pytest.raises(ValueError, match=r"4 elements .* 3 ranks"):
            dist.all_to_all_single(torch.zeros(4), torch.zeros(4), group=group)
        assert total(dist, 1.0, group) == 3.0  # nothing was sent


def test_ranks_that_make_different_calls_hear_of_both(ranks: Any) -> None:
    ranks(make_other_calls)


def use_threads(comm: Comm) -> None:
    with process_group(comm) as dist:
        groups = [dist.new_group() for _ in range(3)]
        found: list[float] = []

        def work(group: Any) -> None:
            for number in range(30):
                x = torch.full((1000,), float(number))
                pending = dist.all_reduce(x, group=group, async_op=bool(number % 2))
                if pending is not None:
                    pending.wait()
                assert (x == 3.0 * number).all()
            found.append(1.0)

        threads = [threading.Thread(target=work, args=(group,)) for group in groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 3
        for group in groups:
            pending = [dist.all_reduce(torch.ones(10), group=group, async_op=True) for _ in "ab"]
            dist.destroy_process_group(group)  # behind what was called
            for each in pending:
                each.wait()
            with pytest.raises((RuntimeError, ValueError)):
                dist.all_reduce(torch.ones(1), group=group)


def test_threads_use_groups_of_their_own(ranks: Any) -> None:
    ranks(use_threads)
