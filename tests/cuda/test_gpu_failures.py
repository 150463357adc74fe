"""Arrays on GPUs between ranks: errors of CUDA, and the end of a rank or of a call."""

from __future__ import annotations

import contextlib
import signal
import time
from typing import Any

import fake_cuda
import gpu_jobs
import pytest
from gpu_jobs import (
    LARGE,
    ON_GPU,
    Comm,
    Ranks,
    arguments,
    convert,
    jobs,
    laid_out,
    numbers,
    tidy,
)
from patience import PATIENCE
from tiers import few, smoke

import pycoll

ranks, gpu_job = gpu_jobs.ranks, gpu_jobs.gpu_job


# --- errors ------------------------------------------------------------------------------------

ALONE_S = 0.5
"""A rank whose neighbor has failed before anything was sent waits so long for it."""

# Not what takes something back: what such a call fails to do stays undone.
FALLIBLE = ["cuCtxPushCurrent", "cuStreamCreate", "cuEventCreate", "cuEventRecord"]
FALLIBLE += ["cuStreamWaitEvent", "cuMemHostRegister", "cuMemAlloc", "cuMemcpyDtoHAsync"]
FALLIBLE += ["cuMemcpyHtoDAsync", "cuMemcpy2DAsync", "cuEventQuery", "cuEventSynchronize"]
FALLIBLE += ["cuIpcGetMemHandle", "cuMemGetAddressRange", "cuIpcOpenMemHandle"]
FALLIBLE += ["cuMemcpyDtoDAsync", "cuPointerGetAttribute"]


@pytest.mark.parametrize("name", few(FALLIBLE[::8], sorted({*FALLIBLE} - {*FALLIBLE[::8]})))
@jobs("2")
def test_an_error_of_cuda_is_told_and_nobody_hangs(ranks: Ranks, name: str) -> None:
    """Rank 0's n-th call of a function fails, for each n that a method gets to."""

    @tidy
    def program(comm: Comm, name: str, seed: int) -> list[str]:
        seen = []
        cases = [("all_reduce", 10), ("all_reduce", LARGE), ("iall_reduce", 10)]
        cases += [("iall_reduce", LARGE), ("sendrecv", 10), ("sendrecv", LARGE), ("ibroadcast", 10)]
        cases += [
            ("all_to_all", 3000),
            ("all_reduce_many", 10),
            ("all_gatherv", 10),
            ("isend", LARGE),
        ]
        layout = "columns" if name == "cuMemcpy2DAsync" else "C"
        for method, count in cases:
            for nth in range(1, 40):
                mine = comm.dup()
                base = method.removeprefix("i")
                if base == "send":
                    args: Any = (numbers(comm.rank, (2, count)), 1 - comm.rank)
                    kwargs: Any = {}
                else:
                    args, kwargs = arguments(base, comm.rank, comm.size, (2, count), "float32")
                there = convert(args[0], lambda x, as_=layout: laid_out(x, as_)[0])
                fake_cuda.run_all()
                if comm.rank == 0:
                    fake_cuda.fail(f"{name}:{nth}:719")
                error = None
                start = time.monotonic()
                try:
                    if base == "send":
                        request = mine.isend(there, *args[1:])
                        mine.recv(1 - comm.rank, timeout=ALONE_S)
                        request.wait(ALONE_S)
                    elif base != method:
                        getattr(mine, method)(there, *args[1:], **kwargs).wait(4 * PATIENCE)
                    else:
                        limit = ALONE_S if base == "sendrecv" else 4
                        getattr(mine, method)(there, *args[1:], **kwargs, timeout=limit)
                except (pycoll.Error, TypeError, RuntimeError) as exc:  # the last: fakegpu's own
                    error = exc
                finally:
                    fake_cuda.fail("")
                case = f"{method} {count} {layout} {name}:{nth}"
                assert not fake_cuda.stats()["illegal_accesses"], case
                if error is not None and comm.rank == 0:
                    assert "LAUNCH_FAILED" in str(error), (case, error)
                # A collective that failed breaks the communicator, or one rank alone has no
                # result: then all go on. Whatever it is, ranks find out without a deadline.
                if error is not None and comm.rank == 0:
                    seen.append(f"{case}: {error!r}")
                if base in ("send", "sendrecv"):
                    if error is not None and comm.rank == 0:
                        mine.revoke() if hasattr(mine, "revoke") else None
                else:
                    assert not isinstance(error, pycoll.OperationTimeout), (case, error)
                    with contextlib.suppress(pycoll.Error):
                        mine.barrier(timeout=4)
                took = time.monotonic() - start
                if base not in ("send", "sendrecv"):
                    assert took < 4, (case, took, error)
                mine.close()
                del there, args
                error = None
                failed = comm.broadcast(bool(seen) and seen[-1].startswith(case + ":"), root=0)
                if not failed:
                    break
        return seen

    ranks(program, name, 21)


