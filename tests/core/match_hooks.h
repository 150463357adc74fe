/* Put before the sources of the matching (gcc -include): it counts what it looks at. */
#ifndef PYCOLL_MATCH_HOOKS_H
#define PYCOLL_MATCH_HOOKS_H

#include <stdint.h>
#include <stdlib.h>

extern uint64_t looks;
#define PC_LOOK() (looks++)
#endif
