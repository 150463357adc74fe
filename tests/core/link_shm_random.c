/* Random messages between three engines (transports/_core/engine) that are joined by links over the
   shared memory of one host, all in one thread, so that a seed always does the same.

   Ranks send in every way, receive, ask, drop, give up half-way, cancel, break contexts and open
   them late; in some worlds one ends in the middle and is forgotten. A receive that asks and whose
   message is taken back starts again in its place, or does not. Checked are every byte, that each
   message is received once, that those that wait stand in the order in which they were sent, that
   who asks has the first that fits, and was the first to ask for it, and that nothing waits for
   ever. Memory is freed when it is the caller's again: AddressSanitizer sees who touches it.

       link_shm_random WORLDS SEED

   Exits with 3 and a line that names the seed of the world if something is wrong. */
#include "link_shm_messages.h"

static void start_receive(int rank, int ident, bool any);
static void start_again(const struct receive *old);

static void receive_over(struct receive *receive) {
    receive->live = receive->held = false;
    free(receive->it.header);
    free(receive->memory);
}

static void told(struct pc_receive *it) {
    struct receive *receive = it->owner;
    if (it->state == PC_RECEIVE_HELD) {
        counts[HELD]++;
        receive->held = true;
        receive->had = number_in(&it->message->match);
        check_held(receive, receive->had);
        return;
    }
    check(it->state == PC_RECEIVE_ENDED && receive->live, "a receive ends twice",
          (uint64_t)(receive - receives));
    /* Who was forgotten sees other things in blocks that were its own. */
    if (it->status == 0 && !ranks[receive->rank].dead) {
        uint32_t number;
        memcpy(&number, receive->memory, 4);
        check(number < num_messages, "there is no such message", number);
        struct message *message = &messages[number];
        check(message->source == it->source && message->dest == receive->rank &&
                  message->tag == it->tag && message->ident == receive->ident &&
                  !message->received && !message->cancelled && !message->dropped &&
                  (!it->ask || number == receive->had),
              "a message is received that should not", number);
        for (size_t offset = 0; offset < it->nbytes; offset++)
            check(receive->memory[offset] == byte_of(number, offset), "a byte is wrong", number);
        message->received = true;
        counts[RECEIVED]++;
    } else if (it->status == PC_TAKEN_BACK) {
        const struct message *message = &messages[receive->had];
        check(it->ask, "a receive that does not ask waits no more", receive->had);
        check(message->cancelled || message->send.status != 0, "nobody has taken back a message",
              receive->had);
        counts[TAKEN_BACK]++;
    } else {
        check(it->status >= 0, "a receive fails", (uint64_t)-it->status);
    }
    receive_over(receive);
    if (it->status == PC_TAKEN_BACK && below(4) > 0)
        start_again(receive);
    if (!quiet && below(4) == 0 && ranks[receive->rank].contexts[receive->ident] != NULL)
        start_receive(receive->rank, receive->ident, false); /* from within a callback */
}

static struct receive *new_receive(int rank, int ident, uint64_t its_order) {
    struct receive *receive = &receives[num_receives++];
    *receive = (struct receive){
        .rank = rank, .ident = ident, .order = its_order, .live = true, .memory = malloc(LARGEST)};
    receive->it.into = receive->memory;
    receive->it.room = LARGEST;
    receive->it.notify = told;
    receive->it.owner = receive;
    return receive;
}

static void start_receive(int rank, int ident, bool any) {
    if (num_receives == MOST || ranks[rank].contexts[ident] == NULL)
        return;
    struct receive *receive = new_receive(rank, ident, ++order);
    receive->it.posted.queued.source = any || below(2) ? PC_ANY : (int)below(RANKS);
    receive->it.posted.queued.tag = any || below(2) ? PC_ANY : (int64_t)below(3);
    receive->it.ask = !any && below(4) == 0;
    pc_receive_start(ranks[rank].contexts[ident], &receive->it);
}

