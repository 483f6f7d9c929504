/* Small vector functions shared by the kernels: loads that widen, stores that round, e^x. */
#ifndef VECTOR_BF16_H
#define VECTOR_BF16_H

#include "armature.h"

#ifdef ARMATURE_X86

/* 16 bf16 to fp32; lanes outside the mask are zero. */
INLINE TARGET_BF16 __m512 widen(const uint16_t *p, __mmask16 mask) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, p)), 16));
}

INLINE TARGET_BF16 void narrow(uint16_t *p, __m512 x, __mmask16 mask) { _mm256_mask_storeu_epi16(p, mask, (__m256i)_mm512_cvtneps_pbh(x)); }

INLINE TARGET_BF16 __mmask16 first_lanes(ptrdiff_t count) { return count >= 16 ? 0xffff : (__mmask16)((1u << count) - 1); }

/* e^x, relative error below 2^-22: x = n ln 2 + r, a degree-6 Taylor polynomial on |r| <= ln 2 / 2 (Cephes' range reduction). -inf gives 0, NaN NaN. */
INLINE TARGET_BF16 __m512 exp16(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-104.0f), x); /* the second operand is what comes out where one is NaN */
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 y = _mm512_set1_ps(1.0f / 720);
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f / 120));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f / 24));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f / 6));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(0.5f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(y, n);
}

/* tanh x = 1 - 2 / (e^2x + 1): exact at both ends, absolute error about 1e-7 in between. */
INLINE TARGET_BF16 __m512 tanh16(__m512 x) {
    const __m512 one = _mm512_set1_ps(1.0f), bound = _mm512_set1_ps(20.0f);
    x = _mm512_min_ps(bound, _mm512_max_ps(_mm512_sub_ps(_mm512_setzero_ps(), bound), x));
    __m512 e = exp16(_mm512_add_ps(x, x));
    return _mm512_sub_ps(one, _mm512_div_ps(_mm512_set1_ps(2.0f), _mm512_add_ps(e, one)));
}

#endif
#endif
