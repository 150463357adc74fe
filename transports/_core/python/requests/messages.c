/* What the methods of `_core.Messages` share: arguments that are looked at, requests made of them,
   and waiting. */
#include "messages.h"
#include "python/arguments/pickles.h"

#include <stdlib.h>

/* --- arguments -------------------------------------------------------------------------------- */

static bool plain_peer(const pc_messages *self, PyObject *value, long least, int *peer) {
    long number = value == NULL ? least : small_int(value, least, -2);
    *peer = (int)number;
    return number >= least && number != -2 && number < self->size;
}

int pc_outgoing_of(pc_messages *self, PyObject *x, PyObject *dest, PyObject *tag, PyObject *out,
                   struct pc_outgoing *outgoing) {
    outgoing->value = x;
    outgoing->stand_in = NULL;
    outgoing->views = NULL;
    outgoing->array.held.obj = NULL;
    outgoing->tag = tag == NULL ? 0 : small_int(tag, 0, -1);
    if (x == NULL || dest == NULL || !plain_peer(self, dest, 0, &outgoing->dest) ||
        outgoing->tag < 0)
        return 0;
    if (pc_memory_of(x, &outgoing->array)) {
        if (outgoing->array.ndim <= PC_NAMED_DIMS)
            return 1;
        pc_memory_release(&outgoing->array);
        outgoing->array.held.obj = NULL;
    }
    PyObject *plain = pc_pickle_plain(x);
    if (plain == NULL && PyErr_Occurred())
        return -1;
    if (plain != NULL && pc_messages_may_start(self)) /* memory that was freed may run anything */
        outgoing->views = pc_view_of(plain);
    Py_XDECREF(plain);
    if (plain != NULL)
        return outgoing->views != NULL ? 1 : PyErr_Occurred() ? -1 : 0;
    outgoing->stand_in = !pc_is_numpy_scalar(x) ? pc_stand_in(x, out, true) : NULL;
    if (PyErr_Occurred())
        return -1;
    if (outgoing->stand_in != NULL) {
        if (pc_messages_may_start(self) && pc_memory_of(outgoing->stand_in, &outgoing->array) &&
            pc_tell_kind(x, &outgoing->array) && outgoing->array.ndim <= PC_NAMED_DIMS)
            return 1;
        pc_outgoing_release(outgoing);
        return 0;
    }
    PyObject *parts = PyObject_CallFunctionObjArgs(self->dump, x, NULL);
    if (parts == NULL) { /* Python says why it cannot be sent */
        if (!PyErr_ExceptionMatches(PyExc_TypeError) && !PyErr_ExceptionMatches(PyExc_ValueError))
            return -1;
        PyErr_Clear();
        return 0;
    }
    if (parts != Py_None && pc_messages_may_start(self)) { /* pickling may have run anything */
        outgoing->views = pc_view_parts(parts);
        Py_DECREF(parts);
        return outgoing->views != NULL ? 1 : -1;
    }
    Py_DECREF(parts);
    return 0;
}

bool pc_incoming_of(const pc_messages *self, PyObject *source, PyObject *tag, PyObject *out,
                    PyObject *status, struct pc_incoming_call *incoming) {
    incoming->tag = tag == NULL ? ANY : small_int(tag, ANY, -2);
    incoming->out = is_none(out) ? NULL : out;
    incoming->status = is_none(status) ? NULL : status;
    incoming->array.held.obj = NULL;
    if (!plain_peer(self, source, ANY, &incoming->source) || incoming->tag < ANY ||
        (incoming->status != NULL && Py_TYPE(status) != (PyTypeObject *)self->status_type))
        return false;
    if (incoming->out == NULL)
        return true;
    if (!pc_target_of(out, &incoming->array))
        return false;
    if (pc_tell_written(&incoming->array, out) == 0)
        return true;
    pc_memory_release(&incoming->array);
    incoming->array.held.obj = NULL;
    return false;
}

/* --- requests --------------------------------------------------------------------------------- */

/* Where the parts of a pickled object are. 0; -1 with an exception. */
static int set_parts(struct pc_request *request, struct pc_views *views) {
    request->views = views;
    if (views->count == 1) {
        request->one = (struct iovec){views->views[0].buf, (size_t)views->views[0].len};
        return 0;
    }
    request->parts = malloc((size_t)(views->count + 1) * sizeof *request->parts);
    if (request->parts == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t index = 0; index < views->count; index++)
        request->parts[index] =
            (struct iovec){views->views[index].buf, (size_t)views->views[index].len};
    request->send.parts = request->parts;
    request->send.num_parts = (size_t)views->count;
    return 0;
}

