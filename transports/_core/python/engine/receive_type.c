/* `_core.Receive`: a message that Python receives. See item.h. */
#include "item.h"

#include "base/copy.h"

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

static PyObject *receive_into(pc_handle *handle, PyObject *into) {
    struct pc_py_item *item = handle->item;
    struct pc_views *views = pc_view_into(into, (Py_ssize_t)item->nbytes);
    if (views == NULL)
        return NULL;
    struct accepting accepting = {
        .item = item, .into = views->views[0].buf, .keeper = views->views[0].obj};
    item->views = views;
    bool done = pc_engine_do(handle->engine, accept, &accepting);
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
    } else if (receive->state == PC_RECEIVE_ENDED && receive->status == 0) {
        /* its end stands in the queue */
        if (receive->nbytes > 0)
            pc_copy(accepting->into, receive->into, receive->nbytes);
        receive->into = accepting->into; /* it may be redirected once more */
    }
}

static PyObject *receive_redirect(pc_handle *handle, PyObject *into) {
    struct pc_py_item *item = handle->item;
    struct pc_views *views = pc_view_into(into, (Py_ssize_t)item->nbytes);
    if (views == NULL)
        return NULL;
    struct accepting accepting = {
        .item = item, .into = views->views[0].buf, .keeper = views->views[0].obj};
    pc_engine_do(handle->engine, redirect, &accepting);
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

static PyObject *receive_give_up(pc_handle *handle, PyObject *unused) {
    (void)unused;
    struct pc_py_item *item = handle->item;
    struct giving_up giving = {.item = item};
    if (!pc_engine_do(handle->engine, give_up, &giving) || !giving.given_up)
        Py_RETURN_FALSE;
    pc_views_release(item->views);
    item->views = NULL;
    Py_RETURN_TRUE;
}

static PyObject *receive_header(pc_handle *handle, void *unused) {
    (void)unused;
    struct pc_py_item *item = handle->item;
    if (item->header == NULL)
        return PyErr_NoMemory();
    return PyBytes_FromStringAndSize((char *)item->header, (Py_ssize_t)item->header_nbytes);
}

static PyObject *receive_payload(pc_handle *handle, void *unused) {
    (void)unused;
    struct pc_py_item *item = handle->item;
    if (item->payload == NULL)
        Py_RETURN_NONE;
    return PyMemoryView_FromMemory((char *)(uintptr_t)item->payload, (Py_ssize_t)item->nbytes,
                                   PyBUF_READ);
}

static PyObject *receive_peer(pc_handle *handle, void *unused) {
    (void)unused;
    return PyLong_FromLong(handle->item->peer);
}
static PyObject *receive_nbytes(pc_handle *handle, void *unused) {
    (void)unused;
    return PyLong_FromSize_t(handle->item->nbytes);
}
static PyObject *receive_order(pc_handle *handle, void *unused) {
    (void)unused;
    return PyLong_FromUnsignedLongLong(handle->item->order);
}
static PyObject *receive_number(pc_handle *handle, void *unused) {
    (void)unused;
    return PyLong_FromUnsignedLongLong(handle->item->receive.posted.queued.number);
}
static PyObject *receive_sender_waits(pc_handle *handle, void *unused) {
    (void)unused;
    return PyBool_FromLong(handle->item->sender_waits);
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

static PyObject *receive_state(pc_handle *handle, void *unused) {
    (void)unused;
    struct looking looking = {.item = handle->item};
    if (!pc_engine_do(handle->engine, look, &looking)) /* it is closed: nobody else writes there */
        looking.state = handle->item->receive.state;
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

static PyObject *receive_link_id(pc_handle *handle, void *unused) {
    (void)unused;
    struct finding finding = {.item = handle->item};
    if (handle->engine->has_queue)
        pc_engine_do(handle->engine, find_link_id, &finding);
    return PyLong_FromUnsignedLongLong(finding.id);
}

static PyObject *receive_status(pc_handle *handle, void *unused) {
    (void)unused;
    struct looking looking = {.item = handle->item};
    if (!pc_engine_do(handle->engine, look_at_status, &looking)) /* it is closed: nobody else writes
                                                                  there */
        looking.status = handle->item->status;
    return PyLong_FromLong(looking.status);
}

static PyGetSetDef receive_values[] = {
    {"peer", (getter)receive_peer, NULL, "The rank that has sent its message.", NULL},
    {"header", (getter)receive_header, NULL, "The header of its message, as bytes.", NULL},
    {"nbytes", (getter)receive_nbytes, NULL, "The length of its message's payload.", NULL},
    {"payload", (getter)receive_payload, NULL,
     "A view of the payload, if it is here: good until `drop` or `into`; or None.", NULL},
    {"order", (getter)receive_order, NULL, "Where its message stood in the queue.", NULL},
    {"number", (getter)receive_number, NULL, "Where it stood among the receives.", NULL},
    {"link_id", (getter)receive_link_id, NULL,
     "The number by which a transport in Python knows its message; 0: none.", NULL},
    {"sender_waits", (getter)receive_sender_waits, NULL,
     "Whether the sender may wait until it is accepted.", NULL},
    {"state", (getter)receive_state, NULL,
     "0: idle, 1: posted, 2: it holds a message, 3: that is read, 4: ended.", NULL},
    {"status", (getter)receive_status, NULL, "When it has ended: 0, or why it failed.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static void count(pc_engine_object *engine, void *argument) {
    const struct pc_receive *receive = argument;
    (void)engine;
    if (receive->state == PC_RECEIVE_HELD)
        pc_receive_count(receive);
}

static PyObject *receive_count(pc_handle *handle, PyObject *unused) {
    (void)unused;
    pc_engine_do(handle->engine, count, &handle->item->receive);
    Py_RETURN_NONE;
}

static PyMethodDef receive_methods[] = {
    {"into", (PyCFunction)receive_into, METH_O,
     "into(buffer) -> None | int: have the message that it holds written there. None: an event "
     "will say when; 0: done."},
    {"redirect", (PyCFunction)receive_redirect, METH_O,
     "redirect(buffer): have what is being read go on there."},
    {"count", (PyCFunction)receive_count, METH_NOARGS,
     "Count the message that it holds: its value was read where the sender has it."},
    {"drop", (PyCFunction)pc_item_take_back, METH_NOARGS,
     "Nobody wants its message, or the rest of it."},
    {"give_up", (PyCFunction)receive_give_up, METH_NOARGS,
     "give_up() -> bool: its message goes back to its place. False: it has ended, or there is no "
     "memory."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot receive_slots[] = {
    {Py_tp_dealloc, pc_item_handle_dealloc},
    {Py_tp_methods, receive_methods},
    {Py_tp_getset, receive_values},
    {Py_tp_doc, "A receive, or a message that has come."},
    {0, NULL},
};

PyType_Spec pc_receive_spec = {
    .name = "pycoll._transports._core.Receive",
    .basicsize = sizeof(pc_handle),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = receive_slots,
};
