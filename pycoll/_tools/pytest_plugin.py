"""The pytest plugin: ``@pytest.mark.ranks(2, 4)`` runs a test on 2 ranks, and again on 4.

A marked test becomes one item for each number of ranks. In the user's pytest, the parent, such an
item runs neither the test nor its fixtures: it starts a job whose ranks each run pytest on that
very item, with the configuration of the parent (`_RankReporter`). Each rank reports its phases
through a memfd, and the parent makes one result of them (`pycoll._tools.pytest_verdict`).

Every pytest of a user who has pycoll loads this module, so what it needs is imported when it is.
"""

from __future__ import annotations

import argparse
import bdb
import math
import os
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Generator
from types import FrameType
from typing import TYPE_CHECKING, Any

import pytest

from pycoll._tools import pytest_comm
from pycoll._tools.pytest_comm import RANK_PLUGIN

if TYPE_CHECKING:
    from pycoll._communicator.communicator import Communicator
    from pycoll._functions.call import InheritedDescriptors
    from pycoll._tools.pytest_verdict import Verdict

_SIZE = "_pycoll_ranks"  # the parameter of a marked test

# Options that are the parent's affair: which tests to run, what to write where, how to start ranks.
_NOT_FOR_RANKS = re.compile(
    r"file_or_dir|keyword|markexpr|deselect|ignore(_glob)?|pyargs|collectonly|maxfail|lf"
    r"|failedfirst|newfirst|cache\w*|last_failed_no_failures|stepwise\w*|setup(only|show|plan)"
    r"|durations\w*|max_warnings|xmlpath|junitprefix|pastebin|log_(file|cli)\w*|usepdb(_cls)?|trace"
    r"|basetemp|capture|no_(header|summary)|plugins|rootdir|inifilename|override_ini"
    r"|pythonwarnings|importmode|assertmode|confcutdir|noconftest|disable_plugin_autoload|version"
    r"|help|showfixtures|show_fixtures_per_test|markers|debug|traceconfig|pycoll_ticket"
    # pytest-xdist, pytest-cov, pytest-rerunfailures, and plugins that write reports or choose tests
    r"|numprocesses|maxprocesses|maxworkerrestart|dist|distload|loadscopereorder|tx|px|rsync\w*"
    r"|looponfail|testrunuid|cov_\w+|no_cov|reruns\w*|only_rerun|rerun_\w+|fail_on_flaky"
    r"|htmlpath|json_report\w*|report_log|allure\w*|splits|group|shard_id|num_shards|testmon\w*"
)


# What users see: an option, the marker, the fixture.


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("pycoll_timeout", "seconds a test marked `ranks` may take", default="60")
    parser.addoption("--pycoll-rank", dest="pycoll_ticket", help=argparse.SUPPRESS)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "ranks(n, ..., timeout=None): run the test on n ranks, once for each n given, for at most "
        "timeout seconds (None: the ini option pycoll_timeout). Fixture: comm.",
    )
    if config.option.pycoll_ticket:
        config.pluginmanager.register(_RankReporter(config), RANK_PLUGIN)
        config.pluginmanager.register(_CommPlugin(), "pycoll-late")
    else:
        _seconds(config.getini("pycoll_timeout"), "the ini option pycoll_timeout")


@pytest.fixture
def _pycoll_ranks(request: pytest.FixtureRequest) -> int:
    size: int = request.param
    return size


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("ranks")
    if marker is None:
        return
    try:
        sizes, _ = _read_marker(marker)
    except pytest.UsageError as exc:
        pytest.fail(f"{metafunc.definition.nodeid}: {exc}", pytrace=False)
    metafunc.fixturenames.append(_SIZE)
    ids = [f"{size}rank{'s' * (size != 1)}" for size in sizes]  # no space: they are typed in shells
    metafunc.parametrize(_SIZE, sizes, ids=ids, indirect=True)


def _read_marker(marker: pytest.Mark) -> tuple[list[int], float | None]:
    """Return the numbers of ranks and the timeout of a marker.

    Raises:
        pytest.UsageError: it makes no sense.
    """
    usage = "@pytest.mark.ranks takes numbers of ranks, for example @pytest.mark.ranks(2, 4)"
    wrong = [n for n in marker.args if not isinstance(n, int) or isinstance(n, bool) or n < 1]
    if wrong or not marker.args:
        raise pytest.UsageError(f"{usage}{f', not {wrong[0]!r}' if wrong else ''}")
    unknown = ", ".join(marker.kwargs.keys() - {"timeout"})
    if unknown:
        raise pytest.UsageError(f"{usage}, and timeout=seconds, but not {unknown}")
    timeout = marker.kwargs.get("timeout")
    if timeout is not None:
        timeout = _seconds(timeout, "timeout of @pytest.mark.ranks")
    return list(dict.fromkeys(marker.args)), timeout


