#include "copy.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#ifndef PR_SET_PTRACER
#define PR_SET_PTRACER 0x59616d61
#endif
#ifndef PR_SET_PTRACER_ANY
#define PR_SET_PTRACER_ANY ((unsigned long)-1)
#endif

/* memcpy and the kernel copy by the instruction `rep movsb` where the processor says that this is
   quick ("erms", "fsrm"). On processors of AMD with "fsrm" it takes 5 to 25 times as long if (to -
   from) mod 4096 is between 1 and 31, of which half is harmless on some of them. Arrays that are
   allocated one after the other often lie just so. There, copies are loops of vector loads and
   stores, and what the kernel copies makes a detour. Elsewhere the plain copies are quickest: so
   each process tries memmove, and the kernel, once. */

#if defined(__x86_64__)
static void by_memmove(void *to, void *from, size_t nbytes) { memmove(to, from, nbytes); }

static void by_kernel(void *to, void *from, size_t nbytes) {
    struct iovec source = {from, nbytes}, target = {to, nbytes};
    process_vm_readv(getpid(), &target, 1, &source, 1, 0); /* if that is refused, nobody asks */
}

/* Whether a copy takes much longer at a distance of 1 than of 0: found out once, in about 50 us. */
static bool is_slow_at_1(void copy(void *, void *, size_t), _Atomic int *known) {
    enum { NBYTES = 64 << 10, TURNS = 8, NO = 1, YES = 2 };
    int found = atomic_load_explicit(known, memory_order_relaxed);
    if (PC_LIKELY(found != 0))
        return found == YES;
    unsigned char *memory = aligned_alloc(PC_PAGE, 2 * NBYTES + PC_PAGE);
    if (memory == NULL)
        return false;
    memset(memory, 0, 2 * NBYTES + PC_PAGE);
    /* the compiler may not leave out what nobody reads */
    void (*volatile tried)(void *, void *, size_t) = copy;
    uint64_t best[2] = {UINT64_MAX, UINT64_MAX};
    for (int turn = 0; turn < TURNS; turn++) {
        uint64_t started = pc_now_ns();
        tried(memory + NBYTES + turn % 2, memory, NBYTES);
        uint64_t took = pc_now_ns() - started;
        best[turn % 2] = took < best[turn % 2] ? took : best[turn % 2];
    }
    free(memory);
    found = 2 * best[1] > 5 * best[0] ? YES : NO;
    atomic_store_explicit(known, found, memory_order_relaxed);
    return found == YES;
}

static bool is_memmove_slow(void) {
    static _Atomic int known;
    return is_slow_at_1(by_memmove, &known);
}

static bool is_kernel_slow(void) {
    static _Atomic int known;
    return is_slow_at_1(by_kernel, &known);
}
#else
static bool is_kernel_slow(void) { return false; }
#endif

/* --- within this process ---------------------------------------------------------------------- */

#if defined(__x86_64__)
#define VECTOR 32
#define UNROLLED 128

/* `to` is aligned, and `nbytes` a multiple of UNROLLED. */
__attribute__((target("avx2"))) static void copy_vectors(unsigned char *to,
                                                         const unsigned char *from, size_t nbytes) {
    for (size_t at = 0; at < nbytes; at += UNROLLED) {
        __m256i vectors[UNROLLED / VECTOR];
        for (int index = 0; index < UNROLLED / VECTOR; index++)
            vectors[index] = _mm256_loadu_si256((const __m256i *)(from + at) + index);
        for (int index = 0; index < UNROLLED / VECTOR; index++)
            _mm256_store_si256((__m256i *)(to + at) + index, vectors[index]);
    }
}

__attribute__((target("avx2"))) static void
copy_past_cache(unsigned char *to, const unsigned char *from, size_t nbytes) {
    for (size_t at = 0; at < nbytes; at += UNROLLED) {
        __m256i vectors[UNROLLED / VECTOR];
        for (int index = 0; index < UNROLLED / VECTOR; index++)
            vectors[index] = _mm256_loadu_si256((const __m256i *)(from + at) + index);
        for (int index = 0; index < UNROLLED / VECTOR; index++)
            _mm256_stream_si256((__m256i *)(to + at) + index, vectors[index]);
    }
    _mm_sfence(); /* or others might see a flag before what it stands for */
}

