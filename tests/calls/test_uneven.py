"""gatherv, all_gatherv, scatterv, all_to_allv and reduce_scatterv against NumPy.

Each rank draws the blocks of all ranks from one seed, so each knows what must come out. Blocking
calls on one host go through shared memory, their non-blocking twins over messages.
"""

from __future__ import annotations

import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tiers import TCP, THREE_HOSTS, TWO_HOSTS, sizes
from uneven_cases import DTYPES, Array, Comm, both_ways, check, check_list, draw

import pycoll

SHAPES = ((), (0,), (1,), (7,), (2, 3), (0, 4), (3, 1, 5), (1000,), (30, 40), (1, 1, 1, 1))


MOVING = ("<M8[ns]", "S5", ">i4", "i4,f8")


# Around what fits into the first round in the core (4 KiB less what a head takes, for all_to_allv
# and scatterv 8 KiB / size), what travels with its head over messages (4 KiB), what is padded
# (64 KiB), and what is buffered (64 KiB).
LENGTHS = (0, 1, 1000, 1600, 2600, 3900, 4016, 4017, 4096, 4097, 65_535, 65_536, 65_601, 300_001)


def draw_blocks(seed: int, size: int, dtype: str = "int32") -> list[Array]:
    """One block for each rank, each of another shape."""
    shapes = [SHAPES[(3 * seed + rank) % len(SHAPES)] for rank in range(size)]
    return [draw(100 * seed + rank, dtype, shape) for rank, shape in enumerate(shapes)]


def draw_matrix(seed: int, size: int, dtype: str = "int32") -> list[list[Array]]:
    """Row i: what rank i has for each rank."""
    return [draw_blocks(50 * seed + rank, size, dtype) for rank in range(size)]


def move_everything(comm: Comm, own: Sequence[Array], matrix: Sequence[Sequence[Array]]) -> None:
    """Call each collective that moves blocks, in both ways, with every root."""
    me, size = comm.rank, comm.size
    for all_gatherv in both_ways(comm, "all_gatherv"):
        check_list(all_gatherv(own[me]), own)
    for all_to_allv in both_ways(comm, "all_to_allv"):
        check_list(all_to_allv(matrix[me]), [matrix[rank][me] for rank in range(size)])
    for root in range(size):
        for gatherv in both_ways(comm, "gatherv"):
            got = gatherv(own[me], root)
            if me == root:
                check_list(got, own)
            else:
                assert got is None
        for scatterv in both_ways(comm, "scatterv"):
            check(scatterv(matrix[root] if me == root else None, root), matrix[root][me])


def move_blocks_of_all_shapes(comm: Comm) -> None:
    for seed in range(len(SHAPES)):
        move_everything(comm, draw_blocks(seed, comm.size), draw_matrix(seed, comm.size))


@sizes(1, 3, (4, TWO_HOSTS), more=(2, 4, 5, (2, TCP), (5, TCP), (3, THREE_HOSTS)), deadline=True)
def test_blocks_of_any_shapes_arrive_where_they_belong(ranks: Any) -> None:
    ranks(move_blocks_of_all_shapes)


