"""What the other ranks see when one is killed, raises, exits, is interrupted, stopped or late."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from typing import Any

import pytest
from patience import PATIENCE
from tiers import few

PROMPT_S = 5.0 * PATIENCE
"""Within this everybody who needs a rank knows that it failed, and nothing of a job is left."""

# A rank is killed.


def test_a_killed_rank_fails_all_that_wait_for_it_point_to_point(job: Any) -> None:
    done = job(
        8,
        """
if rank == 0:
    os.mkfifo(sys.argv[1] + "/gate")
comm.barrier()
large = np.ones(1 << 20)
if rank == 0:
    calls = ["recv.source=0", "probe", "send.float", "sendrecv", "recv.source=ANY", "barrier"]
    await_table(*enumerate(calls, 1))
    os.kill(os.getpid(), signal.SIGKILL)
if rank == 1:
    peer_failed(0, SIGKILL, comm.recv, 0, within=60)
    open(sys.argv[1] + "/gate", "w").close()
elif rank == 7:  # computes, and calls later
    open(sys.argv[1] + "/gate").read()
else:
    call, *args = {
        2: (comm.probe, 0), 3: (comm.send, large, 0), 4: (comm.sendrecv, large, 0, 0),
        5: (comm.recv,), 6: (comm.barrier,),
    }[rank]
    peer_failed(0, SIGKILL, call, *args, within=60)
# A short send is buffered if the news is still on its way.
for call, *args in (comm.recv, 0), (comm.send, 1, 0), (comm.barrier,), (comm.dup,):
    peer_failed(0, SIGKILL, call, *args, within=1.0)
ok()
""",
    )
    assert done.status == 137
    assert done.content == [1, 2, 3, 4, 5, 6, 7], done.stderr
    assert "rank 0 failed after" in done.stderr


def test_a_killed_rank_fails_every_collective_small_and_large(job: Any) -> None:
    # Each collective has a communicator and a thread of its own. The last rank, which the others
    # need, calls none of them.
    done = job(
        4,
        """
last = size - 1
root = rank == last
calls = {
    "barrier": lambda c, x: c.barrier(),
    "broadcast": lambda c, x: c.broadcast(x if root else None, root=last),
    "reduce": lambda c, x: c.reduce(x),
    "all_reduce": lambda c, x: c.all_reduce(x),
    "gather": lambda c, x: c.gather(x),
    "all_gather": lambda c, x: c.all_gather(x),
    "scatter": lambda c, x: c.scatter(x if root else None, root=last),
    "reduce_scatter": lambda c, x: c.reduce_scatter(x),
    "all_to_all": lambda c, x: c.all_to_all(x),
    "all_reduce of objects": lambda c, x: c.all_reduce({1}, op=lambda a, b: a | b),
    "broadcast of objects": lambda c, x: c.broadcast({1} if root else None, root=last),
    "gather of objects": lambda c, x: c.gather({1}),
    "all_gather of objects": lambda c, x: c.all_gather({1}),
    "scatter of objects": lambda c, x: c.scatter([1] * size if root else None, root=last),
    "all_to_all of objects": lambda c, x: c.all_to_all([1] * size),
    "split": lambda c, x: c.split(rank % 2),
}
small, large = np.ones((size, 4)), np.ones((size, 1 << 17))
cases = [(name, x, comm.dup()) for name in calls for x in (small, large)]
contents = []
calling = threading.Semaphore(0)

def call(name, x, comm):
    calling.release()
    try:
        calls[name](comm, x)
        # Who only sends to the root need not wait for it; the next call finds out.
        assert name.startswith(("reduce", "gather")) and rank != 0, name
        comm.barrier()
    except pycoll.PeerFailed as error:
        assert (error.rank, error.reason) == (last, SIGKILL), (name, repr(error))
    contents.append(name)

