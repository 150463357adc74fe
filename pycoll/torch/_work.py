"""What a call gives back to torch.distributed, a Work, and the queue in which collectives run.

PyTorch's ``async_op`` is each rank's own choice, and makes no difference to what is sent: every
collective is a blocking call of pycoll's. One that its caller waits for runs at once, in that
thread, if none is before it. Others run in order in the group's; who waits for one lends a hand.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
from torch._C._distributed_c10d import Work
from torch.distributed import DistBackendError, DistNetworkError

from pycoll._runtime.task import made_at, place_of_call
from pycoll.errors import BootstrapError, Error, OperationTimeout, PeerFailed, TransportError
from pycoll.torch._memory import land, tensors_of

NO_LIMIT = timedelta(0)  # how PyTorch says that something has no deadline of its own

_ending = threading.RLock()  # a work ends, or somebody is to be told of it; one comes first


class _Translating:
    """Raises the errors that users of torch.distributed know; pycoll's own is the cause."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Error):
            of_network = isinstance(error, PeerFailed | TransportError | BootstrapError)
            late = " Timed out :" if isinstance(error, OperationTimeout) else ""
            made = DistNetworkError if of_network else DistBackendError
            raise made(f"pycoll:{late} {error}") from error


translating = _Translating()


class GroupWork(Work):
    """A call that has filled tensors, the value of its future. C++ needs `wait`, `get_future`."""

    is_done = True
    _error: Exception | None = None
    _future: Any = None  # that is completed
    _given: Any = None  # its child, that is given out

    def __init__(self, filled: Sequence[Any]) -> None:
        super().__init__()
        self.filled = filled

    def wait_until_done(self, seconds: float | None) -> None:
        """Return when it is done, in whatever way; None: however long that takes."""

    def finish(self, error: Exception | None, complete: Callable[..., object]) -> None:
        """It is done; `complete` is passed what completes the future, if there is one."""
        with _ending:
            self._error, self.is_done = error, True
            has_future = self._future is not None
        if has_future:
            complete(self._complete)

    def _complete(self) -> None:
        if self._error is None:
            self._future.set_result(tensors_of(self.filled))
        else:
            self._future.set_exception(self._error)

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        if not self.is_done:
            self.wait_until_done(timeout.total_seconds() if timeout > NO_LIMIT else None)
        if self._error is not None:
            raise self._error
        return True

    def get_future(self) -> Any:
        with _ending:
            if self._future is not None:
                return self._given
            gpus = {tensor.device for tensor in tensors_of(self.filled) if tensor.is_cuda}
            self._future = torch.futures.Future(devices=[*gpus])
            # An exception is its value, which C++ takes for tensors; its child has a real error.
            self._given = self._future.then(lambda future: future.value())
            is_done = self.is_done
        if is_done:
            self._complete()  # nobody has it yet: no callback runs here
        return self._given

    def is_completed(self) -> bool:
        return self.is_done

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def result(self) -> list[Any]:
        self.wait()
        return tensors_of(self.filled)

    synchronize = wait  # what it fills is complete then, on a GPU, too


class MessageWork(GroupWork):
    """A message: a request, which a wait ends so late. A receive fills `place`, for its tensor."""

    is_done = False

    def __init__(
        self, tensors: Any, request: Any, seconds: float, place: Any = None, status: Any = None
    ) -> None:
        super().__init__(tensors)
        self._request, self._seconds, self._place, self._status = request, seconds, place, status

    def wait_until_done(self, seconds: float | None) -> None:
        error: Exception | None = None
        try:
            with translating:
                self._request.wait(self._seconds if seconds is None else seconds)
        except Exception as exc:
            if isinstance(exc.__cause__, OperationTimeout):
                raise  # the message may come later
            error = exc
        with _ending:
            if not self.is_done:
                if error is None and self._place is not None:
                    land(self.filled[0], self._place)
                self.finish(error, _in_a_thread)

    def get_future(self) -> Any:
        future = super().get_future()
        self._request.add_done_callback(lambda _: self.wait_until_done(None))
        return future

    def is_completed(self) -> bool:
        if not self.is_done and self._request.test():
            self.wait_until_done(None)
        return self.is_done

    def source_rank(self) -> int:
        self.wait()
        return int(self._status.source if self._status else super().source_rank())

    _source_rank = source_rank


