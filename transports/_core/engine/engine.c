/* The engine: which contexts there are, and what links tell. See engine.h. */
#include "engine.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* --- what has ended is told ------------------------------------------------------------------- */

void pc_engine_tell(struct pc_engine *engine, struct pc_ending *ending) {
    if (ending->stands)
        return;
    ending->stands = true;
    ending->next = NULL;
    *engine->last_ending = ending;
    engine->last_ending = &ending->next;
}

void pc_engine_tell_not(struct pc_engine *engine, struct pc_ending *ending) {
    if (!ending->stands)
        return;
    struct pc_ending **at = &engine->endings;
    while (*at != ending)
        at = &(*at)->next;
    *at = ending->next;
    if (*at == NULL)
        engine->last_ending = at;
    ending->stands = false;
}

void pc_engine_leave(struct pc_engine *engine) {
    if (--engine->depth > 0 || engine->telling)
        return;
    engine->telling = true;
    struct pc_ending *ending;
    while ((ending = engine->endings) != NULL) {
        pc_engine_tell_not(engine, ending);
        if (ending->is_send) {
            struct pc_send *send = PC_CHAINED_IN(ending, struct pc_send, ending);
            send->ended(send);
        } else {
            struct pc_receive *receive = PC_CHAINED_IN(ending, struct pc_receive, ending);
            receive->notify(receive);
        }
    }
    engine->telling = false;
}

/* --- memory that links may still use ---------------------------------------------------------- */

void pc_engine_give_scratch(struct pc_engine *engine, void *memory) {
    if (engine->num_unsettled == 0 || memory == NULL) {
        pc_scratch_give(&engine->scratch, memory);
        return;
    }
    struct pc_left *left = malloc(sizeof *left);
    if (left == NULL)
        return; /* it is lost: better than to have it written to */
    *left = (struct pc_left){engine->left, memory};
    engine->left = left;
}

void pc_engine_settled(struct pc_engine *engine) {
    if (--engine->num_unsettled > 0)
        return;
    while (engine->left != NULL) {
        struct pc_left *left = engine->left;
        engine->left = left->next;
        pc_scratch_give(&engine->scratch, left->memory);
        free(left);
    }
}

/* --- the contexts ----------------------------------------------------------------------------- */

/* A context without messages, in the list of all; NULL: there is no memory. */
static struct pc_context *new_context(struct pc_engine *engine, uint64_t ident, size_t num_members,
                                      int me) {
    struct pc_context *context = calloc(1, sizeof *context);
    int *members = malloc((num_members + 1) * sizeof *members);
    if (context == NULL || members == NULL) {
        free(context);
        free(members);
        return NULL;
    }
    context->engine = engine;
    context->num_users = 1;
    context->ident = ident;
    context->me = me;
    context->members = members;
    context->num_members = num_members;
    pc_match_open(&context->matching);
    pc_list_clear(&context->taken);
    PC_LIST_ADD(engine->contexts, context);
    return context;
}

void pc_context_let_go(struct pc_context *context) {
    if (--context->num_users > 0)
        return;
    pc_match_free(&context->matching);
    pc_calls_free(context);
    free(context->members);
    free(context->counts);
    free(context);
}

/* Take a context out of the list of all. */
static void leave_list(struct pc_context *context) {
    PC_LIST_REMOVE(context);
    pc_context_let_go(context);
}

int pc_engine_open(struct pc_engine *engine) {
    if (engine->tally == NULL)
        engine->tally = &engine->own_tally;
    engine->gone = calloc((size_t)engine->size, sizeof *engine->gone);
    engine->closed = calloc(PC_CLOSED_IDENTS, sizeof *engine->closed);
    pc_list_clear(&engine->abandoned);
    engine->last_ending = &engine->endings;
    if (engine->gone != NULL && engine->closed != NULL)
        engine->others = new_context(engine, 0, 0, 0);
    if (engine->others != NULL)
        return 0;
    free(engine->gone);
    free(engine->closed);
    return -ENOMEM;
}

