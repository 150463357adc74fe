/* `_core.Request`: a send or a receive that is under way, as Python sees it. See request.h. */
#include "watch.h"

#include <stdlib.h>
#include <structmember.h>

static bool is_done(struct pc_started *self) {
    return pc_request_is_done((struct pc_request *)self);
}
static int go_on(struct pc_started *self) { return pc_request_go_on((struct pc_request *)self); }
static int wait(struct pc_started *self, uint64_t until_ns) {
    return pc_request_wait((struct pc_request *)self, until_ns);
}
static PyObject *result(struct pc_started *self) {
    return pc_request_result((struct pc_request *)self);
}
/* Who was told that it holds a message may wait no more. */
static void watched(struct pc_started *self) {
    if (pc_request_is_held((struct pc_request *)self))
        pc_request_hold((struct pc_request *)self);
}

const struct pc_started_ops pc_request_ops = {
    .is_done = is_done,
    .go_on = go_on,
    .wait = wait,
    .result = result,
    .watched = watched,
    .give_up = pc_request_give_up,
    .let_go = pc_request_let_go,
};

static PyObject *request_stop(struct pc_request *self, PyObject *Py_UNUSED(unused)) {
    pc_engine_object *engine = self->messages->engine;
    struct pc_turn turn;
    pc_link_before_stop(engine, &self->send);
    bool stopped =
        pc_engine_take(engine, &turn) && self->under_way && pc_send_stop(&self->send);
    pc_engine_give(engine, &turn);
    pc_engine_let_go(engine);
    return PyBool_FromLong(stopped);
}

static PyObject *request_withdraw(struct pc_request *self, PyObject *Py_UNUSED(unused)) {
    pc_engine_object *engine = self->messages->engine;
    struct pc_turn turn;
    bool withdrawn = false;
    if (pc_engine_take(engine, &turn) && self->receive.state == PC_RECEIVE_POSTED) {
        self->cancelled = 1; /* before its end, which wakes those who ask why */
        withdrawn = pc_request_give_up((struct pc_started *)self);
        self->cancelled = withdrawn;
    }
    pc_engine_give(engine, &turn);
    pc_engine_let_go(engine);
    return PyBool_FromLong(withdrawn);
}

static PyObject *request_description(struct pc_request *self, void *Py_UNUSED(unused)) {
    PyObject *shape = PyTuple_New(!pc_request_receives(self) ? self->ndim : 0);
    for (int axis = 0; shape != NULL && !pc_request_receives(self) && axis < self->ndim; axis++)
        PyTuple_SetItem(shape, axis, PyLong_FromSsize_t(self->dims[axis]));
    if (shape == NULL)
        return NULL;
    return Py_BuildValue("iiilN", self->kind, self->dtype, self->peer, self->tag, shape);
}

static PyObject *request_message(struct pc_request *self, void *Py_UNUSED(unused)) {
    const struct pc_receive *receive = &self->receive;
    if (receive->header == NULL)
        Py_RETURN_NONE;
    return Py_BuildValue("iny#", receive->source, (Py_ssize_t)receive->nbytes, receive->header,
                         (Py_ssize_t)receive->header_nbytes);
}

static void request_dealloc(struct pc_request *self) {
    pc_watch_leave(self);
    free(self->receive.header);
    free(self->spare);
    free(self->parts);
    pc_views_release(self->views);
    Py_XDECREF(self->sent_type);
    Py_XDECREF(self->gpu);
    Py_XDECREF(self->array);
    Py_XDECREF(self->keeper);
    Py_XDECREF(self->filled);
    Py_XDECREF((PyObject *)self->messages);
    pc_free(self);
}

static PyObject *request_go_on(struct pc_request *self, PyObject *Py_UNUSED(unused)) {
    if (pc_request_go_on(self) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *request_settle(struct pc_request *self, PyObject *args) {
    PyObject *result;
    int failed;
    if (!PyArg_ParseTuple(args, "Op", &result, &failed))
        return NULL;
    PyObject *array = self->array, *filled = self->filled;
    self->array = Py_NewRef(result);
    self->filled = NULL; /* Python has done that */
    Py_XDECREF(array);
    Py_XDECREF(filled);
    pc_engine_object *engine = self->messages->engine;
    struct pc_turn turn;
    if (pc_engine_take(engine, &turn) && self->under_way)
        pc_request_end(self, failed ? PC_FAILED_IN_PYTHON : 0);
    pc_engine_give(engine, &turn);
    pc_engine_let_go(engine);
    Py_RETURN_NONE;
}

static PyMethodDef request_methods[] = {
    {"_stop", (PyCFunction)request_stop, METH_NOARGS, "Stop a send, if that can be."},
    {"_withdraw", (PyCFunction)request_withdraw, METH_NOARGS,
     "Cancel a receive for which no message has come."},
    {"_go_on", (PyCFunction)request_go_on, METH_NOARGS,
     "Go on with the message that it holds, if it does."},
    {"_settle", (PyCFunction)request_settle, METH_VARARGS,
     "_settle(result, failed): what Python went on with is done."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef request_values[] = {
    {"_description", (getter)request_description, NULL,
     "(kind, code of the dtype, peer, tag, shape).", NULL},
    {"_message", (getter)request_message, NULL,
     "(world rank, nbytes, header) of a message that was refused; or None.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef request_members[] = {
    {"_array", T_OBJECT, offsetof(struct pc_request, array), READONLY,
     "the array that is sent or filled; or None"},
    {"_status", T_INT, offsetof(struct pc_request, status), READONLY, "0, or why it failed"},
    {"_filled", T_OBJECT, offsetof(struct pc_request, filled), READONLY,
     "the Status to be filled in; or None"},
    {"_sent_type", T_OBJECT, offsetof(struct pc_request, sent_type), READONLY,
     "the type of an object that is sent; or None"},
    {"_gpu", T_OBJECT, offsetof(struct pc_request, gpu), READONLY,
     "the GPU on which a receive without `out` was started; or None"},
    {"_cancelled", T_BOOL, offsetof(struct pc_request, cancelled), 0, "`cancel` has withdrawn it"},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot request_slots[] = {
    {Py_tp_dealloc, request_dealloc},
    {Py_tp_methods, request_methods},
    {Py_tp_getset, request_values},
    {Py_tp_members, request_members},
    {Py_tp_doc, "A send or receive of an array that is under way in the core."},
    {0, NULL},
};

PyType_Spec pc_request_spec = {
    .name = "pycoll._transports._core.Request",
    .basicsize = sizeof(struct pc_request),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = request_slots,
};
