"""What the other ranks see when one is killed, raises, exits, is interrupted, stopped or late."""

from __future__ import annotations

import time
from typing import Any

import pytest
from pool_scripts import Scripts
from tiers import exhaustive


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


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_killed_rank_fails_every_collective_small_and_large(job: Any, transport: str) -> None:
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
    "all_reduce with a deadline": lambda c, x: c.all_reduce(x, timeout=90),
    "iall_reduce": lambda c, x: c.iall_reduce(x).wait(),
    "all_gatherv": lambda c, x: c.all_gatherv(x),
    "iall_gatherv": lambda c, x: c.iall_gatherv(x[rank:]).wait(),
    "all_to_allv": lambda c, x: c.all_to_allv(list(x)),
    "reduce_scatterv": lambda c, x: c.reduce_scatterv(x, [0, 0, 0, size]),
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
        "--transport",
        transport,
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
        pytest.param("os._exit(5)", 5, "exit status 5", marks=exhaustive),
        pytest.param("os.abort()", 134, "killed by signal 6 (SIGABRT)", marks=exhaustive),
        pytest.param("os.execvp('false', ['false'])", 1, "exit status 1", marks=exhaustive),
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


def test_an_operator_that_raises_or_communicates_breaks_one_communicator_on_all(
    scripts: Scripts,
) -> None:
    scripts(
        3,
        """
intact, second = comm.dup(), comm.dup()
reason = "gave up all_reduce #2 (ZeroDivisionError: of the user)"

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


def test_an_interrupt_inside_a_collective_breaks_that_communicator_alone(scripts: Scripts) -> None:
    # Rank 1 is interrupted where it waits for others, and in the middle of large transfers.
    scripts(
        3,
        """
intact, pids = comm.dup(), comm.all_gather(os.getpid())
reason = "gave up barrier #2 (KeyboardInterrupt)"
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
reason = "gave up all_reduce #0 on dup of dup of world (KeyboardInterrupt)"
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
