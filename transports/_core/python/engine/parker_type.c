/* `_core.Parker`: one thread waits with it until another wakes it, or the engine has something for
   Python. See engine_type.h. */
#include "engine_type.h"

/* So often a thread that waits for something of Python's looks for signals: one may have come
   between its last look and its sleep. */
#define PARKER_SLICE_NS 100000000u

struct pc_parker {
    PyObject_HEAD
    pc_engine_object *engine;
    struct pc_op op; /* ends when the thread is woken */
    bool begun, naps;
    struct pc_parker *next, **at; /* of those that nap */
};

static PyTypeObject *engine_type;

static PyObject *parker_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *engine;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "O!", engine_type, &engine))
        return NULL;
    struct pc_parker *self =
        (struct pc_parker *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self != NULL) {
        self->engine = (pc_engine_object *)Py_NewRef((PyObject *)engine);
        pc_op_begin(&self->op, &self->engine->drive, -1);
    }
    return (PyObject *)self;
}

static void stop_napping(pc_engine_object *engine, void *argument) {
    struct pc_parker *self = argument;
    (void)engine;
    self->begun = false;
    if (!self->naps)
        return;
    self->naps = false;
    *self->at = self->next;
    if (self->next != NULL)
        self->next->at = self->at;
}

static void parker_dealloc(struct pc_parker *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    if (self->naps)
        pc_engine_do(self->engine, stop_napping, self);
    Py_XDECREF((PyObject *)self->engine);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

struct beginning {
    struct pc_parker *parker;
    bool naps, may;
    uint64_t seen;
};

static void begin(pc_engine_object *engine, void *argument) {
    struct beginning *beginning = argument;
    struct pc_parker *self = beginning->parker;
    beginning->may = !beginning->naps || engine->rings == beginning->seen;
    if (!beginning->may)
        return;
    pc_op_begin(&self->op, &engine->drive, -1);
    self->begun = true;
    self->naps = beginning->naps;
    if (!self->naps)
        return;
    self->next = engine->nappers;
    self->at = &engine->nappers;
    if (self->next != NULL)
        self->next->at = &self->next;
    engine->nappers = self;
}

static PyObject *parker_begin(struct pc_parker *self, PyObject *args) {
    PyObject *seen = Py_None;
    if (!PyArg_ParseTuple(args, "|O", &seen))
        return NULL;
    struct beginning beginning = {.parker = self, .naps = seen != Py_None};
    if (beginning.naps)
        beginning.seen = PyLong_AsUnsignedLongLong(seen);
    if (PyErr_Occurred())
        return NULL;
    return PyBool_FromLong(pc_engine_do(self->engine, begin, &beginning) && beginning.may);
}

static PyObject *parker_wait(struct pc_parker *self, PyObject *number) {
    double seconds = PyFloat_AsDouble(number);
    if (PyErr_Occurred())
        return NULL;
    uint64_t deadline = PC_FOR_EVER;
    if (seconds <= 0)
        deadline = 0;
    else if (seconds < 1e9)
        deadline = pc_drive_now_ns() + (uint64_t)(seconds * 1e9);
    pc_engine_object *engine = self->engine;
    if (engine->is_open) {
        PyThreadState *state = PyEval_SaveThread();
        pc_drive_wait(&engine->drive, &self->op, NULL, deadline, PARKER_SLICE_NS);
        PyEval_RestoreThread(state);
    }
    pc_engine_do(engine, stop_napping, self);
    Py_RETURN_NONE;
}

static void wake(pc_engine_object *engine, void *argument) {
    struct pc_parker *self = argument;
    (void)engine;
    if (self->begun && !pc_op_is_done(&self->op))
        pc_op_end(&self->op, 0);
}

static PyObject *parker_wake(struct pc_parker *self, PyObject *unused) {
    (void)unused;
    pc_engine_do(self->engine, wake, self);
    Py_RETURN_NONE;
}

/* Who naps may have been meant. */
void pc_parker_rung(void *owner) {
    pc_engine_object *self = owner;
    atomic_store_explicit(&self->rings,
                          atomic_load_explicit(&self->rings, memory_order_relaxed) + 1,
                          memory_order_relaxed);
    for (struct pc_parker *parker = self->nappers; parker != NULL; parker = parker->next)
        if (!pc_op_is_done(&parker->op))
            pc_op_end(&parker->op, 0);
}

static PyMethodDef parker_methods[] = {
    {"begin", (PyCFunction)parker_begin, METH_VARARGS,
     "begin(seen=None) -> bool: from now on `wake` ends the wait; with `seen` the doorbell does, "
     "too. False: it has rung, for whomever, since `MessageEngine.rings` was that."},
    {"wait", (PyCFunction)parker_wait, METH_O,
     "wait(seconds): drive, or sleep, until `wake` is called, a signal has come, or there is "
     "something for Python to do."},
    {"wake", (PyCFunction)parker_wake, METH_NOARGS, "End the wait; from any thread."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot parker_slots[] = {
    {Py_tp_new, parker_new},
    {Py_tp_dealloc, parker_dealloc},
    {Py_tp_methods, parker_methods},
    {Py_tp_doc, "Parker(engine): one thread waits with it for what Python does."},
    {0, NULL},
};

PyType_Spec pc_parker_spec = {
    .name = "pycoll._transports._core.Parker",
    .basicsize = sizeof(struct pc_parker),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = parker_slots,
};

void pc_parker_types(PyTypeObject *engine) { engine_type = engine; }
