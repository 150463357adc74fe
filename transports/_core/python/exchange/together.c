/* Collectives on arrays that every rank has mapped (arena.h): they are cut up, and each rank does
   its part.

   A rank's part is what its own result needs, or its share of what all reduce, whose results it
   writes to all. Ranks that are done do not help: what is written by now this core and now that one
   moves between their caches, and with 4 ranks on 2 cores, where help would pay first, that took
   twice the time. Only the root of a broadcast or scatter, which has no part, copies for the
   others. So parts are cut in pieces, which are claimed (transfer.h). All wait until every piece is
   done: until then arrays are read, and written, that are not one's own.

   A rank that gives up closes all claims and waits for those that are at a piece, so that
   afterwards its arrays are its own. Who enters later finds that it has given up, and begins
   nothing. */
#include "comm.h"
#include "base/copy.h"

#include <sched.h>

/* Bytes of a piece of a short value (longer ones have pieces twice and eight times as long), and of
   what is reduced, or copied several times, while it is in the first cache. */
#ifndef PC_WORK_PIECE
#define PC_WORK_PIECE ((size_t)32 << 10)
#endif
#ifndef PC_WORK_BLOCK
#define PC_WORK_BLOCK ((size_t)16 << 10)
#endif
#define BLOCK PC_WORK_BLOCK

/* Shorter calls keep the interpreter's lock: giving it up and taking it costs as much. */
#define RELEASE_FROM ((size_t)64 << 10)

/* Looks at whether a rank is done with its piece, between looks at whether it lives; and how long
   it may take. A piece takes less than a millisecond: a rank that has not ended it in a second is
   stopped, and nobody waits for that for ever. If it goes on later, it may still write that
   piece. */
#define YIELDS_A_LOOK 1000
#ifndef PC_LONGEST_PIECE_NS
#define PC_LONGEST_PIECE_NS 1000000000u
#endif

struct arrays {
    unsigned char *x, *out; /* here; NULL: they are not */
};

/* What a call finds when all have entered. */
struct meeting {
    struct arrays *all; /* by rank */
    bool all_outs;      /* are here */
    bool root_out;      /* is, for all */
};

/* Whether the work on this kind of call needs `rank`'s x, or out. */
static bool needs_x(const pc_collective *call, int rank) {
    return call->kind != PC_GATHER || rank != call->root;
}
static bool needs_out(const pc_collective *call, int rank) {
    return call->kind == PC_ALL_REDUCE || (call->kind == PC_REDUCE && rank == call->root);
}

/* Bytes of a rank's result. */
static size_t taken_nbytes(const pc_collective *call, int rank) {
    switch (call->kind) {
    case PC_GATHER:
        return rank == call->root ? call->nbytes * (size_t)call->comm->size : 0;
    case PC_ALL_GATHER:
    case PC_ALL_TO_ALL: return call->nbytes * (size_t)call->comm->size;
    case PC_REDUCE: return rank == call->root ? call->nbytes : 0;
    case PC_REDUCE_SCATTER: return pc_block_nbytes(call, rank);
    default: return call->nbytes;
    }
}

bool pc_may_work_together(const pc_collective *call) {
    int me = call->comm->rank;
    switch (call->kind) {
    case PC_ALL_REDUCE:
    case PC_REDUCE:
    case PC_REDUCE_SCATTER:
    case PC_GATHER:
    case PC_ALL_GATHER:
    case PC_ALL_TO_ALL:
        break;
    default: return false;
    }
    return call->comm->together && call->hook == NULL &&
           (!needs_x(call, me) || pc_arena_has(call->x, pc_given_nbytes(call, call->nbytes))) &&
           (!needs_out(call, me) || pc_arena_has(call->out, call->nbytes));
}

/* --- the pieces of a rank --------------------------------------------------------------------- */

/* Whether the ranks of a reduce_scatter share the work, so that no rank has more because its block
   is longer. */
