/* What ends with a peer that has ended. See engine.h. */
#include "engine.h"

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
