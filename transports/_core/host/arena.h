/* Memory for arrays which all ranks of a host have mapped: an arena a rank, in the host's memory
   file (host.h).

   This file has both sides: the allocator of one's own arena, and `pc_here`, which says where the
   bytes of another rank are. What an allocator must know it keeps in its own process's memory:
   nothing that another rank can write is ever believed by it. */
#ifndef PC_ARENA_H
#define PC_ARENA_H

#include "host.h"

/* Address space of one rank's arena, the same for all ranks of a host. Only what is touched takes
   memory. */
size_t pc_arena_nbytes(int size);

extern struct pc_own_arena {
    unsigned char *base; /* NULL: this process has none */
    size_t nbytes;
    /* `nbytes`, or 0 in a fork's child, whose arrays nobody else has mapped */
    size_t shared_nbytes;
} pc_own_arena;

/* Whether all of it lies in this process's arena, where others have it mapped. */
static inline bool pc_arena_has(const void *memory, size_t nbytes) {
    size_t offset = (uintptr_t)memory - (uintptr_t)pc_own_arena.base;
    return offset < pc_own_arena.shared_nbytes && nbytes <= pc_own_arena.shared_nbytes - offset;
}
/* Whether it is a block from here. */
static inline bool pc_arena_owns(const void *block) {
    return (uintptr_t)block - (uintptr_t)pc_own_arena.base < pc_own_arena.nbytes;
}

/* Map this process's arena in the memory file of its host, once; 0, or an errno. */
int pc_arena_open(int fd, int rank, int size);
/* The same as soon as the process has come to its host's memory. */
void pc_arena_want(void);
void pc_arena_host(const pc_host *host, bool here); /* it has; or it leaves `host` */

/* A block whose first `nbytes` are the caller's, on a page's border; NULL: there is no arena, or it
   is full. It must be given back to `pc_arena_free`, by any thread. `zero`: it reads as zero. */
void *pc_arena_alloc(size_t nbytes, bool zero);
void pc_arena_free(void *block);
void pc_arena_retire(void); /* the process ends: nothing is used again, or given back */
size_t pc_arena_length(const void *block); /* that was asked for */
/* Change its length where it is; false: it must move. */
bool pc_arena_resize(void *block, size_t nbytes);

struct pc_arena_use {
    uint64_t blocks, nbytes; /* in use */
    uint64_t kept_nbytes;    /* of freed blocks whose memory waits for the next */
};
struct pc_arena_use pc_arena_use(void);

/* Map the arena of a rank of this host if it is not; whether it is mapped. It stays so while `host`
   is open, and for ever if arrays of this process lie there (`pc_window_lend`). */
bool pc_window_open(pc_host *host, int rank);
void pc_window_lend(const pc_host *host, int rank);

/* Where the bytes at `address` in the memory of `rank` are here: in its arena, as this process has
   mapped it. NULL: only the kernel reaches them. The numbers come from that rank: whatever they
   are, the result lies in its arena. */
static inline unsigned char *pc_here(pc_host *host, int rank, uint64_t address, size_t nbytes) {
    unsigned char *window = host->windows[rank];
    if (window == NULL)
        return NULL;
    uint64_t theirs =
        atomic_load_explicit(&pc_host_record(host, rank)->arena, memory_order_relaxed);
    uint64_t offset = address - theirs;
    bool there =
        theirs != 0 && offset < host->arena_nbytes && nbytes <= host->arena_nbytes - offset;
    return there ? window + offset : NULL;
}

/* The same, where it may not be mapped yet. */
static inline unsigned char *pc_reach_here(pc_host *host, int rank, uint64_t address,
                                           size_t nbytes) {
    if (host->windows[rank] == NULL &&
        atomic_load_explicit(&pc_host_record(host, rank)->arena, memory_order_relaxed) != 0)
        pc_window_open(host, rank);
    return pc_here(host, rank, address, nbytes);
}

#endif
