/* Methods of `_core.Run` by which Python executes the steps that C cannot: user-defined operators,
   copies to and from a GPU, receives of what is offered; and `_core.Memory`, memory of a run that
   Python still uses when the run has ended. */
#include "composed.h"

#include <errno.h>
#include <stdlib.h>

/* --- memory ----------------------------------------------------------------------------------- */

/* The memory of a run: it is freed when nobody looks at it any more, and no link writes to it. */
typedef struct {
    PyObject_HEAD
    pc_engine_object *engine;
    void *start;
    size_t nbytes;
} pc_memory;

void pc_memory_let_go(pc_engine_object *engine, void *memory) {
    struct pc_turn turn;
    if (memory == NULL)
        return;
    if (pc_engine_take(engine, &turn))
        pc_engine_give_scratch(&engine->engine, memory);
    else
        pc_scratch_free_with_keeper(memory);
    pc_engine_give(engine, &turn);
}

PyObject *pc_memory_object(pc_engine_object *engine, void *start, size_t nbytes) {
    if (start == NULL)
        return Py_NewRef(Py_None);
    pc_memory *self = pc_new(pc_memory_type);
    if (self == NULL) {
        pc_memory_let_go(engine, start);
        return NULL;
    }
    self->engine = (pc_engine_object *)Py_NewRef((PyObject *)engine);
    self->start = start;
    self->nbytes = nbytes;
    return (PyObject *)self;
}

void *pc_memory_start(PyObject *memory) { return ((pc_memory *)memory)->start; }

static int memory_buffer(PyObject *object, Py_buffer *view, int flags) {
    pc_memory *self = (pc_memory *)object;
    return PyBuffer_FillInfo(view, object, self->start, (Py_ssize_t)self->nbytes, 0, flags);
}

static void memory_dealloc(pc_memory *self) {
    pc_memory_let_go(self->engine, self->start);
    Py_DECREF((PyObject *)self->engine);
    pc_free(self);
}

static PyType_Slot memory_slots[] = {
    {Py_bf_getbuffer, memory_buffer},
    {Py_tp_dealloc, memory_dealloc},
    {Py_tp_doc, "Memory that a run has made."},
    {0, NULL},
};

PyType_Spec pc_memory_spec = {
    .name = "pycoll._transports._core.Memory",
    .basicsize = sizeof(pc_memory),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = memory_slots,
};

void pc_composed_free_grown(struct pc_composed *self) {
    for (uint32_t chunk = 0; self->grown != NULL && chunk < self->plan->way.table.num_chunks;
         chunk++)
        pc_memory_let_go(self->on->engine, self->grown[chunk].memory);
    free(self->grown);
    self->grown = NULL;
}

/* --- what is asked for ------------------------------------------------------------------------ */

void pc_composed_asked(struct pc_pipeline *pipeline) {
    struct pc_composed *self = pipeline->owner;
    self->steps_event.kind = PC_EVENT_ASKED;
    pc_engine_post(self->on->engine, &self->steps_event);
}

PyObject *pc_composed_asks(struct pc_event *event) {
    struct pc_composed *self =
        (struct pc_composed *)((char *)event - offsetof(struct pc_composed, steps_event));
    return Py_BuildValue("iO", PC_EVENT_ASKED, self->owner);
}

static uint32_t num_steps(const struct pc_composed *self) {
    return self->plan->way.table.num_steps;
}
static uint32_t num_chunks(const struct pc_composed *self) {
    return self->plan->way.table.num_chunks;
}

/* Take the lock, to do something in the run of a segment, of a step or chunk below `limit`. NULL:
   it is not under way any more, which is no error; or the arguments are wrong, with an exception.
   `leave` must follow. */
static struct pc_run *enter(struct pc_composed *self, PyObject *args, uint32_t limit,
                            unsigned *number, struct pc_turn *turn) {
    unsigned segment;
    turn->is_taken = false;
    if (!PyArg_ParseTuple(args, "II", &segment, number))
        return NULL;
    if (*number >= limit) {
        PyErr_SetString(PyExc_IndexError, "there is no such step or chunk");
        return NULL;
    }
    return pc_engine_take(self->on->engine, turn) && self->under_way
               ? pc_pipeline_run(&self->pipeline, segment)
               : NULL;
}

/* Give the lock back. True, or false with an exception. */
static bool leave(const struct pc_composed *self, const struct pc_turn *turn) {
    pc_engine_give(self->on->engine, turn);
    return !PyErr_Occurred();
}

