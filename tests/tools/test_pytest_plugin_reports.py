"""The pytest plugin: skips, output, warnings, options, and what is reported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest
from plugin_runs import run_tests
from tiers import exhaustive, few

# pytester drops modules that are first imported in an inner pytest, and NumPy and zmq must not be
# imported twice in one process.

pytest_plugins = ["pytester"]

pytestmark = pytest.mark.usefixtures("plain_pytest")


@exhaustive
def test_a_test_that_all_ranks_skip_is_skipped(pytester: pytest.Pytester) -> None:
    result = run_tests(
        pytester, "@pytest.mark.ranks(2)\ndef test_it(comm):\n    pytest.skip('no GPU')", "-rs"
    )
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED [[]1] test_*.py:4: no GPU"])


def test_a_skip_marker_starts_no_rank(pytester: pytest.Pytester) -> None:
    result = run_tests(
        pytester,
        """
if "PYCOLL_RANK" in os.environ: open("started", "w").close()
@pytest.mark.skip(reason="later")
@pytest.mark.ranks(2)
def test_it(comm): pass
""",
    )
    result.assert_outcomes(skipped=1)
    assert not (pytester.path / "started").exists()


def test_one_rank_that_runs_or_that_fails_as_expected_decides_for_all(
    pytester: pytest.Pytester,
) -> None:
    # The other rank fails only because this one does.
    result = run_tests(
        pytester,
        """
@pytest.mark.ranks(2)
def test_skipped(comm):
    if comm.rank: pytest.skip("no")

@pytest.mark.ranks(2)
@pytest.mark.xfail(reason="known")
def test_known(comm):
    if comm.rank: raise OSError
    comm.barrier()
""",
        "-rx",
        "--keep-ranks",
    )
    result.assert_outcomes(passed=1, xfailed=1)
    result.stdout.fnmatch_lines(["XFAIL test_*known"])


XFAILS = [
    ("xfail(reason='known')", "raise OSError", "xfailed"),
    ("xfail(reason='known', strict=True)", "pass", "failed"),
    ("xfail(reason='known')", "pass", "xpassed"),
    ("xfail(reason='known', raises=ValueError)", "raise OSError", "failed"),
    ("xfail(reason='known', raises=ValueError)", "int('known')", "xfailed"),
    ("xfail(reason='known')", "os._exit(1)", "xfailed"),
    ("filterwarnings('default')", "pytest.xfail('known')", "xfailed"),
]


@exhaustive
@pytest.mark.parametrize(("marker", "body", "outcome"), XFAILS)
def test_expected_failures_are_respected(
    marker: str, body: str, outcome: str, pytester: pytest.Pytester
) -> None:
    result = run_tests(
        pytester,
        f"@pytest.mark.{marker}\n@pytest.mark.ranks(2)\ndef test_it(comm):\n"
        f"    if comm.rank: {body}\n    comm.barrier()\n",
        "-rxXf",
    )
    result.assert_outcomes(**{outcome: 1})
    if outcome != "failed":
        result.stdout.fnmatch_lines([f"X{outcome[1:5].upper()}* test_*known"])


@exhaustive
def test_output_of_the_ranks_is_shown_with_a_failure_only(pytester: pytest.Pytester) -> None:
    result = run_tests(
        pytester,
        """
import logging, sys
@pytest.mark.ranks(2)
@pytest.mark.parametrize("fails", [False, True])
def test_it(comm, fails):
    print("hello", fails)
    print("oops", file=sys.stderr)
    logging.warning("careful")
    assert not fails
""",
    )
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines_random(
        ["[[]0[]] hello True", "[[]1[]] hello True", "[[]0[]] oops", "*Captured log call, rank 1*"]
    )
    result.stdout.no_fnmatch_line("*hello False*")


@exhaustive
def test_output_passes_through_without_capturing(pytester: pytest.Pytester) -> None:
    result = run_tests(
        pytester, "@pytest.mark.ranks(2)\ndef test_it(comm): print('hello')", "--capture=no"
    )
    result.stdout.fnmatch_lines_random(["*[[]0[]] hello", "*[[]1[]] hello"])


@exhaustive
def test_warnings_of_the_ranks_are_shown_once(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        "import pytest, warnings\n"
        "@pytest.mark.ranks(3)\ndef test_it(comm): warnings.warn('beware')",
    )
    result = pytester.runpytest_subprocess()
    result.assert_outcomes(passed=1, warnings=1)
    result.stdout.fnmatch_lines(["*UserWarning: beware"])


@exhaustive
def test_warnings_are_errors_in_the_ranks_if_they_are_in_the_parent(
    pytester: pytest.Pytester,
) -> None:
    pytester.makeini("[pytest]\nfilterwarnings = error\n")
    pytester.makepyfile(
        """
