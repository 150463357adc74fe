/* See watch.h. */
#include "watch.h"

#include <stdlib.h>
#include <string.h>

/* So many of the places that were given are looked at again before a thread waits. */
#define KEPT 64
/* So many requests of Python's own may be among those of a list. */
#define MOST_OTHERS 16
/* What a look at a request of the list takes, and how many steps of a search among its pointers
   take as long. */
#define LOOK_NS 20
#define STEPS 10

struct queue {
    struct pc_request *first, *last;
};

struct pc_watch {
    struct pc_several several; /* until a request ends; with the engine's lock */
    size_t users;              /* requests and threads */
    int waiting;               /* threads */
    struct queue well, failed;
    const void *listed; /* the list that was looked at, only to be compared */
    Py_ssize_t *given;  /* places, the last one last */
    size_t num_given, num_seen, room;
    Py_ssize_t credit; /* steps until the whole list is looked at again */
    PyObject *others;  /* list of weak references: requests of Python's own that are left */
};

/* A call. */
struct taking {
    PyObject *listed;
    PyTypeObject *type; /* of most requests */
    pc_engine_object *engine;
    struct pc_watch *watch;
    bool several, is_left; /* some are not given yet */
    PyObject *taken;
};

/* --- lists ------------------------------------------------------------------------------------ */

static Py_ssize_t size_of(PyObject *listed) {
    return PyList_CheckExact(listed) ? PyList_Size(listed) : PyTuple_Size(listed);
}

static PyObject *item(PyObject *listed, Py_ssize_t place) {
    return PyList_CheckExact(listed) ? PyList_GetItem(listed, place)
                                     : PyTuple_GetItem(listed, place);
}

/* NULL: it is no send or receive of this engine. */
static struct pc_request *request_at(const struct taking *taking, Py_ssize_t place) {
    PyObject *object = item(taking->listed, place);
    if (Py_TYPE(object) != taking->type && !PyObject_TypeCheck(object, pc_request_type))
        return NULL;
    struct pc_request *request = (struct pc_request *)object;
    return request->messages->engine == taking->engine ? request : NULL;
}

static struct pc_watch *watch_of(struct pc_request *request) {
    return atomic_load_explicit(&request->watch, memory_order_acquire);
}

/* --- its queues ------------------------------------------------------------------------------- */

static struct queue *queue_of(struct pc_request *request) {
    struct pc_watch *watch = watch_of(request);
    return request->status == 0 ? &watch->well : &watch->failed;
}

static void append(struct pc_request *request) {
    struct queue *queue = queue_of(request);
    request->before = queue->last;
    request->after = NULL;
    *(queue->last != NULL ? &queue->last->after : &queue->first) = request;
    queue->last = request;
    request->stands = true;
}

static void take_out(struct pc_request *request) {
    struct queue *queue = queue_of(request);
    *(request->before != NULL ? &request->before->after : &queue->first) = request->after;
    *(request->after != NULL ? &request->after->before : &queue->last) = request->before;
    request->stands = false;
}

void pc_watch_wake(struct pc_request *request) {
    struct pc_watch *watch = watch_of(request);
    if (watch != NULL && !pc_several_is_done(&watch->several))
        pc_several_end(&watch->several, &request->messages->engine->drive);
}

/* Whether it shall stand in a queue, and does not; one that was not in a list may be in another. */
static bool is_to_stand(const struct pc_request *request) {
    return request->is_let_go && !request->collected && !request->stands;
}

/* Put it into its queue. Afterwards another thread may have been in. */
static void offer(struct pc_request *request) {
    struct pc_watch *watch = watch_of(request);
    pc_engine_object *engine = request->messages->engine;
    append(request);
    struct pc_turn turn;
    if (!pc_several_is_done(&watch->several) && pc_engine_take(engine, &turn)) {
        pc_several_end(&watch->several, &engine->drive);
        pc_engine_give(engine, &turn);
    }
}

