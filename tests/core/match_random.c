/* Random operations on the matching of messages (transports/_core/engine/match.h, address.h), and the same on models
   that keep everything in arrays and search them from the first to the last.

   A world has a number of sources and tags, and phases in which more things come or more go, so that the number of
   things that wait goes up and down. In some worlds there is no memory at times. Things are allocated one by one, and
   freed, so that AddressSanitizer sees who touches one that has gone.

   match_random WORLDS SEED

   Exits with 3 and a line that names the seed of the world if something is wrong. */
#include "match_hooks.h"

#include "engine/address.h"
#include "engine/match.h"

#undef calloc
#include <stdio.h>
#include <string.h>

#define MOST 400
#define STEPS 1500

uint64_t looks;
static uint64_t seed, random_state;
static bool scarce;
enum count { MATCHED, TOLD, WITHDRAWN, PUT_BACK, POSTED_AGAIN, WITHOUT_MEMORY, EARLY, AWAITED, TAKEN_BELOW, COUNTS };
static const char *const names[] = {"matched",        "told",  "withdrawn", "put back",   "posted again",
                                    "without memory", "early", "awaited",   "taken below"};
static uint64_t counts[COUNTS];

static void check(bool holds, const char *what, uint64_t number) {
    if (holds)
        return;
    fprintf(stderr, "world %llu: %s (%llu)\n", (unsigned long long)seed, what, (unsigned long long)number);
    exit(3);
}

static uint64_t below(uint64_t limit) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (random_state >> 33) % limit;
}

static bool chance(int percent) {
    return below(100) < (uint64_t)percent;
}

void *scarce_calloc(size_t count, size_t nbytes) {
    if (scarce && chance(70)) {
        counts[WITHOUT_MEMORY]++;
        return NULL;
    }
    return calloc(count, nbytes);
}

static void *allocate(size_t nbytes) {
    void *memory = calloc(1, nbytes);
    check(memory != NULL, "no memory for a thing", nbytes);
    return memory;
}

/* --- point to point ---------------------------------------------------------------------------------- */

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
        if (places[place].thing != NULL && places[place].waits == waiting && below((uint64_t)++found) == 0)
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
        if (message->waits && fits(posted, message) && (found == NULL || message->number < found->number))
            found = message;
    }
    return found;
}

static struct known *first_posted(const struct known *message) {
    struct known *found = NULL;
    for (int place = 0; place < MOST; place++) {
        struct known *posted = &p2p.posted[place];
        if (posted->waits && fits(posted, message) && (found == NULL || posted->number < found->number))
            found = posted;
    }
    return found;
}

/* A receive was posted; what it got must be what the model finds. */
static void settle_posted(struct known *posted, const struct pc_unexpected *got) {
    struct known *expected = first_message(posted);
    check(got == (expected != NULL ? expected->thing : NULL), "a receive got another message", posted->number);
    posted->waits = expected == NULL;
    if (expected != NULL && !posted->peek) {
        expected->waits = false;
        counts[MATCHED]++;
    }
    if (!posted->waits && chance(70))
        release(posted); /* the others may be posted again */
}

/* A message has come; those that got it or were told of it must be those that the model finds. */
static void settle_message(struct known *message, const struct pc_posted *got, struct pc_posted *told) {
    struct known *posted;
    bool taken = false;
    while (!taken && (posted = first_posted(message)) != NULL) {
        posted->waits = false;
        taken = !posted->peek;
        if (posted->peek) {
            check(told == posted->thing, "another probe was told, or none", message->number);
            told = told->next_told;
            counts[TOLD]++;
        } else {
            check(got == posted->thing, "another receive got a message, or none", message->number);
            counts[MATCHED]++;
        }
        if (chance(70))
            release(posted);
    }
    check(told == NULL, "a probe was told too much", message->number);
    check(taken || got == NULL, "a receive got a message that it must not get", message->number);
    message->waits = !taken;
}

static void post(void) {
    struct known *known = free_place(p2p.posted);
    if (known == NULL)
        return;
    struct pc_posted *posted = known->thing = allocate(sizeof *posted);
    known->number = p2p.next_number++;
    known->source = posted->queued.source = chance(p2p.any_percent) ? PC_ANY : (int)below((uint64_t)p2p.sources);
    known->tag = posted->queued.tag = chance(p2p.any_percent) ? PC_ANY : (int64_t)below((uint64_t)p2p.tags);
    known->peek = posted->peek = chance(p2p.peek_percent);
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
    struct pc_posted *told;
    const struct pc_posted *got = pc_match_arrive(&p2p.matching, message, &told);
    settle_message(known, got, told);
}

