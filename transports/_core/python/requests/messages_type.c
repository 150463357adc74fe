/* `_core.Messages`: point to point of one communicator over the message engine.

   Arrays of NumPy's that are contiguous and of a plain dtype are sent and received here, and so are
   objects; Python pickles those that `pickles.h` does not know. All else is handed with the same
   arguments to the Python methods, and what takes long is finished there. */
#include "messages.h"

#include <stdlib.h>

static const signed char send_order[] = {X, DEST, TAG, -1, TIMEOUT, -1},
                         recv_order[] = {SOURCE, TAG, OUT, STATUS, -1, TIMEOUT, -1},
                         sendrecv_order[] = {X,   DEST,   SOURCE, SENDTAG, RECVTAG,
                                             OUT, STATUS, -1,     TIMEOUT, -1},
                         probe_order[] = {SOURCE, TAG, -1, TIMEOUT, -1};

/* A blocking send without a deadline will never be taken back. */
static enum pc_way way_of(uint64_t timeout_ns) {
    return timeout_ns == PC_FOR_EVER ? PC_MAY_PUSH : PC_BUFFER;
}

static bool overlap(const struct pc_array *one, const struct pc_array *other) {
    const char *first = one->data, *second = other->data;
    return first < second + other->nbytes && second < first + one->nbytes;
}

/* As of `pc_outgoing_of`. */
static int read_send(pc_messages *self, PyObject *const *args, Py_ssize_t count,
                     PyObject *keywords, bool is_blocking, struct pc_outgoing *outgoing,
                     uint64_t *timeout_ns) {
    PyObject *values[ARGUMENTS] = {NULL};
    if (!pc_messages_may_start(self) || !parse(send_order, args, count, keywords, values) ||
        !pc_timeout(values[TIMEOUT], self->context->op_timeout_ns, timeout_ns) ||
        (!is_blocking && values[TIMEOUT] != NULL))
        return 0;
    return pc_outgoing_of(self, values[X], values[DEST], values[TAG], NULL, outgoing);
}

/* What does not leave at once Python copies. */
static PyObject *messages_bsend(pc_messages *self, PyObject *const *args, Py_ssize_t count,
                                PyObject *keywords) {
    struct pc_outgoing outgoing;
    uint64_t timeout_ns;
    int plain = read_send(self, args, count, keywords, true, &outgoing, &timeout_ns);
    bool is_posted = plain > 0 && pc_messages_post(self, &outgoing);
    if (plain > 0) {
        pc_outgoing_release(&outgoing);
        pc_views_release(outgoing.views);
    }
    if (is_posted)
        Py_RETURN_NONE;
    return plain >= 0 ? pc_call_method(self->slow, "bsend", args, count, keywords) : NULL;
}

static PyObject *do_send(pc_messages *self, PyObject *const *args, Py_ssize_t count,
                         PyObject *keywords, enum pc_request_kind kind, bool is_blocking,
                         const char *name) {
    struct pc_outgoing outgoing;
    uint64_t timeout_ns;
    int plain = read_send(self, args, count, keywords, is_blocking, &outgoing, &timeout_ns);
    if (plain <= 0)
        return plain == 0 ? pc_call_method(self->slow, name, args, count, keywords) : NULL;
    if (is_blocking && kind == PC_SEND && pc_messages_post(self, &outgoing)) {
        pc_outgoing_release(&outgoing);
        pc_views_release(outgoing.views);
        Py_RETURN_NONE;
    }
    enum pc_way way = is_blocking ? way_of(timeout_ns) : PC_MAY_PUSH;
    struct pc_request *request = pc_messages_send(self, &outgoing, kind, is_blocking, way);
    pc_outgoing_release(&outgoing); /* which the request keeps */
    return is_blocking ? pc_messages_finish(self, request, timeout_ns) : (PyObject *)request;
}

/* What has come, in bytes, by the bytes of an element; -1 with an exception. */
static Py_ssize_t elements_of(PyObject *status, PyObject *out) {
    PyObject *nbytes = PyObject_GetAttrString(status, "nbytes");
    PyObject *itemsize = PyObject_GetAttrString(out, "itemsize");
    Py_ssize_t count = -1;
    if (nbytes != NULL && itemsize != NULL)
        count = PyLong_AsSsize_t(nbytes) / PyLong_AsSsize_t(itemsize);
    Py_XDECREF(nbytes);
    Py_XDECREF(itemsize);
    return count;
}

