"""Messages by the compiled core's engine: what a program sees of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pool_scripts import Scripts
from script_jobs import Jobs, all_well
from tiers import few

pytest.importorskip("pycoll._transports._core", exc_type=ImportError)

from pycoll._runtime.context import Context
from pycoll._runtime.matching import Match
from pycoll._transports._core import RECEIVE_ENDED, RECEIVE_HELD, STATUS_TAKEN_BACK

TRANSPORTS = few(["shm", "tcp"], ["zmq"])

IN_CORE = TRANSPORTS[:2]
"""Those that are in C themselves: nothing of Python is called, and the kernel has what was sent."""


@pytest.mark.parametrize("transport", IN_CORE)
def test_arrays_go_without_python(scripts: Scripts, transport: str) -> None:
    text = """
import sys
from pycoll._requests.core_requests import CoreRequest

# Whatever is called in Python beyond the methods themselves is counted.
calls = []
x, out, status = np.arange(6.0).reshape(2, 3), np.zeros((2, 3)), pycoll.Status()
long, room = np.arange(300_000.0), np.zeros(300_000)
peer = 1 - rank
comm.barrier()
comm.recv(comm.isend(x, rank) and rank)  # first uses import modules
comm.sendrecv(x, peer)
def note(frame, event, arg):
    if event == "call":
        calls.append(frame.f_code.co_name)
sys.setprofile(note)
for _ in range(20):
    calls.clear()  # a wait of more than a moment is Python's
    comm.send(x, rank, tag=5)
    assert comm.recv(rank, pycoll.ANY_TAG, out, status) is out
    requests = [comm.irecv(peer, 1, out), comm.isend(x + rank, peer, 1)]
    requests[0].wait()
    requests[1].wait()
    counted = list(calls)
    if comm.iall_reduce(np.array([not counted]), "land").wait()[0]:
        break  # all together
sys.setprofile(None)
assert counted == [], counted
assert (status.source, status.tag, status.nbytes) == (rank, 5, 48)
assert all(isinstance(request, CoreRequest) for request in requests)
assert (out == x + peer).all()
requests = [comm.irecv(peer, 2, room), comm.issend(long, peer, 2)]
assert [result is room for result in pycoll.wait_all(requests)] == [True, False]
assert (room == long).all()
got = comm.recv(rank) if comm.send(x, rank) is None else None
assert got.shape == (2, 3) and (got == x).all()
ok()
"""
    scripts(2, text, transport)


@pytest.mark.parametrize("transport", IN_CORE)
def test_a_long_wait_for_many_is_one_wait_of_the_core(scripts: Scripts, transport: str) -> None:
    text = """
count = 3000  # more than there is credit for
received = np.zeros((count, 1))
if rank == 0:
    requests = [comm.irecv(1, tag, received[tag]) for tag in range(count)]
    for wait in (pycoll.wait_all, pycoll.wait_any):  # for longer than the core waits by itself
        error_like(pycoll.OperationTimeout, f"of {count} requests", wait, requests, 0.2)
    comm.send(None, 1)
    pycoll.wait_all(requests)
    assert (received == 1).all()
    # None has a task of its own, of which Python would hear.
    assert [request for request in requests if getattr(request, "_made", None) is not None] == []
else:
    comm.recv(0)
    x = np.ones(1)
    pycoll.wait_all([comm.isend(x, 0, tag) for tag in reversed(range(count))])
ok()
"""
    scripts(2, text, transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_does_not_fit_is_refused_and_stays(scripts: Scripts, transport: str) -> None:
    text = """
peer = 1 - rank
comm.send(np.arange(4.0), peer, tag=1)
request = comm.irecv(peer, 1, np.zeros(2))
error_like(pycoll.TruncationError, "has 32 bytes", request.wait)
error_like(pycoll.TruncationError, "has 32 bytes", comm.recv, peer, 1, np.zeros(2))
error_like(pycoll.MismatchError, "sent float64", comm.recv, peer, 1, np.zeros(4, np.int8))
assert comm.recv(peer, 1).tolist() == [0, 1, 2, 3]
comm.send({"an": "object"}, peer, tag=2)
error_like(pycoll.MismatchError, "Python object", comm.recv, peer, 2, np.zeros(4))
assert comm.recv(peer, 2) == {"an": "object"}
request = comm.irecv(peer, 3, np.zeros(2))
assert request.cancel() and request.cancelled and request.done
error_like(pycoll.Error, "was cancelled", request.wait)
error_like(TypeError, "only a receive", comm.isend(np.zeros(1), peer, 4).cancel)
request = comm.irecv(peer, 9, np.zeros(2))
error_like(pycoll.OperationTimeout, "irecv", request.wait, 0.05)
error_like(pycoll.Error, "not done yet", lambda: request.result)
comm.barrier()
comm.send(np.ones(2), peer, 9)
assert request.wait().tolist() == [1, 1]
comm.recv(peer, 4)
ok()
"""
    scripts(2, text, transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_peer_that_ends_ends_what_waits_for_it(job: Jobs, transport: str) -> None:
    text = """
