"""`pycoll-run --trace`: what the file says is what the ranks did."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launcher_jobs import LIMIT_S, RUN
from tiers import smoke
from trace_files import TraceFile

Run = Callable[..., subprocess.CompletedProcess[str]]

STRAGGLER = """
import sys, pycoll
comm = pycoll.init()
comm.barrier()
if comm.rank == 2:
    open(sys.argv[1]).read()  # until somebody writes there
comm.barrier()  # the line
"""


def test_who_was_waited_for_is_named_where_it_was_waited_for(tmp_path: Path) -> None:
    script, gate, file = tmp_path / "late.py", tmp_path / "gate", tmp_path / "t.json"
    script.write_text(STRAGGLER)
    os.mkfifo(gate)
    command = [*RUN, "-n", "3", "--trace", str(file), str(script), str(gate)]
    with subprocess.Popen(
        command, env={**os.environ, "PYCOLL_WARN_AFTER": "0.3"}, stderr=subprocess.PIPE, text=True
    ) as job:
        assert job.stderr is not None
        told = ""
        while "waiting for rank 2" not in told:
            told = job.stderr.readline()
        gate.write_text("")  # they have waited for it for 0.3 s
        said = job.stderr.read()
        assert job.wait(LIMIT_S) == 0
    assert re.search(
        r"pycoll-run: trace: rank 2 was waited for most: .*\n    most in barrier at late.py:7;",
        said,
    )
    trace = TraceFile(file)
    assert "for it" in trace.named("process_name")[2]
    for rank in (0, 1):
        barrier = trace.slices("barrier", rank)[-1]
        waiting = trace.slices("waiting for rank 2", rank)[-1]
        assert waiting["ts"] == barrier["ts"]
        assert 0.3e6 <= waiting["dur"] <= barrier["dur"]
        assert barrier["args"]["waited"].startswith("for rank 2: ")
        assert barrier["args"]["caller"] == f"{script}:7"
        assert barrier["args"]["number"] == 1
    assert "waited" not in trace.slices("barrier", 2)[-1]["args"]


# Every message has a length of its own, so that both ends of an arrow can be compared.
MESSAGES = """
import os, threading
import numpy as np, pycoll

comm = pycoll.init()
me, other = comm.rank, 1 - comm.rank

def value(count):
    return np.ones(count, np.uint8)

if me == 0:
    for count, tag in ((1, 5), (2, 6), (3, 5), (4, 6)):
        comm.send(value(count), 1, tag)
    pycoll.wait_all([comm.isend(value(count), 1, 7) for count in (5, 6)])
    comm.send(value(7), 1, 8)
    comm.send({"an": "object"}, 1, 9)
else:
    comm.recv(0, 6); comm.recv(); comm.recv(0, 6); comm.recv()
    first, second = comm.irecv(0, 7), comm.irecv(tag=pycoll.ANY_TAG)
    second.wait(); first.wait()
    message = comm.mprobe()
    message.recv()
    status = pycoll.Status()
    assert comm.recv(0, 9, None, status) == {"an": "object"}
    assert status.tag == 9
comm.sendrecv(value(10 + me), other, other)
comm.isendrecv(value(20 + me), other, other).wait()
request = comm.persistent.send(value(30), 1, 2) if me == 0 else comm.persistent.recv(0, 2)
for _ in range(2):
    request.start().wait()

half = comm.split(0, name="both")
half.all_reduce(np.ones(4), algorithm="ring")
half.iall_gatherv(value(me)).wait()
again = half.persistent.all_gatherv(value(me))
again.start().wait()
thread = threading.Thread(target=half.bsend, args=(value(40), other, 3), name="helper")
thread.start()
half.recv(other, 3)
thread.join()
if (child := os.fork()) == 0:
    try:
        comm.barrier()
    except pycoll.Error:
        os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
comm.reduce(np.ones(3), root=1)
try:
    comm.send(1, 5)
except ValueError:
    pass
"""


REQUESTS = """
import numpy as np, pycoll

comm = pycoll.init()
if comm.rank == 0:
    assert comm.iprobe(1, 50) is None
    for tag in range(1, 9):
        comm.send(np.ones(tag), 1, tag)
    comm.recv(1, 9)
else:
    pending = [comm.irecv(0, tag) for tag in (1, 2, 3)]
    index, _ = pycoll.wait_any(pending)
    del pending[index]
    while pending:
        indices, _ = pycoll.wait_some(pending)
        pending = [each for index, each in enumerate(pending) if index not in indices]
    pycoll.wait_all(comm.irecv(0, tag) for tag in (4,))
    pycoll.wait_all([comm.irecv(0, 8)])
    comm.mprobe(0, 5).irecv().wait()
    short = comm.irecv(0, 6, out=np.zeros(2))
    try:
        short.wait()
    except pycoll.TruncationError:
        comm.recv(0, 6)
    comm.probe(0, 7)
    assert comm.iprobe(0, 7).nbytes == 56
    comm.recv(0, 7)
    comm.send(0, 0, 9)
