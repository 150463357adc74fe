#!/usr/bin/env python3
"""A job of pycoll-run with four ranks on two machines, over RDMA; `tests/rdma/run` starts it.

    tests/rdma/two_machines.py 0 FOLDER    on the machine where pycoll-run runs, 192.0.2.1
    tests/rdma/two_machines.py 1 FOLDER    on the other, 192.0.2.2, which has an sshd for it

FOLDER has what `prepare` has put there. Ranks 0 and 1 are on the first, 2 and 3 on the other. Rank
3 is killed at the end. Prints a line for each thing that was right, and ends with status 0 on both
machines if all was.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

OTHER = "192.0.2.2"
SSH_PORT = 2222
PORT = 7471
"""Where the other machine is told that all is over."""

HERE = 2
VICTIM = 3

LIMIT_S = 240.0
MEETING_S = 60.0
FAILURE_S = 20.0
"""Within this everybody knows of a failure: 5 s, but a virtual machine is a slow one."""

_SSHD = """\
Port {port}
HostKey {folder}/key
AuthorizedKeysFile {folder}/key.pub
PidFile none
UsePAM no
StrictModes no
PermitRootLogin prohibit-password
"""
_SSH = """\
#!/bin/sh
exec /usr/bin/ssh -p {port} -i {folder}/key -o UserKnownHostsFile=/dev/null \
    -o StrictHostKeyChecking=no -o LogLevel=ERROR "$@"
"""


# --- the machines ------------------------------------------------------------------------------


def prepare(folder: Path) -> None:
    """Puts a key for ssh, its daemon's configuration and a command `ssh` into a folder."""
    key = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "key")]
    subprocess.run(key, check=True)
    (folder / "sshd_config").write_text(_SSHD.format(port=SSH_PORT, folder=folder))
    (folder / "ssh").write_text(_SSH.format(port=SSH_PORT, folder=folder))
    (folder / "ssh").chmod(0o755)


def first_machine(folder: Path) -> bool:
    """Have pycoll-run start the job; returns whether it ended as it should."""
    os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"
    _connected(SSH_PORT).close()
    options = ["-H", f"{socket.gethostname()}:{HERE},{OTHER}:{HERE}", "--transport", "rdma"]
    options += ["--op-timeout", str(MEETING_S), "--timeout", str(LIMIT_S)]
    command = [sys.executable, "-m", "pycoll._launcher", *options, __file__, "rank"]
    job = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    print(job.stdout, end="")
    with _connected(PORT) as other:
        other.sendall(b"over\n")
    print(f"machine 0: pycoll-run ended with {job.returncode}", flush=True)
    told = [
        f"right: rank {rank} was told of the death of rank {VICTIM}" in job.stdout
        for rank in range(VICTIM)
    ]
    return job.returncode == 128 + signal.SIGKILL and all(told)


def second_machine(folder: Path) -> bool:
    """Let the first one in, until it says that the job is over; returns whether nothing is left."""
    os.makedirs("/run/sshd", exist_ok=True)
    with socket.create_server(("", PORT)) as listener:
        sshd = shutil.which("sshd", path="/usr/sbin:/usr/bin")
        assert sshd is not None, "there is no sshd: tests/rdma/run --install"
        daemon = subprocess.Popen([sshd, "-D", "-e", "-f", f"{folder}/sshd_config"])
        try:
            listener.settimeout(LIMIT_S + MEETING_S)
            with listener.accept()[0] as first:
                first.settimeout(LIMIT_S)
                assert first.recv(16) == b"over\n"
            deadline = time.monotonic() + FAILURE_S
            while (left := _processes()) and time.monotonic() < deadline:
                time.sleep(0.1)
        finally:
            daemon.terminate()
            daemon.wait()
    if left:
        print("machine 1: left:", *left, sep="\n    ", flush=True)
    return not left


