/* Memory for what is on its way: received to be combined, or to be copied to its places.

   Fresh memory costs its pages, for large values more than what is done in it. So what one call
   gives back is kept for the next.

   Somebody outside, a *keeper*, may need memory to stay until he lets go of it: a device that has
   it registered, or a transport that still sends from it. Then it is his to free it, when he has
   been told that it is not kept here any more.

   Nothing here locks. */
#ifndef PC_SCRATCH_H
#define PC_SCRATCH_H

#include <stdbool.h>
#include <stddef.h>

/* Bytes that are kept; a sanitizer shall see the end of each use. */
#ifndef PC_SCRATCH_KEPT
#ifdef __SANITIZE_ADDRESS__
#define PC_SCRATCH_KEPT ((size_t)0)
#else
#define PC_SCRATCH_KEPT ((size_t)64 << 20)
#endif
#endif
/* Bytes from which memory is kept. */
#ifndef PC_SCRATCH_WORTH
#define PC_SCRATCH_WORTH ((size_t)64 << 10)
#endif
/* Memory is taken for what needs at least this part of it. */
#define PC_SCRATCH_PART 4

/* Zeros: nothing is kept. */
struct pc_scratch {
    struct pc_scratch_block *newest, *oldest;
    struct pc_scratch_block *left; /* to keepers */
    size_t nbytes;
};

/* At least so many bytes, with anything in them; NULL: there is no memory. */
void *pc_scratch_take(struct pc_scratch *scratch, size_t nbytes);
/* Give back what was taken, or NULL. */
void pc_scratch_give(struct pc_scratch *scratch, void *memory);
/* It will not be kept when it is given back: somebody may still read it. NULL: nothing. */
void pc_scratch_spend(void *memory);
/* Free what was taken, or NULL: it has no keeper, or it is he who calls. */
void pc_scratch_discard(void *memory);
/* Let go of all that is kept. */
void pc_scratch_free(struct pc_scratch *scratch);

/* Where the keeper of memory stands that was taken; without one it is NULL. NULL: it is so little
   that it is not kept, and has none. */
void **pc_scratch_keeper(void *memory);
/* How many bytes there are: at least as many as were asked for. */
size_t pc_scratch_nbytes(const void *memory);
/* The next keeper whose memory is not used here any more; NULL: there is none now. */
void *pc_scratch_next_left(struct pc_scratch *scratch);

#endif
