/* Rows of activations as output of a kernel: bf16, fp32, or quantised into tiles. A kernel passes finished floats, a part
 * of a row at a time. A part is whole groups, with all that share a scale, so that any thread can write it, and small enough
 * to stay in L1 if groups are small. */
#ifndef ARMATURE_SINK_H
#define ARMATURE_SINK_H

#include "ops.h"
#include "simd.h"

#define MOST_GROUP 65536 /* the largest group that a kernel keeps on its stack, in floats */
#define PART 1024        /* values that are finished together if groups are smaller */
#define STRIP 16         /* codes that are computed together; a group has a multiple of 32 */

typedef int8_t strip __attribute__((vector_size(STRIP)));

/* Write `count` values of a row, from column `from` on. */
typedef struct {
    int64_t row, from, count;
} part;

/* a / b of numbers below 2^32: 64-bit division takes three times as long on some processors, and a part of a row
 * needs several. */
INLINE int64_t quotient(int64_t a, int64_t b) { return (uint32_t)a / (uint32_t)b; }

INLINE int64_t part_size(const sink *out) {
    if (!out->tiles) return PART;
    return out->group >= PART ? out->group : quotient(PART, out->group) * out->group;
}

INLINE int64_t parts_of(const sink *out, int64_t size) { return quotient(size + part_size(out) - 1, part_size(out)); }

/* Part `index` of all parts of rows of `size`. */
INLINE part nth_part(const sink *out, int64_t size, int64_t index) {
    const int64_t parts = parts_of(out, size), row = quotient(index, parts), from = (index - row * parts) * part_size(out), left = size - from;
    return (part){row, from, left < part_size(out) ? left : part_size(out)};
}

/* The group's largest magnitude as bits: NaN is above infinity, and infinity above all numbers. */
INLINE int32_t largest_bits(const float *x, int64_t size) {
    vi best = vi_all(0);
    for (int64_t i = 0; i < size; i += LANES) best = vi_max(best, (vi)vf_load(x + i) & 0x7fffffff);
    return vi_largest(best);
}

/* Small integers to bytes. GCC moves them through general registers one by one; use the processor's instructions
 * instead. */
INLINE strip strip_narrowed(const vi *wide) {
    strip codes;
#ifdef NEON_LANES
    const int16x8_t low = vuzp1q_s16((int16x8_t)wide[0], (int16x8_t)wide[1]), high = vuzp1q_s16((int16x8_t)wide[2], (int16x8_t)wide[3]);
    codes = (strip)vuzp1q_s8((int8x16_t)low, (int8x16_t)high);
#elif LANES == 16 && defined(__AVX512F__)
    codes = (strip)_mm512_cvtepi32_epi8((__m512i)wide[0]);
#elif LANES == 8 && defined(__AVX2__) /* the quarters of both come out in the order 0, 2, 1, 3 */
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32((__m256i)wide[0], (__m256i)wide[1]), 0xd8);
    codes = (strip)_mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
#else
#pragma GCC unroll 4
    for (int i = 0; i < STRIP / LANES; i++) {
        const vb narrow = __builtin_convertvector(wide[i], vb);
        memcpy((char *)&codes + i * LANES, &narrow, sizeof narrow);
    }
#endif
    return codes;
}

INLINE strip strip_of(const float *x, float inverse, vi *total) {
    vi codes[STRIP / LANES];
#pragma GCC unroll 4
    for (int i = 0; i < STRIP / LANES; i++) {
        codes[i] = vf_round(vf_load(x + i * LANES) * inverse);
        *total += codes[i];
    }
    return strip_narrowed(codes);
}

/* BLOCK codes at a time, in blocks `step` bytes apart. */
INLINE void strip_store(int8_t *target, int64_t step, strip codes) {
    if (step == BLOCK) memcpy(target, &codes, STRIP);
    else
#pragma GCC unroll 4
        for (int i = 0; i < STRIP; i += BLOCK) memcpy(target + i / BLOCK * step, (const char *)&codes + i, BLOCK);
}

/* Quantise one group of a row, with the scale of the magnitude `most` (as bits); x may be overwritten. */
INLINE void quantise_group(int32_t most, float *x, int64_t group, int8_t *target, int64_t step, float *scale, int32_t *sum) {
    union { int32_t bits; float number; } largest = {most};
    const int finite = largest.bits < 0x7f800000, any = finite && largest.number > 1e-35f;
    const float inverse = any ? 127.0f / largest.number : 0.0f;
    if (!finite) memset(x, 0, (size_t)group * sizeof *x);
    *scale = any ? largest.number / 127.0f : finite ? 0.0f : NAN;
    vi total = vi_all(0);
    for (int64_t i = 0; i < group; i += STRIP) strip_store(target + i / BLOCK * step, step, strip_of(x + i, inverse, &total));
    *sum = -vi_sum(total);
}

/* ops.h has the position of the codes of a row's group. */
INLINE void emit_groups(const sink *out, int64_t rows, int64_t size, part p, float *x) {
    const int64_t group = out->group, groups = quotient(size + group - 1, group), last = quotient(p.count + group - 1, group);
    const int64_t first = quotient(p.row, out->height) * out->height, left = rows - first, within = p.row - first;
    int64_t count = left < out->height ? left : out->height;
    count = (count + TILE_ALIGN - 1) / TILE_ALIGN * TILE_ALIGN;
    memset(x + p.count, 0, (size_t)(last * group - p.count) * sizeof *x);
    int32_t most = 0;
    for (int64_t i = 0, g = quotient(p.from, group); i < last; i++, g++) {
        if ((i & (out->shared - 1)) == 0) most = largest_bits(x + i * group, (last - i < out->shared ? last - i : out->shared) * group);
        const int64_t at = first * groups + g * count + within;
        int8_t *target = out->tiles + first * groups * group + g * group * count + within * BLOCK;
        if (count == 1) quantise_group(most, x + i * group, group, target, BLOCK, out->scales + at, out->sums + at); /* codes are adjacent */
        else quantise_group(most, x + i * group, group, target, count * BLOCK, out->scales + at, out->sums + at);
    }
}

/* Finish part p of `rows` rows of `size`, if requested. x has capacity for MOST_GROUP values and may be overwritten. */
INLINE void emit(const sink *out, int64_t rows, int64_t size, part p, float *x) {
    if (out->tiles) emit_groups(out, rows, size, p, x);
    else if (out->rows)
        for (int64_t i = 0; i < p.count; i += LANES) bf16_store_part(out->rows + p.row * size + p.from + i, vf_load(x + i), p.count - i);
    else if (out->wide) memcpy(out->wide + p.row * size + p.from, x, (size_t)p.count * sizeof *x);
}

#endif
