"""Relays what ranks print, line by line, to the launcher's own output and to log files.

A relay never blocks: what a slow reader does not take waits here, and when that is much the ranks'
pipes are left unread, so that a rank waits as it would for the reader itself.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import select
import selectors
import time
from collections.abc import Callable
from typing import IO, Any

from pycoll._support.ready import ready

# A place for output: a file, a function called with the rank and whole lines as bytes, or nowhere.
Target = IO[Any] | Callable[[int, bytes], object] | None

_READ = 65536
_LAST_READS = 32  # of a pipe that some process outside the job may fill for ever
_MAX_LINE = 1 << 20  # a longer line is passed on in pieces
_FULL, _LOW = 1 << 20, 1 << 18  # bytes waiting: stop reading the ranks' pipes; read them again
# Part of a line (a prompt, a progress bar) is passed on when nothing follows for so long: soon on a
# terminal, later where another rank's output that breaks the line in two does more harm.
_QUIET_TERMINAL_S, _QUIET_S = 0.1, 0.5
_TAIL = 4096  # bytes of each rank's standard error kept for the report
_LOG_NAME = re.compile(r"rank\.\d+\.log|calls\.txt")
_COLORS = (36, 33, 32, 35, 34, 31)


class Sink:
    """One place where output goes, shared by all streams that end there.

    Attributes:
        error: why nothing more can be written here (EPIPE: its reader is gone), else None.
        terminal: whether it is a terminal.
        quiet_s: after how long part of a line is passed on; None: only whole lines are.
    """

    def __init__(self, target: Target, selector: selectors.BaseSelector) -> None:
        self.error: OSError | None = None
        self.terminal = False
        self.quiet_s: float | None = None if callable(target) else _QUIET_S
        self.full = False
        self._selector = selector
        self._waiting = False
        self._pending = bytearray()
        self._write: Callable[[int, bytes], object] | None = None
        self._owner: Stream | None = None  # whose text stands on the line that is not ended
        self._fd = descriptor_of(target)
        if self._fd is not None:
            self.terminal = os.isatty(self._fd)
            if self.terminal:
                self.quiet_s = _QUIET_TERMINAL_S
        elif target is not None:
            self._write = _writer(target)
        self.erases = self.terminal and os.environ.get("TERM") != "dumb"
        self.colored = self.erases and not os.environ.get("NO_COLOR")

    def put(self, stream: Stream | None, data: bytes, rank: int = -1) -> None:
        """Add whole lines (or, marked by `stream.open`, part of one) from a stream."""
        owner = self._owner
        if owner is not None and owner is not stream:
            if owner.open:
                owner.open = False
                data = b"\n" + data
            elif self.erases:  # what a progress bar left standing
                data = b"\x1b[K" + data
        self._owner = None if data.endswith(b"\n") else stream
        if self._write is not None:
            self._write(rank, data)
        elif self._fd is not None and self.error is None:
            self._pending += data
            self.pump()

    def owned_by(self, stream: Stream) -> bool:
        """Whether the line that is not ended is this stream's."""
        return self._owner is stream

    @property
    def idle(self) -> bool:
        """Whether everything has been written."""
        return not self._pending

    def pump(self) -> None:
        """Write what the reader takes now; the rest waits for the selector."""
        assert self._fd is not None
        try:
            # A pipe that is ready takes PIPE_BUF bytes without blocking; setting O_NONBLOCK instead
            # would set it for every process that shares our output.
            while self._pending and ready([self._fd], 0, select.POLLOUT):
                written = os.write(self._fd, self._pending[: select.PIPE_BUF])
                del self._pending[:written]
        except BlockingIOError:
            pass
        except OSError as exc:
            self.error = exc
            self._pending.clear()
        self.full = len(self._pending) > (_LOW if self.full else _FULL)
        if bool(self._pending) != self._waiting:
            self._waiting = not self._waiting
            if self._waiting:
                self._selector.register(self._fd, selectors.EVENT_WRITE, self.pump)
            else:
                self._selector.unregister(self._fd)

    def close(self) -> None:
        """Forget what has not been written."""
        if self._waiting and self._fd is not None:
            self._waiting = False
            self._selector.unregister(self._fd)
        self._pending.clear()


