/* What a rank has done since it joined, and how long it has waited: for others to read while it
   goes on, and when it has died. Plain C.

   It lies in memory that the launcher has, too (launcher/host_memory.py reads it there). Calls
   that do not wait long pay for it with an addition or two: time counts from when a wait has read
   the clock for the first time, which it does when it has looked in vain for some microseconds. */
#ifndef PC_TALLY_H
#define PC_TALLY_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

struct pc_tally {
    /* Where two threads call at the same time one addition may be lost: these are not exact. */
    uint64_t calls;    /* collectives */
    uint64_t messages; /* that were sent */
    uint64_t nbytes;   /* in these, and given to collectives in shared memory */
    /* Waits of several threads at a time count once. */
    _Atomic uint64_t waited_ns;  /* in waits that have ended */
    _Atomic uint64_t waiting_ns; /* since when a thread waits: CLOCK_MONOTONIC; 0: none does */
    _Atomic uint32_t waiting;    /* threads that wait */
};

static inline void pc_tally_begin(struct pc_tally *tally, uint64_t now_ns) {
    if (atomic_fetch_add(&tally->waiting, 1) == 0)
        atomic_store(&tally->waiting_ns, now_ns);
}

static inline void pc_tally_end(struct pc_tally *tally, uint64_t now_ns) {
    if (atomic_fetch_sub(&tally->waiting, 1) != 1)
        return;
    uint64_t since_ns = atomic_exchange(&tally->waiting_ns, 0);
    if (since_ns != 0 && now_ns > since_ns)
        atomic_fetch_add(&tally->waited_ns, now_ns - since_ns);
}

#endif
