/* The message engine as Python sees it: `_core.MessageEngine`, and what belongs to it.

   Nothing here touches a Python object while the engine's lock is held, and nobody waits for that
   lock while he holds the interpreter's: `pc_engine_take` tries it, and else gives up the
   interpreter's lock first. What the engine tells is put into a queue, which `MessageEngine.events`
   empties. */
#ifndef PC_ENGINE_TYPE_H
#define PC_ENGINE_TYPE_H

#include "python/base/py.h"

#include "engine/drive.h"
#include "engine/engine.h"
#include "engine/link_queue.h"
#include "engine/link_shm.h"
#include "engine/link_tcp.h"
#include "python/base/views.h"

enum pc_event_kind {
    PC_EVENT_ARRIVED,  /* Receive: of another kind than point-to-point */
    PC_EVENT_HELD,     /* Receive: its message has come */
    PC_EVENT_ENDED,    /* Receive or Send, status */
    /* Started: it is done, or a Request holds a message, or a Collective an announcement; or the
       owner of what has ended: these two */
    PC_EVENT_STARTED,
    PC_EVENT_COMPOSED, /* so the queue calls it: a run that is a part of a call of Python's */
    PC_EVENT_SEVERAL,  /* so, too: what a wait for several waits for is done */
    PC_EVENT_ASKED,    /* its owner: such a run has steps for Python to do */
    PC_EVENT_FINISHED, /* rank */
    PC_EVENT_LOST,     /* rank, why */
    PC_EVENT_WANTED,   /* rank: it must be dialed */
    PC_EVENT_WATCHED,  /* the dialer has something to do */
};

struct pc_event {
    struct pc_event *next;
    enum pc_event_kind kind;
    bool stands; /* in the queue */
};

struct pc_peer_events {
    struct pc_event finished, lost, wanted;
    char why[128];
};

/* A send or a receive of Python's: it belongs to its handle, a `Send` or a `Receive`. */
struct pc_py_item {
    struct pc_event event; /* the first member */
    struct pc_receive receive;
    struct pc_send send;
    PyObject *handle;  /* not owned; NULL: it has none yet */
    bool is_orphan;  /* its handle is gone: who takes the event out of the queue frees this */
    bool is_quiet;   /* what becomes of it is returned, not told */
    /* its event was taken out of the queue, and is being told: who tells it looks at this last */
    bool is_reporting;
    bool is_gone;    /* its handle is being freed; with the interpreter's lock */
    int status;
    struct pc_views *views; /* of the memory that is used */
    struct iovec *parts;
    /* Of its message. */
    unsigned char *header;
    size_t header_nbytes, nbytes;
    int peer;
    uint64_t order;
    unsigned char expects[2];
    const void *payload; /* NULL: it is not here */
    bool sender_waits;
    /* Of a point-to-point receive. If its sender takes back a message that Python has, another
       receive waits at once in the place of this one, until Python posts it again: else a later
       receive would get the message that comes next. */
    struct pc_context *context; /* NULL: it is none */
    bool is_known;              /* Python knows that its message has come */
    bool for_message;            /* and that message is then no receive's: none waits again */
    struct pc_py_item *successor, *next_preceding;
};

struct pc_parker;
struct pc_started;

typedef struct pc_engine_object {
    PyObject_HEAD
    struct pc_drive drive;
    struct pc_engine engine;
    struct pc_link to_self, **links; /* by rank */
    PyObject *host;                  /* NULL: no memory is shared */
    unsigned char *counted; /* memory in which it counts what it does; NULL: its own */
    size_t counted_nbytes;
    /* called in the background, if there is something for Python to do */
    PyObject *on_work;
    struct pc_link_shm shm;
    struct pc_link_tcp tcp;
    struct pc_link_queue queue; /* to transports in Python */
    PyObject *on_orders, *on_stop; /* see link_type.c */
    bool is_open, has_tcp, has_queue, is_behind;
    bool is_called; /* a thread with the interpreter's lock is in the engine */
    bool lags;      /* a transport in Python has something to write */
    /* A thread holds the lock of the engine in Python, or there is something to do with it: calls
       go through Python, which waits for that lock. */
    char python_busy;
    PyObject *dropped; /* list: for communicators that nobody holds any more, until they end */
    struct pc_event *first, **last; /* the queue; written by `pc_engine_set` */
    struct pc_event watched;
    struct pc_peer_events *peers;
    struct pc_parker *nappers;
    struct pc_py_item *preceding; /* receives that have a successor, by `next_preceding` */
    struct pc_started *ended; /* what is to be let go; written so, too */
    _Atomic uint64_t rings;   /* of the doorbell */
    uint64_t looked;          /* how often a wait for any of several has looked at one; for tests */
} pc_engine_object;

