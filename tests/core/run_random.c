/* Random collectives (transports/_core/engine/calls.c and run.c) of engines that are joined by the link of
   run_link.h, all in one thread, so that a seed always does the same.

   Ranks open contexts, begin calls, start what belongs to them and end them in whatever order, several at a time. A
   call is one of pycoll's algorithms with chunks of random lengths, perhaps in segments; beside its runs there are
   messages by `pc_collect_start`, asked for or not. Some runs ask for steps (run_asks.h). In clean worlds all must end well. In others ranks make another
   call, or chunks of other lengths, send what nobody expects, offer what a run waits for, cancel, forget each other,
   break and close contexts, at any moment, also out of callbacks. Every run that ends well must have what the proof of
   its algorithm says, every other one must have a reason, and a message of another call must reach the caller.

   What a run uses is freed as soon as it ends (AddressSanitizer sees who touches it), and nothing of the engine's
   memory may be left.

   run_random TABLES WORLDS SEED

   Exits with 3 and a line that names the seed of the world if something is wrong. */
#include "run_tables.h"

#define CONTEXTS 3
#define MOST_CALLS 24
#define MOST_SEGMENTS 3
#define MOST_EXTRAS 3
#define MOST_ELEMENTS 300
#define EXTRA_LANE 0x8123
#define STRAY_LANE 0x7F01
#define EXTRA_INDEX 0x01020300u
#define NOBODY (-1)


/* What a message beside the runs of a call is. */
struct extra {
    int from, to; /* ranks of the context */
    size_t nbytes;
    bool is_offered;
};

/* A call, as those who make it know it. */
struct plan {
    uint64_t number;
    const struct program *program;
    char signature[64];
    size_t lengths[MOST_RANKS][MOST_CHUNKS]; /* in elements; by rank for what differs */
    bool sums;
    int num_segments, num_extras;
    size_t granule; /* in elements */
    uint16_t lane;
    struct extra extras[MOST_EXTRAS];
    int liar;   /* has a chunk of another length */
    int offerer; /* offers what the others expect to be sent */
    int loser;  /* has no value in a chunk that should have one */
    int stray_from, stray_to;
};

enum openness { NEVER, OPEN, BROKEN, CLOSED };
enum made { NOT_YET, UNDER_WAY, OVER };

struct state;

struct asked;

struct running {
    struct pc_run run;
    struct state *state;
    int segment;
    struct asked *asked; /* NULL: it asks for nothing */
};

struct asking {
    struct pc_receive receive;
    struct state *state;
    int extra;
    bool is_here; /* its message had come, all of it, when it was started */
    unsigned char *memory;
};

struct sending {
    struct pc_send send;
    struct iovec part;
    struct state *state; /* NULL: of no extra */
    int extra;
    struct sending *next, **at;
};

/* What one rank has made of one call. */
struct state {
    int rank, context, me; /* me: its rank in the context */
    uint32_t call;
    const struct plan *plan;
    struct pc_called *called; /* NULL: not begun, or ended */
    bool begun, ended, failed, in_place, offered;
    enum made runs[MOST_SEGMENTS], sent[MOST_EXTRAS], asked[MOST_EXTRAS];
    struct running *running[MOST_SEGMENTS];
    struct asking *asking[MOST_EXTRAS];
    bool stray_sent;
    unsigned char *source, *target, *before;
    size_t nbytes;
    int lost; /* the chunk without a value; or NOBODY */
    struct pc_chunk_place places[MOST_CHUNKS];
};

struct member {
    enum openness openness;
    int status;
    struct pc_context *context;
    uint32_t num_begun;
    const struct plan *newest;
    struct state states[MOST_CALLS];
};

static struct {
    int size, members[MOST_RANKS];
    uint32_t num_calls;
    struct plan plans[MOST_CALLS], others[MOST_CALLS];
    int other_maker[MOST_CALLS]; /* the rank that makes the other call; or NOBODY */
    struct member ranks[MOST_RANKS];
} contexts[CONTEXTS];
static int num_ranks, num_contexts;
static bool clean, was_scarce, reversed, dry;
static int spoils; /* percent of what ranks do in this world */
static struct sending *sendings;
static const struct running *starting;

/* Receives for messages of other calls. */
#define MOST_OTHERS 4096
static struct pc_receive *others[MOST_OTHERS];
static int num_others;

static uint64_t ident_of(int context) { return 0x1122334455667700u + (uint64_t)context; }

static int rank_in(int context, int rank) {
    for (int member = 0; member < contexts[context].size; member++)
        if (contexts[context].members[member] == rank)
            return member;
    return NOBODY;
}

static struct member *member_of(const struct state *state) { return &contexts[state->context].ranks[state->me]; }

static size_t itemsize_of(const struct plan *plan) { return plan->sums ? 4 : 8; }

/* --- plans ------------------------------------------------------------------------------------------- */

static size_t some_length(const struct plan *plan, int mode) {
    size_t limit = mode == 0 ? 1 : mode == 1 ? 3 : mode == 2 ? 12 : MOST_ELEMENTS;
    return (mode == 0 ? below(2) : below(limit)) * plan->granule;
}

static void choose_lengths(struct plan *plan) {
    const struct program *program = plan->program;
    int mode = (int)below(4), size = program->size;
    size_t same = some_length(plan, mode);
    for (int chunk = 0; chunk < program->num_chunks; chunk++) {
        size_t length = chance(20) ? same : some_length(plan, mode);
        for (int rank = 0; rank < size; rank++) {
            if (program->lengths == EMPTY)
                plan->lengths[rank][chunk] = 0;
            else if (program->lengths == EQUAL)
                plan->lengths[rank][chunk] = same;
            else if (program->lengths == BLOCKS && chunk < size)
                plan->lengths[rank][chunk] = plan->lengths[chunk][size + rank] = some_length(plan, mode);
            else if (program->lengths == FREE)
                plan->lengths[rank][chunk] = length;
        }
    }
    if (plan->liar != NOBODY && program->lengths == FREE)
        plan->lengths[plan->liar][below((uint64_t)program->num_chunks)] += plan->granule;
    else
        plan->liar = NOBODY;
}

