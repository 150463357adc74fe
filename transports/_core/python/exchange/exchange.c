#include "comm.h"
#include "base/copy.h"

#include <stdlib.h>

/* --- who gives, who takes --------------------------------------------------------------------- */

static bool gives(const pc_collective *call, int rank) {
    switch (call->kind) {
    case PC_BARRIER: return false;
    case PC_BROADCAST:
    case PC_SCATTER: return rank == call->root;
    case PC_REDUCE:
    case PC_GATHER: return rank != call->root;
    case PC_SCAN:
    case PC_EXSCAN: return rank < call->comm->size - 1;
    default: return true;
    }
}

static bool takes_from(const pc_collective *call, int rank) {
    int me = call->comm->rank;
    switch (call->kind) {
    case PC_BROADCAST:
    case PC_SCATTER: return rank == call->root && me != call->root;
    case PC_REDUCE:
    case PC_GATHER: return me == call->root && rank != me;
    case PC_SCAN:
    case PC_EXSCAN: return rank < me;
    default: return rank != me;
    }
}

static bool takes(const pc_collective *call) {
    for (int rank = 0; rank < call->comm->size; rank++)
        if (takes_from(call, rank))
            return true;
    return false;
}

/* How much of the block for `rank` is in bytes [offset, offset + length) of all blocks. In a slot
   these pieces lie one after the other. */
static size_t piece_nbytes(const pc_collective *call, int rank, size_t offset, size_t length) {
    if (PC_LIKELY(call->begins == NULL))
        return length;
    size_t nbytes = pc_block_nbytes(call, rank);
    return nbytes <= offset ? 0 : nbytes - offset < length ? nbytes - offset : length;
}

static size_t piece_begin(const pc_collective *call, int rank, size_t offset, size_t length) {
    if (PC_LIKELY(call->begins == NULL))
        return (size_t)rank * length;
    size_t begin = 0;
    for (int before = 0; before < rank; before++)
        begin += piece_nbytes(call, before, offset, length);
    return begin;
}

/* Copy bytes [offset, offset + length) of what this rank gives to `to`. */
static void give(const pc_collective *call, unsigned char *to, size_t offset, size_t length) {
    const unsigned char *x = (const unsigned char *)call->x + offset;
    if (!pc_is_split(call->kind)) {
        pc_copy(to, x, length);
        return;
    }
    for (int rank = 0; rank < call->comm->size; rank++) {
        size_t nbytes = piece_nbytes(call, rank, offset, length);
        if (rank != call->comm->rank && nbytes > 0)
            pc_copy(to, x + pc_block_begin(call, rank), nbytes);
        to += nbytes;
    }
}

/* Take bytes [offset, offset + length) of what the others gave: `from` by rank. */
static void take(const pc_collective *call, const unsigned char **from, size_t offset,
                 size_t length) {
    const pc_comm *comm = call->comm;
    size_t me = (size_t)comm->rank, size = (size_t)comm->size, nbytes = call->nbytes;
    const unsigned char *x = call->x;
    unsigned char *out = call->out;
    const void *inputs[size];
    int num_inputs = comm->size;
    switch (call->kind) {
    case PC_BARRIER: return;
    case PC_BROADCAST: pc_copy_part(out + offset, from[call->root], length, nbytes); return;
    case PC_SCATTER:
        pc_copy_part(out + offset, from[call->root] + me * length, length, nbytes);
        return;
    case PC_GATHER:
    case PC_ALL_GATHER:
        for (size_t rank = 0; rank < size; rank++)
            if (rank != me)
                pc_copy_part(out + rank * nbytes + offset, from[rank], length, nbytes);
            else if (out + me * nbytes != x)
                pc_copy_part(out + me * nbytes + offset, x + offset, length, nbytes);
        return;
    case PC_ALL_TO_ALL:
        for (size_t rank = 0; rank < size; rank++)
            if (rank != me)
                pc_copy_part(out + rank * nbytes + offset, from[rank] + me * length, length,
                             nbytes);
            else if (out != x)
                pc_copy_part(out + me * nbytes + offset, x + me * nbytes + offset, length, nbytes);
        return;
    case PC_REDUCE_SCATTER:
        x += pc_block_begin(call, comm->rank);
        for (size_t rank = 0, begin = piece_begin(call, comm->rank, offset, length); rank < size;
             rank++)
            inputs[rank] = rank == me ? x + offset : from[rank] + begin;
        length = piece_nbytes(call, comm->rank, offset, length);
        break;
    case PC_EXSCAN: num_inputs = comm->rank; /* fall through */
    case PC_SCAN:
        if (call->kind == PC_SCAN)
            num_inputs = comm->rank + 1; /* fall through */
    default: /* PC_REDUCE, PC_ALL_REDUCE */
        for (size_t rank = 0; rank < size; rank++)
            inputs[rank] = rank == me ? x + offset : from[rank];
    }
    pc_reduce_fn reduce = pc_reduce_find(call->op, call->dtype);
    if (num_inputs > 0 && length > 0)
        reduce(out + offset, inputs, num_inputs, length / pc_itemsize(call->dtype), num_inputs);
}

