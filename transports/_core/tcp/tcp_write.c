/* What is written to the sockets. See tcp.h. */
#include "tcp.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#define PIECES 64 /* of memory, in one call of the kernel */

static bool unreachable(const struct pc_tcp_peer *peer) {
    return peer->lost || peer->bye || peer->forgotten;
}

static void free_out(struct pc_tcp *tcp, struct pc_tcp_out *out) {
    tcp->behind--;
    free(out->copy);
    free(out);
}

void pc_tcp_free_outs(struct pc_tcp *tcp, struct pc_tcp_out *out) {
    for (struct pc_tcp_out *next; out != NULL; out = next) {
        next = out->next;
        free_out(tcp, out);
    }
}

/* --- what is to be written -------------------------------------------------------------------- */

/* Make something to be written of pieces of memory, without the first `skip` bytes. NULL: no
   memory. */
static struct pc_tcp_out *make_out(struct pc_tcp *tcp, const struct iovec *pieces, size_t count,
                                   size_t skip) {
    size_t nbytes = 0;
    for (size_t index = 0; index < count; index++)
        nbytes += pieces[index].iov_len;
    struct pc_tcp_out *out = malloc(sizeof *out + nbytes - skip);
    if (out == NULL)
        return NULL;
    *out = (struct pc_tcp_out){.head_nbytes = nbytes - skip};
    unsigned char *to = out->head;
    for (size_t index = 0; index < count; index++) {
        size_t length = pieces[index].iov_len, passed = skip < length ? skip : length;
        if (length > passed)
            memcpy(to, (unsigned char *)pieces[index].iov_base + passed, length - passed);
        to += length - passed;
        skip -= passed;
    }
    tcp->behind++;
    return out;
}

/* Put it behind what waits for the first lane, or for the link. */
static void append(struct pc_tcp_peer *peer, struct pc_tcp_out *out) {
    /* Another lane may be there before the first one. */
    bool linked = peer->lanes != NULL && peer->lanes[0].fd >= 0;
    struct pc_tcp_out **first = linked ? &peer->lanes[0].first : &peer->first;
    struct pc_tcp_out **last = linked ? &peer->lanes[0].last : &peer->last;
    if (*first == NULL)
        *first = out;
    else
        (*last)->next = out;
    *last = out;
}

void pc_tcp_tell(struct pc_tcp *tcp, int number, enum pc_tcp_kind kind, uint64_t id,
                 uint64_t value) {
    struct pc_tcp_peer *peer = &tcp->peers[number];
    if (unreachable(peer))
        return;
    peer->used = true;
    struct pc_tcp_frame frame = {.kind = kind, .id = id, .value = value};
    struct iovec piece = {&frame, sizeof frame};
    struct pc_tcp_out *out = make_out(tcp, &piece, 1, 0);
    if (out == NULL) {
        pc_tcp_lose(tcp, number, "there is no memory");
        return;
    }
    append(peer, out);
    pc_tcp_write(tcp, number, 0);
}

