/* The engine's lock: a word on which threads sleep only if somebody else has it. Plain C, without
   Python.

   Taking and giving it back is one atomic operation each while nobody else wants it. A thread that
   wants it in vain says so in the word and sleeps. Who comes while the lock is free takes it, even
   if others have waited for longer; so a thread that drives, and would take it again at once, lets
   others in by `pc_lock_let_in`: the lock is then handed to one of those that sleep, and the driver
   comes after it. */
#ifndef PC_LOCK_H
#define PC_LOCK_H

#include "base/core.h"

typedef _Atomic uint32_t pc_word;

enum {
    PC_LOCK_FREE,
    PC_LOCK_HELD,
    PC_LOCK_WANTED, /* held, and threads may sleep for it */
    /* for those that sleep, not for who comes; with the number of the hand-over above these bits */
    PC_LOCK_HANDED,
    PC_LOCK_BITS = 2,
};

struct pc_lock {
    pc_word state;
    /* the last hand-over's number: who sleeps until its own is over takes no other for it */
    uint32_t handed;
};

/* Sleep while the word has this value, for that long at most; 0, or an errno: EAGAIN, EINTR,
   ETIMEDOUT. */
int pc_futex_wait(pc_word *word, uint32_t value, uint64_t timeout_ns);
/* Wake one thread; whether there was one. */
bool pc_futex_wake(pc_word *word);

static inline bool pc_lock_is_handed(uint32_t state) {
    return (state & ((1u << PC_LOCK_BITS) - 1)) == PC_LOCK_HANDED;
}

void pc_lock_take_slowly(struct pc_lock *lock);
void pc_lock_hand_over(struct pc_lock *lock);

static inline bool pc_lock_try(struct pc_lock *lock) {
    uint32_t state = PC_LOCK_FREE;
    return atomic_compare_exchange_strong_explicit(&lock->state, &state, PC_LOCK_HELD,
                                                   memory_order_acquire, memory_order_relaxed);
}

static inline void pc_lock_take(struct pc_lock *lock) {
    if (__builtin_expect(!pc_lock_try(lock), 0))
        pc_lock_take_slowly(lock);
}

static inline void pc_lock_give(struct pc_lock *lock) {
    uint32_t state = atomic_exchange_explicit(&lock->state, PC_LOCK_FREE, memory_order_release);
    if (__builtin_expect(state == PC_LOCK_WANTED, 0))
        pc_futex_wake(&lock->state);
}

static inline bool pc_lock_is_wanted(struct pc_lock *lock) {
    return atomic_load_explicit(&lock->state, memory_order_relaxed) == PC_LOCK_WANTED;
}

/* Let one of those in that wait for the lock, and take it back; whether somebody may have been
   in. */
static inline bool pc_lock_let_in(struct pc_lock *lock) {
    if (__builtin_expect(!pc_lock_is_wanted(lock), 1))
        return false;
    pc_lock_hand_over(lock);
    return true;
}

#endif
