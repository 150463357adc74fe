/* `_core.Collective`: a collective under way, as Python sees it. See collective.h. */
#include "collective.h"

#include "python/arguments/memory.h"
#include "python/arguments/timeout.h"
#include "reduce/reduce_kernels.h"

#include <stdlib.h>
#include <structmember.h>

/* Ranks for which a call is said to wait. */
#define MOST_AWAITED 64

static PyTypeObject *collective_type;

void pc_collective_types(PyTypeObject *collective) { collective_type = collective; }

static PyObject *int_of(const struct pc_started *self) {
    PyObject *result = pc_int_object(self->reduction, &self->numbers[0]);
    if (PC_UNLIKELY(result == NULL && !PyErr_Occurred())) {
        PyObject *text = PyUnicode_FromStringAndSize((const char *)self->plan->text,
                                                     (Py_ssize_t)self->plan->text_nbytes);
        pc_raise_int_error(text, NULL);
        Py_XDECREF(text);
    } else if (result != NULL && self->kind == PC_REDUCE &&
               self->root != self->collectives->rank) {
        Py_DECREF(result);
        result = Py_NewRef(Py_None);
    }
    return result;
}

static PyObject *result_of(struct pc_started *self) {
    if (PC_UNLIKELY(self->status != 0 || !pc_op_is_done(&self->op)))
        return PyObject_CallMethod((PyObject *)self, "_failed", NULL);
    self->collected = 1;
    if (PC_LIKELY(self->number_dtype == 0))
        return Py_NewRef(self->result);
    return self->number_dtype == PC_INT64
               ? int_of(self)
               : pc_number_object(self->number_dtype, &self->numbers[0]);
}

bool pc_is_collective(PyObject *object) { return PyObject_TypeCheck(object, collective_type); }

struct pc_op *pc_collective_op(PyObject *object, pc_engine_object **engine) {
    struct pc_started *self = (struct pc_started *)object;
    *engine = self->collectives->engine;
    return &self->op;
}

PyObject *pc_collective_result(PyObject *object) { return result_of((struct pc_started *)object); }

bool pc_collective_wait(struct pc_started *self, uint64_t until_ns) {
    if (pc_op_is_done(&self->op))
        return true;
    pc_engine_object *engine = self->collectives->engine;
    PyThreadState *state = PyEval_SaveThread();
    pc_drive_wait(&engine->drive, &self->op, NULL, until_ns, PC_FOR_EVER);
    PyEval_RestoreThread(state);
    pc_engine_let_go(engine);
    return pc_op_is_done(&self->op);
}

PyObject *pc_collective_wait_method(struct pc_started *self, PyObject *const *args,
                                    Py_ssize_t count, PyObject *keywords) {
    uint64_t timeout_ns;
    uint64_t default_ns = self->collectives->context->op_timeout_ns;
    if (!pc_timeout_of_wait(args, count, keywords, default_ns, &timeout_ns)) {
        PyObject *slow = PyObject_GetAttrString((PyObject *)self, "_wait");
        PyObject *result = slow != NULL ? pc_call_slow(slow, args, count, keywords) : NULL;
        Py_XDECREF(slow);
        return result;
    }
    if (pc_op_is_done(&self->op))
        return result_of(self);
    struct pc_patience patience = pc_patience(timeout_ns);
    if (!self->collectives->engine->python_busy && pc_collective_wait(self, patience.until_ns))
        return result_of(self);
    PyObject *left = pc_patience_left(&patience);
    PyObject *result =
        left != NULL ? PyObject_CallMethod((PyObject *)self, "_wait", "O", left) : NULL;
    Py_XDECREF(left);
    return result;
}

static PyObject *collective_test(struct pc_started *self, PyObject *unused) {
    (void)unused;
    pc_engine_object *engine = self->collectives->engine;
    if (!pc_op_is_done(&self->op) && !engine->python_busy) {
        pc_engine_look(engine);
        if (pc_engine_hear(engine) < 0)
            return NULL;
    }
    return PyBool_FromLong(pc_op_is_done(&self->op));
}