static bool shares(const pc_collective *call, const struct meeting *met) {
    return call->kind == PC_REDUCE_SCATTER && call->begins != NULL && met->all_outs;
}

/* Where the part begins that `rank` reduces of a value for all, or of the blocks of all. */
static size_t part_begin(const pc_collective *call, int rank) {
    size_t nbytes = call->begins != NULL ? pc_given_nbytes(call, call->nbytes) : call->nbytes;
    size_t pages = (nbytes + PC_PAGE - 1) / PC_PAGE;
    size_t begin = pages * (size_t)rank / (size_t)call->comm->size * PC_PAGE;
    return begin < nbytes ? begin : nbytes;
}

static size_t work_nbytes(const pc_collective *call, const struct meeting *met, int rank) {
    if (shares(call, met))
        return part_begin(call, rank + 1) - part_begin(call, rank);
    switch (call->kind) {
    case PC_ALL_REDUCE:
    case PC_REDUCE: return part_begin(call, rank + 1) - part_begin(call, rank);
    case PC_ALL_GATHER:
        return met->all_outs ? call->nbytes : call->nbytes * (size_t)call->comm->size;
    case PC_ALL_TO_ALL: return call->nbytes * (size_t)call->comm->size;
    case PC_REDUCE_SCATTER: return pc_block_nbytes(call, rank);
    default: return call->nbytes;
    }
}

static size_t piece_nbytes(size_t nbytes) {
    return PC_WORK_PIECE * (nbytes <= 8 * PC_WORK_PIECE ? 1 : nbytes < 64 * PC_WORK_PIECE ? 2 : 8);
}

static uint64_t pieces_of(size_t nbytes) {
    size_t piece = piece_nbytes(nbytes);
    return (nbytes + piece - 1) / piece;
}

/* Who does the part of `owner`: that rank, unless it cannot reach the result. */
static int worker_for(const pc_collective *call, const struct meeting *met, int owner) {
    return call->kind == PC_GATHER && !met->root_out ? call->root : owner;
}

/* Reduce bytes [begin, end) of what `xs` point to into all of `outs`, the first of which may be one
   of `xs`. */
static void reduce_into(const pc_collective *call, const unsigned char *const *xs,
                        unsigned char *const *outs, size_t num_outs, size_t begin, size_t end) {
    pc_reduce_fn reduce = pc_reduce_find(call->op, call->dtype);
    int size = call->comm->size;
    bool past = call->nbytes >= PC_PAST_CACHE_NBYTES;
    const void *inputs[size];
    _Alignas(PC_LINE) unsigned char block[BLOCK];
    for (size_t at = begin; at < end; at += BLOCK) {
        size_t length = end - at < BLOCK ? end - at : BLOCK;
        for (int rank = 0; rank < size; rank++)
            inputs[rank] = xs[rank] + at;
        unsigned char *reduced = past ? block : outs[0] + at;
        reduce(reduced, inputs, size, length / pc_itemsize(call->dtype), size);
        for (size_t index = !past; index < num_outs; index++)
            pc_copy_shared(outs[index] + at, reduced, length, call->nbytes);
    }
}

/* Reduce bytes [begin, end) of all blocks, one after the other, each into its rank's result. */
static void reduce_blocks(const pc_collective *call, const struct arrays *all, size_t begin,
                          size_t end) {
    int size = call->comm->size;
    const unsigned char *xs[size];
    for (int owner = 0; owner < size; owner++) {
        size_t first = pc_block_begin(call, owner), after = pc_block_begin(call, owner + 1);
        size_t from = begin > first ? begin : first, to = end < after ? end : after;
        if (from >= to)
            continue;
        for (int rank = 0; rank < size; rank++)
            xs[rank] = all[rank].x + first;
        reduce_into(call, xs, &all[owner].out, 1, from - first, to - first);
    }
}

/* Copy bytes [begin, end) of `x` to the place of `owner` in all results, block by block, so that it
   is read once. */
