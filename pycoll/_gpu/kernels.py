"""The reductions on a GPU, as text that NVRTC compiles: one kernel for operator, dtype and ranks.

The bits are those of the core (`_core/reduce/reduce.h` says which): operands combine from left to
right, 16-bit floats in float32, rounded once. A GPU makes every NaN the same one; here the left
operand's is kept, as processors do: the text looks at each result that is NaN. It is C as well as
CUDA, so that the tests compile it for the processor, too.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Final

import numpy as np

from pycoll._dtypes import DType

OPERATORS: Final = frozenset(
    ("sum", "prod", "min", "max", "avg", "band", "bor", "bxor", "land", "lor", "lxor")
)

_OF_BYTES = {"band", "bor", "bxor"}
_LOGICAL = {"land", "lor", "lxor"}
_OF_BOOLS = {"sum": "bor", "prod": "band", "min": "band", "max": "bor"}
_OF_BOOLS |= {"land": "band", "lor": "bor", "lxor": "bxor"}
_WORDS = {1: "unsigned char", 2: "unsigned short", 4: "unsigned int", 8: "unsigned long long"}
_SIGNED = {1: "signed char", 2: "short", 4: "int", 8: "long long"}

NAME: Final = "pycoll_reduce"

_START = """
typedef unsigned char byte_t;
typedef unsigned short word16_t;
typedef unsigned int word32_t;
typedef unsigned long long word64_t;
#ifdef __CUDACC_RTC__
#define PC_KERNEL extern "C" __global__ void
#define PC_FUNCTION static __device__ __forceinline__
#define PC_FIRST (blockIdx.x * (word64_t)blockDim.x + threadIdx.x)
#define PC_STRIDE (gridDim.x * (word64_t)blockDim.x)
#define PC_UNROLL _Pragma("unroll")
#define PC_ALIGNED __align__(16)
#else
#define PC_KERNEL __attribute__((visibility("default"))) void
#define PC_FUNCTION static inline
#define PC_FIRST 0
#define PC_STRIDE 1
#define PC_UNROLL
#define PC_ALIGNED __attribute__((aligned(16)))
#endif

PC_FUNCTION word32_t bits_32(float value) {
    union { float value; word32_t bits; } both;
    both.value = value;
    return both.bits;
}
PC_FUNCTION float float_32(word32_t bits) {
    union { float value; word32_t bits; } both;
    both.bits = bits;
    return both.value;
}
PC_FUNCTION word64_t bits_64(double value) {
    union { double value; word64_t bits; } both;
    both.value = value;
    return both.bits;
}
PC_FUNCTION double float_64(word64_t bits) {
    union { double value; word64_t bits; } both;
    both.bits = bits;
    return both.value;
}
PC_FUNCTION int is_nan_32(float a) { return (bits_32(a) & 0x7fffffffu) > 0x7f800000u; }
PC_FUNCTION int is_nan_64(double a) {
    return (bits_64(a) & 0x7fffffffffffffffull) > 0x7ff0000000000000ull;
}

/* What a processor makes of a and b, where a GPU has made `result`. */
PC_FUNCTION float made_32(float result, float a, float b) {
    if (!is_nan_32(result))
        return result;
    if (is_nan_32(a))
        return float_32(bits_32(a) | 0x400000u);
    if (is_nan_32(b))
        return float_32(bits_32(b) | 0x400000u);
    return float_32(PC_NAN_32);
}
PC_FUNCTION double made_64(double result, double a, double b) {
    if (!is_nan_64(result))
        return result;
    if (is_nan_64(a))
        return float_64(bits_64(a) | 0x8000000000000ull);
    if (is_nan_64(b))
        return float_64(bits_64(b) | 0x8000000000000ull);
    return float_64(PC_NAN_64);
}
#define FLOATS(bits, type)                                                                  \\
    PC_FUNCTION type sum_##bits(type a, type b) { return made_##bits(a + b, a, b); }          \\
    PC_FUNCTION type less_##bits(type a, type b) { return made_##bits(a - b, a, b); }         \\
    PC_FUNCTION type prod_##bits(type a, type b) { return made_##bits(a * b, a, b); }         \\
    PC_FUNCTION type min_##bits(type a, type b) { return is_nan_##bits(a) || a < b ? a : b; } \\
    PC_FUNCTION type max_##bits(type a, type b) { return is_nan_##bits(a) || a > b ? a : b; } \\
    PC_FUNCTION type divide_##bits(type a, int by) {                                        \\
        type whole = (type)by;                                                              \\
        return made_##bits((by & (by - 1)) == 0 ? a * (1 / whole) : a / whole, a, a);       \\
    }
FLOATS(32, float)
FLOATS(64, double)

