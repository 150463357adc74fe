"""Joining a job and leaving it: `init`, `finalize`, and the end of the process."""

from __future__ import annotations

import atexit
import contextlib
import math
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
from pycoll._runtime.membership import NoVerdict
from pycoll._support.environment import encrypts
from pycoll._support.public_edge import edge
from pycoll._support.wording import a_kind
from pycoll._transports import network
from pycoll._world.bootstrap import cannot_join, join
from pycoll._world.placement import environment, read_place
from pycoll.errors import BootstrapError, Error, PeerFailed, Revoked, TransportError

if TYPE_CHECKING:
    from pycoll._communicator.tracing import Tracer

WORLD_IDENT = 1
CLOSE_TIMEOUT_S = 5.0
FINALIZED = "pycoll.finalize() was called: this process cannot communicate any more"
LEFT_THE_BLOCK = (
    "the `with pycoll.init()` block has ended: this process cannot communicate any more. Put all "
    "that does into one block, or write comm = pycoll.init()"
)
FORKED = (
    "this process was forked from a rank of a pycoll job and cannot communicate: let the rank do "
    "it, and exchange data with it by a queue or a pipe (a process that is spawned cannot either)"
)


class _Session:
    """The one job a process can be in."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.engine: Engine | None = None
        self.comm: Communicator | None = None
        self.options: tuple[object, ...] = ()
        self.ended = ""
        self.raised = False  # an exception ends the process
        self.last_words: Client | None = None  # to the launcher, after an exception ended a `with`


_session = _Session()


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
        _check_options(timeout, op_timeout, transport)
        if _session.comm is not None:
            default = (300.0, None, None)
            if options not in (default, _session.options):
                raise ValueError(
                    f"pycoll.init was called before with {_describe(_session.options)}; "
                    f"a second call cannot change that to {_describe(options)}"
                )
            return _session.comm
        deadline = _op_timeout(op_timeout)
        chosen = transport or os.environ.get("PYCOLL_TRANSPORT") or "auto"
        if chosen != "auto":
            if encrypts(os.environ) and (reason := network.why_not_encrypted(chosen)):
                raise TransportError(reason)
            transports.check(chosen)
        began = time.monotonic()
        environ = environment(timeout)
        place = read_place(environ)
        timeout = max(0.0, timeout - (time.monotonic() - began))
        _share_arrays(environ)
        try:
            engine = join(place, timeout, chosen, deadline)
        except OSError as exc:
            raise cannot_join(place.rank, exc) from exc
        tracer = _tracer(environ)
        world = World(engine, place.local_rank, place.local_size, place.node, deadline, tracer)
        with engine.locked():
            group = Group(engine, WORLD_IDENT, range(place.size))
        _session.engine = engine
        _session.options = options
        _session.comm = WorldCommunicator(world, group)
        if (entering := sys.modules.get("pycoll._launcher.entering")) is not None:
            entering.outlast()  # registered first, it comes last
        _install_hooks()
        engine.interrupts.install()
        return _session.comm


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
    """Leave the job. Not collective; may be called again.

    What was accepted for sending is delivered, for at most 5 s. The end of the interpreter does
    the same.

    Raises:
        MismatchError: another rank has made another call than this one, as can be seen by now, and
            no call after it has told so.
    """
    _leave(FINALIZED, compare=True)


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
        error = engine.close(why, CLOSE_TIMEOUT_S, keep_control)
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


def _check_options(timeout: Any, op_timeout: Any, transport: Any) -> None:
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
    text = os.environ.get("PYCOLL_OP_TIMEOUT")
    if not text:
        return math.inf
    try:
        return check_timeout(float(text), "PYCOLL_OP_TIMEOUT")
    except ValueError as exc:
        raise BootstrapError(f"PYCOLL_OP_TIMEOUT is {text!r}: {exc}") from exc


def _describe(options: tuple[object, ...]) -> str:
    timeout, op_timeout, transport = options
    return f"timeout={timeout}, op_timeout={op_timeout}, transport={transport!r}"


# --- the end of the process ------------------------------------------------------------------


def _install_hooks() -> None:
    atexit.register(_at_exit, os.getpid())
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


def _at_exit(pid: int) -> None:
    if os.getpid() != pid:
        return
    try:
        _leave(FINALIZED, compare=not _session.raised)
    except Error as error:
        # Python's status is settled by now: the launcher is told, and makes it the job's.
        sys.excepthook(type(error), error.with_traceback(None), None)
        finalize()  # when these were the last words


def _after_fork() -> None:
    _session.lock = threading.Lock()
    _session.ended = FORKED
    if _session.engine is not None:
        _session.engine.closed = FORKED  # the compiled core has found out by itself


def _report_exception(error: BaseException, text: str) -> None:
    """Tell the launcher, and so the other ranks, that this one raised."""
    engine, control = _session.engine, _session.last_words
    if engine is not None and engine.closed is None:
        control = engine.control
    if control is None:
        return
    with contextlib.suppress(Exception), engine.locked() if engine else contextlib.nullcontext():
        control.post(
            "raised",
            error=type(error).__name__,
            text=text,
            peer_failed=isinstance(error, PeerFailed | NoVerdict | Revoked),
            needed=error.rank if isinstance(error, PeerFailed) else -1,
            why=str(error).partition("\n")[0] if isinstance(error, PeerFailed) else "",
        )
