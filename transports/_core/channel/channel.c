/* The sending side of channels, what both sides share, and how channels begin and end. See
   channel.h. */
#include "channel.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/random.h>
#include <unistd.h>

bool pc_channel_list_add(struct pc_channel_list *list, uint64_t number) {
    if (list->count == list->size) {
        uint32_t size = list->size == 0 ? 16 : list->size * 2;
        uint64_t *numbers = realloc(list->numbers, size * sizeof *numbers);
        if (numbers == NULL)
            return false;
        list->numbers = numbers;
        list->size = size;
    }
    list->numbers[list->count++] = number;
    return true;
}

void pc_channel_list_remove(struct pc_channel_list *list, uint64_t number) {
    for (uint32_t index = 0; index < list->count; index++)
        if (list->numbers[index] == number) {
            memmove(list->numbers + index, list->numbers + index + 1,
                    (--list->count - index) * sizeof *list->numbers);
            return;
        }
}

void pc_channel_send_asked(pc_channel *channel, struct pc_channel_send *send) {
    struct pc_peer *peer = &channel->peers[send->peer];
    send->is_asked = true;
    send->before = peer->last_asked;
    send->after = NULL;
    if (send->before != NULL)
        send->before->after = send;
    else
        peer->first_asked = send;
    peer->last_asked = send;
    channel->num_asked++;
}

void pc_channel_send_unasked(pc_channel *channel, struct pc_channel_send *send) {
    struct pc_peer *peer = &channel->peers[send->peer];
    if (!send->is_asked)
        return;
    send->is_asked = false;
    *(send->before != NULL ? &send->before->after : &peer->first_asked) = send->after;
    *(send->after != NULL ? &send->after->before : &peer->last_asked) = send->before;
    channel->num_asked--;
}

struct pc_channel_send *pc_channel_first_asked(pc_channel *channel, int rank) {
    struct pc_channel_send *send = channel->peers[rank].first_asked;
    while (send != NULL && send->stopped)
        send = send->after;
    return send;
}

/* --- the other's memory ----------------------------------------------------------------------- */

bool pc_channel_reaches(pc_channel *channel, int rank) {
    struct pc_peer *peer = &channel->peers[rank];
    if (PC_LIKELY(peer->reach != 0))
        return peer->reach > 0;
    peer->pid = (pid_t)pc_load(&peer->desk->pid);
    if (peer->pid == 0)
        return false; /* not there yet */
    uint64_t nonce = 0;
    struct iovec place = {.iov_base = (void *)(uintptr_t)peer->desk->nonce_address,
                          .iov_len = sizeof nonce};
    bool can =
        channel->single_copy &&
        pc_copy_from(peer->pid, (struct pc_parts){&place, 1}, 0, &nonce, sizeof nonce) == 0 &&
        nonce == peer->desk->nonce;
    peer->reach = can ? 1 : -1;
    return can;
}

bool pc_channel_can_fetch(pc_channel *channel, int rank, uint64_t address, size_t nbytes) {
    return pc_channel_reaches(channel, rank) ||
           pc_reach_here(channel->host, rank, address, nbytes) != NULL;
}

int pc_channel_fetch(pc_channel *channel, int rank, struct pc_parts theirs, size_t offset,
                     void *into, size_t nbytes, size_t whole) {
    const struct iovec *part = theirs.parts;
    const unsigned char *here = NULL;
    if (theirs.num_parts == 1 && offset <= part->iov_len && nbytes <= part->iov_len - offset)
        here = pc_reach_here(channel->host, rank, (uintptr_t)part->iov_base + offset, nbytes);
    if (here == NULL)
        return pc_copy_from(channel->peers[rank].pid, theirs, offset, into, nbytes);
    pc_copy_shared(into, here, nbytes, whole);
    return 0;
}

/* Whether that may work: what has been claimed and cannot be copied makes the receiver late. */
static bool can_store(pc_channel *channel, int rank, uint64_t into, size_t nbytes) {
    return pc_channel_reaches(channel, rank) ||
           pc_reach_here(channel->host, rank, into, nbytes) != NULL;
}

int pc_channel_store(pc_channel *channel, int rank, uint64_t into, struct pc_parts ours,
                     size_t offset, size_t nbytes, size_t whole) {
    unsigned char *here = pc_reach_here(channel->host, rank, into, nbytes);
    if (here == NULL)
        return pc_copy_to(channel->peers[rank].pid, into, ours, offset, nbytes);
    if (ours.num_parts == 1)
        pc_copy_shared(here, (const char *)ours.parts->iov_base + offset, nbytes, whole);
    else
        pc_copy_parts(here, ours, offset, nbytes);
    return 0;
}

