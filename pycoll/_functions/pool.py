"""`pycoll.Pool`: ranks that stay, for one function after the other."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

from pycoll._functions import call
from pycoll._functions.function import (
    Ended,
    check_timeout,
    checked_options,
    path,
    results,
    task,
)
from pycoll._functions.ranks import Ranks
from pycoll._launcher.job_spec import Options
from pycoll._support.public_edge import edge, edges, public
from pycoll.errors import Error

REPLACED = "the pool's ranks have ended, and what they held is lost: the next run has new ones"


def _nothing(comm: Any) -> None:
    pass


@public
@edges
class Pool:
    """Ranks on this machine that stay: imports, globals and open files last from run to run.

        with pycoll.Pool(4) as pool:
            pool.run(load, "data.parquet")     # load(comm, path): `global table`, ...
            pool.run(fit, 0.1)                 # in the same four processes

    A module is imported once by each rank. A function of a notebook or of ``__main__`` comes anew
    with each run, with what it mentions of the caller's globals; what it makes global itself, and
    its caller does not have, is there in the next run.

    Each run has communicators of its own, which end with it: what is wrong with one run's, the next
    does not see. An exception ends a run on all ranks; those that have not come to an end 2 s later
    (PYCOLL_GRACE) are interrupted (KeyboardInterrupt). So does a deadlock, which is found as for
    `pycoll.run`.
    Ranks are replaced, and what they held is lost, if one of them dies or calls ``sys.exit(1)``, or
    if the run takes longer than its timeout or does not heed the interrupt; the exception says so.

    Several threads may call `run`; one run comes after the other.

    Args:
        n: number of ranks. They are started at once.
        transport: as in `pycoll.init`; None: that of the environment.
        timeout: seconds for each run for which none is given; None: no limit.
        tag_output: begin each line that a rank prints with its rank; None: on a terminal.

    Raises:
        TypeError, ValueError: an argument is wrong.
        Error: the ranks could not be started, or the transport cannot be used.
    """

    @edge
    def __init__(
        self,
        n: int,
        *,
        transport: str | None = None,
        timeout: float | None = None,
        tag_output: bool | None = None,
    ) -> None:
        self._open(
            checked_options(n, timeout, transport)._replace(
                tag_output=None if tag_output is None else bool(tag_output),
                ends_deadlocks=False,  # ranks are interrupted, and stay
            )
        )

    def _open(self, options: Options) -> None:
        self._options = options
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._ranks: Ranks | None = None
        self._is_closed = False
        self._finalizer: weakref.finalize[..., Any] | None = None
        with self._lock:
            self._start()

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._options.size

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float | None = None) -> list[Any]:
        """Call ``fn(comm, *args)`` on each rank.

        Args:
            fn: called with a communicator of all ranks that is this run's own, and `args`.
            args: passed on to `fn`; each rank has its own copy.
            timeout: seconds; None: that of the pool.

        Returns:
            What `fn` has returned, by rank.

        Raises:
            Exception: as `pycoll.run`.
            Error: the pool is closed.
            KeyboardInterrupt: the ranks were interrupted, too; those that have ended what they did
                within 2 s (PYCOLL_GRACE) are there for the next run, with what they hold.
        """
        limit = self._options.timeout_s if timeout is None else check_timeout(timeout)
        write_task = task(fn, args)
        with self._lock:
            ranks = self._ready()
            try:
                return self._results(ranks.run(write_task, limit), limit)
            except BaseException as exc:
                if ranks.is_over:
                    exc.add_note(REPLACED)
                raise

    def close(self) -> None:
        """End the ranks. May be called again; the end of the program does the same."""
        with self._lock:
            self._is_closed = True
            if self._ranks is not None:
                self._ranks.close()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Pool cannot be pickled: a function that ranks run does not mention it")

    def __repr__(self) -> str:
        return f"<pycoll.Pool of {self.size} ranks{', closed' if self._is_closed else ''}>"

    def _results(self, ended: Ended, limit: float | None) -> list[Any]:
        return results("pycoll.Pool.run", ended, self._options._replace(timeout_s=limit))

    def _ready(self) -> Ranks:
        """Return ranks that can run something; new ones, if those of the last run have ended."""
        if self._is_closed:
            raise Error("this pool is closed")
        if os.getpid() != self._pid:
            raise Error("this pool belongs to the process that has made it, not to its children")
        if self._ranks is None or self._ranks.is_over:
            self._start()
        assert self._ranks is not None
        return self._ranks

    def _start(self) -> None:
        if self._finalizer is not None:
            self._finalizer.detach()
        self._ranks = ranks = Ranks(self._options, _write_start)
        self._finalizer = weakref.finalize(self, ranks.close)
        try:
            results("pycoll.Pool", ranks.run(task(_nothing, ()), None), self._options)
        except BaseException:
            ranks.close()
            raise


def _write_start(fd: int, ticket: call.InheritedDescriptors) -> None:
    argv = ["serving", *map(str, sys.argv), str(ticket)]
    call.write_parcel(fd, {"module": "pycoll._functions.serving", "path": path(), "argv": argv})
