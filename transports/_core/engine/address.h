/* Matching of the messages of collectives: which message belongs to which receive, for one
   communicator on one rank.

   Such a message has an address: the number of the call, the subcall (which of the call's
   schedules), the sender, and how many messages the sender has sent before in that subcall. At one
   address there stands at most one thing: a receive that waits for the message, or the message,
   which came early.
   Early messages are listed by call, too: a call that begins looks at those of its number, and one
   that has ended may leave none behind.

   The structures belong to the caller, who puts them into larger ones. They bring the links by
   which they stand here, so nothing is allocated for them, and nothing here can fail. All costs are
   constant on average. Nothing here locks: the caller does. */
#ifndef PC_ADDRESS_H
#define PC_ADDRESS_H

#include "base/chains.h"

#include <stdbool.h>

/* A receive, or a message that came early. The caller sets the first five members, all else to
   zero. */
struct pc_addressed {
    uint64_t call;
    uint32_t sender, index;
    uint16_t subcall;
    bool is_early; /* else it is a receive */
    bool stands;   /* at its address */
    /* Of a message: those of the same call, in the order in which they came. Of a receive: all
       receives. The `prev` of the first one is the last one. */
    struct pc_addressed *prev, *next;
    struct pc_chained by_address;
    /* Of the first message of a call, which stands for all of them: the calls of which messages
       have come. */
    struct pc_addressed *prev_call, *next_call;
    struct pc_chained by_call;
};

/* All zero: there is nothing. It must stay where it is while something stands here. */
struct pc_addresses {
    struct pc_chains by_address, by_call;
    struct pc_addressed *receives, *calls;
};

/* What stands at an address; or NULL. */
struct pc_addressed *pc_address_find(const struct pc_addresses *addresses, uint64_t call,
                                     uint16_t subcall, uint32_t sender, uint32_t index);
/* Put a thing at its address. What stands there already, and stays; NULL: the thing stands there
   now. */
struct pc_addressed *pc_address_add(struct pc_addresses *addresses, struct pc_addressed *thing);
/* Take a thing away. False: it does not stand at its address, or not any more. */
bool pc_address_remove(struct pc_addresses *addresses, struct pc_addressed *thing);

/* The early messages of a call: the first one, then by `next`, in the order in which they came.
   They stay. */
struct pc_addressed *pc_address_early(const struct pc_addresses *addresses, uint64_t call);

/* All receives, by `next`. To remove one, get the next one before. */
static inline struct pc_addressed *pc_address_receives(const struct pc_addresses *addresses) {
    return addresses->receives;
}
/* All calls with early messages, by `next_call`: each is the first message of its call. When that
   one is removed, the next message of its call takes its place in this list. */
static inline struct pc_addressed *pc_address_calls(const struct pc_addresses *addresses) {
    return addresses->calls;
}

/* Free the tables. What still stands here is the caller's, and is not touched: take it away
   before. */
void pc_address_free(struct pc_addresses *addresses);

#endif
