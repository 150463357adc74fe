/* Arrays and short objects between ranks of one host, sent and received without a request: what a
   blocking call does first. If it cannot, nothing has happened, and the call goes its usual way.
   With the interpreter's lock. */
#include "messages.h"
#include "base/copy.h"
#include "python/arguments/pickles.h"

/* Waits for the next message look so often before the interpreter's lock is given up. */
#define MOST_LOOKS 1000

/* Take the engine's lock, unless somebody else has it; false: or the context cannot be used. */
static bool enter(const pc_messages *self, const struct pc_context **context) {
    pc_engine_object *engine = self->engine;
    if (engine->host == NULL || !pc_lock_try(&engine->drive.lock))
        return false;
    *context = self->context->context;
    if (PC_LIKELY(atomic_load_explicit(&engine->drive.closed, memory_order_relaxed) ==
                      PC_DRIVE_OPEN &&
                  *context != NULL && (*context)->broken == 0))
        return true;
    pc_lock_give(&engine->drive.lock);
    return false;
}

bool pc_messages_post(pc_messages *self, const struct pc_outgoing *outgoing) {
    pc_engine_object *engine = self->engine;
    const struct pc_array *array = &outgoing->array;
    const struct pc_views *views = outgoing->views;
    const struct pc_context *context;
    unsigned char header[LONGEST_HEADER_NBYTES];
    int rank = self->members[outgoing->dest];
    bool is_object = views != NULL;
    struct iovec part = is_object
                            ? (struct iovec){views->views[0].buf, (size_t)views->views[0].len}
                            : (struct iovec){array->data, array->nbytes};
    if (part.iov_len > (is_object ? PC_DIRECT_OBJECT_NBYTES : PC_DIRECT_NBYTES) ||
        (is_object && views->count != 1) || !enter(self, &context))
        return false;
    bool posted = false;
    if (engine->engine.gone[rank] == 0 && engine->links[rank] == &engine->shm.link) {
        size_t header_nbytes = PC_P2P_NBYTES;
        if (is_object)
            pc_p2p_header(header, self->ident, outgoing->tag, PC_FORM_OBJECT);
        else
            header_nbytes = write_header(self->ident, array, outgoing->tag, header);
        posted = pc_link_shm_post(&engine->shm, rank, header, header_nbytes, &part);
    }
    if (posted) {
        pc_count_sent(context, rank, part.iov_len);
        pc_note_message(engine->engine.notes, self->ident, rank, outgoing->tag, part.iov_len,
                        PC_NOTED_SEND | PC_NOTED_DONE);
    }
    pc_lock_give(&engine->drive.lock);
    return posted;
}

static int64_t tag_of(const unsigned char *header) {
    int64_t tag;
    memcpy(&tag, header + 9, sizeof tag);
    return tag;
}

/* Whether a header is that of a message that a receive may take. */
static bool is_for(const pc_messages *self, const struct pc_shm_next *next,
                   const struct pc_incoming_call *incoming) {
    uint64_t ident;
    if (next->header_nbytes < HEADER_NBYTES || next->header[0] != KIND_P2P)
        return false;
    memcpy(&ident, next->header + 1, 8);
    return ident == self->ident &&
           (incoming->tag == ANY || incoming->tag == tag_of(next->header));
}

/* Whether it is an array as `out`, and fits into it. */
static bool fits(const struct pc_shm_next *next, const struct pc_array *out) {
    return next->header_nbytes >= HEADER_NBYTES + 3 &&
           next->header[PC_FORM_AT] == PC_FORM_ARRAY && next->header[HEADER_NBYTES] == out->dtype &&
           next->nbytes <= out->nbytes;
}

static bool is_short_object(const struct pc_shm_next *next) {
    return next->header_nbytes == HEADER_NBYTES && next->header[PC_FORM_AT] == PC_FORM_OBJECT &&
           next->nbytes <= PC_DIRECT_OBJECT_NBYTES;
}

/* Copy a payload, from its sender's memory if that is offered, else while its sender may still be
   writing it. False: that has paused for longer than `looks`, and the message stays. */
static bool copy_payload(struct pc_link_shm *shm, int rank, const struct pc_shm_next *next,
                         unsigned char *to, int looks) {
    if (next->filling == NULL) {
        if (next->nbytes > 0)
            memcpy(to, next->payload, next->nbytes);
        return true;
    }
    if (pc_link_shm_fetch_offered(shm, rank, next, to))
        return true;
    size_t copied = 0;
    for (int look = 0; copied < next->nbytes;) {
        size_t here = pc_load(&next->filling->nbytes);
        here = here < next->nbytes ? here : next->nbytes;
        if (here > copied) {
            pc_copy(to + copied, next->payload + copied, here - copied);
            copied = here;
            look = 0;
        } else if (look++ < looks) {
            pc_relax();
        } else {
            return false;
        }
    }
    return true;
}

/* A message that a receive may take. */
struct found {
    const struct pc_context *context;
    int source, rank; /* rank here, and in the world */
    int64_t tag;      /* once it is taken */
    struct pc_shm_next next;
};

