/* A CUDA driver without a GPU: the functions that pycoll and its tests use, each with the signature
 * and the errors of the real one. All others are not found. What they do is in machine.c. */
#define _GNU_SOURCE
#include "machine.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))

#define BEGIN(needs, ...)                                                                          \
    struct call call;                                                                              \
    CUresult refusal = enter(&call, __func__, needs, __VA_ARGS__);                                 \
    if (refusal)                                                                                   \
    return leave(&call, refusal)
#define END(result) return leave(&call, result)
#define REQUIRE(condition, error)                                                                  \
    do {                                                                                           \
        if (!(condition))                                                                          \
            END(error);                                                                            \
    } while (0)
#define STREAM(variable, handle)                                                                   \
    struct stream *variable = find_stream(handle);                                                 \
    REQUIRE(variable, INVALID_HANDLE);                                                             \
    REQUIRE(!variable->context->error, variable->context->error)
#define EVENT(variable, handle)                                                                    \
    struct event *variable = find_event(handle);                                                   \
    REQUIRE(variable, INVALID_HANDLE);                                                             \
    REQUIRE(!variable->context->error, variable->context->error)

/* The driver, and its errors. */

static const struct {
    CUresult code;
    const char *name, *text;
} errors[] = {
    {OK, "CUDA_SUCCESS", "no error"},
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {4, "CUDA_ERROR_DEINITIALIZED", "driver shutting down"},
    {46, "CUDA_ERROR_DEVICE_UNAVAILABLE", "CUDA-capable device(s) is/are busy or unavailable"},
    {NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {205, "CUDA_ERROR_MAP_FAILED", "mapping of buffer object failed"},
    {214, "CUDA_ERROR_ECC_UNCORRECTABLE", "uncorrectable ECC error encountered"},
    {217, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED",
     "peer access is not supported between these two devices"},
    {304, "CUDA_ERROR_OPERATING_SYSTEM", "OS call failed or operation not supported on this OS"},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {LAUNCH_TIMEOUT, "CUDA_ERROR_LAUNCH_TIMEOUT",
     "the launch timed out and was terminated"},
    {CONTEXT_IS_DESTROYED, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
    {HOST_MEMORY_ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
     "part or all of the requested memory range is already mapped"},
    {HOST_MEMORY_NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
     "pointer does not correspond to a registered memory region"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {800, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {999, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

API CUresult cuGetErrorName(CUresult error, const char **text)
{
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == error) {
            *text = errors[i].name;
            return OK;
        }
    *text = NULL;
    return INVALID_VALUE;
}

API CUresult cuGetErrorString(CUresult error, const char **text)
{
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == error) {
            *text = errors[i].text;
            return OK;
        }
    *text = NULL;
    return INVALID_VALUE;
}

API CUresult cuInit(unsigned flags)
{
    BEGIN(NOTHING, "%u", flags);
    REQUIRE(!flags, INVALID_VALUE);
    REQUIRE(device_count, NO_DEVICE);
    initialized = true;
    END(OK);
}

API CUresult cuDriverGetVersion(int *version)
{
    BEGIN(NOTHING, " ");
    REQUIRE(version, INVALID_VALUE);
    *version = 13000;
    END(OK);
}

API CUresult cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags,
                                 int *status)
{
    (void)flags; /* of default streams: both kinds are there under numbers */
    return name && function ? find_function(name, function, version, status) : INVALID_VALUE;
}

API CUresult cuGetProcAddress(const char *name, void **function, int version, uint64_t flags)
{
    return cuGetProcAddress_v2(name, function, version, flags, NULL);
}

/* Devices. */

API CUresult cuDeviceGetCount(int *count)
{
    BEGIN(DRIVER, " ");
    *count = device_count;
    END(OK);
}

API CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
    BEGIN(DRIVER, "%d", ordinal);
    REQUIRE(ordinal >= 0 && ordinal < device_count, INVALID_DEVICE);
    *device = ordinal;
    END(OK);
}

API CUresult cuDeviceGetName(char *name, int length, CUdevice device)
{
    BEGIN(DRIVER, "%d", device);
    REQUIRE(device >= 0 && device < device_count, INVALID_DEVICE);
    REQUIRE(length > 0, INVALID_VALUE);
    snprintf(name, (size_t)length, "Fake GPU %d", physical[device]);
    END(OK);
}

/* The same in all processes of a machine. */
API CUresult cuDeviceGetUuid_v2(unsigned char *uuid, CUdevice device)
{
    BEGIN(DRIVER, "%d", device);
    REQUIRE(device >= 0 && device < device_count, INVALID_DEVICE);
    char boot[16] = "";
    FILE *file = fopen("/proc/sys/kernel/random/boot_id", "r");
    if (file) {
        if (fread(boot, 1, 8, file) != 8)
            boot[0] = 0;
        fclose(file);
    }
    char text[17];
    snprintf(text, sizeof text, "fake%-8.8s%4d", boot, physical[device]);
    memcpy(uuid, text, 16);
    END(OK);
}

API CUresult cuDeviceGetUuid(unsigned char *uuid, CUdevice device)
{
    return cuDeviceGetUuid_v2(uuid, device);
}

API CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device)
{
    BEGIN(DRIVER, "%d, %d", attribute, device);
    REQUIRE(device >= 0 && device < device_count, INVALID_DEVICE);
    switch (attribute) {
    case 16: *value = 132; break;                        /* MULTIPROCESSOR_COUNT */
    case 31: *value = 1; break;                          /* CONCURRENT_KERNELS */
    case 33: *value = 0x10 + physical[device]; break;    /* PCI_BUS_ID */
    case 40: *value = 2; break;                          /* ASYNC_ENGINE_COUNT */
    case 41: *value = 1; break;                          /* UNIFIED_ADDRESSING */
    case 75: *value = 9; break;                          /* COMPUTE_CAPABILITY_MAJOR */
    case 99: *value = 1; break;                          /* HOST_REGISTER_SUPPORTED */
    case 115: *value = 1; break;                         /* MEMORY_POOLS_SUPPORTED */
    default: *value = 0;
    }
    END(OK);
}

API CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer)
{
    BEGIN(DRIVER, "%d, %d", device, peer);
    REQUIRE(device >= 0 && device < device_count, INVALID_DEVICE);
    REQUIRE(peer >= 0 && peer < device_count, INVALID_DEVICE);
    *can = device != peer;
    END(OK);
}

