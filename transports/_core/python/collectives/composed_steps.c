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

static PyTypeObject *memory_type;

void pc_memory_type(PyTypeObject *memory) { memory_type = memory; }

static void give_scratch(pc_engine_object *engine, void *memory) {
    pc_engine_give_scratch(&engine->engine, memory);
}

static void let_go(pc_engine_object *engine, void *memory) {
    if (memory != NULL && !pc_engine_do(engine, give_scratch, memory))
        pc_scratch_free_with_keeper(memory);
}

/* It owns the memory; without an object of ours that goes, too. */
static PyObject *memory_of(pc_engine_object *engine, void *start, size_t nbytes) {
    pc_memory *self =
        (pc_memory *)((allocfunc)PyType_GetSlot(memory_type, Py_tp_alloc))(memory_type, 0);
    if (self == NULL) {
        let_go(engine, start);
        return NULL;
    }
    self->engine = (pc_engine_object *)Py_NewRef((PyObject *)engine);
    self->start = start;
    self->nbytes = nbytes;
    return (PyObject *)self;
}

static int memory_buffer(PyObject *object, Py_buffer *view, int flags) {
    pc_memory *self = (pc_memory *)object;
    return PyBuffer_FillInfo(view, object, self->start, (Py_ssize_t)self->nbytes, 0, flags);
}

