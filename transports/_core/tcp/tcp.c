/* Links over TCP: their life, and what their user asks for. See tcp.h; tcp_write.c and tcp_read.c
   move the bytes. */
#include "tcp.h"
#include "base/core.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <linux/sockios.h>
#include <unistd.h>

#define WATCHED UINT64_MAX
#define EVENTS 64

int pc_tcp_open(struct pc_tcp *tcp) {
    tcp->epoll = -1;
    tcp->buffer_nbytes = sizeof(struct pc_tcp_frame) + PC_TCP_LONGEST_HEADER + tcp->limits.eager;
    tcp->peers = calloc((size_t)tcp->size, sizeof *tcp->peers);
    if (tcp->peers == NULL)
        return ENOMEM;
    tcp->epoll = epoll_create1(EPOLL_CLOEXEC);
    return tcp->epoll < 0 ? errno : 0;
}

static void free_receive(struct pc_tcp *tcp, struct pc_tcp_receive *receive) {
    if (receive->owner != NULL)
        tcp->up->release(tcp->owner, receive->owner);
    free(receive->spare);
    free(receive);
}

/* Close all lanes of a link. */
static void unlink_peer(struct pc_tcp *tcp, struct pc_tcp_peer *peer) {
    for (int number = 0; peer->lanes != NULL && number < tcp->num_lanes; number++) {
        struct pc_tcp_lane *lane = &peer->lanes[number];
        if (lane->fd >= 0)
            close(lane->fd);
        lane->fd = -1;
        lane->ended = true;
        if (lane->stalled)
            tcp->restless--;
        lane->stalled = false;
        pc_tcp_free_outs(tcp, lane->first);
        lane->first = lane->last = NULL;
        free(lane->buffer);
        lane->buffer = NULL;
        lane->start = lane->end = lane->rest = 0;
    }
    pc_tcp_free_outs(tcp, peer->first);
    peer->first = peer->last = NULL;
    while (peer->active != NULL)
        pc_tcp_deactivate(peer, peer->active);
    if (peer->doubtful)
        tcp->restless--;
    peer->doubtful = false;
}

void pc_tcp_close(struct pc_tcp *tcp) {
    for (int peer = 0; tcp->peers != NULL && peer < tcp->size; peer++)
        unlink_peer(tcp, &tcp->peers[peer]);
    if (tcp->epoll >= 0)
        close(tcp->epoll);
    tcp->epoll = -1;
    tcp->closing = true;
}

void pc_tcp_free(struct pc_tcp *tcp) {
    pc_tcp_close(tcp);
    for (uint32_t place = 0; place < tcp->sends.size; place++)
        if (tcp->sends.things[place] != NULL)
            pc_tcp_free_send(tcp, tcp->sends.things[place]);
    for (uint32_t place = 0; place < tcp->receives.size; place++)
        if (tcp->receives.things[place] != NULL)
            free_receive(tcp, tcp->receives.things[place]);
    pc_table_free(&tcp->sends);
    pc_table_free(&tcp->receives);
    for (int peer = 0; tcp->peers != NULL && peer < tcp->size; peer++)
        free(tcp->peers[peer].lanes);
    free(tcp->peers);
    tcp->peers = NULL;
}

int pc_tcp_watch(struct pc_tcp *tcp, int fd) {
    struct epoll_event event = {.events = EPOLLIN, .data.u64 = WATCHED};
    return epoll_ctl(tcp->epoll, EPOLL_CTL_ADD, fd, &event) < 0 ? errno : 0;
}

