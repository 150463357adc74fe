"""Strangers at the listener of a rank, and ranks that meet a stranger: no link without the key.

Here a `Dialer` is driven by hand; tests/transports/test_flood.py has strangers at a running job.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from patience import PATIENCE

from pycoll._support.ports import endpoint_of
from pycoll._transports import handshake
from pycoll._transports.dial import SILENT, TRIES, Dialer, PeerLane
from pycoll._transports.handshake import (
    HELLO_NBYTES,
    LINKED,
    PROOF_NBYTES,
    REPLY_NBYTES,
    Hello,
    Secret,
)

LIMIT_S = 30.0 * PATIENCE
SECRET = Secret.derive(bytes(32))
OTHER = Secret.derive(b"another key of thirty-two bytes!")
IMPOSTOR = Secret(SECRET.job, OTHER.key)
"""Of one who has read on the network which job it is, and does not know the key."""


class Rank:
    """A rank's dialer, and what it has said; its listener takes who has said nothing, too."""

    def __init__(self, rank: int, size: int = 3, lanes: int = 2, secret: Secret = SECRET) -> None:
        listener = socket.socket()
        listener.setblocking(False)
        listener.bind(("127.0.0.1", 0))
        listener.listen(100)
        self.endpoint = endpoint_of(listener)
        self.address = listener.getsockname()
        self.links: dict[PeerLane, socket.socket] = {}
        self.failures: dict[int, str] = {}
        self.dialer = Dialer(rank, size, lanes, listener, secret, 3, self.linked, self.failed)

    def linked(self, link: PeerLane, connection: socket.socket, dialed: bool) -> None:
        assert link not in self.links
        self.links[link] = connection

    def failed(self, peer: int, why: str) -> None:
        assert peer not in self.failures
        self.failures[peer] = why

    def close(self) -> None:
        self.dialer.close()
        for connection in self.links.values():
            connection.close()


@contextmanager
def ranks(*made: Rank) -> Iterator[None]:
    try:
        yield
    finally:
        for rank in made:
            rank.close()


def run(until: Callable[[], bool], *driven: Rank) -> None:
    deadline = time.monotonic() + LIMIT_S
    poller = select.poll()
    for rank in driven:
        poller.register(rank.dialer.fileno(), select.POLLIN)
    while not until():
        assert time.monotonic() < deadline, "not in time"
        poller.poll(10)
        for rank in driven:
            rank.dialer.progress()


def send(connection: socket.socket, message: bytes) -> None:
    with contextlib.suppress(ConnectionError):  # it may have been cut before
        connection.sendall(message)


def read(connection: socket.socket, nbytes: int, *driven: Rank) -> bytes:
    """Read so many bytes, or fewer if it ends, while ranks go on."""
    connection.setblocking(False)
    received, ended = bytearray(), False

    def has_come() -> bool:
        nonlocal ended
        try:
            part = connection.recv(nbytes - len(received))
        except BlockingIOError:
            return False
        except ConnectionError:
            part = b""
        received.extend(part)
        ended = not part
        return ended or len(received) == nbytes

    run(has_come, *driven)
    connection.setblocking(True)
    return bytes(received)


def assert_cut(connection: socket.socket, rank: Rank) -> None:
    assert read(connection, 1, rank) == b""
    assert rank.links == {}


# --- the messages themselves ---------------------------------------------------------------------


@given(st.binary(max_size=2 * HELLO_NBYTES))
def test_whatever_is_said_first_is_no_hello(message: bytes) -> None:
    assert handshake.read_hello(SECRET, message) is None


