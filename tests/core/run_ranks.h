/* What the ranks of run_random.c do: begin and end calls, and whatever may go wrong between. */
#ifndef PYCOLL_RUN_RANKS_H
#define PYCOLL_RUN_RANKS_H

#include "run_messages.h"

/* --- calls ------------------------------------------------------------------------------------ */

static void begin_call(int context, int me) {
    struct member *member = &contexts[context].ranks[me];
    if (member->num_begun == contexts[context].num_calls)
        return;
    struct state *state = &member->states[member->num_begun];
    char text[200];
    int signature = snprintf(text, sizeof text, "%s", state->plan->signature);
    size_t nbytes = (size_t)signature;
    if (chance(50)) /* where it was made: that may differ */
        nbytes +=
            1 + (size_t)snprintf(text + nbytes + 1, 100, "%.*s%d", (int)below(50),
                                 "program.py, in a function of a rather long name, line ", me);
    char *exact = malloc(nbytes);
    memcpy(exact, text, nbytes);
    state->begun = true; /* messages of other calls may be told before this returns */
    struct pc_called *called = pc_context_begin(member->context, exact, nbytes);
    free(exact);
    state->begun = called != NULL;
    check(called != NULL || was_scarce, "a call is not begun", state->call);
    if (called == NULL)
        return;
    state->called = called;
    member->num_begun++;
    member->newest = state->plan;
    counts[CALLS]++;
    check(called->number == state->call && pc_call_find(member->context, state->call) == called,
          "a call has another number", called->number);
    check_early(state);
}

static bool is_complete(const struct state *state) {
    if (state->called == NULL || state->failed || state->offered)
        return false;
    for (int segment = 0; segment < num_runs(state->plan); segment++)
        if (state->runs[segment] != OVER)
            return false;
    for (int extra = 0; extra < state->plan->num_extras; extra++)
        if ((state->plan->extras[extra].from == state->me && state->sent[extra] != OVER) ||
            (state->plan->extras[extra].to == state->me && state->asked[extra] != OVER))
            return false;
    return true;
}

static void end_call(struct state *state) {
    struct member *member = member_of(state);
    if (reversed && member->num_begun < PC_LAST_CALLS + 2)
        return;
    for (uint32_t later = state->call + 1; reversed && later < member->num_begun; later++)
        if (is_complete(&member->states[later]))
            return;
    counts[IN_REVERSE] += state->call + 1 < member->num_begun;
    struct pc_called *called = state->called;
    state->ended = true;
    state->called = NULL;
    pc_context_end(member->context, called);
    check(member->openness != OPEN || pc_call_find(member->context, state->call) == NULL,
          "a call goes on", state->call);
    check_early(state);
}

static void check_newest(const struct member *member) {
    const struct pc_called *newest = pc_call_newest(member->context);
    check((newest == NULL) == (member->newest == NULL), "there is no newest call",
          member->num_begun);
    if (newest == NULL)
        return;
    check(newest->signature_nbytes == strlen(member->newest->signature) &&
              memcmp(newest->text, member->newest->signature, newest->signature_nbytes) == 0,
          "another call is the newest", member->num_begun);
}

/* --- what ranks do ---------------------------------------------------------------------------- */

static void open_context(int context, int me) {
    struct member *member = &contexts[context].ranks[me];
    struct pc_engine *engine = &ranks[contexts[context].members[me]].engine;
    member->context = pc_context_open(engine, ident_of(context), contexts[context].members,
                                      (size_t)contexts[context].size, me);
    check(member->context != NULL || was_scarce, "a context is not opened", (uint64_t)context);
    if (member->context != NULL)
        member->openness = OPEN;
}

/* A context has dropped what came for it: the senders that wait are answered if it was closed, but
   not if it broke. */
static void check_dropped(bool closes) {
    for (size_t number = 0; number < num_flights; number++) {
        struct flight *flight = flights[number];
        if (!flight->is_dropped || flight->times_other > 0)
            continue;
        flight->is_dropped = false;
        if (flight->where == PC_WAITING && !flight->accepted && !closes)
            check(!flight->released, "a sender is answered though the context is broken", number);
        else if (flight->where != PC_WAITING || flight->accepted)
            check(!flight->known, "a message was not dropped", number);
    }
}

