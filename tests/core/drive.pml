/* Sleeping, waking and handing over among the threads that wait (transports/_core/engine/drive.c, background.c): none
   sleeps on when its op is done, and none of those that sleep waits for a driver that has left.

   WAITERS threads wait for an op each. Op 0 is ended by what a peer posts to a source in memory, the others by a
   thread with the lock. The deadline of the last waiter may come. Besides, one thing is pending that ends with a
   message of the peer for which nobody waits: who drives sees to it, at last the background thread. No sleep has a time
   limit here: so a lost wake-up is a deadlock, and spin looks for those. In the code a sleep of the driver ends after
   100 ms.

   What is done with the lock is one step here (`atomic`), as nobody else sees the middle of it; what the peer does
   takes no lock.

   Faults to plant:
       -DNO_LAST_LOOK   the driver does not look at the source once more when it has announced its sleep
       -DLATE_ASLEEP    the driver tells that it sleeps only when it has given the lock back
       -DNO_BELL        an op that is ended for the driver does not ring its bell
       -DNO_HAND_OVER   a driver that leaves wakes nobody
       -DONLY_DRIVER    only a driver that leaves does: not one that was woken to drive, and leaves instead
       -DNO_CALL        a driver that leaves does not call the background thread
       -DSILENT_THEFT   a caller takes over from the sleeping background, which is not told
       -DDRAIN_FIRST    the driver empties its bell when it has given the lock back, and then sleeps */

#ifndef WAITERS
#define WAITERS 2
#endif
#define NOBODY 255
#define BACKGROUND WAITERS

bool lock;
bool done[WAITERS];
bool waits[WAITERS];   /* in the list */
bool woken[WAITERS];   /* the word on which it sleeps */
bool expired;          /* the deadline of the last waiter */
byte driver = NOBODY;
bool asleep;           /* the driver sleeps: as those see it who have the lock */
bool bell, background_bell;

/* The source: what the peer has posted and nobody has looked at; who looks ends op 0, and then what is pending. */
byte posted;
byte seen;
bool announced;
bool doorbell;

byte pending = 1;
bool parked;
bool called;

inline take() { atomic { !lock -> lock = true } }
inline give() { lock = false }

inline ring() {
    if
    :: asleep && driver == BACKGROUND -> background_bell = true
    :: asleep && driver != BACKGROUND -> bell = true
    :: else
    fi
}

inline end_op(which) {
    done[which] = true;
    if
    :: waits[which] && driver == which ->
#ifndef NO_BELL
        ring()
#else
        skip
#endif
    :: waits[which] && driver != which -> woken[which] = true
    :: else
    fi
}

/* What the source's progress does, with the lock. */
inline look() {
    do
    :: seen < posted ->
        seen++;
        if
        :: seen == 1 -> end_op(0)
        :: seen == 2 -> pending--
        fi
    :: else -> break
    od
}

inline hand_over() {
    if
#ifdef NO_HAND_OVER
    :: true
#else
    :: driver == NOBODY && waits[0] -> woken[0] = true
    :: driver == NOBODY && !waits[0] && waits[1] -> woken[1] = true
#if WAITERS > 2
    :: driver == NOBODY && !waits[0] && !waits[1] && waits[2] -> woken[2] = true
    :: driver == NOBODY && !waits[0] && !waits[1] && !waits[2] && pending > 0 && parked ->
#else
    :: driver == NOBODY && !waits[0] && !waits[1] && pending > 0 && parked ->
#endif
#ifndef NO_CALL
        parked = false;
        called = true
#else
        skip
#endif
    :: else
#endif
    fi
}

#define IS_OVER(me) (done[me] || (me == WAITERS - 1 && expired))
#if WAITERS > 2
#define SOMEBODY_WAITS (waits[0] || waits[1] || waits[2])
#else
#define SOMEBODY_WAITS (waits[0] || waits[1])
#endif

