/* Shared by the Arm levels whose integer sums are four outputs of one row: dot products and plain NEON. */
#ifndef ARMATURE_TILE_ROWS4_H
#define ARMATURE_TILE_ROWS4_H

#include "tile_arm.h"

/* The initial value of a sum: int4 codes have the zero point 8 unless the form has minimums. */
INLINE int32x4_t begin(int bits, int header, int32_t negated) {
    return bits == 4 && header != SCALES_AND_MINIMUMS ? vshlq_n_s32(vdupq_n_s32(negated), 3) : vdupq_n_s32(0);
}

/* Add one group's exact sums of a row and a quad of outputs, times both scales, to `sums`. */
INLINE void take_quad(const group_of *g, int row, int quad, int header, int32x4_t exact, float *sums) {
    float *at = sums + row * PANEL_OUTPUTS + quad * 4;
    float32x4_t y = vfmaq_f32(vld1q_f32(at), vcvtq_f32_s32(exact), vmulq_n_f32(group_scales(header, g->weight_scales, quad * 4), g->scales[row]));
    if (header == SCALES_AND_MINIMUMS) y = vfmsq_n_f32(y, widen4(g->weight_scales + 64 + quad * 8), g->scales[row] * (float)g->negated[row]);
    vst1q_f32(at, y);
}

#endif
