"""PMI-1, by which MPICH's mpiexec and `srun --mpi=pmi2` let processes tell each other something.

A line of `key=value` words each way, over a socket whose number is PMI_FD. What is put there can be
read by the processes of the job only.
Source: Balaji et al., "PMI: A Scalable Parallel Process-Management Interface", EuroMPI 2010.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
import urllib.parse

from pycoll._support.ready import ready

_KEY = "pycoll"
_READ_NBYTES = 4096


class Pmi:
    """The process manager's end: `exchange.Board`.

    Args:
        descriptor: the value of PMI_FD.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def share(self, text: str, timeout: float) -> str:
        deadline = time.monotonic() + timeout
        with socket.socket(fileno=os.dup(self._descriptor)) as manager:
            space = _Space(manager, deadline)
            if text:
                space.put(_KEY, urllib.parse.quote(text))  # a value has no spaces
            space.fence()
            found = space.get(_KEY)
            space.leave()
            return urllib.parse.unquote(found)


class _Space:
    """The job's space of keys and values."""

    def __init__(self, manager: socket.socket, deadline: float) -> None:
        self._manager, self._deadline = manager, deadline
        self._ask("init pmi_version=1 pmi_subversion=1")
        self._name = self._ask("get_my_kvsname")["kvsname"]

    def put(self, key: str, value: str) -> None:
        self._ask(f"put kvsname={self._name} key={key} value={value}")

    def fence(self) -> None:
        """Wait until all processes have come here."""
        self._ask("barrier_in")

    def get(self, key: str) -> str:
        """What has been given before the fence."""
        return self._ask(f"get kvsname={self._name} key={key}")["value"]

    def leave(self) -> None:
        """Say that this process will ask no more, or its end would be taken for a failure."""
        with contextlib.suppress(OSError):
            self._ask("finalize")

    def _ask(self, what: str) -> dict[str, str]:
        self._manager.sendall(f"cmd={what}\n".encode())
        answer = b""
        while not answer.endswith(b"\n"):
            remaining = self._deadline - time.monotonic()
            if remaining <= 0 or not ready([self._manager], remaining):
                raise TimeoutError(f"the launcher does not answer PMI's {what.split()[0]}")
            part = self._manager.recv(_READ_NBYTES)
            if not part:
                raise ConnectionError(f"the launcher has ended at PMI's {what.split()[0]}")
            answer += part
        words = dict(word.partition("=")[::2] for word in answer.decode().split())
        if words.get("rc", "0") != "0":
            raise OSError(f"PMI: {what.split()[0]}: {answer.decode().strip()}")
        return words
