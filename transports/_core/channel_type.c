/* Channels as Python sees them: `_core.Channel`. */
#include "channel_type.h"

#include "host_type.h"
#include "views.h"

#include <errno.h>
#include <stdlib.h>

/* --- the interpreter's lock -------------------------------------------------------------------------- */

static void leave(void *owner) {
    pc_channel_object *self = owner;
    self->away = true;
    pthread_mutex_lock(&self->lock);
    self->state = PyEval_SaveThread();
}

static void enter(void *owner) {
    pc_channel_object *self = owner;
    PyEval_RestoreThread(self->state);
    self->away = false;
    pthread_mutex_unlock(&self->lock);
}

static PC_COLD void await_return(pc_channel_object *self) {
    while (self->away) {
        atomic_fetch_add(&self->wanted, 1);
        PyThreadState *state = PyEval_SaveThread();
        pthread_mutex_lock(&self->lock);
        pthread_mutex_unlock(&self->lock);
        PyEval_RestoreThread(state);
        atomic_fetch_sub(&self->wanted, 1);
    }
}

/* The channel, when whoever gave up the interpreter's lock in the middle of something is back. */
static inline pc_channel *come(pc_channel_object *self) {
    if (PC_UNLIKELY(self->away))
        await_return(self);
    return &self->channel;
}

/* --- what happens ------------------------------------------------------------------------------------ */

enum event {
    EAGER,     /* peer, header, payload: bytes */
    BLOCK,     /* peer, header, first byte in the heaps, nbytes, unit, number */
    READY,     /* peer, header, nbytes, id, address, num_parts, transfer */
    SENT,      /* id */
    CANCEL,    /* peer, id */
    RECEIVED,  /* handle */
    WITHDRAWN, /* handle */
    BYE,       /* peer */
    LOST,      /* peer */
};

/* Takes the reference. */
static void add(pc_channel_object *self, PyObject *event) {
    if (event == NULL || (self->events == NULL && (self->events = PyList_New(0)) == NULL) ||
        PyList_Append(self->events, event) < 0) {
        self->failed = true;
        PyErr_Clear();
    }
    Py_XDECREF(event);
}

static void arrived(void *owner, int peer, const void *header, size_t header_nbytes, const void *payload,
                    size_t nbytes) {
    add(owner, Py_BuildValue("iiy#y#", EAGER, peer, header, (Py_ssize_t)header_nbytes, payload, (Py_ssize_t)nbytes));
}
static void arrived_in_block(void *owner, int peer, const void *header, size_t header_nbytes,
                             const unsigned char *payload, size_t nbytes, const struct pc_block *block) {
    pc_host *host = ((pc_channel_object *)owner)->channel.host;
    add(owner, Py_BuildValue("iiy#nnIK", BLOCK, peer, header, (Py_ssize_t)header_nbytes,
                             (Py_ssize_t)(payload - (host->base + host->heaps_offset)), (Py_ssize_t)nbytes,
                             (unsigned)block->unit, (unsigned long long)block->number));
}
static void offered(void *owner, int peer, const void *header, size_t header_nbytes, const struct pc_offer *offer) {
    add(owner, Py_BuildValue("iiy#nKKIi", READY, peer, header, (Py_ssize_t)header_nbytes, (Py_ssize_t)offer->nbytes,
                             (unsigned long long)offer->id, (unsigned long long)offer->address,
                             (unsigned)offer->num_parts, (int)offer->transfer));
}
static void sent(void *owner, uint64_t id) { add(owner, Py_BuildValue("iK", SENT, (unsigned long long)id)); }
static void cancelled(void *owner, int peer, uint64_t id) {
    add(owner, Py_BuildValue("iiK", CANCEL, peer, (unsigned long long)id));
}
static void received(void *owner, uint64_t handle) {
    add(owner, Py_BuildValue("iK", RECEIVED, (unsigned long long)handle));
}
static void withdrawn(void *owner, uint64_t handle) {
    add(owner, Py_BuildValue("iK", WITHDRAWN, (unsigned long long)handle));
}
static void bye(void *owner, int peer) { add(owner, Py_BuildValue("ii", BYE, peer)); }
static void lost(void *owner, int peer) { add(owner, Py_BuildValue("ii", LOST, peer)); }

