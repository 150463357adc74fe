/* The shared memory of one communicator: its region of shared memory, and the calls of its
   collectives. See region.h for what lies there. */
#ifndef PC_COMM_H
#define PC_COMM_H

#include "python/base/py.h"

#include "host/arena.h"
#include "python/arguments/arrays.h"
#include "python/arguments/kinds.h"
#include "reduce/reduce.h"
#include "host/region.h"
#include "host/wait.h"

#include <pthread.h>

#define PC_CHOICES 32
typedef struct pc_choice pc_choice;

typedef struct pc_comm {
    PyObject_HEAD
    pc_host *host;
    PyObject *host_object; /* which has it */
    uint64_t ident;
    struct pc_tally *tally; /* this rank's */
    int rank, size;
    int *local;      /* rank on the host, by rank here */
    int *pids;       /* process, by rank here; known once attached */
    unsigned char *region;
    size_t region_nbytes, chunk_nbytes;
    size_t slots_offset, big_offset;
    int entry;       /* in the host's table; -1: not attached */
    bool direct;     /* every rank may read every other's memory */
    bool together;   /* every rank has mapped every other's arena */
    bool may_use_gpus; /* the same on all ranks: large reductions may be for GPUs */
    bool usable;     /* attached, and not broken: the fast path may be taken */
    /* the thread that is in a call of Python's, which comes here for parts of it; */
    pthread_t caller;
    bool claimed;     /* whether there is one */
    uint64_t calls_before; /* the user's, before that one */
    bool busy;       /* a call is under way */
    bool heard;      /* and what others have said in it: the next `hear` or `uneven` is of that */
    bool goes_on;    /* a call begun here goes on in Python: the next claim keeps its deadline */
    PyObject *kept;  /* arrays of that call; or NULL */
    uint64_t op_timeout_ns; /* the default */
    struct pc_deadline deadline; /* of the user's call that is under way */
    uint64_t number; /* of the last call */
    uint64_t internal; /* calls that were not the user's */
    uint64_t entered_by_all; /* every rank is known to have entered this call */
    uint64_t *compared; /* by rank: its calls up to this one were compared with those made here */
    uint64_t chunk;  /* chunks streamed so far, by all */
    uint64_t consumed_by_all;
    unsigned char *scratch;
    size_t scratch_nbytes;
    /* by kind and size: which way large values go; or NULL yet */
    pc_choice *choices[PC_KINDS][PC_CHOICES];
    int trials; /* under way */
    PyObject *sleep, *mismatch, *give_up; /* Python callables */
} pc_comm;

/* Whether a call may begin in shared memory. */
static inline bool pc_may_share(const pc_comm *comm) {
    return comm != NULL && comm->usable && !comm->claimed && !comm->busy &&
           !comm->host->python_busy && !pc_host_failed(comm->host);
}

/* One collective under way. */
typedef struct pc_collective {
    pc_call call; /* first */
    pc_comm *comm;
    int kind, op, dtype, root;
    const void *x;
    void *out;
    /* of a unit: what one rank has for all, or for one other; of the longest, if blocks differ in
       length */
    size_t nbytes;
    const size_t *begins; /* then, by rank, rows of x before its block, and all rows; else NULL */
    size_t row_nbytes;    /* of these */
    uint64_t number, signature;
    bool placed;      /* others may be at work on its arrays */
    pc_choice *trial; /* this call is one of a trial, or NULL */
    /* when, if there is a trial and it took time to find out that this may be one of its calls; or
       0 */
    uint64_t entered;
    /* the user's call of which this one is a part: others are shown that; or NULL */
    const struct pc_collective *within;
    int ndim; /* shape of x, for who made another call */
    const intptr_t *dims;
    /* For the Python side: the method that was called, if that is no kind; and, borrowed, its
       arguments. */
    int method;
    PyObject *x_object, *op_object;
    PyObject *hook; /* see all_reduce_in_pieces and offers in exchange.c; or NULL; borrowed */
    /* A reduction that may leave this memory for that of GPUs: all ranks are asked; and whether
       this one wants that. */
    bool may_use_gpus, wants_gpus;
    /* calls it: 0, or -1 with an exception */
    int (*pass)(struct pc_collective *call, size_t offset);
} pc_collective;

#ifndef PC_PIECE_NBYTES
#define PC_PIECE_NBYTES ((size_t)8 << 20) /* longer values are reduced in pieces of so many bytes */
#endif

#ifndef PC_PARTS_FROM
/* an all_reduce is by parts from so many bytes of all ranks on */
#define PC_PARTS_FROM ((size_t)32 << 10)
#endif

#ifndef PC_CUDA_IPC_NBYTES
/* from so many bytes on, ranks may rather offer their arrays to each other */
#define PC_CUDA_IPC_NBYTES ((size_t)1 << 20)
#endif