@sizes(3, more=(1, 2, 5), deadline=True)
def test_blocks_around_every_limit_arrive(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        size = comm.size
        for first in range(len(LENGTHS)):
            lengths = [LENGTHS[(first + 5 * rank) % len(LENGTHS)] for rank in range(size)]
            own = [draw(rank, "uint8", (n,)) for rank, n in enumerate(lengths)]
            matrix = [own[rank:] + own[:rank] for rank in range(size)]
            move_everything(comm, own, matrix)

    ranks(program)


@sizes(3, more=(2, 4))
def test_blocks_that_all_have_one_large_length_arrive(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        for length in (*LENGTHS, 2_000_000):
            own = [draw(rank, "uint8", (length,)) for rank in range(comm.size)]
            move_everything(comm, own, [own] * comm.size)

    ranks(program)


@sizes(2, 3)
def test_one_rank_alone_may_have_something(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        for length in (5, 5000, 500_000):
            for rich in range(comm.size):
                own = [draw(7, "float32", (length * (r == rich),)) for r in range(comm.size)]
                nothing = draw(8, "float32", (0, 2))
                rows = [own if rank == rich else [nothing] * comm.size for rank in range(comm.size)]
                move_everything(comm, own, rows)

    ranks(program)


@sizes(3)
def test_blocks_of_every_dtype_arrive(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        for seed, dtype in enumerate((*DTYPES, *MOVING)):
            blocks = draw_blocks(seed, comm.size, dtype)
            move_everything(comm, blocks, draw_matrix(seed, comm.size, dtype))

    ranks(program)


@sizes(3)
def test_blocks_of_a_dtype_with_a_very_long_description_arrive(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        dtype = ",".join(["i2"] * 600)
        blocks = draw_blocks(1, comm.size, dtype)
        move_everything(comm, blocks, draw_matrix(2, comm.size, dtype))

    ranks(program)


@sizes(2, 3)
def test_each_block_comes_as_its_senders_kind_of_array(ranks: Any) -> None:
    torch = pytest.importorskip("torch")

    def make(rank: int, length: int) -> Any:
        x = np.arange(rank, rank + length, dtype=np.int32)
        return (torch.from_numpy(x), memoryview(x), array.array("i", x.tolist()))[rank % 3]

    def program(comm: Comm) -> None:
        me, size = comm.rank, comm.size
        for length in (1, 3000, 200_000):
            own = [make(rank, length + rank) for rank in range(size)]
            got = [call(own[me]) for call in both_ways(comm, "all_gatherv")]
            got += [call([own[me]] * size) for call in both_ways(comm, "all_to_allv")]
            for blocks in got:
                assert [type(block) for block in blocks] == [type(block) for block in own]
                for block, expected in zip(blocks, own, strict=True):
                    np.testing.assert_array_equal(np.asarray(block), np.asarray(expected))
            for call in both_ways(comm, "scatterv"):
                block = call([own[size - 1]] * size if me == size - 1 else None, size - 1)
                assert type(block) is type(own[size - 1])

    ranks(program)


@sizes(1, 2)
def test_what_comes_back_is_no_memory_of_the_callers(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        me, size = comm.rank, comm.size
        for length in (3, 3000, 200_000):
            x = np.full(length, me, np.int16)
            results = []
            for way in (0, 1):
                results += both_ways(comm, "all_gatherv")[way](x)
                results += both_ways(comm, "all_to_allv")[way]([x] * size)
                results += both_ways(comm, "gatherv")[way](x, 0) or []
                results.append(both_ways(comm, "scatterv")[way]([x] * size, 0))
                results.append(both_ways(comm, "reduce_scatterv")[way](x[:size], [1] * size))
            for i, result in enumerate(results):
                assert not np.shares_memory(result, x)
                assert not any(np.shares_memory(result, other) for other in results[:i])
                result[...] = -1
            assert (x == me).all()

    ranks(program)


@sizes(2)
def test_blocks_need_not_be_contiguous(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        for length in (4, 300):
            whole = [draw(rank, "float32", (length, 2 * length)) for rank in range(comm.size)]
            own = [x[::2, ::-3].T for x in whole]
            move_everything(comm, own, [own] * comm.size)

    ranks(program)


@sizes(3)
def test_requests_of_uneven_collectives_complete_in_any_order(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        me, size = comm.rank, comm.size
        own, matrix = draw_blocks(1, size), draw_matrix(2, size)
        requests = [
            comm.iall_gatherv(own[me]),
            comm.iall_to_allv(matrix[me]),
            comm.igatherv(own[me], 1),
            comm.iscatterv(matrix[2] if me == 2 else None, 2),
            comm.ireduce_scatterv(np.arange(6), [1, 2, 3]),
        ]
        order = np.random.default_rng(me).permutation(len(requests))
        results = {int(i): requests[i].wait() for i in order}
        check_list(results[0], own)
        check_list(results[1], [matrix[rank][me] for rank in range(size)])
        assert (results[2] is None) == (me != 1)
        check(results[3], matrix[2][me])
        check(results[4], np.split(3 * np.arange(6), [1, 3])[me])

    ranks(program)


@sizes(2, 3)
def test_persistent_requests_move_what_is_there_at_each_start(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        me, size = comm.rank, comm.size
        x = np.zeros(me + 1, "i4")
        gather = comm.persistent.all_gatherv(x)
        reduce = comm.persistent.reduce_scatterv(np.ones(size), [1] * size)
        for turn in range(3):
            x[...] = 10 * turn + me
            check_list(
                gather.start().wait(), [np.full(r + 1, 10 * turn + r, "i4") for r in range(size)]
            )
            check(reduce.start().wait(), np.full(1, float(size)))

    ranks(program)


@sizes(2, 3, deadline=True)
def test_uneven_collectives_keep_step_with_all_others(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        me, size = comm.rank, comm.size
        for length in (1, 3000, 700_000):
            own = [np.full(length + r, r, "u1") for r in range(size)]
            requests = [comm.iall_reduce(1), comm.iall_gatherv(own[me])]
            check_list(comm.all_gatherv(own[me]), own)
            assert comm.all_reduce(2) == 2 * size
            assert (comm.gatherv(own[me], size - 1) is None) == (me != size - 1)
            check(comm.scatterv(own, 0), own[me])
            assert comm.all_gather(me) == list(range(size))
            requests.append(comm.iall_reduce_many([3, 4]))
            one, blocks, many = pycoll.wait_all(requests)
            assert (one, many) == (size, [3 * size, 4 * size])
            check_list(blocks, own)
        with comm.split(0) as child:
            assert child.all_reduce(1) == size

    ranks(program)


@sizes(2)
def test_a_deadline_ends_an_uneven_collective_on_all_ranks(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        for call in (
            lambda c, **limit: c.all_gatherv(np.ones(3), **limit),
            lambda c, **limit: c.all_to_allv([np.ones(3)] * c.size, **limit),
            lambda c, **limit: c.scatterv(None, 1, **limit),
            lambda c, **limit: c.reduce_scatterv(np.ones(3), [1, 2], **limit),
        ):
            with comm.dup() as broken:
                if comm.rank == 0:
                    with pytest.raises(pycoll.OperationTimeout):
                        call(broken, timeout=0.05)
                comm.barrier()
                with pytest.raises(pycoll.OperationTimeout):
                    broken.barrier()
        request = comm.iall_gatherv(np.ones(3)) if comm.rank == 0 else None
        if request is not None:
            with pytest.raises(pycoll.OperationTimeout):
                request.wait(0.05)
        comm.send(None, 1 - comm.rank)
        comm.recv()
        check_list((request or comm.iall_gatherv(np.ones(3))).wait(), [np.ones(3)] * 2)

    ranks(program)


@pytest.mark.parametrize("options", [(), ("--transport", "tcp")])
def test_the_end_of_a_rank_ends_what_waits_for_its_block(
    job: Any, options: tuple[str, ...]
) -> None:
    text = """
for length in (3, 3000, 1_000_000):
    comm.all_gatherv(np.ones(length))
if rank == 1:
    comm.recv(0), comm.recv(2)  # both have left those calls
    os._exit(3)
comm.send(None, 1)
error_like(pycoll.PeerFailed, "rank 1 ", comm.all_to_allv, [np.ones(100_000)] * size)
error_like(pycoll.PeerFailed, "rank 1 ", comm.all_gatherv, np.ones(3))
ok()
"""
    done = job(3, text, *options)
    assert (done.status, done.content) == (3, [0, 2]), done.stderr
