/* Streaming (transports/_core/python/exchange/exchange.c, all_reduce.c): nobody writes a big slot whose chunk somebody still
   needs, and nobody waits for ever.

   RANKS ranks make CALLS calls of any kinds and of 1 to MOST_CHUNKS chunks, through BIG_SLOTS big slots a rank.
   Data are the number of the chunk, and are not there while a big slot is being written; a reader looks at
   them when it may begin to copy, and when its copy ends. In an all_reduce a big slot has a part for each rank:
   in that of its owner the result is written.

   With -DSLEEP a rank that must wait is asleep at once, and awake again when it is rung: the handshake, which
   sleep.pml is about, is taken as it must work. So a flag after which nobody is rung is a deadlock.

   Faults to plant:
       -DOFF_BY_ONE     a chunk goes into a big slot one chunk too early
       -DREDUCED_EARLY  a part counts as reduced before the result is there
       -DCONSUMED_EARLY chunks count as consumed before their copy has ended
       -DSPECTATOR      who takes nothing does not say so, and the others wait for it
       -DNO_FIRST_RING  announced calls do not ring for the first chunk */

#ifndef RANKS
#define RANKS 2
#endif
#ifndef BIG_SLOTS
#define BIG_SLOTS 2
#endif
#ifndef CALLS
#define CALLS 3
#endif
#ifndef MOST_CHUNKS
#define MOST_CHUNKS 3
#endif

#define ALL 1                                 /* each takes from all */
#define REDUCE_ALL 2                          /* each reduces its part, takes the results */
#define UPWARDS 3                             /* each takes from those below */
#define TO(root) (4 + (root))                 /* the root takes from all */
#define ANNOUNCED(root) (4 + RANKS + (root))  /* all take from the root; they have entered before */
#define KINDS (3 + 2 * RANKS)

#define BIG(rank, chunk) ((rank) * BIG_SLOTS + (chunk) % BIG_SLOTS)

byte kind[CALLS + 1], chunks_of[CALLS + 1]; /* of a call; 0: nobody has come to it */
byte left[CALLS + 1];                       /* ranks that are through with it */
byte entered[RANKS], produced[RANKS], consumed[RANKS], reduced[RANKS];
byte data[RANKS * BIG_SLOTS], result[RANKS * BIG_SLOTS];
#ifdef SLEEP
bool asleep[RANKS], rung[RANKS];
#endif

#define gives(kind, me) \
    (kind == ALL || (kind == UPWARDS && me < RANKS - 1) || (kind >= 4 && kind < 4 + RANKS && kind != TO(me)) || \
     kind == ANNOUNCED(me))
#define takes_from(kind, me, rank) \
    (me != rank && (kind == ALL || (kind == UPWARDS && rank < me) || kind == TO(me) || kind == ANNOUNCED(rank)))
#define takes(kind, me) \
    (kind == ALL || (kind == UPWARDS && me > 0) || kind == TO(me) || (kind >= 4 + RANKS && kind != ANNOUNCED(me)))
#define is_here(what, rank) (what[BIG(rank, chunk + index)] == chunk + index + 1)
#define is_announced(kind) (kind >= 4 + RANKS)

inline choose() {
    atomic {
        if
        :: kind[call] == 0 ->
            select(chosen : 1 .. KINDS);
            select(chunks : 1 .. MOST_CHUNKS);
            kind[call] = chosen;
            chunks_of[call] = chunks
        :: else ->
            chosen = kind[call];
            chunks = chunks_of[call]
        fi
    }
}

/* pc_wait, and what must then be so. */
inline wait(condition, then) {
#ifdef SLEEP
    do
    :: atomic { (condition) -> asleep[me] = false; assert(then); break }
    :: atomic { !(condition) -> asleep[me] = true; rung[me] = false };
       rung[me]
    od
#else
    atomic { (condition) -> assert(then) }
#endif
}

/* pc_wake_others */
inline wake() {
#ifdef SLEEP
    atomic {
        other = 0;
        do
        :: other < RANKS -> rung[other] = rung[other] || asleep[other]; other++
        :: else -> break
        od;
        other = 0
    }
#else
    skip
#endif
}

inline await_consumed() {
    if
#ifdef OFF_BY_ONE
    :: consumed_by_all + BIG_SLOTS < chunk + to_put ->
        needed = chunk + to_put - BIG_SLOTS;
#else
    :: consumed_by_all + BIG_SLOTS <= chunk + to_put ->
        needed = chunk + to_put - BIG_SLOTS + 1;
#endif
        rank = 0;
        do
        :: rank < RANKS && rank != me -> wait(consumed[rank] >= needed, true); rank++
        :: rank == me -> rank++
        :: rank == RANKS -> break
        od;
        consumed_by_all = needed;
        needed = 0;
        rank = 0
    :: else
    fi
}

