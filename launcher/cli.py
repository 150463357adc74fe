"""`pycoll-run`: starts a program on several ranks. What comes after the program is its own."""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NoReturn, TextIO

from pycoll._launcher.host import NamedHost
from pycoll._launcher.job_spec import Options
from pycoll._launcher.outcome import CANNOT_START, CannotStartError, Outcome, own_lines
from pycoll._launcher.spawn import Job
from pycoll._support.environment import (
    IDENTITY,
    TORCH,
    blocks,
    default_op_timeout,
    encrypts,
    grace,
    usable_cores,
    version,
)
from pycoll._support.wording import did_you_mean
from pycoll.errors import Error, TransportError

if TYPE_CHECKING:
    from pycoll._launcher.nodes import Node
    from pycoll._trace.timeline import RankTrace

_PROGRAM = "pycoll-run"
_TRANSPORTS = ("auto", "shm", "tcp", "zmq", "rdma")
_OWN = {variable.name for variable in (*IDENTITY, *TORCH)} - {"MASTER_ADDR", "MASTER_PORT"}
_BIND = "keep each rank on one core, or not"
_SIZE = "how many ranks; by default one for each usable core"
_HELP_ALL = "print all options, statuses, environment variables"
_OP_TIMEOUT = "an operation that takes longer than S seconds fails"
_GRACE = "seconds that ranks have to end, before SIGTERM and before SIGKILL"
_RESTARTS = "begin again when ranks fail, K times at most"
_EXPORT = "a variable for the ranks' environment; may be repeated"
_TRANSPORT = f"how bytes move: {', '.join(_TRANSPORTS)}"
_SURVIVE = "a lost rank does not end the job: see comm.shrink()"
_TRACE = "write what every rank did when; ui.perfetto.dev shows it"
_INTERNAL = 70  # EX_SOFTWARE of sysexits.h


