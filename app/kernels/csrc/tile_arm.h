/* Shared by the tiles of all Arm levels: a panel's groups one after the other, and the outputs of a group some
 * *quads* (of four) at a time, so that all sums of a group stay in the 32 registers. The level multiplies a group
 * (tile_i8mm.h, tile_dotprod.h, tile_neon.h).
 *
 * The order of a row's fp32 operations does not depend on the number of rows in the tile, so a row has the same bits
 * in any batch. */
#ifndef ARMATURE_TILE_ARM_H
#define ARMATURE_TILE_ARM_H

#include <arm_neon.h>

#include "linear_int.h"

#define QUADS (PANEL_OUTPUTS / 4)

/* One group of a panel and of a tile. `ahead`: the address to prefetch for each byte of `codes`, or NULL. */
typedef struct {
    const uint8_t *header, *codes, *ahead;
    const int8_t *x;
    const float *scales;
    const int32_t *negated;
    int64_t inputs;
} group_of;

/* Add the outputs of quads [first, first + quads), times both scales, to `sums`. `rows`, `quads`, `bits` and
 * `minimums` are constants at every call. */
INLINE void multiply_group(int rows, int quads, int bits, int minimums, const group_of *g, int first, float *sums);

/* Four bf16 numbers. */
INLINE float32x4_t widen4(const uint8_t *p) { return vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(p)), 16)); }

INLINE int8x16_t low_codes(uint8x16_t line) { return vreinterpretq_s8_u8(vandq_u8(line, vdupq_n_u8(15))); }
INLINE int8x16_t high_codes(uint8x16_t line) { return vreinterpretq_s8_u8(vshrq_n_u8(line, 4)); }

/* Prefetch the whole cache lines of `bytes` bytes. */
INLINE void ask(const uint8_t *p, int bytes) {
    for (int line = 0; line < bytes; line += 64) __builtin_prefetch(p + line);
}

INLINE void multiply(int rows, int quads, int bits, int minimums, const linear_int_arguments *a, const uint8_t *panel, int64_t row, const uint8_t *ahead, float *sums) {
    const int64_t groups = a->padded / a->group;
    const ptrdiff_t header = minimums ? 128 : 64, jump = ahead - panel, bytes = a->group * (bits == 4 ? 16 : 32);
    group_of g = {.header = panel, .x = a->tiles + row * a->padded, .scales = a->scales + row * groups, .negated = a->sums + row * groups, .inputs = a->group};
    memset(sums, 0, (size_t)rows * PANEL_OUTPUTS * sizeof *sums);
    for (int64_t i = 0; i < groups; i++) {
        g.codes = g.header + header;
        g.ahead = ahead ? g.codes + jump : NULL;
        if (ahead) ask(g.header + jump, (int)header);
        for (int first = 0; first < QUADS; first += quads, g.ahead = NULL) multiply_group(rows, quads, bits, minimums, &g, first, sums);
        g.header = g.codes + bytes, g.x += rows * a->group, g.scales += rows, g.negated += rows;
    }
}

#endif
