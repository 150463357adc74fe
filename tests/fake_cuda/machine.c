/* Contexts, memory and streams of the fake driver. What hardware punishes only now and then happens
 * here each time: nothing runs before some call waits or asks, what may run then is chosen at
 * random, and a copy's destination holds rubbish until the copy has run. */
#define _GNU_SOURCE
#include "machine.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#define GUARD ((size_t)64 << 10) /* on each side of what is mapped: nobody's */
#define PATIENCE_S 60            /* for the release of what is held: a test that forgot it ends */
#define STACK 32

struct context contexts[DEVICES];
int device_count, physical[DEVICES];
bool initialized;
struct allocation *allocations;
struct registration *registrations;
struct stream *streams;
struct event *events;
struct counts counts;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static bool forked, tracing;
static uint64_t random_state, last_id;

static __thread struct context *stack[STACK];
static __thread int depth;
static __thread struct stream *per_thread[DEVICES];

static struct held {
    struct held *next;
    uint64_t id;
    struct mark *mark;
} *held;

static struct failure {
    char name[64];
    unsigned nth, seen; /* nth 0: every call */
    CUresult error;
} failures[32];
static int failure_count;

/* Calls. */

static void in_child(void)
{
    forked = initialized;
}

void set_seed(uint64_t seed)
{
    random_state = seed * 0x9E3779B97F4A7C15u + 1;
}

unsigned random_below(unsigned n)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (unsigned)(random_state >> 33) % n;
}

__attribute__((constructor)) static void on_load(void)
{
    const char *text = getenv("FAKE_CUDA_DEVICES");
    int there = text ? atoi(text) : 1;
    if (there < 0 || there > DEVICES) {
        fprintf(stderr, "fake_cuda: FAKE_CUDA_DEVICES=%s\n", text);
        abort();
    }
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    if (!visible)
        while (device_count < there) {
            physical[device_count] = device_count;
            device_count++;
        }
    while (visible && *visible && device_count < there) {
        char *end;
        long ordinal = strtol(visible, &end, 10);
        if (end == visible || ordinal < 0 || ordinal >= there)
            break; /* what comes after one that does not exist is not visible */
        physical[device_count++] = (int)ordinal;
        visible = *end == ',' ? end + 1 : end;
    }
    for (int i = 0; i < device_count; i++) {
        contexts[i].device = i;
        contexts[i].legacy = new_stream(&contexts[i], 0);
    }
    text = getenv("FAKE_CUDA_TRACE");
    tracing = text && strcmp(text, "1") == 0;
    text = getenv("FAKE_CUDA_SEED");
    set_seed(text ? strtoull(text, NULL, 10) : 1);
    text = getenv("FAKE_CUDA_FAIL");
    if (text && !set_failures(text)) {
        fprintf(stderr, "fake_cuda: FAKE_CUDA_FAIL=%s\n", text);
        abort();
    }
    pthread_atfork(NULL, NULL, in_child);
}

static size_t bare_length(const char *name)
{
    size_t length = strlen(name);
    return length > 3 && name[length - 3] == '_' && name[length - 2] == 'v' ? length - 3 : length;
}

bool set_failures(const char *text)
{
    failure_count = 0;
    while (*text) {
        struct failure *failure = &failures[failure_count];
        char nth[16];
        int used = 0;
        if (failure_count == 32 || sscanf(text, "%63[^:,]:%15[^:,]:%d%n", failure->name, nth,
                                          &failure->error, &used) != 3)
            return false;
        failure->nth = strcmp(nth, "*") == 0 ? 0 : (unsigned)atoi(nth);
        failure->seen = 0;
        if (!failure->nth && nth[0] != '*')
            return false;
        failure_count++;
        text += used;
        if (*text == ',')
            text++;
        else if (*text)
            return false;
    }
    return true;
}

static CUresult injected(const char *name)
{
    CUresult error = OK;
    for (int i = 0; i < failure_count; i++) {
        struct failure *failure = &failures[i];
        size_t length = bare_length(failure->name);
        if (length != bare_length(name) || strncmp(failure->name, name, length) != 0)
            continue;
        failure->seen++;
        if (!error && (!failure->nth || failure->seen == failure->nth))
            error = failure->error;
    }
    return error;
}

void lock(void)
{
    pthread_mutex_lock(&mutex);
}