int pc_tcp_attach(struct pc_tcp *tcp, int number, int index, int fd) {
    struct pc_tcp_peer *peer = &tcp->peers[number];
    if (peer->lost || peer->forgotten || tcp->epoll < 0)
        return ENOTCONN;
    if (peer->lanes == NULL) {
        peer->lanes = calloc((size_t)tcp->num_lanes, sizeof *peer->lanes);
        if (peer->lanes == NULL)
            return ENOMEM;
        for (int other = 0; other < tcp->num_lanes; other++)
            peer->lanes[other].fd = -1;
    }
    struct pc_tcp_lane *lane = &peer->lanes[index];
    if (lane->fd >= 0 || lane->ended)
        return EEXIST;
    lane->buffer = malloc(tcp->buffer_nbytes);
    if (lane->buffer == NULL)
        return ENOMEM;
    struct epoll_event event = {.events = EPOLLIN,
                                .data.u64 = (uint64_t)number << 8 | (uint64_t)index};
    if (epoll_ctl(tcp->epoll, EPOLL_CTL_ADD, fd, &event) < 0) {
        int error = errno;
        free(lane->buffer);
        lane->buffer = NULL;
        return error;
    }
    lane->fd = fd;
    lane->watched = EPOLLIN;
    if (index == 0) {
        lane->first = peer->first;
        lane->last = peer->last;
        peer->first = peer->last = NULL;
    }
    pc_tcp_write(tcp, number, index);
    return 0;
}

/* --- sends ------------------------------------------------------------------------------------ */

void pc_tcp_free_send(struct pc_tcp *tcp, struct pc_tcp_send *send) {
    if (send->owner != NULL)
        tcp->up->release(tcp->owner, send->owner);
    free(send->parts);
    free(send);
}

bool pc_tcp_stop(struct pc_tcp *tcp, uint64_t id) {
    struct pc_tcp_send *send = pc_table_get(&tcp->sends, id);
    if (send == NULL || send->pushed || (send->accepted && send->next == send->nbytes))
        return false;
    send->stopped = true;
    pc_tcp_deactivate(&tcp->peers[send->peer], send);
    return true;
}

/* What lanes have of a send becomes theirs. False: there is no memory for it. */
static bool keep_pieces(struct pc_tcp_out *out, struct pc_tcp_send *send) {
    for (; out != NULL; out = out->next) {
        if (out->send != send)
            continue;
        out->copy = malloc(out->nbytes);
        if (out->copy == NULL)
            return false;
        size_t offset = out->from, filled = 0;
        for (size_t index = 0; index < send->num_parts && filled < out->nbytes; index++) {
            size_t length = send->parts[index].iov_len;
            if (offset < length) {
                size_t piece =
                    length - offset < out->nbytes - filled ? length - offset : out->nbytes - filled;
                memcpy(out->copy + filled, (unsigned char *)send->parts[index].iov_base + offset,
                       piece);
                filled += piece;
                offset += piece;
            }
            offset -= length < offset ? length : offset;
        }
        out->send = NULL;
    }
    return true;
}

/* Free a send whose pieces may be on their way: what lanes have of it is kept for them. */
static void abandon(struct pc_tcp *tcp, struct pc_tcp_send *send) {
    struct pc_tcp_peer *peer = &tcp->peers[send->peer];
    pc_tcp_deactivate(peer, send);
    /* Lanes may have much to write of others, and many sends may be abandoned. */
    bool is_in_lanes = send->accepted && (send->nbytes == 0 || send->next > send->written);
    if (!send->pushed && !is_in_lanes)
        return;
    bool kept = keep_pieces(peer->first, send);
    for (int lane = 0; kept && peer->lanes != NULL && lane < tcp->num_lanes; lane++)
        kept = keep_pieces(peer->lanes[lane].first, send);
    if (!kept)
        pc_tcp_lose(tcp, send->peer, "there is no memory");
}

void pc_tcp_dropped(struct pc_tcp *tcp, struct pc_tcp_send *send) {
    abandon(tcp, send);
    pc_tcp_end_send(tcp, send);
}

void pc_tcp_take_back(struct pc_tcp *tcp, uint64_t id) {
    struct pc_tcp_send *send = pc_table_get(&tcp->sends, id);
    if (send == NULL)
        return;
    int number = send->peer;
    abandon(tcp, send);
    bool pushed = send->pushed;
    pc_table_remove(&tcp->sends, id);
    pc_tcp_free_send(tcp, send);
    if (!pushed)
        pc_tcp_tell(tcp, number, PC_TCP_CANCEL, id, 0);
}

