/* `_core.Context`: one communicator's receives and collective calls, for Python. See
   engine_type.h. */
#include "engine_type.h"
#include "python/arguments/timeout.h"

#include <stdlib.h>
#include <string.h>
#include <structmember.h>

static PyObject *context_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    PyObject *engine, *members;
    unsigned long long ident;
    int me;
    if (!PyArg_ParseTuple(args, "O!KOi", pc_engine_type, &engine, &ident, &members, &me))
        return NULL;
    Py_ssize_t count = PySequence_Size(members);
    if (count < 0)
        return NULL;
    int *ranks = malloc((size_t)(count + 1) * sizeof *ranks);
    if (ranks == NULL)
        return PyErr_NoMemory();
    pc_context_object *self = NULL;
    if (pc_read_ranks(members, count, 0, ((pc_engine_object *)engine)->engine.size - 1, ranks))
        self = pc_new(type);
    if (self != NULL) {
        struct pc_turn turn;
        self->engine = (pc_engine_object *)Py_NewRef(engine);
        self->op_timeout_ns = PC_FOR_EVER;
        if (pc_engine_take(self->engine, &turn))
            self->context =
                pc_context_open(&self->engine->engine, ident, ranks, (size_t)count, me);
        pc_engine_give(self->engine, &turn);
        if (self->context == NULL) {
            Py_CLEAR(self);
            if (turn.is_taken)
                PyErr_NoMemory();
            else
                pc_engine_is_closed();
        }
    }
    free(ranks);
    return (PyObject *)self;
}

static void close_context(pc_context_object *self) {
    struct pc_turn turn;
    if (!pc_engine_take(self->engine, &turn))
        return;
    if (self->context != NULL) {
        self->num_calls = self->context->next_call;
        pc_context_close(self->context);
        self->context = NULL;
    }
    pc_engine_give(self->engine, &turn);
}

static PyObject *context_close(pc_context_object *self, PyObject *Py_UNUSED(unused)) {
    close_context(self);
    Py_RETURN_NONE;
}

static PyObject *context_break(pc_context_object *self, PyObject *Py_UNUSED(unused)) {
    struct pc_turn turn;
    if (pc_engine_take(self->engine, &turn)) {
        if (self->context != NULL)
            pc_context_break(self->context, PC_BROKEN);
        pc_engine_give(self->engine, &turn);
    }
    Py_RETURN_NONE;
}

static void context_dealloc(pc_context_object *self) {
    if (self->context != NULL)
        close_context(self);
    Py_XDECREF((PyObject *)self->engine);
    pc_free(self);
}

/* Start the receive of a handle, whose reference is taken; by address, or in the place of a number
   that is not negative. */
static PyObject *start(pc_context_object *self, PyObject *handle, struct pc_py_item *item,
                       bool by_address, long long number) {
    struct pc_py_item *adopted = NULL; /* it waits there already */
    struct pc_turn turn;
    struct pc_context *context =
        pc_engine_take(self->engine, &turn) ? self->context : NULL;
    if (context != NULL) {
        item->context = by_address || item->receive.posted.peek ? NULL : context;
        item->is_quiet = true;
        if (number >= 0)
            adopted = pc_item_adopt(self->engine, context, (uint64_t)number);
        if (adopted != NULL)
            item = adopted;
        else if (by_address)
            pc_collect_start(context, &item->receive);
        else if (number < 0)
            pc_receive_start(context, &item->receive);
        else
            pc_receive_start_at(context, &item->receive, (uint64_t)number);
        item->is_quiet = false;
        (void)pc_item_taken(item);
    }
    pc_engine_give(self->engine, &turn);
    if (adopted != NULL)
        pc_item_swap(handle, adopted);
    if (context != NULL)
        return handle;
    Py_DECREF(handle);
    return pc_engine_is_closed();
}

static PyObject *context_post(pc_context_object *self, PyObject *args) {
    struct pc_py_item *item;
    int source, peek = 0, for_message = 0;
    long long tag, number = -1;
    int dtype = -1;
    Py_ssize_t room = 0;
    if (!PyArg_ParseTuple(args, "iL|pLinp", &source, &tag, &peek, &number, &dtype, &room,
                          &for_message))
        return NULL;
    PyObject *handle = pc_item_new_receive(self->engine, &item);
    if (handle == NULL)
        return NULL;
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
    return start(self, handle, item, false, number);
}

