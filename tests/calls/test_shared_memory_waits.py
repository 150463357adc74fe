"""Waits in shared memory: how signals, deadlines, forks and kills end them."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pool_scripts import Scripts
from script_jobs import all_well
from shared_memory_jobs import NATIVE
from tiers import few

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/soak_shared_memory"


@pytest.mark.parametrize("count", [10, 1_000_000])
def test_roots_that_differ_are_shown_with_their_number_and_line(
    scripts: Scripts, count: int
) -> None:
    text = f"""
other = comm.dup(name="other")
other.barrier()
x = np.zeros({count})
for _ in range(27):
    other.broadcast(x)
def calls():
    other.broadcast(x, rank)  # of the 28th large one all tell how long the trial took
    other.barrier()

error = error_of(calls)
assert isinstance(error, pycoll.MismatchError), repr(error)
# From this rank, or, with both lines, from the launcher.
text = str(error)
assert "collective number 28 of other" in text or "#28 on other" in text, text
assert all(f"rank {{r}}: broadcast(root={{r}})" in text for r in range(size)), text
assert {count} < 100 or "script.py:" in text, text
ok()
"""
    scripts(2, text)


def test_signals_at_any_moment_of_native_calls_end_them_on_all_ranks(
    scripts: Scripts,
) -> None:
    # Rank 0 gets a signal while all make calls as quick as they can: in the core, at the door of
    # Python functions that it calls, or between two calls; then the barrier is another call.
    text = """
import random

class Alarm(Exception):
    pass

def handler(number, frame):
    raise Alarm

cleanup.callback(signal.signal, signal.SIGUSR1, signal.signal(signal.SIGUSR1, handler))
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
    scripts(3, NATIVE + text)


def test_a_signal_handler_that_returns_does_not_end_a_native_wait(scripts: Scripts) -> None:
    text = """
got = []
before = signal.signal(signal.SIGUSR1, lambda number, frame: got.append(number))
cleanup.callback(signal.signal, signal.SIGUSR1, before)
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
    scripts(2, NATIVE + text)


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
    thread.join()
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


def test_who_gives_up_may_change_what_others_still_read_and_they_return_no_wrong_values(
    scripts: Scripts,
) -> None:
    # Rank 0 has read all, its memory being there, when rank 1 is half-way.
    text = """
import itertools
read_directly(1)
x = np.full((2, 2 << 20), rank + 1.0)
all_x = np.array([x * 0 + 1, x * 0 + 2])
wanted = (
    ("all_gather", all_x, None), ("all_reduce", x * 0 + 3, None), ("all_to_all", all_x[:, 0], None),
    ("reduce_scatter", x[0] * 0 + 3, None), ("broadcast", all_x[0], 0),
    # Here the root copies, too, or who sends to it.
    ("broadcast", all_x[1], 1), ("scatter", x[0] * 0 + 1, 0), ("scatter", x[0] * 0 + 2, 1),
    ("gather", all_x, 0), ("gather", all_x, 1),
)
# How long rank 1 reads depends on the machine.
for (name, want, root), seconds in itertools.product(wanted, (0.0015, 0.004, 0.01)):
    c = comm.dup()
    c.barrier()
    assert c._group.shm.core.direct
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
    scripts(2, NATIVE + text)


@pytest.mark.parametrize(
    "call",
    few(
        ["comm.broadcast(x, 0)", "comm.gather(x, 1, out=rows if rank == 1 else None)"],
        ["comm.broadcast(x, 1)", "comm.scatter(rows if rank == 0 else None, 0, out=x)"],
    ),
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


@pytest.mark.parametrize("options", few([()], [("--no-single-copy",)]), ids=["direct", "slots"])
def test_random_calls_give_the_right_bits(options: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, "--seconds", "1", "--ranks", "2,4", "--seed", "7", *options],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all right" in done.stdout
