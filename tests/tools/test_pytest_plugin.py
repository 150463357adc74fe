"""The pytest plugin: tests that run on several ranks, seen from a user's pytest."""

from __future__ import annotations

import pytest
from plugin_runs import run_tests
from tiers import exhaustive, smoke

# pytester drops modules that are first imported in an inner pytest, and NumPy and zmq must not be
# imported twice in one process.

pytest_plugins = ["pytester"]

pytestmark = pytest.mark.usefixtures("plain_pytest")


def test_a_test_and_its_fixtures_run_on_each_number_of_ranks_and_only_there(
    pytester: pytest.Pytester,
) -> None:
    result = run_tests(
        pytester,
        """
@pytest.fixture(scope="module", autouse=True)
def noted(request):
    open("fixture-in-" + os.environ.get("PYCOLL_RANK", "parent"), "w").close()
    yield 5
    open("teardown-in-" + os.environ.get("PYCOLL_RANK", "parent"), "w").close()

@pytest.fixture(scope="module")
def total(comm): return comm.all_reduce(comm.rank)

@pytest.mark.ranks(1, 2)
def test_sum(comm, request, noted, total):
    assert f"[{comm.size}rank" in request.node.name
    assert (noted, total) == (5, sum(range(comm.size)))
""",
        "-v",
    )
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*::test_sum[[]1rank] PASSED*", "*::test_sum[[]2ranks] PASSED*"])
    found = sorted(path.name for path in pytester.path.glob("*-in-*"))
    assert found == ["fixture-in-0", "fixture-in-1", "teardown-in-0", "teardown-in-1"]


def test_ids_go_together_with_other_parameters(pytester: pytest.Pytester) -> None:
    result = run_tests(
        pytester,
        """
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("x", ["a", "b"])
def test_it(comm, x): pass
""",
        "--collect-only",
        "-q",
    )
    names = [line.partition("::")[2] for line in result.outlines if "::" in line]
    assert sorted(names) == [f"test_it[{n}ranks-{x}]" for n in (2, 4) for x in "ab"]


@exhaustive
def test_a_class_is_marked_as_a_whole_and_a_method_differently(pytester: pytest.Pytester) -> None:
    result = run_tests(
        pytester,
        """
@pytest.mark.ranks(2)
class TestThem:
    def test_two(self, comm): assert comm.size == 2
    @pytest.mark.ranks(1)
    def test_one(self, comm): assert comm.size == 1
""",
        "-v",
    )
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*test_two[[]2ranks]*", "*test_one[[]1rank]*"])


@pytest.mark.usefixtures("installed_plugins")
def test_the_communicator_is_optional(pytester: pytest.Pytester) -> None:
    result = run_tests(
        pytester,
        """
@pytest.mark.ranks(1)
def test_it(): open("ran" + os.environ["PYCOLL_RANK"], "w").close()
""",
    )
    result.assert_outcomes(passed=1)
    assert (pytester.path / "ran0").exists()


def test_the_communicator_without_the_marker_is_an_error(pytester: pytest.Pytester) -> None:
    result = run_tests(pytester, "def test_it(comm): pass")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["the fixture comm is for tests *@pytest.mark.ranks(2)*"])


def test_the_fixture_gives_way_to_another_plugins(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        their_plugin="import pytest\n@pytest.fixture(scope='session')\ndef comm(): return 'theirs'"
    )
    pytester.syspathinsert()
    result = run_tests(
        pytester,
        """
def test_theirs(comm): assert comm == "theirs"
@pytest.mark.ranks(2)
def test_ours(comm): assert comm.size == 2
""",
        "-ptheir_plugin",
    )
    result.assert_outcomes(passed=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "*takes numbers of ranks, for example @pytest.mark.ranks(2, 4)"),
        ("0", "*takes numbers of ranks, * not 0"),
        ("'2'", "*takes numbers of ranks, * not '2'"),
        ("2, n=3", "*but not n"),
        ("2, timeout=-1", "*timeout of @pytest.mark.ranks is a number of seconds above 0, not -1"),
    ],
)
def test_a_marker_that_makes_no_sense_is_an_error(
    arguments: str, message: str, pytester: pytest.Pytester
) -> None:
    result = run_tests(pytester, f"@pytest.mark.ranks({arguments})\ndef test_it(): pass")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([message])


