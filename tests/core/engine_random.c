/* Random calls of engines (transports/_core/engine) that are joined by a link as nasty as link.h
   allows, all in one thread, so that a seed always does the same.

   The link buffers, keeps, pushes and offers at random, moves payloads in random portions, tells
   late or at once, says that there is no memory, and takes back at any moment. Ranks open contexts
   late, close and break them early, give up, redirect, refuse, probe, ask, and forget each other;
   callbacks call the engine, too. Some messages are of another kind, and are held from the
   beginning.

   After every step all is compared with a naive model: which messages wait in each context, in the
   order in which they came; that a receive has the first that fits, and a message the first receive
   that fits; that nothing waits that could go on. Every byte is checked, and that nothing is
   written outside, or after the end (memory is freed at once: AddressSanitizer sees who touches
   it). All ends exactly once, and nothing of the engine's memory is left.

   engine_random WORLDS SEED

   Exits with 3 and a line that names the seed of the world if something is wrong. */
#include "engine_calls.h"

static void act(int rank) {
    uint64_t what = below(1000);
    if (what < 330)
        start_send(rank);
    else if (what < 640)
        start_receive(rank);
    else if (what < 760)
        go_on(rank, false);
    else if (what < 880)
        go_on(rank, true);
    else if (what < 980)
        cancel_send(rank);
    else if (what < 982)
        stop(rank, false);
    else if (what < 985)
        stop(rank, true);
    else if (what < 987) {
        int peer = (int)below(RANKS);
        if (peer != rank && chance(40))
            pc_engine_forget(&ranks[rank].engine, peer, 1000 + peer);
    } else {
        open_context(rank);
    }
}

/* No rank of this job sends this: nothing happens. */
static void send_nonsense(int rank) {
    unsigned char *header = malloc(PC_P2P_NBYTES);
    pc_p2p_header(header, below(IDENTS), chance(50) ? -1 : INT64_MIN, 0);
    size_t nbytes = PC_P2P_NBYTES;
    if (chance(50))
        nbytes = below(PC_P2P_NBYTES);
    unsigned char *exact = malloc(nbytes + (nbytes == 0));
    memcpy(exact, header, nbytes);
    struct pc_incoming incoming = {
        .peer = (rank + 1) % RANKS, .header = exact, .header_nbytes = nbytes, .where = PC_WAITING};
    struct pc_message *message;
    int error = pc_arrived(&ranks[rank].engine, &ranks[rank].link, &incoming, &message);
    check(error == -EPROTO && message == NULL, "nonsense is taken for a message", nbytes);
    counts[NONSENSE]++;
    free(header);
    free(exact);
}

/* --- the model -------------------------------------------------------------------------------- */

static void check_context(int number, int ident) {
    struct rank *rank = &ranks[number];
    struct pc_context *context = rank->contexts[ident];
    uint32_t num_waiting = 0, num_listed = 0;
    for (uint32_t each = 0; each < num_flights; each++)
        if (flights[each].dest == number && flights[each].ident == ident && waits(&flights[each]))
            num_waiting++;
    uint64_t last = 0;
    struct pc_unexpected *listed = pc_match_first_message(&context->matching);
    for (; listed != NULL; listed = pc_match_next_message(listed), num_listed++) {
        struct flight *flight = flight_of((struct pc_message *)listed);
        check(waits(flight), "a message waits that should not", flight->number);
        check(flight->dest == number && flight->ident == ident, "a message waits elsewhere",
              flight->number);
        check(flight->arrival > last, "messages do not wait in order", flight->number);
        last = flight->arrival;
        for (uint32_t each = 0; each < num_receives; each++)
            if (receives[each].live && receives[each].receive.state == PC_RECEIVE_POSTED)
                check(!wants(&receives[each], flight), "a message and its receive both wait",
                      flight->number);
    }
    check(num_listed == num_waiting, "a message is lost", num_waiting - num_listed);
}

