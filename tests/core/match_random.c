/* Random operations on the matching of messages (transports/_core/engine/match.h, address.h), and
   the same on models that keep everything in arrays and search them from the first to the last.

   A world has a number of sources and tags, and phases in which more things come or more go, so
   that the number of things that wait goes up and down. In some worlds there is no memory at times.
   Things are allocated one by one, and freed, so that AddressSanitizer sees who touches one that
   has gone.

   match_random WORLDS SEED

   Exits with 3 and a line that names the seed of the world if something is wrong. */
#include "match_collectives.h"

/* What the model knows of a receive, a probe or a message: never read from the thing itself. */
struct known {
    void *thing; /* NULL: the place is free */
    uint64_t number;
    int source;
    int64_t tag;
    bool peek, waits;
};

static struct {
    struct pc_matching matching;
    struct known posted[MOST], messages[MOST];
    uint64_t next_number;
    int sources, any_percent, peek_percent;
    int64_t tags;
} p2p;

static bool fits(const struct known *posted, const struct known *message) {
    return (posted->source == PC_ANY || posted->source == message->source) &&
           (posted->tag == PC_ANY || posted->tag == message->tag);
}

static struct known *free_place(struct known *places) {
    for (int place = 0; place < MOST; place++)
        if (places[place].thing == NULL)
            return &places[place];
    return NULL;
}

/* One of those that wait, or of those that do not; NULL: there is none. */
static struct known *any_of(struct known *places, bool waiting) {
    int found = 0;
    struct known *picked = NULL;
    for (int place = 0; place < MOST; place++)
        if (places[place].thing != NULL && places[place].waits == waiting &&
            below((uint64_t)++found) == 0)
            picked = &places[place];
    return picked;
}

static struct known *known_by(struct known *places, const void *thing) {
    for (int place = 0; place < MOST; place++)
        if (places[place].thing == thing)
            return &places[place];
    check(thing == NULL, "a thing is named that is not there", 0);
    return NULL;
}

static void release(struct known *known) {
    free(known->thing);
    *known = (struct known){0};
}

static struct known *first_message(const struct known *posted) {
    struct known *found = NULL;
    for (int place = 0; place < MOST; place++) {
        struct known *message = &p2p.messages[place];
        if (message->waits && fits(posted, message) &&
            (found == NULL || message->number < found->number))
            found = message;
    }
    return found;
}

static struct known *first_posted(const struct known *message) {
    struct known *found = NULL;
    for (int place = 0; place < MOST; place++) {
        struct known *posted = &p2p.posted[place];
        if (posted->waits && fits(posted, message) &&
            (found == NULL || posted->number < found->number))
            found = posted;
    }
    return found;
}

/* A receive was posted; what it got must be what the model finds. */
static void settle_posted(struct known *posted, const struct pc_unexpected *got) {
    struct known *expected = first_message(posted);
    check(got == (expected != NULL ? expected->thing : NULL), "a receive got another message",
          posted->number);
    posted->waits = expected == NULL;
    if (expected != NULL && !posted->peek) {
        expected->waits = false;
        counts[MATCHED]++;
    }
    if (!posted->waits && chance(70))
        release(posted); /* the others may be posted again */
}

/* A message has come; those that got it or were told of it must be those that the model finds. */
static void settle_message(struct known *message, const struct pc_posted *got,
                           struct pc_posted *probes) {
    struct known *posted;
    bool taken = false;
    while (!taken && (posted = first_posted(message)) != NULL) {
        posted->waits = false;
        taken = !posted->peek;
        if (posted->peek) {
            check(probes == posted->thing, "another probe was told, or none", message->number);
            probes = probes->next_probe;
            counts[TOLD]++;
        } else {
            check(got == posted->thing, "another receive got a message, or none", message->number);
            counts[MATCHED]++;
        }
        if (chance(70))
            release(posted);
    }
    check(probes == NULL, "a probe was told too much", message->number);
    check(taken || got == NULL, "a receive got a message that it must not get", message->number);
    message->waits = !taken;
}

static void post(void) {
    struct known *known = free_place(p2p.posted);
    if (known == NULL)
        return;
    struct pc_posted *posted = known->thing = allocate(sizeof *posted);
    known->number = p2p.next_number++;
    known->source = posted->queued.source =
        chance(p2p.any_percent) ? PC_ANY : (int)below((uint64_t)p2p.sources);
    known->tag = posted->queued.tag =
        chance(p2p.any_percent) ? PC_ANY : (int64_t)below((uint64_t)p2p.tags);
    known->peek = posted->peek = chance(p2p.peek_percent);
    posted->queued.number = p2p.matching.next_number++;
    settle_posted(known, pc_match_post(&p2p.matching, posted));
}

static void arrive(void) {
    struct known *known = free_place(p2p.messages);
    if (known == NULL)
        return;
    struct pc_unexpected *message = known->thing = allocate(sizeof *message);
    known->number = p2p.next_number++;
    known->source = message->queued.source = (int)below((uint64_t)p2p.sources);
    known->tag = message->queued.tag = (int64_t)below((uint64_t)p2p.tags);
    struct pc_posted *probes;
    message->queued.number = p2p.matching.next_number++;
    const struct pc_posted *got = pc_match_arrive(&p2p.matching, message, &probes);
    settle_message(known, got, probes);
}