struct pc_request *pc_messages_send(pc_messages *self, struct pc_outgoing *outgoing,
                                    enum pc_request_kind kind, bool is_blocking, enum pc_way way) {
    unsigned char header[LONGEST_HEADER_NBYTES];
    size_t header_nbytes = PC_P2P_NBYTES;
    struct pc_request *request = pc_request_new(self, kind, is_blocking);
    if (request == NULL) {
        pc_views_release(outgoing->views);
        return NULL;
    }
    request->peer = outgoing->dest;
    request->tag = outgoing->tag;
    request->send.peer = self->members[outgoing->dest];
    request->send.parts = &request->one;
    request->send.num_parts = 1;
    request->send.ended = pc_request_sent;
    request->send.owner = request;
    if (outgoing->views == NULL) {
        const struct pc_array *array = &outgoing->array;
        request->dtype = array->dtype;
        request->ndim = array->ndim;
        for (int axis = 0; axis < array->ndim; axis++)
            request->dims[axis] = array->dims[axis];
        request->array =
            Py_NewRef(outgoing->stand_in != NULL ? outgoing->stand_in : outgoing->value);
        request->keeper = pc_memory_keeper(array, request->array, is_blocking);
        if (request->keeper == NULL) {
            Py_DECREF((PyObject *)request);
            return NULL;
        }
        request->one = (struct iovec){array->data, array->nbytes};
        header_nbytes = write_header(self->ident, array, outgoing->tag, header);
    } else {
        request->sent_type = Py_NewRef((PyObject *)Py_TYPE(outgoing->value));
        pc_p2p_header(header, self->ident, outgoing->tag, PC_FORM_OBJECT);
        if (set_parts(request, outgoing->views) < 0) {
            Py_DECREF((PyObject *)request);
            return NULL;
        }
    }
    request->send.keeper.object = request->keeper;
    if (request->views != NULL && request->views->count == 1)
        request->send.keeper.object = request->views->views[0].obj;
    return pc_request_start(request, header, header_nbytes, kind == PC_SSEND ? PC_OFFER : way);
}

struct pc_request *pc_messages_receive(pc_messages *self, const struct pc_incoming_call *incoming,
                                       enum pc_request_kind kind, bool is_blocking) {
    struct pc_request *request = pc_request_new(self, kind, is_blocking);
    if (request == NULL)
        return NULL;
    struct pc_receive *receive = &request->receive;
    request->peer = incoming->source;
    request->tag = incoming->tag;
    request->filled = incoming->status != NULL ? Py_NewRef(incoming->status) : NULL;
    receive->posted.queued.source =
        incoming->source == ANY ? PC_ANY : self->members[incoming->source];
    receive->posted.queued.tag = incoming->tag;
    receive->posted.peek = kind == PC_PROBE;
    receive->notify = pc_request_received;
    receive->owner = request;
    receive->ask = incoming->out == NULL;
    if (!receive->ask) {
        request->array = Py_NewRef(incoming->out);
        request->keeper = pc_memory_keeper(&incoming->array, incoming->out, is_blocking);
        if (request->keeper == NULL) {
            Py_DECREF((PyObject *)request);
            return NULL;
        }
        receive->into = incoming->array.data;
        receive->keeper.object = request->keeper;
        receive->room = incoming->array.nbytes;
        request->expects[0] = PC_FORM_ARRAY;
        request->expects[1] = (unsigned char)incoming->array.dtype;
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

/* --- waiting ---------------------------------------------------------------------------------- */

/* Have Python wait for what takes long: finish(received or sent, seconds), or
   finish_both(received, what was sent, seconds). */
static PyObject *hand_over(pc_messages *self, struct pc_request *one, PyObject *sent,
                           const struct pc_patience *patience) {
    PyObject *left = pc_patience_left(patience), *result = NULL;
    PyObject *args[3] = {(PyObject *)one, sent != NULL ? sent : left, left};
    if (left != NULL)
        result = sent != NULL ? pc_call_method(self->slow, "finish_both", args, 3, NULL)
                              : pc_call_method(self->slow, "finish", args, 2, NULL);
    Py_XDECREF(left);
    return result;
}

static PyObject *finish(pc_messages *self, struct pc_request *request, PyObject *sent,
                        uint64_t timeout_ns) {
    if (request == NULL)
        return NULL;
    struct pc_patience patience = pc_patience(timeout_ns);
    int done = pc_request_wait(request, patience.until_ns);
    PyObject *result = NULL;
    if (done > 0)
        result = pc_request_result(request);
    else if (done == 0)
        result = hand_over(self, request, sent, &patience);
    if (result == NULL) /* or a signal handler that has raised would leave it to take a message */
        pc_started_give_up((struct pc_started *)request);
    Py_DECREF((PyObject *)request);
    return result;
}

PyObject *pc_messages_finish(pc_messages *self, struct pc_request *request, uint64_t timeout_ns) {
    return finish(self, request, NULL, timeout_ns);
}

PyObject *pc_messages_finish_posted(pc_messages *self, struct pc_request *received,
                                    const struct pc_outgoing *posted, uint64_t timeout_ns) {
    PyObject *sent = Py_BuildValue("il", posted->dest, posted->tag);
    if (sent == NULL) {
        pc_started_give_up((struct pc_started *)received);
        Py_DECREF((PyObject *)received);
        return NULL;
    }
    PyObject *result = finish(self, received, sent, timeout_ns);
    Py_DECREF(sent);
    return result;
}

PyObject *pc_messages_finish_both(pc_messages *self, struct pc_request *received,
                                  struct pc_request *sent, uint64_t timeout_ns) {
    struct pc_patience patience = pc_patience(timeout_ns);
    int done = pc_request_wait(received, patience.until_ns);
    PyObject *result = NULL;
    if (done > 0 && received->status == 0)
        done = pc_request_wait(sent, patience.until_ns);
    if (done == 0) {
        result = hand_over(self, received, (PyObject *)sent, &patience);
    } else {
        PyObject *nothing = done > 0 && received->status == 0 ? pc_request_result(sent) : NULL;
        if (done > 0 && (nothing != NULL || received->status != 0))
            result = pc_request_result(received);
        Py_XDECREF(nothing);
    }
    if (result == NULL) {
        pc_started_give_up((struct pc_started *)received);
        pc_started_give_up((struct pc_started *)sent);
    }
    Py_DECREF((PyObject *)received);
    Py_DECREF((PyObject *)sent);
    return result;
}
