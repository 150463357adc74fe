/* Running schedules. See run.h. */
#include "run.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* --- chunks and messages of a run ------------------------------------------------------------- */

/* A chunk, or a segment of it. */
struct pc_run_chunk {
    size_t nbytes;
    /* where its value is now; NULL: it has none yet. Not written where it was at the start */
    unsigned char *value;
    unsigned char *target; /* where it must be at the end; NULL: nowhere */
    size_t own_at;         /* its place in the run's own memory */
    const struct iovec *parts; /* its value is in several parts: as of its place; else NULL */
    size_t num_parts;
    bool is_grown;   /* its length is its sender's */
    bool is_settled; /* its target holds what it shall */
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

/* --- messages under way ----------------------------------------------------------------------- */

/* So many of an engine's are kept for the next steps. */
#define MOST_SPARE_MOVES 64

static inline struct pc_moved *new_move(struct pc_run *run, uint32_t step, bool is_send) {
    struct pc_engine *engine = run->engine;
    struct pc_spare *spare = engine->spare_moves;
    struct pc_moved *move = spare != NULL ? (void *)spare : malloc(sizeof *move);
    if (move == NULL)
        return NULL;
    if (spare != NULL) {
        engine->spare_moves = spare->next;
        engine->num_spare_moves--;
    }
    memset(move, 0, sizeof *move);
    move->run = run;
    move->step = step;
    move->is_send = is_send;
    PC_LIST_ADD(run->moves, move);
    return move;
}

static inline void free_move(struct pc_moved *move) {
    PC_LIST_REMOVE(move);
    if (move->parts != &move->one)
        free(move->parts);
    if (!move->is_send)
        free(move->receive.header);
    struct pc_engine *engine = move->run->engine;
    pc_engine_give_scratch(engine, move->scratch);
    if (engine->num_spare_moves == MOST_SPARE_MOVES) {
        free(move);
        return;
    }
    struct pc_spare *spare = (void *)move;
    spare->next = engine->spare_moves;
    engine->spare_moves = spare;
    engine->num_spare_moves++;
}

/* --- memory ----------------------------------------------------------------------------------- */

static inline void fail(struct pc_run *run, int status) {
    if (run->status == 0)
        run->status = status;
}

/* Where a chunk has its value from now on; NULL: there is no memory, and the run fails. */
static inline unsigned char *destination(struct pc_run *run, uint32_t number) {
    struct pc_run_chunk *chunk = &run->chunks[number];
    if (chunk->target == NULL && run->own == NULL) /* all at once: pages that are not touched cost
                                                      nothing */
        run->own = pc_scratch_take(&run->engine->scratch, run->own_nbytes);
    if (chunk->target == NULL && run->own == NULL) {
        fail(run, -ENOMEM);
        return NULL;
    }
    chunk->value = chunk->target != NULL ? chunk->target : run->own + chunk->own_at;
    chunk->parts = NULL;
    return chunk->value;
}

static inline void copy_value(unsigned char *into, const struct pc_run_chunk *chunk) {
    if (chunk->parts == NULL && chunk->nbytes > 0)
        memcpy(into, chunk->value, chunk->nbytes);
    for (size_t part = 0; chunk->parts != NULL && part < chunk->num_parts;
         into += chunk->parts[part++].iov_len)
        if (chunk->parts[part].iov_len > 0)
            memcpy(into, chunk->parts[part].iov_base, chunk->parts[part].iov_len);
}

static inline const uint32_t *chunks_of(const struct pc_run *run, const struct pc_step *step) {
    return run->table->chunks + step->chunks;
}

static inline size_t length_of(const struct pc_run *run, const struct pc_step *step) {
    size_t nbytes = 0;
    for (uint32_t index = 0; index < step->num_chunks; index++)
        nbytes += run->chunks[chunks_of(run, step)[index]].nbytes;
    return nbytes;
}

/* Let a chunk whose value is needed have it in its place, and be what it shall be. */
static inline void settle(struct pc_run *run, struct pc_run_chunk *chunk) {
    const struct pc_reduction *reduction = &run->reduction;
    if (chunk->target == NULL || chunk->value == NULL || chunk->nbytes == 0 || chunk->is_settled)
        return;
    chunk->is_settled = true;
    if (chunk->value != chunk->target)
        copy_value(chunk->target, chunk);
    if (reduction->finish != NULL) {
        const void *operand = chunk->target;
        reduction->finish(chunk->target, &operand, 1, chunk->nbytes / reduction->itemsize,
                          reduction->divisor);
    }
}

enum pc_value_place pc_run_where(const struct pc_run *run, uint32_t number) {
    const struct pc_run_chunk *chunk = &run->chunks[number];
    if (chunk->value == NULL)
        return PC_VALUE_NOWHERE;
    if (chunk->value == chunk->target)
        return PC_VALUE_AT_TARGET;
    bool is_own = chunk->is_grown || (run->own != NULL && chunk->value == run->own + chunk->own_at);
    return is_own ? PC_VALUE_IN_OWN : PC_VALUE_AT_SOURCE;
}

/* What the value of a chunk belongs to. */
static inline struct pc_keeper keeper_of(const struct pc_run *run, uint32_t number) {
    const struct pc_run_chunk *chunk = &run->chunks[number];
    const struct pc_chunk_place *place = &run->places[number];
    struct pc_keeper keeper = {NULL, NULL};
    switch (pc_run_where(run, number)) {
    case PC_VALUE_AT_SOURCE:
        if (chunk->parts == NULL)
            keeper.object =
                place->source_keeper != NULL ? place->source_keeper : run->source_keeper;
        break;
    case PC_VALUE_AT_TARGET:
        keeper.scratch = place->target_scratch;
        if (keeper.scratch == NULL)
            keeper.object =
                place->target_keeper != NULL ? place->target_keeper : run->target_keeper;
        break;
    case PC_VALUE_IN_OWN:
        keeper.scratch = chunk->is_grown ? chunk->value : run->own;
        break;
    default:
        break;
    }
    return keeper;
}

/* Neighbors in memory are one part. */
static inline size_t gather(const struct pc_run *run, const struct pc_step *step,
                            struct iovec *parts) {
    size_t count = 0;
    for (uint32_t index = 0; index < step->num_chunks; index++) {
        const struct pc_run_chunk *chunk = &run->chunks[chunks_of(run, step)[index]];
        if (chunk->nbytes == 0)
            continue;
        for (size_t part = 0; chunk->parts != NULL && part < chunk->num_parts; part++)
            parts[count++] = chunk->parts[part];
        if (chunk->parts != NULL)
            continue;
        struct iovec *last = count > 0 ? &parts[count - 1] : NULL;
        if (last != NULL && (unsigned char *)last->iov_base + last->iov_len == chunk->value)
            last->iov_len += chunk->nbytes;
        else
            parts[count++] = (struct iovec){chunk->value, chunk->nbytes};
    }
    return count;
}

static inline void scatter(struct pc_run *run, const struct pc_step *step,
                           const unsigned char *from) {
    for (uint32_t index = 0; index < step->num_chunks; index++) {
        const struct pc_run_chunk *chunk = &run->chunks[chunks_of(run, step)[index]];
        if (chunk->nbytes > 0)
            memcpy(chunk->value, from, chunk->nbytes);
        from += chunk->nbytes;
    }
}

/* --- for the owner of a run ------------------------------------------------------------------- */

size_t pc_run_awaited(const struct pc_run *run, int *ranks, size_t most) {
    size_t count = 0;
    for (const struct pc_moved *move = run->memory != NULL ? run->moves : NULL;
         move != NULL && count < most; move = move->next)
        /* else it waits for its owner */
        if (move->is_send || move->receive.state != PC_RECEIVE_HELD)
            ranks[count++] = move->is_send ? move->send.peer : (int)move->receive.address.sender;
    return count;
}

uint32_t pc_run_next_asked(struct pc_run *run) {
    if (run->memory == NULL || run->first_asked == run->last_asked)
        return PC_NO_STEP;
    return run->asked_for[run->first_asked++];
}

struct pc_receive *pc_run_held(struct pc_run *run, uint32_t position) {
    for (struct pc_moved *move = run->moves; move != NULL; move = move->next)
        if (!move->is_send && move->step == position)
            return move->receive.state == PC_RECEIVE_HELD ? &move->receive : NULL;
    return NULL;
}

void pc_run_taken(struct pc_run *run, uint32_t position) {
    for (struct pc_moved *move = run->moves; move != NULL; move = move->next)
        if (!move->is_send && move->step == position) {
            free_move(move);
            return;
        }
}

void *pc_run_take_incoming(struct pc_run *run, uint32_t position, size_t *nbytes) {
    *nbytes = length_of(run, &run->table->steps[position]);
    void *memory = run->incoming[position - 1];
    run->incoming[position - 1] = NULL;
    return memory;
}

bool pc_run_place(struct pc_run *run, uint32_t chunk) {
    return destination(run, chunk) != NULL;
}

void pc_run_settle(struct pc_run *run, uint32_t chunk) {
    settle(run, &run->chunks[chunk]);
}

void *pc_run_take_own(struct pc_run *run) {
    run->own_is_taken = true;
    return run->own;
}

static void drain(struct pc_run *run);

/* Give up all messages, and let go of all memory. */
static void clear(struct pc_run *run) {
    struct pc_engine *engine = run->engine;
    while (run->moves != NULL) {
        struct pc_moved *move = run->moves;
        if (move->is_send) {
            pc_scratch_spend(move->send.keeper.scratch); /* its link may look at it for a while */
            (void)pc_send_take_back(&move->send);
            pc_engine_tell_not(engine, &move->send.ending);
        } else {
            (void)pc_receive_give_up(&move->receive);
            pc_engine_tell_not(engine, &move->receive.ending);
        }
        free_move(move);
    }
    for (uint32_t step = 0; step < run->table->num_steps; step++)
        pc_scratch_give(&engine->scratch, run->incoming[step]);
    if (!run->own_is_taken)
        pc_engine_give_scratch(engine, run->own);
    free(run->memory);
    run->memory = NULL;
    pc_context_let_go(run->context);
}

/* --- steps ------------------------------------------------------------------------------------ */

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
    if (status != 0)
        pc_scratch_spend(send->keeper.scratch); /* as in `clear` */
    free_move(move);
    if (status == 0)
        complete(run, position);
    else
        fail(run, status);
    drain(run);
}

