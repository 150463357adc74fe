/* `_core.Send` and `_core.Receive`: messages that Python sends and receives, one at a time. See engine_type.h.

   An item is what the engine knows; its face is the Python object. What becomes of an item is put into the queue of
   events, unless the call that does it returns it. The face must be kept while the item is under way: with it the item
   is given up. */
#include "engine_type.h"
#include "copy.h"

#include <errno.h>
#include <stdlib.h>
#include <structmember.h>

typedef struct {
    PyObject_HEAD
    pc_engine_object *engine;
    struct pc_py_item *item;
} pc_face;

static PyTypeObject *send_type, *receive_type;

static struct pc_py_item *item_of_receive(struct pc_receive *receive) {
    return (struct pc_py_item *)((char *)receive - offsetof(struct pc_py_item, receive));
}

/* --- what the engine tells --------------------------------------------------------------------------- */

static void tell(pc_engine_object *self, struct pc_py_item *item, enum pc_event_kind kind) {
    if (item->is_quiet || item->is_orphan)
        return;
    item->event.kind = kind;
    pc_engine_post(self, &item->event);
}

/* Copy what Python shall know of a message. Without memory it is as if it had no header. */
static void know(struct pc_py_item *item, const struct pc_receive *receive) {
    const struct pc_message *message = receive->message;
    item->peer = message->match.queued.source;
    item->order = message->match.queued.number;
    item->nbytes = message->nbytes;
    item->sender_waits = message->sender_waits;
    item->header = malloc(message->header_nbytes);
    if (item->header == NULL)
        return;
    memcpy(item->header, message->header, message->header_nbytes);
    item->header_nbytes = message->header_nbytes;
}

static void receive_told(struct pc_receive *receive);

/* The sender has taken back the message of a receive: it, or another one for it, waits again in its place. Whether it
   is the same: then Python, which has not heard of the message, need not hear of it. */
static bool wait_again(pc_engine_object *self, struct pc_py_item *item) {
    if (!item->is_known) {
        free(item->header);
        item->header = NULL;
        item->receive.status = 0;
        pc_receive_start_at(item->context, &item->receive, item->receive.posted.queued.number);
        return true;
    }
    struct pc_py_item *successor = item->for_handle || item->is_orphan ? NULL : calloc(1, sizeof *successor);
    if (successor == NULL)
        return false;
    successor->event.kind = PC_EVENT_HELD;
    successor->is_quiet = true;
    successor->context = item->context;
    memcpy(successor->expects, item->expects, sizeof item->expects);
    successor->receive = (struct pc_receive){.ask = true,
                                             .room = item->receive.room,
                                             .expects_nbytes = item->receive.expects_nbytes,
                                             .told = receive_told,
                                             .owner = self};
    successor->receive.posted.queued.source = item->receive.posted.queued.source;
    successor->receive.posted.queued.tag = item->receive.posted.queued.tag;
    if (item->receive.expects != NULL)
        successor->receive.expects = successor->expects;
    item->successor = successor;
    item->next_preceding = self->preceding;
    self->preceding = item;
    pc_receive_start_at(item->context, &successor->receive, item->receive.posted.queued.number);
    return false;
}

static void receive_told(struct pc_receive *receive) {
    struct pc_py_item *item = item_of_receive(receive);
    pc_engine_object *self = item->receive.owner;
    if (receive->state == PC_RECEIVE_ENDED && receive->status == PC_TAKEN_BACK && item->context != NULL &&
        wait_again(self, item))
        return;
    if (receive->state == PC_RECEIVE_HELD) {
        if (item->header == NULL)
            know(item, receive);
        tell(self, item, item->event.kind == PC_EVENT_ARRIVED ? PC_EVENT_ARRIVED : PC_EVENT_HELD);
        return;
    }
    item->status = receive->status;
    if (receive->header != NULL) { /* of a probe, or of a message that was refused */
        item->peer = receive->source;
        item->nbytes = receive->nbytes;
        item->header = receive->header;
        item->header_nbytes = receive->header_nbytes;
        receive->header = NULL;
    }
    /* That its message has come was not told yet: then nobody needs to hear of it. */
    tell(self, item, PC_EVENT_ENDED);
}

