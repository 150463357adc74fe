"""Calls of the fake CUDA driver."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fake_cuda
import pytest
from patience import PATIENCE

if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
    pytest.skip("cuda-bindings is not installed", allow_module_level=True)

from cuda.bindings import driver

R = driver.CUresult


OK, NOT_READY, ILLEGAL = R.CUDA_SUCCESS, R.CUDA_ERROR_NOT_READY, R.CUDA_ERROR_ILLEGAL_ADDRESS


NBYTES = 1024


HELPERS = Path(__file__).parent


def value(result: Any) -> Any:
    assert result[0] == OK
    return result[1]


def check(result: Any) -> None:
    assert result == (OK,)


def device_memory(data: bytes = bytes(NBYTES)) -> int:
    pointer = value(driver.cuMemAlloc(len(data)))
    fake_cuda.poke(pointer, data)
    return int(pointer)


IMPORTS = """
import ctypes, os, sys, fake_cuda
from cuda.bindings import driver
"""


START = f"""{IMPORTS}
driver.cuInit(0)
driver.cuCtxPushCurrent(driver.cuDevicePrimaryCtxRetain(0)[1])
"""


def python(library: Path, program: str, **options: Any) -> subprocess.CompletedProcess[str]:
    prologue = START if options.pop("start", True) else IMPORTS
    environment = os.environ | {"PYTHONPATH": str(HELPERS)} | options.pop("environ", {})
    environment |= fake_cuda.environment(library, **options)
    return subprocess.run(
        [sys.executable, "-c", prologue + program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60 * PATIENCE,
    )
