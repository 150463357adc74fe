/* Running schedules. See run.h. */
#include "run.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* A chunk, or a segment of it. */
struct pc_run_chunk {
    size_t nbytes;
    unsigned char *value;  /* where its value is now; NULL: it has none yet. Not written where it was at the start */
    unsigned char *target; /* where it must be at the end; NULL: nowhere */
    size_t own_at;         /* its place in the run's own memory */
};

/* A message of a run that is under way. */
struct pc_moved {
    struct pc_run *run;
    uint32_t step;
    bool is_send;
    struct pc_moved *next, **at; /* of the run */
    void *scratch; /* of a receive into several places */
    struct iovec one, *parts;
    union {
        struct pc_send send;
        struct pc_receive receive;
    };
};

static void drain(struct pc_run *run);

/* --- messages under way ------------------------------------------------------------------------------ */

static struct pc_moved *new_move(struct pc_run *run, uint32_t step, bool is_send) {
    struct pc_moved *move = calloc(1, sizeof *move);
    if (move == NULL)
        return NULL;
    move->run = run;
    move->step = step;
    move->is_send = is_send;
    move->next = run->moves;
    move->at = &run->moves;
    if (move->next != NULL)
        move->next->at = &move->next;
    run->moves = move;
    return move;
}

static void free_move(struct pc_moved *move) {
    *move->at = move->next;
    if (move->next != NULL)
        move->next->at = move->at;
    if (move->parts != &move->one)
        free(move->parts);
    if (!move->is_send)
        free(move->receive.header);
    pc_engine_free_later(move->run->engine, move->scratch);
    free(move);
}

/* Give up all messages, and let go of all memory. */
static void clear(struct pc_run *run) {
    struct pc_engine *engine = run->engine;
    while (run->moves != NULL) {
        struct pc_moved *move = run->moves;
        if (move->is_send) {
            (void)pc_send_take_back(&move->send);
            pc_engine_tell_not(engine, &move->send.ending);
        } else {
            (void)pc_receive_give_up(&move->receive);
            pc_engine_tell_not(engine, &move->receive.ending);
        }
        free_move(move);
    }
    for (uint32_t step = 0; step < run->table->num_steps; step++)
        free(run->incoming[step]);
    pc_engine_free_later(engine, run->own);
    free(run->memory);
    run->memory = NULL;
    pc_context_let_go(run->context);
}

static void fail(struct pc_run *run, int status) {
    if (run->status == 0)
        run->status = status;
}

/* --- memory ------------------------------------------------------------------------------------------ */

/* Where a chunk has its value from now on; NULL: there is no memory, and the run fails. */
static unsigned char *destination(struct pc_run *run, uint32_t number) {
    struct pc_run_chunk *chunk = &run->chunks[number];
    if (chunk->target == NULL && run->own == NULL && (run->own = malloc(run->own_nbytes + 1)) == NULL) {
        fail(run, -ENOMEM); /* all at once: pages that are not touched cost nothing */
        return NULL;
    }
    chunk->value = chunk->target != NULL ? chunk->target : run->own + chunk->own_at;
    return chunk->value;
}

static const uint32_t *chunks_of(const struct pc_run *run, const struct pc_step *step) {
    return run->table->chunks + step->chunks;
}

static size_t length_of(const struct pc_run *run, const struct pc_step *step) {
    size_t nbytes = 0;
    for (uint32_t index = 0; index < step->num_chunks; index++)
        nbytes += run->chunks[chunks_of(run, step)[index]].nbytes;
    return nbytes;
}

/* Let each chunk whose value is needed have it in its place, and be what it shall be. */
static void settle(struct pc_run *run) {
    for (uint32_t number = 0; number < run->table->num_chunks; number++) {
        struct pc_run_chunk *chunk = &run->chunks[number];
        const struct pc_reduction *reduction = &run->reduction;
        if (chunk->target == NULL || chunk->value == NULL || chunk->nbytes == 0)
            continue;
        if (chunk->value != chunk->target)
            memcpy(chunk->target, chunk->value, chunk->nbytes);
        if (reduction->finish != NULL) {
            const void *operand = chunk->target;
            reduction->finish(chunk->target, &operand, 1, chunk->nbytes / reduction->itemsize, reduction->divisor);
        }
    }
}

