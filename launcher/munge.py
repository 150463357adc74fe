"""munge, by which processes of one user on a cluster can tell each other something secret.

A credential of munge can be read by the user for whom it is made, on hosts that have the cluster's
key. So rank 0 listens at a port that all can work out, and whoever shows a credential of the same
user there gets one with the text. The port is no secret, and who listens there in rank 0's place
gets nothing: its answer must be a credential of the same user, made for this job, too.
Source: https://github.com/dun/munge/wiki/Man-1-munge
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping

from pycoll.errors import BootstrapError
from pycoll.launcher.reach import listen_everywhere
from pycoll.launcher.slurm import expand
from pycoll.ports import agreed_port

_TRIES = 8  # ports, of which another job may have some
_TALK_S = 5.0
_PAUSE_S = 0.05  # while rank 0 does not listen yet
_MAX_NBYTES = 16 << 10


def why_not() -> str:
    """Why munge cannot be used; "" if it can, for what is known here."""
    return "" if shutil.which("munge") and shutil.which("unmunge") else "there is no munge here"


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
        """See `Board`."""
        deadline = time.monotonic() + timeout
        if self._rank:
            return self._ask(deadline)
        self._serve(text, deadline)
        return text

    def _serve(self, text: str, deadline: float) -> None:
        """Tell all other ranks."""
        listener = self._listen()
        waiting = set(range(1, self._size))
        with listener:
            while waiting:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    count = len(waiting)
                    raise TimeoutError(f"{count} of {self._size} ranks have not asked rank 0")
                listener.settimeout(min(remaining, 3600.0))
                try:
                    asking = listener.accept()[0]
                except TimeoutError:
                    continue
                with asking, contextlib.suppress(OSError, ValueError):
                    asking.settimeout(_TALK_S)
                    step, rank = _decode(_line(asking)).split()
                    if step == self._step:
                        asking.sendall(_encode(f"{self._step} {text}") + b"\n")
                        if _line(asking) == b"thanks":
                            waiting.discard(int(rank))

    def _listen(self) -> socket.socket:
        for port in self._ports:
            with contextlib.suppress(OSError):
                return listen_everywhere(port)
        raise OSError(f"none of the ports {self._ports} is free on {self._host}")

    def _ask(self, deadline: float) -> str:
        why = ""
        while time.monotonic() < deadline:
            for port in self._ports:
                try:
                    return self._ask_at(port)
                except (OSError, ValueError) as exc:
                    why = f"port {port}: {exc}"
            time.sleep(_PAUSE_S)
        raise TimeoutError(f"rank 0's host {self._host} does not tell where to meet ({why})")

    def _ask_at(self, port: int) -> str:
        with socket.create_connection((self._host, port), _TALK_S) as connection:
            connection.sendall(_encode(f"{self._step} {self._rank}") + b"\n")
            step, _, text = _decode(_line(connection)).partition(" ")
            if step != self._step:
                raise ValueError("another job listens there")
            connection.sendall(b"thanks\n")
            return text


def _line(connection: socket.socket) -> bytes:
    data = b""
    while not data.endswith(b"\n"):
        part = connection.recv(4096)
        if not part or len(data) > _MAX_NBYTES:
            raise ConnectionError("who listens there has cut the connection")
        data += part
    return data.strip()


def _encode(text: str) -> bytes:
    """A credential that only this user can read."""
    command = ["munge", f"--restrict-uid={os.geteuid()}"]
    return _call(command, text.encode()).strip()


def _decode(credential: bytes) -> str:
    """What is in a credential of this user.

    Raises:
        OSError: it is none, or another's.
    """
    metadata = ["--keys=UID", "--metadata=/dev/stderr"]
    done = subprocess.run(["unmunge", *metadata], input=credential, capture_output=True)
    if done.returncode:
        raise OSError(f"unmunge: {done.stderr.decode().strip()}")
    uid = done.stderr.decode().rpartition("(")[2].partition(")")[0]
    if uid != str(os.geteuid()):
        raise OSError("unmunge: the credential is another user's")
    return done.stdout.decode()


def _call(command: list[str], data: bytes) -> bytes:
    done = subprocess.run(command, input=data, capture_output=True)
    if done.returncode:
        raise OSError(f"{command[0]}: {done.stderr.decode().strip()}")
    return done.stdout
