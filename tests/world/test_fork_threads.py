"""Forks, child processes and threads of a rank."""

from __future__ import annotations

from typing import Any

from pool_scripts import Scripts
from script_jobs import all_well


def test_a_forked_child_cannot_communicate_and_harms_nobody(job: Any) -> None:
    done = job(
        2,
        """
import multiprocessing, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
other, large = comm.dup(), np.ones(1 << 20)
comm.send(large[:10], 1 - rank)  # there already when the child is made

def in_child():
    for c in comm, other:
        for call, *args in (
            (c.send, 1, 1 - rank), (c.recv, 1 - rank), (c.recv, rank), (c.probe,), (c.iprobe,),
            (c.sendrecv, large, rank), (c.barrier,), (c.all_reduce, 1), (c.dup,), (c.split, 0),
        ):
            error_like(pycoll.Error, "was forked from a rank", call, *args, within=0.5)
    error_like(pycoll.Error, "let the rank do it, and exchange data", pycoll.init, within=0.5)
    other.close()
    comm.close()
    pycoll.finalize()

def fork(ends):
    pid = os.fork()
    if pid == 0:
        in_child()
        ends()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

# With and without the end of an interpreter, which runs exit handlers and destroys objects.
assert fork(lambda: os._exit(0)) == 0
assert fork(lambda: sys.exit(0)) == 0
assert fork(lambda: sys.exit(5)) == 5
process = multiprocessing.get_context("fork").Process(target=in_child)
process.start()
process.join(10)
assert process.exitcode == 0
with multiprocessing.get_context("fork").Pool(2) as pool:  # one that does not communicate
    assert pool.map(abs, [-1, -2, -3]) == [1, 2, 3]
assert (comm.recv(1 - rank) == large[:10]).all()
assert other.all_reduce(large)[-1] == size
assert comm.sendrecv(large, 1 - rank).sum() == large.sum()
ok()
""",
    )
    all_well(done, 2)


def test_a_fork_in_the_middle_of_calls_of_other_threads_harms_nobody(scripts: Scripts) -> None:
    scripts(
        2,
        """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
others = [comm.dup() for _ in range(3)]
over = threading.Event()

def work(other, x):
    while other.all_reduce(1 - over.is_set()) == size:
        assert other.all_reduce(x)[-1] == size

sizes = 1, 1000, 1 << 18
arguments = zip(others, map(np.ones, sizes), strict=True)
threads = [threading.Thread(target=work, args=pair) for pair in arguments]
for thread in threads:
    thread.start()
for _ in range(20):
    pid = os.fork()
    if pid == 0:
        for other in others:
            error_like(pycoll.Error, "was forked from a rank", other.barrier, within=0.5)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
over.set()
for thread in threads:
    thread.join()
ok()
""",
    )


def test_a_forked_child_that_ends_gives_up_nothing_of_its_parents(job: Any) -> None:
    # An interpreter that ends destroys its objects. A communicator's shared memory is emptied when
    # as many have let go of it as there are ranks: the call that a rank waits in would be lost.
    done = job(
        2,
        """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
other = comm.dup()
other.barrier()  # all have its shared memory now
if rank == 0:
    await_table((1, "all_reduce"))
    for _ in range(size):
        pid = os.fork()
        if pid == 0:
            sys.exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert other.all_reduce(2) == 2 * size
ok()
""",
        "--transport",
        "shm",
    )
    all_well(done, 2)


def test_a_process_that_a_rank_starts_is_refused_under_its_parents_number(scripts: Scripts) -> None:
    scripts(
        2,
        """
import subprocess
child = "import pycoll\\ntry: pycoll.init()\\nexcept pycoll.BootstrapError as e: print(e)"
text = f"rank {rank} is already process {os.getpid()}; this is process [0-9]+.*must not call init"
def put_back(variables=dict(os.environ)):
    os.environ.clear()
    os.environ.update(variables)

cleanup.callback(put_back)
for transport in "auto", "shm":  # which it cannot have either, but that comes second
    os.environ["PYCOLL_TRANSPORT"] = transport
    said = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True)
    assert said.stderr == "" and re.search(text, said.stdout), said
# One that was to run alone says so.
for name in "PYCOLL_RANK", "PYCOLL_SIZE", "PYCOLL_RENDEZVOUS", "RANK", "WORLD_SIZE":
    del os.environ[name]
child = "import pycoll; print(pycoll.init().all_reduce(5))"
assert subprocess.check_output([sys.executable, "-c", child]) == b"5\\n"
assert comm.all_reduce(1) == 2
ok()
""",
    )


def test_a_child_that_holds_the_links_of_a_killed_rank_hides_nothing(job: Any) -> None:
    # A forked child has copies of all sockets of its parent, so no link is cut at its death.
    done = job(
        3,
        """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
comm.barrier()
if rank == 1:
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            signal.pause()
    await_table((0, "recv"), (2, "send"))
    os.kill(os.getpid(), signal.SIGKILL)
if rank == 0:
    peer_failed(1, SIGKILL, comm.recv, 1, within=60)
else:
    peer_failed(1, SIGKILL, comm.send, np.ones(1 << 20), 1, within=60)
peer_failed(1, SIGKILL, comm.barrier)
ok()
""",
    )
    assert done.status == 137
    assert done.content == [0, 2], done.stderr


def test_threads_send_and_receive_on_one_communicator_and_each_gets_its_own(
    scripts: Scripts,
) -> None:
    scripts(
        3,
        """
wrong, count = [], 0
def talk(tag):
    x = np.full(1 << (tag % 3 * 9), tag)
    for i in range(30):
        got = comm.sendrecv(x, (rank + 1) % size, (rank - 1) % size, tag, tag)
        comm.send((tag, i), (rank + 1) % size, 100 + tag)
        said = comm.recv((rank - 1) % size, 100 + tag)
        if not (got == tag).all() or said != (tag, i):
            wrong.append((tag, i, got, said))
    wrong.append(None)

def fail(tag):
    for _ in range(30):
        error_like(pycoll.OperationTimeout, "recv", comm.recv, 0, 200 + tag, timeout=0.002)
    wrong.append(None)

threads = [threading.Thread(target=talk, args=(tag,)) for tag in range(6)]
threads += [threading.Thread(target=fail, args=(tag,)) for tag in range(2)]
for thread in threads:
    thread.start()
for i in range(50):
    assert comm.all_reduce(i) == 3 * i
for thread in threads:
    thread.join()
assert wrong == 8 * [None], wrong
comm.barrier()
ok()
""",
    )