static void make_plan(struct plan *plan, int context, uint32_t call, bool is_other) {
    int size = contexts[context].size;
    *plan = (struct plan){.number = (seed * 8 + (uint64_t)context) * 128 + call * 2 + is_other, .granule = 1};
    plan->liar = plan->offerer = plan->loser = plan->stray_from = NOBODY;
    if (!clean) {
        plan->liar = chance(10) ? (int)below((uint64_t)size) : NOBODY;
        plan->offerer = chance(90) ? (int)below((uint64_t)size) : NOBODY;
        plan->loser = chance(12) ? (int)below((uint64_t)size) : NOBODY;
        plan->stray_from = chance(60) ? (int)below((uint64_t)size) : NOBODY;
        plan->stray_to = (int)below((uint64_t)size);
        if (plan->stray_to == plan->stray_from)
            plan->stray_from = NOBODY;
    }
    do
        plan->program = &programs[below(num_programs)];
    while (plan->program->size != size);
    plan->sums = chance(30);
    if (chance(30))
        plan->num_segments = 2 + (int)below(MOST_SEGMENTS - 1);
    if (chance(30))
        plan->granule = 1 + below(3);
    plan->lane = chance(50) ? 0 : (uint16_t)below(600);
    choose_lengths(plan);
    plan->num_extras = (int)below(MOST_EXTRAS + 1);
    for (int each = 0; each < plan->num_extras; each++) {
        struct extra *extra = &plan->extras[each];
        extra->from = (int)below((uint64_t)size);
        extra->to = (int)below((uint64_t)size);
        extra->nbytes = chance(20) ? 0 : below(chance(50) ? SMALL : 2000);
        extra->is_offered = chance(30);
    }
    /* One of two calls that differ may be as the other one begins. */
    const char *name = chance(50) ? "all" : "all of a long name";
    snprintf(plan->signature, sizeof plan->signature, "%s on call %u%s", name, call,
             is_other ? (chance(50) ? "0" : " too") : "");
}

static bool is_same_call(const struct plan *one, const struct plan *two) {
    return strcmp(one->signature, two->signature) == 0;
}

/* --- memory ------------------------------------------------------------------------------------------ */

static const struct schedule *schedule_of(const struct state *state) {
    return &state->plan->program->by_rank[state->me];
}

/* Place the chunks in random order, some of them apart, and write what this rank contributes. */
static void place(struct state *state) {
    const struct plan *plan = state->plan;
    const struct schedule *schedule = schedule_of(state);
    int count = plan->program->num_chunks, turn = (int)below((uint64_t)count), gap = chance(50) ? 40 : 0;
    bool backwards = chance(20);
    size_t itemsize = itemsize_of(plan), at = 0;
    for (int each = 0; each < count; each++) {
        int chunk = (turn + (backwards ? count - each : each)) % count;
        struct pc_chunk_place *here = &state->places[chunk];
        at += chance(gap) ? below(20) : 0;
        here->nbytes = plan->lengths[state->me][chunk] * itemsize;
        here->source = schedule->has_source[chunk] ? (ptrdiff_t)at : -1;
        here->target = schedule->num_tokens[chunk] > 0 ? (ptrdiff_t)at : -1;
        at += here->nbytes;
        if (here->source >= 0 && plan->loser == state->me && state->lost == NOBODY) {
            here->source = -1;
            state->lost = chunk;
        }
    }
    state->nbytes = at;
    state->in_place = chance(30);
    counts[IN_PLACE] += state->in_place;
    state->source = malloc(at + 1);
    state->before = malloc(at + 1);
    memset(state->source, POISON, at + 1);
    for (int chunk = 0; chunk < count; chunk++)
        for (size_t element = 0; element < (state->places[chunk].source >= 0 ? plan->lengths[state->me][chunk] : 0);
             element++)
            write_element(state->source + state->places[chunk].source + element * itemsize,
                          contribution(plan->number, state->me, chunk, element), plan->sums);
    memcpy(state->before, state->source, at + 1);
    state->target = state->in_place ? state->source : malloc(at + 1);
    if (!state->in_place)
        memset(state->target, POISON, at + 1);
}

static void check_target(const struct state *state, int chunk) {
    const struct plan *plan = state->plan;
    const struct schedule *schedule = schedule_of(state);
    size_t itemsize = itemsize_of(plan);
    for (size_t element = 0; element < plan->lengths[state->me][chunk]; element++) {
        unsigned char wanted[8];
        const int *token = schedule->tokens[chunk];
        const unsigned char *has = state->target + state->places[chunk].target + element * itemsize;
        if (*token == UNWRITTEN)
            memset(wanted, POISON, sizeof wanted);
        else
            write_element(wanted, evaluate(&token, plan->number, element, plan->sums), plan->sums);
        if (memcmp(has, wanted, itemsize) == 0)
            continue;
        fprintf(stderr, "%s %s, size %d, root %d, rank %d, chunk %d:\n", plan->program->collective,
                plan->program->algorithm, plan->program->size, plan->program->root, state->me, chunk);
        check(false, "a run ends with a wrong value", element);
    }
}

/* No run uses the memory of this call any more. */
static void free_memory(struct state *state) {
    for (int chunk = 0; chunk < state->plan->program->num_chunks; chunk++) {
        const struct pc_chunk_place *here = &state->places[chunk];
        if (here->target >= 0 && !state->failed)
            check_target(state, chunk);
        if (here->target >= 0 && here->nbytes > 0) { /* all else must be as it was */
            memset(state->target + here->target, POISON, here->nbytes);
            if (state->in_place)
                memset(state->before + here->target, POISON, here->nbytes);
        }
    }
    check(memcmp(state->source, state->before, state->nbytes + 1) == 0, "a run writes where nothing belongs",
          state->call);
    for (size_t at = 0; !state->in_place && at <= state->nbytes; at++)
        check(state->target[at] == POISON, "a run writes outside of its target", at);
    if (!state->in_place)
        free(state->target);
    poison_and_free(state->source, state->nbytes + 1);
    free(state->before);
    state->source = state->target = state->before = NULL;
}

static int num_runs(const struct plan *plan) { return plan->num_segments > 1 ? plan->num_segments : 1; }

static bool uses_memory(const struct state *state) {
    for (int segment = 0; segment < num_runs(state->plan); segment++)
        if (state->runs[segment] == UNDER_WAY || (state->runs[segment] == NOT_YET && !state->failed))
            return true;
    return false;
}

/* --- why things end ---------------------------------------------------------------------------------- */

static void act(int rank);
static void spoil(int rank);
static void stop(int context, int me, bool closes);

static void maybe_act(int rank) {
    if (quiet || !chance(clean ? 10 : 25))
        return;
    counts[FROM_CALLBACKS]++;
    for (uint64_t turns = chance(70) ? 1 : 1 + below(12); turns > 0; turns--)
        if (chance(3 * spoils))
            spoil(rank);
        else
            act(rank);
}

static void check_reason(const struct state *state, int status) {
    const struct member *member = member_of(state);
    check(!clean, "something fails in a clean world", (uint64_t)-status);
    if (status == -ENOMEM) {
        check(was_scarce, "there was memory", state->call);
    } else if (status >= 1000) {
        check(status - 1000 < RANKS && ranks[state->rank].engine.gone[status - 1000] == status, "a peer is not gone",
              (uint64_t)status);
        check(rank_in(state->context, status - 1000) != NOBODY, "a peer is not of the context", (uint64_t)status);
    } else {
        check(status != 0 && status == member->status, "something ends for no reason", (uint64_t)-status);
    }
}

