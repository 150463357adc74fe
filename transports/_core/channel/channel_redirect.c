/* A receive that is under way goes on elsewhere. See channel.h. */
#include "channel.h"

static int redirect(pc_channel *channel, struct pc_channel_receive *receive, unsigned char *into) {
    if (receive->mode != PC_COPYING) {
        pc_copy(into, receive->into, receive->filled);
        receive->into = into;
        return 0;
    }
    pc_channel_receive_settle(channel, receive);
    struct pc_transfer *transfer = receive->transfer;
    int64_t returned = pc_transfer_returned(transfer);
    size_t offset, nbytes, claimed = pc_load(&transfer->next) & ~PC_MARKS;
    if (returned >= 0) { /* the sender could not copy it */
        nbytes = pc_channel_piece(receive, returned, &offset);
        int error = pc_channel_fetch(channel, receive->peer, receive->parts, offset,
                                     receive->into + offset, nbytes, receive->nbytes);
        pc_transfer_copied(transfer);
        if (error != 0) { /* nor can we */
            receive->into = into;
            pc_channel_list_remove(&channel->receiving, receive->handle);
            return pc_channel_ask(channel, receive);
        }
    }
    nbytes = claimed * pc_piece_nbytes(receive->nbytes);
    pc_copy(into, receive->into, nbytes < receive->nbytes ? nbytes : receive->nbytes);
    receive->into = into;
    pc_transfer_open(transfer, (uint64_t)(uintptr_t)into, claimed);
    return 0;
}

int pc_channel_receive_redirect(pc_channel *channel, struct pc_channel_receive *receive,
                                unsigned char *into, void *owner) {
    void *before = receive->owner;
    int status = redirect(channel, receive, into);
    receive->owner = owner;
    if (before != NULL)
        channel->up->release(channel->owner, before);
    return status;
}
