/* A hash table of things that bring their links. See chains.h. */
#include "chains.h"

#include <stdlib.h>

/* An array of this size is kept once it is there: a number of things that goes up and down
   allocates nothing. */
#define KEPT 64

static void link_first(struct pc_chained **head, struct pc_chained *thing) {
    thing->next = *head;
    thing->at = head;
    if (thing->next != NULL)
        thing->next->at = &thing->next;
    *head = thing;
}

/* Without memory the array stays as it is. */
static void resize(struct pc_chains *chains, size_t size) {
    struct pc_chained **heads = calloc(size, sizeof *heads);
    if (heads == NULL)
        return;
    struct pc_chained **old = chains->heads != NULL ? chains->heads : chains->few;
    size_t old_size = chains->heads != NULL ? chains->size : PC_CHAINS_FEW;
    for (size_t place = 0; place < old_size; place++) {
        PC_LOOK();
        for (struct pc_chained *thing = old[place], *next; thing != NULL; thing = next) {
            PC_LOOK();
            next = thing->next;
            link_first(&heads[thing->hash & (size - 1)], thing);
        }
        old[place] = NULL;
    }
    free(chains->heads);
    chains->heads = heads;
    chains->size = size;
}

void pc_chains_add(struct pc_chains *chains, struct pc_chained *thing, uint64_t hash) {
    if (chains->heads == NULL ? chains->used >= PC_CHAINS_FEW : chains->used >= chains->size)
        resize(chains, chains->heads == NULL ? KEPT : chains->size * 2);
    thing->hash = hash;
    link_first(chains->heads != NULL ? &chains->heads[hash & (chains->size - 1)]
                                     : &chains->few[hash % PC_CHAINS_FEW],
               thing);
    chains->used++;
}

void pc_chains_remove(struct pc_chains *chains, struct pc_chained *thing) {
    *thing->at = thing->next;
    if (thing->next != NULL)
        thing->next->at = thing->at;
    thing->at = NULL;
    chains->used--;
    /* It is far from full after this, so that the next thing does not make it grow again. */
    if (chains->size > KEPT && chains->used < chains->size / 8)
        resize(chains, chains->size / 2);
}

void pc_chains_replace(struct pc_chained *old, struct pc_chained *with) {
    *with = *old;
    *with->at = with;
    if (with->next != NULL)
        with->next->at = &with->next;
    old->at = NULL;
}

void pc_chains_each(struct pc_chains *chains, void (*call)(struct pc_chained *thing)) {
    struct pc_chained **heads = chains->heads != NULL ? chains->heads : chains->few;
    size_t size = chains->heads != NULL ? chains->size : PC_CHAINS_FEW;
    for (size_t place = 0; place < size; place++)
        for (struct pc_chained *thing = heads[place], *next; thing != NULL; thing = next) {
            next = thing->next;
            call(thing);
        }
}

void pc_chains_free(struct pc_chains *chains) {
    free(chains->heads);
    *chains = (struct pc_chains){0};
}
