"""The simulated RDMA device: sleeping, and faults that it finds."""

from __future__ import annotations

import errno
import select
import threading

import pytest
import simulated_device
from simulated_pairs import LARGE, SLOT, End, assert_fault, ends
from tiers import exhaustive

from pycoll._transports.verbs import MAX_SENDS
from pycoll._transports.verbs_errors import RETRIES_EXCEEDED, SUCCESS, VerbsError

pytestmark = [exhaustive, pytest.mark.usefixtures("close_devices")]  # a test double


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
