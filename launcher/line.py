"""Frames between the launcher and the agent of another host, over whatever carries bytes.

A frame is a length of 4 bytes, the msgpack of [kind, field, ...] and the end of a line, without
which srun would keep it. What a login shell has printed before the agent began is skipped: the
agent says `MARKER` first.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import time
from collections.abc import Callable
from typing import Any

import msgpack

from pycoll._rendezvous.local import framed, take_frames

MARKER = b"\n\0pycoll agent\0\n"

BEAT_S = 1.0
"""Each side says something at least so often, "beat" if there is nothing else."""

LOST_S = 8.0
"""Who has heard nothing for so long takes the other side for lost. A cable that is out for 3 s is
quiet for up to 6.4: TCP repeats after 0.2, 0.4, 0.8, 1.6 and 3.2 s."""

_LATE_S = 3.0  # a process that looks so late was stopped, or its machine was

_MAX_FRAME_NBYTES = 32 << 20
_MAX_NOISE_NBYTES = 1 << 20
_READ_NBYTES = 256 << 10

Hear = Callable[[str, list[Any]], None]


class Line:
    """One end of a connection that carries frames, whatever the frames go over.

    Args:
        hear: called with each frame that comes: kind and fields.
        lost: called once with why nothing can come any more: "" if the other end has closed.

    Attributes:
        is_open: False after `lost` or `close`.
    """

    def __init__(self, hear: Hear, lost: Callable[[str], None]) -> None:
        self._hear, self._lost = hear, lost
        self.is_open = True
        self._said_at = self._heard_at = self._looked_at = time.monotonic()

    def send(self, kind: str, *fields: Any) -> None:
        """Send a frame, now or when the other end reads; without a connection: nothing."""
        if self.is_open:
            self._said_at = time.monotonic()
            self._put(msgpack.packb([kind, *fields], unicode_errors="surrogateescape"))

    def is_silent(self, now: float) -> bool:
        """Return whether nothing has come for so long that the other side is lost.

        To be asked at least every `BEAT_S`. The time in which this process itself was stopped does
        not count: the other side may have been, too, as when a job is suspended.
        """
        stopped = now - self._looked_at - _LATE_S
        self._looked_at = now
        if stopped > 0:
            self._heard_at = min(now, self._heard_at + stopped)
        return now >= self._heard_at + LOST_S

    def beat_at(self) -> float:
        """Return when something is to be said, if nothing was."""
        return self._said_at + BEAT_S

    def silent_at(self) -> float:
        """Return when the other side is lost, if nothing comes."""
        return self._heard_at + LOST_S

    def flush(self, deadline: float) -> None:
        """Wait until everything has been sent, or the deadline has passed."""

    def close(self) -> None:
        """Give up what it goes over; may be called again."""
        self.is_open = False

    def _put(self, frame: bytes) -> None:
        """Send a frame."""
        raise NotImplementedError

    def _came(self, frame: bytes) -> bool:
        """Handle a frame; returns whether it makes sense."""
        self._heard_at = time.monotonic()
        try:
            kind, *fields = msgpack.unpackb(frame, unicode_errors="surrogateescape")
        except (ValueError, TypeError):
            return False
        self._hear(kind, fields)
        return True

    def _end(self, why: str) -> None:
        if self.is_open:
            self.close()
            self._lost(why)


class DescriptorLine(Line):
    """One end over descriptors; it never blocks, and keeps what the other end does not read.

    Args:
        reading, writing: the descriptors, which become its own; they may be the same.
        selector: the owner's loop; the data of a key is a function to call when it is ready.
        hear, lost: see `Line`.
        skips: skip what comes before `MARKER`.

    Attributes:
        noise: what came before `MARKER`, the beginning of it.
    """

    def __init__(
        self,
        reading: int,
        writing: int,
        selector: selectors.BaseSelector,
        hear: Hear,
        lost: Callable[[str], None],
        *,
        skips: bool = False,
    ) -> None:
        super().__init__(hear, lost)
        self._reading, self._writing = reading, writing
        self._selector, self._skips = selector, skips
        self.noise = b""
        self._incoming, self._outgoing = bytearray(), bytearray()
        self._waits_to_write = False
        for descriptor in {reading, writing}:
            os.set_blocking(descriptor, False)
        selector.register(reading, selectors.EVENT_READ, self._read)

    def mark(self) -> None:
        """Send `MARKER`."""
        self._outgoing += MARKER
        self._write()

    def flush(self, deadline: float) -> None:
        while self.is_open and self._outgoing and (left := deadline - time.monotonic()) > 0:
            with selectors.DefaultSelector() as selector:
                selector.register(self._writing, selectors.EVENT_WRITE)
                selector.select(left)
            self._write()

    def close(self) -> None:
        """Close the descriptors; may be called again."""
        if not self.is_open:
            return
        super().close()
        self._selector.unregister(self._reading)
        if self._waits_to_write and self._writing != self._reading:
            self._selector.unregister(self._writing)
        for descriptor in {self._reading, self._writing}:
            os.close(descriptor)

    def _put(self, frame: bytes) -> None:
        self._outgoing += framed(frame + b"\n")
        self._write()

    def _read(self) -> None:
        if self._waits_to_write and self._reading == self._writing:
            self._write()
        try:
            data = os.read(self._reading, _READ_NBYTES) if self.is_open else b""
        except BlockingIOError:
            return
        except OSError as exc:
            return self._end(exc.strerror or str(exc))
        if not data:
            return self._end("")
        self._heard_at = time.monotonic()
        self._incoming += data
        if self._skips and not self._find_marker():
            return
        self._split()

    def _find_marker(self) -> bool:
        at = self._incoming.find(MARKER)
        if at >= 0:
            self._skips = False
            self.noise = bytes(self._incoming[:at])
            del self._incoming[: at + len(MARKER)]
        elif len(self._incoming) > _MAX_NOISE_NBYTES:
            self.noise = bytes(self._incoming)
            self._end("what its login shell prints does not end")
        else:
            self.noise = bytes(self._incoming)
        return at >= 0

    def _split(self) -> None:
        frames, is_good = take_frames(self._incoming, _MAX_FRAME_NBYTES)
        for frame in frames:
            if self.is_open and is_good:
                is_good = self._came(frame[:-1])
        if not is_good:
            self._end("it sends what makes no sense")

    def _write(self) -> None:
        try:
            while self.is_open and self._outgoing:
                sent = os.write(self._writing, self._outgoing)
                del self._outgoing[:sent]
        except BlockingIOError:
            pass
        except OSError:  # closed at the other end: what had come from there is still read
            self._outgoing.clear()
        self._watch_writing(bool(self._outgoing))

    def _watch_writing(self, waits: bool) -> None:
        if waits == self._waits_to_write or not self.is_open:
            return
        self._waits_to_write = waits
        if self._writing == self._reading:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if waits else 0)
            self._selector.modify(self._reading, events, self._read)
        elif waits:
            self._selector.register(self._writing, selectors.EVENT_WRITE, self._write)
        else:
            with contextlib.suppress(KeyError):
                self._selector.unregister(self._writing)
