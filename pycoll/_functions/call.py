"""What a rank of `pycoll.run` runs, and how values travel between it and its parent: in parcels.

A parcel is written to a memfd that the rank inherits: nothing to unlink, and as large as memory. It
has a head of plain values, which can always be read, and a pickled value, which may need more.

    where the index is, and its bytes (8 each)     0 until a parcel is whole
    pickle, then its out-of-band buffers
    index: marshal of the head, and of the length of each piece before

A rank runs this file by itself, `python call.py TICKET`, because where pycoll is found is a thing
that only the parent's sys.path says. So at its top it imports the standard library only.
"""

from __future__ import annotations

import marshal
import os
import pickle
import re
import struct
import sys
from collections.abc import Callable
from types import TracebackType
from typing import IO, Any, NamedTuple, NoReturn

Head = dict[str, Any]
"""The head of a parcel: plain values only (None, bool, int, float, str, bytes, list, dict)."""

Write = Callable[[IO[bytes], Callable[[pickle.PickleBuffer], object]], None]
"""Pickles a value into a file, and hands its large buffers on."""

Tell = Callable[[type[BaseException], BaseException, Any], object]
"""Called like sys.excepthook."""

_HEADER = struct.Struct("<QQ")
_CELL = re.compile(r'File "(Cell In\[\d+\])", line')  # IPython shows them without "File"
_READ = 1 << 30  # a single read gives at most 2 GiB


class InheritedDescriptors(NamedTuple):
    """The descriptors a rank inherits: its task, and where each rank puts its report.

    In place of the latter those of a pool inherit sockets (`serving`).
    """

    task: int
    reports: list[int]

    def __str__(self) -> str:
        return f"{self.task}:{','.join(map(str, self.reports))}"

    @classmethod
    def read(cls, text: str) -> InheritedDescriptors:
        """Read what `str` gives."""
        task, _, reports = text.partition(":")
        return cls(int(task), [int(number) for number in reports.split(",")])


class Parcel(NamedTuple):
    """A parcel that was read; `load` unpickles its value, arrays in it are writable."""

    head: Head
    pieces: list[bytearray]

    def load(self) -> Any:
        """Return the value. Raises whatever unpickling it does."""
        pickled, *buffers = self.pieces
        return pickle.loads(pickled, buffers=buffers)


def write_parcel(fd: int, head: Head, write: Write | None = None) -> None:
    """Write a parcel; one that was there before is no longer found once this one is whole.

    Raises:
        Exception: whatever `write` raises; the earlier parcel stays.
    """
    with open(fd, "wb", closefd=False) as file:
        file.seek(max(os.fstat(fd).st_size, _HEADER.size))
        start, lengths = file.tell(), [0]
        if write is not None:
            buffers: list[pickle.PickleBuffer] = []
            write(file, buffers.append)
            lengths = [file.tell() - start]
            for buffer in buffers:
                with buffer.raw() as view:
                    lengths.append(file.write(view))
        at = file.tell()
        length = file.write(marshal.dumps((head, start, lengths)))
    os.pwrite(fd, _HEADER.pack(at, length), 0)


def read_parcel(fd: int) -> Parcel | None:
    """Read the last parcel that is whole, if there is one. The descriptor's offset stays."""
    header = os.pread(fd, _HEADER.size, 0)
    at, length = _HEADER.unpack(header) if header else (0, 0)
    if not at:
        return None
    head, start, lengths = marshal.loads(_read(fd, at, length))
    pieces = []
    for length in lengths:
        pieces.append(_read(fd, start, length))
        start += length
    return Parcel(head, pieces)


def _read(fd: int, at: int, length: int) -> bytearray:
    data = bytearray(length)
    with memoryview(data) as view:
        done = 0
        while done < length:
            with view[done : done + _READ] as part:
                count = os.preadv(fd, [part], at + done)
            if not count:
                raise EOFError("a parcel is shorter than it says")
            done += count
    return data


