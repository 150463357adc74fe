/* Random threads that wait, start, end and cancel ops of one driver
   (transports/_core/engine/drive.h).

   A world has a driver with three sources: two are memory, of which one gives the lock back in the
   middle of its progress, and one is an eventfd. Some threads begin ops and wait for them, one or
   several, for ever or with a deadline that comes early, and cancel what is not done then; or have
   a bell rung, and leave the driving to the background. Others end the ops: through a source, or
   directly, with the lock. A few worlds are closed in the middle.

   An op's memory is freed as soon as it is done, so that AddressSanitizer sees who touches it after
   that. Checked are each op's status, that no source is used by two threads at a time, and that no
   sleep came to its end by itself while there was something to do (`overslept` in drive.h).

   Exits with 3 and a line that names the seed of the world if something is wrong. */
#include "drive_sources.h"

/* --- those that wait -------------------------------------------------------------------------- */

struct begun {
    struct pc_op *op;
    struct slot *slot;
    int status;
};

/* Begin an op, with the lock; its ticket, or NULL if there is no room. */
static struct ticket *begin(struct world *world, struct begun *begun, int bell, uint64_t *random) {
    struct test_source *way = &world->ways[below(random, WAYS)];
    for (int i = 0; i < SLOTS; i++) {
        struct slot *slot = &way->slots[i];
        /* Ready, or still in the hands of who ends it. */
        if (slot->op != NULL || atomic_load(&slot->used) || atomic_load(&slot->ready))
            continue;
        atomic_store(&slot->used, 1);
        atomic_store(&slot->since, 0);
        begun->op = malloc(sizeof *begun->op);
        begun->slot = slot;
        begun->status = slot->status = (int)below(random, 1000);
        slot->op = begun->op;
        pc_op_begin(begun->op, &world->drive, bell);
        struct ticket *ticket = malloc(sizeof *ticket);
        *ticket = (struct ticket){NULL, way, slot};
        return ticket;
    }
    return NULL;
}

static void issue(struct world *world, struct ticket *ticket) {
    pthread_mutex_lock(&world->mutex);
    ticket->next = world->tickets;
    world->tickets = ticket;
    pthread_cond_signal(&world->filled);
    pthread_mutex_unlock(&world->mutex);
}

static void add(uint64_t *count) { __atomic_add_fetch(count, 1, __ATOMIC_RELAXED); }

/* It is done: free it at once. */
static void take_result(struct world *world, struct begun *begun) {
    check(begun->op->status == begun->status, "an op has a status of another one");
    free(begun->op);
    begun->op = NULL;
    add(&world->done);
}

/* Take ops back that are not done; false: this was closed. */
static bool cancel(struct world *world, struct begun *begun, int count,
                   struct pc_several *several) {
    bool is_open = pc_drive_enter(&world->drive);
    if (!is_open)
        pc_lock_take(&world->drive.lock);
    for (int i = 0; i < count; i++) {
        if (begun[i].op == NULL)
            continue;
        pc_several_remove(several, begun[i].op);
        if (pc_op_is_done(begun[i].op)) {
            take_result(world, &begun[i]);
        } else {
            begun[i].slot->op = NULL;
            free(begun[i].op);
            add(&world->cancelled);
        }
    }
    pc_lock_give(&world->drive.lock);
    return is_open;
}

/* Wait for something; the last word. */
static enum pc_waited wait_for(struct world *world, struct pc_op *op, struct pc_several *several,
                               uint64_t *random) {
    uint64_t deadline = PC_FOR_EVER;
    if (below(random, 3) == 0)
        deadline = below(random, 3) == 0 ? 0 : pc_now_ns() + below(random, 300000);
    for (;;) {
        uint64_t slice = below(random, 2) ? PC_FOR_EVER : below(random, 1000000);
        enum pc_waited waited = pc_drive_wait(&world->drive, op, several, deadline, slice);
        if (waited == PC_WAITED_DEADLINE)
            check(pc_now_ns() >= deadline, "a deadline was reported too early");
        if (waited == PC_WAITED_DEADLINE)
            add(&world->deadlines);
        if (waited != PC_WAITED_LOOK)
            return waited;
        add(&world->looks);
    }
}