/* What is written with the lock, and looked at without it only to see whether there is
   something. */
#define pc_engine_set(place, value) __atomic_store_n(place, value, __ATOMIC_RELAXED)
#define pc_engine_has(place) (__atomic_load_n(&(place), __ATOMIC_RELAXED) != NULL)

typedef struct {
    PyObject_HEAD
    pc_engine_object *engine;
    struct pc_context *context; /* NULL: closed */
    uint64_t num_calls;         /* when it was */
    char messages_usable, collectives_usable; /* whether `Messages`, `Collectives` do anything */
    uint64_t op_timeout_ns; /* the default deadline of their operations */
} pc_context_object;

/* Who breaks a context says no more than that: Python knows why. */
enum { PC_BROKEN = 1 << 30 };
/* The same of a call with which Python has gone on; of the latter all is done, but its caller
   cannot have the result. */
enum { PC_FAILED_IN_PYTHON = 1 << 29, PC_UNFIT };

/* Types that others than their own files make, or take; module.c makes them of their specs. */
extern PyTypeObject *pc_engine_type, *pc_context_type, *pc_send_type, *pc_receive_type,
    *pc_piece_type, *pc_scratch_type, *pc_started_type;

/* What a thread of the program does with the engine's lock. */
struct pc_turn {
    bool is_taken;
    PyThreadState *state; /* NULL: it still has the interpreter's lock */
    uint64_t orders;      /* that the links in Python had before */
};
/* Take the engine's lock. Until it is given no Python object may be touched. False: the engine is
   closed, and nobody but threads with the interpreter's lock comes here any more. */
bool pc_engine_take(pc_engine_object *self, struct pc_turn *turn);
/* Give it back, if it was taken. */
void pc_engine_give(pc_engine_object *self, const struct pc_turn *turn);
/* With that lock: put an event into the queue, and have somebody take it out; or have nobody hear
   of it. */
void pc_engine_post(pc_engine_object *self, struct pc_event *event);
void pc_engine_unpost(pc_engine_object *self, struct pc_event *event);
/* Raise that the engine is closed; returns NULL. */
PyObject *pc_engine_is_closed(void);
/* started.c: let go of what has ended. */
void pc_engine_let_go(pc_engine_object *self);
/* Let all links make progress, and let go of what has ended. Whether anything was done. */
bool pc_engine_look(pc_engine_object *self);
/* Something was told to Python meanwhile, and nobody may be waiting who would hear it. 0; -1 with
   an exception. Without the lock. */
int pc_engine_hear(pc_engine_object *self);

/* engine_events.c: methods of `MessageEngine`, as in the next two. */
PyObject *pc_engine_events_py(pc_engine_object *self, PyObject *unused);

/* engine_links.c */
PyObject *pc_engine_attach_py(pc_engine_object *self, PyObject *args);
PyObject *pc_engine_lose_py(pc_engine_object *self, PyObject *args);
PyObject *pc_engine_forget_py(pc_engine_object *self, PyObject *number);
PyObject *pc_engine_links_py(pc_engine_object *self, PyObject *unused);

/* engine_life.c */
PyObject *pc_engine_new_py(PyTypeObject *type, PyObject *args, PyObject *kwargs);
void pc_engine_dealloc(pc_engine_object *self);
PyObject *pc_engine_say_goodbye_py(pc_engine_object *self, PyObject *unused);
PyObject *pc_engine_flush_py(pc_engine_object *self, PyObject *unused);
PyObject *pc_engine_close_py(pc_engine_object *self, PyObject *unused);
PyObject *pc_engine_forked_py(pc_engine_object *self, PyObject *unused);