if rank == last:
    for peer in range(last):
        comm.recv(peer)
    await_table(*((peer, ".* for .* s") for peer in range(last)))  # in one of their calls
    os.kill(os.getpid(), signal.SIGKILL)
threads = [threading.Thread(target=call, args=case) for case in cases]
for thread in threads:
    thread.start()
for _ in threads:
    calling.acquire()
comm.send("all are about to call", last)
peer_failed(last, SIGKILL, comm.recv, last)
for thread in threads:
    thread.join(1)
assert sorted(contents) == sorted(2 * [*calls]), contents
ok()
""",
    )
    assert done.status == 137
    assert done.content == [0, 1, 2], done.stderr


def test_a_rank_killed_in_the_middle_of_large_transfers_fails_both_directions(job: Any) -> None:
    # Rank 3 always sends to 0, receives from 1, and reduces with all.
    done = job(
        4,
        """
x, other = np.ones(1 << 21), comm.dup()
under_way = threading.Semaphore(0)

def repeat(call, *args, **kwargs):
    try:
        while True:
            call(*args, **kwargs)
            under_way.release()
    except pycoll.PeerFailed as error:
        assert (error.rank, error.reason) == (3, SIGKILL), repr(error)
        return
    os._exit(1)

if rank == 3:
    comm.send(os.getpid(), 0)
victim = comm.recv(3) if rank == 0 else None
calls = [(other.all_reduce, x, "sum", x.copy())]
calls += {
    0: [(comm.recv, 3, 0, x.copy())], 1: [(comm.send, x, 3)], 2: [],
    3: [(comm.send, x, 0), (comm.recv, 1)],
}[rank]
threads = [threading.Thread(target=repeat, args=call) for call in calls]
for thread in threads:
    thread.start()
if rank == 0:
    for _ in range(4):
        under_way.acquire()
    os.kill(victim, signal.SIGKILL)
for thread in threads:
    thread.join()
ok()
""",
    )
    assert done.status == 137
    assert done.content == [0, 1, 2], done.stderr


# A rank ends by itself.


def test_what_a_rank_sent_before_it_exited_is_delivered_and_then_it_is_missed(job: Any) -> None:
    # Rank 0 looks only when all the others have ended; rank 3 without finalizing.
    done = job(
        4,
        """
pids = comm.all_gather(os.getpid())
comm.send("heard of you", 3)
if rank == 1:
    comm.send("at once", 0)
    comm.send(np.arange(8192.0), 0, tag=5)  # 64 KiB: the largest that is buffered
    sys.exit(0)
if rank == 2:
    for i in range(1000):
        comm.send(i, 0, tag=i)
    sys.exit()
if rank == 3:  # nothing of it may still be under way
    for peer in range(3):
        comm.recv(peer)
    os._exit(0)
for pid in pids[1:]:
    await_end(pid)
assert comm.recv(1) == "at once"
assert (comm.recv(1, out=np.zeros(8192)) == np.arange(8192.0)).all()
assert [comm.recv(2) for _ in range(500)] == [*range(500)]
assert [comm.recv(2, tag=i) for i in range(999, 499, -1)] == [*range(999, 499, -1)]
for peer in 1, 2, 3:
    peer_failed(peer, "exit status 0", comm.recv, peer)
    peer_failed(peer, "exit status 0", comm.send, "x", peer)
    peer_failed(peer, "exit status 0", comm.send, np.ones(1 << 20), peer)
error_like(pycoll.PeerFailed, "exit status 0", comm.recv)
error_like(pycoll.PeerFailed, "exit status 0", comm.all_reduce, 1)
ok()
""",
    )
    assert done.status == 0, done.stderr
    assert done.content == [0], done.stderr


def test_messages_that_were_here_when_their_sender_ended_can_be_received_in_any_order(
    job: Any,
) -> None:
    # Rank 0 hears of the end of rank 1 before it has looked at all messages, and then computes for
    # longer than the second after which a rank that has ended counts as gone.
    done = job(
        3,
        """
