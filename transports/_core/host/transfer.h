/* A transfer: a large message that its receiver copies straight from the sender's memory, while the
   sender, if it waits, helps by copying other pieces into the receiver's.

   The record lies in the sender's heap. Its state names the message, so that a record used again is
   never mistaken for its predecessor:

       WAITING --receiver--> TAKEN --receiver--> DONE
          `--sender--> WITHDRAWN

   Once taken, pieces are claimed by counting `next` up, and counted in `done` when copied. Whoever
   wants the copying to end marks `next`: nothing can be claimed any more, and when as many are done
   as were claimed, nobody touches the other's memory. A piece that the sender has claimed and
   cannot copy it hands back. At the end the receiver seals the transfer: until then the sender may
   take the message back, from then on not.

   Nothing here knows Python; the tests run it under ThreadSanitizer, and as a model. */
#ifndef PC_TRANSFER_H
#define PC_TRANSFER_H

#include "base/core.h"

enum pc_phase {
    PC_PHASE_WAITING = 1,
    PC_PHASE_TAKEN,
    PC_PHASE_DONE,
    PC_PHASE_WITHDRAWN,
    PC_PHASE_LEFT
};

/* Marks in `next`. All stop the claims. */
#define PC_SEALED ((uint64_t)1 << 61)          /* by the receiver: it has everything */
#define PC_CLOSED ((uint64_t)1 << 62)          /* by the receiver, which may open them again */
#define PC_MARK_TAKEN_BACK ((uint64_t)1 << 63) /* by the sender, unless sealed */
#define PC_MARKS (PC_SEALED | PC_CLOSED | PC_MARK_TAKEN_BACK)

struct pc_transfer {
    pc_flag64 state;   /* id << 8 | phase */
    pc_flag64 watched; /* 1: the sender looks at `state` and needs no message that it is done */
    pc_flag64 into;    /* address in the receiver's memory */
    uint64_t unused[5];
    pc_flag64 next;
    pc_flag64 done;
    pc_flag64 returned; /* piece + 1 */
    uint64_t rest[5];
};
_Static_assert(sizeof(struct pc_transfer) == 2 * PC_LINE, "a transfer is two lines");

/* Bytes of a piece. Large ones cost fewer system calls, of 1.5 us each; small ones let two ranks
   end together. Measured with two ranks on two cores: 64 KiB takes 4.6 us in halves, 6.5 whole
   and 7.0 in quarters; 1 MiB takes 41 us in quarters, 54 in sixteenths. */
static inline size_t pc_piece_nbytes(size_t nbytes) {
    if (nbytes <= (size_t)32 << 10)
        return nbytes + (nbytes == 0);
    return nbytes <= (size_t)512 << 10 ? (nbytes / 2 + 4095) / 4096 * 4096 : (size_t)256 << 10;
}
static inline uint64_t pc_pieces(size_t nbytes) {
    size_t piece = pc_piece_nbytes(nbytes);
    return (nbytes + piece - 1) / piece;
}

static inline uint64_t pc_phase_of(uint64_t id, enum pc_phase phase) {
    return id << 8 | (uint64_t)phase;
}

/* The sender: begin. The message that tells the receiver is published afterwards. */
static inline void pc_transfer_begin(struct pc_transfer *transfer, uint64_t id, bool watched) {
    atomic_store_explicit(&transfer->next, PC_CLOSED, memory_order_relaxed);
    atomic_store_explicit(&transfer->done, 0, memory_order_relaxed);
    atomic_store_explicit(&transfer->returned, 0, memory_order_relaxed);
    atomic_store_explicit(&transfer->watched, watched, memory_order_relaxed);
    atomic_store_explicit(&transfer->state, pc_phase_of(id, PC_PHASE_WAITING),
                          memory_order_relaxed);
}

static inline bool pc_transfer_step(struct pc_transfer *transfer, uint64_t id, enum pc_phase from,
                                    enum pc_phase to) {
    uint64_t expected = pc_phase_of(id, from);
    return atomic_compare_exchange_strong(&transfer->state, &expected, pc_phase_of(id, to));
}

/* The receiver, after taking it and after `pc_transfer_close`: pieces from `first` on go to `into`.
   False: the sender has taken it back. */
static inline bool pc_transfer_open(struct pc_transfer *transfer, uint64_t into, uint64_t first) {
    atomic_store_explicit(&transfer->into, into, memory_order_relaxed);
    uint64_t next = pc_load(&transfer->next);
    while (!(next & PC_MARK_TAKEN_BACK))
        if (atomic_compare_exchange_weak(&transfer->next, &next, first))
            return true;
    return false;
}

/* Either side: the number of a piece to copy, or -1: there is none. */
static inline int64_t pc_transfer_claim(struct pc_transfer *transfer, uint64_t pieces) {
    uint64_t next = pc_load(&transfer->next);
    while (next < pieces) /* marks make it larger than any number */
        if (atomic_compare_exchange_weak(&transfer->next, &next, next + 1))
            return (int64_t)next;
    return -1;
}

static inline void pc_transfer_copied(struct pc_transfer *transfer) {
    atomic_fetch_add(&transfer->done, 1);
}

static inline bool pc_transfer_complete(struct pc_transfer *transfer, uint64_t pieces) {
    return pc_load(&transfer->done) == pieces;
}

/* The sender cannot copy what it has claimed. It must claim no more. */
static inline void pc_transfer_return(struct pc_transfer *transfer, int64_t piece) {
    pc_publish(&transfer->returned, (uint64_t)piece + 1);
}
/* The receiver: the piece that came back, or -1. */
static inline int64_t pc_transfer_returned(struct pc_transfer *transfer) {
    if (PC_LIKELY(pc_load(&transfer->returned) == 0))
        return -1;
    return (int64_t)atomic_exchange(&transfer->returned, 0) - 1;
}

/* The receiver: stop the claims. Nobody writes to `into` any more when `pc_transfer_settled`. */
static inline void pc_transfer_close(struct pc_transfer *transfer) {
    atomic_fetch_or(&transfer->next, PC_CLOSED);
}
static inline bool pc_transfer_settled(struct pc_transfer *transfer) {
    uint64_t claimed = pc_load(&transfer->next) & ~PC_MARKS;
    uint64_t done = pc_load(&transfer->done);
    return done == claimed || (done + 1 == claimed && pc_load(&transfer->returned) != 0);
}

/* The receiver, when all pieces are copied. False: the sender has taken it back. */
static inline bool pc_transfer_seal(struct pc_transfer *transfer) {
    uint64_t next = pc_load(&transfer->next);
    while (!(next & PC_MARK_TAKEN_BACK))
        if (atomic_compare_exchange_weak(&transfer->next, &next, next | PC_SEALED))
            return true;
    return false;
}

/* The sender: take back what was taken. False: it is too late. */
static inline bool pc_transfer_take_back(struct pc_transfer *transfer) {
    uint64_t next = pc_load(&transfer->next);
    while (!(next & PC_SEALED))
        if (atomic_compare_exchange_weak(&transfer->next, &next, next | PC_MARK_TAKEN_BACK))
            return true;
    return false;
}
static inline bool pc_transfer_taken_back(struct pc_transfer *transfer) {
    return (pc_load(&transfer->next) & PC_MARK_TAKEN_BACK) != 0;
}

#endif
