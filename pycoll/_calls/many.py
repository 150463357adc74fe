"""all_reduce of many arrays in few messages: small ones of one dtype travel together, in a bucket.

A bucket is memory of its own, in which arrays lie one after the other; their results are views
into it. A large array is a bucket alone, and is not copied. All buckets are under way at once.

Of a short list, whose arrays share one bucket, the core makes that itself, by the plan of an
earlier call that was alike (`_core/python/collectives/many.c`): to the other ranks it is the same.
"""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from pycoll._arrays import conversion, operators, user_operators
from pycoll._arrays.operators import Op, reduction
from pycoll._arrays.value import Value
from pycoll._calls import folding, packings, wide_averages
from pycoll._calls.arguments import Target
from pycoll._calls.call_plan import CallPlan, Route, route_of
from pycoll._calls.collectives import bind, bind_pieces, piece_ends
from pycoll._calls.group import Bound, Group, Numbered
from pycoll._calls.message_steps import pulled
from pycoll._calls.number_plans import GatheredInts
from pycoll._calls.preparing import forced_text
from pycoll._calls.shared_memory import ShmComm, part_of
from pycoll._calls.shared_memory_calls import move, serves
from pycoll._cuda.late_copies import LateCopies
from pycoll._dtypes import INT64, Array, DType
from pycoll._runtime.binding import Combine, CoreReduction
from pycoll._runtime.engine import Engine
from pycoll._runtime.task import CallSteps
from pycoll._selection.select import Choice
from pycoll._support.wording import a_kind
from pycoll._transports._core import KINDS, OPS

if TYPE_CHECKING:
    from pycoll._arrays.types import Reducer

BUCKET_NBYTES = 4 << 20
"""A bucket of several arrays has at most so many bytes."""

ALONE_NBYTES = 512 << 10
"""An array of so many bytes gains nothing in a bucket.

On a machine with 2 cores, in ms, arrays alone, and in buckets of 1 MiB and of 4 MiB:

    arrays               500 of 4 KiB      64 of 64 KiB      16 of 256 KiB
    zmq, 2 ranks         32   4.0  3.9     10.9  4.9  4.9    5.1   4.9  5.4
    zmq, 4 ranks         87   8.2  7.2     31    12   8.2    15    12   9.5
    messages in shared
    memory, 2 ranks      24   2.9  2.5     7.2   2.9  2.7    1.8   2.8  2.6
    4 ranks              51   5.1  5.7     17    5.0  3.9    9.5   4.9  4.4
"""

ALONE_IN_SHM_NBYTES = 128 << 10
"""The same in shared memory, where a call costs less than a copy sooner.

    2 ranks              4.3  2.8  2.7     2.2   2.8  2.7    1.7   3.0  2.5
    4 ranks              7.0  2.5  2.3     3.9   1.7  1.6    1.5   1.4  1.7
"""

MAX_BUCKETS = 1 << 16
"""Each, and all ints, is a subcall of the call, which is a 16-bit number in a message."""

LIKE = Value(np.zeros((), np.int64), INT64, "int")
"""Stands for an int: what an `out` for one must look like."""

ALL_REDUCE, BARRIER = KINDS.index("all_reduce"), KINDS.index("barrier")


class Bucket:
    """Arrays of one dtype that are reduced together.

    Attributes:
        members: the arrays.
        dtype: of all.
        kind: of the first.
        source: their elements, C-contiguous.
        target: memory for the results; may be `source`.
        results: what makes the arrays reduced, when the call is done: they are views into `target`
            but those for which there is an `out`, or which are on a GPU.
        late: members that are on a GPU: `load` copies them to `source`, `unload` from `target`.
    """

    def __init__(self, members: Sequence[Value], outs: Sequence[Target | None]) -> None:
        first = members[0]
        self.dtype: DType = first.dtype
        self.kind = first.kind
        self.late: list[Value] = []
        self._loads: list[Array] = []
        self._unloads: list[tuple[Array, Target]] = []
        self.members = members
        if len(members) == 1:
            target = outs[0] or Target(None, first, first.array.shape)
            self.source, self.target = conversion.operand(first.array), target.memory
            self.results: list[Callable[[LateCopies], Any]] = [target.result]
            return
        flat = [member.array.reshape(-1) for member in members]
        self.source = self.target = np.concatenate(flat)
        self._ends = list(accumulate(map(len, flat), initial=0))
        self.results = []
        for (a, b), member, out in zip(pairwise(self._ends), members, outs, strict=True):
            place = self.target[a:b].reshape(member.array.shape)
            if member.stage is not None:
                self.late.append(member)
                self._loads.append(place)
            if member.stage is None and out is None:
                value = Value(place, member.dtype, member.kind)
                self.results.append(partial(conversion.unwrap, value))
                continue
            target = out or Target(None, member, member.array.shape)
            if target.value.stage is not None:
                self._unloads.append((place, target))
                self.results.append(target.result)
            else:  # not sooner: it may be memory that another bucket still reads
                self.results.append(partial(_filled, target, place))

    def load(self) -> None:
        """Take the members that were on a GPU, and are in host memory now."""
        for member, place in zip(self.late, self._loads, strict=True):
            place[...] = member.array

    def unload(self, engine: Engine) -> None:
        """Have what belongs on a GPU go there; `unwrap` waits for it."""
        for place, target in self._unloads:
            target.memory[...] = place
            assert target.value.stage is not None
            target.value.stage.push(engine)

    def reduction(self, op: Op, size: int) -> Combine | CoreReduction:
        """Return the reduction of byte views; array by array if `op` is not elementwise."""
        members = self.members
        if op.elementwise or len(members) == 1:
            return reduction(op, members[0], members[0].array.shape, size)
        itemsize = self.dtype.itemsize
        parts = [
            (slice(a * itemsize, b * itemsize), reduction(op, member, member.array.shape, size))
            for (a, b), member in zip(pairwise(self._ends), members, strict=True)
            if a < b
        ]

        def combine(left: memoryview, right: memoryview, out: memoryview) -> None:
            for part, combine_one in parts:
                assert callable(combine_one), "the core's operators are elementwise"
                combine_one(left[part], right[part], out[part])

        return combine


