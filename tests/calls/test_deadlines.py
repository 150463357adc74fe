"""Deadlines of collectives, in the core: of a call, and of all calls of a job."""

from __future__ import annotations

import pytest
from core_counting import COUNTING
from pool_scripts import Scripts
from tiers import few

pytest.importorskip("pycoll._transports._core", exc_type=ImportError)

TRANSPORTS = ["shm", "tcp"]

CALLS = """
LONG = 50_000  # elements, which do not fit into a slot, nor into a message that is sent ahead

def each_call(count):
    "By name (the rank for which all wait that wait, the call), on `c`; `how`: keywords."
    x, rows, last = np.ones(count), np.ones((size, count)), size - 1
    blocks, counts = list(rows), [count] + [0] * last
    mine, none = rows[0].copy(), lambda value, root: value if rank == root else None
    return {
        "barrier": (last, lambda c, **how: c.barrier(**how)),
        "broadcast": (last, lambda c, **how: c.broadcast(mine, last, **how)),
        "reduce": (last, lambda c, **how: c.reduce(x, "max", 0, **how)),
        "all_reduce": (last, lambda c, **how: c.all_reduce(x, **how)),
        "all_reduce_many": (last, lambda c, **how: c.all_reduce_many([x, mine], **how)),
        "gather": (last, lambda c, **how: c.gather(x, 0, **how)),
        "all_gather": (last, lambda c, **how: c.all_gather(x, **how)),
        "scatter": (last, lambda c, **how: c.scatter(none(rows, last), last, mine, **how)),
        "reduce_scatter": (last, lambda c, **how: c.reduce_scatter(rows, **how)),
        "all_to_all": (last, lambda c, **how: c.all_to_all(rows, **how)),
        "scan": (0, lambda c, **how: c.scan(x, **how)),
        "exscan": (0, lambda c, **how: c.exscan(x, **how)),
        "gatherv": (last, lambda c, **how: c.gatherv(x, 0, **how)),
        "all_gatherv": (last, lambda c, **how: c.all_gatherv(x, **how)),
        "scatterv": (last, lambda c, **how: c.scatterv(none(blocks, last), last, **how)),
        "all_to_allv": (last, lambda c, **how: c.all_to_allv(blocks, **how)),
        "reduce_scatterv": (last, lambda c, **how: c.reduce_scatterv(x, counts, **how)),
    }

def ends_in_time(name, call, seconds, late=1.0):
    "The call, which somebody keeps waiting, ends soon after its deadline."
    began = time.monotonic()
    error = error_of(call, within=60)
    took, text = time.monotonic() - began, str(error)
    assert type(error) is pycoll.OperationTimeout and isinstance(error, TimeoutError), repr(error)
    said = rf"rank {rank}: {name}\\(.* at \\S*script.py:\\d+ was not done by its deadline. "
    assert re.match(said, text), text
    if "does not answer" not in text:  # the launcher of a machine that has no time for it
        told = text.partition("What the ranks are doing:")[2]
        assert re.search(f"rank {rank}: {name}", told), text
    assert seconds <= took < seconds + late * PATIENCE, took
"""

