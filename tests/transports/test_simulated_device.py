"""The simulated RDMA device: that it does what hardware does, and finds what hardware may not."""

from __future__ import annotations

import errno
import os
from typing import Any

import numpy as np
import pytest
import simulated_device
from simulated_pairs import LARGE, SLOT, End, assert_fault, ends
from tiers import exhaustive

from pycoll._transports.verbs import RECEIVED_WRITE, probe
from pycoll._transports.verbs_errors import FLUSHED, RETRIES_EXCEEDED, SUCCESS, VerbsError

pytestmark = [exhaustive, pytest.mark.usefixtures("close_devices")]  # a test double


def polled(end: End, number: int) -> list[Any]:
    """Poll until so many completions have come."""
    found: list[Any] = []
    for _ in range(10_000):
        found += end.device.poll(number)
        if len(found) >= number:
            return found
    raise AssertionError(f"{len(found)} completions of {number}")


@pytest.mark.parametrize("seed", range(5))
def test_a_message_of_the_device_to_itself_arrives(seed: int) -> None:
    fabric = simulated_device.Fabric(seed)
    device = fabric.device(receives=4, completions=8)
    assert probe(device) is None
    fabric.check()
    assert (fabric.registrations, device.live_regions, device.pairs) == (1, 0, [])


@pytest.mark.parametrize("seed", range(5))
def test_sends_of_a_queue_pair_arrive_in_order(seed: int) -> None:
    fabric, a, b = ends(seed)
    for number in range(20):
        b.receive(number)
    data = [bytes([number] * number) for number in range(20)]
    for number in range(20):
        a.send(number, data[number], inline=number % 3 == 0)
    came = polled(b, 20)
    assert [(c.wr_id, c.status, c.opcode, c.byte_len) for c in came] == [
        (number, SUCCESS, 128, number) for number in range(20)
    ]
    assert {c.qp_num for c in came} == {b.pair.number}
    assert [b.received(number, number) for number in range(20)] == data
    assert [c.wr_id for c in polled(a, 20)] == list(range(20))
    assert fabric.counts["send"] == 20
    assert fabric.counts["inline"] == 7
    assert fabric.counts["bytes_sent"] == sum(range(20))
    fabric.check()


def order_of_two_pairs(seed: int) -> list[int]:
    """Send on two queue pairs; return the numbers of the pairs in the order of arrival."""
    fabric, a, b = ends(seed)
    more, other = a.device.queue_pair(), b.device.queue_pair()
    more.connect(b.device.peer(other))
    other.connect(a.device.peer(more))
    for number in range(8):
        b.receive(number)
    for number in range(4):
        a.send(number, b"x")
        more.send(number, a.address, 1, a.region.local_key, False, True)
    completions = polled(b, 8)
    fabric.check()
    return [int(completion.qp_num == b.pair.number) for completion in completions]


def test_queue_pairs_are_not_ordered_among_each_other() -> None:
    firsts = {order_of_two_pairs(seed)[0] for seed in range(20)}
    assert firsts == {0, 1}


def test_the_seed_alone_decides_the_order() -> None:
    assert [order_of_two_pairs(seed) for seed in range(5)] == [
        order_of_two_pairs(seed) for seed in range(5)
    ]


def test_posting_only_queues_and_a_poll_may_bring_nothing() -> None:
    numbers = set()
    for seed in range(30):
        _, a, b = ends(seed)
        b.receive(0)
        a.send(0, b"x")
        assert not b.device.waiting
        numbers.add(len(b.device.poll(8)))
    assert numbers == {0, 1}


def test_memory_is_read_when_the_message_travels_unless_it_is_inline() -> None:
    fabric, a, b = ends()
    b.receive(0)
    b.receive(1)
    a.send(0, b"before")
    a.send(1, b"before", inline=True)
    a.memory[:LARGE] = ord("!")
    assert len(b.completions()) == 2
    assert b.received(0, 6) == b"!!!!!!"
    assert b.received(1, 6) == b"before"
    fabric.check()


