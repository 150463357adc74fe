/* Arguments of the point-to-point methods: looked at, not converted. */
#ifndef PC_P2P_CALL_H
#define PC_P2P_CALL_H

#include "memory.h"
#include "parameters.h"

/* What `envelope.P2P` packs: kind, communicator, tag, form; then the description. */
#define KIND_P2P 1
#define HEADER_NBYTES 18u
#define LONGEST_HEADER_NBYTES (HEADER_NBYTES + PC_LONGEST_DESCRIPTION)
#define ANY (-1)

/* Write the header of a message; returns its length. */
static inline size_t write_header(uint64_t ident, const struct pc_array *x, int64_t tag,
                                  unsigned char *to) {
    to[0] = KIND_P2P;
    memcpy(to + 1, &ident, 8);
    memcpy(to + 9, &tag, 8);
    to[17] = 0;
    return HEADER_NBYTES + pc_describe_memory(x, 0, to + HEADER_NBYTES);
}

#endif
