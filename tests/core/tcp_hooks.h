/* Put before the sources of the links over TCP (gcc -include): what is large becomes small, so that
   small random messages take every way. */
#ifndef PYCOLL_TCP_HOOKS_H
#define PYCOLL_TCP_HOOKS_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stddef.h>

#define PC_TCP_FRAGMENT ((size_t)700)
#define PC_TCP_LONG ((size_t)300)
#define PC_TCP_LONGEST_HEADER ((size_t)200)
#define PC_TCP_BUDGET ((size_t)2500)
#endif
