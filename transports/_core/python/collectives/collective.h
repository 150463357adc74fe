/* What the files of collectives over the message engine share: `pc_plan`, what is known of a call
   before it is made; `struct pc_running`, one that is under way; `pc_collectives`, those of one
   communicator.

   What is a contiguous array in host memory, of a plain dtype, is done here, by the plan of an
   earlier call with the same dtype, shape, operator and root. Without one Python is asked for it.
   All else, and what takes long or goes wrong, is handed with the same arguments to the Python
   methods.

   The engine works on the memory inside a call, which keeps itself alive until that has ended. */
#ifndef PC_COLLECTIVE_H
#define PC_COLLECTIVE_H

#include "python/arguments/arrays.h"
#include "python/engine/started.h"
#include "python/exchange/comm.h"
#include "python/arguments/kinds.h"
#include "python/base/call_place.h"

#include "engine/pipeline.h"

/* Dimensions of an array of which plans are kept. */
#define PC_PLAN_DIMS 6

/* A schedule with its memory. */
struct pc_compiled {
    struct pc_schedule table;
    struct pc_step *steps;
    uint32_t *chunks, *successors;
    bool has_external; /* some steps */
};

/* Of a call that its root announces (broadcast, scatter), because nobody else knows what will
   come: see _calls/rooted.py. A rank *expects* what an array of the same kind would be announced
   by. If that comes, the call goes on here; if not, it is *held* until Python has seen the
   announcement. */
struct pc_announced {
    bool is_announced, is_root;
    struct pc_compiled way; /* how the announcement goes, which is its one chunk */
    unsigned char *head;    /* that of the root, or what is expected; NULL: nothing */
    size_t head_nbytes;
    /* so many bytes of the value follow the head, and that is all; -1: it comes later */
    Py_ssize_t inline_nbytes;
    size_t most;              /* how long it may be */
    /* of the result, for a rank that has passed no array; of no result: -1 dimensions */
    int dtype, ndim;
    intptr_t dims[PC_PLAN_DIMS];
};

/* plan_type.c: compile steps for `size` ranks; `table.num_chunks` is known. 0; -1 with an
   exception. */
int pc_compiled_read(struct pc_compiled *self, PyObject *steps, int size);
void pc_compiled_free(struct pc_compiled *self);
/* The reduction of an operator, a dtype, and by what results are divided; an operator of -1:
   none. */
struct pc_reduction pc_reduction_of(int op, int dtype, int divisor);

/* What calls have in common that are alike; or the schedule alone, of a part of a call of
   Python's. */
typedef struct {
    PyObject_HEAD
    struct pc_compiled way;
    struct pc_chunk_place *places; /* NULL: the schedule alone */
    struct pc_announced announced;
    struct pc_reduction reduction;
    unsigned char *text;
    size_t text_nbytes, granule;
    uint32_t num_segments;
    PyObject **second; /* plans of second rounds, by `pc_second_at`; NULL: none are known yet */
    uint64_t salt; /* of calls in shared memory, of which nothing but the text is known; else 0 */
} pc_plan;

struct pc_plan_entry;

/* Bytes that travel at once of what may be longer: see `INLINE_NBYTES` in _calls/rooted.py. */
#define PC_INLINE_NBYTES 4096
/* What a function reduces is gathered (`pc_moves_for`) if it has at most so many bytes, of all
   ranks together; and of at most so many ranks: each then calls the function for every other. */
#define PC_GATHERED_NBYTES (256 << 10)
#define PC_GATHERED_RANKS 16
#define PC_MOST_BLOCK_DIMS 32
/* What goes before the elements of a block has at most so many. */
#define PC_BLOCK_HEAD_NBYTES 320

/* An array of `out`. */
struct pc_out {
    PyObject *object; /* NULL: none is given for this block */
    unsigned char *start;
    size_t nbytes;
    const struct pc_library *library;
    int dtype, ndim;
    intptr_t dims[PC_MOST_BLOCK_DIMS];
};

