/* Random calls of engines (transports/_core/engine) that are joined by a link as nasty as link.h allows, all in one
   thread, so that a seed always does the same.

   The link buffers, keeps, pushes and offers at random, moves payloads in random portions, tells late or at once, says
   that there is no memory, and takes back at any moment. Ranks open contexts late, close and break them early, give up,
   redirect, refuse, probe, ask, and forget each other; callbacks call the engine, too. Some messages are of another kind,
   and are held from the beginning.

   After every step all is compared with a naive model: which messages wait in each context, in the order in which they
   came; that a receive has the first that fits, and a message the first receive that fits; that nothing waits that
   could go on. Every byte is checked, and that nothing is written outside, or after the end (memory is freed at once:
   AddressSanitizer sees who touches it). All ends exactly once, and nothing of the engine's memory is left.

   engine_random WORLDS SEED

   Exits with 3 and a line that names the seed of the world if something is wrong. */
#include "engine_hooks.h"

#include "engine/engine.h"

#undef malloc
#undef calloc
#undef free
#include <errno.h>
#include <stdio.h>
#include <string.h>

#define RANKS 3
#define IDENTS 4
#define OTHERS IDENTS /* stands for the identity of what is of another kind */
#define KIND_OTHER 9
#define STEPS 1200
#define MOST_FLIGHTS 400
#define MOST_STARTED 600
#define MOST_RECEIVES (MOST_STARTED + MOST_FLIGHTS)
#define GUARD 16
#define POISON 0xEE
#define SMALL 100

static uint64_t seed, random_state;
static bool scarce;
static int64_t allocated;
enum count {
    RECEIVED, REFUSED, PROBED, HELD, RETURNED, PARKED, POSTED_AGAIN, FAILED, CANCELLED, WITHDRAWN, WITHOUT_MEMORY,
    UNOPENED, ABANDONED, REDIRECTED, TO_SELF, FROM_CALLBACKS, NONSENSE, OTHER, TAKEN_BACK, DROPPED, TAKEN_OVER,
    COUNTS
};
static const char *const names[] = {
    "received", "refused", "probed", "held", "returned", "parked", "posted again", "failed", "cancelled", "withdrawn",
    "without memory", "unopened", "abandoned", "redirected", "to self", "from callbacks", "nonsense", "of another kind",
    "taken back", "dropped", "taken over"};
static uint64_t counts[COUNTS];

static void check(bool holds, const char *what, uint64_t number) {
    if (holds)
        return;
    fprintf(stderr, "world %llu: %s (%llu)\n", (unsigned long long)seed, what, (unsigned long long)number);
    exit(3);
}

static uint64_t below(uint64_t limit) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (random_state >> 33) % limit;
}

static bool chance(int percent) { return below(100) < (uint64_t)percent; }

static bool is_refused(void) {
    if (!scarce || !chance(30))
        return false;
    counts[WITHOUT_MEMORY]++;
    return true;
}

void *scarce_malloc(size_t nbytes) {
    if (is_refused())
        return NULL;
    allocated++;
    return malloc(nbytes);
}

void *scarce_calloc(size_t count, size_t nbytes) {
    if (is_refused())
        return NULL;
    allocated++;
    return calloc(count, nbytes);
}

void counted_free(void *memory) {
    allocated -= memory != NULL;
    free(memory);
}

/* A payload begins with the number of its message. */
static unsigned char byte_of(uint64_t flight, size_t offset) {
    if (offset < 4)
        return (unsigned char)(flight >> 8 * offset);
    return (unsigned char)((flight * 131 + offset * 7 + offset / 251) % 211); /* never POISON */
}

/* --- the world --------------------------------------------------------------------------------------- */

/* A message, as its sender, the link and the model know it. */
struct flight {
    uint32_t number;
    int source, dest, ident, tag;
    unsigned char form, type;
    unsigned char header[80];
    size_t header_nbytes, nbytes;
    bool is_sync;
    /* The sender's. */
    struct pc_send send;
    unsigned char *memory;
    struct iovec parts[3];
    bool sending;     /* its memory is used */
    int times_ended;
    /* The link's. */
    enum pc_where where;
    unsigned char *copy; /* of what is not at the sender */
    struct pc_message *message;
    bool on_wire, announcing, known, accepted, severed, taken_back, sent_due, received_due, released, answered;
    unsigned char *into;
    size_t filled;
    /* The model's. */
    uint64_t arrival; /* 0: not yet */
    bool consumed, gone, dropped;
};

