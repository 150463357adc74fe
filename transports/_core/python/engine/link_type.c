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

static int piece_buffer(PyObject *self, Py_buffer *view, int flags) {
    pc_piece *piece = (pc_piece *)self;
    return PyBuffer_FillInfo(view, self, piece->start, piece->nbytes, !piece->is_writable, flags);
}

static void piece_dealloc(pc_piece *piece) {
    Py_XDECREF(piece->keeper);
    pc_free(piece);
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

/* Some memory, and the reference to what it belongs to, which is taken over. */
static PyObject *piece_of(void *start, size_t nbytes, bool is_writable, PyObject *keeper) {
    pc_piece *piece = pc_new(pc_piece_type);
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

/* With the lock: take one out. Its `scratch` is the object of scratch memory, made while nobody can
   give that back; or NULL. False: there is none. */
static bool take(pc_engine_object *self, struct pc_order *order, PyObject **scratch) {
    if (!pc_link_take(&self->queue, order))
        return false;
    struct pc_keeper *keeper = &order->keeper;
    enum pc_order_kind kind = order->kind;
    /* What is given up or released may have been given back already. */
    bool is_used = kind == PC_ORDER_SEND || kind == PC_ORDER_ACCEPT || kind == PC_ORDER_REDIRECT;
    if (is_used && keeper->object == NULL && keeper->scratch != NULL)
        keeper->object = *scratch = pc_scratch_object_of(keeper->scratch);
    return true;
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

PyObject *pc_link_next_order(pc_engine_object *self, PyObject *Py_UNUSED(unused)) {
    struct pc_order order;
    PyObject *scratch = NULL, *value = NULL;
    struct pc_turn turn;
    bool any = pc_engine_take(self, &turn) && take(self, &order, &scratch);
    pc_engine_give(self, &turn);
    if (!any) {
        pc_scratch_let_go_left(self);
        Py_RETURN_NONE;
    }
    if (order.kind == PC_ORDER_SEND) {
        value = send_order(&order);
    } else if (order.kind == PC_ORDER_ACCEPT || order.kind == PC_ORDER_REDIRECT) {
        PyObject *into = written_to(&order);
        if (into != NULL)
            value = Py_BuildValue("iKN", order.kind, (unsigned long long)order.id, into);
    } else {
        value = Py_BuildValue("iK", order.kind, (unsigned long long)order.id);
    }
    Py_XDECREF(scratch);
    return value;
}

/* --- what has happened ------------------------------------------------------------------------ */

PyObject *pc_link_tell_arrived(pc_engine_object *self, PyObject *args) {
    struct pc_incoming incoming = {0};
    struct pc_turn turn;
    uint64_t id = 0;
    int error = 0;
    Py_buffer header, payload = {.obj = NULL};
    PyObject *given;
    Py_ssize_t nbytes;
    int waits;
    if (!PyArg_ParseTuple(args, "iy*Onp", &incoming.peer, &header, &given, &nbytes, &waits))
        return NULL;
    if (given != Py_None && PyObject_GetBuffer(given, &payload, PyBUF_SIMPLE) < 0) {
        PyBuffer_Release(&header);
        return NULL;
    }
    incoming.header = header.buf;
    incoming.header_nbytes = (size_t)header.len;
    incoming.where = given != Py_None ? PC_KEPT : waits ? PC_WAITING : PC_COMING;
    incoming.payload = given != Py_None ? payload.buf : NULL;
    incoming.nbytes = (size_t)nbytes;
    if (pc_engine_take(self, &turn))
        error = pc_link_arrived(&self->queue, &incoming, &id);
    pc_engine_give(self, &turn);
    PyBuffer_Release(&header);
    if (given != Py_None)
        PyBuffer_Release(&payload); /* it stays where it is until it is released */
    if (error == 0)
        return PyLong_FromUnsignedLongLong(id);
    return PyLong_FromLong(error == -EPROTO ? -2 : -1);
}

enum { RECEIVED, WITHDRAWN, SENT, COMMITTED };

PyObject *pc_link_tell(pc_engine_object *self, PyObject *args) {
    unsigned long long id;
    int what, status = 0;
    if (!PyArg_ParseTuple(args, "Ki|i", &id, &what, &status))
        return NULL;
    struct pc_turn turn;
    if (pc_engine_take(self, &turn)) {
        if (what == RECEIVED)
            pc_link_received(&self->queue, id);
        else if (what == WITHDRAWN)
            pc_link_withdrawn(&self->queue, id);
        else if (what == SENT)
            pc_link_sent(&self->queue, id, status);
        else
            pc_link_committed(&self->queue, id);
        pc_engine_give(self, &turn);
    }
    Py_RETURN_NONE;
}

PyObject *pc_link_tell_end(pc_engine_object *self, PyObject *args) {
    int peer;
    const char *why; /* NULL: it has finished */
    struct pc_turn turn;
    if (!PyArg_ParseTuple(args, "iz", &peer, &why))
        return NULL;
    if (peer < 0 || peer >= self->engine.size) {
        PyErr_SetString(PyExc_ValueError, "there is no such rank");
        return NULL;
    }
    if (pc_engine_take(self, &turn)) {
        if (why == NULL)
            self->engine.finished(&self->engine, peer);
        else
            self->engine.lost(&self->engine, peer, why);
        pc_engine_give(self, &turn);
    }
    Py_RETURN_NONE;
}

PyObject *pc_link_tell_lag(pc_engine_object *self, PyObject *value) {
    bool lags = value == Py_True;
    struct pc_turn turn;
    if (lags != self->lags && pc_engine_take(self, &turn)) {
        self->lags = lags;
        pc_engine_give(self, &turn); /* which sees that */
    }
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

void pc_link_settle(pc_engine_object *self) {
    struct pc_turn turn;
    if (!self->has_queue || !pc_engine_take(self, &turn))
        return;
    bool is_unsettled = pc_link_is_unsettled(&self->queue);
    pc_engine_give(self, &turn);
    if (is_unsettled)
        pc_link_do_orders(self);
}

void pc_link_before_stop(pc_engine_object *self, const struct pc_send *send) {
    struct pc_turn turn;
    if (!self->has_queue || !pc_engine_take(self, &turn))
        return;
    unsigned long long id = pc_link_id_of_send(&self->queue, send);
    pc_engine_give(self, &turn);
    if (id == 0 || self->on_stop == NULL)
        return;
    PyObject *result = PyObject_CallFunction(self->on_stop, "K", id);
    if (result == NULL)
        PyErr_WriteUnraisable(self->on_stop);
    Py_XDECREF(result);
}

int pc_link_open(pc_engine_object *self, PyObject *ranks) {
    pc_link_queue(&self->queue, &self->engine);
    self->queue.posted = posted;
    self->queue.owner = self;
    Py_ssize_t count = PySequence_Size(ranks);
    int *queued = count >= 0 ? malloc((size_t)(count + 1) * sizeof *queued) : NULL;
    if (queued == NULL)
        return count < 0 ? -1 : ENOMEM;
    bool is_read = pc_read_ranks(ranks, count, 0, self->engine.size - 1, queued);
    for (Py_ssize_t index = 0; is_read && index < count; index++) {
        self->links[queued[index]] = &self->queue.link;
        self->has_queue = true;
    }
    free(queued);
    return is_read ? 0 : -1;
}
