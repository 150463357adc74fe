/* Reductions: choice of the level, and chains of more than two operands. */
#include "base/copy.h"
#include "float_environment.h"
#include "reduce.h"
#include "reduce_kernels.h"

/* Bytes of a block. 4 KiB of partial results and as much of an operand are a quarter of a small L1
   cache. */
#define BLOCK ((size_t)4096)

static const size_t itemsizes[PC_DTYPES] = {
    [PC_BOOL] = 1,   [PC_INT8] = 1,    [PC_INT16] = 2,    [PC_INT32] = 4,   [PC_INT64] = 8,
    [PC_UINT8] = 1,  [PC_UINT16] = 2,  [PC_UINT32] = 4,   [PC_UINT64] = 8,  [PC_FLOAT16] = 2,
    [PC_BFLOAT16] = 2, [PC_FLOAT32] = 4, [PC_FLOAT64] = 8, [PC_COMPLEX64] = 8, [PC_COMPLEX128] = 16,
};

size_t pc_itemsize(int dtype) { return dtype > 0 && dtype < PC_DTYPES ? itemsizes[dtype] : 0; }

bool pc_is_aligned(int dtype, uintptr_t address) {
    bool is_complex = dtype == PC_COMPLEX64 || dtype == PC_COMPLEX128;
    size_t alignment = is_complex ? pc_itemsize(dtype) / 2 : pc_itemsize(dtype);
    return alignment == 0 || address % alignment == 0;
}

/* ---------------------------------------------------------------- levels */

static const struct pc_kernels *const levels[] = {
    &pc_kernels_any,
#ifdef PC_REDUCE_LEVELS
    &pc_kernels_avx2,
    &pc_kernels_avx512,
#endif
};

static int best_level(void) {
#ifdef PC_REDUCE_LEVELS
    return pc_processor_level();
#else
    return 0;
#endif
}

static _Atomic(const struct pc_kernels *) chosen;

static const struct pc_kernels *kernels(void) {
    const struct pc_kernels *table = atomic_load_explicit(&chosen, memory_order_relaxed);
    if (PC_UNLIKELY(!table)) {
        table = levels[best_level()];
        atomic_store_explicit(&chosen, table, memory_order_relaxed);
    }
    return table;
}

pc_reduce_fn pc_reduce_find(int op, int dtype) {
    if (op < 0 || op >= PC_OPS || pc_itemsize(dtype) == 0)
        return NULL;
    return kernels()->reduce[op][dtype];
}

pc_convert_fn pc_convert_find(bool narrows, int dtype) {
    return kernels()->convert[narrows ? PC_NARROW : PC_WIDEN][dtype];
}

int pc_reduce_set_level(int level) {
    int best = best_level();
    if (level > best || level < -1)
        return -1;
    if (level == -1)
        level = best;
    atomic_store_explicit(&chosen, levels[level], memory_order_relaxed);
    return level;
}

/* ---------------------------------------------------------------- more than two operands */

/* Combine `count` elements from byte `offset` on. Results are partial until the last pass, which
   alone writes to `out`: by then every operand of this block that `out` may be has been read. */
static void combine_block(void *out, void *partial, const void *const *in, int n, size_t offset,
                          size_t count, pc_pass_fn pass) {
    const void *left = (const char *)in[0] + offset;
    for (int k = 1; k < n; k++) {
        void *to = k == n - 1 ? out : partial;
        pass(to, left, (const char *)in[k] + offset, count);
        left = to;
    }
}

void pc_reduce_chain(void *out, const void *const *in, int n, size_t count, size_t itemsize,
                     pc_pass_fn pass) {
    if (n == 2) {
        pass(out, in[0], in[1], count);
        return;
    }
    if (n == 1) {
        if (out != in[0])
            /* memcpy is slow on some processors: see copy.c */
            pc_copy(out, in[0], count * itemsize);
        return;
    }
    _Alignas(PC_LINE) char partial[BLOCK];
    size_t nbytes = count * itemsize;
    for (size_t offset = 0; offset < nbytes; offset += BLOCK) {
        size_t length = nbytes - offset < BLOCK ? nbytes - offset : BLOCK;
        combine_block((char *)out + offset, partial, in, n, offset, length / itemsize, pass);
    }
}

void pc_reduce_average(void *out, const void *const *in, int n, size_t count, size_t itemsize,
                       pc_pass_fn sum, pc_divide_fn divide, int divisor) {
    _Alignas(PC_LINE) char partial[BLOCK];
    size_t nbytes = count * itemsize;
    for (size_t offset = 0; offset < nbytes; offset += BLOCK) {
        size_t length = nbytes - offset < BLOCK ? nbytes - offset : BLOCK;
        combine_block(partial, partial, in, n, offset, length / itemsize, sum);
        const void *total = n == 1 ? (const char *)in[0] + offset : partial;
        divide((char *)out + offset, total, length / itemsize, divisor);
    }
}
