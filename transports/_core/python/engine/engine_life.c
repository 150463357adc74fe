/* How an engine begins and ends: what `_core.MessageEngine` opens, and what it closes. See
   engine_type.h. */
#include "engine_type.h"

#include "python/host/host_type.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>

/* --- what the engine tells -------------------------------------------------------------------- */

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

/* --- the begin -------------------------------------------------------------------------------- */

struct arguments {
    int rank, size, doorbell, single_copy, lanes, dialer;
    PyObject *host, *ranks, *on_work, *queued, *on_orders, *on_stop;
    Py_ssize_t eager_limit, ahead, credit, message_cost;
};

static int open_shm(pc_engine_object *self, const struct arguments *given) {
    pc_host *host = pc_host_of(given->host);
    if (host == NULL)
        return -1;
    int *ranks = malloc((size_t)host->size * sizeof *ranks);
    if (ranks == NULL)
        return ENOMEM;
    if (!pc_read_ranks(given->ranks, host->size, 0, given->size - 1, ranks)) {
        free(ranks);
        return -1;
    }
    pc_channel limits = {.eager_limit = (size_t)given->eager_limit,
                         .credit = (uint64_t)given->credit,
                         .message_cost = (uint64_t)given->message_cost,
                         .single_copy = given->single_copy != 0};
    self->host = Py_NewRef(given->host);
    int error = pc_link_shm_open(&self->shm, &self->engine, host, given->doorbell, ranks, &limits);
    free(ranks);
    if (error != 0)
        return error;
    self->shm.rung = pc_parker_rung;
    self->shm.owner = self;
    for (int local = 0; local < host->size; local++)
        if (self->shm.peers[local].rank != given->rank)
            self->links[self->shm.peers[local].rank] = &self->shm.link;
    self->drive.spins = (uint32_t)host->spins;
    return pc_drive_add(&self->drive, &self->shm.source);
}

static int open_tcp(pc_engine_object *self, const struct arguments *given) {
    struct pc_tcp_limits limits = {(size_t)given->eager_limit, (size_t)given->ahead,
                                   (size_t)given->credit, (size_t)given->message_cost};
    self->tcp = (struct pc_link_tcp){.tcp = {.rank = given->rank,
                                             .size = given->size,
                                             .num_lanes = given->lanes,
                                             .limits = limits,
                                             .epoll = -1},
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
    if (given->queued != Py_None && (error = pc_link_open(self, given->queued)) != 0)
        return error;
    if (given->lanes > 0 && (error = open_tcp(self, given)) != 0)
        return error;
    return 0;
}

PyObject *pc_engine_new_py(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"rank",     "size",      "limits",      "on_work", "host",
                            "doorbell", "ranks",     "single_copy", "lanes",   "dialer",
                            "queued",   "on_orders", "on_stop",     NULL};
    struct arguments given = {.host = Py_None, .ranks = Py_None, .doorbell = -1, .dialer = -1,
                              .queued = Py_None, .on_orders = Py_None, .on_stop = Py_None};
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "ii(nnnn)O|OiOpiiOOO", names, &given.rank, &given.size,
            &given.eager_limit, &given.ahead, &given.credit, &given.message_cost, &given.on_work,
            &given.host, &given.doorbell, &given.ranks, &given.single_copy, &given.lanes,
            &given.dialer, &given.queued, &given.on_orders, &given.on_stop))
        return NULL;
    if (given.rank < 0 || given.rank >= given.size || given.lanes < 0 ||
        given.lanes > PC_TCP_LANES) {
        PyErr_SetString(PyExc_ValueError, "there is no such rank, or no such number of lanes");
        return NULL;
    }
    pc_engine_object *self = pc_new(type);
    if (self == NULL)
        return NULL;
    self->last = &self->first;
    self->on_work = Py_NewRef(given.on_work);
    self->on_orders = given.on_orders != Py_None ? Py_NewRef(given.on_orders) : NULL;
    self->on_stop = given.on_stop != Py_None ? Py_NewRef(given.on_stop) : NULL;
    self->dropped = PyList_New(0);
    if (self->dropped == NULL) {
        Py_DECREF(self);
        return NULL;
    }
    int error = open_engine(self, &given);
    if (error == 0)
        return (PyObject *)self;
    Py_DECREF(self);
    if (error == E2BIG)
        PyErr_SetString(PyExc_OSError, "too many ranks on one host for shared memory");
    else if (error > 0)
        pc_raise_errno(error);
    return NULL;
}

/* --- the end ---------------------------------------------------------------------------------- */

PyObject *pc_engine_say_goodbye_py(pc_engine_object *self, PyObject *Py_UNUSED(unused)) {
    struct pc_turn turn;
    if (pc_engine_take(self, &turn)) {
        if (self->host != NULL) /* without memory they hear it from the launcher */
            (void)pc_link_shm_goodbye(&self->shm);
        if (self->has_tcp)
            pc_tcp_say_goodbye(&self->tcp.tcp);
        pc_engine_give(self, &turn);
    }
    Py_RETURN_NONE;
}

PyObject *pc_engine_flush_py(pc_engine_object *self, PyObject *Py_UNUSED(unused)) {
    struct pc_turn turn;
    bool is_done = true, is_open = pc_engine_take(self, &turn);
    if (is_open && self->host != NULL && pc_channel_flush(&self->shm.channel)) {
        /* Others may wait for room in our rings, and we for them. */
        self->shm.source.ops->progress(&self->shm.source);
        is_done = !pc_channel_flush(&self->shm.channel);
    }
    if (is_open && self->has_tcp) {
        /* who must be dialed may have answered */
        self->tcp.source.ops->progress(&self->tcp.source);
        is_done &= pc_tcp_flush(&self->tcp.tcp);
    }
    pc_engine_give(self, &turn);
    return PyBool_FromLong(is_done);
}

/* Of a closed engine nobody takes events: requests that end with it are let go here. */
static void let_go_of_events(pc_engine_object *self) {
    for (struct pc_event *event; (event = self->first) != NULL;) {
        self->first = event->next;
        event->stands = false;
        PyObject *value = NULL;
        if (event->kind == PC_EVENT_STARTED) {
            pc_started_event_taken(event);
            value = pc_started_event(self, event);
        } else if (event->kind == PC_EVENT_COMPOSED) {
            value = pc_composed_event(event);
        } else if (event->kind == PC_EVENT_SEVERAL) {
            value = pc_several_event(event);
        }
        Py_XDECREF(value);
    }
    self->last = &self->first;
}

PyObject *pc_engine_close_py(pc_engine_object *self, PyObject *Py_UNUSED(unused)) {
    struct pc_turn turn;
    if (pc_engine_take(self, &turn)) {
        for (struct pc_context *each = self->engine.contexts; each != NULL; each = each->next)
            pc_context_break(each, PC_BROKEN);
        if (self->host != NULL)
            pc_link_shm_close(&self->shm);
        pc_engine_give(self, &turn);
    }
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

PyObject *pc_engine_forked_py(pc_engine_object *self, PyObject *Py_UNUSED(unused)) {
    pc_drive_forked(&self->drive);
    if (self->has_tcp)
        pc_tcp_close(&self->tcp.tcp);
    Py_RETURN_NONE;
}

void pc_engine_dealloc(pc_engine_object *self) {
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
    if (self->counted != NULL)
        munmap(self->counted, self->counted_nbytes);
    Py_XDECREF(self->dropped);
    Py_XDECREF(self->on_work);
    Py_XDECREF(self->on_orders);
    Py_XDECREF(self->on_stop);
    pc_free(self);
}