/* The message that a run has refused: it was sent, and is not what the step expects. */
static void check_refused(const struct state *state, const struct pc_run *run) {
    int from = rank_in(state->context, run->from);
    counts[REFUSED]++;
    check(from != NOBODY && !clean, "a message of nobody is refused", (uint64_t)run->from);
    if (run->grown != NULL) {
        check(state->plan->offerer == from, "a message of unknown length is refused", run->came);
        return;
    }
    const struct schedule *schedule = schedule_of(state);
    for (uint32_t position = 0; position < schedule->table.num_steps; position++) {
        const struct pc_step *step = &schedule->table.steps[position];
        size_t nbytes = 0;
        if ((step->kind != PC_STEP_RECV && step->kind != PC_STEP_RECV_SCRATCH) || (int)step->other != from)
            continue;
        for (uint32_t each = 0; each < step->num_chunks; each++) {
            size_t units = state->places[schedule->table.chunks[step->chunks + each]].nbytes;
            size_t granule = state->plan->granule * itemsize_of(state->plan);
            if (run->num_segments > 1)
                units = (units / granule * (run->segment + 1) / run->num_segments -
                         units / granule * run->segment / run->num_segments) * granule;
            nbytes += units;
        }
        for (size_t number = 0; number < num_flights && nbytes == run->expected; number++) {
            const struct flight *flight = flights[number];
            uint16_t lane = (uint16_t)(flight->header[13] | flight->header[14] << 8);
            uint32_t index, call;
            uint64_t ident;
            memcpy(&ident, flight->header + 1, 8);
            memcpy(&call, flight->header + 9, 4);
            memcpy(&index, flight->header + 15, 4);
            if (flight->source == run->from && flight->dest == state->rank && ident == ident_of(state->context) &&
                call == state->call && lane == run->lane && index == step->index && flight->nbytes == run->came &&
                flight->arrived && (run->came != nbytes || flight->header[0] == PC_KIND_OFFERED)) {
                counts[OFFERED] += flight->header[0] == PC_KIND_OFFERED;
                check(flight->where != PC_WAITING || !flight->released, "the sender of a refused message is answered",
                      number);
                return;
            }
        }
    }
    check(false, "a run has refused what was not sent", state->call);
}

/* --- runs -------------------------------------------------------------------------------------------- */

static void asked_over(struct running *running, bool failed);

static void run_over(struct running *running, bool failed) {
    struct state *state = running->state;
    if (running->asked != NULL)
        asked_over(running, failed);
    check(state->runs[running->segment] == UNDER_WAY, "a run ends twice", state->call);
    state->runs[running->segment] = OVER;
    state->running[running->segment] = NULL;
    state->failed = state->failed || failed || state->lost != NOBODY;
    poison_and_free((unsigned char *)running, sizeof *running);
    if (!uses_memory(state))
        free_memory(state);
}

static void run_ended(struct pc_run *run) {
    struct running *running = run->owner;
    struct state *state = running->state;
    int rank = state->rank;
    if (run->status == PC_REFUSED)
        check_refused(state, run);
    else if (run->status == PC_NO_VALUE)
        check(run->from == state->lost && !clean, "a chunk has no value", (uint64_t)run->from);
    else if (run->status != 0)
        check_reason(state, run->status);
    counts[NO_VALUE] += run->status == PC_NO_VALUE;
    counts[RUNS_FAILED] += run->status != 0;
    bool is_starting = running == starting;
    run_over(running, run->status != 0);
    if (is_starting && !quiet && chance(spoils)) {
        counts[ENDED_STARTING]++;
        stop(state->context, state->me, true);
    }
    maybe_act(rank);
}

static void cancel_run(struct state *state, int segment);

#include "run_asks.h"

static void start_run(struct state *state, int segment) {
    const struct plan *plan = state->plan;
    struct running *running = calloc(1, sizeof *running);
    if (state->source == NULL)
        place(state);
    running->state = state;
    running->segment = segment;
    struct pc_run *run = &running->run;
    run->table = &schedule_of(state)->table;
    run->places = state->places;
    run->reduction.combine = plan->sums ? combine_sums : combine_affine;
    run->reduction.itemsize = itemsize_of(plan);
    if (plan->program->lengths == EMPTY)
        run->reduction.combine = NULL;
    run->source = state->source;
    run->target = state->target;
    run->call = state->called;
    run->lane = (uint16_t)(plan->lane + segment);
    run->segment = (uint32_t)segment;
    run->num_segments = (uint32_t)plan->num_segments;
    run->granule = plan->granule * itemsize_of(plan);
    run->ended = run_ended;
    run->owner = running;
    if (chance(plan->offerer != NOBODY ? 85 : 50))
        ask_for_steps(running);
    state->runs[segment] = UNDER_WAY;
    state->running[segment] = running;
    counts[SEGMENTS] += plan->num_segments > 1;
    starting = running;
    bool is_started = pc_run_start(member_of(state)->context, run);
    starting = NULL;
    if (is_started)
        return;
    check(was_scarce, "a run is not started", state->call);
    state->runs[segment] = NOT_YET;
    state->running[segment] = NULL;
    if (running->asked != NULL)
        asked_over(running, true);
    free(running);
}

static void cancel_run(struct state *state, int segment) {
    struct running *running = state->running[segment];
    check(pc_run_cancel(&running->run), "a run that goes on cannot be cancelled", state->call);
    check(!pc_run_cancel(&running->run), "a run is cancelled twice", state->call);
    counts[RUNS_CANCELLED]++;
    run_over(running, true);
}

/* --- messages beside the runs ------------------------------------------------------------------------ */

static void write_address(unsigned char *header, const struct state *state, bool is_offered, uint16_t lane,
                          uint32_t index) {
    uint64_t ident = ident_of(state->context);
    header[0] = is_offered ? PC_KIND_OFFERED : PC_KIND_COLLECTIVE;
    memcpy(header + 1, &ident, 8);
    memcpy(header + 9, &state->call, 4);
    memcpy(header + 13, &lane, 2);
    memcpy(header + 15, &index, 4);
}

static size_t write_message_header(unsigned char *header, const struct state *state, bool is_offered, uint16_t lane,
                                   uint32_t index) {
    write_address(header, state, is_offered, lane, index);
    size_t nbytes = PC_COLLECTIVE_NBYTES;
    if (is_offered)
        memset(header + nbytes, 0x5A, PC_OFFER_NBYTES);
    nbytes += is_offered ? PC_OFFER_NBYTES : 0;
    memcpy(header + nbytes, state->called->text, state->called->nbytes);
    return nbytes + state->called->nbytes;
}

static unsigned char byte_of(const struct plan *plan, int extra, size_t offset) {
    return (unsigned char)((plan->number * 131 + (uint64_t)extra * 31 + offset * 7 + offset / 251) % 211);
}

static void sending_over(struct sending *sending) {
    *sending->at = sending->next;
    if (sending->next != NULL)
        sending->next->at = sending->at;
    if (sending->state != NULL && sending->send.status == 0)
        sending->state->sent[sending->extra] = OVER;
    poison_and_free(sending->part.iov_base, sending->part.iov_len + 1);
    poison_and_free((unsigned char *)sending, sizeof *sending);
}

static void sending_ended(struct pc_send *send) { sending_over(send->owner); }

