"""`pycoll.run`: calls a function on several ranks from a script, a notebook or a test.

The ranks are fresh interpreters. The function goes to them, and what it returns or raises comes
back, through memfds that they inherit (`pycoll._functions.call`).
"""

from __future__ import annotations

import contextlib
import linecache
import math
import operator
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import CodeType, FunctionType, ModuleType
from typing import IO, Any, NamedTuple, NoReturn

import cloudpickle

from pycoll._functions import call
from pycoll._launcher.job_spec import Options
from pycoll._launcher.outcome import DEADLOCKED, TIMED_OUT, Outcome
from pycoll._launcher.spawn import Job
from pycoll._support import pickling
from pycoll._support.environment import encrypts, grace
from pycoll._support.public_edge import edge
from pycoll._support.wording import a_kind
from pycoll.errors import Error, OperationTimeout, PeerFailed

OF_RANKS = (0, TIMED_OUT, DEADLOCKED)
"""The statuses of jobs that have no culprit, and were ended by nothing but what the ranks do."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # those that end a job
_pickling = threading.Lock()  # what cloudpickle pickles by value is one setting for the process


WriteTask = Callable[[int, call.InheritedDescriptors], None]
"""Writes a parcel that `call.main` understands into a descriptor; the ranks have the ticket."""


@edge
def run(
    fn: Callable[..., Any],
    n: int,
    *args: Any,
    timeout: float | None = None,
    transport: str | None = None,
    tag_output: bool | None = None,
) -> list[Any]:
    """Call ``fn(comm, *args)`` on n ranks, each a fresh interpreter on this machine.

    `fn`, its arguments and its results are pickled with cloudpickle, so functions and classes of a
    notebook or a script's ``__main__`` work; those of modules are imported. Each rank has its own
    copy of the arguments, and this process's sys.path, sys.argv and working folder. What ranks
    print goes to sys.stdout and sys.stderr. May be called in any thread, also in several at once.

    Args:
        fn: called with the world communicator and `args`. ``sys.exit()`` in it returns None.
        n: number of ranks.
        args: passed on to `fn`.
        timeout: seconds for everything, the start of the ranks included; None: no limit.
        transport: as in `pycoll.init`; None: that of the environment.
        tag_output: begin each line that a rank prints with its rank; None: on a terminal.

    Returns:
        What `fn` has returned, by rank.

    Raises:
        TypeError, ValueError: an argument is wrong, `fn` does not take so many, or `fn`, an
            argument or a result cannot be pickled.
        Exception: what `fn` raised on the rank that failed first, with a note that names the rank
            and one that shows the traceback there; an `Error` if it cannot be pickled.
        PeerFailed: a rank died or exited instead of returning; `rank` and `reason` say which, how.
        MismatchError: the ranks made different calls, as `broadcast` with different roots; also if
            these were their last, and `fn` has returned on each of them.
        OperationTimeout: `timeout` passed; the message says what each rank was doing.
        Error: ranks wait for each other for ever (a deadlock); the message says who waits for whom,
            where. That is looked for when one has waited for 30 s (PYCOLL_WARN_AFTER; 0: never).
        KeyboardInterrupt: the ranks have been ended; a note says what each rank was doing, if one
            waited for others.
    """
    _check_callable(fn)
    options = checked_options(n, timeout, transport)._replace(
        tag_output=None if tag_output is None else bool(tag_output)
    )
    return results("pycoll.run", run_ranks(options, task(fn, args)), options)


def checked_options(n: int, timeout: float | None, transport: str | None) -> Options:
    """Return the options of a job from what `run` is given.

    Raises:
        TypeError, ValueError: an argument is wrong.
    """
    if transport is not None and not isinstance(transport, str):
        raise TypeError(f"transport is the name of one, not {a_kind(transport)}")
    return Options(
        size=_check_size(n),
        timeout_s=check_timeout(timeout),
        transport=default_transport() if transport is None else transport,
        encrypt=default_encryption(),
        grace_s=grace(os.environ),
        ends_deadlocks=True,
    )


def task(fn: Callable[..., Any], args: Sequence[Any]) -> WriteTask:
    """Return what writes the parcel of a call of a function into a descriptor.

    Raises:
        TypeError: `fn` cannot be called so; what is returned raises it if they cannot be pickled.
    """
    _check_call(fn, args)

    def write_task(fd: int, ticket: call.InheritedDescriptors) -> None:
        sources: dict[str, list[str]] = {}
        head = {
            "module": None,
            "path": path(),
            "argv": list(map(str, sys.argv)),
            "sources": sources,
        }

        def write(file: IO[bytes], hand_on: Callable[[pickle.PickleBuffer], object]) -> None:
            sources.update(_pickle((fn, args), file, hand_on))

        call.write_parcel(fd, head, write)

    return write_task


class Ended(NamedTuple):
    """A job that is over: how it ended, and what each rank has reported, None if nothing."""

    outcome: Outcome
    reports: list[call.Parcel | None]

    @property
    def reason(self) -> str:
        """What became of the rank that was the cause, for example "exit status 3"."""
        return self.outcome.reason or "it failed"

    @property
    def timed_out(self) -> bool:
        """Whether it was ended because it took too long."""
        return self.outcome.culprit is None and self.outcome.status == TIMED_OUT

    @property
    def deadlock(self) -> str:
        """How ranks wait for each other, if it was ended because that is for ever; else ""."""
        is_one = self.outcome.culprit is None and self.outcome.status == DEADLOCKED
        return self.outcome.report.partition(";")[0] if is_one else ""

    @property
    def table(self) -> list[str]:
        """What each rank was doing when the time was over, or in a deadlock."""
        return list(self.outcome.table)


def run_ranks(options: Options, write_task: WriteTask) -> Ended:
    """Run a job whose ranks do a task and report.

    Args:
        options: how to run it.
        write_task: writes the task.

    Raises:
        Error: the ranks could not be started, or their output cannot be written.
        KeyboardInterrupt: by Ctrl-C; other signals that ended the job take their course.
    """
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(memfd()) for _ in range(options.size + 1)]
        descriptors = [file.fileno() for file in files]
        ticket = call.InheritedDescriptors(descriptors[0], descriptors[1:])
        write_task(descriptors[0], ticket)
        # As multiprocessing does: -O, -X dev, -W and their like hold for the ranks too.
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        job = Job(
            [sys.executable, *flags, call.__file__, str(ticket)],
            options,
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
        )
        outcome = job.run()
        if outcome.culprit is None and outcome.status not in OF_RANKS:
            raise_ended(outcome)
        reports = []
        for file in files[1:]:
            reports.append(call.read_parcel(file.fileno()))
            file.close()  # a large one is not kept twice
    return Ended(outcome, reports)


def default_transport() -> str:
    """The transport of ranks for which none was chosen."""
    if "PYCOLL_JOB" in os.environ:  # what the environment says is about an outer job
        return "auto"
    return os.environ.get("PYCOLL_TRANSPORT") or "auto"


def default_encryption() -> bool:
    """Whether what travels between ranks is encrypted.

    Raises:
        BootstrapError: PYCOLL_ENCRYPT makes no sense.
    """
    return "PYCOLL_JOB" not in os.environ and encrypts(os.environ)


def path() -> list[str]:
    """The sys.path that ranks are given; what is no str there is not looked at by imports."""
    entries: list[Any] = sys.path
    return [entry for entry in entries if isinstance(entry, str)]


def memfd() -> IO[bytes]:
    """Return a file in memory, without a name."""
    return os.fdopen(os.memfd_create("pycoll"), "r+b", buffering=0)


def raise_ended(outcome: Outcome) -> NoReturn:
    """Raise what is due when the job was ended by something else than its ranks."""
    for signum in _SIGNALS:
        if outcome.status == 128 + signum:
            # It was meant for this program, which may end by it, or go on.
            try:
                signal.raise_signal(signum)
                if signum == signal.SIGINT:
                    raise KeyboardInterrupt
            except KeyboardInterrupt as exc:
                if outcome.table:
                    exc.add_note(f"what each rank did:{_rows(outcome.table)}")
                raise
    if outcome.status == 128 + signal.SIGPIPE:
        raise BrokenPipeError("nobody reads the ranks' output any more")
    raise Error(outcome.report)


def _rows(table: Sequence[str]) -> str:
    return "".join(f"\n    {row}" for row in table)


# Arguments.


def _check_callable(fn: Callable[..., Any]) -> None:
    if not callable(fn):
        raise TypeError(f"fn must be callable: fn(comm, *args), not {a_kind(fn)}")


def _check_call(fn: Callable[..., Any], args: Sequence[Any]) -> None:
    """Find out before ranks start that `fn` does not take these arguments."""
    import inspect

    _check_callable(fn)
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # of some functions in C nobody knows
        return
    try:
        signature.bind(None, *args)
    except TypeError as exc:
        name = getattr(fn, "__name__", type(fn).__name__)
        plain = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
        signature = inspect.Signature(plain)
        raise TypeError(
            f"{name}{signature} is called as {name}(comm, *args) with {len(args)} "
            f"argument{'s' * (len(args) != 1)} after comm: {exc}"
        ) from None


def _check_size(n: int) -> int:
    if isinstance(n, bool):
        raise TypeError("n is the number of ranks, not a bool")
    try:
        size = operator.index(n)
    except TypeError:
        raise TypeError(f"n is the number of ranks, an int, not {a_kind(n)}") from None
    if size < 1:
        raise ValueError(f"n is the number of ranks, at least 1, not {size}")
    return size


def check_timeout(timeout: float | None) -> float | None:
    """Return seconds, None: no limit.

    Raises:
        TypeError, ValueError: they make no sense.
    """
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"timeout is a number of seconds, not {a_kind(timeout)}")
    if not timeout > 0:
        raise ValueError(f"timeout is a number of seconds above 0, not {timeout}")
    return None if timeout == math.inf else float(timeout)


# The task.


class _FunctionPickler(pickling.Pickler):
    """Pickles by value also what is in a module that a fresh interpreter would not find.

    A test module is such a one when pytest has imported it by its path.
    """

    def __init__(self, file: IO[bytes], hand_on: Callable[[pickle.PickleBuffer], object]) -> None:
        super().__init__(file, protocol=5, buffer_callback=hand_on)
        self._seen: dict[str, bool] = {"__main__": True}  # cloudpickle knows about this one
        self._registered: list[ModuleType] = []
        self.files: set[str] = set()  # of the functions

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, CodeType):
            return pickling.reduce_code(obj, cell_name(obj.co_filename))
        if isinstance(obj, type | FunctionType):
            name: Any = obj.__module__
            if isinstance(name, str) and name not in self._seen:
                self._seen[name] = True
                module = sys.modules.get(name)
                if module is not None and not _is_importable(module):
                    cloudpickle.register_pickle_by_value(module)
                    self._registered.append(module)
            if isinstance(obj, FunctionType):
                self.files.add(obj.__code__.co_filename)
                self.globals_ref.setdefault(id(obj.__globals__), _Namespace(obj.__globals__))
        return super().reducer_override(obj)

    def forget(self) -> None:
        """Leave cloudpickle's settings as they were."""
        for module in self._registered:
            cloudpickle.unregister_pickle_by_value(module)


