/* Memory for what is on its way: received to be combined, or to be copied to its places.

   Fresh memory costs its pages, for large values more than what is done in it. So what one call gives back is kept for
   the next. Nothing here locks. */
#ifndef PC_SCRATCH_H
#define PC_SCRATCH_H

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
    size_t nbytes;
};

/* At least so many bytes, with anything in them; NULL: there is no memory. */
void *pc_scratch_take(struct pc_scratch *scratch, size_t nbytes);
/* Give back what was taken, or NULL. */
void pc_scratch_give(struct pc_scratch *scratch, void *memory);
/* The same where nobody keeps it. */
void pc_scratch_discard(void *memory);
/* Let go of all that is kept. */
void pc_scratch_free(struct pc_scratch *scratch);

#endif
