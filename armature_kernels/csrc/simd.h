/* Vectors of LANES floats in the compiler's vector types, so that one source serves every instruction set: each level
 * defines its register width and includes this. Only operations without a compiler operator are here; integer
 * products are in tile_*.h. */
#ifndef ARMATURE_SIMD_H
#define ARMATURE_SIMD_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#if defined(__aarch64__) && LANES == 4
#define NEON_LANES /* GCC widens and narrows bytes through general registers one by one; use NEON's instructions instead */
#include <arm_neon.h>
#endif

/* Whether the level multiplies pairs of bf16 and adds both products to an fp32. */
#if defined(__AVX512BF16__) || (defined(NEON_LANES) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC))
#define BF16_UNITS 1
#else
#define BF16_UNITS 0
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(LANES * 4)));
typedef int32_t vi __attribute__((vector_size(LANES * 4)));
typedef uint32_t vu __attribute__((vector_size(LANES * 4)));
typedef uint16_t vh __attribute__((vector_size(LANES * 2)));
typedef int8_t vb __attribute__((vector_size(LANES)));

INLINE vf vf_all(float x) { return x - (vf){0}; } /* x + 0 would be an addition, since -0 becomes 0 */
INLINE vi vi_all(int32_t x) { return (vi){0} + x; }

INLINE vf vf_load(const float *p) {
    vf x;
    memcpy(&x, p, sizeof x);
    return x;
}

INLINE void vf_store(float *p, vf x) { memcpy(p, &x, sizeof x); }

/* The first `count` lanes; the others are zero. */
INLINE vf vf_load_part(const float *p, ptrdiff_t count) {
    if (count >= LANES) return vf_load(p);
    vf x = {0};
    memcpy(&x, p, (size_t)count * 4);
    return x;
}

/* A copy of constant size is one store; of any other size a call. */
INLINE void vf_store_part(float *p, vf x, ptrdiff_t count) {
    if (count >= LANES) vf_store(p, x);
    else memcpy(p, &x, (size_t)count * 4);
}

INLINE vf vf_select(vi mask, vf yes, vf no) { return (vf)(((vi)yes & mask) | ((vi)no & ~mask)); }
/* True if any bit of any lane is set. */
INLINE int any_lane(vi x) {
#if LANES == 16 && defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)x, (__m512i)x) != 0;
#elif LANES == 8 && defined(__AVX2__)
    return !_mm256_testz_si256((__m256i)x, (__m256i)x);
#else
    uint64_t words[LANES / 2], any = 0;
    memcpy(words, &x, sizeof words);
    for (int i = 0; i < LANES / 2; i++) any |= words[i];
    return any != 0;
#endif
}

/* x86 has an instruction for each of these three, which the compiler does not recognise. */
INLINE vi vi_max(vi a, vi b) {
#if LANES == 16 && defined(__AVX512F__)
    return (vi)_mm512_max_epi32((__m512i)a, (__m512i)b);
#elif LANES == 8 && defined(__AVX2__)
    return (vi)_mm256_max_epi32((__m256i)a, (__m256i)b);
#else
    vi mask = a > b;
    return (a & mask) | (b & ~mask);
#endif
}

/* b where either is NaN */
INLINE vf vf_max(vf a, vf b) {
#if LANES == 16 && defined(__AVX512F__)
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif LANES == 8 && defined(__AVX2__)
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return vf_select(a > b, a, b);
#endif
}

/* b if either is NaN */
INLINE vf vf_min(vf a, vf b) {
#if LANES == 16 && defined(__AVX512F__)
    return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#elif LANES == 8 && defined(__AVX2__)
    return (vf)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return vf_select(a < b, a, b);
#endif
}

typedef int32_t quarter __attribute__((vector_size(16)));

INLINE quarter vi_quarter(vi x, int i) {
    quarter part;
    memcpy(&part, (const char *)&x + i * 16, sizeof part);
    return part;
}

