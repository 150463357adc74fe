/* `_core.Collectives`: the collectives of one communicator as schedules that the message engine runs; `_core.Plan`, what
   is known of such a call before it is made; `_core.Collective`, one that is under way.

   What is a contiguous NumPy array of a plain dtype is done here, by the plan of an earlier call with the same dtype,
   shape, operator and root. Without one Python is asked for it. All else, and what takes long or goes wrong, is handed
   with the same arguments to the Python methods.

   The engine works on the memory inside a `Collective`, which keeps itself alive until that has ended. */
#include "collective_call.h"
#include "engine_type.h"

#include "engine/run.h"

#include <errno.h>
#include <stdlib.h>
#include <structmember.h>

/* A wait of that length is gone on with in Python, which looks at failures and tells the launcher. */
#define SLICE_NS 100000000u
/* Dimensions of an array of which plans are kept. */
#define NAMED_DIMS 6
/* Plans that a communicator keeps, and those of them among which a call looks for its own. */
#define PLANS 128
#define PLANS_TOGETHER 4
/* Segments of one call that are under way at a time. */
#define IN_FLIGHT 16
#define MOST_PLACE_NBYTES 256

/* --- plans ------------------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    struct pc_schedule table;
    struct pc_step *steps;
    uint32_t *chunks, *successors;
    struct pc_chunk_place *places;
    struct pc_reduction reduction;
    unsigned char *text;
    size_t text_nbytes, granule;
    uint32_t num_segments;
} pc_plan;

static PyTypeObject *plan_type, *collective_type;
static uint64_t generation; /* of plans: those of an earlier one are not used */

PyObject *pc_forget_plans(PyObject *module, PyObject *unused) {
    (void)module;
    (void)unused;
    generation++;
    Py_RETURN_NONE;
}

/* Append the numbers of a tuple, all below `limit`; -1 with an exception. */
static int append(uint32_t **list, uint32_t *count, PyObject *numbers, uint32_t limit) {
    Py_ssize_t added = PyTuple_Size(numbers);
    if (added < 0)
        return -1;
    uint32_t *longer = realloc(*list, (*count + (size_t)added + 1) * sizeof **list);
    if (longer == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    *list = longer;
    for (Py_ssize_t index = 0; index < added; index++) {
        long number = PyLong_AsLong(PyTuple_GetItem(numbers, index));
        if (number < 0 || number >= (long)limit) {
            if (!PyErr_Occurred())
                PyErr_Format(PyExc_ValueError, "%ld is not below %u", number, limit);
            return -1;
        }
        longer[(*count)++] = (uint32_t)number;
    }
    return 0;
}

/* Whether a step may be run: it names what there is. */
static bool is_sound(const pc_plan *self, uint32_t position, int size) {
    const struct pc_step *step = &self->steps[position];
    if (step->kind > PC_STEP_COPY || step->num_chunks == 0)
        return false;
    if (step->kind == PC_STEP_COPY)
        return step->other < self->table.num_chunks && step->num_chunks == 1;
    if (step->kind == PC_STEP_REDUCE)
        return position > 0 && self->steps[position - 1].kind == PC_STEP_RECV_SCRATCH &&
               self->steps[position - 1].num_chunks == step->num_chunks;
    return step->other < (uint32_t)size;
}

static int read_steps(pc_plan *self, PyObject *steps, int size) {
    Py_ssize_t count = PyList_Size(steps);
    uint32_t num_chunks = 0, num_successors = 0;
    self->steps = calloc((size_t)count + 1, sizeof *self->steps);
    if (self->steps == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t position = 0; position < count; position++) {
        struct pc_step *step = &self->steps[position];
        PyObject *chunks, *successors;
        unsigned kind, other, index, waits;
        int incoming_first;
        if (!PyArg_ParseTuple(PyList_GetItem(steps, position), "IpIIO!O!I", &kind, &incoming_first, &other, &index,
                              &PyTuple_Type, &chunks, &PyTuple_Type, &successors, &waits))
            return -1;
        *step = (struct pc_step){.kind = (uint8_t)kind, .incoming_first = incoming_first != 0, .other = other,
                                 .index = index, .chunks = num_chunks, .successors = num_successors, .waits = waits};
        if (append(&self->chunks, &num_chunks, chunks, self->table.num_chunks) < 0 ||
            append(&self->successors, &num_successors, successors, (uint32_t)count) < 0)
            return -1;
        step->num_chunks = num_chunks - step->chunks;
        step->num_successors = num_successors - step->successors;
        if (kind > PC_STEP_COPY || !is_sound(self, (uint32_t)position, size)) {
            PyErr_Format(PyExc_ValueError, "step %zd cannot be run", position);
            return -1;
        }
    }
    self->table.num_steps = (uint32_t)count;
    self->table.steps = self->steps;
    self->table.chunks = self->chunks;
    self->table.successors = self->successors;
    return 0;
}

static int read_places(pc_plan *self, PyObject *places) {
    Py_ssize_t count = PyList_Size(places);
    self->places = calloc((size_t)count + 1, sizeof *self->places);
    if (self->places == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t chunk = 0; chunk < count; chunk++) {
        Py_ssize_t nbytes, source, target;
        if (!PyArg_ParseTuple(PyList_GetItem(places, chunk), "nnn", &nbytes, &source, &target))
            return -1;
        self->places[chunk] = (struct pc_chunk_place){(size_t)nbytes, source, target};
    }
    self->table.num_chunks = (uint32_t)count;
    return 0;
}

static PyObject *plan_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *steps, *places;
    const char *text;
    Py_ssize_t text_nbytes, granule;
    int size, op, dtype;
    unsigned segments;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "iO!O!y#iiIn", &size, &PyList_Type, &steps, &PyList_Type, &places, &text, &text_nbytes,
                          &op, &dtype, &segments, &granule))
        return NULL;
    if (segments == 0 || segments > UINT16_MAX || granule <= 0) {
        PyErr_SetString(PyExc_ValueError, "there is no such segment");
        return NULL;
    }
    pc_plan *self = (pc_plan *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self == NULL)
        return NULL;
    if (op >= 0)
        self->reduction = (struct pc_reduction){pc_reduce_find(op, dtype), pc_itemsize(dtype)};
    self->granule = (size_t)granule;
    self->num_segments = segments;
    self->text = malloc((size_t)text_nbytes + 1);
    self->text_nbytes = (size_t)text_nbytes;
    if (self->text != NULL)
        memcpy(self->text, text, (size_t)text_nbytes);
    else
        PyErr_NoMemory();
    if (self->text != NULL && read_places(self, places) == 0 && read_steps(self, steps, size) == 0)
        return (PyObject *)self;
    Py_DECREF(self);
    return NULL;
}

