/* What the ranks of tcp_random.c do to a message: its sender, and its receiver. */
#ifndef PYCOLL_TCP_CALLS_H
#define PYCOLL_TCP_CALLS_H

#include "tcp_messages.h"

/* --- what the sender does --------------------------------------------------------------------- */

static void send_one(int source) {
    if (num_messages == MOST_MESSAGES || ranks[source].closed)
        return;
    uint64_t number = num_messages++;
    struct message *message = &messages[number];
    *message = (struct message){.source = source,
                                .dest = (int)((uint64_t)(source + 1) + below(RANKS - 1)) % RANKS};
    size_t most[] = {0, 40, 250, 251, 2000, MOST_NBYTES};
    size_t limit = most[below(6)];
    message->nbytes = limit > 1 ? 1 + below(limit) : 0;
    message->header_nbytes = sizeof number + below(8) * below(28);
    message->num_parts = below(8) == 0 ? 1 + below(70) : below(5);
    if (message->nbytes > 0 && message->num_parts == 0)
        message->num_parts = 1;
    struct pc_tcp_send *send = calloc(1, sizeof *send);
    struct iovec *parts = malloc((message->num_parts + 1) * sizeof *parts);
    size_t offset = 0;
    for (size_t part = 0; part < message->num_parts; part++) {
        size_t rest = message->nbytes - offset;
        size_t length = part + 1 == message->num_parts ? rest : below(rest / 2 + 1);
        unsigned char *memory = malloc(length + (length == 0));
        for (size_t index = 0; index < length; index++)
            memory[index] = byte_of(number, offset + index);
        offset += length;
        message->parts[part] = memory;
        message->lengths[part] = length;
        parts[part] = (struct iovec){memory, length};
    }
    *send = (struct pc_tcp_send){.peer = message->dest, .nbytes = message->nbytes, .parts = parts,
                                 .num_parts = message->num_parts, .owner = message};
    unsigned char header[PC_TCP_LONGEST_HEADER];
    memcpy(header, &number, sizeof number);
    for (size_t index = sizeof number; index < message->header_nbytes; index++)
        header[index] = byte_of(number + 1, index);
    num_owners++;
    enum way way = (enum way)below(3);
    struct pc_tcp *tcp = &ranks[source].tcp;
    int64_t id = way == WAY_OFFERED
                     ? pc_tcp_offer(tcp, send, header, message->header_nbytes)
                     : pc_tcp_send(tcp, send, header, message->header_nbytes, way == WAY_PUSHED);
    check(id >= 0, "there is no memory", number);
    message->started = true;
    message->id = (uint64_t)id;
    message->sent = id == 0;
    check(id == 0 || way != WAY_OFFERED || !message->released, "an offer is done at once", number);
    check(id != 0 || message->released, "what is done keeps its memory", number);
    counts[ALL]++;
}

/* A message whose sender still knows it; NULL: the one that was drawn is none. */
static struct message *any_message(void) {
    return num_messages > 0 ? &messages[below(num_messages)] : NULL;
}

static void take_back_one(void) {
    struct message *message = any_message();
    if (message == NULL || message->sent || message->taken_back ||
        ranks[message->source].forgotten[message->dest] || ranks[message->source].closed)
        return;
    struct pc_tcp *tcp = &ranks[message->source].tcp;
    /* To ask is the first step; one that is at its end may be given up all the same. */
    message->stopped = pc_tcp_stop(tcp, message->id) || message->stopped;
    if (message->stopped || below(2)) {
        pc_tcp_take_back(tcp, message->id);
        message->taken_back = true;
        check(message->released, "what was taken back keeps its memory",
              (uint64_t)(message - messages));
        counts[TAKEN_BACK]++;
    }
}

/* --- what the receiver does ------------------------------------------------------------------- */

static struct place *make_place(size_t nbytes) {
    struct place *place = malloc(sizeof *place);
    *place = (struct place){malloc(nbytes + 1), nbytes, false};
    memset(place->memory, POISON, nbytes);
    num_owners++;
    return place;
}

/* Give back a receive's memory. */
static void close_place(struct message *message) {
    struct place *place = message->place;
    message->place = NULL;
    if (place == NULL)
        return;
    check(place->released, "memory is kept for a receive that has ended",
          (uint64_t)(message - messages));
    bury(place->memory, place->nbytes);
    free(place);
}

static void finish(struct message *message) {
    uint64_t number = (uint64_t)(message - messages);
    check(!message->complete && !message->given_up, "a receive ends twice", number);
    message->complete = true;
    for (size_t offset = 0; offset < message->nbytes; offset++)
        check(message->place->memory[offset] == byte_of(number, offset), "a payload is wrong",
              number);
    close_place(message);
    counts[COMPLETE]++;
}

static void accept_one(struct message *message) {
    struct rank *rank = &ranks[message->dest];
    if (!message->arrived || message->accepted || message->given_up || message->withdrawn ||
        message->complete || rank->closed)
        return;
    bool is_gone = rank->forgotten[message->source];
    message->accepted = true;
    message->place = make_place(message->nbytes);
    if (message->is_pushed) {
        if (pc_tcp_place(&rank->tcp, message->handle, message->place->memory, message->place)) {
            message->place->released = true;
            num_owners--;
            finish(message);
        } else if (is_gone) {
            message->failed = message->place->released = true;
            num_owners--;
            close_place(message);
        }
        return;
    }
    if (is_gone) {
        message->failed = message->place->released = true;
        num_owners--;
        close_place(message);
        return;
    }
    int64_t handle = pc_tcp_accept(&rank->tcp, message->source, message->offer,
                                   message->place->memory, message->nbytes, message->place);
    check(handle > 0, "this cannot be accepted", message->nbytes);
    message->handle = (uint64_t)handle;
}

static void drop_one(struct message *message) {
    struct rank *rank = &ranks[message->dest];
    if (!message->arrived || message->accepted || message->given_up || message->withdrawn ||
        message->complete || rank->closed)
        return;
    message->given_up = true;
    if (message->is_pushed)
        pc_tcp_give_up(&rank->tcp, message->handle);
    else
        pc_tcp_drop(&rank->tcp, message->source, message->offer);
    counts[GIVEN_UP]++;
}

static bool is_coming(const struct message *message) {
    return message->accepted && !message->complete && !message->given_up && !message->withdrawn &&
           !message->failed && !ranks[message->dest].closed;
}

static void give_up_one(struct message *message) {
    if (!is_coming(message))
        return;
    pc_tcp_give_up(&ranks[message->dest].tcp, message->handle);
    message->given_up = true;
    close_place(message);
    counts[GIVEN_UP]++;
}

static void redirect_one(struct message *message) {
    if (!is_coming(message))
        return;
    struct place *old = message->place, *new = make_place(message->nbytes);
    if (!pc_tcp_redirect(&ranks[message->dest].tcp, message->handle, new->memory, new))
        fail("there is no such receive", (uint64_t)(message - messages));
    check(old->released, "what was redirected keeps its memory", (uint64_t)(message - messages));
    bury(old->memory, old->nbytes);
    free(old);
    message->place = new;
    counts[REDIRECTED]++;
}
#endif
