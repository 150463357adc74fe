/* The calls of run_random.c: plans, which all ranks of a call share, memory, and runs. */
#ifndef PYCOLL_RUN_CALLS_H
#define PYCOLL_RUN_CALLS_H

#include "run_tables.h"

#define CONTEXTS 3
#define MOST_CALLS 24
#define MOST_SEGMENTS 3
#define MOST_EXTRAS 3
#define MOST_ELEMENTS 300
#define EXTRA_SUBCALL 0x8123
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
    uint16_t subcall;
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

static struct member *member_of(const struct state *state) {
    return &contexts[state->context].ranks[state->me];
}

static size_t itemsize_of(const struct plan *plan) { return plan->sums ? 4 : 8; }

/* --- plans ------------------------------------------------------------------------------------ */

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
                plan->lengths[rank][chunk] = plan->lengths[chunk][size + rank] =
                    some_length(plan, mode);
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
    *plan = (struct plan){.number = (seed * 8 + (uint64_t)context) * 128 + call * 2 + is_other,
                          .granule = 1};
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
    plan->subcall = chance(50) ? 0 : (uint16_t)below(600);
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

/* --- memory ----------------------------------------------------------------------------------- */

static const struct schedule *schedule_of(const struct state *state) {
    return &state->plan->program->by_rank[state->me];
}

/* Place the chunks in random order, some of them apart, and write what this rank contributes. */
static void place(struct state *state) {
    const struct plan *plan = state->plan;
    const struct schedule *schedule = schedule_of(state);
    int count = plan->program->num_chunks, turn = (int)below((uint64_t)count),
        gap = chance(50) ? 40 : 0;
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
        for (size_t element = 0;
             element < (state->places[chunk].source >= 0 ? plan->lengths[state->me][chunk] : 0);
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
                plan->program->algorithm, plan->program->size, plan->program->root, state->me,
                chunk);
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
    check(memcmp(state->source, state->before, state->nbytes + 1) == 0,
          "a run writes where nothing belongs", state->call);
    for (size_t at = 0; !state->in_place && at <= state->nbytes; at++)
        check(state->target[at] == POISON, "a run writes outside of its target", at);
    if (!state->in_place)
        free(state->target);
    poison_and_free(state->source, state->nbytes + 1);
    free(state->before);
    state->source = state->target = state->before = NULL;
}

static int num_runs(const struct plan *plan) {
    return plan->num_segments > 1 ? plan->num_segments : 1;
}

static bool uses_memory(const struct state *state) {
    for (int segment = 0; segment < num_runs(state->plan); segment++)
        if (state->runs[segment] == UNDER_WAY ||
            (state->runs[segment] == NOT_YET && !state->failed))
            return true;
    return false;
}

/* --- why things end --------------------------------------------------------------------------- */

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
        check(status - 1000 < RANKS && ranks[state->rank].engine.gone[status - 1000] == status,
              "a peer is not gone", (uint64_t)status);
        check(rank_in(state->context, status - 1000) != NOBODY, "a peer is not of the context",
              (uint64_t)status);
    } else {
        check(status != 0 && status == member->status, "something ends for no reason",
              (uint64_t)-status);
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
        if ((step->kind != PC_STEP_RECV && step->kind != PC_STEP_RECV_SCRATCH) ||
            (int)step->other != from)
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
            uint16_t subcall = (uint16_t)(flight->header[13] | flight->header[14] << 8);
            uint32_t index, call;
            uint64_t ident;
            memcpy(&ident, flight->header + 1, 8);
            memcpy(&call, flight->header + 9, 4);
            memcpy(&index, flight->header + 15, 4);
            if (flight->source == run->from && flight->dest == state->rank &&
                ident == ident_of(state->context) && call == state->call &&
                subcall == run->subcall && index == step->index &&
                flight->nbytes == run->came && flight->arrived &&
                (run->came != nbytes || flight->header[0] == PC_KIND_OFFERED)) {
                counts[OFFERED] += flight->header[0] == PC_KIND_OFFERED;
                check(flight->where != PC_WAITING || !flight->released,
                      "the sender of a refused message is answered", number);
                return;
            }
        }
    }
    check(false, "a run has refused what was not sent", state->call);
}

/* --- runs ------------------------------------------------------------------------------------- */

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

#include "run_asks.h" /* its runs call the functions above, those below call it */

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
    run->subcall = (uint16_t)(plan->subcall + segment);
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
#endif
