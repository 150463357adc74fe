/* Memory that is kept from call to call. See scratch.h. */
#include "scratch.h"

#include <stdlib.h>

/* Stands before the memory, which is aligned as malloc's. */
struct pc_scratch_block {
    struct pc_scratch_block *older, *newer;
    size_t nbytes, unused;
};

static void take_out(struct pc_scratch *scratch, struct pc_scratch_block *block) {
    *(block->older != NULL ? &block->older->newer : &scratch->oldest) = block->newer;
    *(block->newer != NULL ? &block->newer->older : &scratch->newest) = block->older;
    scratch->nbytes -= block->nbytes;
}

void *pc_scratch_take(struct pc_scratch *scratch, size_t nbytes) {
    struct pc_scratch_block *block = nbytes >= PC_SCRATCH_WORTH ? scratch->newest : NULL;
    while (block != NULL && (block->nbytes < nbytes || block->nbytes / PC_SCRATCH_PART > nbytes))
        block = block->older;
    if (block != NULL) {
        take_out(scratch, block);
        return block + 1;
    }
    if (nbytes > (size_t)-1 - sizeof *block || (block = malloc(sizeof *block + nbytes)) == NULL)
        return NULL;
    block->nbytes = nbytes;
    return block + 1;
}

void pc_scratch_give(struct pc_scratch *scratch, void *memory) {
    if (memory == NULL)
        return;
    struct pc_scratch_block *block = (struct pc_scratch_block *)memory - 1;
    if (block->nbytes < PC_SCRATCH_WORTH || block->nbytes > PC_SCRATCH_KEPT) {
        free(block);
        return;
    }
    block->newer = NULL;
    block->older = scratch->newest;
    *(block->older != NULL ? &block->older->newer : &scratch->oldest) = block;
    scratch->newest = block;
    scratch->nbytes += block->nbytes;
    while (scratch->nbytes > PC_SCRATCH_KEPT) {
        struct pc_scratch_block *oldest = scratch->oldest;
        take_out(scratch, oldest);
        free(oldest);
    }
}

void pc_scratch_discard(void *memory) {
    if (memory != NULL)
        free((struct pc_scratch_block *)memory - 1);
}

void pc_scratch_free(struct pc_scratch *scratch) {
    struct pc_scratch_block *block;
    while ((block = scratch->newest) != NULL) {
        take_out(scratch, block);
        free(block);
    }
}
