/* The link over sockets. See link_tcp.h. */
#include "link_tcp.h"
#include "engine.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* --- messages and sends, and the rings in which they stand ------------------------------------ */

enum what { IN, OUT, BYE, LOST };
enum kind { SMALL, PUSHED, OFFERED };

/* A send that is under way, the owner of its memory for tcp. */
struct out {
    struct pc_link_tcp_event event; /* the first member */
    struct pc_link_tcp_event all;
    struct pc_send *send;
    uint64_t id;
};

/* A message of a peer. It stands in the queue once, for all that is to be told of it. */
struct in {
    struct pc_link_tcp_event event; /* the first member */
    struct pc_link_tcp_event all;
    struct pc_chained by_id;
    enum kind kind;
    int peer;
    uint64_t id, handle;
    size_t nbytes, header_nbytes;
    struct pc_message *message;
    bool is_reporting, accepted;
    bool here;      /* pushed, in spare memory: to be kept */
    bool done;      /* accepted, and all there */
    bool cancelled; /* by its sender */
    bool *gone;     /* to be set when this is freed */
    unsigned char bytes[]; /* the header, and the payload of a small one */
};

static void append(struct pc_link_tcp_event *ring, struct pc_link_tcp_event *event) {
    event->prev = ring->prev;
    event->next = ring;
    ring->prev->next = event;
    ring->prev = event;
}

static void unlink_event(struct pc_link_tcp_event *event) {
    if (event->next == NULL)
        return;
    event->prev->next = event->next;
    event->next->prev = event->prev;
    event->prev = event->next = NULL;
}

static void free_in(struct pc_link_tcp *self, struct in *in) {
    unlink_event(&in->event);
    unlink_event(&in->all);
    if (in->by_id.at != NULL)
        pc_chains_remove(&self->by_id, &in->by_id);
    if (in->gone != NULL)
        *in->gone = true;
    free(in);
}

static void free_out(struct out *out) {
    unlink_event(&out->event);
    unlink_event(&out->all);
    free(out);
}

