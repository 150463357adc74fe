/* What many files that Python calls need. See py.h. */
#include "py.h"

#include <errno.h>

void *pc_new(PyTypeObject *type) {
    return ((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
}

void pc_free(void *object) {
    PyTypeObject *type = Py_TYPE((PyObject *)object);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

bool pc_read_ranks(PyObject *sequence, Py_ssize_t count, int least, int most, int *ranks) {
    for (Py_ssize_t index = 0; index < count; index++) {
        PyObject *item = PySequence_GetItem(sequence, index);
        long rank = item != NULL ? PyLong_AsLong(item) : -1;
        Py_XDECREF(item);
        if (!PyErr_Occurred() && (rank < least || rank > most))
            PyErr_SetString(PyExc_ValueError, "there is no such rank");
        if (PyErr_Occurred())
            return false;
        ranks[index] = (int)rank;
    }
    return true;
}

PyObject *pc_list_of(const int *numbers, size_t count) {
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (size_t index = 0; list != NULL && index < count; index++)
        PyList_SetItem(list, (Py_ssize_t)index, PyLong_FromLong(numbers[index]));
    return list;
}

PyObject *pc_raise_errno(int error) {
    errno = error;
    return PyErr_SetFromErrno(PyExc_OSError);
}
