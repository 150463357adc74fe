"""The kernels' text, compiled for the processor, gives the core's bits: every operator and dtype.

Tests in test_gpu_reductions.py run the same text on a GPU.
"""

from __future__ import annotations

import ctypes
import itertools
import subprocess
from typing import Any

import numpy as np
import pytest
from kernel_cases import CASES, operands

from pycoll import _dtypes as dtypes
from pycoll._cuda import programs
from pycoll._gpu import kernels
from pycoll._transports._core import OPS, reduce

Array = np.ndarray[Any, Any]
RANKS = (3,)
FLAGS = ("-std=c11", "-O0", "-shared", "-fPIC", "-fno-strict-aliasing", "-ffp-contract=off", "-w")


NAMES = [
    "element_t",
    "value_t",
    "part_t",
    "pack_t",
    "operands_t",
    "results_t",
    "is_true",
    "truth",
    "widen",
    "narrow",
]
NAMES += [
    "narrow",
    "combine",
    "finish",
    "reduced",
    "PC_RANKS",
    "PC_RESULTS",
    "PC_NAN_32",
    "PC_NAN_64",
]
"""What each text defines for itself."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """All kernels in one library, each under a name of its own."""
    folder = tmp_path_factory.mktemp("kernels")
    texts = []
    for op, dtype, ranks in CASES_OF_RANKS:
        text = kernels.source(op, dtype, ranks)
        mine = f"{op}_{dtype.name}_{ranks}"
        renamed = [f"#undef {name}\n#define {name} {name}_{mine}\n" for name in NAMES[:6]]
        forgotten = [f"#undef {name}\n" for name in NAMES]
        renamed += [f"#define {name} {name}_{mine}\n" for name in NAMES[6:-4]]
        settings, rest = text.split(kernels._START)
        texts += [*forgotten, settings, kernels._START if not texts else "", *renamed]
        texts += [f"#undef {kernels.NAME}\n#define {kernels.NAME} {kernels.NAME}_{mine}\n", rest]
    path, made = folder / "kernels.c", folder / "kernels.so"
    path.write_text("".join(texts))
    subprocess.run(["gcc", *FLAGS, "-o", made, path], check=True)
    return ctypes.CDLL(str(made))


CASES_OF_RANKS = [(*case, ranks) for case, ranks in itertools.product(CASES, RANKS)]


def run(library: ctypes.CDLL, op: str, dtype: dtypes.DType, xs: list[Array], at: int) -> Array:
    """Reduce operands that begin so many bytes behind a multiple of 16."""

    class Operands(ctypes.Structure):
        _fields_ = (("of", ctypes.c_void_p * len(xs)),)

    class Result(ctypes.Structure):
        _fields_ = (("of", ctypes.c_void_p),)

    kept = [np.zeros(x.nbytes + 32, np.uint8) for x in (*xs, xs[0])]
    places = []
    for block, x in zip(kept, (*xs, None), strict=True):
        begin = -block.ctypes.data % 16 + at
        view = block[begin : begin + xs[0].nbytes]
        if x is not None:
            view[:] = x.view(np.uint8)
        places.append(view)
    function = getattr(library, f"{kernels.NAME}_{op}_{dtype.name}_{len(xs)}")
    addresses = Operands((ctypes.c_void_p * len(xs))(*[p.ctypes.data for p in places[:-1]]))
    function.argtypes = [
        Result,
        Operands,
        ctypes.c_uint64,
        ctypes.c_int,
        ctypes.c_int,
    ]
    function.restype = None
    count = xs[0].size
    function(Result(places[-1].ctypes.data), addresses, count, len(xs), int(at == 0))
    return places[-1].copy()


@pytest.mark.parametrize(("op", "dtype"), CASES, ids=[f"{op}-{dtype.name}" for op, dtype in CASES])
def test_a_kernel_gives_the_bits_of_the_core(
    library: ctypes.CDLL, op: str, dtype: dtypes.DType
) -> None:
    for ranks in RANKS:
        xs = operands(dtype, ranks)
        wanted = np.empty_like(xs[0])
        reduce(OPS.index(op), dtype.code, wanted, xs, ranks)
        for at in (0, dtype.itemsize):
            got = run(library, op, dtype, xs, at).view(wanted.dtype)
            same = got.view(np.uint8).reshape(-1, dtype.itemsize) == wanted.view(np.uint8).reshape(
                -1, dtype.itemsize
            )
            bad = np.flatnonzero(~same.all(axis=1))
            shown = [[x[i] for x in xs] + [got[i], wanted[i]] for i in bad[:4]]
            assert not len(bad), (ranks, at, len(bad), shown)


def test_there_is_a_kernel_for_just_what_the_core_reduces() -> None:
    for op, dtype in itertools.product(OPS, dtypes.TABLE):
        x = np.zeros(1, dtype.storage)
        try:
            reduce(OPS.index(op), dtype.code, np.empty_like(x), [x, x], 2)
        except ValueError:
            assert not kernels.has(op, dtype), (op, dtype)
        else:
            assert kernels.has(op, dtype), (op, dtype)
    assert not kernels.has("minloc", dtypes.FLOAT32)


@pytest.mark.exhaustive
@pytest.mark.parametrize("capability", [75, 80, 90, 999])
def test_nvrtc_compiles_every_kernel(capability: int) -> None:
    """Needs no GPU, but NVIDIA's compiler: pip install nvidia-cuda-nvrtc."""
    if programs.why_not() is not None:
        pytest.skip(programs.why_not() or "")
    for op, dtype in CASES:
        image = programs.compiled(kernels.source(op, dtype, 4, 4), capability)
        assert image.startswith(b"\x7fELF" if capability < 999 else b"//"), (op, dtype)
