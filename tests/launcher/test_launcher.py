"""What `pycoll-run` gives back: statuses, reports, refusals, output, the ranks' environment."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from launcher_jobs import LIMIT_S, RUN, Done, Environments, read_lines, run, shell, started
from tiers import few

from pycoll._launcher import cli
from pycoll._launcher.cli import main
from pycoll._launcher.outcome import CANNOT_START

Joined = Callable[..., Done]


# A rank that joins the job; the test's own lines follow. WAY is the variable with its link.
JOIN = """
import os, select, sys, time
from pycoll._rendezvous.client import Client
rank, size = int(os.environ["PYCOLL_RANK"]), int(os.environ["PYCOLL_SIZE"])
key = bytes.fromhex(os.environ["PYCOLL_KEY"])
client = Client(os.environ["PYCOLL_RENDEZVOUS"], key, rank, size, link=os.environ[WAY])
client.join({}, 30.0)

def raise_error(error, peer_failed=False):
    client.post("raised", error=error, text=f"Traceback\\n{error}: told", peer_failed=peer_failed)
    client.close(5.0)
    sys.exit(1)

def wait_for_event():
    while not (events := client.progress()):
        select.select([client.fileno()], [], [])
    return events[0]

def fail_after_another():
    wait_for_event()
    raise_error("PeerFailed", peer_failed=True)

def leave():
    client.post("left", links=[])
    client.close(5.0)
    sys.exit(0)

def linger():
    select.select([], [], [])
"""


@pytest.fixture(params=few(["local"], ["zmq"]))
def join(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The beginning of a script that joins the job, by the inherited socket or by ZeroMQ."""
    monkeypatch.setenv("NO_LINK", "")
    return f"WAY = {'PYCOLL_LINK' if request.param == 'local' else 'NO_LINK'!r}\n{JOIN}"


@pytest.fixture
def joined(tmp_path: Path, join: str) -> Joined:
    """Run a script on ranks that have joined the job."""

    def run_joined(n: int, text: str, *options: str) -> Done:
        script = tmp_path / "joined.py"
        script.write_text(join + text)
        return run("-n", str(n), *options, str(script))

    return run_joined


def test_status_is_0_if_every_rank_ends_with_0() -> None:
    done = shell(3, "exit 0")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_status_is_that_of_the_rank_that_failed_and_the_report_names_it() -> None:
    done = shell(3, '[ "$PYCOLL_RANK" != 1 ] || { echo broken >&2; exit 7; }')
    assert done.returncode == 7
    report = done.stderr.decode().splitlines()
    assert report[0] == "broken"
    assert re.fullmatch(r"pycoll-run: rank 1 failed after \d+\.\d s: exit status 7", report[1])
    assert report[2:] == ["    broken", "pycoll-run: the others: ranks 0, 2: exit status 0"]


def test_status_is_128_plus_the_signal_that_killed_a_rank() -> None:
    done = shell(2, '[ "$PYCOLL_RANK" = 0 ] || kill -SEGV $$')
    assert done.returncode == 128 + signal.SIGSEGV
    assert b"rank 1 failed" in done.stderr
    assert b"killed by signal 11 (SIGSEGV)" in done.stderr


@pytest.mark.parametrize("join", ["local", "zmq"], indirect=True)
def test_the_cause_is_the_exception_not_the_peer_failed_that_follow(joined: Joined) -> None:
    done = joined(3, "raise_error('ValueError') if rank == 1 else fail_after_another()")
    assert done.returncode == 1
    assert b"rank 1 failed" in done.stderr
    assert b"raised ValueError, exit status 1\n    Traceback\n    ValueError: told\n" in done.stderr
    assert b"the others: ranks 0, 2: raised PeerFailed, exit status 1" in done.stderr


def test_peer_failed_is_the_cause_if_there_is_nothing_else(joined: Joined) -> None:
    done = joined(2, "os._exit(0) if rank == 1 else fail_after_another()")
    assert done.returncode == 1
    assert b"rank 0 failed" in done.stderr
    assert b"the others: rank 1: exit status 0" in done.stderr


