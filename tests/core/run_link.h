/* The ranks of run_random.c, what is counted, and the link that joins their engines in one
   thread, as nasty as link.h allows.

   It buffers, keeps, pushes and offers at random; moves payloads in random portions, and reads the
   memory of a sender until it says that the send is over; tells late or at once; says that there is
   no memory. The messages of one sender come to one receiver in their order, those of different
   ones as it happens. */
#ifndef PYCOLL_RUN_LINK_H
#define PYCOLL_RUN_LINK_H

#include "engine_hooks.h"

#include "engine/engine.h"

#undef malloc
#undef calloc
#undef free
#include <errno.h>
#include <stdio.h>
#include <string.h>

#define RANKS 5
#define SMALL 100

static bool quiet; /* links do not dawdle, and callbacks do nothing */

enum count {
    CALLS, EARLY, SEGMENTS, IN_PLACE, IN_REVERSE, ASKED, RUNS_FAILED, RUNS_CANCELLED, REFUSED,
    OFFERED, OTHER_CALL, OTHER_EARLY, STRAY, FORGOTTEN, BROKEN_CONTEXTS, CLOSED_CONTEXTS,
    WITHOUT_MEMORY, WITHDRAWN, ABANDONED, REDIRECTED, MOVED, UNOPENED, GIVEN_UP, TAKEN_BACK,
    NONSENSE, FROM_CALLBACKS, ENDED_PENDING, ENDED_STARTING, SENT_AGAIN, HERE, NO_VALUE, EXTERNAL,
    GROWN, ASKED_REDUCTIONS, LENT_TO_RUNS, CLEAN_WORLDS, COUNTS
};
static const char *const names[] = {
    "calls", "early messages", "segments", "in place", "in reverse", "asked", "failed runs",
    "cancelled runs", "refused", "offered", "of another call", "early of another call", "stray",
    "forgotten", "broken", "closed", "without memory", "withdrawn", "abandoned", "redirected",
    "moved", "unopened", "given up", "taken back", "nonsense", "from callbacks",
    "closed before told", "closed at the start", "sent again", "here though its sender is gone",
    "without a value", "external steps", "grown", "reductions asked for", "offered to runs",
    "clean worlds"
};
static uint64_t counts[COUNTS];

#define PERCENT_REFUSED 10
#include "scarce_memory.h"

struct rank {
    struct pc_engine engine;
    struct pc_link self, link, *links[RANKS];
};

static struct rank ranks[RANKS];

/* --- messages --------------------------------------------------------------------------------- */

/* One message. It is freed with the world. */
struct flight {
    int source, dest;
    uint64_t number;
    unsigned char *header;
    size_t header_nbytes, nbytes;
    enum pc_where where;
    struct pc_send *send;  /* while its memory is used */
    unsigned char *copy;   /* of what is not at the sender any more */
    unsigned char *kept;   /* at the receiver, while nobody has accepted it */
    struct pc_message *message;
    bool on_wire, announcing, known, accepted, severed, taken_back, sent_due, received_due,
        answered, released;
    unsigned char *into;
    size_t filled;
    bool arrived; /* the receiver's engine has taken it over */
    bool is_lost; /* its receiver cannot have it any more, or had no memory to hand it on */
    bool is_dropped; /* a context drops it just now */
    int times_other; /* it was given to the caller */
};

static struct flight **flights;
static size_t num_flights, room_for_flights;
/* All flights before this one are over. */
static size_t first_flight;

/* Copy a part of a payload to where it goes. */
static void read_payload(const struct flight *flight, size_t offset, size_t nbytes,
                         unsigned char *into) {
    if (flight->copy != NULL) {
        memcpy(into, flight->copy + offset, nbytes);
        return;
    }
    check(flight->send != NULL || nbytes == 0, "the link reads memory of a send that is over",
          flight->number);
    for (size_t end = offset + nbytes; offset < end;) {
        const struct iovec *part = flight->send->parts;
        size_t skipped = 0;
        for (; offset >= skipped + part->iov_len; part++)
            skipped += part->iov_len;
        size_t here = skipped + part->iov_len - offset;
        here = here < end - offset ? here : end - offset;
        memcpy(into, (unsigned char *)part->iov_base + (offset - skipped), here);
        into += here;
        offset += here;
    }
}