/* --- what the engine asks for ----------------------------------------------------------------- */

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
        if (in->peer != peer || (in->is_reporting && in->kind == SMALL))
            continue;
        if (in->is_reporting && in->here) { /* tcp keeps it, too */
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

static const struct pc_link_ops link_tcp_ops = {tcp_send,    tcp_stop,    tcp_take_back, tcp_accept,
                                       tcp_release, tcp_give_up, tcp_redirect,  tcp_forget};

/* --- what is told to the engine, later -------------------------------------------------------- */

static void clear(struct pc_link_tcp_event *ring) { ring->prev = ring->next = ring; }

/* Have it told after tcp has come back. */
static void queue(struct pc_link_tcp *self, struct pc_link_tcp_event *event) {
    self->tcp.has_unhandled = true;
    if (event->next != NULL)
        return;
#ifdef PC_DRIVE_CHECKED
    if (self->events.next == &self->events)
        self->queued_ns = pc_now_ns();
#endif
    append(&self->events, event);
    if (!self->progressing && self->posted != NULL)
        self->posted(self->owner);
}

/* --- what tcp tells --------------------------------------------------------------------------- */

/* A message comes. NULL: there is no memory, and its sender is lost. */
static struct in *add_in(struct pc_link_tcp *self, int peer, enum kind kind, const void *header,
                         size_t header_nbytes, const void *payload, size_t payload_nbytes) {
    struct in *in = malloc(sizeof *in + header_nbytes + payload_nbytes);
    if (in == NULL) {
        pc_tcp_lose(&self->tcp, peer, "there is no memory for what it sends");
        return NULL;
    }
    *in = (struct in){
        .event = {.what = IN}, .kind = kind, .peer = peer, .header_nbytes = header_nbytes};
    if (header_nbytes > 0)
        memcpy(in->bytes, header, header_nbytes);
    if (payload_nbytes > 0)
        memcpy(in->bytes + header_nbytes, payload, payload_nbytes);
    self->peers[peer].begun = true;
    append(&self->all_in, &in->all);
    queue(self, &in->event);
    return in;
}

static void arrived(void *owner, int peer, const void *header, size_t header_nbytes,
                    const void *payload, size_t nbytes) {
    struct in *in = add_in(owner, peer, SMALL, header, header_nbytes, payload, nbytes);
    if (in != NULL)
        in->nbytes = nbytes;
}

static void offered(void *owner, int peer, const void *header, size_t header_nbytes,
                    uint64_t nbytes, uint64_t id) {
    struct pc_link_tcp *self = owner;
    struct in *in = add_in(self, peer, OFFERED, header, header_nbytes, NULL, 0);
    if (in == NULL)
        return;
    in->nbytes = (size_t)nbytes;
    in->id = id;
    pc_chains_add(&self->by_id, &in->by_id, pc_hash(id, (uint64_t)peer));
}

static void pushed(void *owner, int peer, const void *header, size_t header_nbytes, size_t nbytes,
                   uint64_t handle) {
    struct pc_link_tcp *self = owner;
    struct in *in = add_in(self, peer, PUSHED, header, header_nbytes, NULL, 0);
    struct pc_tcp_receive *receive = pc_table_get(&self->tcp.receives, handle);
    if (in == NULL)
        return;
    in->nbytes = nbytes;
    in->handle = handle;
    receive->owner = in;
}

static void sent(void *owner, uint64_t id, void *memory) {
    struct out *out = memory;
    (void)id;
    queue(owner, &out->event);
}

static struct in *in_of_handle(struct pc_link_tcp *self, uint64_t handle) {
    struct pc_tcp_receive *receive = pc_table_get(&self->tcp.receives, handle);
    return receive->owner; /* NULL: there was no memory for it */
}

static void received(void *owner, uint64_t handle) {
    struct in *in = in_of_handle(owner, handle);
    if (in == NULL)
        return;
    in->done = true;
    queue(owner, &in->event);
}

static void kept(void *owner, uint64_t handle) {
    struct in *in = in_of_handle(owner, handle);
    if (in == NULL)
        return;
    in->here = true;
    queue(owner, &in->event);
}

static void cancelled(void *owner, int peer, uint64_t id) {
    struct pc_link_tcp *self = owner;
    uint64_t hash = pc_hash(id, (uint64_t)peer);
    for (struct pc_chained *each = pc_chains_first(&self->by_id, hash); each != NULL;
         each = each->next) {
        struct in *in = PC_CHAINED_IN(each, struct in, by_id);
        if (in->id != id || in->peer != peer || in->done)
            continue;
        in->cancelled = true;
        queue(self, &in->event);
        return;
    }
}

static void bye(void *owner, int peer) {
    struct pc_link_tcp *self = owner;
    queue(self, &self->peers[peer].bye.event);
}

static void lost(void *owner, int peer, const char *why) {
    struct pc_link_tcp *self = owner;
    snprintf(self->peers[peer].why, sizeof self->peers[peer].why, "%s", why);
    queue(self, &self->peers[peer].lost.event);
}

static void watched(void *owner) {
    struct pc_link_tcp *self = owner;
    self->is_watched = self->tcp.has_unhandled = true;
}

/* What owns memory is freed when it was told. */
static void release_memory(void *owner, void *memory) { (void)owner, (void)memory; }

static const struct pc_tcp_up up = {arrived, offered, pushed,  sent,           received, cancelled,
                                    bye,     lost,    watched, release_memory, kept};

/* --- telling ---------------------------------------------------------------------------------- */

/* A message that the engine does not know. False: there is no room for it now. */
static bool tell_new(struct pc_link_tcp *self, struct in *in) {
    struct pc_tcp_receive *receive =
        in->here ? pc_table_get(&self->tcp.receives, in->handle) : NULL;
    struct pc_incoming incoming = {.peer = in->peer,
                                   .header = in->bytes,
                                   .header_nbytes = in->header_nbytes,
                                   .where = in->kind == OFFERED ? PC_WAITING : PC_COMING,
                                   .nbytes = in->nbytes,
                                   .token = {(uint64_t)(uintptr_t)in}};
    if (in->kind == SMALL || in->here) {
        incoming.where = PC_KEPT;
        incoming.payload = in->here ? receive->spare : in->bytes + in->header_nbytes;
    }
    int peer = in->peer;
    bool gone = false;
    in->gone = &gone;
    in->is_reporting = true;
    int error = pc_arrived(self->link.engine, &self->link, &incoming, &in->message);
    if (!gone)
        in->gone = NULL;
    if (!gone && (error == -ENOMEM || error == -ENOBUFS)) {
        in->is_reporting = false;
        return false;
    }
    if (!gone && error != 0) {
        if (in->kind == PUSHED)
            pc_tcp_give_up(&self->tcp, in->handle);
        free_in(self, in);
    }
    if (error == -EPROTO)
        pc_tcp_lose(&self->tcp, peer, "it sent what makes no sense");
    return true;
}

static bool tell_in(struct pc_link_tcp *self, struct in *in) {
    struct pc_engine *engine = self->link.engine;
    if (!in->is_reporting && !in->cancelled)
        return tell_new(self, in);
    struct pc_message *message = in->message;
    if (in->here && !in->accepted) {
        struct pc_tcp_receive *receive = pc_table_get(&self->tcp.receives, in->handle);
        pc_kept(engine, message, receive->spare);
        return true;
    }
    bool was_reporting = in->is_reporting, done = in->done;
    if (in->accepted && !done)
        pc_tcp_give_up(&self->tcp, in->handle);
    free_in(self, in);
    if (was_reporting && done)
        pc_received(engine, message);
    else if (was_reporting)
        pc_withdrawn(engine, message);
    return true;
}

/* The peer of which an event tells what must come after its messages; -1: none. */
static int peer_of(const struct pc_link_tcp_event *event) {
    if (event->what == IN)
        return ((const struct in *)event)->is_reporting ? -1 : ((const struct in *)event)->peer;
    if (event->what == OUT)
        return -1;
    return ((const struct pc_link_tcp_peer_event *)event)->peer;
}

static bool tell(struct pc_link_tcp *self, struct pc_link_tcp_event *event, int peer) {
    struct pc_engine *engine = self->link.engine;
    if (event->what == IN)
        return tell_in(self, (struct in *)event);
    if (event->what == OUT) {
        struct pc_send *send = ((struct out *)event)->send;
        free_out((struct out *)event);
        pc_sent(engine, send);
    } else if (event->what == BYE && engine->finished != NULL) {
        engine->finished(engine, peer);
    } else if (event->what == LOST && engine->lost != NULL) {
        engine->lost(engine, peer, self->peers[peer].why);
    }
    return true;
}

/* Tell all that has happened, but what waits for room, and what comes after that of the same
   peer. */
static bool tell_all(struct pc_link_tcp *self) {
    struct pc_link_tcp_event later, *event;
    bool worked = false;
    clear(&later);
    while ((event = self->events.next) != &self->events) {
        int peer = peer_of(event);
        unlink_event(event);
        if (peer >= 0 && self->peers[peer].blocked) {
            append(&later, event);
        } else if (tell(self, event, peer)) {
            worked = true;
        } else {
            self->peers[peer].blocked = true;
            append(&later, event);
        }
    }
    for (int peer = 0; later.next != &later && peer < self->tcp.size; peer++)
        self->peers[peer].blocked = false;
    while ((event = later.next) != &later) {
        unlink_event(event);
        append(&self->events, event);
    }
    return worked;
}

/* --- the drive -------------------------------------------------------------------------------- */

static struct pc_link_tcp *of_source(struct pc_source *source) {
    return PC_CHAINED_IN(source, struct pc_link_tcp, source);
}

static bool source_progress(struct pc_source *source) {
    struct pc_link_tcp *self = of_source(source);
    if (self->progressing)
        return false;
    self->progressing = true;
    self->tcp.has_unhandled = self->events.next != &self->events;
    bool worked = self->tcp.epoll >= 0 && pc_tcp_progress(&self->tcp);
    if (self->is_watched) {
        self->is_watched = false;
        self->watched(self->owner);
    }
    worked = tell_all(self) || worked;
    if (self->tcp.granted != NULL) {
        pc_tcp_write_granted(&self->tcp);
        tell_all(self);
        worked = true;
    }
    self->progressing = false;
    return worked;
}

static bool source_sleep(struct pc_source *source) {
    struct pc_link_tcp *self = of_source(source);
    return self->events.next == &self->events && pc_tcp_idle(&self->tcp);
}

static void source_awake(struct pc_source *source) { (void)source; }

#ifdef PC_DRIVE_CHECKED
static uint64_t source_ready_ns(struct pc_source *source) {
    struct pc_link_tcp *self = of_source(source);
    return self->events.next == &self->events ? 0 : self->queued_ns;
}
#endif

static const struct pc_source_ops source_ops = {
    .progress = source_progress,
    .sleep = source_sleep,
    .awake = source_awake,
#ifdef PC_DRIVE_CHECKED
    .ready_ns = source_ready_ns,
#endif
};

int pc_link_tcp_open(struct pc_link_tcp *self, struct pc_engine *engine) {
    self->link = (struct pc_link){&link_tcp_ops, engine};
    self->peers = calloc((size_t)self->tcp.size, sizeof *self->peers);
    if (self->peers == NULL)
        return -ENOMEM;
    for (int peer = 0; peer < self->tcp.size; peer++) {
        self->peers[peer].bye = (struct pc_link_tcp_peer_event){{.what = BYE}, peer};
        self->peers[peer].lost = (struct pc_link_tcp_peer_event){{.what = LOST}, peer};
    }
    clear(&self->events);
    clear(&self->all_in);
    clear(&self->all_out);
    self->tcp.up = &up;
    self->tcp.owner = self;
    int error = pc_tcp_open(&self->tcp);
    self->source = (struct pc_source){&source_ops, self->tcp.epoll, false};
    return -error;
}

void pc_link_tcp_free(struct pc_link_tcp *self) {
    pc_tcp_free(&self->tcp);
    while (self->all_in.next != &self->all_in)
        free_in(self, PC_CHAINED_IN(self->all_in.next, struct in, all));
    while (self->all_out.next != &self->all_out)
        free_out(PC_CHAINED_IN(self->all_out.next, struct out, all));
    pc_chains_free(&self->by_id);
    free(self->peers);
}
