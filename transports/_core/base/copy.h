/* Copying within a process, and between the memories of two with one system call: see copy.c. */
#ifndef PC_COPY_H
#define PC_COPY_H

#include "core.h"

#include <sys/types.h>
#include <sys/uio.h>

/* A payload in several parts. */
struct pc_parts {
    const struct iovec *parts;
    size_t num_parts;
};

/* Copies from so many bytes on are loops of ours; below, memmove is a few vector instructions. */
#ifndef PC_LOOP_NBYTES
#define PC_LOOP_NBYTES ((size_t)2048)
#endif

/* Values from so many bytes on are written past the caches, which saves reading what is
   overwritten: 16 MiB take 0.76 ms against 1.2, but 4 MiB, which a cache holds, 154 us against
   92. */
#ifndef PC_PAST_CACHE_NBYTES
#define PC_PAST_CACHE_NBYTES ((size_t)8 << 20)
#endif

void pc_copy_past(void *to, const void *from, size_t nbytes);
void pc_copy_long(void *to, const void *from, size_t nbytes, size_t whole);

/* Copy within this process a part of a value of `whole` bytes: if no cache holds that, it goes past
   the caches. The regions do not overlap, or `to` is the lower one. */
static inline void pc_copy_part(void *to, const void *from, size_t nbytes, size_t whole) {
    if (nbytes < PC_LOOP_NBYTES)
        memmove(to, from, nbytes);
    else
        pc_copy_long(to, from, nbytes, whole);
}
static inline void pc_copy(void *to, const void *from, size_t nbytes) {
    pc_copy_part(to, from, nbytes, nbytes);
}
/* The same in memory that several processes have mapped. Between their caches a copy past them pays
   everywhere, and not only where memmove is slow. */
static inline void pc_copy_shared(void *to, const void *from, size_t nbytes, size_t whole) {
    if (whole < PC_PAST_CACHE_NBYTES)
        pc_copy(to, from, nbytes);
    else
        pc_copy_past(to, from, nbytes);
}
/* The same from `offset` of a payload. */
void pc_copy_parts(void *into, struct pc_parts parts, size_t offset, size_t nbytes);

/* Copy `nbytes` from `offset` of a payload in the memory of process `pid` to `into`, or from one of
   ours to `into` in the memory of `pid`. 0, or an errno: then some of it may be there, and nothing
   beside it was touched. */
int pc_copy_from(pid_t pid, struct pc_parts theirs, size_t offset, void *into, size_t nbytes);
int pc_copy_to(pid_t pid, uint64_t into, struct pc_parts ours, size_t offset, size_t nbytes);

/* Let other processes of this user read this one's memory where Yama would forbid it. */
void pc_allow_copies(void);

/* Whether a process has ended; one that is stopped has not. */
bool pc_process_ended(pid_t pid);

#endif