class _Namespace:
    """The globals of functions that are pickled by value, which a rank keeps (`call.namespace`)."""

    def __init__(self, names: dict[str, Any]) -> None:
        about = ("__package__", "__name__", "__path__", "__file__")  # for imports in functions
        self._about = {name: names[name] for name in about if name in names}

    def __reduce__(self) -> tuple[Any, ...]:
        return call.namespace, (self._about,)


def _pickle(
    task: object, file: IO[bytes], hand_on: Callable[[pickle.PickleBuffer], object]
) -> dict[str, list[str]]:
    """Pickle a task; returns the lines of its functions' files that are in no folder.

    The cells of a notebook are such files, and only this process can show their lines.
    """
    with _pickling:
        pickler = _FunctionPickler(file, hand_on)
        try:
            pickler.dump(task)
        except (MemoryError, OSError):
            raise
        except Exception as exc:
            error = TypeError(f"fn and its arguments cannot be pickled: {exc}")
            for note in getattr(exc, "__notes__", ()):
                error.add_note(note)
            raise error from None
        finally:
            pickler.forget()
    cells = [name for name in pickler.files & linecache.cache.keys() if not os.path.exists(name)]
    return {cell_name(name): linecache.getlines(name) for name in cells}


def cell_name(file: str) -> str:
    """Return a file as IPython shows it, if that is a cell of a notebook: "Cell In[11]"."""
    ipython = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    label = getattr(getattr(ipython, "compile", None), "format_code_name", lambda file: None)(file)
    return " ".join(label) if label else file


