/* The native collectives under ThreadSanitizer: ranks as threads of one program over one mapping.

       native_tsan OPERATIONS SEED
       native_tsan counts KIND NBYTES SPINS DIRECT    what each rank does; see benchmarks/counts

   The core's files run as they are: each rank has a pc_host and a pc_comm of its own, and only what
   they call in Python is played by native_python.c and native_sleep.c. A communicator makes a
   random sequence of calls, the same on all ranks, with delays that are not; then comes another
   one, of another size, with chunks of another size. Every result is compared, byte by byte, with
   what it must be.

   Ranks have arrays in ordinary memory and in an arena, which is one for all, since all is one
   process here: each takes for each call the one or the other.

   The arrays are used again by the next call, as they may be. What is compared is copied out first:
   to ThreadSanitizer a copy is one access, and comparing the copies is none. */
#include "native.h"

#include <pthread.h>
#include <stdio.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#define CALLS_A_COMM 2000
#ifndef MAX_GIVEN
#define MAX_GIVEN ((size_t)32 << 10) /* bytes that a rank gives at most */
#endif
#define MAX_NBYTES (MAX_GIVEN * MAX_RANKS)
#define SLOT_NBYTES sizeof(((struct pc_slot *)0)->data)
#define UNSEEN __attribute__((no_sanitize_thread))

/* --- operators: a sum, and one that shows the order ------------------------------------------- */

enum { OP_SUM, OP_ORDER, OPS };
enum { U32, U64, DTYPES };

size_t pc_itemsize(int dtype) { return dtype == U32 ? 4 : 8; }

static uint64_t combine(int op, uint64_t left, uint64_t right) {
    return op == OP_SUM ? left + right : left * 3 + right;
}

UNSEEN static void combine_block(int op, int dtype, unsigned char *left, const unsigned char *right,
                                 size_t nbytes) {
    if (dtype == U32)
        for (size_t at = 0; at < nbytes; at += 4) {
            uint32_t a, b;
            memcpy(&a, left + at, 4);
            memcpy(&b, right + at, 4);
            a = (uint32_t)combine(op, a, b);
            memcpy(left + at, &a, 4);
        }
    else
        for (size_t at = 0; at < nbytes; at += 8) {
            uint64_t a, b;
            memcpy(&a, left + at, 8);
            memcpy(&b, right + at, 8);
            a = combine(op, a, b);
            memcpy(left + at, &a, 8);
        }
}

static _Thread_local uint64_t native_reduced; /* bytes that were read for it */

static void reduce(int op, int dtype, void *out, const void *const *in, int n, size_t count) {
    unsigned char left[1024], right[1024];
    size_t nbytes = count * pc_itemsize(dtype);
    native_reduced += nbytes * (size_t)n;
    for (size_t at = 0; at < nbytes; at += sizeof left) {
        size_t length = nbytes - at < sizeof left ? nbytes - at : sizeof left;
        memcpy(left, (const unsigned char *)in[0] + at, length);
        for (int index = 1; index < n; index++) {
            memcpy(right, (const unsigned char *)in[index] + at, length);
            combine_block(op, dtype, left, right, length);
        }
        native_delay();
        memcpy((unsigned char *)out + at, left, length);
    }
}

#define KERNEL(name, op, dtype)                                                                  \
    static void name(void *out, const void *const *in, int n, size_t count, int divisor) {       \
        (void)divisor;                                                                           \
        reduce(op, dtype, out, in, n, count);                                                    \
    }
KERNEL(sum_u32, OP_SUM, U32)
KERNEL(sum_u64, OP_SUM, U64)
KERNEL(order_u32, OP_ORDER, U32)
KERNEL(order_u64, OP_ORDER, U64)

pc_reduce_fn pc_reduce_find(int op, int dtype) {
    static const pc_reduce_fn kernels[OPS][DTYPES] = {{sum_u32, sum_u64}, {order_u32, order_u64}};
    return kernels[op][dtype];
}

/* --- what else the core calls in comm.c ------------------------------------------------------- */

void pc_sign(pc_collective *call, uint64_t salt, int ndim, const intptr_t *dims) {
    call->signature = salt * PC_KINDS + (uint64_t)call->kind;
    call->ndim = ndim;
    call->dims = dims;
}

