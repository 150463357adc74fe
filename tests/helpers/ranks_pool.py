"""Jobs that stay up and run one test after the other, so that a test costs no start of ranks.

The module is both ends: `Pools` and `Pool` in the process of pytest, and as a program each of the
ranks. A test's function comes pickled by value, runs on every rank with a communicator of its own,
and what it returned or raised goes back, by a connection of each rank's. Its calls have no deadline
unless they, or the pool's options, say so. Ranks that wait for one that has raised, or that wait
for each other, are ended here, and the next test gets new ones.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from multiprocessing.connection import Client, Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from patience import PATIENCE

ANSWER_S = 55.0 * PATIENCE
"""Deadline of one test; less than pytest's."""

FAILED_S = 0.5 * PATIENCE
"""When one rank of a test has raised: for how long the others may still say what they have seen."""

WARN_AFTER_S = 2.5 * PATIENCE
"""When ranks have waited for so long, the launcher looks whether they wait for each other."""

DEADLOCK = "pycoll-run: deadlock: "
"""How it begins to say that they do, and will for ever."""

MOST_RANKS = 40
"""So many ranks may wait for tests at a time. Each takes some 40 MB."""

POOL = ("TEST_POOL_OF_PYCOLL", "1")
"""The variable of all processes of a pool, which outlives the module that started it."""


class Answer(NamedTuple):
    """What a program did on one rank.

    Attributes:
        error: the traceback of what it raised; empty: nothing.
        result: what it returned.
    """

    error: str
    result: Any = None