static unsigned char *copy_payload(const struct flight *flight) {
    unsigned char *copy = malloc(flight->nbytes + 1);
    read_payload(flight, 0, flight->nbytes, copy);
    return copy;
}

static void put(struct flight *flight, size_t portion) {
    read_payload(flight, flight->filled, portion,
                 (flight->accepted ? flight->into : flight->kept) + flight->filled);
    flight->filled += portion;
    if (flight->filled == flight->nbytes && flight->send != NULL)
        flight->answered = flight->sent_due = true;
}

static struct flight *flight_of(const struct pc_message *message) {
    check(message->token[1] == 77, "a token is not the link's", message->token[1]);
    return (struct flight *)(uintptr_t)message->token[0];
}

/* The link knows the message no more. */
static void leave_message(struct flight *flight) {
    check(flight->known, "a message that its link does not know any more is given to it",
          flight->number);
    flight->known = false;
    flight->message = NULL;
    poison_and_free(flight->kept, flight->nbytes + 1);
    flight->kept = NULL;
}

static struct flight *new_flight(int source, const struct pc_send *send, const void *header,
                                 size_t header_nbytes) {
    struct flight *flight = calloc(1, sizeof *flight);
    flight->source = source;
    flight->dest = send->peer;
    flight->header = malloc(header_nbytes);
    memcpy(flight->header, header, header_nbytes);
    flight->header_nbytes = header_nbytes;
    flight->nbytes = send->nbytes;
    if (num_flights == room_for_flights) {
        room_for_flights = 2 * room_for_flights + 64;
        flights = realloc(flights, room_for_flights * sizeof(struct flight *));
    }
    flight->number = num_flights;
    flights[num_flights++] = flight;
    return flight;
}

static void free_flights(void) {
    for (size_t number = 0; number < num_flights; number++) {
        free(flights[number]->header);
        free(flights[number]->copy);
        free(flights[number]->kept);
        free(flights[number]);
    }
    num_flights = first_flight = 0;
}

/* --- what the engine calls -------------------------------------------------------------------- */

static int test_send(struct pc_link *link, struct pc_send *send, const void *header,
                     size_t header_nbytes, enum pc_way way) {
    int me = (int)((struct rank *)(void *)((char *)link - offsetof(struct rank, link)) - ranks);
    if (scarce && chance(5))
        return -ENOMEM;
    struct flight *flight = new_flight(me, send, header, header_nbytes);
    flight->on_wire = true;
    flight->severed = ranks[flight->dest].engine.gone[me] != 0; /* it has closed its connection */
    flight->send = send;
    flight->where = PC_WAITING;
    if (way != PC_OFFER && flight->nbytes <= SMALL && chance(75))
        flight->where = chance(50) ? PC_PASSING : PC_KEPT;
    else if (way == PC_MAY_PUSH && chance(50))
        flight->where = PC_COMING;
    send->token[0] = (uint64_t)(uintptr_t)flight;
    if (flight->where == PC_WAITING || chance(50))
        return PC_UNDER_WAY;
    flight->copy = copy_payload(flight);
    flight->send = NULL;
    return PC_SENT;
}

static bool test_stop(struct pc_link *link, struct pc_send *send) {
    struct flight *flight = (struct flight *)(uintptr_t)send->token[0];
    (void)link;
    return !flight->sent_due && !flight->answered && chance(80);
}

static void test_take_back(struct pc_link *link, struct pc_send *send) {
    struct flight *flight = (struct flight *)(uintptr_t)send->token[0];
    (void)link;
    if (flight->send == NULL)
        return;
    if (flight->where == PC_WAITING)
        flight->taken_back = !flight->answered;
    else if (!flight->severed && flight->copy == NULL)
        flight->copy = copy_payload(flight);
    flight->send = NULL;
    flight->sent_due = false;
    if (flight->taken_back && flight->on_wire && !flight->announcing && chance(30))
        flight->on_wire = false; /* nobody ever hears of it */
}

