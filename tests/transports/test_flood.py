"""Thousands of strangers at the ports of a running job, which computes on and makes links."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE
from tiers import few

from pycoll._transports import handshake
from pycoll._transports.dial import SILENT
from pycoll._transports.handshake import HELLO_NBYTES, Hello, Secret

RANKS = 4
LIMIT_S = 50 * PATIENCE
OPEN = 300
"""How many connections of strangers are open at a time: more than a rank keeps."""

# Two ranks compute from the beginning; the others are met while strangers are at the ports.
SCRIPT = """
import json, os, sys
from pathlib import Path
import numpy as np
import pycoll

folder = Path(sys.argv[1])

comm = pycoll.init()
rank = comm.rank
transport = comm._group.engine.transport
print(json.dumps({
    "rank": rank, "pid": os.getpid(), "endpoint": transport.address()["endpoint"],
    "job": transport._tcp.dialer._secret.job.hex()}), flush=True)

def check(value, turn, peer):
    assert len(value) == (turn * 7919) % 300_000, turn
    assert (value == (turn + peer) % 251).all(), turn

def make(turn):
    return np.full((turn * 7919) % 300_000, (turn + rank) % 251, np.uint8)

def exchange(peer, turn):
    "Send and receive a value of changing length, and check it."
    check(comm.sendrecv(make(turn), peer, peer), turn, peer)

if rank < 2:
    turn, links, done = 0, False, False
    while not done:
        exchange(1 - rank, turn)
        if rank == 0:
            comm.send(((folder / "link").exists(), (folder / "stop").exists()), 1)
            link, done = comm.recv(1)
        else:
            link, done = comm.recv(0)
            comm.send((link, done), 0)
        if link and not links:
            links = True
            for peer in (2, 3):  # each has had no link so far
                comm.send(turn, peer)
                exchange(peer, turn)
            (folder / f"linked{rank}").touch()
        turn += 1
        if turn == 5:
            print("ready", flush=True)
else:
    for peer in (0, 1):
        exchange(peer, comm.recv(peer))
    exchange(5 - rank, 5)
    (folder / f"linked{rank}").touch()
total = comm.all_reduce(np.arange(1000) + rank)
assert (total == 4 * np.arange(1000) + 6).all()
"""


class Job:
    """The job of the script, with what its ranks have written to the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        script = folder / "script.py"
        script.write_text(SCRIPT)
        run = [sys.executable, "-m", "pycoll._launcher", "-n", str(RANKS), "--transport", "tcp"]
        self.process = subprocess.Popen(
            [*run, str(script), str(folder)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self.deadline = time.monotonic() + LIMIT_S
        self.ranks: list[dict[str, Any]] = []

    def has(self, *names: str) -> bool:
        """Whether its ranks have said all this; else it goes on."""
        if self.process.poll() is not None:
            pytest.fail(self.process.communicate()[0])
        assert time.monotonic() < self.deadline, f"not in time: {names}"
        return all((self.folder / name).exists() for name in names)

    def start(self) -> None:
        """Wait until two ranks compute, and all have said who they are."""
        assert self.process.stdout is not None
        said: list[str] = []
        while len(said) < RANKS + 2:
            line = self.process.stdout.readline()
            assert line, f"the job has ended: {said}"
            said.append(line)
        found = [json.loads(line) for line in said if line.startswith("{")]
        self.ranks = sorted(found, key=lambda rank: int(rank["rank"]))

    def costs(self) -> list[tuple[int, int]]:
        """Bytes of memory and open descriptors of each rank."""
        found = []
        for rank in self.ranks:
            folder = Path(f"/proc/{rank['pid']}")
            lines = (folder / "status").read_text().splitlines()
            resident = next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))
            found.append((resident * 1024, len(list((folder / "fd").iterdir()))))
        return found

    def end(self) -> None:
        (self.folder / "stop").touch()
        output, _ = self.process.communicate(timeout=LIMIT_S)
        assert self.process.returncode == 0, output

    def close(self) -> None:
        self.process.kill()
        if self.process.stdout is not None and not self.process.stdout.closed:
            self.process.communicate()


