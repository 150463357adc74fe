/* The arguments of sends and receives of one communicator, the requests that are made of them, and
   how long a blocking call waits. With the interpreter's lock. */
#ifndef PC_MESSAGES_H
#define PC_MESSAGES_H

#include "request.h"
#include "python/arguments/timeout.h"

/* What shall be sent: an array, whose memory is looked at; or the bytes of a pickled object. */
struct pc_outgoing {
    PyObject *value;        /* borrowed */
    PyObject *stand_in;     /* of an array that is not contiguous; or NULL */
    struct pc_array array;  /* of the one or the other */
    struct pc_views *views; /* NULL: it is an array. They are the request's then. */
    int dest;
    long tag;
};

/* What shall be received. */
struct pc_incoming_call {
    int source; /* rank here, or ANY */
    long tag;
    PyObject *out, *status; /* borrowed, or NULL */
    struct pc_array array;  /* `out`; must be released */
    /* What stands in for an array that is none of those, and is `out` then, and a Status which says
       how much of it has come; or NULL. These must be released, too. */
    PyObject *stand_in, *own_status;
    bool is_copy; /* that it does not lie in the memory of `out` */
};

/* Whether anything can be started here. */
static inline bool pc_messages_may_start(const pc_messages *self) {
    return pc_may_start((const struct pc_methods *)self, self->context->messages_usable);
}
/* 1: `outgoing` is filled in, and must be released; 0: leave it to Python; -1 with an exception.
   `out`: what is written to meanwhile, or NULL. */
int pc_outgoing_of(pc_messages *self, PyObject *x, PyObject *dest, PyObject *tag, PyObject *out,
                   struct pc_outgoing *outgoing);
/* But for `views`. */
static inline void pc_outgoing_release(struct pc_outgoing *outgoing) {
    pc_memory_release(&outgoing->array);
    Py_CLEAR(outgoing->stand_in);
}
/* False: leave it to Python; perhaps with an exception. */
bool pc_incoming_of(const pc_messages *self, PyObject *source, PyObject *tag, PyObject *out,
                    PyObject *status, struct pc_incoming_call *incoming);

/* Start a send, or a receive or probe; NULL with an exception. */
struct pc_request *pc_messages_send(pc_messages *self, struct pc_outgoing *outgoing,
                                    enum pc_request_kind kind, bool is_blocking, enum pc_way way);
struct pc_request *pc_messages_receive(pc_messages *self, const struct pc_incoming_call *incoming,
                                       enum pc_request_kind kind, bool is_blocking);

/* messages_direct.c: send an array, or an object of one part, at once. False: nothing has
   happened. */
#define PC_DIRECT_NBYTES ((size_t)64 << 10)
#define PC_DIRECT_OBJECT_NBYTES ((size_t)4 << 10)
bool pc_messages_post(pc_messages *self, const struct pc_outgoing *outgoing);
/* Receive what is the next already, or nearly; returns what a receive returns. NULL with an
   exception, or without one: nothing has happened. */
PyObject *pc_messages_take(pc_messages *self, const struct pc_incoming_call *incoming);

/* Wait for the request of a blocking call, which is let go; what takes long goes on in Python. */
PyObject *pc_messages_finish(pc_messages *self, struct pc_request *request, uint64_t timeout_ns);
/* The same for the receive of a sendrecv whose message was posted. */
PyObject *pc_messages_finish_posted(pc_messages *self, struct pc_request *received,
                                    const struct pc_outgoing *posted, uint64_t timeout_ns);
/* The same for a receive and a send at the same time; if one fails, the other is given up. */
PyObject *pc_messages_finish_both(pc_messages *self, struct pc_request *received,
                                  struct pc_request *sent, uint64_t timeout_ns);

/* both_type.c: a request of the type for that, `both_type`; NULL with an exception. */
PyObject *pc_both_new(struct pc_request *received, struct pc_request *sent);
/* The requests it is made of, borrowed; false: it is none. */
bool pc_both_parts(PyObject *object, struct pc_request **received, struct pc_request **sent);

#endif
