/* Point to point on one context: receives, sends, and what a receive does with its message. See
   engine.h. */
#include "engine.h"

#include <stdlib.h>
#include <string.h>

void pc_p2p_header(unsigned char header[PC_P2P_NBYTES], uint64_t ident, int64_t tag,
                   unsigned char form) {
    header[0] = PC_KIND_P2P;
    for (int byte = 0; byte < 8; byte++) {
        header[1 + byte] = (unsigned char)(ident >> 8 * byte);
        header[9 + byte] = (unsigned char)((uint64_t)tag >> 8 * byte);
    }
    header[PC_FORM_AT] = form;
}

/* --- notes of messages between programs ------------------------------------------------------- */

static uint64_t note_send(struct pc_engine *engine, const struct pc_send *send,
                          const unsigned char *header) {
    int64_t tag;
    if (send->counted_in == NULL || header[0] != PC_KIND_P2P)
        return 0;
    memcpy(&tag, header + 9, sizeof tag);
    return pc_note_message(engine->notes, send->counted_in->ident, send->peer, tag, send->nbytes,
                           PC_NOTED_SEND);
}

static uint64_t note_receive(const struct pc_context *context, const struct pc_receive *receive) {
    if (receive->by_address || receive->posted.peek || context->counts == NULL)
        return 0;
    return pc_note_message(context->engine->notes, context->ident, receive->posted.queued.source,
                           receive->posted.queued.tag, receive->room, PC_NOTED_RECEIVE);
}

static void note_received(struct pc_engine *engine, const struct pc_receive *receive) {
    struct pc_noted_message *noted = pc_noted_of(engine->notes, receive->noted);
    if (noted != NULL) {
        noted->peer = receive->source;
        noted->tag = receive->tag;
        noted->nbytes = receive->nbytes;
        noted->what = PC_NOTED_RECEIVE | PC_NOTED_DONE;
    }
}

/* --- what ends -------------------------------------------------------------------------------- */

void pc_receive_end(struct pc_engine *engine, struct pc_receive *receive, int status,
                    const struct pc_message *message) {
    const struct pc_context *context = receive->context;
    receive->state = PC_RECEIVE_ENDED;
    receive->status = status;
    receive->context = NULL;
    receive->message = NULL;
    if (message != NULL) {
        receive->source = message->match.queued.source;
        receive->tag = message->match.queued.tag;
        receive->nbytes = message->nbytes;
        if (status == 0 && !receive->posted.peek && context->counts != NULL)
            pc_count_received(context, receive->source, receive->nbytes);
        if (receive->posted.peek || status == PC_REFUSED) {
            receive->header = malloc(message->header_nbytes);
            receive->header_nbytes = message->header_nbytes;
            if (receive->header != NULL)
                memcpy(receive->header, message->header, message->header_nbytes);
        }
    }
    if (status == 0 && message != NULL)
        note_received(engine, receive);
    else if (status != PC_TAKEN_BACK) /* which waits again */
        pc_note_end(engine->notes, receive->noted,
                    status == PC_REFUSED ? PC_NOTED_REFUSED : PC_NOTED_GIVEN_UP);
    pc_engine_tell(engine, &receive->ending);
}

static void unlink_send(struct pc_send *send) {
    PC_LIST_REMOVE(send);
    send->context = NULL;
}

void pc_send_end(struct pc_engine *engine, struct pc_send *send, int status) {
    unlink_send(send);
    send->status = status;
    if (status == 0 && send->counted_in != NULL)
        pc_count_sent(send->counted_in, send->peer, send->nbytes);
    pc_note_end(engine->notes, send->noted, status == 0 ? PC_NOTED_DONE : PC_NOTED_GIVEN_UP);
    pc_engine_tell(engine, &send->ending);
}

int pc_context_no_sender(const struct pc_context *context, int source) {
    const int *gone = context->engine->gone;
    if (source != PC_ANY)
        return gone[source];
    int reason = 0; /* nobody else: what one sends to oneself may come at any time */
    for (size_t member = 0; member < context->num_members; member++) {
        if (context->members[member] == context->me)
            continue;
        if (gone[context->members[member]] == 0)
            return 0;
        if (reason == 0)
            reason = gone[context->members[member]];
    }
    return reason;
}

/* --- a receive and its message ---------------------------------------------------------------- */

void pc_receive_couple(struct pc_receive *receive, struct pc_message *message,
                       enum pc_receive_state state) {
    receive->state = state;
    receive->message = message;
    message->taker = receive;
    pc_list_append(&receive->context->taken, message);
}

static void decouple(struct pc_receive *receive) {
    pc_list_remove(receive->message);
    receive->message->taker = NULL;
    receive->message = NULL;
}