# --- the end of a rank, or of a call -------------------------------------------------------------

LARGE_ARRAY = f"np.arange({LARGE}, dtype=np.int32)"


@pytest.mark.parametrize("transport", few(["shm"], ["tcp"]))
@pytest.mark.parametrize("dies", ["the sender", "the receiver"])
def test_a_rank_that_dies_in_a_transfer_is_found_out(
    gpu_job: Any, transport: str, dies: str
) -> None:
    text = f"""{ON_GPU}
x = fakegpu.array({LARGE_ARRAY})
if rank == {int(dies == "the receiver")}:
    request = comm.isend(held({LARGE_ARRAY}), 1 - rank) if rank == 0 else comm.irecv(0, 0)
    if rank:
        comm.send("ready", 0, tag=5)
        comm.recv(0, tag=6)  # else it might be lost with this rank
    os.kill(os.getpid(), signal.SIGKILL)
if rank == 0:
    comm.recv(1, tag=5)
    comm.send("go", 1, tag=6)
    def sending():
        while True:
            comm.send(x, 1)
    peer_failed(1, SIGKILL, sending)
else:
    out = fakegpu.array({LARGE_ARRAY})
    peer_failed(0, SIGKILL, comm.recv, 0, out=out)
    assert (out.get() == {LARGE_ARRAY}).all()
peer_failed(1 - rank, SIGKILL, comm.all_reduce, x)
ok()
"""
    done = gpu_job(2, text, "--transport", transport)
    assert done.content == [int(dies == "the sender")], done.stderr
    assert done.status == 128 + signal.SIGKILL


@smoke
def test_a_rank_that_dies_in_a_collective_is_found_out(gpu_job: Any) -> None:
    text = f"""{ON_GPU}
x = fakegpu.array({LARGE_ARRAY})
for _ in range(3):
    comm.all_reduce(x, out=x)
if rank == 1:
    request = comm.iall_reduce(x)
    os.kill(os.getpid(), signal.SIGKILL)
def reducing():
    while True:
        comm.iall_reduce(x).wait()
peer_failed(1, SIGKILL, reducing)
fake_cuda.run_all()
assert fake_cuda.stats()["illegal_accesses"] == 0
ok()
"""
    done = gpu_job(3, text)
    assert done.content == [0, 2], done.stderr