static void send_message(struct state *state, int extra, const unsigned char *header, size_t header_nbytes, int dest,
                         size_t nbytes, const unsigned char *value) {
    struct sending *sending = calloc(1, sizeof *sending);
    unsigned char *memory = malloc(nbytes + 1);
    for (size_t offset = 0; offset < nbytes; offset++)
        memory[offset] = value != NULL ? value[offset] : byte_of(state->plan, extra, offset);
    sending->part = (struct iovec){memory, nbytes};
    sending->send = (struct pc_send){.peer = contexts[state->context].members[dest],
                                     .parts = &sending->part,
                                     .num_parts = 1,
                                     .ended = sending_ended,
                                     .owner = sending};
    sending->state = extra < MOST_EXTRAS ? state : NULL;
    sending->extra = extra;
    sending->next = sendings;
    sending->at = &sendings;
    if (sendings != NULL)
        sendings->at = &sending->next;
    sendings = sending;
    if (sending->state != NULL)
        state->sent[extra] = UNDER_WAY;
    enum pc_way way = (enum pc_way)below(3);
    if (pc_send_start(member_of(state)->context, &sending->send, header, header_nbytes, way) != PC_SENT)
        return;
    if (sending->send.status != 0)
        check_reason(state, sending->send.status);
    sending_over(sending);
}

static void send_extra(struct state *state, int number) {
    unsigned char header[300];
    const struct extra *extra = &state->plan->extras[number];
    uint32_t index = EXTRA_INDEX + (uint32_t)number;
    size_t header_nbytes = write_message_header(header, state, extra->is_offered, EXTRA_LANE, index);
    send_message(state, number, header, header_nbytes, extra->to, extra->nbytes, NULL);
}

/* Instead of running offer what the first steps send. */
static void offer(struct state *state) {
    unsigned char header[300];
    const struct schedule *schedule = schedule_of(state);
    state->offered = true;
    for (uint32_t position = 0; position < schedule->table.num_steps && state->called != NULL; position++) {
        const struct pc_step *step = &schedule->table.steps[position];
        if (step->kind != PC_STEP_SEND || step->waits > 0)
            continue;
        size_t header_nbytes = write_message_header(header, state, true, state->plan->lane, step->index), nbytes = 0;
        size_t itemsize = itemsize_of(state->plan);
        unsigned char *value = calloc(MOST_CHUNKS * MOST_ELEMENTS, itemsize);
        for (uint32_t each = 0; each < step->num_chunks; each++) {
            int chunk = (int)schedule->table.chunks[step->chunks + each];
            for (size_t element = 0; element < state->plan->lengths[state->me][chunk]; element++, nbytes += itemsize)
                write_element(value + nbytes, contribution(state->plan->number, state->me, chunk, element),
                              state->plan->sums);
        }
        send_message(state, MOST_EXTRAS, header, header_nbytes, (int)step->other, nbytes, value);
        free(value);
    }
}

static void send_stray(struct state *state) {
    unsigned char header[300];
    state->stray_sent = true;
    size_t header_nbytes = write_message_header(header, state, false, STRAY_LANE, 0);
    send_message(state, MOST_EXTRAS, header, header_nbytes, state->plan->stray_to, below(200), NULL);
}

static void asking_over(struct asking *asking, bool received) {
    struct state *state = asking->state;
    state->asked[asking->extra] = received ? OVER : NOT_YET;
    state->asking[asking->extra] = NULL;
    state->failed = state->failed || !(received || clean);
    free(asking->memory);
    poison_and_free((unsigned char *)asking, sizeof *asking);
}

static void asking_told(struct pc_receive *receive) {
    struct asking *asking = receive->owner;
    struct state *state = asking->state;
    const struct extra *extra = &state->plan->extras[asking->extra];
    int rank = state->rank;
    counted_free(receive->header);
    receive->header = NULL;
    if (receive->state == PC_RECEIVE_HELD) {
        check(receive->ask, "a receive that does not ask is held", state->call);
        check(receive->message->nbytes == extra->nbytes, "a receive has another message", state->call);
    } else {
        check(receive->state == PC_RECEIVE_ENDED, "a receive that goes on is told", state->call);
        if (receive->status == PC_TAKEN_BACK)
            check(!clean && receive->ask, "a message was taken back", state->call);
        else if (receive->status == PC_REFUSED)
            check(!receive->ask && extra->is_offered, "a message that fits is refused", state->call);
        else if (receive->status != 0)
            check_reason(state, receive->status);
        check(receive->status < 1000 || !asking->is_here, "a message that is here went with its sender", state->call);
        counts[TAKEN_BACK] += receive->status == PC_TAKEN_BACK;
        for (size_t offset = 0; receive->status == 0 && offset < extra->nbytes; offset++)
            check(asking->memory[offset] == byte_of(state->plan, asking->extra, offset), "a byte is wrong", offset);
        check(receive->status != 0 || (receive->nbytes == extra->nbytes &&
                                       receive->source == contexts[state->context].members[extra->from]),
              "the status of a receive is wrong", state->call);
        asking_over(asking, receive->status == 0);
    }
    maybe_act(rank);
}

/* The messages of a peer that are here may be received when it is gone. */
static bool is_here(const struct state *state, const struct pc_addressed *address) {
    unsigned char header[PC_COLLECTIVE_NBYTES];
    write_address(header, state, false, address->lane, address->index);
    for (size_t number = 0; number < num_flights; number++) {
        const struct flight *flight = flights[number];
        if (flight->dest == state->rank && flight->source == (int)address->sender && flight->arrived &&
            !flight->is_lost && flight->where <= PC_KEPT && flight->times_other == 0 && !flight->released &&
            memcmp(flight->header + 1, header + 1, sizeof header - 1) == 0)
            return true;
    }
    return false;
}

static void ask(struct state *state, int number) {
    const struct extra *extra = &state->plan->extras[number];
    struct asking *asking = calloc(1, sizeof *asking);
    struct pc_receive *receive = &asking->receive;
    asking->state = state;
    asking->extra = number;
    receive->address.call = state->call;
    receive->address.lane = EXTRA_LANE;
    receive->address.sender = (uint32_t)contexts[state->context].members[extra->from];
    receive->address.index = EXTRA_INDEX + (uint32_t)number;
    receive->ask = extra->is_offered || chance(70);
    if (!clean && chance(5))
        receive->ask = false;
    receive->room = extra->nbytes;
    if (!receive->ask)
        receive->into = asking->memory = malloc(extra->nbytes + 1);
    receive->told = asking_told;
    receive->owner = asking;
    state->asked[number] = UNDER_WAY;
    state->asking[number] = asking;
    counts[ASKED]++;
    asking->is_here = is_here(state, &receive->address);
    counts[HERE] += asking->is_here && ranks[state->rank].engine.gone[receive->address.sender] != 0;
    pc_collect_start(member_of(state)->context, receive);
}

