/* Who drives, and how it waits. See drive.h.

   Each sleep is announced before the last look, and all that is done for others, ops that end and
   turns at driving, is done with the lock held, which a sleeper gives up only when it can be woken.
   tests/core/drive.pml is the proof. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "drive.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

/* A source that costs a system call is looked at when it has not been for so long, however few
   turns that were. */
#define ALL_AFTER_NS 20000u
/* A yield that takes so long shows that others need the core: the next waits do not spin. */
#define LONG_YIELD_NS 100000u
#define CROWDED_WAITS 64
/* Turns that did something between two looks at the clock. */
#define TURNS_A_CLOCK 8

/* What an event of the epoll set belongs to; or the number of a source. */
#define BELL 100u
#define WATCHED 200u

#define GO_ON ((enum pc_waited)-1)

static bool is_over(const struct pc_waiter *waiter) {
    if (waiter->op != NULL)
        return pc_op_is_done(waiter->op);
    return waiter->several != NULL && pc_several_is_done(waiter->several);
}

static bool is_open(struct pc_drive *drive) {
    return atomic_load_explicit(&drive->closed, memory_order_acquire) == PC_DRIVE_OPEN;
}

static bool has_work(struct pc_drive *drive) {
    return atomic_load_explicit(&drive->work, memory_order_relaxed) != 0;
}

static bool is_background(struct pc_drive *drive, const struct pc_waiter *waiter) {
    return waiter == &drive->background;
}

/* --- waking ----------------------------------------------------------------------------------- */

/* Have the driver look again, if it sleeps. */
void pc_drive_ring(struct pc_drive *drive) {
    if (!drive->asleep)
        return;
    eventfd_write(is_background(drive, drive->driver) ? drive->background_bell : drive->bell, 1);
#ifdef PC_DRIVE_CHECKED
    drive->rung_ns = pc_now_ns();
#endif
}

static void wake(struct pc_drive *drive, struct pc_waiter *waiter) {
    if (waiter == drive->driver) {
        pc_drive_ring(drive);
    } else if (atomic_load_explicit(&waiter->woken, memory_order_relaxed) == 0) {
        atomic_store_explicit(&waiter->woken, 1, memory_order_relaxed);
        pc_futex_wake(&waiter->woken);
    }
}

void pc_op_end(struct pc_op *op, int status) {
    struct pc_drive *drive = op->drive;
    struct pc_several *several = op->several;
    int bell = op->bell;
    op->status = status;
    op->several = NULL;
    atomic_store_explicit(&op->done, 1, memory_order_release); /* from here on it may be freed */
    if (several != NULL) {
        uint32_t left = atomic_load_explicit(&several->left, memory_order_relaxed);
        if (left > 1 && several->ended != NULL && status != 0)
            left = 1;
        void (*ended)(struct pc_several *several) = left == 1 ? several->ended : NULL;
        if (left > 0)
            atomic_store_explicit(&several->left, left - 1, memory_order_release); /* so may this */
        if (ended != NULL)
            ended(several);
        if (left != 1)
            several = NULL;
    }
    for (struct pc_waiter *waiter = drive->first; waiter != NULL; waiter = waiter->next)
        if (waiter->op == op || (several != NULL && waiter->several == several))
            wake(drive, waiter);
    if (bell >= 0)
        eventfd_write(bell, 1);
}

void pc_several_end(struct pc_several *several, struct pc_drive *drive) {
    atomic_store_explicit(&several->left, 0, memory_order_release);
    for (struct pc_waiter *waiter = drive->first; waiter != NULL; waiter = waiter->next)
        if (waiter->several == several)
            wake(drive, waiter);
}

void pc_drive_hand_over(struct pc_drive *drive) {
    if (drive->driver != NULL)
        return;
    if (drive->first != NULL)
        wake(drive, drive->first);
    else if (pc_drive_is_needed(drive))
        pc_drive_call_background(drive);
}

