/* What stands between the products of a layer, a row at a time: normalise, gate, turn. fp32 inside, bf16 where a product reads it. */
#include "vector_bf16.h"

#include <omp.h>

#ifdef ARMATURE_X86

#define MIN_ELEMENTS 16384 /* below this, waking the pool costs more than the work */

/* hidden [rows, size] fp32 += added [rows, size] bf16 (where given); out = hidden / rms(hidden) * weight, in bf16. Strides of out: size. */
EXPORT TARGET_BF16 void armature_rms_norm_bf16(float *hidden, ptrdiff_t stride, const uint16_t *added, const float *weight, float eps, uint16_t *out,
                                               ptrdiff_t rows, ptrdiff_t size) {
#pragma omp parallel for schedule(static) if (rows * size >= MIN_ELEMENTS)
    for (ptrdiff_t row = 0; row < rows; row++) {
        float *h = hidden + row * stride;
        __m512 squares = _mm512_setzero_ps();
        for (ptrdiff_t i = 0; i < size; i += 16) {
            __mmask16 mask = first_lanes(size - i);
            __m512 x = _mm512_maskz_loadu_ps(mask, h + i);
            if (added) {
                x = _mm512_add_ps(x, widen(added + row * size + i, mask));
                _mm512_mask_storeu_ps(h + i, mask, x);
            }
            squares = _mm512_fmadd_ps(x, x, squares);
        }
        __m512 mean = _mm512_set1_ps(_mm512_reduce_add_ps(squares) / (float)size + eps);
        __m512 scale = _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_sqrt_ps(mean));
        for (ptrdiff_t i = 0; i < size; i += 16) {
            __mmask16 mask = first_lanes(size - i);
            __m512 x = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, h + i), scale);
            narrow(out + row * size + i, _mm512_mul_ps(x, _mm512_maskz_loadu_ps(mask, weight + i)), mask);
        }
    }
}

INLINE TARGET_BF16 __m512 silu(__m512 x) {
    const __m512 one = _mm512_set1_ps(1.0f);
    return _mm512_div_ps(x, _mm512_add_ps(one, exp16(_mm512_sub_ps(_mm512_setzero_ps(), x))));
}

/* Hendrycks and Gimpel, arXiv 1606.08415, the tanh form. */
INLINE TARGET_BF16 __m512 gelu_tanh(__m512 x) {
    __m512 cube = _mm512_mul_ps(_mm512_mul_ps(x, x), x);
    __m512 inner = _mm512_mul_ps(_mm512_set1_ps(0.7978845608028654f), _mm512_fmadd_ps(_mm512_set1_ps(0.044715f), cube, x));
    return _mm512_mul_ps(_mm512_mul_ps(_mm512_set1_ps(0.5f), x), _mm512_add_ps(_mm512_set1_ps(1.0f), tanh16(inner)));
}

/* gate_up [rows, 2 * size] to out [rows, size]: act(gate) * up; kind 0 is SiLU, 1 GELU by tanh. */
EXPORT TARGET_BF16 void armature_gate_bf16(const uint16_t *gate_up, uint16_t *out, ptrdiff_t rows, ptrdiff_t size, int kind) {
#pragma omp parallel for schedule(static) if (rows * size >= MIN_ELEMENTS)
    for (ptrdiff_t row = 0; row < rows; row++) {
        const uint16_t *gate = gate_up + row * 2 * size, *up = gate + size;
        for (ptrdiff_t i = 0; i < size; i += 16) {
            __mmask16 mask = first_lanes(size - i);
            __m512 x = widen(gate + i, mask), act = kind ? gelu_tanh(x) : silu(x);
            narrow(out + row * size + i, _mm512_mul_ps(act, widen(up + i, mask)), mask);
        }
    }
}

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
