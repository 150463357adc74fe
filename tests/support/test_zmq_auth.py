"""The ZAP handler, asked by real sockets on loopback."""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Iterator

import pytest
import zmq
from zmq.utils import z85

from pycoll._support.zmq_auth import Authenticator, guard

DEADLINE_MS = 10_000
DECIDED = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)

Socket = zmq.Socket[bytes]


class Network:
    """A context, and the sockets a test opens in it."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.authenticator = Authenticator(self.context)
        self.sockets: list[Socket] = []

    def socket(self, kind: int) -> Socket:
        self.sockets.append(self.context.socket(kind))
        self.sockets[-1].linger = 0
        return self.sockets[-1]

    def plain(self, password: bytes, username: bytes = b"pycoll") -> Socket:
        peer = self.socket(zmq.PUSH)
        peer.plain_username, peer.plain_password = username, password
        return peer

    def curve(self, pair: tuple[bytes, bytes], server: bytes) -> Socket:
        peer = self.socket(zmq.PUSH)
        peer.curve_publickey, peer.curve_secretkey = pair
        peer.curve_serverkey = server
        return peer

    def close(self) -> None:
        for socket in self.sockets:
            socket.close()
        self.authenticator.close()
        self.context.term()


class Listener:
    """A guarded socket: what a transport opens."""

    def __init__(self, net: Network, domain: str = "here", curve: bool = False) -> None:
        self.socket = net.socket(zmq.PULL)
        self.public = b""
        if curve:
            self.public, secret = zmq.curve_keypair()
            self.socket.curve_server, self.socket.curve_secretkey = True, secret
        else:
            self.socket.plain_server = True
        guard(self.socket, domain)
        self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")

    def decision(self, peer: Socket) -> tuple[int, int]:
        """Connect `peer`; return the event that decided its handshake, and the event's value."""
        with peer.get_monitor_socket(DECIDED) as monitor:
            peer.connect(f"tcp://127.0.0.1:{self.port}")
            assert monitor.poll(DEADLINE_MS), "the handshake was not decided"
            event, value = struct.unpack("=HI", monitor.recv_multipart()[0])
            peer.disable_monitor()
        return event, value


@pytest.fixture
def net() -> Iterator[Network]:
    network = Network()
    yield network
    network.close()


ACCEPTED = (zmq.EVENT_HANDSHAKE_SUCCEEDED, 0)
REFUSED = (zmq.EVENT_HANDSHAKE_FAILED_AUTH, 400)


def test_the_right_password_is_let_in(net: Network) -> None:
    net.authenticator.allow_plain("here", b"secret")
    listener = Listener(net)
    assert listener.decision(net.plain(b"secret")) == ACCEPTED


@pytest.mark.parametrize(("password", "username"), [(b"wrong", b"pycoll"), (b"secret", b"root")])
def test_a_wrong_name_or_password_is_refused(
    net: Network, password: bytes, username: bytes
) -> None:
    net.authenticator.allow_plain("here", b"secret")
    listener = Listener(net)
    assert listener.decision(net.plain(password, username)) == REFUSED


def test_a_password_of_another_domain_is_refused(net: Network) -> None:
    net.authenticator.allow_plain("there", b"secret")
    listener = Listener(net)
    assert listener.decision(net.plain(b"secret")) == REFUSED


def test_passwords_of_one_domain_add_up(net: Network) -> None:
    net.authenticator.allow_plain("here", b"one")
    net.authenticator.allow_plain("here", b"two")
    listener = Listener(net)
    assert [listener.decision(net.plain(word)) for word in (b"one", b"two")] == [ACCEPTED] * 2


def test_the_right_curve_key_is_let_in(net: Network) -> None:
    pair = zmq.curve_keypair()
    net.authenticator.allow_curve("here", z85.decode(pair[0]))
    listener = Listener(net, curve=True)
    assert listener.decision(net.curve(pair, listener.public)) == ACCEPTED