void pc_drive_post_work(struct pc_drive *drive) {
    atomic_store_explicit(&drive->work, 1, memory_order_relaxed);
    pc_drive_ring(drive);
    if (drive->driver == NULL && drive->first == NULL)
        pc_drive_call_background(drive); /* if nobody takes it in time */
}

void pc_drive_posted(struct pc_drive *drive) {
    drive->all_due = true;
    pc_drive_ring(drive);
}

bool pc_drive_take_work(struct pc_drive *drive) {
    return atomic_exchange_explicit(&drive->work, 0, memory_order_acq_rel) != 0;
}

/* --- driving ---------------------------------------------------------------------------------- */

/* Let the sources progress; `now` is 0 if the time is not known. */
static bool look(struct pc_drive *drive, uint64_t now) {
    bool all = drive->all_due || !drive->any_cheap || ++drive->turn % drive->every == 0 ||
               (now != 0 && now - drive->all_ns >= ALL_AFTER_NS);
    bool worked = false;
    for (uint32_t i = 0; i < drive->num_sources && is_open(drive); i++)
        if (all || drive->sources[i]->cheap)
            worked |= drive->sources[i]->ops->progress(drive->sources[i]);
    if (all) {
        drive->all_due = false;
        drive->all_ns = now;
    }
    return worked;
}

static enum pc_waited time_is_up(struct pc_waiter *me, uint64_t now) {
    if (now >= me->deadline_ns)
        return PC_WAITED_DEADLINE;
    if (me->look_ns == 0)
        me->look_ns = me->slice_ns < PC_FOR_EVER - now ? now + me->slice_ns : PC_FOR_EVER;
    return now >= me->look_ns ? PC_WAITED_LOOK : GO_ON;
}

static uint64_t time_left(const struct pc_waiter *me, uint64_t now) {
    uint64_t limit = me->deadline_ns < me->look_ns ? me->deadline_ns : me->look_ns;
    return limit == PC_FOR_EVER ? PC_FOR_EVER : limit - now;
}

static void yield(struct pc_drive *drive, uint64_t now) {
    pc_lock_give(&drive->lock);
    sched_yield();
    pc_lock_take(&drive->lock);
    if (pc_now_ns() - now > LONG_YIELD_NS)
        drive->crowded = CROWDED_WAITS;
}

/* What ends the driving, whatever the time. */
static enum pc_waited what_ends(struct pc_drive *drive, struct pc_waiter *me) {
    if (is_over(me))
        return PC_WAITED_DONE;
    if (!is_open(drive))
        return PC_WAITED_CLOSED;
    if (has_work(drive))
        return PC_WAITED_LOOK;
    if (is_background(drive, me) && (drive->first != NULL || drive->pending == 0))
        return PC_WAITED_DEADLINE;
    return GO_ON;
}

static void awaken(struct pc_drive *drive, uint32_t count) {
    for (uint32_t i = 0; i < count; i++)
        drive->sources[i]->ops->awake(drive->sources[i]);
}

/* Sleep without the lock; what epoll_wait or poll returns, or minus an errno. */
static int sleep_on(struct pc_drive *drive, bool background, int timeout_ms,
                    struct epoll_event *events, int room) {
    pc_lock_give(&drive->lock);
    int count;
    if (background) {
        /* beside it a caller may come to sleep on the set: what it holds is looked at later */
        struct pollfd both[] = {{drive->epoll, POLLIN, 0}, {drive->background_bell, POLLIN, 0}};
        count = poll(both, 2, timeout_ms);
    } else {
        count = epoll_wait(drive->epoll, events, room, timeout_ms);
    }
    int error = errno;
    pc_lock_take(&drive->lock);
    return count < 0 ? -error : count;
}

static void take_events(struct pc_drive *drive, const struct epoll_event *events, int count) {
    eventfd_t rings;
    for (int i = 0; i < count; i++)
        if (events[i].data.u32 == BELL)
            eventfd_read(drive->bell, &rings);
        else if (events[i].data.u32 == WATCHED) {
            atomic_store_explicit(&drive->fired, 1, memory_order_relaxed);
            atomic_store_explicit(&drive->work, 1, memory_order_relaxed);
        }
    drive->all_due = true;
}

