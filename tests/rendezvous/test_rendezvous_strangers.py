"""Strangers and nonsense at the meeting of ranks: keys, addresses, frames and fields."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress

import msgpack
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from rendezvous_world import DEADLINE_S, KEY, Job, by_zmq, join_fields

from pycoll._launcher.rendezvous_server import Server
from pycoll._rendezvous import wire as wire
from pycoll._rendezvous.client import Client
from pycoll._rendezvous.zmq_keys import derive_keys
from pycoll.errors import BootstrapError


@by_zmq
def test_a_wrong_key_is_said_quickly(job: Job) -> None:
    launcher = job.launcher(2)
    start = time.monotonic()
    with pytest.raises(BootstrapError, match=f"rank 1: {launcher.endpoint} refuses .* key"):
        job.client(launcher.endpoint, 1, 2, key=bytes(32)).join({}, DEADLINE_S)
    assert time.monotonic() - start < DEADLINE_S / 6


@by_zmq
def test_another_kind_of_server_is_said_quickly(job: Job) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        with pytest.raises(BootstrapError, match="refuses this process"):
            job.client(f"tcp://127.0.0.1:{port}", 1, 2).join({}, DEADLINE_S)


@by_zmq
def test_a_launcher_that_cannot_be_reached_is_named_at_the_deadline(job: Job) -> None:
    with socket.socket() as taken:  # bound, and not listening: connections are refused
        taken.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(BootstrapError, match=f"rank 1: {endpoint} cannot be reached"):
            job.client(endpoint, 1, 2).join({}, 0.3)


@by_zmq
def test_a_launcher_that_is_silent_is_named_at_the_deadline(job: Job) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(BootstrapError, match=f"{endpoint} does not answer as a pycoll"):
            job.client(endpoint, 1, 2).join({}, 0.3)


@by_zmq
def test_a_web_server_in_the_launchers_place_is_named_at_the_deadline(job: Job) -> None:
    def serve(listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                with listener.accept()[0] as connection:
                    connection.recv(10)
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as web:
        threading.Thread(target=serve, args=[web], daemon=True).start()
        endpoint = f"tcp://127.0.0.1:{web.getsockname()[1]}"
        with pytest.raises(BootstrapError, match=f"{endpoint} .*does not answer as a pycoll job"):
            job.client(endpoint, 1, 2).join({}, 0.5)
        web.shutdown(socket.SHUT_RDWR)


@by_zmq
def test_a_launcher_that_is_stopped_is_named_at_the_deadline(job: Job) -> None:
    launcher = job.launcher(2)
    with launcher.stopped(), pytest.raises(BootstrapError, match="does not answer"):
        job.client(launcher.endpoint, 1, 2).join({}, 0.3)


@by_zmq
def test_a_host_that_has_no_address_is_named_at_the_deadline(job: Job) -> None:
    with pytest.raises(BootstrapError, match=r"no-such-host\.invalid:1 cannot be reached"):
        job.client("tcp://no-such-host.invalid:1", 1, 2).join({}, 0.3)


@by_zmq
@pytest.mark.parametrize("endpoint", ["", "localhost:1", "tcp://", "tcp://127.0.0.1", "no://x:1"])
def test_an_endpoint_that_is_none_is_said_at_once(job: Job, endpoint: str) -> None:
    with pytest.raises(BootstrapError, match="is no address of a launcher"):
        job.client(endpoint, 1, 2).join({}, DEADLINE_S)


@by_zmq
def test_a_client_tries_again_until_the_launcher_is_there(job: Job) -> None:
    launcher = job.launcher(1)
    client = socket.socket()
    port = int(launcher.endpoint.rpartition(":")[2])
    with socket.create_server(("127.0.0.1", 0)) as front, client:

        def forward(source: socket.socket, target: socket.socket) -> None:
            while data := source.recv(65536):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

        def serve() -> None:
            for _ in range(2):  # a launcher that ends, or a front that has nothing behind it yet
                front.accept()[0].close()
            there = front.accept()[0]
            with there, socket.create_connection(("127.0.0.1", port)) as server:
                back = job.start(forward, server, there)
                forward(there, server)
                back.result(DEADLINE_S)

        serving = job.start(serve)
        late = job.client(f"tcp://127.0.0.1:{front.getsockname()[1]}", 0, 1)
        assert late.join({"a": 1}, DEADLINE_S) == [{"a": 1}]
        late.close(0.0)
        serving.result(DEADLINE_S)


def test_a_launcher_that_goes_while_ranks_wait_ends_the_meeting(job: Job) -> None:
    launcher = job.launcher(2)
    waiting = job.joining(launcher, 0, 2)
    launcher.close()
    with pytest.raises(BootstrapError, match=r"the connection to the launcher .* was lost"):
        waiting.result(DEADLINE_S)


def test_a_key_that_is_too_short_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least 16"):
        Server(1, b"secret")
    with pytest.raises(ValueError, match="at least 16"):
        Client("tcp://127.0.0.1:1", b"", 0, 1)


def test_a_server_that_cannot_listen_says_where() -> None:
    with pytest.raises(BootstrapError, match=r"cannot listen on tcp://192\.0\.2\.1"):
        Server(1, KEY, "192.0.2.1")


def test_a_server_of_no_ranks_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one rank"):
        Server(0, KEY)


@by_zmq
def test_strangers_without_the_key_get_nowhere(job: Job) -> None:
    launcher = job.launcher(1)
    port = int(launcher.endpoint.rpartition(":")[2])
    keys = derive_keys(KEY)
    failed = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    failed |= zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL  # cut before it could read why
    with zmq.Context() as context:
        no_security, other_key = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
        # It knows even the server's public key, which is derived from the job's key.
        other_key.curve_serverkey = keys.server_public
        other_key.curve_publickey, other_key.curve_secretkey = zmq.curve_keypair()
        for stranger in (no_security, other_key):
            stranger.linger = 0
            with stranger, stranger.get_monitor_socket(failed) as monitor:
                stranger.connect(launcher.endpoint)
                with suppress(zmq.Again):  # it is refused already
                    stranger.send(wire.pack("join", join_fields(size=1)), zmq.NOBLOCK)
                assert monitor.poll(int(DEADLINE_S * 1000))
                stranger.disable_monitor()
    with socket.create_connection(("127.0.0.1", port)) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(1000))
        raw.settimeout(DEADLINE_S)
        with suppress(ConnectionResetError):
            while raw.recv(4096):
                pass
    assert not launcher.has_notice()
    assert len(job.client(launcher.endpoint, 0, 1).join({}, DEADLINE_S)) == 1


NONSENSE = [
    b"",
    b"\xc1",
    bytes(100_000),
    b"\x91" * 5000,
    b"\xdd\xff\xff\xff\xff",
    b"\xc7\xff\x01" + bytes(255),
    msgpack.packb(None),
    msgpack.packb(["join"]),
    msgpack.packb(["join", {}]),
    msgpack.packb(["join", {b"rank": 1}]),
    msgpack.packb([["join"], {}]),
    msgpack.packb(["join", {str(i): i for i in range(1000)}]),
    msgpack.packb([b"\xff", {}]),
    wire.pack("join", join_fields(rank=1.5)),
    wire.pack("join", join_fields(rank=2**63)),
    wire.pack("met", {"infos": []}),
    wire.pack("raised", {}),
    wire.pack("table", {"id": "x"}),
    wire.pack("table", {}),
    wire.pack("exchange", {"round": "x", "info": b""}),
    wire.pack("exchange", {"round": 0, "info": {}}),
    wire.pack("exchange", {}),
    wire.pack("left", {"links": [7]}),
    wire.pack("left", {"links": 7}),
    wire.pack("left", {"links": [], "calls": 7}),
    wire.pack("left", {"links": [], "calls": [[1, 2, 3]]}),
    wire.pack("left", {"links": [], "calls": [[1, 2, 3, 4]]}),
    wire.pack("abort", {"code": None}),
    wire.pack("broken", {"context": [], "error": "MismatchError"}),
    wire.pack("waiting", {"context": {}, "number": "x", "call": 1, "where": 2, "members": 3}),
    wire.pack("running", {"more": 1}),
]


@by_zmq
@pytest.mark.parametrize("has_joined", [False, True])
def test_nonsense_from_a_peer_with_the_key_has_no_effect(job: Job, has_joined: bool) -> None:
    launcher = job.launcher(2)
    stranger = job.stranger(launcher.endpoint)
    if has_joined:
        stranger.join(launcher, 0, 2)
    for frame in NONSENSE:
        stranger.send(frame)
        stranger.send(frame, frame)
    assert {kind for kind, _ in stranger.answers_until_heard()} <= {"refused"}
    assert not launcher.has_notice()
    assert launcher.call(launcher.server.missing) == ([1] if has_joined else [0, 1])


@by_zmq
def test_nothing_is_believed_before_a_join(job: Job) -> None:
    launcher = job.launcher(2)
    stranger = job.stranger(launcher.endpoint)
    everything = {"error": "E", "text": "T", "peer_failed": False}
    stranger.send(wire.pack("raised", everything))
    stranger.send(wire.pack("abort", {"code": 1}))
    stranger.send(wire.pack("left", {"links": []}))
    stranger.send(wire.pack("who", {}))
    stranger.send(wire.pack("table", {"id": 1}))
    stranger.send(wire.pack("withdraw", {}))
    assert stranger.answers_until_heard() == []
    assert not launcher.has_notice()


@by_zmq
def test_an_oversized_message_costs_its_sender_the_connection_and_nobody_else(job: Job) -> None:
    launcher = job.launcher(2)
    waiting = job.joining(launcher, 0, 2)
    stranger = job.stranger(launcher.endpoint)
    with stranger.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
        stranger.send(bytes(wire.MAX_FRAME_NBYTES + 1))
        assert monitor.poll(int(DEADLINE_S * 1000))
        stranger.socket.disable_monitor()
    job.client(launcher.endpoint, 1, 2).join({}, DEADLINE_S)
    waiting.result(DEADLINE_S)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200) | st.binary(max_size=60).map(lambda b: b"\x92\xa3abc" + b))
def test_any_bytes_decode_or_are_malformed(frame: bytes) -> None:
    try:
        kind, fields = wire.unpack(frame, 64)
    except wire.MalformedError:
        return
    assert isinstance(kind, str)
    assert isinstance(fields, dict)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(wire._POSTS)), st.data())
def test_any_fields_of_a_post_parse_or_are_malformed(kind: str, data: st.DataObject) -> None:
    names = list(wire._POSTS[kind])
    fields = {name: data.draw(VALUES) for name in names}
    try:
        parsed = wire.parse_post(kind, fields, 4)
    except wire.MalformedError:
        return
    assert wire.unpack(wire.pack(kind, parsed), 64) == (kind, parsed)