static void plan_dealloc(pc_plan *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    free(self->steps);
    free(self->chunks);
    free(self->successors);
    free(self->places);
    free(self->text);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyType_Slot plan_slots[] = {
    {Py_tp_new, plan_new},
    {Py_tp_dealloc, plan_dealloc},
    {Py_tp_doc,
     "Plan(size, steps, places, text, op, dtype, segments, granule): how calls run that are alike.\n\n"
     "`steps` are (kind, incoming first, peer or chunk, index, chunks, successors, waits); `places`, by chunk, (nbytes, "
     "offset in x, offset in the result), -1 for none; `text` is the call's signature; `op` and `dtype` are codes, -1: "
     "nothing is reduced."},
    {0, NULL},
};

PyType_Spec pc_plan_spec = {
    .name = "pycoll.transports._core.Plan",
    .basicsize = sizeof(pc_plan),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = plan_slots,
};

/* --- a call under way -------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    pc_context_object *context;
    pc_engine_object *engine;
    int size, rank;
    char usable;
    PyObject *owner;   /* kept for Python */
    PyObject *type;    /* of calls under way */
    PyObject *planner; /* asked for plans */
    PyObject *finish;  /* waits for a call that takes long */
    PyObject *slow[2][PC_KINDS]; /* the Python methods; the first index: it blocks */
    uint64_t generation;
    struct plan_entry *plans;
    uint32_t num_made;
} pc_collectives;

struct plan_key {
    int kind, blocking, op, dtype, root, ndim;
    intptr_t dims[NAMED_DIMS];
};

struct plan_entry {
    struct plan_key key;
    PyObject *plan; /* NULL: there is none; None: Python must run such calls */
};

struct pc_started {
    PyObject_HEAD
    pc_collectives *collectives;
    pc_plan *plan;
    struct pc_op op;
    struct pc_event event;
    struct pc_context *context; /* from its launch to its end: it may be closed meanwhile */
    struct pc_called *call;
    uint64_t number;
    struct pc_run *runs, one; /* of the segments that are under way */
    uint32_t most, in_flight, next_segment;
    PyObject *x, *result;
    void *source, *target;
    char is_blocking, collected, cancelled;
    bool filling, is_launched, is_pending, is_watched, under_way;
    int status, from;
    size_t came, expected;
    struct pc_started *next; /* of those that have ended */
};

static void end(struct pc_started *self) {
    pc_engine_object *engine = self->collectives->engine;
    if (self->status == 0)
        pc_context_end(self->context, self->call);
    pc_context_let_go(self->context);
    self->context = NULL;
    self->call = NULL;
    if (self->runs != &self->one)
        free(self->runs);
    self->runs = NULL;
    if (!self->is_launched) {
        self->op.status = self->status;
        atomic_store_explicit(&self->op.done, 1, memory_order_relaxed);
        return;
    }
    self->under_way = false;
    if (self->is_pending)
        pc_drive_pending(&engine->drive, -1);
    if (self->is_watched || self->status != 0) {
        self->event.kind = PC_EVENT_COLLECTIVE;
        pc_engine_post(engine, &self->event); /* which keeps it alive */
    } else {
        self->next = engine->ended_collectives;
        engine->ended_collectives = self;
    }
    pc_op_end(&self->op, self->status);
}