static void release(void *owner, void *memory) {
    (void)owner;
    pc_views_release(memory);
}

static const struct pc_channel_up up = {arrived,   arrived_in_block, offered, sent,    cancelled, received,
                                        withdrawn, bye,              lost,    release, leave,     enter};

/* --- life -------------------------------------------------------------------------------------------- */

static int check_rank(pc_channel *channel, int rank) {
    if (rank >= 0 && rank < channel->size && rank != channel->rank)
        return 0;
    PyErr_SetString(PyExc_ValueError, "there is no such other rank on this host");
    return -1;
}

static PyObject *channel_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"host", "eager_limit", "credit", "message_cost", "single_copy", NULL};
    PyObject *host;
    Py_ssize_t eager_limit, credit, message_cost;
    int single_copy;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Onnnp", names, &host, &eager_limit, &credit, &message_cost,
                                     &single_copy))
        return NULL;
    pc_host *memory = pc_host_of(host);
    if (memory == NULL)
        return NULL;
    pc_channel_object *self = (pc_channel_object *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self == NULL)
        return NULL;
    pthread_mutex_init(&self->lock, NULL);
    self->host = Py_NewRef(host);
    pc_channel *channel = &self->channel;
    channel->host = memory;
    channel->up = &up;
    channel->owner = self;
    channel->eager_limit = (size_t)eager_limit;
    channel->credit = (uint64_t)credit;
    channel->message_cost = (uint64_t)message_cost;
    channel->single_copy = single_copy != 0;
    int error = pc_channel_open(channel);
    if (error != 0) {
        Py_DECREF(self);
        errno = error;
        if (error == E2BIG)
            PyErr_SetString(PyExc_OSError, "too many ranks on one host for shared memory");
        else
            PyErr_SetFromErrno(PyExc_OSError);
        return NULL;
    }
    return (PyObject *)self;
}

static void channel_dealloc(pc_channel_object *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    pc_channel_free(&self->channel);
    pthread_mutex_destroy(&self->lock);
    Py_XDECREF(self->events);
    Py_XDECREF(self->host);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

/* The heaps of all ranks, to look at the payloads there. */
static int channel_getbuffer(PyObject *self, Py_buffer *view, int flags) {
    pc_host *host = ((pc_channel_object *)self)->channel.host;
    return PyBuffer_FillInfo(view, self, host->base + host->heaps_offset,
                             (Py_ssize_t)((size_t)host->size * host->heap_nbytes), 1, flags);
}

/* --- sending ----------------------------------------------------------------------------------------- */

/* A send of the parts that are not empty, which owns their views; NULL with an exception. */
static struct pc_channel_send *send_of(PyObject *parts) {
    struct pc_views *views = pc_view_parts(parts);
    if (views == NULL)
        return NULL;
    struct pc_channel_send *send = calloc(1, sizeof *send);
    struct iovec *table = send != NULL ? &send->one : NULL;
    if (send != NULL && views->count > 1)
        table = send->table = malloc((size_t)views->count * sizeof *table);
    if (table == NULL) {
        free(send);
        pc_views_release(views);
        return (struct pc_channel_send *)PyErr_NoMemory();
    }
    send->owner = views;
    send->nbytes = views->nbytes;
    send->parts.parts = table;
    for (Py_ssize_t index = 0; index < views->count; index++) {
        Py_buffer *view = &views->views[index];
        if (view->len > 0)
            table[send->parts.num_parts++] = (struct iovec){view->buf, (size_t)view->len};
    }
    return send;
}

static PyObject *start_send(pc_channel_object *self, PyObject *const *args, Py_ssize_t count, bool may_post) {
    pc_channel *channel = come(self);
    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "arguments are rank, header, parts");
        return NULL;
    }
    int rank = (int)PyLong_AsLong(args[0]);
    if ((rank == -1 && PyErr_Occurred()) || check_rank(channel, rank) < 0)
        return NULL;
    char *header;
    Py_ssize_t header_nbytes;
    if (PyBytes_AsStringAndSize(args[1], &header, &header_nbytes) < 0)
        return NULL;
    if (header_nbytes > (Py_ssize_t)PC_LONGEST_HEADER) {
        PyErr_SetString(PyExc_ValueError, "the header of a message is too long");
        return NULL;
    }
    struct pc_channel_send *send = send_of(args[2]);
    if (send == NULL)
        return NULL;
    if (may_post && pc_channel_post(channel, rank, header, (size_t)header_nbytes, send->parts, send->nbytes)) {
        pc_channel_send_free(channel, send);
        return PyLong_FromLong(0);
    }
    send->peer = rank;
    uint64_t id = pc_channel_offer(channel, send, header, (size_t)header_nbytes);
    return id != 0 ? PyLong_FromUnsignedLongLong(id) : PyErr_NoMemory();
}