static void give_to_all(const pc_collective *call, const struct arrays *all, int owner,
                        size_t begin, size_t end) {
    size_t size = (size_t)call->comm->size, whole = size * call->nbytes;
    const unsigned char *x = all[owner].x;
    for (size_t at = begin; at < end; at += BLOCK) {
        size_t length = end - at < BLOCK ? end - at : BLOCK;
        for (size_t step = 0; step < size; step++) {
            unsigned char *to =
                all[((size_t)call->comm->rank + step) % size].out + (size_t)owner * call->nbytes;
            if (to != x)
                pc_copy_shared(to + at, x + at, length, whole);
        }
    }
}

/* Do bytes [begin, end) of the work of `owner`. */
static void work_on(const pc_collective *call, const struct meeting *met, int owner, size_t begin,
                    size_t end) {
    const struct arrays *all = met->all;
    const pc_comm *comm = call->comm;
    size_t size = (size_t)comm->size, nbytes = call->nbytes, shift;
    const unsigned char *xs[size];
    unsigned char *outs[size];
    for (size_t rank = 0; rank < size; rank++)
        xs[rank] = all[rank].x;
    switch (call->kind) {
    case PC_ALL_REDUCE:
        for (size_t rank = 0; rank < size; rank++) /* this rank's own result first: that stays in
                                                      its cache */
            outs[rank] = all[(rank + (size_t)comm->rank) % size].out;
        shift = part_begin(call, owner);
        reduce_into(call, xs, outs, size, shift + begin, shift + end);
        return;
    case PC_REDUCE:
        outs[0] = all[call->root].out;
        shift = part_begin(call, owner);
        reduce_into(call, xs, outs, 1, shift + begin, shift + end);
        return;
    case PC_REDUCE_SCATTER:
        if (shares(call, met)) {
            shift = part_begin(call, owner);
            reduce_blocks(call, all, shift + begin, shift + end);
            return;
        }
        for (size_t rank = 0; rank < size; rank++)
            xs[rank] += pc_block_begin(call, owner);
        outs[0] = all[owner].out;
        reduce_into(call, xs, outs, 1, begin, end);
        return;
    case PC_GATHER:
        if (all[call->root].out + (size_t)owner * nbytes != all[owner].x)
            pc_copy_shared(all[call->root].out + (size_t)owner * nbytes + begin,
                           all[owner].x + begin, end - begin, nbytes);
        return;
    default: /* PC_ALL_GATHER, PC_ALL_TO_ALL: the blocks of the result, beginning with the next
                rank's */
        if (call->kind == PC_ALL_GATHER && met->all_outs) {
            give_to_all(call, all, owner, begin, end);
            return;
        }
        for (size_t at = begin, length; at < end; at += length) {
            size_t from = (at / nbytes + (size_t)owner + 1) % size, offset = at % nbytes;
            length = nbytes - offset < end - at ? nbytes - offset : end - at;
            const unsigned char *source =
                xs[from] + (call->kind == PC_ALL_TO_ALL ? (size_t)owner * nbytes : 0);
            unsigned char *target = all[owner].out + from * nbytes;
            if (source != target)
                pc_copy_shared(target + offset, source + offset, length, size * nbytes);
        }
    }
}

/* --- the work --------------------------------------------------------------------------------- */

static void piece_done(pc_comm *comm, struct pc_transfer *work, uint64_t pieces) {
    if (atomic_fetch_add(&work->done, 1) + 1 == pieces)
        pc_wake_others(comm);
}

/* Do the part of `owner`. */
static void work_for(pc_collective *call, const struct meeting *met, int owner) {
    size_t nbytes = work_nbytes(call, met, owner), piece = piece_nbytes(nbytes);
    uint64_t pieces = pieces_of(nbytes);
    struct pc_transfer *work = &pc_place_of(call->comm, owner, call->number)->work;
    int64_t claimed;
    while ((claimed = pc_transfer_claim(work, pieces)) >= 0) {
        size_t begin = (size_t)claimed * piece;
        work_on(call, met, owner, begin, nbytes - begin < piece ? nbytes : begin + piece);
        piece_done(call->comm, work, pieces);
    }
}

