/* A hash table that allocates nothing for what it holds: each thing brings the links by which it
   stands in a chain.

   The caller finds its thing in the chain of a hash, and compares the key itself. The array of
   chains grows and shrinks with the number of things. Where there is no memory for a larger one the
   chains only become longer: nothing here can fail. */
#ifndef PC_CHAINS_H
#define PC_CHAINS_H

#include <stddef.h>
#include <stdint.h>

/* So many chains need no memory of their own. */
#define PC_CHAINS_FEW 8

/* Called for everything that is looked at, so that a test can count how much an operation costs. */
#ifndef PC_LOOK
#define PC_LOOK() ((void)0)
#endif

/* What a thing has of its own for each table in which it may stand. */
struct pc_chained {
    struct pc_chained *next;
    struct pc_chained **at; /* the pointer that points here; NULL: it stands in no chain */
    uint64_t hash;
};

/* All zero: a table without things. It must stay where it is while things stand in it. */
struct pc_chains {
    struct pc_chained **heads; /* NULL: `few` is used */
    size_t size;               /* of `heads`: a power of two */
    size_t used;               /* things in the table */
    struct pc_chained *few[PC_CHAINS_FEW];
};

/* A hash of which every bit depends on every bit of the two values. */
static inline uint64_t pc_hash(uint64_t one, uint64_t other) {
    uint64_t hash = one * 0x9E3779B97F4A7C15u + other; /* then the finalizer of SplitMix64 */
    hash = (hash ^ hash >> 30) * 0xBF58476D1CE4E5B9u;
    hash = (hash ^ hash >> 27) * 0x94D049BB133111EBu;
    return hash ^ hash >> 31;
}

/* The first thing of the chain in which all things of this hash stand, and some of other hashes; or
   NULL. */
static inline struct pc_chained *pc_chains_first(const struct pc_chains *chains, uint64_t hash) {
    PC_LOOK();
    return chains->heads != NULL ? chains->heads[hash & (chains->size - 1)]
                                 : chains->few[hash % PC_CHAINS_FEW];
}

/* The thing stands in no chain of this table. */
void pc_chains_add(struct pc_chains *chains, struct pc_chained *thing, uint64_t hash);
/* It stands in one. */
void pc_chains_remove(struct pc_chains *chains, struct pc_chained *thing);
/* Let a thing that stands in no chain take the place and the hash of one that does. */
void pc_chains_replace(struct pc_chained *old, struct pc_chained *with);
/* Call a function for each thing, which may free it, but not touch the table. */
void pc_chains_each(struct pc_chains *chains, void (*call)(struct pc_chained *thing));
/* Free the table, not the things: they may not be removed from it after this. */
void pc_chains_free(struct pc_chains *chains);

/* The structure of which `thing`, not NULL, is this member. */
#define PC_CHAINED_IN(thing, type, member) \
    ((type *)(void *)((char *)(thing) - offsetof(type, member)))

#endif