#ifndef PC_ASK_NBYTES
#define PC_ASK_NBYTES ((size_t)256 << 10) /* reductions that ask do so from so many bytes on */
#endif

static inline struct pc_progress *pc_progress_of(pc_comm *comm, int rank) {
    return (struct pc_progress *)comm->region + rank;
}
static inline struct pc_kept *pc_kept_of(pc_comm *comm, int rank, uint64_t number) {
    return &pc_progress_of(comm, rank)->kept[number % PC_KEPT_CALLS];
}
static inline uint64_t *pc_signature_of(pc_comm *comm, int rank, uint64_t number) {
    return &pc_kept_of(comm, rank, number)->signature;
}
static inline struct pc_slot *pc_slot_of(pc_comm *comm, int rank, uint64_t number) {
    size_t index = (size_t)rank * PC_SLOTS + number % PC_SLOTS;
    return (struct pc_slot *)(comm->region + comm->slots_offset + index * sizeof(struct pc_slot));
}
static inline struct pc_place *pc_place_of(pc_comm *comm, int rank, uint64_t number) {
    return &pc_slot_of(comm, rank, number)->place;
}
/* Say where this rank's arrays are, before the call is entered. */
static inline void pc_place_set(struct pc_place *place, uint64_t number, uint64_t x, uint64_t out,
                                bool together) {
    place->x = x;
    place->out = out;
    place->together = together;
    atomic_store_explicit(&place->working, 0, memory_order_relaxed);
    pc_transfer_begin(&place->work, number, false);
    atomic_store_explicit(&place->work.next, 0, memory_order_relaxed);
    atomic_store_explicit(&place->work.into, 0, memory_order_relaxed);
    pc_publish(&place->number, number); /* that of what a root announces is waited for */
}
/* Whether who enters a large call has put its first chunk into its big slot: so who streams, too,
   need not look at `produced`. False: it may stream, but does not yet. */
static inline unsigned char *pc_has_first_chunk(struct pc_slot *slot) { return slot->data; }

/* Before the first claim of a call, and after its last piece. */
static inline void pc_work_begin(pc_collective *call) {
    atomic_store(&pc_place_of(call->comm, call->comm->rank, call->number)->working, 1);
}
static inline void pc_work_end(pc_collective *call) {
    atomic_store_explicit(&pc_place_of(call->comm, call->comm->rank, call->number)->working, 0,
                          memory_order_release);
}
static inline unsigned char *pc_big_slot_of(pc_comm *comm, int rank, uint64_t chunk) {
    size_t index = (size_t)rank * PC_CHUNKS + chunk % PC_CHUNKS;
    return comm->region + comm->big_offset + index * comm->chunk_nbytes;
}

static inline void pc_wake_others(pc_comm *comm) {
    for (int rank = 0; rank < comm->size; rank++)
        if (rank != comm->rank)
            pc_host_wake(comm->host, comm->local[rank]);
}

/* What the root of a broadcast or scatter says first, at the front of its slot; then the
   description, then, if it fits, the value (scatter: all blocks). */
struct pc_header {
    uint64_t nbytes; /* of a unit */
    uint64_t address; /* of the value in the root's memory */
    uint64_t value; /* hash of dtype and shape; 0: an object */
    uint32_t description_nbytes;
    uint32_t form;
};
enum {
    PC_FORM_OF_ARRAY,
    PC_FORM_OF_OBJECT,
    PC_OTHER_WAY,      /* the call goes by messages */
    PC_FORM_OF_OBJECTS /* one for each rank, by calls of their own (uneven.h) */
};
#define PC_DESCRIPTION_NBYTES 512

/* Where the value lies behind a header. */
static inline size_t pc_value_offset(uint32_t description_nbytes) {
    return pc_round_up(sizeof(struct pc_header) + description_nbytes, 16);
}

/* What a rank gives lies in a slot as one piece for all that take it, or as a piece for each
   rank. */
static inline bool pc_is_split(int kind) {
    return kind == PC_SCATTER || kind == PC_REDUCE_SCATTER || kind == PC_ALL_TO_ALL;
}

/* Where the block for `rank` begins in what is split, and how long it is. */
static inline size_t pc_block_begin(const pc_collective *call, int rank) {
    return call->begins == NULL ? (size_t)rank * call->nbytes
                                : call->begins[rank] * call->row_nbytes;
}
static inline size_t pc_block_nbytes(const pc_collective *call, int rank) {
    return call->begins == NULL ? call->nbytes
                                : (call->begins[rank + 1] - call->begins[rank]) * call->row_nbytes;
}

/* All the bytes that a rank gives, where a unit has `nbytes`. */
static inline size_t pc_given_nbytes(const pc_collective *call, size_t nbytes) {
    if (PC_UNLIKELY(call->begins != NULL))
        return pc_block_begin(call, call->comm->size);
    return pc_is_split(call->kind) ? nbytes * (size_t)call->comm->size : nbytes;
}

