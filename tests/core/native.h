/* Ranks as threads of one program: what its files share. See native_tsan.c. */
#ifndef PYCOLL_NATIVE_H
#define PYCOLL_NATIVE_H

#define PYCOLL_NATIVE_HOOKS_THEMSELVES
#include "native_hooks.h"

#include "python/exchange/comm.h"

#ifndef MAX_RANKS
#define MAX_RANKS 5
#endif

/* What a rank that sleeps waits for, for the others to see. Relaxed, so that it orders nothing and
   so hides no race; only a suspicion is confirmed with sequential consistency. */
struct waiting {
    _Alignas(PC_LINE) _Atomic(pc_flag64 *) flag;
    pc_flag64 value;
    pc_flag32 peer;
    pc_flag32 sleeps; /* odd: asleep */
};

struct rank {
    pc_host host;
    pc_comm comm;
    struct waiting waiting;
    struct rank *all; /* of this communicator */
    uint64_t seed;
    bool gives_up; /* it ends a call in which it has to sleep */
};

/* native_sleep.c: a rank's sleep, and who must have been woken. */
int native_sleep(pc_call *call, int peer, uint64_t waited_ns, bool last);
/* This rank may now be away for any time, since it `does` something: end the program if another one
   sleeps, what it waits for is here, and its doorbell has not been rung. */
void native_check_rung(struct rank *rank, const char *does);
/* native_python.c: that, and a lock of each thread's own, which must be held and given up in
   turn. */
extern const struct pc_call_up native_up;
extern _Thread_local struct rank *native_rank;
extern pc_flag64 native_sleeps, native_timeouts;

/* native_python.c: chance, delays, and whether the lock is held. */
extern _Thread_local uint64_t native_seed; /* of this thread's delays */
extern _Thread_local bool native_impatient;
uint64_t native_random(uint64_t *seed);
void native_delay(void);
bool native_has_lock(void);
_Noreturn void native_fail(const char *format, ...);

#endif