/* The blocks of a call of which only their senders know the length (blocks.c). */
struct pc_blocks {
    bool are_objects;
    int dtype; /* of arrays */
    uint32_t num_chunks;
    struct pc_chunk_place *places; /* by chunk */
    struct pc_grown *grown;        /* by chunk */
    struct iovec *parts;           /* of what this rank gives */
    unsigned char *heads;
    uint64_t length; /* of an object that comes in the second round */
    /* Of an all_gather the second round brings what is too long for the first. Before its end the
       longest there has so many bytes; 0: there is none, PC_UNKNOWN: some block is not known */
    bool has_second;
    size_t longest;
    /* those that this rank gets: from a chunk on so many, of which it has one itself, or -1 */
    int first, count, own_at;
    int own_given; /* which of those given that is */
    bool is_later;  /* that is too long for the first round */
    PyObject *own;  /* that: an array, or the bytes of an object; NULL: it goes to `out` */
    void *own_start;
    struct pc_out *out; /* where arrays go, by block, or one for all; or NULL */
    bool are_rows;      /* of that one, in which they stand one after the other */
    intptr_t *ends;     /* the row behind each of them, when all are known */
    bool is_direct;     /* the second round goes to `out` */
    PyObject *came; /* the others, as `Memory`, once somebody has asked; then `grown` has none */
};

/* The arrays of an all_reduce_many, all of one dtype, which together have so many bytes. More, or
   longer ones, are Python's: it has several buckets under way at once, and the results are views
   of these, so nothing is copied back. */
#define PC_MOST_MANY 512
#define PC_MANY_NBYTES ((size_t)256 << 10)
struct pc_many {
    PyObject *xs, *out; /* tuples; `out`: or NULL */
    int dtype;
    size_t nbytes;
    size_t *shapes; /* of each the number of dimensions, and these */
    size_t num_listed;
};

/* Their elements, one after the other; and when these are reduced, where they go. */
struct pc_bucket {
    PyObject *memory, *results; /* an array of bytes; a list */
    void *start;                /* of the memory */
    intptr_t nbytes;
    Py_ssize_t count;
    struct pc_member {
        void *to;
        size_t nbytes;
        PyObject *keeper; /* of the memory there */
    } members[];
};

/* The collectives of one communicator. */
typedef struct {
    PC_METHODS_HEAD
    int size, rank;
    PyObject *planner; /* asked for plans */
    PyObject *finish;  /* waits for a call that takes long: (call, seconds) */
    PyObject *unpack;  /* makes an array of the `Memory` of a block that has come */
    pc_comm *comm;    /* where blocking calls go first; NULL: nowhere */
    unsigned allowed; /* a bit a method: it may go there */
    uint64_t generation;
    struct pc_plan_entry *plans;
    uint32_t num_made;
} pc_collectives;

/* A call under way. */
struct pc_running {
    PC_STARTED_HEAD(pc_collectives, collectives)
    pc_plan *plan, *second; /* of the second round; or NULL: then it is one that `plan` keeps */
    PyObject *x, *result; /* x: or NULL; of objects, or arrays and `out`, as of `pc_blocks_of` */
    PyObject *source_keeper, *target_keeper; /* of the memory of these; or NULL */
    void *source, *target;
    int number_dtype;           /* the result is a number of that dtype; 0: it is none */
    union pc_number numbers[2]; /* it, and what this rank gives for it */
    int64_t *gathered;          /* of all ranks, if it is made of these; or NULL */
    int reduction;              /* operator that combines numbers */
    int kind, root;
    PyObject *algorithm; /* an interned string: that name is found at no other place; or NULL */

    struct pc_context *context; /* from its launch to its end: it may be closed meanwhile */
    struct pc_called *call;
    uint64_t number;
    /* of its segments, with its status; of an announced call the first run, before them, is the
       announcement */
    struct pc_pipeline pipeline;
    /* of an announced call: its memory, and where that is its one chunk */
    unsigned char *announcement;
    size_t announcement_nbytes;
    struct pc_chunk_place announcement_place;
    struct pc_blocks *blocks; /* or NULL */
    struct pc_bucket *bucket; /* or NULL */
    bool is_raw; /* the result must be made of what has come: `blocks`, or the announcement; */
    bool is_settled; /* or by `result`, a function of Python's that went on with the call */
    /* Python must see what has come so far; */
    bool is_held;
    bool is_left; /* nothing has: it does all */
    bool is_launched;
};

/* collectives_type.c: let calls like this one, which were made without an array off root, go by
   that plan. 0; -1 with an exception. */