/* Put chunk number `to_put` of the call there. Chunks count from 0, data from 1. */
inline put() {
    await_consumed();
    data[BIG(me, chunk + to_put)] = 0;
    data[BIG(me, chunk + to_put)] = chunk + to_put + 1;
    produced[me] = chunk + to_put + 1
}

inline consume() { consumed[me] = chunk + index + 1 }

inline enter() {
    entered[me] = call;
    wake()
}

inline stream() {
    if
    :: is_announced(chosen) -> enter()
    :: else
    fi;
    if
#ifndef SPECTATOR
    :: !takes(chosen, me) -> consumed[me] = chunk + chunks
#endif
    :: else
    fi;
    to_put = 0;
    if
    :: gives(chosen, me) -> put()
    :: else
    fi;
    if
    :: !is_announced(chosen) -> enter()
#ifndef NO_FIRST_RING
    :: is_announced(chosen) -> wake()
#endif
    :: else
    fi;
    index = 0;
    do
    :: index < chunks ->
        to_put = index + 1;
        if
        :: gives(chosen, me) && to_put < chunks -> put(); wake()
        :: else
        fi;
        if
        :: takes(chosen, me) ->
            rank = 0;
            do
            :: rank < RANKS && takes_from(chosen, me, rank) ->
                wait(entered[rank] >= call, true);
                wait(produced[rank] >= chunk + index + 1, is_here(data, rank));
                rank++
            :: rank < RANKS && !takes_from(chosen, me, rank) -> rank++
            :: rank == RANKS -> break
            od;
#ifdef CONSUMED_EARLY
            consume();
#endif
            atomic {
                rank = 0;
                do
                :: rank < RANKS -> assert(!takes_from(chosen, me, rank) || is_here(data, rank)); rank++
                :: else -> break
                od;
                rank = 0
            }
#ifndef CONSUMED_EARLY
            consume();
#endif
            wake()
        :: else
        fi;
        index++
    :: else -> break
    od
}

inline all_reduce() {
    to_put = 0;
    put();
    enter();
    index = 0;
    do
    :: index < chunks ->
        rank = 0;
        do
        :: rank < RANKS && rank != me ->
            wait(entered[rank] >= call, true);
            wait(produced[rank] >= chunk + index + 1, is_here(data, rank));
            rank++
        :: rank == me -> rank++
        :: rank == RANKS -> break
        od;
        result[BIG(me, chunk + index)] = 0;
#ifdef REDUCED_EARLY
        reduced[me] = chunk + index + 1;
#endif
        atomic {
            rank = 0;
            do
            :: rank < RANKS -> assert(rank == me || is_here(data, rank)); rank++
            :: else -> break
            od;
            result[BIG(me, chunk + index)] = chunk + index + 1
        }
        reduced[me] = chunk + index + 1;
        wake();
#ifdef CONSUMED_EARLY
        consume();
#endif
        to_put = index + 1;
        if
        :: to_put < chunks -> put(); wake()
        :: else
        fi;
        rank = 0;
        do
        :: rank < RANKS && rank != me ->
            wait(reduced[rank] >= chunk + index + 1, is_here(result, rank));
            assert(is_here(result, rank)); /* as the copy ends */
            rank++
        :: rank == me -> rank++
        :: rank == RANKS -> break
        od;
        rank = 0;
#ifndef CONSUMED_EARLY
        consume();
#endif
        wake();
        index++
    :: else -> break
    od
}

proctype rank_process(byte me) {
    byte call = 1, chunk, consumed_by_all, chosen, chunks, index, to_put, rank, other, needed;
    do
    :: call <= CALLS ->
        choose();
        if
        :: chosen == REDUCE_ALL -> all_reduce()
        :: else -> stream()
        fi;
        atomic {
            chunk = chunk + chunks;
            left[call]++;
            if
            :: left[call] == RANKS -> /* what it was does not matter any more */
                left[call] = 0;
                kind[call] = 0;
                chunks_of[call] = 0
            :: else
            fi;
            index = 0;
            to_put = 0;
            chosen = 0;
            chunks = 0;
            rank = 0;
            call++
        }
    :: else -> break
    od
}

init {
    atomic {
        run rank_process(0);
        run rank_process(1);
#if RANKS > 2
        run rank_process(2)
#endif
    }
}