def test_methods_of_unittest_say_that_they_cannot(pytester: pytest.Pytester) -> None:
    result = run_tests(
        pytester,
        """
import unittest
class TestIt(unittest.TestCase):
    @pytest.mark.ranks(2)
    def test_it(self): pass
""",
    )
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*no unittest.TestCase*"])


@pytest.mark.usefixtures("installed_plugins")
def test_the_marker_is_registered(pytester: pytest.Pytester) -> None:
    result = run_tests(
        pytester, "@pytest.mark.ranks(1)\ndef test_it(): pass", "--strict-markers", "--markers"
    )
    result.stdout.fnmatch_lines(["@pytest.mark.ranks(n, ..., timeout=None): run the test on n*"])


@exhaustive
def test_each_rank_has_a_temporary_folder_of_its_own(pytester: pytest.Pytester) -> None:
    result = run_tests(
        pytester,
        """
@pytest.mark.ranks(3)
def test_it(comm, tmp_path):
    (tmp_path / "file").write_text(str(comm.rank))
    comm.barrier()
    paths = comm.all_gather({"path": str(tmp_path)})
    assert len({p["path"] for p in paths}) == 3
    assert (tmp_path / "file").read_text() == str(comm.rank)
""",
        f"--basetemp={pytester.path / 'base'}",
    )
    result.assert_outcomes(passed=1)
    assert len(list(pytester.path.glob("base/**/file"))) == 3


@exhaustive
def test_capture_fixtures_work_in_the_ranks(pytester: pytest.Pytester) -> None:
    result = run_tests(
        pytester,
        """
@pytest.mark.ranks(2)
def test_sys(comm, capsys):
    print("x")
    assert capsys.readouterr().out == "x\\n"

@pytest.mark.ranks(2)
def test_fd(comm, capfd):
    os.write(1, b"x")
    assert capfd.readouterr().out == "x"
""",
    )
    result.assert_outcomes(passed=2)


@smoke
def test_the_rank_that_failed_is_shown_with_its_traceback(pytester: pytest.Pytester) -> None:
    result = run_tests(
        pytester,
        """
@pytest.mark.ranks(2)
def test_it(comm):
    if comm.rank == 1:
        raise ValueError("boom")
    comm.barrier()
""",
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*--- rank 1 ---*",
            ">*raise ValueError(*boom*)",
            "E           ValueError: boom",
            "test_*.py:6: ValueError",
            "rank 0: *PeerFailed: rank 1 failed: raised ValueError (test_*.py:7)",
            "FAILED *::test_it[[]2ranks] - rank 1: ValueError: boom",
        ]
    )