/* --- entering a call -------------------------------------------------------------------------- */

/* Compare the calls from the last compared one up to `number` with those of a rank. Calls in which
   this rank did not wait for that one are so compared at the next in which it does, or when the
   slot is needed again. */
static PC_COLD int compare_earlier(pc_collective *call, int rank, uint64_t number) {
    pc_comm *comm = call->comm;
    for (uint64_t earlier = comm->compared[rank] + 1; earlier <= number; earlier++)
        if (*pc_signature_of(comm, rank, earlier) != *pc_signature_of(comm, comm->rank, earlier))
            return pc_mismatch(call, rank, earlier);
    comm->compared[rank] = number;
    return 0;
}

/* Wait until this call's slot is free; its number and signature come with `pc_enter_end`. */
int pc_enter_begin(pc_collective *call, struct pc_slot **slot) {
    pc_comm *comm = call->comm;
    /* Of the calls that Python makes for one of the user's only the first counts. */
    if (PC_UNLIKELY(comm->claimed) && call->number == 0 && call->within == NULL)
        comm->internal += comm->number > comm->internal + comm->calls_before;
    call->number = comm->number + 1;
    if (PC_UNLIKELY(comm->entered_by_all + PC_SLOTS <= call->number)) {
        uint64_t needed = call->number - PC_SLOTS + 1;
        for (int rank = 0; rank < comm->size; rank++) {
            if (rank == comm->rank)
                continue;
            if (pc_wait(&call->call, &pc_slot_of(comm, rank, needed)->number, needed, rank) < 0)
                return -1;
            if (comm->compared[rank] < needed && compare_earlier(call, rank, needed) < 0)
                return -1;
        }
        comm->entered_by_all = needed;
    }
    *slot = pc_slot_of(comm, comm->rank, call->number);
    return 0;
}

void pc_enter_end(pc_collective *call, struct pc_slot *slot) {
    pc_comm *comm = call->comm;
    comm->tally->nbytes += call->nbytes;
    comm->number = call->number;
    struct pc_kept *kept = pc_kept_of(comm, comm->rank, call->number);
    kept->nbytes = call->nbytes | (uint64_t)call->method << PC_KEPT_METHOD_AT;
    slot->signature = kept->signature = call->signature;
    slot->shape[0] = call->ndim;
    for (int axis = 0; axis < call->ndim && axis < 7; axis++)
        slot->shape[axis + 1] = call->dims[axis];
    pc_publish(&slot->number, call->number);
    pc_wake_others(comm);
}

/* Wait until `rank` has entered this call, and compare the calls. */
int pc_await_entry(pc_collective *call, int rank, struct pc_slot **slot) {
    pc_comm *comm = call->comm;
    *slot = pc_slot_of(comm, rank, call->number);
    if (pc_wait(&call->call, &(*slot)->number, call->number, rank) < 0)
        return -1;
    if (PC_UNLIKELY(comm->compared[rank] + 1 < call->number) &&
        compare_earlier(call, rank, call->number - 1) < 0)
        return -1;
    if (PC_UNLIKELY((*slot)->signature != call->signature))
        return pc_mismatch(call, rank, call->number);
    comm->compared[rank] = call->number;
    return 0;
}

static bool takes_from_all(const pc_collective *call) {
    return call->kind == PC_ALL_REDUCE || call->kind == PC_ALL_GATHER || call->kind == PC_BARRIER ||
           call->kind == PC_REDUCE_SCATTER || call->kind == PC_ALL_TO_ALL;
}

/* --- small: one exchange of slots ------------------------------------------------------------- */