class _UsageError(Exception):
    """The command line is wrong."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _UsageError(message)


def _whole(text: str, least: int = 1) -> int:
    with contextlib.suppress(ValueError):
        if (number := int(text)) >= least:
            return number
    raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}, not {text!r}")


def _seconds(text: str, may_be_0: bool = False) -> float:
    with contextlib.suppress(ValueError):
        if (number := float(text)) > 0 or (may_be_0 and number == 0):
            return number
    least = "from 0 up" if may_be_0 else "above 0"
    raise argparse.ArgumentTypeError(f"must be a number of seconds {least}, not {text!r}")


def _export(text: str) -> tuple[str, str]:
    name, given, value = text.partition("=")
    if not name:
        raise argparse.ArgumentTypeError(f"must be NAME or NAME=VALUE, not {text!r}")
    if name in _OWN:
        raise argparse.ArgumentTypeError(f"{name} is set by {_PROGRAM} itself")
    if not given and name not in os.environ:
        raise argparse.ArgumentTypeError(f"{name} is not set here: give {name}=VALUE")
    return name, value if given else os.environ[name]


def _trace_file(text: str) -> str:
    if text.endswith(".py"):
        raise argparse.ArgumentTypeError(
            f"{text} is a program, which the trace would replace: write --trace FILE {text}"
        )
    return text


def _parser() -> _Parser:
    parser = _Parser(prog=_PROGRAM, add_help=False, allow_abbrev=False)
    add = parser.add_argument_group("for ranks and hosts").add_argument
    names = ("-n", "-np", "--np")
    add(*names, dest="size", metavar="N", type=_whole, help=_SIZE)
    add("-H", "--hosts", metavar="a:4,b:4", help="hosts, and how many ranks each has")
    add("--hostfile", metavar="F", help="a file with a host a line: a slots=4")
    add("--bind", choices=("none", "core"), default="none", metavar="none|core", help=_BIND)
    add("--emulate-hosts", metavar="K", type=_whole, help="pretend K hosts that share no memory")
    add("-x", dest="exports", metavar="NAME[=VALUE]", type=_export, action="append", help=_EXPORT)
    add("--survive", action="store_true", help=_SURVIVE)
    add = parser.add_argument_group("for communication").add_argument
    add("--transport", choices=_TRANSPORTS, metavar="NAME", help=_TRANSPORT)
    add("--encrypt", action="store_true", help="encrypt what travels outside shared memory")
    add("--interface", metavar="NAME", help="the network interface that hosts use for each other")
    add("--address", metavar="IP", help="where other hosts reach this one")
    add("--share-arrays", action="store_true", help="NumPy's arrays lie where all ranks reach them")
    add = parser.add_argument_group("for deadlines and output").add_argument
    add("--timeout", metavar="S", type=_seconds, help="end the whole job after S seconds")
    add("--op-timeout", metavar="S", type=_seconds, help=_OP_TIMEOUT)
    add("--grace", metavar="S", type=partial(_seconds, may_be_0=True), help=_GRACE)
    add("--restarts", metavar="K", type=partial(_whole, least=0), help=_RESTARTS)
    tag = argparse.BooleanOptionalAction
    add("-l", "--tag-output", action=tag, help="put [rank] before each line of output, or not")
    add("--log-dir", metavar="D", help="also write output to D/rank.K.log, D/launcher.log")
    add("--trace", metavar="FILE", type=_trace_file, help=_TRACE)
    add("--verbose", action="store_true", help="tell what the launcher does")
    add = parser.add_argument_group("without a program").add_argument
    add("--check", action="store_true", help="show how the hosts of -H reach each other")
    add("--version", action="store_true", help="print the version")
    add("-h", "--help", action="store_true", help="print the common options; in a pipe, all")
    add("--help-all", action="store_true", help=_HELP_ALL)
    return parser


def _split(parser: _Parser, argv: Sequence[str]) -> int:
    """Where the options end and the program begins."""
    # argparse would take options from behind the program too, so the program is found first.
    takes_value = {
        flag: action.nargs is None for action in parser._actions for flag in action.option_strings
    }
    index = 0
    while index < len(argv):
        text = argv[index]
        flag, equals, _ = text.partition("=")
        if text in ("-m", "--") or not text.startswith("-"):
            break
        if text == "-" or (flag not in takes_value and text[:2] not in ("-n", "-x", "-H")):
            from pycoll._launcher.foreign_options import OURS  # not sooner: for an error

            hint = OURS.get(flag) or f"see {_PROGRAM} --help{did_you_mean(flag, takes_value)}"
            raise _UsageError(f"unknown option {flag} ({hint})")
        index += 2 if not equals and takes_value.get(text) else 1
    return index


def _program(argv: Sequence[str]) -> list[str]:
    """The command of a rank, from what follows the options."""
    if not argv or argv == ["--"]:
        raise _UsageError(f"which program? {_PROGRAM} -n 4 script.py (see {_PROGRAM} --help)")
    if argv[0] == "--":
        return list(argv[1:])
    if argv[0] == "-m":
        if len(argv) < 2:
            raise _UsageError("-m needs the name of a module")
        return [sys.executable, *argv]
    if not os.path.exists(argv[0]):
        raise _UsageError(
            f"there is no script {argv[0]} (a program that is not Python: {_PROGRAM} -- {argv[0]})"
        )
    if os.path.isdir(argv[0]) and not os.path.exists(os.path.join(argv[0], "__main__.py")):
        raise _UsageError(f"{argv[0]} is a folder without a __main__.py")
    if _is_machine_code(argv[0]):
        raise _UsageError(f"{argv[0]} is no Python script: write {_PROGRAM} -- {' '.join(argv)}")
    return [sys.executable, *argv]


def _is_machine_code(path: str) -> bool:
    if os.path.isfile(path):  # what a pipe holds is read once
        with contextlib.suppress(OSError), open(path, "rb") as file:
            return file.read(4) == b"\x7fELF"
    return False


def _hosts(
    args: argparse.Namespace, node: Node | None, lost: Collection[str]
) -> tuple[list[NamedHost], list[int]]:
    """The hosts of the job but `lost`, and by rank the index of its host; none: this one."""
    if node is not None:
        if args.hosts or args.hostfile or args.emulate_hosts:
            raise _UsageError("-H, --hostfile and --emulate-hosts do not go with PYCOLL_NODES")
        if args.restarts:
            raise _UsageError(
                "--restarts does not go with PYCOLL_NODES: each node has one attempt; let what has "
                "started them start all of them again"
            )
        return node.hosts(args.size or node.nodes * usable_cores())
    if args.hosts is None and args.hostfile is None and "SLURM_JOB_ID" not in os.environ:
        return [], []
    from pycoll._launcher.host_choice import choose_hosts  # not sooner: most jobs have one host

    return choose_hosts(args, lost)


def _node() -> Node | None:
    """Which of several nodes this is, on each of which pycoll-run is called; None: no such."""
    if "PYCOLL_NODES" not in os.environ:
        return None
    from pycoll._launcher.nodes import find_node

    return find_node(os.environ)


def _address(text: str | None) -> str:
    if not text:
        return ""
    import ipaddress  # not sooner: hardly anybody says this

    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        raise _UsageError(f"--address must be an IP address, not {text!r}") from None


def _options(args: argparse.Namespace, lost: Collection[str] = ()) -> Options:
    node = _node()
    hosts, of_rank = _hosts(args, node, lost)
    size = len(of_rank) or args.size or usable_cores()
    if args.emulate_hosts is not None and args.emulate_hosts > size:
        raise _UsageError(
            f"--emulate-hosts {args.emulate_hosts} needs as many ranks, there are {size}"
        )
    if (
        args.log_dir is not None
        and os.path.exists(args.log_dir)
        and not os.path.isdir(args.log_dir)
    ):
        raise _UsageError(f"--log-dir {args.log_dir} is no folder")
    exports = dict(args.exports or ())
    if args.share_arrays:
        exports.setdefault("PYCOLL_SHARE_ARRAYS", "1")
    # Inside a rank of another job, the environment has that job's options.
    settings = {} if "PYCOLL_JOB" in os.environ else os.environ
    transport = args.transport or settings.get("PYCOLL_TRANSPORT") or "auto"
    source = "--transport" if args.transport else "PYCOLL_TRANSPORT"
    encrypt = args.encrypt or encrypts(settings)
    if encrypt:
        _check_encryption(transport, source)
    _check_transport(transport, source, {**os.environ, **exports})
    _check_one_host(transport, source, hosts, size, args.emulate_hosts)
    _check_settings({**os.environ, **exports})
    if args.op_timeout is None or "PYCOLL_OP_TIMEOUT" in exports:
        default_op_timeout({**settings, **exports})
    return Options(
        size=size,
        transport=transport,
        encrypt=encrypt,
        op_timeout_s=args.op_timeout,
        timeout_s=args.timeout,
        grace_s=grace(os.environ) if args.grace is None else args.grace,
        tag_output=args.tag_output,
        log_dir=args.log_dir,
        bind=args.bind,
        emulate_hosts=args.emulate_hosts,
        hosts=hosts,
        interface=args.interface or "",
        address=_address(args.address),
        checks=args.check,
        survive=args.survive,
        nodes=of_rank,
        calls=node.calls() if node is not None else None,
        passes_on=True,
        verbose=args.verbose,
        trace_records=_trace_records(args.trace, size),
        exports=exports,
    )


def _check_encryption(name: str, source: str) -> None:
    """Refuse a transport that does not encrypt."""
    from pycoll._transports.network import why_not_encrypted  # not sooner: few jobs are encrypted

    if reason := why_not_encrypted(name):
        raise _UsageError(f"{source} {reason}")


def _check_transport(name: str, source: str, environ: Mapping[str, str]) -> None:
    """Refuse a transport that no rank could use; of "auto" the ranks think for themselves."""
    if name == "auto":
        return
    from pycoll import _transports as transports  # not sooner: nearly every job is "auto"

    try:
        transports.check(name, environ)
    except TransportError as exc:
        raise _UsageError(f"{source} {exc}") from exc


def _check_one_host(
    name: str, source: str, hosts: Sequence[NamedHost], size: int, emulated: int | None
) -> None:
    """Refuse shared memory alone for ranks of several hosts."""
    if name != "shm":
        return
    # Whatever its names are, this host is one.
    count = len({host.name if host.command or host.calls else "" for host in hosts})
    if emulated is not None:
        count = len(set(blocks(size, emulated)))
    if count > 1:
        raise _UsageError(
            f"{source} shm: the ranks are on {count} hosts, which share no memory; "
            "use --transport auto"
        )


def _check_settings(environ: Mapping[str, str]) -> None:
    """Refuse settings of the choice of algorithms that cannot be read."""
    if not (environ.get("PYCOLL_ALGORITHM") or environ.get("PYCOLL_SEGMENT")):
        return
    from pycoll._selection.agreed import check_settings  # not sooner: hardly any job sets these

    try:
        check_settings(environ)
    except ValueError as exc:
        raise _UsageError(str(exc)) from exc


def _run(argv: Sequence[str]) -> int:
    parser = _parser()
    split = _split(parser, argv)
    args = parser.parse_args(argv[:split])
    if args.help or args.help_all:
        # Not at the top: no job needs it. A terminal would scroll the first screen out of sight.
        from pycoll._launcher import help_text

        on_terminal = sys.stdout is not None and sys.stdout.isatty()
        is_short = on_terminal and not args.help_all
        print(help_text.screen(parser) if is_short else help_text.everything(parser), flush=True)
        return 0
    if args.version:
        print(f"{_PROGRAM} {version()}", flush=True)
        return 0
    if args.check:
        return _check(args, argv[split:])
    command = _program(argv[split:])
    node = _node()
    if node is not None and node.number:
        status = node.serve()
        if status:
            _tell(f"node {node.number}: node 0 is gone, or a signal has ended this")
        return status
    # Closed, its number is that of something else by now.
    stdin = subprocess.DEVNULL if sys.stdin is None else None
    job: Job
    if args.restarts:
        job, outcome = _run_again(command, args, stdin)
    else:
        job = Job(command, _options(args), stdin=stdin)
        outcome = job.run()
    is_written = not job.traces or _write_trace(args.trace, job.traces)
    if outcome.report:
        _tell(outcome.report)
    return outcome.status or (0 if is_written else 1)


def _run_again(
    command: Sequence[str], args: argparse.Namespace, stdin: int | None
) -> tuple[Job, Outcome]:
    from pycoll._launcher import restarts  # not sooner: few jobs have any

    def keep(job: Job, attempt: int) -> None:
        if job.traces:
            _write_trace(restarts.path_of_attempt(args.trace, attempt), job.traces)

    def plan(lost: Collection[str]) -> Options:
        return _options(args, lost)

    return restarts.run_again(command, args.restarts, plan, keep, _tell, stdin)


def _write_trace(path: str, traces: Sequence[RankTrace]) -> bool:
    """Write what ranks have recorded; returns whether that was possible."""
    from pycoll._launcher import tracing

    try:
        _tell("\n".join(tracing.write(path, traces)))
    except OSError as exc:
        _tell(f"--trace {path} cannot be written: {exc.strerror or exc}")
        return False
    return True


def _trace_records(path: str | None, size: int) -> int:
    """Return how many calls of each rank are recorded."""
    if path is None:
        return 0
    from pycoll._launcher import tracing  # not sooner: few jobs are traced

    try:
        tracing.check_path(path)
    except OSError as exc:
        raise _UsageError(f"--trace: {exc}") from None
    return tracing.capacity(size, os.environ)


def _check(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Show how the hosts of -H or --hostfile reach each other."""
    if rest:
        raise _UsageError("--check starts no program")
    if _node() is not None:
        raise _UsageError("--check does not go with PYCOLL_NODES: name the hosts with -H")
    options = _options(args)
    if len(options.hosts) < 2:
        raise _UsageError("--check needs hosts: -H a,b or --hostfile F")
    job = Job([], options)
    outcome = job.run()
    if outcome.report:
        _tell(outcome.report)
    elif (hosts := job.hosts) is not None:
        from pycoll._launcher.reach_table import lines

        count = len(hosts.names)
        print(f"{count} hosts, all with" if count > 1 else "1 host, with", f"pycoll {version()}")
        shown = lines(hosts.names, hosts.ways, hosts.clocks(), hosts.same)
        print("\n".join(shown), flush=True)
        _tell("\n".join(hosts.absent))
    return outcome.status


