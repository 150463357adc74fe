/* Reductions: out = in[0] op in[1] op ... in one pass, for every operator and dtype of pycoll.

   One kernel a pair of operator and dtype, compiled for three levels of processor
   (reduce_kernels.h) and chosen once. All levels give the same bits:

   - Operands combine from left to right. Integers wrap. Of two NaN the left one is the result of a
   sum or product, made quiet.
   - min is `a is NaN ? a : a < b ? a : b`, max the same with `a > b`: the first NaN wins and is
   kept as it is; of two equal operands (-0 and +0) the right one is the result.
   - A complex product is (ar br - ai bi, ar bi + ai br), each operation rounded.
   - float16 and bfloat16 are computed in float32 and rounded once, to nearest even, after the last
   operand (and the division of PC_AVG). A NaN keeps its sign and its upper bits and becomes quiet.
   - The floating-point environment of the caller changes nothing (float_environment.h).
   - One operand alone is copied; the logical operators still give 0 or 1, and PC_AVG divides. */
#ifndef PC_REDUCE_H
#define PC_REDUCE_H

#include "base/core.h"

/* module.c has their names. */
enum pc_operator {
    PC_SUM,
    PC_PROD,
    PC_MIN,
    PC_MAX,
    PC_AVG,
    PC_BAND,
    PC_BOR,
    PC_BXOR,
    PC_LAND,
    PC_LOR,
    PC_LXOR,
    PC_OPS
};

/* out[i] = in[0][i] op in[1][i] op ... op in[n-1][i], n >= 1; for PC_AVG divided by `divisor`,
   which the others ignore. `out` may be exactly one of in[] (any one, or several equal), else it is
   disjoint. Nothing need be aligned beyond the element's own alignment. Bool operands are 0 or
   1. */
typedef void (*pc_reduce_fn)(void *out, const void *const *in, int n, size_t count, int divisor);

/* The best kernel for this processor, or NULL: this operator does not take this dtype. */
pc_reduce_fn pc_reduce_find(int op, int dtype);

/* Bytes an element, 0: there is no such dtype. */
size_t pc_itemsize(int dtype);

/* Whether elements of this dtype may be read and written at an address. */
bool pc_is_aligned(int dtype, uintptr_t address);

/* Forces a level: 0 any processor, 1 AVX2 and F16C, 2 AVX-512; -1 the best. Returns the level now
   in force, or -1 and changes nothing: this processor does not have it. For tests. */
int pc_reduce_set_level(int level);

#endif