static int exchange(pc_collective *call, struct pc_slot *slot) {
    pc_comm *comm = call->comm;
    const unsigned char *from[comm->size];
    if (call->nbytes > 0 && gives(call, comm->rank))
        give(call, slot->data, 0, call->nbytes);
    pc_enter_end(call, slot);
    for (int rank = 0; rank < comm->size; rank++) {
        from[rank] = NULL;
        if (takes_from(call, rank)) {
            struct pc_slot *theirs;
            if (pc_await_entry(call, rank, &theirs) < 0)
                return -1;
            from[rank] = theirs->data;
        }
    }
    if (call->nbytes > 0 && (takes(call) || call->kind == PC_SCAN))
        take(call, from, 0, call->nbytes);
    if (takes_from_all(call))
        comm->entered_by_all = call->number;
    return 0;
}

/* --- large: streaming through big slots ------------------------------------------------------- */

/* Wait until `rank` has put chunk `chunk` there, the call's own number `index`. `slot` is the
   call's, or NULL: then it was entered before. */
int pc_await_chunk(pc_collective *call, int rank, uint64_t index, uint64_t chunk,
                   const struct pc_slot *slot) {
    struct pc_slot *theirs;
    if (index == 0 && slot != NULL) {
        if (pc_await_entry(call, rank, &theirs) < 0)
            return -1;
        if (*pc_has_first_chunk(theirs))
            return 0;
    }
    return pc_wait(&call->call, &pc_progress_of(call->comm, rank)->produced, chunk + 1, rank);
}

int pc_await_consumed(pc_collective *call, uint64_t needed) {
    pc_comm *comm = call->comm;
    for (int rank = 0; rank < comm->size; rank++)
        if (rank != comm->rank &&
            pc_wait(&call->call, &pc_progress_of(comm, rank)->consumed, needed, rank) < 0)
            return -1;
    comm->consumed_by_all = needed;
    return 0;
}

static int put(pc_collective *call, uint64_t chunk, size_t offset, size_t length) {
    pc_comm *comm = call->comm;
    if (pc_await_big_slot(call, chunk) < 0)
        return -1;
    give(call, pc_big_slot_of(comm, comm->rank, chunk), offset, length);
    pc_publish(&pc_progress_of(comm, comm->rank)->produced, chunk + 1);
    return 0;
}

/* `slot` was begun: it is ended when the first chunk is there. NULL: the call was entered
   before. */
int pc_stream(pc_collective *call, struct pc_slot *slot) {
    pc_comm *comm = call->comm;
    size_t unit =
        comm->chunk_nbytes / (pc_is_split(call->kind) ? (size_t)comm->size : 1) / PC_LINE * PC_LINE;
    uint64_t base = comm->chunk, chunks = (call->nbytes + unit - 1) / unit;
    pc_flag64 *consumed = &pc_progress_of(comm, comm->rank)->consumed;
    bool giver = gives(call, comm->rank), taker = takes(call);
    const unsigned char *from[comm->size];
    memset(from, 0, sizeof from);
    comm->chunk += chunks;
    pc_release(&call->call);
    if (!taker) {
        pc_publish(consumed, base + chunks);
        if (call->kind == PC_SCAN) /* the first rank's result is its own */
            take(call, from, 0, call->nbytes);
    }
    if (giver && put(call, base, 0, call->nbytes < unit ? call->nbytes : unit) < 0)
        return -1;
    if (slot != NULL) {
        pc_place_set(&slot->place, call->number, 0, 0, false);
        *pc_has_first_chunk(slot) = true;
        pc_enter_end(call, slot);
    } else {
        pc_wake_others(comm);
    }
    for (uint64_t index = 0; index < chunks; index++) {
        size_t offset = index * unit, rest = call->nbytes - offset,
               length = rest < unit ? rest : unit;
        if (giver && index + 1 < chunks) {
            size_t after = rest - length;
            if (put(call, base + index + 1, offset + unit, after < unit ? after : unit) < 0)
                return -1;
            pc_wake_others(comm);
        }
        if (!taker)
            continue;
        for (int rank = 0; rank < comm->size; rank++) {
            from[rank] = NULL;
            if (!takes_from(call, rank))
                continue;
            if (pc_await_chunk(call, rank, index, base + index, slot) < 0)
                return -1;
            from[rank] = pc_big_slot_of(comm, rank, base + index);
        }
        if (takes_from_all(call)) /* they put it there with the last but one consumed */
            comm->consumed_by_all = base + index - (index > 0);
        pc_release(&call->call);
        take(call, from, offset, length);
        pc_publish(consumed, base + index + 1);
        pc_wake_others(comm);
    }
    if (takes_from_all(call) && slot != NULL)
        comm->entered_by_all = call->number;
    return 0;
}

