"""The proof finds the faults planted here, and the command tells of them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from patience import PATIENCE
from proof_cases import Steps, _edited

from pycoll._tools.cli import main
from pycoll.errors import ProofError
from pycoll.schedule import Copy, Recv, Reduce, Send, Step, recv_reduce
from pycoll.schedules import (
    TABLE,
    Cost,
    binomial,
    find,
    linear,
    names,
    recursive_doubling,
    ring,
)
from pycoll.schedules.check import prove, prove_algorithm


def _swap(steps: Steps) -> None:
    for position, step in enumerate(steps):
        if isinstance(step, Reduce):
            steps[position] = Reduce(step.chunk, not step.incoming_first)


def test_a_rank_that_must_not_contribute_to_a_scan_is_found() -> None:
    def steps(rank: int, size: int) -> Iterator[Step]:
        yield from recursive_doubling.all_reduce(rank, size)

    with pytest.raises(ProofError, match=r"rank 0 ends with \(0 1\) of .*: rank 1 must not contri"):
        prove("scan", "recursive_doubling", 2, steps=steps)


def test_a_rank_that_contributes_to_its_own_exscan_is_found() -> None:
    def steps(rank: int, size: int) -> Steps:
        return [[Recv(1, 1), Send(1, 1)], [Send(0, 0), Recv(0, 1)]][rank]

    with pytest.raises(
        ProofError, match="rank 1 ends with 1 of chunk 0: rank 1 must not contribute"
    ):
        prove("exscan", "linear", 2, steps=steps)


def test_a_missing_contribution_is_found() -> None:
    with pytest.raises(ProofError, match="rank 0 ends with 0 of chunk 0, without the contribution"):
        prove("reduce", "tree", 3, steps=lambda rank, size, root: [])


def test_a_barrier_in_which_a_rank_does_not_hear_of_another_is_found() -> None:
    with pytest.raises(ProofError, match="rank 0 ends without a word of ranks 1, 3"):
        prove(
            "barrier",
            "linear",
            4,
            steps=lambda rank, size: {0: [Recv(2, 2)], 2: [Send(0, 2)]}.get(rank, []),
        )


def test_a_rank_that_ends_without_its_block_is_found() -> None:
    with pytest.raises(ProofError, match="scatter linear, size 2, root 0: rank 1 ends without chu"):
        prove("scatter", "linear", 2, steps=lambda rank, size, root: [])


def test_operands_in_another_order_on_one_rank_may_give_other_bits() -> None:
    algorithm = find("all_reduce", "recursive_doubling")
    swapped = algorithm._replace(steps=_edited(algorithm, 1, _swap), rank_order=False)
    with pytest.raises(ProofError) as caught:
        prove_algorithm(swapped)
    assert str(caught.value) == (
        "all_reduce recursive_doubling, size 2: ranks may differ in their bits: "
        "rank 1 ends with (1 0) of chunk 0, rank 0 with (0 1) of chunk 0"
    )


@pytest.mark.parametrize("name", ["recursive_doubling", "tree", "linear"])
def test_swapped_operands_break_the_claim_of_rank_order(name: str) -> None:
    steps = _edited(find("all_reduce", name), 0, _swap)
    with pytest.raises(ProofError, match=r"claims rank order, but rank 0 ends with \("):
        prove("all_reduce", name, 4, steps=steps)


def test_a_false_claim_of_rank_order_is_refused() -> None:
    assert prove("reduce", "linear", 3, root=0, steps=linear.reduce)
    with pytest.raises(ProofError, match=r"claims rank order, but rank 1 ends with \(\(1 2\) 0\)"):
        prove("reduce", "linear", 3, root=1, steps=binomial.reduce)


def test_a_ring_does_not_keep_rank_order() -> None:
    claimed = find("reduce_scatter", "ring")._replace(rank_order=True)
    with pytest.raises(ProofError, match="claims rank order"):
        prove_algorithm(claimed, max_size=4)


def test_a_false_statement_of_cost_is_refused() -> None:
    stated = find("barrier", "tree")._replace(
        cost=lambda size: Cost(size - 1, size - 1, 2 * size - 2, 2 * size - 2, size - 1)
    )
    with pytest.raises(ProofError, match=r"size 2: states Cost\(steps=1, .*takes Cost\(steps=2, "):
        prove_algorithm(stated)


def _two_blocks(sent: Any, received: Any) -> Callable[..., Steps]:
    """A scatter of two ranks from rank 0 in which rank 1 gets more than its block."""
    return lambda rank, size, root: [Recv(0, received)] if rank else [Send(1, sent)]


@pytest.mark.parametrize("chunks", [(1, 0), range(2)])
def test_the_chunks_of_a_message_land_in_their_order(chunks: Any) -> None:
    wrong = tuple(reversed(chunks))
    with pytest.raises(ProofError, match=r"puts 0 of chunk \d in chunk \d"):
        prove("scatter", "linear", 2, steps=_two_blocks(chunks, wrong))
    with pytest.raises(
        ProofError, match=r"takes Cost\(steps=1, path=2, messages=1, volume=2, load="
    ):
        prove("scatter", "linear", 2, steps=_two_blocks(chunks, chunks))


@pytest.mark.parametrize(("sent", "received"), [((0, 1), 1), (1, (0, 1)), ((0, 1), (1,))])
def test_halves_of_a_message_with_unequal_numbers_of_chunks_are_found(
    sent: Any, received: Any
) -> None:
    with pytest.raises(ProofError, match=r"rank 0, step 0, .*rank 1, .* expects another number of"):
        prove("scatter", "linear", 2, steps=_two_blocks(sent, received))


@pytest.mark.parametrize("chunks", [(), (1, 1), range(0)])
def test_a_message_of_no_chunk_or_of_one_twice_is_refused(chunks: Any) -> None:
    with pytest.raises(ProofError, match=r"rank 0, step 0: .* names no chunk, or one twice"):
        prove("scatter", "linear", 2, steps=_two_blocks(chunks, chunks))


def test_several_chunks_are_combined_each_with_its_own() -> None:
    def steps(rank: int, size: int) -> Iterator[Step]:
        if rank:
            yield Send(0, (1, 0))
            yield Recv(0, 1)
        else:
            yield from recv_reduce(1, (0, 1))
            yield Send(1, 1)

    with pytest.raises(ProofError, match="combines 0 of chunk 0 with 1 of chunk 1 from rank 1"):
        prove("reduce_scatter", "central", 2, steps=steps)


def test_a_receive_that_holds_the_chunk_it_should_send_deadlocks() -> None:
    def fused(rank: int, size: int) -> Iterator[Step]:
        distance = 1
        while distance < size:
            partner = rank ^ distance
            yield from recv_reduce(partner, 0, incoming_first=partner < rank)
            yield Send(partner, 0)
            distance *= 2

    with pytest.raises(ProofError) as caught:
        prove("all_reduce", "recursive_doubling", 2, steps=fused)
    assert str(caught.value).splitlines() == [
        "all_reduce recursive_doubling, size 2: deadlock with window 4",
        "    rank 0, step 0, Recv(peer=1, chunk=0, scratch=True): posted, "
        "waits for step 2 of rank 1 to be posted",
        "    rank 1, step 2, Send(peer=0, chunk=0): waits for step 1, which writes chunk 0",
        "    rank 1, step 1, Reduce(chunk=0, incoming_first=True): waits for step 0, "
        "which brings chunk 0",
        "    rank 1, step 0, Recv(peer=0, chunk=0, scratch=True): posted, "
        "waits for step 2 of rank 0 to be posted",
        "    rank 0, step 2, Send(peer=1, chunk=0): waits for step 1, which writes chunk 0",
        "    rank 0, step 1, Reduce(chunk=0, incoming_first=False): waits for step 0, "
        "which brings chunk 0",
        "    rank 0, step 0, Recv(peer=1, chunk=0, scratch=True): so it waits for itself",
    ]


def test_ranks_that_all_receive_before_they_send_the_chunk_deadlock() -> None:
    def steps(rank: int, size: int, root: int) -> Iterator[Step]:
        yield Recv((rank - 1) % size, 0)
        yield Send((rank + 1) % size, 0)

    with pytest.raises(ProofError, match="deadlock"):
        prove("broadcast", "chain", 3, steps=steps)


def _narrow(rank: int, size: int) -> Steps:
    """A reduce_scatter of three ranks in which ranks 0 and 1 first wait for each other's second."""
    return {
        0: [*recv_reduce(1, 0), *recv_reduce(2, 1), Send(1, 1), Send(2, 2)],
        1: [*recv_reduce(0, 1), *recv_reduce(2, 0), Send(0, 0), Send(2, 2)],
        2: [Send(1, 0), Send(0, 1), *recv_reduce(0, 2), *recv_reduce(1, 2)],
    }[rank]


