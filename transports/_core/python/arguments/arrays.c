#include "arrays.h"

#include "reduce/reduce.h"

#include <string.h>

#define C_CONTIGUOUS 0x0001
#define ALIGNED 0x0100
#define WRITEABLE 0x0400
#define WARN_ON_WRITE 0x80000000u

struct array_fields { /* the beginning of NumPy's PyArrayObject */
    PyObject_HEAD
    char *data;
    int ndim;
    intptr_t *dims;
    intptr_t *strides;
    PyObject *base;
    PyObject *dtype;
    int flags;
};

struct dtype_fields { /* the beginning of NumPy's PyArray_Descr */
    PyObject_HEAD
    PyTypeObject *scalar;
    char kind, letter, byte_order;
};

static PyTypeObject *ndarray; /* NULL: not in use */
static PyObject *empty;       /* numpy.empty */
static bool knows_copies;     /* of dtypes */

/* NumPy's dtypes are single objects, so an address tells the type. But an array that was pickled
   has a copy of one. */
#define MAX_DTYPES 32
static struct {
    PyObject *dtype;
    PyTypeObject *scalar;
    int code;
    size_t itemsize;
} dtypes[MAX_DTYPES];
static _Atomic int num_dtypes; /* without the interpreter's lock, too: what stands before stays */
static int last_dtype;

static bool is_copy(PyObject *dtype, int index) {
    const struct dtype_fields *one = (const struct dtype_fields *)dtype;
    const struct dtype_fields *other = (const struct dtype_fields *)dtypes[index].dtype;
    return Py_TYPE(dtype) == Py_TYPE(dtypes[index].dtype) && one->scalar == other->scalar &&
           one->letter == other->letter && one->byte_order == other->byte_order;
}

/* That it says more of the elements than their type. */
static bool has_metadata(PyObject *dtype) {
    PyObject *metadata = PyObject_GetAttrString(dtype, "metadata");
    PyErr_Clear();
    Py_XDECREF(metadata);
    return metadata != Py_None;
}

/* The place of a dtype; num_dtypes: there is none. */
static int find_dtype(PyObject *dtype) {
    for (int index = 0; index < num_dtypes; index++)
        if (dtypes[index].dtype == dtype)
            return index;
    for (int index = 0; knows_copies && index < num_dtypes; index++)
        if (is_copy(dtype, index))
            return has_metadata(dtype) ? num_dtypes : index;
    return num_dtypes;
}

int pc_array_view(PyObject *x, struct pc_array *view) {
    if (Py_TYPE(x) != ndarray || ndarray == NULL)
        return 0;
    const struct array_fields *array = (const struct array_fields *)x;
    if ((array->flags & (C_CONTIGUOUS | ALIGNED)) != (C_CONTIGUOUS | ALIGNED))
        return 0;
    int index = last_dtype;
    if (PC_UNLIKELY(dtypes[index].dtype != array->dtype)) {
        index = find_dtype(array->dtype);
        if (index == num_dtypes)
            return 0;
        last_dtype = index;
    }
    size_t count = 1;
    for (int axis = 0; axis < array->ndim; axis++)
        count *= (size_t)array->dims[axis];
    view->data = array->data;
    view->dims = array->dims;
    view->ndim = array->ndim;
    view->count = count;
    view->nbytes = count * dtypes[index].itemsize;
    view->dtype = dtypes[index].code;
    view->writeable = (array->flags & WRITEABLE) != 0;
    return 1;
}

bool pc_array_warns(PyObject *x) {
    return (((const struct array_fields *)x)->flags & WARN_ON_WRITE) != 0;
}

static intptr_t distance(intptr_t stride) { return stride < 0 ? -stride : stride; }

bool pc_is_injective(int ndim, const intptr_t *dims, const intptr_t *strides, intptr_t width) {
    for (int axis = 0; axis < ndim; axis++) {
        intptr_t within = width, step = distance(strides[axis]);
        for (int other = 0; other < ndim; other++) {
            intptr_t shorter = distance(strides[other]);
            if (shorter < step || (shorter == step && other < axis))
                within += dims[other] > 1 ? (dims[other] - 1) * shorter : 0;
        }
        if (dims[axis] > 1 && step < within)
            return false;
    }
    return true;
}

