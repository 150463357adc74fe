"""Registered memory: found again while it lives, and never longer."""

from __future__ import annotations

import array
import errno
import gc
import mmap
import os
import random
import sys
import threading
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from tiers import smoke

from pycoll._transports import registrations
from pycoll._transports.registrations import MOST_ENTRIES, WHOLE, WHOLE_SHARE, Lease, Registrations
from pycoll._transports.verbs_errors import VerbsError

MIB = 1 << 20


class Refusal(Exception):
    error_code = errno.ENOMEM


class Region:
    """A region of `Memory`."""

    numbers = 0

    def __init__(self, memory: Memory, address: int, nbytes: int, writable: bool) -> None:
        Region.numbers += 1
        self.local_key, self.remote_key = Region.numbers, -Region.numbers
        self.memory, self.address, self.nbytes, self.writable = memory, address, nbytes, writable
        memory.regions.add(self)

    def close(self) -> None:
        self.memory.regions.discard(self)


class Memory:
    """What a device has registered, and how much it takes."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.made = self.refused = 0
        self.regions: set[Region] = set()

    @property
    def nbytes(self) -> int:
        return sum(region.nbytes for region in list(self.regions))

    def register(self, address: int, nbytes: int, writable: bool) -> Region:
        if self.limit is not None and self.nbytes + nbytes > self.limit:
            self.refused += 1
            raise VerbsError(f"cannot register {nbytes} bytes", Refusal())
        self.made += 1
        return Region(self, address, nbytes, writable)


@pytest.fixture
def memory() -> Memory:
    return Memory()


def kept(memory: Memory, most: int = 1 << 40) -> Registrations:
    return Registrations(memory.register, most)  # type: ignore[arg-type]


def address_of(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def use(entries: Registrations, view: memoryview, into: bool = True) -> Lease:
    """Lease memory and check that what was registered has it."""
    lease = entries.lease(view, into)
    region = lease._region
    assert isinstance(region, Region)
    assert region in region.memory.regions
    assert (lease.local_key, lease.remote_key) == (region.local_key, region.remote_key)
    assert lease.address == address_of(view)
    assert region.address <= lease.address
    assert lease.address + len(view) <= region.address + region.nbytes
    assert region.writable or not into
    return lease


def test_thousands_of_arrays_leave_nothing_behind(memory: Memory) -> None:
    entries = kept(memory)
    for number in range(5000):
        made = np.empty(1 + number % 1000 * 100, np.uint8)
        use(entries, made.data).close()
        assert len(entries) == len(memory.regions) == 1
        del made
    assert len(entries) == 0
    assert not memory.regions
    assert memory.made == 5000


@smoke
def test_an_array_is_registered_once_whatever_of_it_travels(memory: Memory) -> None:
    entries, whole = kept(memory), np.zeros((100, 1000))
    views = [whole, whole[3:7], whole.reshape(-1)[5:17], whole[10:].view(np.int32), whole[5]]
    leases = [use(entries, memoryview(view).cast("B")) for view in views]
    assert memory.made == 1
    assert len(entries) == 1
    assert entries.nbytes == whole.nbytes
    for lease in leases:
        lease.close()
    del views, leases, lease
    assert len(entries) == 1
    del whole
    assert len(entries) == len(memory.regions) == 0


def test_a_view_keeps_its_array_and_its_registration(memory: Memory) -> None:
    entries, whole = kept(memory), np.zeros(1000, np.uint8)
    part = whole[100:200]
    use(entries, whole.data).close()
    del whole
    use(entries, part.data).close()
    assert memory.made == 1
    del part
    assert not memory.regions


def test_a_lease_keeps_the_memory(memory: Memory) -> None:
    entries, made = kept(memory), np.zeros(1000, np.uint8)
    lease = use(entries, made.data)
    del made
    gc.collect()
    assert len(memory.regions) == 1
    lease.close()
    lease.close()  # a second time does nothing
    assert not memory.regions


def test_an_array_in_a_cycle_is_taken_back_when_that_is_collected(memory: Memory) -> None:
    entries = kept(memory)
    cycle: list[object] = [np.zeros(1000, np.uint8)]
    cycle.append(cycle)
    use(entries, cycle[0].data).close()  # type: ignore[attr-defined]
    del cycle
    gc.collect()
    assert not memory.regions


def test_an_array_may_be_collected_while_the_entries_are_gone_through(memory: Memory) -> None:
    entries = kept(memory)
    stay = [np.zeros(1000, np.uint8) for _ in range(50)]
    for each in stay:
        use(entries, each.data).close()
    before = gc.get_threshold()
    for _ in range(20):
        cycle: list[object] = [np.zeros(1000, np.uint8)]
        cycle.append(cycle)
        use(entries, cycle[0].data).close()  # type: ignore[attr-defined]
        gc.set_threshold(1)
        try:
            del cycle
            assert entries.nbytes >= 50 * 1000  # makes tuples, each of which may collect
        finally:
            gc.set_threshold(*before)
    gc.collect()
    assert len(entries) == 50


def test_numpy_does_not_let_an_array_move_while_it_is_registered(memory: Memory) -> None:
    entries, made = kept(memory), np.zeros(1000, np.uint8)
    use(entries, made.data).close()
    with pytest.raises(ValueError, match="cannot resize"):
        made.resize(10_000_000, refcheck=False)
    entries.close()
    made.resize(10_000_000, refcheck=False)


@pytest.mark.parametrize("nbytes", [10, 10_000_000])
def test_an_array_with_other_memory_is_registered_anew(memory: Memory, nbytes: int) -> None:
    entries, made = kept(memory), np.zeros(100_000, np.uint8)
    use(entries, made.data).close()
    made.__setstate__((1, (nbytes,), made.dtype, False, bytes(nbytes)))  # type: ignore[attr-defined]
    use(entries, made.data).close()
    assert len(entries) == len(memory.regions) == 1
    del made
    assert not memory.regions


def test_another_array_with_the_same_id_is_another(memory: Memory) -> None:
    entries, ids, reused = kept(memory), set[int](), 0
    for number in range(300):
        made = np.zeros(1000 + 64 * number, np.uint8)
        reused += id(made) in ids
        ids.add(id(made))
        use(entries, made.data).close()
        del made
    assert reused  # or this test shows nothing
    assert memory.made == 300
    assert not memory.regions


def test_a_small_piece_of_a_huge_array_is_registered_alone(memory: Memory) -> None:
    entries, huge = kept(memory), np.empty(WHOLE + MIB, np.uint8)
    piece = (WHOLE + MIB) // WHOLE_SHARE
    lease = use(entries, huge[5 : 5 + piece - 1].data)
    assert memory.nbytes == piece - 1
    lease.close()
    assert not memory.regions
    use(entries, huge[5 : 5 + piece].data).close()
    assert memory.nbytes == huge.nbytes


def test_more_than_half_of_what_may_be_kept_is_registered_for_one_message(memory: Memory) -> None:
    entries = kept(memory, most=2 * MIB)
    large, half = np.zeros(MIB + 1, np.uint8), np.zeros(MIB, np.uint8)
    use(entries, large.data).close()
    assert not memory.regions
    use(entries, half.data).close()
    assert len(memory.regions) == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: bytearray(1000),
        lambda: array.array("d", bytes(1000)),
        lambda: mmap.mmap(-1, 1000),
        lambda: np.frombuffer(bytearray(1000), np.uint8),
        lambda: np.frombuffer(mmap.mmap(-1, 1000), np.uint8)[3:],
    ],
    ids=["bytearray", "array.array", "mmap", "array over bytearray", "array over mmap"],
)
def test_memory_that_numpy_has_not_allocated_is_registered_for_one_message(
    memory: Memory, make: Callable[[], object]
) -> None:
    entries, thing = kept(memory), make()
    for number in range(3):
        lease = use(entries, memoryview(thing).cast("B"))  # type: ignore[call-overload]
        assert memory.made == number + 1
        lease.close()
        assert not memory.regions
    assert len(entries) == 0


def test_what_is_only_read_need_not_be_writable(memory: Memory) -> None:
    entries = kept(memory)
    lease = use(entries, memoryview(bytes(1000)), into=False)
    (region,) = memory.regions
    assert not region.writable
    lease.close()
    # An array is, nevertheless: it may be written to the next time, and untouched pages be shared.
    constant = np.zeros(1000, np.uint8)
    constant.flags.writeable = False
    use(entries, constant.data, into=False).close()
    (region,) = memory.regions
    assert region.writable


def test_what_was_used_longest_ago_makes_room(memory: Memory) -> None:
    entries = kept(memory, most=10 * MIB)
    arrays = [np.zeros(MIB, np.uint8) for _ in range(10)]
    for made in arrays:
        use(entries, made.data).close()
    use(entries, arrays[0].data).close()
    in_use = use(entries, arrays[1].data)
    more = [np.zeros(MIB, np.uint8) for _ in range(3)]
    for made in more:
        use(entries, made.data).close()
    assert entries.nbytes == memory.nbytes == 10 * MIB
    there = {region.address for region in memory.regions}
    expected = [arrays[0], arrays[1], *arrays[5:], *more]
    assert there == {made.ctypes.data for made in expected}
    in_use.close()


def test_there_are_never_too_many_entries(memory: Memory) -> None:
    entries = kept(memory)
    arrays = [np.zeros(8, np.uint8) for _ in range(MOST_ENTRIES + 10)]
    for made in arrays:
        use(entries, made.data).close()
        assert len(entries) <= MOST_ENTRIES
    assert len(memory.regions) == MOST_ENTRIES
    arrays.clear()
    del made
    assert not memory.regions


def test_when_the_device_takes_no_more_there_is_made_room() -> None:
    memory = Memory(limit=4 * MIB)
    entries = kept(memory)
    arrays = [np.zeros(MIB, np.uint8) for _ in range(4)]
    for made in arrays:
        use(entries, made.data).close()
    in_use = use(entries, arrays[2].data)
    larger = bytearray(2 * MIB)
    lease = use(entries, memoryview(larger))
    assert memory.refused == 1
    assert in_use._region in memory.regions
    with pytest.raises(VerbsError) as told:
        entries.lease(memoryview(bytearray(2 * MIB)), True)
    assert told.value.code == errno.ENOMEM
    assert in_use._region in memory.regions
    lease.close()
    in_use.close()
    use(entries, memoryview(larger)).close()


def test_another_error_takes_nothing_back(memory: Memory) -> None:
    made = np.zeros(100, np.uint8)
    error = VerbsError("no", OSError("no"))

    def register(address: int, nbytes: int, writable: bool) -> Region:
        if nbytes == 7:
            raise error
        return memory.register(address, nbytes, writable)

    entries = Registrations(register, MIB)  # type: ignore[arg-type]
    use(entries, made.data).close()
    with pytest.raises(VerbsError) as told:
        entries.lease(memoryview(bytearray(7)), True)
    assert told.value is error
    assert len(memory.regions) == 1


def test_close_takes_all_back(memory: Memory) -> None:
    entries = kept(memory)
    arrays = [np.zeros(100, np.uint8) for _ in range(5)]
    for made in arrays:
        use(entries, made.data).close()
    entries.close()
    assert not memory.regions
    arrays.clear()  # and now nothing happens
    assert len(entries) == 0


def test_threads_may_drop_arrays_while_others_lease(request: pytest.FixtureRequest) -> None:
    request.addfinalizer(partial(sys.setswitchinterval, sys.getswitchinterval()))
    sys.setswitchinterval(1e-5)
    memory = Memory()
    entries = kept(memory, most=4 * MIB)
    shelf: list[np.ndarray | None] = [None] * 32
    ending = threading.Event()
    failures: list[BaseException] = []

    def drop(seed: int) -> None:
        chance = random.Random(seed)
        while not ending.is_set():
            shelf[chance.randrange(len(shelf))] = None

    def lease() -> None:  # by one at a time: the owner's lock
        chance = random.Random(0)
        held: list[Lease] = []
        for _ in range(6000):
            place = chance.randrange(len(shelf))
            made = shelf[place]
            if made is None:
                made = shelf[place] = np.empty(chance.randrange(1, MIB // 4), np.uint8)
            held.append(use(entries, made.data))
            del made
            if len(held) > 6:
                held.pop(chance.randrange(len(held))).close()
        for one in held:
            one.close()

    def guarded(body: Callable[..., None], *args: int) -> None:
        try:
            body(*args)
        except BaseException as exc:
            failures.append(exc)
            raise

    droppers = [threading.Thread(target=guarded, args=(drop, seed)) for seed in range(2)]
    for thread in droppers:
        thread.start()
    try:
        guarded(lease)
    finally:
        ending.set()
        for thread in droppers:
            thread.join()
    assert not failures
    shelf.clear()
    assert len(entries) == 0
    assert not memory.regions


def test_a_fork_that_drops_arrays_leaves_the_parents_alone(memory: Memory) -> None:
    entries, arrays = kept(memory), [np.zeros(1000, np.uint8) for _ in range(3)]
    leases = [use(entries, made.data) for made in arrays]
    child = os.fork()
    if child == 0:
        status = 1
        try:
            for lease in leases:
                lease.close()
            leases.clear()
            arrays.clear()
            del lease
            status = len(memory.regions)
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(entries) == len(memory.regions) == 3
    for made in arrays:
        use(entries, made.data).close()
    assert memory.made == 3


def test_what_may_be_kept_is_no_more_than_half_of_what_may_be_locked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registrations, "locked_limit", lambda: 8 * MIB)
    assert registrations.default_limit() == 4 * MIB
    monkeypatch.setattr(registrations, "locked_limit", lambda: None)
    assert registrations.default_limit() > 4 * MIB