"""


def test_what_becomes_of_requests_is_in_the_trace(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    done = run("-n", "2", "--transport", "tcp", "--trace", str(file), script=REQUESTS)
    assert done.returncode == 0, done.stderr
    trace = TraceFile(file)
    assert not trace.slices("iprobe", 0)
    (probe,) = trace.slices("iprobe", 1)
    assert probe["args"]["bytes"] == 56, probe
    for name in ("wait_any", "wait_some", "wait_all", "Message.irecv"):
        assert trace.slices(name, 1), name
    states = [event["args"].get("state") for event in trace.slices("wait", 1)]
    assert states.count("failed") == 1, states


@smoke
def test_arrows_lead_from_each_message_to_who_got_it(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "t.json.gz"
    done = run("-n", "2", "--emulate-hosts", "2", "--trace", str(file), script=MESSAGES)
    assert done.returncode == 0, done.stderr
    trace = TraceFile(file)
    assert trace.ranks() == {0: "rank 0 (host 0)", 1: "rank 1 (host 1)"}
    assert trace.bound_us == 0
    sent = [
        (send["args"]["bytes"], send["args"]["tag"], receive["name"])
        for send, receive in trace.arrows()
        if send["pid"] == 1 and "bytes" in send["args"]
    ]
    assert sorted(sent) == [
        *((1, 5, "recv"), (2, 6, "recv"), (3, 5, "recv"), (4, 6, "recv")),
        *((5, 7, "wait"), (6, 7, "wait"), (7, 8, "mprobe"), (10, 0, "sendrecv"), (20, 0, "wait")),
        *((30, 2, "wait"), (30, 2, "wait"), (40, 3, "recv")),
    ]  # fmt: skip
    for send, receive in trace.arrows():
        got = receive["args"].get("bytes")
        if send["name"] != "sendrecv" and "bytes" in send["args"] and got is not None:
            assert got == send["args"]["bytes"]
    objects = [r for s, r in trace.arrows() if s["name"] == "send" and "bytes" not in s["args"]]
    assert [each["args"]["received tag"] for each in objects] == [9]
    posted = {event["id"]: event for event in trace.events if event["ph"] == "b"}
    names = [posted[id]["name"] for id in posted if id.startswith("1:")]
    expected = ["iall_gatherv", "iall_gatherv", "irecv", "irecv", "irecv", "irecv", "isendrecv"]
    assert sorted(names) == expected
    (ring,) = trace.slices("all_reduce", 0)
    assert ring["args"] | {"caller": "", "waited": ""} == {
        **{"communicator": "both", "number": 0, "bytes": 32, "algorithm": "ring", "waited": ""},
        **{"caller": "", "of this rank": ring["args"]["of this rank"]},
    }
    (reduce,) = trace.slices("reduce", 0)
    assert (reduce["args"]["root"], reduce["args"]["communicator"]) == (1, "world")
    assert reduce["args"]["algorithm"]
    (wrong,) = (each for each in trace.slices("send", 0) if "state" in each["args"])
    assert (wrong["args"]["dest"], wrong["args"]["state"]) == (5, "failed")
    threads = {event["args"]["name"] for event in trace.events if event["name"] == "thread_name"}
    assert threads == {"MainThread", "helper"}
    assert not trace.slices("barrier")  # the child of a fork is not the rank


KILLED = """
import os, sys, pycoll
comm = pycoll.init()
if comm.rank:
    print(os.getpid(), flush=True)
    comm.recv(0, 7)
comm.all_reduce(1)
"""


def test_what_a_killed_rank_was_in_is_in_the_trace(tmp_path: Path) -> None:
    script, file = tmp_path / "killed.py", tmp_path / "t.json"
    script.write_text(KILLED)
    command = [*RUN, "-n", "2", "--trace", str(file), str(script)]
    with subprocess.Popen(
        command,
        env={**os.environ, "PYCOLL_WARN_AFTER": "0.3"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as job:
        assert job.stdout is not None
        assert job.stderr is not None
        pid = int(job.stdout.readline().rpartition(" ")[2])
        while "recv" not in job.stderr.readline():  # the table of who waits for what
            pass
        os.kill(pid, signal.SIGKILL)
        said = job.stderr.read()
        assert job.wait(LIMIT_S) == 128 + signal.SIGKILL
    assert "trace: not finished: rank 1 in recv(source=0, tag=7) at killed.py:6\n" in said
    trace = TraceFile(file)
    (open_call,) = trace.slices("recv (not finished)", 1)
    assert open_call["args"]["state"] == "not finished"
    assert open_call["args"]["source"] == 0
    assert "SIGKILL" in trace.named("process_name")[1]
    (broken,) = trace.slices("all_reduce", 0)
    assert broken["args"]["state"] == "failed"
    assert broken["args"]["waited"].startswith("for rank 1: ")
    assert open_call["ts"] + open_call["dur"] + 0.001 >= broken["ts"] + broken["dur"]


MANY = """
import pycoll
comm = pycoll.init()
for _ in range(100):
    comm.barrier()
