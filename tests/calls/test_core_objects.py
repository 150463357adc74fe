"""Collectives of pickled objects in shared memory, which the compiled core runs."""

from __future__ import annotations

import pytest
from pool_scripts import Scripts
from tiers import few

pytest.importorskip("pycoll._transports._core", exc_type=ImportError)

CALLS = """
def calls(root, mine):
    lists = [mine] * size if rank == root else None
    return [
        lambda: comm.broadcast(mine if rank == root else None, root),
        lambda: comm.gather(mine, root),
        lambda: comm.all_gather(mine),
        lambda: comm.all_to_all([mine] * size),
        lambda: comm.scatter(lists, root),
    ]
"""


def test_objects_make_no_plan_of_a_call(scripts: Scripts) -> None:
    text = """
import sys
seen = set()
def note(frame, event, arg):
    seen.add(frame.f_code.co_filename)

comm.barrier()
for call in calls(1, {"rank": rank, "text": "x" * 100}):
    for _ in range(100):  # a wait of more than a moment is Python's
        seen.clear()
        sys.setprofile(note)
        call()
        sys.setprofile(None)
        in_core = not any("/pycoll/_calls/" in name for name in seen)
        if comm.all_reduce(in_core, "land"):
            break
    assert in_core, seen
ok()
"""
    scripts(3, CALLS + text)


@pytest.mark.parametrize("n", few([2, 3], [5]))
@pytest.mark.parametrize("single_copy", ["1", "0"])
def test_ranks_take_either_way_with_objects_of_all_lengths(
    scripts: Scripts, n: int, single_copy: str
) -> None:
    text = """
import random
numbers, own = random.Random(5), random.Random(rank)

def thing(seed):
    numbers = random.Random(seed)
    count = numbers.choice([0, 1, 100, 1800, 1900, 1990, 2100, 5000, 70_000])
    match numbers.randrange(4):
        case 0: return "x" * count
        case 1: return {"seed": seed, "array": np.full(count // 8, seed)}
        case 2: return [seed] * (count // 8)
        case _: return seed, bytes(count)

def same(got, seed):
    expected = thing(seed)
    if isinstance(expected, dict):
        expected, got = ([*x.items()][0] + (x["array"].tobytes(),) for x in (expected, got))
    assert got == expected

def as_python_takes_it(root):
    return np.int64(root) if own.random() < 0.3 else root

for step in range(150):
    root, seeds = numbers.randrange(size), [numbers.randrange(10**6) for _ in range(size)]
    which, given = numbers.randrange(7), as_python_takes_it(root)
    if which == 0:
        got = comm.broadcast(thing(seeds[root]) if rank == root else None, given)
        same(got, seeds[root])
    elif which == 1:
        got = comm.gather(thing(seeds[rank]), given)
        assert (got is None) == (rank != root)
        for value, seed in zip(got or (), seeds):
            same(value, seed)
    elif which == 2:
        how = {"algorithm": "shared_memory"} if own.random() < 0.3 else {}
        for value, seed in zip(comm.all_gather(thing(seeds[rank]), **how), seeds, strict=True):
            same(value, seed)
    elif which == 3:
        got = comm.all_to_all([(rank, thing(seed)) for seed in seeds])
        assert [source for source, _ in got] == list(range(size))
        for _, value in got:
            same(value, seeds[rank])
    elif which == 4:
        same(comm.scatter([thing(seed) for seed in seeds] if rank == root else None, given),
             seeds[rank])
    elif which == 5:
        got = comm.broadcast(np.full(seeds[0] % 5000, root) if rank == root else None, given)
        assert len(got) == seeds[0] % 5000 and (got == root).all()
    else:
        assert comm.all_reduce(np.array([rank + 1]))[0] == size * (size + 1) // 2
ok()
"""
    scripts(n, text, **({} if single_copy == "1" else {"PYCOLL_SINGLE_COPY": single_copy}))