class Pools:
    """Pools by what they were asked for, the least recently used first."""

    def __init__(self) -> None:
        self._kept: dict[Any, Pool] = {}

    def __call__(
        self,
        size: int,
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> Pool:
        """Return the pool of such a job; it may have run tests of other modules."""
        key = (size, tuple(options), tuple(sorted((environment or {}).items())))
        pool = self._kept.pop(key, None) or Pool(size, options, environment)
        self._kept[key] = pool
        while sum(kept.size for kept in self._kept.values()) > max(MOST_RANKS, size):
            self._kept.pop(next(iter(self._kept))).close()
        return pool

    def close(self) -> None:
        """End all jobs; each must end well."""
        while self._kept:
            self._kept.popitem()[1].close()


class Pool:
    """A job of `size` ranks; started when first used, and again after a test that failed.

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
        self.size = size
        self._options = options
        self._environment = {
            **os.environ,
            "PYCOLL_WARN_AFTER": str(WARN_AFTER_S),
            **(environment or {}),
            **dict([POOL]),
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._ranks: dict[Connection, int] = {}
        self._pids: dict[int, int] = {}
        self._folder = ""
        self._num_said = 0  # bytes that were there when the test began

    def __call__(self, program: Callable[..., Any], *args: Any) -> list[Any]:
        """Run ``program(comm, *args)`` on every rank; return the results by rank."""
        import cloudpickle

        from pycoll._support import pickling

        module = sys.modules[program.__module__]
        cloudpickle.register_pickle_by_value(module)  # its name means nothing to the ranks
        try:
            payload = pickling.dumps((program, args))
        finally:
            cloudpickle.unregister_pickle_by_value(module)
        if self._process is None:
            self._start()
        self._num_said = len(self._said())
        for connection in self._ranks:
            with contextlib.suppress(OSError):  # that it has ended is seen below
                connection.send_bytes(payload)
        answers = self._answers()
        if len(answers) == self.size and not any(answer.error for answer in answers.values()):
            return [answers[rank].result for rank in range(self.size)]
        said = self._abandon(range(self.size) - answers.keys())
        lines = [f"--- rank {r} ---\n{a.error}" for r, a in sorted(answers.items()) if a.error]
        raised = f"{len(lines)} of {self.size} ranks raised, {self.size - len(answers)} do not end"
        raise AssertionError("\n".join([raised, *lines, "--- what the job said ---", said]))

    def _answers(self) -> dict[int, Answer]:
        """What ranks answer, until nothing more is to be expected."""
        answers: dict[int, Answer] = {}
        deadline, awaited = time.monotonic() + ANSWER_S, dict(self._ranks)
        while awaited and (left_s := deadline - time.monotonic()) > 0:
            ready = wait(list(awaited), min(left_s, 1.0))
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = awaited.pop(connection)
                try:
                    answers[rank] = Answer(*pickle.loads(connection.recv_bytes()))
                except (EOFError, OSError):
                    answers[rank] = Answer("its process has ended\n")
                if answers[rank].error:
                    deadline = min(deadline, time.monotonic() + FAILED_S)
            if not ready and DEADLOCK.encode() in self._said()[self._num_said :]:
                break
        return answers

    def _start(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="pycoll-test-")
        address = f"{self._folder}/answers"
        options = ["-n", str(self.size), "--tag-output", *self._options]
        with socket.socket(socket.AF_UNIX) as listener, open(f"{self._folder}/said", "wb") as said:
            listener.bind(address)
            listener.listen(self.size)
            listener.settimeout(0.2)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pycoll._launcher", *options, __file__, address],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                env=self._environment,
            )
            while len(self._ranks) < self.size:
                with contextlib.suppress(TimeoutError):
                    connection = Connection(listener.accept()[0].detach())
                    rank, self._pids[rank] = connection.recv()
                    self._ranks[connection] = rank
                if self._process.poll() is not None:
                    raise AssertionError(f"the job did not start:\n{self._abandon(())}")

    def _said(self) -> bytes:
        return Path(f"{self._folder}/said").read_bytes()

    def _abandon(self, silent: Collection[int]) -> str:
        """End the job at once; return what it said in this test, and where `silent` ranks were."""
        assert self._process is not None
        for rank in silent:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[rank], signal.SIGUSR1)  # prints the stacks of its threads
        # At the first of these the launcher says who waits for whom, at the second it kills.
        for wait_s in (0.5 * PATIENCE, None):
            self._process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(wait_s)
        said = self._said()[self._num_said :].decode(errors="replace")
        self._forget()
        return said

    def _forget(self) -> None:
        for connection in self._ranks:
            connection.close()
        self._process, self._ranks, self._pids = None, {}, {}
        shutil.rmtree(self._folder)

    def close(self) -> None:
        """End the job; it must end well."""
        if self._process is None:
            return
        for connection in self._ranks:
            connection.close()
        try:
            status = self._process.wait(10.0 * PATIENCE)
        except subprocess.TimeoutExpired:
            said = self._abandon(range(self.size))
            raise AssertionError(f"the job of {self.size} ranks does not end:\n{said}") from None
        said = self._said().decode(errors="replace")
        self._forget()
        assert status == 0, f"the job of {self.size} ranks ended with {status}:\n{said}"


def serve(address: str) -> None:
    """Be one rank: run what comes until nothing comes any more."""
    import pycoll

    faulthandler.register(signal.SIGUSR1, all_threads=True)
    with pycoll.init() as world, Client(address, "AF_UNIX") as connection:
        connection.send((world.rank, os.getpid()))
        while True:
            try:
                payload = connection.recv_bytes()
            except (EOFError, KeyboardInterrupt):
                return
            with world.dup() as comm:
                connection.send_bytes(pickle.dumps(tuple(_answer(comm, payload))))
                try:
                    # Here it is seen who waits for this rank in vain; and what others still send to
                    # `comm` finds it open.
                    world.barrier()
                except (KeyboardInterrupt, pycoll.PeerFailed):
                    sys.exit("the test has failed")


def _answer(comm: Any, payload: bytes) -> Answer:
    """Run a test."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            program, args = pickle.loads(payload)
            return Answer("", program(comm, *args))
        except BaseException:  # also pytest's own Failed
            return Answer(traceback.format_exc())


if __name__ == "__main__":
    serve(sys.argv[1])
