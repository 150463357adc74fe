/* What is counted by match_random.c, and its memory, which may be refused. */
#ifndef PYCOLL_MATCH_WORLD_H
#define PYCOLL_MATCH_WORLD_H

#include "match_hooks.h"

#include "engine/address.h"
#include "engine/match.h"

#undef calloc
#include "random_worlds.h"

#include <string.h>

#define MOST 400
#define STEPS 1500

uint64_t looks;
static bool scarce;
enum count {
    MATCHED, TOLD, WITHDRAWN, PUT_BACK, POSTED_AGAIN, WITHOUT_MEMORY, EARLY, AWAITED, COUNTS
};
static const char *const names[] = {
    "matched", "told", "withdrawn", "put back", "posted again", "without memory", "early",
    "awaited"
};
static uint64_t counts[COUNTS];

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
#endif