EVERY = (
    CALLS
    + """
def keep_waiting(name, late, call, is_first):
    "One rank waits with a deadline for one that does not come; others may wait, too."
    c = comm.dup(timeout=20)
    if not is_first:
        call(c, timeout=20)
    comm.barrier(timeout=20)
    waits = size - 1 if late == 0 else 0
    if rank == waits:
        ends_in_time(name, lambda: call(c, **how), SECONDS)
        comm.send("it has ended", late)
    else:
        if rank == late:
            comm.recv(waits, timeout=20)
        try:  # what has come of the others is enough for some
            call(c, timeout=20)
        except pycoll.OperationTimeout:
            pass
    first = f"rank {waits}: {name}.*by its deadline"
    error_like(pycoll.OperationTimeout, first, c.barrier, timeout=20)
    c.close()

for count in (3, LONG):
    for name, (late, call) in each_call(count).items():
        if name in NAMES:
            keep_waiting(name, late, call, is_first=count == LONG)
            keep_waiting(name, late, call, is_first=False)
comm.barrier(timeout=20)
ok()
"""
)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("size", few([3], more=[2, 4]))
def test_every_collective_ends_at_the_deadline_of_its_call(
    scripts: Scripts, transport: str, size: int
) -> None:
    text = "SECONDS = 0.02\nhow = {'timeout': SECONDS}\nNAMES = dir(comm)\n"
    scripts(size, text + EVERY, transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_default_deadline_ends_collectives(scripts: Scripts, transport: str) -> None:
    names = ["all_reduce", "broadcast", "all_gatherv", "reduce_scatterv"]
    text = f"SECONDS = 0.1\nhow = {{}}\nNAMES = {names}\n"
    scripts(2, text + EVERY, transport, "--op-timeout", "0.1")


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("default", [None, 40.0], ids=["call", "default"])
def test_calls_with_a_deadline_go_without_python(
    scripts: Scripts, transport: str, default: float | None
) -> None:
    text = f"""{CALLS}
ALLOWED = set()
comm.op_timeout = {default}
mine = [call for name, (_, call) in each_call(3).items() if {transport == "shm"} or name[-1] != "v"]
how = {{"timeout": 30}} if {default is None} else {{}}
again = comm.persistent.all_reduce(np.ones(3))

def step():
    for call in mine:
        call(comm, **how)
    comm.all_reduce(np.ones(3), algorithm="ring", **how)
    comm.all_reduce(np.ones(3), timeout=30.5)
    comm.iall_reduce(np.ones(3)).wait(30)
    comm.iall_reduce(np.ones(3)).wait(timeout=30.5)
    again.start()
    again.wait(30)

goes_without_python(step)
ok()
"""
    scripts(2, COUNTING + text, transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_each_communicator_has_a_default_deadline_that_may_be_set(
    scripts: Scripts, transport: str
) -> None:
    text = f"""{CALLS}
import math
c = comm.dup(timeout=20)
for kind, wrong in (TypeError, "1"), (ValueError, -1), (ValueError, math.nan):
    error_like(kind, "op_timeout", setattr, c, "op_timeout", wrong)
assert c.op_timeout == comm.op_timeout == math.inf
c.op_timeout = 0.1
child = c.sub(range(size))
c.op_timeout = None
assert (c.op_timeout, child.op_timeout, comm.op_timeout) == (math.inf, 0.1, math.inf)
if rank == 0:
    request = child.irecv(1)
    error_like(pycoll.OperationTimeout, "irecv", request.wait)
    error_like(pycoll.OperationTimeout, "recv", child.recv, 1)
    child.op_timeout = 50
    comm.send("now", 1)
    assert request.wait() == "late"
    child.op_timeout = 0.1
    ends_in_time("all_reduce", lambda: child.all_reduce(np.ones(3)), 0.1)
    comm.send("it has ended", 1)
else:
    assert comm.recv(0) == "now"
    child.send("late", 0, timeout=20)
    assert comm.recv(0) == "it has ended"
error = error_of(child.barrier)
# what rank 0 has sent may be here before its deadline is told
told = (pycoll.OperationTimeout, pycoll.MismatchError) if rank else pycoll.OperationTimeout
assert isinstance(error, told) and "rank 0: all_reduce" in str(error), error
c.barrier(timeout=20)
ok()
"""
    scripts(2, text, transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_deadline_is_one_for_all_waits_of_a_call_and_new_in_the_next(
    scripts: Scripts, transport: str
) -> None:
    text = f"""{CALLS}
seconds = 0.5 * PATIENCE
for count in (3, LONG):
    c, x, pause = comm.dup(), np.ones(count), threading.Event()
    for _ in range(8):  # calls that wait, together longer than a deadline
        if rank == 2:
            pause.wait(seconds / 5)
        assert c.all_reduce(x, timeout=1.2 * seconds)[0] == size
    for _ in range(1000):
        c.all_reduce(x[:2], timeout=20)
    comm.barrier()
    # The first rank comes late, the second not at all.
    if rank == 1:
        pause.wait(seconds * 0.7)
    if rank == 0:
        call = lambda: c.all_reduce(x, timeout=seconds)
        ends_in_time("all_reduce", call, seconds, late=0.3)
        comm.send("it has ended", 2)
    else:
        if rank == 2:
            comm.recv(0)
        try:  # what has come of the others may be enough
            c.all_reduce(x, timeout=50)
        except pycoll.OperationTimeout:
            pass
    error_like(pycoll.OperationTimeout, "rank 0: all_reduce.*by its deadline", c.barrier)
ok()
"""
    scripts(3, text, transport)


def test_what_python_goes_on_with_has_what_is_left_of_the_time(scripts: Scripts) -> None:
    text = f"""{CALLS}
from pycoll._calls.uneven_out import BlockTargets

# Rank 1 is late, and once more between the two rounds of a call on another kind of array.
seconds, pause, places = 0.5 * PATIENCE, threading.Event(), BlockTargets.places
def late_places(*args):
    pause.wait(0.8 * seconds)
    return places(*args)

c = comm.dup()
c.all_gatherv(np.zeros(LONG, "l"))
comm.barrier()
if rank == 0:
    call = lambda: c.all_gatherv(np.zeros(LONG, "l"), timeout=seconds)
    ends_in_time("all_gatherv", call, seconds, late=0.3)
else:
    cleanup.callback(setattr, BlockTargets, "places", places)
    BlockTargets.places = late_places
    pause.wait(0.7 * seconds)
    error_like(pycoll.OperationTimeout, "rank 0: all_gatherv", c.all_gatherv,
               memoryview(np.zeros(LONG, "q")))
ok()
"""
    scripts(2, text)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_deadline_of_a_wait_leaves_its_request(scripts: Scripts, transport: str) -> None:
    text = f"""{CALLS}
x, out = np.ones(3), np.zeros(3)
dp = comm.dup(name="dp")
again = dp.persistent.all_reduce(x, out=out)
for begin in (lambda: dp.iall_reduce(x, out=out), again.start):
    if rank == 0:
        request = begin()
        for seconds in (0, 0.02, 0.15):
            ends_in_time("iall_reduce", lambda: request.wait(seconds), seconds)
            several = lambda: pycoll.wait_all([request], seconds)
            ends_in_time("wait_all of 1 request, first iall_reduce", several, seconds)
        first = r"first iall_reduce\\([^)]*\\) #\\d+ on dp at "
        error_like(pycoll.OperationTimeout, first, several)
        comm.send("come", 1)
    else:
        comm.recv(0)
        request = begin()
    assert request.wait(50) is out and out.tolist() == [2, 2, 2]
    for wrong in (-1, float("nan"), "3", True):
        error_like((ValueError, TypeError)[wrong in ("3", True)], "timeout is a number of seconds",
                   request.wait, wrong)
ok()
"""
    scripts(2, text, transport)


def test_deadlines_of_two_threads_and_communicators_are_their_own(scripts: Scripts) -> None:
    text = f"""{CALLS}
part = comm.split(0).dup()
several = [comm.dup(), part.dup(), comm.sub([0, 1]).dup()]
x = np.ones(3)
for c in several:
    c.all_reduce(x)
if rank == 0:
    took = [0.0] * 3
    def wait(index, seconds):
        began = time.monotonic()
        error_like(pycoll.OperationTimeout, "all_reduce", several[index].all_reduce, x,
                   timeout=seconds, within=60)
        took[index] = time.monotonic() - began
    wanted = [0.6, 0.1, 0.35]
    threads = [threading.Thread(target=wait, args=pair) for pair in enumerate(wanted)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(want <= got < want + 0.2 * PATIENCE for want, got in zip(wanted, took)), took
comm.barrier()
assert comm.all_reduce(x, timeout=50)[0] == 2
ok()
"""
    scripts(2, text)
