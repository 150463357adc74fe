/* `_core.Several`: a wait for several requests that takes long, and in which Python waits. It hears
   of it once, however many they are. */
#include "gathering.h"

#include <stdlib.h>

typedef struct {
    PyObject_HEAD
    struct pc_gathering gathering;
    struct pc_event event;
    PyObject *owner; /* whom the event tells; NULL: it has not begun, or is over */
    bool is_begun;   /* it keeps itself alive, until its event was taken or it is over */
} pc_several_object;

static void ended(struct pc_several *several) {
    pc_several_object *self =
        (pc_several_object *)(void *)((char *)several -
                                      offsetof(pc_several_object, gathering.several));
    self->event.kind = PC_EVENT_SEVERAL;
    pc_engine_post(self->gathering.engine, &self->event);
}

PyObject *pc_several_event(struct pc_event *event) {
    pc_several_object *self = PC_CHAINED_IN(event, pc_several_object, event);
    /* for Python they are alike */
    PyObject *answer = Py_BuildValue("iO", PC_EVENT_STARTED, self->owner);
    Py_CLEAR(self->owner);
    Py_DECREF((PyObject *)self);
    return answer;
}

/* Python goes on with what holds a message, and who waited for that waits no more. */
static void let_python_go_on(pc_engine_object *engine, struct pc_started *started) {
    if (pc_op_is_done(&started->op))
        pc_op_begin(&started->op, &engine->drive, -1);
    pc_engine_post(engine, &started->event);
}

enum { OVER, WAITS, TAKEN };

/* With the lock. */
static int begin(pc_several_object *self) {
    struct pc_gathering *gathering = &self->gathering;
    uint32_t left = 0;
    bool is_over = false;
    gathering->is_taken = false;
    for (Py_ssize_t index = 0; index < gathering->count; index++) {
        const struct pc_awaited *awaited = &gathering->awaited[index];
        struct pc_op *op = &awaited->started->op;
        if (pc_awaited_is_held(awaited))
            let_python_go_on(gathering->engine, awaited->started);
        if (pc_op_is_done(op))
            is_over |= gathering->any || !pc_awaited_is_well(awaited);
        else if (pc_several_add(&gathering->several, op))
            left++;
        else
            gathering->is_taken = true;
    }
    if (gathering->is_taken || is_over || left == 0) {
        pc_scatter(gathering);
        return gathering->is_taken ? TAKEN : OVER;
    }
    gathering->several.ended = ended;
    atomic_store_explicit(&gathering->several.left, gathering->any ? 1 : left,
                          memory_order_relaxed);
    self->is_begun = true;
    return WAITS;
}

/* True: its owner will be told; False: there is nothing to wait for; None: another thread waits for
   one of them, or the engine is closed. */
static PyObject *several_begin(pc_several_object *self, PyObject *owner) {
    Py_INCREF((PyObject *)self);
    self->owner = Py_NewRef(owner);
    struct pc_turn turn;
    int answer = pc_engine_take(self->gathering.engine, &turn) ? begin(self) : TAKEN;
    pc_engine_give(self->gathering.engine, &turn);
    if (answer != WAITS) {
        Py_CLEAR(self->owner);
        Py_DECREF((PyObject *)self);
    }
    if (answer == TAKEN)
        Py_RETURN_NONE;
    return PyBool_FromLong(answer == WAITS);
}

static PyObject *several_end(pc_several_object *self, PyObject *Py_UNUSED(unused)) {
    pc_engine_object *engine = self->gathering.engine;
    struct pc_turn turn;
    (void)pc_engine_take(engine, &turn);
    bool has_ended = pc_several_is_done(&self->gathering.several);
    /* else who takes the event lets it go */
    bool is_mine = self->is_begun && (!has_ended || self->event.stands);
    self->is_begun = false;
    pc_scatter(&self->gathering);
    pc_engine_unpost(engine, &self->event);
    pc_engine_give(engine, &turn);
    if (is_mine) {
        Py_CLEAR(self->owner);
        Py_DECREF((PyObject *)self);
    }
    Py_RETURN_NONE;
}

static PyObject *several_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(keywords)) {
    PyObject *listed;
    int any;
    if (!PyArg_ParseTuple(args, "O!p", &PyList_Type, &listed, &any))
        return NULL;
    pc_several_object *self = pc_new(type);
    if (self == NULL)
        return NULL;
    self->gathering.listed = listed;
    self->gathering.any = any != 0;
    self->gathering.awaited =
        calloc((size_t)PyList_Size(listed) * 2 + 1, sizeof *self->gathering.awaited);
    bool is_in_core = self->gathering.awaited != NULL && pc_gather(&self->gathering);
    if (is_in_core) {
        Py_INCREF((PyObject *)self->gathering.engine);
        return (PyObject *)self;
    }
    if (self->gathering.awaited != NULL)
        PyErr_SetString(PyExc_TypeError, "not all of them are in the core, and of one engine");
    else
        PyErr_NoMemory();
    self->gathering.engine = NULL;
    Py_DECREF((PyObject *)self);
    return NULL;
}

static void several_dealloc(pc_several_object *self) {
    pc_gathering_let_go(&self->gathering);
    free(self->gathering.awaited);
    Py_XDECREF((PyObject *)self->gathering.engine);
    Py_XDECREF(self->owner);
    pc_free(self);
}

static PyMethodDef several_methods[] = {
    {"begin", (PyCFunction)several_begin, METH_O,
     "begin(owner): have it told, once: `_ended()`. False: there is nothing to wait for; None: "
     "another thread waits for one of them."},
    {"end", (PyCFunction)several_end, METH_NOARGS, "Have nobody told any more."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot several_slots[] = {
    {Py_tp_new, several_new},
    {Py_tp_dealloc, several_dealloc},
    {Py_tp_methods, several_methods},
    {Py_tp_doc, "A wait for several requests of one engine, or for any of them."},
    {0, NULL},
};

PyType_Spec pc_several_spec = {
    .name = "pycoll._transports._core.Several",
    .basicsize = sizeof(pc_several_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = several_slots,
};
