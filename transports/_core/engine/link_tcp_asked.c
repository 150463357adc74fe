/* What the engine asks the link over sockets for. See link_tcp.h. */
#include "link_tcp_message.h"

#include <errno.h>

static struct pc_link_tcp *of(struct pc_link *link) { return (struct pc_link_tcp *)link; }

static struct in *in_of(const struct pc_message *message) {
    return (struct in *)(uintptr_t)message->token[0];
}

static int tcp_send(struct pc_link *link, struct pc_send *send, const void *header,
                    size_t header_nbytes, enum pc_way way) {
    struct pc_link_tcp *self = of(link);
    if (header_nbytes > PC_TCP_LONGEST_HEADER)
        return -EMSGSIZE;
    struct out *out = calloc(1, sizeof *out);
    struct pc_tcp_send *inner = calloc(1, sizeof *inner);
    struct iovec *parts = malloc((send->num_parts + 1) * sizeof *parts);
    if (out == NULL || inner == NULL || parts == NULL) {
        free(out);
        free(inner);
        free(parts);
        return -ENOMEM;
    }
    *inner = (struct pc_tcp_send){
        .peer = send->peer, .nbytes = send->nbytes, .parts = parts, .owner = out};
    for (size_t part = 0; part < send->num_parts; part++)
        if (send->parts[part].iov_len > 0)
            parts[inner->num_parts++] = send->parts[part];
    int64_t id = way == PC_OFFER
                     ? pc_tcp_offer(&self->tcp, inner, header, header_nbytes)
                     : pc_tcp_send(&self->tcp, inner, header, header_nbytes, way == PC_MAY_PUSH);
    if (id <= 0) {
        if (id < 0)
            pc_tcp_free_send(&self->tcp, inner);
        free(out);
    } else {
        out->event.what = OUT;
        out->send = send;
        out->id = (uint64_t)id;
        send->token[0] = (uint64_t)(uintptr_t)out;
        append(&self->all_out, &out->all);
    }
    if (id >= 0 && !self->peers[send->peer].begun) {
        bool is_linked = self->tcp.peers[send->peer].lanes != NULL;
        self->peers[send->peer].begun = true;
        if (!is_linked && self->wanted != NULL)
            self->wanted(self->owner, send->peer);
    }
    return id < 0 ? -ENOMEM : id == 0 ? PC_SENT : PC_UNDER_WAY;
}

static struct out *out_of(const struct pc_send *send) {
    return (struct out *)(uintptr_t)send->token[0];
}

static bool tcp_stop(struct pc_link *link, struct pc_send *send) {
    return pc_tcp_stop(&of(link)->tcp, out_of(send)->id);
}

static void tcp_take_back(struct pc_link *link, struct pc_send *send) {
    struct out *out = out_of(send);
    pc_tcp_take_back(&of(link)->tcp, out->id);
    free_out(out);
}

static int tcp_accept(struct pc_link *link, struct pc_message *message, void *into) {
    struct pc_link_tcp *self = of(link);
    struct in *in = in_of(message);
    if (in->cancelled) {
        free_in(self, in);
        return PC_WITHDRAWN;
    }
    if (in->kind == PUSHED && pc_tcp_place(&self->tcp, in->handle, into, in)) {
        free_in(self, in);
        return PC_RECEIVED;
    }
    if (in->kind == OFFERED) {
        int64_t handle = pc_tcp_accept(&self->tcp, in->peer, in->id, into, in->nbytes, in);
        if (handle < 0)
            return -ENOMEM;
        in->handle = (uint64_t)handle;
    }
    in->message = message;
    in->accepted = true;
    return PC_UNDER_WAY;
}

static void tcp_release(struct pc_link *link, struct pc_message *message) {
    struct pc_link_tcp *self = of(link);
    struct in *in = in_of(message);
    if (in->kind == SMALL)
        pc_tcp_consumed(&self->tcp, in->peer, in->nbytes);
    else if (in->kind == PUSHED)
        pc_tcp_give_up(&self->tcp, in->handle);
    else if (!in->cancelled)
        pc_tcp_drop(&self->tcp, in->peer, in->id);
    free_in(self, in);
}

static void tcp_give_up(struct pc_link *link, struct pc_message *message) {
    struct pc_link_tcp *self = of(link);
    struct in *in = in_of(message);
    pc_tcp_give_up(&self->tcp, in->handle);
    free_in(self, in);
}

static bool tcp_redirect(struct pc_link *link, struct pc_message *message, void *into) {
    struct pc_link_tcp *self = of(link);
    struct in *in = in_of(message);
    if (!in->done)
        return pc_tcp_redirect(&self->tcp, in->handle, into, in);
    free_in(self, in); /* it was not told yet */
    return false;
}

static void tcp_forget(struct pc_link *link, int peer) {
    struct pc_link_tcp *self = of(link);
    pc_tcp_forget(&self->tcp, peer);
    unlink_event(&self->peers[peer].bye.event);
    unlink_event(&self->peers[peer].lost.event);
    self->peers[peer].blocked = false;
    for (struct pc_link_tcp_event *each = self->all_out.next, *next; each != &self->all_out;
         each = next) {
        struct out *out = PC_CHAINED_IN(each, struct out, all);
        next = each->next;
        if (out->send->peer == peer)
            free_out(out);
    }
    for (struct pc_link_tcp_event *each = self->all_in.next, *next; each != &self->all_in;
         each = next) {
        struct in *in = PC_CHAINED_IN(each, struct in, all);
        next = each->next;
        if (in->peer != peer || (in->told && in->kind == SMALL))
            continue;
        if (in->told && in->here) { /* tcp keeps it, too */
            struct pc_tcp_receive *receive = pc_table_get(&self->tcp.receives, in->handle);
            unlink_event(&in->event);
            pc_kept(self->link.engine, in->message, receive->spare);
            continue;
        }
        if (in->kind == PUSHED)
            pc_tcp_give_up(&self->tcp, in->handle);
        free_in(self, in);
    }
}

const struct pc_link_ops pc_link_tcp_ops = {tcp_send,    tcp_stop,    tcp_take_back, tcp_accept,
                                       tcp_release, tcp_give_up, tcp_redirect,  tcp_forget};
