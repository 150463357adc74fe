"""Deadlines, interrupts and kills in calls: what each rank sees, and what is left."""

from __future__ import annotations

import signal
import subprocess
import time
from typing import Any

import pytest
from launcher_jobs import assert_ended
from patience import PATIENCE
from pool_scripts import Scripts
from tiers import few

PROMPT_S = 5.0 * PATIENCE
"""Within this everybody who needs a rank knows that it failed, and nothing of a job is left."""


def test_an_interrupt_of_the_launcher_ends_ranks_in_any_call_with_130(job: Any) -> None:
    command = job.command(
        4,
        """
other = comm.split(rank // 2)
if rank == 0:
    await_table((1, "recv"))
    print("all there", flush=True)
if rank < 2:
    comm.recv()
while True:
    other.all_reduce(np.ones(1 << 16))
""",
    )
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "all there\n"
        started = time.monotonic()
        launcher.send_signal(signal.SIGINT)
        _, stderr = launcher.communicate(timeout=30 * PATIENCE)
    assert time.monotonic() - started < PROMPT_S
    assert launcher.returncode == 130, stderr
    assert "pycoll-run: ended by SIGINT" in stderr


def test_a_stopped_rank_has_not_failed_and_all_goes_on_when_it_continues(
    scripts: Scripts,
) -> None:
    # Longer than any limit after which a link or a rank could be given up: 5 s of the contract,
    # 3 s for a verdict, 2 s and three probes of the kernel's keep-alives.
    scripts(
        5,
        """
pids, other, x = comm.all_gather(os.getpid()), comm.dup(), np.full(1 << 21, rank)
if rank == 0:
    await_table((1, "recv"), (2, "send"), (3, "all_reduce"), (4, "recv"))
    os.kill(pids[4], signal.SIGSTOP)
    error_like(pycoll.OperationTimeout, "recv", comm.recv, 4, timeout=6.5, within=8.0)
    comm.send("still here", 1)
    comm.send("go on", 4)
    os.kill(pids[4], signal.SIGCONT)
if rank == 1:
    assert comm.recv(0) == "still here"
if rank == 2:
    comm.send(x, 4)
if rank == 4:
    assert comm.recv(0) == "go on"
    assert comm.recv(2)[-1] == 2
assert other.all_reduce(x)[-1] == 10
assert comm.all_reduce(rank) == 10
ok()
""",
    )


def test_a_collective_out_of_time_names_itself_and_what_the_others_do_on_all_ranks(
    scripts: Scripts,
) -> None:
    scripts(
        4,
        """
intact, more = comm.dup(), comm.dup()
comm.barrier()
late = "all_reduce.float64.7., op=sum, algorithm=.*. #.* at script.py:.* deadline"
if rank == 3:
    await_table((0, "all_reduce.*#"), (1, "all_reduce.*#"))
    intact.send("not coming", 2)
    assert more.recv(0) == "out of time"
    # It is not in the call, so nothing but the launcher tells it.
    error_like(pycoll.OperationTimeout, late, lambda: [comm.iprobe() for _ in iter(int, 1)])
elif rank == 2:  # waits for ever, but for another's deadline
    assert intact.recv(3) == "not coming"
    error_like(pycoll.OperationTimeout, late, comm.all_reduce, np.ones(7), within=60)
else:
    arguments = comm.all_reduce, np.ones(7)
    error = error_like(pycoll.OperationTimeout, late, *arguments, timeout=2.0 + rank)
    assert isinstance(error, TimeoutError)
    waiting = "3: recv.source=0, tag=ANY. on dup of world at script.py:"
    for doing in "0: all_reduce.*#", "1: all_reduce.*#", waiting:
        assert re.search(f"rank {doing}.* for .* s", str(error)), str(error)
if rank == 0:
    more.send("out of time", 3)
for call in comm.barrier, comm.dup, lambda: comm.send(1, 1 - rank % 2), comm.iprobe:
    error_like(pycoll.OperationTimeout, late, call, within=2.0)
assert intact.all_reduce(rank) == more.all_reduce(rank) == 6
ok()
""",
    )


