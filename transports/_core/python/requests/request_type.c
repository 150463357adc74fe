/* `_core.Request`: a send or a receive that is under way, as Python sees it. See request.h. */
#include "watch.h"

#include <stdlib.h>
#include <structmember.h>

PyTypeObject *pc_request_type;

/* --- what is asked of the engine -------------------------------------------------------------- */

struct asking {
    struct pc_request *request;
    bool answer;
};

static void stop(pc_engine_object *engine, void *argument) {
    struct asking *asking = argument;
    (void)engine;
    asking->answer = asking->request->under_way && pc_send_stop(&asking->request->send);
}

static void give_up(pc_engine_object *engine, void *argument) {
    struct asking *asking = argument;
    (void)engine;
    asking->answer = pc_request_give_up(asking->request);
}

static void cancel(pc_engine_object *engine, void *argument) {
    struct asking *asking = argument;
    if (asking->request->receive.state != PC_RECEIVE_POSTED)
        return;
    asking->request->cancelled = 1; /* before its end, which wakes those who ask why */
    give_up(engine, argument);
    asking->request->cancelled = asking->answer;
}

static void watch(pc_engine_object *engine, void *argument) {
    struct asking *asking = argument;
    (void)engine;
    asking->answer = asking->request->under_way;
    asking->request->is_watched |= asking->answer;
    if (asking->answer && pc_request_is_held(asking->request)) /* who was told of that may wait no
                                                                  more */
        pc_request_hold(asking->request);
}

static bool ask(struct pc_request *request,
                void (*work)(pc_engine_object *engine, void *argument)) {
    struct asking asking = {.request = request};
    pc_engine_do(request->messages->engine, work, &asking);
    pc_engine_let_go(request->messages->engine);
    return asking.answer;
}

/* --- methods of requests ---------------------------------------------------------------------- */

PyObject *pc_request_wait_method(struct pc_request *self, PyObject *const *args, Py_ssize_t count,
                                 PyObject *keywords) {
    uint64_t timeout_ns;
    uint64_t default_ns = self->messages->context->op_timeout_ns;
    if (!pc_timeout_of_wait(args, count, keywords, default_ns, &timeout_ns)) {
        PyObject *slow = PyObject_GetAttrString((PyObject *)self, "_wait");
        PyObject *result = slow != NULL ? pc_call_slow(slow, args, count, keywords) : NULL;
        Py_XDECREF(slow);
        return result;
    }
    if (pc_request_is_done(self))
        return pc_request_result(self);
    struct pc_patience patience = pc_patience(timeout_ns);
    int done = self->messages->engine->python_busy ? 0 : pc_request_wait(self, patience.until_ns);
    if (done != 0)
        return done > 0 ? pc_request_result(self) : NULL;
    PyObject *left = pc_patience_left(&patience);
    PyObject *result =
        left != NULL ? PyObject_CallMethod((PyObject *)self, "_wait", "O", left) : NULL;
    Py_XDECREF(left);
    return result;
}

static PyObject *request_test(struct pc_request *self, PyObject *unused) {
    (void)unused;
    pc_engine_object *engine = self->messages->engine;
    if (!pc_request_is_done(self) && !engine->python_busy) {
        pc_engine_look(engine);
        if (pc_request_go_on(self) < 0 || pc_engine_hear(engine) < 0)
            return NULL;
    }
    return PyBool_FromLong(pc_request_is_done(self));
}

static PyObject *request_done(struct pc_request *self, void *unused) {
    (void)unused;
    return PyBool_FromLong(pc_request_is_done(self));
}

static PyObject *request_result(struct pc_request *self, void *unused) {
    (void)unused;
    if (!pc_request_is_done(self))
        return PyObject_CallMethod((PyObject *)self, "_failed", NULL);
    return pc_request_result(self);
}

static PyObject *request_stop(struct pc_request *self, PyObject *unused) {
    (void)unused;
    pc_link_before_stop(self->messages->engine, &self->send);
    return PyBool_FromLong(ask(self, stop));
}

static PyObject *request_give_up(struct pc_request *self, PyObject *unused) {
    (void)unused;
    return PyBool_FromLong(ask(self, give_up));
}

static PyObject *request_withdraw(struct pc_request *self, PyObject *unused) {
    (void)unused;
    return PyBool_FromLong(ask(self, cancel));
}

static PyObject *request_watch(struct pc_request *self, PyObject *unused) {
    (void)unused;
    return PyBool_FromLong(ask(self, watch));
}

static PyObject *request_description(struct pc_request *self, void *unused) {
    (void)unused;
    PyObject *shape = PyTuple_New(!pc_request_receives(self) ? self->ndim : 0);
    for (int axis = 0; shape != NULL && !pc_request_receives(self) && axis < self->ndim; axis++)
        PyTuple_SetItem(shape, axis, PyLong_FromSsize_t(self->dims[axis]));
    if (shape == NULL)
        return NULL;
    return Py_BuildValue("iiilN", self->kind, self->dtype, self->peer, self->tag, shape);
}

