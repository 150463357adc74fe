/* What the core has begun and Python knows as a request: sends and receives (python/requests), and
   collectives (python/collectives). `_core.Started` has the methods that all of them have.

   The engine works on the memory inside. So what is under way keeps itself alive; when it has
   ended, it is put into the engine's list of what is to be let go, or into the queue of events. */
#ifndef PC_STARTED_H
#define PC_STARTED_H

#include "engine_type.h"

/* What begins them: the methods of one communicator. */
#define PC_METHODS_HEAD                                                                         \
    PyObject_HEAD pc_context_object *context;                                                   \
    pc_engine_object *engine; /* of the context */                                              \
    PyObject *owner;          /* kept for Python */                                             \
    PyObject *type;           /* of what they begin */                                          \
    PyObject *slow; /* returns the Python method of a name: for what is not done here */

struct pc_methods {
    PC_METHODS_HEAD
};

struct pc_started_ops;

#define PC_STARTED_HEAD(methods, of)                                                            \
    PyObject_HEAD const struct pc_started_ops *ops;                                             \
    methods *of; /* kept: what has begun it */                                                  \
    struct pc_op op;                                                                            \
    struct pc_event event;                                                                      \
    struct pc_started *next; /* of those that have ended */                                     \
    char is_blocking, collected; /* `collected`: a wait has returned its result */              \
    bool is_pending, is_watched, under_way;                                                     \
    bool is_reporting; /* its event was taken out of the queue, and is being told */

struct pc_started {
    PC_STARTED_HEAD(struct pc_methods, of)
};

/* All with the interpreter's lock; those with the engine's, too, say so. NULL where that is
   said. */
struct pc_started_ops {
    /* Whether it has ended, as its caller sees it; also without any lock. */
    bool (*is_done)(struct pc_started *self);
    /* What `done` returns; NULL: whether it has ended. */
    PyObject *(*done)(struct pc_started *self);
    /* What only a thread with the interpreter's lock can do for it: 0; -1 with an exception. NULL:
       there is nothing. */
    int (*go_on)(struct pc_started *self);
    /* Wait until then, or look once (0). 1: it has a result; 0: not yet, or Python says why not; -1
       with an exception. */
    int (*wait)(struct pc_started *self, uint64_t until_ns);
    /* NULL with an exception. */
    PyObject *(*result)(struct pc_started *self);
    /* It is under way, and its end will be told from now on. With the engine's lock. Or NULL. */
    void (*watched)(struct pc_started *self);
    /* False: it has ended. With the engine's lock. NULL, as the next: it is none of the
       engine's. */
    bool (*give_up)(struct pc_started *self);
    /* It has ended, and the engine works on it no more. */
    void (*let_go)(struct pc_started *self);
};

extern PyTypeObject *pc_started_type;
static inline bool pc_is_started(PyObject *object) {
    return PyObject_TypeCheck(object, pc_started_type);
}

/* Whether anything can be begun here; `usable` as the context says. */
static inline bool pc_may_start(const struct pc_methods *self, bool usable) {
    const pc_engine_object *engine = self->engine;
    return PC_LIKELY(usable && !engine->python_busy) &&
           atomic_load_explicit(&engine->drive.closed, memory_order_relaxed) == PC_DRIVE_OPEN &&
           (engine->host == NULL || !pc_host_failed(engine->shm.channel.host));
}

/* A new one, of a type that derives from `_core.Started`; NULL with an exception. */
void *pc_started_new(PyObject *type, const struct pc_started_ops *ops, void *methods,
                     bool is_blocking);
/* With the engine's lock: it has ended; `is_told`: by an event in any case. It may be gone when
   this returns. */
void pc_started_end(struct pc_started *self, int status, bool is_told);
/* Give it up. False: it has ended. */
bool pc_started_give_up(struct pc_started *self);
PyObject *pc_started_wait_method(struct pc_started *self, PyObject *const *args, Py_ssize_t count,
                                 PyObject *keywords);
/* Have Python go on with a wait: `_wait` of an object with these arguments. */
PyObject *pc_wait_in_python(PyObject *self, PyObject *const *args, Py_ssize_t count,
                            PyObject *keywords);

#endif
