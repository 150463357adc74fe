"""The memory that the ranks of one host share, as far as the launcher makes and reads it.

It is a memfd, without a name that could stay behind, and an eventfd for each rank, all inherited by
all ranks of the host. They make it larger and lay it out; the launcher knows of it:

    offset 64               the failure epoch, a uint32: it grows when a rank has failed
    offset 128              the lock of the table of communicators, a uint32: 0, or 1 + the local
                            rank that has it
    4096 + 1024 * r + 128   what local rank r has done: transports/_core/host/tally.h
    4096 + 1024 * r + 508   a uint32, odd while local rank r writes its line
    4096 + 1024 * r + 512   the line, UTF-8 that ends with a zero byte: the call in shared memory
                            that r waits in, ", since " and a time of CLOCK_MONOTONIC in
                            seconds; or empty
    behind all records      for each local rank what it notes of its calls: host/noted.h, there
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from pycoll._support.environment import HostPlacement
from pycoll._transports.shm import NOTES_NBYTES

if TYPE_CHECKING:
    from pycoll._launcher.awaited import WaitSums
    from pycoll._launcher.kept_calls import HostCalls

_PAGE = 4096
_EPOCH, _LOCK = 64 // 4, 128 // 4  # as indices of uint32
_RECORD = 1024
_SEQUENCE = struct.Struct("@I")
_SEQUENCE_OFFSET = _PAGE + 508
_TALLY = struct.Struct("@QQQQQ")
_TALLY_OFFSET = _PAGE + 128
_LINE_OFFSET, _LINE_NBYTES = _PAGE + 512, 500
_TRIES = 100  # to read a line that is being written; the writer may have died in the middle


class Tally(NamedTuple):
    """What a rank has done since it joined.

    Attributes:
        calls: collectives that it has begun.
        messages: that it has sent.
        nbytes: of these, and of what it has given to collectives in shared memory.
        waited_s: how long it has waited in pycoll, seconds.
    """

    calls: int
    messages: int
    nbytes: int
    waited_s: float


class HostMemory:
    """One host's memory. Where a system has none for us, ranks do without: `variable` says why.

    Args:
        ranks: of the host, in the order of their local ranks.
        cores: how many cores they may use together.

    Attributes:
        ranks: the same.
        descriptors: what every rank of the host inherits, under the same numbers.
        variable: the value of PYCOLL_SHM.
    """

    def __init__(self, ranks: list[int], cores: int) -> None:
        self.ranks = ranks
        self._local = {rank: local for local, rank in enumerate(ranks)}
        self.descriptors: list[int] = []
        self._eventfds: list[int] = []
        self._page: mmap.mmap | None = None
        try:
            flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
            self._memfd = os.memfd_create("host.pycoll", flags)
            self.descriptors.append(self._memfd)
            # With what those ranks write, too, that share nothing else.
            self._notes = _PAGE - (-len(ranks) * _RECORD // _PAGE) * _PAGE
            os.ftruncate(self._memfd, self._notes + len(ranks) * NOTES_NBYTES)
            # It only grows: where a rank has mapped it there is always something.
            fcntl.fcntl(self._memfd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            self._page = mmap.mmap(self._memfd, _PAGE)
            for _ in ranks:
                self._eventfds.append(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
                self.descriptors.append(self._eventfds[-1])
        except (AttributeError, OSError) as exc:  # an old kernel or C library, or a sandbox
            self.close()
            self.variable = f"-:{exc}"
            return
        inode = os.fstat(self._memfd).st_ino
        self.variable = f"{self._memfd}:{inode}:{','.join(map(str, self._eventfds))}:{cores}"

    def tell_failure(self) -> None:
        """Add 1 to the failure epoch, and wake every rank that sleeps on its eventfd."""
        if self._page is None:
            return
        with memoryview(self._page) as page, page.cast("I") as words:  # one store, not four bytes
            words[_EPOCH] = (words[_EPOCH] + 1) & 0xFFFFFFFF
        for eventfd in self._eventfds:
            with contextlib.suppress(BlockingIOError):  # its counter is full: it is readable
                os.eventfd_write(eventfd, 1)

    def note_end(self, rank: int) -> None:
        """The process of a rank has ended: if it had the lock, the others may have it.

        What it did under the lock was one store, so the table is whole. Only the process that has
        the lock gives it back, so nobody else changes the word then.
        """
        if self._page is None:
            return
        with memoryview(self._page) as page, page.cast("I") as words:
            if words[_LOCK] == self._local[rank] + 1:
                words[_LOCK] = 0

    def doing(self, rank: int) -> str:
        """The native call that a rank waits in, and for how long; "" if it waits in none."""
        call, since, start = self._line(rank).rpartition(", since ")
        try:
            return f"{call}, for {max(0.0, time.monotonic() - float(start)):.1f} s"
        except ValueError:
            return call + since + start

    def tally(self, rank: int) -> Tally | None:
        """What a rank has done; None: it is not known here."""
        if self._page is None:
            return None
        data = os.pread(self._memfd, _TALLY.size, _TALLY_OFFSET + _RECORD * self._local[rank])
        calls, messages, nbytes, waited_ns, since_ns = _TALLY.unpack(data)
        if since_ns:
            waited_ns += max(0, time.monotonic_ns() - since_ns)
        return Tally(calls, messages, nbytes, waited_ns / 1e9)

    def calls(self) -> HostCalls | None:
        """What its ranks have called last; None: it is not known."""
        from pycoll._launcher.kept_calls import HostCalls  # not sooner: few jobs need it

        if self._page is None:
            return None
        return HostCalls.read(self._memfd, list(map(self.notes, self.ranks)), self.ranks)

    def waits(self, size: int, most: int) -> dict[int, WaitSums]:
        """For whom each of its ranks has waited, by its last notes; see `awaited.of_notes`."""
        from pycoll._launcher.awaited import of_notes  # not sooner: few jobs need it

        now_ns = time.monotonic_ns()
        return {r: of_notes(self.notes(r), self.ranks, size, most, now_ns) for r in self.ranks}

    def notes(self, rank: int) -> bytes:
        """What a rank notes of its calls (`notes`); b"" if that is not known."""
        if self._page is None:
            return b""
        at = self._notes + self._local[rank] * NOTES_NBYTES
        return os.pread(self._memfd, NOTES_NBYTES, at)

    def close(self) -> None:
        """Give memory and descriptors back; may be called again."""
        if self._page is not None:
            self._page.close()
            self._page = None
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors.clear()
        self._eventfds.clear()

    def _line(self, rank: int) -> str:
        """What a rank has written about itself, as a whole."""
        if self._page is None:
            return ""
        # Read, not mapped: the file may still be shorter, and a mapping of nothing is a bus error.
        at = _RECORD * self._local[rank]
        for _ in range(_TRIES):
            before = os.pread(self._memfd, _SEQUENCE.size, _SEQUENCE_OFFSET + at)
            line = os.pread(self._memfd, _LINE_NBYTES, _LINE_OFFSET + at)
            after = os.pread(self._memfd, _SEQUENCE.size, _SEQUENCE_OFFSET + at)
            if len(line) < _LINE_NBYTES:
                return ""
            if before == after and _SEQUENCE.unpack(after)[0] % 2 == 0:
                return line.partition(b"\0")[0].decode(errors="replace")
        return ""


def memory_by_rank(places: Mapping[int, HostPlacement], cores: int) -> dict[int, HostMemory]:
    """Make the memory of the hosts of a job that are this machine: one, or several emulated ones.

    Args:
        places: by rank where it is.
        cores: how many cores they may use together.

    Returns:
        By rank the memory of its host.
    """
    ranks: dict[int, list[int]] = {}
    for rank in sorted(places, key=lambda rank: places[rank].local_rank):
        ranks.setdefault(places[rank].node, []).append(rank)
    # Emulated hosts share the machine: their ranks must not believe that each has it alone.
    share = max(1, cores // len(ranks))
    hosts = [HostMemory(mine, share) for mine in ranks.values()]
    return {rank: host for host in hosts for rank in host.ranks}
