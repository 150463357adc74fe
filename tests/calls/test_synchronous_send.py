"""ssend and issend: done when they are received, however short the message is."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import pycoll

Comm = Any

on_every_way = pytest.mark.parametrize(
    "ranks",
    [2, (2, ("--transport", "tcp")), (2, (), {"PYCOLL_SINGLE_COPY": "0"})],
    indirect=True,
    scope="module",
    ids=["shared memory", "tcp", "segments"],
)

VALUES = [np.arange(3.0), np.ones(1, "u1"), np.empty(0), np.ones((300, 300)), {"an": "object"}, 7]


@on_every_way
def test_a_send_is_done_when_it_is_received_and_not_before(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        for tag, value in enumerate(VALUES):
            if comm.rank == 0:
                request = comm.issend(value, 1, tag)
                comm.send("it is on its way", 1, 99)
                assert not request.test()
                comm.sendrecv("not yet", 1, 1, 98, 98)
                assert not request.test()
                comm.send("now", 1, 97)
                assert request.wait() is None
            else:
                comm.recv(0, 99)
                assert comm.probe(0, tag).source == 0  # to look at it is not to receive it
                comm.sendrecv("not yet", 0, 0, 98, 98)
                comm.recv(0, 97)
                np.testing.assert_equal(comm.recv(0, tag), value)

    ranks(program)


@on_every_way
def test_a_send_that_times_out_is_withdrawn(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        if comm.rank == 0:
            with pytest.raises(pycoll.OperationTimeout, match="ssend"):
                comm.ssend(np.ones(3), 1, 5, timeout=0.01)
            comm.send("after", 1)
        else:
            assert comm.recv(0, 0) == "after"
            assert comm.iprobe() is None

    ranks(program)


@on_every_way
def test_one_to_oneself_waits_for_its_receive(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        request = comm.issend(5, comm.rank)
        assert not request.test()
        assert comm.recv(comm.rank) == 5
        assert request.wait() is None
        thread = threading.Thread(target=comm.ssend, args=(np.ones(3), comm.rank, 1))
        thread.start()
        assert comm.recv(comm.rank).sum() == 3
        thread.join()
        assert comm.ssend(1, pycoll.PROC_NULL) is None
        persistent = comm.persistent.ssend(8, comm.rank).start()
        assert comm.recv() == 8
        persistent.wait()

    ranks(program)


@pytest.mark.parametrize("ranks", [2], indirect=True, scope="module")
def test_test_all_tells_whether_all_are_done_and_never_waits(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        assert pycoll.test_all([])
        requests = [comm.irecv(comm.rank, tag) for tag in range(3)]
        for tag in range(3):
            assert not pycoll.test_all(requests)
            comm.send(tag, comm.rank, tag)
        while not pycoll.test_all(requests):
            pass
        assert pycoll.wait_all(requests) == [0, 1, 2]
        with pytest.raises(TypeError, match="test_all takes a list of requests"):
            pycoll.test_all([None])

    ranks(program)


def test_a_status_counts_elements() -> None:
    like_torchs = type("dtype", (), {"itemsize": 2})()
    status = pycoll.Status(0, 0, 24)
    for dtype, count in [("f8", 3), (np.float32, 6), (np.dtype("i1"), 24), (like_torchs, 12)]:
        assert status.count(dtype) == count
    with pytest.raises(ValueError, match="24 bytes"):
        status.count("c16")
    assert pycoll.Status().count("i4") == 0
