"""Collectives that move large arrays offer them to ranks that share a GPU: nothing is staged."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import fake_cuda
import fakegpu
import gpu_jobs
import numpy as np
import pytest
from cuda_ipc_jobs import (
    CUDA_IPC,
    NBYTES,
    anywhere,
    case,
    copied,
    directly,
    every_method_offers,
    fresh,
    inside,
    interface,
    meet,
    on_gpu,
    read_only,
)
from gpu_jobs import ON_GPU, WAYS, Comm, Ranks, call, dtype_of, equal, jobs, now, slow_array, tidy
from gpu_world import resident_nbytes
from tiers import few

import pycoll

ranks, gpu_job = gpu_jobs.ranks, gpu_jobs.gpu_job


@pytest.mark.parametrize("way", few(["blocking", "request"], ["persistent"]))
@jobs("3", more=("2 by TCP", "2", "4", "3 by TCP"))
def test_nothing_goes_through_the_host_and_every_byte_is_copied_once(
    ranks: Ranks, way: str
) -> None:
    @tidy
    def program(comm: Comm, way: str, seed: int) -> None:
        every_method_offers(comm, way)

    ranks(program, way, 1)


@pytest.mark.parametrize("way", few(["blocking"], ["request", "persistent"]))
@jobs("4 on 2 hosts")
def test_ranks_of_one_host_offer_and_hosts_do_not(ranks: Ranks, way: str) -> None:
    @tidy
    def program(comm: Comm, way: str, seed: int) -> None:
        with comm.split_by_host() as host:
            every_method_offers(host, way)
        for method in CUDA_IPC:
            x, wanted, kwargs = case(comm, method, 1)
            for algorithm in (None, "hierarchical"):
                if algorithm is not None and algorithm not in pycoll.algorithms(method):
                    continue
                got = call(comm, way, method, on_gpu(x), **kwargs, algorithm=algorithm)
                equal(got, wanted, (method, algorithm))

    ranks(program, way, 2)


@pytest.mark.parametrize("way", few(["blocking"], ["request", "persistent"]))
@jobs("2 that offer nothing")
def test_nothing_is_offered_where_the_user_says_so(ranks: Ranks, way: str) -> None:
    @tidy
    def program(comm: Comm, way: str, seed: int) -> None:
        for _ in range(5):
            for method in CUDA_IPC:
                x, wanted, kwargs = case(comm, method, 1)
                there = on_gpu(x)
                got, (_, up, on) = copied(comm, call, comm, way, method, there, **kwargs)
                equal(got, wanted, method)
                own = NBYTES * (2 if way == "persistent" else 1)
                assert on <= own, method
                assert (up >= own) == (got is not None and got is not there), method

    ranks(program, way, 3)


@pytest.mark.parametrize("way", WAYS[:2])
@jobs("2", more=["2 by TCP"])
def test_in_place(ranks: Ranks, way: str) -> None:
    @tidy
    def program(comm: Comm, way: str, seed: int) -> None:
        meet(comm)
        x, wanted, _ = case(comm, "all_gather", 0)
        assert x is not None
        assert wanted is not None
        out = fakegpu.array(np.zeros_like(wanted))
        out[comm.rank].copy_from(fakegpu.array(x))
        _, counts = copied(comm, call, comm, way, "all_gather", out[comm.rank], out=out)
        equal(out, wanted, "all_gather")
        assert counts == [0, 0, NBYTES * (comm.size - 1)]
        x, wanted, _ = case(comm, "all_to_all", 0)
        assert x is not None
        for _ in range(3):
            out = fakegpu.array(x)
            assert call(comm, way, "all_to_all", out, out=out) is out
            equal(out, wanted, "all_to_all")

    ranks(program, way, 4)


@pytest.mark.parametrize("dtype", few(["bfloat16"], ["int8", "float64", "complex128"]))
@jobs("3 by TCP", more=["2"])
def test_a_block_of_1_mib_is_offered_and_one_element_less_is_not(ranks: Ranks, dtype: str) -> None:
    @tidy
    def program(comm: Comm, dtype: str, seed: int) -> None:
        meet(comm)
        whole = NBYTES // dtype_of(dtype).itemsize
        for method, way, more in itertools.product(CUDA_IPC, WAYS[:2], (-1, 0, 1)):
            x, wanted, kwargs = case(comm, method, 0, whole + more, dtype=dtype)
            there = on_gpu(x)
            kwargs |= directly(method, way)
            got, (down, up, on) = copied(comm, call, comm, way, method, there, **kwargs)
            where = method, way, more
            equal(got, wanted, where)
            if more < 0:
                assert on == 0, where
                assert down + up > 0 or (x is None and wanted is None), where
            else:
                assert down + up == 0, where

    ranks(program, dtype, 5)


@pytest.mark.parametrize("put", [inside, read_only, interface], ids=lambda put: put.__name__)
@jobs("3")
def test_what_lies_in_one_piece_is_offered_however_it_came(ranks: Ranks, put: Any) -> None:
    @tidy
    def program(comm: Comm, put: Any, seed: int) -> None:
        meet(comm)
        for method, way in itertools.product(CUDA_IPC, WAYS[:2]):
            x, wanted, kwargs = case(comm, method, 1)
            there = None if x is None else put(x)
            if put is not read_only and wanted is not None and method != "broadcast":
                kwargs |= {"out": put(np.zeros_like(wanted))}
            kwargs |= directly(method, way)
            got, counts = copied(comm, call, comm, way, method, there, **kwargs)
            equal(got, wanted, (method, way))
            assert counts[:2] == [0, 0], (method, way)

    ranks(program, put, 6)


# --- whatever ranks differ in --------------------------------------------------------------------


@pytest.mark.parametrize("seed", few([0], [1]))
@jobs("4", more=["3 by other algorithms", "2", "3 by TCP", "4 on 2 hosts"])
def test_ranks_may_differ_in_all_but_the_call(ranks: Ranks, seed: int) -> None:
    @tidy
    def program(comm: Comm, seed: int) -> None:
        anywhere(comm, seed, 12)

    ranks(program, seed)


@pytest.mark.parametrize("way", few(["request"], ["blocking"]))
@jobs("3 by other algorithms", more=["4"])
def test_every_algorithm_is_right_for_arrays_that_could_be_offered(ranks: Ranks, way: str) -> None:
    @tidy
    def program(comm: Comm, way: str, seed: int) -> None:
        for method in CUDA_IPC:
            # Of a broadcast also the pieces are long.
            nbytes = NBYTES * (comm.size if method == "broadcast" else 1)
            x, wanted, kwargs = case(comm, method, 1, nbytes)
            for algorithm in (None, *pycoll.algorithms(method)):
                try:
                    got = call(comm, way, method, on_gpu(x), **kwargs, algorithm=algorithm)
                except ValueError:
                    assert algorithm in ("shared_memory", "ring_2d"), algorithm
                    continue
                equal(got, wanted, (method, algorithm, way), fakegpu.Array if got else None)

    ranks(program, way, 7)


@pytest.mark.parametrize("transport", few(["shm"], ["tcp"]))
def test_the_first_calls_are_right_while_nobody_has_answered(gpu_job: Any, transport: str) -> None:
    """Also in other communicators, with many under way; then nothing is staged any more."""
    text = """
