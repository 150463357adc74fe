/* What the owner of a run asks it, and does for it. See run.h. */
#include "run_state.h"

size_t pc_run_awaited(const struct pc_run *run, int *ranks, size_t most) {
    size_t count = 0;
    for (const struct pc_moved *move = run->memory != NULL ? run->moves : NULL;
         move != NULL && count < most; move = move->next)
        /* else it waits for its owner */
        if (move->is_send || move->receive.state != PC_RECEIVE_HELD)
            ranks[count++] = move->is_send ? move->send.peer : (int)move->receive.address.sender;
    return count;
}

uint32_t pc_run_next_asked(struct pc_run *run) {
    if (run->memory == NULL || run->first_asked == run->last_asked)
        return PC_NO_STEP;
    return run->asked_for[run->first_asked++];
}

struct pc_receive *pc_run_held(struct pc_run *run, uint32_t position) {
    for (struct pc_moved *move = run->moves; move != NULL; move = move->next)
        if (!move->is_send && move->step == position)
            return move->receive.state == PC_RECEIVE_HELD ? &move->receive : NULL;
    return NULL;
}

void pc_run_taken(struct pc_run *run, uint32_t position) {
    for (struct pc_moved *move = run->moves; move != NULL; move = move->next)
        if (!move->is_send && move->step == position) {
            free_move(move);
            return;
        }
}

void *pc_run_take_incoming(struct pc_run *run, uint32_t position, size_t *nbytes) {
    *nbytes = length_of(run, &run->table->steps[position]);
    void *memory = run->incoming[position - 1];
    run->incoming[position - 1] = NULL;
    return memory;
}

bool pc_run_place(struct pc_run *run, uint32_t chunk) {
    return destination(run, chunk) != NULL;
}

void pc_run_settle(struct pc_run *run, uint32_t chunk) {
    settle(run, &run->chunks[chunk]);
}

void *pc_run_take_own(struct pc_run *run) {
    run->own_is_taken = true;
    return run->own;
}

enum pc_value_place pc_run_where(const struct pc_run *run, uint32_t number) {
    return where(run, number);
}
