/* Put before the sources of the matching (gcc -include): it counts what it looks at, and may be
   told that there is no memory. */
#ifndef PYCOLL_MATCH_HOOKS_H
#define PYCOLL_MATCH_HOOKS_H

#include <stdint.h>
#include <stdlib.h>

extern uint64_t looks;
#define PC_LOOK() (looks++)

void *scarce_calloc(size_t count, size_t nbytes);
#define calloc scarce_calloc
#endif
