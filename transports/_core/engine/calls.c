/* Collective calls of one context, and their messages: which call a message belongs to, and which
   receive. See engine.h. */
#include "engine.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct pc_called *pc_call_find(const struct pc_context *context, uint64_t number) {
    uint64_t hash = pc_hash(number, 0);
    struct pc_chained *chained = pc_chains_first(&context->calls, hash);
    while (chained != NULL && chained->hash != hash) /* the hash of a number is no other number's */
        chained = chained->next;
    return chained != NULL ? PC_CHAINED_IN(chained, struct pc_called, by_number) : NULL;
}

static size_t signature_nbytes(const unsigned char *text, size_t nbytes) {
    const unsigned char *end = memchr(text, 0, nbytes);
    return end != NULL ? (size_t)(end - text) : nbytes;
}

/* Whether a message belongs to the same call as its sender has made. */
static bool is_same(const struct pc_called *call, const struct pc_message *message) {
    size_t skipped =
        PC_COLLECTIVE_NBYTES + (message->header[0] == PC_KIND_OFFERED ? PC_OFFER_NBYTES : 0);
    const unsigned char *text = message->header + skipped;
    size_t nbytes = message->header_nbytes - skipped;
    if (nbytes < call->signature_nbytes || memcmp(text, call->text, call->signature_nbytes) != 0)
        return false;
    return nbytes == call->signature_nbytes || text[call->signature_nbytes] == 0;
}

/* --- receives --------------------------------------------------------------------------------- */

static bool is_held(const struct pc_receive *receive, const struct pc_message *message) {
    return receive->ask || (receive->takes_offered && message->header[0] == PC_KIND_OFFERED);
}

/* A receive that waits has got a message, which stands nowhere. */
static void take(struct pc_receive *receive, struct pc_message *message) {
    struct pc_engine *engine = receive->context->engine;
    int error = PC_REFUSED;
    if (is_held(receive, message)) {
        pc_receive_couple(receive, message, PC_RECEIVE_HELD);
        pc_engine_tell(engine, &receive->ending);
        return;
    }
    if (pc_receive_fits(receive, message)) {
        switch (pc_receive_fetch(receive, message, &error)) {
        case PC_TAKEN_UP:
            return;
        case PC_MISSED:
            pc_collect_again(receive);
            return;
        case PC_GIVEN_BACK:
            break;
        }
    }
    pc_receive_end(engine, receive, error, message);
    pc_message_drop(engine, message, false);
}

void pc_collect_again(struct pc_receive *receive) {
    struct pc_context *context = receive->context;
    receive->state = PC_RECEIVE_POSTED;
    receive->address.is_early = false;
    (void)pc_address_add(&context->addresses, &receive->address); /* nothing came there since */
}

void pc_collect_start(struct pc_context *context, struct pc_receive *receive) {
    struct pc_engine *engine = context->engine;
    struct pc_addressed *at = &receive->address;
    pc_engine_enter(engine);
    receive->by_address = true;
    receive->context = context;
    struct pc_addressed *early =
        pc_address_find(&context->addresses, at->call, at->subcall, at->sender, at->index);
    int reason = context->broken != 0 ? context->broken : engine->gone[at->sender];
    if (context->broken == 0 && early != NULL) {
        struct pc_message *message = PC_CHAINED_IN(early, struct pc_message, address);
        pc_address_remove(&context->addresses, early);
        take(receive, message);
    } else if (reason != 0) {
        pc_receive_end(engine, receive, reason, NULL);
    } else {
        pc_collect_again(receive);
    }
    pc_engine_leave(engine);
}

/* --- calls ------------------------------------------------------------------------------------ */

/* Give early messages of a call to the caller: all, or those that belong to another call than this
   one. */
static void give_early(struct pc_context *context, uint64_t number, const struct pc_called *but) {
    struct pc_addressed *at = pc_address_early(&context->addresses, number);
    for (struct pc_addressed *next; at != NULL; at = next) {
        struct pc_message *message = PC_CHAINED_IN(at, struct pc_message, address);
        next = at->next;
        if (but != NULL && is_same(but, message))
            continue;
        pc_address_remove(&context->addresses, at);
        if (pc_message_to_caller(context->engine, message) < 0)
            pc_message_drop(context->engine, message, false);
    }
}

/* Note a call where the launcher reads it. */
static struct pc_noted_call *note(const struct pc_context *context, const struct pc_called *call) {
    struct pc_engine *engine = context->engine;
    if (engine->notes == NULL)
        return NULL;
    struct pc_noted_call *noted = &engine->notes->calls[engine->notes->num_calls++ % PC_NOTED];
    size_t nbytes = call->nbytes < sizeof noted->text ? call->nbytes : sizeof noted->text;
    noted->ordinal = engine->notes->num_calls;
    noted->ident = context->ident;
    noted->number = call->number;
    noted->begun_ns = pc_now_ns();
    noted->ended_ns = 0;
    noted->nbytes = nbytes;
    memcpy(noted->text, call->text, nbytes);
    return noted;
}

