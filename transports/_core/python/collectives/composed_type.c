/* `_core.Run`: a schedule run as a part of a call that Python has
   begun, which says where each chunk is, and hears of the end by an event: `owner._ended()`. */
#include "composed.h"

#include "reduce/reduce.h"
#include "python/base/views.h"

#include <errno.h>
#include <stdlib.h>

/* Ranks for which a run is said to wait. */
#define MOST_AWAITED 64

/* --- memory ----------------------------------------------------------------------------------- */

/* The views of those items of a list that are not None, in their order; of tuples those of their
   items. NULL with an exception. */
static struct pc_views *views_of(PyObject *list, bool writable) {
    Py_ssize_t count = PyList_Size(list);
    PyObject *present = PyList_New(0);
    for (Py_ssize_t index = 0; present != NULL && index < count; index++) {
        PyObject *item = PyList_GetItem(list, index);
        int failed = 0;
        for (Py_ssize_t part = 0; PyTuple_Check(item) && failed == 0 && part < PyTuple_Size(item);
             part++)
            failed = PyList_Append(present, PyTuple_GetItem(item, part));
        if (item != Py_None && !PyTuple_Check(item))
            failed = PyList_Append(present, item);
        if (failed != 0)
            Py_CLEAR(present);
    }
    struct pc_views *views = present != NULL ? pc_view_parts(present) : NULL;
    Py_XDECREF(present);
    for (Py_ssize_t index = 0; writable && views != NULL && index < views->count; index++)
        if (views->views[index].readonly) {
            PyErr_SetString(PyExc_ValueError, "the target of a chunk is read-only");
            pc_views_release(views);
            return NULL;
        }
    return views;
}

/* What is empty is somewhere, too. */
static ptrdiff_t address_of(const void *start, size_t nbytes) {
    return nbytes > 0 ? (ptrdiff_t)(uintptr_t)start : 1;
}

static void check_length(Py_ssize_t chunk, size_t length, size_t nbytes) {
    if (length != nbytes)
        PyErr_Format(PyExc_ValueError, "chunk %zd has %zu bytes, and not %zu", chunk, length,
                     nbytes);
}

/* Where the value of a chunk is at the start: it has the next views. */
static void place_source(struct pc_composed *self, PyObject *item, Py_ssize_t chunk,
                         Py_ssize_t *next) {
    struct pc_chunk_place *place = &self->places[chunk];
    place->source = -1;
    if (item == Py_None)
        return;
    Py_ssize_t count = PyTuple_Check(item) ? PyTuple_Size(item) : 1;
    struct iovec *parts = &self->parts[*next];
    size_t nbytes = 0;
    for (Py_ssize_t part = 0; part < count; part++) {
        const Py_buffer *view = &self->sources->views[(*next)++];
        parts[part] = (struct iovec){view->buf, (size_t)view->len};
        nbytes += (size_t)view->len;
    }
    if (place->nbytes == PC_UNKNOWN) /* it is known here */
        place->nbytes = nbytes;
    check_length(chunk, nbytes, place->nbytes);
    place->source = address_of(count > 0 ? parts->iov_base : NULL, nbytes);
    if (count > 1) {
        place->parts = parts;
        place->num_parts = (size_t)count;
    } else if (count == 1) {
        place->source_keeper = self->sources->views[*next - 1].obj;
    }
}

static void place_target(struct pc_composed *self, PyObject *item, Py_ssize_t chunk,
                         Py_ssize_t *next) {
    struct pc_chunk_place *place = &self->places[chunk];
    place->target = -1;
    if (item == Py_None)
        return;
    const Py_buffer *view = &self->targets->views[(*next)++];
    check_length(chunk, (size_t)view->len, place->nbytes);
    place->target = address_of(view->buf, place->nbytes);
    place->target_keeper = view->obj;
}

