"""A job whose ranks stay, and do one task after the other."""

from __future__ import annotations

import contextlib
import selectors
import sys
from collections.abc import Callable, Mapping, Sequence

from pycoll._launcher.deadlock import Context
from pycoll._launcher.output import Target
from pycoll._launcher.spawn import Job


class LastingJob(Job):
    """A job that its owner watches for as long as a task takes, and leaves alone between two.

    Attributes:
        deadlock: the lines that say which ranks wait for each other for ever, if that is so and
            does not end the job (`Options.ends_deadlocks`); the owner, who sees to it, empties it.
    """

    deadlock: Sequence[str] = ()

    @property
    def is_ending(self) -> bool:
        """Whether a rank has failed or ended, or it was decided that the job ends."""
        return self._decision is not None or any(
            rank.failed_at is not None or rank.status is not None for rank in self._ranks
        )

    def listen(self, fd: int, heard: Callable[[], object]) -> None:
        """Call `heard` when a descriptor is readable."""
        self.selector.register(fd, selectors.EVENT_READ, heard)

    def unlisten(self, fd: int) -> None:
        """Look at a descriptor no more; may be called again."""
        with contextlib.suppress(KeyError):
            self.selector.unregister(fd)

    def table(self) -> tuple[str, ...]:
        """Return what each rank is doing, if one waits for others."""
        return tuple(self.server.table()) if self.server.is_anyone_waiting() else ()

    def stop(self) -> None:
        """End the ranks: SIGTERM, later SIGKILL."""
        self.give_up(1, "the job was ended")

    def note_ended(
        self, ended: Mapping[int, str], returned: Mapping[int, Mapping[Context, int]]
    ) -> None:
        """Know which ranks have come to the end of a task.

        Args:
            ended: what the table says of each of them.
            returned: those that have returned, see `Watch.note_returned`.
        """
        self._ended = ended
        self._watch_waits.note_returned(returned)

    def write_to(self, stdout: Target, stderr: Target) -> None:
        """Write what ranks print from now on elsewhere (see `Job`)."""
        self._relay.aim(
            sys.stdout if stdout is None else stdout, sys.stderr if stderr is None else stderr
        )

    def _tell_of_waits(self, lines: Sequence[str], is_certain: bool) -> None:
        if is_certain and not self._options.ends_deadlocks:
            self.deadlock = lines
        else:
            super()._tell_of_waits(lines, is_certain)

    def has_written(self) -> bool:
        """Read what ranks have printed by now; returns whether all of it has been passed on."""
        self._relay.drain()
        return self._relay.idle or self._relay.error is not None
