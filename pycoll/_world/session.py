"""The world that is the job, and the end of them all: `init`, `finalize`, the end of the process.

Worlds of `pycoll.join` (`joining`) are entered in `joined` while they are open.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import threading
import time

# Not when an exception is shown: this import evaluates a string, after which Python forgets that
# it must end with the status of an interrupt.
import traceback
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pycoll import _transports as transports
from pycoll._calls.arguments import check_timeout
from pycoll._calls.group import Group
from pycoll._communicator.communicator import Communicator, World
from pycoll._rendezvous.client import Client
from pycoll._runtime.engine import Engine
from pycoll._runtime.inspected import answer_launcher
from pycoll._runtime.membership import NoVerdict
from pycoll._support import job_key
from pycoll._support.environment import default_op_timeout, encrypts
from pycoll._support.public_edge import edge
from pycoll._support.wording import a_kind
from pycoll._transports import network
from pycoll._world.bootstrap import cannot_join, join
from pycoll._world.placement import JobPlacement, environment, read_place
from pycoll.errors import BootstrapError, Error, PeerFailed, Revoked, TransportError

if TYPE_CHECKING:
    from pycoll._communicator.tracing import Tracer

WORLD_IDENT = 1
CLOSE_TIMEOUT_S = 5.0
FINALIZED = "pycoll.finalize() was called: this process cannot communicate any more"
LEFT_ALL = "pycoll.finalize() was called: this process has left the world of this communicator"
LEFT_THE_BLOCK = (
    "the `with pycoll.init()` block has ended: this process cannot communicate any more. Put all "
    "that does into one block, or write comm = pycoll.init()"
)
FORKED = (
    "this process was forked from a rank of a pycoll job and cannot communicate: let the rank do "
    "it, and exchange data with it by a queue or a pipe (a process that is spawned cannot either)"
)


class _Session:
    """The one job that a process is started in."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.engine: Engine | None = None
        self.comm: Communicator | None = None
        self.options: tuple[object, ...] = ()
        self.ended = ""
        self.raised = False  # an exception ends the process
        self.last_words: Client | None = None  # to the launcher, after an exception ended a `with`


_session = _Session()

joined: dict[Engine, None] = {}
"""The open worlds of `pycoll.join`, the oldest first."""


class WorldCommunicator(Communicator, shown_as="Communicator"):
    """The communicator of all ranks; closing it is leaving the job."""

    def close(self) -> None:
        """Leave the job: the same as `pycoll.finalize()`."""
        if not self._closed:
            self._shut()
            finalize()

    def __exit__(self, *exc_info: object) -> None:
        """Leave the job; of an exception that nobody catches the others still hear."""
        self._shut()
        raised = exc_info[0] is not None
        _leave(LEFT_THE_BLOCK, compare=not raised, keep_control=raised)


@edge
def init(
    timeout: float = 300.0, op_timeout: float | None = None, transport: str | None = None
) -> Communicator:
    """Join the job this process was started in and return its world communicator.

    A process that no launcher started is a job of its own, of size 1. A second call returns the
    same communicator.

    Args:
        timeout: seconds for the whole job to meet; after 10 it prints who is missing.
        op_timeout: default deadline of every operation, seconds; None: that of `pycoll-run`,
            or none.
        transport: "auto", "shm", "rdma", "tcp" or "zmq"; None: that of `pycoll-run`. Automatic is
            shared memory between ranks on one host and RDMA between hosts, where they can be used,
            else tcp; in an encrypted job (`pycoll-run --encrypt`) zmq.

    Raises:
        BootstrapError: the job could not meet, or the launcher's variables make no sense.
        TransportError: the transport cannot be used: which, why, what to do.
        ValueError: called again with other options.
        Error: called after `finalize`, or in a forked process.
    """
    options = (timeout, op_timeout, transport)
    with _session.lock:
        if _session.ended:
            again = ": restart the kernel to call it again" if "ipykernel" in sys.modules else ""
            raise Error(_session.ended + again)
        check_options(timeout, op_timeout, transport)
        if _session.comm is not None:
            default = (300.0, None, None)
            if options not in (default, _session.options):
                raise ValueError(
                    f"pycoll.init was called before with {_describe(_session.options)}; "
                    f"a second call cannot change that to {_describe(options)}"
                )
            return _session.comm
        deadline = _op_timeout(op_timeout)
        chosen = check_transport(transport or os.environ.get("PYCOLL_TRANSPORT"))
        began = time.monotonic()
        environ = environment(timeout)
        place = read_place(environ)
        if place.rendezvous and not os.environ.get("PYCOLL_JOB"):
            place = place._replace(is_adopted=True)
        answer_launcher(environ.get("PYCOLL_ASKED", ""))
        timeout = max(0.0, timeout - (time.monotonic() - began))
        _share_arrays(environ)
        world = open_world(place, timeout, chosen, deadline, _tracer(environ))
        if place.rendezvous:  # what this process starts has what the launcher has set, too
            os.environ["PYCOLL_PARENT"] = f"{place.rank}:{os.getpid()}"
            job_key.forget()
        _session.engine = world.engine
        _session.options = options
        _session.comm = WorldCommunicator(world, open_group(world, place.size, "world"))
        return _session.comm


