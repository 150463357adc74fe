/* Lists whose things know where they stand: `next`, and `at`, what points to them. */
#ifndef PC_LIST_H
#define PC_LIST_H

#include <stddef.h>

/* Put a thing at the front of a list, which begins at `first`. */
#define PC_LIST_ADD(first, thing)                   \
    do {                                            \
        (thing)->next = (first);                    \
        (thing)->at = &(first);                     \
        if ((thing)->next != NULL)                  \
            (thing)->next->at = &(thing)->next;     \
        (first) = (thing);                          \
    } while (0)

#define PC_LIST_REMOVE(thing)                       \
    do {                                            \
        *(thing)->at = (thing)->next;               \
        if ((thing)->next != NULL)                  \
            (thing)->next->at = (thing)->at;        \
    } while (0)

#endif