static void copy_by(void copy(unsigned char *, const unsigned char *, size_t), void *to,
                    const void *from, size_t nbytes) {
    unsigned char *target = to;
    const unsigned char *source = from;
    size_t head = -(uintptr_t)to % VECTOR, body = (nbytes - head) / UNROLLED * UNROLLED;
    memmove(target, source, head);
    copy(target + head, source + head, body);
    memmove(target + head + body, source + head + body, nbytes - head - body);
}

void pc_copy_long(void *to, const void *from, size_t nbytes, size_t whole) {
    if (!is_memmove_slow() || pc_processor_level() == 0)
        memmove(to, from, nbytes);
    else
        copy_by(whole < PC_PAST_CACHE_NBYTES ? copy_vectors : copy_past_cache, to, from, nbytes);
}

void pc_copy_past(void *to, const void *from, size_t nbytes) {
    if (nbytes < PC_LOOP_NBYTES || pc_processor_level() == 0)
        memmove(to, from, nbytes);
    else
        copy_by(copy_past_cache, to, from, nbytes);
}
#else
void pc_copy_past(void *to, const void *from, size_t nbytes) { memmove(to, from, nbytes); }

void pc_copy_long(void *to, const void *from, size_t nbytes, size_t whole) {
    (void)whole;
    memmove(to, from, nbytes);
}
#endif

/* --- parts of a payload ----------------------------------------------------------------------- */

/* Parts in one system call. */
#define PARTS 16

/* Cut [offset, offset + nbytes) out of a payload, as far as `cut` has room; returns the parts, and
   their bytes. */
static size_t cut_out(struct pc_parts whole, size_t offset, size_t nbytes, struct iovec cut[PARTS],
                      size_t *cut_nbytes) {
    size_t count = 0, total = 0;
    for (size_t index = 0; index < whole.num_parts && total < nbytes && count < PARTS; index++) {
        size_t length = whole.parts[index].iov_len;
        if (offset >= length) {
            offset -= length;
            continue;
        }
        size_t piece = length - offset < nbytes - total ? length - offset : nbytes - total;
        cut[count].iov_base = (char *)whole.parts[index].iov_base + offset;
        cut[count++].iov_len = piece;
        total += piece;
        offset = 0;
    }
    *cut_nbytes = total;
    return count;
}

void pc_copy_parts(void *into, struct pc_parts parts, size_t offset, size_t nbytes) {
    unsigned char *to = into;
    while (nbytes > 0) {
        struct iovec cut[PARTS];
        size_t length;
        size_t count = cut_out(parts, offset, nbytes, cut, &length);
        for (size_t index = 0; index < count; index++) {
            pc_copy(to, cut[index].iov_base, cut[index].iov_len);
            to += cut[index].iov_len;
        }
        offset += length;
        nbytes -= length;
    }
}

/* --- between two processes -------------------------------------------------------------------- */

/* Bytes that take a detour at a time: they stay in the second-level cache. Measured in one process,
   256 KiB at a distance of 1: straight ahead 104 us (20 at 0); moved in pieces of 128 KiB 26, of 32
   KiB 30; through a bounce of 64 KiB 29, of 32 KiB 34. */
#define SLOW_NBYTES 2048
#define MOVED_NBYTES ((size_t)128 << 10)
#define BOUNCE_NBYTES ((size_t)64 << 10)

static bool is_slow(uint64_t to, const struct iovec *from) {
    return (to - (uintptr_t)from->iov_base - 1) % PC_PAGE < 31 && from->iov_len >= SLOW_NBYTES &&
           is_kernel_slow();
}

/* Have the kernel write the bytes behind their place, to where they are aligned like the source,
   and move them down: so what is written twice is in the cache. The last have no room behind
   them. */
