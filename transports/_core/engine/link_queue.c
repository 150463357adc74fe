/* The link by a queue. See link_queue.h. */
#include "link_queue.h"

#include "engine.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* A send that is under way, or a message that the engine knows. */
struct pc_link_entry {
    struct pc_chained by_id;
    uint64_t id;
    struct pc_link_entry *next, **at; /* in the queue; `at` is NULL: it does not stand there */
    bool is_send;
    bool is_taken;     /* of a send: the owner has it; of a message: he has accepted it */
    bool is_over;      /* given up, taken back, released: the order is the last one */
    bool is_committed; /* of a send */
    bool is_stopped;   /* of a send that was not taken out yet: it will not be */
    bool is_arriving;  /* `pc_arrived` has not returned yet */
    bool is_unsettled; /* it is counted so */
    bool is_here;      /* of a message: the owner keeps its payload */
    int peer;
    struct pc_link_entry *next_of_all, **at_of_all;
    size_t nbytes;
    /* Of a message. */
    struct pc_message *message;
    unsigned char *where, *into; /* where the owner writes, and where he shall */
    struct pc_keeper keeper;     /* of `into` */
    /* `where` is in this memory, which is freed when he does not any more */
    void *spare;
    /* Of a send. */
    struct pc_send *send;
    enum pc_way way;
    struct iovec *parts;
    size_t num_parts;
    size_t header_nbytes;
    unsigned char header[];
};

static struct pc_link_queue *of(struct pc_link *link) { return (struct pc_link_queue *)link; }

static struct pc_link_entry *entry_of(const uint64_t token[]) {
    return (struct pc_link_entry *)(uintptr_t)token[0];
}

static struct pc_link_entry *find(const struct pc_link_queue *self, uint64_t id) {
    uint64_t hash = pc_hash(id, 0);
    struct pc_chained *chained = pc_chains_first(&self->by_id, hash);
    while (chained != NULL && chained->hash != hash) /* the hash of a number is no other number's */
        chained = chained->next;
    return chained != NULL ? PC_CHAINED_IN(chained, struct pc_link_entry, by_id) : NULL;
}

static struct pc_link_entry *new_entry(struct pc_link_queue *self, bool is_send,
                                       size_t header_nbytes) {
    struct pc_link_entry *entry = calloc(1, sizeof *entry + header_nbytes);
    if (entry == NULL)
        return NULL;
    entry->is_send = is_send;
    entry->header_nbytes = header_nbytes;
    entry->id = ++self->next_id;
    pc_chains_add(&self->by_id, &entry->by_id, pc_hash(entry->id, 0));
    entry->next_of_all = self->all;
    entry->at_of_all = &self->all;
    if (entry->next_of_all != NULL)
        entry->next_of_all->at_of_all = &entry->next_of_all;
    self->all = entry;
    return entry;
}

static void set_unsettled(struct pc_link_queue *self, struct pc_link_entry *entry, bool unsettled) {
    if (entry->is_unsettled == unsettled)
        return;
    entry->is_unsettled = unsettled;
    if (unsettled) {
        self->num_unsettled++;
        self->link.engine->num_unsettled++;
    } else {
        self->num_unsettled--;
        pc_engine_settled(self->link.engine);
    }
}

static void unqueue(struct pc_link_queue *self, struct pc_link_entry *entry) {
    if (entry->at == NULL)
        return;
    *entry->at = entry->next;
    if (entry->next != NULL)
        entry->next->at = entry->at;
    else
        self->last = entry->at;
    entry->at = NULL;
}

static void enqueue(struct pc_link_queue *self, struct pc_link_entry *entry) {
    self->num_posted++;
    if (entry->at == NULL) {
        entry->next = NULL;
        entry->at = self->last;
        *self->last = entry;
        self->last = &entry->next;
    }
    self->posted(self->owner);
}

static void free_entry(struct pc_link_queue *self, struct pc_link_entry *entry) {
    unqueue(self, entry);
    set_unsettled(self, entry, false);
    pc_chains_remove(&self->by_id, &entry->by_id);
    *entry->at_of_all = entry->next_of_all;
    if (entry->next_of_all != NULL)
        entry->next_of_all->at_of_all = entry->at_of_all;
    free(entry->spare);
    free(entry->parts);
    free(entry);
}

/* Nothing more is to be told of it; the owner hears that, if he has heard of it. */
static void end(struct pc_link_queue *self, struct pc_link_entry *entry, bool uses_memory) {
    entry->is_over = true;
    entry->message = NULL;
    entry->send = NULL;
    set_unsettled(self, entry, uses_memory);
    enqueue(self, entry);
}

