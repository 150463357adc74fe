/* Streaming (transports/_core/python/exchange/exchange.c, all_reduce.c): nobody writes a big slot whose chunk somebody still
   needs, and nobody waits for ever.

   RANKS ranks make CALLS calls of any kinds and of 1 to MOST_CHUNKS chunks, through BIG_SLOTS big slots a rank.
   Data are the number of the chunk, and are not there while a big slot is being written; a reader looks at
   them when it may begin to copy, and when its copy ends. In an all_reduce a big slot has a part for each rank:
   in that of its owner the result is written.

   With -DMIXED ranks may enter a call to do it in another way, before anything of it is put there: those whose arrays
   allow that; then they wait for the others, and it is streamed after all.

   With -DSLEEP a rank that must wait is asleep at once, and awake again when it is rung: the handshake, which
   sleep.pml is about, is taken as it must work. So a flag after which nobody is rung is a deadlock.

   Faults to plant:
       -DOFF_BY_ONE     a chunk goes into a big slot one chunk too early
       -DREDUCED_EARLY  a part counts as reduced before the result is there
       -DENTRY_IS_CHUNK who has entered is thought to have put its first chunk there
       -DKNOWN_EARLY    of a chunk that others have reduced or put there it is thought that they have consumed it
       -DCONSUMED_EARLY chunks count as consumed before their copy has ended
       -DSPECTATOR      who takes nothing does not say so, and the others wait for it
       -DNO_FIRST_RING  who has entered before does not ring for its first chunk */

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
bool has_first_chunk[RANKS];
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

/* pc_await_chunk: most enter a call when they have put its first chunk there, and say so. */
inline await_chunk() {
    if
    :: index == 0 && !before -> wait(entered[rank] >= call, true)
    :: else
    fi;
#ifdef ENTRY_IS_CHUNK
    if
    :: index == 0 && !before -> assert(is_here(data, rank))
#else
    if
    :: index == 0 && !before && has_first_chunk[rank] -> assert(is_here(data, rank))
#endif
    :: else -> wait(produced[rank] >= chunk + index + 1, is_here(data, rank))
    fi
}

inline begin() {
    if
#ifdef MIXED
    :: chosen < 4 -> before = true
#endif
    :: is_announced(chosen) -> before = true
    :: !is_announced(chosen) -> before = false
    fi;
    has_first_chunk[me] = !before;
    if
    :: before ->
        enter();
        if
        :: !is_announced(chosen) -> await_entries()
        :: else
        fi
    :: else
    fi
}

inline await_entries() {
    rank = 0;
    do
    :: rank < RANKS && rank != me -> wait(entered[rank] >= call, true); rank++
    :: rank == me -> rank++
    :: rank == RANKS -> break
    od;
    rank = 0
}

/* All are known to have consumed so many chunks, without a look at their flags. */
inline know(number) {
#ifdef KNOWN_EARLY
    consumed_by_all = number + 1
#else
    consumed_by_all = number
#endif
}

inline enter() {
    entered[me] = call;
    wake()
}

inline stream() {
    begin();
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
    :: !before -> enter()
#ifndef NO_FIRST_RING
    :: before -> wake()
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
            :: rank < RANKS && takes_from(chosen, me, rank) -> await_chunk(); rank++
            :: rank < RANKS && !takes_from(chosen, me, rank) -> rank++
            :: rank == RANKS -> break
            od;
            if
            :: chosen == ALL -> know(chunk + index - (index > 0 -> 1 : 0))
            :: else
            fi;
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
    begin();
    to_put = 0;
    put();
    if
    :: !before -> enter()
#ifndef NO_FIRST_RING
    :: before -> wake()
#endif
    :: else
    fi;
    index = 0;
    do
    :: index < chunks ->
        rank = 0;
        do
        :: rank < RANKS && rank != me -> await_chunk(); rank++
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
        know(chunk + index);
#ifndef CONSUMED_EARLY
        consume();
#endif
        wake();
        index++
    :: else -> break
    od
}

proctype rank_process(byte me) {
    bool before;
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
            before = false;
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
