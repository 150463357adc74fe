"""Arrays on a GPU, staged: each has an image in page-locked host memory, which is what travels.

    Stage.pull    GPU -> image    on a side stream, after what the array's library has under way
    Stage.push    image -> GPU    on another one
    stage_of      the stage to whose image some bytes belong

A `Copy` is an operation like a message: a schedule waits for it and goes on with other chunks
meanwhile (`staged_run`). What is called done is done: a result may be read on any stream.

Images come from a pool. Their memory returns to it when nobody sees it any more and no copy that
was begun is still under way, whatever became of the call.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import mmap
import os
import queue
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol

import numpy as np

from pycoll.cuda import Device, Mark, Rows
from pycoll.dtypes import Array
from pycoll.errors import Error, TransportError
from pycoll.transports.base import Operation

KEPT_NBYTES: Final = 512 << 20
"""Page-locked bytes that are kept for later calls; to lock them again costs more than to copy."""

LANES: Final = 2
"""Side streams in each direction: more are made for arrays that are still being computed."""

MAX_LANES: Final = 32

SPIN_S: Final = 30e-6
"""A copy is looked at for so long before somebody sleeps: small ones are done by then."""

_PAGE: Final = mmap.PAGESIZE
_COARSE: Final = 1 << 20  # lengths of blocks: powers of two up to this, then multiples of it


class Engine(Protocol):
    """Under whose lock a copy becomes done."""

    def finish(self, operation: Operation, error: BaseException | None) -> None:
        """End it, and wake who waits for it."""


# --- page-locked memory ----------------------------------------------------------------------


class _Block:
    """Host memory; nothing but addresses until it is used."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._memory = mmap.mmap(-1, nbytes)
        self._memory.madvise(mmap.MADV_DONTFORK)  # a child's pages would take the GPU's place
        self.address: int = np.frombuffer(self._memory, np.uint8).__array_interface__["data"][0]
        self._device: Device | None = None
        self._is_tried = False

    def pin(self, device: Device) -> None:
        """Page-lock it, if that can be."""
        if self._is_tried:
            return
        self._is_tried = True
        # At a limit copies go through the driver's own memory.
        with contextlib.suppress(TransportError):
            device.pin(self.address, self.nbytes)
            self._device = device

    def close(self) -> None:
        if self._device is not None:
            with contextlib.suppress(TransportError):  # after an error nothing works any more
                self._device.unpin(self.address)
        self._memory.close()