/* --- items ------------------------------------------------------------------------------------ */

static void link_to(pc_channel *channel, int rank) {
    struct pc_desk *desk = channel->peers[rank].desk;
    atomic_fetch_or(&desk->senders[channel->rank / 64], (uint64_t)1 << (channel->rank % 64));
    atomic_fetch_add(&desk->version, 1);
    channel->peers[rank].linked = true;
}

static void publish(pc_channel *channel, int rank, struct pc_item *item, size_t nbytes) {
    struct pc_peer *peer = &channel->peers[rank];
    if (PC_UNLIKELY(!peer->linked))
        link_to(channel, rank);
    pc_ring_publish(&peer->out, item, nbytes);
    pc_host_wake(channel->host, rank);
}

/* Put an item into the ring; false: no room. A header that is too long for it goes to the heap, and
   the kind is the one that follows `kind`. */
static bool put(pc_channel *channel, int rank, uint32_t kind, const void *body, size_t body_nbytes,
                const void *header, size_t header_nbytes, uint32_t nbytes) {
    struct pc_peer *peer = &channel->peers[rank];
    size_t total = PC_ITEM_NBYTES + body_nbytes + header_nbytes;
    bool whole = total > channel->inline_limit;
    if (whole)
        total = PC_ITEM_NBYTES + body_nbytes + sizeof(struct pc_block);
    struct pc_item *item = pc_ring_reserve(&peer->out, total);
    if (item == NULL)
        return false;
    if (whole) {
        uint32_t unit = pc_heap_take(&channel->heap, PC_ROOM_HEADERS, header_nbytes, rank, false);
        if (unit == 0)
            return false;
        struct pc_block block;
        pc_heap_name(&channel->heap, unit, &block);
        memcpy(pc_heap_at(channel->heap.base, unit), header, header_nbytes);
        memcpy(item->body + body_nbytes, &block, sizeof block);
    } else if (header_nbytes > 0) {
        memcpy(item->body + body_nbytes, header, header_nbytes);
    }
    if (body_nbytes > 0)
        memcpy(item->body, body, body_nbytes);
    item->kind_and_header = (kind + whole) << 24 | (uint32_t)header_nbytes;
    item->nbytes = nbytes;
    publish(channel, rank, item, total);
    return true;
}

/* The same, now or when there is room. Never lost; -1: no memory. */
static int put_or_note(pc_channel *channel, int rank, uint32_t kind, const void *body,
                       size_t body_nbytes, const void *header, size_t header_nbytes) {
    struct pc_peer *peer = &channel->peers[rank];
    if (peer->dead)
        return 0;
    if (peer->first == NULL &&
        put(channel, rank, kind, body, body_nbytes, header, header_nbytes, 0))
        return 0;
    struct pc_note *note = malloc(sizeof *note + body_nbytes + header_nbytes);
    if (note == NULL)
        return -1;
    *note =
        (struct pc_note){.kind = kind, .body_nbytes = body_nbytes, .header_nbytes = header_nbytes};
    memcpy(note->bytes, body, body_nbytes);
    if (header_nbytes > 0)
        memcpy(note->bytes + body_nbytes, header, header_nbytes);
    if (peer->first == NULL) {
        peer->first = note;
        channel->backlogged++;
    } else {
        peer->last->next = note;
    }
    peer->last = note;
    return 0;
}

int pc_channel_tell(pc_channel *channel, int rank, enum pc_channel_kind kind, uint64_t id) {
    return put_or_note(channel, rank, kind, &id, sizeof id, NULL, 0);
}

bool pc_channel_flush(pc_channel *channel) {
    for (int rank = 0; channel->backlogged > 0 && rank < channel->size; rank++) {
        struct pc_peer *peer = &channel->peers[rank];
        if (peer->first == NULL)
            continue;
        while (peer->first != NULL) {
            struct pc_note *note = peer->first;
            if (!put(channel, rank, note->kind, note->bytes, note->body_nbytes,
                     note->bytes + note->body_nbytes, note->header_nbytes, 0))
                break;
            peer->first = note->next;
            free(note);
        }
        if (peer->first == NULL)
            channel->backlogged--;
    }
    return channel->backlogged > 0;
}

