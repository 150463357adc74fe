/* `_core.Both`: a receive and a send as one request, an isendrecv. Its result is what was
   received. */
#include "messages.h"

typedef struct {
    PC_STARTED_HEAD(pc_messages, messages)
    struct pc_request *received, *sent; /* none of which refers to this */
} pc_both;

static bool is_well(struct pc_request *request) {
    return pc_request_is_done(request) && request->status == 0;
}

static bool are_done(struct pc_started *started) {
    const pc_both *self = (pc_both *)started;
    return pc_request_is_done(self->received) && pc_request_is_done(self->sent);
}

/* If one has failed while the other goes on, Python gives that one up, and then all is over. */
static PyObject *done(struct pc_started *started) {
    const pc_both *self = (pc_both *)started;
    bool is_torn = (pc_request_is_done(self->received) && !is_well(self->received)) ||
                   (pc_request_is_done(self->sent) && !is_well(self->sent));
    if (!are_done(started) && is_torn)
        return PyObject_CallMethod((PyObject *)self, "_is_over", NULL);
    return PyBool_FromLong(are_done(started));
}

static int go_on(struct pc_started *self) { return pc_request_go_on(((pc_both *)self)->received); }

static int wait(struct pc_started *started, uint64_t until_ns) {
    const pc_both *self = (pc_both *)started;
    int status = pc_request_wait(self->received, until_ns);
    if (status > 0 && is_well(self->received))
        status = pc_request_wait(self->sent, until_ns);
    return status < 0 ? status : is_well(self->received) && is_well(self->sent);
}

static PyObject *result(struct pc_started *started) {
    const pc_both *self = (pc_both *)started;
    if (!is_well(self->received) || !is_well(self->sent))
        return PyObject_CallMethod((PyObject *)self, "_failed", NULL);
    started->collected = 1;
    return pc_request_result(self->received);
}

static const struct pc_started_ops both_ops = {
    .is_done = are_done, .done = done, .go_on = go_on, .wait = wait, .result = result};

PyObject *pc_both_new(struct pc_request *received, struct pc_request *sent) {
    pc_both *self =
        pc_started_new(received->messages->both_type, &both_ops, received->messages, false);
    if (self != NULL) {
        self->received = (struct pc_request *)Py_NewRef((PyObject *)received);
        self->sent = (struct pc_request *)Py_NewRef((PyObject *)sent);
    }
    return (PyObject *)self;
}

bool pc_both_parts(PyObject *object, struct pc_request **received, struct pc_request **sent) {
    if (!PyObject_TypeCheck(object, pc_both_type))
        return false;
    *received = ((pc_both *)object)->received;
    *sent = ((pc_both *)object)->sent;
    return true;
}

static PyObject *both_part(pc_both *self, void *sent) {
    return Py_NewRef((PyObject *)(sent != NULL ? self->sent : self->received));
}

static void both_dealloc(pc_both *self) {
    Py_XDECREF((PyObject *)self->received);
    Py_XDECREF((PyObject *)self->sent);
    Py_XDECREF((PyObject *)self->messages);
    pc_free(self);
}

static PyGetSetDef both_values[] = {
    {"_received", (getter)both_part, NULL, "The receive.", NULL},
    {"_sent", (getter)both_part, NULL, "The send.", ""},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot both_slots[] = {
    {Py_tp_dealloc, both_dealloc},
    {Py_tp_getset, both_values},
    {Py_tp_doc, "A receive and a send of the core's as one request."},
    {0, NULL},
};

PyType_Spec pc_both_spec = {
    .name = "pycoll._transports._core.Both",
    .basicsize = sizeof(pc_both),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = both_slots,
};
