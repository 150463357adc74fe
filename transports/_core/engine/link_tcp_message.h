/* A message that the link over sockets knows, a send, and the rings in which they stand. For
   link_tcp.c and link_tcp_asked.c alone. */
#ifndef PC_LINK_TCP_MESSAGE_H
#define PC_LINK_TCP_MESSAGE_H

#include "link_tcp.h"

#include "engine.h"

#include <stdlib.h>

enum what { IN, OUT, BYE, LOST };
enum kind { SMALL, PUSHED, OFFERED };

/* A send that is under way, the owner of its memory for tcp. */
struct out {
    struct pc_link_tcp_event event; /* the first member */
    struct pc_link_tcp_event all;
    struct pc_send *send;
    uint64_t id;
};

/* A message of a peer. It stands in the queue once, for all that is to be told of it. */
struct in {
    struct pc_link_tcp_event event; /* the first member */
    struct pc_link_tcp_event all;
    struct pc_chained by_id;
    enum kind kind;
    int peer;
    uint64_t id, handle;
    size_t nbytes, header_nbytes;
    struct pc_message *message;
    bool told, accepted;
    bool here;      /* pushed, in spare memory: to be kept */
    bool done;      /* accepted, and all there */
    bool cancelled; /* by its sender */
    bool *gone;     /* to be set when this is freed */
    unsigned char bytes[]; /* the header, and the payload of a small one */
};

static void append(struct pc_link_tcp_event *ring, struct pc_link_tcp_event *event) {
    event->prev = ring->prev;
    event->next = ring;
    ring->prev->next = event;
    ring->prev = event;
}

static void unlink_event(struct pc_link_tcp_event *event) {
    if (event->next == NULL)
        return;
    event->prev->next = event->next;
    event->next->prev = event->prev;
    event->prev = event->next = NULL;
}

static void free_in(struct pc_link_tcp *self, struct in *in) {
    unlink_event(&in->event);
    unlink_event(&in->all);
    if (in->by_id.at != NULL)
        pc_chains_remove(&self->by_id, &in->by_id);
    if (in->gone != NULL)
        *in->gone = true;
    free(in);
}

static void free_out(struct out *out) {
    unlink_event(&out->event);
    unlink_event(&out->all);
    free(out);
}

/* link_tcp_asked.c: what the engine asks for. */
extern const struct pc_link_ops pc_link_tcp_ops;

#endif