/* Take the first message out of a list; or NULL. */
static struct pc_message *take_first(struct pc_message_list *list) {
    struct pc_message *message = list->first;
    if (message != NULL)
        pc_list_remove(message);
    return message;
}

static struct pc_chained *find(const struct pc_chains *chains, uint64_t ident) {
    uint64_t hash = pc_hash(ident, 0);
    struct pc_chained *chained = pc_chains_first(chains, hash);
    while (chained != NULL && chained->hash != hash) /* the hash of a number is no other number's */
        chained = chained->next;
    return chained;
}

static void free_unopened(struct pc_engine *engine, struct pc_unopened *unopened) {
    pc_chains_remove(&engine->unopened, &unopened->by_ident);
    PC_LIST_REMOVE(unopened);
    free(unopened);
}

void pc_engine_free(struct pc_engine *engine) {
    struct pc_message *message;
    while ((message = take_first(&engine->abandoned)) != NULL)
        pc_message_free(engine, message);
    while (engine->first_unopened != NULL) {
        struct pc_unopened *unopened = engine->first_unopened;
        while ((message = take_first(&unopened->messages)) != NULL)
            pc_message_free(engine, message);
        free_unopened(engine, unopened);
    }
    while ((message = engine->free_messages) != NULL) {
        engine->free_messages = message->next;
        free(message);
    }
    pc_chains_free(&engine->by_ident);
    pc_chains_free(&engine->unopened);
    pc_chains_free(&engine->by_closed);
    leave_list(engine->others);
    pc_scratch_free(&engine->scratch);
    for (struct pc_spare *spare = engine->spare_moves, *next; spare != NULL; spare = next) {
        next = spare->next;
        free(spare);
    }
    free(engine->gone);
    free(engine->closed);
}

static uint64_t ident_in(const unsigned char *header) {
    uint64_t ident = 0;
    for (int byte = 0; byte < 8; byte++)
        ident |= (uint64_t)header[1 + byte] << 8 * byte;
    return ident;
}

struct pc_context *pc_context_of(const struct pc_engine *engine, const void *header,
                                 size_t header_nbytes) {
    const unsigned char *bytes = header;
    if (header_nbytes < PC_P2P_NBYTES || (bytes[0] != PC_KIND_P2P &&
                                          bytes[0] != PC_KIND_COLLECTIVE &&
                                          bytes[0] != PC_KIND_OFFERED))
        return NULL;
    struct pc_chained *chained = find(&engine->by_ident, ident_in(bytes));
    return chained != NULL ? PC_CHAINED_IN(chained, struct pc_context, by_ident) : NULL;
}

struct pc_context *pc_context_open(struct pc_engine *engine, uint64_t ident, const int *members,
                                   size_t num_members, int me) {
    struct pc_counts *counts = calloc((size_t)engine->size, sizeof *counts);
    struct pc_context *context =
        counts != NULL ? new_context(engine, ident, num_members, me) : NULL;
    if (context == NULL) {
        free(counts);
        return NULL;
    }
    context->counts = counts;
    memcpy(context->members, members, num_members * sizeof *members);
    pc_chains_add(&engine->by_ident, &context->by_ident, pc_hash(ident, 0));
    struct pc_chained *chained = find(&engine->unopened, ident);
    if (chained == NULL)
        return context;
    struct pc_unopened *unopened = PC_CHAINED_IN(chained, struct pc_unopened, by_ident);
    struct pc_message *message;
    while ((message = take_first(&unopened->messages)) != NULL) {
        struct pc_posted *probes;
        engine->num_unopened--;
        message->context = context;
        if (message->header[0] == PC_KIND_P2P) {
            message->match.queued.number = context->matching.next_number++;
            /* nothing is posted yet */
            (void)pc_match_arrive(&context->matching, &message->match, &probes);
        } else if (pc_call_arrived(context, message) < 0) {
            pc_message_drop(engine, message, false); /* its sender has sent two of one address */
        }
    }
    free_unopened(engine, unopened);
    return context;
}

