/* `_core.Engine` and `_core.Seat`: links, driving, and what is told to Python. See engine_type.h. */
#include "engine_type.h"

#include "host_type.h"

#include <errno.h>
#include <stdlib.h>
#include <structmember.h>

/* So often a thread that waits for something of Python's looks for signals: one may have come between its last look
   and its sleep. */
#define SEAT_SLICE_NS 100000000u

struct pc_seat {
    PyObject_HEAD
    pc_engine_object *engine;
    struct pc_op op; /* ends when the seat is rung */
    bool begun, naps;
    struct pc_seat *next, **at; /* of those that nap */
};

static PyTypeObject *engine_type;

/* --- the lock ---------------------------------------------------------------------------------------- */

/* What was written may not have left: then somebody must drive, though nothing else is pending. */
static void settle(pc_engine_object *self) {
    bool is_behind = self->lags || (self->has_tcp && self->tcp.tcp.behind > 0);
    if (is_behind == self->is_behind)
        return;
    self->is_behind = is_behind;
    pc_drive_pending(&self->drive, is_behind ? 1 : -1);
}

bool pc_engine_take(pc_engine_object *self, struct pc_turn *turn) {
    if (!self->is_open || atomic_load_explicit(&self->drive.closed, memory_order_acquire) != PC_DRIVE_OPEN)
        return false;
    turn->state = NULL;
    if (PC_UNLIKELY(!pc_lock_try(&self->drive.lock))) {
        turn->state = PyEval_SaveThread();
        pc_lock_take(&self->drive.lock);
    }
    if (PC_UNLIKELY(atomic_load_explicit(&self->drive.closed, memory_order_relaxed) != PC_DRIVE_OPEN)) {
        pc_lock_give(&self->drive.lock);
        if (turn->state != NULL)
            PyEval_RestoreThread(turn->state);
        return false;
    }
    turn->orders = self->queue.num_posted;
    self->is_called = true;
    return true;
}

void pc_engine_give(pc_engine_object *self, const struct pc_turn *turn) {
    self->is_called = false;
    settle(self);
    bool has_orders = self->queue.num_posted != turn->orders;
    pc_lock_give(&self->drive.lock);
    if (PC_UNLIKELY(turn->state != NULL))
        PyEval_RestoreThread(turn->state);
    /* Here, and not when somebody comes to it: what was given up may be used otherwise from now on. */
    if (PC_UNLIKELY(has_orders))
        pc_link_do_orders(self);
}

bool pc_engine_do(pc_engine_object *self, void (*work)(pc_engine_object *self, void *argument), void *argument) {
    struct pc_turn turn;
    if (!pc_engine_take(self, &turn))
        return false;
    work(self, argument);
    pc_engine_give(self, &turn);
    return true;
}

PyObject *pc_engine_is_closed(void) {
    PyErr_SetString(PyExc_RuntimeError, "the message engine is closed");
    return NULL;
}

/* --- what is told ------------------------------------------------------------------------------------ */

void pc_engine_post(pc_engine_object *self, struct pc_event *event) {
    if (event->stands)
        return;
    event->stands = true;
    event->next = NULL;
    pc_engine_set(self->last, event);
    self->last = &event->next;
    pc_drive_post_work(&self->drive);
}

void pc_engine_unpost(pc_engine_object *self, struct pc_event *event) {
    struct pc_event **at = &self->first;
    if (!event->stands)
        return;
    while (*at != event)
        at = &(*at)->next;
    pc_engine_set(at, event->next);
    if (*at == NULL)
        self->last = at;
    event->stands = false;
}

static void finished(struct pc_engine *engine, int peer) {
    pc_engine_object *self = engine->owner;
    self->peers[peer].finished.kind = PC_EVENT_FINISHED;
    pc_engine_post(self, &self->peers[peer].finished);
}

static void lost(struct pc_engine *engine, int peer, const char *why) {
    pc_engine_object *self = engine->owner;
    struct pc_peer_events *events = &self->peers[peer];
    PyOS_snprintf(events->why, sizeof events->why, "%s", why);
    events->lost.kind = PC_EVENT_LOST;
    pc_engine_post(self, &events->lost);
}

static void wanted(void *owner, int peer) {
    pc_engine_object *self = owner;
    self->peers[peer].wanted.kind = PC_EVENT_WANTED;
    pc_engine_post(self, &self->peers[peer].wanted);
}

static void watched(void *owner) {
    pc_engine_object *self = owner;
    self->watched.kind = PC_EVENT_WATCHED;
    pc_engine_post(self, &self->watched);
}

static void posted(void *owner) { pc_drive_posted(&((pc_engine_object *)owner)->drive); }

/* What one event was when it was taken out of the queue. */
struct taken {
    struct pc_event *event;
    enum pc_event_kind kind;
    int peer, status;
    char why[sizeof((struct pc_peer_events *)NULL)->why];
};

