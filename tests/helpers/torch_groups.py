"""Process groups of torch.distributed on the ranks of a pool."""

from __future__ import annotations

import contextlib
import tempfile
import uuid
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from patience import PATIENCE

LIMIT = timedelta(seconds=30 * PATIENCE)


@contextlib.contextmanager
def process_group(comm: Any, backend: str = "pycoll", timeout: timedelta = LIMIT) -> Iterator[Any]:
    """torch.distributed with a default group of all ranks; gives the module."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's, of what PyTorch itself calls
        import torch.distributed as dist

        file = Path(tempfile.gettempdir()) / comm.broadcast(f"store-{uuid.uuid4().hex}")
        dist.init_process_group(
            backend,
            init_method=f"file://{file}",
            rank=comm.rank,
            world_size=comm.size,
            timeout=timeout,
        )
        try:
            yield dist
        finally:
            dist.destroy_process_group()
            file.unlink(missing_ok=True)
