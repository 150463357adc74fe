#include "comm.h"
#include "base/copy.h"

/* Every chunk is cut in parts, one a rank. A rank copies the others' parts of its chunk into its
   big slot, reduces its own part of all ranks' chunks, and copies the other parts of the result out
   of their slots:

       rank 0's slot   [ .... | x0 for 1 ]        rank 1's slot   [ x1 for 0 | .... ]
       after reducing  [ sum  | ........ ]                        [ ........ | sum  ]

   A rank's own part of its slot is unused until its result goes there, so nothing waits for it. */

struct parts {
    size_t begin, end;
};

/* Part `rank` of `length` bytes: whole cache lines, the last one shorter. */
static struct parts part_of(size_t length, int rank, int size) {
    size_t lines = (length + PC_LINE - 1) / PC_LINE;
    size_t begin = lines * (size_t)rank / (size_t)size * PC_LINE;
    size_t end = lines * ((size_t)rank + 1) / (size_t)size * PC_LINE;
    return (struct parts){begin < length ? begin : length, end < length ? end : length};
}

static int put(pc_collective *call, uint64_t chunk, size_t offset, size_t length) {
    pc_comm *comm = call->comm;
    if (pc_await_big_slot(call, chunk) < 0)
        return -1;
    unsigned char *slot = pc_big_slot_of(comm, comm->rank, chunk);
    const unsigned char *x = (const unsigned char *)call->x + offset;
    struct parts own = part_of(length, comm->rank, comm->size);
    pc_copy(slot, x, own.begin);
    pc_copy(slot + own.end, x + own.end, length - own.end);
    pc_publish(&pc_progress_of(comm, comm->rank)->produced, chunk + 1);
    return 0;
}

int pc_all_reduce_stream(pc_collective *call, struct pc_slot *slot) {
    pc_comm *comm = call->comm;
    struct pc_progress *mine = pc_progress_of(comm, comm->rank);
    pc_reduce_fn reduce = pc_reduce_find(call->op, call->dtype);
    size_t itemsize = pc_itemsize(call->dtype), unit = comm->chunk_nbytes;
    uint64_t base = comm->chunk, chunks = (call->nbytes + unit - 1) / unit;
    const void *inputs[comm->size];
    comm->chunk += chunks;
    pc_release(&call->call);
    if (put(call, base, 0, call->nbytes < unit ? call->nbytes : unit) < 0)
        return -1;
    if (slot != NULL) {
        pc_place_set(&slot->place, call->number, 0, 0, false);
        *pc_has_first_chunk(slot) = true;
        pc_enter_end(call, slot);
    } else {
        pc_wake_others(comm);
    }
    for (uint64_t index = 0; index < chunks; index++) {
        uint64_t chunk = base + index;
        size_t offset = index * unit, rest = call->nbytes - offset,
               length = rest < unit ? rest : unit;
        const unsigned char *x = (const unsigned char *)call->x + offset;
        unsigned char *out = (unsigned char *)call->out + offset;
        struct parts own = part_of(length, comm->rank, comm->size);
        for (int rank = 0; rank < comm->size; rank++) {
            inputs[rank] = pc_big_slot_of(comm, rank, chunk) + own.begin;
            if (rank == comm->rank) {
                inputs[rank] = x + own.begin;
                continue;
            }
            if (pc_await_chunk(call, rank, index, chunk, slot) < 0)
                return -1;
        }
        pc_release(&call->call);
        size_t count = (own.end - own.begin) / itemsize;
        unsigned char *result = pc_big_slot_of(comm, comm->rank, chunk) + own.begin;
        reduce(result, inputs, comm->size, count, comm->size);
        pc_publish(&mine->reduced, chunk + 1);
        pc_wake_others(comm);
        pc_copy_part(out + own.begin, result, own.end - own.begin, call->nbytes);
        if (index + 1 < chunks) {
            size_t after = rest - length;
            if (put(call, chunk + 1, offset + unit, after < unit ? after : unit) < 0)
                return -1;
            pc_wake_others(comm);
        }
        for (int step = 1; step < comm->size; step++) {
            int rank = (comm->rank + step) % comm->size;
            struct parts theirs = part_of(length, rank, comm->size);
            if (pc_wait(&call->call, &pc_progress_of(comm, rank)->reduced, chunk + 1, rank) < 0)
                return -1;
            pc_copy_part(out + theirs.begin, pc_big_slot_of(comm, rank, chunk) + theirs.begin,
                         theirs.end - theirs.begin, call->nbytes);
        }
        comm->consumed_by_all = chunk; /* before they reduced this one */
        pc_publish(&mine->consumed, chunk + 1);
        pc_wake_others(comm);
    }
    comm->entered_by_all = call->number;
    return 0;
}