/* --- messages --------------------------------------------------------------------------------- */

/* Looks for a receiver that copies a payload straight from our memory: one that waits has seen it
   after some 0.5 us, and then needs 5 to 10 us for 64 KiB. */
#define OFFERED_LOOKS 100
#define TAKEN_LOOKS 5000

/* Whether that is quicker than two copies, which two ranks make at a time, depends on whether their
   cores share a cache, and on whether the receiver waits. So it is tried: of so many messages one
   goes the other way, and one of a few is timed. */
#define TRIED_OF 64
#define TIMED_OF 4

/* Count what a message has cost. A lower cost is believed at once, a higher one by and by: who
   takes the core away from a copy says nothing of the next. */
static void note_cost(uint32_t *cost, uint64_t ns, size_t nbytes) {
    uint64_t now = ns * 1024 / nbytes + 1, most = *cost + *cost / 8 + 1;
    *cost = (uint32_t)(*cost == 0 || now < most ? now : most);
}

static bool should_offer(const struct pc_peer *peer) {
    bool is_quicker = peer->costs[true] < peer->costs[false];
    return is_quicker != (peer->num_posted % TRIED_OF == 0);
}

/* Wait for a moment until the receiver has copied what is offered. False: it has not, and will
   not. */
static bool was_copied(struct pc_filling *filling) {
    uint64_t state = PC_DIRECT_OFFERED;
    for (int looks = 0; looks < OFFERED_LOOKS && state == PC_DIRECT_OFFERED; looks++) {
        pc_relax();
        state = pc_load(&filling->direct);
    }
    for (int looks = 0; looks < TAKEN_LOOKS && state == PC_DIRECT_TAKEN; looks++) {
        pc_relax();
        state = pc_load(&filling->direct);
    }
    return !pc_filling_take_back(filling);
}

/* Write a payload piece by piece, while its reader may be reading it already. */
static void fill(struct pc_filling *filling, unsigned char *to, struct pc_parts parts,
                 size_t nbytes) {
    for (size_t filled = 0; filled < nbytes;) {
        size_t piece = nbytes - filled < PC_FILL_NBYTES ? nbytes - filled : PC_FILL_NBYTES;
        pc_copy_parts(to + filled, parts, filled, piece);
        filled += piece;
        atomic_store_explicit(&filling->nbytes, filled, memory_order_release);
    }
}

static bool post_in_heap(pc_channel *channel, int rank, const void *header, size_t header_nbytes,
                         struct pc_parts parts, size_t nbytes, bool may_offer) {
    struct pc_peer *peer = &channel->peers[rank];
    struct pc_block block;
    size_t total = PC_ITEM_NBYTES + sizeof block + header_nbytes;
    bool whole = total > channel->inline_limit;
    if (whole)
        total = PC_ITEM_NBYTES + sizeof block;
    struct pc_item *item = pc_ring_reserve(&peer->out, total);
    if (item == NULL)
        return false;
    size_t before = sizeof(struct pc_filling) + (whole ? header_nbytes : 0);
    uint32_t unit = pc_heap_take(&channel->heap, PC_ROOM_PAYLOADS, before + nbytes, rank, false);
    if (unit == 0)
        return false;
    pc_heap_name(&channel->heap, unit, &block);
    unsigned char *memory = pc_heap_at(channel->heap.base, unit);
    struct pc_filling *filling = (struct pc_filling *)memory;
    bool offers = may_offer && should_offer(peer),
         is_timed = may_offer && peer->num_posted++ % TIMED_OF == 0;
    pc_filling_begin(filling, offers, offers ? (uintptr_t)parts.parts->iov_base : 0);
    memcpy(whole ? memory + sizeof *filling : item->body + sizeof block, header, header_nbytes);
    memcpy(item->body, &block, sizeof block);
    item->kind_and_header =
        (uint32_t)(whole ? PC_EAGER_WHOLE : PC_EAGER_HEAP) << 24 | (uint32_t)header_nbytes;
    item->nbytes = (uint32_t)nbytes;
    publish(channel, rank, item, total);
    uint64_t started = is_timed ? pc_now_ns() : 0;
    if (!offers || !was_copied(filling)) {
        fill(filling, memory + before, parts, nbytes);
        /* Its reader may have seen that it is not there yet, and have gone to sleep. */
        atomic_thread_fence(memory_order_seq_cst);
        pc_host_wake(channel->host, rank);
    }
    if (is_timed) {
        uint64_t ns = pc_now_ns() - started;
        if (!offers) /* its receiver is a piece behind */
            ns += ns * PC_FILL_NBYTES / nbytes;
        note_cost(&peer->costs[offers], ns, nbytes);
    }
    return true;
}

