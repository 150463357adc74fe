/* The receiving side of channels: what comes is handled here, and large messages are copied. See
   channel.h. */
#include "channel.h"

#include <errno.h>
#include <sched.h>
#include <stdlib.h>

/* Items of one peer that are handled in one call, so that all peers have their turn. */
#define BURST 64

/* Looks at a piece that the sender is copying before going on to other things: about as long as one
   takes. */
#define PIECE_LOOKS 2000

/* Yields between looks at whether a process that is being waited for still exists. */
#define YIELDS_A_LOOK 1000

/* Parts of a payload that are believed. */
#define MAX_PARTS ((uint32_t)1 << 20)

/* --- copying an accepted message -------------------------------------------------------------- */

enum pc_outcome pc_channel_receive_copy(pc_channel *channel, struct pc_channel_receive *receive,
                                        size_t budget) {
    struct pc_transfer *transfer = receive->transfer;
    int looks = 0;
    for (size_t copied = 0; copied < budget;) {
        int64_t piece = pc_transfer_claim(transfer, receive->pieces);
        if (piece < 0)
            piece = pc_transfer_returned(transfer);
        if (piece < 0) {
            if (pc_transfer_taken_back(transfer))
                return PC_TOO_LATE;
            if (pc_transfer_complete(transfer, receive->pieces))
                return pc_transfer_seal(transfer) ? PC_COMPLETE : PC_TOO_LATE;
            if (++looks > PIECE_LOOKS)
                return PC_WAITS;
            if (channel->host->spins > 0)
                pc_relax();
            else
                sched_yield();
            continue;
        }
        size_t offset, nbytes = pc_channel_piece(receive, piece, &offset);
        int error = pc_channel_fetch(channel, receive->peer, receive->parts, offset,
                                     receive->into + offset, nbytes, receive->nbytes);
        /* also if not: then the count only says that nobody is at it */
        pc_transfer_copied(transfer);
        if (error != 0)
            return error == ESRCH ? PC_GONE : PC_FAILED;
        copied += nbytes;
    }
    return PC_MORE;
}

void pc_channel_receive_settle(pc_channel *channel, struct pc_channel_receive *receive) {
    struct pc_transfer *transfer = receive->transfer;
    pc_transfer_close(transfer);
    if (PC_LIKELY(pc_transfer_settled(transfer)))
        return;
    for (unsigned yields = 1; !pc_transfer_settled(transfer); yields++) {
        sched_yield();
        if (yields % YIELDS_A_LOOK == 0 && pc_process_ended(channel->peers[receive->peer].pid))
            break;
    }
}

void pc_channel_receive_finish(pc_channel *channel, struct pc_channel_receive *receive,
                               bool complete) {
    struct pc_transfer *transfer = receive->transfer;
    receive->transfer = NULL;
    if (complete)
        pc_publish(&transfer->state, pc_phase_of(receive->id, PC_PHASE_DONE));
    /* A sender that looks at the state must not find a message about it in its way. */
    if (!complete || pc_load(&transfer->watched) == 0)
        /* without memory the sender waits in vain */
        pc_channel_tell(channel, receive->peer, PC_FINISHED, receive->id);
}

/* Copy on. 1: it is not done; 2: nor was anything copied; 0: done; -1: taken back; -3: no
   memory. */
static int copy_on(pc_channel *channel, struct pc_channel_receive *receive, size_t budget) {
    enum pc_outcome outcome = pc_channel_receive_copy(channel, receive, budget);
    switch (outcome) {
    case PC_MORE:
    case PC_WAITS:
        return outcome == PC_MORE ? 1 : 2;
    case PC_COMPLETE:
        pc_channel_receive_finish(channel, receive, true);
        return 0;
    case PC_TOO_LATE:
        pc_channel_receive_settle(channel, receive);
        pc_channel_receive_finish(channel, receive, false);
        return -1;
    case PC_GONE: /* what became of it is for others to say */
        receive->mode = PC_STALLED;
        pc_channel_list_remove(&channel->receiving, receive->handle);
        return 1;
    default: /* its memory cannot be read after all, perhaps it is a device's */
        pc_channel_receive_settle(channel, receive);
        pc_channel_list_remove(&channel->receiving, receive->handle);
        return pc_channel_ask(channel, receive) < 0 ? -3 : 1;
    }
}

