"""What ranks print, through `pycoll-run`: whole, tagged, to files, and on a terminal."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launcher_jobs import LIMIT_S, RUN, read_lines, run, shell, started

from pycoll._launcher.job_spec import Options
from pycoll._launcher.outcome import Outcome, last_lines
from pycoll._launcher.spawn import Job
from pycoll._support.wording import ranks_text


def sorted_lines(output: bytes) -> list[str]:
    return sorted(output.decode().splitlines())


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


@pytest.mark.parametrize("option", ["-l", "--no-tag-output"])
def test_in_a_pipe_a_prompt_is_passed_on_and_its_answer_read(option: str) -> None:
    ask = "printf '50%%\\rname? '; read name; echo \"hello $name\""
    tag = b"[0] " if option == "-l" else b""
    with started("-n", "1", option, "--", "sh", "-c", ask) as launcher:
        assert launcher.stdin is not None
        assert launcher.stdout is not None
        shown = b""
        while not shown.endswith(b"name? "):
            shown += os.read(launcher.stdout.fileno(), 100)
        assert shown == tag + b"50%\r" + tag + b"name? "
        launcher.stdin.write(b"you\n")
        assert launcher.stdout.readline() == b"hello you\n"  # it goes on in the same line
        assert launcher.wait(LIMIT_S) == 0


def test_a_line_of_another_rank_ends_one_that_waits_to_be_ended(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "go")
    text = f"""if [ "$PYCOLL_RANK" = 0 ]
               then printf begin; read line; echo end
               else read line < {tmp_path}/go; echo line
               fi"""
    with started("-n", "2", "-l", "--", "sh", "-c", text) as launcher:
        assert launcher.stdin is not None
        assert launcher.stdout is not None
        assert launcher.stdout.read(9) == b"[0] begin"
        (tmp_path / "go").write_text("\n")
        assert read_lines(launcher, 2) == ["", "[1] line"]
        launcher.stdin.write(b"\n")
        assert read_lines(launcher, 1) == ["[0] end"]
        assert launcher.wait(LIMIT_S) == 0


def test_log_files_have_both_streams_of_each_rank_which_are_relayed_too(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "logs"
    done = shell(2, "echo out $PYCOLL_RANK; echo err >&2", "-l", "--log-dir", str(folder))
    assert sorted_lines(done.stdout) == ["[0] out 0", "[1] out 1"]
    assert sorted_lines(done.stderr) == ["[0] err", "[1] err"]
    for rank in range(2):
        assert sorted_lines((folder / f"rank.{rank}.log").read_bytes()) == ["err", f"out {rank}"]


def test_a_log_folder_has_nothing_of_the_job_before_and_the_cause_of_this_ones_failure(
    tmp_path: Path,
) -> None:
    (tmp_path / "rank.7.log").write_text("old")
    (tmp_path / "rank.x.log").write_text("the user's")
    done = shell(2, "exit $((3 * $PYCOLL_RANK))", "--log-dir", str(tmp_path))
    assert set(os.listdir(tmp_path)) == {"rank.0.log", "rank.1.log", "rank.x.log", "launcher.log"}
    assert b"rank 1 failed after" in done.stderr
    log = (tmp_path / "launcher.log").read_bytes()
    assert log == done.stderr + b"pycoll-run: exit status 3\n"


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


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([3], "rank 3"), ([2, 0, 1], "ranks 0-2"), ([0, 2, 3, 4, 9], "ranks 0, 2-4, 9")],
)
def test_ranks_are_told_as_ranges(ranks: list[int], text: str) -> None:
    assert ranks_text(ranks) == text


def test_last_lines_show_the_last_state_of_a_progress_bar() -> None:
    assert last_lines("a\r\nb\n\n10%\r90%\nc\n", 3) == "    b\n    90%\n    c"
