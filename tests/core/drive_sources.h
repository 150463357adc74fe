/* The sources of drive_random.c's driver, and the threads that end ops. */
#ifndef PYCOLL_DRIVE_SOURCES_H
#define PYCOLL_DRIVE_SOURCES_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "engine/drive.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/wait.h>
#include <unistd.h>

#define WAITERS 3
#define ENDERS 2
#define OPS_A_WAITER 60
#define SLOTS 16
#define MOST_SEVERAL 4

enum { MEMORY, LEAVING, SYSTEM, DIRECT, WAYS }; /* the last one is no source of the driver */

/* An op on its way: from `begin` until it was taken back or ended, and who ends it is through with
   it. */
struct slot {
    struct pc_op *op; /* NULL: cancelled, or ended; with the lock */
    int status;
    pc_word ready, used;
    _Atomic uint64_t since; /* it is ready, and who made it so has done all it must */
};

struct test_source {
    struct pc_source source;
    struct world *world;
    _Atomic bool asleep;
    bool busy;
    struct slot slots[SLOTS];
};

/* What enders have to do. */
struct ticket {
    struct ticket *next;
    struct test_source *source;
    struct slot *slot;
};

struct world {
    struct pc_drive drive;
    struct test_source ways[WAYS];
    pthread_mutex_t mutex;
    pthread_cond_t filled;
    struct ticket *tickets;
    bool over;
    uint64_t done, deadlines, cancelled, looks, bells, closed;
};

static uint64_t seed;

static void check(bool holds, const char *what) {
    if (holds)
        return;
    fprintf(stderr, "world %llu: %s\n", (unsigned long long)seed, what);
    _exit(3);
}

static uint64_t below(uint64_t *state, uint64_t limit) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (*state >> 33) % limit;
}

/* --- sources ---------------------------------------------------------------------------------- */

static bool end_ready(struct test_source *way) {
    bool worked = false;
    for (int i = 0; i < SLOTS; i++) {
        struct slot *slot = &way->slots[i];
        if (!atomic_exchange(&slot->ready, 0))
            continue;
        worked = true;
        if (slot->op != NULL)
            pc_op_end(slot->op, slot->status);
        slot->op = NULL;
    }
    return worked;
}

static bool progress(struct pc_source *source) {
    struct test_source *way = (struct test_source *)source;
    check(!way->busy, "two threads use a source");
    way->busy = true;
    eventfd_t rings;
    if (way == &way->world->ways[SYSTEM])
        eventfd_read(source->fd, &rings);
    bool worked = end_ready(way);
    if (worked && way == &way->world->ways[LEAVING]) {
        pc_lock_give(&way->world->drive.lock);
        sched_yield();
        pc_lock_take(&way->world->drive.lock);
    }
    way->busy = false;
    return worked;
}

static bool go_to_sleep(struct pc_source *source) {
    struct test_source *way = (struct test_source *)source;
    check(!way->busy && !way->asleep, "a source is used, or asleep, when it is told to sleep");
    atomic_exchange(&way->asleep, true);
    for (int i = 0; i < SLOTS; i++)
        if (atomic_load(&way->slots[i].ready) && way != &way->world->ways[SYSTEM])
            return false;
    return true;
}

static void awake(struct pc_source *source) {
    struct test_source *way = (struct test_source *)source;
    check(way->asleep, "a source is awakened that was not asleep");
    atomic_store(&way->asleep, false);
    eventfd_t rings;
    if (way != &way->world->ways[SYSTEM])
        eventfd_read(source->fd, &rings);
}

static uint64_t ready_ns(struct pc_source *source) {
    struct test_source *way = (struct test_source *)source;
    for (int i = 0; i < SLOTS; i++) {
        uint64_t since = atomic_load(&way->slots[i].since);
        if (since != 0 && atomic_load(&way->slots[i].ready))
            return since;
    }
    return 0;
}

static const struct pc_source_ops OPS = {progress, go_to_sleep, awake, ready_ns};

/* --- those that end ops ----------------------------------------------------------------------- */

static void end_by(struct test_source *way, struct slot *slot) {
    struct world *world = way->world;
    if (way == &world->ways[DIRECT]) {
        if (!pc_drive_enter(&world->drive))
            return;
        if (slot->op != NULL)
            pc_op_end(slot->op, slot->status);
        slot->op = NULL;
        pc_drive_leave(&world->drive);
    } else {
        atomic_exchange(&slot->ready, 1);
        if (way == &world->ways[SYSTEM] || atomic_load(&way->asleep))
            eventfd_write(way->source.fd, 1);
        atomic_store(&slot->since, pc_now_ns());
    }
}

static void *ender(void *argument) {
    struct world *world = argument;
    uint64_t random = seed * 77 + 5;
    for (;;) {
        pthread_mutex_lock(&world->mutex);
        while (world->tickets == NULL && !world->over)
            pthread_cond_wait(&world->filled, &world->mutex);
        struct ticket *ticket = world->tickets;
        if (ticket != NULL)
            world->tickets = ticket->next;
        pthread_mutex_unlock(&world->mutex);
        if (ticket == NULL)
            return NULL;
        for (uint64_t yields = below(&random, 8); yields > 0; yields--)
            sched_yield();
        if (below(&random, 8) == 0) /* so late that who waits is asleep */
            usleep((useconds_t)below(&random, 400));
        end_by(ticket->source, ticket->slot);
        atomic_store(&ticket->slot->used, 0);
        free(ticket);
    }
}
#endif
