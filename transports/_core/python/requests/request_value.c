/* From messages to what a receive returns. See request.h. */
#include "request.h"
#include "base/copy.h"
#include "python/arguments/pickles.h"

#include <stdlib.h>

/* --- what a header says ----------------------------------------------------------------------- */

/* Read the description of a message. False: it is no array of a kind that is known here, or its
   length is another one. */
static bool array_of(const unsigned char *header, size_t header_nbytes, size_t nbytes,
                     struct pc_described *array) {
    return header_nbytes > HEADER_NBYTES && header[PC_FORM_AT] == PC_FORM_ARRAY &&
           pc_read_description(header + HEADER_NBYTES, header_nbytes - HEADER_NBYTES, array) &&
           array->nbytes == nbytes;
}

static bool is_object(const unsigned char *header, size_t header_nbytes) {
    return header_nbytes == HEADER_NBYTES && header[PC_FORM_AT] == PC_FORM_OBJECT;
}

bool pc_value_is_known(const unsigned char *header, size_t header_nbytes, size_t nbytes) {
    struct pc_described array;
    return is_object(header, header_nbytes) || array_of(header, header_nbytes, nbytes, &array);
}

/* --- going on with a message that is held ----------------------------------------------------- */

struct claim {
    struct pc_request *request;
    uint32_t number; /* 0: there is nothing to go on with */
    size_t nbytes;
    size_t header_nbytes; /* 0: it is longer than any that is known here */
    unsigned char header[LONGEST_HEADER_NBYTES];
    PyObject *value; /* the new memory; afterwards what the request had before */
    void *into;
    int error;
};

/* Take it on, so that no other thread does. With the engine's lock, as the next two. */
static void begin(struct claim *claim) {
    struct pc_request *request = claim->request;
    const struct pc_receive *receive = &request->receive;
    if (!pc_request_is_held(request))
        return;
    if (pc_op_is_done(&request->op))
        pc_op_begin(&request->op, &request->messages->engine->drive, -1);
    request->status = PC_GOING_ON;
    claim->number = ++request->claims;
    if (receive->state != PC_RECEIVE_HELD || receive->message->header_nbytes > sizeof claim->header)
        return;
    claim->nbytes = receive->message->nbytes;
    claim->header_nbytes = receive->message->header_nbytes;
    memcpy(claim->header, receive->message->header, claim->header_nbytes);
}

static bool is_mine(const struct claim *claim) {
    return claim->request->status == PC_GOING_ON && claim->request->claims == claim->number;
}

/* Have it received; the message may have been taken back, or all may be over by now. */
static void receive(struct claim *claim) {
    struct pc_request *request = claim->request;
    if (!is_mine(claim))
        return;
    PyObject *value = claim->value;
    claim->value = request->array;
    request->array = value;
    request->is_pickled = is_object(claim->header, claim->header_nbytes);
    claim->error = pc_receive_into(&request->receive, claim->into);
    if (claim->error < 0) { /* its link cannot: it holds it still, for nobody */
        (void)pc_receive_give_up(&request->receive);
        pc_request_end(request, claim->error);
    }
}

PyObject *pc_value_array(const unsigned char *header, size_t header_nbytes, size_t nbytes,
                         void **data) {
    struct pc_described like;
    struct pc_array view;
    if (!array_of(header, header_nbytes, nbytes, &like))
        return NULL;
    PyObject *array =
        pc_memory_empty(like.library, like.format, like.dtype, like.ndim, like.dims, &view);
    if (array != NULL)
        *data = view.data;
    if (array != NULL)
        pc_memory_release(&view); /* nobody else has it yet */
    return array;
}

/* Objects shorter than that are received into a bytearray, as in scratch.py. */
#define BYTEARRAY_NBYTES 4096