@pytest.mark.parametrize(
    "call", few(["all_reduce(x)", "iall_reduce(x).wait()"], ["send(x, 1 - rank)"])
)
@pytest.mark.parametrize("what", few(["x"], ["out"]))
def test_ctrl_c_ends_a_call_that_waits_for_the_gpu(gpu_job: Any, call: str, what: str) -> None:
    if what == "out":
        call = {
            "all_reduce(x)": "all_reduce(np.ones(100), out=x)",
            "send(x, 1 - rank)": "sendrecv(np.ones(100), 1 - rank, out=x)",
            "iall_reduce(x).wait()": "iall_reduce(np.ones(100), out=x).wait()",
        }[call]
    text = f"""{ON_GPU}
other = comm.dup()
x = held(np.ones(100))
threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT]).start()
error = error_of(lambda: comm.{call})
assert isinstance(error, (KeyboardInterrupt, pycoll.Error)), repr(error)
if isinstance(error, pycoll.Error):
    # Its own is still to come; one long sleep does not see it, if it comes right before.
    error_of(lambda: [time.sleep(0.01) for _ in range(1000)])
y = fakegpu.array(np.ones(3))
assert (other.all_reduce(y).get() == 2).all()
ok()
"""
    done = gpu_job(2, text, "--timeout", "20")
    assert done.content == [0, 1], done.stderr
    assert done.status == 0


def test_a_child_of_fork_is_told_that_it_has_no_gpu(gpu_job: Any) -> None:
    text = f"""{ON_GPU}
x = fakegpu.array(np.arange(5))
result = comm.all_reduce(x)
pid = os.fork()
if pid == 0:
    try:
        comm.all_reduce(x)
    except pycoll.Error:
        del result, x
        gc.collect()
        os._exit(0)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert (result.get() == 2 * np.arange(5)).all()
assert (comm.all_reduce(x).get() == 2 * np.arange(5)).all()
assert fake_cuda.stats()["illegal_accesses"] == 0
ok()
"""
    done = gpu_job(2, text)
    assert done.content == [0, 1], done.stderr


def test_finalize_and_close_do_not_wait_for_the_gpu(gpu_job: Any) -> None:
    text = f"""{ON_GPU}
mine = comm.dup()
requests = [mine.iall_reduce(held(np.ones(10))), mine.isend(held(np.ones(10)), 1 - rank)]
requests += [mine.irecv(1 - rank, out=held(np.ones(10)))]
start = time.monotonic()
mine.close()
assert time.monotonic() - start < 2
requests += [comm.iall_reduce(held(np.ones({LARGE}))), comm.isend(held(np.ones(10)), 1 - rank)]
requests += [comm.iall_reduce(fakegpu.array(np.ones(10)))]
assert (requests[-1].wait().get() == 2).all()
pycoll.finalize()
assert time.monotonic() - start < 8
for request in requests[3:5]:
    error_like(pycoll.Error, "finalize", request.wait)
ok()
"""
    done = gpu_job(2, text)
    assert done.content == [0, 1], done.stderr
    assert done.status == 0


def test_what_was_accepted_for_sending_is_delivered_by_finalize(gpu_job: Any) -> None:
    text = f"""{ON_GPU}
if rank == 0:
    for number in range(5):
        comm.isend(fakegpu.array(np.full(100, number)), 1)
    pycoll.finalize()
else:
    for number in range(5):
        assert (comm.recv(0).get() == number).all()
ok()
"""
    done = gpu_job(2, text)
    assert done.content == [0, 1], done.stderr


def test_finalize_waits_for_what_is_still_computed(gpu_job: Any) -> None:
    """And what was sent after it does not go before it."""
    text = f"""{ON_GPU}
if rank == 0:
    first, kernel = computing(np.full(100, 1))
    comm.isend(first, 1)
    comm.isend(np.full(100, 2), 1)
    comm.isend(fakegpu.array(np.full(100, 3)), 1)
    threading.Timer(0.2, fake_cuda.release, [kernel]).start()
    pycoll.finalize()
else:
    assert [int(np.asarray(getattr(x, "get", lambda: x)())[0])
            for x in (comm.recv(0) for _ in range(3))] == [1, 2, 3]
ok()
"""
    done = gpu_job(2, text)
    assert done.content == [0, 1], done.stderr


