/* How much the matching of messages (transports/_core/engine/match.h, address.h) looks at where
   many things wait.

   match_many THINGS

   prints a line for each way in which so many things come and go: what is looked at for each of
   them, rounded up, and the name of the way. Exits with 3 if a result is wrong, or if tables stay
   large when everything has gone. */
#include "match_hooks.h"

#include "engine/address.h"
#include "engine/match.h"

#include <stdio.h>

#define SMALL 64

uint64_t looks;
static size_t many;
static struct pc_matching matching;
static struct pc_addresses addresses;
static struct pc_posted *posted, *probes;
static struct pc_unexpected *messages;
static struct pc_addressed *parts;
static size_t *shuffled;

static void check(bool holds, const char *what) {
    if (holds)
        return;
    fprintf(stderr, "%s\n", what);
    exit(3);
}

static void post(size_t place, int source, int64_t tag, bool peek,
                 const struct pc_unexpected *expected) {
    posted[place] = (struct pc_posted){
        .queued = {.source = source, .tag = tag, .number = matching.next_number++}, .peek = peek};
    check(pc_match_post(&matching, &posted[place]) == expected, "a receive got another message");
}

static void arrive(size_t place, int source, int64_t tag, const struct pc_posted *expected) {
    messages[place] = (struct pc_unexpected){
        .queued = {.source = source, .tag = tag, .number = matching.next_number++}};
    check(pc_match_arrive(&matching, &messages[place], &probes) == expected,
          "a message went to another receive");
}

/* --- the ways --------------------------------------------------------------------------------- */

static void receives_first(void) {
    for (size_t each = 0; each < many; each++)
        post(each, 1, (int64_t)each, false, NULL);
    for (size_t each = 0; each < many; each++)
        arrive(each, 1, (int64_t)shuffled[each], &posted[shuffled[each]]);
}

static void receives_of_anything_first(void) {
    for (size_t each = 0; each < many; each++)
        post(each, each % 2 != 0 ? PC_ANY : 1, each % 3 != 0 ? PC_ANY : (int64_t)each, false, NULL);
    size_t got = 0;
    for (size_t each = 0; each < many; each++) {
        messages[each] = (struct pc_unexpected){.queued = {
            .source = 1, .tag = (int64_t)shuffled[each], .number = matching.next_number++}};
        got += pc_match_arrive(&matching, &messages[each], &probes) != NULL;
    }
    check(got > many / 2, "too few messages were received");
    for (struct pc_posted *left; (left = pc_match_first_posted(&matching)) != NULL;)
        pc_match_withdraw_posted(&matching, left);
    for (struct pc_unexpected *left; (left = pc_match_first_message(&matching)) != NULL;)
        pc_match_withdraw_message(&matching, left);
}

static void messages_first(void) {
    for (size_t each = 0; each < many; each++)
        arrive(each, 1, (int64_t)each, NULL);
    for (size_t each = 0; each < many; each++)
        post(each, each % 2 != 0 ? PC_ANY : 1, (int64_t)shuffled[each], false,
             &messages[shuffled[each]]);
}

static void messages_first_received_in_order(void) {
    for (size_t each = 0; each < many; each++)
        arrive(each, (int)(shuffled[each] % 10), (int64_t)(shuffled[each] % 1000), NULL);
    for (size_t each = 0; each < many; each++) {
        bool any = each % 2 != 0;
        post(each, any ? PC_ANY : messages[each].queued.source, PC_ANY, false, &messages[each]);
    }
}

static void probes_of_one_message(void) {
    for (size_t each = 0; each < many; each++)
        post(each, 1, each % 2 != 0 ? PC_ANY : 5, true, NULL);
    arrive(0, 1, 5, NULL);
    for (size_t each = 0; each < many; each++, probes = probes->next_probe)
        check(probes == &posted[each], "another probe was told");
    check(probes == NULL && matching.posted.count == 0, "a probe still waits");
    pc_match_withdraw_message(&matching, &messages[0]);
}

static void receives_given_up(void) {
    for (size_t each = 0; each < many; each++)
        post(each, 1, (int64_t)(each % 7), false, NULL);
    for (size_t each = 0; each < many; each++)
        check(pc_match_withdraw_posted(&matching, &posted[shuffled[each]]),
              "a receive does not wait");
}

static void messages_taken_back(void) {
    for (size_t each = 0; each < many; each++)
        arrive(each, (int)(each % 5), (int64_t)(each % 7), NULL);
    for (size_t each = 0; each < many; each++)
        check(pc_match_withdraw_message(&matching, &messages[shuffled[each]]),
              "a message does not wait");
}

static void ten_that_come_and_go(void) {
    for (size_t each = 0; each < many; each += 10) {
        for (size_t one = 0; one < 10; one++)
            arrive(each + one, 1, (int64_t)(each + one), NULL);
        for (size_t one = 0; one < 10; one++)
            post(each + one, 1, (int64_t)(each + one), false, &messages[each + one]);
    }
}

/* Half of the messages are taken and given back, the others wait: these are all behind them, or all
   before them. */
