/* The link over shared memory. See link_shm.h.  The channel tells what happens in the middle of its
   progress, and what it told of the end of a send or a receive is freed next; the engine's
   callbacks may end the same. So ends are queued, and told when progress has returned. What comes
   is told at once, from the ring or the block where it lies: the channel does nothing more with it.
   Credit bounds what senders may have buffered here, so it is repaid when a payload was used, not
   when it was copied: each is kept by the link (PC_KEPT), until the engine releases it. One that
   lies in a ring is moved to memory of ours if it is still there after it was told; most are
   not. */
#include "link_shm.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>

/* --- messages, and the queues in which they stand --------------------------------------------- */

enum shm_state {
    SHM_EAGER,     /* the payload is here, in memory of ours or in a ring */
    SHM_PUSHED,    /* so it is, and its sender is to be told that it was used */
    SHM_BLOCK,     /* in a block */
    SHM_OFFERED,
    SHM_READING,
    SHM_LEFT,      /* it was accepted when its sender had left: it waits until that is forgotten */
    SHM_RECEIVED,  /* these two are to be told */
    SHM_WITHDRAWN,
};

struct pc_shm_message {
    struct pc_shm_message *next, **at; /* of all */
    struct pc_shm_message *next_in_queue;
    struct pc_message *message; /* the engine's; NULL: it was not told yet */
    enum shm_state state;
    int peer; /* local rank */
    bool is_reporting, is_over; /* it is being told; and the engine is done with it */
    bool in_offers;
    size_t nbytes, header_nbytes;
    const unsigned char *payload, *header;
    struct pc_block block;
    struct pc_offer offer;
    struct pc_chained by_id;
    uint64_t handle;
    unsigned char bytes[]; /* payload, header */
};

static inline struct pc_link_shm *shm_of(struct pc_link *link) {
    return (struct pc_link_shm *)link;
}
/* It lies in a ring, until it is moved to memory of ours. */
static inline bool is_short(const struct pc_shm_message *record) {
    return record->state == SHM_EAGER || record->state == SHM_PUSHED;
}
static inline struct pc_shm_message *record_of(const struct pc_message *message) {
    return (struct pc_shm_message *)(uintptr_t)message->token[0];
}
static inline struct pc_channel_send *send_of(struct pc_link_shm *shm, const struct pc_send *send) {
    return send->token[0] != 0 ? pc_table_get(&shm->channel.sends, send->token[0]) : NULL;
}
static inline struct pc_channel_receive *receive_of(struct pc_link_shm *shm,
                                                    const struct pc_shm_message *record) {
    return pc_table_get(&shm->channel.receives, record->handle);
}

/* The token of a send has its id, 0 when it is over, and then the next one that is. */
static inline struct pc_send *next_sent(const struct pc_send *send) {
    return (struct pc_send *)(uintptr_t)send->token[1];
}

static inline void clear(struct pc_shm_queue *queue) {
    queue->first = NULL;
    queue->last = &queue->first;
}

static inline void append(struct pc_shm_queue *queue, struct pc_shm_message *record) {
    record->next_in_queue = NULL;
    *queue->last = record;
    queue->last = &record->next_in_queue;
}

static inline void take_out(struct pc_shm_queue *queue, struct pc_shm_message *record) {
    struct pc_shm_message **at = &queue->first;
    while (*at != record)
        at = &(*at)->next_in_queue;
    *at = record->next_in_queue;
    if (*at == NULL)
        queue->last = at;
}

static inline void add(struct pc_link_shm *shm, struct pc_shm_message *record) {
    PC_LIST_ADD(shm->messages, record);
}

static inline void remove_offer(struct pc_link_shm *shm, struct pc_shm_message *record) {
    if (record->in_offers)
        pc_chains_remove(&shm->offers, &record->by_id);
    record->in_offers = false;
}

/* The engine does not know the message any more. Not `inline`: the compiler sees where that is
   worth it. */
