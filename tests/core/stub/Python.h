/* As much of CPython's limited API as the flag protocols of the core name, so that they can be run as they
   are, as threads of one C program, where no Python is.

   Each thread plays one process: it has an interpreter's lock of its own, and native_python.c ends the
   program if the core gives up a lock that it does not hold, or uses the interpreter without it. Functions
   that are declared here and defined nowhere belong to the Python types, which the program never makes. */
#ifndef PYCOLL_STUB_PYTHON_H
#define PYCOLL_STUB_PYTHON_H

#include <stdlib.h>
#include <sys/types.h>

typedef ssize_t Py_ssize_t;
typedef struct stub_object PyObject;
typedef struct stub_type PyTypeObject;
typedef struct stub_thread PyThreadState;

struct stub_object {
    Py_ssize_t references;
};
#define PyObject_HEAD PyObject ob_base;

typedef PyObject *(*PyCFunction)(PyObject *, PyObject *);
typedef PyObject *(*allocfunc)(PyTypeObject *, Py_ssize_t);
typedef void (*freefunc)(void *);
typedef int (*visitproc)(PyObject *, void *);

typedef struct {
    const char *ml_name;
    PyCFunction ml_meth;
    int ml_flags;
    const char *ml_doc;
} PyMethodDef;
typedef struct {
    int slot;
    void *pfunc;
} PyType_Slot;
typedef struct {
    const char *name;
    int basicsize, itemsize;
    unsigned int flags;
    PyType_Slot *slots;
} PyType_Spec;
typedef struct {
    void *buf;
    PyObject *obj;
    Py_ssize_t len;
} Py_buffer;

enum { METH_VARARGS = 1, METH_KEYWORDS = 2, METH_NOARGS = 4, METH_O = 8, METH_FASTCALL = 128 };
enum { Py_TPFLAGS_DEFAULT };
enum { Py_tp_dealloc = 1, Py_tp_doc, Py_tp_free, Py_tp_alloc, Py_tp_methods, Py_tp_members, Py_tp_getset, Py_tp_new };

extern PyObject stub_none;
#define Py_None (&stub_none)
#define Py_RETURN_NONE return Py_None
#define Py_TYPE(object) ((PyTypeObject *)(object))

extern PyObject *PyExc_OSError, *PyExc_ValueError, *PyExc_RuntimeError, *PyExc_MemoryError, *PyExc_BlockingIOError;

/* Defined in native_python.c. */
PyThreadState *PyEval_SaveThread(void);
void PyEval_RestoreThread(PyThreadState *state);
void PyErr_SetString(PyObject *type, const char *text);
PyObject *PyErr_SetFromErrno(PyObject *type);
PyObject *PyErr_NoMemory(void);
int PyArg_ParseTuple(PyObject *args, const char *format, ...);

PyObject *PyErr_Format(PyObject *type, const char *format, ...);
PyObject *PyErr_Occurred(void);
int PyErr_CheckSignals(void);
int PyArg_ParseTupleAndKeywords(PyObject *args, PyObject *keywords, const char *format, char **names, ...);
PyObject *Py_NewRef(PyObject *object);
void Py_DECREF(void *object);
void Py_XDECREF(void *object);
void *PyMem_Calloc(size_t count, size_t nbytes);
void PyMem_Free(void *memory);
Py_ssize_t PySequence_Size(PyObject *sequence);
PyObject *PySequence_GetItem(PyObject *sequence, Py_ssize_t index);
long PyLong_AsLong(PyObject *number);
PyObject *PyLong_FromLong(long number);
PyObject *PyBool_FromLong(long number);
void *PyType_GetSlot(PyTypeObject *type, int slot);
const char *PyUnicode_AsUTF8AndSize(PyObject *text, Py_ssize_t *nbytes);
PyObject *PyMemoryView_FromMemory(char *memory, Py_ssize_t nbytes, int flags);
#define PyBUF_WRITE 0x200

#endif
