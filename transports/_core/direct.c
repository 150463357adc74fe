#include <errno.h>
#include <stdlib.h>
#include <sys/uio.h>

#include "comm.h"

/* Bytes of a unit from which on reading the other ranks' memory is quicker than copying through slots (0: never),
   where the cores of the ranks share a cache (near) and where they do not (far): then a line that another core
   has written comes slowly, and a copy less counts for more. Measured on a machine with
   two cores that has both kinds of day. */
struct limits {
    size_t near, far;
};
#define KiB ((size_t)1 << 10)
#define MiB ((size_t)1 << 20)
static struct limits direct_from[PC_KINDS] = {
    [PC_BROADCAST] = {12 * KiB, 12 * KiB},  [PC_ALL_REDUCE] = {12 * MiB, 64 * KiB},
    [PC_REDUCE] = {SIZE_MAX, 64 * KiB},
    [PC_GATHER] = {8 * MiB, 24 * KiB},      [PC_ALL_GATHER] = {12 * KiB, 12 * KiB},
    [PC_SCATTER] = {12 * KiB, 12 * KiB},    [PC_REDUCE_SCATTER] = {12 * KiB, 12 * KiB},
    [PC_ALL_TO_ALL] = {12 * KiB, 12 * KiB},
};

/* Bytes read at a time when they are to be reduced: small enough to stay in the cache. */
#define PIECE ((size_t)512 << 10)

struct addresses { /* in the slot of a direct call */
    uint64_t x, out;
};

bool pc_is_direct(const pc_collective *call) {
    const pc_comm *comm = call->comm;
    /* A gather streams while the givers have cores of their own. */
    bool far = comm->far || (call->kind == PC_GATHER && comm->host->spins == 0);
    size_t from = far ? direct_from[call->kind].far : direct_from[call->kind].near;
    return comm->direct && from != 0 && call->nbytes >= from;
}

/* set_direct_from(kind, nbytes): for measuring, near and far. */
PyObject *pc_set_direct_from(PyObject *module, PyObject *args) {
    int kind;
    Py_ssize_t nbytes;
    (void)module;
    if (!PyArg_ParseTuple(args, "in", &kind, &nbytes))
        return NULL;
    if (kind >= 0 && kind < PC_KINDS && direct_from[kind].near != 0)
        direct_from[kind] = (struct limits){(size_t)nbytes, (size_t)nbytes};
    Py_RETURN_NONE;
}

/* A process that cannot be read any more has ended, or nearly so: Python will hear of it. */
static PC_COLD int cannot_read(pc_collective *call, int rank, int error) {
    for (int tries = 0; tries < 30; tries++) {
        pc_hold(&call->call);
        int verdict = call->call.sleep(&call->call, rank, 0, tries > 10);
        if (verdict < 0)
            return -1;
    }
    errno = error;
    PyErr_SetFromErrno(PyExc_OSError);
    return -1;
}

static int read_from(pc_collective *call, int rank, void *to, uint64_t address, size_t nbytes) {
    unsigned char *into = to;
    while (nbytes > 0) {
        struct iovec local = {into, nbytes}, remote = {(void *)(uintptr_t)address, nbytes};
        ssize_t got = process_vm_readv(call->comm->pids[rank], &local, 1, &remote, 1, 0);
        if (got <= 0) {
            if (got < 0 && errno == EINTR)
                continue;
            return cannot_read(call, rank, got < 0 ? errno : EFAULT);
        }
        into += got;
        address += (uint64_t)got;
        nbytes -= (size_t)got;
    }
    return 0;
}

static void reach(pc_collective *call, uint64_t step) {
    pc_comm *comm = call->comm;
    pc_publish(&pc_progress_of(comm, comm->rank)->phase, 2 * call->number + step);
    pc_wake_others(comm);
}

static int await_phase(pc_collective *call, int rank, uint64_t step) {
    return pc_wait(&call->call, &pc_progress_of(call->comm, rank)->phase, 2 * call->number + step, rank);
}

/* Whoever has given up may have changed its arrays while they were read here. Python hears, or has heard, of
   that: wait for it. */
