"""The protocol of the rdma transport, on devices that do what hardware may do: case by case."""

from __future__ import annotations

import errno
import os
import time
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
from rdma_world import LARGE, World, check_at_rest
from tiers import smoke

from pycoll._transports.base import CREDIT, EAGER_LIMIT, MESSAGE_COST, Transfer
from pycoll._transports.rdma import completions_for, receives_for
from pycoll._transports.rdma_frames import PACKED_RECEIVES, PIECE, RECEIVES
from pycoll._transports.rdma_queues import DRAIN_S, SLOT
from pycoll._transports.rdma_renewal import MOST_FAILURES
from pycoll._transports.verbs_errors import RETRIES_EXCEEDED, VerbsError, explain
from pycoll.errors import PeerFailed, TransportError

# --- giving up, at the worst moments ----------------------------------------------------------


@pytest.fixture
def world() -> Iterator[World]:
    """Two ranks whose large messages need many writes."""
    made = World(2, device={"max_message": 1 << 14})
    yield made
    made.close()


def test_a_receive_given_up_before_there_is_a_lane_is_never_written(world: World) -> None:
    source, into = np.full(LARGE, 1, np.uint8), np.zeros(LARGE, np.uint8)
    world.nodes[1].arrived = lambda arrival: arrival.accept(into.data).cancel()
    sending = world.send(0, 1, b"", source.data)
    world.run(lambda: sending.done)
    source[:] = 2
    world.settle()
    assert not into.any()
    check_at_rest(world)


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_giving_up_half_way_gives_everything_back(world: World, side: str) -> None:
    started = world.under_way()
    transfer = started.sending if side == "sender" else started.receiving
    transfer.cancel()
    before = bytes(started.into)
    world.settle()
    assert started.into == before
    check_at_rest(world)


def test_what_both_ends_give_up_at_once_leaves_nothing(world: World) -> None:
    started, back = world.under_way(), world.send(1, 0, b"", bytes(LARGE))
    (arrival,) = world.arrivals(0, 1)
    receiving = arrival.accept(memoryview(bytearray(LARGE)))
    for transfer in (started.sending, started.receiving, back, receiving):
        transfer.cancel()
    world.settle()
    check_at_rest(world)
    world.send(0, 1, b"", bytes(LARGE))
    assert world.receive(world.arrivals(1, 2)[-1]) == bytes(LARGE)


def test_many_renewals_before_the_peer_hears_of_one_are_one_to_it(world: World) -> None:
    started = world.under_way()
    for _ in range(5):
        elsewhere = bytearray(LARGE)
        started.receiving.redirect(memoryview(elsewhere))
    started.into = elsewhere
    world.run(lambda: started.done)
    started.check()
    world.settle()
    check_at_rest(world)


@smoke
def test_a_message_that_is_written_goes_on_when_another_is_given_up(world: World) -> None:
    sent = [world.send(0, 1, b"", bytes([i]) * LARGE) for i in range(3)]
    arrivals = world.arrivals(1, 3)
    into = [bytearray(LARGE) for _ in range(3)]
    received = [arrivals[i].accept(memoryview(into[i])) for i in range(3)]
    world.run(lambda: into[1][0] == 1)
    received[1].cancel()
    world.run(lambda: all(transfer.done for transfer in sent))
    assert received[2].done
    assert into[0] == bytes(LARGE)
    assert into[2] == b"\x02" * LARGE
    world.settle()
    check_at_rest(world)