/* What all chunks of a step belong to, if that is the same for all. */
static struct pc_keeper keeper_of_all(const struct pc_run *run, const struct pc_step *step) {
    const uint32_t *chunks = chunks_of(run, step);
    struct pc_keeper all = {NULL, NULL};
    for (uint32_t index = 0; index < step->num_chunks; index++) {
        struct pc_keeper keeper = keeper_of(run, chunks[index]);
        if (index == 0)
            all = keeper;
        else if (keeper.object != all.object || keeper.scratch != all.scratch)
            return (struct pc_keeper){NULL, NULL};
    }
    return all;
}

static void post_send(struct pc_run *run, uint32_t position, const struct pc_step *step) {
    struct pc_moved *move = new_move(run, position, true);
    if (move == NULL) {
        fail(run, -ENOMEM);
        return;
    }
    size_t most = 0;
    for (uint32_t index = 0; index < step->num_chunks; index++) {
        const struct pc_run_chunk *chunk = &run->chunks[chunks_of(run, step)[index]];
        most += chunk->parts != NULL ? chunk->num_parts : 1;
    }
    move->parts = most > 1 ? malloc(most * sizeof *move->parts) : &move->one;
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
    send->keeper = keeper_of_all(run, step);
    for (int byte = 0; byte < 4; byte++)
        run->header[15 + byte] = (unsigned char)(step->index >> 8 * byte);
    if (pc_send_start(run->context, send, run->header, run->header_nbytes,
                      PC_MAY_PUSH) == PC_UNDER_WAY)
        return;
    int status = send->status;
    free_move(move);
    if (status == 0)
        complete(run, position);
    else
        fail(run, status);
}

