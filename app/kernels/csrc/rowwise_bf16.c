/* Rotary positions for the heads of each row, in place. */
#include "vector_bf16.h"

#include <omp.h>

#ifdef ARMATURE_X86

#define MIN_ELEMENTS 16384 /* below this, waking the pool costs more than the work */

/* Turns the first `dim` elements of `heads` heads of each row in place: (a, b) to (a cos - b sin, b cos + a sin). cos, sin [rows, dim] fp32, sin
 * with its sign: negative in the first half. */
EXPORT TARGET_BF16 void armature_turn_bf16(uint16_t *x, ptrdiff_t stride, const float *cos, const float *sin, ptrdiff_t rows, ptrdiff_t heads,
                                           ptrdiff_t head_dim, ptrdiff_t dim) {
#pragma omp parallel for schedule(static) if (rows * heads * dim >= MIN_ELEMENTS)
    for (ptrdiff_t row = 0; row < rows; row++)
        for (ptrdiff_t head = 0; head < heads; head++)
            for (ptrdiff_t i = 0; i < dim / 2; i += 16) {
                __mmask16 mask = first_lanes(dim / 2 - i);
                uint16_t *first = x + row * stride + head * head_dim + i, *second = first + dim / 2;
                const float *c = cos + row * dim + i, *s = sin + row * dim + i;
                __m512 a = widen(first, mask), b = widen(second, mask);
                __m512 turned = _mm512_mul_ps(a, _mm512_maskz_loadu_ps(mask, c));
                narrow(first, _mm512_fmadd_ps(b, _mm512_maskz_loadu_ps(mask, s), turned), mask);
                turned = _mm512_mul_ps(b, _mm512_maskz_loadu_ps(mask, c + dim / 2));
                narrow(second, _mm512_fmadd_ps(a, _mm512_maskz_loadu_ps(mask, s + dim / 2), turned), mask);
            }
}

#endif
