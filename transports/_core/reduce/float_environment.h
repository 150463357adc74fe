/* The floating-point environment of a thread, which decides what a sum of floats is: how it is
   rounded, whether numbers below the smallest normal one (subnormals) count as zero, and whether a
   NaN is a trap.

   A program changes it, or a library that it has loaded, on one rank and not on another; and a new
   thread has that of the thread that made it. Ranks that combine the same values would get other
   bits. So what the core computes with floats it computes in the default environment, and then puts
   the caller's back. Mostly the two are the same, which costs a read and a comparison.

   What is computed must be in a function of its own that is not inlined: to a compiler arithmetic
   has nothing to do with the register, and may move across the instructions that set it. */
#ifndef PC_FLOAT_ENVIRONMENT_H
#define PC_FLOAT_ENVIRONMENT_H

#include "base/core.h"

#if defined(__x86_64__)
/* MXCSR: round to nearest, subnormals are numbers, nothing traps. Its lowest six bits are no part
   of that: they tell what has happened. */
#define PC_DEFAULT_FLOATS ((uint64_t)0x1f80)
#define PC_FLOAT_CONTROL ((uint64_t)0xffc0)

static inline uint64_t pc_read_float_control(void) {
    uint32_t control;
    __asm__ volatile("stmxcsr %0" : "=m"(control) : : "memory");
    return control;
}
static inline void pc_write_float_control(uint64_t value) {
    uint32_t control = (uint32_t)value;
    __asm__ volatile("ldmxcsr %0" : : "m"(control) : "memory");
}
#elif defined(__aarch64__)
/* FPCR, in which 0 stands for the same. Its flags have a register of their own. */
#define PC_DEFAULT_FLOATS ((uint64_t)0)
#define PC_FLOAT_CONTROL (~(uint64_t)0)

static inline uint64_t pc_read_float_control(void) {
    uint64_t control;
    __asm__ volatile("mrs %0, fpcr" : "=r"(control) : : "memory");
    return control;
}
static inline void pc_write_float_control(uint64_t control) {
    __asm__ volatile("msr fpcr, %0" : : "r"(control) : "memory");
}
#else
#error "pycoll does not know the floating-point environment of this processor"
#endif

/* Enter an environment. Returns the caller's, for pc_leave_floats. */
static inline uint64_t pc_enter_floats(uint64_t control) {
    uint64_t callers = pc_read_float_control();
    if (PC_UNLIKELY((callers ^ control) & PC_FLOAT_CONTROL))
        pc_write_float_control(control);
    return callers;
}

/* Leave the environment `control` for the caller's. */
static inline void pc_leave_floats(uint64_t control, uint64_t callers) {
    if (PC_UNLIKELY((callers ^ control) & PC_FLOAT_CONTROL))
        pc_write_float_control(callers);
}

static inline uint64_t pc_enter_default_floats(void) {
    return pc_enter_floats(PC_DEFAULT_FLOATS);
}

static inline void pc_leave_default_floats(uint64_t callers) {
    pc_leave_floats(PC_DEFAULT_FLOATS, callers);
}

#endif
