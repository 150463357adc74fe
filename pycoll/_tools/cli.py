"""The command `pycoll`: this machine, jobs that run, proofs, pictures, benchmarks, manifests."""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from types import ModuleType
from typing import TYPE_CHECKING, Final, NamedTuple

from pycoll._support.wording import did_you_mean
from pycoll._tools import bench, explain, k8s, show, simulate, status, top, tune
from pycoll._topology import command as topology

if TYPE_CHECKING:
    from pycoll._cuda.cuda import Gpu
    from pycoll.schedules import Algorithm

GPU_DEADLINE_S: Final = 10.0
"""To wake many GPUs that nobody uses takes a driver seconds."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with these arguments, or those of the process; returns the exit status.

    Raises:
        SystemExit: status 2 if the arguments make no sense, after saying so on stderr.
    """
    try:
        status = _run(argv)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # Who reads, as `head`, has enough. Nor may the interpreter complain when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _run(argv: Sequence[str] | None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="pycoll", description=__doc__)
    parser.add_argument("--version", action="version", version=f"pycoll {_version('pycollective')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    parsers = {"info": commands.add_parser("info", help="show versions, cores and transports")}
    parsers["check"] = check = commands.add_parser("check", help="prove the algorithms")
    check.add_argument(
        "--max-size",
        type=_positive,
        default=64,
        metavar="N",
        help="prove every number of ranks up to N (default: 64)",
    )
    check.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="a collective, as all_reduce, or one and its algorithms, as all_reduce ring tree; "
        "algorithms alone: of all collectives that have them (default: all)",
    )
    modules: dict[str, tuple[ModuleType, str]] = {
        "show": (show, "draw an algorithm, round by round"),
        "explain": (explain, "say which algorithm a call would run, and why"),
        "simulate": (simulate, "compute how long collectives take on any number of machines"),
        "bench": (bench, "time collectives, beside MPI and gloo"),
        "tune": (tune, "measure the algorithms, for choosing among them"),
        "status": (status, "show who waits for whom in a job that runs, and all stacks"),
        "top": (top, "show what the ranks of a job do each second, and who is waited for"),
        "topology": (topology, "show this machine, and measure the links between hosts"),
        "k8s": (k8s, "print what Kubernetes needs to run a job"),
    }
    for name, (module, what) in modules.items():
        parsers[name] = commands.add_parser(name, help=what)
        module.add_options(parsers[name])
    if argv and argv[0] not in parsers and (meant := did_you_mean(argv[0], parsers)):
        parser.error(f"there is no command {argv[0]}{meant}")
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        own = parsers[arguments.command]
        flags = [flag for action in own._actions for flag in action.option_strings]
        meant = did_you_mean(unknown[0].partition("=")[0], flags)
        own.error(f"unrecognized arguments: {' '.join(unknown)}{meant}")
    if arguments.command == "info":
        return _info()
    if arguments.command in modules:
        try:
            code: int = modules[arguments.command][0].main(arguments)
            return code
        except ValueError as exc:
            parsers[arguments.command].error(str(exc))
    try:
        chosen = _chosen(arguments.names)
    except ValueError as exc:
        check.error(str(exc))
    return _check(chosen, arguments.max_size)


def _chosen(words: Sequence[str]) -> list[Algorithm]:
    """Return the algorithms that these names of collectives and algorithms mean; none: all.

    Raises:
        ValueError: one is the name of neither.
    """
    from pycoll.schedules import TABLE, find, names

    chosen: dict[str, list[str]] = {}
    collective = ""
    for word in words:
        if word in TABLE:
            collective = word
            chosen.setdefault(word, [])
        elif collective:
            chosen[collective].append(find(collective, word).name)
        elif having := [known for known in TABLE if word in TABLE[known]]:
            for known in having:
                chosen.setdefault(known, []).append(word)
        else:
            names(word)  # raises, with the collectives there are
    return [
        find(known, name)
        for known in (chosen if words else TABLE)
        for name in chosen.get(known) or names(known)
    ]


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, not {text!r}")
    return int(text)


class _Outcome(NamedTuple):
    """What came of the proof of one algorithm: how many cases, or why it is wrong."""

    proofs: int
    seconds: float
    failure: str | None = None


