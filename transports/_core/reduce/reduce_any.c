/* Reductions for any processor: conversion of 16-bit floats by integer arithmetic, that compilers
   vectorize. */
#include "reduce_kernels.h"

#define PC_LEVEL(name) name##_any

/* Branches would keep the loops below from being vectorized. */
static inline uint32_t choose(int condition, uint32_t yes, uint32_t no) {
    uint32_t mask = -(uint32_t)condition;
    return (yes & mask) | (no & ~mask);
}

static inline void widen_float16(float *wide, const uint16_t *halves) {
    for (int i = 0; i < PC_STRIP; i++) {
        uint32_t rest = (uint32_t)(halves[i] & 0x7fff) << 13, exponent = rest & (0x1fu << 23);
        uint32_t normal = rest + ((127u - 15) << 23);
        /* A subnormal is the fraction of a number with the smallest exponent, less the implied
           one. */
        uint32_t small = pc_bits_of(pc_float_of(normal + (1u << 23)) - 0x1p-14f);
        uint32_t special = normal + ((128u - 16) << 23);
        uint32_t bits =
            choose(exponent == 0, small, choose(exponent == (0x1fu << 23), special, normal));
        wide[i] = pc_float_of(bits | (uint32_t)(halves[i] & 0x8000) << 16);
    }
}

static inline void narrow_float16(uint16_t *halves, const float *wide) {
    for (int i = 0; i < PC_STRIP; i++) {
        uint32_t sign = pc_bits_of(wide[i]) & 0x80000000u;
        int32_t rest = (int32_t)(pc_bits_of(wide[i]) ^ sign); /* signed: SSE2 compares no others */
        /* The sum with 0.5, whose last bit is worth 2^-24, rounds as a subnormal is rounded. */
        uint32_t small = pc_bits_of(pc_float_of((uint32_t)rest) + 0.5f) - 0x3f000000u;
        uint32_t normal = (uint32_t)(rest - ((127 - 15) << 23) + 0xfff + ((rest >> 13) & 1)) >> 13;
        uint32_t special =
            choose(rest > 0x7f800000, 0x7e00 | ((uint32_t)(rest >> 13) & 0x3ff), 0x7c00);
        uint32_t finite = choose(rest < ((127 - 14) << 23), small, normal);
        halves[i] = (uint16_t)(choose(rest >= ((127 + 16) << 23), special, finite) | sign >> 16);
    }
}

/* bfloat16 are the upper halves of float32. Two of them are one 32-bit word; in a strip the lower
   halves of all words come first, then the upper ones, so that none ever changes its lane. */
static inline void widen_bfloat16(float *wide, const uint16_t *halves) {
    uint32_t words[PC_STRIP / 2];
    memcpy(words, halves, sizeof words);
    for (int i = 0; i < PC_STRIP / 2; i++) {
        wide[i] = pc_float_of(words[i] << 16);
        wide[PC_STRIP / 2 + i] = pc_float_of(words[i] & 0xffff0000u);
    }
}

/* To nearest even in the upper half; what is left in the lower one is to be dropped. */
static inline uint32_t round_to_bfloat16(float wide) {
    uint32_t bits = pc_bits_of(wide);
    /* The carry moves on to the exponent, and to infinity, as it should. A NaN must not carry. */
    return choose(wide != wide, bits | 0x400000, bits + 0x7fff + ((bits >> 16) & 1));
}

static inline void narrow_bfloat16(uint16_t *halves, const float *wide) {
    uint32_t words[PC_STRIP / 2];
    for (int i = 0; i < PC_STRIP / 2; i++) {
        uint32_t lower = round_to_bfloat16(wide[i]),
                 upper = round_to_bfloat16(wide[PC_STRIP / 2 + i]);
        words[i] = lower >> 16 | (upper & 0xffff0000u);
    }
    memcpy(halves, words, sizeof words);
}

#include "reduce_kernels.inc"