static void take_event(pc_engine_object *self, void *argument) {
    struct taken *taken = argument;
    taken->event = NULL;
    for (;;) {
        struct pc_event *event = self->first;
        if (event == NULL)
            return;
        pc_engine_set(&self->first, event->next);
        if (self->first == NULL)
            self->last = &self->first;
        event->stands = false;
        taken->kind = event->kind;
        if (event->kind <= PC_EVENT_ENDED) {
            if (!pc_item_taken((struct pc_py_item *)event))
                continue;
            ((struct pc_py_item *)event)->is_told = true;
            taken->status = ((struct pc_py_item *)event)->status;
        } else if (event->kind == PC_EVENT_REQUEST) {
            pc_request_event_taken(event);
        } else if (event->kind == PC_EVENT_COLLECTIVE) {
            pc_collective_event_taken(event);
        } else if (event->kind >= PC_EVENT_FINISHED && event != &self->watched) {
            taken->peer = 0;
            while (event < &self->peers[taken->peer].finished || event > &self->peers[taken->peer].wanted)
                taken->peer++;
            memcpy(taken->why, self->peers[taken->peer].why, sizeof taken->why);
        }
        taken->event = event;
        return;
    }
}

static PyObject *engine_events(pc_engine_object *self, PyObject *unused) {
    (void)unused;
    PyObject *events = PyList_New(0);
    pc_engine_let_go(self);
    pc_drive_take_work(&self->drive);
    struct taken taken;
    while (events != NULL && pc_engine_do(self, take_event, &taken) && taken.event != NULL) {
        PyObject *event = NULL;
        switch (taken.kind) {
        case PC_EVENT_ARRIVED:
        case PC_EVENT_HELD:
        case PC_EVENT_ENDED:
            if (!pc_item_event(self, (struct pc_py_item *)taken.event, taken.kind, taken.status, &event))
                continue;
            break;
        case PC_EVENT_REQUEST:
            event = pc_request_event(self, taken.event);
            break;
        case PC_EVENT_COLLECTIVE:
            event = pc_collective_event(self, taken.event);
            break;
        case PC_EVENT_COMPOSED:
            event = pc_composed_event(taken.event);
            break;
        case PC_EVENT_ASKED:
            event = pc_composed_asks(taken.event);
            break;
        case PC_EVENT_FINISHED:
        case PC_EVENT_WANTED:
            event = Py_BuildValue("ii", taken.kind, taken.peer);
            break;
        case PC_EVENT_LOST:
            /* It may have been cut in the middle of a character. */
            event = Py_BuildValue("iiN", taken.kind, taken.peer,
                                  PyUnicode_DecodeUTF8(taken.why, (Py_ssize_t)strlen(taken.why), "replace"));
            break;
        case PC_EVENT_WATCHED:
            event = Py_BuildValue("(i)", taken.kind);
        }
        if (event == NULL || PyList_Append(events, event) < 0)
            Py_CLEAR(events);
        Py_XDECREF(event);
    }
    return events;
}

/* --- driving ----------------------------------------------------------------------------------------- */

static void look(pc_engine_object *self, void *argument) {
    bool *worked = argument;
    *worked = false;
    for (uint32_t index = 0; index < self->drive.num_sources; index++)
        *worked |= self->drive.sources[index]->ops->progress(self->drive.sources[index]);
}

bool pc_engine_look(pc_engine_object *self) {
    bool worked = false;
    pc_engine_do(self, look, &worked);
    pc_engine_let_go(self);
    return worked;
}

static PyObject *engine_progress(pc_engine_object *self, PyObject *unused) {
    (void)unused;
    return PyBool_FromLong(pc_engine_look(self) || pc_engine_has(self->first));
}

/* The doorbell has rung: who naps may have been meant. */
static void rung(void *owner) {
    pc_engine_object *self = owner;
    atomic_store_explicit(&self->rings, atomic_load_explicit(&self->rings, memory_order_relaxed) + 1, memory_order_relaxed);
    for (struct pc_seat *seat = self->nappers; seat != NULL; seat = seat->next)
        if (!pc_op_is_done(&seat->op))
            pc_op_end(&seat->op, 0);
}

/* In the background, without any lock. */
static void on_work(void *owner) {
    pc_engine_object *self = owner;
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject *result = self->on_work != NULL ? PyObject_CallNoArgs(self->on_work) : NULL;
    if (result == NULL && PyErr_Occurred())
        PyErr_WriteUnraisable(self->on_work);
    Py_XDECREF(result);
    PyGILState_Release(state);
}

int pc_engine_hear(pc_engine_object *self) {
    if (PC_LIKELY(!pc_engine_has(self->first)) || self->on_work == NULL)
        return 0;
    PyObject *heard = PyObject_CallNoArgs(self->on_work);
    Py_XDECREF(heard);
    return heard != NULL ? 0 : -1;
}