def test_a_deadlock_of_a_small_window_alone_is_found() -> None:
    assert prove("reduce_scatter", "ring", 3, window=2, steps=_narrow)
    with pytest.raises(
        ProofError, match=r"(?s)window 1.*waits for a free scratch, so for step 1 t"
    ):
        prove("reduce_scatter", "ring", 3, window=1, steps=_narrow)


def test_all_windows_are_tried() -> None:
    algorithm = find("reduce_scatter", "ring")

    def steps(rank: int, size: int) -> Steps:
        return _narrow(rank, size) if size == 3 else list(ring.reduce_scatter(rank, size))

    with pytest.raises(ProofError, match="size 3: deadlock with window 1"):
        prove_algorithm(algorithm._replace(steps=steps), max_size=4)


@pytest.mark.parametrize(
    ("rank_0", "what"),
    [
        ([Send(0, 0)], r"Send\(peer=0, chunk=0\): the peer is the rank itself"),
        ([Send(2, 0)], "there are only ranks 0 to 1"),
        ([Send(1, 2)], "there are only chunks 0 to 1"),
        ([Copy(-1, 0)], "there are only chunks 0 to 1"),
        ([Recv(1, 0, scratch=True)], "no Reduce follows to use what comes"),
        ([Reduce(0, False)], r"rank 0, step 0: Reduce\(.*\) does not follow its own Recv"),
        ([Copy(1, 0)], r"rank 0, step 0, Copy\(source=1, chunk=0\): reads chunk 1 before it has"),
        ([Recv(1, 0)], "overwrites chunk 0, which was passed in"),
        ([Copy(0, 1)], "puts 0 of chunk 0 in chunk 1"),
        ([*recv_reduce(1, 0)], "nothing is combined in this collective"),
    ],
)
def test_a_step_that_makes_no_sense_is_refused(rank_0: Steps, what: str) -> None:
    def steps(rank: int, size: int) -> Steps:
        return rank_0 if rank == 0 else [Send(0, 1)]

    matched = any(isinstance(step, Recv) for step in rank_0)
    with pytest.raises(ProofError, match=what):
        prove("all_gather", "ring", 2, steps=steps if matched else lambda r, s: rank_0[: 1 - r])