def not_known_to_be_here() -> tuple[World, list[Transfer]]:
    """Two or more sends that have arrived, over a lane that fails before rank 0 learns of them."""
    nbytes = EAGER_LIMIT + 1
    for seed in range(50):  # the first in which it comes to that
        world = World(2, seed, pace=2)
        sent = [world.send(0, 1, b"", bytes(nbytes)) for _ in range(8)]
        received = [
            arrival.accept(memoryview(bytearray(nbytes))) for arrival in world.arrivals(1, 8)
        ]
        world.run(lambda sent=sent: all(transfer.done or transfer.committed for transfer in sent))
        world.run(lambda received=received: all(r.done for r in received), ranks=[1])
        link = world.link(0, 1)
        epoch = link.lanes.epoch
        world.fabric.fail_next(world.device(0), RETRIES_EXCEEDED)
        while link.lanes.epoch == epoch and not all(transfer.done for transfer in sent):
            world.nodes[0].transport.progress()
        unknown = [transfer for transfer in sent if not transfer.done]
        if len(unknown) >= 2:
            return world, unknown
        world.close()
    raise AssertionError("all was known each time")


def test_who_asks_before_giving_up_is_told_of_what_came_over_a_lane_that_is_gone() -> None:
    world, unknown = not_known_to_be_here()
    assert all(sending.committed for sending in unknown)
    world.run(lambda: all(sending.done for sending in unknown))
    world.close()


def test_who_leaves_says_what_it_has_of_what_came_over_a_lane_that_is_gone() -> None:
    world, unknown = not_known_to_be_here()
    missing = world.send(0, 1, b"", bytes(EAGER_LIMIT + 1))
    # It leaves before it hears of the new lane.
    world.link(1, 0).lanes.meet = lambda *_: None  # type: ignore[method-assign]
    world.nodes[1].transport.close(5.0)
    world.run(lambda: world.link(0, 1).has_ended, ranks=[0])
    assert all(sending.done and sending.error is None for sending in unknown)
    world.transport(0).forget(1, "it has left")
    assert isinstance(missing.error, PeerFailed)
    world.nodes[0].transport.close(0.0)


def test_who_leaves_does_not_say_that_it_has_what_it_still_waits_for() -> None:
    world = World(2)
    world.connect()
    started = world.under_way()
    assert not started.done
    world.link(0, 1).lanes.renew()
    world.nodes[1].transport.close(5.0)
    world.run(lambda: world.link(0, 1).has_ended, ranks=[0])
    world.transport(0).forget(1, "it has left")
    assert isinstance(started.sending.error, PeerFailed)
    world.nodes[0].transport.close(0.0)


def test_the_end_of_one_that_had_arrived_may_give_up_another() -> None:
    world, (first, second, *_) = not_known_to_be_here()
    first.then(lambda _: second.cancel())
    second.then(lambda _: first.cancel())
    world.settle()
    assert first.done != second.done
    check_at_rest(world)
    world.close()


@pytest.mark.filterwarnings("ignore:rdma. rank .* cannot register:RuntimeWarning")
@pytest.mark.parametrize("number", range(5, 20))
def test_who_asks_before_giving_up_is_told_that_all_pieces_are_sent(number: int) -> None:
    world = World(2)
    world.fabric.refuse_registration(lambda _, __, nbytes: nbytes % SLOT != 0)
    nbytes = number * PIECE
    sending = world.send(0, 1, b"", bytes(nbytes))
    (arrival,) = world.arrivals(1, 1)
    receiving = arrival.accept(memoryview(bytearray(nbytes)))
    while not receiving.done:
        for rank in (0, 1):  # what rank 1 has to say to that comes later
            world.fabric.run()
            world.nodes[rank].transport.progress()
            if receiving.done:
                assert sending.done or sending.committed
    world.close()


def test_a_send_in_pieces_is_not_begun_twice_when_the_lane_is_renewed(world: World) -> None:
    parts = [bytes([i % 256]) * 1000 for i in range(1000)]
    sending = world.send(0, 1, b"", *parts)
    (arrival,) = world.arrivals(1, 1)
    into = bytearray(arrival.nbytes)
    receiving = arrival.accept(memoryview(into))
    world.run(lambda: into[1000] == 1)
    assert not receiving.done
    elsewhere = bytearray(arrival.nbytes)
    receiving.redirect(memoryview(elsewhere))
    world.link(0, 1).lanes.renew()
    world.run(lambda: receiving.done and sending.done)
    assert elsewhere == b"".join(parts)
    world.settle()
    check_at_rest(world)


