/* As much of CPython's limited API as the files of the native collectives name that have Python
   objects in their structures, so that their flag protocols can be run as they are, as threads of
   one C program, where no Python is. Each thread plays one process. An exception ends the program:
   see native_python.c. */
#ifndef PYCOLL_STUB_PYTHON_H
#define PYCOLL_STUB_PYTHON_H

#include <stdlib.h>
#include <sys/types.h>

typedef ssize_t Py_ssize_t;
typedef struct stub_object PyObject;

struct stub_object {
    Py_ssize_t references;
};
#define PyObject_HEAD PyObject ob_base;
typedef struct {
    void *buf;
    PyObject *obj;
} Py_buffer;

typedef struct {
    const char *name;
} PyMethodDef;
typedef struct stub_spec PyType_Spec;
typedef struct stub_type PyTypeObject;

extern PyObject stub_none;
#define Py_RETURN_NONE return &stub_none
static inline PyObject *Py_NewRef(PyObject *object) {
    object->references++;
    return object;
}

extern PyObject *PyExc_OSError;

/* Defined in native_python.c. */
PyObject *PyErr_SetFromErrno(PyObject *type);
PyObject *PyErr_NoMemory(void);
int PyArg_ParseTuple(PyObject *args, const char *format, ...);

#endif
