/* Bytes to Python objects. See pickles.h. */
#include "pickles.h"

#include "base/core.h"

#include <string.h>

/* Say what is wrong with an object that could not be loaded. */
static void explain(const struct pc_pickle *pickle) {
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    if (error != NULL && (PyErr_GivenExceptionMatches(error, pickle->error) ||
                          PyErr_GivenExceptionMatches(error, PyExc_EOFError))) {
        PyObject *said = PyUnicode_FromFormat("the bytes of an object are damaged: %S", error);
        PyObject *damaged =
            said != NULL ? PyObject_CallFunctionObjArgs(PyExc_ValueError, said, NULL) : NULL;
        Py_XDECREF(said);
        if (damaged != NULL) {
            if (traceback != NULL)
                PyException_SetTraceback(error, traceback);
            PyException_SetCause(damaged, error); /* which it takes */
            PyErr_SetObject(PyExc_ValueError, damaged);
            Py_DECREF(damaged);
            error = NULL;
        }
    } else if (error != NULL && (PyErr_GivenExceptionMatches(error, PyExc_ImportError) ||
                                 PyErr_GivenExceptionMatches(error, PyExc_AttributeError))) {
        PyObject *done = PyObject_CallMethod(
            error, "add_note", "s",
            "An object came from another rank, and its class or function is not found here. "
            "Define it in a module that every rank can import.");
        if (done == NULL)
            PyErr_Clear();
        Py_XDECREF(done);
    }
    if (!PyErr_Occurred()) {
        PyErr_Restore(type, error, traceback);
        return;
    }
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(traceback);
}

/* Without buffers. Both take the reference to `pickled`. */
static PyObject *load_plain(PyObject *pickled) {
    const struct pc_pickle *pickle = pickled != NULL ? pc_pickle() : NULL;
    PyObject *object =
        pickle != NULL ? PyObject_CallFunctionObjArgs(pickle->loads, pickled, NULL) : NULL;
    Py_XDECREF(pickled);
    if (object == NULL && pickle != NULL)
        explain(pickle);
    return object;
}

static PyObject *load_with(PyObject *pickled, PyObject *buffers) {
    const struct pc_pickle *pickle = pc_pickle();
    PyObject *rest = PyObject_GetIter(buffers), *object = NULL;
    PyObject *args = pickled != NULL ? PyTuple_Pack(1, pickled) : NULL;
    PyObject *named = rest != NULL ? Py_BuildValue("{sO}", "buffers", rest) : NULL;
    if (pickle != NULL && args != NULL && named != NULL)
        object = PyObject_Call(pickle->loads, args, named);
    if (object == NULL && pickle != NULL) {
        explain(pickle);
    } else if (object != NULL) {
        PyObject *unused = PyIter_Next(rest);
        if (unused != NULL) {
            Py_DECREF(unused);
            Py_CLEAR(object);
            PyErr_SetString(PyExc_ValueError, "the bytes of an object are damaged: more buffers "
                                              "than it has arrays");
        }
    }
    Py_XDECREF(rest);
    Py_XDECREF(args);
    Py_XDECREF(named);
    Py_XDECREF(pickled);
    return object;
}

struct header {
    uint64_t num_buffers, pickled_nbytes;
};

/* False with an exception. */
static bool read_header(const void *bytes, size_t nbytes, struct header *header) {
    if (nbytes < PC_OBJECT_NBYTES) {
        PyErr_Format(PyExc_ValueError, "an object cannot be in %zu bytes: its header has %d",
                     nbytes, PC_OBJECT_NBYTES);
        return false;
    }
    memcpy(header, bytes, sizeof *header);
    if (header->num_buffers <= (nbytes - PC_OBJECT_NBYTES) / 8)
        return true;
    PyErr_Format(PyExc_ValueError, "an object with %llu buffers cannot be in %zu bytes",
                 (unsigned long long)header->num_buffers, nbytes);
    return false;
}

/* Where the next `nbytes` of the `whole` end, from `begin` on; SIZE_MAX: beyond it. */
static size_t end_of(size_t begin, uint64_t nbytes, size_t whole) {
    return begin <= whole && nbytes <= whole - begin ? begin + nbytes : SIZE_MAX;
}

/* What is behind the header, and perhaps before the buffers. */
static PyObject *load_bytes(PyObject *memory, const char *bytes, size_t nbytes,
                            const struct header *header) {
    size_t begin = PC_OBJECT_NBYTES + 8 * (size_t)header->num_buffers;
    size_t end = end_of(begin, header->pickled_nbytes, nbytes);
    PyObject *buffers = header->num_buffers > 0 ? PyList_New(0) : NULL;
    PyObject *view = buffers != NULL ? PyMemoryView_FromObject(memory) : NULL;
    PyObject *flat = view != NULL ? PyObject_CallMethod(view, "cast", "s", "B") : NULL;
    Py_XDECREF(view);
    for (size_t index = 0; flat != NULL && end != SIZE_MAX && index < header->num_buffers;
         index++) {
        uint64_t length;
        memcpy(&length, bytes + PC_OBJECT_NBYTES + 8 * index, 8);
        size_t from = pc_round_up(end, PC_OBJECT_ALIGNMENT);
        end = end_of(from, length, nbytes);
        PyObject *buffer = end != SIZE_MAX
                               ? PySequence_GetSlice(flat, (Py_ssize_t)from, (Py_ssize_t)end)
                               : NULL;
        if (end != SIZE_MAX && (buffer == NULL || PyList_Append(buffers, buffer) < 0))
            Py_CLEAR(flat);
        Py_XDECREF(buffer);
    }
    PyObject *object = NULL;
    if (end == SIZE_MAX || (end != nbytes && !PyErr_Occurred()))
        PyErr_Format(PyExc_ValueError, "an object that is %s came in %zu bytes",
                     end == SIZE_MAX ? "longer" : "shorter", nbytes);
    else if (!PyErr_Occurred()) {
        PyObject *pickled = PyMemoryView_FromMemory((char *)bytes + begin,
                                                    (Py_ssize_t)header->pickled_nbytes, PyBUF_READ);
        object = buffers == NULL ? load_plain(pickled) : load_with(pickled, buffers);
    }
    Py_XDECREF(flat);
    Py_XDECREF(buffers);
    return object;
}

PyObject *pc_pickle_load(PyObject *memory) {
    Py_buffer view;
    struct header header;
    if (PyObject_GetBuffer(memory, &view, PyBUF_SIMPLE) < 0)
        return NULL;
    PyObject *object = read_header(view.buf, (size_t)view.len, &header)
                           ? load_bytes(memory, view.buf, (size_t)view.len, &header)
                           : NULL;
    PyBuffer_Release(&view);
    return object;
}

PyObject *pc_pickle_load_copy(const void *bytes, size_t nbytes) {
    struct header header;
    if (!read_header(bytes, nbytes, &header))
        return NULL;
    if (header.num_buffers == 0 && header.pickled_nbytes == nbytes - PC_OBJECT_NBYTES)
        return load_plain(PyBytes_FromStringAndSize((const char *)bytes + PC_OBJECT_NBYTES,
                                                    (Py_ssize_t)header.pickled_nbytes));
    PyObject *memory = PyByteArray_FromStringAndSize(bytes, (Py_ssize_t)nbytes);
    PyObject *object = memory != NULL ? pc_pickle_load(memory) : NULL;
    Py_XDECREF(memory);
    return object;
}

PyObject *pc_load_object_py(PyObject *Py_UNUSED(module), PyObject *memory) {
    return pc_pickle_load(memory);
}