void pc_watch_ended(struct pc_request *request) {
    request->is_let_go = true;
    if (watch_of(request) != NULL && is_to_stand(request))
        offer(request);
}

/* --- who belongs to it ------------------------------------------------------------------------ */

static void let_go(struct pc_watch *watch, pc_engine_object *engine) {
    struct pc_turn turn;
    if (--watch->users > 0)
        return;
    Py_CLEAR(watch->others);
    /* With the lock: a request that has left it may just be ending. */
    (void)pc_engine_take(engine, &turn);
    free(watch->given);
    free(watch);
    pc_engine_give(engine, &turn);
}

void pc_watch_leave(struct pc_request *request) {
    struct pc_watch *watch = watch_of(request);
    if (watch == NULL)
        return;
    if (request->stands)
        take_out(request);
    let_go(watch, request->messages->engine);
}

static void join(struct pc_watch *watch, struct pc_request *request) {
    struct pc_watch *before = watch_of(request);
    if (request->stands)
        take_out(request);
    watch->users++;
    atomic_store_explicit(&request->watch, watch, memory_order_release);
    if (before != NULL) {
        before->listed = NULL;
        let_go(before, request->messages->engine);
    }
}

/* --- requests of Python's own ----------------------------------------------------------------- */

/* What Python says of one: see `_state_for` in request.py. */
enum { UNKNOWN, GIVEN, PENDING, READY };

static long state_of(const struct taking *taking, PyObject *other) {
    PyObject *answer =
        PyObject_CallMethod(other, "_state_for", "O", (PyObject *)taking->engine);
    long state = answer != NULL ? PyLong_AsLong(answer) : UNKNOWN;
    PyErr_Clear(); /* it is no request at all: Python says so */
    Py_XDECREF(answer);
    return state;
}

static enum pc_watch_took look_at_other(struct taking *taking, Py_ssize_t place) {
    PyObject *other = Py_NewRef(item(taking->listed, place)), *others = taking->watch->others;
    long state = state_of(taking, other);
    PyObject *weak = state >= PENDING ? PyWeakref_NewRef(other, NULL) : NULL;
    Py_DECREF(other);
    if (state < PENDING)
        return state == GIVEN ? PC_WATCH_NOTHING : PC_WATCH_UNFIT;
    taking->is_left = true;
    int stands = weak != NULL ? PySequence_Contains(others, weak) : -1;
    enum pc_watch_took took = PC_WATCH_NOTHING;
    if (stands == 0 && PyList_Size(others) >= MOST_OTHERS)
        took = PC_WATCH_UNFIT;
    else if (stands < 0 || (stands == 0 && PyList_Append(others, weak) < 0))
        took = PC_WATCH_FAILED;
    Py_XDECREF(weak);
    return took;
}

/* Whether Python has one to give. */
static bool is_other_ready(const struct taking *taking) {
    PyObject *others = taking->watch->others;
    for (Py_ssize_t at = PyList_Size(others) - 1; at >= 0; at--) {
        if (at >= PyList_Size(others))
            continue; /* another thread has come meanwhile */
        PyObject *other = Py_NewRef(PyWeakref_GetObject(PyList_GetItem(others, at)));
        long state = other != Py_None ? state_of(taking, other) : GIVEN;
        Py_DECREF(other);
        if (state == READY)
            return true;
        if (state == GIVEN && at < PyList_Size(others))
            PySequence_DelItem(others, at);
    }
    return false;
}

/* --- looking ---------------------------------------------------------------------------------- */

