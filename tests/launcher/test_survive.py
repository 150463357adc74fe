"""`pycoll-run --survive`: the ranks that live go on, wherever the others die."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from script_jobs import Done
from tiers import exhaustive, few, smoke

WAYS = {
    "shm": (),
    "tcp": ("--transport", "tcp"),
    "zmq": ("--transport", "zmq"),
    "hosts": ("--emulate-hosts", "2"),  # shared memory inside, tcp between
}

# Where a rank dies: in its first call of agree or shrink in a round, or beside them.
AT_CALLS = ("before it says so", "after it has said so", "when it hears", "when it has heard")
STEPS = (
    "in a collective",
    *(f"{call}, {where}" for call in ("agree", "shrink") for where in AT_CALLS),
    "in the first collective",
)

SWEEP = """
import json
world, engine = comm, comm._group.engine
rounds = json.load(open(sys.argv[1] + "/rounds"))
large = np.full(1 << 16, 1.0)
step, call = "", ""  # where this rank dies in this round; what it calls

def dies(where):
    if step == where:
        os.kill(os.getpid(), signal.SIGKILL)

agree, post, event = engine.agree, engine.control.post, engine._event

def hooked_agree(what, flag, timeout):
    global call
    call = what.text.removesuffix("()")
    agreed = agree(what, flag, timeout)
    dies(f"{call}, when it has heard")
    return agreed

def hooked_post(kind, **fields):
    if kind == "agree":
        dies(f"{call}, before it says so")
    post(kind, **fields)
    if kind == "agree":
        dies(f"{call}, after it has said so")

def hooked_event(kind, fields):
    if kind == "agreed":
        dies(f"{call}, when it hears")
    event(kind, fields)

engine.agree, engine.control.post, engine._event = hooked_agree, hooked_post, hooked_event

def works(comm, where):
    "Whether collectives of this communicator work; they show that all have the same."
    try:
        dies(where)
        assert comm.all_gather(comm.members) == [comm.members] * comm.size
        assert (comm.all_reduce(large) == comm.size).all()
    except pycoll.PeerFailed as error:
        assert error.rank in comm.members and error.reason == SIGKILL, repr(error)
        return False
    return True

for victims in rounds:
    places = {comm.members[place]: where for place, where in victims}
    living = tuple(each for each in comm.members if each not in places)
    step = places.get(rank, "")
    comm.agree(works(comm, "in a collective"))
    while True:
        comm = comm.shrink()
        assert comm.members == tuple(sorted(comm.members)) and comm.members[comm.rank] == rank
        worked = works(comm, "in the first collective")
        if comm.members == living and worked:
            break
        assert set(living) < set(comm.members) and not worked
assert not step
other = comm.dup()
assert other.all_reduce(1) == comm.size
assert not set(comm.members) & {error_of(world.barrier).rank}
ok()
"""


def sweep(job: Any, size: int, rounds: list[list[tuple[int, str]]], *options: str) -> Done:
    (job.folder / "rounds").write_text(json.dumps(rounds))
    done: Done = job(size, SWEEP, "--survive", *options)
    dead = sum(len(victims) for victims in rounds)
    assert len(done.content) == size - dead, done.stdout + done.stderr
    assert done.status == 0, done.stderr
    lines = done.stderr.splitlines()
    said = r"pycoll-run: rank \d+ failed after \d+\.\d s: killed by signal 9 \(SIGKILL\); "
    assert len(lines) == dead, done.stderr
    assert all(re.fullmatch(said + "the others go on", line) for line in lines), done.stderr
    return done


@pytest.mark.parametrize("way", few(["hosts"], ["shm", "tcp", "zmq"]))
def test_the_others_go_on_wherever_a_rank_dies(job: Any, way: str) -> None:
    # The lowest rank, the highest and one between in turn; at last two at once.
    rounds = [[((0, -1, 1)[number % 3], step)] for number, step in enumerate(STEPS[::3])]
    rounds.append([(0, STEPS[2]), (2, STEPS[5])])
    done = sweep(job, 9, rounds, *WAYS[way])
    assert 0 not in done.content


@exhaustive
@pytest.mark.parametrize("place", [0, 1, -1])
@pytest.mark.parametrize("way", WAYS)
def test_every_place_and_every_step(job: Any, way: str, place: int) -> None:
    sweep(job, len(STEPS) + 2, [[(place, step)] for step in STEPS], *WAYS[way])


@exhaustive
@pytest.mark.parametrize("first", STEPS)
def test_two_at_once_at_every_pair_of_steps(job: Any, first: str) -> None:
    rounds = [[(0, first), (2, second)] for second in STEPS]
    sweep(job, 2 * len(STEPS) + 3, rounds)


AT_RANDOM = """
import random
draw = random.Random(comm.broadcast(os.urandom(8)))
comm.agree(True)  # nobody dies before all have that
own = random.Random()
order = draw.sample(range(size), size - 2)  # who dies, one after the other
large, rows = np.full(1 << 18, 1.0), 1 << 15