int pc_collectives_expect(pc_collectives *self, const struct pc_running *like, PyObject *plan);
/* plan_type.c: plans of an earlier generation than this are not used. */
uint64_t pc_plans_generation(void);
/* The same for all lengths for which the same schedule is chosen (`Selector._rounded`): so many
   bits, and the first three. */
#define PC_SECONDS 512
static inline unsigned pc_second_at(size_t nbytes) {
    unsigned bits = 64 - (unsigned)__builtin_clzll(nbytes | 7) - 3;
    return bits * 8 + (unsigned)(nbytes >> bits);
}
/* With the engine's lock: keep the plan of second rounds of that length, with its reference. False:
   there is one, or no memory. */
bool pc_plan_keep_second(pc_plan *self, size_t nbytes, PyObject *second);

/* blocks.c: look at the blocks that this rank gives. `for_python` gets these as x has them, `kept`
   what keeps their memory, and that of `out` (NULL: there is none). NULL without an exception:
   leave it to Python. */
struct pc_blocks *pc_blocks_of(const pc_collectives *self, int kind, int root, PyObject *x,
                               PyObject *out, bool is_blocking, PyObject **for_python,
                               PyObject **kept);
void pc_blocks_free(struct pc_blocks *blocks, pc_engine_object *engine);
/* When the first round has ended: find out what is left. Without the interpreter's lock, and so the
   next two. */
void pc_blocks_look(struct pc_blocks *blocks);
/* Prepare `places` for the second round. False: there is no memory. */
bool pc_blocks_second(struct pc_blocks *blocks, struct pc_engine *engine);
/* Whether all that has come is known here, and fits into `out`, where it is then. */
bool pc_blocks_settle(struct pc_blocks *blocks);
/* What has come, as a list of `Memory`; None for this rank's own. NULL with an exception. */
PyObject *pc_blocks_came(struct pc_blocks *blocks, pc_engine_object *engine);
PyObject *pc_blocks_result(const pc_collectives *self, struct pc_blocks *blocks, int kind);
/* The announcement of objects that travel with it; NULL: they are too long. */
unsigned char *pc_announce_objects(const pc_collectives *self, const pc_plan *plan,
                                   const struct pc_blocks *blocks, bool scatters, size_t *nbytes);
/* Whether it is one; and this rank's object. */
bool pc_announces_object(const unsigned char *announcement, size_t nbytes);
PyObject *pc_announced_object(const pc_collectives *self, int kind,
                              const unsigned char *announcement, size_t nbytes);

/* many.c: look at the arrays of lists; false, perhaps with an exception: leave them to Python. They
   must be released in any case. */
bool pc_many_read(PyObject *xs, PyObject *out, struct pc_many *many);
void pc_many_release(struct pc_many *many);
/* Fill a bucket, and make the results; NULL, perhaps with an exception: leave it to Python. */
struct pc_bucket *pc_bucket_new(const struct pc_many *many, bool is_blocking);
/* Copy what was reduced to the results; also without the interpreter's lock. */
void pc_bucket_unpack(const struct pc_bucket *bucket);
void pc_bucket_free(struct pc_bucket *bucket); /* or NULL */

/* composed_steps.c: memory of the engine's as an object that owns it; without one it goes, too.
   None for none. */
PyObject *pc_memory_object(pc_engine_object *engine, void *start, size_t nbytes);
void *pc_memory_start(PyObject *memory);
void pc_memory_let_go(pc_engine_object *engine, void *memory);

/* collective_run.c: start a call by its plan; its first block is filled in. It takes the reference
   and returns it. NULL without an exception: it could not be, and Python says why. */
struct pc_running *pc_collective_start(struct pc_running *started);
/* With the engine's lock: end a call that was held, with which Python has gone on. */
void pc_collective_settle(struct pc_running *self, int status);
/* With the engine's lock: let one that was held go on with its second round, by that plan. */
void pc_collective_go_on(struct pc_running *self, const pc_plan *plan);
/* With the engine's lock: the ranks of the world for which it waits, some of them perhaps twice; at
   most `most`. */
size_t pc_collective_awaited(const struct pc_running *self, int *ranks, size_t most);
/* As of `struct pc_started_ops`. */
bool pc_collective_give_up(struct pc_started *self);
void pc_collective_let_go(struct pc_started *self);

/* collective_type.c */
extern const struct pc_started_ops pc_collective_ops;
extern PyTypeObject *pc_plan_type, *pc_memory_type, *pc_collective_type;

#endif
