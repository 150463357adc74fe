/* What the random programs share: worlds in which all follows from a seed, a check that names the
   seed, and counts of what has happened. */
#ifndef PYCOLL_RANDOM_WORLDS_H
#define PYCOLL_RANDOM_WORLDS_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

static uint64_t seed, random_state;

static inline void fail(const char *what, uint64_t number) {
    fprintf(stderr, "world %llu: %s (%llu)\n", (unsigned long long)seed, what,
            (unsigned long long)number);
    exit(3);
}

static inline void check(bool holds, const char *what, uint64_t number) {
    if (!holds)
        fail(what, number);
}

static inline uint64_t below(uint64_t limit) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (random_state >> 33) % limit;
}

static inline bool chance(int percent) { return below(100) < (uint64_t)percent; }

/* Run so many worlds; the seed of the first one is `first`. */
static inline void run_worlds(void (*world)(void), uint64_t worlds, uint64_t first) {
    for (seed = first; seed < first + worlds; seed++) {
        random_state = seed * 0x9E3779B97F4A7C15u + 1;
        world();
    }
}

/* The line that test_core_*.py reads. */
static inline void print_counts(const char *const *names, const uint64_t *counts, size_t length) {
    for (size_t i = 0; i < length; i++)
        printf("%s%s %llu", i > 0 ? ", " : "", names[i], (unsigned long long)counts[i]);
    printf("\n");
}
#endif
