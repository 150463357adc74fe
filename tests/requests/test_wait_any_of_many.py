"""wait_any and wait_some over many requests: at a cost that does not grow with the list."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from request_cases import Comm
from tiers import sizes

pytest.importorskip("pycoll._transports._core", exc_type=ImportError)

import pycoll
from pycoll._requests import request

COUNT = 2000


def looked(comm: Comm) -> int:
    """How often waits for any of several have looked at a request, whatever of."""
    count: int = comm._group.engine.transport.core.looked
    return count


def receives(comm: Comm, count: int = COUNT) -> list[Any]:
    """Receives of this rank's own messages, each of an array with a tag of its own."""
    comm.irecv(comm.rank, count, np.empty(1)).cancel()  # the first of a process is Python's
    return [comm.irecv(comm.rank, tag, np.empty(1)) for tag in range(count)]


def send(comm: Comm, tag: int) -> None:
    comm.send(np.full(1, float(tag)), comm.rank, tag)


@contextlib.contextmanager
def left_to_python() -> Iterator[list[Any]]:
    """Yields a list of what the core leaves to Python, each time."""
    take, left = request.take_in_core, []
    assert take is not None

    def noted(*args: Any) -> Any:
        taken = take(*args)
        if taken is None:
            left.append(args)
        return taken

    request.take_in_core = noted
    try:
        yield left
    finally:
        request.take_in_core = take


def keep(requests: list[Any], place: int) -> None:
    pass


def pop(requests: list[Any], place: int) -> None:
    requests.pop(place)


def swap(requests: list[Any], place: int) -> None:
    requests[place] = requests[-1]
    requests.pop()


TREATMENTS = {"kept": keep, "popped": pop, "swapped with the last": swap}


@pytest.mark.parametrize("wait", ["wait_any", "wait_some"])
@pytest.mark.parametrize("treatment", [*TREATMENTS, "a tuple"])
@sizes(1)
def test_each_is_given_once_and_few_are_looked_at(ranks: Any, treatment: str, wait: str) -> None:
    def program(comm: Comm) -> None:
        treat = TREATMENTS.get(treatment, keep)
        listed = receives(comm)
        requests: Any = tuple(listed) if treatment == "a tuple" else listed
        before, got = looked(comm), []
        for part in np.array_split(np.random.default_rng(7).permutation(COUNT), 10):
            for tag in part.tolist():
                send(comm, tag)
            left = len(part)
            while left:
                found, values = getattr(pycoll, wait)(requests)
                if wait == "wait_any":
                    found, values = [found], [values]
                assert found == sorted(found)
                got += [float(value[0]) for value in values]
                left -= len(found)
                for place in reversed(found):
                    treat(requests, place)
        assert sorted(got) == list(range(COUNT))
        with pytest.raises(ValueError, match="no request is left"):
            getattr(pycoll, wait)(requests)
        assert looked(comm) - before < 12 * COUNT

    ranks(program)


def put_there(requests: list[Any], place: int, new: Any) -> None:
    requests[place] = new


def put_behind(requests: list[Any], place: int, new: Any) -> None:
    del requests[place]
    requests.append(new)


@pytest.mark.parametrize("put", [put_there, put_behind])
@pytest.mark.parametrize("wait", [pycoll.wait_any, pycoll.wait_some])
@sizes(1)
def test_a_server_puts_a_new_request_for_the_one_it_was_given(
    ranks: Any, put: Callable[..., None], wait: Any
) -> None:
    def program(comm: Comm) -> None:
        requests = receives(comm)
        tag = 5
        for turn in range(300):
            before = looked(comm)
            send(comm, tag)
            found, values = wait(requests, 20)
            if wait is pycoll.wait_some:
                ((found,), (values,)) = found, values
            assert values[0] == tag
            put(requests, found, comm.irecv(comm.rank, tag, np.empty(1)))
            assert turn == 0 or looked(comm) - before < 20
        for each in requests:
            assert each.cancel()

    ranks(program)