#define PC_BY_MESSAGES 1

/* exchange.c: entering a call, small collectives, and streaming. All return 0, or -1 with an
   exception. */
int pc_enter_begin(pc_collective *call, struct pc_slot **slot);
void pc_enter_end(pc_collective *call, struct pc_slot *slot);
int pc_await_entry(pc_collective *call, int rank, struct pc_slot **slot);
/* any kind but those that are announced; PC_BY_MESSAGES: all ranks rather do so */
int pc_exchange_run(pc_collective *call);
/* the root's whole call */
int pc_announce(pc_collective *call, const struct pc_header *header, const void *description);
int pc_hear(pc_collective *call, struct pc_slot **slot); /* elsewhere: wait for the header, */
int pc_receive(pc_collective *call, struct pc_slot *slot); /* then fill `out` */
int pc_stream(pc_collective *call, struct pc_slot *slot);
int pc_await_consumed(pc_collective *call, uint64_t needed);
int pc_await_chunk(pc_collective *call, int rank, uint64_t index, uint64_t chunk,
                   const struct pc_slot *slot);
unsigned char *pc_scratch(pc_comm *comm, size_t nbytes); /* NULL with an exception */

/* Wait until the big slot for this chunk of one's own is free. */
static inline int pc_await_big_slot(pc_collective *call, uint64_t chunk) {
    if (call->comm->consumed_by_all + PC_CHUNKS > chunk)
        return 0;
    return pc_await_consumed(call, chunk - PC_CHUNKS + 1);
}

/* direct.c: reading the other ranks' arrays. The slot was begun, not ended; NULL: the call was
   entered, with a place. */
int pc_direct(pc_collective *call, struct pc_slot *slot);
/* -1 with an exception: a rank has given up a call of this communicator */
int pc_check_given_up(pc_collective *call);
/* say how far this rank is in a call without slots; see `phase` */
void pc_reach(pc_collective *call, uint64_t step);
bool pc_can_be_read(const void *array, size_t nbytes); /* by others, of this process */
/* With `together` the root copies only between arenas. */
int pc_direct_receive(pc_collective *call, uint64_t address, bool together);
/* the root's: help those who read, and wait until all have */
int pc_direct_serve(pc_collective *call);
int pc_await_readers(pc_collective *call); /* the same without help */

/* A piece of another rank's memory, and where it is to be here. */
struct pc_piece {
    int rank;
    uint64_t address;
    void *into;
    size_t nbytes;
};

/* Read pieces of the others' memory when all have entered the call; nobody leaves before all have
   read. */
int pc_direct_fetch(pc_collective *call, const struct pc_piece *pieces, size_t count);

/* together.c: if all arrays that are needed lie where every rank has mapped them, the ranks divide
   the work on them. */
bool pc_may_work_together(const pc_collective *call); /* as far as this rank's arrays go */
/* Enter the call. 1: done; 0: it must go another way, and was entered, with a place; -1 with an
   exception. */
int pc_work_together(pc_collective *call, struct pc_slot *slot);
/* a value that its root announces at `address` */
bool pc_is_open(const pc_collective *call, uint64_t address);
/* the root's part, when that is announced; and elsewhere */
int pc_serve_together(pc_collective *call);
int pc_receive_together(pc_collective *call, uint64_t address);
/* nobody is at work on this rank's arrays any more; the call has failed */
void pc_abandon(pc_collective *call);

/* The calling thread begins a call of the user's, of which the calls here are parts. */
static inline void pc_claim(pc_comm *comm, struct pc_deadline deadline) {
    comm->tally->calls++;
    comm->claimed = true;
    comm->deadline = deadline;
    comm->caller = pthread_self();
    comm->calls_before = comm->number - comm->internal - comm->heard;
}

/* The same for a call that is begun: its first part is made. */
static inline void pc_claim_rest(pc_comm *comm) {
    comm->claimed = true;
    comm->caller = pthread_self();
    comm->calls_before = comm->number - comm->internal - 1;
}

/* choice.c: whether a large call goes by direct.c (1) or by streaming (0); all ranks choose alike.
   -1 with an exception. */
int pc_choose(pc_collective *call);
int pc_chosen(pc_collective *call); /* after such a call that went well */
/* for 2^bits bytes and more; -1: nothing was tried yet */
int pc_known_choice(const pc_comm *comm, int kind, int bits);
void pc_forget_choices(pc_comm *comm);

/* A call that is made as a part of the user's, which is shown in its place and has the same number
   there: of all that are made for it one counts, the others are internal. */