/* A memoryview of new memory. */
static PyObject *new_memory(const struct claim *claim, void **data) {
    PyObject *memory = NULL;
    if (claim->nbytes < BYTEARRAY_NBYTES) {
        PyObject *bytes = PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)claim->nbytes);
        if (bytes != NULL) {
            *data = PyByteArray_AsString(bytes);
            /* while there is a view it stays where it is */
            memory = PyMemoryView_FromObject(bytes);
            Py_DECREF(bytes);
        }
        return memory;
    }
    memory =
        PyObject_CallFunction(claim->request->messages->new_bytes, "n", (Py_ssize_t)claim->nbytes);
    struct pc_views *views =
        memory != NULL ? pc_view_into(memory, (Py_ssize_t)claim->nbytes) : NULL;
    if (views == NULL) {
        Py_XDECREF(memory);
        return NULL;
    }
    *data = views->views[0].buf;
    pc_views_release(views);
    return memory;
}

/* New memory for a message; NULL, without an exception if it is none of those that are known. */
static PyObject *new_value(const struct claim *claim, void **data) {
    return is_object(claim->header, claim->header_nbytes)
               ? new_memory(claim, data)
               : pc_value_array(claim->header, claim->header_nbytes, claim->nbytes, data);
}

/* Python goes on with it. What is said of a message that was refused is where it was in the
   queue. */
static int pass_on(struct claim *claim) {
    struct pc_request *request = claim->request;
    pc_engine_object *engine = request->messages->engine;
    PyObject *handle = pc_item_receive(engine), *done = NULL;
    struct pc_turn turn;
    if (handle == NULL)
        return -1;
    bool goes_on = pc_engine_take(engine, &turn) && is_mine(claim);
    bool has_message = goes_on && request->receive.state == PC_RECEIVE_HELD;
    PyObject *stale = NULL; /* memory of a message that was taken back, not the caller's `out` */
    if (goes_on && request->receive.ask) {
        stale = request->array;
        request->array = NULL;
        request->is_pickled = false;
    }
    if (has_message)
        (void)pc_item_take_over(handle, &request->receive);
    pc_engine_give(engine, &turn);
    Py_XDECREF(stale);
    if (goes_on)
        done = PyObject_CallMethod((PyObject *)request, "_take_over", "OK",
                                   has_message ? handle : Py_None,
                                   (unsigned long long)request->receive.posted.queued.number);
    Py_DECREF(handle);
    Py_XDECREF(done);
    return done != NULL || !goes_on ? 0 : -1;
}

/* The message is for whoever comes next: a signal handler has raised. */
static void put_back(const struct claim *claim) {
    pc_engine_object *engine = claim->request->messages->engine;
    struct pc_turn turn;
    if (pc_engine_take(engine, &turn) && is_mine(claim))
        pc_request_hold(claim->request);
    pc_engine_give(engine, &turn);
}

int pc_request_go_on(struct pc_request *request) {
    if (PC_LIKELY(!pc_request_is_held(request)))
        return 0;
    struct claim mine = {.request = request};
    pc_engine_object *engine = request->messages->engine;
    struct pc_turn turn;
    if (pc_engine_take(engine, &turn))
        begin(&mine);
    pc_engine_give(engine, &turn);
    if (mine.number == 0)
        return 0;
    mine.value = new_value(&mine, &mine.into);
    if (mine.value == NULL && PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_MemoryError)) {
        put_back(&mine);
        return -1;
    }
    if (mine.value == NULL) {
        PyErr_Clear(); /* without memory Python fails, too, and says so to who waits */
        return pass_on(&mine);
    }
    if (pc_engine_take(engine, &turn))
        receive(&mine);
    pc_engine_give(engine, &turn);
    Py_XDECREF(mine.value);
    pc_engine_let_go(engine);
    return 0;
}

/* --- results ---------------------------------------------------------------------------------- */

