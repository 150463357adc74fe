/* Arguments of the collectives' methods: looked at, not converted. */
#ifndef PC_COLLECTIVE_CALL_H
#define PC_COLLECTIVE_CALL_H

#include "arrays.h"
#include "kinds.h"
#include "memory.h"
#include "parameters.h"
#include "reduce/reduce.h"

extern PyObject *pc_op_names[PC_OPS]; /* interned */

/* The parameters of each method, as `parse` takes them. */
#define OTHERS -1, TIMEOUT, ALGORITHM, -1
static const signed char parameters[PC_METHODS][8] = {
    [PC_BARRIER] = {OTHERS},
    [PC_BROADCAST] = {X, ROOT, OTHERS},
    [PC_REDUCE] = {X, OP, ROOT, OUT, OTHERS},
    [PC_ALL_REDUCE] = {X, OP, OUT, OTHERS},
    [PC_GATHER] = {X, ROOT, OUT, OTHERS},
    [PC_ALL_GATHER] = {X, OUT, OTHERS},
    [PC_SCATTER] = {X, ROOT, OUT, OTHERS},
    [PC_REDUCE_SCATTER] = {X, OP, OUT, OTHERS},
    [PC_ALL_TO_ALL] = {X, OUT, OTHERS},
    [PC_SCAN] = {X, OP, OUT, OTHERS},
    [PC_EXSCAN] = {X, OP, OUT, OTHERS},
    [PC_REDUCE_SCATTERV] = {X, COUNTS, OP, OUT, OTHERS},
    [PC_ALL_REDUCE_MANY] = {XS, OP, OUT, OTHERS},
    [PC_GATHERV] = {X, ROOT, OUT, -1, TIMEOUT, -1},
    [PC_ALL_GATHERV] = {X, OUT, -1, TIMEOUT, -1},
    [PC_SCATTERV] = {XS, ROOT, OUT, -1, TIMEOUT, -1},
    [PC_ALL_TO_ALLV] = {XS, OUT, -1, TIMEOUT, -1},
};

static inline int find_op(PyObject *op) {
    return op == NULL ? PC_SUM : find_name(op, pc_op_names, PC_OPS);
}

static inline int find_root(PyObject *root, int size) {
    long value = root == NULL ? 0 : small_int(root, 0, -1);
    return value < size ? (int)value : -1;
}

/* What moves the values of a call. Those that a function is to reduce are gathered, and Python
   combines them: then FUNCTION is (salt, signature, combine), and the signature the ALGORITHM. */
static inline int pc_moves_for(int kind, PyObject *const *values) {
    if (PC_LIKELY(values[FUNCTION] == NULL))
        return kind;
    return kind == PC_REDUCE           ? PC_GATHER
           : kind == PC_REDUCE_SCATTER ? PC_ALL_TO_ALL
                                       : PC_ALL_GATHER;
}

static inline bool dims_equal(int ndim, const intptr_t *one, const intptr_t *two) {
    for (int axis = 0; axis < ndim; axis++)
        if (one[axis] != two[axis])
            return false;
    return true;
}

/* The result has x's shape with `size` in front (1), x's shape (0), or x's without its first axis
   (-1). */
static inline int shape_change(int kind) {
    switch (kind) {
    case PC_GATHER:
    case PC_ALL_GATHER: return 1;
    case PC_REDUCE_SCATTER:
    case PC_SCATTER: return -1;
    default: return 0;
    }
}

/* Whether `out` may be the result: shape, dtype, writeable, and no overlap but the in-place
   forms. */
static inline bool out_fits(int size, int rank, int kind, const struct pc_array *x,
                            const struct pc_array *out) {
    int change = shape_change(kind);
    if (!out->writeable || out->dtype != x->dtype || out->ndim != x->ndim + change)
        return false;
    if (change > 0 && (out->dims[0] != size || !dims_equal(x->ndim, out->dims + 1, x->dims)))
        return false;
    if (change < 0 && !dims_equal(out->ndim, out->dims, x->dims + 1))
        return false;
    if (change == 0 && !dims_equal(x->ndim, out->dims, x->dims))
        return false;
    const char *a = x->data, *b = out->data;
    if (a + x->nbytes <= b || b + out->nbytes <= a)
        return true;
    switch (kind) {
    case PC_REDUCE:
    case PC_ALL_REDUCE: return a == b;
    case PC_ALL_GATHER: return a == b + (size_t)rank * x->nbytes;
    case PC_REDUCE_SCATTER: return b == a + (size_t)rank * out->nbytes;
    default: return false;
    }
}

/* Whether a broadcast fills nothing: off root a program often passes what it has. */
static inline bool is_not_filled(PyObject *x) {
    return is_none(x) || PyLong_CheckExact(x) || PyFloat_CheckExact(x) || PyUnicode_CheckExact(x) ||
           PyBool_Check(x) || PyDict_CheckExact(x) || PyList_CheckExact(x) ||
           PyTuple_CheckExact(x) || pc_is_numpy_scalar(x);
}

