/* The step between the product of queries, keys and values and attention: norms of query and key heads, RoPE, and the
 * new keys and values to the cache. fp32 from the product to a single rounding at the end. */
#ifndef ARMATURE_TURN_H
#define ARMATURE_TURN_H

#include "level.h"
#include "simd.h"

#define MOST_HEAD 512 /* elements of a head */

INLINE void subtract_mean(float *x, ptrdiff_t size) {
    vf sum = vf_all(0);
    for (ptrdiff_t i = 0; i < size; i += LANES) sum += vf_load(x + i); /* elements beyond the head are zero, and stay so */
    const float mean = vf_sum(sum) / (float)size;
    for (ptrdiff_t i = 0; i < size; i += LANES) vf_store_part(x + i, vf_load(x + i) - mean, size - i);
}

INLINE void normalise(float *x, ptrdiff_t size, const float *weight, float scale) {
    for (ptrdiff_t i = 0; i < size; i += LANES) vf_store(x + i, vf_load(x + i) * scale * vf_load_part(weight + i, size - i));
}

/* 1 / rms of x [size]; elements beyond it are zero. */
INLINE float head_scale(const float *x, ptrdiff_t size, float eps) {
    vf squares = vf_all(0);
    for (ptrdiff_t i = 0; i < size; i += LANES) squares += vf_load(x + i) * vf_load(x + i);
    return 1.0f / float_sqrt(vf_sum(squares) / (float)size + eps);
}

/* 1 / rms of all queries of a row, and of all its keys, to `scales`; before queries are overwritten. */
INLINE void row_scales(const turn_arguments *a) {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < a->rows * 2; i++) {
        const int64_t first = i % 2 ? a->heads * a->head_dim : 0, size = (i % 2 ? a->kv_heads : a->heads) * a->head_dim;
        const void *x = element_of(a->wide, a->x, i / 2 * a->stride + first);
        vf squares = vf_all(0);
        for (int64_t k = 0; k < size; k += LANES) {
            const vf value = row_load_part(a->wide, x, k, size - k);
            squares += value * value;
        }
        a->scales[i] = 1.0f / float_sqrt(vf_sum(squares) / (float)size + (float)a->eps);
    }
}

/* The weights of a head's norm, NULL without one. */
INLINE const float *head_norm(const turn_arguments *a, int64_t head) {
    return head < a->heads ? a->query_norm : head < a->heads + a->kv_heads ? a->key_norm : a->value_norm;
}

INLINE void normalise_head(const turn_arguments *a, int64_t row, int64_t head, float *x) {
    if (head >= a->heads + a->kv_heads) { /* values have the rms of each head, whatever the others have */
        normalise(x, a->head_dim, a->value_norm, head_scale(x, a->head_dim, (float)a->eps));
        return;
    }
    const int64_t is_key = head >= a->heads, own = is_key ? head - a->heads : head;
    const float *weight = head_norm(a, head) + (a->own_weights ? own * a->head_dim : 0);
    if (a->subtracts_mean) subtract_mean(x, a->head_dim);
    normalise(x, a->head_dim, weight, a->scales ? a->scales[row * 2 + is_key] : head_scale(x, a->head_dim, (float)a->eps));
    if (!a->norm_bias) return;
    for (int64_t i = 0; i < a->head_dim; i += LANES) vf_store(x + i, vf_load(x + i) + vf_load_part(weight + a->head_dim + i, a->head_dim - i));
}

/* RoPE of x [dim] to out: halves (a, b) to (a cos - b sin, b cos + a sin). */
INLINE void turn_head(const float *x, ptrdiff_t dim, const float *cosine, const float *sine, float *out) {
    const ptrdiff_t half = dim / 2;
    for (ptrdiff_t i = 0; i < half; i += LANES) {
        const vf a = vf_load_part(x + i, half - i), b = vf_load_part(x + half + i, half - i);
        vf_store_part(out + i, a * vf_load_part(cosine + i, half - i) + b * vf_load_part(sine + i, half - i), half - i);
        vf_store_part(out + half + i, b * vf_load_part(cosine + half + i, half - i) + a * vf_load_part(sine + half + i, half - i), half - i);
    }
}

INLINE void store_plain_head(int64_t wide, void *target, const float *x, ptrdiff_t size) {
    for (ptrdiff_t i = 0; i < size; i += LANES) row_store_part(wide, target, i, vf_load(x + i), size - i);
}

/* As sink.h quantizes a group: a head with NaN or infinity in it has the scale NaN, one that is nearly zero the scale
 * 0. */
INLINE void store_int8_head(uint8_t *target, uint8_t *scale, const float *x, ptrdiff_t size) {
    vi largest = vi_all(0);
    for (ptrdiff_t i = 0; i < size; i += LANES) largest = vi_max(largest, (vi)vf_load(x + i) & 0x7fffffff);
    const union { int32_t bits; float number; } top = {vi_largest(largest)};
    const int finite = top.bits < 0x7f800000, any = finite && top.number > 1e-35f;
    const float inverse = any ? 127.0f / top.number : 0.0f, own = any ? top.number / 127.0f : finite ? 0.0f : NAN;
    for (ptrdiff_t i = 0; i < size; i += LANES) {
        const vb codes = __builtin_convertvector(any ? vf_round(vf_load(x + i) * inverse) : vi_all(0), vb);
        memcpy(target + i, &codes, (size_t)(size - i < LANES ? size - i : LANES));
    }
    memcpy(scale, &own, 4);
}

INLINE void store_head(const turn_arguments *a, int64_t row, int64_t head, const float *x, void *query) {
    const int64_t size = a->head_dim, own = head - a->heads, kv_head = own < a->kv_heads ? own : own - a->kv_heads;
    if (own < 0) {
        store_plain_head(a->wide, query, x, size);
        return;
    }
    const int64_t at = a->written[row] * a->kv.token_bytes;
    uint8_t *rows = (own < a->kv_heads ? a->kv.keys : a->kv.values) + at, *scales = own < a->kv_heads ? a->kv.key_scales : a->kv.value_scales;
    if (scales) store_int8_head(rows + kv_head * size, scales + at + kv_head * 4, x, size);
    else store_plain_head(a->wide, element_of(a->wide, rows, kv_head * size), x, size);
}

static void turn(const void *arguments) {
    const turn_arguments *a = arguments;
    const int64_t heads = a->heads + 2 * a->kv_heads, size = a->head_dim, turning = a->heads + a->kv_heads;
    if (a->scales) row_scales(a);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < a->rows * heads; i++) {
        const int64_t row = i / heads, head = i % heads;
        const int has_norm = head_norm(a, head) != NULL;
        void *source = element_of(a->wide, a->x, row * a->stride + head * size);
        float x[MOST_HEAD + LANES], turned[MOST_HEAD + LANES];
        for (int64_t k = 0; k < size; k += LANES) vf_store(x + k, row_load_part(a->wide, source, k, size - k));
        if (has_norm && !a->norm_last) normalise_head(a, row, head, x);
        const int64_t dim = head < turning ? a->dim : 0;
        if (dim) {
            for (int64_t k = dim / LANES * LANES; k < size; k += LANES) vf_store(turned + k, vf_load(x + k));
            turn_head(x, dim, a->cos + row * a->dim, a->sin + row * a->dim, turned);
        }
        float *result = dim ? turned : x;
        if (has_norm && a->norm_last) normalise_head(a, row, head, result);
        store_head(a, row, head, result, source);
    }
}

#endif
