/* Python objects to bytes. See pickles.h. */
#include "arrays.h"
#include "pickles.h"

#include "reduce/reduce_kernels.h"

#include <string.h>

static PyObject *reduce_other;

const struct pc_pickle *pc_pickle(void) {
    static struct pc_pickle pickle;
    if (PC_LIKELY(pickle.protocol != NULL))
        return &pickle;
    PyObject *module = PyImport_ImportModule("pickle");
    if (module == NULL)
        return NULL;
    struct pc_pickle used = {
        .dumps = PyObject_GetAttrString(module, "dumps"),
        .loads = PyObject_GetAttrString(module, "loads"),
        .buffer = PyObject_GetAttrString(module, "PickleBuffer"),
        .error = PyObject_GetAttrString(module, "UnpicklingError"),
        .reducers = PyObject_GetAttrString(module, "dispatch_table"),
        .protocol = PyLong_FromLong(5),
    };
    Py_DECREF(module);
    if (PyErr_Occurred())
        return NULL;
    pickle = used;
    return &pickle;
}

PyObject *pc_use_reducer(PyObject *Py_UNUSED(module), PyObject *function) {
    PyObject *before = reduce_other;
    reduce_other = Py_NewRef(function);
    Py_XDECREF(before);
    Py_RETURN_NONE;
}

/* --- plain values ----------------------------------------------------------------------------- */

/* What is looked at costs little beside its pickling, and beyond these bounds the other way does.
   A value counts as VALUE_NBYTES and its text. */
#define MOST_NBYTES (16 * 1024)
#define VALUE_NBYTES 16
#define MOST_DEPTH 16

/* Whether pickle has opcodes for all of it but scalars of NumPy's: then no pickler of ours would
   make other bytes. */
static bool is_plain(PyObject *x, int depth, Py_ssize_t *left) {
    PyTypeObject *type = Py_TYPE(x);
    *left -= VALUE_NBYTES;
    if (type == &PyUnicode_Type)
        *left -= PyUnicode_GetLength(x);
    else if (type == &PyBytes_Type)
        *left -= PyBytes_Size(x);
    else if (type == &PyDict_Type || type == &PyList_Type || type == &PyTuple_Type)
        *left -= depth > 0 ? 0 : MOST_NBYTES;
    else if (type != &PyLong_Type && type != &PyFloat_Type && type != &PyBool_Type &&
             x != Py_None && !pc_is_numpy_scalar(x))
        return false;
    if (*left < 0)
        return false;
    if (type == &PyDict_Type) {
        PyObject *key, *value;
        for (Py_ssize_t place = 0; PyDict_Next(x, &place, &key, &value);)
            if (!is_plain(key, depth - 1, left) || !is_plain(value, depth - 1, left))
                return false;
    } else if (type == &PyList_Type) {
        for (Py_ssize_t index = 0; index < PyList_Size(x); index++)
            if (!is_plain(PyList_GetItem(x, index), depth - 1, left))
                return false;
    } else if (type == &PyTuple_Type) {
        for (Py_ssize_t index = 0; index < PyTuple_Size(x); index++)
            if (!is_plain(PyTuple_GetItem(x, index), depth - 1, left))
                return false;
    }
    return true;
}

PyObject *pc_pickle_plain(PyObject *x) {
    Py_ssize_t left = MOST_NBYTES;
    const struct pc_pickle *pickle = is_plain(x, MOST_DEPTH, &left) ? pc_pickle() : NULL;
    if (pickle == NULL)
        return NULL;
    PyObject *pickled = PyObject_CallFunctionObjArgs(pickle->dumps, x, pickle->protocol, NULL);
    Py_ssize_t nbytes = pickled != NULL ? PyBytes_Size(pickled) : -1;
    PyObject *made =
        nbytes >= 0 ? PyBytes_FromStringAndSize(NULL, PC_OBJECT_NBYTES + nbytes) : NULL;
    if (made != NULL) {
        char *to = PyBytes_AsString(made);
        uint64_t header[] = {0, (uint64_t)nbytes};
        memcpy(to, header, sizeof header);
        memcpy(to + sizeof header, PyBytes_AsString(pickled), (size_t)nbytes);
    }
    Py_XDECREF(pickled);
    return made;
}

PyObject *pc_plain_object_py(PyObject *Py_UNUSED(module), PyObject *x) {
    PyObject *made = pc_pickle_plain(x);
    return made != NULL || PyErr_Occurred() ? made : Py_NewRef(Py_None);
}

/* --- arrays ----------------------------------------------------------------------------------- */

/* NumPy's names of dtypes, by code; of those without one NumPy's pickling says more. */
static const char *const type_names[PC_DTYPES] = {
    [PC_BOOL] = "?",       [PC_INT8] = "i1",      [PC_INT16] = "i2",       [PC_INT32] = "i4",
    [PC_INT64] = "i8",     [PC_UINT8] = "u1",     [PC_UINT16] = "u2",      [PC_UINT32] = "u4",
    [PC_UINT64] = "u8",    [PC_FLOAT16] = "f2",   [PC_FLOAT32] = "f4",     [PC_FLOAT64] = "f8",
    [PC_COMPLEX64] = "c8", [PC_COMPLEX128] = "c16",
};

/* numpy.ndarray(shape, dtype, buffer): a call that is quick to pickle and to load, which NumPy's
   own way is not. */
