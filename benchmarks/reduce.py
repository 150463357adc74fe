#!/usr/bin/env python3
"""Times the core's sums in the L2 cache: GB/s (operands and result) and ns an element.

    benchmarks/reduce.py [OP] [--kib 512] [--level 0|1|2]

`--kib`: all operands and the result together. `ratio`: the time an element, by that of float32.
`--level`: 0 any processor, 1 AVX2 and F16C, 2 AVX-512; the best this one has.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np

from pycoll import _dtypes as dtypes
from pycoll._arrays import operators
from pycoll._dtypes import BFLOAT16, FLOAT32, DType
from pycoll._transports._core import reduce, reduce_level

REPEATS = 30
BATCH_S = 2e-3


def best_time(call: Callable[[], None]) -> float:
    """Return the seconds one call takes: the best of several batches of `BATCH_S` seconds."""
    call()
    begin = time.perf_counter()
    call()
    calls = max(1, int(BATCH_S / (time.perf_counter() - begin)))
    best = float("inf")
    for _ in range(REPEATS):
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - begin) / calls)
    return best


def time_an_element(op: str, dtype: DType, n: int, nbytes: int) -> float:
    """Return the seconds an element takes when n operands and the result fill `nbytes` bytes."""
    count = nbytes // ((n + 1) * dtype.itemsize)
    one = 0x3F80 if dtype is BFLOAT16 else 1
    out, *operands = (np.full(count, one, dtype.storage) for _ in range(n + 1))
    code = operators.NAMES.index(op)
    return best_time(lambda: reduce(code, dtype.code, out, operands, n)) / count


def takes(op: str, dtype: DType) -> bool:
    """Return whether the operator works on this dtype."""
    try:
        operators.check(operators.resolve(op), dtype)
    except TypeError:
        return False
    return True


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("op", nargs="?", default="sum", choices=operators.NAMES[:-2])
    parser.add_argument("--kib", type=int, default=512, help="all operands and the result together")
    parser.add_argument("--level", type=int, default=-1, choices=(-1, 0, 1, 2))
    options = parser.parse_args()
    level = reduce_level(options.level)
    if level < 0:
        parser.error(f"this processor has no level {options.level}")
    print(f"{options.op}, {options.kib} KiB in all, level {level}")
    print(f"{'dtype':>12}  n    GB/s  ns/element  ratio")
    for n in (2, 4):
        taken = {
            dtype: time_an_element(options.op, dtype, n, options.kib << 10)
            for dtype in dtypes.TABLE
            if takes(options.op, dtype)
        }
        usual = taken.get(FLOAT32, float("nan"))
        for dtype, seconds in taken.items():
            rate = (n + 1) * dtype.itemsize / seconds / 1e9
            ratio = seconds / usual
            print(f"{dtype!s:>12}  {n}  {rate:6.1f}  {seconds * 1e9:10.4f}  {ratio:5.2f}")


if __name__ == "__main__":
    main()