void pc_context_close(struct pc_context *context) {
    struct pc_engine *engine = context->engine;
    pc_engine_enter(engine);
    pc_context_stop(context, PC_CONTEXT_CLOSED, true);
    for (struct pc_send *send = engine->others->sends; send != NULL; send = send->next)
        if (send->counted_in == context)
            send->counted_in = NULL;
    pc_chains_remove(&engine->by_ident, &context->by_ident);
    struct pc_closed *closed = &engine->closed[engine->num_closed++ % PC_CLOSED_IDENTS];
    if (closed->by_ident.at != NULL)
        pc_chains_remove(&engine->by_closed, &closed->by_ident);
    closed->ident = context->ident;
    pc_chains_add(&engine->by_closed, &closed->by_ident, pc_hash(context->ident, 0));
    leave_list(context);
    pc_engine_leave(engine);
}

/* --- what links tell -------------------------------------------------------------------------- */

/* A message for a context that its sender has opened, and this rank is still about to open. */
static int keep_unopened(struct pc_engine *engine, uint64_t ident, struct pc_message *message) {
    if (engine->num_unopened >= PC_MOST_UNOPENED)
        return -ENOBUFS;
    if (message->state == PC_MESSAGE_PASSING && !pc_message_keep(message))
        return -ENOMEM;
    struct pc_chained *chained = find(&engine->unopened, ident);
    struct pc_unopened *unopened = chained != NULL
                                       ? PC_CHAINED_IN(chained, struct pc_unopened, by_ident)
                                       : calloc(1, sizeof *unopened);
    if (unopened == NULL)
        return -ENOMEM;
    if (chained == NULL) {
        unopened->ident = ident;
        pc_list_clear(&unopened->messages);
        pc_chains_add(&engine->unopened, &unopened->by_ident, pc_hash(ident, 0));
        PC_LIST_ADD(engine->first_unopened, unopened);
    }
    pc_list_append(&unopened->messages, message);
    engine->num_unopened++;
    return 0;
}

/* There is no memory for a payload that is about to pass: take the message out, and undo what it
   has done. */
static void undo_arrival(struct pc_context *context, struct pc_message *message,
                         struct pc_ending **mark) {
    struct pc_engine *engine = context->engine;
    struct pc_ending *ending = *mark;
    *mark = NULL;
    engine->last_ending = mark;
    if (message->taker != NULL)
        pc_list_remove(message);
    else
        pc_match_withdraw_message(&context->matching, &message->match);
    for (struct pc_ending *next; ending != NULL; ending = next) {
        struct pc_receive *receive = PC_CHAINED_IN(ending, struct pc_receive, ending);
        next = ending->next;
        ending->stands = false;
        free(receive->header);
        receive->header = NULL;
        receive->context = context;
        receive->message = NULL;
        receive->state = PC_RECEIVE_POSTED;
        /* it has waited: nothing else fits */
        (void)pc_match_post(&context->matching, &receive->posted);
    }
}

static int arrived_in(struct pc_context *context, struct pc_message *message) {
    struct pc_engine *engine = context->engine;
    struct pc_ending **mark = engine->last_ending;
    message->context = context;
    /* it comes after all that is here */
    message->match.queued.number = context->matching.next_number++;
    pc_context_settle(context, message, NULL);
    if (engine->arriving == NULL || message->state != PC_MESSAGE_PASSING ||
        pc_message_keep(message))
        return 0;
    undo_arrival(context, message, mark);
    return -ENOMEM;
}

/* Whether a header is as its kind demands. */
static bool is_whole(const struct pc_incoming *in) {
    const unsigned char *header = in->header;
    if (header[0] == PC_KIND_P2P)
        return in->header_nbytes >= PC_P2P_NBYTES && header[16] < 0x80; /* no tag is negative */
    return in->header_nbytes >=
           PC_COLLECTIVE_NBYTES + (header[0] == PC_KIND_OFFERED ? PC_OFFER_NBYTES : 0);
}