bool pc_channel_fetch_offered(pc_channel *channel, int rank, struct pc_filling *filling, void *into,
                              size_t nbytes) {
    struct iovec part = {(void *)(uintptr_t)filling->address, nbytes};
    if (pc_load(&filling->direct) != PC_DIRECT_OFFERED ||
        !pc_channel_can_fetch(channel, rank, filling->address, nbytes) ||
        !pc_filling_step(filling, PC_DIRECT_OFFERED, PC_DIRECT_TAKEN))
        return false;
    int error = pc_channel_fetch(channel, rank, (struct pc_parts){&part, 1}, 0, into, nbytes,
                                 nbytes);
    enum pc_direct now = error == 0 ? PC_DIRECT_COPIED : PC_DIRECT_NO;
    return pc_filling_step(filling, PC_DIRECT_TAKEN, now) && error == 0;
}

/* Find out where the payload is. */
static bool read_parts(pc_channel *channel, struct pc_channel_receive *receive,
                       const struct pc_offer *offer) {
    receive->one = (struct iovec){(void *)(uintptr_t)offer->address, offer->nbytes};
    receive->parts = (struct pc_parts){&receive->one, 1};
    if (offer->num_parts == 1 || offer->nbytes == 0)
        return true;
    size_t nbytes = offer->num_parts * sizeof(struct iovec), total = 0;
    if (offer->num_parts > MAX_PARTS || (receive->table = malloc(nbytes)) == NULL)
        return false;
    receive->one.iov_len = nbytes;
    if (pc_copy_from(channel->peers[receive->peer].pid, receive->parts, 0, receive->table,
                     nbytes) != 0)
        return false;
    receive->parts = (struct pc_parts){receive->table, offer->num_parts};
    for (uint32_t index = 0; index < offer->num_parts; index++)
        total += receive->table[index].iov_len;
    return total == offer->nbytes;
}

static bool can_fetch(pc_channel *channel, int rank, const struct pc_offer *offer) {
    return offer->num_parts == 1
               ? pc_channel_can_fetch(channel, rank, offer->address, offer->nbytes)
               : pc_channel_reaches(channel, rank);
}

int pc_channel_accept(pc_channel *channel, struct pc_channel_receive *receive,
                      const struct pc_offer *offer) {
    struct pc_transfer *transfer = NULL;
    receive->id = offer->id;
    pc_chains_add(&channel->receives_by_id, &receive->by_id,
                  pc_hash(offer->id, (uint64_t)receive->peer));
    receive->nbytes = offer->nbytes;
    receive->pieces = pc_pieces(offer->nbytes);
    if (offer->transfer >= 0) {
        transfer = pc_transfer_of(channel->peers[receive->peer].heap, offer->transfer);
        if (!pc_transfer_step(transfer, offer->id, PC_PHASE_WAITING, PC_PHASE_TAKEN))
            return pc_load(&transfer->state) == pc_phase_of(offer->id, PC_PHASE_LEFT) ? -2 : -1;
    }
    if (transfer != NULL && can_fetch(channel, receive->peer, offer) &&
        read_parts(channel, receive, offer)) {
        receive->transfer = transfer;
        receive->mode = PC_COPYING;
        if (!pc_transfer_open(transfer, (uint64_t)(uintptr_t)receive->into, 0)) {
            pc_channel_receive_finish(channel, receive, false);
            return -1;
        }
        if (receive->pieces > 1 && pc_load(&transfer->watched) == 0 &&
            pc_channel_tell(channel, receive->peer, PC_TAKE, offer->id) < 0)
            return -3;
        int status = copy_on(channel, receive, PC_BUDGET);
        if (status > 0 && receive->mode == PC_COPYING &&
            !pc_channel_list_add(&channel->receiving, receive->handle))
            return -3;
        return status > 0 ? 1 : status;
    }
    if (offer->nbytes == 0)
        return pc_channel_tell(channel, receive->peer, PC_FINISHED, offer->id) < 0 ? -3 : 0;
    return pc_channel_ask(channel, receive) < 0 ? -3 : 1;
}

static void release(pc_channel *channel, void *owner) {
    if (owner != NULL)
        channel->up->release(channel->owner, owner);
}

void pc_channel_receive_end(pc_channel *channel, struct pc_channel_receive *receive) {
    if (receive->transfer != NULL && receive->mode != PC_FRAGMENTS)
        pc_channel_receive_settle(channel, receive);
    pc_channel_list_remove(&channel->receiving, receive->handle);
    if (receive->by_id.at != NULL)
        pc_chains_remove(&channel->receives_by_id, &receive->by_id);
    pc_table_remove(&channel->receives, receive->handle);
    release(channel, receive->owner);
    free(receive->table);
    free(receive);
}

void pc_channel_receive_give_up(pc_channel *channel, struct pc_channel_receive *receive) {
    int rank = receive->peer;
    uint64_t id = receive->id;
    pc_channel_receive_end(channel, receive);
    pc_channel_tell(channel, rank, PC_FINISHED, id); /* without memory the sender waits in vain */
}

