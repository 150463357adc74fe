/* Between reduce.c and the kernels: the table that each level fills, and what needs no level.

   reduce_kernels.inc holds the kernels. reduce_any.c, reduce_avx2.c and reduce_avx512.c compile it
   once each. */
#ifndef PC_REDUCE_KERNELS_H
#define PC_REDUCE_KERNELS_H

#include "float_environment.h"
#include "reduce.h"

/* Codes of pycoll/_dtypes.py. */
enum pc_dtype {
    PC_BOOL = 1,
    PC_INT8,
    PC_INT16,
    PC_INT32,
    PC_INT64,
    PC_UINT8,
    PC_UINT16,
    PC_UINT32,
    PC_UINT64,
    PC_FLOAT16,
    PC_BFLOAT16,
    PC_FLOAT32,
    PC_FLOAT64,
    PC_COMPLEX64,
    PC_COMPLEX128,
    PC_DTYPES
};

typedef pc_reduce_fn pc_reduce_table[PC_OPS][PC_DTYPES];

/* 16-bit floats to float32 in place of them, or back, rounded to nearest even; disjoint memory. */
enum pc_conversion { PC_WIDEN, PC_NARROW, PC_CONVERSIONS };
typedef void (*pc_convert_fn)(void *out, const void *in, size_t count);
typedef pc_convert_fn pc_convert_table[PC_CONVERSIONS][PC_DTYPES];
pc_convert_fn pc_convert_find(bool narrows, int dtype); /* the best for this processor */

/* What is compiled for each level of processor. */
struct pc_kernels {
    pc_reduce_table reduce;
    pc_convert_table convert;
};

extern const struct pc_kernels pc_kernels_any;
/* GCC and Clang compile functions for another processor than the one that the file is for. */
#if defined(__x86_64__) && defined(__GNUC__)
#define PC_REDUCE_LEVELS
extern const struct pc_kernels pc_kernels_avx2, pc_kernels_avx512;
#endif

/* out[i] = a[i] op b[i]; `out` may be `a` or `b`. */
typedef void (*pc_pass_fn)(void *out, const void *a, const void *b, size_t count);
/* out[i] = a[i] / divisor. */
typedef void (*pc_divide_fn)(void *out, const void *a, size_t count, int divisor);

/* Combine n operands by passes over two, in blocks that stay in the L1 cache. */
void pc_reduce_chain(void *out, const void *const *in, int n, size_t count, size_t itemsize,
                     pc_pass_fn pass);
void pc_reduce_average(void *out, const void *const *in, int n, size_t count, size_t itemsize,
                       pc_pass_fn sum, pc_divide_fn divide, int divisor);

/* An operand either is `out` or is disjoint from it: no iteration of the loop that follows sees
   what another wrote. */
#ifdef __clang__
#define PC_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define PC_INDEPENDENT _Pragma("GCC ivdep")
#endif

/* 16-bit floats are widened, combined and narrowed so many at a time: a strip stays in vector
   registers. Where a value stands in a widened strip is the secret of the two functions that
   convert. */
#define PC_STRIP 64

static inline float pc_float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
static inline uint32_t pc_bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

#endif