PyObject *pc_reduce_object_py(PyObject *Py_UNUSED(module), PyObject *x) {
    const struct pc_pickle *pickle = pc_pickle();
    struct pc_array array;
    if (pickle == NULL)
        return NULL;
    if (!pc_array_view(x, &array) || !array.writeable || pc_array_warns(x) ||
        type_names[array.dtype] == NULL) {
        if (pc_is_no_array(x))
            return Py_NewRef(Py_NotImplemented);
        return PyObject_CallFunctionObjArgs(reduce_other, x, NULL);
    }
    if (PyDict_GetItem(pickle->reducers, (PyObject *)Py_TYPE(x)) != NULL)
        return Py_NewRef(Py_NotImplemented);
    PyObject *buffer = PyObject_CallFunctionObjArgs(pickle->buffer, x, NULL);
    PyObject *shape = buffer != NULL ? PyTuple_New(array.ndim) : NULL;
    for (int axis = 0; shape != NULL && axis < array.ndim; axis++)
        PyTuple_SetItem(shape, axis, PyLong_FromSsize_t(array.dims[axis]));
    if (shape != NULL)
        return Py_BuildValue("O(NsN)", (PyObject *)Py_TYPE(x), shape, type_names[array.dtype],
                             buffer);
    Py_XDECREF(buffer);
    return NULL;
}

/* --- parts ------------------------------------------------------------------------------------ */

/* Shorter parts are copied together, so that many small arrays are few parts. */
#define SMALL_NBYTES (32 * 1024)

struct parts {
    PyObject *list;
    PyObject *run; /* a bytearray of small parts; or NULL */
    size_t nbytes; /* of all */
};

static int add(struct parts *parts, PyObject *object) {
    PyObject *view = PyMemoryView_FromObject(object);
    int status = view != NULL ? PyList_Append(parts->list, view) : -1;
    Py_XDECREF(view);
    return status;
}

static int end_run(struct parts *parts) {
    PyObject *run = parts->run;
    int status = run != NULL ? add(parts, run) : 0;
    parts->run = NULL;
    Py_XDECREF(run);
    return status;
}

/* Room for so many bytes behind those of the run; NULL with an exception. */
static char *extend(struct parts *parts, size_t nbytes) {
    if (parts->run == NULL)
        parts->run = PyByteArray_FromStringAndSize(NULL, 0);
    Py_ssize_t before = parts->run != NULL ? PyByteArray_Size(parts->run) : 0;
    if (parts->run == NULL || PyByteArray_Resize(parts->run, before + (Py_ssize_t)nbytes) < 0)
        return NULL;
    parts->nbytes += nbytes;
    return PyByteArray_AsString(parts->run) + before;
}

static int append(struct parts *parts, PyObject *object) {
    Py_buffer view;
    if (PyObject_GetBuffer(object, &view, PyBUF_SIMPLE) < 0)
        return -1;
    int status = 0;
    if (view.len >= SMALL_NBYTES) {
        parts->nbytes += (size_t)view.len;
        status = end_run(parts) < 0 ? -1 : add(parts, object);
    } else {
        char *to = extend(parts, (size_t)view.len);
        status = to != NULL ? 0 : -1;
        if (to != NULL && view.len > 0)
            memcpy(to, view.buf, (size_t)view.len);
    }
    PyBuffer_Release(&view);
    return status;
}

static int pad(struct parts *parts) {
    size_t gap = -parts->nbytes % PC_OBJECT_ALIGNMENT;
    char *to = gap > 0 ? extend(parts, gap) : NULL;
    if (to != NULL)
        memset(to, 0, gap);
    return to != NULL || gap == 0 ? 0 : -1;
}

/* The bytes of a PickleBuffer as they lie, which becomes an item of `raws`; -1 with an
   exception. */
static Py_ssize_t raw(PyObject *buffer, PyObject *raws, Py_ssize_t index) {
    PyObject *view = PyObject_CallMethod(buffer, "raw", NULL);
    if (view == NULL || PyList_SetItem(raws, index, view) < 0)
        return -1;
    return PyObject_Size(view);
}

static int write_all(struct parts *parts, PyObject *pickled, PyObject *buffers, PyObject *raws) {
    Py_ssize_t count = PyList_Size(buffers);
    char *header = extend(parts, PC_OBJECT_NBYTES + 8 * (size_t)count);
    if (header == NULL)
        return -1;
    uint64_t numbers[] = {(uint64_t)count, (uint64_t)PyBytes_Size(pickled)};
    memcpy(header, numbers, sizeof numbers);
    for (Py_ssize_t index = 0; index < count; index++) {
        int64_t nbytes = raw(PyList_GetItem(buffers, index), raws, index);
        if (nbytes < 0)
            return -1;
        memcpy(header + PC_OBJECT_NBYTES + 8 * index, &nbytes, 8);
    }
    if (append(parts, pickled) < 0)
        return -1;
    for (Py_ssize_t index = 0; index < count; index++)
        if (pad(parts) < 0 || append(parts, PyList_GetItem(raws, index)) < 0)
            return -1;
    return end_run(parts);
}

PyObject *pc_object_parts_py(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *pickled, *buffers;
    if (!PyArg_ParseTuple(args, "O!O!", &PyBytes_Type, &pickled, &PyList_Type, &buffers))
        return NULL;
    struct parts parts = {.list = PyList_New(0)};
    PyObject *raws = parts.list != NULL ? PyList_New(PyList_Size(buffers)) : NULL;
    if (raws == NULL || write_all(&parts, pickled, buffers, raws) < 0)
        Py_CLEAR(parts.list);
    Py_XDECREF(parts.run);
    Py_XDECREF(raws);
    return parts.list;
}