pids = comm.all_gather(os.getpid())
if rank == 1:
    comm.sendrecv("a link", 0, 0)
    for i in range(1000):
        comm.send(i, 0, tag=i)
    comm.send(np.ones(1 << 20), 2)  # done when it was received: what was sent before has left too
    os._exit(0)
if rank == 2:
    comm.recv(1)
if rank == 0:
    comm.sendrecv("a link", 1, 1)
    await_end(pids[1])
    time.sleep(0.3)  # computes
    comm.iprobe()
    time.sleep(1.2)
    assert [comm.recv(1, tag=i) for i in range(999, -1, -1)] == [*range(999, -1, -1)]
    peer_failed(1, "exit status 0", comm.recv, 1)
ok()
""",
    )
    assert done.status == 0, done.stderr
    assert done.content == [0, 2], done.stderr


def test_a_rank_that_exits_with_0_fails_those_blocked_on_it_and_no_others(job: Any) -> None:
    done = job(
        6,
        """
second = comm.dup()  # a collective that fails ends all use of its communicator
others = comm.split(0 if rank < 4 else 1)  # 4 exits, 5 does not
if rank == 4:
    doing = "recv.source=4", "all_reduce", "send.float", "recv.source=0", "", "barrier"
    await_table(*((r, doing[r]) for r in (0, 1, 2, 3, 5)))
    sys.exit(0)
if rank == 0:
    peer_failed(4, "exit status 0", comm.recv, 4, within=60)
    comm.send("unharmed", 3)
elif rank == 1:
    peer_failed(4, "exit status 0", second.all_reduce, 1, within=60)
elif rank == 2:
    peer_failed(4, "exit status 0", comm.send, np.ones(1 << 20), 4, within=60)
elif rank == 3:
    # Others are alive, so a message may still come; and this one was blocked all the time.
    assert comm.recv(0) == "unharmed"
elif rank == 5:
    peer_failed(4, "exit status 0", others.barrier, within=60)
if rank < 4:
    for i in range(5):
        assert others.all_reduce(1) == 4
        assert others.sendrecv(rank, (rank + 1) % 4, (rank - 1) % 4) == (rank - 1) % 4
        assert comm.sendrecv(rank, (rank + 1) % 4, (rank - 1) % 4) == (rank - 1) % 4
    peer_failed(4, "exit status 0", second.barrier)
    others.barrier()
    # By now 5 may have ended as well.
    error_like(pycoll.PeerFailed, "rank [45] .*exit status 0", comm.barrier)
ok()
""",
    )
    assert done.status == 0, done.stderr
    assert done.content == [0, 1, 2, 3, 5], done.stderr


@pytest.mark.parametrize(
    ("ending", "status", "reason"),
    [
        ("sys.exit(3)", 3, "exit status 3"),
        ("os._exit(5)", 5, "exit status 5"),
        ("os.abort()", 134, "killed by signal 6 (SIGABRT)"),
        ("os.execvp('false', ['false'])", 1, "exit status 1"),
        ("raise RuntimeError('the cause')", 1, "raised RuntimeError"),
        ("raise KeyboardInterrupt", 130, "raised KeyboardInterrupt"),
    ],
)
def test_the_way_a_rank_ended_is_the_reason_for_all_and_the_status_of_the_job(
    job: Any, ending: str, status: int, reason: str
) -> None:
    done = job(
        4,
        f"""
os.environ.pop("PYTHONFAULTHANDLER", None)
if rank == 1:
    await_table((0, "recv.source=1"), (2, "all_reduce"), (3, "recv.source=2"))
    {ending}
if rank == 0:
    error = peer_failed(1, "{reason}", comm.recv, 1, within=60)
    if "the cause" in {ending!r}:
        assert "RuntimeError: the cause" in str(error) and "script.py" in str(error), str(error)
    peer_failed(1, "{reason}", comm.recv, 2)
    ok()
    comm.barrier()
