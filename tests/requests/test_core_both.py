"""isendrecv, and persistent.sendrecv: a receive and a send of the core's as one request."""

from __future__ import annotations

import pytest
from pool_scripts import Scripts
from tiers import few

pytest.importorskip("pycoll._transports._core", exc_type=ImportError)

RING = """
right, left = (rank + 1) % size, (rank - 1) % size
"""


@pytest.mark.parametrize("transport", few(["shm", "tcp"], ["zmq"]))
@pytest.mark.parametrize("size", [1, 3])
def test_every_way_to_wait_gives_what_was_received(
    scripts: Scripts, transport: str, size: int
) -> None:
    text = f"""{RING}
import asyncio

async def gathered(requests):
    return await asyncio.gather(*requests)

for count in (1, 1000, 200_000):
    x, y = np.full(count, float(rank)), np.empty(count)
    exchange = comm.persistent.sendrecv(x, right, left, out=y)
    for turn in range(5):
        got = comm.isendrecv(x, right, left, out=y).wait()
        assert got is y and (y == left).all()
        request = comm.isendrecv(x, right, left)
        while not request.test():
            pass
        assert request.done and (request.result == left).all()

        def several():
            return [comm.isendrecv(x + i, right, left, sendtag=i, recvtag=i) for i in range(4)]

        assert [got[0] - left for got in pycoll.wait_all(several())] == [0, 1, 2, 3]
        requests, seen = several(), set()
        while len(seen) < 4:
            index, got = pycoll.wait_any(requests)
            assert (got == left + index).all()
            seen.add(index)
        got = asyncio.run(gathered(several()))
        assert [each[0] - left for each in got] == [0, 1, 2, 3]
        for i in range(3):
            x[:] = rank + i
            exchange.start()
            assert exchange.wait() is y and (y == left + i).all()
        x[:] = rank
    assert comm.isendrecv({{"from": rank}}, right, left).wait() == {{"from": left}}
    assert (comm.isendrecv(x, right).wait() == left).all()
    assert comm.isendrecv(x, pycoll.PROC_NULL, pycoll.PROC_NULL).wait() is None
    assert (comm.isendrecv(x, right, left, out=x).wait() == left).all()  # over what is sent
error_like(TypeError, "timeout", comm.isendrecv, x, right, left, timeout=1.0)
ok()
"""
    scripts(size, text, transport)


def test_nobody_can_come_between_a_look_and_the_wait_for_several(scripts: Scripts) -> None:
    text = f"""{RING}
from pycoll._requests import request as requests

looked = 0

class Several(requests.Several):
    def __init__(self, *args):
        global looked
        looked += 1
        assert comm._group.engine.is_held(), "what ends now is never heard of"
        super().__init__(*args)

cleanup.callback(setattr, requests, "Several", requests.Several)
requests.Several = Several
cleanup.callback(setattr, requests, "wait_in_core", requests.wait_in_core)
requests.wait_in_core = None  # which looks under a lock of its own
x = np.ones(3)
for turn, wait in enumerate((pycoll.wait_any, pycoll.wait_some, pycoll.wait_all)):
    for begin in (comm.isendrecv, lambda *args: comm.persistent.sendrecv(*args).start()):
        if rank == 0:
            request = begin(x, right, left)
            error_like(pycoll.OperationTimeout, "isendrecv", wait, [request], timeout=0.05)
            comm.send("now", 1, 7)
        else:
            comm.recv(0, 7)
            request = begin(x, right, left)
        assert (request.wait() == 1).all()
assert looked == (0 if rank else 6), looked
ok()
"""
    scripts(2, text)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_what_goes_wrong_is_said_of_the_whole_call(scripts: Scripts, transport: str) -> None:
    text = f"""{RING}
x = np.ones(3)
if rank == 0:
    # The message does not fit; it is the receive's error, and the whole request has failed.
    request = comm.isendrecv(x, right, left, out=np.empty(2))
    error_like(pycoll.TruncationError, "24 bytes", request.wait)
    assert request.done and "failed" in repr(request) and "isendrecv" in repr(request)
    error_like(pycoll.TruncationError, "24 bytes", lambda: request.result)
    # Nothing comes yet: the deadline of one wait, after which it goes on.
    request = comm.isendrecv(x, right, left, sendtag=5, recvtag=9)
    error_like(pycoll.OperationTimeout, "isendrecv", request.wait, timeout=0.1)
    assert not request.done and "pending" in repr(request)
    error_like(TypeError, "only a receive can be cancelled", request.cancel)
    comm.send("now", 1, 7)
    assert (request.wait() == 9).all()
else:
    comm.send(x, 0)
    assert (comm.recv(0, 5) == 1).all()
    comm.recv(0, 7)
    comm.send(np.full(3, 9.0), 0, 9)
comm.barrier()
exchange = comm.persistent.sendrecv(x, right, left, sendtag=11, recvtag=11)
error_like(pycoll.Error, "not started", exchange.wait)
if rank == 0:
    exchange.start()
    error_like(pycoll.Error, "still under way", exchange.start)
    comm.send(None, 1, 12)
else:
    comm.recv(0, 12)
    exchange.start()
assert (exchange.wait() == 1).all()
ok()
"""
    scripts(2, text, transport)


def test_messages_to_oneself_that_nobody_waits_long_for_keep_nothing(scripts: Scripts) -> None:
    text = """
import gc, weakref

alive = weakref.WeakSet()
for turn in range(200):
    out = np.empty(1 << 14)
    received, sent = comm.irecv(rank, out=out), comm.isend(out.copy(), rank)
    sent.wait()
    received.wait()
    alive.add(received)
    alive.add(sent)
del received, sent, out
gc.collect()
assert len(alive) < 5, len(alive)
ok()
"""
    scripts(1, text)


def test_errors_name_the_method_that_was_called(scripts: Scripts) -> None:
    text = f"""{RING}
x = np.ones(3)
begun = comm.isendrecv, comm.persistent.sendrecv, comm.persistent.all_reduce, comm.iall_reduce
for begin in begun:
    request = begin(x, right, left) if "sendrecv" in begin.__name__ else begin(x)
    if hasattr(request, "start"):
        request.start()
    error_like(TypeError, r"Request.wait.*unexpected keyword argument 'tim'", request.wait, tim=2)
    request.wait()
other = comm.dup()
methods = [getattr(other, name) for name in ("all_reduce", "gatherv", "scan", "iall_reduce")]
other.close()
for method in methods:
    error_like(pycoll.Error, "this communicator is closed", method, x)
ok()
"""
    scripts(2, text)