/* Contexts: the primary ones. */

API CUresult cuDevicePrimaryCtxRetain(void **context, CUdevice device)
{
    BEGIN(DRIVER, "%d", device);
    REQUIRE(device >= 0 && device < device_count, INVALID_DEVICE);
    contexts[device].refs++;
    *context = &contexts[device];
    END(OK);
}

API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
    BEGIN(DRIVER, "%d", device);
    REQUIRE(device >= 0 && device < device_count, INVALID_DEVICE);
    REQUIRE(contexts[device].refs, INVALID_CONTEXT);
    if (!--contexts[device].refs)
        destroy_context(&contexts[device]);
    END(OK);
}

API CUresult cuDevicePrimaryCtxRelease(CUdevice device)
{
    return cuDevicePrimaryCtxRelease_v2(device);
}

API CUresult cuCtxPushCurrent_v2(void *handle)
{
    BEGIN(DRIVER, "%p", handle);
    struct context *context = context_of(handle);
    REQUIRE(context && context->refs, INVALID_CONTEXT);
    REQUIRE(push_context(context), INVALID_VALUE);
    END(OK);
}

API CUresult cuCtxPopCurrent_v2(void **handle)
{
    BEGIN(DRIVER, " ");
    struct context *context = pop_context();
    REQUIRE(context, INVALID_CONTEXT);
    if (handle)
        *handle = context;
    END(OK);
}

API CUresult cuCtxGetCurrent(void **handle)
{
    BEGIN(DRIVER, " ");
    REQUIRE(handle, INVALID_VALUE);
    *handle = current_context();
    END(OK);
}

API CUresult cuCtxSetCurrent(void *handle)
{
    BEGIN(DRIVER, "%p", handle);
    struct context *context = context_of(handle);
    REQUIRE(!handle || (context && context->refs), INVALID_CONTEXT);
    pop_context();
    if (context)
        push_context(context);
    END(OK);
}

API CUresult cuCtxGetDevice(CUdevice *device)
{
    BEGIN(CONTEXT, " ");
    *device = current_context()->device;
    END(OK);
}

API CUresult cuCtxGetDevice_v2(CUdevice *device, void *handle)
{
    BEGIN(DRIVER, "%p", handle);
    struct context *context = handle ? context_of(handle) : current_context();
    REQUIRE(context && context->refs, INVALID_CONTEXT);
    *device = context->device;
    END(OK);
}