def _check(chosen: Sequence[Algorithm], max_size: int) -> int:
    """Prove the algorithms and print a line for each, in order; 1 if one is wrong."""
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    from pycoll._support.environment import usable_cores
    from pycoll.schedules import ROOTED
    from pycoll.schedules.check import WINDOWS

    print(f"proved for windows of {', '.join(map(str, WINDOWS))} receives into scratch")
    row = "{:<15} {:<19} {:>6}  {:<5} {:>7} {:>7}  {}"
    print(row.format("collective", "algorithm", "sizes", "roots", "proofs", "time", "result"))
    failures: list[str] = []
    cases = [(algorithm.collective, algorithm.name, max_size) for algorithm in chosen]
    with ExitStack() as stack:
        workers = min(usable_cores(), len(cases))
        outcomes: Iterable[_Outcome] = map(_prove, cases)
        if workers > 1:
            # Fresh interpreters: forking is not safe where threads run.
            fresh = multiprocessing.get_context("spawn")
            # Proofs leave no cycles to collect.
            pool = stack.enter_context(ProcessPoolExecutor(workers, fresh, gc.disable))
            outcomes = pool.map(_prove, cases)
        for (collective, name, _), outcome in zip(cases, outcomes, strict=True):
            result, proofs = "proved", str(outcome.proofs)
            if outcome.failure is not None:
                failures.append(outcome.failure)
                result, proofs = "WRONG", "-"
            roots = "each" if collective in ROOTED else "-"
            seconds = f"{outcome.seconds:.1f} s"
            print(
                row.format(collective, name, f"1-{max_size}", roots, proofs, seconds, result),
                flush=True,
            )
    for failure in failures:
        print(f"pycoll check: {failure}", file=sys.stderr)
    return 1 if failures else 0


def _prove(case: tuple[str, str, int]) -> _Outcome:
    """Prove (collective, algorithm, max_size)."""
    from pycoll.errors import ProofError
    from pycoll.schedules import find
    from pycoll.schedules.check import prove_algorithm

    collective, name, max_size = case
    started = time.monotonic()
    try:
        proofs, failure = prove_algorithm(find(collective, name), max_size).proofs, None
    except ProofError as exc:
        proofs, failure = 0, str(exc)
    return _Outcome(proofs, time.monotonic() - started, failure)


def _info() -> int:
    """Print what this installation and this machine offer."""
    # Imported here: `pycoll check` and `--help` need no transport.
    from pycoll import _transports as transports
    from pycoll._transports.rdma_devices import find

    rows = [
        ("pycoll", _version("pycollective")),
        ("platform", platform.platform()),
        ("cores", _cores()),
        ("Python", f"{platform.python_version()} ({platform.python_implementation()})"),
        ("NumPy", _version("numpy")),
        ("pyzmq", _version("pyzmq")),
        ("libzmq", _libzmq()),
        ("compiled core", _core()),
    ]
    for name, reason in transports.reasons().items():
        text = "usable" if reason is None else f"not usable: {reason}"
        if name == "rdma" and reason is None:
            text += f": {find(os.environ)}"
        rows.append((f"transport {name}", text))
    rows.append(("shared arrays", _shared_arrays()))
    rows += [*_rdma_ports(os.environ), *_gpus()]
    width = max(16, *(len(label) for label, _ in rows))
    for label, text in rows:
        print(f"{label:<{width}} {text}".rstrip())
    return 0


def _shared_arrays() -> str:
    """Say what `pycoll.share_arrays` can do here."""
    from pycoll import _transports as transports

    reason = transports.reasons()["shm"]
    if reason is not None:
        return f"not usable: {reason}"
    from pycoll._runtime import shared_arrays

    if not shared_arrays.can_be_made():
        return "not usable: NumPy's allocator cannot be replaced"
    pages = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
    try:
        with open(pages, encoding="ascii") as file:
            chosen = file.read().partition("[")[2].partition("]")[0]
    except OSError:
        chosen = "unknown"
    return f"usable; large pages: {chosen} ({pages})"


