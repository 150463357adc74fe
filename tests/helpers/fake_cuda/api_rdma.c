/* Memory of devices as network devices reach it. A dma-buf is a memfd in which stands what it is
 * of. What is written through one is seen by nobody before it is flushed, unless the attribute of
 * the writes' ordering says that it need not be. */
#define _GNU_SOURCE
#include "api.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { FLUSH_OPTIONS = 117, ORDERING = 118, DMA_BUF = 124 }; /* CU_DEVICE_ATTRIBUTE_... */
enum { TO_OWNER = 100, TO_ALL_DEVICES = 200 };

struct dmabuf {
    uint64_t id; /* of the allocation */
    CUdeviceptr base;
    uint64_t size;
};

static struct hidden {
    struct hidden *next;
    uint64_t id;
    size_t offset, nbytes; /* in the allocation */
    char bytes[];
} *first, **last = &first;

API CUresult cuMemGetHandleForAddressRange(void *handle, CUdeviceptr pointer, size_t size, int type,
                                           unsigned long long flags)
{
    BEGIN(CONTEXT, "%#llx, %zu, %d, %llu", pointer, size, type, flags);
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    REQUIRE(handle && size && type == 1 && !flags, INVALID_VALUE);
    REQUIRE(pointer % page == 0 && size % page == 0, INVALID_VALUE);
    REQUIRE(attribute(DMA_BUF), NOT_SUPPORTED);
    struct allocation *a = allocation_at(pointer);
    REQUIRE(a && !a->pool && !a->imported, NOT_SUPPORTED);
    /* Memory consists of pages, whatever was asked for. */
    REQUIRE(size <= (a->size + page - 1) / page * page - (pointer - a->base), INVALID_VALUE);
    int fd = memfd_create("fake-dmabuf", MFD_CLOEXEC);
    REQUIRE(fd >= 0, OUT_OF_MEMORY);
    struct dmabuf dmabuf = {a->id, pointer, size};
    if (write(fd, &dmabuf, sizeof dmabuf) != sizeof dmabuf) {
        close(fd);
        END(OUT_OF_MEMORY);
    }
    *(int *)handle = fd;
    END(OK);
}

static void drop_first(void)
{
    struct hidden *hidden = first;
    first = hidden->next;
    if (!first)
        last = &first;
    free(hidden);
}

void drop_hidden(void)
{
    while (first)
        drop_first();
}

/* Only what is in memory of the current context's device. */
API CUresult cuFlushGPUDirectRDMAWrites(int target, int scope)
{
    BEGIN(CONTEXT, "%d, %d", target, scope);
    REQUIRE(target == 0 && (scope == TO_OWNER || scope == TO_ALL_DEVICES), INVALID_VALUE);
    REQUIRE(attribute(FLUSH_OPTIONS) & 1, NOT_SUPPORTED);
    counts.flushes++;
    struct hidden *others = NULL, **other = &others;
    while (first) {
        struct hidden *hidden = first;
        first = hidden->next;
        struct allocation *a = allocation_with(hidden->id);
        if (a && a->context != current_context()) {
            hidden->next = NULL;
            *other = hidden;
            other = &hidden->next;
            continue;
        }
        if (a)
            memcpy(a->bytes + hidden->offset, hidden->bytes, hidden->nbytes);
        free(hidden);
    }
    first = others;
    last = first ? other : &first;
    END(OK);
}

/* What a network device does, through a dma-buf of that allocation. Returns -1 if the memory is not
 * there (any more). */
API int fake_dma(uint64_t id, CUdeviceptr pointer, void *into, const void *from, size_t nbytes)
{
    lock();
    struct allocation *a = allocation_with(id);
    bool right = a && a->ready && !a->freed && pointer >= a->base && pointer - a->base <= a->size &&
                 nbytes <= a->size - (pointer - a->base);
    if (right && into) {
        memcpy(into, a->bytes + (pointer - a->base), nbytes);
    } else if (right && attribute(ORDERING) >= TO_ALL_DEVICES) {
        memcpy(a->bytes + (pointer - a->base), from, nbytes);
    } else if (right) {
        struct hidden *hidden = malloc(sizeof *hidden + nbytes);
        right = hidden != NULL;
        if (right) {
            *hidden = (struct hidden){NULL, id, pointer - a->base, nbytes};
            memcpy(hidden->bytes, from, nbytes);
            *last = hidden;
            last = &hidden->next;
        }
    }
    unlock();
    return right ? 0 : -1;
}
