/* Runs of run_random.c that ask their owner for steps: reductions, the receive of what is offered,
   and external steps in the place of copies to and from another memory. A *pull* writes the value
   of a chunk to its source, which has none before; a *push* looks at the value of a chunk when no
   step uses it any more. Some let their chunks be as long as they come. */

/* A message that was offered to a run, and is being read. */
struct taking {
    struct pc_receive receive;
    struct running *running; /* NULL: it is over */
    uint32_t position;
    unsigned char *memory;
    size_t nbytes;
    struct taking *next;
};

enum external { PULL, PUSH };

struct asked {
    struct pc_schedule table;
    struct pc_step *steps;
    uint32_t *chunks, *successors;
    uint32_t num_external;
    enum external kinds[2 * MOST_CHUNKS];
    int external_chunks[2 * MOST_CHUNKS];
    bool begun[2 * MOST_CHUNKS], is_done[2 * MOST_CHUNKS];
    bool is_pulled[MOST_CHUNKS]; /* its source has its value again */
    struct pc_chunk_place places[MOST_CHUNKS];
    struct pc_grown grown[MOST_CHUNKS];
    struct iovec parts[MOST_CHUNKS][2];
    unsigned char *own;
    struct taking *takings;
    bool asks_last;
};

static size_t total(const struct running *running, int chunk) {
    return running->state->places[chunk].nbytes;
}

/* --- tables ----------------------------------------------------------------------------------- */

static bool uses_chunk(const struct pc_schedule *table, const struct pc_step *step,
                       uint32_t chunk) {
    if (step->kind == PC_STEP_RECV_SCRATCH)
        return false;
    for (uint32_t each = 0; each < step->num_chunks; each++)
        if (table->chunks[step->chunks + each] == chunk)
            return true;
    return step->kind == PC_STEP_COPY && step->other == chunk;
}

static void add_external(struct asked *asked, enum external kind, int chunk) {
    asked->kinds[asked->num_external] = kind;
    asked->external_chunks[asked->num_external++] = chunk;
}

/* The same schedule with external steps before it. */
static void write_table(struct asked *asked, const struct pc_schedule *from) {
    uint32_t added = asked->num_external, most = 0;
    for (uint32_t step = 0; step < from->num_steps; step++)
        most += from->steps[step].num_successors + added;
    asked->steps = calloc(from->num_steps + added + 1, sizeof *asked->steps);
    asked->successors =
        calloc(most + (size_t)added * from->num_steps + 1, sizeof *asked->successors);
    uint32_t followed = 0;
    for (uint32_t step = 0; step < from->num_steps; step++)
        asked->steps[added + step] = from->steps[step];
    for (uint32_t position = 0; position < added; position++) {
        struct pc_step *step = &asked->steps[position];
        uint32_t chunk = (uint32_t)asked->external_chunks[position];
        *step = (struct pc_step){.kind = PC_STEP_EXTERNAL, .at_end = asked->kinds[position] == PUSH,
                                 .successors = followed};
        for (uint32_t later = 0; asked->kinds[position] == PULL && later < from->num_steps; later++)
            if (uses_chunk(from, &from->steps[later], chunk)) {
                asked->successors[followed++] = added + later;
                asked->steps[added + later].waits++;
            }
        step->num_successors = followed - step->successors;
    }
    for (uint32_t number = 0; number < from->num_steps; number++) {
        struct pc_step *step = &asked->steps[added + number];
        step->successors = followed;
        for (uint32_t each = 0; each < from->steps[number].num_successors; each++)
            asked->successors[followed++] =
                added + from->successors[from->steps[number].successors + each];
        for (uint32_t position = 0; position < added; position++)
            if (asked->kinds[position] == PUSH &&
                uses_chunk(from, &from->steps[number],
                           (uint32_t)asked->external_chunks[position])) {
                asked->successors[followed++] = position;
                asked->steps[position].waits++;
            }
        step->num_successors = followed - step->successors;
    }
    asked->table = (struct pc_schedule){from->num_steps + added, from->num_chunks, asked->steps,
                                        from->chunks, asked->successors};
}

/* Whether all messages are of one chunk, which nothing else uses: then nobody need know how long
   they are. */
