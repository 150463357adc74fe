/* A link by a transport that is not C's: what the engine asks for stands in a queue, from which its
   owner takes it.

   An order is taken out with the lock, and done without it. Messages and sends are known to the
   owner by a number. Each stands in the queue once, whatever was asked for: what has been undone
   before it was taken out was never asked for. So giving up needs no memory, and cannot fail.

   What `give_up`, `redirect` and `take_back` promise of memory holds when the owner has done what
   stands in the queue. Until then `is_unsettled` is true: whoever has called them sees to that
   before anybody may use the memory otherwise, and memory of the engine's own is freed by
   `pc_engine_give_scratch`. */
#ifndef PC_LINK_QUEUE_H
#define PC_LINK_QUEUE_H

#include "base/chains.h"
#include "link.h"

struct pc_link_entry;

/* The caller sets the second block, and all else to zero. */
struct pc_link_queue {
    struct pc_link link; /* the first member */

    void (*posted)(void *owner); /* something stands in the queue */
    void *owner;

    uint64_t num_posted; /* how often that was said */
    uint64_t next_id;
    struct pc_chains by_id;
    struct pc_link_entry *all;
    struct pc_link_entry *first, **last; /* the queue */
    size_t num_unsettled; /* orders in it on which the use of memory depends */
    bool is_doing;        /* so does the one that was taken out last */
    void *spare;          /* memory that it goes on without */
};

enum pc_order_kind {
    PC_ORDER_SEND,      /* a message, which `pc_link_sent` says is over */
    PC_ORDER_TAKE_BACK, /* a send */
    PC_ORDER_ACCEPT,    /* into `into` */
    PC_ORDER_REDIRECT,  /* what was accepted goes on there */
    PC_ORDER_GIVE_UP,   /* what was accepted: the number is forgotten */
    PC_ORDER_RELEASE,   /* what was not: so it is, too */
};

struct pc_order {
    enum pc_order_kind kind;
    uint64_t id;
    void *into;
    size_t nbytes; /* of the payload */
    /* Of a send: to be freed, but for what the parts point to. */
    int peer;
    enum pc_way way;
    unsigned char *header;
    size_t header_nbytes;
    struct iovec *parts;
    size_t num_parts;
    struct pc_keeper keeper;
};

void pc_link_queue(struct pc_link_queue *link, struct pc_engine *engine);
/* No engine calls it any more. */
void pc_link_queue_free(struct pc_link_queue *link);

/* All of these with the engine's lock. */
/* The next order, after the last one was done; false: there is none. */
bool pc_link_take(struct pc_link_queue *link, struct pc_order *order);
static inline bool pc_link_is_unsettled(const struct pc_link_queue *link) {
    return link->num_unsettled > 0 || link->is_doing;
}
/* A message has come: as `pc_arrived`. `*id` is its number; 0: it is to be released at once. */
int pc_link_arrived(struct pc_link_queue *link, struct pc_incoming *incoming, uint64_t *id);
/* What has become of it; numbers that are not known any more are passed over. */
void pc_link_received(struct pc_link_queue *link, uint64_t id);
void pc_link_withdrawn(struct pc_link_queue *link, uint64_t id);
void pc_link_sent(struct pc_link_queue *link, uint64_t id, int status); /* 0, or why it failed */
/* It is too late to stop a send: `stop` says so from now on. */
void pc_link_committed(struct pc_link_queue *link, uint64_t id);
/* The number of a send that was taken out, or of a message; 0: it has none. */
uint64_t pc_link_id_of_send(const struct pc_link_queue *link, const struct pc_send *send);
uint64_t pc_link_id_of_message(const struct pc_link_queue *link, const struct pc_message *message);

#endif
