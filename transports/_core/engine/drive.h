/* Waiting, and progress while somebody waits. Plain C, without Python.

   What comes from other ranks comes from *sources*: the links. Nothing comes by itself: one of the
   threads that wait *drives*: it lets the sources progress until the op that it waits for is done.
   The others sleep, each until its op is done or nobody drives any more. A thread in the background
   drives while something is pending and nobody waits.

   One lock protects everything. The driver has it while it looks at the sources, and not while it
   yields or sleeps; it lets in who wants it. It sleeps on one epoll set: the sources' descriptors,
   its bell, and descriptors that others have given, of which the caller is told. It sleeps for 100
   ms at most. */
#ifndef PC_DRIVE_H
#define PC_DRIVE_H

#include "op.h"
#include "host/tally.h"

#include <pthread.h>

#define PC_SOURCES 8
#define PC_WATCHED 8
/* A sleep is no longer than that, so that nothing that was missed is missed for long. */
#define PC_LONGEST_SLEEP_NS 100000000u

/* A source. Each call is made with the lock held, by one thread at a time. */
struct pc_source;
struct pc_source_ops {
    /* Do what can be done without waiting; whether that was something. It may give the lock back in
       the middle. */
    bool (*progress)(struct pc_source *source);
    /* The driver is about to sleep: announce that, so that who has something for it makes `fd`
       readable, and then look once more. False: there is something. */
    bool (*sleep)(struct pc_source *source);
    /* It is awake; after each `sleep`, whatever that has returned. */
    void (*awake)(struct pc_source *source);
#ifdef PC_DRIVE_CHECKED
    /* Since when there is something for which who posted it has done all it must; 0: there is
       nothing. */
    uint64_t (*ready_ns)(struct pc_source *source);
#endif
};

struct pc_source {
    const struct pc_source_ops *ops;
    int fd;     /* readable when there is something to do while the driver sleeps */
    bool cheap; /* a look costs no system call: it is looked at each turn, others now and then */
};

enum pc_waited {
    PC_WAITED_DONE,
    PC_WAITED_DEADLINE,
    /* the slice is over, a signal came, or there is work for the caller: see
       `pc_drive_take_work` */
    PC_WAITED_LOOK,
    PC_WAITED_CLOSED, /* nothing can be waited for any more */
};

enum pc_drive_state { PC_DRIVE_OPEN, PC_DRIVE_CLOSED, PC_DRIVE_FORKED };

/* A thread that waits; on its stack. Protected by the lock, but for the word. */
struct pc_waiter {
    struct pc_waiter *next, *previous;
    struct pc_op *op;
    struct pc_several *several;
    /* `look_ns`: when the slice is over; 0: not known yet */
    uint64_t deadline_ns, slice_ns, look_ns;
    bool is_tallied; /* it has waited so long that it counts */
    pc_word woken;
};

/* What has happened; for tests. */
struct pc_drive_counts {
    uint64_t sleeps, rests, inherited, stolen, let_in, by_background, parked;
    /* sleeps that ended by themselves though there was something to do: must be 0 */
    uint64_t overslept;
};

struct pc_drive {
    struct pc_lock lock;
    pc_word closed; /* enum pc_drive_state; read without the lock, too */

    /* To be set before the first wait. */
    uint32_t spins;       /* looks without a pause; 0 if there are more ranks than cores */
    uint32_t every;       /* turns between looks at sources that are not cheap */
    uint64_t patience_ns; /* for so long it looks and yields before it sleeps */
    /* called in the background, without the lock, if there is work; or NULL */
    void (*on_work)(void *owner);
    void *owner;
    struct pc_tally *tally; /* how long callers wait; or NULL */

    struct pc_source *sources[PC_SOURCES];
    uint32_t num_sources;
    bool any_cheap;
    int watched[PC_WATCHED]; /* descriptors of others, or -1 */
    pc_word fired;           /* one of them was readable, and none is watched anew */

    /* those that wait, the driver among them unless it is the background thread */
    struct pc_waiter *first, *last;
    struct pc_waiter *driver;
    bool asleep; /* the driver sleeps, and the sources know it */
    pc_word work;
    int epoll, bell;
    uint32_t turn;
    uint32_t crowded; /* so many more waits do not spin: a yield took long */
    bool all_due;     /* the next turn looks at all sources */
    uint64_t all_ns;  /* when all sources were looked at last */
    pc_word gone;     /* counts those that leave, once this is closed */