# --- failures of the device ------------------------------------------------------------------


def is_writing(world: World, nth: int) -> bool:
    """Whether rank 0 is at work on its lane number `nth`, and on nothing else."""
    link = world.link(0, 1)
    lane, frames = link.lanes.lane, link.frames.queue.pair
    return (
        lane is not None
        and link.lanes.epoch == nth
        and len(lane.queue) > 0
        and not (frames.queue or frames.arrived)
    )


@pytest.mark.parametrize("status", [1, 2, 4, 5, 8, 9, 10, 11, 12, 13, 21])
def test_a_write_that_fails_is_tried_again_at_once(world: World, status: int) -> None:
    started = world.started()
    began = time.monotonic()
    for epoch in range(1, MOST_FAILURES + 1):
        world.run(lambda epoch=epoch: is_writing(world, epoch))
        world.fabric.fail_next(world.device(0), status)
    world.run(lambda: started.done)
    started.check()
    assert world.link(0, 1).lanes.epoch == MOST_FAILURES + 1
    assert time.monotonic() - began < DRAIN_S
    world.settle()
    check_at_rest(world)


@pytest.mark.parametrize("status", [1, 4, 10, 21])
def test_a_lane_that_fails_time_and_again_is_the_end_of_the_link(world: World, status: int) -> None:
    started = world.started()
    for epoch in range(1, MOST_FAILURES + 2):
        world.run(lambda epoch=epoch: is_writing(world, epoch))
        world.fabric.fail_next(world.device(0), status)
    world.run(lambda: bool(world.nodes[0].lost_peers))
    assert world.nodes[0].lost_peers == {1: explain(status)}
    assert not started.sending.done
    world.nodes[0].transport.forget(1, "it is lost")
    assert isinstance(started.sending.error, PeerFailed)


def test_a_slow_sender_is_not_lost_when_receives_are_given_up_again_and_again() -> None:
    world = World(2, device={"max_message": 1 << 14})
    for number in range(2 * MOST_FAILURES):
        sending = world.send(0, 1, b"", b"\x01" * LARGE)
        into = bytearray(LARGE)
        receiving = world.arrivals(1, number + 1)[-1].accept(memoryview(into))
        world.run(lambda into=into: into[0] == 1)
        # Rank 0 computes meanwhile: what it writes meets nothing, and LANE waits for a credit.
        for _ in range(RECEIVES):
            world.send(1, 0, b"", b"")
        receiving.cancel()
        world.fabric.run()
        world.run(lambda sending=sending: sending.done or bool(world.nodes[0].lost_peers))
        assert world.nodes[0].lost_peers == {}
    world.close()


@pytest.mark.parametrize("status", [1, 5, 9, 11, 12, 13, 21])
def test_a_frame_that_fails_is_the_end_of_the_link(world: World, status: int) -> None:
    world.connect()
    world.fabric.fail_next(world.device(0), status)
    for _ in range(9):  # not every small one is looked after
        world.send(0, 1, b"second", b"")
    world.run(lambda: bool(world.nodes[0].lost_peers))
    assert world.nodes[0].lost_peers == {1: explain(status)}
    waiting = world.send(0, 1, b"third", b"")
    assert not waiting.done
    world.nodes[0].transport.forget(1, "it is lost")
    assert isinstance(waiting.error, PeerFailed)


@pytest.mark.parametrize("refused", [[0], [1], [0, 1]])
def test_what_cannot_be_registered_is_copied_and_that_is_said_once(
    world: World, refused: list[int]
) -> None:
    world.connect()
    devices = [world.device(rank) for rank in refused]
    world.fabric.refuse_registration(lambda device, *_: device in devices)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for number in range(2):
            sending = world.send(0, 1, b"", bytes([number]) * LARGE)
            assert world.receive(world.arrivals(1, 1 + number)[-1]) == bytes([number]) * LARGE
            world.run(lambda sending=sending: sending.done)
    told = [str(warning.message) for warning in warned]
    assert len(told) == 1
    assert f"rdma: rank {refused[-1]} cannot register {LARGE} bytes: " in told[0]
    assert os.strerror(errno.ENOMEM) in told[0]
    assert world.fabric.counts["write"] == 0
    world.settle()
    check_at_rest(world)