/* parker_type.c: the doorbell of an engine, the owner, has rung. With the lock. */
void pc_parker_rung(void *owner);

/* item.c; see item.h for what is its own */
/* A receive that asks, for a message that Python shall see; NULL: there is no memory. */
struct pc_receive *pc_item_other(struct pc_engine *engine, const struct pc_message *message);
/* With the lock: take over what Python shall know of an item whose event was taken out of the
   queue. False: nothing. */
bool pc_item_taken(struct pc_py_item *item);
/* The event of an item as Python sees it; NULL with an exception. False: its handle is being freed,
   and hears nothing. */
bool pc_item_event(pc_engine_object *self, struct pc_py_item *item, enum pc_event_kind kind,
                   int status, PyObject **event);
/* With the lock: the successor of some receive, in its place, which it is no more; NULL: there is
   none. */
struct pc_py_item *pc_item_adopt(pc_engine_object *self, const struct pc_context *context,
                                 uint64_t number);
/* Give a handle another item than the one it was made with, which was not started. */
void pc_item_swap(PyObject *handle, struct pc_py_item *item);
/* A `Receive` with its item, which asks, and is not started; NULL with an exception. */
PyObject *pc_item_new_receive(pc_engine_object *engine, struct pc_py_item **item);
/* A receive that was not started takes over the message that another one holds, which is idle then.
   With the lock. */
bool pc_item_take_over(PyObject *handle, struct pc_receive *from);
/* A `Receive` that was not started; NULL with an exception. */
PyObject *pc_item_receive(pc_engine_object *self);

/* send_type.c: the method `MessageEngine.send` */
PyObject *pc_item_send(pc_engine_object *self, PyObject *const *args, Py_ssize_t count);

/* scratch_type.c */
/* The object that keeps scratch memory; NULL, without an exception: it has none. */
PyObject *pc_scratch_object_of(void *memory);
/* Free scratch memory, now or when nobody refers to its object any more. */
void pc_scratch_free_with_keeper(void *memory);
/* Let go of objects whose memory the engine does not use any more. */
void pc_scratch_let_go_left(pc_engine_object *self);
/* Have these ranks reached by transports in Python. 0, or an errno; -1 with an exception. */
int pc_link_open(pc_engine_object *self, PyObject *ranks);
/* Have Python do what stands in the queue; without the lock. An exception that is set stays. */
void pc_link_do_orders(pc_engine_object *self);
/* The same, if memory is still used that was given up. */
void pc_link_settle(pc_engine_object *self);
/* Have Python say whether it is too late to stop a send; without the lock. */
void pc_link_before_stop(pc_engine_object *self, const struct pc_send *send);
PyObject *pc_link_next_order(pc_engine_object *self, PyObject *unused);
PyObject *pc_link_tell_arrived(pc_engine_object *self, PyObject *args);
PyObject *pc_link_tell(pc_engine_object *self, PyObject *args);
PyObject *pc_link_tell_end(pc_engine_object *self, PyObject *args);
PyObject *pc_link_tell_lag(pc_engine_object *self, PyObject *value);

/* started.c */
/* With the lock: the event was taken out of the queue. `pc_started_event` follows, without it. */
void pc_started_event_taken(struct pc_event *event);
PyObject *pc_started_event(pc_engine_object *self, struct pc_event *event);

/* several_type.c: the event was taken out of the queue. Without the lock. */
PyObject *pc_several_event(struct pc_event *event);

/* composed_type.c: the event was taken out of the queue. Without the lock. */
PyObject *pc_composed_event(struct pc_event *event);
PyObject *pc_composed_asks(struct pc_event *event);

/* persistent_type.c: what one has started last, borrowed; NULL: nothing, or it is none. */
PyObject *pc_persistent_last(PyObject *object);
/* plan_type.c */
PyObject *pc_forget_plans(PyObject *module, PyObject *unused);

#endif
