/* The engine's lock (transports/_core/engine/lock.[ch]): one thread at a time has it, and none sleeps for it for ever.

   THREADS threads take it and give it back, twice each. Two of them drive, and let others in.
   There are no spurious wake-ups and no time limits here, so a lost wake-up is a deadlock.

   Faults to plant:
       -DFORGET          who has slept for the lock leaves it as held, not as wanted
       -DNO_WAKE         the lock is given back without waking anybody
       -DCARELESS        who goes to sleep does not say that the lock is wanted
       -DNO_NUMBER       one hand-over looks like another
       -DKEEP            the driver goes to sleep for its turn though nobody was there to be let in */

#ifndef THREADS
#define THREADS 3
#endif
#define FREE 0
#define HELD 1
#define WANTED 2
#define IS_HANDED(state) (state % 4 == 3)

byte state;
byte handed; /* hand-overs, the number of which is in the state */
bool sleeps[THREADS];
byte inside;

/* Compares and goes to sleep in one step, as the kernel does. */
inline futex_wait(me, value) {
    if
    :: atomic { state == value -> sleeps[me] = true };
        !sleeps[me]
    :: atomic { state != value -> skip }
    fi
}

inline futex_wake(was_one) {
    atomic {
        if
        :: sleeps[0] -> sleeps[0] = false; was_one = true
        :: sleeps[1] -> sleeps[1] = false; was_one = true
#if THREADS > 2
        :: sleeps[2] -> sleeps[2] = false; was_one = true
#endif
#if THREADS > 3
        :: sleeps[3] -> sleeps[3] = false; was_one = true
#endif
        :: else -> was_one = false
        fi
    }
}

inline take_slowly(me, seen) {
    seen = state;
    do
    :: seen == FREE || IS_HANDED(seen) ->
        atomic {
            if
#ifndef FORGET
            :: state == seen -> state = WANTED; break
#else
            :: state == seen -> state = HELD; break
#endif
            :: else -> seen = state
            fi
        }
    :: seen == HELD ->
#ifndef CARELESS
        atomic {
            if
            :: state == seen -> state = WANTED; seen = WANTED
            :: else -> seen = state
            fi
        }
#else
        futex_wait(me, HELD);
        seen = state
#endif
    :: seen == WANTED ->
        futex_wait(me, WANTED);
        seen = state
    od
}

inline take(me, seen) {
    if
    :: atomic { state == FREE -> state = HELD }
    :: atomic { state != FREE -> skip };
        take_slowly(me, seen)
    fi;
    inside++;
    assert(inside == 1)
}

inline give(seen, was_one) {
    inside--;
    atomic { seen = state; state = FREE };
#ifndef NO_WAKE
    if
    :: seen == WANTED -> futex_wake(was_one)
    :: else
    fi
#endif
}

inline let_in(me, seen, mine, was_one) {
    if
    :: state == WANTED ->
        inside--;
#ifndef NO_NUMBER
        handed++;
#endif
        mine = handed * 4 + 3;
        state = mine;
        futex_wake(was_one);
#ifdef KEEP
        was_one = true;
#endif
        if
        :: was_one ->
            futex_wait(me, mine);
            take_slowly(me, seen)
        :: !was_one ->
            if
            :: atomic { state == mine -> state = HELD }
            :: atomic { state != mine -> skip };
                take_slowly(me, seen)
            fi
        fi;
        inside++;
        assert(inside == 1)
    :: else
    fi
}

proctype thread(byte me) {
    byte seen, mine, turn;
    bool was_one;
    do
    :: turn < 2 ->
        take(me, seen);
        if
        :: me <= 1 ->
            let_in(me, seen, mine, was_one);
            let_in(me, seen, mine, was_one)
        :: else
        fi;
        give(seen, was_one);
        turn++
    :: else -> break
    od
}

init {
    atomic {
        run thread(0);
        run thread(1);
#if THREADS > 2
        run thread(2);
#endif
#if THREADS > 3
        run thread(3)
#endif
    }
}