struct pc_receive *pc_item_other(struct pc_engine *engine, const struct pc_message *message) {
    (void)message;
    struct pc_py_item *item = calloc(1, sizeof *item);
    if (item == NULL)
        return NULL;
    item->event.kind = PC_EVENT_ARRIVED;
    item->receive.ask = true;
    item->receive.told = receive_told;
    item->receive.owner = engine->owner;
    return &item->receive;
}

static void send_ended(struct pc_send *send) {
    struct pc_py_item *item = (struct pc_py_item *)((char *)send - offsetof(struct pc_py_item, send));
    item->status = send->status;
    tell(send->owner, item, PC_EVENT_ENDED);
}

static void free_item(struct pc_py_item *item) {
    free(item->header);
    free(item->receive.header);
    free(item->parts);
    free(item);
}

struct pc_py_item *pc_item_adopt(pc_engine_object *self, const struct pc_context *context, uint64_t number) {
    for (struct pc_py_item **at = &self->preceding; *at != NULL; at = &(*at)->next_preceding) {
        struct pc_py_item *successor = (*at)->successor;
        if (successor->context != context || successor->receive.posted.queued.number != number)
            continue;
        (*at)->successor = NULL;
        *at = (*at)->next_preceding;
        return successor;
    }
    return NULL;
}

/* Nobody will post this receive again. */
static void drop_successor(pc_engine_object *self, struct pc_py_item *item) {
    struct pc_py_item *successor = item->successor, **at = &self->preceding;
    if (successor == NULL)
        return;
    while (*at != item)
        at = &(*at)->next_preceding;
    *at = item->next_preceding;
    item->successor = NULL;
    (void)pc_receive_give_up(&successor->receive);
    free_item(successor);
}

bool pc_item_taken(struct pc_py_item *item) {
    if (item->is_orphan) {
        free_item(item); /* its views went with the face */
        return false;
    }
    /* An arrival that was taken back before Python heard of it: nobody ever will. */
    if (item->face == NULL && item->event.kind == PC_EVENT_ENDED) {
        free_item(item);
        return false;
    }
    const struct pc_message *message = item->receive.state == PC_RECEIVE_HELD ? item->receive.message : NULL;
    item->is_known = message != NULL;
    item->payload = message != NULL && message->state == PC_MESSAGE_HERE ? message->payload : NULL;
    if (message != NULL)
        item->sender_waits = message->sender_waits;
    return true;
}

/* --- faces ------------------------------------------------------------------------------------------- */

void pc_item_swap(PyObject *face, struct pc_py_item *item) {
    free_item(((pc_face *)face)->item);
    ((pc_face *)face)->item = item;
    item->face = face;
}