void unlock(void)
{
    pthread_mutex_unlock(&mutex);
}

CUresult enter(struct call *call, const char *name, enum needs needs, const char *format, ...)
{
    call->name = name;
    call->locked = false;
    call->text[0] = 0;
    if (tracing) {
        va_list arguments;
        va_start(arguments, format);
        vsnprintf(call->text, sizeof call->text, format, arguments);
        va_end(arguments);
    }
    if (forked) /* the mutex may be held by a thread that did not come along */
        return NOT_INITIALIZED;
    lock();
    call->locked = true;
    CUresult error = injected(name);
    if (error || needs == NOTHING)
        return error;
    if (!initialized)
        return NOT_INITIALIZED;
    if (needs == DRIVER)
        return OK;
    struct context *context = current_context();
    if (!context) {
        counts.contextless++;
        return INVALID_CONTEXT;
    }
    return context->refs ? context->error : CONTEXT_IS_DESTROYED;
}

CUresult leave(struct call *call, CUresult result)
{
    if (call->locked)
        unlock();
    if (tracing) {
        char line[320]; /* at once, or the lines of several processes mix */
        int length = snprintf(line, sizeof line, "fake_cuda %d.%d %s(%s) = %d\n", getpid(),
                              gettid(), call->name, call->text, result);
        if (write(2, line, (size_t)length) < 0)
            return result;
    }
    return result;
}

struct context *current_context(void)
{
    return depth ? stack[depth - 1] : NULL;
}

bool push_context(struct context *context)
{
    if (depth == STACK)
        return false;
    stack[depth++] = context;
    return true;
}

struct context *pop_context(void)
{
    return depth ? stack[--depth] : NULL;
}

struct context *context_of(const void *handle)
{
    for (int i = 0; i < device_count; i++)
        if (handle == &contexts[i])
            return &contexts[i];
    return NULL;
}

void destroy_context(struct context *context)
{
    drop_queues(context);
    for (struct stream *stream = streams, *next; stream; stream = next) {
        next = stream->next;
        if (stream->context == context && stream->handle) {
            stream->destroyed = true;
            drop_empty(stream);
        }
    }
    for (struct event *event = events, *next; event; event = next) {
        next = event->next;
        if (event->context == context)
            remove_event(event);
    }
    for (struct allocation *a = allocations, *next; a; a = next) {
        next = a->next;
        if (a->context == context)
            release(a);
    }
    for (struct registration *r = registrations, *next; r; r = next) {
        next = r->next;
        if (r->context == context)
            remove_registration(r);
    }
    context->error = OK;
}

/* Not an address, and never used again. */
uint64_t new_handle(void)
{
    return 0x5700000000000000u + 64 * ++last_id;
}

/* Memory. */

static size_t round_up(size_t size)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    return (size + page - 1) / page * page;
}

/* One reservation: guard, the device's view, guard, the host's view and control page, guard. */
static struct allocation *map(struct context *context, int fd, size_t size)
{
    size_t length = round_up(size), shared = length + round_up(1);
    size_t area_size = 3 * GUARD + length + shared;
    char *area = mmap(NULL, area_size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1,
                      0);
    if (area == MAP_FAILED)
        return NULL;
    char *bytes = area + 2 * GUARD + length;
    struct allocation *a = calloc(1, sizeof *a);
    if (!a || mmap(bytes, shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) ==
                  MAP_FAILED) {
        free(a);
        munmap(area, area_size);
        return NULL;
    }
    *a = (struct allocation){
        .next = allocations,
        .id = ++last_id,
        .base = (uintptr_t)area + GUARD,
        .size = size,
        .bytes = bytes,
        .area = area,
        .area_size = area_size,
        .control = (struct control *)(bytes + length),
        .context = context,
        .fd = -1,
        .ready = true,
    };
    allocations = a;
    return a;
}

struct allocation *allocate(struct context *context, size_t size)
{
    uint64_t nonce;
    char name[32];
    if (getrandom(&nonce, sizeof nonce, 0) != sizeof nonce)
        return NULL;
    snprintf(name, sizeof name, "fake-cuda-%016llx", (unsigned long long)nonce);
    int fd = memfd_create(name, MFD_CLOEXEC);
    if (fd < 0)
        return NULL;
    struct allocation *a = NULL;
    if (ftruncate(fd, (off_t)(round_up(size) + round_up(1))) == 0)
        a = map(context, fd, size);
    if (!a) {
        close(fd);
        return NULL;
    }
    a->fd = fd;
    a->nonce = nonce;
    memset(a->bytes, FRESH, round_up(size));
    atomic_store(&a->control->alive, 1);
    return a;
}

