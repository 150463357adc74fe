/* Things by number. See table.h. */
#include "table.h"

#include <stdlib.h>

/* A number is a generation, which makes it unlike any before, and a place. */
#define PLACE_BITS 20
#define PLACE_MASK (((uint64_t)1 << PLACE_BITS) - 1)

uint64_t pc_table_add(struct pc_table *table, void *thing) {
    if (table->first_free == 0) {
        uint32_t size = table->size == 0 ? 64 : table->size * 2;
        if (size > PLACE_MASK + 1)
            return 0;
        void **things = realloc(table->things, size * sizeof *things);
        if (things == NULL)
            return 0;
        table->things = things;
        uint64_t *numbers = realloc(table->numbers, size * sizeof *numbers);
        if (numbers == NULL)
            return 0;
        table->numbers = numbers;
        for (uint32_t place = size; place-- > table->size;) {
            things[place] = NULL;
            numbers[place] = table->first_free;
            table->first_free = place + 1;
        }
        table->size = size;
    }
    uint32_t place = table->first_free - 1;
    table->first_free = (uint32_t)table->numbers[place];
    table->things[place] = thing;
    table->numbers[place] = ++table->generation << PLACE_BITS | place;
    table->used++;
    return table->numbers[place];
}

void *pc_table_get(struct pc_table *table, uint64_t number) {
    uint64_t place = number & PLACE_MASK;
    if (place >= table->size || table->things[place] == NULL || table->numbers[place] != number)
        return NULL;
    return table->things[place];
}

void pc_table_remove(struct pc_table *table, uint64_t number) {
    uint64_t place = number & PLACE_MASK;
    table->things[place] = NULL;
    table->numbers[place] = table->first_free;
    table->first_free = (uint32_t)place + 1;
    table->used--;
}

void pc_table_free(struct pc_table *table) {
    free(table->things);
    free(table->numbers);
}