def test_what_never_comes_from_its_gpu_is_not_sent_and_nothing_after_it(gpu_job: Any) -> None:
    text = f"""{ON_GPU}
if rank == 0:
    comm.isend(held(np.full(100, 1)), 1)
    comm.isend(np.full(100, 2), 1)
    pycoll.finalize()
    os._exit(0)
else:
    peer_failed(0, "exit status 0", comm.recv, 0, within=10)
ok()
"""
    done = gpu_job(2, text)
    assert done.content == [1], done.stderr


def test_a_send_with_a_deadline_that_leaves_late_is_withdrawn(gpu_job: Any) -> None:
    """Whatever other calls have begun since: only what is never withdrawn is sent ahead."""
    text = f"""{ON_GPU}
if rank == 0:
    first, kernel = computing(np.full(100, 1))
    turns, found = comm._group.context.turns, []
    comm.isend(first, 1, 1)
    before = turns[1]

    def late():
        try:
            comm.send(np.full(25_000, 2.0), 1, 2, timeout=1.0)
        except pycoll.OperationTimeout:
            found.append("withdrawn")

    thread = threading.Thread(target=late)
    thread.start()
    while turns[1] is before:
        time.sleep(0.001)
    comm.isend(fakegpu.array(np.full(100, 3)), 1, 3)
    fake_cuda.release(kernel)
    thread.join()
    assert found == ["withdrawn"]
    comm.send("over", 1, 4)
else:
    assert comm.recv(0, 4) == "over"
    assert comm.iprobe(0, 2) is None
    assert (comm.recv(0, 1).get() == 1).all() and (comm.recv(0, 3).get() == 3).all()
ok()
"""
    done = gpu_job(2, text, "--transport", "tcp")
    assert done.content == [0, 1], done.stderr


def test_a_program_may_end_without_a_word(gpu_job: Any) -> None:
    text = f"""{ON_GPU}
x = fakegpu.array(np.ones({LARGE}))
keep = [comm.all_reduce(x), comm.iall_reduce(x).wait(), comm.persistent.all_reduce(x)]
keep.append(keep)
ok()
"""
    done = gpu_job(2, text)
    assert (done.content, done.stderr, done.status) == ([0, 1], "", 0)


@pytest.mark.parametrize("fail", ["cuInit:*:100", "cuDevicePrimaryCtxRetain:*:2"])
def test_a_gpu_that_cannot_be_used_is_named_with_advice(
    gpu_job: Any, fail: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that cannot use its GPU gets what others send in the host's memory."""
    text = """
class Cuda:
    __cuda_array_interface__ = dict(
        version=3, shape=(3,), typestr="<f4", data=(4096, False), strides=None
    )
error = error_like(TypeError, "Move it to the CPU", comm.all_reduce, Cuda())
assert "CUDA_ERROR" in str(error), error
assert (comm.all_reduce(np.ones(3)) == 2).all()
ok()
"""
    monkeypatch.setenv("FAKE_CUDA_FAIL", fail)
    done = gpu_job(2, text)
    assert done.content == [0, 1], done.stderr


def test_a_receiver_without_a_gpu_gets_a_numpy_array(
    gpu_job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    init = """
if os.environ["PYCOLL_RANK"] == "1":
    os.environ["FAKE_CUDA_FAIL"] = "cuInit:*:100"  # read when the library is loaded
import fakegpu
comm = pycoll.init()
rank, size = comm.rank, comm.size
"""
    text = f"""
values = {LARGE_ARRAY}
x = fakegpu.array(values) if rank == 0 else None
for got in (comm.broadcast(x), comm.ibroadcast(x).wait()):
    assert type(got) is (fakegpu.Array if rank == 0 else np.ndarray), type(got)
    if rank:
        assert (got == values).all()
if rank == 0:
    comm.send(x, 1)
    assert (comm.all_reduce(x).get() == 2 * values).all()
else:
    got = comm.recv(0)
    assert type(got) is np.ndarray
    assert (got == values).all()
    assert (comm.all_reduce(got) == 2 * values).all()
ok()
"""
    done = gpu_job(2, text, init=init)
    assert done.content == [0, 1], done.stderr
