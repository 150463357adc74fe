"""sendrecv, probes and persistent requests in the compiled core."""

from __future__ import annotations

import pytest
from core_counting import COUNTING
from pool_scripts import Scripts
from script_jobs import Jobs
from tiers import few

pytest.importorskip("pycoll._transports._core", exc_type=ImportError)

TRANSPORTS = few(["shm", "tcp"], ["zmq"])

IN_CORE = TRANSPORTS[:2]
"""Those that are in C themselves: nothing of Python is called, and the kernel has what was sent."""


@pytest.mark.parametrize("transport", IN_CORE)
def test_sendrecv_and_probes_go_without_python(scripts: Scripts, transport: str) -> None:
    text = """
ALLOWED = {"pycoll._runtime.envelope"}
x, out, status = np.arange(6.0), np.zeros(6), pycoll.Status()

def step():
    global new, found, none
    none = comm.iprobe(rank, 9)
    assert comm.sendrecv(x + rank, peer, peer, 3, 3, out, status) is out
    new = comm.sendrecv(x * 2, dest=peer, source=peer, timeout=30)
    comm.send(x, rank, 9)
    found = [comm.probe(rank, timeout=30), comm.iprobe(tag=9)]
    comm.recv(rank, 9, out)

# One that finds nothing looks in Python, too, unless one has a moment ago.
goes_without_python(step, before=lambda: comm.iprobe(rank, 9))
assert (status.source, status.tag, status.nbytes) == (peer, 3, 48)
assert (new == x * 2).all() and (out == x).all() and none is None
assert found == [pycoll.Status(rank, 9, 48)] * 2
ok()
"""
    scripts(2, COUNTING + text, transport)


@pytest.mark.parametrize("transport", IN_CORE)
def test_persistent_sends_and_receives_go_without_python(scripts: Scripts, transport: str) -> None:
    text = """
ALLOWED = {"wait_all", "_here", "pycoll._support.public_edge"}
ALLOWED |= {"pycoll._arrays.conversion", "pycoll._arrays.libraries", "pycoll._arrays.value"}
ALLOWED |= {"pycoll._arrays.objects"}
# Starting and waiting are methods in Python, each of a line or two.
ALLOWED |= {"start", "wait", "done", "_last", "<lambda>", "_dump"}
x, out = np.zeros(6), np.zeros(6)
send, receive = comm.persistent.send(x, peer, 1), comm.persistent.recv(peer, 1, out)
again = comm.persistent.recv(peer, 2)

def step():
    global got
    receive.start()
    again.start()
    x[:] += 1
    comm.isend("text", peer, 2).wait()
    send.start()
    results = pycoll.wait_all([receive, send, again])
    assert results[0] is out and results[2] == "text"
    assert (out == x).all()
    receive.start()
    send.start()
    receive.wait()
    send.wait()

goes_without_python(step)
ok()
"""
    scripts(2, COUNTING + text, transport)


@pytest.mark.parametrize("transport", IN_CORE)
def test_isendrecv_and_its_waits_go_without_python(scripts: Scripts, transport: str) -> None:
    text = """
ALLOWED = {"pycoll._support.public_edge", "wait_all", "wait_any", "wait_some", "_take", "_result"}
ALLOWED |= {"<listcomp>", "_here"}
ALLOWED |= {"pycoll._arrays.conversion", "pycoll._arrays.libraries", "pycoll._arrays.value"}
x, out = np.zeros(6), np.zeros(6)
exchange = comm.persistent.sendrecv(x, peer, peer, 7, 7, out)

def begun(tag):
    return comm.isendrecv(x, peer, peer, tag, tag)

def step():
    x[:] += 1
    assert (begun(1).wait() == x).all()
    request = begun(2)
    while not request.test():
        pass
    assert request.done and (request.result == x).all()
    exchange.start()
    assert exchange.wait() is out and (out == x).all()
    several = [begun(3), exchange.start(), comm.irecv(peer, 4), comm.isend(x, peer, 4)]
    assert all((got == x).all() for got in pycoll.wait_all(several)[:3])

def any_step():
    several = [begun(5), begun(6)]
    assert {pycoll.wait_any(several)[0], pycoll.wait_any(several)[0]} == {0, 1}
    several = [begun(5), begun(6)]
    left = {0, 1}
    while left:
        left -= set(pycoll.wait_some(several)[0])

goes_without_python(step)
goes_without_python(any_step)
ok()
"""
    scripts(2, COUNTING + text, transport)