def _seconds(value: object, what: str) -> float:
    try:
        seconds = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        seconds = math.nan
    if not seconds > 0:
        raise pytest.UsageError(f"{what} is a number of seconds above 0, not {value!r}")
    return seconds


# The parent.

_verdict_key: pytest.StashKey[Verdict | None] = pytest.StashKey()


def _size_of(item: pytest.Item) -> int | None:
    """The number of ranks of a marked test."""
    callspec = getattr(item, "callspec", None)
    size: int | None = None if callspec is None else callspec.params.get(_SIZE)
    return size


def _starts_ranks(item: pytest.Item) -> bool:
    """Whether this process runs a test by starting its ranks."""
    return _size_of(item) is not None and not item.config.pluginmanager.hasplugin(RANK_PLUGIN)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _starts_ranks(item) and isinstance(item, pytest.Function):
            # Its fixtures are made in the ranks. They get folders inside ours for tmp_path.
            has_tmp = item.config.pluginmanager.hasplugin("tmpdir")
            item.fixturenames = ["tmp_path_factory"] if has_tmp else []
            if int(os.environ.get("PYCOLL_SIZE", "1")) > 1:
                raise pytest.UsageError(
                    f"{item.nodeid} starts its own ranks, and this pytest is one of "
                    f"{os.environ['PYCOLL_SIZE']} ranks already: call pytest without pycoll-run"
                )


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("ranks") and _size_of(item) is None:
        pytest.fail(
            "@pytest.mark.ranks is for functions, and for methods of classes that are no "
            "unittest.TestCase",
            pytrace=False,
        )


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> object:
    item, size = pyfuncitem, _size_of(pyfuncitem)
    if size is None or not _starts_ranks(item):
        return None
    from pycoll._functions.function import default_encryption, default_transport, run_ranks
    from pycoll._launcher.job_spec import Options
    from pycoll._tools.pytest_verdict import Verdict

    item.stash[_verdict_key] = None  # it may be run again
    marker = item.get_closest_marker("ranks")
    assert marker is not None
    timeout = _read_marker(marker)[1] or float(item.config.getini("pycoll_timeout"))
    options = Options(
        size=size,
        timeout_s=None if timeout == math.inf else timeout,
        transport=default_transport(),
        encrypt=default_encryption(),
        tag_output=True,
        exports={"PYTEST_ADDOPTS": ""},  # the ranks are given the options that came of it
    )
    ended = run_ranks(options, lambda fd, ticket: _write_task(item, fd, ticket))
    item.stash[_verdict_key] = verdict = Verdict(ended)
    verdict.warn_again()
    match verdict.outcome:  # the report is completed below, by what only the ranks know
        case "failed" if item.config.option.usepdb:
            # The one failure for which pytest starts no debugger.
            raise bdb.BdbQuit("a rank has no terminal: --pdb cannot stop there")
        case "failed":
            pytest.fail(verdict.reason, pytrace=False)
        case "xfailed":
            raise pytest.xfail.Exception(verdict.reason)
        case "skipped":
            pytest.skip(verdict.reason)
    return True


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.excinfo is not None:
        pytest_comm.explain_missing(report, call.excinfo.value)
    verdict = item.stash.get(_verdict_key, None)
    if verdict is not None and call.when == "call":
        verdict.fill(report)
    return report


def _write_task(item: pytest.Function, fd: int, ticket: InheritedDescriptors) -> None:
    """Tell the ranks which test to run and how."""
    from pycoll._functions import function
    from pycoll._functions.call import write_parcel

    factory: Any = item.funcargs.get("tmp_path_factory")
    options = {
        name: value
        for name, value in vars(item.config.option).items()
        if not _NOT_FOR_RANKS.fullmatch(name) and _is_plain(value)
    }
    head = {
        "path": function.path(),
        "module": "pytest",
        "argv": ["pytest", *_arguments(item), f"--pycoll-rank={ticket}"],
        "nodeid": item.nodeid,
        "options": options,
        "basetemp": str(factory.mktemp("ranks")) if factory is not None else None,
        "addopts": os.environ.get("PYTEST_ADDOPTS"),
        "coverage": _coverage(item.config),
    }
    write_parcel(fd, head)


