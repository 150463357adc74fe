/* The lock when more than one thread wants it, and the system calls below. See lock.h. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "lock.h"

#include <errno.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int pc_futex_wait(pc_word *word, uint32_t value, uint64_t timeout_ns) {
    struct timespec timeout = {(time_t)(timeout_ns / 1000000000u),
                               (long)(timeout_ns % 1000000000u)};
    struct timespec *limit = timeout_ns == PC_FOR_EVER ? NULL : &timeout;
    return syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, limit, NULL, 0) == 0 ? 0 : errno;
}

bool pc_futex_wake(pc_word *word) {
    return syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0) > 0;
}

/* Who comes this way leaves the lock as wanted: others may sleep for it, and one is woken when it
   is given back. */
void pc_lock_take_slowly(struct pc_lock *lock) {
    uint32_t state = atomic_load_explicit(&lock->state, memory_order_relaxed);
    for (;;) {
        if (state == PC_LOCK_FREE || pc_lock_is_handed(state)) {
            if (atomic_compare_exchange_weak_explicit(&lock->state, &state, PC_LOCK_WANTED,
                                                      memory_order_acquire, memory_order_relaxed))
                return;
        } else if (state == PC_LOCK_WANTED ||
                   atomic_compare_exchange_weak_explicit(&lock->state, &state, PC_LOCK_WANTED,
                                                         memory_order_relaxed,
                                                         memory_order_relaxed)) {
            pc_futex_wait(&lock->state, PC_LOCK_WANTED, PC_FOR_EVER);
            state = atomic_load_explicit(&lock->state, memory_order_relaxed);
        }
    }
}

void pc_lock_hand_over(struct pc_lock *lock) {
    uint32_t handed = ++lock->handed << PC_LOCK_BITS | PC_LOCK_HANDED;
    atomic_store_explicit(&lock->state, handed, memory_order_release);
    if (pc_futex_wake(&lock->state)) {
        /* Until the one that was woken has it. It leaves the lock as wanted, so this thread is
           woken in its turn. */
        pc_futex_wait(&lock->state, handed, PC_FOR_EVER);
        pc_lock_take_slowly(lock);
        return;
    }
    /* Nobody sleeps yet: then who was about to looks again, and sees what this leaves. */
    if (!atomic_compare_exchange_strong_explicit(&lock->state, &handed, PC_LOCK_HELD,
                                                 memory_order_acquire, memory_order_relaxed))
        pc_lock_take_slowly(lock);
}
