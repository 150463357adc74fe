/* Copies at every distance between source and destination: right to the byte, nothing beside them
   touched. Built with copy.c, whose calls of memmove and of the kernel come here. Its arguments
   name those of both that are slow at some distances ("memmove", "kernel"): copy.c must find that
   out, and leave no copy to them there; and it must leave to what is not slow all there is. */
#include "base/copy.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define LARGEST ((size_t)400 << 10)
#define GUARD ((size_t)64)
#define SLOW_FROM 2048
#define PAST_CACHE ((size_t)8 << 20)

static bool memmove_is_slow, kernel_is_slow, trying = true;
static size_t memmove_slow,
    kernel_slow; /* copies at a slow distance that came here since the trials */
static size_t
    short_by; /* of what is asked for the kernel copies so much less, if that is possible */

static void fail(const char *what, size_t distance, size_t nbytes, size_t number) {
    printf("%s: distance %zu, %zu bytes, %zu\n", what, distance, nbytes, number);
    exit(1);
}

/* --- what copy.c calls ------------------------------------------------------------------------ */

/* A copy of `nbytes`. While copy.c tries, it takes 40 times its time if it is at a slow distance;
   also elsewhere, if none shall be slow, which hides what this processor does. Afterwards those at
   a slow distance are counted. */
static void see(const void *to, const void *from, size_t nbytes, bool is_slow, size_t *count) {
    _Alignas(PC_PAGE) static unsigned char nowhere[LARGEST];
    size_t distance = ((uintptr_t)to - (uintptr_t)from) % PC_PAGE;
    bool slow_distance = nbytes >= SLOW_FROM && distance >= 1 && distance < 32;
    for (int times = 0; trying && (slow_distance || !is_slow) && times < 40; times++) {
        memmove(nowhere, from, nbytes);
        __asm__ __volatile__("" : : : "memory");
    }
    *count += !trying && slow_distance;
}

void *seen_memmove(void *to, const void *from, size_t nbytes) {
    see(to, from, nbytes, memmove_is_slow, &memmove_slow);
    return memmove(to, from, nbytes);
}

static void check_vectors(const struct iovec *to, unsigned long to_count, const struct iovec *from,
                          unsigned long from_count) {
    size_t to_offset = 0, from_offset = 0;
    while (to_count > 0 && from_count > 0) {
        size_t to_rest = to->iov_len - to_offset, from_rest = from->iov_len - from_offset;
        size_t nbytes = to_rest < from_rest ? to_rest : from_rest;
        see((char *)to->iov_base + to_offset, (char *)from->iov_base + from_offset, nbytes,
            kernel_is_slow, &kernel_slow);
        to_offset += nbytes;
        from_offset += nbytes;
        if (to_offset == to->iov_len)
            to++, to_count--, to_offset = 0;
        if (from_offset == from->iov_len)
            from++, from_count--, from_offset = 0;
    }
}

ssize_t seen_readv(pid_t pid, const struct iovec *to, unsigned long to_count,
                   const struct iovec *from, unsigned long from_count, unsigned long flags) {
    struct iovec less[16];
    check_vectors(to, to_count, from, from_count);
    memcpy(less, from, from_count * sizeof *from);
    if (less[from_count - 1].iov_len > short_by)
        less[from_count - 1].iov_len -= short_by;
    return process_vm_readv(pid, to, to_count, less, from_count, flags);
}

ssize_t seen_writev(pid_t pid, const struct iovec *from, unsigned long from_count,
                    const struct iovec *to, unsigned long to_count, unsigned long flags) {
    struct iovec less[16];
    check_vectors(to, to_count, from, from_count);
    memcpy(less, to, to_count * sizeof *to);
    if (less[to_count - 1].iov_len > short_by)
        less[to_count - 1].iov_len -= short_by;
    return process_vm_writev(pid, from, from_count, less, to_count, flags);
}

/* --- the copies ------------------------------------------------------------------------------- */

enum way { WITHIN, FROM, TO, WAYS };

static int copy(enum way way, unsigned char *to, struct pc_parts parts, size_t nbytes) {
    switch (way) {
    case FROM: return pc_copy_from(getpid(), parts, 0, to, nbytes);
    case TO: return pc_copy_to(getpid(), (uint64_t)(uintptr_t)to, parts, 0, nbytes);
    default: pc_copy_parts(to, parts, 0, nbytes); return 0;
    }
}

