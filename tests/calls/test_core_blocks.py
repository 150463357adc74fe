"""Collectives by messages on uneven blocks and on objects: in the core.

Ranks that take the way through Python say the same, so any rank may.
"""

from __future__ import annotations

import pytest
from core_counting import COUNTING
from pool_scripts import Scripts
from tiers import few

pytest.importorskip("pycoll._transports._core", exc_type=ImportError)

IN_CORE = ["shm", "tcp"]

CALLS = """
import sys

def calls_of(name):
    "The methods of a name that go by messages."
    yield lambda *args: getattr(comm, "i" + name)(*args).wait()
    if over_sockets:
        yield getattr(comm, name)

def blocks_of(length):
    "What this rank has for each rank, and what each rank has for this one."
    def block(sender, receiver):
        return np.full((length * (1 + sender), 2), 10.0 * sender + receiver)
    return [block(rank, each) for each in range(size)], [block(each, rank) for each in range(size)]

def objects_of(length):
    "The same of objects, of which some hold large arrays."
    def block(sender, receiver):
        return {"from": sender, "to": receiver, "text": "x" * length, "a": np.arange(length)}
    return [block(rank, each) for each in range(size)], [block(each, rank) for each in range(size)]

def same(got, want):
    np.testing.assert_equal(got, want)

def move_blocks(length, root):
    mine, for_me = blocks_of(length)
    gathered = [blocks[0] for blocks in map(lambda each: blocks_from(each, length), range(size))]
    for gatherv in calls_of("gatherv"):
        same(gatherv(mine[0], root), gathered if rank == root else None)
    for all_gatherv in calls_of("all_gatherv"):
        same(all_gatherv(mine[0]), gathered)
    for scatterv in calls_of("scatterv"):
        same(scatterv(mine if rank == root else None, root), for_me[root])
    for all_to_allv in calls_of("all_to_allv"):
        same(all_to_allv(mine), for_me)

def blocks_from(sender, length):
    return [np.full((length * (1 + sender), 2), 10.0 * sender + each) for each in range(size)]

def move_objects(length, root):
    mine, for_me = objects_of(length)
    gathered = [{**each, "to": 0} for each in for_me]
    for gather in calls_of("gather"):
        same(gather(mine[0], root), gathered if rank == root else None)
    for all_gather in calls_of("all_gather"):
        same(all_gather(mine[0]), gathered)
    for all_to_all in calls_of("all_to_all"):
        same(all_to_all(mine), for_me)
    for broadcast in calls_of("broadcast"):
        got = broadcast(mine[0] if rank == root else None, root)
        same(got, gathered[root])
        assert (got is mine[0]) == (rank == root)
    for scatter in calls_of("scatter"):
        same(scatter(mine if rank == root else None, root), for_me[root])
"""


@pytest.mark.parametrize("transport", IN_CORE)
def test_blocks_and_objects_go_without_python(scripts: Scripts, transport: str) -> None:
    text = f"""{CALLS}
over_sockets = {transport == "tcp"}
size = comm.size
ALLOWED = {{"__call__", "pycoll._arrays.objects", "_dump", "_load", "pycoll._arrays.conversion"}}
{COUNTING}
mine, something = [np.arange(3.0), np.ones((2, 2))], {{"a": 1, "b": [rank]}}
made = {{
    "gatherv": [mine[0]],
    "all_gatherv": [mine[0]],
    "scatterv": [mine if rank == 0 else None],
    "all_to_allv": [mine],
    "gather": [something],
    "all_gather": [something],
    "all_to_all": [[something, "text"]],
    "broadcast": [something if rank == 0 else None],
    "scatter": [[something, 7] if rank == 0 else None],
}}
for name, args in made.items():
    for method in calls_of(name):
        goes_without_python(lambda: method(*args))
large, thing = np.arange(3000.0), {{"a": np.arange(3000.0) + rank}}
for name, args in {{"all_gatherv": [large], "all_gather": [thing]}}.items():
    for method in calls_of(name):
        goes_without_python(lambda: method(*args))
for method in calls_of("all_gatherv"):
    goes_without_python(lambda: method(large, np.empty(6000)))
    goes_without_python(lambda: method(large if rank else large[:7], np.empty(3007)))
whole = np.empty(6)
made = {{
    "gatherv": [mine[0], 0, whole],
    "all_gatherv": [mine[0], whole],
    "all_to_allv": [[mine[0]] * 2, whole],
}}
for name, args in made.items():
    for method in calls_of(name):
        goes_without_python(lambda: method(*args))
for method in calls_of("scatterv"):
    goes_without_python(lambda: method([mine[0]] * 2 if rank == 0 else None, 0, whole[:3]))
places, far = [whole[:3], None], [None, np.empty(3000)]
made = {{
    "gatherv": [mine[0], 0, places],
    "all_gatherv": [mine[0], places],
    "all_to_allv": [[mine[0]] * 2, tuple(places)],
}}
for name, args in made.items():
    for method in calls_of(name):
        goes_without_python(lambda: method(*args))
for method in calls_of("all_gatherv"):
    goes_without_python(lambda: method(large, far))
ok()
"""
    scripts(2, text, transport)


