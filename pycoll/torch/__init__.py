"""pycoll as a backend of torch.distributed: ``dist.init_process_group("pycoll")``.

PyTorch finds the backend by itself where pycoll is installed. Where that is turned off
(``TORCH_DEVICE_BACKEND_AUTOLOAD=0``), ``import pycoll.torch`` makes it known. DDP, FSDP and
whatever else uses torch.distributed run on it; docs/torch.md says how, and what differs from gloo.
"""

from __future__ import annotations

from typing import Any

__all__ = ["register"]


def register() -> None:
    """Make the backend known to torch.distributed, unless it is: the import does so, too."""
    from torch import distributed

    if distributed.is_available() and not hasattr(distributed.Backend, "PYCOLL"):
        devices = ["cpu", "cuda"]
        distributed.Backend.register_backend("pycoll", _make, extended_api=True, devices=devices)


def _make(opts: Any, _: Any) -> Any:
    """Make a process group, as torch.distributed asks for it."""
    from pycoll.torch import _group  # not sooner: most programs that import PyTorch need no group

    return _group.make(opts)


try:
    import torch  # noqa: F401  # calls `register`, unless that is turned off: so it comes here
except ImportError as exc:
    raise ImportError("pycoll.torch needs PyTorch: pip install torch") from exc
register()