/* An asking receive whose message was taken back waits again where it was. */
static void start_again(const struct receive *old) {
    if (num_receives == MOST || ranks[old->rank].contexts[old->ident] == NULL)
        return;
    struct receive *receive = new_receive(old->rank, old->ident, old->order);
    receive->it.posted.queued.source = old->it.posted.queued.source;
    receive->it.posted.queued.tag = old->it.posted.queued.tag;
    receive->it.ask = true;
    counts[STARTED_AGAIN]++;
    pc_receive_start_at(ranks[old->rank].contexts[old->ident], &receive->it,
                        old->it.posted.queued.number);
}

static void give_up(struct receive *receive) {
    bool is_reading = receive->it.state == PC_RECEIVE_READING;
    if (!receive->live || !pc_receive_give_up(&receive->it))
        return;
    counts[is_reading ? PARKED : GIVEN_UP]++;
    receive_over(receive);
}

static void open_context(int rank, int ident) {
    static const int members[RANKS] = {0, 1, 2};
    struct rank *it = &ranks[rank];
    if (it->contexts[ident] == NULL)
        it->contexts[ident] = pc_context_open(&it->engine, (uint64_t)ident, members, RANKS, rank);
}

static bool progress(int rank) {
    struct pc_source *source = &ranks[rank].shm.source;
    bool worked = source->ops->progress(source);
    for (int local = 0; local < RANKS; local++)
        counts[NO_ROOM] += ranks[rank].shm.peers[local].unreported.first != NULL;
    return worked;
}

/* Have the message of a receive that holds one written, or drop it. */
static void go_on(struct receive *receive) {
    receive->held = false;
    if (below(4) > 0) {
        check(pc_receive_into(&receive->it, receive->memory) == 0 &&
                  receive->it.state != PC_RECEIVE_HELD,
              "a held message is not written", receive->had);
        return;
    }
    messages[receive->had].dropped = true;
    pc_receive_drop(&receive->it);
    receive_over(receive);
    counts[DROPPED]++;
}

/* A send is taken back, perhaps while its message is held: its receiver may want it before it hears
   of that. It may be stopped long before, and then nobody receives it any more. */
static void cancel(struct message *message) {
    if (!message->under_way || !pc_send_stop(&message->send))
        return;
    message->cancelled = true;
    if (!message->stopped && below(2)) {
        message->stopped = true;
        counts[STOPPED]++;
        return;
    }
    check(pc_send_take_back(&message->send), "a send is over that is under way",
          (uint64_t)(message - messages));
    counts[CANCELLED]++;
    send_over(message);
    for (uint32_t number = 0, last = num_receives; number < last; number++)
        if (receives[number].held && &messages[receives[number].had] == message && below(2))
            go_on(&receives[number]);
}

/* What waits from one rank stands in the order in which it was sent, and no receive waits for
   it. */
static void check_order(int rank) {
    for (int ident = 0; ident < IDENTS; ident++) {
        int64_t last[RANKS] = {-1, -1, -1};
        struct pc_context *context = ranks[rank].contexts[ident];
        struct pc_unexpected *each =
            context != NULL ? pc_match_first_message(&context->matching) : NULL;
        for (; each != NULL; each = pc_match_next_message(each)) {
            uint32_t number = number_in(each);
            check(number > last[each->queued.source], "a message comes before an earlier one",
                  number);
            last[each->queued.source] = number;
            const struct pc_posted *posted = pc_match_first_posted(&context->matching);
            for (; posted != NULL; posted = pc_match_next_posted(posted))
                check(!wants(&posted->queued, &messages[number]),
                      "a message and its receive both wait", number);
        }
    }
}

