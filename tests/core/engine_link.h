/* The link of engine_random.c: it does all that link.h allows, when and how it likes. */
#ifndef PYCOLL_ENGINE_LINK_H
#define PYCOLL_ENGINE_LINK_H

#include "engine_world.h"

static void put(struct flight *flight, size_t portion) {
    unsigned char *place = flight->accepted ? flight->into : flight->copy;
    if (flight->where == PC_COMING) {
        for (size_t end = flight->filled + portion; flight->filled < end; flight->filled++)
            place[flight->filled] = byte_of(flight->number, flight->filled);
        return;
    }
    check(flight->sending, "the link reads memory of a send that is over", flight->number);
    for (size_t end = flight->filled + portion; flight->filled < end; flight->filled++) {
        size_t offset = flight->filled, part = 0;
        while (offset >= flight->parts[part].iov_len)
            offset -= flight->parts[part++].iov_len;
        place[flight->filled] = ((unsigned char *)flight->parts[part].iov_base)[offset];
    }
}

static void touch(const unsigned char *memory, size_t nbytes) {
    for (uint32_t number = 0; number < num_receives; number++)
        if (receives[number].memory == memory && receives[number].touched < nbytes)
            receives[number].touched = nbytes;
}

/* The link knows the message no more. */
static void leave_message(struct flight *flight) {
    check(flight->known, "a message that its link does not know any more is given to it",
          flight->number);
    flight->known = false;
    flight->message = NULL;
    if (flight->copy != NULL)
        poison_and_free(flight->copy, flight->nbytes + 1);
    flight->copy = NULL;
}

static int test_send(struct pc_link *link, struct pc_send *send, const void *header,
                     size_t header_nbytes, enum pc_way way) {
    struct flight *flight = send->owner;
    (void)link;
    check(header_nbytes == flight->header_nbytes &&
              memcmp(header, flight->header, header_nbytes) == 0,
          "another header is sent", flight->number);
    check(send->nbytes == flight->nbytes, "another length is sent", flight->number);
    if (scarce && chance(10))
        return -ENOMEM;
    flight->on_wire = true;
    flight->where = PC_WAITING;
    if (way != PC_OFFER && flight->nbytes <= SMALL)
        flight->where = chance(50) ? PC_PASSING : PC_KEPT;
    else if (way == PC_MAY_PUSH)
        flight->where = PC_COMING;
    if (flight->where != PC_WAITING)
        flight->copy = malloc(flight->nbytes + 1);
    if (flight->where == PC_PASSING || flight->where == PC_KEPT)
        for (size_t offset = 0; offset < flight->nbytes; offset++)
            flight->copy[offset] = byte_of(flight->number, offset);
    if (flight->where == PC_COMING && chance(50))
        flight->sent_due = true;
    return flight->where == PC_WAITING || flight->sent_due ? PC_UNDER_WAY : PC_SENT;
}

static bool test_stop(struct pc_link *link, struct pc_send *send) {
    struct flight *flight = send->owner;
    (void)link;
    return !flight->sent_due && !flight->answered && chance(80);
}

static void test_take_back(struct pc_link *link, struct pc_send *send) {
    struct flight *flight = send->owner;
    (void)link;
    flight->taken_back = flight->where == PC_WAITING && !flight->answered;
    flight->sent_due = false;
    if (flight->taken_back && flight->on_wire && !flight->announcing && chance(30))
        flight->on_wire = false, flight->gone = true; /* nobody ever hears of it */
}

