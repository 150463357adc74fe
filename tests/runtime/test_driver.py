"""A signal handler may raise wherever Python lets it: the lock of an engine survives that."""

from __future__ import annotations

import importlib
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from pycoll._runtime.driver import Driver
from pycoll._support.interrupts import Interrupts
from pycoll._transports.base import Operation
from pycoll._transports.core import CoreTransport
from pycoll.errors import Error

FILES = {sys.modules[part.__module__].__file__ for part in (Driver, Interrupts)}
LIMIT_S = 30.0


class Plain(Driver):
    """Drives nothing: what waits here waits for another thread, or for its time."""

    def __init__(self) -> None:
        super().__init__(CoreTransport(0, 1), None)

    def _event(self, kind: str, fields: dict[str, Any]) -> None:
        raise AssertionError

    def _fail_all(self, error: BaseException) -> None:
        raise AssertionError(error)

    def _close_dropped(self) -> None:
        raise AssertionError


class Alarm(Exception):
    """What a signal handler of the program raises."""


def raise_at(moment: int, function: Callable[[], object]) -> bool:
    """Raise at one of the moments at which a handler may run in a driver; False if it has fewer.

    They are the beginning of a Python function, and the end of a call of a compiled one.
    """
    moments = itertools.count()

    def profile(frame: FrameType, event: str, argument: object) -> None:
        is_moment = event in ("call", "c_return") and frame.f_code.co_filename in FILES
        if is_moment and next(moments) == moment:
            raise Alarm

    sys.setprofile(profile)
    try:
        function()
    except Alarm:
        return True
    finally:
        sys.setprofile(None)
    return False


def soon() -> float:
    return time.monotonic() + 0.002


def in_a_thread(function: Callable[[], object]) -> None:
    """Another thread must not wait for ever."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    assert not thread.is_alive()


def is_well(driver: Plain) -> bool:
    in_a_thread(lambda: driver.nap(soon))  # also if this thread never came again
    with driver.locked():
        pass
    driver.nap(soon)
    in_a_thread(lambda: driver.nap(soon))
    with driver.locked():
        assert not driver._waiting
        assert not driver._wanted
    assert not driver._state.acquire(blocking=False) or not driver._state.release()
    assert not driver._core.python_busy
    assert driver.interrupts.hold()  # nobody holds them
    driver.interrupts.release()
    return True


def lock(driver: Plain) -> None:
    with driver.locked():
        pass


def drive_a_while(driver: Plain) -> None:
    never = Operation()
    with driver.locked():
        driver._drive(never, soon())


@pytest.fixture
def driver() -> Iterator[Plain]:
    made = Plain()
    yield made
    made._end_waiting()
    made.transport.close(1.0)
    made._end_driving(1.0)


CALLS = {"locked": lock, "nap": lambda driver: driver.nap(soon), "drive": drive_a_while}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_whatever_raises_in_there_leaves_it_as_it_was(
    call: Callable[[Plain], object], driver: Plain
) -> None:
    moment = 0
    while raise_at(moment, lambda: call(driver)):
        assert is_well(driver), moment
        moment += 1
    assert moment > 8


@pytest.mark.parametrize(
    "module",
    ["_communicator.running", "_requests.request", "_calls.message_steps", "_runtime.engine"],
)
def test_a_signal_handler_between_two_waits_is_refused_too(module: str, driver: Plain) -> None:
    """Then no frame of the driver's is below it, but one of who calls the driver."""
    name = importlib.import_module(f"pycoll.{module}").__name__
    caller: dict[str, Any] = {"__name__": name}
    exec("def call(handler):\n    return handler()", caller)
    with driver.locked():
        assert caller["call"](lambda: driver.is_inside())
        assert driver._is_mine()
    assert not caller["call"](lambda: driver.is_inside())


def test_an_operator_that_communicates_is_refused_and_does_no_harm(driver: Plain) -> None:
    asked: list[str] = []

    def look() -> None:
        for call in (lambda: driver.nap(soon), lambda: lock(driver)):
            with pytest.raises(Error, match="must not communicate"):
                call()
            asked.append("")
        assert driver._is_mine()

    driver.nap(look)
    assert len(asked) == 2
    assert is_well(driver)