/* --- what comes ------------------------------------------------------------------------------- */

static struct pc_channel_receive *find_receive(pc_channel *channel, int rank, uint64_t id) {
    uint64_t hash = pc_hash(id, (uint64_t)rank);
    for (struct pc_chained *each = pc_chains_first(&channel->receives_by_id, hash); each != NULL;
         each = each->next) {
        struct pc_channel_receive *receive =
            PC_CHAINED_IN(each, struct pc_channel_receive, by_id);
        if (each->hash == hash && receive->id == id && receive->peer == rank)
            return receive;
    }
    return NULL;
}

static int handle_eager(pc_channel *channel, int rank, struct pc_item *item, size_t room) {
    size_t header_nbytes = pc_item_header(item), nbytes = item->nbytes;
    struct pc_peer *peer = &channel->peers[rank];
    uint32_t kind = pc_item_kind(item);
    struct pc_came came = {
        .kind = PC_EAGER, .peer = rank, .header_nbytes = header_nbytes, .nbytes = nbytes};
    if (kind == PC_EAGER) {
        if (header_nbytes + nbytes > room)
            return -2;
        came.header = item->body;
        came.payload = item->body + header_nbytes;
        channel->up->came(channel->owner, &came);
        return 0;
    }
    struct pc_block block;
    memcpy(&block, item->body, sizeof block);
    size_t before = sizeof(struct pc_filling) + (kind == PC_EAGER_WHOLE ? header_nbytes : 0);
    unsigned char *memory = pc_channel_block_at(peer, &block, before + nbytes);
    if (memory == NULL || (kind == PC_EAGER_HEAP && header_nbytes > room - sizeof block))
        return -2;
    came.kind = PC_EAGER_HEAP;
    came.header = kind == PC_EAGER_HEAP ? item->body + sizeof block
                                        : memory + sizeof(struct pc_filling);
    came.payload = memory + before;
    came.block = block;
    channel->up->came(channel->owner, &came);
    return 0;
}

static int handle_ready(pc_channel *channel, int rank, struct pc_item *item, size_t room) {
    size_t header_nbytes = pc_item_header(item);
    struct pc_peer *peer = &channel->peers[rank];
    struct pc_offer offer;
    struct pc_block block = {0};
    bool whole = pc_item_kind(item) == PC_READY_WHOLE;
    if (room < sizeof offer + (whole ? sizeof block : header_nbytes))
        return -2;
    memcpy(&offer, item->body, sizeof offer);
    const unsigned char *header = item->body + sizeof offer;
    if (whole) {
        memcpy(&block, header, sizeof block);
        header = pc_channel_block_at(peer, &block, header_nbytes);
    }
    if (header == NULL || offer.transfer >= PC_TRANSFERS || offer.nbytes > PTRDIFF_MAX)
        return -2;
    channel->up->came(channel->owner, &(struct pc_came){.kind = PC_READY,
                                                        .peer = rank,
                                                        .header = header,
                                                        .header_nbytes = header_nbytes,
                                                        .nbytes = offer.nbytes,
                                                        .offer = offer});
    if (whole) {
        pc_block_give_back(peer->heap, &block);
        pc_host_wake(channel->host, rank);
    }
    return 0;
}

static int handle_pushed(pc_channel *channel, int rank, struct pc_item *item, size_t room) {
    size_t header_nbytes = pc_item_header(item);
    struct pc_pushed pushed;
    if (room < sizeof pushed + header_nbytes)
        return -2;
    memcpy(&pushed, item->body, sizeof pushed);
    if (pushed.nbytes > room - sizeof pushed - header_nbytes)
        return -2;
    const unsigned char *payload = item->body + sizeof pushed;
    channel->up->came(channel->owner, &(struct pc_came){.kind = PC_PUSHED,
                                                        .peer = rank,
                                                        .header = payload + pushed.nbytes,
                                                        .header_nbytes = header_nbytes,
                                                        .payload = payload,
                                                        .nbytes = (size_t)pushed.nbytes,
                                                        .offer.id = pushed.id});
    return 0;
}