unsigned char *pc_scratch(pc_comm *comm, size_t nbytes) {
    if (comm->scratch_nbytes < nbytes) {
        free(comm->scratch);
        comm->scratch = aligned_alloc(PC_PAGE, pc_round_up(nbytes, PC_PAGE));
        comm->scratch_nbytes = nbytes;
    }
    return comm->scratch;
}

struct pc_own_arena pc_own_arena;
static pc_flag64 native_given_up;
static pthread_barrier_t all_here;
bool pc_window_open(pc_host *host, int rank) { return host->windows[rank] != NULL; }

int pc_mismatch(pc_collective *call, int rank, uint64_t number) {
    native_fail(
        "a false mismatch: rank %d, in call %llu, takes call %llu of rank %d for another one\n",
        call->comm->rank, (unsigned long long)call->number, (unsigned long long)number, rank);
}

/* --- one call: what goes in, what must come out ----------------------------------------------- */

struct call { /* the same on all ranks */
    uint64_t ident;
    int kind, op, dtype, root, size;
    size_t count; /* elements of a unit */
    size_t begins[MAX_RANKS + 1]; /* of a reduce_scatterv, in elements; else 0 */
    uint32_t description_nbytes;
    bool in_place;
};

/* Give the elements of a reduce_scatter to the ranks by chance. */
static void cut_unevenly(struct call *call, uint64_t *seed) {
    size_t all = call->count * (size_t)call->size;
    call->count = 0;
    for (int rank = 0; rank < call->size; rank++) {
        size_t rest = all - call->begins[rank],
               some = native_random(seed) % 3 == 0 ? 0 : native_random(seed) % (rest + 1);
        size_t count = rank == call->size - 1 ? rest : some;
        call->begins[rank + 1] = call->begins[rank] + count;
        call->count = count > call->count ? count : call->count;
    }
}

static bool is_uneven(const struct call *call) { return call->begins[call->size] > 0; }

static struct call choose_call(uint64_t *seed, uint64_t ident, int size, size_t chunk_nbytes) {
    struct call call = {.ident = ident, .size = size};
    call.kind = (int)(native_random(seed) % PC_KINDS);
    call.op = (int)(native_random(seed) % OPS);
    call.dtype = (int)(native_random(seed) % DTYPES);
    call.root = (int)(native_random(seed) % (uint64_t)size);
    call.in_place = native_random(seed) % 4 == 0;
    uint64_t chance = native_random(seed) % 100;
    size_t given = native_random(seed) % 128;
    if (chance >= 85)
        given = SLOT_NBYTES - 600 + native_random(seed) % 1200; /* on either side of a slot's end */
    if (chance >= 94)
        given = SLOT_NBYTES + native_random(seed) % (MAX_GIVEN / 4);
    if (chance >= 96)
        given = chunk_nbytes *
                (1 + native_random(seed) % (MAX_GIVEN / chunk_nbytes)); /* whole chunks */
    if (chance >= 98)
        given = native_random(seed) % MAX_GIVEN;
    call.count = given / pc_itemsize(call.dtype) / (pc_is_split(call.kind) ? (size_t)size : 1);
    if (call.kind == PC_REDUCE_SCATTER && native_random(seed) % 2 == 0)
        cut_unevenly(&call, seed);
    if (call.kind == PC_BARRIER)
        call.count = 0;
    if (pc_is_announced(call.kind))
        call.description_nbytes = (uint32_t)(native_random(seed) % (PC_DESCRIPTION_NBYTES + 1));
    return call;
}

static uint64_t element(const struct call *call, int rank, size_t index) {
    uint64_t seed = call->ident * 0x100000001B3u + (uint64_t)rank * 0x9E3779B97F4A7C15u +
                    index * 0xD6E8FEB86659FD93u;
    return call->dtype == U32 ? (uint32_t)(seed ^ seed >> 32) : seed ^ seed >> 32;
}

UNSEEN static void put_element(const struct call *call, unsigned char *array, size_t index,
                               uint64_t value) {
    uint32_t narrow = (uint32_t)value;
    if (call->dtype == U32)
        memcpy(array + index * 4, &narrow, 4);
    else
        memcpy(array + index * 8, &value, 8);
}

