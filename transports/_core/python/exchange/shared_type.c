/* `_core.SharedCollectives`: the collectives of one communicator in shared memory, as its methods.
   See comm.h. */
#include "comm.h"

static PyTypeObject *comm_type;

/* set_slow(kind, function): what the method of that kind calls for all that it does not do
   itself */
static PyObject *shared_set_slow(pc_shared *self, PyObject *args) {
    int kind;
    PyObject *function;
    if (!PyArg_ParseTuple(args, "iO", &kind, &function))
        return NULL;
    if (kind < 0 || kind >= PC_METHODS) {
        PyErr_SetString(PyExc_ValueError, "no such kind");
        return NULL;
    }
    PyObject *old = self->slow[kind];
    self->slow[kind] = Py_NewRef(function);
    Py_XDECREF(old);
    Py_RETURN_NONE;
}

/* set_uneven(kind, slow, resume, sign): see struct pc_uneven */
static PyObject *shared_set_uneven(pc_shared *self, PyObject *args) {
    int kind;
    PyObject *slow, *resume, *sign;
    if (!PyArg_ParseTuple(args, "iOOO", &kind, &slow, &resume, &sign))
        return NULL;
    if (kind < 0 || kind >= PC_UNEVEN_KINDS || self->uneven[kind].slow != NULL) {
        PyErr_SetString(PyExc_ValueError, "no such kind, or it is set");
        return NULL;
    }
    self->uneven[kind] =
        (struct pc_uneven){Py_NewRef(slow), Py_NewRef(resume), Py_NewRef(sign), NULL, 0, 0, 0};
    Py_RETURN_NONE;
}

static PyObject *shared_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *comm;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "O!", comm_type, &comm))
        return NULL;
    pc_shared *self = (pc_shared *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self != NULL)
        self->comm = (pc_comm *)Py_NewRef(comm);
    return (PyObject *)self;
}

static int shared_traverse(pc_shared *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT((PyObject *)self->comm);
    for (int kind = 0; kind < PC_METHODS; kind++)
        Py_VISIT(self->slow[kind]);
    for (int kind = 0; kind < PC_UNEVEN_KINDS; kind++) {
        Py_VISIT(self->uneven[kind].slow);
        Py_VISIT(self->uneven[kind].resume);
        Py_VISIT(self->uneven[kind].sign);
    }
    return 0;
}

static int shared_clear(pc_shared *self) {
    for (int kind = 0; kind < PC_METHODS; kind++)
        Py_CLEAR(self->slow[kind]);
    for (int kind = 0; kind < PC_UNEVEN_KINDS; kind++) {
        struct pc_uneven *uneven = &self->uneven[kind];
        Py_CLEAR(uneven->slow);
        Py_CLEAR(uneven->resume);
        Py_CLEAR(uneven->sign);
        Py_CLEAR(uneven->text);
    }
    return 0;
}

static void shared_dealloc(pc_shared *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    PyObject_GC_UnTrack(self);
    shared_clear(self);
    Py_XDECREF((PyObject *)self->comm);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyMethodDef own_methods[] = {
    {"set_slow", (PyCFunction)shared_set_slow, METH_VARARGS,
     "What a method calls for what it does not do itself."},
    {"set_uneven", (PyCFunction)shared_set_uneven, METH_VARARGS,
     "The same for a collective of blocks that differ in shape."},
    {NULL, NULL, 0, NULL},
};

PyType_Spec *pc_shared_spec(PyTypeObject *comm) {
    static PyMethodDef methods[32];
    static PyType_Slot slots[] = {
        {Py_tp_new, shared_new},
        {Py_tp_dealloc, shared_dealloc},
        {Py_tp_traverse, shared_traverse},
        {Py_tp_clear, shared_clear},
        {Py_tp_doc, "SharedCollectives(comm): the methods of a communicator in shared memory."},
        {Py_tp_methods, methods},
        {0, NULL},
    };
    static PyType_Spec spec = {
        .name = "pycoll.Communicator", /* what the repr of its methods says to users */
        .basicsize = sizeof(pc_shared),
        .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
        .slots = slots,
    };
    PyMethodDef *parts[] = {own_methods, pc_shared_methods, pc_shared_uneven_methods,
                            pc_shared_reduce_scatterv_methods};
    int count = 0;
    for (size_t part = 0; part < sizeof parts / sizeof *parts; part++)
        for (PyMethodDef *method = parts[part]; method->ml_name != NULL; method++)
            methods[count++] = *method;
    comm_type = comm;
    return &spec;
}
