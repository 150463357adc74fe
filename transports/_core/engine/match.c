/* Matching of point-to-point messages. See match.h. */
#include "match.h"

/* So many things are looked through: that takes less time than to keep queues of them. */
#define FEW 8

/* The queues are given up when only half as many are left, so that one more or less does not make
   them each time. */
#define FEW_AGAIN (FEW / 2)

/* --- one queue, known by its first thing ------------------------------------------------------ */

/* Put a thing in its place. The first of the queue now. */
static struct pc_queued *queue_insert(struct pc_queued *first, struct pc_queued *thing,
                                      enum pc_queue queue) {
    struct pc_queue_place *place = &thing->places[queue];
    place->next = NULL;
    place->prev = thing;
    if (first == NULL)
        return thing;
    struct pc_queued *last = first->places[queue].prev;
    PC_LOOK();
    if (last->number < thing->number) {
        place->prev = last;
        first->places[queue].prev = last->places[queue].next = thing;
        return first;
    }
    if (thing->number < first->number) {
        place->prev = last;
        place->next = first;
        first->places[queue].prev = thing;
        return thing;
    }
    /* It has come back with an old number. Most do so near an end, and which one is not known:
       search from both. */
    struct pc_queued *before = first, *after = last;
    for (;;) {
        PC_LOOK();
        struct pc_queued *next = before->places[queue].next;
        if (next->number > thing->number)
            break;
        before = next;
        struct pc_queued *prev = after->places[queue].prev;
        if (prev->number < thing->number) {
            before = prev;
            break;
        }
        after = prev;
    }
    place->prev = before;
    place->next = before->places[queue].next;
    place->next->places[queue].prev = thing;
    before->places[queue].next = thing;
    return first;
}

/* Take a thing out. The first of the queue now; NULL: it is empty. */
static struct pc_queued *queue_remove(struct pc_queued *first, struct pc_queued *thing,
                                      enum pc_queue queue) {
    struct pc_queue_place *place = &thing->places[queue];
    /* The first one knows the last. */
    if (place->next != NULL)
        place->next->places[queue].prev = place->prev;
    else
        first->places[queue].prev = place->prev;
    if (thing == first)
        return place->next;
    place->prev->places[queue].next = place->next;
    return first;
}

/* --- queues by pattern ------------------------------------------------------------------------ */

/* What a thing in such a queue must have. */
static int source_of(const struct pc_queued *thing, enum pc_queue queue) {
    return queue == PC_QUEUE_TAG ? PC_ANY : thing->source;
}

static int64_t tag_of(const struct pc_queued *thing, enum pc_queue queue) {
    return queue == PC_QUEUE_SOURCE ? PC_ANY : thing->tag;
}

/* The first thing of the queue of a pattern, or NULL. */
static struct pc_queued *first_of(const struct pc_queues *queues, enum pc_queue queue, int source,
                                  int64_t tag) {
    uint64_t hash = pc_hash((uint64_t)source, (uint64_t)tag);
    struct pc_chained *chained = pc_chains_first(&queues->by_pattern[queue], hash);
    for (; chained != NULL; chained = chained->next) {
        PC_LOOK();
        struct pc_queue_place *place = PC_CHAINED_IN(chained, struct pc_queue_place, chained);
        struct pc_queued *thing = (struct pc_queued *)(void *)((char *)(place - queue) -
                                                               offsetof(struct pc_queued, places));
        if (chained->hash == hash && source_of(thing, queue) == source &&
            tag_of(thing, queue) == tag)
            return thing;
    }
    return NULL;
}

static void enter_queue(struct pc_queues *queues, struct pc_queued *thing, enum pc_queue queue) {
    int source = source_of(thing, queue);
    int64_t tag = tag_of(thing, queue);
    struct pc_queued *old = first_of(queues, queue, source, tag);
    struct pc_queued *first = queue_insert(old, thing, queue);
    if (old == NULL)
        pc_chains_add(&queues->by_pattern[queue], &thing->places[queue].chained,
                      pc_hash((uint64_t)source, (uint64_t)tag));
    else if (first != old)
        pc_chains_replace(&old->places[queue].chained, &first->places[queue].chained);
}

static void leave_queue(struct pc_queues *queues, struct pc_queued *thing, enum pc_queue queue) {
    bool is_first = thing->places[queue].chained.at != NULL;
    struct pc_queued *old =
        is_first ? thing : first_of(queues, queue, source_of(thing, queue), tag_of(thing, queue));
    struct pc_queued *first = queue_remove(old, thing, queue);
    if (first == NULL)
        pc_chains_remove(&queues->by_pattern[queue], &thing->places[queue].chained);
    else if (is_first)
        pc_chains_replace(&thing->places[queue].chained, &first->places[queue].chained);
}

/* --- all that waits of one kind --------------------------------------------------------------- */

static void enter_queues(struct pc_queues *queues, struct pc_queued *thing) {
    for (int queue = PC_QUEUE_OWN; queue < queues->end; queue++)
        enter_queue(queues, thing, (enum pc_queue)queue);
}