static int handle_data(pc_channel *channel, int rank, struct pc_item *item, size_t room) {
    struct pc_peer *peer = &channel->peers[rank];
    struct pc_fragment fragment;
    size_t nbytes = item->nbytes;
    if (room < sizeof fragment)
        return -2;
    memcpy(&fragment, item->body, sizeof fragment);
    const unsigned char *memory = pc_channel_block_at(peer, &fragment.block, nbytes);
    struct pc_channel_receive *receive = find_receive(channel, rank, fragment.id);
    int status = 0;
    if (memory == NULL)
        return -2;
    if (receive != NULL && receive->mode == PC_FRAGMENTS) {
        if (fragment.offset != receive->filled || nbytes > receive->nbytes - receive->filled)
            return -2;
        pc_copy(receive->into + receive->filled, memory, nbytes);
        receive->filled += nbytes;
        if (receive->filled == receive->nbytes) {
            channel->up->received(channel->owner, receive->handle);
            pc_channel_receive_end(channel, receive);
            if (pc_channel_tell(channel, rank, PC_FINISHED, fragment.id) < 0)
                status = -1;
        }
    } /* else it was given up, and the sender has been told */
    pc_block_give_back(peer->heap, &fragment.block);
    pc_host_wake(channel->host, rank);
    return status;
}

static int handle_told(pc_channel *channel, int rank, enum pc_channel_kind kind, uint64_t id) {
    struct pc_channel_send *send = pc_table_get(&channel->sends, id);
    if (kind == PC_CANCEL) {
        struct pc_channel_receive *receive = find_receive(channel, rank, id);
        if (receive != NULL) {
            channel->up->withdrawn(channel->owner, receive->handle);
            pc_channel_receive_give_up(channel, receive);
        } else {
            channel->up->cancelled(channel->owner, rank, id);
        }
        return 0;
    }
    if (send == NULL || send->peer != rank) /* it was taken back */
        /* If its receiver was told so before it accepted, and accepts all the same, it must hear of
           it again. */
        return kind == PC_GO ? pc_channel_tell(channel, rank, PC_CANCEL, id) : 0;
    if (kind == PC_FINISHED) {
        if (send->mode != PC_ABANDONED)
            channel->up->sent(channel->owner, id);
        pc_channel_send_end(channel, send, true);
        return 0;
    }
    if (send->mode != PC_OFFERED && send->mode != PC_HELPING)
        return 0;
    if (kind == PC_TAKE && !pc_channel_reaches(channel, rank))
        return 0;
    if (kind == PC_TAKE) {
        if (send->mode == PC_OFFERED && !pc_channel_list_add(&channel->helping, id))
            return -1;
        send->mode = PC_HELPING;
        return 0;
    }
    if (send->mode == PC_HELPING)
        pc_channel_list_remove(&channel->helping, id);
    send->mode = PC_FRAGMENTS;
    pc_channel_send_asked(channel, send);
    return 0;
}

/* Handle one item. 0; -1: no memory; -2: it makes no sense. */
static int handle(pc_channel *channel, int rank, struct pc_item *item, int64_t item_nbytes) {
    size_t room = (size_t)item_nbytes - PC_ITEM_NBYTES;
    uint64_t id;
    enum pc_channel_kind kind = (enum pc_channel_kind)pc_item_kind(item);
    switch (kind) {
    case PC_EAGER:
    case PC_EAGER_HEAP:
    case PC_EAGER_WHOLE:
        return handle_eager(channel, rank, item, room);
    case PC_PUSHED:
        return handle_pushed(channel, rank, item, room);
    case PC_READY:
    case PC_READY_WHOLE:
        return handle_ready(channel, rank, item, room);
    case PC_DATA:
        return handle_data(channel, rank, item, room);
    case PC_TAKE:
    case PC_GO:
    case PC_FINISHED:
    case PC_CANCEL:
        memcpy(&id, item->body, sizeof id);
        return handle_told(channel, rank, kind, id);
    case PC_BYE:
        channel->up->bye(channel->owner, rank);
        return 0;
    }
    return -2;
}

static int read_ring(pc_channel *channel, int rank, bool *worked) {
    struct pc_peer *peer = &channel->peers[rank];
    for (int count = 0; count < BURST && !peer->dead; count++) {
        struct pc_item *item;
        int64_t nbytes = pc_ring_peek(&peer->in, &item);
        if (nbytes == 0 || (nbytes > 0 && !pc_channel_is_whole(peer, item)))
            return 0;
        *worked = true;
        int status = nbytes < 0 ? -2 : handle(channel, rank, item, nbytes);
        if (status == -2) {
            /* only a rank that went mad writes such things: as good as a lost link */
            peer->dead = true;
            channel->up->lost(channel->owner, rank);
            return 0;
        }
        if (status < 0)
            return -1;
        if (pc_ring_consume(&peer->in, nbytes))
            pc_host_wake(channel->host, rank);
    }
    return 0;
}

/* --- progress --------------------------------------------------------------------------------- */

static bool is_active(pc_channel *channel, int rank) {
    struct pc_desk *desk = channel->peers[channel->rank].desk;
    return pc_load(&desk->senders[rank / 64]) >> (rank % 64) & 1;
}