PC_FUNCTION float wide_bfloat16(word16_t half) { return float_32((word32_t)half << 16); }
PC_FUNCTION word16_t narrow_bfloat16(float wide) {
    word32_t bits = bits_32(wide);
    if (is_nan_32(wide))
        return (word16_t)((bits | 0x400000u) >> 16);
    return (word16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}
PC_FUNCTION float wide_float16(word16_t half) {
    word32_t rest = (half & 0x7fffu) << 13, exponent = rest & (0x1fu << 23);
    word32_t normal = rest + ((127u - 15u) << 23), sign = (half & 0x8000u) << 16;
    if (exponent == 0) /* a subnormal: a fraction, less the one that is implied */
        return float_32(bits_32(float_32(normal + (1u << 23)) - 6.103515625e-05f) | sign);
    if (exponent == 0x1fu << 23)
        normal += (128u - 16u) << 23;
    return float_32(normal | sign);
}
PC_FUNCTION word16_t narrow_float16(float wide) {
    word32_t sign = bits_32(wide) & 0x80000000u, rest = bits_32(wide) ^ sign, half;
    if (rest > 0x7f800000u)
        half = 0x7e00u | (rest >> 13 & 0x3ffu);
    else if (rest >= (127u + 16u) << 23)
        half = 0x7c00u;
    else if (rest < (127u - 14u) << 23) /* the last bit of the sum is worth 2^-24 */
        half = bits_32(float_32(rest) + 0.5f) - 0x3f000000u;
    else
        half = (rest - ((127u - 15u) << 23) + 0xfffu + (rest >> 13 & 1u)) >> 13;
    return (word16_t)(half | sign >> 16);
}
"""

_COMPLEX = """
typedef struct { part_t re, im; } element_t;
typedef element_t value_t;
PC_FUNCTION int is_true(element_t a) { return (a.re != 0) | (a.im != 0); }
PC_FUNCTION element_t truth(int is) {
    element_t made;
    made.re = (part_t)is;
    made.im = 0;
    return made;
}
PC_FUNCTION value_t widen(element_t a) { return a; }
PC_FUNCTION element_t narrow(value_t a) { return a; }
"""

_END = """
typedef struct PC_ALIGNED { element_t of[16 / sizeof(element_t)]; } pack_t;
typedef struct { const element_t *of[PC_RANKS]; } operands_t;
typedef struct { element_t *of[PC_RESULTS]; } results_t;

PC_FUNCTION element_t reduced(const element_t *operands, int divisor) {
    value_t total = widen(operands[0]);
    PC_UNROLL
    for (int k = 1; k < PC_RANKS; k++)
        total = combine(total, widen(operands[k]));
    return narrow(finish(total, divisor));
}

/* Every operand of an element is read before a result is written, which may be any of them. */
PC_KERNEL pycoll_reduce(results_t out, operands_t in, word64_t count, int divisor, int packed) {
    const int many = 16 / sizeof(element_t);
    word64_t first = PC_FIRST, stride = PC_STRIDE, packs = packed ? count / many : 0;
    element_t operands[PC_RANKS];
    for (word64_t at = first; at < packs; at += stride) {
        pack_t packs_in[PC_RANKS], made;
        PC_UNROLL
        for (int k = 0; k < PC_RANKS; k++)
            packs_in[k] = ((const pack_t *)in.of[k])[at];
        PC_UNROLL
        for (int i = 0; i < many; i++) {
            PC_UNROLL
            for (int k = 0; k < PC_RANKS; k++)
                operands[k] = packs_in[k].of[i];
            made.of[i] = reduced(operands, divisor);
        }
        PC_UNROLL
        for (int k = 0; k < PC_RESULTS; k++)
            ((pack_t *)out.of[k])[at] = made;
    }
    for (word64_t at = packs * many + first; at < count; at += stride) {
        PC_UNROLL
        for (int k = 0; k < PC_RANKS; k++)
            operands[k] = in.of[k][at];
        element_t made = reduced(operands, divisor);
        PC_UNROLL
        for (int k = 0; k < PC_RESULTS; k++)
            out.of[k][at] = made;
    }
}
"""


@functools.cache
def has(op: str, dtype: DType) -> bool:
    """Whether there is a kernel for an operator of pycoll's, by its name, and a dtype."""
    return op in OPERATORS and dtype.code > 0 and _body(op, dtype) != ""


def source(op: str, dtype: DType, ranks: int, results: int = 1) -> str:
    """Return the text of the kernel `NAME` for so many operands, and results, which are equal.

    Its arguments: the addresses of the results, those of the operands, the number of elements, what
    a result is divided by, and whether all addresses are multiples of 16.
    """
    settings = f"#define PC_RANKS {ranks}\n#define PC_RESULTS {results}\n"
    for bits, nan in zip((32, 64), _default_nans(), strict=True):
        settings += f"#define PC_NAN_{bits} {nan:#x}ull\n"
    return settings + _START + _body(op, dtype) + _END


@functools.cache
def _default_nans() -> Sequence[int]:
    """Return the NaN that this processor makes of numbers, as bits: of float32 and of float64."""
    with np.errstate(invalid="ignore"):
        made = [np.full(1, np.inf, kind) - np.full(1, np.inf, kind) for kind in ("f4", "f8")]
    return int(made[0].view("u4")[0]), int(made[1].view("u8")[0])


def _body(op: str, dtype: DType) -> str:
    """Return what tells kernels apart: types, `combine` and `finish`; "": there is no kernel."""
    family, size = dtype.family, dtype.itemsize
    if family == "b":
        op = _OF_BOOLS.get(op, op)
    if family in ("b", "i", "u"):
        return _of_integers(op, size, family == "i")
    if op in _OF_BYTES:
        return ""
    if family == "c":
        return _of_complex(op, size * 4)
    return _of_halves(op, dtype.name) if size == 2 else _of_floats(op, size * 8)


def _of_integers(op: str, size: int, is_signed: bool) -> str:
    word = _WORDS[size]
    ordered = _SIGNED[size] if is_signed else word
    results = {
        "sum": f"({word})(a + b)",
        "prod": f"({word})((word64_t)a * b)",
        "min": f"({ordered})a < ({ordered})b ? a : b",
        "max": f"({ordered})a > ({ordered})b ? a : b",
        "band": f"({word})(a & b)",
        "bor": f"({word})(a | b)",
        "bxor": f"({word})(a ^ b)",
        "land": "(a != 0) & (b != 0)",
        "lor": "(a != 0) | (b != 0)",
        "lxor": "(a != 0) ^ (b != 0)",
    }
    types = f"typedef {word} element_t;\ntypedef {word} value_t;\n"
    return _functions(types + _SAME, results.get(op))


def _of_floats(op: str, bits: int) -> str:
    kind = "float" if bits == 32 else "double"
    types = f"typedef {kind} element_t;\ntypedef {kind} value_t;\n"
    return _functions(types + _SAME, _float_result(op, bits), _division(op, bits))


def _of_halves(op: str, name: str) -> str:
    if op in _LOGICAL:
        one = "0x3c00" if name == "float16" else "0x3f80"
        truth = {"land": "&", "lor": "|", "lxor": "^"}[op]
        types = "typedef word16_t element_t;\ntypedef word16_t value_t;\n"
        result = f"(((a & 0x7fff) != 0) {truth} ((b & 0x7fff) != 0)) ? {one} : 0"
        return _functions(types + _SAME, result)
    types = "typedef word16_t element_t;\ntypedef float value_t;\n"
    types += f"PC_FUNCTION value_t widen(element_t a) {{ return wide_{name}(a); }}\n"
    types += f"PC_FUNCTION element_t narrow(value_t a) {{ return narrow_{name}(a); }}\n"
    return _functions(types, _float_result(op, 32), _division(op, 32))


def _of_complex(op: str, bits: int) -> str:
    part = "float" if bits == 32 else "double"
    both = "made.re = {}, made.im = {};"
    results = {
        "land": "made = truth(is_true(a) & is_true(b));",
        "lor": "made = truth(is_true(a) | is_true(b));",
        "lxor": "made = truth(is_true(a) ^ is_true(b));",
        "prod": both.format(
            f"less_{bits}(prod_{bits}(a.re, b.re), prod_{bits}(a.im, b.im))",
            f"sum_{bits}(prod_{bits}(a.re, b.im), prod_{bits}(a.im, b.re))",
        ),
    }
    results["sum"] = results["avg"] = both.format(
        f"sum_{bits}(a.re, b.re)", f"sum_{bits}(a.im, b.im)"
    )
    if op not in results:
        return ""
    divided = both.format(f"divide_{bits}(a.re, by)", f"divide_{bits}(a.im, by)")
    finish = divided if op == "avg" else "(void)by; made = a;"
    return (
        f"typedef {part} part_t;\n{_COMPLEX}"
        f"PC_FUNCTION value_t combine(value_t a, value_t b) "
        f"{{ value_t made; {results[op]} return made; }}\n"
        f"PC_FUNCTION value_t finish(value_t a, int by) {{ value_t made; {finish} return made; }}\n"
    )


_SAME = """PC_FUNCTION value_t widen(element_t a) { return a; }
PC_FUNCTION element_t narrow(value_t a) { return a; }
"""


def _float_result(op: str, bits: int) -> str | None:
    if op in _LOGICAL:
        return f"(a != 0) { ({'land': '&', 'lor': '|', 'lxor': '^'}[op]) } (b != 0)"
    return None if op in _OF_BYTES else f"{'sum' if op == 'avg' else op}_{bits}(a, b)"


def _division(op: str, bits: int) -> str:
    return f"divide_{bits}(a, by)" if op == "avg" else "a"


def _functions(types: str, result: str | None, finish: str = "a") -> str:
    if result is None:
        return ""
    return (
        f"{types}"
        f"PC_FUNCTION value_t combine(value_t a, value_t b) {{ return {result}; }}\n"
        f"PC_FUNCTION value_t finish(value_t a, int by) {{ (void)by; return {finish}; }}\n"
    )
