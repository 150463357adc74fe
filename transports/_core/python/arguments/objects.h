/* Objects that travel pickled, as pycoll/_arrays/objects.py does it: `use_objects` says how. */
#ifndef PC_OBJECTS_H
#define PC_OBJECTS_H

#include "arrays.h"

/* The bytes of an object, in one piece. 1: `bytes` has data, nbytes, and must be released. 0
   without an exception: leave it to Python, for it is, or may be, an array, or cannot be sent; an
   item of a list of objects may be an array of a library that is known here. -1 with an exception.
   Anything may have happened meanwhile: pickling runs code. */
int pc_object_dump(PyObject *x, bool is_item, struct pc_array *bytes);

/* The same in parts, a sequence of memoryviews (new reference). NULL, perhaps with an exception, as
   for 0 and -1. */
PyObject *pc_object_parts(PyObject *x, bool is_item);

/* Memory for so many bytes of an object (new reference), which `into` describes; NULL with an
   exception. */
PyObject *pc_object_memory(size_t nbytes, struct pc_array *into);
/* The object whose bytes are there; steals the memory; NULL with an exception. */
PyObject *pc_object_load(PyObject *memory);

PyObject *pc_use_objects(PyObject *module, PyObject *args);

#endif