/* Pages for `nbytes`; `before` the first of them there are more bytes. */
static unsigned char *map(size_t nbytes, size_t before) {
    unsigned char *memory =
        mmap(NULL, nbytes + PC_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        exit(2);
    return memory + PC_PAGE - before;
}

static void check_beside(const unsigned char *target, const unsigned char *to, size_t distance,
                         size_t nbytes) {
    for (const unsigned char *at = target; at < target + nbytes + 3 * GUARD;
         at = at + 1 == to ? to + nbytes : at + 1)
        if (*at != 0xEE)
            fail("a byte beside", distance, nbytes, (size_t)(at - target));
}

static void check_copy(enum way way, unsigned char *target, unsigned char *source, size_t distance,
                       size_t nbytes, size_t num_parts) {
    unsigned char *to = target + GUARD + distance;
    struct iovec cut[3];
    for (size_t index = 0; index < num_parts; index++) {
        size_t begin = nbytes * index / num_parts;
        cut[index] = (struct iovec){source + begin, nbytes * (index + 1) / num_parts - begin};
    }
    memset(target, 0xEE, nbytes + 3 * GUARD);
    if (copy(way, to, (struct pc_parts){cut, num_parts}, nbytes) != 0)
        fail("an error", distance, nbytes, way);
    if (memcmp(to, source, nbytes) != 0)
        fail("wrong bytes", distance, nbytes, way);
    check_beside(target, to, distance, nbytes);
}

/* A page of the source that cannot be read: an error, and nothing beside the destination is
   touched. */
static void check_fault(unsigned char *target, unsigned char *source, size_t distance) {
    size_t nbytes = 40 * PC_PAGE;
    struct iovec whole = {source, nbytes};
    unsigned char *to = target + GUARD + distance;
    mprotect(source + 35 * PC_PAGE, PC_PAGE, PROT_NONE);
    memset(target, 0xEE, nbytes + 3 * GUARD);
    if (pc_copy_from(getpid(), (struct pc_parts){&whole, 1}, 0, to, nbytes) != EFAULT)
        fail("no error", distance, nbytes, 0);
    if (memcmp(to, source, 35 * PC_PAGE) != 0)
        fail("what could be read is not there", distance, nbytes, 0);
    check_beside(target, to, distance, nbytes);
    mprotect(source + 35 * PC_PAGE, PC_PAGE, PROT_READ | PROT_WRITE);
}

/* What is slow gets none of the copies that it is slow at, what is not gets them all. */
static void check_found(const char *what, bool is_slow, size_t count) {
    if (is_slow ? count > 0 : count == 0)
        fail(what, 0, count, 0);
}

int main(int argc, char **argv) {
    for (int index = 1; index < argc; index++) {
        memmove_is_slow |= strcmp(argv[index], "memmove") == 0;
        kernel_is_slow |= strcmp(argv[index], "kernel") == 0;
    }
    static const size_t sizes[] = {1,     31,    64,     2047,   2048,   2049,   2111,   4095,
                                   4096,  12289, 65535,  65536,  65599,  131071, 131072, 131073,
                                   131135, 133119, 133120, 133185, 300001};
    unsigned char *source = map(LARGEST, 0),
                  *target = map(LARGEST, GUARD); /* `distance` is that of what is copied */
    for (size_t byte = 0; byte < LARGEST; byte++)
        source[byte] = (unsigned char)(byte * 31 + byte / 251);
    for (enum way way = WITHIN; way < WAYS; way++)
        check_copy(way, target, source, 1, 4096, 1);
    trying = false;
    for (size_t distance = 0; distance <= 64; distance++) {
        for (size_t index = 0; index < sizeof sizes / sizeof *sizes; index++)
            for (enum way way = WITHIN; way < WAYS; way++)
                check_copy(way, target, source, distance, sizes[index], 1 + (distance + index) % 3);
        check_fault(target, source, distance);
    }
    short_by = 1000; /* calls that copy less than they were asked for */
    for (size_t distance = 0; distance <= 64; distance += 3)
        for (enum way way = FROM; way < WAYS; way++)
            check_copy(way, target, source, distance, 131073, 1 + distance % 2);
    short_by = 0;
    source = map(PAST_CACHE + GUARD, 0);
    target = map(PAST_CACHE + 4 * GUARD, GUARD);
    for (size_t byte = 0; byte < PAST_CACHE + GUARD; byte++)
        source[byte] = (unsigned char)(byte * 31 + byte / 251);
    check_copy(WITHIN, target, source, 17, PAST_CACHE + 33, 1);
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2"))
        check_found("memmove", memmove_is_slow, memmove_slow);
    check_found("the kernel", kernel_is_slow, kernel_slow);
#endif
    return 0;
}