/* Copy as many elements as have come from what stands in for `out`, an array of NumPy's, to it:
   others may have written to the rest. Returns `out`; NULL with an exception. */
static PyObject *filled(PyObject *out, PyObject *stand_in, PyObject *status) {
    Py_ssize_t count = elements_of(status, out);
    PyObject *size = count >= 0 ? PyObject_GetAttrString(out, "size") : NULL;
    bool is_all = size != NULL && PyLong_AsSsize_t(size) == count;
    Py_XDECREF(size);
    if (is_all) /* at once: `flat` goes from element to element */
        return pc_filled(out, stand_in);
    PyObject *to = size != NULL ? PyObject_GetAttrString(out, "flat") : NULL;
    PyObject *from = to != NULL ? PyObject_GetAttrString(stand_in, "flat") : NULL;
    PyObject *part = from != NULL ? PySequence_GetSlice(from, 0, count) : NULL;
    bool is_well = part != NULL && PySequence_SetSlice(to, 0, count, part) == 0;
    Py_XDECREF(to);
    Py_XDECREF(from);
    Py_XDECREF(part);
    return is_well ? Py_NewRef(out) : NULL;
}

/* What stands in for `out`: for an array of NumPy's that is not contiguous, or at which Python
   looks. */
static bool stands_in(pc_messages *self, PyObject **values, PyObject *tag, PyObject *x,
                      struct pc_incoming_call *incoming) {
    PyObject *out = values[OUT], *status = values[STATUS];
    if (is_none(out) || PyErr_Occurred() || !(pc_is_numpy_array(out) || pc_is_viewed(out)))
        return false;
    incoming->stand_in = pc_target_stand_in(out, x, &incoming->is_copy);
    if (incoming->stand_in == NULL)
        return false;
    incoming->own_status =
        is_none(status) ? PyObject_CallNoArgs(self->status_type) : Py_NewRef(status);
    return incoming->own_status != NULL && pc_messages_may_start(self) &&
           pc_incoming_of(self, values[SOURCE], tag, incoming->stand_in, incoming->own_status,
                          incoming);
}

/* As of `pc_incoming_of`, for a receive that blocks also into what needs a stand-in; `x`: what is
   read meanwhile, or NULL. It must be released in any case. */
static inline bool incoming_of(pc_messages *self, PyObject **values, PyObject *tag, PyObject *x,
                               bool is_blocking, struct pc_incoming_call *incoming) {
    return pc_incoming_of(self, values[SOURCE], tag, values[OUT], values[STATUS], incoming) ||
           (is_blocking && stands_in(self, values, tag, x, incoming));
}

/* Release it; and if what was received stands in for `out`, return that for it. */
static PyObject *delivered(struct pc_incoming_call *incoming, PyObject *out, PyObject *value) {
    if (value != NULL && value == incoming->stand_in) {
        Py_DECREF(value);
        value = incoming->is_copy ? filled(out, incoming->stand_in, incoming->own_status)
                                  : Py_NewRef(out);
    }
    pc_memory_release(&incoming->array);
    if (incoming->stand_in == NULL)
        return value;
    Py_DECREF(incoming->stand_in);
    Py_XDECREF(incoming->own_status);
    return value;
}

static PyObject *receive(pc_messages *self, const struct pc_incoming_call *incoming,
                         bool is_blocking, uint64_t timeout_ns) {
    PyObject *value = is_blocking ? pc_messages_take(self, incoming) : NULL;
    if (value != NULL || PyErr_Occurred())
        return value;
    struct pc_request *request = pc_messages_receive(self, incoming, PC_RECV, is_blocking);
    return is_blocking ? pc_messages_finish(self, request, timeout_ns) : (PyObject *)request;
}

