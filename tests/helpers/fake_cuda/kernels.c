/* Kernels: libraries for the processor, made by nvrtc/nvrtc.c. While one runs, and only then, the
 * host may touch what is at the device's addresses, so it reads and writes there as a GPU would. */
#define _GNU_SOURCE
#include "api.h"

#include <dlfcn.h>
#include <elf.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { INVALID_IMAGE = 200, NO_BINARY_FOR_GPU = 209, MOST = 8 };

struct kernel {
    void (*call)(void **arguments);
    const unsigned *sizes; /* of the arguments; 0 ends them */
};

API CUresult cuModuleLoadData(void **module, const void *image)
{
    BEGIN(CONTEXT, "%p", image);
    const Elf64_Ehdr *head = image;
    REQUIRE(memcmp(head->e_ident, ELFMAG, SELFMAG) == 0, INVALID_IMAGE);
    REQUIRE(head->e_machine == EM_X86_64 || head->e_machine == EM_AARCH64, NO_BINARY_FOR_GPU);
    size_t size = head->e_shoff + (size_t)head->e_shnum * head->e_shentsize;
    int fd = memfd_create("fake-cuda-module", MFD_CLOEXEC);
    char path[64];
    REQUIRE(fd >= 0 && write(fd, image, size) == (ssize_t)size, OUT_OF_MEMORY);
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd); /* which stays open: names are unique */
    *module = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    END(*module ? OK : INVALID_IMAGE);
}

API CUresult cuModuleGetFunction(void **function, void *module, const char *name)
{
    BEGIN(CONTEXT, "%p, %s", module, name);
    REQUIRE(dlsym(module, name), NOT_FOUND);
    struct kernel *kernel = calloc(1, sizeof *kernel);
    *(void **)&kernel->call = dlsym(module, "fake_call");
    kernel->sizes = dlsym(module, "fake_arguments");
    REQUIRE(kernel->call && kernel->sizes, NOT_FOUND);
    *function = kernel;
    END(OK);
}

API CUresult cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                            unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                            void *handle, void **arguments, void **extra)
{
    BEGIN(CONTEXT, "%p, %u, %u, %p", function, grid_x, block_x, handle);
    STREAM(stream, handle);
    REQUIRE(function && arguments && !extra && grid_x && grid_y && grid_z && block_y && block_z &&
                block_x && block_x * block_y * block_z <= 1024 && !shared,
            INVALID_VALUE);
    const struct kernel *kernel = function;
    size_t size = 0;
    for (int i = 0; kernel->sizes[i]; i++)
        size += (kernel->sizes[i] + 7u) / 8 * 8;
    uint64_t *copied = calloc(1, size);
    REQUIRE(copied, OUT_OF_MEMORY);
    size_t at = 0;
    for (int i = 0; kernel->sizes[i]; i++) {
        memcpy(copied + at, arguments[i], kernel->sizes[i]);
        at += (kernel->sizes[i] + 7u) / 8;
    }
    enqueue(stream, (struct op){.kind = KERNEL, .kernel = kernel, .arguments = copied,
                                .num_words = size / 8});
    END(OK);
}

/* Whether every argument that looks like an address is one of memory that is there. */
static bool is_legal(const struct op *op)
{
    for (size_t i = 0; i < op->num_words; i++) {
        struct allocation *a = op->arguments[i] >> 32 ? allocation_at(op->arguments[i]) : NULL;
        if (op->arguments[i] >> 32 && (!a || !a->ready || !atomic_load(&a->control->alive)))
            return false;
    }
    return true;
}

static void show(struct allocation *a, bool is_visible)
{
    size_t length = (size_t)((char *)a->control - a->bytes);
    if (is_visible)
        mremap(a->bytes, 0, length, MREMAP_MAYMOVE | MREMAP_FIXED, (void *)(uintptr_t)a->base);
    else
        mmap((void *)(uintptr_t)a->base, length, PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

void run_kernel(struct context *context, struct op *op)
{
    if (!is_legal(op)) {
        counts.illegal++;
        context->error = ILLEGAL_ADDRESS;
    } else {
        void *arguments[MOST];
        size_t at = 0;
        for (int i = 0; op->kernel->sizes[i]; i++) {
            arguments[i] = op->arguments + at;
            at += (op->kernel->sizes[i] + 7u) / 8;
        }
        for (struct allocation *a = allocations; a; a = a->next)
            show(a, true);
        op->kernel->call(arguments);
        for (struct allocation *a = allocations; a; a = a->next)
            show(a, false);
        counts.kernels++;
    }
}