def test_sendrecv_gives_up_what_it_has_begun_when_it_fails(scripts: Scripts) -> None:
    text = """
peer, long = 1 - rank, np.arange(300_000.0)
comm.send(np.arange(5.0), peer, 1)
# What comes does not fit: it stays, and what was sent was taken back.
room = np.zeros(2)
error_like(pycoll.TruncationError, "has 40 bytes", comm.sendrecv, long, peer, peer, 2, 1, room)
comm.barrier()
assert comm.iprobe(peer, 2) is None
assert comm.recv(peer, 1).tolist() == [0, 1, 2, 3, 4]
comm.barrier()  # what is sent next is not looked for
for seconds in (0, 0.05, 0.3):
    error_like(pycoll.OperationTimeout, r"sendrecv\\(dest=\\d, source=\\d, tag=2\\)", comm.sendrecv,
               long, peer, peer, 2, 1, timeout=seconds)
comm.barrier()
assert comm.iprobe(peer, 2) is None
error_like(ValueError, "out overlaps x", comm.sendrecv, long[:9], peer, peer, out=long[5:])
comm.barrier()
x = np.full(4, float(rank))
assert comm.sendrecv(x, peer, peer, out=x) is x and (x == peer).all()
assert comm.sendrecv({"rank": rank}, peer, peer) == {"rank": peer}
assert comm.sendrecv(x, pycoll.PROC_NULL, pycoll.PROC_NULL) is None
ok()
"""
    scripts(2, text)


def test_a_probe_waits_and_hears_that_nobody_can_send(job: Jobs) -> None:
    text = """
if rank == 1:
    await_table((0, r"probe\\(source=1, tag=4\\)"))
    comm.send({"an": "object"}, 0, 4)
    comm.recv(0)
    os._exit(3)
status = comm.probe(1, 4)
assert (status.source, status.tag) == (1, 4) and status.nbytes > 16
assert comm.recv(1, 4) == {"an": "object"}
error_like(pycoll.OperationTimeout, "probe.source=1", comm.probe, 1, timeout=0.15)
assert comm.iprobe(1) is None
comm.send(None, 1)
for call in (comm.probe, comm.iprobe):
    while True:
        error = None
        try:
            assert call(1) is None
        except pycoll.PeerFailed as exc:
            error = exc
            break
    assert error.rank == 1
ok()
"""
    done = job(2, text)
    assert done.content == [0], done.stdout + done.stderr


def test_who_only_probes_hears_what_the_launcher_says(job: Jobs) -> None:
    text = """
other = comm.dup()
if rank == 1:
    await_table((0, "recv"))
    comm.send(None, 0)
    os._exit(3)
comm.recv(1)
peer_failed(1, "exit status 3", lambda: [other.iprobe(0, 1) for _ in iter(int, 1)])
ok()
"""
    done = job(2, text)
    assert done.content == [0], done.stdout + done.stderr


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_send_that_fails_is_not_counted(job: Jobs, transport: str) -> None:
    text = """
quiet = comm.dup()
if rank == 1:
    assert quiet.recv(0, 1).nbytes == 8  # counted: it has come
    comm.recv(0)
    os._exit(3)
requests = [quiet.issend(np.zeros(n), 1) for n in (1, 3_000_000)]
quiet.send(np.zeros(1), 1, 1)
comm.send(None, 1)
for request in requests:
    error_like(pycoll.PeerFailed, "rank 1", request.wait)
error_like(pycoll.PeerFailed, "rank 1", quiet.send, np.zeros(1), 1)
assert [each.tolist() for each in quiet.counters()[:2]] == [[0, 8], [0, 1]]
ok()
"""
    done = job(2, text, "--transport", transport)
    assert done.content == [0], done.stdout + done.stderr


def test_a_persistent_request_is_as_by_the_other_engine(scripts: Scripts) -> None:
    text = """
peer, out = 1 - rank, np.zeros(3)
request = comm.persistent.recv(peer, 1, out)
error_like(pycoll.Error, "was not started", request.wait)
error_like(pycoll.Error, "was not started", lambda: request.done)
error_like(pycoll.Error, "was not started", pycoll.wait_all, [request])
error_like(TypeError, "tag", comm.persistent.recv, peer, "one")
assert request.start() is request and "pending" in repr(request)
error_like(pycoll.Error, "still under way", request.start)
assert request.cancel() and request.cancelled and request.done
request.start()
assert not request.cancelled
comm.barrier()
comm.send(np.ones(3), peer, 1)
assert pycoll.wait_any([request]) == (0, out)
error_like(ValueError, "no request is left", pycoll.wait_any, [request])
value = []
send = comm.persistent.send(value, peer, 2)
for number in range(3):
    value.append(number)
    send.start().wait()
    assert comm.recv(peer, 2) == list(range(number + 1))
other = comm.dup()
request = other.persistent.send(out, peer)
other.close()
error_like(pycoll.Error, "is closed", request.start)
ok()
"""
    scripts(2, text)