def _coverage(config: pytest.Config) -> dict[str, Any] | None:
    """What coverage.py measures, if pytest-cov has it do so: ranks measure the same.

    Their files are beside its own, and it takes all together at the end.
    """
    controller = getattr(config.pluginmanager.getplugin("_cov"), "cov_controller", None)
    measured = getattr(controller, "cov", None)
    if controller is None or measured is None:
        return None
    return {
        "source": list(controller.cov_source) if controller.cov_source else None,
        "branch": controller.cov_branch,
        "config_file": str(controller.cov_config) if controller.cov_config else False,
        "data_file": os.path.abspath(measured.config.data_file),
    }


def _arguments(item: pytest.Item) -> list[str]:
    """The command line of a rank: what pytest must know before it reads conftest files.

    The rest is copied from the parent's options, so that those of conftest files are right too.
    """
    config, option = item.config, item.config.option
    words = [
        f"--rootdir={config.rootpath}",
        f"-c{config.inipath or os.devnull}",
        f"--import-mode={option.importmode}",
        f"--assert={option.assertmode}",
        "--capture=no",  # the parent captures, also of a rank that dies
    ]
    if option.confcutdir:
        words.append(f"--confcutdir={option.confcutdir}")
    if option.noconftest:
        words.append("--noconftest")
    if getattr(option, "disable_plugin_autoload", False):
        words.append("--disable-plugin-autoload")
    if config.pluginmanager.hasplugin("_cov"):  # pytest-cov would write files of its own
        words.append("--no-cov")
    words += [f"-p{plugin}" for plugin in option.plugins]
    words += [f"-W{line}" for line in option.pythonwarnings or []]
    words += [f"-o{line}" for line in (*(option.override_ini or []), "addopts=")]
    return [*words, f"{item.path}::{item.nodeid.partition('::')[2]}"]


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


# A rank.


