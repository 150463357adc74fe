"""The pytest plugin: ``@pytest.mark.ranks(2, 4)`` runs a test on 2 ranks, and again on 4.

A marked test becomes one item for each number of ranks. In the user's pytest, the parent, such an
item runs neither the test nor its fixtures: it starts a job whose ranks each run pytest on that
very item, with the configuration of the parent (`pytest_rank`). Each rank reports its phases
through a memfd, and the parent makes one result of them (`pycoll._tools.pytest_verdict`).

Every pytest of a user who has pycoll loads this module, so what it needs is imported when it is.
"""

from __future__ import annotations

import argparse
import bdb
import math
import os
import re
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import pytest

from pycoll._tools import pytest_comm
from pycoll._tools.pytest_comm import RANK_PLUGIN

if TYPE_CHECKING:
    from pycoll._functions.call import InheritedDescriptors
    from pycoll._functions.ranks import Ranks
    from pycoll._launcher.job_spec import Options
    from pycoll._tools.pytest_verdict import Verdict

_SIZE = "_pycoll_ranks"  # the parameter of a marked test

# Options that are the parent's affair: which tests to run, what to write where, how to start ranks.
_NOT_FOR_RANKS = re.compile(
    r"file_or_dir|keyword|markexpr|deselect|ignore(_glob)?|pyargs|collectonly|maxfail|lf"
    r"|failedfirst|newfirst|cache\w*|last_failed_no_failures|stepwise\w*|setup(only|show|plan)"
    r"|durations\w*|max_warnings|xmlpath|junitprefix|pastebin|log_(file|cli)\w*|usepdb(_cls)?|trace"
    r"|basetemp|capture|no_(header|summary)|plugins|rootdir|inifilename|override_ini"
    r"|pythonwarnings|importmode|assertmode|confcutdir|noconftest|disable_plugin_autoload|version"
    r"|help|showfixtures|show_fixtures_per_test|markers|debug|traceconfig|pycoll_ticket|keep_ranks"
    # pytest-xdist, pytest-cov, pytest-rerunfailures, and plugins that write reports or choose tests
    r"|numprocesses|maxprocesses|maxworkerrestart|dist|distload|loadscopereorder|tx|px|rsync\w*"
    r"|looponfail|testrunuid|cov_\w+|no_cov|reruns\w*|only_rerun|rerun_\w+|fail_on_flaky"
    r"|htmlpath|json_report\w*|report_log|allure\w*|splits|group|shard_id|num_shards|testmon\w*"
)


# What users see: an option, the marker, the fixture.


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("pycoll_timeout", "seconds a test marked `ranks` may take", default="60")
    parser.addini("pycoll_keep_ranks", "as --keep-ranks", type="bool", default=False)
    group = parser.getgroup("pycoll")
    group.addoption(
        "--keep-ranks",
        action="store_true",
        default=False,
        help="run tests marked `ranks` on ranks that stay from test to test, until one fails",
    )
    parser.addoption("--pycoll-rank", dest="pycoll_ticket", help=argparse.SUPPRESS)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "ranks(n, ..., timeout=None): run the test on n ranks, once for each n given, for at most "
        "timeout seconds (None: the ini option pycoll_timeout). Fixture: comm.",
    )
    if config.option.pycoll_ticket:
        from pycoll._tools.pytest_rank import CommPlugin, RankReporter

        config.pluginmanager.register(RankReporter(config), RANK_PLUGIN)
        config.pluginmanager.register(CommPlugin(), "pycoll-late")
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
        ends_deadlocks=True,
        exports={"PYTEST_ADDOPTS": ""},  # the ranks are given the options that came of it
    )
    if item.config.option.keep_ranks or item.config.getini("pycoll_keep_ranks"):
        verdict = _run_on_kept(item, options)
    else:
        verdict = Verdict(run_ranks(options, lambda fd, ticket: _write_task(item, fd, ticket)))
    item.stash[_verdict_key] = verdict
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


_kept_key: pytest.StashKey[dict[int, Ranks]] = pytest.StashKey()
_MOST_KEPT = 16  # ranks that wait for tests, unless one test has more


def _run_on_kept(item: pytest.Function, options: Options) -> Verdict:
    """Run a test on ranks that have run others; they are given up when it fails."""
    from pycoll._functions.call import write_parcel
    from pycoll._functions.ranks import Ranks
    from pycoll._tools.pytest_verdict import Verdict

    kept = item.config.stash.setdefault(_kept_key, {})
    ranks = kept.pop(options.size, None)
    if ranks is None or ranks.is_over:
        while kept and sum(kept) + options.size > _MOST_KEPT:
            kept.pop(next(iter(kept))).close()  # the one used least recently
        ranks = Ranks(options, lambda fd, ticket: _write_task(item, fd, ticket, keeps=True))
    kept[options.size] = ranks
    head = {"nodeid": item.nodeid, "file": str(item.path)}
    verdict = Verdict(ranks.run(lambda fd, _: write_parcel(fd, head), options.timeout_s))
    if verdict.outcome == "failed":
        kept.pop(options.size).close()
    return verdict


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    try:
        return (yield)
    finally:  # before pytest-cov takes together what was measured
        for ranks in session.config.stash.get(_kept_key, {}).values():
            ranks.close()


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


def _write_task(
    item: pytest.Function, fd: int, ticket: InheritedDescriptors, keeps: bool = False
) -> None:
    """Tell the ranks which test to run and how; with `keeps` others follow."""
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
        "argv": ["pytest", *_arguments(item, whole_file=keeps), f"--pycoll-rank={ticket}"],
        "keeps": keeps,
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


def _arguments(item: pytest.Item, whole_file: bool) -> list[str]:
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
    return [*words, f"{item.path}{'' if whole_file else '::' + item.nodeid.partition('::')[2]}"]


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)