static void cancel_runs(struct pc_started *self) {
    for (uint32_t index = 0; index < self->most; index++)
        if (self->runs[index].owner != NULL)
            (void)pc_run_cancel(&self->runs[index]);
    self->in_flight = 0;
}

static void run_ended(struct pc_run *run);

/* Start as many segments as may be under way; end if nothing is left. */
static void fill(struct pc_started *self) {
    const pc_plan *plan = self->plan;
    self->filling = true;
    while (self->status == 0 && self->next_segment < plan->num_segments && self->in_flight < self->most) {
        struct pc_run *run = self->runs;
        while (run->owner != NULL)
            run++;
        *run = (struct pc_run){.table = &plan->table,
                               .places = plan->places,
                               .reduction = plan->reduction,
                               .source = self->source,
                               .target = self->target,
                               .call = self->call,
                               .lane = (uint16_t)self->next_segment,
                               .segment = self->next_segment,
                               .num_segments = plan->num_segments,
                               .granule = plan->granule,
                               .ended = run_ended,
                               .owner = self};
        self->next_segment++;
        self->in_flight++;
        if (!pc_run_start(self->context, run)) {
            run->owner = NULL;
            self->in_flight--;
            self->status = -ENOMEM;
        }
    }
    self->filling = false;
    if (self->status != 0)
        cancel_runs(self);
    if (self->in_flight == 0)
        end(self);
}

static void run_ended(struct pc_run *run) {
    struct pc_started *self = run->owner;
    run->owner = NULL;
    self->in_flight--;
    if (run->status != 0 && self->status == 0) {
        self->status = run->status;
        self->from = run->from;
        self->came = run->came;
        self->expected = run->expected;
    }
    if (!self->filling)
        fill(self);
}

static void let_go(struct pc_started *self) {
    Py_CLEAR(self->x);
    Py_DECREF((PyObject *)self);
}

static void take_ended(pc_engine_object *engine, void *argument) {
    struct pc_started **ended = argument;
    *ended = engine->ended_collectives;
    engine->ended_collectives = NULL;
}

void pc_engine_let_go_collectives(pc_engine_object *engine) {
    struct pc_started *ended = NULL;
    if (!pc_engine_do(engine, take_ended, &ended))
        take_ended(engine, &ended); /* it is closed: nobody else comes here */
    while (ended != NULL) {
        struct pc_started *self = ended;
        ended = self->next;
        let_go(self);
    }
}

PyObject *pc_collective_event(struct pc_event *event) {
    struct pc_started *self = (struct pc_started *)((char *)event - offsetof(struct pc_started, event));
    PyObject *told = Py_BuildValue("iO", PC_EVENT_REQUEST, (PyObject *)self); /* for Python they are alike */
    let_go(self);
    return told;
}

/* --- where a call was made --------------------------------------------------------------------------- */

/* Of places that have called before: the code is kept, so that its address is no other code's. */
struct known_place {
    PyObject *code;
    int line;
    bool is_ours; /* in a module of pycoll */
    size_t nbytes;
    char text[MOST_PLACE_NBYTES];
};

static struct known_place known_places[64];

static bool is_ours(PyFrameObject *frame) {
    PyObject *globals = PyObject_GetAttrString((PyObject *)frame, "f_globals");
    PyObject *name = globals != NULL ? PyMapping_GetItemString(globals, "__name__") : NULL;
    const char *text = name != NULL && PyUnicode_Check(name) ? PyUnicode_AsUTF8AndSize(name, NULL) : NULL;
    bool is_ours = text != NULL && strncmp(text, "pycoll.", 7) == 0;
    PyErr_Clear();
    Py_XDECREF(globals);
    Py_XDECREF(name);
    return is_ours;
}

/* Know the file's name and the line. */
static void know_place(struct known_place *known, PyFrameObject *frame, PyObject *code, int line) {
    PyObject *name = PyObject_GetAttrString(code, "co_filename"), *before = known->code;
    const char *text = name != NULL && PyUnicode_Check(name) ? PyUnicode_AsUTF8AndSize(name, NULL) : NULL;
    PyErr_Clear();
    const char *slash = text != NULL ? strrchr(text, '/') : NULL;
    PyOS_snprintf(known->text, sizeof known->text, "%s:%d", slash != NULL ? slash + 1 : text != NULL ? text : "?", line);
    known->nbytes = strlen(known->text);
    known->is_ours = is_ours(frame);
    known->line = line;
    known->code = Py_NewRef(code);
    Py_XDECREF(name);
    Py_XDECREF(before);
}

/* The frame that called this one (new reference); NULL: none. */
static PyFrameObject *caller_of(PyFrameObject *frame) {
    PyObject *outer = PyObject_GetAttrString((PyObject *)frame, "f_back");
    PyErr_Clear();
    if (outer == Py_None)
        Py_CLEAR(outer);
    return (PyFrameObject *)outer;
}

