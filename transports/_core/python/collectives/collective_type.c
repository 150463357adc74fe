/* `_core.Collective`: a collective under way, as Python sees it. See collective.h. */
#include "collective.h"

#include "python/arguments/collective_call.h"
#include "reduce/reduce_kernels.h"

#include <stdlib.h>

/* Ranks for which a call is said to wait. */
#define MOST_AWAITED 64

static PyObject *int_of(const struct pc_running *self) {
    const pc_collectives *of = self->collectives;
    int count = num_combined(of->size, of->rank, self->kind);
    PyObject *result = self->gathered != NULL
                           ? pc_folded_ints(self->reduction, self->gathered, of->size, count)
                           : pc_int_object(self->reduction, &self->numbers[0]);
    if (PC_UNLIKELY(result == NULL && !PyErr_Occurred())) {
        PyObject *text = PyUnicode_FromStringAndSize((const char *)self->plan->text,
                                                     (Py_ssize_t)self->plan->text_nbytes);
        pc_raise_int_error(text, NULL);
        Py_XDECREF(text);
    } else if (result != NULL && self->kind == PC_REDUCE && self->root != of->rank) {
        Py_DECREF(result);
        result = Py_NewRef(Py_None);
    }
    return result;
}

/* The result, made of what has come, once: making it may run anything. */
static PyObject *made_of(struct pc_running *self) {
    const pc_collectives *collectives = self->collectives;
    PyObject *made, *maker = self->is_settled ? Py_NewRef(self->result) : NULL;
    if (maker != NULL)
        made = PyObject_CallNoArgs(maker);
    else if (self->blocks != NULL)
        made = pc_blocks_result(collectives, self->blocks, self->kind);
    else
        made = pc_announced_object(collectives, self->kind, self->announcement,
                                   self->announcement_nbytes);
    Py_XDECREF(maker);
    if (made != NULL && self->is_raw) { /* else another thread was quicker */
        PyObject *before = self->result;
        self->is_raw = false;
        self->result = Py_NewRef(made);
        Py_XDECREF(before);
    }
    Py_XDECREF(made);
    return made != NULL ? Py_NewRef(self->result) : NULL;
}

static PyObject *result_of(struct pc_started *started) {
    struct pc_running *self = (struct pc_running *)started;
    pc_engine_let_go(self->collectives->engine); /* another thread may have ended it */
    if (PC_UNLIKELY(self->pipeline.status != 0 || !pc_op_is_done(&self->op)))
        return PyObject_CallMethod((PyObject *)self, "_failed", NULL);
    self->collected = 1;
    if (PC_LIKELY(self->number_dtype == 0))
        return PC_UNLIKELY(self->is_raw) ? made_of(self) : Py_NewRef(self->result);
    return self->number_dtype == PC_INT64
               ? int_of(self)
               : pc_number_object(self->number_dtype, &self->numbers[0]);
}

static bool is_done(struct pc_started *self) { return pc_op_is_done(&self->op); }

static int wait(struct pc_started *self, uint64_t until_ns) {
    pc_engine_object *engine = self->of->engine;
    if (pc_op_is_done(&self->op))
        return 1;
    PyThreadState *state = PyEval_SaveThread();
    pc_drive_wait(&engine->drive, &self->op, NULL, until_ns, PC_FOR_EVER);
    PyEval_RestoreThread(state);
    pc_engine_let_go(engine);
    return pc_op_is_done(&self->op);
}

const struct pc_started_ops pc_collective_ops = {
    .is_done = is_done,
    .wait = wait,
    .result = result_of,
    .give_up = pc_collective_give_up,
    .let_go = pc_collective_let_go,
};

static PyObject *collective_awaited(struct pc_running *self, PyObject *Py_UNUSED(unused)) {
    pc_engine_object *engine = self->collectives->engine;
    struct pc_turn turn;
    int ranks[MOST_AWAITED];
    size_t count = 0;
    if (pc_engine_take(engine, &turn))
        count = pc_collective_awaited(self, ranks, MOST_AWAITED);
    pc_engine_give(engine, &turn);
    return pc_list_of(ranks, count);
}

/* (text, number, status, rank or chunk, bytes that came, bytes expected) */
static PyObject *collective_description(struct pc_running *self, void *Py_UNUSED(unused)) {
    struct pc_turn turn;
    (void)pc_engine_take(self->collectives->engine, &turn);
    const struct pc_pipeline *end = &self->pipeline;
    int status = end->status, from = end->from;
    Py_ssize_t came = (Py_ssize_t)end->came, expected = (Py_ssize_t)end->expected;
    pc_engine_give(self->collectives->engine, &turn);
    return Py_BuildValue("s#Kiinn", self->plan->text, (Py_ssize_t)self->plan->text_nbytes,
                         (unsigned long long)self->number, status, from, came, expected);
}

static PyObject *collective_take_held(struct pc_running *self, PyObject *Py_UNUSED(unused)) {
    struct pc_turn turn;
    bool is_held = pc_engine_take(self->collectives->engine, &turn) && self->is_held &&
                   self->under_way;
    self->is_held &= !turn.is_taken;
    pc_engine_give(self->collectives->engine, &turn);
    if (!is_held)
        Py_RETURN_NONE;
    if (self->blocks != NULL && self->blocks->longest > 0 && self->blocks->longest != PC_UNKNOWN)
        return PyLong_FromSize_t(self->blocks->longest);
    if (self->blocks != NULL)
        return pc_blocks_came(self->blocks, self->collectives->engine);
    return Py_BuildValue("y#", self->is_left ? (void *)"" : self->announcement,
                         (Py_ssize_t)self->announcement_nbytes);
}