struct asking {
    struct pc_started *started;
    bool answer;
    int ranks[MOST_AWAITED];
    size_t count;
};

static void watch(pc_engine_object *engine, void *argument) {
    struct asking *asking = argument;
    (void)engine;
    asking->answer = asking->started->under_way;
    asking->started->is_watched |= asking->answer;
}

static void give_up(pc_engine_object *engine, void *argument) {
    struct asking *asking = argument;
    (void)engine;
    pc_collective_give_up(asking->started);
}

static void find_awaited(pc_engine_object *engine, void *argument) {
    struct asking *asking = argument;
    (void)engine;
    asking->count = pc_collective_awaited(asking->started, asking->ranks, MOST_AWAITED);
}

static bool ask(struct asking *asking, void (*work)(pc_engine_object *engine, void *argument)) {
    pc_engine_object *engine = asking->started->collectives->engine;
    pc_engine_do(engine, work, asking);
    pc_engine_let_go(engine);
    return asking->answer;
}

static PyObject *collective_watch(struct pc_started *self, PyObject *unused) {
    (void)unused;
    struct asking asking = {.started = self};
    return PyBool_FromLong(ask(&asking, watch));
}

static PyObject *collective_give_up(struct pc_started *self, PyObject *unused) {
    (void)unused;
    struct asking asking = {.started = self};
    ask(&asking, give_up);
    Py_RETURN_NONE;
}

static PyObject *collective_awaited(struct pc_started *self, PyObject *unused) {
    (void)unused;
    struct asking asking = {.started = self};
    ask(&asking, find_awaited);
    PyObject *ranks = PyList_New((Py_ssize_t)asking.count);
    for (size_t index = 0; ranks != NULL && index < asking.count; index++)
        PyList_SetItem(ranks, (Py_ssize_t)index, PyLong_FromLong(asking.ranks[index]));
    return ranks;
}

static PyObject *collective_done(struct pc_started *self, void *unused) {
    (void)unused;
    return PyBool_FromLong(pc_op_is_done(&self->op));
}

static PyObject *collective_result(struct pc_started *self, void *unused) {
    (void)unused;
    return result_of(self);
}

struct end {
    struct pc_started *started;
    int status, from;
    size_t came, expected;
};

static void find_end(pc_engine_object *engine, void *argument) {
    struct end *end = argument;
    const struct pc_started *started = end->started;
    (void)engine;
    *end = (struct end){end->started, started->status, started->from, started->came,
                        started->expected};
}

/* (text, number, status, rank or chunk, bytes that came, bytes expected) */
static PyObject *collective_description(struct pc_started *self, void *unused) {
    (void)unused;
    struct end end = {.started = self};
    if (!pc_engine_do(self->collectives->engine, find_end, &end)) /* it is closed: nobody else
                                                                     writes there */
        find_end(self->collectives->engine, &end);
    return Py_BuildValue("s#Kiinn", self->plan->text, (Py_ssize_t)self->plan->text_nbytes,
                         (unsigned long long)self->number, end.status, end.from,
                         (Py_ssize_t)end.came, (Py_ssize_t)end.expected);
}

static PyObject *collective_owner(struct pc_started *self, void *unused) {
    (void)unused;
    return Py_NewRef(self->collectives->owner != NULL ? self->collectives->owner : Py_None);
}

static void take_announcement(pc_engine_object *engine, void *argument) {
    struct asking *asking = argument;
    (void)engine;
    asking->answer = asking->started->is_held && asking->started->under_way;
    asking->started->is_held = false;
}

/* (announcement, signature) */
static PyObject *collective_take_announcement(struct pc_started *self, PyObject *unused) {
    (void)unused;
    struct asking asking = {.started = self};
    if (!ask(&asking, take_announcement))
        Py_RETURN_NONE;
    return Py_BuildValue("y#", self->announcement, (Py_ssize_t)self->announcement_nbytes);
}

struct settling {
    struct pc_started *started;
    int status;
};

