/* What every file of the core needs: sizes, atomics, and how a processor waits politely. Plain C:
   what Python calls includes py.h, too. */
#ifndef PC_CORE_H
#define PC_CORE_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

/* Bytes that processors move between their caches as one. */
#define PC_LINE 64
#define PC_PAGE 4096
#define PC_HUGE_PAGE ((size_t)2 << 20)

#define PC_LIKELY(condition) __builtin_expect(!!(condition), 1)
#define PC_UNLIKELY(condition) __builtin_expect(!!(condition), 0)
#define PC_HOT __attribute__((hot))
#define PC_COLD __attribute__((cold, noinline))

typedef _Atomic uint64_t pc_flag64;
typedef _Atomic uint32_t pc_flag32;

/* A flag is read with sequential consistency, which on x86-64 and Arm is no dearer than acquire,
   and set by an exchange: a rank that announces its sleep and looks at the flag once more cannot
   miss it. */
static inline uint64_t pc_load(pc_flag64 *flag) {
    return atomic_load_explicit(flag, memory_order_seq_cst);
}
static inline void pc_publish(pc_flag64 *flag, uint64_t value) {
    (void)atomic_exchange_explicit(flag, value, memory_order_seq_cst);
}

static inline void pc_relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("isb" ::: "memory");
#endif
}

static inline uint64_t pc_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* The vector instructions that this processor has, and the system lets it use: 0 none that the core
   knows of, 1 AVX2, F16C, BMI and BMI2, 2 also AVX-512 (F, BW, DQ, VL). */
int pc_processor_level(void);

/* In place of a time: there is none. */
#define PC_FOR_EVER UINT64_MAX

static inline uint64_t pc_time_after(uint64_t now_ns, uint64_t ns) {
    return ns < PC_FOR_EVER - now_ns ? now_ns + ns : PC_FOR_EVER;
}

static inline size_t pc_round_up(size_t value, size_t to) { return (value + to - 1) / to * to; }

#endif
