/* A region: the shared memory of one communicator's shared-memory collectives.

   Every collective call has a number, the same on all ranks. A rank *enters* call m by publishing m
   in the first line of its slot m % PC_SLOTS, together with the call's signature and, if that is
   small, its data. So small collectives are one exchange of slots. Larger ones stream through big
   slots in chunks that stay in the cache, and the largest read the other ranks' arrays directly
   (process_vm_readv).

       when a slot may be written again   PC_SLOTS calls later, when every rank has entered the call
   after the one that last used it: then nobody reads it any more when a big slot may be when every
   rank has consumed the chunk that was in it

   Region: a struct pc_progress a rank, PC_SLOTS slots a rank, PC_CHUNKS big slots a rank. */
#ifndef PC_REGION_H
#define PC_REGION_H

#include "transfer.h"

#define PC_SLOTS 8
#define PC_SLOT_NBYTES \
    (8192 + 5 * PC_LINE) /* no power of two: slots would share sets of the caches */
#define PC_CHUNKS 8

/* Where the arrays of a rank are in a large call; and its part of the work, if all ranks work on
   all arrays. */
struct pc_place {
    pc_flag64 number;  /* of the call that this is for; then the rest may be read */
    uint64_t x, out;   /* addresses in the rank's memory; 0: others are not to look there */
    uint64_t together; /* 1: the rank works together with the others, if they do */
    pc_flag64 working; /* 1: it may be at a piece, of its own or of another's */
    uint64_t unused[3];
    struct pc_transfer work; /* its pieces: those that were claimed, and those that are done */
};

struct pc_slot {
    pc_flag64 number;
    uint64_t signature;
    unsigned char data[PC_SLOT_NBYTES - 16 - PC_LINE - sizeof(struct pc_place)];
    int64_t shape[8]; /* number of dimensions, and the first of them: read only if calls differ */
    struct pc_place place;
};
_Static_assert(offsetof(struct pc_slot, place) % PC_LINE == 0, "places are whole lines");

/* Calls that are kept of each rank. The last 2 * PC_SLOTS are compared: none of these is
   overwritten before all have compared it, for nobody can be so far ahead. The others are for the
   launcher, which reads them when a rank has failed (kept.c). */
#define PC_KEPT_CALLS 1024
#define PC_KEPT_METHOD_AT 56
struct pc_kept {
    uint64_t signature;
    uint64_t nbytes; /* above PC_KEPT_METHOD_AT the method that was called; 0: not known */
};
#define PC_KEPT_MARK 0x9C011EC7CA115EEDu

struct pc_progress { /* of one rank; only that rank writes it */
    _Alignas(2 * PC_LINE) pc_flag64 produced; /* chunks it has put into its big slots, ever */
    pc_flag64 reduced;  /* chunks of which it has reduced its part */
    pc_flag64 consumed; /* chunks of which it needs nothing any more */
    /* direct calls: 2 m + 1: its part of call m is in its array; 2 m + 2: it has read all */
    pc_flag64 phase;
    /* 1: it has left a call with an error, and its arrays are its caller's again */
    pc_flag64 given_up;
    /* for the launcher: PC_KEPT_MARK once the next two are there, the rank's number on its host and
       how many the communicator has */
    pc_flag64 mark;
    uint32_t local, size;
    _Alignas(PC_LINE) struct pc_kept kept[PC_KEPT_CALLS];
};

size_t pc_chunk_nbytes(int size);
/* Where the slots and the big slots of a communicator of `size` ranks lie in its region, and how
   long that is. */
size_t pc_slots_offset(int size);
size_t pc_big_offset(int size);
size_t pc_region_nbytes(int size);
/* The longest region that a communicator of at most `size` ranks can have. */
size_t pc_largest_region_nbytes(int size);

#endif