static PyObject *do_receive(pc_messages *self, PyObject *const *args, Py_ssize_t count,
                            PyObject *keywords, bool is_blocking, const char *name) {
    PyObject *values[ARGUMENTS] = {NULL}, *value = NULL;
    struct pc_incoming_call incoming;
    uint64_t timeout_ns;
    incoming.array.held.obj = NULL;
    incoming.stand_in = incoming.own_status = NULL;
    bool plain = pc_messages_may_start(self) && parse(recv_order, args, count, keywords, values) &&
                 pc_timeout(values[TIMEOUT], self->context->op_timeout_ns, &timeout_ns) &&
                 (is_blocking || values[TIMEOUT] == NULL) &&
                 incoming_of(self, values, values[TAG], NULL, is_blocking, &incoming);
    if (plain)
        value = receive(self, &incoming, is_blocking, timeout_ns);
    value = delivered(&incoming, values[OUT], value); /* the memory a request keeps */
    if (plain || PyErr_Occurred())
        return value;
    return pc_call_method(self->slow, name, args, count, keywords);
}

/* The requests of a receive and a send at the same time; false: there is an exception. */
static bool start_both(pc_messages *self, const struct pc_incoming_call *incoming,
                       struct pc_outgoing *outgoing, bool is_blocking, enum pc_way way,
                       struct pc_request **received, struct pc_request **sent) {
    *received = pc_messages_receive(self, incoming, PC_RECV, is_blocking);
    if (*received == NULL) {
        pc_views_release(outgoing->views);
        return false;
    }
    *sent = pc_messages_send(self, outgoing, PC_SEND, is_blocking, way);
    if (*sent != NULL)
        return true;
    pc_started_give_up((struct pc_started *)*received);
    Py_DECREF((PyObject *)*received);
    return false;
}

/* The receive of a sendrecv whose message was posted. */
static PyObject *receive_after(pc_messages *self, const struct pc_incoming_call *incoming,
                               const struct pc_outgoing *posted, uint64_t timeout_ns) {
    PyObject *value = pc_messages_take(self, incoming);
    struct pc_request *received = NULL;
    if (value == NULL && !PyErr_Occurred())
        received = pc_messages_receive(self, incoming, PC_RECV, true);
    return received != NULL ? pc_messages_finish_posted(self, received, posted, timeout_ns) : value;
}

/* What is received over what is sent is left to Python. */
static PyObject *do_both(pc_messages *self, PyObject *const *args, Py_ssize_t count,
                         PyObject *keywords, bool is_blocking, const char *name) {
    PyObject *values[ARGUMENTS] = {NULL};
    struct pc_outgoing outgoing = {0};
    struct pc_incoming_call incoming = {0};
    uint64_t timeout_ns;
    int plain = pc_messages_may_start(self) &&
                parse(sendrecv_order, args, count, keywords, values) &&
                pc_timeout(values[TIMEOUT], self->context->op_timeout_ns, &timeout_ns) &&
                (is_blocking || values[TIMEOUT] == NULL) &&
                values[OUT] != values[X] &&
                incoming_of(self, values, values[RECVTAG], values[X], is_blocking, &incoming);
    if (plain)
        plain = pc_outgoing_of(self, values[X], values[DEST], values[SENDTAG], incoming.out,
                               &outgoing);
    if (plain > 0 && incoming.out != NULL &&
        (outgoing.views != NULL || overlap(&outgoing.array, &incoming.array))) {
        pc_views_release(outgoing.views);
        plain = 0;
    }
    PyObject *value = NULL;
    struct pc_request *one, *other;
    if (plain > 0 && is_blocking && pc_messages_post(self, &outgoing)) {
        pc_views_release(outgoing.views);
        value = receive_after(self, &incoming, &outgoing, timeout_ns);
    } else if (plain > 0) {
        enum pc_way way = is_blocking ? way_of(timeout_ns) : PC_MAY_PUSH;
        bool started = start_both(self, &incoming, &outgoing, is_blocking, way, &one, &other);
        if (started && is_blocking) {
            value = pc_messages_finish_both(self, one, other, timeout_ns);
        } else if (started) {
            value = pc_both_new(one, other);
            Py_DECREF((PyObject *)one);
            Py_DECREF((PyObject *)other);
        }
    }
    pc_outgoing_release(&outgoing); /* which the requests keep, and what is received */
    value = delivered(&incoming, values[OUT], value);
    if (plain != 0 || PyErr_Occurred())
        return value;
    return pc_call_method(self->slow, name, args, count, keywords);
}