@pytest.mark.parametrize("transport", few(IN_CORE, ["zmq"]))
def test_blocks_and_objects_of_every_length_arrive(scripts: Scripts, transport: str) -> None:
    """Around what travels at once, with some ranks above that and some below."""
    text = f"""{CALLS}
over_sockets = {transport != "shm"}
size = comm.size
for turn, length in enumerate((0, 1, 85, 86, 128, 255, 256, 257, 5000, 100_000)):
    move_blocks(length, turn % size)
for turn, length in enumerate((0, 1, 200, 440, 450, 1300, 1400, 5000, 100_000)):
    move_objects(length, turn % size)
ok()
"""
    scripts(3, text, transport)


@pytest.mark.parametrize("transport", IN_CORE)
def test_any_rank_may_go_through_python(scripts: Scripts, transport: str) -> None:
    text = f"""{CALLS}
over_sockets = {transport == "tcp"}
size, core = comm.size, comm
class Slow:
    "The methods of Python in place of the core's."
    def __getattr__(self, name):
        return getattr(pycoll.Communicator, name).__get__(core)
for slow in range(size):
    comm = Slow() if rank == slow else core
    for length in (1, 128, 400, 5000):
        move_blocks(length, slow)
        move_blocks(length, (slow + 1) % size)
        move_objects(length, slow)
        move_objects(length, (slow + 1) % size)
ok()
"""
    scripts(3, text, transport)


@pytest.mark.parametrize("transport", IN_CORE)
def test_an_object_is_pickled_once_however_long_it_is(scripts: Scripts, transport: str) -> None:
    text = """
comm.ibarrier().wait()  # the first call is perhaps Python's
pickled = []
class Thing:
    def __init__(self, length):
        self.text = "x" * length
    def __getstate__(self):
        pickled.append(self)
        return {"text": self.text}
for length in (10, 10_000, 100_000):
    thing = Thing(length)
    for turn in range(2):  # a plan is made of the first
        pickled.clear()
        results = [
            comm.ibroadcast(thing if rank == 0 else None),
            comm.igather(thing),
            comm.iall_gather(thing),
            comm.iall_to_all([thing, None]),
            comm.iscatter([thing, None] if rank == 0 else None),
        ]
        pycoll.wait_all(results)
    assert len(pickled) == (5 if rank == 0 else 3), (length, len(pickled))
ok()
"""
    scripts(2, text, transport)


@pytest.mark.parametrize("transport", IN_CORE)
def test_what_cannot_be_loaded_fails_where_it_is_received_and_breaks_nothing(
    scripts: Scripts, transport: str
) -> None:
    text = """
class Sour:
    def __init__(self, length=0):
        self.text = "x" * length
    def __setstate__(self, state):
        raise RuntimeError("not here")
for thing in (Sour(), Sour(100_000)):
    sent = thing if rank == 0 else "sweet"
    for start in (
        lambda: comm.igather(sent, 1),
        lambda: comm.iall_gather(sent),
        lambda: comm.iall_to_all([None, sent]),
        lambda: comm.ibroadcast(sent if rank == 0 else None),
        lambda: comm.iscatter(["sweet", sent] if rank == 0 else None),
    ):
        request = start()
        if rank == 0 and "all_gather" not in repr(request):  # which loads its own, too
            request.wait()
        else:
            error_like(RuntimeError, "not here", request.wait)
        comm.barrier()
assert comm.all_reduce(1) == 2
ok()
"""
    scripts(2, text, transport)


