/* Whether progress would find something: who is about to sleep asks. See channel.h. */
#include "channel.h"

bool pc_channel_has_room(pc_channel *channel, int rank) {
    struct pc_peer *peer = &channel->peers[rank];
    struct pc_note *note = peer->first;
    /* Any item fits into a quarter of a ring, and readers tell at least of every quarter. */
    if (note == NULL || !pc_ring_room(&peer->out, peer->out.num_lines / 4))
        return false;
    return PC_ITEM_NBYTES + note->body_nbytes + note->header_nbytes <= channel->inline_limit ||
           pc_heap_take(&channel->heap, PC_ROOM_HEADERS, note->header_nbytes, rank, true) != 0;
}

static bool can_send(pc_channel *channel, struct pc_channel_send *send) {
    struct pc_ring *ring = &channel->peers[send->peer].out;
    size_t nbytes = send->nbytes - send->sent;
    return channel->peers[send->peer].first == NULL && pc_ring_room(ring, ring->num_lines / 4) &&
           pc_heap_take(&channel->heap, PC_ROOM_FRAGMENTS,
                        nbytes < PC_FRAGMENT_NBYTES ? nbytes : PC_FRAGMENT_NBYTES, send->peer,
                        true) != 0;
}

static bool can_copy(struct pc_channel_receive *receive) {
    struct pc_transfer *transfer = receive->transfer;
    return pc_load(&transfer->next) < receive->pieces || pc_load(&transfer->returned) != 0 ||
           pc_transfer_complete(transfer, receive->pieces) || pc_transfer_taken_back(transfer);
}

bool pc_channel_ready(pc_channel *channel) {
    struct pc_item *item;
    if (pc_load(&channel->peers[channel->rank].desk->version) != channel->seen_version)
        return true;
    for (int index = 0; index < channel->num_active; index++) {
        struct pc_peer *peer = &channel->peers[channel->active[index]];
        int64_t nbytes = peer->dead ? 0 : pc_ring_peek(&peer->in, &item);
        if (nbytes < 0 || (nbytes > 0 && pc_channel_is_whole(peer, item)))
            return true;
    }
    for (int rank = 0; channel->backlogged > 0 && rank < channel->size; rank++)
        if (pc_channel_has_room(channel, rank))
            return true;
    for (uint32_t index = 0; index < channel->receiving.count; index++)
        if (can_copy(pc_table_get(&channel->receives, channel->receiving.numbers[index])))
            return true;
    if (channel->helping.count > 0)
        return true;
    for (int rank = 0; channel->num_asked > 0 && rank < channel->size; rank++) {
        struct pc_channel_send *send = pc_channel_first_asked(channel, rank);
        if (send != NULL && can_send(channel, send))
            return true;
    }
    return false;
}
