/* What becomes of messages of Python's, and when they are let go. See item.h. */
#include "item.h"

#include <stdlib.h>

static struct pc_py_item *item_of_receive(struct pc_receive *receive) {
    return (struct pc_py_item *)((char *)receive - offsetof(struct pc_py_item, receive));
}

/* --- what the engine tells -------------------------------------------------------------------- */

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

/* The sender has taken back the message of a receive: it, or another one for it, waits again in its
   place. Whether it is the same: then Python, which has not heard of the message, need not hear of
   it. */
static bool wait_again(pc_engine_object *self, struct pc_py_item *item) {
    if (!item->is_known) {
        free(item->header);
        item->header = NULL;
        item->receive.status = 0;
        pc_receive_start_at(item->context, &item->receive, item->receive.posted.queued.number);
        return true;
    }
    struct pc_py_item *successor =
        item->for_message || item->is_orphan ? NULL : calloc(1, sizeof *successor);
    if (successor == NULL)
        return false;
    successor->event.kind = PC_EVENT_HELD;
    successor->is_quiet = true;
    successor->context = item->context;
    memcpy(successor->expects, item->expects, sizeof item->expects);
    successor->receive = (struct pc_receive){.ask = true,
                                             .noted = item->receive.noted,
                                             .room = item->receive.room,
                                             .expects_nbytes = item->receive.expects_nbytes,
                                             .notify = receive_told,
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
    if (receive->state == PC_RECEIVE_ENDED && receive->status == PC_TAKEN_BACK &&
        item->context != NULL && wait_again(self, item))
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
    item->receive.notify = receive_told;
    item->receive.owner = engine->owner;
    return &item->receive;
}

void pc_item_send_ended(struct pc_send *send) {
    struct pc_py_item *item =
        (struct pc_py_item *)((char *)send - offsetof(struct pc_py_item, send));
    item->status = send->status;
    tell(send->owner, item, PC_EVENT_ENDED);
}

void pc_item_free(struct pc_py_item *item) {
    free(item->header);
    free(item->receive.header);
    free(item->parts);
    free(item);
}

struct pc_py_item *pc_item_adopt(pc_engine_object *self, const struct pc_context *context,
                                 uint64_t number) {
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
    pc_item_free(successor);
}

bool pc_item_taken(struct pc_py_item *item) {
    if (item->is_orphan) {
        pc_item_free(item); /* its views went with the handle */
        return false;
    }
    /* An arrival that was taken back before Python heard of it: nobody ever will. */
    if (item->handle == NULL && item->event.kind == PC_EVENT_ENDED) {
        pc_item_free(item);
        return false;
    }
    const struct pc_message *message =
        item->receive.state == PC_RECEIVE_HELD ? item->receive.message : NULL;
    item->is_known = message != NULL;
    item->payload = message != NULL && message->state == PC_MESSAGE_HERE ? message->payload : NULL;
    if (message != NULL)
        item->sender_waits = message->sender_waits;
    return true;
}

/* --- faces ------------------------------------------------------------------------------------ */

void pc_item_swap(PyObject *handle, struct pc_py_item *item) {
    pc_item_free(((pc_handle *)handle)->item);
    ((pc_handle *)handle)->item = item;
    item->handle = handle;
}

PyObject *pc_item_make_handle(PyTypeObject *type, pc_engine_object *engine,
                              struct pc_py_item *item) {
    pc_handle *handle = pc_new(type);
    if (handle == NULL)
        return NULL;
    handle->engine = (pc_engine_object *)Py_NewRef((PyObject *)engine);
    handle->item = item;
    item->handle = (PyObject *)handle;
    return (PyObject *)handle;
}

/* NULL with an exception. */
static PyObject *event_of(pc_engine_object *self, struct pc_py_item *item, enum pc_event_kind kind,
                          int status) {
    PyObject *handle =
        item->handle != NULL ? Py_NewRef(item->handle)
                             : pc_item_make_handle(pc_receive_type, self, item);
    if (handle == NULL)
        return NULL;
    if (kind != PC_EVENT_ENDED)
        return Py_BuildValue("iN", kind, handle);
    struct pc_views *views = item->views;
    item->views = NULL;
    pc_views_release(views);
    return Py_BuildValue("iNi", kind, handle, status);
}

bool pc_item_event(pc_engine_object *self, struct pc_py_item *item, enum pc_event_kind kind,
                   int status, PyObject **event) {
    bool is_gone = item->is_gone;
    if (!is_gone)
        *event = event_of(self, item, kind, status);
    struct pc_turn turn;
    bool is_orphan = false;
    if (pc_engine_take(self, &turn)) {
        item->is_reporting = false;
        is_orphan = item->is_orphan && !item->event.stands; /* else it is freed from there */
        pc_engine_give(self, &turn);
    }
    if (is_orphan)
        pc_item_free(item);
    return !is_gone;
}

/* Give up whatever is under way, without a word. */
static void abandon(struct pc_py_item *item) {
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

void pc_item_handle_dealloc(pc_handle *handle) {
    struct pc_py_item *item = handle->item;
    if (item != NULL) {
        struct pc_turn turn;
        /* or is being told: who takes its event out of there frees it, which may be at once */
        bool is_in_queue = false;
        item->is_gone = true;
        bool is_open = pc_engine_take(handle->engine, &turn);
        struct pc_views *views = item->views;
        if (is_open) { /* else nobody takes events */
            drop_successor(handle->engine, item);
            abandon(item);
            item->is_orphan = true;
            item->is_quiet = is_in_queue = item->event.stands || item->is_reporting;
            item->views = NULL;
        }
        pc_engine_give(handle->engine, &turn);
        if (!is_in_queue)
            pc_item_free(item);
        pc_views_release(views);
    }
    Py_XDECREF((PyObject *)handle->engine);
    pc_free(handle);
}

PyObject *pc_item_take_back(pc_handle *handle, PyObject *Py_UNUSED(unused)) {
    struct pc_py_item *item = handle->item;
    struct pc_turn turn;
    if (pc_engine_take(handle->engine, &turn)) {
        item->is_quiet = true; /* Python, which has given it up, is told no more of it */
        abandon(item);
        pc_engine_give(handle->engine, &turn);
    }
    pc_views_release(item->views);
    item->views = NULL;
    Py_RETURN_NONE;
}

/* --- posting ---------------------------------------------------------------------------------- */

PyObject *pc_item_new_receive(pc_engine_object *engine, struct pc_py_item **into) {
    struct pc_py_item *item = *into = calloc(1, sizeof *item);
    PyObject *handle = item != NULL ? pc_item_make_handle(pc_receive_type, engine, item) : NULL;
    if (handle == NULL) {
        free(item);
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    }
    item->event.kind = PC_EVENT_HELD;
    item->receive.ask = true;
    item->receive.notify = receive_told;
    item->receive.owner = engine;
    return handle;
}

PyObject *pc_item_receive(pc_engine_object *self) {
    struct pc_py_item *item;
    return pc_item_new_receive(self, &item);
}

bool pc_item_take_over(PyObject *handle, struct pc_receive *from) {
    struct pc_py_item *item = ((pc_handle *)handle)->item;
    item->context = from->by_address ? NULL : from->context;
    item->is_quiet = true;
    pc_receive_take_over(&item->receive, from);
    item->is_quiet = false;
    return pc_item_taken(item);
}
