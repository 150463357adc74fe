/* Matching of the messages of collectives. See address.h. */
#include "address.h"

static uint64_t hash_of(uint64_t call, uint16_t subcall, uint32_t sender, uint32_t index) {
    return pc_hash(pc_hash(call, subcall), (uint64_t)sender << 32 | index);
}

static uint64_t hash_of_call(uint64_t call) {
    return pc_hash(call, 0);
}

struct pc_addressed *pc_address_find(const struct pc_addresses *addresses, uint64_t call,
                                     uint16_t subcall, uint32_t sender, uint32_t index) {
    uint64_t hash = hash_of(call, subcall, sender, index);
    struct pc_chained *chained = pc_chains_first(&addresses->by_address, hash);
    for (; chained != NULL; chained = chained->next) {
        PC_LOOK();
        struct pc_addressed *thing = PC_CHAINED_IN(chained, struct pc_addressed, by_address);
        if (thing->call == call && thing->subcall == subcall && thing->sender == sender &&
            thing->index == index)
            return thing;
    }
    return NULL;
}

struct pc_addressed *pc_address_early(const struct pc_addresses *addresses, uint64_t call) {
    struct pc_chained *chained = pc_chains_first(&addresses->by_call, hash_of_call(call));
    for (; chained != NULL; chained = chained->next) {
        PC_LOOK();
        struct pc_addressed *first = PC_CHAINED_IN(chained, struct pc_addressed, by_call);
        if (first->call == call)
            return first;
    }
    return NULL;
}

/* --- lists whose first one knows the last ----------------------------------------------------- */

static void append(struct pc_addressed **first, struct pc_addressed *thing) {
    thing->next = NULL;
    if (*first == NULL) {
        *first = thing->prev = thing;
        return;
    }
    thing->prev = (*first)->prev;
    (*first)->prev = thing->prev->next = thing;
}

static void unlist(struct pc_addressed **first, struct pc_addressed *thing) {
    if (thing->next != NULL)
        thing->next->prev = thing->prev;
    else
        (*first)->prev = thing->prev;
    if (*first == thing)
        *first = thing->next;
    else
        thing->prev->next = thing->next;
}

/* --- calls of which messages came early ------------------------------------------------------- */

static void add_call(struct pc_addresses *addresses, struct pc_addressed *first) {
    pc_chains_add(&addresses->by_call, &first->by_call, hash_of_call(first->call));
    first->prev_call = NULL;
    first->next_call = addresses->calls;
    if (first->next_call != NULL)
        first->next_call->prev_call = first;
    addresses->calls = first;
}

/* Have another message, or none, take the place of the first one of its call. */
static void replace_first(struct pc_addresses *addresses, struct pc_addressed *old,
                          struct pc_addressed *with) {
    struct pc_addressed *prev = old->prev_call, *next = old->next_call;
    if (with != NULL) {
        pc_chains_replace(&old->by_call, &with->by_call);
        with->prev_call = prev;
        with->next_call = next;
    } else {
        pc_chains_remove(&addresses->by_call, &old->by_call);
    }
    if (next != NULL)
        next->prev_call = with != NULL ? with : prev;
    *(prev != NULL ? &prev->next_call : &addresses->calls) = with != NULL ? with : next;
}

static void remove_early(struct pc_addresses *addresses, struct pc_addressed *thing) {
    bool is_first = thing->by_call.at != NULL;
    struct pc_addressed *first = is_first ? thing : pc_address_early(addresses, thing->call);
    unlist(&first, thing);
    if (is_first)
        replace_first(addresses, thing, first);
}

/* --- what the engine calls -------------------------------------------------------------------- */

struct pc_addressed *pc_address_add(struct pc_addresses *addresses, struct pc_addressed *thing) {
    struct pc_addressed *other =
        pc_address_find(addresses, thing->call, thing->subcall, thing->sender, thing->index);
    if (other != NULL)
        return other;
    pc_chains_add(&addresses->by_address, &thing->by_address,
                  hash_of(thing->call, thing->subcall, thing->sender, thing->index));
    thing->stands = true;
    if (!thing->is_early) {
        append(&addresses->receives, thing);
        return NULL;
    }
    struct pc_addressed *first = pc_address_early(addresses, thing->call);
    append(&first, thing);
    if (first == thing)
        add_call(addresses, thing);
    return NULL;
}

bool pc_address_remove(struct pc_addresses *addresses, struct pc_addressed *thing) {
    if (!thing->stands)
        return false;
    thing->stands = false;
    pc_chains_remove(&addresses->by_address, &thing->by_address);
    if (thing->is_early)
        remove_early(addresses, thing);
    else
        unlist(&addresses->receives, thing);
    return true;
}

void pc_address_free(struct pc_addresses *addresses) {
    pc_chains_free(&addresses->by_address);
    pc_chains_free(&addresses->by_call);
    *addresses = (struct pc_addresses){0};
}