static void settle(pc_engine_object *engine, void *argument) {
    struct settling *settling = argument;
    (void)engine;
    pc_collective_settle(settling->started, settling->status);
}

static PyObject *collective_settle(struct pc_started *self, PyObject *args) {
    PyObject *result, *before = self->result;
    int failed, unfit;
    if (!PyArg_ParseTuple(args, "Opp", &result, &failed, &unfit))
        return NULL;
    self->result = Py_NewRef(result);
    Py_XDECREF(before);
    struct settling settling = {self, failed ? PC_FAILED_IN_PYTHON : unfit ? PC_UNFIT : 0};
    pc_engine_do(self->collectives->engine, settle, &settling);
    pc_engine_let_go(self->collectives->engine);
    Py_RETURN_NONE;
}

static PyObject *collective_expect(struct pc_started *self, PyObject *plan) {
    if (pc_collectives_expect(self->collectives, self, plan) < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* (kind, root, place) */
static PyObject *collective_call(struct pc_started *self, void *unused) {
    (void)unused;
    return Py_BuildValue("iiO", self->kind, self->root, self->x != NULL ? self->x : Py_None);
}

static void collective_dealloc(struct pc_started *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    free(self->announcement);
    pc_pipeline_free(&self->pipeline);
    Py_XDECREF(self->algorithm);
    Py_XDECREF(self->x);
    Py_XDECREF(self->result);
    Py_XDECREF(self->source_keeper);
    Py_XDECREF(self->target_keeper);
    Py_XDECREF((PyObject *)self->plan);
    Py_XDECREF((PyObject *)self->collectives);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyMethodDef collective_methods[] = {
    {"wait", (PyCFunction)(void (*)(void))pc_collective_wait_method, METH_FASTCALL | METH_KEYWORDS,
     "wait($self, timeout=None)\n--\n\nReturn the result, when the call is done. See "
     "pycoll.Request.wait."},
    {"test", (PyCFunction)collective_test, METH_NOARGS,
     "Return whether the call is done, in whatever way; never waits."},
    {"_watch", (PyCFunction)collective_watch, METH_NOARGS,
     "Have an event at its end; False: it has ended."},
    {"_give_up", (PyCFunction)collective_give_up, METH_NOARGS,
     "Give it up: its memory is not used any more."},
    {"_awaited", (PyCFunction)collective_awaited, METH_NOARGS,
     "World ranks that must be in the call before it ends."},
    {"_take_announcement", (PyCFunction)collective_take_announcement, METH_NOARGS,
     "The root's announcement, if Python must see it and has not; else None."},
    {"_settle", (PyCFunction)collective_settle, METH_VARARGS,
     "_settle(result, failed, unfit): what Python went on with is done."},
    {"_expect", (PyCFunction)collective_expect, METH_O,
     "_expect(plan): calls like this one may go by that."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef collective_values[] = {
    {"done", (getter)collective_done, NULL,
     "Whether the call is done, as far as is known without looking.", NULL},
    {"result", (getter)collective_result, NULL, "What the call returns. See pycoll.Request.result.",
     NULL},
    {"_description", (getter)collective_description, NULL,
     "(text, number, status, rank or chunk, bytes that came, bytes expected); the last three say "
     "why it failed.",
     NULL},
    {"_made_by", (getter)collective_call, NULL,
     "(kind, root, x): what was called; off root of a scatter, `out` for x.", NULL},
    {"_owner", (getter)collective_owner, NULL, "What its communicator's `Collectives` keeps.",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef collective_members[] = {
    {"_collected", T_BOOL, offsetof(struct pc_started, collected), 0,
     "a wait has returned its result"},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot collective_slots[] = {
    {Py_tp_dealloc, collective_dealloc},
    {Py_tp_methods, collective_methods},
    {Py_tp_getset, collective_values},
    {Py_tp_members, collective_members},
    {Py_tp_doc, "A collective that is under way in the core."},
    {0, NULL},
};

PyType_Spec pc_collective_spec = {
    .name = "pycoll._transports._core.Collective",
    .basicsize = sizeof(struct pc_started),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .slots = collective_slots,
};