static int test_accept(struct pc_link *link, struct pc_message *message, void *into) {
    struct flight *flight = flight_of(message);
    (void)link;
    check(flight->known || flight->on_wire, "a message is accepted that the link does not know",
          flight->number);
    check(!flight->accepted && flight->where >= PC_COMING, "a message is accepted twice",
          flight->number);
    if (scarce && chance(5))
        return -ENOMEM;
    flight->known = true;
    flight->on_wire = false;
    if (flight->taken_back && chance(50)) {
        leave_message(flight);
        flight->is_lost = true;
        counts[WITHDRAWN]++;
        return PC_WITHDRAWN;
    }
    flight->message = message;
    if (flight->where == PC_COMING && flight->filled > 0)
        memcpy(into, flight->kept, flight->filled);
    flight->into = into;
    flight->accepted = true;
    bool may_go_on = !flight->severed && !flight->taken_back;
    if (may_go_on && (flight->filled == flight->nbytes ? flight->where == PC_COMING : chance(20))) {
        put(flight, flight->nbytes - flight->filled);
        leave_message(flight);
        return PC_RECEIVED;
    }
    return PC_UNDER_WAY;
}

/* Nobody wants the rest of a message: its sender hears that it is over. */
static void discard(struct flight *flight) {
    if (flight->on_wire) { /* while it is being told */
        flight->on_wire = false;
        flight->known = true;
    }
    if (flight->where != PC_PASSING && !flight->severed && !flight->taken_back &&
        flight->send != NULL)
        flight->answered = flight->sent_due = true;
    flight->released = true;
    leave_message(flight);
}

static void test_release(struct pc_link *link, struct pc_message *message) {
    struct flight *flight = flight_of(message);
    (void)link;
    check(!flight->accepted, "an accepted message is released", flight->number);
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
    flight->into = into;
    return true;
}

static void test_forget(struct pc_link *link, int peer) {
    int me = (int)((struct rank *)(void *)((char *)link - offsetof(struct rank, link)) - ranks);
    for (size_t number = first_flight; number < num_flights; number++) {
        struct flight *flight = flights[number];
        if (flight->source == me && flight->dest == peer) {
            flight->severed = true;
            flight->send = NULL;
            flight->sent_due = false;
        } else if (flight->source == peer && flight->dest == me) {
            flight->severed = true;
            if (flight->announcing &&
                flight->on_wire) { /* a callback forgets the peer whose message it is told */
                flight->on_wire = flight->where < PC_COMING;
                continue;
            }
            flight->on_wire = false;
            flight->is_lost = flight->is_lost || flight->where >= PC_COMING;
            if (flight->known && flight->where != PC_KEPT)
                leave_message(flight);
        }
    }
}

static const struct pc_link_ops test_ops = {test_send,     test_stop,    test_take_back,
                                            test_accept,   test_release, test_give_up,
                                            test_redirect, test_forget};

/* --- progress --------------------------------------------------------------------------------- */

/* What the program does before and after an engine is told a message; `before` says what `after` is
   to know. */
static int before_arrival(struct flight *flight);
static void after_arrival(struct flight *flight, int known, int error);

