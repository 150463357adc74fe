"""Copies between GPUs and host memory, as operations: what waits for a message can wait for them.

Each goes on in a side stream. CUDA tells the end of what is in a stream only to a thread
that sleeps in it: so who needs a copy looks for a moment, and then a thread of the stream sleeps.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy as another
from typing import Final, Protocol

from pycoll._cuda.cuda import Device, Mark
from pycoll._transports.base import Operation
from pycoll.errors import Error, TransportError

SIDE_STREAMS: Final = 2
"""Side streams in each direction: more are made for arrays that are still being computed."""

MAX_SIDE_STREAMS: Final = 32

SPIN_S: Final = 30e-6
"""A copy is looked at for so long before somebody sleeps: small ones are done by then."""


class OperationOwner(Protocol):
    """Under whose lock a copy becomes done."""

    def finish(self, operation: Operation, error: BaseException | None) -> None:
        """End it, and wake who waits for it."""


class _Failing(Operation):
    """An operation that gives its error to each who asks as another one, with no traceback.

    What is raised keeps the frames of its call, those the arrays, and their staging buffers these
    operations: a circle in which the garbage collector cannot see, for NumPy's arrays are in it.
    """

    __slots__ = ("_error",)

    @property
    def error(self) -> BaseException | None:
        """Why it failed, or None."""
        return another(self._error)

    @error.setter
    def error(self, error: BaseException | None) -> None:
        self._error = another(error)


class GpuCopy(_Failing):
    """A copy between a GPU and a staging buffer.

    Args:
        engine: under whose lock it becomes done; None: only `wait` will ask.
        side_stream: where it is under way; None: there is nothing to copy.
        mark: in the side stream, behind it.
        array: what must not be freed before its end.
    """

    __slots__ = ("_array", "_callbacks", "_side_stream", "engine", "mark")

    def __init__(
        self,
        engine: OperationOwner | None,
        side_stream: SideStream | None,
        mark: Mark | None,
        array: object,
    ) -> None:
        super().__init__()
        self.engine = engine
        self.mark = mark
        self._side_stream = side_stream
        self._array = array
        self._callbacks: deque[Callable[[Operation], None]] = deque()
        if mark is None:
            self.finish()

    def then(self, callback: Callable[[Operation], None]) -> None:
        """Call `callback(self)` when done; unlike other operations, several may ask."""
        self.watch()
        self._callbacks.append(callback)
        if self.done:  # a thread of the stream may have ended it meanwhile
            self._tell()

    def watch(self) -> None:
        """See that it becomes done by itself: soon, or when a thread has seen its end."""
        if not self.done:
            self.look(SPIN_S)
        if not self.done:
            assert self._side_stream is not None
            self._side_stream.watch(self)

    def finish(self, error: BaseException | None = None) -> None:
        if self.done:
            return
        super().finish(error)
        self._array = None
        self._tell()

    def _tell(self) -> None:
        """Call each callback once, whoever else does so."""
        while True:
            try:
                callback = self._callbacks.popleft()
            except IndexError:
                return
            callback(self)

    def cancel(self) -> None:
        """Nobody wants to know its end any more; the GPU goes on."""
        self._callbacks.clear()

    def look(self, seconds: float = 0.0) -> None:
        """Find out whether it is done, for so long at most."""
        until = time.monotonic() + seconds
        try:
            while not self.done:
                if self.mark is None or self.mark.is_done():
                    self.finish()
                elif time.monotonic() >= until:
                    return
        except TransportError as exc:
            self.finish(exc)

    def is_over(self) -> bool:
        """Whether the GPU has ended it, in whatever way."""
        if not self.done and self.mark is not None and not is_over(self.mark):
            return False
        self._array = None
        return True

    def settle(self) -> None:
        """Sleep until it has ended, in whatever way; nobody is told."""
        self._callbacks.clear()
        with contextlib.suppress(TransportError):
            self.wait()
        if self.error is not None and self._side_stream is not None:
            self._side_stream.drain()  # what has failed is perhaps the question alone

    def wait(self) -> None:
        """Sleep until it is done.

        Raises:
            TransportError: it has failed.
        """
        self.look(SPIN_S)
        if not self.done:
            try:
                self.sleep()
            finally:
                self._array = None  # to call it done is for who holds the engine's lock
        if self.error is not None:
            raise self.error

    def sleep(self) -> None:
        """Sleep until the GPU has ended it, in whatever way.

        Raises:
            TransportError: it has failed.
        """
        if self.mark is None:
            return
        try:
            self.mark.wait()
        except TransportError:
            if self._side_stream is not None:
                self._side_stream.drain()  # what has failed is perhaps the question alone
            raise


def all_of(copies: Iterable[GpuCopy]) -> list[GpuCopy]:
    """Return copies, begun one after the other; if one cannot be, those before it are let go."""
    begun: list[GpuCopy] = []
    try:
        begun.extend(copies)
    except TransportError:
        for copy in begun:
            copy.watch()
        raise
    return begun


class Push(_Failing):
    """A copy to the GPU that is not begun before others have ended, nor after it was given up.

    So a call that has failed writes nothing later.

    Args:
        others: what must have ended.
        begin: begins it.
        goes_on: by itself; else only `wait` does anything.
    """

    __slots__ = ("_begin", "_copy", "_is_given_up", "_left", "_lock", "_others")

    def __init__(
        self, others: Sequence[GpuCopy], begin: Callable[[], GpuCopy], goes_on: bool
    ) -> None:
        super().__init__()
        self._others = others
        self._left = deque(others)
        self._begin: Callable[[], GpuCopy] | None = begin
        self._copy: GpuCopy | None = None
        self._is_given_up = False
        self._lock = threading.Lock()
        if goes_on:
            self._go_on(None)

    def cancel(self) -> None:
        super().cancel()
        self._is_given_up = True
        self._begin = None

    def settle(self) -> None:
        """Give it up if it has not begun; else sleep until it has ended."""
        self.cancel()
        with self._lock:  # another thread may just be beginning it
            copy = self._copy
        if copy is not None:
            copy.settle()

    def wait(self) -> None:
        """Sleep until it is done.

        Raises:
            TransportError: it has failed.
        """
        for other in self._others:
            other.wait()
        self._start()
        if self._copy is not None:
            self._copy.wait()
        if self.error is not None:
            raise self.error

    def _start(self) -> None:
        with self._lock:  # who waits may come to it first
            begin, self._begin = self._begin, None  # it holds the stage, which holds this
            if begin is not None:
                self._copy = begin()

    def _go_on(self, ended: Operation | None) -> None:
        if self.done or self._is_given_up:
            return
        if ended is not None and ended.error is not None:
            self.finish(ended.error)
        elif self._left:
            self._left.popleft().then(self._go_on)
        else:
            try:
                self._start()
            except Exception as exc:
                self.finish(exc)
            if self._copy is not None:
                self._copy.then(lambda copy: self.finish(copy.error))


class Begun(Operation):
    """A copy that is a step of a run: it is not looked at before `then` is called.

    Args:
        copy: the copy, under way.
        give_up: called when the copy fails or is cancelled. If it writes to memory of the caller's
            that is `copy.settle`, so that nothing is written there after the call.
    """

    __slots__ = ("_copy", "_give_up")

    def __init__(self, copy: GpuCopy | Push, give_up: Callable[[], None]) -> None:
        super().__init__()
        self._copy = copy
        self._give_up = give_up

    def then(self, callback: Callable[[Operation], None]) -> None:
        super().then(callback)
        self._copy.then(self._ended)

    def cancel(self) -> None:
        super().cancel()
        self._give_up()

    def _ended(self, copy: Operation) -> None:
        error = copy.error
        if error is not None:
            self._give_up()
        self.finish(error)


class SideStream:
    """A side stream, and a thread that sleeps until what was put into it is done.

    Attributes:
        handle: CUDA's name for it.
        last: behind all that was put into it.
        ready: what the last of that waits for, which others do.
        num_users: how many are about to put something into it.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.handle = device.stream()
        self.last: Mark | None = None
        self.ready: Mark | None = None
        self.num_users = 0
        self._watched: queue.SimpleQueue[GpuCopy] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def begun(self) -> Mark:
        """Return a mark behind what was just put into it.

        Raises:
            TransportError: there is none; what was put into it has ended.
        """
        try:
            mark = self._device.mark(self.handle)
        except TransportError:
            self.drain()
            raise
        self.last = mark
        return mark

    def drain(self) -> None:
        """Sleep until all that was put into it has ended, in whatever way."""
        self._device.drain(self.handle)

    def watch(self, copy: GpuCopy) -> None:
        """Have `copy` finish when it is done, under its engine's lock."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="pycoll-gpu", daemon=True)
            self._thread.start()
        self._watched.put(copy)

    def _work(self) -> None:
        while True:
            self._see(self._watched.get())

    @staticmethod
    def _see(copy: GpuCopy) -> None:
        """Sleep until a copy is done; while the thread waits for another it holds none."""
        error: BaseException | None = None
        try:
            copy.sleep()
        except TransportError as exc:
            error = exc
        if copy.engine is not None:
            with contextlib.suppress(Error):  # the rank has left the job
                copy.engine.finish(copy, error)


class SideStreams:
    """The side streams of a GPU in one direction."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._streams: list[SideStream] = []
        self._turn = itertools.count()
        self._choosing = threading.Lock()

    @contextlib.contextmanager
    def pick(self, again: SideStream | None = None) -> Iterator[SideStream]:
        """Give one that has nothing to do, else one that copies and does not wait.

        Each `with` has a stream of its own until it ends, for a copy that is put into the stream
        may wait for long. Beyond `MAX_SIDE_STREAMS` they are shared.

        Args:
            again: the one to give, which was picked before.
        """
        with self._choosing:
            side_stream = again or self._choose()
            side_stream.num_users += 1
        try:
            yield side_stream
        finally:
            with self._choosing:
                side_stream.num_users -= 1

    def _choose(self) -> SideStream:
        busy = []
        for side_stream in self._streams:
            if side_stream.num_users:
                continue
            if side_stream.last is None or is_over(side_stream.last):
                return side_stream
            if side_stream.ready is None or is_over(side_stream.ready):
                busy.append(side_stream)
        if len(busy) < SIDE_STREAMS and len(self._streams) < MAX_SIDE_STREAMS:
            self._streams.append(SideStream(self._device))
            return self._streams[-1]
        usable = busy or self._streams
        return usable[next(self._turn) % len(usable)]


class StagingStreams:
    """What staging keeps for one GPU.

    Attributes:
        device: the GPU.
        pulls, pushes: its side streams.
        meetings: streams which a library may have wait for what it has under way.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.pulls, self.pushes = SideStreams(device), SideStreams(device)
        self.meetings = SideStreams(device)


_of_gpu: dict[int, StagingStreams] = {}
_making = threading.Lock()


def streams_of(device: Device) -> StagingStreams:
    """Return what staging keeps for a GPU."""
    with _making:
        if device.number not in _of_gpu:
            _of_gpu[device.number] = StagingStreams(device)
        return _of_gpu[device.number]


def is_over(mark: Mark) -> bool:
    """Whether the GPU has ended what was before a mark, in whatever way."""
    try:
        return mark.is_done()
    except TransportError:
        return True


def is_in_use() -> bool:
    """Whether this process has staged anything yet."""
    return bool(_of_gpu)
