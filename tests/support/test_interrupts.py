"""When a KeyboardInterrupt is raised: not in the middle of what an engine does."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from pycoll._support import interrupts as module
from pycoll._support.interrupts import Interrupts


@pytest.fixture
def interrupts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Interrupts]:
    woken.clear()
    monkeypatch.setattr(module, "_installed", [])  # another test may have an engine here
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupts = Interrupts(lambda: woken.append(1))
    interrupts.install()
    yield interrupts
    interrupts.uninstall()
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


woken: list[int] = []


def test_an_interrupt_outside_of_calls_is_raised_at_once(interrupts: Interrupts) -> None:
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    interrupts.check()
    assert interrupts.hold()
    interrupts.release()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert not woken


def test_an_interrupt_in_a_call_is_raised_where_it_waits_or_at_its_end(
    interrupts: Interrupts,
) -> None:
    assert interrupts.hold()
    signal.raise_signal(signal.SIGINT)
    assert woken == [1]
    with pytest.raises(KeyboardInterrupt):
        interrupts.check()
    interrupts.check()
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        interrupts.release()
    interrupts.check()


def test_a_second_interrupt_is_not_held_back(interrupts: Interrupts) -> None:
    assert interrupts.hold()
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    interrupts.release()  # it was raised; the first is not raised again


def test_of_engines_of_several_worlds_that_one_holds_back_that_is_busy(
    interrupts: Interrupts,
) -> None:
    rung: list[int] = []
    other = Interrupts(lambda: rung.append(1))
    other.install()
    for busy, idle in (other, interrupts), (interrupts, other):
        assert busy.hold()
        signal.raise_signal(signal.SIGINT)
        idle.check()
        with pytest.raises(KeyboardInterrupt):
            busy.release()
    assert (woken, rung) == ([1], [1])
    other.uninstall()
    assert interrupts.hold()
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        interrupts.check()
    interrupts.release()


def test_other_threads_hold_nothing_back_and_raise_nothing(interrupts: Interrupts) -> None:
    held: list[bool] = []
    assert interrupts.hold()
    signal.raise_signal(signal.SIGINT)
    thread = threading.Thread(target=lambda: (held.append(interrupts.hold()), interrupts.check()))
    thread.start()
    thread.join()
    assert held == [False]
    with pytest.raises(KeyboardInterrupt):
        interrupts.release()


def test_a_handler_of_the_program_is_left_alone() -> None:
    got: list[int] = []

    def handler(signum: int, frame: object) -> None:
        got.append(signum)

    before = signal.signal(signal.SIGINT, handler)
    try:
        interrupts = Interrupts(lambda: None)
        interrupts.install()
        assert interrupts.hold()
        signal.raise_signal(signal.SIGINT)
        interrupts.release()
        interrupts.uninstall()
        assert got == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)