static void drop(struct pc_link_shm *shm, struct pc_shm_message *record) {
    remove_offer(shm, record);
    if (record->state >= SHM_RECEIVED)
        take_out(&shm->over, record);
    shm->peers[record->peer].num_withdrawn -= record->state == SHM_WITHDRAWN;
    if (record->is_reporting) {
        record->state = SHM_READING; /* it stands in no queue */
        record->is_over = true;
        return;
    }
    PC_LIST_REMOVE(record);
    free(record);
}

/* Its payload was used: the credit is the sender's again. */
static inline void use(struct pc_link_shm *shm, struct pc_shm_message *record) {
    if (record->state == SHM_BLOCK)
        pc_channel_consume(&shm->channel, record->peer, record->nbytes, &record->block);
    else if (record->state == SHM_EAGER)
        pc_channel_use(&shm->channel, record->peer, record->nbytes);
    else if (record->state == SHM_PUSHED)
        /* without memory the sender waits in vain */
        pc_channel_tell(&shm->channel, record->peer, PC_FINISHED, record->offer.id);
}

static inline void lose(struct pc_link_shm *shm, int peer, bool is_mad) {
    shm->channel.peers[peer].dead = true;
    shm->peers[peer].ends = shm->peers[peer].is_lost = true;
    shm->peers[peer].is_mad |= is_mad;
}

/* --- what the engine asks for ----------------------------------------------------------------- */

/* What the channel keeps of a send: its parts that are not empty. NULL: there is no memory. */
static struct pc_channel_send *offer_of(struct pc_send *send, int local) {
    struct pc_channel_send *offer = calloc(1, sizeof *offer);
    struct iovec *table = offer != NULL ? &offer->one : NULL;
    if (offer != NULL && send->num_parts > 1)
        table = offer->table = malloc(send->num_parts * sizeof *table);
    if (table == NULL) {
        free(offer);
        return NULL;
    }
    offer->peer = local;
    offer->nbytes = send->nbytes;
    offer->owner = send;
    offer->parts.parts = table;
    for (size_t part = 0; part < send->num_parts; part++)
        if (send->parts[part].iov_len > 0)
            table[offer->parts.num_parts++] = send->parts[part];
    return offer;
}

static int shm_send(struct pc_link *link, struct pc_send *send, const void *header,
                    size_t header_nbytes, enum pc_way way) {
    struct pc_link_shm *shm = shm_of(link);
    int local = shm->local[send->peer];
    if (header_nbytes > PC_LONGEST_HEADER)
        return -EMSGSIZE;
    if (way != PC_OFFER && send->num_parts == 1 &&
        pc_channel_post(&shm->channel, local, header, header_nbytes,
                        (struct pc_parts){send->parts, 1}, send->nbytes, false))
        return PC_SENT;
    struct pc_channel_send *offer = offer_of(send, local);
    if (offer == NULL)
        return -ENOMEM;
    if (way != PC_OFFER && send->num_parts != 1 &&
        pc_channel_post(&shm->channel, local, header, header_nbytes, offer->parts, send->nbytes,
                        false)) {
        pc_channel_send_free(&shm->channel, offer);
        return PC_SENT;
    }
    bool may_push = way == PC_MAY_PUSH && send->num_parts == 1 &&
                    pc_channel_may_push(&shm->channel, header_nbytes, send->nbytes);
    send->token[0] = may_push ? pc_channel_push(&shm->channel, offer, header, header_nbytes,
                                                send->parts->iov_base)
                              : pc_channel_offer(&shm->channel, offer, header, header_nbytes);
    return send->token[0] != 0 ? PC_UNDER_WAY : -ENOMEM;
}

static bool shm_stop(struct pc_link *link, struct pc_send *send) {
    struct pc_link_shm *shm = shm_of(link);
    struct pc_channel_send *offer = send_of(shm, send);
    return offer != NULL && pc_channel_send_stop(&shm->channel, offer);
}