static int test_accept(struct pc_link *link, struct pc_message *message, void *into) {
    struct flight *flight = flight_of(message);
    (void)link;
    check(flight->known || flight->on_wire, "a message is accepted that the link does not know",
          flight->number);
    check(!flight->accepted && flight->where >= PC_COMING, "a message is accepted twice",
          flight->number);
    check(message->token[0] == flight->number && message->token[3] == 77,
          "a token is not the link's", flight->number);
    if (scarce && chance(5))
        return -ENOMEM;
    if (flight->taken_back && chance(50)) {
        flight->known = flight->gone = true;
        flight->on_wire = false;
        leave_message(flight);
        counts[WITHDRAWN]++;
        return PC_WITHDRAWN;
    }
    flight->known = true;
    flight->on_wire = false;
    flight->message = message;
    if (flight->where == PC_COMING && flight->filled > 0)
        memcpy(into, flight->copy, flight->filled);
    flight->into = into;
    touch(into, flight->nbytes);
    flight->accepted = true;
    bool may_go_on = !flight->severed && !flight->taken_back;
    if (may_go_on && (flight->filled == flight->nbytes ? flight->where == PC_COMING : chance(20))) {
        put(flight, flight->nbytes - flight->filled);
        if (flight->where == PC_WAITING)
            flight->answered = flight->sent_due = true;
        leave_message(flight);
        return PC_RECEIVED;
    }
    return PC_UNDER_WAY;
}

/* The receiver wants nothing more of a message; its sender is told so. */
static void discard(struct flight *flight) {
    if (flight->where == PC_WAITING && !flight->severed && !flight->taken_back)
        flight->answered = flight->sent_due = true;
    flight->released = true;
    leave_message(flight);
}

static void test_release(struct pc_link *link, struct pc_message *message) {
    struct flight *flight = flight_of(message);
    (void)link;
    check(!flight->accepted, "an accepted message is released", flight->number);
    if (flight->on_wire) { /* while it is being told */
        flight->on_wire = false;
        flight->known = true;
    }
    discard(flight);
}

static void test_give_up(struct pc_link *link, struct pc_message *message) {
    struct flight *flight = flight_of(message);
    (void)link;
    check(flight->accepted, "a message is given up that was not accepted", flight->number);
    discard(flight);
}

static bool test_redirect(struct pc_link *link, struct pc_message *message, void *into) {
    struct flight *flight = flight_of(message);
    (void)link;
    check(flight->known && flight->accepted, "a message is redirected that is not being read",
          flight->number);
    counts[REDIRECTED]++;
    if (flight->received_due && chance(50)) {
        leave_message(flight);
        return false;
    }
    memcpy(into, flight->into, flight->filled);
    touch(into, flight->nbytes);
    flight->into = into;
    return true;
}

static void test_forget(struct pc_link *link, int peer) {
    int me = (int)((struct rank *)(void *)((char *)link - offsetof(struct rank, link)) - ranks);
    for (uint32_t number = 0; number < num_flights; number++) {
        struct flight *flight = &flights[number];
        if (flight->source == me && flight->dest == peer) {
            flight->severed = true;
            flight->sent_due = false;
        } else if (flight->source == peer && flight->dest == me) {
            flight->severed = true;
            if (flight->announcing &&
                flight->on_wire) { /* a callback forgets the peer whose message it is told */
                flight->gone = flight->where >= PC_COMING;
                flight->on_wire = !flight->gone;
                continue;
            }
            flight->on_wire = false;
            if (flight->known && flight->where != PC_KEPT) {
                flight->gone = true;
                leave_message(flight);
            }
        }
    }
}

static const struct pc_link_ops test_ops = {test_send,     test_stop,    test_take_back,
                                            test_accept,   test_release, test_give_up,
                                            test_redirect, test_forget};

/* Has a context dropped what came for it, as it should? */
static void check_dropped(struct flight *flight, bool closes) {
    if (flight->source == flight->dest || flight->gone || flight->severed || !flight->arrival)
        return;
    if (flight->where == PC_WAITING && !closes && !flight->accepted) {
        check(!flight->released, "a sender is answered though the context is broken",
              flight->number);
        counts[ABANDONED]++;
        return;
    }
    check(!flight->known, "a message was not dropped", flight->number);
}