/* --- which way -------------------------------------------------------------------------------- */

/* A large all_reduce is so many calls, one after the other, on every rank: between them `hook` may
   wait until the next piece of `x` is here, and do something with the pieces of `out` that are
   done. */
static int all_reduce_in_pieces(pc_collective *call, bool direct) {
    pc_comm *comm = call->comm;
    struct pc_slot *slot;
    const unsigned char *x = call->x;
    unsigned char *out = call->out;
    size_t nbytes = call->nbytes;
    bool entered = false;
    if (pc_may_work_together(call)) {
        if (pc_enter_begin(call, &slot) < 0)
            return -1;
        int done = pc_work_together(call, slot);
        if (done != 0)
            return done < 0 ? -1 : 0;
        entered = true;
    }
    for (size_t offset = 0; offset < nbytes; offset += PC_PIECE_NBYTES) {
        if (call->hook != NULL && call->pass(call, offset) < 0)
            return -1;
        call->x = x + offset;
        call->out = out + offset;
        call->nbytes = nbytes - offset < PC_PIECE_NBYTES ? nbytes - offset : PC_PIECE_NBYTES;
        comm->internal += offset > 0;
        if (!entered && pc_enter_begin(call, &slot) < 0)
            return -1;
        slot = entered ? NULL : slot;
        entered = false;
        if ((direct ? pc_direct(call, slot) : pc_all_reduce_stream(call, slot)) < 0)
            return -1;
    }
    return 0;
}

/* A short all_reduce by parts: instead of all that the others give, each rank reads its part of
   that and the parts of the result. It waits for the others once more, so there must be much to
   read; and if ranks share cores, one wait more is a change of ranks more. */
static bool is_by_parts(const pc_collective *call) {
    return call->kind == PC_ALL_REDUCE && call->comm->host->spins > 0 &&
           call->nbytes * (size_t)call->comm->size >= PC_PARTS_FROM;
}

static bool is_in_pieces(const pc_collective *call) {
    return call->kind == PC_ALL_REDUCE && call->nbytes > PC_PIECE_NBYTES;
}

static bool is_worth_asking(const pc_collective *call) {
    return call->nbytes >= (call->may_use_gpus ? PC_ASK_NBYTES : PC_CUDA_IPC_NBYTES);
}

/* A rank whose array is on a GPU would rather have it stay there: in a collective that moves one
   with a hook, which goes by messages then, in a reduction one that says so. All decide alike:
   PC_BY_MESSAGES, if all would and the value is large; 0: the hook has brought this rank's to where
   the core finds it, or will, piece by piece. */
static int offers(pc_collective *call) {
    pc_comm *comm = call->comm;
    bool brings = call->hook != NULL && !is_in_pieces(call);
    char mine = call->may_use_gpus ? call->wants_gpus : call->hook != NULL, all[comm->size];
    if (!is_worth_asking(call))
        return brings ? call->pass(call, 0) : 0;
    pc_collective vote = pc_part_of(call);
    vote.kind = PC_ALL_GATHER;
    vote.x = &mine;
    vote.out = all;
    vote.nbytes = 1;
    if (pc_exchange_run(&vote) < 0)
        return -1;
    pc_part_end(&vote);
    call->call = vote.call;
    if (memchr(all, 0, (size_t)comm->size) == NULL)
        return PC_BY_MESSAGES;
    return brings ? call->pass(call, 0) : 0;
}

static int run_large(pc_collective *call, bool direct) {
    struct pc_slot *slot;
    if (PC_UNLIKELY(is_in_pieces(call)))
        return all_reduce_in_pieces(call, direct);
    if (pc_enter_begin(call, &slot) < 0)
        return -1;
    if (pc_may_work_together(call)) {
        int done = pc_work_together(call, slot);
        if (done != 0)
            return done < 0 ? -1 : 0;
        slot = NULL;
    }
    if (direct)
        return pc_direct(call, slot);
    return call->kind == PC_ALL_REDUCE ? pc_all_reduce_stream(call, slot) : pc_stream(call, slot);
}