static int await_pieces(pc_collective *call, const struct meeting *met, int owner) {
    uint64_t pieces = pieces_of(work_nbytes(call, met, owner));
    int worker = worker_for(call, met, owner);
    return pc_wait(&call->call, &pc_place_of(call->comm, owner, call->number)->work.done, pieces,
                   worker);
}

/* Wait until all have entered; whether all arrays that are needed are here. */
static int meet(pc_collective *call, struct meeting *met) {
    pc_comm *comm = call->comm;
    struct arrays *all = met->all;
    size_t given = pc_given_nbytes(call, call->nbytes);
    bool here = true;
    for (int rank = 0; rank < comm->size; rank++) {
        if (rank == comm->rank) {
            all[rank] = (struct arrays){(unsigned char *)call->x, call->out};
            size_t taken = taken_nbytes(call, rank);
            bool out_is_here = taken == 0 || pc_arena_has(call->out, taken);
            met->all_outs = met->all_outs && out_is_here;
            met->root_out = met->root_out || (rank == call->root && out_is_here);
            continue;
        }
        struct pc_slot *slot;
        if (pc_await_entry(call, rank, &slot) < 0)
            return -1;
        const struct pc_place *place = &slot->place;
        int local = comm->local[rank];
        all[rank].x = pc_here(comm->host, local, place->x, given);
        all[rank].out = pc_here(comm->host, local, place->out, taken_nbytes(call, rank));
        met->all_outs = met->all_outs && (all[rank].out != NULL || taken_nbytes(call, rank) == 0);
        met->root_out = met->root_out || (rank == call->root && all[rank].out != NULL);
        here = here && place->together && (all[rank].x != NULL || !needs_x(call, rank)) &&
               (all[rank].out != NULL || !needs_out(call, rank));
    }
    comm->entered_by_all = call->number;
    return here;
}

int pc_work_together(pc_collective *call, struct pc_slot *slot) {
    pc_comm *comm = call->comm;
    struct arrays all[comm->size];
    struct meeting met = {all, true, false};
    pc_place_set(&slot->place, call->number, (uintptr_t)call->x, (uintptr_t)call->out, true);
    call->placed = true;
    *pc_has_first_chunk(slot) = false;
    pc_enter_end(call, slot);
    int here = meet(call, &met);
    if (here <= 0)
        return here;
    if (pc_check_given_up(call) < 0)
        return -1;
    if (work_nbytes(call, &met, comm->rank) >= RELEASE_FROM)
        pc_release(&call->call);
    pc_work_begin(call);
    for (int owner = 0; owner < comm->size; owner++)
        if (worker_for(call, &met, owner) == comm->rank)
            work_for(call, &met, owner);
    pc_work_end(call);
    bool only_own = call->kind == PC_GATHER && comm->rank != call->root;
    for (int step = 0; step < (only_own ? 1 : comm->size); step++)
        if (await_pieces(call, &met, (comm->rank + step) % comm->size) < 0)
            return -1;
    return 1;
}

/* --- what a root announces -------------------------------------------------------------------- */

bool pc_is_open(const pc_collective *call, uint64_t address) {
    pc_comm *comm = call->comm;
    size_t given = pc_given_nbytes(call, call->nbytes);
    if (!comm->together)
        return false;
    return comm->rank == call->root
               ? pc_arena_has((void *)(uintptr_t)address, given)
               : pc_here(comm->host, comm->local[call->root], address, given) != NULL;
}

