/* Running schedules: one collective's steps of this rank, over the engine's messages. Plain C, without Python.

   A *table* is a compiled schedule (pycoll/schedule.py): steps, and which of them wait for which. A *run* posts every
   step as soon as those for which it waits are done. Receives whose value will be reduced are opened in the order of
   the table, PC_RUN_WINDOW at a time, which bounds scratch memory; the proofs of the algorithms cover that window.

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
};

struct pc_step {
    uint8_t kind;
    bool incoming_first; /* of a reduction: incoming op own, else own op incoming */
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

/* Where a chunk is: its length, and where it begins in the memory of the source and of the target, in bytes. */
struct pc_chunk_place {
    size_t nbytes;
    ptrdiff_t source; /* -1: it has no value at the start */
    ptrdiff_t target; /* -1: its value is not needed at the end */
};

/* out = the operands combined, `count` elements; out may be one of them. */
typedef void (*pc_combine_fn)(void *out, const void *const *operands, int num_operands, size_t count, int divisor);

struct pc_reduction {
    pc_combine_fn combine; /* of two operands */
    pc_combine_fn finish;  /* of one: a result that was combined, which may have to be divided; or NULL */
    int divisor;
    size_t itemsize;
};

struct pc_moved;
struct pc_run_chunk;

/* The caller sets the first block, and all else to zero. Its memory, table and places are the caller's. */
struct pc_run {
    const struct pc_schedule *table;
    const struct pc_chunk_place *places; /* by chunk */
    struct pc_reduction reduction;
    const void *source;
    void *target; /* the source, or disjoint from it, but for chunks that lie at the same place in both */
    struct pc_called *call;
    uint16_t lane;
    bool takes_less; /* its one chunk is as long as the message that brings it, and no longer than its place */
    /* Of every chunk this run moves only one segment of several, of whole granules. */
    uint32_t segment, num_segments; /* 0 and 1: all of it */
    size_t granule;
    void (*ended)(struct pc_run *run); /* the last that is done with it; perhaps before `pc_run_start` returns */
    void *owner;

    /* When it has ended; with `takes_less`, `came` is the length. */
    int status; /* as of receives; PC_REFUSED: the next three say why; PC_NO_VALUE: `from` is the chunk */
    int from;
    size_t came, expected;

    struct pc_context *context; /* when it is closed it stays until the run has ended */
    struct pc_engine *engine;
    void *memory; /* of the arrays that follow */
    struct pc_run_chunk *chunks;
    void **incoming; /* by step */
    uint32_t *waits, *ready, *unopened;
    uint32_t first_ready, last_ready, first_unopened, last_unopened, num_open, left;
    unsigned char *header, *own;
    size_t header_nbytes, own_nbytes;
    bool draining;
    struct pc_moved *moves; /* messages that are under way */
};

/* Start a run. False: there is no memory, and nothing has happened. */
bool pc_run_start(struct pc_context *context, struct pc_run *run);
/* Give it up: it does not end, and its memory is not used any more. False: it has ended. */
bool pc_run_cancel(struct pc_run *run);
/* The ranks (of the world) that must all be in the call before it can end, some of them perhaps twice; at most `most`.
   How many were written. */
size_t pc_run_awaited(const struct pc_run *run, int *ranks, size_t most);

#endif