static bool place_chunks(struct pc_composed *self, PyObject *lengths, PyObject *sources,
                         PyObject *targets) {
    Py_ssize_t count = PyList_Size(lengths), source = 0, target = 0;
    if (count != (Py_ssize_t)self->plan->way.table.num_chunks || PyList_Size(sources) != count ||
        PyList_Size(targets) != count) {
        PyErr_SetString(PyExc_ValueError, "the schedule has another number of chunks");
        return false;
    }
    self->sources = views_of(sources, false);
    self->targets = self->sources != NULL ? views_of(targets, true) : NULL;
    if (self->targets == NULL)
        return false;
    self->places = calloc((size_t)count + 1, sizeof *self->places);
    self->parts = malloc((size_t)(self->sources->count + 1) * sizeof *self->parts);
    bool grows = false;
    for (Py_ssize_t chunk = 0; self->places != NULL && self->parts != NULL && chunk < count;
         chunk++) {
        PyObject *length = PyList_GetItem(lengths, chunk);
        struct pc_chunk_place *place = &self->places[chunk];
        place->nbytes = length != Py_None ? PyLong_AsSize_t(length) : PC_UNKNOWN;
        place_source(self, PyList_GetItem(sources, chunk), chunk, &source);
        grows |= place->nbytes == PC_UNKNOWN;
        place_target(self, PyList_GetItem(targets, chunk), chunk, &target);
    }
    self->grown = grows ? calloc((size_t)count + 1, sizeof *self->grown) : NULL;
    if (self->places == NULL || self->parts == NULL || (grows && self->grown == NULL))
        PyErr_NoMemory();
    return !PyErr_Occurred();
}

/* Whether what is to be reduced can be, there. */
static bool can_reduce(const struct pc_composed *self, int dtype) {
    for (uint32_t chunk = 0; chunk < self->plan->way.table.num_chunks; chunk++) {
        const struct pc_chunk_place *place = &self->places[chunk];
        if (place->parts != NULL || place->nbytes == PC_UNKNOWN)
            return false;
        bool reads = place->nbytes > 0 && place->source >= 0;
        bool writes = place->nbytes > 0 && place->target >= 0;
        if ((reads && !pc_is_aligned(dtype, (uintptr_t)place->source)) ||
            (writes && !pc_is_aligned(dtype, (uintptr_t)place->target)))
            return false;
    }
    return self->pipeline.like.reduction.combine != NULL;
}

static bool can_be_cut(const struct pc_composed *self) {
    for (uint32_t chunk = 0; chunk < self->plan->way.table.num_chunks; chunk++)
        if (self->places[chunk].parts != NULL || self->places[chunk].nbytes == PC_UNKNOWN)
            return false;
    return true;
}

static void release(struct pc_composed *self) {
    pc_views_release(self->sources);
    pc_views_release(self->targets);
    self->sources = self->targets = NULL;
}

/* --- running ---------------------------------------------------------------------------------- */

/* With the lock. */
static void ended(struct pc_pipeline *pipeline) {
    struct pc_composed *self = pipeline->owner;
    pc_pipeline_free(pipeline);
    self->under_way = false;
    pc_engine_unpost(self->on->engine, &self->steps_event);
    if (!self->is_launched)
        return;
    self->event.kind = PC_EVENT_COMPOSED;
    pc_engine_post(self->on->engine, &self->event);
}

static struct pc_composed *of_event(struct pc_event *event) {
    return (struct pc_composed *)((char *)event - offsetof(struct pc_composed, event));
}

PyObject *pc_composed_event(struct pc_event *event) {
    struct pc_composed *self = of_event(event);
    /* for Python they are alike */
    PyObject *answer = Py_BuildValue("iO", PC_EVENT_STARTED, self->owner);
    release(self);
    Py_CLEAR(self->owner);
    Py_DECREF((PyObject *)self);
    return answer;
}

/* With the lock. */
static void launch(struct pc_composed *self) {
    struct pc_engine *engine = &self->on->engine->engine;
    struct pc_context *context = self->on->context;
    if (context == NULL || context->broken != 0) {
        self->pipeline.status = context != NULL ? context->broken : PC_CONTEXT_CLOSED;
        return;
    }
    self->pipeline.like.call = pc_call_find(context, self->number);
    if (self->pipeline.like.call == NULL) {
        self->pipeline.status = -EINVAL;
        return;
    }
    self->under_way = true;
    pc_engine_enter(engine); /* it is launched before it hears of anything */
    self->pipeline.context = context;
    pc_pipeline_start(&self->pipeline);
    self->is_launched = self->under_way;
    pc_engine_leave(engine);
}