/* --- receives --------------------------------------------------------------------------------- */

int64_t pc_tcp_accept(struct pc_tcp *tcp, int peer, uint64_t id, void *into, size_t nbytes,
                      void *owner) {
    struct pc_tcp_receive *receive = calloc(1, sizeof *receive);
    uint64_t handle = receive != NULL ? pc_table_add(&tcp->receives, receive) : 0;
    if (handle == 0) {
        free(receive);
        return -1;
    }
    *receive = (struct pc_tcp_receive){
        .handle = handle, .id = id, .peer = peer, .nbytes = nbytes, .into = into, .owner = owner};
    pc_tcp_tell(tcp, peer, PC_TCP_GO, id, handle);
    return (int64_t)handle;
}

void pc_tcp_end_receive(struct pc_tcp *tcp, struct pc_tcp_receive *receive) {
    pc_table_remove(&tcp->receives, receive->handle);
    if (receive->pushed)
        pc_tcp_repay(tcp, receive->peer, true, receive->nbytes);
    free_receive(tcp, receive);
}

bool pc_tcp_place(struct pc_tcp *tcp, uint64_t handle, void *into, void *owner) {
    struct pc_tcp_receive *receive = pc_table_get(&tcp->receives, handle);
    if (receive == NULL)
        return false;
    bool complete = receive->filled == receive->nbytes;
    if (receive->spare != NULL)
        memcpy(into, receive->spare, receive->filled);
    if (complete) {
        pc_tcp_end_receive(tcp, receive); /* the owner is the caller's */
        return true;
    }
    free(receive->spare);
    receive->spare = NULL;
    receive->into = into;
    receive->owner = owner;
    return false;
}

bool pc_tcp_redirect(struct pc_tcp *tcp, uint64_t handle, void *into, void *owner) {
    struct pc_tcp_receive *receive = pc_table_get(&tcp->receives, handle);
    if (receive == NULL)
        return false;
    /* With several lanes there are gaps: what is in them is copied, too. */
    memcpy(into, receive->into, tcp->num_lanes > 1 ? receive->nbytes : receive->filled);
    if (receive->owner != NULL)
        tcp->up->release(tcp->owner, receive->owner);
    receive->into = into;
    receive->owner = owner;
    return true;
}

void pc_tcp_give_up(struct pc_tcp *tcp, uint64_t handle) {
    struct pc_tcp_receive *receive = pc_table_get(&tcp->receives, handle);
    if (receive == NULL)
        return;
    if (!receive->pushed)
        pc_tcp_tell(tcp, receive->peer, PC_TCP_DROP, receive->id, 0);
    pc_tcp_end_receive(tcp, receive);
}

void pc_tcp_drop(struct pc_tcp *tcp, int peer, uint64_t id) {
    pc_tcp_tell(tcp, peer, PC_TCP_DROP, id, 0);
}

/* Tell a peer what of its was consumed, before its credit runs out. */
void pc_tcp_repay(struct pc_tcp *tcp, int number, bool pushed, size_t nbytes) {
    struct pc_tcp_peer *peer = &tcp->peers[number];
    peer->held[pushed] -= nbytes;
    if (pushed) {
        pc_tcp_tell(tcp, number, PC_TCP_CREDIT, 1, nbytes);
        return;
    }
    peer->unrepaid += nbytes;
    if (peer->unrepaid >= tcp->limits.credit / 4) {
        pc_tcp_tell(tcp, number, PC_TCP_CREDIT, 0, peer->unrepaid);
        peer->unrepaid = 0;
    }
}

void pc_tcp_consumed(struct pc_tcp *tcp, int peer, size_t nbytes) {
    pc_tcp_repay(tcp, peer, false, nbytes + tcp->limits.message_cost);
}

/* --- links ------------------------------------------------------------------------------------ */

