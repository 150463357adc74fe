"""Ranks that leave: what they called last is compared, and whoever needs them hears why not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from script_jobs import all_well
from tiers import few

import pycoll
from pycoll._runtime.envelope import LastCall, different_last

Comm = Any

of_two = pytest.mark.parametrize("ranks", [2], indirect=True, scope="module")
on_every_transport = pytest.mark.parametrize("transport", few(["shm", "tcp"], ["zmq"]))

BEFORE = """
comm.barrier()  # the first call of a communicator in shared memory meets all ranks
pids = comm.all_gather(os.getpid())
"""


@pytest.mark.parametrize("first", few([1], [0]))
def test_roots_that_differ_in_the_last_call_are_found_by_who_leaves_later(
    job: Any, first: int
) -> None:
    done = job(
        2,
        BEFORE
        + f"""
import atexit
atexit.register(ok)  # exit handlers run all the same
first = {first}
if rank != first:
    await_end(pids[first])
comm.broadcast(np.full(3, rank), root=rank)
""",
        "--transport",
        "shm",
    )
    later = 1 - first
    assert (done.status, done.content) == (1, [0, 1])
    assert (
        "MismatchError: ranks made different calls as collective number 2 of world:\n"
        "    rank 0: broadcast(root=0)\n"
        "    rank 1: broadcast(root=1)\n"
    ) in done.stderr
    assert f"rank {later} failed after" in done.stderr
    assert "raised MismatchError at its end, exit status 0" in done.stderr
    assert "Pass the same root on all ranks" in done.stderr
    assert "world.py" not in done.stderr  # no frame of ours
    assert "Exception ignored" not in done.stderr


def test_a_call_of_several_parts_in_shared_memory_is_called_by_its_name(job: Any) -> None:
    done = job(
        3,
        BEFORE
        + """
if rank == 0:
    comm.scatterv([np.zeros(r) for r in range(3)])
else:
    await_end(pids[0])
    error = error_of(comm.barrier)
    assert isinstance(error, pycoll.MismatchError), repr(error)
    assert "rank 0: scatterv(root=0)" in str(error), str(error)
    ok()
""",
        "--transport",
        "shm",
    )
    assert done.content == [1, 2], done.stderr


def test_who_waits_in_shared_memory_is_told_of_the_message_of_a_rank_that_has_left(
    job: Any,
) -> None:
    done = job(
        2,
        """
if rank == 0:
    text = "rank 0: reduce.*algorithm=shared_memory.*rank 1: gather.object"
    error_like(pycoll.MismatchError, text, comm.reduce, 1)
    ok()
else:
    comm.gather(1)
""",
        "--transport",
        "shm",
    )
    assert done.content == [0], done.stderr


@pytest.mark.parametrize(
    ("whole", "kind", "text"),
    [
        ("uneven", "all_gather", "gatherv or all_gatherv"),
        ("uneven", "all_to_all", "all_to_allv"),
        ("uneven", "reduce_scatter", "reduce_scatterv"),
        ("many", "all_reduce", "all_reduce_many"),
        ("group", "all_gather", "dup, split or another call that makes communicators"),
        ("operator", "gather", "a reduction with an operator of the program's own"),
        ("", "gather", "gather(root=3, algorithm=shared_memory)"),
    ],
)
def test_a_signature_says_of_which_call_it_is_a_part(whole: str, kind: str, text: str) -> None:
    core = pytest.importorskip("pycoll._calls.shared_memory")
    part = core.part_of(whole, "the call, whose text does not count here") >> 32
    signature = part << 29 | 3 << 13 | 31 << 8 | core.KINDS.index(kind)
    assert core._call_text(signature, ()).replace("another dtype[], ", "") == text


def test_finalize_and_the_end_of_a_with_block_raise_it_once(job: Any) -> None:
    done = job(
        3,
        BEFORE
        + """
def leave():
    with comm:
        comm.broadcast(np.full(3, rank), root=min(rank, 1))

if rank == 0:
    leave()
elif rank == 1:
    await_end(pids[0])
    error_like(pycoll.MismatchError, "rank 0: .*root=0.*rank 1: .*root=1", leave)
else:
    await_end(pids[1])
    comm.broadcast(None, root=1)
    error_like(pycoll.MismatchError, "rank 0: .*root=0.*rank .: .*root=1", pycoll.finalize)
    pycoll.finalize()
