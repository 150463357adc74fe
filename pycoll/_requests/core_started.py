"""What sends, receives and collectives of the compiled core have in common, as Python sees them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from pycoll._requests.request import Request
from pycoll._runtime.communicators import raise_requests_error
from pycoll._runtime.task import Call, Started
from pycoll._support.public_edge import edge
from pycoll._transports import _core
from pycoll._transports.base import Operation
from pycoll.errors import Error, OperationTimeout

if TYPE_CHECKING:
    from pycoll._calls.group import Group
    from pycoll._requests.core_collectives import CompiledPlans


F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


def waiting(method: F) -> F:
    """Return the method to which the core leaves a wait; errors name the one that was called."""
    method.__name__, method.__qualname__ = "wait", "Request.wait"
    return edge(method)


class Owner(NamedTuple):
    """The communicator of what the core has begun.

    Attributes:
        group: its ranks.
        plans: of its collectives.
    """

    group: Group
    plans: CompiledPlans | None = None


class CoreTask(Operation):
    """What the core has begun, for those who wait for it in Python.

    Attributes:
        call: what it is.
        watchers: called when it is done, under the engine's lock.
        unfit: as of `task.Started`.
    """

    __slots__ = ("_begun", "call", "unfit", "watchers")

    def __init__(self, begun: CoreStarted, call: Call) -> None:
        super().__init__()
        self._begun: CoreStarted | None = begun  # None once it is done: it keeps this
        self.call = call
        self.unfit: Exception | None = None
        self.watchers: dict[Callable[[Any], None], None] = {}

    @property
    def committed(self) -> bool:
        return self._begun is not None and self._begun._is_committed()

    def awaited(self) -> Collection[int]:
        return self._begun._waits_for() if self._begun is not None else ()

    def finish(self, error: BaseException | None = None) -> None:
        if self.done:
            return
        super().finish(error)
        self._begun = None
        watchers, self.watchers = self.watchers, {}
        for watcher in list(watchers):
            watcher(self)

    def cancel(self) -> None:
        super().cancel()
        if self._begun is not None:
            self._begun._abandon()


class InCore(Request[Any]):
    """A request whose end the core knows."""

    def _state_for(self, core: Any) -> int:
        return 0

    def _claim(self) -> bool:
        return bool(_core.claim(self))


class CoreStarted(InCore):
    """A request that the core has begun; the other base is a type of the core's."""

    _made: CoreTask | None = None
    _by_python: Started | None = None  # what goes on with it, if Python does

    @property
    def _from_core(self) -> Any:
        return self

    @property
    def _group(self) -> Group:  # type: ignore[override]
        group: Group = self._from_core._owner.group
        return group

    @property
    def _call(self) -> Call:
        raise NotImplementedError

    @property
    def _task(self) -> CoreTask:  # type: ignore[override]
        if self._made is None:
            # Another thread may make one, too, and wait for that.
            made: CoreTask = vars(self).setdefault("_made", CoreTask(self, self._call))
            if not self._from_core._watch() and self.done:  # else this is the child of a fork
                self._tell(made)
            return made
        return self._made

    def _tell(self, made: CoreTask) -> None:
        """Finish what others wait for, when this has ended."""
        made.finish(self._error())

    def _started(self) -> CoreTask:  # type: ignore[override]
        return self._task

    def _calls(self) -> list[tuple[Call, Collection[int]]]:
        """Return what is not done of it, with the world ranks that must do something for it."""
        return [] if self.done else [(self._call, self._waits_for())]

    def _is_committed(self) -> bool:
        """Whether it can be taken back no more."""
        return False

    def _waits_for(self) -> Collection[int]:
        """Return the world ranks that must do something before it ends."""
        raise NotImplementedError

    def _abandon(self) -> None:
        """Give it up, whatever it is at."""
        if self._by_python is not None:
            # So a message that it has goes back to its place.
            self._by_python.abort(OperationTimeout(f"{self._call} was given up"))
        self._from_core._give_up()

    def _error(self) -> BaseException | None:
        """Return why it has failed; None: it has not."""
        raise NotImplementedError

    # --- what the core leaves ----------------------------------------------------------------

    @waiting
    def _wait(self, timeout: float | None = None) -> Any:
        seconds = self._seconds(timeout)
        if not self.done:
            self._check_open()
            task = self._task
            if not task.done:
                self._group.engine.wait(task, task.call, seconds)
        return self.result

    def _check_open(self) -> None:
        closed = self._group.engine.closed
        if closed is not None and not self.done:  # in the child of a fork nothing ever ends
            raise Error(closed)

    def cancel(self) -> bool:
        """Raise TypeError; only a receive can be withdrawn."""
        raise TypeError(f"only a receive can be cancelled, not {self._call}")

    @edge
    def _failed(self) -> None:
        """Raise why it has no result."""
        if not self.done:
            raise Error(f"{self._call} is not done yet; wait() for it")
        self._collected = True
        self._fail()
        error = self._locked(self._error)  # whoever has ended it may be about to say why
        if error is not None:
            raise_requests_error(self._group.context, error)

    def _fail(self) -> None:
        """Called when it has failed, before anybody else does."""

    def _locked(self, action: Callable[[], T]) -> T:
        """Return what `action` does under the engine's lock, if that can be had."""
        engine = self._group.engine
        if engine.closed is not None or engine.is_inside():
            return action()
        with engine.locked():
            return action()
