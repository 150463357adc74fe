"""Memory that is kept from call to call: in a program of plain C, and in jobs."""

from __future__ import annotations

from pathlib import Path

import pytest
from core_programs import ADDRESS, build, counted, needs_gcc, prefix_of
from script_jobs import Jobs, all_well

ROUNDS = 20_000
LIMITS = "-DPC_SCRATCH_KEPT=((size_t)8192)", "-DPC_SCRATCH_WORTH=((size_t)64)"


@needs_gcc
def test_memory_is_used_again_by_one_at_a_time_and_no_more_is_kept_than_may_be(
    tmp_path: Path,
) -> None:
    prefix = prefix_of(ADDRESS)
    program = build(tmp_path, "scratch_random", ["engine/scratch.c"], ADDRESS, *LIMITS)
    counts = counted([*prefix, program, str(ROUNDS)], tmp_path)
    # Each of these must have happened often enough to say something.
    assert all(count > ROUNDS / 100 for count in counts.values()), counts


SEEN = """
import ctypes, weakref
from pycoll._transports import link
from pycoll._transports._core import Scratch

seen, send, accept = [], link.Links._send, link.Links._accept


def keep(*parts):
    owners = [getattr(part.obj, "keeper", None) for part in map(memoryview, parts)]
    seen.extend(owner for owner in owners if isinstance(owner, Scratch))


def counted_send(self, number, peer, way, header, parts):
    keep(*parts)
    send(self, number, peer, way, header, parts)


def counted_accept(self, number, into):
    keep(into)
    accept(self, number, into)


link.Links._send, link.Links._accept = counted_send, counted_accept
"""


def test_a_transport_in_python_is_given_the_same_scratch_again(
    job: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYCOLL_SEGMENT", "1G")
    # Along the chain rank 1 receives, combines and sends on: all of that in scratch.
    text = f"""{SEEN}
x = np.full(400_000, rank + 1.0)  # more than what goes ahead
for turn in range(20):
    got = comm.reduce(x, algorithm="chain", root=0)
    assert rank or (got == 6).all()
assert len(seen) >= (20 if rank < 2 else 0), len(seen)
assert len(set(map(id, seen))) <= 3, seen
assert all(each.nbytes >= x.nbytes for each in seen)
ok()
"""
    all_well(job(3, text, "--transport", "zmq"), 3)


def test_scratch_of_which_too_much_is_kept_is_freed_when_the_transport_lets_go(
    job: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYCOLL_SEGMENT", "1G")
    text = f"""{SEEN}
x = np.full((64 << 20) // 8 + 1000, rank + 1.0)  # more than what is kept
gone = []
comm.reduce(x, algorithm="chain", root=0)
watched = [weakref.ref(each, gone.append) for each in set(seen)]
assert rank == 2 or watched
comm.barrier()
assert not gone
seen.clear()
comm.barrier()
assert len(gone) == len(watched), (gone, watched)
ok()
"""
    all_well(job(3, text, "--transport", "zmq"), 3)


def test_scratch_of_what_was_given_up_is_not_written_while_it_may_be_sent(
    job: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYCOLL_SEGMENT", "1G")
    text = f"""{SEEN}
part, other = comm.dup(), comm.dup()
x = np.full(400_000, rank + 1.0)  # more than what goes ahead
if rank == 0:
    other.recv(source=1)  # then rank 1 has given up
    part.close()
else:
    try:
        part.reduce(x, algorithm="chain", root=0, timeout=1)
    except pycoll.Error:
        pass
    if rank == 1:
        sent = seen[-1]
        assert (np.array((ctypes.c_double * len(x)).from_address(sent.address)) == 5).all()
        other.send("given up", 0)
seen.clear()
y = np.full(400_000, 100.0)
for turn in range(10):
    got = comm.reduce(y, algorithm="chain", root=0)
if rank == 1:
    assert sent not in seen and seen
    assert (np.array((ctypes.c_double * len(x)).from_address(sent.address)) == 5).all()
    gone = weakref.ref(sent)
    del sent
    comm.send(None, 1)
    comm.recv(source=1)
    assert gone() is None
ok()
"""
    all_well(job(3, text, "--transport", "zmq"), 3)


def test_what_is_sent_from_one_place_is_not_copied_for_a_transport_in_python(job: Jobs) -> None:
    text = """
from pycoll._transports import link

copied, send = set(), link.Links._send


def watched(self, number, peer, way, header, parts):
    if any(type(memoryview(part).obj) is bytes and len(part) > 66_000 for part in parts):
        copied.add(name)
    send(self, number, peer, way, header, parts)


link.Links._send = watched
x = np.ones(30_000 * size)
rows = x.reshape(size, -1)
calls = {
    "broadcast": lambda: comm.broadcast(x),
    "scatter": lambda: comm.scatter(rows if rank == 0 else None),
    "gather": lambda: comm.gather(x),
    "reduce": lambda: comm.reduce(x),
    "all_gather": lambda: comm.all_gather(x),
    "all_gatherv": lambda: comm.all_gatherv(x),
    "all_reduce": lambda: comm.all_reduce(x),
    "all_reduce by Python": lambda: comm.all_reduce(x, op=lambda a, b: a + b),
    "all_reduce of what is strided": lambda: comm.all_reduce(np.ones(60_000 * size)[::2]),
    "reduce_scatter": lambda: comm.reduce_scatter(rows),
    "all_to_all": lambda: comm.all_to_all(rows),
    "scan": lambda: comm.scan(x),
    "iall_reduce": lambda: comm.iall_reduce(x).wait(),
    "sendrecv": lambda: comm.sendrecv(x, (rank + 1) % size, (rank - 1) % size),
}
for name, call in calls.items():
    for _ in range(4):  # the first of them go another way
        call()
assert not copied, copied
ok()
"""
    all_well(job(3, text, "--transport", "zmq"), 3)