if rank == 1:
    comm.send(np.ones(2), 0)
    comm.send(np.ones(2), 0, 6)
    comm.recv(0, 0, np.zeros(1))
    os._exit(3)
comm.recv(1, out=np.zeros(2))
here, new = comm.irecv(1, 6), comm.irecv(1, 6)
request, large = comm.irecv(1, 7, np.zeros(2)), comm.isend(np.zeros(300_000), 1, 8)
comm.send(np.zeros(1), 1)
for call in lambda: comm.recv(1, out=np.zeros(2)), new.wait, request.wait, large.wait:
    peer_failed(1, "exit status 3", call)
assert here.wait().tolist() == [1, 1]
ok()
"""
    done = job(2, text, "--transport", transport)
    assert done.content == [0], done.stdout + done.stderr


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_is_refused_is_the_next_receives_also_if_that_is_pythons(
    scripts: Scripts, transport: str
) -> None:
    text = """
peer, room = 1 - rank, lambda n=4, dtype="f8": np.zeros(n, dtype)
for receives in (
    lambda: [comm.irecv(peer, 5, room(3)), comm.irecv(peer, 5, room())],
    lambda: [comm.irecv(peer, 5, room(8)[::2]), comm.irecv(peer, 5, room())],
    lambda: [comm.irecv(peer, 5, room(6)[::2]), comm.irecv(peer, 5, room())],
    lambda: [comm.irecv(peer, 5, room(4, "i4")), comm.irecv(peer, 5), comm.irecv(peer, 5, room())],
):
    begun = receives()
    comm.barrier()
    for i in range(3):
        comm.send(np.full(4, float(i)), peer, 5)
    got = []
    for request in begun:
        try:
            got.append(request.wait()[0])
        except pycoll.Error:
            pass
    while len(got) < 3:
        got.append(comm.recv(peer, 5)[0])
    assert got == [0, 1, 2], got
    comm.barrier()
ok()
"""
    scripts(2, text, transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_receives_keep_their_order_while_sends_are_taken_back(
    scripts: Scripts, transport: str
) -> None:
    text = """
import random
lengths = [424, 8176, 2_097_152, 2, 200_360, 283_352, 32_504, 128]
draw, taken_back = random.Random(rank), 0
for _ in range(100):
    if rank == 0:
        statuses = [pycoll.Status() for _ in lengths]
        # What is not contiguous Python receives.
        outs = [draw.choice([None, np.empty(2 * n, np.int8)[::2]]) for n in lengths]
        requests = [comm.irecv(1, 0, *each) for each in zip(outs, statuses)]
        comm.barrier()
        pycoll.wait_all(requests)
        assert [status.nbytes for status in statuses] == lengths
        continue
    comm.barrier()
    for nbytes in lengths:
        while True:
            try:
                comm.send(np.zeros(nbytes, np.int8), 0, timeout=draw.choice([0, 1e-4, 1e-3, 1e-2]))
                break
            except pycoll.OperationTimeout:
                taken_back += 1
assert rank == 0 or taken_back
ok()
"""
    scripts(2, text, transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_memory_for_a_message_that_was_taken_back_is_not_that_of_the_next(
    scripts: Scripts, transport: str
) -> None:
    text = """
x, timeout = np.zeros(100_000, np.int8), 1e-4
request = comm.irecv(1, 1) if rank == 0 else None
while True:
    if rank == 1:
        try:
            comm.send(x, 0, 1, timeout=timeout)
            is_received, timeout = True, timeout * 0.7
        except pycoll.OperationTimeout:
            is_received, timeout = False, timeout * 1.4
        comm.send(is_received, 0, 2)
    elif comm.recv(1, 2):
        request.wait()
        request = comm.irecv(1, 1)
    has_memory = comm.broadcast(getattr(request, "_array", None) is not None)
    if has_memory:
        break  # and its message was taken back
if rank == 1:
    comm.send(np.ones(3, [("a", "i4")]), 0, 1)
else:
    assert request.wait()["a"].tolist() == [1, 1, 1]
ok()
"""
    scripts(2, text, transport)


ALARM = """
class Alarm(Exception):
    pass

def handler(number, frame):
    raise Alarm

def interrupted(*args):
    if threading.current_thread() is threading.main_thread():
        np.empty = empty
        signal.raise_signal(signal.SIGUSR1)
    return empty(*args)

empty, long = np.empty, ["x" * 100_000]
cleanup.callback(setattr, np, "empty", empty)
cleanup.callback(signal.signal, signal.SIGUSR1, signal.signal(signal.SIGUSR1, handler))
"""
"""A handler that raises while memory for a long object is made, when `np.empty = interrupted`."""


@pytest.mark.parametrize("call", ["recv", "irecv"])
def test_a_receive_that_a_signal_handler_ends_leaves_its_message(
    scripts: Scripts, call: str
) -> None:
    text = f"""{ALARM}
if rank == 1:
    comm.send(long, 0, 1)
else:
    comm.probe(1, 1)
    np.empty = interrupted
    error_like(Alarm, "", comm.{call}, 1, 1)
    assert comm.recv(1, 1, timeout=10 * PATIENCE) == long