/* A message that belongs to a context. */
static int matched_arrived(struct pc_engine *engine, struct pc_link *link,
                           const struct pc_incoming *in, struct pc_message **kept) {
    const unsigned char *header = in->header;
    if (!is_whole(in))
        return -EPROTO;
    uint64_t ident = ident_in(header);
    struct pc_message *message = pc_message_new(engine, link, in);
    if (message == NULL)
        return -ENOMEM;
    int error = 0;
    engine->arriving = message;
    struct pc_chained *chained = find(&engine->by_ident, ident);
    struct pc_context *context =
        chained != NULL ? PC_CHAINED_IN(chained, struct pc_context, by_ident) : NULL;
    if (context != NULL && context->broken == 0)
        error = header[0] == PC_KIND_P2P ? arrived_in(context, message)
                                         : pc_call_arrived(context, message);
    else if (context != NULL)
        pc_message_drop(engine, message, false);
    else if (find(&engine->by_closed, ident) != NULL)
        pc_message_drop(engine, message, true);
    else
        error = keep_unopened(engine, ident, message);
    if (error != 0)
        pc_message_free(engine, message);
    else if (engine->arriving != NULL &&
             (message->state != PC_MESSAGE_HERE || message->spare == NULL))
        *kept = message;
    engine->arriving = NULL;
    return error;
}

int pc_message_to_caller(struct pc_engine *engine, struct pc_message *message) {
    if (message->state == PC_MESSAGE_PASSING && !pc_message_keep(message))
        return -ENOMEM;
    struct pc_receive *receive = engine->other(engine, message);
    if (receive == NULL)
        return -ENOMEM;
    pc_receive_hold(engine->others, receive, message);
    return 0;
}

/* A message of another kind: it is held by a receive of the caller's from the beginning. */
static int other_arrived(struct pc_engine *engine, struct pc_link *link,
                         const struct pc_incoming *in, struct pc_message **kept) {
    struct pc_message *message = pc_message_new(engine, link, in);
    if (message == NULL)
        return -ENOMEM;
    bool passes = message->state == PC_MESSAGE_PASSING;
    if (pc_message_to_caller(engine, message) < 0) {
        pc_message_free(engine, message);
        return -ENOMEM;
    }
    if (!passes)
        *kept = message;
    return 0;
}

int pc_arrived(struct pc_engine *engine, struct pc_link *link, const struct pc_incoming *incoming,
               struct pc_message **message) {
    *message = NULL;
    if (incoming->header_nbytes == 0)
        return -EPROTO;
    int error = -EPROTO, kind = *(const unsigned char *)incoming->header;
    pc_engine_enter(engine);
    if (kind == PC_KIND_P2P ||
        (engine->matches_calls && (kind == PC_KIND_COLLECTIVE || kind == PC_KIND_OFFERED)))
        error = matched_arrived(engine, link, incoming, message);
    else if (engine->other != NULL)
        error = other_arrived(engine, link, incoming, message);
    pc_engine_leave(engine);
    return error;
}

void pc_kept(struct pc_engine *engine, struct pc_message *message, const void *payload) {
    (void)engine;
    message->state = PC_MESSAGE_HERE;
    message->payload = payload;
}

/* End the receive into whose memory a message was being read. */
static void end_reading(struct pc_engine *engine, struct pc_message *message, int status) {
    pc_list_remove(message);
    pc_receive_end(engine, message->taker, status, message);
    pc_message_free(engine, message);
}

void pc_received(struct pc_engine *engine, struct pc_message *message) {
    pc_engine_enter(engine);
    if (message->spare != NULL) { /* its receive was given up */
        message->state = PC_MESSAGE_HERE;
        message->payload = message->spare;
    } else {
        end_reading(engine, message, 0);
    }
    pc_engine_leave(engine);
}

/* Forget a message that stands in no context. */
static void forget_outside(struct pc_engine *engine, struct pc_message *message) {
    struct pc_message_list *list = message->list;
    pc_list_remove(message);
    pc_message_free(engine, message);
    if (list == &engine->abandoned)
        return;
    engine->num_unopened--;
    if (list->first == NULL)
        free_unopened(engine, (struct pc_unopened *)list);
}

