"""What `pycoll-run --trace` needs of the launcher: memory for records, clocks, and the file.

A rank writes its records to a memfd that it inherits (`pycoll._trace.records`). It has no name, so
nothing is left behind by whatever dies; the process that has started the rank reads it at the end.
An agent sends what it has read to the launcher.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
import tempfile
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from pycoll._launcher.outcome import RankState, end_text
from pycoll._trace import records
from pycoll._trace.records import RankRecords
from pycoll._trace.timeline import Clock, RankTrace
from pycoll.errors import Error

_OF_JOB, _FEWEST, _MOST = 1 << 18, 1 << 11, 1 << 17  # records: of all ranks, of one
_CHUNK_NBYTES = 1 << 20
PINGS = 16
"""Round trips by which a clock is compared: at the start, and again at the end."""


def capacity(size: int, environ: Mapping[str, str]) -> int:
    """Return how many records each rank may keep: PYCOLL_TRACE_RECORDS, or by their number.

    Raises:
        Error: the variable makes no sense.
    """
    text = environ.get("PYCOLL_TRACE_RECORDS")
    if not text:
        return max(_FEWEST, min(_MOST, _OF_JOB // size))
    with contextlib.suppress(ValueError):
        if 2 <= int(text) <= 1 << 28:
            return int(text)
    raise Error(f"PYCOLL_TRACE_RECORDS is {text!r}, but must be a number of calls, at least 2")


def check_path(path: str) -> None:
    """Refuse a file that cannot be written, or is no trace, before anything is started.

    Raises:
        OSError: why it cannot, or shall not.
    """
    folder = os.path.dirname(path) or "."
    if os.path.isdir(path):
        raise IsADirectoryError(f"{path} is a folder")
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"there is no folder {folder}")
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise PermissionError(f"{path} cannot be written")
    from pycoll._trace import chrome

    if os.path.isfile(path) and not chrome.is_trace(path):
        raise FileExistsError(f"{path} is there, and is no trace: delete it if it may go")


class TraceMemory:
    """The memory of the records of a host's ranks.

    Args:
        ranks: of the host.
        capacity: how many records of each fit.

    Attributes:
        descriptors: by rank; they stay this object's.

    Raises:
        OSError: there is none to be had.
    """

    def __init__(self, ranks: Sequence[int], capacity: int) -> None:
        self.descriptors: dict[int, int] = {}
        try:
            for rank in ranks:
                self.descriptors[rank] = records.make(capacity)
        except BaseException:
            self.close()
            raise

    def read(self) -> dict[int, RankRecords]:
        """Return by rank what has been recorded."""
        found = {}
        for rank, descriptor in self.descriptors.items():
            with mmap.mmap(descriptor, 0, prot=mmap.PROT_READ) as image:
                found[rank] = records.read(image)
        return found

    def packed(self) -> Iterator[tuple[int, bytes]]:
        """Yield what has been recorded, as an agent sends it: rank, and the next piece of it."""
        for rank, descriptor in self.descriptors.items():
            packer = zlib.compressobj(1)
            offset = 0
            while data := os.pread(descriptor, _CHUNK_NBYTES, offset):
                offset += len(data)
                if piece := packer.compress(data):
                    yield rank, piece
            yield rank, packer.flush()

    def close(self) -> None:
        """Give it back; may be called again."""
        for descriptor in self.descriptors.values():
            os.close(descriptor)
        self.descriptors.clear()


class RemoteTrace:
    """What the launcher learns about another host: its records, and its clock.

    Args:
        ask: asks the agent what time it is.

    Attributes:
        heard_at: when the last piece of records has come, of time.monotonic().
    """

    def __init__(self, ask: Callable[[], None]) -> None:
        self._ask = ask
        self._pieces: dict[int, bytearray] = {}
        self._asked_at = 0
        self._left = 0
        self._then: Callable[[], None] = lambda: None
        self._first: list[tuple[int, int, int]] = []
        self._last: deque[tuple[int, int, int]] = deque(maxlen=PINGS)
        self.heard_at = float("-inf")

    def compare_clocks(self, then: Callable[[], None]) -> None:
        """Ask what time it is there, again and again; `then` is called at the end."""
        self._left, self._then = PINGS, then
        self._ping()

    def told_time(self, there: int) -> None:
        """Hear what time it was there: between the question and now."""
        now = time.monotonic_ns()
        trip = now - self._asked_at
        sample = there, there - self._asked_at - trip // 2, trip // 2 + 1
        (self._first if len(self._first) < PINGS else self._last).append(sample)
        self._left -= 1
        if self._left > 0:
            self._ping()
        elif self._left == 0:
            self._then()

    def _ping(self) -> None:
        self._asked_at = time.monotonic_ns()
        self._ask()

    def clock(self) -> Clock:
        """Return how its clock relates to ours: of each end the quickest round trip counts."""
        best = [min(each, key=lambda s: s[2]) for each in (self._first, self._last) if each]
        return Clock(best)

    def feed(self, rank: int, piece: bytes) -> None:
        """Take a piece of the records of a rank."""
        self._pieces.setdefault(rank, bytearray()).extend(piece)
        self.heard_at = time.monotonic()

    def read(self) -> dict[int, RankRecords]:
        """Return by rank what has been recorded, as far as all of it has come."""
        found = {}
        for rank, packed in self._pieces.items():
            with contextlib.suppress(zlib.error):
                found[rank] = records.read(zlib.decompress(packed))
        return found


def of_rank(
    state: RankState, host: str, clock: Clock, recorded: Mapping[int, RankRecords]
) -> RankTrace:
    """Return what is known of a rank."""
    ended = state.gone or (end_text(state.status) if state.status else "")
    found = recorded.get(state.rank) or RankRecords(0, [])
    return RankTrace(state.rank, host, clock, found, ended)


def write(path: str, traces: Sequence[RankTrace]) -> list[str]:
    """Write the file; returns lines that say what it shows.

    Raises:
        OSError: it cannot be written; what was there before is as it was.
    """
    from pycoll._trace import chrome, summary
    from pycoll._trace.timeline import Timeline

    timeline = Timeline(traces)
    messages = timeline.messages()
    waits = timeline.waits(messages)
    compress = path.endswith(".gz")
    if os.path.exists(path) and not stat.S_ISREG(os.stat(path).st_mode):
        with open(path, "wb") as file:  # a pipe, say
            chrome.write(file, timeline, messages, waits, compress=compress)
        return summary.summary(timeline, waits, path)
    target = os.path.realpath(path)
    with tempfile.NamedTemporaryFile(
        dir=os.path.dirname(target), prefix=f".{os.path.basename(target)}.", delete=False
    ) as file:
        try:
            chrome.write(file, timeline, messages, waits, compress=compress)
            file.flush()
            mask = os.umask(0)
            os.umask(mask)
            os.fchmod(file.fileno(), 0o666 & ~mask)
            os.replace(file.name, target)
        except BaseException:
            os.unlink(file.name)
            raise
    return summary.summary(timeline, waits, path)
