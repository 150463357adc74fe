"""Random programs of a few ranks with simulated RDMA devices."""

from __future__ import annotations

import pytest
from rdma_programs import SEEDS, Program
from tiers import few, smoke


@pytest.mark.filterwarnings("ignore:rdma. rank .* cannot register:RuntimeWarning")
@pytest.mark.parametrize("seed", few(range(10), range(10, SEEDS)))
def test_a_random_program_moves_what_it_shall_and_touches_nothing_else(seed: int) -> None:
    Program(seed).run()


@smoke
@pytest.mark.filterwarnings("ignore:rdma. rank .* cannot register:RuntimeWarning")
@pytest.mark.parametrize("seed", few(range(6), range(6, SEEDS // 2)))
def test_a_random_program_survives_the_death_of_a_rank(seed: int) -> None:
    Program(seed, dies=True).run()
