/* Waiting for another rank.

   A flag only ever grows, and a wait is for a flag to reach a value. A waiting rank looks at it for
   some microseconds, unless there are more ranks than cores; then it yields its core after each
   look; and when some milliseconds have passed it sleeps: it says so in its record, looks once
   more, and calls `sleep`: in Python the engine sleeps on everything that can wake it. Whoever
   publishes a flag rings the doorbell of the ranks that sleep. Python also looks at deadlines,
   signals and failures, so no wait outlives them. */
#ifndef PC_WAIT_H
#define PC_WAIT_H

#include "host.h"

typedef struct pc_call pc_call;

/* What a call asks of its caller, who has a lock: the interpreter's. */
struct pc_call_up {
    /* Called with the lock: sleep until something happens. 0: go on; 1: `peer` has ended, look a
       last time (called again with `last` if that was in vain); -1: give up, an exception is set.
       With `peer` -1 the wait is over. */
    int (*sleep)(pc_call *call, int peer, uint64_t waited_ns, bool last);
    /* give up the lock: returns what `enter` takes it back with, never NULL */
    void *(*leave)(void);
    void (*enter)(void *left);
};

/* One call in shared memory under way. */
struct pc_call {
    pc_host *host;
    const struct pc_call_up *up;
    void *left; /* the lock was given up; NULL: it is held */
};

/* Give up the caller's lock until `pc_hold`; both may be called in any state. */
static inline void pc_release(pc_call *call) {
    if (call->left == NULL)
        call->left = call->up->leave();
}
static inline void pc_hold(pc_call *call) {
    if (call->left != NULL) {
        call->up->enter(call->left);
        call->left = NULL;
    }
}

int pc_wait_long(pc_call *call, pc_flag64 *flag, uint64_t value, int peer);

/* Return 0 when `flag` has reached `value`; -1 with an exception. `peer` sets it. */
static inline int pc_wait(pc_call *call, pc_flag64 *flag, uint64_t value, int peer) {
    if (PC_LIKELY(pc_load(flag) >= value))
        return 0;
    for (int spins = call->host->spins; spins > 0; spins--) {
        pc_relax();
        if (pc_load(flag) >= value)
            return 0;
    }
    return pc_wait_long(call, flag, value, peer);
}

#endif
