/* Matching of point-to-point messages: which message belongs to which receive, for one communicator
   on one rank.

   Posted receives and probes wait in one order, that of their calls, and unexpected messages in
   another, that of their arrival: the numbers that count both. A receive takes the first message
   that fits, and a message goes to the first receive that fits. So messages of one sender match in
   the order in which they were sent, also where receives ask for any source or any tag.

   The structures belong to the caller, who puts them into larger ones. They bring the links by
   which they wait, so nothing is allocated for them. What waits stands in a list of all. Where more
   than a few wait it stands in queues, too: one for each *pattern* (source and tag, either may be
   any), found by a hash table. A receive is in the queue of the pattern for which it asks. A
   message is in the queues of all patterns that fit it, of which the list of all is one. So nothing
   is searched for: all costs are constant on average, but that of coming back with an old number,
   which is the distance to the nearer end of the queue.

   Nothing here locks: the caller does. */
#ifndef PC_MATCH_H
#define PC_MATCH_H

#include "base/chains.h"

#include <stdbool.h>

/* Every source, or every tag, in a receive. */
#define PC_ANY (-1)

/* The place of a thing in one queue, which is in the order of the numbers. */
struct pc_queue_place {
    struct pc_queued *prev;    /* of the first: the last */
    struct pc_queued *next;    /* of the last: NULL */
    struct pc_chained chained; /* of the first, which stands for the queue in the hash table */
};

enum pc_queue { PC_QUEUE_ALL, PC_QUEUE_OWN, PC_QUEUE_SOURCE, PC_QUEUE_TAG, PC_QUEUES };

/* What posted receives and unexpected messages have in common. */
struct pc_queued {
    uint64_t number; /* its place in the order */
    int64_t tag;
    int source; /* world rank */
    bool waits; /* it stands in queues: to be false at first */
    struct pc_queue_place places[PC_QUEUES]; /* a posted receive uses the first two */
};

/* A receive or a probe. The caller sets source, tag and peek, all else to zero. */
struct pc_posted {
    struct pc_queued queued; /* the first member */
    bool peek;               /* a probe: it is told the message, and leaves it where it is */
    struct pc_posted *next_probe;
};

/* A message. The caller sets source and tag, neither to PC_ANY, all else to zero. */
struct pc_unexpected {
    struct pc_queued queued; /* the first member */
};

/* All that waits of one kind. */
struct pc_queues {
    struct pc_queued *first;
    size_t count;
    bool hashed;                             /* there are queues by pattern */
    /* of the queues in which a thing of this kind stands */
    int end;
    struct pc_chains by_pattern[PC_QUEUES]; /* none for PC_QUEUE_ALL */
};

/* It must stay where it is while something waits. */
struct pc_matching {
    uint64_t next_number;
    struct pc_queues posted, unexpected;
};

void pc_match_open(struct pc_matching *matching);
/* Free the tables. What still waits is the caller's, and is not touched: take it out before. */
void pc_match_free(struct pc_matching *matching);

/* Post a receive or a probe. The first message that fits, which a receive has taken; NULL: it waits
   now, in the place of its number, which the caller has set: `next_number`, or, of a receive whose
   message was taken back by its sender, the number it has. */
struct pc_unexpected *pc_match_post(struct pc_matching *matching, struct pc_posted *posted);

/* A message has come, and has its number from the caller; one that a receive has taken and gives
   back keeps it. The first receive that fits, which has taken it; NULL: the message waits now. In
   both cases `probes` becomes the list of the probes that fit and were posted before that
   receive, in order: none of them waits any more. */
struct pc_posted *pc_match_arrive(struct pc_matching *matching, struct pc_unexpected *message,
                                  struct pc_posted **probes);

/* Stop waiting. False: it did not wait, or not any more. */
bool pc_match_withdraw_posted(struct pc_matching *matching, struct pc_posted *posted);
bool pc_match_withdraw_message(struct pc_matching *matching, struct pc_unexpected *message);

/* The first message that fits, which stays; or NULL. */
struct pc_unexpected *pc_match_find(const struct pc_matching *matching, int source, int64_t tag);

/* All that waits, in order. To withdraw one, get the next one before. */
static inline struct pc_posted *pc_match_first_posted(const struct pc_matching *matching) {
    return (struct pc_posted *)matching->posted.first;
}
static inline struct pc_posted *pc_match_next_posted(const struct pc_posted *posted) {
    return (struct pc_posted *)posted->queued.places[PC_QUEUE_ALL].next;
}
static inline struct pc_unexpected *pc_match_first_message(const struct pc_matching *matching) {
    return (struct pc_unexpected *)matching->unexpected.first;
}
static inline struct pc_unexpected *pc_match_next_message(const struct pc_unexpected *message) {
    return (struct pc_unexpected *)message->queued.places[PC_QUEUE_ALL].next;
}

#endif
