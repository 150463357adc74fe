/* Running schedules: one collective's steps of this rank, over the engine's messages. Plain C,
   without Python.

   A *table* is a compiled schedule (pycoll/schedule.py): steps, and which of them wait for which. A
   *run* posts every step as soon as those for which it waits are done. Receives whose value will be
   reduced are opened in the order of the table, PC_RUN_WINDOW at a time, which bounds scratch
   memory; the proofs of the algorithms cover that window.

   What a run cannot do itself it asks its owner for: external steps, reductions by an operator that
   the core has not, and receives of what is offered, not sent.

   Nothing here locks: the caller holds the engine's lock for everything. */
#ifndef PC_RUN_H
#define PC_RUN_H

#include "engine.h"

/* The proofs cover 1, 2 and this. */
#ifndef PC_RUN_WINDOW
#define PC_RUN_WINDOW 4
#endif

enum pc_step_kind {
    PC_STEP_SEND,
    PC_STEP_RECV,         /* into its chunks */
    PC_STEP_RECV_SCRATCH, /* into scratch memory, for the reduction that is the next step */
    PC_STEP_REDUCE,
    PC_STEP_COPY, /* from chunk `other` */
    PC_STEP_EXTERNAL, /* outside of the messages: the owner does it */
};

struct pc_step {
    uint8_t kind;
    bool incoming_first; /* of a reduction: incoming op own, else own op incoming */
    /* of an external step: its owner asks for its end when all others are done */
    bool at_end;
    uint32_t other;      /* the peer, a rank of the communicator; or the chunk that is copied */
    uint32_t index;      /* messages to, or from, the same peer before this one */
    uint32_t chunks, num_chunks;         /* where its chunks begin in the table's list */
    uint32_t successors, num_successors; /* so the steps that wait for it */
    uint32_t waits;                      /* steps for which it waits */
};

/* It is the caller's, and stays as it is while a run uses it. */
struct pc_schedule {
    uint32_t num_steps, num_chunks;
    const struct pc_step *steps;
    const uint32_t *chunks, *successors;
};

/* Where a chunk is: its length, and where it begins in the memory of the source and of the target,
   in bytes. */
struct pc_chunk_place {
    size_t nbytes;    /* PC_UNKNOWN: as its sender has it */
    ptrdiff_t source; /* -1: it has no value at the start */
    ptrdiff_t target; /* -1: its value is not needed at the end */
    /* The value at the start, if it is in several parts; a run of a single segment may have
       such. */
    const struct iovec *parts;
    size_t num_parts;
    /* as of sends: what these belong to, or NULL: then it is as of the run */
    void *source_keeper, *target_keeper;
    void *target_scratch; /* the memory of the engine's in which the target is; or NULL */
};
#define PC_UNKNOWN SIZE_MAX

/* Memory for a chunk of unknown length. */
struct pc_grown {
    void *memory;
    size_t nbytes;
};

/* Where the value of a chunk is. */
enum pc_value_place {
    PC_VALUE_NOWHERE,
    PC_VALUE_AT_SOURCE,
    PC_VALUE_AT_TARGET,
    PC_VALUE_IN_OWN, /* memory of the run's, or made for a chunk of unknown length */
};

/* What `pc_run_next_asked` says in place of a step. */
#define PC_NO_STEP UINT32_MAX
#define PC_LAST_STEPS (UINT32_MAX - 1) /* all steps are done but those whose end is asked for now */

/* out = the operands combined, `count` elements; out may be one of them. */
typedef void (*pc_combine_fn)(void *out, const void *const *operands, int num_operands,
                              size_t count, int divisor);

struct pc_reduction {
    pc_combine_fn combine; /* of two operands */
    /* of one: a result that was combined, which may have to be divided; or NULL */
    pc_combine_fn finish;
    int divisor;
    size_t itemsize;
};

struct pc_moved;
struct pc_run_chunk;

