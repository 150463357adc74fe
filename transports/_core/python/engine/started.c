/* What the core has begun: its end, its events, and the type `_core.Started`. See started.h. */
#include "started.h"
#include "python/arguments/arrays.h"
#include "python/arguments/timeout.h"

#include <structmember.h>

void *pc_started_new(PyObject *type, const struct pc_started_ops *ops, void *methods,
                     bool is_blocking) {
    struct pc_started *self = pc_new((PyTypeObject *)type);
    if (self == NULL)
        return NULL;
    self->ops = ops;
    self->of = (struct pc_methods *)Py_NewRef((PyObject *)methods);
    self->event.kind = PC_EVENT_STARTED;
    self->is_blocking = is_blocking;
    return self;
}

/* --- ends ------------------------------------------------------------------------------------- */

void pc_started_end(struct pc_started *self, int status, bool is_told) {
    pc_engine_object *engine = self->of->engine;
    self->under_way = false;
    if (self->is_pending)
        pc_drive_pending(&engine->drive, -1);
    if (self->is_reporting) {
        /* who tells it lets it go */
    } else if (is_told || self->is_watched || self->event.stands) {
        pc_engine_post(engine, &self->event); /* which keeps it alive */
    } else {
        self->next = engine->ended;
        pc_engine_set(&engine->ended, self);
    }
    pc_op_end(&self->op, status);
}

static void let_go(struct pc_started *self) {
    self->ops->let_go(self);
    Py_DECREF((PyObject *)self);
}

void pc_engine_let_go(pc_engine_object *engine) {
    struct pc_turn turn;
    pc_link_settle(engine);
    if (!pc_engine_has(engine->ended))
        return;
    (void)pc_engine_take(engine, &turn);
    struct pc_started *ended = engine->ended;
    pc_engine_set(&engine->ended, NULL);
    pc_engine_give(engine, &turn);
    while (ended != NULL) {
        struct pc_started *self = ended;
        ended = self->next;
        let_go(self);
    }
}

static struct pc_started *of_event(struct pc_event *event) {
    return PC_CHAINED_IN(event, struct pc_started, event);
}

void pc_started_event_taken(struct pc_event *event) { of_event(event)->is_reporting = true; }

PyObject *pc_started_event(pc_engine_object *engine, struct pc_event *event) {
    struct pc_started *self = of_event(event);
    PyObject *tuple = Py_BuildValue("iO", PC_EVENT_STARTED, (PyObject *)self);
    struct pc_turn turn;
    (void)pc_engine_take(engine, &turn);
    self->is_reporting = false;
    bool has_ended = !self->under_way;
    pc_engine_give(engine, &turn);
    if (has_ended)
        let_go(self);
    return tuple;
}

/* --- methods ---------------------------------------------------------------------------------- */

PyObject *pc_wait_in_python(PyObject *self, PyObject *const *args, Py_ssize_t count,
                            PyObject *keywords) {
    PyObject *wait = PyObject_GetAttrString(self, "_wait");
    PyObject *result = wait != NULL ? pc_call_slow(wait, args, count, keywords) : NULL;
    Py_XDECREF(wait);
    return result;
}

PyObject *pc_started_wait_method(struct pc_started *self, PyObject *const *args, Py_ssize_t count,
                                 PyObject *keywords) {
    uint64_t timeout_ns;
    if (!pc_timeout_of_wait(args, count, keywords, self->of->context->op_timeout_ns, &timeout_ns))
        return pc_wait_in_python((PyObject *)self, args, count, keywords);
    if (self->ops->is_done(self))
        return self->ops->result(self);
    struct pc_patience patience = pc_patience(timeout_ns);
    int done = self->of->engine->python_busy ? 0 : self->ops->wait(self, patience.until_ns);
    if (done != 0)
        return done > 0 ? self->ops->result(self) : NULL;
    PyObject *left = pc_patience_left(&patience);
    PyObject *result =
        left != NULL ? PyObject_CallMethod((PyObject *)self, "_wait", "O", left) : NULL;
    Py_XDECREF(left);
    return result;
}

