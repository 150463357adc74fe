/* Copies, streams and events. */
#define _GNU_SOURCE
#include "api.h"

#include <stdlib.h>

static struct side device_side(CUdeviceptr pointer)
{
    return (struct side){.address = pointer, .device = true};
}

static struct side host_side(const void *pointer)
{
    return (struct side){.address = (uintptr_t)pointer};
}

static struct op line(struct side to, struct side from, size_t nbytes)
{
    return (struct op){
        .kind = COPY, .to = to, .from = from, .width = nbytes, .rows = 1};
}

API CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t nbytes, void *handle)
{
    BEGIN(CONTEXT, "%p, %#llx, %zu, %p", to, from, nbytes, handle);
    STREAM(stream, handle);
    END(enqueue_copy(stream, line(host_side(to), device_side(from), nbytes)));
}

API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t nbytes, void *handle)
{
    BEGIN(CONTEXT, "%#llx, %p, %zu, %p", to, from, nbytes, handle);
    STREAM(stream, handle);
    END(enqueue_copy(stream, line(device_side(to), host_side(from), nbytes)));
}

API CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t nbytes, void *handle)
{
    BEGIN(CONTEXT, "%#llx, %#llx, %zu, %p", to, from, nbytes, handle);
    STREAM(stream, handle);
    END(enqueue_copy(stream, line(device_side(to), device_side(from), nbytes)));
}

struct end2d {
    size_t x, y;
    int type;
    void *host;
    CUdeviceptr device;
    void *array;
    size_t pitch;
};

struct copy2d {
    struct end2d from, to;
    size_t width, height;
};

/* A side of a copy of rows; `address` 0 if it makes no sense. */
static struct side rows_side(const struct end2d *end, size_t width)
{
    size_t pitch = end->pitch ? end->pitch : width + end->x;
    bool host = end->type == HOST_MEMORY_TYPE;
    uintptr_t base = host ? (uintptr_t)end->host : end->device;
    bool known = host || end->type == DEVICE_MEMORY_TYPE || end->type == UNIFIED_MEMORY_TYPE;
    if (!known || pitch < width + end->x || !base)
        return (struct side){0};
    return (struct side){
        .address = base + end->y * pitch + end->x,
        .pitch = pitch,
        .device = end->type == DEVICE_MEMORY_TYPE || (!host && allocation_at(base)),
    };
}

API CUresult cuMemcpy2DAsync_v2(const struct copy2d *copy, void *handle)
{
    BEGIN(CONTEXT, "%zu x %zu, %p", copy->height, copy->width, handle);
    STREAM(stream, handle);
    struct op op = {.kind = COPY,
                    .width = copy->width,
                    .rows = copy->height,
                    .to = rows_side(&copy->to, copy->width),
                    .from = rows_side(&copy->from, copy->width)};
    REQUIRE(op.to.address && op.from.address, INVALID_VALUE);
    END(enqueue_copy(stream, op));
}

static struct op set(CUdeviceptr to, uint32_t value, size_t size, size_t count)
{
    return (struct op){.kind = SET,
                       .to = device_side(to),
                       .width = size * count,
                       .rows = 1,
                       .value = value,
                       .value_size = size};
}

API CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, void *handle)
{
    BEGIN(CONTEXT, "%#llx, %d, %zu, %p", to, value, count, handle);
    STREAM(stream, handle);
    END(enqueue_copy(stream, set(to, value, 1, count)));
}

API CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count, void *handle)
{
    BEGIN(CONTEXT, "%#llx, %u, %zu, %p", to, value, count, handle);
    STREAM(stream, handle);
    REQUIRE(to % 4 == 0, INVALID_VALUE);
    END(enqueue_copy(stream, set(to, value, 4, count)));
}

/* Streams. */

