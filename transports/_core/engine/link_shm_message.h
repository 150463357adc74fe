/* A message that the link over shared memory knows, and the queues in which it stands. For
   link_shm.c and link_shm_asked.c alone. */
#ifndef PC_LINK_SHM_MESSAGE_H
#define PC_LINK_SHM_MESSAGE_H

#include "link_shm.h"

#include <stdlib.h>

enum shm_state {
    SHM_EAGER,     /* the payload is here, in memory of ours or in a ring */
    SHM_BLOCK,     /* in a block */
    SHM_OFFERED,
    SHM_READING,
    SHM_LEFT,      /* it was accepted when its sender had left: it waits until that is forgotten */
    SHM_RECEIVED,  /* these two are to be told */
    SHM_WITHDRAWN,
};

struct pc_shm_message {
    struct pc_shm_message *next, **at; /* of all */
    struct pc_shm_message *next_in_queue;
    struct pc_message *message; /* the engine's; NULL: it was not told yet */
    enum shm_state state;
    int peer; /* local rank */
    bool is_told, is_over; /* it is being told; and the engine is done with it */
    bool in_offers;
    size_t nbytes, header_nbytes;
    const unsigned char *payload, *header;
    struct pc_block block;
    struct pc_offer offer;
    struct pc_chained by_id;
    uint64_t handle;
    unsigned char bytes[]; /* payload, header */
};

static inline struct pc_link_shm *shm_of(struct pc_link *link) {
    return (struct pc_link_shm *)link;
}
static inline struct pc_shm_message *record_of(const struct pc_message *message) {
    return (struct pc_shm_message *)(uintptr_t)message->token[0];
}
static inline struct pc_channel_send *send_of(struct pc_link_shm *shm, const struct pc_send *send) {
    return send->token[0] != 0 ? pc_table_get(&shm->channel.sends, send->token[0]) : NULL;
}
static inline struct pc_channel_receive *receive_of(struct pc_link_shm *shm,
                                                    const struct pc_shm_message *record) {
    return pc_table_get(&shm->channel.receives, record->handle);
}

/* The token of a send has its id, 0 when it is over, and then the next one that is. */
static inline struct pc_send *next_sent(const struct pc_send *send) {
    return (struct pc_send *)(uintptr_t)send->token[1];
}

static inline void clear(struct pc_shm_queue *queue) {
    queue->first = NULL;
    queue->last = &queue->first;
}

static inline void append(struct pc_shm_queue *queue, struct pc_shm_message *record) {
    record->next_in_queue = NULL;
    *queue->last = record;
    queue->last = &record->next_in_queue;
}

static inline void take_out(struct pc_shm_queue *queue, struct pc_shm_message *record) {
    struct pc_shm_message **at = &queue->first;
    while (*at != record)
        at = &(*at)->next_in_queue;
    *at = record->next_in_queue;
    if (*at == NULL)
        queue->last = at;
}

static inline void add(struct pc_link_shm *shm, struct pc_shm_message *record) {
    record->next = shm->messages;
    record->at = &shm->messages;
    if (record->next != NULL)
        record->next->at = &record->next;
    shm->messages = record;
}

static inline void remove_offer(struct pc_link_shm *shm, struct pc_shm_message *record) {
    if (record->in_offers)
        pc_chains_remove(&shm->offers, &record->by_id);
    record->in_offers = false;
}

/* The engine does not know the message any more. Not `inline`: the compiler sees where that is
   worth it. */
static void drop(struct pc_link_shm *shm, struct pc_shm_message *record) {
    remove_offer(shm, record);
    if (record->state >= SHM_RECEIVED)
        take_out(&shm->over, record);
    shm->peers[record->peer].num_withdrawn -= record->state == SHM_WITHDRAWN;
    if (record->is_told) {
        record->state = SHM_READING; /* it stands in no queue */
        record->is_over = true;
        return;
    }
    *record->at = record->next;
    if (record->next != NULL)
        record->next->at = record->at;
    free(record);
}

/* Its payload was used: the credit is the sender's again. */
static inline void use(struct pc_link_shm *shm, struct pc_shm_message *record) {
    if (record->state == SHM_BLOCK)
        pc_channel_consume(&shm->channel, record->peer, record->nbytes, &record->block);
    else if (record->state == SHM_EAGER)
        pc_channel_use(&shm->channel, record->peer, record->nbytes);
}

static inline void lose(struct pc_link_shm *shm, int peer, bool is_mad) {
    shm->channel.peers[peer].dead = true;
    shm->peers[peer].ends = shm->peers[peer].is_lost = true;
    shm->peers[peer].is_mad |= is_mad;
}

/* What the engine asks for: link_shm_asked.c. */
extern const struct pc_link_ops pc_link_shm_ops;

#endif
