"""How a rank that another launcher has started comes into a job: all that pycoll-run gives others.

Rank 0 starts the meeting (`meeting`) and gives the others the ticket to it, by what its launcher
has for that (`exchange`). The first rank on a host starts its agent (`adopting`). Each rank goes to
its agent's door (`agent_socket`) and comes back, when all have come, with the variables and
descriptors that a rank of pycoll-run inherits. From then on nothing is different.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import IO, Any, NamedTuple

from pycoll._launcher import agent_socket, mpi_board
from pycoll._launcher.agent_socket import Ticket
from pycoll._launcher.rendezvous_pairs import link_variable
from pycoll._rendezvous.wire import print_missing, too_late
from pycoll._support.ready import ready
from pycoll._support.wording import ranks_text
from pycoll.errors import BootstrapError

_NOTICE_S = 10.0  # between words on who is missing
_PART = 0.9  # of a rank's time, for what its helpers wait for: then it still hears why not
_PAUSE_S = 0.01  # while another rank is about to open the door
_OUTLAST_S = 10.0  # at the end of rank 0's process, for others to leave


@contextlib.contextmanager
def meeting(
    size: int, timeout: float, port: int = 0, key: bytes = b"", until_left: bool = False
) -> Iterator[Ticket]:
    """Start the process that lets the ranks meet. Leaving the block before they have, ends it.

    Args:
        size: number of ranks.
        timeout: seconds for it to start.
        port: where it listens, on all addresses; 0: anywhere.
        key: the job's; b"": a new one.
        until_left: it ends when all ranks have left; else when their processes have ended.

    Raises:
        BootstrapError: it cannot be started, or not listen there.
    """
    key = key or os.urandom(32)
    began = time.monotonic()
    deadline = began + timeout
    numbers = map(str, (size, port, began + _PART * timeout, int(until_left)))
    command = [sys.executable, "-P", "-m", "pycoll._launcher.meeting", *numbers]
    for ended in [one for one in _meetings if ready([one.output], 0)]:
        with contextlib.suppress(ValueError):  # another thread has forgotten it
            _meetings.remove(ended)
            ended.output.close()
    process = _start(command, (), subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    output = process.stdout
    with process.stdin as pipe, contextlib.ExitStack() as stack:
        stack.callback(output.close)
        with contextlib.suppress(BrokenPipeError):
            pipe.write(key.hex().encode() + b"\n")
            pipe.flush()
        in_time = bool(ready([output], timeout))
        words = output.readline().decode().split() if in_time else []
        in_time = _has_started(process, deadline) and in_time
        if not words or words[0] != "port":
            late = f"its process has not started within {timeout:g} s"
            why = " ".join(words) or ("it has not started; see above" if in_time else late)
            raise BootstrapError(f"rank 0 cannot let the ranks of this job meet: {why}")
        yield Ticket(key, int(words[1]), words[2].split(",") if len(words) > 2 else [])
        stack.pop_all()
        _meetings.append(_Meeting(output, until_left))


class _Meeting(NamedTuple):
    """A meeting that this process, as rank 0, has started.

    Attributes:
        output: what it says; its end is all that comes, when the others are gone.
        until_left: see `meeting`.
    """

    output: IO[bytes]
    until_left: bool


_meetings: list[_Meeting] = []
os.register_at_fork(after_in_child=_meetings.clear)


def wait_for_others() -> None:
    """Let this process, where it is rank 0's, end after those of all others.

    What is left when it has ended, the meeting too, is killed by many who start ranks: Slurm with
    the last task on a host, a container with its first process. If this rank fails, it need not
    wait. A world that ranks may leave while their processes go on is not waited for so long.
    """
    # Where MPI runs, no process ends before all have come to MPI_Finalize, after this: to wait here
    # for their ends would be to wait for oneself.
    waits = not mpi_board.is_running()
    deadline = time.monotonic() + _OUTLAST_S
    for output, until_left in _meetings:
        if waits and until_left:
            ready([output], deadline - time.monotonic())
        elif waits:
            output.read()
        output.close()
    _meetings.clear()


def enter(ticket: Ticket, rank: int, size: int, timeout: float) -> dict[str, str]:
    """Come into the job when all have come: the variables that pycoll-run would have set.

    They name descriptors that this process has now.

    Args:
        ticket: of the job.
        rank, size: this rank, and how many there are.
        timeout: seconds to wait for all others.

    Raises:
        BootstrapError: the job could not meet: who is missing, or why this rank may not come in.
    """
    started = time.monotonic()
    deadline = started + timeout
    with _at_the_door(ticket, size, timeout) as connection:
        agent_socket.peer_of(connection)
        agent_socket.send(connection, {"rank": rank, "size": size})
        message = _wait(connection, rank, size, started, deadline)
        found = agent_socket.receive_descriptors(connection, message["count"], deadline)
    link, *memory = found
    variables: dict[str, str] = message["environment"]
    variables["PYCOLL_LINK"] = link_variable(link)
    variables["PYCOLL_SHM"] = message["memory"]
    if memory:
        memfd, *eventfds = memory
        numbers = ",".join(map(str, eventfds))
        inode = os.fstat(memfd).st_ino
        variables["PYCOLL_SHM"] = f"{memfd}:{inode}:{numbers}:{message['cores']}"
    return variables


def _wait(
    connection: socket.socket, rank: int, size: int, started: float, deadline: float
) -> dict[str, Any]:
    missing: Sequence[int] = []
    notice_at = started + _NOTICE_S
    while True:
        try:
            message = agent_socket.receive(connection, min(deadline, notice_at))
        except TimeoutError:
            if time.monotonic() >= deadline:
                launcher = "pycoll's launcher on this host"
                text = too_late(rank, size, started, missing, "joined", launcher)
                raise BootstrapError(text) from None
            notice_at += _NOTICE_S
            if missing and rank == next(r for r in range(size) if r not in missing):
                print_missing(rank, size, started, missing, "join the job")
            continue
        if message is None:
            late = f"{ranks_text(missing)} of {size}" if missing else "all ranks"
            raise BootstrapError(
                f"rank {rank}: pycoll's launcher on this host has ended before {late} had joined"
            )
        if "refused" in message:
            raise BootstrapError(f"rank {rank} cannot join the job: {message['refused']}")
        if "missing" in message:
            missing = message["missing"]
        else:
            return dict(message)


def _at_the_door(ticket: Ticket, size: int, timeout: float) -> socket.socket:
    """Go to the door of this host's agent, or be the first there and start it."""
    name = agent_socket.name(ticket.key)
    began = time.monotonic()
    deadline = began + timeout
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            return agent_socket.connect(name, deadline)
        door = socket.socket(socket.AF_UNIX)
        try:
            door.bind(name)
        except OSError as exc:
            door.close()
            if exc.errno != errno.EADDRINUSE or time.monotonic() >= deadline:
                raise
            time.sleep(_PAUSE_S)  # who has it is about to listen
            continue
        with door:
            door.listen(4096)
            _start_agent(ticket, size, began, timeout, door.fileno())


def _start_agent(ticket: Ticket, size: int, began: float, timeout: float, door: int) -> None:
    numbers = map(str, (door, size, began + _PART * timeout))
    words = [sys.executable, "-P", "-m", "pycoll._launcher.adopting", *numbers]
    process = _start(words, (door,), subprocess.DEVNULL)
    assert process.stdin is not None
    with process.stdin as to_agent, contextlib.suppress(BrokenPipeError):
        to_agent.write(ticket.text().encode() + b"\n")
    if not _has_started(process, began + timeout):
        raise BootstrapError(f"pycoll's launcher on this host has not started in {timeout:g} s")
    if process.returncode:
        raise BootstrapError("pycoll's launcher on this host cannot be started; see above")


def _has_started(process: subprocess.Popen[bytes], deadline: float) -> bool:
    """Wait until a process goes on in the background; else end it at the deadline."""
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return False
    return True


def _start(
    command: Sequence[str], descriptors: Sequence[int], stdout: int
) -> subprocess.Popen[bytes]:
    """Start a process that goes on by itself: signals of a terminal do not reach it."""
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=stdout,
        pass_fds=descriptors,
        start_new_session=True,
    )
