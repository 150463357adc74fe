"""The pytest plugin with ranks that stay from test to test."""

from __future__ import annotations

import pytest
from plugin_runs import run_tests

pytest_plugins = ["pytester"]

pytestmark = pytest.mark.usefixtures("plain_pytest")

GOOD = """
import sys, warnings
def note(comm):
    with open("pids", "a") as file:
        file.write(f"{os.getpid()}\\n")
    comm.barrier()

@pytest.fixture(scope="module")
def made(comm):
    yield comm.all_reduce(1)
    with open("torn-down", "a") as file:
        file.write("x")

@pytest.mark.ranks(2)
@pytest.mark.parametrize("x", [1, 2])
def test_fixtures(comm, x, made, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "kept", x, raising=False)
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    print("hidden")
    assert capsys.readouterr().out == "hidden\\n"
    assert comm.all_reduce(x) == 2 * x and made == 2
    note(comm)

@pytest.mark.ranks(2)
@pytest.mark.xfail(reason="known")
def test_expected(comm):
    note(comm)
    assert comm.rank == 5

@pytest.mark.ranks(2)
def test_skipped(comm): pytest.skip("no")

class TestClass:
    @pytest.mark.ranks(2)
    def test_clean(self, comm):
        assert not hasattr(sys, "kept")
        warnings.warn("beware")
        note(comm)
"""

BAD = """
@pytest.mark.ranks(2)
def test_assertion(comm):
    print("from here")
    assert comm.rank == 0
@pytest.mark.ranks(2)
def test_last_call(comm): comm.broadcast(1, root=comm.rank)
@pytest.mark.ranks(2)
def test_death(comm):
    if comm.rank: os._exit(3)
    comm.barrier()
@pytest.mark.ranks(2)
def test_circle(comm): comm.recv(1 - comm.rank)
@pytest.mark.ranks(2)
def test_after(comm): assert comm.all_reduce(1) == 2
"""


def test_tests_that_pass_share_their_ranks(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\npycoll_keep_ranks = true")
    pytester.makepyfile(
        test_other="import pytest\n@pytest.mark.ranks(2)\n"
        "def test_it(comm):\n    assert comm.rank < 2\n"
        "    import os; open('pids', 'a').write(f'{os.getpid()}\\n')"
    )
    pytester.makepyfile(f"import os, pytest\n{GOOD}")
    result = pytester.runpytest_subprocess()
    result.assert_outcomes(passed=4, xfailed=1, skipped=1, warnings=1)
    assert len(set((pytester.path / "pids").read_text().split())) == 2
    assert (pytester.path / "torn-down").read_text() == "xxxx"


def test_each_failure_is_told_and_does_no_harm_to_the_next_test(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYCOLL_WARN_AFTER", "0.3")
    result = run_tests(pytester, BAD, "--keep-ranks")
    result.assert_outcomes(failed=4, passed=1)
    result.stdout.fnmatch_lines(
        [
            "*--- rank 1 ---*",
            "*Captured stdout call*",
            "[[]?[]] from here",
            "*(after the test) ---*",
            "E *MismatchError: ranks made different calls*",
            "rank 1 died in the test: exit status 3",
            "*--- deadlock: rank 0 waits for 1, which waits for 0 ---*",
            "    0     1          recv(source=1*",
            "*--- ranks 0-1, stack ---*",
            "*def test_circle(comm): comm.recv(1 - comm.rank)",
        ]
    )
