#include "comm.h"

#include <stdlib.h>

/* A large value is streamed through slots in shared memory, or read directly from the other ranks'
   arrays. Which is quicker depends on the processor, on the kind and size of the call, on whether
   the ranks' cores share a cache, and on how many ranks share a core; and a hypervisor may change
   it at any time. So the first calls of a kind and about a size go the way that is quicker as a
   rule. Then it is tried: some calls go this way and that way by turns, the ranks tell each other
   how long that took, and the next calls go the way that was quicker. Who makes few calls has no
   trial. Both ways give the same bits. */

#ifndef PC_CHOICE_FROM
#define PC_CHOICE_FROM \
    ((size_t)12 << 10) /* what is shorter, with the same bytes for all, is streamed */
#endif
#ifndef PC_RULE_KIB
#define PC_RULE_KIB ((size_t)1 << 10) /* the unit of the rules which way is quicker */
#endif
#ifndef PC_TURNS_BEFORE
#define PC_TURNS_BEFORE 10 /* so many turns go before the first trial */
#endif
#ifndef PC_TURNS_BETWEEN
#define PC_TURNS_BETWEEN 150 /* so many turns after a trial there is the next */
#endif
#define TURNS 4 /* of a trial; even ones are direct, and the quickest of a way counts */
#ifndef PC_CALLS_A_TURN
#define PC_CALLS_A_TURN \
    4 /* if the slots can hold several values, for then a rank may run ahead of another; else 2 */
#endif

#define OF_A_TRIAL \
    ((uint64_t)1 << 63) /* in a signature: how long the turns of that call's trial took */

struct pc_choice {
    bool direct, known;
    uint32_t calls_a_turn;
    uint32_t left; /* calls until the next trial */
    /* of the trial, that were made: one before its turns, whose end is their beginning, and
       theirs */
    uint32_t calls;
    uint64_t ended; /* the last of them */
    struct turn {
        uint64_t began, ended;
        /* ns that this rank spent between the calls, the one before the turn included */
        uint64_t away;
    } turns[TURNS];
};

/* set_direct_from(kind, nbytes): calls of this kind are direct from so many bytes on, and nothing
   is tried (0: as usual). For measuring. */
static size_t forced[PC_KINDS];

PyObject *pc_set_direct_from(PyObject *module, PyObject *args) {
    int kind;
    Py_ssize_t nbytes;
    (void)module;
    if (!PyArg_ParseTuple(args, "in", &kind, &nbytes))
        return NULL;
    if (kind >= 0 && kind < PC_KINDS)
        forced[kind] = (size_t)nbytes;
    Py_RETURN_NONE;
}

static bool has_both_ways(const pc_collective *call) {
    return call->comm->direct && call->kind != PC_BARRIER && call->kind != PC_SCAN &&
           call->kind != PC_EXSCAN;
}

/* Which way is quicker as a rule, measured by benchmarks/streaming with 2 ranks and with 4 on 2
   cores, and with 2 to 16 ranks on 16. To read is dearer for each page, and the more so the more
   ranks read the same pages, as those of a broadcast, all_gather or reduce. What each rank takes
   from each other, or a root from or for all, is read, which copies it once. */
static bool is_direct_as_a_rule(const pc_collective *call) {
    size_t given = pc_given_nbytes(call, call->nbytes), k = PC_RULE_KIB;
    int size = call->comm->size;
    /* The launcher counts a host's cores once, and tells all its ranks. */
    bool has_cores = call->comm->host->spins > 0;
    switch (call->kind) {
    case PC_SCATTER:
    case PC_ALL_TO_ALL:
        return given >= 256 * k;
    case PC_GATHER:
        return size > 2 && given >= (has_cores ? 128 * k : 16384 * k);
    case PC_REDUCE_SCATTER:
        return size > 2 && has_cores && given >= 1024 * k;
    case PC_ALL_REDUCE:
        return size > 8 && has_cores && given >= 1024 * k;
    default:
        return false;
    }
}