typedef float float_quarter __attribute__((vector_size(16)));

INLINE float_quarter vf_quarter(vf x, int i) { return (float_quarter)vi_quarter((vi)x, i); }

/* Add halves until one lane is left. */
INLINE float vf_sum(vf x) {
#if LANES == 16
    const float_quarter four = (vf_quarter(x, 0) + vf_quarter(x, 2)) + (vf_quarter(x, 1) + vf_quarter(x, 3));
#elif LANES == 8
    const float_quarter four = vf_quarter(x, 0) + vf_quarter(x, 1);
#else
    const float_quarter four = x;
#endif
    return (four[0] + four[2]) + (four[1] + four[3]);
}

/* For numbers and infinities. */
INLINE float vf_largest(vf x) {
    float_quarter best = vf_quarter(x, 0);
    for (int i = 1; i < LANES / 4; i++) {
        const float_quarter other = vf_quarter(x, i);
        const quarter mask = best > other;
        best = (float_quarter)(((quarter)best & mask) | ((quarter)other & ~mask));
    }
    const float a = best[0] > best[1] ? best[0] : best[1], b = best[2] > best[3] ? best[2] : best[3];
    return a > b ? a : b;
}

INLINE quarter quarter_max(quarter a, quarter b) {
#if LANES >= 8 && defined(__AVX2__)
    return (quarter)_mm_max_epi32((__m128i)a, (__m128i)b);
#else
    const quarter mask = a > b;
    return (a & mask) | (b & ~mask);
#endif
}

INLINE int32_t vi_largest(vi x) {
    quarter best = vi_quarter(x, 0);
    for (int i = 1; i < LANES / 4; i++) best = quarter_max(best, vi_quarter(x, i));
    const int32_t a = best[0] > best[1] ? best[0] : best[1], b = best[2] > best[3] ? best[2] : best[3];
    return a > b ? a : b;
}

INLINE int32_t vi_sum(vi x) {
    quarter sum = vi_quarter(x, 0);
    for (int i = 1; i < LANES / 4; i++) sum += vi_quarter(x, i);
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

#ifdef __clang__
#define SHUFFLE4(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE4(a, b, ...) __builtin_shuffle(a, b, (quarter){__VA_ARGS__})
#endif

/* Transpose four 32-bit elements of four rows that are `bytes` apart: element u of row r goes to to[u * stride + r],
 * for u < 4 and u < count. */
INLINE void turn_four(const void *from, ptrdiff_t bytes, int64_t count, uint32_t *to, ptrdiff_t stride) {
    quarter x[4];
    for (int r = 0; r < 4; r++) memcpy(&x[r], (const char *)from + r * bytes, sizeof x[r]);
    const quarter low01 = SHUFFLE4(x[0], x[1], 0, 4, 1, 5), high01 = SHUFFLE4(x[0], x[1], 2, 6, 3, 7);
    const quarter low23 = SHUFFLE4(x[2], x[3], 0, 4, 1, 5), high23 = SHUFFLE4(x[2], x[3], 2, 6, 3, 7);
    const quarter columns[4] = {
        SHUFFLE4(low01, low23, 0, 1, 4, 5), SHUFFLE4(low01, low23, 2, 3, 6, 7), SHUFFLE4(high01, high23, 0, 1, 4, 5), SHUFFLE4(high01, high23, 2, 3, 6, 7)};
    for (int u = 0; u < 4 && u < count; u++) memcpy(to + u * stride, &columns[u], sizeof columns[u]);
}

/* Separate a product from the sum that follows: the compiler may otherwise fuse both, which rounds once instead of
 * twice. */
INLINE vf unfused(vf x) {
#if defined(__x86_64__) && LANES == 16
    __asm__("" : "+v"(x));
#elif defined(__x86_64__)
    __asm__("" : "+x"(x));
#elif defined(__aarch64__)
    __asm__("" : "+w"(x));
#endif
    return x;
}

/* Round to the nearest integer, ties to even; |x| < 2^22. */
INLINE vi vf_round(vf x) {
    const vf magic = vf_all(12582912.0f); /* 1.5 * 2^23 */
    return (vi)(unfused(x) + magic) - (vi)magic;
}

/* ---- bf16 ---- */

INLINE vf bf16_load(const uint16_t *p) {
    vh x;
    memcpy(&x, p, sizeof x);
#if LANES == 16 && defined(__AVX512F__) /* the compiler widens halves separately and joins them */
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)x), 16);
#else
    return (vf)(__builtin_convertvector(x, vu) << 16);
