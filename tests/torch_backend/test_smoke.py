"""The backend in a few calls, where PyTorch is installed; all else is in the tier `torch`."""

from __future__ import annotations

from typing import Any

import pytest
from torch_groups import process_group


def call_a_few(comm: Any) -> None:
    import torch

    with process_group(comm) as dist:
        x = torch.full((1000,), comm.rank + 1.0)
        work = dist.all_reduce(x, async_op=True)
        assert work.get_future().wait()[0] is x
        dist.all_reduce(x)
        assert (x == 6.0).all()
        outs = [torch.zeros(2) for _ in range(2)]
        dist.all_gather(outs, torch.full((2,), float(comm.rank)))
        assert outs[1].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("ranks", [2], indirect=True, scope="module")
def test_torch_distributed_runs_on_pycoll(ranks: Any) -> None:
    pytest.importorskip("torch")
    ranks(call_a_few)