#ifdef PC_DRIVE_CHECKED
/* A sleep came to its end by itself: was there nothing to do all the time? */
static void check_sleep(struct pc_drive *drive, struct pc_waiter *me, uint64_t started,
                        uint64_t timeout_ns) {
    bool is_missed = drive->rung_ns > started ? drive->rung_ns < started + timeout_ns : is_over(me);
    for (uint32_t i = 0; i < drive->num_sources; i++) {
        uint64_t since = drive->sources[i]->ops->ready_ns(drive->sources[i]);
        is_missed |= since != 0 && since < started + timeout_ns;
    }
    drive->counts.overslept += is_missed;
}
#endif

/* Sleep until something comes. */
static enum pc_waited sleep_once(struct pc_drive *drive, struct pc_waiter *me, uint64_t now) {
    uint32_t announced = 0;
    bool may = true;
    while (may && announced < drive->num_sources) {
        may = drive->sources[announced]->ops->sleep(drive->sources[announced]);
        announced++;
    }
    enum pc_waited waited = may ? what_ends(drive, me) : GO_ON;
    if (!may || waited != GO_ON) {
        drive->all_due = true;
        awaken(drive, announced);
        return waited;
    }
    uint64_t left = time_left(me, now);
    int timeout_ms =
        (int)(((left < PC_LONGEST_SLEEP_NS ? left : PC_LONGEST_SLEEP_NS) + 999999u) / 1000000u);
    struct epoll_event events[8];
    bool background = is_background(drive, me);
    drive->asleep = true;
    PC_DRIVE_COUNT(drive, sleeps);
#ifdef PC_DRIVE_CHECKED
    uint64_t started = pc_now_ns();
#endif
    int count = sleep_on(drive, background, timeout_ms, events, 8);
    eventfd_t rings;
    if (background)
        eventfd_read(drive->background_bell, &rings);
    if (drive->driver != me) /* a caller drives instead, and has awakened the sources */
        return PC_WAITED_DEADLINE;
    drive->asleep = false;
    awaken(drive, drive->num_sources); /* one may have come meanwhile */
#ifdef PC_DRIVE_CHECKED
    if (count == 0)
        check_sleep(drive, me, started, (uint64_t)timeout_ms * 1000000u);
#endif
    if (background)
        count = epoll_wait(drive->epoll, events, 8, 0);
    take_events(drive, events, count);
    if (is_over(me))
        return PC_WAITED_DONE;
    return count == -EINTR && !background ? PC_WAITED_LOOK : GO_ON;
}

enum pc_waited pc_drive_turns(struct pc_drive *drive, struct pc_waiter *me) {
    bool background = is_background(drive, me);
    uint32_t spins = background || drive->crowded > 0 ? 0 : drive->spins;
    uint64_t patience_ns = background ? 0 : drive->patience_ns;
    uint64_t now = 0, idle_since = 0;
    for (uint32_t turns = 1;; turns++) {
        bool worked = look(drive, now);
        enum pc_waited waited = what_ends(drive, me);
        if (waited != GO_ON)
            return waited;
        now = 0;
        if (pc_lock_let_in(&drive->lock)) {
            PC_DRIVE_COUNT(drive, let_in);
            worked = true; /* or somebody has: look again */
        }
        if (worked) {
            idle_since = 0;
            if (turns % TURNS_A_CLOCK != 0 && me->deadline_ns != 0)
                continue;
        } else if (spins > 0 && me->deadline_ns != 0) {
            spins--;
            pc_relax();
            continue;
        }
        now = pc_now_ns();
        waited = time_is_up(me, now);
        if (waited != GO_ON)
            return waited;
        if (worked)
            continue;
        idle_since = idle_since == 0 ? now : idle_since;
        pc_drive_tally(drive, me, now);
        if (now - idle_since < patience_ns) {
            yield(drive, now);
            continue;
        }
        waited = sleep_once(drive, me, now);
        if (waited != GO_ON)
            return waited;
        now = 0;
    }
}