class Stream:
    """What one rank writes to standard output or standard error.

    It is read from a pipe, `fd`; that of a rank of another host is fed (fd: None).
    """

    def __init__(
        self, fd: int | None, rank: int, sink: Sink, *, tag: bool, log: IO[bytes] | None
    ) -> None:
        if fd is not None:
            os.set_blocking(fd, False)
        self.fd = fd
        self.rank = rank
        self.sink = sink
        self.open = False  # part of a line has been passed on already
        self.quiet_at: float | None = None  # when that part of a line is to be shown
        self.tail = b""
        self._log = log
        self._partial: list[bytes] = []  # pieces of a line that is not complete
        self._partial_nbytes = 0
        self._after_return = False
        self._prefix = b""
        if tag:
            name = f"[{rank}]"
            if sink.colored:
                name = f"\x1b[{_COLORS[rank % len(_COLORS)]}m{name}\x1b[0m"
            self._prefix = f"{name} ".encode()

    def read(self) -> bool:
        """Pass on what has come; returns False when there is nothing more to come."""
        assert self.fd is not None
        try:
            data = os.read(self.fd, _READ)
        except BlockingIOError:
            return True
        except OSError:
            data = b""
        if not data:
            return False
        self.feed(data)
        return True

    def feed(self, data: bytes) -> None:
        """Pass on what has come."""
        self.tail = (self.tail + data[-_TAIL:])[-_TAIL:]
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if end:
            self._emit(self._take_partial() + data[:end])
        if end < len(data):
            self._partial.append(data[end:])
            self._partial_nbytes += len(data) - end
        if self._partial_nbytes > _MAX_LINE:
            self._show_part()
        self.quiet_at = None
        if self._partial and self.sink.quiet_s is not None:
            self.quiet_at = time.monotonic() + self.sink.quiet_s

    def show_quiet(self) -> None:
        """Show part of a line, after which nothing more has come for a while."""
        self.quiet_at = None
        if self._partial:
            self._show_part()

    def finish(self) -> None:
        """Complete the last line, and close the pipe."""
        if self.fd is not None:
            os.close(self.fd)
        self.quiet_at = None
        if self._partial:
            self._emit(self._take_partial() + b"\n")
        elif self.open or (self.sink.terminal and self.sink.owned_by(self)):
            self.open = True
            self._emit(b"\n")

    def _take_partial(self) -> bytes:
        partial, self._partial, self._partial_nbytes = b"".join(self._partial), [], 0
        return partial

    def _show_part(self) -> None:
        self._emit(self._take_partial(), part=True)

    def _emit(self, data: bytes, part: bool = False) -> None:
        if self._log is not None:
            self._log.write(data)
        if self._prefix:
            units = data.splitlines(keepends=True)  # lines, and states of a progress bar
            # What needs none: the rest of a line whose beginning is out with its prefix, the end of
            # "\r\n" that came in two pieces, and a lone carriage return.
            bare = self.open or (self._after_return and units[0] == b"\n")
            marked = [unit if unit == b"\r" else self._prefix + unit for unit in units]
            data = b"".join([units[0], *marked[1:]] if bare else marked)
        self._after_return = data.endswith(b"\r")
        self.open = part
        self.sink.put(self, data, self.rank)