def test_another_curve_key_is_refused(net: Network) -> None:
    net.authenticator.allow_curve("here", z85.decode(zmq.curve_keypair()[0]))
    listener = Listener(net, curve=True)
    assert listener.decision(net.curve(zmq.curve_keypair(), listener.public)) == REFUSED


def test_a_curve_key_is_no_password(net: Network) -> None:
    key = z85.decode(zmq.curve_keypair()[0])
    net.authenticator.allow_curve("here", key)
    listener = Listener(net)
    assert listener.decision(net.plain(key)) == REFUSED


def test_a_peer_without_a_mechanism_sends_nothing_through(net: Network) -> None:
    net.authenticator.allow_plain("here", b"secret")
    listener = Listener(net)
    stranger = net.socket(zmq.PUSH)
    stranger.connect(f"tcp://127.0.0.1:{listener.port}")
    stranger.send(b"let me in")
    event, _ = listener.decision(net.socket(zmq.PUSH))
    assert event != zmq.EVENT_HANDSHAKE_SUCCEEDED
    assert not listener.socket.poll(0)


def test_what_arrives_is_from_the_user_pycoll(net: Network) -> None:
    net.authenticator.allow_plain("here", b"secret")
    listener = Listener(net)
    peer = net.plain(b"secret")
    peer.connect(f"tcp://127.0.0.1:{listener.port}")
    peer.send(b"hello")
    assert listener.socket.poll(DEADLINE_MS)
    frame = listener.socket.recv(copy=False)
    assert isinstance(frame, zmq.Frame)
    assert frame.get("User-Id") == "pycoll"


def test_after_close_nobody_is_let_in(net: Network) -> None:
    net.authenticator.allow_plain("here", b"secret")
    listener = Listener(net)
    net.authenticator.close()
    event, _ = listener.decision(net.plain(b"secret"))
    assert event != zmq.EVENT_HANDSHAKE_SUCCEEDED


def test_a_malformed_request_is_refused_and_the_handler_lives_on(net: Network) -> None:
    net.authenticator.allow_plain("here", b"secret")
    asker = net.socket(zmq.REQ)
    asker.connect("inproc://zeromq.zap.01")
    for request in ([b""], [b"1.0", b"7"], [b"2.0", b"7", b"here", b"", b"", b"PLAIN", b"x", b"y"]):
        asker.send_multipart(request)
        assert asker.poll(DEADLINE_MS)
        assert asker.recv_multipart()[2] == b"400"
    assert Listener(net).decision(net.plain(b"secret")) == ACCEPTED


def test_close_gives_back_the_thread_and_the_descriptors_and_may_be_repeated() -> None:
    fds = len(os.listdir("/proc/self/fd"))
    net = Network()
    net.authenticator.allow_plain("here", b"secret")
    net.authenticator.close()
    assert "pycoll-zap" not in {t.name for t in threading.enumerate()}
    net.close()
    assert len(os.listdir("/proc/self/fd")) == fds


def test_no_thread_runs_before_somebody_is_allowed(net: Network) -> None:
    assert "pycoll-zap" not in {t.name for t in threading.enumerate()}


def test_the_thread_ends_with_its_context() -> None:
    context = zmq.Context()
    authenticator = Authenticator(context)
    authenticator.allow_plain("here", b"secret")
    context.term()
    authenticator.close()
    assert "pycoll-zap" not in {t.name for t in threading.enumerate()}


def test_a_closed_authenticator_allows_nobody(net: Network) -> None:
    net.authenticator.close()
    with pytest.raises(RuntimeError, match="closed"):
        net.authenticator.allow_plain("here", b"secret")


def test_a_second_authenticator_of_a_context_is_an_error(net: Network) -> None:
    net.authenticator.allow_plain("here", b"secret")
    with Authenticator(net.context) as second, pytest.raises(RuntimeError, match="already"):
        second.allow_plain("here", b"other")


def test_credentials_that_protect_nothing_are_errors(net: Network) -> None:
    with pytest.raises(ValueError, match="empty"):
        net.authenticator.allow_plain("here", b"")
    with pytest.raises(ValueError, match="32 bytes"):
        net.authenticator.allow_curve("here", b"short")