static bool wait_for_one(struct world *world, uint64_t *random) {
    struct begun begun = {0};
    if (!pc_drive_enter(&world->drive))
        return false;
    struct ticket *ticket = begin(world, &begun, -1, random);
    pc_drive_leave(&world->drive);
    if (ticket == NULL)
        return true;
    issue(world, ticket);
    if (wait_for(world, begun.op, NULL, random) != PC_WAITED_DONE)
        return cancel(world, &begun, 1, NULL);
    take_result(world, &begun);
    return true;
}

static bool wait_for_several(struct world *world, uint64_t *random) {
    struct begun begun[MOST_SEVERAL] = {0};
    struct ticket *tickets[MOST_SEVERAL];
    struct pc_several several = {0};
    int count = 0, most = 1 + (int)below(random, MOST_SEVERAL);
    if (!pc_drive_enter(&world->drive))
        return false;
    while (count < most && (tickets[count] = begin(world, &begun[count], -1, random)) != NULL) {
        check(pc_several_add(&several, begun[count].op), "an op cannot be added");
        count++;
    }
    several.left = count == 0 ? 0 : 1 + below(random, (uint64_t)count);
    uint32_t wanted = several.left;
    pc_drive_leave(&world->drive);
    for (int i = 0; i < count; i++)
        issue(world, tickets[i]);
    uint32_t ended = 0;
    if (wait_for(world, NULL, &several, random) == PC_WAITED_DONE) {
        for (int i = 0; i < count; i++)
            ended += pc_op_is_done(begun[i].op);
        check(ended >= wanted, "too few ops of several are done");
    }
    return cancel(world, begun, count, &several);
}

/* Nobody waits: the background drives, and a bell tells. */
static bool leave_to_background(struct world *world, uint64_t *random) {
    struct begun begun = {0};
    int bell = eventfd(0, EFD_NONBLOCK);
    if (!pc_drive_enter(&world->drive)) {
        close(bell);
        return false;
    }
    struct ticket *ticket = begin(world, &begun, bell, random);
    if (ticket != NULL)
        pc_drive_pending(&world->drive, 1);
    pc_drive_leave(&world->drive);
    bool is_open = true;
    if (ticket != NULL) {
        issue(world, ticket);
        /* A world that was closed rings no bell. */
        struct pollfd polled = {bell, POLLIN, 0};
        while (poll(&polled, 1, 50) == 0 && atomic_load(&world->drive.closed) == PC_DRIVE_OPEN)
            ;
        is_open = pc_drive_enter(&world->drive);
        if (is_open) {
            check(pc_op_is_done(begun.op), "a bell was rung before its time");
            take_result(world, &begun);
            pc_drive_pending(&world->drive, -1);
            pc_drive_leave(&world->drive);
            add(&world->bells);
        } else {
            is_open = cancel(world, &begun, 1, NULL);
        }
    }
    close(bell);
    return is_open;
}

struct actor {
    struct world *world;
    uint64_t random;
};

static void *waiter(void *argument) {
    struct actor *actor = argument;
    struct world *world = actor->world;
    for (int i = 0; i < OPS_A_WAITER; i++) {
        uint64_t what = below(&actor->random, 8);
        bool is_open = what == 0  ? leave_to_background(world, &actor->random)
                       : what < 3 ? wait_for_several(world, &actor->random)
                                  : wait_for_one(world, &actor->random);
        if (!is_open) {
            add(&world->closed);
            break;
        }
    }
    return NULL;
}

/* --- worlds ----------------------------------------------------------------------------------- */

static void open_world(struct world *world, uint64_t *random) {
    memset(world, 0, sizeof *world);
    check(pc_drive_open(&world->drive) == 0, "no descriptors");
    world->drive.spins = below(random, 2) ? 0 : 50;
    world->drive.patience_ns = below(random, 2) ? 0 : 20000;
    pthread_mutex_init(&world->mutex, NULL);
    pthread_cond_init(&world->filled, NULL);
    for (int i = 0; i < WAYS; i++) {
        struct test_source *way = &world->ways[i];
        way->world = world;
        way->source = (struct pc_source){&OPS, eventfd(0, EFD_NONBLOCK), i != SYSTEM};
        if (i != DIRECT) {
            check(pc_drive_enter(&world->drive), "it is closed");
            check(pc_drive_add(&world->drive, &way->source) == 0, "no room for a source");
            pc_drive_leave(&world->drive);
        }
    }
}