static void leave_queues(struct pc_queues *queues, struct pc_queued *thing) {
    for (int queue = PC_QUEUE_OWN; queue < queues->end; queue++)
        leave_queue(queues, thing, (enum pc_queue)queue);
}

static void add(struct pc_queues *queues, struct pc_queued *thing) {
    queues->first = queue_insert(queues->first, thing, PC_QUEUE_ALL);
    queues->count++;
    thing->waits = true;
    if (queues->hashed) {
        enter_queues(queues, thing);
    } else if (queues->count > FEW) {
        for (struct pc_queued *each = queues->first; each != NULL;
             each = each->places[PC_QUEUE_ALL].next)
            enter_queues(queues, each);
        queues->hashed = true;
    }
}

static void take_out(struct pc_queues *queues, struct pc_queued *thing) {
    queues->first = queue_remove(queues->first, thing, PC_QUEUE_ALL);
    queues->count--;
    thing->waits = false;
    if (!queues->hashed)
        return;
    leave_queues(queues, thing);
    if (queues->count > FEW_AGAIN)
        return;
    for (struct pc_queued *each = queues->first; each != NULL;
         each = each->places[PC_QUEUE_ALL].next)
        leave_queues(queues, each);
    queues->hashed = false;
}

static bool fits(int asked_source, int64_t asked_tag, int source, int64_t tag) {
    return (asked_source == PC_ANY || asked_source == source) &&
           (asked_tag == PC_ANY || asked_tag == tag);
}

/* The first receive or probe that such a message fits. */
static struct pc_posted *first_posted(const struct pc_matching *matching, int source, int64_t tag) {
    const struct pc_queues *posted = &matching->posted;
    struct pc_queued *found = NULL;
    if (posted->hashed) {
        for (int pattern = 0; pattern < 4; pattern++) {
            struct pc_queued *first =
                first_of(posted, PC_QUEUE_OWN, (pattern & 1) != 0 ? PC_ANY : source,
                         (pattern & 2) != 0 ? PC_ANY : tag);
            if (first != NULL && (found == NULL || first->number < found->number))
                found = first;
        }
        return (struct pc_posted *)found;
    }
    for (found = posted->first; found != NULL; found = found->places[PC_QUEUE_ALL].next) {
        PC_LOOK();
        if (fits(found->source, found->tag, source, tag))
            break;
    }
    return (struct pc_posted *)found;
}

/* --- what the engine calls -------------------------------------------------------------------- */

void pc_match_open(struct pc_matching *matching) {
    *matching = (struct pc_matching){.posted.end = PC_QUEUE_OWN + 1, .unexpected.end = PC_QUEUES};
}

void pc_match_free(struct pc_matching *matching) {
    for (int queue = 0; queue < PC_QUEUES; queue++) {
        pc_chains_free(&matching->posted.by_pattern[queue]);
        pc_chains_free(&matching->unexpected.by_pattern[queue]);
    }
    pc_match_open(matching);
}

struct pc_unexpected *pc_match_find(const struct pc_matching *matching, int source, int64_t tag) {
    const struct pc_queues *unexpected = &matching->unexpected;
    struct pc_queued *found = unexpected->first;
    if (source == PC_ANY && tag == PC_ANY)
        return (struct pc_unexpected *)found;
    if (unexpected->hashed) {
        enum pc_queue queue = source == PC_ANY ? PC_QUEUE_TAG
                              : tag == PC_ANY  ? PC_QUEUE_SOURCE
                                               : PC_QUEUE_OWN;
        return (struct pc_unexpected *)first_of(unexpected, queue, source, tag);
    }
    for (; found != NULL; found = found->places[PC_QUEUE_ALL].next) {
        PC_LOOK();
        if (fits(source, tag, found->source, found->tag))
            break;
    }
    return (struct pc_unexpected *)found;
}

struct pc_unexpected *pc_match_post(struct pc_matching *matching, struct pc_posted *posted) {
    struct pc_unexpected *message =
        pc_match_find(matching, posted->queued.source, posted->queued.tag);
    if (message == NULL)
        add(&matching->posted, &posted->queued);
    else if (!posted->peek)
        take_out(&matching->unexpected, &message->queued);
    return message;
}

struct pc_posted *pc_match_arrive(struct pc_matching *matching, struct pc_unexpected *message,
                                  struct pc_posted **probes) {
    *probes = NULL;
    struct pc_posted *posted;
    while ((posted = first_posted(matching, message->queued.source, message->queued.tag)) != NULL) {
        take_out(&matching->posted, &posted->queued);
        if (!posted->peek)
            return posted;
        posted->next_probe = NULL;
        *probes = posted;
        probes = &posted->next_probe;
    }
    add(&matching->unexpected, &message->queued);
    return NULL;
}

bool pc_match_withdraw_posted(struct pc_matching *matching, struct pc_posted *posted) {
    if (!posted->queued.waits)
        return false;
    take_out(&matching->posted, &posted->queued);
    return true;
}

bool pc_match_withdraw_message(struct pc_matching *matching, struct pc_unexpected *message) {
    if (!message->queued.waits)
        return false;
    take_out(&matching->unexpected, &message->queued);
    return true;
}