static PyObject *run_start(struct pc_composed *self, PyObject *owner) {
    self->owner = Py_NewRef(owner);
    Py_INCREF((PyObject *)self);
    struct pc_turn turn;
    if (pc_engine_take(self->on->engine, &turn))
        launch(self);
    pc_engine_give(self->on->engine, &turn);
    if (!self->is_launched) {
        Py_CLEAR(self->owner);
        Py_DECREF((PyObject *)self);
        release(self);
    }
    if (!turn.is_taken)
        return pc_engine_is_closed();
    if (self->is_launched)
        Py_RETURN_NONE;
    return PyLong_FromLong(self->pipeline.status);
}

static PyObject *run_give_up(struct pc_composed *self, PyObject *Py_UNUSED(unused)) {
    pc_engine_object *engine = self->on->engine;
    struct pc_turn turn;
    bool was_under_way = pc_engine_take(engine, &turn) && self->under_way;
    if (was_under_way) {
        pc_engine_enter(&engine->engine);
        pc_pipeline_cancel(&self->pipeline);
        pc_pipeline_free(&self->pipeline);
        pc_engine_unpost(engine, &self->steps_event);
        self->under_way = false;
        pc_engine_leave(&engine->engine);
    }
    pc_engine_give(engine, &turn);
    if (was_under_way) { /* no event will be told */
        release(self);
        Py_CLEAR(self->owner);
        Py_DECREF((PyObject *)self);
    }
    Py_RETURN_NONE;
}

static PyObject *run_awaited(struct pc_composed *self, PyObject *Py_UNUSED(unused)) {
    struct pc_turn turn;
    int ranks[MOST_AWAITED];
    size_t count = 0;
    if (pc_engine_take(self->on->engine, &turn) && self->under_way)
        count = pc_pipeline_awaited(&self->pipeline, ranks, MOST_AWAITED);
    pc_engine_give(self->on->engine, &turn);
    return pc_list_of(ranks, count);
}

static PyObject *run_status(struct pc_composed *self, void *Py_UNUSED(unused)) {
    const struct pc_pipeline *pipeline = &self->pipeline;
    return Py_BuildValue("iinn", pipeline->status, pipeline->from, (Py_ssize_t)pipeline->came,
                         (Py_ssize_t)pipeline->expected);
}

static PyObject *run_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    PyObject *context, *plan, *lengths, *sources, *targets;
    int op, dtype, divisor;
    unsigned subcall, segments;
    unsigned long long number;
    Py_ssize_t granule;
    if (!PyArg_ParseTuple(args, "O!O!O!O!O!(iii)KIIn", pc_context_type, &context, pc_plan_type,
                          &plan, &PyList_Type, &lengths, &PyList_Type, &sources, &PyList_Type,
                          &targets, &op, &dtype, &divisor, &number, &subcall, &segments, &granule))
        return NULL;
    if (segments == 0 || subcall + segments > UINT16_MAX || granule <= 0) {
        PyErr_SetString(PyExc_ValueError, "there is no such segment");
        return NULL;
    }
    struct pc_composed *self = pc_new(type);
    if (self == NULL)
        return NULL;
    self->on = (pc_context_object *)Py_NewRef(context);
    self->plan = (pc_plan *)Py_NewRef(plan);
    self->number = number;
    if (place_chunks(self, lengths, sources, targets)) {
        self->pipeline = (struct pc_pipeline){
            .like = {.table = &self->plan->way.table,
                     .places = self->places,
                     .reduction = pc_reduction_of(op, dtype, divisor),
                     .subcall = (uint16_t)subcall,
                     .num_segments = segments,
                     .granule = (size_t)granule,
                     .grown = self->grown},
            .asked = pc_composed_asked,
            .ended = ended,
            .owner = self};
        if (segments > 1 && !can_be_cut(self))
            PyErr_SetString(PyExc_ValueError,
                            "a chunk in parts, or of unknown length, cannot be cut");
        else if (op >= 0 && !can_reduce(self, dtype))
            PyErr_SetString(PyExc_BufferError, "the core cannot reduce that, or there");
        else if (pc_pipeline_prepare(&self->pipeline))
            return (PyObject *)self;
        else
            PyErr_NoMemory();
    }
    Py_DECREF(self);
    return NULL;
}

