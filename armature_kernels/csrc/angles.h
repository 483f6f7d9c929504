/* RoPE angles: cos and sin of positions times frequencies. The angle is rounded to fp32, as in training. The rest is
 * fp64, so that far positions lose nothing; all but one result in a thousand are the nearest fp32 value. */
#ifndef ARMATURE_ANGLES_H
#define ARMATURE_ANGLES_H

#include "level.h"
#include "simd.h"

#define HALF (LANES / 2)

typedef float few __attribute__((vector_size(HALF * 4)));
typedef double vd __attribute__((vector_size(HALF * 8)));
typedef int64_t vl __attribute__((vector_size(HALF * 8)));

INLINE vd vd_select(vl mask, vd yes, vd no) { return (vd)(((vl)yes & mask) | ((vl)no & ~mask)); }

/* |x| < 2^30. The remainder beyond quarter turns is at most pi / 4, where the polynomials are exact enough (Cephes'
 * for fp32: relative error 4e-9). */
INLINE void sin_cos(vd x, vd *sine, vd *cosine) {
    const vd magic = (vd){0} + 6755399441055744.0; /* 1.5 * 2^52: the lowest bits of the sum are the nearest integer */
    const vd turned = x * 0.63661977236758134308 + magic, rest = x - (turned - magic) * 1.57079632679489661923, z = rest * rest;
    const vd s = ((z * -1.9515295891e-4 + 8.3321608736e-3) * z - 1.6666654611e-1) * z * rest + rest;
    const vd c = ((z * 2.443315711809948e-5 - 1.388731625493765e-3) * z + 4.166664568298827e-2) * z * z - 0.5 * z + 1.0;
    const vl quarters = (vl)turned, odd = -(quarters & 1), minus_sine = (quarters & 2) << 62, minus_cosine = ((quarters + 1) & 2) << 62;
    *sine = (vd)((vl)vd_select(odd, c, s) ^ minus_sine);
    *cosine = (vd)((vl)vd_select(odd, s, c) ^ minus_cosine);
}

static void angles(const void *arguments) {
    const angles_arguments *a = arguments;
    const float scale = (float)a->scale;
#pragma omp for schedule(static)
    for (int64_t row = 0; row < a->count; row++) {
        const float position = (float)a->positions[row];
        float *cosine = a->cos + row * 2 * a->half, *sine = a->sin + row * 2 * a->half;
        for (int64_t k = 0; k < a->half; k += HALF) {
            const size_t bytes = (size_t)(a->half - k < HALF ? a->half - k : HALF) * 4;
            few angle = {0};
            memcpy(&angle, a->frequencies + k, bytes);
            angle *= position;
            vd s, c;
            sin_cos(__builtin_convertvector(angle, vd), &s, &c);
            const few up = __builtin_convertvector(s, few) * scale, down = -up, across = __builtin_convertvector(c, few) * scale;
            memcpy(cosine + k, &across, bytes), memcpy(cosine + a->half + k, &across, bytes);
            memcpy(sine + k, &down, bytes), memcpy(sine + a->half + k, &up, bytes);
        }
    }
}

#endif
