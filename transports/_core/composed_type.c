/* `_core.Table` and `_core.Run`: a schedule run as a part of a call that Python has begun. Python says where each chunk
   is, and hears of the end by an event: `owner._ended()`. */
#include "collective.h"

#include "reduce.h"
#include "views.h"

#include <errno.h>
#include <stdlib.h>

/* Ranks for which a run is said to wait. */
#define MOST_AWAITED 64

typedef struct {
    PyObject_HEAD
    struct pc_compiled way;
} pc_table_object;

struct pc_composed {
    PyObject_HEAD
    pc_context_object *on;
    PyObject *owner;
    pc_table_object *table;
    struct pc_views *sources, *targets;
    struct pc_chunk_place *places;
    struct pc_pipeline pipeline;
    struct pc_event event;
    uint64_t number;
    bool is_launched, under_way; /* under way it keeps itself alive, until its end was told */
};

static PyTypeObject *table_type;

/* --- tables ------------------------------------------------------------------------------------------ */

static PyObject *table_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *steps;
    unsigned num_chunks;
    int size;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "iIO!", &size, &num_chunks, &PyList_Type, &steps))
        return NULL;
    pc_table_object *self = (pc_table_object *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self == NULL)
        return NULL;
    self->way.table.num_chunks = num_chunks;
    if (pc_compiled_read(&self->way, steps, size) == 0)
        return (PyObject *)self;
    Py_DECREF(self);
    return NULL;
}