/* Take the next message of a rank past the queues, in which nothing waits. */
static void take_directly(int rank) {
    int source = (int)below(RANKS), ident = (int)below(IDENTS);
    const struct pc_context *context = ranks[rank].contexts[ident];
    struct pc_shm_next next;
    if (source == rank || ranks[source].dead || context == NULL || ranks[rank].broken[ident] ||
        pc_match_first_posted(&context->matching) != NULL ||
        pc_match_first_message(&context->matching) != NULL ||
        pc_link_shm_next(&ranks[rank].shm, source, &next) <= 0 ||
        next.header[0] != PC_KIND_P2P || next.header[1] != ident)
        return;
    uint32_t number;
    memcpy(&number, next.header + PC_P2P_NBYTES, 4);
    check(number < num_messages, "there is no such message", number);
    struct message *message = &messages[number];
    check(message->source == source && message->dest == rank && message->ident == ident &&
              !message->received && !message->cancelled && !message->dropped,
          "a message is taken that should not", number);
    check(next.filling == NULL || pc_load(&next.filling->nbytes) == next.nbytes,
          "a block is not filled", number);
    for (size_t offset = 0; offset < next.nbytes; offset++)
        check(next.payload[offset] == byte_of(number, offset), "a byte is wrong", number);
    message->received = true;
    counts[TAKEN]++;
    pc_link_shm_took(&ranks[rank].shm, source, &next);
}

static void act(int rank, bool may_break) {
    uint64_t what = below(100);
    if (below(3) == 0)
        take_directly(rank);
    if (what < 30) {
        start_send(rank);
    } else if (what < 50) {
        start_receive(rank, (int)below(IDENTS), false);
    } else if (what < 60 && num_receives > 0) {
        struct receive *receive =
            &receives[num_receives - 1 - below(num_receives < 20 ? num_receives : 20)];
        if (receive->held && below(4) > 0)
            go_on(receive);
        else
            give_up(receive);
    } else if (what < 64 && num_messages > 0) {
        cancel(&messages[num_messages - 1 - below(num_messages < 20 ? num_messages : 20)]);
    } else if (what == 64 && below(10) == 0) {
        open_context(rank, (int)below(IDENTS));
    } else if (what == 65 && may_break && below(5) == 0) {
        int ident = (int)below(IDENTS);
        if (ranks[rank].contexts[ident] != NULL && !ranks[rank].broken[ident]) {
            ranks[rank].broken[ident] = true;
            pc_context_break(ranks[rank].contexts[ident], 7);
            counts[BROKEN]++;
        }
    } else {
        (void)progress(rank);
    }
    check_order(rank);
}

static void finished(struct pc_engine *engine, int peer) {
    struct rank *rank = engine->owner;
    check(!rank->finished[peer], "a rank finishes twice", (uint64_t)peer);
    rank->finished[peer] = true;
    counts[FINISHED]++;
}

static void lost(struct pc_engine *engine, int peer, const char *why) {
    (void)engine;
    check(false, why, (uint64_t)peer);
}

static void settle(void) {
    for (int quiet = 0, turns = 0; quiet < 10; turns++, quiet++) {
        check(turns < 100000, "it never ends", 0);
        for (int rank = 0; rank < RANKS; rank++)
            if (!ranks[rank].dead && progress(rank))
                quiet = 0;
    }
}

static void end_all(void) {
    quiet = true;
    for (int rank = 0; rank < RANKS; rank++)
        for (int ident = 0; ident < IDENTS && !ranks[rank].dead; ident++)
            open_context(rank, ident);
    for (uint32_t number = 0; number < num_messages; number++)
        if (messages[number].stopped)
            cancel(&messages[number]);
    for (uint32_t number = 0; number < num_receives; number++)
        give_up(&receives[number]);
    settle();
    for (uint32_t number = 0; number < num_receives; number++)
        give_up(&receives[number]);
    num_receives = 0;
    uint32_t missing[RANKS][IDENTS] = {0};
    for (uint32_t number = 0; number < num_messages; number++)
        if (!messages[number].received && !messages[number].cancelled &&
            !messages[number].dropped && !ranks[messages[number].dest].dead)
            missing[messages[number].dest][messages[number].ident]++;
    for (int rank = 0; rank < RANKS; rank++)
        for (int ident = 0; ident < IDENTS; ident++)
            while (missing[rank][ident]-- > 0 && num_receives < MOST)
                start_receive(rank, ident, true);
    settle();
    bool broken = false;
    for (int rank = 0; rank < RANKS; rank++)
        for (int ident = 0; ident < IDENTS; ident++)
            broken |= ranks[rank].broken[ident] || ranks[rank].dead;
    for (uint32_t number = 0; number < num_messages && !broken; number++) {
        check(!messages[number].under_way, "a send never ends", number);
        check(messages[number].received || messages[number].cancelled || messages[number].dropped,
              "a message is lost", number);
    }
}

