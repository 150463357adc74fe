"""Waiting for requests in an asyncio program: on a descriptor of the event loop.

Each loop has one eventfd while anything in it waits for a request. Whoever finds a request done
notes its future and writes to the eventfd; the loop wakes up and tells those who await them.
"""

from __future__ import annotations

import asyncio
import math
import os
import threading
from collections import deque

from pycoll._runtime.engine import Engine
from pycoll._runtime.task import Started


class _Bridge:
    """What one event loop waits for."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting = 0
        self._finished: deque[asyncio.Future[None]] = deque()
        self._lock = threading.Lock()  # between a bell that rings and one that is given back
        self._bell = -1

    async def wait(self, engine: Engine, task: Started, timeout: float) -> None:
        """Return when `task` is done.

        Raises:
            OperationTimeout: that took longer than `timeout` seconds.
        """
        future: asyncio.Future[None] = self._loop.create_future()

        def tell(task: Started) -> None:
            with self._lock:
                self._finished.append(future)
                if self._bell >= 0:
                    os.eventfd_write(self._bell, 1)

        self._open()
        try:
            with engine.locked():
                if task.done:
                    return
                task.watchers[tell] = None
            try:
                async with asyncio.timeout(timeout if timeout != math.inf else None):
                    await future
            except TimeoutError:
                with engine.locked():
                    raise engine.timeout(task.call) from None
        finally:
            task.watchers.pop(tell, None)
            self._close()

    def _open(self) -> None:
        self._waiting += 1
        if self._waiting == 1:
            self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._loop.add_reader(self._bell, self._deliver)

    def _close(self) -> None:
        self._waiting -= 1
        if self._waiting == 0:
            del _bridges[self._loop]
            with self._lock:
                self._loop.remove_reader(self._bell)
                os.close(self._bell)
                self._bell = -1

    def _deliver(self) -> None:
        os.eventfd_read(self._bell)
        while self._finished:
            future = self._finished.popleft()
            if not future.done():
                future.set_result(None)


_bridges: dict[asyncio.AbstractEventLoop, _Bridge] = {}


async def wait(engine: Engine, task: Started, timeout: float) -> None:
    """Return when `task` is done; the event loop of the caller goes on.

    Raises:
        OperationTimeout: that took longer than `timeout` seconds.
        RuntimeError: the caller does not run in an event loop of asyncio.
    """
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        raise RuntimeError(
            "await of a request needs the event loop of asyncio, and none runs here. Elsewhere let "
            "a thread wait, in trio: await trio.to_thread.run_sync(request.wait)"
        ) from None
    bridge = _bridges.get(loop)
    if bridge is None:
        bridge = _bridges[loop] = _Bridge(loop)
    await bridge.wait(engine, task, timeout)
