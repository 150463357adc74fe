/* A heap: where a rank puts what does not fit into its rings. Its owner takes blocks, whoever reads
   a block gives it back.

   The heap is counted in units of 1 KiB. A block in use has a number, never used again, in the
   state of its first unit; to give the block back is to exchange that number for 0. So a rank that
   gives back late, when it was already counted as dead, cannot give back what meanwhile is another
   block.

       unit 0      states
            32     transfers (copy.h)
            96     payloads of buffered messages: at most credit of them for each receiver
            2144   headers that are too long for a ring
            3328   fragments of messages that are not copied directly

   Headers and fragments are consumed as soon as the receiver looks, so they always find room at
   last, even if nobody ever asks for the payloads. */
#ifndef PC_HEAP_H
#define PC_HEAP_H

#include "base/core.h"

#define PC_HEAP_NBYTES ((size_t)4 << 20)
#define PC_UNIT_NBYTES ((size_t)1024)
#define PC_UNITS 4096u

enum pc_room { PC_ROOM_PAYLOADS, PC_ROOM_HEADERS, PC_ROOM_FRAGMENTS, PC_ROOMS };

static const uint16_t pc_room_begin[PC_ROOMS + 1] = {96, 2144, 3328, PC_UNITS};

/* A header must fit into its room, if need be alone. */
#define PC_LONGEST_HEADER ((3328 - 2144) * PC_UNIT_NBYTES)

#define PC_TRANSFERS_UNIT 32u
#define PC_TRANSFERS 512

/* What a block of PC_ROOM_PAYLOADS begins with: its writer fills it after it was sent, so that two
   ranks copy at a time. A writer that waits anyway may offer its own memory first. A receiver that
   is there copies from it, and the block stays empty; the writer does not wait long for that:

       OFFERED --receiver--> TAKEN --receiver--> COPIED
          `--writer-----------`--writer, or receiver--> NO: the block is filled

   What was copied counts only if the receiver gets to COPIED: before, the writer may have filled
   the block, and have changed its memory. */
enum pc_direct { PC_DIRECT_NO, PC_DIRECT_OFFERED, PC_DIRECT_TAKEN, PC_DIRECT_COPIED };

struct pc_filling {
    pc_flag64 nbytes; /* of the payload that are there */
    pc_flag64 direct;
    uint64_t address; /* of the payload in its writer's memory, if that was offered */
    char pad[PC_LINE - 24];
};
_Static_assert(sizeof(struct pc_filling) == PC_LINE, "it is one line");

/* The writer: before it sends the block. */
static inline void pc_filling_begin(struct pc_filling *filling, bool offers, uint64_t address) {
    atomic_store_explicit(&filling->nbytes, 0, memory_order_relaxed);
    atomic_store_explicit(&filling->direct, offers ? PC_DIRECT_OFFERED : PC_DIRECT_NO,
                          memory_order_relaxed);
    filling->address = address;
}
/* It waits no longer. False: its receiver has everything. */
static inline bool pc_filling_take_back(struct pc_filling *filling) {
    return atomic_exchange(&filling->direct, PC_DIRECT_NO) != PC_DIRECT_COPIED;
}
/* The receiver: begins to copy what is offered, and has copied it, or could not (`to` is NO). */
static inline bool pc_filling_step(struct pc_filling *filling, enum pc_direct from,
                                   enum pc_direct to) {
    uint64_t expected = from;
    return atomic_compare_exchange_strong(&filling->direct, &expected, to);
}

struct pc_block { /* as it is named in an item */
    uint32_t unit;
    uint32_t pad;
    uint64_t number;
};

struct pc_heap { /* the owner's view */
    unsigned char *base;
    uint64_t last_number;
    uint16_t length[PC_UNITS]; /* units of the block that begins here; 0: none */
    uint16_t reader[PC_UNITS]; /* who gives it back */
};

static inline pc_flag64 *pc_heap_state(unsigned char *heap, uint32_t unit) {
    return (pc_flag64 *)heap + unit;
}
static inline unsigned char *pc_heap_at(unsigned char *heap, uint32_t unit) {
    return heap + unit * PC_UNIT_NBYTES;
}

/* Return a block's first unit, or 0: there is no room. With `look_only` nothing is taken. */
static inline uint32_t pc_heap_take(struct pc_heap *heap, enum pc_room room, size_t nbytes,
                                    int reader, bool look_only) {
    uint32_t wanted = (uint32_t)((nbytes + PC_UNIT_NBYTES - 1) / PC_UNIT_NBYTES);
    uint32_t end = pc_room_begin[room + 1], begin = pc_room_begin[room];
    if (wanted == 0)
        wanted = 1;
    /* First fit: the lowest blocks are those that caches still hold. */
    for (uint32_t unit = begin; unit < end;) {
        uint32_t length = heap->length[unit];
        if (length != 0 && pc_load(pc_heap_state(heap->base, unit)) != 0) {
            unit += length;
            begin = unit;
            continue;
        }
        heap->length[unit] = 0;
        unit++;
        if (unit - begin < wanted)
            continue;
        if (look_only)
            return begin;
        heap->length[begin] = (uint16_t)wanted;
        heap->reader[begin] = (uint16_t)reader;
        atomic_store_explicit(pc_heap_state(heap->base, begin), ++heap->last_number,
                              memory_order_relaxed);
        return begin;
    }
    return 0;
}

static inline void pc_heap_name(struct pc_heap *heap, uint32_t unit, struct pc_block *block) {
    block->unit = unit;
    block->pad = 0;
    block->number = atomic_load_explicit(pc_heap_state(heap->base, unit), memory_order_relaxed);
}

/* Take back what a rank that has ended did not give back. */
static inline void pc_heap_forget(struct pc_heap *heap, int reader) {
    for (uint32_t unit = pc_room_begin[0]; unit < PC_UNITS; unit++)
        if (heap->length[unit] != 0 && heap->reader[unit] == reader)
            atomic_store_explicit(pc_heap_state(heap->base, unit), 0, memory_order_relaxed);
}

/* The reader's side: whether a block of `nbytes` can be where an item says, and giving it back. */
static inline bool pc_block_valid(const struct pc_block *block, size_t nbytes) {
    return block->unit >= pc_room_begin[0] && block->unit < PC_UNITS &&
           nbytes <= (PC_UNITS - block->unit) * PC_UNIT_NBYTES;
}
static inline void pc_block_give_back(unsigned char *heap, const struct pc_block *block) {
    uint64_t number = block->number;
    atomic_compare_exchange_strong(pc_heap_state(heap, block->unit), &number, 0);
}

#endif