/* What a call takes: an array, or a number to be reduced. */
static inline int value_of(int kind, int op, PyObject *x, struct pc_array *value) {
    bool is_scan = kind == PC_SCAN || kind == PC_EXSCAN;
    return is_scan || kind == PC_ALL_REDUCE || kind == PC_REDUCE
               ? pc_operand_of(x, op, is_scan, value)
               : pc_memory_of(x, value);
}

/* The ranks, from 0 on, whose values the result combines. */
static inline int num_combined(int size, int rank, int kind) {
    return kind == PC_SCAN ? rank + 1 : kind == PC_EXSCAN ? rank : size;
}

/* Whether nothing is written here: the result is None. */
static inline bool has_no_result(int rank, int kind, int root) {
    return kind == PC_BARRIER || ((kind == PC_REDUCE || kind == PC_GATHER) && rank != root) ||
           (kind == PC_EXSCAN && rank == 0);
}

/* The result of a call that is not announced (new reference): `out`, a new array, or None, also for
   a number, which is made at the end. `to` says where it is written, and must be released. NULL,
   perhaps without an exception: leave it to Python. */
static inline PyObject *result_for(int size, int rank, int kind, PyObject **values,
                                   const struct pc_array *x, int root, struct pc_array *to) {
    bool has_none = has_no_result(rank, kind, root), is_int = pc_is_int(x);
    to->held.obj = NULL;
    to->data = NULL;
    if (!is_none(values[OUT]) && (!has_none || kind == PC_EXSCAN)) {
        if (is_int)
            return NULL; /* is the result one of 64 bits? */
        if (values[OUT] == values[X] ? !pc_target_again(values[OUT], x, to)
                                     : !pc_target_of(values[OUT], to))
            return NULL;
        if (out_fits(size, rank, kind, x, to) &&
            (has_none || pc_tell_written(to, values[OUT]) == 0))
            return Py_NewRef(has_none ? Py_None : values[OUT]);
        pc_memory_release(to);
        return NULL;
    }
    if (has_none && !is_int) /* all ranks learn whether all ints fit */
        return Py_NewRef(Py_None);
    if (pc_is_number(x)) {
        to->data = &to->number;
        return Py_NewRef(Py_None);
    }
    int change = shape_change(kind);
    return pc_memory_new(x, values[X], change > 0 ? size : change, to);
}

/* Read the counts of a reduce_scatterv: rows before each rank's, and all rows. Whether they are a
   list or tuple of ints which add up to `num_rows`. */
static inline bool read_counts(PyObject *counts, int size, size_t num_rows, size_t *begins) {
    bool is_list = PyList_CheckExact(counts);
    if (!is_list && !PyTuple_CheckExact(counts))
        return false;
    if ((is_list ? PyList_Size(counts) : PyTuple_Size(counts)) != size)
        return false;
    begins[0] = 0;
    for (int rank = 0; rank < size; rank++) {
        PyObject *item = is_list ? PyList_GetItem(counts, rank) : PyTuple_GetItem(counts, rank);
        int overflow;
        long long count =
            PyLong_CheckExact(item) ? PyLong_AsLongLongAndOverflow(item, &overflow) : -1;
        if (count < 0 || (unsigned long long)count > num_rows - begins[rank])
            return false;
        begins[rank + 1] = begins[rank] + (size_t)count;
    }
    return begins[size] == num_rows;
}

/* The result of a reduce_scatterv, as of `result_for`. */
static inline PyObject *rows_for(int rank, PyObject **values, const struct pc_array *x,
                                 const size_t *begins, struct pc_array *to) {
    intptr_t dims[PC_DESCRIBED_DIMS];
    size_t row_nbytes = x->dims[0] > 0 ? x->nbytes / (size_t)x->dims[0] : 0;
    if (x->ndim > PC_DESCRIBED_DIMS)
        return NULL;
    memcpy(dims, x->dims, (size_t)x->ndim * sizeof *dims);
    dims[0] = (intptr_t)(begins[rank + 1] - begins[rank]);
    if (is_none(values[OUT]))
        return pc_memory_empty(x->library, x->format, x->dtype, x->ndim, dims, to);
    if (!pc_target_of(values[OUT], to))
        return NULL;
    const char *a = x->data, *b = to->data, *mine = a + begins[rank] * row_nbytes;
    if (to->writeable && to->dtype == x->dtype && to->ndim == x->ndim &&
        dims_equal(x->ndim, to->dims, dims) &&
        (a + x->nbytes <= b || b + to->nbytes <= a || b == mine) &&
        pc_tell_written(to, values[OUT]) == 0)
        return Py_NewRef(values[OUT]);
    pc_memory_release(to);
    return NULL;
}

#endif