def _is_importable(module: ModuleType) -> bool:
    """Whether a fresh interpreter with this sys.path finds the same module."""
    file = getattr(module, "__file__", None)
    if file is None or not file.endswith(".py"):
        return True  # built in, or made by the import of another module
    spec = _find(module.__name__)
    return (
        spec is not None
        and spec.origin is not None
        and os.path.realpath(spec.origin) == os.path.realpath(file)
    )


def _find(name: str) -> ModuleSpec | None:
    """Find a module again although it has been imported; its packages are not imported for it."""
    package = name.rpartition(".")[0]
    folders = None
    if package:
        spec = _find(package)
        if spec is None:
            return None
        # A package may have changed its own path when it was imported, and would do so again.
        folders = getattr(sys.modules.get(package), "__path__", spec.submodule_search_locations)
    for finder in sys.meta_path:
        find_spec = getattr(finder, "find_spec", None)
        spec = find_spec(name, folders) if find_spec is not None else None
        if spec is not None:
            return spec  # type: ignore[no-any-return]
    return None


# The results.


def results(name: str, ended: Ended, options: Options) -> list[Any]:
    """Return what the ranks have returned, or raise for the one that was the cause.

    Args:
        name: of the function that has run them.
        ended: what came of it.
        options: how they ran.

    Raises:
        Exception: see `run`.
    """
    outcome, reports = ended.outcome, ended.reports
    size = len(reports)
    if ended.timed_out:
        raise OperationTimeout(
            f"{name} on {size} ranks took longer than {options.timeout_s:g} s; what each rank did:"
            f"{_rows(ended.table)}"
        )
    if ended.deadlock:
        raise Error("\n".join([f"{name} on {size} ranks: {ended.deadlock}", *ended.table]))
    if outcome.culprit is not None:
        report = reports[outcome.culprit]
        if report is None or report.head["kind"] != "raised":
            said = f": {report.head['text']}" if report and report.head["kind"] == "exited" else ""
            raise PeerFailed(outcome.culprit, f"{ended.reason}{said}")
        raise _rebuilt(report, outcome.culprit, size) from None
    values = []
    for rank, report in enumerate(reports):
        if report is None:
            raise PeerFailed(rank, "it exited with status 0 before fn had returned")
        try:
            values.append(report.load())
        except Exception as exc:
            raise Error(f"the result of rank {rank} cannot be unpickled here: {exc}") from exc
    return values


def _rebuilt(report: call.Parcel, rank: int, size: int) -> BaseException:
    """The exception that a rank has reported, with notes on where it comes from."""
    head = report.head
    error: object = None
    why = "pickled"
    if head["pickled"]:
        why = "unpickled"
        with contextlib.suppress(Exception):
            error = report.load()
    if not isinstance(error, BaseException):
        error = Error(f"{head['summary']}  [its type, {head['type']}, cannot be {why}]")
    error.add_note(f"raised on rank {rank} of {size}")
    if head["traceback"]:
        error.add_note(head["traceback"])
    return error