static PyObject *started_done(struct pc_started *self, void *Py_UNUSED(unused)) {
    return self->ops->done != NULL ? self->ops->done(self)
                                   : PyBool_FromLong(self->ops->is_done(self));
}

static PyObject *started_test(struct pc_started *self, PyObject *Py_UNUSED(unused)) {
    pc_engine_object *engine = self->of->engine;
    if (!self->ops->is_done(self) && !engine->python_busy) {
        pc_engine_look(engine);
        if ((self->ops->go_on != NULL && self->ops->go_on(self) < 0) || pc_engine_hear(engine) < 0)
            return NULL;
    }
    return started_done(self, NULL);
}

static PyObject *started_result(struct pc_started *self, void *Py_UNUSED(unused)) {
    if (!self->ops->is_done(self))
        return PyObject_CallMethod((PyObject *)self, "_failed", NULL);
    return self->ops->result(self);
}

static PyObject *started_owner(struct pc_started *self, void *Py_UNUSED(unused)) {
    return Py_NewRef(self->of->owner != NULL ? self->of->owner : Py_None);
}

static PyObject *started_watch(struct pc_started *self, PyObject *Py_UNUSED(unused)) {
    pc_engine_object *engine = self->of->engine;
    struct pc_turn turn;
    bool under_way = pc_engine_take(engine, &turn) && self->under_way;
    self->is_watched |= under_way;
    if (under_way && self->ops->watched != NULL)
        self->ops->watched(self);
    pc_engine_give(engine, &turn);
    pc_engine_let_go(engine);
    return PyBool_FromLong(under_way);
}

bool pc_started_give_up(struct pc_started *self) {
    pc_engine_object *engine = self->of->engine;
    struct pc_turn turn;
    if (self->ops->give_up == NULL)
        return false;
    bool given_up = pc_engine_take(engine, &turn) && self->ops->give_up(self);
    pc_engine_give(engine, &turn);
    pc_engine_let_go(engine);
    return given_up;
}

static PyObject *started_give_up(struct pc_started *self, PyObject *Py_UNUSED(unused)) {
    return PyBool_FromLong(pc_started_give_up(self));
}

static PyMethodDef started_methods[] = {
    {"wait", (PyCFunction)(void (*)(void))pc_started_wait_method, METH_FASTCALL | METH_KEYWORDS,
     "wait($self, timeout=None)\n--\n\nReturn the result, when the call is done. See "
     "pycoll.Request.wait."},
    {"test", (PyCFunction)started_test, METH_NOARGS,
     "Return whether the call is done, in whatever way; never waits."},
    {"_watch", (PyCFunction)started_watch, METH_NOARGS,
     "Have an event at its end; False: it has ended."},
    {"_give_up", (PyCFunction)started_give_up, METH_NOARGS,
     "Give it up: its memory is not used any more."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef started_values[] = {
    {"done", (getter)started_done, NULL,
     "Whether the call is done, as far as is known without looking.", NULL},
    {"result", (getter)started_result, NULL, "What the call returns. See pycoll.Request.result.",
     NULL},
    {"_owner", (getter)started_owner, NULL, "What the methods of its communicator keep.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef started_members[] = {
    {"_collected", T_BOOL, offsetof(struct pc_started, collected), 0,
     "a wait has returned its result"},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot started_slots[] = {
    {Py_tp_methods, started_methods},
    {Py_tp_getset, started_values},
    {Py_tp_members, started_members},
    {Py_tp_doc, "What the core has begun."},
    {0, NULL},
};

PyType_Spec pc_started_spec = {
    .name = "pycoll._transports._core.Started",
    .basicsize = sizeof(struct pc_started),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = started_slots,
};
