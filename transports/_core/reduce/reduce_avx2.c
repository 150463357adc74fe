/* Reductions for processors with AVX2 and F16C. Without FMA: it would round once where others round
   twice. */
#include "reduce_kernels.h"

#ifdef PC_REDUCE_LEVELS
#ifdef __clang__
#include <immintrin.h>
#pragma clang attribute push(__attribute__((target("avx2,f16c,bmi,bmi2"))), apply_to = function)
#else
#pragma GCC target("avx2,f16c,bmi,bmi2")
#include <immintrin.h>
#endif

#define PC_LEVEL(name) name##_avx2
#define PC_VECTOR 32

/* `other`, but `left` where that is a NaN. */
static inline __m256 left_if_nan(__m256 left, __m256 other) {
    return _mm256_blendv_ps(other, left, _mm256_cmp_ps(left, left, _CMP_UNORD_Q));
}

static inline void widen_float16(float *wide, const uint16_t *halves) {
    for (int i = 0; i < PC_STRIP; i += 8)
        _mm256_storeu_ps(wide + i, _mm256_cvtph_ps(_mm_loadu_si128((const void *)(halves + i))));
}

static inline void narrow_float16(uint16_t *halves, const float *wide) {
    for (int i = 0; i < PC_STRIP; i += 8) {
        __m128i rounded = _mm256_cvtps_ph(_mm256_loadu_ps(wide + i), _MM_FROUND_TO_NEAREST_INT);
        _mm_storeu_si128((void *)(halves + i), rounded);
    }
}

/* As in reduce_any.c: first the lower halves of all 32-bit words, then the upper ones. */
static inline void widen_bfloat16(float *wide, const uint16_t *halves) {
    const __m256i upper_half = _mm256_set1_epi32((int)0xffff0000u);
    for (int i = 0; i < PC_STRIP / 2; i += 8) {
        __m256i words = _mm256_loadu_si256((const void *)(halves + 2 * i));
        _mm256_storeu_ps(wide + i, _mm256_castsi256_ps(_mm256_slli_epi32(words, 16)));
        _mm256_storeu_ps(wide + PC_STRIP / 2 + i,
                         _mm256_castsi256_ps(_mm256_and_si256(words, upper_half)));
    }
}

static inline __m256i round_to_bfloat16(const float *at) {
    __m256 wide = _mm256_loadu_ps(at);
    __m256i bits = _mm256_castps_si256(wide);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    __m256 nan = _mm256_cmp_ps(wide, wide, _CMP_UNORD_Q);
    return _mm256_castps_si256(
        _mm256_blendv_ps(_mm256_castsi256_ps(rounded), _mm256_castsi256_ps(quiet), nan));
}

static inline void narrow_bfloat16(uint16_t *halves, const float *wide) {
    for (int i = 0; i < PC_STRIP / 2; i += 8) {
        __m256i lower = _mm256_srli_epi32(round_to_bfloat16(wide + i), 16);
        __m256i upper = round_to_bfloat16(wide + PC_STRIP / 2 + i);
        _mm256_storeu_si256((void *)(halves + 2 * i), _mm256_blend_epi16(lower, upper, 0xaa));
    }
}

#include "reduce_kernels.inc"
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
