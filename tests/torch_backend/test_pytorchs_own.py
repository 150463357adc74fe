"""Tests of PyTorch's own, written for its own backends, pass on pycoll.

These are the tests of its DistributedTest that need three ranks and no GPU; they run on four, too.
gloo skips those of all_to_all. Those of monitored_barrier are not here: PyTorch refuses it for
every other backend.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

for needed in ("torch", "expecttest", "numpy"):
    pytest.importorskip(needed)
from torch_own_tests import run_own_test  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.parametrize("ranks", [3, 4], indirect=True, scope="module"),
]

TEXT = """
Backend_enum_class DistributedDataParallelCPU DistributedDataParallelCPU_grad_is_view
DistributedDataParallel_requires_grad accumulate_gradients_no_sync
accumulate_gradients_no_sync_allreduce_hook accumulate_gradients_no_sync_allreduce_with_then_hook
accumulate_gradients_no_sync_grad_is_view all_gather all_gather_coalesced_complex
all_gather_coalesced_full_group all_gather_coalesced_simple all_gather_coalesced_with_empty
all_gather_complex all_gather_full_group all_gather_object_default_pg all_gather_object_subgroup
all_reduce_coalesced_full_group_max all_reduce_coalesced_full_group_min
all_reduce_coalesced_full_group_product all_reduce_coalesced_full_group_sum
all_reduce_coalesced_max all_reduce_coalesced_max_complex_unsupported all_reduce_coalesced_min
all_reduce_coalesced_product all_reduce_coalesced_sum all_reduce_complex_unsupported_ops
all_reduce_full_group_max all_reduce_full_group_min all_reduce_full_group_product
all_reduce_full_group_sum all_reduce_max all_reduce_min all_reduce_product all_reduce_sum
all_reduce_sum_async all_reduce_sum_complex all_to_all all_to_all_complex all_to_all_full_group
all_to_all_single_equal_split all_to_all_single_equal_split_complex
all_to_all_single_equal_split_full_group all_to_all_single_unequal_split
all_to_all_single_unequal_split_complex all_to_all_single_unequal_split_full_group barrier
barrier_full_group barrier_timeout_full_group batch_isend_irecv_gloo batch_isend_irecv_gloo_tags
broadcast broadcast_full_group ddp_create_graph ddp_logging_data_cpu destroy_full_group
destroy_group dump_DDP_relevant_env_vars gather gather_checks gather_full_group get_backend
get_future get_rank get_rank_size_full_group get_rank_size_group
grads_same_across_ranks_with_no_sync irecv isend isend_autograd_profiler isend_torch_profiler
reduce_full_group_max reduce_full_group_min reduce_full_group_product reduce_full_group_sum
reduce_max reduce_min reduce_product reduce_sum reduce_sum_twice scatter scatter_checks
scatter_complex scatter_full_group scatter_object_list send_recv send_recv_any_source
send_recv_any_source_autograd_profiler send_recv_any_source_torch_profiler
send_recv_autograd_profiler send_recv_torch_profiler send_recv_with_tag
send_recv_with_tag_autograd_profiler send_recv_with_tag_torch_profiler sparse_all_reduce_sum
static_graph_api_cpu
"""
NAMES = TEXT.split()


@pytest.mark.parametrize("name", NAMES)
def test_it_passes(ranks: Any, name: str, tmp_path: Path) -> None:
    assert set(ranks(run_own_test, f"test_{name}", str(tmp_path))) == {"passed"}
