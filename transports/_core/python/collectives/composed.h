/* What the files of composed calls share: `struct pc_composed`, a schedule run as a part of a call
   that Python has begun. What such a run cannot do itself (engine/run.h) it asks Python for. */
#ifndef PC_COMPOSED_H
#define PC_COMPOSED_H

#include "collective.h"

struct pc_composed {
    PyObject_HEAD
    pc_context_object *on;
    PyObject *owner; /* from its start until its end was told */
    pc_plan *plan; /* its schedule */
    struct pc_views *sources, *targets;
    struct iovec *parts; /* of sources in several parts */
    struct pc_chunk_place *places;
    struct pc_grown *grown; /* NULL: all lengths are known */
    struct pc_pipeline pipeline;
    struct pc_event event, steps_event;
    uint64_t number;
    bool is_launched, under_way; /* under way it keeps itself alive, until its end was told */
};

/* composed_steps.c: the methods by which Python does what it was asked for. */
PyObject *pc_composed_next_asked(struct pc_composed *self, PyObject *unused);
PyObject *pc_composed_step_done(struct pc_composed *self, PyObject *args);
PyObject *pc_composed_wait_again(struct pc_composed *self, PyObject *args);
PyObject *pc_composed_settle(struct pc_composed *self, PyObject *args);
PyObject *pc_composed_where(struct pc_composed *self, PyObject *args);
PyObject *pc_composed_place(struct pc_composed *self, PyObject *args);
PyObject *pc_composed_take(struct pc_composed *self, PyObject *args);
PyObject *pc_composed_incoming(struct pc_composed *self, PyObject *args);
PyObject *pc_composed_own(struct pc_composed *self, PyObject *args);
PyObject *pc_composed_grown(struct pc_composed *self, PyObject *number);
/* With the engine's lock: a run has something for Python to do. */
void pc_composed_asked(struct pc_pipeline *pipeline);
/* Let go of the memory for chunks of unknown length. */
void pc_composed_free_grown(struct pc_composed *self);

#endif
