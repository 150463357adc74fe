/* The messages of collectives in match_random.c, beside a naive model of them. */
#ifndef PYCOLL_MATCH_COLLECTIVES_H
#define PYCOLL_MATCH_COLLECTIVES_H

#include "match_world.h"

struct known_address {
    struct pc_addressed *thing;
    uint64_t call, arrival;
    uint32_t sender, index;
    uint16_t subcall;
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
        if (known->thing != NULL && known->call == address->call &&
            known->subcall == address->subcall && known->sender == address->sender &&
            known->index == address->index)
            return known;
    }
    return NULL;
}

/* Something happens at an address: a receive is posted there, or a message comes. */
static void meet(uint64_t calls) {
    struct known_address address = {.call = coll.first_call + below(calls),
                                    .subcall = (uint16_t)below(3),
                                    .sender = (uint32_t)below(3),
                                    .index = (uint32_t)below(2),
                                    .is_early = chance(60)};
    if (chance(2)) /* far away */
        address.call += (uint64_t)1 << (20 + below(40));
    struct known_address *known = at_address(&address), *place = coll.things;
    while (place < coll.things + MOST && place->thing != NULL)
        place++;
    if (place == coll.things + MOST)
        return;
    address.thing = allocate(sizeof *address.thing);
    *address.thing = (struct pc_addressed){.call = address.call,
                                           .subcall = address.subcall,
                                           .sender = address.sender,
                                           .index = address.index,
                                           .is_early = address.is_early};
    struct pc_addressed *other = pc_address_add(&coll.addresses, address.thing);
    check(other == (known != NULL ? known->thing : NULL), "another thing stands at an address",
          address.call);
    if (other == NULL) {
        address.arrival = coll.arrivals++;
        *place = address;
        counts[address.is_early ? EARLY : AWAITED]++;
        return;
    }
    check(!pc_address_remove(&coll.addresses, address.thing), "removed: it was not there",
          address.call);
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
        check(pc_address_add(&coll.addresses, known->thing) == NULL,
              "something stands where nothing is", known->call);
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

static void remove_below(uint64_t call) {
    for (int place = 0; place < MOST; place++) {
        struct known_address *known = &coll.things[place];
        if (known->thing == NULL || !known->is_early || known->call >= call)
            continue;
        check(pc_address_remove(&coll.addresses, known->thing), "it cannot be removed",
              known->call);
        free(known->thing);
        *known = (struct known_address){0};
    }
}

static size_t num_early(uint64_t call) {
    size_t count = 0;
    for (int place = 0; place < MOST; place++)
        count += coll.things[place].thing != NULL && coll.things[place].is_early &&
                 coll.things[place].call == call;
    return count;
}

/* The messages of a call are listed, in the order in which they came. How many. */
static size_t compare_call(uint64_t call) {
    size_t count = 0;
    uint64_t least = 0;
    for (struct pc_addressed *thing = pc_address_early(&coll.addresses, call); thing != NULL;
         thing = thing->next) {
        const struct known_address *known = known_address(thing);
        check(known->is_early && known->call == call && known->arrival >= least,
              "a call's list is wrong", call);
        least = known->arrival + 1;
        count++;
    }
    check(count == num_early(call), "of a call so many are listed", count);
    return count;
}

static void compare_addresses(uint64_t calls) {
    size_t early = 0, receives = 0;
    for (int place = 0; place < MOST; place++) {
        const struct known_address *known = &coll.things[place];
        if (known->thing == NULL)
            continue;
        early += known->is_early;
        receives += !known->is_early;
        check(pc_address_find(&coll.addresses, known->call, known->subcall, known->sender,
                              known->index) == known->thing,
              "find: another thing", known->call);
    }
    for (struct pc_addressed *thing = pc_address_receives(&coll.addresses); thing != NULL;
         thing = thing->next)
        check(!known_address(thing)->is_early && receives-- > 0, "a message is listed as a receive",
              thing->call);
    check(receives == 0, "receives are missing in the list", receives);
    for (struct pc_addressed *first = pc_address_calls(&coll.addresses); first != NULL;
         first = first->next_call)
        early -= compare_call(first->call);
    check(early == 0, "calls are missing in the list, or doubled", early);
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
            remove_below(coll.first_call);
        }
        if (chance(1) && chance(20)) { /* one that was late: below all others */
            coll.first_call -= coll.first_call < 10 ? coll.first_call : below(10);
            meet(calls);
        }
        if (step % 16 == 0)
            compare_addresses(calls);
    }
    scarce = false;
    remove_below(UINT64_MAX);
    for (struct pc_addressed *thing; (thing = pc_address_receives(&coll.addresses)) != NULL;
         free(thing))
        check(pc_address_remove(&coll.addresses, thing), "it cannot be removed", thing->call);
    check(coll.addresses.by_address.used == 0 && coll.addresses.by_call.used == 0,
          "something is left", 0);
    pc_address_free(&coll.addresses);
}
#endif
