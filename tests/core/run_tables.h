/* The compiled schedules of all algorithms, as tests/core/test_core_run.py writes them, and what
   must come of them: for each chunk that a rank needs at the end an expression, which says whose
   contributions are combined in which order. */
#ifndef PYCOLL_RUN_TABLES_H
#define PYCOLL_RUN_TABLES_H

#include "run_link.h"

#include "engine/run.h"

#define MOST_RANKS 5
#define MOST_CHUNKS (3 * MOST_RANKS)
#define MOST_TOKENS 24
#define UNWRITTEN (-2)

enum lengths { FREE, EQUAL, BLOCKS, EMPTY };

struct schedule {
    struct pc_schedule table;
    bool has_source[MOST_CHUNKS];
    int tokens[MOST_CHUNKS][MOST_TOKENS], num_tokens[MOST_CHUNKS]; /* 0: it is not needed */
};

struct program {
    char collective[32], algorithm[32];
    int size, root, num_chunks;
    enum lengths lengths;
    struct schedule by_rank[MOST_RANKS];
};

static struct program *programs;
static size_t num_programs;

static uint32_t next_number(FILE *file) {
    int number;
    check(fscanf(file, "%d", &number) == 1, "the tables end too early", num_programs);
    return (uint32_t)number;
}

static void read_schedule(FILE *file, struct schedule *schedule, uint32_t num_chunks) {
    uint32_t num_steps = next_number(file), named = 0, followed = 0;
    uint32_t *chunks = calloc(next_number(file) + 1, sizeof *chunks);
    uint32_t *successors = calloc(next_number(file) + 1, sizeof *successors);
    struct pc_step *steps = calloc(num_steps + 1, sizeof *steps);
    for (uint32_t position = 0; position < num_steps; position++) {
        struct pc_step *step = &steps[position];
        step->kind = (uint8_t)next_number(file);
        step->incoming_first = next_number(file) != 0;
        step->other = next_number(file);
        step->index = next_number(file);
        step->waits = next_number(file);
        step->chunks = named;
        step->num_chunks = next_number(file);
        for (uint32_t each = 0; each < step->num_chunks; each++)
            chunks[named++] = next_number(file);
        step->successors = followed;
        step->num_successors = next_number(file);
        for (uint32_t each = 0; each < step->num_successors; each++)
            successors[followed++] = next_number(file);
    }
    schedule->table = (struct pc_schedule){num_steps, num_chunks, steps, chunks, successors};
    for (uint32_t chunk = 0; chunk < num_chunks; chunk++)
        schedule->has_source[chunk] = next_number(file) != 0;
    for (uint32_t chunk = 0; chunk < num_chunks; chunk++) {
        schedule->num_tokens[chunk] = (int)next_number(file);
        check(schedule->num_tokens[chunk] <= MOST_TOKENS, "an expression is too long", chunk);
        for (int token = 0; token < schedule->num_tokens[chunk]; token++)
            schedule->tokens[chunk][token] = (int)next_number(file);
    }
}

static void read_tables(const char *path) {
    FILE *file = fopen(path, "r");
    check(file != NULL, "the tables cannot be read", 0);
    struct program program;
    while (memset(&program, 0, sizeof program),
           fscanf(file, "%31s %31s", program.collective, program.algorithm) == 2) {
        program.size = (int)next_number(file);
        program.root = (int)next_number(file);
        program.num_chunks = (int)next_number(file);
        program.lengths = (enum lengths)next_number(file);
        check(program.size <= MOST_RANKS && program.num_chunks <= MOST_CHUNKS,
              "a table is too large", num_programs);
        for (int rank = 0; rank < program.size; rank++)
            read_schedule(file, &program.by_rank[rank], (uint32_t)program.num_chunks);
        programs = realloc(programs, (num_programs + 1) * sizeof *programs);
        programs[num_programs++] = program;
    }
    fclose(file);
}

/* --- values ----------------------------------------------------------------------------------- */

/* An affine map of numbers modulo 2^32: what is combined from such maps shows in which order. */
struct affine {
    uint32_t factor, summand;
};

/* What a rank contributes to an element of a chunk. */
static struct affine contribution(uint64_t plan, int rank, int chunk, size_t element) {
    uint64_t hash = pc_hash(pc_hash(plan, (uint64_t)rank * 1000 + (uint64_t)chunk), element);
    return (struct affine){(uint32_t)hash | 1, (uint32_t)(hash >> 32)};
}

static struct affine combine_two(struct affine left, struct affine right) {
    return (struct affine){left.factor * right.factor, left.factor * right.summand + left.summand};
}

/* Evaluate the expression that begins at `*token`, for one element. */
static struct affine evaluate(const int **token, uint64_t plan, size_t element, bool sums) {
    int first = *(*token)++;
    if (first >= 0)
        return contribution(plan, first / 1000, first % 1000, element);
    struct affine left = evaluate(token, plan, element, sums);
    struct affine right = evaluate(token, plan, element, sums);
    return sums ? (struct affine){0, left.summand + right.summand} : combine_two(left, right);
}

static void check_operands(const void *const *operands, int num_operands) {
    check(num_operands == 2 && operands[0] != operands[1],
          "a reduction has other than two operands", 0);
}

static void combine_affine(void *out, const void *const *operands, int num_operands, size_t count,
                           int unused) {
    (void)unused;
    check_operands(operands, num_operands);
    for (size_t each = 0; each < count; each++) {
        struct affine left, right, both;
        memcpy(&left, (const char *)operands[0] + each * sizeof left, sizeof left);
        memcpy(&right, (const char *)operands[1] + each * sizeof right, sizeof right);
        both = combine_two(left, right);
        memcpy((char *)out + each * sizeof both, &both, sizeof both);
    }
}

static void combine_sums(void *out, const void *const *operands, int num_operands, size_t count,
                         int unused) {
    (void)unused;
    check_operands(operands, num_operands);
    for (size_t each = 0; each < count; each++) {
        uint32_t left, right;
        memcpy(&left, (const char *)operands[0] + each * sizeof left, sizeof left);
        memcpy(&right, (const char *)operands[1] + each * sizeof right, sizeof right);
        left += right;
        memcpy((char *)out + each * sizeof left, &left, sizeof left);
    }
}

/* An element as it lies in memory. */
static void write_element(unsigned char *into, struct affine value, bool sums) {
    if (sums)
        memcpy(into, &value.summand, sizeof value.summand);
    else
        memcpy(into, &value, sizeof value);
}

#endif
