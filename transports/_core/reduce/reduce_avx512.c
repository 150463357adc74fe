/* Reductions for processors with AVX-512 (F, BW, DQ, VL). Its own conversion to bfloat16 drops
   denormals. */
#include "reduce_kernels.h"

#ifdef PC_REDUCE_LEVELS
#ifdef __clang__
#include <immintrin.h>
#pragma clang attribute push(                                                         \
    __attribute__((target("avx2,f16c,bmi,bmi2,avx512f,avx512bw,avx512dq,avx512vl"))), \
    apply_to = function)
#else
#pragma GCC target("avx2,f16c,bmi,bmi2,avx512f,avx512bw,avx512dq,avx512vl")
#include <immintrin.h>
#endif

#define PC_LEVEL(name) name##_avx512
#define PC_VECTOR 64

/* `other`, but `left` where that is a NaN. */
static inline __m512 left_if_nan(__m512 left, __m512 other) {
    return _mm512_mask_mov_ps(other, _mm512_cmp_ps_mask(left, left, _CMP_UNORD_Q), left);
}

static inline void widen_float16(float *wide, const uint16_t *halves) {
    for (int i = 0; i < PC_STRIP; i += 16)
        _mm512_storeu_ps(wide + i, _mm512_cvtph_ps(_mm256_loadu_si256((const void *)(halves + i))));
}

static inline void narrow_float16(uint16_t *halves, const float *wide) {
    for (int i = 0; i < PC_STRIP; i += 16) {
        __m256i rounded = _mm512_cvtps_ph(_mm512_loadu_ps(wide + i), _MM_FROUND_TO_NEAREST_INT);
        _mm256_storeu_si256((void *)(halves + i), rounded);
    }
}

/* As in reduce_any.c: first the lower halves of all 32-bit words, then the upper ones. */
static inline void widen_bfloat16(float *wide, const uint16_t *halves) {
    const __m512i upper_half = _mm512_set1_epi32((int)0xffff0000u);
    for (int i = 0; i < PC_STRIP / 2; i += 16) {
        __m512i words = _mm512_loadu_si512(halves + 2 * i);
        _mm512_storeu_ps(wide + i, _mm512_castsi512_ps(_mm512_slli_epi32(words, 16)));
        _mm512_storeu_ps(wide + PC_STRIP / 2 + i,
                         _mm512_castsi512_ps(_mm512_and_si512(words, upper_half)));
    }
}

static inline __m512i round_to_bfloat16(const float *at) {
    __m512 wide = _mm512_loadu_ps(at);
    __m512i bits = _mm512_castps_si512(wide);
    __mmask16 odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000));
    __mmask16 nan = _mm512_cmp_ps_mask(wide, wide, _CMP_UNORD_Q);
    __m512i rounded = _mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff));
    rounded = _mm512_mask_add_epi32(rounded, odd, rounded, _mm512_set1_epi32(1));
    return _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
}

static inline void narrow_bfloat16(uint16_t *halves, const float *wide) {
    for (int i = 0; i < PC_STRIP / 2; i += 16) {
        __m512i lower = _mm512_srli_epi32(round_to_bfloat16(wide + i), 16);
        __m512i upper = round_to_bfloat16(wide + PC_STRIP / 2 + i);
        _mm512_storeu_si512(halves + 2 * i, _mm512_mask_blend_epi16(0xaaaaaaaau, lower, upper));
    }
}

#include "reduce_kernels.inc"
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