static void withdraw(void) {
    bool waiting = chance(80);
    struct known *posted = any_of(p2p.posted, waiting), *message = any_of(p2p.messages, waiting);
    if (posted != NULL && chance(50)) {
        check(pc_match_withdraw_posted(&p2p.matching, posted->thing) == waiting,
              "withdrawn: posted", waiting);
        release(posted);
        counts[WITHDRAWN]++;
    }
    if (message != NULL && chance(50)) {
        check(pc_match_withdraw_message(&p2p.matching, message->thing) == waiting,
              "withdrawn: message", waiting);
        release(message);
        counts[WITHDRAWN]++;
    }
}

static void put_back(void) {
    struct known *message = any_of(p2p.messages, false);
    if (message == NULL)
        return;
    struct pc_posted *probes;
    const struct pc_posted *got = pc_match_arrive(&p2p.matching, message->thing, &probes);
    settle_message(message, got, probes);
    counts[PUT_BACK]++;
}

static void post_again(void) {
    struct known *posted = any_of(p2p.posted, false);
    if (posted == NULL)
        return;
    settle_posted(posted, pc_match_post(&p2p.matching, posted->thing));
    counts[POSTED_AGAIN]++;
}

/* Everything that waits is listed, in order; and each pattern finds what a search does. */
static void compare(void) {
    size_t num_posted = 0, num_messages = 0;
    for (int place = 0; place < MOST; place++) {
        num_posted += p2p.posted[place].waits;
        num_messages += p2p.messages[place].waits;
    }
    check(p2p.matching.posted.count == num_posted, "so many receives wait", num_posted);
    check(p2p.matching.unexpected.count == num_messages, "so many messages wait", num_messages);
    uint64_t least = 0;
    for (struct pc_posted *posted = pc_match_first_posted(&p2p.matching); posted != NULL;
         posted = pc_match_next_posted(posted), num_posted--) {
        const struct known *known = known_by(p2p.posted, posted);
        check(known->waits && known->number >= least, "a list of receives is out of order",
              known->number);
        least = known->number + 1;
    }
    least = 0;
    for (struct pc_unexpected *message = pc_match_first_message(&p2p.matching); message != NULL;
         message = pc_match_next_message(message), num_messages--) {
        const struct known *known = known_by(p2p.messages, message);
        check(known->waits && known->number >= least, "a list of messages is out of order",
              known->number);
        least = known->number + 1;
    }
    check(num_posted == 0 && num_messages == 0, "a list is too short or too long", num_posted);
    for (int source = PC_ANY; source < p2p.sources; source++)
        for (int64_t tag = PC_ANY; tag < p2p.tags; tag += 1 + p2p.tags / 16) {
            const struct known *expected =
                first_message(&(struct known){.source = source, .tag = tag});
            check(pc_match_find(&p2p.matching, source, tag) ==
                      (expected != NULL ? expected->thing : NULL),
                  "find: another message", (uint64_t)tag);
        }
}

static void point_to_point(void) {
    memset(&p2p, 0, sizeof p2p);
    pc_match_open(&p2p.matching);
    p2p.sources = 1 + (int)below(4);
    p2p.tags = 1 + (int64_t)below(chance(50) ? 4 : 200);
    p2p.any_percent = chance(30) ? 40 : (int)below(6);
    p2p.peek_percent = (int)below(30);
    int post_percent = 50, leave_percent = 20;
    bool is_scarce = chance(30);
    for (int step = 0; step < STEPS; step++) {
        if (step % 150 == 0) {
            post_percent = (int)below(101);
            leave_percent = 10 + (int)below(80);
            scarce = is_scarce && chance(60);
        }
        if (!chance(leave_percent))
            chance(post_percent) ? post() : arrive();
        else if (chance(60))
            withdraw();
        else
            chance(50) ? put_back() : post_again();
        if (step % 16 == 0)
            compare();
    }
    scarce = false;
    for (struct pc_posted *posted; (posted = pc_match_first_posted(&p2p.matching)) != NULL;)
        check(pc_match_withdraw_posted(&p2p.matching, posted), "a listed receive does not wait", 0);
    for (struct pc_unexpected *message; (message = pc_match_first_message(&p2p.matching)) != NULL;)
        check(pc_match_withdraw_message(&p2p.matching, message), "a listed message does not wait",
              0);
    check(p2p.matching.posted.count == 0 && p2p.matching.unexpected.count == 0, "something is left",
          0);
    pc_match_free(&p2p.matching);
    for (int place = 0; place < MOST; place++) {
        free(p2p.posted[place].thing);
        free(p2p.messages[place].thing);
    }
}

static void world(void) {
    point_to_point();
    collectives();
}

int main(int argc, char **argv) {
    if (argc != 3)
        return 2;
    uint64_t worlds = strtoull(argv[1], NULL, 10), first = strtoull(argv[2], NULL, 10);
    run_worlds(world, worlds, first);
    print_counts(names, counts, COUNTS);
    return 0;
}
