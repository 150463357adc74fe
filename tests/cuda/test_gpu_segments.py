"""Long values of GPUs, point to point: they travel in segments, and nobody notices."""

from __future__ import annotations

import os
import random
from typing import Any

import fake_cuda
import fakegpu
import gpu_jobs
import numpy as np
import pytest
from gpu_jobs import Comm, Ranks, equal, jobs, slow_array, tidy
from patience import PATIENCE
from tiers import few

import pycoll

ranks = gpu_jobs.ranks
gpu_job = gpu_jobs.gpu_job

STEP = 1 << 17
COUNT = (5 * STEP + 12) // 4
"""Elements: five segments, of which the last is longer."""

OFFERING_NOTHING = ("2 that offer nothing", "3 by TCP")


def cut(step: int = STEP) -> None:
    """Have this rank send short segments, and offer nothing."""
    from pycoll._gpu import segments

    segments.SEGMENT_NBYTES = step  # type: ignore[misc]
    os.environ["PYCOLL_CUDA_IPC"] = "0"


def around(comm: Comm) -> tuple[int, int]:
    """The ranks after and before this one."""
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


def values(rank: int, count: int = COUNT) -> np.ndarray[Any, Any]:
    return np.arange(count, dtype=np.float32) % 1009 + np.float32(10_000 * rank)