/* Write a small message at once, as far as the kernel takes it, and keep a copy of the rest. */
static int64_t send_eager(struct pc_tcp *tcp, struct pc_tcp_send *send, const void *header,
                          size_t header_nbytes) {
    struct pc_tcp_peer *peer = &tcp->peers[send->peer];
    struct pc_tcp_frame frame = {
        .kind = PC_TCP_EAGER, .header = (uint32_t)header_nbytes, .nbytes = (uint32_t)send->nbytes};
    size_t count = 2 + send->num_parts, whole = sizeof frame + header_nbytes + send->nbytes;
    struct iovec few[PIECES], *pieces = count <= PIECES ? few : malloc(count * sizeof *pieces);
    if (pieces == NULL)
        return -1;
    pieces[0] = (struct iovec){&frame, sizeof frame};
    pieces[1] = (struct iovec){(void *)(uintptr_t)header, header_nbytes};
    memcpy(pieces + 2, send->parts, send->num_parts * sizeof *pieces);
    peer->used = true;
    struct pc_tcp_lane *lane = peer->lanes;
    ssize_t took = 0;
    if (lane != NULL && lane->fd >= 0 && lane->first == NULL && !lane->full && count <= PIECES) {
        struct msghdr message = {.msg_iov = pieces, .msg_iovlen = count};
        do
            took = sendmsg(lane->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
        while (took < 0 && errno == EINTR);
        /* another error is met again by the lane, in order */
        lane->full = took < 0 && errno == EAGAIN;
    }
    size_t written = took > 0 ? (size_t)took : 0;
    struct pc_tcp_out *out = written < whole ? make_out(tcp, pieces, count, written) : NULL;
    if (pieces != few)
        free(pieces);
    if (written == whole)
        return 0;
    if (out == NULL && written > 0) /* half a message is out */
        pc_tcp_lose(tcp, send->peer, "there is no memory");
    if (out == NULL)
        return -1;
    append(peer, out);
    if (peer->lanes != NULL)
        pc_tcp_watch_lane(tcp, send->peer, 0);
    return 0;
}

/* Of one that is pushed, too: the payload, or what the receiver will ask for, is taken from its
   memory. */
int64_t pc_tcp_offer(struct pc_tcp *tcp, struct pc_tcp_send *send, const void *header,
                     size_t header_nbytes) {
    struct pc_tcp_peer *peer = &tcp->peers[send->peer];
    send->id = pc_table_add(&tcp->sends, send);
    if (send->id == 0)
        return -1;
    int64_t id = (int64_t)send->id;
    if (unreachable(peer))
        return id; /* it waits for the verdict */
    struct pc_tcp_frame frame = {.kind = send->pushed ? PC_TCP_AHEAD : PC_TCP_READY,
                                 .header = (uint32_t)header_nbytes,
                                 .nbytes = send->pushed ? (uint32_t)send->nbytes : 0,
                                 .id = send->id,
                                 .value = send->nbytes};
    struct iovec pieces[] = {{&frame, sizeof frame}, {(void *)(uintptr_t)header, header_nbytes}};
    struct pc_tcp_out *out = make_out(tcp, pieces, 2, 0);
    if (out == NULL) {
        pc_table_remove(&tcp->sends, send->id);
        return -1;
    }
    peer->used = true;
    if (send->pushed) {
        peer->owed[1] += send->nbytes;
        peer->given += send->nbytes;
        out->send = send;
        out->nbytes = send->next = send->nbytes;
    }
    append(peer, out);
    tcp->starting = send->id;
    pc_tcp_write(tcp, send->peer, 0);
    tcp->starting = 0;
    return pc_table_get(&tcp->sends, (uint64_t)id) == NULL ? 0 : id;
}

int64_t pc_tcp_send(struct pc_tcp *tcp, struct pc_tcp_send *send, const void *header,
                    size_t header_nbytes, bool may_push) {
    struct pc_tcp_peer *peer = &tcp->peers[send->peer];
    if (send->nbytes <= tcp->limits.eager && !unreachable(peer)) {
        uint64_t owed = peer->owed[0] + send->nbytes + tcp->limits.message_cost;
        if (owed <= tcp->limits.credit) {
            int64_t status = send_eager(tcp, send, header, header_nbytes);
            if (status == 0) {
                peer->owed[0] = owed;
                pc_tcp_free_send(tcp, send);
            }
            return status;
        }
    }
    send->pushed = may_push && send->nbytes > tcp->limits.eager &&
                   peer->owed[1] + send->nbytes <= tcp->limits.ahead;
    return pc_tcp_offer(tcp, send, header, header_nbytes);
}

void pc_tcp_end_send(struct pc_tcp *tcp, struct pc_tcp_send *send) {
    uint64_t id = send->id;
    void *memory = send->owner;
    pc_table_remove(&tcp->sends, id);
    pc_tcp_free_send(tcp, send);
    if (id != tcp->starting)
        tcp->up->sent(tcp->owner, id, memory);
}

/* --- writing ---------------------------------------------------------------------------------- */

void pc_tcp_activate(struct pc_tcp_peer *peer, struct pc_tcp_send *send) {
    send->is_active = true;
    send->next_active = NULL;
    send->prev_active = peer->last_active;
    *(peer->last_active != NULL ? &peer->last_active->next_active : &peer->active) = send;
    peer->last_active = send;
}

void pc_tcp_deactivate(struct pc_tcp_peer *peer, struct pc_tcp_send *send) {
    if (!send->is_active)
        return;
    send->is_active = false;
    *(send->prev_active != NULL ? &send->prev_active->next_active : &peer->active) =
        send->next_active;
    *(send->next_active != NULL ? &send->next_active->prev_active : &peer->last_active) =
        send->prev_active;
}

/* Take the next fragment of the sends that are accepted, which have their turns; NULL: there is
   none. */
static struct pc_tcp_out *pull(struct pc_tcp *tcp, struct pc_tcp_peer *peer) {
    struct pc_tcp_send *send = peer->active;
    if (send == NULL || tcp->closing)
        return NULL;
    size_t rest = send->nbytes - send->next;
    size_t nbytes = rest < PC_TCP_FRAGMENT ? rest : PC_TCP_FRAGMENT;
    struct pc_tcp_frame frame = {
        .kind = PC_TCP_DATA, .nbytes = (uint32_t)nbytes, .id = send->theirs, .value = send->next};
    struct iovec piece = {&frame, sizeof frame};
    struct pc_tcp_out *out = make_out(tcp, &piece, 1, 0);
    if (out == NULL)
        return NULL;
    out->send = send;
    out->from = send->next;
    out->nbytes = nbytes;
    send->next += nbytes;
    peer->given += nbytes;
    pc_tcp_deactivate(peer, send);
    if (send->next < send->nbytes)
        pc_tcp_activate(peer, send);
    return out;
}

/* Collect what is left of the payload of something to be written; returns the number of pieces. */
static size_t collect_payload(const struct pc_tcp_out *out, struct iovec *pieces, size_t room) {
    size_t skip = out->done > out->head_nbytes ? out->done - out->head_nbytes : 0;
    size_t rest = out->nbytes - skip, count = 0;
    if (rest == 0)
        return 0;
    if (rest > PC_TCP_FRAGMENT)
        rest = PC_TCP_FRAGMENT;
    if (out->copy != NULL) {
        pieces[0] = (struct iovec){out->copy + skip, rest};
        return 1;
    }
    size_t offset = out->from + skip;
    for (size_t index = 0; index < out->send->num_parts && rest > 0 && count < room; index++) {
        const struct iovec *part = &out->send->parts[index];
        if (offset >= part->iov_len) {
            offset -= part->iov_len;
            continue;
        }
        size_t length = part->iov_len - offset < rest ? part->iov_len - offset : rest;
        pieces[count++] = (struct iovec){(unsigned char *)part->iov_base + offset, length};
        rest -= length;
        offset = 0;
    }
    return count;
}

/* Collect what a lane writes next: heads, and at most one payload. */
static size_t collect(const struct pc_tcp_out *out, struct iovec *pieces, size_t *nbytes) {
    size_t count = 0;
    for (; out != NULL && count < PIECES / 2; out = out->next) {
        if (out->done < out->head_nbytes)
            pieces[count++] = (struct iovec){(unsigned char *)out->head + out->done,
                                             out->head_nbytes - out->done};
        if (out->nbytes > 0) {
            count += collect_payload(out, pieces + count, PIECES - count);
            break;
        }
    }
    *nbytes = 0;
    for (size_t index = 0; index < count; index++)
        *nbytes += pieces[index].iov_len;
    return count;
}

/* Count what the kernel took. */
static void advance(struct pc_tcp *tcp, struct pc_tcp_lane *lane, size_t written) {
    while (written > 0) {
        struct pc_tcp_out *out = lane->first;
        size_t rest = out->head_nbytes + out->nbytes - out->done;
        if (written < rest) {
            out->done += written;
            return;
        }
        written -= rest;
        lane->first = out->next;
        struct pc_tcp_send *send = out->send;
        if (send != NULL) {
            send->written += out->nbytes;
            if (send->written == send->nbytes)
                pc_tcp_end_send(tcp, send);
        }
        free_out(tcp, out);
    }
}

void pc_tcp_watch_lane(struct pc_tcp *tcp, int number, int index) {
    struct pc_tcp_peer *peer = &tcp->peers[number];
    struct pc_tcp_lane *lane = &peer->lanes[index];
    bool wants_room = lane->first != NULL || (peer->active != NULL && !tcp->closing);
    uint32_t wanted = wants_room ? EPOLLIN | EPOLLOUT : EPOLLIN;
    if (lane->fd < 0 || lane->watched == wanted)
        return;
    struct epoll_event event = {.events = wanted,
                                .data.u64 = (uint64_t)number << 8 | (uint64_t)index};
    if (epoll_ctl(tcp->epoll, EPOLL_CTL_MOD, lane->fd, &event) == 0)
        lane->watched = wanted;
}

void pc_tcp_write(struct pc_tcp *tcp, int number, int index) {
    struct pc_tcp_peer *peer = &tcp->peers[number];
    if (peer->lanes == NULL)
        return;
    struct pc_tcp_lane *lane = &peer->lanes[index];
    size_t budget = PC_TCP_BUDGET;
    while (lane->fd >= 0 && !lane->full && budget > 0) {
        if (lane->first == NULL)
            lane->first = lane->last = pull(tcp, peer);
        if (lane->first == NULL)
            break;
        struct iovec pieces[PIECES];
        size_t nbytes;
        struct msghdr message = {.msg_iov = pieces,
                                 .msg_iovlen = collect(lane->first, pieces, &nbytes)};
        ssize_t written = sendmsg(lane->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
        int error = errno;
        if (written < 0 && error == EINTR)
            continue;
        if (written < 0 && error != EAGAIN && error != EPIPE && error != ECONNRESET &&
            error != ETIMEDOUT) {
            char why[128]; /* as EFAULT, of memory that is gone: half a frame may be out */
            pc_tcp_explain(error, why, sizeof why);
            pc_tcp_lose(tcp, number, why);
            return;
        }
        if (written < 0 && error != EAGAIN) {
            /* Reading tells why, after all that has come. */
            pc_tcp_free_outs(tcp, lane->first);
            lane->first = lane->last = NULL;
        }
        lane->full = written < 0 || (size_t)written < nbytes;
        if (written > 0)
            advance(tcp, lane, (size_t)written);
        if (nbytes >= PC_TCP_LONG && written > 0)
            tcp->moved += (size_t)written;
        budget -= written > 0 && (size_t)written < budget ? (size_t)written : budget;
    }
    pc_tcp_watch_lane(tcp, number, index);
}

void pc_tcp_write_all(struct pc_tcp *tcp, int peer) {
    for (int lane = 0; lane < tcp->num_lanes; lane++)
        pc_tcp_write(tcp, peer, lane);
}

void pc_tcp_write_granted(struct pc_tcp *tcp) {
    for (struct pc_tcp_peer *peer; (peer = tcp->granted) != NULL;) {
        tcp->granted = peer->next_granted;
        peer->granted = false;
        pc_tcp_write_all(tcp, (int)(peer - tcp->peers));
    }
}
