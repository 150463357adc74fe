/* How the driver's functions are found, and what tests may ask of the fake beyond them. */
#define _GNU_SOURCE
#include "machine.h"

#include <stdio.h>
#include <string.h>

#define API __attribute__((visibility("default")))

/* The name to look for, the CUDA version since which it means the function, the function. */
#define FUNCTIONS(X)                                                                               \
    X(cuInit, 2000, cuInit)                                                                        \
    X(cuDriverGetVersion, 2020, cuDriverGetVersion)                                                \
    X(cuGetErrorName, 6000, cuGetErrorName)                                                        \
    X(cuGetErrorString, 6000, cuGetErrorString)                                                    \
    X(cuGetProcAddress, 11030, cuGetProcAddress)                                                   \
    X(cuGetProcAddress, 12000, cuGetProcAddress_v2)                                                \
    X(cuDeviceGetCount, 2000, cuDeviceGetCount)                                                    \
    X(cuDeviceGet, 2000, cuDeviceGet)                                                              \
    X(cuDeviceGetName, 2000, cuDeviceGetName)                                                      \
    X(cuDeviceGetUuid, 9020, cuDeviceGetUuid)                                                      \
    X(cuDeviceGetUuid, 11040, cuDeviceGetUuid_v2)                                                  \
    X(cuDeviceTotalMem, 3020, cuDeviceTotalMem_v2)                                                 \
    X(cuDeviceGetAttribute, 2000, cuDeviceGetAttribute)                                            \
    X(cuDevicePrimaryCtxRetain, 7000, cuDevicePrimaryCtxRetain)                                    \
    X(cuDevicePrimaryCtxRelease, 7000, cuDevicePrimaryCtxRelease)                                  \
    X(cuDevicePrimaryCtxRelease, 11000, cuDevicePrimaryCtxRelease_v2)                              \
    X(cuCtxPushCurrent, 4000, cuCtxPushCurrent_v2)                                                 \
    X(cuCtxPopCurrent, 4000, cuCtxPopCurrent_v2)                                                   \
    X(cuCtxGetCurrent, 4000, cuCtxGetCurrent)                                                      \
    X(cuCtxSetCurrent, 4000, cuCtxSetCurrent)                                                      \
    X(cuCtxGetDevice, 2000, cuCtxGetDevice)                                                        \
    X(cuCtxGetDevice, 13000, cuCtxGetDevice_v2)                                                    \
    X(cuMemAlloc, 3020, cuMemAlloc_v2)                                                             \
    X(cuMemFree, 3020, cuMemFree_v2)                                                               \
    X(cuMemAllocAsync, 11020, cuMemAllocAsync)                                                     \
    X(cuMemFreeAsync, 11020, cuMemFreeAsync)                                                       \
    X(cuMemGetAddressRange, 3020, cuMemGetAddressRange_v2)                                         \
    X(cuMemGetHandleForAddressRange, 11070, cuMemGetHandleForAddressRange)                         \
    X(cuFlushGPUDirectRDMAWrites, 11030, cuFlushGPUDirectRDMAWrites)                               \
    X(cuMemHostRegister, 6050, cuMemHostRegister_v2)                                               \
    X(cuMemHostUnregister, 4000, cuMemHostUnregister)                                              \
    X(cuPointerGetAttribute, 4000, cuPointerGetAttribute)                                          \
    X(cuMemcpyDtoHAsync, 3020, cuMemcpyDtoHAsync_v2)                                               \
    X(cuMemcpyHtoDAsync, 3020, cuMemcpyHtoDAsync_v2)                                               \
    X(cuMemcpyDtoDAsync, 3020, cuMemcpyDtoDAsync_v2)                                               \
    X(cuMemcpy2DAsync, 3020, cuMemcpy2DAsync_v2)                                                   \
    X(cuMemsetD8Async, 3020, cuMemsetD8Async)                                                      \
    X(cuMemsetD32Async, 3020, cuMemsetD32Async)                                                    \
    X(cuStreamCreate, 2000, cuStreamCreate)                                                        \
    X(cuStreamDestroy, 4000, cuStreamDestroy_v2)                                                   \
    X(cuStreamWaitEvent, 3020, cuStreamWaitEvent)                                                  \
    X(cuModuleLoadData, 2000, cuModuleLoadData)                                                    \
    X(cuModuleGetFunction, 2000, cuModuleGetFunction)                                              \
    X(cuLaunchKernel, 4000, cuLaunchKernel)                                                        \
    X(cuStreamIsCapturing, 10000, cuStreamIsCapturing)                                             \
    X(cuStreamQuery, 2000, cuStreamQuery)                                                          \
    X(cuStreamSynchronize, 2000, cuStreamSynchronize)                                              \
    X(cuEventCreate, 2000, cuEventCreate)                                                          \
    X(cuEventDestroy, 4000, cuEventDestroy_v2)                                                     \
    X(cuEventRecord, 2000, cuEventRecord)                                                          \
    X(cuEventQuery, 2000, cuEventQuery)                                                            \
    X(cuEventSynchronize, 2000, cuEventSynchronize)                                                \
    X(cuIpcGetMemHandle, 4010, cuIpcGetMemHandle)                                                  \
    X(cuIpcOpenMemHandle, 4010, cuIpcOpenMemHandle)                                                \
    X(cuIpcOpenMemHandle, 11000, cuIpcOpenMemHandle_v2)                                            \
    X(cuIpcCloseMemHandle, 4010, cuIpcCloseMemHandle)