def _choose(group: Group, op: Op, nbytes: int, forced: str | None, shm: bool) -> Choice:
    rank_order, whole = not op.commutative, not op.elementwise
    return group.choose("all_reduce", nbytes, forced, rank_order, whole, shm)


def _arrays_of(ints: GatheredInts, size: int) -> tuple[Value, Array]:
    """Return this rank's ints and where all ranks' come to, as arrays."""
    mine = np.frombuffer(ints.mine, np.int64).reshape(-1, 2)
    rows = np.frombuffer(ints.rows, np.int64).reshape(size, *mine.shape)
    return Value(mine, INT64, "numpy"), rows


def _filled(target: Target, place: Array, late: LateCopies) -> Any:
    target.memory[...] = place
    return target.result(late)


def prepare_all_reduce_many(
    group: Group, xs: Any, op: Reducer, out: Any, algorithm: str | None, blocking: bool
) -> ManyPlan:
    """Combine all ranks' arrays, each with its like; the results, a list, are on every rank.

    Args:
        group: of the communicator.
        xs: list or tuple of arrays or numbers, the same dtypes and shapes on all ranks.
        op: as in `reduce`; a function that is not elementwise gets one array at a time.
        out: for each array one for its result, or None; None: all results are new.
        algorithm: one of all_reduce's.
        blocking: the call may go through shared memory.

    Raises:
        TypeError: `xs` or `out` is no list, or `xs` has an item that `op` does not take.
        ValueError: `algorithm` does not exist, or cannot serve; `xs` is too long, or `out` does not
            fit.
    """
    if not isinstance(xs, list | tuple):
        raise TypeError(f"all_reduce_many takes a list of arrays, not {a_kind(xs)}. {_listed(xs)}")
    resolved = operators.resolve(op)
    values = [_operand(place, x) for place, x in enumerate(xs)]
    dtypes = {value.dtype.name: value for value in values}
    for value in values if callable(resolved.fn) else dtypes.values():
        operators.check_operand(resolved, value, value.array.ndim)
    outs = _targets(out, values)
    shm = blocking and all(serves(resolved, value.dtype) for value in dtypes.values())
    route = route_of(group, _choose(group, resolved, 0, algorithm, shm))
    in_shared_memory = route is Route.SHARED_MEMORY
    alone_nbytes = ALONE_IN_SHM_NBYTES if in_shared_memory else ALONE_NBYTES
    if callable(resolved.fn) and (in_shared_memory or resolved.elementwise):
        alone_nbytes = 0  # a function gets all that is combined, or pieces: as one kind
    arrays = [place for place, value in enumerate(values) if value is not LIKE]
    buckets, results = _fill(
        [values[place] for place in arrays], [outs[place] for place in arrays], alone_nbytes
    )
    if len(buckets) >= MAX_BUCKETS:
        raise ValueError(
            f"{len(values)} arrays, in {len(buckets)} messages, are too many for one call. "
            f"Pass at most {MAX_BUCKETS - 1} large arrays at a time."
        )
    total = sum(value.array.nbytes for value in values)
    alike = zlib.crc32(repr([_shown(value) for value in values]).encode())
    counted = f"{len(values)} array{'s' if len(values) != 1 else ''}"
    text = (
        f"{'' if blocking else 'i'}all_reduce_many({counted}, {total} bytes, "
        f"checksum {alike:08x}, op={resolved.signature}{forced_text(algorithm)})"
    )
    ints = None
    if len(arrays) < len(values):
        fold = None
        if callable(resolved.fn):
            call = partial(user_operators.call, resolved.fn, resolved.name)
            fold = partial(functools.reduce, call)
        mine = [x for x in xs if packings.is_int(x)]
        ints = GatheredInts(mine, resolved.name, group.size, fold)
        arrived, count = iter(results), itertools.count()
        results = [
            partial(ints.result, text, next(count), out) if value is LIKE else next(arrived)
            for value, out in zip(values, outs, strict=True)
        ]

    how = resolved, algorithm, values, buckets, results, ints
    return ManyPlan(group, text, route, *how)