@pytest.mark.parametrize("immediate", [None, 0, 0xFFFF_FFFF])
def test_a_write_fills_the_peers_memory_and_tells_it_if_asked(immediate: int | None) -> None:
    fabric, a, b = ends()
    b.receive(3)
    a.memory[:LARGE] = np.random.default_rng(1).integers(0, 256, LARGE, np.uint8)
    a.write(7, LARGE, immediate)
    assert a.statuses() == [(7, SUCCESS)]
    assert np.array_equal(b.memory[LARGE:], a.memory[:LARGE])
    came = [(c.wr_id, c.opcode, c.byte_len, c.imm_data, c.qp_num) for c in b.completions()]
    told = [(3, RECEIVED_WRITE, LARGE, immediate, b.pair.number)]
    assert came == ([] if immediate is None else told)
    assert (fabric.counts["write"], fabric.counts["bytes_written"]) == (1, LARGE)
    fabric.check()


@pytest.mark.parametrize("ending", ["close here", "close there", "fail", "kill"])
def test_a_write_that_is_stopped_leaves_half_and_writes_no_more(ending: str) -> None:
    stopped_halfway = 0
    for seed in range(20):
        fabric, a, b = ends(seed)
        a.memory[:LARGE] = 1
        a.write(0, LARGE)
        while not b.memory.any():
            fabric.step()
        stopped_halfway += not b.memory[LARGE:].all()
        if ending == "kill":
            fabric.kill(a.device)
        elif ending == "fail":
            a.pair.fail()
        else:
            (a if ending == "close here" else b).pair.close()
        before = b.memory.copy()
        a.completions()
        assert np.array_equal(b.memory, before)
        fabric.check()
    assert stopped_halfway


def test_a_message_longer_than_its_receive_ends_both_queue_pairs() -> None:
    _, a, b = ends()
    b.receive(0, nbytes=4)
    b.receive(1)
    a.send(0, b"12345")
    a.send(1, b"1")
    assert a.statuses() == [(0, 9), (1, FLUSHED)]
    (received,) = b.completions()
    assert (received.wr_id, received.status) == (0, 1)
    assert received.opcode is received.byte_len is received.imm_data is None
    assert b.received(0, 4) == bytes(4)
    assert (a.pair.state, b.pair.state) == ("broken", "broken")


@pytest.mark.parametrize("kind", ["unknown", "local key", "past the end", "read only", "closed"])
def test_a_write_to_memory_that_is_no_target_ends_both_queue_pairs(kind: str) -> None:
    fabric, a, b = ends()
    half = b.device.register(b.address + LARGE, SLOT, kind != "read only")
    where = {"into": b.address + LARGE, "remote_key": half.remote_key}
    if kind == "unknown":
        where["remote_key"] += 1
    elif kind == "local key":
        where["remote_key"] = half.local_key
    elif kind == "past the end":
        where["into"] += 1
    elif kind == "closed":
        half.close()
    a.memory[:SLOT] = 1
    a.write(0, SLOT, **where)
    a.write(1, SLOT)
    assert a.statuses() == [(0, 10), (1, FLUSHED)]
    assert not b.memory.any()
    b.send(2)
    assert b.statuses() == [(2, FLUSHED)]
    fabric.check()


def test_memory_of_a_work_request_must_be_registered_when_it_is_executed() -> None:
    fabric, a, b = ends()
    b.receive(0)
    a.write(0, SLOT, key=a.region.remote_key)
    assert a.statuses() == [(0, 4)]
    assert a.pair.state == "broken"
    fabric.check()


def test_a_receive_whose_memory_is_not_registered_ends_both_queue_pairs() -> None:
    _, a, b = ends()
    b.device.receive(0, b.address, SLOT, b.region.local_key + 1)
    a.send(0, b"x")
    assert a.statuses() == [(0, 11)]
    assert b.statuses() == [(0, 4)]