static void gather(unsigned char *into, const struct pc_incoming *in) {
    for (size_t part = 0; part < in->num_parts; into += in->parts[part++].iov_len)
        if (in->parts[part].iov_len > 0)
            memcpy(into, in->parts[part].iov_base, in->parts[part].iov_len);
}

enum pc_fetched pc_receive_fetch(struct pc_receive *receive, struct pc_message *message,
                                 int *error) {
    struct pc_engine *engine = receive->context->engine;
    struct pc_link *link = message->link;
    int answer = PC_RECEIVED;
    message->keeper = receive->keeper;
    switch (message->state) {
    case PC_MESSAGE_PASSING:
        gather(receive->into, message->passing);
        break;
    case PC_MESSAGE_HERE:
        if (message->nbytes > 0)
            memcpy(receive->into, message->payload, message->nbytes);
        if (message->spare == NULL)
            link->ops->release(link, message);
        break;
    case PC_MESSAGE_READING: /* for one that was given up */
        if (link->ops->redirect(link, message, receive->into)) {
            free(message->spare);
            message->spare = NULL;
            answer = PC_UNDER_WAY;
        } else if (message->nbytes > 0) {
            memcpy(receive->into, message->spare, message->nbytes);
        }
        break;
    case PC_MESSAGE_WAITS:
        answer = link->ops->accept(link, message, receive->into);
    }
    if (answer == PC_UNDER_WAY) {
        message->state = PC_MESSAGE_READING;
        pc_receive_couple(receive, message, PC_RECEIVE_READING);
        return PC_TAKEN_UP;
    }
    if (answer < 0) {
        *error = answer;
        return PC_GIVEN_BACK;
    }
    if (answer == PC_RECEIVED || receive->ask)
        pc_receive_end(engine, receive, answer == PC_RECEIVED ? 0 : PC_TAKEN_BACK, message);
    pc_message_free(engine, message);
    return receive->state == PC_RECEIVE_ENDED ? PC_TAKEN_UP : PC_MISSED;
}

bool pc_receive_fits(const struct pc_receive *receive, const struct pc_message *message) {
    if (receive->by_address)
        return (message->nbytes == receive->room ||
                (receive->takes_less && message->nbytes < receive->room)) &&
               message->header[0] == PC_KIND_COLLECTIVE;
    return message->nbytes <= receive->room &&
           message->header_nbytes >= PC_FORM_AT + receive->expects_nbytes &&
           (receive->expects_nbytes == 0 ||
            memcmp(message->header + PC_FORM_AT, receive->expects, receive->expects_nbytes) == 0);
}

bool pc_receive_is_offered(const struct pc_receive *receive) {
    return receive->message->header[0] == PC_KIND_OFFERED;
}

/* A receive has taken a message. */
static enum pc_fetched take(struct pc_receive *receive, struct pc_message *message) {
    struct pc_engine *engine = receive->context->engine;
    if (receive->ask && (receive->expects_nbytes == 0 || pc_receive_fits(receive, message))) {
        pc_receive_couple(receive, message, PC_RECEIVE_HELD);
        pc_engine_tell(engine, &receive->ending);
        return PC_TAKEN_UP;
    }
    int error = PC_REFUSED;
    enum pc_fetched outcome = PC_GIVEN_BACK;
    if (!receive->ask && pc_receive_fits(receive, message))
        outcome = pc_receive_fetch(receive, message, &error);
    if (outcome == PC_GIVEN_BACK)
        pc_receive_end(engine, receive, error, message);
    return outcome;
}

/* Post a receive, in its place; its message, which it has taken; NULL: it waits, or has ended. */
static struct pc_message *post(struct pc_context *context, struct pc_receive *receive) {
    struct pc_posted *posted = &receive->posted;
    struct pc_message *message = (struct pc_message *)pc_match_post(&context->matching, posted);
    if (message != NULL) {
        if (!posted->peek)
            return message;
        pc_receive_end(context->engine, receive, 0, message);
        return NULL;
    }
    receive->state = PC_RECEIVE_POSTED;
    int reason = pc_context_no_sender(context, posted->queued.source);
    if (reason != 0) {
        pc_match_withdraw_posted(&context->matching, posted);
        pc_receive_end(context->engine, receive, reason, NULL);
    }
    return NULL;
}

/* Give a message to those that wait for it: the receive that has taken it; NULL: it waits now. */
static struct pc_receive *offer(struct pc_context *context, struct pc_message *message) {
    struct pc_posted *probes;
    struct pc_posted *posted = pc_match_arrive(&context->matching, &message->match, &probes);
    for (struct pc_posted *next; probes != NULL; probes = next) {
        next = probes->next_probe;
        pc_receive_end(context->engine, (struct pc_receive *)probes, 0, message);
    }
    return (struct pc_receive *)posted;
}

