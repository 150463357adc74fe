#include "comm.h"
#include "base/copy.h"

#include <errno.h>
#include <unistd.h>

/* Shorter values are not worth two asking each other. */
#ifndef PC_HELP_FROM
#define PC_HELP_FROM ((size_t)256 << 10)
#endif
#ifndef PC_HELP_PIECE
#define PC_HELP_PIECE pc_piece_nbytes
#endif

/* Bytes read at a time when they are to be reduced: small enough to stay in the cache. */
#define PIECE ((size_t)512 << 10)

/* A process that cannot be read any more has ended, or nearly so: Python will hear of it. */
static PC_COLD int cannot_read(pc_collective *call, int rank, int error) {
    for (int tries = 0; tries < 30; tries++) {
        pc_hold(&call->call);
        int verdict = call->call.up->sleep(&call->call, rank, 0, tries > 10);
        if (verdict < 0)
            return -1;
    }
    errno = error;
    PyErr_SetFromErrno(PyExc_OSError);
    return -1;
}

/* `whole`: bytes of the value of which this is a part. */
static int read_from(pc_collective *call, int rank, void *to, uint64_t address, size_t nbytes,
                     size_t whole) {
    const void *here = pc_here(call->comm->host, call->comm->local[rank], address, nbytes);
    if (here != NULL) {
        pc_copy_shared(to, here, nbytes, whole);
        return 0;
    }
    struct iovec theirs = {(void *)(uintptr_t)address, nbytes};
    int error = pc_copy_from(call->comm->pids[rank], (struct pc_parts){&theirs, 1}, 0, to, nbytes);
    return error == 0 ? 0 : cannot_read(call, rank, error);
}

void pc_reach(pc_collective *call, uint64_t step) {
    pc_comm *comm = call->comm;
    pc_publish(&pc_progress_of(comm, comm->rank)->phase, 2 * call->number + step);
    pc_wake_others(comm);
}

static int await_phase(pc_collective *call, int rank, uint64_t step) {
    return pc_wait(&call->call, &pc_progress_of(call->comm, rank)->phase, 2 * call->number + step,
                   rank);
}

/* What a device maps into this process (page-locked memory of some drivers, say) is not read for
   others. */
bool pc_can_be_read(const void *array, size_t nbytes) {
    if (pc_arena_has(array, nbytes))
        return true;
    unsigned char read[2];
    struct iovec ours = {read, 2}, ends[2] = {{(void *)(uintptr_t)array, 1},
                                              {(char *)(uintptr_t)array + nbytes - 1, 1}};
    return pc_copy_from(getpid(), (struct pc_parts){ends, 2}, 0, ours.iov_base, 2) == 0;
}

/* Whether others can write to it. */
static bool can_be_written(void *array, size_t nbytes) {
    if (pc_arena_has(array, nbytes))
        return true;
    unsigned char *bytes = array;
    size_t ends[] = {0, nbytes - 1};
    for (int end = 0; end < 2; end++) {
        struct iovec same = {bytes + ends[end], 1};
        if (pc_copy_to(getpid(), (uintptr_t)same.iov_base, (struct pc_parts){&same, 1}, 0, 1) != 0)
            return false;
    }
    return true;
}

static int stream_instead(pc_collective *call) {
    return call->kind == PC_ALL_REDUCE ? pc_all_reduce_stream(call, NULL) : pc_stream(call, NULL);
}

/* --- helping ---------------------------------------------------------------------------------- */

/* The root of a broadcast or scatter, and the others in a gather, would only wait while their
   arrays are read. So they write, too: pieces of what moves between two ranks are claimed
   (transfer.h). The claims lie in the place of the rank that has no part in the others' work: that
   receives from the root, or sends to it. In a gather the root allows it, for it may find that all
   are to stream. With more ranks than cores the root of the others is no help, for those who read
   need the core; that of a gather reads alone, and leaves cores to those who write. */

#define NOT_ALLOWED 1 /* in place of an address */

/* All ranks know alike. */
static bool may_help(const pc_collective *call) {
    return call->nbytes >= PC_HELP_FROM &&
           (call->comm->host->spins != 0 || call->kind == PC_GATHER);
}

static uint64_t pieces_of(const pc_collective *call) {
    size_t piece = PC_HELP_PIECE(call->nbytes);
    return (call->nbytes + piece - 1) / piece;
}
static size_t piece_begin(const pc_collective *call, int64_t piece) {
    return (size_t)piece * PC_HELP_PIECE(call->nbytes);
}
static size_t length_of(const pc_collective *call, int64_t piece) {
    size_t most = PC_HELP_PIECE(call->nbytes), rest = call->nbytes - piece_begin(call, piece);
    return rest < most ? rest : most;
}