def test_a_rank_that_raised_and_lingers_is_the_cause_with_status_1(joined: Joined) -> None:
    raising = """
if rank == 1:
    fail_after_another()
client.post("raised", error="KeyError", text="told", peer_failed=False)
linger()
"""
    done = joined(2, raising)
    assert done.returncode == 1
    assert b"rank 0 failed" in done.stderr
    assert b"raised KeyError, ended by the launcher with SIGTERM" in done.stderr


def test_finalizing_and_ending_with_0_is_no_failure(joined: Joined) -> None:
    done = joined(3, "leave()")
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_joined_process_that_dies_fails_the_job_though_its_parent_lives(
    tmp_path: Path, join: str
) -> None:
    script = tmp_path / "joined.py"
    script.write_text(f"{join}\nos.kill(os.getpid(), 9) if rank == 0 else fail_after_another()")
    parent = f"{sys.executable} {script}; status=$?; [ $PYCOLL_RANK = 1 ] || sleep 1000"
    done = shell(2, f"{parent}; exit $status")
    assert done.returncode == 1
    assert re.search(rb"rank 0 failed after [0-9.]+ s: lost process \d+, which had", done.stderr)


def test_a_stopped_rank_has_not_ended() -> None:
    with started("-n", "1", "--", "sh", "-c", "echo $$; kill -STOP $$; exit 5") as launcher:
        pid = int(read_lines(launcher, 1)[0])
        while Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "T":
            pass
        with pytest.raises(subprocess.TimeoutExpired):
            launcher.wait(0.3)
        os.kill(pid, signal.SIGCONT)
        assert launcher.wait(LIMIT_S) == 5


def test_ctrl_c_says_what_each_rank_waits_in_if_one_does(tmp_path: Path, join: str) -> None:
    waiting = """
if rank == 1:
    call = {"call": "barrier()", "number": 3, "where": "a.py:7"}
    client.post("waiting", context=0, members=[0, 1], **call)
    assert client.ask_table(30.0)
    print("ready", flush=True)
linger()
"""
    script = tmp_path / "script.py"
    script.write_text(join + waiting)
    with started("-n", "2", str(script)) as launcher:
        assert read_lines(launcher, 1) == ["ready"]
        launcher.send_signal(signal.SIGINT)
        _, err = launcher.communicate(timeout=LIMIT_S)
    assert launcher.returncode == 130
    assert re.search(
        r"pycoll-run: ended by SIGINT after [0-9.]+ s; what each rank did:\n"
        r"    rank 0: not waiting in pycoll, or for less than 0\.2 s; .*\n"
        r"    rank 1: barrier\(\) #3 at a\.py:7, for [0-9.]+ s\n",
        err.decode(),
    )


