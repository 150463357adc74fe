"""revoke, agree and shrink where nobody has failed; failures are in launcher/test_survive.py."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from pool_scripts import Scripts
from tiers import alone, few, sizes

import pycoll

Comm = Any


@pytest.mark.parametrize("transport", few(["shm", "tcp"], ["zmq"]))
def test_revoke_ends_pending_and_later_calls_on_all_ranks(scripts: Scripts, transport: str) -> None:
    scripts(
        4,
        """
one, other, twin = comm.dup(name="one"), comm.dup(), comm.dup()
text = "rank 1 has revoked one: no rank can use it any more"
ended = []

def ends(call, *args):
    error = error_like(pycoll.Revoked, text, call, *args)
    assert error.rank == 1
    ended.append(call)

request = one.irecv(1, tag=7)
if rank == 1:
    for peer in (0, 2, 3):  # each waits, or is about to
        other.recv(peer)
    await_table((0, "barrier"), (2, "recv"))
    one.revoke()
    one.revoke()
else:
    other.send("waits next", 1)
    ends({0: one.barrier, 2: one.recv, 3: request.wait}[rank], *([1] if rank == 2 else []))
ends(request.wait)
for call, *args in (one.barrier,), (one.send, 1, 0), (one.iall_reduce, 1), (one.dup,):
    ends(call, *args)
assert other.all_reduce(1) == 4
assert one.agree(rank != 2) is False
assert one.agree(True) is True
new = one.shrink()
assert (new.rank, new.size, new.name) == (rank, 4, "dup of one")
assert new.all_gather(rank) == [0, 1, 2, 3]
assert twin.barrier() is None
ok()
""",
        transport,
    )


def agreement_needs_every_rank_and_is_on_one_communicator(comm: Comm) -> None:
    flags = [True, *(rank % 3 > 0 for rank in range(comm.size)), False]
    agreed = [comm.agree(flag if comm.rank == index else True) for index, flag in enumerate(flags)]
    wanted = [flag or index >= comm.size for index, flag in enumerate(flags)]
    assert agreed == wanted
    assert comm.agree(1) is True
    assert comm.agree(0) is False


def shrunk_ones_keep_the_order_of_ranks(comm: Comm) -> None:
    order = comm.split(0, -comm.rank)
    made = order.shrink(name="turned round")
    again = order.shrink()
    assert made.name == "turned round"
    assert made.members == again.members == order.members == tuple(range(comm.size))[::-1]
    made.send(1, made.rank)
    assert again.iprobe() is None
    assert made.recv() == 1


def threads_agree_on_communicators_of_their_own(comm: Comm) -> None:
    copies = [comm.dup() for _ in range(3)]
    found: list[bool] = []
    threads = [
        threading.Thread(target=lambda c=c: found.append(c.agree(True)))  # type: ignore[misc]
        for c in (copies if comm.rank % 2 else copies[::-1])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 3


PROGRAMS = [
    agreement_needs_every_rank_and_is_on_one_communicator,
    shrunk_ones_keep_the_order_of_ranks,
    threads_agree_on_communicators_of_their_own,
]


@sizes(1, 3)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_on_ranks_that_live(ranks: Any, program: Any) -> None:
    ranks(program)


def test_different_calls_and_deadlines_are_told(scripts: Scripts) -> None:
    scripts(
        2,
        """
one = comm.dup(name="one")
call, args = (one.agree, [True]) if rank else (one.shrink, [])
for _ in range(2):
    error = error_like(pycoll.MismatchError, "different calls on one", call, *args)
    lines = [line.strip().partition(" at ")[0] for line in str(error).splitlines()]
    assert lines[1:3] == ["rank 0: shrink()", "rank 1: agree()"], lines
if rank == 0:
    error = error_like(pycoll.OperationTimeout, r"agree\\(\\) on one", one.agree, True, timeout=0.3)
    comm.send(1, 1)
else:
    comm.recv(0)
    assert one.agree(False) is False  # what rank 0 has given counts
assert one.barrier() is None
one.close()
for call, *args in (one.agree, True), (one.shrink,), (one.revoke,):
    error_like(pycoll.Error, "this communicator is closed", call, *args)
ok()
""",
    )


@alone
def test_flags_are_bools(ranks: Any) -> None:
    ranks(_flags_are_bools)


def _flags_are_bools(comm: Comm) -> None:
    for flag in ("yes", None, [True]):
        with pytest.raises(TypeError, match="flag is a bool, not "):
            comm.agree(flag)
    with pytest.raises(TypeError, match="name of a communicator is a str"):
        comm.shrink(name=3)
    with pytest.raises(ValueError, match="timeout"):
        comm.agree(True, timeout=-1)


def test_alone_without_a_launcher_all_agree() -> None:
    comm = pycoll.init()
    assert comm.agree(True) is True
    made = comm.shrink()
    assert made.all_reduce(2) == 2
    made.revoke()
    with pytest.raises(pycoll.Revoked, match="rank 0 has revoked dup of world"):
        made.barrier()
    assert made.shrink().size == 1