class Relay:
    """The output of all ranks of a job.

    Args:
        stdout, stderr: where it goes.
        selector: where pipes are watched; the data of a key is a function to call when it is ready.
        tag: whether to put the rank before each line; None: on a terminal.
        log_dir: folder for one file a rank, and one of the launcher's own lines; made if it does
            not exist. Those of an earlier job are removed.
        attempt: how often this job was begun before: its logs go on.

    Raises:
        OSError: the folder or a file in it cannot be made.
    """

    def __init__(
        self,
        stdout: Target,
        stderr: Target,
        selector: selectors.BaseSelector,
        *,
        tag: bool | None = None,
        log_dir: str | None = None,
        attempt: int = 0,
    ) -> None:
        self._selector = selector
        self._tag = tag
        self._log_dir, self._attempt = log_dir, attempt
        self._own_log: IO[bytes] | None = None
        if log_dir is not None:
            os.makedirs(log_dir, exist_ok=True)
            if not attempt:
                for name in filter(_LOG_NAME.fullmatch, os.listdir(log_dir)):
                    os.unlink(os.path.join(log_dir, name))
            self._own_log = self._open_log("launcher.log")
        self._out = Sink(stdout, selector)
        # One terminal, or `> file 2>&1`: one queue keeps the order, and knows whose line is open.
        self._err = self._out if _same_file(stdout, stderr) else Sink(stderr, selector)
        self._streams: dict[Stream, bool] = {}  # those that have not ended; whether they are read
        self._by_number: dict[tuple[int, int], Stream] = {}  # by rank, and 1 or 2
        self._logs: list[IO[bytes]] = []
        self._error: OSError | None = None

    def add(self, rank: int, stdout: int | None = None, stderr: int | None = None) -> None:
        """Relay the pipes of a rank, whose read ends become the relay's; None: it will be fed."""
        log = None
        if self._log_dir is not None:
            try:
                log = self._open_log(f"rank.{rank}.log")
                if self._attempt:
                    log.write(b"pycoll-run: attempt %d\n" % self._attempt)
            except OSError:
                for fd in (stdout, stderr):
                    if fd is not None:
                        os.close(fd)
                raise
            self._logs.append(log)
        for fd, sink, number in ((stdout, self._out, 1), (stderr, self._err, 2)):
            tag = sink.terminal if self._tag is None else self._tag
            stream = Stream(fd, rank, sink, tag=tag, log=log)
            self._streams[stream] = False
            self._by_number[rank, number] = stream

    def _open_log(self, name: str) -> IO[bytes]:
        path = os.path.join(self._log_dir or "", name)
        return open(path, "ab" if self._attempt else "wb", buffering=0)

    def feed(self, rank: int, number: int, data: bytes) -> None:
        """Pass on what a rank of another host has written.

        Args:
            rank: the rank.
            number: 1: standard output, 2: standard error.
            data: what it has written; b"": that is all.
        """
        stream = self._by_number[rank, number]
        if stream in self._streams:
            if data:
                self._guard(lambda: stream.feed(data))
            else:
                self._end(stream)

    def is_full(self, rank: int, number: int) -> bool:
        """Return whether what this stream writes has to wait for who reads our output."""
        return self._by_number[rank, number].sink.full

    def say(self, text: str) -> None:
        """Write a line of the launcher's own to standard error."""
        self._err.put(None, text.encode() + b"\n")
        self.record(f"{text}\n")

    def record(self, text: str) -> None:
        """Write lines of the launcher's own to its log alone, if it has one."""
        if self._own_log is not None:
            with contextlib.suppress(OSError):  # the ranks' logs say so
                self._own_log.write(text.encode(errors="backslashreplace"))

    @property
    def has_terminal(self) -> bool:
        """Whether somebody sees at once what `say` writes."""
        return self._err.terminal

    def update(self, now: float) -> float:
        """Watch the pipes whose output has room; returns when to call this again at the latest."""
        soonest = float("inf")
        for stream, watched in self._streams.items():
            if watched == stream.sink.full:
                self._watch(stream, not watched)
            if stream.quiet_at is not None:
                if stream.quiet_at <= now:
                    stream.show_quiet()
                else:
                    soonest = min(soonest, stream.quiet_at)
        return soonest

    def tail(self, rank: int) -> str:
        """The end of a rank's standard error."""
        stream = self._by_number.get((rank, 2))
        return stream.tail.decode(errors="replace") if stream else ""

    @property
    def ended(self) -> bool:
        """Whether every pipe has been closed at its other end."""
        return not self._streams

    @property
    def idle(self) -> bool:
        """Whether everything that was read has been written."""
        return self._out.idle and self._err.idle

    @property
    def error(self) -> OSError | None:
        """Why output cannot be written, or None."""
        return self._error or self._out.error or self._err.error

    def aim(self, stdout: Target, stderr: Target) -> None:
        """Have what is read from now on go elsewhere; nothing is waiting to be written."""
        self._out.close()
        self._err.close()
        self._out = Sink(stdout, self._selector)
        self._err = self._out if _same_file(stdout, stderr) else Sink(stderr, self._selector)
        for (_, number), stream in self._by_number.items():
            stream.sink = self._out if number == 1 else self._err

    def drain(self) -> None:
        """Read what is in the pipes, and show also lines that are not complete."""
        for stream in list(self._streams):
            self._read_rest(stream)
            if stream in self._streams:
                self._guard(stream.show_quiet)

    def finish(self) -> None:
        """Read what is left in the pipes, without waiting for more, and complete the last lines."""
        for stream in list(self._streams):
            self._read_rest(stream)
            if stream in self._streams:
                self._end(stream)

    def _read_rest(self, stream: Stream) -> None:
        for _ in range(_LAST_READS):
            if stream not in self._streams or stream.fd is None or not ready([stream.fd], 0):
                break
            self._read(stream)

    def close(self) -> None:
        """Close pipes and files; what has not been written is lost."""
        for stream in list(self._streams):
            self._watch(stream, False)
            if stream.fd is not None:
                os.close(stream.fd)
        self._streams.clear()
        self._out.close()
        self._err.close()
        for log in (*self._logs, self._own_log):
            if log is not None:
                log.close()

    def _read(self, stream: Stream) -> None:
        if not self._guard(stream.read):
            self._end(stream)

    def _guard(self, step: Callable[[], bool | None]) -> bool | None:
        try:
            return step()
        except OSError as exc:  # a log file, or a target of the caller's
            self._error = exc
            return False

    def _end(self, stream: Stream) -> None:
        self._watch(stream, False)
        del self._streams[stream]
        try:
            stream.finish()
        except OSError as exc:
            self._error = exc

    def _watch(self, stream: Stream, wanted: bool) -> None:
        if wanted == self._streams[stream]:
            return
        self._streams[stream] = wanted
        if stream.fd is None:
            return
        if wanted:
            self._selector.register(stream.fd, selectors.EVENT_READ, lambda: self._read(stream))
        else:
            self._selector.unregister(stream.fd)


