/* Buffered arrays between ranks of one host, sent and received without a request: what a blocking
   call does first. If it cannot, nothing has happened, and the call goes its usual way. With the
   interpreter's lock. */
#include "messages.h"
#include "base/copy.h"

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
    const struct pc_context *context;
    unsigned char header[LONGEST_HEADER_NBYTES];
    int rank = self->members[outgoing->dest];
    if (array->nbytes > PC_DIRECT_NBYTES || !enter(self, &context))
        return false;
    bool posted = false;
    if (engine->engine.gone[rank] == 0 && engine->links[rank] == &engine->shm.link) {
        size_t header_nbytes = write_header(self->ident, array, outgoing->tag, header);
        struct iovec part = {array->data, array->nbytes};
        posted = pc_link_shm_post(&engine->shm, rank, header, header_nbytes, &part);
    }
    if (posted) {
        pc_count_sent(context, rank, array->nbytes);
        pc_note_message(engine->engine.notes, self->ident, rank, outgoing->tag, array->nbytes,
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

/* Whether a header is that of the array that is wanted, and `nbytes` of it fit. */
static bool is_wanted(const pc_messages *self, const unsigned char *header, size_t header_nbytes,
                      size_t nbytes, const struct pc_incoming_call *incoming) {
    uint64_t ident;
    if (header_nbytes < HEADER_NBYTES + 3 || header[0] != KIND_P2P ||
        header[17] != PC_FORM_ARRAY)
        return false;
    memcpy(&ident, header + 1, 8);
    return ident == self->ident && (incoming->tag == ANY || incoming->tag == tag_of(header)) &&
           header[18] == incoming->array.dtype && nbytes <= incoming->array.nbytes;
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

bool pc_messages_take(pc_messages *self, const struct pc_incoming_call *incoming) {
    pc_engine_object *engine = self->engine;
    const struct pc_context *context;
    if (incoming->out == NULL || incoming->source == ANY || incoming->status != NULL ||
        !enter(self, &context))
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
    bool taken = came > 0 &&
                 is_wanted(self, next.header, next.header_nbytes, next.nbytes, incoming) &&
                 copy_payload(&engine->shm, rank, &next, incoming->array.data, looks);
    if (taken) {
        int64_t tag = tag_of(next.header);
        size_t nbytes = next.nbytes;
        pc_link_shm_took(&engine->shm, rank, &next);
        pc_count_received(context, rank, nbytes);
        pc_note_message(engine->engine.notes, self->ident, rank, tag, nbytes,
                        PC_NOTED_RECEIVE | PC_NOTED_DONE);
    }
    pc_lock_give(&engine->drive.lock);
    return taken;
}
