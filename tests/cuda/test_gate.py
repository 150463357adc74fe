"""The gate before a rank's results: who gives up waits for who writes, and lets nobody in later."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest
from patience import PATIENCE

from pycoll._gpu import gate

HOLDER = """
import sys
from pycoll._gpu import gate
one = gate.read(bytes.fromhex(sys.argv[1]))
with gate.held([one]) as is_open:
    print(is_open, flush=True)
    sys.stdin.readline()
print("left", flush=True)
with gate.held([one]) as is_open:
    print(is_open, flush=True)
"""


def holder() -> subprocess.Popen[str]:
    """Another process that holds this one's gate open until it reads a line."""
    started = subprocess.Popen(
        [sys.executable, "-c", HOLDER, gate.give().pack().hex()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert started.stdout is not None
    assert started.stdout.readline() == "True\n"
    return started


def shutting() -> threading.Thread:
    thread = threading.Thread(target=gate.shut)
    thread.start()
    return thread


def test_who_gives_up_waits_for_who_writes_and_lets_nobody_in_later() -> None:
    writer = holder()
    thread = shutting()
    thread.join(0.1)
    assert thread.is_alive()
    said, _ = writer.communicate("\n", timeout=30 * PATIENCE)
    assert said in ("left\nFalse\n", "left\nTrue\n")  # it may have come before
    thread.join(30 * PATIENCE)
    assert not thread.is_alive()
    again = holder()  # a new pass is good
    again.communicate("\n", timeout=30 * PATIENCE)


def test_an_old_pass_is_not_good_any_more() -> None:
    old = gate.give()
    gate.shut()
    writer = subprocess.run(
        [sys.executable, "-c", HOLDER, old.pack().hex()], input="", capture_output=True, text=True
    )
    assert writer.stdout == "False\nleft\nFalse\n", writer.stderr


def test_who_dies_while_it_writes_holds_nobody_up() -> None:
    writer = holder()
    thread = shutting()
    os.kill(writer.pid, signal.SIGKILL)
    writer.wait()
    thread.join(30 * PATIENCE)
    assert not thread.is_alive()
    assert gate._of_this_process().get()[2] == 0
    writer.communicate()


# A gate with a writer that has died, as far as its lock says, but has not ended.
CROWDED = """
import os, resource, subprocess, sys, threading
from pycoll._gpu import gate
is_full = sys.argv[1] == "full"
writer = subprocess.Popen([sys.executable, "-c", "open(0).read()"], stdin=subprocess.PIPE)
gate._of_this_process().set(b"n" * 16, 0, writer.pid)
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
kept = [os.open(os.devnull, os.O_RDONLY)]
while kept[-1] < 1100:
    kept.append(os.open(os.devnull, os.O_RDONLY))
if is_full:
    resource.setrlimit(resource.RLIMIT_NOFILE, (kept[-1] + 1, most))
shutting = threading.Thread(target=gate.shut)
shutting.start()
shutting.join(0.1)
assert shutting.is_alive()
if is_full:
    os.close(kept.pop())
writer.communicate(b"")
shutting.join(gate.PATIENCE_S / 2)
assert not shutting.is_alive()
assert gate._of_this_process().get() == (b"n" * 16, 1, 0)
"""


@pytest.mark.parametrize("files", ["many", "full"])
def test_the_end_of_who_wrote_is_waited_for_with_many_open_files(files: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CROWDED, files], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_a_pass_of_a_process_that_is_gone_is_not_good() -> None:
    gone = gate.give()._replace(nonce=b"x" * 16)
    with gate.held([gone]) as is_open:
        assert not is_open
    with gate.held([gone._replace(descriptor=999)]) as is_open:
        assert not is_open
