"""What a rank does, as records in memory that outlives it.

The memory is a memfd that the launcher makes and the rank inherits: when the rank dies, however,
the launcher has what it has written, and no file has a name that could stay behind. It holds

    a page       `_HEADER`: who writes, how many records fit, how much of the strings is used
    strings      each once: a length (uint32) and UTF-8; records name them by their number
    records      of `RECORD_NBYTES` each, one for each call. It is written when the call begins,
                 and completed when it ends: one without an end was under way when the rank died

Of more records than fit, the first half of the places keeps the first, and the second half the
last: those in between are lost, and counted.
"""

from __future__ import annotations

import itertools
import mmap
import os
import struct
import threading
import time
from typing import Final, NamedTuple

ABSENT: Final = -(2**31)
"""A peer, root, source or tag that a call does not have."""

OPEN, DONE, FAILED = range(3)
"""States of a call."""

_MAGIC = b"pycoll trace 1\0\0"
_HEADER = struct.Struct("=16sQQQQQ")  # magic, records, bytes of strings, used, number, process
_USED_AT = 32  # of `used` and `number` in it
_PROCESS_AT = 48
_PAGE = 4096
_USED = struct.Struct("=QQ")
_PROCESS = struct.Struct("=Q")
_LENGTH = struct.Struct("=I")
_STRINGS_NBYTES = 1 << 18

# ordinal + 1, begin, end, done, number, nbytes, waited_by; peer, source, tag, receive tag;
# communicator, place, thread; what, algorithm; state
_RECORD = struct.Struct("=Q6q4i3I2HB7x")
RECORD_NBYTES: Final = _RECORD.size
_END = struct.Struct("=q")
_END_AT, _DONE_AT, _NBYTES_AT, _WAITED_AT, _STATE_AT = 16, 24, 40, 48, 88
_SOURCE = struct.Struct("=i")
_PEER_AT, _SOURCE_AT, _RECEIVE_TAG_AT = 56, 60, 68
_ALGORITHM = struct.Struct("=H")
_ALGORITHM_AT = 86


class Record(NamedTuple):
    """A call, as it is read back.

    Attributes:
        ordinal: which of the rank's calls it is, from 0.
        begin, end: when it was made and when it returned, nanoseconds of CLOCK_MONOTONIC; end 0: it
            has not.
        done: when what it has started was done; 0: it was not, or it has started nothing.
        waited_by: ordinal of the call that has waited for what it has started; -1: none.
        what, communicator, place, thread, algorithm: texts.
        state: OPEN, DONE or FAILED.
        number: of the collective call on its communicator; -1: it is none.
        nbytes: of the value that was passed, or else was received; -1: not known.
        peer: the root, or whom it sends to.
        source: from whom it receives.
        tag: of what it sends.
        receive_tag: of what it receives.
    """

    ordinal: int
    begin: int
    end: int
    done: int
    number: int
    nbytes: int
    waited_by: int
    peer: int
    source: int
    tag: int
    receive_tag: int
    communicator: str
    place: str
    thread: str
    what: str
    algorithm: str
    state: int


class RankRecords(NamedTuple):
    """What a rank has recorded.

    Attributes:
        process: its process id; 0: it has never joined the job.
        records: in the order in which the calls began.
        lost: how many calls are not among them.
        lost_from: ordinal of the first of those; they follow each other.
    """

    process: int
    records: list[Record]
    lost: int = 0
    lost_from: int = 0


def memory_nbytes(capacity: int) -> int:
    """Return how many bytes the memory of so many records has."""
    return _PAGE + _STRINGS_NBYTES + capacity * RECORD_NBYTES


