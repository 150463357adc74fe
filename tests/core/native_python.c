/* The hooks of native_hooks.h, a lock as the interpreter has one, and the functions of
   stub/Python.h. */
#include "native.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <unistd.h>

_Thread_local uint64_t native_seed = 1;
_Thread_local bool native_impatient;
_Thread_local struct native_tally native_tally;
static _Thread_local bool has_lock = true;
static _Thread_local uint64_t runaway_ns;

PyObject stub_none;
PyObject *PyExc_OSError;

void native_fail(const char *format, ...) {
    va_list args;
    va_start(args, format);
    vdprintf(STDERR_FILENO, format, args);
    va_end(args);
    _exit(3); /* at once: the other threads are still at it */
}

/* --- chance and delays ------------------------------------------------------------------------ */

uint64_t native_random(uint64_t *seed) {
    uint64_t x = *seed += 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

void native_delay(void) {
    uint64_t chance = native_random(&native_seed);
    if (chance % 32 == 0)
        sched_yield();
    if (chance % 256 == 1)
        for (uint64_t spins = chance >> 32 & 1023; spins > 0; spins--)
            pc_relax();
    if (chance % 32768 == 2)
        usleep(3000); /* longer than a rank waits before it sleeps */
}

void *hook_memcpy(void *to, const void *from, size_t nbytes) {
    size_t half = nbytes / 2;
    native_tally.copied += nbytes;
    memmove(to, from, half);
    native_delay();
    memmove((char *)to + half, (const char *)from + half, nbytes - half);
    return to;
}

int hook_yield(void) { return native_impatient ? 0 : sched_yield(); }

int hook_clock(struct timespec *now) {
    int status = clock_gettime(CLOCK_MONOTONIC, now);
    if (native_impatient) {
        runaway_ns += 10000000;
        now->tv_sec += (time_t)(runaway_ns / 1000000000);
    }
    return status;
}

static void tell_kernel_copy(const struct iovec *remote) {
    native_tally.kernel_calls++;
    native_tally.kernel_copied += remote->iov_len;
}

ssize_t hook_readv(int pid, const struct iovec *local, unsigned long count,
                   const struct iovec *remote) {
    native_delay();
    tell_kernel_copy(remote);
#ifdef __SANITIZE_THREAD__
    (void)pid;
    size_t copied = 0;
    for (; count > 0; count--, local++) {
        hook_memcpy(local->iov_base, (const char *)remote->iov_base + copied, local->iov_len);
        copied += local->iov_len;
    }
    return (ssize_t)copied;
#else
    return process_vm_readv(pid, local, count, remote, 1, 0);
#endif
}

ssize_t hook_writev(int pid, const struct iovec *local, unsigned long count,
                    const struct iovec *remote) {
    native_delay();
    if (native_random(&native_seed) % 8 == 0) {
        errno = EFAULT;
        return -1;
    }
    tell_kernel_copy(remote);
#ifdef __SANITIZE_THREAD__
    (void)pid;
    size_t copied = 0;
    for (; count > 0; count--, local++) {
        hook_memcpy((char *)remote->iov_base + copied, local->iov_base, local->iov_len);
        copied += local->iov_len;
    }
    return (ssize_t)copied;
#else
    return process_vm_writev(pid, local, count, remote, 1, 0);
#endif
}

/* --- Python ----------------------------------------------------------------------------------- */

bool native_has_lock(void) { return has_lock; }

static void *leave(void) {
    if (!has_lock)
        native_fail("the lock was given up twice\n");
    has_lock = false;
    return &has_lock;
}

static void enter(void *left) {
    if (has_lock || left != &has_lock)
        native_fail("the lock was taken twice, or by another thread\n");
    has_lock = true;
}

static void identify(const pc_call *call, int peer, struct pc_noted_wait *wait) {
    (void)call;
    wait->ident = wait->number = 1;
    wait->peer = (uint32_t)peer;
}

const struct pc_call_up native_up = {native_sleep, identify, leave, enter};

PyObject *PyErr_SetFromErrno(PyObject *type) {
    (void)type;
    native_fail("an exception%s: %s\n", has_lock ? "" : ", without the lock", strerror(errno));
}

PyObject *PyErr_NoMemory(void) { native_fail("no memory\n"); }

/* For "in" alone: an int and a Py_ssize_t, from an array of two. */
int PyArg_ParseTuple(PyObject *args, const char *format, ...) {
    const Py_ssize_t *values = (const Py_ssize_t *)args;
    va_list results;
    if (strcmp(format, "in") != 0)
        native_fail("PyArg_ParseTuple(\"%s\")\n", format);
    va_start(results, format);
    *va_arg(results, int *) = (int)values[0];
    *va_arg(results, Py_ssize_t *) = values[1];
    va_end(results);
    return 1;
}
