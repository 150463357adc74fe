"""Joining a job where the system gives too little: an error of pycoll's says what is missing."""

from __future__ import annotations

import shutil
import subprocess
import sys
from typing import Any

import pytest

LIMIT_S = 60


def say(script: str, *before: str) -> str:
    done = subprocess.run(
        [*before, sys.executable, "-c", script],
        capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.returncode, done.stderr)
    return done.stdout


OPEN_ZMQ = """
try:
    ZmqTransport(3)
except pycoll.errors.TransportError as error:
    print(error)
"""


def test_a_limit_on_threads_is_said_where_zeromq_would_end_the_process() -> None:
    # It does not hold for root.
    said = say(f"""
import os, resource, pycoll.errors
from pycoll._transports.zeromq import ZmqTransport
if os.getuid() == 0:
    os.setuid(65534)
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
{OPEN_ZMQ}""")
    assert said.startswith("zmq: rank 3 cannot listen on 127.0.0.1: no thread can be started"), said
    assert "pids.max" in said


def test_a_limit_on_open_files_is_said_where_zeromq_would_end_the_process() -> None:
    said = say(f"""
import os, resource, pycoll.errors
from pycoll._transports.zeromq import ZmqTransport
resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 8,) * 2)
{OPEN_ZMQ}""")
    assert "Too many open files" in said
    assert "ulimit -n" in said


def test_ranks_with_too_few_descriptors_raise_an_error_of_pycoll(job: Any) -> None:
    # Each comes a step further than the one before; the last ones have what they need.
    done = job(
        8,
        """
import resource
free = int(os.environ["PYCOLL_RANK"])
import pycoll._world.session, pycoll._runtime.engine, pycoll._transports.shm
used = len(os.listdir("/proc/self/fd")) - 1
while (descriptor := os.open("/dev/null", os.O_RDONLY)) < used:  # those of a rank have gaps
    used += 1
os.close(descriptor)
resource.setrlimit(resource.RLIMIT_NOFILE, (descriptor + free,) * 2)
rank = free
try:
    pycoll.init(timeout=30.0)
except pycoll.BootstrapError as error:
    print(error)
ok()
""",
        init="",
    )
    assert done.content == list(range(8)), done.stderr
    assert "rank 0 cannot join the job: Too many open files: close what" in done.stdout


def new_network() -> list[str]:
    """A command before a command: it runs in a network of its own, whose loopback is down."""
    for command in (["unshare", "-n"], ["unshare", "-rn"]):
        if (
            shutil.which("unshare")
            and not subprocess.run([*command, "true"], capture_output=True, check=False).returncode
        ):
            return command
    pytest.skip("no network namespace can be made here")


def test_a_loopback_interface_that_is_down_is_said() -> None:
    said = say(
        f"""
import pycoll.errors
from pycoll._transports.zeromq import ZmqTransport
{OPEN_ZMQ}
from pycoll._rendezvous.client import Client
try:
    Client("tcp://127.0.0.1:1", bytes(32), 1, 2).join({{}}, 30.0)
except pycoll.errors.BootstrapError as error:
    print(error)
""",
        *new_network(),
    )
    assert said.count("the loopback interface is down") == 2, said
