/* What the ranks of engine_random.c do, and what must be so when a send or a receive ends. */
#ifndef PYCOLL_ENGINE_CALLS_H
#define PYCOLL_ENGINE_CALLS_H

#include "engine_link.h"

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
    return flight->nbytes <= it->room &&
           (it->expects_nbytes < 1 || receive->expects[0] == flight->form) &&
           (it->expects_nbytes < 2 || receive->expects[1] == flight->type);
}

static bool is_attached(const struct flight *flight) {
    for (uint32_t number = 0; number < num_receives; number++) {
        const struct receive *each = &receives[number];
        if (each->live && each->receive.message != NULL &&
            flight_of(each->receive.message) == flight)
            return true;
    }
    return false;
}

static bool waits(const struct flight *flight) {
    return flight->arrival != 0 && !flight->consumed && !flight->gone && !flight->dropped &&
           !is_attached(flight);
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
            check(!wants(each, flight), "a message goes past a receive that was before",
                  flight->number);
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
        check(status == rank->status[receive->ident], "a receive ends for no reason",
              receive->order);
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
                check(scarce || it->status > 0 || it->status == PC_CONTEXT_CLOSED,
                      "there was memory", receive->order);
        }
        if (it->status == PC_REFUSED) {
            counts[REFUSED]++;
            check(!it->posted.peek, "a probe is refused", receive->order);
            check(flight == NULL || !fits(receive, flight), "a message that fits is refused",
                  receive->order);
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
                check(receive->memory[offset] == byte_of(flight->number, offset), "a byte is wrong",
                      flight->number);
            flight->consumed = true;
            counts[RECEIVED]++;
        } else {
            counts[PROBED]++;
        }
        if (flight != NULL) {
            check(it->source == flight->source && it->tag == flight->tag &&
                      it->nbytes == flight->nbytes && wants(receive, flight),
                  "the status of a receive is wrong", flight->number);
            check(it->header == NULL ||
                      (it->header_nbytes == flight->header_nbytes &&
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
        check(flight->where != PC_WAITING || flight->answered, "a send is over too early",
              flight->number);
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
    flight->parts[2] =
        (struct iovec){flight->memory + first + second, flight->nbytes - first - second};
    flight->send = (struct pc_send){.peer = flight->dest,
                                    .parts = flight->parts,
                                    .num_parts = 3,
                                    .ended = ended,
                                    .owner = flight};
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
    if (pc_send_start(rank->contexts[ident], send, flight->header, flight->header_nbytes, way) ==
        PC_UNDER_WAY)
        return;
    int reason = is_broken ? rank->status[ident] : rank->engine.gone[flight->dest];
    check(send->status == 0 || send->status == reason || (scarce && send->status == -ENOMEM),
          "a send ends for no reason", flight->number);
    check(!is_broken || send->status == reason, "a send works though its context is broken",
          flight->number);
    if (send->status != 0)
        flight->arrival = 0;
    send_over(flight);
}

static struct receive *new_receive(int number, int ident, uint64_t its_order, bool asks,
                                   size_t room) {
    struct receive *receive = &receives[num_receives++];
    *receive = (struct receive){
        .rank = number, .ident = ident, .last_flight = -1, .live = true, .order = its_order};
    struct pc_receive *it = &receive->receive;
    it->posted.queued.source = it->posted.queued.tag = PC_ANY;
    it->ask = asks;
    receive->room = room;
    receive->memory = malloc(room + GUARD);
    memset(receive->memory, POISON, room + GUARD);
    it->into = asks ? NULL : receive->memory;
    it->room = room;
    it->notify = told;
    it->owner = receive;
    return receive;
}

static void start_receive(int number) {
    int ident = some_ident(&ranks[number], chance(20));
    if (ident < 0 || num_receives >= MOST_STARTED)
        return;
    bool peeks = chance(15), asks = !peeks && chance(40);
    struct receive *receive =
        new_receive(number, ident, ++order, asks, asks || chance(80) ? 3000 : below(200));
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
    int rank =
        (int)((struct rank *)(void *)((char *)engine - offsetof(struct rank, engine)) - ranks);
    check(*(const unsigned char *)in->header == KIND_OTHER, "a message is of the wrong kind",
          in->nbytes);
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
    check(receive->receive.state == PC_RECEIVE_IDLE, "what was taken over is not idle",
          receive->order);
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
        if (!goes_on || (!gives_up && state != PC_RECEIVE_HELD) ||
            (only_reading && state != PC_RECEIVE_READING))
            continue;
        if (!gives_up && receive->ident != OTHERS && num_receives < MOST_STARTED && chance(20)) {
            take_over(receive);
            return;
        }
        if (!gives_up) {
            receive->last_flight =
                flight_of(it->message)->gone ? -1 : (int64_t)number_in(it->message->header);
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
            check(flight->source == flight->dest || !flight->known, "a message was not dropped",
                  flight->number);
            bury(receive, 0);
            counts[DROPPED]++;
        } else if (pc_receive_give_up(it)) {
            bury(receive, 0);
            counts[PARKED] += state == PC_RECEIVE_READING;
            counts[RETURNED] += state == PC_RECEIVE_HELD;
        } else {
            receive->live = true;
            check(scarce && state == PC_RECEIVE_READING, "a receive cannot be given up",
                  receive->order);
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
    if (flight->source != rank || !flight->sending ||
        !(chance(15) || pc_send_stop(&flight->send)) || !pc_send_take_back(&flight->send))
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
        if (flights[each].dest == number && flights[each].ident == ident &&
            flights[each].arrival != 0 && !flights[each].consumed && !flights[each].dropped)
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
#endif