static enum pc_watch_took look_at(struct taking *taking, Py_ssize_t place) {
    struct pc_watch *watch = taking->watch;
    struct pc_request *request = request_at(taking, place);
    enum pc_watch_took took = PC_WATCH_NOTHING;
    taking->engine->looked++;
    if (request == NULL)
        return look_at_other(taking, place);
    request->place = place;
    taking->is_left |= !request->collected;
    if (PC_LIKELY(watch_of(request) == watch && !pc_request_is_held(request) &&
                  !is_to_stand(request)))
        return took;
    Py_INCREF((PyObject *)request);
    if (pc_request_go_on(request) < 0)
        took = PC_WATCH_FAILED;
    else if (watch_of(request) != NULL && watch_of(request) != watch &&
             watch_of(request)->waiting > 0)
        took = PC_WATCH_UNFIT;
    else if (watch_of(request) != watch)
        join(watch, request);
    if (watch_of(request) == watch && is_to_stand(request))
        offer(request);
    Py_DECREF((PyObject *)request);
    return took;
}

static enum pc_watch_took look_at_all(struct taking *taking) {
    struct pc_watch *watch = taking->watch;
    watch->listed = NULL;
    watch->num_given = watch->num_seen = 0;
    taking->is_left = false;
    for (Py_ssize_t place = 0; place < size_of(taking->listed); place++) {
        enum pc_watch_took took = look_at(taking, place);
        if (took != PC_WATCH_NOTHING)
            return took;
    }
    watch->listed = taking->listed;
    watch->credit = size_of(taking->listed) * STEPS;
    return taking->is_left ? PC_WATCH_NOTHING : PC_WATCH_UNFIT; /* Python says that none is left */
}

static bool is_known(const struct taking *taking, Py_ssize_t place) {
    struct pc_request *request = request_at(taking, place);
    return request != NULL && watch_of(request) == taking->watch;
}

/* Others may stand where requests were given, or behind all. */
static enum pc_watch_took look_for_new(struct taking *taking, size_t from) {
    struct pc_watch *watch = taking->watch;
    enum pc_watch_took took = PC_WATCH_NOTHING;
    watch->num_seen = watch->num_given;
    for (; took == PC_WATCH_NOTHING && from < watch->num_given; from++)
        if (watch->given[from] < size_of(taking->listed))
            took = look_at(taking, watch->given[from]);
    for (Py_ssize_t back = 1; took == PC_WATCH_NOTHING; back++) {
        Py_ssize_t place = size_of(taking->listed) - back;
        if (place < 0 || is_known(taking, place))
            break;
        took = look_at(taking, place);
    }
    return took;
}

/* Where it is in the list; -1: it is not there any more. */
static Py_ssize_t find(struct taking *taking, struct pc_request *request) {
    Py_ssize_t size = size_of(taking->listed);
    Py_ssize_t hint = request->place < size ? request->place : size - 1, place = hint;
    while (place >= 0 && item(taking->listed, place) != (PyObject *)request)
        place--; /* those before it that were taken out of the list have moved it */
    if (place < 0)
        for (place = hint + 1; place < size; place++)
            if (item(taking->listed, place) == (PyObject *)request)
                break;
    Py_ssize_t steps = place > hint ? place : hint - place;
    taking->watch->credit -= steps;
    taking->engine->looked += (uint64_t)(steps / STEPS);
    return place < size ? place : -1;
}

/* --- giving ----------------------------------------------------------------------------------- */

/* Where requests are, once more, if it was searched for them for long. */
static void number(struct taking *taking) {
    Py_ssize_t size = size_of(taking->listed);
    taking->watch->credit += size * STEPS;
    taking->engine->looked += (uint64_t)size;
    for (Py_ssize_t place = 0; place < size; place++)
        if (is_known(taking, place))
            request_at(taking, place)->place = place;
}

static void remember(struct pc_watch *watch, Py_ssize_t place) {
    if (watch->num_given == watch->room) {
        size_t room = watch->room + watch->room / 2 + 2 * KEPT;
        Py_ssize_t *given = realloc(watch->given, room * sizeof *given);
        if (given == NULL) {
            watch->listed = NULL; /* all is looked at, the next time */
            return;
        }
        watch->given = given;
        watch->room = room;
    }
    watch->given[watch->num_given++] = place;
}

