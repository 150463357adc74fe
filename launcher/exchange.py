"""Launchers of others: what they say to the processes they start, and how those share a secret.

The secret is the ticket to the meeting (`agent_socket.Ticket`), which rank 0 has and the others
need. It must not be guessed from what others can read, such as a job's id, names or ports.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from pycoll._launcher.slurm import expand
from pycoll._rendezvous.wire import read_key
from pycoll._support.ports import agreed_port, endpoint
from pycoll.errors import BootstrapError


class _Launcher(NamedTuple):
    who: str
    size: str  # the variables that it sets
    rank: str
    mark: str  # without this one, it is not that launcher


_FOREIGN = (
    _Launcher("torchrun", "WORLD_SIZE", "RANK", "TORCHELASTIC_RUN_ID"),
    _Launcher(
        "Open MPI's mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"
    ),
    _Launcher("an MPI launcher (PMI)", "PMI_SIZE", "PMI_RANK", "PMI_SIZE"),
    _Launcher("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    # As torch.distributed reads them, by whomever they are set; also in many a batch script.
    _Launcher("torchrun (or what sets its variables)", "WORLD_SIZE", "RANK", "WORLD_SIZE"),
)
"""The most special first."""


class Launched(NamedTuple):
    """What a launcher has said to this process."""

    who: str
    rank: int
    size: int


class Board(Protocol):
    """What a launcher has for its processes to tell each other something."""

    def share(self, text: str, timeout: float) -> str:
        """Return what rank 0 has given here; what others give does not count.

        Raises:
            OSError, BootstrapError: it has not worked, or not in so many seconds.
        """


def find(environ: Mapping[str, str]) -> Launched | None:
    """Find out by which launcher this process is one of several; None: by none.

    Raises:
        BootstrapError: its variables make no sense.
    """
    for who, size_name, rank_name, mark in _FOREIGN:
        text = environ.get(size_name)
        if text is None or text.strip() == "1" or mark not in environ:
            continue
        try:
            rank, size = int(environ.get(rank_name, "?")), int(text)
        except ValueError:
            rank, size = -1, 0
        if not 0 <= rank < size:
            raise BootstrapError(
                f"{who} started this process as rank {environ.get(rank_name, '?')} of {text} "
                f"({rank_name}, {size_name}), which makes no sense; unset both to run alone"
            )
        return Launched(who, rank, size)
    return None


def join(environ: Mapping[str, str], launched: Launched, timeout: float) -> dict[str, str]:
    """Come into the job of another launcher: the variables that pycoll-run would have set.

    Raises:
        BootstrapError: its ranks can share no secret, or could not meet.
    """
    if environ.get("PYCOLL_KEY"):
        where, key = _agreed_meeting(environ, launched)
        return join_at(where, key, launched.rank, launched.size, timeout)
    deadline = time.monotonic() + timeout
    try:
        board = _board(environ, launched)

        def share(text: str | None) -> str:
            return board.share(text or "", max(0.0, deadline - time.monotonic()))

        return join_by(share, launched.rank, launched.size, timeout)
    except OSError as exc:
        raise BootstrapError(
            f"rank {launched.rank} of {launched.size}, started by {launched.who}, cannot join its "
            f"job: {exc}"
        ) from exc


def join_by(
    share: Callable[[str | None], str],
    rank: int,
    size: int,
    timeout: float,
    until_left: bool = False,
) -> dict[str, str]:
    """Come into a job whose ranks have something to tell each other by; rank 0 opens its meeting.

    Args:
        share: takes rank 0's text there, and None on the others, and returns it there.
        rank, size: this rank, and how many there are.
        timeout: seconds to wait for all others, and for `share`.
        until_left: the ranks' processes may go on when they have left.

    Returns:
        The variables that pycoll-run would have set.

    Raises:
        BootstrapError: the ranks did not meet; what `share` raises.
        OSError: what is needed is not given.
    """
    from pycoll._launcher import entering  # not sooner: it takes long
    from pycoll._launcher.agent_socket import Ticket

    deadline = time.monotonic() + timeout
    with contextlib.ExitStack() as stack:
        if rank:
            text = share(None)
            if text.startswith("!"):
                raise BootstrapError(text[1:])
            ticket = Ticket.read(text)
        else:
            opened = entering.meeting(size, timeout, until_left=until_left)
            try:
                ticket = stack.enter_context(opened)
            except (BootstrapError, OSError) as exc:
                share(f"!{exc}")  # the others wait for it
                raise
            share(ticket.text())
        return entering.enter(ticket, rank, size, max(0.0, deadline - time.monotonic()))


def join_at(rendezvous: str, key: str, rank: int, size: int, timeout: float) -> dict[str, str]:
    """Come into a job whose meeting is at a given address, with a given key; rank 0 opens it.

    Args:
        rendezvous, key: as PYCOLL_RENDEZVOUS and PYCOLL_KEY.
        rank, size: this rank, and how many there are.
        timeout: seconds to wait for all others.

    Raises:
        BootstrapError: it is no address, rank 0 cannot listen there, or the ranks did not meet.
    """
    from pycoll._launcher import entering
    from pycoll._launcher.agent_socket import Ticket

    host, port = read_address(rendezvous)
    secret = read_key(key)
    ticket = Ticket(secret, port, [host])
    try:
        if rank:
            return entering.enter(ticket, rank, size, timeout)
        deadline = time.monotonic() + timeout
        with entering.meeting(size, timeout, port, secret):
            return entering.enter(ticket, rank, size, deadline - time.monotonic())
    except OSError as exc:
        raise BootstrapError(f"rank {rank} of {size} cannot join the job: {exc}") from exc


def read_address(rendezvous: str) -> tuple[str, int]:
    """Read PYCOLL_RENDEZVOUS: host and port.

    Raises:
        BootstrapError: it is no address.
    """
    host, _, port = rendezvous.removeprefix("tcp://").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise BootstrapError(f"PYCOLL_RENDEZVOUS is {rendezvous!r}, not as tcp://HOST:PORT")
    return host.strip("[]"), int(port)


def _agreed_meeting(environ: Mapping[str, str], launched: Launched) -> tuple[str, str]:
    """Where the ranks meet that have PYCOLL_KEY already, and with which key.

    Raises:
        BootstrapError: the launcher has not said on which host rank 0 is.
    """
    import hmac  # not sooner: it brings OpenSSL

    key = read_key(environ["PYCOLL_KEY"])
    if launched.who == "srun" and "SLURM_STEP_NODELIST" in environ:
        host = expand(environ["SLURM_STEP_NODELIST"])[0]
        # Steps with the same variables follow one another, and the last may still be leaving.
        step = f"{environ.get('SLURM_JOB_ID')}.{environ.get('SLURM_STEP_ID')}"
        key = hmac.digest(key, step.encode(), "sha256")
    elif "MASTER_ADDR" in environ:
        host = environ["MASTER_ADDR"]
    else:
        raise BootstrapError(
            f"PYCOLL_KEY is set, and {launched.who} started this process as rank {launched.rank} "
            f"of {launched.size}, but not where rank 0 is: set PYCOLL_RENDEZVOUS, too "
            "(tcp://HOST:PORT of rank 0), PYCOLL_RANK and PYCOLL_SIZE; or unset PYCOLL_KEY"
        )
    return endpoint(host, agreed_port(key)), key.hex()


def _board(environ: Mapping[str, str], launched: Launched) -> Board:
    """Find what the launcher has.

    Raises:
        BootstrapError: nothing that is secret.
    """
    why = ""
    if launched.who == "torchrun":
        from pycoll._launcher.torch_store import TorchStore

        return TorchStore(environ, launched.rank, launched.size)
    if "PMI_FD" in environ or "PMIX_NAMESPACE" in environ or "PMI_PORT" in environ:
        from pycoll._launcher import mpi_board

        if (world := mpi_board.find(launched.who, launched.size)) is not None:
            return world
    if "PMI_FD" in environ:
        from pycoll._launcher.pmi import Pmi

        return Pmi(int(environ["PMI_FD"]))
    if "PMIX_NAMESPACE" in environ:
        from pycoll._launcher.pmix import Pmix

        try:
            return Pmix(environ)
        except OSError as exc:  # Slurm sets its variables where a site has made it the default
            if launched.who != "srun":
                raise
            why = f" ({exc})"
    if launched.who == "srun":
        from pycoll._launcher.munge import Munge, why_not

        no_munge = why_not()
        if not no_munge:
            return Munge(environ, launched.rank, launched.size)
        why += f" ({no_munge})"
    raise BootstrapError(
        f"{launched.who} started this process as rank {launched.rank} of {launched.size}, but has "
        f"nothing by which its ranks could share a secret{why}. Start the program with "
        f"pycoll-run -n {launched.size}, or with torchrun, mpirun, mpiexec, srun --mpi=pmi2, or "
        "srun where there is munge; or set PYCOLL_KEY (64 hexadecimal digits, random, of this job) "
        "and, if neither srun nor torchrun does it, where rank 0 is: PYCOLL_RANK, PYCOLL_SIZE, "
        "PYCOLL_RENDEZVOUS (tcp://HOST:PORT)"
    )