static inline pc_collective pc_part_of(const pc_collective *call) {
    pc_collective part = *call;
    part.within = call;
    part.hook = NULL;
    part.may_use_gpus = false;
    part.begins = NULL;
    return part;
}
static inline void pc_part_begin(const pc_collective *part) { /* the user's has been counted */
    part->comm->internal += part->within->number != 0;
}
static inline void pc_part_end(const pc_collective *part) {
    /* it will be; so long this one counts */
    part->comm->internal += part->within->number == 0;
}

/* all_reduce.c: streaming in two phases, each rank reducing its part. */
int pc_all_reduce_stream(pc_collective *call, struct pc_slot *slot); /* as pc_stream */

/* comm.c */
/* -1 with an exception: another is under way */
int pc_call_begin(pc_collective *call, pc_comm *comm, int kind, int root);
/* A call of the user's, with its argument `timeout`. -1 without an exception: Python says what is
   wrong. */
int pc_user_call_begin(pc_collective *call, pc_comm *comm, int kind, int root, PyObject *timeout);
/* Steals `result`, of which a new reference is counted after `pc_hold`: a call may have let go of
   the lock. */
PyObject *pc_call_end(pc_collective *call, int status, PyObject *result);
static inline PyObject *pc_call_end_with(pc_collective *call, int status, PyObject *result) {
    pc_hold(&call->call); /* the interpreter's lock, before a reference is counted */
    return pc_call_end(call, status, Py_NewRef(result));
}
/* (method, kind, x, op, root, number, counts): None for what is not there */
PyObject *pc_describe(const pc_collective *call);
/* Have Python raise the error: this rank and `rank` made different calls as `number`. Returns
   -1. */
int pc_mismatch(pc_collective *call, int rank, uint64_t number);
uint64_t pc_hash_dims(uint64_t seed, int ndim, const intptr_t *dims);
/* Set the signature of a call on an array of this shape; `salt` tells apart what else must be the
   same. */
void pc_sign(pc_collective *call, uint64_t salt, int ndim, const intptr_t *dims);
/* What a call may be a part of, as the upper half of its salt says: nothing, or a program's call
   that needs several. */
enum {
    PC_PART_UNEVEN = 1, PC_PART_MANY, PC_PART_GROUP, PC_PART_OPERATOR, PC_PART_INTS, PC_PART_OBJECTS
};
void pc_sign_part(pc_collective *call, uint64_t salt, int ndim, const intptr_t *dims);

/* (signature, shape) of what a rank has called; NULL with an exception */
PyObject *pc_called(pc_comm *comm, int rank, uint64_t number);
/* False with an exception: these cannot be operands and result of a reduction. */
bool pc_check_reducible(int dtype, const void *x, const void *out);
int pc_check_attached(const pc_comm *comm); /* -1 with an exception */
#define PC_MAX_DIMS 64
int pc_get_shape(PyObject *shape, intptr_t *dims); /* the number of dimensions, or -1 with an
                                                      exception */

/* Methods for calls whose arguments Python has checked. */
PyObject *pc_comm_run(pc_comm *comm, PyObject *args);
PyObject *pc_comm_announce(pc_comm *comm, PyObject *args);
PyObject *pc_comm_hear(pc_comm *comm, PyObject *args);
PyObject *pc_comm_receive(pc_comm *comm, PyObject *args);
PyObject *pc_comm_value_hash(pc_comm *comm, PyObject *args);
PyObject *pc_comm_uneven(pc_comm *comm, PyObject *args);
PyObject *pc_comm_reduce_rows(pc_comm *comm, PyObject *args);

/* comm_attach.c */
/* attach(direct): map the region, meet the others there, and find out whether all can read each
   other's memory. */
PyObject *pc_comm_attach(pc_comm *comm, PyObject *allowed);
/* Give the region back, if no call is under way. */
void pc_comm_detach(pc_comm *comm);

/* Calls that may begin in shared memory (`pc_may_share`), by their arguments, sorted
   (collective_call.h). NULL without an exception: nothing has happened, and they must go another
   way; or with `heard` the call goes on in Python. */
PyObject *pc_shared_run(pc_comm *comm, int kind, PyObject **values);
/* such a call has gone on in Python, and is over */
void pc_shared_end(pc_comm *comm, int kind);
/* of blocks that differ in shape */
PyObject *pc_shared_uneven(pc_comm *comm, int method, PyObject **values);
/* of objects, but for broadcast, and for a scatter off root: */
PyObject *pc_shared_objects(pc_comm *comm, int method, int root, PyObject *x, PyObject *timeout);
/* the objects of a scatter that its root has announced, in the call that was just ended */
PyObject *pc_shared_object_of(pc_comm *comm, int root);
/* a reduce_scatter whose blocks differ in length */
PyObject *pc_shared_reduce_scatterv(pc_comm *comm, PyObject **values);
void pc_shared_init(void);

extern PyTypeObject *pc_comm_type;

#endif
