/* `_core.Both`: a receive and a send as one request, an isendrecv. Its result is what was
   received. */
#include "messages.h"

#include <structmember.h>

typedef struct {
    PyObject_HEAD
    struct pc_request *received, *sent; /* none of which refers to this */
    char collected;
} pc_both;

static PyTypeObject *both_type;

PyObject *pc_both_new(PyObject *type, struct pc_request *received, struct pc_request *sent) {
    pc_both *self = (pc_both *)((allocfunc)PyType_GetSlot((PyTypeObject *)type, Py_tp_alloc))(
        (PyTypeObject *)type, 0);
    if (self != NULL) {
        self->received = (struct pc_request *)Py_NewRef((PyObject *)received);
        self->sent = (struct pc_request *)Py_NewRef((PyObject *)sent);
    }
    return (PyObject *)self;
}

bool pc_both_parts(PyObject *object, struct pc_request **received, struct pc_request **sent) {
    if (!PyObject_TypeCheck(object, both_type))
        return false;
    *received = ((pc_both *)object)->received;
    *sent = ((pc_both *)object)->sent;
    return true;
}

static bool is_well(struct pc_request *request) {
    return pc_request_is_done(request) && request->status == 0;
}

static bool are_done(const pc_both *self) {
    return pc_request_is_done(self->received) && pc_request_is_done(self->sent);
}

char *pc_both_collected(PyObject *object) { return &((pc_both *)object)->collected; }

bool pc_both_is_done(PyObject *object) { return are_done((pc_both *)object); }

/* Whether one has failed while the other goes on: Python gives that one up, and then all is
   over. */
static bool is_torn(const pc_both *self) {
    return (pc_request_is_done(self->received) && !is_well(self->received)) ||
           (pc_request_is_done(self->sent) && !is_well(self->sent));
}

PyObject *pc_both_result(PyObject *object) {
    pc_both *self = (pc_both *)object;
    if (!is_well(self->received) || !is_well(self->sent))
        return PyObject_CallMethod(object, "_failed", NULL);
    self->collected = 1;
    return pc_request_result(self->received);
}

static PyObject *is_done(PyObject *object) {
    pc_both *self = (pc_both *)object;
    if (!are_done(self) && is_torn(self))
        return PyObject_CallMethod(object, "_is_over", NULL);
    return PyBool_FromLong(are_done(self));
}

PyObject *pc_both_wait_method(PyObject *object, PyObject *const *args, Py_ssize_t count,
                              PyObject *keywords) {
    pc_both *self = (pc_both *)object;
    uint64_t timeout_ns;
    PyObject *result = NULL;
    uint64_t default_ns = self->received->messages->context->op_timeout_ns;
    if (!pc_timeout_of_wait(args, count, keywords, default_ns, &timeout_ns)) {
        PyObject *slow = PyObject_GetAttrString(object, "_wait");
        result = slow != NULL ? pc_call_slow(slow, args, count, keywords) : NULL;
        Py_XDECREF(slow);
        return result;
    }
    struct pc_patience patience = pc_patience(timeout_ns);
    bool may_wait = are_done(self) || !self->received->messages->engine->python_busy;
    int done = may_wait ? pc_request_wait(self->received, patience.until_ns) : 0;
    if (done > 0 && is_well(self->received))
        done = pc_request_wait(self->sent, patience.until_ns);
    if (done < 0)
        return NULL;
    if (is_well(self->received) && is_well(self->sent))
        return pc_both_result(object);
    PyObject *left = pc_patience_left(&patience);
    result = left != NULL ? PyObject_CallMethod(object, "_wait", "O", left) : NULL;
    Py_XDECREF(left);
    return result;
}

static PyObject *both_test(pc_both *self, PyObject *unused) {
    (void)unused;
    pc_engine_object *engine = self->received->messages->engine;
    if (!are_done(self) && !engine->python_busy) {
        pc_engine_look(engine);
        if (pc_request_go_on(self->received) < 0 || pc_engine_hear(engine) < 0)
            return NULL;
    }
    return is_done((PyObject *)self);
}

static PyObject *both_done(PyObject *self, void *unused) {
    (void)unused;
    return is_done(self);
}

static PyObject *both_result(PyObject *self, void *unused) {
    (void)unused;
    return pc_both_result(self);
}

static PyObject *both_part(pc_both *self, void *sent) {
    return Py_NewRef((PyObject *)(sent != NULL ? self->sent : self->received));
}

static void both_dealloc(pc_both *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    Py_XDECREF((PyObject *)self->received);
    Py_XDECREF((PyObject *)self->sent);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyMethodDef both_methods[] = {
    {"wait", (PyCFunction)(void (*)(void))pc_both_wait_method, METH_FASTCALL | METH_KEYWORDS,
     "wait($self, timeout=None)\n--\n\nReturn the result, when both are done. See "
     "pycoll.Request.wait."},
    {"test", (PyCFunction)both_test, METH_NOARGS,
     "Return whether both are done, in whatever way; never waits."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef both_values[] = {
    {"done", both_done, NULL, "Whether both are done, or one has failed. See pycoll.Request.done.",
     NULL},
    {"result", both_result, NULL, "What was received. See pycoll.Request.result.", NULL},
    {"_received", (getter)both_part, NULL, "The receive.", NULL},
    {"_sent", (getter)both_part, NULL, "The send.", ""},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef both_members[] = {
    {"_collected", T_BOOL, offsetof(pc_both, collected), 0, "a wait has returned its result"},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot both_slots[] = {
    {Py_tp_dealloc, both_dealloc},
    {Py_tp_methods, both_methods},
    {Py_tp_getset, both_values},
    {Py_tp_members, both_members},
    {Py_tp_doc, "A receive and a send of the core's as one request."},
    {0, NULL},
};

PyType_Spec pc_both_spec = {
    .name = "pycoll._transports._core.Both",
    .basicsize = sizeof(pc_both),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .slots = both_slots,
};

bool pc_is_both_type(PyObject *type) { return PyType_IsSubtype((PyTypeObject *)type, both_type); }

void pc_both_type(PyTypeObject *both) { both_type = both; }