static PyObject *request_message(struct pc_request *self, void *unused) {
    (void)unused;
    const struct pc_receive *receive = &self->receive;
    if (receive->header == NULL)
        Py_RETURN_NONE;
    return Py_BuildValue("iny#", receive->source, (Py_ssize_t)receive->nbytes, receive->header,
                         (Py_ssize_t)receive->header_nbytes);
}

static PyObject *request_owner(struct pc_request *self, void *unused) {
    (void)unused;
    return Py_NewRef(self->messages->owner != NULL ? self->messages->owner : Py_None);
}

static PyObject *request_array(struct pc_request *self, void *unused) {
    (void)unused;
    return Py_NewRef(self->array != NULL ? self->array : Py_None);
}

static PyObject *request_status(struct pc_request *self, void *unused) {
    (void)unused;
    return PyLong_FromLong(self->status);
}

static PyObject *request_filled(struct pc_request *self, void *unused) {
    (void)unused;
    return Py_NewRef(self->filled != NULL ? self->filled : Py_None);
}

static PyObject *request_sent_type(struct pc_request *self, void *unused) {
    (void)unused;
    return Py_NewRef(self->sent_type != NULL ? self->sent_type : Py_None);
}

static PyObject *request_gpu(struct pc_request *self, void *unused) {
    (void)unused;
    return Py_NewRef(self->gpu != NULL ? self->gpu : Py_None);
}

static void request_dealloc(struct pc_request *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
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
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyObject *request_go_on(struct pc_request *self, PyObject *unused) {
    (void)unused;
    if (pc_request_go_on(self) < 0)
        return NULL;
    Py_RETURN_NONE;
}

struct settling {
    struct pc_request *request;
    bool failed;
};

static void settle(pc_engine_object *engine, void *argument) {
    struct settling *settling = argument;
    (void)engine;
    if (settling->request->under_way)
        pc_request_end(settling->request, settling->failed ? PC_FAILED_IN_PYTHON : 0);
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
    struct settling settling = {self, failed != 0};
    pc_engine_do(self->messages->engine, settle, &settling);
    pc_engine_let_go(self->messages->engine);
    Py_RETURN_NONE;
}

static PyMethodDef request_methods[] = {
    {"wait", (PyCFunction)(void (*)(void))pc_request_wait_method, METH_FASTCALL | METH_KEYWORDS,
     "wait($self, timeout=None)\n--\n\nReturn the result, when the call is done. See "
     "pycoll.Request.wait."},
    {"test", (PyCFunction)request_test, METH_NOARGS,
     "Return whether the call is done, in whatever way; never waits."},
    {"_stop", (PyCFunction)request_stop, METH_NOARGS, "Stop a send, if that can be."},
    {"_give_up", (PyCFunction)request_give_up, METH_NOARGS,
     "Give it up: its memory is not used any more."},
    {"_withdraw", (PyCFunction)request_withdraw, METH_NOARGS,
     "Cancel a receive for which no message has come."},
    {"_watch", (PyCFunction)request_watch, METH_NOARGS,
     "Have an event at its end; False: it has ended."},
    {"_go_on", (PyCFunction)request_go_on, METH_NOARGS,
     "Go on with the message that it holds, if it does."},
    {"_settle", (PyCFunction)request_settle, METH_VARARGS,
     "_settle(result, failed): what Python went on with is done."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef request_values[] = {
    {"done", (getter)request_done, NULL,
     "Whether the call is done, as far as is known without looking.", NULL},
    {"result", (getter)request_result, NULL, "What the call returns. See pycoll.Request.result.",
     NULL},
    {"_description", (getter)request_description, NULL,
     "(kind, code of the dtype, peer, tag, shape).", NULL},
    {"_message", (getter)request_message, NULL,
     "(world rank, nbytes, header) of a message that was refused; or None.", NULL},
    {"_owner", (getter)request_owner, NULL, "What its communicator's `Messages` keeps.", NULL},
    {"_array", (getter)request_array, NULL, "The array that is sent or filled; or None.", NULL},
    {"_status", (getter)request_status, NULL, "0, or why it failed.", NULL},
    {"_filled", (getter)request_filled, NULL, "The Status to be filled in; or None.", NULL},
    {"_sent_type", (getter)request_sent_type, NULL, "The type of an object that is sent; or None.",
     NULL},
    {"_gpu", (getter)request_gpu, NULL,
     "The GPU on which a receive without `out` was started; or None.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef request_members[] = {
    {"_collected", T_BOOL, offsetof(struct pc_request, collected), 0,
     "a wait has returned its result"},
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
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .slots = request_slots,
};

void pc_request_types(PyTypeObject *request) { pc_request_type = request; }
