/* Arguments of the collectives' methods: looked at, not converted. */
#ifndef PC_COLLECTIVE_CALL_H
#define PC_COLLECTIVE_CALL_H

#include "python/base/py.h"

#include "arrays.h"
#include "kinds.h"
#include "memory.h"
#include "reduce/reduce.h"

#include <string.h>

enum argument { X, OP, ROOT, OUT, ALGORITHM, TIMEOUT, COUNTS, XS, ARGUMENTS };

extern PyObject *pc_argument_names[ARGUMENTS], *pc_op_names[PC_OPS]; /* interned */

/* The positional parameters of each method, in order. */
static const signed char positional[PC_METHODS][5] = {
    [PC_BARRIER] = {-1},
    [PC_BROADCAST] = {X, ROOT, -1},
    [PC_REDUCE] = {X, OP, ROOT, OUT, -1},
    [PC_ALL_REDUCE] = {X, OP, OUT, -1},
    [PC_GATHER] = {X, ROOT, OUT, -1},
    [PC_ALL_GATHER] = {X, OUT, -1},
    [PC_SCATTER] = {X, ROOT, OUT, -1},
    [PC_REDUCE_SCATTER] = {X, OP, OUT, -1},
    [PC_ALL_TO_ALL] = {X, OUT, -1},
    [PC_SCAN] = {X, OP, OUT, -1},
    [PC_EXSCAN] = {X, OP, OUT, -1},
    [PC_REDUCE_SCATTERV] = {X, COUNTS, OP, OUT, -1},
    [PC_GATHERV] = {X, ROOT, OUT, -1},
    [PC_ALL_GATHERV] = {X, OUT, -1},
    [PC_SCATTERV] = {XS, ROOT, OUT, -1},
    [PC_ALL_TO_ALLV] = {XS, OUT, -1},
};

/* The index of a name, or -1. What stands in a program is interned; a name made while it runs is
   not. */
static inline int find_name(PyObject *name, PyObject *const *names, int count) {
    for (int index = 0; index < count; index++)
        if (names[index] == name)
            return index;
    for (int index = 0; PyUnicode_CheckExact(name) && index < count; index++)
        if (PyUnicode_Compare(names[index], name) == 0)
            return index;
    return -1;
}

/* Whether a method has this parameter. */
static inline bool has_parameter(int method, int which) {
    const signed char *order = positional[method];
    while (*order >= 0 && *order != which)
        order++;
    return *order == which || which == TIMEOUT || (which == ALGORITHM && method < PC_GATHERV);
}

/* Sort the arguments; false: leave it to Python, also to say what is wrong with them. */
static inline bool parse(int kind, PyObject *const *args, Py_ssize_t count, PyObject *keywords,
                         PyObject **values) {
    const signed char *order = positional[kind];
    for (Py_ssize_t index = 0; index < count; index++) {
        if (order[index] < 0)
            return false;
        values[(int)order[index]] = args[index];
    }
    if (keywords == NULL)
        return true;
    Py_ssize_t num_keywords = PyTuple_Size(keywords);
    for (Py_ssize_t index = 0; index < num_keywords; index++) {
        PyObject *keyword = PyTuple_GetItem(keywords, index);
        int which = find_name(keyword, pc_argument_names, ARGUMENTS);
        if (which < 0 || values[which] != NULL || !has_parameter(kind, which))
            return false;
        values[which] = args[count + index];
    }
    return true;
}

static inline int find_op(PyObject *op) {
    return op == NULL ? PC_SUM : find_name(op, pc_op_names, PC_OPS);
}

static inline int find_root(PyObject *root, int size) {
    if (root == NULL)
        return 0;
    if (!PyLong_CheckExact(root))
        return -1;
    int overflow;
    long value = PyLong_AsLongAndOverflow(root, &overflow);
    return overflow == 0 && value >= 0 && value < size ? (int)value : -1;
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

static inline bool is_none(PyObject *value) { return value == NULL || value == Py_None; }

/* What a call takes: an array, or a number to be reduced. */
static inline int value_of(int kind, int op, PyObject *x, struct pc_array *value) {
    bool is_in_all_reduce = kind == PC_ALL_REDUCE || kind == PC_REDUCE;
    return pc_reduces(kind) && kind != PC_REDUCE_SCATTER
               ? pc_operand_of(x, is_in_all_reduce ? op : -1, value)
               : pc_memory_of(x, value);
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

#endif