def calls(comm):
    me, n = comm.rank, comm.size
    blocks = np.repeat(np.arange(n) + 10.0 * me, rows).reshape(n, rows)
    whole = np.repeat(np.arange(n) * 10.0 + me, rows).reshape(n, rows)
    yield (comm.all_reduce(large) == n).all()
    yield (comm.all_to_all(blocks) == whole).all()
    yield (comm.all_gather(blocks[me])[:, 0] == np.arange(n) * 11.0).all()
    yield (comm.broadcast(large if me == n - 1 else None, root=n - 1) == 1).all()
    got = comm.gather(blocks[0])
    yield me > 0 or (got[:, 0] == np.arange(n) * 10.0).all()
    yield (comm.reduce_scatter(blocks)[0] == sum(10.0 * r + me for r in range(n))).all()
    yield comm.sendrecv(large * me, (me + 1) % n, (me - 1) % n)[-1] == (me - 1) % n
    yield (comm.iall_reduce(large).wait() == n).all()

for victim in order:
    if rank == victim:  # nothing handles this alarm
        signal.setitimer(signal.ITIMER_REAL, own.uniform(1e-6, 0.03))
    while victim in comm.members:
        try:
            while True:
                for is_right in calls(comm):
                    assert is_right
        except pycoll.PeerFailed as error:
            assert (error.rank, error.reason) == (victim, "killed by signal 14 (SIGALRM)")
        comm = comm.shrink()
assert comm.size == 2 and all(calls(comm))
ok()
"""


@exhaustive
@pytest.mark.parametrize("way", [*WAYS, "share-arrays", "segments"])
@pytest.mark.parametrize("seed", range(3))  # what happens is chance
def test_ranks_that_die_in_the_middle_of_large_calls(job: Any, way: str, seed: int) -> None:
    more = {"share-arrays": ("--share-arrays",), "segments": ("-x", "PYCOLL_SINGLE_COPY=0")}
    done = job(6, AT_RANDOM, "--survive", *{**WAYS, **more}[way])
    assert (done.status, len(done.content)) == (0, 2), done.stderr


@smoke
def test_where_nobody_shrinks_the_status_is_that_of_the_lost_rank(job: Any) -> None:
    done = job(
        4,
        """
