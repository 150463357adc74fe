/* `_core.Receive`: a message that Python receives. See item.h. */
#include "item.h"

#include "base/copy.h"

static PyObject *receive_into(pc_handle *handle, PyObject *into) {
    struct pc_py_item *item = handle->item;
    struct pc_views *views = pc_view_into(into, (Py_ssize_t)item->nbytes);
    if (views == NULL)
        return NULL;
    struct pc_receive *receive = &item->receive;
    struct pc_turn turn;
    int error = 0;
    bool is_over = false;
    item->views = views;
    if (pc_engine_take(handle->engine, &turn)) {
        if (receive->state == PC_RECEIVE_HELD) {
            item->is_quiet = true;
            receive->keeper.object = views->views[0].obj;
            error = pc_receive_into(receive, views->views[0].buf);
            item->is_quiet = false;
        }
        is_over = receive->state == PC_RECEIVE_ENDED;
        item->is_quiet |= is_over; /* its end may stand in the queue */
        pc_engine_give(handle->engine, &turn);
        if (error == 0 && !is_over)
            Py_RETURN_NONE;
    }
    pc_views_release(views);
    item->views = NULL;
    if (!turn.is_taken)
        return pc_engine_is_closed();
    return PyLong_FromLong(error != 0 ? error : receive->status);
}

static PyObject *receive_redirect(pc_handle *handle, PyObject *into) {
    struct pc_py_item *item = handle->item;
    struct pc_views *views = pc_view_into(into, (Py_ssize_t)item->nbytes);
    if (views == NULL)
        return NULL;
    struct pc_receive *receive = &item->receive;
    struct pc_turn turn;
    void *place = views->views[0].buf;
    if (pc_engine_take(handle->engine, &turn)) {
        receive->keeper.object = views->views[0].obj;
        if (receive->state == PC_RECEIVE_READING) {
            pc_receive_redirect(receive, place);
        } else if (receive->state == PC_RECEIVE_ENDED && receive->status == 0) {
            /* its end stands in the queue */
            if (receive->nbytes > 0)
                pc_copy(place, receive->into, receive->nbytes);
            receive->into = place; /* it may be redirected once more */
        }
        pc_engine_give(handle->engine, &turn);
    }
    struct pc_views *before = item->views;
    item->views = views;
    pc_views_release(before);
    Py_RETURN_NONE;
}

static PyObject *receive_give_up(pc_handle *handle, PyObject *Py_UNUSED(unused)) {
    struct pc_py_item *item = handle->item;
    struct pc_turn turn;
    bool given_up = pc_engine_take(handle->engine, &turn) && pc_receive_give_up(&item->receive);
    item->is_quiet |= given_up; /* its end may stand in the queue */
    pc_engine_give(handle->engine, &turn);
    if (!given_up)
        Py_RETURN_FALSE;
    pc_views_release(item->views);
    item->views = NULL;
    Py_RETURN_TRUE;
}

static PyObject *receive_header(pc_handle *handle, void *Py_UNUSED(unused)) {
    struct pc_py_item *item = handle->item;
    if (item->header == NULL)
        return PyErr_NoMemory();
    return PyBytes_FromStringAndSize((char *)item->header, (Py_ssize_t)item->header_nbytes);
}

static PyObject *receive_payload(pc_handle *handle, void *Py_UNUSED(unused)) {
    struct pc_py_item *item = handle->item;
    if (item->payload == NULL)
        Py_RETURN_NONE;
    return PyMemoryView_FromMemory((char *)(uintptr_t)item->payload, (Py_ssize_t)item->nbytes,
                                   PyBUF_READ);
}

static PyObject *receive_peer(pc_handle *handle, void *Py_UNUSED(unused)) {
    return PyLong_FromLong(handle->item->peer);
}
static PyObject *receive_nbytes(pc_handle *handle, void *Py_UNUSED(unused)) {
    return PyLong_FromSize_t(handle->item->nbytes);
}
static PyObject *receive_order(pc_handle *handle, void *Py_UNUSED(unused)) {
    return PyLong_FromUnsignedLongLong(handle->item->order);
}
static PyObject *receive_number(pc_handle *handle, void *Py_UNUSED(unused)) {
    return PyLong_FromUnsignedLongLong(handle->item->receive.posted.queued.number);
}
static PyObject *receive_sender_waits(pc_handle *handle, void *Py_UNUSED(unused)) {
    return PyBool_FromLong(handle->item->sender_waits);
}

static PyObject *receive_state(pc_handle *handle, void *Py_UNUSED(unused)) {
    struct pc_turn turn;
    bool is_open = pc_engine_take(handle->engine, &turn);
    enum pc_receive_state state = handle->item->receive.state;
    if (is_open && state == PC_RECEIVE_HELD)
        (void)pc_item_taken(handle->item); /* now Python knows of its message */
    pc_engine_give(handle->engine, &turn);
    return PyLong_FromLong(state);
}

static PyObject *receive_link_id(pc_handle *handle, void *Py_UNUSED(unused)) {
    pc_engine_object *engine = handle->engine;
    const struct pc_receive *receive = &handle->item->receive;
    struct pc_turn turn;
    uint64_t id = 0;
    if (engine->has_queue && pc_engine_take(engine, &turn)) {
        if (receive->state == PC_RECEIVE_HELD)
            id = pc_link_id_of_message(&engine->queue, receive->message);
        pc_engine_give(engine, &turn);
    }
    return PyLong_FromUnsignedLongLong(id);
}

static PyObject *receive_status(pc_handle *handle, void *Py_UNUSED(unused)) {
    struct pc_turn turn;
    (void)pc_engine_take(handle->engine, &turn);
    int status = handle->item->status;
    pc_engine_give(handle->engine, &turn);
    return PyLong_FromLong(status);
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

static PyObject *receive_count(pc_handle *handle, PyObject *Py_UNUSED(unused)) {
    const struct pc_receive *receive = &handle->item->receive;
    struct pc_turn turn;
    if (pc_engine_take(handle->engine, &turn)) {
        if (receive->state == PC_RECEIVE_HELD)
            pc_receive_count(receive);
        pc_engine_give(handle->engine, &turn);
    }
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
