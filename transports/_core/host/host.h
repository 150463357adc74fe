/* The memory that all ranks of one host share: one memfd, made by the launcher, inherited by every
   rank.

   It is zero when it is made, and zero is its first state, so nobody has to initialize it. It is
   sparse: pages that were never touched take no memory.

       offset 0      page of the host: failure epoch, lock and table of communicators
       4096          a record of 1024 bytes a rank: is it asleep, what is it doing, and what has it
                     done (tally.h)
       notes         for each rank what it has called and waited for last (noted.h)
       rings         a ring for each ordered pair of ranks (channel.h)
       heaps         a heap for each rank: payloads of buffered messages (channel.h)
       regions       a region for each communicator that uses shared-memory collectives (region.h)
       arenas        an arena for each rank: arrays that all ranks have mapped (arena.h)

   Ranks here are numbers on this host, from 0. Nothing here locks: the caller does. */
#ifndef PC_HOST_H
#define PC_HOST_H

#include "base/core.h"
#include "noted.h"
#include "tally.h"

#include <pthread.h>

#define PC_EPOCH_OFFSET 64
#define PC_RECORD_NBYTES 1024
#define PC_STATUS_OFFSET \
    512 /* of the text in a record; its sequence number is the 4 bytes before it */
#define PC_STATUS_NBYTES 500
#define PC_TALLY_OFFSET (2 * PC_LINE) /* on a line that no other rank writes or polls */

/* Communicators with shared-memory collectives that may be open at a time. */
#define PC_COMMS 4096

struct pc_entry { /* one communicator of the table */
    pc_flag64 ident; /* 0: free */
    pc_flag32 detached;
    uint32_t unused;
};

struct pc_page {
    char unused[PC_EPOCH_OFFSET];
    pc_flag32 epoch; /* the launcher adds 1 when a rank has failed */
    char pad[PC_LINE - 4];
    pc_flag32 lock; /* of the table: 0, or the owner's rank + 1 */
};

struct pc_record {
    pc_flag32 asleep; /* 1: ring its doorbell after publishing what it may wait for */
    char pad[4];
    pc_flag64 arena; /* where the rank has mapped its arena; 0: nowhere yet */
    char pad2[PC_TALLY_OFFSET - 16];
    struct pc_tally tally;
    char pad3[PC_STATUS_OFFSET - PC_TALLY_OFFSET - sizeof(struct pc_tally) - 4];
    pc_flag32 status_sequence; /* odd: the text is being written */
    char status[PC_STATUS_NBYTES];
    char rest[PC_RECORD_NBYTES - PC_STATUS_OFFSET - PC_STATUS_NBYTES];
};
_Static_assert(sizeof(struct pc_record) == PC_RECORD_NBYTES, "records are 1024 bytes");
_Static_assert(offsetof(struct pc_record, status) == PC_STATUS_OFFSET,
               "the launcher reads it there");
_Static_assert(offsetof(struct pc_record, tally) == PC_TALLY_OFFSET, "the launcher reads it there");

typedef struct pc_host {
    int fd;
    int rank, size;
    int spins;         /* looks at a flag before yielding; 0 with more ranks than cores */
    int *doorbells;    /* an eventfd for each rank */
    char python_busy;  /* see engine_type.h; here it is for collectives in shared memory */
    int sleepers;      /* threads of this process that sleep until the doorbell rings */
    pthread_mutex_t sleeping; /* held for a moment: to change that, and what is told of it */
    pc_flag32 seen_epoch; /* any thread may look at it */
    uint32_t forks;    /* pc_forks when it was made */
    bool owns;         /* its descriptors end with it */
    unsigned char *base; /* of the mapping, up to the regions */
    size_t mapped;
    size_t notes_offset, rings_offset, ring_nbytes, heaps_offset, heap_nbytes, table_offset,
        regions_offset, region_nbytes;
    size_t arenas_offset, arena_nbytes, file_nbytes;
    unsigned char **windows; /* by rank: its arena, as it is mapped here; NULL: it is not */
} pc_host;

/* Map the memory of a host of so many ranks, in file `fd`, for one of them. 0, or an errno; the
   descriptors stay the caller's, until it sets `owns`. `host` is all zero, and to be closed
   whatever the result. */
int pc_host_open(pc_host *host, int fd, int rank, int size, const int *doorbells, int cores);
void pc_host_close(pc_host *host);

static inline struct pc_page *pc_host_page(pc_host *host) { return (struct pc_page *)host->base; }
static inline struct pc_record *pc_host_record(pc_host *host, int rank) {
    return (struct pc_record *)(host->base + PC_PAGE) + rank;
}
/* What this rank has called and waited for last. */
static inline struct pc_notes *pc_host_notes(pc_host *host) {
    return (struct pc_notes *)(host->base + host->notes_offset +
                               (size_t)host->rank * PC_NOTES_NBYTES);
}
/* Forks that lie between this process and the one that loaded the core. */
extern uint32_t pc_forks;

/* Whether this process is a fork's child: the memory, and all that was begun in it, is its
   parent's. */
static inline bool pc_host_forked(const pc_host *host) { return host->forks != pc_forks; }

/* Whether the engine must have a look before anything is done. */
static inline bool pc_host_failed(pc_host *host) {
    return atomic_load_explicit(&pc_host_page(host)->epoch, memory_order_relaxed) !=
               atomic_load_explicit(&host->seen_epoch, memory_order_relaxed) ||
           pc_host_forked(host);
}

/* Where things are in the memory of a host of so many ranks: sets the offsets and lengths. */
void pc_host_lay_out(pc_host *host, int size);

void pc_host_ring(pc_host *host, int rank); /* ring the doorbell of a rank */

/* Wake `rank` if it is asleep. Call it after `pc_publish` of what it may wait for. */
static inline void pc_host_wake(pc_host *host, int rank) {
    if (PC_UNLIKELY(
            atomic_load_explicit(&pc_host_record(host, rank)->asleep, memory_order_seq_cst)))
        pc_host_ring(host, rank);
}

/* Announce that a thread of this process is going to sleep; look at what it waits for once more
   after this. */
void pc_host_sleep(pc_host *host);
void pc_host_awake(pc_host *host);

void pc_host_set_status(pc_host *host, const char *text, size_t nbytes);

/* Map the region of a communicator, all its ranks the same. 0, or an errno. EBUSY: another rank has
   had the lock of the table for long: see whether one has failed, and come again; ENOSPC: there are
   PC_COMMS communicators already. */
int pc_host_attach(pc_host *host, uint64_t ident, size_t nbytes, int *entry,
                   unsigned char **region);
/* Give it back; the last of `size` ranks frees its memory. */
void pc_host_detach(pc_host *host, int entry, int size, unsigned char *region, size_t nbytes);

#endif
