"""What a call gives back to torch.distributed: a Work, and a Future where one is asked for.

``Future.set_result`` runs callbacks in the thread that calls it, and a callback may wait for
another collective: so futures are completed in threads that do nothing else.
``Future.set_exception`` stores the exception as a value, which C++ takes for tensors: so what is
given out is a child of the future, which has a real error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Work
from torch.distributed import DistBackendError, DistNetworkError

from pycoll import Request, Status
from pycoll.errors import BootstrapError, Error, OperationTimeout, PeerFailed, TransportError
from pycoll.torch._memory import land
from pycoll.torch._queue import CallQueue

_NO_LIMIT = timedelta(0)  # how PyTorch says that a wait has no deadline of its own
_handing_out = threading.Lock()  # a future is given out, or the work is done: one comes first
_landing = threading.Lock()
# It starts threads as they are needed. Each may wait for the next: a bound would be a deadlock.
_threads = ThreadPoolExecutor(10_000, "pycoll.torch")


def translated(error: Exception) -> Exception:
    """Return the error that users of torch.distributed know; pycoll's own is its cause."""
    if not isinstance(error, Error):
        return error
    of_network = isinstance(error, PeerFailed | TransportError | BootstrapError)
    late = " Timed out :" if isinstance(error, OperationTimeout) else ""
    kind = DistNetworkError if of_network else DistBackendError
    made: Exception = kind(f"pycoll:{late} {error}")
    made.__cause__ = error
    return made


@contextmanager
def translating() -> Iterator[None]:
    """Raise pycoll's errors as `translated` gives them."""
    try:
        yield
    except Error as exc:
        raise translated(exc) from exc


class GroupWork(Work):
    """A call that fills `tensors`, the value of its future, and is done.

    C++ calls `wait` and `get_future`, Python all methods.
    """

    is_done = True
    _error: Exception | None = None
    _future: Any = None  # that is completed
    _given: Any = None  # its child, that is given out

    def __init__(self, tensors: Sequence[Any]) -> None:
        super().__init__()
        self.tensors = tensors

    def wait_until_done(self, seconds: float | None) -> None:
        """Return when it is done, in whatever way; None: however long that takes."""

    def _watch(self) -> None:
        """See to it that `_finish` is called although nobody waits."""

    def _finish(self, error: Exception | None) -> None:
        with _handing_out:
            self._error, self.is_done = error, True
            has_future = self._future is not None
        if has_future:
            try:
                _threads.submit(self._complete)
            except RuntimeError:  # the interpreter ends
                self._complete()

    def _complete(self) -> None:
        if self._error is None:
            self._future.set_result(list(self.tensors))
        else:
            self._future.set_exception(self._error)

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        if not self.is_done:
            self.wait_until_done(timeout.total_seconds() if timeout > _NO_LIMIT else None)
        if self._error is not None:
            raise self._error
        return True

    def get_future(self) -> Any:
        with _handing_out:
            if self._future is not None:
                return self._given
            gpus = {tensor.device for tensor in self.tensors if tensor.is_cuda}
            self._future = torch.futures.Future(devices=[*gpus])
            self._given = self._future.then(lambda future: future.value())
            is_done = self.is_done
        if is_done:
            self._complete()  # nobody has it yet: no callback runs here
        else:
            self._watch()
        return self._given

    def is_completed(self) -> bool:
        return self.is_done

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def result(self) -> list[Any]:
        self.wait()
        return list(self.tensors)

    synchronize = wait  # what it fills is complete then, on a GPU, too

    def source_rank(self) -> int:
        raise RuntimeError("only a message that is received has a source rank")

    def _source_rank(self) -> int:
        return self.source_rank()


class CallWork(GroupWork):
    """A collective, which the queue of its group runs: a function of `args`."""

    is_done = False
    _ended: threading.Event | None = None

    def __init__(
        self, queue: CallQueue, tensors: Sequence[Any], call: Callable[..., Any], *args: Any
    ) -> None:
        super().__init__(tensors)
        self._queue = queue
        self._call: tuple[Any, ...] = (call, *args)

    def run(self) -> None:
        """Do it, in this thread; an error is kept for who waits."""
        call, *args = self._call
        self._call = ()  # what it holds is not needed any longer
        error: Exception | None = DistBackendError("pycoll: this collective was interrupted")
        try:
            call(*args)
            error = None
        except Exception as exc:
            error = translated(exc)
        finally:
            self._finish(error)

    def _finish(self, error: Exception | None) -> None:
        super()._finish(error)
        if self._ended is not None:
            self._ended.set()

    def wait_until_done(self, seconds: float | None) -> None:
        if seconds is None:
            self._queue.help(self)
        with _handing_out:
            if self.is_done:
                return
            self._ended = self._ended or threading.Event()
        if not self._ended.wait(seconds):
            text = f"pycoll: Timed out : waited {seconds:g} s for a collective, which goes on"
            raise DistBackendError(text)


class MessageWork(GroupWork):
    """A message that is sent or received: a request of pycoll's.

    Args:
        request: the request.
        tensor: what it is about.
        seconds: deadline of a wait that has none of its own.
        place: of a receive: elements that it fills, for the tensor.
        status: of a receive.
    """

    is_done = False

    def __init__(
        self, request: Request[Any], tensor: Any, seconds: float, place: Any, status: Status | None
    ) -> None:
        super().__init__([tensor])
        self._request, self._seconds, self._status = request, seconds, status
        self._place = place

    def wait_until_done(self, seconds: float | None) -> None:
        error: Exception | None = None
        try:
            self._request.wait(self._seconds if seconds is None else seconds)
        except OperationTimeout as exc:
            raise translated(exc) from exc  # the message may come later
        except Exception as exc:
            error = translated(exc)
        with _landing:
            if not self.is_done:
                if error is None and self._place is not None:
                    land(self.tensors[0], self._place)
                self._finish(error)

    def _watch(self) -> None:
        self._request.add_done_callback(lambda _: self.wait_until_done(None))

    def is_completed(self) -> bool:
        if not self.is_done and self._request.test():
            self.wait_until_done(None)
        return self.is_done

    def source_rank(self) -> int:
        self.wait()
        return super().source_rank() if self._status is None else self._status.source
