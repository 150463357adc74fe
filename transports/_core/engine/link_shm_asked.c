/* What the engine asks the link over shared memory for. See link_shm.h. */
#include "link_shm_message.h"

#include <errno.h>

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
                        (struct pc_parts){send->parts, 1}, send->nbytes))
        return PC_SENT;
    struct pc_channel_send *offer = offer_of(send, local);
    if (offer == NULL)
        return -ENOMEM;
    if (way != PC_OFFER && send->num_parts != 1 &&
        pc_channel_post(&shm->channel, local, header, header_nbytes, offer->parts, send->nbytes)) {
        pc_channel_send_free(&shm->channel, offer);
        return PC_SENT;
    }
    send->token[0] = pc_channel_offer(&shm->channel, offer, header, header_nbytes);
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
    uint64_t handle = receive != NULL ? pc_channel_add_receive(&shm->channel, receive) : 0;
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
    clear(&peer->untold);
    for (struct pc_shm_message *record = shm->messages, *next; record != NULL; record = next) {
        next = record->next;
        bool is_kept = record->state <= SHM_BLOCK && (record->message != NULL || record->is_told);
        if (record->peer == local && !is_kept)
            drop(shm, record);
    }
}

const struct pc_link_ops pc_link_shm_ops = {shm_send,    shm_stop,    shm_take_back, shm_accept,
                                           shm_release, shm_give_up, shm_redirect,  shm_forget};