@pytest.mark.parametrize("transport", IN_CORE)
@pytest.mark.parametrize("length", [0, 100_000])
def test_loading_may_make_calls_of_its_own(scripts: Scripts, transport: str, length: int) -> None:
    text = """
from pycoll._requests.core_collectives import CoreCollective

other = comm.dup()
is_core = False
while not comm.all_reduce(is_core, "land"):  # Python is busy yet
    request = other.ibarrier()
    is_core = isinstance(request, CoreCollective)
    request.wait()

class Asks:
    def __init__(self):
        self.text = "x" * LENGTH
    def __setstate__(self, state):
        self.text, self.sum = state["text"], other.iall_reduce(rank + 1).wait()
sent = Asks()
for start in (
    lambda: comm.iall_gather(sent),
    lambda: comm.iall_to_all([sent] * size),
    lambda: comm.ibroadcast(sent if rank == 0 else None),
    lambda: comm.iscatter([sent] * size if rank == 0 else None),
):
    request = start()
    comm.barrier()
    got = request.wait()
    if "broadcast" in repr(request) and rank == 0:
        other.iall_reduce(rank + 1).wait()  # the root loads nothing
        assert got is sent
        continue
    for each in got if type(got) is list else [got]:
        assert (each.text, each.sum) == (sent.text, size * (size + 1) // 2)
ok()
"""
    scripts(2, text.replace("LENGTH", str(length)), transport)


@pytest.mark.parametrize("transport", IN_CORE)
def test_a_result_is_made_once_and_of_what_was_given(scripts: Scripts, transport: str) -> None:
    text = """
x, row, thing = np.arange(3.0) + rank, [np.ones(2), np.ones(3)], {"a": [rank]}
requests = [
    comm.iall_gatherv(x),
    comm.iall_to_allv(row),
    comm.iall_gather(thing),
    comm.iall_to_all([thing, thing]),
]
while not all(request.test() for request in requests):
    pass
x[:] = -1
row[rank][:] = -1
thing["a"].append("later")
first = [request.wait() for request in requests]
gathered, exchanged, objects, swapped = first
assert [each.tolist() for each in gathered] == [[0, 1, 2], [1, 2, 3]]
assert [each.tolist() for each in exchanged] == [[1] * (2 + rank)] * 2
assert objects == swapped == [{"a": [0]}, {"a": [1]}]
assert all(request.wait() is result for request, result in zip(requests, first))
assert not np.shares_memory(gathered[rank], x)
gathered[1 - rank][:] = 0  # it is writable
ok()
"""
    scripts(2, text, transport)


@pytest.mark.parametrize("transport", IN_CORE)
def test_what_does_not_fit_into_out_is_said_after_the_call(
    scripts: Scripts, transport: str
) -> None:
    text = """
x = np.full(2 + rank, 1.0 * rank)
for length in (5, 4, 6):
    whole = np.full(length, -1.0)
    request = comm.iall_gatherv(x, whole)
    while not request.test():
        pass
    if length == 5:  # it is there as soon as the call is done
        assert whole.tolist() == [0, 0, 1, 1, 1]
        first, second = request.wait()
        assert first.base is second.base is whole and second.tolist() == [1, 1, 1]
    else:
        error_like(ValueError, "rows", request.wait)
    mine = np.empty(3 if length == 5 else 4)
    row, place = ([np.ones(3)] * 2, None) if rank == 0 else (None, mine)
    request = comm.iscatterv(row, 0, place)
    if rank == 0 or length == 5:
        assert request.wait().tolist() == [1, 1, 1]
    else:
        error_like(ValueError, "out", request.wait)
for places in ([], [None], [None] * 3, [np.empty(2), x], [np.empty(3), np.empty(2)], [x, "no"]):
    error_of(comm.iall_gatherv, x, places)  # nothing was sent
    error_of(comm.iscatterv, [x] * 2 if rank == 0 else None, 0, places)
for far in (False, True):
    length = 9000 if far else 3
    places = [None, np.empty(length)] if rank else [np.empty(length), np.empty(length - 1)]
    for call in (comm.iall_gatherv, lambda x, out: comm.iall_to_allv([x] * 2, out)):
        request = call(np.full(length, 1.0 * rank), places)
        if rank == 0:
            error_like(ValueError, "out.1. is float64", request.wait)
        else:
            got = request.wait()
            assert got[1] is places[1] and (got[1] == 1).all() and (got[0] == 0).all()
for few, who in ((3, 0), (3, 1), (900, 0), (900, 1), (900, 2)):
    for more in (-1, 0, 1):  # some come in the second round, to `out` or not
        more *= who in (2, rank)
        whole = np.full((1000 + few + more, 2), -1.0)
        request = comm.iall_gatherv(np.full((1000 if rank else few, 2), 7.0), whole)
        if more == 0:
            assert [len(part) for part in request.wait()] == [few, 1000] and (whole == 7).all()
        else:
            error_like(ValueError, "rows", request.wait)
large = np.ones((70_000, 2)) * rank
both = np.empty((140_000, 2))
for call in (comm.iall_gatherv, comm.igatherv):
    got = call(large, out=both).wait()
    if got is not None:
        assert both[:70_000].sum() == 0 and both[70_000:].sum() == 140_000
        both.fill(-1)
comm.barrier()
ok()
"""
    scripts(2, text, transport)


