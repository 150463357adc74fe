"""Shared memory under the jobs of one host: who takes it, what it costs, how its waits end."""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE
from script_jobs import all_well
from shared_memory_jobs import NATIVE, REFUSE
from tiers import few

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/soak_shared_memory"

# Who takes it.


@pytest.mark.parametrize("transport", ["auto", "shm"])
def test_ranks_of_one_host_take_shared_memory(job: Any, transport: str) -> None:
    text = """
comm.barrier()
assert core.attached and core.direct
assert links() == {"shm"}
check_all(comm)
ok()
"""
    done = job(3, NATIVE + text, "--transport", transport)
    all_well(done, 3)


def test_tcp_can_be_chosen_instead(job: Any) -> None:
    text = """
assert native is None and "shm" not in links()
check_all(comm)
ok()
"""
    done = job(2, NATIVE + text, "--transport", "tcp")
    all_well(done, 2)


def test_without_single_copy_all_goes_through_slots(
    job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYCOLL_SINGLE_COPY", "0")
    done = job(3, NATIVE + "check_all(comm)\nassert core.attached and not core.direct\nok()")
    all_well(done, 3)


@pytest.mark.parametrize("refused", [(0, 1, 2), (1,)], ids=["on_all_ranks", "on_one_rank"])
def test_where_the_system_refuses_single_copy_all_ranks_do_without(
    job: Any, refused: tuple[int, ...]
) -> None:
    init = f"""
if int(os.environ["PYCOLL_RANK"]) in {refused}:
    refuse_single_copy()
comm = pycoll.init()
rank, size = comm.rank, comm.size
"""
    text = "check_all(comm)\nassert core.attached and not core.direct\nok()"
    done = job(3, NATIVE + text, init=REFUSE + init)
    all_well(done, 3)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_dev_shm_is_not_needed(job: Any) -> None:
    command = job.command(2, NATIVE + "check_all(comm)\nassert core.attached\nok()")
    mount = 'mount -t tmpfs -o ro,size=4k none /dev/shm && exec "$@"'
    unshare = ["unshare", "-m", "sh", "-c", mount, "sh"]
    tried = subprocess.run([*unshare, "true"], capture_output=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"cannot mount here: {tried.stderr.decode()}")
    done = subprocess.run(
        [*unshare, *command], capture_output=True, text=True, timeout=60 * PATIENCE, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_without_the_compiled_core_there_is_no_job(job: Any, tmp_path: Path) -> None:
    """A copy of the package whose core is hidden says so, also to a rank that is alone."""
    import pycoll

    source = Path(pycoll.__file__).resolve().parent
    shutil.copytree(source, tmp_path / "hidden/pycoll", ignore=shutil.ignore_patterns("*.so"))
    path = f"{tmp_path / 'hidden'}:{os.environ.get('PYTHONPATH', '')}"
    alone = [sys.executable, "-c", "import pycoll; pycoll.init()"]
    for command in (job.command(2, "ok()"), alone):
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=60 * PATIENCE,
            env=os.environ | {"PYTHONPATH": path},
            check=False,
        )
        assert done.returncode == 1, done.stderr
        assert "BootstrapError: the compiled core is missing: " in done.stderr


def test_ranks_of_several_hosts_do_without_it_but_the_parts_of_a_host_take_it(job: Any) -> None:
    text = """
assert native is None
check_all(comm)
part = comm.split(comm.node)
assert part.size == 2
check_all(part)
assert part._group.native.core.attached
across = comm.split(rank % 2)
assert across._group.native is None
check_all(across)
error_like(ValueError, "one host", comm.barrier, algorithm="shared_memory")
ok()
"""
    done = job(4, NATIVE + text, "--emulate-hosts", "2")
    all_well(done, 4)


# What it costs.


@pytest.mark.parametrize("times", few([60], [1000]))
def test_communicators_that_come_and_go_leave_no_memory_descriptor_or_mapping(
    job: Any, times: int
) -> None:
    text = f"""
x = np.ones(200_000, "f4")

def use(times):
    for _ in range(times):
        with comm.dup() as other:
            other.barrier()
            other.all_reduce(x)
            assert other._group.native.core.attached
    comm.barrier()

def taken():
    memfd = int(os.environ["PYCOLL_SHM"].split(":")[0])
    with open("/proc/self/maps") as maps:
        return os.fstat(memfd).st_blocks, len(os.listdir("/proc/self/fd")), len(maps.readlines())

use(20)
before = taken()
comm.barrier()
use({times})
after = taken()
# Blocks: the last communicators' memory goes when the last rank has closed them.
region = 2 * 1024 * 1024 // 512
assert after[0] <= before[0] + region, (before, after)
assert after[1] == before[1], (before, after)
assert after[2] <= before[2] + 8, (before, after)
ok()
"""
    done = job(2, NATIVE + text)
    all_well(done, 2)


def test_calls_that_are_repeated_cause_no_page_faults(job: Any) -> None:
    text = """
import resource
for nbytes in (8, 4096, 65536, 1 << 20, 16 << 20):
    calls = max(10, min(1000, (64 << 20) // nbytes))
    x = np.ones(nbytes // 4, "f4")
    out, rows = np.zeros_like(x), np.zeros((size, len(x)), "f4")
    for call in (
        lambda: comm.all_reduce(x, out=out), lambda: comm.all_gather(x, out=rows),
        lambda: comm.broadcast(x), lambda: comm.barrier(),
        lambda: comm.reduce(x, "sum", 0, out),
    ):
        for _ in range(20):
            call()
        comm.barrier()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(calls):
            call()
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        assert faults <= 16 + calls // 50, (nbytes, faults, calls)
ok()
"""
    done = job(2, NATIVE + text)
    all_well(done, 2)


def test_waiting_for_a_late_rank_takes_no_processor_time(job: Any) -> None:
    text = """
def spent_in(call, late_s):
    "Seconds of processor time, beside what the call itself takes."
    comm.barrier()
    if rank == 1:
        time.sleep(late_s)
    before, started = time.process_time(), time.monotonic()
    call()
    spent = time.process_time() - before
    assert rank == 1 or time.monotonic() - started > 0.9 * late_s
    return spent

large, small = np.ones(1 << 20), np.ones(2)
out, other = np.zeros(1 << 20), np.zeros(2)
for name, call in (
    ("barrier", comm.barrier),
    ("small", lambda: comm.all_reduce(small, out=other)),
    ("large", lambda: comm.all_reduce(large, out=out)),
    ("from the root", lambda: comm.broadcast(small, root=1)),
    ("much from the root", lambda: comm.broadcast(large, root=1)),
):
    work = spent_in(call, 0.0)
    for attempt in range(3):  # processor time is dearer where others use the caches
        spent = spent_in(call, 1.0)
        if comm.broadcast(spent - work < 0.02):
            break
    else:
        assert rank == 1, (name, spent, work)
ok()
"""
    done = job(2, NATIVE + text)
    all_well(done, 2)


# Threads, signals, forks.


def test_one_thread_is_in_native_calls_while_another_one_sends_and_receives(job: Any) -> None:
    text = """
other = comm.dup()
failed = []

def messages():
    try:
        for i in range(200):
            if rank == 0:
                other.send(i, 1)
                assert other.recv(1) == -i
            else:
                assert other.recv(0) == i
                other.send(-i, 0)
    except BaseException as error:
        failed.append(error)

thread = threading.Thread(target=messages)
thread.start()
x, done = np.ones(1000), 0
while done < size:
    done = comm.all_reduce(0 if thread.is_alive() else 1)
    assert (comm.all_reduce(x) == size).all()
thread.join()
assert not failed, failed
ok()
"""
    done = job(2, NATIVE + text)
    all_well(done, 2)


def test_a_native_wait_is_woken_at_once_though_another_thread_sleeps_in_a_receive(
    job: Any,
) -> None:
    text = """
other, x, out = comm.dup(), np.zeros(1), np.zeros(1)
got, took = [], []
comm.all_reduce(x, out=out)
thread = threading.Thread(target=lambda: got.append(other.recv(1 - rank)))
thread.start()
for i in range(60):
    if rank == i % 2:
        time.sleep(0.02)  # late, so that the other one sleeps
    started = time.monotonic()
    comm.all_reduce(x, out=out)
    if rank != i % 2:
        took.append(time.monotonic() - started)
other.send("the end", 1 - rank)
thread.join()
assert got == ["the end"]
# Who is not woken sleeps for 0.1 s, and looks then.
slow = [seconds for seconds in took if seconds > 0.09]
assert len(slow) <= 2, slow
ok()
"""
    done = job(2, NATIVE + text)
    all_well(done, 2)


@pytest.mark.parametrize("count", [1, 1 << 21], ids=["small", "large"])
def test_ctrl_c_in_a_native_wait_breaks_only_that_communicator(job: Any, count: int) -> None:
    text = f"""
x = np.ones({count})
other = comm.dup()
other.barrier()
if rank == 0:
    pid = os.getpid()
    comm.send(pid, 1)
    error_like(KeyboardInterrupt, "", other.all_reduce, x, within=30)
else:
    pid = comm.recv(0)
    await_table((0, "all_reduce"))
    os.kill(pid, signal.SIGINT)
    fails_soon("gave up a collective (KeyboardInterrupt)", other.all_reduce, x)
peer_failed(0, "gave up a collective (KeyboardInterrupt)", other.barrier)
peer_failed(0, "gave up a collective (KeyboardInterrupt)", other.barrier)
check_all(comm)
with comm.dup() as third:
    check_all(third)
ok()
"""
    done = job(2, NATIVE + text)
    all_well(done, 2)


@pytest.mark.parametrize("count", [10, 1_000_000])
def test_roots_that_differ_are_shown_with_their_number_and_line(job: Any, count: int) -> None:
    text = f"""
other = comm.dup()
other.barrier()
x = np.zeros({count})
for _ in range(9):
    other.broadcast(x)
def calls():
    other.broadcast(x, rank)  # of the 10th large one all tell how long the trial took
    other.barrier()

error = error_of(calls)
assert isinstance(error, pycoll.MismatchError), repr(error)
# From this rank, or, with both lines, from the launcher.
text = str(error)
assert "collective number 10 of dup of world" in text or "#10 on dup of world" in text, text
assert all(f"rank {{r}}: broadcast(root={{r}})" in text for r in range(size)), text
assert {count} < 100 or "script.py:" in text, text
ok()
"""
    all_well(job(2, text), 2)


def test_what_a_signal_handler_raises_in_a_native_wait_comes_out_of_it(job: Any) -> None:
    text = """
class Alarm(Exception):
    pass

def handler(number, frame):
    raise Alarm("it is time")

signal.signal(signal.SIGUSR1, handler)
other = comm.dup()
other.barrier()
if rank == 0:
    comm.send(os.getpid(), 1)
    error_like(Alarm, "it is time", other.barrier, within=30)
else:
    pid = comm.recv(0)
    await_table((0, "barrier"))
    os.kill(pid, signal.SIGUSR1)
    fails_soon("gave up a collective (Alarm: it is time)", other.barrier)
peer_failed(0, "gave up a collective (Alarm: it is time)", other.barrier)
check_all(comm)
ok()
"""
    done = job(2, NATIVE + text)
    all_well(done, 2)


def test_signals_at_any_moment_of_native_calls_end_them_on_all_ranks(job: Any) -> None:
    # Rank 0 gets a signal while all make calls as quick as they can: in the core, at the door of
    # Python functions that it calls, or between two calls; then the barrier is another call.
    text = """
import random

class Alarm(Exception):
    pass

def handler(number, frame):
    raise Alarm

signal.signal(signal.SIGUSR1, handler)
pid = comm.broadcast(os.getpid())
draw = random.Random(1)
x, rows = np.ones(50_000), np.ones((size, 50_000))
for number in range(60):
    kind, delay = draw.randrange(4), draw.random() * 0.008
    which = draw.choice((signal.SIGINT, signal.SIGUSR1))
    y, z = (x[:10], rows[:, :10].copy()) if draw.randrange(2) else (x, rows)
    c = comm.dup()
    calls = [
        lambda: c.all_reduce(y, out=y), lambda: c.broadcast(y, 1), lambda: c.reduce(y, "max", 1, y),
        lambda: c.all_gather(y, out=z),
    ]
    timer = threading.Timer(delay, os.kill, (pid, which))
    started = time.monotonic()
    try:
        if rank == 0:
            comm.send("may be interrupted now", 1)
        if rank == 1:
            comm.recv(0)
            timer.start()
        while True:
            calls[kind]()
    except (KeyboardInterrupt, Alarm):
        assert rank == 0
    except (pycoll.PeerFailed, pycoll.MismatchError):
        pass
    assert isinstance(error_of(c.barrier), (pycoll.PeerFailed, pycoll.MismatchError))
    assert time.monotonic() - started < 5.0, number
    if rank == 1:
        timer.join()
    comm.barrier()
    c.close()
ok()
"""
    all_well(job(3, NATIVE + text), 3)


def test_a_signal_handler_that_returns_does_not_end_a_native_wait(job: Any) -> None:
    text = """
got = []
signal.signal(signal.SIGUSR1, lambda number, frame: got.append(number))
comm.barrier()
if rank == 0:
    comm.send(os.getpid(), 1)
    comm.barrier()
    assert len(got) >= 1
else:
    pid = comm.recv(0)
    await_table((0, "barrier"))
    for _ in range(5):
        os.kill(pid, signal.SIGUSR1)
    comm.barrier()
check_all(comm)
ok()
"""
    done = job(2, NATIVE + text)
    all_well(done, 2)


def test_a_forked_child_cannot_make_native_calls_and_harms_nobody(job: Any) -> None:
    text = """
x, out = np.ones(4), np.zeros(4)
comm.all_reduce(x, out=out)
pid = os.fork()
if pid == 0:
    for call, *args in (
        (comm.barrier,), (comm.all_reduce, x, "sum", out), (comm.broadcast, x), (comm.gather, x),
    ):
        error_like(pycoll.Error, "was forked from a rank", call, *args, within=0.5)
    comm.close()
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
check_all(comm)
ok()
"""
    done = job(2, NATIVE + text)
    all_well(done, 2)


def test_a_fork_while_another_thread_is_in_a_native_call_harms_nobody(job: Any) -> None:
    text = """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
other = comm.dup()
other.barrier()
if rank == 0:
    thread = threading.Thread(target=other.barrier)
    thread.start()
    comm.send("waiting", 1)
    comm.recv(1)
    pid = os.fork()
    if pid == 0:
        for call in other.barrier, comm.barrier:
            error_of(call, within=0.5)
        other.close()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    comm.send("forked", 1)
    thread.join()
else:
    comm.recv(0)
    await_table((0, ".*barrier"))
    comm.send("go", 0)
    comm.recv(0)
    other.barrier()
check_all(other)
check_all(comm)
ok()
"""
    done = job(2, NATIVE + text)
    all_well(done, 2)


def test_finalize_ends_the_native_wait_of_another_thread(job: Any) -> None:
    text = """
other = comm.dup()
other.barrier()
if rank == 0:
    errors = []
    thread = threading.Thread(target=lambda: errors.append(error_of(other.barrier, within=30)))
    thread.start()
    comm.recv(1)
    pycoll.finalize()
    thread.join(5)
    assert not thread.is_alive()
    assert isinstance(errors[0], pycoll.Error), errors
else:
    await_table((0, ".*barrier"))
    comm.send("it waits", 0)
    peer_failed(0, "exit status 0", comm.recv, 0)
    fails_soon("exit status 0", other.barrier)
ok()
"""
    done = job(2, NATIVE + text)
    all_well(done, 2)


# What is said of those who wait.


def test_a_timeout_in_a_native_wait_names_the_calls_of_all_ranks(job: Any) -> None:
    text = """
other, third = comm.dup(), comm.dup()
for c in other, third:
    c.barrier()
if rank == 0:
    error = error_like(pycoll.OperationTimeout, "", other.all_reduce, np.ones(3, "f4"), timeout=1.5)
    text = str(error)
    assert isinstance(error, TimeoutError)
    assert re.search(r"rank 0: all_reduce\\(float32\\[3\\], op=sum", text), text
    assert re.search(r"rank 1: barrier\\(", text), text
    assert re.search(r"rank 2: recv\\(source=0", text), text
    comm.send("done", 2)
    third.barrier()
elif rank == 1:
    third.barrier()
    error_like(pycoll.OperationTimeout, "all_reduce", other.barrier)
else:
    comm.recv(0)
    third.barrier()
    error_like(pycoll.OperationTimeout, "all_reduce", other.barrier)
check_all(comm)
ok()
"""
    done = job(3, NATIVE + text)
    all_well(done, 3)


def test_a_default_deadline_holds_for_native_waits(job: Any) -> None:
    text = """
if rank == 0:
    error_like(pycoll.OperationTimeout, "barrier", comm.barrier)
else:
    error_of(comm.recv, 0, timeout=3.0)
    error_like(pycoll.OperationTimeout, "barrier", comm.barrier)
ok()
"""
    done = job(2, text, "--op-timeout", "1")
    assert done.content == [0, 1], done.stderr


def test_the_launcher_knows_who_waits_in_a_native_call(job: Any) -> None:
    text = """
if rank == 0:
    await_table((1, r"barrier\\(.*for .* s"), (2, r"all_reduce\\(float64\\[2\\].* for .* s"))
    ok()
    os._exit(3)
error_of(comm.barrier if rank == 1 else lambda: comm.all_reduce(np.ones(2)), within=60)
"""
    done = job(3, text)
    assert done.content == [0], done.stderr


def test_who_gives_up_may_change_what_others_still_read_and_they_return_no_wrong_values(
    job: Any,
) -> None:
    # Rank 0 has read all, its memory being there, when rank 1 is half-way.
    text = """
import itertools
read_directly(1)
x = np.full((2, 4 << 20), rank + 1.0)
all_x = np.array([x * 0 + 1, x * 0 + 2])
wanted = (
    ("all_gather", all_x, None), ("all_reduce", x * 0 + 3, None), ("all_to_all", all_x[:, 0], None),
    ("reduce_scatter", x[0] * 0 + 3, None), ("broadcast", all_x[0], 0),
    # Here the root copies, too, or who sends to it.
    ("broadcast", all_x[1], 1), ("scatter", x[0] * 0 + 1, 0), ("scatter", x[0] * 0 + 2, 1),
    ("gather", all_x, 0), ("gather", all_x, 1),
)
# How long rank 1 reads depends on the machine.
for (name, want, root), seconds in itertools.product(wanted, (0.003, 0.008, 0.02)):
    c = comm.dup()
    c.barrier()
    assert c._group.native.core.direct
    out = np.full(want.shape, 5.0) if rank == 0 else np.empty(want.shape)
    call = getattr(c, name)
    args, options = (x,), {"out": out}
    if root is not None:
        options["root"] = root
        if name == "broadcast":
            args, options = (x if rank == root else out, root), {}
        elif name == "scatter":
            args = (x if rank == root else None,)
        elif rank != root:
            options["out"] = None
    comm.barrier()
    has_given_up = False
    try:
        call(*args, **options, timeout=seconds if rank == 0 else None)
    except pycoll.OperationTimeout:
        if rank == 0:
            has_given_up = True
            x[...] = out[...] = 77.0
            x[...] = 1.0
    else:
        got = x if name == "broadcast" and rank == root else out
        if name == "gather" and rank != root:
            got = want
        if name == "scatter" and rank != root:
            want = x[0] * 0 + root + 1
        assert (got == want).all(), (name, (got != want).sum())
    comm.barrier()
    assert not has_given_up or (out == 77).all(), (name, root)  # nobody writes there any more
ok()
"""
    all_well(job(2, NATIVE + text), 2)


@pytest.mark.parametrize(
    "call",
    [
        "comm.broadcast(x, 0)",
        "comm.broadcast(x, 1)",
        "comm.scatter(rows if rank == 0 else None, 0, out=x)",
        "comm.gather(x, 1, out=rows if rank == 1 else None)",
    ],
)
def test_a_rank_that_is_killed_while_two_copy_ends_the_other_ones_call(job: Any, call: str) -> None:
    text = f"""
read_directly(1)
x, rows = np.ones(1 << 20), np.ones((2, 1 << 20))
pids = comm.all_gather(os.getpid())

def calls():
    for number in range(1 << 30):
        {call}
        if rank == 0 and number == 30:  # from now on at any moment
            threading.Thread(target=os.kill, args=(pids[1], signal.SIGKILL)).start()

error = error_of(calls, within=20)
assert isinstance(error, pycoll.PeerFailed) and error.rank == 1, repr(error)
ok()
"""
    done = job(2, NATIVE + text)
    assert (done.status, done.content) == (137, [0]), done.stderr


# Ranks that die in native waits.


DYING = {
    "small": "comm.all_reduce(small)",
    "barrier": "comm.barrier()",
    "streaming": "comm.all_reduce(medium)",
    "direct": "comm.all_reduce(large)",
    "gathering": "comm.all_gather(large)",
    "gathering_at_a_root": "for _ in range(20): comm.gather(large, root=rank_of_root)",
    "scattering": "for _ in range(20): comm.scatter(rows, root=rank_of_root)",
    "root_of_small_broadcasts": "for _ in range(20): comm.broadcast(small, root=rank_of_root)",
    "root_of_large_broadcasts": "for _ in range(20): comm.broadcast(large, root=rank_of_root)",
    "reducing_to_a_root": "for _ in range(20): comm.reduce(medium)",
    "first_call": "comm.dup().barrier()",
}


@pytest.mark.parametrize("single_copy", ["1", "0"])
@pytest.mark.parametrize("how", few(["kill"], ["exit", "raise"]))
def test_all_native_waits_end_when_a_rank_ends(
    job: Any, how: str, single_copy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYCOLL_SINGLE_COPY", single_copy)
    calls = list(DYING.values())
    text = f"""
read_directly(8 << 20)
small, medium, large = np.ones(2), np.ones(100_000), np.ones(1 << 21)
rows = np.ones((size, 1 << 20))
calls = {calls!r}
fresh = comm.dup()
comms = [comm.dup() for _ in calls]
for c in comms[:-1]:
    c.barrier()
names, errors, calling = {list(DYING)!r}, {{}}, threading.Semaphore(0)

def run(name, text, c):
    calling.release()
    try:
        exec(text, {{"comm": c, "small": small, "medium": medium, "large": large, "rows": rows,
                    "rank_of_root": 0, "range": range}})
        c.barrier()
    except BaseException as error:
        errors[name] = error

if rank == 1:
    for peer in 0, 2:
        comm.recv(peer)
    await_table((0, ".* for .* s"), (2, ".* for .* s"))
    if {how!r} == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if {how!r} == "exit":
        os._exit(0)
    raise ValueError("that is it")
threads = [threading.Thread(target=run, args=row) for row in zip(names, calls, comms)]
for thread in threads:
    thread.start()
for thread in threads:
    calling.acquire()
comm.send("all are about to call", 1)
error = error_of(comm.recv, 1, within=60)
assert isinstance(error, pycoll.PeerFailed) and error.rank == 1, repr(error)
started = time.monotonic()
for thread in threads:
    thread.join(max(0, started + 5 - time.monotonic()))
assert not any(thread.is_alive() for thread in threads), [n for n in names if n not in errors]
assert sorted(errors) == sorted(names)
for name, error in errors.items():
    assert isinstance(error, pycoll.PeerFailed) and error.rank == 1, (name, repr(error))
ok()
"""
    done = job(3, NATIVE + text)
    assert done.status == {"kill": 137, "exit": 0, "raise": 1}[how], done.stderr
    assert done.content == [0, 2], done.stderr


def test_no_memory_is_left_when_the_launcher_is_killed_in_native_calls(job: Any) -> None:
    text = """
x = np.ones(1 << 20)
memfd = int(os.environ["PYCOLL_SHM"].split(":")[0])
comm.all_reduce(x)
sys.stdout.write(f"{rank} {os.getpid()} {os.fstat(memfd).st_ino}\\n")
sys.stdout.flush()
while True:
    comm.all_reduce(x)
    comm.barrier()
"""
    process = subprocess.Popen(
        job.command(3, text), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    said = [process.stdout.readline().split() for _ in range(3)]
    pidfds = [os.pidfd_open(int(pid)) for _, pid, _ in said]
    process.kill()
    process.wait()
    for pidfd in pidfds:
        assert select.select([pidfd], [], [], 5.0)[0]
        os.close(pidfd)
    process.stdout.close()
    assert not holders({inode for _, _, inode in said})


def holders(inodes: set[str]) -> list[str]:
    """Processes that have one of these memories mapped."""
    found = []
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = maps.read_text().splitlines()
        except OSError:
            continue
        if any("host.pycoll" in line and line.split()[4] in inodes for line in lines):
            found.append(str(maps))
    return found


# Random calls.


@pytest.mark.parametrize("options", few([()], [("--no-single-copy",)]), ids=["direct", "slots"])
def test_random_calls_give_the_right_bits(options: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, "--seconds", "2", "--ranks", "2,4", "--seed", "7", *options],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all right" in done.stdout
