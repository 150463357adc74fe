"""What tests of nodes share."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import time

from patience import PATIENCE

from pycoll._support.environment import free_port

LIMIT_S = 30 * PATIENCE


RUN = [sys.executable, "-P", "-m", "pycoll._launcher"]


WAIT = """
import pycoll, time
comm = pycoll.init()
comm.barrier()
print("ready", flush=True)
while True:
    comm.barrier()
    time.sleep(0.01)
"""


class Nodes:
    """Nodes of one job: a pycoll-run each, with an environment of its own."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.key, self.port = secrets.token_hex(32), free_port()
        self.processes: dict[int, subprocess.Popen[str]] = {}

    def start(self, node: int, *words: str, **more: str) -> subprocess.Popen[str]:
        own = {name: v for name, v in os.environ.items() if not name.startswith("PYCOLL_")}
        variables = {
            "PYCOLL_NODE": str(node),
            "PYCOLL_NODES": str(self.count),
            "PYCOLL_RENDEZVOUS": f"tcp://127.0.0.1:{self.port}",
            "PYCOLL_KEY": self.key,
            "SITE": f"site{node}",
            **more,
        }
        process = self.processes[node] = subprocess.Popen(
            [*RUN, *words],
            env={**own, **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        return process

    def end(self, node: int, said: str | None = None) -> tuple[int, str, str]:
        """Wait for a node: exit status, standard output and standard error."""
        process = self.processes.pop(node)
        out, err = process.communicate(said, timeout=LIMIT_S)
        return process.returncode, out, err

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.communicate()


def until_listening(port: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while True:
        with (
            contextlib.suppress(ConnectionRefusedError),
            socket.create_connection(("127.0.0.1", port)) as connection,
        ):
            if connection.getpeername() != connection.getsockname():  # else it has met itself
                return
        assert time.monotonic() < deadline
        time.sleep(0.01)