@pytest.mark.parametrize("seed", few([1], [2]))
@jobs(*OFFERING_NOTHING[:1], more=OFFERING_NOTHING[1:])
def test_every_length_arrives_in_every_place(ranks: Ranks, seed: int) -> None:
    @tidy
    def program(comm: Comm, seed: int) -> None:
        cut()
        after, before = around(comm)
        for count in [2 * STEP // 4 - 1, 2 * STEP // 4, 2 * STEP // 4 + 1, 3 * STEP // 4, COUNT]:
            x = fakegpu.array(values(comm.rank, count))
            wanted = values(before, count)
            wide = fakegpu.array(np.zeros((count, 2), np.float32))
            longer = fakegpu.array(np.full(count + 7, 5, np.float32))
            outs: list[Any] = [None, fakegpu.array(wanted * 0), np.zeros(count, np.float32)]
            outs += [wide[:, 1], np.zeros((2, count), np.float32).T[:, 0], longer]
            for out in outs:
                request, status = comm.isend(x, after, tag=3), pycoll.Status()
                got = comm.recv(before, tag=3, out=out, status=status)
                request.wait()
                assert status == pycoll.Status(before, 3, wanted.nbytes)
                assert out is None or got is out
                equal(got[:count] if out is longer else got, wanted, (count, type(out)))
            assert not wide.get()[:, 0].any()
            assert (longer.get()[count:] == 5).all()
            equal(comm.sendrecv(x, after, before), wanted, count)
            equal(comm.sendrecv(x, after, before, out=x), wanted, count)
            host = comm.isend(values(comm.rank, count), after)  # the host's go as ever
            equal(comm.recv(before, out=outs[1]), wanted, count)
            host.wait()

    ranks(program, seed)


@jobs("2 that offer nothing")
def test_segments_are_copied_one_by_one_and_once(ranks: Ranks) -> None:
    @tidy
    def program(comm: Comm, seed: int) -> dict[str, int]:
        cut()
        x, out = fakegpu.array(values(comm.rank)), fakegpu.array(values(9))
        fake_cuda.run_all()
        before = fake_cuda.stats()
        if comm.rank == 0:
            comm.send(x, 1)
        else:
            comm.recv(0, out=out)
        after = fake_cuda.stats()
        return {name: after[name] - before[name] for name in ("run", "h2d_bytes", "d2h_bytes")}

    sender, receiver = ranks(program, 1)
    copies = 5
    assert sender == {"run": copies, "h2d_bytes": 0, "d2h_bytes": 4 * COUNT}
    assert receiver == {"run": copies, "h2d_bytes": 4 * COUNT, "d2h_bytes": 0}


@pytest.mark.parametrize("seed", few([1], [2]))
@jobs(*OFFERING_NOTHING[:1], more=OFFERING_NOTHING[1:])
def test_messages_keep_their_order(ranks: Ranks, seed: int) -> None:
    @tidy
    def program(comm: Comm, seed: int) -> None:
        cut()
        after, before = around(comm)
        wanted = [values(number, [3, COUNT, 2 * STEP // 4][number % 3]) for number in range(9)]
        slow = [slow_array(x) for x in wanted]
        sent = [comm.isend(x, after, tag=number % 2) for number, (x, _) in enumerate(slow)]
        received = [comm.irecv(before) for _ in wanted]
        for _, kernel in reversed(slow):
            kernel.release()
        for number, request in enumerate(received):
            equal(request.wait(), wanted[number], number)
        pycoll.wait_all(sent)

    ranks(program, seed)


@jobs(*OFFERING_NOTHING[:1], more=OFFERING_NOTHING[1:])
def test_what_is_too_long_stays_and_is_probed_whole(ranks: Ranks) -> None:
    @tidy
    def program(comm: Comm, seed: int) -> None:
        cut()
        after, before = around(comm)
        request = comm.isend(fakegpu.array(values(comm.rank)), after)
        assert comm.probe(before).nbytes == 4 * COUNT
        with pytest.raises(pycoll.TruncationError, match=str(4 * COUNT)):
            comm.recv(before, out=fakegpu.array(values(0, COUNT - 1)))
        with pytest.raises(pycoll.MismatchError):
            comm.recv(before, out=fakegpu.array(np.zeros(COUNT, np.int32)))
        equal(comm.recv(before), values(before), "after that")
        request.wait()

    ranks(program, 1)


@pytest.mark.parametrize("seed", few([1], [2]))
@jobs(*OFFERING_NOTHING[:1], more=OFFERING_NOTHING[1:])
def test_a_receive_that_is_given_up_is_made_again(ranks: Ranks, seed: int) -> None:
    """Half-way, too: some segments are here, or on the GPU, and some not even sent."""

    @tidy
    def program(comm: Comm, seed: int) -> None:
        cut()
        after, before = around(comm)
        x = fakegpu.array(values(comm.rank))
        outs = [np.zeros(COUNT, np.float32), fakegpu.array(values(7)), None]
        for timeout, again in [(0.0, out) for out in outs] + [(0.002, out) for out in outs] * 5:
            busy, kernel = slow_array(values(8))
            request = comm.isend(x, after)
            with pytest.raises(pycoll.OperationTimeout):
                comm.recv(before, out=busy, timeout=timeout)
            kernel.release()
            fake_cuda.run_all()
            equal(busy, values(8), "what was given up")
            equal(comm.recv(before, out=again), values(before), timeout)
            request.wait()

    ranks(program, seed)


@pytest.mark.parametrize("seed", few([1], [2]))
@jobs(*OFFERING_NOTHING[:1], more=OFFERING_NOTHING[1:])
def test_a_send_that_is_given_up_is_not_received(ranks: Ranks, seed: int) -> None:
    @tidy
    def program(comm: Comm, seed: int) -> None:
        cut()
        after, before = around(comm)
        for number in range(4):
            x = fakegpu.array(values(comm.rank))
            with pytest.raises(pycoll.OperationTimeout):
                comm.send(x, after, tag=1, timeout=0.01)
            del x
            comm.barrier()
            assert comm.iprobe(before, 1) is None
            comm.barrier()
            request = comm.isend(fakegpu.array(values(number)), after, tag=1)
            equal(comm.recv(before, tag=1), values(number), number)
            request.wait()
            comm.barrier()
        context = comm._group.context
        assert not context._collecting, "receives of segments"

    ranks(program, seed)


@pytest.mark.parametrize("name", ["cuMemcpyDtoHAsync", "cuEventRecord"])
@jobs(*OFFERING_NOTHING[:1], more=OFFERING_NOTHING[1:])
def test_a_segment_that_cannot_be_read_fails_the_send_alone(ranks: Ranks, name: str) -> None:
    @tidy
    def program(comm: Comm, name: str, seed: int) -> list[str]:
        cut()
        seen = []
        for nth in range(1, 12):
            x = fakegpu.array(values(5))
            fake_cuda.run_all()
            if comm.rank == 0:
                fake_cuda.fail(f"{name}:{nth}:719")
                error = None
                try:
                    comm.isend(x, 1).wait(5 * PATIENCE)
                except (pycoll.TransportError, TypeError) as exc:
                    error = str(exc)
                    seen.append(error)
                fake_cuda.fail("")
                comm.send(error, 1, tag=9)
            elif comm.rank == 1:
                request = comm.irecv(0, tag=0)
                if comm.recv(0, tag=9) is None:
                    equal(request.wait(5 * PATIENCE), values(5), nth)
                else:
                    assert request.cancel(), "it waits for a message that is not there"
            comm.barrier()
        return seen

    seen = ranks(program, name, 3)[0]
    assert seen
    assert all("LAUNCH_FAILED" in text for text in seen)


@pytest.mark.parametrize("seed", few([1], [2]))
@jobs(*OFFERING_NOTHING[:1], more=OFFERING_NOTHING[1:])
def test_many_values_at_a_time(ranks: Ranks, seed: int) -> None:
    @tidy
    def program(comm: Comm, seed: int) -> None:
        cut()
        choose = random.Random(seed)  # the same on all ranks
        for _ in range(6):
            lengths = [choose.choice([5, 2 * STEP // 4, COUNT]) for _ in range(8)]
            ways = [choose.choice([(0, 1), (1, 0), (0, comm.size - 1)]) for _ in lengths]
            order = choose.sample(range(8), 8)
            requests = []
            for number, (length, (source, dest)) in enumerate(zip(lengths, ways, strict=True)):
                if comm.rank == source:
                    x = fakegpu.array(values(number, length))
                    requests.append(comm.isend(x, dest, tag=number))
            for number in order:
                source, dest = ways[number]
                if comm.rank == dest:
                    place = [None, np.zeros(lengths[number], np.float32)][number % 2]
                    got = comm.recv(source, tag=number, out=place)
                    equal(got, values(number, lengths[number]), number)
            pycoll.wait_all(requests)

    ranks(program, seed)


@pytest.mark.parametrize("transport", few(["shm"], ["tcp"]))
def test_a_sender_that_dies_in_the_middle_is_found_out(gpu_job: Any, transport: str) -> None:
    text = """
import fake_cuda, fakegpu
from pycoll._gpu import segments
segments.SEGMENT_NBYTES = 1 << 17
os.environ["PYCOLL_CUDA_IPC"] = "0"
x = fakegpu.array(np.zeros(1 << 20, np.float32))
if rank == 0:
    comm.isend(x, 1)
    comm.recv(1, tag=2)
    os.kill(os.getpid(), signal.SIGKILL)
comm.probe(0)
comm.send("die", 0, tag=2)
peer_failed(0, SIGKILL, lambda: [comm.recv(0) for _ in range(2)])
ok()
"""
    done = gpu_job(2, text, "--transport", transport)
    assert done.content == [1], done.stderr
