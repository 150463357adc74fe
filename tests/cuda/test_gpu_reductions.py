"""Large reductions of arrays on GPUs that ranks share stay there, and give the core's bits.

The driver that the tests make up runs the kernels themselves, compiled for the processor.
"""

from __future__ import annotations

import random
from typing import Any

import fake_cuda
import fakegpu
import gpu_jobs
import numpy as np
import pytest
from cuda_ipc_jobs import PLACES
from gpu_jobs import WAYS, Comm, Ranks, call, equal, jobs, slow_array, tidy
from kernel_cases import drawn
from tiers import few, smoke

import pycoll
from pycoll import _dtypes as dtypes
from pycoll._gpu import kernels
from pycoll._transports._core import OPS, reduce

ranks, gpu_job = gpu_jobs.ranks, gpu_jobs.gpu_job

NBYTES = 1 << 20
"""A result of so many bytes stays on the GPU, a shorter one is staged."""

COLLECTIVES = "all_reduce", "reduce", "reduce_scatter"
COUNTED = "kernels", "d2h_bytes", "h2d_bytes"

Array = np.ndarray[Any, Any]


def case(
    comm: Comm, method: str, op: str, name: str, count: int
) -> tuple[Array, Array | None, dict[str, Any]]:
    """What this rank passes, what the core makes of all in rank order, and the root."""
    size, me, root = comm.size, comm.rank, comm.size - 1
    dtype = next(dtype for dtype in dtypes.TABLE if dtype.name == name)
    rows = size if method == "reduce_scatter" else 1
    xs = [x.reshape(rows, count) for x in drawn(name, size, count * rows)]
    mine = [np.ascontiguousarray(x[me if rows > 1 else 0]) for x in xs]
    wanted = np.empty_like(mine[0])
    reduce(OPS.index(op), dtype.code, wanted.view(np.uint8), [x.view(np.uint8) for x in mine], size)
    x = xs[me].copy() if rows > 1 else mine[me].copy()
    if method == "reduce":
        return x, wanted if me == root else None, {"root": root}
    return x, wanted, {}


def counts(before: dict[str, int]) -> list[int]:
    after = fake_cuda.stats()
    return [after[name] - before[name] for name in COUNTED]


def num_kernels(comm: Comm, method: str, by_all: bool) -> int:
    """How many this rank runs: on one GPU one rank writes all results."""
    if method == "reduce":
        return int(comm.rank == comm.size - 1)
    if by_all:
        return 1
    return (comm.rank == 0) * (comm.size if method == "reduce_scatter" else 1)


def check(
    comm: Comm, way: str, method: str, op: str, name: str, more: int = 0, by_all: bool = False
) -> None:
    """Compare a call with the core's bits; nothing passes the host.

    With `by_all` the ranks have two GPUs.
    """
    gpu = comm.rank % 2 if by_all else 0
    count = NBYTES // gpu_jobs.dtype_of(name).itemsize + more
    x, wanted, kwargs = case(comm, method, op, name, count)
    times = 2 if way == "persistent" else 1
    for where in ("new", "own", "x"):
        if where == "x" and way == "persistent":
            continue  # twice in place is something else
        there, out = fakegpu.array(x, gpu), {}
        if where == "own" and wanted is not None:
            out = {"out": fakegpu.empty(wanted.shape, wanted.dtype, gpu)}
        if where == "x" and wanted is not None:
            out = {"out": there[comm.rank] if method == "reduce_scatter" else there}
        fake_cuda.run_all()
        before = fake_cuda.stats()
        got = call(comm, way, method, there, op, **kwargs, **out)
        found = counts(before)
        said = method, op, name, way, more, where
        equal(got, wanted, said)
        if where != "x":
            equal(there, x, said)
        assert found == [times * num_kernels(comm, method, by_all), 0, 0], said