def _processes() -> list[str]:
    """The processes of the job that are here."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if "pycoll._launcher" in words or f"{__file__} rank" in words:
            found.append(words)
    return found


def _connected(port: int) -> socket.socket:
    """A connection to the other machine, which may not be ready yet."""
    deadline = time.monotonic() + MEETING_S
    while True:
        try:
            return socket.create_connection((OTHER, port), MEETING_S)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


# --- a rank ------------------------------------------------------------------------------------


def rank_program() -> None:
    import numpy as np

    import pycoll

    comm = pycoll.init()
    me, size = comm.rank, comm.size
    across = (me + HERE) % size

    def right(what: str) -> None:
        comm.barrier()
        if comm.local_rank == 0:
            print(f"machine {comm.node}: right: {what}", flush=True)

    def equal(got: Any, want: Any, *where: object) -> None:
        np.testing.assert_array_equal(got, want, str(where))

    names = [comm._group.engine.transport.link_name(rank) for rank in range(size)]
    assert [name for rank, name in enumerate(names) if rank != me] == ["rdma"] * (size - 1), names
    right("all talk by RDMA")

    for count in (0, size, 100 * size, 20_000 * size):
        whole = np.arange(count, dtype="int64")
        blocks = whole.reshape(size, -1)
        for name in pycoll.algorithms("all_reduce")[1:]:
            equal(comm.all_reduce(whole + me, algorithm=name), size * whole + 6, name, count)
        for name in pycoll.algorithms("broadcast")[1:]:
            got = comm.broadcast(whole if me == 2 else None, root=2, algorithm=name)
            equal(got, whole, name, count)
        for name in pycoll.algorithms("all_gather")[1:]:
            equal(comm.all_gather(blocks[me], algorithm=name), blocks, name, count)
        for name in pycoll.algorithms("reduce_scatter")[1:]:
            equal(comm.reduce_scatter(blocks, algorithm=name), size * blocks[me], name, count)
        for name in pycoll.algorithms("all_to_all")[1:]:
            got = comm.all_to_all(blocks + me, algorithm=name)
            equal(got, blocks[me] + np.arange(size).reshape(size, 1), name, count)
    right("collectives, by every algorithm")

    for nbytes in (0, 1, 200, 300, 16_300, 16_400, 65 << 10, (65 << 10) + 1, 3 << 20):
        x = np.full(nbytes, me, np.uint8)
        equal(comm.sendrecv(x, across, across), np.full(nbytes, across), nbytes)
    value = {"of": me, "arrays": [np.arange(50_000) + me] * 3}
    got = comm.sendrecv(value, across, across)
    assert got["of"] == across
    equal(got["arrays"][2], np.arange(50_000) + across)
    right("messages of all lengths between the machines")

    requests = [comm.isend(number, across, tag=number % 5) for number in range(500)]
    for number in range(500):
        assert comm.recv(across) == number
    pycoll.wait_all(requests)
    right("many small messages, in order")

    survivors = comm.split(None if me == VICTIM else 0)
    large = np.full(4 << 20, me + 1, np.uint8)
    if me == VICTIM:
        comm.irecv(1, out=np.empty_like(large))
        kill = threading.Event()
        threading.Thread(
            target=lambda: kill.wait() and os.kill(os.getpid(), signal.SIGKILL)
        ).start()
        while True:
            comm.send(large, 0, timeout=MEETING_S)
            kill.set()
    error, start = None, time.monotonic()
    while error is None:
        try:
            if me == 0:
                comm.recv(VICTIM, out=np.empty_like(large))
            elif me == 1:
                comm.send(large, VICTIM)
            else:
                comm.recv(VICTIM)
            start = time.monotonic()
        except pycoll.PeerFailed as caught:
            error = caught
    assert (error.rank, error.reason) == (VICTIM, "killed by signal 9 (SIGKILL)"), repr(error)
    assert time.monotonic() - start < FAILURE_S
    # The others still reach each other.
    got = survivors.all_gather(large[: 1 << 20])
    equal(got[:, -1], [1, 2, 3])
    print(
        f"machine {comm.node}: right: rank {me} was told of the death of rank {VICTIM}", flush=True
    )
    pycoll.finalize()


def main() -> int:
    if sys.argv[1:] == ["rank"]:
        rank_program()
        return 0
    number, folder = int(sys.argv[1]), Path(sys.argv[2])
    was_right = second_machine(folder) if number else first_machine(folder)
    print(f"machine {number}: {'all was right' if was_right else 'WRONG'}", flush=True)
    return 0 if was_right else 1


if __name__ == "__main__":
    sys.exit(main())