static void announce(struct flight *flight) {
    struct rank *rank = &ranks[flight->dest];
    unsigned char *header = malloc(flight->header_nbytes); /* good for the call only */
    memcpy(header, flight->header, flight->header_nbytes);
    unsigned char *payload = NULL;
    if (flight->where == PC_PASSING || flight->where == PC_KEPT)
        payload = copy_payload(flight);
    if (flight->where == PC_KEPT)
        flight->kept = payload;
    else if (flight->where == PC_COMING && flight->kept == NULL)
        flight->kept = malloc(flight->nbytes + 1);
    size_t first = below(flight->nbytes + 1);
    struct iovec parts[2] = {{payload, first}, {payload + first, flight->nbytes - first}};
    struct pc_incoming incoming = {.peer = flight->source,
                                   .header = header,
                                   .header_nbytes = flight->header_nbytes,
                                   .where = flight->where,
                                   .parts = flight->where == PC_PASSING ? parts : NULL,
                                   .num_parts = flight->where == PC_PASSING ? 2 : 0,
                                   .payload = flight->where == PC_KEPT ? payload : NULL,
                                   .nbytes = flight->nbytes,
                                   .token = {(uint64_t)(uintptr_t)flight, 77, 0, 0}};
    int known = before_arrival(flight);
    struct pc_message *message;
    flight->announcing = flight->arrived = true;
    int error = pc_arrived(&rank->engine, &rank->link, &incoming, &message);
    flight->announcing = false;
    flight->arrived = error == 0;
    free(header);
    if (flight->where == PC_PASSING)
        poison_and_free(payload, flight->nbytes + 1);
    if (error != 0) {
        if (flight->where == PC_KEPT) {
            free(payload);
            flight->kept = NULL;
        }
    } else {
        if (flight->where <= PC_KEPT && flight->send != NULL)
            flight->answered = flight->sent_due = true;
        if (flight->on_wire) { /* it was neither accepted nor released */
            flight->on_wire = false;
            flight->known = true;
            flight->message = message;
            check((message == NULL) == (flight->where == PC_PASSING),
                  "the link is told the wrong message", flight->number);
            if (message == NULL)
                leave_message(flight);
        }
    }
    after_arrival(flight, known, error);
}

static bool is_over(const struct flight *flight) {
    return !flight->known && !flight->sent_due && (!flight->on_wire || flight->severed) &&
           flight->send == NULL;
}

static struct flight *first_of_wire(struct flight *flight) {
    for (size_t number = first_flight; number < flight->number; number++) {
        struct flight *each = flights[number];
        if (each->on_wire && each->source == flight->source && each->dest == flight->dest &&
            !each->severed)
            return each;
    }
    return flight;
}

/* One thing that the link may do for a message. False: there is none. */
static bool move_on(struct flight *flight) {
    struct rank *rank = &ranks[flight->dest];
    struct pc_message *message = flight->message;
    if (flight->sent_due && (quiet || chance(30))) {
        struct pc_send *send = flight->send;
        flight->sent_due = false;
        flight->send = NULL;
        pc_sent(&ranks[flight->source].engine, send);
        return true;
    }
    if (flight->severed || (!quiet && chance(50)))
        return false;
    if (flight->on_wire) {
        flight = first_of_wire(flight);
        announce(flight);
        return flight->arrived;
    }
    if (!flight->known)
        return false;
    if (flight->taken_back) {
        counts[WITHDRAWN]++;
        flight->is_lost = true;
        leave_message(flight);
        pc_withdrawn(&rank->engine, message);
        return true;
    }
    if (flight->where == PC_COMING && !flight->accepted && flight->filled == flight->nbytes) {
        flight->where = PC_KEPT;
        pc_kept(&rank->engine, message, flight->kept);
        return true;
    }
    if (flight->received_due) {
        flight->received_due = false;
        leave_message(flight);
        pc_received(&rank->engine, message);
        return true;
    }
    if (flight->where == PC_KEPT && !quiet && chance(5)) {
        unsigned char *moved = malloc(flight->nbytes + 1);
        memcpy(moved, flight->kept, flight->nbytes);
        poison_and_free(flight->kept, flight->nbytes + 1);
        flight->kept = moved;
        counts[MOVED]++;
        pc_kept(&rank->engine, message, moved);
        return true;
    }
    if (!flight->accepted && flight->where != PC_COMING)
        return false;
    size_t rest = flight->nbytes - flight->filled;
    put(flight, chance(20) ? rest : below(rest / 2 + 2) % (rest + 1));
    if (flight->filled == flight->nbytes && flight->accepted)
        flight->received_due = true;
    return true;
}

/* One thing that the link may do now. False: there is none, or it dawdles. */
static bool progress(void) {
    while (first_flight < num_flights && is_over(flights[first_flight]))
        first_flight++;
    size_t count = num_flights - first_flight;
    if (count == 0)
        return false;
    size_t start = below(count);
    for (size_t turn = 0; turn < count; turn++)
        if (move_on(flights[first_flight + (start + turn) % count]))
            return true;
    return false;
}

#endif