if rank == 2:
    try:
        comm.all_reduce(1)
    finally:
        ok()
peer_failed(1, "{reason}", comm.recv, 2, within=60)
ok()
os._exit(9)  # long after the cause
""",
    )
    assert done.content == [0, 2, 3], done.stderr
    assert done.status == status, done.stderr
    report = done.stderr[done.stderr.rindex("pycoll-run: rank ") :]
    assert report.startswith("pycoll-run: rank 1 failed after")
    if "the cause" in ending:
        assert "    RuntimeError: the cause" in report.splitlines()
    # The traceback of a rank that raised PeerFailed itself shows the reason too.
    assert f"PeerFailed: rank 1 failed: {reason}" in done.stderr.replace("pycoll.errors.", "")


def test_abort_ends_the_job_at_once_with_its_code(job: Any) -> None:
    text = """
comm.send(os.getpid(), (rank + 1) % size)
if rank == 1:
    await_table((0, "barrier"))
    comm.abort(7)
if rank == 0:
    comm.barrier()
while True:  # computes
    pass
"""
    started = time.monotonic()
    done = job(3, text)
    assert done.status == 7
    assert "pycoll-run: rank 1 failed after" in done.stderr
    assert "called abort(7)" in done.stderr
    assert time.monotonic() - started < 10


# A reduction operator raises or communicates; a collective is interrupted.


def test_an_operator_that_raises_or_communicates_breaks_one_communicator_on_all(job: Any) -> None:
    done = job(
        3,
        """
intact, second = comm.dup(), comm.dup()
reason = "gave up a collective (ZeroDivisionError: of the user)"

def bad(a, b):
    raise ZeroDivisionError("of the user")

# In this algorithm rank 0 alone combines, and the others wait for it.
arguments = comm.all_reduce, np.ones(5), bad
if rank == 0:
    error_like(ZeroDivisionError, "^of the user$", *arguments, algorithm="tree")
else:
    peer_failed(0, reason, *arguments, algorithm="tree")
for call, *args in (comm.all_reduce, 1), (comm.send, 1, 1), (comm.recv, 2):
    peer_failed(0, reason, call, *args)
assert intact.all_reduce(rank) == 3

failures = []
def communicates(a, b):
    for call, *args in (
        (intact.send, 1, 0), (intact.barrier,), (intact.recv,), (intact.dup,), (second.iprobe,)
    ):
        failures.append(error_like(pycoll.Error, "operator .* must not communicate", call, *args))
    return a + b

assert second.all_reduce(np.ones(5), communicates, algorithm="tree").tolist() == 5 * [3.0]
assert len(failures) == (10 if rank == 0 else 0), failures
assert intact.all_reduce(rank) == second.all_reduce(rank) == 3
ok()
""",
    )
    assert done.status == 0, done.stderr
    assert done.content == [0, 1, 2], done.stderr


def test_an_interrupt_inside_a_collective_breaks_that_communicator_alone(job: Any) -> None:
    # Rank 1 is interrupted where it waits for others, and in the middle of large transfers.
    done = job(
        3,
        """
intact, pids = comm.dup(), comm.all_gather(os.getpid())
reason = "gave up a collective (KeyboardInterrupt)"
if rank == 0:
    await_table((1, "barrier"), (2, "barrier"))
    os.kill(pids[1], signal.SIGINT)
    peer_failed(1, reason, lambda: [comm.iprobe() for _ in iter(int, 1)])  # it is not in the call
if rank == 1:
    error_like(KeyboardInterrupt, "^$", comm.barrier, within=60)
else:
    peer_failed(1, reason, comm.barrier, within=60)
for call in comm.barrier, lambda: comm.recv(2 - rank), lambda: comm.split(1), comm.dup:
    peer_failed(1, reason, call)
assert intact.all_reduce(rank) == 3


def combine(a, b):  # in the middle of a transfer, when the first pieces have come
    if rank == 1:
        os.kill(os.getpid(), signal.SIGINT)
    return a + b