/* Its end is not told. */
static void forget_end(struct pc_link_shm *shm, struct pc_send *send) {
    struct pc_send *before = NULL;
    for (struct pc_send *each = shm->sent; each != NULL; before = each, each = next_sent(each)) {
        if (each != send)
            continue;
        if (before == NULL)
            shm->sent = next_sent(send);
        else
            before->token[1] = send->token[1];
        if (shm->last_sent == send)
            shm->last_sent = before;
        return;
    }
}

static void shm_take_back(struct pc_link *link, struct pc_send *send) {
    struct pc_link_shm *shm = shm_of(link);
    struct pc_channel_send *offer = send_of(shm, send);
    if (offer != NULL)
        pc_channel_send_give_up(&shm->channel, offer);
    else
        forget_end(shm, send);
}

static int shm_accept(struct pc_link *link, struct pc_message *message, void *into) {
    struct pc_link_shm *shm = shm_of(link);
    struct pc_shm_message *record = record_of(message);
    if (record->state == SHM_WITHDRAWN) {
        drop(shm, record);
        return PC_WITHDRAWN;
    }
    struct pc_channel_receive *receive = calloc(1, sizeof *receive);
    uint64_t handle = receive != NULL ? pc_table_add(&shm->channel.receives, receive) : 0;
    if (handle == 0) {
        free(receive);
        return -ENOMEM;
    }
    receive->peer = record->peer;
    receive->into = into;
    receive->owner = record;
    receive->handle = handle;
    int status = pc_channel_accept(&shm->channel, receive, &record->offer);
    if (status == 1 || status == -2) {
        if (status == -2)
            pc_channel_receive_end(&shm->channel, receive);
        remove_offer(shm, record);
        record->handle = handle;
        record->state = status == 1 ? SHM_READING : SHM_LEFT;
        return PC_UNDER_WAY;
    }
    pc_channel_receive_end(&shm->channel, receive);
    if (status == -3) {
        record->offer.transfer = -1; /* that was taken: from now on it can only come in fragments */
        return -ENOMEM;
    }
    drop(shm, record);
    return status == 0 ? PC_RECEIVED : PC_WITHDRAWN;
}

static void shm_release(struct pc_link *link, struct pc_message *message) {
    struct pc_link_shm *shm = shm_of(link);
    struct pc_shm_message *record = record_of(message);
    use(shm, record);
    /* Without memory the sender waits in vain. */
    if (record->state == SHM_OFFERED)
        pc_channel_tell(&shm->channel, record->peer, PC_FINISHED, record->offer.id);
    drop(shm, record);
}

static void shm_give_up(struct pc_link *link, struct pc_message *message) {
    struct pc_link_shm *shm = shm_of(link);
    struct pc_shm_message *record = record_of(message);
    if (record->state == SHM_READING)
        pc_channel_receive_give_up(&shm->channel, receive_of(shm, record));
    drop(shm, record);
}

static bool shm_redirect(struct pc_link *link, struct pc_message *message, void *into) {
    struct pc_link_shm *shm = shm_of(link);
    struct pc_shm_message *record = record_of(message);
    if (record->state == SHM_RECEIVED) {
        drop(shm, record);
        return false;
    }
    if (record->state == SHM_READING &&
        pc_channel_receive_redirect(&shm->channel, receive_of(shm, record), into, record) < 0)
        lose(shm, record->peer, false);
    return true;
}

static void shm_forget(struct pc_link *link, int rank) {
    struct pc_link_shm *shm = shm_of(link);
    int local = shm->local[rank];
    struct pc_shm_peer *peer = &shm->peers[local];
    peer->forgotten = true;
    pc_channel_forget(&shm->channel, local);
    for (struct pc_send *send = shm->sent, *next; send != NULL; send = next) {
        next = next_sent(send);
        if (send->peer == rank)
            forget_end(shm, send);
    }
    clear(&peer->unreported);
    for (struct pc_shm_message *record = shm->messages, *next; record != NULL; record = next) {
        next = record->next;
        bool is_kept =
            record->state <= SHM_BLOCK && (record->message != NULL || record->is_reporting);
        if (record->peer == local && !is_kept)
            drop(shm, record);
    }
}

