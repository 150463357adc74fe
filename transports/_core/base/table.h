/* Things by number; a number is not used twice, so that an old one finds nothing. */
#ifndef PC_TABLE_H
#define PC_TABLE_H

#include <stdint.h>

struct pc_table {
    void **things;
    uint64_t *numbers; /* of a free place: the next free one + 1 */
    uint32_t size, first_free, used;
    uint64_t generation;
};

/* Its number; 0: there is no memory. */
uint64_t pc_table_add(struct pc_table *table, void *thing);
/* NULL: there is none of this number any more. */
void *pc_table_get(struct pc_table *table, uint64_t number);
/* It is there. */
void pc_table_remove(struct pc_table *table, uint64_t number);
/* Free the table, not the things. */
void pc_table_free(struct pc_table *table);

#endif