#endif
}

INLINE vf bf16_load_part(const uint16_t *p, ptrdiff_t count) {
    if (count >= LANES) return bf16_load(p);
    uint16_t part[LANES] = {0};
    memcpy(part, p, (size_t)count * 2);
    return bf16_load(part);
}

/* Round to nearest, ties to even; NaN stays NaN. */
INLINE vh bf16_of(vf x) {
    vu bits = (vu)x, odd = (bits >> 16) & 1, rounded = (bits + 0x7fff + odd) >> 16, nan = (vu)(x != x);
    return __builtin_convertvector((nan & ((bits >> 16) | 0x40)) | (~nan & rounded), vh);
}

INLINE void bf16_store(uint16_t *p, vf x) {
    vh h = bf16_of(x);
    memcpy(p, &h, sizeof h);
}

INLINE void bf16_store_part(uint16_t *p, vf x, ptrdiff_t count) {
    vh h = bf16_of(x);
    if (count >= LANES) memcpy(p, &h, sizeof h);
    else memcpy(p, &h, (size_t)count * 2);
}

/* Part of a row from element i on, of which `left` remain: fp32 if `wide`, else bf16. */
INLINE vf row_load_part(int64_t wide, const void *row, ptrdiff_t i, ptrdiff_t left) {
    return wide ? vf_load_part((const float *)row + i, left) : bf16_load_part((const uint16_t *)row + i, left);
}

INLINE void row_store_part(int64_t wide, void *row, ptrdiff_t i, vf x, ptrdiff_t left) {
    if (wide) vf_store_part((float *)row + i, x, left);
    else bf16_store_part((uint16_t *)row + i, x, left);
}

/* The address of element i of such a row. */
INLINE void *element_of(int64_t wide, const void *row, ptrdiff_t i) { return (char *)row + i * (wide ? 4 : 2); }

#if BF16_UNITS
/* sum + the two products of each pair */
INLINE vf add_pairs(vf sum, vf a, vf b) {
#ifdef __AVX512BF16__
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
    return (vf)vbfdotq_f32((float32x4_t)sum, vreinterpretq_bf16_f32((float32x4_t)a), vreinterpretq_bf16_f32((float32x4_t)b));
#endif
}
#endif

/* ---- bytes ---- */

/* 2 * LANES signed bytes as floats. */
INLINE void bytes_load(const void *p, vf *x) {
#ifdef NEON_LANES
    const int16x8_t wide = vmovl_s8(vld1_s8(p));
    x[0] = (vf)vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide))), x[1] = (vf)vcvtq_f32_s32(vmovl_high_s16(wide));
#elif defined(__AVX512F__) && LANES == 16 /* GCC splits convertvector of bytes into single elements */
    for (int i = 0; i < 2; i++) x[i] = (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p + i)));
#elif defined(__AVX2__) && LANES == 8
    for (int i = 0; i < 2; i++) x[i] = (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)((const char *)p + 8 * i))));
#else
    vb codes[2];
    memcpy(codes, p, sizeof codes);
    for (int i = 0; i < 2; i++) x[i] = __builtin_convertvector(__builtin_convertvector(codes[i], vi), vf);
#endif
}

#include "functions.h"

#endif