def test_a_point_to_point_call_out_of_time_is_withdrawn(scripts: Scripts) -> None:
    scripts(
        3,
        """
large = np.ones(1 << 20)
for _ in range(3):
    for call, *args in (
        (comm.recv, 1, 7), (comm.probe, 1, 7), (comm.recv, pycoll.ANY_SOURCE, 7),
        (comm.send, large, (rank + 1) % 3),
        (comm.sendrecv, large, (rank + 1) % 3, (rank + 2) % 3, 0, 7),
    ):
        text = rf"^rank {rank}: {call.__name__}\\(.*\\) at script.py:.*  rank 0: .*  rank 2: "
        error_like(pycoll.OperationTimeout, text, call, *args, timeout=0.02)
        error_like(pycoll.OperationTimeout, text, call, *args, timeout=0)
    assert comm.all_to_all([rank] * 3) == [0, 1, 2]
    assert comm.iprobe() is None  # what was sent has been taken back
    comm.barrier()
# A receive given up half-way loses nothing: another one gets the message whole.
for _ in range(10):  # who is put aside for long finds that all has been done in time
    count = 0
    if rank == 0:
        comm.send(np.arange(1 << 23), 1)
    while rank == 1:
        try:
            x = comm.recv(0, timeout=0.002)
            break
        except pycoll.OperationTimeout:
            count += 1
    assert rank != 1 or (x == np.arange(1 << 23)).all()
    given_up = comm.all_reduce(count)
    if given_up:
        break
assert given_up
assert comm.all_reduce(rank) == 3
ok()
""",
    )


def test_the_deadline_of_all_operations_comes_from_the_command_line_or_from_init(job: Any) -> None:
    text = """
intact = comm.dup()
if rank == 0:
    assert intact.recv(1, timeout=float("inf")) == "late, but in time"
    error_like(pycoll.OperationTimeout, "barrier.*#1 at .*script.py", comm.barrier)
    intact.send("given up", 1)
if rank == 1:
    error_like(pycoll.OperationTimeout, "recv", comm.recv, 0)
    error_like(pycoll.OperationTimeout, "recv", comm.recv, 0, timeout=0.0, within=0.5)
    error_like(pycoll.OperationTimeout, "recv", intact.recv, 0, timeout=0.8)
    intact.send("late, but in time", 0)
    assert intact.recv(0, timeout=float("inf")) == "given up"
intact.barrier(timeout=30)
ok()
"""
    done = job(2, text, "--op-timeout", "0.4")
    assert (done.status, done.content) == (0, [0, 1]), done.stderr
    init = "comm = pycoll.init(op_timeout=0.4); rank = comm.rank"
    done = job(2, text, "--op-timeout", "60", init=init)
    assert (done.status, done.content) == (0, [0, 1]), done.stderr


def test_the_deadline_of_the_job_ends_it_with_124_and_the_calls_of_the_ranks(job: Any) -> None:
    text = """
comm.barrier()
if rank == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        signal.pause()
comm.all_reduce(1.0)
"""
    started = time.monotonic()
    done = job(3, text, "--timeout", "4")
    assert done.status == 124
    assert "rank 0: not waiting in pycoll" in done.stderr
    assert "rank 1: all_reduce(" in done.stderr
    assert "rank 2: all_reduce(" in done.stderr
    assert time.monotonic() - started < 4 + PROMPT_S


def test_nothing_is_left_5_s_after_the_launcher_was_killed(job: Any) -> None:
    # In recv, in a collective, in large transfers, computing, stopped, and not joined yet; with
    # children in a session of their own.
    text = """
import subprocess
print(os.getpid(), subprocess.Popen(["sleep", "1000"], start_new_session=True).pid, flush=True)
rank = int(os.environ["PYCOLL_RANK"])
os.kill(os.getpid(), signal.SIGSTOP) if rank == 5 else None
comm = pycoll.init()
"""
    command = job.command(6, text, init="")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None
        pids = [int(pid) for _ in range(6) for pid in launcher.stdout.readline().split()]
        launcher.kill()
        assert_ended(pids, PROMPT_S)
    text += """
other = comm.split(rank // 2)
if rank == 0:
    comm.recv()
elif rank == 1:
    comm.barrier()
elif rank == 4:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    await_table((0, "recv"), (1, "barrier"))
    print("all there", flush=True)
    while True:
        pass
x = np.ones(1 << 20)
while True:
    other.all_reduce(x)
"""
    text = text.replace("rank == 5", "False")
    command = job.command(5, text, init="")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None
        lines = [launcher.stdout.readline().decode() for _ in range(6)]
        pids = [int(pid) for line in lines if line != "all there\n" for pid in line.split()]
        assert len(pids) == 10
        launcher.kill()
        assert_ended(pids, PROMPT_S)