static void forget(struct pc_watch *watch) {
    if (watch->num_given < 2 * KEPT)
        return;
    memmove(watch->given, watch->given + watch->num_given - KEPT, KEPT * sizeof *watch->given);
    watch->num_given = watch->num_seen = KEPT;
}

/* Take what stands in a queue: one, or all. */
static enum pc_watch_took take_from(struct taking *taking, struct queue *queue, bool all) {
    struct pc_request *request;
    while ((request = queue->first) != NULL && (all || PyList_Size(taking->taken) == 0)) {
        if (taking->watch->credit < -size_of(taking->listed) * STEPS)
            number(taking);
        take_out(request);
        Py_ssize_t place = request->collected ? -1 : find(taking, request);
        if (place < 0)
            continue;
        request->collected = 1;
        taking->watch->credit -= STEPS;
        remember(taking->watch, place);
        PyObject *pair = Py_BuildValue("nN", place, Py_NewRef((PyObject *)request));
        int status = pair != NULL ? PyList_Append(taking->taken, pair) : -1;
        Py_XDECREF(pair);
        if (status < 0)
            return PC_WATCH_FAILED;
    }
    return PyList_Size(taking->taken) > 0 ? PC_WATCH_TOOK : PC_WATCH_NOTHING;
}

/* Take what has ended. Who takes all is given one that has failed when there is nothing else. */
static enum pc_watch_took take(struct taking *taking) {
    struct pc_watch *watch = taking->watch;
    pc_engine_let_go(taking->engine);
    enum pc_watch_took took = PC_WATCH_NOTHING;
    if (!taking->several)
        took = take_from(taking, &watch->failed, false);
    if (took == PC_WATCH_NOTHING)
        took = take_from(taking, &watch->well, taking->several);
    if (took == PC_WATCH_NOTHING && taking->several)
        took = take_from(taking, &watch->failed, false);
    if (took == PC_WATCH_TOOK && taking->several && PyList_Sort(taking->taken) < 0)
        took = PC_WATCH_FAILED;
    return took;
}

/* --- waiting ---------------------------------------------------------------------------------- */

/* Let Python do what there is for it. 0; -1 with an exception. */
static int let_python_do(pc_engine_object *engine) {
    bool is_asked = pc_engine_has(engine->first) ||
                    atomic_load_explicit(&engine->drive.work, memory_order_relaxed) != 0;
    PyObject *done = is_asked && engine->on_work != NULL ? PyObject_CallNoArgs(engine->on_work)
                                                         : Py_NewRef(Py_None);
    Py_XDECREF(done);
    return done != NULL ? PyErr_CheckSignals() : -1;
}

/* Wait until one may have ended. 1; 0: the time is over, or the engine is Python's now; -1 with an
   exception. */
static int wait(struct taking *taking, uint64_t until_ns) {
    struct pc_watch *watch = taking->watch;
    pc_engine_object *engine = taking->engine;
    struct pc_turn turn;
    if (engine->python_busy || !pc_engine_take(engine, &turn))
        return 0;
    /* The next end wakes who waits, unless there is something that is not in the queues yet. */
    bool may_wait = engine->ended == NULL && engine->first == NULL;
    if (may_wait)
        atomic_store_explicit(&watch->several.left, 1, memory_order_relaxed);
    pc_engine_give(engine, &turn);
    enum pc_waited waited = PC_WAITED_LOOK;
    /* Another thread may have come meanwhile, and put one into a queue. */
    if (may_wait && watch->well.first == NULL && watch->failed.first == NULL) {
        watch->waiting++;
        PyThreadState *state = PyEval_SaveThread();
        waited = pc_drive_wait(&engine->drive, NULL, &watch->several, until_ns, PC_FOR_EVER);
        PyEval_RestoreThread(state);
        watch->waiting--;
    }
    if (waited == PC_WAITED_LOOK && let_python_do(engine) < 0)
        return -1;
    return waited == PC_WAITED_DONE || (waited == PC_WAITED_LOOK && pc_now_ns() < until_ns);
}

