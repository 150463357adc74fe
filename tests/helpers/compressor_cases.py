"""One compressor of each kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pycoll.parallel import compression as c

KINDS: dict[str, Callable[[], Any]] = {
    "float16": c.Float16,
    "bfloat16": c.BFloat16,
    "topk": lambda: c.TopK(0.1),
    "int8": lambda: c.Int8(block=16),
    "onebit": lambda: c.OneBit(block=16),
    "powersgd": lambda: c.PowerSGD(2),
    "uncompressed": c.Uncompressed,
}
