/* The thread that drives while something is pending and nobody waits. See drive.h.

   A caller that starts something mostly comes soon to wait for it, and two threads that take turns
   cost more than a small message. So the thread rests first, and looks whether anybody has waited,
   or started something, meanwhile: then callers keep coming, and it rests for longer. It is not
   called anew for each thing that becomes pending: only when it is parked, which it is if nothing
   has happened during a rest, or a caller that drives is asleep. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "drive.h"

#include <signal.h>

#define FIRST_REST_NS 100000u
#define LONGEST_REST_NS 1000000u

static bool is_open(struct pc_drive *drive) {
    return atomic_load_explicit(&drive->closed, memory_order_relaxed) == PC_DRIVE_OPEN;
}

bool pc_drive_is_needed(struct pc_drive *drive) {
    return drive->pending > 0 || (drive->on_work != NULL &&
                                  atomic_load_explicit(&drive->work, memory_order_relaxed) != 0);
}

static bool may_park(struct pc_drive *drive, bool is_quiet) {
    if (drive->driver != NULL || drive->first != NULL) /* who drives, calls it when it leaves */
        return drive->asleep;
    return !pc_drive_is_needed(drive) && is_quiet;
}

/* Sleep until it is called, or for that long. */
static void sleep_for(struct pc_drive *drive, uint64_t timeout_ns) {
    drive->parked = timeout_ns == PC_FOR_EVER;
    if (drive->parked)
        PC_DRIVE_COUNT(drive, parked);
    pc_lock_give(&drive->lock);
    pc_futex_wait(&drive->called, 0, timeout_ns);
    pc_lock_take(&drive->lock);
    drive->parked = false;
    if (is_open(drive))
        atomic_store_explicit(&drive->called, 0, memory_order_relaxed);
}

static void drive_for_others(struct pc_drive *drive) {
    drive->driver = &drive->background;
    PC_DRIVE_COUNT(drive, by_background);
    enum pc_waited waited = pc_drive_turns(drive, &drive->background);
    if (drive->driver == &drive->background)
        drive->driver = NULL;
    if (waited == PC_WAITED_LOOK && drive->on_work != NULL && drive->first == NULL) {
        pc_lock_give(&drive->lock);
        drive->on_work(drive->owner);
        pc_lock_take(&drive->lock);
    }
    pc_drive_hand_over(drive);
}

static void *live(void *argument) {
    struct pc_drive *drive = argument;
    uint64_t rest_ns = FIRST_REST_NS;
    uint32_t seen = 0;
    bool is_quiet = false;
    pc_lock_take(&drive->lock);
    while (is_open(drive)) {
        if (may_park(drive, is_quiet)) {
            sleep_for(drive, PC_FOR_EVER);
            rest_ns = FIRST_REST_NS;
            is_quiet = false;
            continue; /* what it was called for may be over already */
        }
        seen = drive->activity;
        sleep_for(drive, rest_ns);
        is_quiet = drive->activity == seen;
        if (!is_open(drive) || (!pc_drive_is_needed(drive) && is_quiet))
            continue;
        if (pc_drive_is_needed(drive) && drive->first == NULL &&
            drive->driver == NULL && is_quiet) {
            drive_for_others(drive);
            rest_ns = FIRST_REST_NS;
        } else {
            rest_ns = rest_ns * 2 < LONGEST_REST_NS ? rest_ns * 2 : LONGEST_REST_NS;
        }
    }
    pc_lock_give(&drive->lock);
    return NULL;
}

void pc_drive_call_background(struct pc_drive *drive) {
    if (drive->parked) {
        drive->parked = false;
        atomic_store_explicit(&drive->called, 1, memory_order_relaxed);
        pc_futex_wake(&drive->called);
    }
}

/* Signals are for the threads of the program. */
static void start(struct pc_drive *drive) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    drive->started = pthread_create(&drive->thread, NULL, live, drive) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

void pc_drive_pending(struct pc_drive *drive, int delta) {
    drive->pending += delta;
    if (delta > 0) {
        drive->activity++;
        if (!drive->started)
            /* if there are no threads any more, who waits drives, and the next call tries again */
            start(drive);
        else if (drive->driver == NULL && drive->first == NULL)
            pc_drive_call_background(drive);
    } else if (drive->pending == 0 && drive->driver == &drive->background) {
        pc_drive_ring(drive); /* nothing is left to drive for */
    }
}
