/* Put before the sources of the channels (gcc -include): what is large becomes small, so that
   random messages take every way, and are under way for several calls. */
#ifndef PYCOLL_CHANNEL_HOOKS_H
#define PYCOLL_CHANNEL_HOOKS_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stddef.h>

#define PC_FRAGMENT_NBYTES ((size_t)20000)
#define PC_BUDGET ((size_t)40000)
#endif
