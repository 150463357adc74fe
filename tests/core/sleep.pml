/* The sleep handshake (transports/_core/host/wait.c, host.h): no wake-up is lost.

   PUBLISHERS ranks set a flag each, in several rounds; one rank waits for the first flag, then for the next,
   and sleeps on its doorbell, an eventfd, which counts rings. Here nothing wakes it but the doorbell, so a lost
   wake-up is a deadlock, and spin looks for those. In the core a sleep ends after 100 ms at the latest: a lost
   wake-up there is no hang, only slow.

   A plain store may become visible late, as on real processors: it goes to the writer's buffer, and from
   there to memory at any time. An exchange empties the buffer before anything else happens.

   Faults to plant:
       -DPLAIN_PUBLISH   the flag is stored, not exchanged
       -DPLAIN_ANNOUNCE  so is `asleep`
       -DLOOK_FIRST      the publisher looks whether anybody sleeps before it publishes
       -DNO_LOOK         the sleeper looks at the flag before it announces its sleep, not after
       -DDRAIN_FIRST     the sleeper silences its doorbell between its look and its sleep */

#ifndef PUBLISHERS
#define PUBLISHERS 2
#endif
#define ROUNDS 3

byte flag[PUBLISHERS];
bit asleep;
byte doorbell;

/* Buffers of plain stores: there is one variable each that may be on its way. */
bool flag_is_late[PUBLISHERS];
byte late_flag[PUBLISHERS];
bool asleep_is_late;
bit late_asleep;

/* Memory takes what is in the buffers when it likes. */
active proctype memory() {
    byte rank;
end:
    do
    :: atomic { asleep_is_late -> asleep = late_asleep; asleep_is_late = false }
    :: atomic { flag_is_late[0] -> flag[0] = late_flag[0]; flag_is_late[0] = false }
#if PUBLISHERS > 1
    :: atomic { flag_is_late[1] -> flag[1] = late_flag[1]; flag_is_late[1] = false }
#endif
    od
}

inline publish(rank, value) {
#ifdef PLAIN_PUBLISH
    atomic {
        !flag_is_late[rank]; /* stores leave the buffer in order */
        late_flag[rank] = value;
        flag_is_late[rank] = true
    }
#else
    flag[rank] = value
#endif
}

proctype publisher(byte rank) {
    byte value = 1;
    bit seen;
    do
    :: value <= ROUNDS ->
#ifdef LOOK_FIRST
        seen = asleep;
        publish(rank, value);
#else
        publish(rank, value);
        seen = asleep;
#endif
        if
        :: seen -> doorbell++
        :: else
        fi;
        value++
    :: else -> break
    od
}

inline announce() {
#ifdef PLAIN_ANNOUNCE
    atomic {
        !asleep_is_late;
        late_asleep = 1;
        asleep_is_late = true
    }
#else
    atomic {
        asleep_is_late = false; /* what was stored before is overwritten at once */
        asleep = 1
    }
#endif
}

inline wait(rank, value) {
    if
    :: flag[rank] >= value /* while it looks, before it sleeps */
    :: flag[rank] < value ->
        announce();
#ifdef NO_LOOK
        doorbell > 0;
        doorbell = 0;
#endif
        do
        :: flag[rank] >= value -> break
        :: flag[rank] < value ->
#ifdef DRAIN_FIRST
            doorbell = 0;
#endif
            doorbell > 0; /* poll */
            doorbell = 0  /* read */
        od;
        atomic {
            !asleep_is_late;
            late_asleep = 0; /* a plain store: to be rung once too often does no harm */
            asleep_is_late = true
        }
    fi
}

active proctype sleeper() {
    byte value = 1, rank;
    do
    :: value <= ROUNDS ->
        rank = 0;
        do
        :: rank < PUBLISHERS -> wait(rank, value); rank++
        :: else -> break
        od;
        value++
    :: else -> break
    od
}

init {
    run publisher(0);
#if PUBLISHERS > 1
    run publisher(1)
#endif
}
