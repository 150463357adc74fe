/* Times copies within one process: see benchmarks/copies. Arguments: bytes, distances. */
#include "base/copy.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define TURNS 60

static void by_memcpy(void *to, void *from, size_t nbytes) { memcpy(to, from, nbytes); }
static void by_core(void *to, void *from, size_t nbytes) { pc_copy(to, from, nbytes); }

static void by_kernel(void *to, void *from, size_t nbytes) {
    struct iovec source = {from, nbytes}, target = {to, nbytes};
    if (process_vm_readv(getpid(), &target, 1, &source, 1, 0) != (ssize_t)nbytes)
        abort();
}

static void by_core_and_kernel(void *to, void *from, size_t nbytes) {
    struct iovec source = {from, nbytes};
    if (pc_copy_from(getpid(), (struct pc_parts){&source, 1}, 0, to, nbytes) != 0)
        abort();
}

static const struct {
    const char *name;
    void (*copy)(void *, void *, size_t);
} WAYS[] = {
    {"memcpy", by_memcpy},
    {"the core, in one process", by_core},
    {"process_vm_readv", by_kernel},
    {"the core, by the kernel", by_core_and_kernel},
};

static double now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return 1e6 * (double)now.tv_sec + 1e-3 * (double)now.tv_nsec;
}

static unsigned char *pages(size_t nbytes) {
    void *memory = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        abort();
    return memset(memory, 1, nbytes);
}

int main(int argc, char **argv) {
    if (argc < 3)
        return 2;
    size_t nbytes = strtoull(argv[1], NULL, 10);
    unsigned char *from = pages(nbytes), *to = pages(nbytes + 4096);
    printf("%-26s", argv[1]);
    for (int index = 2; index < argc; index++)
        printf("%10s", argv[index]);
    printf("\n");
    for (size_t way = 0; way < sizeof WAYS / sizeof *WAYS; way++) {
        printf("%-26s", WAYS[way].name);
        for (int index = 2; index < argc; index++) {
            double best = 1e300;
            for (int turn = 0; turn < TURNS; turn++) {
                double start = now_us();
                WAYS[way].copy(to + strtoull(argv[index], NULL, 10) % 4096, from, nbytes);
                double took = now_us() - start;
                best = took < best ? took : best;
            }
            printf("%10.1f", best);
        }
        printf("\n");
    }
    return 0;
}