#define DECLARE(name, since, function) void function(void);
FUNCTIONS(DECLARE)

static const struct {
    const char *name;
    int since;
    void (*function)(void);
} functions[] = {
#define ROW(name, since, function) {#name, since, function},
    FUNCTIONS(ROW)};

/* Not through enter(): hundreds are asked for, and nobody wants to see or to fail that. */
CUresult find_function(const char *name, void **function, int version, int *status)
{
    int known = 0, best = -1;
    for (int i = 0; i < (int)(sizeof functions / sizeof *functions); i++)
        if (strcmp(functions[i].name, name) == 0) {
            known = 1;
            if (functions[i].since <= version &&
                (best < 0 || functions[i].since > functions[best].since))
                best = i;
        }
    *function = best < 0 ? NULL : (void *)functions[best].function;
    if (status)
        *status = best >= 0 ? 0 : known ? 2 : 1; /* of CUdriverProcAddressQueryResult */
    return best >= 0 || status ? OK : NOT_FOUND;
}

/* Which of the tests' functions failed is said by 0, -1 or false: they are not the driver's. */

API void fake_seed(uint64_t seed)
{
    lock();
    set_seed(seed);
    unlock();
}

/* What is enqueued on the stream after this waits until fake_release(). A default stream is that of
 * the current context. Returns a number, 0 if there is no such stream. */
API uint64_t fake_hold(void *handle)
{
    lock();
    struct stream *stream = current_context() ? find_stream(handle) : NULL;
    uint64_t id = stream ? hold(stream) : 0;
    unlock();
    return id;
}

/* Begin or end the capture of a stream into a graph, which keeps nothing. */
API bool fake_capture(void *handle, bool begins)
{
    lock();
    struct stream *stream = current_context() ? find_stream(handle) : NULL;
    if (stream)
        stream->captured = begins;
    unlock();
    return stream != NULL;
}

API bool fake_release(uint64_t id)
{
    lock();
    bool found = unhold(id);
    unlock();
    return found;
}

API void fake_run_all(void)
{
    lock();
    while (run_one())
        continue;
    unlock();
}

API bool fake_fail(const char *text)
{
    lock();
    bool right = set_failures(text);
    unlock();
    return right;
}

/* Forget what is enqueued or held, what was wrong with contexts, failures to come, and counts. */
API void fake_reset(void)
{
    lock();
    set_failures("");
    unhold_all();
    drop_hidden();
    for (int i = 0; i < device_count; i++) {
        drop_queues(&contexts[i]);
        contexts[i].error = OK;
    }
    counts = (struct counts){0};
    unlock();
}

API bool fake_attribute(int number, int value)
{
    lock();
    bool known = set_attribute(number, value);
    unlock();
    return known;
}

/* Lines "name=number", in `size` bytes. */
API int fake_stats(char *text, size_t size)
{
    lock();
    uint64_t live = 0, bytes = 0, opened = 0, registered = 0, made = 0, recorded = 0, busy = 0;
    for (struct allocation *a = allocations; a; a = a->next) {
        opened += a->imported;
        live += !a->imported;
        bytes += a->imported ? 0 : a->size;
    }
    for (struct registration *r = registrations; r; r = r->next)
        registered++;
    for (struct stream *stream = streams; stream; stream = stream->next) {
        made += stream->handle && !stream->destroyed;
        busy += stream->head != NULL;
    }
    for (struct event *event = events; event; event = event->next)
        recorded++;
    const struct {
        const char *name;
        uint64_t value;
    } rows[] = {
        {"allocations", live},
        {"allocated_bytes", bytes},
        {"registered", registered},
        {"ipc_opened", opened},
        {"streams", made},
        {"events", recorded},
        {"busy_streams", busy},
        {"waiting", (uint64_t)waiting},
        {"enqueued", counts.enqueued},
        {"run", counts.run},
        {"h2d_bytes", counts.h2d},
        {"d2h_bytes", counts.d2h},
        {"d2d_bytes", counts.d2d},
        {"set_bytes", counts.set},
        {"pageable_copies", counts.pageable},
        {"illegal_accesses", counts.illegal},
        {"calls_without_context", counts.contextless},
        {"flushes", counts.flushes},
        {"kernels", counts.kernels},
    };
    int length = 0;
    for (size_t i = 0; i < sizeof rows / sizeof *rows && (size_t)length < size; i++)
        length += snprintf(text + length, size - (size_t)length, "%s=%llu\n", rows[i].name,
                           (unsigned long long)rows[i].value);
    unlock();
    return (size_t)length < size ? 0 : -1;
}

static int peek_or_poke(CUdeviceptr pointer, void *into, const void *from, size_t nbytes)
{
    lock();
    struct allocation *a = allocation_at(pointer);
    bool right = a && nbytes <= a->size - (pointer - a->base);
    if (right && into)
        memcpy(into, a->bytes + (pointer - a->base), nbytes);
    else if (right)
        memcpy(a->bytes + (pointer - a->base), from, nbytes);
    unlock();
    return right ? 0 : -1;
}

API int fake_peek(CUdeviceptr pointer, void *into, size_t nbytes)
{
    return peek_or_poke(pointer, into, NULL, nbytes);
}

API int fake_poke(CUdeviceptr pointer, const void *from, size_t nbytes)
{
    return peek_or_poke(pointer, NULL, from, nbytes);
}