def own_report(ticket: str) -> int:
    """Return the descriptor of this rank's report, and close all others on a ticket."""
    task, reports = InheritedDescriptors.read(ticket)
    own = 0
    for rank, fd in enumerate(reports):
        if rank == int(os.environ["PYCOLL_RANK"]):
            own = fd
            os.set_inheritable(fd, False)
        else:
            os.close(fd)
    os.close(task)
    return own


def read_task(ticket: str) -> Parcel:
    """Return the task that a ticket names; all ranks read the same one."""
    parcel = read_parcel(InheritedDescriptors.read(ticket).task)
    assert parcel is not None
    return parcel


def report_value(report: int, value: object) -> None:
    """Write what fn has returned.

    Raises:
        UnpicklableError: it cannot be pickled; the message names its type.
    """
    try:
        _write_pickled(report, {"kind": "returned"}, value)
    except (MemoryError, OSError):  # of the memfd, not of the value
        raise
    except Exception as exc:
        raise UnpicklableError(
            f"the result of rank {os.environ['PYCOLL_RANK']}, of type {_name(type(value))}, "
            f"cannot be pickled: {exc}"
        ) from None


class UnpicklableError(Exception):
    """A result cannot be pickled. The caller of `pycoll.run` gets a TypeError."""


def report_error(report: int, error: BaseException) -> None:
    """Write the exception that ended fn: itself if it can be pickled, and its text in any case.

    One without a traceback has arisen in no line of the user's.
    """
    import traceback

    text = ""
    if error.__traceback__ is not None:
        from pycoll._world.session import format_error

        text = format_error(error).rstrip()
    head = {
        "kind": "raised",
        "type": _name(type(error)),
        "summary": "".join(traceback.format_exception_only(error)).strip(),
        "traceback": _CELL.sub(r"\1, line", text),
    }
    try:
        _write_pickled(report, {**head, "pickled": True}, error)
    except BaseException:
        write_parcel(report, {**head, "pickled": False})


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")


def _write_pickled(fd: int, head: Head, value: object) -> None:
    """Write a parcel with a value, by cloudpickle if pickle is not enough."""
    size = os.fstat(fd).st_size

    def write(file: IO[bytes], hand_on: Callable[[pickle.PickleBuffer], object]) -> None:
        pickle.Pickler(file, protocol=5, buffer_callback=hand_on).dump(value)

    try:
        write_parcel(fd, head, write)
    except (pickle.PicklingError, TypeError, AttributeError):
        # What was defined in the parent's __main__ comes back by value, as it went. It is not
        # imported before it is needed: that takes as long as the interpreter's start.
        from pycoll._support import pickling

        def write_by_value(
            file: IO[bytes], hand_on: Callable[[pickle.PickleBuffer], object]
        ) -> None:
            pickling.Pickler(file, protocol=5, buffer_callback=hand_on).dump(value)

        os.truncate(fd, size)
        write_parcel(fd, head, write_by_value)


_namespaces: dict[str, dict[str, Any]] = {}


def namespace(about: dict[str, Any]) -> dict[str, Any]:
    """Return the globals of functions that came by value: of each module one dictionary.

    What such a function makes global is there when another one comes later. What its caller has as
    a global of that name comes with the function, and takes its place.

    Args:
        about: the names by which imports find their way, `__name__` first of all.
    """
    kept = _namespaces.setdefault(about.get("__name__", ""), {})
    kept.update(about)
    return kept


def join() -> tuple[Any, Tell]:
    """Join the job; returns the world communicator, and what tells the job that this rank raised.

    `pycoll.init` leaves the telling to sys.excepthook, which also prints. Here the parent shows the
    exception, so the hook is taken with nothing behind it that prints.
    """
    from pycoll._world.session import init

    before, sys.excepthook = sys.excepthook, _say_nothing
    try:
        return init(), sys.excepthook
    finally:
        sys.excepthook = before


