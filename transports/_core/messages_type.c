/* `_core.Messages`: send, recv, isend and irecv of one communicator over the message engine.

   What is a contiguous NumPy array of a plain dtype, whatever its source, tag and status, is done here, and so is a
   receive that takes what comes. All else is handed with the same arguments to the Python methods, and what takes long
   is finished there. */
#include "request.h"

#include <stdlib.h>
#include <structmember.h>

static PyTypeObject *context_type;

/* --- requests ---------------------------------------------------------------------------------------- */

static struct pc_request *request_send(pc_messages *self, PyObject *x_object, const struct pc_array *x, long dest,
                                       long tag, enum pc_request_kind kind, bool is_blocking) {
    unsigned char header[LONGEST_HEADER_NBYTES];
    struct pc_request *request = pc_request_new(self, kind, is_blocking);
    if (request == NULL)
        return NULL;
    request->peer = (int)dest;
    request->tag = tag;
    request->dtype = x->dtype;
    request->ndim = x->ndim;
    for (int axis = 0; axis < x->ndim; axis++)
        request->dims[axis] = x->dims[axis];
    request->array = Py_NewRef(x_object);
    request->one = (struct iovec){x->data, x->nbytes};
    request->send.peer = self->members[dest];
    request->send.parts = &request->one;
    request->send.num_parts = 1;
    request->send.ended = pc_request_sent;
    request->send.owner = request;
    size_t header_nbytes = write_header(self->ident, x, tag, header);
    return pc_request_start(request, header, header_nbytes, kind == PC_SSEND ? PC_OFFER : PC_MAY_PUSH);
}

/* A receive into `out`, or without, of the array that was found there. */
static struct pc_request *request_receive(pc_messages *self, PyObject **values, const struct pc_array *out, long source,
                                          long tag, bool is_blocking) {
    struct pc_request *request = pc_request_new(self, PC_RECV, is_blocking);
    if (request == NULL)
        return NULL;
    struct pc_receive *receive = &request->receive;
    request->peer = (int)source;
    request->tag = tag;
    request->filled = is_none(values[STATUS]) ? NULL : Py_NewRef(values[STATUS]);
    receive->posted.queued.source = source == ANY ? PC_ANY : self->members[source];
    receive->posted.queued.tag = tag;
    receive->told = pc_request_received;
    receive->owner = request;
    receive->ask = is_none(values[OUT]);
    if (!receive->ask) {
        request->array = Py_NewRef(values[OUT]);
        receive->into = out->data;
        receive->room = out->nbytes;
        request->expects[0] = PC_FORM_ARRAY;
        request->expects[1] = (unsigned char)out->dtype;
        receive->expects = request->expects;
        receive->expects_nbytes = sizeof request->expects;
    } else if (!is_blocking) { /* it may be another thread that makes what this one would have */
        request->gpu = PyObject_CallNoArgs(self->here);
        if (request->gpu == NULL) {
            Py_DECREF((PyObject *)request);
            return NULL;
        }
    }
    return pc_request_start(request, NULL, 0, PC_BUFFER);
}

/* Wait for a request of a blocking call, which is let go; what takes long goes on in Python. */
static PyObject *finish(pc_messages *self, struct pc_request *request) {
    if (request == NULL)
        return NULL;
    int done = pc_request_wait(request, pc_drive_now_ns() + PC_SLICE_NS);
    PyObject *result = NULL;
    if (done > 0)
        result = pc_request_result(request);
    else if (done == 0)
        result = PyObject_CallFunctionObjArgs(self->slow[PC_SLOW_FINISH], (PyObject *)request, NULL);
    Py_DECREF((PyObject *)request);
    return result;
}

/* --- methods of communicators ------------------------------------------------------------------------ */

static bool may_start(const pc_messages *self) {
    const pc_engine_object *engine = self->engine;
    return PC_LIKELY(self->usable && !engine->engaged) &&
           atomic_load_explicit(&engine->drive.closed, memory_order_relaxed) == PC_DRIVE_OPEN &&
           (engine->host == NULL || !pc_host_failed(engine->shm.channel.host));
}