struct receive {
    struct pc_receive receive;
    int rank, ident;
    unsigned char *memory;
    unsigned char expects[2];
    size_t room, touched; /* of which links may have written so much, for whatever message */
    bool live;
    uint64_t order;
    int64_t last_flight; /* that it held or had read when it was looked at last */
    bool was_told;
};

enum openness { NEVER, OPEN, BROKEN, CLOSED };

struct rank {
    struct pc_engine engine;
    struct pc_link self, link, *links[RANKS];
    struct pc_context *contexts[IDENTS + 1];
    enum openness openness[IDENTS + 1];
    int status[IDENTS + 1];
    bool remembered[IDENTS + 1];
    int closed[2], num_closed;
};

static struct rank ranks[RANKS];
static struct flight flights[MOST_FLIGHTS];
static struct receive receives[MOST_RECEIVES];
static uint32_t num_flights, num_receives;
static uint64_t order;
static bool quiet, acted; /* nothing new is begun; a callback has called the engine in this step */

static uint32_t number_in(const unsigned char *header) {
    uint32_t number;
    memcpy(&number, header + PC_P2P_NBYTES + 1, sizeof number);
    return number;
}

static struct flight *flight_of(const struct pc_message *message) { return &flights[number_in(message->header)]; }

static void poison_and_free(unsigned char *memory, size_t nbytes) {
    memset(memory, POISON, nbytes);
    free(memory);
}

/* --- the link ---------------------------------------------------------------------------------------- */

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
    check(flight->known, "a message that its link does not know any more is given to it", flight->number);
    flight->known = false;
    flight->message = NULL;
    if (flight->copy != NULL)
        poison_and_free(flight->copy, flight->nbytes + 1);
    flight->copy = NULL;
}

