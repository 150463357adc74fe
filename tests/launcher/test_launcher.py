"""What `pycoll-run` gives back: statuses, reports, refusals, output, the ranks' environment."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from patience import PATIENCE

from pycoll._launcher.cli import main, variables_text
from pycoll._launcher.outcome import Outcome, last_lines, ranks_text
from pycoll._launcher.spawn import Job, Options
from pycoll._support.environment import VARIABLES, blocks, places, rank_environment, usable_cores

RUN = [sys.executable, "-m", "pycoll._launcher"]
LIMIT_S = 60 * PATIENCE
Done = subprocess.CompletedProcess[bytes]
Joined = Callable[..., Done]
Environments = Callable[..., list[dict[str, str]]]

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


def run(*args: str, stdin: bytes = b"", **variables: str) -> Done:
    return subprocess.run(
        [*RUN, *args],
        input=stdin,
        capture_output=True,
        env=os.environ | variables,
        timeout=LIMIT_S,
        check=False,
    )


def shell(n: int, text: str, *options: str, **variables: str) -> Done:
    return run("-n", str(n), *options, "--", "sh", "-c", text, **variables)


def sorted_lines(output: bytes) -> list[str]:
    return sorted(output.decode().splitlines())


@pytest.fixture(params=["local", "zmq"])
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


@contextlib.contextmanager
def started(*args: str) -> Iterator[subprocess.Popen[bytes]]:
    """A launcher that runs, ended with everything at the end of the test."""
    process = subprocess.Popen(
        [*RUN, *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
    )
    try:
        yield process
    finally:
        process.kill()
        for pipe in (process.stdin, process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()
        process.wait(LIMIT_S)


def read_lines(process: subprocess.Popen[bytes], count: int) -> list[str]:
    assert process.stdout is not None
    return [process.stdout.readline().decode().strip() for _ in range(count)]


# Exit statuses.


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


def test_the_cause_is_the_exception_not_the_peer_failed_that_follow(joined: Joined) -> None:
    done = joined(3, "raise_error('ValueError') if rank == 1 else fail_after_another()")
    assert done.returncode == 1
    assert b"rank 1 failed" in done.stderr
    assert b"raised ValueError, exit status 1\n    Traceback\n    ValueError: told\n" in done.stderr
    assert b"the others: ranks 0, 2: raised PeerFailed, exit status 1" in done.stderr


def test_the_cause_is_the_killed_rank_not_the_peer_failed_that_follow(joined: Joined) -> None:
    done = joined(3, "os.kill(os.getpid(), 9) if rank == 2 else fail_after_another()")
    assert done.returncode == 137
    assert b"rank 2 failed" in done.stderr


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


def test_abort_gives_its_code_and_ends_the_others_at_once(joined: Joined) -> None:
    done = joined(3, "if rank == 1: client.post('abort', code=42)\nlinger()")
    assert done.returncode == 42
    assert re.search(rb"rank 1 failed after [0-9.]+ s: called abort\(42\)", done.stderr)


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


def test_timeout_gives_124_and_says_what_each_rank_was_doing(joined: Joined) -> None:
    waiting = """
