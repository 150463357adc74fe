"""The gate before this process's results: another rank writes them only while it is open.

One rank may write the results of all (`kernel_run`). A rank that gives its call up must not return
while that goes on, nor may it begin later. So who writes holds a lock on a file of each rank whose
memory it writes; who gives up shuts its gate, which waits until nobody holds it any more. The
system lets go of the locks of a process that dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import mmap
import os
import select
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

_FORM: Final = struct.Struct("<16sQIi")
_PAGE: Final = struct.Struct("<16sQi")  # nonce, how often it was shut, who writes

NBYTES: Final = _FORM.size

PATIENCE_S: Final = 10.0
"""A kernel has ended by then, even of a process that was stopped and holds the lock."""


class Pass(NamedTuple):
    """What lets another rank write the results of one call.

    Attributes:
        nonce: of the gate, which no other has.
        shut: how often it was shut before.
        pid, descriptor: of its process, and of its file there.
    """

    nonce: bytes
    shut: int
    pid: int
    descriptor: int

    def pack(self) -> bytes:
        """Return the bytes that `read` takes."""
        return _FORM.pack(*self)


def read(data: bytes) -> Pass:
    return Pass(*_FORM.unpack(data))


class _Page:
    """What a gate's file says."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._page = mmap.mmap(descriptor, mmap.PAGESIZE)

    def get(self) -> tuple[bytes, int, int]:
        """Return the nonce, how often the gate was shut, and the process that writes, or 0."""
        nonce, shut, writer = _PAGE.unpack_from(self._page)
        return nonce, shut, writer

    def set(self, nonce: bytes, shut: int, writer: int) -> None:
        """Write all of it."""
        _PAGE.pack_into(self._page, 0, nonce, shut, writer)


class _Gate(_Page):
    """This process's own."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        descriptor = os.memfd_create("pycoll-gate", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, mmap.PAGESIZE)
        super().__init__(descriptor)
        self.set(os.urandom(16), 0, 0)

    def shut(self) -> None:
        """Return when nobody writes, nor will for a pass that was given before."""
        until = time.monotonic() + PATIENCE_S
        while not _lock(self.descriptor, fcntl.LOCK_EX) and time.monotonic() < until:
            with contextlib.suppress(KeyboardInterrupt):  # another error is on its way already
                time.sleep(1e-3)
        nonce, shut, writer = self.get()
        if writer:  # it has died, and its kernel ends with it
            _await_end(writer, until)
        self.set(nonce, shut + 1, 0)
        fcntl.flock(self.descriptor, fcntl.LOCK_UN)


def _lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _await_end(pid: int, until: float) -> None:
    while (left := until - time.monotonic()) > 0:
        try:
            ended = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        except OSError:  # no descriptor is free
            with contextlib.suppress(KeyboardInterrupt):  # see `shut`
                time.sleep(1e-3)
            continue
        try:
            poller = select.poll()  # which takes descriptors of any number
            poller.register(ended, select.POLLIN)
            poller.poll(math.ceil(1000 * left))
        finally:
            os.close(ended)
        return


class _Others:
    """The gates of other processes, which stay open."""

    def __init__(self) -> None:
        self._pages: dict[bytes, _Page] = {}
        self._users: dict[bytes, int] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def held(self, passes: Sequence[Pass]) -> Iterator[bool]:
        """Hold all these gates open; gives False if one is shut, or cannot be reached."""
        taken: list[bytes] = []
        try:
            yield all([self._take(one, taken) for one in passes])
        finally:
            with self._lock:
                for nonce in taken:
                    self._let_go(nonce)

    def _take(self, one: Pass, taken: list[bytes]) -> bool:
        with self._lock:
            page = self._pages.get(one.nonce) or self._open(one)
            if page is None or not _lock(page.descriptor, fcntl.LOCK_SH):
                return False
            taken.append(one.nonce)
            self._users[one.nonce] = self._users.get(one.nonce, 0) + 1
            nonce, shut, _ = page.get()
            if shut == one.shut:
                page.set(nonce, shut, os.getpid())
            return shut == one.shut

    def _open(self, one: Pass) -> _Page | None:
        try:
            found = os.open(f"/proc/{one.pid}/fd/{one.descriptor}", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            page = _Page(found)
        except (OSError, ValueError):  # another file
            os.close(found)
            return None
        if page.get()[0] != one.nonce:
            os.close(found)
            return None
        self._pages[one.nonce] = page
        return page

    def _let_go(self, nonce: bytes) -> None:
        self._users[nonce] -= 1
        if self._users[nonce]:
            return
        page = self._pages[nonce]
        _, shut, _ = page.get()
        page.set(nonce, shut, 0)
        fcntl.flock(page.descriptor, fcntl.LOCK_UN)


_own: _Gate | None = None
_making = threading.Lock()
_others = _Others()


def _of_this_process() -> _Gate:
    global _own
    with _making:
        if _own is None or _own.pid != os.getpid():
            _own = _Gate()
        return _own


def give() -> Pass:
    """Return what lets another rank write this process's results, until `shut`."""
    own = _of_this_process()
    nonce, shut, _ = own.get()
    return Pass(nonce, shut, own.pid, own.descriptor)


def shut() -> None:
    """Return when no other rank writes to this process's memory, nor will for an old pass."""
    _of_this_process().shut()


def held(passes: Sequence[Pass]) -> contextlib.AbstractContextManager[bool]:
    """Hold the gates of other ranks open; gives False if one is shut, or cannot be reached."""
    return _others.held(passes)
