/* Links: how bytes move between this rank and others. What transports/base.py says of a transport
   holds here: the order of messages, what is buffered, who owns which memory until when.

   A link tells the engine what comes by the functions below, the *up-calls*. It does so while it
   makes progress, and never for a send whose `send` has not returned yet. Out of `accept`,
   `release` and `give_up` it may call `pc_sent`, out of `take_back` `pc_withdrawn`, and out of
   `send` `pc_arrived`: a link to oneself does.

   A message is known to its link by a `struct pc_message`, whose place does not change. The link
   knows it until it
   - has answered `accept` with PC_RECEIVED or PC_WITHDRAWN, or `redirect` with false,
   - has called `pc_received`, or `pc_withdrawn`,
   - was told to `release` it, to `give_up`, or to `forget` its peer, unless it is kept.
   Then it does not touch the message any more. */
#ifndef PC_LINK_H
#define PC_LINK_H

#include "base/list.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

struct pc_engine;
struct pc_context;
struct pc_link;
struct pc_message;

/* What ends, in the list of those that are to be told. */
struct pc_ending {
    struct pc_ending *next;
    bool is_send, stands;
};

/* What some memory belongs to. Both NULL: that is not known, or it stays only as long as its
   message. */
struct pc_keeper {
    void *object;  /* up to the caller, and to a link of his */
    void *scratch; /* or memory of the engine's own, which `pc_scratch_take` has returned */
};

/* A message that is sent. The caller sets the first block, and all else to zero. The payload must
   stay as it is until the send has ended. */
struct pc_send {
    int peer; /* world rank */
    const struct iovec *parts;
    size_t num_parts;
    /* the last that is done with it; not called if it was done at once */
    void (*ended)(struct pc_send *send);
    void *owner;                         /* up to the caller */
    struct pc_keeper keeper;             /* of all of the payload */

    int status; /* when it has ended */
    bool stopped; /* it will not be received, whatever its link says of it until it is taken back */
    size_t nbytes;
    uint64_t token[2]; /* the link's own */
    uint64_t noted; /* see `pc_note_message` */
    struct pc_context *context;
    struct pc_context *counted_in; /* whose message it is; NULL: nobody counts it */
    struct pc_send *next, **at; /* of those that are under way on the context */
    struct pc_ending ending;
};

/* How a message may go. */
enum pc_way {
    PC_BUFFER,   /* a small one is buffered; a larger one waits here until it is accepted */
    PC_MAY_PUSH, /* nobody will take it back: a larger one may go ahead, too */
    PC_OFFER,    /* however small it is, it waits here until it is accepted */
};

/* Where the payload of a message is that has come. */
enum pc_where {
    PC_PASSING, /* in `parts`, for the time of the call */
    PC_KEPT,    /* at `payload`, until it is released */
    PC_COMING,  /* it is being read: the link keeps what comes until it is accepted */
    PC_WAITING, /* at its sender, who waits */
};

struct pc_incoming {
    int peer;
    const void *header;
    size_t header_nbytes;
    enum pc_where where;
    const struct iovec *parts;
    size_t num_parts;
    const void *payload;
    size_t nbytes;
    uint64_t token[4]; /* the link's own: it stands in the message */
};

enum pc_answer {
    PC_SENT,      /* the memory is not used any more */
    PC_UNDER_WAY, /* `pc_sent` or `pc_received` says when it is over */
    PC_RECEIVED,  /* it is all there */
    PC_WITHDRAWN, /* its sender has taken it back */
};

struct pc_link_ops {
    /* PC_SENT, PC_UNDER_WAY, or a negative errno. */
    int (*send)(struct pc_link *link, struct pc_send *send, const void *header,
                size_t header_nbytes, enum pc_way way);
    /* Stop a send that is under way, if it can still be stopped. It is taken back next. */
    bool (*stop)(struct pc_link *link, struct pc_send *send);
    /* Give up a send, stopped or not: its memory is not used any more. */
    void (*take_back)(struct pc_link *link, struct pc_send *send);

    /* Write the payload of a message that is coming or waits to `into`. PC_RECEIVED, PC_UNDER_WAY,
       PC_WITHDRAWN, or a negative errno: then the message is as before. */
    int (*accept)(struct pc_link *link, struct pc_message *message, void *into);
    /* A payload that was kept was used; or nobody wants a message that is coming or waits. */
    void (*release)(struct pc_link *link, struct pc_message *message);
    /* Nobody wants the rest of a message that was accepted: nothing more is written. */
    void (*give_up)(struct pc_link *link, struct pc_message *message);
    /* Go on with an accepted message elsewhere, and copy there what was written already. False:
       everything was written, nothing is copied, and `pc_received` will not be called. */
    bool (*redirect)(struct pc_link *link, struct pc_message *message, void *into);
    /* A peer has ended. Sends to it are over, and so are its messages but those that are kept;
       nothing is told of them. */
    void (*forget)(struct pc_link *link, int peer);
};

struct pc_link {
    const struct pc_link_ops *ops;
    struct pc_engine *engine;
};

/* A message has come. 0: it was taken over. `*message` is that by which the link knows it; NULL: it
   does not know it any more. It is set before anybody is told, so a link that gives a place in its
   own tables finds it there if it is called meanwhile. -ENOMEM, -ENOBUFS: there is no room for it
   now, and nothing has happened: tell it again later, before what came after it, or lose the peer.
   -EPROTO: no rank of this job sends this. */
int pc_arrived(struct pc_engine *engine, struct pc_link *link, const struct pc_incoming *incoming,
               struct pc_message **message);
/* What was coming is all here, and kept at `payload`: the message waits no more to be accepted. Or
   what is kept, and was not released, is now kept there. */
void pc_kept(struct pc_engine *engine, struct pc_message *message, const void *payload);
/* A message that was accepted is all there. */
void pc_received(struct pc_engine *engine, struct pc_message *message);
/* The sender has taken back a message, accepted or not; what is kept is not taken back. */
void pc_withdrawn(struct pc_engine *engine, struct pc_message *message);
/* A send that was under way is over: its memory is not used any more. */
void pc_sent(struct pc_engine *engine, struct pc_send *send);
/* It could not be done, for this status, and was taken back from its receiver. The link goes on. */
void pc_send_failed(struct pc_engine *engine, struct pc_send *send, int status);

/* A message to oneself is copied, but for one that waits to be accepted: then it is copied once. */
void pc_link_self(struct pc_link *link, struct pc_engine *engine);

#endif