/* The choice for values of 2^k to 2^(k + 1) - 1 bytes; NULL with an exception. */
static pc_choice *find(pc_collective *call) {
    int bits = 0;
    for (size_t rest = call->nbytes; rest > 1; rest >>= 1)
        bits++;
    pc_choice **place = &call->comm->choices[call->kind][bits % PC_CHOICES];
    if (PC_LIKELY(*place != NULL))
        return *place;
    pc_choice *made = *place = calloc(1, sizeof *made);
    if (made == NULL) {
        pc_hold(&call->call);
        PyErr_NoMemory();
        return NULL;
    }
    made->direct = is_direct_as_a_rule(call);
    made->calls_a_turn = pc_given_nbytes(call, call->nbytes) < PC_CHUNKS * call->comm->chunk_nbytes
                             ? PC_CALLS_A_TURN
                             : 2;
    made->left = PC_TURNS_BEFORE * made->calls_a_turn - 1;
    return made;
}

int pc_choose(pc_collective *call) {
    call->trial = NULL;
    if (!has_both_ways(call))
        return 0;
    if (PC_UNLIKELY(forced[call->kind] != 0))
        return call->nbytes >= forced[call->kind];
    if (call->nbytes < PC_CHOICE_FROM)
        return 0;
    pc_choice *choice = find(call);
    if (choice == NULL)
        return -1;
    if (call->within != NULL) /* a part is no trial: there could be a part of a part */
        return choice->direct;
    if (PC_LIKELY(choice->left > 0)) {
        choice->left--;
        return choice->direct;
    }
    call->trial = choice;
    if (choice->calls == 0) {
        call->comm->trials++;
        return choice->direct;
    }
    uint32_t index = choice->calls - 1;
    struct turn *turn = &choice->turns[index / choice->calls_a_turn];
    if (index % choice->calls_a_turn == 0)
        *turn = (struct turn){.began = choice->ended};
    turn->away += (call->entered != 0 ? call->entered : pc_now_ns()) - choice->ended;
    return (turn - choice->turns) % 2 == 0;
}

/* How long a turn took: from when the last rank had left the call before it to when the last had
   left its last call, without what the rank that was away longest did between the calls, for which
   others waited. (From when the last rank had begun would be too short if ranks share cores: one
   may begin when another has ended.) */
static uint64_t took(const struct turn *all, int size) {
    uint64_t began = 0, ended = 0, away = 0;
    for (int rank = 0; rank < size; rank++) {
        const struct turn *turn = &all[rank * TURNS];
        began = turn->began > began ? turn->began : began;
        ended = turn->ended > ended ? turn->ended : ended;
        away = turn->away > away ? turn->away : away;
    }
    return ended > began + away ? ended - began - away : 0;
}

int pc_chosen(pc_collective *call) {
    pc_choice *choice = call->trial;
    int size = call->comm->size;
    if (PC_LIKELY(choice == NULL))
        return 0;
    choice->ended = pc_now_ns();
    if (choice->calls > 0)
        choice->turns[(choice->calls - 1) / choice->calls_a_turn].ended = choice->ended;
    if (choice->calls++ < TURNS * choice->calls_a_turn)
        return 0;
    struct turn *all = (struct turn *)pc_scratch(call->comm, (size_t)size * sizeof choice->turns);
    if (all == NULL) {
        pc_hold(&call->call);
        PyErr_NoMemory();
        return -1;
    }
    pc_collective part = pc_part_of(call);
    part.kind = PC_ALL_GATHER;
    part.signature ^= OF_A_TRIAL;
    part.x = choice->turns;
    part.out = all;
    part.nbytes = sizeof choice->turns;
    pc_part_begin(&part);
    int status = pc_exchange_run(&part);
    pc_part_end(&part);
    call->call = part.call;
    if (status < 0)
        return -1;
    uint64_t quickest[2] = {UINT64_MAX, UINT64_MAX};
    for (int turn = 0; turn < TURNS; turn++) {
        uint64_t this = took(&all[turn], size);
        quickest[turn % 2] = this < quickest[turn % 2] ? this : quickest[turn % 2];
    }
    choice->direct = quickest[0] < quickest[1];
    choice->known = true;
    call->comm->trials--;
    choice->left = PC_TURNS_BETWEEN * choice->calls_a_turn;
    choice->calls = 0;
    return 0;
}

int pc_known_choice(const pc_comm *comm, int kind, int bits) {
    const pc_choice *choice = comm->choices[kind][bits];
    return choice != NULL && choice->known ? choice->direct : -1;
}

void pc_forget_choices(pc_comm *comm) {
    for (int kind = 0; kind < PC_KINDS; kind++)
        for (int index = 0; index < PC_CHOICES; index++)
            free(comm->choices[kind][index]);
}
