/* How fast processes can exchange blocks by copies alone: see benchmarks/exchange_limit.
   Arguments: processes, bytes of a block, calls. Prints the median microseconds of a call in which
   each process copies its own block and reads one of every other's memory by process_vm_readv, and
   of one in which it copies all out of shared memory. */
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MOST 64
#define LINE 64

enum { BY_KERNEL, SHARED, WAYS };

struct process {
    _Alignas(LINE) _Atomic uint64_t reached; /* the last barrier */
    pid_t pid;
    unsigned char *given; /* its blocks, by who is to have them, in its own memory */
};

static struct process *all;
static int size, me;
static size_t nbytes;
static uint64_t barriers;

static void stop(const char *what) {
    perror(what);
    exit(1);
}

static unsigned char *pages(size_t count, int sharing) {
    void *memory = mmap(NULL, count, PROT_READ | PROT_WRITE, sharing | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        stop("mmap");
    return memory;
}

/* With more processes than cores they give their core away, as pycoll's ranks do. */
static void barrier(int yields) {
    atomic_store(&all[me].reached, ++barriers);
    for (int other = 0; other < size; other++)
        while (atomic_load(&all[other].reached) < barriers)
            if (yields)
                sched_yield();
}

/* Each process copies its own block; then in each step every one reads of another one. */
static void exchange(int way, unsigned char *shared, unsigned char *to) {
    const unsigned char *own = all[me].given;
    if (way == SHARED)
        own = shared + (size_t)me * (size_t)size * nbytes;
    memcpy(to + (size_t)me * nbytes, own + (size_t)me * nbytes, nbytes);
    for (int step = 1; step < size; step++) {
        int from = (me + step) % size;
        unsigned char *into = to + (size_t)from * nbytes;
        if (way == SHARED) {
            memcpy(into, shared + ((size_t)from * (size_t)size + (size_t)me) * nbytes, nbytes);
            continue;
        }
        struct iovec here = {into, nbytes}, there = {all[from].given + (size_t)me * nbytes, nbytes};
        if (process_vm_readv(all[from].pid, &here, 1, &there, 1, 0) != (ssize_t)nbytes)
            stop("process_vm_readv");
    }
}

static double now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return 1e6 * (double)now.tv_sec + 1e-3 * (double)now.tv_nsec;
}

static int by_size(const void *left, const void *right) {
    double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

int main(int argc, char **argv) {
    if (argc != 4 || atoi(argv[1]) < 2 || atoi(argv[1]) > MOST || atoi(argv[3]) < 1)
        return 2;
    size = atoi(argv[1]);
    nbytes = strtoull(argv[2], NULL, 10);
    int calls = atoi(argv[3]);
    cpu_set_t cores, mine;
    if (sched_getaffinity(0, sizeof cores, &cores) < 0)
        stop("sched_getaffinity");
    int yields = CPU_COUNT(&cores) < size;
    size_t own = (size_t)size * nbytes;
    all = (struct process *)pages(MOST * sizeof *all, MAP_SHARED);
    unsigned char *shared = pages(own * (size_t)size, MAP_SHARED);
    unsigned char *shared_result = pages(own * (size_t)size, MAP_SHARED);
    for (int rank = 1; rank < size && me == 0; rank++) {
        pid_t child = fork();
        if (child < 0)
            stop("fork");
        if (child == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            me = rank;
        }
    }
    CPU_ZERO(&mine);
    for (int core = 0, index = 0; core < CPU_SETSIZE; core++)
        if (CPU_ISSET(core, &cores) && index++ == me % CPU_COUNT(&cores))
            CPU_SET(core, &mine);
    if (sched_setaffinity(0, sizeof mine, &mine) < 0)
        stop("sched_setaffinity");
    all[me].pid = getpid();
    all[me].given = memset(pages(own, MAP_PRIVATE), me, own);
    unsigned char *result = memset(pages(own, MAP_PRIVATE), 0, own);
    memset(shared + (size_t)me * own, me, own);
    memset(shared_result + (size_t)me * own, 0, own);
    double *times = malloc((size_t)calls * sizeof *times);
    if (times == NULL)
        stop("malloc");
    for (int way = 0; way < WAYS; way++) {
        for (int call = 0; call < calls; call++) {
            barrier(yields);
            double began = now_us();
            exchange(way, shared, way == SHARED ? shared_result + (size_t)me * own : result);
            barrier(yields);
            times[call] = now_us() - began;
        }
        qsort(times, (size_t)calls, sizeof *times, by_size);
        if (me == 0)
            printf("%.1f\n", times[calls / 2]);
    }
    if (me != 0)
        return 0;
    int failed = 0, status;
    while (wait(&status) > 0)
        failed |= status;
    return failed != 0;
}
