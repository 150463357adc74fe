/* Allocations, which are memfds that the host sees at another address, and page-locked memory. */
#define _GNU_SOURCE
#include "machine.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#define GUARD ((size_t)64 << 10) /* on each side of what is mapped: nobody's */

struct allocation *allocations;
struct registration *registrations;

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
        .id = new_id(),
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
    snprintf(wanted, sizeof wanted, "/memfd:fake-cuda-%016llx (deleted)",
             (unsigned long long)nonce);
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

struct registration *add_registration(struct context *context, uintptr_t base, size_t size)
{
    struct registration *r = malloc(sizeof *r);
    if (r) {
        *r = (struct registration){registrations, new_id(), base, size, context};
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
    free(registration);
}