def make(capacity: int) -> int:
    """Return a new memfd for the records of a rank, which is the caller's.

    Args:
        capacity: how many records fit, at least 2.

    Raises:
        OSError: there is none to be had.
    """
    descriptor = os.memfd_create("trace.pycoll", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, memory_nbytes(capacity))
        os.pwrite(descriptor, _HEADER.pack(_MAGIC, capacity, _STRINGS_NBYTES, 0, 0, 0), 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def variable(descriptor: int) -> str:
    """Return the value of PYCOLL_TRACE for a rank that inherits `descriptor`."""
    return f"{descriptor}:{os.fstat(descriptor).st_ino}"


def adopt(text: str) -> Recorder | None:
    """Return what writes to the memory that PYCOLL_TRACE names; child processes do not inherit it.

    Returns:
        None if the descriptor is not open here, or is something else.
    """
    try:
        descriptor, inode = map(int, text.split(":"))
        if os.fstat(descriptor).st_ino != inode:
            return None
        if os.pread(descriptor, len(_MAGIC), 0) != _MAGIC:
            return None
        memory = mmap.mmap(descriptor, 0)
    except (ValueError, OverflowError, OSError):
        return None
    os.close(descriptor)
    return Recorder(memory)


class Recorder:
    """Writes the records of this process; any thread may.

    Args:
        memory: of `make`, mapped; it becomes its own.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        head: tuple[int, ...] = _HEADER.unpack_from(memory)[1:]
        self._capacity, self._strings_nbytes, *_ = head
        self._memory = memory
        self._records_at = _PAGE + self._strings_nbytes
        self._first = self._capacity // 2
        self._ordinals = itertools.count()
        self._lock = threading.Lock()
        self._numbers: dict[str, int] = {}
        self._used = 0
        self.number_of("")
        self._threads: dict[int, int] = {}
        _PROCESS.pack_into(memory, _PROCESS_AT, os.getpid())
        os.register_at_fork(after_in_child=self._forget)

    def number_of(self, text: str) -> int:
        """Return the number of a string; 0, as of an empty one, when no more fit."""
        number = self._numbers.get(text)
        if number is not None:
            return number
        data = text.encode(errors="replace")
        with self._lock:
            number = len(self._numbers)
            end = self._used + _LENGTH.size + len(data)
            if end > self._strings_nbytes or number > 0xFFFF:
                return 0
            at = _PAGE + self._used
            _LENGTH.pack_into(self._memory, at, len(data))
            self._memory[at + _LENGTH.size : _PAGE + end] = data
            self._used = end
            _USED.pack_into(self._memory, _USED_AT, end, number + 1)
            self._numbers[text] = number
        return number

    def begin(
        self,
        what: int,
        communicator: int = 0,
        algorithm: int = 0,
        number: int = -1,
        nbytes: int = -1,
        peer: int = ABSENT,
        source: int = ABSENT,
        tag: int = ABSENT,
        receive_tag: int = ABSENT,
        place: int = 0,
    ) -> int:
        """Record that a call begins; returns its ordinal.

        Args:
            what, communicator, algorithm, place: numbers of strings (`Record`); 0: there is none.
            number, nbytes, peer, source, tag, receive_tag: as of `Record`.
        """
        thread = self._threads.get(threading.get_ident())
        if thread is None:
            thread = self._enter_thread()
        ordinal = next(self._ordinals)
        _RECORD.pack_into(
            self._memory,
            self._at(ordinal),
            ordinal + 1,
            time.monotonic_ns(),
            0,
            0,
            number,
            nbytes,
            -1,
            peer,
            source,
            tag,
            receive_tag,
            communicator,
            place,
            thread,
            what,
            algorithm,
            OPEN,
        )
        return ordinal

    def _enter_thread(self) -> int:
        name = f"{threading.current_thread().name}\0{threading.get_native_id()}"
        thread = self._threads[threading.get_ident()] = self.number_of(name)
        return thread

    def end(self, ordinal: int, state: int = DONE) -> None:
        """Record that a call has returned, or raised."""
        now = time.monotonic_ns()
        at = self._at(ordinal)
        if self._is_there(ordinal, at):
            self._memory[at + _STATE_AT] = state
            _END.pack_into(self._memory, at + _END_AT, now)

    def done(self, ordinal: int) -> None:
        """Record that what a call has started is done."""
        now = time.monotonic_ns()
        at = self._at(ordinal)
        if self._is_there(ordinal, at):
            _END.pack_into(self._memory, at + _DONE_AT, now)

    def failed(self, ordinal: int) -> None:
        """Record that what a call has started has failed."""
        at = self._at(ordinal)
        if self._is_there(ordinal, at):
            self._memory[at + _STATE_AT] = FAILED

    def waited(self, ordinal: int, by: int) -> None:
        """Record which call has waited for what another has started."""
        at = self._at(ordinal)
        if self._is_there(ordinal, at):
            _END.pack_into(self._memory, at + _WAITED_AT, by)

    def set_nbytes(self, ordinal: int, nbytes: int) -> None:
        """Record of how many bytes a call was, when that shows at its end."""
        at = self._at(ordinal)
        if self._is_there(ordinal, at):
            _END.pack_into(self._memory, at + _NBYTES_AT, nbytes)

    def set_algorithm(self, ordinal: int, algorithm: int) -> None:
        """Record what a call has run, when that is looked up at its end."""
        at = self._at(ordinal)
        if self._is_there(ordinal, at):
            _ALGORITHM.pack_into(self._memory, at + _ALGORITHM_AT, algorithm)

    def matched(self, ordinal: int, source: int, tag: int, nbytes: int) -> None:
        """Record whose message a receive has got, with which tag, and how long it is."""
        at = self._at(ordinal)
        if self._is_there(ordinal, at):
            _SOURCE.pack_into(self._memory, at + _SOURCE_AT, source)
            _SOURCE.pack_into(self._memory, at + _RECEIVE_TAG_AT, tag)
            if _SOURCE.unpack_from(self._memory, at + _PEER_AT) == (ABSENT,):  # else: of the other
                _END.pack_into(self._memory, at + _NBYTES_AT, nbytes)

    def _at(self, ordinal: int) -> int:
        if ordinal >= self._first:
            first = self._first
            ordinal = first + (ordinal - first) % (self._capacity - first)
        return self._records_at + ordinal * RECORD_NBYTES

    def _is_there(self, ordinal: int, at: int) -> bool:
        """Whether a record has not been overwritten."""
        if ordinal < self._first:
            return True
        found: tuple[int] = _PROCESS.unpack_from(self._memory, at)
        return found[0] == ordinal + 1

    def _forget(self) -> None:
        """In the child of a fork: write somewhere else, where nobody looks."""
        self._lock = threading.Lock()
        self._memory = mmap.mmap(-1, len(self._memory))


def read(image: bytes | mmap.mmap) -> RankRecords:
    """Return what a rank has recorded.

    Args:
        image: what its memory holds. The rank may have died while it wrote.
    """
    _, capacity, strings_nbytes, _, count, process = _HEADER.unpack_from(image)
    texts, at = [], _PAGE
    for _ in range(count):
        start = at + _LENGTH.size
        at = start + _LENGTH.unpack_from(image, at)[0]
        texts.append(bytes(image[start:at]).decode(errors="replace"))
    records_at = _PAGE + strings_nbytes
    found = []
    for place in range(capacity):
        row = _RECORD.unpack_from(image, records_at + place * RECORD_NBYTES)
        if row[0] == 0:
            break
        *numbers, communicator, place_of_call, thread, what, algorithm, state = row
        names = (texts[n] for n in (communicator, place_of_call, thread, what, algorithm))
        found.append(Record._make((numbers[0] - 1, *numbers[1:], *names, state)))
    found.sort(key=lambda record: record.ordinal)
    first = capacity // 2
    lost = found[-1].ordinal + 1 - len(found) if found else 0
    return RankRecords(process, found, lost, first)