/* --- steps ------------------------------------------------------------------------------------------- */

static void complete(struct pc_run *run, uint32_t position) {
    const struct pc_step *step = &run->table->steps[position];
    run->left--;
    for (uint32_t index = 0; index < step->num_successors; index++) {
        uint32_t later = run->table->successors[step->successors + index];
        if (--run->waits[later] == 0)
            run->ready[run->last_ready++] = later;
    }
}

static void sent(struct pc_send *send) {
    struct pc_moved *move = send->owner;
    struct pc_run *run = move->run;
    uint32_t position = move->step;
    int status = send->status;
    free_move(move);
    if (status == 0)
        complete(run, position);
    else
        fail(run, status);
    drain(run);
}

/* Neighbors in memory are one part. */
static size_t gather(const struct pc_run *run, const struct pc_step *step, struct iovec *parts) {
    size_t count = 0;
    for (uint32_t index = 0; index < step->num_chunks; index++) {
        const struct pc_run_chunk *chunk = &run->chunks[chunks_of(run, step)[index]];
        if (chunk->nbytes == 0)
            continue;
        struct iovec *last = count > 0 ? &parts[count - 1] : NULL;
        if (last != NULL && (unsigned char *)last->iov_base + last->iov_len == chunk->value)
            last->iov_len += chunk->nbytes;
        else
            parts[count++] = (struct iovec){chunk->value, chunk->nbytes};
    }
    return count;
}

static void post_send(struct pc_run *run, uint32_t position, const struct pc_step *step) {
    struct pc_moved *move = new_move(run, position, true);
    if (move == NULL) {
        fail(run, -ENOMEM);
        return;
    }
    move->parts = step->num_chunks > 1 ? malloc(step->num_chunks * sizeof *move->parts) : &move->one;
    if (move->parts == NULL) {
        free_move(move);
        fail(run, -ENOMEM);
        return;
    }
    struct pc_send *send = &move->send;
    send->peer = run->context->members[step->other];
    send->num_parts = gather(run, step, move->parts);
    send->parts = move->parts;
    send->ended = sent;
    send->owner = move;
    for (int byte = 0; byte < 4; byte++)
        run->header[15 + byte] = (unsigned char)(step->index >> 8 * byte);
    if (pc_send_start(run->context, send, run->header, run->header_nbytes, PC_MAY_PUSH) == PC_UNDER_WAY)
        return;
    int status = send->status;
    free_move(move);
    if (status == 0)
        complete(run, position);
    else
        fail(run, status);
}

static void scatter(struct pc_run *run, const struct pc_step *step, const unsigned char *from) {
    for (uint32_t index = 0; index < step->num_chunks; index++) {
        const struct pc_run_chunk *chunk = &run->chunks[chunks_of(run, step)[index]];
        if (chunk->nbytes > 0)
            memcpy(chunk->value, from, chunk->nbytes);
        from += chunk->nbytes;
    }
}

static void received(struct pc_receive *receive) {
    struct pc_moved *move = receive->owner;
    struct pc_run *run = move->run;
    uint32_t position = move->step;
    int status = receive->status;
    if (status == 0 && move->scratch != NULL) {
        const struct pc_step *step = &run->table->steps[position];
        if (step->kind == PC_STEP_RECV) {
            scatter(run, step, move->scratch);
        } else {
            run->incoming[position] = move->scratch;
            move->scratch = NULL;
        }
    }
    if (status == PC_REFUSED) {
        run->from = receive->source;
        run->came = receive->nbytes;
        run->expected = receive->room;
    }
    if (status == 0 && run->takes_less)
        run->came = run->chunks[0].nbytes = receive->nbytes;
    free_move(move);
    if (status == 0)
        complete(run, position);
    else
        fail(run, status);
    drain(run);
}

/* Wait for the message of a step; it goes to `into`, or without that to memory of its own. */
static void post_receive(struct pc_run *run, uint32_t position, const struct pc_step *step, unsigned char *into) {
    struct pc_moved *move = new_move(run, position, false);
    size_t nbytes = length_of(run, step);
    if (move != NULL && into == NULL)
        into = move->scratch = malloc(nbytes + 1);
    if (into == NULL || move == NULL) {
        if (move != NULL)
            free_move(move);
        fail(run, -ENOMEM);
        return;
    }
    struct pc_receive *receive = &move->receive;
    receive->address.call = run->call->number;
    receive->address.lane = run->lane;
    receive->address.sender = (uint32_t)run->context->members[step->other];
    receive->address.index = step->index;
    receive->into = into;
    receive->room = nbytes;
    receive->takes_less = run->takes_less;
    receive->told = received;
    receive->owner = move;
    pc_collect_start(run->context, receive);
}