bool pc_array_is_spread(PyObject *x, struct pc_extent *extent) {
    const struct array_fields *array = (const struct array_fields *)x;
    if (Py_TYPE(x) != ndarray || ndarray == NULL ||
        (array->flags & (C_CONTIGUOUS | ALIGNED)) == (C_CONTIGUOUS | ALIGNED))
        return false;
    int index = find_dtype(array->dtype);
    if (index == num_dtypes)
        return false;
    extent->begin = array->data;
    extent->end = array->data + dtypes[index].itemsize;
    intptr_t width = (intptr_t)dtypes[index].itemsize;
    extent->writeable = (array->flags & WRITEABLE) != 0 &&
                        pc_is_injective(array->ndim, array->dims, array->strides, width);
    for (int axis = 0; axis < array->ndim; axis++) {
        intptr_t reach = array->dims[axis] > 0 ? (array->dims[axis] - 1) * array->strides[axis] : 0;
        *(reach < 0 ? &extent->begin : &extent->end) += reach;
    }
    return true;
}

static int scalar_index(PyObject *x) {
    if (Py_TYPE(x) == ndarray)
        return -1; /* most are */
    for (int index = 0; index < num_dtypes; index++)
        if (dtypes[index].scalar == Py_TYPE(x))
            return index;
    return -1;
}

bool pc_is_numpy_scalar(PyObject *x) { return scalar_index(x) >= 0; }

PyObject *pc_array_of_scalar(PyObject *x) {
    int index = scalar_index(x);
    struct pc_array view;
    Py_buffer value;
    if (index < 0)
        return NULL;
    if (PyObject_GetBuffer(x, &value, PyBUF_SIMPLE) < 0) {
        PyErr_Clear();
        return NULL;
    }
    PyObject *nowhere = PyTuple_New(0), *array = NULL;
    if (nowhere != NULL) /* of its dtype: there are several of int64 */
        array = PyObject_CallFunctionObjArgs(empty, nowhere, dtypes[index].dtype, NULL);
    Py_XDECREF(nowhere);
    if (array != NULL && pc_array_view(array, &view) && view.nbytes == (size_t)value.len)
        memcpy(view.data, value.buf, view.nbytes);
    else
        Py_CLEAR(array);
    PyBuffer_Release(&value);
    PyErr_Clear();
    return array;
}

PyObject *pc_array_value(PyObject *array) {
    PyObject *nowhere = PyTuple_New(0);
    PyObject *value = nowhere != NULL ? PyObject_GetItem(array, nowhere) : NULL;
    Py_XDECREF(nowhere);
    return value;
}

bool pc_is_no_array(PyObject *x) { return ndarray != NULL && !PyObject_TypeCheck(x, ndarray); }

bool pc_is_numpy_array(PyObject *x) { return ndarray != NULL && PyObject_TypeCheck(x, ndarray); }

PyObject *pc_array_new(const struct pc_array *like, PyObject *x, Py_ssize_t extra) {
    int skipped = extra < 0, added = extra > 0;
    PyObject *shape = PyTuple_New(like->ndim - skipped + added);
    if (shape == NULL)
        return NULL;
    if (added)
        PyTuple_SetItem(shape, 0, PyLong_FromSsize_t(extra));
    for (int axis = skipped; axis < like->ndim; axis++)
        PyTuple_SetItem(shape, axis - skipped + added, PyLong_FromSsize_t(like->dims[axis]));
    int index = find_dtype(((struct array_fields *)x)->dtype); /* there are several of int64 */
    PyObject *made =
        PyObject_CallFunctionObjArgs(empty, shape, dtypes[index].dtype, NULL);
    Py_DECREF(shape);
    return made;
}

PyObject *pc_array_like(PyObject *x) {
    const struct array_fields *array = (const struct array_fields *)x;
    struct pc_array like = {.ndim = array->ndim, .dims = array->dims};
    return pc_array_new(&like, x, 0);
}

size_t pc_array_itemsize(int dtype) {
    for (int index = 0; ndarray != NULL && index < num_dtypes; index++)
        if (dtypes[index].code == dtype)
            return dtypes[index].itemsize;
    return 0;
}

PyObject *pc_array_empty(int dtype, int ndim, const intptr_t *dims) {
    int index = 0;
    while (index < num_dtypes && dtypes[index].code != dtype)
        index++;
    if (index == num_dtypes || ndarray == NULL)
        return NULL;
    PyObject *shape = PyTuple_New(ndim);
    for (int axis = 0; shape != NULL && axis < ndim; axis++)
        PyTuple_SetItem(shape, axis, PyLong_FromSsize_t(dims[axis]));
    if (shape == NULL)
        return NULL;
    PyObject *made = PyObject_CallFunctionObjArgs(empty, shape, dtypes[index].dtype, NULL);
    Py_DECREF(shape);
    return made;
}

/* Raise pycoll.Error. */
static void set_error(const char *text) {
    PyObject *errors = PyImport_ImportModule("pycoll.errors");
    PyObject *type = errors != NULL ? PyObject_GetAttrString(errors, "Error") : NULL;
    if (type != NULL)
        PyErr_SetString(type, text);
    Py_XDECREF(type);
    Py_XDECREF(errors);
}