class CallWork(GroupWork):
    """A collective that a queue runs: a function and its arguments."""

    is_done = False

    def __init__(self, queue: CallQueue, filled: Sequence[Any], *call: Any) -> None:
        super().__init__(filled)
        self._queue, self._place = queue, place_of_call()
        self._call, self._ended = call, threading.Event()

    def run(self, complete: Callable[..., object]) -> None:
        """Do it, in this thread; an error is kept for who waits."""
        call, *args = self._call
        self._call = ()  # what it holds is not needed any longer
        error: Exception | None = DistBackendError("pycoll: this collective was interrupted")
        try:
            with translating, made_at(self._place):
                call(*args)
            error = None
        except Exception as exc:
            error = exc
        finally:
            self.finish(error, complete)
            self._ended.set()

    def wait_until_done(self, seconds: float | None) -> None:
        if seconds is None:
            self._queue.help(self)
        if not self._ended.wait(seconds):
            text = f"pycoll: Timed out : waited {seconds:g} s for a collective, which goes on"
            raise DistBackendError(text)


class CallQueue:
    """Runs the calls of a group in order; `name` is that of its thread.

    It leaves its place while it completes a call's future: callbacks may wait for other calls.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._waiting: deque[CallWork] = deque()
        self._turn = threading.Lock()  # of who runs a call
        self._changing = threading.Lock()
        self._thread: threading.Thread | None = None
        self._added = 0  # calls so far
        self._sleeps = False  # the thread, until something is put into `_wakes`
        self._wakes: SimpleQueue[None] = SimpleQueue()
        self._has_ended = False

    def begin(self) -> bool:
        """Whether the caller may make a call itself, at once; then `done` follows."""
        return not self._waiting and self._turn.acquire(blocking=False)

    def done(self) -> None:
        """Give the turn to the next call."""
        self._turn.release()
        if self._waiting or self._has_ended:
            self._wake()

    def add(self, work: CallWork) -> None:
        """Have a call run when those before it are done."""
        with self._changing:
            if self._has_ended:
                raise RuntimeError("this process group was shut down")
            self._waiting.append(work)
            self._added += 1
            if self._thread is None:
                self._thread = self._new_thread()
        self._wake()

    def help(self, work: CallWork) -> None:
        """Run calls until this one is done, or another thread runs one."""
        while not work.is_done and self._turn.acquire(blocking=False):
            try:
                self._run_first(_in_a_thread)
            finally:
                self.done()

    def end(self) -> None:
        """Take no more calls; return when all are done."""
        with self._changing:
            self._has_ended, thread = True, self._thread
        if thread is not None:
            self._wake()
            thread.join()

    def _run_first(self, complete: Callable[..., object]) -> None:
        if self._waiting:  # else another thread has run it
            try:
                self._waiting[0].run(complete)
            finally:
                self._waiting.popleft()

    def _new_thread(self) -> threading.Thread | None:
        if not self._waiting:
            return None
        thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
        thread.start()
        return thread

    def _wake(self) -> None:
        if self._sleeps:
            self._sleeps = False
            self._wakes.put(None)

    def _serve(self) -> None:
        has_run, seen = True, 0
        while self._waiting or not self._has_ended:
            if self._waiting and self._turn.acquire(blocking=False):
                ended: list[Callable[[], None]] = []
                self._run_first(ended.append)
                self._turn.release()
                has_run = True
                for complete in ended:
                    with self._changing:
                        self._thread = self._new_thread()
                    complete()
                    with self._changing:
                        if self._thread is not None:
                            return
                        self._thread = threading.current_thread()
            elif not has_run and seen != self._added:
                seen = self._added  # their callers have run those: it is not woken for each
                time.sleep(0.0005)
            else:
                has_run, self._sleeps = False, True
                # Who adds a call, or gives the turn back, looks at that afterwards.
                if self._turn.locked() if self._waiting else not self._has_ended:
                    self._wakes.get()
                self._sleeps = False


def _in_a_thread(complete: Callable[[], None]) -> None:
    try:
        threading.Thread(target=complete, name="pycoll.torch", daemon=True).start()
    except RuntimeError:  # the interpreter ends
        complete()