/* The arguments of a send that is done here; false: leave it to Python. */
static bool is_plain_send(const pc_messages *self, PyObject *const *args, Py_ssize_t count, PyObject *keywords,
                          PyObject **values, struct pc_array *x, long *dest, long *tag) {
    if (!may_start(self) || !parse(send_order, args, count, keywords, values) || values[X] == NULL ||
        values[SOURCE] != NULL || values[OUT] != NULL || values[STATUS] != NULL || !is_none(values[TIMEOUT]) ||
        !pc_array_view(values[X], x) || x->ndim > PC_NAMED_DIMS)
        return false;
    *dest = small_int(values[DEST], 0, -1);
    *tag = values[TAG] == NULL ? 0 : small_int(values[TAG], 0, -1);
    return *dest >= 0 && *dest < self->size && *tag >= 0;
}

static bool is_plain_receive(const pc_messages *self, PyObject *const *args, Py_ssize_t count, PyObject *keywords,
                             PyObject **values, struct pc_array *out, long *source, long *tag) {
    if (!may_start(self) || !parse(recv_order, args, count, keywords, values) || values[X] != NULL ||
        values[DEST] != NULL || !is_none(values[TIMEOUT]))
        return false;
    if (!is_none(values[OUT]) && (!pc_array_view(values[OUT], out) || !out->writeable))
        return false;
    if (!is_none(values[STATUS]) && Py_TYPE(values[STATUS]) != (PyTypeObject *)self->status_type)
        return false;
    *source = values[SOURCE] == NULL ? ANY : small_int(values[SOURCE], ANY, -2);
    *tag = values[TAG] == NULL ? ANY : small_int(values[TAG], ANY, -2);
    return *source >= ANY && *source < self->size && *tag >= ANY;
}

static PyObject *start_isend(pc_messages *self, PyObject *const *args, Py_ssize_t count, PyObject *keywords,
                             enum pc_request_kind kind, PyObject *slow) {
    PyObject *values[ARGUMENTS] = {NULL};
    struct pc_array x;
    long dest, tag;
    if (is_plain_send(self, args, count, keywords, values, &x, &dest, &tag) && values[TIMEOUT] == NULL)
        return (PyObject *)request_send(self, values[X], &x, dest, tag, kind, false);
    return pc_call_slow(slow, args, count, keywords);
}

static PyObject *messages_isend(pc_messages *self, PyObject *const *args, Py_ssize_t count, PyObject *keywords) {
    return start_isend(self, args, count, keywords, PC_SEND, self->slow[PC_SLOW_ISEND]);
}

static PyObject *messages_issend(pc_messages *self, PyObject *const *args, Py_ssize_t count, PyObject *keywords) {
    return start_isend(self, args, count, keywords, PC_SSEND, self->slow[PC_SLOW_ISSEND]);
}

static PyObject *do_send(pc_messages *self, PyObject *const *args, Py_ssize_t count, PyObject *keywords,
                         enum pc_request_kind kind, PyObject *slow) {
    PyObject *values[ARGUMENTS] = {NULL};
    struct pc_array x;
    long dest, tag;
    if (!is_plain_send(self, args, count, keywords, values, &x, &dest, &tag))
        return pc_call_slow(slow, args, count, keywords);
    return finish(self, request_send(self, values[X], &x, dest, tag, kind, true));
}

static PyObject *messages_send(pc_messages *self, PyObject *const *args, Py_ssize_t count, PyObject *keywords) {
    return do_send(self, args, count, keywords, PC_SEND, self->slow[PC_SLOW_SEND]);
}

static PyObject *messages_ssend(pc_messages *self, PyObject *const *args, Py_ssize_t count, PyObject *keywords) {
    return do_send(self, args, count, keywords, PC_SSEND, self->slow[PC_SLOW_SSEND]);
}

static PyObject *messages_irecv(pc_messages *self, PyObject *const *args, Py_ssize_t count, PyObject *keywords) {
    PyObject *values[ARGUMENTS] = {NULL};
    struct pc_array out;
    long source, tag;
    if (!is_plain_receive(self, args, count, keywords, values, &out, &source, &tag) || values[TIMEOUT] != NULL)
        return pc_call_slow(self->slow[PC_SLOW_IRECV], args, count, keywords);
    return (PyObject *)request_receive(self, values, &out, source, tag, false);
}

static PyObject *messages_recv(pc_messages *self, PyObject *const *args, Py_ssize_t count, PyObject *keywords) {
    PyObject *values[ARGUMENTS] = {NULL};
    struct pc_array out;
    long source, tag;
    if (!is_plain_receive(self, args, count, keywords, values, &out, &source, &tag))
        return pc_call_slow(self->slow[PC_SLOW_RECV], args, count, keywords);
    return finish(self, request_receive(self, values, &out, source, tag, true));
}

