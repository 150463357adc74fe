"""The simulated RDMA device: that it does what hardware does, and finds what hardware may not."""

from __future__ import annotations

import errno
import os
import select
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import simulated_device
from tiers import exhaustive

from pycoll._transports.verbs import (
    FLUSHED,
    MAX_SENDS,
    RECEIVED_WRITE,
    RETRIES_EXCEEDED,
    SUCCESS,
    VerbsError,
    probe,
)

pytestmark = exhaustive  # a test double

SLOT = 256
LARGE = 1 << 20


class End:
    """A device with memory: the first half is sent and written from, the second is written to."""

    def __init__(self, fabric: Any, nbytes: int = 2 * LARGE, **limits: int) -> None:
        self.fabric = fabric
        self.device = fabric.device(**{"receives": 128, "completions": 512, **limits})
        self.memory = np.zeros(nbytes, np.uint8)
        self.address: int = self.memory.ctypes.data
        self.region = self.device.register(self.address, nbytes, True)
        self.pair = self.device.queue_pair()
        self.other: End

    def connect(self, other: End) -> None:
        self.other = other
        self.pair.connect(other.device.peer(other.pair))

    def receive(self, number: int, nbytes: int = SLOT) -> Any:
        address = self.address + LARGE + number * SLOT
        return self.device.receive(number, address, nbytes, self.region.local_key)

    def send(
        self, work: int, data: bytes = b"", inline: bool = False, signaled: bool = True
    ) -> None:
        begin = (work % 64) * SLOT
        self.memory[begin : begin + len(data)] = np.frombuffer(data, np.uint8)
        key = 0 if inline else self.region.local_key
        self.pair.send(work, self.address + begin, len(data), key, inline, signaled)

    def write(self, work: int, nbytes: int, immediate: int | None = None, **where: int) -> None:
        into = where.get("into", self.other.address + LARGE)
        key = where.get("remote_key", self.other.region.remote_key)
        local = where.get("key", self.region.local_key)
        self.pair.write(work, self.address, nbytes, local, into, key, immediate)

    def received(self, number: int, nbytes: int) -> bytes:
        begin = LARGE + number * SLOT
        return self.memory[begin : begin + nbytes].tobytes()

    def completions(self) -> list[Any]:
        """Return all that come."""
        self.fabric.run()
        return list(self.device.poll(1000))

    def statuses(self) -> list[tuple[int, int]]:
        return [(completion.wr_id, completion.status) for completion in self.completions()]

    def is_ready(self) -> bool:
        return bool(select.select([self.device.fileno()], [], [], 0)[0])


def ends(seed: int = 0, **options: Any) -> tuple[Any, End, End]:
    """Return a fabric, and two connected ends."""
    fabric = simulated_device.Fabric(seed, **options)
    a, b = End(fabric), End(fabric)
    a.connect(b)
    b.connect(a)
    return fabric, a, b


@pytest.fixture(autouse=True)
def close_devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    made: list[Any] = []
    make = simulated_device.Fabric.device

    def remember(*args: Any, **options: Any) -> Any:
        made.append(make(*args, **options))
        return made[-1]

    monkeypatch.setattr(simulated_device.Fabric, "device", remember)
    yield
    for device in made:
        device.close()


def polled(end: End, number: int) -> list[Any]:
    """Poll until so many completions have come."""
    found: list[Any] = []
    for _ in range(10_000):
        found += end.device.poll(number)
        if len(found) >= number:
            return found
    raise AssertionError(f"{len(found)} completions of {number}")


# --- what it does ------------------------------------------------------------------------------


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


# --- failures ----------------------------------------------------------------------------------


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


# --- sleeping ----------------------------------------------------------------------------------


def test_what_is_under_way_wakes_who_has_armed() -> None:
    fabric, a, b = ends()
    b.receive(0)
    a.send(0, b"x")
    assert not b.is_ready()
    b.device.arm()
    assert b.is_ready()
    b.device.disarm()
    assert not b.is_ready()
    assert len(b.device.poll(8)) == 1
    fabric.check()


