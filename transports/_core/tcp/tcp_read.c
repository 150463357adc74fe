/* What is read from the sockets. See tcp.h. Every number in a frame is checked before it is
   used. */
#include "tcp.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#define NONSENSE "it sent what makes no sense"

/* A goodbye is told when all payloads have come, by whatever lane. */
static void say_bye(struct pc_tcp *tcp, int number) {
    struct pc_tcp_peer *peer = &tcp->peers[number];
    if (peer->leaving && !peer->bye && peer->taken == peer->in_all) {
        peer->bye = true;
        tcp->up->bye(tcp->owner, number);
    }
}

/* --- payloads --------------------------------------------------------------------------------- */

/* Where the next byte of the payload belongs that a lane reads; NULL: nobody wants it any more. */
static unsigned char *place(struct pc_tcp *tcp, const struct pc_tcp_lane *lane) {
    struct pc_tcp_receive *receive = pc_table_get(&tcp->receives, lane->handle);
    return receive != NULL ? receive->into + lane->offset : NULL;
}

/* Count bytes that have come to their place. */
static void count(struct pc_tcp *tcp, int number, struct pc_tcp_lane *lane, size_t nbytes) {
    struct pc_tcp_receive *receive = pc_table_get(&tcp->receives, lane->handle);
    lane->offset += nbytes;
    lane->rest -= nbytes;
    tcp->peers[number].taken += nbytes;
    tcp->moved += nbytes;
    if (receive != NULL)
        receive->filled += nbytes;
    if (receive != NULL && receive->filled >= receive->nbytes && receive->spare == NULL) {
        tcp->up->received(tcp->owner, receive->handle);
        pc_tcp_end_receive(tcp, receive);
    } else if (receive != NULL && receive->filled >= receive->nbytes && tcp->up->kept != NULL) {
        tcp->up->kept(tcp->owner, receive->handle);
    }
    say_bye(tcp, number);
}

/* --- frames ----------------------------------------------------------------------------------- */

static bool credited(struct pc_tcp *tcp, struct pc_tcp_peer *peer, bool pushed, size_t nbytes) {
    peer->held[pushed] += nbytes;
    return peer->held[pushed] <= (pushed ? tcp->limits.ahead : tcp->limits.credit);
}

static bool take_ahead(struct pc_tcp *tcp, int number, struct pc_tcp_lane *lane,
                       const struct pc_tcp_frame *frame, const unsigned char *header) {
    struct pc_tcp_peer *peer = &tcp->peers[number];
    if (frame->nbytes == 0 || !credited(tcp, peer, true, frame->nbytes))
        return false;
    struct pc_tcp_receive *receive = calloc(1, sizeof *receive);
    uint64_t handle = receive != NULL ? pc_table_add(&tcp->receives, receive) : 0;
    if (handle == 0) {
        free(receive);
        return false;
    }
    *receive = (struct pc_tcp_receive){
        .handle = handle, .peer = number, .pushed = true, .nbytes = frame->nbytes};
    lane->handle = handle;
    lane->offset = 0;
    lane->rest = frame->nbytes;
    lane->stalled = true;
    tcp->restless++;
    tcp->up->pushed(tcp->owner, number, header, frame->header, frame->nbytes, handle);
    return true;
}

static bool take_data(struct pc_tcp *tcp, int number, struct pc_tcp_lane *lane,
                      const struct pc_tcp_frame *frame) {
    struct pc_tcp_receive *receive = pc_table_get(&tcp->receives, frame->id);
    if (receive != NULL &&
        (receive->peer != number || receive->pushed || frame->value > receive->nbytes ||
         frame->nbytes > receive->nbytes - frame->value))
        return false;
    /* Without a receive, which was given up, it is read and forgotten. No number stays: a peer that
       invents one would else have chosen the offset in the receive that gets it next. */
    lane->handle = receive != NULL ? frame->id : 0;
    lane->offset = frame->value;
    lane->rest = frame->nbytes;
    bool is_empty = receive != NULL && receive->nbytes == 0;
    if (is_empty)
        count(tcp, number, lane, 0);
    return frame->nbytes > 0 || receive == NULL || is_empty;
}

static bool take_go(struct pc_tcp *tcp, int number, const struct pc_tcp_frame *frame) {
    struct pc_tcp_peer *peer = &tcp->peers[number];
    struct pc_tcp_send *send = pc_table_get(&tcp->sends, frame->id);
    if (send == NULL || send->stopped)
        return true; /* it was taken back */
    if (send->peer != number || send->pushed || send->accepted)
        return false;
    send->accepted = true;
    send->theirs = frame->value;
    pc_tcp_activate(peer, send);
    if (!peer->granted) {
        peer->granted = true;
        peer->next_granted = tcp->granted;
        tcp->granted = peer;
    }
    return true;
}

static bool take_drop(struct pc_tcp *tcp, int number, const struct pc_tcp_frame *frame) {
    struct pc_tcp_send *send = pc_table_get(&tcp->sends, frame->id);
    if (send == NULL)
        return true;
    if (send->peer != number || send->pushed)
        return false;
    pc_tcp_dropped(tcp, send);
    return true;
}

static bool take_credit(struct pc_tcp_peer *peer, const struct pc_tcp_frame *frame) {
    if (frame->id > 1 || frame->value > peer->owed[frame->id])
        return false;
    peer->owed[frame->id] -= frame->value;
    return true;
}

/* Take one frame, with its header and, of a small message, its payload. False: it makes no
   sense. */
