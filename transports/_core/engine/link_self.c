/* The link of a rank to itself. A message that is not offered is copied when it is sent: straight
   into the memory of a receive that waits, else into memory of the engine's. One that is offered is
   copied when it is accepted. */
#include "engine.h"

#include <string.h>

/* What stands in the token of a send that is offered: where its message is, NULL if that was used,
   and whether it is still being started. */
enum { MESSAGE, STARTING };

static struct pc_message *message_of(const struct pc_send *send) {
    return (struct pc_message *)(uintptr_t)send->token[MESSAGE];
}

static int self_send(struct pc_link *link, struct pc_send *send, const void *header,
                     size_t header_nbytes, enum pc_way way) {
    struct pc_incoming incoming = {.peer = send->peer,
                                   .header = header,
                                   .header_nbytes = header_nbytes,
                                   .where = way == PC_OFFER ? PC_WAITING : PC_PASSING,
                                   .parts = send->parts,
                                   .num_parts = send->num_parts,
                                   .nbytes = send->nbytes,
                                   .token = {(uint64_t)(uintptr_t)send}};
    send->token[STARTING] = true;
    struct pc_message *message;
    int error = pc_arrived(link->engine, link, &incoming, &message);
    send->token[MESSAGE] = (uint64_t)(uintptr_t)message;
    send->token[STARTING] = false;
    if (error != 0)
        return error;
    return message == NULL ? PC_SENT : PC_UNDER_WAY;
}

/* The message of a send was accepted, or nobody wants it. */
static struct pc_send *used(struct pc_message *message) {
    struct pc_send *send = (struct pc_send *)(uintptr_t)message->token[0];
    send->token[MESSAGE] = 0;
    return send;
}

static int self_accept(struct pc_link *link, struct pc_message *message, void *into) {
    struct pc_send *send = used(message);
    unsigned char *place = into;
    if (send->stopped)
        return PC_WITHDRAWN;
    for (size_t part = 0; part < send->num_parts; place += send->parts[part++].iov_len)
        if (send->parts[part].iov_len > 0)
            memcpy(place, send->parts[part].iov_base, send->parts[part].iov_len);
    if (!send->token[STARTING])
        pc_sent(link->engine, send);
    return PC_RECEIVED;
}

static void self_release(struct pc_link *link, struct pc_message *message) {
    struct pc_send *send = used(message);
    if (!send->token[STARTING])
        pc_sent(link->engine, send);
}

static bool self_stop(struct pc_link *link, struct pc_send *send) {
    (void)link;
    return message_of(send) != NULL;
}

static void self_take_back(struct pc_link *link, struct pc_send *send) {
    struct pc_message *message = message_of(send);
    send->token[MESSAGE] = 0;
    if (message != NULL)
        pc_withdrawn(link->engine, message);
}

/* Nothing of a message to oneself is ever on its way. */
static void self_give_up(struct pc_link *link, struct pc_message *message) {
    (void)link, (void)message;
}

static bool self_redirect(struct pc_link *link, struct pc_message *message, void *into) {
    (void)link, (void)message, (void)into;
    return false;
}

static void self_forget(struct pc_link *link, int peer) { (void)link, (void)peer; }

static const struct pc_link_ops self_ops = {self_send,     self_stop,    self_take_back,
                                            self_accept,   self_release, self_give_up,
                                            self_redirect, self_forget};

void pc_link_self(struct pc_link *link, struct pc_engine *engine) {
    *link = (struct pc_link){&self_ops, engine};
}
