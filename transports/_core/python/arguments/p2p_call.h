/* Arguments of the point-to-point methods: looked at, not converted. */
#ifndef PC_P2P_CALL_H
#define PC_P2P_CALL_H

#include "python/base/py.h"

#include "memory.h"

#include <stdbool.h>
#include <string.h>

/* What `envelope.P2P` packs: kind, communicator, tag, form; then what `conversion.describe`
   writes: code of the dtype, length of the kind's name, dimensions, the name, the shape. */
#define KIND_P2P 1
#define HEADER_NBYTES 18u
#define DESCRIPTION_NBYTES 3u /* without name and shape */
#define MAX_DIMS 32
#define LONGEST_HEADER_NBYTES \
    (HEADER_NBYTES + DESCRIPTION_NBYTES + PC_MOST_KIND_NBYTES + 8 * MAX_DIMS)
#define ANY (-1)

enum argument { X, DEST, SOURCE, TAG, OUT, STATUS, TIMEOUT, SENDTAG, RECVTAG, ARGUMENTS };
static const char *const names[ARGUMENTS] = {"x",      "dest",    "source",  "tag",    "out",
                                             "status", "timeout", "sendtag", "recvtag"};
static const signed char send_order[] = {X, DEST, TAG, -1},
                         recv_order[] = {SOURCE, TAG, OUT, STATUS, -1};

/* Which of the arguments of `order`, or TIMEOUT, has this name; ARGUMENTS: none. */
static inline int argument_of(const signed char *order, PyObject *name) {
    for (; *order >= 0; order++)
        if (PyUnicode_CompareWithASCIIString(name, names[(int)*order]) == 0)
            return *order;
    return PyUnicode_CompareWithASCIIString(name, names[TIMEOUT]) == 0 ? TIMEOUT : ARGUMENTS;
}

/* Sort the arguments: those of `order`, and the keyword `timeout`; false: leave it to Python, also
   to say what is wrong with them. */
static inline bool parse(const signed char *order, PyObject *const *args, Py_ssize_t count,
                         PyObject *keywords, PyObject **values) {
    for (Py_ssize_t index = 0; index < count; index++) {
        if (order[index] < 0)
            return false;
        values[(int)order[index]] = args[index];
    }
    for (Py_ssize_t index = 0; keywords != NULL && index < PyTuple_Size(keywords); index++) {
        int which = argument_of(order, PyTuple_GetItem(keywords, index));
        if (which == ARGUMENTS || values[which] != NULL)
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

/* Write the header of a message; returns its length. */
static inline size_t write_header(uint64_t ident, const struct pc_array *x, int64_t tag,
                                  unsigned char *to) {
    to[0] = KIND_P2P;
    memcpy(to + 1, &ident, 8);
    memcpy(to + 9, &tag, 8);
    to[17] = 0;
    size_t kind_nbytes = pc_kind_of(x, (char *)to + HEADER_NBYTES + DESCRIPTION_NBYTES);
    to[18] = (unsigned char)x->dtype;
    to[19] = (unsigned char)kind_nbytes;
    to[20] = (unsigned char)x->ndim;
    size_t nbytes = HEADER_NBYTES + DESCRIPTION_NBYTES + kind_nbytes;
    for (int axis = 0; axis < x->ndim; axis++, nbytes += 8) {
        uint64_t dim = (uint64_t)x->dims[axis];
        memcpy(to + nbytes, &dim, 8);
    }
    return nbytes;
}

#endif