def test_the_same_failure_on_several_ranks_is_shown_once(pytester: pytest.Pytester) -> None:
    result = run_tests(
        pytester,
        "@pytest.mark.ranks(2)\ndef test_it(comm): assert comm.size == 3, object()",
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*--- ranks 0-1 ---*", "E *assert 2 == 3"])
    # The summary's last line may repeat the message: where CI is set it is not shortened.
    assert result.stdout.str().count("E   assert 2 == 3") == 1


@smoke
def test_a_mismatch_in_the_last_call_fails_the_test(pytester: pytest.Pytester) -> None:
    result = run_tests(
        pytester,
        """
@pytest.mark.ranks(2)
def test_it(comm): comm.broadcast(1, root=comm.rank)
""",
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*--- rank* (after the test) ---*", "E *pycoll.errors.MismatchError: ranks made *"]
    )


@exhaustive
def test_different_failures_are_all_shown(pytester: pytest.Pytester) -> None:
    result = run_tests(
        pytester, "@pytest.mark.ranks(2)\ndef test_it(comm): assert comm.barrier() or comm.rank > 5"
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines_random(["*--- rank 0 ---*", "E *0 > 5*", "*--- rank 1 ---*"])


def test_frames_of_pycoll_are_hidden_in_its_own_errors(pytester: pytest.Pytester) -> None:
    result = run_tests(
        pytester,
        """
@pytest.mark.ranks(2)
def test_it(comm):
    comm.all_reduce(1.0 if comm.rank else 1)
""",
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E * pycoll.errors.MismatchError: *"])
    result.stdout.no_fnmatch_line("*engine.py*")


def test_failures_in_fixtures_say_so(pytester: pytest.Pytester) -> None:
    result = run_tests(
        pytester,
        """
@pytest.fixture
def ends_badly(comm):
    yield
    1 / 0

@pytest.fixture
def begins_badly(ends_badly): raise OSError(1)

@pytest.mark.ranks(2)
def test_it(begins_badly): pass
""",
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*--- ranks 0-1 (setup) ---*", "E *OSError*", "*--- ranks 0-1 (teardown) ---*", "E *Zero*"]
    )


@pytest.mark.parametrize(
    ("death", "reason"),
    [
        ("os.kill(os.getpid(), 9)", "killed by signal 9 (SIGKILL)"),
        pytest.param("os._exit(3)", "exit status 3", marks=exhaustive),
    ],
)
def test_a_rank_that_dies_is_named(death: str, reason: str, pytester: pytest.Pytester) -> None:
    result = run_tests(
        pytester,
        f"""
@pytest.mark.ranks(3)
def test_it(comm):
    if comm.rank == 1:
        print("last words", flush=True)
        {death}
    comm.barrier()
""",
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            f"rank 1 died in the test: {reason}",
            f"ranks 0, 2: *PeerFailed: rank 1 failed: {reason} (test_*.py:8)",
            "*Captured stdout call*",
            "[[]1[]] last words",
        ]
    )


@exhaustive
def test_a_rank_that_exits_quietly_is_named(pytester: pytest.Pytester) -> None:
    result = run_tests(
        pytester,
        "@pytest.mark.ranks(2)\ndef test_it(comm):\n    if comm.rank: os._exit(0)",
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["rank 1 died in the test: exit status 0"])


def test_a_rank_that_cannot_collect_the_test_says_why(pytester: pytest.Pytester) -> None:
    result = run_tests(
        pytester,
        """
if "PYCOLL_RANK" in os.environ: raise RuntimeError("not here")
@pytest.mark.ranks(2)
def test_it(comm): pass
""",
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*--- ranks 0-1 (pytest) ---*", "E *RuntimeError: not here"])


@exhaustive
def test_tests_that_come_and_go_are_found_out(pytester: pytest.Pytester) -> None:
    result = run_tests(
        pytester,
        """
@pytest.mark.ranks(2)
@pytest.mark.parametrize("pid", [os.getpid()])
def test_it(pid): pass
""",
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*--- ranks 0-1 (pytest) ---*", "*2ranks-*] was not collected*"])


def test_a_test_that_takes_too_long_shows_what_each_rank_was_doing(
    pytester: pytest.Pytester,
) -> None:
    result = run_tests(
        pytester,
        """
import signal
@pytest.mark.ranks(2, timeout=float(os.environ["TEST_PATIENCE_OF_PYCOLL"]) * 3)
def test_it(comm):
    if comm.rank == 1:
        comm.recv(0)
    while True:
        signal.pause()
""",
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*--- the test took longer than * s ---*",
            "rank 0: not waiting in pycoll*",
            "rank 1: recv(source=0*",
            "*--- rank 0, stack ---*",
            "*signal.pause()",
            "*--- rank 1, stack ---*",
            "*comm.recv(0)",
            "FAILED *the test took*",
        ]
    )


def test_a_deadlock_ends_the_test_and_shows_who_waits_for_whom(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYCOLL_WARN_AFTER", "0.3")
    result = run_tests(
        pytester, "@pytest.mark.ranks(2)\ndef test_it(comm):\n    comm.recv(1 - comm.rank)"
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*--- deadlock: rank 0 waits for 1, which waits for 0 ---*",
            "    0     1          recv(source=1*",
            "*--- ranks 0-1, stack ---*",
            "*comm.recv(1 - comm.rank)",
            "FAILED *deadlock: rank 0 waits for 1*",
        ]
    )


@exhaustive
def test_the_deadline_is_that_of_the_ini_option(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\npycoll_timeout = 1.5")
    result = run_tests(
        pytester,
        "import threading\n@pytest.mark.ranks(2)\ndef test_it(): threading.Event().wait()",
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*--- the test took longer than 1.5 s ---*", "rank 0: *"])


def test_the_ini_option_must_be_a_number(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\npycoll_timeout = soon")
    result = run_tests(pytester, "def test_it(): pass")
    result.stderr.fnmatch_lines(["*pycoll_timeout is a number of seconds above 0, not 'soon'*"])
