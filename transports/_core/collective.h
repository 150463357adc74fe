/* What the files of collectives over the message engine share: `pc_plan`, what is known of a call before it is made;
   `struct pc_started`, one that is under way; `pc_collectives`, those of one communicator.

   What is a contiguous NumPy array of a plain dtype is done here, by the plan of an earlier call with the same dtype,
   shape, operator and root. Without one Python is asked for it. All else, and what takes long or goes wrong, is handed
   with the same arguments to the Python methods.

   The engine works on the memory inside a call, which keeps itself alive until that has ended. */
#ifndef PC_COLLECTIVE_H
#define PC_COLLECTIVE_H

#include "engine_type.h"
#include "kinds.h"

#include "engine/run.h"

/* Bytes of the place where a call was made. */
#define PC_MOST_PLACE_NBYTES 256

/* What calls have in common that are alike. */
typedef struct {
    PyObject_HEAD
    struct pc_schedule table;
    struct pc_step *steps;
    uint32_t *chunks, *successors;
    struct pc_chunk_place *places;
    struct pc_reduction reduction;
    unsigned char *text;
    size_t text_nbytes, granule;
    uint32_t num_segments;
} pc_plan;

struct pc_plan_entry;

/* The collectives of one communicator. */
typedef struct {
    PyObject_HEAD
    pc_context_object *context;
    pc_engine_object *engine;
    int size, rank;
    char usable;
    PyObject *owner;   /* kept for Python */
    PyObject *type;    /* of calls under way */
    PyObject *planner; /* asked for plans */
    PyObject *finish;  /* waits for a call that takes long */
    PyObject *slow[2][PC_KINDS]; /* the Python methods; the first index: it blocks */
    uint64_t generation;
    struct pc_plan_entry *plans;
    uint32_t num_made;
} pc_collectives;

/* A call under way. */
struct pc_started {
    PyObject_HEAD
    pc_collectives *collectives;
    pc_plan *plan;
    struct pc_op op;
    struct pc_event event;
    struct pc_context *context; /* from its launch to its end: it may be closed meanwhile */
    struct pc_called *call;
    uint64_t number;
    struct pc_run *runs, one; /* of the segments that are under way */
    uint32_t most, in_flight, next_segment;
    PyObject *x, *result;
    void *source, *target;
    char is_blocking, collected;
    bool filling, is_launched, is_pending, is_watched, under_way;
    int status, from;
    size_t came, expected;
    struct pc_started *next; /* of those that have ended */
};

/* plan_type.c: plans of an earlier generation than this are not used. */
uint64_t pc_plans_generation(void);

/* call_place.c: write file and line of the innermost frame that is not pycoll's, at most PC_MOST_PLACE_NBYTES, as
   `task.caller` does; returns the length. */
size_t pc_call_place(char *to);

/* collective.c: start a call. NULL without an exception: it could not be, and Python says why. `source` and `target` are
   the memory of `x` and of `result`, which are kept. */
struct pc_started *pc_collective_start(pc_collectives *self, pc_plan *plan, PyObject *x, void *source,
                                       PyObject *result, void *target, bool is_blocking);
/* With the engine's lock: give it up, if it is under way. */
void pc_collective_give_up(struct pc_started *self);
/* With the engine's lock: the ranks of the world for which it waits, some of them perhaps twice; at most `most`. */
size_t pc_collective_awaited(const struct pc_started *self, int *ranks, size_t most);

/* collective_type.c: wait for the call as long as that is done here; whether it has ended. */
bool pc_collective_wait(struct pc_started *self);

#endif