static const struct pc_link_ops link_shm_ops = {shm_send,    shm_stop,    shm_take_back, shm_accept,
                                           shm_release, shm_give_up, shm_redirect,  shm_forget};

/* --- what is told to the engine --------------------------------------------------------------- */

/* Tell that a message has come; as `pc_arrived`. Afterwards the record may be gone: 1; else it is
   0. */
static int tell(struct pc_link_shm *shm, struct pc_shm_message *record) {
    struct pc_incoming incoming = {.peer = shm->peers[record->peer].rank,
                                   .header = record->header,
                                   .header_nbytes = record->header_nbytes,
                                   .where = record->state == SHM_OFFERED ? PC_WAITING : PC_KEPT,
                                   .payload = record->payload,
                                   .nbytes = record->nbytes,
                                   .token = {(uint64_t)(uintptr_t)record}};
    record->is_reporting = true;
    int error = pc_arrived(shm->link.engine, &shm->link, &incoming, &record->message);
    record->is_reporting = false;
    if (error == 0 && record->message == NULL && !record->is_over) {
        use(shm, record); /* it was used without a word */
        record->is_over = true;
    }
    return error != 0 ? error : record->is_over;
}

/* A copy of a message that lasts; its header only if it is not told yet. NULL: there is no
   memory. */
static struct pc_shm_message *copy_of(const struct pc_shm_message *record, bool with_header) {
    size_t here = is_short(record) ? record->nbytes : 0;
    size_t header_nbytes = with_header ? record->header_nbytes : 0;
    struct pc_shm_message *copy = malloc(sizeof *copy + here + header_nbytes);
    if (copy == NULL)
        return NULL;
    *copy = *record;
    if (here > 0)
        memcpy(copy->bytes, record->payload, here);
    if (is_short(record))
        copy->payload = copy->bytes;
    if (header_nbytes > 0)
        memcpy(copy->bytes + here, record->header, header_nbytes);
    copy->header = copy->bytes + here;
    return copy;
}

static void add_offer(struct pc_link_shm *shm, struct pc_shm_message *record) {
    pc_chains_add(&shm->offers, &record->by_id, pc_hash(record->offer.id, (uint64_t)record->peer));
    record->in_offers = true;
}

/* A message has come, and its payload and header are there for the time of the call. */
static void came(struct pc_link_shm *shm, struct pc_shm_message *what) {
    struct pc_shm_peer *peer = &shm->peers[what->peer];
    if (peer->forgotten)
        return;
    if (peer->unreported.first == NULL && peer->num_withdrawn == 0) {
        /* There is memory for it before it is told: afterwards it cannot be refused. */
        size_t here = is_short(what) ? what->nbytes : 0;
        if (shm->spare == NULL || shm->spare_nbytes < here) {
            free(shm->spare);
            shm->spare = malloc(sizeof *shm->spare + here);
            shm->spare_nbytes = here;
        }
        struct pc_shm_message *record = shm->spare;
        size_t room = shm->spare_nbytes;
        shm->spare = NULL;
        if (record == NULL) {
            lose(shm, what->peer, false);
            return;
        }
        *record = *what;
        add(shm, record);
        if (record->state == SHM_OFFERED)
            add_offer(shm, record);
        int answer = tell(shm, record);
        if (answer == 0) {
            if (is_short(record)) {
                if (record->nbytes > 0)
                    memcpy(record->bytes, record->payload, record->nbytes);
                record->payload = record->bytes;
                shm->num_kept++;
                pc_kept(shm->link.engine, record->message, record->payload);
            }
            return;
        }
        remove_offer(shm, record);
        PC_LIST_REMOVE(record);
        free(shm->spare);
        shm->spare = record;
        shm->spare_nbytes = room;
        if (answer == -EPROTO)
            lose(shm, what->peer, true);
        if (answer == 1 || answer == -EPROTO || peer->forgotten)
            return;
    }
    struct pc_shm_message *copy = copy_of(what, true);
    if (copy == NULL) {
        lose(shm, what->peer, false);
        return;
    }
    add(shm, copy);
    if (copy->state == SHM_OFFERED)
        add_offer(shm, copy);
    append(&peer->unreported, copy);
}

