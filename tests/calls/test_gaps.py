"""What no other test asked for: each of these was found by a planted fault that nobody noticed."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from script_jobs import LIMIT_S, RUN

import pycoll
from pycoll import _dtypes as dtypes
from pycoll._arrays import conversion
from pycoll._launcher.outcome import Raised, RankState, judge

Comm = Any


@pytest.mark.parametrize("ranks", [(2, ("--transport", "tcp"))], indirect=True, scope="module")
def test_the_same_call_made_at_another_line_is_no_mismatch(ranks: Any) -> None:
    def program(comm: Comm) -> int:
        if comm.rank == 0:
            return comm.all_reduce(1)
        return comm.all_reduce(1)

    assert ranks(program) == [2, 2]


def test_an_out_whose_rows_overlap_in_turn_is_refused() -> None:
    # Elements 0, 1, 2 and 2, 3, 4: no row reaches the next one's first element but by its length.
    out = np.lib.stride_tricks.as_strided(np.zeros(5), (2, 3), (16, 8))
    with pytest.raises(ValueError, match="overlaps itself"):
        conversion.check_out(out, dtypes.FLOAT64, (2, 3))


@pytest.mark.parametrize("ranks", [2], indirect=True, scope="module")
def test_wait_any_gives_a_persistent_request_once_for_each_start(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        in_core = comm.persistent.all_reduce(np.ones(3))
        not_in_core = comm.persistent.all_reduce_many([np.ones(3)])
        for request in in_core, not_in_core:
            for _ in range(3):
                request.start()
                index, result = pycoll.wait_any([request])
                assert index == 0
                np.testing.assert_array_equal(np.ravel(result), [2.0, 2.0, 2.0])
                with pytest.raises(ValueError, match="no request is left"):
                    pycoll.wait_any([request])

    ranks(program)


@pytest.mark.parametrize("ranks", [2], indirect=True, scope="module")
def test_the_compiled_collectives_refuse_an_out_that_does_not_fit(ranks: Any) -> None:
    def wrong(comm: Comm) -> Iterator[tuple[type[Exception], str, Callable[[], Any]]]:
        x = np.ones((comm.size, 8))
        shapes = {
            "all_reduce": x.shape,
            "all_gather": (comm.size, *x.shape),
            "reduce_scatter": x.shape[1:],
            "all_to_all": x.shape,
        }
        for name, shape in shapes.items():
            method = getattr(comm, name)
            fixed = np.zeros(shape)
            fixed.flags.writeable = False
            yield ValueError, "read-only", lambda m=method, out=fixed: m(x, out=out)
            other = np.zeros(shape, "f4")
            yield ValueError, "dtype", lambda m=method, out=other: m(x, out=out)
            longer = np.zeros((*shape[:-1], 9))
            yield ValueError, "shape", lambda m=method, out=longer: m(x, out=out)
        line = np.zeros(9)
        for a, b in ((line[1:], line[:-1]), (line[:-1], line[1:])):
            yield ValueError, "overlaps x", lambda a=a, b=b: comm.all_reduce(a, out=b)
        many = np.zeros((comm.size + 1, comm.size, 3))
        yield ValueError, "overlaps x", lambda: comm.all_gather(many[1 - comm.rank], out=many[:2])

    def program(comm: Comm) -> None:
        assert comm.all_reduce.__self__ is not comm, "this is not the core's method"
        for number, (kind, text, call) in enumerate(wrong(comm)):
            # On all ranks at once: what is not refused shall not wait for the others.
            with pytest.raises(kind, match=text):
                call()
            assert comm.all_reduce(number) == comm.size * number

    ranks(program)


def test_ranks_but_0_have_no_standard_input_at_all() -> None:
    # Who reads the launcher's first would be chance.
    done = subprocess.run(
        [*RUN, "-n", "2", "-l", "--", "readlink", "/proc/self/fd/0"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    assert "[1] /dev/null\n" in done.stdout
    assert "[0] pipe:" in done.stdout


def test_the_cause_is_no_rank_that_failed_because_of_another_however_early() -> None:
    victim, cause = RankState(0), RankState(1)
    for rank, at, error in ((victim, 1.0, "PeerFailed"), (cause, 2.0, "ValueError")):
        rank.status = 1
        rank.failed_at = at  # news of the victim's end may come first
        rank.raised = Raised(error, "", error == "PeerFailed")
    outcome = judge([victim, cause], None, 0.0, lambda rank: "")
    assert (outcome.culprit, outcome.status) == (1, 1)
    assert "rank 1 failed after 2.0 s: raised ValueError" in outcome.report
