"""Arrays and short objects between ranks of one host, sent and received without a request."""

from __future__ import annotations

import pytest
from pool_scripts import Scripts

TRANSPORTS = ["shm", "tcp"]  # by the second all goes its usual way: what a program sees is the same

COUNT = """
def array(value, n=4, dtype="i8"):
    return np.full(n, value, dtype)

def received(**how):
    out = array(-1)
    assert comm.recv(1, out=out, **how) is out
    return out[0]
"""


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_came_before_and_waits_is_received_before(scripts: Scripts, transport: str) -> None:
    """In the communicator's queue, or for a receive that was posted before."""
    text = """
for turn in range(50):
    if rank == 1:
        for value in range(3):
            comm.send(array(value), 0, 5)
        comm.recv(0)
        comm.send(array(3), 0, 5)
        comm.recv(0)
        comm.send(array(4), 0, 5)
        continue
    while comm.iprobe(1) is None:  # the first three are in the queue, or some of them
        pass
    comm.send(None, 1)
    assert received(tag=5) == 0
    assert [received(), received()] == [1, 2]
    early = comm.irecv(1, 5, array(-1))
    comm.send(None, 1)
    assert (received(tag=5), early.wait()[0]) == (4, 3)
ok()
"""
    scripts(2, COUNT + text, transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_is_not_wanted_stays(scripts: Scripts, transport: str) -> None:
    text = """
other = comm.dup()
if rank == 1:
    comm.send(array(0), 0, 1)
    comm.send(array(1), 0, 2)
    other.send(array(2), 0, 1)
    comm.send(array(3, 5), 0, 3)
    comm.send(array(4, 4, "f4"), 0, 4)
    comm.send({"an": "object"}, 0, 5)
    comm.send(array(5, 0), 0, 6)
    comm.send(array(6, 100_000), 0, 7)
    comm.send(array(7, 2), 0, 8)
    comm.recv(0)
    comm.send(array(8), 0, 9)
else:
    out = array(-1)
    assert other.recv(1, 1, out)[0] == 2
    assert received(tag=2) == 1
    assert received() == 0
    error_like(pycoll.TruncationError, "40 bytes", comm.recv, 1, 3, out)
    assert (comm.recv(1, 3) == 3).all()
    error_like(pycoll.MismatchError, "float32", comm.recv, 1, 4, out)
    assert (comm.recv(1, 4) == 4).all()
    error_like(pycoll.MismatchError, "object", comm.recv, 1, 5, out)
    assert comm.recv(1, 5) == {"an": "object"}
    assert len(comm.recv(1, 6, np.empty(0, "i8"))) == 0
    assert (comm.recv(1, 7, array(-1, 100_000)) == 6).all()
    assert comm.recv(1, 8, out)[:2].tolist() == [7, 7]
    error_like(pycoll.OperationTimeout, "recv", comm.recv, 1, 9, out, timeout=0.01)
    comm.send(None, 1)
    assert received(tag=9) == 8
ok()
"""
    scripts(2, COUNT + text, transport)


def test_a_message_with_another_tag_that_has_come_first_stays(scripts: Scripts) -> None:
    text = """
for turn in range(5):  # first calls are prepared in Python
    if rank == 1:
        comm.send(array(0), 0, 1)
        comm.send(array(1), 0, 2)
    comm.barrier()  # which looks at no messages
    if rank == 0:
        assert received(tag=2) == 1
        assert received(tag=1) == 0
ok()
"""
    scripts(2, COUNT + text)


@pytest.mark.parametrize("size", [2, 3])
def test_messages_of_all_lengths_go_round(scripts: Scripts, size: int) -> None:
    """More of them than the rings and the credit hold, and with more ranks than cores."""
    text = """
right, left = (rank + 1) % size, (rank - 1) % size
draw = np.random.default_rng(7)
lengths = draw.choice([0, 1, 8, 500, 4_000, 9_000, 60_000, 70_000], 2_000)
for turn, n in enumerate(lengths):
    x, out = np.full(n, turn % 251, "u1"), np.empty(n, "u1")
    if rank % 2 == 0:
        comm.send(x, right)
        comm.recv(left, out=out)
    else:
        comm.recv(left, out=out)
        comm.send(x, right)
    assert (out == turn % 251).all()
if rank == 0:
    for turn in range(5_000):
        comm.send(np.full(100, turn), 1)
elif rank == 1:
    out = np.empty(100, int)
    for turn in range(5_000):
        assert comm.recv(0, out=out)[99] == turn
ok()
"""
    scripts(size, text)


@pytest.mark.parametrize("size", [2, 3])
def test_what_was_sent_may_be_changed_at_once(scripts: Scripts, size: int) -> None:
    """Whoever has copied it by then: the receiver from there, or the sender into its heap."""
    text = """
draw = np.random.default_rng(7)
lengths = draw.choice([12_000, 12_288, 20_000, 40_000, 65_536], 1_000)
late, plain = draw.random(1_000) < 0.2, draw.random(1_000) < 0.9
x, out = np.empty(65_536, "u1"), np.empty(65_536, "u1")
for turn, n in enumerate(lengths):
    if rank == 0:
        x[:n] = turn % 251
        comm.send(x[:n], 1)
        x[:n] = 255
        comm.recv(1)
    elif rank == 1:
        while late[turn] and comm.iprobe(0) is None:
            pass
        got = comm.recv(0, out=out[:n]) if plain[turn] else comm.recv(0)
        comm.send(None, 0)
        assert (got == turn % 251).all(), (turn, n)
ok()
"""
    scripts(size, text)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_short_objects_and_arrays_come_in_order(scripts: Scripts, transport: str) -> None:
    text = """
class Odd:
    def __reduce__(self):
        return int, ("no number",)

other = comm.dup()
values = [None, 1, {"step": 7}, array(3), {"x": array(4), "y": [array(5)]}, [0] * 5_000, "last"]
values += [b"x" * n for n in range(4_020, 4_100)] + ["x" * n for n in (0, 255, 256, 3_000)]
for turn in range(3):
    if rank == 1:
        for tag, value in enumerate(values):
            comm.send(value, 0, tag)
        other.send("other", 0, 5)
        comm.send(Odd(), 0, 6)
        comm.send("tag", 0, 7)
        comm.send("deadline", 0, 8, timeout=60)
        assert comm.recv(0) == "done"
        continue
    assert other.recv(1) == "other"
    for tag, value in enumerate(values):
        got = comm.recv(1) if tag % 2 else comm.recv(1, tag)
        assert str(got) == str(value)
        if tag == 4:
            got["x"][:] = 1
            assert got["x"].flags.aligned and got["y"][0].tolist() == [5] * 4
    error_like(ValueError, "no number", comm.recv, 1, 6)
    assert comm.recv(1, 8) == "deadline"
    assert comm.recv(1) == "tag"
    comm.send("done", 1)
ok()
"""
    scripts(2, COUNT + text, transport)


def test_short_plain_objects_need_no_python(scripts: Scripts) -> None:
    text = """
from pycoll._arrays import objects

def never(*_):
    raise AssertionError

comm.send(None, 1) if rank == 0 else comm.recv(0)  # first calls are prepared in Python
for name in ("dump", "load"):
    cleanup.callback(setattr, objects, name, getattr(objects, name))
    setattr(objects, name, never)
for turn in range(100):
    if rank == 0:
        comm.send({"step": turn, "names": ["a", "b"]}, 1)
    else:
        assert comm.recv(0) == {"step": turn, "names": ["a", "b"]}
ok()
"""
    scripts(2, text)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_new_arrays_come_as_what_was_sent(scripts: Scripts, transport: str) -> None:
    text = """
import array as arrays

kinds = ["?", "i1", "u2", "i4", "u8", "f2", "f4", "f8", "c8", "c16", "longdouble"]
sent = [np.arange(12).reshape(3, 4).astype(kind) for kind in kinds]
sent += [np.empty((0, 3)), np.array(5.0), np.zeros((1,) * 6), np.zeros((1,) * 7)]
sent += [np.full(8_192, 7.0), np.full(8_193, 8.0), np.arange(6).reshape(2, 3).T, sent[0][:, ::2]]
sent += [memoryview(sent[3]), arrays.array("d", [1, 2, 3])]
status = pycoll.Status()
for turn in range(3):
    if rank == 1:
        for tag, x in enumerate(sent):
            comm.send(x, 0, tag)
        comm.recv(0)
        continue
    kept = []
    for tag, x in enumerate(sent):
        got = comm.recv(*[(1,), (), (1, tag)][tag % 3], status=status)
        nbytes = np.asarray(x).nbytes
        assert (status.source, status.tag, status.nbytes) == (1, tag, nbytes), (tag, status)
        assert type(got) is type(x)
        array = np.asarray(got)
        assert array.dtype == np.asarray(x).dtype and array.tolist() == np.asarray(x).tolist()
        assert array.flags.writeable
        assert not any(np.shares_memory(array, other) for other in kept)
        kept.append(array)
    comm.send(None, 1)
ok()
"""
    scripts(2, COUNT + text, transport)


def test_a_receive_from_any_begins_with_the_rank_after_the_last(scripts: Scripts) -> None:
    text = """
import os, shutil, tempfile

status = pycoll.Status()
folder = comm.broadcast(tempfile.mkdtemp() if rank == 1 else None, 1)
in_turn = []
for turn in range(5):
    if rank != 1:
        for value in range(10):
            comm.send(array(value), 1)
        open(f"{folder}/{turn} {rank}", "w").close()
    while rank == 1 and len(os.listdir(folder)) < 3 * (turn + 1):
        pass
    sources, values = [], [[], [], [], []]
    for _ in range(30) if rank == 1 else ():
        value = comm.recv(status=status)[0]
        sources.append(status.source)
        values[status.source].append(value)
    if rank == 1:
        assert values == [list(range(10)), [], list(range(10)), list(range(10))]
        later = {0: [2, 3], 2: [3, 0], 3: [0, 2]}
        in_turn.append(sources == [sources[0], *later[sources[0]]] * 10)
    comm.barrier()
if rank == 1:
    shutil.rmtree(folder)
    # A first call is prepared in Python; and while a thread of Python's looks after the links, it
    # hands over what has come from one rank after the other.
    assert any(in_turn[1:]), in_turn
ok()
"""
    scripts(4, COUNT + text)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_sendrecv_sends_once_and_receives_what_comes(scripts: Scripts, transport: str) -> None:
    text = """
other = 1 - rank
status = pycoll.Status()
for turn in range(20):
    out = array(-1)
    assert comm.sendrecv(array(rank), other, other, out=out) is out and out[0] == other
    assert comm.sendrecv(array(rank), other, other, 3, 3, status=status)[1] == other
    assert (status.source, status.tag) == (other, 3)
    assert comm.sendrecv({"from": rank}, other) == {"from": other}
    assert comm.sendrecv("an object", other) == "an object"
    assert comm.sendrecv(array(turn), rank, rank)[0] == turn  # to itself
    if rank == 0:
        text = "sendrecv.dest=1, source=1, tag=5. "
        error_like(pycoll.OperationTimeout, text, comm.sendrecv, array(1), 1, 1, 5, timeout=0.02)
        comm.send("go on", 1)
        out = np.empty(4, "f4")
        error_like(pycoll.MismatchError, "int64", comm.sendrecv, array(2), 1, 1, 6, out=out)
        assert comm.recv(1)[0] == 7
    else:
        assert comm.recv(0, 5)[0] == 1
        assert comm.recv(0) == "go on"
        comm.send(array(7), 0, 6)
        assert comm.recv(0, 6)[0] == 2
    comm.barrier()
ok()
"""
    scripts(2, COUNT + text, transport)


def test_a_message_that_is_taken_while_its_memory_is_made(scripts: Scripts) -> None:
    """By a program's own code, which may run where Python makes an object."""
    text = """
import gc

taken, receive = [], comm.recv

def take(phase, info):
    if not taken:
        taken.append(None)
        taken[0] = receive(1).tolist()

comm.send(None, 1) if rank == 0 else comm.recv(0)  # first calls are prepared in Python
before = gc.get_threshold()
cleanup.callback(gc.set_threshold, *before)
for threshold in range(1, 12):  # objects that are made until `take` runs: one falls into a receive
    if rank == 1:
        for n in (8, 4, 4):
            comm.send(memoryview(array(n, n)), 0)
        assert comm.recv(0) == "done"
        continue
    taken.clear()
    gc.collect()
    gc.callbacks.append(take)
    gc.set_threshold(threshold)
    first = receive(1)
    second = receive(1)
    gc.set_threshold(*before)
    gc.callbacks.remove(take)
    got = [first.tolist(), second.tolist(), *(taken or [receive(1).tolist()])]
    assert sorted(got) == [[4] * 4, [4] * 4, [8] * 8], (threshold, got, taken)
    comm.send("done", 1)
ok()
"""
    scripts(2, COUNT + text)
