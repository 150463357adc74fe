"""Pools of ranks that run one test after the other: `pycoll.Pool`, and what tests want beyond it.

A test's function runs on every rank with a communicator of its own. Its calls have no deadline
unless they, or the pool's options, say so; a deadlock, an exception or `ANSWER_S` end it. Then all
that the ranks know is told: the launcher's table, the traceback of each rank that has raised or was
interrupted, and on standard error the stacks of a rank that has to be ended. The next test of the
pool has new ranks, without the limits, threads and handlers that the failed one has left.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from patience import PATIENCE

import pycoll
from pycoll._functions import call
from pycoll._functions.function import Ended
from pycoll._launcher import cli

ANSWER_S = 55.0 * PATIENCE
"""Deadline of one test; less than pytest's."""

CLOSE_S = 30.0 * PATIENCE
"""For ranks to end that have nothing to do: they may have imported what ends slowly."""

WARN_AFTER_S = 2.5 * PATIENCE
"""When ranks have waited for so long, the launcher looks whether they wait for each other."""

MOST_RANKS = 40
"""So many ranks may wait for tests at a time. Each takes some 40 MB."""

POOL = ("TEST_POOL_OF_PYCOLL", "1")
"""The variable of all processes of a pool, which outlives the module that started it."""


class Pools:
    """Pools by what they were asked for, the least recently used first."""

    def __init__(self) -> None:
        self._kept: dict[Any, RanksOfTests] = {}

    def __call__(
        self,
        size: int,
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> RanksOfTests:
        """Return the pool of such a job; it may have run tests of other modules."""
        key = (size, tuple(options), tuple(sorted((environment or {}).items())))
        pool = self._kept.pop(key, None)
        while self._kept and sum(k.size for k in self._kept.values()) + size > MOST_RANKS:
            self._kept.pop(next(iter(self._kept))).close()
        self._kept[key] = pool = pool or RanksOfTests(size, options, environment)
        return pool

    def close(self) -> None:
        """End all ranks; each must end well."""
        while self._kept:
            self._kept.popitem()[1].close()


class RanksOfTests(pycoll.Pool):
    """A pool with any options of pycoll-run, called with a program and its arguments.

    Args:
        size: number of ranks.
        options: more for pycoll-run.
        environment: variables of the ranks, besides those of this process.
    """

    def __init__(
        self,
        size: int,
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        warn_after = {"PYCOLL_WARN_AFTER": str(WARN_AFTER_S)}
        self._environment = {**warn_after, **(environment or {}), **dict([POOL])}
        with self._variables():
            arguments = cli._parser().parse_args(["-n", str(size), "--tag-output", *options])
            self._open(cli._options(arguments))

    def __call__(self, program: Callable[..., Any], *args: Any) -> list[Any]:
        """Run ``program(comm, *args)`` on every rank; return the results by rank."""
        return self.run(run_test, program, args, timeout=ANSWER_S)

    def close(self) -> None:
        """End the ranks; they must end well."""
        outcome = self._ranks.close(CLOSE_S) if self._ranks is not None else None
        super().close()
        assert outcome is None or outcome.status == 0, f"{self.size} ranks: {outcome.report}"

    def _start(self) -> None:
        with self._variables():
            super()._start()

    def _results(self, ended: Ended, limit: float | None) -> list[Any]:
        try:
            return super()._results(ended, limit)
        except BaseException as exc:
            lines = [f"{type(exc).__name__}: {exc}"]
            for rank, report in enumerate(ended.reports):
                if report is not None and report.head["kind"] == "raised":
                    lines += [f"--- rank {rank} ---", report.head["traceback"]]
            assert self._ranks is not None
            self._ranks.close()
            raise AssertionError("\n".join(lines)) from None

    @contextlib.contextmanager
    def _variables(self) -> Iterator[None]:
        """Have the variables of the ranks in this process, for all that it starts meanwhile."""
        before = dict(os.environ)
        os.environ.update(self._environment)
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)


def run_test(comm: Any, program: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Run a test on a rank, with globals that no other test has seen."""
    faulthandler.register(signal.SIGTERM, all_threads=True, chain=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return program(comm, *args)
    except SystemExit as exc:
        raise AssertionError(f"the test has called sys.exit({exc.code!r})") from exc
    finally:
        call._namespaces.clear()
