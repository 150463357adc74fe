"""pycoll-run called on every node of a job, and agents that call their launcher."""

from __future__ import annotations

import argparse
import re
import signal
import socket
import subprocess
from typing import Any

import pytest
from node_jobs import WAIT, until_listening
from tiers import smoke

from pycoll._launcher.nodes import find_node
from pycoll._launcher.outcome import CANNOT_START
from pycoll._support.environment import UNENCRYPTED
from pycoll._tools import k8s
from pycoll.errors import Error

WHERE = """
import os, sys, numpy as np, pycoll
comm = pycoll.init()
assert comm.all_reduce(np.full(50_000, comm.rank + 1.0))[-1] == comm.size * (comm.size + 1) / 2
say = [comm.rank, comm.size, comm.node, comm.local_rank, comm.local_size, os.environ["SITE"]]
print(*say, sys.stdin.read(), flush=True)
"""


def until(line: str, process: subprocess.Popen[str], count: int = 1) -> None:
    """Wait until so many lines of standard output have this in them."""
    assert process.stdout is not None
    while count:
        said = process.stdout.readline()
        assert said, "it has ended"
        count -= line in said


@pytest.mark.parametrize("first", [0, 1])
def test_nodes_find_each_other_whoever_is_first(nodes: Any, script: Any, first: int) -> None:
    job, path = nodes(2), script(WHERE)
    job.start(first, "-n", "3", path)
    if first == 0:
        until_listening(job.port)
    job.start(1 - first, "-n", "3", path)
    status, out, err = job.end(0, "from the terminal")
    assert (status, err.removeprefix(f"pycoll-run: {UNENCRYPTED}\n")) == (0, "")
    assert sorted(line.split(maxsplit=6) for line in out.splitlines()) == [
        ["0", "3", "0", "0", "2", "site0", "from the terminal"],
        ["1", "3", "0", "1", "2", "site0"],
        ["2", "3", "1", "0", "1", "site1"],  # an environment of its own, and no standard input
    ]
    assert job.end(1) == (0, "", "")


def test_a_warning_to_any_node_reaches_the_ranks_of_all(nodes: Any, script: Any) -> None:
    text = """
import pycoll, signal
got = []
signal.signal(signal.SIGUSR1, lambda *_: got.append(1))
comm = pycoll.init()
comm.barrier()
print("ready", flush=True)
while not all(comm.all_gather(len(got))):
    pass
"""
    job, path = nodes(2), script(text)
    first = job.start(0, "-n", "2", path)
    job.start(1, "-n", "2", path)
    until("ready", first, 2)
    job.processes[1].send_signal(signal.SIGUSR1)
    assert job.end(0)[0] == 0
    assert job.end(1) == (0, "", "")


def test_the_ranks_of_all_nodes_encrypt_if_node_0_says_so(nodes: Any, script: Any) -> None:
    text = """
import pycoll
comm = pycoll.init()
assert comm.all_gather(1) == [1] * 3
peers = comm._group.engine.transport.outside.peers.values()
found = {(t.name, t._sockets.keys is not None) for t in peers}
assert found == {("zmq", True)}, found
"""
    job, path = nodes(2), script(text)
    job.start(0, "--encrypt", "-n", "3", path)
    job.start(1, "-n", "3", path)
    assert [job.end(0), job.end(1)] == [(0, "", "")] * 2


@smoke
def test_a_rank_that_fails_ends_all_nodes(nodes: Any, script: Any) -> None:
    job = nodes(3)
    path = script("import pycoll, sys\ncomm = pycoll.init()\nsys.exit(7 * (comm.rank == 2))\n")
    for node in range(3):
        job.start(node, path, "-n", "3")  # options behind the script are its own
    status, _, err = job.end(0)
    assert status == 7
    assert re.search(r"pycoll-run: rank \d+ failed after .* s: exit status 7", err) is not None
    assert [job.end(node)[0] for node in (1, 2)] == [0, 0]


def two_that_wait(nodes: Any, script: Any) -> tuple[Any, Any]:
    """A job of two nodes whose ranks are there, and its script."""
    job, path = nodes(2), script(WAIT)
    for node in range(2):
        job.start(node, "-n", "2", path)
    until("ready", job.processes[0], 2)
    return job, path


def test_a_node_that_is_ended_is_named_at_once(nodes: Any, script: Any) -> None:
    job, _ = two_that_wait(nodes, script)
    job.processes[1].terminate()
    status, _, err = job.end(0)
    assert status == 1, err
    why = "lost with its host .*: pycoll was ended there by SIGTERM"
    assert re.search(rf"rank 1 failed after .* s: {why}", err), err
    job.end(1)


def test_before_a_node_is_ended_the_ranks_of_all_may_save(nodes: Any, script: Any) -> None:
    text = """
import pycoll, signal
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
comm = pycoll.init()
comm.barrier()
print("ready", flush=True)
while not all(comm.all_gather(len(asked))):
    pass
print("saved", comm.rank, flush=True)
"""
    job, path = nodes(2), script(text)
    first = job.start(0, "-n", "2", "--grace", "60", path)
    job.start(1, path)
    until("ready", first, 2)
    job.processes[1].terminate()
    status, out, err = job.end(0)
    assert sorted(out.splitlines()) == ["saved 0", "saved 1"]
    assert status == 1
    assert re.search("rank 1 failed after .* s: lost with its host .* ended there by SIGTERM", err)
    assert job.end(1)[0] == 128 + signal.SIGTERM


def test_a_node_that_is_killed_takes_only_its_own_ranks_along(nodes: Any, script: Any) -> None:
    job, _ = two_that_wait(nodes, script)
    job.processes[1].kill()  # its guardian sweeps, and both nodes are on this machine
    status, _, err = job.end(0)
    assert status == 1, err
    assert re.search("rank 1 failed after .* s: lost with its host .*: no sign of life", err), err
    job.end(1)