static PyObject *context_collect(pc_context_object *self, PyObject *args) {
    struct pc_py_item *item;
    unsigned long long call;
    unsigned subcall, sender, index;
    if (!PyArg_ParseTuple(args, "KIII", &call, &subcall, &sender, &index))
        return NULL;
    if (sender >= (unsigned)self->engine->engine.size || subcall > UINT16_MAX) {
        PyErr_SetString(PyExc_ValueError, "there is no such address");
        return NULL;
    }
    PyObject *handle = pc_item_new_receive(self->engine, &item);
    if (handle == NULL)
        return NULL;
    item->receive.address = (struct pc_addressed){
        .call = call, .subcall = (uint16_t)subcall, .sender = sender, .index = index};
    return start(self, handle, item, true, -1);
}

/* --- calls ------------------------------------------------------------------------------------ */

static PyObject *context_begin(pc_context_object *self, PyObject *bytes) {
    char *text;
    Py_ssize_t nbytes;
    int64_t number = -1;
    struct pc_turn turn;
    if (PyBytes_AsStringAndSize(bytes, &text, &nbytes) < 0)
        return NULL;
    bool is_open = pc_engine_take(self->engine, &turn) && self->context != NULL;
    if (is_open) {
        struct pc_called *call = pc_context_begin(self->context, text, (size_t)nbytes);
        number = call != NULL ? (int64_t)call->number : -1;
    }
    pc_engine_give(self->engine, &turn);
    if (!is_open)
        return pc_engine_is_closed();
    return number >= 0 ? PyLong_FromLongLong(number) : PyErr_NoMemory();
}

static PyObject *context_end(pc_context_object *self, PyObject *number) {
    uint64_t ended = (uint64_t)PyLong_AsLongLong(number);
    struct pc_turn turn;
    if (PyErr_Occurred())
        return NULL;
    if (pc_engine_take(self->engine, &turn)) {
        struct pc_called *call =
            self->context != NULL ? pc_call_find(self->context, ended) : NULL;
        if (call != NULL)
            pc_context_end(self->context, call);
        pc_engine_give(self->engine, &turn);
    }
    Py_RETURN_NONE;
}

/* A copy of what is known of one call. */
struct call_copy {
    uint64_t number;
    size_t nbytes;
    char *text;
};

struct telling {
    struct call_copy *calls;
    size_t count;
    bool without_memory;
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

/* With the lock. */
static void tell_calls(struct telling *telling, const struct pc_context *context) {
    telling->calls = calloc(context->calls.used + PC_LAST_CALLS + 1, sizeof *telling->calls);
    telling->without_memory = telling->calls == NULL;
    if (telling->calls == NULL)
        return;
    for (uint64_t back = PC_LAST_CALLS; back > 0; back--)
        tell_call(telling,
                  context->last_calls[(context->num_ended + PC_LAST_CALLS - back) % PC_LAST_CALLS]);
    size_t found = 0;
    for (uint64_t number = context->next_call; found < context->calls.used && number-- > 0;) {
        const struct pc_called *call = pc_call_find(context, number);
        found += call != NULL;
        tell_call(telling, call);
    }
    tell_call(telling, pc_call_newest(context));
}

static PyObject *context_calls(pc_context_object *self, PyObject *Py_UNUSED(unused)) {
    struct telling telling = {0};
    struct pc_turn turn;
    if (pc_engine_take(self->engine, &turn) && self->context != NULL)
        tell_calls(&telling, self->context);
    pc_engine_give(self->engine, &turn);
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

static PyObject *context_counts(pc_context_object *self, PyObject *Py_UNUSED(unused)) {
    Py_ssize_t nbytes = (Py_ssize_t)sizeof(struct pc_counts) * self->engine->engine.size;
    PyObject *counts = PyBytes_FromStringAndSize(NULL, nbytes);
    struct pc_turn turn;
    if (counts == NULL)
        return NULL;
    char *to = PyBytes_AsString(counts);
    memset(to, 0, (size_t)nbytes);
    if (pc_engine_take(self->engine, &turn) && self->context != NULL)
        memcpy(to, self->context->counts, (size_t)nbytes);
    pc_engine_give(self->engine, &turn);
    return counts;
}

static PyObject *context_next_call(pc_context_object *self, void *Py_UNUSED(unused)) {
    return PyLong_FromUnsignedLongLong(self->context != NULL ? self->context->next_call
                                                             : self->num_calls);
}

static PyObject *context_get_op_timeout(pc_context_object *self, void *Py_UNUSED(unused)) {
    return pc_seconds(self->op_timeout_ns);
}
static int context_set_op_timeout(pc_context_object *self, PyObject *value,
                                  void *Py_UNUSED(unused)) {
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
     "are under way, then the call begun last, if it is none of these."},
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