static void ask(struct pc_run *run, uint32_t position) {
    run->asked_for[run->last_asked++] = position;
    run->asked(run);
}

/* A receive holds its message: it is offered, and so the owner's, or its length was not known. */
static void held(struct pc_moved *move) {
    struct pc_run *run = move->run;
    struct pc_receive *receive = &move->receive;
    const struct pc_step *step = &run->table->steps[move->step];
    uint32_t number = chunks_of(run, step)[0];
    struct pc_run_chunk *chunk = &run->chunks[number];
    if (receive->takes_offered && pc_receive_is_offered(receive)) {
        ask(run, move->step);
        return;
    }
    struct pc_grown *grown = &run->grown[number];
    size_t nbytes = receive->message->nbytes;
    if (pc_receive_is_offered(receive)) { /* nobody offers what is not even announced */
        run->from = receive->message->match.queued.source;
        run->came = nbytes;
        fail(run, PC_REFUSED);
        drain(run);
        return;
    }
    if (grown->memory == NULL)
        grown->memory = pc_scratch_take(&run->engine->scratch, nbytes);
    receive->keeper.scratch = grown->memory;
    if (grown->memory == NULL || pc_receive_into(receive, grown->memory) < 0) {
        fail(run, -ENOMEM);
        drain(run);
        return;
    }
    grown->nbytes = chunk->nbytes = nbytes;
    chunk->value = grown->memory;
}