static PyObject *channel_send(pc_channel_object *self, PyObject *const *args, Py_ssize_t count) {
    return start_send(self, args, count, true);
}

static PyObject *channel_offer(pc_channel_object *self, PyObject *const *args, Py_ssize_t count) {
    return start_send(self, args, count, false);
}

static struct pc_channel_send *find_send(pc_channel *channel, PyObject *number) {
    unsigned long long id = PyLong_AsUnsignedLongLong(number);
    return PyErr_Occurred() ? NULL : pc_table_get(&channel->sends, id);
}

static PyObject *channel_stop(pc_channel_object *self, PyObject *id) {
    pc_channel *channel = come(self);
    struct pc_channel_send *send = find_send(channel, id);
    if (PyErr_Occurred())
        return NULL;
    return PyBool_FromLong(send != NULL && pc_channel_send_stop(channel, send));
}

static PyObject *channel_holds(pc_channel_object *self, PyObject *id) {
    pc_channel *channel = come(self);
    struct pc_channel_send *send = find_send(channel, id);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(send != NULL);
}

static PyObject *channel_take_back(pc_channel_object *self, PyObject *id) {
    pc_channel *channel = come(self);
    struct pc_channel_send *send = find_send(channel, id);
    if (PyErr_Occurred())
        return NULL;
    if (send != NULL)
        pc_channel_send_give_up(channel, send);
    Py_RETURN_NONE;
}

/* --- receiving --------------------------------------------------------------------------------------- */

static PyObject *channel_accept(pc_channel_object *self, PyObject *args) {
    pc_channel *channel = come(self);
    int rank;
    Py_ssize_t nbytes;
    unsigned long long id, address;
    unsigned num_parts;
    int transfer;
    PyObject *into;
    if (!PyArg_ParseTuple(args, "inKKIiO", &rank, &nbytes, &id, &address, &num_parts, &transfer, &into) ||
        check_rank(channel, rank) < 0)
        return NULL;
    struct pc_views *views = pc_view_into(into, nbytes);
    if (views == NULL)
        return NULL;
    struct pc_channel_receive *receive = calloc(1, sizeof *receive);
    uint64_t handle = receive != NULL ? pc_channel_add_receive(channel, receive) : 0;
    if (handle == 0) {
        free(receive);
        pc_views_release(views);
        return PyErr_NoMemory();
    }
    receive->peer = rank;
    receive->into = views->views[0].buf;
    receive->owner = views;
    receive->handle = handle;
    struct pc_offer offer = {id, (uint64_t)nbytes, address, num_parts, transfer};
    int status = pc_channel_accept(channel, receive, &offer);
    if (status > 0)
        return PyLong_FromUnsignedLongLong(handle);
    pc_channel_receive_end(channel, receive);
    return status == -3 ? PyErr_NoMemory() : PyLong_FromLong(status);
}

