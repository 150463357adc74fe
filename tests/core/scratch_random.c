/* Random uses of scratch memory: whoever has some finds in it what he has written, and no more is
   kept than may be. Memory with a keeper stays until he frees it, and he is told once that he may;
   what is spent is not used again. Prints how often memory was used again, was with its keeper, and
   was left to him, and how often what was given back found it full. */
#include "engine/scratch.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define USERS 12

static struct {
    unsigned char *memory;
    size_t nbytes;
    unsigned char mark;
} users[USERS];

/* A keeper, who reads the memory until he lets go of it. */
struct keeper {
    unsigned char *memory;
    bool is_spent;
};

static unsigned long num_keepers, num_left;

static void check(int holds, const char *what) {
    if (!holds) {
        fprintf(stderr, "%s\n", what);
        exit(1);
    }
}

static void let_go(struct pc_scratch *scratch) {
    struct keeper *keeper;
    while ((keeper = pc_scratch_next_left(scratch)) != NULL) {
        check(*pc_scratch_keeper(keeper->memory) == keeper, "memory has another keeper");
        pc_scratch_discard(keeper->memory);
        free(keeper);
        num_left++;
    }
}

/* Give memory a keeper, if it has none; or see that it is still there, and whether it may be used
   again. */
static unsigned long keep(unsigned char *memory) {
    void **place = pc_scratch_keeper(memory);
    if (place == NULL)
        return 0;
    struct keeper *keeper = *place;
    if (keeper != NULL) {
        check(keeper->memory == memory && !keeper->is_spent, "memory that is spent is used again");
        return 1;
    }
    keeper = calloc(1, sizeof *keeper);
    check(keeper != NULL, "there is no memory");
    *keeper = (struct keeper){memory, false};
    *place = keeper;
    num_keepers++;
    return 0;
}

int main(int count, char **words) {
    struct pc_scratch scratch = {0};
    unsigned long again = 0, kept = 0, full = 0, rounds = strtoul(words[count - 1], NULL, 10);
    srand(7);
    for (unsigned long round = 0; round < rounds; round++) {
        int user = rand() % USERS;
        if (users[user].memory == NULL) {
            size_t before = scratch.nbytes, nbytes = (size_t)rand() % (rand() % 2 ? 100 : 3000);
            users[user].memory = pc_scratch_take(&scratch, nbytes);
            users[user].nbytes = nbytes;
            users[user].mark = (unsigned char)(round + 1);
            check(users[user].memory != NULL, "there is no memory");
            size_t taken = before - scratch.nbytes;
            again += taken > 0;
            check(taken == 0 || (nbytes >= PC_SCRATCH_WORTH && taken >= nbytes &&
                                 taken / PC_SCRATCH_PART <= nbytes),
                  "memory is taken that does not fit");
            check(pc_scratch_nbytes(users[user].memory) >= nbytes,
                  "there is less than was asked for");
            if (pc_scratch_keeper(users[user].memory) != NULL &&
                (*pc_scratch_keeper(users[user].memory) || rand() % 2))
                kept += keep(users[user].memory);
            memset(users[user].memory, users[user].mark, nbytes);
        } else {
            size_t before = scratch.nbytes;
            for (size_t byte = 0; byte < users[user].nbytes; byte++)
                check(users[user].memory[byte] == users[user].mark,
                      "somebody else has written there");
            if (rand() % 8 == 0) {
                void **place = pc_scratch_keeper(users[user].memory);
                pc_scratch_spend(users[user].memory);
                if (place != NULL && *place != NULL)
                    ((struct keeper *)*place)->is_spent = true;
            }
            pc_scratch_give(&scratch, users[user].memory);
            users[user].memory = NULL;
            check(scratch.nbytes <= PC_SCRATCH_KEPT, "too much is kept");
            full += scratch.nbytes < before;
        }
        if (rand() % 50 == 0)
            let_go(&scratch);
    }
    for (int user = 0; user < USERS; user++) {
        pc_scratch_spend(users[user].memory);
        pc_scratch_give(&scratch, users[user].memory);
    }
    pc_scratch_free(&scratch);
    let_go(&scratch);
    check(num_left == num_keepers, "a keeper has not been told");
    check(scratch.newest == NULL && scratch.oldest == NULL && scratch.nbytes == 0,
          "something is kept");
    printf("used again %lu, with its keeper %lu, left %lu, full %lu\n", again, kept, num_left,
           full);
    return 0;
}