/* The caller sets the first block, and all else to zero. Its memory, table and places are the
   caller's. */
struct pc_run {
    const struct pc_schedule *table;
    const struct pc_chunk_place *places; /* by chunk */
    struct pc_reduction reduction;
    const void *source;
    /* the source, or disjoint from it, but for chunks that lie at the same place in both */
    void *target;
    void *source_keeper, *target_keeper; /* as of sends: what all of these belongs to, or NULL */
    struct pc_called *call;
    uint16_t subcall;
    /* its one chunk is as long as the message that brings it, and no longer than its place */
    bool takes_less;
    /* Of every chunk this run moves only one segment of several, of whole granules. */
    uint32_t segment, num_segments; /* 0 and 1: all of it */
    size_t granule;
    /* by chunk; the memory is made here and stays the owner's. NULL: every length is known */
    struct pc_grown *grown;
    void (*asked)(struct pc_run *run); /* there are steps for the owner to do; NULL: he does none */
    /* the last that is done with it; perhaps before `pc_run_start` returns */
    void (*ended)(struct pc_run *run);
    void *owner;

    /* When it has ended; with `takes_less`, `came` is the length. */
    /* as of receives; PC_REFUSED: the next three say why; PC_NO_VALUE: `from` is the chunk */
    int status;
    int from;
    size_t came, expected;

    struct pc_context *context; /* when it is closed it stays until the run has ended */
    struct pc_engine *engine;
    void *memory; /* of the arrays that follow */
    struct pc_run_chunk *chunks;
    void **incoming; /* by step */
    uint32_t *waits, *ready, *unopened, *asked_for;
    uint32_t first_ready, last_ready, first_unopened, last_unopened, first_asked, last_asked,
        num_open, left;
    uint32_t num_at_end; /* steps `at_end` that were asked for and are not done */
    unsigned char *header, *own;
    size_t header_nbytes, own_nbytes;
    bool draining, asks_last, own_is_taken;
    struct pc_moved *moves; /* messages that are under way */
};

/* Start a run. False: there is no memory, and nothing has happened. */
bool pc_run_start(struct pc_context *context, struct pc_run *run);
/* Give it up: it does not end, and its memory is not used any more. False: it has ended. */
bool pc_run_cancel(struct pc_run *run);
/* The ranks (of the world) that must all be in the call before it can end, some of them perhaps
   twice; at most `most`. How many were written. */
size_t pc_run_awaited(const struct pc_run *run, int *ranks, size_t most);

/* --- for an owner who does steps, while the run is under way ---------------------------------- */

/* The next step that he shall do. */
uint32_t pc_run_next_asked(struct pc_run *run);
/* He has done it; the run may end by that. */
void pc_run_step_done(struct pc_run *run, uint32_t position);
/* Of a receive that he was asked for: it holds the message. NULL: not any more. Another receive
   takes that over, and then he says so. */
struct pc_receive *pc_run_held(struct pc_run *run, uint32_t position);
void pc_run_taken(struct pc_run *run, uint32_t position);
/* Its sender has taken it back: the step waits for another one. */
void pc_run_wait_again(struct pc_run *run, uint32_t position);
/* Of a reduction: the memory with what came, which is his from now on, with the receive's chunks
   one behind the other. */
void *pc_run_take_incoming(struct pc_run *run, uint32_t position, size_t *nbytes);
enum pc_value_place pc_run_where(const struct pc_run *run, uint32_t chunk);
/* Have a chunk's value be at its target, or in the run's own memory, where he writes it. False:
   there is no memory. */
bool pc_run_place(struct pc_run *run, uint32_t chunk);
/* Have the target of a chunk hold its value, which no step uses any more. */
void pc_run_settle(struct pc_run *run, uint32_t chunk);
/* The run's own memory, which is his from now on; NULL: it has none. Both are freed by
   `pc_engine_give_scratch`. */
void *pc_run_take_own(struct pc_run *run);

#endif
