/* The link over sockets: what transports/_core/tcp/tcp.h moves, told to the engine.

   The up-calls of tcp come in the middle of its reading and writing, where it may not be called
   again: so nothing is told then. What has happened stands in a queue until tcp has come back. A
   small message is copied into it, and its credit is repaid when it was used: a slow receiver so
   bounds the memory that is used for it. */
#ifndef PC_LINK_TCP_H
#define PC_LINK_TCP_H

#include "tcp/tcp.h"
#include "base/chains.h"
#include "drive.h"
#include "link.h"

/* In a ring, or in none: then `next` is NULL. */
struct pc_link_tcp_event {
    struct pc_link_tcp_event *prev, *next;
    int what; /* for link_tcp.c */
};

struct pc_link_tcp_peer_event {
    struct pc_link_tcp_event event; /* the first member */
    int peer;
};

struct pc_link_tcp_peer {
    struct pc_link_tcp_peer_event bye, lost;
    bool begun;   /* a link to it was attached, or asked for */
    bool blocked; /* there is no room for its next message now */
    char why[128];
};

/* The caller sets the second block, and all else to zero. */
struct pc_link_tcp {
    struct pc_link link; /* the first member */

    struct pc_tcp tcp; /* rank, size, num_lanes, limits */
    /* somebody must dial: a message was sent, and no link was begun yet */
    void (*wanted)(void *owner, int peer);
    void (*watched)(void *owner);          /* the descriptor given to `pc_tcp_watch` is readable */
    /* outside of progress there is something to tell: `pc_drive_posted`; or NULL */
    void (*posted)(void *owner);
    void *owner;

    struct pc_source source;
    struct pc_link_tcp_peer *peers;
    struct pc_link_tcp_event events; /* to be told: the head of a ring */
    struct pc_link_tcp_event all_in, all_out; /* all messages, all sends */
    struct pc_chains by_id; /* messages that wait or were accepted, by sender and its number */
    bool progressing, is_watched;
#ifdef PC_DRIVE_CHECKED
    uint64_t queued_ns; /* since when there are events */
#endif
};

/* 0, or a negative errno. */
int pc_link_tcp_open(struct pc_link_tcp *link, struct pc_engine *engine);
/* No engine calls it any more. */
void pc_link_tcp_free(struct pc_link_tcp *link);

#endif