void pc_tcp_lose(struct pc_tcp *tcp, int number, const char *why) {
    struct pc_tcp_peer *peer = &tcp->peers[number];
    if (peer->lost)
        return;
    peer->lost = true;
    unlink_peer(tcp, peer);
    if (!peer->forgotten && !tcp->closing) /* after a goodbye, too */
        tcp->up->lost(tcp->owner, number, why);
}

void pc_tcp_explain(int error, char *why, size_t room) {
    char text[96];
    snprintf(why, room, "its link was closed (%s)", strerror_r(error, text, sizeof text));
}

void pc_tcp_lane_ended(struct pc_tcp *tcp, int number, int index, const char *why) {
    struct pc_tcp_peer *peer = &tcp->peers[number];
    struct pc_tcp_lane *lane = &peer->lanes[index];
    if (peer->bye || (tcp->num_lanes == 1 && !peer->leaving)) {
        pc_tcp_lose(tcp, number, why);
        return;
    }
    close(lane->fd);
    lane->fd = -1;
    lane->ended = true;
    if (!peer->doubtful)
        tcp->restless++;
    peer->doubtful = true;
}

static bool has_unread(const struct pc_tcp_lane *lane) {
    int waiting = 0;
    return lane->fd >= 0 &&
           (lane->stalled || (ioctl(lane->fd, FIONREAD, &waiting) == 0 && waiting > 0));
}

/* A lane has ended, of a link with several. First comes all that is here; a goodbye is in it, if
   there is one: who says it closes nothing before the kernel of this host has it. Without one the
   link is lost. After one, the lanes that are left bring what is missing. */
static void decide(struct pc_tcp *tcp, int number) {
    struct pc_tcp_peer *peer = &tcp->peers[number];
    bool is_more = has_unread(&peer->lanes[0]), is_open = false;
    for (int lane = 1; lane < tcp->num_lanes; lane++) {
        is_more = is_more || has_unread(&peer->lanes[lane]);
        is_open = is_open || peer->lanes[lane].fd >= 0;
    }
    if (is_more)
        return;
    if (peer->leaving && is_open) { /* the end of another lane asks again */
        peer->doubtful = false;
        tcp->restless--;
        return;
    }
    pc_tcp_lose(tcp, number, "its link was closed");
}

void pc_tcp_forget(struct pc_tcp *tcp, int number) {
    struct pc_tcp_peer *peer = &tcp->peers[number];
    peer->forgotten = peer->lost = true;
    unlink_peer(tcp, peer);
    for (uint32_t place = 0; place < tcp->sends.size; place++) {
        struct pc_tcp_send *send = tcp->sends.things[place];
        if (send != NULL && send->peer == number) {
            pc_table_remove(&tcp->sends, send->id);
            pc_tcp_free_send(tcp, send);
        }
    }
    for (uint32_t place = 0; place < tcp->receives.size; place++) {
        struct pc_tcp_receive *receive = tcp->receives.things[place];
        /* What was pushed, and is here, may still be accepted. */
        if (receive == NULL || receive->peer != number ||
            (receive->pushed && receive->filled == receive->nbytes))
            continue;
        pc_table_remove(&tcp->receives, receive->handle);
        free_receive(tcp, receive);
    }
}

/* Go on with what was pushed: by now it has a place, or nobody has wanted it yet. */
static void resume(struct pc_tcp *tcp, int number, int index) {
    struct pc_tcp_lane *lane = &tcp->peers[number].lanes[index];
    struct pc_tcp_receive *receive = pc_table_get(&tcp->receives, lane->handle);
    if (receive != NULL && receive->into == NULL) {
        receive->into = receive->spare = malloc(receive->nbytes);
        if (receive->spare == NULL) {
            pc_tcp_lose(tcp, number, "there is no memory for what it sends");
            return;
        }
    }
    lane->stalled = false;
    tcp->restless--;
    pc_tcp_read(tcp, number, index);
}