struct allocation *import_allocation(struct context *context, int pid, int fd, uint64_t nonce,
                                     size_t size)
{
    char path[64], wanted[64], name[64] = "";
    snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, fd);
    snprintf(wanted, sizeof wanted, "/memfd:fake-cuda-%016llx (deleted)", (unsigned long long)nonce);
    int mine = open(path, O_RDWR | O_CLOEXEC);
    if (mine < 0)
        return NULL;
    snprintf(path, sizeof path, "/proc/self/fd/%d", mine);
    struct allocation *a = NULL;
    struct stat stat;
    if (readlink(path, name, sizeof name - 1) > 0 && strcmp(name, wanted) == 0 &&
        fstat(mine, &stat) == 0 && (size_t)stat.st_size == round_up(size) + round_up(1))
        a = map(context, mine, size);
    close(mine);
    if (a) {
        a->imported = true;
        a->nonce = nonce;
        a->opened = 1;
        if (!atomic_load(&a->control->alive)) {
            release(a);
            a = NULL;
        }
    }
    return a;
}

void release(struct allocation *allocation)
{
    struct allocation **link = &allocations;
    while (*link != allocation)
        link = &(*link)->next;
    *link = allocation->next;
    if (!allocation->imported)
        atomic_store(&allocation->control->alive, 0);
    munmap(allocation->area, allocation->area_size);
    if (allocation->fd >= 0)
        close(allocation->fd);
    free(allocation);
}

struct allocation *allocation_at(uintptr_t address)
{
    for (struct allocation *a = allocations; a; a = a->next)
        if (address >= a->base && address - a->base < a->size)
            return a;
    return NULL;
}

struct allocation *allocation_with(uint64_t id)
{
    struct allocation *a = allocations;
    while (a && a->id != id)
        a = a->next;
    return a;
}

struct registration *registration_at(uintptr_t address, size_t size)
{
    for (struct registration *r = registrations; r; r = r->next)
        if (address < r->base + r->size && r->base < address + size)
            return r;
    return NULL;
}

struct registration *add_registration(struct context *context, uintptr_t base, size_t size,
                                      bool owned)
{
    struct registration *r = malloc(sizeof *r);
    if (r) {
        *r = (struct registration){registrations, ++last_id, base, size, owned, context};
        registrations = r;
    }
    return r;
}

void remove_registration(struct registration *registration)
{
    struct registration **link = &registrations;
    while (*link != registration)
        link = &(*link)->next;
    *link = registration->next;
    if (registration->owned)
        munmap((void *)registration->base, round_up(registration->size));
    free(registration);
}

/* Streams. */

struct stream *new_stream(struct context *context, uint64_t handle)
{
    struct stream *stream = calloc(1, sizeof *stream);
    if (stream) {
        stream->context = context;
        stream->handle = handle;
        stream->next = streams;
        streams = stream;
    }
    return stream;
}

struct stream *find_stream(const void *handle)
{
    struct context *context = current_context();
    uintptr_t number = (uintptr_t)handle;
    if (number == 2 && !per_thread[context->device])
        per_thread[context->device] = new_stream(context, 0);
    if (number <= 2)
        return number == 2 ? per_thread[context->device] : context->legacy;
    for (struct stream *stream = streams; stream; stream = stream->next)
        if (stream->handle == number && !stream->destroyed)
            return stream;
    return NULL;
}

struct event *find_event(const void *handle)
{
    struct event *event = events;
    while (event && event->handle != (uintptr_t)handle)
        event = event->next;
    return event;
}

void remove_event(struct event *event)
{
    struct event **link = &events;
    while (*link != event)
        link = &(*link)->next;
    *link = event->next;
    drop_mark(event->mark);
    free(event);
}

struct mark *new_mark(int pending)
{
    struct mark *mark = calloc(1, sizeof *mark);
    if (!mark)
        abort();
    mark->refs = 1;
    mark->pending = pending;
    return mark;
}

