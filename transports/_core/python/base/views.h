/* Views of memory of Python's, held for as long as the core uses it. */
#ifndef PC_VIEWS_H
#define PC_VIEWS_H

#include "py.h"

#include <stddef.h>

/* Of one buffer, or of several parts of a payload. */
struct pc_views {
    Py_ssize_t count;
    size_t nbytes;    /* of all together */
    PyObject *object; /* is kept alive, too; or NULL */
    Py_buffer views[];
};

/* Writable memory for `nbytes`; NULL with an exception. */
struct pc_views *pc_view_into(PyObject *into, Py_ssize_t nbytes);
/* Bytes of one object that are read; NULL with an exception. */
struct pc_views *pc_view_of(PyObject *object);
/* All items of a sequence; NULL with an exception. */
struct pc_views *pc_view_parts(PyObject *parts);
/* Let go of them; of NULL, too. */
void pc_views_release(struct pc_views *views);

#endif
