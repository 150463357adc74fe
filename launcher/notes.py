"""What a rank notes of its calls, as it lies in its host's memory: that of host/noted.h.

Each kind of note is a ring, and the rank counts how many it has made. A rank may have written
anything there.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

NOTED = 1024
"""So many are kept of each kind but names."""

TEXT_NBYTES = 112
"""The most that is kept of the text of a call."""

NUMBER = struct.Struct("@Q")


class Ring(NamedTuple):
    """Notes of one kind: where they begin, what each is, how many there are, where the count is."""

    at: int
    record: struct.Struct
    size: int
    count_at: int

    @property
    def end(self) -> int:
        """Where they end."""
        return self.at + self.size * self.record.size

    def records(self, notes: bytes) -> Iterator[tuple[Any, ...]]:
        """Yield all, as far as the memory goes, in no order."""
        data = notes[self.at : self.end]
        return self.record.iter_unpack(data[: len(data) // self.record.size * self.record.size])

    def newest(self, notes: bytes, most: int) -> Iterator[tuple[int, tuple[Any, ...]]]:
        """Yield the newest with their numbers, from 1; none, if the memory ends before."""
        if len(notes) < self.end:
            return
        (count,) = NUMBER.unpack_from(notes, self.count_at)
        for number in range(max(0, count - min(most, self.size)), count):
            at = self.at + number % self.size * self.record.size
            yield number + 1, self.record.unpack_from(notes, at)


# Of a name: number of the communicator; bytes, text.
NAMES = Ring(64, struct.Struct("@QI52s"), 128, 8)
# Of a message: number of the communicator; bytes, tag, peer, kind and state.
MESSAGES = Ring(NAMES.end, struct.Struct("@QQqiI"), NOTED, 0)
# Of a wait in shared memory: number of the communicator; of the call, since when, until when, for
# which rank of the host; bytes, place.
WAITS = Ring(MESSAGES.end, struct.Struct("@QQQQII56s"), NOTED, 24)
# Of a call by messages: its number among the rank's, of the communicator, in that; since when,
# until when, bytes, text.
CALLS = Ring(WAITS.end, struct.Struct(f"@QQQQQQ{TEXT_NBYTES}s"), NOTED, 16)
