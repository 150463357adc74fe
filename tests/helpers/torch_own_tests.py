"""Tests of PyTorch's own: its class DistributedTest, on ranks that stay up from test to test.

Many of these tests are skipped for all backends but those that they name. What they name is widened
in a copy of the module's text, when a rank loads it; nothing else is changed.
"""

from __future__ import annotations

import importlib.util
import os
import random
import re
import sys
import unittest
import warnings
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

NAME = "torch.testing._internal.distributed.distributed_test"


def load(size: int, folder: str) -> ModuleType:
    """The module, as for a backend that it knows."""
    os.environ.update(BACKEND="pycoll", WORLD_SIZE=str(size), TEMP_DIR=folder)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    if NAME in sys.modules:
        return sys.modules[NAME]
    from torch.testing._internal.common_distributed import DistTestCases

    for feature in ("ddp", "subgroup", "plugin"):
        DistTestCases.backend_feature[feature].add("pycoll")
    spec = importlib.util.find_spec(NAME)
    assert spec is not None
    assert spec.origin is not None
    text = Path(spec.origin).read_text(encoding="utf-8")
    text = re.sub(r'BACKEND != ("gloo"|"mpi")', r'BACKEND not in (\1, "pycoll")', text)
    text = re.sub(r'BACKEND == "gloo"', r'BACKEND in ("gloo", "pycoll")', text)
    text = text.replace('available({"gloo"})', 'available({"gloo", "pycoll"})')
    module = sys.modules[NAME] = importlib.util.module_from_spec(spec)
    exec(compile(text, spec.origin, "exec", dont_inherit=True), vars(module))
    return module


def run_own_test(comm: Any, name: str, folder: str) -> str:
    """Run one test on this rank; returns "passed", or why it was skipped."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import numpy as np
        import torch
        import torch.distributed as dist

        for part in ("barrier", "test_dir"):
            Path(folder, part).mkdir(exist_ok=True)
        module = load(comm.size, folder)

        class Own(module.TestDistBackend, module.DistributedTest._DistTestBase):  # type: ignore
            def _barrier(self, *_: Any, **__: Any) -> None:
                comm.barrier()

        dist.init_process_group(
            "pycoll",
            init_method=f"file://{folder}/store",
            rank=comm.rank,
            world_size=comm.size,
            timeout=timedelta(seconds=module.default_pg_timeout),
        )
        try:
            test = Own(name)
            test.rank, test.file_name = comm.rank, f"{folder}/file"
            torch.manual_seed(1)
            np.random.seed(1)
            random.seed(1)
            comm.barrier()
            getattr(test, name)()
            comm.barrier()
            return "passed"
        except unittest.SkipTest as exc:
            return f"skipped: {exc}"
        except SystemExit as exc:
            return f"skipped: status {exc.code}"
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