class ManyPlan(CallPlan[list[Any]]):
    """An all_reduce of many arrays.

    Args:
        group, text, route: as of `CallPlan`.
        op: what combines.
        algorithm: what the caller has named, or None.
        values: the arrays; `LIKE` stands for an int.
        buckets: those that are no ints.
        results: what makes the results, in their order.
        ints: the ints; None: there are none.
    """

    def __init__(
        self,
        group: Group,
        text: str,
        route: Route,
        op: Op,
        algorithm: str | None,
        values: Sequence[Value],
        buckets: Sequence[Bucket],
        results: Sequence[Callable[[LateCopies], Any]],
        ints: GatheredInts | None,
    ) -> None:
        super().__init__(group, text, route=route, reads=values)
        self._op, self._algorithm = op, algorithm
        self._buckets, self._results, self._ints = buckets, results, ints

    @property
    def salt(self) -> int:
        """What its parts in shared memory are signed with."""
        return part_of("many", self.text)

    @property
    def is_one(self) -> bool:
        """Whether it is one all_reduce, of a bucket."""
        return len(self._buckets) == 1 and self._ints is None

    def part(self, call: Numbered) -> CallSteps:
        """Run it by messages."""
        how = self._buckets, self._op, self._algorithm, self._ints
        return _over_messages(self.group, call, *how)

    def bind(self) -> Bound | None:
        """Return the schedule and memory of its bucket, if that is all."""
        if not self.is_one or wide_averages.applies(self._op, self._buckets[0].dtype):
            return None
        return _bound(self.group, self._buckets[0], self._op, self._algorithm)[0]

    def in_shared_memory(self, shm: ShmComm) -> None:
        """Run it in shared memory."""
        _through_core(shm, self.salt, self._buckets, self._op)
        if self._ints is not None:
            move(shm, "all_gather", *_arrays_of(self._ints, shm.size))

    def result(self, got: Any, late: LateCopies) -> list[Any]:
        """Return the results."""
        if self._ints is not None:
            self._ints.check(self.text)
        return [made(late) for made in self._results]


def _shown(value: Value) -> tuple[str, tuple[int, ...]]:
    """Return what must be the same on all ranks."""
    return "int" if value is LIKE else value.dtype.name, value.array.shape


def _listed(xs: Any) -> str:
    """Return what to write where `xs` is no list."""
    if isinstance(xs, Mapping):
        return "Write list(xs.values())."
    if isinstance(xs, Iterable) and not hasattr(xs, "shape"):
        return "Write list(xs)."
    return "For one array use all_reduce."


def _operand(place: int, x: Any) -> Value:
    if x is None:
        raise TypeError(
            f"item {place} is None: a parameter without a gradient? Leave it out, or pass zeros; "
            "the same on all ranks."
        )
    if packings.is_int(x):
        return LIKE
    try:
        return conversion.wrap_operand(x)
    except TypeError as exc:
        raise TypeError(f"item {place}: {exc}") from None


def _targets(out: Any, values: Sequence[Value]) -> list[Target | None]:
    """Check the arrays for the results."""
    if out is None:
        return [None] * len(values)
    if not isinstance(out, list | tuple):
        raise TypeError(f"out is a list of arrays, not {a_kind(out)}")
    if len(out) != len(values):
        raise ValueError(f"out has {len(out)} items, xs has {len(values)}")
    targets: list[Target | None] = []
    for item, value in zip(out, values, strict=True):
        target = Target(item, value, value.array.shape) if item is not None else None
        if target is not None:
            target.check_overlap(value, (target.value.place, value.place))
        targets.append(target)
    return targets


def _check_apart(place: int, target: Target | None, values: Mapping[int, Value]) -> None:
    """Refuse an `out` that is written while it is still read as another of `xs`."""
    if target is None:
        return
    for other, value in values.items():
        if other != place and conversion.overlap(target.value.place, value.place):
            raise ValueError(f"out[{place}] overlaps xs[{other}]. Pass arrays of their own.")