/* Look once at everything. */
static bool look(struct pc_tcp *tcp) {
    struct epoll_event events[EVENTS];
    bool worked = false;
    for (int peer = 0; tcp->restless > 0 && peer < tcp->size; peer++) {
        for (int lane = 0; tcp->peers[peer].lanes != NULL && lane < tcp->num_lanes; lane++)
            if (tcp->peers[peer].lanes[lane].stalled) {
                resume(tcp, peer, lane);
                worked = true;
            }
        if (tcp->peers[peer].doubtful) {
            decide(tcp, peer);
            worked = true;
        }
    }
    int count = epoll_wait(tcp->epoll, events, EVENTS, 0);
    for (int index = 0; index < count; index++) {
        uint64_t what = events[index].data.u64;
        if (what == WATCHED) {
            tcp->up->watched(tcp->owner);
            continue;
        }
        int peer = (int)(what >> 8), number = (int)(what & 255);
        struct pc_tcp_lane *lane = &tcp->peers[peer].lanes[number];
        if (lane->fd >= 0 && (events[index].events & ~(uint32_t)EPOLLOUT))
            pc_tcp_read(tcp, peer, number);
        if (lane->fd >= 0 && (events[index].events & EPOLLOUT)) {
            lane->full = false;
            pc_tcp_write(tcp, peer, number);
        }
    }
    return worked || count > 0;
}

/* Wait for a moment until there is something to do. */
static bool wait_a_moment(struct pc_tcp *tcp) {
    struct pollfd here = {.fd = tcp->epoll, .events = POLLIN};
    struct timespec moment = {.tv_nsec = PC_TCP_MOMENT_NS};
    return ppoll(&here, 1, &moment, NULL) > 0;
}

bool pc_tcp_progress(struct pc_tcp *tcp) {
    tcp->moved = 0;
    bool worked = look(tcp);
    if (!tcp->has_unhandled)
        pc_tcp_write_granted(tcp);
    /* While much of large payloads moves, and nobody needs to be told of anything, the way back to
       the caller and from there would take longer than the next part. */
    for (uint64_t start = 0; tcp->moved >= PC_TCP_LONG && !tcp->has_unhandled && !tcp->closing;) {
        uint64_t now = pc_now_ns();
        start = start == 0 ? now : start;
        if (now - start > PC_TCP_AT_ONCE_NS || !wait_a_moment(tcp))
            break;
        tcp->moved = 0;
        look(tcp);
        if (!tcp->has_unhandled)
            pc_tcp_write_granted(tcp);
    }
    return worked;
}

bool pc_tcp_idle(struct pc_tcp *tcp) { return tcp->restless == 0; }

/* --- the end ---------------------------------------------------------------------------------- */

void pc_tcp_say_goodbye(struct pc_tcp *tcp) {
    for (int peer = 0; peer < tcp->size; peer++) {
        while (tcp->peers[peer].active != NULL)
            pc_tcp_deactivate(&tcp->peers[peer], tcp->peers[peer].active);
        if ((tcp->peers[peer].used || tcp->peers[peer].lanes != NULL) && !tcp->peers[peer].lost)
            pc_tcp_tell(tcp, peer, PC_TCP_BYE, 0, tcp->peers[peer].given);
    }
    tcp->closing = true;
}

bool pc_tcp_flush(struct pc_tcp *tcp) {
    bool done = true;
    pc_tcp_progress(tcp);
    for (int number = 0; number < tcp->size; number++) {
        struct pc_tcp_peer *peer = &tcp->peers[number];
        done = done && peer->first == NULL;
        for (int lane = 0; peer->lanes != NULL && lane < tcp->num_lanes; lane++) {
            int unacknowledged = 0, fd = peer->lanes[lane].fd;
            if (fd >= 0 && (peer->lanes[lane].first != NULL ||
                            (ioctl(fd, SIOCOUTQ, &unacknowledged) == 0 && unacknowledged > 0)))
                done = false;
        }
    }
    return done;
}
