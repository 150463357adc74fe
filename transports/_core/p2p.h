/* Point-to-point calls without Python in the middle: see p2p.c. */
#ifndef PC_P2P_H
#define PC_P2P_H

#include "arrays.h"
#include "channel_type.h"

typedef struct pc_p2p {
    PyObject_HEAD
    pc_channel_object *channel;
    uint64_t ident;
    int size;
    int *local;  /* rank on the host, by rank here; -1: this rank, or on another host */
    char usable; /* not closed, not broken, and without a default deadline */
    int queued;  /* messages that have come for it, and receives that wait: what comes in may be theirs */
    PyObject *slow_send, *slow_recv, *finish_send; /* Python callables */
} pc_p2p;

extern PyType_Spec pc_p2p_spec;

#endif