/* Tell again what the engine had no room for. */
static bool tell_untold(struct pc_link_shm *shm, int local) {
    struct pc_shm_peer *peer = &shm->peers[local];
    struct pc_shm_message *record;
    bool worked = false;
    while ((record = peer->unreported.first) != NULL) {
        take_out(&peer->unreported, record);
        int answer = tell(shm, record);
        if (answer == -EPROTO) {
            lose(shm, local, true);
            drop(shm, record);
        } else if (answer < 0 && peer->forgotten) {
            drop(shm, record);
        } else if (answer < 0) {
            record->next_in_queue = peer->unreported.first;
            if (peer->unreported.first == NULL)
                peer->unreported.last = &record->next_in_queue;
            peer->unreported.first = record;
            return worked;
        } else if (answer == 1) {
            drop(shm, record);
        }
        worked = true;
    }
    return worked;
}

/* Tell what has ended, and of which the channel knows nothing any more. */
static bool tell_ends(struct pc_link_shm *shm) {
    struct pc_engine *engine = shm->link.engine;
    struct pc_shm_message *record;
    bool worked = false;
    for (; shm->sent != NULL; worked = true) {
        struct pc_send *send = shm->sent;
        shm->sent = next_sent(send);
        pc_sent(engine, send);
    }
    for (; (record = shm->over.first) != NULL; worked = true) {
        struct pc_message *message = record->message;
        bool is_there = record->state == SHM_RECEIVED;
        drop(shm, record);
        if (is_there)
            pc_received(engine, message);
        else
            pc_withdrawn(engine, message);
    }
    for (int local = 0; local < shm->channel.size; local++) {
        struct pc_shm_peer *peer = &shm->peers[local];
        if (peer->unreported.first != NULL)
            worked |= tell_untold(shm, local);
        if (!peer->ends || peer->unreported.first != NULL)
            continue;
        bool finished = peer->finished;
        peer->ends = peer->finished = false;
        if (peer->is_lost && !peer->forgotten && engine->lost != NULL)
            engine->lost(engine, peer->rank,
                         peer->is_mad ? "what it wrote into shared memory makes no sense"
                                      : "there is no memory for what it sends");
        else if (finished && !peer->forgotten && engine->finished != NULL)
            engine->finished(engine, peer->rank);
        worked = true;
    }
    return worked;
}

/* --- what the channel tells ------------------------------------------------------------------- */

static void told_of(void *owner, const struct pc_came *what) {
    static const enum shm_state states[] = {[PC_EAGER] = SHM_EAGER,
                                            [PC_EAGER_HEAP] = SHM_BLOCK,
                                            [PC_PUSHED] = SHM_PUSHED,
                                            [PC_READY] = SHM_OFFERED};
    came(owner, &(struct pc_shm_message){.state = states[what->kind],
                                         .peer = what->peer,
                                         .header = what->header,
                                         .header_nbytes = what->header_nbytes,
                                         .payload = what->payload,
                                         .nbytes = what->nbytes,
                                         .block = what->block,
                                         .offer = what->offer});
}

static void sent(void *owner, uint64_t id) {
    struct pc_link_shm *shm = owner;
    struct pc_send *send = ((struct pc_channel_send *)pc_table_get(&shm->channel.sends, id))->owner;
    send->token[0] = send->token[1] = 0;
    if (shm->sent == NULL)
        shm->sent = send;
    else
        shm->last_sent->token[1] = (uint64_t)(uintptr_t)send;
    shm->last_sent = send;
}

/* What comes after it is told after this, or another receive would get it than the one that waits
   again. */
static void withdraw(struct pc_link_shm *shm, struct pc_shm_message *record) {
    record->state = SHM_WITHDRAWN;
    shm->peers[record->peer].num_withdrawn++;
    append(&shm->over, record);
}