static CUresult synchronize(struct context *context)
{
    struct mark *mark = new_mark(0);
    for (struct stream *stream = streams; stream; stream = stream->next)
        if (stream->context == context && stream->head) {
            mark->pending++;
            enqueue(stream, (struct op){.kind = RECORD, .mark = mark});
        }
    return wait_for(mark, context);
}

API CUresult cuCtxSynchronize(void)
{
    BEGIN(CONTEXT, " ");
    END(synchronize(current_context()));
}

API CUresult cuCtxSynchronize_v2(void *handle)
{
    BEGIN(DRIVER, "%p", handle);
    struct context *context = handle ? context_of(handle) : current_context();
    REQUIRE(context && context->refs, INVALID_CONTEXT);
    END(synchronize(context));
}

/* Memory. */

static size_t in_use(const struct context *context)
{
    size_t sum = 0;
    for (struct allocation *a = allocations; a; a = a->next)
        sum += a->context == context && !a->imported ? a->size : 0;
    return sum;
}

API CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t size)
{
    BEGIN(CONTEXT, "%zu", size);
    struct context *context = current_context();
    REQUIRE(pointer && size, INVALID_VALUE);
    REQUIRE(size <= DEVICE_MEMORY - in_use(context), OUT_OF_MEMORY);
    struct allocation *a = allocate(context, size);
    REQUIRE(a, OUT_OF_MEMORY);
    *pointer = a->base;
    END(OK);
}

API CUresult cuMemAllocAsync(CUdeviceptr *pointer, size_t size, void *handle)
{
    BEGIN(CONTEXT, "%zu, %p", size, handle);
    STREAM(stream, handle);
    REQUIRE(pointer && size, INVALID_VALUE);
    REQUIRE(size <= DEVICE_MEMORY - in_use(stream->context), OUT_OF_MEMORY);
    struct allocation *a = allocate(stream->context, size);
    REQUIRE(a, OUT_OF_MEMORY);
    a->pool = true;
    a->ready = false;
    enqueue(stream, (struct op){.kind = ALLOCATE, .id = a->id});
    *pointer = a->base;
    END(OK);
}

API CUresult cuMemFree_v2(CUdeviceptr pointer)
{
    BEGIN(CONTEXT, "%#llx", pointer);
    if (!pointer)
        END(OK);
    struct allocation *a = allocation_at(pointer);
    REQUIRE(a && a->base == pointer && !a->imported && !a->freed, INVALID_VALUE);
    release(a);
    END(OK);
}

API CUresult cuMemFreeAsync(CUdeviceptr pointer, void *handle)
{
    BEGIN(CONTEXT, "%#llx, %p", pointer, handle);
    STREAM(stream, handle);
    struct allocation *a = allocation_at(pointer);
    REQUIRE(a && a->base == pointer && a->pool && !a->freed, INVALID_VALUE);
    a->freed = true;
    enqueue(stream, (struct op){.kind = FREE, .id = a->id});
    END(OK);
}

API CUresult cuMemGetInfo_v2(size_t *available, size_t *total)
{
    BEGIN(CONTEXT, " ");
    *available = DEVICE_MEMORY - in_use(current_context());
    *total = DEVICE_MEMORY;
    END(OK);
}

API CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr pointer)
{
    BEGIN(CONTEXT, "%#llx", pointer);
    struct allocation *a = allocation_at(pointer);
    REQUIRE(a, NOT_FOUND);
    if (base)
        *base = a->base;
    if (size)
        *size = a->size;
    END(OK);
}

API CUresult cuMemGetHandleForAddressRange(void *handle, CUdeviceptr pointer, size_t size, int type,
                                           unsigned long long flags)
{
    (void)handle;
    BEGIN(CONTEXT, "%#llx, %zu, %d, %llu", pointer, size, type, flags);
    END(NOT_SUPPORTED);
}

API CUresult cuMemAllocHost_v2(void **pointer, size_t size)
{
    BEGIN(CONTEXT, "%zu", size);
    REQUIRE(pointer && size, INVALID_VALUE);
    void *at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    REQUIRE(at != MAP_FAILED, OUT_OF_MEMORY);
    memset(at, FRESH, size);
    if (!add_registration(current_context(), (uintptr_t)at, size, true)) {
        munmap(at, size);
        END(OUT_OF_MEMORY);
    }
    *pointer = at;
    END(OK);
}