@pytest.fixture
def one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prove in this process."""
    monkeypatch.setattr("pycoll._support.environment.usable_cores", lambda: 1)


@pytest.mark.usefixtures("one_core")
def test_the_command_prints_a_line_for_each_algorithm(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--max-size", "4", "barrier", "reduce"]) == 0
    assert _cases(capsys.readouterr().out) == [
        *(["barrier", name, "1-4", "-", "proved"] for name in names("barrier")),
        *(["reduce", name, "1-4", "each", "proved"] for name in names("reduce")),
    ]
    assert main(["check", "--max-size", "2", "scan", "all_reduce", "ring", "tree"]) == 0
    assert _cases(capsys.readouterr().out) == [
        *(["scan", name, "1-2", "-", "proved"] for name in names("scan")),
        ["all_reduce", "ring", "1-2", "-", "proved"],
        ["all_reduce", "tree", "1-2", "-", "proved"],
    ]
    assert main(["check", "--max-size", "2", "ring"]) == 0
    alone = [(line[0], line[1]) for line in _cases(capsys.readouterr().out)]
    assert alone == [(collective, "ring") for collective in TABLE if "ring" in TABLE[collective]]


def test_the_command_proves_on_all_cores_and_prints_in_order() -> None:
    command = (
        "import sys, pycoll._support.environment as environment\n"
        "environment.usable_cores = lambda: 2\n"
        "from pycoll._tools.cli import main\n"
        "if __name__ == '__main__': sys.exit(main(sys.argv[1:]))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", command, "check", "--max-size", "5", "scan", "barrier"],
        capture_output=True,
        text=True,
        timeout=60 * PATIENCE,
        check=True,
    )
    assert _cases(ran.stdout) == [
        *(["scan", name, "1-5", "-", "proved"] for name in names("scan")),
        *(["barrier", name, "1-5", "-", "proved"] for name in names("barrier")),
    ]


def _cases(printed: str) -> list[list[str]]:
    """Collective, algorithm, sizes, roots and result of each line."""
    lines = [line.split() for line in printed.splitlines()[2:]]
    return [[*line[:4], line[-1]] for line in lines]


@pytest.mark.usefixtures("one_core")
def test_the_command_fails_with_the_explanation(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = find("barrier", "tree")._replace(steps=lambda rank, size: [])
    monkeypatch.setitem(TABLE["barrier"], "tree", wrong)
    assert main(["check", "--max-size", "3", "barrier"]) == 1
    printed = capsys.readouterr()
    results = {line[1]: line[-1] for line in _cases(printed.out)}
    assert results.pop("tree") == "WRONG"
    assert set(results.values()) == {"proved"}
    assert printed.err == (
        "pycoll check: barrier tree, size 2: rank 0 ends without a word of rank 1\n"
    )


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["bcast"], "no collective 'bcast'; write broadcast"),
        (["allreduce"], "no collective 'allreduce'; write all_reduce"),
        (["all_reduce", "rign"], "all_reduce has no algorithm 'rign'; it has ring"),
        (["rign"], "no collective 'rign'; there are broadcast"),
        (["--max-size", "0"], "a whole number above 0"),
    ],
)
def test_the_command_refuses_what_makes_no_sense(
    capsys: pytest.CaptureFixture[str], arguments: list[str], what: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["check", *arguments])
    assert caught.value.code == 2
    assert what in capsys.readouterr().err