def check_transport(name: str | None) -> str:
    """Return the transport that a world is to use.

    Raises:
        TransportError: it cannot be used here.
    """
    chosen = name or "auto"
    if chosen != "auto":
        if encrypts(os.environ) and (reason := network.why_not_encrypted(chosen)):
            raise TransportError(reason)
        transports.check(chosen)
    return chosen


def open_world(
    place: JobPlacement,
    timeout: float,
    chosen: str,
    op_timeout: float,
    tracer: Tracer | None = None,
) -> World:
    """Meet the other ranks of a world, and see to the end of the process.

    Raises:
        BootstrapError: they did not meet.
        TransportError: the transport cannot be used.
    """
    try:
        engine = join(place, timeout, chosen, op_timeout)
    except OSError as exc:
        raise cannot_join(place.rank, exc) from exc
    with _installing:
        _install_hooks()
        _end_with_multiprocessing(os.getpid())
    engine.interrupts.install()
    return World(engine, place.local_rank, place.local_size, place.node, tracer)


def open_group(world: World, size: int, name: str) -> Group:
    """Return all ranks of a world."""
    with world.engine.locked():
        return Group(world.engine, WORLD_IDENT, range(size), name)


def _tracer(environ: Mapping[str, str]) -> Tracer | None:
    """Return what records the calls of this process, if the launcher wants that."""
    text = environ.get("PYCOLL_TRACE", "")
    if not text:
        return None
    from pycoll._trace import records  # not sooner: few jobs are traced

    recorder = records.adopt(text)
    if recorder is None:  # a wrapper has closed it: the launcher says that there is nothing
        return None
    from pycoll._communicator.tracing import Tracer

    return Tracer(recorder)


def _share_arrays(environ: Mapping[str, str]) -> None:
    text = environ.get("PYCOLL_SHARE_ARRAYS", "")
    if text not in ("", "0"):
        from pycoll._runtime import shared_arrays  # imports NumPy

        try:
            shared_arrays.from_environment(text)
        except ValueError as exc:
            raise BootstrapError(str(exc)) from None


def finalize() -> None:
    """Leave the job, and all worlds of `pycoll.join`. Not collective; may be called again.

    What was accepted for sending is delivered, for at most 5 s. The end of the interpreter does
    the same. `pycoll.join` may be called afterwards, `pycoll.init` may not.

    Raises:
        MismatchError: another rank has made another call than this one, as can be seen by now, and
            no call after it has told so.
    """
    _leave_all(compare=True)


def _leave_all(compare: bool) -> None:
    found = [leave_joined(engine, LEFT_ALL) for engine in list(joined)]
    _leave(FINALIZED, compare)
    error = next(filter(None, found), None)
    if error is not None and compare:
        raise error


def leave_joined(engine: Engine, why: str) -> Error | None:
    """Leave a world of `pycoll.join`; returns how other ranks' calls differ from this one's.

    Args:
        engine: the world's.
        why: what later calls say.
    """
    if joined.pop(engine, False) is False:
        return None
    error = engine.close(why, CLOSE_TIMEOUT_S, has_raised=_session.raised)
    if engine.control is not None:
        engine.control.close(1.0)  # it is closed already, but if calls differ
    engine.interrupts.uninstall()
    engine.warn_of_kept_memory()
    return error


def _leave(why: str, compare: bool, keep_control: bool = False) -> None:
    """Leave the job.

    Args:
        why: what later calls say.
        compare: raise that other ranks have made other calls.
        keep_control: the launcher may still hear of the exception because of which this leaves.
    """
    with _session.lock:
        engine, _session.engine = _session.engine, None
        _session.ended = _session.ended or why
        last_words, _session.last_words = _session.last_words, None
        if engine is not None and keep_control:
            _session.last_words = engine.control
    if last_words is not None:
        last_words.close(1.0)
    if engine is not None:
        if engine.control is not None and (text := _without_place()):
            engine.control.post("note", text=text)
        error = engine.close(why, CLOSE_TIMEOUT_S, keep_control, _session.raised)
        engine.interrupts.uninstall()
        engine.warn_of_kept_memory()
        if error is not None and compare:
            _session.last_words = engine.control
            raise error
        if error is not None and not keep_control and engine.control is not None:
            engine.control.close(1.0)


def _without_place() -> str:
    """Say which arrays could not lie in shared memory; "": none."""
    try:
        from pycoll._transports._core import shared_use
    except ImportError:
        return ""
    *_, arrays, nbytes = shared_use()
    if not arrays:
        return ""
    text = f"{arrays} arrays, {nbytes} bytes in all, found no place in shared memory"
    return f"{text} and were in ordinary memory"