static int read_piece(pc_collective *call, int rank, unsigned char *to, uint64_t address,
                      int64_t piece) {
    size_t begin = piece_begin(call, piece);
    return read_from(call, rank, to + begin, address + begin, length_of(call, piece), call->nbytes);
}

/* Read pieces until all are claimed. */
static int read_pieces(pc_collective *call, struct pc_transfer *work, int rank, unsigned char *to,
                       uint64_t address) {
    int64_t piece;
    int status = 0;
    pc_work_begin(call);
    while (status == 0 && (piece = pc_transfer_claim(work, pieces_of(call))) >= 0) {
        status = read_piece(call, rank, to, address, piece);
        pc_transfer_copied(work);
    }
    pc_work_end(call);
    return status;
}

/* Wait for the pieces that `rank` has claimed, and read the one that it could not write. */
static int await_pieces(pc_collective *call, struct pc_transfer *work, int rank, unsigned char *to,
                        uint64_t address) {
    if (pc_wait(&call->call, &work->done, pieces_of(call), rank) < 0)
        return -1;
    pc_release(&call->call);
    int64_t returned = pc_transfer_returned(work);
    return returned < 0 ? 0 : read_piece(call, rank, to, address, returned);
}

/* Write pieces into the memory of `rank` until all are claimed, or one cannot be written. */
static void write_pieces(pc_collective *call, struct pc_transfer *work, int rank,
                         const unsigned char *from, uint64_t address) {
    pc_comm *comm = call->comm;
    uint64_t pieces = pieces_of(call);
    int64_t piece;
    pc_work_begin(call);
    while ((piece = pc_transfer_claim(work, pieces)) >= 0) {
        size_t begin = piece_begin(call, piece), length = length_of(call, piece);
        struct iovec ours = {(void *)(from + begin), length};
        if (pc_copy_to(comm->pids[rank], address + begin, (struct pc_parts){&ours, 1}, 0,
                       length) != 0) {
            pc_transfer_return(work, piece);
            atomic_fetch_add(&work->done, pieces); /* it waits no more */
            piece = -1;
        } else {
            pc_transfer_copied(work);
        }
        pc_host_wake(comm->host, comm->local[rank]);
        if (piece < 0)
            break;
    }
    pc_work_end(call);
}

/* Elsewhere than at the root of a gather: help it, if it allows that. */
static int help_root(pc_collective *call) {
    pc_comm *comm = call->comm;
    struct pc_transfer *work = &pc_place_of(comm, comm->rank, call->number)->work;
    if (pc_wait(&call->call, &work->into, NOT_ALLOWED, call->root) < 0)
        return -1;
    uint64_t into = pc_load(&work->into);
    if (into == NOT_ALLOWED)
        return 0;
    call->placed = true;
    pc_release(&call->call);
    write_pieces(call, work, call->root, call->x, into);
    return 0;
}

/* The root of a gather: whether the others may help. */
static void allow_help(pc_collective *call, bool allowed) {
    pc_comm *comm = call->comm;
    unsigned char *out = call->out;
    for (int rank = 0; rank < comm->size; rank++)
        if (rank != comm->rank)
            pc_publish(&pc_place_of(comm, rank, call->number)->work.into,
                       allowed ? (uintptr_t)out + (size_t)rank * call->nbytes : NOT_ALLOWED);
    pc_wake_others(comm);
}

/* The root of a gather that is helped: read the blocks at `xs`. */
static int gather_helped(pc_collective *call, const uint64_t *xs) {
    pc_comm *comm = call->comm;
    size_t nbytes = call->nbytes;
    unsigned char *out = call->out;
    call->placed = true;
    for (int pass = 0; pass < 2; pass++)
        for (int step = 1; step < comm->size; step++) {
            int rank = (comm->rank + step) % comm->size;
            struct pc_transfer *work = &pc_place_of(comm, rank, call->number)->work;
            if ((pass == 0 ? read_pieces : await_pieces)(call, work, rank,
                                                         out + (size_t)rank * nbytes, xs[rank]) < 0)
                return -1;
        }
    return 0;
}

/* --- the ways --------------------------------------------------------------------------------- */

/* Elsewhere than at the root of a gather or reduce: wait until it has read, or has said that all
   are to stream. */
static int await_root(pc_collective *call) {
    if (call->kind == PC_GATHER && may_help(call) && help_root(call) < 0)
        return -1;
    if (await_phase(call, call->root, 1) < 0)
        return -1;
    if (pc_load(&pc_progress_of(call->comm, call->root)->phase) == 2 * call->number + 1)
        return stream_instead(call);
    return 0;
}

/* Whoever has given up may have changed its arrays while they were read here. Python hears, or has
   heard, of that: wait for it. */
