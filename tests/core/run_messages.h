/* The messages of run_random.c that no run sends: beside the runs of a call, in their place, and of
   other calls. */
#ifndef PYCOLL_RUN_MESSAGES_H
#define PYCOLL_RUN_MESSAGES_H

#include "run_calls.h"

/* --- messages beside the runs ----------------------------------------------------------------- */

static void write_address(unsigned char *header, const struct state *state, bool is_offered,
                          uint16_t subcall, uint32_t index) {
    uint64_t ident = ident_of(state->context);
    header[0] = is_offered ? PC_KIND_OFFERED : PC_KIND_COLLECTIVE;
    memcpy(header + 1, &ident, 8);
    memcpy(header + 9, &state->call, 4);
    memcpy(header + 13, &subcall, 2);
    memcpy(header + 15, &index, 4);
}

static size_t write_message_header(unsigned char *header, const struct state *state,
                                   bool is_offered, uint16_t subcall, uint32_t index) {
    write_address(header, state, is_offered, subcall, index);
    size_t nbytes = PC_COLLECTIVE_NBYTES;
    if (is_offered)
        memset(header + nbytes, 0x5A, PC_OFFER_NBYTES);
    nbytes += is_offered ? PC_OFFER_NBYTES : 0;
    memcpy(header + nbytes, state->called->text, state->called->nbytes);
    return nbytes + state->called->nbytes;
}

static unsigned char byte_of(const struct plan *plan, int extra, size_t offset) {
    return (unsigned char)((plan->number * 131 + (uint64_t)extra * 31 + offset * 7 + offset / 251) %
                           211);
}

static void sending_over(struct sending *sending) {
    *sending->at = sending->next;
    if (sending->next != NULL)
        sending->next->at = sending->at;
    if (sending->state != NULL && sending->send.status == 0)
        sending->state->sent[sending->extra] = OVER;
    poison_and_free(sending->part.iov_base, sending->part.iov_len + 1);
    poison_and_free((unsigned char *)sending, sizeof *sending);
}

static void sending_ended(struct pc_send *send) { sending_over(send->owner); }

static void send_message(struct state *state, int extra, const unsigned char *header,
                         size_t header_nbytes, int dest, size_t nbytes,
                         const unsigned char *value) {
    struct sending *sending = calloc(1, sizeof *sending);
    unsigned char *memory = malloc(nbytes + 1);
    for (size_t offset = 0; offset < nbytes; offset++)
        memory[offset] = value != NULL ? value[offset] : byte_of(state->plan, extra, offset);
    sending->part = (struct iovec){memory, nbytes};
    sending->send = (struct pc_send){.peer = contexts[state->context].members[dest],
                                     .parts = &sending->part,
                                     .num_parts = 1,
                                     .ended = sending_ended,
                                     .owner = sending};
    sending->state = extra < MOST_EXTRAS ? state : NULL;
    sending->extra = extra;
    sending->next = sendings;
    sending->at = &sendings;
    if (sendings != NULL)
        sendings->at = &sending->next;
    sendings = sending;
    if (sending->state != NULL)
        state->sent[extra] = UNDER_WAY;
    enum pc_way way = (enum pc_way)below(3);
    if (pc_send_start(member_of(state)->context, &sending->send, header, header_nbytes, way) !=
        PC_SENT)
        return;
    if (sending->send.status != 0)
        check_reason(state, sending->send.status);
    sending_over(sending);
}

static void send_extra(struct state *state, int number) {
    unsigned char header[300];
    const struct extra *extra = &state->plan->extras[number];
    uint32_t index = EXTRA_INDEX + (uint32_t)number;
    size_t header_nbytes =
        write_message_header(header, state, extra->is_offered, EXTRA_SUBCALL, index);
    send_message(state, number, header, header_nbytes, extra->to, extra->nbytes, NULL);
}

/* Instead of running offer what the first steps send. */
static void offer(struct state *state) {
    unsigned char header[300];
    const struct schedule *schedule = schedule_of(state);
    state->offered = true;
    for (uint32_t position = 0; position < schedule->table.num_steps && state->called != NULL;
         position++) {
        const struct pc_step *step = &schedule->table.steps[position];
        if (step->kind != PC_STEP_SEND || step->waits > 0)
            continue;
        size_t header_nbytes =
            write_message_header(header, state, true, state->plan->subcall, step->index);
        size_t nbytes = 0;
        size_t itemsize = itemsize_of(state->plan);
        unsigned char *value = calloc(MOST_CHUNKS * MOST_ELEMENTS, itemsize);
        for (uint32_t each = 0; each < step->num_chunks; each++) {
            int chunk = (int)schedule->table.chunks[step->chunks + each];
            for (size_t element = 0; element < state->plan->lengths[state->me][chunk];
                 element++, nbytes += itemsize)
                write_element(value + nbytes,
                              contribution(state->plan->number, state->me, chunk, element),
                              state->plan->sums);
        }
        send_message(state, MOST_EXTRAS, header, header_nbytes, (int)step->other, nbytes, value);
        free(value);
    }
}

