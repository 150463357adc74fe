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

static PyObject *parker_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    PyObject *engine;
    if (!PyArg_ParseTuple(args, "O!", pc_engine_type, &engine))
        return NULL;
    struct pc_parker *self = pc_new(type);
    if (self != NULL) {
        self->engine = (pc_engine_object *)Py_NewRef((PyObject *)engine);
        pc_op_begin(&self->op, &self->engine->drive, -1);
    }
    return (PyObject *)self;
}

static void stop_napping(struct pc_parker *self) {
    struct pc_turn turn;
    if (!pc_engine_take(self->engine, &turn))
        return;
    self->begun = false;
    if (self->naps) {
        self->naps = false;
        PC_LIST_REMOVE(self);
    }
    pc_engine_give(self->engine, &turn);
}

static void parker_dealloc(struct pc_parker *self) {
    if (self->naps)
        stop_napping(self);
    Py_XDECREF((PyObject *)self->engine);
    pc_free(self);
}

static PyObject *parker_begin(struct pc_parker *self, PyObject *args) {
    PyObject *seen = Py_None;
    if (!PyArg_ParseTuple(args, "|O", &seen))
        return NULL;
    pc_engine_object *engine = self->engine;
    bool naps = seen != Py_None;
    uint64_t number = naps ? PyLong_AsUnsignedLongLong(seen) : 0;
    struct pc_turn turn;
    if (PyErr_Occurred())
        return NULL;
    bool may = pc_engine_take(engine, &turn) && (!naps || engine->rings == number);
    if (may) {
        pc_op_begin(&self->op, &engine->drive, -1);
        self->begun = true;
        self->naps = naps;
    }
    if (may && naps) {
        PC_LIST_ADD(engine->nappers, self);
    }
    pc_engine_give(engine, &turn);
    return PyBool_FromLong(may);
}

static PyObject *parker_wait(struct pc_parker *self, PyObject *number) {
    double seconds = PyFloat_AsDouble(number);
    if (PyErr_Occurred())
        return NULL;
    uint64_t deadline = PC_FOR_EVER;
    if (seconds <= 0)
        deadline = 0;
    else if (seconds < 1e9)
        deadline = pc_now_ns() + (uint64_t)(seconds * 1e9);
    pc_engine_object *engine = self->engine;
    if (engine->is_open) {
        PyThreadState *state = PyEval_SaveThread();
        pc_drive_wait(&engine->drive, &self->op, NULL, deadline, PARKER_SLICE_NS);
        PyEval_RestoreThread(state);
    }
    stop_napping(self);
    Py_RETURN_NONE;
}

static PyObject *parker_wake(struct pc_parker *self, PyObject *Py_UNUSED(unused)) {
    struct pc_turn turn;
    if (pc_engine_take(self->engine, &turn)) {
        if (self->begun && !pc_op_is_done(&self->op))
            pc_op_end(&self->op, 0);
        pc_engine_give(self->engine, &turn);
    }
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