/* What the driver or the background does until it sleeps or is over: with the lock, which it has at the end, too. */
inline announce_and_sleep(me, its_bell) {
    announced = true; /* an exchange */
#ifdef NO_LAST_LOOK
    if
    :: true ->
#else
    if
    :: seen < posted -> announced = false
    :: else ->
#endif
#ifndef LATE_ASLEEP
        atomic { asleep = true; give() };
#else
        give();
        atomic { asleep = true };
#endif
#ifdef DRAIN_FIRST
        its_bell = false;
#endif
        (its_bell || doorbell || (me == WAITERS - 1 && expired));
        take();
        atomic {
            if
            :: driver == me ->
                asleep = false;
                announced = false;
                doorbell = false;
                its_bell = false
            :: else -> its_bell = false
            fi
        }
    fi
}

proctype waiter(byte me) {
    bool left = false, drove = false;
    take();
    waits[me] = true;
    woken[me] = true;
    do
    :: atomic { IS_OVER(me) -> break }
    :: atomic { !IS_OVER(me) && (driver == NOBODY || driver == me || (driver == BACKGROUND && asleep)) ->
        if
        :: driver == BACKGROUND ->
#ifndef SILENT_THEFT
            ring();
#endif
            asleep = false;
            announced = false;
            doorbell = false
        :: else
        fi;
        driver = me;
        drove = true;
        look() };
        if
        :: IS_OVER(me)
        :: !IS_OVER(me) && seen == posted -> announce_and_sleep(me, bell)
        :: else
        fi
    :: atomic { !IS_OVER(me) && driver != NOBODY && driver != me && !(driver == BACKGROUND && asleep) ->
        woken[me] = false;
        give() };
        (woken[me] || (me == WAITERS - 1 && expired));
        take();
        woken[me] = true
    od;
    atomic {
        waits[me] = false;
        if
        :: driver == me -> driver = NOBODY
        :: else
        fi;
#ifdef ONLY_DRIVER
        if
        :: drove -> hand_over()
        :: else
        fi;
#else
        hand_over();
#endif
        give()
    }
}

/* Rests are time that passes, so here it may look at any time; it parks as the code does. */
proctype background() {
    take();
    do
    :: pending == 0 -> break
    :: pending > 0 && driver != NOBODY && asleep ->
        atomic { parked = true; give() };
        (called || pending == 0); /* or it stays there until the end */
        take();
        called = false;
        parked = false
    :: pending > 0 && !(driver != NOBODY && asleep) && (driver != NOBODY || SOMEBODY_WAITS) ->
        give(); /* a rest */
        take()
    :: pending > 0 && driver == NOBODY && !SOMEBODY_WAITS ->
        driver = BACKGROUND;
        do
        :: driver != BACKGROUND -> break
        :: driver == BACKGROUND ->
            atomic { look() };
            if
            :: pending == 0 -> break
            :: pending > 0 && SOMEBODY_WAITS -> break
            :: pending > 0 && !SOMEBODY_WAITS && seen == posted ->
                announce_and_sleep(BACKGROUND, background_bell)
            :: else -> /* it lets in who wants the lock */
                give();
                take()
            fi
        od;
        atomic {
            if
            :: driver == BACKGROUND -> driver = NOBODY
            :: else
            fi;
            hand_over()
        }
    od;
    give()
}

/* Another process: publishes, then looks whether somebody sleeps. */
proctype peer() {
    bool is_asleep;
    do
    :: posted < 2 ->
        posted++; /* an exchange */
        is_asleep = announced;
        if
        :: is_asleep -> doorbell = true
        :: else
        fi
    :: else -> break
    od
}

proctype ender(byte which) {
    take();
    atomic {
        end_op(which);
        give()
    }
}

/* Or the deadline does not come before all is done. */
proctype clock() {
    if
    :: expired = true
    :: skip
    fi
}

init {
    atomic {
        run waiter(0);
        run waiter(1);
        run ender(1);
#if WAITERS > 2
        run waiter(2);
        run ender(2);
#endif
        run background();
        run peer();
        run clock()
    }
}