static bool can_grow(const struct pc_schedule *table) {
    for (uint32_t position = 0; position < table->num_steps; position++) {
        const struct pc_step *step = &table->steps[position];
        if ((step->kind != PC_STEP_SEND && step->kind != PC_STEP_RECV) || step->num_chunks != 1)
            return false;
    }
    return true;
}

static void run_asked(struct pc_run *run) { (void)run; }

/* Before a run is started. */
static void ask_for_steps(struct running *running) {
    struct state *state = running->state;
    const struct schedule *schedule = schedule_of(state);
    struct asked *asked = running->asked = calloc(1, sizeof *asked);
    struct pc_run *run = &running->run;
    bool is_whole = state->plan->num_segments <= 1;
    run->asked = run_asked;
    if (chance(60))
        run->reduction.combine = NULL;
    memcpy(asked->places, state->places, sizeof asked->places);
    bool grows =
        is_whole && state->lost == NOBODY && !state->in_place && can_grow(run->table) && chance(70);
    for (int chunk = 0; chunk < state->plan->program->num_chunks; chunk++) {
        struct pc_chunk_place *place = &asked->places[chunk];
        asked->is_pulled[chunk] = true;
        if (grows && place->source < 0) {
            counts[GROWN]++;
            place->nbytes = PC_UNKNOWN;
            place->target = -1;
        } else if (grows && place->nbytes > 1) {
            size_t first = below(place->nbytes);
            unsigned char *start = state->source + place->source;
            asked->parts[chunk][0] = (struct iovec){start, first};
            asked->parts[chunk][1] = (struct iovec){start + first, place->nbytes - first};
            place->parts = asked->parts[chunk];
            place->num_parts = 2;
        }
        if (is_whole && !grows && place->source >= 0 && chance(40)) {
            add_external(asked, PULL, chunk);
            asked->is_pulled[chunk] = false;
            memset(state->source + place->source, 0x3C, place->nbytes);
        }
        if (is_whole && !grows && place->target >= 0 && schedule->tokens[chunk][0] != UNWRITTEN &&
            chance(40))
            add_external(asked, PUSH, chunk);
    }
    run->places = asked->places;
    if (grows)
        run->grown = asked->grown;
    counts[EXTERNAL] += asked->num_external > 0;
    if (asked->num_external > 0) {
        write_table(asked, run->table);
        run->table = &asked->table;
    }
}

static void pull(struct state *state, struct asked *asked, int chunk) {
    const struct pc_chunk_place *place = &state->places[chunk];
    asked->is_pulled[chunk] = true;
    memcpy(state->source + place->source, state->before + place->source, place->nbytes);
}

/* A run has ended, or was cancelled; nothing more of it is asked for. */
static void asked_over(struct running *running, bool failed) {
    struct asked *asked = running->asked;
    struct state *state = running->state;
    struct pc_engine *engine = &ranks[state->rank].engine;
    const int chunks = state->plan->program->num_chunks;
    running->asked = NULL;
    for (struct taking *taking = asked->takings; taking != NULL; taking = taking->next)
        taking->running = NULL;
    for (uint32_t external = 0; external < asked->num_external && !failed; external++)
        check(asked->is_done[external], "a run ends before a step of it", external);
    for (int chunk = 0; chunk < chunks; chunk++) {
        const struct pc_chunk_place *place = &state->places[chunk];
        struct pc_grown *grown = &asked->grown[chunk];
        const int *token = schedule_of(state)->tokens[chunk];
        bool is_grown = asked->places[chunk].nbytes == PC_UNKNOWN &&
                        schedule_of(state)->num_tokens[chunk] > 0 && *token != UNWRITTEN;
        bool is_known = is_grown && !failed && state->plan->liar == NOBODY;
        if (!asked->is_pulled[chunk])
            pull(state, asked, chunk);
        if (is_known) {
            check(grown->nbytes == place->nbytes, "a chunk has another length", grown->nbytes);
            memcpy(state->target + place->target, grown->memory,
                   grown->nbytes); /* where it is looked at */
        } else if (is_grown) {
            state->failed = true; /* nothing was written there */
        }
        pc_engine_give_scratch(engine, grown->memory);
    }
    pc_engine_give_scratch(engine, asked->own);
    free(asked->steps);
    free(asked->successors);
    free(asked);
}