void drop_mark(struct mark *mark)
{
    if (mark && !--mark->refs)
        free(mark);
}

void drop_empty(struct stream *stream)
{
    if (stream->head || !stream->destroyed)
        return;
    struct stream **link = &streams;
    while (*link != stream)
        link = &(*link)->next;
    *link = stream->next;
    free(stream);
}

static size_t extent(const struct op *op, const struct side *side)
{
    return (op->planes - 1) * side->slice + (op->rows - 1) * side->pitch + op->width;
}

static bool overlap(const struct op *a, const struct side *x, const struct op *b,
                    const struct side *y)
{
    return x->address < y->address + extent(b, y) && y->address < x->address + extent(a, x);
}

static bool moves(const struct op *op)
{
    return op->kind == COPY || op->kind == SET;
}

static bool in_place(const struct op *op)
{
    return op->kind == COPY && overlap(op, &op->to, op, &op->from);
}

/* Where the host may touch a side's bytes; NULL if the device may not. */
static char *touch(const struct op *op, const struct side *side)
{
    if (side->device) {
        struct allocation *a = allocation_at(side->address);
        if (!a || a->id != side->owner || !a->ready || !atomic_load(&a->control->alive) ||
            extent(op, side) > a->size - (side->address - a->base))
            return NULL;
        return a->bytes + (side->address - a->base);
    }
    if (side->owner) {
        struct registration *r = registration_at(side->address, extent(op, side));
        if (!r || r->id != side->owner) /* it was taken back too early */
            return NULL;
    }
    return (char *)side->address;
}

static void write_rows(const struct op *op, char *to, const char *from)
{
    for (size_t plane = 0; plane < op->planes; plane++)
        for (size_t row = 0; row < op->rows; row++) {
            char *into = to + plane * op->to.slice + row * op->to.pitch;
            if (from)
                memmove(into, from + plane * op->from.slice + row * op->from.pitch, op->width);
            else
                memset(into, UNDONE, op->width);
        }
}

static void poison(struct op *op)
{
    op->poisoned = true;
    char *to = in_place(op) ? NULL : touch(op, &op->to);
    if (to)
        write_rows(op, to, NULL);
}

static void transfer(struct context *context, const struct op *op)
{
    char *to = touch(op, &op->to), *from = op->kind == COPY ? touch(op, &op->from) : NULL;
    if (!to || (op->kind == COPY && !from)) {
        counts.illegal++;
        context->error = ILLEGAL_ADDRESS;
        if (tracing)
            fprintf(stderr, "fake_cuda %d: illegal %s of %zu x %zu x %zu to %#zx from %#zx\n",
                    getpid(), op->kind == COPY ? "copy" : "set", op->planes, op->rows, op->width,
                    (size_t)op->to.address, (size_t)op->from.address);
        return;
    }
    size_t nbytes = op->width * op->rows * op->planes;
    if (op->kind == COPY) {
        write_rows(op, to, from);
        *(!op->to.device ? &counts.d2h : !op->from.device ? &counts.h2d : &counts.d2d) += nbytes;
    } else {
        for (size_t i = 0; i < nbytes; i += op->value_size)
            memcpy(to + i, &op->value, op->value_size);
        counts.set += nbytes;
    }
}

static void finish(struct context *context, struct op *op)
{
    struct allocation *a;
    switch (op->kind) {
    case COPY:
    case SET:
        if (!context->error) /* nothing more happens in a context that has failed */
            transfer(context, op);
        counts.run++;
        break;
    case RECORD:
        op->mark->pending--;
        clock_gettime(CLOCK_MONOTONIC, &op->mark->when);
        break;
    case WAIT:
        break;
    case ALLOCATE:
    case FREE:
        a = allocation_with(op->id);
        if (a && op->kind == ALLOCATE)
            a->ready = true;
        else if (a)
            release(a);
        break;
    }
    drop_mark(op->mark);
}

static bool runnable(const struct stream *stream)
{
    const struct op *op = stream->head;
    return op && !(op->kind == WAIT && op->mark->pending);
}

/* A copy may have begun as soon as nothing is before it. */
static void begin(struct stream *stream)
{
    if (stream->head && moves(stream->head) && !stream->head->poisoned)
        poison(stream->head);
}