PyObject *pc_composed_next_asked(struct pc_composed *self, PyObject *Py_UNUSED(unused)) {
    struct pc_turn turn;
    struct pc_run *run;
    uint32_t step = PC_NO_STEP, segment = 0;
    if (pc_engine_take(self->on->engine, &turn) && self->under_way)
        step = pc_pipeline_next_asked(&self->pipeline, &run);
    if (step != PC_NO_STEP)
        segment = run->segment;
    pc_engine_give(self->on->engine, &turn);
    if (step == PC_NO_STEP)
        Py_RETURN_NONE;
    return Py_BuildValue("Ii", segment, step == PC_LAST_STEPS ? -1 : (int)step);
}

static PyObject *do_in(struct pc_composed *self, PyObject *args, uint32_t limit,
                       void (*work)(struct pc_run *run, uint32_t number)) {
    struct pc_turn turn;
    unsigned number;
    struct pc_run *run = enter(self, args, limit, &number, &turn);
    if (run != NULL)
        work(run, number);
    return leave(self, &turn) ? Py_NewRef(Py_None) : NULL;
}

PyObject *pc_composed_step_done(struct pc_composed *self, PyObject *args) {
    return do_in(self, args, num_steps(self), pc_run_step_done);
}

PyObject *pc_composed_wait_again(struct pc_composed *self, PyObject *args) {
    return do_in(self, args, num_steps(self), pc_run_wait_again);
}

PyObject *pc_composed_settle(struct pc_composed *self, PyObject *args) {
    return do_in(self, args, num_chunks(self), pc_run_settle);
}

PyObject *pc_composed_where(struct pc_composed *self, PyObject *args) {
    struct pc_turn turn;
    unsigned chunk;
    struct pc_run *run = enter(self, args, num_chunks(self), &chunk, &turn);
    enum pc_value_place place = run != NULL ? pc_run_where(run, chunk) : PC_VALUE_NOWHERE;
    return leave(self, &turn) ? PyLong_FromLong(place) : NULL;
}

PyObject *pc_composed_place(struct pc_composed *self, PyObject *args) {
    struct pc_turn turn;
    unsigned chunk;
    struct pc_run *run = enter(self, args, num_chunks(self), &chunk, &turn);
    bool has_memory = run == NULL || pc_run_place(run, chunk);
    enum pc_value_place place =
        run != NULL && has_memory ? pc_run_where(run, chunk) : PC_VALUE_NOWHERE;
    if (!leave(self, &turn))
        return NULL;
    return has_memory ? PyLong_FromLong(place) : PyErr_NoMemory();
}

PyObject *pc_composed_take(struct pc_composed *self, PyObject *args) {
    struct pc_turn turn;
    unsigned step;
    PyObject *handle = pc_item_receive(self->on->engine);
    if (handle == NULL)
        return NULL;
    struct pc_run *run = enter(self, args, num_steps(self), &step, &turn);
    struct pc_receive *receive = run != NULL ? pc_run_held(run, step) : NULL;
    if (receive != NULL) {
        (void)pc_item_take_over(handle, receive);
        pc_run_taken(run, step);
    }
    bool is_well = leave(self, &turn);
    if (receive != NULL)
        return handle;
    Py_DECREF(handle);
    return is_well ? Py_NewRef(Py_None) : NULL;
}

PyObject *pc_composed_incoming(struct pc_composed *self, PyObject *args) {
    struct pc_turn turn;
    unsigned step;
    void *memory = NULL;
    size_t nbytes = 0;
    struct pc_run *run = enter(self, args, num_steps(self), &step, &turn);
    if (run != NULL && run->table->steps[step].kind == PC_STEP_REDUCE)
        memory = pc_run_take_incoming(run, step, &nbytes);
    return leave(self, &turn) ? pc_memory_object(self->on->engine, memory, nbytes) : NULL;
}

PyObject *pc_composed_own(struct pc_composed *self, PyObject *args) {
    struct pc_turn turn;
    unsigned chunk;
    struct pc_run *run = enter(self, args, num_chunks(self), &chunk, &turn);
    void *memory = run != NULL ? pc_run_take_own(run) : NULL;
    size_t nbytes = memory != NULL ? run->own_nbytes : 0;
    return leave(self, &turn) ? pc_memory_object(self->on->engine, memory, nbytes) : NULL;
}

PyObject *pc_composed_grown(struct pc_composed *self, PyObject *number) {
    unsigned long chunk = PyLong_AsUnsignedLong(number);
    if (PyErr_Occurred())
        return NULL;
    if (self->grown == NULL || chunk >= num_chunks(self) || self->under_way)
        Py_RETURN_NONE;
    struct pc_grown *grown = &self->grown[chunk];
    void *memory = grown->memory;
    grown->memory = NULL;
    return pc_memory_object(self->on->engine, memory, grown->nbytes);
}
