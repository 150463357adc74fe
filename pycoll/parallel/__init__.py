"""Training on many ranks: what programs of your own import, over any communicator of pycoll.

The pages in docs/parallel/ explain it, the programs in examples/parallel/ show it; there, to be
copied, are parameter servers, ring attention and experts, too. Arrays are NumPy's or PyTorch's.
Nothing here is imported, nor is PyTorch, until a name is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pycoll.parallel.buckets import *  # noqa: F403
    from pycoll.parallel.compression import *  # noqa: F403
    from pycoll.parallel.pipeline import *  # noqa: F403
    from pycoll.parallel.pipeline_proof import *  # noqa: F403
    from pycoll.parallel.pipeline_run import *  # noqa: F403
    from pycoll.parallel.tensor import *  # noqa: F403
    from pycoll.parallel.zero import *  # noqa: F403

_NAMES = {
    "buckets": "Buckets",
    "compression": "BFloat16 CompressedRequest Compressor ErrorFeedback Float16 Int8 OneBit"
    " PowerSGD TopK Uncompressed all_reduce iall_reduce",
    "pipeline": "Action PIPELINE_SCHEDULES PipelineSchedule",
    "pipeline_proof": "prove_pipeline",
    "pipeline_run": "PipelineRun TimedAction run_pipeline",
    "tensor": "bounds copy_to reduce_from column_linear row_linear",
    "zero": "ShardedOptimizer",
}
"""The public names by the file of this package that has them."""

_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