class _CommPlugin:
    """Adds the fixture `comm` when all other plugins have added theirs: the last one counts."""

    @pytest.hookimpl(trylast=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        session.config.pluginmanager.register(pytest_comm, "pycoll-comm")


class _RankReporter:
    """The plugin of a rank's own pytest: keeps it quiet, runs one test, and reports."""

    def __init__(self, config: pytest.Config) -> None:
        from pycoll._functions.call import own_report, read_task

        self._config = config
        self._task = read_task(config.option.pycoll_ticket).head
        self._report = own_report(config.option.pycoll_ticket)
        self._said: dict[str, Any] = {"phases": [], "warnings": [], "done": False}
        self._comm: Communicator | None = None
        self._place: list[Any] = ["", 0]  # of the test
        self._tell: Callable[..., object] | None = None
        self._take_options()
        if self._task["addopts"] is None:
            os.environ.pop("PYTEST_ADDOPTS", None)
        else:
            os.environ["PYTEST_ADDOPTS"] = self._task["addopts"]
        signal.signal(signal.SIGTERM, self._say_where_and_end)
        # What pytest prints goes nowhere: it writes to what sys.stdout is now. And the parent has
        # shown the warnings of plugins that are configured next.
        self._stdout, self._showwarning = sys.stdout, warnings.showwarning
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        config.add_cleanup(sys.stdout.close)
        warnings.showwarning = lambda *args, **kwargs: None

    def join(self) -> Communicator:
        """The world communicator."""
        from pycoll._functions.call import join

        if self._comm is None:
            self._comm, self._tell = join()
        return self._comm

    def _take_options(self) -> None:
        options = vars(self._config.option)
        options |= {k: v for k, v in self._task["options"].items() if k in options}
        if self._task["basetemp"] is not None:
            options["basetemp"] = os.path.join(self._task["basetemp"], os.environ["PYCOLL_RANK"])

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self) -> None:
        from pycoll._functions.call import refuse_debuggers

        refuse_debuggers()
        sys.stdout, warnings.showwarning = self._stdout, self._showwarning
        for name in ("lfplugin", "nfplugin"):  # what failed last is the parent's knowledge
            self._config.pluginmanager.unregister(name=name)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(
        self, items: list[pytest.Item]
    ) -> Generator[None, object, object]:
        chosen = [item for item in items if item.nodeid == self._task["nodeid"]]
        result = yield
        items[:] = chosen  # whatever other plugins select
        return result

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._note(report.longreprtext)

    def pytest_internalerror(self, excrepr: object) -> None:
        self._note(str(excrepr))

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        if not self._has_run():
            self._note(str(excinfo.getrepr(style="short")))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if self._has_run():  # by a plugin that runs what failed again; in the parent it can
            pytest.exit("this rank has run its test", returncode=1)
        self._place = [str(item.path), (item.location[1] or 0) + 1]

    def _has_run(self) -> bool:
        return any(phase["when"] == "teardown" for phase in self._said["phases"])

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        if call.excinfo is not None:
            _hide_pycoll()
        report = yield
        phase, error = _phase(report), call.excinfo and call.excinfo.value
        if error is not None and phase["outcome"].endswith("failed"):
            phase["victim"] = _is_victim(error)
            if self._tell is not None:
                self._tell(type(error), error, error.__traceback__)
        elif report.failed:
            phase["outcome"] = "xpassed(strict)"
        self._said["phases"].append(phase)
        self._write()
        return report

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, when: str) -> None:
        if when == "runtest":
            kind, found = warning_message.category, warning_message
            self._said["warnings"].append(
                [kind.__module__, kind.__name__, str(found.message), found.filename, found.lineno]
            )

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        from pycoll._functions.call import at_exit

        if not self._said["phases"]:
            self._note(f"{self._task['nodeid']} was not collected here")
        self._said["done"] = True
        self._write()
        if self._tell is not None:
            at_exit(self._looked_back, self._tell)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # Nobody reads the summary that pytest would make next, which takes time in some plugins.
        raise SystemExit(int(exitstatus))

    def _say_where_and_end(self, signum: int, frame: FrameType | None) -> None:
        """On SIGTERM, which comes when the test takes too long: report the stack, and die by it."""
        found: list[tuple[FrameType, int]] = []
        while frame is not None:  # outward to pytest; nobody looks for what pycoll calls
            name = frame.f_globals.get("__name__", "")
            if name.startswith(("_pytest.", "pluggy.")):
                break
            found = [] if name.startswith("pycoll.") else [(frame, frame.f_lineno), *found]
            frame = frame.f_back
        if found:
            self._said["stack"] = "".join(
                traceback.StackSummary.extract(iter(found)).format()
            ).rstrip()
            self._write()
        signal.signal(signum, signal.SIG_DFL)
        signal.raise_signal(signum)

    def _looked_back(self, error: BaseException) -> None:
        """Report that other ranks have made other calls, which shows when this one leaves."""
        kind = type(error)
        text = f"{kind.__module__}.{kind.__name__}: {error}"
        shown = "".join(f"E   {line}\n" for line in text.splitlines())
        self._add("after the test", shown, [*self._place, text])

    def _note(self, text: str) -> None:
        """Report a failure of pytest's rather than the test's."""
        lines = text.strip().splitlines() or [""]
        self._add("pytest", text, ["", 0, lines[-1]])

    def _add(self, when: str, text: str, crash: list[Any]) -> None:
        phase = {"when": when, "outcome": "failed", "victim": False, "text": text}
        self._said["phases"].append({**phase, "crash": crash, "sections": []})
        self._write()

    def _write(self) -> None:
        from pycoll._functions.call import write_parcel

        write_parcel(self._report, self._said)


def _phase(report: pytest.TestReport) -> dict[str, Any]:
    """What the parent must know of a test's setup, call or teardown."""
    outcome: str = report.outcome
    if hasattr(report, "wasxfail"):
        outcome = "xfailed" if report.skipped else "xpassed"
    skip = report.longrepr if isinstance(report.longrepr, tuple) else ("", 0, "")
    reason = getattr(report, "wasxfail", None) or skip[2].removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    text = report.longreprtext
    return {
        "when": report.when,
        "outcome": outcome,
        "victim": False,
        "reason": reason,
        "skip": [str(skip[0]), skip[1], skip[2]],
        "text": text,
        "crash": [crash.path, crash.lineno, crash.message] if crash else ["", 0, text[:200]],
        "sections": [[name, content] for name, content in report.sections],
    }


def _hide_pycoll() -> None:
    """Leave pycoll's own frames out of tracebacks, unless they are those of a bug in it."""
    from pycoll.errors import Error

    def hide(excinfo: pytest.ExceptionInfo[BaseException]) -> bool:
        return isinstance(excinfo.value, Error)

    for name, module in list(sys.modules.items()):
        if name.startswith("pycoll."):
            vars(module)["__tracebackhide__"] = hide


def _is_victim(error: BaseException) -> bool:
    from pycoll.errors import BootstrapError, PeerFailed

    return isinstance(error, PeerFailed | BootstrapError)
