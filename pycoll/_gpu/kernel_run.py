"""A reduction of arrays on GPUs that never leave them: ranks read the others' by CUDA IPC.

    prepare           before anything is sent: whether this rank could, what it tells the others
    Reduction.steps   the call: what it waits for, and what it tells all ranks

On one GPU the processes take turns, and each turn takes longer than a kernel. So if all arrays are
on one GPU one rank does all: it reads the arrays of all, and writes all results. A rank that gives
up shuts its gate first (`gate`): nothing is written to its memory later.

On several GPUs each rank writes its own result. In one phase it reads the arrays of all (`reduce`,
`reduce_scatter`, short arrays). Long ones take two: each rank reduces a part into its result, then
copies the parts of the others. That moves less, and an `out` which is `x` needs it: the part that a
rank writes nobody else reads. No kernel waits for another rank; hosts do.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Final, NamedTuple

from pycoll._cuda.copies import GpuCopy, OperationOwner
from pycoll._cuda.cuda import Device
from pycoll._cuda.programs import CompiledKernel
from pycoll._cuda.staging import Stage
from pycoll._dtypes import DType
from pycoll._gpu import gate, kernels, peer_memory
from pycoll._gpu.gate import Pass
from pycoll._gpu.peer_memory import Mapping
from pycoll.errors import TransportError

TWO_PHASES_NBYTES: Final = 8 << 20
"""On several GPUs an all_reduce of so many bytes takes two phases: an estimate."""

SPIN_S: Final = 1e-3
"""A kernel is looked at for so long before a thread sleeps until its end: most are done."""

_TAKES_PART, _IS_IN_PLACE = 1, 2
_GRANULE: Final = 128
"""Bytes of which parts are multiples."""

DONE, GIVEN_UP, CANNOT = 1, 2, 0
"""How a reduction ends: it is done; it must be staged, this time; or always."""

Steps = Generator[GpuCopy | bytes, list[bytes], int]
"""Yields what it waits for, or what it tells all ranks, and gets what they tell; returns how it
ended, the same on all ranks."""


class Told(NamedTuple):
    """What a rank tells of its arrays.

    Attributes:
        flags: whether it takes part, and in place.
        uuid: of the GPU.
        gate: lets another rank write the result.
        x, result: how others reach them.
    """

    flags: int
    uuid: bytes
    gate: bytes
    x: bytes
    result: bytes

    def pack(self) -> bytes:
        """Return the bytes that `read` takes."""
        return _RECORD.pack(*self)


_RECORD: Final = struct.Struct(f"<B16s{gate.NBYTES}s{peer_memory.NBYTES}s{peer_memory.NBYTES}s")


class _Task(NamedTuple):
    """What one kernel does: addresses of its results and of its operands, and bytes of each."""

    results: Sequence[int]
    operands: Sequence[int]
    nbytes: int


class Reduction:
    """One call, on this rank.

    Args:
        place: (rank, size).
        collective: `all_reduce`, `reduce` or `reduce_scatter`.
        root: the root of a `reduce`.
        kind: (operator, dtype).
        x: this rank's array.
        result: where its result goes; None: it has none.
        described: both, as the others reach them.
    """

    def __init__(
        self,
        place: tuple[int, int],
        collective: str,
        root: int,
        kind: tuple[str, DType],
        x: Stage,
        result: Stage | None,
        described: tuple[bytes, bytes],
    ) -> None:
        self._rank, self._size = place
        self._collective = collective
        self._leader = root if collective == "reduce" else 0
        self._kind = kind
        self._x, self._result = x, result
        self._described = described
        self._mappings: list[Mapping] = []
        self._xs: list[int] = []
        self._results: list[int] = []

    def steps(self, engine: OperationOwner) -> Steps:
        """Run it; under `engine`'s lock, or where nothing else waits for copies."""
        is_told = False
        try:
            yield from self._before(engine)
            mine = self._record()
            is_told = True
            answers = yield mine.pack()
            records = [Told(*_RECORD.unpack(data)) for data in answers]
            if not all([record.flags for record in records]):
                return GIVEN_UP
            if len({record.uuid for record in records}) == 1:
                ended = yield from self._by_leader(engine, records)
            else:
                ended = yield from self._by_all(engine, records)
            if ended == DONE and self._result is not None:
                self._result.keep(0, self._result.nbytes)
            return ended
        except BaseException:
            if is_told:
                gate.shut()
            raise
        finally:
            mappings, self._mappings = self._mappings, []
            for mapping in mappings:
                peer_memory.mappings.leave(mapping)

    def _before(self, engine: OperationOwner) -> list[GpuCopy]:
        """Return what must be done before x may be read, and a result be written."""
        result = self._result
        return [self._x.ready(engine), *(result.hindrances(engine) if result is not None else ())]

    def _record(self) -> Told:
        in_place = self._result is not None and self._result.pointer == self._x.pointer
        flags = _TAKES_PART | _IS_IN_PLACE * (in_place and self._collective == "all_reduce")
        return Told(flags, self._x.device.uuid, gate.give().pack(), *self._described)

    # --- on one GPU ------------------------------------------------------------------------

    def _by_leader(self, engine: OperationOwner, records: Sequence[Told]) -> Steps:
        """Have one rank write all results."""
        mine = CANNOT
        if self._rank == self._leader:
            with gate.held(self._passes(records)) as is_open:
                if not is_open:
                    mine = GIVEN_UP
                elif self._open(records, with_results=self._collective != "reduce"):
                    copy = self._start(engine, self._all_results(records))
                    try:
                        yield copy
                    except BaseException:
                        copy.settle()
                        raise
                    mine = DONE
        answers = yield bytes([mine])
        return answers[self._leader][0]

    def _passes(self, records: Sequence[Told]) -> list[Pass]:
        if self._collective == "reduce":
            return []
        others = [record for rank, record in enumerate(records) if rank != self._rank]
        return [gate.read(record.gate) for record in others]

    def _all_results(self, records: Sequence[Told]) -> list[_Task]:
        assert self._result is not None, "the leader has a result"
        nbytes = self._result.nbytes
        if self._collective == "reduce":
            return [_Task([self._result.pointer], self._xs, nbytes)]
        if self._collective == "all_reduce":
            return [_Task(self._results, self._xs, nbytes)]
        return [
            _Task([result], [x + rank * nbytes for x in self._xs], nbytes)
            for rank, result in enumerate(self._results)
        ]

    # --- on several GPUs -------------------------------------------------------------------

    def _by_all(self, engine: OperationOwner, records: Sequence[Told]) -> Steps:
        """Have each rank write its own result."""
        in_place = any([record.flags & _IS_IN_PLACE for record in records])
        is_long = self._x.nbytes >= TWO_PHASES_NBYTES
        in_two = self._collective == "all_reduce" and (in_place or is_long)
        opened = self._open(records, with_results=in_two) and self._program(1) is not None
        answers = yield bytes([opened])
        if not all([data[0] for data in answers]):
            return CANNOT
        for phase in range(2 if in_two else 1):
            copy = self._phase(engine, phase, in_two)
            if copy is not None:
                try:
                    yield copy
                except BaseException:
                    copy.settle()
                    raise
            yield b"\0"
        return DONE

    def _phase(self, engine: OperationOwner, phase: int, in_two: bool) -> GpuCopy | None:
        result = self._result
        if result is None:
            return None
        if phase:
            return result.work(engine, self._copying(result))
        begin, end = self._part(self._rank) if in_two else (0, result.nbytes)
        offset = self._rank * result.nbytes if self._collective == "reduce_scatter" else begin
        operands = [x + offset for x in self._xs]
        return self._start(engine, [_Task([result.pointer + begin], operands, end - begin)])

    def _copying(self, result: Stage) -> Callable[[int], None]:
        def enqueue(stream: int) -> None:
            for step in range(1, self._size):
                rank = (self._rank + step) % self._size
                begin, end = self._part(rank)
                if begin < end:
                    to, source = result.pointer + begin, self._results[rank] + begin
                    result.device.copy_within(stream, to, source, end - begin)

        return enqueue

    def _part(self, rank: int) -> tuple[int, int]:
        """Return where the part of a rank begins and ends, in bytes."""
        nbytes = self._x.nbytes
        granules = -(-nbytes // _GRANULE)
        ends = [granules * number // self._size * _GRANULE for number in (rank, rank + 1)]
        return min(ends[0], nbytes), min(ends[1], nbytes)

    # --- on any ----------------------------------------------------------------------------

    def _open(self, records: Sequence[Told], with_results: bool) -> bool:
        """Open the others' arrays, by rank; whether that went well."""
        try:
            for rank, record in enumerate(records):
                self._xs.append(self._address(rank, record.x, self._x))
                if with_results:
                    self._results.append(self._address(rank, record.result, self._result))
        except TransportError:
            return False
        return True

    def _address(self, rank: int, data: bytes, own: Stage | None) -> int:
        if rank == self._rank:
            return own.pointer if own is not None else 0
        described = peer_memory.read(data)
        mapping = peer_memory.mappings.use(self._x.device, described)
        self._mappings.append(mapping)
        return mapping.base + described.offset

    def _program(self, num_results: int) -> CompiledKernel | None:
        return _program(self._x.device, *self._kind, self._size, num_results)

    def _start(self, engine: OperationOwner, tasks: Sequence[_Task]) -> GpuCopy:
        """Start kernels, one after the other, that write to this rank's result, too."""
        assert self._result is not None
        program = self._program(len(tasks[0].results))
        assert program is not None, "it was compiled before"

        def enqueue(stream: int) -> None:
            for task in tasks:
                if task.nbytes:
                    self._launch(program, stream, task)

        copy = self._result.work(engine, enqueue)
        copy.look(SPIN_S)
        return copy

    def _launch(self, kernel: CompiledKernel, stream: int, task: _Task) -> None:
        addresses = (*task.results, *task.operands)
        is_packed = all([address % 16 == 0 for address in addresses])
        count = task.nbytes // self._kind[1].itemsize
        arguments = (
            (ctypes.c_void_p * len(task.results))(*task.results),
            (ctypes.c_void_p * self._size)(*task.operands),
            ctypes.c_uint64(count),
            ctypes.c_int(self._size),
            ctypes.c_int(is_packed),
        )
        kernel.launch(stream, -(-task.nbytes // 16) if is_packed else count, arguments)


def prepare(
    place: tuple[int, int],
    collective: str,
    root: int,
    kind: tuple[str, DType],
    x: Stage,
    result: Stage | None,
) -> Reduction | None:
    """Return a call's reduction on the GPU; None: this rank's arrays must be staged.

    Args:
        place: (rank, size).
        collective: `all_reduce`, `reduce` or `reduce_scatter`.
        root: the root of a `reduce`.
        kind: (operator, dtype), those of a kernel.
        x: this rank's array.
        result: where its result goes; None: it has none.
    """
    stages = [x] if result is None else [x, result]
    if any([not stage.is_contiguous or stage.device is not x.device for stage in stages]):
        return None
    if any([stage.is_read_first or stage.pointer % _alignment(kind[1]) for stage in stages]):
        return None
    found = [peer_memory.describe(stage.device, stage.pointer) for stage in stages]
    described = [one.pack() for one in found if one is not None]
    if len(described) < len(stages):
        return None
    num_results = place[1] if collective == "all_reduce" else 1
    if _program(x.device, *kind, place[1], num_results) is None:
        return None
    packed = described[0], described[1] if result is not None else bytes(peer_memory.NBYTES)
    return Reduction(place, collective, root, kind, x, result, packed)


def _alignment(dtype: DType) -> int:
    return dtype.itemsize // 2 if dtype.family == "c" else dtype.itemsize


_programs: dict[tuple[int, str, str, int, int], CompiledKernel | None] = {}
_compiling = threading.Lock()
_why_not: dict[int, str] = {}


def _program(
    device: Device, op: str, dtype: DType, ranks: int, results: int
) -> CompiledKernel | None:
    key = device.number, op, dtype.name, ranks, results
    with _compiling:
        if device.number in _why_not:
            return None
        if key not in _programs:
            try:
                text = kernels.source(op, dtype, ranks, results)
                _programs[key] = CompiledKernel(device, text, kernels.NAME)
            except TransportError as exc:  # it is not tried for every call
                _programs[key] = None
                _why_not[device.number] = str(exc)
        return _programs[key]


def why_not(device: Device) -> str | None:
    """Return why this process reduces nothing on a GPU: its first attempt has failed; or None."""
    return _why_not.get(device.number)