/* Take the message that a receive holds, or let it be read elsewhere, or give the receive up. */
static void go_on(struct state *state, int number) {
    struct asking *asking = state->asking[number];
    struct pc_receive *receive = &asking->receive;
    size_t nbytes = state->plan->extras[number].nbytes;
    enum pc_receive_state was = receive->state;
    if (was == PC_RECEIVE_ENDED)
        return;
    if (was == PC_RECEIVE_POSTED ? chance(5) : !clean && chance(10)) {
        counts[GIVEN_UP]++;
        check(pc_receive_give_up(receive), "a receive cannot be given up", state->call);
        asking_over(asking, false);
        return;
    }
    if (was != PC_RECEIVE_HELD && was != PC_RECEIVE_READING)
        return;
    unsigned char *old = asking->memory;
    asking->memory = malloc(nbytes + 1);
    if (was == PC_RECEIVE_HELD) {
        int error = pc_receive_into(receive, asking->memory);
        check(error == 0 || (scarce && error == -ENOMEM && receive->state == PC_RECEIVE_HELD),
              "a held message is not written", state->call);
        free(old);
        return;
    }
    pc_receive_redirect(receive, asking->memory); /* it may be told before this returns */
    poison_and_free(old, nbytes + 1);
}

/* --- messages of other calls ------------------------------------------------------------------------- */

static bool is_stray(const struct flight *flight) {
    return (flight->header[13] | flight->header[14] << 8) == STRAY_LANE;
}

/* The call of a message, as its receiver has made it. */
static struct state *receiver_of(const struct flight *flight) {
    uint64_t ident;
    uint32_t call;
    memcpy(&ident, flight->header + 1, 8);
    memcpy(&call, flight->header + 9, 4);
    int context = (int)(ident - ident_of(0));
    return &contexts[context].ranks[rank_in(context, flight->dest)].states[call];
}

static bool is_of_another_call(const struct flight *flight) {
    const struct state *state = receiver_of(flight);
    size_t skipped = PC_COLLECTIVE_NBYTES + (flight->header[0] == PC_KIND_OFFERED ? PC_OFFER_NBYTES : 0);
    char text[200] = {0};
    memcpy(text, flight->header + skipped, flight->header_nbytes - skipped);
    return strcmp(text, state->plan->signature) != 0;
}

/* Whether a message must have been given to the caller, if it is here. */
static bool must_be_other(const struct flight *flight) {
    const struct state *state = receiver_of(flight);
    return state->begun && (is_of_another_call(flight) || (state->ended && is_stray(flight)));
}

static void other_told(struct pc_receive *receive) {
    if (receive->state == PC_RECEIVE_HELD)
        return;
    check(receive->state == PC_RECEIVE_ENDED && !clean, "a receive for another call ends", 0);
    check(receive->status == PC_TAKEN_BACK || receive->status >= 1000 || receive->status == 1, "so for no reason",
          (uint64_t)receive->status);
    counted_free(receive->header);
    for (int each = 0; each < num_others; each++)
        if (others[each] == receive)
            others[each--] = others[--num_others];
    free(receive);
}

static struct pc_receive *other(struct pc_engine *engine, const struct pc_message *message) {
    int rank = (int)((struct rank *)(void *)((char *)engine - offsetof(struct rank, engine)) - ranks);
    check(message->link == &ranks[rank].link, "a message to oneself is of another call", 0);
    struct flight *flight = flight_of(message);
    check(!clean, "a message is of another call in a clean world", flight->number);
    check(flight->dest == rank && message->header_nbytes == flight->header_nbytes &&
              memcmp(message->header, flight->header, flight->header_nbytes) == 0,
          "the caller has another message", flight->number);
    if (is_refused())
        return NULL;
    const struct state *state = receiver_of(flight);
    check(must_be_other(flight) || (is_stray(flight) && state->begun), "a message of the same call goes to the caller",
          flight->number);
    check(flight->times_other++ == 0, "a message goes to the caller twice", flight->number);
    counts[is_stray(flight) ? STRAY : OTHER_CALL]++;
    struct pc_receive *receive = calloc(1, sizeof *receive);
    receive->ask = true;
    receive->told = other_told;
    check(num_others < MOST_OTHERS, "too many messages are of another call", 0);
    others[num_others++] = receive;
    return receive;
}

static void drop_other(void) {
    if (num_others == 0)
        return;
    int number = (int)below((uint64_t)num_others);
    struct pc_receive *receive = others[number];
    if (receive->state != PC_RECEIVE_HELD)
        return;
    others[number] = others[--num_others];
    pc_receive_drop(receive);
    free(receive);
}

/* A call was begun or ended: what has come for it early is where it belongs. */
static void check_early(const struct state *state) {
    for (size_t number = 0; number < num_flights; number++) {
        struct flight *flight = flights[number];
        if (!flight->arrived || flight->is_lost || receiver_of(flight) != state || !must_be_other(flight))
            continue;
        if (flight->times_other == 0 && was_scarce)
            flight->is_lost = true;
        else
            check(flight->times_other == 1, "an early message of another call is kept from the caller", number);
        counts[OTHER_EARLY]++;
    }
}

static int before_arrival(struct flight *flight) {
    const struct state *state = receiver_of(flight);
    enum openness openness = contexts[state->context].ranks[state->me].openness;
    counts[EARLY] += openness == OPEN && !state->begun;
    if (openness != OPEN)
        return openness == NEVER ? 2 : 0;
    return must_be_other(flight);
}

static void after_arrival(struct flight *flight, int known, int error) {
    check(error == 0 || (error == -ENOBUFS && known != 1) || (error == -ENOMEM && scarce), "a message is not taken",
          (uint64_t)-error);
    const struct state *state = receiver_of(flight);
    if (error != 0)
        return;
    if (known == 1)
        check(flight->times_other == 1, "a message of another call is kept from the caller", flight->number);
    enum openness openness = contexts[state->context].ranks[state->me].openness;
    counts[UNOPENED] += known == 2;
    if (openness == BROKEN || openness == CLOSED)
        flight->is_lost = true;
}

/* --- calls ------------------------------------------------------------------------------------------- */

static void begin_call(int context, int me) {
    struct member *member = &contexts[context].ranks[me];
    if (member->num_begun == contexts[context].num_calls)
        return;
    struct state *state = &member->states[member->num_begun];
    char text[200];
    int signature = snprintf(text, sizeof text, "%s", state->plan->signature);
    size_t nbytes = (size_t)signature;
    if (chance(50)) /* where it was made: that may differ */
        nbytes += 1 + (size_t)snprintf(text + nbytes + 1, 100, "%.*s%d", (int)below(50),
                                       "program.py, in a function of a rather long name, line ", me);
    char *exact = malloc(nbytes);
    memcpy(exact, text, nbytes);
    state->begun = true; /* messages of other calls may be told before this returns */
    struct pc_called *called = pc_context_begin(member->context, exact, nbytes);
    free(exact);
    state->begun = called != NULL;
    check(called != NULL || was_scarce, "a call is not begun", state->call);
    if (called == NULL)
        return;
    state->called = called;
    member->num_begun++;
    member->newest = state->plan;
    counts[CALLS]++;
    check(called->number == state->call && pc_call_find(member->context, state->call) == called,
          "a call has another number", called->number);
    check_early(state);
}