ok()
""",
        "--transport",
        "shm",
    )
    assert (done.status, done.content) == (0, [0, 1, 2]), done.stderr


@of_two
@pytest.mark.parametrize("first", [0, 1], ids=["root", "other"])
def test_close_compares_the_last_calls(ranks: Any, first: int) -> None:
    def program(world: Comm, first: int) -> str:
        def call() -> None:
            with world.dup() as comm:
                comm.barrier()
                if world.rank != first:
                    world.recv(first)  # it has closed its communicator
                comm.broadcast(np.ones(3), root=world.rank)

        if world.rank == first:
            call()
            world.send(None, 1 - first)
            return ""
        with pytest.raises(pycoll.MismatchError) as caught:
            call()
        return str(caught.value)

    texts = ranks(program, first)
    later = 1 - first
    assert f"rank {later}: broadcast(root={later})\n" in texts[later]
    assert f"rank {first}: broadcast(root={first})\n" in texts[later]


@of_two
def test_an_exception_in_a_with_block_is_not_replaced(ranks: Any) -> None:
    def program(world: Comm) -> None:
        def call() -> None:
            with world.dup() as comm:
                comm.barrier()
                comm.broadcast(np.ones(3), root=world.rank)
                world.barrier()  # now both can see it
                raise KeyError

        with pytest.raises(KeyError):
            call()

    ranks(program)


@of_two
def test_what_a_rank_was_told_of_is_not_raised_again(ranks: Any) -> None:
    def program(world: Comm) -> None:
        with world.dup() as comm:
            with pytest.raises(pycoll.MismatchError):
                comm.all_reduce(np.ones(3 + world.rank))
            world.barrier()

    ranks(program)


@pytest.mark.parametrize("ranks", [3], indirect=True, scope="module")
@pytest.mark.parametrize(
    "call",
    [
        lambda comm: comm.recv(1),
        lambda comm: comm.irecv(1).wait(),
        lambda comm: comm.isend(np.ones(1_000_000), 1).wait(),
        lambda comm: pycoll.wait_any([comm.irecv(1), comm.irecv(2)]),
        lambda comm: pycoll.wait_all([comm.isend(np.ones(1_000_000), 1), comm.irecv(2)]),
    ],
    ids=["recv", "irecv", "isend", "wait_any", "wait_all"],
)
def test_what_a_message_has_told_is_not_raised_again(ranks: Any, call: Any) -> None:
    def program(world: Comm) -> None:
        with world.dup() as comm:
            left = comm.irecv(world.rank, tag=7), comm.isend(np.ones(1_000_000), world.rank, tag=8)
            with pytest.raises(pycoll.MismatchError):
                call(comm) if world.rank == 0 else comm.all_reduce(np.ones(3 + world.rank))
            world.barrier()
            assert len(left) == 2

    ranks(program)


def test_a_gather_of_different_roots_blames_no_innocent(job: Any) -> None:
    done = job(
        4,
        BEFORE
        + """
def call():
    comm.gather(np.ones(3), root=int(rank == 0))
    pycoll.finalize()

if rank == 0:
    call()
else:
    await_end(pids[0])
    error_like(pycoll.MismatchError, "rank 0: gather.*root=1.*rank .: gather.*root=0", call)
ok()
""",
        "--transport",
        "tcp",
    )
    assert (done.status, done.content) == (0, [0, 1, 2, 3]), done.stderr


@on_every_transport
def test_a_rank_that_has_left_without_a_call_is_said_to(job: Any, transport: str) -> None:
    done = job(
        3,
        """
comm.barrier()
if rank == 0:
    error = error_like(pycoll.PeerFailed, r"rank [12] is needed, but has left without calling "
        r"barrier\\(\\): (exit status 0|called finalize)$", comm.barrier)
    ok()
""",
        "--transport",
        transport,
    )
    assert (done.status, done.content) == (0, [0]), done.stderr


def test_a_rank_that_leaves_with_0_after_an_error_tells_it(job: Any) -> None:
    done = job(
        3,
        """
others = comm.sub([1, 2])
if rank == 2:
    error_like(pycoll.MismatchError, "", others.all_reduce, np.ones(4))
    ok()
elif rank == 1:
    error_like(pycoll.MismatchError, "", others.all_reduce, np.ones(3))
    ok()
else:
    error_like(pycoll.PeerFailed, "rank 2 is needed, but has .*: .*, after its first error: "
        r"MismatchError: .*all_reduce\\(float64\\[[34]\\]", comm.recv, 2)
    ok()
""",
    )
    assert (done.status, done.content) == (0, [0, 1, 2]), done.stderr


@on_every_transport
def test_the_last_call_is_told_though_many_before_it_ended_later(job: Any, transport: str) -> None:
    done = job(
        2,
        """
if rank == 0:
    comm.recv(1)
requests = [comm.iall_reduce(i) for i in range(20)]
requests.append(comm.igather(np.ones(2)))
if rank == 1:
    # What it sends is buffered: its share in the gather has ended before the sums.
    assert requests[-1].wait() is None
    comm.send("started", 0)
pycoll.wait_all(requests)
pycoll.finalize()
ok()
""",
        "--transport",
        transport,
    )
    all_well(done, 2)


@pytest.mark.parametrize(
    ("mine", "theirs", "shown"),
    [
        # Both have made 3 calls: one of them the last by messages, the other in shared memory.
        ((3, 0, "ring"), (3, 1, "tree"), ("barrier()", "tree()")),
        ((3, 1, "ring"), (3, 0, "tree"), ("ring()", "another collective")),
        ((3, 1, "ring"), (3, 1, "ring"), None),
        ((3, 1, "ring"), (3, 1, "tree"), ("ring()", "tree()")),
        ((3, 1, "ring"), (4, 2, "tree"), None),  # not made here, or not yet
    ],
)
def test_last_calls_differ_also_where_one_went_through_shared_memory(
    mine: tuple[int, int, str], theirs: tuple[int, int, str], shown: tuple[str, str] | None
) -> None:
    one, other = (LastCall(1, count, number, f"{call}()") for count, number, call in (mine, theirs))
    recent = {one.number: one.call.encode()}
    error = different_last("world", 0, one, recent, 1, other, "barrier()")
    assert (error is None) == (shown is None), error
    if shown is not None:
        assert f"rank 0: {shown[0]}\n" in str(error)
        assert f"rank 1: {shown[1]}\n" in str(error)