static void find_active(pc_channel *channel) {
    channel->seen_version = pc_load(&channel->peers[channel->rank].desk->version);
    for (int rank = 0; rank < channel->size; rank++) {
        struct pc_peer *peer = &channel->peers[rank];
        if (!peer->active && rank != channel->rank && is_active(channel, rank)) {
            peer->active = true;
            channel->active[channel->num_active++] = rank;
        }
    }
}

/* Put fragments into the heap as long as there is room; true if there was. */
static bool send_fragments(pc_channel *channel, struct pc_channel_send *send) {
    struct pc_peer *peer = &channel->peers[send->peer];
    bool worked = false;
    while (send->sent < send->nbytes && !send->stopped && peer->first == NULL) {
        struct pc_fragment fragment = {.id = send->id, .offset = send->sent};
        size_t total = PC_ITEM_NBYTES + sizeof fragment, nbytes = send->nbytes - send->sent;
        if (nbytes > PC_FRAGMENT_NBYTES)
            nbytes = PC_FRAGMENT_NBYTES;
        struct pc_item *item = pc_ring_reserve(&peer->out, total);
        if (item == NULL)
            break;
        uint32_t unit = pc_heap_take(&channel->heap, PC_ROOM_FRAGMENTS, nbytes, send->peer, false);
        if (unit == 0)
            break;
        pc_heap_name(&channel->heap, unit, &fragment.block);
        pc_copy_parts(pc_heap_at(channel->heap.base, unit), send->parts, send->sent, nbytes);
        memcpy(item->body, &fragment, sizeof fragment);
        item->kind_and_header = (uint32_t)PC_DATA << 24;
        item->nbytes = (uint32_t)nbytes;
        pc_ring_publish(&peer->out, item, total);
        pc_host_wake(channel->host, send->peer);
        send->sent += nbytes;
        worked = true;
    }
    return worked;
}

static bool go_on_sending(pc_channel *channel) {
    bool worked = channel->helping.count > 0;
    for (uint32_t index = 0; index < channel->helping.count;) {
        uint64_t id = channel->helping.numbers[index];
        struct pc_channel_send *send = pc_table_get(&channel->sends, id);
        if (pc_channel_send_help(channel, send, PC_BUDGET)) {
            index++;
            continue;
        }
        send->mode = PC_OFFERED; /* the receiver may yet ask for fragments */
        pc_channel_list_remove(&channel->helping, id);
    }
    for (int rank = 0; channel->num_asked > 0 && rank < channel->size; rank++) {
        struct pc_channel_send *send;
        while ((send = pc_channel_first_asked(channel, rank)) != NULL) {
            worked |= send_fragments(channel, send);
            if (send->sent < send->nbytes) /* there is no room, for later ones neither */
                break;
            pc_channel_send_unasked(channel, send);
        }
    }
    return worked;
}

static int go_on_receiving(pc_channel *channel, bool *worked) {
    for (uint32_t index = 0; index < channel->receiving.count;) {
        uint64_t handle = channel->receiving.numbers[index];
        struct pc_channel_receive *receive = pc_table_get(&channel->receives, handle);
        int status = copy_on(channel, receive, PC_BUDGET);
        *worked |= status != 2;
        if (status == 0 || status == -1) {
            if (status == 0)
                channel->up->received(channel->owner, handle);
            else
                channel->up->withdrawn(channel->owner, handle);
            pc_channel_receive_end(channel, receive);
        } else if (status < 0) {
            return -1;
        } else if (index < channel->receiving.count &&
                   channel->receiving.numbers[index] == handle) {
            index++;
        }
    }
    return 0;
}

int pc_channel_progress(pc_channel *channel) {
    bool worked = false;
    if (PC_UNLIKELY(channel->backlogged > 0)) {
        uint32_t before = channel->backlogged;
        pc_channel_flush(channel);
        worked = channel->backlogged < before;
    }
    if (PC_UNLIKELY(pc_load(&channel->peers[channel->rank].desk->version) != channel->seen_version))
        find_active(channel);
    for (int index = 0; index < channel->num_active; index++)
        if (read_ring(channel, channel->active[index], &worked) < 0)
            return -1;
    if (channel->receiving.count > 0 && go_on_receiving(channel, &worked) < 0)
        return -1;
    if (channel->helping.count > 0 || channel->num_asked > 0)
        worked |= go_on_sending(channel);
    return worked;
}

/* --- a receive that goes on elsewhere --------------------------------------------------------- */

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

/* --- whether there is anything to do ---------------------------------------------------------- */

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
