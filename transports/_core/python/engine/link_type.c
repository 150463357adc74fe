/* Transports in Python as links of the engine: methods of `_core.MessageEngine`. See
   engine/link_queue.h, transports/link.py. */
#include "engine_type.h"

#include <errno.h>
#include <stdlib.h>
#include <structmember.h>

/* --- memory of a message ---------------------------------------------------------------------- */

/* What a payload lies in, or goes to, and what that belongs to: a transport may look at it after
   the send or the receive was given up. */
typedef struct {
    PyObject_HEAD
    void *start;
    Py_ssize_t nbytes;
    bool is_writable;
    PyObject *keeper;
} pc_piece;

static PyTypeObject *piece_type;

static int piece_buffer(PyObject *self, Py_buffer *view, int flags) {
    pc_piece *piece = (pc_piece *)self;
    return PyBuffer_FillInfo(view, self, piece->start, piece->nbytes, !piece->is_writable, flags);
}

static void piece_dealloc(pc_piece *piece) {
    PyTypeObject *type = Py_TYPE((PyObject *)piece);
    Py_XDECREF(piece->keeper);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(piece);
    Py_DECREF(type);
}

static PyMemberDef piece_members[] = {
    {"keeper", T_OBJECT_EX, offsetof(pc_piece, keeper), READONLY, "what it belongs to"},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot piece_slots[] = {
    {Py_bf_getbuffer, piece_buffer},
    {Py_tp_members, piece_members},
    {Py_tp_dealloc, piece_dealloc},
    {Py_tp_doc, "Memory that a message is sent from, or comes to."},
    {0, NULL},
};

PyType_Spec pc_piece_spec = {
    .name = "pycoll._transports._core.Piece",
    .basicsize = sizeof(pc_piece),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = piece_slots,
};

void pc_piece_type(PyTypeObject *type) { piece_type = type; }

/* Some memory, and the reference to what it belongs to, which is taken over. */
static PyObject *piece_of(void *start, size_t nbytes, bool is_writable, PyObject *keeper) {
    pc_piece *piece =
        (pc_piece *)((allocfunc)PyType_GetSlot(piece_type, Py_tp_alloc))(piece_type, 0);
    if (piece == NULL) {
        Py_DECREF(keeper);
        return NULL;
    }
    piece->start = start;
    piece->nbytes = (Py_ssize_t)nbytes;
    piece->is_writable = is_writable;
    piece->keeper = keeper;
    return (PyObject *)piece;
}

/* Something with the bytes of a send; without a keeper it is a copy. */
static PyObject *sent_from(const struct iovec *part, const struct pc_keeper *of) {
    PyObject *keeper = Py_XNewRef((PyObject *)of->object);
    if (keeper == NULL)
        return PyBytes_FromStringAndSize(part->iov_base, (Py_ssize_t)part->iov_len);
    return piece_of(part->iov_base, part->iov_len, false, keeper);
}

/* Something to write to; without a keeper it stays only as long as the receive. */
static PyObject *written_to(const struct pc_order *order) {
    static char nothing[1];
    void *into = order->nbytes > 0 ? order->into : nothing;
    PyObject *keeper = Py_XNewRef((PyObject *)order->keeper.object);
    if (keeper == NULL)
        return PyMemoryView_FromMemory(into, (Py_ssize_t)order->nbytes, PyBUF_WRITE);
    return piece_of(into, order->nbytes, true, keeper);
}

/* --- orders ----------------------------------------------------------------------------------- */

struct taking {
    struct pc_order order;
    bool any;
    /* the object of scratch memory, made while nobody can give that back; or NULL */
    PyObject *scratch;
};

static void take(pc_engine_object *self, void *argument) {
    struct taking *taking = argument;
    taking->any = pc_link_take(&self->queue, &taking->order);
    struct pc_keeper *keeper = &taking->order.keeper;
    enum pc_order_kind kind = taking->order.kind;
    /* What is given up or released may have been given back already. */
    bool is_used = kind == PC_ORDER_SEND || kind == PC_ORDER_ACCEPT || kind == PC_ORDER_REDIRECT;
    if (taking->any && is_used && keeper->object == NULL && keeper->scratch != NULL)
        keeper->object = taking->scratch = pc_scratch_object_of(keeper->scratch);
}

static PyObject *send_order(struct pc_order *order) {
    PyObject *parts = PyList_New((Py_ssize_t)order->num_parts);
    for (size_t part = 0; parts != NULL && part < order->num_parts; part++) {
        PyObject *view = sent_from(&order->parts[part], &order->keeper);
        if (view == NULL)
            Py_CLEAR(parts);
        else
            PyList_SetItem(parts, (Py_ssize_t)part, view);
    }
    PyObject *value = NULL;
    if (parts != NULL)
        value = Py_BuildValue("iKiiy#N", order->kind, (unsigned long long)order->id, order->peer,
                             (int)order->way, (char *)order->header,
                             (Py_ssize_t)order->header_nbytes, parts);
    free(order->header);
    free(order->parts);
    return value;
}

PyObject *pc_link_next_order(pc_engine_object *self, PyObject *unused) {
    (void)unused;
    struct taking taking = {.any = false, .scratch = NULL};
    bool is_open = pc_engine_do(self, take, &taking);
    if (is_open && !taking.any)
        pc_scratch_let_go_left(self);
    if (!is_open || !taking.any)
        Py_RETURN_NONE;
    struct pc_order *order = &taking.order;
    PyObject *value = NULL;
    if (order->kind == PC_ORDER_SEND) {
        value = send_order(order);
    } else if (order->kind == PC_ORDER_ACCEPT || order->kind == PC_ORDER_REDIRECT) {
        PyObject *into = written_to(order);
        if (into != NULL)
            value = Py_BuildValue("iKN", order->kind, (unsigned long long)order->id, into);
    } else {
        value = Py_BuildValue("iK", order->kind, (unsigned long long)order->id);
    }
    Py_XDECREF(taking.scratch);
    return value;
}

/* --- what has happened ------------------------------------------------------------------------ */

struct coming {
    struct pc_incoming incoming;
    uint64_t id;
    int error;
};

static void arrive(pc_engine_object *self, void *argument) {
    struct coming *coming = argument;
    coming->error = pc_link_arrived(&self->queue, &coming->incoming, &coming->id);
}

PyObject *pc_link_tell_arrived(pc_engine_object *self, PyObject *args) {
    struct coming coming = {.error = 0};
    Py_buffer header, payload = {.obj = NULL};
    PyObject *given;
    Py_ssize_t nbytes;
    int waits;
    if (!PyArg_ParseTuple(args, "iy*Onp", &coming.incoming.peer, &header, &given, &nbytes, &waits))
        return NULL;
    if (given != Py_None && PyObject_GetBuffer(given, &payload, PyBUF_SIMPLE) < 0) {
        PyBuffer_Release(&header);
        return NULL;
    }
    coming.incoming.header = header.buf;
    coming.incoming.header_nbytes = (size_t)header.len;
    coming.incoming.where = given != Py_None ? PC_KEPT : waits ? PC_WAITING : PC_COMING;
    coming.incoming.payload = given != Py_None ? payload.buf : NULL;
    coming.incoming.nbytes = (size_t)nbytes;
    bool done = pc_engine_do(self, arrive, &coming);
    PyBuffer_Release(&header);
    if (given != Py_None)
        PyBuffer_Release(&payload); /* it stays where it is until it is released */
    if (!done)
        return PyLong_FromLong(0);
    if (coming.error == 0)
        return PyLong_FromUnsignedLongLong(coming.id);
    return PyLong_FromLong(coming.error == -EPROTO ? -2 : -1);
}

enum what { RECEIVED, WITHDRAWN, SENT, COMMITTED };

struct telling {
    uint64_t id;
    enum what what;
    int status;
};

static void tell(pc_engine_object *self, void *argument) {
    const struct telling *telling = argument;
    switch (telling->what) {
    case RECEIVED:
        pc_link_received(&self->queue, telling->id);
        break;
    case WITHDRAWN:
        pc_link_withdrawn(&self->queue, telling->id);
        break;
    case SENT:
        pc_link_sent(&self->queue, telling->id, telling->status);
        break;
    case COMMITTED:
        pc_link_committed(&self->queue, telling->id);
    }
}

PyObject *pc_link_tell(pc_engine_object *self, PyObject *args) {
    unsigned long long id;
    int what, status = 0;
    if (!PyArg_ParseTuple(args, "Ki|i", &id, &what, &status))
        return NULL;
    struct telling telling = {id, (enum what)what, status};
    pc_engine_do(self, tell, &telling);
    Py_RETURN_NONE;
}

struct ending {
    int peer;
    const char *why; /* NULL: it has finished */
};

static void peer_ends(pc_engine_object *self, void *argument) {
    const struct ending *ending = argument;
    if (ending->why == NULL)
        self->engine.finished(&self->engine, ending->peer);
    else
        self->engine.lost(&self->engine, ending->peer, ending->why);
}

PyObject *pc_link_tell_end(pc_engine_object *self, PyObject *args) {
    struct ending ending;
    if (!PyArg_ParseTuple(args, "iz", &ending.peer, &ending.why))
        return NULL;
    if (ending.peer < 0 || ending.peer >= self->engine.size) {
        PyErr_SetString(PyExc_ValueError, "there is no such rank");
        return NULL;
    }
    pc_engine_do(self, peer_ends, &ending);
    Py_RETURN_NONE;
}

static void set_lag(pc_engine_object *self, void *argument) { self->lags = *(bool *)argument; }

PyObject *pc_link_tell_lag(pc_engine_object *self, PyObject *value) {
    bool lags = value == Py_True;
    if (lags != self->lags)
        pc_engine_do(self, set_lag, &lags);
    Py_RETURN_NONE;
}

static void post_work(pc_engine_object *self, void *argument) {
    (void)argument;
    pc_drive_post_work(&self->drive);
}

PyObject *pc_link_tell_more(pc_engine_object *self, PyObject *unused) {
    (void)unused;
    pc_engine_do(self, post_work, NULL);
    Py_RETURN_NONE;
}

/* --- around what the engine does -------------------------------------------------------------- */

/* With the lock. If it is the engine's caller who has asked for it, he sees to it when he gives the
   lock back. */
static void posted(void *owner) {
    pc_engine_object *self = owner;
    if (!self->is_called)
        pc_drive_post_work(&self->drive);
}

void pc_link_do_orders(pc_engine_object *self) {
    PyObject *type, *value, *trace;
    if (self->on_orders == NULL)
        return;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *result = PyObject_CallNoArgs(self->on_orders);
    if (result == NULL)
        PyErr_WriteUnraisable(self->on_orders);
    Py_XDECREF(result);
    PyErr_Restore(type, value, trace);
}

static void find_unsettled(pc_engine_object *self, void *argument) {
    *(bool *)argument = pc_link_is_unsettled(&self->queue);
}

void pc_link_settle(pc_engine_object *self) {
    bool is_unsettled = false;
    if (self->has_queue && pc_engine_do(self, find_unsettled, &is_unsettled) && is_unsettled)
        pc_link_do_orders(self);
}

struct asking {
    const struct pc_send *send;
    uint64_t id;
};

static void find_id(pc_engine_object *self, void *argument) {
    struct asking *asking = argument;
    asking->id = pc_link_id_of_send(&self->queue, asking->send);
}

void pc_link_before_stop(pc_engine_object *self, const struct pc_send *send) {
    struct asking asking = {.send = send};
    if (!self->has_queue || !pc_engine_do(self, find_id, &asking) || asking.id == 0 ||
        self->on_stop == NULL)
        return;
    PyObject *result = PyObject_CallFunction(self->on_stop, "K", (unsigned long long)asking.id);
    if (result == NULL)
        PyErr_WriteUnraisable(self->on_stop);
    Py_XDECREF(result);
}

int pc_link_open(pc_engine_object *self, PyObject *ranks) {
    pc_link_queue(&self->queue, &self->engine);
    self->queue.posted = posted;
    self->queue.owner = self;
    Py_ssize_t count = PySequence_Size(ranks);
    for (Py_ssize_t index = 0; index < count; index++) {
        PyObject *number = PySequence_GetItem(ranks, index);
        long rank = number != NULL ? PyLong_AsLong(number) : -1;
        Py_XDECREF(number);
        if (!PyErr_Occurred() && (rank < 0 || rank >= self->engine.size))
            PyErr_SetString(PyExc_ValueError, "there is no such rank");
        if (PyErr_Occurred())
            return -1;
        self->links[rank] = &self->queue.link;
        self->has_queue = true;
    }
    return count < 0 ? -1 : 0;
}