static void change_pending(pc_engine_object *self, void *argument) {
    pc_drive_pending(&self->drive, *(int *)argument);
}

static PyObject *engine_pending(pc_engine_object *self, PyObject *number) {
    int delta = (int)PyLong_AsLong(number);
    if (PyErr_Occurred())
        return NULL;
    pc_engine_do(self, change_pending, &delta);
    Py_RETURN_NONE;
}

static void post_work(pc_engine_object *self, void *unused) {
    (void)unused;
    pc_drive_post_work(&self->drive);
}

static PyObject *engine_post_work(pc_engine_object *self, PyObject *unused) {
    (void)unused;
    pc_engine_do(self, post_work, NULL);
    Py_RETURN_NONE;
}

struct watching {
    int fd, error;
    bool again;
};

static void watch(pc_engine_object *self, void *argument) {
    struct watching *watching = argument;
    if (watching->again)
        pc_drive_watch_again(&self->drive);
    else
        watching->error = pc_drive_watch(&self->drive, watching->fd);
}

static PyObject *engine_watch(pc_engine_object *self, PyObject *number) {
    struct watching watching = {.fd = (int)PyLong_AsLong(number)};
    if (PyErr_Occurred())
        return NULL;
    pc_engine_do(self, watch, &watching);
    if (watching.error != 0) {
        errno = watching.error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    Py_RETURN_NONE;
}

static PyObject *engine_watch_again(pc_engine_object *self, PyObject *unused) {
    (void)unused;
    struct watching watching = {.again = true};
    pc_engine_do(self, watch, &watching);
    Py_RETURN_NONE;
}

/* --- seats ------------------------------------------------------------------------------------------- */

static PyObject *seat_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *engine;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "O!", engine_type, &engine))
        return NULL;
    struct pc_seat *self = (struct pc_seat *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self != NULL) {
        self->engine = (pc_engine_object *)Py_NewRef((PyObject *)engine);
        pc_op_begin(&self->op, &self->engine->drive, -1);
    }
    return (PyObject *)self;
}

static void stop_napping(pc_engine_object *engine, void *argument) {
    struct pc_seat *self = argument;
    (void)engine;
    self->begun = false;
    if (!self->naps)
        return;
    self->naps = false;
    *self->at = self->next;
    if (self->next != NULL)
        self->next->at = self->at;
}