int pc_check_given_up(pc_collective *call) {
    atomic_thread_fence(memory_order_seq_cst);
    for (int rank = 0; rank < call->comm->size; rank++) {
        pc_flag64 *given_up = &pc_progress_of(call->comm, rank)->given_up;
        if (PC_UNLIKELY(pc_load(given_up) != 0))
            return pc_wait(&call->call, given_up, 2, rank);
    }
    return 0;
}

/* An array must stay until all have read what they need of it. */
static int await_all(pc_collective *call) {
    for (int rank = 0; rank < call->comm->size; rank++)
        if (rank != call->comm->rank && await_phase(call, rank, 2) < 0)
            return -1;
    return 0;
}

/* Reduce bytes [begin, end) of all ranks' arrays, at `theirs` in each, into `out`. */
static int reduce_range(pc_collective *call, const uint64_t *theirs, size_t begin, size_t end,
                        unsigned char *out) {
    pc_comm *comm = call->comm;
    size_t size = (size_t)comm->size, piece = PIECE;
    while (piece > 16 << 10 && piece * (size - 1) > (size_t)512 << 10)
        piece /= 2;
    unsigned char *scratch = pc_scratch(comm, piece * size);
    if (scratch == NULL) {
        pc_hold(&call->call);
        PyErr_NoMemory();
        return -1;
    }
    pc_reduce_fn reduce = pc_reduce_find(call->op, call->dtype);
    const void *inputs[size];
    for (size_t offset = begin; offset < end; offset += piece) {
        size_t length = end - offset < piece ? end - offset : piece;
        for (size_t rank = 0; rank < size; rank++) {
            if ((int)rank == comm->rank) {
                inputs[rank] = (const void *)(uintptr_t)(theirs[rank] + offset);
                continue;
            }
            inputs[rank] = scratch + rank * piece;
            if (read_from(call, (int)rank, scratch + rank * piece, theirs[rank] + offset, length,
                          0) < 0)
                return -1;
        }
        reduce(out + (offset - begin), inputs, comm->size, length / pc_itemsize(call->dtype),
               comm->size);
    }
    return 0;
}

static int all_reduce(pc_collective *call, const uint64_t *xs, const uint64_t *outs) {
    pc_comm *comm = call->comm;
    size_t size = (size_t)comm->size, lines = (call->nbytes + PC_PAGE - 1) / PC_PAGE;
    size_t bounds[size + 1];
    for (size_t rank = 0; rank <= size; rank++) {
        size_t bound = lines * rank / size * PC_PAGE;
        bounds[rank] = bound < call->nbytes ? bound : call->nbytes;
    }
    unsigned char *out = call->out;
    size_t begin = bounds[comm->rank], end = bounds[comm->rank + 1];
    if (reduce_range(call, xs, begin, end, out + begin) < 0)
        return -1;
    pc_reach(call, 1);
    for (size_t step = 1; step < size; step++) {
        size_t rank = ((size_t)comm->rank + step) % size;
        if (await_phase(call, (int)rank, 1) < 0)
            return -1;
        pc_release(&call->call);
        begin = bounds[rank];
        if (read_from(call, (int)rank, out + begin, outs[rank] + begin, bounds[rank + 1] - begin,
                      call->nbytes) < 0)
            return -1;
    }
    return 0;
}