def test_a_queue_pair_in_error_flushes_all_and_leaves_the_receives() -> None:
    fabric, a, _ = ends()
    a.receive(0)
    a.send(0, b"x", signaled=False)
    a.send(1, b"x")
    a.pair.fail()
    a.send(2, b"x", signaled=False)
    assert a.statuses() == [(0, FLUSHED), (1, FLUSHED), (2, FLUSHED)]
    assert len(a.device.posted) == 1
    fabric.check()


@pytest.mark.parametrize("seed", range(10))
def test_what_arrived_before_a_failure_succeeds_and_the_failure_tells_its_cause(seed: int) -> None:
    fabric, a, b = ends(seed)
    b.receive(0)
    a.send(0, b"x")
    a.write(1, SLOT, remote_key=0)
    a.write(2, SLOT)
    while a.pair.state == "connected":
        fabric.step()
    a.pair.fail()
    assert a.statuses() == [(0, SUCCESS), (1, 10), (2, FLUSHED)]
    assert b.statuses() == [(0, SUCCESS)]
    fabric.check()


@pytest.mark.parametrize("ending", ["kill", "close", "fail"])
def test_who_sends_to_one_that_is_gone_learns_it_later(ending: str) -> None:
    fabric, a, b = ends(retries=20)
    b.receive(0)
    b.receive(1)
    if ending == "kill":
        fabric.kill(b.device)
    else:
        getattr(b.pair, ending)()
    a.send(0, b"x", signaled=False)
    a.send(1, b"x")
    for _ in range(20):
        fabric.step()
    assert not a.device.waiting
    assert a.statuses() == [(0, RETRIES_EXCEEDED), (1, FLUSHED)]
    fabric.check()


def test_one_that_fails_by_order_may_have_arrived_or_not() -> None:
    arrived = set()
    for seed in range(20):
        fabric, a, b = ends(seed)
        b.receive(0)
        fabric.fail_next(a.device, 12)
        a.send(0, b"x", signaled=False)
        assert a.statuses() == [(0, 12)]
        arrived.add(len(b.completions()))
        fabric.check()
    assert arrived == {0, 1}


def test_registration_is_refused_by_order_and_that_is_no_fault() -> None:
    fabric, a, _ = ends()
    fabric.refuse_registration(lambda device, _, nbytes: device is a.device and nbytes > SLOT)
    a.device.register(a.address, SLOT, False)
    with pytest.raises(VerbsError) as refused:
        a.device.register(a.address, SLOT + 1, False)
    assert refused.value.code == errno.ENOMEM
    assert (fabric.registrations, a.device.live_regions) == (3, 2)
    fabric.check()
    with pytest.raises(VerbsError):
        a.device.register(a.address, 0, False)
    assert_fault(fabric, "there are none")


def test_a_dead_process_does_nothing_and_can_be_closed() -> None:
    fabric, _, b = ends()
    descriptor = b.device.fileno()
    request = b.receive(0)
    fabric.kill(b.device)
    b.send(0, b"x")
    b.device.receive_again(request)
    b.device.arm()
    assert b.device.poll(8) == []
    b.pair.fail()
    b.pair.close()
    b.region.close()
    assert b.device.live_regions == 0
    b.device.close()
    b.device.close()
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(descriptor)
    assert not fabric.step()
    fabric.check()


@pytest.mark.parametrize("forgets", [False, True])
def test_closing_a_queue_pair_may_take_its_completions_away(forgets: bool) -> None:
    fabric, a, b = ends(forgets=forgets)
    request = b.receive(0)
    a.send(0, b"x")
    fabric.run()
    b.pair.close()
    assert len(b.completions()) == (0 if forgets else 1)
    assert not b.device.posted
    b.device.receive_again(request)
    fabric.check()