static int test_send(struct pc_link *link, struct pc_send *send, const void *header, size_t header_nbytes,
                     enum pc_way way) {
    struct flight *flight = send->owner;
    (void)link;
    check(header_nbytes == flight->header_nbytes && memcmp(header, flight->header, header_nbytes) == 0,
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
    check(flight->known || flight->on_wire, "a message is accepted that the link does not know", flight->number);
    check(!flight->accepted && flight->where >= PC_COMING, "a message is accepted twice", flight->number);
    check(message->token[0] == flight->number && message->token[3] == 77, "a token is not the link's", flight->number);
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

static void test_release(struct pc_link *link, struct pc_message *message) {
    struct flight *flight = flight_of(message);
    (void)link;
    check(!flight->accepted, "an accepted message is released", flight->number);
    if (flight->on_wire) { /* while it is being told */
        flight->on_wire = false;
        flight->known = true;
    }
    if (flight->where == PC_WAITING && !flight->severed && !flight->taken_back)
        flight->answered = flight->sent_due = true;
    flight->released = true;
    leave_message(flight);
}

static void test_give_up(struct pc_link *link, struct pc_message *message) {
    struct flight *flight = flight_of(message);
    (void)link;
    check(flight->accepted, "a message is given up that was not accepted", flight->number);
    if (flight->where == PC_WAITING && !flight->severed && !flight->taken_back)
        flight->answered = flight->sent_due = true;
    flight->released = true;
    leave_message(flight);
}

static bool test_redirect(struct pc_link *link, struct pc_message *message, void *into) {
    struct flight *flight = flight_of(message);
    (void)link;
    check(flight->known && flight->accepted, "a message is redirected that is not being read", flight->number);
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
            if (flight->announcing && flight->on_wire) { /* a callback forgets the peer whose message it is told */
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

static const struct pc_link_ops test_ops = {test_send,    test_stop,    test_take_back, test_accept,
                                            test_release, test_give_up, test_redirect,  test_forget};

/* Has a context dropped what came for it, as it should? */
static void check_dropped(struct flight *flight, bool closes) {
    if (flight->source == flight->dest || flight->gone || flight->severed || !flight->arrival)
        return;
    if (flight->where == PC_WAITING && !closes && !flight->accepted) {
        check(!flight->released, "a sender is answered though the context is broken", flight->number);
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
        check(error == -ENOBUFS || (scarce && error == -ENOMEM), "a message is not taken", flight->number);
        flight->arrival = 0;
        return;
    }
    if (openness == NEVER || (openness == CLOSED && !is_remembered))
        counts[UNOPENED]++;
    if (flight->on_wire) { /* it was neither accepted nor released */
        flight->on_wire = false;
        flight->known = true;
        flight->message = message;
        check((message == NULL) == (flight->where == PC_PASSING), "the link is told the wrong message", flight->number);
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

/* --- what ranks do ----------------------------------------------------------------------------------- */

static void act(int rank);

static bool wants(const struct receive *receive, const struct flight *flight) {
    const struct pc_queued *queued = &receive->receive.posted.queued;
    return flight->dest == receive->rank && flight->ident == receive->ident &&
           (queued->source == PC_ANY || queued->source == flight->source) &&
           (queued->tag == PC_ANY || queued->tag == flight->tag);
}

static bool fits(const struct receive *receive, const struct flight *flight) {
    const struct pc_receive *it = &receive->receive;
    if (it->ask && it->expects_nbytes == 0)
        return true;
    return flight->nbytes <= it->room && (it->expects_nbytes < 1 || receive->expects[0] == flight->form) &&
           (it->expects_nbytes < 2 || receive->expects[1] == flight->type);
}

static bool is_attached(const struct flight *flight) {
    for (uint32_t number = 0; number < num_receives; number++) {
        const struct receive *each = &receives[number];
        if (each->live && each->receive.message != NULL && flight_of(each->receive.message) == flight)
            return true;
    }
    return false;
}

static bool waits(const struct flight *flight) {
    return flight->arrival != 0 && !flight->consumed && !flight->gone && !flight->dropped && !is_attached(flight);
}

/* A receive has this message: it is the first that fits, and no receive that waits was before. */
static void check_order(const struct receive *receive, const struct flight *flight) {
    if (acted)
        return;
    for (uint32_t number = 0; number < num_flights; number++) {
        const struct flight *each = &flights[number];
        if (each->arrival != 0 && each->arrival < flight->arrival && wants(receive, each))
            check(!waits(each), "a receive takes a message before an older one", flight->number);
    }
    for (uint32_t number = 0; number < num_receives; number++) {
        const struct receive *each = &receives[number];
        if (each->live && each->receive.state == PC_RECEIVE_POSTED && each->order < receive->order)
            check(!wants(each, flight), "a message goes past a receive that was before", flight->number);
    }
}

/* What ended in this step, with a message whose order is to be checked. */
static struct {
    struct receive *receive;
    struct flight *flight;
} done[MOST_RECEIVES];
static int num_done;

static void bury(struct receive *receive, size_t written) {
    written = written > receive->touched ? written : receive->touched;
    for (size_t offset = written; offset < receive->room + GUARD; offset++)
        check(receive->memory[offset] == POISON, "memory outside of a message is written", offset);
    poison_and_free(receive->memory, receive->room + GUARD);
    receive->memory = NULL;
}

/* A message so short that it does not say its number: the first that it can be. */
static struct flight *short_flight(const struct receive *receive) {
    const struct pc_receive *it = &receive->receive;
    struct flight *found = NULL;
    if (receive->last_flight >= 0 && !flights[receive->last_flight].gone)
        return &flights[receive->last_flight];
    for (uint32_t number = 0; number < num_flights; number++) {
        struct flight *each = &flights[number];
        if (wants(receive, each) && each->source == it->source && each->tag == it->tag &&
            each->nbytes == it->nbytes && fits(receive, each) && waits(each) &&
            (found == NULL || each->arrival < found->arrival))
            found = each;
    }
    check(found != NULL, "a short message came from nowhere", it->nbytes);
    return found;
}

static void check_status(const struct receive *receive) {
    const struct pc_receive *it = &receive->receive;
    const struct rank *rank = &ranks[receive->rank];
    int status = it->status, source = it->posted.queued.source;
    counts[FAILED]++;
    if (status == -ENOMEM) {
        check(scarce, "there was memory", receive->order);
    } else if (status >= 1000) {
        int peer = status - 1000;
        bool all = true;
        check(rank->engine.gone[peer] == status, "a peer is not gone", receive->order);
        for (int other = 0; other < RANKS; other++)
            all = all && (other == receive->rank || rank->engine.gone[other] != 0);
        check(source == peer || (source == PC_ANY && (all || it->ask)) ||
                  (receive->last_flight >= 0 && flights[receive->last_flight].source == peer),
              "a receive fails with a peer for which it does not wait", receive->order);
    } else {
        check(status == rank->status[receive->ident], "a receive ends for no reason", receive->order);
    }
}

static void start_again(const struct receive *old);

static void told(struct pc_receive *it) {
    struct receive *receive = it->owner;
    check(receive->live, "a receive ends twice", receive->order);
    if (it->state == PC_RECEIVE_HELD) {
        counts[HELD]++;
    } else {
        check(it->state == PC_RECEIVE_ENDED, "a receive that goes on is told", receive->order);
        receive->live = false;
        struct flight *flight = NULL;
        size_t written = 0;
        if (it->posted.peek || it->status == PC_REFUSED) {
            if (it->header != NULL)
                flight = &flights[number_in(it->header)];
            else
                check(scarce || it->status > 0 || it->status == PC_CONTEXT_CLOSED, "there was memory", receive->order);
        }
        if (it->status == PC_REFUSED) {
            counts[REFUSED]++;
            check(!it->posted.peek, "a probe is refused", receive->order);
            check(flight == NULL || !fits(receive, flight), "a message that fits is refused", receive->order);
        } else if (it->status == PC_TAKEN_BACK) {
            counts[TAKEN_BACK]++;
            check(it->ask, "what does not ask waits again", receive->order);
        } else if (it->status != 0) {
            check_status(receive);
        } else if (!it->posted.peek) {
            written = it->nbytes;
            check(written <= receive->room, "too much is written", written);
            if (written < 4)
                flight = short_flight(receive);
            else
                flight = &flights[receive->memory[0] | (receive->memory[1] << 8)];
            check(flight < &flights[num_flights], "a message came from nowhere", written);
            check(fits(receive, flight), "a message is received that does not fit", flight->number);
            check(!flight->consumed, "a message is received twice", flight->number);
            check(!flight->gone, "a message is received that was taken back", flight->number);
            for (size_t offset = 0; offset < written; offset++)
                check(receive->memory[offset] == byte_of(flight->number, offset), "a byte is wrong", flight->number);
            flight->consumed = true;
            counts[RECEIVED]++;
        } else {
            counts[PROBED]++;
        }
        if (flight != NULL) {
            check(it->source == flight->source && it->tag == flight->tag && it->nbytes == flight->nbytes &&
                      wants(receive, flight),
                  "the status of a receive is wrong", flight->number);
            check(it->header == NULL || (it->header_nbytes == flight->header_nbytes &&
                                         memcmp(it->header, flight->header, flight->header_nbytes) == 0),
                  "a header is wrong", flight->number);
            done[num_done].receive = receive;
            done[num_done++].flight = flight;
        }
        counted_free(it->header);
        bury(receive, written);
        if (it->status == PC_TAKEN_BACK && receive->ident != OTHERS)
            start_again(receive);
    }
    if (!quiet && chance(10)) {
        acted = true;
        counts[FROM_CALLBACKS]++;
        act(receive->rank);
    }
}

static void send_over(struct flight *flight) {
    check(flight->sending && flight->times_ended++ == 0, "a send ends twice", flight->number);
    flight->sending = false;
    poison_and_free(flight->memory, flight->nbytes + 1);
}

static void ended(struct pc_send *send) {
    struct flight *flight = send->owner;
    if (send->status == 0 && flight->source != flight->dest)
        check(flight->where != PC_WAITING || flight->answered, "a send is over too early", flight->number);
    if (send->status == 0 && flight->source == flight->dest)
        check(flight->is_sync, "a buffered send was under way", flight->number);
    send_over(flight);
}

static int some_ident(const struct rank *rank, bool or_broken) {
    int ident = (int)below(IDENTS);
    bool works = rank->openness[ident] == OPEN || (or_broken && rank->openness[ident] == BROKEN);
    return works ? ident : -1;
}

static void start_send(int source) {
    struct rank *rank = &ranks[source];
    int ident = chance(10) ? OTHERS : some_ident(rank, chance(20));
    if (ident < 0 || num_flights == MOST_FLIGHTS)
        return;
    struct flight *flight = &flights[num_flights];
    *flight = (struct flight){.number = num_flights++, .source = source, .ident = ident};
    flight->dest = chance(70) ? (source + 1 + (int)below(RANKS - 1)) % RANKS : source;
    flight->tag = (int)below(3);
    flight->form = (unsigned char)below(2);
    flight->type = (unsigned char)below(2);
    flight->nbytes = chance(20) ? below(8) : chance(30) ? below(SMALL) : below(3000);
    flight->header_nbytes = PC_P2P_NBYTES + 5 + (chance(20) ? below(50) : 0);
    pc_p2p_header(flight->header, (uint64_t)ident, flight->tag, flight->form);
    if (ident == OTHERS)
        flight->header[0] = KIND_OTHER;
    flight->header[PC_P2P_NBYTES] = flight->type;
    memcpy(flight->header + PC_P2P_NBYTES + 1, &flight->number, sizeof flight->number);
    for (size_t offset = PC_P2P_NBYTES + 5; offset < flight->header_nbytes; offset++)
        flight->header[offset] = (unsigned char)below(256);
    flight->memory = malloc(flight->nbytes + 1);
    for (size_t offset = 0; offset < flight->nbytes; offset++)
        flight->memory[offset] = byte_of(flight->number, offset);
    size_t first = below(flight->nbytes + 1), second = below(flight->nbytes - first + 1);
    flight->parts[0] = (struct iovec){flight->memory, first};
    flight->parts[1] = (struct iovec){flight->memory + first, second};
    flight->parts[2] = (struct iovec){flight->memory + first + second, flight->nbytes - first - second};
    flight->send = (struct pc_send){
        .peer = flight->dest, .parts = flight->parts, .num_parts = 3, .ended = ended, .owner = flight};
    flight->sending = true;
    enum pc_way way = chance(15) ? PC_OFFER : chance(60) ? PC_BUFFER : PC_MAY_PUSH;
    flight->is_sync = way == PC_OFFER;
    flight->where = PC_PASSING;
    bool is_broken = rank->openness[ident] != OPEN;
    if (flight->source == flight->dest) {
        flight->arrival = ++order;
        counts[TO_SELF]++;
    }
    struct pc_send *send = &flight->send;
    if (pc_send_start(rank->contexts[ident], send, flight->header, flight->header_nbytes, way) == PC_UNDER_WAY)
        return;
    int reason = is_broken ? rank->status[ident] : rank->engine.gone[flight->dest];
    check(send->status == 0 || send->status == reason || (scarce && send->status == -ENOMEM),
          "a send ends for no reason", flight->number);
    check(!is_broken || send->status == reason, "a send works though its context is broken", flight->number);
    if (send->status != 0)
        flight->arrival = 0;
    send_over(flight);
}

static struct receive *new_receive(int number, int ident, uint64_t its_order, bool asks, size_t room) {
    struct receive *receive = &receives[num_receives++];
    *receive = (struct receive){.rank = number, .ident = ident, .last_flight = -1, .live = true, .order = its_order};
    struct pc_receive *it = &receive->receive;
    it->posted.queued.source = it->posted.queued.tag = PC_ANY;
    it->ask = asks;
    receive->room = room;
    receive->memory = malloc(room + GUARD);
    memset(receive->memory, POISON, room + GUARD);
    it->into = asks ? NULL : receive->memory;
    it->room = room;
    it->told = told;
    it->owner = receive;
    return receive;
}

static void start_receive(int number) {
    int ident = some_ident(&ranks[number], chance(20));
    if (ident < 0 || num_receives >= MOST_STARTED)
        return;
    bool peeks = chance(15), asks = !peeks && chance(40);
    struct receive *receive = new_receive(number, ident, ++order, asks, asks || chance(80) ? 3000 : below(200));
    struct pc_receive *it = &receive->receive;
    if (chance(60))
        it->posted.queued.source = (int)below(RANKS);
    if (chance(60))
        it->posted.queued.tag = (int)below(3);
    it->posted.peek = peeks;
    receive->expects[0] = (unsigned char)below(2);
    receive->expects[1] = (unsigned char)below(2);
    it->expects = receive->expects;
    it->expects_nbytes = chance(60) ? 0 : 1 + below(2);
    pc_receive_start(ranks[number].contexts[ident], it);
}

/* An asking receive whose message was taken back waits again where it was. */
static void start_again(const struct receive *old) {
    struct pc_context *context = ranks[old->rank].contexts[old->ident];
    if (num_receives >= MOST_STARTED || ranks[old->rank].openness[old->ident] != OPEN)
        return;
    struct receive *receive = new_receive(old->rank, old->ident, old->order, true, 3000);
    receive->receive.posted.queued.source = old->receive.posted.queued.source;
    receive->receive.posted.queued.tag = old->receive.posted.queued.tag;
    pc_receive_start_at(context, &receive->receive, old->receive.posted.queued.number);
}

/* A message of another kind has come. */
static struct pc_receive *other(struct pc_engine *engine, const struct pc_message *in) {
    int rank = (int)((struct rank *)(void *)((char *)engine - offsetof(struct rank, engine)) - ranks);
    check(*(const unsigned char *)in->header == KIND_OTHER, "a message is of the wrong kind", in->nbytes);
    if (is_refused())
        return NULL;
    counts[OTHER]++;
    return &new_receive(rank, OTHERS, ++order, true, 3000)->receive;
}

/* Have a new receive hold what another one holds, in its place. */
static void take_over(struct receive *receive) {
    struct receive *heir = new_receive(receive->rank, receive->ident, receive->order, true, 3000);
    heir->last_flight = receive->last_flight;
    receive->live = false; /* it must not be told any more */
    pc_receive_take_over(&heir->receive, &receive->receive);
    check(receive->receive.state == PC_RECEIVE_IDLE, "what was taken over is not idle", receive->order);
    bury(receive, 0);
    counts[TAKEN_OVER]++;
}

/* Give up, take or return what a receive of this rank has. */
static void go_on(int rank, bool gives_up) {
    if (num_receives == 0)
        return;
    bool only_reading = gives_up && chance(60);
    uint32_t start = (uint32_t)below(num_receives);
    for (uint32_t turn = 0; turn < num_receives; turn++) {
        struct receive *receive = &receives[(start + turn) % num_receives];
        struct pc_receive *it = &receive->receive;
        enum pc_receive_state state = it->state;
        bool goes_on = receive->live && receive->rank == rank && state != PC_RECEIVE_ENDED;
        if (!goes_on || (!gives_up && state != PC_RECEIVE_HELD) || (only_reading && state != PC_RECEIVE_READING))
            continue;
        if (!gives_up && receive->ident != OTHERS && num_receives < MOST_STARTED && chance(20)) {
            take_over(receive);
            return;
        }
        if (!gives_up) {
            receive->last_flight = flight_of(it->message)->gone ? -1 : (int64_t)number_in(it->message->header);
            int error = pc_receive_into(it, receive->memory);
            check(error == 0 || (scarce && error == -ENOMEM && it->state == PC_RECEIVE_HELD),
                  "a held message is not written", receive->order);
            return;
        }
        receive->live = false; /* callbacks of others leave it alone */
        if (receive->ident == OTHERS || (it->ask && it->message != NULL && chance(10))) {
            struct flight *flight = flight_of(it->message);
            flight->dropped = true;
            pc_receive_drop(it);
            check(flight->source == flight->dest || !flight->known, "a message was not dropped", flight->number);
            bury(receive, 0);
            counts[DROPPED]++;
        } else if (pc_receive_give_up(it)) {
            bury(receive, 0);
            counts[PARKED] += state == PC_RECEIVE_READING;
            counts[RETURNED] += state == PC_RECEIVE_HELD;
        } else {
            receive->live = true;
            check(scarce && state == PC_RECEIVE_READING, "a receive cannot be given up", receive->order);
        }
        return;
    }
}

static void cancel_send(int rank) {
    if (num_flights == 0)
        return;
    struct flight *flight = &flights[below(num_flights)];
    bool only_accepted = chance(60); /* it is being read */
    for (int turn = 0; turn < 200; turn++) {
        flight = &flights[below(num_flights)];
        if (flight->source == rank && flight->sending && (flight->accepted || !only_accepted))
            break;
    }
    if (flight->source != rank || !flight->sending || !(chance(15) || pc_send_stop(&flight->send)) ||
        !pc_send_take_back(&flight->send))
        return;
    counts[CANCELLED]++;
    if (flight->source == flight->dest)
        flight->gone = true;
    send_over(flight);
}

static void stop(int number, bool closes) {
    struct rank *rank = &ranks[number];
    int ident = some_ident(rank, closes);
    if (ident < 0)
        return;
    bool was_open = rank->openness[ident] == OPEN;
    rank->openness[ident] = closes ? CLOSED : BROKEN;
    if (was_open)
        rank->status[ident] = closes ? PC_CONTEXT_CLOSED : 1 + ident;
    bool stopped[MOST_FLIGHTS] = {false};
    for (uint32_t each = 0; was_open && each < num_flights; each++)
        if (flights[each].dest == number && flights[each].ident == ident && flights[each].arrival != 0 &&
            !flights[each].consumed && !flights[each].dropped)
            stopped[each] = flights[each].dropped = true;
    if (closes) {
        int *place = &rank->closed[rank->num_closed % 2];
        if (rank->num_closed++ >= 2)
            rank->remembered[*place] = false;
        *place = ident;
        rank->remembered[ident] = true;
        pc_context_close(rank->contexts[ident]);
        rank->contexts[ident] = NULL;
    } else {
        pc_context_break(rank->contexts[ident], rank->status[ident]);
    }
    for (uint32_t each = 0; each < num_flights; each++)
        if (stopped[each])
            check_dropped(&flights[each], closes);
}

static void open_context(int number) {
    struct rank *rank = &ranks[number];
    int ident = (int)below(IDENTS);
    if (rank->openness[ident] != NEVER)
        return;
    int members[RANKS] = {0, 1, 2};
    rank->contexts[ident] = pc_context_open(&rank->engine, (uint64_t)ident, members, RANKS, number);
    if (rank->contexts[ident] != NULL)
        rank->openness[ident] = OPEN;
    else
        check(scarce, "a context is not opened", (uint64_t)ident);
}

static void act(int rank) {
    uint64_t what = below(1000);
    if (what < 330)
        start_send(rank);
    else if (what < 640)
        start_receive(rank);
    else if (what < 760)
        go_on(rank, false);
    else if (what < 880)
        go_on(rank, true);
    else if (what < 980)
        cancel_send(rank);
    else if (what < 982)
        stop(rank, false);
    else if (what < 985)
        stop(rank, true);
    else if (what < 987) {
        int peer = (int)below(RANKS);
        if (peer != rank && chance(40))
            pc_engine_forget(&ranks[rank].engine, peer, 1000 + peer);
    } else {
        open_context(rank);
    }
}

/* No rank of this job sends this: nothing happens. */
static void send_nonsense(int rank) {
    unsigned char *header = malloc(PC_P2P_NBYTES);
    pc_p2p_header(header, below(IDENTS), chance(50) ? -1 : INT64_MIN, 0);
    size_t nbytes = PC_P2P_NBYTES;
    if (chance(50))
        nbytes = below(PC_P2P_NBYTES);
    unsigned char *exact = malloc(nbytes + (nbytes == 0));
    memcpy(exact, header, nbytes);
    struct pc_incoming incoming = {
        .peer = (rank + 1) % RANKS, .header = exact, .header_nbytes = nbytes, .where = PC_WAITING};
    struct pc_message *message;
    int error = pc_arrived(&ranks[rank].engine, &ranks[rank].link, &incoming, &message);
    check(error == -EPROTO && message == NULL, "nonsense is taken for a message", nbytes);
    counts[NONSENSE]++;
    free(header);
    free(exact);
}

/* --- the model --------------------------------------------------------------------------------------- */

static void check_context(int number, int ident) {
    struct rank *rank = &ranks[number];
    struct pc_context *context = rank->contexts[ident];
    uint32_t num_waiting = 0, num_listed = 0;
    for (uint32_t each = 0; each < num_flights; each++)
        if (flights[each].dest == number && flights[each].ident == ident && waits(&flights[each]))
            num_waiting++;
    uint64_t last = 0;
    struct pc_unexpected *listed = pc_match_first_message(&context->matching);
    for (; listed != NULL; listed = pc_match_next_message(listed), num_listed++) {
        struct flight *flight = flight_of((struct pc_message *)listed);
        check(waits(flight), "a message waits that should not", flight->number);
        check(flight->dest == number && flight->ident == ident, "a message waits elsewhere", flight->number);
        check(flight->arrival > last, "messages do not wait in order", flight->number);
        last = flight->arrival;
        for (uint32_t each = 0; each < num_receives; each++)
            if (receives[each].live && receives[each].receive.state == PC_RECEIVE_POSTED)
                check(!wants(&receives[each], flight), "a message and its receive both wait", flight->number);
    }
    check(num_listed == num_waiting, "a message is lost", num_waiting - num_listed);
}

static void check_all(void) {
    for (int each = 0; each < num_done; each++)
        if (done[each].receive->last_flight != done[each].flight->number)
            check_order(done[each].receive, done[each].flight);
    num_done = 0;
    for (uint32_t number = 0; number < num_receives; number++) {
        struct receive *receive = &receives[number];
        struct pc_receive *it = &receive->receive;
        if (!receive->live)
            continue;
        struct rank *rank = &ranks[receive->rank];
        check(it->state != PC_RECEIVE_ENDED && it->state != PC_RECEIVE_IDLE, "an end is not told", receive->order);
        check(rank->openness[receive->ident] == OPEN, "a receive has outlived its context", receive->order);
        if (it->state == PC_RECEIVE_POSTED)
            check(pc_context_no_sender(rank->contexts[receive->ident], it->posted.queued.source) == 0,
                  "a receive waits for one who is gone", receive->order);
        if (it->message == NULL)
            continue;
        struct flight *flight = flight_of(it->message);
        check(wants(receive, flight), "a receive has a message for which it did not ask", flight->number);
        check(!flight->consumed && !flight->dropped, "a receive has a message that is used", flight->number);
        if (receive->last_flight != flight->number && !flight->gone)
            check_order(receive, flight);
        if (it->state == PC_RECEIVE_READING || !flight->gone)
            receive->last_flight = flight->number;
    }
    for (int rank = 0; rank < RANKS; rank++)
        for (int ident = 0; ident < IDENTS; ident++)
            if (ranks[rank].openness[ident] == OPEN)
                check_context(rank, ident);
    acted = false;
}

static void world(void) {
    memset(ranks, 0, sizeof ranks);
    num_flights = num_receives = 0;
    order = 0;
    quiet = scarce = false;
    check(allocated == 0, "memory of the engine is left before", (uint64_t)allocated);
    for (int number = 0; number < RANKS; number++) {
        struct rank *rank = &ranks[number];
        for (int peer = 0; peer < RANKS; peer++)
            rank->links[peer] = peer == number ? &rank->self : &rank->link;
        rank->engine = (struct pc_engine){.size = RANKS, .links = rank->links, .other = other};
        check(pc_engine_open(&rank->engine) == 0, "an engine cannot be opened", 0);
        rank->contexts[OTHERS] = rank->engine.others;
        rank->openness[OTHERS] = OPEN;
        pc_link_self(&rank->self, &rank->engine);
        rank->link = (struct pc_link){&test_ops, &rank->engine};
        for (int turn = 0; turn < 4; turn++)
            open_context(number);
    }
    bool may_be_scarce = chance(40);
    int acts = 15 + (int)below(40);
    for (int step = 0; step < STEPS; step++) {
        scarce = may_be_scarce && step / 64 % 2 == 1;
        if (chance(acts))
            act((int)below(RANKS));
        else if (below(200) == 0)
            send_nonsense((int)below(RANKS));
        else
            (void)progress();
        check_all();
    }
    quiet = true;
    scarce = false;
    for (int rank = 0; rank < RANKS; rank++)
        for (int peer = 0; peer < RANKS; peer++)
            if (ranks[peer].engine.gone[rank] != 0)
                pc_engine_forget(&ranks[rank].engine, peer, 1000 + peer);
    check_all();
    for (int round = 0; round < 2; round++) {
        for (int turn = 0; turn < 100000 && progress(); turn++)
            check_all();
        for (uint32_t number = 0; number < num_receives; number++)
            while (receives[number].live && receives[number].ident == OTHERS) {
                go_on(receives[number].rank, true);
                check_all();
            }
    }
    for (int rank = 0; rank < RANKS; rank++) { /* some still wait behind what found no room */
        ranks[rank].openness[OTHERS] = BROKEN;
        ranks[rank].status[OTHERS] = 1 + OTHERS;
        pc_context_break(ranks[rank].engine.others, 1 + OTHERS);
    }
    for (int rank = 0; rank < RANKS; rank++)
        for (int ident = 0; ident < IDENTS; ident++)
            while (ranks[rank].openness[ident] == OPEN || ranks[rank].openness[ident] == BROKEN)
                stop(rank, true);
    check_all();
    for (uint32_t number = 0; number < num_receives; number++)
        check(!receives[number].live, "a receive has never ended", number);
    for (uint32_t number = 0; number < num_flights; number++) {
        struct flight *flight = &flights[number];
        check(!flight->sending, "a send has never ended", number);
        free(flight->copy);
        flight->copy = NULL;
    }
    for (int rank = 0; rank < RANKS; rank++) {
        struct pc_engine *engine = &ranks[rank].engine;
        size_t num_outside = engine->num_unopened;
        for (struct pc_message *each = engine->abandoned.first; each != NULL; each = each->next)
            num_outside++;
        check(engine->num_messages == num_outside, "messages are left", engine->num_messages);
        check(engine->endings == NULL && engine->depth == 0, "something was not told", 0);
        pc_engine_free(engine);
    }
    check(allocated == 0, "memory of the engine is left", (uint64_t)allocated);
}

int main(int argc, char **argv) {
    uint64_t worlds = argc > 1 ? strtoull(argv[1], NULL, 10) : 100;
    uint64_t first = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
    for (seed = first; seed < first + worlds; seed++) {
        random_state = seed * 0x9E3779B97F4A7C15u + 1;
        world();
    }
    for (int count = 0; count < COUNTS; count++)
        printf("%s%s %llu", count > 0 ? ", " : "", names[count], (unsigned long long)counts[count]);
    printf("\n");
    return 0;
}
