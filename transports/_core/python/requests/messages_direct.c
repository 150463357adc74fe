/* Buffered arrays and short objects between ranks of one host, sent and received without a
   request: what a blocking call does first. If it cannot, nothing has happened, and the call goes
   its usual way. With the interpreter's lock. */
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

/* Copy the next message to `out`'s memory, or if there is no `out` to `bytes`, if it is one that
   can be taken so. */
static bool take(pc_messages *self, const struct pc_incoming_call *incoming, void *bytes,
                 size_t *nbytes) {
    pc_engine_object *engine = self->engine;
    const struct pc_context *context;
    if (incoming->source == ANY || incoming->status != NULL || !enter(self, &context))
        return false;
    int rank = self->members[incoming->source], looks = engine->shm.channel.host->spins, came = 0;
    struct pc_shm_next next;
    bool is_next = engine->engine.gone[rank] == 0 && engine->links[rank] == &engine->shm.link &&
                   pc_match_first_posted(&context->matching) == NULL &&
                   pc_match_first_message(&context->matching) == NULL;
    for (int look = 0; is_next && came == 0 && look <= looks && look < MOST_LOOKS; look++) {
        came = pc_link_shm_next(&engine->shm, rank, &next);
        if (came == 0)
            pc_relax();
    }
    bool taken = came > 0 && is_for(self, &next, incoming) &&
                 (incoming->out != NULL ? fits(&next, &incoming->array) : is_short_object(&next)) &&
                 copy_payload(&engine->shm, rank, &next, bytes, looks);
    if (taken) {
        int64_t tag = tag_of(next.header);
        *nbytes = next.nbytes;
        pc_link_shm_took(&engine->shm, rank, &next);
        pc_count_received(context, rank, *nbytes);
        pc_note_message(engine->engine.notes, self->ident, rank, tag, *nbytes,
                        PC_NOTED_RECEIVE | PC_NOTED_DONE);
    }
    pc_lock_give(&engine->drive.lock);
    return taken;
}

bool pc_messages_take(pc_messages *self, const struct pc_incoming_call *incoming) {
    size_t nbytes;
    return incoming->out != NULL && take(self, incoming, incoming->array.data, &nbytes);
}

bool pc_messages_take_object(pc_messages *self, const struct pc_incoming_call *incoming,
                             PyObject **object) {
    char bytes[PC_DIRECT_OBJECT_NBYTES];
    size_t nbytes;
    if (incoming->out != NULL || !take(self, incoming, bytes, &nbytes))
        return false;
    *object = pc_pickle_load_copy(bytes, nbytes);
    return true;
}