static void received(struct pc_receive *receive) {
    struct pc_moved *move = receive->owner;
    struct pc_run *run = move->run;
    uint32_t position = move->step;
    int status = receive->status;
    if (receive->state == PC_RECEIVE_HELD) {
        held(move);
        return;
    }
    if (status == PC_TAKEN_BACK) {
        /* then its sender has broken the communicator: that will be heard by a receive */
        free_move(move);
        pc_run_wait_again(run, position);
        return;
    }
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
static void post_receive(struct pc_run *run, uint32_t position, const struct pc_step *step,
                         unsigned char *into) {
    struct pc_moved *move = new_move(run, position, false);
    bool is_grown = step->num_chunks == 1 && run->chunks[chunks_of(run, step)[0]].is_grown;
    size_t nbytes = is_grown ? 0 : length_of(run, step);
    if (move != NULL && into == NULL && !is_grown)
        into = move->scratch = pc_scratch_take(&run->engine->scratch, nbytes);
    if ((into == NULL && !is_grown) || move == NULL) {
        if (move != NULL)
            free_move(move);
        fail(run, -ENOMEM);
        return;
    }
    struct pc_receive *receive = &move->receive;
    receive->address.call = run->call->number;
    receive->address.subcall = run->subcall;
    receive->address.sender = (uint32_t)run->context->members[step->other];
    receive->address.index = step->index;
    receive->into = into;
    receive->keeper =
        move->scratch == NULL ? keeper_of_all(run, step) : (struct pc_keeper){NULL, move->scratch};
    receive->room = nbytes;
    receive->takes_less = run->takes_less;
    receive->ask = is_grown;
    receive->takes_offered = run->asked != NULL && !is_grown && step->kind == PC_STEP_RECV;
    receive->notify = received;
    receive->owner = move;
    pc_collect_start(run->context, receive);
}

/* Where the chunks of a receive lie one behind the other, that is where the message goes. */
static void post_recv(struct pc_run *run, uint32_t position, const struct pc_step *step) {
    const uint32_t *chunks = chunks_of(run, step);
    unsigned char *first = NULL, *end = NULL;
    bool is_one = true;
    if (step->num_chunks == 1 && run->chunks[chunks[0]].is_grown) {
        post_receive(run, position, step, NULL);
        return;
    }
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

/* A reduction is done. */
static void reduced(struct pc_run *run, uint32_t position) {
    run->num_open--;
    complete(run, position);
    open_receives(run);
}

static void reduce(struct pc_run *run, uint32_t position, const struct pc_step *step) {
    const unsigned char *incoming = run->incoming[position - 1];
    if (run->reduction.combine == NULL && run->asked != NULL) {
        ask(run, position);
        return;
    }
    for (uint32_t index = 0; index < step->num_chunks; index++) {
        uint32_t number = chunks_of(run, step)[index];
        size_t nbytes = run->chunks[number].nbytes;
        const void *own = run->chunks[number].value;
        unsigned char *out = destination(run, number);
        if (out == NULL)
            return;
        const void *operands[2] = {step->incoming_first ? incoming : own,
                                   step->incoming_first ? own : incoming};
        if (nbytes > 0 && run->reduction.combine != NULL)
            run->reduction.combine(out, operands, 2, nbytes / run->reduction.itemsize, 1);
        incoming += nbytes;
    }
    pc_scratch_give(&run->engine->scratch, run->incoming[position - 1]);
    run->incoming[position - 1] = NULL;
    reduced(run, position);
}

static void copy(struct pc_run *run, uint32_t position, const struct pc_step *step) {
    const struct pc_run_chunk *from = &run->chunks[step->other];
    uint32_t number = chunks_of(run, step)[0];
    unsigned char *into = destination(run, number);
    if (into == NULL)
        return;
    if (into != from->value)
        copy_value(into, from);
    complete(run, position);
}

static void external(struct pc_run *run, uint32_t position, const struct pc_step *step) {
    run->num_at_end += step->at_end;
    ask(run, position);
}

/* Whether the chunks that a step reads have a value: an algorithm may be wrong. */
static bool can_read(struct pc_run *run, const struct pc_step *step) {
    const uint32_t *chunks = step->kind == PC_STEP_COPY ? &step->other : chunks_of(run, step);
    uint32_t count = step->kind == PC_STEP_COPY ? 1 : step->num_chunks;
    bool reads =
        step->kind == PC_STEP_SEND || step->kind == PC_STEP_REDUCE || step->kind == PC_STEP_COPY;
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
    case PC_STEP_EXTERNAL:
        external(run, position, step);
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
    if (run->status == 0 && run->left > 0) {
        if (run->num_at_end > 0 && run->left == run->num_at_end && !run->asks_last) {
            run->asks_last = true;
            ask(run, PC_LAST_STEPS);
        }
        return;
    }
    for (uint32_t number = 0; run->status == 0 && number < run->table->num_chunks; number++)
        settle(run, &run->chunks[number]);
    clear(run);
    run->ended(run);
}

/* --- start and end ---------------------------------------------------------------------------- */

/* The segment of a chunk, as `binding.Binding.cut` has it. */
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
        memset(chunk, 0, sizeof *chunk);
        chunk->is_grown = place->nbytes == PC_UNKNOWN;
        if (chunk->is_grown)
            continue;
        if (run->num_segments > 1)
            cut(run, place->nbytes, &begin, &end);
        chunk->parts = place->parts;
        chunk->num_parts = place->num_parts;
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
        header[13 + byte] = (unsigned char)(run->subcall >> 8 * byte);
    memcpy(header + PC_COLLECTIVE_NBYTES, run->call->text, run->call->nbytes);
}

bool pc_run_start(struct pc_context *context, struct pc_run *run) {
    const struct pc_schedule *table = run->table;
    size_t steps = table->num_steps, chunks = table->num_chunks;
    size_t nbytes = chunks * sizeof *run->chunks +
                    steps * (sizeof *run->incoming + 4 * sizeof *run->waits) + sizeof *run->waits +
                    PC_COLLECTIVE_NBYTES + run->call->nbytes;
    run->memory = malloc(nbytes);
    if (run->memory == NULL)
        return false;
    run->context = context;
    /* what has ended well may be told after the context was closed: then it goes on */
    context->num_users++;
    run->engine = context->engine;
    run->header_nbytes = PC_COLLECTIVE_NBYTES + run->call->nbytes;
    run->chunks = run->memory;
    run->incoming = (void **)(run->chunks + chunks);
    run->waits = (uint32_t *)(run->incoming + steps);
    run->ready = run->waits + steps;
    run->unopened = run->ready + steps;
    run->asked_for = run->unopened + steps; /* every step once, and the last ones */
    run->header = (unsigned char *)(run->asked_for + steps + 1);
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

/* --- for an owner who does steps -------------------------------------------------------------- */

void pc_run_step_done(struct pc_run *run, uint32_t position) {
    const struct pc_step *step = &run->table->steps[position];
    pc_engine_enter(run->engine);
    if (step->kind == PC_STEP_REDUCE) {
        reduced(run, position);
    } else {
        run->num_at_end -= step->kind == PC_STEP_EXTERNAL && step->at_end;
        complete(run, position);
    }
    struct pc_engine *engine = run->engine;
    drain(run);
    pc_engine_leave(engine);
}

void pc_run_wait_again(struct pc_run *run, uint32_t position) {
    const struct pc_step *step = &run->table->steps[position];
    struct pc_engine *engine = run->engine;
    pc_engine_enter(engine);
    if (step->kind == PC_STEP_RECV)
        post_recv(run, position, step);
    else
        post_receive(run, position, step, NULL);
    drain(run);
    pc_engine_leave(engine);
}