struct pc_called *pc_context_begin(struct pc_context *context, const void *text, size_t nbytes) {
    struct pc_called *call = malloc(sizeof *call + nbytes);
    if (call == NULL)
        return NULL;
    call->by_number = (struct pc_chained){0};
    call->number = context->next_call++;
    context->engine->tally->calls++;
    call->nbytes = nbytes;
    memcpy(call->text, text, nbytes);
    call->signature_nbytes = signature_nbytes(call->text, nbytes);
    call->noted = note(context, call);
    free(context->newest);
    context->newest = NULL;
    pc_chains_add(&context->calls, &call->by_number, pc_hash(call->number, 0));
    pc_engine_enter(context->engine);
    give_early(context, call->number, call);
    pc_engine_leave(context->engine);
    return call;
}

void pc_context_end(struct pc_context *context, struct pc_called *call) {
    if (call->noted != NULL && call->noted->ident == context->ident &&
        call->noted->number == call->number)
        call->noted->ended_ns = pc_now_ns();
    struct pc_called **last = &context->last_calls[context->num_ended++ % PC_LAST_CALLS];
    if (*last != NULL && (*last)->number + 1 == context->next_call)
        context->newest = *last;
    else
        free(*last);
    *last = call;
    pc_chains_remove(&context->calls, &call->by_number);
    pc_engine_enter(context->engine);
    give_early(context, call->number, NULL);
    pc_engine_leave(context->engine);
}

const struct pc_called *pc_call_newest(const struct pc_context *context) {
    uint64_t number = context->next_call - 1;
    if (context->newest != NULL || context->next_call == 0)
        return context->newest;
    const struct pc_called *call = pc_call_find(context, number);
    for (int index = 0; call == NULL && index < PC_LAST_CALLS; index++)
        if (context->last_calls[index] != NULL && context->last_calls[index]->number == number)
            call = context->last_calls[index];
    return call;
}

/* --- messages --------------------------------------------------------------------------------- */

static uint64_t little_endian(const unsigned char *from, int nbytes) {
    uint64_t value = 0;
    for (int byte = 0; byte < nbytes; byte++)
        value |= (uint64_t)from[byte] << 8 * byte;
    return value;
}

int pc_call_arrived(struct pc_context *context, struct pc_message *message) {
    const unsigned char *header = message->header;
    struct pc_addressed *at = &message->address;
    at->call = little_endian(header + 9, 4);
    at->subcall = (uint16_t)little_endian(header + 13, 2);
    at->index = (uint32_t)little_endian(header + 15, 4);
    at->sender = (uint32_t)message->match.queued.source;
    at->is_early = true;
    const struct pc_called *call = pc_call_find(context, at->call);
    if (call != NULL ? !is_same(call, message) : at->call < context->next_call)
        return pc_message_to_caller(context->engine, message);
    message->context = context;
    struct pc_addressed *there = pc_address_add(&context->addresses, at);
    if (there == NULL) {
        if (message->state != PC_MESSAGE_PASSING || pc_message_keep(message))
            return 0;
        pc_address_remove(&context->addresses, at);
        return -ENOMEM;
    }
    if (there->is_early)
        return -EPROTO; /* two messages of one address */
    struct pc_receive *receive = PC_CHAINED_IN(there, struct pc_receive, address);
    if (is_held(receive, message) && message->state == PC_MESSAGE_PASSING &&
        !pc_message_keep(message))
        return -ENOMEM;
    pc_address_remove(&context->addresses, there);
    take(receive, message);
    return 0;
}

/* --- the end ---------------------------------------------------------------------------------- */

void pc_calls_forget(struct pc_context *context, int peer, int status) {
    struct pc_engine *engine = context->engine;
    for (struct pc_addressed *call = pc_address_calls(&context->addresses), *next_call;
         call != NULL; call = next_call) {
        next_call = call->next_call;
        for (struct pc_addressed *at = call, *next; at != NULL; at = next) {
            struct pc_message *message = PC_CHAINED_IN(at, struct pc_message, address);
            next = at->next;
            if (at->sender == (uint32_t)peer && message->state != PC_MESSAGE_HERE)
                (void)pc_message_forget(engine, message);
        }
    }
    for (struct pc_addressed *at = pc_address_receives(&context->addresses), *next; at != NULL;
         at = next) {
        next = at->next;
        if (at->sender != (uint32_t)peer)
            continue;
        pc_address_remove(&context->addresses, at);
        pc_receive_end(engine, PC_CHAINED_IN(at, struct pc_receive, address), status, NULL);
    }
}

void pc_calls_stop(struct pc_context *context, int status, bool closes) {
    struct pc_engine *engine = context->engine;
    struct pc_addressed *at;
    while ((at = pc_address_receives(&context->addresses)) != NULL) {
        pc_address_remove(&context->addresses, at);
        pc_receive_end(engine, PC_CHAINED_IN(at, struct pc_receive, address), status, NULL);
    }
    while ((at = pc_address_calls(&context->addresses)) != NULL) {
        pc_address_remove(&context->addresses, at);
        pc_message_drop(engine, PC_CHAINED_IN(at, struct pc_message, address), closes);
    }
}

static void free_call(struct pc_chained *chained) {
    free(PC_CHAINED_IN(chained, struct pc_called, by_number));
}

void pc_calls_free(struct pc_context *context) {
    for (int index = 0; index < PC_LAST_CALLS; index++)
        free(context->last_calls[index]);
    free(context->newest);
    pc_chains_each(&context->calls, free_call);
    pc_chains_free(&context->calls);
    pc_address_free(&context->addresses);
}