static void cancelled(void *owner, int peer, uint64_t id) {
    struct pc_link_shm *shm = owner;
    uint64_t hash = pc_hash(id, (uint64_t)peer);
    for (struct pc_chained *each = pc_chains_first(&shm->offers, hash); each != NULL;
         each = each->next) {
        struct pc_shm_message *record = PC_CHAINED_IN(each, struct pc_shm_message, by_id);
        if (each->hash != hash || record->peer != peer || record->offer.id != id)
            continue;
        remove_offer(shm, record);
        if (record->message == NULL) { /* nobody ever hears of it */
            take_out(&shm->peers[peer].unreported, record);
            drop(shm, record);
        } else {
            withdraw(shm, record);
        }
        return;
    }
}

static struct pc_shm_message *read_by(struct pc_link_shm *shm, uint64_t handle) {
    return ((struct pc_channel_receive *)pc_table_get(&shm->channel.receives, handle))->owner;
}

static void received(void *owner, uint64_t handle) {
    struct pc_shm_message *record = read_by(owner, handle);
    record->state = SHM_RECEIVED;
    append(&((struct pc_link_shm *)owner)->over, record);
}

static void withdrawn(void *owner, uint64_t handle) { withdraw(owner, read_by(owner, handle)); }

static void bye(void *owner, int peer) {
    struct pc_link_shm *shm = owner;
    shm->peers[peer].ends = shm->peers[peer].finished = true;
}
static void lost(void *owner, int peer) { lose(owner, peer, true); }

/* The memory is that of the engine's callers. */
static void release(void *owner, void *memory) { (void)owner, (void)memory; }

static const struct pc_channel_up shm_up = {told_of,   sent, cancelled, received,
                                            withdrawn, bye,  lost,      release};

/* --- the direct way --------------------------------------------------------------------------- */

int pc_link_shm_next(struct pc_link_shm *shm, int rank, struct pc_shm_next *next) {
    int local = shm->local[rank];
    if (local < 0)
        return -1;
    struct pc_shm_peer *peer = &shm->peers[local];
    struct pc_peer *theirs = &shm->channel.peers[local];
    struct pc_item *item;
    if (peer->unreported.first != NULL || peer->num_withdrawn > 0 || peer->forgotten ||
        theirs->dead)
        return -1;
    int64_t room = pc_ring_peek(&theirs->in, &item);
    if (room == 0)
        return 0;
    if (room < (int64_t)PC_ITEM_NBYTES)
        return -1;
    size_t before = 0;
    next->header_nbytes = pc_item_header(item);
    next->nbytes = item->nbytes;
    if (PC_LIKELY(pc_item_kind(item) == PC_EAGER)) {
        before = next->nbytes;
        next->payload = item->body + next->header_nbytes;
        next->filling = NULL;
        next->header = item->body;
    } else if (pc_item_kind(item) == PC_EAGER_HEAP) {
        struct pc_block block;
        before = sizeof block;
        memcpy(&block, item->body, sizeof block);
        struct pc_filling *filling = (struct pc_filling *)pc_channel_block_at(
            theirs, &block, sizeof *filling + next->nbytes);
        if (filling == NULL)
            return -1;
        next->payload = (unsigned char *)(filling + 1);
        next->filling = filling;
        next->header = item->body + sizeof block;
    } else {
        return -1;
    }
    return before + next->header_nbytes <= (size_t)room - PC_ITEM_NBYTES ? 1 : -1;
}

void pc_link_shm_took(struct pc_link_shm *shm, int rank, const struct pc_shm_next *next) {
    int local = shm->local[rank];
    struct pc_peer *theirs = &shm->channel.peers[local];
    struct pc_item *item;
    int64_t item_nbytes = pc_ring_peek(&theirs->in, &item);
    if (next->filling == NULL) {
        pc_channel_use(&shm->channel, local, next->nbytes);
    } else {
        struct pc_block block;
        memcpy(&block, item->body, sizeof block);
        pc_channel_consume(&shm->channel, local, next->nbytes, &block);
    }
    if (pc_ring_consume(&theirs->in, item_nbytes))
        pc_host_wake(shm->channel.host, local);
}