PyObject *pc_call_slow(PyObject *slow, PyObject *const *args, Py_ssize_t count,
                       PyObject *keywords) {
    if (slow == NULL) {
        set_error("this communicator is closed");
        return NULL;
    }
    PyObject *positionals = PyTuple_New(count), *named = NULL, *result = NULL;
    if (positionals == NULL)
        return NULL;
    for (Py_ssize_t index = 0; index < count; index++)
        PyTuple_SetItem(positionals, index, Py_NewRef(args[index]));
    if (keywords != NULL) {
        named = PyDict_New();
        for (Py_ssize_t index = 0; named != NULL && index < PyTuple_Size(keywords); index++)
            if (PyDict_SetItem(named, PyTuple_GetItem(keywords, index), args[count + index]) < 0)
                Py_CLEAR(named);
        if (named == NULL)
            goto done;
    }
    Py_INCREF(slow);
    result = PyObject_Call(slow, positionals, named);
    Py_DECREF(slow);
done:
    Py_DECREF(positionals);
    Py_XDECREF(named);
    return result;
}

PyObject *pc_call_method(PyObject *methods, const char *name, PyObject *const *args,
                         Py_ssize_t count, PyObject *keywords) {
    /* What a signal handler raises shall show the caller's line, and not the first line there. */
    if (PyErr_CheckSignals() < 0)
        return NULL;
    PyObject *method = methods != NULL ? PyObject_CallFunction(methods, "s", name) : NULL;
    if (methods != NULL && method == NULL)
        return NULL;
    PyObject *result = pc_call_slow(method, args, count, keywords);
    Py_XDECREF(method);
    return result;
}

/* add_dtype(dtype, code): arrays of this dtype object hold elements of that type. */
PyObject *pc_add_dtype(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *dtype;
    int code;
    if (!PyArg_ParseTuple(args, "Oi", &dtype, &code))
        return NULL;
    for (int index = 0; index < num_dtypes; index++)
        if (dtypes[index].dtype == dtype)
            Py_RETURN_NONE;
    if (num_dtypes < MAX_DTYPES && pc_itemsize(code) != 0) {
        dtypes[num_dtypes].dtype = Py_NewRef(dtype);
        dtypes[num_dtypes].code = code;
        dtypes[num_dtypes].itemsize = pc_itemsize(code);
        dtypes[num_dtypes].scalar = (PyTypeObject *)PyObject_GetAttrString(dtype, "type");
        PyErr_Clear();
        num_dtypes++;
    }
    Py_RETURN_NONE;
}

/* use_numpy(numpy.empty, sample, address, read_only) -> bool: whether arrays can be looked at.
   `sample` is a C-contiguous, writeable array of shape (2, 3) at `address`, `read_only` the same as
   a read-only view with its axes swapped. */
PyObject *pc_use_numpy(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *function, *sample, *swapped;
    unsigned long long address;
    if (!PyArg_ParseTuple(args, "OOKO", &function, &sample, &address, &swapped))
        return NULL;
    const struct array_fields *one = (const struct array_fields *)sample;
    const struct array_fields *two = (const struct array_fields *)swapped;
    PyObject *dtype = PyObject_GetAttrString(sample, "dtype");
    bool known = dtype != NULL && (uintptr_t)one->data == address && one->ndim == 2 &&
                 one->dims[0] == 2 && one->dims[1] == 3 && one->dtype == dtype &&
                 two->data == one->data && two->ndim == 2 && two->dims[0] == 3 &&
                 two->dims[1] == 2 &&
                 (one->flags & (C_CONTIGUOUS | ALIGNED | WRITEABLE)) ==
                     (C_CONTIGUOUS | ALIGNED | WRITEABLE) &&
                 (two->flags & (C_CONTIGUOUS | ALIGNED | WRITEABLE)) == ALIGNED;
    const struct dtype_fields *fields = (const struct dtype_fields *)dtype;
    PyObject *scalar = dtype != NULL ? PyObject_GetAttrString(dtype, "type") : NULL;
    knows_copies = known && (PyObject *)fields->scalar == scalar && fields->kind == 'f' &&
                   fields->letter == 'd' && fields->byte_order == '=';
    Py_XDECREF(scalar);
    Py_XDECREF(dtype);
    PyErr_Clear();
    if (known && ndarray == NULL) {
        empty = Py_NewRef(function);
        ndarray = (PyTypeObject *)Py_NewRef((PyObject *)Py_TYPE(sample));
    }
    return PyBool_FromLong(known);
}