/* --- doing what is asked ---------------------------------------------------------------------- */

static unsigned char *value_of(struct running *running, uint32_t chunk) {
    struct pc_run *run = &running->run;
    const struct pc_chunk_place *place = &run->places[chunk];
    size_t own_at = 0, begin = 0;
    for (uint32_t number = 0; number <= chunk; number++) {
        size_t units = total(running, (int)number) / run->granule, first = 0,
               last = total(running, (int)number);
        if (run->num_segments > 1) {
            first = units * run->segment / run->num_segments * run->granule;
            last = units * (run->segment + 1) / run->num_segments * run->granule;
        }
        begin = first;
        own_at += number < chunk ? last - first : 0;
    }
    switch (pc_run_where(run, chunk)) {
    case PC_VALUE_AT_SOURCE:
        return (unsigned char *)run->source + place->source + begin;
    case PC_VALUE_AT_TARGET:
        return (unsigned char *)run->target + place->target + begin;
    case PC_VALUE_IN_OWN:
        if (running->asked->own == NULL)
            running->asked->own = pc_run_take_own(run);
        return running->asked->own + own_at;
    default:
        check(false, "a chunk has no value", chunk);
        return NULL;
    }
}

static size_t length_of(const struct running *running, uint32_t chunk) {
    const struct pc_run *run = &running->run;
    size_t nbytes = total(running, (int)chunk), units = nbytes / run->granule;
    if (run->num_segments <= 1)
        return nbytes;
    return (units * (run->segment + 1) / run->num_segments -
            units * run->segment / run->num_segments) *
           run->granule;
}

/* False: there is no memory. */
static bool combine_asked(struct running *running, uint32_t position) {
    struct pc_run *run = &running->run;
    const struct pc_step *step = &run->table->steps[position];
    size_t nbytes, itemsize = itemsize_of(running->state->plan), at = 0;
    unsigned char *incoming = pc_run_take_incoming(run, position, &nbytes);
    for (uint32_t each = 0; each < step->num_chunks; each++) {
        uint32_t chunk = run->table->chunks[step->chunks + each];
        unsigned char *own = value_of(running, chunk);
        if (!pc_run_place(run, chunk)) {
            check(was_scarce, "there was memory for a chunk", chunk);
            pc_engine_give_scratch(run->engine, incoming);
            return false;
        }
        unsigned char *out = value_of(running, chunk);
        const void *operands[2] = {step->incoming_first ? incoming + at : own,
                                   step->incoming_first ? own : incoming + at};
        size_t length = length_of(running, chunk);
        if (length > 0 && running->state->plan->program->lengths != EMPTY)
            (running->state->plan->sums ? combine_sums : combine_affine)(out, operands, 2,
                                                                         length / itemsize, 1);
        at += length;
    }
    check(at == nbytes, "what has come for a reduction has another length", nbytes);
    pc_engine_give_scratch(run->engine, incoming);
    return true;
}

static void taking_over(struct taking *taking) {
    free(taking->memory);
    counted_free(taking->receive.header);
    poison_and_free((unsigned char *)taking, sizeof *taking);
}

/* What was offered goes to the chunks of its step. False: it is not as long as they are. */
static bool fill(struct running *running, uint32_t position, const unsigned char *memory,
                 size_t nbytes) {
    const struct pc_run *run = &running->run;
    const struct pc_step *step = &run->table->steps[position];
    size_t at = 0;
    for (uint32_t each = 0; each < step->num_chunks; each++) {
        uint32_t chunk = run->table->chunks[step->chunks + each];
        size_t length = length_of(running, chunk);
        if (at + length <= nbytes)
            memcpy(value_of(running, chunk), memory + at, length);
        at += length;
    }
    return at == nbytes;
}

