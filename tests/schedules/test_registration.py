"""A user's own algorithm is registered, proved and run like pycoll's; its faults are explained."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from patience import PATIENCE
from tiers import sizes

import pycoll
from pycoll import schedules
from pycoll.schedule import Copy, Recv, Send, Step, recv_reduce

Comm = Any


@pytest.fixture(autouse=True)
def own_algorithms_are_forgotten() -> Iterator[None]:
    """The table belongs to the process: other tests go through all that is in it."""
    before = {collective: dict(row) for collective, row in schedules.TABLE.items()}
    yield
    for collective, row in before.items():
        schedules.TABLE[collective].clear()
        schedules.TABLE[collective].update(row)


def two_way_ring(rank: int, size: int) -> Iterator[Step]:
    """Half of the chunks go round to the right, half to the left."""
    right, left = (rank + 1) % size, (rank - 1) % size
    for i in range(size - 1):
        yield Send(right, (rank - i) % size)
        yield Send(left, size + (rank + i) % size)
        yield from recv_reduce(left, (rank - i - 1) % size)
        yield from recv_reduce(right, size + (rank + i + 1) % size)
    for i in range(size - 1):
        yield Send(right, (rank - i + 1) % size)
        yield Send(left, size + (rank + i - 1) % size)
        yield Recv(left, (rank - i) % size)
        yield Recv(right, size + (rank + i) % size)


def detour(rank: int, size: int, root: int) -> Iterator[Step]:
    """From the root to everybody by way of the root's right neighbor."""
    helper = (root + 1) % size
    if rank == root and size > 1:
        yield Send(helper, 0)
    elif rank == helper != root:
        yield Recv(root, 0)
        for peer in range(size):
            if peer not in (root, helper):
                yield Send(peer, 0)
    elif rank != root:
        yield Recv(helper, 0)


def register_ring() -> None:
    pycoll.register_algorithm("all_reduce", "two_way_ring", chunks=lambda size: 2 * size)(
        two_way_ring
    )


# Registering


def test_a_registered_algorithm_is_listed_beside_pycolls_own() -> None:
    before = pycoll.algorithms("all_reduce")
    register_ring()
    assert pycoll.algorithms("all_reduce") == [*before, "two_way_ring"]
    assert "two_way_ring" not in pycoll.algorithms("reduce")


def test_the_decorator_gives_the_function_back() -> None:
    assert pycoll.register_algorithm("broadcast", "detour")(detour) is detour


@pytest.mark.parametrize("collective", ["all_reduce", "barrier"])
def test_a_name_of_pycolls_own_is_refused(collective: str) -> None:
    for name in pycoll.algorithms(collective):
        with pytest.raises(ValueError, match="pycoll's own"):
            pycoll.register_algorithm(collective, name)(two_way_ring)


