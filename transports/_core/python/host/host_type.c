/* A host's memory as Python sees it: `_core.MappedHost`. */
#include "host_type.h"

#include <errno.h>
#include <structmember.h>

#include "host/arena.h"

typedef struct {
    PyObject_HEAD
    pc_host host;
} pc_host_object;

static PyObject *host_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"fd", "rank", "doorbells", "cores", "owns", NULL};
    int fd, rank, cores, owns = 0;
    PyObject *doorbells;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iiOi|p", names, &fd, &rank, &doorbells, &cores,
                                     &owns))
        return NULL;
    Py_ssize_t size = PySequence_Size(doorbells);
    if (size < 0)
        return NULL;
    if (rank < 0 || rank >= size) {
        PyErr_SetString(PyExc_ValueError, "there is no such rank on this host");
        return NULL;
    }
    int *bells = PyMem_Calloc((size_t)size, sizeof *bells);
    if (bells == NULL)
        return PyErr_NoMemory();
    pc_host_object *self = NULL;
    if (pc_read_ranks(doorbells, size, INT_MIN, INT_MAX, bells))
        self = pc_new(type);
    int error = self != NULL ? pc_host_open(&self->host, fd, rank, (int)size, bells, cores) : 0;
    if (self != NULL)
        self->host.owns = owns != 0;
    if (error != 0) {
        Py_CLEAR(self);
        pc_raise_errno(error);
    }
    PyMem_Free(bells);
    return (PyObject *)self;
}

static void host_dealloc(pc_host_object *self) {
    pc_host_close(&self->host);
    pc_free(self);
}

pc_host *pc_host_of(PyObject *object) {
    if (PyType_GetSlot(Py_TYPE(object), Py_tp_dealloc) == (void *)host_dealloc)
        return &((pc_host_object *)object)->host;
    PyErr_SetString(PyExc_TypeError, "host must be a MappedHost");
    return NULL;
}

static PyObject *host_set_status(pc_host_object *self, PyObject *text) {
    Py_ssize_t nbytes;
    const char *bytes = PyUnicode_AsUTF8AndSize(text, &nbytes);
    if (bytes == NULL)
        return NULL;
    pc_host_set_status(&self->host, bytes, (size_t)nbytes);
    Py_RETURN_NONE;
}

static PyObject *host_see_failure(pc_host_object *self, PyObject *Py_UNUSED(unused)) {
    self->host.seen_epoch = atomic_load(&pc_host_page(&self->host)->epoch);
    Py_RETURN_NONE;
}

/* window(rank, address, nbytes) -> memoryview of bytes in the arena of a rank; None: there are none
   such. */
static PyObject *host_window(pc_host_object *self, PyObject *args) {
    int rank;
    unsigned long long address;
    Py_ssize_t nbytes;
    if (!PyArg_ParseTuple(args, "iKn", &rank, &address, &nbytes))
        return NULL;
    if (rank < 0 || rank >= self->host.size || nbytes < 0) {
        PyErr_SetString(PyExc_ValueError, "there is no such rank, or length");
        return NULL;
    }
    unsigned char *here = pc_reach_here(&self->host, rank, address, (size_t)nbytes);
    if (here == NULL)
        Py_RETURN_NONE;
    pc_window_lend(&self->host, rank);
    return PyMemoryView_FromMemory((char *)here, nbytes, PyBUF_WRITE);
}

static PyObject *host_has_arena(pc_host_object *self, PyObject *Py_UNUSED(unused)) {
    pc_host *host = &self->host;
    return PyBool_FromLong(atomic_load(&pc_host_record(host, host->rank)->arena) != 0);
}

static PyMethodDef host_methods[] = {
    {"has_arena", (PyCFunction)host_has_arena, METH_NOARGS,
     "Whether the arrays of this process lie in this memory, and not in another world's."},
    {"window", (PyCFunction)host_window, METH_VARARGS,
     "Bytes in the arena of a rank, as they are mapped here."},
    {"set_status", (PyCFunction)host_set_status, METH_O,
     "Say in the control memory what this rank is doing."},
    {"see_failure", (PyCFunction)host_see_failure, METH_NOARGS, "Take note of the failure epoch."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef host_members[] = {
    {"python_busy", T_BOOL, offsetof(pc_host_object, host.python_busy), 0,
     "Whether a thread holds the lock of the engine in Python."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot host_slots[] = {
    {Py_tp_new, host_new},
    {Py_tp_dealloc, host_dealloc},
    {Py_tp_methods, host_methods},
    {Py_tp_members, host_members},
    {Py_tp_doc, "The memory that the ranks of one host share, mapped."},
    {0, NULL},
};

PyType_Spec pc_host_spec = {
    .name = "pycoll._transports._core.MappedHost",
    .basicsize = sizeof(pc_host_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = host_slots,
};
