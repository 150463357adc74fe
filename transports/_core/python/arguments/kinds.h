/* The collectives; module.c has their names. */
#ifndef PC_KINDS_H
#define PC_KINDS_H

#include <stdbool.h>

enum pc_kind {
    PC_BARRIER, PC_BROADCAST, PC_REDUCE, PC_ALL_REDUCE, PC_GATHER, PC_ALL_GATHER, PC_SCATTER,
    PC_REDUCE_SCATTER, PC_ALL_TO_ALL, PC_SCAN, PC_EXSCAN, PC_KINDS
};

/* Those of several arrays, or of blocks that differ in length or shape, are methods of their own,
   but no kinds. */
enum {
    PC_REDUCE_SCATTERV = PC_KINDS, PC_ALL_REDUCE_MANY, PC_GATHERV, PC_ALL_GATHERV, PC_SCATTERV,
    PC_ALL_TO_ALLV, PC_METHODS
};

static inline bool pc_reduces(int kind) {
    return kind == PC_REDUCE || kind == PC_ALL_REDUCE || kind == PC_REDUCE_SCATTER ||
           kind == PC_REDUCE_SCATTERV || kind == PC_ALL_REDUCE_MANY || kind == PC_SCAN ||
           kind == PC_EXSCAN;
}

/* Of blocks that differ in shape. */
static inline bool pc_is_uneven(int kind) { return kind >= PC_GATHERV; }

/* Of a Python object, too, or of several. */
static inline bool pc_takes_objects(int kind) {
    return kind == PC_BROADCAST || kind == PC_GATHER || kind == PC_ALL_GATHER ||
           kind == PC_SCATTER || kind == PC_ALL_TO_ALL;
}

/* Only the root knows what will come, and says so first. */
static inline bool pc_is_announced(int kind) { return kind == PC_BROADCAST || kind == PC_SCATTER; }

#endif
