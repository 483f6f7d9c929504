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
    const uint8_t *weight_scales, *codes, *ahead;
    const int8_t *x;
    const float *scales;
    const int32_t *negated;
    int64_t inputs;
} group_of;

/* Add the outputs of quads [first, first + quads), times both scales, to `sums`. `rows`, `quads`, `bits` and
 * `header` are constants at every call. */
INLINE void multiply_group(int rows, int quads, int bits, int header, const group_of *g, int first, float *sums);

/* Four bf16 numbers. */
INLINE float32x4_t widen4(const uint8_t *p) { return vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(p)), 16)); }

/* A group's scales of four outputs from `output` on. */
INLINE float32x4_t group_scales(int header, const uint8_t *scales, int output) {
    if (header != DOUBLE_QUANTIZED) return widen4(scales + output * 2);
    uint32_t four;
    memcpy(&four, scales + output, 4);
    const float32x4_t c = vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(four))))));
    return vmulq_f32(c, vabsq_f32(c));
}

INLINE int8x16_t low_codes(uint8x16_t line) { return vreinterpretq_s8_u8(vandq_u8(line, vdupq_n_u8(15))); }
INLINE int8x16_t high_codes(uint8x16_t line) { return vreinterpretq_s8_u8(vshrq_n_u8(line, 4)); }

/* Prefetch the whole cache lines of `bytes` bytes. */
INLINE void ask(const uint8_t *p, int bytes) {
    for (int line = 0; line < bytes; line += 64) __builtin_prefetch(p + line);
}

INLINE void multiply(int rows, int quads, int bits, int header, const linear_int_arguments *a, const uint8_t *panel, int64_t row, const uint8_t *ahead, float *sums) {
    const int64_t groups = a->padded / a->group;
    const panel_layout layout = layout_of(bits, header, a->group, groups);
    group_of g = {.weight_scales = panel + layout.scales, .codes = panel + layout.codes, .x = a->tiles + row * a->padded, .scales = a->scales + row * groups, .negated = a->sums + row * groups, .inputs = a->group};
    memset(sums, 0, (size_t)rows * PANEL_OUTPUTS * sizeof *sums);
    for (int64_t i = 0; i < groups; i++) {
        g.ahead = NULL;
        if (ahead) {
            ask(ahead, asked_header(header, i));
            g.ahead = ahead + asked_header(header, i), ahead = g.ahead + layout.group_codes;
        }
        for (int first = 0; first < QUADS; first += quads, g.ahead = NULL) multiply_group(rows, quads, bits, header, &g, first, sums);
        g.weight_scales += layout.next_scales, g.codes += layout.next_codes, g.x += rows * a->group, g.scales += rows, g.negated += rows;
    }
}

#endif
