/* Blocks of which only the sender knows what they are: arrays of any shapes, and pickled objects.

   In the first round a rank writes what its blocks are into rows of its slot, with the blocks that
   are small; when all were small that is the call. Else each rank reads, in a second round, what it
   needs of the others' memory. */
#ifndef PC_UNEVEN_H
#define PC_UNEVEN_H

#include "comm.h"

#include "python/arguments/memory.h"

/* What a rank has left to say after its rows. With long heads the call goes by messages. */
enum { PC_NOTHING_LEFT, PC_LARGE_BLOCKS, PC_LONG_HEADS };

/* A block of this rank's. */
struct pc_given {
    struct pc_array array; /* of an object its bytes */
    const char *head; /* as blocks.py writes it; NULL: `array` says what it is */
    Py_ssize_t head_nbytes;
};

/* A block that comes. */
struct pc_block {
    int rank;
    const unsigned char *head, *elements; /* in the row */
    uint32_t head_nbytes;
    size_t room;           /* behind the head; a longer block is elsewhere, */
    uint64_t address;      /* in its sender's memory */
    struct pc_array place; /* without data: Python copies it */
    intptr_t begin, end;   /* in an `out` that has several */
};

struct pc_uneven {
    pc_comm *comm;
    int method; /* of objects, and of no others, a kind */
    int root, dtype;
    uint64_t salt;       /* of a dtype without a code */
    PyObject *x;         /* for who is told of the call; or NULL */
    int num_given, mine; /* and which of these this rank keeps */
    struct pc_given *given;
    size_t row_nbytes;
    unsigned char *rows; /* what the others have said, if that does not fit into slots; or NULL */
    uint64_t left;
    int num_blocks;
    struct pc_block *blocks;
};

/* There is room for a block of each rank in `given` and `blocks`. */
struct pc_uneven pc_uneven(pc_comm *comm, int method, int root, struct pc_given *given,
                           struct pc_block *blocks);
/* Whether each rank has one block for all that take it, not one for each rank. */
bool pc_uneven_gathers(const struct pc_uneven *call);
/* Whether the rows do not fit into a slot. */
bool pc_uneven_has_long_rows(const struct pc_uneven *call);
/* Say what this rank's blocks are, and read what the others' are, unless that is done. -1 with an
   exception. */
int pc_uneven_first(struct pc_uneven *call);
/* Bytes of an object, of which that is the head. */
size_t pc_uneven_object_nbytes(const struct pc_block *block);
/* Bring the blocks to their places. With `status` -1 there is an exception instead, with which this
   rank gives up: the others may wait in the second round. -1 with an exception. */
int pc_uneven_second(const struct pc_uneven *call, int status);
void pc_uneven_release(const struct pc_uneven *call);

#endif
