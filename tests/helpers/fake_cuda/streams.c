/* Streams, which are queues. What hardware punishes only now and then happens here each time:
 * nothing runs before some call waits or asks, what may run then is chosen at random, and a copy's
 * destination holds rubbish until the copy has run. */
#define _GNU_SOURCE
#include "machine.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PATIENCE_S 60 /* for the release of what is held: a test that forgot it ends */

struct stream *streams;
struct event *events;
int waiting;

static __thread struct stream *per_thread[DEVICES];

static struct held {
    struct held *next;
    uint64_t id;
    struct mark *mark;
} *held;

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
    return (op->rows - 1) * side->pitch + op->width;
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
    for (size_t row = 0; row < op->rows; row++) {
        char *into = to + row * op->to.pitch;
        if (from)
            memmove(into, from + row * op->from.pitch, op->width);
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
            fprintf(stderr, "fake_cuda %d: illegal %s of %zu x %zu to %#zx from %#zx\n",
                    getpid(), op->kind == COPY ? "copy" : "set", op->rows, op->width,
                    (size_t)op->to.address, (size_t)op->from.address);
        return;
    }
    size_t nbytes = op->width * op->rows;
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
        break;
    case WAIT:
        break;
    case KERNEL:
        if (!context->error)
            run_kernel(context, op);
        free(op->arguments);
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
            if ((moves(other) && overlap(op, &op->to, other, &other->to)) ||
                (other->kind == COPY && overlap(op, &op->to, other, &other->from)))
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
    if (a || !side->address)
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
    if (!op.width || !op.rows)
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
    notify();
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
        waiting++;
        if (!held || !wait_for_change(&until))
            result = LAUNCH_TIMEOUT;
        waiting--;
    }
    drop_mark(mark);
    return context->error ? context->error : result;
}

uint64_t hold(struct stream *stream)
{
    struct held *one = malloc(sizeof *one);
    if (!one)
        abort();
    *one = (struct held){held, new_id(), new_mark(1)};
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
            notify();
            return true;
        }
    return false;
}

void unhold_all(void)
{
    while (held)
        unhold(held->id);
}

void drop_queues(struct context *context)
{
    for (struct stream *stream = streams; stream; stream = stream->next)
        while (stream->context == context && stream->head) {
            struct op *op = stream->head;
            stream->head = op->next;
            if (op->kind == KERNEL)
                free(op->arguments);
            else if (!moves(op))
                finish(context, op);
            free(op);
        }
    notify();
}