import cuda_ipc_jobs as t
seed = 5
fake_cuda.seed(rank)
comms = [comm, comm.dup(), comm.split(0, -rank)]
pending = []
for mine, method in [(mine, method) for method in t.CUDA_IPC for mine in comms]:
    x, wanted, kwargs = t.case(mine, method, 0)
    pending.append((getattr(mine, "i" + method)(t.on_gpu(x), **kwargs), wanted, method))
    x, wanted, kwargs = t.case(comms[1], method, 0)
    t.equal(getattr(comms[1], method)(t.on_gpu(x), **kwargs), wanted, method)
for request, wanted, method in pending:
    t.equal(request.wait(), wanted, method)
for mine in comms:
    t.every_method_offers(mine, "blocking")
assert fake_cuda.stats()["illegal_accesses"] == fake_cuda.stats()["ipc_opened"] == 0
ok()
"""
    done = gpu_job(3, ON_GPU + text, "--transport", transport)
    assert done.content == [0, 1, 2], done.stderr


def test_a_rank_that_comes_to_its_gpu_late_is_offered_arrays_from_then_on(gpu_job: Any) -> None:
    text = """
import cuda_ipc_jobs as t
from gpu_jobs import now
for _ in range(5):
    for method in t.CUDA_IPC:
        x, wanted, kwargs = t.case(comm, method, 0)
        got = getattr(comm, method)(x if rank else t.on_gpu(x), **kwargs)
        assert wanted is None or (now(got) == wanted).all()