static struct pc_drive_counts totals;
static struct world sums;

static void add_up(const struct world *world) {
    const struct pc_drive_counts *counts = &world->drive.counts;
    totals.sleeps += counts->sleeps, totals.rests += counts->rests,
        totals.inherited += counts->inherited;
    totals.stolen += counts->stolen, totals.let_in += counts->let_in,
        totals.parked += counts->parked;
    totals.by_background += counts->by_background, totals.overslept += counts->overslept;
    sums.done += world->done, sums.deadlines += world->deadlines,
        sums.cancelled += world->cancelled;
    sums.looks += world->looks, sums.bells += world->bells, sums.closed += world->closed;
}

/* A world takes some hundredths of a second; and a machine may be busy. */
#define LIMIT_S 30

static void hang(int signal) {
    static const char words[] = "a world hangs\n";
    (void)signal;
    (void)!write(STDERR_FILENO, words, sizeof words - 1);
    _exit(3);
}

static void run_world(void) {
    static struct world world;
    uint64_t random = seed;
    alarm(LIMIT_S);
    open_world(&world, &random);
    pthread_t waiters[WAITERS], enders[ENDERS];
    struct actor actors[WAITERS];
    for (int i = 0; i < ENDERS; i++)
        pthread_create(&enders[i], NULL, ender, &world);
    for (int i = 0; i < WAITERS; i++) {
        actors[i] = (struct actor){&world, seed * 1000 + (uint64_t)i};
        pthread_create(&waiters[i], NULL, waiter, &actors[i]);
    }
    if (below(&random, 4) == 0) {
        usleep((useconds_t)below(&random, 10000));
        pc_drive_close(&world.drive);
    }
    for (int i = 0; i < WAITERS; i++)
        pthread_join(waiters[i], NULL);
    pthread_mutex_lock(&world.mutex);
    world.over = true;
    pthread_cond_broadcast(&world.filled);
    pthread_mutex_unlock(&world.mutex);
    for (int i = 0; i < ENDERS; i++)
        pthread_join(enders[i], NULL);
    pc_drive_close(&world.drive);
    check(world.drive.counts.overslept == 0, "a thread slept though there was something to do");
    check(world.drive.first == NULL && world.drive.driver == NULL, "somebody waits after the end");
    for (int i = 0; i < WAYS; i++)
        close(world.ways[i].source.fd);
    add_up(&world);
}

/* A child of a fork in the middle of everything may do nothing, and that returns at once. */
static void fork_once(void) {
    static struct world world;
    uint64_t random = 1;
    open_world(&world, &random);
    check(pc_drive_enter(&world.drive), "it is closed");
    pc_drive_pending(&world.drive, 1);
    pid_t child = fork(); /* with the lock, as another thread may have it */
    if (child == 0) {
        struct pc_op op;
        pc_op_begin(&op, &world.drive, -1);
        pc_drive_forked(&world.drive);
        check(pc_drive_wait(&world.drive, &op, NULL, PC_FOR_EVER, PC_FOR_EVER) == PC_WAITED_CLOSED,
              "it waits");
        check(!pc_drive_enter(&world.drive), "it enters");
        pc_drive_close(&world.drive);
        _exit(0);
    }
    pc_drive_leave(&world.drive);
    int status;
    check(waitpid(child, &status, 0) == child && status == 0, "the child of a fork has failed");
    struct begun begun = {0};
    check(pc_drive_enter(&world.drive), "the parent is closed");
    struct ticket *ticket = begin(&world, &begun, -1, &random);
    pc_drive_leave(&world.drive);
    end_by(ticket->source, ticket->slot);
    check(pc_drive_wait(&world.drive, begun.op, NULL, PC_FOR_EVER, PC_FOR_EVER) == PC_WAITED_DONE,
          "it is not done");
    take_result(&world, &begun);
    free(ticket);
    pc_drive_close(&world.drive);
    printf("forked\n");
}

static void *ring_later(void *argument) {
    struct world *world = argument;
    /* Until the waiter sleeps, so that it is the descriptor that wakes it. */
    for (bool is_asleep = false; !is_asleep; sched_yield()) {
        pc_lock_take(&world->drive.lock);
        is_asleep = world->drive.asleep;
        pc_lock_give(&world->drive.lock);
    }
    eventfd_write(world->ways[DIRECT].source.fd, 1);
    return NULL;
}

