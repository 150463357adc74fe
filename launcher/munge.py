"""munge, by which processes of one user on a cluster can tell each other something secret.

A credential of munge can be read by the user for whom it is made, on hosts that have the cluster's
key. So rank 0 listens at a port that all can work out, and whoever shows a credential of the same
user there gets one with the text. The port is no secret, and who listens there in rank 0's place
gets nothing. A talk has three lines, of which the first two are credentials:

    a rank asks    ask STEP RANK NONCE
    rank 0 says    told NONCE TOKEN TEXT      only this user can read it; the nonce is the rank's
    a rank says    TOKEN                      so it, and nobody between, has read it

Source: https://github.com/dun/munge/wiki/Man-1-munge
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Mapping

from pycoll._launcher.reach import listen_everywhere
from pycoll._launcher.slurm import expand
from pycoll._support.ports import agreed_port
from pycoll._support.ready import ready
from pycoll.errors import BootstrapError

_TRIES = 8  # ports, of which another job may have some
_TALK_S = 5.0
_MAX_TALKS = 256  # at once; who comes then must come again
_PAUSE_S = 0.05  # while rank 0 does not listen yet
_MAX_NBYTES = 16 << 10


def why_not() -> str:
    """Why munge cannot be used here; "": it can."""
    if not (shutil.which("munge") and shutil.which("unmunge")):
        return "there is no munge here"
    try:
        _encode("")
    except OSError as exc:
        return str(exc)
    return ""


class Munge:
    """munge in a step of Slurm: `exchange.Board`.

    Args:
        environ: this process's environment.
        rank, size: this rank, and how many there are.

    Raises:
        BootstrapError: Slurm has not said enough.
    """

    def __init__(self, environ: Mapping[str, str], rank: int, size: int) -> None:
        try:
            self._step = f"{environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}"
            self._host = expand(environ["SLURM_STEP_NODELIST"])[0]
        except (KeyError, IndexError) as exc:
            raise BootstrapError(
                f"srun started this process as rank {rank} of {size}, but has not set {exc}"
            ) from None
        self._rank, self._size = rank, size
        self._ports = [agreed_port(f"{self._step} {i}".encode()) for i in range(_TRIES)]

    def share(self, text: str, timeout: float) -> str:
        deadline = time.monotonic() + timeout
        if self._rank:
            return self._ask(deadline)
        with self._listen() as listener:
            SecretServer(listener, self._step, self._size, text).serve(deadline)
        return text

    def _listen(self) -> socket.socket:
        for port in self._ports:
            with contextlib.suppress(OSError):
                return listen_everywhere(port)
        raise OSError(f"none of the ports {self._ports} is free on {self._host}")

    def _ask(self, deadline: float) -> str:
        while True:
            failures = []
            for port in self._ports:
                try:
                    return self._ask_at(port, deadline)
                except (OSError, ValueError) as exc:
                    failures.append(f"port {port}: {exc}")
                if time.monotonic() >= deadline:
                    # Nobody has taken the first port, unless there is another job.
                    raise TimeoutError(
                        f"rank 0's host {self._host} does not tell where to meet ({failures[0]})"
                    )
            time.sleep(_PAUSE_S)

    def _ask_at(self, port: int, deadline: float) -> str:
        until = min(deadline, time.monotonic() + _TALK_S)
        with socket.create_connection((self._host, port), _left_s(until)) as connection:
            nonce = secrets.token_hex(16)
            question = _encode(f"ask {self._step} {self._rank} {nonce}", until)
            connection.sendall(question + b"\n")
            kind, said, token, text = _decode(_line(connection, until), until).split(" ", 3)
            if (kind, said) != ("told", nonce):
                raise ValueError("who listens there is not rank 0 of this job")
            connection.sendall(f"{token}\n".encode())
            return text


class SecretServer:
    """Where rank 0 tells the others. Each talk is a thread: nobody holds up another.

    Args:
        listener: where they come.
        step: what they must name.
        size: number of ranks.
        text: what they are told.
    """

    def __init__(self, listener: socket.socket, step: str, size: int, text: str) -> None:
        self._listener, self._step, self._size, self._text = listener, step, size, text
        self._lock = threading.Lock()
        self._waiting = set(range(1, size))
        self._heard, self._told = socket.socketpair()  # a byte for each rank that was told
        self._failure = ""

    def serve(self, deadline: float) -> None:
        """Return when all have been told.

        Raises:
            TimeoutError: the deadline, of time.monotonic(), has passed before that.
        """
        talks: list[threading.Thread] = []
        try:
            while self._waiting:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    text = f"{len(self._waiting)} of {self._size} ranks have not asked rank 0"
                    raise TimeoutError(text + (f" ({self._failure})" if self._failure else ""))
                come = ready([self._listener, self._heard], remaining)
                if self._heard in come:
                    self._heard.recv(1)
                if self._listener in come:
                    connection = self._listener.accept()[0]
                    talks = [talk for talk in talks if talk.is_alive()]
                    if len(talks) < _MAX_TALKS:
                        talk = threading.Thread(target=self._talk, args=[connection], daemon=True)
                        talk.start()
                        talks.append(talk)
                    else:
                        connection.close()
        finally:
            with self._lock:
                self._waiting = set()
                self._heard.close()
                self._told.close()

    def _talk(self, connection: socket.socket) -> None:
        until = time.monotonic() + _TALK_S
        with connection:
            try:
                kind, step, rank, nonce = _decode(_line(connection, until)).split(" ")
                if (kind, step) != ("ask", self._step):
                    return
                token = secrets.token_hex(16)
                connection.settimeout(_TALK_S)
                connection.sendall(_encode(f"told {nonce} {token} {self._text}") + b"\n")
                until = time.monotonic() + 2 * _TALK_S  # munge may be slow there, too
                if not hmac.compare_digest(_line(connection, until), token.encode()):
                    return
                number = int(rank)
            except (OSError, ValueError) as exc:
                self._failure = f"one has asked in vain: {exc}"
                return
        with self._lock:
            if number in self._waiting:
                self._waiting.remove(number)
                self._told.send(b".")


def _line(connection: socket.socket, until: float) -> bytes:
    """Read one line, of which the end is not returned; until a time of time.monotonic()."""
    data = b""
    while not data.endswith(b"\n"):
        connection.settimeout(_left_s(until))
        part = connection.recv(4096)
        if not part or len(data) > _MAX_NBYTES:
            raise ConnectionError("the other end has cut the connection, or says too much")
        data += part
    return data.strip()


def _left_s(until: float) -> float:
    return max(0.001, until - time.monotonic())


def _encode(text: str, until: float | None = None) -> bytes:
    """A credential that only this user can read; until a time of time.monotonic().

    Raises:
        OSError: munge makes none.
    """
    command = ["munge", f"--restrict-uid={os.geteuid()}"]
    return _call(command, text.encode(), until).stdout.strip()


def _decode(credential: bytes, until: float | None = None) -> str:
    """What is in a credential of this user; until a time of time.monotonic().

    Raises:
        OSError: it is none, or another's.
    """
    done = _call(["unmunge", "--keys=UID", "--metadata=/dev/stderr"], credential, until)
    uid = done.stderr.decode().rpartition("(")[2].partition(")")[0]
    if uid != str(os.geteuid()):
        raise OSError("unmunge: the credential is another user's")
    return done.stdout.decode()


def _call(
    command: list[str], data: bytes, until: float | None
) -> subprocess.CompletedProcess[bytes]:
    limit_s = _TALK_S if until is None else _left_s(until)
    try:
        done = subprocess.run(command, input=data, capture_output=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"{command[0]} does not answer in {limit_s:.3g} s") from None
    if done.returncode:
        raise OSError(f"{command[0]}: {done.stderr.decode(errors='replace').strip()}")
    return done