static struct pc_channel_receive *find_receive(pc_channel *channel, PyObject *number) {
    unsigned long long handle = PyLong_AsUnsignedLongLong(number);
    return PyErr_Occurred() ? NULL : pc_table_get(&channel->receives, handle);
}

static PyObject *channel_give_up(pc_channel_object *self, PyObject *handle) {
    pc_channel *channel = come(self);
    struct pc_channel_receive *receive = find_receive(channel, handle);
    if (PyErr_Occurred())
        return NULL;
    if (receive != NULL)
        pc_channel_receive_give_up(channel, receive);
    Py_RETURN_NONE;
}

static PyObject *channel_redirect(pc_channel_object *self, PyObject *args) {
    pc_channel *channel = come(self);
    PyObject *handle, *into;
    if (!PyArg_ParseTuple(args, "OO", &handle, &into))
        return NULL;
    struct pc_channel_receive *receive = find_receive(channel, handle);
    if (receive == NULL) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "there is no such receive");
        return NULL;
    }
    struct pc_views *views = pc_view_into(into, (Py_ssize_t)receive->nbytes);
    if (views == NULL)
        return NULL;
    if (pc_channel_receive_redirect(channel, receive, views->views[0].buf, views) < 0)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *channel_drop(pc_channel_object *self, PyObject *args) {
    pc_channel *channel = come(self);
    int rank;
    unsigned long long id;
    if (!PyArg_ParseTuple(args, "iK", &rank, &id) || check_rank(channel, rank) < 0)
        return NULL;
    return pc_channel_tell(channel, rank, PC_FINISHED, id) < 0 ? PyErr_NoMemory() : Py_NewRef(Py_None);
}

static PyObject *channel_use(pc_channel_object *self, PyObject *args) {
    pc_channel *channel = come(self);
    int rank;
    Py_ssize_t nbytes;
    struct pc_block block = {0};
    unsigned long long number = 0;
    if (!PyArg_ParseTuple(args, "in|IK", &rank, &nbytes, &block.unit, &number) || check_rank(channel, rank) < 0)
        return NULL;
    block.number = number;
    if (number != 0 && pc_block_valid(&block, 0))
        pc_channel_consume(channel, rank, (size_t)nbytes, &block);
    else
        pc_channel_use(channel, rank, (size_t)nbytes);
    Py_RETURN_NONE;
}

/* --- both -------------------------------------------------------------------------------------------- */

static PyObject *channel_progress(pc_channel_object *self, PyObject *unused) {
    (void)unused;
    pc_channel *channel = come(self);
    int worked = pc_channel_progress(channel);
    if (worked < 0 || self->failed) {
        self->failed = false;
        return PyErr_NoMemory(); /* the next call has the events that could be made */
    }
    PyObject *events = self->events;
    self->events = NULL;
    if (events != NULL)
        return events;
    return worked ? PyList_New(0) : Py_NewRef(Py_None);
}

static PyObject *channel_ready(pc_channel_object *self, PyObject *unused) {
    (void)unused;
    pc_channel *channel = come(self);
    return PyBool_FromLong(pc_channel_ready(channel));
}

static PyObject *channel_flush(pc_channel_object *self, PyObject *unused) {
    (void)unused;
    pc_channel *channel = come(self);
    return PyBool_FromLong(pc_channel_flush(channel));
}

static PyObject *channel_forget(pc_channel_object *self, PyObject *number) {
    pc_channel *channel = come(self);
    int rank = (int)PyLong_AsLong(number);
    if ((rank == -1 && PyErr_Occurred()) || check_rank(channel, rank) < 0)
        return NULL;
    pc_channel_forget(channel, rank);
    Py_RETURN_NONE;
}