int pc_direct(pc_collective *call, struct pc_slot *slot) {
    pc_comm *comm = call->comm;
    size_t size = (size_t)comm->size, me = (size_t)comm->rank, nbytes = call->nbytes;
    const unsigned char *x = call->x;
    unsigned char *out = call->out;
    uint64_t xs[size], outs[size];
    struct pc_place *own = pc_place_of(comm, comm->rank, call->number);
    if (slot != NULL) {
        bool shown = pc_can_be_read(x, pc_given_nbytes(call, nbytes)) &&
                     (call->kind != PC_ALL_REDUCE || pc_can_be_read(out, nbytes));
        pc_place_set(own, call->number, shown ? (uintptr_t)x : 0, (uintptr_t)out, false);
        *pc_has_first_chunk(slot) = false;
        pc_enter_end(call, slot);
    }
    bool readable = own->x != 0;
    bool to_root = call->kind == PC_GATHER || call->kind == PC_REDUCE;
    if (to_root && comm->rank != call->root)
        return await_root(call);
    pc_release(&call->call);
    if (call->kind == PC_ALL_GATHER && out + me * nbytes != x)
        pc_copy(out + me * nbytes, x, nbytes);
    if (call->kind == PC_ALL_TO_ALL)
        pc_copy(out + me * nbytes, x + me * nbytes, nbytes);
    for (size_t rank = 0; rank < size; rank++) {
        struct pc_slot *theirs;
        const struct pc_place *place = own;
        if (rank != me) {
            if (pc_await_entry(call, (int)rank, &theirs) < 0)
                return -1;
            place = &theirs->place;
        }
        readable = readable && place->x != 0;
        xs[rank] = place->x;
        outs[rank] = place->out;
    }
    comm->entered_by_all = call->number;
    bool may = call->kind == PC_GATHER && may_help(call);
    bool is_helped = may && readable && can_be_written(out, nbytes * size);
    if (may)
        allow_help(call, is_helped);
    if (PC_UNLIKELY(!readable)) {
        if (to_root)
            pc_reach(call, 1);
        return stream_instead(call);
    }
    pc_release(&call->call);
    if (call->kind == PC_GATHER && out + me * nbytes != x) /* while others help */
        pc_copy(out + me * nbytes, x, nbytes);
    int status = 0;
    if (call->kind == PC_ALL_REDUCE) {
        status = all_reduce(call, xs, outs);
    } else if (is_helped) {
        status = gather_helped(call, xs);
    } else if (call->kind == PC_REDUCE) {
        status = reduce_range(call, xs, 0, nbytes, out);
    } else if (call->kind == PC_REDUCE_SCATTER) {
        for (size_t rank = 0; rank < size; rank++)
            xs[rank] += pc_block_begin(call, comm->rank);
        status = reduce_range(call, xs, 0, pc_block_nbytes(call, comm->rank), out);
    } else {
        for (size_t step = 1; status == 0 && step < size; step++) {
            size_t rank = (me + step) % size;
            uint64_t address = xs[rank] + (call->kind == PC_ALL_TO_ALL ? me * nbytes : 0);
            status = read_from(call, (int)rank, out + rank * nbytes, address, nbytes, nbytes);
        }
    }
    if (status < 0 || pc_check_given_up(call) < 0)
        return -1;
    pc_reach(call, 2);
    return to_root ? 0 : await_all(call);
}

int pc_direct_receive(pc_collective *call, uint64_t address, bool together) {
    pc_comm *comm = call->comm;
    struct pc_place *place = pc_place_of(comm, comm->rank, call->number);
    unsigned char *out = call->out;
    bool is_helped = !together && may_help(call) && can_be_written(out, call->nbytes);
    if (call->kind == PC_SCATTER)
        address += (uint64_t)comm->rank * call->nbytes;
    if (together || may_help(call)) { /* the root waits for this */
        pc_place_set(place, call->number, 0, is_helped ? (uintptr_t)out : 0, false);
        call->placed = is_helped;
        pc_host_wake(comm->host, comm->local[call->root]);
    }
    if (is_helped && pc_check_given_up(call) < 0)
        return -1;
    pc_release(&call->call);
    if (!is_helped) {
        if (read_from(call, call->root, out, address, call->nbytes, call->nbytes) < 0)
            return -1;
    } else if (read_pieces(call, &place->work, call->root, out, address) < 0 ||
               await_pieces(call, &place->work, call->root, out, address) < 0) {
        return -1;
    }
    if (pc_check_given_up(call) < 0)
        return -1;
    pc_reach(call, 2);
    return 0;
}

int pc_await_readers(pc_collective *call) { return await_all(call); }

int pc_direct_serve(pc_collective *call) {
    pc_comm *comm = call->comm;
    const unsigned char *from = call->x;
    if (!may_help(call))
        return await_all(call);
    pc_place_set(pc_place_of(comm, comm->rank, call->number), call->number, 0, 0, false);
    call->placed = true;
    for (int step = 1; step < comm->size; step++) {
        int rank = (comm->rank + step) % comm->size;
        struct pc_place *place = pc_place_of(comm, rank, call->number);
        if (pc_wait(&call->call, &place->number, call->number, rank) < 0)
            return -1;
        if (place->out == 0)
            continue;
        pc_release(&call->call);
        write_pieces(call, &place->work, rank,
                     from + (call->kind == PC_SCATTER ? (size_t)rank * call->nbytes : 0),
                     place->out);
    }
    return await_all(call);
}

/* --- pieces of which the ranks have told each other ------------------------------------------- */

int pc_direct_fetch(pc_collective *call, const struct pc_piece *pieces, size_t count) {
    pc_comm *comm = call->comm;
    struct pc_slot *slot;
    pc_deadline_start(call->call.deadline);
    if (pc_enter_begin(call, &slot) < 0)
        return -1;
    pc_enter_end(call, slot);
    for (int rank = 0; rank < comm->size; rank++)
        if (rank != comm->rank && pc_await_entry(call, rank, &slot) < 0)
            return -1;
    comm->entered_by_all = call->number;
    pc_release(&call->call);
    for (size_t index = 0; index < count; index++) {
        const struct pc_piece *piece = &pieces[index];
        if (read_from(call, piece->rank, piece->into, piece->address, piece->nbytes,
                      piece->nbytes) < 0)
            return -1;
    }
    if (pc_check_given_up(call) < 0)
        return -1;
    pc_reach(call, 2);
    return await_all(call);
}
