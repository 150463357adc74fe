#include "objects.h"
#include "memory.h"
#include "pickles.h"

#include "base/copy.h"
#include "python/base/views.h"

/* dump(x) -> parts, or None if it is or may be an array; dump_any(x) -> parts;
   new_bytes(nbytes). */
static PyObject *dump, *dump_any, *new_bytes;

/* From so many bytes on memory is `new_bytes`'s. */
#define LARGE_NBYTES 4096

/* Describe memory that `object` has. 0; -1 with an exception. */
static int describe(PyObject *object, int flags, struct pc_array *bytes) {
    if (PyObject_GetBuffer(object, &bytes->held, flags) < 0)
        return -1;
    bytes->data = bytes->held.buf;
    bytes->nbytes = (size_t)bytes->held.len;
    return 0;
}

/* All parts in one piece (new reference). */
static PyObject *joined(PyObject *parts) {
    struct pc_views *views = pc_view_parts(parts);
    PyObject *whole =
        views != NULL ? PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)views->nbytes) : NULL;
    char *to = whole != NULL ? PyByteArray_AsString(whole) : NULL;
    for (Py_ssize_t index = 0; to != NULL && index < views->count; index++) {
        pc_copy(to, views->views[index].buf, (size_t)views->views[index].len);
        to += views->views[index].len;
    }
    pc_views_release(views);
    return whole;
}

/* Of what is not plain, as Python's `dump` says. */
static PyObject *dumped_parts(PyObject *x, bool is_item) {
    bool is_array = pc_is_array(x);
    if (dump == NULL || (is_array && !is_item))
        return NULL;
    PyObject *parts = PyObject_CallFunctionObjArgs(is_array ? dump_any : dump, x, NULL);
    if (parts == NULL && PyErr_Occurred() && (PyErr_ExceptionMatches(PyExc_TypeError) ||
                                              PyErr_ExceptionMatches(PyExc_ValueError)))
        PyErr_Clear(); /* Python says why it cannot be sent */
    if (parts == Py_None)
        Py_CLEAR(parts);
    return parts;
}

PyObject *pc_object_parts(PyObject *x, bool is_item) {
    PyObject *plain = pc_pickle_plain(x);
    if (plain == NULL)
        return !PyErr_Occurred() ? dumped_parts(x, is_item) : NULL;
    PyObject *view = PyMemoryView_FromObject(plain);
    Py_DECREF(plain);
    return view != NULL ? Py_BuildValue("(N)", view) : NULL;
}

int pc_object_dump(PyObject *x, bool is_item, struct pc_array *bytes) {
    bytes->held.obj = NULL;
    PyObject *whole = pc_pickle_plain(x);
    if (whole == NULL && !PyErr_Occurred()) {
        PyObject *parts = dumped_parts(x, is_item);
        if (parts != NULL)
            whole = PySequence_Size(parts) == 1 ? PySequence_GetItem(parts, 0) : joined(parts);
        else if (!PyErr_Occurred())
            return 0;
        Py_XDECREF(parts);
    }
    int status = whole != NULL && describe(whole, PyBUF_SIMPLE, bytes) == 0 ? 1 : -1;
    Py_XDECREF(whole);
    return status;
}

PyObject *pc_object_memory(size_t nbytes, struct pc_array *into) {
    into->held.obj = NULL;
    PyObject *memory = nbytes < LARGE_NBYTES
                           ? PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)nbytes)
                           : PyObject_CallFunction(new_bytes, "n", (Py_ssize_t)nbytes);
    if (memory != NULL && describe(memory, PyBUF_WRITABLE, into) < 0)
        Py_CLEAR(memory);
    return memory;
}

PyObject *pc_object_load(PyObject *memory) {
    PyObject *object = pc_pickle_load(memory);
    Py_DECREF(memory);
    return object;
}

PyObject *pc_use_objects(PyObject *module, PyObject *args) {
    PyObject *functions[3];
    (void)module;
    if (!PyArg_ParseTuple(args, "OOO", &functions[0], &functions[1], &functions[2]))
        return NULL;
    PyObject **kept[] = {&dump, &dump_any, &new_bytes};
    for (int index = 0; index < 3; index++) {
        PyObject *before = *kept[index];
        *kept[index] = Py_NewRef(functions[index]);
        Py_XDECREF(before);
    }
    Py_RETURN_NONE;
}