@pytest.mark.parametrize(
    ("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_is_forwarded_to_the_ranks_and_gives_its_status(
    signum: signal.Signals, status: int
) -> None:
    trap = f"trap 'echo got; exit 0' {int(signum)}; echo ready; while :; do sleep 0.01; done"
    with started("-n", "2", "--", "sh", "-c", trap) as launcher:
        assert read_lines(launcher, 2) == ["ready", "ready"]
        launcher.send_signal(signum)
        out, err = launcher.communicate(timeout=LIMIT_S)
    assert launcher.returncode == status
    assert out == b"got\ngot\n"
    assert f"pycoll-run: ended by {signum.name}" in err.decode()
    assert b"Traceback" not in err


def test_a_second_interrupt_kills_ranks_that_ignore_the_first() -> None:
    ignore = "trap 'echo got' INT; trap '' TERM; echo ready; while :; do sleep 0.01; done"
    with started("-n", "1", "--", "sh", "-c", ignore) as launcher:
        read_lines(launcher, 1)
        launcher.send_signal(signal.SIGINT)
        assert read_lines(launcher, 1) == ["got"]
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(LIMIT_S) == 130
        assert launcher.stderr is not None
        assert b"ended by the launcher with SIGKILL" in launcher.stderr.read()


def test_a_program_that_is_not_found_is_127() -> None:
    done = run("-n", "3", "--", "./no-such-program")
    assert done.returncode == 127
    assert done.stderr == b"pycoll-run: cannot run ./no-such-program: No such file or directory\n"


def test_a_program_that_is_not_executable_is_126(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("no program\n")
    done = run("-n", "3", "--", str(tmp_path / "data"))
    assert done.returncode == 126
    assert done.stderr == f"pycoll-run: cannot run {tmp_path}/data: Permission denied\n".encode()


def test_a_program_whose_interpreter_is_not_found_says_so(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o755)
    done = run("--", str(program))
    assert done.returncode == 127
    assert b"the interpreter that its first line names does not exist\n" in done.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "which program?"),
        (["-n", "4"], "which program?"),
        (["-n", "4", "--"], "which program?"),
        (["-n", "0", __file__], "at least 1, not '0'"),
        (["-n", "-1", __file__], "at least 1, not '-1'"),
        (["-np", "two", __file__], "at least 1, not 'two'"),
        (["-n"], "expected one argument"),
        (["-n", "2", "no-such-script.py", "--lr", "1"], "no script no-such-script.py"),
        (["-n", "2", sys.executable, "x.py"], f"write pycoll-run -- {sys.executable} x.py"),
        (["--no-such-option", __file__], "unknown option --no-such-option"),
        (["--time", "3", __file__], "unknown option --time"),
        (["--np", "0", __file__], "at least 1, not '0'"),
        (["-N", "4", __file__], "unknown option -N (-H a:4,b:4 says how many ranks each host has)"),
        (["--oversubscribe", __file__], "--oversubscribe (it is not needed: "),
        (["--tag", __file__], "unknown option --tag (--tag-output)"),
        (
            ["--transport", "shm", "-H", "a,b", __file__],
            "--transport shm: the ranks are on 2 hosts",
        ),
        (
            ["-n", "4", "--transport", "shm", "--emulate-hosts", "2", __file__],
            "shm: the ranks are on 2 hosts, which share no memory; use --transport auto",
        ),
        (["-x", "PYCOLL_ALGORITHM=ring", __file__], "PYCOLL_ALGORITHM: 'ring' is not COLLECTIVE:"),
        (["-m"], "-m needs the name of a module"),
        (["-n", "2", "--emulate-hosts", "3", __file__], "as many ranks, there are 2"),
        (["--transport", "pigeon", __file__], "invalid choice: 'pigeon'"),
        (["--timeout", "0", __file__], "seconds above 0, not '0'"),
        (["--op-timeout", "nan", __file__], "seconds above 0, not 'nan'"),
        (["--grace", "-1", __file__], "seconds from 0 up, not '-1'"),
        (["--bind", "socket", __file__], "invalid choice: 'socket'"),
        (["-x", "PYCOLL_TEST_UNSET", __file__], "PYCOLL_TEST_UNSET is not set here"),
        (["-x", "RANK=3", __file__], "RANK is set by pycoll-run itself"),
        (["-x", "PYCOLL_RANK=3", __file__], "PYCOLL_RANK is set by pycoll-run itself"),
        (["-x", "PYCOLL_OP_TIMEOUT=abc", __file__], "PYCOLL_OP_TIMEOUT is 'abc'"),
        (["-x", "=3", __file__], "NAME or NAME=VALUE, not '=3'"),
        (["--log-dir", __file__, __file__], f"--log-dir {__file__} is no folder"),
        (["--restarts", "-1", __file__], "at least 0, not '-1'"),
        (["-x", "PYCOLL_ATTEMPT=3", __file__], "PYCOLL_ATTEMPT is set by pycoll-run itself"),
        (["--trace", "no/f", __file__], "--trace: there is no folder no"),
        (
            ["--trace", "mine.py", "4"],
            "--trace: mine.py is a program, which the trace would replace",
        ),
        (["--tiemout", "4", __file__], "(see pycoll-run --help; did you mean --timeout?)"),
        (["--trace", ".", __file__], "--trace: . is a folder"),
        (["--encrypt", "--transport", "tcp", __file__], "--transport tcp: it does not encrypt"),
        (["--transport", "rdma", "--encrypt", __file__], "use --transport auto or zmq"),
    ],
)
def test_a_wrong_command_line_gives_one_line_and_status_2(
    args: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("pycoll-run: ")
    assert err.count("\n") == 1
    assert words in err


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("PYCOLL_TRANSPORT", "pigeon", "PYCOLL_TRANSPORT pigeon: no such transport"),
        ("PYCOLL_ENCRYPT", "yes", "PYCOLL_ENCRYPT is 'yes', but must be 1 or 0"),
        ("PYCOLL_OP_TIMEOUT", "abc", "PYCOLL_OP_TIMEOUT is 'abc', but must be seconds"),
        ("PYCOLL_OP_TIMEOUT", "-1", "is '-1', but must be seconds from 0 up"),
        ("PYCOLL_OP_TIMEOUT", "nan", "is 'nan', but must be seconds from 0 up"),
        ("PYCOLL_GRACE", "-1", "PYCOLL_GRACE is '-1', but must be seconds from 0 up"),
        ("PYCOLL_ALGORITHM", "all_reduce=ring", "'all_reduce=ring' is not COLLECTIVE:NAME"),
        ("PYCOLL_ALGORITHM", "allreduce:ring", "PYCOLL_ALGORITHM: 'allreduce:ring': "),
        ("PYCOLL_SEGMENT", "soon", "PYCOLL_SEGMENT is 'soon', which is no length"),
    ],
)
def test_a_wrong_setting_in_the_environment_gives_one_line_and_status_2(
    name: str,
    value: str,
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(name, value)
    assert main(["-n", "2", __file__]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("pycoll-run: ")
    assert words in err


def test_an_algorithm_may_be_one_that_the_program_registers() -> None:
    done = shell(1, "exit 0", PYCOLL_ALGORITHM="all_reduce:mine;broadcast:^mine")
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("n", "told"), [("1", ""), ("2", "pycoll has not connected the 2 processes\n")]
)
def test_python_programs_of_which_none_joins_are_pointed_out(
    n: str, told: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text("")
    done = run("-n", n, str(script))
    assert done.returncode == 0
    assert done.stderr.decode() == (told and f"pycoll-run: no rank called pycoll.init(): {told}")


def test_an_error_of_the_launcher_itself_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "Job", lambda *_, **__: next(iter([])))
    assert main(["-n", "2", __file__]) == 70
    err = capsys.readouterr().err
    assert re.fullmatch(
        r"pycoll-run: an error of pycoll-run itself, please report it: "
        r"StopIteration\(\) at test_launcher.py:\d+\n",
        err,
    )


def test_a_setting_that_does_not_count_is_not_looked_at(environments: Environments) -> None:
    wrong = {"PYCOLL_TRANSPORT": "pigeon", "PYCOLL_OP_TIMEOUT": "abc"}
    (rank,) = environments(1, "--transport", "tcp", "--op-timeout", "3", **wrong)
    assert (rank["PYCOLL_TRANSPORT"], rank["PYCOLL_OP_TIMEOUT"]) == ("tcp", "3.0")
    (rank,) = environments(1, "--transport", "tcp", "-x", "PYCOLL_OP_TIMEOUT=4", **wrong)
    assert rank["PYCOLL_OP_TIMEOUT"] == "4"


def test_a_log_folder_that_cannot_be_made_is_one_line_and_status_69(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = shell(1, "exit 0", "--log-dir", str(tmp_path / "file/logs"))
    assert done.returncode == CANNOT_START == 69
    assert done.stderr.count(b"\n") == 1


@pytest.mark.parametrize(("kind", "status"), [("-n", CANNOT_START), ("-Sn", 0)])
def test_open_files_are_allowed_for_or_asked_for_before_anything_starts(
    kind: str, status: int
) -> None:
    limited = f'ulimit {kind} 100; exec "$@"'
    argv = ["sh", "-c", limited, "sh", *RUN, "-n", "20", "--", "true"]
    done = subprocess.run(argv, capture_output=True, timeout=LIMIT_S, check=False)
    assert done.returncode == status
    assert done.stderr.count(b"\n") == (1 if status else 0)
    assert (b"100 are allowed (ulimit -n)" in done.stderr) == bool(status)