#define CALL(name, made_by, ...)                                                            \
    static PyObject *messages_##name(pc_messages *self, PyObject *const *args,              \
                                     Py_ssize_t count, PyObject *keywords) {                \
        return made_by(self, args, count, keywords, __VA_ARGS__, #name);                    \
    }
CALL(send, do_send, PC_SEND, true)
CALL(ssend, do_send, PC_SSEND, true)
CALL(isend, do_send, PC_SEND, false)
CALL(issend, do_send, PC_SSEND, false)
CALL(recv, do_receive, true)
CALL(irecv, do_receive, false)
CALL(sendrecv, do_both, true)
CALL(isendrecv, do_both, false)

/* The request of a probe; NULL with an exception, or without one: leave it to Python. */
static struct pc_request *start_probe(pc_messages *self, PyObject *const *args, Py_ssize_t count,
                                      PyObject *keywords, uint64_t *timeout_ns, bool has_timeout) {
    PyObject *values[ARGUMENTS] = {NULL};
    struct pc_incoming_call incoming;
    if (!pc_messages_may_start(self) || !parse(probe_order, args, count, keywords, values) ||
        (!has_timeout && values[TIMEOUT] != NULL) ||
        !pc_timeout(values[TIMEOUT], self->context->op_timeout_ns, timeout_ns) ||
        !pc_incoming_of(self, values[SOURCE], values[TAG], NULL, NULL, &incoming))
        return NULL;
    if (!has_timeout)
        pc_engine_look(self->engine);
    return pc_messages_receive(self, &incoming, PC_PROBE, true);
}

static PyObject *messages_probe(pc_messages *self, PyObject *const *args, Py_ssize_t count,
                                PyObject *keywords) {
    uint64_t timeout_ns;
    struct pc_request *request = start_probe(self, args, count, keywords, &timeout_ns, true);
    if (request == NULL)
        return PyErr_Occurred() ? NULL : pc_call_method(self->slow, "probe", args, count, keywords);
    return pc_messages_finish(self, request, timeout_ns);
}

/* Who asks again and again does not wait anywhere: Python looks now and then, also at what the
   launcher tells. */
#define LOOK_NS 2000000u

static PyObject *messages_iprobe(pc_messages *self, PyObject *const *args, Py_ssize_t count,
                                 PyObject *keywords) {
    uint64_t timeout_ns;
    struct pc_request *request = start_probe(self, args, count, keywords, &timeout_ns, false);
    if (request == NULL)
        return PyErr_Occurred() ? NULL
                                : pc_call_method(self->slow, "iprobe", args, count, keywords);
    PyObject *result;
    uint64_t now = pc_now_ns();
    if (pc_request_is_done(request) || !pc_started_give_up((struct pc_started *)request)) {
        result = pc_request_result(request);
    } else if (now - self->looked_ns > LOOK_NS) {
        self->looked_ns = now;
        result = pc_call_method(self->slow, "iprobe", args, count, keywords);
    } else {
        result = Py_NewRef(Py_None);
    }
    Py_DECREF((PyObject *)request);
    return result;
}

static PyObject *messages_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    PyObject *context, *members, *owner, *request, *both, *status, *values, *slow;
    if (!PyArg_ParseTuple(args, "O!OOO!O!OO!O", pc_context_type, &context, &members, &owner,
                          &PyType_Type, &request, &PyType_Type, &both, &status, &PyTuple_Type,
                          &values, &slow))
        return NULL;
    Py_ssize_t size = PySequence_Size(members);
    if (size < 0 || PyTuple_Size(values) != 3 ||
        !PyType_IsSubtype((PyTypeObject *)request, pc_request_type) ||
        !PyType_IsSubtype((PyTypeObject *)both, pc_both_type)) {
        PyErr_SetString(PyExc_TypeError, "arguments are context, members, owner, request, both, "
                                         "status, values, slow");
        return NULL;
    }
    pc_messages *self = pc_new(type);
    if (self == NULL)
        return NULL;
    self->context = (pc_context_object *)Py_NewRef(context);
    self->engine = self->context->engine;
    self->ident = self->context->context != NULL ? self->context->context->ident : 0;
    self->size = (int)size;
    self->members = calloc((size_t)size + 1, sizeof *self->members);
    self->ranks = malloc((size_t)self->engine->engine.size * sizeof *self->ranks);
    self->owner = Py_NewRef(owner);
    self->type = Py_NewRef(request);
    self->both_type = Py_NewRef(both);
    self->status_type = Py_NewRef(status);
    self->dump = Py_NewRef(PyTuple_GetItem(values, 0));
    self->new_bytes = Py_NewRef(PyTuple_GetItem(values, 1));
    self->here = Py_NewRef(PyTuple_GetItem(values, 2));
    if (self->members == NULL || self->ranks == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    memset(self->ranks, -1, (size_t)self->engine->engine.size * sizeof *self->ranks);
    if (!pc_read_ranks(members, size, 0, self->engine->engine.size - 1, self->members)) {
        Py_DECREF(self);
        return NULL;
    }
    for (int rank = 0; rank < self->size; rank++)
        self->ranks[self->members[rank]] = rank;
    self->slow = Py_NewRef(slow);
    return (PyObject *)self;
}

static int messages_traverse(pc_messages *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->owner);
    Py_VISIT(self->slow);
    return 0;
}