static void announce(struct flight *flight) {
    struct rank *rank = &ranks[flight->dest];
    unsigned char *header = malloc(flight->header_nbytes); /* good for the call only */
    memcpy(header, flight->header, flight->header_nbytes);
    size_t first = below(flight->nbytes + 1);
    struct iovec parts[2] = {{flight->copy, first}, {flight->copy + first, flight->nbytes - first}};
    struct pc_incoming incoming = {.peer = flight->source,
                                   .header = header,
                                   .header_nbytes = flight->header_nbytes,
                                   .where = flight->where,
                                   .parts = flight->where == PC_PASSING ? parts : NULL,
                                   .num_parts = flight->where == PC_PASSING ? 2 : 0,
                                   .payload = flight->where == PC_KEPT ? flight->copy : NULL,
                                   .nbytes = flight->nbytes,
                                   .token = {flight->number, 0, 0, 77}};
    struct pc_message *message;
    enum openness openness = rank->openness[flight->ident];
    bool is_remembered = rank->remembered[flight->ident];
    flight->arrival = ++order;
    flight->announcing = true;
    int error = pc_arrived(&rank->engine, &rank->link, &incoming, &message);
    free(header);
    flight->announcing = false;
    if (error != 0) {
        check(error == -ENOBUFS || (scarce && error == -ENOMEM), "a message is not taken",
              flight->number);
        flight->arrival = 0;
        return;
    }
    if (openness == NEVER || (openness == CLOSED && !is_remembered))
        counts[UNOPENED]++;
    if (flight->on_wire) { /* it was neither accepted nor released */
        flight->on_wire = false;
        flight->known = true;
        flight->message = message;
        check((message == NULL) == (flight->where == PC_PASSING),
              "the link is told the wrong message", flight->number);
        if (message == NULL)
            leave_message(flight);
    }
    if (openness == BROKEN || (openness == CLOSED && is_remembered)) {
        flight->dropped = true;
        check_dropped(flight, openness == CLOSED);
    }
}

/* One thing that a link may do now. */
static bool progress(void) {
    if (num_flights == 0)
        return false;
    uint32_t start = (uint32_t)below(num_flights);
    for (uint32_t turn = 0; turn < num_flights; turn++) {
        struct flight *flight = &flights[(start + turn) % num_flights];
        struct rank *rank = &ranks[flight->dest];
        if (flight->sent_due && (quiet || chance(30))) {
            flight->sent_due = false;
            if (flight->sending && flight->send.context != NULL)
                pc_sent(&ranks[flight->source].engine, &flight->send);
            return true;
        }
        if (flight->severed || (!quiet && chance(50)))
            continue;
        if (flight->on_wire) {
            for (uint32_t other = 0; other < flight->number; other++) /* the first of its wire */
                if (flights[other].on_wire && flights[other].source == flight->source &&
                    flights[other].dest == flight->dest && !flights[other].severed) {
                    flight = &flights[other];
                    break;
                }
            announce(flight);
            if (!flight->on_wire)
                return true;
            continue;
        }
        if (!flight->known)
            continue;
        if (flight->taken_back) {
            struct pc_message *message = flight->message;
            flight->gone = true;
            counts[WITHDRAWN]++;
            counts[POSTED_AGAIN] += message->taker != NULL && !message->taker->ask;
            leave_message(flight);
            pc_withdrawn(&rank->engine, message);
            return true;
        }
        if (flight->received_due || (flight->where == PC_COMING && !flight->accepted &&
                                     flight->filled == flight->nbytes)) {
            flight->received_due = false;
            if (flight->accepted) {
                struct pc_message *message = flight->message;
                leave_message(flight);
                pc_received(&rank->engine, message);
            } else {
                flight->where = PC_KEPT;
                pc_kept(&rank->engine, flight->message, flight->copy);
            }
            return true;
        }
        if (flight->accepted || (flight->where == PC_COMING && flight->filled < flight->nbytes)) {
            size_t rest = flight->nbytes - flight->filled;
            put(flight, chance(20) ? rest : below(rest / 2 + 2) % (rest + 1));
            if (flight->filled < flight->nbytes)
                return true;
            if (flight->accepted)
                flight->received_due = true;
            if (flight->accepted && flight->where == PC_WAITING)
                flight->answered = flight->sent_due = true;
            return true;
        }
    }
    return false;
}
#endif