static PyObject *channel_links(pc_channel_object *self, PyObject *unused) {
    (void)unused;
    pc_channel *channel = &self->channel;
    PyObject *links = PyList_New(0);
    for (int rank = 0; links != NULL && rank < channel->size; rank++) {
        if (!channel->peers[rank].linked && channel->peers[rank].first == NULL)
            continue;
        PyObject *number = PyLong_FromLong(rank);
        if (number == NULL || PyList_Append(links, number) < 0)
            Py_CLEAR(links);
        Py_XDECREF(number);
    }
    return links;
}

static PyObject *channel_say_goodbye(pc_channel_object *self, PyObject *unused) {
    (void)unused;
    pc_channel *channel = come(self);
    for (int rank = 0; rank < channel->size; rank++)
        if ((channel->peers[rank].linked || channel->peers[rank].first != NULL) &&
            pc_channel_tell(channel, rank, PC_BYE, 0) < 0)
            return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *channel_close(pc_channel_object *self, PyObject *unused) {
    (void)unused;
    pc_channel *channel = come(self);
    pc_channel_close(channel);
    Py_RETURN_NONE;
}

static PyMethodDef channel_methods[] = {
    {"send", (PyCFunction)(void (*)(void))channel_send, METH_FASTCALL,
     "send(rank, header, parts) -> int: 0 if the message was posted, else the id of an offer."},
    {"offer", (PyCFunction)(void (*)(void))channel_offer, METH_FASTCALL,
     "offer(rank, header, parts) -> int: its id; it is done when the receiver has it, however short it is."},
    {"stop", (PyCFunction)channel_stop, METH_O, "stop(id) -> bool: an offer goes no further; False: it is too late."},
    {"holds", (PyCFunction)channel_holds, METH_O, "holds(id) -> bool: an offer is under way."},
    {"take_back", (PyCFunction)channel_take_back, METH_O, "take_back(id): give up an offer."},
    {"accept", (PyCFunction)channel_accept, METH_VARARGS,
     "accept(rank, nbytes, id, address, num_parts, transfer, into) -> int: a handle; 0: done; -1: the message was "
     "taken back; -2: its sender has left."},
    {"give_up", (PyCFunction)channel_give_up, METH_O, "give_up(handle): end a receive."},
    {"redirect", (PyCFunction)channel_redirect, METH_VARARGS, "redirect(handle, into): let a receive go on elsewhere."},
    {"drop", (PyCFunction)channel_drop, METH_VARARGS, "drop(rank, id): nobody wants this offer."},
    {"use", (PyCFunction)channel_use, METH_VARARGS,
     "use(rank, nbytes, unit=0, number=0): a payload was used, and its block is free."},
    {"progress", (PyCFunction)channel_progress, METH_NOARGS, "Do what can be done; a list of events, None: nothing."},
    {"ready", (PyCFunction)channel_ready, METH_NOARGS, "Whether progress would find something."},
    {"flush", (PyCFunction)channel_flush, METH_NOARGS, "Send what waits for room; True: some of it still waits."},
    {"forget", (PyCFunction)channel_forget, METH_O, "forget(rank): it has ended; its transfers are gone."},
    {"links", (PyCFunction)channel_links, METH_NOARGS, "The ranks to which something was sent."},
    {"say_goodbye", (PyCFunction)channel_say_goodbye, METH_NOARGS, "Tell all links that nothing more will come."},
    {"close", (PyCFunction)channel_close, METH_NOARGS, "End all transfers."},
    {NULL, NULL, 0, NULL},
};

bool pc_is_channel(PyObject *object) {
    return PyType_GetSlot(Py_TYPE(object), Py_tp_dealloc) == (void *)channel_dealloc;
}

static PyType_Slot channel_slots[] = {
    {Py_tp_new, channel_new},
    {Py_tp_dealloc, channel_dealloc},
    {Py_tp_methods, channel_methods},
    {Py_bf_getbuffer, channel_getbuffer},
    {Py_tp_doc, "The messages between this rank and the others of its host."},
    {0, NULL},
};

PyType_Spec pc_channel_spec = {
    .name = "pycoll.transports._core.Channel",
    .basicsize = sizeof(pc_channel_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = channel_slots,
};
