/* Random uses of scratch memory: whoever has some finds in it what he has written, and no more is kept than may be.
   Prints how often memory was used again, and how often what was given back found it full. */
#include "scratch.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define USERS 12

static struct {
    unsigned char *memory;
    size_t nbytes;
    unsigned char mark;
} users[USERS];

static void check(int holds, const char *what) {
    if (!holds) {
        fprintf(stderr, "%s\n", what);
        exit(1);
    }
}

int main(int count, char **words) {
    struct pc_scratch scratch = {0};
    unsigned long again = 0, full = 0, rounds = strtoul(words[count - 1], NULL, 10);
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
            check(taken == 0 || (nbytes >= PC_SCRATCH_WORTH && taken >= nbytes && taken / PC_SCRATCH_PART <= nbytes),
                  "memory is taken that does not fit");
            memset(users[user].memory, users[user].mark, nbytes);
        } else {
            size_t before = scratch.nbytes;
            for (size_t byte = 0; byte < users[user].nbytes; byte++)
                check(users[user].memory[byte] == users[user].mark, "somebody else has written there");
            pc_scratch_give(&scratch, users[user].memory);
            users[user].memory = NULL;
            check(scratch.nbytes <= PC_SCRATCH_KEPT, "too much is kept");
            full += scratch.nbytes < before;
        }
    }
    for (int user = 0; user < USERS; user++)
        pc_scratch_discard(users[user].memory);
    pc_scratch_free(&scratch);
    check(scratch.newest == NULL && scratch.oldest == NULL && scratch.nbytes == 0, "something is kept");
    printf("used again %lu, full %lu\n", again, full);
    return 0;
}