half = comm.split(rank // 2)
if rank == 3:
    os.kill(os.getpid(), signal.SIGKILL)
peer_failed(3, SIGKILL, comm.barrier)
if rank == 2:
    peer_failed(3, SIGKILL, half.barrier)
for _ in range(100 if rank < 2 else 0):  # the others are not concerned
    assert half.all_reduce(1) == 2
ok()
""",
        "--survive",
    )
    assert (done.status, done.content) == (137, [0, 1, 2]), done.stderr
    first, head, *_ = done.stderr.splitlines()
    assert first.endswith("killed by signal 9 (SIGKILL); the others go on")
    assert re.fullmatch(r"pycoll-run: rank 3 failed after .*: killed by signal 9 \(SIGKILL\)", head)


def test_without_survive_a_rank_that_was_left_out_counts(job: Any) -> None:
    done = job(
        3,
        """
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
error_like(pycoll.PeerFailed, "rank 1", comm.barrier)
assert comm.shrink().all_reduce(1) == 2
ok()
""",
        "--grace",
        "60",
    )
    assert sorted(done.content) == [0, 2], done.stderr
    assert done.status == 128 + 9, done.stderr
    assert "rank 1 failed after" in done.stderr
    assert "SIGKILL" in done.stderr


def test_a_rank_that_fails_after_the_last_shrink_gives_the_status(job: Any) -> None:
    done = job(
        4,
        """
if rank == 0:
    sys.exit(9)
error_of(comm.barrier)
comm = comm.shrink()
if rank == 2:
    sys.exit(3)
error = error_of(comm.barrier)
assert (error.rank, error.reason) == (2, "exit status 3"), repr(error)
ok()
""",
        "--survive",
    )
    assert (done.status, done.content) == (3, [1, 3]), done.stderr
    assert "rank 2 failed after" in done.stderr.splitlines()[-2]


@smoke
def test_abort_ends_a_job_that_goes_on(job: Any) -> None:
    done = job(
        3,
        """
if rank == 0:
    sys.exit(9)
error_of(comm.barrier)
comm = comm.shrink()
if rank == 1:
    comm.abort(5)
error_of(comm.barrier)
comm.shrink()
signal.pause()
""",
        "--survive",
    )
    assert done.status == 5, done.stderr
    assert "the others go on" not in done.stderr.splitlines()[1]


def test_ctrl_c_says_what_the_others_wait_in_who_have_gone_on(job: Any) -> None:
    done = job(
        3,
        """
pair = comm.split(rank // 2)
if rank == 2:
    os.kill(os.getpid(), signal.SIGKILL)
peer_failed(2, SIGKILL, comm.barrier)
if rank == 1:
    pair.agree(True)
comm = pair
await_table((1, "agree"))
os.kill(os.getppid(), signal.SIGINT)
signal.pause()
""",
        "--survive",
    )
    assert done.status == 137, done.stderr  # of the first failure, as nobody has shrunk
    assert re.search(
        r"\npycoll-run: rank 2 failed after .*: killed by signal 9 \(SIGKILL\)\n"
        r"pycoll-run: then ended by SIGINT after .* s; what each rank did:\n"
        r"    rank 0: .*\n"
        r"    rank 1: agree\(\) .* at script.py:\d+, for .* s\n",
        done.stderr,
    ), done.stderr


@exhaustive  # it takes two seconds by itself
def test_a_rank_that_is_lost_before_all_have_met_ends_the_job(job: Any) -> None:
    init = "import time\nif os.environ['PYCOLL_RANK'] == '1':\n    sys.exit(4)\n"
    init += "try:\n    pycoll.init()\nexcept pycoll.BootstrapError:\n    signal.pause()\n"
    done = job(2, "", "--survive", "--timeout", "30", init=init)
    assert done.status == 4, done.stderr
    assert "the others go on" not in done.stderr


@exhaustive  # it takes two seconds by itself
def test_a_rank_that_has_raised_is_ended_with_what_it_has_started(job: Any) -> None:
    done = job(
        3,
        """
import subprocess
if rank == 0:
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    comm.ssend((os.getpid(), child.pid), 1)
    threading.Thread(target=threading.Event().wait).start()  # keeps the process
    raise ValueError("no more")
ends = [os.pidfd_open(pid) for pid in comm.recv(0)] if rank == 1 else []
error = error_of(comm.barrier)
assert (error.rank, error.reason) == (0, "raised ValueError"), repr(error)
comm = comm.shrink()
for end in ends:
    select.select([end], [], [])
comm.barrier()
ok()
""",
        "--survive",
    )
    assert (done.status, done.content) == (0, [1, 2]), done.stderr
    assert "raised ValueError; the others go on" in done.stderr


@pytest.mark.parametrize("transport", few(["tcp"], ["shm"]))
def test_a_message_that_came_is_received_though_its_sender_raises_next(
    job: Any, transport: str
) -> None:
    done = job(
        2,
        """
x = np.arange(1000.0)
if rank == 0:
    comm.recv(1)
    comm.ssend(x, 1)
    raise ValueError("no more")
request = comm.irecv(0)
comm.send("go on", 0)
engine = comm._group.engine
while 0 not in engine.membership.failed:
    with engine.locked():
        engine._progress()
# As a receive that has waited for long: both have come.
assert (comm._finish_in_core(request, 20.0) == x).all()
assert error_of(comm.barrier).rank == 0
ok()
""",
        "--survive",
        "--transport",
        transport,
    )
    assert done.content == [1], done.stderr


def test_the_lock_of_the_table_of_communicators_is_not_lost_with_a_rank(job: Any) -> None:
    done = job(
        3,
        """
memfd = int(os.environ["PYCOLL_SHM"].split(":")[0])
if rank == 1:
    os.pwrite(memfd, (1 + rank).to_bytes(4, sys.byteorder), 128)
    comm.ssend("locked", 0)
    comm.recv(0)
    os.kill(os.getpid(), signal.SIGKILL)
if rank == 0:
    comm.recv(1)
    assert os.pread(memfd, 4, 128) == (2).to_bytes(4, sys.byteorder)
    comm.send("seen", 1)
error_of(comm.barrier)
comm = comm.shrink()
assert (comm.all_reduce(np.ones(1000)) == 2).all()
ok()
""",
        "--survive",
    )
    assert (done.status, done.content) == (0, [0, 2]), done.stderr


@exhaustive
def test_a_lost_host_loses_its_ranks_at_once(run: Any) -> None:
    script = """
import os, signal
import pycoll
comm = pycoll.init()
comm.barrier()
if comm.rank == 3:
    os.kill(os.getppid(), signal.SIGKILL)  # which has started the ranks of that host
try:
    while True:
        comm.barrier()
except pycoll.PeerFailed:
    comm = comm.shrink()
comm.barrier()
print(*comm.members)
"""
    done = run("--survive", "-H", "localhost:2,far:2", script=script)
    assert (done.returncode, done.stdout) == (0, "0 1\n" * 2), done.stderr
    for rank in (2, 3):
        assert f"rank {rank} failed after" in done.stderr
    assert done.stderr.count(": lost with its host far: ") == 2


CUT = """
import contextlib, socket
if rank != 1:
    assert comm.sendrecv(rank, 2 - rank, 2 - rank) == 2 - rank
if rank == 0:  # rank 1 may have dialed it by now
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            with socket.socket(fileno=os.dup(int(name))) as end:
                if end.family == socket.AF_INET and end.getpeername():
                    end.shutdown(socket.SHUT_RDWR)

def until_broken():
    while True:
        comm.barrier()
"""


@exhaustive
def test_of_two_ranks_whose_link_is_cut_one_is_ended(job: Any) -> None:
    done = job(
        3,
        f"""{CUT}
lost = error_of(until_broken, within=10.0).rank
comm = comm.shrink()
assert comm.members == tuple({{0, 1, 2}} - {{lost}})
assert comm.all_reduce(1) == 2
ok()
""",
        *("--survive", "--transport", "tcp", "--timeout", "30"),
    )
    assert done.status == 0, done.stderr
    assert done.content in ([0, 1], [0, 2], [1, 2]), done.stderr
    assert re.search(r"rank [012] failed after .*: its link to rank [012] was cut: ", done.stderr)


def test_without_survive_the_cut_link_is_what_the_job_reports(job: Any) -> None:
    done = job(3, f"{CUT}\nuntil_broken()", *("--transport", "tcp", "--timeout", "30"))
    assert done.status == 1, done.stderr
    told = r"rank [012] failed after .*: raised PeerFailed \(its link to rank [012] was cut: "
    assert re.search(told, done.stderr), done.stderr