static PyObject *collective_settle(struct pc_running *self, PyObject *args) {
    pc_engine_object *engine = self->collectives->engine;
    struct pc_turn turn;
    PyObject *result, *before = self->result;
    int failed, unfit, later;
    if (!PyArg_ParseTuple(args, "Oppp", &result, &failed, &unfit, &later))
        return NULL;
    self->result = Py_NewRef(result);
    self->is_raw = self->is_settled = later;
    Py_XDECREF(before);
    if (pc_engine_take(engine, &turn))
        pc_collective_settle(self, failed ? PC_FAILED_IN_PYTHON : unfit ? PC_UNFIT : 0);
    pc_engine_give(engine, &turn);
    pc_engine_let_go(engine);
    Py_RETURN_NONE;
}

static PyObject *collective_go_on(struct pc_running *self, PyObject *args) {
    pc_engine_object *engine = self->collectives->engine;
    struct pc_turn turn;
    PyObject *plan;
    int keeps;
    if (!PyArg_ParseTuple(args, "O!p", pc_plan_type, &plan, &keeps))
        return NULL;
    if (((pc_plan *)plan)->way.table.num_chunks != (uint32_t)self->collectives->size ||
        ((pc_plan *)plan)->way.has_external || self->second != NULL) {
        PyErr_SetString(PyExc_ValueError, "that is no plan of a second round");
        return NULL;
    }
    self->second = (pc_plan *)Py_NewRef(plan);
    Py_INCREF(plan); /* which is kept perhaps; no reference is made with the engine's lock */
    bool is_kept = false;
    if (pc_engine_take(engine, &turn)) {
        is_kept = keeps && self->blocks != NULL &&
                  pc_plan_keep_second(self->plan, self->blocks->longest, plan);
        pc_collective_go_on(self, self->second);
    }
    pc_engine_give(engine, &turn);
    if (!is_kept)
        Py_DECREF(plan);
    pc_engine_let_go(engine);
    Py_RETURN_NONE;
}

static PyObject *collective_expect(struct pc_running *self, PyObject *plan) {
    if (pc_collectives_expect(self->collectives, self, plan) < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* (kind, root, place, whether a second round is left) */
static PyObject *collective_call(struct pc_running *self, void *Py_UNUSED(unused)) {
    return Py_BuildValue("iiOO", self->kind, self->root, self->x != NULL ? self->x : Py_None,
                         self->blocks != NULL && self->blocks->has_second ? Py_True : Py_False);
}

static void collective_dealloc(struct pc_running *self) {
    free(self->announcement);
    free(self->gathered);
    if (self->blocks != NULL)
        pc_blocks_free(self->blocks, self->collectives->engine);
    pc_pipeline_free(&self->pipeline);
    pc_bucket_free(self->bucket);
    Py_XDECREF(self->algorithm);
    Py_XDECREF(self->x);
    Py_XDECREF(self->result);
    Py_XDECREF(self->source_keeper);
    Py_XDECREF(self->target_keeper);
    Py_XDECREF((PyObject *)self->plan);
    Py_XDECREF((PyObject *)self->second);
    Py_XDECREF((PyObject *)self->collectives);
    pc_free(self);
}

static PyMethodDef collective_methods[] = {
    {"_awaited", (PyCFunction)collective_awaited, METH_NOARGS,
     "World ranks that must be in the call before it ends."},
    {"_take_held", (PyCFunction)collective_take_held, METH_NOARGS,
     "What has come and Python must see, if it has not: the root's announcement, or a list of "
     "blocks; nothing: it does all; a number: so many bytes has the longest block of the second "
     "round, of which no plan is known. Else None."},
    {"_go_on", (PyCFunction)collective_go_on, METH_VARARGS,
     "_go_on(plan, keeps): that is the plan of the second round, also of later ones."},
    {"_settle", (PyCFunction)collective_settle, METH_VARARGS,
     "_settle(result, failed, unfit, later): what Python went on with is done; `later`: calling "
     "`result` gives it."},
    {"_expect", (PyCFunction)collective_expect, METH_O,
     "_expect(plan): calls like this one may go by that."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef collective_values[] = {
    {"_description", (getter)collective_description, NULL,
     "(text, number, status, rank or chunk, bytes that came, bytes expected); the last three say "
     "why it failed.",
     NULL},
    {"_made_by", (getter)collective_call, NULL,
     "(kind, root, x, is left): what was called; off root of a scatter, `out` for x; of uneven "
     "blocks (those given, `out`); of objects a tuple of their parts, of a broadcast (parts, x); "
     "and whether the second round is left to Python, too.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot collective_slots[] = {
    {Py_tp_dealloc, collective_dealloc},
    {Py_tp_methods, collective_methods},
    {Py_tp_getset, collective_values},
    {Py_tp_doc, "A collective that is under way in the core."},
    {0, NULL},
};

PyType_Spec pc_collective_spec = {
    .name = "pycoll._transports._core.Collective",
    .basicsize = sizeof(struct pc_running),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = collective_slots,
};
