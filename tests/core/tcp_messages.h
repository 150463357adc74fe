/* The worlds of tcp_random.c: their memory, the messages as both ends know them, and what ranks are
   told. */
#ifndef PYCOLL_TCP_MESSAGES_H
#define PYCOLL_TCP_MESSAGES_H

#include "tcp_hooks.h"

#include "random_worlds.h"
#include "tcp/tcp.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define RANKS 3
#define MOST_MESSAGES 400
#define MOST_NBYTES 9000
#define GRAVES 32
#define POISON 0xEE

static struct pc_tcp_limits limits = {
    .eager = 250, .ahead = 6000, .credit = 2000, .message_cost = 20};
static uint64_t counts[11];
enum {
    ALL, EAGER, PUSHED, OFFERED, COMPLETE, GIVEN_UP, REDIRECTED, TAKEN_BACK, WITHDRAWN, LOST, BYES
};

static unsigned char byte_of(uint64_t message, size_t offset) {
    return (unsigned char)((message * 131 + offset * 7 + offset / 251) % 211); /* never POISON */
}

/* --- the worlds' memory ----------------------------------------------------------------------- */

/* What was given back stays for a while, filled with other bytes, which must not change. */
static struct grave {
    unsigned char *memory;
    size_t nbytes;
} graves[GRAVES];

static void bury(unsigned char *memory, size_t nbytes) {
    struct grave *grave = &graves[below(GRAVES)];
    for (size_t offset = 0; offset < grave->nbytes; offset++)
        check(grave->memory[offset] == POISON, "memory is written that was given back", offset);
    free(grave->memory);
    *grave = (struct grave){memory, nbytes};
    memset(memory, POISON, nbytes);
    if (below(2)) { /* AddressSanitizer sees who touches it */
        free(memory);
        *grave = (struct grave){NULL, 0};
    }
}

/* --- messages --------------------------------------------------------------------------------- */

enum way { WAY_EAGER, WAY_PUSHED, WAY_OFFERED };

/* A message, as its sender and its receiver know it. */
struct message {
    int source, dest;
    size_t nbytes, header_nbytes;
    /* The sender's. */
    uint64_t id;
    bool started, sent, stopped, taken_back, released;
    unsigned char *parts[70];
    size_t lengths[70], num_parts;
    /* The receiver's. */
    bool arrived, is_pushed, accepted, complete, given_up, withdrawn, failed;
    uint64_t offer, handle;
    unsigned char *into;
    struct place *place;
};

/* The owner of a receive's memory. */
struct place {
    unsigned char *memory;
    size_t nbytes;
    bool released;
};

enum what { ARRIVED, OFFERED_TO, PUSHED_TO, SENT, RECEIVED, CANCELLED, BYE, GONE };

struct event {
    struct event *next;
    enum what what;
    int peer;
    uint64_t number, nbytes;
    uint64_t header;
    unsigned char payload[];
};

struct rank {
    struct pc_tcp tcp;
    struct event *first, **last;
    bool closed;
    bool lost[RANKS], byes[RANKS], forgotten[RANKS];
    uint64_t next_from[RANKS]; /* messages of each that have arrived */
};

static struct rank ranks[RANKS];
static struct message messages[MOST_MESSAGES];
static uint64_t num_messages, num_owners;
static int num_lanes;
static int waiting[RANKS][RANKS][PC_TCP_LANES]; /* connections that are not attached yet */

static struct event *note(void *owner, enum what what, int peer, size_t room) {
    struct rank *rank = owner;
    struct event *event = malloc(sizeof *event + room);
    *event = (struct event){.what = what, .peer = peer};
    *rank->last = event;
    rank->last = &event->next;
    return event;
}

static uint64_t number_in(const void *header, size_t nbytes) {
    uint64_t number;
    check(nbytes >= sizeof number, "a header is too short", nbytes);
    memcpy(&number, header, sizeof number);
    check(number < num_messages && messages[number].header_nbytes == nbytes,
          "this is not the header", number);
    for (size_t offset = sizeof number; offset < nbytes; offset++)
        check(((const unsigned char *)header)[offset] == byte_of(number + 1, offset),
              "a header is wrong", number);
    return number;
}

static void arrived(void *owner, int peer, const void *header, size_t header_nbytes,
                    const void *payload, size_t nbytes) {
    struct event *event = note(owner, ARRIVED, peer, nbytes);
    event->header = number_in(header, header_nbytes);
    event->nbytes = nbytes;
    memcpy(event->payload, payload, nbytes);
}
static void offered(void *owner, int peer, const void *header, size_t header_nbytes,
                    uint64_t nbytes, uint64_t id) {
    struct event *event = note(owner, OFFERED_TO, peer, 0);
    event->header = number_in(header, header_nbytes);
    event->nbytes = nbytes;
    event->number = id;
}
static void pushed(void *owner, int peer, const void *header, size_t header_nbytes, size_t nbytes,
                   uint64_t handle) {
    struct event *event = note(owner, PUSHED_TO, peer, 0);
    event->header = number_in(header, header_nbytes);
    event->nbytes = nbytes;
    event->number = handle;
}
static void sent(void *owner, uint64_t id, void *memory) {
    (void)memory;
    note(owner, SENT, 0, 0)->number = id;
}
static void received(void *owner, uint64_t handle) { note(owner, RECEIVED, 0, 0)->number = handle; }
static void cancelled(void *owner, int peer, uint64_t id) {
    note(owner, CANCELLED, peer, 0)->number = id;
}
static void bye(void *owner, int peer) { note(owner, BYE, peer, 0); }
static void lost(void *owner, int peer, const char *why) {
    check(strstr(why, "no sense") == NULL, "a right frame makes no sense", (uint64_t)peer);
    note(owner, GONE, peer, 0);
}
static void watched(void *owner) {
    (void)owner;
    fail("nothing was to be watched", 0);
}

/* The owner of a payload is its message, of other memory its place. */
static void release(void *owner, void *memory) {
    (void)owner;
    num_owners--;
    if (memory >= (void *)messages && memory < (void *)(messages + MOST_MESSAGES)) {
        struct message *message = memory;
        check(!message->released, "the memory of a send is given back twice",
              (uint64_t)(message - messages));
        message->released = true;
        for (size_t part = 0; part < message->num_parts; part++)
            bury(message->parts[part], message->lengths[part]);
        return;
    }
    struct place *place = memory;
    check(!place->released, "the memory of a receive is given back twice", place->nbytes);
    place->released = true;
}

static const struct pc_tcp_up up = {arrived, offered, pushed,  sent,    received, cancelled,
                                    bye,     lost,    watched, release, NULL};
#endif
