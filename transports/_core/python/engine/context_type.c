/* `_core.Context`: one communicator's receives and collective calls, for Python. See
   engine_type.h. */
#include "engine_type.h"
#include "python/arguments/timeout.h"

#include <stdlib.h>
#include <string.h>
#include <structmember.h>

static PyTypeObject *engine_type;
PyTypeObject *pc_context_type;

struct opening {
    uint64_t ident;
    int *members, me;
    size_t num_members;
    struct pc_context *context;
};

static void open_context(pc_engine_object *self, void *argument) {
    struct opening *opening = argument;
    opening->context = pc_context_open(&self->engine, opening->ident, opening->members,
                                       opening->num_members, opening->me);
}

static PyObject *context_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *engine, *members;
    unsigned long long ident;
    struct opening opening = {0};
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "O!KOi", engine_type, &engine, &ident, &members, &opening.me))
        return NULL;
    Py_ssize_t count = PySequence_Size(members);
    opening.ident = ident;
    opening.num_members = count > 0 ? (size_t)count : 0;
    opening.members = calloc(opening.num_members + 1, sizeof *opening.members);
    if (opening.members == NULL)
        return PyErr_NoMemory();
    for (Py_ssize_t index = 0; index < count; index++) {
        PyObject *number = PySequence_GetItem(members, index);
        opening.members[index] = number != NULL ? (int)PyLong_AsLong(number) : 0;
        Py_XDECREF(number);
    }
    pc_context_object *self = NULL;
    if (!PyErr_Occurred())
        self = (pc_context_object *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self != NULL) {
        self->engine = (pc_engine_object *)Py_NewRef((PyObject *)engine);
        bool done = pc_engine_do(self->engine, open_context, &opening);
        self->context = opening.context;
        self->op_timeout_ns = PC_FOR_EVER;
        if (!done || opening.context == NULL) {
            Py_CLEAR(self);
            if (done)
                PyErr_NoMemory();
            else
                pc_engine_is_closed();
        }
    }
    free(opening.members);
    return (PyObject *)self;
}

static void close_context(pc_engine_object *engine, void *argument) {
    pc_context_object *self = argument;
    (void)engine;
    if (self->context == NULL)
        return;
    self->num_calls = self->context->next_call;
    pc_context_close(self->context);
    self->context = NULL;
}

static void break_context(pc_engine_object *engine, void *argument) {
    pc_context_object *self = argument;
    (void)engine;
    if (self->context != NULL)
        pc_context_break(self->context, PC_BROKEN);
}

static PyObject *context_close(pc_context_object *self, PyObject *unused) {
    (void)unused;
    pc_engine_do(self->engine, close_context, self);
    Py_RETURN_NONE;
}

static PyObject *context_break(pc_context_object *self, PyObject *unused) {
    (void)unused;
    pc_engine_do(self->engine, break_context, self);
    Py_RETURN_NONE;
}