/* --- waiting ---------------------------------------------------------------------------------- */

/* Become the driver, if nobody is, or the background thread is asleep where it drives. */
static bool take_over(struct pc_drive *drive, struct pc_waiter *me) {
    if (drive->driver != NULL) {
        if (!is_background(drive, drive->driver) || !drive->asleep)
            return false;
        pc_drive_ring(drive);
        drive->asleep = false;
        awaken(drive, drive->num_sources);
        PC_DRIVE_COUNT(drive, stolen);
    }
    drive->driver = me;
    return true;
}

/* Sleep while another thread drives. */
static enum pc_waited rest(struct pc_drive *drive, struct pc_waiter *me) {
    if (me->deadline_ns == 0)
        return PC_WAITED_DEADLINE;
    uint64_t now = pc_now_ns();
    enum pc_waited waited = time_is_up(me, now);
    if (waited != GO_ON)
        return waited;
    pc_drive_tally(drive, me, now);
    atomic_store_explicit(&me->woken, 0, memory_order_relaxed);
    PC_DRIVE_COUNT(drive, rests);
    pc_lock_give(&drive->lock);
    int error = pc_futex_wait(&me->woken, 0, time_left(me, now));
    pc_lock_take(&drive->lock);
#ifdef PC_DRIVE_CHECKED
    bool was_woken = atomic_load_explicit(&me->woken, memory_order_relaxed) != 0;
    bool is_driven = drive->driver != NULL;
    for (struct pc_waiter *other = drive->first; other != NULL; other = other->next)
        is_driven |= atomic_load_explicit(&other->woken, memory_order_relaxed) != 0;
    drive->counts.overslept += !was_woken && (is_over(me) || !is_driven);
    drive->counts.inherited += was_woken && drive->driver == NULL && !is_over(me);
#endif
    atomic_store_explicit(&me->woken, 1, memory_order_relaxed);
    return error == EINTR && !is_over(me) ? PC_WAITED_LOOK : GO_ON;
}

static void join(struct pc_drive *drive, struct pc_waiter *me) {
    me->previous = drive->last;
    *(drive->last != NULL ? &drive->last->next : &drive->first) = me;
    drive->last = me;
}

static void part(struct pc_drive *drive, struct pc_waiter *me) {
    *(me->previous != NULL ? &me->previous->next : &drive->first) = me->next;
    *(me->next != NULL ? &me->next->previous : &drive->last) = me->previous;
}

enum pc_waited pc_drive_wait(struct pc_drive *drive, struct pc_op *op, struct pc_several *several,
                             uint64_t deadline_ns, uint64_t slice_ns) {
    struct pc_waiter me = {
        .op = op, .several = several, .deadline_ns = deadline_ns, .slice_ns = slice_ns, .woken = 1};
    if (is_over(&me))
        return PC_WAITED_DONE;
    if (!pc_drive_enter(drive))
        return PC_WAITED_CLOSED;
    join(drive, &me);
    drive->activity++;
    drive->crowded -= drive->crowded > 0;
    enum pc_waited waited = GO_ON;
    while (waited == GO_ON) {
        if (is_over(&me)) {
            waited = PC_WAITED_DONE;
        } else if (!is_open(drive)) {
            waited = PC_WAITED_CLOSED;
        } else if (take_over(drive, &me)) {
            waited = pc_drive_turns(drive, &me);
            drive->driver = NULL;
        } else {
            waited = rest(drive, &me);
        }
    }
    pc_drive_untally(drive, &me);
    part(drive, &me);
    pc_drive_hand_over(drive);
    if (!is_open(drive)) {
        atomic_fetch_add_explicit(&drive->gone, 1, memory_order_relaxed);
        pc_futex_wake(&drive->gone);
    }
    pc_drive_leave(drive);
    return waited;
}

/* --- opening and closing ---------------------------------------------------------------------- */

