/* The parameters of the methods: arguments are sorted, not converted. */
#ifndef PC_PARAMETERS_H
#define PC_PARAMETERS_H

#include "python/base/py.h"

enum argument {
    X, OP, ROOT, OUT, ALGORITHM, TIMEOUT, COUNTS, XS, /* of collectives */
    DEST, SOURCE, TAG, STATUS, SENDTAG, RECVTAG, /* of point to point, with some of them */
    FUNCTION, /* no argument: see `pc_moves_for` */
    ARGUMENTS
};

extern PyObject *pc_argument_names[ARGUMENTS]; /* interned */

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

/* Whether a method has this parameter: `order` has those that may be positional, then -1, then the
   others, then -1. */
static inline bool has_parameter(const signed char *order, int which) {
    for (int ends = 0; ends < 2; ends += *order++ < 0)
        if (*order == which)
            return true;
    return false;
}

/* Sort the arguments; false: leave it to Python, also to say what is wrong with them. */
static inline bool parse(const signed char *order, PyObject *const *args, Py_ssize_t count,
                         PyObject *keywords, PyObject **values) {
    for (Py_ssize_t index = 0; index < count; index++) {
        if (order[index] < 0)
            return false;
        values[(int)order[index]] = args[index];
    }
    if (keywords == NULL)
        return true;
    Py_ssize_t num_keywords = PyTuple_Size(keywords);
    for (Py_ssize_t index = 0; index < num_keywords; index++) {
        int which = find_name(PyTuple_GetItem(keywords, index), pc_argument_names, ARGUMENTS);
        if (which < 0 || values[which] != NULL || !has_parameter(order, which))
            return false;
        values[which] = args[count + index];
    }
    return true;
}

static inline bool is_none(PyObject *value) { return value == NULL || value == Py_None; }

/* The value of an int between `least` and 2**31 - 1; else `wrong`. */
static inline long small_int(PyObject *value, long least, long wrong) {
    if (value == NULL || !PyLong_CheckExact(value))
        return wrong;
    int overflow;
    long number = PyLong_AsLongAndOverflow(value, &overflow);
    return overflow == 0 && number >= least && number <= INT32_MAX ? number : wrong;
}

#endif