struct pc_receive *pc_message_forget(struct pc_engine *engine, struct pc_message *message) {
    struct pc_receive *receive = message->taker;
    if (message->context == NULL) {
        forget_outside(engine, message);
        return NULL;
    }
    if (receive != NULL) {
        receive->message = NULL;
        pc_list_remove(message);
    } else if (!pc_address_remove(&message->context->addresses, &message->address)) {
        pc_match_withdraw_message(&message->context->matching, &message->match);
    }
    pc_message_free(engine, message);
    return receive;
}

void pc_withdrawn(struct pc_engine *engine, struct pc_message *message) {
    struct pc_context *context = message->context;
    pc_engine_enter(engine);
    struct pc_receive *receive = pc_message_forget(engine, message);
    if (receive != NULL && (receive->ask || receive->state == PC_RECEIVE_HELD))
        pc_receive_end(engine, receive, PC_TAKEN_BACK, NULL);
    else if (receive != NULL && receive->by_address)
        pc_collect_again(receive);
    else if (receive != NULL)
        pc_context_settle(context, NULL, receive);
    pc_engine_leave(engine);
}

void pc_sent(struct pc_engine *engine, struct pc_send *send) {
    pc_engine_enter(engine);
    pc_send_end(engine, send, send->stopped ? PC_STOPPED : 0);
    pc_engine_leave(engine);
}

void pc_send_failed(struct pc_engine *engine, struct pc_send *send, int status) {
    pc_engine_enter(engine);
    pc_send_end(engine, send, status);
    pc_engine_leave(engine);
}

/* --- what ends with a peer that has ended ----------------------------------------------------- */

/* Its messages in a list, but those that are here, are gone. */
static void forget_list(struct pc_engine *engine, struct pc_message_list *list, int peer,
                        int status) {
    for (struct pc_message *message = list->first, *next; message != NULL; message = next) {
        next = message->next;
        bool is_lost = message->state == PC_MESSAGE_WAITS || message->state == PC_MESSAGE_READING;
        if (message->match.queued.source != peer || !is_lost)
            continue;
        struct pc_receive *receive = pc_message_forget(engine, message);
        if (receive != NULL)
            pc_receive_end(engine, receive, status, NULL);
    }
}

static void forget_in(struct pc_context *context, int peer, int status) {
    struct pc_engine *engine = context->engine;
    for (struct pc_send *send = context->sends, *next; send != NULL; send = next) {
        next = send->next;
        if (send->peer == peer)
            pc_send_end(engine, send, status);
    }
    forget_list(engine, &context->taken, peer, status);
    struct pc_unexpected *each = pc_match_first_message(&context->matching);
    for (struct pc_unexpected *next; each != NULL; each = next) {
        struct pc_message *message = (struct pc_message *)each;
        next = pc_match_next_message(each);
        if (each->queued.source == peer && message->state != PC_MESSAGE_HERE)
            (void)pc_message_forget(engine, message);
    }
    struct pc_posted *posted = pc_match_first_posted(&context->matching);
    for (struct pc_posted *next; posted != NULL; posted = next) {
        next = pc_match_next_posted(posted);
        int reason = pc_context_no_sender(context, posted->queued.source);
        if (reason == 0)
            continue;
        pc_match_withdraw_posted(&context->matching, posted);
        pc_receive_end(engine, (struct pc_receive *)posted, reason, NULL);
    }
    pc_calls_forget(context, peer, status);
}

void pc_engine_forget(struct pc_engine *engine, int peer, int status) {
    if (engine->gone[peer] != 0)
        return;
    pc_engine_enter(engine);
    engine->gone[peer] = status;
    engine->links[peer]->ops->forget(engine->links[peer], peer);
    forget_list(engine, &engine->abandoned, peer, status);
    for (struct pc_context *context = engine->contexts; context != NULL; context = context->next)
        forget_in(context, peer, status);
    for (struct pc_unopened *unopened = engine->first_unopened, *next; unopened != NULL;
         unopened = next) {
        next = unopened->next; /* it is freed with its last message */
        forget_list(engine, &unopened->messages, peer, status);
    }
    pc_engine_leave(engine);
}