static void stop(int context, int me, bool closes) {
    struct member *member = &contexts[context].ranks[me];
    if (member->openness != OPEN && !(closes && member->openness == BROKEN))
        return;
    if (member->openness == OPEN)
        member->status = closes ? PC_CONTEXT_CLOSED : 1 + context;
    member->openness = closes ? CLOSED : BROKEN;
    for (size_t number = 0; number < num_flights; number++) {
        struct flight *flight = flights[number];
        const struct state *state = receiver_of(flight);
        bool came =
            flight->arrived && state >= member->states && state < member->states + MOST_CALLS;
        flight->is_dropped = came && flight->known && flight->times_other == 0;
        flight->is_lost = flight->is_lost || came;
    }
    counts[closes ? CLOSED_CONTEXTS : BROKEN_CONTEXTS]++;
    if (!closes) {
        struct pc_engine *engine = member->context->engine;
        pc_context_break(member->context, member->status);
        for (struct pc_message *each = engine->abandoned.first; each != NULL; each = each->next)
            counts[ABANDONED]++;
        check_dropped(false);
        return;
    }
    struct pc_context *closed = member->context;
    member->context = NULL;
    for (int call = 0; call < MOST_CALLS; call++)
        member->states[call].called = NULL;
    pc_context_close(closed);
    check_dropped(true);
    for (int call = 0; call < MOST_CALLS; call++)
        for (int segment = 0; segment < MOST_SEGMENTS; segment++) {
            bool goes_on = member->states[call].running[segment] != NULL;
            check(!goes_on || !dry, "a run has outlived its context", (uint64_t)call);
            counts[ENDED_PENDING] += goes_on;
        }
}

/* Do one of the things that belong to a call. */
static void act_in(struct state *state) {
    int number = (int)below(4);
    if (chance(50) && do_some_asked(state))
        return;
    bool may_start = !(state->failed || state->offered);
    if (number < num_runs(state->plan) && state->runs[number] == NOT_YET && may_start) {
        if (state->plan->offerer == state->me && num_runs(state->plan) == 1)
            offer(state);
        else
            start_run(state, number);
        return;
    }
    if (state->plan->stray_from == state->me && !state->stray_sent) {
        send_stray(state);
        return;
    }
    number = (int)below(MOST_EXTRAS);
    if (number < state->plan->num_extras) {
        const struct extra *extra = &state->plan->extras[number];
        bool sends = extra->from == state->me && state->sent[number] == NOT_YET;
        bool receives = extra->to == state->me;
        if (sends && (!receives || chance(50))) {
            send_extra(state, number);
            return;
        }
        if (receives && state->asked[number] == NOT_YET && (clean || !state->failed)) {
            ask(state, number);
            return;
        }
        if (receives && state->asked[number] == UNDER_WAY) {
            go_on(state, number);
            return;
        }
    }
    if (is_complete(state))
        end_call(state);
}

/* Start all runs that may start, and stop their context at once: what came early is not told yet in
   a callback. */
static void start_and_stop(int context, int me) {
    struct member *member = &contexts[context].ranks[me];
    if (!ranks[contexts[context].members[me]].engine.telling || member->openness != OPEN)
        return;
    for (uint32_t call = 0; call < member->num_begun; call++)
        for (int segment = 0; segment < num_runs(member->states[call].plan); segment++) {
            struct state *state = &member->states[call];
            if (state->called != NULL && !state->failed && !state->offered &&
                state->runs[segment] == NOT_YET)
                start_run(state, segment);
        }
    stop(context, me, chance(60));
}

/* Send, or ask for, all messages beside the runs for which that was not done yet. */
static void send_or_ask_for_all(int rank, bool asks) {
    for (int context = 0; context < num_contexts; context++) {
        int me = rank_in(context, rank);
        for (uint32_t call = 0; me != NOBODY && call < contexts[context].ranks[me].num_begun;
             call++)
            for (int number = 0; number < MOST_EXTRAS; number++) {
                struct state *state = &contexts[context].ranks[me].states[call];
                const struct extra *extra = &state->plan->extras[number];
                if (state->called == NULL || state->failed || number >= state->plan->num_extras)
                    continue;
                if (asks && extra->to == me && state->asked[number] == NOT_YET)
                    ask(state, number);
                else if (!asks && extra->from == me && state->sent[number] == NOT_YET)
                    send_extra(state, number);
            }
    }
}

static void begin_all(int rank) {
    for (int context = 0; context < num_contexts; context++) {
        int me = rank_in(context, rank);
        for (uint32_t turn = 0; me != NOBODY && turn < contexts[context].num_calls; turn++)
            if (contexts[context].ranks[me].openness == OPEN)
                begin_call(context, me);
    }
}

/* A rank hears that another one is gone, which has sent all that it could. */
static void forget(int rank, int peer) {
    struct pc_engine *engine = &ranks[rank].engine;
    if (peer == rank || engine->gone[peer] != 0)
        return;
    counts[FORGOTTEN]++;
    if (!engine->telling && !ranks[peer].engine.telling) {
        begin_all(rank);
        begin_all(peer);
        send_or_ask_for_all(peer, false);
        for (int turn = 0; turn < 100; turn++)
            (void)progress();
    }
    if (engine->gone[peer] == 0)
        pc_engine_forget(engine, peer, 1000 + peer);
    send_or_ask_for_all(rank, true);
}

