/* The worlds of channel_random.c: their memory, the messages as both ends know them, and what ranks
   are told. */
#ifndef PYCOLL_CHANNEL_MESSAGES_H
#define PYCOLL_CHANNEL_MESSAGES_H

#include "channel_hooks.h"

#include "channel/channel.h"
#include "random_worlds.h"
#include "host/region.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#define RANKS 3
#define MOST_MESSAGES 300
#define GAP 16 /* bytes behind a part, and behind a receive's memory, that are nobody's */
#define POISON 0xEE

static uint64_t counts[9];
enum { ALL, POSTED, IN_BLOCK, OFFERED, COMPLETE, REDIRECTED, GIVEN_UP, WITHDRAWN, FORGOTTEN };

static unsigned char byte_of(uint64_t message, size_t offset) {
    return (unsigned char)((message * 131 + offset * 7 + offset / 251) % 211); /* never POISON */
}

/* --- memory ----------------------------------------------------------------------------------- */

/* What a send or a receive is given: the channel knows it as the owner, and releases it. */
struct place {
    unsigned char *memory;
    size_t nbytes; /* with the gaps */
    bool released;
    unsigned char
        *received; /* what was in a receive's memory when it was released; NULL: it is a send's */
    struct place *next;
};

static struct place *places;

static struct place *place_of(size_t nbytes) {
    struct place *place = malloc(sizeof *place);
    *place = (struct place){.memory = malloc(nbytes), .nbytes = nbytes, .next = places};
    memset(place->memory, POISON, nbytes);
    places = place;
    return place;
}

static void give_back(struct place *place) {
    check(!place->released, "memory is released twice", place->nbytes);
    place->released = true;
    if (place->received != NULL)
        memcpy(place->received, place->memory, place->nbytes);
    memset(place->memory, POISON, place->nbytes);
    if (below(2)) { /* AddressSanitizer sees who touches it */
        free(place->memory);
        place->memory = NULL;
    }
}

static void free_places(void) {
    while (places != NULL) {
        struct place *place = places;
        places = place->next;
        check(place->released, "memory is never released", place->nbytes);
        for (size_t offset = 0; place->memory != NULL && offset < place->nbytes; offset++)
            check(place->memory[offset] == POISON, "memory is written that was given back", offset);
        free(place->memory);
        free(place->received);
        free(place);
    }
}

/* --- what is told ----------------------------------------------------------------------------- */

struct message { /* as its sender and its receiver know it */
    int source, dest;
    size_t nbytes;
    uint64_t id; /* 0: posted */
    bool sent, stopped, taken_back;
    bool came, there, complete, given_up,
        withdrawn;   /* `there`: told, and perhaps not handled yet */
    uint64_t handle; /* of its receive; 0: there is none */
    struct place *place;
};

enum what { ARRIVED, ARRIVED_IN_BLOCK, OFFERED_TO, SENT, CANCELLED, RECEIVED, TAKEN_BACK, BYE };

struct event {
    struct event *next;
    enum what what;
    int peer;
    uint64_t number; /* id or handle, or of the message */
    const unsigned char *payload;
    size_t nbytes;
    struct pc_block block;
    struct pc_offer offer;
    unsigned char copy[];
};

struct rank {
    pc_host host;
    pc_channel channel;
    struct event *first, **last;
    bool dead, bye[RANKS];
    uint64_t next_from[RANKS]; /* number of the message that may come next, at least */
};

static struct rank ranks[RANKS];
static struct message messages[MOST_MESSAGES];
static uint64_t num_messages;

static struct message *by_id(int source, uint64_t id) {
    for (uint64_t number = 0; number < num_messages; number++)
        if (messages[number].source == source && messages[number].id == id)
            return &messages[number];
    return NULL;
}
static struct message *by_handle(int dest, uint64_t handle) {
    for (uint64_t number = 0; number < num_messages; number++)
        if (messages[number].dest == dest && messages[number].handle == handle)
            return &messages[number];
    return NULL;
}

static struct event *note(void *owner, enum what what, int peer, uint64_t number, size_t room) {
    struct rank *rank = owner;
    struct event *event = calloc(1, sizeof *event + room);
    event->what = what;
    event->peer = peer;
    event->number = number;
    *rank->last = event;
    rank->last = &event->next;
    return event;
}

/* The number of the message whose header this is: nobody else's, complete, and in its order. */
static uint64_t read_header(struct rank *rank, int peer, const void *header, size_t nbytes) {
    uint64_t number;
    check(nbytes >= sizeof number, "a header is too short", nbytes);
    memcpy(&number, header, sizeof number);
    check(number < num_messages, "there is no such message", number);
    for (size_t offset = sizeof number; offset < nbytes; offset++)
        check(((const unsigned char *)header)[offset] == byte_of(number, offset),
              "a header is wrong", number);
    struct message *message = &messages[number];
    check(message->source == peer && message->dest == rank->channel.rank, "a message goes astray",
          number);
    check(!message->came, "a message comes twice", number);
    check(number >= rank->next_from[peer], "a message overtakes another", number);
    rank->next_from[peer] = number + 1;
    message->came = true;
    return number;
}

static void came(void *owner, const struct pc_came *came) {
    bool is_short = came->kind == PC_EAGER;
    enum what what = is_short                 ? ARRIVED
                     : came->kind == PC_READY ? OFFERED_TO
                                              : ARRIVED_IN_BLOCK;
    uint64_t number = read_header(owner, came->peer, came->header, came->header_nbytes);
    struct event *event = note(owner, what, came->peer, number, is_short ? came->nbytes : 0);
    event->payload = is_short ? event->copy : came->payload;
    event->nbytes = came->nbytes;
    event->block = came->block;
    event->offer = came->offer;
    if (is_short)
        memcpy(event->copy, came->payload, came->nbytes);
    counts[IN_BLOCK] += what == ARRIVED_IN_BLOCK;
}
static void sent(void *owner, uint64_t id) { note(owner, SENT, -1, id, 0); }
static void cancelled(void *owner, int peer, uint64_t id) { note(owner, CANCELLED, peer, id, 0); }
static void received(void *owner, uint64_t handle) {
    struct message *message = by_handle(((struct rank *)owner)->channel.rank, handle);
    check(message != NULL && !message->there, "what was received?", handle);
    message->there = true;
    note(owner, RECEIVED, -1, handle, 0);
}
static void withdrawn(void *owner, uint64_t handle) { note(owner, TAKEN_BACK, -1, handle, 0); }
static void bye(void *owner, int peer) { note(owner, BYE, peer, 0, 0); }
static void lost(void *owner, int peer) {
    (void)owner;
    fail("a rank is said to have gone mad", (uint64_t)peer);
}
static void release(void *owner, void *memory) {
    (void)owner;
    give_back(memory);
}

static const struct pc_channel_up up = {came,      sent, cancelled, received,
                                        withdrawn, bye,  lost,      release};
#endif
