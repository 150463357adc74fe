"""How two ranks prove to each other that they are of one job, before a connection counts as a link.

The rank that connects speaks first; each message has a fixed length, and no secret is sent:

    dialer    hello: which job, from which rank to which, which lane, a nonce
    listener  a nonce, and the proof that it knows the key
    dialer    the same proof of its own
    listener  one byte: LINKED, BUSY (it is dialing, too, and its own connection counts), or REFUSED

A proof is an HMAC of the hello and the listener's nonce, under a key derived from that of the job.
Both nonces are fresh, so nothing can be replayed. Dialer and listener prove with different labels,
and the hello names both ranks, so nothing can be reflected or led to another rank. What follows is
neither encrypted nor protected against somebody on the path.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from typing import NamedTuple

_HELLO = struct.Struct("<12s16sIIHxx32s")
_MAGIC = b"pycoll tcp 1"
_NONCE_NBYTES = 32

HELLO_NBYTES = _HELLO.size
PROOF_NBYTES = hashlib.sha256().digest_size
REPLY_NBYTES = _NONCE_NBYTES + PROOF_NBYTES

LINKED, BUSY, REFUSED = b"L", b"B", b"R"


class Secret(NamedTuple):
    """What the ranks of a job know, and nobody else.

    Attributes:
        job: says which job it is; not secret.
        key: of the proofs.
    """

    job: bytes
    key: bytes

    @classmethod
    def derive(cls, key: bytes) -> Secret:
        """Derive it from the job's key."""
        return cls(_mac(key, b"pycoll tcp job")[:16], _mac(key, b"pycoll tcp proof"))


class Hello(NamedTuple):
    """What a dialer says first: the ranks, and the number of this connection between them."""

    source: int
    dest: int
    lane: int


def make_hello(secret: Secret, hello: Hello) -> bytes:
    """Return the first message of a dialer."""
    return _HELLO.pack(_MAGIC, secret.job, *hello, os.urandom(_NONCE_NBYTES))


def may_be_hello(message: bytes) -> bool:
    """Whether a first message may begin so: who speaks something else is cut at once."""
    return message.startswith(_MAGIC[: len(message)])


def read_hello(secret: Secret, message: bytes) -> Hello | None:
    """Return what a stranger says that it is, if it is of this job; None: it is not."""
    if len(message) != HELLO_NBYTES:
        return None
    magic, job, source, dest, lane, _ = _HELLO.unpack(message)
    if magic != _MAGIC or not hmac.compare_digest(job, secret.job):
        return None
    return Hello(source, dest, lane)


def make_reply(secret: Secret, hello: bytes) -> bytes:
    """Return what a listener answers to a hello: its nonce and its proof."""
    nonce = os.urandom(_NONCE_NBYTES)
    return nonce + _proof(secret, b"listener", hello, nonce)


def check_reply(secret: Secret, hello: bytes, reply: bytes) -> bool:
    """Whether the listener that has answered so knows the key."""
    nonce, proof = reply[:_NONCE_NBYTES], reply[_NONCE_NBYTES:]
    return hmac.compare_digest(proof, _proof(secret, b"listener", hello, nonce))


def make_proof(secret: Secret, hello: bytes, reply: bytes) -> bytes:
    """Return the dialer's own proof, after the listener's reply."""
    return _proof(secret, b"dialer", hello, reply[:_NONCE_NBYTES])


def check_proof(secret: Secret, hello: bytes, reply: bytes, proof: bytes) -> bool:
    """Whether the dialer that has sent this proof knows the key."""
    return hmac.compare_digest(proof, make_proof(secret, hello, reply))


def _proof(secret: Secret, label: bytes, hello: bytes, nonce: bytes) -> bytes:
    return _mac(secret.key, label + hello + nonce)


def _mac(key: bytes, message: bytes) -> bytes:
    return hmac.digest(key, message, "sha256")
