/* `_core.Messages`: send, recv, isend and irecv of one communicator over the message engine, and `_core.Request`.

   What is a contiguous NumPy array of a plain dtype, whatever its source, tag and status, is done here. All else, and
   what takes long or goes wrong, is handed with the same arguments to the Python methods.

   The engine works on the memory inside a `Request`, which keeps itself alive until that has ended. */
#include "engine_type.h"
#include "p2p_call.h"

#include <errno.h>
#include <stdlib.h>
#include <structmember.h>

/* A wait of that length is gone on with in Python, which looks at failures and tells the launcher. */
#define SLICE_NS 100000000u
/* Dimensions of an array that a request can name. */
#define NAMED_DIMS 6

/* The status of a request whose message has come, and for which an array must be made. */
#define HELD 1000001

/* The caller has given it up. */
#define PC_GIVEN_UP 1000002

/* The Python methods to which goes what is not done here. */
enum { SLOW_SEND, SLOW_SSEND, SLOW_RECV, SLOW_ISEND, SLOW_ISSEND, SLOW_IRECV, SLOW_FINISH, NUM_SLOW };

typedef struct {
    PyObject_HEAD
    pc_context_object *context;
    pc_engine_object *engine;
    uint64_t ident;
    int size;
    int *members; /* world ranks, by rank here */
    int *ranks;   /* ranks here, by world rank; -1 */
    char usable;
    PyObject *owner;       /* kept for Python */
    PyObject *type;        /* of requests */
    PyObject *status_type; /* of what a receive fills in */
    PyObject *slow[NUM_SLOW];
} pc_messages;

enum request_kind { SEND, SSEND, RECV };

struct pc_request {
    PyObject_HEAD
    pc_messages *messages;
    struct pc_op op;
    struct pc_event event;
    struct pc_receive receive;
    struct pc_send send;
    struct iovec one;
    enum request_kind kind;
    char is_blocking, collected, cancelled;
    bool is_pending, is_watched, under_way, was_done;
    int status;
    int peer; /* rank here, or ANY */
    long tag;
    unsigned char expects[2];
    PyObject *array; /* what is sent, until that is done; or what is filled */
    PyObject *filled; /* the Status to be filled in, or NULL */
    int dtype, ndim;
    intptr_t dims[NAMED_DIMS];
    struct pc_request *next; /* of those that have ended */
};

PyTypeObject *pc_request_type;
static PyTypeObject *context_type;

/* --- ends -------------------------------------------------------------------------------------------- */

/* With the lock. The request may be gone when this returns. */
static void end(pc_engine_object *engine, struct pc_request *request, int status) {
    request->status = status;
    request->under_way = false;
    if (request->is_pending)
        pc_drive_pending(&engine->drive, -1);
    if (request->is_watched) {
        request->event.kind = PC_EVENT_REQUEST;
        pc_engine_post(engine, &request->event); /* which keeps it alive */
    } else {
        request->next = engine->ended;
        engine->ended = request;
    }
    pc_op_end(&request->op, status);
}

static void sent(struct pc_send *send) {
    struct pc_request *request = send->owner;
    end(request->messages->engine, request, send->status);
}

/* Keep what the header of a held message says, for who makes an array of it. */
static void know(struct pc_receive *receive) {
    const struct pc_message *message = receive->message;
    if (receive->header == NULL)
        receive->header = malloc(message->header_nbytes);
    receive->header_nbytes = receive->header != NULL ? message->header_nbytes : 0;
    if (receive->header != NULL)
        memcpy(receive->header, message->header, message->header_nbytes);
    receive->nbytes = message->nbytes;
    receive->source = message->match.queued.source;
    receive->tag = message->match.queued.tag;
}

static void received(struct pc_receive *receive) {
    struct pc_request *request = receive->owner;
    bool held = receive->state == PC_RECEIVE_HELD;
    if (held)
        know(receive);
    if (request->under_way)
        end(request->messages->engine, request, held ? HELD : receive->status);
}

static void take_ended(pc_engine_object *engine, void *argument) {
    struct pc_request **ended = argument;
    *ended = engine->ended;
    engine->ended = NULL;
}

static void let_go(struct pc_request *request) {
    if (request->kind != RECV)
        Py_CLEAR(request->array);
    Py_DECREF((PyObject *)request);
}

