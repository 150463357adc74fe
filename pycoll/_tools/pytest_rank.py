"""The pytest plugin of a rank's own pytest, which runs what its parent says (`pytest_plugin`)."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Generator, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

import pytest

from pycoll._tools import pytest_comm

if TYPE_CHECKING:
    from pycoll._communicator.communicator import Communicator
    from pycoll._functions.serving import PoolTask


class CommPlugin:
    """Adds the fixture `comm` when all other plugins have added theirs: the last one counts."""

    @pytest.hookimpl(trylast=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        session.config.pluginmanager.register(pytest_comm, "pycoll-comm")


class RankReporter:
    """The plugin of a rank's own pytest: keeps it quiet, runs one test, and reports."""

    def __init__(self, config: pytest.Config) -> None:
        from pycoll._functions.call import own_report, read_task

        self._config = config
        self._task = read_task(config.option.pycoll_ticket).head
        self._report = own_report(config.option.pycoll_ticket)
        self._kept: Iterator[PoolTask] = iter(())  # the tests that ranks which stay are given
        self._now: PoolTask | None = None
        self._comm: Communicator | None = None
        if self._task["keeps"]:
            from pycoll._functions.serving import Worker

            self._kept = Worker(self._report).tasks()
            self._begin(next(self._kept))
        self._said = _nothing_said()
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

    def _begin(self, test: PoolTask) -> None:
        self._now, self._report, self._said = test, test.report, _nothing_said()
        self._task = {**self._task, "nodeid": test.parcel.head["nodeid"]}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """On ranks that stay: run one test after the other."""
        if self._now is None:
            return None
        from pycoll._functions.serving import interruptible

        items = {item.nodeid: item for item in session.items}
        for test in itertools.chain([self._now], self._kept):
            if test is not self._now:
                self._begin(test)
            nodeid = test.parcel.head["nodeid"]
            if nodeid not in items:  # of another file, which is collected as a whole
                found = session.perform_collect([test.parcel.head["file"]])
                items |= {item.nodeid: item for item in found}
            with interruptible():
                if nodeid in items:
                    item = items[nodeid]
                    item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
                else:
                    self._note(f"{nodeid} was not collected here")
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            self._said["done"] = True
            self._write()
            test.end(self._looked_back)
        return True

    def join(self) -> Communicator:
        """The world communicator."""
        from pycoll._functions.call import join

        if self._now is not None:
            comm: Communicator = self._now.comm
            return comm
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
        chosen = list(items)
        if self._now is None:
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
            if self._now is not None:
                self._now.raised(error)
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
        if self._now is None:
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


def _nothing_said() -> dict[str, Any]:
    return {"phases": [], "warnings": [], "done": False}


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
