/* The memory of the engine (engine_hooks.h): it is counted, and in some worlds refused at times.

   Who includes this has counted WITHOUT_MEMORY in `counts`, and says how often it is refused:
   PERCENT_REFUSED. */
#ifndef PYCOLL_SCARCE_MEMORY_H
#define PYCOLL_SCARCE_MEMORY_H

#include "random_worlds.h"

#include <string.h>

#define POISON 0xEE

static bool scarce; /* memory is refused now and then */
static int64_t allocated;

static bool is_refused(void) {
    if (!scarce || !chance(PERCENT_REFUSED))
        return false;
    counts[WITHOUT_MEMORY]++;
    return true;
}

void *scarce_malloc(size_t nbytes) {
    if (is_refused())
        return NULL;
    allocated++;
    return malloc(nbytes);
}

void *scarce_calloc(size_t count, size_t nbytes) {
    if (is_refused())
        return NULL;
    allocated++;
    return calloc(count, nbytes);
}

void counted_free(void *memory) {
    allocated -= memory != NULL;
    free(memory);
}

static void poison_and_free(unsigned char *memory, size_t nbytes) {
    if (memory != NULL)
        memset(memory, POISON, nbytes);
    free(memory);
}
#endif
