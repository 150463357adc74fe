/* Python objects as bytes, and back: see pycoll/_arrays/objects.py, which says how the bytes are
   laid out. With the interpreter's lock. */
#ifndef PC_PICKLES_H
#define PC_PICKLES_H

#include "python/base/py.h"

#include <stddef.h>

/* Number of buffers and bytes of the pickle; the lengths of the buffers follow. */
#define PC_OBJECT_NBYTES 16
#define PC_OBJECT_ALIGNMENT 64

/* What is used of Python's module `pickle`; NULL with an exception. */
struct pc_pickle {
    PyObject *dumps, *loads, *buffer, *error;
    PyObject *reducers; /* the program's own, by type: `copyreg.dispatch_table` */
    PyObject *protocol; /* 5; NULL: the module was not imported yet */
};
const struct pc_pickle *pc_pickle(void);

/* The bytes of a small tree of plain values, as one bytes object; NULL, without an exception if
   it is another object or a large one, which `objects.dump` knows. */
PyObject *pc_pickle_plain(PyObject *x);
/* The object whose bytes are in `memory`, which is writable: arrays inside the object are views
   into it, and keep it. NULL with an exception. */
PyObject *pc_pickle_load(PyObject *memory);
/* The same of bytes that are copied. */
PyObject *pc_pickle_load_copy(const void *bytes, size_t nbytes);

/* Functions of the module. use_reducer(reduce_other): of NumPy's arrays that `reduce_object` does
   not know. */
PyObject *pc_use_reducer(PyObject *module, PyObject *reduce_other);
/* plain_object(x) -> bytes | None: `pc_pickle_plain` */
PyObject *pc_plain_object_py(PyObject *module, PyObject *x);
/* object_parts(pickled, buffers) -> list[memoryview]: what is sent of them, one after the other */
PyObject *pc_object_parts_py(PyObject *module, PyObject *args);
/* load_object(memory): `pc_pickle_load` */
PyObject *pc_load_object_py(PyObject *module, PyObject *memory);
/* reduce_object(x): for `reducer_override` of a pickler that keeps buffers out of band */
PyObject *pc_reduce_object_py(PyObject *module, PyObject *x);

#endif
