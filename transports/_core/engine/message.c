/* Messages that have come, and the lists in which they stand. See engine.h. */
#include "engine.h"

#include <stdlib.h>
#include <string.h>

void pc_list_clear(struct pc_message_list *list) {
    list->first = NULL;
    list->last = &list->first;
}

void pc_list_append(struct pc_message_list *list, struct pc_message *message) {
    message->list = list;
    message->next = NULL;
    message->at = list->last;
    *list->last = message;
    list->last = &message->next;
}

void pc_list_remove(struct pc_message *message) {
    *message->at = message->next;
    if (message->next != NULL)
        message->next->at = message->at;
    else
        message->list->last = message->at;
    message->list = NULL;
}

struct pc_message *pc_message_new(struct pc_engine *engine, struct pc_link *link,
                                  const struct pc_incoming *in) {
    struct pc_message *message = engine->free_messages;
    if (message != NULL)
        engine->free_messages = message->next;
    else if ((message = malloc(sizeof *message)) == NULL)
        return NULL;
    memset(message, 0, offsetof(struct pc_message, short_header));
    message->header = message->short_header;
    if (in->header_nbytes > PC_SHORT_HEADER &&
        (message->header = malloc(in->header_nbytes)) == NULL) {
        free(message);
        return NULL;
    }
    memcpy(message->header, in->header, in->header_nbytes);
    message->header_nbytes = in->header_nbytes;
    message->match.queued.source = in->peer;
    uint64_t tag = 0; /* of a point-to-point message */
    for (size_t byte = 0; byte < 8 && 9 + byte < in->header_nbytes; byte++)
        tag |= (uint64_t)message->header[9 + byte] << 8 * byte;
    message->match.queued.tag = (int64_t)tag;
    message->link = link;
    memcpy(message->token, in->token, sizeof message->token);
    message->nbytes = in->nbytes;
    message->sender_waits = in->where == PC_WAITING;
    switch (in->where) {
    case PC_PASSING:
        message->state = PC_MESSAGE_PASSING;
        message->passing = in;
        break;
    case PC_KEPT:
        message->state = PC_MESSAGE_HERE;
        message->payload = in->payload;
        break;
    default:
        message->state = PC_MESSAGE_WAITS;
    }
    engine->num_messages++;
    return message;
}

void pc_message_free(struct pc_engine *engine, struct pc_message *message) {
    if (engine->arriving == message)
        engine->arriving = NULL;
    free(message->spare);
    if (message->header != message->short_header)
        free(message->header);
    engine->num_messages--;
#ifdef PC_NO_FREE_LIST
    free(message);
#else
    message->next = engine->free_messages;
    engine->free_messages = message;
#endif
}

void pc_message_drop(struct pc_engine *engine, struct pc_message *message, bool answer) {
    message->context = NULL;
    message->taker = NULL;
    if (message->state == PC_MESSAGE_WAITS && message->sender_waits && !answer) {
        /* Its sender will hear why, and must not believe until then that all went well. */
        pc_list_append(&engine->abandoned, message);
        return;
    }
    if (message->state == PC_MESSAGE_READING)
        message->link->ops->give_up(message->link, message);
    else if (message->state == PC_MESSAGE_WAITS ||
             (message->state == PC_MESSAGE_HERE && message->spare == NULL))
        message->link->ops->release(message->link, message);
    pc_message_free(engine, message);
}

bool pc_message_keep(struct pc_message *message) {
    const struct pc_incoming *in = message->passing;
    size_t nbytes = 0;
    /* never NULL for want of bytes */
    message->spare = malloc(message->nbytes + (message->nbytes == 0));
    if (message->spare == NULL)
        return false;
    for (size_t part = 0; part < in->num_parts; nbytes += in->parts[part++].iov_len)
        if (in->parts[part].iov_len > 0)
            memcpy(message->spare + nbytes, in->parts[part].iov_base, in->parts[part].iov_len);
    message->payload = message->spare;
    message->passing = NULL;
    message->state = PC_MESSAGE_HERE;
    return true;
}