@pytest.mark.parametrize("times", few([50], [400]))
def test_many_failures_and_communicators_leave_no_descriptor_and_no_thread(
    scripts: Scripts, times: int
) -> None:
    scripts(
        2,
        f"""
def held():
    return len(os.listdir("/proc/self/fd")), threading.active_count()

def events(count):
    for i in range(count):
        other = comm.dup() if i % 2 else comm.split(0)
        error_like(pycoll.OperationTimeout, "", comm.recv, 0, 7, timeout=0)
        if i % 8 == 0:
            error_of(other.broadcast, None, timeout=0) if rank else error_of(other.barrier)
        if i % 8 == 1:
            error_of(other.all_reduce, 1, lambda a, b: 1 / 0) if rank else error_of(other.barrier)
        other.close()
        comm.send(i, 1 - rank)
        assert comm.recv(1 - rank) == i

events(8)
before = held()
events({times})
assert held() == before, (before, held())
comm.close()
ok()
""",
    )


def test_an_exception_inside_with_is_named_and_shown_to_the_others(job: Any) -> None:
    done = job(
        2,
        """
with comm:
    comm.barrier()
    if rank == 1:
        raise ValueError("bad data")
    error = error_like(pycoll.PeerFailed, "bad data", comm.barrier)
    assert error.reason == "raised ValueError", error.reason
ok()
""",
    )
    assert done.status == 1
    assert done.content == [0], done.stderr
    assert "pycoll-run: rank 1 failed" in done.stderr
    assert "raised ValueError" in done.stderr


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_held_messages_of_a_killed_rank_and_copies_for_it_are_lost(
    job: Any, transport: str
) -> None:
    done = job(
        2,
        """
large = np.ones(1 << 20)
if rank == 1:
    pending = [comm.isend(1.5, 0, tag=1), comm.isend(large, 0, tag=2)]
    comm.recv(0, tag=3)
    os.kill(os.getpid(), signal.SIGKILL)
handles = [comm.mprobe(1, tag) for tag in (1, 2)]
comm.bsend(large, 1, tag=4)
assert comm.ibsend(large, 1, tag=4).done
comm.send(None, 1, tag=3)
peer_failed(1, SIGKILL, comm.recv, 1, within=60)
for call, *args in *[(handle.recv,) for handle in handles], (comm.bsend, large, 1):
    peer_failed(1, SIGKILL, call, *args, within=1.0)
ok()
""",
        "--transport",
        transport,
    )
    assert done.status == 137
    assert done.content == [0], done.stderr


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_held_message_of_a_rank_that_has_left_is_received(job: Any, transport: str) -> None:
    done = job(
        2,
        """
if rank == 1:
    comm.send(1.5, 0, tag=1)
    comm.send(np.arange(7), 0, tag=2)
else:
    handles = [comm.mprobe(1, tag) for tag in (1, 2)]
    gone = error_like(pycoll.PeerFailed, "has (left|ended)", comm.recv, 1, within=60)
    assert handles[0].recv() == 1.5
    assert handles[1].recv().tolist() == list(range(7))
    for send in comm.bsend, comm.ibsend:
        error = error_of(lambda: send(1, 1).wait() if send == comm.ibsend else send(1, 1))
        assert type(error) is pycoll.PeerFailed, repr(error)
ok()
""",
        "--transport",
        transport,
    )
    assert (done.status, done.content) == (0, [0, 1]), done.stderr
