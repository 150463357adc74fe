/* Waiting for another rank.

   A flag only ever grows, and a wait is for a flag to reach a value. A waiting rank looks at it for
   some microseconds, unless there are more ranks than cores; then it yields its core after each
   look; and when some milliseconds have passed it sleeps: it says so in its record, looks once
   more, and calls `sleep`: in Python the engine sleeps on everything that can wake it. Whoever
   publishes a flag rings the doorbell of the ranks that sleep. Python also looks at deadlines,
   signals and failures, so no wait outlives them.

   A deadline costs nothing until somebody has to wait: the clock is read for it when a wait of the
   call has lasted for some microseconds, and it counts from then. A call that has more to do than
   wait counts it from its beginning (`pc_deadline_start`). */
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
    /* Say in a note which call this is, which waits for `peer`; with the lock also where in the
       program it was made. */
    void (*identify)(const pc_call *call, int peer, struct pc_noted_wait *wait);
    /* give up the lock: returns what `enter` takes it back with, never NULL */
    void *(*leave)(void);
    void (*enter)(void *left);
};

/* Until when a call of the user's may take, with all calls here that are parts of it. */
struct pc_deadline {
    uint64_t timeout_ns; /* PC_FOR_EVER: there is none */
    uint64_t until_ns;   /* 0: the time is not counted yet */
};

/* Count it from now on, unless it is counted already. */
static inline void pc_deadline_count(struct pc_deadline *deadline, uint64_t now_ns) {
    if (deadline->until_ns == 0)
        deadline->until_ns = pc_time_after(now_ns, deadline->timeout_ns);
}

/* The same, for which the clock is read if there is a deadline. */
static inline void pc_deadline_start(struct pc_deadline *deadline) {
    if (deadline->timeout_ns != PC_FOR_EVER)
        pc_deadline_count(deadline, pc_now_ns());
}

/* One call in shared memory under way. */
struct pc_call {
    pc_host *host;
    const struct pc_call_up *up;
    struct pc_deadline *deadline;
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