void pc_context_settle(struct pc_context *context, struct pc_message *message,
                       struct pc_receive *receive) {
    for (;;) {
        if (message == NULL)
            message = post(context, receive);
        else
            receive = offer(context, message);
        if (message == NULL || receive == NULL)
            return;
        switch (take(receive, message)) {
        case PC_TAKEN_UP:
            return;
        case PC_MISSED:
            message = NULL;
            break;
        case PC_GIVEN_BACK:
            receive = NULL;
        }
    }
}

/* --- what the caller asks for ----------------------------------------------------------------- */

void pc_receive_start(struct pc_context *context, struct pc_receive *receive) {
    receive->noted = note_receive(context, receive);
    pc_receive_start_at(context, receive, context->matching.next_number++);
}

void pc_receive_start_at(struct pc_context *context, struct pc_receive *receive, uint64_t number) {
    pc_engine_enter(context->engine);
    receive->posted.queued.number = number;
    receive->context = context;
    if (context->broken != 0)
        pc_receive_end(context->engine, receive, context->broken, NULL);
    else
        pc_context_settle(context, NULL, receive);
    pc_engine_leave(context->engine);
}

int pc_receive_into(struct pc_receive *receive, void *into) {
    struct pc_engine *engine = receive->context->engine;
    struct pc_message *message = receive->message;
    pc_engine_enter(engine);
    pc_engine_tell_not(engine, &receive->ending);
    decouple(receive);
    receive->into = into;
    int error = 0;
    if (pc_receive_fetch(receive, message, &error) == PC_GIVEN_BACK)
        pc_receive_couple(receive, message, PC_RECEIVE_HELD);
    pc_engine_leave(engine);
    return error;
}

void pc_receive_redirect(struct pc_receive *receive, void *into) {
    struct pc_message *message = receive->message;
    struct pc_engine *engine = receive->context->engine;
    void *before = receive->into;
    receive->into = into;
    message->keeper = receive->keeper;
    if (message->link->ops->redirect(message->link, message, into))
        return;
    if (message->nbytes > 0)
        memcpy(into, before, message->nbytes);
    pc_engine_enter(engine);
    decouple(receive);
    pc_receive_end(engine, receive, 0, message);
    pc_message_free(engine, message);
    pc_engine_leave(engine);
}

void pc_receive_hold(struct pc_context *context, struct pc_receive *receive,
                     struct pc_message *message) {
    receive->posted.queued.source = message->match.queued.source;
    receive->context = context;
    message->context = context;
    pc_receive_couple(receive, message, PC_RECEIVE_HELD);
    pc_engine_tell(context->engine, &receive->ending);
}

void pc_receive_take_over(struct pc_receive *receive, struct pc_receive *from) {
    struct pc_context *context = from->context;
    struct pc_message *message = from->message;
    pc_engine_enter(context->engine);
    pc_engine_tell_not(context->engine, &from->ending);
    decouple(from);
    from->state = PC_RECEIVE_IDLE;
    from->context = NULL;
    receive->noted = from->noted;
    from->noted = 0;
    receive->posted.queued.number = from->posted.queued.number;
    receive->posted.queued.source = from->posted.queued.source;
    receive->posted.queued.tag = from->posted.queued.tag;
    receive->context = context;
    pc_receive_couple(receive, message, PC_RECEIVE_HELD);
    pc_engine_tell(context->engine, &receive->ending);
    pc_engine_leave(context->engine);
}

void pc_receive_drop(struct pc_receive *receive) {
    struct pc_message *message = receive->message;
    struct pc_engine *engine = receive->context->engine;
    pc_engine_enter(engine);
    pc_engine_tell_not(engine, &receive->ending);
    decouple(receive);
    receive->state = PC_RECEIVE_IDLE;
    receive->context = NULL;
    pc_note_end(engine->notes, receive->noted, PC_NOTED_GIVEN_UP);
    pc_message_drop(engine, message, true);
    pc_engine_leave(engine);
}

void pc_receive_count(const struct pc_receive *receive) {
    const struct pc_message *message = receive->message;
    if (receive->context->counts != NULL)
        pc_count_received(receive->context, message->match.queued.source, message->nbytes);
    pc_note_end(receive->context->engine->notes, receive->noted, PC_NOTED_DONE);
}

/* Let a message that is being read go on in memory of ours. False: there is none. */
static bool park(struct pc_message *message, void *into) {
    /* never NULL for want of bytes */
    unsigned char *spare = malloc(message->nbytes + (message->nbytes == 0));
    if (spare == NULL)
        return false;
    message->spare = spare;
    message->keeper = (struct pc_keeper){NULL, NULL};
    if (message->link->ops->redirect(message->link, message, spare))
        return true;
    if (message->nbytes > 0)
        memcpy(spare, into, message->nbytes);
    message->state = PC_MESSAGE_HERE;
    message->payload = spare;
    return true;
}

