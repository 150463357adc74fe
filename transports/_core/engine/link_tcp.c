/* The link over sockets. See link_tcp.h. */
#include "link_tcp_message.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

static void clear(struct pc_link_tcp_event *ring) { ring->prev = ring->next = ring; }

/* Have it told after tcp has come back. */
static void queue(struct pc_link_tcp *self, struct pc_link_tcp_event *event) {
    self->tcp.told = true;
    if (event->next != NULL)
        return;
#ifdef PC_DRIVE_CHECKED
    if (self->events.next == &self->events)
        self->queued_ns = pc_drive_now_ns();
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
    self->is_watched = self->tcp.told = true;
}

/* What owns memory is freed when it was told, and the lock stays held. */
static void release_memory(void *owner, void *memory) { (void)owner, (void)memory; }
static void keep_lock(void *owner) { (void)owner; }

static const struct pc_tcp_up up = {arrived,   offered,   pushed, sent,    received,
                                    cancelled, bye,       lost,   watched, release_memory,
                                    keep_lock, keep_lock, kept};

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
    in->told = true;
    int error = pc_arrived(self->link.engine, &self->link, &incoming, &in->message);
    if (!gone)
        in->gone = NULL;
    if (!gone && (error == -ENOMEM || error == -ENOBUFS)) {
        in->told = false;
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
    if (!in->told && !in->cancelled)
        return tell_new(self, in);
    struct pc_message *message = in->message;
    if (in->here && !in->accepted) {
        struct pc_tcp_receive *receive = pc_table_get(&self->tcp.receives, in->handle);
        pc_kept(engine, message, receive->spare);
        return true;
    }
    bool was_told = in->told, done = in->done;
    if (in->accepted && !done)
        pc_tcp_give_up(&self->tcp, in->handle);
    free_in(self, in);
    if (was_told && done)
        pc_received(engine, message);
    else if (was_told)
        pc_withdrawn(engine, message);
    return true;
}

/* The peer of which an event tells what must come after its messages; -1: none. */
static int peer_of(const struct pc_link_tcp_event *event) {
    if (event->what == IN)
        return ((const struct in *)event)->told ? -1 : ((const struct in *)event)->peer;
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
    self->tcp.told = self->events.next != &self->events;
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
    self->link = (struct pc_link){&pc_link_tcp_ops, engine};
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