def _tell(text: str) -> None:
    """Print lines on standard error, those that are not indented with the name of the program."""
    if sys.stderr is None:
        return
    try:
        sys.stderr.write(own_lines(text))
        sys.stderr.flush()
    except OSError:  # whoever read it has gone, but our exit status still counts
        _silence(sys.stderr)


def _silence(stream: TextIO) -> None:
    """Send a stream nowhere, so that what Python still holds of it does not fail at its end."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line (default: sys.argv); returns the exit status."""
    if not sys.platform.startswith("linux"):
        _tell(f"pycoll runs on Linux only, not on {sys.platform}")
        return 2
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except CannotStartError as exc:
        _tell(str(exc))
        return CANNOT_START
    except (_UsageError, Error) as exc:
        _tell(str(exc))
        return 2
    except KeyboardInterrupt:  # before there was a job, or after
        return 130
    except BrokenPipeError:  # of --help
        _silence(sys.stdout)
        return 141
    except Exception as exc:
        _tell(_internal(exc))
        return _INTERNAL


def _internal(exc: Exception) -> str:
    """Say what must not happen, for who is to mend it."""
    import traceback  # not sooner: it takes long

    *_, last = traceback.extract_tb(exc.__traceback__)
    where = f"{os.path.basename(last.filename)}:{last.lineno}"
    text = f"an error of pycoll-run itself, please report it: {exc!r} at {where}"
    if "--verbose" in sys.argv:
        text += "".join(f"\n    {line.rstrip()}" for line in traceback.format_exception(exc))
    return text