@given(
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**16 - 1),
    st.integers(0, 8 * HELLO_NBYTES - 1),
)
def test_a_hello_that_is_changed_anywhere_is_not_proved(
    source: int, dest: int, lane: int, bit: int
) -> None:
    hello = handshake.make_hello(SECRET, Hello(source, dest, lane))
    assert handshake.read_hello(SECRET, hello) == Hello(source, dest, lane)
    assert handshake.read_hello(OTHER, hello) is None
    changed = bytearray(hello)
    changed[bit // 8] ^= 1 << bit % 8
    reply = handshake.make_reply(SECRET, hello)
    proof = handshake.make_proof(SECRET, hello, reply)
    assert handshake.check_reply(SECRET, hello, reply)
    assert handshake.check_proof(SECRET, hello, reply, proof)
    assert not handshake.check_reply(SECRET, bytes(changed), reply)
    assert not handshake.check_proof(SECRET, bytes(changed), reply, proof)


@given(st.binary(max_size=2 * REPLY_NBYTES))
def test_whatever_is_answered_proves_nothing(message: bytes) -> None:
    hello = handshake.make_hello(SECRET, Hello(0, 1, 0))
    reply = handshake.make_reply(SECRET, hello)
    assert not handshake.check_reply(SECRET, hello, message)
    assert not handshake.check_proof(SECRET, hello, reply, message)
    # What the listener has proved is not what the dialer must prove, and the other way round.
    assert not handshake.check_proof(SECRET, hello, reply, reply[-PROOF_NBYTES:])
    proof = handshake.make_proof(SECRET, hello, reply)
    assert not handshake.check_reply(SECRET, hello, reply[:-PROOF_NBYTES] + proof)


# --- strangers who call --------------------------------------------------------------------------

PIECES = st.lists(st.binary(min_size=1, max_size=100), max_size=6)


@given(st.sampled_from(["nothing", "magic", "hello"]), PIECES, st.integers(1, HELLO_NBYTES))
def test_a_stranger_may_say_anything_in_any_pieces_and_gets_no_link(
    begins: str, pieces: list[bytes], cut: int
) -> None:
    rank = Rank(0)
    with ranks(rank), socket.create_connection(rank.address) as stranger:
        # Whoever has listened on the network knows the job, and can say a right hello.
        hello = handshake.make_hello(IMPOSTOR, Hello(1, 0, 0))
        first = {"nothing": b"", "magic": hello[:12], "hello": hello}[begins]
        for piece in (first[:cut], first[cut:], *pieces):
            send(stranger, piece)
            rank.dialer.progress()
        with contextlib.suppress(OSError):
            stranger.shutdown(socket.SHUT_WR)
        while read(stranger, 1, rank):  # the reply, after a right hello
            pass
        assert rank.links == {}
        assert rank.failures == {}


def test_hellos_of_others_are_cut_at_once() -> None:
    rank = Rank(0, size=3, lanes=2)
    wrong = [
        handshake.make_hello(OTHER, Hello(1, 0, 0)),  # another job
        handshake.make_hello(SECRET, Hello(0, 0, 0)),  # this rank itself
        handshake.make_hello(SECRET, Hello(1, 2, 0)),  # to another rank
        handshake.make_hello(SECRET, Hello(3, 0, 0)),  # there is no such rank
        handshake.make_hello(SECRET, Hello(2**32 - 1, 0, 0)),
        handshake.make_hello(SECRET, Hello(1, 0, 2)),  # there is no such lane
        handshake.make_hello(SECRET, Hello(1, 0, 2**16 - 1)),
    ]
    with ranks(rank):
        for hello in wrong:
            with socket.create_connection(rank.address) as stranger:
                stranger.sendall(hello)
                assert_cut(stranger, rank)


def test_a_right_hello_without_the_key_is_cut_whatever_proof_follows() -> None:
    rank = Rank(0)

    def try_proof(make: Callable[[bytes, bytes], bytes]) -> None:
        with socket.create_connection(rank.address) as stranger:
            hello = handshake.make_hello(IMPOSTOR, Hello(1, 0, 0))
            stranger.sendall(hello)
            reply = read(stranger, REPLY_NBYTES, rank)
            assert len(reply) == REPLY_NBYTES
            send(stranger, make(hello, reply))
            assert_cut(stranger, rank)

    with ranks(rank):
        try_proof(lambda hello, reply: handshake.make_proof(IMPOSTOR, hello, reply))
        try_proof(lambda _, reply: reply[-PROOF_NBYTES:])  # the listener's own, reflected
        try_proof(lambda _, reply: reply)
        try_proof(lambda hello, _: hello)
        try_proof(lambda _, __: bytes(100_000))  # far too much


class Recorder:
    """One between two ranks who hands on what both say, and keeps it."""

    def __init__(self, dialer: Rank, listener: Rank, link: PeerLane) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            dialer.dialer.dial(link, endpoint_of(server))
            self.to_dialer, _ = server.accept()
        self.to_listener = socket.create_connection(listener.address)
        self.hello = read(self.to_dialer, HELLO_NBYTES, dialer)
        self.to_listener.sendall(self.hello)
        self.reply = read(self.to_listener, REPLY_NBYTES, listener)
        self.to_dialer.sendall(self.reply)
        self.proof = read(self.to_dialer, PROOF_NBYTES, dialer)

    def finish(self, dialer: Rank, listener: Rank) -> None:
        self.to_listener.sendall(self.proof)
        self.to_dialer.sendall(read(self.to_listener, 1, listener))
        run(lambda: bool(dialer.links and listener.links), dialer, listener)

    def close(self) -> None:
        self.to_dialer.close()
        self.to_listener.close()


def test_what_was_recorded_cannot_be_replayed() -> None:
    one, other, again = Rank(0), Rank(1), Rank(1)
    with ranks(one, other, again):
        recorder = Recorder(one, other, PeerLane(1, 0))
        recorder.finish(one, other)
        assert list(one.links) == [PeerLane(1, 0)]
        assert list(other.links) == [PeerLane(0, 0)]
        recorder.close()
        # To one who has no link yet, as after a restart.
        with socket.create_connection(again.address) as stranger:
            stranger.sendall(recorder.hello)
            assert read(stranger, REPLY_NBYTES, again)[:32] != recorder.reply[:32]
            stranger.sendall(recorder.proof)
            assert_cut(stranger, again)
        # Nor as the answer to another hello.
        with socket.create_server(("127.0.0.1", 0)) as server:
            one.dialer.dial(PeerLane(2, 0), endpoint_of(server))
            with server.accept()[0] as stranger:
                read(stranger, HELLO_NBYTES, one)
                stranger.sendall(recorder.reply)
                run(lambda: bool(one.failures), one)
        assert "does not know the key" in one.failures[2]


def test_a_hello_led_to_another_rank_or_lane_is_cut() -> None:
    one, other, third = Rank(0), Rank(1), Rank(2)
    with ranks(one, other, third):
        recorder = Recorder(one, other, PeerLane(1, 0))
        for rank in (one, third):  # its own listener, too
            with socket.create_connection(rank.address) as stranger:
                stranger.sendall(recorder.hello)
                assert_cut(stranger, rank)
        changed = bytearray(recorder.hello)
        struct.pack_into("<H", changed, 36, 1)
        with socket.create_connection(other.address) as stranger:
            stranger.sendall(changed)
            assert len(read(stranger, REPLY_NBYTES, other)) == REPLY_NBYTES
            stranger.sendall(recorder.proof)
            assert_cut(stranger, other)
        recorder.close()


# --- strangers who are called --------------------------------------------------------------------


@given(PIECES, st.booleans())
def test_who_listens_may_answer_anything_in_any_pieces_and_gets_no_link(
    pieces: list[bytes], reflects: bool
) -> None:
    rank = Rank(0)
    with ranks(rank), socket.create_server(("127.0.0.1", 0)) as server:
        rank.dialer.dial(PeerLane(1, 0), endpoint_of(server))
        with server.accept()[0] as stranger:
            hello = read(stranger, HELLO_NBYTES, rank)
            for piece in (*([hello] if reflects else []), *pieces):
                send(stranger, piece)
                rank.dialer.progress()
            send(stranger, bytes(REPLY_NBYTES))
            run(lambda: bool(rank.failures), rank)
        assert rank.links == {}
        assert "does not know the key" in rank.failures[1]


def test_a_wrong_key_is_refused_on_both_sides_with_a_reason() -> None:
    one, other = Rank(0), Rank(1, secret=IMPOSTOR)
    with ranks(one, other):
        one.dialer.dial(PeerLane(1, 0), other.endpoint)
        other.dialer.dial(PeerLane(0, 0), one.endpoint)
        run(lambda: bool(one.failures and other.failures), one, other)
        for rank, peer in ((one, 1), (other, 0)):
            assert rank.links == {}
            reason = "who listens at its address does not know the key of the job"
            assert rank.failures == {peer: reason}


def test_after_another_job_has_cut_it_so_often_a_rank_gives_up_and_says_so() -> None:
    one, other = Rank(0), Rank(1, secret=OTHER)
    with ranks(one, other):
        one.dialer.dial(PeerLane(1, 0), other.endpoint)
        run(lambda: bool(one.failures), one, other)
        reason = (
            f"it closed the connection {TRIES} times before it was made (is it of another job?)"
        )
        assert one.failures == {1: reason}


def test_only_so_many_strangers_are_kept_and_the_oldest_goes() -> None:
    rank, other = Rank(0), Rank(1)
    with ranks(rank, other), contextlib.ExitStack() as stack:
        hello = handshake.make_hello(IMPOSTOR, Hello(1, 0, 0))
        strangers = []
        for number in range(200):
            strangers.append(stack.enter_context(socket.create_connection(rank.address)))
            strangers[-1].sendall(hello[: 1 + number % HELLO_NBYTES])
            rank.dialer.progress()
        assert read(strangers[0], 1, rank) == b""
        # Meanwhile who is of the job gets its link.
        other.dialer.dial(PeerLane(0, 0), rank.endpoint)
        run(lambda: bool(other.links and rank.links), rank, other)
        assert rank.failures == other.failures == {}


def test_only_so_many_are_kept_that_have_said_who_they_would_be() -> None:
    one, most = Rank(0), 2 * 3 * 2 + SILENT
    with ranks(one), contextlib.ExitStack() as stack:
        callers = []
        for _ in range(most + 5):
            caller = stack.enter_context(socket.create_connection(one.address))
            send(caller, handshake.make_hello(SECRET, Hello(1, 0, 0)))
            callers.append(caller)
            one.dialer.progress()
        for caller in callers[:5]:  # their replies, and then the end
            assert len(read(caller, REPLY_NBYTES + 1, one)) == REPLY_NBYTES
        for caller in callers[5:]:
            assert len(read(caller, REPLY_NBYTES, one)) == REPLY_NBYTES
        last = callers[-1]
        last.setblocking(False)
        with pytest.raises(BlockingIOError):
            last.recv(1)


@pytest.mark.parametrize("seed", range(5))
def test_two_who_dial_at_once_get_one_link(seed: int) -> None:
    import random

    chooser = random.Random(seed)
    for _ in range(20):
        one, other = Rank(0), Rank(1)
        with ranks(one, other):
            steps = [
                lambda one=one, other=other: one.dialer.dial(PeerLane(1, 0), other.endpoint),
                lambda one=one, other=other: other.dialer.dial(PeerLane(0, 0), one.endpoint),
            ]
            chooser.shuffle(steps)
            for step in steps:
                step()
                for _ in range(chooser.randrange(4)):
                    chooser.choice([one, other]).dialer.progress()
            deadline = time.monotonic() + LIMIT_S
            while not (one.links and other.links):
                assert time.monotonic() < deadline, "not in time"
                chooser.choice([one, other]).dialer.progress()
            assert (
                one.links[PeerLane(1, 0)].getpeername() == other.links[PeerLane(0, 0)].getsockname()
            )
            for rank in [one, other] * 5:  # what is left of the other connection
                rank.dialer.progress()
            for step in steps:  # there is a link
                step()
            assert not one.dialer._dialing
            assert not other.dialer._dialing
            assert len(one.links) == len(other.links) == 1
            assert one.failures == other.failures == {}
            one.links[PeerLane(1, 0)].sendall(LINKED)
            assert read(other.links[PeerLane(0, 0)], 1, one, other) == LINKED


def test_an_event_of_a_connection_that_is_closed_is_not_taken_for_the_next_one() -> None:
    """The kernel gives the number of a closed descriptor to the next one that is opened."""
    rank, others = Rank(0), [Rank(1), Rank(2)]
    with ranks(rank, *others), socket.create_connection(rank.address) as stranger:
        stranger.sendall(b"p")
        run(lambda: len(rank.dialer._callers) == 1, rank)
        (caller,) = rank.dialer._callers.values()
        descriptor = caller.connection.fileno()
        stranger.sendall(b"y")

        class Poller:
            """The dialer's, which says first that somebody calls: for who is cut, another dials."""

            def __init__(self, poller: select.epoll) -> None:
                self.poller = poller
                self.register, self.close = poller.register, poller.close
                self.modify, self.unregister = poller.modify, poller.unregister

            def poll(self, timeout: float) -> list[tuple[int, int]]:
                rank.dialer._poller = self.poller
                return [(rank.dialer._listener.fileno(), 1), (descriptor, 1)]

        def accept() -> None:
            rank.dialer._close(caller)
            rank.dialer.dial(PeerLane(1, 0), others[0].endpoint)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rank.dialer, "_accept", accept)
            patch.setattr(rank.dialer, "_poller", Poller(rank.dialer._poller))
            rank.dialer.progress()
        assert list(rank.dialer._dials) == [descriptor]
        assert not rank.dialer._dials[descriptor].connected
        run(lambda: bool(rank.links), rank, *others)
