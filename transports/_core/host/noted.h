/* What a rank has called and waited for last, as it lies in memory that the launcher has, too: it
   reads that when a rank has failed (launcher/kept_calls.py). Plain C.

   Each kind is a ring. What the collectives of a communicator in shared memory are lies in its
   region (region.h): here is only for whom, and when, they have waited. */
#ifndef PC_NOTED_H
#define PC_NOTED_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#define PC_NOTED 1024 /* of each kind */

/* A message from a program to another: what a send or a receive has sent or received, or shall. */
struct pc_noted_message {
    uint64_t ident; /* of the communicator */
    uint64_t nbytes; /* of a receive that is under way: the most that fits; 0: any number */
    int64_t tag;
    int32_t peer;  /* world rank; both may be PC_ANY while a receive is under way */
    uint32_t what; /* one of pc_noted_kind and one of pc_noted_state; 0: nothing is here */
};
_Static_assert(sizeof(struct pc_noted_message) == 32, "the launcher reads it so");

enum pc_noted_kind { PC_NOTED_SEND = 1, PC_NOTED_RECEIVE = 2 };
enum pc_noted_state {
    PC_NOTED_UNDER_WAY = 0,
    PC_NOTED_DONE = 16,
    PC_NOTED_GIVEN_UP = 32, /* it was withdrawn, or has failed */
    /* the message does not fit, or comes in a form that is received in another way */
    PC_NOTED_REFUSED = 48,
};

/* A wait of a collective in shared memory that was no short one. */
struct pc_noted_wait {
    uint64_t ident, number;      /* of the communicator, and of its call; 0: nothing is here */
    uint64_t since_ns, until_ns; /* of CLOCK_MONOTONIC; until 0: it goes on */
    uint32_t peer;               /* on this host, for which it waits */
    uint32_t nbytes;
    char place[56]; /* in the program, where it was made */
};
_Static_assert(sizeof(struct pc_noted_wait) == 96, "the launcher reads it so");

/* A collective by messages. */
struct pc_noted_call {
    uint64_t ordinal; /* of the rank's calls, from 1; 0: nothing is here */
    uint64_t ident, number;
    uint64_t begun_ns, ended_ns; /* of CLOCK_MONOTONIC; ended 0: it has not ended well */
    uint64_t nbytes;
    /* the beginning of the call's: its signature, a zero byte, its place */
    unsigned char text[112];
};
_Static_assert(sizeof(struct pc_noted_call) == 160, "the launcher reads it so");

/* What a communicator is called. */
struct pc_noted_name {
    uint64_t ident; /* 0: nothing is here */
    uint32_t nbytes;
    char text[52];
};
_Static_assert(sizeof(struct pc_noted_name) == 64, "the launcher reads it so");
#define PC_NOTED_NAMES 128

/* Of one rank. */
struct pc_notes {
    uint64_t num_messages, num_names, num_calls; /* that were noted */
    _Atomic uint64_t num_waits;
    char unused[32];
    struct pc_noted_name names[PC_NOTED_NAMES];
    struct pc_noted_message messages[PC_NOTED];
    struct pc_noted_wait waits[PC_NOTED];
    struct pc_noted_call calls[PC_NOTED];
};
_Static_assert(offsetof(struct pc_notes, names) == 64, "the launcher reads them there");

#define PC_NOTES_NBYTES ((size_t)300 << 10) /* whole pages */
_Static_assert(sizeof(struct pc_notes) <= PC_NOTES_NBYTES, "the launcher makes room for so much");

/* Note a message; returns its number, from 1, by which its end is noted. 0: nobody reads it. */
static inline uint64_t pc_note_message(struct pc_notes *notes, uint64_t ident, int peer,
                                       int64_t tag, size_t nbytes, uint32_t what) {
    if (notes == NULL)
        return 0;
    uint64_t number = notes->num_messages++;
    struct pc_noted_message *noted = &notes->messages[number % PC_NOTED];
    noted->ident = ident;
    noted->nbytes = nbytes;
    noted->tag = tag;
    noted->peer = peer;
    noted->what = what;
    return number + 1;
}

/* The note of a number; NULL: it is another's by now, or there is none. */
static inline struct pc_noted_message *pc_noted_of(struct pc_notes *notes, uint64_t number) {
    if (notes == NULL || number == 0 || notes->num_messages - number >= PC_NOTED)
        return NULL;
    return &notes->messages[(number - 1) % PC_NOTED];
}

static inline void pc_note_end(struct pc_notes *notes, uint64_t number,
                               enum pc_noted_state state) {
    struct pc_noted_message *noted = pc_noted_of(notes, number);
    if (noted != NULL && noted->what < PC_NOTED_DONE) /* what ended it first counts */
        noted->what |= (uint32_t)state;
}

#endif