/* Elements that `rank` passes; 0: it passes none. */
static size_t count_in(const struct call *call, int rank) {
    if (pc_is_announced(call->kind) && rank != call->root)
        return 0;
    if (is_uneven(call))
        return call->begins[call->size];
    return call->count * (pc_is_split(call->kind) ? (size_t)call->size : 1);
}

static size_t count_out(const struct call *call, int rank) {
    if (is_uneven(call))
        return call->begins[rank + 1] - call->begins[rank];
    switch (call->kind) {
    case PC_BARRIER: return 0;
    case PC_BROADCAST: return rank == call->root ? 0 : call->count;
    case PC_REDUCE: return rank == call->root ? call->count : 0;
    case PC_GATHER: return rank == call->root ? call->count * (size_t)call->size : 0;
    case PC_ALL_GATHER:
    case PC_ALL_TO_ALL: return call->count * (size_t)call->size;
    case PC_EXSCAN: return rank == 0 ? 0 : call->count;
    default: return call->count;
    }
}

UNSEEN static uint64_t expected(const struct call *call, int rank, size_t index) {
    size_t count = call->count, block = index / count, within = index % count;
    int first = 0, last = call->size;
    switch (call->kind) {
    case PC_BROADCAST: return element(call, call->root, index);
    case PC_SCATTER: return element(call, call->root, (size_t)rank * count + index);
    case PC_GATHER:
    case PC_ALL_GATHER: return element(call, (int)block, within);
    case PC_ALL_TO_ALL: return element(call, (int)block, (size_t)rank * count + within);
    case PC_REDUCE_SCATTER:
        index += is_uneven(call) ? call->begins[rank] : (size_t)rank * count;
        break;
    case PC_SCAN: last = rank + 1; break;
    case PC_EXSCAN: last = rank; break;
    }
    uint64_t value = element(call, first, index);
    for (int other = first + 1; other < last; other++)
        value = combine(call->op, value, element(call, other, index));
    return value;
}

UNSEEN static void fill(const struct call *call, int rank, unsigned char *copy) {
    for (size_t index = 0; index < count_in(call, rank); index++)
        put_element(call, copy, index, element(call, rank, index));
}

UNSEEN static void compare(const struct call *call, int rank, const unsigned char *copy) {
    size_t itemsize = pc_itemsize(call->dtype);
    for (size_t index = 0; index < count_out(call, rank); index++) {
        unsigned char wanted[8];
        put_element(call, wanted, 0, expected(call, rank, index));
        for (size_t byte = 0; byte < itemsize; byte++)
            if (copy[index * itemsize + byte] != wanted[byte])
                native_fail("call %llu, kind %d, rank %d of %d, root %d, %zu elements of %zu "
                            "bytes: element %zu is wrong\n",
                            (unsigned long long)call->ident, call->kind, rank, call->size,
                            call->root, call->count, itemsize, index);
    }
}

/* Where x begins in the result, if they may share memory; else NULL. */
static unsigned char *x_within(const struct call *call, int rank, unsigned char *out) {
    size_t nbytes = call->count * pc_itemsize(call->dtype);
    switch (call->in_place && count_out(call, rank) > 0 ? call->kind : PC_KINDS) {
    case PC_REDUCE:
    case PC_ALL_REDUCE:
    case PC_SCAN: return out;
    case PC_GATHER:
    case PC_ALL_GATHER: return out + (size_t)rank * nbytes;
    default: return NULL;
    }
}

/* --- a rank ----------------------------------------------------------------------------------- */

/* As pc_call_begin and pc_call_end do. */
static void begin(pc_collective *native, struct rank *rank, const struct call *call) {
    memset(native, 0, sizeof *native);
    native->call.host = &rank->host;
    native->call.up = &native_up;
    native->call.deadline = &rank->comm.deadline;
    rank->comm.deadline = (struct pc_deadline){PC_FOR_EVER, 0};
    native->comm = &rank->comm;
    native->kind = call->kind;
    native->op = call->op;
    native->dtype = call->dtype;
    native->root = call->root;
    native->signature = call->ident * PC_KINDS + (uint64_t)call->kind;
}

