/* What holds for every call of the driver: the lock, contexts, failures that tests want. */
#define _GNU_SOURCE
#include "machine.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define STACK 32

struct context contexts[DEVICES];
int device_count, physical[DEVICES];
bool initialized, tracing;
struct counts counts;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static bool forked;
static uint64_t random_state, last_id;

static __thread struct context *stack[STACK];
static __thread int depth;

static struct failure {
    char name[64];
    unsigned nth, seen; /* nth 0: every call */
    CUresult error;
} failures[32];
static int failure_count;

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

void notify(void)
{
    pthread_cond_broadcast(&changed);
}

bool wait_for_change(const struct timespec *until)
{
    return pthread_cond_timedwait(&changed, &mutex, until) == 0;
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

uint64_t new_id(void)
{
    return ++last_id;
}

uint64_t new_handle(void)
{
    return 0x5700000000000000u + 64 * new_id();
}