t.every_method_offers(comm, "request")
ok()
"""
    done = gpu_job(2, ON_GPU + text)
    assert done.content == [0, 1], done.stderr


# --- order ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("slow", ["x", "out"])
@pytest.mark.parametrize("seed", few([0], [1]))
@jobs("3 by TCP", more=["2"])
def test_what_an_array_is_still_used_for_comes_first(ranks: Ranks, slow: str, seed: int) -> None:
    """Who computes x is not overtaken; nor who reads what `out` held."""

    @tidy
    def program(comm: Comm, slow: str, seed: int) -> None:
        meet(comm)
        for method, way, late in itertools.product(CUDA_IPC, WAYS[:2], (0, comm.size - 1)):
            x, wanted, kwargs = case(comm, method, 0)
            there, out, kernel = on_gpu(x), on_gpu(wanted), None
            if wanted is not None:
                out = fakegpu.array(np.zeros_like(wanted))
            if comm.rank == late and slow == "x" and x is not None:
                there, kernel = slow_array(x)
            if comm.rank == late and slow == "out" and wanted is not None:
                out, kernel = slow_array(np.zeros_like(wanted))
            if method == "broadcast":
                there = out if x is None else there
                if kernel is not None and x is not None and slow == "out":
                    kernel.release()  # the root has none
                    kernel = None
            elif out is not None:
                kwargs = {**kwargs, "out": out}
            if way == "blocking":
                if kernel is not None:
                    kernel.release_soon()
                got = getattr(comm, method)(there, **kwargs)
            else:
                request = getattr(comm, f"i{method}")(there, **kwargs)
                if kernel is not None:
                    for _ in range(3):
                        assert not request.test(), (method, late)
                        fake_cuda.run_all()
                    kernel.release()
                got = request.wait()
            equal(got, wanted, (method, way, late))
            del out, there, got

    ranks(program, slow, seed)


@pytest.mark.parametrize("way", few(["blocking", "request"], ["persistent"]))
@jobs("3", more=["2 by TCP"])
def test_x_may_be_overwritten_and_the_result_read_when_the_call_returns(
    ranks: Ranks, way: str
) -> None:
    @tidy
    def program(comm: Comm, way: str, seed: int) -> None:
        meet(comm)
        for turn, method in itertools.product(range(3), CUDA_IPC):
            x, wanted, kwargs = case(comm, method, turn % comm.size)
            there = on_gpu(x)
            got = call(comm, way, method, there, **kwargs)
            seen = None if got is None else now(got)  # before anything else can run
            if there is not None and got is not there:
                fakegpu.use_stream(fakegpu.new_stream())
                there.fill(0xEE)
                del there
                fake_cuda.run_all()
            equal(seen, wanted, (method, way))

    ranks(program, way, 8)


@jobs("3 by TCP", more=["2"])
def test_x_may_die_when_the_request_is_made(ranks: Ranks) -> None:
    @tidy
    def program(comm: Comm, seed: int) -> None:
        meet(comm)
        requests = []
        for method in CUDA_IPC * 2:
            x, wanted, kwargs = case(comm, method, 1)
            requests.append((getattr(comm, f"i{method}")(on_gpu(x), **kwargs), wanted, method))
            again = fakegpu.empty((NBYTES,), "uint8")
            again.fill(0xEE)
        for request, wanted, method in reversed(requests):
            equal(request.wait(), wanted, method)

    ranks(program, 9)


@jobs("2", more=["2 by TCP"])
def test_two_threads_offer_at_once(ranks: Ranks) -> None:
    @tidy
    def program(comm: Comm, seed: int) -> None:
        meet(comm)
        errors: list[BaseException] = []

        def work(mine: Comm, number: int) -> None:
            try:
                anywhere(mine, number, 10)
                for way in WAYS:
                    for method in CUDA_IPC:
                        x, wanted, kwargs = case(mine, method, number)
                        got = call(mine, way, method, on_gpu(x), **kwargs)
                        equal(got, wanted, (number, method))
            except BaseException as exc:
                errors.append(exc)
                mine.close()

        comms = [comm.dup(), comm.dup()]
        threads = [threading.Thread(target=work, args=(c, n)) for n, c in enumerate(comms)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        for mine in comms:
            mine.close()

    ranks(program, 10)


@pytest.mark.parametrize("times", few([12], [160]))
@jobs("2")
def test_many_calls_leave_nothing_behind(ranks: Ranks, times: int) -> None:
    @tidy
    def program(comm: Comm, times: int, seed: int) -> None:
        meet(comm)
        cases = []
        for method in CUDA_IPC:
            x, wanted, kwargs = case(comm, method, 0)
            if wanted is not None and method != "broadcast":
                kwargs = {**kwargs, "out": fresh(wanted)}
            cases.append((method, on_gpu(x), kwargs))

        def some(turns: int) -> tuple[dict[str, int], int]:
            for _ in range(turns):
                for method, there, kwargs in cases:
                    getattr(comm, method)(there, **kwargs)
                    getattr(comm, f"i{method}")(there, **kwargs).wait()
            return fake_cuda.stats(), resident_nbytes()

        (before, rss_before), (after, rss) = some(times // 4), some(times)
        for name in ("allocations", "registered", "streams", "events", "ipc_opened"):
            assert after[name] <= before[name] + 2, (name, before, after)
        assert after["ipc_opened"] == 0
        assert rss < rss_before + (8 << 20), f"grew by {rss - rss_before} bytes"

    ranks(program, times, 11)