import pytest, warnings
@pytest.mark.ranks(2)
def test_clean(comm): comm.barrier()
@pytest.mark.ranks(2)
def test_warned(comm): warnings.warn('beware')
"""
    )
    result = pytester.runpytest_subprocess()
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["E *UserWarning: beware"])


@exhaustive
def test_options_of_conftest_files_and_of_pytest_reach_the_ranks(
    pytester: pytest.Pytester,
) -> None:
    pytester.makeconftest(
        "def pytest_addoption(parser): parser.addoption('--flavor', default='none')"
    )
    result = run_tests(
        pytester,
        """
@pytest.mark.ranks(2)
def test_it(comm, pytestconfig):
    assert pytestconfig.getoption("flavor") == "sweet"
    assert pytestconfig.getoption("verbose") == 2
    assert str(pytestconfig.rootpath) == os.getcwd()
    assert pytestconfig.getini("xfail_strict")
""",
        "--flavor=sweet",
        "-vv",
        "-oxfail_strict=true",
    )
    result.assert_outcomes(passed=1)


@exhaustive
def test_reports_are_written_by_the_parent_alone(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\naddopts = --junitxml=report.xml --log-file=log.txt")
    result = run_tests(
        pytester,
        """
import atexit, os
if "PYCOLL_RANK" in os.environ:
    before = os.path.exists("report.xml")
    atexit.register(lambda: os.path.exists("report.xml") == before or open("bad", "w"))
@pytest.mark.ranks(2)
def test_it(comm): assert comm.rank == 5
""",
    )
    result.assert_outcomes(failed=1)
    assert not (pytester.path / "bad").exists()
    (case,) = ElementTree.parse(pytester.path / "report.xml").iter("testcase")
    assert case.get("name") == "test_it[2ranks]"
    failure = case.find("failure")
    assert failure is not None
    assert "- rank 0 -" in (failure.text or "")


@exhaustive
def test_addopts_of_the_environment_reach_the_parent_and_the_tests(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_ADDOPTS", "--maxfail=3 -v")
    pytester.makepyfile(
        """
import os, pytest
@pytest.mark.ranks(1)
def test_it(pytestconfig):
    assert os.environ["PYTEST_ADDOPTS"] == "--maxfail=3 -v"
    assert pytestconfig.getoption("verbose") == 1
"""
    )
    pytester.runpytest_subprocess().assert_outcomes(passed=1)


@exhaustive
def test_tests_are_selected_by_name_and_run_until_the_first_failure(
    pytester: pytest.Pytester,
) -> None:
    text = """
@pytest.mark.ranks(1, 2)
def test_good(comm): pass
@pytest.mark.ranks(1, 2)
def test_bad(comm): assert comm.size == 5
"""
    result = run_tests(pytester, text, "-k", "bad or 2", "-x")
    result.assert_outcomes(passed=1, failed=1, deselected=1)


@exhaustive
def test_what_failed_last_is_remembered_by_the_parent(pytester: pytest.Pytester) -> None:
    text = """