@pytest.mark.parametrize(
    ("arguments", "function", "kind", "message"),
    [
        (("all_redcue", "mine"), two_way_ring, ValueError, "no collective 'all_redcue'; there are"),
        (("allreduce", "mine"), two_way_ring, ValueError, "no collective .*; write all_reduce"),
        (("all_reduce", "a,b"), two_way_ring, ValueError, "must be an identifier"),
        (("all_reduce", "mine"), 3, TypeError, r"must be a function of \(rank, size\), not 3"),
        (("all_reduce", "mine"), detour, TypeError, r"\(rank, size\), not of \(.*root"),
        (("broadcast", "mine"), two_way_ring, TypeError, r"\(rank, size, root\), not of \(.*size"),
    ],
)
def test_what_cannot_be_registered_is_refused_at_once(
    arguments: tuple[str, str], function: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        pycoll.register_algorithm(*arguments)(function)


@pytest.mark.parametrize("collective", sorted(schedules.TABLE))
def test_the_number_of_chunks_is_the_authors_only_where_it_is_not_given(collective: str) -> None:
    """It is what pycoll's own algorithms have, so their steps are proved under another name."""
    own = next(iter(schedules.TABLE[collective].values()))
    given = collective in ("gather", "all_gather", "scatter", "reduce_scatter", "exscan")
    if given:
        with pytest.raises(ValueError, match=f"the chunks of {collective} are given"):
            pycoll.register_algorithm(collective, "mine", chunks=2)
    chunks = None if given else own.chunks
    pycoll.register_algorithm(collective, "mine", chunks=chunks)(own.steps)
    assert [schedules.find(collective, "mine").chunks(p) for p in (1, 2, 5)] == [
        own.chunks(p) for p in (1, 2, 5)
    ]
    assert pycoll.prove(collective, "mine", max_size=5).proofs > 0


@pytest.mark.parametrize(
    ("chunks", "kind", "message"),
    [
        ("two", TypeError, "chunks must be a number or a function"),
        (lambda size: 0, ValueError, "'mine': 0 chunks for 1 ranks"),
        (lambda size: size / 2, ValueError, "'mine': 0.5 chunks for 1 ranks"),
        (0, ValueError, "'mine': 0 chunks for 1 ranks"),
    ],
)
def test_a_number_of_chunks_that_makes_no_sense_is_refused(
    chunks: Any, kind: type[Exception], message: str
) -> None:
    def try_it() -> None:
        pycoll.register_algorithm("all_reduce", "mine", chunks=chunks)(two_way_ring)
        pycoll.prove("all_reduce", "mine")

    with pytest.raises(kind, match=message):
        try_it()


def test_what_all_to_all_has_is_the_least_number_of_its_chunks() -> None:
    own = schedules.find("all_to_all", "pairwise")
    pycoll.register_algorithm("all_to_all", "mine")(own.steps)
    assert pycoll.prove("all_to_all", "mine", 4)
    pycoll.register_algorithm("all_to_all", "mine", chunks=lambda size: size)(own.steps)
    with pytest.raises(ValueError, match="'mine': 1 chunks for 1 ranks; 2 or more are needed"):
        pycoll.prove("all_to_all", "mine", 4)


# Proving


def test_what_is_proved_is_said_in_a_sentence() -> None:
    register_ring()
    pycoll.register_algorithm("broadcast", "detour")(detour)
    proved = pycoll.prove("all_reduce", "two_way_ring", max_size=6)
    assert proved.proofs >= 6
    assert str(proved) == "all_reduce two_way_ring is proved for 1 to 6 ranks"
    assert str(pycoll.prove("broadcast", "detour")).endswith("for 1 to 16 ranks, from every root")


def test_pycolls_own_algorithms_are_proved_by_the_same_function() -> None:
    assert pycoll.prove("all_reduce", "ring", 4).name == "ring"


@pytest.mark.parametrize("max_size", [0, -1, 2.5, True])
def test_a_largest_size_that_makes_no_sense_is_refused(max_size: Any) -> None:
    with pytest.raises(ValueError, match="max_size must be a whole number above 0"):
        pycoll.prove("all_reduce", "ring", max_size)


def test_there_is_nothing_to_prove_of_a_name_that_nobody_has_registered() -> None:
    with pytest.raises(ValueError, match="all_reduce has no algorithm 'mine'; it has "):
        pycoll.prove("all_reduce", "mine")


def test_a_cost_that_is_stated_is_compared_and_one_that_is_not_is_not() -> None:
    right = schedules.find("all_reduce", "ring").cost
    assert right is not None
    ring = schedules.find("all_reduce", "ring")
    for cost in (None, right):
        pycoll.register_algorithm("all_reduce", "mine", chunks=ring.chunks, cost=cost)(ring.steps)
        assert pycoll.prove("all_reduce", "mine", 4)
    pycoll.register_algorithm(
        "all_reduce", "mine", chunks=ring.chunks, cost=lambda size: right(size + 1)
    )(ring.steps)
    with pytest.raises(pycoll.ProofError, match=r"states Cost\(.*, but takes Cost\("):
        pycoll.prove("all_reduce", "mine", 4)


def test_a_claim_of_rank_order_is_checked() -> None:
    pycoll.register_algorithm(
        "all_reduce", "two_way_ring", chunks=lambda size: 2 * size, rank_order=True
    )(two_way_ring)
    with pytest.raises(pycoll.ProofError, match="claims rank order"):
        pycoll.prove("all_reduce", "two_way_ring")


WRONG: dict[str, tuple[Callable[[int, int], Any], str]] = {
    "no_step": (lambda rank, size: ["Send"], "step 0, 'Send': this is no Send, Recv or Copy"),
    "yield_from_forgotten": (
        lambda rank, size: [recv_reduce(0, 0)],
        "step 0, .*need `yield from`",
    ),
    "nothing_returned": (lambda rank, size: None, "gave None and no steps"),
    "a_peer_of_numpy": (
        lambda rank, size: [Send(np.int64(0), 0)] if rank else [],  # type: ignore[arg-type]
        "peers and chunks are whole numbers",
    ),
    "a_chunk_that_is_none": (
        lambda rank, size: [Send(0, 0.5)] if rank else [],  # type: ignore[arg-type]
        "a chunk is a number",
    ),
    "a_peer_too_far": (
        lambda rank, size: [Send(rank + 1, 0)] if size > 1 else [],
        r"step 0, Send\(peer=2, chunk=0\): there are only ranks 0 to 1",
    ),
    "a_peer_below_zero": (
        lambda rank, size: [Recv(rank - 1, 0)] if size > 1 else [],
        r"step 0, Recv\(peer=-1, .*: there are only ranks 0 to 1",
    ),
    "oneself": (lambda rank, size: [Send(rank, 0)], "step 0, .*: the peer is the rank itself"),
    "a_chunk_too_far": (
        lambda rank, size: [Copy(0, 1)],
        r"step 0, Copy\(source=0, chunk=1\): there are only chunks 0 to 0",
    ),
    "a_source_too_far": (
        lambda rank, size: [Copy(1, 0)],
        r"step 0, Copy\(source=1, chunk=0\): there are only chunks 0 to 0",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_steps_that_make_no_sense_are_explained_by_the_proof_and_when_they_are_to_run(
    name: str,
) -> None:
    steps, message = WRONG[name]
    pycoll.register_algorithm("all_reduce", name)(steps)
    with pytest.raises(pycoll.ProofError, match=rf"(?s)all_reduce {name}, size [12].*{message}"):
        pycoll.prove("all_reduce", name)
    refused = []
    for rank in range(2):
        try:
            schedules.schedule("all_reduce", name, rank, 2)
        except ValueError as error:
            refused.append(
                re.search(rf"all_reduce {name}, size 2, rank {rank}: .*{message}", str(error))
            )
    assert refused
    assert all(refused)


def test_an_error_in_the_authors_function_is_raised_as_it_is_with_a_note() -> None:
    @pycoll.register_algorithm("all_reduce", "broken")
    def broken(rank: int, size: int) -> Iterator[Step]:
        yield Send(1 // (size - 1), 0)

    with pytest.raises(ZeroDivisionError) as caught:
        pycoll.prove("all_reduce", "broken")
    assert caught.value.__notes__ == ["in the algorithm all_reduce 'broken', called with (0, 1)"]


# Running


@sizes(1, 2, 4)
@pytest.mark.parametrize("count", [0, 1, 5, 1000])
def test_it_gives_what_pycolls_own_gives(ranks: Any, count: int) -> None:
    def program(comm: Comm, count: int) -> list[bool]:
        register_ring()
        pycoll.register_algorithm("broadcast", "detour")(detour)
        x = np.arange(count) * (comm.rank + 1)
        mine = comm.all_reduce(x, algorithm="two_way_ring")
        same = [np.array_equal(mine, comm.all_reduce(x, algorithm="ring"))]
        for root in range(comm.size):
            big = np.full(3000, root) if comm.rank == root else None
            there = comm.broadcast(big, root, algorithm="detour")
            same.append(np.array_equal(there, np.full(3000, root)))
        return same

    assert all(all(same) for same in ranks(program, count))


@sizes(2)
def test_operators_it_cannot_serve_are_refused(ranks: Any) -> None:
    def program(comm: Comm) -> str:
        register_ring()
        first = pycoll.Op(lambda a, b: a, commutative=False, elementwise=True)
        with pytest.raises(ValueError, match="rank order") as caught:
            comm.all_reduce(np.ones(3), first, algorithm="two_way_ring")
        comm.barrier()
        return str(caught.value)

    for text in ranks(program):
        assert text.startswith("all_reduce two_way_ring does not combine in rank order")


@sizes(2)
def test_registered_again_the_new_steps_run(ranks: Any) -> None:
    def program(comm: Comm) -> list[float]:
        def exchange(rank: int, size: int) -> Iterator[Step]:
            yield Send(1 - rank, 0)
            yield from recv_reduce(1 - rank, 0, incoming_first=rank == 1)

        def keep(rank: int, size: int) -> Iterator[Step]:
            yield from ()

        results = []
        for steps in (exchange, keep, exchange):
            pycoll.register_algorithm("all_reduce", "cell")(steps)
            results.append(float(comm.all_reduce(1.0 + comm.rank, algorithm="cell")))
        return results

    assert ranks(program) == [[3.0, 1.0, 3.0], [3.0, 2.0, 3.0]]


@sizes(2)
def test_registered_with_another_number_of_chunks_the_new_number_counts(ranks: Any) -> None:
    def program(comm: Comm) -> list[bool]:
        results = []
        for count in (1, 3):

            def exchange(rank: int, size: int, chunks: int = count) -> Iterator[Step]:
                for chunk in range(chunks):
                    yield Send(1 - rank, chunk)
                    yield from recv_reduce(1 - rank, chunk, incoming_first=rank == 1)

            pycoll.register_algorithm("all_reduce", "cell", chunks=count)(exchange)
            total = comm.all_reduce(np.arange(7.0), algorithm="cell")
            results.append(np.array_equal(total, 2 * np.arange(7.0)))
        return results

    assert ranks(program) == [[True, True]] * 2


@sizes(2)
def test_registered_again_without_its_claim_of_rank_order_it_is_refused(ranks: Any) -> None:
    def program(comm: Comm) -> list[float]:
        def exchange(rank: int, size: int) -> Iterator[Step]:
            yield Send(1 - rank, 0)
            yield from recv_reduce(1 - rank, 0, incoming_first=rank == 1)

        first = pycoll.Op(lambda a, b: a, commutative=False)
        pycoll.register_algorithm("all_reduce", "cell", rank_order=True)(exchange)
        kept = comm.all_reduce(np.full(3, comm.rank), first, algorithm="cell")
        pycoll.register_algorithm("all_reduce", "cell")(exchange)
        with pytest.raises(ValueError, match="rank order"):
            comm.all_reduce(np.full(3, comm.rank), first, algorithm="cell")
        comm.barrier()
        return [float(value) for value in kept]

    assert ranks(program) == [[0.0] * 3] * 2


# Nobody hangs


def test_a_rank_that_has_not_registered_it_says_so_and_ends_the_others(job: Any) -> None:
    done = job(
        3,
        """
        if rank != 1:
            @pycoll.register_algorithm("barrier", "mine")
            def mine(rank, size):
                from pycoll.schedule import Send, recv_reduce
                for peer in range(size):
                    if peer != rank:
                        yield Send(peer, 0)
                for peer in range(size):
                    if peer != rank:
                        yield from recv_reduce(peer, 0)
            peer_failed(1, "raised ValueError", comm.barrier, algorithm="mine")
            ok()
        else:
            comm.barrier(algorithm="mine")
        """.replace("\n        ", "\n"),
    )
    assert done.content == [0, 2], done
    assert "ValueError: barrier has no algorithm 'mine'; it has shared_memory, " in done.stderr


def test_a_rank_that_has_not_registered_it_and_goes_on_is_a_mismatch(job: Any) -> None:
    done = job(
        2,
        """
        from pycoll.schedule import Recv, Send, recv_reduce
        if rank == 0:
            @pycoll.register_algorithm("all_reduce", "mine")
            def mine(rank, size):
                yield Send(1 - rank, 0)
                yield from recv_reduce(1 - rank, 0, incoming_first=rank == 1)
            error_like(pycoll.MismatchError, "=mine", comm.all_reduce, 1.0, algorithm="mine")
        else:
            error_like(ValueError, "no algorithm 'mine'", comm.all_reduce, 1.0, algorithm="mine")
            error_like(pycoll.MismatchError, "=mine", comm.all_reduce, 1.0, algorithm="ring")
        ok()
        """.replace("\n        ", "\n"),
    )
    assert done.content == [0, 1], done


def test_steps_that_make_no_sense_on_one_rank_are_no_call_there(job: Any) -> None:
    done = job(
        3,
        """
        from pycoll.schedule import Recv, Send
        @pycoll.register_algorithm("barrier", "spread")
        def spread(rank, size):
            if rank < 2:
                yield Recv(2, 0)
            else:
                yield Send(1, 0)
                yield Send(3, 0)  # there is no rank 3
        if rank == 2:
            error_like(ValueError, "spread, size 3, rank 2: step 1, Send.*ranks 0 to 2",
                       comm.barrier, algorithm="spread")
        else:
            error_like(pycoll.PeerFailed, "rank 2 ", comm.barrier, algorithm="spread")
        ok()
        """.replace("\n        ", "\n"),
    )
    assert done.content == [0, 1, 2], done


@pytest.mark.parametrize("collective", ["all_reduce", "broadcast"])
def test_the_deadline_of_one_that_deadlocks_names_it(job: Any, collective: str) -> None:
    done = job(
        2,
        f"""
        from pycoll.schedule import Recv, Send
        @pycoll.register_algorithm("{collective}", "stuck")
        def stuck(rank, size, root=0):
            yield Recv(1 - rank, 0)
            yield Send(1 - rank, 0)
        error = error_of(comm.{collective}, np.ones(3000), algorithm="stuck", timeout=1.0)
        assert isinstance(error, pycoll.OperationTimeout), repr(error)
        assert "algorithm=stuck" in str(error), error
        ok()
        """.replace("\n        ", "\n"),
    )
    assert done.content == [0, 1], done


@pytest.mark.parametrize("size", [1, 3])
def test_the_example_proves_its_algorithm_and_gets_what_the_ring_gives(size: int) -> None:
    example = Path(__file__).parents[2] / "examples/my_algorithm.py"
    command = [sys.executable, "-m", "pycoll._launcher", "-n", str(size), str(example)]
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60 * PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    proved, wrong, same = done.stdout.splitlines()
    assert proved == "all_reduce two_way_ring is proved for 1 to 16 ranks"
    assert wrong.endswith("rank 0 ends with (0 2) of chunk 0, without the contribution of rank 1")
    assert same == f"on {size} ranks the result is that of pycoll's ring: True"