static bool is_complete(const struct state *state) {
    if (state->called == NULL || state->failed || state->offered)
        return false;
    for (int segment = 0; segment < num_runs(state->plan); segment++)
        if (state->runs[segment] != OVER)
            return false;
    for (int extra = 0; extra < state->plan->num_extras; extra++)
        if ((state->plan->extras[extra].from == state->me && state->sent[extra] != OVER) ||
            (state->plan->extras[extra].to == state->me && state->asked[extra] != OVER))
            return false;
    return true;
}

static void end_call(struct state *state) {
    struct member *member = member_of(state);
    if (reversed && member->num_begun < PC_LAST_CALLS + 2)
        return;
    for (uint32_t later = state->call + 1; reversed && later < member->num_begun; later++)
        if (is_complete(&member->states[later]))
            return;
    counts[IN_REVERSE] += state->call + 1 < member->num_begun;
    struct pc_called *called = state->called;
    state->ended = true;
    state->called = NULL;
    pc_context_end(member->context, called);
    check(member->openness != OPEN || pc_call_find(member->context, state->call) == NULL, "a call goes on",
          state->call);
    check_early(state);
}

static void check_newest(const struct member *member) {
    const struct pc_called *newest = pc_call_newest(member->context);
    check((newest == NULL) == (member->newest == NULL), "there is no newest call", member->num_begun);
    if (newest == NULL)
        return;
    check(newest->signature_nbytes == strlen(member->newest->signature) &&
              memcmp(newest->text, member->newest->signature, newest->signature_nbytes) == 0,
          "another call is the newest", member->num_begun);
}

/* --- what ranks do ----------------------------------------------------------------------------------- */

static void open_context(int context, int me) {
    struct member *member = &contexts[context].ranks[me];
    struct pc_engine *engine = &ranks[contexts[context].members[me]].engine;
    member->context =
        pc_context_open(engine, ident_of(context), contexts[context].members, (size_t)contexts[context].size, me);
    check(member->context != NULL || was_scarce, "a context is not opened", (uint64_t)context);
    if (member->context != NULL)
        member->openness = OPEN;
}

/* A context has dropped what came for it: the senders that wait are answered if it was closed, but not if it broke. */
static void check_dropped(bool closes) {
    for (size_t number = 0; number < num_flights; number++) {
        struct flight *flight = flights[number];
        if (!flight->is_dropped || flight->times_other > 0)
            continue;
        flight->is_dropped = false;
        if (flight->where == PC_WAITING && !flight->accepted && !closes)
            check(!flight->released, "a sender is answered though the context is broken", number);
        else if (flight->where != PC_WAITING || flight->accepted)
            check(!flight->known, "a message was not dropped", number);
    }
}

static void stop(int context, int me, bool closes) {
    struct member *member = &contexts[context].ranks[me];
    if (member->openness != OPEN && !(closes && member->openness == BROKEN))
        return;
    if (member->openness == OPEN)
        member->status = closes ? PC_CONTEXT_CLOSED : 1 + context;
    member->openness = closes ? CLOSED : BROKEN;
    for (size_t number = 0; number < num_flights; number++) {
        struct flight *flight = flights[number];
        const struct state *state = receiver_of(flight);
        bool came = flight->arrived && state >= member->states && state < member->states + MOST_CALLS;
        flight->is_dropped = came && flight->known && flight->times_other == 0;
        flight->is_lost = flight->is_lost || came;
    }
    counts[closes ? CLOSED_CONTEXTS : BROKEN_CONTEXTS]++;
    if (!closes) {
        struct pc_engine *engine = member->context->engine;
        pc_context_break(member->context, member->status);
        for (struct pc_message *each = engine->abandoned.first; each != NULL; each = each->next)
            counts[ABANDONED]++;
        check_dropped(false);
        return;
    }
    struct pc_context *closed = member->context;
    member->context = NULL;
    for (int call = 0; call < MOST_CALLS; call++)
        member->states[call].called = NULL;
    pc_context_close(closed);
    check_dropped(true);
    for (int call = 0; call < MOST_CALLS; call++)
        for (int segment = 0; segment < MOST_SEGMENTS; segment++) {
            bool goes_on = member->states[call].running[segment] != NULL;
            check(!goes_on || !dry, "a run has outlived its context", (uint64_t)call);
            counts[ENDED_PENDING] += goes_on;
        }
}

/* Do one of the things that belong to a call. */
static void act_in(struct state *state) {
    int number = (int)below(4);
    if (chance(50) && do_some_asked(state))
        return;
    bool may_start = !(state->failed || state->offered);
    if (number < num_runs(state->plan) && state->runs[number] == NOT_YET && may_start) {
        if (state->plan->offerer == state->me && num_runs(state->plan) == 1)
            offer(state);
        else
            start_run(state, number);
        return;
    }
    if (state->plan->stray_from == state->me && !state->stray_sent) {
        send_stray(state);
        return;
    }
    number = (int)below(MOST_EXTRAS);
    if (number < state->plan->num_extras) {
        const struct extra *extra = &state->plan->extras[number];
        bool sends = extra->from == state->me && state->sent[number] == NOT_YET;
        bool receives = extra->to == state->me;
        if (sends && (!receives || chance(50))) {
            send_extra(state, number);
            return;
        }
        if (receives && state->asked[number] == NOT_YET && (clean || !state->failed)) {
            ask(state, number);
            return;
        }
        if (receives && state->asked[number] == UNDER_WAY) {
            go_on(state, number);
            return;
        }
    }
    if (is_complete(state))
        end_call(state);
}

/* Start all runs that may start, and stop their context at once: what came early is not told yet in a callback. */
static void start_and_stop(int context, int me) {
    struct member *member = &contexts[context].ranks[me];
    if (!ranks[contexts[context].members[me]].engine.telling || member->openness != OPEN)
        return;
    for (uint32_t call = 0; call < member->num_begun; call++)
        for (int segment = 0; segment < num_runs(member->states[call].plan); segment++) {
            struct state *state = &member->states[call];
            if (state->called != NULL && !state->failed && !state->offered && state->runs[segment] == NOT_YET)
                start_run(state, segment);
        }
    stop(context, me, chance(60));
}

/* Send, or ask for, all messages beside the runs for which that was not done yet. */
static void send_or_ask_for_all(int rank, bool asks) {
    for (int context = 0; context < num_contexts; context++) {
        int me = rank_in(context, rank);
        for (uint32_t call = 0; me != NOBODY && call < contexts[context].ranks[me].num_begun; call++)
            for (int number = 0; number < MOST_EXTRAS; number++) {
                struct state *state = &contexts[context].ranks[me].states[call];
                const struct extra *extra = &state->plan->extras[number];
                if (state->called == NULL || state->failed || number >= state->plan->num_extras)
                    continue;
                if (asks && extra->to == me && state->asked[number] == NOT_YET)
                    ask(state, number);
                else if (!asks && extra->from == me && state->sent[number] == NOT_YET)
                    send_extra(state, number);
            }
    }
}