static void *post_later(void *argument) {
    struct world *world = argument;
    for (bool is_posted = false; !is_posted; sched_yield()) {
        pc_lock_take(&world->drive.lock);
        is_posted = world->drive.asleep;
        if (is_posted)
            pc_drive_post_work(&world->drive);
        pc_lock_give(&world->drive.lock);
    }
    return NULL;
}

static void wait_for_work(struct world *world, void *(*from)(void *)) {
    struct pc_op op;
    pc_op_begin(&op, &world->drive, -1);
    pthread_t thread;
    pthread_create(&thread, NULL, from, world);
    enum pc_waited waited = pc_drive_wait(&world->drive, &op, NULL, PC_FOR_EVER, PC_FOR_EVER);
    check(waited == PC_WAITED_LOOK, "the wait goes on though there is work");
    pthread_join(thread, NULL);
    check(pc_drive_take_work(&world->drive), "there is no work");
    check(!pc_drive_take_work(&world->drive), "there is work twice");
}

static void do_work(void *owner) {
    struct world *world = owner;
    check(pc_drive_take_work(&world->drive), "the background is called without work");
    pthread_mutex_lock(&world->mutex);
    world->over = true;
    pthread_cond_broadcast(&world->filled);
    pthread_mutex_unlock(&world->mutex);
}

/* A descriptor of others, and work that a thread posts, end a wait for the moment; without a wait,
   the background does the work. */
static void work_once(void) {
    static struct world world;
    uint64_t random = 1;
    open_world(&world, &random);
    int fd = world.ways[DIRECT].source.fd;
    pc_lock_take(&world.drive.lock);
    check(pc_drive_watch(&world.drive, fd) == 0, "a descriptor cannot be watched");
    pc_lock_give(&world.drive.lock);
    wait_for_work(&world, ring_later);
    /* It is readable still, and nobody is told of it again. */
    struct pc_op op;
    pc_op_begin(&op, &world.drive, -1);
    uint64_t soon = pc_now_ns() + 2000000;
    check(pc_drive_wait(&world.drive, &op, NULL, soon, PC_FOR_EVER) == PC_WAITED_DEADLINE,
          "it is told twice");
    wait_for_work(&world, post_later);
    pc_lock_take(&world.drive.lock);
    pc_drive_watch_again(&world.drive);
    pc_lock_give(&world.drive.lock);
    enum pc_waited waited = pc_drive_wait(&world.drive, &op, NULL, PC_FOR_EVER, PC_FOR_EVER);
    check(waited == PC_WAITED_LOOK && pc_drive_take_work(&world.drive),
          "a watched descriptor is forgotten");
    world.drive.on_work = do_work;
    world.drive.owner = &world;
    pc_lock_take(&world.drive.lock);
    pc_drive_watch_again(&world.drive);
    pc_drive_pending(&world.drive, 1);
    pc_lock_give(&world.drive.lock);
    pthread_mutex_lock(&world.mutex);
    while (!world.over)
        pthread_cond_wait(&world.filled, &world.mutex);
    pthread_mutex_unlock(&world.mutex);
    pc_drive_close(&world.drive);
    printf("worked\n");
}

int main(int count, char **words) {
    if (count == 2) {
        strcmp(words[1], "fork") == 0 ? fork_once() : work_once();
        return 0;
    }
    signal(SIGALRM, hang);
    uint64_t worlds = strtoull(words[1], NULL, 10), first = strtoull(words[2], NULL, 10);
    for (seed = first; seed < first + worlds; seed++)
        run_world();
    const char *names[] = {"done",   "deadlines",     "cancelled", "looks",     "bells",
                           "closed", "sleeps",        "rests",     "inherited", "stolen",
                           "let_in", "by_background", "parked",    "overslept"};
    uint64_t numbers[] = {sums.done,        sums.deadlines,  sums.cancelled, sums.looks,
                          sums.bells,       sums.closed,     totals.sleeps,  totals.rests,
                          totals.inherited, totals.stolen,   totals.let_in,  totals.by_background,
                          totals.parked,    totals.overslept};
    size_t length = sizeof names / sizeof names[0];
    for (size_t i = 0; i < length; i++)
        printf("%s %llu%s", names[i], (unsigned long long)numbers[i], i + 1 < length ? ", " : "\n");
    return 0;
}
