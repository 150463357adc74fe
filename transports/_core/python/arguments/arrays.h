/* Looking at a NumPy array without calling anything: its fields are where they have been since
   NumPy 1.7, which `use_numpy` checks against NumPy's own words before the first look. What other
   libraries have in host memory, memory.h describes in the same words. */
#ifndef PC_ARRAYS_H
#define PC_ARRAYS_H

#include "python/base/py.h"

#include "base/core.h"

struct pc_library; /* of memory.h */

struct pc_array {
    void *data;
    const intptr_t *dims;
    size_t count, nbytes;
    int dtype; /* code of pycoll/_dtypes.py, 1 to 15 */
    int ndim;
    bool writeable;
    /* Of memory.h alone: */
    char format;                      /* of a buffer, struct's letter; 0: it needs none */
    const struct pc_library *library; /* NULL: NumPy's */
    Py_buffer held;                   /* has an object: that must not give up its memory yet */
    union pc_number {
        double number, parts[2];
        bool truth;
        int64_t packed[3]; /* of an int */
    } number; /* the memory of a Python number */
};

/* 1: x is a C-contiguous, aligned numpy.ndarray (no subclass) of a dtype that reduces; else 0, no
   exception. */
int pc_array_view(PyObject *x, struct pc_array *view);
/* Whether such an array, of which a view was made, says so when it is written to: its buffer is
   read-only, as of what broadcast_arrays of NumPy returns. */
bool pc_array_warns(PyObject *x);
/* Where the elements of an array lie, and others may lie between them. */
struct pc_extent {
    const char *begin, *end;
    bool writeable;
};
/* Whether no two elements share memory, as far as that is easily seen; strides in units of which an
   element has `width`. */
bool pc_is_injective(int ndim, const intptr_t *dims, const intptr_t *strides, intptr_t width);
/* Whether x is an array of NumPy's as `pc_array_view` takes them, but not contiguous or not
   aligned. */
bool pc_array_is_spread(PyObject *x, struct pc_extent *extent);
/* A new uninitialized array of that dtype and shape, contiguous; NULL with an exception. */
PyObject *pc_array_like(PyObject *x);
/* Whether x is a scalar of NumPy's, of a dtype that is known here; and an array of no dimensions
   with its value (new reference; NULL without an exception: none can be made). */
bool pc_is_numpy_scalar(PyObject *x);
PyObject *pc_array_of_scalar(PyObject *x);
/* The scalar that is in an array of no dimensions (new reference). */
PyObject *pc_array_value(PyObject *array);
/* Whether x is certainly no array of NumPy's, nor of a subclass; and whether it certainly is. */
bool pc_is_no_array(PyObject *x);
bool pc_is_numpy_array(PyObject *x);
/* A new uninitialized array, or NULL with an exception: like x, with `extra` in front of its shape
   (0: none), or without its first axis (-1). */
PyObject *pc_array_new(const struct pc_array *like, PyObject *x, Py_ssize_t extra);

/* A new uninitialized array of a dtype, by its code; NULL, without an exception if the dtype is not
   known here. */
PyObject *pc_array_empty(int dtype, int ndim, const intptr_t *dims);

/* Bytes of an element; 0: no such array can be made here. Also without the interpreter's lock: what
   is known stays. */
size_t pc_array_itemsize(int dtype);

/* Hand the arguments of a METH_FASTCALL | METH_KEYWORDS method, as they are, to a Python function;
   NULL: closed. */
PyObject *pc_call_slow(PyObject *slow, PyObject *const *args, Py_ssize_t count, PyObject *keywords);
/* The same with what `methods` returns for a name. */
PyObject *pc_call_method(PyObject *methods, const char *name, PyObject *const *args,
                         Py_ssize_t count, PyObject *keywords);

PyObject *pc_use_numpy(PyObject *module, PyObject *args);
PyObject *pc_add_dtype(PyObject *module, PyObject *args);

#endif