int pc_exchange_run(pc_collective *call) {
    struct pc_slot *slot;
    bool asks = call->may_use_gpus || call->kind == PC_GATHER || call->kind == PC_ALL_GATHER ||
                call->kind == PC_ALL_TO_ALL;
    if (PC_UNLIKELY(asks && (is_worth_asking(call) || call->hook != NULL))) {
        int status = offers(call);
        if (status != 0)
            return status;
    }
    if (pc_given_nbytes(call, call->nbytes) <= sizeof slot->data && !is_by_parts(call))
        return pc_enter_begin(call, &slot) < 0 ? -1 : exchange(call, slot);
    pc_deadline_start(call->call.deadline);
    int direct = pc_choose(call);
    if (direct < 0 || run_large(call, direct) < 0)
        return -1;
    return pc_chosen(call);
}

static bool fits_behind_header(const pc_collective *call, uint32_t description_nbytes,
                               size_t nbytes) {
    return pc_value_offset(description_nbytes) + pc_given_nbytes(call, nbytes) <=
           sizeof(((struct pc_slot *)0)->data);
}

int pc_announce(pc_collective *call, const struct pc_header *header, const void *description) {
    struct pc_slot *slot;
    struct pc_header said = *header;
    bool small = fits_behind_header(call, header->description_nbytes, call->nbytes);
    if (!small)
        pc_deadline_start(call->call.deadline);
    int direct = small || header->form == PC_OTHER_WAY ? 0 : pc_choose(call);
    if (direct < 0 || pc_enter_begin(call, &slot) < 0)
        return -1;
    bool together = !small && header->form != PC_OTHER_WAY && pc_is_open(call, header->address);
    if (direct && !pc_can_be_read(call->x, pc_given_nbytes(call, call->nbytes)))
        direct = said.address = 0; /* all stream */
    memcpy(slot->data, &said, sizeof said);
    memcpy(slot->data + sizeof said, description, header->description_nbytes);
    if (header->form == PC_OTHER_WAY) {
        pc_enter_end(call, slot);
        for (int rank = 0; rank < call->comm->size; rank++) /* who made another call is not found
                                                               out by messages */
            if (rank != call->comm->rank && pc_await_entry(call, rank, &slot) < 0)
                return -1;
        return 0;
    }
    if (small)
        give(call, slot->data + pc_value_offset(header->description_nbytes), 0, call->nbytes);
    pc_enter_end(call, slot);
    if (call->kind == PC_SCATTER && call->out != NULL) {
        const unsigned char *own =
            (const unsigned char *)call->x + (size_t)call->root * call->nbytes;
        if (own != call->out)
            pc_copy(call->out, own, call->nbytes);
    }
    if (small)
        return 0;
    if ((together ? pc_serve_together(call)
         : direct ? pc_direct_serve(call)
                  : pc_stream(call, NULL)) < 0)
        return -1;
    return pc_chosen(call);
}

int pc_hear(pc_collective *call, struct pc_slot **slot) {
    struct pc_slot *own;
    call->entered = PC_UNLIKELY(call->comm->trials > 0) ? pc_now_ns() : 0;
    if (pc_enter_begin(call, &own) < 0)
        return -1;
    pc_enter_end(call, own);
    return pc_await_entry(call, call->root, slot);
}

int pc_receive(pc_collective *call, struct pc_slot *slot) {
    struct pc_header header;
    memcpy(&header, slot->data, sizeof header);
    call->nbytes = header.nbytes;
    if (!fits_behind_header(call, header.description_nbytes, header.nbytes)) {
        pc_deadline_start(call->call.deadline);
        int direct = pc_choose(call);
        if (direct < 0)
            return -1;
        if (header.address == 0)
            direct = 0;
        if ((pc_is_open(call, header.address) ? pc_receive_together(call, header.address)
             : direct                         ? pc_direct_receive(call, header.address, false)
                                              : pc_stream(call, NULL)) < 0)
            return -1;
        return pc_chosen(call);
    }
    const unsigned char *from[call->comm->size];
    from[call->root] = slot->data + pc_value_offset(header.description_nbytes);
    if (call->nbytes > 0)
        take(call, from, 0, call->nbytes);
    return 0;
}