class _Loan:
    """A block in use by one image; NumPy makes it the image's base.

    Attributes:
        stage: whose image it is.
        block: the block.
        copies: those that use it.
    """

    stage: Stage
    __array_interface__: dict[str, object]

    def __init__(self, pool: Pool, block: _Block) -> None:
        self._pool = pool
        self.block = block
        self.copies: list[Copy] = []

    def image(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        """Return the block's front as an array."""
        self.__array_interface__ = {
            "version": 3,
            "data": (self.block.address, False),
            "shape": shape,
            "typestr": dtype.str,
        }
        return np.asarray(self)

    def __del__(self) -> None:
        self._pool.returned.append((self.block, self.copies))


class Pool:
    """Blocks that images use one after the other.

    Attributes:
        returned: blocks whose image is gone, with the copies that may still use them.
    """

    def __init__(self) -> None:
        self.returned: deque[tuple[_Block, list[Copy]]] = deque()  # filled by whatever thread
        self._lock = threading.Lock()
        self._free: list[_Block] = []  # what came back last is last

    def take(self, nbytes: int) -> _Loan:
        """Return memory of at least so many bytes."""
        wanted = _rounded(nbytes)
        with self._lock:
            self._collect()
            for index in reversed(range(len(self._free))):
                if wanted <= self._free[index].nbytes <= 2 * wanted:
                    return _Loan(self, self._free.pop(index))
        return _Loan(self, _Block(wanted))

    def _collect(self) -> None:
        for _ in range(len(self.returned)):
            block, copies = self.returned.popleft()
            left = [copy for copy in copies if not copy.is_over()]
            if left:
                self.returned.append((block, left))
            else:
                self._free.append(block)
        kept = sum(block.nbytes for block in self._free)
        while kept > KEPT_NBYTES:
            block = self._free.pop(0)
            kept -= block.nbytes
            block.close()


def _rounded(nbytes: int) -> int:
    if nbytes <= _COARSE:
        return max(_PAGE, 1 << (nbytes - 1).bit_length())
    return -(-nbytes // _COARSE) * _COARSE


# --- copies ----------------------------------------------------------------------------------


class Copy(Operation):
    """A copy between a GPU and an image.

    Args:
        engine: under whose lock it becomes done; None: only `wait` will ask.
        lane: where it is under way; None: there is nothing to copy.
        mark: in the lane's stream, behind it.
        array: what must not be freed before its end.
    """

    __slots__ = ("_array", "_callbacks", "_lane", "engine", "mark")

    def __init__(
        self, engine: Engine | None, lane: Lane | None, mark: Mark | None, array: object
    ) -> None:
        super().__init__()
        self.engine = engine
        self.mark = mark
        self._lane = lane
        self._array = array
        self._callbacks: list[Callable[[Operation], None]] = []
        if mark is None:
            self.finish()

    def then(self, callback: Callable[[Operation], None]) -> None:
        """Call `callback(self)` when done; unlike other operations, several may ask."""
        self.watch()
        if self.done:
            callback(self)
        else:
            self._callbacks.append(callback)

    def watch(self) -> None:
        """See that it becomes done by itself: soon, or when a thread has seen its end."""
        if not self.done:
            self.look(SPIN_S)
        if not self.done:
            assert self._lane is not None
            self._lane.watch(self)

    def finish(self, error: BaseException | None = None) -> None:
        if self.done:
            return
        super().finish(error)
        self._array = None
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)

    def cancel(self) -> None:
        """Nobody wants to know its end any more; the GPU goes on."""
        self._callbacks = []

    def look(self, seconds: float = 0.0) -> None:
        """Find out whether it is done, for so long at most."""
        until = time.monotonic() + seconds
        try:
            while not self.done:
                if self.mark is None or self.mark.is_done():
                    self.finish()
                elif time.monotonic() >= until:
                    return
        except TransportError as exc:
            self.finish(exc)

    def is_over(self) -> bool:
        """Whether the GPU has ended it, in whatever way."""
        if not self.done and self.mark is not None and not _is_over(self.mark):
            return False
        self._array = None
        return True

    def settle(self) -> None:
        """Sleep until it has ended, in whatever way."""
        with contextlib.suppress(TransportError):
            self.wait()

    def wait(self) -> None:
        """Sleep until it is done.

        Raises:
            TransportError: it has failed.
        """
        self.look(SPIN_S)
        if not self.done and self.mark is not None:
            self.mark.wait()
            self._array = None  # to call it done is for who holds the engine's lock
        if self.error is not None:
            raise self.error


class Push(Operation):
    """A copy to the GPU that is not begun before others have ended, nor after it was given up.

    So a call that has failed writes nothing later.

    Args:
        others: what must have ended.
        begin: begins it.
        goes_on: by itself; else only `wait` does anything.
    """

    __slots__ = ("_begin", "_copy", "_left", "_lock", "_others")

    def __init__(self, others: Sequence[Copy], begin: Callable[[], Copy], goes_on: bool) -> None:
        super().__init__()
        self._others = others
        self._left = deque(others)
        self._begin: Callable[[], Copy] | None = begin
        self._copy: Copy | None = None
        self._lock = threading.Lock()
        if goes_on:
            self._go_on(None)

    def cancel(self) -> None:
        super().cancel()
        self._begin = None

    def settle(self) -> None:
        """Give it up if it has not begun; else sleep until it has ended."""
        self.cancel()
        if self._copy is not None:
            self._copy.settle()

    def wait(self) -> None:
        """Sleep until it is done.

        Raises:
            TransportError: it has failed.
        """
        for other in self._others:
            other.wait()
        self._start()
        if self._copy is not None:
            self._copy.wait()
        if self.error is not None:
            raise self.error

    def _start(self) -> None:
        with self._lock:  # who waits may come to it first
            begin, self._begin = self._begin, None  # it holds the stage, which holds this
            if begin is not None:
                self._copy = begin()

    def _go_on(self, ended: Operation | None) -> None:
        if self.done or (self._begin is None and self._copy is None):  # given up
            return
        if ended is not None and ended.error is not None:
            self.finish(ended.error)
        elif self._left:
            self._left.popleft().then(self._go_on)
        else:
            try:
                self._start()
            except Exception as exc:
                self.finish(exc)
            if self._copy is not None:
                self._copy.then(lambda copy: self.finish(copy.error))


class Lane:
    """A side stream, and a thread that sleeps until what was put into it is done.

    Attributes:
        stream: CUDA's name for it.
        last: behind all that was put into it.
        ready: what the last of that waits for, which others do.
    """

    def __init__(self, device: Device) -> None:
        self.stream = device.stream()
        self.last: Mark | None = None
        self.ready: Mark | None = None
        self._watched: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def watch(self, copy: Copy) -> None:
        """Have `copy` finish when it is done, under its engine's lock."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="pycoll-gpu", daemon=True)
            self._thread.start()
        self._watched.put(copy)

    def _work(self) -> None:
        while True:
            copy = self._watched.get()
            error: BaseException | None = None
            try:
                if copy.mark is not None:
                    copy.mark.wait()
            except TransportError as exc:
                error = exc
            if copy.engine is not None:
                with contextlib.suppress(Error):  # the rank has left the job
                    copy.engine.finish(copy, error)


class Lanes:
    """The side streams of a GPU in one direction."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lanes: list[Lane] = []
        self._turn = itertools.count()

    def pick(self) -> Lane:
        """Return one that has nothing to do, else one that copies and does not wait."""
        busy = []
        for lane in self._lanes:
            if lane.last is None or _is_over(lane.last):
                return lane
            if lane.ready is None or _is_over(lane.ready):
                busy.append(lane)
        if len(busy) < LANES and len(self._lanes) < MAX_LANES:
            self._lanes.append(Lane(self._device))
            return self._lanes[-1]
        usable = busy or self._lanes
        return usable[next(self._turn) % len(usable)]


class Side:
    """What staging keeps for one GPU.

    Attributes:
        device: the GPU.
        pulls, pushes: its side streams.
        meetings: streams which a library may have wait for what it has under way.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.pulls, self.pushes = Lanes(device), Lanes(device)
        self.meetings = Lanes(device)


class _Concluding(threading.local):
    """What a call leaves to be waited for when its result is made, in this thread."""

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self.copies: list[Copy | Push] | None = None


_concluding = _Concluding()


def conclude(engine: Engine, finish: Callable[[], Any]) -> tuple[Any, Sequence[Operation]]:
    """Return what `finish` does, and the copies that must be done before it may be seen."""
    _concluding.engine, _concluding.copies = engine, []
    try:
        return finish(), _concluding.copies
    finally:
        _concluding.engine = _concluding.copies = None


_pool = Pool()
_sides: dict[int, Side] = {}
_making = threading.Lock()


def side(device: Device) -> Side:
    """Return what staging keeps for a GPU."""
    with _making:
        if device.number not in _sides:
            _sides[device.number] = Side(device)
        return _sides[device.number]


def _is_over(mark: Mark) -> bool:
    """Whether the GPU has ended what was before a mark, in whatever way."""
    try:
        return mark.is_done()
    except TransportError:
        return True


# --- stages ----------------------------------------------------------------------------------


class Stage:
    """An array on a GPU, and its image.

    It lives as long as the image does: for whoever sees that, as bytes only, it can be found.

    Attributes:
        device: the GPU.
        pointer: address of the first element there.
        nbytes: of all elements.
        is_target: it is to be written: its image gets its values from elsewhere.
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
            dtype: of the image.
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
        self._pulled: list[tuple[int, int, Copy]] = []
        self._pushed: list[tuple[int, int, Copy | Push]] = []
        self._lane: Lane | None = None
        self._before: list[Copy] = []
        self._loan: weakref.ref[_Loan] | None = None
        self._address = 0

    def make_image(self) -> Array:
        """Return host memory for the elements, C-contiguous; they are in it when `pull` is done."""
        if not self.nbytes:
            return np.empty(self.place.shape, self.place.dtype)
        loan = _pool.take(self.nbytes)
        loan.stage = self
        self._loan = weakref.ref(loan)
        image = loan.image(self.place.dtype, self.place.shape)
        self._address = image.__array_interface__["data"][0]
        return image

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie one behind the other on the GPU."""
        return not self._dims

    def ready(self, engine: Engine | None) -> Copy:
        """Return an operation that is done when the array may be read, by whomever."""
        if self._ready is None or _is_over(self._ready):
            return Copy(engine, None, None, None)
        lane = side(self.device).pulls.pick()
        lane.last = lane.ready = self._ready
        return Copy(engine, lane, self._ready, self._array)

    def fill(self, engine: Engine, source: int, nbytes: int) -> Copy:
        """Have the front of the array, which is ready, filled from elsewhere on its GPU.

        Its image is passed over, and is not to be pushed any more.
        """
        lane = side(self.device).pushes.pick()
        self.device.copy_within(lane.stream, self.pointer, source, nbytes)
        copy = self._put(engine, lane)
        self._pushed.append((0, self.nbytes, copy))
        return copy

    def follow(self, other: Stage) -> None:
        """Push nothing before all of `other`, of the same memory, is pulled."""
        self._before.append(other.pull(None))

    def pull(self, engine: Engine | None, begin: int = 0, end: int | None = None) -> Copy:
        """Have bytes `begin` to `end` of the elements, in C order, copied to the image, once.

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

    def push(self, engine: Engine | None, begin: int = 0, end: int | None = None) -> Copy | Push:
        """Have bytes `begin` to `end` of the image copied to the GPU; they must not change."""
        end = self.nbytes if end is None else end
        others = [copy for copy in (self.ready(engine), *self._before) if not copy.is_over()]
        copy: Copy | Push
        if others:
            for other in others:
                other.engine = other.engine or engine
            # It keeps the image, which nobody else may any more.
            later = functools.partial(self._copy, engine, begin, end, False, self._kept())
            copy = Push(others, later, goes_on=engine is not None)
        else:
            copy = self._copy(engine, begin, end, to_host=False)
        self._pushed.append((begin, end, copy))
        return copy

    def flush(self) -> None:
        """Push what has not been; who concludes a call waits for it, else it is done here."""
        begin = 0
        for first, last, _ in sorted(self._pushed, key=lambda pushed: pushed[:2]):
            if begin < first:
                self.push(_concluding.engine, begin, first)
            begin = max(begin, last)
        if begin < self.nbytes:
            self.push(_concluding.engine, begin)
        late = [copy for _, _, copy in self._pushed if not copy.done or copy.error is not None]
        if _concluding.copies is not None:
            _concluding.copies += late
            return
        for copy in late:
            copy.wait()

    def offset(self, view: memoryview) -> int:
        """Return where bytes of the image begin in it."""
        address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
        return address - self._address

    def _kept(self) -> _Loan | None:
        return self._loan() if self._loan is not None else None

    def _copy(
        self,
        engine: Engine | None,
        begin: int,
        end: int,
        to_host: bool,
        loan: _Loan | None = None,
    ) -> Copy:
        if begin >= end:
            return Copy(engine, None, None, None)
        loan = loan or self._kept()
        assert loan is not None, "nobody has the image"
        loan.block.pin(self.device)
        lane = self._pick(to_host)
        rows = list(self._rows(begin, end))
        try:
            self.device.copy(lane.stream, rows, self.pointer, self._address, to_host)
            return self._put(engine, lane, loan)
        except TransportError:
            self.device.drain(lane.stream)  # of some of it, perhaps, nobody else would know
            raise

    def _pick(self, to_host: bool) -> Lane:
        """Return the lane for a copy; all that wait for the array to be ready share one."""
        own = side(self.device)
        if not to_host:
            return own.pushes.pick()
        if self._ready is None or _is_over(self._ready):
            return own.pulls.pick()
        if self._lane is None:
            self._lane = own.pulls.pick()
            self.device.follow(self._lane.stream, self._ready)
            self._lane.ready = self._ready
        return self._lane

    def _put(self, engine: Engine | None, lane: Lane, loan: _Loan | None = None) -> Copy:
        """Return the copy just put into a lane; nobody has the memory before it has ended."""
        lane.last = self.device.mark(lane.stream)
        copy = Copy(engine, lane, lane.last, self._array)
        loan = loan or self._kept()
        assert loan is not None, "nobody has the image"
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


class Memory:
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


def fetch(engine: Engine, device: Device, source: int, into: memoryview) -> Copy:
    """Have host memory filled from a GPU."""
    lane = side(device).pulls.pick()
    address: int = np.frombuffer(into, np.uint8).__array_interface__["data"][0]
    row = Rows(0, 0, len(into), 1, len(into), len(into))
    device.copy(lane.stream, [row], source, address, to_host=True)
    lane.last = device.mark(lane.stream)
    return Copy(engine, lane, lane.last, into)


def is_in_use() -> bool:
    """Whether this process has staged anything yet."""
    return bool(_sides)


def stage_of(view: memoryview) -> Stage | None:
    """Return the stage to whose image some bytes belong, if they belong to one."""
    owner: object = view.obj
    while isinstance(owner, np.ndarray):
        owner = owner.base
    return owner.stage if isinstance(owner, _Loan) else None


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