static ssize_t read_moved(pid_t pid, const struct iovec *theirs, unsigned char *into) {
    unsigned char last[PC_LINE];
    size_t nbytes = theirs->iov_len < MOVED_NBYTES ? theirs->iov_len : MOVED_NBYTES;
    size_t by = PC_LINE - ((uintptr_t)into - (uintptr_t)theirs->iov_base) % PC_PAGE,
           most = nbytes - by;
    struct iovec from = {theirs->iov_base, nbytes}, to[2] = {{into + by, most}, {last, by}};
    ssize_t copied = process_vm_readv(pid, to, 2, &from, 1, 0);
    if (copied > 0) {
        size_t moved = (size_t)copied < most ? (size_t)copied : most;
        pc_copy(into, into + by, moved);
        memcpy(into + moved, last, (size_t)copied - moved);
    }
    return copied;
}

/* Give the kernel a copy that is aligned like the destination. The memory is not on the stack,
   which is small in some threads. */
static ssize_t write_bounced(pid_t pid, const struct iovec *ours, uint64_t into) {
    static _Thread_local unsigned char bounce[2 * PC_PAGE + BOUNCE_NBYTES];
    unsigned char *memory = bounce + (PC_PAGE - (uintptr_t)bounce % PC_PAGE);
    size_t nbytes = ours->iov_len < BOUNCE_NBYTES ? ours->iov_len : BOUNCE_NBYTES;
    struct iovec from = {memory + into % PC_PAGE, nbytes}, to = {(void *)(uintptr_t)into, nbytes};
    pc_copy(from.iov_base, ours->iov_base, nbytes);
    return process_vm_writev(pid, &from, 1, &to, 1, 0);
}

/* Copy bytes of a payload to `into`: by reading them if the payload is the other's, else by
   writing. */
static int copy(pid_t pid, struct pc_parts payload, size_t offset, uint64_t into, size_t nbytes,
                bool reads) {
    while (nbytes > 0) {
        struct iovec cut[PARTS];
        size_t length, straight = 0, count = cut_out(payload, offset, nbytes, cut, &length);
        if (count == 0)
            return EFAULT;
        for (length = 0; straight < count && !is_slow(into + length, &cut[straight]); straight++)
            length += cut[straight].iov_len;
        struct iovec whole = {(void *)(uintptr_t)into, length};
        ssize_t copied;
        if (straight == 0)
            copied = reads ? read_moved(pid, cut, whole.iov_base) : write_bounced(pid, cut, into);
        else if (reads)
            copied = process_vm_readv(pid, &whole, 1, cut, straight, 0);
        else
            copied = process_vm_writev(pid, cut, straight, &whole, 1, 0);
        if (copied < 0 && errno == EINTR)
            continue;
        if (copied <= 0)
            return copied < 0 ? errno : EFAULT;
        offset += (size_t)copied;
        into += (uint64_t)copied;
        nbytes -= (size_t)copied;
    }
    return 0;
}

int pc_copy_from(pid_t pid, struct pc_parts theirs, size_t offset, void *into, size_t nbytes) {
    return copy(pid, theirs, offset, (uint64_t)(uintptr_t)into, nbytes, true);
}

int pc_copy_to(pid_t pid, uint64_t into, struct pc_parts ours, size_t offset, size_t nbytes) {
    return copy(pid, ours, offset, into, nbytes, false);
}

void pc_allow_copies(void) {
    char scope = '0';
    int fd = open("/proc/sys/kernel/yama/ptrace_scope", O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return;
    if (read(fd, &scope, 1) == 1 && scope == '1')
        prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
    close(fd);
}

bool pc_process_ended(pid_t pid) {
#ifdef SYS_pidfd_open
    int fd = (int)syscall(SYS_pidfd_open, pid, 0);
    if (fd < 0)
        return errno == ESRCH;
    struct pollfd ended = {.fd = fd, .events = POLLIN};
    bool result = poll(&ended, 1, 0) == 1;
    close(fd);
    return result;
#else
    return kill(pid, 0) < 0 && errno == ESRCH;
#endif
}
