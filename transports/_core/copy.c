#include "copy.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef PR_SET_PTRACER
#define PR_SET_PTRACER 0x59616d61
#endif
#ifndef PR_SET_PTRACER_ANY
#define PR_SET_PTRACER_ANY ((unsigned long)-1)
#endif

/* Parts of a payload in one system call. */
#define PARTS 16

/* Cut [offset, offset + nbytes) out of a payload, as far as `cut` has room; returns the parts, and their bytes. */
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

typedef ssize_t copier(pid_t, const struct iovec *, unsigned long, const struct iovec *, unsigned long, unsigned long);

static int copy(copier *call, pid_t pid, struct pc_parts payload, size_t offset, uint64_t other, size_t nbytes,
                bool payload_is_ours) {
    while (nbytes > 0) {
        struct iovec cut[PARTS], whole;
        size_t length;
        size_t count = cut_out(payload, offset, nbytes, cut, &length);
        if (count == 0)
            return EFAULT;
        whole.iov_base = (void *)(uintptr_t)other;
        whole.iov_len = length;
        ssize_t copied = payload_is_ours ? call(pid, cut, count, &whole, 1, 0) : call(pid, &whole, 1, cut, count, 0);
        if (copied < 0)
            return errno;
        if (copied == 0)
            return EFAULT;
        offset += (size_t)copied;
        other += (uint64_t)copied;
        nbytes -= (size_t)copied;
    }
    return 0;
}

int pc_copy_from(pid_t pid, struct pc_parts theirs, size_t offset, void *into, size_t nbytes) {
    return copy(process_vm_readv, pid, theirs, offset, (uint64_t)(uintptr_t)into, nbytes, false);
}

int pc_copy_to(pid_t pid, uint64_t into, struct pc_parts ours, size_t offset, size_t nbytes) {
    return copy(process_vm_writev, pid, ours, offset, into, nbytes, true);
}

void pc_copy_parts(void *into, struct pc_parts parts, size_t offset, size_t nbytes) {
    unsigned char *to = into;
    while (nbytes > 0) {
        struct iovec cut[PARTS];
        size_t length;
        size_t count = cut_out(parts, offset, nbytes, cut, &length);
        for (size_t index = 0; index < count; index++) {
            memcpy(to, cut[index].iov_base, cut[index].iov_len);
            to += cut[index].iov_len;
        }
        offset += length;
        nbytes -= length;
    }
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