static void begin_all(int rank) {
    for (int context = 0; context < num_contexts; context++) {
        int me = rank_in(context, rank);
        for (uint32_t turn = 0; me != NOBODY && turn < contexts[context].num_calls; turn++)
            if (contexts[context].ranks[me].openness == OPEN)
                begin_call(context, me);
    }
}

/* A rank hears that another one is gone, which has sent all that it could. */
static void forget(int rank, int peer) {
    struct pc_engine *engine = &ranks[rank].engine;
    if (peer == rank || engine->gone[peer] != 0)
        return;
    counts[FORGOTTEN]++;
    if (!engine->telling && !ranks[peer].engine.telling) {
        begin_all(rank);
        begin_all(peer);
        send_or_ask_for_all(peer, false);
        for (int turn = 0; turn < 100; turn++)
            (void)progress();
    }
    if (engine->gone[peer] == 0)
        pc_engine_forget(engine, peer, 1000 + peer);
    send_or_ask_for_all(rank, true);
}

/* What goes wrong. */
static void spoil(int rank) {
    int context = (int)below((uint64_t)num_contexts), me = rank_in(context, rank);
    uint64_t what = below(100);
    if (me == NOBODY)
        return;
    struct member *member = &contexts[context].ranks[me];
    if (what < 4) {
        stop(context, me, true);
    } else if (what < 7) {
        stop(context, me, false);
    } else if (what < 18) {
        forget(rank, (int)below((uint64_t)num_ranks));
    } else if (what < 31) {
        start_and_stop(context, me);
    } else if (what < 45 && sendings != NULL) {
        struct sending *sending = sendings;
        if (sending->send.context == NULL || sending->send.context->engine != &ranks[rank].engine)
            return;
        if ((chance(70) || pc_send_stop(&sending->send)) && pc_send_take_back(&sending->send)) {
            sending->send.status = 1;
            sending_over(sending);
        }
    } else {
        uint32_t call = (uint32_t)below(MOST_CALLS);
        for (int segment = 0; call < member->num_begun && segment < MOST_SEGMENTS; segment++)
            if (member->states[call].running[segment] != NULL && chance(70))
                cancel_run(&member->states[call], segment);
    }
}

/* The newest call must be known when all others have ended after it. */
static bool may_begin(const struct member *member) {
    if (!reversed || member->num_begun != PC_LAST_CALLS + 2)
        return true;
    for (uint32_t call = 0; call < member->num_begun; call++)
        if (member->states[call].called != NULL)
            return false;
    return true;
}

static void act(int rank) {
    int context = (int)below((uint64_t)num_contexts), me = rank_in(context, rank);
    if (chance(spoils)) {
        spoil(rank);
        return;
    }
    if (me == NOBODY)
        return;
    struct member *member = &contexts[context].ranks[me];
    if (member->openness == NEVER) {
        if (chance(20))
            open_context(context, me);
        return;
    }
    if (!clean)
        drop_other();
    if (member->openness == CLOSED || (member->openness == BROKEN && chance(80)))
        return;
    if (may_begin(member) && (chance(15) || member->num_begun == 0)) {
        begin_call(context, me);
        return;
    }
    uint32_t first = (uint32_t)below(member->num_begun);
    for (uint32_t turn = 0; turn < member->num_begun; turn++) {
        struct state *state = &member->states[(first + turn) % member->num_begun];
        if (state->called == NULL)
            continue;
        act_in(state);
        break;
    }
    if (member->openness == OPEN)
        check_newest(member);
}

/* No rank of this job sends this: nothing happens. */
static void send_nonsense(int rank) {
    unsigned char *header = malloc(PC_COLLECTIVE_NBYTES + PC_OFFER_NBYTES);
    bool is_offered = chance(50);
    size_t nbytes = 1 + below(PC_COLLECTIVE_NBYTES - 1 + (is_offered ? PC_OFFER_NBYTES : 0));
    uint64_t ident = ident_of((int)below((uint64_t)num_contexts));
    memset(header, 0, PC_COLLECTIVE_NBYTES + PC_OFFER_NBYTES);
    header[0] = is_offered ? PC_KIND_OFFERED : PC_KIND_COLLECTIVE;
    memcpy(header + 1, &ident, 8);
    unsigned char *exact = malloc(nbytes);
    memcpy(exact, header, nbytes);
    struct pc_incoming incoming = {
        .peer = (rank + 1) % num_ranks, .header = exact, .header_nbytes = nbytes, .where = PC_WAITING};
    struct pc_message *message;
    int error = pc_arrived(&ranks[rank].engine, &ranks[rank].link, &incoming, &message);
    check(error == -EPROTO && message == NULL, "nonsense is taken for a message", nbytes);
    counts[NONSENSE]++;
    free(header);
    free(exact);
}

/* Nor this: a message of which there is one of the same address already. */
static void send_again(void) {
    if (num_flights == 0)
        return;
    const struct flight *flight = flights[below(num_flights)];
    const struct state *state = receiver_of(flight);
    if (!flight->arrived || flight->is_lost || state->begun || member_of(state)->openness != OPEN)
        return;
    struct pc_engine *engine = &ranks[flight->dest].engine;
    struct pc_incoming incoming = {.peer = flight->source,
                                   .header = flight->header,
                                   .header_nbytes = flight->header_nbytes,
                                   .where = PC_WAITING};
    struct pc_message *message;
    int error = pc_arrived(engine, &ranks[flight->dest].link, &incoming, &message);
    check((error == -EPROTO || (scarce && error == -ENOMEM)) && message == NULL, "two messages have one address",
          flight->number);
    counts[SENT_AGAIN]++;
}

/* --- worlds ------------------------------------------------------------------------------------------ */

/* A run that goes on waits for somebody, and opens no more receives than it may. */
static void check_runs(void) {
    for (int context = 0; context < num_contexts; context++)
        for (int me = 0; me < contexts[context].size; me++)
            for (uint32_t call = 0; call < contexts[context].ranks[me].num_begun; call++)
                for (int segment = 0; segment < MOST_SEGMENTS; segment++) {
                    const struct state *state = &contexts[context].ranks[me].states[call];
                    if (state->running[segment] == NULL)
                        continue;
                    int awaited[64];
                    size_t count = pc_run_awaited(&state->running[segment]->run, awaited, 64);
                    check(count > 0 || owes(state->running[segment]), "a run waits for nobody", call);
                    for (size_t each = 0; each < count; each++)
                        check(rank_in(context, awaited[each]) != NOBODY && awaited[each] != state->rank,
                              "a run waits for a stranger", (uint64_t)awaited[each]);
                    for (size_t each = 0; each < count; each++)
                        check(ranks[state->rank].engine.gone[awaited[each]] == 0, "a run waits for one who is gone",
                              (uint64_t)awaited[each]);
                    const struct pc_schedule *table = state->running[segment]->run.table;
                    bool only_reduces = true;
                    for (uint32_t step = 0; step < table->num_steps; step++)
                        only_reduces = only_reduces && (table->steps[step].kind == PC_STEP_RECV_SCRATCH ||
                                                        table->steps[step].kind == PC_STEP_REDUCE);
                    check(!only_reduces || count <= PC_RUN_WINDOW, "too many receives are open", count);
                    check(pc_run_awaited(&state->running[segment]->run, awaited, 1) == (count > 0),
                          "too many ranks are told", call);
                }
}