def test_an_object_that_cannot_be_loaded_breaks_nothing(scripts: Scripts) -> None:
    text = """
def fail():
    raise ZeroDivisionError("while it is loaded")

class Bad:
    def __reduce__(self):
        return fail, ()

comm.barrier()
for root in (1, np.int64(1)):  # by the core, and by Python
    for call in calls(root, Bad()):
        try:
            call()
        except ZeroDivisionError:
            pass
assert comm.all_reduce(1) == size
ok()
"""
    scripts(3, CALLS + text)


def test_pickling_may_make_calls_of_its_own(scripts: Scripts) -> None:
    text = """
class Asking:
    def __init__(self, number=None):
        self.number = number
    def __reduce__(self):
        return Asking, (comm.all_reduce(1),)

comm.barrier()
assert [x.number for x in comm.all_gather(Asking())] == [size] * size
got = comm.gather(Asking(), 1)
assert rank != 1 or [x.number for x in got] == [size] * size
ok()
"""
    scripts(3, text)


def test_pickling_may_close_the_communicator(scripts: Scripts) -> None:
    text = """
class Closing:
    def __reduce__(self):
        other.close()
        return Closing, ()

for call in ("all_gather(Closing())", "broadcast(Closing())", "scatter([Closing()] * size)"):
    other = comm.dup()
    other.barrier()
    try:
        eval("other." + call if rank == 0 or "all" in call else "other.close()")
        assert "all" not in call and rank > 0, call
    except pycoll.Error as exc:
        assert "closed" in str(exc), exc
ok()
"""
    scripts(2, text)


def test_calls_on_objects_count_once(scripts: Scripts) -> None:
    text = """
comm.barrier()
before = comm._group.number
for call in calls(1, {"long": "x" * 9000}):
    call()
assert comm._group.number == before + 5
ok()
"""
    scripts(2, CALLS + text)


MISMATCHES = [
    ("gather({})", "gather(np.ones(3))", "gather", "gather(float64[3], root=0"),
    ("gather({})", "gather({}, 1)", "gather(object, root=0", "root=1"),
    ("gather({})", "all_gather({})", "gather(object, root=0", "all_gather(object"),
    ("all_gather({})", "all_gatherv(np.ones(3))", "all_gather(object", "all_gatherv(float64"),
    ("all_gather({})", "all_reduce([], lambda a, b: a)", "all_gather(object", "all_reduce(object"),
    (
        "all_to_all([{}, {}])",
        "all_to_all(np.ones(2))",
        "all_to_all(object",
        "all_to_all(float64[2]",
    ),
]


@pytest.mark.parametrize(("one", "other", "first", "second"), MISMATCHES)
def test_other_calls_of_other_ranks_are_a_mismatch(
    scripts: Scripts, one: str, other: str, first: str, second: str
) -> None:
    text = f"""
comm.barrier()
try:
    if rank == 0:
        comm.{one}
    else:
        comm.{other}
    comm.barrier()
except pycoll.MismatchError as exc:
    shown = str(exc).splitlines()
    assert any(line.lstrip().startswith("rank 0: ") and {first!r} in line for line in shown), shown
    assert any(line.lstrip().startswith("rank 1: ") and {second!r} in line for line in shown), shown
    ok()
"""
    scripts(2, text)


def test_ranks_that_wait_long_by_either_way_are_in_the_same_call(scripts: Scripts) -> None:
    text = """
import time
comm.barrier()
for call in calls(1, {"rank": rank}) + [lambda: comm.gather([], 1), lambda: comm.all_gather([])]:
    if rank == 2:  # the others tell the launcher meanwhile what they wait for
        time.sleep(0.5)
    call()
for call in calls(np.int64(1), {}) if rank == 0 else calls(1, {}):
    if rank == 2:
        time.sleep(0.5)
    call()
ok()
"""
    scripts(3, CALLS + text)
