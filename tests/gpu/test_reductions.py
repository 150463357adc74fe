"""Large reductions of PyTorch's tensors stay on the GPU, and give the bits of the processor."""

from __future__ import annotations

import random
import time
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from gpu_world import TCP, VARIABLES

import pycoll
from pycoll import _dtypes as dtypes
from pycoll._gpu import kernel_run, kernels
from pycoll._transports._core import OPS, reduce

Comm = Any
Ranks = Any
Tensor = torch.Tensor

NBYTES = 1 << 20
UNKNOWN = {"uint16", "uint32", "uint64"}  # PyTorch computes little with these
TYPES = [dtype for dtype in dtypes.TABLE if dtype.name not in UNKNOWN]
COLLECTIVES = "all_reduce", "reduce", "reduce_scatter"


def worlds(*sizes: int, options: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    given = [(size, options, VARIABLES) for size in sizes]
    names = [f"{size}{options[-1] if options else ''}" for size in sizes]
    return pytest.mark.parametrize("ranks", given, indirect=True, scope="module", ids=names)


def drawn(seed: int, dtype: dtypes.DType, count: int) -> np.ndarray[Any, Any]:
    """Bits at random, as every rank knows them: NaN, infinities and subnormals are among them."""
    rng = np.random.default_rng([seed, dtype.code])
    if dtype.name == "bool":
        return rng.integers(0, 2, count).astype(np.uint8)
    data = np.frombuffer(rng.bytes(count * dtype.itemsize), np.uint8).copy()
    if dtype.family in ("f", "c"):  # not always NaN or huge
        part = dtype.itemsize // (2 if dtype.family == "c" else 1)
        small = rng.integers(-9, 9, data.size // part)
        kind = {2: np.float16, 4: np.float32, 8: np.float64}[part]
        if dtype.name == "bfloat16":
            numbers = (small.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        else:
            numbers = small.astype(kind)
        words = data.view(f"u{part}")
        chosen = rng.random(words.size) < 0.5
        words[chosen] = numbers.view(f"u{part}")[chosen]
    return data


def tensor(data: np.ndarray[Any, Any], dtype: dtypes.DType, at: int = 0) -> Tensor:
    """On the GPU, so many elements behind the beginning of an allocation."""
    kind = getattr(torch, dtype.name)
    host = torch.from_numpy(data).view(kind) if data.size else torch.empty(0, dtype=kind)
    whole = torch.empty(len(host) + at + 5, dtype=host.dtype, device="cuda")
    view = whole[at : at + len(host)]
    view.copy_(host)
    return view


def wanted(op: str, dtype: dtypes.DType, xs: list[np.ndarray[Any, Any]]) -> bytes:
    out = np.empty_like(xs[0])
    reduce(OPS.index(op), dtype.code, out, xs, len(xs))
    return out.tobytes()


def bits(x: Tensor) -> bytes:
    return bytes(x.cpu().view(torch.uint8).numpy().tobytes()) if x.numel() else b""


def check(
    comm: Comm,
    method: str,
    op: str,
    dtype: dtypes.DType,
    count: int,
    way: str = "blocking",
    at: int = 0,
    out: str = "new",
) -> None:
    """Compare with the core: each rank computes all alone."""
    me, size = comm.rank, comm.size
    rows = size if method == "reduce_scatter" else 1
    xs = [drawn(count + rank, dtype, count * rows) for rank in range(size)]
    x = tensor(xs[me], dtype, at)
    kwargs: dict[str, Any] = {}
    if method == "reduce_scatter":
        x = x.reshape(size, count)
        nbytes = count * dtype.itemsize
        xs = [one[me * nbytes : (me + 1) * nbytes] for one in xs]
    if method == "reduce":
        kwargs["root"] = size - 1
    has_result = method != "reduce" or me == size - 1
    if out == "own" and has_result:
        kwargs["out"] = tensor(drawn(0, dtype, count), dtype, at)
    if out == "x" and has_result:
        kwargs["out"] = x[me] if method == "reduce_scatter" else x
    call = getattr(comm, method if way == "blocking" else f"i{method}")
    got = call(x, op, **kwargs)
    got = got if way == "blocking" else got.wait()
    where = (method, op, dtype.name, count, way, at, out)
    if not has_result:
        assert got is None, where
        return
    assert out == "new" or got is kwargs["out"], where
    assert bits(got) == wanted(op, dtype, xs), where


def is_on_gpu(comm: Comm) -> None:
    """Every rank of the job has kernels, and can reach the others."""
    assert kernel_run._programs, "no call has stayed on the GPU"
    assert None not in kernel_run._programs.values(), kernel_run._why_not
    assert not comm._group.context.stays_off_gpus


@worlds(2, 3)
def test_every_operator_and_dtype_gives_the_bits_of_the_core(ranks: Ranks) -> None:
    def program(comm: Comm) -> None:
        for dtype in TYPES:
            for index, op in enumerate(OPS):
                if kernels.has(op, dtype):
                    count = NBYTES // dtype.itemsize + index % 4
                    check(comm, COLLECTIVES[index % 3], op, dtype, count, at=index % 2)
        is_on_gpu(comm)

    ranks(program)


@worlds(2, 4)
def test_every_length_and_place_gives_the_bits_of_the_core(ranks: Ranks) -> None:
    def program(comm: Comm) -> None:
        for dtype in (dtypes.FLOAT32, dtypes.BFLOAT16):
            for count in (0, 1, 5, 1000):  # these are staged
                check(comm, "all_reduce", "sum", dtype, count)
            least = NBYTES // dtype.itemsize
            for count in (least - 1, least, least + 1, 3 * least + 7, 9 * least, 17 * least + 3):
                for out in ("new", "own", "x"):
                    check(comm, "all_reduce", "sum", dtype, count, "blocking", count % 3, out)
                    if count >= least:  # by messages, others are combined in another order
                        check(comm, "all_reduce", "sum", dtype, count, "i", count % 3, out)
            for method in COLLECTIVES[1:]:
                for out in ("new", "own", "x"):
                    check(comm, method, "sum", dtype, least + 3, "i", 1, out)
                    check(comm, method, "sum", dtype, least + 3, "blocking", 0, out)
        is_on_gpu(comm)

    ranks(program)


@worlds(2, options=TCP)
def test_it_stays_on_the_gpu_whatever_the_transport(ranks: Ranks) -> None:
    def program(comm: Comm) -> None:
        for way in ("blocking", "i"):
            for method in COLLECTIVES:
                check(comm, method, "avg", dtypes.FLOAT32, NBYTES, way)
        is_on_gpu(comm)

    ranks(program)


@worlds(3)
def test_ranks_with_arrays_elsewhere_are_waited_for_and_agree(ranks: Ranks) -> None:
    def program(comm: Comm) -> None:
        x = np.arange(NBYTES, dtype=np.float32)
        for way in ("blocking", "i"):
            for odd in ("NumPy", "strided"):
                there: Any = torch.from_numpy(x).cuda()
                if comm.rank == 1 and odd == "NumPy":
                    there = x
                elif comm.rank == 1:
                    there = torch.from_numpy(np.repeat(x, 2)).cuda()[::2]
                call = comm.all_reduce if way == "blocking" else comm.iall_reduce
                got = call(there)
                got = got if way == "blocking" else got.wait()
                got = got if isinstance(got, np.ndarray) else got.cpu().numpy()
                np.testing.assert_array_equal(got, 3 * x)

    ranks(program)


@worlds(2)
def test_what_another_stream_computes_is_waited_for(ranks: Ranks) -> None:
    def program(comm: Comm) -> None:
        for way in ("blocking", "i"):
            x = torch.zeros(NBYTES, device="cuda")
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.cuda._sleep(200_000_000)
                x.fill_(comm.rank + 1.0)
                got = comm.all_reduce(x) if way == "blocking" else comm.iall_reduce(x).wait()
            other = torch.cuda.Stream()
            with torch.cuda.stream(other):
                assert bool((got == 3.0).all())
                x.fill_(-1.0)  # the others have read it

    ranks(program)


@worlds(2)
def test_a_call_in_a_capture_is_refused_before_anything_is_sent(ranks: Ranks) -> None:
    def program(comm: Comm) -> None:
        for count in (10, NBYTES):
            x = torch.ones(count, device="cuda")
            out = torch.empty_like(x)
            comm.all_reduce(x, out=out)
            for _ in range(2):
                if comm.rank == 0:  # the others do not even notice
                    refused = torch.cuda.CUDAGraph()
                    with (
                        warnings.catch_warnings(action="ignore"),  # the graph is empty
                        pytest.raises(pycoll.Error, match="CUDA graph"),
                        torch.cuda.graph(refused),
                    ):
                        comm.all_reduce(x, out=out)
                    torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    out.add_(x)
                graph.replay()
                assert bool((comm.all_reduce(x, out=out) == 2.0).all())
                assert bool((comm.iall_reduce(x).wait() == 2.0).all())

    ranks(program)


@worlds(2)
def test_memory_that_comes_and_goes_is_reached_afresh(ranks: Ranks) -> None:
    def program(comm: Comm) -> None:
        for turn in range(40):
            x = torch.full((NBYTES + turn * 300_000,), float(turn + comm.rank), device="cuda")
            assert bool((comm.all_reduce(x) == 2.0 * turn + 1).all())
            assert bool((comm.iall_reduce(x, out=x).wait() == 2.0 * turn + 1).all())
            del x
            if turn % 3 == 0:
                torch.cuda.empty_cache()

    ranks(program)


@worlds(2, 3)
def test_random_programs(ranks: Ranks) -> None:
    def program(comm: Comm) -> None:
        common = random.Random(7)
        end = time.monotonic() + 10
        while comm.broadcast(time.monotonic() < end):
            dtype = common.choice(TYPES)
            op = common.choice([op for op in OPS if kernels.has(op, dtype)])
            count = common.choice([1, 1000, NBYTES, 2 * NBYTES + 5]) // common.choice([1, 2, 4])
            method, way = common.choice(COLLECTIVES), common.choice(["blocking", "i"])
            at, out = common.randrange(3), common.choice(["new", "own", "x"])
            if count * dtype.itemsize < NBYTES and way == "i":
                continue  # by messages these are combined in another order
            check(comm, method, op, dtype, count, way, at, out)

    ranks(program)


SCRIPT = """
import torch
torch.cuda.set_device(0)
x = torch.ones(4 << 20, device="cuda")
for turn in range(20):
    comm.all_reduce(x)
if rank == 1:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(400_000_000)
        x.add_(1)
        request = comm.iall_reduce(x)
    os.kill(os.getpid(), signal.SIGKILL)
peer_failed(1, SIGKILL, lambda: [comm.{call} for turn in range(9)])
ok()
"""


@pytest.mark.parametrize("call", ["all_reduce(x)", "iall_reduce(x).wait()"])
def test_a_rank_that_dies_in_the_middle_is_named(job: Any, call: str) -> None:
    ended = job(3, SCRIPT.format(call=call))
    assert (ended.status, ended.content) == (137, [0, 2]), ended