static void send_stray(struct state *state) {
    unsigned char header[300];
    state->stray_sent = true;
    size_t header_nbytes = write_message_header(header, state, false, STRAY_LANE, 0);
    send_message(state, MOST_EXTRAS, header, header_nbytes, state->plan->stray_to, below(200),
                 NULL);
}

static void asking_over(struct asking *asking, bool received) {
    struct state *state = asking->state;
    state->asked[asking->extra] = received ? OVER : NOT_YET;
    state->asking[asking->extra] = NULL;
    state->failed = state->failed || !(received || clean);
    free(asking->memory);
    poison_and_free((unsigned char *)asking, sizeof *asking);
}

static void asking_told(struct pc_receive *receive) {
    struct asking *asking = receive->owner;
    struct state *state = asking->state;
    const struct extra *extra = &state->plan->extras[asking->extra];
    int rank = state->rank;
    counted_free(receive->header);
    receive->header = NULL;
    if (receive->state == PC_RECEIVE_HELD) {
        check(receive->ask, "a receive that does not ask is held", state->call);
        check(receive->message->nbytes == extra->nbytes, "a receive has another message",
              state->call);
    } else {
        check(receive->state == PC_RECEIVE_ENDED, "a receive that goes on is told", state->call);
        if (receive->status == PC_TAKEN_BACK)
            check(!clean && receive->ask, "a message was taken back", state->call);
        else if (receive->status == PC_REFUSED)
            check(!receive->ask && extra->is_offered, "a message that fits is refused",
                  state->call);
        else if (receive->status != 0)
            check_reason(state, receive->status);
        check(receive->status < 1000 || !asking->is_here,
              "a message that is here went with its sender", state->call);
        counts[TAKEN_BACK] += receive->status == PC_TAKEN_BACK;
        for (size_t offset = 0; receive->status == 0 && offset < extra->nbytes; offset++)
            check(asking->memory[offset] == byte_of(state->plan, asking->extra, offset),
                  "a byte is wrong", offset);
        check(receive->status != 0 ||
                  (receive->nbytes == extra->nbytes &&
                   receive->source == contexts[state->context].members[extra->from]),
              "the status of a receive is wrong", state->call);
        asking_over(asking, receive->status == 0);
    }
    maybe_act(rank);
}

/* The messages of a peer that are here may be received when it is gone. */
static bool is_here(const struct state *state, const struct pc_addressed *address) {
    unsigned char header[PC_COLLECTIVE_NBYTES];
    write_address(header, state, false, address->subcall, address->index);
    for (size_t number = 0; number < num_flights; number++) {
        const struct flight *flight = flights[number];
        if (flight->dest == state->rank && flight->source == (int)address->sender &&
            flight->arrived && !flight->is_lost && flight->where <= PC_KEPT &&
            flight->times_other == 0 && !flight->released &&
            memcmp(flight->header + 1, header + 1, sizeof header - 1) == 0)
            return true;
    }
    return false;
}

static void ask(struct state *state, int number) {
    const struct extra *extra = &state->plan->extras[number];
    struct asking *asking = calloc(1, sizeof *asking);
    struct pc_receive *receive = &asking->receive;
    asking->state = state;
    asking->extra = number;
    receive->address.call = state->call;
    receive->address.subcall = EXTRA_SUBCALL;
    receive->address.sender = (uint32_t)contexts[state->context].members[extra->from];
    receive->address.index = EXTRA_INDEX + (uint32_t)number;
    receive->ask = extra->is_offered || chance(70);
    if (!clean && chance(5))
        receive->ask = false;
    receive->room = extra->nbytes;
    if (!receive->ask)
        receive->into = asking->memory = malloc(extra->nbytes + 1);
    receive->notify = asking_told;
    receive->owner = asking;
    state->asked[number] = UNDER_WAY;
    state->asking[number] = asking;
    counts[ASKED]++;
    asking->is_here = is_here(state, &receive->address);
    counts[HERE] += asking->is_here && ranks[state->rank].engine.gone[receive->address.sender] != 0;
    pc_collect_start(member_of(state)->context, receive);
}

/* Take the message that a receive holds, or let it be read elsewhere, or give the receive up. */
static void go_on(struct state *state, int number) {
    struct asking *asking = state->asking[number];
    struct pc_receive *receive = &asking->receive;
    size_t nbytes = state->plan->extras[number].nbytes;
    enum pc_receive_state was = receive->state;
    if (was == PC_RECEIVE_ENDED)
        return;
    if (was == PC_RECEIVE_POSTED ? chance(5) : !clean && chance(10)) {
        counts[GIVEN_UP]++;
        check(pc_receive_give_up(receive), "a receive cannot be given up", state->call);
        asking_over(asking, false);
        return;
    }
    if (was != PC_RECEIVE_HELD && was != PC_RECEIVE_READING)
        return;
    unsigned char *old = asking->memory;
    asking->memory = malloc(nbytes + 1);
    if (was == PC_RECEIVE_HELD) {
        int error = pc_receive_into(receive, asking->memory);
        check(error == 0 || (scarce && error == -ENOMEM && receive->state == PC_RECEIVE_HELD),
              "a held message is not written", state->call);
        free(old);
        return;
    }
    pc_receive_redirect(receive, asking->memory); /* it may be told before this returns */
    poison_and_free(old, nbytes + 1);
}