def test_what_is_posted_later_wakes_both_ends() -> None:
    fabric, a, b = ends()
    b.receive(0)
    for end in (a, b):
        end.device.arm()
        assert end.device.poll(8) == []
        assert not end.is_ready()
    a.send(0, b"x")
    assert a.is_ready()
    assert b.is_ready()
    fabric.check()


def test_a_completion_that_waits_already_wakes_nobody() -> None:
    fabric, a, b = ends()
    b.receive(0)
    a.send(0, b"x")
    fabric.run()
    a.send(1, b"x")
    b.device.arm()
    assert not b.is_ready()
    assert not fabric.faults  # it did not sleep, so the second did not travel to no receive
    assert b.device.poll(1)[0].wr_id == 0


def test_without_arm_nothing_becomes_readable() -> None:
    fabric, a, b = ends()
    b.receive(0)
    b.receive(1)
    b.device.arm()
    a.send(0, b"x")
    b.device.disarm()
    a.send(1, b"x")
    fabric.run()
    assert not b.is_ready()


def test_a_sleeper_learns_that_its_peer_has_gone() -> None:
    fabric, a, b = ends()
    fabric.kill(b.device)
    a.send(0, b"x")
    a.device.arm()
    assert a.is_ready()
    assert [completion.status for completion in a.device.poll(8)] == [RETRIES_EXCEEDED]


def test_ranks_may_be_in_threads() -> None:
    fabric, a, b = ends()
    for number in range(100):
        b.receive(number)
    statuses: list[int] = []

    def send() -> None:
        for number in range(100):
            a.send(number, b"x")
            a.device.arm()
            while not (came := a.device.poll(8)):
                assert select.select([a.device.fileno()], [], [], 10)[0]
            a.device.disarm()
            statuses.extend(completion.status for completion in came)

    sender = threading.Thread(target=send)
    sender.start()
    received = []
    while sender.is_alive():
        received += b.device.poll(8)
    received += b.completions()
    assert statuses == [SUCCESS] * 100
    assert [completion.wr_id for completion in received] == list(range(100))
    fabric.check()


# --- faults ------------------------------------------------------------------------------------


def assert_fault(fabric: Any, text: str) -> None:
    assert len(fabric.faults) == 1
    with pytest.raises(AssertionError, match=text):
        fabric.check()


@pytest.mark.parametrize("seed", range(10))
def test_a_message_that_meets_no_receive_is_a_fault_and_waits(seed: int) -> None:
    fabric, a, b = ends(seed)
    b.receive(0)
    a.send(0, b"x")
    a.send(1, b"x")
    fabric.run()
    assert len(a.device.waiting) == 1
    assert a.statuses() == [(0, SUCCESS)]
    b.receive(1)
    assert a.statuses() == [(1, SUCCESS)]
    assert_fault(fabric, "device 2: a message has met no receive")


@pytest.mark.parametrize("immediate", [None, 1])
def test_only_a_write_with_immediate_data_needs_a_receive(immediate: int | None) -> None:
    fabric, a, _ = ends()
    a.write(0, SLOT, immediate)
    assert len(a.completions()) == (immediate is None)
    assert len(fabric.faults) == (immediate is not None)


def test_too_many_work_requests_are_refused_until_a_completion_was_polled() -> None:
    fabric, a, b = ends()
    for number in range(MAX_SENDS):
        b.receive(number)
        a.send(number, inline=True, signaled=number == MAX_SENDS - 2)
    fabric.run()
    with pytest.raises(VerbsError) as refused:
        a.send(MAX_SENDS)
    assert refused.value.code == errno.ENOMEM
    assert_fault(fabric, "too many work requests")
    assert a.statuses() == [(MAX_SENDS - 2, SUCCESS)]
    for number in range(MAX_SENDS - 1):
        b.receive(MAX_SENDS + number)
        a.send(number)
    with pytest.raises(VerbsError):
        a.send(MAX_SENDS)


def test_too_many_receives_are_refused() -> None:
    fabric, _, b = ends()
    for number in range(128):
        b.receive(number)
    with pytest.raises(VerbsError) as refused:
        b.receive(128)
    assert refused.value.code == errno.ENOMEM
    assert_fault(fabric, "too many are posted")


