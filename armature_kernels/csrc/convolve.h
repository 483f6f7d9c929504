/* Short convolutions over the rows of a cache, and the rows that they cache. fp32 from the rows to a single rounding at the
 * end. A token's result does not depend on the rest of the batch. */
#ifndef ARMATURE_CONVOLVE_H
#define ARMATURE_CONVOLVE_H

#include "attention.h"
#include "turn.h"

static void convolved_rows(const void *arguments) {
    const convolved_rows_arguments *a = arguments;
#pragma omp for schedule(static)
    for (int64_t row = 0; row < a->rows; row++) {
        const void *first = element_of(a->wide, a->x, row * a->stride), *second = element_of(a->wide, first, a->size), *third = element_of(a->wide, second, a->size);
        void *out = element_of(a->wide, a->out, row * 2 * a->size), *product = element_of(a->wide, out, a->size);
        memcpy(out, second, (size_t)(a->size * (a->wide ? 4 : 2)));
        for (int64_t i = 0; i < a->size; i += LANES)
            row_store_part(a->wide, product, i, row_load_part(a->wide, first, i, a->size - i) * row_load_part(a->wide, third, i, a->size - i), a->size - i);
    }
}

/* Block `block` of head_dim channels of a cached row to x. */
INLINE void load_channels(const convolve_arguments *a, int64_t row, int64_t block, float *x) {
    const int64_t is_value = block >= a->heads, head = is_value ? block - a->heads : block, size = a->head_dim, at = row * a->kv.token_bytes;
    const uint8_t *rows = (is_value ? a->kv.values : a->kv.keys) + at, *scales = is_value ? a->kv.value_scales : a->kv.key_scales;
    if (!scales) {
        const void *from = element_of(a->wide, rows, head * size);
        for (int64_t i = 0; i < size; i += LANES) vf_store(x + i, row_load_part(a->wide, from, i, size - i));
        return;
    }
    float scale;
    memcpy(&scale, scales + at + head * 4, 4);
    for (int64_t i = 0; i < size; i++) x[i] = scale * (float)((const int8_t *)rows)[head * size + i];
}

static void convolve_channels(const convolve_arguments *a, const sequence *s, int64_t token, int64_t block) {
    const int64_t size = a->head_dim, channels = 2 * a->heads * size, first = s->start + token - a->width + 1;
    float x[MOST_HEAD + LANES], sum[MOST_HEAD + LANES];
    memset(sum, 0, sizeof sum);
    for (int64_t k = first < 0 ? -first : 0; k < a->width; k++) {
        const segment *part = segment_at(s, first + k);
        const float *filter = a->filters + k * channels + block * size;
        load_channels(a, part->first + first + k - part->position, block, x);
        for (int64_t i = 0; i < size; i += LANES) vf_store(sum + i, vf_load(sum + i) + vf_load(x + i) * vf_load_part(filter + i, size - i));
    }
    const void *query = element_of(a->wide, a->query, (s->first + token) * a->query_stride + block * size);
    void *out = element_of(a->wide, a->out, (s->first + token) * a->out_stride + block * size);
    for (int64_t i = 0; i < size; i += LANES) row_store_part(a->wide, out, i, vf_load(sum + i) * row_load_part(a->wide, query, i, size - i), size - i);
}

static void convolve(const void *arguments) {
    const convolve_arguments *a = arguments;
    const int64_t blocks = 2 * a->heads;
    for (int64_t i = 0; i < a->step->num_sequences; i++) {
        const sequence *s = &a->step->sequences[i];
#pragma omp for schedule(static) nowait
        for (int64_t n = 0; n < s->num_tokens * blocks; n++) convolve_channels(a, s, n / blocks, n % blocks);
    }
#pragma omp barrier
}

#endif