/* --- messages of other calls ------------------------------------------------------------------ */

static bool is_stray(const struct flight *flight) {
    return (flight->header[13] | flight->header[14] << 8) == STRAY_LANE;
}

/* The call of a message, as its receiver has made it. */
static struct state *receiver_of(const struct flight *flight) {
    uint64_t ident;
    uint32_t call;
    memcpy(&ident, flight->header + 1, 8);
    memcpy(&call, flight->header + 9, 4);
    int context = (int)(ident - ident_of(0));
    return &contexts[context].ranks[rank_in(context, flight->dest)].states[call];
}

static bool is_of_another_call(const struct flight *flight) {
    const struct state *state = receiver_of(flight);
    size_t skipped =
        PC_COLLECTIVE_NBYTES + (flight->header[0] == PC_KIND_OFFERED ? PC_OFFER_NBYTES : 0);
    char text[200] = {0};
    memcpy(text, flight->header + skipped, flight->header_nbytes - skipped);
    return strcmp(text, state->plan->signature) != 0;
}

/* Whether a message must have been given to the caller, if it is here. */
static bool must_be_other(const struct flight *flight) {
    const struct state *state = receiver_of(flight);
    return state->begun && (is_of_another_call(flight) || (state->ended && is_stray(flight)));
}

static void other_told(struct pc_receive *receive) {
    if (receive->state == PC_RECEIVE_HELD)
        return;
    check(receive->state == PC_RECEIVE_ENDED && !clean, "a receive for another call ends", 0);
    check(receive->status == PC_TAKEN_BACK || receive->status >= 1000 || receive->status == 1,
          "so for no reason", (uint64_t)receive->status);
    counted_free(receive->header);
    for (int each = 0; each < num_others; each++)
        if (others[each] == receive)
            others[each--] = others[--num_others];
    free(receive);
}

static struct pc_receive *other(struct pc_engine *engine, const struct pc_message *message) {
    int rank =
        (int)((struct rank *)(void *)((char *)engine - offsetof(struct rank, engine)) - ranks);
    check(message->link == &ranks[rank].link, "a message to oneself is of another call", 0);
    struct flight *flight = flight_of(message);
    check(!clean, "a message is of another call in a clean world", flight->number);
    check(flight->dest == rank && message->header_nbytes == flight->header_nbytes &&
              memcmp(message->header, flight->header, flight->header_nbytes) == 0,
          "the caller has another message", flight->number);
    if (is_refused())
        return NULL;
    const struct state *state = receiver_of(flight);
    check(must_be_other(flight) || (is_stray(flight) && state->begun),
          "a message of the same call goes to the caller", flight->number);
    check(flight->times_other++ == 0, "a message goes to the caller twice", flight->number);
    counts[is_stray(flight) ? STRAY : OTHER_CALL]++;
    struct pc_receive *receive = calloc(1, sizeof *receive);
    receive->ask = true;
    receive->notify = other_told;
    check(num_others < MOST_OTHERS, "too many messages are of another call", 0);
    others[num_others++] = receive;
    return receive;
}

static void drop_other(void) {
    if (num_others == 0)
        return;
    int number = (int)below((uint64_t)num_others);
    struct pc_receive *receive = others[number];
    if (receive->state != PC_RECEIVE_HELD)
        return;
    others[number] = others[--num_others];
    pc_receive_drop(receive);
    free(receive);
}

/* A call was begun or ended: what has come for it early is where it belongs. */
static void check_early(const struct state *state) {
    for (size_t number = 0; number < num_flights; number++) {
        struct flight *flight = flights[number];
        if (!flight->arrived || flight->is_lost || receiver_of(flight) != state ||
            !must_be_other(flight))
            continue;
        if (flight->times_other == 0 && was_scarce)
            flight->is_lost = true;
        else
            check(flight->times_other == 1,
                  "an early message of another call is kept from the caller", number);
        counts[OTHER_EARLY]++;
    }
}

static int before_arrival(struct flight *flight) {
    const struct state *state = receiver_of(flight);
    enum openness openness = contexts[state->context].ranks[state->me].openness;
    counts[EARLY] += openness == OPEN && !state->begun;
    if (openness != OPEN)
        return openness == NEVER ? 2 : 0;
    return must_be_other(flight);
}

static void after_arrival(struct flight *flight, int known, int error) {
    check(error == 0 || (error == -ENOBUFS && known != 1) || (error == -ENOMEM && scarce),
          "a message is not taken", (uint64_t)-error);
    const struct state *state = receiver_of(flight);
    if (error != 0)
        return;
    if (known == 1)
        check(flight->times_other == 1, "a message of another call is kept from the caller",
              flight->number);
    enum openness openness = contexts[state->context].ranks[state->me].openness;
    counts[UNOPENED] += known == 2;
    if (openness == BROKEN || openness == CLOSED)
        flight->is_lost = true;
}
#endif