def check_options(timeout: Any, op_timeout: Any, transport: Any) -> None:
    """Raise TypeError or ValueError if these cannot be what they are called."""
    if isinstance(timeout, str):
        raise TypeError(
            f"timeout is a number of seconds, not {timeout!r}. No backend is chosen here: ranks "
            'meet by what their launcher says, and transport="tcp", say, is how they communicate.'
        )
    check_timeout(timeout, "timeout")
    if op_timeout is not None:
        check_timeout(op_timeout, "op_timeout")
    if transport is not None and not isinstance(transport, str):
        raise TypeError(f'transport is a name, as "tcp", not {a_kind(transport)}')


def _op_timeout(op_timeout: float | None) -> float:
    if op_timeout is not None:
        return check_timeout(op_timeout, "op_timeout")
    try:
        return default_op_timeout(os.environ)
    except Error as exc:
        raise BootstrapError(str(exc)) from None


def _describe(options: tuple[object, ...]) -> str:
    timeout, op_timeout, transport = options
    return f"timeout={timeout}, op_timeout={op_timeout}, transport={transport!r}"


# --- the end of the process ------------------------------------------------------------------


_installing = threading.Lock()


@functools.cache
def _install_hooks() -> None:
    """See to the end of this process, and to its forks; once."""
    atexit.register(_at_exit)
    os.register_at_fork(after_in_child=_after_fork)
    previous = sys.excepthook

    def excepthook(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        text = format_error(error)
        _session.raised = True
        _report_exception(error, text)
        if previous is not sys.__excepthook__:
            previous(kind, error, trace)
        elif sys.stderr is not None:
            sys.stderr.write(text)  # at once, so that those of several ranks do not mix
            sys.stderr.flush()

    sys.excepthook = excepthook


def format_error(error: BaseException) -> str:
    """Return the traceback to print: for errors of pycoll's, without pycoll's own frames.

    Of PeerFailed only the first line is shown: the rest is the traceback of another rank, which
    prints it itself.
    """
    formatted = traceback.TracebackException.from_exception(error)
    if isinstance(error, Error | KeyboardInterrupt):
        outside = [f for f in formatted.stack if not f.filename.startswith(_HERE)]
        if outside:
            formatted.stack = traceback.StackSummary.from_list(outside)
    text = "".join(formatted.format())
    if isinstance(error, PeerFailed):
        head, _, rest = text.partition(str(error))
        first = str(error).partition("\n")[0]
        text = head + first + rest
    return text


_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


@functools.cache
def _end_with_multiprocessing(pid: int) -> None:
    """See to the end of this process if multiprocessing has forked it: `atexit` is not called."""
    process = sys.modules.get("multiprocessing.process")
    if process is not None and process.parent_process() is not None:
        from multiprocessing import util

        util.Finalize(None, _at_exit, exitpriority=0)


def _at_exit() -> None:
    try:
        _leave_all(compare=not _session.raised)
    except Error as error:
        # Python's status is settled by now: the launcher is told, and makes it the job's.
        sys.excepthook(type(error), error.with_traceback(None), None)
        finalize()  # when these were the last words
    if (entering := sys.modules.get("pycoll._launcher.entering")) is not None:
        entering.wait_for_others()


def _after_fork() -> None:
    _session.lock = threading.Lock()
    _session.ended = FORKED
    engine, _session.engine, _session.last_words = _session.engine, None, None
    for each in (engine, *joined):
        if each is not None:
            each.closed = FORKED  # the compiled core has found out by itself
    joined.clear()


def _report_exception(error: BaseException, text: str) -> None:
    """Tell the launchers, and so the other ranks, that this one raised."""
    for engine in (_session.engine, *joined):
        if engine is not None and engine.closed is None and engine.control is not None:
            with contextlib.suppress(Exception), engine.locked():
                _post_exception(engine.control, error, text, _is_of(engine, error))
    if _session.last_words is not None:
        with contextlib.suppress(Exception):
            _post_exception(_session.last_words, error, text, True)


def _is_of(engine: Engine, error: BaseException) -> bool:
    """Whether a rank that has failed, or is lost, is one of this world."""
    if not joined or not isinstance(error, PeerFailed):
        return True
    return error.rank in engine.membership.departed()


def _post_exception(control: Client, error: BaseException, text: str, is_of: bool) -> None:
    """Tell a launcher that this rank raised.

    Args:
        is_of: what the error says of other ranks is of this launcher's.
    """
    needed = error if is_of and isinstance(error, PeerFailed) else None
    control.post(
        "raised",
        error=type(error).__name__,
        text=text,
        peer_failed=is_of and isinstance(error, PeerFailed | NoVerdict | Revoked),
        needed=needed.rank if needed else -1,
        why=str(needed).partition("\n")[0] if needed else "",
    )