def _say_nothing(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    pass


def load_call(task: Parcel) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return fn and its arguments, but for the communicator."""
    if task.head["sources"]:
        import linecache

        for name, lines in task.head["sources"].items():
            linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    try:
        fn, args = task.load()
    except Exception as exc:
        exc.add_note("(when fn and its arguments were unpickled)")
        raise
    return fn, args


def value_of(fn: Callable[..., Any], comm: Any, args: tuple[Any, ...], report: int) -> Any:
    """Call fn; `sys.exit()` in it returns None, and why it calls it otherwise is written."""
    try:
        return fn(comm, *args)
    except SystemExit as exc:
        if exc.code in (None, 0):
            return None
        if isinstance(exc.code, str):
            write_parcel(report, {"kind": "exited", "text": exc.code})
        raise


def _call(task: Parcel, report: int) -> None:
    tell: Tell = _say_nothing
    try:
        fn, args = load_call(task)
        # After fn's modules: what they set in the environment for NumPy still counts.
        comm, tell = join()
        refuse_debuggers()
        report_value(report, value_of(fn, comm, args, report))
        at_exit(lambda error: report_error(report, error), tell)
    except SystemExit:
        raise
    except UnpicklableError as exc:
        fail(report, TypeError(str(exc)), tell)
    except BaseException as exc:
        fail(report, exc.with_traceback(outside(exc.__traceback__)), tell)


def fail(report: int, error: BaseException, tell: Tell) -> NoReturn:
    """End this rank with the exception that fn has raised."""
    report_error(report, error)
    tell(type(error), error, error.__traceback__)
    sys.exit(1)


def refuse_debuggers() -> None:
    """Have debuggers say that they cannot work here, unless the user has chosen one."""
    if "PYTHONBREAKPOINT" in os.environ:
        return

    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise RuntimeError(
            f"a debugger on rank {os.environ['PYCOLL_RANK']}: a rank has no terminal. Debug with "
            "one rank in a plain script, or set PYTHONBREAKPOINT to a debugger that needs none"
        )

    sys.breakpointhook = refuse
    pdb: Any = sys.modules.get("pdb")
    if pdb is not None:
        pdb.set_trace = refuse
    else:  # hardly any rank imports it: that takes a fifth of what its start does
        sys.meta_path.insert(0, _PdbFinder(refuse))


class _PdbFinder:
    """Finds pdb as the others do, and gives it another `set_trace` when it is imported."""

    def __init__(self, set_trace: Callable[..., NoReturn]) -> None:
        self._set_trace = set_trace

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "pdb":
            return None
        from importlib.util import find_spec

        sys.meta_path.remove(self)
        spec: Any = find_spec(name)
        if spec is not None:
            load = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                load(module)
                module.set_trace = self._set_trace

            spec.loader.exec_module = exec_module
        return spec


def at_exit(report: Callable[[BaseException], object], tell: Tell) -> None:
    """Report what this rank finds when it leaves the job, at the end of the interpreter.

    It looks back there: other ranks may have made another last call. That it prints would say
    nothing to who called `pycoll.run`.
    """

    def found(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        report(error)
        tell(kind, error, trace)

    sys.excepthook = found


def outside(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames of pycoll that it begins with."""
    here = os.path.dirname(__file__)
    while trace is not None and os.path.dirname(trace.tb_frame.f_code.co_filename) == here:
        trace = trace.tb_next
    return trace


def _measure(settings: dict[str, Any]) -> None:
    """Have coverage.py note what runs here, and write a file beside that of the parent."""
    import atexit

    import coverage

    if coverage.Coverage.current() is None:  # else its own `patch = subprocess` has begun
        measured = coverage.Coverage(data_suffix=True, **settings)
        names = ["module-not-imported", "module-not-measured", "no-data-collected"]
        measured.set_option("run:disable_warnings", names)  # the parent says so, if it is so
        measured.start()
        atexit.register(measured.save)
        atexit.register(measured.stop)


def main() -> None:
    """Do the task: run a module as `python -m` does, or call a function with the communicator."""
    ticket = sys.argv[1]
    task = read_task(ticket)
    sys.path[:] = task.head["path"]
    sys.argv[:] = task.head["argv"]
    if task.head["module"] is None:
        _call(task, own_report(ticket))
    else:  # it has the ticket among its arguments
        if task.head.get("coverage"):
            _measure(task.head["coverage"])
        import runpy

        runpy.run_module(task.head["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