static void end(pc_collective *native, int status) {
    if (status != 0)
        native_fail("a call failed\n");
    pc_hold(&native->call);
    native_check_rung(native_rank, "ends");
    native_delay();
}

static void run_announced(struct rank *rank, const struct call *call, const void *x, void *out) {
    unsigned char description[PC_DESCRIPTION_NBYTES];
    pc_collective native;
    begin(&native, rank, call);
    native.out = out;
    memset(description, (int)call->ident & 0xFF, sizeof description);
    if (rank->comm.rank == call->root) {
        native.x = x;
        native.nbytes = call->count * pc_itemsize(call->dtype);
        struct pc_header header = {
            .nbytes = native.nbytes, .address = (uintptr_t)x, .value = call->ident};
        header.description_nbytes = call->description_nbytes;
        end(&native, pc_announce(&native, &header, description));
        return;
    }
    struct pc_slot *slot;
    struct pc_header header;
    end(&native, pc_hear(&native, &slot));
    memcpy(&header, slot->data, sizeof header);
    if (header.value != call->ident ||
        memcmp(slot->data + sizeof header, description, header.description_nbytes) != 0)
        native_fail("rank %d hears another announcement\n", rank->comm.rank);
    begin(&native, rank, call);
    native.out = out;
    native.number = rank->comm.number;
    end(&native, pc_receive(&native, slot));
}

static void run_call(struct rank *rank, const struct call *call, unsigned char *x,
                     unsigned char *out, unsigned char *copy) {
    int me = rank->comm.rank;
    size_t itemsize = pc_itemsize(call->dtype);
    size_t in_nbytes = count_in(call, me) * itemsize, out_nbytes = count_out(call, me) * itemsize;
    memset(out, 0xEE, out_nbytes);
    if (x_within(call, me, out) != NULL)
        x = x_within(call, me, out);
    fill(call, me, copy);
    memcpy(x, copy, in_nbytes);
    if (call->kind == PC_REDUCE_SCATTER && call->in_place)
        out = x + (is_uneven(call) ? call->begins[me] : (size_t)me * call->count) * itemsize;
    native_delay();
    if (pc_is_announced(call->kind)) {
        run_announced(rank, call, x, call->kind == PC_BROADCAST && me == call->root ? NULL : out);
    } else {
        pc_collective native;
        begin(&native, rank, call);
        native.x = x;
        native.out = out_nbytes > 0 ? out : NULL;
        native.nbytes = call->count * itemsize;
        native.begins = is_uneven(call) ? call->begins : NULL;
        native.row_nbytes = itemsize;
        end(&native, pc_exchange_run(&native));
    }
    memcpy(copy, out, out_nbytes);
    compare(call, me, copy);
}

/* The last call of a communicator: on shared arrays, and any rank may give up when it has to sleep;
   then all do. Whose call has failed has its arrays for itself, and writes to them: who is still at
   work on them is found out. */
static void give_up(struct rank *rank, unsigned char *x, unsigned char *out) {
    static const int kinds[] = {PC_ALL_REDUCE, PC_ALL_GATHER, PC_GATHER,
                                PC_REDUCE,     PC_ALL_TO_ALL, PC_BROADCAST};
    uint64_t seed = rank->seed;
    pc_comm *comm = &rank->comm;
    struct call call = {
        .ident = 1, .kind = kinds[native_random(&seed) % 6], .dtype = U64, .size = comm->size};
    call.count = MAX_GIVEN / 8 / (pc_is_split(call.kind) ? (size_t)comm->size : 1);
    struct pc_header header = {.nbytes = call.count * 8, .address = (uintptr_t)x};
    struct pc_slot *slot;
    pc_collective native;
    begin(&native, rank, &call);
    native.x = x;
    native.out = out;
    native.nbytes = call.count * 8;
    native_impatient = native_random(&native_seed) % 2 == 0;
    rank->gives_up = true;
    int status = 0;
    if (!pc_is_announced(call.kind)) {
        status = pc_exchange_run(&native);
    } else if (comm->rank == call.root) {
        status = pc_announce(&native, &header, "");
    } else {
        status = pc_hear(&native, &slot);
        if (status == 0)
            status = pc_receive(&native, slot);
    }
    if (status < 0) { /* as pc_call_end does */
        pc_hold(&native.call);
        pc_publish(&pc_progress_of(comm, comm->rank)->given_up, 1);
        pc_wake_others(comm); /* Python tells them */
        if (native.placed)
            pc_abandon(&native);
        atomic_thread_fence(memory_order_seq_cst);
        atomic_fetch_add(&native_given_up, 1);
    }
    pc_hold(&native.call);
    memset(out, 0x77, MAX_GIVEN);
    if (status < 0)
        memset(x, 0x77, MAX_GIVEN);
}

