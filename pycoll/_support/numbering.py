"""Collectives and operators, as the compiled core numbers them."""

from __future__ import annotations

KINDS = (
    "barrier",
    "broadcast",
    "reduce",
    "all_reduce",
    "gather",
    "all_gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
    "scan",
    "exscan",
)
"""Collectives, numbered as in transports/_core/python/arguments/kinds.h."""

UNEVEN = ("gatherv", "all_gatherv", "scatterv", "all_to_allv")
"""Collectives of blocks that differ in shape."""

METHODS = (*KINDS, "reduce_scatterv", *UNEVEN)
"""The core's methods of a communicator, numbered as in kinds.h, too."""

OPS = ("sum", "prod", "min", "max", "avg", "band", "bor", "bxor", "land", "lor", "lxor")
"""Operators, numbered as in transports/_core/reduce/reduce.h."""

# "uneven" and "ints" also in transports/_core/python/exchange/comm.h
PARTS = ("", "uneven", "many", "group", "operator", "ints")
"""What a call in the core may be a part of: nothing, or a program's call that needs several."""