static void withdraw(void) {
    bool waiting = chance(80);
    struct known *posted = any_of(p2p.posted, waiting), *message = any_of(p2p.messages, waiting);
    if (posted != NULL && chance(50)) {
        check(pc_match_withdraw_posted(&p2p.matching, posted->thing) == waiting, "withdrawn: posted", waiting);
        release(posted);
        counts[WITHDRAWN]++;
    }
    if (message != NULL && chance(50)) {
        check(pc_match_withdraw_message(&p2p.matching, message->thing) == waiting, "withdrawn: message", waiting);
        release(message);
        counts[WITHDRAWN]++;
    }
}

static void put_back(void) {
    struct known *message = any_of(p2p.messages, false);
    if (message == NULL)
        return;
    struct pc_posted *told;
    const struct pc_posted *got = pc_match_put_back(&p2p.matching, message->thing, &told);
    settle_message(message, got, told);
    counts[PUT_BACK]++;
}

static void post_again(void) {
    struct known *posted = any_of(p2p.posted, false);
    if (posted == NULL)
        return;
    settle_posted(posted, pc_match_post_again(&p2p.matching, posted->thing));
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
        check(known->waits && known->number >= least, "a list of receives is out of order", known->number);
        least = known->number + 1;
    }
    least = 0;
    for (struct pc_unexpected *message = pc_match_first_message(&p2p.matching); message != NULL;
         message = pc_match_next_message(message), num_messages--) {
        const struct known *known = known_by(p2p.messages, message);
        check(known->waits && known->number >= least, "a list of messages is out of order", known->number);
        least = known->number + 1;
    }
    check(num_posted == 0 && num_messages == 0, "a list is too short or too long", num_posted);
    for (int source = PC_ANY; source < p2p.sources; source++)
        for (int64_t tag = PC_ANY; tag < p2p.tags; tag += 1 + p2p.tags / 16) {
            const struct known *expected = first_message(&(struct known){.source = source, .tag = tag});
            check(pc_match_find(&p2p.matching, source, tag) == (expected != NULL ? expected->thing : NULL),
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
        check(pc_match_withdraw_message(&p2p.matching, message), "a listed message does not wait", 0);
    check(p2p.matching.posted.count == 0 && p2p.matching.unexpected.count == 0, "something is left", 0);
    pc_match_free(&p2p.matching);
    for (int place = 0; place < MOST; place++) {
        free(p2p.posted[place].thing);
        free(p2p.messages[place].thing);
    }
}

/* --- collectives ------------------------------------------------------------------------------------- */

struct known_address {
    struct pc_addressed *thing;
    uint64_t call, arrival;
    uint32_t sender, index;
    uint16_t lane;
    bool is_early;
};

static struct {
    struct pc_addresses addresses;
    struct known_address things[MOST];
    uint64_t first_call, arrivals;
} coll;

static struct known_address *at_address(const struct known_address *address) {
    for (int place = 0; place < MOST; place++) {
        struct known_address *known = &coll.things[place];
        if (known->thing != NULL && known->call == address->call && known->lane == address->lane &&
            known->sender == address->sender && known->index == address->index)
            return known;
    }
    return NULL;
}

/* Something happens at an address: a receive is posted there, or a message comes. */
static void meet(uint64_t calls) {
    struct known_address address = {.call = coll.first_call + below(calls), .lane = (uint16_t)below(3),
                                    .sender = (uint32_t)below(3), .index = (uint32_t)below(2), .is_early = chance(60)};
    if (chance(2)) /* far away */
        address.call += (uint64_t)1 << (20 + below(40));
    struct known_address *known = at_address(&address), *place = coll.things;
    while (place < coll.things + MOST && place->thing != NULL)
        place++;
    if (place == coll.things + MOST)
        return;
    address.thing = allocate(sizeof *address.thing);
    *address.thing = (struct pc_addressed){.call = address.call, .lane = address.lane, .sender = address.sender,
                                           .index = address.index, .is_early = address.is_early};
    struct pc_addressed *other = pc_address_add(&coll.addresses, address.thing);
    check(other == (known != NULL ? known->thing : NULL), "another thing stands at an address", address.call);
    if (other == NULL) {
        address.arrival = coll.arrivals++;
        *place = address;
        counts[address.is_early ? EARLY : AWAITED]++;
        return;
    }
    check(!pc_address_remove(&coll.addresses, address.thing), "removed: it was not there", address.call);
    free(address.thing);
    if (known->is_early != address.is_early) { /* they belong together */
        check(pc_address_remove(&coll.addresses, other), "it cannot be removed", address.call);
        free(other);
        *known = (struct known_address){0};
    }
}

static void remove_any(void) {
    struct known_address *known = &coll.things[below(MOST)];
    if (known->thing == NULL)
        return;
    check(pc_address_remove(&coll.addresses, known->thing), "it cannot be removed", known->call);
    check(!pc_address_remove(&coll.addresses, known->thing), "it is removed twice", known->call);
    if (chance(20)) { /* it is the last of its call now */
        check(pc_address_add(&coll.addresses, known->thing) == NULL, "something stands where nothing is", known->call);
        known->arrival = coll.arrivals++;
        return;
    }
    free(known->thing);
    *known = (struct known_address){0};
}

static struct known_address *known_address(const struct pc_addressed *thing) {
    for (int place = 0; place < MOST; place++)
        if (coll.things[place].thing == thing)
            return &coll.things[place];
    check(false, "a thing is named that is not there", 0);
    return NULL;
}

static void take_below(uint64_t call) {
    struct pc_addressed *taken = pc_address_take_below(&coll.addresses, call);
    for (struct pc_addressed *thing = taken, *next; thing != NULL; thing = next) {
        next = thing->next;
        struct known_address *known = known_address(thing);
        check(known->is_early && known->call < call, "what is taken is not below", known->call);
        free(thing);
        *known = (struct known_address){0};
        counts[TAKEN_BELOW]++;
    }
    for (int place = 0; place < MOST; place++)
        check(coll.things[place].thing == NULL || !coll.things[place].is_early || coll.things[place].call >= call,
              "a message is below, and was not taken", coll.things[place].call);
}

static size_t num_early(uint64_t call) {
    size_t count = 0;
    for (int place = 0; place < MOST; place++)
        count += coll.things[place].thing != NULL && coll.things[place].is_early && coll.things[place].call == call;
    return count;
}

/* The messages of a call are listed, in the order in which they came. How many. */
static size_t compare_call(uint64_t call) {
    size_t count = 0;
    uint64_t least = 0;
    for (struct pc_addressed *thing = pc_address_early(&coll.addresses, call); thing != NULL; thing = thing->next) {
        const struct known_address *known = known_address(thing);
        check(known->is_early && known->call == call && known->arrival >= least, "a call's list is wrong", call);
        least = known->arrival + 1;
        count++;
    }
    check(count == num_early(call), "of a call so many are listed", count);
    return count;
}

static void compare_addresses(uint64_t calls) {
    size_t early = 0, receives = 0, num_calls = 0;
    for (int place = 0; place < MOST; place++) {
        const struct known_address *known = &coll.things[place];
        if (known->thing == NULL)
            continue;
        early += known->is_early;
        receives += !known->is_early;
        check(pc_address_find(&coll.addresses, known->call, known->lane, known->sender, known->index) == known->thing,
              "find: another thing", known->call);
    }
    check(coll.addresses.num_early == early, "so many messages", early);
    check(coll.addresses.num_receives == receives, "so many receives", receives);
    for (struct pc_addressed *thing = pc_address_receives(&coll.addresses); thing != NULL; thing = thing->next)
        check(!known_address(thing)->is_early && receives-- > 0, "a message is listed as a receive", thing->call);
    check(receives == 0, "receives are missing in the list", receives);
    for (struct pc_addressed *first = pc_address_calls(&coll.addresses); first != NULL; first = first->next_call) {
        early -= compare_call(first->call);
        num_calls++;
    }
    check(early == 0, "calls are missing in the list, or doubled", early);
    check(coll.addresses.num_calls == num_calls, "so many calls", num_calls);
    for (uint64_t call = 0; call < calls; call++)
        compare_call(coll.first_call + call);
}

static void collectives(void) {
    memset(&coll, 0, sizeof coll);
    uint64_t calls = 1 + below(chance(50) ? 4 : 60);
    int remove_percent = 10;
    bool is_scarce = chance(30);
    for (int step = 0; step < STEPS; step++) {
        if (step % 150 == 0) {
            remove_percent = 5 + (int)below(90);
            scarce = is_scarce && chance(60);
        }
        if (!chance(remove_percent)) {
            meet(calls);
        } else {
            for (int times = 0; times < 3; times++)
                remove_any();
        }
        if (chance(3)) {
            coll.first_call += below(calls + 3);
            take_below(coll.first_call);
        }
        if (chance(1) && chance(20)) { /* one that was late: below all others */
            coll.first_call -= coll.first_call < 10 ? coll.first_call : below(10);
            meet(calls);
        }
        if (step % 16 == 0)
            compare_addresses(calls);
    }
    scarce = false;
    take_below(UINT64_MAX);
    for (struct pc_addressed *thing; (thing = pc_address_receives(&coll.addresses)) != NULL; free(thing))
        check(pc_address_remove(&coll.addresses, thing), "it cannot be removed", thing->call);
    check(coll.addresses.by_address.used == 0 && coll.addresses.by_call.used == 0, "something is left", 0);
    pc_address_free(&coll.addresses);
}

int main(int argc, char **argv) {
    if (argc != 3)
        return 2;
    uint64_t worlds = strtoull(argv[1], NULL, 10), first = strtoull(argv[2], NULL, 10);
    for (seed = first; seed < first + worlds; seed++) {
        random_state = seed * 0x9E3779B97F4A7C15u;
        point_to_point();
        collectives();
    }
    for (int count = 0; count < COUNTS; count++)
        printf("%s%s %llu", count > 0 ? ", " : "", names[count], (unsigned long long)counts[count]);
    printf("\n");
    return 0;
}
