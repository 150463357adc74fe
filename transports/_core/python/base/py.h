/* Python's limited API, for the files that Python calls. All others are plain C and build without
   it. */
#ifndef PC_PY_H
#define PC_PY_H

#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>

/* A new object of a heap type, all zero; NULL with an exception. And the last that its deallocator
   does. */
void *pc_new(PyTypeObject *type);
void pc_free(void *object);

/* Read the ints of a sequence, which has `count` at least, all of `least` to `most`: there is
   no other rank. False with an exception. */
bool pc_read_ranks(PyObject *sequence, Py_ssize_t count, int least, int most, int *ranks);
/* Ints as a list. */
PyObject *pc_list_of(const int *numbers, size_t count);
/* Raise an OSError; returns NULL. */
PyObject *pc_raise_errno(int error);

#endif