def descriptor_of(target: Any) -> int | None:
    """The descriptor behind a target that really is a file, whose own buffer is flushed first.

    A notebook's sys.stdout has a fileno() too, which is not where its text goes.
    """
    raw = target.buffer if isinstance(target, io.TextIOWrapper) else target
    if isinstance(raw, io.BufferedWriter):
        raw = raw.raw
    if not isinstance(raw, io.FileIO):
        return None
    target.flush()
    return raw.fileno()


def _writer(target: Any) -> Callable[[int, bytes], object]:
    if callable(target):
        return lambda rank, data: target(rank, data)
    file = getattr(target, "buffer", target)
    if isinstance(file, io.TextIOBase) or not isinstance(file, io.IOBase):

        def write(rank: int, data: bytes) -> None:
            target.write(data.decode(errors="replace"))
            target.flush()

        return write

    def write_bytes(rank: int, data: bytes) -> None:
        if target is not file:
            target.flush()  # what was printed before comes before
        file.write(data)
        file.flush()

    return write_bytes


def _same_file(a: Target, b: Target) -> bool:
    if a is b:
        return True
    fd_a, fd_b = descriptor_of(a), descriptor_of(b)
    return fd_a is not None and fd_b is not None and os.path.sameopenfile(fd_a, fd_b)