static void table_dealloc(pc_table_object *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    pc_compiled_free(&self->way);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyType_Slot table_slots[] = {
    {Py_tp_new, table_new},
    {Py_tp_dealloc, table_dealloc},
    {Py_tp_doc, "Table(size, num_chunks, steps): a compiled schedule; `steps` as of Plan."},
    {0, NULL},
};

PyType_Spec pc_table_spec = {
    .name = "pycoll.transports._core.Table",
    .basicsize = sizeof(pc_table_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = table_slots,
};

/* --- memory ------------------------------------------------------------------------------------------ */

/* The views of those items of a list that are not None, in their order; NULL with an exception. */
static struct pc_views *views_of(PyObject *list, bool writable) {
    Py_ssize_t count = PyList_Size(list);
    PyObject *present = PyList_New(0);
    for (Py_ssize_t index = 0; present != NULL && index < count; index++) {
        PyObject *item = PyList_GetItem(list, index);
        if (item != Py_None && PyList_Append(present, item) < 0)
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

/* Where the next view lies, as a place: its address. What is empty is somewhere, too. -1 with an exception. */
static ptrdiff_t next_place(PyObject *list, Py_ssize_t chunk, const struct pc_views *views, Py_ssize_t *next,
                            size_t nbytes) {
    if (PyList_GetItem(list, chunk) == Py_None)
        return -1;
    const Py_buffer *view = &views->views[(*next)++];
    if ((size_t)view->len != nbytes)
        PyErr_Format(PyExc_ValueError, "chunk %zd has %zd bytes, and not %zu", chunk, view->len, nbytes);
    return nbytes > 0 ? (ptrdiff_t)(uintptr_t)view->buf : 1;
}

static bool place_chunks(struct pc_composed *self, PyObject *lengths, PyObject *sources, PyObject *targets) {
    Py_ssize_t count = PyList_Size(lengths), source = 0, target = 0;
    if (count != (Py_ssize_t)self->table->way.table.num_chunks || PyList_Size(sources) != count ||
        PyList_Size(targets) != count) {
        PyErr_SetString(PyExc_ValueError, "the schedule has another number of chunks");
        return false;
    }
    self->sources = views_of(sources, false);
    self->targets = self->sources != NULL ? views_of(targets, true) : NULL;
    self->places = calloc((size_t)count + 1, sizeof *self->places);
    if (self->places == NULL)
        PyErr_NoMemory();
    for (Py_ssize_t chunk = 0; self->targets != NULL && self->places != NULL && chunk < count; chunk++) {
        size_t nbytes = PyLong_AsSize_t(PyList_GetItem(lengths, chunk));
        self->places[chunk] =
            (struct pc_chunk_place){nbytes, next_place(sources, chunk, self->sources, &source, nbytes),
                                    next_place(targets, chunk, self->targets, &target, nbytes)};
    }
    return !PyErr_Occurred();
}

/* Whether what is to be reduced can be, there. */
static bool can_reduce(const struct pc_composed *self) {
    const struct pc_reduction *reduction = &self->pipeline.reduction;
    size_t alignment = reduction->itemsize < sizeof(double) ? reduction->itemsize : sizeof(double);
    for (uint32_t chunk = 0; chunk < self->table->way.table.num_chunks; chunk++) {
        const struct pc_chunk_place *place = &self->places[chunk];
        if (place->nbytes > 0 && ((place->source >= 0 && (size_t)place->source % alignment != 0) ||
                                  (place->target >= 0 && (size_t)place->target % alignment != 0)))
            return false;
    }
    return reduction->combine != NULL;
}

static void release(struct pc_composed *self) {
    pc_views_release(self->sources);
    pc_views_release(self->targets);
    self->sources = self->targets = NULL;
}

/* --- running ----------------------------------------------------------------------------------------- */

/* With the lock. */
static void ended(struct pc_pipeline *pipeline) {
    struct pc_composed *self = pipeline->owner;
    pc_pipeline_free(pipeline);
    self->under_way = false;
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
    PyObject *told = Py_BuildValue("iO", PC_EVENT_REQUEST, self->owner); /* for Python they are alike */
    release(self);
    Py_DECREF((PyObject *)self);
    return told;
}

static void launch(pc_engine_object *engine, void *argument) {
    struct pc_composed *self = argument;
    struct pc_context *context = self->on->context;
    if (context == NULL || context->broken != 0) {
        self->pipeline.status = context != NULL ? context->broken : PC_CONTEXT_CLOSED;
        return;
    }
    self->pipeline.call = pc_call_find(context, self->number);
    if (self->pipeline.call == NULL) {
        self->pipeline.status = -EINVAL;
        return;
    }
    self->under_way = true;
    pc_engine_enter(&engine->engine); /* it is launched before it hears of anything */
    pc_pipeline_start(context, &self->pipeline);
    self->is_launched = self->under_way;
    pc_engine_leave(&engine->engine);
}

static PyObject *run_start(struct pc_composed *self, PyObject *unused) {
    (void)unused;
    Py_INCREF((PyObject *)self);
    bool is_open = pc_engine_do(self->on->engine, launch, self);
    if (!is_open || !self->is_launched) {
        Py_DECREF((PyObject *)self);
        release(self);
    }
    if (!is_open)
        return pc_engine_is_closed();
    if (self->is_launched)
        Py_RETURN_NONE;
    return PyLong_FromLong(self->pipeline.status);
}

struct giving_up {
    struct pc_composed *self;
    bool was_under_way;
};

static void give_up(pc_engine_object *engine, void *argument) {
    struct giving_up *giving_up = argument;
    struct pc_composed *self = giving_up->self;
    giving_up->was_under_way = self->under_way;
    if (!self->under_way)
        return;
    pc_engine_enter(&engine->engine);
    pc_pipeline_cancel(&self->pipeline);
    pc_pipeline_free(&self->pipeline);
    self->under_way = false;
    pc_engine_leave(&engine->engine);
}

static PyObject *run_give_up(struct pc_composed *self, PyObject *unused) {
    (void)unused;
    struct giving_up giving_up = {.self = self};
    pc_engine_do(self->on->engine, give_up, &giving_up);
    if (giving_up.was_under_way) { /* no event will be told */
        release(self);
        Py_DECREF((PyObject *)self);
    }
    Py_RETURN_NONE;
}

struct asking {
    struct pc_composed *self;
    int ranks[MOST_AWAITED];
    size_t count;
};

static void find_awaited(pc_engine_object *engine, void *argument) {
    struct asking *asking = argument;
    (void)engine;
    if (asking->self->under_way)
        asking->count = pc_pipeline_awaited(&asking->self->pipeline, asking->ranks, MOST_AWAITED);
}

static PyObject *run_awaited(struct pc_composed *self, PyObject *unused) {
    (void)unused;
    struct asking asking = {.self = self};
    pc_engine_do(self->on->engine, find_awaited, &asking);
    PyObject *ranks = PyList_New((Py_ssize_t)asking.count);
    for (size_t index = 0; ranks != NULL && index < asking.count; index++)
        PyList_SetItem(ranks, (Py_ssize_t)index, PyLong_FromLong(asking.ranks[index]));
    return ranks;
}

static PyObject *run_status(struct pc_composed *self, void *unused) {
    (void)unused;
    const struct pc_pipeline *pipeline = &self->pipeline;
    return Py_BuildValue("iinn", pipeline->status, pipeline->from, (Py_ssize_t)pipeline->came,
                         (Py_ssize_t)pipeline->expected);
}

static PyObject *run_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *owner, *context, *table, *lengths, *sources, *targets;
    int op, dtype, divisor;
    unsigned lane, segments;
    unsigned long long number;
    Py_ssize_t granule;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "OO!O!O!O!O!(iii)KIIn", &owner, pc_context_type, &context, table_type, &table,
                          &PyList_Type, &lengths, &PyList_Type, &sources, &PyList_Type, &targets, &op, &dtype, &divisor,
                          &number, &lane, &segments, &granule))
        return NULL;
    if (segments == 0 || lane + segments > UINT16_MAX || granule <= 0) {
        PyErr_SetString(PyExc_ValueError, "there is no such segment");
        return NULL;
    }
    struct pc_composed *self = (struct pc_composed *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self == NULL)
        return NULL;
    self->owner = Py_NewRef(owner);
    self->on = (pc_context_object *)Py_NewRef(context);
    self->table = (pc_table_object *)Py_NewRef(table);
    self->number = number;
    if (place_chunks(self, lengths, sources, targets)) {
        self->pipeline = (struct pc_pipeline){.table = &self->table->way.table,
                                              .places = self->places,
                                              .reduction = pc_reduction_of(op, dtype, divisor),
                                              .first_lane = (uint16_t)lane,
                                              .num_segments = segments,
                                              .granule = (size_t)granule,
                                              .ended = ended,
                                              .owner = self};
        if (op >= 0 && !can_reduce(self))
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
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    pc_pipeline_free(&self->pipeline);
    release(self);
    free(self->places);
    Py_XDECREF(self->owner);
    Py_XDECREF((PyObject *)self->on);
    Py_XDECREF((PyObject *)self->table);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyMethodDef run_methods[] = {
    {"start", (PyCFunction)run_start, METH_NOARGS,
     "start() -> None | int: None: its end will be told; else it has ended, with that status."},
    {"give_up", (PyCFunction)run_give_up, METH_NOARGS, "It will not end, and its memory is not used any more."},
    {"awaited", (PyCFunction)run_awaited, METH_NOARGS, "World ranks that must be in the call before it ends."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef run_values[] = {
    {"status", (getter)run_status, NULL,
     "(status, rank or chunk, bytes that came, bytes expected); the last three say why it failed.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot run_slots[] = {
    {Py_tp_new, run_new},
    {Py_tp_dealloc, run_dealloc},
    {Py_tp_methods, run_methods},
    {Py_tp_getset, run_values},
    {Py_tp_doc,
     "Run(owner, context, table, lengths, sources, targets, (op, dtype, divisor), number, lane, segments, granule): a "
     "schedule as a part of the call of that number.\n\n"
     "`lengths`, `sources` and `targets` are by chunk: bytes, and their memory, None for none. `owner._ended()` is called "
     "by who takes the event of its end."},
    {0, NULL},
};

PyType_Spec pc_composed_spec = {
    .name = "pycoll.transports._core.Run",
    .basicsize = sizeof(struct pc_composed),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = run_slots,
};

void pc_composed_types(PyTypeObject *table) { table_type = table; }