def _fill(
    values: Sequence[Value], outs: Sequence[Target | None], alone_nbytes: int
) -> tuple[list[Bucket], list[Callable[[LateCopies], Any]]]:
    """Put values into buckets; return these, and what makes the results, in their order."""
    places: list[list[int]] = []
    filling: dict[str, tuple[list[int], int]] = {}  # by dtype: what has room, and its bytes
    for place, value in enumerate(values):
        nbytes, name = value.array.nbytes, value.dtype.name
        if nbytes >= alone_nbytes:
            places.append([place])
            continue
        bucket, filled = filling.get(name, ([], BUCKET_NBYTES + 1))
        if filled + nbytes > BUCKET_NBYTES:
            bucket, filled = [], 0
            places.append(bucket)
        bucket.append(place)
        filling[name] = bucket, filled + nbytes
    buckets = []
    results: dict[int, Callable[[LateCopies], Any]] = {}
    alone = {bucket[0]: values[bucket[0]] for bucket in places if len(bucket) == 1}
    for bucket in places:
        if len(bucket) == 1:
            _check_apart(bucket[0], outs[bucket[0]], alone)
        buckets.append(Bucket([values[i] for i in bucket], [outs[i] for i in bucket]))
        results.update(zip(bucket, buckets[-1].results, strict=True))
    return buckets, [results[place] for place in range(len(values))]


def _bound(group: Group, bucket: Bucket, op: Op, algorithm: str | None) -> tuple[Bound, Array]:
    """Return the schedule of a bucket, with its memory, and the array that gets the result."""
    source, target = bucket.source, bucket.target
    # In one segment: the buckets overlap each other already.
    how = "all_reduce", Choice(_choose(group, op, source.nbytes, algorithm, shm=False).name)
    combine = bucket.reduction(op, group.size)
    if wide_averages.applies(op, bucket.dtype):
        wide = wide_averages.memory(source.shape)
        source = target = wide.array
        combine = reduction(op, wide, source.shape, group.size)
    binding = bind_pieces(group, how, combine, source, target)
    ends = piece_ends(source.size, source.itemsize, len(binding.nbytes))
    places = [(end - begin, begin, begin) for begin, end in pairwise(ends)]
    return Bound(how, binding, places=places), target


def _over_messages(
    group: Group,
    call: Numbered,
    buckets: Sequence[Bucket],
    op: Op,
    algorithm: str | None,
    ints: GatheredInts | None,
) -> CallSteps:
    runs, totals = [], []
    for subcall, bucket in enumerate(buckets):
        bound, total = _bound(group, bucket, op, algorithm)
        totals.append(total)
        runs.append(group.operation(call, subcall, bound.how, bound.binding))
    gathering = []
    if ints is not None:
        chosen = group.choose("all_gather", len(ints.mine), None, shm=False)
        bound = bind(group, "all_gather", Choice(chosen.name), *_arrays_of(ints, group.size))
        where = bound.how, bound.binding, bound.granule
        gathering = [group.operation(call, len(buckets), *where)]
        gathering[0].start()
    for bucket in buckets:
        for member in bucket.late:
            assert member.stage is not None
            member.stage.pull(group.engine).watch()  # all at once
    try:
        for run, bucket, total in zip(runs, buckets, totals, strict=True):
            is_wide = total is not bucket.target
            yield from pulled(group, *(bucket.members if is_wide else bucket.late))
            bucket.load()
            if is_wide:
                wide_averages.widen(bucket.dtype, bucket.source, total)
            run.start()
        for run, bucket, total in zip(runs, buckets, totals, strict=True):
            yield run
            if total is not bucket.target:
                wide_averages.narrow(bucket.dtype, total, bucket.target)
            bucket.unload(group.engine)
        yield from gathering
    except BaseException:
        for run in (*runs, *gathering):
            run.cancel()
        raise


def _through_core(shm: ShmComm, salt: int, buckets: Sequence[Bucket], op: Op) -> None:
    core = shm.core
    for bucket in buckets:
        bucket.load()
    if not buckets or not serves(op, buckets[0].dtype):
        core.run(BARRIER, 0, 0, 0, (), salt, None, None, 0)
        for bucket in buckets:
            value = Value(bucket.source, bucket.dtype, bucket.kind)
            folding.combine(shm, "all_reduce", value, bucket.target, op)
            bucket.unload(shm.engine)
        return
    code = OPS.index(op.name)
    for bucket in buckets:
        source, target = conversion.as_bytes(bucket.source), conversion.as_bytes(bucket.target)
        nbytes, dtype = len(source), bucket.dtype.code
        core.run(ALL_REDUCE, dtype, code, 0, (nbytes,), salt, source, target, nbytes)
        bucket.unload(shm.engine)
