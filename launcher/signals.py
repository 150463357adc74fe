"""Signals as data: noted while a job runs, for its loop to act on."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import threading
from collections.abc import Iterator

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
"""What means something to ranks alone: a batch system says so that their time will soon be over."""


@contextlib.contextmanager
def caught_signals(
    selector: selectors.BaseSelector, for_ranks: list[int] | None = None
) -> Iterator[list[int]]:
    """Note SIGINT, SIGTERM and SIGHUP in a list, and wake the selector, instead of acting on them.

    So are SIGUSR1 and SIGUSR2 in `for_ranks`, if that is given.

    Signals that are ignored (as nohup does) stay ignored. In any thread but the main one nothing is
    changed and the list stays empty. The handlers are put back at the end.
    """
    caught: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return
    end, ours = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    # Without a descriptor a signal that comes just before the selector sleeps would wake nobody.
    before = signal.set_wakeup_fd(ours, warn_on_full_buffer=False)
    handlers = {}
    lists: dict[int, list[int]] = dict.fromkeys(_ENDING, caught)
    if for_ranks is not None:
        lists |= dict.fromkeys(PASSED_ON, for_ranks)
    for signum in lists:
        if signal.getsignal(signum) is not signal.SIG_IGN:
            handlers[signum] = signal.signal(signum, lambda got, _: lists[got].append(got))
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:  # children would leave no exit status
        handlers[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    selector.register(end, selectors.EVENT_READ, lambda: os.read(end, 4096))
    try:
        yield caught
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(before)
        selector.unregister(end)
        os.close(end)
        os.close(ours)


def outlive_signals() -> None:
    """Ignore what a launcher sends to all processes of a job: this one ends with its ranks.

    Slurm, say, signals whatever runs in a step, so that ranks may save what they have.
    """
    for name in ("INT", "TERM", "HUP", "USR1", "USR2", "ALRM", "XCPU"):
        signal.signal(getattr(signal, f"SIG{name}"), signal.SIG_IGN)
