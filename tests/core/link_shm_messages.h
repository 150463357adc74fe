/* The worlds of link_shm_random.c: ranks, messages as both ends know them, how they are sent, and
   in which order they must be received. */
#ifndef PYCOLL_LINK_SHM_MESSAGES_H
#define PYCOLL_LINK_SHM_MESSAGES_H

#include "channel_hooks.h"

#include "engine/link_shm.h"
#include "random_worlds.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#define RANKS 3
#define IDENTS 2
#define STEPS 1500
#define MOST 1000
#define LARGEST 200000

enum count {
    EAGER, OFFERED, BUFFERED, RECEIVED, HELD, PARKED, GIVEN_UP, CANCELLED, BROKEN, FORGOTTEN,
    NO_ROOM, FINISHED, TAKEN_BACK, STARTED_AGAIN, DROPPED, STOPPED, ENDED_STOPPED, POSTED, TAKEN,
    COUNTS
};
static const char *const names[] = {
    "eager", "offered", "buffered", "received", "held", "parked", "given up", "cancelled", "broken",
    "forgotten", "without room", "finished", "taken back", "started again", "dropped",
    "stopped for a while", "ended when stopped", "posted directly", "taken directly"
};
static uint64_t counts[COUNTS];

static unsigned char byte_of(uint32_t number, size_t offset) {
    if (offset < 4)
        return (unsigned char)(number >> 8 * offset);
    return (unsigned char)(number * 131 + offset * 7 + offset / 251);
}

struct message {
    int source, dest, ident;
    int64_t tag;
    unsigned char *memory;
    struct iovec parts[3];
    struct pc_send send;
    bool under_way, received, cancelled, dropped, stopped;
};

struct receive {
    struct pc_receive it;
    int rank, ident;
    unsigned char *memory;
    bool live, held;
    uint64_t order;
    uint32_t had; /* the message that it held last */
};

struct rank {
    pc_host host;
    struct pc_engine engine;
    struct pc_link self, *links[RANKS];
    struct pc_link_shm shm;
    struct pc_context *contexts[IDENTS];
    bool broken[IDENTS], dead, finished[RANKS];
};

static struct rank ranks[RANKS]; /* by rank in the job */
static struct message messages[MOST];
static struct receive receives[MOST];
static uint32_t num_messages, num_receives;
static uint64_t order; /* of the last receive that is not started again */
static bool quiet; /* nothing new is begun */
static const int in_job[RANKS] = {2, 0, 1}; /* by local rank */

static void send_over(struct message *message) {
    check(message->under_way, "a send ends twice", (uint64_t)(message - messages));
    message->under_way = false;
    memset(message->memory, 0xEE, message->send.nbytes);
    free(message->memory);
}

static void send_ended(struct pc_send *send) {
    const struct message *message = send->owner;
    check(!message->stopped || send->status != 0, "a send that was stopped has ended well",
          (uint64_t)(message - messages));
    counts[ENDED_STOPPED] += send->status == PC_STOPPED;
    send_over(send->owner);
}

static void start_send(int rank) {
    int peer = (int)below(RANKS), ident = (int)below(IDENTS);
    if (num_messages == MOST || peer == rank || ranks[rank].contexts[ident] == NULL ||
        ranks[peer].dead)
        return;
    uint32_t number = num_messages++;
    struct message *message = &messages[number];
    size_t nbytes = 4 + below(below(2) ? 100 : below(2) ? 15000 : LARGEST - 4), from = 0;
    *message =
        (struct message){.source = rank, .dest = peer, .ident = ident, .tag = (int64_t)below(3)};
    message->memory = malloc(nbytes);
    for (size_t offset = 0; offset < nbytes; offset++)
        message->memory[offset] = byte_of(number, offset);
    size_t num_parts = 1 + below(3);
    for (size_t part = 0; part < num_parts; part++) {
        size_t length = part + 1 == num_parts ? nbytes - from : below(nbytes - from + 1);
        message->parts[part] = (struct iovec){message->memory + from, length};
        from += length;
    }
    unsigned char header[PC_P2P_NBYTES + 4 + 3000] = {0};
    pc_p2p_header(header, (uint64_t)ident, message->tag, 0);
    memcpy(header + PC_P2P_NBYTES, &number, 4);
    message->send = (struct pc_send){.peer = peer,
                                     .parts = message->parts,
                                     .num_parts = num_parts,
                                     .ended = send_ended,
                                     .owner = message};
    message->under_way = true;
    size_t header_nbytes = PC_P2P_NBYTES + 4 + (below(10) == 0 ? below(3000) : 0);
    if (num_parts == 1 && below(2) == 0 && !ranks[rank].broken[ident] &&
        pc_link_shm_post(&ranks[rank].shm, peer, header, header_nbytes, message->parts)) {
        counts[POSTED]++;
        message->send.nbytes = nbytes;
        send_over(message);
    } else if (pc_send_start(ranks[rank].contexts[ident], &message->send, header, header_nbytes,
                             (enum pc_way)below(3)) == PC_SENT) {
        message->cancelled = message->send.status != 0;
        counts[EAGER] += message->send.status == 0;
        message->send.nbytes = nbytes;
        send_over(message);
    } else {
        counts[OFFERED]++;
    }
}

static uint32_t number_in(const struct pc_unexpected *message) {
    uint32_t number;
    memcpy(&number, ((const struct pc_message *)message)->header + PC_P2P_NBYTES, 4);
    check(number < num_messages, "there is no such message", number);
    return number;
}

static bool wants(const struct pc_queued *posted, const struct message *message) {
    return (posted->source == PC_ANY || posted->source == message->source) &&
           (posted->tag == PC_ANY || posted->tag == message->tag);
}

/* A receive has just been given a message: none that waits was before, and no receive that
   waits. */
static void check_held(const struct receive *receive, uint32_t number) {
    const struct message *message = &messages[number];
    const struct pc_matching *matching = &receive->it.context->matching;
    const struct pc_queued *posted = &receive->it.posted.queued;
    check(message->dest == receive->rank && message->ident == receive->ident &&
              wants(posted, message) && !message->received && !message->dropped,
          "a message is held that should not", number);
    const struct pc_unexpected *each = pc_match_first_message(matching);
    for (; each != NULL; each = pc_match_next_message(each)) {
        const struct message *other = &messages[number_in(each)];
        if (wants(posted, other))
            check(each->queued.number > receive->it.message->match.queued.number &&
                      (other->source != message->source || other > message),
                  "a receive takes a message before an older one", number);
    }
    const struct pc_posted *waits = pc_match_first_posted(matching);
    for (; waits != NULL; waits = pc_match_next_posted(waits))
        if (wants(&waits->queued, message))
            check(((const struct receive *)((const struct pc_receive *)waits)->owner)->order >
                      receive->order,
                  "a message goes past a receive that was before", number);
}
#endif
