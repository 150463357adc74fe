/* Memory that is kept from call to call. See scratch.h. */
#include "scratch.h"

#include <stdlib.h>

/* Stands before the memory. */
struct pc_scratch_block {
    _Alignas(max_align_t) struct pc_scratch_block *older; /* of those that are left: the next */
    struct pc_scratch_block *newer;
    size_t nbytes;
    void *keeper;
    bool is_spent;
};

static void take_out(struct pc_scratch *scratch, struct pc_scratch_block *block) {
    *(block->older != NULL ? &block->older->newer : &scratch->oldest) = block->newer;
    *(block->newer != NULL ? &block->newer->older : &scratch->newest) = block->older;
    scratch->nbytes -= block->nbytes;
}

static struct pc_scratch_block *block_of(void *memory) {
    return (struct pc_scratch_block *)memory - 1;
}

static void let_go(struct pc_scratch *scratch, struct pc_scratch_block *block) {
    if (block->keeper == NULL) {
        free(block);
        return;
    }
    block->older = scratch->left;
    scratch->left = block;
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
    block->keeper = NULL;
    block->is_spent = false;
    return block + 1;
}

void pc_scratch_give(struct pc_scratch *scratch, void *memory) {
    if (memory == NULL)
        return;
    struct pc_scratch_block *block = block_of(memory);
    if (block->nbytes < PC_SCRATCH_WORTH || block->nbytes > PC_SCRATCH_KEPT || block->is_spent) {
        let_go(scratch, block);
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
        let_go(scratch, oldest);
    }
}

void pc_scratch_spend(void *memory) {
    if (memory != NULL)
        block_of(memory)->is_spent = true;
}

void pc_scratch_discard(void *memory) {
    if (memory != NULL)
        free(block_of(memory));
}

void pc_scratch_free(struct pc_scratch *scratch) {
    struct pc_scratch_block *block;
    while ((block = scratch->newest) != NULL) {
        take_out(scratch, block);
        let_go(scratch, block);
    }
}

void **pc_scratch_keeper(void *memory) {
    struct pc_scratch_block *block = block_of(memory);
    return block->nbytes < PC_SCRATCH_WORTH ? NULL : &block->keeper;
}

size_t pc_scratch_nbytes(const void *memory) {
    return ((const struct pc_scratch_block *)memory - 1)->nbytes;
}

void *pc_scratch_next_left(struct pc_scratch *scratch) {
    struct pc_scratch_block *block = scratch->left;
    if (block == NULL)
        return NULL;
    scratch->left = block->older;
    return block->keeper;
}
