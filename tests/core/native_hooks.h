/* Put before every source of the core (gcc -include): its copies, clock and yields go through the
   program, which so stretches what is short and shortens what is long. */
#ifndef PYCOLL_NATIVE_HOOKS_H
#define PYCOLL_NATIVE_HOOKS_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <sys/uio.h>
#include <time.h>

/* So that every copy within the process is `hook_memcpy`. */
#define PC_LOOP_NBYTES SIZE_MAX
#ifndef NATIVE_AS_BUILT
/* So that random values go in several pieces. */
#define PC_PIECE_NBYTES ((size_t)20 << 10)
/* So that trials concern all large values, and happen now and then. */
#define PC_CHOICE_FROM ((size_t)1)
#define PC_TURNS_BETWEEN 2
#define PC_CALLS_A_TURN 2
/* So that random values are large enough to be read directly as a rule. */
#define PC_RULE_KIB ((size_t)1)
#define PC_PARTS_FROM ((size_t)16 << 10)
/* So that work on shared arrays has several pieces, and some go past the caches. */
#define PC_WORK_PIECE ((size_t)512)
#define PC_WORK_BLOCK ((size_t)256)
#define PC_PAST_CACHE_NBYTES ((size_t)8 << 10)
/* So that the root helps with what has several pieces. */
#define PC_HELP_FROM ((size_t)1)
#define PC_HELP_PIECE(nbytes) ((nbytes) / 5 + 1)
/* So that clocks which run away end no wait for a piece. */
#define PC_LONGEST_PIECE_NS UINT64_MAX
#endif

/* A copy with, now and then, a pause in the middle; the regions may overlap if `to` is the lower
   one. */
void *hook_memcpy(void *to, const void *from, size_t nbytes);
/* Yields, or does not: an impatient rank comes to its sleep at once. */
int hook_yield(void);
/* The time, or for an impatient rank a clock that runs away. */
int hook_clock(struct timespec *now);
/* ThreadSanitizer does not see what a system call reads, so for it this is a copy. */
ssize_t hook_readv(int pid, const struct iovec *local, unsigned long count,
                   const struct iovec *remote);
/* Likewise; now and then it fails. */
ssize_t hook_writev(int pid, const struct iovec *local, unsigned long count,
                    const struct iovec *remote);

/* What a rank has done: flags of others that it waited for, whether it had to or not; bytes that it
   copied; calls of the kernel to copy, and their bytes. */
struct native_tally {
    uint64_t waits, copied, kernel_calls, kernel_copied;
};
extern _Thread_local struct native_tally native_tally;

#ifndef PYCOLL_NATIVE_HOOKS_THEMSELVES
#define memcpy(to, from, nbytes) hook_memcpy(to, from, nbytes)
#define memmove(to, from, nbytes) hook_memcpy(to, from, nbytes)
#define sched_yield() hook_yield()
#define clock_gettime(clock, now) hook_clock(now)
#define process_vm_readv(pid, local, local_count, remote, remote_count, flags) \
    hook_readv(pid, local, local_count, remote)
#define process_vm_writev(pid, local, local_count, remote, remote_count, flags) \
    hook_writev(pid, local, local_count, remote)
#include "host/wait.h"
#define pc_wait(...) (native_tally.waits++, (pc_wait)(__VA_ARGS__))
#endif

#endif