/* --- what the engine asks for ----------------------------------------------------------------- */

static int queue_send(struct pc_link *link, struct pc_send *send, const void *header,
                      size_t header_nbytes, enum pc_way way) {
    struct pc_link_queue *self = of(link);
    struct pc_link_entry *entry = new_entry(self, true, header_nbytes);
    if (entry == NULL)
        return -ENOMEM;
    entry->parts = malloc((send->num_parts + 1) * sizeof *entry->parts);
    if (entry->parts == NULL) {
        free_entry(self, entry);
        return -ENOMEM;
    }
    for (size_t part = 0; part < send->num_parts; part++)
        if (send->parts[part].iov_len > 0)
            entry->parts[entry->num_parts++] = send->parts[part];
    memcpy(entry->header, header, header_nbytes);
    entry->send = send;
    entry->peer = send->peer;
    entry->nbytes = send->nbytes;
    entry->way = way;
    send->token[0] = (uint64_t)(uintptr_t)entry;
    enqueue(self, entry);
    return PC_UNDER_WAY;
}

static bool queue_stop(struct pc_link *link, struct pc_send *send) {
    struct pc_link_entry *entry = entry_of(send->token);
    if (entry->is_taken)
        return !entry->is_committed;
    entry->is_stopped = true;
    unqueue(of(link), entry);
    return true;
}

static void queue_take_back(struct pc_link *link, struct pc_send *send) {
    struct pc_link_queue *self = of(link);
    struct pc_link_entry *entry = entry_of(send->token);
    if (entry->is_taken)
        end(self, entry, true);
    else
        free_entry(self, entry);
}

static int queue_accept(struct pc_link *link, struct pc_message *message, void *into) {
    struct pc_link_entry *entry = entry_of(message->token);
    entry->message = message;
    entry->into = into;
    entry->keeper = message->keeper;
    enqueue(of(link), entry);
    return PC_UNDER_WAY;
}

static void queue_release(struct pc_link *link, struct pc_message *message) {
    struct pc_link_entry *entry = entry_of(message->token);
    if (entry->is_arriving)
        entry->is_over = true;
    else
        end(of(link), entry, false);
}

/* The owner may be writing to memory of the message's own: it is freed when he does not any
   more. */
static void take_spare(struct pc_link_entry *entry, struct pc_message *message) {
    if (!entry->is_taken || entry->spare != NULL || message->spare == NULL ||
        entry->where != message->spare)
        return;
    entry->spare = message->spare;
    message->spare = NULL;
}

static void queue_give_up(struct pc_link *link, struct pc_message *message) {
    struct pc_link_entry *entry = entry_of(message->token);
    take_spare(entry, message);
    end(of(link), entry, entry->is_taken);
}

static bool queue_redirect(struct pc_link *link, struct pc_message *message, void *into) {
    struct pc_link_entry *entry = entry_of(message->token);
    if (into != message->spare)
        take_spare(entry, message);
    entry->into = into;
    entry->keeper = message->keeper;
    if (!entry->is_taken)
        return true; /* that it is to be accepted stands in the queue */
    set_unsettled(of(link), entry, true);
    enqueue(of(link), entry);
    return true;
}

static void queue_forget(struct pc_link *link, int peer) {
    struct pc_link_queue *self = of(link);
    for (struct pc_link_entry *entry = self->all, *next; entry != NULL; entry = next) {
        next = entry->next_of_all;
        if (entry->peer == peer && !entry->is_over && !entry->is_here && !entry->is_arriving)
            free_entry(self, entry);
    }
}

static const struct pc_link_ops ops = {queue_send,    queue_stop,    queue_take_back, queue_accept,
                                       queue_release, queue_give_up, queue_redirect,  queue_forget};

/* --- what the owner does ---------------------------------------------------------------------- */

static void done(struct pc_link_queue *self) {
    free(self->spare);
    self->spare = NULL;
    if (self->is_doing)
        pc_engine_settled(self->link.engine);
    self->is_doing = false;
}

/* Hand a send over. False: there is no memory now. */
static bool hand_over(struct pc_link_entry *entry, struct pc_order *order) {
    order->header = malloc(entry->header_nbytes + 1);
    if (order->header == NULL)
        return false;
    memcpy(order->header, entry->header, entry->header_nbytes);
    order->header_nbytes = entry->header_nbytes;
    order->parts = entry->parts;
    order->num_parts = entry->num_parts;
    order->peer = entry->peer;
    order->way = entry->way;
    order->keeper = entry->send->keeper;
    entry->parts = NULL;
    return true;
}

