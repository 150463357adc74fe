"""The memory that the processes of one host share.

All of them map one memory file, which the launcher has made. For each ordered pair of ranks it
holds a ring of small messages, and for each rank a heap for payloads that do not fit into rings.
Large payloads are copied once, from the sender's memory to the receiver's, where the kernel lets
one process read another's (process_vm_readv); both sides copy, in pieces. Where it does not, they
go through the heap in fragments. All this is in the compiled core, `_core/channel/channel.h`; here
the memory is found.

A rank that is about to sleep says so in the memory; who has something for it then rings its
doorbell, an eventfd. Ranks that are awake find what comes without any system call.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pycoll._transports._core import MappedHost

_PAGE, _RECORD_NBYTES = 4096, 1024  # of _core/host/host.h
NOTES_NBYTES = 300 << 10
"""What a rank notes of its calls: as in transports/_core/host/noted.h."""
_TALLY_OFFSET = 128  # in a record


def missing_core() -> str | None:
    """Return why the compiled core cannot be used, or None if it can."""
    try:
        from pycoll._transports._core import MessageEngine  # noqa: F401
    except ImportError as exc:
        package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        source = os.path.dirname(package)
        if os.path.exists(os.path.join(source, "pyproject.toml")):
            return (
                f"the compiled core is missing: this Python imports pycoll from its source folder, "
                f"{source}; start in another folder, or install there (pip install -e .)"
            )
        return f"the compiled core is missing: {exc}; `pip install -v .` says what its build lacks"
    return None


def open_host(
    environ: Mapping[str, str], local_rank: int, local_size: int, copies: bool = False
) -> tuple[MappedHost, int] | str:
    """Map the memory of this host that the launcher hands on, once in a world.

    Args:
        environ: its variable PYCOLL_SHM is
            `<memory file>:<its inode>:<doorbells, by commas>:<cores>`, or `-:<reason>`.
        local_rank: this process's rank on the host.
        local_size: number of ranks there.
        copies: use copies of the descriptors, which end with the memory; see `give_back`.

    Returns:
        The memory and the descriptor of this rank's doorbell, or the reason why there is none.
    """
    from pycoll._transports._core import MappedHost

    handed = _handed_on(environ, local_rank, local_size)
    if isinstance(handed, str):
        return handed
    made: list[int] = []
    try:
        memory, *doorbells = handed.descriptor, *handed.doorbells
        if copies:
            for descriptor in (memory, *doorbells):
                made.append(os.dup(descriptor))
            memory, *doorbells = made
        else:
            for descriptor in (memory, *doorbells):
                os.set_inheritable(descriptor, False)
        host = MappedHost(memory, local_rank, doorbells, handed.cores, copies)
        return host, doorbells[local_rank]
    except OSError as exc:
        for descriptor in made:
            os.close(descriptor)
        return f"the memory shared with the other ranks cannot be used: {exc}"


def give_back(variable: str) -> None:
    """Close the descriptors that PYCOLL_SHM names, of a world that uses copies."""
    first, _, rest = variable.partition(":")
    if first not in ("", "-"):
        for number in (first, *rest.split(":")[1].split(",")):
            os.close(int(number))


def tally_place(variable: str, local_rank: int, local_size: int) -> tuple[int, int, int] | None:
    """Return where the launcher reads what this rank does; None: nowhere.

    Descriptor, and the offsets of what it counts and of what it notes.

    Args:
        variable: that of `open_host`.
        local_rank: this process's rank on the host.
        local_size: number of ranks there.
    """
    handed = _handed_on({"PYCOLL_SHM": variable}, local_rank, local_size)
    if isinstance(handed, str):
        return None
    notes = _PAGE - (-local_size * _RECORD_NBYTES // _PAGE) * _PAGE
    return (
        handed.descriptor,
        _PAGE + local_rank * _RECORD_NBYTES + _TALLY_OFFSET,
        notes + local_rank * NOTES_NBYTES,
    )


class Handed(NamedTuple):
    """The memory of this host, as the launcher hands it on.

    Attributes:
        descriptor: of the memory file.
        rank, size: this process's rank on the host, and their number.
        doorbells: a descriptor for each rank.
        cores: how many cores they may use together.
    """

    descriptor: int
    rank: int
    size: int
    doorbells: list[int]
    cores: int


def handed_on(environ: Mapping[str, str]) -> Handed | None:
    """Return what pycoll-run has handed on to a rank, before it joins; None: nothing."""
    try:
        place = int(environ["PYCOLL_LOCAL_RANK"]), int(environ["PYCOLL_LOCAL_SIZE"])
    except (KeyError, ValueError):
        return None
    handed = _handed_on(environ, *place)
    return handed if isinstance(handed, Handed) else None


def _handed_on(environ: Mapping[str, str], local_rank: int, local_size: int) -> Handed | str:
    text = environ.get("PYCOLL_SHM", "")
    if not text:
        return "there is no memory shared with the other ranks (PYCOLL_SHM is not set)"
    first, _, rest = text.partition(":")
    if first == "-":
        return rest
    try:
        inode, numbers, cores = rest.split(":")
        memory, doorbells = int(first), [int(number) for number in numbers.split(",")]
        handed = Handed(memory, local_rank, local_size, doorbells, int(cores))
    except ValueError:
        return f"PYCOLL_SHM is {text!r}, which makes no sense"
    if len(doorbells) != local_size or not 0 <= local_rank < local_size:
        return (
            f"PYCOLL_SHM has doorbells for {len(doorbells)} ranks, but this is rank "
            f"{local_rank} of {local_size} on its host"
        )
    if not _is_there(memory, inode, doorbells):
        return (
            "the descriptors of the memory shared with the other ranks (PYCOLL_SHM) were "
            "closed on the way from pycoll-run; what runs between them must leave them open"
        )
    return handed


def _is_there(memory: int, inode: str, doorbells: list[int]) -> bool:
    """Whether the descriptors are open, and the memory is the launcher's."""
    try:
        for descriptor in doorbells:
            os.fstat(descriptor)
        return str(os.fstat(memory).st_ino) == inode
    except OSError:
        return False