static void taking_told(struct pc_receive *receive) {
    struct taking *taking = receive->owner;
    struct running *running = taking->running;
    uint32_t position = taking->position;
    int status = receive->status;
    bool fits = false;
    if (receive->state != PC_RECEIVE_ENDED)
        return;
    if (running != NULL) {
        struct taking **at = &running->asked->takings;
        while (*at != taking)
            at = &(*at)->next;
        *at = taking->next;
        fits = status == 0 && fill(running, position, taking->memory, taking->nbytes);
    }
    taking_over(taking);
    if (running == NULL)
        return;
    if (status == PC_TAKEN_BACK) {
        pc_run_wait_again(&running->run, position);
    } else if (!fits) {
        cancel_run(running->state, running->segment);
    } else {
        counts[LENT_TO_RUNS]++;
        pc_run_step_done(&running->run, position);
    }
}

static void take_offered(struct running *running, uint32_t position) {
    struct pc_receive *held = pc_run_held(&running->run, position);
    if (held == NULL)
        return;
    struct taking *taking = calloc(1, sizeof *taking);
    taking->running = running;
    taking->position = position;
    taking->receive = (struct pc_receive){.ask = true, .notify = taking_told, .owner = taking};
    taking->next = running->asked->takings;
    running->asked->takings = taking;
    pc_receive_take_over(&taking->receive, held);
    pc_run_taken(&running->run, position);
    taking->nbytes = taking->receive.message->nbytes;
    taking->memory = malloc(taking->nbytes + 1);
    if (pc_receive_into(&taking->receive, taking->memory) < 0) /* its memory is scarce */
        cancel_run(running->state, running->segment);
}

/* Do the next step that a run asks for, or end one that was begun; whether there was one. */
static bool do_asked(struct running *running) {
    struct asked *asked = running->asked;
    struct pc_run *run = &running->run;
    if (asked == NULL)
        return false;
    uint32_t position = pc_run_next_asked(run);
    for (uint32_t external = 0; position == PC_NO_STEP && external < asked->num_external;
         external++) {
        if (!asked->begun[external] || asked->is_done[external] ||
            (asked->kinds[external] == PUSH && !asked->asks_last))
            continue;
        int chunk = asked->external_chunks[external];
        if (asked->kinds[external] == PULL)
            pull(running->state, asked, chunk);
        else
            pc_run_settle(run, (uint32_t)chunk);
        if (asked->kinds[external] == PUSH && running->state->lost == NOBODY &&
            !running->state->failed)
            check_target(running->state, chunk);
        asked->is_done[external] = true;
        pc_run_step_done(run, external);
        return true;
    }
    if (position == PC_NO_STEP)
        return false;
    if (position == PC_LAST_STEPS) {
        check(!asked->asks_last, "the ends of the last steps are asked for twice", run->left);
        check(run->left == run->num_at_end,
              "the ends of the last steps are asked for before others are done", run->left);
        asked->asks_last = true;
    } else if (run->table->steps[position].kind == PC_STEP_EXTERNAL) {
        check(!asked->begun[position], "a step is asked for twice", position);
        asked->begun[position] = true;
    } else if (run->table->steps[position].kind == PC_STEP_REDUCE) {
        counts[ASKED_REDUCTIONS]++;
        if (combine_asked(running, position))
            pc_run_step_done(run, position);
        else
            cancel_run(running->state, running->segment);
    } else {
        take_offered(running, position);
    }
    return true;
}

static bool do_some_asked(struct state *state) {
    for (int segment = 0; segment < MOST_SEGMENTS; segment++)
        if (state->running[segment] != NULL && do_asked(state->running[segment]))
            return true;
    return false;
}

static bool do_all_asked(void) {
    bool any = false;
    for (int context = 0; context < num_contexts; context++)
        for (int me = 0; me < contexts[context].size; me++)
            for (uint32_t call = 0; call < contexts[context].num_calls; call++)
                any |= do_some_asked(&contexts[context].ranks[me].states[call]);
    return any;
}

/* Whether a run waits for its owner. */
static bool owes(const struct running *running) {
    const struct asked *asked = running->asked;
    if (asked == NULL)
        return false;
    bool any = running->run.first_asked != running->run.last_asked || asked->takings != NULL;
    for (uint32_t external = 0; external < asked->num_external; external++)
        any |= asked->begun[external] && !asked->is_done[external];
    return any;
}
