"""Arrays on a GPU: each has a staging buffer in page-locked host memory, and that is what travels.

    Stage.pull    GPU -> buffer    on a side stream, after what the array's library has under way
    Stage.push    buffer -> GPU    on another one
    stage_of      the stage to whose buffer some bytes belong

A schedule waits for the copy of a chunk and goes on with others meanwhile (`staged_run`). What is
called done is done: a result may be read on any stream.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from pycoll._cuda.copies import GpuCopy, OperationOwner, Push, SideStream, is_over, streams_of
from pycoll._cuda.cuda import Device, IpcHandle, Mark
from pycoll._cuda.late_copies import LateCopies
from pycoll._cuda.pinned import Loan, pool
from pycoll._cuda.rows import Rows
from pycoll._dtypes import Array
from pycoll.errors import TransportError


class Stage:
    """An array on a GPU, and its staging buffer.

    It lives as long as the staging buffer does: for whoever sees that, as bytes only, it can be
    found.

    Attributes:
        device: the GPU.
        pointer: address of the first element there.
        nbytes: of all elements.
        is_target: it is to be written: its staging buffer gets its values from elsewhere.
        place: an array with the addresses of the elements on the GPU. Never look into it: it
            tells what overlaps what.
    """

    def __init__(
        self,
        device: Device,
        pointer: int,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        ready: Mark | None,
        array: object,
        writeable: bool = True,
        is_target: bool = False,
    ) -> None:
        """Stage an array.

        Args:
            device: the GPU.
            pointer: address of the first element there.
            dtype: of the staging buffer.
            shape, strides: of the array; strides in bytes.
            ready: what must be done before the array may be read or written.
            array: keeps the memory.
            writeable: whether it may be written.
            is_target: it is to be written, so that what it holds is not wanted.
        """
        self.device = device
        self.place = _phantom(pointer, dtype, shape, strides, writeable)
        self.pointer = pointer
        self.nbytes = self.place.nbytes
        self.is_target = is_target
        self._ready = ready
        self._array = array
        self._width, self._dims = _collapsed(shape, strides, dtype.itemsize)
        self._pulled: list[tuple[int, int, GpuCopy]] = []
        self._pushed: list[tuple[int, int, GpuCopy | Push]] = []
        self._side_stream: SideStream | None = None
        self._watched_by: SideStream | None = None
        self._before: list[GpuCopy] = []
        self._loan: weakref.ref[Loan] | None = None
        self._address = 0

    def make_buffer(self) -> Array:
        """Return host memory for the elements, C-contiguous; they are in it when `pull` is done."""
        if not self.nbytes:
            return np.empty(self.place.shape, self.place.dtype)
        loan = pool.take(self.nbytes)
        loan.stage = self
        self._loan = weakref.ref(loan)
        buffer = loan.array(self.place.dtype, self.place.shape)
        self._address = buffer.__array_interface__["data"][0]
        return buffer

    @property
    def is_read_first(self) -> bool:
        """Whether it must not be written before others of the same memory were read."""
        return bool(self._before)

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie one behind the other on the GPU."""
        return not self._dims

    @functools.cached_property
    def ipc_handle(self) -> IpcHandle | None:
        """What another process needs to reach it, asked once a call; see `Device.ipc_handle`."""
        return self.device.ipc_handle(self.pointer)

    def ready(self, engine: OperationOwner | None) -> GpuCopy:
        """Return an operation that is done when its library has finished writing the array."""
        if self._ready is None or is_over(self._ready):
            return GpuCopy(engine, None, None, None)
        with streams_of(self.device).pulls.pick(again=self._watched_by) as side_stream:
            side_stream.last = side_stream.ready = self._ready
            self._watched_by = side_stream
        return GpuCopy(engine, side_stream, self._ready, self._array)

    def hindrances(self, engine: OperationOwner | None) -> list[GpuCopy]:
        """Return the copies that must end before anything may write to the array."""
        found = [copy for copy in (self.ready(engine), *self._before) if not copy.is_over()]
        for copy in found:
            copy.engine = copy.engine or engine
        return found

    def fill(self, engine: OperationOwner, source: int, begin: int, end: int) -> GpuCopy:
        """Have bytes `begin` to `end` of the array, which is ready, copied from its GPU's `source`.

        The staging buffer is passed over, and these bytes of it are not to be pushed any more.
        """
        to, nbytes = self.pointer + begin, end - begin
        copy = self.work(engine, lambda stream: self.device.copy_within(stream, to, source, nbytes))
        self._pushed.append((begin, end, copy))
        return copy

    def work(self, engine: OperationOwner, enqueue: Callable[[int], None]) -> GpuCopy:
        """Have something written to the array, which is ready: `enqueue` puts it into a stream."""
        with streams_of(self.device).pushes.pick() as side_stream:
            try:
                enqueue(side_stream.handle)
                return self._put(engine, side_stream)
            except TransportError:
                side_stream.drain()  # of some of it, perhaps, nobody else would know
                raise

    def keep(self, begin: int, end: int) -> GpuCopy:
        """Say that bytes of the array hold their result already: they are not pushed."""
        copy = GpuCopy(None, None, None, None)
        self._pushed.append((begin, end, copy))
        return copy

    def has(self, begin: int, end: int) -> bool:
        """Whether `fill`, `keep` or `push` was called for just these bytes."""
        return any([pushed[:2] == (begin, end) for pushed in self._pushed])

    def follow(self, other: Stage) -> None:
        """Push nothing before all of `other`, of the same memory, is pulled."""
        self._before.append(other.pull(None))

    def pull(
        self, engine: OperationOwner | None, begin: int = 0, end: int | None = None
    ) -> GpuCopy:
        """Have bytes `begin` to `end` of the elements, in C order, copied to the buffer, once.

        Of what does not lie one behind the other all is copied at once.
        """
        end = self.nbytes if end is None else end
        if not self.is_contiguous and begin < end:
            begin, end = 0, self.nbytes
        for first, last, copy in self._pulled:
            if first <= begin and end <= last:
                copy.engine = copy.engine or engine
                return copy
            assert end <= first or last <= begin, "what is there must not be written again"
        copy = self._copy(engine, begin, end, to_host=True)
        self._pulled.append((begin, end, copy))
        return copy

    def push(
        self, engine: OperationOwner | None, begin: int = 0, end: int | None = None
    ) -> GpuCopy | Push:
        """Have bytes `begin` to `end` of the buffer copied to the GPU; they must not change."""
        end = self.nbytes if end is None else end
        others = self.hindrances(engine) if begin < end else []
        copy: GpuCopy | Push
        if others:
            # It keeps the staging buffer, which nobody else may any more.
            later = functools.partial(self._copy, engine, begin, end, False, self._kept())
            copy = Push(others, later, goes_on=engine is not None)
        else:
            copy = self._copy(engine, begin, end, to_host=False)
        self._pushed.append((begin, end, copy))
        return copy

    def flush(self, late: LateCopies | None = None) -> None:
        """Push what has not been; `late` gets what is under way, None: that is waited for here."""
        engine = late.engine if late is not None else None
        begin = 0
        for first, last, _ in sorted(self._pushed, key=lambda pushed: pushed[:2]):
            if begin < first:
                self.push(engine, begin, first)
            begin = max(begin, last)
        if begin < self.nbytes:
            self.push(engine, begin)
        pushes = [copy for _, _, copy in self._pushed if not copy.done or copy.error is not None]
        if late is not None:
            late.copies += pushes
            return
        for push in pushes:
            push.wait()

    def offset(self, view: memoryview) -> int:
        """Return where bytes of the staging buffer begin in it."""
        address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
        return address - self._address

    def _kept(self) -> Loan | None:
        return self._loan() if self._loan is not None else None

    def _copy(
        self,
        engine: OperationOwner | None,
        begin: int,
        end: int,
        to_host: bool,
        loan: Loan | None = None,
    ) -> GpuCopy:
        if begin >= end:
            return GpuCopy(engine, None, None, None)
        loan = loan or self._kept()
        assert loan is not None, "nobody has the staging buffer"
        loan.block.pin(self.device)
        rows = list(self._rows(begin, end))
        with self._pick(to_host) as side_stream:
            try:
                self.device.copy(side_stream.handle, rows, self.pointer, self._address, to_host)
                return self._put(engine, side_stream, loan)
            except TransportError:
                side_stream.drain()  # of some of it, perhaps, nobody else would know
                raise

    @contextlib.contextmanager
    def _pick(self, to_host: bool) -> Iterator[SideStream]:
        """Give the side stream for a copy; all that wait for the array to be ready share one."""
        own = streams_of(self.device)
        if not to_host:
            with own.pushes.pick() as side_stream:
                yield side_stream
        elif self._ready is None or is_over(self._ready):
            with own.pulls.pick() as side_stream:
                yield side_stream
        else:
            with own.pulls.pick(again=self._side_stream) as side_stream:
                if self._side_stream is None:
                    self.device.follow(side_stream.handle, self._ready)
                    side_stream.ready = self._ready
                    self._side_stream = side_stream
                yield side_stream

    def _put(
        self, engine: OperationOwner | None, side_stream: SideStream, loan: Loan | None = None
    ) -> GpuCopy:
        """Return the copy just put into a side stream; nobody has the memory before its end."""
        copy = GpuCopy(engine, side_stream, side_stream.begun(), self._array)
        loan = loan or self._kept()
        assert loan is not None, "nobody has the staging buffer"
        loan.copies.append(copy)
        return copy

    def _rows(self, begin: int, end: int) -> Iterator[Rows]:
        """Give bytes `begin` to `end` of the elements as what lies evenly on the GPU."""
        width = self._width
        if not self._dims:
            yield Rows(begin, begin, end - begin, 1, end - begin, end - begin)
            return
        if (begin, end) == (0, self.nbytes):
            yield from _sheets(width, self._dims)
            return
        *outer, (count, pitch) = self._dims
        first, last = begin // width, -(-end // width)  # rows that have some of it
        for number, index in enumerate(itertools.product(*[range(n) for n, _ in outer])):
            start = max(first, number * count)
            stop = min(last, (number + 1) * count)
            if start >= stop:
                continue
            base = sum(i * stride for i, (_, stride) in zip(index, outer, strict=True))
            base -= number * count * pitch
            while start < stop:  # the first and the last row may be incomplete
                front = max(begin - start * width, 0)
                whole = (end // width - start) if not front else 0
                many = min(stop - start, whole)
                if many > 0:
                    yield Rows(base + start * pitch, start * width, width, many, pitch, width)
                    start += many
                    continue
                back = min(end - start * width, width)
                place = base + start * pitch + front
                size = back - front
                yield Rows(place, start * width + front, size, 1, size, size)
                start += 1


class DeviceMemory:
    """Memory on a GPU for a result, until nobody uses it any more.

    Attributes:
        pointer: its address there.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        self.pointer = device.allocate(nbytes)
        self._device = device
        self._pid = os.getpid()

    # The defaults live as long as this function; names of the module may have gone before.
    def __del__(self, getpid: Any = os.getpid, is_finalizing: Any = sys.is_finalizing) -> None:
        if self._pid == getpid() and not is_finalizing():
            with contextlib.suppress(TransportError):
                self._device.free(self.pointer)


def fetch(engine: OperationOwner | None, device: Device, source: int, into: memoryview) -> GpuCopy:
    """Have host memory filled from a GPU."""
    address: int = np.frombuffer(into, np.uint8).__array_interface__["data"][0]
    row = Rows(0, 0, len(into), 1, len(into), len(into))
    with streams_of(device).pulls.pick() as side_stream:
        device.copy(side_stream.handle, [row], source, address, to_host=True)
        return GpuCopy(engine, side_stream, side_stream.begun(), into)


def stage_of(view: memoryview) -> Stage | None:
    """Return the stage to whose staging buffer some bytes belong, if they belong to one."""
    owner: object = view.obj
    while isinstance(owner, np.ndarray):
        owner = owner.base
    return owner.stage if isinstance(owner, Loan) else None


class _There:
    """Nothing but addresses."""

    __array_interface__: dict[str, object]


def _phantom(
    pointer: int,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    writeable: bool,
) -> Array:
    if 0 in shape:
        return np.empty(shape, dtype)

    there = _There()
    there.__array_interface__ = {
        "version": 3,
        "data": (pointer, not writeable),
        "shape": shape,
        "strides": strides,
        "typestr": dtype.str,
    }
    return np.asarray(there)


def _sheets(width: int, dims: Sequence[tuple[int, int]]) -> Iterator[Rows]:
    """Give all elements as few sheets of rows: along the longest axis."""
    steps = [width * math.prod(n for n, _ in dims[axis + 1 :]) for axis in range(len(dims))]
    longest = max(range(len(dims)), key=lambda axis: (dims[axis][1] >= width, dims[axis][0]))
    (count, pitch), step = dims[longest], steps[longest]
    others = [axis for axis in range(len(dims)) if axis != longest]
    for index in itertools.product(*[range(dims[axis][0]) for axis in others]):
        device = sum(i * dims[axis][1] for i, axis in zip(index, others, strict=True))
        host = sum(i * steps[axis] for i, axis in zip(index, others, strict=True))
        yield Rows(device, host, width, count, pitch, step)


def _collapsed(
    shape: Sequence[int], strides: Sequence[int], itemsize: int
) -> tuple[int, list[tuple[int, int]]]:
    """Return the bytes that lie together, and how often, how far apart: (count, stride) by axis."""
    width = itemsize
    dims: list[tuple[int, int]] = []
    for count, stride in reversed(
        [axis for axis in zip(shape, strides, strict=True) if axis[0] != 1]
    ):
        if not dims and stride == width:
            width *= count
        elif dims and dims[0][0] * dims[0][1] == stride:
            dims[0] = (dims[0][0] * count, dims[0][1])
        else:
            dims.insert(0, (count, stride))
    return width, dims