@sizes(1)
def test_a_new_request_at_any_place_is_found(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        requests = receives(comm, 500)
        send(comm, 400)
        assert pycoll.wait_any(requests)[0] == 400
        for place in (3, 77, 400, 499):
            assert requests[place].cancel() or place == 400
            requests[place] = comm.irecv(comm.rank, 1000 + place, np.empty(1))
            send(comm, 1000 + place)
            found, value = pycoll.wait_any(requests, 20)
            assert (found, value[0]) == (place, 1000 + place)
        requests.insert(0, comm.irecv(comm.rank, 2000, np.empty(1)))
        send(comm, 2000)
        assert pycoll.wait_any(requests, 20)[0] == 0
        for each in requests:
            each.cancel()

    ranks(program)


@sizes(1)
def test_a_new_request_is_given_though_others_never_cease(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        requests = receives(comm, 100)
        for tag in range(100):
            send(comm, tag)
        pycoll.wait_any(requests)
        requests[50] = comm.irecv(comm.rank, 1000, np.empty(1))
        send(comm, 1000)
        values: list[int] = []
        while 1000 not in values:
            found, value = pycoll.wait_any(requests)
            values.append(int(value[0]))
            requests[found] = comm.irecv(comm.rank, values[-1], np.empty(1))
            send(comm, values[-1])
        assert len(values) < 300
        while comm.iprobe() is not None:
            comm.recv()

    ranks(program)


@sizes(1)
def test_lists_that_share_requests_give_each_once(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        every = receives(comm, 300)
        even, late = every[::2], every[200:]
        for tag in range(300):
            send(comm, tag)
        got, turn, ended = [], 0, 0
        with left_to_python() as left:
            while len(got) < 300:
                turn += 1
                try:
                    got.append(float(pycoll.wait_any((every, even, late)[turn % 3])[1][0]))
                except ValueError:  # no request is left in that one
                    ended += 1
        assert sorted(got) == list(range(300))
        assert len(left) == ended

    ranks(program)


@sizes(2)
def test_threads_with_lists_that_share_requests_all_end(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        count, other = 300, 1 - comm.rank
        every = [comm.irecv(other, tag, np.empty(1)) for tag in range(count)]
        got: list[float] = []

        def take(listed: list[Any]) -> None:
            try:
                while True:
                    got.append(float(pycoll.wait_any(listed)[1][0]))
            except ValueError:  # no request is left
                pass

        lists = (every, every, every[::-1], every[::2])
        threads = [threading.Thread(target=take, args=(listed,)) for listed in lists]
        for thread in threads:
            thread.start()
        for tag in range(count):
            comm.send(np.full(1, float(tag)), other, tag)
        for thread in threads:
            thread.join()
        assert sorted(got) == list(range(count))

    ranks(program)


@sizes(1)
def test_what_was_waited_for_cancelled_or_freed_meanwhile_is_passed_over(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        requests = receives(comm, 200)
        for tag in range(0, 200, 2):
            send(comm, tag)
        assert pycoll.wait_any(requests)[0] % 2 == 0
        left = [place for place in range(0, 200, 2) if not requests[place]._collected]
        assert len(left) == 99
        requests[left[0]].wait()
        freed = requests.pop(left[-1])
        assert freed.done
        del freed
        assert requests[1].cancel()
        with pytest.raises(pycoll.Error, match="cancelled") as found:
            pycoll.wait_any(requests)
        assert found.value.__notes__[0].startswith("request 1 of 199: <pycoll.Request irecv")
        assert pycoll.wait_some(requests)[0] == left[1:-1]
        for each in requests:
            each.cancel()

    ranks(program)


@sizes(1)
def test_those_that_failed_come_last_and_one_by_one(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        requests = receives(comm, 100)
        for place in (7, 70):
            assert requests[place].cancel()
        for tag in (1, 99, 50):
            send(comm, tag)
        assert pycoll.wait_some(requests)[0] == [1, 50, 99]
        for _ in range(2):
            with pytest.raises(pycoll.Error, match="cancelled"):
                pycoll.wait_some(requests)
        with pytest.raises(pycoll.OperationTimeout):
            pycoll.wait_some(requests, 0)
        send(comm, 2)
        assert pycoll.wait_some(requests)[0] == [2]
        for each in requests:
            each.cancel()

    ranks(program)


@sizes(1)
def test_a_few_of_pythons_own_among_them_cost_little(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        requests = receives(comm)
        requests[0].cancel()
        own = comm.iall_reduce("text", op=lambda a, b: a + b)
        assert not isinstance(own, type(requests[1]))
        requests[0] = own
        for tag in range(1, COUNT):
            send(comm, tag)
        with left_to_python() as left:
            got = [pycoll.wait_any(requests)[0] for _ in range(COUNT)]
        assert sorted(got) == list(range(COUNT))
        assert len(left) < 5
        with pytest.raises(TypeError, match="takes a list of requests, not one with an int"):
            pycoll.wait_any([*requests, 1])

    ranks(program)


@sizes(2)
def test_many_of_every_kind_in_one_list(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        other, x = 1 - comm.rank, np.ones(3)
        persistent = comm.persistent.recv(other, 999).start()
        requests = [comm.iall_reduce(x) for _ in range(70)]
        requests += [comm.isendrecv(x, other, other, tag, tag) for tag in range(30)]
        requests += [persistent, comm.isend(x, other, 999)]
        got: set[int] = set()
        while len(got) < len(requests):
            got.add(pycoll.wait_any(requests)[0])
        with pytest.raises(ValueError, match="no request is left"):
            pycoll.wait_any(requests)
        persistent.start()
        comm.send(x, other, 999)
        assert pycoll.wait_some(requests)[0] == [100]

    ranks(program)


@sizes(2)
def test_the_end_of_one_of_many_wakes_who_waits(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        other, turns = 1 - comm.rank, 50
        requests = [comm.irecv(other, tag, np.empty(1)) for tag in range(turns)] * 2
        comm.barrier()
        times = [time.monotonic()]
        for turn in range(turns):
            if comm.rank == 0:
                comm.send(np.zeros(1), 1, turn)
            assert pycoll.wait_any(requests, 20)[0] % turns == turn
            if comm.rank == 1:
                comm.send(np.zeros(1), 0, turn)
            times.append(time.monotonic())
        # Who is not woken sleeps for 100 ms, and then Python looks.
        assert np.median(np.diff(times)) < 0.05

    ranks(program)


@sizes(2)
def test_a_wait_hears_of_an_end_also_of_a_long_message_without_out(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        other = 1 - comm.rank
        requests = [comm.irecv(other, tag) for tag in range(100)]
        for turn in range(20):
            comm.barrier()
            tag = 5 * turn % 100
            if comm.rank == 0:
                comm.send(np.ones(30_000), 1, tag)
                comm.recv(1, 1000)
            else:
                place, value = pycoll.wait_any(requests)
                assert (place, value.sum()) == (tag, 30_000)
                comm.send(None, 0, 1000)
        for each in requests:
            each.cancel()

    ranks(program)


def test_a_signal_handler_that_raises_leaves_the_requests(scripts: Any) -> None:
    scripts(
        1,
        """
requests = [comm.irecv(0, tag) for tag in range(100)]
class Alarm(Exception):
    pass
def ring(*_):
    raise Alarm
signal.signal(signal.SIGALRM, ring)
for turn in range(20):
    signal.setitimer(signal.ITIMER_REAL, 0.002 + 0.01 * turn)  # also while Python waits
    error_like(Alarm, "", pycoll.wait_any, requests)
    comm.send(turn, 0, turn)
    assert pycoll.wait_any(requests) == (turn, turn)
for request in requests:
    request.cancel()
ok()
""",
    )