"""


def test_of_too_many_calls_the_first_and_the_last_are_kept(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    options = ["-n", "2", "--trace", str(file)]
    done = run(*options, script=MANY, PYCOLL_TRACE_RECORDS="20")
    assert done.returncode == 0, done.stderr
    assert "after the first ones, are not in it: 80 of rank 0, 80 of rank 1" in done.stderr
    trace = TraceFile(file)
    assert trace.about["calls that are not here"] == {"rank 0": 80, "rank 1": 80}
    for rank in (0, 1):
        numbers = [each["args"]["number"] for each in trace.slices("barrier", rank)]
        assert numbers == [*range(10), *range(90, 100)]
        (gap,) = trace.slices("80 calls are not here", rank)
        before, after = trace.slices("barrier", rank)[9:11]
        assert before["ts"] <= gap["ts"] <= gap["ts"] + gap["dur"] <= after["ts"] + 0.001
    refused = run(*options, script=MANY, PYCOLL_TRACE_RECORDS="many")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)


BETWEEN = """
import numpy as np, pycoll
comm = pycoll.init()
for _ in range(20):
    if comm.rank:
        comm.send(comm.recv(0), 0)
    else:
        comm.send(np.ones(9), 1)
        comm.recv(1)
"""


def test_other_hosts_send_their_records_and_the_time(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    done = run("-H", "localhost:1,other:1", "--trace", str(file), script=BETWEEN)
    assert done.returncode == 0, done.stderr
    trace = TraceFile(file)
    assert trace.ranks() == {0: "rank 0 (localhost)", 1: "rank 1 (other)"}
    bounds = trace.about["times of a host may be wrong by this, ns"]
    assert bounds["localhost"] == 0
    assert 0 < bounds["other"] < 1e9
    assert len(trace.arrows()) == 40  # which compares the times of their ends
    # "other" is this machine: the clocks are one, and the estimate must be within its bound of 0.
    sends = trace.slices("send")
    assert len(sends) == 40


def test_nodes_that_are_one_machine_are_told_apart(nodes: Any, tmp_path: Path) -> None:
    script, file = tmp_path / "between.py", tmp_path / "t.json"
    script.write_text(BETWEEN)
    job = nodes(2)
    job.start(0, "-n", "2", "--trace", str(file), str(script))
    job.start(1, "-n", "2", str(script))
    assert [job.end(node)[0] for node in (0, 1)] == [0, 0]
    trace = TraceFile(file)
    names = trace.ranks()
    assert [name.rpartition(" host ")[2] for name in names.values()] == ["0)", "1)"]
    assert sorted(trace.about["times of a host may be wrong by this, ns"].values())[0] == 0
    assert len(trace.arrows()) == 40


def test_a_program_without_pycoll_leaves_a_trace_without_calls(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    done = run("-n", "2", "--trace", str(file), "--", "true")
    assert done.returncode == 0, done.stderr
    assert "no call of pycoll.init() was recorded of rank 0, rank 1\n" in done.stderr
    trace = TraceFile(file)
    assert trace.about["ranks that have recorded nothing"] == [0, 1]
    assert set(trace.named("process_name").values()) == {
        "rank 0: has recorded nothing",
        "rank 1: has recorded nothing",
    }


def test_a_trace_that_cannot_be_written_fails_the_job(run: Run) -> None:
    done = run("-n", "1", "--trace", "/dev/full", "--", "true")
    assert done.returncode == 1
    told = "pycoll-run: --trace /dev/full cannot be written: No space left on device\n"
    assert done.stderr == told


UNTRACED = """
import sys, pycoll
from pycoll._requests.core_requests import CoreRequest

comm = pycoll.init()
for name in ("all_reduce", "barrier", "send", "recv", "isend", "irecv", "iall_reduce"):
    assert type(getattr(comm, name)) is type(len), name  # the core's own
assert "wait" not in vars(CoreRequest)
assert not [name for name in sys.modules if name.startswith("pycoll._trace")]
"""


def test_without_a_trace_the_methods_are_those_of_the_core(run: Run) -> None:
    done = run("-n", "2", script=UNTRACED)
    assert done.returncode == 0, done.stderr
