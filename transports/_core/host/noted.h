/* The collectives by messages that a rank has begun last, as they lie in memory that the launcher
   has, too: it reads them when a rank has failed (launcher/kept_calls.py). Plain C. */
#ifndef PC_NOTED_H
#define PC_NOTED_H

#include <stddef.h>
#include <stdint.h>

#define PC_NOTED_CALLS 1024

struct pc_noted {
    uint64_t ordinal; /* of the rank's calls, from 1; 0: nothing is here */
    uint64_t ident, number;
    uint32_t ended; /* 1: well */
    uint32_t nbytes;
    unsigned char text[96]; /* the beginning of the call's: its signature, a zero byte, its place */
};
_Static_assert(sizeof(struct pc_noted) == 128, "the launcher reads it so");

#define PC_NOTED_NBYTES (PC_NOTED_CALLS * sizeof(struct pc_noted))

#endif
