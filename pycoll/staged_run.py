"""A schedule on arrays of which some are on a GPU: what must wait for a copy waits for no more.

The steps that use a chunk wait until it is in the image; it leaves for the GPU as soon as no step
uses it any more. So copies in both directions and messages are under way at the same time, as many
as there are chunks, or segments of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pycoll.copies import Copy, Push
from pycoll.errors import TransportError
from pycoll.executor import Binding, Run
from pycoll.schedule import Copy as CopyStep
from pycoll.staging import stage_of
from pycoll.transports.base import Operation


def is_staged(binding: Binding) -> bool:
    """Whether any chunk is in the image of an array on a GPU."""
    sources = [part for parts in binding.source if parts for part in parts]
    targets = [view for view in binding.target if view is not None]
    return any([stage_of(view) is not None for view in (*sources, *targets)])


class StagedRun(Run):
    """A run whose chunks come from a GPU, or go there."""

    __slots__ = ("_pushes", "_settled", "_uses")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._pushes: list[Copy | Push] = []
        self._settled: set[int] = set()
        self._uses: dict[int, list[int]] = {}  # by chunk: the steps that are left

    def start(self) -> None:
        steps = self._schedule.steps
        for position in range(len(steps)):
            for chunk in self._used(position):
                self._uses.setdefault(chunk, []).append(position)
        # In the order of their first use; those that no step uses, last.
        unused = [chunk for chunk in range(len(self._binding.nbytes)) if chunk not in self._uses]
        pulls: list[tuple[int, Copy]] = []
        try:
            for chunk in (*self._uses, *unused):
                pulls += [(chunk, copy) for copy in self._pull(chunk)]
        except TransportError:
            for _, copy in pulls:
                copy.watch()
            raise
        for chunk, _ in pulls:
            self._left += 1
            for position in self._uses.get(chunk, ()):
                self._waits[position] += 1
        super().start()
        for chunk, copy in pulls:
            copy.then(lambda copy, chunk=chunk: self._pulled(chunk, copy))  # type: ignore[misc]

    def cancel(self) -> None:
        super().cancel()
        for copy in self._pushes:  # nothing of the caller's is written after the call
            copy.settle()

    def _used(self, position: int) -> Sequence[int]:
        step, chunks = self._schedule.steps[position], self._schedule.chunks[position]
        return (*chunks, step.source) if isinstance(step, CopyStep) else chunks

    def _pull(self, chunk: int) -> list[Copy]:
        copies = []
        for part in self._binding.source[chunk] or ():
            stage = stage_of(part)
            if stage is not None and len(part) and not stage.is_target:
                begin = stage.offset(part)
                copies.append(stage.pull(self._engine, begin, begin + len(part)))
        return copies

    def _pulled(self, chunk: int, copy: Operation) -> None:
        if self._left < 0 or self.done:
            return
        if copy.error is not None:
            self.abort(copy.error)
            return
        self._left -= 1
        for position in self._uses.get(chunk, ()):
            self._waits[position] -= 1
            if self._waits[position] == 0:
                self._ready.append(position)
        self._drain()

    def _complete(self, position: int) -> None:
        if self._left >= 0:
            for chunk in self._used(position):
                users = self._uses[chunk]
                users.remove(position)
                target = self._binding.target[chunk]
                location = self.location[chunk]
                if not users and target is not None and location and location[0] is target:
                    self._settle(chunk)
        super()._complete(position)

    def _settle(self, chunk: int) -> None:
        """Have a chunk that is in its place go on to the GPU."""
        if chunk in self._settled:
            return
        self._settled.add(chunk)
        super()._settle(chunk)
        target = self._binding.target[chunk]
        stage = stage_of(target) if target is not None and len(target) else None
        if stage is not None and target is not None and stage.is_contiguous:
            begin = stage.offset(target)
            try:
                self._pushes.append(stage.push(self._engine, begin, begin + len(target)))
            except TransportError as exc:
                self.abort(exc)

    def _conclude(self) -> bool:
        super()._conclude()
        for copy in self._pushes:
            if not copy.done:
                copy.then(self._pushed)
                if not copy.done:
                    return False
            if copy.error is not None:
                self.abort(copy.error)
        return not self.done

    def _pushed(self, copy: Operation) -> None:
        if self._left >= 0 and not self.done:
            self._drain()
