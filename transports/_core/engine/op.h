/* What can be waited for. Plain C, without Python.

   An op is under way from `pc_op_begin` to `pc_op_end`, which is called with the lock held, by
   whatever thread. Its owner may look at `done` without the lock, and free the op as soon as it is
   set: who ends an op does not touch it any more after that. */
#ifndef PC_OP_H
#define PC_OP_H

#include "lock.h"

#include <stddef.h>

struct pc_drive;

/* A wait for several ops: for `left` ends of them. All: as many as were added; any: 1. */
struct pc_several {
    /* set with the lock held; its owner may free this when it is 0, or no op belongs to it any
       more */
    pc_word left;
    /* NULL: a thread waits. Else called with the lock when that is 0, and an op that has failed
       ends it at once. */
    void (*ended)(struct pc_several *several);
};

struct pc_op {
    pc_word done;
    int status; /* good once it is done */
    /* an eventfd that is rung at the end, or -1; it is closed with the lock held, or after the op's
       end */
    int bell;
    struct pc_drive *drive;
    struct pc_several *several; /* or NULL */
};

static inline void pc_op_begin(struct pc_op *op, struct pc_drive *drive, int bell) {
    atomic_store_explicit(&op->done, 0, memory_order_relaxed);
    op->status = 0;
    op->bell = bell;
    op->drive = drive;
    op->several = NULL;
}

static inline bool pc_op_is_done(struct pc_op *op) {
    return atomic_load_explicit(&op->done, memory_order_acquire) != 0;
}

static inline bool pc_several_is_done(struct pc_several *several) {
    return atomic_load_explicit(&several->left, memory_order_acquire) == 0;
}

/* All of these with the lock held. */
void pc_op_end(struct pc_op *op, int status);
/* End a wait for several, in which threads wait, whatever is left of it. */
void pc_several_end(struct pc_several *several, struct pc_drive *drive);
/* Have its end counted. False: it belongs to another one, or is done already. */
static inline bool pc_several_add(struct pc_several *several, struct pc_op *op) {
    if (op->several != NULL || pc_op_is_done(op))
        return false;
    op->several = several;
    return true;
}
/* Before `several` is freed, for each op that was added and may be under way. */
static inline void pc_several_remove(struct pc_several *several, struct pc_op *op) {
    if (op->several == several)
        op->several = NULL;
}

#endif