def _rdma_ports(environ: Mapping[str, str], root: str = "/") -> list[tuple[str, str]]:
    """For each port of an RDMA device a row, one for each of its addresses, and one for its fault.

    The address that is used says so.
    """
    from pycoll._transports.rdma_devices import find, ports, usable_gid

    used = find(environ, root)
    rows = []
    for port in ports(root):
        lid = f", LID {port.lid}" if port.lid else ""
        text = f"{port.state:<7} {port.link_layer:<10}  {port.rate}{lid}"
        rows.append((f"RDMA {port.device}:{port.number}", text))
        for gid in port.gids:
            text = f"{gid.kind:<10} {gid.address:<39} {gid.netdev}"
            if used[:3] == (port.device, port.number, gid):
                text += "  <- used"
            rows.append((f"  GID {gid.table_index}", text))
        usable = usable_gid(port, environ, root)
        if isinstance(usable, str):
            rows.append(("", f"not usable: {usable}"))
    return rows


def _gpus() -> list[tuple[str, str]]:
    """A row for each GPU, or one that says why there is none.

    A driver that a GPU does not answer waits for it for ever, and a broken package may raise
    whatever it likes: neither keeps the other rows from being shown.
    """
    from pycoll._cuda import cuda, programs

    rows: list[tuple[str, str]] = []

    def ask() -> None:
        try:
            gpus = cuda.describe()
            for gpu in gpus:
                size = f"{gpu.nbytes / 2**30:.1f} GiB"
                rows.append((f"GPU {gpu.number}", f"{gpu.name}, {size}, {gpu.state}"))
            if not rows:
                rows.append(("GPUs", "none: the NVIDIA driver has none for this process"))
            else:
                rows.append(
                    ("GPU reductions", programs.why_not() or "usable, among ranks of a host")
                )
                rows.append(("GPUDirect RDMA", _gpudirect(gpus, os.environ)))
        except Exception as exc:
            rows[:] = [("GPUs", f"not usable: {exc}")]

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(GPU_DEADLINE_S)
    if asking.is_alive():
        return [("GPUs", f"not usable: the driver has not answered for {GPU_DEADLINE_S:g} s")]
    return rows


def _gpudirect(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> str:
    """Whether the RDMA device may reach memory of GPUs by itself, or why not."""
    from pycoll._gpu import gpudirect
    from pycoll._transports.rdma_devices import find
    from pycoll._transports.verbs import DevicePort
    from pycoll._transports.verbs_errors import VerbsError

    if environ.get(gpudirect.VARIABLE) == "0":
        return f"not used: {gpudirect.VARIABLE}=0"
    choice = find(environ)
    if isinstance(choice, str):
        return "not used: no RDMA device can be used"
    able = [
        f"GPU {gpu.number}" + ("" if gpu.direct.writes else " (only to send: no flush of writes)")
        for gpu in gpus
        if gpu.direct.reads
    ]
    if not able:
        return "not used: the NVIDIA driver exports no memory as dma-bufs here"
    try:
        device = DevicePort(choice.device, choice.port, choice.gid.table_index, 1, 1)
        knows = device.can_register_dmabuf()
        device.close()
    except VerbsError as exc:
        return f"not used: {exc}"
    if not knows:
        return f"not used: pyverbs, the kernel or {choice.device} does not know dma-bufs"
    return f"{choice.device} with {', '.join(able)}, if a trial succeeds when it is first needed"


def _core() -> str:
    """What reductions run on."""
    try:
        from pycoll._transports._core import reduce_level
    except ImportError as exc:
        return f"missing ({exc}): NumPy reduces, and ranks of one host communicate by zmq"
    levels = ("any processor", "AVX2 and F16C", "AVX-512")
    return f"loaded, reductions for {levels[reduce_level(-1)]}"


def _cores() -> str:
    from pycoll._support.environment import usable_cores

    usable, affinity = usable_cores(), len(os.sched_getaffinity(0))
    if usable == affinity:
        return f"{usable} usable (affinity {affinity}, no cgroup quota below it)"
    return f"{usable} usable (affinity {affinity}, cgroup quota less)"


def _version(package: str) -> str:
    """Version of an installed package, without importing it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _libzmq() -> str:
    try:
        import zmq
    except ImportError as exc:
        return f"not usable: {exc}"
    return zmq.zmq_version()


if __name__ == "__main__":
    sys.exit(main())