static void run_dealloc(struct pc_composed *self) {
    pc_pipeline_free(&self->pipeline);
    release(self);
    pc_composed_free_grown(self);
    free(self->places);
    free(self->parts);
    Py_XDECREF(self->owner);
    Py_XDECREF((PyObject *)self->on);
    Py_XDECREF((PyObject *)self->plan);
    pc_free(self);
}

static PyMethodDef run_methods[] = {
    {"start", (PyCFunction)run_start, METH_O,
     "start(owner) -> None | int: None: its end will be told; else it has ended, with that "
     "status."},
    {"give_up", (PyCFunction)run_give_up, METH_NOARGS,
     "It will not end, and its memory is not used any more."},
    {"awaited", (PyCFunction)run_awaited, METH_NOARGS,
     "World ranks that must be in the call before it ends."},
    {"next_asked", (PyCFunction)pc_composed_next_asked, METH_NOARGS,
     "next_asked() -> (segment, step) | None: the next step for Python to do: an external one, a "
     "reduction, or a receive of what is offered. Step -1: only steps at the end are not done, and "
     "their ends are asked for now."},
    {"step_done", (PyCFunction)pc_composed_step_done, METH_VARARGS,
     "step_done(segment, step): the run goes on, or ends."},
    {"take", (PyCFunction)pc_composed_take, METH_VARARGS,
     "take(segment, step) -> Receive | None: what holds the message that is offered."},
    {"wait_again", (PyCFunction)pc_composed_wait_again, METH_VARARGS,
     "wait_again(segment, step): the sender has taken back what was offered."},
    {"incoming", (PyCFunction)pc_composed_incoming, METH_VARARGS,
     "incoming(segment, step) -> Memory: what has come for a reduction, once."},
    {"where", (PyCFunction)pc_composed_where, METH_VARARGS,
     "where(segment, chunk) -> int: the value is 0: nowhere, 1: at its source, 2: at its target, "
     "3: in the run's own memory."},
    {"place", (PyCFunction)pc_composed_place, METH_VARARGS,
     "place(segment, chunk) -> int: from now on the value is at its target, or in the run's own "
     "memory; as of `where`."},
    {"settle", (PyCFunction)pc_composed_settle, METH_VARARGS,
     "settle(segment, chunk): the target holds the value, in the end."},
    {"own", (PyCFunction)pc_composed_own, METH_VARARGS,
     "own(segment, 0) -> Memory | None: the run's own memory, in which chunks lie one behind the "
     "other; once."},
    {"grown", (PyCFunction)pc_composed_grown, METH_O,
     "grown(chunk) -> Memory | None: when the run has ended, the value of a chunk of unknown "
     "length; once."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef run_values[] = {
    {"status", (getter)run_status, NULL,
     "(status, rank or chunk, bytes that came, bytes expected); the last three say why it failed.",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot run_slots[] = {
    {Py_tp_new, run_new},
    {Py_tp_dealloc, run_dealloc},
    {Py_tp_methods, run_methods},
    {Py_tp_getset, run_values},
    {Py_tp_doc, "Run(context, plan, lengths, sources, targets, (op, dtype, divisor), number, "
                "subcall, segments, granule): "
                "a schedule as a part of the call of that number.\n\n"
                "`lengths`, `sources` and `targets` are by chunk: bytes, or None if only the "
                "sender knows; and the memory: None for none, of a source perhaps a tuple of "
                "parts. Who takes the event of its end calls `owner._ended()`, and if it asks for "
                "steps, `owner._asked()`."},
    {0, NULL},
};

PyType_Spec pc_composed_spec = {
    .name = "pycoll._transports._core.Run",
    .basicsize = sizeof(struct pc_composed),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = run_slots,
};