static void put_back_half(bool later) {
    size_t half = many / 2;
    for (size_t each = 0; each < many; each++)
        arrive(each, 1, 5, NULL);
    /* Each of these takes the first one, or is given the last one of those that wait. */
    for (size_t each = 0; each < half; each++) {
        if (later)
            pc_match_withdraw_message(&matching, &messages[many - 1 - each]);
        else
            post(each, PC_ANY, 5, false, &messages[each]);
    }
    for (size_t each = half; each-- > 0;) {
        struct pc_unexpected *back = &messages[later ? many - 1 - each : each];
        check(pc_match_arrive(&matching, back, &probes) == NULL && probes == NULL,
              "it went to someone");
    }
    for (size_t each = 0; each < many; each++)
        post(each, 1, PC_ANY, false, &messages[each]);
}

static void messages_put_back_before_others(void) {
    put_back_half(false);
}

static void messages_put_back_behind_others(void) {
    put_back_half(true);
}

/* A few receives near the end lose their messages, again and again. */
static void receives_posted_again(void) {
    for (size_t each = 0; each < many; each++)
        post(each, 1, 5, false, NULL);
    for (size_t each = 0; each < many; each++) {
        size_t place = each % 2 != 0 ? each % 4 : many - 1 - each % 4;
        check(pc_match_withdraw_posted(&matching, &posted[place]), "a receive does not wait");
        check(pc_match_post(&matching, &posted[place]) == NULL, "there is no message");
    }
    for (size_t each = 0; each < many; each++)
        arrive(each, 1, 5, &posted[each]);
}

/* --- collectives ------------------------------------------------------------------------------ */

static void parts_of_many_calls(void) {
    for (size_t each = 0; each < many; each++) {
        size_t place = shuffled[each];
        parts[place] = (struct pc_addressed){.call = place, .sender = 1, .is_early = true};
        check(pc_address_add(&addresses, &parts[place]) == NULL, "something stands there");
    }
    size_t taken = 0;
    for (uint64_t call = 0; call <= many; call++) {
        struct pc_addressed *part = pc_address_early(&addresses, call);
        check((part != NULL) == (call < many), "a call has no message");
        if (part != NULL)
            taken += pc_address_remove(&addresses, part);
    }
    check(taken == many, "messages were left");
}

static void parts_of_one_call(void) {
    for (size_t each = 0; each < many; each++) {
        parts[each] =
            (struct pc_addressed){.call = 7, .sender = (uint32_t)each, .is_early = each % 2 != 0};
        check(pc_address_add(&addresses, &parts[each]) == NULL, "something stands there");
    }
    size_t early = 0;
    for (struct pc_addressed *part = pc_address_early(&addresses, 7); part != NULL;
         part = part->next)
        check(part == &parts[2 * early++ + 1], "messages are listed in another order");
    check(early == many / 2, "messages are not listed");
    for (size_t each = 0; each < many; each++)
        check(pc_address_remove(&addresses, &parts[shuffled[each]]), "it is not there");
}

static const struct {
    const char *name;
    void (*way)(void);
} ways[] = {
    {"receives first", receives_first},
    {"receives of anything first", receives_of_anything_first},
    {"messages first", messages_first},
    {"messages first, received in order", messages_first_received_in_order},
    {"probes of one message", probes_of_one_message},
    {"receives given up", receives_given_up},
    {"messages taken back", messages_taken_back},
    {"ten that come and go", ten_that_come_and_go},
    {"messages put back before others", messages_put_back_before_others},
    {"messages put back behind others", messages_put_back_behind_others},
    {"receives posted again", receives_posted_again},
    {"parts of many calls", parts_of_many_calls},
    {"parts of one call", parts_of_one_call},
};

static void check_small(const struct pc_chains *chains) {
    check(chains->used == 0 && chains->size <= SMALL, "a table is large, and all has gone");
}

int main(int argc, char **argv) {
    many = argc == 2 ? strtoull(argv[1], NULL, 10) / 10 * 10 : 0;
    if (many < 20)
        return 2;
    posted = calloc(many, sizeof *posted);
    messages = calloc(many, sizeof *messages);
    parts = calloc(many, sizeof *parts);
    shuffled = calloc(many, sizeof *shuffled);
    check(posted != NULL && messages != NULL && parts != NULL && shuffled != NULL, "no memory");
    uint64_t random = 1;
    for (size_t each = 0; each < many; each++) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        size_t other = (random >> 33) % (each + 1);
        shuffled[each] = shuffled[other];
        shuffled[other] = each;
    }
    for (size_t way = 0; way < sizeof ways / sizeof *ways; way++) {
        pc_match_open(&matching);
        looks = 0;
        ways[way].way();
        printf("%llu %s\n", (unsigned long long)((looks + many - 1) / many), ways[way].name);
        check(matching.posted.count + matching.unexpected.count == 0, "something still waits");
        for (int queue = 0; queue < PC_QUEUES; queue++) {
            check_small(&matching.posted.by_pattern[queue]);
            check_small(&matching.unexpected.by_pattern[queue]);
        }
        check_small(&addresses.by_address);
        check_small(&addresses.by_call);
        pc_match_free(&matching);
        pc_address_free(&addresses);
    }
    free(posted);
    free(messages);
    free(parts);
    free(shuffled);
    return 0;
}
