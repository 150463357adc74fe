"""Values that the compiled core makes of messages: receives without `out`."""

from __future__ import annotations

import pytest
from core_counting import COUNTING
from pool_scripts import Scripts
from script_jobs import Jobs, all_well
from tiers import few

pytest.importorskip("pycoll._transports._core", exc_type=ImportError)

TRANSPORTS = few(["shm", "tcp"], ["zmq"])

IN_CORE = TRANSPORTS[:2]
"""Those that are in C themselves: nothing of Python is called, and the kernel has what was sent."""


@pytest.mark.parametrize("transport", IN_CORE)
def test_arrays_are_made_without_python(scripts: Scripts, transport: str) -> None:
    text = """
ALLOWED = {"wait_all", "pycoll._support.public_edge", "_here"}
ALLOWED |= {"pycoll._arrays.conversion", "pycoll._arrays.libraries", "pycoll._arrays.value"}
x, long, status = np.arange(6.0).reshape(2, 3), np.arange(300_000), pycoll.Status()

def step():
    global one, two, three
    requests = [comm.irecv(peer, 1), comm.irecv(peer, 2, status=status)]
    sent = [comm.isend(x + rank, peer, 1), comm.isend(long, peer, 2)]
    one, two = pycoll.wait_all(requests)
    pycoll.wait_all(sent)
    comm.send(x, rank)
    three = comm.irecv(rank).result

goes_without_python(step)
assert one.dtype == x.dtype and (one == x + peer).all() and (three == x).all()
assert two.dtype == long.dtype and (two == long).all()
assert (status.source, status.tag, status.nbytes) == (peer, 2, long.nbytes)
one[:] = 7  # it is writable, and nobody else's
ok()
"""
    scripts(2, COUNTING + text, transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_long_message_is_fetched_though_nobody_waits(scripts: Scripts, transport: str) -> None:
    text = """
peer, long = 1 - rank, np.arange(300_000.0)
received, small = comm.irecv(peer, 1), comm.irecv(peer, 2)
comm.barrier()
sent = [comm.issend(long, peer, 1), comm.issend(long[:3], peer, 2)]
while not (received.done and small.done and all(request.done for request in sent)):
    pass
assert (received.result == long).all() and small.result.tolist() == [0, 1, 2]
ok()
"""
    scripts(2, text, transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_is_no_array_of_numpy_is_made_by_python(scripts: Scripts, transport: str) -> None:
    text = """
import array
peer, status = 1 - rank, pycoll.Status()
values = [array.array("d", [1, 2]), array.array("q", range(100_000)), {"a": [1]}, [np.ones(50_000)]]
# They come before the receives, and after them.
sent = [comm.isend(value, peer, 1) for value in values]
comm.barrier()
first = [comm.irecv(peer, 1).wait() for _ in values]
requests = [comm.irecv(peer, 2, status=status) for _ in values]
comm.barrier()
sent += [comm.isend(value, peer, 2) for value in values]
second = pycoll.wait_all(requests)
for got in first, second:
    assert type(got[0]) is array.array and got[0] == values[0], got[0]
    assert got[1] == values[1] and got[2] == values[2] and (got[3][0] == 1).all()
assert (status.source, status.tag) == (peer, 2)
pycoll.wait_all(sent)
ok()
"""
    scripts(2, text, transport)


def test_a_request_that_is_done_has_its_message_whatever_comes_after(scripts: Scripts) -> None:
    text = """
peer, other = 1 - rank, comm.dup()
request, never = other.irecv(peer), other.irecv(peer)
comm.barrier()
other.send(np.arange(3.0), peer)
while not request.done:
    pass
other.close()
assert request.result.tolist() == [0, 1, 2]
error_like(pycoll.Error, "closed", never.wait)
ok()
"""
    scripts(2, text)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_what_python_receives_is_not_lost_when_time_is_short(
    scripts: Scripts, transport: str
) -> None:
    text = """
dates = np.arange(300_000).astype("datetime64[s]")  # the core does not know such elements
for _ in range(10):
    if rank == 1:
        requests = [comm.isend(dates, 0, 2), comm.isend(np.zeros(5), 0, 3)]
        comm.barrier()
        pycoll.wait_all(requests)
        continue
    comm.barrier()
    seconds = 1e-5
    while True:
        try:
            assert (comm.recv(1, pycoll.ANY_TAG, timeout=seconds) == dates).all()
            break
        except pycoll.OperationTimeout:
            seconds *= 2
    assert comm.recv(1, pycoll.ANY_TAG).size == 5
ok()
"""
    scripts(2, text, transport)


def test_waits_of_many_kinds_find_what_python_makes(scripts: Scripts) -> None:
    text = """
import array
import asyncio

peer, odd, long = 1 - rank, array.array("d", [1, 2]), np.arange(100_000.0)

async def both(one, two):
    return await asyncio.gather(one, two)

for wait in (
    lambda requests: [pycoll.wait_any([request])[1] for request in requests],
    lambda requests: [pycoll.wait_some([request])[1][0] for request in requests],
    lambda requests: asyncio.run(both(*requests)),
    lambda requests: [request.wait(50) for request in requests],
    lambda requests: pycoll.wait_all(requests, timeout=50),
):
    requests = [comm.irecv(peer, 1), comm.irecv(peer, 2)]
    comm.barrier()
    sent = [comm.isend(odd, peer, 1), comm.isend(long, peer, 2)]
    one, two = wait(requests)
    assert one == odd and (two == long).all()
    assert all(request.done and not request.cancel() for request in requests)
    pycoll.wait_all(sent)
request = comm.irecv(peer, 3)
assert request.cancel() and request.cancelled
ok()
"""
    scripts(2, text)


@pytest.mark.parametrize("transport", IN_CORE)
def test_of_objects_only_the_pickling_is_pythons(scripts: Scripts, transport: str) -> None:
    text = """
ALLOWED = {"wait_all", "pycoll._support.public_edge"}
ALLOWED |= {"pycoll._arrays.conversion", "pycoll._arrays.libraries", "pycoll._arrays.value"}
ALLOWED |= {"pycoll._arrays.subclasses", "pycoll._support.foreign_calls"}
ALLOWED |= {"pycoll._arrays.objects", "pycoll._runtime.scratch"}
ALLOWED |= {"_here", "_dump"}
value = {"a": [1, 2.5], "b": "text", "c": None}
long = [np.arange(100_000.0), "x" * 5000]

def step():
    global one, two, three
    requests = [comm.irecv(peer, 1), comm.irecv(peer, 2)]
    sent = [comm.isend(value, peer, 1), comm.isend(long, peer, 2)]
    one, two = pycoll.wait_all(requests)
    pycoll.wait_all(sent)
    comm.send(value, rank)
    three = comm.recv(rank)

goes_without_python(step)
assert one == value == three
assert (two[0] == long[0]).all() and two[1] == long[1] and two[0].flags.writeable
ok()
"""
    scripts(2, COUNTING + text, transport)


def test_what_cannot_be_pickled_or_loaded_is_said_as_by_the_other_engine(scripts: Scripts) -> None:
    text = """
peer, lock = 1 - rank, threading.Lock()
error_like(TypeError, "lock.* cannot be sent", comm.send, lock, peer)
error_like(TypeError, "lock.* cannot be sent", comm.isend, lock, peer)
nested = []
for _ in range(100_000):
    nested = [nested]
error_like(ValueError, "nested too deeply", comm.send, nested, peer)

class Odd:
    def __reduce__(self):
        return load_of_odd, ()

def load_of_odd():
    raise ArithmeticError("odd")

comm.send(Odd(), peer)
error_like(ArithmeticError, "odd", comm.recv, peer)
comm.send(Odd(), peer, 1)
request = comm.irecv(peer, 1)
for _ in range(2):
    error_like(ArithmeticError, "odd", request.wait)
ok()
"""
    scripts(2, text)


def test_what_is_pickled_may_communicate_or_close(scripts: Scripts) -> None:
    text = """
peer, other = 1 - rank, comm.dup()

class Talks:
    def __reduce__(self):
        comm.send("before", peer)
        other.close()
        return str, ("talked",)

error_like(pycoll.Error, "closed", other.send, Talks(), peer)
assert comm.recv(peer) == "before"
ok()
"""
    scripts(2, text)


@pytest.mark.parametrize("transport", IN_CORE)
def test_a_deadline_needs_no_python_while_there_is_time(job: Jobs, transport: str) -> None:
    text = """
ALLOWED = {"wait_all", "pycoll._support.public_edge"}
x, out = np.arange(6.0), np.zeros(6)

def step():
    request = comm.irecv(peer, 1, out)
    comm.send(x, peer, 1, timeout=30)
    request.wait(30)
    comm.send(x, rank, timeout=30)
    comm.recv(rank, out=out, timeout=30.5)
    pycoll.wait_all([comm.isend(x, rank), comm.irecv(rank, out=out)], timeout=30)

goes_without_python(step)
ok()
"""
    done = job(2, COUNTING + text, "--transport", transport, "--op-timeout", "40")
    all_well(done, 2)


@pytest.mark.parametrize("seconds", [0, 0.02, 0.25])
def test_when_the_deadline_has_passed_python_says_so(scripts: Scripts, seconds: float) -> None:
    text = f"""
peer, seconds, long = 1 - rank, {seconds}, np.zeros(300_000)
for name, call in {{
    "recv": lambda: comm.recv(peer, 7, timeout=seconds),
    "recv.source": lambda: comm.recv(peer, 7, out=long, timeout=seconds),
    "send": lambda: comm.send(long, peer, timeout=seconds),
    "ssend": lambda: comm.ssend("text", peer, timeout=seconds),
    "irecv": lambda: comm.irecv(peer, 7).wait(seconds),
    "wait_all": lambda: pycoll.wait_all([comm.irecv(peer, 7), comm.irecv(peer, 7)], seconds),
}}.items():
    began = time.monotonic()
    error_like(pycoll.OperationTimeout, name + ".*was not done by its deadline", call)
    assert time.monotonic() - began >= seconds
comm.barrier()  # a communicator that its peer has closed takes what is sent there
ok()
"""
    scripts(2, text)