/* Look for the first message of the rank at a place of the members. 1; 0: there is none yet; -1:
   something must be told before. */
static inline int look_at(const pc_messages *self, int place, bool is_any, struct found *found) {
    pc_engine_object *engine = self->engine;
    found->source = place;
    found->rank = self->members[place];
    const struct pc_link *link = engine->links[found->rank];
    if (is_any && self->size > 1 && link == &engine->to_self)
        return 0; /* what it has sent is in the queue of those that have come */
    if (engine->engine.gone[found->rank] != 0 || link != &engine->shm.link)
        return -1;
    return pc_link_shm_next(&engine->shm, found->rank, &found->next);
}

/* The same of those from whom a receive may take one, with a short wait. */
static PC_COLD int look(const pc_messages *self, int source, struct found *found) {
    bool is_any = source == ANY;
    int spins = self->engine->shm.channel.host->spins, count = is_any ? self->size : 1;
    int first = is_any ? self->first : source;
    for (int looks = 0; looks <= spins && looks < MOST_LOOKS; looks += count) {
        for (int place = first; place < first + count; place++) {
            int here = place < self->size ? place : place - self->size;
            int came = look_at(self, here, is_any, found);
            if (came != 0)
                return came;
        }
        pc_relax();
    }
    return 0;
}

/* Take the engine's lock if the next message is for this receive; false: the lock is not held. */
static bool find(pc_messages *self, const struct pc_incoming_call *incoming, struct found *found) {
    if (!enter(self, &found->context))
        return false;
    int came = -1;
    if (pc_match_first_posted(&found->context->matching) == NULL &&
        pc_match_first_message(&found->context->matching) == NULL) {
        came = incoming->source != ANY ? look_at(self, incoming->source, false, found) : 0;
        if (came == 0)
            came = look(self, incoming->source, found);
    }
    if (came > 0 && is_for(self, &found->next, incoming))
        return true;
    pc_lock_give(&self->engine->drive.lock);
    return false;
}

/* Copy what was found, and take it; gives the lock. False: its sender has paused. */
static bool take(pc_messages *self, struct found *found, void *into) {
    pc_engine_object *engine = self->engine;
    size_t nbytes = found->next.nbytes;
    bool taken = copy_payload(&engine->shm, found->rank, &found->next, into,
                              engine->shm.channel.host->spins);
    if (taken) {
        found->tag = tag_of(found->next.header);
        pc_link_shm_took(&engine->shm, found->rank, &found->next);
        pc_count_received(found->context, found->rank, nbytes);
        pc_note_message(engine->engine.notes, self->ident, found->rank, found->tag, nbytes,
                        PC_NOTED_RECEIVE | PC_NOTED_DONE);
        self->first = found->source + 1 < self->size ? found->source + 1 : 0;
    }
    pc_lock_give(&engine->drive.lock);
    return taken;
}

/* Receive the found message into new memory for it; gives the engine's lock: memory of Python's may
   run anything. Without an exception NULL: it is another one by now, or none that is known here. */
static PyObject *take_new(pc_messages *self, const struct pc_incoming_call *incoming,
                          struct found *found) {
    unsigned char header[LONGEST_HEADER_NBYTES];
    size_t header_nbytes = found->next.header_nbytes, nbytes = found->next.nbytes;
    bool is_known = header_nbytes <= sizeof header;
    if (is_known)
        memcpy(header, found->next.header, header_nbytes);
    pc_lock_give(&self->engine->drive.lock);
    void *into;
    PyObject *array = is_known ? pc_value_array(header, header_nbytes, nbytes, &into) : NULL;
    if (array == NULL || !find(self, incoming, found))
        return array != NULL ? (Py_DECREF(array), NULL) : NULL;
    if (found->next.nbytes == nbytes && found->next.header_nbytes == header_nbytes &&
        memcmp(found->next.header, header, header_nbytes) == 0) {
        if (take(self, found, into))
            return array;
    } else {
        pc_lock_give(&self->engine->drive.lock);
    }
    Py_DECREF(array);
    return NULL;
}

PyObject *pc_messages_take(pc_messages *self, const struct pc_incoming_call *incoming) {
    struct found found;
    PyObject *value = NULL;
    if (!find(self, incoming, &found))
        return NULL;
    if (incoming->out != NULL) {
        if (!fits(&found.next, &incoming->array))
            pc_lock_give(&self->engine->drive.lock);
        else if (take(self, &found, incoming->array.data))
            value = Py_NewRef(incoming->out);
    } else if (is_short_object(&found.next)) {
        char bytes[PC_DIRECT_OBJECT_NBYTES];
        if (take(self, &found, bytes))
            value = pc_pickle_load_copy(bytes, found.next.nbytes);
    } else {
        value = take_new(self, incoming, &found);
    }
    if (value != NULL && incoming->status != NULL &&
        pc_fill_status(incoming->status, found.source, found.tag, found.next.nbytes) < 0)
        Py_CLEAR(value);
    return value;
}