/* Give a short message that was received memory of Python's. 0; -1 with an exception. */
static int unpack(struct pc_request *request) {
    const struct pc_receive *receive = &request->receive;
    if (request->spare == NULL)
        return 0;
    struct claim message = {
        .request = request, .nbytes = receive->nbytes, .header_nbytes = receive->header_nbytes};
    void *data = NULL;
    memcpy(message.header, receive->header, receive->header_nbytes); /* it is one that is known */
    PyObject *value = new_value(&message, &data);
    if (value == NULL)
        return PyErr_Occurred() ? -1 : (PyErr_NoMemory(), -1);
    if (request->spare == NULL) {
        /* another thread was quicker, while this one had let go of Python's lock */
        Py_DECREF(value);
        return 0;
    }
    pc_copy(data, request->spare, receive->nbytes);
    free(request->spare);
    request->spare = NULL;
    request->is_pickled = is_object(message.header, message.header_nbytes);
    PyObject *before = request->array;
    request->array = value;
    Py_XDECREF(before);
    return 0;
}

/* Load an object that was received. 0; -1 with an exception. */
static int load(struct pc_request *request) {
    if (!request->is_pickled)
        return 0;
    PyObject *memory = Py_NewRef(request->array);
    PyObject *object = pc_pickle_load(memory);
    if (object != NULL && request->is_pickled) { /* else another thread was quicker */
        request->is_pickled = false;
        request->array = object;
        Py_DECREF(memory); /* which was the request's */
    } else {
        Py_XDECREF(object);
    }
    Py_DECREF(memory);
    return object != NULL ? 0 : -1;
}

int pc_fill_status(PyObject *status, int source, int64_t tag, size_t nbytes) {
    PyObject *values[] = {PyLong_FromLong(source), PyLong_FromLongLong(tag),
                          PyLong_FromSize_t(nbytes)};
    static const char *const attributes[] = {"source", "tag", "nbytes"};
    int failed = 0;
    for (int index = 0; index < 3; index++) {
        if (failed == 0)
            failed = values[index] != NULL
                         ? PyObject_SetAttrString(status, attributes[index], values[index])
                         : -1;
        Py_XDECREF(values[index]);
    }
    return failed;
}

static int fill_in(const struct pc_request *request) {
    const struct pc_receive *receive = &request->receive;
    return request->filled == NULL
               ? 0
               : pc_fill_status(request->filled, request->messages->ranks[receive->source],
                                receive->tag, receive->nbytes);
}

/* The Status of what a probe has found. */
static PyObject *found(struct pc_request *request) {
    const struct pc_receive *receive = &request->receive;
    if (receive->header == NULL)
        return PyErr_NoMemory();
    if (receive->header[PC_FORM_AT] > PC_FORM_OBJECT) /* it says elsewhere how long it is */
        return PyObject_CallMethod((PyObject *)request, "_found", NULL);
    return PyObject_CallFunction(request->messages->status_type, "iLn",
                                 request->messages->ranks[receive->source], (long long)receive->tag,
                                 (Py_ssize_t)receive->nbytes);
}

PyObject *pc_request_result(struct pc_request *request) {
    pc_engine_let_go(request->messages->engine); /* another thread may have ended it */
    if (PC_UNLIKELY(request->status != 0 || request->cancelled)) /* Python says why it failed */
        return PyObject_CallMethod((PyObject *)request, "_failed", NULL);
    request->collected = 1;
    if (!pc_request_receives(request))
        Py_RETURN_NONE;
    if (request->kind == PC_PROBE)
        return found(request);
    if (unpack(request) < 0 || load(request) < 0 || fill_in(request) < 0)
        return NULL;
    return Py_NewRef(request->array != NULL ? request->array : Py_None);
}

int pc_request_wait(struct pc_request *request, uint64_t until_ns) {
    pc_engine_object *engine = request->messages->engine;
    for (;;) {
        if (pc_request_go_on(request) < 0)
            return -1;
        if (pc_request_is_done(request))
            return 1;
        if (until_ns == 0)
            return 0;
        PyThreadState *state = PyEval_SaveThread();
        pc_drive_wait(&engine->drive, &request->op, NULL, until_ns, PC_FOR_EVER);
        PyEval_RestoreThread(state);
        pc_engine_let_go(engine);
        if (!pc_op_is_done(&request->op)) /* its time is over, or there is something for Python to
                                             do */
            return 0;
    }
}
