/* Sleeping, and the search for lost wake-ups.

   A wake-up is lost if a rank sleeps although what it waits for is here, and nobody will ring. Time
   alone would not tell: the next call of a busy neighbour rings everybody. So whenever a rank
   leaves a call, or is about to sleep itself, it looks at those that sleep on a flag of its own:
   since they had announced their sleep before they last looked at that flag, it must have rung. */
#include "native.h"

#include <poll.h>
#include <unistd.h>

/* The longest sleep, as in pycoll/_calls/shared_memory.py; and how late a ring may be on a busy
   machine. */
#define SLEEP_MS 100
#define GRACE_MS 10000

_Thread_local struct rank *native_rank;
pc_flag64 native_sleeps, native_timeouts;

/* What the call of pc_wait_long under way in this thread waits for. */
static _Thread_local pc_flag64 *waited_flag;
static _Thread_local uint64_t waited_value;

/* The linker puts this in front of the core's (--wrap). */
int __real_pc_wait_long(pc_call *call, pc_flag64 *flag, uint64_t value, int peer);
int __wrap_pc_wait_long(pc_call *call, pc_flag64 *flag, uint64_t value, int peer);
int __wrap_pc_wait_long(pc_call *call, pc_flag64 *flag, uint64_t value, int peer) {
    waited_flag = flag;
    waited_value = value;
    return __real_pc_wait_long(call, flag, value, peer);
}

static bool is_ringing(struct rank *rank, int timeout_ms) {
    struct pollfd doorbell = {.fd = rank->host.doorbells[rank->host.rank], .events = POLLIN};
    return poll(&doorbell, 1, timeout_ms) == 1;
}

/* Whether `other` sleeps on a flag of `rank` that is there, and is not being rung. */
static bool is_forgotten(struct rank *rank, struct rank *other, memory_order order) {
    struct waiting *waiting = &other->waiting;
    uint32_t sleeps = atomic_load_explicit(&waiting->sleeps, order);
    if (sleeps % 2 == 0 || atomic_load_explicit(&waiting->peer, order) != (uint32_t)rank->comm.rank)
        return false;
    pc_flag64 *flag = atomic_load_explicit(&waiting->flag, order);
    if (atomic_load_explicit(flag, order) < atomic_load_explicit(&waiting->value, order) ||
        is_ringing(other, 0))
        return false;
    /* It counts its awakening before it silences its doorbell. */
    return atomic_load_explicit(&waiting->sleeps, order) == sleeps;
}

/* Whether the flag counts the pieces of a rank's work: then whoever did the last one rings, and not
   that rank. */
static bool is_work(struct rank *rank, pc_flag64 *flag) {
    for (uint64_t number = 0; number < PC_SLOTS; number++)
        if (flag == &pc_place_of(&rank->comm, rank->comm.rank, number)->work.done)
            return true;
    return false;
}

/* The flag, in words. */
static const char *name_of(struct rank *rank, pc_flag64 *flag) {
    struct pc_progress *progress = pc_progress_of(&rank->comm, rank->comm.rank);
    return flag == &progress->produced   ? "produced"
           : flag == &progress->reduced  ? "reduced"
           : flag == &progress->consumed ? "consumed"
           : flag == &progress->phase    ? "phase"
                                         : "entry";
}

void native_check_rung(struct rank *rank, const char *does) {
    for (int index = 0; index < rank->comm.size; index++) {
        struct rank *other = &rank->all[index];
        if (other != rank && is_forgotten(rank, other, memory_order_relaxed) &&
            !is_work(rank, atomic_load_explicit(&other->waiting.flag, memory_order_relaxed)) &&
            is_forgotten(rank, other, memory_order_seq_cst))
            native_fail("a lost wake-up: rank %d of %d %s in call %llu, rank %d sleeps on its flag "
                        "`%s` and was not rung\n",
                        rank->comm.rank, rank->comm.size, does,
                        (unsigned long long)rank->comm.number, index,
                        name_of(rank, other->waiting.flag));
    }
}

int native_sleep(pc_call *call, int peer, uint64_t waited_ns, bool last) {
    struct rank *rank = native_rank;
    struct waiting *waiting = &rank->waiting;
    (void)waited_ns;
    if (!native_has_lock() || last || call->host != &rank->host)
        native_fail("sleep was called without the lock, or for nothing\n");
    if (peer < 0)
        return 0;
    if (rank->gives_up)
        return -1;
    if (atomic_load(&pc_host_record(call->host, rank->host.rank)->asleep) != 1)
        native_fail("rank %d sleeps and has not announced it\n", rank->comm.rank);
    native_check_rung(rank, "sleeps");
    atomic_store_explicit(&waiting->flag, waited_flag, memory_order_relaxed);
    atomic_store_explicit(&waiting->value, waited_value, memory_order_relaxed);
    atomic_store_explicit(&waiting->peer, (uint32_t)peer, memory_order_relaxed);
    atomic_fetch_add_explicit(&waiting->sleeps, 1, memory_order_release);
    atomic_fetch_add_explicit(&native_sleeps, 1, memory_order_relaxed);
    if (!is_ringing(rank, SLEEP_MS)) {
        atomic_fetch_add_explicit(&native_timeouts, 1, memory_order_relaxed);
        if (pc_load(waited_flag) >= waited_value && !is_ringing(rank, GRACE_MS))
            native_fail("a lost wake-up: rank %d was not rung by rank %d\n", rank->comm.rank, peer);
    }
    atomic_fetch_add(&waiting->sleeps, 1);
    uint64_t rings;
    if (is_ringing(rank, 0) &&
        read(rank->host.doorbells[rank->host.rank], &rings, sizeof rings) != sizeof rings)
        native_fail("the doorbell cannot be read\n");
    return 0;
}
