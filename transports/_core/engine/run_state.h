/* The state of a run: its chunks and where their values are, and its messages that are under way.
   For run.c and run_owner.c alone. */
#ifndef PC_RUN_STATE_H
#define PC_RUN_STATE_H

#include "run.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* A chunk, or a segment of it. */
struct pc_run_chunk {
    size_t nbytes;
    /* where its value is now; NULL: it has none yet. Not written where it was at the start */
    unsigned char *value;
    unsigned char *target; /* where it must be at the end; NULL: nowhere */
    size_t own_at;         /* its place in the run's own memory */
    const struct iovec *parts; /* its value is in several parts: as of its place; else NULL */
    size_t num_parts;
    bool is_grown;   /* its length is its sender's */
    bool is_settled; /* its target holds what it shall */
};

/* A message of a run that is under way. */
struct pc_moved {
    struct pc_run *run;
    uint32_t step;
    bool is_send;
    struct pc_moved *next, **at; /* of the run */
    void *scratch; /* of a receive into several places */
    struct iovec one, *parts;
    union {
        struct pc_send send;
        struct pc_receive receive;
    };
};

/* --- messages under way ----------------------------------------------------------------------- */

static inline struct pc_moved *new_move(struct pc_run *run, uint32_t step, bool is_send) {
    struct pc_moved *move = calloc(1, sizeof *move);
    if (move == NULL)
        return NULL;
    move->run = run;
    move->step = step;
    move->is_send = is_send;
    move->next = run->moves;
    move->at = &run->moves;
    if (move->next != NULL)
        move->next->at = &move->next;
    run->moves = move;
    return move;
}

static inline void free_move(struct pc_moved *move) {
    *move->at = move->next;
    if (move->next != NULL)
        move->next->at = move->at;
    if (move->parts != &move->one)
        free(move->parts);
    if (!move->is_send)
        free(move->receive.header);
    pc_engine_give_scratch(move->run->engine, move->scratch);
    free(move);
}

/* --- memory ----------------------------------------------------------------------------------- */

static inline void fail(struct pc_run *run, int status) {
    if (run->status == 0)
        run->status = status;
}

/* Where a chunk has its value from now on; NULL: there is no memory, and the run fails. */
static inline unsigned char *destination(struct pc_run *run, uint32_t number) {
    struct pc_run_chunk *chunk = &run->chunks[number];
    if (chunk->target == NULL && run->own == NULL) /* all at once: pages that are not touched cost
                                                      nothing */
        run->own = pc_scratch_take(&run->engine->scratch, run->own_nbytes);
    if (chunk->target == NULL && run->own == NULL) {
        fail(run, -ENOMEM);
        return NULL;
    }
    chunk->value = chunk->target != NULL ? chunk->target : run->own + chunk->own_at;
    chunk->parts = NULL;
    return chunk->value;
}

static inline void copy_value(unsigned char *into, const struct pc_run_chunk *chunk) {
    if (chunk->parts == NULL && chunk->nbytes > 0)
        memcpy(into, chunk->value, chunk->nbytes);
    for (size_t part = 0; chunk->parts != NULL && part < chunk->num_parts;
         into += chunk->parts[part++].iov_len)
        if (chunk->parts[part].iov_len > 0)
            memcpy(into, chunk->parts[part].iov_base, chunk->parts[part].iov_len);
}

static inline const uint32_t *chunks_of(const struct pc_run *run, const struct pc_step *step) {
    return run->table->chunks + step->chunks;
}

static inline size_t length_of(const struct pc_run *run, const struct pc_step *step) {
    size_t nbytes = 0;
    for (uint32_t index = 0; index < step->num_chunks; index++)
        nbytes += run->chunks[chunks_of(run, step)[index]].nbytes;
    return nbytes;
}

/* Let a chunk whose value is needed have it in its place, and be what it shall be. */
static inline void settle(struct pc_run *run, struct pc_run_chunk *chunk) {
    const struct pc_reduction *reduction = &run->reduction;
    if (chunk->target == NULL || chunk->value == NULL || chunk->nbytes == 0 || chunk->is_settled)
        return;
    chunk->is_settled = true;
    if (chunk->value != chunk->target)
        copy_value(chunk->target, chunk);
    if (reduction->finish != NULL) {
        const void *operand = chunk->target;
        reduction->finish(chunk->target, &operand, 1, chunk->nbytes / reduction->itemsize,
                          reduction->divisor);
    }
}

static inline enum pc_value_place where(const struct pc_run *run, uint32_t number) {
    const struct pc_run_chunk *chunk = &run->chunks[number];
    if (chunk->value == NULL)
        return PC_VALUE_NOWHERE;
    if (chunk->value == chunk->target)
        return PC_VALUE_AT_TARGET;
    bool is_own = chunk->is_grown || (run->own != NULL && chunk->value == run->own + chunk->own_at);
    return is_own ? PC_VALUE_IN_OWN : PC_VALUE_AT_SOURCE;
}

/* What the value of a chunk belongs to. */
static inline struct pc_keeper keeper_of(const struct pc_run *run, uint32_t number) {
    const struct pc_run_chunk *chunk = &run->chunks[number];
    const struct pc_chunk_place *place = &run->places[number];
    struct pc_keeper keeper = {NULL, NULL};
    switch (where(run, number)) {
    case PC_VALUE_AT_SOURCE:
        if (chunk->parts == NULL)
            keeper.object =
                place->source_keeper != NULL ? place->source_keeper : run->source_keeper;
        break;
    case PC_VALUE_AT_TARGET:
        keeper.object = place->target_keeper != NULL ? place->target_keeper : run->target_keeper;
        break;
    case PC_VALUE_IN_OWN:
        keeper.scratch = chunk->is_grown ? chunk->value : run->own;
        break;
    default:
        break;
    }
    return keeper;
}

/* Neighbors in memory are one part. */
static inline size_t gather(const struct pc_run *run, const struct pc_step *step,
                            struct iovec *parts) {
    size_t count = 0;
    for (uint32_t index = 0; index < step->num_chunks; index++) {
        const struct pc_run_chunk *chunk = &run->chunks[chunks_of(run, step)[index]];
        if (chunk->nbytes == 0)
            continue;
        for (size_t part = 0; chunk->parts != NULL && part < chunk->num_parts; part++)
            parts[count++] = chunk->parts[part];
        if (chunk->parts != NULL)
            continue;
        struct iovec *last = count > 0 ? &parts[count - 1] : NULL;
        if (last != NULL && (unsigned char *)last->iov_base + last->iov_len == chunk->value)
            last->iov_len += chunk->nbytes;
        else
            parts[count++] = (struct iovec){chunk->value, chunk->nbytes};
    }
    return count;
}

static inline void scatter(struct pc_run *run, const struct pc_step *step,
                           const unsigned char *from) {
    for (uint32_t index = 0; index < step->num_chunks; index++) {
        const struct pc_run_chunk *chunk = &run->chunks[chunks_of(run, step)[index]];
        if (chunk->nbytes > 0)
            memcpy(chunk->value, from, chunk->nbytes);
        from += chunk->nbytes;
    }
}

#endif
