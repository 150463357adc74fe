/* What the processor can do, asked of the processor itself.

   `__builtin_cpu_supports` would ask the compiler's own library, and not every compiler brings one
   that answers: with zig's it says no to everything. */
#include "core.h"

#if defined(__x86_64__)
#include <cpuid.h>

/* Which vector registers the system saves and restores (the register XCR0); the instruction needs
   OSXSAVE. */
static uint32_t saved_registers(void) {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

static int ask_processor(void) {
    const unsigned avx2 = bit_BMI | bit_AVX2 | bit_BMI2;
    const unsigned avx512 = bit_AVX512F | bit_AVX512DQ | bit_AVX512BW | bit_AVX512VL;
    const unsigned avx = bit_OSXSAVE | bit_AVX | bit_F16C;
    /* bits of XCR0: SSE, AVX; and the three of AVX-512 */
    const uint32_t saved_avx = 0x06, saved_avx512 = 0xe6;
    unsigned eax, ebx, ecx, edx;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || (ecx & avx) != avx)
        return 0;
    uint32_t saved = saved_registers();
    if ((saved & saved_avx) != saved_avx || !__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) ||
        (ebx & avx2) != avx2)
        return 0;
    return (saved & saved_avx512) == saved_avx512 && (ebx & avx512) == avx512 ? 2 : 1;
}

int pc_processor_level(void) {
    /* the level + 1: asking takes as long as a thousand additions, and more in a guest */
    static _Atomic int known;
    int found = atomic_load_explicit(&known, memory_order_relaxed);
    if (PC_UNLIKELY(found == 0)) {
        found = ask_processor() + 1;
        atomic_store_explicit(&known, found, memory_order_relaxed);
    }
    return found - 1;
}
#else
int pc_processor_level(void) { return 0; }
#endif
