"""Two threads in collectives of one communicator: the second is refused, the first goes on."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import pycoll

Comm = Any


@pytest.mark.parametrize("ranks", [2], indirect=True, scope="module")
@pytest.mark.parametrize("length", [1, 1 << 20])
def test_the_second_thread_is_refused_and_nothing_breaks(ranks: Any, length: int) -> None:
    def program(comm: Comm, length: int) -> None:
        x, threads = np.ones(length), 8
        together, outcomes = threading.Barrier(threads), []

        def call() -> None:
            together.wait()
            try:
                outcomes.append(comm.all_reduce(x)[-1])
            except BaseException as error:
                outcomes.append(error)

        if comm.rank == 1:
            comm.recv(0)  # when all threads of 0 but one were refused
            assert comm.all_reduce(x)[-1] == 2
        else:
            calling = [threading.Thread(target=call) for _ in range(threads)]
            for thread in calling:
                thread.start()
            while len(outcomes) < threads - 1:
                pass
            comm.send(None, 1)
            for thread in calling:
                thread.join()
            refused = [outcome for outcome in outcomes if isinstance(outcome, pycoll.Error)]
            assert len(refused) == threads - 1, outcomes
            assert all("another thread is in a collective" in str(error) for error in refused)
            assert 2.0 in outcomes
        assert comm.all_reduce(x)[-1] == 2

    ranks(program, length)