bool pc_link_take(struct pc_link_queue *self, struct pc_order *order) {
    struct pc_link_entry *entry = self->first;
    done(self);
    if (entry == NULL)
        return false;
    *order = (struct pc_order){
        .id = entry->id, .into = entry->into, .nbytes = entry->nbytes, .keeper = entry->keeper};
    if (entry->is_over)
        order->kind = entry->is_send    ? PC_ORDER_TAKE_BACK
                      : entry->is_taken ? PC_ORDER_GIVE_UP
                                        : PC_ORDER_RELEASE;
    else if (entry->is_send)
        order->kind = PC_ORDER_SEND;
    else
        order->kind = entry->is_taken ? PC_ORDER_REDIRECT : PC_ORDER_ACCEPT;
    if (order->kind == PC_ORDER_SEND && !hand_over(entry, order))
        return false;
    unqueue(self, entry);
    entry->is_taken = true;
    entry->where = entry->into;
    self->spare = entry->spare;
    entry->spare = NULL;
    self->is_doing = entry->is_unsettled;
    if (self->is_doing) /* it counts until it is done */
        self->link.engine->num_unsettled++;
    set_unsettled(self, entry, false);
    if (entry->is_over)
        free_entry(self, entry);
    return true;
}

int pc_link_arrived(struct pc_link_queue *self, struct pc_incoming *incoming, uint64_t *id) {
    struct pc_link_entry *entry = new_entry(self, false, 0);
    *id = 0;
    if (entry == NULL)
        return -ENOMEM;
    entry->is_arriving = true;
    entry->is_here = incoming->where == PC_KEPT;
    entry->peer = incoming->peer;
    entry->nbytes = incoming->nbytes;
    incoming->token[0] = (uint64_t)(uintptr_t)entry;
    int error = pc_arrived(self->link.engine, &self->link, incoming, &entry->message);
    entry->is_arriving = false;
    if (error == 0 && (entry->message != NULL || entry->at != NULL) &&
        (!entry->is_over || entry->at != NULL))
        *id = entry->id;
    else
        free_entry(self, entry);
    return error;
}

void pc_link_received(struct pc_link_queue *self, uint64_t id) {
    struct pc_link_entry *entry = find(self, id);
    if (entry == NULL || entry->is_over)
        return;
    struct pc_message *message = entry->message;
    if (entry->into != entry->where && entry->nbytes > 0) /* that it goes on elsewhere was not heard
                                                             of */
        memcpy(entry->into, entry->where, entry->nbytes);
    free_entry(self, entry);
    pc_received(self->link.engine, message);
}

void pc_link_withdrawn(struct pc_link_queue *self, uint64_t id) {
    struct pc_link_entry *entry = find(self, id);
    if (entry == NULL || entry->is_over)
        return;
    struct pc_message *message = entry->message;
    free_entry(self, entry);
    pc_withdrawn(self->link.engine, message);
}

void pc_link_sent(struct pc_link_queue *self, uint64_t id, int status) {
    struct pc_link_entry *entry = find(self, id);
    if (entry == NULL || entry->is_over)
        return;
    struct pc_send *send = entry->send;
    free_entry(self, entry);
    if (status == 0)
        pc_sent(self->link.engine, send);
    else
        pc_send_failed(self->link.engine, send, status);
}

void pc_link_committed(struct pc_link_queue *self, uint64_t id) {
    struct pc_link_entry *entry = find(self, id);
    if (entry != NULL)
        entry->is_committed = true;
}

uint64_t pc_link_id_of_send(const struct pc_link_queue *self, const struct pc_send *send) {
    if (send->context == NULL || self->link.engine->links[send->peer] != &self->link)
        return 0;
    const struct pc_link_entry *entry = entry_of(send->token);
    return entry->is_taken ? entry->id : 0;
}

uint64_t pc_link_id_of_message(const struct pc_link_queue *self, const struct pc_message *message) {
    return message->link == &self->link && message->spare == NULL ? entry_of(message->token)->id
                                                                  : 0;
}

void pc_link_queue(struct pc_link_queue *self, struct pc_engine *engine) {
    self->link = (struct pc_link){&ops, engine};
    self->last = &self->first;
}

void pc_link_queue_free(struct pc_link_queue *self) {
    while (self->all != NULL)
        free_entry(self, self->all);
    done(self);
    pc_chains_free(&self->by_id);
}