bool pc_channel_post(pc_channel *channel, int rank, const void *header, size_t header_nbytes,
                     struct pc_parts parts, size_t nbytes, bool may_wait) {
    struct pc_peer *peer = &channel->peers[rank];
    uint64_t cost = nbytes + channel->message_cost;
    if (nbytes > channel->eager_limit || peer->first != NULL || peer->dead)
        return false;
    uint64_t left = pc_credit_left(channel, peer);
    if (left < cost || left > channel->credit)
        return false;
    size_t total = PC_ITEM_NBYTES + header_nbytes + nbytes;
    /* A ring that fills up is kept for headers. */
    if (total <= channel->inline_limit &&
        (total <= 2 * PC_LINE || pc_ring_has(&peer->out, peer->out.num_lines / 2))) {
        struct pc_item *item = pc_ring_reserve(&peer->out, total);
        if (item == NULL)
            return false;
        memcpy(item->body, header, header_nbytes);
        pc_copy_parts(item->body + header_nbytes, parts, 0, nbytes);
        item->kind_and_header = (uint32_t)PC_EAGER << 24 | (uint32_t)header_nbytes;
        item->nbytes = (uint32_t)nbytes;
        publish(channel, rank, item, total);
    } else if (!post_in_heap(channel, rank, header, header_nbytes, parts, nbytes,
                             may_wait && nbytes >= PC_OFFERED_NBYTES && channel->single_copy &&
                                 channel->host->spins > 0)) {
        return false;
    }
    peer->charged += cost;
    return true;
}

static bool is_shared(const struct pc_channel_send *send) {
    return send->parts.num_parts == 1 && pc_arena_has(send->parts.parts->iov_base, send->nbytes);
}

uint64_t pc_channel_offer(pc_channel *channel, struct pc_channel_send *send, const void *header,
                          size_t header_nbytes) {
    send->mode = PC_OFFERED;
    send->stopped = send->is_asked = false;
    send->sent = 0;
    send->transfer = -1;
    send->pieces = pc_pieces(send->nbytes);
    send->id = pc_table_add(&channel->sends, send);
    if (send->id == 0) {
        pc_channel_send_free(channel, send);
        return 0;
    }
    if (channel->num_free_transfers > 0 && (channel->single_copy || is_shared(send))) {
        send->transfer = channel->free_transfers[--channel->num_free_transfers];
        pc_transfer_begin(pc_transfer_of(channel->heap.base, send->transfer), send->id, false);
    }
    struct pc_offer offer = {
        .id = send->id,
        .nbytes = send->nbytes,
        .num_parts = (uint32_t)send->parts.num_parts,
        .transfer = send->transfer,
        .address = (uint64_t)(uintptr_t)(send->parts.num_parts == 1 ? send->parts.parts->iov_base
                                                                    : send->parts.parts),
    };
    if (put_or_note(channel, send->peer, PC_READY, &offer, sizeof offer, header,
                    header_nbytes) < 0) {
        pc_channel_send_end(channel, send, true);
        return 0;
    }
    return send->id;
}

uint64_t pc_channel_push(pc_channel *channel, struct pc_channel_send *send, const void *header,
                         size_t header_nbytes, const void *payload) {
    unsigned char body[sizeof(struct pc_pushed) + PC_PUSH_NBYTES];
    send->mode = PC_AHEAD;
    send->transfer = -1;
    send->id = pc_table_add(&channel->sends, send);
    if (send->id == 0) {
        pc_channel_send_free(channel, send);
        return 0;
    }
    struct pc_pushed pushed = {send->id, send->nbytes};
    memcpy(body, &pushed, sizeof pushed);
    if (send->nbytes > 0)
        memcpy(body + sizeof pushed, payload, send->nbytes);
    if (put_or_note(channel, send->peer, PC_PUSHED, body, sizeof pushed + send->nbytes, header,
                    header_nbytes) < 0) {
        pc_channel_send_end(channel, send, true);
        return 0;
    }
    return send->id;
}