static int add(struct pc_drive *drive, int fd, uint32_t number, uint32_t events) {
    struct epoll_event event = {.events = events, .data.u32 = number};
    return epoll_ctl(drive->epoll, EPOLL_CTL_ADD, fd, &event) == 0 ? 0 : errno;
}

static void close_descriptors(struct pc_drive *drive) {
    int descriptors[] = {drive->epoll, drive->bell, drive->background_bell};
    for (size_t i = 0; i < sizeof descriptors / sizeof descriptors[0]; i++)
        if (descriptors[i] >= 0)
            close(descriptors[i]);
    drive->epoll = drive->bell = drive->background_bell = -1;
}

int pc_drive_open(struct pc_drive *drive) {
    memset(drive, 0, sizeof *drive);
    drive->every = 16;
    drive->patience_ns = 50000;
    drive->background.deadline_ns = drive->background.slice_ns = PC_FOR_EVER;
    memset(drive->watched, -1, sizeof drive->watched);
    drive->epoll = epoll_create1(EPOLL_CLOEXEC);
    drive->bell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    drive->background_bell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    int error = drive->epoll < 0 || drive->bell < 0 || drive->background_bell < 0 ? errno : 0;
    if (error == 0)
        error = add(drive, drive->bell, BELL, EPOLLIN);
    if (error != 0) {
        atomic_store(&drive->closed, PC_DRIVE_CLOSED);
        close_descriptors(drive);
    }
    return error;
}

int pc_drive_add(struct pc_drive *drive, struct pc_source *source) {
    if (drive->num_sources == PC_SOURCES)
        return ENOSPC;
    int error = add(drive, source->fd, drive->num_sources, EPOLLIN);
    if (error != 0)
        return error;
    if (drive->asleep && !source->ops->sleep(source)) /* it is awakened with the others */
        pc_drive_ring(drive);
    drive->sources[drive->num_sources++] = source;
    drive->any_cheap |= source->cheap;
    return 0;
}

int pc_drive_watch(struct pc_drive *drive, int fd) {
    for (int i = 0; i < PC_WATCHED; i++)
        if (drive->watched[i] < 0) {
            int error = add(drive, fd, WATCHED, EPOLLIN | EPOLLONESHOT);
            drive->watched[i] = error == 0 ? fd : -1;
            return error;
        }
    return ENOSPC;
}

void pc_drive_watch_again(struct pc_drive *drive) {
    struct epoll_event event = {.events = EPOLLIN | EPOLLONESHOT, .data.u32 = WATCHED};
    atomic_store_explicit(&drive->fired, 0, memory_order_relaxed);
    for (int i = 0; i < PC_WATCHED; i++)
        if (drive->watched[i] >= 0)
            epoll_ctl(drive->epoll, EPOLL_CTL_MOD, drive->watched[i], &event);
}

void pc_drive_close(struct pc_drive *drive) {
    if (!pc_drive_enter(drive))
        return;
    atomic_store_explicit(&drive->closed, PC_DRIVE_CLOSED, memory_order_release);
    for (struct pc_waiter *waiter = drive->first; waiter != NULL; waiter = waiter->next)
        wake(drive, waiter);
    pc_drive_ring(drive);
    atomic_store_explicit(&drive->called, 1, memory_order_relaxed);
    pc_futex_wake(&drive->called);
    while (drive->first != NULL) {
        uint32_t gone = atomic_load_explicit(&drive->gone, memory_order_relaxed);
        pc_lock_give(&drive->lock);
        pc_futex_wait(&drive->gone, gone, PC_FOR_EVER);
        pc_lock_take(&drive->lock);
    }
    pc_lock_give(&drive->lock);
    if (drive->started)
        pthread_join(drive->thread, NULL);
    close_descriptors(drive);
}

void pc_drive_forked(struct pc_drive *drive) {
    /* The set is the parent's too: nothing is taken out of it, only this process's descriptors
       go. */
    atomic_store_explicit(&drive->closed, PC_DRIVE_FORKED, memory_order_release);
    close_descriptors(drive);
}