@pytest.mark.ranks(1, 2)
def test_it(comm): assert comm.size == 1
def test_other(): pass
"""
    run_tests(pytester, text, "-p", "cacheprovider").assert_outcomes(passed=2, failed=1)
    cache = json.loads((pytester.path / ".pytest_cache/v/cache/lastfailed").read_text())
    assert [name.partition("::")[2] for name in cache] == ["test_it[2ranks]"]
    again = pytester.runpytest_inprocess("--lf", "-v")
    again.assert_outcomes(failed=1, deselected=0)
    again.stdout.fnmatch_lines(["*::test_it[[]2ranks] FAILED*"])


@pytest.mark.parametrize("mode", few(["importlib"], ["prepend"]))
def test_test_modules_in_folders_with_conftest_files(mode: str, pytester: pytest.Pytester) -> None:
    folder = pytester.mkdir("deep") / "deeper"
    folder.mkdir()
    (folder.parent / "conftest.py").write_text(
        "import pytest\n@pytest.fixture\ndef five(): return 5\n"
    )
    (folder / "test_inside.py").write_text(
        "import pytest\n@pytest.mark.ranks(2)\ndef test_it(comm, five): assert five == 5\n"
    )
    pytester.runpytest_inprocess(f"--import-mode={mode}", "deep").assert_outcomes(passed=1)


def test_loading_the_plugin_imports_nothing_heavy() -> None:
    code = (
        "import sys, pycoll._tools.pytest_plugin\n"
        "print(*{'numpy', 'zmq', 'cloudpickle', 'pycoll._launcher'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"


def test_tests_without_the_marker_import_nothing_heavy(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        "import sys\n"
        "LATE = {'zmq', 'pycoll._launcher', 'pycoll._arrays.operators'}\n"
        "def test_it(): assert not LATE & set(sys.modules)"
    )
    pytester.runpytest_subprocess().assert_outcomes(passed=1)


@exhaustive
def test_no_descriptor_stays_open(pytester: pytest.Pytester) -> None:
    text = "@pytest.mark.ranks(2)\ndef test_it(comm): assert comm.rank"
    run_tests(pytester, text)  # libzmq and Python open what they keep
    before = len(os.listdir("/proc/self/fd"))
    run_tests(pytester, text).assert_outcomes(failed=1)
    assert len(os.listdir("/proc/self/fd")) == before


def test_ctrl_c_ends_pytest_and_the_ranks(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
import os, pytest, signal, threading
@pytest.mark.ranks(2)
def test_it(comm):
    comm.barrier()
    if comm.rank == 0:
        os.kill(int(os.environ["PARENT"]), signal.SIGINT)
    threading.Event().wait()
"""
    )
    pytester.makeconftest("import os\nos.environ.setdefault('PARENT', str(os.getpid()))")
    result = pytester.runpytest_subprocess()
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["*KeyboardInterrupt*"])


def test_a_strict_xfail_that_passes_is_told_once(pytester: pytest.Pytester) -> None:
    result = run_tests(
        pytester, "@pytest.mark.ranks(2)\n@pytest.mark.xfail(strict=True)\ndef test_it(comm): pass"
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*--- ranks 0-1 ---*", "*XPASS(strict)*"])
    result.stdout.no_fnmatch_line("*no failure*")


def test_a_debugger_has_no_terminal_on_a_rank(pytester: pytest.Pytester) -> None:
    result = run_tests(pytester, "@pytest.mark.ranks(2)\ndef test_it(comm): breakpoint()", "--pdb")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E *RuntimeError: a debugger on rank *: a rank has no terminal.*"])
    result.stdout.no_fnmatch_line("*entering PDB*")


def test_marked_tests_in_a_pytest_that_is_a_rank_are_refused(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYCOLL_SIZE", "2")
    result = run_tests(pytester, "@pytest.mark.ranks(2)\ndef test_it(comm): pass")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*test_it* starts its own ranks, *call pytest without pycoll-run"])


@pytest.mark.usefixtures("installed_plugins")
@pytest.mark.parametrize(
    "options", few([["--keep-ranks"]], [["-n0"], ["-n2"], ["-n2", "--keep-ranks"]])
)
def test_lines_that_run_in_ranks_are_covered(options: list[str], pytester: pytest.Pytester) -> None:
    pytest.importorskip("pytest_cov")
    pytester.makepyfile(
        mylib="""
def total(comm):
    if comm.rank == 1:
        extra = 1
    else:
        extra = 0
    return comm.all_reduce(extra)

def unused():
    return 1
""",
        test_it="""
import mylib, pytest
@pytest.mark.ranks(2)
def test_total(comm): assert mylib.total(comm) == 1
""",
    )
    pytester.syspathinsert()
    result = pytester.runpytest_subprocess("--cov=mylib", "--cov-report=term-missing", *options)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["mylib.py * 7 * 1 * 86% * 9"])
    assert [path.name for path in pytester.path.glob(".coverage*")] == [".coverage"]