static void make_context(int context) {
    memset(&contexts[context], 0, sizeof contexts[context]);
    int pool[RANKS], left = num_ranks;
    for (int rank = 0; rank < num_ranks; rank++)
        pool[rank] = rank;
    contexts[context].size = 1 + (int)below((uint64_t)num_ranks);
    if (contexts[context].size < num_ranks && chance(60))
        contexts[context].size = num_ranks;
    for (int member = 0; member < contexts[context].size; member++) {
        int drawn = (int)below((uint64_t)left);
        contexts[context].members[member] = pool[drawn];
        pool[drawn] = pool[--left];
    }
    contexts[context].num_calls = 1 + (uint32_t)below(clean ? 5 : 8);
    if (reversed)
        contexts[context].num_calls = MOST_CALLS;
    for (uint32_t call = 0; call < contexts[context].num_calls; call++) {
        make_plan(&contexts[context].plans[call], context, call, false);
        make_plan(&contexts[context].others[call], context, call, true);
        bool differs = !clean && !is_same_call(&contexts[context].plans[call], &contexts[context].others[call]);
        contexts[context].other_maker[call] =
            differs && chance(15) ? (int)below((uint64_t)contexts[context].size) : NOBODY;
        for (int me = 0; me < contexts[context].size; me++) {
            struct state *state = &contexts[context].ranks[me].states[call];
            state->rank = contexts[context].members[me];
            state->context = context;
            state->me = me;
            state->lost = NOBODY;
            state->call = call;
            state->plan = me == contexts[context].other_maker[call] ? &contexts[context].others[call]
                                                                   : &contexts[context].plans[call];
        }
    }
}

static bool all_done(void) {
    for (int context = 0; context < num_contexts; context++)
        for (int me = 0; me < contexts[context].size; me++)
            for (uint32_t call = 0; call < contexts[context].num_calls; call++)
                if (!contexts[context].ranks[me].states[call].ended)
                    return false;
    return true;
}

static void check_end(int rank) {
    struct pc_engine *engine = &ranks[rank].engine;
    size_t num_outside = engine->num_unopened;
    for (struct pc_message *each = engine->abandoned.first; each != NULL; each = each->next)
        num_outside++;
    check(engine->num_messages == num_outside, "messages are left", engine->num_messages);
    check(!clean || num_outside == 0, "messages are left in a clean world", num_outside);
    check(engine->endings == NULL && engine->depth == 0, "something was not told", 0);
    pc_engine_free(engine);
}

static void finish(void) {
    quiet = true;
    scarce = false;
    for (int rank = 0; rank < num_ranks; rank++)
        for (int peer = 0; peer < num_ranks; peer++)
            if (ranks[peer].engine.gone[rank] != 0)
                pc_engine_forget(&ranks[rank].engine, peer, 1000 + peer);
    for (int turn = 0; turn < 100000 && (progress() || do_all_asked()); turn++)
        check_runs();
    while (num_others > 0)
        drop_other();
    dry = true;
    for (int context = 0; context < num_contexts; context++)
        for (int me = 0; me < contexts[context].size; me++)
            stop(context, me, true);
    for (int rank = 0; rank < num_ranks; rank++)
        pc_context_break(ranks[rank].engine.others, 1);
    for (int turn = 0; turn < 100000 && progress(); turn++)
        ;
    check(sendings == NULL, "a send has never ended", 0);
    for (int context = 0; context < num_contexts; context++)
        for (int me = 0; me < contexts[context].size; me++)
            for (uint32_t call = 0; call < contexts[context].num_calls; call++) {
                struct state *state = &contexts[context].ranks[me].states[call];
                for (int each = 0; each < MOST_EXTRAS; each++)
                    check(state->asking[each] == NULL && state->running[each] == NULL, "something has never ended",
                          call);
                state->failed = true;
                if (state->source != NULL)
                    free_memory(state);
            }
    for (int rank = 0; rank < num_ranks; rank++)
        check_end(rank);
    free_flights();
    check(allocated == 0, "memory of the engine is left", (uint64_t)allocated);
}

static void world(void) {
    memset(ranks, 0, sizeof ranks);
    quiet = scarce = dry = false;
    sendings = NULL;
    num_others = 0;
    clean = chance(40);
    reversed = chance(10);
    was_scarce = !clean && chance(30);
    spoils = clean ? 0 : chance(50) ? 3 : 20;
    counts[CLEAN_WORLDS] += clean;
    num_ranks = 1 + (int)below(MOST_RANKS);
    if (num_ranks == 1 && chance(80))
        num_ranks = 2;
    num_contexts = 1 + (int)below(CONTEXTS);
    for (int context = 0; context < num_contexts; context++)
        make_context(context);
    for (int number = 0; number < num_ranks; number++) {
        struct rank *rank = &ranks[number];
        for (int peer = 0; peer < num_ranks; peer++)
            rank->links[peer] = peer == number ? &rank->self : &rank->link;
        rank->engine =
            (struct pc_engine){.size = num_ranks, .links = rank->links, .other = other, .matches_calls = true};
        check(pc_engine_open(&rank->engine) == 0, "an engine cannot be opened", 0);
        pc_link_self(&rank->self, &rank->engine);
        rank->link = (struct pc_link){&test_ops, &rank->engine};
    }
    int acts = 15 + (int)below(60), most = clean ? 200000 : 1500;
    for (int step = 0; step < most && !(clean && all_done()); step++) {
        scarce = was_scarce && step / 64 % 2 == 1;
        if (chance(acts))
            act((int)below((uint64_t)num_ranks));
        else if (below(200) == 0 && num_ranks > 1)
            send_nonsense((int)below((uint64_t)num_ranks));
        else if (below(20) == 0)
            send_again();
        else
            (void)progress();
        check_runs();
    }
    check(!clean || all_done(), "a clean world does not end", 0);
    finish();
}

int main(int argc, char **argv) {
    check(argc > 1, "the tables are missing", 0);
    read_tables(argv[1]);
    uint64_t worlds = argc > 2 ? strtoull(argv[2], NULL, 10) : 100;
    uint64_t first = argc > 3 ? strtoull(argv[3], NULL, 10) : 1;
    for (seed = first; seed < first + worlds; seed++) {
        random_state = seed * 0x9E3779B97F4A7C15u + 1;
        world();
    }
    for (int count = 0; count < COUNTS; count++)
        printf("%s%s %llu", count > 0 ? ", " : "", names[count], (unsigned long long)counts[count]);
    printf("\n");
    return 0;
}
