/* The worlds of engine_random.c: ranks, messages and receives, as all who have to do with them know
   them. */
#ifndef PYCOLL_ENGINE_WORLD_H
#define PYCOLL_ENGINE_WORLD_H

#include "engine_hooks.h"

#include "engine/engine.h"

#undef malloc
#undef calloc
#undef free
#include <errno.h>
#include <stdio.h>
#include <string.h>

#define RANKS 3
#define IDENTS 4
#define OTHERS IDENTS /* stands for the identity of what is of another kind */
#define KIND_OTHER 9
#define STEPS 1200
#define MOST_FLIGHTS 400
#define MOST_STARTED 600
#define MOST_RECEIVES (MOST_STARTED + MOST_FLIGHTS)
#define GUARD 16
#define SMALL 100

enum count {
    RECEIVED, REFUSED, PROBED, HELD, RETURNED, PARKED, POSTED_AGAIN, FAILED, CANCELLED, WITHDRAWN,
    WITHOUT_MEMORY, UNOPENED, ABANDONED, REDIRECTED, TO_SELF, FROM_CALLBACKS, NONSENSE, OTHER,
    TAKEN_BACK, DROPPED, TAKEN_OVER, COUNTS
};
static const char *const names[] = {
    "received", "refused", "probed", "held", "returned", "parked", "posted again", "failed",
    "cancelled", "withdrawn", "without memory", "unopened", "abandoned", "redirected", "to self",
    "from callbacks", "nonsense", "of another kind", "taken back", "dropped", "taken over"
};
static uint64_t counts[COUNTS];

#define PERCENT_REFUSED 30
#include "scarce_memory.h"

/* A payload begins with the number of its message. */
static unsigned char byte_of(uint64_t flight, size_t offset) {
    if (offset < 4)
        return (unsigned char)(flight >> 8 * offset);
    return (unsigned char)((flight * 131 + offset * 7 + offset / 251) % 211); /* never POISON */
}

/* A message, as its sender, the link and the model know it. */
struct flight {
    uint32_t number;
    int source, dest, ident, tag;
    unsigned char form, type;
    unsigned char header[80];
    size_t header_nbytes, nbytes;
    bool is_sync;
    /* The sender's. */
    struct pc_send send;
    unsigned char *memory;
    struct iovec parts[3];
    bool sending;     /* its memory is used */
    int times_ended;
    /* The link's. */
    enum pc_where where;
    unsigned char *copy; /* of what is not at the sender */
    struct pc_message *message;
    bool on_wire, announcing, known, accepted, severed, taken_back, sent_due, received_due,
        released, answered;
    unsigned char *into;
    size_t filled;
    /* The model's. */
    uint64_t arrival; /* 0: not yet */
    bool consumed, gone, dropped;
};

struct receive {
    struct pc_receive receive;
    int rank, ident;
    unsigned char *memory;
    unsigned char expects[2];
    size_t room, touched; /* of which links may have written so much, for whatever message */
    bool live;
    uint64_t order;
    int64_t last_flight; /* that it held or had read when it was looked at last */
};

enum openness { NEVER, OPEN, BROKEN, CLOSED };

struct rank {
    struct pc_engine engine;
    struct pc_link self, link, *links[RANKS];
    struct pc_context *contexts[IDENTS + 1];
    enum openness openness[IDENTS + 1];
    int status[IDENTS + 1];
    bool remembered[IDENTS + 1];
    int closed[2], num_closed;
};

static struct rank ranks[RANKS];
static struct flight flights[MOST_FLIGHTS];
static struct receive receives[MOST_RECEIVES];
static uint32_t num_flights, num_receives;
static uint64_t order;
static bool quiet, acted; /* nothing new is begun; a callback has called the engine in this step */

static uint32_t number_in(const unsigned char *header) {
    uint32_t number;
    memcpy(&number, header + PC_P2P_NBYTES + 1, sizeof number);
    return number;
}

static struct flight *flight_of(const struct pc_message *message) {
    return &flights[number_in(message->header)];
}
#endif