ok()
"""
    scripts(2, text, "tcp")


def test_a_wait_that_a_signal_handler_ends_leaves_its_message(scripts: Scripts) -> None:
    text = f"""{ALARM}
from pycoll._requests.core_requests import CoreRequest

raised = False
while not comm.broadcast(raised):
    if rank == 1:
        comm.recv(0)
        comm.send(long, 0, 1)
        continue
    request = comm.irecv(1, 1)
    comm.send("now", 1)
    if isinstance(request, CoreRequest):  # else Python was busy
        np.empty = interrupted
    try:
        request.wait()  # another thread may have made the memory
    except Alarm:
        raised = True
    np.empty = empty
    assert request.wait(10 * PATIENCE) == long
ok()
"""
    scripts(2, text, "tcp")


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("how", ["killed", "exit"])
def test_who_awaits_a_message_hears_that_its_sender_has_ended(
    job: Jobs, transport: str, how: str
) -> None:
    text = """
import asyncio
async def receive(source):
    return await comm.irecv(source)
if rank == size - 1:
    comm.send(os.getpid(), 0)
    comm.recv(0)
    if HOW == "exit":
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)
def hear():
    if rank == 0:
        last = comm.recv(size - 1)
        comm.isend(None, size - 1)
    asyncio.run(receive(size - 1))
reason = "exit status 0" if HOW == "exit" else SIGKILL
peer_failed(size - 1, reason, hear, within=10)
ok()
"""
    done = job(3, text.replace("HOW", repr(how)), "--transport", transport)
    assert done.content == [0, 1], done.stderr


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_message_whose_time_passes_again_and_again_is_received_once(
    scripts: Scripts, transport: str
) -> None:
    text = """
def patiently(call, timeout=0.0003):
    while True:
        try:
            return call(timeout)
        except pycoll.OperationTimeout:
            timeout *= 3
            assert timeout < 20 * PATIENCE
other = comm.dup()
pending = other.irecv(tag=7)  # somebody drives all the time
x = np.arange(51358)
for turn in range(150):
    comm.barrier()
    if rank == 0:
        patiently(lambda timeout: comm.send(x, 1, turn, timeout=timeout))
        comm.recv(1, turn)
    else:
        until = time.monotonic() + turn % 30 / 10_000  # late by another time each turn
        while time.monotonic() < until:
            pass
        got = comm.recv(0, turn)
        assert (got == x).all()
        comm.send(got[::-1], 0, turn)
assert pending.cancel()
ok()
"""
    scripts(2, text, transport)


@pytest.mark.parametrize("options", [(), ("--encrypt",)], ids=["plain", "encrypted"])
def test_the_core_moves_messages_by_zmq_between_hosts(job: Jobs, options: tuple[str]) -> None:
    text = """
transport = comm._group.engine.transport
assert transport.name == "core"
assert {other.name for other in transport.outside.peers.values()} == {"zmq"}
near, far = rank ^ 1, rank ^ 2
assert near not in transport.outside.peers and far in transport.outside.peers
for peer in (near, far):
    got = comm.sendrecv(np.full(1 << 20, rank), peer, source=peer)
    assert (got == peer).all()
assert comm.all_reduce(np.ones(1 << 18))[-1] == size
ok()
"""
    network = () if options else ("--transport", "zmq")
    hosts = ("--emulate-hosts", "2")
    if not options:
        text = text.replace("assert near not in transport.outside.peers and", "assert")
    all_well(job(4, text, *network, *hosts, *options), 4)


class Handle:
    """A receive of the core's, as Python sees it."""

    def __init__(self, state: int, status: int = 0) -> None:
        self.state, self.status, self.number, self.peer, self.order = state, status, 7, 1, 0
        self.header, self.nbytes, self.payload = bytes(64), 8, None


def test_what_is_told_late_of_a_message_that_was_taken_back_posts_nothing() -> None:
    # The first message was taken back, and the second came to the receive that waits in its place;
    # that was taken back, too, before the end of the first was told.
    owners: dict[Any, Any] = {}
    posted: list[Handle] = [Handle(RECEIVE_HELD)]
    transport = SimpleNamespace(
        own=owners.__setitem__, disown=lambda handle: owners.pop(handle, None)
    )
    context: Any = SimpleNamespace(
        core=SimpleNamespace(post=lambda *_: posted.pop()),
        transport=transport,
        matches={},
        withdrawn=None,
        _incoming=lambda arrival, handle: arrival,
    )
    context.settle = lambda match: Context.settle(context, match)
    first: Any = Handle(RECEIVE_ENDED, STATUS_TAKEN_BACK)
    match = Match(context, first, 1, 0, peek=False)
    owners[first] = match
    match.held()
    assert match.done
    assert not posted
    second: Any = match.handle
    second.state, second.status = RECEIVE_ENDED, STATUS_TAKEN_BACK
    assert first not in owners
    match.ended(STATUS_TAKEN_BACK)  # IndexError, if it posted once more
    assert match.handle is second
