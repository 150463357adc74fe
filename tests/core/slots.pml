/* Slots (transports/_core/python/exchange/comm.h, exchange.c): nobody writes a slot that somebody may still read, and nobody
   waits for ever.

   RANKS ranks make CALLS calls of any kinds, the same on all ranks: the first to come to a call chooses its kind. As
   in the core, a rank waits before it enters a call until all have entered the call after the one that used its
   slot last, unless it knows that already; and it waits only for the ranks whose data it takes.

   Data are the number of the call. They are not there while a slot is being written, and a reader looks at
   them twice, when it may begin to copy and when its copy ends. Each rank also compares its calls with those of every other
   rank, the missed ones too, at the next occasion (`compare_earlier`): the signatures of its last
   2 * SLOTS calls lie beside the slots, because a slot may be written again while it is compared.

   Faults to plant:
       -DOFF_BY_ONE       a slot is written again one call too early
       -DNO_ENTRY         a rank that takes nothing enters no call: the others may wait for ever
       -DCOMPARE_IN_SLOT  signatures lie in the slots only */

#ifndef RANKS
#define RANKS 2
#endif
#ifndef SLOTS
#define SLOTS 4
#endif
#ifndef CALLS
#define CALLS (2 * SLOTS + 1)
#endif

#define ALL 1             /* each takes from all */
#define TO(root) (2 + (root))   /* the root takes from all */
#define FROM(root) (2 + RANKS + (root)) /* all take from the root */
#define UPWARDS (2 + 2 * RANKS) /* each takes from those below */
#define KINDS UPWARDS

#define SLOT(rank, call) ((rank) * SLOTS + (call) % SLOTS)
#define SIGNATURE(rank, call) ((rank) * 2 * SLOTS + (call) % (2 * SLOTS))

byte kind[SLOTS * 2]; /* of a call; 0: nobody has come to it */
byte left[SLOTS * 2]; /* ranks that are through with it */
byte number[RANKS * SLOTS];
byte data[RANKS * SLOTS];
#ifdef COMPARE_IN_SLOT
byte signature[RANKS * SLOTS];
#else
byte signature[RANKS * 2 * SLOTS];
#endif

#define takes(kind, me, rank)                                                     \
    (me != rank && (kind == ALL || kind == TO(me) || (kind == FROM(rank)) ||       \
                    (kind == UPWARDS && rank < me)))

inline choose(call) {
    atomic {
        if
        :: kind[call % (2 * SLOTS)] == 0 ->
            select(chosen : 1 .. KINDS);
            kind[call % (2 * SLOTS)] = chosen
        :: else -> chosen = kind[call % (2 * SLOTS)]
        fi
    }
}

/* Compare this rank's calls up to `last` with those of `rank`. */
inline compare_earlier(rank, last) {
    do
    :: compared[rank] < last ->
        compared[rank]++;
#ifdef COMPARE_IN_SLOT
        found = signature[SLOT(rank, compared[rank])];
        /* It counts if the slot still says that it is of this call. */
        assert(number[SLOT(rank, compared[rank])] != compared[rank] || found == compared[rank])
#else
        found = signature[SIGNATURE(rank, compared[rank])];
        assert(found == compared[rank])
#endif
    :: else -> break
    od
}

proctype rank_process(byte me) {
    byte call = 1, entered_by_all, chosen, rank, found, needed;
    byte compared[RANKS];
    do
    :: call <= CALLS ->
        choose(call);
#ifdef OFF_BY_ONE
        if
        :: entered_by_all + SLOTS < call ->
            needed = call - SLOTS;
#else
        if
        :: entered_by_all + SLOTS <= call ->
            needed = call - SLOTS + 1;
#endif
            rank = 0;
            do
            :: rank < RANKS && rank != me ->
                number[SLOT(rank, needed)] >= needed;
                compare_earlier(rank, needed);
                rank++
            :: rank == me -> rank++
            :: rank == RANKS -> break
            od;
            entered_by_all = needed
        :: else
        fi;
#ifdef NO_ENTRY
        if
        :: chosen != TO(me) && chosen != FROM(me) && chosen != ALL && chosen != UPWARDS -> goto next
        :: else
        fi;
#endif
        data[SLOT(me, call)] = 0;
        data[SLOT(me, call)] = call;
#ifdef COMPARE_IN_SLOT
        signature[SLOT(me, call)] = call;
#else
        signature[SIGNATURE(me, call)] = call;
#endif
        number[SLOT(me, call)] = call;
        rank = 0;
        do
        :: rank < RANKS && takes(chosen, me, rank) ->
            atomic { number[SLOT(rank, call)] >= call -> assert(data[SLOT(rank, call)] == call) };
            compare_earlier(rank, call);
            assert(data[SLOT(rank, call)] == call); /* as the copy ends */
            rank++
        :: rank < RANKS && !takes(chosen, me, rank) -> rank++
        :: rank == RANKS -> break
        od;
        if
        :: chosen == ALL -> entered_by_all = call
        :: else
        fi;
#ifdef NO_ENTRY
    next:
#endif
        atomic {
            left[call % (2 * SLOTS)]++;
            if
            :: left[call % (2 * SLOTS)] == RANKS ->
                left[call % (2 * SLOTS)] = 0;
                kind[call % (2 * SLOTS)] = 0
            :: else
            fi;
            chosen = 0;
            needed = 0;
            found = 0;
            rank = 0
        }
        call++
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
