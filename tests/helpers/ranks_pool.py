"""Jobs that stay up and run one test after the other, so that a test costs no start of ranks.

The module is both ends: `Pools` and `Pool` in the process of pytest, and as a program each of the
ranks. A test's function comes pickled by value, runs on every rank with a communicator of its own,
and what it returned or raised goes back. A test that breaks its communicator leaves the next one's
untouched: that is the library's own promise.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

from patience import PATIENCE

OP_TIMEOUT_S = 20.0 * PATIENCE
"""Deadline of every operation inside a test: ranks that wait for one that has raised go on."""

ANSWER_S = 55.0 * PATIENCE
"""Deadline of one test; less than pytest's."""

MOST_RANKS = 40
"""So many ranks may wait for tests at a time. Each takes some 40 MB."""

POOL = ("TEST_POOL_OF_PYCOLL", "1")
"""The variable of all processes of a pool, which outlives the module that started it."""


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
    """A job of `size` ranks; started when first used, and again after a test that hung.

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
        self._environment = {**os.environ, **(environment or {}), **dict([POOL])}
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._folder = ""

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
        if self._connection is None:
            self._start()
        assert self._connection is not None
        outcomes: list[Any] = []
        with contextlib.suppress(EOFError, OSError):
            self._connection.send_bytes(payload)
            if self._connection.poll(ANSWER_S):
                outcomes = pickle.loads(self._connection.recv_bytes())
        if not outcomes:
            said = self._said()
            self.close()
            raise AssertionError(f"the job of {self.size} ranks gave no answer; it said:\n{said}")
        errors = [f"--- rank {r} ---\n{text}" for r, (text, _) in enumerate(outcomes) if text]
        assert not errors, "\n".join([f"{len(errors)} of {self.size} ranks raised", *errors])
        return [result for _, result in outcomes]

    def _start(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="pycoll-test-")
        address = f"{self._folder}/answers"
        options = ["-n", str(self.size), "--op-timeout", str(OP_TIMEOUT_S), *self._options]
        with socket.socket(socket.AF_UNIX) as listener, open(f"{self._folder}/said", "wb") as said:
            listener.bind(address)
            listener.listen()
            listener.settimeout(0.2)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pycoll._launcher", *options, __file__, address],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                env=self._environment,
            )
            while self._connection is None:
                with contextlib.suppress(TimeoutError):
                    self._connection = Connection(listener.accept()[0].detach())
                assert self._process.poll() is None, f"the job did not start:\n{self._said()}"

    def _said(self) -> str:
        return Path(f"{self._folder}/said").read_text(errors="replace")

    def close(self) -> None:
        """End the job; it must end well."""
        process, self._process = self._process, None
        connection, self._connection = self._connection, None
        if process is None:
            return
        if connection is not None:
            connection.close()
        try:
            status = process.wait(10.0 * PATIENCE)
            assert status == 0, f"the job of {self.size} ranks ended with {status}:\n{self._said()}"
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
        finally:
            shutil.rmtree(self._folder)


def serve(address: str) -> None:
    """Be one rank: run what comes until nothing comes any more."""
    import pycoll

    with pycoll.init() as world:
        connection = Client(address, "AF_UNIX") if world.rank == 0 else None
        while True:
            payload = None
            if connection is not None:
                with contextlib.suppress(EOFError):
                    payload = connection.recv_bytes()
            payload = world.broadcast(payload, timeout=float("inf"))
            if payload is None:
                return
            outcomes = world.gather(_outcome(world, payload))
            if connection is not None:
                connection.send_bytes(pickle.dumps(outcomes))


def _outcome(world: Any, payload: bytes) -> tuple[str, Any]:
    """Run a test; return (traceback, or "" if all is well; its result)."""
    with world.dup() as comm, warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            program, args = pickle.loads(payload)
            return "", program(comm, *args)
        except BaseException:  # also pytest's own Failed
            text = traceback.format_exc()
            with contextlib.suppress(Exception):
                comm.barrier(timeout=0.0)  # breaks it: the others need not wait for their deadline
            return text, None


if __name__ == "__main__":
    serve(sys.argv[1])