/* Where the chunks of a receive lie one behind the other, that is where the message goes. */
static void post_recv(struct pc_run *run, uint32_t position, const struct pc_step *step) {
    const uint32_t *chunks = chunks_of(run, step);
    unsigned char *first = NULL, *end = NULL;
    bool is_one = true;
    for (uint32_t index = 0; index < step->num_chunks; index++) {
        unsigned char *place = destination(run, chunks[index]);
        if (place == NULL)
            return;
        if (index == 0)
            first = place;
        else
            is_one &= place == end;
        end = place + run->chunks[chunks[index]].nbytes;
    }
    post_receive(run, position, step, is_one ? first : NULL);
}

static void open_receives(struct pc_run *run) {
    while (run->first_unopened < run->last_unopened && run->num_open < PC_RUN_WINDOW) {
        uint32_t position = run->unopened[run->first_unopened++];
        run->num_open++;
        post_receive(run, position, &run->table->steps[position], NULL);
    }
}

static void reduce(struct pc_run *run, uint32_t position, const struct pc_step *step) {
    const unsigned char *incoming = run->incoming[position - 1];
    for (uint32_t index = 0; index < step->num_chunks; index++) {
        uint32_t number = chunks_of(run, step)[index];
        size_t nbytes = run->chunks[number].nbytes;
        const void *own = run->chunks[number].value;
        unsigned char *out = destination(run, number);
        if (out == NULL)
            return;
        const void *operands[2] = {step->incoming_first ? incoming : own, step->incoming_first ? own : incoming};
        if (nbytes > 0 && run->reduction.combine != NULL)
            run->reduction.combine(out, operands, 2, nbytes / run->reduction.itemsize, 1);
        incoming += nbytes;
    }
    free(run->incoming[position - 1]);
    run->incoming[position - 1] = NULL;
    run->num_open--;
    complete(run, position);
    open_receives(run);
}

static void copy(struct pc_run *run, uint32_t position, const struct pc_step *step) {
    const struct pc_run_chunk *from = &run->chunks[step->other];
    uint32_t number = chunks_of(run, step)[0];
    unsigned char *into = destination(run, number);
    if (into == NULL)
        return;
    if (from->nbytes > 0 && into != from->value)
        memcpy(into, from->value, from->nbytes);
    complete(run, position);
}

/* Whether the chunks that a step reads have a value: an algorithm may be wrong. */
static bool can_read(struct pc_run *run, const struct pc_step *step) {
    const uint32_t *chunks = step->kind == PC_STEP_COPY ? &step->other : chunks_of(run, step);
    uint32_t count = step->kind == PC_STEP_COPY ? 1 : step->num_chunks;
    bool reads = step->kind == PC_STEP_SEND || step->kind == PC_STEP_REDUCE || step->kind == PC_STEP_COPY;
    for (uint32_t index = 0; reads && index < count; index++)
        if (run->chunks[chunks[index]].value == NULL) {
            run->from = (int)chunks[index];
            return false;
        }
    return true;
}

static void post(struct pc_run *run, uint32_t position) {
    const struct pc_step *step = &run->table->steps[position];
    if (!can_read(run, step)) {
        fail(run, PC_NO_VALUE);
        return;
    }
    switch (step->kind) {
    case PC_STEP_SEND:
        post_send(run, position, step);
        break;
    case PC_STEP_RECV:
        post_recv(run, position, step);
        break;
    case PC_STEP_RECV_SCRATCH:
        run->unopened[run->last_unopened++] = position;
        open_receives(run);
        break;
    case PC_STEP_REDUCE:
        reduce(run, position, step);
        break;
    default:
        copy(run, position, step);
    }
}

static void drain(struct pc_run *run) {
    if (run->draining)
        return;
    run->draining = true;
    while (run->status == 0 && run->first_ready < run->last_ready)
        post(run, run->ready[run->first_ready++]);
    run->draining = false;
    if (run->status == 0 && run->left > 0)
        return;
    if (run->status == 0)
        settle(run);
    clear(run);
    run->ended(run);
}