/* --- driving ---------------------------------------------------------------------------------- */

static struct pc_link_shm *shm_in(struct pc_source *source) {
    return PC_CHAINED_IN(source, struct pc_link_shm, source);
}

static bool shm_progress(struct pc_source *source) {
    struct pc_link_shm *shm = shm_in(source);
    /* without memory: the next call tries again */
    bool worked = pc_channel_progress(&shm->channel) > 0;
    return tell_ends(shm) || worked;
}

/* What the engine had no room for is told again when a sleep is over. */
static bool shm_sleep(struct pc_source *source) {
    struct pc_link_shm *shm = shm_in(source);
    pc_host_sleep(shm->channel.host);
    return !pc_channel_ready(&shm->channel);
}

static void shm_awake(struct pc_source *source) {
    struct pc_link_shm *shm = shm_in(source);
    eventfd_t rung;
    pc_host_awake(shm->channel.host);
    /* It may be another source that ended the sleep. */
    if (eventfd_read(source->fd, &rung) == 0 && shm->rung != NULL)
        shm->rung(shm->owner);
}

#ifdef PC_DRIVE_CHECKED
static uint64_t shm_ready_ns(struct pc_source *source) {
    struct pc_link_shm *shm = shm_in(source);
    if (!pc_channel_ready(&shm->channel))
        shm->ready_ns = 0;
    else if (shm->ready_ns == 0)
        shm->ready_ns = pc_now_ns();
    return shm->ready_ns;
}
static const struct pc_source_ops source_ops = {shm_progress, shm_sleep, shm_awake, shm_ready_ns};
#else
static const struct pc_source_ops source_ops = {shm_progress, shm_sleep, shm_awake};
#endif

/* --- life ------------------------------------------------------------------------------------- */

int pc_link_shm_open(struct pc_link_shm *shm, struct pc_engine *engine, pc_host *host, int doorbell,
                     const int *ranks, const pc_channel *limits) {
    memset(shm, 0, sizeof *shm);
    shm->link = (struct pc_link){&link_shm_ops, engine};
    shm->source = (struct pc_source){.ops = &source_ops, .fd = doorbell, .cheap = true};
    clear(&shm->over);
    shm->channel = *limits;
    shm->channel.host = host;
    shm->channel.up = &shm_up;
    shm->channel.owner = shm;
    int error = pc_channel_open(&shm->channel);
    if (error != 0)
        return error;
    shm->peers = calloc((size_t)host->size, sizeof *shm->peers);
    shm->local = malloc((size_t)engine->size * sizeof *shm->local);
    if (shm->peers == NULL || shm->local == NULL)
        return ENOMEM;
    for (int rank = 0; rank < engine->size; rank++)
        shm->local[rank] = -1;
    for (int local = 0; local < host->size; local++) {
        shm->peers[local].rank = ranks[local];
        shm->local[ranks[local]] = local;
        clear(&shm->peers[local].unreported);
    }
    return 0;
}

int pc_link_shm_goodbye(struct pc_link_shm *shm) {
    pc_channel *channel = &shm->channel;
    for (int local = 0; local < channel->size; local++)
        if ((channel->peers[local].linked || channel->peers[local].first != NULL) &&
            pc_channel_tell(channel, local, PC_BYE, 0) < 0)
            return -ENOMEM;
    return 0;
}

void pc_link_shm_close(struct pc_link_shm *shm) { pc_channel_close(&shm->channel); }

void pc_link_shm_free(struct pc_link_shm *shm) {
    while (shm->messages != NULL) {
        struct pc_shm_message *record = shm->messages;
        shm->messages = record->next;
        free(record);
    }
    free(shm->spare);
    pc_chains_free(&shm->offers);
    free(shm->peers);
    free(shm->local);
    pc_channel_free(&shm->channel);
}
