/* The driver without a GPU: its errors, devices and contexts. Each function has the signature and
 * the errors of the real one; those that are not here are not found. */
#define _GNU_SOURCE
#include "api.h"

#include <stdio.h>
#include <string.h>

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

API CUresult cuDeviceTotalMem_v2(size_t *nbytes, CUdevice device)
{
    BEGIN(DRIVER, "%d", device);
    REQUIRE(device >= 0 && device < device_count, INVALID_DEVICE);
    *nbytes = DEVICE_MEMORY;
    END(OK);
}

static int attributes[][2] = {
    {16, 132}, /* MULTIPROCESSOR_COUNT */
    {31, 1},   /* CONCURRENT_KERNELS */
    {40, 2},   /* ASYNC_ENGINE_COUNT */
    {41, 1},   /* UNIFIED_ADDRESSING */
    {75, 9},   /* COMPUTE_CAPABILITY_MAJOR */
    {76, 0},   /* COMPUTE_CAPABILITY_MINOR */
    {99, 1},   /* HOST_REGISTER_SUPPORTED */
    {115, 1},  /* MEMORY_POOLS_SUPPORTED */
    {117, 1},  /* GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS: by the host */
    {118, 0},  /* GPU_DIRECT_RDMA_WRITES_ORDERING: none */
    {124, 1},  /* DMA_BUF_SUPPORTED */
};

int attribute(int number)
{
    for (size_t i = 0; i < sizeof attributes / sizeof *attributes; i++)
        if (number == attributes[i][0])
            return attributes[i][1];
    return 0;
}

bool set_attribute(int number, int value)
{
    for (size_t i = 0; i < sizeof attributes / sizeof *attributes; i++)
        if (number == attributes[i][0]) {
            attributes[i][1] = value;
            return true;
        }
    return false;
}

API CUresult cuDeviceGetAttribute(int *value, int number, CUdevice device)
{
    BEGIN(DRIVER, "%d, %d", number, device);
    REQUIRE(device >= 0 && device < device_count, INVALID_DEVICE);
    *value = number == 33 ? 0x10 + physical[device] : attribute(number); /* PCI_BUS_ID */
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