static void seat_dealloc(struct pc_seat *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    if (self->naps)
        pc_engine_do(self->engine, stop_napping, self);
    Py_XDECREF((PyObject *)self->engine);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

struct beginning {
    struct pc_seat *seat;
    bool naps, may;
    uint64_t seen;
};

static void begin(pc_engine_object *engine, void *argument) {
    struct beginning *beginning = argument;
    struct pc_seat *self = beginning->seat;
    beginning->may = !beginning->naps || engine->rings == beginning->seen;
    if (!beginning->may)
        return;
    pc_op_begin(&self->op, &engine->drive, -1);
    self->begun = true;
    self->naps = beginning->naps;
    if (!self->naps)
        return;
    self->next = engine->nappers;
    self->at = &engine->nappers;
    if (self->next != NULL)
        self->next->at = &self->next;
    engine->nappers = self;
}

static PyObject *seat_begin(struct pc_seat *self, PyObject *args) {
    PyObject *seen = Py_None;
    if (!PyArg_ParseTuple(args, "|O", &seen))
        return NULL;
    struct beginning beginning = {.seat = self, .naps = seen != Py_None};
    if (beginning.naps)
        beginning.seen = PyLong_AsUnsignedLongLong(seen);
    if (PyErr_Occurred())
        return NULL;
    return PyBool_FromLong(pc_engine_do(self->engine, begin, &beginning) && beginning.may);
}

static PyObject *seat_wait(struct pc_seat *self, PyObject *number) {
    double seconds = PyFloat_AsDouble(number);
    if (PyErr_Occurred())
        return NULL;
    uint64_t deadline = PC_FOR_EVER;
    if (seconds <= 0)
        deadline = 0;
    else if (seconds < 1e9)
        deadline = pc_drive_now_ns() + (uint64_t)(seconds * 1e9);
    pc_engine_object *engine = self->engine;
    if (engine->is_open) {
        PyThreadState *state = PyEval_SaveThread();
        pc_drive_wait(&engine->drive, &self->op, NULL, deadline, SEAT_SLICE_NS);
        PyEval_RestoreThread(state);
    }
    pc_engine_do(engine, stop_napping, self);
    Py_RETURN_NONE;
}

static void ring(pc_engine_object *engine, void *argument) {
    struct pc_seat *self = argument;
    (void)engine;
    if (self->begun && !pc_op_is_done(&self->op))
        pc_op_end(&self->op, 0);
}

static PyObject *seat_ring(struct pc_seat *self, PyObject *unused) {
    (void)unused;
    pc_engine_do(self->engine, ring, self);
    Py_RETURN_NONE;
}

static PyMethodDef seat_methods[] = {
    {"begin", (PyCFunction)seat_begin, METH_VARARGS,
     "begin(seen=None) -> bool: from now on `ring` ends the wait; with `seen` the doorbell does, too. False: it has rung, "
     "for whomever, since `Engine.rings` was that."},
    {"wait", (PyCFunction)seat_wait, METH_O,
     "wait(seconds): drive, or sleep, until the seat is rung, a signal has come, or there is something for Python to do."},
    {"ring", (PyCFunction)seat_ring, METH_NOARGS, "End the wait; from any thread."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot seat_slots[] = {
    {Py_tp_new, seat_new},
    {Py_tp_dealloc, seat_dealloc},
    {Py_tp_methods, seat_methods},
    {Py_tp_doc, "Seat(engine): where one thread waits for what Python does."},
    {0, NULL},
};

PyType_Spec pc_seat_spec = {
    .name = "pycoll._transports._core.Seat",
    .basicsize = sizeof(struct pc_seat),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = seat_slots,
};

/* --- links ------------------------------------------------------------------------------------------- */

struct linking {
    int peer, lane, fd, error;
    const char *why;
};

static void attach(pc_engine_object *self, void *argument) {
    struct linking *linking = argument;
    linking->error = pc_tcp_attach(&self->tcp.tcp, linking->peer, linking->lane, linking->fd);
    if (linking->error == 0)
        self->tcp.peers[linking->peer].begun = true;
    pc_drive_posted(&self->drive);
}

static bool is_other(pc_engine_object *self, int peer) {
    if (self->has_tcp && peer >= 0 && peer < self->engine.size && peer != self->tcp.tcp.rank)
        return true;
    PyErr_SetString(PyExc_ValueError, "there is no such other rank by tcp");
    return false;
}

static PyObject *engine_attach(pc_engine_object *self, PyObject *args) {
    struct linking linking = {0};
    if (!PyArg_ParseTuple(args, "iii", &linking.peer, &linking.lane, &linking.fd) || !is_other(self, linking.peer))
        return NULL;
    if (linking.lane < 0 || linking.lane >= self->tcp.tcp.num_lanes) {
        PyErr_SetString(PyExc_ValueError, "there is no such lane");
        return NULL;
    }
    if (!pc_engine_do(self, attach, &linking))
        return pc_engine_is_closed();
    if (linking.error != 0) {
        errno = linking.error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    Py_RETURN_NONE;
}

static void lose(pc_engine_object *self, void *argument) {
    struct linking *linking = argument;
    pc_tcp_lose(&self->tcp.tcp, linking->peer, linking->why);
}

static PyObject *engine_lose(pc_engine_object *self, PyObject *args) {
    struct linking linking = {0};
    if (!PyArg_ParseTuple(args, "is", &linking.peer, &linking.why) || !is_other(self, linking.peer))
        return NULL;
    pc_engine_do(self, lose, &linking);
    Py_RETURN_NONE;
}

static void forget(pc_engine_object *self, void *argument) {
    int peer = *(int *)argument;
    pc_engine_forget(&self->engine, peer, 1 + peer);
}

static PyObject *engine_forget(pc_engine_object *self, PyObject *number) {
    int peer = (int)PyLong_AsLong(number);
    if (PyErr_Occurred())
        return NULL;
    if (peer < 0 || peer >= self->engine.size) {
        PyErr_SetString(PyExc_ValueError, "there is no such rank");
        return NULL;
    }
    pc_engine_do(self, forget, &peer);
    Py_RETURN_NONE;
}

/* Ranks to which something was sent, as bytes of 0 and 1. */
static void find_links(pc_engine_object *self, void *argument) {
    unsigned char *linked = argument;
    for (int local = 0; self->host != NULL && local < self->shm.channel.size; local++)
        if (self->shm.channel.peers[local].linked)
            linked[self->shm.peers[local].rank] = 1;
    for (int peer = 0; self->has_tcp && peer < self->engine.size; peer++)
        if (self->tcp.tcp.peers[peer].used)
            linked[peer] = 1;
}

static PyObject *engine_links(pc_engine_object *self, PyObject *unused) {
    (void)unused;
    unsigned char *linked = calloc((size_t)self->engine.size, 1);
    if (linked == NULL)
        return PyErr_NoMemory();
    pc_engine_do(self, find_links, linked);
    PyObject *links = PyList_New(0);
    for (int peer = 0; links != NULL && peer < self->engine.size; peer++) {
        PyObject *number = linked[peer] ? PyLong_FromLong(peer) : NULL;
        if (linked[peer] && (number == NULL || PyList_Append(links, number) < 0))
            Py_CLEAR(links);
        Py_XDECREF(number);
    }
    free(linked);
    return links;
}

/* --- the end ----------------------------------------------------------------------------------------- */

static void say_goodbye(pc_engine_object *self, void *argument) {
    (void)argument;
    if (self->host != NULL)
        (void)pc_link_shm_goodbye(&self->shm); /* without memory they hear it from the launcher */
    if (self->has_tcp)
        pc_tcp_say_goodbye(&self->tcp.tcp);
}

static PyObject *engine_say_goodbye(pc_engine_object *self, PyObject *unused) {
    (void)unused;
    pc_engine_do(self, say_goodbye, NULL);
    Py_RETURN_NONE;
}

static void flush(pc_engine_object *self, void *argument) {
    bool *is_done = argument;
    *is_done = true;
    if (self->host != NULL && pc_channel_flush(&self->shm.channel)) {
        /* Others may wait for room in our rings, and we for them. */
        self->shm.source.ops->progress(&self->shm.source);
        *is_done = !pc_channel_flush(&self->shm.channel);
    }
    if (self->has_tcp) {
        self->tcp.source.ops->progress(&self->tcp.source); /* who must be dialed may have answered */
        *is_done &= pc_tcp_flush(&self->tcp.tcp);
    }
}

static PyObject *engine_flush(pc_engine_object *self, PyObject *unused) {
    (void)unused;
    bool is_done = true;
    pc_engine_do(self, flush, &is_done);
    return PyBool_FromLong(is_done);
}

static void close_links(pc_engine_object *self, void *argument) {
    (void)argument;
    for (struct pc_context *each = self->engine.contexts; each != NULL; each = each->next)
        pc_context_break(each, PC_BROKEN);
    if (self->host != NULL)
        pc_link_shm_close(&self->shm);
}

/* Of a closed engine nobody takes events: requests that end with it are let go here. */
static void let_go_of_events(pc_engine_object *self) {
    for (struct pc_event *event; (event = self->first) != NULL;) {
        self->first = event->next;
        event->stands = false;
        PyObject *told = NULL;
        if (event->kind == PC_EVENT_REQUEST) {
            pc_request_event_taken(event);
            told = pc_request_event(self, event);
        } else if (event->kind == PC_EVENT_COLLECTIVE) {
            pc_collective_event_taken(event);
            told = pc_collective_event(self, event);
        } else if (event->kind == PC_EVENT_COMPOSED) {
            told = pc_composed_event(event);
        }
        Py_XDECREF(told);
    }
    self->last = &self->first;
}

static PyObject *engine_close(pc_engine_object *self, PyObject *unused) {
    (void)unused;
    pc_engine_do(self, close_links, NULL);
    PyThreadState *state = PyEval_SaveThread();
    pc_drive_close(&self->drive);
    PyEval_RestoreThread(state);
    pc_engine_let_go(self);
    let_go_of_events(self);
    if (self->has_tcp)
        pc_tcp_close(&self->tcp.tcp);
    /* Their owner, which has this. */
    Py_CLEAR(self->on_work);
    Py_CLEAR(self->on_orders);
    Py_CLEAR(self->on_stop);
    Py_RETURN_NONE;
}

static PyObject *engine_forked(pc_engine_object *self, PyObject *unused) {
    (void)unused;
    pc_drive_forked(&self->drive);
    if (self->has_tcp)
        pc_tcp_close(&self->tcp.tcp);
    Py_RETURN_NONE;
}

/* --- life -------------------------------------------------------------------------------------------- */

struct arguments {
    int rank, size, doorbell, single_copy, lanes, dialer;
    PyObject *host, *ranks, *on_work, *queued, *on_orders, *on_stop;
    Py_ssize_t eager_limit, ahead, credit, message_cost;
};

static int open_shm(pc_engine_object *self, const struct arguments *given) {
    pc_host *host = pc_host_of(given->host);
    if (host == NULL)
        return -1;
    int *ranks = calloc((size_t)host->size, sizeof *ranks);
    for (Py_ssize_t local = 0; ranks != NULL && local < host->size; local++) {
        PyObject *number = PySequence_GetItem(given->ranks, local);
        ranks[local] = number != NULL ? (int)PyLong_AsLong(number) : -1;
        Py_XDECREF(number);
        if (!PyErr_Occurred() && (ranks[local] < 0 || ranks[local] >= given->size))
            PyErr_SetString(PyExc_ValueError, "there is no such rank");
        if (PyErr_Occurred()) {
            free(ranks);
            return -1;
        }
    }
    if (ranks == NULL)
        return ENOMEM;
    pc_channel limits = {.eager_limit = (size_t)given->eager_limit,
                         .credit = (uint64_t)given->credit,
                         .message_cost = (uint64_t)given->message_cost,
                         .single_copy = given->single_copy != 0};
    self->host = Py_NewRef(given->host);
    int error = pc_link_shm_open(&self->shm, &self->engine, host, given->doorbell, ranks, &limits);
    free(ranks);
    if (error != 0)
        return error;
    self->shm.rung = rung;
    self->shm.owner = self;
    for (int local = 0; local < host->size; local++)
        if (self->shm.peers[local].rank != given->rank)
            self->links[self->shm.peers[local].rank] = &self->shm.link;
    self->drive.spins = (uint32_t)host->spins;
    return pc_drive_add(&self->drive, &self->shm.source);
}

static int open_tcp(pc_engine_object *self, const struct arguments *given) {
    struct pc_tcp_limits limits = {(size_t)given->eager_limit, (size_t)given->ahead, (size_t)given->credit,
                                   (size_t)given->message_cost};
    self->tcp = (struct pc_link_tcp){
        .tcp = {.rank = given->rank, .size = given->size, .num_lanes = given->lanes, .limits = limits, .epoll = -1},
        .wanted = wanted,
        .watched = watched,
        .posted = posted,
        .owner = self};
    int error = -pc_link_tcp_open(&self->tcp, &self->engine);
    if (error != 0)
        return error;
    self->has_tcp = true;
    for (int peer = 0; peer < given->size; peer++)
        if (self->links[peer] == NULL)
            self->links[peer] = &self->tcp.link;
    error = pc_tcp_watch(&self->tcp.tcp, given->dialer);
    return error != 0 ? error : pc_drive_add(&self->drive, &self->tcp.source);
}

/* 0, or an errno; -1 with an exception. */
static int open_engine(pc_engine_object *self, const struct arguments *given) {
    int error = pc_drive_open(&self->drive);
    if (error != 0)
        return error;
    self->is_open = true;
    self->drive.on_work = on_work;
    self->drive.owner = self;
    self->links = calloc((size_t)given->size, sizeof *self->links);
    self->peers = calloc((size_t)given->size, sizeof *self->peers);
    if (self->links == NULL || self->peers == NULL)
        return ENOMEM;
    self->engine = (struct pc_engine){.size = given->size,
                                      .links = self->links,
                                      .other = pc_item_other,
                                      .matches_calls = true,
                                      .finished = finished,
                                      .lost = lost,
                                      .owner = self};
    if (pc_engine_open(&self->engine) < 0)
        return ENOMEM;
    pc_link_self(&self->to_self, &self->engine);
    self->links[given->rank] = &self->to_self;
    if (given->host != Py_None && (error = open_shm(self, given)) != 0)
        return error;
    if (given->queued != Py_None && pc_link_open(self, given->queued) < 0)
        return -1;
    if (given->lanes > 0 && (error = open_tcp(self, given)) != 0)
        return error;
    return 0;
}

static PyObject *engine_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"rank",        "size",  "limits", "on_work", "host", "doorbell", "ranks",
                            "single_copy", "lanes", "dialer", "queued",  "on_orders", "on_stop", NULL};
    struct arguments given = {.host = Py_None, .ranks = Py_None, .doorbell = -1, .dialer = -1,
                              .queued = Py_None, .on_orders = Py_None, .on_stop = Py_None};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "ii(nnnn)O|OiOpiiOOO", names, &given.rank, &given.size,
                                     &given.eager_limit, &given.ahead, &given.credit, &given.message_cost,
                                     &given.on_work, &given.host, &given.doorbell, &given.ranks, &given.single_copy,
                                     &given.lanes, &given.dialer, &given.queued, &given.on_orders, &given.on_stop))
        return NULL;
    if (given.rank < 0 || given.rank >= given.size || given.lanes < 0 || given.lanes > PC_TCP_LANES) {
        PyErr_SetString(PyExc_ValueError, "there is no such rank, or no such number of lanes");
        return NULL;
    }
    pc_engine_object *self = (pc_engine_object *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self == NULL)
        return NULL;
    self->last = &self->first;
    self->on_work = Py_NewRef(given.on_work);
    self->on_orders = given.on_orders != Py_None ? Py_NewRef(given.on_orders) : NULL;
    self->on_stop = given.on_stop != Py_None ? Py_NewRef(given.on_stop) : NULL;
    int error = open_engine(self, &given);
    if (error == 0)
        return (PyObject *)self;
    Py_DECREF(self);
    if (error == E2BIG)
        PyErr_SetString(PyExc_OSError, "too many ranks on one host for shared memory");
    else if (error > 0) {
        errno = error;
        PyErr_SetFromErrno(PyExc_OSError);
    }
    return NULL;
}