/* With "counts" MAX_RANKS ranks make the same call again and again, on cores of their own if spins
   is not 0, and say what each call was for them. If not `direct` all is streamed. */
static struct {
    int kind, spins, direct;
    size_t nbytes;
} counted;

static void count(struct rank *rank, unsigned char *x, unsigned char *out, unsigned char *copy) {
    enum { BEFORE = 10, CALLS = 5 };
    struct call call = {.kind = counted.kind, .dtype = U64, .size = rank->comm.size};
    struct native_tally before = {0}, *now = &native_tally;
    call.count = counted.nbytes / 8;
    for (; call.ident < BEFORE + CALLS; call.ident++) {
        if (call.ident == BEFORE)
            before = *now, native_reduced = 0;
        run_call(rank, &call, x, out, copy);
    }
    printf("%d: %g %g %g %g %g\n", rank->comm.rank, (double)(now->waits - before.waits) / CALLS,
           (double)(now->copied - before.copied) / CALLS, (double)native_reduced / CALLS,
           (double)(now->kernel_calls - before.kernel_calls) / CALLS,
           (double)(now->kernel_copied - before.kernel_copied) / CALLS);
}

static unsigned char *array_of(size_t nbytes) { /* what is counted begins with a page */
    return counted.nbytes > 0 ? aligned_alloc(PC_PAGE, nbytes) : malloc(nbytes);
}

static void *be_rank(void *argument) {
    struct rank *rank = argument;
    uint64_t seed = rank->seed;
    unsigned char *x = array_of(MAX_NBYTES), *out = array_of(MAX_NBYTES);
    unsigned char *copy = malloc(MAX_NBYTES);
    unsigned char *shared_x = pc_own_arena.base + (size_t)(2 * rank->comm.rank) * MAX_NBYTES;
    unsigned char *shared_out = shared_x + MAX_NBYTES;
    native_rank = rank;
    native_seed = seed * MAX_RANKS + (uint64_t)rank->comm.rank;
    if (counted.nbytes > 0)
        count(rank, x, out, copy);
    for (uint64_t number = 1; counted.nbytes == 0 && number <= CALLS_A_COMM; number++) {
        struct call call =
            choose_call(&seed, rank->seed + number, rank->comm.size, rank->comm.chunk_nbytes);
        native_impatient = native_random(&native_seed) % 16 == 0;
        uint64_t chance = native_random(&native_seed) % 16; /* mostly all are shared, or none */
        bool shares = number / 8 % 2 == 0;
        run_call(rank, &call, chance == 0 || !shares ? x : shared_x,
                 chance == 1 || !shares ? out : shared_out, copy);
    }
    pthread_barrier_wait(&all_here); /* who gives up breaks earlier calls, too */
    if (rank->comm.together && counted.nbytes == 0)
        give_up(rank, shared_x, shared_out);
    free(x);
    free(out);
    free(copy);
    free(rank->comm.scratch);
    pc_forget_choices(&rank->comm);
    free(rank->comm.compared);
    return NULL;
}

/* --- communicators ---------------------------------------------------------------------------- */

static unsigned char *map(size_t nbytes) {
    unsigned char *memory =
        mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        native_fail("no memory\n");
    return memory;
}