/* The caller may do what it likes with its memory again. */
static void let_go(pc_channel *channel, struct pc_channel_send *send) {
    void *owner = send->owner;
    send->owner = NULL;
    if (owner != NULL)
        channel->up->release(channel->owner, owner);
}

void pc_channel_send_free(pc_channel *channel, struct pc_channel_send *send) {
    let_go(channel, send);
    free(send->table);
    free(send);
}

void pc_channel_send_end(pc_channel *channel, struct pc_channel_send *send, bool reuse_transfer) {
    pc_table_remove(&channel->sends, send->id);
    if (send->mode == PC_HELPING)
        pc_channel_list_remove(&channel->helping, send->id);
    pc_channel_send_unasked(channel, send);
    if (send->transfer >= 0 && reuse_transfer)
        channel->free_transfers[channel->num_free_transfers++] = (int16_t)send->transfer;
    pc_channel_send_free(channel, send);
}

static bool can_stop(pc_channel *channel, struct pc_channel_send *send) {
    struct pc_transfer *transfer = pc_channel_transfer(channel, send);
    if (send->mode == PC_FRAGMENTS)
        return send->sent < send->nbytes;
    if (send->mode == PC_AHEAD)
        return false;
    if (transfer == NULL ||
        pc_transfer_step(transfer, send->id, PC_PHASE_WAITING, PC_PHASE_WITHDRAWN))
        return true;
    if (pc_load(&transfer->state) == pc_phase_of(send->id, PC_PHASE_WITHDRAWN))
        return true;
    return pc_transfer_take_back(transfer);
}

bool pc_channel_send_stop(pc_channel *channel, struct pc_channel_send *send) {
    send->stopped = send->stopped || can_stop(channel, send);
    return send->stopped;
}

void pc_channel_send_give_up(pc_channel *channel, struct pc_channel_send *send) {
    struct pc_transfer *transfer = pc_channel_transfer(channel, send);
    int rank = send->peer;
    uint64_t id = send->id;
    bool stopped = pc_channel_send_stop(channel, send);
    bool taken =
        transfer != NULL && pc_load(&transfer->state) != pc_phase_of(id, PC_PHASE_WITHDRAWN);
    if (taken) { /* the record is in use until the receiver says that it is not */
        if (send->mode == PC_HELPING)
            pc_channel_list_remove(&channel->helping, id);
        pc_channel_send_unasked(channel, send);
        send->mode = PC_ABANDONED;
        let_go(channel, send);
    } else {
        pc_channel_send_end(channel, send, true);
    }
    if (stopped)
        /* without memory the receiver waits in vain */
        pc_channel_tell(channel, rank, PC_CANCEL, id);
}

bool pc_channel_send_help(pc_channel *channel, struct pc_channel_send *send, size_t budget) {
    struct pc_transfer *transfer = pc_channel_transfer(channel, send);
    size_t piece_nbytes = pc_piece_nbytes(send->nbytes), copied = 0;
    bool more = true;
    while (copied < budget) {
        int64_t piece = pc_transfer_claim(transfer, send->pieces);
        if (piece < 0) {
            more = false;
            break;
        }
        size_t offset = (size_t)piece * piece_nbytes;
        size_t nbytes = send->nbytes - offset < piece_nbytes ? send->nbytes - offset : piece_nbytes;
        uint64_t into = atomic_load_explicit(&transfer->into, memory_order_relaxed);
        if (!can_store(channel, send->peer, into + offset, nbytes) ||
            pc_channel_store(channel, send->peer, into + offset, send->parts, offset, nbytes,
                             send->nbytes) != 0) {
            pc_transfer_return(transfer, piece);
            more = false;
            break;
        }
        pc_transfer_copied(transfer);
        copied += nbytes;
    }
    pc_host_wake(channel->host, send->peer);
    return more;
}

void pc_channel_use(pc_channel *channel, int rank, size_t nbytes) {
    struct pc_peer *peer = &channel->peers[rank];
    peer->used += nbytes + channel->message_cost;
    /* Seldom: it takes the line away from the sender. */
    if (peer->used - peer->repaid < channel->credit / 4)
        return;
    peer->repaid = peer->used;
    atomic_store_explicit(&peer->in.head->repaid, peer->used, memory_order_release);
}

void pc_channel_consume(pc_channel *channel, int rank, size_t nbytes,
                        const struct pc_block *block) {
    pc_block_give_back(channel->peers[rank].heap, block);
    pc_channel_use(channel, rank, nbytes);
}

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