/* Write file and line of the innermost frame that is not pycoll's, as `task.caller` does; returns the length. */
static size_t write_place(char *to) {
    PyFrameObject *frame = (PyFrameObject *)Py_XNewRef((PyObject *)PyEval_GetFrame());
    while (frame != NULL) {
        PyObject *code = (PyObject *)PyFrame_GetCode(frame);
        int line = PyFrame_GetLineNumber(frame);
        struct known_place *known = &known_places[((uintptr_t)code / 64 + (size_t)line) % 64];
        if (known->code != code || known->line != line)
            know_place(known, frame, code, line);
        Py_DECREF(code);
        PyFrameObject *outer = known->is_ours ? caller_of(frame) : NULL;
        Py_DECREF((PyObject *)frame);
        if (!known->is_ours) {
            memcpy(to, known->text, known->nbytes);
            return known->nbytes;
        }
        frame = outer;
    }
    to[0] = '?';
    return 1;
}

/* --- beginning --------------------------------------------------------------------------------------- */

struct starting {
    struct pc_started *started;
    unsigned char *text;
    size_t text_nbytes;
    bool may; /* else nothing has happened */
};

static void launch(pc_engine_object *engine, void *argument) {
    struct starting *starting = argument;
    struct pc_started *self = starting->started;
    struct pc_context *context = self->collectives->context->context;
    starting->may = context != NULL && context->broken == 0;
    if (!starting->may)
        return;
    pc_op_begin(&self->op, &engine->drive, -1);
    self->call = pc_context_begin(context, starting->text, starting->text_nbytes);
    if (self->call == NULL) {
        starting->may = false;
        return;
    }
    self->number = self->call->number;
    self->context = context;
    context->num_users++;
    pc_engine_enter(&engine->engine); /* it is launched before it hears of anything */
    fill(self);
    if (!pc_op_is_done(&self->op)) {
        self->is_launched = self->under_way = true;
        self->is_pending = !self->is_blocking;
        if (self->is_pending)
            pc_drive_pending(&engine->drive, 1);
    }
    pc_engine_leave(&engine->engine);
}