@smoke
@pytest.mark.parametrize("way", few(["blocking", "request"], ["persistent"]))
@jobs("3", more=("2", "2 by TCP", "3 by TCP", "4"))
def test_nothing_goes_through_the_host_and_the_bits_are_the_cores(ranks: Ranks, way: str) -> None:
    @tidy
    def program(comm: Comm, way: str, seed: int) -> None:
        for method in COLLECTIVES:
            check(comm, way, method, "sum", "float32", 3)
        check(comm, way, "all_reduce", "avg", "bfloat16", 1)
        check(comm, way, "reduce_scatter", "min", "float16")

    ranks(program, way, 1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("op", sorted(kernels.OPERATORS))
@jobs("2", more=["3 by TCP"])
def test_every_operator_and_dtype(ranks: Ranks, op: str) -> None:
    @tidy
    def program(comm: Comm, op: str, seed: int) -> None:
        for index, dtype in enumerate(dtypes.TABLE):
            if kernels.has(op, dtype):
                way, method = WAYS[index % 2], COLLECTIVES[index % 3]
                check(comm, way, method, op, dtype.name, index % 5)

    ranks(program, op, 2)


@pytest.mark.parametrize("way", few(["request"], ["blocking", "persistent"]))
@jobs("3", more=["2 by TCP", "4"])
def test_on_several_gpus_each_rank_writes_its_own_result(ranks: Ranks, way: str) -> None:
    @tidy
    def program(comm: Comm, way: str, seed: int) -> None:
        for method in COLLECTIVES:
            check(comm, way, method, "sum", "float32", 3, by_all=True)
        for more in (0, 1, 77):  # these take two phases
            check(comm, way, "all_reduce", "sum", "float32", (8 << 18) + more, by_all=True)
            check(comm, way, "all_reduce", "max", "float16", (16 << 18) + more, by_all=True)

    ranks(program, way, 3)


@pytest.mark.parametrize("way", few(["request"], ["blocking"]))
@jobs("3", more=["2 by TCP", "4"])
def test_some_ranks_may_be_in_place(ranks: Ranks, way: str) -> None:
    @tidy
    def program(comm: Comm, way: str, seed: int) -> None:
        x, wanted, _ = case(comm, "all_reduce", "sum", "int32", NBYTES // 4)
        for gpu in (0, comm.rank % 2):
            there = fakegpu.array(x, gpu)
            out = there if comm.rank == 1 else fakegpu.empty(x.shape, x.dtype, gpu)
            equal(call(comm, way, "all_reduce", there, out=out), wanted, "in place on rank 1")

    ranks(program, way, 3)


@pytest.mark.parametrize("way", WAYS[:2])
@jobs("3", more=["2 by TCP"])
def test_ranks_agree_wherever_their_arrays_are(ranks: Ranks, way: str) -> None:
    @tidy
    def program(comm: Comm, way: str, seed: int) -> None:
        common, own = random.Random(seed), random.Random(seed * 100 + comm.rank)
        for turn in range(24):
            method, name = common.choice(COLLECTIVES), common.choice(["int32", "uint8", "bool"])
            op = common.choice(["sum", "max", "lxor"])
            count = NBYTES // gpu_jobs.dtype_of(name).itemsize + common.choice(
                [-256, 0, 256, 3 << 18]
            )
            x, wanted, kwargs = case(comm, method, op, name, count)
            x = x.reshape(*x.shape[:-1], 256, -1)
            wanted = wanted.reshape(256, -1) if wanted is not None else None
            there = own.choice(PLACES if turn % 3 else PLACES[:3])(x)
            if wanted is not None and own.random() < 0.5:
                kwargs["out"] = own.choice(PLACES)(np.zeros_like(wanted))
            got = call(comm, way, method, there, op, **kwargs)
            equal(got, wanted, (turn, method, name, op, count, there, kwargs))
            equal(there, x, (turn, "x"))

    ranks(program, way, 4)


@pytest.mark.parametrize("way", WAYS[:2])
@jobs("2", more=["2 by TCP"])
def test_an_array_that_is_being_computed_is_waited_for(ranks: Ranks, way: str) -> None:
    @tidy
    def program(comm: Comm, way: str, seed: int) -> None:
        x, wanted, _ = case(comm, "all_reduce", "sum", "float32", NBYTES // 4)
        for late in range(2):
            there, out = fakegpu.array(x), fakegpu.array(np.zeros_like(x))
            kernel = None
            if comm.rank == late:
                there, kernel = slow_array(x)
            if comm.rank != late:
                out, kernel = slow_array(np.zeros_like(x))
            assert kernel is not None
            kernel.release_soon()
            equal(call(comm, way, "all_reduce", there, out=out), wanted, late)

    ranks(program, way, 5)


@pytest.mark.parametrize("way", WAYS[:2])
@jobs("2", more=["3 by TCP"])
def test_what_cannot_be_opened_is_staged_on_all_ranks_and_not_tried_again(
    ranks: Ranks, way: str
) -> None:
    @tidy
    def program(comm: Comm, way: str, seed: int) -> None:
        with comm.dup() as mine:
            for method in COLLECTIVES:
                x, wanted, kwargs = case(comm, method, "sum", "int32", NBYTES // 4 * 3)
                for _ in range(2):
                    if comm.rank == (comm.size - 1 if method == "reduce" else 0):
                        fake_cuda.fail("cuIpcOpenMemHandle:*:201")
                    there = fakegpu.array(x)
                    fake_cuda.run_all()
                    before = fake_cuda.stats()
                    equal(call(mine, way, method, there, **kwargs), wanted, method)
                    assert counts(before)[:2] == [0, x.nbytes], method
                fake_cuda.fail("")
        check(comm, way, "all_reduce", "sum", "int32")  # another communicator tries

    ranks(program, way, 6)


@jobs("2")
def test_a_kernel_that_cannot_be_launched_breaks_the_communicator(ranks: Ranks) -> None:
    @tidy
    def program(comm: Comm, seed: int) -> None:
        for way in WAYS[:2]:
            with comm.dup() as mine:
                x, wanted, _ = case(comm, "all_reduce", "sum", "int32", NBYTES // 4)
                there = fakegpu.array(x)
                equal(call(mine, way, "all_reduce", there), wanted, way)
                if comm.rank == 0:
                    fake_cuda.fail("cuLaunchKernel:1:2")
                with pytest.raises(pycoll.TransportError if comm.rank == 0 else pycoll.Error):
                    call(mine, way, "all_reduce", there)
                fake_cuda.fail("")
            comm.barrier()

    ranks(program, 7)


@jobs("2")
def test_memory_of_others_is_opened_once_and_let_go_when_it_was_replaced(ranks: Ranks) -> None:
    @tidy
    def program(comm: Comm, seed: int) -> None:
        x, wanted, _ = case(comm, "all_reduce", "sum", "int32", NBYTES // 4)
        there, out = fakegpu.array(x), fakegpu.empty(x.shape, x.dtype)
        call(comm, "blocking", "all_reduce", there, out=out)
        kept = fake_cuda.stats()["ipc_opened"]
        for way in WAYS:
            equal(call(comm, way, "all_reduce", there, out=out), wanted, way)
        assert fake_cuda.stats()["ipc_opened"] == kept
        for _ in range(100):
            other = fakegpu.array(x)
            equal(call(comm, "blocking", "all_reduce", other), wanted, "another array")
            comm.barrier()
            del other
        assert fake_cuda.stats()["ipc_opened"] <= 33

    ranks(program, 8)


@pytest.mark.parametrize("way", WAYS[:2])
@jobs("2", more=["2 by TCP"])
def test_a_call_in_a_capture_is_refused_before_anything_is_sent(ranks: Ranks, way: str) -> None:
    @tidy
    def program(comm: Comm, way: str, seed: int) -> None:
        stream = fakegpu.new_stream(0)
        for method in ("all_reduce", "all_gather", "broadcast"):
            for count in (8, NBYTES // 4):
                x = np.arange(count, dtype=np.int32)
                there = fakegpu.InterfaceArray(fakegpu.array(x))
                there.array.memory.stream = stream
                with fakegpu.context(0):
                    fake_cuda.capture(stream, True)
                with pytest.raises(pycoll.Error, match="a CUDA graph is being captured"):
                    call(comm, way, method, there)
                with fakegpu.context(0):
                    fake_cuda.capture(stream, False)
                assert comm.all_reduce(1) == comm.size
        got = call(comm, way, "all_reduce", fakegpu.array(x))
        equal(got, x * comm.size, "afterwards")

    ranks(program, way, 9)


DYING = """
x = fakegpu.array(np.ones(1 << 20, np.int32))
for _ in range(3):
    comm.all_reduce(x)
    comm.iall_reduce(x).wait()
if rank == {victim}:
    late = held(np.ones(1 << 20, np.int32))
    threading.Thread(target=lambda: comm.{call}(late), daemon=True).start()
    await_table(*[(other, "{name}") for other in range(size) if other != rank])
    os.kill(os.getpid(), signal.SIGKILL)
error = peer_failed({victim}, SIGKILL, lambda: [comm.{call}(x) for _ in range(2)])
ok()
"""


@pytest.mark.parametrize("how", few(["all_reduce, auto"], ["iall_reduce, auto", "reduce, tcp"]))
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_while_the_others_wait_for_it_is_named(
    gpu_job: Any, victim: int, how: str
) -> None:
    name, transport = how.split(", ")
    call = f"{name}(%s).wait()" if name[0] == "i" else f"{name}(%s)"
    text = DYING.replace("comm.{call}(late)", f"comm.{call % 'late'}")
    text = text.replace("comm.{call}(x)", f"comm.{call % 'x'}")
    text = text.format(victim=victim, name=name)
    done = gpu_job(3, gpu_jobs.ON_GPU + text, "--transport", transport)
    others = [rank for rank in range(3) if rank != victim]
    assert (done.status, done.content) == (137, others), done.stdout + done.stderr


@jobs("2", more=["2 by TCP"])
def test_a_rank_that_gives_up_finds_nothing_written_later(ranks: Ranks) -> None:
    @tidy
    def program(comm: Comm, seed: int) -> None:
        x, wanted, _ = case(comm, "all_reduce", "sum", "int32", NBYTES // 4)
        for late in range(2):
            with comm.dup() as mine:
                there, out = fakegpu.array(x), fakegpu.array(np.zeros_like(x))
                if comm.rank == late:
                    there, kernel = slow_array(x)
                    comm.recv(1 - late)  # the other has given up
                    kernel.release()
                    with pytest.raises(pycoll.Error):
                        mine.all_reduce(there, out=out)
                else:
                    with pytest.raises(pycoll.OperationTimeout):
                        mine.all_reduce(there, out=out, timeout=0.05)
                    comm.send("given up", late)
                fake_cuda.run_all()
                comm.barrier()
                equal(out, np.zeros_like(x), late)
            equal(comm.all_reduce(there), wanted, "on another communicator")

    ranks(program, 10)