/* Copy pieces of what `rank` is to have from `from` to `to` until all are claimed. */
static void copy_pieces(pc_collective *call, int rank, const unsigned char *from,
                        unsigned char *to) {
    struct pc_transfer *work = &pc_place_of(call->comm, rank, call->number)->work;
    size_t piece = piece_nbytes(call->nbytes);
    uint64_t pieces = pieces_of(call->nbytes);
    int64_t claimed;
    while ((claimed = pc_transfer_claim(work, pieces)) >= 0) {
        size_t begin = (size_t)claimed * piece, rest = call->nbytes - begin;
        pc_copy_shared(to + begin, from + begin, rest < piece ? rest : piece, call->nbytes);
        piece_done(call->comm, work, pieces);
    }
}

int pc_serve_together(pc_collective *call) {
    pc_comm *comm = call->comm;
    pc_place_set(pc_place_of(comm, comm->rank, call->number), call->number, 0, 0, true);
    call->placed = true; /* if it gives up it waits for those who read its array */
    if (comm->host->spins == 0) /* the others need this core */
        return pc_await_readers(call);
    if (call->nbytes >= RELEASE_FROM)
        pc_release(&call->call);
    for (int step = 1; step < comm->size; step++) {
        int rank = (comm->rank + step) % comm->size;
        struct pc_place *place = pc_place_of(comm, rank, call->number);
        if (pc_wait(&call->call, &place->number, call->number, rank) < 0)
            return -1;
        unsigned char *to = pc_here(comm->host, comm->local[rank], place->out, call->nbytes);
        const unsigned char *from = call->x;
        if (to == NULL)
            continue;
        pc_work_begin(call);
        copy_pieces(call, rank, from + (call->kind == PC_SCATTER ? (size_t)rank * call->nbytes : 0),
                    to);
        pc_work_end(call);
    }
    return pc_await_readers(call);
}

int pc_receive_together(pc_collective *call, uint64_t address) {
    pc_comm *comm = call->comm;
    struct pc_place *place = pc_place_of(comm, comm->rank, call->number);
    const unsigned char *from =
        pc_here(comm->host, comm->local[call->root], address, pc_given_nbytes(call, call->nbytes));
    uint64_t out = pc_arena_has(call->out, call->nbytes) ? (uintptr_t)call->out : 0;
    if (from == NULL) /* it was there before: its rank has taken it away */
        return pc_direct_receive(call, address, true);
    pc_place_set(place, call->number, 0, out, true);
    call->placed = true;
    pc_host_wake(comm->host, comm->local[call->root]);
    if (pc_check_given_up(call) < 0)
        return -1;
    if (call->nbytes >= RELEASE_FROM)
        pc_release(&call->call);
    pc_work_begin(call);
    copy_pieces(call, comm->rank,
                from + (call->kind == PC_SCATTER ? (size_t)comm->rank * call->nbytes : 0),
                call->out);
    pc_work_end(call);
    if (pc_wait(&call->call, &place->work.done, pieces_of(call->nbytes), call->root) < 0 ||
        pc_check_given_up(call) < 0)
        return -1;
    pc_reach(call, 2);
    return 0;
}

/* --- giving up -------------------------------------------------------------------------------- */

void pc_abandon(pc_collective *call) {
    pc_comm *comm = call->comm;
    for (int rank = 0; rank < comm->size; rank++) {
        struct pc_place *place = pc_place_of(comm, rank, call->number);
        if (pc_load(&place->number) == call->number)
            pc_transfer_close(&place->work);
    }
    pc_release(&call->call);
    uint64_t started = pc_now_ns();
    for (int rank = 0; rank < comm->size; rank++) {
        struct pc_place *place = pc_place_of(comm, rank, call->number);
        for (unsigned yields = 1; rank != comm->rank && pc_load(&place->number) == call->number &&
             pc_load(&place->working) != 0; yields++) {
            sched_yield();
            if (yields % YIELDS_A_LOOK == 0 &&
                (pc_process_ended(comm->pids[rank]) || pc_now_ns() - started > PC_LONGEST_PIECE_NS))
                break;
        }
    }
    pc_hold(&call->call);
}