/* Start a call. NULL without an exception: it could not be, and Python says why. */
static struct pc_started *start(pc_collectives *self, pc_plan *plan, PyObject *x_object, void *source, PyObject *result,
                                void *target, bool is_blocking) {
    unsigned char few[512];
    PyTypeObject *type = (PyTypeObject *)self->type;
    struct pc_started *started = (struct pc_started *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (started == NULL)
        return NULL;
    started->collectives = (pc_collectives *)Py_NewRef((PyObject *)self);
    started->plan = (pc_plan *)Py_NewRef((PyObject *)plan);
    started->x = x_object != NULL ? Py_NewRef(x_object) : NULL;
    started->result = Py_NewRef(result);
    started->source = source;
    started->target = target;
    started->is_blocking = is_blocking;
    started->most = plan->num_segments < IN_FLIGHT ? plan->num_segments : IN_FLIGHT;
    started->runs = started->most == 1 ? &started->one : calloc(started->most, sizeof *started->runs);
    struct starting starting = {.started = started, .text = few};
    size_t most = plan->text_nbytes + 1 + MOST_PLACE_NBYTES;
    if (most > sizeof few)
        starting.text = malloc(most);
    bool done = false;
    if (started->runs != NULL && starting.text != NULL) {
        memcpy(starting.text, plan->text, plan->text_nbytes);
        starting.text[plan->text_nbytes] = 0;
        starting.text_nbytes = plan->text_nbytes + 1;
        starting.text_nbytes += write_place((char *)starting.text + starting.text_nbytes);
        Py_INCREF((PyObject *)started);
        done = pc_engine_do(self->engine, launch, &starting) && starting.may;
        if (!done || !started->is_launched)
            let_go(started);
    }
    if (starting.text != few)
        free(starting.text);
    if (done && started->status != 0 && !started->is_launched) {
        PyObject *said = PyObject_CallMethod((PyObject *)started, "_fail", NULL);
        done = said != NULL;
        Py_XDECREF(said);
    }
    if (done && pc_engine_hear(self->engine) == 0)
        return started;
    Py_DECREF((PyObject *)started);
    return NULL;
}

/* --- what becomes of it ------------------------------------------------------------------------------ */

static PyObject *result_of(struct pc_started *self) {
    if (PC_UNLIKELY(self->status != 0 || !pc_op_is_done(&self->op)))
        return PyObject_CallMethod((PyObject *)self, "_failed", NULL);
    self->collected = 1;
    return Py_NewRef(self->result);
}

bool pc_is_collective(PyObject *object) { return PyObject_TypeCheck(object, collective_type); }

struct pc_op *pc_collective_op(PyObject *object, pc_engine_object **engine) {
    struct pc_started *self = (struct pc_started *)object;
    *engine = self->collectives->engine;
    return &self->op;
}

PyObject *pc_collective_result(PyObject *object) { return result_of((struct pc_started *)object); }

static bool wait_a_while(struct pc_started *self) {
    if (pc_op_is_done(&self->op))
        return true;
    pc_engine_object *engine = self->collectives->engine;
    PyThreadState *state = PyEval_SaveThread();
    pc_drive_wait(&engine->drive, &self->op, NULL, pc_drive_now_ns() + SLICE_NS, PC_FOR_EVER);
    PyEval_RestoreThread(state);
    pc_engine_let_go(engine);
    return pc_op_is_done(&self->op);
}

static PyObject *collective_wait(struct pc_started *self, PyObject *const *args, Py_ssize_t count, PyObject *keywords) {
    Py_ssize_t named = keywords != NULL ? PyTuple_Size(keywords) : 0;
    bool plain = count + named == 0 || (count == 1 && named == 0 && args[0] == Py_None);
    if (plain && (pc_op_is_done(&self->op) || (!self->collectives->engine->engaged && wait_a_while(self))))
        return result_of(self);
    PyObject *slow = PyObject_GetAttrString((PyObject *)self, "_wait");
    PyObject *result = slow != NULL ? pc_call_slow(slow, args, count, keywords) : NULL;
    Py_XDECREF(slow);
    return result;
}

static void look(pc_engine_object *engine, void *argument) {
    (void)argument;
    for (uint32_t index = 0; index < engine->drive.num_sources; index++)
        engine->drive.sources[index]->ops->progress(engine->drive.sources[index]);
}

static PyObject *collective_test(struct pc_started *self, PyObject *unused) {
    (void)unused;
    pc_engine_object *engine = self->collectives->engine;
    if (!pc_op_is_done(&self->op) && !engine->engaged) {
        pc_engine_do(engine, look, NULL);
        pc_engine_let_go(engine);
        if (pc_engine_hear(engine) < 0)
            return NULL;
    }
    return PyBool_FromLong(pc_op_is_done(&self->op));
}

struct asking {
    struct pc_started *started;
    bool answer;
    int ranks[64];
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
    struct pc_started *self = asking->started;
    if (!self->under_way)
        return;
    pc_engine_enter(&engine->engine);
    self->status = PC_CONTEXT_CLOSED; /* nobody asks why */
    cancel_runs(self);
    end(self);
    pc_engine_leave(&engine->engine);
}

static void find_awaited(pc_engine_object *engine, void *argument) {
    struct asking *asking = argument;
    struct pc_started *self = asking->started;
    (void)engine;
    for (uint32_t index = 0; self->under_way && index < self->most; index++)
        if (self->runs[index].owner != NULL)
            asking->count +=
                pc_run_awaited(&self->runs[index], asking->ranks + asking->count, 64 - asking->count);
}

static PyObject *collective_watch(struct pc_started *self, PyObject *unused) {
    (void)unused;
    struct asking asking = {.started = self};
    pc_engine_do(self->collectives->engine, watch, &asking);
    return PyBool_FromLong(asking.answer);
}

static PyObject *collective_give_up(struct pc_started *self, PyObject *unused) {
    (void)unused;
    struct asking asking = {.started = self};
    pc_engine_do(self->collectives->engine, give_up, &asking);
    pc_engine_let_go(self->collectives->engine);
    Py_RETURN_NONE;
}

static PyObject *collective_awaited(struct pc_started *self, PyObject *unused) {
    (void)unused;
    struct asking asking = {.started = self};
    pc_engine_do(self->collectives->engine, find_awaited, &asking);
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

/* (text, number, status, rank or chunk, bytes that came, bytes expected) */
static PyObject *collective_description(struct pc_started *self, void *unused) {
    (void)unused;
    return Py_BuildValue("s#Kiinn", self->plan->text, (Py_ssize_t)self->plan->text_nbytes,
                         (unsigned long long)self->number, self->status, self->from, (Py_ssize_t)self->came,
                         (Py_ssize_t)self->expected);
}

static PyObject *collective_owner(struct pc_started *self, void *unused) {
    (void)unused;
    return Py_NewRef(self->collectives->owner != NULL ? self->collectives->owner : Py_None);
}

static void collective_dealloc(struct pc_started *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    if (self->runs != &self->one)
        free(self->runs);
    Py_XDECREF(self->x);
    Py_XDECREF(self->result);
    Py_XDECREF((PyObject *)self->plan);
    Py_XDECREF((PyObject *)self->collectives);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyMethodDef collective_methods[] = {
    {"wait", (PyCFunction)(void (*)(void))collective_wait, METH_FASTCALL | METH_KEYWORDS,
     "wait($self, timeout=None)\n--\n\nReturn the result, when the call is done. See pycoll.Request.wait."},
    {"test", (PyCFunction)collective_test, METH_NOARGS,
     "Return whether the call is done, in whatever way; never waits."},
    {"_watch", (PyCFunction)collective_watch, METH_NOARGS, "Have an event at its end; False: it has ended."},
    {"_give_up", (PyCFunction)collective_give_up, METH_NOARGS, "Give it up: its memory is not used any more."},
    {"_awaited", (PyCFunction)collective_awaited, METH_NOARGS, "World ranks that must be in the call before it ends."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef collective_values[] = {
    {"done", (getter)collective_done, NULL, "Whether the call is done, as far as is known without looking.", NULL},
    {"result", (getter)collective_result, NULL, "What the call returns. See pycoll.Request.result.", NULL},
    {"_description", (getter)collective_description, NULL,
     "(text, number, status, rank or chunk, bytes that came, bytes expected); the last three say why it failed.", NULL},
    {"_owner", (getter)collective_owner, NULL, "What its communicator's `Collectives` keeps.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef collective_members[] = {
    {"_collected", T_BOOL, offsetof(struct pc_started, collected), 0, "a wait has returned its result"},
    {"_cancelled", T_BOOL, offsetof(struct pc_started, cancelled), 0, "never: it cannot be withdrawn"},
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
    .name = "pycoll.transports._core.Collective",
    .basicsize = sizeof(struct pc_started),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .slots = collective_slots,
};

/* --- methods of communicators ------------------------------------------------------------------------ */

static bool may_start(const pc_collectives *self) {
    const pc_engine_object *engine = self->engine;
    return PC_LIKELY(self->usable && !engine->engaged) &&
           atomic_load_explicit(&engine->drive.closed, memory_order_relaxed) == PC_DRIVE_OPEN &&
           (engine->host == NULL || !pc_host_failed(engine->shm.channel.host));
}

static void forget_plans(pc_collectives *self) {
    for (int index = 0; self->plans != NULL && index < PLANS; index++)
        Py_CLEAR(self->plans[index].plan);
}

/* The place of a plan; if there is none, one that may be given to it. */
static struct plan_entry *find_plan(pc_collectives *self, const struct plan_key *key) {
    if (self->generation != generation) {
        forget_plans(self);
        self->generation = generation;
    }
    uint64_t hash = pc_hash((uint64_t)key->kind << 32 | (uint64_t)key->op << 16 | (uint64_t)key->dtype << 8,
                            (uint64_t)key->root << 8 | (uint64_t)key->blocking << 4 | (uint64_t)key->ndim);
    for (int axis = 0; axis < key->ndim; axis++)
        hash = pc_hash(hash, (uint64_t)key->dims[axis]);
    struct plan_entry *together = &self->plans[hash % (PLANS / PLANS_TOGETHER) * PLANS_TOGETHER];
    for (int index = 0; index < PLANS_TOGETHER; index++)
        if (together[index].plan == NULL || memcmp(&together[index].key, key, sizeof *key) == 0)
            return &together[index];
    return &together[self->num_made % PLANS_TOGETHER];
}

/* The plan of a call (new reference); None: Python must run it; NULL with an exception. */
static PyObject *plan_of(pc_collectives *self, const struct plan_key *key, PyObject **values, PyObject *result) {
    struct plan_entry *entry = find_plan(self, key);
    if (PC_LIKELY(entry->plan != NULL && memcmp(&entry->key, key, sizeof *key) == 0))
        return Py_NewRef(entry->plan);
    PyObject *x = values[X] != NULL ? values[X] : Py_None;
    PyObject *plan = PyObject_CallFunction(self->planner, "iiOiiO", key->kind, key->blocking, x, key->op, key->root, result);
    if (plan == NULL)
        return NULL;
    if (plan != Py_None && Py_TYPE(plan) != plan_type) {
        Py_DECREF(plan);
        PyErr_SetString(PyExc_TypeError, "that is no plan");
        return NULL;
    }
    entry = find_plan(self, key); /* plans may have been forgotten meanwhile */
    self->num_made++;
    entry->key = *key;
    PyObject *before = entry->plan;
    entry->plan = Py_NewRef(plan);
    Py_XDECREF(before);
    return plan;
}

/* The result of a call (new reference): `out`, a new array, or None; NULL: leave it to Python. */
static PyObject *result_for(const pc_collectives *self, int kind, PyObject **values, const struct pc_array *x, int root,
                            struct pc_array *out) {
    if (kind == PC_BARRIER || ((kind == PC_REDUCE || kind == PC_GATHER) && self->rank != root))
        return Py_NewRef(Py_None);
    if (!is_none(values[OUT])) {
        if (!pc_array_view(values[OUT], out) || !out_fits(self->size, self->rank, kind, x, out))
            return NULL;
        return Py_NewRef(values[OUT]);
    }
    int change = shape_change(kind);
    PyObject *result = pc_array_new(x, values[X], change > 0 ? self->size : change);
    if (result != NULL && !pc_array_view(result, out))
        Py_CLEAR(result);
    return result;
}

/* NULL without an exception: leave it to Python. */
static struct pc_started *begin(pc_collectives *self, int kind, bool is_blocking, PyObject **values) {
    struct plan_key key;
    struct pc_array x = {0}, out = {0};
    memset(&key, 0, sizeof key);
    key.kind = kind;
    key.blocking = is_blocking;
    bool reduces = kind == PC_REDUCE || kind == PC_ALL_REDUCE || kind == PC_REDUCE_SCATTER || kind == PC_SCAN;
    bool splits = kind == PC_REDUCE_SCATTER || kind == PC_ALL_TO_ALL;
    if (kind != PC_BARRIER) {
        key.root = find_root(values[ROOT], self->size);
        key.op = reduces ? find_op(values[OP]) : 0;
        if (key.root < 0 || key.op < 0 || values[X] == NULL || !pc_array_view(values[X], &x) || x.ndim > NAMED_DIMS ||
            (reduces && pc_reduce_find(key.op, x.dtype) == NULL) ||
            (splits && (x.ndim == 0 || x.dims[0] != self->size)))
            return NULL;
        key.dtype = x.dtype;
        key.ndim = x.ndim;
        for (int axis = 0; axis < x.ndim; axis++)
            key.dims[axis] = x.dims[axis];
    }
    PyObject *result = result_for(self, kind, values, &x, key.root, &out);
    if (result == NULL)
        return NULL;
    struct pc_started *started = NULL;
    PyObject *plan = plan_of(self, &key, values, result);
    if (plan != NULL && plan != Py_None)
        started = start(self, (pc_plan *)plan, values[X], kind != PC_BARRIER ? x.data : (void *)self, result, out.data,
                        is_blocking); /* a barrier's chunks are empty, but somewhere */
    Py_XDECREF(plan);
    Py_DECREF(result);
    return started;
}

static PyObject *collective(pc_collectives *self, int kind, bool is_blocking, PyObject *const *args, Py_ssize_t count,
                            PyObject *keywords) {
    PyObject *values[ARGUMENTS] = {NULL};
    if (may_start(self) && parse(kind, args, count, keywords, values) && is_none(values[ALGORITHM]) &&
        values[TIMEOUT] == NULL) {
        struct pc_started *started = begin(self, kind, is_blocking, values);
        if (started == NULL && PyErr_Occurred())
            return NULL;
        if (started != NULL && !is_blocking)
            return (PyObject *)started;
        if (started != NULL) {
            PyObject *result = NULL, *finished = NULL;
            if (!wait_a_while(started))
                finished = PyObject_CallFunctionObjArgs(self->finish, (PyObject *)started, NULL);
            if (finished != NULL || !PyErr_Occurred())
                result = result_of(started);
            Py_XDECREF(finished);
            Py_DECREF((PyObject *)started);
            return result;
        }
    }
    return pc_call_slow(self->slow[is_blocking][kind], args, count, keywords);
}

static PyObject *collectives_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *context, *owner, *call, *planner, *finish;
    int size, rank;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "OiiOOOO", &context, &size, &rank, &owner, &call, &planner, &finish))
        return NULL;
    if (!PyObject_TypeCheck(context, pc_context_type) || !PyType_Check(call) ||
        !PyType_IsSubtype((PyTypeObject *)call, collective_type)) {
        PyErr_SetString(PyExc_TypeError, "arguments are context, size, rank, owner, type, planner, finish");
        return NULL;
    }
    pc_collectives *self = (pc_collectives *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self == NULL)
        return NULL;
    self->context = (pc_context_object *)Py_NewRef(context);
    self->engine = self->context->engine;
    self->size = size;
    self->rank = rank;
    self->owner = Py_NewRef(owner);
    self->type = Py_NewRef(call);
    self->planner = Py_NewRef(planner);
    self->finish = Py_NewRef(finish);
    self->generation = generation;
    self->plans = calloc(PLANS, sizeof *self->plans);
    if (self->plans != NULL)
        return (PyObject *)self;
    Py_DECREF(self);
    return PyErr_NoMemory();
}

static const char *const kind_names[PC_KINDS] = {
    [PC_BARRIER] = "barrier", [PC_BROADCAST] = "broadcast", [PC_REDUCE] = "reduce", [PC_ALL_REDUCE] = "all_reduce",
    [PC_GATHER] = "gather", [PC_ALL_GATHER] = "all_gather", [PC_SCATTER] = "scatter",
    [PC_REDUCE_SCATTER] = "reduce_scatter", [PC_ALL_TO_ALL] = "all_to_all", [PC_SCAN] = "scan", [PC_EXSCAN] = "exscan",
};

/* set_slow({name: function}): the Python methods, by their names. */
static PyObject *collectives_set_slow(pc_collectives *self, PyObject *slow) {
    for (int blocking = 0; blocking < 2; blocking++)
        for (int kind = 0; kind < PC_KINDS; kind++) {
            char name[32];
            PyOS_snprintf(name, sizeof name, "%s%s", blocking ? "" : "i", kind_names[kind]);
            PyObject *function = PyMapping_GetItemString(slow, name);
            if (function == NULL)
                PyErr_Clear();
            Py_XDECREF(self->slow[blocking][kind]);
            self->slow[blocking][kind] = function;
        }
    Py_RETURN_NONE;
}

static PyObject *collectives_forget_plans(pc_collectives *self, PyObject *unused) {
    (void)unused;
    forget_plans(self);
    Py_RETURN_NONE;
}

static int collectives_traverse(pc_collectives *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->owner);
    Py_VISIT(self->planner);
    Py_VISIT(self->finish);
    for (int index = 0; index < 2 * PC_KINDS; index++)
        Py_VISIT(self->slow[index / PC_KINDS][index % PC_KINDS]);
    return 0;
}

static int collectives_clear(pc_collectives *self) {
    Py_CLEAR(self->owner);
    Py_CLEAR(self->planner);
    Py_CLEAR(self->finish);
    for (int index = 0; index < 2 * PC_KINDS; index++)
        Py_CLEAR(self->slow[index / PC_KINDS][index % PC_KINDS]);
    return 0;
}

static void collectives_dealloc(pc_collectives *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    PyObject_GC_UnTrack(self);
    collectives_clear(self);
    forget_plans(self);
    free(self->plans);
    Py_XDECREF((PyObject *)self->context);
    Py_XDECREF(self->type);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

#define COLLECTIVE(name, kind)                                                                                  \
    static PyObject *start_##name(pc_collectives *self, PyObject *const *args, Py_ssize_t count, PyObject *keywords) { \
        return collective(self, kind, false, args, count, keywords);                                            \
    }                                                                                                           \
    static PyObject *run_##name(pc_collectives *self, PyObject *const *args, Py_ssize_t count, PyObject *keywords) {   \
        return collective(self, kind, true, args, count, keywords);                                             \
    }
COLLECTIVE(barrier, PC_BARRIER)
COLLECTIVE(reduce, PC_REDUCE)
COLLECTIVE(all_reduce, PC_ALL_REDUCE)
COLLECTIVE(gather, PC_GATHER)
COLLECTIVE(all_gather, PC_ALL_GATHER)
COLLECTIVE(reduce_scatter, PC_REDUCE_SCATTER)
COLLECTIVE(all_to_all, PC_ALL_TO_ALL)
COLLECTIVE(scan, PC_SCAN)

#define METHODS(name, parameters)                                                                               \
    {"i" #name, (PyCFunction)(void (*)(void))start_##name, METH_FASTCALL | METH_KEYWORDS,                       \
     "i" #name "($self, " parameters "*, algorithm=None)\n--\n\nSee pycoll.Communicator.i" #name "."},          \
    {#name, (PyCFunction)(void (*)(void))run_##name, METH_FASTCALL | METH_KEYWORDS,                             \
     #name "($self, " parameters "*, algorithm=None, timeout=None)\n--\n\nSee pycoll.Communicator." #name "."}

static PyMethodDef collectives_methods[] = {
    METHODS(barrier, ""),
    METHODS(reduce, "x, op='sum', root=0, out=None, "),
    METHODS(all_reduce, "x, op='sum', out=None, "),
    METHODS(gather, "x, root=0, out=None, "),
    METHODS(all_gather, "x, out=None, "),
    METHODS(reduce_scatter, "x, op='sum', out=None, "),
    METHODS(all_to_all, "x, out=None, "),
    METHODS(scan, "x, op='sum', out=None, "),
    {"set_slow", (PyCFunction)collectives_set_slow, METH_O,
     "set_slow({name: function}): the methods to which goes what is not done here, blocking or not."},
    {"forget_plans", (PyCFunction)collectives_forget_plans, METH_NOARGS, "Ask for all plans anew."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef collectives_members[] = {
    {"usable", T_BOOL, offsetof(pc_collectives, usable), 0, "whether anything is done here"},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot collectives_slots[] = {
    {Py_tp_new, collectives_new},
    {Py_tp_dealloc, collectives_dealloc},
    {Py_tp_traverse, collectives_traverse},
    {Py_tp_clear, collectives_clear},
    {Py_tp_methods, collectives_methods},
    {Py_tp_members, collectives_members},
    {Py_tp_doc,
     "Collectives(context, size, rank, owner, type, planner, finish)\n\n"
     "The collectives of one communicator by messages, in the core. `type` is a subclass of `Collective`; `planner(kind, "
     "blocking, x, op, root, result)` returns a `Plan`, or None if Python must run such calls; `finish(collective)` "
     "waits for one that takes long."},
    {0, NULL},
};

PyType_Spec pc_collectives_spec = {
    .name = "pycoll.transports._core.Collectives",
    .basicsize = sizeof(pc_collectives),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = collectives_slots,
};

void pc_run_types(PyTypeObject *plan, PyTypeObject *call) {
    plan_type = plan;
    collective_type = call;
}