static void run_comm(uint64_t seed) {
    static const size_t chunk_sizes[] = {512, 1024, 4096, 16384};
    static const int spins[] = {0, 30, 300};
    int size = counted.nbytes > 0 ? MAX_RANKS : 2 + (int)(native_random(&seed) % (MAX_RANKS - 1));
    int doorbells[MAX_RANKS], pids[MAX_RANKS], local[MAX_RANKS];
    static struct rank ranks[MAX_RANKS];
    pthread_t threads[MAX_RANKS];
    pc_comm layout = {.size = size, .entry = -1};
    layout.direct = counted.nbytes > 0 ? counted.direct != 0 : native_random(&seed) % 2 != 0;
    layout.together = native_random(&seed) % 4 > 0;
    layout.chunk_nbytes = chunk_sizes[native_random(&seed) % 4];
    if (counted.nbytes > 0)
        layout.chunk_nbytes = pc_chunk_nbytes(size);
    layout.slots_offset = pc_round_up((size_t)size * sizeof(struct pc_progress), PC_PAGE);
    layout.big_offset = pc_round_up(
        layout.slots_offset + (size_t)size * PC_SLOTS * sizeof(struct pc_slot), PC_PAGE);
    layout.region_nbytes = layout.big_offset + (size_t)size * PC_CHUNKS * layout.chunk_nbytes;
    layout.region = map(layout.region_nbytes);
    layout.pids = pids;
    layout.local = local;
    pc_host host = {.size = size, .fd = -1, .doorbells = doorbells};
    host.notes_offset = pc_round_up(PC_PAGE + MAX_RANKS * PC_RECORD_NBYTES, PC_PAGE);
    host.mapped = host.notes_offset + MAX_RANKS * PC_NOTES_NBYTES;
    host.spins = counted.nbytes > 0 ? counted.spins : spins[native_random(&seed) % 3];
    host.base = map(host.mapped);
    unsigned char *windows[MAX_RANKS];
    host.windows = windows;
    host.arena_nbytes = pc_own_arena.nbytes = pc_own_arena.shared_nbytes =
        2 * MAX_RANKS * MAX_NBYTES;
    pc_own_arena.base = map(pc_own_arena.nbytes);
    for (int rank = 0; rank < size; rank++) {
        local[rank] = size - 1 - rank; /* not the same numbers on the host */
        pids[rank] = getpid();
        windows[rank] = pc_own_arena.base;
        atomic_store(&pc_host_record(&host, rank)->arena, (uint64_t)(uintptr_t)pc_own_arena.base);
        doorbells[rank] = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    }
    for (int rank = 0; rank < size; rank++) {
        struct rank *made = &ranks[rank];
        *made = (struct rank){.host = host, .comm = layout, .all = ranks, .seed = seed};
        made->host.rank = local[rank], made->comm.rank = rank, made->comm.host = &made->host;
        made->comm.tally = &pc_host_record(&made->host, local[rank])->tally;
        made->comm.compared = calloc((size_t)size, sizeof *made->comm.compared);
    }
    pthread_barrier_init(&all_here, NULL, (unsigned)size);
    for (int rank = 0; rank < size; rank++)
        pthread_create(&threads[rank], NULL, be_rank, &ranks[rank]);
    for (int rank = 0; rank < size; rank++)
        pthread_join(threads[rank], NULL);
    pthread_barrier_destroy(&all_here);
    for (int rank = 0; rank < size; rank++)
        close(doorbells[rank]);
    munmap(pc_own_arena.base, pc_own_arena.nbytes);
    munmap(layout.region, layout.region_nbytes);
    munmap(host.base, host.mapped);
}

int main(int argc, char **argv) {
    if (argc == 6 && strcmp(argv[1], "counts") == 0) {
        counted.kind = atoi(argv[2]);
        counted.nbytes = (size_t)atol(argv[3]);
        counted.spins = atoi(argv[4]);
        counted.direct = atoi(argv[5]);
        run_comm(1);
        return 0;
    }
    if (argc != 3)
        native_fail("usage: native_tsan OPERATIONS SEED\n");
    long operations = atol(argv[1]), done = 0;
    uint64_t seed = (uint64_t)atol(argv[2]);
    for (; done < operations * (native_given_up ? 1 : 20); done += CALLS_A_COMM) /* that is luck */
        run_comm(native_random(&seed));
    printf("%ld operations, %llu sleeps, %llu of them until their end, %llu given up\n", done,
           (unsigned long long)native_sleeps, (unsigned long long)native_timeouts,
           (unsigned long long)native_given_up);
    return 0;
}
