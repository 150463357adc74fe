/* Copying between the memories of two processes, with one system call and one pass: see copy.c. */
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

/* Copy `nbytes` from `offset` of a payload in the memory of process `pid` to `into`, or back with `write`: from
   `into` of ours to theirs. 0, or an errno. */
int pc_copy_from(pid_t pid, struct pc_parts theirs, size_t offset, void *into, size_t nbytes);
int pc_copy_to(pid_t pid, uint64_t into, struct pc_parts ours, size_t offset, size_t nbytes);

/* Copy within this process. */
void pc_copy_parts(void *into, struct pc_parts parts, size_t offset, size_t nbytes);

/* Let other processes of this user read this one's memory where Yama would forbid it. */
void pc_allow_copies(void);

/* Whether a process has ended; one that is stopped has not. */
bool pc_process_ended(pid_t pid);

#endif