void pc_engine_let_go(pc_engine_object *engine) {
    if (engine->ended == NULL)
        return;
    struct pc_request *ended = NULL;
    if (!pc_engine_do(engine, take_ended, &ended))
        take_ended(engine, &ended); /* it is closed: nobody else comes here */
    while (ended != NULL) {
        struct pc_request *request = ended;
        ended = request->next;
        let_go(request);
    }
}

PyObject *pc_request_event(struct pc_event *event) {
    struct pc_request *request = (struct pc_request *)((char *)event - offsetof(struct pc_request, event));
    PyObject *told = Py_BuildValue("iO", PC_EVENT_REQUEST, (PyObject *)request);
    let_go(request);
    return told;
}

/* --- beginning --------------------------------------------------------------------------------------- */

static struct pc_request *new_request(pc_messages *self, enum request_kind kind, bool is_blocking) {
    PyTypeObject *type = (PyTypeObject *)self->type;
    struct pc_request *request = (struct pc_request *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (request == NULL)
        return NULL;
    request->messages = (pc_messages *)Py_NewRef((PyObject *)self);
    request->kind = kind;
    request->is_blocking = is_blocking;
    return request;
}

static void name(struct pc_request *request, const struct pc_array *array) {
    request->dtype = array->dtype;
    request->ndim = array->ndim;
    for (int axis = 0; axis < array->ndim; axis++)
        request->dims[axis] = array->dims[axis];
}

struct starting {
    struct pc_request *request;
    const unsigned char *header;
    size_t header_nbytes;
    enum pc_way way;
};

/* It was started: is it under way, or done? */
static void begun(pc_engine_object *engine, struct pc_request *request, bool under_way, int status) {
    if (under_way) {
        request->is_pending = !request->is_blocking;
        if (request->is_pending)
            pc_drive_pending(&engine->drive, 1);
        return;
    }
    request->was_done = true;
    request->under_way = false;
    request->status = status;
    atomic_store_explicit(&request->op.done, 1, memory_order_relaxed);
}

static void start_send(pc_engine_object *engine, void *argument) {
    struct starting *starting = argument;
    struct pc_request *request = starting->request;
    struct pc_context *context = request->messages->context->context;
    pc_op_begin(&request->op, &engine->drive, -1);
    int answer = PC_SENT;
    request->send.status = PC_CONTEXT_CLOSED;
    if (context != NULL)
        answer = pc_send_start(context, &request->send, starting->header, starting->header_nbytes, starting->way);
    request->under_way = answer == PC_UNDER_WAY;
    begun(engine, request, request->under_way, request->send.status);
}

static void start_receive(pc_engine_object *engine, void *argument) {
    struct pc_request *request = ((struct starting *)argument)->request;
    struct pc_context *context = request->messages->context->context;
    struct pc_receive *receive = &request->receive;
    pc_op_begin(&request->op, &engine->drive, -1);
    receive->status = PC_CONTEXT_CLOSED;
    if (context != NULL) /* what ends it at once is not told */
        pc_receive_start(context, receive);
    request->under_way = receive->state == PC_RECEIVE_POSTED || receive->state == PC_RECEIVE_READING;
    begun(engine, request, request->under_way, receive->state == PC_RECEIVE_HELD ? HELD : receive->status);
}

/* Something was told to Python meanwhile, and nobody may be waiting who would hear it. */
static int hear(pc_engine_object *engine) {
    if (PC_LIKELY(engine->first == NULL) || engine->on_work == NULL)
        return 0;
    PyObject *heard = PyObject_CallNoArgs(engine->on_work);
    Py_XDECREF(heard);
    return heard != NULL ? 0 : -1;
}

/* Start a request, which keeps itself and `array` alive until it has ended. Takes the reference to it, and returns it;
   NULL with an exception. */
static struct pc_request *start(struct pc_request *request, PyObject *array, struct starting *starting,
                                void (*work)(pc_engine_object *engine, void *argument)) {
    pc_engine_object *engine = request->messages->engine;
    starting->request = request;
    request->array = array != NULL ? Py_NewRef(array) : NULL;
    Py_INCREF((PyObject *)request);
    bool done = pc_engine_do(engine, work, starting);
    if (!done || request->was_done)
        let_go(request);
    if (done && hear(engine) == 0)
        return request;
    Py_DECREF((PyObject *)request);
    if (!done)
        pc_engine_is_closed();
    return NULL;
}

static struct pc_request *request_send(pc_messages *self, PyObject *x_object, const struct pc_array *x, long dest,
                                       long tag, enum request_kind kind, bool is_blocking) {
    unsigned char header[LONGEST_HEADER_NBYTES];
    struct pc_request *request = new_request(self, kind, is_blocking);
    if (request == NULL)
        return NULL;
    struct starting starting = {.header = header, .way = kind == SSEND ? PC_OFFER : PC_MAY_PUSH};
    starting.header_nbytes = write_header(self->ident, x, tag, header);
    request->peer = (int)dest;
    request->tag = tag;
    name(request, x);
    request->one = (struct iovec){x->data, x->nbytes};
    request->send.peer = self->members[dest];
    request->send.parts = &request->one;
    request->send.num_parts = 1;
    request->send.ended = sent;
    request->send.owner = request;
    return start(request, x_object, &starting, start_send);
}

/* Without `out` the message is held. */
static struct pc_request *request_receive(pc_messages *self, PyObject *out_object, const struct pc_array *out,
                                          long source, long tag, PyObject *filled, bool is_blocking) {
    struct pc_request *request = new_request(self, RECV, is_blocking);
    if (request == NULL)
        return NULL;
    struct starting starting = {0};
    struct pc_receive *receive = &request->receive;
    request->peer = (int)source;
    request->tag = tag;
    request->filled = filled != NULL ? Py_NewRef(filled) : NULL;
    receive->posted.queued.source = source == ANY ? PC_ANY : self->members[source];
    receive->posted.queued.tag = tag;
    receive->told = received;
    receive->owner = request;
    receive->ask = out == NULL;
    if (out != NULL) {
        receive->into = out->data;
        receive->room = out->nbytes;
        request->expects[1] = (unsigned char)out->dtype; /* after the form: an array */
        receive->expects = request->expects;
        receive->expects_nbytes = sizeof request->expects;
    }
    return start(request, out_object, &starting, start_receive);
}

/* --- what becomes of it ------------------------------------------------------------------------------ */

/* Fill in the status object: 0; -1 with an exception. */
static int fill_in(struct pc_request *request) {
    const struct pc_receive *receive = &request->receive;
    if (request->filled == NULL)
        return 0;
    PyObject *values[] = {PyLong_FromLong(request->messages->ranks[receive->source]), PyLong_FromLongLong(receive->tag),
                          PyLong_FromSize_t(receive->nbytes)};
    static const char *const attributes[] = {"source", "tag", "nbytes"};
    int status = 0;
    for (int index = 0; index < 3; index++) {
        if (status == 0)
            status = values[index] != NULL ? PyObject_SetAttrString(request->filled, attributes[index], values[index])
                                           : -1;
        Py_XDECREF(values[index]);
    }
    return status;
}

/* What it returns; it has ended. Why it failed is said by Python. */
static PyObject *result_of(struct pc_request *request) {
    if (PC_UNLIKELY(request->status != 0 || request->cancelled))
        return PyObject_CallMethod((PyObject *)request, "_failed", NULL);
    request->collected = 1;
    if (request->kind != RECV)
        Py_RETURN_NONE;
    if (fill_in(request) < 0)
        return NULL;
    return Py_NewRef(request->array);
}

/* Wait for a slice of time; whether it has ended. */
static bool wait_a_while(struct pc_request *request, uint64_t slice_ns) {
    if (pc_op_is_done(&request->op))
        return true;
    pc_engine_object *engine = request->messages->engine;
    PyThreadState *state = PyEval_SaveThread();
    pc_drive_wait(&engine->drive, &request->op, NULL, pc_drive_now_ns() + slice_ns, PC_FOR_EVER);
    PyEval_RestoreThread(state);
    pc_engine_let_go(engine);
    return pc_op_is_done(&request->op);
}

struct asking {
    struct pc_request *request;
    void *into;
    int error;
    bool answer;
};

static void stop(pc_engine_object *engine, void *argument) {
    struct asking *asking = argument;
    (void)engine;
    asking->answer = asking->request->under_way && pc_send_stop(&asking->request->send);
}

/* Give it up, whatever it is at; a message that is read goes back to its place. */
static void give_up(pc_engine_object *engine, void *argument) {
    struct asking *asking = argument;
    struct pc_request *request = asking->request;
    struct pc_receive *receive = &request->receive;
    bool was_held = receive->state == PC_RECEIVE_HELD;
    if (request->kind != RECV)
        asking->answer = request->under_way && pc_send_take_back(&request->send);
    else
        asking->answer = (request->under_way || was_held) && pc_receive_give_up(receive);
    if (asking->answer && request->under_way)
        end(engine, request, PC_GIVEN_UP);
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
}

static bool ask(struct pc_request *request, void (*work)(pc_engine_object *engine, void *argument)) {
    struct asking asking = {.request = request};
    pc_engine_do(request->messages->engine, work, &asking);
    pc_engine_let_go(request->messages->engine);
    return asking.answer;
}

static void fetch(pc_engine_object *engine, void *argument) {
    struct asking *asking = argument;
    struct pc_request *request = asking->request;
    struct pc_receive *receive = &request->receive;
    asking->answer = receive->state == PC_RECEIVE_HELD;
    if (!asking->answer)
        return;
    pc_op_begin(&request->op, &engine->drive, -1);
    asking->error = pc_receive_into(receive, asking->into);
    request->under_way = receive->state == PC_RECEIVE_READING;
    if (request->under_way)
        return;
    request->was_done = true;
    request->status = asking->error != 0 ? asking->error : receive->status;
    atomic_store_explicit(&request->op.done, 1, memory_order_relaxed);
}

/* Have the message that a request holds written to a new array. 1: it is being done, or is done; 0: Python must see to
   it; -1 with an exception. */
static int receive_new(struct pc_request *request) {
    const struct pc_receive *receive = &request->receive;
    const unsigned char *header = receive->header;
    if (header == NULL || receive->header_nbytes < HEADER_NBYTES + DESCRIPTION_NBYTES || header[17] != 0 ||
        header[19] != sizeof KIND_NAME || memcmp(header + 21, KIND_NAME, sizeof KIND_NAME) != 0 ||
        header[20] > MAX_DIMS || receive->header_nbytes != HEADER_NBYTES + DESCRIPTION_NBYTES + 8 * (size_t)header[20])
        return 0;
    intptr_t dims[MAX_DIMS];
    memcpy(dims, header + HEADER_NBYTES + DESCRIPTION_NBYTES, 8 * (size_t)header[20]);
    PyObject *array = pc_array_empty(header[18], header[20], dims);
    struct pc_array view;
    if (array == NULL)
        return PyErr_Occurred() ? -1 : 0;
    if (!pc_array_view(array, &view) || view.nbytes != receive->nbytes) {
        Py_DECREF(array);
        return 0;
    }
    PyObject *before = request->array;
    request->array = array;
    Py_XDECREF(before);
    struct asking asking = {.request = request, .into = view.data};
    Py_INCREF((PyObject *)request); /* if it is read it ends once more */
    request->was_done = false;
    bool done = pc_engine_do(request->messages->engine, fetch, &asking);
    if (!done || !asking.answer || request->was_done)
        Py_DECREF((PyObject *)request);
    return done && asking.answer;
}

/* --- methods of requests ----------------------------------------------------------------------------- */

static PyObject *request_wait(struct pc_request *self, PyObject *const *args, Py_ssize_t count, PyObject *keywords) {
    Py_ssize_t named = keywords != NULL ? PyTuple_Size(keywords) : 0;
    bool plain = count + named == 0 || (count == 1 && named == 0 && args[0] == Py_None);
    if (plain && (pc_op_is_done(&self->op) || (!self->messages->engine->engaged && wait_a_while(self, SLICE_NS))))
        return result_of(self);
    PyObject *slow = PyObject_GetAttrString((PyObject *)self, "_wait");
    PyObject *result = slow != NULL ? pc_call_slow(slow, args, count, keywords) : NULL;
    Py_XDECREF(slow);
    return result;
}

static void look(pc_engine_object *engine, void *argument) {
    (void)argument;
    for (uint32_t index = 0; index < engine->drive.num_sources; index++)
        engine->drive.sources[index]->ops->progress(engine->drive.sources[index]);
}

static PyObject *request_test(struct pc_request *self, PyObject *unused) {
    (void)unused;
    pc_engine_object *engine = self->messages->engine;
    if (!pc_op_is_done(&self->op) && !engine->engaged) {
        pc_engine_do(engine, look, NULL);
        pc_engine_let_go(engine);
        if (hear(engine) < 0)
            return NULL;
    }
    return PyBool_FromLong(pc_op_is_done(&self->op));
}

static PyObject *request_done(struct pc_request *self, void *unused) {
    (void)unused;
    return PyBool_FromLong(pc_op_is_done(&self->op));
}

static PyObject *request_result(struct pc_request *self, void *unused) {
    (void)unused;
    if (!pc_op_is_done(&self->op))
        return PyObject_CallMethod((PyObject *)self, "_failed", NULL);
    return result_of(self);
}

static PyObject *request_stop(struct pc_request *self, PyObject *unused) {
    (void)unused;
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
    PyObject *shape = PyTuple_New(self->kind != RECV ? self->ndim : 0);
    for (int axis = 0; shape != NULL && self->kind != RECV && axis < self->ndim; axis++)
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

static void request_dealloc(struct pc_request *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    free(self->receive.header);
    Py_XDECREF(self->array);
    Py_XDECREF(self->filled);
    Py_XDECREF((PyObject *)self->messages);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyMethodDef request_methods[] = {
    {"wait", (PyCFunction)(void (*)(void))request_wait, METH_FASTCALL | METH_KEYWORDS,
     "wait($self, timeout=None)\n--\n\nReturn the result, when the call is done. See pycoll.Request.wait."},
    {"test", (PyCFunction)request_test, METH_NOARGS, "Return whether the call is done, in whatever way; never waits."},
    {"_stop", (PyCFunction)request_stop, METH_NOARGS, "Stop a send, if that can be."},
    {"_give_up", (PyCFunction)request_give_up, METH_NOARGS, "Give it up: its memory is not used any more."},
    {"_withdraw", (PyCFunction)request_withdraw, METH_NOARGS, "Cancel a receive for which no message has come."},
    {"_watch", (PyCFunction)request_watch, METH_NOARGS, "Have an event at its end; False: it has ended."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef request_values[] = {
    {"done", (getter)request_done, NULL, "Whether the call is done, as far as is known without looking.", NULL},
    {"result", (getter)request_result, NULL, "What the call returns. See pycoll.Request.result.", NULL},
    {"_description", (getter)request_description, NULL, "(kind, code of the dtype, peer, tag, shape).", NULL},
    {"_message", (getter)request_message, NULL, "(world rank, nbytes, header) of a message that was refused; or None.",
     NULL},
    {"_owner", (getter)request_owner, NULL, "What its communicator's `Messages` keeps.", NULL},
    {"_array", (getter)request_array, NULL, "The array that is sent or filled; or None.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef request_members[] = {
    {"_status", T_INT, offsetof(struct pc_request, status), READONLY, "0, or why it failed"},
    {"_collected", T_BOOL, offsetof(struct pc_request, collected), 0, "a wait has returned its result"},
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
    .name = "pycoll.transports._core.Request",
    .basicsize = sizeof(struct pc_request),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .slots = request_slots,
};

/* --- waiting for several ----------------------------------------------------------------------------- */

struct gathering {
    pc_engine_object *engine;
    struct pc_several several;
    PyObject *listed;
    struct pc_request **requests;
    Py_ssize_t count;
    bool is_taken;
};

static void gather(pc_engine_object *engine, void *argument) {
    struct gathering *gathering = argument;
    uint32_t left = 0;
    (void)engine;
    for (Py_ssize_t index = 0; index < gathering->count; index++) {
        struct pc_op *op = &gathering->requests[index]->op;
        if (pc_op_is_done(op))
            continue;
        if (pc_several_add(&gathering->several, op))
            left++;
        else
            gathering->is_taken = true;
    }
    atomic_store_explicit(&gathering->several.left, left, memory_order_relaxed);
}

static void scatter(pc_engine_object *engine, void *argument) {
    struct gathering *gathering = argument;
    (void)engine;
    for (Py_ssize_t index = 0; index < gathering->count; index++)
        pc_several_remove(&gathering->several, &gathering->requests[index]->op);
}

/* Requests of one engine, none of which holds the others up for ever; false: leave it to Python. */
static bool collect(struct gathering *gathering) {
    for (Py_ssize_t index = 0; index < gathering->count; index++) {
        PyObject *item = PyList_GetItem(gathering->listed, index);
        if (!PyObject_TypeCheck(item, pc_request_type))
            return false;
        struct pc_request *request = (struct pc_request *)item;
        gathering->requests[index] = request;
        if (gathering->engine == NULL)
            gathering->engine = request->messages->engine;
        if (gathering->engine != request->messages->engine)
            return false;
    }
    return gathering->engine != NULL && !gathering->engine->engaged;
}

#define FEW 64

/* wait_all(list) -> list | None: the results of requests; None: something is left for Python to do. */
PyObject *pc_wait_all(PyObject *module, PyObject *listed) {
    (void)module;
    struct pc_request *few[FEW];
    struct gathering gathering = {.listed = listed, .requests = few};
    if (!PyList_CheckExact(listed))
        Py_RETURN_NONE;
    gathering.count = PyList_Size(listed);
    if (gathering.count > FEW)
        gathering.requests = malloc((size_t)gathering.count * sizeof *gathering.requests);
    PyObject *results = NULL;
    if (gathering.requests == NULL)
        return PyErr_NoMemory();
    if (!collect(&gathering))
        goto done;
    for (Py_ssize_t index = 0; index < gathering.count; index++)
        Py_INCREF((PyObject *)gathering.requests[index]); /* the list may change */
    if (pc_engine_do(gathering.engine, gather, &gathering)) {
        if (!gathering.is_taken && !pc_several_is_done(&gathering.several)) {
            PyThreadState *state = PyEval_SaveThread();
            pc_drive_wait(&gathering.engine->drive, NULL, &gathering.several, pc_drive_now_ns() + SLICE_NS, PC_FOR_EVER);
            PyEval_RestoreThread(state);
        }
        if (gathering.is_taken || !pc_several_is_done(&gathering.several))
            pc_engine_do(gathering.engine, scatter, &gathering);
    }
    pc_engine_let_go(gathering.engine);
    bool well = true;
    for (Py_ssize_t index = 0; index < gathering.count; index++)
        well &= pc_op_is_done(&gathering.requests[index]->op) && gathering.requests[index]->status == 0;
    results = well ? PyList_New(gathering.count) : NULL;
    for (Py_ssize_t index = 0; index < gathering.count; index++) {
        PyObject *result = results != NULL ? result_of(gathering.requests[index]) : NULL;
        if (results != NULL && result == NULL)
            Py_CLEAR(results);
        if (results != NULL)
            PyList_SetItem(results, index, result);
        Py_DECREF((PyObject *)gathering.requests[index]);
    }
done:
    if (gathering.requests != few)
        free(gathering.requests);
    if (results == NULL && !PyErr_Occurred())
        Py_RETURN_NONE;
    return results;
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
        !pc_array_view(values[X], x) || x->ndim > NAMED_DIMS)
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
                             enum request_kind kind, PyObject *slow) {
    PyObject *values[ARGUMENTS] = {NULL};
    struct pc_array x;
    long dest, tag;
    if (is_plain_send(self, args, count, keywords, values, &x, &dest, &tag) && values[TIMEOUT] == NULL)
        return (PyObject *)request_send(self, values[X], &x, dest, tag, kind, false);
    return pc_call_slow(slow, args, count, keywords);
}

static PyObject *messages_isend(pc_messages *self, PyObject *const *args, Py_ssize_t count, PyObject *keywords) {
    return start_isend(self, args, count, keywords, SEND, self->slow[SLOW_ISEND]);
}

static PyObject *messages_issend(pc_messages *self, PyObject *const *args, Py_ssize_t count, PyObject *keywords) {
    return start_isend(self, args, count, keywords, SSEND, self->slow[SLOW_ISSEND]);
}

static PyObject *do_send(pc_messages *self, PyObject *const *args, Py_ssize_t count, PyObject *keywords,
                         enum request_kind kind, PyObject *slow) {
    PyObject *values[ARGUMENTS] = {NULL};
    struct pc_array x;
    long dest, tag;
    if (!is_plain_send(self, args, count, keywords, values, &x, &dest, &tag))
        return pc_call_slow(slow, args, count, keywords);
    struct pc_request *request = request_send(self, values[X], &x, dest, tag, kind, true);
    if (request == NULL)
        return NULL;
    PyObject *result;
    if (wait_a_while(request, SLICE_NS))
        result = result_of(request);
    else
        result = PyObject_CallFunctionObjArgs(self->slow[SLOW_FINISH], (PyObject *)request, NULL);
    Py_DECREF((PyObject *)request);
    return result;
}

static PyObject *messages_send(pc_messages *self, PyObject *const *args, Py_ssize_t count, PyObject *keywords) {
    return do_send(self, args, count, keywords, SEND, self->slow[SLOW_SEND]);
}

static PyObject *messages_ssend(pc_messages *self, PyObject *const *args, Py_ssize_t count, PyObject *keywords) {
    return do_send(self, args, count, keywords, SSEND, self->slow[SLOW_SSEND]);
}

static PyObject *messages_irecv(pc_messages *self, PyObject *const *args, Py_ssize_t count, PyObject *keywords) {
    PyObject *values[ARGUMENTS] = {NULL};
    struct pc_array out;
    long source, tag;
    if (is_plain_receive(self, args, count, keywords, values, &out, &source, &tag) && values[TIMEOUT] == NULL &&
        !is_none(values[OUT])) {
        PyObject *filled = is_none(values[STATUS]) ? NULL : values[STATUS];
        return (PyObject *)request_receive(self, values[OUT], &out, source, tag, filled, false);
    }
    return pc_call_slow(self->slow[SLOW_IRECV], args, count, keywords);
}

/* A message for which no array can be made, or that cannot be fetched, is the next receive's. An exception may be set. */
static void put_back(struct pc_request *request) {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    ask(request, give_up);
    PyErr_Restore(type, value, traceback);
}

static PyObject *messages_recv(pc_messages *self, PyObject *const *args, Py_ssize_t count, PyObject *keywords) {
    PyObject *values[ARGUMENTS] = {NULL};
    struct pc_array out;
    long source, tag;
    if (!is_plain_receive(self, args, count, keywords, values, &out, &source, &tag))
        return pc_call_slow(self->slow[SLOW_RECV], args, count, keywords);
    bool is_new = is_none(values[OUT]);
    PyObject *filled = is_none(values[STATUS]) ? NULL : values[STATUS];
    struct pc_request *request =
        request_receive(self, is_new ? NULL : values[OUT], is_new ? NULL : &out, source, tag, filled, true);
    if (request == NULL)
        return NULL;
    PyObject *result = NULL;
    bool done = wait_a_while(request, SLICE_NS);
    int made = 1;
    if (done && request->status == HELD) {
        made = receive_new(request);
        done = made > 0 && wait_a_while(request, SLICE_NS);
    }
    if (made >= 0) {
        /* What goes wrong is found again, and said, by Python: the message is back in its place, or was refused. */
        bool is_left = !done || request->status == PC_REFUSED || request->status == HELD ||
                       request->status == PC_TAKEN_BACK;
        if (!is_left || (!done && !ask(request, give_up) && pc_op_is_done(&request->op) && request->status == 0)) {
            result = result_of(request);
        } else {
            if (request->status == HELD)
                ask(request, give_up);
            result = pc_call_slow(self->slow[SLOW_RECV], args, count, keywords);
        }
    }
    if (request->receive.state == PC_RECEIVE_HELD)
        put_back(request);
    Py_DECREF((PyObject *)request);
    return result;
}

static PyObject *messages_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *context, *members, *owner, *request, *status, *slow;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "O!OOOOO", context_type, &context, &members, &owner, &request, &status, &slow))
        return NULL;
    Py_ssize_t size = PySequence_Size(members);
    if (size < 0 || PySequence_Size(slow) != NUM_SLOW || !PyType_Check(request) ||
        !PyType_IsSubtype((PyTypeObject *)request, pc_request_type)) {
        PyErr_SetString(PyExc_TypeError, "arguments are context, members, owner, request, status, slow");
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
    for (int index = 0; index < NUM_SLOW; index++)
        self->slow[index] = PySequence_GetItem(slow, index);
    return (PyObject *)self;
}

static int messages_traverse(pc_messages *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->owner);
    for (int index = 0; index < NUM_SLOW; index++)
        Py_VISIT(self->slow[index]);
    return 0;
}

static int messages_clear(pc_messages *self) {
    Py_CLEAR(self->owner);
    for (int index = 0; index < NUM_SLOW; index++)
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
     "Messages(context, members, owner, request, status, slow)\n\n"
     "send, recv and their twins of one communicator, in the core. `request` is a subclass of `Request`, `status` that of "
     "what recv fills in; `slow` are the methods to which all else goes: send, ssend, recv, isend, issend, irecv; and "
     "`finish(request)`, which waits for a send that takes long."},
    {0, NULL},
};

PyType_Spec pc_messages_spec = {
    .name = "pycoll.transports._core.Messages",
    .basicsize = sizeof(pc_messages),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = messages_slots,
};

void pc_request_types(PyTypeObject *context, PyTypeObject *request) {
    context_type = context;
    pc_request_type = request;
}