def test_memory_that_can_be_registered_again_is_written_again(world: World) -> None:
    refused = [True, False]
    world.fabric.refuse_registration(lambda _, __, nbytes: nbytes == LARGE and refused[0])
    for number in range(2):
        world.send(0, 1, b"", bytes(LARGE))
        (arrival,) = world.arrivals(1, 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            assert world.receive(arrival) == bytes(LARGE)
        assert world.fabric.counts["bytes_written"] == number * LARGE
        world.nodes[1].arrivals.clear()
        refused.pop(0)


@pytest.mark.parametrize(
    "device",
    [{"receives": receives_for(2) - 1}, {"completions": completions_for(2) - 1}],
    ids=["receives", "completions"],
)
def test_a_device_that_is_too_small_says_what_to_do(device: dict[str, int]) -> None:
    world = World(3, device=device)
    world.send(0, 1, b"")
    with pytest.raises(TransportError, match="rank 0 needs more; use --transport tcp"):
        world.send(0, 2, b"")
    world.send(2, 1, b"")  # of which rank 1 hears when it has a link already
    world.run(lambda: 2 in world.nodes[1].lost_peers)
    assert "--transport tcp" in world.nodes[1].lost_peers[2]
    assert world.arrivals(1, 1)[0].peer == 0
    world.nodes[1].transport.forget(2, "no link")
    world.nodes[2].transport.forget(1, "no link")
    world.close()


def test_a_link_that_cannot_be_made_leaves_nothing(world: World) -> None:
    world.fabric.refuse_registration(lambda *_: True)
    with pytest.raises(TransportError, match=r"no link to rank 1: .*; use --transport tcp"):
        world.send(0, 1, b"")
    assert not world.device(0).pairs
    assert not world.transport(0).endpoint.owners
    assert world.device(0).live_regions == world.at_start[0]


def test_a_word_that_cannot_be_posted_is_the_end_of_the_link(world: World) -> None:
    world.connect()
    world.send(0, 1, b"", bytes(LARGE))
    (arrival,) = world.arrivals(1, 1)
    world.settle()
    world.link(1, 0).frames.queue.pair.send = refuse
    receiving = arrival.accept(memoryview(bytearray(LARGE)))
    world.settle()
    assert world.nodes[1].lost_peers == {0: str(GONE)}
    world.nodes[1].transport.forget(0, "it is lost")
    assert isinstance(receiving.error, PeerFailed)


@pytest.mark.parametrize("verb", ["poll", "receive_again"])
def test_a_device_that_fails_loses_every_peer(world: World, verb: str) -> None:
    world.connect()
    for _ in range(9):
        world.send(1, 0, b"", b"")
    world.fabric.run()
    setattr(world.device(0), verb, refuse)
    world.nodes[0].transport.progress()
    world.nodes[0].transport.progress()
    assert world.nodes[0].lost_peers == {1: str(GONE)}
    assert world.nodes[0].transport.is_idle()


GONE = VerbsError("it cannot", OSError("the device is gone"))


def refuse(*_: object) -> None:
    raise GONE


@pytest.mark.parametrize("answers", [0, 1, 40])
@pytest.mark.parametrize("pace", [1, 30])
def test_frames_get_memory_in_time_however_many_peers_there_are(pace: int, answers: int) -> None:
    number = 40
    world = World(8, pace=pace)
    peers = range(1, 8)
    for peer in peers:
        world.send(0, peer, b"first")
    world.run(lambda: all(node.arrivals for node in world.nodes[1:]))
    for peer in peers:
        for _ in range(number):
            world.send(0, peer, b"", bytes(PIECE))
        for _ in range(answers):
            world.send(peer, 0, b"", bytes(PIECE))
    assert not world.transport(0).endpoint.free
    world.settle()
    assert [len(node.arrivals) for node in world.nodes] == [7 * answers] + [number + 1] * 7
    for node in world.nodes:
        for arrival in node.arrivals:
            arrival.release()
    world.settle()
    check_at_rest(world)
    world.close()


# --- beginning and ending --------------------------------------------------------------------


def test_both_may_begin_at_once(world: World) -> None:
    world.send(0, 1, b"there", bytes(LARGE))
    world.send(1, 0, b"back", bytes(LARGE))
    assert world.receive(world.arrivals(1, 1)[0]) == bytes(LARGE)
    assert world.receive(world.arrivals(0, 1)[0]) == bytes(LARGE)
    assert [len(device.pairs) for device in world.fabric.devices] == [2, 2]
    world.settle()
    check_at_rest(world)


def test_numbers_of_messages_begin_anew_after_the_last(world: World) -> None:
    world.connect()
    world.link(0, 1)._next_id = 0xFFFFFFFF - 2
    for number in range(5):
        sending = world.send(0, 1, b"", bytes([number]) * LARGE)
        assert world.receive(world.arrivals(1, number + 1)[-1]) == bytes([number]) * LARGE
        world.run(lambda sending=sending: sending.done)
    world.settle()
    check_at_rest(world)


def test_close_does_not_wait_longer_than_it_may_for_one_that_is_silent(world: World) -> None:
    world.connect()
    for _ in range(2 * RECEIVES):
        world.send(0, 1, b"", bytes(10_000))
    began = time.monotonic()
    world.nodes[0].transport.close(0.2)
    assert 0.2 <= time.monotonic() - began < 1.0
    world.run(lambda: bool(world.nodes[1].arrivals), ranks=[1])
    for _ in range(9):
        world.send(1, 0, b"")
    world.run(lambda: bool(world.nodes[1].lost_peers), ranks=[1])
    assert world.nodes[1].ended == []


def test_who_closes_in_the_middle_of_a_transfer_leaves_no_memory_in_use(world: World) -> None:
    started = world.under_way()
    world.leave(1)
    before = bytes(started.into)
    world.run(lambda: world.nodes[0].ended == [1], ranks=[0])
    world.nodes[0].transport.forget(1, "it has left")
    assert started.into == before
    assert isinstance(started.sending.error, PeerFailed)


def test_buffered_bytes_are_owed_until_they_are_consumed(world: World) -> None:
    number = CREDIT // (EAGER_LIMIT + MESSAGE_COST)
    sent = [world.send(0, 1, b"", bytes(EAGER_LIMIT)) for _ in range(number + 1)]
    assert [transfer.done for transfer in sent] == [True] * number + [False]
    for arrival in world.arrivals(1, number + 1):
        arrival.release()
    world.settle()
    assert sent[-1].done
    check_at_rest(world)


def test_what_is_sent_to_one_that_computes_is_packed_into_the_last_frames(world: World) -> None:
    world.send(0, 1, b"", b"a link")
    world.arrivals(1, 1)
    world.quiet(0, 1)
    number = 500
    for i in range(number):
        world.send(0, 1, b"%d" % i, bytes([i % 256]) * 50)
    fabric = world.fabric
    sent = fabric.counts["send"]
    world.nodes[0].transport.close(5.0)  # rank 1 does nothing meanwhile: its device takes them
    assert fabric.counts["send"] - sent <= PACKED_RECEIVES + 1
    world.run(lambda: world.nodes[1].ended == [0], ranks=[1])
    arrivals = world.nodes[1].arrivals[1:]
    assert [arrival.header for arrival in arrivals] == [b"%d" % i for i in range(number)]
    assert [bytes(arrival.payload or b"")[:1] for arrival in arrivals] == [
        bytes([i % 256]) for i in range(number)
    ]
