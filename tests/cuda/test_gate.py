"""The gate before a rank's results: who gives up waits for who writes, and lets nobody in later."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

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


def test_a_pass_of_a_process_that_is_gone_is_not_good() -> None:
    gone = gate.give()._replace(nonce=b"x" * 16)
    with gate.held([gone]) as is_open:
        assert not is_open
    with gate.held([gone._replace(descriptor=999)]) as is_open:
        assert not is_open