def test_a_receive_is_posted_again_only_after_its_completion_was_polled() -> None:
    fabric, a, b = ends()
    request = b.receive(0)
    a.send(0, b"abc")
    fabric.run()
    with pytest.raises(VerbsError):
        b.device.receive_again(request)
    assert_fault(fabric, "not known to be used")
    assert len(b.completions()) == 1
    b.device.receive_again(request)
    # It is the device's: what was in it is not to be looked at any more.
    assert b.received(0, 4) == b"\xdb\xdb\xdb\0"


def test_too_long_is_an_error_at_once() -> None:
    fabric = simulated_device.Fabric()
    a, b = End(fabric, max_message=1000), End(fabric)
    a.connect(b)
    b.connect(a)
    a.write(0, 1000)
    assert a.statuses() == [(0, SUCCESS)]
    with pytest.raises(VerbsError):
        a.write(0, 1001)
    with pytest.raises(VerbsError):
        a.send(0, bytes(257), inline=True)
    assert len(fabric.faults) == 2


def test_a_full_completion_queue_is_a_fault() -> None:
    fabric = simulated_device.Fabric()
    a, b = End(fabric, completions=2), End(fabric)
    a.connect(b)
    b.connect(a)
    for number in range(3):
        b.receive(number)
        a.send(number, b"x")
        if number == 1:
            fabric.run()
            fabric.check()
    fabric.run()
    assert_fault(fabric, "completion queue overflow")


def test_to_send_before_the_other_end_has_connected_is_a_fault() -> None:
    fabric = simulated_device.Fabric()
    a, b = End(fabric), End(fabric)
    with pytest.raises(VerbsError):
        a.pair.send(0, a.address, 0, 0, True, True)
    assert len(fabric.faults) == 1
    a.connect(b)
    b.receive(0)
    a.send(0, b"x")
    assert len(fabric.faults) == 2
    b.connect(a)
    assert a.statuses() == [(0, SUCCESS)]


@pytest.mark.parametrize("wrong", ["psn", "lid", "mtu"])
def test_to_connect_with_a_wrong_address_is_a_fault(wrong: str) -> None:
    fabric = simulated_device.Fabric()
    a, b = End(fabric), End(fabric)
    peer = b.device.peer(b.pair)
    a.pair.connect(peer._replace(**{wrong: getattr(peer, wrong) ^ 1}))
    assert_fault(fabric, "wrong psn")


def test_to_connect_with_one_that_has_another_peer_is_a_fault() -> None:
    fabric, _, b = ends()
    b.receive(0)
    late = End(fabric)
    late.connect(b)
    late.send(0, b"x")
    assert late.statuses() == [(0, RETRIES_EXCEEDED)]
    assert_fault(fabric, "connected with another")


def test_a_region_stays_until_the_work_request_is_known_to_be_complete() -> None:
    fabric, a, b = ends()
    for number in range(2):
        b.receive(number)
    first = a.device.register(a.address, SLOT, False)
    a.pair.send(0, a.address, 1, first.local_key, False, False)
    a.send(1, b"x")
    assert a.statuses() == [(1, SUCCESS)]
    first.close()
    first.close()
    other = a.device.register(a.address, SLOT, False)
    b.receive(2)
    a.pair.send(2, a.address, 1, other.local_key, True, False)
    other.close()  # its bytes are in the work request
    fabric.check()
    a.write(3, SLOT)
    fabric.run()
    a.region.close()
    assert_fault(fabric, "under a work request")


def test_a_region_may_go_when_its_queue_pair_has_gone() -> None:
    fabric, a, _ = ends()
    a.receive(0)
    a.write(0, LARGE)
    a.pair.close()
    a.region.close()
    fabric.check()


def test_a_region_stays_while_a_receive_may_need_it() -> None:
    fabric, _, b = ends()
    b.receive(0)
    b.region.close()
    assert_fault(fabric, "under a receive")


def test_a_closed_device_gives_everything_back_and_is_not_used() -> None:
    fabric, a, _ = ends()
    a.receive(0)
    a.write(0, LARGE)
    a.device.close()
    a.device.close()
    a.region.close()
    a.pair.close()
    assert (a.device.live_regions, a.device.pairs, fabric.step()) == (0, [], False)
    fabric.check()
    with pytest.raises(VerbsError):
        a.device.poll(1)
    assert_fault(fabric, "device is closed")
