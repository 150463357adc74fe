/* How channels begin and end, all of them or that to one peer. See channel.h. */
#include "channel.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/random.h>
#include <unistd.h>

/* What is written into a ring in one item. More goes to the heap, where a copy costs the same, so
   that rings may be small. */
#define INLINE_LIMIT 2048

/* --- begin ------------------------------------------------------------------------------------ */

static unsigned char *ring_at(pc_host *host, int from, int to) {
    return host->base + host->rings_offset +
           ((size_t)from * (size_t)host->size + (size_t)to) * host->ring_nbytes;
}

int pc_channel_open(pc_channel *channel) {
    pc_host *host = channel->host;
    size_t size = (size_t)host->size;
    channel->rank = host->rank;
    channel->size = host->size;
    if (host->ring_nbytes < sizeof(struct pc_desk) + (size + 63) / 64 * 8)
        return E2BIG;
    channel->peers = calloc(size, sizeof *channel->peers);
    channel->active = calloc(size, sizeof *channel->active);
    if (channel->peers == NULL || channel->active == NULL)
        return ENOMEM;
    channel->inline_limit =
        INLINE_LIMIT < host->ring_nbytes / 8 ? INLINE_LIMIT : host->ring_nbytes / 8;
    for (int rank = 0; rank < host->size; rank++) {
        struct pc_peer *peer = &channel->peers[rank];
        peer->desk = (struct pc_desk *)ring_at(host, rank, rank);
        peer->heap = host->base + host->heaps_offset + (size_t)rank * host->heap_nbytes;
        if (rank != host->rank) {
            pc_ring_open(&peer->out, ring_at(host, host->rank, rank), host->ring_nbytes);
            pc_ring_open(&peer->in, ring_at(host, rank, host->rank), host->ring_nbytes);
        }
    }
    channel->heap.base = channel->peers[channel->rank].heap;
    for (int index = PC_TRANSFERS; index-- > 0;)
        channel->free_transfers[channel->num_free_transfers++] = (int16_t)index;
    if (getrandom(&channel->nonce, sizeof channel->nonce, 0) != sizeof channel->nonce)
        return errno;
    pc_allow_copies();
    struct pc_desk *desk = channel->peers[channel->rank].desk;
    desk->nonce = channel->nonce;
    desk->nonce_address = (uint64_t)(uintptr_t)&channel->nonce;
    pc_publish(&desk->pid, (uint64_t)getpid());
    return 0;
}

void pc_channel_free(pc_channel *channel) {
    for (int rank = 0; channel->peers != NULL && rank < channel->size; rank++)
        for (struct pc_note *note = channel->peers[rank].first, *next; note != NULL; note = next) {
            next = note->next;
            free(note);
        }
    for (uint32_t place = 0; place < channel->sends.size; place++)
        if (channel->sends.things[place] != NULL)
            pc_channel_send_free(channel, channel->sends.things[place]);
    pc_table_free(&channel->sends);
    pc_table_free(&channel->receives);
    pc_chains_free(&channel->receives_by_id);
    free(channel->helping.numbers);
    free(channel->receiving.numbers);
    free(channel->peers);
    free(channel->active);
}

/* --- ends ------------------------------------------------------------------------------------- */

static void drop_notes(pc_channel *channel, struct pc_peer *peer) {
    if (peer->first != NULL)
        channel->backlogged--;
    while (peer->first != NULL) {
        struct pc_note *note = peer->first;
        peer->first = note->next;
        free(note);
    }
}

void pc_channel_forget(pc_channel *channel, int rank) {
    struct pc_peer *peer = &channel->peers[rank];
    peer->dead = true;
    drop_notes(channel, peer);
    for (uint32_t place = 0; place < channel->receives.size; place++) {
        struct pc_channel_receive *receive = channel->receives.things[place];
        if (receive != NULL && receive->peer == rank)
            pc_channel_receive_end(channel, receive);
    }
    for (uint32_t place = 0; place < channel->sends.size; place++) {
        struct pc_channel_send *send = channel->sends.things[place];
        if (send == NULL || send->peer != rank)
            continue;
        /* It may have failed and yet be running: what it has taken is never used again. */
        struct pc_transfer *transfer = pc_channel_transfer(channel, send);
        bool reuse = transfer != NULL &&
                     pc_transfer_step(transfer, send->id, PC_PHASE_WAITING, PC_PHASE_WITHDRAWN);
        if (transfer != NULL && !reuse)
            pc_transfer_take_back(transfer);
        pc_channel_send_end(channel, send, reuse);
    }
    pc_heap_forget(&channel->heap, rank);
}

void pc_channel_close(pc_channel *channel) {
    if (channel->closed)
        return;
    channel->closed = true;
    pc_publish(&channel->peers[channel->rank].desk->closed, 1);
    for (uint32_t place = 0; place < channel->receives.size; place++)
        if (channel->receives.things[place] != NULL)
            pc_channel_receive_end(channel, channel->receives.things[place]);
    for (uint32_t place = 0; place < channel->sends.size; place++) {
        struct pc_channel_send *send = channel->sends.things[place];
        if (send == NULL)
            continue;
        struct pc_transfer *transfer = pc_channel_transfer(channel, send);
        if (transfer != NULL &&
            !pc_transfer_step(transfer, send->id, PC_PHASE_WAITING, PC_PHASE_LEFT))
            pc_transfer_take_back(transfer);
        pc_channel_send_end(channel, send, false);
    }
}