API CUresult cuStreamCreate(void **handle, unsigned flags)
{
    BEGIN(CONTEXT, "%u", flags);
    REQUIRE(handle && flags <= 1, INVALID_VALUE);
    struct stream *stream = new_stream(current_context(), new_handle());
    REQUIRE(stream, OUT_OF_MEMORY);
    *handle = (void *)stream->handle;
    END(OK);
}

/* What is enqueued still runs. */
API CUresult cuStreamDestroy_v2(void *handle)
{
    BEGIN(CONTEXT, "%p", handle);
    STREAM(stream, handle);
    REQUIRE(stream->handle, INVALID_HANDLE);
    stream->destroyed = true;
    drop_empty(stream);
    END(OK);
}

API CUresult cuStreamWaitEvent(void *handle, void *event_handle, unsigned flags)
{
    BEGIN(CONTEXT, "%p, %p, %u", handle, event_handle, flags);
    STREAM(stream, handle);
    EVENT(event, event_handle);
    if (event->mark)
        enqueue(stream, (struct op){.kind = WAIT, .mark = event->mark});
    END(OK);
}

API CUresult cuStreamIsCapturing(void *handle, int *status)
{
    BEGIN(CONTEXT, "%p", handle);
    STREAM(stream, handle);
    *status = stream->captured;
    END(OK);
}

static void run_some(void)
{
    for (unsigned n = random_below(4); n && run_one(); n--)
        continue;
}

API CUresult cuStreamQuery(void *handle)
{
    BEGIN(CONTEXT, "%p", handle);
    STREAM(stream, handle);
    REQUIRE(!stream->captured, STREAM_CAPTURE_UNSUPPORTED);
    struct context *context = stream->context;
    run_some();
    REQUIRE(!context->error, context->error);
    END(stream->head ? NOT_READY : OK);
}

API CUresult cuStreamSynchronize(void *handle)
{
    BEGIN(CONTEXT, "%p", handle);
    STREAM(stream, handle);
    REQUIRE(!stream->captured, STREAM_CAPTURE_UNSUPPORTED);
    struct context *context = stream->context;
    struct mark *mark = new_mark(1);
    enqueue(stream, (struct op){.kind = RECORD, .mark = mark});
    END(wait_for(mark, context));
}

/* Events. */

API CUresult cuEventCreate(void **handle, unsigned flags)
{
    BEGIN(CONTEXT, "%u", flags);
    /* one of other processes is not timed */
    REQUIRE(handle && flags < 8 && (flags & 6) != 4, INVALID_VALUE);
    struct event *event = malloc(sizeof *event);
    REQUIRE(event, OUT_OF_MEMORY);
    *event = (struct event){events, new_handle(), current_context(), NULL};
    events = event;
    *handle = (void *)event->handle;
    END(OK);
}

API CUresult cuEventDestroy_v2(void *handle)
{
    BEGIN(CONTEXT, "%p", handle);
    EVENT(event, handle);
    remove_event(event);
    END(OK);
}

API CUresult cuEventRecord(void *handle, void *stream_handle)
{
    BEGIN(CONTEXT, "%p, %p", handle, stream_handle);
    EVENT(event, handle);
    STREAM(stream, stream_handle);
    REQUIRE(!stream->captured, STREAM_CAPTURE_UNSUPPORTED);
    REQUIRE(event->context == stream->context, INVALID_HANDLE);
    drop_mark(event->mark);
    event->mark = new_mark(1);
    enqueue(stream, (struct op){.kind = RECORD, .mark = event->mark});
    END(OK);
}

API CUresult cuEventQuery(void *handle)
{
    BEGIN(CONTEXT, "%p", handle);
    EVENT(event, handle);
    run_some();
    REQUIRE(!event->context->error, event->context->error);
    END(event->mark && event->mark->pending ? NOT_READY : OK);
}

API CUresult cuEventSynchronize(void *handle)
{
    BEGIN(CONTEXT, "%p", handle);
    EVENT(event, handle);
    if (!event->mark)
        END(OK);
    event->mark->refs++;
    END(wait_for(event->mark, event->context));
}
