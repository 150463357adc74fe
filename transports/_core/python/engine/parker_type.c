/* `_core.Seat`: where one thread waits for what Python does. See engine_type.h. */
#include "engine_type.h"

/* So often a thread that waits for something of Python's looks for signals: one may have come
   between its last look and its sleep. */
#define SEAT_SLICE_NS 100000000u

struct pc_seat {
    PyObject_HEAD
    pc_engine_object *engine;
    struct pc_op op; /* ends when the seat is rung */
    bool begun, naps;
    struct pc_seat *next, **at; /* of those that nap */
};

static PyTypeObject *engine_type;

static PyObject *seat_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *engine;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "O!", engine_type, &engine))
        return NULL;
    struct pc_seat *self =
        (struct pc_seat *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self != NULL) {
        self->engine = (pc_engine_object *)Py_NewRef((PyObject *)engine);
        pc_op_begin(&self->op, &self->engine->drive, -1);
    }
    return (PyObject *)self;
}

static void stop_napping(pc_engine_object *engine, void *argument) {
    struct pc_seat *self = argument;
    (void)engine;
    self->begun = false;
    if (!self->naps)
        return;
    self->naps = false;
    *self->at = self->next;
    if (self->next != NULL)
        self->next->at = self->at;
}

static void seat_dealloc(struct pc_seat *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    if (self->naps)
        pc_engine_do(self->engine, stop_napping, self);
    Py_XDECREF((PyObject *)self->engine);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

struct beginning {
    struct pc_seat *seat;
    bool naps, may;
    uint64_t seen;
};

static void begin(pc_engine_object *engine, void *argument) {
    struct beginning *beginning = argument;
    struct pc_seat *self = beginning->seat;
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

static PyObject *seat_begin(struct pc_seat *self, PyObject *args) {
    PyObject *seen = Py_None;
    if (!PyArg_ParseTuple(args, "|O", &seen))
        return NULL;
    struct beginning beginning = {.seat = self, .naps = seen != Py_None};
    if (beginning.naps)
        beginning.seen = PyLong_AsUnsignedLongLong(seen);
    if (PyErr_Occurred())
        return NULL;
    return PyBool_FromLong(pc_engine_do(self->engine, begin, &beginning) && beginning.may);
}

static PyObject *seat_wait(struct pc_seat *self, PyObject *number) {
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
        pc_drive_wait(&engine->drive, &self->op, NULL, deadline, SEAT_SLICE_NS);
        PyEval_RestoreThread(state);
    }
    pc_engine_do(engine, stop_napping, self);
    Py_RETURN_NONE;
}

static void ring(pc_engine_object *engine, void *argument) {
    struct pc_seat *self = argument;
    (void)engine;
    if (self->begun && !pc_op_is_done(&self->op))
        pc_op_end(&self->op, 0);
}

static PyObject *seat_ring(struct pc_seat *self, PyObject *unused) {
    (void)unused;
    pc_engine_do(self->engine, ring, self);
    Py_RETURN_NONE;
}

/* Who naps may have been meant. */
void pc_seat_rung(void *owner) {
    pc_engine_object *self = owner;
    atomic_store_explicit(&self->rings,
                          atomic_load_explicit(&self->rings, memory_order_relaxed) + 1,
                          memory_order_relaxed);
    for (struct pc_seat *seat = self->nappers; seat != NULL; seat = seat->next)
        if (!pc_op_is_done(&seat->op))
            pc_op_end(&seat->op, 0);
}

static PyMethodDef seat_methods[] = {
    {"begin", (PyCFunction)seat_begin, METH_VARARGS,
     "begin(seen=None) -> bool: from now on `ring` ends the wait; with `seen` the doorbell does, "
     "too. False: it has rung, for whomever, since `MessageEngine.rings` was that."},
    {"wait", (PyCFunction)seat_wait, METH_O,
     "wait(seconds): drive, or sleep, until the seat is rung, a signal has come, or there is "
     "something for Python to do."},
    {"ring", (PyCFunction)seat_ring, METH_NOARGS, "End the wait; from any thread."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot seat_slots[] = {
    {Py_tp_new, seat_new},
    {Py_tp_dealloc, seat_dealloc},
    {Py_tp_methods, seat_methods},
    {Py_tp_doc, "Seat(engine): where one thread waits for what Python does."},
    {0, NULL},
};

PyType_Spec pc_seat_spec = {
    .name = "pycoll._transports._core.Seat",
    .basicsize = sizeof(struct pc_seat),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = seat_slots,
};

void pc_seat_types(PyTypeObject *engine) { engine_type = engine; }