static PyObject *make_face(PyTypeObject *type, pc_engine_object *engine, struct pc_py_item *item) {
    pc_face *face = (pc_face *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (face == NULL)
        return NULL;
    face->engine = (pc_engine_object *)Py_NewRef((PyObject *)engine);
    face->item = item;
    item->face = (PyObject *)face;
    return (PyObject *)face;
}

/* NULL with an exception. */
static PyObject *event_of(pc_engine_object *self, struct pc_py_item *item, enum pc_event_kind kind, int status) {
    PyObject *face = item->face != NULL ? Py_NewRef(item->face) : make_face(receive_type, self, item);
    if (face == NULL)
        return NULL;
    if (kind != PC_EVENT_ENDED)
        return Py_BuildValue("iN", kind, face);
    struct pc_views *views = item->views;
    item->views = NULL;
    pc_views_release(views);
    return Py_BuildValue("iNi", kind, face, status);
}

struct telling {
    struct pc_py_item *item;
    bool is_orphan;
};

static void was_told(pc_engine_object *self, void *argument) {
    struct telling *telling = argument;
    (void)self;
    telling->item->is_told = false;
    telling->is_orphan = telling->item->is_orphan && !telling->item->event.stands; /* else it is freed from there */
}

bool pc_item_event(pc_engine_object *self, struct pc_py_item *item, enum pc_event_kind kind, int status,
                   PyObject **event) {
    bool is_gone = item->is_gone;
    if (!is_gone)
        *event = event_of(self, item, kind, status);
    struct telling telling = {.item = item};
    if (pc_engine_do(self, was_told, &telling) && telling.is_orphan)
        free_item(item);
    return !is_gone;
}

/* Give up whatever is under way, without a word. */
static void abandon(pc_engine_object *self, void *argument) {
    struct pc_py_item *item = argument;
    (void)self;
    if (item->send.context != NULL)
        pc_send_take_back(&item->send);
    switch (item->receive.state) {
    case PC_RECEIVE_POSTED:
        pc_receive_give_up(&item->receive);
        break;
    case PC_RECEIVE_HELD:
    case PC_RECEIVE_READING:
        pc_receive_drop(&item->receive);
        break;
    default:
        break;
    }
}

struct orphaning {
    struct pc_py_item *item;
    struct pc_views *views;
    bool is_in_queue; /* or is being told: who takes its event out of there frees it, which may be at once */
};

static void orphan(pc_engine_object *self, void *argument) {
    struct orphaning *orphaning = argument;
    struct pc_py_item *item = orphaning->item;
    drop_successor(self, item);
    abandon(self, item);
    item->is_orphan = true;
    item->is_quiet = orphaning->is_in_queue = item->event.stands || item->is_told;
    orphaning->views = item->views;
    item->views = NULL;
}

static void face_dealloc(pc_face *face) {
    PyTypeObject *type = Py_TYPE((PyObject *)face);
    struct pc_py_item *item = face->item;
    if (item != NULL) {
        struct orphaning orphaning = {.item = item};
        item->is_gone = true;
        if (!pc_engine_do(face->engine, orphan, &orphaning)) /* it is closed: nobody takes events */
            orphaning.views = item->views;
        if (!orphaning.is_in_queue)
            free_item(item);
        pc_views_release(orphaning.views);
    }
    Py_XDECREF((PyObject *)face->engine);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(face);
    Py_DECREF(type);
}

/* --- sending ----------------------------------------------------------------------------------------- */

struct sending {
    struct pc_py_item *item;
    const char *header;
    Py_ssize_t header_nbytes;
    int way, answer;
};

static void send(pc_engine_object *self, void *argument) {
    struct sending *sending = argument;
    struct pc_py_item *item = sending->item;
    sending->answer = pc_send_start(self->engine.others, &item->send, sending->header, (size_t)sending->header_nbytes,
                                    (enum pc_way)sending->way);
}

/* A transport in Python has been asked meanwhile: it may be done. */
static void look_at_send(pc_engine_object *self, void *argument) {
    struct sending *sending = argument;
    (void)self;
    if (sending->item->send.context == NULL)
        sending->answer = PC_SENT;
    else
        sending->item->is_quiet = false;
}

PyObject *pc_item_send(pc_engine_object *self, PyObject *const *args, Py_ssize_t count) {
    struct sending sending = {0};
    if (count != 4) {
        PyErr_SetString(PyExc_TypeError, "arguments are rank, header, parts, way");
        return NULL;
    }
    long peer = PyLong_AsLong(args[0]);
    sending.way = (int)PyLong_AsLong(args[3]);
    if (PyErr_Occurred() || PyBytes_AsStringAndSize(args[1], (char **)&sending.header, &sending.header_nbytes) < 0)
        return NULL;
    if (peer < 0 || peer >= self->engine.size || self->links[peer] == NULL) {
        PyErr_SetString(PyExc_ValueError, "there is no link to such a rank");
        return NULL;
    }
    struct pc_views *views = pc_view_parts(args[2]);
    if (views == NULL)
        return NULL;
    struct pc_py_item *item = sending.item = calloc(1, sizeof *item);
    struct iovec *parts = malloc((size_t)(views->count + 1) * sizeof *parts);
    PyObject *face = item != NULL && parts != NULL ? make_face(send_type, self, item) : NULL;
    if (face == NULL) {
        free(item);
        free(parts);
        pc_views_release(views);
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    }
    for (Py_ssize_t index = 0; index < views->count; index++)
        parts[index] = (struct iovec){views->views[index].buf, (size_t)views->views[index].len};
    item->views = views;
    item->parts = parts;
    item->send.peer = (int)peer;
    item->send.parts = parts;
    item->send.num_parts = (size_t)views->count;
    item->send.ended = send_ended;
    item->send.owner = self;
    item->send.keeper.object = views->count == 1 ? views->views[0].obj : NULL;
    item->is_quiet = self->has_queue;
    if (!pc_engine_do(self, send, &sending)) {
        Py_DECREF(face);
        return pc_engine_is_closed();
    }
    if (self->has_queue && sending.answer == PC_UNDER_WAY)
        pc_engine_do(self, look_at_send, &sending);
    if (sending.answer == PC_UNDER_WAY)
        return face;
    int status = item->send.status;
    Py_DECREF(face);
    return status == 0 ? Py_NewRef(Py_None) : PyLong_FromLong(status);
}

struct stopping {
    struct pc_py_item *item;
    bool stopped;
};

static void stop(pc_engine_object *self, void *argument) {
    struct stopping *stopping = argument;
    (void)self;
    stopping->stopped = pc_send_stop(&stopping->item->send);
}

static PyObject *send_stop(pc_face *face, PyObject *unused) {
    (void)unused;
    struct stopping stopping = {.item = face->item};
    pc_link_before_stop(face->engine, &face->item->send);
    pc_engine_do(face->engine, stop, &stopping);
    return PyBool_FromLong(stopping.stopped);
}

/* Python, which has given it up, is told no more of it. */
static void abandon_quietly(pc_engine_object *self, void *argument) {
    struct pc_py_item *item = argument;
    item->is_quiet = true;
    abandon(self, item);
}

static PyObject *face_take_back(pc_face *face, PyObject *unused) {
    (void)unused;
    struct pc_py_item *item = face->item;
    pc_engine_do(face->engine, abandon_quietly, item);
    pc_views_release(item->views);
    item->views = NULL;
    Py_RETURN_NONE;
}

static PyMethodDef send_methods[] = {
    {"stop", (PyCFunction)send_stop, METH_NOARGS, "Stop it, if that can be; False: it is too late."},
    {"take_back", (PyCFunction)face_take_back, METH_NOARGS, "Give it up: its memory is not used any more."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot send_slots[] = {
    {Py_tp_dealloc, face_dealloc},
    {Py_tp_methods, send_methods},
    {Py_tp_doc, "A message that is under way to another rank."},
    {0, NULL},
};

PyType_Spec pc_send_spec = {
    .name = "pycoll._transports._core.Send",
    .basicsize = sizeof(pc_face),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = send_slots,
};

/* --- receiving --------------------------------------------------------------------------------------- */

struct accepting {
    struct pc_py_item *item;
    void *into;
    PyObject *keeper; /* what that belongs to */
    int error;
    bool is_over;
};

static void accept(pc_engine_object *self, void *argument) {
    struct accepting *accepting = argument;
    struct pc_py_item *item = accepting->item;
    (void)self;
    if (item->receive.state == PC_RECEIVE_HELD) {
        item->is_quiet = true;
        item->receive.keeper.object = accepting->keeper;
        accepting->error = pc_receive_into(&item->receive, accepting->into);
        item->is_quiet = false;
    }
    accepting->is_over = item->receive.state == PC_RECEIVE_ENDED;
    if (accepting->is_over)
        item->is_quiet = true; /* its end may stand in the queue */
}

static PyObject *receive_into(pc_face *face, PyObject *into) {
    struct pc_py_item *item = face->item;
    struct pc_views *views = pc_view_into(into, (Py_ssize_t)item->nbytes);
    if (views == NULL)
        return NULL;
    struct accepting accepting = {.item = item, .into = views->views[0].buf, .keeper = views->views[0].obj};
    item->views = views;
    bool done = pc_engine_do(face->engine, accept, &accepting);
    if (done && accepting.error == 0 && !accepting.is_over)
        Py_RETURN_NONE;
    pc_views_release(views);
    item->views = NULL;
    if (!done)
        return pc_engine_is_closed();
    return PyLong_FromLong(accepting.error != 0 ? accepting.error : item->receive.status);
}

static void redirect(pc_engine_object *self, void *argument) {
    struct accepting *accepting = argument;
    struct pc_receive *receive = &accepting->item->receive;
    (void)self;
    receive->keeper.object = accepting->keeper;
    if (receive->state == PC_RECEIVE_READING) {
        pc_receive_redirect(receive, accepting->into);
    } else if (receive->state == PC_RECEIVE_ENDED && receive->status == 0) { /* its end stands in the queue */
        if (receive->nbytes > 0)
            pc_copy(accepting->into, receive->into, receive->nbytes);
        receive->into = accepting->into; /* it may be redirected once more */
    }
}

static PyObject *receive_redirect(pc_face *face, PyObject *into) {
    struct pc_py_item *item = face->item;
    struct pc_views *views = pc_view_into(into, (Py_ssize_t)item->nbytes);
    if (views == NULL)
        return NULL;
    struct accepting accepting = {.item = item, .into = views->views[0].buf, .keeper = views->views[0].obj};
    pc_engine_do(face->engine, redirect, &accepting);
    struct pc_views *before = item->views;
    item->views = views;
    pc_views_release(before);
    Py_RETURN_NONE;
}

struct giving_up {
    struct pc_py_item *item;
    bool given_up;
};

static void give_up(pc_engine_object *self, void *argument) {
    struct giving_up *giving = argument;
    (void)self;
    giving->given_up = pc_receive_give_up(&giving->item->receive);
    if (giving->given_up)
        giving->item->is_quiet = true; /* its end may stand in the queue */
}

static PyObject *receive_give_up(pc_face *face, PyObject *unused) {
    (void)unused;
    struct pc_py_item *item = face->item;
    struct giving_up giving = {.item = item};
    if (!pc_engine_do(face->engine, give_up, &giving) || !giving.given_up)
        Py_RETURN_FALSE;
    pc_views_release(item->views);
    item->views = NULL;
    Py_RETURN_TRUE;
}

static PyObject *receive_header(pc_face *face, void *unused) {
    (void)unused;
    struct pc_py_item *item = face->item;
    if (item->header == NULL)
        return PyErr_NoMemory();
    return PyBytes_FromStringAndSize((char *)item->header, (Py_ssize_t)item->header_nbytes);
}

static PyObject *receive_payload(pc_face *face, void *unused) {
    (void)unused;
    struct pc_py_item *item = face->item;
    if (item->payload == NULL)
        Py_RETURN_NONE;
    return PyMemoryView_FromMemory((char *)(uintptr_t)item->payload, (Py_ssize_t)item->nbytes, PyBUF_READ);
}

static PyObject *receive_peer(pc_face *face, void *unused) { (void)unused; return PyLong_FromLong(face->item->peer); }
static PyObject *receive_nbytes(pc_face *face, void *unused) {
    (void)unused;
    return PyLong_FromSize_t(face->item->nbytes);
}
static PyObject *receive_order(pc_face *face, void *unused) {
    (void)unused;
    return PyLong_FromUnsignedLongLong(face->item->order);
}
static PyObject *receive_number(pc_face *face, void *unused) {
    (void)unused;
    return PyLong_FromUnsignedLongLong(face->item->receive.posted.queued.number);
}
static PyObject *receive_sender_waits(pc_face *face, void *unused) {
    (void)unused;
    return PyBool_FromLong(face->item->sender_waits);
}
struct looking {
    struct pc_py_item *item;
    enum pc_receive_state state;
    int status;
};

static void look_at_status(pc_engine_object *self, void *argument) {
    struct looking *looking = argument;
    (void)self;
    looking->status = looking->item->status;
}

static void look(pc_engine_object *self, void *argument) {
    struct looking *looking = argument;
    (void)self;
    looking->state = looking->item->receive.state;
    if (looking->state == PC_RECEIVE_HELD)
        (void)pc_item_taken(looking->item); /* now Python knows of its message */
}

static PyObject *receive_state(pc_face *face, void *unused) {
    (void)unused;
    struct looking looking = {.item = face->item};
    if (!pc_engine_do(face->engine, look, &looking)) /* it is closed: nobody else writes there */
        looking.state = face->item->receive.state;
    return PyLong_FromLong(looking.state);
}

struct finding {
    struct pc_py_item *item;
    uint64_t id;
};

static void find_link_id(pc_engine_object *self, void *argument) {
    struct finding *finding = argument;
    const struct pc_receive *receive = &finding->item->receive;
    if (receive->state == PC_RECEIVE_HELD)
        finding->id = pc_link_id_of_message(&self->queue, receive->message);
}

static PyObject *receive_link_id(pc_face *face, void *unused) {
    (void)unused;
    struct finding finding = {.item = face->item};
    if (face->engine->has_queue)
        pc_engine_do(face->engine, find_link_id, &finding);
    return PyLong_FromUnsignedLongLong(finding.id);
}

static PyObject *receive_status(pc_face *face, void *unused) {
    (void)unused;
    struct looking looking = {.item = face->item};
    if (!pc_engine_do(face->engine, look_at_status, &looking)) /* it is closed: nobody else writes there */
        looking.status = face->item->status;
    return PyLong_FromLong(looking.status);
}

static PyGetSetDef receive_values[] = {
    {"peer", (getter)receive_peer, NULL, "The rank that has sent its message.", NULL},
    {"header", (getter)receive_header, NULL, "The header of its message, as bytes.", NULL},
    {"nbytes", (getter)receive_nbytes, NULL, "The length of its message's payload.", NULL},
    {"payload", (getter)receive_payload, NULL, "A view of the payload, if it is here: good until `drop` or `into`; or None.",
     NULL},
    {"order", (getter)receive_order, NULL, "Where its message stood in the queue.", NULL},
    {"number", (getter)receive_number, NULL, "Where it stood among the receives.", NULL},
    {"link_id", (getter)receive_link_id, NULL, "The number by which a transport in Python knows its message; 0: none.",
     NULL},
    {"sender_waits", (getter)receive_sender_waits, NULL, "Whether the sender may wait until it is accepted.", NULL},
    {"state", (getter)receive_state, NULL, "0: idle, 1: posted, 2: it holds a message, 3: that is read, 4: ended.", NULL},
    {"status", (getter)receive_status, NULL, "When it has ended: 0, or why it failed.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef receive_methods[] = {
    {"into", (PyCFunction)receive_into, METH_O,
     "into(buffer) -> None | int: have the message that it holds written there. None: an event will say when; 0: done."},
    {"redirect", (PyCFunction)receive_redirect, METH_O, "redirect(buffer): have what is being read go on there."},
    {"drop", (PyCFunction)face_take_back, METH_NOARGS, "Nobody wants its message, or the rest of it."},
    {"give_up", (PyCFunction)receive_give_up, METH_NOARGS,
     "give_up() -> bool: its message goes back to its place. False: it has ended, or there is no memory."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot receive_slots[] = {
    {Py_tp_dealloc, face_dealloc},
    {Py_tp_methods, receive_methods},
    {Py_tp_getset, receive_values},
    {Py_tp_doc, "A receive, or a message that has come."},
    {0, NULL},
};

PyType_Spec pc_receive_spec = {
    .name = "pycoll._transports._core.Receive",
    .basicsize = sizeof(pc_face),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = receive_slots,
};

/* --- posting ----------------------------------------------------------------------------------------- */

PyObject *pc_item_new_receive(pc_engine_object *engine, struct pc_py_item **into) {
    struct pc_py_item *item = *into = calloc(1, sizeof *item);
    PyObject *face = item != NULL ? make_face(receive_type, engine, item) : NULL;
    if (face == NULL) {
        free(item);
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    }
    item->event.kind = PC_EVENT_HELD;
    item->receive.ask = true;
    item->receive.told = receive_told;
    item->receive.owner = engine;
    return face;
}

PyObject *pc_item_receive(pc_engine_object *self) {
    struct pc_py_item *item;
    return pc_item_new_receive(self, &item);
}

bool pc_item_take_over(PyObject *face, struct pc_receive *from) {
    struct pc_py_item *item = ((pc_face *)face)->item;
    item->context = from->by_address ? NULL : from->context;
    item->is_quiet = true;
    pc_receive_take_over(&item->receive, from);
    item->is_quiet = false;
    return pc_item_taken(item);
}

void pc_item_types(PyTypeObject *send, PyTypeObject *receive) {
    send_type = send;
    receive_type = receive;
}