static void context_dealloc(pc_context_object *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    if (self->context != NULL)
        pc_engine_do(self->engine, close_context, self);
    Py_XDECREF((PyObject *)self->engine);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

struct posting {
    pc_context_object *context;
    struct pc_py_item *item;
    int64_t number;
    bool by_address, is_open;
    struct pc_py_item *adopted; /* it waits there already */
};

static void post(pc_engine_object *engine, void *argument) {
    struct posting *posting = argument;
    struct pc_context *context = posting->context->context;
    posting->is_open = context != NULL;
    if (context == NULL)
        return;
    posting->item->context =
        posting->by_address || posting->item->receive.posted.peek ? NULL : context;
    struct pc_py_item *item = posting->item;
    item->is_quiet = true;
    if (posting->number >= 0 &&
        (posting->adopted = pc_item_adopt(engine, context, (uint64_t)posting->number)) != NULL)
        item = posting->adopted;
    else if (posting->by_address)
        pc_collect_start(context, &item->receive);
    else if (posting->number < 0)
        pc_receive_start(context, &item->receive);
    else
        pc_receive_start_at(context, &item->receive, (uint64_t)posting->number);
    item->is_quiet = false;
    (void)pc_item_taken(item);
}

/* Takes the reference to the handle. */
static PyObject *post_it(struct posting *posting, PyObject *handle) {
    if (pc_engine_do(posting->context->engine, post, posting) && posting->is_open) {
        if (posting->adopted != NULL)
            pc_item_swap(handle, posting->adopted);
        return handle;
    }
    Py_DECREF(handle);
    return pc_engine_is_closed();
}

static PyObject *context_post(pc_context_object *self, PyObject *args) {
    struct posting posting = {.context = self, .number = -1};
    int source, peek = 0, for_message = 0;
    long long tag, number = -1;
    int dtype = -1;
    Py_ssize_t room = 0;
    if (!PyArg_ParseTuple(args, "iL|pLinp", &source, &tag, &peek, &number, &dtype, &room,
                          &for_message))
        return NULL;
    PyObject *handle = pc_item_new_receive(self->engine, &posting.item);
    if (handle == NULL)
        return NULL;
    struct pc_py_item *item = posting.item;
    item->receive.posted.queued.source = source;
    item->receive.posted.queued.tag = tag;
    item->receive.posted.peek = peek != 0;
    item->for_message = for_message != 0;
    if (dtype >= 0) {
        item->expects[1] = (unsigned char)dtype; /* after the form: an array */
        item->receive.expects = item->expects;
        item->receive.expects_nbytes = sizeof item->expects;
        item->receive.room = (size_t)room;
    }
    posting.number = number;
    return post_it(&posting, handle);
}

static PyObject *context_collect(pc_context_object *self, PyObject *args) {
    struct posting posting = {.context = self, .number = -1};
    unsigned long long call;
    unsigned subcall, sender, index;
    if (!PyArg_ParseTuple(args, "KIII", &call, &subcall, &sender, &index))
        return NULL;
    if (sender >= (unsigned)self->engine->engine.size || subcall > UINT16_MAX) {
        PyErr_SetString(PyExc_ValueError, "there is no such address");
        return NULL;
    }
    PyObject *handle = pc_item_new_receive(self->engine, &posting.item);
    if (handle == NULL)
        return NULL;
    posting.by_address = true;
    posting.item->receive.address = (struct pc_addressed){
        .call = call, .subcall = (uint16_t)subcall, .sender = sender, .index = index};
    return post_it(&posting, handle);
}

/* --- calls ------------------------------------------------------------------------------------ */

struct calling {
    pc_context_object *context;
    const char *text;
    Py_ssize_t nbytes;
    int64_t number;
    bool is_open;
};

static void begin_call(pc_engine_object *engine, void *argument) {
    struct calling *calling = argument;
    struct pc_context *context = calling->context->context;
    (void)engine;
    calling->is_open = context != NULL;
    if (context == NULL)
        return;
    struct pc_called *call = pc_context_begin(context, calling->text, (size_t)calling->nbytes);
    calling->number = call != NULL ? (int64_t)call->number : -1;
}

static PyObject *context_begin(pc_context_object *self, PyObject *text) {
    struct calling calling = {.context = self};
    if (PyBytes_AsStringAndSize(text, (char **)&calling.text, &calling.nbytes) < 0)
        return NULL;
    if (!pc_engine_do(self->engine, begin_call, &calling) || !calling.is_open)
        return pc_engine_is_closed();
    return calling.number >= 0 ? PyLong_FromLongLong(calling.number) : PyErr_NoMemory();
}

static void end_call(pc_engine_object *engine, void *argument) {
    struct calling *calling = argument;
    struct pc_context *context = calling->context->context;
    (void)engine;
    struct pc_called *call =
        context != NULL ? pc_call_find(context, (uint64_t)calling->number) : NULL;
    if (call != NULL)
        pc_context_end(context, call);
}

static PyObject *context_end(pc_context_object *self, PyObject *number) {
    struct calling calling = {.context = self, .number = PyLong_AsLongLong(number)};
    if (PyErr_Occurred())
        return NULL;
    pc_engine_do(self->engine, end_call, &calling);
    Py_RETURN_NONE;
}

/* A copy of what is known of one call. */
struct call_copy {
    uint64_t number;
    size_t nbytes;
    char *text;
};

struct telling {
    pc_context_object *context;
    struct call_copy *calls;
    size_t count;
    bool of_newest, without_memory;
};

static void tell_call(struct telling *telling, const struct pc_called *call) {
    if (call == NULL)
        return;
    struct call_copy *copy = &telling->calls[telling->count];
    copy->number = call->number;
    copy->nbytes = call->nbytes;
    copy->text = malloc(call->nbytes + 1);
    telling->without_memory |= copy->text == NULL;
    if (copy->text == NULL)
        return;
    memcpy(copy->text, call->text, call->nbytes);
    telling->count++;
}

static void tell_calls(pc_engine_object *engine, void *argument) {
    struct telling *telling = argument;
    struct pc_context *context = telling->context->context;
    (void)engine;
    if (context == NULL)
        return;
    telling->calls = calloc(context->calls.used + PC_LAST_CALLS + 1, sizeof *telling->calls);
    telling->without_memory = telling->calls == NULL;
    if (telling->calls == NULL)
        return;
    if (telling->of_newest) {
        tell_call(telling, pc_call_newest(context));
        return;
    }
    for (uint64_t back = PC_LAST_CALLS; back > 0; back--)
        tell_call(telling,
                  context->last_calls[(context->num_ended + PC_LAST_CALLS - back) % PC_LAST_CALLS]);
    size_t found = 0;
    for (uint64_t number = context->next_call; found < context->calls.used && number-- > 0;) {
        const struct pc_called *call = pc_call_find(context, number);
        found += call != NULL;
        tell_call(telling, call);
    }
}

static PyObject *tell(pc_context_object *self, bool of_newest) {
    struct telling telling = {.context = self, .of_newest = of_newest};
    pc_engine_do(self->engine, tell_calls, &telling);
    PyObject *arrived = PyDict_New();
    for (size_t index = 0; index < telling.count; index++) {
        PyObject *number = PyLong_FromUnsignedLongLong(telling.calls[index].number);
        PyObject *text = PyBytes_FromStringAndSize(telling.calls[index].text,
                                                   (Py_ssize_t)telling.calls[index].nbytes);
        if (arrived != NULL &&
            (number == NULL || text == NULL || PyDict_SetItem(arrived, number, text) < 0))
            Py_CLEAR(arrived);
        Py_XDECREF(number);
        Py_XDECREF(text);
        free(telling.calls[index].text);
    }
    free(telling.calls);
    if (arrived == NULL || !telling.without_memory)
        return arrived;
    Py_DECREF(arrived);
    return PyErr_NoMemory();
}

static PyObject *context_calls(pc_context_object *self, PyObject *unused) {
    (void)unused;
    return tell(self, false);
}

static PyObject *context_newest(pc_context_object *self, PyObject *unused) {
    (void)unused;
    return tell(self, true);
}

struct reading_counts {
    const pc_context_object *context;
    PyObject *bytes;
};

static void read_counts(pc_engine_object *engine, void *argument) {
    struct reading_counts *reading = argument;
    const struct pc_context *context = reading->context->context;
    if (context != NULL)
        memcpy(PyBytes_AsString(reading->bytes), context->counts,
               (size_t)engine->engine.size * sizeof *context->counts);
}

static PyObject *context_counts(pc_context_object *self, PyObject *unused) {
    Py_ssize_t nbytes = (Py_ssize_t)sizeof(struct pc_counts) * self->engine->engine.size;
    struct reading_counts reading = {self, PyBytes_FromStringAndSize(NULL, nbytes)};
    (void)unused;
    if (reading.bytes == NULL)
        return NULL;
    memset(PyBytes_AsString(reading.bytes), 0, (size_t)nbytes);
    pc_engine_do(self->engine, read_counts, &reading);
    return reading.bytes;
}

static PyObject *context_next_call(pc_context_object *self, void *unused) {
    (void)unused;
    return PyLong_FromUnsignedLongLong(self->context != NULL ? self->context->next_call
                                                             : self->num_calls);
}

static PyObject *context_get_op_timeout(pc_context_object *self, void *unused) {
    (void)unused;
    return pc_seconds(self->op_timeout_ns);
}
static int context_set_op_timeout(pc_context_object *self, PyObject *value, void *unused) {
    (void)unused;
    return pc_set_timeout(value, &self->op_timeout_ns);
}

static PyMethodDef context_methods[] = {
    {"post", (PyCFunction)context_post, METH_VARARGS,
     "post(source, tag, peek=False, number=-1, dtype=-1, room=0, for_message=False) -> Receive: "
     "start a receive that holds its message, or a probe; in the place of that number, if one is "
     "given: that of a receive whose message was taken back, which is not posted again if its "
     "message was for a handle. With the code of a dtype it refuses what is no array of that "
     "dtype, or has more than `room` bytes."},
    {"collect", (PyCFunction)context_collect, METH_VARARGS,
     "collect(call, subcall, rank, index) -> Receive: start a receive that holds the message of "
     "that address."},
    {"begin", (PyCFunction)context_begin, METH_O,
     "begin(text) -> int: begin a collective call, and return its number. Messages of other calls "
     "with this number are told as having arrived."},
    {"end", (PyCFunction)context_end, METH_O,
     "end(number): all messages of that call were received."},
    {"calls", (PyCFunction)context_calls, METH_NOARGS,
     "calls() -> dict[int, bytes]: the calls that have ended last, in that order, then those that "
     "are under way."},
    {"newest", (PyCFunction)context_newest, METH_NOARGS,
     "newest() -> dict[int, bytes]: the call begun last, if any."},
    {"counts", (PyCFunction)context_counts, METH_NOARGS,
     "counts() -> bytes: by world rank four uint64: bytes and messages sent there, bytes and "
     "messages received from there; zeros if it is closed."},
    {"break_", (PyCFunction)context_break, METH_NOARGS,
     "End all that is under way, and what is started later."},
    {"close", (PyCFunction)context_close, METH_NOARGS, "The same, and forget it."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef context_values[] = {
    {"next_call", (getter)context_next_call, NULL, "The number of the next collective call.", NULL},
    {"op_timeout", (getter)context_get_op_timeout, (setter)context_set_op_timeout,
     "Default deadline of `Messages` and `Collectives`, seconds; inf: none.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef context_members[] = {
    {"messages_usable", T_BOOL, offsetof(pc_context_object, messages_usable), 0,
     "whether the methods of `Messages` do anything themselves"},
    {"collectives_usable", T_BOOL, offsetof(pc_context_object, collectives_usable), 0,
     "whether those of `Collectives` do"},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot context_slots[] = {
    {Py_tp_new, context_new},
    {Py_tp_dealloc, context_dealloc},
    {Py_tp_methods, context_methods},
    {Py_tp_getset, context_values},
    {Py_tp_members, context_members},
    {Py_tp_doc, "Context(engine, ident, members, me): one communicator's messages."},
    {0, NULL},
};

PyType_Spec pc_context_spec = {
    .name = "pycoll._transports._core.Context",
    .basicsize = sizeof(pc_context_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = context_slots,
};

void pc_context_types(PyTypeObject *engine, PyTypeObject *context) {
    engine_type = engine;
    pc_context_type = context;
}
