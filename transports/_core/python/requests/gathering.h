/* Requests, collectives and what is both of them, in a list that is waited for. */
#ifndef PC_GATHERING_H
#define PC_GATHERING_H

#include "messages.h"

/* What an entry gives that only belongs to the one before it: nothing. */
#define PC_NO_PLACE -1

/* A receive and a send that are one request are two entries. */
struct pc_awaited {
    struct pc_started *listed; /* kept; of these two it is, and then the send */
    struct pc_started *started;
    Py_ssize_t place; /* of its result */
    bool was_done;    /* when it was last looked at, without the engine's lock */
};

struct pc_gathering {
    pc_engine_object *engine;
    struct pc_several several;
    PyObject *listed;
    struct pc_awaited *awaited; /* room for twice as many as are listed */
    Py_ssize_t count;
    bool any;      /* one is enough, of those whose result no wait has returned */
    bool is_taken; /* another thread waits for one of them */
    bool is_held;  /* one of them holds a message */
};

/* Fill in what is listed. False: not all of it is in the core, and of one engine, or it is nothing.
   Either way `pc_gathering_let_go` must follow. */
bool pc_gather(struct pc_gathering *gathering);
void pc_gathering_let_go(struct pc_gathering *gathering);
/* With the engine's lock: have no end counted any more. */
void pc_scatter(struct pc_gathering *gathering);
/* Whether it holds a message. */
bool pc_awaited_is_held(const struct pc_awaited *awaited);
/* Whether it has ended, and not failed. */
static inline bool pc_awaited_is_well(const struct pc_awaited *awaited) {
    return pc_op_is_done(&awaited->started->op) && awaited->started->op.status == 0;
}

#endif
