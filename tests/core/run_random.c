/* Random collectives (transports/_core/engine/calls.c and run.c) of engines that are joined by the
   link of run_link.h, all in one thread, so that a seed always does the same.

   Ranks open contexts, begin calls, start what belongs to them and end them in whatever order,
   several at a time. A call is one of pycoll's algorithms with chunks of random lengths, perhaps in
   segments; beside its runs there are messages by `pc_collect_start`, asked for or not. Some runs
   ask for steps (run_asks.h). In clean worlds all must end well. In others ranks make another call,
   or chunks of other lengths, send what nobody expects, offer what a run waits for, cancel, forget
   each other, break and close contexts, at any moment, also out of callbacks. Every run that ends
   well must have what the proof of its algorithm says, every other one must have a reason, and a
   message of another call must reach the caller.

   What a run uses is freed as soon as it ends (AddressSanitizer sees who touches it), and nothing
   of the engine's memory may be left.

   run_random TABLES WORLDS SEED

   Exits with 3 and a line that names the seed of the world if something is wrong. */
#include "run_ranks.h"

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
                    check(count > 0 || owes(state->running[segment]), "a run waits for nobody",
                          call);
                    for (size_t each = 0; each < count; each++)
                        check(rank_in(context, awaited[each]) != NOBODY &&
                                  awaited[each] != state->rank,
                              "a run waits for a stranger", (uint64_t)awaited[each]);
                    for (size_t each = 0; each < count; each++)
                        check(ranks[state->rank].engine.gone[awaited[each]] == 0,
                              "a run waits for one who is gone", (uint64_t)awaited[each]);
                    const struct pc_schedule *table = state->running[segment]->run.table;
                    bool only_reduces = true;
                    for (uint32_t step = 0; step < table->num_steps; step++)
                        only_reduces =
                            only_reduces && (table->steps[step].kind == PC_STEP_RECV_SCRATCH ||
                                             table->steps[step].kind == PC_STEP_REDUCE);
                    check(!only_reduces || count <= PC_RUN_WINDOW, "too many receives are open",
                          count);
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
        bool differs = !clean && !is_same_call(&contexts[context].plans[call],
                                               &contexts[context].others[call]);
        contexts[context].other_maker[call] =
            differs && chance(15) ? (int)below((uint64_t)contexts[context].size) : NOBODY;
        for (int me = 0; me < contexts[context].size; me++) {
            struct state *state = &contexts[context].ranks[me].states[call];
            state->rank = contexts[context].members[me];
            state->context = context;
            state->me = me;
            state->lost = NOBODY;
            state->call = call;
            state->plan = me == contexts[context].other_maker[call]
                              ? &contexts[context].others[call]
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
                    check(state->asking[each] == NULL && state->running[each] == NULL,
                          "something has never ended", call);
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
        rank->engine = (struct pc_engine){
            .size = num_ranks, .links = rank->links, .other = other, .matches_calls = true};
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
    run_worlds(world, worlds, first);
    print_counts(names, counts, COUNTS);
    return 0;
}
