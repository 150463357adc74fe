/* `_core.Send`: a message that Python sends. See item.h. */
#include "item.h"

#include <stdlib.h>

PyObject *pc_item_send(pc_engine_object *self, PyObject *const *args, Py_ssize_t count) {
    char *header;
    Py_ssize_t header_nbytes;
    if (count != 4) {
        PyErr_SetString(PyExc_TypeError, "arguments are rank, header, parts, way");
        return NULL;
    }
    long peer = PyLong_AsLong(args[0]);
    enum pc_way way = (enum pc_way)PyLong_AsLong(args[3]);
    if (PyErr_Occurred() || PyBytes_AsStringAndSize(args[1], &header, &header_nbytes) < 0)
        return NULL;
    if (peer < 0 || peer >= self->engine.size || self->links[peer] == NULL) {
        PyErr_SetString(PyExc_ValueError, "there is no link to such a rank");
        return NULL;
    }
    struct pc_views *views = pc_view_parts(args[2]);
    if (views == NULL)
        return NULL;
    struct pc_py_item *item = calloc(1, sizeof *item);
    struct iovec *parts = malloc((size_t)(views->count + 1) * sizeof *parts);
    PyObject *handle =
        item != NULL && parts != NULL ? pc_item_make_handle(pc_send_type, self, item) : NULL;
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
    struct pc_turn turn;
    if (!pc_engine_take(self, &turn)) {
        Py_DECREF(handle);
        return pc_engine_is_closed();
    }
    int answer =
        pc_send_start(self->engine.others, &item->send, header, (size_t)header_nbytes, way);
    pc_engine_give(self, &turn);
    if (item->is_quiet && answer == PC_UNDER_WAY && pc_engine_take(self, &turn)) {
        /* a transport in Python has been asked meanwhile: it may be done */
        if (item->send.context == NULL)
            answer = PC_SENT;
        else
            item->is_quiet = false;
        pc_engine_give(self, &turn);
    }
    if (answer == PC_UNDER_WAY)
        return handle;
    int status = item->send.status;
    Py_DECREF(handle);
    return status == 0 ? Py_NewRef(Py_None) : PyLong_FromLong(status);
}

static PyObject *send_stop(pc_handle *handle, PyObject *Py_UNUSED(unused)) {
    struct pc_turn turn;
    pc_link_before_stop(handle->engine, &handle->item->send);
    bool stopped =
        pc_engine_take(handle->engine, &turn) && pc_send_stop(&handle->item->send);
    pc_engine_give(handle->engine, &turn);
    return PyBool_FromLong(stopped);
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