static int check_given_up(pc_collective *call) {
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
static int reduce_range(pc_collective *call, const uint64_t *theirs, size_t begin, size_t end, unsigned char *out) {
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
            if (read_from(call, (int)rank, scratch + rank * piece, theirs[rank] + offset, length) < 0)
                return -1;
        }
        reduce(out + (offset - begin), inputs, comm->size, length / pc_itemsize(call->dtype), comm->size);
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
    reach(call, 1);
    for (size_t step = 1; step < size; step++) {
        size_t rank = ((size_t)comm->rank + step) % size;
        if (await_phase(call, (int)rank, 1) < 0)
            return -1;
        pc_release(&call->call);
        begin = bounds[rank];
        if (read_from(call, (int)rank, out + begin, outs[rank] + begin, bounds[rank + 1] - begin) < 0)
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
    struct addresses own = {(uintptr_t)call->x, (uintptr_t)call->out};
    memcpy(slot->data, &own, sizeof own);
    pc_enter_end(call, slot);
    bool to_root = call->kind == PC_GATHER || call->kind == PC_REDUCE;
    if (to_root && comm->rank != call->root)
        return await_phase(call, call->root, 2);
    pc_release(&call->call);
    if ((call->kind == PC_GATHER || call->kind == PC_ALL_GATHER) && out + me * nbytes != x)
        memcpy(out + me * nbytes, x, nbytes);
    if (call->kind == PC_ALL_TO_ALL)
        memcpy(out + me * nbytes, x + me * nbytes, nbytes);
    for (size_t rank = 0; rank < size; rank++) {
        struct pc_slot *theirs;
        struct addresses given = own;
        if (rank != me) {
            if (pc_await_entry(call, (int)rank, &theirs) < 0)
                return -1;
            memcpy(&given, theirs->data, sizeof given);
        }
        xs[rank] = given.x;
        outs[rank] = given.out;
    }
    comm->entered_by_all = call->number;
    pc_release(&call->call);
    int status = 0;
    if (call->kind == PC_ALL_REDUCE) {
        status = all_reduce(call, xs, outs);
    } else if (call->kind == PC_REDUCE) {
        status = reduce_range(call, xs, 0, nbytes, out);
    } else if (call->kind == PC_REDUCE_SCATTER) {
        for (size_t rank = 0; rank < size; rank++)
            xs[rank] += me * nbytes;
        status = reduce_range(call, xs, 0, nbytes, out);
    } else {
        for (size_t step = 1; status == 0 && step < size; step++) {
            size_t rank = (me + step) % size;
            uint64_t address = xs[rank] + (call->kind == PC_ALL_TO_ALL ? me * nbytes : 0);
            status = read_from(call, (int)rank, out + rank * nbytes, address, nbytes);
        }
    }
    if (status < 0 || check_given_up(call) < 0)
        return -1;
    reach(call, 2);
    return to_root ? 0 : await_all(call);
}

int pc_direct_receive(pc_collective *call, uint64_t address) {
    pc_release(&call->call);
    if (call->kind == PC_SCATTER)
        address += (uint64_t)call->comm->rank * call->nbytes;
    if (read_from(call, call->root, call->out, address, call->nbytes) < 0 || check_given_up(call) < 0)
        return -1;
    reach(call, 2);
    return 0;
}

int pc_direct_serve(pc_collective *call) { return await_all(call); }

/* --- pieces of which the ranks have told each other ---------------------------------------------------- */

int pc_fetch(pc_collective *call, const struct pc_piece *pieces, size_t count) {
    pc_comm *comm = call->comm;
    struct pc_slot *slot;
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
        if (read_from(call, piece->rank, piece->into, piece->address, piece->nbytes) < 0)
            return -1;
    }
    if (check_given_up(call) < 0)
        return -1;
    reach(call, 2);
    return await_all(call);
}

/* --- near or far --------------------------------------------------------------------------------------- */

#define TRIAL_NBYTES (128 * KiB)
#define TRIALS 6

static int trial(pc_collective *call, bool direct, uint64_t *took_ns) {
    struct pc_slot *slot;
    uint64_t started = pc_now_ns();
    call->comm->internal++;
    if (pc_enter_begin(call, &slot) < 0 || (direct ? pc_direct(call, slot) : pc_all_reduce_stream(call, slot)) < 0)
        return -1;
    uint64_t took = pc_now_ns() - started;
    if (took < *took_ns)
        *took_ns = took;
    return 0;
}

/* Both ways give the same bits, so the time it takes may decide, if all ranks decide alike: each tells the
   others its best times, and the sums are compared. */
int pc_measure(pc_collective *call) {
    pc_comm *comm = call->comm;
    pc_collective probe = *call;
    probe.kind = PC_ALL_REDUCE;
    probe.root = 0;
    uint64_t best[2] = {UINT64_MAX, UINT64_MAX}, sum[2], bests[2 * comm->size];
    comm->measured = true;
    if (!comm->direct)
        return 0;
    unsigned char *memory = calloc(2, TRIAL_NBYTES);
    if (memory == NULL) {
        pc_hold(&call->call);
        PyErr_NoMemory();
        return -1;
    }
    probe.x = memory;
    probe.out = memory + TRIAL_NBYTES;
    probe.nbytes = TRIAL_NBYTES;
    probe.op = PC_SUM;
    probe.dtype = 12;
    pc_sign(&probe, TRIAL_NBYTES, 0, NULL);
    int status = 0;
    for (int index = 0; status == 0 && index < 2 * TRIALS; index++)
        status = trial(&probe, index % 2 == 1, &best[index % 2]);
    probe.kind = PC_ALL_GATHER;
    probe.x = best;
    probe.out = bests;
    probe.nbytes = sizeof best;
    comm->internal++;
    if (status == 0)
        status = pc_run(&probe);
    call->call = probe.call;
    free(memory);
    sum[0] = sum[1] = 0;
    for (int index = 0; status == 0 && index < 2 * comm->size; index++)
        sum[index % 2] += bests[index];
    comm->far = sum[1] < sum[0];
    return status;
}