static void check_all(void) {
    for (int each = 0; each < num_done; each++)
        if (done[each].receive->last_flight != done[each].flight->number)
            check_order(done[each].receive, done[each].flight);
    num_done = 0;
    for (uint32_t number = 0; number < num_receives; number++) {
        struct receive *receive = &receives[number];
        struct pc_receive *it = &receive->receive;
        if (!receive->live)
            continue;
        struct rank *rank = &ranks[receive->rank];
        check(it->state != PC_RECEIVE_ENDED && it->state != PC_RECEIVE_IDLE, "an end is not told",
              receive->order);
        check(rank->openness[receive->ident] == OPEN, "a receive has outlived its context",
              receive->order);
        if (it->state == PC_RECEIVE_POSTED)
            check(pc_context_no_sender(rank->contexts[receive->ident], it->posted.queued.source) ==
                      0,
                  "a receive waits for one who is gone", receive->order);
        if (it->message == NULL)
            continue;
        struct flight *flight = flight_of(it->message);
        check(wants(receive, flight), "a receive has a message for which it did not ask",
              flight->number);
        check(!flight->consumed && !flight->dropped, "a receive has a message that is used",
              flight->number);
        if (receive->last_flight != flight->number && !flight->gone)
            check_order(receive, flight);
        if (it->state == PC_RECEIVE_READING || !flight->gone)
            receive->last_flight = flight->number;
    }
    for (int rank = 0; rank < RANKS; rank++)
        for (int ident = 0; ident < IDENTS; ident++)
            if (ranks[rank].openness[ident] == OPEN)
                check_context(rank, ident);
    acted = false;
}

static void world(void) {
    memset(ranks, 0, sizeof ranks);
    num_flights = num_receives = 0;
    order = 0;
    quiet = scarce = false;
    check(allocated == 0, "memory of the engine is left before", (uint64_t)allocated);
    for (int number = 0; number < RANKS; number++) {
        struct rank *rank = &ranks[number];
        for (int peer = 0; peer < RANKS; peer++)
            rank->links[peer] = peer == number ? &rank->self : &rank->link;
        rank->engine = (struct pc_engine){.size = RANKS, .links = rank->links, .other = other};
        check(pc_engine_open(&rank->engine) == 0, "an engine cannot be opened", 0);
        rank->contexts[OTHERS] = rank->engine.others;
        rank->openness[OTHERS] = OPEN;
        pc_link_self(&rank->self, &rank->engine);
        rank->link = (struct pc_link){&test_ops, &rank->engine};
        for (int turn = 0; turn < 4; turn++)
            open_context(number);
    }
    bool may_be_scarce = chance(40);
    int acts = 15 + (int)below(40);
    for (int step = 0; step < STEPS; step++) {
        scarce = may_be_scarce && step / 64 % 2 == 1;
        if (chance(acts))
            act((int)below(RANKS));
        else if (below(200) == 0)
            send_nonsense((int)below(RANKS));
        else
            (void)progress();
        check_all();
    }
    quiet = true;
    scarce = false;
    for (int rank = 0; rank < RANKS; rank++)
        for (int peer = 0; peer < RANKS; peer++)
            if (ranks[peer].engine.gone[rank] != 0)
                pc_engine_forget(&ranks[rank].engine, peer, 1000 + peer);
    check_all();
    for (int round = 0; round < 2; round++) {
        for (int turn = 0; turn < 100000 && progress(); turn++)
            check_all();
        for (uint32_t number = 0; number < num_receives; number++)
            while (receives[number].live && receives[number].ident == OTHERS) {
                go_on(receives[number].rank, true);
                check_all();
            }
    }
    for (int rank = 0; rank < RANKS; rank++) { /* some still wait behind what found no room */
        ranks[rank].openness[OTHERS] = BROKEN;
        ranks[rank].status[OTHERS] = 1 + OTHERS;
        pc_context_break(ranks[rank].engine.others, 1 + OTHERS);
    }
    for (int rank = 0; rank < RANKS; rank++)
        for (int ident = 0; ident < IDENTS; ident++)
            while (ranks[rank].openness[ident] == OPEN || ranks[rank].openness[ident] == BROKEN)
                stop(rank, true);
    check_all();
    for (uint32_t number = 0; number < num_receives; number++)
        check(!receives[number].live, "a receive has never ended", number);
    for (uint32_t number = 0; number < num_flights; number++) {
        struct flight *flight = &flights[number];
        check(!flight->sending, "a send has never ended", number);
        free(flight->copy);
        flight->copy = NULL;
    }
    for (int rank = 0; rank < RANKS; rank++) {
        struct pc_engine *engine = &ranks[rank].engine;
        size_t num_outside = engine->num_unopened;
        for (struct pc_message *each = engine->abandoned.first; each != NULL; each = each->next)
            num_outside++;
        check(engine->num_messages == num_outside, "messages are left", engine->num_messages);
        check(engine->endings == NULL && engine->depth == 0, "something was not told", 0);
        pc_engine_free(engine);
    }
    check(allocated == 0, "memory of the engine is left", (uint64_t)allocated);
}

int main(int argc, char **argv) {
    uint64_t worlds = argc > 1 ? strtoull(argv[1], NULL, 10) : 100;
    uint64_t first = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
    run_worlds(world, worlds, first);
    print_counts(names, counts, COUNTS);
    return 0;
}