API CUresult cuMemFreeHost(void *pointer)
{
    BEGIN(CONTEXT, "%p", pointer);
    struct registration *r = registration_at((uintptr_t)pointer, 1);
    REQUIRE(r && r->base == (uintptr_t)pointer && r->owned, INVALID_VALUE);
    remove_registration(r);
    END(OK);
}

/* Pages are pinned: registrations may not share one. */
API CUresult cuMemHostRegister_v2(void *pointer, size_t size, unsigned flags)
{
    BEGIN(CONTEXT, "%p, %zu, %u", pointer, size, flags);
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), base = (uintptr_t)pointer;
    REQUIRE(pointer && size && flags < 16 && base + size > base, INVALID_VALUE);
    uintptr_t first = base / page * page, end = (base + size + page - 1) / page * page;
    for (uintptr_t at = first; at < end; at += page) {
        unsigned char there;
        REQUIRE(mincore((void *)at, page, &there) == 0, INVALID_VALUE);
    }
    for (struct registration *r = registrations; r; r = r->next)
        REQUIRE(end <= r->base / page * page || first >= r->base + r->size,
                HOST_MEMORY_ALREADY_REGISTERED);
    REQUIRE(add_registration(current_context(), base, size, false), OUT_OF_MEMORY);
    END(OK);
}

API CUresult cuMemHostUnregister(void *pointer)
{
    BEGIN(CONTEXT, "%p", pointer);
    struct registration *r = registration_at((uintptr_t)pointer, 1);
    REQUIRE(r && r->base == (uintptr_t)pointer && !r->owned, HOST_MEMORY_NOT_REGISTERED);
    remove_registration(r);
    END(OK);
}

/* One attribute of a pointer; all zero for memory that the driver does not know. */
static CUresult attribute_of(void *data, int attribute, CUdeviceptr pointer)
{
    struct allocation *a = allocation_at(pointer);
    struct registration *r = a ? NULL : registration_at(pointer, 1);
    struct context *context = a ? a->context : r ? r->context : NULL;
    uint64_t word = 0;
    switch (attribute) {
    case 1: word = (uintptr_t)context; break;                     /* CONTEXT */
    case 3: word = context ? pointer : 0; break;                  /* DEVICE_POINTER */
    case 4: word = r ? pointer : 0; break;                        /* HOST_POINTER */
    case 7: word = a ? a->id : r ? r->id : 0; break;              /* BUFFER_ID */
    case 11: word = a ? a->base : r ? r->base : 0; break;         /* RANGE_START_ADDR */
    case 12: word = a ? a->size : r ? r->size : 0; break;         /* RANGE_SIZE */
    case 2: *(int *)data = a ? 2 : r ? 1 : 0; return OK;          /* MEMORY_TYPE */
    case 8: *(int *)data = 0; return OK;                          /* IS_MANAGED */
    case 9: *(int *)data = context ? context->device : -2; return OK; /* DEVICE_ORDINAL */
    case 10: *(int *)data = a && !a->pool && !a->imported; return OK; /* ..._IPC_CAPABLE */
    default: return INVALID_VALUE;
    }
    *(uint64_t *)data = word;
    return OK;
}

API CUresult cuPointerGetAttribute(void *data, int attribute, CUdeviceptr pointer)
{
    BEGIN(CONTEXT, "%d, %#llx", attribute, pointer);
    REQUIRE(data && (allocation_at(pointer) || registration_at(pointer, 1)), INVALID_VALUE);
    END(attribute_of(data, attribute, pointer));
}

API CUresult cuPointerGetAttributes(unsigned count, int *attributes, void **data,
                                    CUdeviceptr pointer)
{
    BEGIN(CONTEXT, "%u, %#llx", count, pointer);
    REQUIRE(attributes && data, INVALID_VALUE);
    for (unsigned i = 0; i < count; i++) {
        CUresult error = attribute_of(data[i], attributes[i], pointer);
        REQUIRE(!error, error);
    }
    END(OK);
}

/* Copies. */

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
        .kind = COPY, .to = to, .from = from, .width = nbytes, .rows = 1, .planes = 1};
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

static CUresult synchronous(struct op op)
{
    struct context *context = current_context();
    struct mark *mark = new_mark(1);
    enqueue(context->legacy, (struct op){.kind = RECORD, .mark = mark});
    CUresult error = wait_for(mark, context);
    return error ? error : copy_now(context, op);
}

API CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t nbytes)
{
    BEGIN(CONTEXT, "%p, %#llx, %zu", to, from, nbytes);
    END(synchronous(line(host_side(to), device_side(from), nbytes)));
}

API CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t nbytes)
{
    BEGIN(CONTEXT, "%#llx, %p, %zu", to, from, nbytes);
    END(synchronous(line(device_side(to), host_side(from), nbytes)));
}

API CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t nbytes)
{
    BEGIN(CONTEXT, "%#llx, %#llx, %zu", to, from, nbytes);
    END(synchronous(line(device_side(to), device_side(from), nbytes)));
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

struct end3d {
    size_t x, y, z, level;
    int type;
    void *host;
    CUdeviceptr device;
    void *array, *reserved;
    size_t pitch, height;
};

struct copy3d {
    struct end3d from, to;
    size_t width, height, depth;
};

/* A side of a copy of rows; `address` 0 if it makes no sense. */
static struct side rows_side(const struct end3d *end, size_t width, size_t height, size_t depth)
{
    size_t pitch = end->pitch ? end->pitch : width + end->x;
    size_t slice = pitch * (end->height ? end->height : height);
    bool host = end->type == 1;
    uintptr_t base = host ? (uintptr_t)end->host : end->device;
    if ((!host && end->type != 2 && end->type != 4) || !base || end->level || end->reserved ||
        pitch < width + end->x || (depth > 1 && end->height && end->height < height + end->y))
        return (struct side){0};
    return (struct side){
        .address = base + end->z * slice + end->y * pitch + end->x,
        .pitch = pitch,
        .slice = slice,
        .device = end->type == 2 || (end->type == 4 && allocation_at(base)),
    };
}

static CUresult enqueue_rows(struct stream *stream, const struct copy3d *copy)
{
    struct op op = {.kind = COPY,
                    .width = copy->width,
                    .rows = copy->height,
                    .planes = copy->depth,
                    .to = rows_side(&copy->to, copy->width, copy->height, copy->depth),
                    .from = rows_side(&copy->from, copy->width, copy->height, copy->depth)};
    return op.to.address && op.from.address ? enqueue_copy(stream, op) : INVALID_VALUE;
}

API CUresult cuMemcpy3DAsync_v2(const struct copy3d *copy, void *handle)
{
    BEGIN(CONTEXT, "%zu x %zu x %zu, %p", copy->depth, copy->height, copy->width, handle);
    STREAM(stream, handle);
    END(enqueue_rows(stream, copy));
}

static struct end3d one_plane(const struct end2d *end)
{
    return (struct end3d){.x = end->x,
                          .y = end->y,
                          .type = end->type,
                          .host = end->host,
                          .device = end->device,
                          .pitch = end->pitch};
}

API CUresult cuMemcpy2DAsync_v2(const struct copy2d *copy, void *handle)
{
    BEGIN(CONTEXT, "%zu x %zu, %p", copy->height, copy->width, handle);
    STREAM(stream, handle);
    END(enqueue_rows(stream, &(struct copy3d){.from = one_plane(&copy->from),
                                              .to = one_plane(&copy->to),
                                              .width = copy->width,
                                              .height = copy->height,
                                              .depth = 1}));
}

static struct op set(CUdeviceptr to, uint32_t value, size_t size, size_t count)
{
    return (struct op){.kind = SET,
                       .to = device_side(to),
                       .width = size * count,
                       .rows = 1,
                       .planes = 1,
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

API CUresult cuStreamCreateWithPriority(void **handle, unsigned flags, int priority)
{
    BEGIN(CONTEXT, "%u, %d", flags, priority);
    REQUIRE(handle && flags <= 1, INVALID_VALUE);
    struct stream *stream = new_stream(current_context(), new_handle());
    REQUIRE(stream, OUT_OF_MEMORY);
    *handle = (void *)stream->handle;
    END(OK);
}

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

API CUresult cuStreamGetCtx(void *handle, void **context)
{
    BEGIN(CONTEXT, "%p", handle);
    STREAM(stream, handle);
    *context = stream->context;
    END(OK);
}

API CUresult cuStreamGetCtx_v2(void *handle, void **context, void **green)
{
    BEGIN(CONTEXT, "%p", handle);
    STREAM(stream, handle);
    *context = stream->context;
    if (green)
        *green = NULL;
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

static void run_some(void)
{
    for (unsigned n = random_below(4); n && run_one(); n--)
        continue;
}

API CUresult cuStreamQuery(void *handle)
{
    BEGIN(CONTEXT, "%p", handle);
    STREAM(stream, handle);
    struct context *context = stream->context;
    run_some();
    REQUIRE(!context->error, context->error);
    END(stream->head ? NOT_READY : OK);
}

API CUresult cuStreamSynchronize(void *handle)
{
    BEGIN(CONTEXT, "%p", handle);
    STREAM(stream, handle);
    struct context *context = stream->context;
    struct mark *mark = new_mark(1);
    enqueue(stream, (struct op){.kind = RECORD, .mark = mark});
    END(wait_for(mark, context));
}

/* Events. */

API CUresult cuEventCreate(void **handle, unsigned flags)
{
    BEGIN(CONTEXT, "%u", flags);
    bool timed = !(flags & 2);
    REQUIRE(handle && flags < 8 && !(flags & 4 && timed), INVALID_VALUE);
    struct event *event = malloc(sizeof *event);
    REQUIRE(event, OUT_OF_MEMORY);
    *event = (struct event){events, new_handle(), current_context(), timed, NULL};
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

API CUresult cuEventElapsedTime_v2(float *milliseconds, void *start, void *end)
{
    BEGIN(CONTEXT, "%p, %p", start, end);
    EVENT(first, start);
    EVENT(last, end);
    REQUIRE(first->timed && last->timed && first->mark && last->mark, INVALID_HANDLE);
    REQUIRE(first->context == last->context, INVALID_HANDLE);
    REQUIRE(!first->mark->pending && !last->mark->pending, NOT_READY);
    struct timespec a = first->mark->when, b = last->mark->when;
    *milliseconds = (float)((double)(b.tv_sec - a.tv_sec) * 1e3 +
                            (double)(b.tv_nsec - a.tv_nsec) / 1e6);
    END(OK);
}

API CUresult cuEventElapsedTime(float *milliseconds, void *start, void *end)
{
    return cuEventElapsedTime_v2(milliseconds, start, end);
}

/* Memory between processes. */

struct ipc_handle {
    union {
        char bytes[64];
        struct {
            uint64_t nonce, size;
            int pid, fd, device;
        };
    };
};

API CUresult cuIpcGetMemHandle(struct ipc_handle *handle, CUdeviceptr pointer)
{
    BEGIN(CONTEXT, "%#llx", pointer);
    struct allocation *a = allocation_at(pointer);
    REQUIRE(handle && a && !a->pool && !a->imported, INVALID_VALUE);
    *handle = (struct ipc_handle){0};
    handle->nonce = a->nonce;
    handle->size = a->size;
    handle->pid = getpid();
    handle->fd = a->fd;
    handle->device = physical[a->context->device];
    END(OK);
}

API CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *pointer, struct ipc_handle handle, unsigned flags)
{
    BEGIN(CONTEXT, "%d/%d, %u", handle.pid, handle.fd, flags);
    REQUIRE(pointer && flags == 1, INVALID_VALUE);
    REQUIRE(handle.pid != getpid(), INVALID_CONTEXT);
    for (struct allocation *a = allocations; a; a = a->next)
        if (a->imported && a->nonce == handle.nonce) {
            a->opened++;
            *pointer = a->base;
            END(OK);
        }
    struct allocation *a = import_allocation(current_context(), handle.pid, handle.fd,
                                             handle.nonce, handle.size);
    REQUIRE(a, INVALID_HANDLE);
    *pointer = a->base;
    END(OK);
}

API CUresult cuIpcOpenMemHandle(CUdeviceptr *pointer, struct ipc_handle handle, unsigned flags)
{
    return cuIpcOpenMemHandle_v2(pointer, handle, flags);
}

API CUresult cuIpcCloseMemHandle(CUdeviceptr pointer)
{
    BEGIN(CONTEXT, "%#llx", pointer);
    struct allocation *a = allocation_at(pointer);
    REQUIRE(a && a->base == pointer && a->imported, INVALID_VALUE);
    if (!--a->opened)
        release(a);
    END(OK);
}

API CUresult cuIpcGetEventHandle(void *handle, void *event)
{
    (void)handle;
    BEGIN(CONTEXT, "%p", event);
    END(NOT_SUPPORTED);
}

API CUresult cuIpcOpenEventHandle(void **event, struct ipc_handle handle)
{
    (void)event;
    BEGIN(CONTEXT, "%d", handle.pid);
    END(NOT_SUPPORTED);
}