/* What goes wrong. */
static void spoil(int rank) {
    int context = (int)below((uint64_t)num_contexts), me = rank_in(context, rank);
    uint64_t what = below(100);
    if (me == NOBODY)
        return;
    struct member *member = &contexts[context].ranks[me];
    if (what < 4) {
        stop(context, me, true);
    } else if (what < 7) {
        stop(context, me, false);
    } else if (what < 18) {
        forget(rank, (int)below((uint64_t)num_ranks));
    } else if (what < 31) {
        start_and_stop(context, me);
    } else if (what < 45 && sendings != NULL) {
        struct sending *sending = sendings;
        if (sending->send.context == NULL || sending->send.context->engine != &ranks[rank].engine)
            return;
        if ((chance(70) || pc_send_stop(&sending->send)) && pc_send_take_back(&sending->send)) {
            sending->send.status = 1;
            sending_over(sending);
        }
    } else {
        uint32_t call = (uint32_t)below(MOST_CALLS);
        for (int segment = 0; call < member->num_begun && segment < MOST_SEGMENTS; segment++)
            if (member->states[call].running[segment] != NULL && chance(70))
                cancel_run(&member->states[call], segment);
    }
}

/* The newest call must be known when all others have ended after it. */
static bool may_begin(const struct member *member) {
    if (!reversed || member->num_begun != PC_LAST_CALLS + 2)
        return true;
    for (uint32_t call = 0; call < member->num_begun; call++)
        if (member->states[call].called != NULL)
            return false;
    return true;
}

static void act(int rank) {
    int context = (int)below((uint64_t)num_contexts), me = rank_in(context, rank);
    if (chance(spoils)) {
        spoil(rank);
        return;
    }
    if (me == NOBODY)
        return;
    struct member *member = &contexts[context].ranks[me];
    if (member->openness == NEVER) {
        if (chance(20))
            open_context(context, me);
        return;
    }
    if (!clean)
        drop_other();
    if (member->openness == CLOSED || (member->openness == BROKEN && chance(80)))
        return;
    if (may_begin(member) && (chance(15) || member->num_begun == 0)) {
        begin_call(context, me);
        return;
    }
    uint32_t first = (uint32_t)below(member->num_begun);
    for (uint32_t turn = 0; turn < member->num_begun; turn++) {
        struct state *state = &member->states[(first + turn) % member->num_begun];
        if (state->called == NULL)
            continue;
        act_in(state);
        break;
    }
    if (member->openness == OPEN)
        check_newest(member);
}

/* No rank of this job sends this: nothing happens. */
static void send_nonsense(int rank) {
    unsigned char *header = malloc(PC_COLLECTIVE_NBYTES + PC_OFFER_NBYTES);
    bool is_offered = chance(50);
    size_t nbytes = 1 + below(PC_COLLECTIVE_NBYTES - 1 + (is_offered ? PC_OFFER_NBYTES : 0));
    uint64_t ident = ident_of((int)below((uint64_t)num_contexts));
    memset(header, 0, PC_COLLECTIVE_NBYTES + PC_OFFER_NBYTES);
    header[0] = is_offered ? PC_KIND_OFFERED : PC_KIND_COLLECTIVE;
    memcpy(header + 1, &ident, 8);
    unsigned char *exact = malloc(nbytes);
    memcpy(exact, header, nbytes);
    struct pc_incoming incoming = {.peer = (rank + 1) % num_ranks,
                                   .header = exact,
                                   .header_nbytes = nbytes,
                                   .where = PC_WAITING};
    struct pc_message *message;
    int error = pc_arrived(&ranks[rank].engine, &ranks[rank].link, &incoming, &message);
    check(error == -EPROTO && message == NULL, "nonsense is taken for a message", nbytes);
    counts[NONSENSE]++;
    free(header);
    free(exact);
}

/* Nor this: a message of which there is one of the same address already. */
static void send_again(void) {
    if (num_flights == 0)
        return;
    const struct flight *flight = flights[below(num_flights)];
    const struct state *state = receiver_of(flight);
    if (!flight->arrived || flight->is_lost || state->begun || member_of(state)->openness != OPEN)
        return;
    struct pc_engine *engine = &ranks[flight->dest].engine;
    struct pc_incoming incoming = {.peer = flight->source,
                                   .header = flight->header,
                                   .header_nbytes = flight->header_nbytes,
                                   .where = PC_WAITING};
    struct pc_message *message;
    int error = pc_arrived(engine, &ranks[flight->dest].link, &incoming, &message);
    check((error == -EPROTO || (scarce && error == -ENOMEM)) && message == NULL,
          "two messages have one address", flight->number);
    counts[SENT_AGAIN]++;
}
#endif