def test_the_end_of_node_0_ends_the_others(nodes: Any, script: Any) -> None:
    job, _ = two_that_wait(nodes, script)
    job.processes[0].kill()
    status, _, err = job.end(1)
    assert (status, err) == (1, "pycoll-run: node 1: node 0 is gone, or a signal has ended this\n")


def test_a_node_that_is_there_already_is_named(nodes: Any, script: Any) -> None:
    job, path = two_that_wait(nodes, script)
    one = job.processes.pop(1)
    try:
        job.start(1, "-n", "2", path)
        status, _, err = job.end(1)
        assert status == CANNOT_START
        assert "is node 1 already" in err
    finally:
        job.processes[1] = one
    job.start(5, "-n", "2", path, PYCOLL_NODES="7")
    assert job.end(5)[2] == "pycoll-run: the job has no node 5\n"


def test_a_node_with_another_key_is_not_let_in(nodes: Any, script: Any) -> None:
    job, path = nodes(2), script(WAIT)
    job.start(0, "-n", "2", path)
    until_listening(job.port)
    job.start(1, "-n", "2", path, PYCOLL_KEY="ab" * 32)
    job.processes[1].send_signal(signal.SIGTERM)
    assert job.end(1)[0] in (CANNOT_START, -signal.SIGTERM)  # it may not have been there yet


def test_a_port_that_is_taken_is_named(nodes: Any, script: Any) -> None:
    job = nodes(2)
    with socket.create_server(("", job.port)):
        job.start(0, "-n", "2", script(WAIT))
        status, _, err = job.end(0)
    assert status == CANNOT_START
    assert f"node 0 cannot listen at port {job.port} (PYCOLL_RENDEZVOUS)" in err


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"PYCOLL_NODE": ""}, "is set, but not PYCOLL_NODE"),
        ({"PYCOLL_KEY": "", "PYCOLL_NODE": ""}, "but not PYCOLL_NODE, PYCOLL_KEY"),
        ({"PYCOLL_NODE": "2"}, "PYCOLL_NODE is 2, of 2 nodes"),
        ({"PYCOLL_NODE": "x"}, "PYCOLL_NODE is x, of 2 nodes"),
        ({"PYCOLL_RENDEZVOUS": "node1"}, "not as tcp://HOST:PORT"),
        ({"PYCOLL_KEY": "secret"}, "not a hexadecimal key"),
    ],
)
def test_variables_without_sense_are_named(change: dict[str, str], told: str) -> None:
    variables = {
        "PYCOLL_NODE": "0",
        "PYCOLL_NODES": "2",
        "PYCOLL_RENDEZVOUS": "tcp://a:1",
        "PYCOLL_KEY": "ab" * 32,
    }
    with pytest.raises(Error, match=told):
        find_node({**variables, **change})


def test_ranks_and_single_nodes_are_no_nodes() -> None:
    assert find_node({}) is None
    assert find_node({"PYCOLL_NODES": "2", "PYCOLL_JOB": "x"}) is None
    alone = {"PYCOLL_NODES": "1", "PYCOLL_NODE": "0", "PYCOLL_KEY": "ab" * 32}
    assert find_node({**alone, "PYCOLL_RENDEZVOUS": "tcp://a:1"}) is None


def test_every_node_has_a_rank() -> None:
    node = find_node(
        {
            "PYCOLL_NODE": "0",
            "PYCOLL_NODES": "4",
            "PYCOLL_RENDEZVOUS": "tcp://a:1",
            "PYCOLL_KEY": "ab" * 32,
        }
    )
    assert node is not None
    hosts, by_rank = node.hosts(5)
    assert by_rank == [0, 0, 1, 2, 3]
    assert [host.calls for host in hosts] == [False, True, True, True]
    with pytest.raises(Error, match="-n 3 is too little"):
        node.hosts(3)


def manifest(*words: str) -> str:
    parser = argparse.ArgumentParser()
    k8s.add_options(parser)
    return k8s.manifest(parser.parse_args(["manifest", "--image", "me/train", *words]))


def test_a_manifest_has_what_the_nodes_need() -> None:
    text = manifest("--name", "train", "--nodes", "3", "-n", "12", "--", "--bind", "core", "t.py")
    assert [line for line in text.splitlines() if line.startswith("kind")] == [
        'kind: "Secret"',
        'kind: "Service"',
        'kind: "Job"',
    ]
    key = re.search(r'key: "([0-9a-f]{64})"', text)
    assert key is not None
    assert key[1] not in manifest("--name", "train", "t.py")
    assert 'value: "tcp://train-0.train:29400"' in text
    words = re.findall(r'^            - "(.*)"$', text, re.MULTILINE)
    assert words == ["pycoll-run", "-n", "12", "--bind", "core", "t.py"]


def test_what_looks_like_something_else_in_yaml_stays_text() -> None:
    text = manifest("--", "t.py", "no", "1e3", "a: b", "#", 'say "hi"')
    for word in ('"no"', '"1e3"', '"a: b"', '"#"', r'"say \"hi\""'):
        assert f"            - {word}\n" in text


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--name", "Train", "t.py"], "lower-case"),
        (["--name", "t" * 60, "t.py"], "at most 52"),
        (["-n", "1", "t.py"], "each needs a rank"),
        (["--nodes", "0", "t.py"], "each needs a rank"),
        (["--gpus", "-1", "t.py"], "less than none"),
        ([], "which program"),
    ],
)
def test_a_manifest_that_makes_no_sense_is_refused(words: list[str], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        manifest(*words)
