"""Shared memory under the jobs of one host: who takes it, what it costs, how its waits end."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE
from pool_scripts import Scripts
from script_jobs import all_well
from shared_memory_jobs import NATIVE, REFUSE
from tiers import few


@pytest.mark.parametrize(
    "options", few([()], [("--transport", "auto")]), ids=["by default", "auto"]
)
def test_ranks_of_one_host_take_shared_memory(scripts: Scripts, options: tuple[str, ...]) -> None:
    text = """
comm.barrier()
assert core.attached and core.direct
assert links() == {"shm"}
check_all(comm, 1 << 21)
ok()
"""
    scripts(3, NATIVE + text, "shm", *options)


def test_tcp_can_be_chosen_instead(scripts: Scripts) -> None:
    text = """
assert shm is None and "shm" not in links()
check_all(comm)
ok()
"""
    scripts(2, NATIVE + text, "tcp")


def test_without_single_copy_all_goes_through_slots(scripts: Scripts) -> None:
    text = "check_all(comm, 1 << 21)\nassert core.attached and not core.direct\nok()"
    scripts(3, NATIVE + text, PYCOLL_SINGLE_COPY="0")


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


def test_a_compiled_core_of_another_version_is_said_to_be_that() -> None:
    text = """
import sys, types
from pycoll._transports import _core
older = types.ModuleType(_core.__name__)
older.MessageEngine = _core.MessageEngine
sys.modules[_core.__name__] = older
import pycoll
pycoll.init()
"""
    command = [sys.executable, "-c", text]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "BootstrapError: the compiled core is of another version of pycoll (" in done.stderr


def test_ranks_of_several_hosts_do_without_it_but_the_parts_of_a_host_take_it(
    scripts: Scripts,
) -> None:
    text = """
assert shm is None
check_all(comm)
part = comm.split(comm.node)
assert part.size == 2
check_all(part)
assert part._group.shm.core.attached
across = comm.split(rank % 2)
assert across._group.shm is None
check_all(across)
error_like(ValueError, "one host", comm.barrier, algorithm="shared_memory")
ok()
"""
    scripts(4, NATIVE + text, "shm", "--emulate-hosts", "2")


@pytest.mark.parametrize("times", few([60], [1000]))
def test_communicators_that_come_and_go_leave_no_memory_descriptor_or_mapping(
    scripts: Scripts, times: int
) -> None:
    text = f"""
x = np.ones(200_000, "f4")

def use(times):
    for _ in range(times):
        with comm.dup() as other:
            other.barrier()
            other.all_reduce(x)
            assert other._group.shm.core.attached
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
    scripts(2, NATIVE + text)


def test_calls_that_are_repeated_cause_no_page_faults(scripts: Scripts) -> None:
    text = """
import resource
for nbytes in (8, 65536, 1 << 20, 9 << 20):  # the last one in two pieces
    calls = max(10, min(200, (16 << 20) // nbytes))
    x = np.ones(nbytes // 4, "f4")
    out, rows = np.zeros_like(x), np.zeros((size, len(x)), "f4")
    for call in (
        lambda: comm.all_reduce(x, out=out), lambda: comm.all_gather(x, out=rows),
        lambda: comm.broadcast(x), lambda: comm.barrier(),
        lambda: comm.reduce(x, "sum", 0, out),
    ):
        for _ in range(60 if nbytes < 9 << 20 else 30):  # by then both ways were tried
            call()
        comm.barrier()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(calls):
            call()
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        assert faults <= 16 + calls // 50, (nbytes, faults, calls)
ok()
"""
    scripts(2, NATIVE + text)


def test_waiting_for_a_late_rank_takes_no_processor_time(scripts: Scripts) -> None:
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
    scripts(2, NATIVE + text)


def test_one_thread_is_in_native_calls_while_another_one_sends_and_receives(
    scripts: Scripts,
) -> None:
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
    scripts(2, NATIVE + text)


def test_a_native_wait_is_woken_at_once_though_another_thread_sleeps_in_a_receive(
    scripts: Scripts,
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
    scripts(2, NATIVE + text)


@pytest.mark.parametrize(
    ("count", "signum", "raised", "options"),
    [
        (1, "SIGINT", "KeyboardInterrupt", "timeout=60"),
        (1 << 21, "SIGINT", "KeyboardInterrupt", ""),
        (1, "SIGUSR1", "Alarm: it is time", ""),
    ],
)
def test_what_a_signal_raises_in_a_native_wait_breaks_only_that_communicator(
    scripts: Scripts, count: int, signum: str, raised: str, options: str
) -> None:
    text = f"""
class Alarm(Exception):
    pass

def handler(number, frame):
    raise Alarm("it is time")

cleanup.callback(signal.signal, signal.SIGUSR1, signal.signal(signal.SIGUSR1, handler))
x = np.ones({count})
other = comm.dup(name="other")
other.barrier()
reason = "gave up all_reduce #1 on other ({raised})"
if rank == 0:
    comm.send(os.getpid(), 1)
    kind = Alarm if "Alarm" in reason else KeyboardInterrupt
    error_like(kind, "", other.all_reduce, x, within=30, **dict({options}))
else:
    pid = comm.recv(0)
    await_table((0, "all_reduce"))
    os.kill(pid, signal.{signum})
    fails_soon(reason, other.all_reduce, x)
peer_failed(0, reason, other.barrier)
peer_failed(0, reason, other.barrier)
check_all(comm)
with comm.dup() as third:
    check_all(third)
ok()
"""
    scripts(2, NATIVE + text)