@pytest.mark.parametrize("transport", IN_CORE)
def test_ranks_that_move_different_things_hear_of_it(scripts: Scripts, transport: str) -> None:
    text = """
for mine, other in (
    (lambda c: c.igatherv(np.ones(2)), lambda c: c.igatherv(np.ones(2, int))),
    (lambda c: c.iall_gather({"a": 1}), lambda c: c.iall_gather(np.ones(2))),
    (lambda c: c.iall_to_all([1, 2]), lambda c: c.iall_to_allv([np.ones(1)] * 2)),
):
    c = comm.dup()
    request = (mine if rank == 0 else other)(c)
    error = error_of(lambda: (request.wait(10), c.barrier(timeout=10)))
    assert type(error) is pycoll.MismatchError, repr(error)
ok()
"""
    scripts(2, text, transport)


@pytest.mark.parametrize("transport", IN_CORE)
def test_what_was_given_up_frees_its_blocks(scripts: Scripts, transport: str) -> None:
    text = """
import gc, weakref
x = np.ones(200_000)
seen = weakref.ref(x)
c = comm.dup()
small = np.ones(1)
pycoll.wait_all([c.iall_gatherv(small), c.iall_gather({"x": small}), c.igatherv(small, 1)])
if rank == 0:
    requests = [c.iall_gatherv(x), c.iall_gather({"x": x}), c.igatherv(x, 1)]
    assert not requests[0].test()
    c.close()
    assert all(type(error_of(request.wait)) is pycoll.Error for request in requests)
    del requests, x
    comm.barrier()
    gc.collect()  # errors have tracebacks
    assert seen() is None
else:
    comm.barrier()
ok()
"""
    scripts(2, text, transport)


@pytest.mark.parametrize("transport", ["tcp", "zmq"])
def test_what_a_call_sends_is_kept_for_as_long_as_a_link_may_look_at_it(
    scripts: Scripts, transport: str
) -> None:
    text = """
import gc
comm.barrier()
value = [np.full(2000, rank) for _ in range(200)]  # more than a link takes at once
if rank == 1:
    request = comm.igather(value, 0)
    items = [x[0] for x in gc.get_objects() if type(x) is list and len(x) == 1]
    assert any(type(x) in (list, tuple) and x and type(x[0]) is memoryview for x in items)
    comm.send(None, 0)
else:
    comm.recv(1)  # the request waits for this rank
    request = comm.igather(value, 0)
got = request.wait()
assert rank == 1 or (got[1][199] == 1).all()
ok()
"""
    scripts(2, text, transport)


def test_an_array_that_may_not_be_written_to_any_more_is_said(scripts: Scripts) -> None:
    text = """
x, out = np.ones(2000), np.zeros(4001)  # which does not fit, so Python looks at it
comm.barrier()
comm.all_gatherv(np.ones(2))
try:
    if rank == 0:
        request = comm.iall_gatherv(x, out=out)
        out.flags.writeable = False
        comm.send(None, 1)
    else:
        comm.recv(0)
        request = comm.iall_gatherv(x)
    request.wait()
    comm.barrier()
except ValueError as exc:
    assert rank == 0 and "read-only" in str(exc), exc
    ok()
except pycoll.PeerFailed as exc:
    assert rank == 1 and "read-only" in str(exc), exc
    ok()
"""
    scripts(2, text)