static void engine_dealloc(pc_engine_object *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    /* In the child of a fork all of it is the parent's, who goes on. */
    if (self->is_open && atomic_load(&self->drive.closed) != PC_DRIVE_FORKED) {
        PyThreadState *state = PyEval_SaveThread();
        pc_drive_close(&self->drive);
        PyEval_RestoreThread(state);
        for (struct pc_context *each = self->engine.contexts, *next; each != NULL; each = next) {
            next = each->next;
            if (each != self->engine.others)
                pc_context_close(each);
        }
        if (self->host != NULL)
            pc_link_shm_close(&self->shm);
        if (self->engine.others != NULL)
            pc_engine_free(&self->engine);
        if (self->host != NULL)
            pc_link_shm_free(&self->shm);
        if (self->has_tcp)
            pc_link_tcp_free(&self->tcp);
        if (self->has_queue)
            pc_link_queue_free(&self->queue);
        void *left;
        while ((left = pc_scratch_next_left(&self->engine.scratch)) != NULL)
            Py_DECREF((PyObject *)left);
    }
    free(self->links);
    free(self->peers);
    Py_XDECREF(self->host);
    Py_XDECREF(self->on_work);
    Py_XDECREF(self->on_orders);
    Py_XDECREF(self->on_stop);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyObject *engine_rings(pc_engine_object *self, void *unused) {
    (void)unused;
    return PyLong_FromUnsignedLongLong(atomic_load_explicit(&self->rings, memory_order_relaxed));
}

static PyObject *engine_sent(pc_engine_object *self, void *unused) {
    (void)unused;
    return Py_BuildValue("KK", (unsigned long long)self->engine.num_sent, (unsigned long long)self->engine.sent_nbytes);
}

static PyObject *engine_is_behind(pc_engine_object *self, void *unused) {
    (void)unused;
    return PyBool_FromLong(self->is_behind);
}

static void find_receiving(pc_engine_object *self, void *argument) {
    bool *receiving = argument;
    *receiving = false;
    for (struct pc_context *each = self->engine.contexts; each != NULL && !*receiving; each = each->next)
        for (struct pc_message *message = each->taken.first; message != NULL; message = message->next)
            *receiving |= message->state == PC_MESSAGE_READING;
}

static PyObject *engine_is_receiving(pc_engine_object *self, void *unused) {
    (void)unused;
    bool receiving = true;
    pc_engine_do(self, find_receiving, &receiving);
    return PyBool_FromLong(receiving);
}

static PyObject *engine_has_work(pc_engine_object *self, void *unused) {
    (void)unused;
    return PyBool_FromLong(atomic_load_explicit(&self->drive.work, memory_order_relaxed) != 0 || pc_engine_has(self->first));
}

static PyObject *engine_has_fired(pc_engine_object *self, void *unused) {
    (void)unused;
    return PyBool_FromLong(atomic_load_explicit(&self->drive.fired, memory_order_relaxed) != 0);
}

static PyObject *engine_engaged(pc_engine_object *self, void *unused) {
    (void)unused;
    return PyBool_FromLong(self->engaged);
}

static int set_engaged(pc_engine_object *self, PyObject *value, void *unused) {
    (void)unused;
    self->engaged = value == Py_True;
    if (self->host != NULL)
        self->shm.channel.host->engaged = self->engaged;
    return 0;
}

static PyGetSetDef engine_values[] = {
    {"engaged", (getter)engine_engaged, (setter)set_engaged,
     "Whether a thread of Python's holds its engine: then nothing is done without it.", NULL},
    {"rings", (getter)engine_rings, NULL, "How often the doorbell has rung.", NULL},
    {"sent", (getter)engine_sent, NULL, "How many messages were sent, and the bytes of their payloads.", NULL},
    {"is_behind", (getter)engine_is_behind, NULL, "Whether something waits to be written.", NULL},
    {"is_receiving", (getter)engine_is_receiving, NULL, "Whether an accepted message is on its way.", NULL},
    {"has_fired", (getter)engine_has_fired, NULL, "Whether what is watched was readable, and is not watched anew yet.", NULL},
    {"has_work", (getter)engine_has_work, NULL, "Whether there is something for Python to do.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef engine_methods[] = {
    {"send", (PyCFunction)(void (*)(void))pc_item_send, METH_FASTCALL,
     "send(rank, header, parts, way) -> None | int | Send: None: it is done; a status: it has failed. Ways: 0 buffers, 1 "
     "may push, 2 offers."},
    {"progress", (PyCFunction)engine_progress, METH_NOARGS,
     "Do what can be done without waiting; whether that was something, or there are events."},
    {"events", (PyCFunction)engine_events, METH_NOARGS, "Return what has happened since the last call, and forget it."},
    {"pending", (PyCFunction)engine_pending, METH_O, "pending(delta): so many more things are to be driven for."},
    {"post_work", (PyCFunction)engine_post_work, METH_NOARGS, "There is something for Python to do: have somebody come."},
    {"watch", (PyCFunction)engine_watch, METH_O, "watch(fd): have waits end when it is readable, once."},
    {"watch_again", (PyCFunction)engine_watch_again, METH_NOARGS, "Have waits end again when what is watched is readable."},
    {"attach", (PyCFunction)engine_attach, METH_VARARGS, "attach(rank, lane, fd): take over a connected socket."},
    {"lose", (PyCFunction)engine_lose, METH_VARARGS, "lose(rank, why): there is no link to it."},
    {"forget", (PyCFunction)engine_forget, METH_O, "forget(rank): it has ended; what waits for it ends with 1 + rank."},
    {"next_order", (PyCFunction)pc_link_next_order, METH_NOARGS,
     "next_order() -> tuple | None: what a transport of Python's is to do next; the last order was done."},
    {"tell_arrived", (PyCFunction)pc_link_tell_arrived, METH_VARARGS,
     "tell_arrived(rank, header, payload, nbytes, waits) -> int: the message's number; 0: it is to be released now; -1: "
     "there is no room, tell it later; -2: it makes no sense."},
    {"tell_over", (PyCFunction)pc_link_tell, METH_VARARGS,
     "tell_over(number, what, status=0): 0: received, 1: withdrawn, 2: sent, or failed with a status that is not 0, "
     "3: it is too late to stop it."},
    {"tell_end", (PyCFunction)pc_link_tell_end, METH_VARARGS, "tell_end(rank, why): it is lost; None: it has finished."},
    {"tell_lag", (PyCFunction)pc_link_tell_lag, METH_O, "tell_lag(whether): a transport has something to write."},
    {"tell_more", (PyCFunction)pc_link_tell_more, METH_NOARGS, "There is more to do: somebody must come."},
    {"links", (PyCFunction)engine_links, METH_NOARGS, "The ranks to which something was sent."},
    {"say_goodbye", (PyCFunction)engine_say_goodbye, METH_NOARGS, "Tell all links that nothing more will come."},
    {"flush", (PyCFunction)engine_flush, METH_NOARGS, "Deliver what is buffered; whether all of it is."},
    {"close", (PyCFunction)engine_close, METH_NOARGS, "Have everybody who waits return, and close every link."},
    {"forked", (PyCFunction)engine_forked, METH_NOARGS, "In the child of a fork: nothing works any more."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot engine_slots[] = {
    {Py_tp_new, engine_new},
    {Py_tp_dealloc, engine_dealloc},
    {Py_tp_methods, engine_methods},
    {Py_tp_getset, engine_values},
    {Py_tp_doc, "The messages of one rank: matching, links, driving; see engine/engine.h."},
    {0, NULL},
};

PyType_Spec pc_engine_spec = {
    .name = "pycoll._transports._core.Engine",
    .basicsize = sizeof(pc_engine_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = engine_slots,
};

/* --- the module -------------------------------------------------------------------------------------- */

/* The type, which the module keeps; NULL with an exception. */
static PyTypeObject *make_type(PyObject *module, PyType_Spec *spec) {
    PyObject *type = PyType_FromSpec(spec);
    if (type == NULL)
        return NULL;
    int status = PyModule_AddType(module, (PyTypeObject *)type);
    Py_DECREF(type);
    return status == 0 ? (PyTypeObject *)type : NULL;
}

int pc_add_engine_types(PyObject *module) {
    PyTypeObject *engine = make_type(module, &pc_engine_spec), *send = make_type(module, &pc_send_spec),
                 *receive = make_type(module, &pc_receive_spec), *context = make_type(module, &pc_context_spec),
                 *request = make_type(module, &pc_request_spec), *plan = make_type(module, &pc_plan_spec),
                 *call = make_type(module, &pc_collective_spec), *table = make_type(module, &pc_table_spec),
                 *piece = make_type(module, &pc_piece_spec), *memory = make_type(module, &pc_memory_spec),
                 *scratch = make_type(module, &pc_scratch_spec),
                 *persistent = make_type(module, &pc_persistent_spec), *both = make_type(module, &pc_both_spec);
    if (engine == NULL || send == NULL || receive == NULL || context == NULL || request == NULL ||
        plan == NULL || call == NULL || table == NULL || piece == NULL || memory == NULL ||
        scratch == NULL || persistent == NULL || both == NULL)
        return -1;
    engine_type = engine;
    pc_item_types(send, receive);
    pc_context_types(engine, context);
    pc_piece_type(piece);
    pc_memory_type(memory);
    pc_scratch_type(scratch);
    pc_persistent_type(persistent);
    pc_both_type(both);
    pc_collective_types(call);
    pc_composed_types(table);
    pc_collectives_types(plan, call);
    pc_request_types(request);
    pc_messages_types(context);
    bool made = make_type(module, &pc_seat_spec) != NULL && make_type(module, &pc_messages_spec) != NULL &&
                make_type(module, &pc_collectives_spec) != NULL && make_type(module, &pc_composed_spec) != NULL;
    return made ? 0 : -1;
}