class Strangers:
    """All kinds of strangers, one after the other; the last `OPEN` stay connected.

    They know what can be read on the network: which job it is, and all that its ranks have said.
    """

    def __init__(self, ranks: list[dict[str, Any]]) -> None:
        self.ports = [int(rank["endpoint"].rpartition(":")[2]) for rank in ranks]
        self.impostor = Secret(bytes.fromhex(ranks[0]["job"]), b"not the key")
        self.chooser = random.Random(1)
        self.open: deque[socket.socket] = deque()
        self.slow: deque[tuple[socket.socket, bytes]] = deque(maxlen=40)
        self.replayed = [self.hello(dest) for dest in range(RANKS)]
        self.kinds = [
            self.silent,
            self.half,
            self.dribbling,
            self.garbage,
            self.replaying,
            self.reflecting,
            self.oversized,
            self.waiting,
        ]
        self.number = 0

    def hello(self, dest: int) -> bytes:
        source = (dest + self.chooser.randrange(1, RANKS)) % RANKS
        return handshake.make_hello(self.impostor, Hello(source, dest, 0))

    def come(self) -> None:
        """Connect once more, as one of each kind in turn."""
        dest = self.number // len(self.kinds) % RANKS
        connection = socket.create_connection(("127.0.0.1", self.ports[dest]), LIMIT_S)
        connection.setblocking(False)
        if self.chooser.random() < 0.5:  # who ends with a reset, and who in good order
            option = struct.pack("ii", 1, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, option)
        self.open.append(connection)
        while len(self.open) > OPEN:
            self.open.popleft().close()
        self.kinds[self.number % len(self.kinds)](connection, dest)
        self.number += 1
        if self.slow:
            other, rest = self.slow.popleft()
            self.say(other, rest[:1])
            if len(rest) > 1:
                self.slow.append((other, rest[1:]))

    @staticmethod
    def say(connection: socket.socket, message: bytes) -> None:
        with contextlib.suppress(OSError):  # it was cut, or takes no more
            connection.send(message)

    def silent(self, connection: socket.socket, dest: int) -> None:
        pass

    def half(self, connection: socket.socket, dest: int) -> None:
        self.say(connection, self.hello(dest)[: self.chooser.randrange(1, HELLO_NBYTES)])

    def dribbling(self, connection: socket.socket, dest: int) -> None:
        self.slow.append((connection, self.hello(dest)))

    def garbage(self, connection: socket.socket, dest: int) -> None:
        self.say(connection, self.chooser.randbytes(self.chooser.randrange(1, 500)))

    def replaying(self, connection: socket.socket, dest: int) -> None:
        # With what a dialer has once proved to another nonce.
        self.say(connection, self.replayed[dest] + bytes(32))

    def reflecting(self, connection: socket.socket, dest: int) -> None:
        self.say(connection, self.hello(dest))
        with contextlib.suppress(OSError):  # there is no reply yet
            self.say(connection, connection.recv(100))

    def oversized(self, connection: socket.socket, dest: int) -> None:
        self.say(connection, self.hello(dest) + bytes(50_000))

    def waiting(self, connection: socket.socket, dest: int) -> None:
        self.say(connection, self.hello(dest))

    def close(self) -> None:
        for connection in self.open:
            connection.close()


@pytest.mark.parametrize("number", few([1_000], [20_000]))
def test_a_job_computes_on_and_makes_links_while_strangers_come(
    tmp_path: Path, number: int
) -> None:
    job = Job(tmp_path)
    try:
        job.start()
        before, highest = job.costs(), job.costs()
        strangers = Strangers(job.ranks)
        linked = [f"linked{rank}" for rank in range(RANKS)]
        while strangers.number < number or not job.has(*linked):
            strangers.come()
            if strangers.number == number // 2:
                (tmp_path / "link").touch()
            if strangers.number % 250 == 0:
                both = zip(highest, job.costs(), strict=True)
                highest = [(max(one[0], two[0]), max(one[1], two[1])) for one, two in both]
        strangers.close()
        job.end()
    finally:
        job.close()
    for (memory, descriptors), (most_memory, most_descriptors) in zip(before, highest, strict=True):
        # Values, links and their buffers; and the strangers that a rank keeps.
        assert most_memory - memory < 24 * 1024**2
        assert most_descriptors - descriptors <= 2 * RANKS + SILENT + RANKS + 4
