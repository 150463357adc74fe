/* A ring: the items that one rank sends to another, in order. One writes, the other reads; nobody
   locks.

   An item is a number of whole lines. Its first word is written last and says that the item is
   there: the position of the item, counted in lines from the beginning of time, and its length. No
   position occurs twice, so nothing has to be erased, and an item of one line costs one transfer
   between caches.

       word     position + 1 in the upper 48 bits, lines in the lower 16; anything else: not there
   yet

   What an item of the lap before left in that place could look like such a word only if somebody's
   payload did. So a writer looks at the line behind its item before it publishes, and clears it if
   it is like that. An item does not wrap: PC_PAD fills the end of the ring where the next would not
   fit. */
#ifndef PC_RING_H
#define PC_RING_H

#include "base/core.h"

struct pc_ring_head { /* the first line of a ring; only the reader writes it */
    pc_flag64 consumed; /* lines, ever */
    pc_flag64 repaid;   /* bytes of credit, ever (channel.c) */
    char pad[PC_LINE - 16];
};

struct pc_item {
    pc_flag64 word;
    uint32_t kind_and_header; /* kind in the upper 8 bits, bytes of the header in the rest */
    uint32_t nbytes;          /* of what comes with it */
    unsigned char body[];
};

#define PC_PAD 0u
#define PC_ITEM_NBYTES 16u
#define PC_MAX_HEADER 0xffffffu

struct pc_ring { /* one side's view of a ring */
    struct pc_ring_head *head;
    unsigned char *lines;
    uint64_t num_lines;
    uint64_t position; /* of the next item to write, or to read */
    uint64_t consumed; /* lines: as last seen by the writer, as last told by the reader */
};

static inline void pc_ring_open(struct pc_ring *ring, unsigned char *memory, size_t nbytes) {
    ring->head = (struct pc_ring_head *)memory;
    ring->lines = memory + PC_LINE;
    ring->num_lines = nbytes / PC_LINE - 1;
    ring->position = ring->consumed = 0;
}

static inline struct pc_item *pc_ring_at(struct pc_ring *ring, uint64_t position) {
    return (struct pc_item *)(ring->lines + position % ring->num_lines * PC_LINE);
}

static inline uint32_t pc_item_kind(const struct pc_item *item) {
    return item->kind_and_header >> 24;
}
static inline uint32_t pc_item_header(const struct pc_item *item) {
    return item->kind_and_header & PC_MAX_HEADER;
}

/* --- writing ---------------------------------------------------------------------------------- */

/* Whether `lines` more are free, as far as is known without looking at the reader's line. */
static inline bool pc_ring_has(const struct pc_ring *ring, uint64_t lines) {
    /* One stays free: the line behind the last item must be the writer's. */
    return ring->position - ring->consumed + lines < ring->num_lines;
}

static inline bool pc_ring_room(struct pc_ring *ring, uint64_t lines) {
    if (PC_LIKELY(pc_ring_has(ring, lines)))
        return true;
    uint64_t consumed = pc_load(&ring->head->consumed);
    if (consumed > ring->position) /* the reader is out of its mind */
        return false;
    ring->consumed = consumed;
    return pc_ring_has(ring, lines);
}

static inline void pc_ring_put(struct pc_ring *ring, struct pc_item *item, uint64_t lines) {
    uint64_t word = (ring->position + 1) << 16 | lines;
    ring->position += lines;
    pc_flag64 *next = &pc_ring_at(ring, ring->position)->word;
    if (PC_UNLIKELY(atomic_load_explicit(next, memory_order_relaxed) >> 16 == ring->position + 1))
        atomic_store_explicit(next, 0, memory_order_relaxed);
    pc_publish(&item->word, word);
}

/* Return where the next item goes if it has `nbytes`, or NULL: the ring is full. Nothing is
   committed. */
static inline struct pc_item *pc_ring_reserve(struct pc_ring *ring, size_t nbytes) {
    uint64_t lines = (nbytes + PC_LINE - 1) / PC_LINE;
    uint64_t to_end = ring->num_lines - ring->position % ring->num_lines;
    if (PC_UNLIKELY(lines > to_end)) {
        if (!pc_ring_room(ring, to_end + lines))
            return NULL;
        struct pc_item *pad = pc_ring_at(ring, ring->position);
        pad->kind_and_header = PC_PAD << 24;
        pc_ring_put(ring, pad, to_end);
    } else if (!pc_ring_room(ring, lines)) {
        return NULL;
    }
    return pc_ring_at(ring, ring->position);
}

/* Let the reader see the item that was reserved last. */
static inline void pc_ring_publish(struct pc_ring *ring, struct pc_item *item, size_t nbytes) {
    pc_ring_put(ring, item, (nbytes + PC_LINE - 1) / PC_LINE);
}

/* --- reading ---------------------------------------------------------------------------------- */

/* Return the bytes of the next item if it is there, else 0; -1: this is no item, the writer's
   memory is corrupt. It is the reader's until `pc_ring_consume`. */
static inline int64_t pc_ring_peek(struct pc_ring *ring, struct pc_item **item) {
    for (;;) {
        *item = pc_ring_at(ring, ring->position);
        uint64_t word = pc_load(&(*item)->word);
        if (word >> 16 != ring->position + 1)
            return 0;
        uint64_t lines = word & 0xffff;
        if (PC_UNLIKELY(lines == 0 || lines > ring->num_lines - ring->position % ring->num_lines))
            return -1;
        if (PC_LIKELY(pc_item_kind(*item) != PC_PAD))
            return (int64_t)(lines * PC_LINE);
        ring->position += lines;
    }
}

/* Go on behind the item that was seen last. True: the writer was told how far, and may wait for
   that. */
static inline bool pc_ring_consume(struct pc_ring *ring, int64_t nbytes) {
    ring->position += (uint64_t)nbytes / PC_LINE;
    /* Seldom, because it takes the line away from the writer; often enough for every item to fit at
       last. */
    if (PC_LIKELY(ring->position - ring->consumed < ring->num_lines / 4))
        return false;
    ring->consumed = ring->position;
    pc_publish(&ring->head->consumed, ring->position);
    return true;
}

#endif