static void memory_dealloc(pc_memory *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    let_go(self->engine, self->start);
    Py_DECREF((PyObject *)self->engine);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
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
    for (uint32_t chunk = 0; self->grown != NULL && chunk < self->table->way.table.num_chunks;
         chunk++)
        let_go(self->on->engine, self->grown[chunk].memory);
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

/* Something done with the engine's lock for one segment, while that is under way. */
struct doing {
    struct pc_composed *self;
    void (*work)(struct doing *doing, struct pc_run *run);
    unsigned segment, at; /* `at`: a step, or a chunk */
    bool done;
    void *memory;
    size_t nbytes;
    int answer;
    PyObject *handle;
};

static void do_in_run(pc_engine_object *engine, void *argument) {
    struct doing *doing = argument;
    struct pc_composed *self = doing->self;
    (void)engine;
    struct pc_run *run = self->under_way ? pc_pipeline_run(&self->pipeline, doing->segment) : NULL;
    if (run == NULL)
        return;
    doing->done = true;
    doing->work(doing, run);
}

/* False: the run is not under way any more, which is no error; or the arguments are wrong, with an
   exception. */
static bool do_for(struct pc_composed *self, PyObject *args, uint32_t limit, struct doing *doing) {
    doing->self = self;
    if (!PyArg_ParseTuple(args, "II", &doing->segment, &doing->at))
        return false;
    if (doing->at >= limit) {
        PyErr_SetString(PyExc_IndexError, "there is no such step or chunk");
        return false;
    }
    pc_engine_do(self->on->engine, do_in_run, doing);
    return doing->done;
}

static uint32_t num_steps(const struct pc_composed *self) {
    return self->table->way.table.num_steps;
}
static uint32_t num_chunks(const struct pc_composed *self) {
    return self->table->way.table.num_chunks;
}

static PyObject *nothing(void) { return PyErr_Occurred() ? NULL : Py_NewRef(Py_None); }

struct finding {
    struct pc_composed *self;
    struct pc_run *run;
    uint32_t position, segment;
};

static void find_next(pc_engine_object *engine, void *argument) {
    struct finding *finding = argument;
    (void)engine;
    if (!finding->self->under_way)
        return;
    finding->position = pc_pipeline_next_asked(&finding->self->pipeline, &finding->run);
    if (finding->position != PC_NO_STEP)
        finding->segment = finding->run->segment;
}

PyObject *pc_composed_next_asked(struct pc_composed *self, PyObject *unused) {
    struct finding finding = {.self = self, .position = PC_NO_STEP};
    (void)unused;
    pc_engine_do(self->on->engine, find_next, &finding);
    if (finding.position == PC_NO_STEP)
        Py_RETURN_NONE;
    return Py_BuildValue("Ii", finding.segment,
                         finding.position == PC_LAST_STEPS ? -1 : (int)finding.position);
}

static void step_done(struct doing *doing, struct pc_run *run) { pc_run_step_done(run, doing->at); }
static void wait_again(struct doing *doing, struct pc_run *run) {
    pc_run_wait_again(run, doing->at);
}
static void settle(struct doing *doing, struct pc_run *run) { pc_run_settle(run, doing->at); }
static void where(struct doing *doing, struct pc_run *run) {
    doing->answer = (int)pc_run_where(run, doing->at);
}

static void place(struct doing *doing, struct pc_run *run) {
    doing->answer = pc_run_place(run, doing->at) ? (int)pc_run_where(run, doing->at) : -1;
}

static void take(struct doing *doing, struct pc_run *run) {
    struct pc_receive *receive = pc_run_held(run, doing->at);
    doing->answer = receive != NULL;
    if (receive == NULL)
        return;
    (void)pc_item_take_over(doing->handle, receive);
    pc_run_taken(run, doing->at);
}

static void take_incoming(struct doing *doing, struct pc_run *run) {
    const struct pc_step *step = &run->table->steps[doing->at];
    if (step->kind != PC_STEP_REDUCE)
        return;
    doing->memory = pc_run_take_incoming(run, doing->at, &doing->nbytes);
}

static void take_own(struct doing *doing, struct pc_run *run) {
    doing->memory = pc_run_take_own(run);
    doing->nbytes = run->own_nbytes;
}

PyObject *pc_composed_step_done(struct pc_composed *self, PyObject *args) {
    (void)do_for(self, args, num_steps(self), &(struct doing){.work = step_done});
    return nothing();
}

PyObject *pc_composed_wait_again(struct pc_composed *self, PyObject *args) {
    (void)do_for(self, args, num_steps(self), &(struct doing){.work = wait_again});
    return nothing();
}

PyObject *pc_composed_settle(struct pc_composed *self, PyObject *args) {
    (void)do_for(self, args, num_chunks(self), &(struct doing){.work = settle});
    return nothing();
}

PyObject *pc_composed_where(struct pc_composed *self, PyObject *args) {
    struct doing doing = {.work = where};
    (void)do_for(self, args, num_chunks(self), &doing);
    return PyErr_Occurred() ? NULL : PyLong_FromLong(doing.answer);
}

PyObject *pc_composed_place(struct pc_composed *self, PyObject *args) {
    struct doing doing = {.work = place};
    (void)do_for(self, args, num_chunks(self), &doing);
    if (doing.answer < 0)
        return PyErr_NoMemory();
    return PyErr_Occurred() ? NULL : PyLong_FromLong(doing.answer);
}

PyObject *pc_composed_take(struct pc_composed *self, PyObject *args) {
    struct doing doing = {.work = take, .handle = pc_item_receive(self->on->engine)};
    if (doing.handle == NULL)
        return NULL;
    if (do_for(self, args, num_steps(self), &doing) && doing.answer)
        return doing.handle;
    Py_DECREF(doing.handle);
    return nothing();
}

PyObject *pc_composed_incoming(struct pc_composed *self, PyObject *args) {
    struct doing doing = {.work = take_incoming};
    (void)do_for(self, args, num_steps(self), &doing);
    return doing.memory != NULL ? memory_of(self->on->engine, doing.memory, doing.nbytes)
                                : nothing();
}

PyObject *pc_composed_own(struct pc_composed *self, PyObject *args) {
    struct doing doing = {.work = take_own};
    (void)do_for(self, args, num_chunks(self), &doing);
    return doing.memory != NULL ? memory_of(self->on->engine, doing.memory, doing.nbytes)
                                : nothing();
}

PyObject *pc_composed_grown(struct pc_composed *self, PyObject *number) {
    unsigned long chunk = PyLong_AsUnsignedLong(number);
    if (PyErr_Occurred() || self->grown == NULL || chunk >= num_chunks(self) || self->under_way)
        return nothing();
    struct pc_grown *grown = &self->grown[chunk];
    void *memory = grown->memory;
    grown->memory = NULL;
    return memory != NULL ? memory_of(self->on->engine, memory, grown->nbytes) : nothing();
}
