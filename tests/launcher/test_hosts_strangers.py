"""Strangers at all ports of a job on several hosts: silent, slow, wrong, many, and who replay.

On pretended hosts (`hosts_bed`): `pytest -m hosts`, as root. They come from a host that has no part
in the job, and replay what was said over the cable when the ranks met. On one host:
test_open_ports.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import hosts_bed
import pytest
from hosts_bed import PYCOLL_RUN, Bed
from hosts_jobs import Running
from patience import PATIENCE

from pycoll._transports.handshake import HELLO_NBYTES, PROOF_NBYTES

pytestmark = pytest.mark.hosts

LIMIT_S = 60 * PATIENCE
WHOLE = HELLO_NBYTES + PROOF_NBYTES  # who says less is waited for; by ZeroMQ it is more
HELPERS = str(Path(hosts_bed.__file__).parent)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    if why := hosts_bed.why_not():
        pytest.skip(why)
    with hosts_bed.bed(tmp_path_factory.mktemp("hosts"), 3) as bed:
        yield bed


# Its last steps are between ranks that have had no link before: these are made among strangers.
PROGRAM = """
import os, sys, time
import numpy as np
import pycoll

comm = pycoll.init()
x = np.full(10_000, 1.0 + comm.rank)
comm.barrier()
print("ready", flush=True)
while not comm.all_reduce(os.path.exists(sys.argv[1])):
    assert (comm.all_reduce(x) == 10.0).all()
    time.sleep(0.01)
for by in range(1, comm.size):
    to, source = (comm.rank + by) % comm.size, (comm.rank - by) % comm.size
    assert (comm.sendrecv(x, to, source) == 1.0 + source).all()
assert (comm.all_to_all(np.repeat(x[:4, None], 9, axis=1)).sum()) == 90.0
print("well", flush=True)
"""

# Keeps the beginning of what was said in each connection that goes over eth0, until its standard
# input ends.
LISTENS_IN = """
import json, select, socket, struct, sys
raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
raw.setsockopt(socket.SOL_SOCKET, 33, 64 << 20)  # SO_RCVBUFFORCE
raw.bind(("eth0", 0))
print("listens", flush=True)
starts, pieces = {}, {}
while True:
    ready = select.select([raw, sys.stdin], [], [])[0]
    if raw not in ready:
        break
    packet = raw.recv(1 << 17)[14:]
    version = packet[0] >> 4
    if version == 4 and packet[9] == 6:
        head, total = 4 * (packet[0] & 15), int.from_bytes(packet[2:4], "big")
        packet = packet[: total or None]
    elif version == 6 and packet[6] == 6:
        head = 40
    else:
        continue
    source, dest, number, _, flags = struct.unpack_from(">HHIIH", packet, head)
    which, data = (source, dest), packet[head + 4 * (flags >> 12) :]
    if flags & 2:
        starts[which] = number + 1
    elif data and which in starts:
        at = (number - starts[which]) % (1 << 32)
        if at < 4096:
            pieces.setdefault(which, {})[at] = data
said = {}
for (_, dest), found in pieces.items():
    text = b""
    for at in sorted(found):
        if at <= len(text):
            text += found[at][len(text) - at :]
    said.setdefault(dest, []).append(text[:4096].hex())
json.dump(said, sys.stdout)
"""

STRANGERS = """
import contextlib, json, sys
sys.path.insert(0, sys.argv[1])
from port_strangers import Strangers
ports, said = json.loads(sys.argv[2]), json.load(sys.stdin)
replayed = 0
with contextlib.ExitStack() as stack:
    for host, port in ports:
        strangers = stack.enter_context(Strangers(port, host))
        strangers.come()
        for words in said.get(str(port), []):
            assert strangers.is_cut_after(bytes.fromhex(words)), (host, port, words)
            replayed += 1
        strangers.come()
    print(replayed, flush=True)
    sys.stdin.close()
    open(sys.argv[3], "w").close()
    with open(sys.argv[4]) as file:  # a pipe: until the job has ended
        file.read()
"""


def open_ports(hosts: Bed) -> list[tuple[str, int]]:
    """The ports of a job that others can reach: address of the host, and number."""
    found = []
    for number, name in enumerate(hosts.names, 1):
        for line in hosts.run(name, "ss", "-ltnpH").stdout.splitlines():
            address = line.split()[3]
            if "127.0.0.1" not in address and "sshd" not in line:
                found.append((f"10.77.0.{number}", int(address.rpartition(":")[2])))
    return sorted(set(found))


@pytest.mark.parametrize("words", [("tcp",), ("zmq",), ("zmq", "--encrypt")], ids=" ".join)
def test_a_job_computes_and_makes_links_while_strangers_are_at_all_its_ports(
    hosts: Bed, script: Callable[[str], str], tmp_path: Path, words: tuple[str, ...]
) -> None:
    end, over = tmp_path / "end", tmp_path / "over"
    os.mkfifo(over)
    with contextlib.ExitStack() as stack:

        def start(host: str, *words: str) -> subprocess.Popen[str]:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            process = stack.enter_context(hosts.popen(host, sys.executable, "-c", *words, **pipes))
            stack.callback(process.kill)
            return process

        listener = start("hosta", LISTENS_IN)
        assert listener.stdout is not None
        assert listener.stdout.readline() == "listens\n"
        options = ["--no-tag-output", "-H", "hosta:2,hostb:2", "--transport", *words]
        running = Running(hosts, *PYCOLL_RUN, *options, script(PROGRAM), str(end))
        stack.callback(running.end, 60.0)
        stack.callback(running.process.kill)
        running.until("ready", 30.0, 4)
        heard = json.loads(listener.communicate(timeout=LIMIT_S)[0])
        said = {
            port: [each for each in words if len(each) >= 2 * WHOLE]
            for port, words in heard.items()
        }
        ports = open_ports(hosts)
        assert len(ports) >= 4, ports  # of each rank
        stranger = start("hostc", STRANGERS, HELPERS, json.dumps(ports), str(end), str(over))
        assert stranger.stdin is not None
        assert stranger.stdout is not None
        json.dump(said, stranger.stdin)
        stranger.stdin.close()
        assert int(stranger.stdout.readline()) >= 1  # of a link between the two hosts
        assert running.end(60.0) == 0, running.said
        assert running.said.count("well") == 4
        over.write_text("over")
        assert stranger.wait(LIMIT_S) == 0