static enum pc_watch_took take_until(struct taking *taking, uint64_t until_ns) {
    int status = 1;
    enum pc_watch_took took;
    while ((took = take(taking)) == PC_WATCH_NOTHING && status > 0)
        status = is_other_ready(taking) ? 0 : wait(taking, until_ns);
    return status < 0 ? PC_WATCH_FAILED : took;
}

static enum pc_watch_took take_patiently(struct taking *taking, uint64_t timeout_ns) {
    struct pc_watch *watch = taking->watch;
    bool is_new = watch->listed != taking->listed, is_looked_at = is_new || watch->credit < 0;
    if (is_new && watch->waiting > 0)
        return PC_WATCH_UNFIT;
    enum pc_watch_took took =
        is_looked_at ? look_at_all(taking) : look_for_new(taking, watch->num_seen);
    forget(watch);
    if (took == PC_WATCH_NOTHING && (is_looked_at || taking->several) && is_other_ready(taking))
        return took;
    if (took == PC_WATCH_NOTHING)
        took = take(taking);
    if (took != PC_WATCH_NOTHING)
        return took;
    uint64_t until_ns = pc_patience(timeout_ns).until_ns;
    uint64_t soon_ns = pc_now_ns() + (uint64_t)size_of(taking->listed) * LOOK_NS;
    if (!is_looked_at) {
        took = look_for_new(taking, 0);
        if (took == PC_WATCH_NOTHING)
            took = take_until(taking, soon_ns < until_ns ? soon_ns : until_ns);
        if (took == PC_WATCH_NOTHING && soon_ns < until_ns)
            took = look_at_all(taking);
    }
    return took == PC_WATCH_NOTHING ? take_until(taking, until_ns) : took;
}

/* The watch that some of the list belong to, or a new one; NULL with an exception. */
static struct pc_watch *watch_for(const struct taking *taking) {
    for (Py_ssize_t part = 0; part < 4; part++) {
        struct pc_request *request = request_at(taking, (size_of(taking->listed) - 1) * part / 3);
        if (request != NULL && watch_of(request) != NULL)
            return watch_of(request);
    }
    struct pc_watch *watch = calloc(1, sizeof *watch);
    if (watch == NULL)
        PyErr_NoMemory();
    else if ((watch->others = PyList_New(0)) == NULL) {
        free(watch);
        watch = NULL;
    }
    return watch;
}

/* One of the list that is the core's; NULL: those at its begin are not. */
static struct pc_request *first_of(PyObject *listed) {
    Py_ssize_t size = size_of(listed), place = 0;
    if (size <= PC_FEW_REQUESTS)
        return NULL;
    while (place < MOST_OTHERS && !PyObject_TypeCheck(item(listed, place), pc_request_type))
        place++;
    return place < MOST_OTHERS ? (struct pc_request *)item(listed, place) : NULL;
}

enum pc_watch_took pc_watch_take(PyObject *listed, PyObject *timeout, bool several,
                                 PyObject **taken) {
    struct pc_request *first = first_of(listed);
    uint64_t timeout_ns;
    if (first == NULL ||
        !pc_timeout(timeout, first->messages->context->op_timeout_ns, &timeout_ns))
        return PC_WATCH_UNFIT;
    pc_engine_object *engine = first->messages->engine;
    struct taking taking = {.listed = listed,
                            .type = Py_TYPE((PyObject *)first),
                            .engine = engine,
                            .several = several};
    enum pc_watch_took took = PC_WATCH_FAILED;
    if ((taking.watch = watch_for(&taking)) == NULL)
        return took;
    Py_INCREF((PyObject *)engine);
    taking.watch->users++;
    if ((taking.taken = PyList_New(0)) != NULL)
        took = take_patiently(&taking, timeout_ns);
    let_go(taking.watch, engine);
    Py_DECREF((PyObject *)engine);
    if (took == PC_WATCH_TOOK)
        *taken = taking.taken;
    else
        Py_XDECREF(taking.taken);
    return took;
}