bool pc_receive_give_up(struct pc_receive *receive) {
    struct pc_context *context = receive->context;
    struct pc_message *message = receive->message;
    if (receive->state == PC_RECEIVE_IDLE || receive->state == PC_RECEIVE_ENDED)
        return false;
    if (receive->by_address && message != NULL) { /* nobody else will receive it */
        pc_receive_drop(receive);
        return true;
    }
    if (receive->state == PC_RECEIVE_READING && !park(message, receive->into))
        return false;
    struct pc_engine *engine = context->engine;
    pc_engine_enter(engine);
    pc_engine_tell_not(engine, &receive->ending);
    if (message != NULL)
        decouple(receive);
    else if (receive->by_address)
        pc_address_remove(&context->addresses, &receive->address);
    else
        pc_match_withdraw_posted(&context->matching, &receive->posted);
    receive->state = PC_RECEIVE_IDLE;
    receive->context = NULL;
    pc_note_end(engine->notes, receive->noted, PC_NOTED_GIVEN_UP);
    if (message != NULL)
        pc_context_settle(context, message, NULL);
    pc_engine_leave(engine);
    return true;
}

int pc_send_start(struct pc_context *context, struct pc_send *send, const void *header,
                  size_t header_nbytes, enum pc_way way) {
    struct pc_engine *engine = context->engine;
    send->status = context->broken != 0 ? context->broken : engine->gone[send->peer];
    send->ending.is_send = true;
    send->stopped = false;
    send->noted = 0;
    if (send->status != 0)
        return PC_SENT;
    send->nbytes = 0;
    for (size_t part = 0; part < send->num_parts; part++)
        send->nbytes += send->parts[part].iov_len;
    send->counted_in =
        context->counts != NULL ? context : pc_context_of(engine, header, header_nbytes);
    send->noted = note_send(engine, send, header);
    pc_engine_enter(engine);
    struct pc_link *link = engine->links[send->peer];
    int answer = link->ops->send(link, send, header, header_nbytes, way);
    if (answer == PC_UNDER_WAY) {
        send->context = context;
        PC_LIST_ADD(context->sends, send);
    } else if (answer == PC_SENT) {
        if (send->counted_in != NULL)
            pc_count_sent(send->counted_in, send->peer, send->nbytes);
        pc_note_end(engine->notes, send->noted, PC_NOTED_DONE);
    } else {
        pc_note_end(engine->notes, send->noted, PC_NOTED_GIVEN_UP);
        send->status = answer;
        answer = PC_SENT;
    }
    pc_engine_leave(engine);
    return answer;
}

bool pc_send_stop(struct pc_send *send) {
    if (send->context == NULL)
        return false;
    struct pc_link *link = send->context->engine->links[send->peer];
    send->stopped |= link->ops->stop(link, send);
    return send->stopped;
}

bool pc_send_take_back(struct pc_send *send) {
    if (send->context == NULL)
        return false;
    struct pc_engine *engine = send->context->engine;
    struct pc_link *link = engine->links[send->peer];
    pc_engine_enter(engine);
    unlink_send(send);
    pc_note_end(engine->notes, send->noted, PC_NOTED_GIVEN_UP);
    link->ops->take_back(link, send);
    pc_engine_leave(engine);
    return true;
}

/* --- it breaks, or is closed ------------------------------------------------------------------ */

void pc_context_stop(struct pc_context *context, int status, bool closes) {
    struct pc_engine *engine = context->engine;
    if (context->broken != 0)
        return;
    context->broken = status;
    while (context->sends != NULL) {
        struct pc_send *send = context->sends;
        struct pc_link *link = engine->links[send->peer];
        pc_send_end(engine, send, status);
        link->ops->take_back(link, send);
    }
    struct pc_message *message;
    struct pc_posted *posted;
    while ((posted = pc_match_first_posted(&context->matching)) != NULL) {
        pc_match_withdraw_posted(&context->matching, posted);
        pc_receive_end(engine, (struct pc_receive *)posted, status, NULL);
    }
    while ((message = context->taken.first) != NULL) {
        struct pc_receive *receive = message->taker;
        decouple(receive);
        pc_receive_end(engine, receive, status, NULL);
        pc_message_drop(engine, message, closes);
    }
    while ((message = (struct pc_message *)pc_match_first_message(&context->matching)) != NULL) {
        pc_match_withdraw_message(&context->matching, &message->match);
        pc_message_drop(engine, message, closes);
    }
    pc_calls_stop(context, status, closes);
}

void pc_context_break(struct pc_context *context, int status) {
    struct pc_engine *engine = context->engine;
    pc_engine_enter(engine);
    pc_context_stop(context, status, false);
    pc_engine_leave(engine);
}