static int messages_clear(pc_messages *self) {
    Py_CLEAR(self->owner);
    Py_CLEAR(self->slow);
    return 0;
}

static void messages_dealloc(pc_messages *self) {
    PyObject_GC_UnTrack(self);
    messages_clear(self);
    Py_XDECREF((PyObject *)self->context);
    Py_XDECREF(self->type);
    Py_XDECREF(self->both_type);
    Py_XDECREF(self->status_type);
    Py_XDECREF(self->dump);
    Py_XDECREF(self->new_bytes);
    Py_XDECREF(self->here);
    free(self->members);
    free(self->ranks);
    pc_free(self);
}

#define METHOD(name, signature)                                                                    \
    {#name, (PyCFunction)(void (*)(void))messages_##name, METH_FASTCALL | METH_KEYWORDS,           \
     #name "($self, " signature ")\n--\n\nSee pycoll.Communicator." #name "."}

static PyMethodDef messages_methods[] = {
    METHOD(send, "x, dest, tag=0, *, timeout=None"),
    METHOD(ssend, "x, dest, tag=0, *, timeout=None"),
    METHOD(bsend, "x, dest, tag=0, *, timeout=None"),
    METHOD(recv, "source=-1, tag=-1, out=None, status=None, *, timeout=None"),
    METHOD(isend, "x, dest, tag=0"),
    METHOD(issend, "x, dest, tag=0"),
    METHOD(irecv, "source=-1, tag=-1, out=None, status=None"),
    METHOD(sendrecv,
           "x, dest, source=-1, sendtag=0, recvtag=-1, out=None, status=None, *, timeout=None"),
    METHOD(isendrecv, "x, dest, source=-1, sendtag=0, recvtag=-1, out=None, status=None"),
    METHOD(probe, "source=-1, tag=-1, *, timeout=None"),
    METHOD(iprobe, "source=-1, tag=-1"),
    {NULL, NULL, 0, NULL},
};

static PyType_Slot messages_slots[] = {
    {Py_tp_new, messages_new},
    {Py_tp_dealloc, messages_dealloc},
    {Py_tp_traverse, messages_traverse},
    {Py_tp_clear, messages_clear},
    {Py_tp_methods, messages_methods},
    {Py_tp_doc,
     "Messages(context, members, owner, request, both, status, values, slow)\n\n"
     "Point to point of one communicator, in the core. `request` is a subclass of `Request`, "
     "`both` one of `Both`, `status` that of what recv fills in. `values` are functions: "
     "dump(object) -> its parts, or None if it is none; new_bytes(length) -> memory; here() -> the "
     "GPU on which a thread works, or None. `slow(name)` returns the "
     "method to which all else goes: send, ssend, bsend, recv, isend, issend, irecv, sendrecv, "
     "isendrecv, probe, iprobe; finish(request, seconds), which waits for one that takes long, and "
     "returns its result; and finish_both(received, sent, seconds), which does that for two, or of "
     "a message that has left, for the receive: then `sent` is (dest, tag)."},
    {0, NULL},
};

PyType_Spec pc_messages_spec = {
    .name = "pycoll.Communicator", /* what the repr of its methods says to users */
    .basicsize = sizeof(pc_messages),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = messages_slots,
};
