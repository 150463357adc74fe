#include "host.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "arena.h"
#include "heap.h"
#include "region.h"

/* Looks at a flag, about 20 ns each, before a waiting rank first yields its core. */
#define SPINS 1000

/* Tries to get the table's lock before the caller looks at what else there is. */
#define TRIES 1000

void pc_host_ring(pc_host *host, int rank) {
    uint64_t one = 1;
    /* It fails only when the counter is full, and then the doorbell is ringing anyway. */
    ssize_t ignored = write(host->doorbells[rank], &one, sizeof one);
    (void)ignored;
}

void pc_host_sleep(pc_host *host) {
    pthread_mutex_lock(&host->sleeping);
    if (host->sleepers++ == 0)
        atomic_exchange_explicit(&pc_host_record(host, host->rank)->asleep, 1,
                                 memory_order_seq_cst);
    pthread_mutex_unlock(&host->sleeping);
}

void pc_host_awake(pc_host *host) {
    pthread_mutex_lock(&host->sleeping);
    if (--host->sleepers == 0)
        atomic_store_explicit(&pc_host_record(host, host->rank)->asleep, 0, memory_order_relaxed);
    pthread_mutex_unlock(&host->sleeping);
}

void pc_host_set_status(pc_host *host, const char *text, size_t nbytes) {
    struct pc_record *record = pc_host_record(host, host->rank);
    if (nbytes > PC_STATUS_NBYTES - 1)
        nbytes = PC_STATUS_NBYTES - 1;
    uint32_t sequence = atomic_load_explicit(&record->status_sequence, memory_order_relaxed);
    atomic_exchange_explicit(&record->status_sequence, sequence + 1, memory_order_seq_cst);
    memcpy(record->status, text, nbytes);
    record->status[nbytes] = 0;
    atomic_store_explicit(&record->status_sequence, sequence + 2, memory_order_release);
}

/* --- forks ------------------------------------------------------------------------------------ */

uint32_t pc_forks;

static void count_fork(void) { pc_forks++; }
static void watch_forks(void) { pthread_atfork(NULL, NULL, count_fork); }

/* --- communicators ---------------------------------------------------------------------------- */

static struct pc_entry *entry_at(pc_host *host, int index) {
    return (struct pc_entry *)(host->base + host->table_offset) + index;
}

/* The table's lock is held for microseconds and never while anything is waited for. If a rank dies
   with it the launcher gives it back, for what is done under it is one store. False: another rank
   has had it for long. */
static bool lock_table(pc_host *host) {
    pc_flag32 *lock = &pc_host_page(host)->lock;
    for (int tries = 0; tries < TRIES; tries++) {
        uint32_t nobody = 0;
        if (atomic_compare_exchange_strong(lock, &nobody, (uint32_t)host->rank + 1))
            return true;
        sched_yield();
    }
    return false;
}

static void unlock_table(pc_host *host) { atomic_store(&pc_host_page(host)->lock, 0); }

int pc_host_attach(pc_host *host, uint64_t ident, size_t nbytes, int *entry,
                   unsigned char **region) {
    int found = -1;
    if (!lock_table(host))
        return EBUSY;
    for (int index = 0; index < PC_COMMS; index++) {
        uint64_t owner = atomic_load(&entry_at(host, index)->ident);
        if (owner == ident) {
            found = index;
            break;
        }
        if (owner == 0 && found < 0)
            found = index;
    }
    if (found >= 0)
        atomic_store(&entry_at(host, found)->ident, ident);
    unlock_table(host);
    if (found < 0)
        return ENOSPC;
    off_t offset = (off_t)(host->regions_offset + (size_t)found * host->region_nbytes);
    void *memory = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, host->fd, offset);
    if (memory == MAP_FAILED)
        return errno;
    *entry = found;
    *region = memory;
    return 0;
}

void pc_host_detach(pc_host *host, int index, int size, unsigned char *region, size_t nbytes) {
    munmap(region, nbytes);
    struct pc_entry *entry = entry_at(host, index);
    if (atomic_fetch_add(&entry->detached, 1) + 1 < (uint32_t)size)
        return;
    off_t offset = (off_t)(host->regions_offset + (size_t)index * host->region_nbytes);
    /* What is punched out reads as zero, as a new region must. If that fails the entry stays
       taken. */
    if (fallocate(host->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset,
                  (off_t)host->region_nbytes) < 0)
        return;
    atomic_store(&entry->detached, 0);
    atomic_store(&entry->ident, 0);
}

/* --- life ------------------------------------------------------------------------------------- */

/* Of up to 16 ranks each ring holds as many messages as credit allows, of up to 128 ranks all rings
   are 64 MiB. */
static size_t ring_nbytes_of(int size) {
    size_t nbytes = (size_t)256 << 10;
    while (nbytes > PC_PAGE && nbytes * (size_t)size * (size_t)size > ((size_t)64 << 20))
        nbytes /= 2;
    return nbytes;
}

void pc_host_lay_out(pc_host *host, int ranks) {
    size_t size = (size_t)ranks;
    size_t offset = pc_round_up(PC_PAGE + size * PC_RECORD_NBYTES, PC_PAGE);
    host->notes_offset = offset;
    offset += size * PC_NOTES_NBYTES;
    host->rings_offset = offset;
    host->ring_nbytes = ring_nbytes_of(ranks);
    offset += size * size * host->ring_nbytes;
    host->heaps_offset = offset;
    host->heap_nbytes = PC_HEAP_NBYTES;
    offset += size * host->heap_nbytes;
    host->table_offset = offset;
    offset += pc_round_up(PC_COMMS * sizeof(struct pc_entry), PC_PAGE);
    host->regions_offset = offset;
    host->region_nbytes = pc_round_up(pc_largest_region_nbytes(ranks), PC_PAGE);
    host->mapped = offset;
    host->arena_nbytes = pc_arena_nbytes(ranks);
    host->arenas_offset = pc_round_up(offset + PC_COMMS * host->region_nbytes, PC_HUGE_PAGE);
    host->file_nbytes = host->arenas_offset + size * host->arena_nbytes;
}

int pc_host_open(pc_host *host, int fd, int rank, int size, const int *doorbells, int cores) {
    host->fd = fd;
    host->rank = rank;
    host->size = size;
    host->spins = size <= cores ? SPINS : 0;
    pthread_mutex_init(&host->sleeping, NULL);
    host->doorbells = calloc((size_t)size, sizeof *host->doorbells);
    host->windows = calloc((size_t)size, sizeof *host->windows);
    if (host->doorbells == NULL || host->windows == NULL)
        return ENOMEM;
    memcpy(host->doorbells, doorbells, (size_t)size * sizeof *doorbells);
    pc_host_lay_out(host, size);
    if (ftruncate(fd, (off_t)host->file_nbytes) < 0)
        return errno;
    void *base = mmap(NULL, host->mapped, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED)
        return errno;
    host->base = base;
    host->seen_epoch = atomic_load(&pc_host_page(host)->epoch);
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_forks);
    host->forks = pc_forks;
    pc_arena_host(host, true);
    return 0;
}

void pc_host_close(pc_host *host) {
    if (host->base != NULL)
        munmap(host->base, host->mapped);
    pc_arena_host(host, false);
    for (int rank = 0; host->owns && rank < host->size; rank++)
        close(host->doorbells[rank]);
    if (host->owns)
        close(host->fd);
    free(host->windows);
    free(host->doorbells);
}