void enqueue(struct stream *stream, struct op op)
{
    struct op *copy = malloc(sizeof *copy);
    if (!copy)
        abort();
    *copy = op;
    copy->next = NULL;
    if (op.mark)
        op.mark->refs++;
    if (stream->head)
        stream->tail->next = copy;
    else
        stream->head = copy;
    stream->tail = copy;
    begin(stream);
}

/* Does anything that is enqueued still need what `op` will overwrite? */
static bool is_needed(const struct op *op)
{
    for (struct stream *stream = streams; stream; stream = stream->next)
        for (struct op *other = stream->head; other; other = other->next)
            if (moves(other) && (overlap(op, &op->to, other, &other->to) ||
                                 (other->kind == COPY && overlap(op, &op->to, other, &other->from))))
                return true;
    return false;
}

static CUresult identify(const struct op *op, struct side *side)
{
    struct allocation *a = allocation_at(side->address);
    if (side->device) {
        side->owner = a ? a->id : 0;
        return OK; /* what is wrong with it shows when the copy runs */
    }
    if (a)
        return INVALID_VALUE;
    struct registration *r = registration_at(side->address, extent(op, side));
    if (!r)
        return OK;
    side->owner = r->id;
    /* As the driver does with memory that is only in part registered. */
    return side->address >= r->base && extent(op, side) <= r->size - (side->address - r->base)
               ? OK
               : INVALID_VALUE;
}

static bool is_pageable(const struct side *side)
{
    return !side->device && !side->owner;
}

CUresult enqueue_copy(struct stream *stream, struct op op)
{
    if (!op.width || !op.rows || !op.planes)
        return OK;
    CUresult error = identify(&op, &op.to);
    if (!error && op.kind == COPY)
        error = identify(&op, &op.from);
    if (error)
        return error;
    counts.enqueued++;
    counts.pageable += is_pageable(&op.to) || (op.kind == COPY && is_pageable(&op.from));
    if (!is_needed(&op))
        poison(&op);
    enqueue(stream, op);
    return OK;
}

CUresult copy_now(struct context *context, struct op op)
{
    if (!op.width)
        return OK;
    CUresult error = identify(&op, &op.to);
    if (!error)
        error = identify(&op, &op.from);
    if (error)
        return error;
    transfer(context, &op);
    return context->error;
}

bool run_one(void)
{
    unsigned n = 0;
    for (struct stream *stream = streams; stream; stream = stream->next)
        n += runnable(stream);
    if (!n)
        return false;
    unsigned chosen = random_below(n);
    struct stream *stream = streams;
    while (!runnable(stream) || chosen--)
        stream = stream->next;
    struct op *op = stream->head;
    begin(stream);
    stream->head = op->next;
    finish(stream->context, op);
    free(op);
    begin(stream);
    drop_empty(stream);
    pthread_cond_broadcast(&changed);
    return true;
}

CUresult wait_for(struct mark *mark, struct context *context)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += PATIENCE_S;
    CUresult result = OK;
    while (mark->pending && !context->error && !result) {
        if (run_one())
            continue;
        if (!held || pthread_cond_timedwait(&changed, &mutex, &until))
            result = LAUNCH_TIMEOUT;
    }
    drop_mark(mark);
    return context->error ? context->error : result;
}

uint64_t hold(struct stream *stream)
{
    struct held *one = malloc(sizeof *one);
    if (!one)
        abort();
    *one = (struct held){held, ++last_id, new_mark(1)};
    held = one;
    enqueue(stream, (struct op){.kind = WAIT, .mark = one->mark});
    return one->id;
}

bool unhold(uint64_t id)
{
    for (struct held **link = &held; *link; link = &(*link)->next)
        if ((*link)->id == id) {
            struct held *one = *link;
            *link = one->next;
            one->mark->pending = 0;
            drop_mark(one->mark);
            free(one);
            pthread_cond_broadcast(&changed);
            return true;
        }
    return false;
}

void drop_queues(struct context *context)
{
    for (struct stream *stream = streams; stream; stream = stream->next)
        while (stream->context == context && stream->head) {
            struct op *op = stream->head;
            stream->head = op->next;
            if (!moves(op))
                finish(context, op);
            free(op);
        }
    pthread_cond_broadcast(&changed);
}