    /* The background thread. */
    int64_t pending;
    uint32_t activity; /* changes with each wait, and each thing that becomes pending */
    bool started, parked;
    pthread_t thread;
    struct pc_waiter background;
    pc_word called;
    int background_bell;

#ifdef PC_DRIVE_CHECKED
    struct pc_drive_counts counts;
    uint64_t rung_ns;
#endif
};

/* 0, or an errno. */
int pc_drive_open(struct pc_drive *drive);
/* Have everybody who waits return, and wait for that; then end the background thread. Not from
   `on_work`. The memory of `drive` stays, for calls that come too late, which are told. */
void pc_drive_close(struct pc_drive *drive);
/* In the child of a fork: whatever the parent's threads were doing, nothing works any more. No lock
   is taken. */
void pc_drive_forked(struct pc_drive *drive);

/* Take the lock; false: it is not taken, this is closed. */
static inline bool pc_drive_enter(struct pc_drive *drive) {
    if (atomic_load_explicit(&drive->closed, memory_order_acquire) != PC_DRIVE_OPEN)
        return false;
    pc_lock_take(&drive->lock);
    if (atomic_load_explicit(&drive->closed, memory_order_relaxed) == PC_DRIVE_OPEN)
        return true;
    pc_lock_give(&drive->lock);
    return false;
}
static inline void pc_drive_leave(struct pc_drive *drive) { pc_lock_give(&drive->lock); }

/* Wait until the op is done, or the wait for several, of which one is NULL. Deadline: a time of the
   monotonic clock; 0: look once; PC_FOR_EVER: none. Slice: how long to wait before the caller wants
   to look for itself; PC_FOR_EVER: it does not. Without the lock. */
enum pc_waited pc_drive_wait(struct pc_drive *drive, struct pc_op *op, struct pc_several *several,
                             uint64_t deadline_ns, uint64_t slice_ns);
/* The caller, having been told to look, does the work that there is; false: there is none, or
   another thread does it. */
bool pc_drive_take_work(struct pc_drive *drive);

/* All of these with the lock held; 0, or an errno. */
int pc_drive_add(struct pc_drive *drive, struct pc_source *source);
/* Have the caller of a wait told when a descriptor is readable: once, until
   `pc_drive_watch_again`. */
int pc_drive_watch(struct pc_drive *drive, int fd);
void pc_drive_watch_again(struct pc_drive *drive);

/* There is work for a caller. */
void pc_drive_post_work(struct pc_drive *drive);
/* There is something that a source must do: the driver shall look, if it sleeps. */
void pc_drive_posted(struct pc_drive *drive);
/* So many more things are to be driven for though nobody may wait for them. */
void pc_drive_pending(struct pc_drive *drive, int delta);

/* A waiter has looked in vain for some time: from now on it counts. */
static inline void pc_drive_tally(struct pc_drive *drive, struct pc_waiter *me, uint64_t now_ns) {
    if (me->is_tallied || drive->tally == NULL || me == &drive->background)
        return;
    me->is_tallied = true;
    pc_tally_begin(drive->tally, now_ns);
}

static inline void pc_drive_untally(struct pc_drive *drive, struct pc_waiter *me) {
    if (me->is_tallied)
        pc_tally_end(drive->tally, pc_now_ns());
}

/* drive.c, for background.c */
enum pc_waited pc_drive_turns(struct pc_drive *drive, struct pc_waiter *me);
/* The lock was held for the last time: see that somebody drives. */
void pc_drive_hand_over(struct pc_drive *drive);
void pc_drive_ring(struct pc_drive *drive);
/* background.c */
void pc_drive_call_background(struct pc_drive *drive);
/* Whether somebody must drive: something is pending, or a thread that did not wait has left
   work. */
bool pc_drive_is_needed(struct pc_drive *drive);

#ifdef PC_DRIVE_CHECKED
#define PC_DRIVE_COUNT(drive, what) ((drive)->counts.what++)
#else
#define PC_DRIVE_COUNT(drive, what) ((void)0)
#endif

#endif
