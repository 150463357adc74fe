/* What the files of point to point over the message engine share: `struct pc_messages`, the sends
   and receives of one communicator, and `struct pc_request`, one of them.

   The engine works on the memory inside a request. So a request that is under way keeps itself
   alive; when it has ended, it is put into the engine's list of those that are to be let go, or
   into the queue of events.

   A receive without `out` does not know its memory before its message has come. A short message of
   one that nobody may be waiting for is received into memory from `malloc` at once, and becomes a
   value when that is asked for. Any other message is *held*: a thread that has the interpreter's
   lock must *go on* with it, that is, make memory and have it received there, or hand it to Python.
   That is the thread that waits for the request, if there is one in the core; else an event says
   so. */
#ifndef PC_REQUEST_H
#define PC_REQUEST_H

#include "python/engine/started.h"
#include "python/arguments/p2p_call.h"
#include "python/base/views.h"

/* Dimensions of an array that a request can name. */
#define PC_NAMED_DIMS 6
/* A message of that length or less is received without asking for memory of Python's: that of
   transports/base.py. */
#define PC_SHORT_NBYTES ((size_t)64 << 10)

/* Forms of a message: context.ARRAY and OBJECT; there are more. */
enum { PC_FORM_ARRAY, PC_FORM_OBJECT };

/* Statuses of a request, beyond those of the engine. */
enum {
    PC_HELD = 1000001,   /* somebody must go on with its message; it has not ended */
    PC_GIVEN_UP,         /* the caller has given it up */
    PC_GOING_ON,         /* a thread goes on with its message, or Python does; it has not ended */
};

typedef struct {
    PC_METHODS_HEAD
    uint64_t ident;
    int size;
    int *members; /* world ranks, by rank here */
    int *ranks;   /* ranks here, by world rank; -1 */
    PyObject *both_type;   /* of a receive and a send as one request */
    PyObject *status_type; /* of what a receive fills in */
    PyObject *dump, *new_bytes; /* functions of pickling: see `Messages` */
    PyObject *here;                    /* returns the GPU on which this thread works, or None */
    int first;          /* rank here that a receive from any looks at first, to be fair */
    uint64_t looked_ns; /* when Python has looked last for a probe that does not wait */
} pc_messages;

enum pc_request_kind { PC_SEND, PC_SSEND, PC_RECV, PC_PROBE };

struct pc_request {
    PC_STARTED_HEAD(pc_messages, messages)
    struct pc_receive receive;
    struct pc_send send;
    struct iovec one, *parts; /* of an object that has several */
    struct pc_views *views;   /* of an object that is sent, until that is done */
    PyObject *sent_type;      /* of such an object; or NULL */
    enum pc_request_kind kind;
    char cancelled;
    bool is_starting;
    _Atomic int status;
    uint32_t claims; /* how often a thread has begun to go on with a message */
    int peer;        /* rank here, or ANY */
    long tag;
    unsigned char expects[2];
    unsigned char *spare;     /* the short message that was received, until a value is made of it */
    PyObject *array;          /* what is sent, until that is done; or what is filled */
    PyObject *keeper;         /* of its memory, if it is the caller's */
    bool is_pickled;          /* the array is the memory of an object that was not loaded yet */
    PyObject *filled;         /* the Status to be filled in, or NULL */
    PyObject *gpu;            /* on which a receive without `out` was started; or NULL */
    int dtype, ndim;
    intptr_t dims[PC_NAMED_DIMS];
    bool is_let_go; /* it has ended, and the engine works on it no more */
    /* watch.h. To what it belongs, or NULL: set with the interpreter's lock, and also read with the
       engine's alone. All else with the interpreter's. */
    struct pc_watch *_Atomic watch;
    Py_ssize_t place;                  /* where it was seen in the list */
    struct pc_request *before, *after; /* in the queue of those that were not given yet */
    bool stands;                       /* in that queue */
};

/* request.c: beginning and ending. Those without a comment are called with the engine's lock. */

/* A request to be filled in; NULL with an exception. Without the lock. */
struct pc_request *pc_request_new(pc_messages *messages, enum pc_request_kind kind,
                                  bool is_blocking);
/* Start a request that was filled in, which takes the reference and returns it; NULL with an
   exception. The header is that of a send. Without the lock. */
struct pc_request *pc_request_start(struct pc_request *request, const void *header,
                                    size_t header_nbytes, enum pc_way way);
void pc_request_sent(struct pc_send *send);
void pc_request_received(struct pc_receive *receive);
/* It has ended; the request may be gone when this returns. */
void pc_request_end(struct pc_request *request, int status);
/* As of `struct pc_started_ops`; whatever it is at: a message that is read goes back to its
   place. */
bool pc_request_give_up(struct pc_started *request);
void pc_request_let_go(struct pc_started *request);
/* Have whoever waits, or Python, go on with the message that a receive holds. */
void pc_request_hold(struct pc_request *request);

/* Whether it is a receive or a probe, not a send. This and what follows also without the lock. */
static inline bool pc_request_receives(const struct pc_request *request) {
    return request->kind >= PC_RECV;
}

static inline bool pc_request_is_held(struct pc_request *request) {
    return atomic_load_explicit(&request->status, memory_order_relaxed) == PC_HELD;
}
/* Whether it has ended, as its caller sees it. The end of its op may also mean that it holds a
   message. */
static inline bool pc_request_is_done(struct pc_request *request) {
    if (!pc_op_is_done(&request->op))
        return false;
    int status = atomic_load_explicit(&request->status, memory_order_acquire);
    /* Another thread may just have begun to go on with its message, or to wait for another one. */
    return status != PC_HELD && status != PC_GOING_ON && pc_op_is_done(&request->op);
}

/* request_value.c: from messages to values. With the interpreter's lock, without the engine's. */

/* Whether a message is one of those that become a value here. Also without the interpreter's
   lock. */
bool pc_value_is_known(const unsigned char *header, size_t header_nbytes, size_t nbytes);
/* A new array of Python's for a message, and where its elements are. NULL with an exception, or
   without one: it is no array of a kind that is known here. */
PyObject *pc_value_array(const unsigned char *header, size_t header_nbytes, size_t nbytes,
                         void **data);
/* Fill in a Status: 0; -1 with an exception. */
int pc_fill_status(PyObject *status, int source, int64_t tag, size_t nbytes);
/* Go on with a message that a request holds; nothing is done if it does not, or another thread
   does. 0; -1 with an exception. */
int pc_request_go_on(struct pc_request *request);
/* What a request returns that has ended; NULL with an exception. */
PyObject *pc_request_result(struct pc_request *request);
/* request_type.c */
extern const struct pc_started_ops pc_request_ops;
extern PyTypeObject *pc_request_type, *pc_both_type, *pc_persistent_type;
/* Wait until it has ended, or a time of the monotonic clock; 0: do not wait. Returns 1: it has; 0:
   not yet; -1 with an exception. */
int pc_request_wait(struct pc_request *request, uint64_t until_ns);

#endif