static void world(void) {
    int fd = memfd_create("world", MFD_CLOEXEC), doorbells[RANKS];
    for (int local = 0; local < RANKS; local++)
        doorbells[local] = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    memset(ranks, 0, sizeof ranks);
    memset(receives, 0, sizeof receives);
    num_messages = num_receives = 0;
    order = 0;
    quiet = false;
    pc_channel limits = {
        .eager_limit = 16000, .credit = 100000, .message_cost = 100, .single_copy = below(3) > 0};
    bool may_break = below(3) == 0, may_end = below(3) == 0;
    for (int local = 0; local < RANKS; local++) {
        int rank = in_job[local];
        struct rank *it = &ranks[rank];
        for (int peer = 0; peer < RANKS; peer++)
            it->links[peer] = peer == rank ? &it->self : &it->shm.link;
        it->engine = (struct pc_engine){
            .size = RANKS, .links = it->links, .finished = finished, .lost = lost, .owner = it};
        check(pc_host_open(&it->host, fd, local, RANKS, doorbells, RANKS) == 0,
              "no memory is mapped", 0);
        check(pc_engine_open(&it->engine) == 0, "an engine cannot be opened", 0);
        pc_link_self(&it->self, &it->engine);
        check(pc_link_shm_open(&it->shm, &it->engine, &it->host, doorbells[local], in_job,
                               &limits) == 0,
              "a link cannot be opened", 0);
        open_context(rank, 0);
    }
    for (int step = 0; step < STEPS; step++) {
        int rank = (int)below(RANKS);
        if (!ranks[rank].dead)
            act(rank, may_break);
        if (step < STEPS / 2 || !may_end || below(200) > 0)
            continue;
        may_end = false;
        ranks[rank].dead = true;
        counts[FORGOTTEN]++;
        for (int other = 0; other < RANKS; other++)
            if (other != rank)
                pc_engine_forget(&ranks[other].engine, rank, 9);
    }
    end_all();
    for (int rank = 0; rank < RANKS; rank++) {
        counts[BUFFERED] += ranks[rank].shm.num_kept;
        if (!ranks[rank].dead)
            check(pc_link_shm_goodbye(&ranks[rank].shm) == 0, "there is no memory", 0);
    }
    settle();
    for (int rank = 0; rank < RANKS; rank++)
        for (int local = 0; local < RANKS; local++) {
            struct rank *other = &ranks[in_job[local]];
            if (!other->dead && !ranks[rank].dead)
                check(other->finished[rank] == ranks[rank].shm.channel.peers[local].linked,
                      "no goodbye", 0);
        }
    for (int rank = 0; rank < RANKS; rank++)
        for (int ident = 0; ident < IDENTS; ident++)
            if (ranks[rank].contexts[ident] != NULL) {
                struct pc_context *context = ranks[rank].contexts[ident];
                ranks[rank].contexts[ident] = NULL;
                pc_context_break(context, 8);
                pc_context_close(context);
            }
    for (int local = 0; local < RANKS; local++) {
        struct rank *it = &ranks[in_job[local]];
        pc_link_shm_close(&it->shm);
        pc_engine_free(&it->engine);
        pc_link_shm_free(&it->shm);
        pc_host_close(&it->host);
        close(doorbells[local]);
    }
    close(fd);
    for (uint32_t number = 0; number < num_messages; number++)
        check(!messages[number].under_way, "a send has never ended", number);
}

int main(int argc, char **argv) {
    uint64_t worlds = argc > 1 ? strtoull(argv[1], NULL, 10) : 10;
    uint64_t first = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
    run_worlds(world, worlds, first);
    print_counts(names, counts, COUNTS);
    return 0;
}
