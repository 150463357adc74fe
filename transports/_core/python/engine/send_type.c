/* `_core.Send`: a message that Python sends. See item.h. */
#include "item.h"

#include <stdlib.h>

static PyTypeObject *send_type;

struct sending {
    struct pc_py_item *item;
    const char *header;
    Py_ssize_t header_nbytes;
    int way, answer;
};

static void send(pc_engine_object *self, void *argument) {
    struct sending *sending = argument;
    struct pc_py_item *item = sending->item;
    sending->answer = pc_send_start(self->engine.others, &item->send, sending->header,
                                    (size_t)sending->header_nbytes, (enum pc_way)sending->way);
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
    if (PyErr_Occurred() ||
        PyBytes_AsStringAndSize(args[1], (char **)&sending.header, &sending.header_nbytes) < 0)
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
    PyObject *handle =
        item != NULL && parts != NULL ? pc_item_make_handle(send_type, self, item) : NULL;
    if (handle == NULL) {
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
    item->send.ended = pc_item_send_ended;
    item->send.owner = self;
    item->send.keeper.object = views->count == 1 ? views->views[0].obj : NULL;
    item->is_quiet = self->has_queue;
    if (!pc_engine_do(self, send, &sending)) {
        Py_DECREF(handle);
        return pc_engine_is_closed();
    }
    if (self->has_queue && sending.answer == PC_UNDER_WAY)
        pc_engine_do(self, look_at_send, &sending);
    if (sending.answer == PC_UNDER_WAY)
        return handle;
    int status = item->send.status;
    Py_DECREF(handle);
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

static PyObject *send_stop(pc_handle *handle, PyObject *unused) {
    (void)unused;
    struct stopping stopping = {.item = handle->item};
    pc_link_before_stop(handle->engine, &handle->item->send);
    pc_engine_do(handle->engine, stop, &stopping);
    return PyBool_FromLong(stopping.stopped);
}

static PyMethodDef send_methods[] = {
    {"stop", (PyCFunction)send_stop, METH_NOARGS,
     "Stop it, if that can be; False: it is too late."},
    {"take_back", (PyCFunction)pc_item_take_back, METH_NOARGS,
     "Give it up: its memory is not used any more."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot send_slots[] = {
    {Py_tp_dealloc, pc_item_handle_dealloc},
    {Py_tp_methods, send_methods},
    {Py_tp_doc, "A message that is under way to another rank."},
    {0, NULL},
};

PyType_Spec pc_send_spec = {
    .name = "pycoll._transports._core.Send",
    .basicsize = sizeof(pc_handle),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = send_slots,
};

void pc_send_types(PyTypeObject *send) { send_type = send; }