static PyObject *messages_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *context, *members, *owner, *request, *status, *here, *slow;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "O!OOOOOO", context_type, &context, &members, &owner, &request, &status, &here,
                          &slow))
        return NULL;
    Py_ssize_t size = PySequence_Size(members);
    if (size < 0 || PySequence_Size(slow) != PC_NUM_SLOW || !PyType_Check(request) ||
        !PyType_IsSubtype((PyTypeObject *)request, pc_request_type)) {
        PyErr_SetString(PyExc_TypeError, "arguments are context, members, owner, request, status, here, slow");
        return NULL;
    }
    pc_messages *self = (pc_messages *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
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
    self->status_type = Py_NewRef(status);
    self->here = Py_NewRef(here);
    if (self->members == NULL || self->ranks == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    memset(self->ranks, -1, (size_t)self->engine->engine.size * sizeof *self->ranks);
    for (int rank = 0; rank < self->size; rank++) {
        PyObject *number = PySequence_GetItem(members, rank);
        self->members[rank] = number != NULL ? (int)PyLong_AsLong(number) : -1;
        Py_XDECREF(number);
        if (!PyErr_Occurred() && (self->members[rank] < 0 || self->members[rank] >= self->engine->engine.size))
            PyErr_SetString(PyExc_ValueError, "there is no such rank");
        if (PyErr_Occurred()) {
            Py_DECREF(self);
            return NULL;
        }
        self->ranks[self->members[rank]] = rank;
    }
    for (int index = 0; index < PC_NUM_SLOW; index++)
        self->slow[index] = PySequence_GetItem(slow, index);
    return (PyObject *)self;
}

static int messages_traverse(pc_messages *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->owner);
    for (int index = 0; index < PC_NUM_SLOW; index++)
        Py_VISIT(self->slow[index]);
    return 0;
}

static int messages_clear(pc_messages *self) {
    Py_CLEAR(self->owner);
    for (int index = 0; index < PC_NUM_SLOW; index++)
        Py_CLEAR(self->slow[index]);
    return 0;
}

static void messages_dealloc(pc_messages *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    PyObject_GC_UnTrack(self);
    messages_clear(self);
    Py_XDECREF((PyObject *)self->context);
    Py_XDECREF(self->type);
    Py_XDECREF(self->status_type);
    Py_XDECREF(self->here);
    free(self->members);
    free(self->ranks);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

#define METHOD(name, signature)                                                                    \
    {#name, (PyCFunction)(void (*)(void))messages_##name, METH_FASTCALL | METH_KEYWORDS,           \
     #name "($self, " signature ")\n--\n\nSee pycoll.Communicator." #name "."}

static PyMethodDef messages_methods[] = {
    METHOD(send, "x, dest, tag=0, *, timeout=None"),
    METHOD(ssend, "x, dest, tag=0, *, timeout=None"),
    METHOD(recv, "source=-1, tag=-1, out=None, status=None, *, timeout=None"),
    METHOD(isend, "x, dest, tag=0"),
    METHOD(issend, "x, dest, tag=0"),
    METHOD(irecv, "source=-1, tag=-1, out=None, status=None"),
    {NULL, NULL, 0, NULL},
};

static PyMemberDef messages_members[] = {
    {"usable", T_BOOL, offsetof(pc_messages, usable), 0, "whether anything is done here"},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot messages_slots[] = {
    {Py_tp_new, messages_new},
    {Py_tp_dealloc, messages_dealloc},
    {Py_tp_traverse, messages_traverse},
    {Py_tp_clear, messages_clear},
    {Py_tp_methods, messages_methods},
    {Py_tp_members, messages_members},
    {Py_tp_doc,
     "Messages(context, members, owner, request, status, here, slow)\n\n"
     "send, recv and their twins of one communicator, in the core. `request` is a subclass of `Request`, `status` that of "
     "what recv fills in; `here` returns the GPU on which a thread works, or None; `slow` are the methods to which all else goes: send, ssend, recv, isend, issend, irecv; and "
     "`finish(request)`, which waits for one that takes long, and returns its result."},
    {0, NULL},
};

PyType_Spec pc_messages_spec = {
    .name = "pycoll.transports._core.Messages",
    .basicsize = sizeof(pc_messages),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = messages_slots,
};

void pc_messages_types(PyTypeObject *context) { context_type = context; }
