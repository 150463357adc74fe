/* Memory of devices, page-locked memory of the host, and memory between processes. */
#define _GNU_SOURCE
#include "api.h"

#include <string.h>
#include <sys/mman.h> /* mincore */
#include <unistd.h>

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
    REQUIRE(add_registration(current_context(), base, size), OUT_OF_MEMORY);
    END(OK);
}

API CUresult cuMemHostUnregister(void *pointer)
{
    BEGIN(CONTEXT, "%p", pointer);
    struct registration *r = registration_at((uintptr_t)pointer, 1);
    REQUIRE(r && r->base == (uintptr_t)pointer, HOST_MEMORY_NOT_REGISTERED);
    remove_registration(r);
    END(OK);
}

enum attribute { /* CU_POINTER_ATTRIBUTE_... */
    CONTEXT_OF = 1,
    MEMORY_TYPE = 2,
    DEVICE_POINTER = 3,
    HOST_POINTER = 4,
    BUFFER_ID = 7,
    IS_MANAGED = 8,
    DEVICE_ORDINAL = 9,
    IS_LEGACY_CUDA_IPC_CAPABLE = 10,
    RANGE_START_ADDR = 11,
    RANGE_SIZE = 12,
};

/* One attribute of a pointer; all zero for memory that the driver does not know. */
static CUresult attribute_of(void *data, int attribute, CUdeviceptr pointer)
{
    struct allocation *a = allocation_at(pointer);
    struct registration *r = a ? NULL : registration_at(pointer, 1);
    struct context *context = a ? a->context : r ? r->context : NULL;
    uint64_t word = 0;
    int number = 0;
    switch (attribute) {
    case CONTEXT_OF:
        word = (uintptr_t)context;
        break;
    case DEVICE_POINTER:
        word = context ? pointer : 0;
        break;
    case HOST_POINTER:
        word = r ? pointer : 0;
        break;
    case BUFFER_ID:
        word = a ? a->id : r ? r->id : 0;
        break;
    case RANGE_START_ADDR:
        word = a ? a->base : r ? r->base : 0;
        break;
    case RANGE_SIZE:
        word = a ? a->size : r ? r->size : 0;
        break;
    case MEMORY_TYPE:
        number = a ? DEVICE_MEMORY_TYPE : r ? HOST_MEMORY_TYPE : 0;
        break;
    case IS_MANAGED:
        break;
    case DEVICE_ORDINAL:
        number = context ? context->device : -2;
        break;
    case IS_LEGACY_CUDA_IPC_CAPABLE:
        number = a && !a->pool && !a->imported;
        break;
    default:
        return INVALID_VALUE;
    }
    if (attribute == MEMORY_TYPE || (attribute >= IS_MANAGED && attribute < RANGE_START_ADDR))
        *(int *)data = number;
    else
        *(uint64_t *)data = word;
    return OK;
}

API CUresult cuPointerGetAttribute(void *data, int attribute, CUdeviceptr pointer)
{
    BEGIN(CONTEXT, "%d, %#llx", attribute, pointer);
    REQUIRE(data && (allocation_at(pointer) || registration_at(pointer, 1)), INVALID_VALUE);
    REQUIRE(attribute != HOST_POINTER || !allocation_at(pointer), INVALID_VALUE);
    END(attribute_of(data, attribute, pointer));
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
    struct context *context = current_context();
    for (int i = 0; i < device_count; i++) /* it may be another device's, and that one hidden */
        if (physical[i] == handle.device)
            context = &contexts[i];
    struct allocation *a =
        import_allocation(context, handle.pid, handle.fd, handle.nonce, handle.size);
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