static bool take(struct pc_tcp *tcp, int number, struct pc_tcp_lane *lane,
                 const struct pc_tcp_frame *frame, const unsigned char *header) {
    struct pc_tcp_peer *peer = &tcp->peers[number];
    bool is_first = lane == peer->lanes;
    bool has_header =
        frame->kind == PC_TCP_EAGER || frame->kind == PC_TCP_AHEAD || frame->kind == PC_TCP_READY;
    if (peer->bye || (is_first && peer->leaving) || (!is_first && frame->kind != PC_TCP_DATA) ||
        (!has_header && frame->header > 0))
        return false;
    switch (frame->kind) {
    case PC_TCP_EAGER:
        if (!credited(tcp, peer, false, frame->nbytes + tcp->limits.message_cost))
            return false;
        tcp->up->arrived(tcp->owner, number, header, frame->header, header + frame->header,
                         frame->nbytes);
        return true;
    case PC_TCP_AHEAD:
        return take_ahead(tcp, number, lane, frame, header);
    case PC_TCP_READY:
        if (frame->value > INT64_MAX)
            return false;
        tcp->up->offered(tcp->owner, number, header, frame->header, frame->value, frame->id);
        return true;
    case PC_TCP_GO:
        return take_go(tcp, number, frame);
    case PC_TCP_DATA:
        return take_data(tcp, number, lane, frame);
    case PC_TCP_DROP:
        return take_drop(tcp, number, frame);
    case PC_TCP_CANCEL:
        tcp->up->cancelled(tcp->owner, number, frame->id);
        return true;
    case PC_TCP_CREDIT:
        return take_credit(peer, frame);
    case PC_TCP_BYE:
        peer->leaving = true;
        peer->in_all = frame->value;
        say_bye(tcp, number);
        return true;
    default:
        return false;
    }
}

/* Bytes of a frame, its header, and the payload of a small message; 0: the lengths make no
   sense. */
static size_t extent(const struct pc_tcp *tcp, const struct pc_tcp_frame *frame) {
    size_t nbytes = sizeof *frame + frame->header;
    if (frame->header > PC_TCP_LONGEST_HEADER)
        return 0;
    if (frame->kind == PC_TCP_EAGER)
        return frame->nbytes <= tcp->limits.eager ? nbytes + frame->nbytes : 0;
    return nbytes;
}

/* --- reading ---------------------------------------------------------------------------------- */

/* Use what is in a lane's buffer. False: nothing more can be done now, or the link is lost. */
static bool use(struct pc_tcp *tcp, int number, int index) {
    struct pc_tcp_lane *lane = &tcp->peers[number].lanes[index];
    while (lane->fd >= 0 && !lane->stalled) {
        size_t here = lane->end - lane->start;
        if (tcp->closing) {
            lane->start = lane->end = lane->rest = 0;
            return true;
        }
        if (lane->rest > 0) {
            size_t nbytes = here < lane->rest ? here : lane->rest;
            unsigned char *to = place(tcp, lane);
            if (nbytes == 0)
                break;
            if (to != NULL)
                memcpy(to, lane->buffer + lane->start, nbytes);
            lane->start += nbytes;
            count(tcp, number, lane, nbytes);
            continue;
        }
        struct pc_tcp_frame frame;
        if (here < sizeof frame)
            break;
        memcpy(&frame, lane->buffer + lane->start, sizeof frame);
        size_t whole = extent(tcp, &frame);
        if (whole > here)
            break;
        const unsigned char *header = lane->buffer + lane->start + sizeof frame;
        lane->start += whole;
        if (whole == 0 || !take(tcp, number, lane, &frame, header)) {
            pc_tcp_lose(tcp, number, NONSENSE);
            return false;
        }
    }
    return lane->fd >= 0 && !lane->stalled;
}

void pc_tcp_read(struct pc_tcp *tcp, int number, int index) {
    struct pc_tcp_lane *lane = &tcp->peers[number].lanes[index];
    size_t budget = PC_TCP_BUDGET;
    while (use(tcp, number, index) && budget > 0) {
        if (lane->start > 0) {
            memmove(lane->buffer, lane->buffer + lane->start, lane->end - lane->start);
            lane->end -= lane->start;
            lane->start = 0;
        }
        struct iovec pieces[2];
        unsigned char *to = lane->rest > 0 ? place(tcp, lane) : NULL;
        int num_pieces = 0;
        if (to != NULL)
            pieces[num_pieces++] = (struct iovec){to, lane->rest < budget ? lane->rest : budget};
        size_t direct = to != NULL ? pieces[0].iov_len : 0;
        /* What follows a payload comes along, if all of that does. */
        if (direct == lane->rest || to == NULL)
            pieces[num_pieces++] =
                (struct iovec){lane->buffer + lane->end, tcp->buffer_nbytes - lane->end};
        ssize_t nbytes = readv(lane->fd, pieces, num_pieces);
        int error = errno;
        if (nbytes < 0 && error == EINTR)
            continue;
        if (nbytes < 0 && error == EAGAIN)
            return;
        if (nbytes <= 0) {
            char why[128] = "its link was closed";
            if (nbytes < 0 && error != ECONNRESET)
                pc_tcp_explain(error, why, sizeof why);
            pc_tcp_lane_ended(tcp, number, index, why);
            return;
        }
        size_t got = (size_t)nbytes, placed = got < direct ? got : direct;
        lane->end += got - placed;
        if (placed > 0)
            count(tcp, number, lane, placed);
        budget -= got < budget ? got : budget;
        bool drained = got < direct || (direct == 0 && lane->end < tcp->buffer_nbytes);
        if (drained) {
            use(tcp, number, index);
            return;
        }
    }
}
