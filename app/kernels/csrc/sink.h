/* Rows of activations on their way out of a kernel: as bf16, or quantised into tiles. A kernel hands over one finished row of floats. */
#ifndef ARMATURE_SINK_H
#define ARMATURE_SINK_H

#include "ops.h"
#include "simd.h"

#define MOST_ROW 65536 /* inputs of a row that a kernel keeps on its stack, in floats */
#define TOGETHER (BLOCK < LANES ? BLOCK : LANES) /* codes of one vector that stay together in a tile */

/* Codes of `count` (at most LANES) values; the scale's inverse may not have made any of them exceed 127. */
INLINE vi quantise_lanes(const float *x, float inverse, ptrdiff_t count) {
    vi code = vf_round(vf_load_part(x, count) * inverse);
    return code;
}

/* The group's largest magnitude, as bits: NaN is above infinity and infinity above all numbers. */
INLINE int32_t largest_bits(const float *x, ptrdiff_t size) {
    vi best = vi_all(0);
    for (ptrdiff_t i = 0; i < size; i += LANES) best = vi_max(best, (vi)vf_load_part(x + i, size - i) & 0x7fffffff);
    return vi_largest(best);
}

/* One group of a row: `target` is where its first code goes; each BLOCK codes lie together, blocks `step` bytes apart. */
INLINE void quantise_group(const float *x, ptrdiff_t size, ptrdiff_t padded, int8_t *target, ptrdiff_t step, float *scale, int32_t *sum) {
    union { int32_t bits; float number; } largest = {largest_bits(x, size)};
    const int finite = largest.bits < 0x7f800000, any = finite && largest.number > 1e-35f;
    const float inverse = any ? 127.0f / largest.number : 0.0f;
    *scale = any ? largest.number / 127.0f : finite ? 0.0f : NAN;
    vi total = vi_all(0);
    for (ptrdiff_t i = 0; i < padded; i += LANES) {
        int8_t codes[LANES];
        vi code = any && i < size ? quantise_lanes(x + i, inverse, size - i) : vi_all(0);
        vb narrow = __builtin_convertvector(code, vb);
        total += code;
        memcpy(codes, &narrow, sizeof codes);
        for (ptrdiff_t j = 0; j < LANES && i + j < padded; j += TOGETHER)
            memcpy(target + (i + j) / BLOCK * step + (i + j) % BLOCK, codes + j, TOGETHER);
    }
    int32_t sums = 0;
    for (int i = 0; i < LANES; i++) sums += total[i];
    *sum = -sums;
}

/* One row [size] of `rows` rows. */
INLINE void emit(const sink *out, ptrdiff_t row, ptrdiff_t rows, const float *x, ptrdiff_t size) {
    if (out->rows)
        for (ptrdiff_t i = 0; i < size; i += LANES) bf16_store_part(out->rows + row * size + i, vf_load_part(x + i, size - i), size - i);
    if (!out->tiles) return;
    const ptrdiff_t group = out->group, groups = (size + group - 1) / group, padded = groups * group;
    const ptrdiff_t first = row / out->height * out->height, left = rows - first;
    ptrdiff_t count = left < out->height ? left : out->height;
    count = (count + TILE_ALIGN - 1) / TILE_ALIGN * TILE_ALIGN;
    for (ptrdiff_t g = 0; g < groups; g++) {
        const ptrdiff_t here = size - g * group < group ? size - g * group : group, at = first * groups + g * count + row - first;
        int8_t *target = out->tiles + first * padded + g * group * count + (row - first) * BLOCK;
        quantise_group(x + g * group, here, group, target, count * BLOCK, out->scales + at, out->sums + at);
    }
}

#endif
