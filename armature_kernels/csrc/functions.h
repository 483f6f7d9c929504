/* Exponentials and hyperbolic tangents of vectors. Only simd.h includes this file. */
#ifndef ARMATURE_FUNCTIONS_H
#define ARMATURE_FUNCTIONS_H

#include "simd.h"

/* The processor's own instruction: libm's sqrtf also sets errno. */
INLINE float float_sqrt(float x) {
#if defined(__x86_64__)
    __asm__("sqrtss %0, %0" : "+x"(x));
#elif defined(__aarch64__)
    __asm__("fsqrt %s0, %s0" : "+w"(x));
#else
    x = sqrtf(x);
#endif
    return x;
}

/* e^(x - n ln 2) for x near n ln 2, relative error about 2^-22: a polynomial of the remainder (Cephes' range
 * reduction). */
INLINE vf exp_rest(vf x, vf n) {
    vf r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    vf y = r * (1.0f / 720) + (1.0f / 120);
    y = y * r + (1.0f / 24);
    y = y * r + (1.0f / 6);
    y = y * r + 0.5f;
    y = y * r + 1.0f;
    return y * r + 1.0f;
}

/* e^x. 0 below -87, infinity above 88; NaN stays NaN. */
INLINE vf vf_exp(vf x) {
    vf inside = vf_select(x > -87.0f, x, vf_all(-87.0f)); /* NaN becomes -87 and is restored below */
    inside = vf_min(inside, vf_all(88.0f));
    vi whole = vf_round(inside * 1.44269504088896341f);
    vf n = __builtin_convertvector(whole, vf);
    vf result = exp_rest(inside, n) * (vf)((whole + 127) << 23);
    result = vf_select(x < -87.0f, vf_all(0.0f), result);
    result = vf_select(x > 88.0f, vf_all(INFINITY), result);
    return vf_select(x != x, x, result);
}

/* tanh x = 1 - 2 / (e^2x + 1): exact at both ends, absolute error about 1e-7 in between. */
INLINE vf vf_tanh(vf x) {
    vf inside = vf_min(vf_max(x, vf_all(-20.0f)), vf_all(20.0f));
    vf result = 1.0f - 2.0f / (vf_exp(inside + inside) + 1.0f);
    return vf_select(x != x, x, result);
}

/* 2^r for |r| <= 1/2, relative error about 1e-7. */
INLINE vf exp2_rest(vf r) {
    vf y = r * 0.0013276472454890609f + 0.009675541892647743f;
    y = y * r + 0.05550713092088699f;
    y = y * r + 0.24022120237350464f;
    y = y * r + 0.6931469440460205f;
    y = y * r + 1.0000001192092896f;
    return y;
}

/* 2^x, relative error about 1e-7; 0 below -126. NaN stays NaN. */
INLINE vf vf_exp2(vf x) {
    const vf inside = vf_select(x < -127.0f, vf_all(-127.0f), x);
    const vi whole = vf_round(inside);
    const vf r = inside - __builtin_convertvector(whole, vf);
    return exp2_rest(r) * (vf)((whole + 127) << 23);
}

/* 2^x for x <= 0, relative error about 1e-7: 0 below -126; NaN stays NaN. */
INLINE vf exp2_below(vf x) {
    const vf magic = vf_all(12582912.0f), shifted = x + magic, r = x - (shifted - magic);
    const vf result = exp2_rest(r) * (vf)(((vu)shifted << 23) + (127u << 23)); /* the bits of magic are shifted out */
    return (vf)((vi)result & ~(vi)(x < -126.0f));
}

#endif