/* --- start and end ----------------------------------------------------------------------------------- */

/* The segment of a chunk, as `executor.Binding.cut` has it. */
static void cut(const struct pc_run *run, size_t nbytes, size_t *begin, size_t *end) {
    size_t units = nbytes / run->granule;
    *begin = units * run->segment / run->num_segments * run->granule;
    *end = units * (run->segment + 1) / run->num_segments * run->granule;
}

static void place_chunks(struct pc_run *run) {
    for (uint32_t number = 0; number < run->table->num_chunks; number++) {
        const struct pc_chunk_place *place = &run->places[number];
        struct pc_run_chunk *chunk = &run->chunks[number];
        size_t begin = 0, end = place->nbytes;
        if (run->num_segments > 1)
            cut(run, place->nbytes, &begin, &end);
        chunk->nbytes = end - begin;
        /* The memory of the source may be nowhere, and a place an address. */
        uintptr_t source = (uintptr_t)run->source + (uintptr_t)place->source + begin;
        uintptr_t target = (uintptr_t)run->target + (uintptr_t)place->target + begin;
        chunk->value = place->source >= 0 ? (unsigned char *)source : NULL;
        chunk->target = place->target >= 0 ? (unsigned char *)target : NULL;
        chunk->own_at = run->own_nbytes;
        run->own_nbytes += chunk->nbytes;
    }
}

static void write_header(struct pc_run *run) {
    unsigned char *header = run->header;
    header[0] = PC_KIND_COLLECTIVE;
    for (int byte = 0; byte < 8; byte++)
        header[1 + byte] = (unsigned char)(run->context->ident >> 8 * byte);
    for (int byte = 0; byte < 4; byte++)
        header[9 + byte] = (unsigned char)(run->call->number >> 8 * byte);
    for (int byte = 0; byte < 2; byte++)
        header[13 + byte] = (unsigned char)(run->lane >> 8 * byte);
    memcpy(header + PC_COLLECTIVE_NBYTES, run->call->text, run->call->nbytes);
}

bool pc_run_start(struct pc_context *context, struct pc_run *run) {
    const struct pc_schedule *table = run->table;
    size_t steps = table->num_steps, chunks = table->num_chunks;
    size_t nbytes = chunks * sizeof *run->chunks + steps * (sizeof *run->incoming + 3 * sizeof *run->waits) +
                    PC_COLLECTIVE_NBYTES + run->call->nbytes;
    run->memory = malloc(nbytes);
    if (run->memory == NULL)
        return false;
    run->context = context;
    context->num_users++; /* what has ended well may be told after the context was closed: then it goes on */
    run->engine = context->engine;
    run->header_nbytes = PC_COLLECTIVE_NBYTES + run->call->nbytes;
    run->chunks = run->memory;
    run->incoming = (void **)(run->chunks + chunks);
    run->waits = (uint32_t *)(run->incoming + steps);
    run->ready = run->waits + steps;
    run->unopened = run->ready + steps;
    run->header = (unsigned char *)(run->unopened + steps);
    run->left = table->num_steps;
    place_chunks(run);
    write_header(run);
    for (uint32_t step = 0; step < table->num_steps; step++) {
        run->incoming[step] = NULL;
        run->waits[step] = table->steps[step].waits;
        if (run->waits[step] == 0)
            run->ready[run->last_ready++] = step;
    }
    struct pc_engine *engine = context->engine;
    pc_engine_enter(engine);
    drain(run); /* it may have ended, and its context may be closed by who is told so */
    pc_engine_leave(engine);
    return true;
}

bool pc_run_cancel(struct pc_run *run) {
    if (run->memory == NULL)
        return false;
    struct pc_engine *engine = run->engine;
    pc_engine_enter(engine);
    clear(run);
    pc_engine_leave(engine);
    return true;
}

size_t pc_run_awaited(const struct pc_run *run, int *ranks, size_t most) {
    size_t count = 0;
    for (const struct pc_moved *move = run->memory != NULL ? run->moves : NULL; move != NULL && count < most;
         move = move->next)
        ranks[count++] = move->is_send ? move->send.peer : (int)move->receive.address.sender;
    return count;
}