client.post("waiting", context=0, number=3, call="barrier()", where="a.py:7", members=[0, 1])
linger()
"""
    done = joined(2, waiting, "--timeout", "1.5")
    assert done.returncode == 124
    assert b"pycoll-run: the job took longer than 1.5 s" in done.stderr
    assert re.search(rb"    rank 1: barrier\(\).* at a\.py:7", done.stderr)


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
        r"    rank 0: not waiting in pycoll \(or only just\)\n"
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


# Programs that cannot be run, and command lines that are wrong: one line, and a status.


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
        (["--no-such-option", __file__], "unknown option --no-such-option"),
        (["--time", "3", __file__], "unknown option --time"),
        (["-m"], "-m needs the name of a module"),
        (["-n", "2", "--emulate-hosts", "3", __file__], "as many ranks, there are 2"),
        (["--transport", "pigeon", __file__], "invalid choice: 'pigeon'"),
        (["--timeout", "0", __file__], "seconds above 0, not '0'"),
        (["--op-timeout", "nan", __file__], "seconds above 0, not 'nan'"),
        (["--bind", "socket", __file__], "invalid choice: 'socket'"),
        (["-x", "PYCOLL_TEST_UNSET", __file__], "PYCOLL_TEST_UNSET is not set here"),
        (["-x", "RANK=3", __file__], "RANK is set by pycoll-run itself"),
        (["-x", "PYCOLL_RANK=3", __file__], "PYCOLL_RANK is set by pycoll-run itself"),
        (["-x", "PYCOLL_OP_TIMEOUT=abc", __file__], "from 0 up, not 'abc'"),
        (["-x", "=3", __file__], "NAME or NAME=VALUE, not '=3'"),
        (["--survive", __file__], "does not have the option --survive yet"),
        (["--restarts", "3", __file__], "does not have the option --restarts yet"),
        (["--trace", "f", __file__], "does not have the option --trace yet"),
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
        ("PYCOLL_OP_TIMEOUT", "abc", "PYCOLL_OP_TIMEOUT must be a number of seconds"),
        ("PYCOLL_OP_TIMEOUT", "-1", "from 0 up, not '-1'"),
        ("PYCOLL_OP_TIMEOUT", "nan", "from 0 up, not 'nan'"),
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


def test_a_setting_that_does_not_count_is_not_looked_at(environments: Environments) -> None:
    wrong = {"PYCOLL_TRANSPORT": "pigeon", "PYCOLL_OP_TIMEOUT": "abc"}
    (rank,) = environments(1, "--transport", "tcp", "--op-timeout", "3", **wrong)
    assert (rank["PYCOLL_TRANSPORT"], rank["PYCOLL_OP_TIMEOUT"]) == ("tcp", "3.0")
    (rank,) = environments(1, "--transport", "tcp", "-x", "PYCOLL_OP_TIMEOUT=4", **wrong)
    assert rank["PYCOLL_OP_TIMEOUT"] == "4"


def test_a_log_folder_that_cannot_be_made_is_one_line_and_status_2(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = shell(1, "exit 0", "--log-dir", str(tmp_path / "file"))
    assert done.returncode == 2
    assert done.stderr.count(b"\n") == 1


@pytest.mark.parametrize(("kind", "status"), [("-n", 2), ("-Sn", 0)])
def test_open_files_are_allowed_for_or_asked_for_before_anything_starts(
    kind: str, status: int
) -> None:
    limited = f'ulimit {kind} 100; exec "$@"'
    argv = ["sh", "-c", limited, "sh", *RUN, "-n", "20", "--", "true"]
    done = subprocess.run(argv, capture_output=True, timeout=LIMIT_S, check=False)
    assert done.returncode == status
    assert done.stderr.count(b"\n") == (1 if status else 0)
    assert (b"100 are allowed (ulimit -n)" in done.stderr) == bool(status)


def test_help_has_every_option_and_every_variable(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    options = "-n -np --transport -x -l --tag-output --log-dir --timeout --op-timeout --bind"
    for option in f"{options} --emulate-hosts --verbose --version --help".split():
        assert option in text
    assert variables_text() in text
    assert all(variable.name in text for group in VARIABLES.values() for variable in group)


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("pycoll-run ")


# What is run.


def test_what_follows_the_script_belongs_to_the_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys; print(sys.argv[1:])")
    done = run("-n", "1", str(script), "-n", "7", "--help", "--", "-m", "x")
    assert done.stdout == b"['-n', '7', '--help', '--', '-m', 'x']\n"


def test_a_module_is_run_with_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "a_module.py").write_text("import sys; print(__name__, sys.argv[1:])")
    done = run("-n1", "-m", "a_module", "-n", "3", PYTHONPATH=pythonpath(tmp_path))
    assert done.stdout == b"__main__ ['-n', '3']\n"


def pythonpath(folder: Path) -> str:
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))


def test_without_n_there_is_a_rank_for_each_usable_core() -> None:
    done = run("--", "sh", "-c", "echo $PYCOLL_SIZE")
    assert done.stdout.split() == [str(usable_cores()).encode()] * usable_cores()


def test_rank_0_has_the_standard_input_and_the_others_have_none() -> None:
    done = run("-n", "3", "-l", "--", "cat", stdin=b"given\n")
    assert (done.returncode, done.stdout) == (0, b"[0] given\n")


# The ranks' environment.


@pytest.fixture
def environments(tmp_path: Path) -> Environments:
    """The environments of the ranks of a job with these options, started in this environment."""

    def read(n: int, *options: str, **variables: str) -> list[dict[str, str]]:
        dump = f"cat /proc/$$/environ > {tmp_path}/$PYCOLL_RANK"
        done = shell(n, dump, *options, **variables)
        assert (done.returncode, done.stderr) == (0, b"")
        texts = [(tmp_path / str(rank)).read_text() for rank in range(n)]
        return [dict(line.split("=", 1) for line in t.split("\0")[:-1]) for t in texts]

    return read


def test_ranks_learn_who_they_are_and_where_to_meet(environments: Environments) -> None:
    ranks = environments(3)
    for number, rank in enumerate(ranks):
        assert rank["PYCOLL_RANK"] == rank["PYCOLL_LOCAL_RANK"] == str(number)
        assert rank["RANK"] == rank["LOCAL_RANK"] == str(number)
        assert rank["PYCOLL_SIZE"] == rank["PYCOLL_LOCAL_SIZE"] == "3"
        assert rank["WORLD_SIZE"] == rank["LOCAL_WORLD_SIZE"] == "3"
        assert (rank["PYCOLL_NODE"], rank["PYCOLL_NODES"]) == ("0", "1")
        assert (rank["PYCOLL_TRANSPORT"], rank["MASTER_ADDR"]) == ("auto", "127.0.0.1")
        assert re.fullmatch(r"tcp://127\.0\.0\.1:\d+", rank["PYCOLL_RENDEZVOUS"])
        assert re.fullmatch("[0-9a-f]{64}", rank["PYCOLL_KEY"])
        assert re.fullmatch(r"\d+:\d+", rank["PYCOLL_LINK"])
        assert re.fullmatch(r"\d+:\d+:\d+,\d+,\d+:\d+", rank["PYCOLL_SHM"])
        assert "PYCOLL_OP_TIMEOUT" not in rank
        assert 0 < int(rank["MASTER_PORT"]) < 65536
    for name in ("PYCOLL_KEY", "PYCOLL_JOB", "PYCOLL_RENDEZVOUS", "MASTER_PORT", "PYCOLL_SHM"):
        assert len({rank[name] for rank in ranks}) == 1


def test_options_reach_the_ranks(environments: Environments) -> None:
    options = "--transport", "tcp", "--op-timeout", "2.5", "-x", "A=b=c", "-x", "B", "-x", "C="
    (rank,) = environments(1, *options, B="given")
    assert (rank["PYCOLL_TRANSPORT"], rank["PYCOLL_OP_TIMEOUT"]) == ("tcp", "2.5")
    assert (rank["A"], rank["B"], rank["C"]) == ("b=c", "given", "")
    assert rank["PYCOLL_ENCRYPT"] == "0"


def test_encryption_is_an_option_or_a_setting(environments: Environments) -> None:
    chosen = [
        environments(1, "--encrypt"),
        environments(1, PYCOLL_ENCRYPT="1"),
        environments(1, "--transport", "zmq", "--encrypt", PYCOLL_ENCRYPT="0"),
    ]
    assert [rank["PYCOLL_ENCRYPT"] for (rank,) in chosen] == ["1", "1", "1"]
    (rank,) = environments(1, PYCOLL_ENCRYPT="1", PYCOLL_JOB="outer")
    assert rank["PYCOLL_ENCRYPT"] == "0"


def test_settings_of_the_user_stay(environments: Environments) -> None:
    variables = {"PYTHONUNBUFFERED": "0", "OMP_NUM_THREADS": "7", "PYCOLL_TRANSPORT": "tcp"}
    variables["PYCOLL_OP_TIMEOUT"] = "9"
    (rank,) = environments(1, **variables)
    assert variables.items() <= rank.items()


def test_variables_of_an_outer_job_are_replaced(environments: Environments) -> None:
    outer = {"PYCOLL_RANK": "5", "PYCOLL_JOB": "outer", "PYCOLL_KEY": "outer", "RANK": "5"}
    outer |= {"PYCOLL_LINK": "outer", "PYCOLL_SHM": "outer"}
    outer |= {"PYCOLL_TRANSPORT": "outer", "PYCOLL_OP_TIMEOUT": "9", "MASTER_PORT": "outer"}
    (rank,) = environments(1, **outer)
    assert rank["PYCOLL_RANK"] == rank["RANK"] == "0"
    assert "outer" not in rank.values()
    assert rank["PYCOLL_TRANSPORT"] == "auto"
    assert "PYCOLL_OP_TIMEOUT" not in rank


def test_ranks_share_the_cores_between_the_threads_of_their_libraries(
    environments: Environments, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert "OMP_NUM_THREADS" not in environments(1)[0]
    assert environments(usable_cores() + 1)[0]["OMP_NUM_THREADS"] == "1"
    assert environments(2)[0]["OMP_NUM_THREADS"] == str(max(1, usable_cores() // 2))


def test_emulated_hosts_hold_blocks_of_ranks(environments: Environments) -> None:
    names = "NODE", "NODES", "LOCAL_RANK", "LOCAL_SIZE"
    ranks = environments(5, "--emulate-hosts", "2")
    assert [[int(rank[f"PYCOLL_{name}"]) for name in names] for rank in ranks] == [
        [0, 2, 0, 3],
        [0, 2, 1, 3],
        [0, 2, 2, 3],
        [1, 2, 0, 2],
        [1, 2, 1, 2],
    ]


@pytest.mark.parametrize("size", range(1, 20))
def test_every_host_has_ranks_however_many_are_asked_for(size: int) -> None:
    for hosts in range(1, size + 1):
        found = places(blocks(size, hosts))
        assert {where.nodes for where in found} == {found[-1].node + 1}
        assert found[-1].node < hosts
        for where in found:
            assert (
                where.local_rank
                < where.local_size
                == sum(other.node == where.node for other in found)
            )


def test_ranks_of_a_host_need_not_follow_each_other() -> None:
    found = places([0, 1, 0, 2, 0])
    assert [where.local_rank for where in found] == [0, 0, 1, 0, 2]
    assert [where.local_size for where in found] == [3, 1, 3, 1, 3]
    everyone = dict(enumerate(found))
    assert rank_environment(4, everyone)["PYCOLL_LOCAL_RANKS"] == "0,2,4"


def test_bound_ranks_keep_to_cores_of_their_own(tmp_path: Path) -> None:
    count = min(usable_cores(), 4)
    script = tmp_path / "script.py"
    script.write_text("import os; print(*sorted(os.sched_getaffinity(0)))")
    done = run("-n", str(count), "--bind", "core", str(script))
    assert len(set(done.stdout.splitlines())) == count
    assert len(set(done.stdout.split())) == len(done.stdout.split())


# Output.


def test_piped_output_is_passed_on_as_it_is() -> None:
    done = shell(2, "echo out $PYCOLL_RANK; echo err $PYCOLL_RANK >&2")
    assert sorted_lines(done.stdout) == ["out 0", "out 1"]
    assert sorted_lines(done.stderr) == ["err 0", "err 1"]


def test_tagged_lines_begin_with_their_rank() -> None:
    done = shell(2, r"printf 'a\n\nb\r\nc\rd\n'; echo err >&2", "-l")
    for rank in "01":
        for line in (f"[{rank}] a\n", f"[{rank}] \n", f"[{rank}] b\r\n"):
            assert line.encode() in done.stdout
        assert f"[{rank}] c\r[{rank}] d\n".encode() in done.stdout
    assert sorted_lines(done.stderr) == ["[0] err", "[1] err"]


def test_a_last_line_without_an_end_is_completed() -> None:
    done = shell(2, "printf out; printf err >&2", "-l")
    assert sorted_lines(done.stdout) == ["[0] out", "[1] out"]
    assert sorted_lines(done.stderr) == ["[0] err", "[1] err"]


def test_bytes_that_are_no_text_pass_unharmed(tmp_path: Path) -> None:
    data = bytes(range(256)) * 1000 + b"\n"
    (tmp_path / "data").write_bytes(data)
    assert run("-n", "1", "--", "cat", str(tmp_path / "data")).stdout == data


def test_a_line_longer_than_any_buffer_passes_unharmed() -> None:
    done = run("-n", "1", "-l", "--", "head", "-c", "5000000", "/dev/zero")
    assert done.stdout == b"[0] " + bytes(5_000_000) + b"\n"


def test_lines_of_several_ranks_are_not_mixed() -> None:
    done = shell(3, "yes $PYCOLL_RANK$PYCOLL_RANK$PYCOLL_RANK$PYCOLL_RANK | head -n 30000")
    assert sorted_lines(done.stdout) == ["0000"] * 30000 + ["1111"] * 30000 + ["2222"] * 30000


def test_a_carriage_return_passes_on_what_came_before_it() -> None:
    with started(
        "-n", "1", "--", "sh", "-c", r"printf '10%%\r'; read line; echo $line"
    ) as launcher:
        assert launcher.stdin is not None
        assert launcher.stdout is not None
        assert launcher.stdout.read(4) == b"10%\r"
        launcher.stdin.write(b"go on\n")
        assert launcher.stdout.readline() == b"go on\n"
        assert launcher.wait(LIMIT_S) == 0


def test_log_files_have_both_streams_of_each_rank_which_are_relayed_too(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "logs"
    done = shell(2, "echo out $PYCOLL_RANK; echo err >&2", "-l", "--log-dir", str(folder))
    assert sorted_lines(done.stdout) == ["[0] out 0", "[1] out 1"]
    assert sorted_lines(done.stderr) == ["[0] err", "[1] err"]
    for rank in range(2):
        assert sorted_lines((folder / f"rank.{rank}.log").read_bytes()) == ["err", f"out {rank}"]


def test_a_child_that_keeps_the_output_open_holds_nothing_up() -> None:
    done = shell(2, "sleep 1000 & echo done")
    assert (done.returncode, done.stdout) == (0, b"done\ndone\n")


def test_a_reader_that_goes_ends_the_job_as_it_ends_a_pipeline() -> None:
    with started("-n", "2", "--", "yes") as launcher:
        assert read_lines(launcher, 3) == ["y", "y", "y"]
        assert launcher.stdout is not None
        launcher.stdout.close()
        assert launcher.wait(LIMIT_S) == 128 + signal.SIGPIPE
        assert launcher.stderr is not None
        assert launcher.stderr.read() == b""


def test_a_reader_that_does_not_read_holds_up_no_deadline() -> None:
    with started("-n", "2", "--timeout", "1", "--", "sh", "-c", "echo $$; exec yes") as launcher:
        pid = int(read_lines(launcher, 1)[0])
        with contextlib.suppress(ProcessLookupError):
            pidfd = os.pidfd_open(pid)
            assert select.select([pidfd], [], [], LIMIT_S)[0]
            os.close(pidfd)
        _, err = launcher.communicate(timeout=LIMIT_S)
    assert launcher.returncode == 124
    assert b"longer than 1 s" in err


def test_output_that_cannot_be_written_is_one_clear_line() -> None:
    with open("/dev/full", "wb") as full:
        argv = [*RUN, "-n", "1", "--", "echo", "x"]
        done = subprocess.run(argv, stdout=full, stderr=subprocess.PIPE, timeout=LIMIT_S)
    assert done.returncode == 1
    assert b"pycoll-run: cannot write the ranks' output: No space left on device\n" in done.stderr


# On a terminal.


class Terminal:
    """A launcher whose standard streams are a terminal."""

    def __init__(self, *args: str, **variables: str) -> None:
        pid, self._fd = pty.fork()  # Ctrl-C needs a terminal that controls the process
        if pid == 0:
            os.execve(sys.executable, [*RUN, *args], os.environ | {"TERM": "xterm"} | variables)
        self._pid = pid
        self.text = b""
        self.status: int | None = None

    def read_until(self, text: bytes) -> None:
        while text not in self.text:
            self.text += os.read(self._fd, 4096)

    def type(self, text: bytes) -> None:
        os.write(self._fd, text)

    def read_all(self) -> bytes:
        with contextlib.suppress(OSError):  # EIO: nobody has it open any more
            while data := os.read(self._fd, 4096):
                self.text += data
        self.status = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        return self.text

    def close(self) -> None:
        if self.status is None:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        os.close(self._fd)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    with contextlib.ExitStack() as stack:

        def start(*args: str, **variables: str) -> Terminal:
            made = Terminal(*args, **variables)
            stack.callback(made.close)
            return made

        yield start


def test_on_a_terminal_ranks_have_prefixes_of_different_colors(
    terminal: Callable[..., Terminal],
) -> None:
    text = terminal("-n", "2", "--", "echo", "hi", NO_COLOR="").read_all()
    assert sorted(text.splitlines()) == [b"\x1b[33m[1]\x1b[0m hi", b"\x1b[36m[0]\x1b[0m hi"]


def test_no_color_leaves_the_prefixes_plain(terminal: Callable[..., Terminal]) -> None:
    text = terminal("-n", "2", "--", "echo", "hi", NO_COLOR="1").read_all()
    assert sorted(text.splitlines()) == [b"[0] hi", b"[1] hi"]


def test_a_prompt_is_shown_and_its_answer_read(terminal: Callable[..., Terminal]) -> None:
    ask = '[ "$PYCOLL_RANK" = 1 ] || { printf "name? "; read name; echo "hello $name"; }'
    shown = terminal("-n", "2", "--", "sh", "-c", ask, NO_COLOR="1")
    shown.read_until(b"[0] name? ")
    shown.type(b"you\n")
    assert b"hello you\r\n" in shown.read_all()


def test_a_line_erases_the_progress_bar_of_another_rank(
    terminal: Callable[..., Terminal], tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "go")
    text = """if [ "$PYCOLL_RANK" = 0 ]
              then printf '50%%\\r'; read line; printf '100%%\\n'
              else read line < "$GO"; echo line
              fi"""
    shown = terminal("-n", "2", "--", "sh", "-c", text, NO_COLOR="1", GO=str(tmp_path / "go"))
    shown.read_until(b"[0] 50%\r")
    (tmp_path / "go").write_text("\n")
    shown.read_until(b"[0] 50%\r\x1b[K[1] line\r\n")
    shown.type(b"\n")
    assert shown.read_all().endswith(b"[0] 100%\r\n")


def test_ctrl_c_on_a_terminal_interrupts_every_rank_once(
    terminal: Callable[..., Terminal],
) -> None:
    trap = "trap 'echo got; exit 0' INT; echo ready; while :; do sleep 0.01; done"
    shown = terminal("-n", "2", "--", "sh", "-c", trap, NO_COLOR="1")
    shown.read_until(b"[0] ready")
    shown.read_until(b"[1] ready")
    shown.type(b"\x03")
    text = shown.read_all()
    assert (text.count(b"[0] got"), text.count(b"[1] got")) == (1, 1)
    assert shown.status == 130


# As a library.


def test_a_job_gives_lines_to_a_function_and_its_outcome_to_the_caller() -> None:
    got: list[tuple[int, bytes]] = []
    job = Job(["sh", "-c", "echo a; printf b"], Options(2), stdout=lambda *line: got.append(line))
    assert job.run() == Outcome(0, None, "")
    for number in range(2):
        assert b"".join(data for rank, data in got if rank == number) == b"a\nb\n"


def test_a_job_writes_to_files_of_text_and_of_bytes(tmp_path: Path) -> None:
    text, data = io.StringIO(), io.BytesIO()
    Job(["sh", "-c", "echo o; echo e >&2"], Options(1), stdout=text, stderr=data).run()
    assert (text.getvalue(), data.getvalue()) == ("o\n", b"e\n")
    with open(tmp_path / "file", "w") as file:
        file.write("before\n")
        Job(["echo", "o"], Options(1), stdout=file).run()
    assert (tmp_path / "file").read_text() == "before\no\n"


def test_ranks_inherit_the_descriptors_they_are_given() -> None:
    end, ours = os.pipe()
    try:
        program = f"import os; os.write({ours}, os.environb[b'RANK'] + b' ')"
        job = Job([sys.executable, "-c", program], Options(2), pass_fds=[ours])
        assert job.run().status == 0
        assert sorted(os.read(end, 100).split()) == [b"0", b"1"]
    finally:
        os.close(end)
        os.close(ours)


def test_a_job_puts_the_signal_handlers_back() -> None:
    def handlers() -> list[object]:
        return [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]

    before = handlers()
    during: list[object] = []
    Job(["echo", "x"], Options(1), stdout=lambda *_: during.extend(handlers())).run()
    assert handlers() == before
    assert during != before
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)
    assert wakeup == -1


def test_a_job_in_another_thread_touches_no_signal_handler() -> None:
    before = signal.getsignal(signal.SIGTERM)
    got: list[object] = []

    def work() -> None:
        during = lambda *_: got.append(signal.getsignal(signal.SIGTERM))  # noqa: E731
        got.append(Job(["sh", "-c", "echo x; exit 3"], Options(1), stdout=during).run().status)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(LIMIT_S)
    assert got == [before, 3]


def test_an_error_of_the_function_for_output_ends_the_job_and_comes_back() -> None:
    def fail(rank: int, data: bytes) -> None:
        raise KeyError(data)

    job = Job(["sh", "-c", "echo x; sleep 1000"], Options(2), stdout=fail)
    with pytest.raises(KeyError, match="x"):
        job.run()


def test_jobs_leave_no_descriptor_open() -> None:
    Job(["true"], Options(1)).run()
    before = set(os.listdir("/proc/self/fd"))
    Job(["true"], Options(3)).run()
    Job(["/no/such/program"], Options(3)).run()
    assert set(os.listdir("/proc/self/fd")) == before


# Words.


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([3], "rank 3"), ([2, 0, 1], "ranks 0-2"), ([0, 2, 3, 4, 9], "ranks 0, 2-4, 9")],
)
def test_ranks_are_told_as_ranges(ranks: list[int], text: str) -> None:
    assert ranks_text(ranks) == text


def test_last_lines_show_the_last_state_of_a_progress_bar() -> None:
    assert last_lines("a\r\nb\n\n10%\r90%\nc\n", 3) == "    b\n    90%\n    c"