x = np.ones(1 << 19)
for _ in range(10):
    other = intact.dup()
    arguments = other.all_reduce, x, pycoll.Op(combine, elementwise=True), x
    if rank == 1:
        error_like(KeyboardInterrupt, "^$", *arguments, algorithm="ring")
    else:
        peer_failed(1, reason, *arguments, algorithm="ring")
    peer_failed(1, reason, other.barrier)
    other.close()
    assert intact.all_reduce(rank) == 3
ok()
""",
    )
    assert done.status == 0, done.stderr
    assert done.content == [0, 1, 2], done.stderr


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


# A rank is stopped, or late.


def test_a_stopped_rank_has_not_failed_and_all_goes_on_when_it_continues(job: Any) -> None:
    # Longer than any limit after which a link or a rank could be given up: 5 s of the contract,
    # 3 s for a verdict, 2 s and three probes of the kernel's keep-alives.
    done = job(
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
    assert done.status == 0, done.stderr
    assert done.content == [0, 1, 2, 3, 4], done.stderr


def test_a_collective_out_of_time_names_itself_and_what_the_others_do_on_all_ranks(
    job: Any,
) -> None:
    done = job(
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
    assert done.status == 0, done.stderr
    assert done.content == [0, 1, 2, 3], done.stderr


def test_a_point_to_point_call_out_of_time_is_withdrawn(job: Any) -> None:
    done = job(
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
    assert done.status == 0, done.stderr
    assert done.content == [0, 1, 2], done.stderr


def test_the_deadline_of_all_operations_comes_from_the_command_line_or_from_init(job: Any) -> None:
    text = """
intact = comm.dup()
if rank == 0:
    assert intact.recv(1, timeout=float("inf")) == "late, but in time"
    error_like(pycoll.OperationTimeout, "barrier.*#1 at .*script.py", comm.barrier)
if rank == 1:
    error_like(pycoll.OperationTimeout, "recv", comm.recv, 0)
    error_like(pycoll.OperationTimeout, "recv", comm.recv, 0, timeout=0.0, within=0.5)
    intact.send("late, but in time", 0)
    error_like(pycoll.OperationTimeout, "recv", intact.recv, 0, timeout=0.8)
    error_like(pycoll.OperationTimeout, "barrier.*#1", comm.barrier)
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
        pass
comm.all_reduce(1.0)
"""
    started = time.monotonic()
    done = job(3, text, "--timeout", "4")
    assert done.status == 124
    assert "rank 0: not waiting in pycoll" in done.stderr
    assert "rank 1: all_reduce(" in done.stderr
    assert "rank 2: all_reduce(" in done.stderr
    assert time.monotonic() - started < 4 + PROMPT_S


# The launcher is killed.


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
        assert_ended(pids)
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
        assert_ended(pids)


def assert_ended(pids: list[int]) -> None:
    deadline = time.monotonic() + PROMPT_S
    for pid in pids:
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            assert select.select([pidfd], [], [], max(0.0, deadline - time.monotonic()))[0], pid
        finally:
            os.close(pidfd)


# Nothing piles up.


@pytest.mark.parametrize("times", few([50], [400]))
def test_many_failures_and_communicators_leave_no_descriptor_and_no_thread(
    job: Any, times: int
) -> None:
    done = job(
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
    assert (done.status, done.content) == (0, [0, 1]), done.stderr


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


def test_iprobe_of_a_rank_that_has_ended_fails_like_recv(job: Any) -> None:
    done = job(
        2,
        """
if rank == 0:
    error_like(pycoll.PeerFailed, "rank 1 .*exit status 0", comm.recv, 1)
    peer_failed(1, "exit status 0", comm.iprobe, 1)
    assert comm.iprobe(0) is None
ok()
""",
    )
    assert done.status == 0, done.stderr
    assert done.content == [0, 1], done.stderr
